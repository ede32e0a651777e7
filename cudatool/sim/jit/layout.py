"""Where a kernel's variables lie: in its windows of shared, local and parameter memory, and in the table of globals."""

from __future__ import annotations

from dataclasses import dataclass, field

from cudatool.ptx import Function, InstructionClass, Register, Variable, opcode_of, symbols

__all__ = ["ASYNC_QUEUE", "RESERVED_SHARED", "Layout"]

ASYNC_QUEUE = "%async"
"""The local variable in which a thread keeps the copies that it has begun (:mod:`.asynchronous`)."""

RESERVED_SHARED = 1024
"""Bytes of a block's shared memory that are the system's, if it uses them: RESERVED_SHARED_MEMORY_PER_BLOCK."""

_ASYNC_QUEUE_BYTES = 528


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
        layout.reserved_shared = RESERVED_SHARED if _uses_reserved_shared(function) else 0
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
