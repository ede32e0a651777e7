"""PTX parsed, and what can be read off it without running it.

:func:`parse` is what the software device starts from. :func:`infer_accesses` says which memory a kernel may touch,
:func:`summarize` what it consists of; both need no device, and serve kernels that run on a GPU as well.
Their modules are loaded when one of these names is first used: a device that runs what it has kept reads no PTX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cudatool.loading.whole_imports import whole_imports

if TYPE_CHECKING:
    from cudatool.ptx.access import (
        AccessDoubt,
        AccessRange,
        AddressAccess,
        Base,
        BaseKind,
        FieldAccess,
        KernelAccesses,
        LaunchAccesses,
        ParameterAccess,
        VariableAccess,
        accesses_of_launch,
        infer_accesses,
        is_number,
        pointer_offsets,
        pointers_at,
    )
    from cudatool.ptx.calls import ModuleCalls, function_addresses
    from cudatool.ptx.container import DeviceCode, device_code, is_container, ptx_for, register_counts
    from cudatool.ptx.errors import PtxError
    from cudatool.ptx.flow import BasicBlock, Flow
    from cudatool.ptx.frames import FRAME_SCALE, STACK, merge_calls
    from cudatool.ptx.images import join, split
    from cudatool.ptx.isa import InstructionClass, Mode, opcode_of
    from cudatool.ptx.kernel_summary import Feature, KernelSummary, orders_others, summarize
    from cudatool.ptx.linker import LinkError, link, parse_image, undefined
    from cudatool.ptx.model import (
        Address,
        Function,
        Immediate,
        Instruction,
        Location,
        Module,
        Operand,
        Pair,
        Register,
        Relocation,
        Symbol,
        Variable,
        VectorOperand,
        type_bytes,
    )
    from cudatool.ptx.operands import call_parts, elements, space_of, symbols
    from cudatool.ptx.parser import parse

__all__ = [
    "FRAME_SCALE",
    "STACK",
    "AccessDoubt",
    "AccessRange",
    "Address",
    "AddressAccess",
    "Base",
    "BaseKind",
    "BasicBlock",
    "DeviceCode",
    "Feature",
    "FieldAccess",
    "Flow",
    "Function",
    "Immediate",
    "Instruction",
    "InstructionClass",
    "KernelAccesses",
    "KernelSummary",
    "LaunchAccesses",
    "LinkError",
    "Location",
    "Mode",
    "Module",
    "ModuleCalls",
    "Operand",
    "Pair",
    "ParameterAccess",
    "PtxError",
    "Register",
    "Relocation",
    "Symbol",
    "Variable",
    "VariableAccess",
    "VectorOperand",
    "accesses_of_launch",
    "call_parts",
    "device_code",
    "elements",
    "function_addresses",
    "infer_accesses",
    "is_container",
    "is_number",
    "join",
    "link",
    "merge_calls",
    "opcode_of",
    "orders_others",
    "parse",
    "parse_image",
    "pointer_offsets",
    "pointers_at",
    "ptx_for",
    "register_counts",
    "space_of",
    "split",
    "summarize",
    "symbols",
    "type_bytes",
    "undefined",
]

# Where the names live, what loads least first.
_HOMES = (
    "errors",
    "images",
    "container",
    "isa",
    "model",
    "operands",
    "flow",
    "calls",
    "frames",
    "parser",
    "linker",
    "kernel_summary",
    "access",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:  # as when one of the modules is being imported
        raise AttributeError(f"module 'cudatool.ptx' has no attribute {name!r}")
    with whole_imports():
        modules = (import_module(f"cudatool.ptx.{home}") for home in _HOMES)
        found = next(getattr(module, name) for module in modules if name in module.__all__)
    globals()[name] = found
    return found
