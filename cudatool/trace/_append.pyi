"""What _append.c offers: writing an event to a trace, where nothing is new but the event."""

from threading import RLock

from cudatool.trace.events import Event

class Tail:
    """Bytes that are filled one after the other, after a header that says how many are valid.

    Parameters
    ----------
    bytes
        Of the header and of what is to be filled, aligned to 8 bytes. They stay locked until :meth:`_release`.
    header
        Size of the header. Its third word of 8 bytes is the number.

    Attributes
    ----------
    used, capacity
        Bytes that are valid, and that there is room for.
    """

    used: int
    capacity: int

    def __init__(self, bytes: memoryview, header: int) -> None: ...
    def append(self, data: bytes | memoryview, /) -> None:
        """Add `data`: it is valid from here on. ValueError if there is no room."""

    def filled(self, size: int, /) -> None:
        """Note that the next `size` bytes are filled: they are valid from here on."""

    def _release(self) -> None: ...

class Writer:
    """What a recorder is called as: it writes an event that fits, and has nothing new, or else calls :meth:`_write`.

    Attributes
    ----------
    _lock
        Held by who uses the others.
    _records
        The chunk that events go to.
    _names, _stacks, _threads
        The indices of what is in the file already.
    _full_bytes
        In chunks of records before that.
    _event, _before
        The last event given, and how many bytes of records there were before it.
    _closed
        Whether nothing is to be written any more.
    """

    _lock: RLock
    _records: Tail
    _names: dict[str, int]
    _stacks: dict[int, int]
    _threads: dict[int, int]
    _full_bytes: int
    _event: Event | None
    _before: int
    _closed: bool

    def __call__(self, event: Event, /) -> None: ...
