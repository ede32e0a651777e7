"""The settings string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.errors import ConfigError
from cudatool.memory import Settings
from cudatool.memory.snapshot import allocator_settings

MIB = 1024 * 1024


def test_empty_string_is_the_defaults() -> None:
    assert Settings() == Settings.parse("") == Settings.parse(" ")


@pytest.mark.parametrize(
    ("text", "attribute", "value"),
    [
        ("max_split_size_mb:64", "max_split_size", 64 * MIB),
        ("max_non_split_rounding_mb: 32", "max_non_split_rounding_size", 32 * MIB),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold", 0.8),
        ("per_process_memory_fraction:1", "per_process_memory_fraction", 1.0),
        ("expandable_segments:True", "expandable_segments", True),
        ("backend:cudaMallocAsync", "backend", "cudaMallocAsync"),
        ("pinned_num_register_threads:8", "pinned_num_register_threads", 8),
        ("pinned_reserve_segment_size_mb:16", "pinned_reserve_segment_size_mb", 16),
        ("roundup_power2_divisions:4", "roundup_power2_divisions", (4,) * 16),
        ("roundup_power2_divisions:[4:2]", "roundup_power2_divisions", (2, 2, 2) + (0,) * 13),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", "roundup_power2_divisions", (1,) * 9 + (2,) + (8,) * 6),
        ("roundup_power2_divisions:[65536:4]", "roundup_power2_divisions", (4,) * 16),
        ("roundup_power2_divisions:[>:8]", "roundup_power2_divisions", (0,) + (8,) * 15),
        ("roundup_power2_divisions:[256:0,]", "roundup_power2_divisions", (0,) * 16),
        ("roundup_power2_divisions:[]", "roundup_power2_divisions", (0,) * 16),
        ("max_split_size_mb:64MB", "max_split_size", 64 * MIB),
        ("max_split_size_mb:+64", "max_split_size", 64 * MIB),
        ("max_split_size_mb:-1", "max_split_size", (2**44 - 1) * MIB),
        ("max_split_size_mb:64,", "max_split_size", 64 * MIB),
        ("max_split_size_mb\t:\n64", "max_split_size", 64 * MIB),
        ("max_split_size_mb:64,max_split_size_mb:32", "max_split_size", 32 * MIB),
        ("garbage_collection_threshold:8e-1", "garbage_collection_threshold", 0.8),
        ("garbage_collection_threshold:.5x", "garbage_collection_threshold", 0.5),
        ("per_process_memory_fraction:0", "per_process_memory_fraction", 0.0),
        ("pinned_free_catch_all:True", "pinned_free_catch_all", True),
        ("pinned_use_hip_host_register:True", "pinned_use_cuda_host_register", True),
        ("release_lock_on_hipmalloc:True", "release_lock_on_cudamalloc", True),
        ("graph_capture_record_stream_reuse:True", "graph_capture_record_stream_reuse", True),
        ("throw_on_cudamalloc_oom:False", "text", "throw_on_cudamalloc_oom:False"),
    ],
)
def test_value_is_parsed(text: str, attribute: str, value: object) -> None:
    assert value == getattr(Settings.parse(text), attribute)


def test_several_settings_are_separated_by_commas_outside_brackets() -> None:
    parsed = Settings.parse("roundup_power2_divisions:[256:1,>:2],max_split_size_mb:20,backend:native")
    assert (1, 2, 20 * MIB) == (*parsed.roundup_power2_divisions[8:10], parsed.max_split_size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:64", "unknown allocator setting 'max_split_size'; did you mean max_split_size_mb?"),
        ("jemalloc:1", "unknown allocator setting 'jemalloc'; known are backend, expandable_segments, "),
        (",max_split_size_mb:64", "'' is not of the form key:value"),
        ("max_split_size_mb:64,,", "'' is not of the form key:value"),
        ("max_split_size_mb=64", "is not of the form key:value"),
        ("max_split_size_mb:18446744073709551616", "the number is too large"),
        ("max_non_split_rounding_mb:0", "must be at least 20"),
        ("garbage_collection_threshold:0", "must lie between 0 and 1, both excluded"),
        ("garbage_collection_threshold:nan", "expected a number"),
        ("per_process_memory_fraction:-0.1", "must lie between 0 and 1"),
        ("roundup_power2_divisions:0", "must be a power of two"),
        ("roundup_power2_divisions:[0:4]", "sizes must be powers of two"),
        ("roundup_power2_divisions:[256:1", "the closing bracket is missing"),
        ("pinned_num_register_threads:0", "must be a power of two of at most 128"),
        ("pinned_num_register_threads:3", "must be a power of two of at most 128"),
        ("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom is not supported by cudatool"),
        ("expandable_segments_reserve:0.5", "expandable_segments_reserve is not supported by cudatool"),
        ("expandable_segments_reserve_by_class:[kv:0.5,w:40G]", "reserve_by_class is not supported by cudatool"),
        ("max_split_size_mb", "is not of the form key:value"),
        ("max_split_size_mb:", "is not of the form key:value"),
        ("max_split_size_mb:19", "max_split_size_mb:19: must be at least 20"),
        ("max_split_size_mb:many", "expected a whole number"),
        ("garbage_collection_threshold:1.0", "must lie between 0 and 1, both excluded"),
        ("garbage_collection_threshold:often", "expected a number"),
        ("per_process_memory_fraction:1.1", "must lie between 0 and 1"),
        ("expandable_segments:true", "expected True or False, spelled so"),
        ("backend:jemalloc", "known are native and cudaMallocAsync"),
        ("roundup_power2_divisions:3", "must be a power of two"),
        ("roundup_power2_divisions:[256:3]", "divisions must be powers of two, or 0"),
        ("roundup_power2_divisions:[100:4]", "sizes must be powers of two"),
        ("roundup_power2_divisions:[256]", "expected a whole number"),
        ("pinned_num_register_threads:256", "must be a power of two of at most 128"),
        ("pinned_reserve_segment_size_mb:0", "must be greater than 0"),
    ],
)
def test_value_that_cannot_be_used_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.parse(text)
    assert message in str(caught.value)


@settings(deadline=None)
@given(
    st.one_of(st.text(), st.text(alphabet="roundup_power2_divisions:[]>,0123456789e.-+"), st.text(alphabet=",:[]>1"))
)
def test_any_text_gives_settings_or_an_error_that_says_why(text: str) -> None:
    for conf in (text, f"roundup_power2_divisions:{text}", f"garbage_collection_threshold:{text}"):
        try:
            assert conf == Settings.parse(conf).text
        except ConfigError as error:
            assert str(error)


@pytest.mark.parametrize("text", ["," * 1_000_000, "a:[" + "1:2," * 300_000, "max_split_size_mb:" + "9" * 1_000_000])
def test_hostile_text_is_refused_in_few_words(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.parse(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("environ", "megabytes"),
    [
        ({"CUDATOOL_ALLOC_CONF": "max_split_size_mb:21", "PYTORCH_ALLOC_CONF": "max_split_size_mb:22"}, 21),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:22", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:23"}, 22),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:23"}, 23),
    ],
)
def test_first_environment_variable_that_is_set_counts(environ: dict[str, str], megabytes: int) -> None:
    assert megabytes * MIB == Settings.from_environment(environ).max_split_size


def test_without_variables_the_defaults_hold() -> None:
    assert Settings() == Settings.from_environment({})


def test_error_names_the_environment_variable() -> None:
    with pytest.raises(ConfigError, match=r"^PYTORCH_ALLOC_CONF: unknown allocator setting 'x'"):
        Settings.from_environment({"PYTORCH_ALLOC_CONF": "x:1"})


def test_snapshot_form_is_pytorchs() -> None:
    form = allocator_settings(Settings.parse("roundup_power2_divisions:[4:2]"))
    assert "roundup_power2_divisions:[4:2]" == form["PYTORCH_CUDA_ALLOC_CONF"]
    assert -1 == form["max_split_size"]
    assert [("1", 2), ("2", 2), ("4", 2), ("8", 0)] == list(form["roundup_power2_divisions"].items())[:4]
