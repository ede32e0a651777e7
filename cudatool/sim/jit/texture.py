"""Textures and surfaces. Semantics: PTX ISA, 9.7.10 and 9.7.11.

Texels are fetched by C functions of the package (``cudatool/sim/_texture.c``), from the record that the object's handle
points to; so checkers and footprints do not see what a texture reads. A surface's elements are accessed here, as any
other memory. Results between texels differ from a GPU's in the last bits: it keeps weights in 8 bits, as is done here,
but nobody says how it rounds them.
"""

from __future__ import annotations

from cudatool.ptx import Address, Immediate, Instruction, Operand, Pair, Register, Symbol, type_bytes
from cudatool.sim.jit.emit import READ, WRITE, Emitter
from cudatool.sim.jit.table import elements, lowers, types_of

__all__: list[str] = []

_GEOMETRIES = {"1d": 0, "2d": 1, "3d": 2, "a1d": 3, "a2d": 4, "cube": 5, "acube": 6}
_OUTSIDE = {"trap": 0, "clamp": 1, "zero": 2}
_WORDS = "<4 x i32>"


def _geometry(e: Emitter, i: Instruction) -> str:
    found = next((modifier for modifier in i.modifiers if modifier in _GEOMETRIES), None)
    if found is None:
        raise e.unsupported()
    return found


def _object(e: Emitter, i: Instruction, address: Operand) -> tuple[str, list[Operand]]:
    """Return a pointer to the object's record, and the coordinates. A texture reference holds its object's handle."""
    if not isinstance(address, Address) or not address.coordinates:
        raise e.unsupported("operand")
    if isinstance(address.base, Symbol):
        variable = e.op(f"inttoptr i64 {e.address_of(address.base)} to ptr")
        handle = e.op(f"load i64, ptr {variable}")
    elif isinstance(address.base, Register):
        handle = e.get(address.base, "u64")
    else:
        raise e.unsupported("operand")
    vector = address.coordinates[-1]  # a sampler may come before it: an object is both
    return e.op(f"inttoptr i64 {handle} to ptr"), list(elements(vector))


def _place(e: Emitter, geometry: str, coordinates: list[Operand], kind: str) -> tuple[str, list[str]]:
    """Return the layer, and three coordinates as doubles (of textures) or i32 (of surfaces)."""
    layer = "0"
    if geometry[0] == "a":
        layer = e.get(coordinates.pop(0), "b32")
    count = {"1": 1, "2": 2, "3": 3, "c": 3}[geometry.lstrip("a")[0]]
    values = []
    for operand in [*coordinates[:count], *[Immediate(0)] * (3 - count)][:3]:
        if isinstance(operand, Immediate) and not operand.width and operand.value == 0:
            values.append("0" if kind == "i32" else "0.0")
        elif kind == "i32":
            values.append(e.get(operand, "s32"))
        elif kind == "s32":
            values.append(e.op(f"sitofp i32 {e.get(operand, 's32')} to double"))
        else:
            values.append(e.op(f"fpext float {e.get(operand, 'f32')} to double"))
    return layer, values


def _take(e: Emitter, i: Instruction, found: str) -> None:
    target = i.operands[0]
    if isinstance(target, Pair):  # whether the texture's memory is there: it always is
        e.set(target.second, "true", "pred")
        target = target.first
    for index, register in enumerate(elements(target)):
        e.set(register, e.op(f"extractelement {_WORDS} {found}, i32 {index}"), "b32")


def _fetched(e: Emitter, i: Instruction, function: str, choice: str, *, has_level: bool) -> None:
    result, coordinate = types_of(i)
    if result not in ("f32", "s32", "u32"):
        raise e.unsupported()
    geometry = _geometry(e, i)
    record, coordinates = _object(e, i, i.operands[1])
    layer, (x, y, z) = _place(e, geometry, coordinates, coordinate)
    found = e.call(
        _WORDS,
        function,
        *(f"ptr {record}", f"i32 {_GEOMETRIES[geometry]}", f"i32 {choice}", f"i32 {layer}"),
        *(f"double {value}" for value in (x, y, z)),
        *([f"double {_level(e, i, record, geometry)}"] if has_level else []),
    )
    _take(e, i, found)


