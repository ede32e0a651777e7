"""Products by the fastest of several implementations, found by trying them, as ``torch.cuda.tunable`` does it.

::

    cudatool.tunable.enable()       # from now on products are tuned when their shape is first seen,
    train()                         # and the results are written when the process ends

The candidates are what computes products otherwise, the algorithms that cuBLASLt proposes, a kernel of our own, and
kernels of Triton's where that is installed (it compiles them for seconds, and keeps them in its cache). A candidate
whose result differs from the default's is no candidate. Results hold for one driver, library and device; a
file of others is rejected. What is neither tuned nor to be tuned, and what is captured into a graph for the first
time, is computed as if this were off.

The environment has the same switches, which then count more than the functions: ``CUDATOOL_TUNABLEOP_ENABLED``,
``_TUNING``, ``_RECORD_UNTUNED``, ``_FILENAME``, ``_UNTUNED_FILENAME``, ``_MAX_TUNING_DURATION_MS``,
``_MAX_TUNING_ITERATIONS``, ``_MAX_WARMUP_DURATION_MS``, ``_MAX_WARMUP_ITERATIONS``, ``_ROTATING_BUFFER_SIZE``; or
with ``PYTORCH_`` in front.
"""

from cudatool.tunable._context import (
    enable,
    get_filename,
    get_max_tuning_duration,
    get_max_tuning_iterations,
    get_results,
    get_rotating_buffer_size,
    get_validators,
    is_enabled,
    read_file,
    record_untuned_enable,
    record_untuned_is_enabled,
    set_filename,
    set_max_tuning_duration,
    set_max_tuning_iterations,
    set_numerical_check_tolerances,
    set_rotating_buffer_size,
    tune_gemm_in_file,
    tuning_enable,
    tuning_is_enabled,
    write_file,
    write_file_on_exit,
)

__all__ = [
    "enable",
    "get_filename",
    "get_max_tuning_duration",
    "get_max_tuning_iterations",
    "get_results",
    "get_rotating_buffer_size",
    "get_validators",
    "is_enabled",
    "read_file",
    "record_untuned_enable",
    "record_untuned_is_enabled",
    "set_filename",
    "set_max_tuning_duration",
    "set_max_tuning_iterations",
    "set_numerical_check_tolerances",
    "set_rotating_buffer_size",
    "tune_gemm_in_file",
    "tuning_enable",
    "tuning_is_enabled",
    "write_file",
    "write_file_on_exit",
]
