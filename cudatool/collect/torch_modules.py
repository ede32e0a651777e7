"""Gives the modules of PyTorch that run, and the tensors that they hold, their paths: ``ResNet.layer1.0.conv1``.

The log of :file:`_cupti.c` notes with each stack the module that is being called, by its address, without the
interpreter's lock. It has no name for it then, and has :meth:`TorchModules.name_called` run soon after::

    a module without a name allocates       the log notes the path of its classes: ResNet.Conv2d
    the interpreter's next instructions     name_called(): the module is still being called, and with it those that call
                                            it. All modules inside of the outermost one get names, too
    the log is read                         ResNet.Conv2d was ResNet.conv1; from here on all are known

Parameters and what optimizers keep are mostly made outside of any call: :meth:`TorchModules.sample` has the main thread
look at each. Nothing here keeps a module, an optimizer or a tensor alive.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect import _cupti
from cudatool.collect.replaced import Replaced
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, Kind, TensorRole

__all__ = ["TorchModules"]

_log = logging.getLogger("cudatool.collect")

_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes in which wrappers of PyTorch keep the module that the program made; its path goes without them."""
_FIRST_PAUSE_S: Final = 1.0
_FIELDS: Final = ("device", "flags", "name", "address", "size")
_AT_ONCE: Final = 64  # tensors: what moves while they are looked at may get the name of what it takes the place of


class _Named(weakref.ref[Any]):
    """A module that has a path, until it is destroyed: then another object may get its address."""

    __slots__ = ("address", "path")
    address: int
    path: str


