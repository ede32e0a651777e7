# race corpus
# rule = "A block that three streams use is recorded for each of them, on whichever it was made"
# source = "torch.Tensor.record_stream"
# [expect]
# racy = [["reuse", "use-of-last", "new-owner"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

maker, *users = (ct.Stream() for _ in range(4))
outputs = [ct.zeros(N) for _ in users]
ct.synchronize()
with ct.stream(maker):
    x = ct.empty(N)
    fill(maker, x)
for number, (user, y) in enumerate(zip(users, outputs, strict=True)):
    user.wait_stream(maker)
    if number == 2:
        copy(user, y, x)  # @use-of-last
    else:
        copy(user, y, x)
    if number < 2 or sys.argv[1] == "fixed":
        x.record_stream(user)
for user in users[:2]:
    user.synchronize()
x = None
with ct.stream(maker):
    z = ct.empty(N)
    fill(maker, z, 2.0)  # @new-owner
ct.synchronize()
