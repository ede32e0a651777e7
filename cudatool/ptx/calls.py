"""Which functions of a module call which, what calls itself, and what pointers to functions may hold."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from cudatool.ptx.model import Module, Symbol
from cudatool.ptx.operands import call_parts

__all__ = ["ModuleCalls", "function_addresses", "recursive"]


@dataclass(frozen=True, slots=True)
class ModuleCalls:
    """What has to be known of a whole module before the calls of one kernel can be merged: found once for all of them.

    Attributes
    ----------
    recursive
        The functions that call themselves, directly or through others.
    addresses
        What a pointer to each device function holds.
    pointed_to
        The functions whose address is taken anywhere.
    """

    recursive: frozenset[str]
    addresses: dict[str, int]
    pointed_to: tuple[str, ...]

    @classmethod
    def of(cls, module: Module) -> ModuleCalls:
        """Look at every function of a module.

        Raises
        ------
        PtxError
            A call has no target.
        """
        calls: dict[str, set[str]] = {}
        named = {r.symbol for variable in module.variables.values() for r in variable.relocations}
        for name, function in module.functions.items():
            called = calls.setdefault(name, set())
            for i in function.instructions:
                if i.opcode == "call":
                    target = call_parts(i)[1]
                    if isinstance(target, Symbol) and target.name in module.functions:
                        called.add(target.name)
                else:
                    named.update(operand.name for operand in i.operands if isinstance(operand, Symbol))
        pointed = tuple(name for name, one in module.functions.items() if name in named and one.has_body)
        return cls(recursive(calls), function_addresses(module), pointed)


def function_addresses(module: Module) -> dict[str, int]:
    """Return what a pointer to each device function holds. Nothing can be read there."""
    functions = (name for name, function in module.functions.items() if not function.is_kernel)
    return {name: 0x100 + 16 * number for number, name in enumerate(functions)}


def recursive(calls: Mapping[str, Set[str]]) -> frozenset[str]:
    """Return the functions that call themselves, directly or through others, in one walk (Tarjan, 1972).

    Those that reach each other form a component of the graph. The walk keeps for each function the earliest one on its
    own way that it can get back to; where that is the function itself, a component is complete.
    """
    found: set[str] = set()
    order: dict[str, int] = {}  # when the walk came to a function
    earliest: dict[str, int] = {}
    open_: list[str] = []  # not yet in a complete component
    is_open: set[str] = set()
    for root in calls:
        if root in order:
            continue
        way = [(root, iter(calls[root]))]
        while way:
            name, rest = way[-1]
            if name not in order:
                order[name] = earliest[name] = len(order)
                open_.append(name)
                is_open.add(name)
            for callee in rest:
                if callee not in order:
                    way.append((callee, iter(calls.get(callee, ()))))
                    break
                if callee in is_open:
                    earliest[name] = min(earliest[name], order[callee])
            else:
                way.pop()
                if way:
                    caller = way[-1][0]
                    earliest[caller] = min(earliest[caller], earliest[name])
                if earliest[name] == order[name]:
                    component = [open_.pop()]
                    while component[-1] != name:
                        component.append(open_.pop())
                    is_open.difference_update(component)
                    if len(component) > 1 or name in calls.get(name, ()):
                        found.update(component)
    return frozenset(found)
