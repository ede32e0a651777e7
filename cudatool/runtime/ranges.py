"""Named ranges of the program, for timelines."""

from __future__ import annotations

from types import TracebackType

from cudatool.errors import UsageError
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["range"]


class range:  # noqa: N801 - as torch.cuda.nvtx has it
    """Context manager that names what happens inside, in traces.

    Parameters
    ----------
    name
        Any text; ranges may be nested.

    Raises
    ------
    UsageError
        `name` is no string.
    """

    __slots__ = ("_pushed", "name")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise UsageError(f'a range is named by a string, not {type(name).__name__}; pass f"step {{number}}"')
        self.name = name
        self._pushed = False

    def __enter__(self) -> None:
        self._pushed = hooks.active
        if self._pushed:
            hooks.emit(Kind.RANGE_PUSH, name=self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pushed:
            hooks.emit(Kind.RANGE_POP)
