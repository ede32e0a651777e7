"""Emission of one LLVM function: PTX registers, operands, addresses. What instructions do is in the tables.

Every PTX register is an ``alloca``; LLVM makes SSA values of them. A register is read as the type that the instruction
names, whatever type it was declared with, as PTX allows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cudatool.ptx import (
    FRAME_SCALE,
    STACK,
    Address,
    Function,
    Immediate,
    Instruction,
    InstructionClass,
    Operand,
    PtxError,
    Register,
    Symbol,
    Variable,
    opcode_of,
    symbols,
    type_bytes,
)
from cudatool.sim.jit.argument_ranges import Near
from cudatool.sim.jit.context import EXIT, Context, Stop
from cudatool.sim.jit.instrument import Flag, Instrument, Mode, Needless, observe
from cudatool.source_text import SourceLine

__all__ = [
    "ASYNC_QUEUE",
    "ATOMIC",
    "ENVIRONMENT",
    "READ",
    "SPECIAL",
    "WRITE",
    "Emitter",
    "Layout",
    "UnsupportedInstruction",
    "UntranslatedInstruction",
    "llvm_type",
    "storage_type",
]

# What every generated function gets: %zero is a null pointer that the optimizer does not know to be null. Global
# addresses are offsets from it, which lets loops over threads be vectorized.
ENVIRONMENT = "ptr %context, ptr %zero, ptr %shared, ptr %params, ptr %slots, ptr %locals, i32 %bx, i32 %by, i32 %bz"

READ, WRITE, ATOMIC = Mode.READ, Mode.WRITE, Mode.ATOMIC


ASYNC_QUEUE = "%async"  # the local variable in which a thread keeps the copies that it has begun (:mod:`.asynchronous`)
_ASYNC_QUEUE_BYTES = 528
_RESERVED_SHARED = 1024  # bytes: the attribute RESERVED_SHARED_MEMORY_PER_BLOCK


class UnsupportedInstruction(PtxError):
    """A kernel uses something that the software device cannot run; names it, the kernel and the source line.

    Parameters
    ----------
    instruction
        As PTX spells it.
    kernel
        Its name.
    source
        The line of the CUDA source, None where the PTX does not say.
    line
        PTX line, 0 where that is not known either.
    """

    def __init__(self, instruction: str, kernel: str, source: SourceLine | None, line: int) -> None:
        where = source or SourceLine("", line)
        super().__init__(f"{kernel}: the software device does not support {instruction} ({where})", line)
        self.args = (instruction, kernel, source, line)
        self.instruction, self.kernel, self.source = instruction, kernel, source

    def __str__(self) -> str:
        where = self.source or SourceLine("", self.line)
        return f"{self.kernel}: the software device does not support {self.instruction} ({where})"

    def at(self, kernel: str, source: SourceLine | None) -> UnsupportedInstruction:
        """Return the same error, of this kernel and line of the CUDA source."""
        return UnsupportedInstruction(self.instruction, kernel, source, self.line)


class UntranslatedInstruction(UnsupportedInstruction):
    """The translator failed at an instruction, or LLVM refuses its code, as `reason` says. A fault of ours."""

    def __init__(self, instruction: str, kernel: str, source: SourceLine | None, line: int, reason: str) -> None:
        super().__init__(instruction, kernel, source, line)
        self.args = (instruction, kernel, source, line, reason)
        self.reason = reason

    def __str__(self) -> str:
        where = self.source or (SourceLine("", self.line) if self.line else None)
        place = f" ({where})" if where else ""
        return f"{self.kernel}: the software device cannot translate {self.instruction}{place}: {self.reason}"

    def at(self, kernel: str, source: SourceLine | None) -> UntranslatedInstruction:
        return UntranslatedInstruction(self.instruction, kernel, source, self.line, self.reason)


_LLVM = {
    "pred": "i1",
    "f16": "half",
    "f32": "float",
    "f64": "double",
    "bf16": "float",
    "f16x2": "<2 x half>",
    "bf16x2": "<2 x float>",
    "u16x2": "<2 x i16>",
    "s16x2": "<2 x i16>",
    "tf32": "float",
}


def llvm_type(name: str) -> str:
    """Return the LLVM type in which values of a PTX type are computed (bf16 as float, as no host computes in it)."""
    return _LLVM.get(name) or f"i{8 * type_bytes(name)}"


def storage_type(name: str) -> str:
    """Return the LLVM type of a register declared as `name`."""
    return _LLVM[name] if name in ("pred", "f32", "f64") else f"i{8 * type_bytes(name)}"


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _uses_reserved_shared(function: Function) -> bool:
    names = {operand.name for i in function.instructions for operand in i.operands if isinstance(operand, Register)}
    return any(name.startswith("%reserved_smem_offset") for name in names)


@dataclass(slots=True)
class Layout:
    """Where a kernel's variables lie: offsets in its shared, local and parameter windows, table slots of globals.

    `constants` are the sizes, bytes, of those globals that are in constant memory. `kernels` names the module's
    kernels, which have no address. `reserved_shared` bytes of shared memory, the first ones, are the system's:
    ``cooperative_groups`` keeps the state of tiles of several warps there.
    """

    param_offsets: dict[str, int] = field(default_factory=dict)
    param_bytes: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    reserved_shared: int = 0
    static_shared: int = 0
    shared_align: int = 16
    dynamic_offset: int = 0
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    local_align: int = 16
    globals: dict[str, int] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    kernels: frozenset[str] = frozenset()

    @classmethod
    def of_params(cls, function: Function) -> Layout:
        """Lay out the parameters only."""
        layout = cls()
        for parameter in function.params:
            layout.param_bytes = _align(layout.param_bytes, parameter.align)
            layout.param_offsets[parameter.name] = layout.param_bytes
            layout.param_bytes += parameter.size
        return layout

    @classmethod
    def of(cls, function: Function, module_variables: dict[str, Variable], globals_: dict[str, int]) -> Layout:
        """Lay out the variables of `function` (calls inlined)."""
        layout = cls.of_params(function)
        layout.globals = globals_
        layout.constants = {name: v.size for name, v in module_variables.items() if v.space == "const"}
        used = {name for i in function.instructions for operand in i.operands for name in symbols(operand)}
        layout.reserved_shared = _RESERVED_SHARED if _uses_reserved_shared(function) else 0
        variables = [v for v in (*module_variables.values(), *function.variables.values()) if v.name in used]
        # Local arrays last: what is written beyond their end is beyond the thread's local memory.
        variables.sort(key=lambda variable: variable.space == "local")
        layout.shared_align = max([16, *(variable.align for variable in variables if variable.space == "shared")])
        if any(opcode_of(i.opcode).kind is InstructionClass.ASYNC_COPY for i in function.instructions):
            layout.local[ASYNC_QUEUE] = layout.local_bytes
            layout.local_bytes += _ASYNC_QUEUE_BYTES
        dynamic = []
        for variable in variables:
            if variable.space == "shared" and not variable.size:
                dynamic.append(variable)
            elif variable.space == "shared":
                layout.static_shared = _align(layout.static_shared, variable.align)
                layout.shared[variable.name] = layout.reserved_shared + layout.static_shared
                layout.static_shared += variable.size
            elif variable.space in ("local", "param"):  # parameters of calls are local variables
                layout.local_align = max(layout.local_align, variable.align)
                layout.local_bytes = _align(layout.local_bytes, max(variable.align, 8))
                layout.local[variable.name] = layout.local_bytes
                layout.local_bytes += variable.size
        layout.local_bytes = _align(layout.local_bytes, layout.local_align)  # of a thread; the next one's follows
        end = layout.reserved_shared + layout.static_shared
        layout.dynamic_offset = _align(end, max([16, *(variable.align for variable in dynamic)]))
        for variable in dynamic:  # all of them name the same memory, after the rest
            layout.shared[variable.name] = layout.dynamic_offset
        return layout


class Emitter:
    """Builds the text of one LLVM function.

    Parameters
    ----------
    function
        The kernel, calls inlined.
    layout
        Where its variables lie.
    instrument
        What its accesses are instrumented for.
    needless
        The checks that are left out, and of which lines (:mod:`.independent`).
    parallel_generic
        Whether generic addresses never reach local memory, which the threads of a loop share one after the other.
    indices
        The registers that hold a special register, and which: what tells a thread's index from other sums.
    """

    def __init__(
        self,
        function: Function,
        layout: Layout,
        *,
        instrument: Instrument,
        needless: Needless,
        ranges: Mapping[int, int],
        parallel_generic: bool,
        indices: dict[str, str],
    ) -> None:
        self.function = function
        self.layout = layout
        self.instrument = instrument
        self.needless = needless
        self.ranges = ranges
        self.parallel_generic = parallel_generic
        self.indices = indices
        self.lines: list[str] = []
        self.declarations: set[str] = set()
        self.validated: set[int] = set()  # sizes of generic accesses that are checked
        self.used: dict[str, str] = {}
        self.count = 0
        self.instruction: Instruction | None = None
        self.orders_by_flags = True  # whether the kernel has fences, or accesses that release or acquire
        self.near: Mapping[int, tuple[Near, int]] = {}  # of the basic block (:func:`.argument_ranges.near_accesses`)
        self.counts_accesses = False  # whether %accesses counts what the thread accessed since it was last suspended

    # ---- text ----

    def emit(self, line: str) -> None:
        self.lines.append("  " + line)

    def name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def op(self, text: str) -> str:
        """Emit ``%v = text`` and return ``%v``."""
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def call(self, result: str, function: str, *arguments: str) -> str:
        """Emit a call; arguments are ``"type value"``."""
        types = (
            argument[: argument.index(">") + 1] if argument[0] == "<" else argument.split(" ", 1)[0]
            for argument in arguments
        )
        self.declarations.add(f"declare {result} @{function}({', '.join(types)})")
        return self.op(f"call {result} @{function}({', '.join(arguments)})")

    def define(self, text: str) -> None:
        """Add a function or constant to the module, once however often it is asked for."""
        self.declarations.add(text)

    def nested(self) -> Emitter:
        """Return an emitter for the body of a function that this one calls."""
        other = Emitter(
            self.function,
            self.layout,
            instrument=self.instrument,
            needless=self.needless,
            ranges=self.ranges,
            parallel_generic=self.parallel_generic,
            indices=self.indices,
        )
        other.declarations, other.instruction = self.declarations, self.instruction
        return other

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def new_label(self) -> str:
        self.count += 1
        return f"l{self.count}"

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Emit what is emitted inside of the ``with`` statement as what only happens if `condition` (i1) holds."""
        do, after = self.new_label(), self.new_label()
        self.emit(f"br i1 {condition}, label %{do}, label %{after}")
        self.label(do)
        yield
        self.emit(f"br label %{after}")
        self.label(after)

    def unsupported(self, what: str = "") -> UnsupportedInstruction:
        instruction = self.instruction
        assert instruction is not None
        text = f"{instruction.name} ({what})" if what else instruction.name
        return UnsupportedInstruction(text, self.function.name, None, instruction.line)

    # ---- registers ----

    def variable(self, register: str) -> tuple[str, str]:
        """Return the alloca and LLVM type of a declared register."""
        declared = self.function.registers.get(register)
        if declared is None:
            raise self.unsupported(f"register {register}")
        slot = self.used.get(register)
        if slot is None:
            slot = self.used[register] = f'%"register {register}"'
        return slot, storage_type(declared)

    def read(self, register: str) -> tuple[str, str]:
        slot, kind = self.variable(register)
        return self.op(f"load {kind}, ptr {slot}"), kind

    def write(self, register: str, value: str, kind: str, *, signed: bool = False) -> None:
        """Store `value` of LLVM type `kind` in a register of any width."""
        if register == "_":
            return
        slot, wanted = self.variable(register)
        self.emit(f"store {wanted} {self.convert(value, kind, wanted, signed=signed)}, ptr {slot}")

    def convert(self, value: str, have: str, want: str, *, signed: bool = False) -> str:
        """Reinterpret bits; widths that differ are truncated or extended."""
        if have == want:
            return value
        integers = []
        for kind in (have, want):
            integers.append(kind if kind[0] == "i" else f"i{_BITS[kind]}")
        if have != integers[0]:
            value = self.op(f"bitcast {have} {value} to {integers[0]}")
        a, b = (int(kind[1:]) for kind in integers)
        if a > b:
            value = self.op(f"trunc i{a} {value} to i{b}")
        elif a < b:
            value = self.op(f"{'sext' if signed else 'zext'} i{a} {value} to i{b}")
        if want != integers[1]:
            value = self.op(f"bitcast {integers[1]} {value} to {want}")
        return value

    # ---- operands ----

    def get(self, operand: Operand, type_name: str) -> str:
        """Return the value of `operand` read as PTX type `type_name`, in its :func:`llvm_type`."""
        if type_name in ("bf16", "bf16x2"):
            return self.from_bits(self.get(operand, f"b{8 * type_bytes(type_name)}"), type_name)
        kind = llvm_type(type_name)
        if isinstance(operand, Immediate):
            return self.literal(operand, type_name)
        if isinstance(operand, Symbol):
            return self.convert(self.address_of(operand), "i64", kind)
        if not isinstance(operand, Register):
            raise self.unsupported("operand")
        if operand.name in self.function.registers:
            value, have = self.read(operand.name)
            value = self.convert(value, have, kind, signed=type_name[0] == "s")
        else:
            special = SPECIAL.get(operand.name)
            if special is None:
                raise self.unsupported(operand.name)
            value, have = special(self)
            value = self.convert(value, have, kind)
        return self.op(f"xor i1 {value}, true") if operand.negated else value

    def literal(self, literal: Immediate, type_name: str) -> str:
        if type_name == "pred":
            return "true" if literal.value else "false"
        bits = 8 * type_bytes(type_name)
        if type_name in ("f32", "f64"):
            if literal.width == bits:
                pattern = literal.bits
            else:
                pattern = int.from_bytes(struct.pack("<f" if bits == 32 else "<d", literal.value), "little")
            return f"bitcast (i{bits} {pattern} to {_LLVM[type_name]})"
        value = literal.bits if literal.width else int(literal.value)
        value &= (1 << bits) - 1
        if type_name in ("f16", "f16x2"):
            return f"bitcast (i{bits} {value} to {_LLVM[type_name]})"
        return str(value)

    def constant(self, operand: Operand) -> int | None:
        """Return the value of an integer literal, else None."""
        return int(operand.value) if isinstance(operand, Immediate) and not operand.width else None

    def set(self, operand: Operand, value: str, type_name: str) -> None:
        """Write a value of PTX type `type_name` to a destination register."""
        if not isinstance(operand, Register):
            raise self.unsupported("destination")
        if type_name in ("bf16", "bf16x2"):
            self.write(operand.name, self.to_bits(value, type_name), f"i{8 * type_bytes(type_name)}")
        else:
            self.write(operand.name, value, llvm_type(type_name), signed=type_name[0] == "s")

    def from_bits(self, bits: str, type_name: str) -> str:
        """Return the value of a PTX type, in its :func:`llvm_type`, that an integer of its size holds."""
        if type_name == "bf16":
            raw = self.op(f"zext i16 {bits} to i32")
            return self.op(f"bitcast i32 {self.op(f'shl i32 {raw}, 16')} to float")
        if type_name == "bf16x2":
            wide = self.op(f"zext <2 x i16> {self.op(f'bitcast i32 {bits} to <2 x i16>')} to <2 x i32>")
            return self.op(f"bitcast <2 x i32> {self.op(f'shl <2 x i32> {wide}, splat (i32 16)')} to <2 x float>")
        return self.convert(bits, f"i{8 * type_bytes(type_name)}", llvm_type(type_name))

    def to_bits(self, value: str, type_name: str) -> str:
        """Return the integer that holds a value of a PTX type."""
        if type_name == "bf16":
            return self.call("i16", "bf16_round", f"float {value}")
        if type_name == "bf16x2":
            parts = [self.op(f"extractelement <2 x float> {value}, i32 {i}") for i in (0, 1)]
            return self.pack([self.call("i16", "bf16_round", f"float {part}") for part in parts], "i16")
        return self.convert(value, llvm_type(type_name), f"i{8 * type_bytes(type_name)}")

    def pack(self, values: list[str], kind: str) -> str:
        """Return the integer whose parts, least significant first, are `values`.

        Without vectors in between, of which LLVM could make no vectors of threads.
        """
        bits = int(kind[1:])
        whole = f"i{len(values) * bits}"
        found = self.op(f"zext {kind} {values[0]} to {whole}")
        for index, value in enumerate(values[1:], 1):
            part = self.op(f"shl nuw {whole} {self.op(f'zext {kind} {value} to {whole}')}, {index * bits}")
            found = self.op(f"or disjoint {whole} {found}, {part}")
        return found

    def unpack(self, whole: str, kind: str, count: int) -> list[str]:
        """Return the parts of an integer, least significant first."""
        bits = int(kind[1:])
        wide = f"i{count * bits}"
        shifted = [whole, *(self.op(f"lshr {wide} {whole}, {index * bits}") for index in range(1, count))]
        return [self.op(f"trunc {wide} {value} to {kind}") for value in shifted]

    # ---- addresses ----

    def field(self, name: str, index: int = -1) -> str:
        """Return a field of the context, or an element of one; it does not change during a launch."""
        member = getattr(Context, name)
        bytes_ = member.size if index < 0 else 8
        kind = f"i{8 * bytes_}"
        pointer = self.op(f"getelementptr i8, ptr %context, i64 {member.offset + bytes_ * max(index, 0)}")
        limits = ", !range !2" if name in ("block_x", "block_y", "block_z", "threads") else ""
        return self.op(f"load {kind}, ptr {pointer}, !invariant.load !0{limits}")

    def symbol_space(self, name: str) -> str:
        """Return the state space in which a symbol lies, ``"entry"`` for a kernel parameter."""
        layout = self.layout
        if name in layout.param_offsets:
            return "entry"
        if name in layout.local:
            return "local"
        if name in layout.shared:
            return "shared"
        if name in layout.globals:
            return "global"
        if name in layout.kernels:
            raise self.unsupported(f"address of kernel {name}: kernels cannot launch kernels")
        raise self.unsupported(f"symbol {name}")

    def address_of(self, symbol: Symbol) -> str:
        """Return the i64 address of a symbol within its own state space."""
        space = self.symbol_space(symbol.name)
        if space == "entry":
            base = self.op("ptrtoint ptr %params to i64")
            return self.op(f"add i64 {base}, {self.layout.param_offsets[symbol.name] + symbol.offset}")
        if space == "local":
            return str(self.layout.local[symbol.name] + symbol.offset)
        if space == "shared":
            return str(self.layout.shared[symbol.name] + symbol.offset)
        table = self.op(f"inttoptr i64 {self.field('globals')} to ptr")
        entry = self.op(f"getelementptr i64, ptr {table}, i64 {self.layout.globals[symbol.name]}")
        value = self.op(f"load i64, ptr {entry}, !invariant.load !0")
        return self.op(f"add i64 {value}, {symbol.offset}") if symbol.offset else value

    def pointer(self, space: str, address: Operand) -> tuple[str, str]:
        """Return the state space that ``[address]`` really is in, and a native pointer to it."""
        if not isinstance(address, Address):
            raise self.unsupported("address")
        base, offset = address.base, address.offset
        if isinstance(base, Symbol):
            own = self.symbol_space(base.name)
            if own == "entry":
                at = self.layout.param_offsets[base.name] + base.offset + offset
                return "entry", self.op(f"getelementptr i8, ptr %params, i64 {at}")
            space = own
            value = self.address_of(base)
        elif base is None:
            value = "0"
        else:
            # A 32-bit address in a window may wrap around before its offset is added.
            value = self.get(base, "s64" if space in ("shared", "local") else "u64")
        if space == "generic":
            if offset:
                value = self.op(f"add i64 {value}, {offset}")
            return space, self.op(f"inttoptr i64 {value} to ptr")
        start = {"shared": "%shared", "local": "%local"}.get(space, "%zero")
        pointer = self.op(f"getelementptr i8, ptr {start}, i64 {value}")
        if offset:
            pointer = self.op(f"getelementptr i8, ptr {pointer}, i64 {offset}")
        return space, pointer

    def stop(self, reason: str) -> None:
        """End the launch: record why and where, and end the thread. The first thread to stop is the one reported."""
        line = self.instruction.line if self.instruction else 0
        status = getattr(Stop, reason)
        self.emit(f"call void @stop(ptr %context, i32 {status}, i32 {line}, i32 %bx, i32 %by, i32 %bz, i32 %t)")
        self.emit(f"ret i32 {EXIT}")
        self.label(self.new_label())

    def group(self, space: str) -> str:
        """Return the metadata of an access that is independent of other threads' until they synchronize."""
        if space == "local" or (space == "generic" and not self.parallel_generic):
            return ""
        return ", !llvm.access.group !1"

    def guarded(
        self, space: str, pointer: str, size: int, mode: Mode, site: Instruction, *, flags: Flag = Flag.NONE
    ) -> str:
        """Observe an access before it is made: the one place where checkers and recorders see memory.

        Parameters
        ----------
        space
            State space; ``"generic"`` if unknown.
        pointer, size
            What is accessed, bytes; its alignment must be the size.
        mode
            :data:`READ`, :data:`WRITE` or :data:`ATOMIC`.
        site
            The instruction.
        flags
            What else races depend on.

        Returns
        -------
        The pointer to use: another one if the access must not be made.
        """
        if not self.instrument:
            return pointer
        return observe(self, space, pointer, size, mode, line=site.line, align=size, flags=flags)


