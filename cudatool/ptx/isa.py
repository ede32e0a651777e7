"""What each opcode of PTX is: one row of a table, from the PTX ISA, chapter 9.7 (instructions).

A row holds what is true of the opcode whatever its modifiers say. What modifiers change is read in one place each:
accesses and results in :mod:`.effects`, classes in :mod:`.kernel_summary`. What the software device makes of an
instruction stands in :mod:`cudatool.sim.jit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import Final

__all__ = [
    "FLOATS",
    "INTEGERS",
    "JUMPS",
    "STRONG",
    "TYPE_BYTES",
    "WITHOUT_RESULT",
    "Control",
    "Cost",
    "InstructionClass",
    "Mode",
    "Opcode",
    "OpcodeAccess",
    "Passes",
    "opcode_of",
]

_TYPES: Final = {
    1: "u8 s8 b8 pred e4m3 e5m2 u4 s4 b1",  # of the last three, a byte of a matrix holds several
    2: "u16 s16 b16 f16 bf16 e4m3x2 e5m2x2",
    4: "u32 s32 b32 f32 tf32 f16x2 bf16x2 u16x2 s16x2 e4m3x4 e5m2x4",
    8: "u64 s64 b64 f64",
    16: "b128",
}
TYPE_BYTES: Final = {name: size for size, names in _TYPES.items() for name in names.split()}
"""The types that a modifier can name, and the bytes of a value (chapter 5.2)."""

INTEGERS: Final = frozenset(f"{kind}{bits}" for kind in "usb" for bits in (32, 64))
"""The types that places and addresses are computed in."""

FLOATS: Final = frozenset({"f16", "bf16", "f32", "f64"})
"""The types of floating-point arithmetic."""

STRONG: Final = frozenset({"volatile", "acquire", "release", "relaxed", "mmio"})
"""Modifiers of loads and stores that other threads, or the host, may wait for (chapter 8)."""


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


class OpcodeAccess(StrEnum):
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


class Control(StrEnum):
    """What an opcode does to the flow of control, where its guard holds."""

    NEXT = "next"
    """Nothing: the next instruction follows."""
    BRANCH = "branch"
    """The instruction at the label that its operand names follows."""
    TABLE = "table"
    """That at one of the labels of a list, by an index, follows."""
    END = "end"
    """The thread leaves the function."""
    STOP = "stop"
    """The kernel ends with an error."""


class Passes(StrEnum):
    """What its result may point at, of an opcode that can carry a pointer: the rules of :mod:`.dataflow`."""

    NOTHING = "nothing"
    """Its result is a number."""
    MOVE = "move"
    """Its second operand as it is."""
    COPY = "copy"
    """Its second operand, unless it computes with floating point."""
    MASK = "mask"
    """A sum, or how an address is aligned."""
    SUM = "sum"
    PRODUCT = "product"
    """A number, and its last operand."""
    CHOICE = "choice"
    """One of two operands."""
    SHIFT = "shift"
    """A part of its second operand."""
    LOAD = "load"
    STORE = "store"
    UPDATE = "update"
    """What lay in memory before its operands were put there."""
    COPY_TO_SHARED = "copy to shared"
    CALL = "call"
    STACK = "stack"
    """New local memory."""


class Cost(StrEnum):
    """What an instruction costs in virtual time, beyond that it is executed."""

    NONE = "none"
    TRAFFIC = "traffic"
    """The bytes that it accesses in global memory."""
    SLEEP = "sleep"
    """As many ns as its operand says."""


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
    has_result
        Whether its first operand, if that is no address, is a register that it sets.
    passes
        What its result may point at.
    control
        Which instruction may follow.
    cost
        What it costs in virtual time.
    can_be_asynchronous
        Whether it has a form that accesses memory after it was executed (``.async``, ``.bulk``).
    is_hint
        Whether it only advises caches about what its address operands point at.
    is_fence
        Whether it orders the accesses of its thread as other threads see them.
    """

    kind: InstructionClass = InstructionClass.OTHER
    access: OpcodeAccess = OpcodeAccess.UNKNOWN
    is_pure: bool = False
    operands: int = 2
    address: int | None = None
    uses_handle: bool = False
    has_result: bool = True
    passes: Passes = Passes.NOTHING
    control: Control = Control.NEXT
    cost: Cost = Cost.NONE
    can_be_asynchronous: bool = False
    is_hint: bool = False
    is_fence: bool = False


