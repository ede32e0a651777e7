"""Mangled kernel names, made readable."""

from __future__ import annotations

import pytest

from cudatool.collect.kernel_names import kernel_name, kernel_parameters


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("plain", "plain"),
        ("_Z3addPKfS0_Pfi", "add"),
        ("_Z5saxpyIdEvT_PKS0_S2_PS0_m", "saxpy<double>"),
        ("_ZN2ns6nested4workILi3EEEvPi", "ns::nested::work<3>"),
        ("_ZN12_GLOBAL__N_16hiddenEv", "(anonymous namespace)::hidden"),
        ("_Z5applyIPFffEEvT_Pf", "apply<float (*)(float)>"),
        ("_Znot a symbol", "_Znot a symbol"),
    ],
)
def test_kernel_name(symbol, name):
    assert name == kernel_name(symbol)


@pytest.mark.parametrize(
    ("symbol", "types"),
    [
        ("plain", []),
        ("_Z4nonev", []),
        ("_Z3addPKfS0_Pfi", ["float const*", "float const*", "float*", "int"]),
        ("_Z4fillIfEvPT_S0_", ["float*", "float"]),
        ("_Z1fPFiiEPKPKfRA4_d", ["int (*)(int)", "float const* const*", "double (&) [4]"]),
        ("_Z4pairI4viewIiLi3EEEvT_", ["view<int, 3>"]),
        ("_ZN12_GLOBAL__N_16hiddenEPi", ["int*"]),
    ],
)
def test_kernel_parameters(symbol, types):
    assert types == kernel_parameters(symbol)
