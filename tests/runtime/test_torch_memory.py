"""What PyTorch's own tests ask of memory, asked of ours. docs/torch-tests.md has the table."""

from __future__ import annotations

import collections
import gc
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool import analyze
from cudatool.errors import CudatoolError, OutOfMemoryError, UsageError
from cudatool.memory import CachingAllocator, Settings
from cudatool.trace import read
from cudatool.trace.model import Trace

MIB = 1 << 20
Delay = Callable[[], None]


@pytest.fixture(autouse=True)
def default_limits() -> Iterator[None]:
    cudatool.synchronize()
    gc.collect()
    cudatool.empty_cache()
    yield
    cudatool.set_per_process_memory_fraction(1.0)
    cudatool.empty_cache()


def allow(size: int) -> None:
    """Let `size` bytes more than now be reserved, and no MiB more: a fraction is cut to whole bytes."""
    limit = cudatool.memory_reserved() + size + 1024
    cudatool.set_per_process_memory_fraction(limit / cudatool.mem_get_info()[1])


def output(program: str, **environment: str) -> str:
    done = run_python(program, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Counting.


def test_raw_memory_is_counted() -> None:
    """Source: test_cuda.py::test_memory_allocation"""
    before = cudatool.memory_allocated()
    address = cudatool.caching_allocator_alloc(1)
    assert before + 512 == cudatool.memory_allocated()
    cudatool.caching_allocator_delete(address)
    assert before == cudatool.memory_allocated()


def test_statistics_follow_one_array() -> None:
    """Source: test_cuda.py::test_memory_stats"""
    cudatool.reset_peak_memory_stats()
    cudatool.reset_accumulated_memory_stats()
    allocated, reserved = cudatool.memory_allocated(), cudatool.memory_reserved()
    assert (allocated, reserved) == (cudatool.max_memory_allocated(), cudatool.max_memory_reserved())
    before = cudatool.memory_stats()["active_bytes.all.current"]
    array = cudatool.empty(256)
    stats = cudatool.memory_stats()
    assert (before + 1024, 0) == (stats["active_bytes.all.current"], stats["active_bytes.all.freed"])
    del array
    cudatool.empty_cache()
    stats = cudatool.memory_stats()
    assert (before, 1024) == (stats["active_bytes.all.current"], stats["active_bytes.all.freed"])
    cudatool.reset_peak_memory_stats()
    assert (allocated, reserved) == (cudatool.max_memory_allocated(), cudatool.max_memory_reserved())


def counted_in_the_snapshot() -> dict[int, collections.Counter[str]]:
    """Return, for each device, the counters as they follow from the blocks in the snapshot."""
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for segment in cudatool.memory_snapshot():
        split = len(segment["blocks"]) > 1
        counts = {
            "segment": 1,
            "allocated_bytes": segment["allocated_size"],
            "reserved_bytes": segment["total_size"],
            "active_bytes": segment["active_size"],
            "requested_bytes": segment["requested_size"],
            "allocation": sum(block["state"] == "active_allocated" for block in segment["blocks"]),
            "active": sum(block["state"] != "inactive" for block in segment["blocks"]),
            "inactive_split": sum(split and block["state"] == "inactive" for block in segment["blocks"]),
            "inactive_split_bytes": sum(
                block["size"] for block in segment["blocks"] if split and block["state"] == "inactive"
            ),
        }
        for name, value in counts.items():
            for pool in ("all", f"{segment['segment_type']}_pool"):
                found[segment["device"]][f"{name}.{pool}.current"] += value
    return found


def test_statistics_are_what_the_snapshot_shows() -> None:
    """Source: test_cuda_multigpu.py::test_memory_stats, test_cuda_multigpu.py::test_memory_stats_multigpu"""
    arrays: list[Any] = []

    def check() -> None:
        for device, counts in counted_in_the_snapshot().items():
            stats = cudatool.memory_stats(device)
            assert dict(counts) == {name: stats[name] for name in counts}

    shapes = [(1,), (10, 20), (200, 300, 20)]
    shapes += [(i, i * 4) for i in range(1, 12)] + [(i, i * 7, i * 9, i * 11) for i in range(5, 9)] + [(0, 0, 0)]
    for number, shape in enumerate(shapes):
        arrays.append(cudatool.empty(shape, device=number % cudatool.device_count()))
        check()
    start, level = cudatool.max_memory_allocated(), cudatool.memory_allocated()
    for _ in range(len(arrays) // 2):
        del arrays[::3]
        check()
    assert cudatool.memory_allocated() < level <= start == cudatool.max_memory_allocated()
    stats = cudatool.memory_stats()
    arrays.clear()
    cudatool.empty_cache()
    assert stats["num_sync_all_streams"] + 1 == cudatool.memory_stats()["num_sync_all_streams"]
    assert cudatool.memory_stats()["num_device_free"] > stats["num_device_free"]
    check()
    cudatool.reset_peak_memory_stats()
    assert cudatool.memory_allocated() == cudatool.max_memory_allocated()


@pytest.mark.whole_device
@pytest.mark.parametrize("device", [0, "cuda", "cuda:0"])
def test_free_memory_is_asked_of_the_driver(device: object) -> None:
    """Source: test_cuda_multigpu.py::test_mem_get_info"""
    free, total = cudatool.mem_get_info(device)
    array = cudatool.empty(32 * MIB, np.uint8, device=device)
    less, still = cudatool.mem_get_info(device)
    assert (True, total) == (less < free, still)
    del array


def test_a_product_of_an_expanded_matrix_takes_no_more_memory() -> None:
    """Source: test_cuda.py::test_matmul_memory_use"""
    a, b = cudatool.ones((1, 32, 32)), cudatool.ones((24, 32, 1))
    expanded = cudatool.DeviceArray(np.broadcast_to(a.layout, (24, 32, 32)), a._memory, a.device)
    cudatool.matmul(a, b)  # whatever is made once
    peaks = []
    for left in (a, expanded):
        cudatool.synchronize()
        cudatool.reset_peak_memory_stats()
        before = cudatool.memory_allocated()
        cudatool.matmul(left, b)
        peaks.append(cudatool.max_memory_allocated() - before)
    assert [24 * 32 * 4, 24 * 32 * 4] == peaks


# Limits.


def test_out_of_memory_tells_what_was_asked_and_disturbs_nothing() -> None:
    """Source: test_cuda.py::test_out_of_memory"""
    array = cudatool.zeros(1024)
    for size in (800_000_000 << 30, 8_000_000_000 << 30):
        with pytest.raises(OutOfMemoryError, match=r"tried to allocate .* on device 0, which has") as caught:
            cudatool.empty(size, np.int8)
        total = cudatool.get_device_properties(0).total_memory
        assert (True, total) == (caught.value.wanted >= size, caught.value.total)
    assert (array.fill_(1).get() == 1).all()


@pytest.mark.whole_device
def test_what_was_out_of_memory_can_be_had_after_a_free() -> None:
    """Source: test_cuda.py::test_out_of_memory_retry"""
    much = int(cudatool.mem_get_info()[1] * 0.6)
    first = cudatool.empty(much, np.int8)
    with pytest.raises(OutOfMemoryError, match="tried to allocate"):
        cudatool.empty(much, np.int8)
    del first
    assert much == cudatool.empty(much, np.int8).nbytes


@pytest.mark.parametrize("split_limit", ["", "max_split_size_mb:1024"])
def test_too_much_is_an_out_of_memory_error(split_limit: str) -> None:
    """Source: test_cuda.py::test_raises_oom"""
    program = """
import cudatool
try: cudatool.empty(1 << 40)
except cudatool.OutOfMemoryError as error: print(type(error).__name__, error.name)
"""
    assert "OutOfMemoryError CUDA_ERROR_OUT_OF_MEMORY" == output(program, CUDATOOL_ALLOC_CONF=split_limit)


def test_observers_are_told_of_out_of_memory(own: Own) -> None:
    """Source: test_cuda.py::test_notifies_oom"""
    told: list[tuple[int, ...]] = []
    allocator = own("")
    allocator.add_out_of_memory_observer(lambda *what: told.append(what))
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(4 << 40, 0)
    assert [(0, 4 << 40, caught.value.allowed, caught.value.free)] == told


@pytest.mark.parametrize("fraction", [-0.1, 2.0, "0.5", None])
def test_a_fraction_lies_between_0_and_1(fraction: Any) -> None:
    """Source: test_cuda.py::test_set_per_process_memory_fraction"""
    with pytest.raises(UsageError, match="fraction"):
        cudatool.set_per_process_memory_fraction(fraction)


def test_a_fraction_limits_what_is_reserved() -> None:
    """Source: test_cuda.py::test_set_per_process_memory_fraction"""
    array, total = cudatool.zeros(1024), cudatool.mem_get_info()[1]
    cudatool.set_per_process_memory_fraction(0.5)
    cudatool.empty(int(total * 0.499) - cudatool.memory_reserved(), np.int8)
    cudatool.empty_cache()
    with pytest.raises(OutOfMemoryError, match="The memory fraction allows"):
        cudatool.empty(total // 2, np.int8)
    assert (array.fill_(1).get() == 1).all()


@pytest.mark.parametrize("fraction", [1.0, 0.0, 0.1, 0.37, 0.99])
def test_a_fraction_is_what_was_set(fraction: float) -> None:
    """Source: test_cuda.py::test_get_per_process_memory_fraction"""
    cudatool.set_per_process_memory_fraction(fraction)
    assert fraction == pytest.approx(cudatool.get_per_process_memory_fraction(), abs=1e-9)  # whole bytes


@pytest.mark.parametrize("is_before", [True, False])
def test_a_recording_says_which_fraction_the_program_set(is_before: bool, tmp_path: Path) -> None:
    if is_before:
        cudatool.set_per_process_memory_fraction(0.75)
    with cudatool.record(tmp_path / "t.ctrace"):
        if not is_before:
            cudatool.set_per_process_memory_fraction(0.5)
            cudatool.set_per_process_memory_fraction(0.75)
        array = cudatool.empty(3 << 20, np.uint8)
        del array
    trace = read(tmp_path / "t.ctrace")
    count = len(trace.records)
    for part in (trace, analyze.window(trace, count - 1, count)):
        settings, where = analyze.recorded_settings(part)
        assert settings.per_process_memory_fraction == pytest.approx(0.75, abs=1e-9)
        assert settings == Settings.parse(settings.text)
        assert where.endswith("the program set a memory fraction of 0.75")


def test_a_fraction_that_came_after_more_was_reserved_is_not_taken_for_the_limit(tmp_path: Path) -> None:
    cudatool.empty_cache()
    with cudatool.record(tmp_path / "t.ctrace"):
        array = cudatool.empty(64 << 20, np.uint8)
        cudatool.set_per_process_memory_fraction((1 << 20) / cudatool.mem_get_info()[1])
        del array
    settings, _ = analyze.recorded_settings(read(tmp_path / "t.ctrace"))
    assert settings.per_process_memory_fraction is None


@pytest.mark.parametrize("fraction", ["0.0", "0.5", "1.0"])
def test_a_fraction_can_be_set_from_outside(fraction: str) -> None:
    """Source: test_cuda.py::test_allocator_memory_fraction_setting"""
    program = "import cudatool; print(cudatool.get_per_process_memory_fraction())"
    assert fraction == output(program, PYTORCH_CUDA_ALLOC_CONF=f"per_process_memory_fraction:{fraction}")


@pytest.mark.parametrize("fraction", ["-0.1", "1.1"])
def test_a_bad_fraction_from_outside_is_refused(fraction: str) -> None:
    """Source: test_cuda.py::test_allocator_memory_fraction_setting"""
    program = """
import cudatool
try: cudatool.empty(1)
except cudatool.CudatoolError as error: print(error)
"""
    told = output(program, PYTORCH_CUDA_ALLOC_CONF=f"per_process_memory_fraction:{fraction}")
    assert told.startswith(f"PYTORCH_CUDA_ALLOC_CONF: allocator setting per_process_memory_fraction:{fraction}: ")


def test_other_backends_than_the_native_one_are_refused() -> None:
    """PyTorch has cudaMallocAsync, too.

    Source: test_cuda.py::test_allocator_backend
    """
    program = """
import cudatool
print(cudatool.get_allocator_backend())
try: cudatool.empty(1)
except cudatool.CudatoolError as error: print(error)
"""
    native, refusal = output(program, PYTORCH_ALLOC_CONF="backend:cudaMallocAsync").splitlines()
    assert ("native", True) == (native, "backend:cudaMallocAsync is not supported" in refusal)


# Reuse.


def test_a_block_used_on_another_stream_rests_until_that_is_done(delay: Delay) -> None:
    """Source: test_cuda.py::test_record_stream"""
    pinned = cudatool.pin_memory(np.array([1, 2, 3, 4], np.float32))
    result, stream, current = cudatool.empty(4), cudatool.Stream(), cudatool.current_stream()
    cudatool.synchronize()
    with cudatool.stream(stream):
        array = cudatool.empty(4).copy_(pinned, non_blocking=True)
        address = array.data_ptr()
    current.wait_stream(stream)
    array.record_stream(current)
    delay()
    result.copy_(array)
    del array
    with cudatool.stream(stream):
        other = cudatool.zeros(4)
        assert address != other.data_ptr()
    assert [1, 2, 3, 4] == result.get().tolist()
    current.synchronize()
    with cudatool.stream(stream):
        assert address == cudatool.empty(4).data_ptr()


def test_a_view_records_the_whole_block(delay: Delay) -> None:
    """Source: test_cuda.py::test_record_stream_on_shifted_view"""
    home, other = cudatool.Stream(), cudatool.Stream()
    with cudatool.stream(home):
        base = cudatool.empty((10, 10))
    view, address = base[5:], base.data_ptr()
    cudatool.synchronize()
    with cudatool.stream(other):
        delay()
    view.record_stream(other)
    del base, view
    home.synchronize()
    with cudatool.stream(home):
        assert address != cudatool.empty((10, 10)).data_ptr()
    other.synchronize()


def test_blocks_that_rest_are_waited_for_before_memory_is_out(delay: Delay) -> None:
    """Source: test_cuda.py::test_caching_allocator_record_stream_oom"""
    stream = cudatool.Stream()
    with cudatool.stream(stream):
        sum_ = cudatool.zeros(4 * MIB, np.uint8)
        delay()
    allow(40 * MIB)
    for value in range(30):
        array = cudatool.full(4 * MIB, value, np.uint8)
        stream.wait_stream(cudatool.current_stream())
        with cudatool.stream(stream):
            sum_.copy_(array)
        array.record_stream(stream)
        del array
    stream.synchronize()
    assert (sum_.get() == 29).all()


def test_arrays_keep_their_values_whatever_is_allocated_and_freed() -> None:
    """Source: test_cuda.py::test_allocator_fuzz"""
    choose = random.Random(123)
    alive: list[tuple[int, cudatool.DeviceArray]] = []
    for number in range(400):
        while sum(array.nbytes for _, array in alive) > 16 * MIB or (alive and choose.random() < 0.45):
            value, array = alive.pop(choose.randrange(len(alive)))
            assert (array.get() == value).all()
            del array
        if choose.random() < 0.05:
            cudatool.empty_cache()
        alive.append((number, cudatool.full(choose.randrange(1, 1 << 18), number, np.int32)))
    assert all((array.get() == value).all() for value, array in alive)


def test_without_caching_nothing_is_counted() -> None:
    """Source: test_cuda.py::test_cachingAllocator_raw_alloc"""

    def counted() -> int:
        before = cudatool.memory_stats()["requested_bytes.all.allocated"]
        cudatool.caching_allocator_delete(cudatool.caching_allocator_alloc(MIB))
        return cudatool.memory_stats()["requested_bytes.all.allocated"] - before

    with cudatool.caching_allocator_disabled():
        assert 0 == counted()
    assert MIB == counted()


# Settings. Ours are read once; so each test has an allocator of its own, on the device.


Own = Callable[[str], CachingAllocator]


@pytest.fixture
def own() -> Iterator[Own]:
    """Makes an allocator on the device from a settings string."""
    cudatool.init()
    from cudatool.memory.driver_provider import DriverProvider

    made: list[CachingAllocator] = []

    def make(settings: str) -> CachingAllocator:
        made.append(CachingAllocator(DriverProvider(0), device=0, settings=Settings.parse(settings)))
        return made[-1]

    yield make
    for allocator in made:
        for segment in allocator.snapshot_segments():
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    allocator.free(block["address"])
        allocator.empty_cache()
        assert [] == allocator.snapshot_segments()


def limit(allocator: CachingAllocator, size: int) -> None:
    allocator.set_memory_fraction((size + 1024) / cudatool.mem_get_info()[1])


def test_large_blocks_are_not_split_beyond_the_limit(own: Own) -> None:
    """Source: test_cuda.py::test_max_split_expandable"""
    for settings in ("max_split_size_mb:40", "expandable_segments:True,max_split_size_mb:40"):
        allocator = own(settings)
        limit(allocator, 120 * MIB)
        blocks = [allocator.malloc(40 * MIB, 0) for _ in range(3)]
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(40 * MIB, 0)
        for address in blocks:
            allocator.free(address)
        whole = allocator.malloc(120 * MIB, 0)
        assert 120 * MIB == allocator.stats()["reserved_bytes.all.current"]
        allocator.free(whole)


def test_garbage_is_collected_before_the_limit_is_reached(own: Own) -> None:
    """Source: test_cuda.py::test_garbage_collect_expandable"""
    for settings, reserved in (("", 120), ("expandable_segments:True,", 80)):
        allocator = own(settings + "garbage_collection_threshold:0.5")
        limit(allocator, 120 * MIB)
        for address in [allocator.malloc(40 * MIB, 0), allocator.malloc(40 * MIB, 0)]:
            allocator.free(address)
        allocator.malloc(80 * MIB, 0)
        assert allocator.stats()["reserved_bytes.all.current"] <= reserved * MIB


@pytest.mark.parametrize(
    ("settings", "size", "expected"),
    [
        ("", 84, 84),
        ("roundup_power2_divisions:4", 84, 96),
        ("garbage_collection_threshold:0.5,max_split_size_mb:40", 84, 84),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 84, 88),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 400, 512),
        ("release_lock_on_cudamalloc:True", 84, 84),
    ],
)
def test_requests_are_rounded_as_told(own: Own, settings: str, size: int, expected: int) -> None:
    """Source: test_cuda.py::test_allocator_settings"""
    allocator = own(settings)
    allocator.malloc(size * MIB, 0)
    stats = allocator.stats()
    assert expected * MIB == stats["active_bytes.all.allocated"]
    assert size * MIB == stats["requested_bytes.all.allocated"]


@pytest.mark.parametrize(
    "settings",
    [
        "foo:1,bar:2",
        "garbage_collection_threshold:1.2",
        "max_split_size_mb:2",
        "release_lock_on_cudamalloc:none",
        "pinned_use_cuda_host_register:none",
        "pinned_num_register_threads:none",
        "pinned_num_register_threads:1024",
    ],
)
def test_bad_settings_are_refused(settings: str) -> None:
    """Source: test_cuda.py::test_allocator_settings"""
    with pytest.raises(ValueError, match="allocator setting"):
        Settings.parse(settings)


# History: PyTorch's `_record_memory_history` is, for us, a trace.


def recorded(path: Path, program: Callable[[], object], **options: Any) -> Trace:
    from cudatool.trace.reader import read

    with cudatool.record(path / "t.ctrace", force=True, **options):
        kept = program()
    del kept
    return read(path / "t.ctrace")


def name_of(frame: dict[str, Any]) -> str:
    return str(frame["name"]).rpartition(".")[2]


def exported(path: Path, trace: Trace) -> dict[str, Any]:
    """Return a trace as PyTorch would write it."""
    from cudatool import analyze
    from cudatool.export import torch_pickle

    state = analyze.segments_at(analyze.blocks(trace), analyze.segments(trace), len(trace.records) - 1)
    torch_pickle.write(path / "t.pickle", trace, analyze.torch_segments(trace, state))
    snapshot: dict[str, Any] = pickle.loads((path / "t.pickle").read_bytes())
    return snapshot


def test_a_snapshot_shows_where_each_block_was_allocated(tmp_path: Path) -> None:
    """Source: test_cuda.py::test_memory_snapshot"""
    sizes = random.Random(5)

    def program() -> Any:
        cudatool.empty((622, 411))
        unused, kept = cudatool.empty((310, 410)), cudatool.empty((311, 411))
        tiles = [cudatool.empty(128) for _ in range(100)]
        while tiles:
            del tiles[sizes.randrange(len(tiles))]
        return unused, kept, kept.data_ptr()

    from cudatool.trace.reader import read

    with cudatool.record(tmp_path / "t.ctrace"):
        *arrays, address = program()
    snapshot = exported(tmp_path, read(tmp_path / "t.ctrace"))
    found = [block for segment in snapshot["segments"] for block in segment["blocks"] if block["address"] == address]
    assert [311 * 411 * 4] == [block["requested_size"] for block in found]
    assert [(__file__, "program")] == [(b["frames"][0]["filename"], name_of(b["frames"][0])) for b in found]
    assert all("frames" in segment for segment in snapshot["segments"])
    del arrays


@pytest.mark.parametrize("with_stacks", [True, False])
def test_history_has_the_stacks_of_allocations_and_frees(tmp_path: Path, with_stacks: bool) -> None:
    """
    Source: test_cuda.py::test_memory_plots
    Source: test_cuda.py::test_memory_plots_free_stack
    Source: test_cuda.py::test_memory_plots_history_context
    """
    kept: list[Any] = []

    def the_allocation() -> None:
        kept.append(cudatool.empty(12))

    def the_free() -> None:
        kept.clear()

    def program() -> None:
        the_allocation()
        the_free()

    history = exported(tmp_path, recorded(tmp_path, program, with_stacks=with_stacks))["device_traces"][0]
    names = [(entry["action"], [name_of(frame) for frame in entry["frames"][:1]]) for entry in history]
    asked = [named for named in names if named[0] in ("alloc", "free_requested")]
    expected = [["the_allocation"], ["the_free"]] if with_stacks else [[], []]
    assert [*zip(("alloc", "free_requested"), expected, strict=True)] == asked


def test_history_begins_with_the_recording_whatever_memory_there_was(tmp_path: Path) -> None:
    """What lived before is among the segments; it is no event of the history."""
    from cuda.bindings import driver

    before = cudatool.empty(12)
    status, address = driver.cuMemAlloc(1024)
    assert status == 0

    def program() -> None:
        cudatool.empty(12)

    history = exported(tmp_path, recorded(tmp_path, program))["device_traces"][0]
    assert [entry["action"] for entry in history] == ["alloc", "free_requested", "free_completed"]
    driver.cuMemFree(address)
    del before


def test_history_has_the_stacks_of_segments(tmp_path: Path) -> None:
    """Source: test_cuda.py::test_memory_plots_free_segment_stack"""

    def program() -> None:
        cudatool.empty(24 * MIB, np.uint8)
        cudatool.empty_cache()

    history = exported(tmp_path, recorded(tmp_path, program))["device_traces"][0]
    segments = [(entry["action"], name_of(entry["frames"][0])) for entry in history if "segment" in entry["action"]]
    assert [("segment_alloc", "program"), ("segment_free", "program")] == segments


def test_ranges_tell_what_a_part_of_the_history_was_about(tmp_path: Path) -> None:
    """PyTorch attaches a text to each event; ours are inside a range of that name.

    Source: test_cuda.py::test_memory_plots_metadata
    """
    from cudatool.trace.events import Kind

    def program() -> None:
        with cudatool.range("metadata test"):
            cudatool.empty(12)

    trace = recorded(tmp_path, program)
    kinds = [
        Kind(kind) for kind in trace.records["kind"] if kind in (Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.BLOCK_ALLOC)
    ][-3:]  # before them: what other tests left
    assert [Kind.RANGE_PUSH, Kind.BLOCK_ALLOC, Kind.RANGE_POP] == kinds
    (push,) = trace.of_kind(Kind.RANGE_PUSH)
    assert "metadata test" == trace.names[push["name"]]


def test_an_array_in_a_reference_cycle_is_found_where_it_was_made(tmp_path: Path) -> None:
    """PyTorch draws the cycle; ours tells the stack of the block that only the collector frees.

    Source: test_cuda.py::test_cycles
    """

    def create() -> None:
        array = cudatool.empty((3, 4))

        def again() -> Any:
            return again, array

    def program() -> None:
        gc.disable()
        try:
            create()
        finally:
            gc.enable()
        the_collection()

    def the_collection() -> None:
        gc.collect()

    history = exported(tmp_path, recorded(tmp_path, program))["device_traces"][0]
    events = [
        (entry["action"], name_of(entry["frames"][0]))
        for entry in history
        if entry["action"] in ("alloc", "free_requested")
    ]
    assert [("alloc", "create"), ("free_requested", "the_collection")] == events


def test_an_error_inside_is_not_hidden_by_what_watches_memory(tmp_path: Path) -> None:
    """Source: test_cuda.py::test_cuda_memory_leak_detection_propagates_errors"""
    with pytest.raises(CudatoolError, match="cannot index"), cudatool.record(tmp_path / "t.ctrace"):
        cudatool.ones(3)["no"]  # type: ignore[index]
