# Look for: `cudatool sanitize` names both kernels, both lines and the missing wait, though the sum may come out right.
# With --device sim:schedule=lifo it comes out wrong.
"""A two-stream pipeline without its waits."""

from _pipeline import BATCHES, run

print(f"total {run(with_waits=False):g}, expected {sum(range(BATCHES + 1))}")
