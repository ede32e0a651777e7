"""What is done to modules of others when a program has imported them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    Loader = MetaPathFinder = object  # the classes take as long to load as the rest of the driver's choice

__all__ = ["AfterImport"]


class AfterImport(MetaPathFinder):
    """Calls a function with each module that it waits for when that has been imported, or at once.

    Each function is called once for each :meth:`start`. Its exceptions are logged: they must not reach the program,
    which imports a module.

    Parameters
    ----------
    then
        The function of each module, by the module's name.
    """

    def __init__(self, then: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._then = dict(then)
        self._waiting: set[str] = set()  # names

    def start(self) -> None:
        """Begin to wait for the modules."""
        self._waiting = set(self._then)
        sys.meta_path.insert(0, self)
        for name, then in self._then.items():
            # A function before this one may have imported the module, and had this one called.
            if name in self._waiting and (module := sys.modules.get(name)) is not None:
                self._found(name)
                _call(then, module)

    def stop(self) -> None:
        """Wait no longer. Stopping again changes nothing."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _found(self, name: str) -> None:
        self._waiting.remove(name)
        if not self._waiting:
            self.stop()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as if this were not here, and then call."""
        if fullname not in self._waiting:
            return None
        self._found(fullname)  # which is not asked again in the next line
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenLoader(spec.loader, self._then[fullname])
        return spec


class _ThenLoader(Loader):
    """Another loader, and what to call when it is done. The module then has that other loader alone."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _call(self._then, module)


def _call(then: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        then(module)
    except Exception:
        import logging  # takes a while to load

        logging.getLogger("cudatool").exception("cudatool does not watch %s", module.__name__)
