"""Calls of a kernel, replaced: inlined where they can be, as control flow with a stack where they cannot.

Functions that call themselves, or that are called through pointers, become parts of the kernel. A call of one writes a
*frame* to the thread's stack in local memory and branches; a return branches back by the number of the call. So
barriers and warp collectives inside of such functions are nothing special.

A frame, at a multiple of 16::

    0   number of the call     8   frame of the caller
    16  results and arguments; the function's own local memory; the registers that it saves

What is larger than 8 lies at a multiple of 16, all else at a multiple of 8.

Registers belong to a function, not to one of its activations: what it needs after a call it saves before.

Added are the registers ``%stack.frame`` and ``%stack.top``, addresses in local memory; the special register
``%stack.limit``, where the stack ends; and the instruction ``overflow``, for what goes beyond.
"""

from __future__ import annotations

from dataclasses import replace

from cudatool.limits import FRAMED_SIZE
from cudatool.ptx.calls import ModuleCalls
from cudatool.ptx.flow import Flow, reads, writes
from cudatool.ptx.inline import Inliner
from cudatool.ptx.model import (
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    PtxError,
    Register,
    Symbol,
    Variable,
    type_bytes,
)
from cudatool.ptx.operands import call_parts

__all__ = ["FRAME_SCALE", "STACK", "STACK_SLACK", "merge_calls"]

STACK = "%stack"
"""Name of the local variable that holds the stack."""
STACK_SLACK = 8192
"""Bytes beyond the end of the stack that a call may write to before it finds that there is no room."""

FRAME_SCALE = 2
"""Bytes of stack for each byte of CU_LIMIT_STACK_SIZE, which programs set for a GPU's frames. Those are smaller: in
machine code arguments and most of what lives across a call stay in registers."""

_FRAME, _TOP, _NUMBER = Register("%stack.frame"), Register("%stack.top"), Register("%stack.number")
_WORD, _FLAG = Register("%stack.word"), Register("%stack.flag")
_TABLE, _LEAVE = "%stack.calls", "%stack.leave"
_HEADER = 16


def merge_calls(module: Module, kernel: Function, stack_bytes: int, calls: ModuleCalls | None = None) -> Function:
    """Return `kernel` without calls of functions that `module` defines; calls of the system's (``vprintf``) stay.

    Parameters
    ----------
    stack_bytes
        Size of a thread's stack, should the kernel need one.
    calls
        Of the module; computed if not given.

    Raises
    ------
    PtxError
        The result is unreasonably large, or a call does not fit what it calls.
    """
    return _Merger(module, calls or ModuleCalls.of(module)).merge(kernel, stack_bytes)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _steps(sizes: list[int], start: int) -> list[int]:
    """Return where variables of these sizes lie, and where they end."""
    offsets, end = [], start
    for size in sizes:
        offsets.append(_round_up(end, 16 if size > 8 else 8))
        end = offsets[-1] + _round_up(max(size, 1), 8)
    return [*offsets, end]


