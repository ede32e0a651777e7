"""Settings of the caching allocator, in PyTorch's syntax.

A settings string is a comma-separated list of ``key:value``, for example
``max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:8]``. The keys and what they accept are those of
PyTorch's AcceleratorAllocatorConfig and CUDAAllocatorConfig (version 2.11, and the keys that came later). White space
means nothing, a comma at the end is allowed, and numbers are read as C reads them: ``64MB`` is 64, and a negative
whole number is a huge one. Unlike PyTorch, this parser insists on the colons and commas.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final

from cudatool.config import ALLOC_CONF
from cudatool.errors import ConfigError
from cudatool.limits import SETTINGS_LENGTH
from cudatool.text import printable, quoted, shortened

__all__ = [
    "ENVIRONMENT_VARIABLES",
    "LARGE_SEGMENT",
    "OWN_VARIABLE",
    "PYTORCHS_VARIABLE",
    "SIZE_CLASSES",
    "UNLIMITED",
    "Settings",
    "conf_in_environment",
    "setting_texts",
]

OWN_VARIABLE: Final = ALLOC_CONF.name
"""What our allocator alone reads, before PyTorch's variables."""
PYTORCHS_VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
"""What every version of PyTorch reads."""
ENVIRONMENT_VARIABLES: Final = (OWN_VARIABLE, "PYTORCH_ALLOC_CONF", PYTORCHS_VARIABLE)
"""Where settings come from; the first that is set is taken."""

UNLIMITED: Final = 2**64 - 1
"""``max_split_size`` when none is set: every block may be split."""

_MIB = 1024 * 1024
LARGE_SEGMENT: Final = 20 * _MIB
"""PyTorch's ``large_segment_size``, and the least that ``max_split_size`` may be."""
_DIGITS = 20  # of 2**64
SIZE_CLASSES: Final = 16
"""Of requests, for how they are rounded: below 2 MiB, 2 to 4 MiB, ..., 32 GiB and above."""
_SMALLEST_SPLIT_LIMIT_MIB = LARGE_SEGMENT // _MIB


@dataclass(frozen=True, slots=True)
class Settings:
    """The allocator's settings. The defaults are PyTorch's.

    Attributes
    ----------
    max_split_size
        Blocks of this many bytes or more are never split.
    large_segment_size
        Bytes of the segments that requests from 1 to 10 MiB are cut from, and of the pages of expandable segments
        (PyTorch after 2.11).
    max_non_split_rounding_size
        How many bytes an unsplittable block may be larger than the request it serves.
    garbage_collection_threshold
        Share of the allowed memory above which old cached segments are given back early; 0 is never.
        Has an effect only together with a memory fraction.
    roundup_power2_divisions
        For each of 16 size classes (below 2 MiB, then by powers of two up to 32 GiB and above): into how many steps
        the way from one power of two to the next is divided. 0 and 1 round to multiples of 512 bytes instead.
    per_process_memory_fraction
        Share of the device's memory that may be reserved; None is no limit.
    pinned_use_cuda_host_register
        Pin ordinary memory (cuMemHostRegister), touched first by `pinned_num_register_threads` threads, instead of
        asking the driver for pinned memory (cuMemHostAlloc).
    pinned_use_background_threads
        Let a thread find out which freed pinned blocks the device has done with, instead of each request.
    pinned_reserve_segment_size_mb
        Pin so much at the first request, and cut blocks from that before anything else.
    pinned_free_catch_all
        Log errors in freeing pinned memory instead of raising them.
    text
        The string these settings were parsed from.
    """

    max_split_size: int = UNLIMITED
    large_segment_size: int = LARGE_SEGMENT
    max_non_split_rounding_size: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * SIZE_CLASSES
    per_process_memory_fraction: float | None = None
    expandable_segments: bool = False
    backend: str = "native"
    release_lock_on_cudamalloc: bool = False
    graph_capture_record_stream_reuse: bool = False
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_use_background_threads: bool = False
    pinned_reserve_segment_size_mb: int = 0
    pinned_free_catch_all: bool = False
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Return the settings that `text` describes.

        Raises
        ------
        ConfigError
            An unknown key, a value that its key does not accept, something that only PyTorch can do, or too long.
        """
        if not isinstance(text, str):
            raise ConfigError(f"allocator settings are a string, not {type(text).__name__}")
        if len(text) > SETTINGS_LENGTH:
            raise ConfigError(f"allocator settings have at most {SETTINGS_LENGTH:,} characters: {quoted(text)}")
        settings = cls(text=text)
        for key, value in _pairs(text):
            if key in _UNSUPPORTED:
                if value != "False":  # which is what they are anyway
                    raise ConfigError(f"allocator setting {key} is not supported by cudatool; leave it out")
                continue
            if key not in _PARSERS:
                similar = get_close_matches(key, _PARSERS, n=1)
                advice = f"did you mean {similar[0]}?" if similar else f"known are {', '.join(sorted(_PARSERS))}"
                raise ConfigError(f"unknown allocator setting {quoted(key)}; {advice}")
            attribute, parse = _PARSERS[key]
            try:
                settings = replace(settings, **{attribute: parse(value)})
            except ValueError as error:
                raise ConfigError(f"allocator setting {key}:{shortened(printable(value[:60]), 60)}: {error}") from None
        return settings

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Return the settings named by the first of :data:`ENVIRONMENT_VARIABLES` that is set, else the defaults.

        Raises
        ------
        ConfigError
            The variable cannot be read; the message names it.
        """
        found = conf_in_environment(environ)
        if found is None:
            return cls()
        variable, text = found
        try:
            return cls.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None