def _tensor(access: OpcodeAccess = OpcodeAccess.NONE) -> Opcode:
    return Opcode(InstructionClass.TENSOR_CORE, access)


_CONVERSION: Final = InstructionClass.CONVERSION
_PREDICATE: Final = InstructionClass.PREDICATE
_ATOMIC: Final = InstructionClass.ATOMIC
_BRANCH: Final = InstructionClass.BRANCH
_MOVE: Final = InstructionClass.MOVE
_SYNC: Final = InstructionClass.SYNCHRONIZATION
_TEXTURE: Final = InstructionClass.TEXTURE
_WARP: Final = InstructionClass.WARP

_ROWS: Final[dict[str, Opcode]] = {
    # Arithmetic and logic, of the class that their types say.
    "add sub or xor": Opcode(is_pure=True, passes=Passes.SUM),
    "addc subc lop3 bfi shf": Opcode(passes=Passes.SUM),
    "fma mul24 mad24 div rem sad dp2a dp4a rcp sqrt rsqrt sin cos ex2 lg2 tanh copysign": Opcode(),
    "brev clz popc bfind bmsk fns cnot": Opcode(),
    "vadd vsub vabsdiff vmin vmax vset vadd2 vsub2 vabsdiff2 vavrg2 vmin2 vmax2 vset2": Opcode(),
    "vadd4 vsub4 vabsdiff4 vavrg4 vmin4 vmax4 vset4 vshl vshr vmad": Opcode(),
    "neg not": Opcode(is_pure=True, passes=Passes.COPY),
    "abs szext": Opcode(passes=Passes.COPY),
    "shl shr bfe": Opcode(is_pure=True, passes=Passes.SHIFT),
    "mul": Opcode(is_pure=True),
    "and": Opcode(is_pure=True, operands=3, passes=Passes.MASK),
    "min max": Opcode(is_pure=True, operands=3, passes=Passes.CHOICE),
    "mad": Opcode(is_pure=True, operands=4, passes=Passes.PRODUCT),
    "madc": Opcode(operands=4, passes=Passes.PRODUCT),
    "cvt": Opcode(_CONVERSION, is_pure=True, passes=Passes.COPY),
    "setp": Opcode(_PREDICATE, is_pure=True),
    "set testp": Opcode(_PREDICATE),
    # Moves.
    "mov": Opcode(_MOVE, OpcodeAccess.NONE, is_pure=True, passes=Passes.MOVE),
    "cvta": Opcode(_MOVE, OpcodeAccess.NONE, is_pure=True, passes=Passes.COPY),
    "selp": Opcode(_MOVE, is_pure=True, operands=3, passes=Passes.CHOICE),
    "slct": Opcode(_MOVE, operands=3, passes=Passes.CHOICE),
    "isspacep": Opcode(_MOVE, OpcodeAccess.NONE),
    "mapa": Opcode(_MOVE, OpcodeAccess.NONE, passes=Passes.MOVE),
    "prmt": Opcode(_MOVE, passes=Passes.SUM),
    "getctarank": Opcode(_MOVE),
    # Memory.
    "ld ldu": Opcode(InstructionClass.GLOBAL_LOAD, OpcodeAccess.READ, address=1, passes=Passes.LOAD, cost=Cost.TRAFFIC),
    "st": Opcode(
        InstructionClass.GLOBAL_STORE,
        OpcodeAccess.WRITE,
        address=0,
        has_result=False,
        passes=Passes.STORE,
        cost=Cost.TRAFFIC,
        can_be_asynchronous=True,
    ),
    "atom": Opcode(_ATOMIC, OpcodeAccess.ATOMIC, operands=3, address=1, passes=Passes.UPDATE, cost=Cost.TRAFFIC),
    "red": Opcode(
        _ATOMIC,
        OpcodeAccess.ATOMIC,
        address=0,
        has_result=False,
        passes=Passes.UPDATE,
        cost=Cost.TRAFFIC,
        can_be_asynchronous=True,
    ),
    "multimem": Opcode(_ATOMIC, OpcodeAccess.BY_MODIFIER, cost=Cost.TRAFFIC),
    "cp": Opcode(  # its accesses by the whole of its modifiers, else anything
        InstructionClass.ASYNC_COPY,
        operands=0,
        passes=Passes.COPY_TO_SHARED,
        cost=Cost.TRAFFIC,
        can_be_asynchronous=True,
    ),
    "discard": Opcode(access=OpcodeAccess.WRITE, has_result=False),
    "tensormap": Opcode(access=OpcodeAccess.WRITE),
    "prefetch prefetchu applypriority": Opcode(access=OpcodeAccess.NONE, has_result=False, is_hint=True),
    "createpolicy": Opcode(access=OpcodeAccess.NONE, is_hint=True),
    "clusterlaunchcontrol": Opcode(access=OpcodeAccess.NONE),
    # Matrices: of ldmatrix and stmatrix in shared memory only.
    "mma wgmma ldmatrix stmatrix tcgen05": _tensor(),
    "movmatrix": _tensor(OpcodeAccess.UNKNOWN),
    "wmma": _tensor(OpcodeAccess.BY_MODIFIER),
    # Textures and surfaces, by an opaque handle.
    "tex tld4 suld sust sured": Opcode(_TEXTURE, OpcodeAccess.NONE, uses_handle=True),
    "txq suq istypep": Opcode(_TEXTURE, OpcodeAccess.NONE),
    # Threads among each other.
    "bar barrier": Opcode(_SYNC, OpcodeAccess.NONE, has_result=False),
    "membar fence": Opcode(_SYNC, OpcodeAccess.NONE, has_result=False, is_fence=True),
    "mbarrier": Opcode(_SYNC, OpcodeAccess.NONE),
    "griddepcontrol": Opcode(_SYNC, has_result=False),
    "nanosleep": Opcode(_SYNC, has_result=False, cost=Cost.SLEEP),
    "shfl": Opcode(_WARP, passes=Passes.MOVE),
    "vote match redux activemask elect": Opcode(_WARP),
    # Control.
    "bra": Opcode(_BRANCH, has_result=False, control=Control.BRANCH),
    "brx": Opcode(_BRANCH, has_result=False, control=Control.TABLE),
    "ret exit": Opcode(_BRANCH, has_result=False, control=Control.END),
    "trap": Opcode(_BRANCH, has_result=False, control=Control.STOP),
    "brkpt": Opcode(_BRANCH, has_result=False),
    "call": Opcode(InstructionClass.CALL, OpcodeAccess.NONE, operands=1, has_result=False, passes=Passes.CALL),
    # Others.
    "alloca": Opcode(passes=Passes.STACK),
    "stackrestore pmevent setmaxnreg": Opcode(has_result=False),
    # None of PTX: what the software device inserts (cudatool.sim.jit.steps, .progress) and what takes a call's place.
    "yield step progress overflow": Opcode(has_result=False),
}
_BY_OPCODE: Final = {opcode: row for opcodes, row in _ROWS.items() for opcode in opcodes.split()}
_UNKNOWN: Final = Opcode()
WITHOUT_RESULT: Final = frozenset(opcode for opcode, row in _BY_OPCODE.items() if not row.has_result)
"""Opcodes whose first operand is no register that they set. What looks at every instruction asks for no more."""
JUMPS: Final = frozenset(opcode for opcode, row in _BY_OPCODE.items() if row.control is not Control.NEXT)
"""Opcodes after which another instruction than the next may follow, or none."""


def opcode_of(opcode: str) -> Opcode:
    """Return the row of an opcode; one that is not known may do anything to the memory that it points at."""
    return _BY_OPCODE.get(opcode, _UNKNOWN)