_BITS = {"float": 32, "double": 64, "half": 16, "<2 x half>": 32, "<2 x i16>": 32}

# ---- special registers: PTX name -> (value, LLVM type) ----

SPECIAL: dict[str, Callable[[Emitter], tuple[str, str]]] = {
    "%tid": lambda e: ("%tx", "i32"),
    "%tid.x": lambda e: ("%tx", "i32"),
    "%tid.y": lambda e: ("%ty", "i32"),
    "%tid.z": lambda e: ("%tz", "i32"),
    "%ctaid.x": lambda e: ("%bx", "i32"),
    "%ctaid.y": lambda e: ("%by", "i32"),
    "%ctaid.z": lambda e: ("%bz", "i32"),
    "%laneid": lambda e: (e.op("and i32 %t, 31"), "i32"),
    "%warpid": lambda e: (e.op("lshr i32 %t, 5"), "i32"),
    "%nwarpid": lambda e: ("32", "i32"),
    "%smid": lambda e: ("0", "i32"),
    "%nsmid": lambda e: ("1", "i32"),
    "%gridid": lambda e: ("1", "i64"),
    "WARP_SZ": lambda e: ("32", "i32"),
    "%total_smem_size": lambda e: (e.op(f"sub i64 {e.field('shared_bytes')}, {e.layout.reserved_shared}"), "i64"),
    "%dynamic_smem_size": lambda e: (e.field("dynamic_shared"), "i32"),
    "%clock": lambda e: (e.call("i64", "llvm.readcyclecounter"), "i64"),
    "%clock_hi": lambda e: (e.op(f"lshr i64 {e.call('i64', 'llvm.readcyclecounter')}, 32"), "i64"),
    "%clock64": lambda e: (e.call("i64", "llvm.readcyclecounter"), "i64"),
    "%globaltimer": lambda e: (_nanoseconds(e), "i64"),
    "%globaltimer_lo": lambda e: (_nanoseconds(e), "i64"),
    "%globaltimer_hi": lambda e: (e.op(f"lshr i64 {_nanoseconds(e)}, 32"), "i64"),
    "%lanemask_eq": lambda e: (e.op(f"shl i32 1, {e.op('and i32 %t, 31')}"), "i32"),
    "%lanemask_lt": lambda e: (_below(e), "i32"),
    "%lanemask_ge": lambda e: (e.op(f"xor i32 {_below(e)}, -1"), "i32"),
    "%lanemask_le": lambda e: (_up_to(e), "i32"),
    "%lanemask_gt": lambda e: (e.op(f"xor i32 {_up_to(e)}, -1"), "i32"),
    # Where a cooperative launch's blocks synchronize (cooperative_groups reads it so): an address in two halves.
    "%envreg1": lambda e: (e.op(f"lshr i64 {e.field('workspace')}, 32"), "i64"),
    "%envreg2": lambda e: (e.field("workspace"), "i64"),
    # Where the stack of calls that are not inlined ends (cudatool.ptx.frames).
    "%stack.limit": lambda e: (_stack_limit(e), "i64"),
    "%is_explicit_cluster": lambda e: ("false", "i1"),
    "%cluster_ctarank": lambda e: ("0", "i32"),
    "%cluster_nctarank": lambda e: ("1", "i32"),
}


