"""PTX found in fatbins, object files and archives."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.ptx import PtxError, device_code, is_container, ptx_for, register_counts

PTX = b".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry kernel() { ret; }\n"
LONG = PTX + b"".join(b".visible .global .align 4 .u32 variable%d = %d;\n" % (i, i * i) for i in range(200))


def fatbin(*entries: tuple[str, bytes, str], options: tuple[str, ...] = ()) -> bytes:
    """Have nvFatbin make a fatbin of (kind, code, architecture)."""
    nvfatbin = pytest.importorskip("cuda.bindings.nvfatbin", reason="cuda.bindings has no nvFatbin")
    try:
        handle = nvfatbin.create(["-64", *options], 1 + len(options))
    except Exception as error:  # the bindings load the library here
        if "DynamicLibNotFound" not in type(error).__name__:
            raise
        pytest.skip("nvFatbin is not installed")
    try:
        for number, (kind, code, arch) in enumerate(entries):
            add = {"ptx": nvfatbin.add_ptx, "ltoir": nvfatbin.add_ltoir}[kind]
            add(handle, code, len(code), arch, f"unit{number}", "")
        data = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, data)
        return bytes(data)
    finally:
        nvfatbin.destroy(handle)


def plain_fatbin(text: bytes, arch: int, kind: int = 1) -> bytes:
    """Make an uncompressed fatbin without nvFatbin."""
    header = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 72, len(text), 0, 64, 3, 8, arch, 64, 0, 0x11, 0, 0)
    header = header.ljust(72, b"\0")
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(header) + len(text)) + header + text


def object_file(section: bytes, data: bytes, machine: int = 62) -> bytes:
    """Make a 64-bit ELF file with one named section."""
    names = b"\0" + section + b"\0"
    table = 64 + len(data) + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 1, machine, 1, 0, 0, table, 0, 64, 0, 0, 64, 2, 1)
    sections = struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, 64, len(data), 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64 + len(data), len(names), 0, 0, 1, 0)
    return header + data + names + sections


def archive(*members: bytes) -> bytes:
    data = b"!<arch>\n"
    for member in members:
        data += b"a.o/".ljust(48) + str(len(member)).encode().ljust(10) + b"`\n" + member + b"\n" * (len(member) % 2)
    return data


@pytest.mark.parametrize(
    "options",
    [("-compress=false",), ("-compress-all", "-compress-mode=speed"), ("-compress-all", "-compress-mode=size")],
    ids=["uncompressed", "lz4", "zstd"],
)
def test_ptx_of_what_nvfatbin_writes(options):
    assert [LONG] == ptx_for(fatbin(("ptx", LONG, "90"), options=options), 90)


def test_newest_ptx_that_the_device_can_run_is_taken():
    data = fatbin(("ptx", PTX.replace(b"sm_90", b"sm_80"), "80"), ("ptx", PTX, "90"))
    assert [(0, "ptx", 80), (0, "ptx", 90)] == sorted((c.unit, c.kind, c.arch) for c in device_code(data))
    assert b"sm_90" in ptx_for(data, 90)[0]
    assert b"sm_80" in ptx_for(data, 89)[0]
    assert [] == ptx_for(data, 75)


def test_plain_ptx_is_no_container_but_device_code():
    assert not is_container(PTX)
    assert [PTX] == ptx_for(PTX, 90)


def test_object_files_and_archives_hold_fatbins():
    one = object_file(b".nv_fatbin", plain_fatbin(PTX, 90))
    two = object_file(b"__nv_relfatbin", plain_fatbin(LONG, 80) + bytes(24) + plain_fatbin(PTX, 75))
    assert [PTX] == ptx_for(one, 90)
    assert [LONG, PTX] == ptx_for(two, 90)
    assert [PTX, LONG, PTX] == ptx_for(archive(one, b"no object file", two), 90)
    assert [] == ptx_for(object_file(b".text", b"\x90" * 16), 90)


def test_machine_code_has_no_ptx():
    cubin = object_file(b".text", bytes(16), machine=190)
    assert ["machine code"] == [code.kind for code in device_code(cubin)]
    assert ["machine code"] == [code.kind for code in device_code(plain_fatbin(cubin, 90, kind=2))]
    assert [] == ptx_for(plain_fatbin(cubin, 90, kind=2), 90)


@settings(deadline=None)
@given(st.data())
def test_anything_is_read_or_refused(data):
    whole = archive(object_file(b".nv_fatbin", plain_fatbin(PTX, 90)), object_file(b".text", b"", machine=190))
    start = data.draw(st.sampled_from([0, whole.index(b"\x7fELF"), whole.index(b"\x50\xed\x55\xba")]))
    damaged = bytearray(whole[start:])
    for position, value in data.draw(st.dictionaries(st.integers(0, 300), st.integers(0, 255), max_size=6)).items():
        damaged[position] = value
    for read in (lambda image: ptx_for(image, 90), register_counts):
        try:
            read(bytes(damaged))
        except PtxError:
            pass


def test_damaged_containers_are_refused():
    with pytest.raises(PtxError, match="a fatbin of"):
        ptx_for(plain_fatbin(PTX, 90)[:-1], 90)
    with pytest.raises(PtxError, match="damaged container"):
        ptx_for(object_file(b".nv_fatbin", b"")[:70], 90)


def test_compressed_code_is_no_longer_than_its_entry():
    """Entries that share their bytes could unpack to more than the file, each of them."""
    entry = struct.pack("<HHIQIIHHIIIQQQ", 1, 0x101, 72, 0, 900, 64, 3, 8, 90, 64, 0, 0x2000, 0, 2000)
    shared = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 72) + entry.ljust(72, b"\0")
    with pytest.raises(PtxError, match="900 compressed bytes in 0"):
        ptx_for(shared + bytes(900), 90)


@pytest.mark.parametrize("mode", ["speed", "size"])
def test_damaged_compressed_text_is_refused_or_different(mode):
    data = bytearray(fatbin(("ptx", LONG, "90"), options=("-compress-all", f"-compress-mode={mode}")))
    intact = ptx_for(bytes(data), 90)
    for position in range(len(data) - 200, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        try:
            text = ptx_for(bytes(damaged), 90)
        except PtxError:
            continue
        assert len(text[0]) <= len(intact[0]) + 1  # zeros at the end are not counted
