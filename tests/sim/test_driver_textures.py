"""Arrays, texture and surface objects: fetches against NumPy, and the errors of misuse.

Between texels a GPU keeps weights in 8 bits and does not say how it rounds them; so does the software device, and
filtered values are compared with a tolerance of one such step.
"""

from __future__ import annotations

import ctypes
import itertools
import math

import numpy as np
import pytest

FORMATS = {
    np.dtype(name): value
    for name, value in (("u1", 1), ("u2", 2), ("u4", 3), ("i1", 8), ("i2", 9), ("i4", 10), ("f2", 16), ("f4", 32))
}
WRAP, CLAMP, MIRROR, BORDER = range(4)
AS_INTEGER, NORMALIZED, SRGB = 1, 2, 16
HEADER = ".version 8.3\n.target sm_80\n.address_size 64\n"
LAYERED, SURFACE, CUBEMAP, GATHER = 1, 2, 4, 8


@pytest.fixture
def device(driver, ok):
    """Make arrays and objects that are destroyed at the end."""
    return Device(driver, ok)


class Device:
    def __init__(self, driver, ok):
        self.driver, self.ok = driver, ok
        self.cleanup = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for undo in reversed(self.cleanup):
            self.ok(undo())

    def array(self, data, channels=1, flags=0, extent=None):
        """Return an array filled with `data`, of shape ([depth,] [height,] width, channels)."""
        d = self.driver
        width, height, depth = extent or (*reversed(data.shape[:-1]), 0, 0)[:3]
        wanted = d.CUDA_ARRAY3D_DESCRIPTOR()
        wanted.Width, wanted.Height, wanted.Depth = width, height, depth
        wanted.Format, wanted.NumChannels = d.CUarray_format(FORMATS[data.dtype]), channels
        wanted.Flags = flags
        array = self.ok(d.cuArray3DCreate(wanted))
        self.cleanup.append(lambda: d.cuArrayDestroy(array))
        self.ok(d.cuMemcpyHtoA(array, 0, np.ascontiguousarray(data).ctypes.data, data.nbytes))
        return array

    def resource(self, array):
        resource = self.driver.CUDA_RESOURCE_DESC()
        resource.resType = self.driver.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
        resource.res.array.hArray = array
        return resource

    def texture(self, resource, mode=(CLAMP,) * 3, linear=False, flags=0, border=(0, 0, 0, 0)):
        d = self.driver
        wanted = d.CUDA_TEXTURE_DESC()
        wanted.addressMode = [d.CUaddress_mode(m) for m in mode]
        wanted.filterMode = d.CUfilter_mode(int(linear))
        wanted.flags = flags
        wanted.borderColor = list(border)
        texture = self.ok(d.cuTexObjectCreate(resource, wanted, None))
        self.cleanup.append(lambda: d.cuTexObjectDestroy(texture))
        return int(texture)

    def surface(self, array):
        surface = self.ok(self.driver.cuSurfObjectCreate(self.resource(array)))
        self.cleanup.append(lambda: self.driver.cuSurfObjectDestroy(surface))
        return int(surface)

    def memory(self, data):
        address = self.ok(self.driver.cuMemAlloc(data.nbytes))
        self.cleanup.append(lambda: self.driver.cuMemFree(address))
        self.ok(self.driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
        return int(address)

    def run(self, body, threads, *arguments):
        """Run a kernel of one block whose parameters are 64 bits each; return the driver's status."""
        d = self.driver
        params = ", ".join(f".param .u64 p{n}" for n in range(len(arguments)))
        loads = "\n".join(f"ld.param.u64 %p{n}, [p{n}];" for n in range(len(arguments)))
        text = f"""{HEADER}.visible .entry k({params}) {{ .reg .b64 %p<8>, %a; .reg .b32 %t; .reg .f32 %c<4>, %f<4>;
        .reg .b32 %r<8>; .reg .b16 %h<4>; .reg .pred %q; mov.u32 %t, %tid.x; {loads} {body} ret; }}"""
        module = self.ok(d.cuModuleLoadData(text.encode() + b"\0"))
        kernel = self.ok(d.cuModuleGetFunction(module, b"k"))
        values = tuple(int(argument) for argument in arguments)
        self.ok(d.cuLaunchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, 0, (values, (ctypes.c_uint64,) * len(values)), 0))
        status = d.cuCtxSynchronize()[0]
        if status == d.CUresult.CUDA_SUCCESS:
            self.ok(d.cuModuleUnload(module))
        return status

    def fetch(self, texture, instruction, coordinates, result="f4"):
        """Fetch at each row of `coordinates` (float32 or int32); returns an array of shape (rows, 4)."""
        coordinates = np.ascontiguousarray(coordinates)
        rows, count = coordinates.shape
        where, out = self.memory(coordinates), np.zeros((rows, 4), result)
        place = self.memory(out)
        loads = "\n".join(f"ld.global.b32 %r{n}, [%a+{4 * n}]; mov.b32 %c{n}, %r{n};" for n in range(count))
        layered = instruction.split(".")[1 if instruction.startswith("tex") else 2][0] == "a"
        kind = "r" if coordinates.dtype.kind == "i" else "c"
        names = [f"%{'r' if layered and not n else kind}{n}" for n in range(count)]
        names += names[-1:] * (count == 3)
        body = f"""mad.wide.u32 %a, %t, {4 * count}, %p1; {loads}
        {instruction} {{%r4, %r5, %r6, %r7}}, [%p0, {{{", ".join(names)}}}];
        mad.wide.u32 %a, %t, 16, %p2; st.global.v4.b32 [%a], {{%r4, %r5, %r6, %r7}};"""
        assert self.run(body, rows, texture, where, place) == self.driver.CUresult.CUDA_SUCCESS
        self.ok(self.driver.cuMemcpyDtoH(out.ctypes.data, place, out.nbytes))
        return out


