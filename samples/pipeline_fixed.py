# Look for: `cudatool sanitize` is silent, and the sum is right under every schedule.
"""The two-stream pipeline with its waits."""

from _pipeline import BATCHES, run

total, expected = run(with_waits=True), sum(range(BATCHES + 1))
print(f"total {total:g}, expected {expected}")
assert total == expected
