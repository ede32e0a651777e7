"""What a module declares, read off its PTX: :class:`.ModuleFacts`."""

from __future__ import annotations

import hashlib
from math import prod

from cudatool.ptx import Function, Module, function_addresses
from cudatool.sim.jit.context import MAX_THREADS
from cudatool.sim.jit.layout import Layout
from cudatool.sim.jit.source import DeclaredKernel, GlobalVariable, ModuleFacts, Param

__all__ = ["module_facts"]


def module_facts(module: Module) -> ModuleFacts:
    """Return what a module declares."""
    variables = [
        GlobalVariable(
            one.name,
            one.size,
            one.align,
            one.initial.hex(),
            [(r.offset, r.symbol, r.addend) for r in one.relocations],
            one.space == "const",
            one.managed,
        )
        for one in module.variables.values()
        if one.space in ("global", "const")
    ]
    # Native code of a kernel depends on what stands outside of functions, on all functions that it may call, and on
    # where they stand: it names lines of the PTX.
    shared_text = hashlib.sha256(module.preamble.encode())
    for function in module.functions.values():
        if not function.is_kernel:
            shared_text.update(f"\0{function.line} {function.text}".encode())
    kernels = module.kernels
    everywhere = [*module.variables.values(), *(v for one in module.functions.values() for v in one.variables.values())]
    return ModuleFacts(
        variables,
        sum(one.size for one in variables if one.constant),
        sum(one.size for one in everywhere if one.space == "shared"),
        {name: _declared(kernel, shared_text.copy()) for name, kernel in kernels.items() if kernel.has_body},
        list(kernels),
        function_addresses(module),
        module.register_counts,
    )


def _declared(kernel: Function, text: hashlib._Hash) -> DeclaredKernel:
    text.update(f"\0{kernel.line} {kernel.text}".encode())
    offsets = Layout.of_params(kernel).param_offsets
    params = [Param(offsets[one.name], one.size, one.align, one.pointer) for one in kernel.params]
    limits = kernel.directives.get("maxntid") or kernel.directives.get("reqntid")
    threads = prod(limits) if limits else MAX_THREADS
    return DeclaredKernel(params, threads, len(kernel.instructions), text.hexdigest())