def index(i, size, mode):
    """Return the texel that an address mode leads to, or None for the border."""
    if 0 <= i < size:
        return i
    if mode == BORDER:
        return None
    if mode == CLAMP:
        return min(max(i, 0), size - 1)
    if mode == WRAP:
        return i % size
    return (i % (2 * size)) if i % (2 * size) < size else 2 * size - 1 - i % (2 * size)


def reference(data, place, mode, linear, normalized, border=0.0):
    """Fetch from `data` (..., z, y, x) at `place` (x, y, z), as the CUDA programming guide says."""
    sizes = data.shape[::-1]
    scaled = [p * size if normalized else p for p, size in zip(place, sizes, strict=True)]

    def texel(indices):
        found = [index(i, size, m) for i, size, m in zip(indices, sizes, mode, strict=False)]
        return border if None in found else float(data[tuple(reversed(found))])

    if not linear:
        return texel([math.floor(p) for p in scaled])
    total = 0.0
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        share, indices = 1.0, []
        for p, step in zip(scaled, corner, strict=True):
            fraction = p - 0.5 - math.floor(p - 0.5)
            share *= fraction if step else 1 - fraction
            indices.append(math.floor(p - 0.5) + step)
        total += share * texel(indices)
    return total


COORDINATES = [-1.3, -0.4, -0.01, 0.0, 0.1, 0.25, 0.49, 0.5, 0.77, 0.999, 1.0, 1.21, 2.6]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("mode", [WRAP, CLAMP, MIRROR, BORDER])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_float_textures_with_normalized_coordinates(device, dimensions, mode, linear):
    shape = (3, 4, 5)[-dimensions:]
    data = np.random.default_rng(1).random((*shape, 1), np.float32)
    random = np.random.default_rng(2)
    places = random.choice(COORDINATES, (60, dimensions)).astype(np.float32)
    with device as d:
        texture = d.texture(d.resource(d.array(data)), (mode,) * 3, linear, NORMALIZED, border=(0.25, 0, 0, 0))
        found = d.fetch(texture, f"tex.{dimensions}d.v4.f32.f32", places)[:, 0]
    expected = [reference(data[..., 0], row, (mode,) * 3, linear, True, 0.25) for row in places.tolist()]
    np.testing.assert_allclose(expected, found, atol=dimensions / 256 if linear else 0)


@pytest.mark.parametrize("mode", [CLAMP, BORDER, WRAP])
def test_coordinates_in_texels_know_clamp_and_border_only(device, mode):
    data = np.arange(6, dtype=np.float32).reshape(6, 1)
    places = np.array([[-3.0], [0.5], [2.99], [5.0], [6.0], [40.0]], np.float32)
    with device as d:
        found = d.fetch(d.texture(d.resource(d.array(data)), (mode,) * 3), "tex.1d.v4.f32.f32", places)[:, 0]
    assert ([0, 0, 2, 5, 0, 0] if mode == BORDER else [0, 0, 2, 5, 5, 5]) == found.tolist()


