"""Which tensors of modules and optimizers are told, and that nothing is kept alive. What blocks get is in
test_cupti_native.py.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest

from cudatool.collect import _cupti, torch_modules
from cudatool.trace.events import Kind, TensorRole

torch = pytest.importorskip("torch")


@pytest.fixture
def watched(monkeypatch):
    """What names modules, where the host's memory counts as a GPU's; and the events of tensors."""
    monkeypatch.setattr(torch_modules, "_place", lambda tensor: (0, tensor.data_ptr(), tensor.nbytes))
    events = []

    def report(records, names):
        assert set(records["kind"].tolist()) == {Kind.MODULE_TENSOR} and len(set(records["time"].tolist())) == 1
        for number, role, address in zip(
            *(records[name].tolist() for name in ("name", "flags", "address")), strict=True
        ):
            events.append((names[number], TensorRole(role), address))

    modules = torch_modules.TorchModules(torch, report, was_imported=False)
    yield modules, events
    modules.stop()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(2, affine=False, track_running_stats=True)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def addresses(tensors):
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def test_naming_keeps_no_variable_of_the_program_alive(watched, monkeypatch):
    modules, _ = watched
    monkeypatch.setattr(_cupti, "unnamed_modules", lambda: [(1, 1, 1)])
    monkeypatch.setattr(_cupti, "modules_named", lambda found, took: None)

    class Caller(torch.nn.Module):
        def forward(self, x):
            kept.append(weakref.ref(x))
            modules.name_called()
            return x + 1

    def call():
        x = torch.ones(3)
        kept.append(weakref.ref(x))
        y = Caller()(x)
        kept.append(weakref.ref(y))

    kept = []
    gc.collect()
    gc.disable()
    try:
        call()
        assert [None] * 3 == [one() for one in kept]
    finally:
        gc.enable()


def test_a_module_that_is_gone_is_not_taken_for_one_of_another_class_at_its_address(watched, monkeypatch):
    modules, _ = watched
    found = {}
    monkeypatch.setattr(_cupti, "modules_named", lambda stood_for, took: found.update(stood_for))

    class Caller(torch.nn.Module):
        def forward(self, x):
            of = id(self), id(torch.nn.Dropout), id(Caller)
            monkeypatch.setattr(_cupti, "unnamed_modules", lambda: [(1, of[0], of[1]), (2, of[0], of[2])])
            modules.name_called()
            return x

    Caller()(torch.ones(3))
    assert {1: "", 2: "Caller"} == found


def test_naming_keeps_no_variable_of_another_thread_alive(watched, monkeypatch):
    modules, _ = watched
    monkeypatch.setattr(_cupti, "unnamed_modules", lambda: [(1, 1, 1)])
    monkeypatch.setattr(_cupti, "modules_named", lambda found, took: None)

    class Keeping(torch.nn.Module):
        def forward(self, x):
            y = x + 1
            seen.extend([weakref.ref(x), weakref.ref(y)])
            return None

    def work():
        nonlocal alive
        inner = torch.nn.Sequential(torch.nn.Sequential(Keeping()))
        while not is_over.is_set():
            inner(torch.ones(3))
            alive += sum(one() is not None for one in seen)
            seen.clear()

    seen, alive, is_over = [], 0, threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=work)
    try:
        thread.start()
        for _ in range(3000):
            modules.name_called()
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not alive


def test_the_modules_that_each_thread_calls_are_known_from_the_outermost_on(watched):
    class Waiting(torch.nn.Module):
        def forward(self, x):
            is_called.set()
            is_over.wait(20)

    is_called, is_over = threading.Event(), threading.Event()
    outer = torch.nn.Sequential(torch.nn.Sequential(Waiting()))
    thread = threading.Thread(target=outer, args=(1,))
    thread.start()
    try:
        assert is_called.wait(20)
        called = [found for found in _cupti.called_modules() if found]
    finally:
        is_over.set()
        thread.join()
    assert [[outer, outer[0], outer[0][0]]] == called
    assert not any(_cupti.called_modules())


def test_parameters_buffers_and_the_optimizers_state_have_the_path_of_the_parameter(watched):
    modules, events = watched
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    modules._name([net])
    net(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    modules.name_tensors()
    weights = ["Net.layers.0.weight", "Net.layers.1.weight"]
    by_role = {role: [(name, at) for name, own, at in events if own is role] for role in TensorRole}
    parameters = list(net.parameters())
    momentum = [optimizer.state[own]["momentum_buffer"] for own in parameters]
    for role, tensors in (
        (TensorRole.PARAMETER, parameters),
        (TensorRole.OPTIMIZER_STATE, momentum),
    ):
        assert sorted(by_role[role]) == list(zip(weights, addresses(tensors), strict=True))
    assert [name for name, _ in by_role[TensorRole.BUFFER]] == [
        *("Net.norm.running_mean", "Net.norm.running_var", "Net.norm.num_batches_tracked"),
    ]


def test_tensors_are_told_when_optimizers_get_state_and_again_only_if_they_moved(watched, monkeypatch):
    modules, events = watched
    clock = [100.0]
    monkeypatch.setattr(torch_modules.time, "monotonic", lambda: clock[0])

    def looked():
        for _ in range(2):  # the main thread looks, and what it has found is passed on the next time
            thread = threading.Thread(target=modules.sample)
            thread.start()
            thread.join()

    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    modules._name([net])
    looked()
    assert {role for _, role, _ in events} == {TensorRole.PARAMETER, TensorRole.BUFFER}
    net(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    events.clear()
    looked()
    assert {role for _, role, _ in events} == {TensorRole.OPTIMIZER_STATE}
    events.clear()
    net.layers[0].weight.data = torch.zeros(2, 2)
    looked()
    assert not events  # it is not looked at each time
    clock[0] += 1
    looked()
    assert [(name, role) for name, role, _ in events] == [("Net.layers.0.weight", TensorRole.PARAMETER)]


def test_wrappers_of_pytorch_are_not_part_of_a_path(watched):
    modules, _ = watched
    wrapped = torch.compile(Net(), backend="eager")
    modules._name([wrapped])
    paths = {known.path for known in modules._named.values()}
    assert paths == {"Net", "Net.layers", "Net.layers.0", "Net.layers.1", "Net.norm"}


def test_modules_and_optimizers_are_not_kept_alive_and_addresses_lose_their_names(watched):
    modules, _ = watched
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    modules._name([net])
    modules.name_tensors()
    gone = [weakref.ref(net), weakref.ref(optimizer)]
    del net, optimizer
    gc.collect()
    assert [own() for own in gone] == [None, None]
    assert not modules._named and not modules._optimizers


def test_after_the_end_optimizers_are_pytorchs_own_again():
    before = torch.optim.Optimizer.__init__
    modules = torch_modules.TorchModules(torch, lambda records, names: None, was_imported=True)
    assert torch.optim.Optimizer.__init__ is not before
    modules.stop()
    modules.stop()
    assert torch.optim.Optimizer.__init__ is before


def test_optimizers_from_before_are_found():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    modules = torch_modules.TorchModules(torch, lambda records, names: None, was_imported=True)
    assert optimizer in modules._optimizers
    modules.stop()


def test_a_call_of_another_form_is_not_watched(monkeypatch):
    def call(module, *args):
        return (lambda: module)()

    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    modules = torch_modules.TorchModules(torch, lambda records, names: None, was_imported=False)
    assert not modules.is_watching
    modules.sample()
    modules.name_tensors()
    modules.stop()
    assert _cupti.unnamed_modules() == []


@pytest.mark.parametrize("thing", [None, 3, torch.zeros(2), torch.zeros(2, device="meta")])
def test_what_is_not_in_a_gpus_memory_has_no_place(thing):
    assert torch_modules._place(thing) is None
