"""What all callbacks do: name the parts of a training run, and keep its last events for when memory runs out."""

from __future__ import annotations

from typing import Any

from cudatool import recording
from cudatool.recording.armed import Armed, ArmOptions
from cudatool.runtime.ranges import range

__all__ = ["TrainingSteps"]


class TrainingSteps:
    """The ranges of a training run, of which one is open at a time, and what is armed while it lasts.

    Parameters
    ----------
    arms, given
        Whether anything is armed, and the fields of its :class:`ArmOptions`.

    Raises
    ------
    UsageError
        There is no such field, or one is of another type.
    """

    def __init__(self, arms: bool, given: dict[str, Any]) -> None:
        self._options = ArmOptions.of(given) if arms else None
        self._armed: Armed | None = None
        self._open: range | None = None

    def start(self) -> None:
        """Training begins. A process that is being recorded is not armed: its recording has more."""
        if self._options is not None and self._armed is None and not recording.is_observing():
            self._armed = Armed(self._options)

    def begin(self, name: str) -> None:
        """Something begins, and what was open ends."""
        self.end()
        self._open = range(name)
        self._open.__enter__()

    @property
    def is_open(self) -> bool:
        """Whether something is open."""
        return self._open is not None

    def end(self) -> None:
        """What is open ends."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def stop(self) -> None:
        """Training has ended, in whatever way."""
        self.end()
        if self._armed is not None:
            self._armed.close()
            self._armed = None
