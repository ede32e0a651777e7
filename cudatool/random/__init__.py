"""Random numbers on the device: generators with PyTorch's streams, and what is drawn from them.

Philox4x32-10 in kernels, the same numbers on a GPU and on the software device, safe under graph capture.
"""

from __future__ import annotations

from typing import Any

from cudatool.random._bernoulli import bernoulli, bernoulli_, dropout, native_dropout, native_dropout_backward
from cudatool.random._creation import normal, rand, rand_like, randint, randint_like, randn, randn_like
from cudatool.random._fills import cauchy_, exponential_, geometric_, log_normal_, normal_, random_, uniform_
from cudatool.random._generator import Generator
from cudatool.random._multinomial import multinomial
from cudatool.random._randperm import randperm
from cudatool.random._state import (
    all_generators,
    fork_rng,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)

__all__ = [
    # generators
    "Generator",
    "default_generators",
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
    # new arrays
    "bernoulli",
    "multinomial",
    "normal",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    # in place
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    # dropout
    "dropout",
    "native_dropout",
    "native_dropout_backward",
]


def __getattr__(name: str) -> Any:
    if name == "default_generators":  # a tuple, one a device; looks for devices, so not before it is asked for
        return all_generators()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
