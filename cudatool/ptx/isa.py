"""What each opcode of PTX is: one row of a table, from the PTX ISA, chapter 9.7 (instructions).

A row holds what is true of the opcode whatever its modifiers say. What modifiers change is read where it matters:
accesses in :mod:`.effects`, classes in :mod:`.kernel_summary`, pointers in :mod:`.dataflow`. What the software device
makes of an instruction stands in :mod:`cudatool.sim.jit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import Final

__all__ = ["Access", "InstructionClass", "Mode", "Opcode", "opcode_of"]


class Mode(IntFlag):
    """How memory is accessed; the values are those of a trace's access flags and of the software device's footprints.

    An atomic update is neither a READ nor a WRITE.
    """

    READ = 1
    WRITE = 2
    ATOMIC = 4


class InstructionClass(StrEnum):
    """What an instruction is for. Each belongs to one class."""

    INTEGER = "integer"
    FLOAT = "floating point"
    CONVERSION = "conversion"
    PREDICATE = "predicate"
    MOVE = "move"
    PARAMETER = "parameter"
    GLOBAL_LOAD = "global load"
    GLOBAL_STORE = "global store"
    SHARED = "shared memory"
    LOCAL = "local memory"
    CONSTANT = "constant load"
    GENERIC = "generic load or store"
    ATOMIC = "atomic"
    TEXTURE = "texture and surface"
    ASYNC_COPY = "async copy"
    TENSOR_CORE = "tensor core"
    SYNCHRONIZATION = "synchronization"
    WARP = "warp collective"
    BRANCH = "branch"
    CALL = "call"
    OTHER = "other"


class Access(StrEnum):
    """What an opcode does where its address operands point."""

    NONE = "none"
    """Nothing: a hint, a barrier, an opaque handle, or only shared and special memory."""
    READ = "read"
    WRITE = "write"
    ATOMIC = "atomic"
    BY_MODIFIER = "by modifier"
    """One of these, as a modifier says."""
    UNKNOWN = "unknown"
    """Not known: it may do anything."""


@dataclass(frozen=True, slots=True)
class Opcode:
    """One opcode.

    Attributes
    ----------
    kind
        Its class. OTHER: the one of the types that it computes with. Loads and stores are of their state space's.
    access
        What it does where its address operands point.
    is_pure
        Whether its value depends on its operands alone, and is cheap: it may be computed again rather than kept.
    operands
        The fewest that an instruction has of which a value is followed.
    address
        Which operand is an address, of what loads, stores or updates memory; None for all else.
    uses_handle
        Whether it accesses the texture or surface whose handle stands in its brackets.
    """

    kind: InstructionClass = InstructionClass.OTHER
    access: Access = Access.UNKNOWN
    is_pure: bool = False
    operands: int = 2
    address: int | None = None
    uses_handle: bool = False


def _tensor(access: Access = Access.NONE) -> Opcode:
    return Opcode(InstructionClass.TENSOR_CORE, access)


_PURE: Final = Opcode(is_pure=True)
_WARP: Final = Opcode(InstructionClass.WARP)
_BRANCH: Final = Opcode(InstructionClass.BRANCH)
_MOVE: Final = InstructionClass.MOVE
_SYNC: Final = InstructionClass.SYNCHRONIZATION
_TEXTURE: Final = InstructionClass.TEXTURE

_ROWS: Final[dict[str, Opcode]] = {
    # Arithmetic and logic, of the class that their types say.
    "add sub mul neg shl shr or xor not bfe": _PURE,
    "and min max": Opcode(is_pure=True, operands=3),
    "mad": Opcode(is_pure=True, operands=4),
    "madc": Opcode(operands=4),
    "cvt": Opcode(InstructionClass.CONVERSION, is_pure=True),
    "setp": Opcode(InstructionClass.PREDICATE, is_pure=True),
    "set testp": Opcode(InstructionClass.PREDICATE),
    # Moves.
    "mov cvta": Opcode(_MOVE, Access.NONE, is_pure=True),
    "selp": Opcode(_MOVE, is_pure=True, operands=3),
    "slct": Opcode(_MOVE, operands=3),
    "isspacep mapa": Opcode(_MOVE, Access.NONE),
    "prmt getctarank": Opcode(_MOVE),
    # Memory.
    "ld ldu": Opcode(InstructionClass.GLOBAL_LOAD, Access.READ, address=1),
    "st": Opcode(InstructionClass.GLOBAL_STORE, Access.WRITE, address=0),
    "atom": Opcode(InstructionClass.ATOMIC, Access.ATOMIC, operands=3, address=1),
    "red": Opcode(InstructionClass.ATOMIC, Access.ATOMIC, address=0),
    "multimem": Opcode(InstructionClass.ATOMIC, Access.BY_MODIFIER),
    "cp": Opcode(InstructionClass.ASYNC_COPY, operands=0),  # its accesses by the whole of its modifiers, else anything
    "discard tensormap": Opcode(access=Access.WRITE),
    "prefetch prefetchu applypriority createpolicy clusterlaunchcontrol": Opcode(access=Access.NONE),
    # Matrices: of ldmatrix and stmatrix in shared memory only.
    "mma wgmma ldmatrix stmatrix tcgen05": _tensor(),
    "movmatrix": _tensor(Access.UNKNOWN),
    "wmma": _tensor(Access.BY_MODIFIER),
    # Textures and surfaces, by an opaque handle.
    "tex tld4 suld sust sured": Opcode(_TEXTURE, Access.NONE, uses_handle=True),
    "txq suq istypep": Opcode(_TEXTURE, Access.NONE),
    # Threads among each other.
    "bar barrier membar fence mbarrier": Opcode(_SYNC, Access.NONE),
    "griddepcontrol nanosleep": Opcode(_SYNC),
    "shfl vote match redux activemask elect": _WARP,
    # Control.
    "bra brx ret exit trap brkpt": _BRANCH,
    "call": Opcode(InstructionClass.CALL, Access.NONE, operands=1),
}
_BY_OPCODE: Final = {opcode: row for opcodes, row in _ROWS.items() for opcode in opcodes.split()}
_UNKNOWN: Final = Opcode()


def opcode_of(opcode: str) -> Opcode:
    """Return the row of an opcode; one that is not known may do anything to the memory that it points at."""
    return _BY_OPCODE.get(opcode, _UNKNOWN)
