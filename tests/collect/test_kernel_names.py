"""Mangled kernel names, made readable."""

from __future__ import annotations

import pytest

from cudatool.collect.kernel_names import kernel_name


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
