"""Textures and surfaces. Semantics: PTX ISA, 9.7.10 and 9.7.11.

Texels are fetched by C functions of the package (``cudatool/sim/_texture.c``), from the record that the object's handle
points to. Instrumented code asks first which texels a fetch will read, and observes each. A surface's elements are
accessed here, as any other memory. Results between texels differ from a GPU's in the last bits: it keeps weights in 8
bits, as is done here, but no document says how it rounds them.
"""

from __future__ import annotations

from cudatool.ptx import Address, Immediate, Instruction, Operand, Pair, Register, Symbol, elements, type_bytes
from cudatool.sim.jit.emit import ENVIRONMENT, READ, WRITE, Emitter
from cudatool.sim.jit.instrument import Flag
from cudatool.sim.jit.table import lowers, types_of

__all__ = ["first_in_line", "take_word"]

_GEOMETRIES = {"1d": 0, "2d": 1, "3d": 2, "a1d": 3, "a2d": 4, "cube": 5, "acube": 6}
_OUTSIDE = {"trap": 0, "clamp": 1, "zero": 2}
_WORDS = "<4 x i32>"
# Where fields of the record are (struct texture of _texture.c); those of queries by the PTX name.
_FIELDS = {"width": 24, "height": 28, "depth": 32, "array_size": 32, "normalized_coords": 52}
_FIELDS |= {"data": 0, "channels": 36, "channel_bytes": 40, "kind": 44, "as_integer": 48, "levels": 92}
_QUERIES = frozenset({"width", "height", "depth", "array_size", "normalized_coords"})
_PLACE, _WHOLE, _GATHER = "0", "1", "2"  # how a fetch is made, as _texture.c counts


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


def _take(e: Emitter, i: Instruction, found: list[str]) -> None:
    target = i.operands[0]
    if isinstance(target, Pair):  # whether the texture's memory is there: it always is
        e.set(target.second, "true", "pred")
        target = target.first
    for index, register in enumerate(elements(target)):
        e.set(register, found[index], "b32")


def _words(e: Emitter, found: str) -> list[str]:
    return [e.op(f"extractelement {_WORDS} {found}, i32 {index}") for index in range(4)]


def _fetched(e: Emitter, i: Instruction, function: str, how: str, choice: str) -> None:
    result, coordinate = types_of(i)
    if result not in ("f32", "s32", "u32"):
        raise e.unsupported()
    geometry = _geometry(e, i)
    record, coordinates = _object(e, i, i.operands[1])
    layer, (x, y, z) = _place(e, geometry, coordinates, coordinate)
    texture = (f"ptr {record}", f"i32 {_GEOMETRIES[geometry]}")
    place = [f"i32 {layer}", *(f"double {value}" for value in (x, y, z))]
    level = f"double {_level(e, i, record, geometry)}"
    arguments = (*texture, f"i32 {choice}", *place, *([level] if how != _GATHER else []))
    if not e.instrument:
        if how == _WHOLE and geometry == "1d":
            return _take(e, i, _words(e, _quickly(e, record, coordinates[0], function, arguments)))
        return _take(e, i, _words(e, e.call(_WORDS, function, *arguments)))
    start, fetch, after = e.new_label(), e.new_label(), e.new_label()
    readable = _observe(e, i, *texture, f"i32 {how}", *place, level)
    e.emit(f"br label %{start}")
    e.label(start)
    e.emit(f"br i1 {readable}, label %{fetch}, label %{after}")
    e.label(fetch)
    found = e.call(_WORDS, function, *arguments)
    e.emit(f"br label %{after}")
    e.label(after)
    return _take(e, i, _words(e, e.op(f"phi {_WORDS} [ {found}, %{fetch} ], [ zeroinitializer, %{start} ]")))


def _quickly(e: Emitter, record: str, place: Operand, function: str, arguments: tuple[str, ...]) -> str:
    """Return the texel at an integer place of a line: in most textures, one word that is read as it is."""
    index = e.get(place, "s32")
    inside = e.op(f"icmp ult i32 {index}, {_field(e, record, 'width', 'i32')}")
    data = _field(e, record, "data", "ptr")
    quick = e.op(f"and i1 {inside}, {_is_of_words(e, record)}")
    here, there, after = e.new_label(), e.new_label(), e.new_label()
    e.emit(f"br i1 {quick}, label %{here}, label %{there}")
    e.label(here)
    word = e.op(f"load i32, ptr {e.op(f'getelementptr i32, ptr {data}, i32 {index}')}, align 4")
    found = e.op(f"insertelement {_WORDS} zeroinitializer, i32 {word}, i32 0")
    e.emit(f"br label %{after}")
    e.label(there)
    fetched = e.call(_WORDS, function, *arguments)
    e.emit(f"br label %{after}")
    e.label(after)
    return e.op(f"phi {_WORDS} [ {found}, %{here} ], [ {fetched}, %{there} ]")


def _field(e: Emitter, record: str, name: str, kind: str) -> str:
    pointer = e.op(f"getelementptr i8, ptr {record}, i64 {_FIELDS[name]}")
    return e.op(f"load {kind}, ptr {pointer}, !invariant.load !0")


def _is_of_words(e: Emitter, record: str) -> str:
    """Return whether a texture's elements are words that are read as they are."""
    one_word = e.op(f"icmp eq i64 {_field(e, record, 'channels', 'i64')}, {4 << 32 | 1}")  # and bytes of a channel
    as_it_is = e.op(f"icmp uge i64 {_field(e, record, 'kind', 'i64')}, 2")  # floating, or read as integers
    one_level = e.op(f"icmp eq i32 {_field(e, record, 'levels', 'i32')}, 0")
    return e.op(f"and i1 {e.op(f'and i1 {one_word}, {as_it_is}')}, {one_level}")