# What describes a machine that is not there: performance monitors, registers that a driver defines, memory it keeps.
SPECIAL |= {
    name: lambda e: ("0", "i64")
    for name in (
        *(f"%envreg{number}" for number in range(32) if number not in (1, 2)),
        *(f"%pm{number}{suffix}" for number in range(8) for suffix in ("", "_64")),
        "%current_graph_exec",
    )
}


def _number(value: int) -> Callable[[Emitter], tuple[str, str]]:
    return lambda e: (str(value), "i32")


# The system's part of shared memory, which is empty before it begins, and software's part of it.
SPECIAL |= {
    f"%reserved_smem_offset_{which}": _number(offset)
    for which, offset in (("begin", 0), ("end", _RESERVED_SHARED), ("cap", _RESERVED_SHARED), ("0", 0), ("1", 512))
}
SPECIAL["%aggr_smem_size"] = SPECIAL["%total_smem_size"]


def _stack_limit(e: Emitter) -> str:
    size = e.op(f"mul i64 {e.field('stack_bytes')}, {FRAME_SCALE}")
    return e.op(f"add i64 {size}, {e.layout.local[STACK]}")


def _nanoseconds(e: Emitter) -> str:
    """Return the host's monotonic clock."""
    e.define("""
declare i32 @clock_gettime(i32, ptr)
define internal i64 @nanoseconds() noinline {
  %time = alloca { i64, i64 }
  %status = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest.p = getelementptr { i64, i64 }, ptr %time, i32 0, i32 1
  %rest = load i64, ptr %rest.p
  %scaled = mul i64 %seconds, 1000000000
  %result = add i64 %scaled, %rest
  ret i64 %result
}""")
    return e.op("call i64 @nanoseconds()")


def _special_field(name: str) -> Callable[[Emitter], tuple[str, str]]:
    return lambda e: (e.field(name), "i32")


for _axis in "xyz":
    SPECIAL[f"%ntid.{_axis}"] = _special_field(f"block_{_axis}")
    SPECIAL[f"%nctaid.{_axis}"] = _special_field(f"grid_{_axis}")
    SPECIAL[f"%nclusterid.{_axis}"] = SPECIAL[f"%nctaid.{_axis}"]
    SPECIAL[f"%clusterid.{_axis}"] = SPECIAL[f"%ctaid.{_axis}"]
    SPECIAL[f"%cluster_ctaid.{_axis}"] = SPECIAL["%cluster_ctarank"]
    SPECIAL[f"%cluster_nctaid.{_axis}"] = SPECIAL["%cluster_nctarank"]


def _below(e: Emitter) -> str:
    bit = e.op(f"shl i32 1, {e.op('and i32 %t, 31')}")
    return e.op(f"sub i32 {bit}, 1")


def _up_to(e: Emitter) -> str:
    bit = e.op(f"shl i32 2, {e.op('and i32 %t, 31')}")
    return e.op(f"sub i32 {bit}, 1")
