"""Records PyTorch's caching allocator on a GPU, in an unmodified program, in addition to what CUPTI reports.

When the program imports ``torch``, a small extension (:file:`torch_blocks.cpp`) is loaded that writes what the
allocator does to the log of :mod:`cudatool.collect.cupti`, which has the rest: kernels, streams, events, copies.
Operators and their tensors are not recorded; :mod:`cudatool.collect.torch_program` does that, at a higher cost.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.collect import _cupti
from cudatool.collect.replaced import Replaced
from cudatool.collect.torch_build import TorchBuildError, load
from cudatool.collect.torch_modules import TorchModules
from cudatool.loading.after_import import AfterImport
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Kind, WarningCode, WarningFlag

__all__ = ["TorchBlocks"]

_log = logging.getLogger("cudatool.collect")


class TorchBlocks:
    """Watches PyTorch's allocator, from its import or from now if it is imported already, until :meth:`stop`.

    Parameters
    ----------
    report
        Called with records, and the names that they refer to, of tensors that modules hold: these do not come through
        the log.
    """

    def __init__(self, report: Callable[[npt.NDArray[np.void], list[str]], None]) -> None:
        self._report = report
        self._extension: Any = None
        self._modules: TorchModules | None = None
        self._replaced = Replaced()
        self._was_imported = "torch" in sys.modules
        self._finder = AfterImport({"torch": self._watch})
        self._finder.start()

    @property
    def is_watching(self) -> bool:
        """Whether PyTorch has been imported and is watched."""
        return self._extension is not None

    def sample(self) -> None:
        """Name the tensors of modules and optimizers that may be new."""
        if self._modules is not None:
            self._modules.sample()

    def name_tensors(self) -> None:
        """Name the tensors that modules and optimizers hold now."""
        if self._modules is not None:
            self._modules.name_tensors()

    def stop(self) -> None:
        """Stop watching. Stopping again changes nothing."""
        self._finder.stop()
        if self._modules is not None:
            self._modules.name_tensors()
            self._modules.stop()
        self._modules = None
        if self._extension is not None:
            self._extension.stop()
            self._replaced.put_back()
        self._extension = None

    def _watch(self, torch: ModuleType) -> None:
        if not torch.version.cuda:
            return  # this PyTorch has no CUDA device
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            return  # it takes all memory from the driver, and CUPTI records that
        try:
            self._extension = load(torch, "torch_blocks")
        except TorchBuildError as error:
            _give_up(str(error))
            return
        stacks.hide(os.path.dirname(torch.__file__ or ""))
        if not self._extension.start(_cupti.log):
            text = "memory of PyTorch's backward pass has the line of backward(), not that of the forward operator"
            hooks.emit(Kind.WARNING, name=text, aux0=WarningCode.PYTORCH_BACKWARD_LINES)
            _log.warning("%s", text)
        self._modules = TorchModules(torch, self._report, was_imported=self._was_imported)
        os.register_at_fork(after_in_child=self._extension.forget)
        torch.cuda._lazy_call(self._watch_memory)
        self._wrap(torch)

    def _watch_memory(self) -> None:
        if self._extension is not None:
            try:
                self._extension.watch_memory()
            except RuntimeError as error:  # an allocator that is not the caching one
                self.stop()
                _give_up(str(error).partition("\n")[0])

    def _wrap(self, torch: ModuleType) -> None:
        """Wrap what only Python sees: where the backward graph is run, and when a graph is captured."""
        extension = self._extension
        graphs = torch.cuda.CUDAGraph
        begin, end = graphs.capture_begin, graphs.capture_end

        @wraps(begin)
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = begin(self, *args, **kwargs)
            extension.capture(True)
            return result

        @wraps(end)
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return end(self, *args, **kwargs)
            finally:
                extension.capture(False)

        self._replaced.replace(graphs, "capture_begin", capture_begin)
        self._replaced.replace(graphs, "capture_end", capture_end)
        self._replaced.around_backward(torch, lambda: extension.backward(True), lambda: extension.backward(False))


def _give_up(reason: str) -> None:
    text = f"PyTorch's memory is known by its segments alone: {reason}"
    hooks.emit(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.PYTORCH_BLOCKS_NOT_WATCHED)
    _log.warning("%s", text)