def first_in_line(e: Emitter, i: Instruction, reach: str, conditions: list[str]) -> str:
    """Return where the texel is that a thread fetches at an integer place of a line.

    Added to the `conditions` is what must hold for it to be a word that is read as it is, and for the one of a thread
    whose place is further by `reach` (i64), too.
    """
    record, coordinates = _object(e, i, i.operands[1])
    first = e.op(f"sext i32 {e.get(coordinates[0], 's32')} to i64")
    width = e.op(f"zext i32 {_field(e, record, 'width', 'i32')} to i64")
    for place in (first, e.op(f"add nsw i64 {first}, {reach}")):
        conditions.append(e.op(f"icmp ult i64 {place}, {width}"))
    conditions.append(_is_of_words(e, record))
    return e.op(f"getelementptr i32, ptr {_field(e, record, 'data', 'ptr')}, i64 {first}")


def take_word(e: Emitter, i: Instruction, pointer: str) -> None:
    """Emit a fetch of a word that is read as it is."""
    word = e.op(f"load i32, ptr {pointer}, align 4{e.group('global')}")
    _take(e, i, [word, "0", "0", "0"])


def _observe(e: Emitter, i: Instruction, *fetch: str) -> str:
    """Observe what a fetch reads, by a function of the instruction's own; return whether all of it may be read."""
    body = e.nested()
    used = []
    for size in (1, 2, 4):
        body.label(f"size.{size}")
        used.append(body.guarded("global", "%pointer", size, READ, i, flags=Flag.TEXTURE))
        body.emit(f"br label %seen.{size}")
        body.label(f"seen.{size}")
        body.emit("br label %more")
    e.validated |= body.validated
    e.define("declare i32 @cudatool_texels(ptr, i32, i32, i32, double, double, double, double, ptr)")
    parameters = f"{ENVIRONMENT}, ptr %local, i32 %t"
    given = "ptr %record, i32 %geometry, i32 %how, i32 %layer, double %x, double %y, double %z, double %level"
    same = ", ".join(f"[ {pointer}, %seen.{size} ]" for pointer, size in zip(used, (1, 2, 4), strict=True))
    observe = "\n".join(body.lines)
    e.define(f"""
define internal i1 @texels_{i.line}({parameters}, {given}) noinline {{
entry:
  %places = alloca [64 x i64]
  %found = call i32 @cudatool_texels({given}, ptr %places)
  %count = lshr i32 %found, 3
  %piece = and i32 %found, 7
  br label %next
next:
  %i = phi i32 [ 0, %entry ], [ %i.next, %more ]
  %good = phi i1 [ true, %entry ], [ %good.next, %more ]
  %done = icmp uge i32 %i, %count
  br i1 %done, label %end, label %look
look:
  %place.p = getelementptr i64, ptr %places, i32 %i
  %place = load i64, ptr %place.p
  %pointer = inttoptr i64 %place to ptr
  switch i32 %piece, label %size.4 [ i32 1, label %size.1 i32 2, label %size.2 ]
{observe}
more:
  %used = phi ptr {same}
  %unchanged = icmp eq ptr %used, %pointer
  %good.next = and i1 %good, %unchanged
  %i.next = add i32 %i, 1
  br label %next
end:
  ret i1 %good
}}""")
    return e.op(f"call i1 @texels_{i.line}({parameters}, {', '.join(fetch)})")


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
    how = _WHOLE if types_of(i)[-1] == "s32" else _PLACE
    _fetched(e, i, "cudatool_texture_level", how, how)


@lowers("tld4")
def _tld4(e: Emitter, i: Instruction) -> None:
    _fetched(e, i, "cudatool_gather", _GATHER, str("rgba".index(i.modifiers[0])))


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
    with e.when(e.op(f"icmp eq i64 {place}, 1")):
        e.stop("TRAP")
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
    with e.when(e.op(f"icmp ne i64 {place}, 0")):
        pointer = e.op(f"inttoptr i64 {place} to ptr")
        pointer = e.guarded("global", pointer, size * len(targets), READ, i, flags=Flag.TEXTURE)
        for index, register in enumerate(targets):
            at = e.op(f"getelementptr i8, ptr {pointer}, i64 {size * index}")
            e.set(register, e.op(f"load i{8 * size}, ptr {at}, align {size}"), t)


@lowers("sust")
def _sust(e: Emitter, i: Instruction) -> None:
    if "b" not in i.modifiers:
        raise e.unsupported()
    t = types_of(i)[-1]
    size, sources = type_bytes(t), elements(i.operands[1])
    place = _element(e, i, i.operands[0], size * len(sources))
    with e.when(e.op(f"icmp ne i64 {place}, 0")):
        pointer = e.guarded("global", e.op(f"inttoptr i64 {place} to ptr"), size * len(sources), WRITE, i)
        for index, source in enumerate(sources):
            at = e.op(f"getelementptr i8, ptr {pointer}, i64 {size * index}")
            e.emit(f"store i{8 * size} {e.get(source, t)}, ptr {at}, align {size}")


@lowers("txq suq")
def _query(e: Emitter, i: Instruction) -> None:
    offset = next((_FIELDS[modifier] for modifier in i.modifiers if modifier in _QUERIES), None)
    address = i.operands[1]
    if offset is None or not isinstance(address, Address) or not isinstance(address.base, Register):
        raise e.unsupported()
    record = e.op(f"inttoptr i64 {e.get(address.base, 'u64')} to ptr")
    pointer = e.op(f"getelementptr i8, ptr {record}, i64 {offset}")
    e.set(i.operands[0], e.op(f"load i32, ptr {pointer}"), "b32")
