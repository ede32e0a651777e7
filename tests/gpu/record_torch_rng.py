"""Record what PyTorch draws on this GPU: ``python record_torch_rng.py torch_rng.npz``.

The file is like ``tests/data/torch_rng.npz``, with which the tests compare every device. Each case is run twice from its
seed and offset; the file has

``cases``     all cases, in JSON
``samples``   the elements of both results at ``random_cases.places``, as bytes, one case after the other
``starts``    where in ``samples`` each case begins, and after the last the end
``checks``    CRC-32 of both results in full, case by case
``offsets``   the generator's offset afterwards
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "random"))
import random_cases


def main(path: str) -> None:
    """Record all cases."""
    import torch

    generator = torch.Generator("cuda")
    samples, checks, offsets = [b""], [], []
    for case in random_cases.cases():
        runs = [host.reshape(-1) for host in run(torch, case, generator)]
        samples.append(b"".join(host[random_cases.places(host.size)].tobytes() for host in runs))
        checks.append([zlib.crc32(host.tobytes()) for host in runs])
        offsets.append(generator.get_offset())
    np.savez_compressed(
        path,
        cases=np.array(json.dumps(random_cases.cases())),
        samples=np.frombuffer(b"".join(samples), np.uint8),
        starts=np.cumsum([len(one) for one in samples]),
        checks=np.array(checks, np.uint32),
        offsets=np.array(offsets, np.int64),
    )


def run(torch: Any, case: dict[str, Any], generator: Any) -> list[np.ndarray[Any, Any]]:
    """Return the results of running a case twice."""
    generator.manual_seed(case["seed"])
    generator.set_offset(case["offset"])
    return [host_of(torch, draw(torch, case, generator)) for _ in range(2)]


def draw(torch: Any, case: dict[str, Any], generator: Any) -> Any:
    """Return what PyTorch makes of a case."""
    dtype = getattr(torch, case["dtype"])
    method, shape, args = case["method"], case["shape"], case["args"]
    if method == "randperm":
        return torch.randperm(shape[0], dtype=dtype, device="cuda", generator=generator)
    array = random_cases.viewed(torch.ones(random_cases.spread(case), dtype=dtype, device="cuda"), case)
    if method == "dropout":
        # The function proper has no generator: it uses the default one, whose state is lent to it.
        lent = torch.cuda.default_generators[0]
        lent.graphsafe_set_state(generator.graphsafe_get_state())
        kept, mask = torch.native_dropout(array, args[0], True)
        assert bool(((kept != 0) == mask).all())
        return kept
    if method == "bernoulli_array":
        size = array.numel()
        p = torch.arange(size, device="cuda", dtype=torch.float64).div_(size).float().reshape(array.shape)
        return array.bernoulli_(p, generator=generator)
    if method == "multinomial":
        p = torch.arange(array.numel(), device="cuda").remainder_(100).add_(1).to(dtype).reshape(array.shape)
        return torch.multinomial(p, *args, generator=generator)
    return getattr(array, method)(*args, generator=generator)


def host_of(torch: Any, array: Any) -> np.ndarray[Any, Any]:
    """Return an array in host memory, bfloat16 as its bits."""
    if array.dtype == torch.bfloat16:
        array = array.contiguous().view(torch.int16)
    return np.ascontiguousarray(array.cpu().numpy())


if __name__ == "__main__":
    main(sys.argv[1])