def _level(e: Emitter, i: Instruction, record: str, geometry: str) -> str:
    """Return the level of detail as a double: the one that is given, that of gradients, or the first."""
    kind = types_of(i)[-1]
    if "level" in i.modifiers:
        value = e.get(i.operands[2], kind)
        return e.op(f"sitofp i32 {value} to double" if kind == "s32" else f"fpext float {value} to double")
    if "grad" not in i.modifiers:
        return "0.0"
    steps = []
    for operand in i.operands[2:4]:
        steps += _place(e, geometry.lstrip("a"), list(elements(operand)), kind)[1]
    return e.call(
        "double",
        "cudatool_texture_gradient",
        *(f"ptr {record}", f"i32 {_GEOMETRIES[geometry]}"),
        *(f"double {value}" for value in steps),
    )


@lowers("tex")
def _tex(e: Emitter, i: Instruction) -> None:
    _fetched(e, i, "cudatool_texture_level", "1" if types_of(i)[-1] == "s32" else "0", has_level=True)


@lowers("tld4")
def _tld4(e: Emitter, i: Instruction) -> None:
    _fetched(e, i, "cudatool_gather", str("rgba".index(i.modifiers[0])), has_level=False)


def _element(e: Emitter, i: Instruction, address: Operand, size: int) -> str:
    """Return where a surface's element is, as i64; outside of the surface the thread traps, or it is 0."""
    geometry = _geometry(e, i)
    outside = _OUTSIDE[next(modifier for modifier in i.modifiers if modifier in _OUTSIDE)]
    record, coordinates = _object(e, i, address)
    layer, (x, y, z) = _place(e, geometry, coordinates, "i32")
    place = e.call(
        "i64",
        "cudatool_surface",
        *(f"ptr {record}", f"i32 {_GEOMETRIES[geometry]}", f"i32 {outside}", f"i32 {size}"),
        *(f"i32 {value}" for value in (layer, x, y, z)),
    )
    bad, after = e.new_label(), e.new_label()
    e.emit(f"br i1 {e.op(f'icmp eq i64 {place}, 1')}, label %{bad}, label %{after}")
    e.label(bad)
    e.stop("TRAP")
    e.emit(f"br label %{after}")
    e.label(after)
    return place


@lowers("suld")
def _suld(e: Emitter, i: Instruction) -> None:
    if "b" not in i.modifiers:
        raise e.unsupported()
    t = types_of(i)[-1]
    size, targets = type_bytes(t), elements(i.operands[0])
    place = _element(e, i, i.operands[1], size * len(targets))
    for register in targets:
        e.set(register, "0", t)
    inside, after = e.new_label(), e.new_label()
    e.emit(f"br i1 {e.op(f'icmp ne i64 {place}, 0')}, label %{inside}, label %{after}")
    e.label(inside)
    pointer = e.guarded("global", e.op(f"inttoptr i64 {place} to ptr"), size * len(targets), READ, i)
    for index, register in enumerate(targets):
        at = e.op(f"getelementptr i8, ptr {pointer}, i64 {size * index}")
        e.set(register, e.op(f"load i{8 * size}, ptr {at}, align {size}"), t)
    e.emit(f"br label %{after}")
    e.label(after)


@lowers("sust")
def _sust(e: Emitter, i: Instruction) -> None:
    if "b" not in i.modifiers:
        raise e.unsupported()
    t = types_of(i)[-1]
    size, sources = type_bytes(t), elements(i.operands[1])
    place = _element(e, i, i.operands[0], size * len(sources))
    inside, after = e.new_label(), e.new_label()
    e.emit(f"br i1 {e.op(f'icmp ne i64 {place}, 0')}, label %{inside}, label %{after}")
    e.label(inside)
    pointer = e.guarded("global", e.op(f"inttoptr i64 {place} to ptr"), size * len(sources), WRITE, i)
    for index, source in enumerate(sources):
        at = e.op(f"getelementptr i8, ptr {pointer}, i64 {size * index}")
        e.emit(f"store i{8 * size} {e.get(source, t)}, ptr {at}, align {size}")
    e.emit(f"br label %{after}")
    e.label(after)


# Queries: field of the record, by the PTX name.
_FIELDS = {"width": 24, "height": 28, "depth": 32, "array_size": 32, "normalized_coords": 52}


@lowers("txq suq")
def _query(e: Emitter, i: Instruction) -> None:
    offset = next((_FIELDS[modifier] for modifier in i.modifiers if modifier in _FIELDS), None)
    address = i.operands[1]
    if offset is None or not isinstance(address, Address) or not isinstance(address.base, Register):
        raise e.unsupported()
    record = e.op(f"inttoptr i64 {e.get(address.base, 'u64')} to ptr")
    pointer = e.op(f"getelementptr i8, ptr {record}, i64 {offset}")
    e.set(i.operands[0], e.op(f"load i32, ptr {pointer}"), "b32")
