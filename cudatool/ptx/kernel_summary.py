"""What a kernel consists of: instructions by class, registers, memory, and the features of the machine that it uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cudatool.ptx.calls import recursive
from cudatool.ptx.dataflow import HARMLESS
from cudatool.ptx.isa import InstructionClass, OpcodeAccess, opcode_of
from cudatool.ptx.model import Function, Instruction, Module, Symbol
from cudatool.ptx.operands import GENERIC, call_parts, space_of, symbols

__all__ = ["Feature", "KernelSummary", "orders_others", "summarize"]


class Feature(StrEnum):
    """What a device must have to run a kernel, beyond arithmetic and memory."""

    BARRIER = "barriers"
    WARP_COLLECTIVE = "warp collectives"
    GLOBAL_ATOMIC = "global atomics"
    SHARED_ATOMIC = "shared atomics"
    FENCE = "fences"
    TENSOR_CORE = "tensor core"
    ASYNC_COPY = "async copy"
    DEPENDENTS = "early launch of dependents"
    """``griddepcontrol.launch_dependents``"""
    DEPENDENCIES = "wait for the previous kernel"
    """``griddepcontrol.wait``"""
    SYSTEM_SCOPE = "system-scope accesses"
    """Volatile accesses, and those with ``.sys``, outside of shared memory"""
    MBARRIER = "mbarrier"
    TENSOR_MAP = "tensor map"
    CLUSTER = "clusters"
    TEXTURE = "textures or surfaces"
    DYNAMIC_SHARED = "dynamic shared memory"
    DOUBLE = "double precision"
    HALF = "half precision"
    PRINTF = "printf"
    ASSERT = "assert"
    HEAP = "device malloc"
    TRAP = "trap"
    CALL = "calls"
    INDIRECT_CALL = "indirect calls"
    EXTERNAL_CALL = "external calls"
    RECURSION = "recursion"
    ALLOCA = "alloca"


_HALF_TYPES: Final = frozenset({"f16", "f16x2", "bf16", "bf16x2"})
_FLOAT_TYPES: Final = _HALF_TYPES | {"f32", "f64", "tf32"}

_SPACE_CLASS: Final = {
    "shared": InstructionClass.SHARED,
    "local": InstructionClass.LOCAL,
    "const": InstructionClass.CONSTANT,
    "param": InstructionClass.PARAMETER,
    GENERIC: InstructionClass.GENERIC,
}


def _class_of(i: Instruction) -> InstructionClass:
    modifiers, kind = i.modifiers, opcode_of(i.opcode).kind
    if kind not in (InstructionClass.GLOBAL_LOAD, InstructionClass.GLOBAL_STORE, InstructionClass.OTHER):
        return kind
    if kind is not InstructionClass.OTHER and "async" not in modifiers:
        return _SPACE_CLASS.get(space_of(i), kind)
    if "pred" in modifiers:
        return InstructionClass.PREDICATE
    if _FLOAT_TYPES.intersection(modifiers):
        return InstructionClass.FLOAT
    if any(m[0] in "usb" and m.rstrip("x2").lstrip("usb").isdigit() for m in modifiers):
        return InstructionClass.INTEGER
    return InstructionClass.OTHER


def _is_of(kind: InstructionClass) -> Callable[[Instruction], bool]:
    return lambda i: opcode_of(i.opcode).kind is kind


def _atomic_in(*spaces: str) -> Callable[[Instruction], bool]:
    return lambda i: opcode_of(i.opcode).access is OpcodeAccess.ATOMIC and space_of(i) in spaces


# What shows that a kernel uses a feature.
_SIGNS: Final[dict[Feature, Callable[[Instruction], bool]]] = {
    Feature.BARRIER: lambda i: i.opcode in ("bar", "barrier") and "warp" not in i.modifiers,
    Feature.WARP_COLLECTIVE: lambda i: (
        opcode_of(i.opcode).kind is InstructionClass.WARP or (i.opcode == "bar" and "warp" in i.modifiers)
    ),
    Feature.GLOBAL_ATOMIC: _atomic_in("global", GENERIC),
    Feature.SHARED_ATOMIC: _atomic_in("shared"),
    Feature.FENCE: lambda i: opcode_of(i.opcode).is_fence,
    Feature.TENSOR_CORE: _is_of(InstructionClass.TENSOR_CORE),
    Feature.ASYNC_COPY: _is_of(InstructionClass.ASYNC_COPY),
    Feature.DEPENDENTS: lambda i: i.opcode == "griddepcontrol" and "launch_dependents" in i.modifiers,
    Feature.DEPENDENCIES: lambda i: i.opcode == "griddepcontrol" and "wait" in i.modifiers,
    Feature.SYSTEM_SCOPE: lambda i: (
        opcode_of(i.opcode).address is not None
        and ("sys" in i.modifiers or "volatile" in i.modifiers)
        and space_of(i) in ("global", GENERIC)
    ),
    Feature.MBARRIER: lambda i: i.opcode == "mbarrier",
    Feature.TENSOR_MAP: lambda i: "tensor" in i.modifiers or i.opcode == "tensormap",
    Feature.CLUSTER: lambda i: "cluster" in i.modifiers or i.opcode in ("mapa", "getctarank"),
    Feature.TEXTURE: _is_of(InstructionClass.TEXTURE),
    Feature.DOUBLE: lambda i: "f64" in i.modifiers and _class_of(i) is InstructionClass.FLOAT,
    Feature.HALF: lambda i: bool(_HALF_TYPES.intersection(i.modifiers)),
    Feature.TRAP: lambda i: i.opcode in ("trap", "brkpt"),
    Feature.ALLOCA: lambda i: i.opcode == "alloca",
}
_LIBRARY: Final = {
    "vprintf": Feature.PRINTF,
    "__assertfail": Feature.ASSERT,
    "malloc": Feature.HEAP,
    "free": Feature.HEAP,
}


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """A kernel and the device functions that it calls, each counted once.

    Attributes
    ----------
    target
        Of the module: ``"sm_90"``.
    instructions
        Number of instructions by class, the most frequent first.
    opcodes
        The same by opcode.
    registers
        Number of virtual registers by type; the machine's registers are assigned later, by the driver.
    shared_bytes, local_bytes, constant_bytes
        Declared by the kernel and its functions, and of the module's constant variables, those that they name.
        Shared memory whose size the launch decides is not in it.
    max_threads, min_blocks
        ``__launch_bounds__``; 0 if none are given.
    features
        In a fixed order.
    calls, external_calls
        Device functions that are called, and those whose code the module does not have, by name.
    """

    kernel: str
    target: str
    instructions: dict[InstructionClass, int]
    opcodes: dict[str, int]
    registers: dict[str, int]
    shared_bytes: int
    local_bytes: int
    constant_bytes: int
    max_threads: int
    min_blocks: int
    features: tuple[Feature, ...]
    calls: tuple[str, ...]
    external_calls: tuple[str, ...]


def summarize(module: Module, kernel: str) -> KernelSummary:
    """Count what a kernel of a parsed module consists of.

    Raises
    ------
    PtxError
        The module has no such kernel.
    """
    function = module.kernel(kernel)
    functions, external, features = _reachable(module, function)
    code = [i for one in functions for i in one.instructions]
    features |= {feature for feature, sign in _SIGNS.items() if any(map(sign, code))}
    named = {name for i in code for operand in i.operands for name in symbols(operand)}
    variables = [v for one in functions for v in one.variables.values() if v.space in ("shared", "local")]
    variables += [v for v in module.variables.values() if v.name in named]
    if any(v.space == "shared" and not v.size for v in variables):
        features.add(Feature.DYNAMIC_SHARED)
    size = {space: sum(v.size for v in variables if v.space == space) for space in ("shared", "local", "const")}
    threads = 1
    for limit in function.directives.get("reqntid") or function.directives.get("maxntid") or (0,):
        threads *= limit
    classes = Counter(map(_class_of, code))
    return KernelSummary(
        kernel,
        module.target,
        dict(classes.most_common()),
        dict(Counter(i.opcode for i in code).most_common()),
        dict(Counter(kind for one in functions for kind in one.registers.values()).most_common()),
        size["shared"],
        size["local"],
        size["const"],
        threads,
        next(iter(function.directives.get("minnctapersm", (0,)))),
        tuple(feature for feature in Feature if feature in features),
        tuple(sorted(one.name for one in functions[1:])),
        tuple(sorted(external)),
    )


_ORDERS: Final = (b"griddepcontrol", b".sys", b".volatile")  # code without them orders nothing, and need not be parsed


def orders_others(code: bytes, parsed: Callable[[], Module], kernel: str) -> tuple[bool, bool, bool]:
    """Return whether a kernel waits for those before it, lets the next one begin early, and may use flags in memory.

    The latter are accesses of system scope, by which it and the host may order each other. That it does so on every
    path is not checked.
    """
    if not any(word in code for word in _ORDERS):
        return False, False, False
    features = summarize(parsed(), kernel).features
    return Feature.DEPENDENCIES in features, Feature.DEPENDENTS in features, Feature.SYSTEM_SCOPE in features


def _reachable(module: Module, kernel: Function) -> tuple[list[Function], set[str], set[Feature]]:
    """Return the kernel and what it calls, the functions whose code is missing, and what the calls show."""
    calls: dict[str, set[str]] = {}
    external: set[str] = set()
    features: set[Feature] = set()
    order, waiting = [], [kernel]
    while waiting:
        function = waiting.pop()
        if function.name in calls:
            continue
        order.append(function)
        targets = calls.setdefault(function.name, set())
        for i in function.instructions:
            if i.opcode != "call":
                continue
            target = call_parts(i)[1]
            callee = module.functions.get(target.name) if isinstance(target, Symbol) else None
            if not isinstance(target, Symbol):
                features.add(Feature.INDIRECT_CALL)
            elif callee is not None and callee.has_body:
                features.add(Feature.CALL)
                targets.add(callee.name)
                waiting.append(callee)
            elif target.name in _LIBRARY:
                features.add(_LIBRARY[target.name])
            else:
                features.add(Feature.EXTERNAL_CALL)
            if callee is None or not callee.has_body:
                external.update({getattr(target, "name", "")} - HARMLESS if isinstance(target, Symbol) else ())
    if recursive(calls):
        features.add(Feature.RECURSION)
    return order, external, features
