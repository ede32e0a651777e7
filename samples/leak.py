# Look for: "Never freed" names the line that keeps every batch's loss, and the timeline never falls.
"""A training loop that keeps arrays it should drop."""

import numpy as np

import cudatool as ct

history = []
for _ in range(50):
    activations = ct.zeros((256, 1024), np.float32)
    mean = ct.ops.mean(ct.ops.sigmoid(activations))  # this memory is freed
    loss = activations[:1]  # a small view, but it keeps the whole array alive
    history.append(loss)

print(
    f"loss {float(mean.get()):.1f}; {ct.memory_allocated() / 2**20:.0f} MiB still allocated for {len(history)} losses"
)
