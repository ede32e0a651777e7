"""Driver entry points: the linker (cuLink*), which is part of module management in the driver API reference.

A link ends in PTX, as everything on the software device does: :func:`cudatool.ptx.join` of the inputs' texts.
"""

from __future__ import annotations

import ctypes
from ctypes import c_size_t

from cudatool import ptx
from cudatool.ptx.errors import PtxError
from cudatool.sim import machine as state
from cudatool.sim import profile
from cudatool.sim.abi import entry, read_string, write
from cudatool.sim.results import DriverError, Result
from cudatool.sim.toolchain.image import jit_options, read_file, write_error_log

__all__: list[str] = []

_CUBIN, _PTX, _FATBINARY, _OBJECT, _LIBRARY, _NVVM = range(6)  # CUjitInputType


class Link:
    """A CUlinkState: the texts so far, and the image once it is complete."""

    def __init__(self, options: dict[int, int]) -> None:
        self.options = options
        self.texts: list[bytes] = []
        self.image: ctypes.Array[ctypes.c_char] | None = None

    def add(self, kind: int, data: bytes, name: str) -> None:
        if self.image is not None or not _CUBIN <= kind <= _LIBRARY:  # NVVM inputs are deprecated since CUDA 12
            raise DriverError(Result.INVALID_VALUE)
        try:
            texts = ptx.ptx_for(data, profile.ARCH) if ptx.is_container(data) else [data]
            for text in texts:
                ptx.parse_image(text)
        except PtxError as error:
            raise self.failed(Result.INVALID_PTX, f"{name}: {error}") from error
        if not texts and kind != _LIBRARY:
            raise self.failed(
                Result.NO_BINARY_FOR_GPU, f"{name}: machine code without PTX; the software device runs PTX"
            )
        self.texts += texts

    def complete(self) -> ctypes.Array[ctypes.c_char]:
        if self.image is None:
            image = ptx.join(self.texts)
            try:
                missing = ptx.undefined(ptx.parse_image(image))
            except PtxError as error:
                raise self.failed(Result.INVALID_PTX, str(error)) from error
            if missing:
                raise self.failed(Result.INVALID_PTX, f"undefined reference to {', '.join(map(repr, missing))}")
            self.image = ctypes.create_string_buffer(image)
        return self.image

    def failed(self, result: Result, message: str) -> DriverError:
        """Return the error, said in the caller's error log too."""
        write_error_log(self.options, message)
        return DriverError(result, message)


@entry("cuLinkCreate(unsigned int numOptions, CUjit_option *options, void **optionValues, CUlinkState *stateOut)")
def cuLinkCreate(numOptions: int, options: int, optionValues: int, stateOut: int) -> None:
    link = Link(jit_options(numOptions, options, optionValues))
    handle = state.machine.new_handle()
    write(stateOut, c_size_t, handle)
    state.machine.objects[handle] = link


@entry(
    "cuLinkAddData(CUlinkState link, CUjitInputType type, void *data, size_t size, const char *name, "
    "unsigned int numOptions, CUjit_option *options, void **optionValues)"
)
def cuLinkAddData(
    link: int, type: int, data: int, size: int, name: int, numOptions: int, options: int, optionValues: int
) -> None:
    if not data:
        raise DriverError(Result.INVALID_VALUE)
    label = read_string(name).decode("utf-8", "replace") if name else "<input>"
    state.machine.get(link, Link).add(type, ctypes.string_at(data, size), label)


@entry(
    "cuLinkAddFile(CUlinkState link, CUjitInputType type, const char *path, unsigned int numOptions, "
    "CUjit_option *options, void **optionValues)"
)
def cuLinkAddFile(link: int, type: int, path: int, numOptions: int, options: int, optionValues: int) -> None:
    data, name = read_file(path), read_string(path).decode("utf-8", "replace")
    state.machine.get(link, Link).add(type, data, name)


@entry("cuLinkComplete(CUlinkState link, void **cubinOut, size_t *sizeOut)")
def cuLinkComplete(link: int, cubinOut: int, sizeOut: int) -> None:
    image = state.machine.get(link, Link).complete()
    write(cubinOut, c_size_t, ctypes.addressof(image))
    if sizeOut:
        write(sizeOut, c_size_t, len(image))


@entry("cuLinkDestroy(CUlinkState link)")
def cuLinkDestroy(link: int) -> None:
    state.machine.get(link, Link)
    del state.machine.objects[link]
