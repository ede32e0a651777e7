"""The tables that the records of a snapshot point into: names, stacks and frames, streams and pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cudatool.collect.torch_columns import require
from cudatool.trace.interned import Interned
from cudatool.trace.model import Frame

__all__ = ["MOST_NAME", "SnapshotTables"]

MOST_NAME: Final = 200
"""Characters of a name that is made of a value."""
_SCALARS: Final = (str, int, float, type(None))
_OF_FRAMES: Final = frozenset(("filename", "name", "line"))
_MOST_ENTRIES: Final = 16  # of a dict that becomes a name
_DEEP: Final = 256  # frames of a stack that no program has often


class SnapshotTables:
    """Numbers what the events, blocks and segments of a snapshot name, while it is read.

    Parameters
    ----------
    notes
        Gets a sentence where two values have one text.
    """

    def __init__(self, notes: list[str]) -> None:
        self.names = Interned([""])
        self.stacks = Interned[tuple[int, ...]]([()])
        self.frames = Interned[tuple[Frame, tuple[tuple[str, Any], ...]]]()
        self.metadata: dict[int, Any] = {}
        self.streams = Interned[tuple[int, int]](first=1)
        self.pools = Interned([(0, 0)])
        self._notes = notes
        # Frames are shared objects in the pickle, which the reader keeps alive: look each one up by identity once.
        self._frame_by_id: dict[int, int] = {}
        self._stack_by_ids: dict[tuple[int, ...], int] = {(): 0}
        self._stack_by_list: dict[int, tuple[Sequence[Any], int]] = {}

    def stream(self, device: int, handle: int) -> int:
        """Return the number of a stream."""
        return self.streams[device, require(handle, int, "a stream")]

    def pool(self, pool_id: Sequence[int]) -> int:
        """Return the number of a pool."""
        first, second = _ints(list(pool_id), "a part of a pool's id")
        return self.pools[first, second]

    def name(self, text: Any) -> int:
        """Return the index of a text; of a dict of user metadata, of its keys and values."""
        if type(text) is str:
            return self.names[text]
        spelled = str(text)[:MOST_NAME] if isinstance(text, int | float) else f"({type(text).__name__})"
        if (
            isinstance(text, dict)
            and len(text) <= _MOST_ENTRIES
            and all(isinstance(v, _SCALARS) for v in text.values())
        ):
            spelled = ", ".join(f"{key}={value}" for key, value in text.items())[:MOST_NAME]
        number = self.names[spelled]
        if self.metadata.setdefault(number, text) != text:
            self._notes.append(f"user metadata with the same text was treated as one: {spelled[:40]}")
        return number

    def stack(self, frames: Sequence[Any]) -> int:
        """Return the number of a stack, by its frames, innermost first."""
        known = self._stack_by_list.get(id(frames))
        if known is not None:  # one list that all events share: visiting its frames for each event would be quadratic
            return known[1]
        ids = tuple(map(id, frames))
        found = self._stack_by_ids.get(ids)
        if found is None:
            stack = tuple(self._frame(frame) for frame in frames)
            found = self._stack_by_ids[ids] = self.stacks[stack]
        if len(ids) > _DEEP:
            self._stack_by_list[id(frames)] = frames, found  # kept alive, so that no other list gets its id
        return found

    def _frame(self, frame: Mapping[str, Any]) -> int:
        found = self._frame_by_id.get(id(frame))
        if found is None:
            line = require(require(frame, dict, "a frame")["line"], int, "a line")
            line = -1 if line == 2**64 - 1 else line  # what PyTorch writes if it has none
            if abs(line) >= 1 << 31:
                raise ValueError(f"a frame at line {line}")
            file, name = (require(frame[key], str, f"a frame's {key}") for key in ("filename", "name"))
            more = {key: value for key, value in frame.items() if key not in _OF_FRAMES}
            said = tuple((key, value) for key, value in more.items() if isinstance(value, _SCALARS))
            found = self._frame_by_id[id(frame)] = self.frames[Frame(file, name, line), said]
        return found


def _ints(values: list[Any], what: str) -> list[int]:
    """Return `values`, which must all be integers: NumPy would unpack other things that a file may hold."""
    for kind in set(map(type, values)) - {int, bool}:
        raise TypeError(f"{what} is a {kind.__name__}")
    return values
