"""Emission of one LLVM function: PTX registers, operands, addresses. What instructions do is in the tables.

Every PTX register is an ``alloca``; LLVM makes SSA values of them. A register is read as the type that the instruction
names, whatever type it was declared with, as PTX allows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cudatool.ptx import (
    Address,
    Function,
    Immediate,
    Instruction,
    Operand,
    Register,
    Symbol,
    type_bytes,
)
from cudatool.sim.jit.argument_ranges import Near
from cudatool.sim.jit.context import EXIT, Context, Stop
from cudatool.sim.jit.instrument import Flag, Instrument, Needless, RaceMode, observe
from cudatool.sim.jit.layout import Layout
from cudatool.sim.jit.special_registers import SPECIAL
from cudatool.sim.jit.unsupported import UnsupportedInstruction

__all__ = [
    "ATOMIC",
    "ENVIRONMENT",
    "READ",
    "WRITE",
    "Emitter",
    "llvm_type",
    "storage_type",
]

# What every generated function gets: %zero is a null pointer that the optimizer does not know to be null. Global
# addresses are offsets from it, which lets loops over threads be vectorized.
ENVIRONMENT = (
    "ptr %context, ptr %zero, ptr %globals, ptr %shared, ptr %params, ptr %slots, ptr %locals, "
    "i32 %bx, i32 %by, i32 %bz"
)

READ, WRITE, ATOMIC = RaceMode.READ, RaceMode.WRITE, RaceMode.ATOMIC

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
_BITS = {"float": 32, "double": 64, "half": 16, "<2 x half>": 32, "<2 x i16>": 32}


def llvm_type(name: str) -> str:
    """Return the LLVM type in which values of a PTX type are computed (bf16 as float, as no host computes in it)."""
    return _LLVM.get(name) or f"i{8 * type_bytes(name)}"


def storage_type(name: str) -> str:
    """Return the LLVM type of a register declared as `name`."""
    return _LLVM[name] if name in ("pred", "f32", "f64") else f"i{8 * type_bytes(name)}"


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
        self.guesses: frozenset[int] = frozenset()  # lines of loads that only guess (:mod:`cudatool.ptx.guesses`)
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
        entry = self.op(f"getelementptr i64, ptr %globals, i64 {self.layout.globals[symbol.name]}")
        value = self.op(f"load i64, ptr {entry}, align 8, !invariant.load !0")
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
            value = self._whole_address(space, base, value)
        if space == "generic":
            if offset:
                value = self.op(f"add i64 {value}, {offset}")
            return space, self.op(f"inttoptr i64 {value} to ptr")
        start = {"shared": "%shared", "local": "%local"}.get(space, "%zero")
        pointer = self.op(f"getelementptr i8, ptr {start}, i64 {value}")
        if offset:
            pointer = self.op(f"getelementptr i8, ptr {pointer}, i64 {offset}")
        return space, pointer

    def _whole_address(self, space: str, register: Register, value: str) -> str:
        """Return the address of a parameter or a constant, of which a register of 32 bits has the lower half.

        LLVM's compiler takes as many for such spaces if it is told to, as Triton does (``nvptx-short-ptr``).
        """
        if space not in ("param", "const") or type_bytes(self.function.registers.get(register.name, "b64")) != 4:
            return value
        if space == "param":
            near = self.op("ptrtoint ptr %params to i64")
        else:  # they lie together
            near = self.address_of(Symbol(next(iter(self.layout.constants))))
        distance = self.op(f"sub i32 {self.convert(value, 'i64', 'i32')}, {self.convert(near, 'i64', 'i32')}")
        return self.op(f"add i64 {near}, {self.convert(distance, 'i32', 'i64', signed=True)}")

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
        self, space: str, pointer: str, size: int, mode: RaceMode, site: Instruction, *, flags: Flag = Flag.NONE
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
