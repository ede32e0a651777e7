"""PTX parsed, and what can be read off it without running it.

:func:`parse` is what the software device starts from. :func:`infer_accesses` says which memory a kernel may touch,
:func:`summarize` what it consists of; both need no device, and serve kernels that run on a GPU as well.
"""

from cudatool.ptx.access import (
    Access,
    AccessRange,
    Base,
    BaseKind,
    Doubt,
    FieldAccess,
    KernelAccesses,
    LaunchAccesses,
    ParameterAccess,
    VariableAccess,
    accesses_of_launch,
    infer_accesses,
    pointers_at,
)
from cudatool.ptx.calls import ModuleCalls, function_addresses
from cudatool.ptx.container import DeviceCode, device_code, is_container, ptx_for, register_counts
from cudatool.ptx.flow import Block, Flow
from cudatool.ptx.frames import FRAME_SCALE, STACK, merge_calls
from cudatool.ptx.isa import InstructionClass, Mode, opcode_of
from cudatool.ptx.kernel_summary import Feature, KernelSummary, orders_others, summarize
from cudatool.ptx.linker import LinkError, join, link, parse_image, split, undefined
from cudatool.ptx.model import (
    Address,
    Function,
    Immediate,
    Instruction,
    Location,
    Module,
    Operand,
    Pair,
    PtxError,
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
    "ModuleCalls",
    "function_addresses",
    "opcode_of",
    "parse",
    "parse_image",
    "merge_calls",
    "link",
    "join",
    "split",
    "undefined",
    "LinkError",
    "DeviceCode",
    "device_code",
    "is_container",
    "ptx_for",
    "register_counts",
    "Module",
    "Function",
    "Variable",
    "Relocation",
    "Instruction",
    "Location",
    "Operand",
    "Register",
    "Immediate",
    "Symbol",
    "Address",
    "VectorOperand",
    "Pair",
    "Block",
    "Flow",
    "PtxError",
    "type_bytes",
    "call_parts",
    "elements",
    "space_of",
    "symbols",
    "infer_accesses",
    "pointers_at",
    "accesses_of_launch",
    "KernelAccesses",
    "ParameterAccess",
    "FieldAccess",
    "VariableAccess",
    "Access",
    "Base",
    "BaseKind",
    "Mode",
    "Doubt",
    "LaunchAccesses",
    "AccessRange",
    "orders_others",
    "summarize",
    "KernelSummary",
    "InstructionClass",
    "Feature",
]
