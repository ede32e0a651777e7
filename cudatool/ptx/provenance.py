"""What a register's value may have been computed from, of what matters for addresses.

A :data:`Value` is a set of alternatives, of which the register holds one; an alternative is the set of what was added
up to it (:data:`Sum`). ``selp`` and several writers of a register give alternatives, ``add`` gives sums::

    add.s64  %a, %p, %i;      ->  %a: {p + i}
    selp.b64 %b, %p, %q, %c;  ->  %b: {p, q}
    add.s64  %c, %b, %i;      ->  %c: {p + i, q + i}

A sum of nothing is a number: products, thread indices, floating-point results. No alternative at all is a register
that nothing has written.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

from cudatool.ptx.model import PtxError

__all__ = [
    "ANYWHERE",
    "LITERAL",
    "NULL",
    "NUMBER",
    "UNDEFINED",
    "Origin",
    "OriginKind",
    "Sum",
    "Value",
    "add",
    "join",
    "of",
    "pieces_only",
    "shift",
    "whole",
]


class OriginKind(StrEnum):
    """What an :class:`Origin` is."""

    PARAMETER = "parameter"  # the 8 bytes at `offset` of a kernel parameter
    LOADED = "loaded"  # 8 bytes of memory that was reached through a parameter or variable
    PIECE = "piece"  # less than 8 bytes of a kernel parameter; `part` is where they begin
    LOADED_PIECE = "loaded piece"
    VARIABLE = "variable"  # the address of a .global or .const variable
    SHARED = "shared"  # the address of a shared variable plus `offset`
    LOCAL = "local"
    ENTRY = "entry"  # the address of a kernel parameter itself plus `offset`
    HEAP = "heap"  # the device's own memory: what malloc returned, or where the driver keeps grid barriers
    LITERAL = "literal"  # a constant too small to be an address
    NULL = "null"  # zero, and an index added to it
    MANY = "many"  # marks a value with too many alternatives: each origin stands alone


class Origin(NamedTuple):
    """One thing that a value may come from; `name` is a parameter's or variable's."""

    kind: OriginKind
    name: str = ""
    offset: int = 0
    part: int = 0


Sum = frozenset[Origin]
Value = frozenset[Sum]

ANYWHERE: Final = -1
"""The offset of what may be at any offset."""

UNDEFINED: Final[Value] = frozenset()
NUMBER: Final[Value] = frozenset({frozenset()})
_LITERAL_SUM: Final[Sum] = frozenset({Origin(OriginKind.LITERAL)})
LITERAL: Final[Value] = frozenset({_LITERAL_SUM})
_NULL_SUM: Final[Sum] = frozenset({Origin(OriginKind.NULL)})
NULL: Final[Value] = frozenset({_NULL_SUM})
_MANY_SUM: Final[Sum] = frozenset({Origin(OriginKind.MANY)})

_HAS_OFFSET: Final = (OriginKind.SHARED, OriginKind.LOCAL, OriginKind.ENTRY)
_WHOLE: Final = {OriginKind.PIECE: OriginKind.PARAMETER, OriginKind.LOADED_PIECE: OriginKind.LOADED}
_POINTERS: Final = {*_WHOLE, *_WHOLE.values()}
_SHIFTED: Final = {*_WHOLE, OriginKind.HEAP}
_MAX_ALTERNATIVES, _MAX_TERMS, _MAX_OFFSETS, _MAX_ORIGINS = 16, 8, 6, 64
_MAX_OFFSET = 1 << 20
_TOO_MANY: Final = 256  # of different names: no program computes with so many pointers at once


def of(*origins: Origin) -> Value:
    """Return the value that is one of `origins`."""
    return frozenset(map(_single, origins))


@lru_cache(maxsize=1 << 14)
def _single(origin: Origin) -> Sum:
    return frozenset({origin})


# The same few values meet again and again.
@lru_cache(maxsize=1 << 13)
def join(first: Value, second: Value) -> Value:
    """Return what may be either."""
    if first == second or not second:
        return first
    return _limited(first | second) if first else second


@lru_cache(maxsize=1 << 13)
def add(first: Value, second: Value) -> Value:
    """Return what may be a sum of the two, or a difference, or a combination of their bits."""
    if _MANY_SUM in first or _MANY_SUM in second:
        return _alone(_sums_of_many(first, second)) if first and second else UNDEFINED
    if len(first) == 1 and len(second) == 1:
        (a,), (b,) = first, second
        return _limited(frozenset({_sum(a, b)}))
    return _limited(frozenset(_sum(a, b) for a in first for b in second))


def _sums_of_many(first: Value, second: Value) -> Value:
    """Return the alternatives that sums can have, without forming them; a number only where both may be one."""
    either, numbers = first | second, NUMBER | LITERAL
    return either if first & numbers and second & numbers else either - NUMBER


def _sum(a: Sum, b: Sum) -> Sum:
    terms = a | b
    if terms <= _LITERAL_SUM | _NULL_SUM:
        return _NULL_SUM if terms >= _NULL_SUM else _LITERAL_SUM & a & b
    terms -= _LITERAL_SUM | _NULL_SUM
    if any(term.kind in _HAS_OFFSET for term in terms):
        terms = frozenset(t._replace(offset=ANYWHERE) if t.kind in _HAS_OFFSET else t for t in terms)
    if len(terms) > _MAX_TERMS:
        terms = _assembled(terms)
        if len(terms) > _MAX_TERMS:  # no pointer is put together from so many parts: those are indices
            terms = frozenset(term for term in terms if term.kind not in _WHOLE)
    return terms


def _assembled(terms: Iterable[Origin]) -> Sum:
    """Return `terms` with pieces replaced by what they are pieces of, where at least two parts of it are there."""
    parts: dict[tuple[OriginKind, str, int], set[int]] = {}
    for term in terms:
        if term.kind in _WHOLE:
            parts.setdefault((term.kind, term.name, term.offset), set()).add(term.part)
    both = {key for key, found in parts.items() if len(found) > 1}
    return frozenset(Origin(_WHOLE[term.kind], term.name, term.offset) if term[:3] in both else term for term in terms)


def shift(value: Value, distance: int) -> Value:
    """Return `value` plus a known number of bytes."""
    if not any(term.kind in _HAS_OFFSET for terms in value for term in terms):
        return value
    return _limited(frozenset(frozenset(_moved(term, distance) for term in terms) for terms in value))


def _moved(term: Origin, distance: int) -> Origin:
    if term.kind not in _HAS_OFFSET or term.offset == ANYWHERE:
        return term
    offset = term.offset + distance
    return term._replace(offset=offset if 0 <= offset < _MAX_OFFSET else ANYWHERE)


def _limited(value: Value) -> Value:
    """Return `value`, made coarser if it has grown too large, so that every chain of joins ends."""
    if len(value) == 1 and all(len(terms) <= _MAX_TERMS for terms in value):
        return value
    offsets: dict[tuple[OriginKind, str], set[int]] = {}
    for term in chain.from_iterable(value):
        if term.kind in _HAS_OFFSET:
            offsets.setdefault((term.kind, term.name), set()).add(term.offset)
    blurred = {
        key for key, known in offsets.items() if len(known) > 1 and (ANYWHERE in known or len(known) > _MAX_OFFSETS)
    }
    if blurred:
        value = frozenset(
            frozenset(t._replace(offset=ANYWHERE) if (t.kind, t.name) in blurred else t for t in terms)
            for terms in value
        )
    if len(value) > _MAX_ALTERNATIVES or any(len(terms) > _MAX_TERMS or terms >= _MANY_SUM for terms in value):
        return _alone(value)
    return value


def _alone(value: Value) -> Value:
    """Return `value` with each origin as an alternative of its own; of very many, no offsets are kept."""
    origins = set(chain.from_iterable(value))
    if len(origins) > _MAX_ORIGINS:
        origins = {
            Origin(_WHOLE.get(term.kind, term.kind), term.name, ANYWHERE) if term.kind in _POINTERS else term
            for term in origins
        }
    if len(origins) > _TOO_MANY:
        raise PtxError(f"a value that may come from more than {_TOO_MANY} parameters and variables")
    alone = of(*origins, *_MANY_SUM)
    return alone | NUMBER if frozenset() in value else alone


def pieces_only(value: Value) -> Value:
    """Return what is left of `value` after a shift by bits: parts of pointers, from which one may be put together."""
    return _limited(frozenset(frozenset(term for term in terms if term.kind in _SHIFTED) for terms in value))


def whole(value: Value) -> list[Sum]:
    """Return the alternatives of an address.

    Pieces become what they are pieces of where at least two parts of it were put together, and are numbers otherwise.
    A null pointer, and a literal, are left out if there is anything else: they are not accessed.
    """
    assembled = _assembled(set(chain.from_iterable(value)))
    found = set()
    for terms in value - {_MANY_SUM}:
        wholes = (t if t.kind not in _WHOLE else Origin(_WHOLE[t.kind], t.name, t.offset) for t in terms)
        found.add(frozenset(term for term in wholes if term in assembled))
    for nothing in (_NULL_SUM, _LITERAL_SUM):
        if len(found) > 1:
            found.discard(nothing)
    return sorted(found, key=sorted)