@pytest.mark.parametrize("kind", ["u1", "u2", "i1", "i2"])
def test_small_integers_are_read_as_fractions(device, kind):
    info = np.iinfo(kind)
    data = np.array([info.min, info.min + 1, 0, 1, info.max], kind).reshape(-1, 1)
    places = np.arange(5, dtype=np.float32).reshape(-1, 1)
    with device as d:
        found = d.fetch(d.texture(d.resource(d.array(data))), "tex.1d.v4.f32.f32", places)[:, 0]
    np.testing.assert_allclose(np.maximum(data[:, 0] / np.float32(info.max), -1), found, rtol=1e-7)


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "i1", "i2", "i4"])
@pytest.mark.parametrize("channels", [1, 2, 4])
def test_integers_are_read_as_they_are(device, kind, channels):
    info = np.iinfo(kind)
    data = np.random.default_rng(3).integers(info.min, info.max, (4, 3, channels), kind, endpoint=True)
    places = np.array([[x, y] for y in range(4) for x in range(3)], np.float32)
    with device as d:
        texture = d.texture(d.resource(d.array(data, channels)), flags=AS_INTEGER)
        found = d.fetch(texture, f"tex.2d.v4.{'s' if kind[0] == 'i' else 'u'}32.f32", places, f"{kind[0]}4")
    assert data.reshape(-1, channels).tolist() == found[:, :channels].tolist()


def test_halves_and_srgb(device):
    halves = np.array([[1.5], [-0.25], [6e-8], [65504]], np.float16)
    coded = np.array([[0, 10, 100, 128], [255, 11, 200, 7]], np.uint8)
    places = np.arange(4, dtype=np.float32).reshape(-1, 1)
    with device as d:
        found = d.fetch(d.texture(d.resource(d.array(halves))), "tex.1d.v4.f32.f32", places)[:, 0]
        colours = d.fetch(d.texture(d.resource(d.array(coded, 4)), flags=SRGB), "tex.1d.v4.f32.f32", places[:2])
    assert halves[:, 0].astype("f4").tolist() == found.tolist()
    value = coded / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    np.testing.assert_allclose(linear[:, :3], colours[:, :3], rtol=1e-5)
    np.testing.assert_allclose(value[:, 3], colours[:, 3], rtol=1e-6)


def test_linear_memory_is_zero_beyond_its_end(device):
    data = np.arange(1, 9, dtype=np.int32)
    places = np.array([[0], [7], [8], [-1]], np.int32)
    with device as d:
        resource = d.driver.CUDA_RESOURCE_DESC()
        resource.resType = d.driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        linear = resource.res.linear
        linear.devPtr, linear.sizeInBytes, linear.numChannels = d.memory(data), data.nbytes, 1
        linear.format = d.driver.CUarray_format.CU_AD_FORMAT_SIGNED_INT32
        found = d.fetch(d.texture(resource), "tex.1d.v4.s32.s32", places, "i4")[:, 0]
    assert [1, 8, 0, 0] == found.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32, np.int16, np.uint8, np.float16])
