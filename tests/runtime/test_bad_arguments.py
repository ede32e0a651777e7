"""Bad input is told in our words, with the name of the argument: no message of NumPy's, none from inside."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import driver

import cudatool
from cudatool import amp, blas, comm, jiterator, memory, nccl, nvtx, ops, optim, random
from cudatool.errors import CudaError, ShapeError, UsageError

PLUS = "template <typename T> T plus(T x, T a) { return x + a; }"
EMPTY = 'extern "C" __global__ void f() {}'


def ones(*shape, dtype=np.float32):
    return cudatool.ones(shape, dtype)


def scaler():
    found = amp.GradScaler()
    found.scale(ones())
    return found


def sgd(**options):
    return optim.SGD([ones(3)], **options)


def adam(**options):
    return optim.Adam([ones(3)], **options)


SCALER = [
    (lambda: amp.GradScaler(init_scale="1"), "init_scale must be a real number, not '1'"),
    (lambda: amp.GradScaler(init_scale=0), "init_scale must be above 0 and finite, not 0.0"),
    (lambda: amp.GradScaler(init_scale=float("inf")), "init_scale must be above 0 and finite"),
    (lambda: amp.GradScaler(growth_factor="2"), "growth_factor must be a real number"),
    (lambda: amp.GradScaler(backoff_factor=0), "backoff_factor must be above 0 and below 1, not 0"),
    (lambda: amp.GradScaler(growth_interval=0), "growth_interval must be at least 1, not 0"),
    (lambda: amp.GradScaler(growth_interval=1.5), "growth_interval must be a whole number, not 1.5"),
    (lambda: scaler().set_growth_factor(1), "growth_factor must be above 1, not 1"),
    (lambda: scaler().set_backoff_factor(2), "backoff_factor must be above 0 and below 1"),
    (lambda: scaler().set_growth_interval(-4), "growth_interval must be at least 1"),
    (lambda: scaler().scale("loss"), "an array or an iterable of arrays, not str"),
    (lambda: scaler().scale(np.ones(3)), "an array or an iterable of arrays, not ndarray"),
    (lambda: scaler().unscale_(sgd(), None), "gradients come as a list of arrays on the device"),
    (lambda: scaler().unscale_(sgd(), ones(3)), "gradients come as a list"),
    (lambda: scaler().step(sgd(), [np.ones(3)]), "gradients come as a list of arrays on the device"),
    (lambda: scaler().step(None, [ones(3)]), r"an optimizer, with a method step\(grads\), not NoneType"),
    (lambda: scaler().update(-1.0), "new_scale must be above 0"),
    (lambda: scaler().update("2"), "new_scale must be a real number"),
    (lambda: scaler().update(ones(1, dtype=np.int64)), "or one float32 on the device"),
    (lambda: scaler().load_state_dict({"scale": 1.0}), "there is no _growth_tracker, growth_factor"),
]

AUTOCAST = [
    (lambda: amp.autocast(dtype="half precision"), "'half precision' is no dtype"),
    (lambda: amp.autocast().__exit__(None, None, None), "left before it is entered"),
    (lambda: amp.custom_fwd(3), "decorates a function, not int"),
    (lambda: amp.custom_fwd(abs, cast_inputs=np.int32), "cast_inputs must be one of float32, float16, bfloat16, not"),
]

RANDOM = [
    (lambda: random.rand(2.5), "a shape is whole numbers, or a tuple of them, not 2.5"),
    (lambda: random.rand((2, "a")), "a shape is a whole number or several"),
    (lambda: random.rand(-1), r"shape \(-1,\): a dimension is negative"),
    (lambda: random.rand(3, dtype="zz"), "'zz' is no dtype"),
    (lambda: random.rand(3, out=np.ones(3)), "out must be a DeviceArray, not ndarray"),
    (lambda: random.randint(1.5, (3,)), "high must be a whole number, not 1.5"),
    (lambda: random.randperm("3"), "n must be a whole number, not '3'"),
    (lambda: random.randperm(1.5), "n must be a whole number, not 1.5"),
    (lambda: random.normal(ones(2), ones(3)), r"\(2,\) and \(3,\) cannot be broadcast"),
    (lambda: random.normal(ones(2), "1"), "mean and std must be a real number"),
    (lambda: random.bernoulli(0.5), "takes a DeviceArray, not float"),
    (lambda: random.dropout(np.ones(3)), "dropout takes a DeviceArray, not ndarray"),
    (lambda: random.dropout(ones(3), None), "dropout: p must be a real number, not None"),
    (lambda: random.multinomial(np.ones(3), 1), "multinomial takes a DeviceArray"),
    (lambda: random.multinomial(ones(3), 1.5), "num_samples must be a whole number"),
    (lambda: random.rand_like(None), "takes a DeviceArray, not NoneType"),
    (lambda: ones(3).uniform_("0", 1), "low must be a real number, not '0'"),
    (lambda: ones(3).uniform_(1j, 2), "low must be a real number, not 1j"),
    (lambda: ones(3).normal_(0, ones(1)), "std must be a real number, not <DeviceArray"),
    (lambda: ones(3).exponential_("1"), "lambd must be a real number"),
    (lambda: ones(3).log_normal_(None), "mean must be a real number"),
    (lambda: ones(3).cauchy_(0, "1"), "sigma must be a real number"),
    (lambda: ones(3).geometric_("p"), "p must be a real number"),
    (lambda: ones(3).random_(1.5), "high must be a whole number"),
    (lambda: ones(3).bernoulli_("p"), "p must be a real number"),
    (lambda: random.uniform_(np.ones(3)), "uniform_ takes a DeviceArray, not ndarray"),
    (lambda: random.random_(None), "random_ takes a DeviceArray, not NoneType"),
    (lambda: random.bernoulli(ones(3), out=3), "bernoulli: out takes a DeviceArray, not int"),
    (lambda: random.native_dropout(3, 0.5), "native_dropout takes a DeviceArray, not int"),
    (lambda: random.fork_rng(0).__enter__(), "devices are a list of device numbers, not 0"),
    (lambda: random.set_rng_state_all(3), r"takes the states of get_rng_state_all\(\), not 3"),
    (lambda: ones(3).bernoulli_(ones(4)), r"shape \(4,\) is not broadcast to shape \(3,\)"),
]

OPTIMIZERS = [
    (lambda: optim.Adam(ones(3)), "a list of arrays, or of groups, not DeviceArray"),
    (lambda: optim.Adam(None), "a list of arrays, or of groups, not NoneType"),
    (lambda: optim.Adam([ones(3, dtype=np.int64)]), "parameters are float32, float64, float16, bfloat16, not int64"),
    (lambda: optim.Adam([ones(3).broadcast_to((2, 3))]), "read-only, so it cannot be a parameter"),
    (lambda: optim.Adam([{"lr": 1}]), 'dictionary with its parameters under "params"'),
    (lambda: optim.Adam([{"params": 3}]), '"params" must be arrays, not int'),
    (lambda: sgd().add_param_group(ones(3)), "a group is a dictionary"),
    (lambda: adam(lr="a"), "lr must be a real number, not 'a'"),
    (lambda: adam(lr=float("nan")), "lr must not be below 0: nan"),
    (lambda: adam(lr=ones(2)), "or one float32 on the device"),
    (lambda: adam(lr=ones(dtype=np.int64)), "or one float32 on the device"),
    (lambda: adam(weight_decay=None), "weight_decay must be a real number, not None"),
    (lambda: adam(betas=0.9), "betas must be two numbers from 0 on and below 1"),
    (lambda: adam(betas=(0.9,)), "betas must be two numbers"),
    (lambda: adam(betas=("a", 0.9)), "betas must be a real number, not 'a'"),
    (lambda: sgd(momentum="a"), "momentum must be a real number"),
    (lambda: sgd(momentum=0.9, dampening="a"), "dampening must be a real number"),
    (lambda: sgd().step(None), "gradients come as a list"),
    (lambda: sgd().step([np.ones(3)]), "gradients come as a list of arrays on the device"),
    (lambda: sgd().zero_grad([3]), "gradients come as a list"),
    (lambda: sgd().load_state_dict(None), "not the state of an optimizer"),
    (lambda: sgd().load_state_dict({"state": {}, "param_groups": [{}]}), "not the state of an optimizer"),
]

ARRAYS = [
    (lambda: cudatool.empty("3"), "a shape is a whole number or several, not '3'"),
    (lambda: cudatool.empty(1.5), "a shape is a whole number or several, not 1.5"),
    (lambda: cudatool.empty(2, "zz"), "'zz' is no dtype"),
    (lambda: cudatool.empty_pinned(2, "zz"), "'zz' is no dtype"),
    (lambda: ones(3).astype("zz"), "'zz' is no dtype"),
    (lambda: cudatool.asarray([1, [2, 3]]), "list does not become an array"),
    (lambda: cudatool.from_dlpack(3), "from_dlpack takes what has __dlpack__, not int"),
    (lambda: ones(3).copy_(None), "object is not copied into an array of float32"),
    (lambda: ones(3).copy_("a"), "not copied into an array of float32"),
    (lambda: ones(3).get(3), "out must be a NumPy array, not int"),
    (lambda: ones(3).record_stream(3), "int is not a stream"),
    (lambda: ones(3).record_stream(None), "takes a stream, not None"),
    (lambda: cudatool.empty_pinned("3"), "a shape is a whole number or several, not '3'"),
    (lambda: cudatool.empty_pinned(1.5), "a shape is a whole number or several, not 1.5"),
    (lambda: cudatool.empty_pinned(3, object), "cannot be in pinned memory"),
    (lambda: cudatool.is_pinned(3), "is_pinned takes a NumPy array, not int"),
    (lambda: cudatool.host_register(ones(3)), "host_register takes a NumPy array, not DeviceArray"),
    (lambda: cudatool.can_cast("zz", np.float32), "'zz' is no dtype"),
    (lambda: cudatool.promote_types(np.float32, 3), "3 is no dtype"),
    (lambda: cudatool.set_device(np.ones(2)), "is not a device"),
    (lambda: cudatool.current_stream(np.ones(2)), "is not a device"),
    (lambda: cudatool.check_error("x"), "res must be a whole number, not 'x'"),
    (lambda: cudatool.ipc_handle("x"), "source must be a whole number, not 'x'"),
    (lambda: cudatool.ipc_handle(0, -1), "size must not be negative: -1"),
    (lambda: cudatool.open_ipc_handle(b"x"), r"what ipc_handle\(\) returned, not bytes"),
]

LISTS = [
    (lambda: comm.gather(3), "gather takes a list of DeviceArrays, not int"),
    (lambda: comm.gather([ones(3)], dim=None), "dim must be a whole number, not None"),
    (lambda: comm.broadcast(ones(3), 0), "devices are a list of device numbers, not 0"),
    (lambda: comm.broadcast(ones(3), out=3), "out is a list of DeviceArrays, not int"),
    (lambda: comm.broadcast_coalesced(ones(3), [0]), "broadcast_coalesced takes a list of DeviceArrays"),
    (lambda: comm.reduce_add([ones(3), "x"]), "reduce_add takes a list of DeviceArrays; one of it is str"),
    (lambda: comm.reduce_add_coalesced(3), "reduce_add_coalesced takes a list of lists"),
    (lambda: comm.scatter(ones(4), [0], streams=[3]), "the one at index 0 is int"),
    (lambda: nccl.all_reduce(3), "inputs should be a collection of device arrays"),
    (lambda: nccl.init_all(0), "devices are a list of device numbers, not 0"),
    (lambda: nccl.init_rank(None, bytes(128), 0), "num_ranks must be a whole number, not None"),
    (lambda: nccl.init_rank(1, "x" * 128, 0), "a unique id is bytes"),
    (lambda: optim.foreach_zero_(3), "takes a list of DeviceArrays, not int"),
    (lambda: optim.get_total_norm([3]), "one of it is int"),
    (lambda: optim.get_total_norm([ones(3)], None), "norm_type must be a real number, not None"),
    (lambda: optim.clip_grads_with_norm_([ones(3)], 1.0, None), "takes a DeviceArray, not NoneType"),
    (lambda: optim.amp_update_scale_(ones(1), None, ones(1), 2.0, 0.5, 1), "takes a DeviceArray, not NoneType"),
]

STREAMS = [
    (lambda: cudatool.Stream(priority="a"), "priority must be a whole number"),
    (lambda: cudatool.Stream().wait_event(3), "wait_event takes an Event, not int"),
    (lambda: cudatool.Stream().record_event(3), "record_event takes an Event, not int"),
    (lambda: cudatool.Stream().wait_stream(3), "int is not a stream"),
    (lambda: cudatool.Stream().wait_stream(None), "takes a stream, not None"),
    (lambda: cudatool.Stream().__exit__(None, None, None), "did not enter the stream"),
    (lambda: cudatool.StreamContext(cudatool.Stream()).__exit__(None, None, None), "did not enter the stream"),
    (lambda: cudatool.set_stream(3), "set_stream takes a Stream, not int"),
    (lambda: cudatool.stream(3), "only a Stream can be made current, not int"),
    (lambda: cudatool.ExternalStream("x"), "stream_ptr must be a whole number"),
    (lambda: cudatool.ExternalStream(-1), "a handle of the driver's, not -1"),
    (lambda: cudatool.Stream.from_handle(1.5), "stream_ptr must be a whole number, not 1.5"),
    (lambda: cudatool.CUDAGraph().capture_begin(None, []), r"\[\] is not a capture_error_mode"),
    (lambda: cudatool.memory_snapshot(object()), "is not a pool"),
    (lambda: cudatool.Event().record(3), "in a Stream, not int"),
    (lambda: cudatool.Event().wait("x"), "in a Stream, not str"),
    (lambda: cudatool.Event(enable_timing=True).elapsed_time(None), "the Event at the end, not NoneType"),
    (lambda: cudatool.Event.from_ipc_handle(0, None), "is 64 bytes, not None"),
    (lambda: cudatool.graph(3), "goes into a CUDAGraph, not int"),
    (lambda: cudatool.graph(cudatool.CUDAGraph(), stream=3), "only a Stream can be made current, not int"),
    (lambda: cudatool.CUDAGraph().register_generator_state(3), "a Generator is registered, not int"),
    (lambda: cudatool.use_mem_pool(3).__enter__(), "use_mem_pool takes a MemPool, not int"),
    (lambda: cudatool.make_graphed_callables(3, (ones(3),)), "a function is graphed, not int"),
    (lambda: cudatool.make_graphed_callables(abs, (ones(3),), num_warmup_iters=-1), "must not be below 0: -1"),
]

KERNELS = [
    (lambda: blas.mm(ones(2, 2), ones(2, 2), out=3), "out must have shape"),
    (lambda: blas.addmm(3, ones(2, 2), ones(2, 2)), "addmm adds to a DeviceArray, not to int"),
    (lambda: jiterator.create_jit_fn(3), r"a string of C\+\+, not int"),
    (lambda: jiterator.create_multi_output_jit_fn("", "a"), "num_outputs must be a whole number"),
    (lambda: jiterator.create_jit_fn(PLUS, a=1)(ones(2), a="x"), "a must be a number that float32"),
    (lambda: cudatool.compile(EMPTY, "f")[0, 1], "must be >= 1"),
    (lambda: cudatool.compile(EMPTY, "f")["a", 1], "must be an int, or a tuple"),
    (lambda: cudatool.compile(EMPTY, "f")[1], r"pass \(grid, block\) or a LaunchConfig"),
    (lambda: cudatool.compile(3, "f"), r"a source is a string of CUDA C\+\+, not int"),
    (lambda: cudatool.compile(EMPTY, 3), "a kernel's name is a string, not int"),
    (lambda: cudatool.compile(EMPTY, "f", options=3), "options are a cudatool.ProgramOptions, not int"),
    (lambda: cudatool.launch(None, 3, cudatool.compile(EMPTY, "f")), "takes a cudatool.LaunchConfig, not int"),
    (lambda: cudatool.launch(None, cudatool.LaunchConfig(grid=1, block=1), EMPTY), "takes a kernel of .*, not str"),
    (lambda: cudatool.caching_allocator_alloc(16, 0, object()), "stream must be a whole number"),
    (lambda: cudatool.caching_allocator_delete(np.ones(2)), "mem_ptr must be a whole number"),
    (lambda: cudatool.set_per_process_memory_fraction(ones(1)), "fraction must be a real number"),
    (lambda: blas.conj(3), "conj takes a DeviceArray, not int"),
    (lambda: blas.linear(ones(2, 2), ones(2, 2), 3), "the bias takes a DeviceArray, not int"),
    (lambda: cudatool.range(3), "a range is named by a string, not int"),
    (lambda: cudatool.arm(3), "an ArmOptions or options by name, not int"),
    (lambda: nvtx.range(3).__enter__(), "named by a string, not int"),
    (lambda: ops.op(None), "named as programs call it"),
    (lambda: ops.div(ones(2), ones(2), rounding_mode=[]), r"rounding_mode must be one of .*, not \[\]"),
    (lambda: memory.Settings.parse(None), "settings are a string, not NoneType"),
    (lambda: cudatool.MemPool(3), "allocator is a CUDAPluggableAllocator, not int"),
    (lambda: cudatool.caching_allocator_alloc("a"), "size must be a whole number"),
    (lambda: cudatool.caching_allocator_delete("a"), "mem_ptr must be a whole number"),
    (lambda: nvtx.range_push(3), "named by a string, not int"),
    (lambda: nvtx.mark(None), "named by a string, not NoneType"),
]

OPERATIONS = [
    (lambda: ops.sum(ones(3), "a"), "sum: dim must be a whole number, not 'a'"),
    (lambda: ops.sum(ones(3), ones()), "sum: dim must be a whole number, not <DeviceArray"),
    (lambda: ops.any(ones(3), ones()), "any: dim must be a whole number, not <DeviceArray"),
    (lambda: ops.sum(ones(3), dtype="zz"), "'zz' is no dtype"),
    (lambda: ops.mean(3, dtype=np.float32), "mean takes a DeviceArray, not int"),
    (lambda: ops.mean(ones(3), dtype=np.int32), "mean is a float or complex, not int32"),
    (lambda: ops.argmax(ones(3), (0,)), r"dim must be a whole number, not \(0,\)"),
    (lambda: ops.max(ones(3), ()), r"dim must be a whole number, not \(\)"),
    (lambda: ops.var(ones(3), correction="a"), "correction must be a real number"),
    (lambda: ops.std(ones(3), correction=None), "correction must be a real number"),
    (lambda: ops.norm(ones(3), "fro"), "p must be a real number, not 'fro'"),
    (lambda: ops.softmax(ones(3), None), "softmax: dim must be a whole number, not None"),
    (lambda: ops.layer_norm(ones(2, 3), 3), "normalized_shape must be several whole numbers, not 3"),
    (lambda: ops.layer_norm(ones(2, 3), (3.0,)), "normalized_shape must be a whole number, not 3.0"),
    (lambda: ops.layer_norm(ones(2, 3), (3,), 1.0), "weight must be a DeviceArray, not float"),
    (lambda: ops.layer_norm(ones(2, 3), (3,), eps="a"), "eps must be a real number"),
    (lambda: ops.cross_entropy(ones(2, 3), ones(2, dtype=int), label_smoothing="a"), "label_smoothing must be a real"),
    (lambda: ops.cross_entropy(ones(2, 3), ones(2, dtype=int), ignore_index=1.5), "ignore_index must be a whole"),
    (lambda: ops.cross_entropy_backward(None, ones(2, 3), ones(2, dtype=int)), r"gradient must have shape \(\)"),
    (lambda: ops.tril("a"), "takes matrices"),
    (lambda: ops.add(ones(2, dtype=int), 2**70), "1180591620717411303424 is beyond 64 bits"),
    (lambda: ops.masked_fill(3, ones(2) > 0, 1), "masked_fill takes a DeviceArray, not int"),
    (lambda: ops.stack(3), "a list of arrays, at least one, not 3"),
]


@pytest.mark.parametrize(
    ("call", "message"), SCALER + AUTOCAST + RANDOM + OPTIMIZERS + ARRAYS + LISTS + STREAMS + KERNELS + OPERATIONS
)
def test_it_is_told_what_an_argument_must_be(call, message):
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ones(3).copy_(ones(4)), r"shape \(4,\) is not broadcast to shape \(3,\)"),
        (lambda: ones(3).copy_(np.ones(4)), r"shape \(4,\) is not broadcast to shape \(3,\)"),
        (lambda: ones(3).broadcast_to((4,)), r"shape \(3,\) is not broadcast to shape \(4,\)"),
        (lambda: ones(3).reshape(2, 2), r"size 3 into shape \(2,2\)"),
        (lambda: ones(3).reshape("a"), "integer"),
        (lambda: ones(2, 3).transpose(0, 0), r"axes \(0, 0\): repeated axis"),
    ],
)
def test_shapes_that_do_not_fit_are_value_errors_too(call, message):
    with pytest.raises(ShapeError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)


def test_a_missing_argument_is_told_with_the_name_of_the_operation():
    with pytest.raises(TypeError, match=r"cudatool\.ops\.logsumexp\(\) missing 1 required positional argument: 'dim'"):
        ops.logsumexp(ones(3))


def test_handles_are_taken_as_cuda_bindings_types_too():
    own = cudatool.Stream()
    handle = driver.CUstream(own.cuda_stream)
    assert own == cudatool.Stream.from_handle(handle) == cudatool.ExternalStream(handle)
    address = cudatool.caching_allocator_alloc(16, stream=handle)
    cudatool.caching_allocator_delete(driver.CUdeviceptr(address))


def test_an_event_is_recorded_on_one_device(second):
    event = cudatool.Event()
    event.record()
    with pytest.raises(
        CudaError, match=f"INVALID_HANDLE.* on device 0, the stream is on device {second}: record another Event"
    ):
        event.record(cudatool.Stream(device=second))


def test_memory_that_is_not_pinned_any_more_is_not_entered():
    registered = cudatool.host_register(np.ones(8))
    registered.close()
    with pytest.raises(UsageError, match="not pinned any more"):
        registered.__enter__()


def test_no_stream_made_current_changes_nothing():
    before = cudatool.current_stream()
    cudatool.set_stream(None)
    assert before == cudatool.current_stream()


def test_an_unknown_error_code_has_a_name():
    with pytest.raises(CudaError, match="99999"):
        cudatool.check_error(99999)