def conf_in_environment(environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """Return the first of :data:`ENVIRONMENT_VARIABLES` that is set, and the settings string in it."""
    environ = os.environ if environ is None else environ
    return next(((name, environ[name]) for name in ENVIRONMENT_VARIABLES if name in environ), None)


def setting_texts(text: str) -> dict[str, str]:
    """Return each setting of a settings string as it stands there, by its name.

    Raises
    ------
    ConfigError
        The text is not of the form ``name:value,...``.
    """
    return {name: f"{name}:{value}" for name, value in _pairs(text)}


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Split ``a:1,b:[1:2,3:4]`` at the commas outside brackets, then each part at its first colon."""
    text = "".join(text.split()).removesuffix(",")
    pieces: list[str] = []  # of a part
    inside = False
    for piece in text.split(",") if text else []:
        pieces.append(piece)
        inside = (inside or "[" in piece) and "]" not in piece
        if not inside:
            yield _pair(",".join(pieces))
            pieces = []
    if pieces:
        yield _pair(",".join(pieces))


def _pair(part: str) -> tuple[str, str]:
    key, colon, value = part.partition(":")
    if not (key and colon and value):
        raise ConfigError(f"allocator setting {quoted(part)} is not of the form key:value")
    return key, value


def _boolean(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("expected True or False, spelled so")
    return value == "True"


def _integer(value: str) -> int:
    found = re.match(r"[+-]?[0-9]+", value)
    if not found:
        raise ValueError("expected a whole number")
    digits = found[0].lstrip("+-").lstrip("0") or "0"
    if len(digits) > _DIGITS or int(digits) >= 2**64:  # Python refuses to read thousands of digits
        raise ValueError("the number is too large")
    return (-int(digits) if found[0].startswith("-") else int(digits)) % 2**64


def _number(value: str) -> float:
    found = re.match(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value)
    if not found:
        raise ValueError("expected a number")
    return float(found[0])


def _split_limit(value: str) -> int:
    size = _integer(value)
    if size < _SMALLEST_SPLIT_LIMIT_MIB:
        raise ValueError(f"must be at least {_SMALLEST_SPLIT_LIMIT_MIB} (MiB), the size of a large segment")
    return min(size, UNLIMITED // _MIB) * _MIB


def _segment_size(value: str) -> int:
    size = _integer(value)
    if size <= 10:
        raise ValueError("must be greater than 10 (MiB), the largest request that is cut from such a segment")
    return min(size, UNLIMITED // _MIB) * _MIB


def _threshold(value: str) -> float:
    share = _number(value)
    if not 0.0 < share < 1.0:
        raise ValueError("must lie between 0 and 1, both excluded")
    return share


def _fraction(value: str) -> float:
    share = _number(value)
    if not 0.0 <= share <= 1.0:
        raise ValueError("must lie between 0 and 1")
    return share


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _divisions(value: str) -> tuple[int, ...]:
    """Parse one number for all size classes, or ``[256:1,512:2,>:8]``: the class from 256 MiB, from 512 MiB, above."""
    if not value.startswith("["):
        number = _integer(value)
        if not _is_power_of_two(number):
            raise ValueError("must be a power of two")
        return (number,) * SIZE_CLASSES
    if not value.endswith("]"):
        raise ValueError("the closing bracket is missing")
    divisions = [0] * SIZE_CLASSES
    last: int | None = None
    parts = value[1:-1].removesuffix(",")
    for part in parts.split(",") if parts else []:
        size, _, text = part.partition(":")
        number = _integer(text)
        if number and not _is_power_of_two(number):
            raise ValueError("divisions must be powers of two, or 0")
        if size == ">":
            start = 0 if last is None else last
            divisions[start + 1 :] = [number] * (SIZE_CLASSES - start - 1)
            continue
        megabytes = _integer(size)
        if not _is_power_of_two(megabytes):
            raise ValueError("sizes must be powers of two")
        index = min(megabytes.bit_length() - 1, SIZE_CLASSES - 1)
        if last is None:  # the first size named also stands for all that are smaller
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    return tuple(divisions)


def _backend(value: str) -> str:
    if value not in ("native", "cudaMallocAsync"):
        raise ValueError("known are native and cudaMallocAsync")
    return value


def _threads(value: str) -> int:
    number = _integer(value)
    if not _is_power_of_two(number) or number > 128:
        raise ValueError("must be a power of two of at most 128")
    return number


def _megabytes(value: str) -> int:
    number = _integer(value)
    if number == 0:
        raise ValueError("must be greater than 0")
    return number


_PARSERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    # key in the string -> attribute of Settings, parser of its value
    "max_split_size_mb": ("max_split_size", _split_limit),
    "large_segment_size_mb": ("large_segment_size", _segment_size),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _split_limit),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
    "expandable_segments": ("expandable_segments", _boolean),
    "backend": ("backend", _backend),
    "release_lock_on_cudamalloc": ("release_lock_on_cudamalloc", _boolean),
    "graph_capture_record_stream_reuse": ("graph_capture_record_stream_reuse", _boolean),
    "pinned_use_cuda_host_register": ("pinned_use_cuda_host_register", _boolean),
    "pinned_num_register_threads": ("pinned_num_register_threads", _threads),
    "pinned_use_background_threads": ("pinned_use_background_threads", _boolean),
    "pinned_reserve_segment_size_mb": ("pinned_reserve_segment_size_mb", _megabytes),
    "pinned_free_catch_all": ("pinned_free_catch_all", _boolean),
    # PyTorch takes the names for AMD's devices on any.
    "release_lock_on_hipmalloc": ("release_lock_on_cudamalloc", _boolean),
    "pinned_use_hip_host_register": ("pinned_use_cuda_host_register", _boolean),
}

_UNSUPPORTED: Final = (
    "throw_on_cudamalloc_oom",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
)