@pytest.mark.parametrize("channels", [1, 2])
def test_integer_places_of_linear_memory(device, dtype, channels):
    data = np.arange(1, 9).astype(dtype)
    places = np.arange(-1, 9, dtype=np.int32).reshape(-1, 1)
    with device as d:
        resource = d.driver.CUDA_RESOURCE_DESC()
        resource.resType = d.driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        linear = resource.res.linear
        linear.devPtr, linear.sizeInBytes, linear.numChannels = d.memory(data), data.nbytes, channels
        linear.format = d.driver.CUarray_format(FORMATS[data.dtype])
        kind = {"f": "f32", "i": "s32", "u": "u32"}[data.dtype.kind]
        texture = d.texture(resource, flags=0 if kind == "f32" else AS_INTEGER)
        found = d.fetch(texture, f"tex.1d.v4.{kind}.s32", places, {"f32": "f4", "s32": "i4", "u32": "u4"}[kind])
    expected = np.zeros((10, 2))
    expected[1 : 1 + 8 // channels, :channels] = data.reshape(-1, channels)
    assert expected.tolist() == found[:, :2].tolist()


@pytest.mark.parametrize(("dtype", "channels"), [("f4", 1), ("i4", 1), ("f4", 2), ("f2", 1), ("u1", 1)])
@pytest.mark.parametrize(("factor", "first"), [(1, 0), (1, -7), (1, 200), (3, 0), (-1, 90), (0, 5), (1, 0x7FFFFFF8)])
def test_threads_that_go_around_a_loop_together_fetch_from_a_line(device, dtype, channels, factor, first):
    threads, rounds, step = 40, 5, 37
    data = np.random.default_rng(3).integers(1, 100, (256, channels)).astype(dtype)
    kind = "f32" if data.dtype.kind == "f" else "u32"
    out = np.zeros((threads, 4), "f4" if kind == "f32" else "u4")
    zero = "\n".join(f"mov.b32 %s{n}, 0;" for n in range(4))
    add = "\n".join(f"add.{kind} %s{n}, %s{n}, %x{n};" for n in range(4))
    body = f"""{{ .reg .b32 %s<4>, %x<4>, %n; mad.lo.s32 %r0, %t, {factor}, {first}; {zero} mov.u32 %n, 0;
    $round: tex.1d.v4.{kind}.s32 {{%x0, %x1, %x2, %x3}}, [%p0, {{%r0}}]; {add}
    add.s32 %r0, %r0, {step}; add.u32 %n, %n, 1; setp.lt.u32 %q, %n, {rounds}; @%q bra $round;
    mad.wide.u32 %a, %t, 16, %p1; st.global.v4.b32 [%a], {{%s0, %s1, %s2, %s3}}; }}"""
    with device as d:
        resource = d.driver.CUDA_RESOURCE_DESC()
        resource.resType = d.driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        linear = resource.res.linear
        linear.devPtr, linear.sizeInBytes, linear.numChannels = d.memory(data), data.nbytes, channels
        linear.format = d.driver.CUarray_format(FORMATS[data.dtype])
        place = d.memory(out)
        status = d.run(body, threads, d.texture(resource, flags=0 if kind == "f32" else AS_INTEGER), place)
        assert status == d.driver.CUresult.CUDA_SUCCESS
        d.ok(d.driver.cuMemcpyDtoH(out.ctypes.data, place, out.nbytes))
    places = np.arange(threads)[:, None] * factor + first + step * np.arange(rounds)
    places = (places + 2**31) % 2**32 - 2**31
    inside = (places >= 0) & (places < len(data))
    fetched = np.where(inside[..., None], data[np.where(inside, places, 0)], 0)
    assert np.array_equal(fetched.sum(1), out[:, :channels])


def test_pitched_memory(device):
    data = np.random.default_rng(4).random((3, 8), np.float32)
    places = np.array([[x, y] for y in range(3) for x in range(5)], np.float32)
    with device as d:
        resource = d.driver.CUDA_RESOURCE_DESC()
        resource.resType = d.driver.CUresourcetype.CU_RESOURCE_TYPE_PITCH2D
        pitched = resource.res.pitch2D
        pitched.devPtr, pitched.width, pitched.height, pitched.pitchInBytes = d.memory(data), 5, 3, 32
        pitched.format, pitched.numChannels = d.driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1
        found = d.fetch(d.texture(resource), "tex.2d.v4.f32.f32", places)[:, 0]
    assert data[:, :5].ravel().tolist() == found.tolist()


@pytest.mark.parametrize(("offset", "pitch"), [(4, 32), (0, 36)])
def test_texture_of_memory_that_is_not_aligned_is_refused(device, offset: int, pitch: int) -> None:
    with device as d:
        resource = d.driver.CUDA_RESOURCE_DESC()
        resource.resType = d.driver.CUresourcetype.CU_RESOURCE_TYPE_PITCH2D
        pitched = resource.res.pitch2D
        pitched.devPtr, pitched.width, pitched.height = int(d.memory(np.zeros(1000, np.float32))) + offset, 5, 3
        pitched.format, pitched.numChannels = d.driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1
        pitched.pitchInBytes = pitch
        status, _ = d.driver.cuTexObjectCreate(resource, d.driver.CUDA_TEXTURE_DESC(), None)
    assert "CUDA_ERROR_INVALID_VALUE" == status.name


def linear_of(d, address, size):
    """Return the descriptor of linear memory of 32-bit integers."""
    resource = d.driver.CUDA_RESOURCE_DESC()
    resource.resType = d.driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
    linear = resource.res.linear
    linear.devPtr, linear.sizeInBytes, linear.numChannels = address, size, 1
    linear.format = d.driver.CUarray_format.CU_AD_FORMAT_SIGNED_INT32
    return resource


def test_a_texture_may_be_larger_than_the_memory_that_it_begins_in(device):
    data = np.arange(1, 9, dtype=np.int32)
    with device as d:
        texture = d.texture(linear_of(d, d.memory(data), 4 << 20))
        found = d.fetch(texture, "tex.1d.v4.s32.s32", np.array([[0], [7], [-1], [1 << 20]], np.int32), "i4")[:, 0]
    assert [1, 8, 0, 0] == found.tolist()


@pytest.mark.parametrize(("elements", "refused"), [(1 << 28, False), ((1 << 28) + 1, True)])
def test_a_linear_texture_has_as_many_elements_as_the_device_says(device, elements, refused):
    d = device
    with d:
        assert d.ok(d.driver.cuDeviceGetAttribute(d.driver.CUdevice_attribute(69), 0)) == 1 << 28
        resource = linear_of(d, d.memory(np.zeros(8, np.int32)), 4 * elements)
        status, texture = d.driver.cuTexObjectCreate(resource, d.driver.CUDA_TEXTURE_DESC(), None)
        assert refused == ("CUDA_ERROR_INVALID_VALUE" == status.name)
        if not refused:
            d.ok(d.driver.cuTexObjectDestroy(texture))


@pytest.mark.parametrize("address", [0, 1 << 20])
def test_a_texture_of_no_device_memory_is_refused(device, address):
    with device as d:
        status, _ = d.driver.cuTexObjectCreate(linear_of(d, address, 32), d.driver.CUDA_TEXTURE_DESC(), None)
    assert "CUDA_ERROR_INVALID_VALUE" == status.name


def test_layers_are_chosen_by_number(device):
    data = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4, 1)
    places = np.array([[0, 1, 2], [1, 3, 0], [7, 0, 0]], np.float32)
    places[:, 0] = places[:, 0].astype(np.int32).view(np.float32)
    with device as d:
        texture = d.texture(d.resource(d.array(data, flags=LAYERED)))
        found = d.fetch(texture, "tex.a2d.v4.f32.f32", places)[:, 0]
        lines = np.ascontiguousarray(data[:, 0])
        row = d.texture(d.resource(d.array(lines, flags=LAYERED, extent=(4, 0, 2))))
        along = d.fetch(row, "tex.a1d.v4.f32.f32", places[:2, :2])[:, 0]
    assert [data[0, 2, 1, 0], data[1, 0, 3, 0], data[1, 0, 0, 0]] == found.tolist()  # beyond the last is the last
    assert [data[0, 0, 1, 0], data[1, 0, 3, 0]] == along.tolist()


