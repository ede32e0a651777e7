"""PTX parsed: what the software device and static analysis both start from."""

from cudatool.ptx.flow import Block, Flow
from cudatool.ptx.inline import inline_calls
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
    "inline_calls",
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
