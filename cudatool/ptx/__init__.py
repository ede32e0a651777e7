"""PTX parsed: what the software device and static analysis both start from."""

from cudatool.ptx.container import DeviceCode, device_code, is_container, ptx_for
from cudatool.ptx.flow import Block, Flow
from cudatool.ptx.inline import inline_calls
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
from cudatool.ptx.parser import parse

__all__ = [
    "parse",
    "parse_image",
    "inline_calls",
    "link",
    "join",
    "split",
    "undefined",
    "LinkError",
    "DeviceCode",
    "device_code",
    "is_container",
    "ptx_for",
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
]