def test_directions_choose_the_face_of_a_cube(device):
    data = np.arange(6 * 4, dtype=np.float32).reshape(6, 2, 2, 1)
    axes = [[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]]
    places = [[a + 0.5 * (a == 0) for a in axis] for axis in axes]
    with device as d:
        texture = d.texture(d.resource(d.array(data, flags=CUBEMAP)), flags=NORMALIZED)
        found = d.fetch(texture, "tex.cube.v4.f32.f32", np.array(places, np.float32))[:, 0]
    # (s, t) of a direction whose other two parts are positive, by the table of faces in the programming guide
    s = [-1, 1, 1, 1, 1, -1]
    t = [-1, -1, 1, -1, -1, -1]
    expected = [data[face, int(t[face] > 0), int(s[face] > 0), 0] for face in range(6)]
    assert expected == found.tolist()


def test_gather_takes_four_texels_of_one_channel(device):
    data = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    with device as d:
        texture = d.texture(d.resource(d.array(data, 2, flags=GATHER)))
        found = d.fetch(texture, "tld4.g.2d.v4.f32.f32", np.array([[2.1, 1.2]], np.float32))[0]
    assert [data[1, 1, 1], data[1, 2, 1], data[0, 2, 1], data[0, 1, 1]] == found.tolist()


