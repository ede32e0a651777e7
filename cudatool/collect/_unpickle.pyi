"""What _unpickle.c offers."""

from typing import Any

class Words:
    """A column's 64-bit words, as a buffer."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Unpickler:
    """Reads one pickle of plain data, piece by piece.

    Parameters
    ----------
    row_key
        Dicts with this key become rows of a table, and a list of them the range of their numbers.
    """

    def __init__(self, row_key: str | None = None) -> None: ...
    def feed(self, data: bytes, memory: int = ..., /) -> int:
        """Take whole opcodes from the beginning of `data` and return how many bytes they have.

        What was made of the pickle so far may take `memory` bytes.

        What is left must stand at the beginning of the next piece.

        Raises
        ------
        ImportError
            Something is to be imported, which the message names.
        ValueError
            The pickle is damaged, or holds more than plain data; the message has the pickle as its subject.
        """

    @property
    def done(self) -> bool:
        """Whether the pickle has come to its end."""

    @property
    def rows(self) -> int:
        """Number of rows so far."""

    @property
    def objects(self) -> list[Any]:
        """What cells refer to."""

    def value(self) -> Any:
        """Return the pickle's value; ValueError before its end."""

    def take_columns(self) -> dict[str, Words | int]:
        """Return the columns, and release them: a word for each row, or one for all rows.

        A word is ``number << 1 | 1``, ``index of an object << 1``, or ``-2**63`` where the row does not have the key.
        """