class _Merger:
    def __init__(self, module: Module, calls: ModuleCalls) -> None:
        self.module = module
        self.framed = calls.recursive
        self.addresses = calls.addresses
        self.pointed = calls.pointed_to
        self.needed: list[str] = []  # functions that get a part of the kernel of their own
        self.returns: list[str] = []  # labels after the calls
        self.registers: dict[str, str] = {}
        self.labels: dict[str, int] = {}
        self.code: list[Instruction] = []
        self.at = Instruction("", (), (), None, 0, None)
        # Of the function whose code is being written:
        self.variables: dict[str, Variable] = {}
        self.places: dict[str, int] = {}  # offsets in its frame
        self.saved: dict[str, int] = {}
        self.end = 0

    def merge(self, kernel: Function, stack_bytes: int) -> Function:
        result = self._body(kernel, "")
        if not any(self._uses_stack(i) for i in result.instructions):
            return replace(result, instructions=[self._with_addresses(i) for i in result.instructions])
        for name, kind in ((_FRAME, "b64"), (_TOP, "b64"), (_NUMBER, "b32"), (_WORD, "b64"), (_FLAG, "pred")):
            self.registers[name.name] = kind
        result.variables[STACK] = Variable(STACK, "local", "b8", stack_bytes + STACK_SLACK, 16)
        self._emit("mov", "u64", _TOP, Symbol(STACK))
        self._emit("mov", "u64", _FRAME, _TOP)
        self._write(result, None)
        done = 0
        while done < len(self.needed):
            self._function(self.needed[done], result)
            done += 1
        self.labels[_LEAVE] = len(self.code)
        self._emit("ld", "local.u32", _NUMBER, Address(_FRAME))
        self._emit("ld", "local.u64", _FRAME, Address(_FRAME, 8))
        if self.returns:
            self._emit("brx", "idx", _NUMBER, Symbol(_TABLE))
        else:
            self._emit("exit", "")
        result.branch_targets[_TABLE] = tuple(self.returns)
        result.registers.update(self.registers)
        return replace(result, instructions=self.code, labels=self.labels)

    def _body(self, function: Function, prefix: str) -> Function:
        """Return a function with names of its own and what can be inlined in place."""
        result = replace(function, registers={}, variables={}, instructions=[], labels={}, branch_targets={})
        inliner = Inliner(self.module, result, self.framed)
        names = inliner.declare(function, prefix)
        names |= {formal.name: prefix + formal.name for formal in (*function.returns, *function.params)}
        inliner.check(function)
        inliner.copy(function, names if prefix else {}, prefix, None)
        return result

    def _uses_stack(self, i: Instruction) -> bool:
        if i.opcode == "call":
            target = call_parts(i)[1]
            return not isinstance(target, Symbol) or target.name in self.framed
        return i.opcode in ("alloca", "stacksave", "stackrestore")

    def _with_addresses(self, i: Instruction) -> Instruction:
        """Return an instruction with functions' names replaced by their addresses."""
        if i.opcode == "call" or not any(isinstance(o, Symbol) and o.name in self.addresses for o in i.operands):
            return i
        operands = tuple(
            Immediate(self.addresses[o.name]) if isinstance(o, Symbol) and o.name in self.addresses else o
            for o in i.operands
        )
        return replace(i, operands=operands)

    # ---- writing code ----

    def _emit(self, opcode: str, modifiers: str, *operands: Operand, guard: Register | None = None) -> None:
        if len(self.code) > FRAMED_SIZE:
            raise PtxError("too large with its calls on a stack", self.at.line)
        parts = tuple(filter(None, modifiers.split(".")))
        self.code.append(replace(self.at, opcode=opcode, modifiers=parts, operands=operands, guard=guard))

    def _function(self, name: str, result: Function) -> None:
        """Write the part of the kernel that is function `name`."""
        function = self.module.functions[name]
        prefix = f"{name}."
        body = self._body(function, prefix)
        # Parameters of calls hold something only while a call is prepared or its result fetched: one of each is enough.
        result.variables.update({n: v for n, v in body.variables.items() if v.space != "local"})
        result.branch_targets.update(body.branch_targets)
        result.registers.update(body.registers)
        formals = (*function.returns, *function.params)
        if any(v.space == "reg" for v in formals):
            raise PtxError(f"{name}: register parameters of a function that is not inlined", function.line)
        offsets = _steps([v.size for v in formals], _HEADER)
        self.places = {prefix + v.name: at for v, at in zip(formals, offsets, strict=False)}
        own = [v for v in body.variables.values() if v.space == "local"]
        if any(v.align > 16 for v in own):
            raise PtxError(f"{name}: local memory aligned to more than 16 bytes in a function that is not inlined")
        more = _steps([max(v.size, v.align) for v in own], offsets[-1])
        self.places |= {v.name: at for v, at in zip(own, more, strict=False)}
        self.saved, self.end = {}, more[-1]
        if body.instructions:
            self.at = body.instructions[0]
        self.labels[f"{prefix}begin"] = len(self.code)
        first = len(self.code)
        self._emit("add", "u64", _TOP, _FRAME, Immediate(0))  # the size is known at the end
        self._check()
        self._write(body, f"{prefix}end")
        self.labels[f"{prefix}end"] = len(self.code)
        self._emit("mov", "u64", _TOP, _FRAME)
        self._emit("bra", "", Symbol(_LEAVE))
        size = _round_up(self.end, 16)
        self.code[first] = replace(self.code[first], operands=(_TOP, _FRAME, Immediate(size)))

    def _check(self) -> None:
        """Stop if the top is beyond the end of the stack."""
        self._emit("setp", "gt.u64", _FLAG, _TOP, Register("%stack.limit"))
        self._emit("overflow", "", guard=_FLAG)

    def _write(self, body: Function, end: str | None) -> None:
        """Append the code of `body`; `end` is where its returns lead, None for the kernel, which saves nothing."""
        self.variables = body.variables
        live = _live_after_calls(body) if end is not None else {}
        at: dict[int, list[str]] = {}
        for label, index in body.labels.items():
            at.setdefault(index, []).append(label)
        for index, i in enumerate(body.instructions):
            for label in at.get(index, ()):
                self.labels[label] = len(self.code)
            self.at = i
            if i.opcode == "ret" and end is not None:
                self._emit("bra", "", Symbol(end), guard=i.guard)
            elif i.opcode == "call" and self._uses_stack(i):
                self._call(body, i, live.get(index, []))
            elif i.opcode in ("alloca", "stacksave", "stackrestore"):
                self._allocate(i)
            else:
                self._plain(i)
        for label in at.get(len(body.instructions), ()):
            self.labels[label] = len(self.code)

    def _plain(self, i: Instruction) -> None:
        """Append an instruction; what it names in this frame becomes an address relative to the frame."""
        i = self._with_addresses(i)
        operands: list[Operand] = []
        modifiers = i.modifiers
        for operand in i.operands:
            base = operand.base if isinstance(operand, Address) else operand
            if isinstance(base, Symbol) and base.name in self.places:
                place = self.places[base.name] + base.offset
                if isinstance(operand, Address):
                    operand = Address(_FRAME, place + operand.offset)
                    modifiers = tuple("local" if m.startswith("param") else m for m in modifiers)
                else:
                    self._emit("add", "u64", _WORD, _FRAME, Immediate(place))
                    operand = _WORD
            operands.append(operand)
        self.code.append(replace(i, operands=tuple(operands), modifiers=modifiers))

    def _allocate(self, i: Instruction) -> None:
        """``alloca`` takes from the top of the stack (PTX ISA, "Stack Manipulation Instructions")."""
        if len(i.operands) < (2 if i.opcode == "alloca" else 1):
            raise PtxError(f"{i.name} lacks an operand", i.line)
        if i.opcode == "stacksave":
            self._emit("mov", "u64", i.operands[0], _TOP, guard=i.guard)
            return
        if i.opcode == "stackrestore":
            self._emit("mov", "u64", _TOP, i.operands[0], guard=i.guard)
            return
        target, size = i.operands[:2]
        align = max(int(i.operands[2].value) if len(i.operands) > 2 and isinstance(i.operands[2], Immediate) else 8, 16)
        self._emit("add", "u64", _WORD, _TOP, Immediate(align - 1), guard=i.guard)
        self._emit("and", "b64", _WORD, _WORD, Immediate(-align & (1 << 64) - 1), guard=i.guard)
        self._emit("mov", "u64", target, _WORD, guard=i.guard)
        if "u32" in i.modifiers:
            self._emit("cvt", "u64.u32", _TOP, size, guard=i.guard)
            self._emit("add", "u64", _TOP, _WORD, _TOP, guard=i.guard)
        else:
            self._emit("add", "u64", _TOP, _WORD, size, guard=i.guard)
        self._emit("add", "u64", _TOP, _TOP, Immediate(15), guard=i.guard)
        self._emit("and", "b64", _TOP, _TOP, Immediate(-16 & (1 << 64) - 1), guard=i.guard)
        self._check()

    def _copy(self, target: Address, source: Address, size: int) -> None:
        """Copy a variable; both begin at multiples of 8."""

        def space(address: Address) -> str:
            return "param" if isinstance(address.base, Symbol) else "local"

        done = 0
        while done < size:
            step = next(n for n in (8, 4, 2, 1) if n <= size - done)
            bits = f"b{8 * step}"
            self._emit("ld", f"{space(source)}.{bits}", _WORD, replace(source, offset=source.offset + done))
            self._emit("st", f"{space(target)}.{bits}", replace(target, offset=target.offset + done), _WORD)
            done += step

    def _variable(self, operand: Operand) -> Address:
        """Return where a ``.param`` variable lies that a call names."""
        if not isinstance(operand, Symbol):
            raise PtxError("call arguments that are not .param variables are not supported", self.at.line)
        if operand.name in self.places:
            return Address(_FRAME, self.places[operand.name] + operand.offset)
        return Address(operand)

    def _call(self, body: Function, call: Instruction, live: list[str]) -> None:
        results, target, arguments = call_parts(call)
        number = len(self.returns)
        back, beyond = f"%stack.back.{number}", f"%stack.beyond.{number}"
        self.returns.append(back)
        if call.guard is not None:
            skip = replace(call.guard, negated=not call.guard.negated)
            self._emit("bra", "", Symbol(beyond), guard=skip)
        for name in live:
            self._save(body, name, load=False)
        named = (*results, *arguments)
        sizes = [self._size(operand) for operand in named]
        offsets = _steps(sizes, _HEADER)
        for operand, offset, size in list(zip(named, offsets, sizes, strict=False))[len(results) :]:
            self._copy(Address(_TOP, offset), self._variable(operand), size)
        self._emit("st", "local.u32", Address(_TOP), Immediate(number))
        self._emit("st", "local.u64", Address(_TOP, 8), _FRAME)
        if isinstance(target, Symbol):
            self._emit("mov", "u64", _FRAME, _TOP)
            self._need(target.name)
            self._emit("bra", "", Symbol(f"{target.name}.begin"))
        else:
            self._emit("mov", "u64", _WORD, target)
            self._emit("mov", "u64", _FRAME, _TOP)
            for name in self.pointed:
                if self._fits(name, len(results), sizes):
                    self._need(name)
                    self._emit("setp", "eq.u64", _FLAG, _WORD, Immediate(self.addresses[name]))
                    self._emit("bra", "", Symbol(f"{name}.begin"), guard=_FLAG)
            self._emit("trap", "")  # it points to no such function
        self.labels[back] = len(self.code)
        for operand, offset, size in zip(results, offsets, sizes, strict=False):
            self._copy(self._variable(operand), Address(_TOP, offset), size)
        for name in live:
            self._save(body, name, load=True)
        self.labels[beyond] = len(self.code)

    def _size(self, operand: Operand) -> int:
        variable = self.variables.get(operand.name) if isinstance(operand, Symbol) else None
        if variable is None:
            raise PtxError("call arguments that are not .param variables are not supported", self.at.line)
        return variable.size

    def _need(self, name: str) -> None:
        if name not in self.needed:
            self.needed.append(name)

    def _fits(self, name: str, results: int, sizes: list[int]) -> bool:
        function = self.module.functions[name]
        return len(function.returns) == results and [v.size for v in (*function.returns, *function.params)] == sizes

    def _save(self, body: Function, name: str, *, load: bool) -> None:
        """Save a register in the frame, or load it from there."""
        kind = body.registers[name]
        if name not in self.saved:
            step = 16 if type_bytes(kind) > 8 else 8
            self.saved[name] = _round_up(self.end, step)
            self.end = self.saved[name] + step
        register, address = Register(name), Address(_FRAME, self.saved[name])
        if kind == "pred":
            if load:
                self._emit("ld", "local.u32", _NUMBER, address)
                self._emit("setp", "ne.u32", register, _NUMBER, Immediate(0))
            else:
                self._emit("selp", "u32", _NUMBER, Immediate(1), Immediate(0), register)
                self._emit("st", "local.u32", address, _NUMBER)
            return
        bits = f"local.b{8 * type_bytes(kind)}"
        if load:
            self._emit("ld", bits, register, address)
        else:
            self._emit("st", bits, address, register)


def _live_after_calls(body: Function) -> dict[int, list[str]]:
    """Return, for each call, the registers that are used after it."""
    found = {}
    for block in Flow(body).blocks:
        live = set(block.live_out)
        for index in reversed(range(block.start, block.stop)):
            i = body.instructions[index]
            if i.opcode == "call":
                found[index] = sorted(live & body.registers.keys())
            if i.guard is None:
                live -= set(writes(i))
            live |= set(reads(i))
    return found