def test_levels_and_gradients_of_a_texture_without_mipmaps(device):
    data = np.arange(12, dtype=np.float32).reshape(3, 4, 1)
    body = """mov.f32 %c0, 0f3FC00000; mov.f32 %c1, 0f40200000;
    tex.level.2d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [%p0, {%c0, %c1}], %c0; st.global.f32 [%p1], %f0;
    tex.grad.2d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [%p0, {%c0, %c1}], {%c0, %c0}, {%c1, %c1};
    st.global.f32 [%p1+4], %f0; txq.width.b32 %r0, [%p0]; st.global.b32 [%p1+8], %r0;
    txq.height.b32 %r0, [%p0]; st.global.b32 [%p1+12], %r0;"""
    out = np.zeros(4, np.float32)
    with device as d:
        place = d.memory(out)
        assert d.run(body, 1, d.texture(d.resource(d.array(data))), place) == d.driver.CUresult.CUDA_SUCCESS
        d.ok(d.driver.cuMemcpyDtoH(out.ctypes.data, place, out.nbytes))
    assert [9, 9] == out[:2].tolist()
    assert [4, 3] == out.view(np.int32)[2:].tolist()


# ---- mipmaps ----


def mipmap(device, levels, linear=False, bias=0.0, least=0.0, most=99.0, flags=NORMALIZED):
    """Return a texture of an array of 8 x 4 numbers whose level n is full of ``10 * n``."""
    d, ok = device.driver, device.ok
    wanted = d.CUDA_ARRAY3D_DESCRIPTOR()
    wanted.Width, wanted.Height = 8, 4
    wanted.Format, wanted.NumChannels = d.CUarray_format.CU_AD_FORMAT_FLOAT, 1
    array = ok(d.cuMipmappedArrayCreate(wanted, levels))
    device.cleanup.append(lambda: d.cuMipmappedArrayDestroy(array))
    for level in range(levels):
        data = np.full((8 >> level) * max(4 >> level, 1), 10 * level, np.float32)
        ok(d.cuMemcpyHtoA(ok(d.cuMipmappedArrayGetLevel(array, level)), 0, data.ctypes.data, data.nbytes))
    resource = d.CUDA_RESOURCE_DESC()
    resource.resType = d.CUresourcetype.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
    resource.res.mipmap.hMipmappedArray = array
    sampler = d.CUDA_TEXTURE_DESC()
    sampler.addressMode, sampler.flags = [d.CUaddress_mode(CLAMP)] * 3, flags
    sampler.mipmapFilterMode, sampler.mipmapLevelBias = d.CUfilter_mode(int(linear)), bias
    sampler.minMipmapLevelClamp, sampler.maxMipmapLevelClamp = least, most
    status, texture = d.cuTexObjectCreate(resource, sampler, None)
    if status == d.CUresult.CUDA_SUCCESS:
        device.cleanup.append(lambda: d.cuTexObjectDestroy(texture))
    return status, texture


def at_levels(device, texture, instruction, levels):
    """Fetch once for each level of detail, which the instruction calls ``%c2``."""
    levels = np.asarray(levels, np.float32)
    out = np.zeros_like(levels)
    where, place = device.memory(levels), device.memory(out)
    body = f"""mov.f32 %c0, 0f3F000000; mad.wide.u32 %a, %t, 4, %p1; ld.global.f32 %c2, [%a];
    {instruction}; mad.wide.u32 %a, %t, 4, %p2; st.global.f32 [%a], %f0;"""
    assert device.run(body, len(levels), texture, where, place) == device.driver.CUresult.CUDA_SUCCESS
    device.ok(device.driver.cuMemcpyDtoH(out.ctypes.data, place, out.nbytes))
    return out.tolist()


BY_LEVEL = "tex.level.2d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [%p0, {%c0, %c0}], %c2"


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ({}, [0, 0, 10, 10, 20, 30, 30]),
        ({"linear": True}, [0, 2.5, 7.5, 10, 20, 30, 30]),
        ({"bias": 1.0}, [0, 10, 20, 20, 30, 30, 30]),
        ({"least": 0.75, "most": 2.0, "linear": True}, [7.5, 7.5, 7.5, 10, 20, 20, 20]),
    ],
)
def test_level_of_detail_chooses_or_blends(device, sampler, expected):
    with device as d:
        texture = d.ok(mipmap(d, 4, **sampler))
        assert expected == at_levels(d, int(texture), BY_LEVEL, [-1, 0.25, 0.75, 1, 2, 3, 50])


