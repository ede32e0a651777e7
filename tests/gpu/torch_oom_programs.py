"""PyTorch programs whose memory runs out, each in another way: a memory fraction keeps each to a small part of the GPU.

All import ``hogs``, whose function ``hog`` holds most, unless `CULPRITS` names another one.
"""

from __future__ import annotations

from typing import Final

__all__ = ["CONF", "CULPRITS", "HOGS", "IN_CHILD", "PROGRAMS", "REASON"]

HOGS: Final = """
import torch
FRACTION, MIB = 0.02, 1 << 20
torch.cuda.set_per_process_memory_fraction(FRACTION)
LIMIT = int(torch.cuda.get_device_properties(0).total_memory * FRACTION)
kept = []

def hog(n=128 * MIB):
    kept.append(torch.empty(n, dtype=torch.uint8, device="cuda"))
    return kept[-1]

def fill(leave):
    while torch.cuda.memory_reserved() + 128 * MIB + leave < LIMIT:
        hog()

small = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
"""

_WORK: Final = """
def work():
    from hogs import hog
    while True: hog()
"""

PROGRAMS: Final = {
    "plain": "from hogs import *\nwhile True: hog()",
    "caught": """
from hogs import *
try:
    while True: hog()
except torch.OutOfMemoryError as error: print("caught", type(error).__name__)
""",
    "retried": """
from hogs import *
for attempt in range(3):
    try:
        while True: hog()
    except torch.OutOfMemoryError:
        print("attempt", attempt); kept.clear(); torch.cuda.empty_cache()
""",
    "swallowed": """
from hogs import *
try:
    while True: hog()
except BaseException: pass
raise SystemExit(7)
""",
    "killed after it": """
import os
from hogs import *
try:
    while True: hog()
except torch.OutOfMemoryError: os.kill(os.getpid(), 9)
""",
    "thread": """
import threading
from hogs import *
def work():
    while True: hog()
thread = threading.Thread(target=work, name="worker"); thread.start(); thread.join(); print("main goes on")
""",
    "executor": """
from concurrent.futures import ThreadPoolExecutor
from hogs import *
with ThreadPoolExecutor(4) as pool: list(pool.map(lambda _: hog(), range(200)))
""",
    "asyncio": """
import asyncio
from hogs import *
async def one():
    while True: hog(); await asyncio.sleep(0)
async def main(): await asyncio.gather(one(), asyncio.sleep(0.01))
asyncio.run(main())
""",
    "backward": """
from hogs import *
x = torch.ones(32 * MIB, device="cuda", requires_grad=True)
loss = ((x * 2).exp() * 3).sin().sum()
torch.cuda.empty_cache()
fill(leave=0)
loss.backward()
""",
    "autograd function": """
from hogs import *
class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, gradient): return gradient + torch.empty(LIMIT, dtype=torch.uint8, device="cuda").sum()
fill(leave=200 * MIB)
Hungry.apply(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
""",
    "optimizer": """
from hogs import *
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(8, 4096, device="cuda")).sum().backward()
torch.cuda.empty_cache()
fill(leave=0)
optimizer.step()
""",
    "module": """
from hogs import *
class Layer(torch.nn.Module):
    def forward(self, x):
        y = x.float()
        return self.forward(torch.cat([y, y]))
fill(leave=300 * MIB)
with torch.no_grad(): Layer()(torch.ones(1000, device="cuda"))
""",
    "data loader": """
from hogs import *
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index): return torch.full((32 * MIB,), index % 7, dtype=torch.uint8)
def load(batch): kept.append(batch.to("cuda", non_blocking=True))
if __name__ == "__main__":
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, pin_memory=True): load(batch)
""",
    "compiled": """
from hogs import *
double = torch.compile(lambda x: (x * 2).cos(), backend="aot_eager")
x = torch.ones(30 * MIB, device="cuda")
double(x)
torch.cuda.empty_cache()
fill(leave=0)
double(x)
""",
    "graph capture": """
from hogs import *
fill(leave=200 * MIB)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): y = torch.empty(LIMIT // 2, dtype=torch.uint8, device="cuda")
""",
    "pool": """
from hogs import *
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    while True: hog()
""",
    "side stream": """
from hogs import *
with torch.cuda.stream(torch.cuda.Stream()):
    while torch.cuda.memory_reserved() + 128 * MIB < LIMIT: hog()
torch.empty(LIMIT // 2, dtype=torch.uint8, device="cuda")
""",
    "one request": "from hogs import *\nhog(); torch.empty(LIMIT, dtype=torch.uint8, device='cuda')",
    "fragmented": """
from hogs import *
def scatter():
    blocks = []
    while torch.cuda.memory_reserved() + 20 * MIB < LIMIT:
        blocks.append(torch.empty(6 * MIB, dtype=torch.uint8, device="cuda"))
    return blocks[::3]
held = scatter()
torch.empty(LIMIT // 3, dtype=torch.uint8, device="cuda")
""",
    "expandable segments": "from hogs import *\nwhile True: hog()",
    "pytest": "def test_one():\n    from hogs import hog\n    while True: hog()\ndef test_two(): pass\n",
    "spawned child": f"""
import multiprocessing
{_WORK}
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work); child.start(); child.join(); print(child.exitcode)
""",
    "process pool": f"""
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
{_WORK}
if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        print(type(pool.submit(work).exception()).__name__)
""",
    "subprocess": """
import subprocess, sys
program = "from hogs import *\\nwhile True: hog()"
print(subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode)
""",
}
"""By name: the text of the program."""

CULPRITS: Final = {"data loader": "load", "fragmented": "scatter"}
"""By name of a program: the function that holds most when memory runs out, where it is not ``hog``."""

IN_CHILD: Final = frozenset(("spawned child", "process pool", "subprocess"))
"""Programs in which a child process's memory runs out."""

CONF: Final = {"expandable segments": "expandable_segments:True"}
"""By name of a program: PYTORCH_CUDA_ALLOC_CONF."""

REASON: Final = "A memory fraction limits this program"
"""What each report gives as the reason: the device has more."""
