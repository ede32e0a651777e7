"""Mangled kernel names, made readable."""

from __future__ import annotations

import pytest

from cudatool.ptx.kernel_names import kernel_name, kernel_parameters
from cudatool.text import short_arguments, short_names

DEEP = "Holder<" + ", ".join(f"Wrap<Wrap<Number<{number}>>>" for number in range(4)) + ">"


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
        ("_Z4fillB5cxx11v", "fill"),
        # As numba-cuda mangles a function of __main__, and one that is defined in another function.
        ("_ZN6cudapy8__main__3addB2v1B4cw51E5ArrayIfLi1E1C7mutable7alignedE", "__main__::add"),
        ("_ZN8__main__4main12_3clocals_3e3addB2v1E5ArrayIfLi1E1C7mutable7alignedE", "__main__::add"),
        ("_ZN8__main__12_3clambda_3eB2v1E5ArrayIfLi1E1C7mutable7alignedE", "__main__::<lambda>"),
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


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("plain", "plain"),
        ("saxpy<float>", "saxpy<float>"),
        (f"scale<{DEEP}>", "scale<Holder<Wrap<...>, Wrap<...>, Wrap<...>, Wrap<...>>>"),
        (
            f"kernel f<{DEEP}> after ns::g<{DEEP}>",
            "kernel f<Holder<Wrap<...>, Wrap<...>, Wrap<...>, Wrap<...>>> after "
            "ns::g<Holder<Wrap<...>, Wrap<...>, Wrap<...>, Wrap<...>>>",
        ),
        (f"f<{', '.join(['unsigned long'] * 9)}>", "f<...>"),
        (
            f"run<ns::main()::{{lambda(float)#1}}, decltype(x->y), {DEEP}>",
            "run<ns::main()::{lambda(float)#1}, decltype(x->y), Holder<...>>",
        ),
        ("a < b, 3 > 2, at <module>", "a < b, 3 > 2, at <module>"),
        ("cut<" + "Wrap<" * 40, "cut<" + "Wrap<" * 40),
    ],
)
def test_long_template_arguments_are_left_out_from_the_inside(name, short):
    assert short == short_arguments(name)


def test_names_that_would_look_the_same_stay_whole():
    one, two = f"f<{DEEP}>", f"f<{DEEP.replace('3', '4')}>"
    assert [one, two, short_arguments(f"g<{DEEP}>")] == short_names([one, two, f"g<{DEEP}>"])