class TorchModules:
    """Names modules and their tensors from now until :meth:`stop`.

    Parameters
    ----------
    torch
        The module.
    report
        Called with records of tensors and the names that they refer to, as :func:`cudatool.trace.hooks.forward_rows`.
    was_imported
        Whether the program may have optimizers already.
    """

    def __init__(
        self,
        torch: Any,
        report: Callable[[npt.NDArray[np.void], list[str]], None],
        *,
        was_imported: bool,
    ) -> None:
        self._torch, self._report = torch, report
        self._named: dict[int, _Named] = {}
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replaced = Replaced()
        self._reported: dict[tuple[str, TensorRole, int], tuple[int, int]] = {}
        self._found_before = (0, 0)
        self._due = self._pause = 0.0
        self._wants_tensors = False
        self._found: deque[tuple[npt.NDArray[np.void], list[str]]] = deque()
        call = torch.nn.Module.__call__.__code__
        self.is_watching = "self" in call.co_varnames[:1] and "self" not in call.co_cellvars
        """Whether calls of modules have the form that is known."""
        if self.is_watching:
            _cupti.watch_modules(call, self._on_main_thread)
            self._watch_optimizers(was_imported)

    def stop(self) -> None:
        """Stop. Stopping again changes nothing."""
        if self.is_watching:
            _cupti.watch_modules(None, None)
            self._replaced.put_back()
            self._named.clear()
        self.is_watching = False

    def _watch_optimizers(self, was_imported: bool) -> None:
        optimizer = self._torch.optim.Optimizer
        if was_imported:
            self._optimizers.update(_cupti.instances(optimizer))
        init, known = optimizer.__init__, self._optimizers

        @wraps(init)
        def noting(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            known.add(self)

        self._replaced.replace(optimizer, "__init__", noting)

    def _on_main_thread(self) -> None:
        """Do what the log, or :meth:`sample`, asked for. This runs between any two instructions of the program."""
        self.name_called()
        if self._wants_tensors:
            self._wants_tensors = False
            try:
                self._look(again=False)
            except Exception as error:  # whatever state the program is in
                _log.warning("tensors of modules are not recorded: %s", error)

    # ---- modules ----

    def name_called(self) -> None:
        """Name the modules that are being called, in any thread, and those inside of them."""
        begin = time.monotonic_ns()
        try:
            seen = _cupti.unnamed_modules()
            if not seen:
                return
            for called in _cupti.called_modules():
                self._name(called)
            seen += _cupti.unnamed_modules()  # by other threads, until there were names
            _cupti.modules_named(self._stood_for(seen), time.monotonic_ns() - begin)
        except Exception as error:  # this runs between any two instructions of the program
            _log.warning("modules of PyTorch get no names: %s", error)

    def _stood_for(self, seen: list[tuple[int, int, int]]) -> dict[int, str]:
        """Return the path of the module that each path of classes stood for, empty if it is not known to be one."""
        found: dict[int, set[str]] = {}
        for number, module, of_class in seen:
            known = self._named.get(module)
            # A module of another thread may be gone, and this one have its address: then mostly of another class.
            is_it = known is not None and id(type(known())) == of_class
            found.setdefault(number, set()).add(known.path if known is not None and is_it else "")
        is_all = len(seen) < _cupti.MOST_UNNAMED
        return {number: paths.pop() if is_all and len(paths) == 1 else "" for number, paths in found.items()}

    def _name(self, called: list[Any]) -> None:
        """Name modules that call each other, the outermost first."""
        caller, path = None, ""
        for module in called:
            known = self._named.get(id(module))
            if known is None:
                known = self._add_all(module, _path_in(caller, path, module))
            caller, path = module, known.path

    def _add_all(self, module: Any, path: str) -> _Named:
        """Name a module and those inside of it; a module in several places has the path of the first."""
        known = self._add(module, path)
        waiting, done = [(module, path)], {id(module)}
        while waiting:
            outer, path = waiting.pop()
            for name, inner in _members(outer, "_modules"):
                if id(inner) not in done:
                    done.add(id(inner))
                    own = path if name in _WRAPPERS else f"{path}.{name}"
                    self._add(inner, own)
                    waiting.append((inner, own))
        return known

    def _add(self, module: Any, path: str) -> _Named:
        known = self._named[id(module)] = _Named(module, self._forget)
        known.address, known.path = id(module), path
        _cupti.name_module(known.address, path)
        return known

    def _forget(self, known: weakref.ref[Any]) -> None:
        assert isinstance(known, _Named)
        if self._named.get(known.address) is known:
            del self._named[known.address]
            _cupti.name_module(known.address, None)

    # ---- tensors ----

    def sample(self) -> None:
        """Have tensors looked at that may be new, ever more seldom while neither modules nor optimizers change.

        Another thread than the main one may call this. It looks at no tensor: what the main thread does without the
        interpreter's lock may change one at any time.
        """
        if not self.is_watching:
            return
        self.name_called()  # of threads that run while the main one waits, which runs what the log asks for
        self._pass_on()
        found = len(self._named), sum(len(optimizer.state) for optimizer in list(self._optimizers))
        now = time.monotonic()
        if found != self._found_before:
            self._found_before, self._pause = found, _FIRST_PAUSE_S
        elif now < self._due:
            return
        self._due, self._pause = now + self._pause, 2 * self._pause
        self._wants_tensors = True
        _cupti.name_soon()

    def name_tensors(self) -> None:
        """Report each tensor that modules and optimizers hold now; in another than the main thread, what that found."""
        if self.is_watching:
            if threading.current_thread() is threading.main_thread():
                self._look(again=True)
            self._pass_on()

    def _look(self, *, again: bool) -> None:
        """Look at each tensor that modules and optimizers hold on a GPU, or, unless `again`, that is new."""
        tensors = self._tensors()
        with self._torch._C.DisableTorchFunction():
            while some := list(islice(tensors, _AT_ONCE)):
                found: list[tuple[int, ...]] = []
                names = {"": 0}
                for path, role, number, tensor in some:
                    place = _place(tensor)
                    if place is None:
                        continue
                    device, address, size = place
                    key = path, role, number
                    if again or self._reported.get(key) != (device, address):
                        self._reported[key] = device, address
                        found.append((device, role, names.setdefault(path, len(names)), address, size))
                if found:
                    records = np.zeros(len(found), RECORD)
                    for field, column in zip(_FIELDS, np.array(found, np.int64).T, strict=True):
                        records[field] = column
                    records["kind"], records["time"] = Kind.MODULE_TENSOR, time.monotonic_ns()
                    records["thread"] = hooks.thread_id()
                    self._found.append((records, list(names)))

    def _pass_on(self) -> None:
        while self._found:
            self._report(*self._found.popleft())

    def _tensors(self) -> Iterator[tuple[str, TensorRole, int, Any]]:
        """Yield path, role, which of several, and the tensor.

        None is one that Python has no object for yet, as gradients may be: to make that object is not safe while a
        backward pass runs in other threads.
        """
        path_of: dict[int, str] = {}
        for known in list(self._named.values()):
            module = known()
            for name, tensor in _members(module, "_parameters"):
                path = path_of.setdefault(id(tensor), f"{known.path}.{name}")
                yield path, TensorRole.PARAMETER, 0, tensor
            for name, tensor in _members(module, "_buffers"):
                yield f"{known.path}.{name}", TensorRole.BUFFER, 0, tensor
        for optimizer in list(self._optimizers):
            for parameter, state in list(optimizer.state.items()):
                path = path_of.get(id(parameter), "")
                if path and isinstance(state, dict):
                    for number, tensor in enumerate(list(state.values())):
                        yield path, TensorRole.OPTIMIZER_STATE, number, tensor


def _path_in(caller: Any, path: str, module: Any) -> str:
    """Return the path of a module that has none, given the module that calls it, or None, and the path of that."""
    name = next((name for name, inner in _members(caller, "_modules") if inner is module), None)
    if name is not None:
        return path if name in _WRAPPERS else f"{path}.{name}"
    while inside := [inner for name, inner in _members(module, "_modules") if name in _WRAPPERS]:
        module = inside[0]
    return f"{path}.{type(module).__name__}" if path else type(module).__name__


def _members(module: Any, kind: str) -> list[tuple[str, Any]]:
    """Return what a module holds, by name. The module's own methods may be the program's: they are not called."""
    held = None if module is None else module.__dict__.get(kind)
    return [(name, one) for name, one in list(held.items()) if one is not None] if held else []


def _place(tensor: Any) -> tuple[int, int, int] | None:
    """Return device, address of the storage, and bytes of a tensor; None if it is not a GPU's, or is not known."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a tensor that several processes hold in parts
    try:
        if not local.is_cuda:
            return None
        item = local.element_size()
        address, size = local.data_ptr() - local.storage_offset() * item, local.numel() * item
        return (local.device.index, address, size) if address and size else None
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # no tensor, or one without memory
        return None
