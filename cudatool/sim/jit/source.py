"""A module's PTX, and what is known of it without reading it: kept between processes, as its native code is.

A program whose kernels ran before needs no more of a module than this. Where instructions count, as for a kernel that
is translated or checked, the text is parsed.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from cudatool import ptx
from cudatool.loading.whole_imports import whole_imports
from cudatool.sim.jit.code import NativeCache, cache_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Conduct", "DeclaredKernel", "GlobalVariable", "ModuleFacts", "Param", "Sizes", "Source"]


class Param(NamedTuple):
    """A kernel parameter: where it lies in the packed buffer, bytes. `is_pointer` is what ``.ptr`` says, a hint."""

    offset: int
    size: int
    align: int
    is_pointer: bool


class GlobalVariable(NamedTuple):
    """A variable that the driver must place in device memory.

    Attributes
    ----------
    hexadecimal
        Its first bytes; the rest is zero.
    relocations
        ``(offset, symbol, addend)``: the 8 bytes at `offset` hold the address of `symbol` plus `addend`.
    """

    name: str
    size: int
    align: int
    hexadecimal: str
    relocations: list[tuple[int, str, int]]
    constant: bool
    managed: bool

    @property
    def initial(self) -> bytes:
        """Its first bytes."""
        return bytes.fromhex(self.hexadecimal)


class DeclaredKernel(NamedTuple):
    """A kernel as it is declared.

    Attributes
    ----------
    max_threads
        Of a block.
    instructions
        How many it has.
    digest
        Of all text that its native code depends on.
    """

    params: list[Param]
    max_threads: int
    instructions: int
    digest: str


class ModuleFacts(NamedTuple):
    """What a module declares.

    Attributes
    ----------
    variables
        In ``.global`` and ``.const`` memory.
    constant_bytes, shared_bytes
        Of constant memory, and of shared memory, anywhere in it.
    kernels
        Those that have a body, by name.
    names
        Of all kernels.
    functions
        What pointers to its device functions hold.
    registers
        Of a thread of each kernel, where a linker has found that out.
    """

    variables: list[GlobalVariable]
    constant_bytes: int
    shared_bytes: int
    kernels: dict[str, DeclaredKernel]
    names: list[str]
    functions: dict[str, int]
    registers: dict[str, int]

    @classmethod
    def read(cls, facts: Sequence[Any]) -> ModuleFacts:
        """Return the facts from what they are kept as."""
        variables, constant_bytes, shared_bytes, kernels, *rest = facts
        declared = {name: ([Param(*one) for one in params], *others) for name, (params, *others) in kernels.items()}
        return cls(
            [GlobalVariable(*one) for one in variables],
            constant_bytes,
            shared_bytes,
            {name: DeclaredKernel(*one) for name, one in declared.items()},
            *rest,
        )


class Conduct(NamedTuple):
    """What a kernel does that others depend on.

    Attributes
    ----------
    work
        See :class:`cudatool.sim.profile.ThreadWork`.
    orders_others
        See :func:`cudatool.ptx.orders_others`.
    """

    work: list[int]
    orders_others: list[bool]


class Sizes(NamedTuple):
    """What a launch of a kernel needs to know of its code: see :class:`.Layout` and :class:`.KernelText`."""

    static_shared: int
    dynamic_offset: int
    local_bytes: int
    system_calls: list[str]


class Source:
    """The PTX of a module or a linked image.

    Parameters
    ----------
    text
        With or without a terminating NUL.
    cache
        Where facts and native code are kept between processes; None keeps none.
    parsed
        The module, if it was parsed before.

    Raises
    ------
    PtxError
        The text is not PTX.
    """

    def __init__(self, text: bytes, cache: NativeCache | None, *, parsed: ptx.Module | None = None) -> None:
        self._text = text
        self._parsed = parsed
        self.cache = cache
        self.facts = ModuleFacts.read(self.kept("module", hashlib.sha256(text).hexdigest(), self._declared))

    @property
    def parsed(self) -> ptx.Module:
        """The module, as it was parsed."""
        if self._parsed is None:
            self._parsed = ptx.parse_image(self._text)
        return self._parsed

    @cached_property
    def calls(self) -> ptx.ModuleCalls:
        """Which of its functions call which."""
        return ptx.ModuleCalls.of(self.parsed)

    def conduct(self, kernel: str) -> Conduct:
        """Return what a kernel does that others depend on."""
        return Conduct(*self.kept("conduct", self.facts.kernels[kernel].digest, lambda: self._conduct(kernel)))

    def kept(self, what: str, digest: str, find: Callable[[], Any]) -> Any:
        """Return what `find` finds, a JSON value: from the cache, if it was found before for text of this digest."""
        key = cache_key(what, digest)
        data = None if self.cache is None else self.cache.get(key)
        if data is not None:
            return json.loads(data)
        found = find()
        if self.cache is not None:
            self.cache.put(key, json.dumps(found).encode())
        return found

    def _declared(self) -> ModuleFacts:
        with whole_imports():
            from cudatool.sim.jit.declarations import module_facts  # most programs' facts come from the cache

        return module_facts(self.parsed)

    def _conduct(self, kernel: str) -> Conduct:
        with whole_imports():
            from cudatool.sim.jit.kernel_work import work_of_a_thread  # most programs' facts come from the cache

        orders_others = ptx.orders_others(self._text, lambda: self.parsed, kernel)
        return Conduct(list(work_of_a_thread(self.parsed.kernels[kernel])), list(orders_others))