def test_gradients_give_the_level_and_plain_fetches_the_first(device):
    by_gradient = BY_LEVEL.replace("level", "grad").replace("%c2", "{%c2, %c1}, {%c1, %c1}")
    with device as d:
        texture = int(d.ok(mipmap(d, 4)))
        zero = "mov.f32 %c1, 0f00000000; "
        assert [0, 10, 20, 30] == at_levels(d, texture, zero + by_gradient, [1 / 8, 2 / 8, 4 / 8, 8])
        plain = "tex.2d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [%p0, {%c0, %c0}]"
        assert [0] == at_levels(d, texture, plain, [3])


def test_mipmaps_need_normalized_coordinates(device):
    with device as d:
        assert "CUDA_ERROR_INVALID_VALUE" == mipmap(d, 2, flags=0)[0].name


# ---- surfaces ----


def test_surfaces_are_read_and_written(device):
    data = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    body = """rem.u32 %r0, %t, 3; div.u32 %r1, %t, 3; shl.b32 %r0, %r0, 3;
    suld.b.2d.v2.b32.trap {%r2, %r3}, [%p0, {%r0, %r1}]; add.u32 %r2, %r2, 100;
    sust.b.2d.v2.b32.trap [%p0, {%r0, %r1}], {%r3, %r2};"""
    back = np.zeros_like(data)
    with device as d:
        array = d.array(data, 2, flags=SURFACE)
        assert d.run(body, 6, d.surface(array)) == d.driver.CUresult.CUDA_SUCCESS
        d.ok(d.driver.cuMemcpyAtoH(back.ctypes.data, array, 0, back.nbytes))
    assert np.stack([data[..., 1], data[..., 0] + 100], -1).tolist() == back.tolist()


def test_outside_of_a_surface(device):
    data = np.array([[1], [2], [3]], np.uint16)
    body = """mov.u32 %r0, 6; mov.u32 %r1, -2;
    suld.b.1d.b16.zero %h0, [%p0, {%r0}]; st.global.b16 [%p1], %h0;
    suld.b.1d.b16.clamp %h0, [%p0, {%r0}]; st.global.b16 [%p1+2], %h0;
    suld.b.1d.b16.clamp %h0, [%p0, {%r1}]; st.global.b16 [%p1+4], %h0;
    mov.b16 %h0, 9; sust.b.1d.b16.zero [%p0, {%r0}], %h0; sust.b.1d.b16.clamp [%p0, {%r1}], %h0;"""
    out, back = np.full(3, 77, np.uint16), np.zeros_like(data)
    with device as d:
        array, place = d.array(data, flags=SURFACE), d.memory(out)
        assert d.run(body, 1, d.surface(array), place) == d.driver.CUresult.CUDA_SUCCESS
        d.ok(d.driver.cuMemcpyDtoH(out.ctypes.data, place, out.nbytes))
        d.ok(d.driver.cuMemcpyAtoH(back.ctypes.data, array, 0, back.nbytes))
    assert [0, 3, 1] == out.tolist()
    assert [9, 2, 3] == back[:, 0].tolist()


def test_layers_and_volumes_of_surfaces(device):
    data = np.zeros((2, 3, 4, 1), np.float32)
    body = """mov.u32 %r0, 4; mov.u32 %r1, 2; mov.u32 %r2, 1; mov.f32 %f0, 0f3F800000; mov.b32 %r3, %f0;
    sust.b.{form}.b32.trap [%p0, {{{places}}}], {{%r3}};"""
    for flags, form, places in (
        (SURFACE, "3d", "%r0, %r1, %r2, %r2"),
        (SURFACE | LAYERED, "a2d", "%r2, %r0, %r1, %r1"),
    ):
        back = np.zeros_like(data)
        with Device(device.driver, device.ok) as d:
            array = d.array(data, flags=flags)
            assert d.run(body.format(form=form, places=places), 1, d.surface(array)) == d.driver.CUresult.CUDA_SUCCESS
            d.ok(d.driver.cuMemcpyAtoH(back.ctypes.data, array, 0, back.nbytes))
        expected = data.copy()
        expected[1, 2, 1, 0] = 1
        assert expected.tolist() == back.tolist()


