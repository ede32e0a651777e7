"""Correct ways to use streams, events, pinned memory and graphs in PyTorch: nothing here races."""

import sys
import threading
from collections.abc import Callable

import torch
from torch import nn

device = "cuda"
N = 1 << 20


def backward_on_two_streams() -> None:
    """Autograd runs each node on its forward stream and orders them itself."""
    side = torch.cuda.Stream()
    weight = torch.randn(512, 512, device=device, requires_grad=True)
    for _ in range(5):
        x = weight @ weight
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.record_stream(side)
            y = (x * 2).relu()
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        y.sum().backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
        weight.grad = None


def ring_of_pinned_buffers() -> None:
    """Each buffer is refilled when the event of its last copy has passed."""
    copies = torch.cuda.Stream()
    buffers = [torch.empty(N, pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event() for _ in buffers]
    total = torch.zeros((), device=device)
    for step in range(8):
        buffer, event = buffers[step % 2], events[step % 2]
        event.synchronize()  # nothing, the first time
        buffer.fill_(step)
        with torch.cuda.stream(copies):
            batch = buffer.to(device, non_blocking=True)
            event.record()
        torch.cuda.current_stream().wait_event(event)
        batch.record_stream(torch.cuda.current_stream())
        total += batch.sum()
    print(total.item())


def results_by_query() -> None:
    """The host asks until the copy is done."""
    source = torch.randn(N, device=device)
    host = torch.empty(N, pin_memory=True)
    for _ in range(3):
        host.copy_(source.sin_(), non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            pass
        print(host.tolist()[0], host.numpy()[1])


def loader_with_pinned_memory() -> None:
    """Worker processes, a thread that pins, copies that do not block."""
    data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
    model = nn.Linear(64, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data, 64, num_workers=2, pin_memory=True)
    for _ in range(3):
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(loss.item())


def mixed_precision() -> None:
    """A scaler, clipping of gradients, a scheduler."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).to(
        device
    )
    x, y = torch.randn(16, 3, 32, 32, device=device), torch.randint(0, 10, (16,), device=device)
    model(x)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler()
    for _ in range(5):
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    print(loss.item())


def graphed_training() -> None:
    """The forward and the backward of a model as graphs, fed by copies."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sample = torch.randn(64, 256, device=device)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    for _ in range(5):
        loss = graphed(torch.randn(64, 256, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


def whole_step_as_a_graph() -> None:
    """Warm-up on a side stream, capture, replay with new inputs."""
    model = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(64, 256, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    for _ in range(5):
        x.copy_(torch.randn(64, 256))
        graph.replay()
    print(loss.item())


def threads_of_their_own() -> None:
    """Each thread has its tensors and its stream; the main thread waits for both."""
    results = [torch.zeros(N, device=device) for _ in range(2)]
    torch.cuda.synchronize()

    def work(result: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                result += 1
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(result.sum().item() for result in results))


def many_kinds_of_operators() -> None:
    """Operators that synchronize inside, views, indices, random numbers, sorting, linear algebra."""
    x = torch.randn(128, 128, device=device)
    y = x[x > 0].nonzero()
    z = x.masked_fill(x < 0, 0.0).index_select(0, torch.arange(5, device=device))
    x[3, 5] = 7
    x[:, ::2].mul_(2)
    x.T[1:].add_(1)
    values, order = x.sort(dim=1)
    x.scatter_(1, order, values)
    q, r = torch.linalg.qr(x)
    torch.linalg.svd(x @ x.T + torch.eye(128, device=device))
    u = torch.unique((x * 3).int())
    b = torch.bincount(torch.randint(0, 10, (1000,), device=device))
    f = torch.fft.fft(x).abs().as_strided((10, 10), (1, 1)).clone()
    e = nn.functional.embedding(torch.randint(0, 128, (50,), device=device), x)
    sparse = torch.eye(10, device=device).to_sparse() @ torch.ones(10, 3, device=device)
    print(y.shape, z.sum().item(), q.sum().item(), r.max().item(), u.numel(), b.sum().item(), f.mean().item())
    print(e.sum().item(), sparse.sum().item(), torch.equal(x, x.clone()), x.isnan().any().item(), str(x)[:20])


def compiled() -> None:
    """Kernels that PyTorch's compiler makes are launched past the dispatcher: they are not checked, and that is said."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).to(device)
    step = torch.compile(model)
    for _ in range(3):
        step(torch.randn(8, 64, device=device)).sum().backward()
    print(model[0].weight.grad.norm().item())


IDIOMS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        backward_on_two_streams,
        ring_of_pinned_buffers,
        results_by_query,
        loader_with_pinned_memory,
        mixed_precision,
        graphed_training,
        whole_step_as_a_graph,
        threads_of_their_own,
        many_kinds_of_operators,
        compiled,
    )
}

if __name__ == "__main__":
    IDIOMS[sys.argv[1]]()
    torch.cuda.synchronize()
