"""What _emit.c offers: how an event goes to its subscribers while none of them fails."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from cudatool.trace.events import Event, Kind

class Thread:
    """What the hooks know about one thread.

    Attributes
    ----------
    id
        Its number in events.
    depth, correlation
        Operations of our runtime that it is in, one inside of the other, and the number of the outermost.
    host_function, node
        The correlation of the host function that the driver calls on it, and the graph's node that calls that.
    pending
        Events that no subscriber has yet.
    emitting
        Whether subscribers are being called on it.
    named
        Whether its name is known.
    began
        Whether hooks.py has begun with an event since it was asked to.
    lost
        Whether an event is missing that a signal handler's exception interrupted, of which no warning tells yet.
    """

    id: int
    depth: int
    correlation: int
    host_function: int
    node: int
    emitting: bool
    named: bool
    began: bool
    lost: bool

    @property
    def pending(self) -> list[Event]: ...

def emit(
    kind: Kind,
    *,
    device: int = -1,
    stream: int = 0,
    correlation: int = 0,
    name: str = "",
    address: int = 0,
    size: int = 0,
    flags: int = 0,
    aux0: int = 0,
    aux1: int = 0,
    stack: int | None = None,
) -> None:
    """Send one event to every subscriber. Call it only if :data:`active`.

    Parameters
    ----------
    kind, device, stream, correlation, name, address, size, flags, aux0, aux1
        See :data:`cudatool.trace.events.FIELDS` for what each means for `kind`.
    stack
        A stack captured earlier; default: the Python stack of the caller, without cudatool's own frames, where
        the kind has one.
    """

def current_operation() -> int:
    """Return the correlation id of the runtime operation open on this thread, 0 if none."""

def install(
    *,
    names: dict[str, Any],
    local: threading.local,
    event_type: type[Event],
    capture: Callable[[], int],
    emit_with_care: Callable[..., None],
    deliver_with_care: Callable[..., BaseException | None],
    with_stacks: Iterable[Kind],
    of_host_functions: Iterable[Kind],
) -> None:
    """Give what this needs of hooks.py; `names` is its namespace, whose ``_subscribers`` each event looks at.

    `emit_with_care` takes over where an event is not made yet, or could not be delivered, and `deliver_with_care` where
    a subscriber raised something. Events of the kinds `with_stacks` have the stack of who emits them; those of kinds
    `of_host_functions` belong to the host function that runs.
    """
