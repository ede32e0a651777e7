"""The default generators as torch.cuda's functions see them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError
from cudatool.random._generator import Generator, default_generator, seed_all_with
from cudatool.runtime.device import DeviceLike, device_count, device_indices
from cudatool.runtime.traced_calls import traced

__all__ = [
    "all_generators",
    "fork_rng",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def all_generators() -> tuple[Generator, ...]:
    """Return the default generators, one a device."""
    return tuple(default_generator(index) for index in range(device_count()))


@traced
def manual_seed(seed: SupportsIndex) -> None:
    """Seed the current device's default generator; needs no device yet.

    Raises
    ------
    UsageError
        The seed is not in [-2^63, 2^64), or the current stream is being captured.
    """
    default_generator().manual_seed(seed)


@traced
def manual_seed_all(seed: SupportsIndex) -> None:
    """Seed the default generators of all devices; needs no device yet."""
    seed_all_with(seed)


@traced
def seed() -> None:
    """Give the current device's default generator an unpredictable seed."""
    default_generator().seed()


@traced
def seed_all() -> None:
    """Give the default generators of all devices one unpredictable seed."""
    seed_all_with(secrets.randbits(52))


@traced
def initial_seed() -> int:
    """Return the seed of the current device's default generator."""
    return default_generator().initial_seed()


@traced
def get_rng_state(device: DeviceLike = None) -> npt.NDArray[np.uint8]:
    """Return seed and offset of a device's default generator, 16 bytes as in PyTorch."""
    return default_generator(device).get_state()


@traced
def get_rng_state_all() -> list[npt.NDArray[np.uint8]]:
    """Return the states of all devices' default generators."""
    return [generator.get_state() for generator in all_generators()]


@traced
def set_rng_state(new_state: Any, device: DeviceLike = None) -> None:
    """Set a device's default generator to what :func:`get_rng_state` returned."""
    default_generator(device).set_state(new_state)


@traced
def set_rng_state_all(new_states: Iterable[Any]) -> None:
    """Set the default generators to what :func:`get_rng_state_all` returned.

    Raises
    ------
    UsageError
        It is no list of states.
    """
    if not isinstance(new_states, Iterable):
        raise UsageError(f"set_rng_state_all takes the states of get_rng_state_all(), not {new_states!r}")
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


@contextlib.contextmanager
def _fork_rng(devices: Iterable[DeviceLike] | None, enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    generators = (
        all_generators() if devices is None else [default_generator(index) for index in device_indices(devices)]
    )
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@traced
def fork_rng(
    devices: Iterable[DeviceLike] | None = None, enabled: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager after which default generators are as they were before.

    Parameters
    ----------
    devices
        Whose generators; default: all devices'.
    enabled
        False does nothing, so that a program need not indent again.
    """
    return _fork_rng(devices, enabled)