# ---- the driver's side ----


def test_descriptors_are_given_back(device):
    data = np.zeros((2, 3, 4), np.float32)
    with device as d:
        array = d.array(data, 4, flags=SURFACE)
        found = d.ok(d.driver.cuArray3DGetDescriptor(array))
        assert (3, 2, 0, 4, 2) == (found.Width, found.Height, found.Depth, found.NumChannels, found.Flags)
        flat = d.ok(d.driver.cuArrayGetDescriptor(array))
        assert (3, 2, 4) == (flat.Width, flat.Height, flat.NumChannels)
        texture = d.texture(d.resource(array), (MIRROR, CLAMP, WRAP), True, NORMALIZED)
        wanted = d.ok(d.driver.cuTexObjectGetTextureDesc(texture))
        assert [MIRROR, CLAMP, WRAP] == [int(mode) for mode in wanted.addressMode]
        assert int(array) == int(d.ok(d.driver.cuTexObjectGetResourceDesc(texture)).res.array.hArray)
        surface = d.surface(array)
        assert int(array) == int(d.ok(d.driver.cuSurfObjectGetResourceDesc(surface)).res.array.hArray)


def test_arrays_and_memory_are_copied_to_each_other(device):
    data = np.arange(8, dtype=np.float32).reshape(8, 1)
    back = np.zeros(8, np.float32)
    with device as d:
        one, two = d.array(data), d.array(np.zeros_like(data))
        memory = d.memory(back)
        d.ok(d.driver.cuMemcpyAtoA(two, 16, one, 0, 16))
        d.ok(d.driver.cuMemcpyAtoD(memory, two, 16, 16))
        d.ok(d.driver.cuMemcpyDtoA(two, 0, memory, 8))
        d.ok(d.driver.cuMemcpyAtoH(back.ctypes.data, two, 0, 32))
        status = d.driver.cuMemcpyAtoH(back.ctypes.data, two, 4, 32)[0]
        assert d.driver.CUresult.CUDA_ERROR_INVALID_VALUE == status
    assert [0, 1, 0, 0, 0, 1, 2, 3] == back.tolist()


def test_misuse_is_an_error(device):
    driver, result = device.driver, device.driver.CUresult
    wanted = driver.CUDA_ARRAY3D_DESCRIPTOR()
    wanted.Width, wanted.NumChannels, wanted.Format = 4, 3, driver.CUarray_format.CU_AD_FORMAT_FLOAT
    assert driver.cuArray3DCreate(wanted)[0] == result.CUDA_ERROR_INVALID_VALUE  # three channels
    wanted.NumChannels, wanted.Width = 1, 0
    assert driver.cuArray3DCreate(wanted)[0] == result.CUDA_ERROR_INVALID_VALUE
    with device as d:
        array = d.array(np.zeros((4, 1), np.int32))
        assert driver.cuSurfObjectCreate(d.resource(array))[0] == result.CUDA_ERROR_INVALID_VALUE
        texture = driver.CUDA_TEXTURE_DESC()
        texture.filterMode = driver.CUfilter_mode.CU_TR_FILTER_MODE_LINEAR
        assert driver.cuTexObjectCreate(d.resource(array), texture, None)[0] == result.CUDA_ERROR_INVALID_VALUE
    assert driver.cuArrayDestroy(array)[0] == result.CUDA_ERROR_INVALID_HANDLE
    assert driver.cuTexObjectDestroy(1234)[0] == result.CUDA_ERROR_INVALID_HANDLE


def test_a_trap_outside_of_a_surface_ends_the_launch(device):
    body = "mov.u32 %r0, 400; suld.b.1d.b32.trap %r1, [%p0, {%r0}];"
    driver = device.driver
    context = device.ok(driver.cuCtxCreate(None, 0, 0))  # the failure stays with it; what it owns goes with it
    array = device.array(np.zeros((4, 1), np.int32), flags=SURFACE)
    status = device.run(body, 1, device.surface(array))
    device.ok(driver.cuCtxDestroy(context))
    assert status == driver.CUresult.CUDA_ERROR_LAUNCH_FAILED
