"""Racecheck against the axioms of PTX's memory model; ``causality_oracle.py`` runs as many kernels as it is told to."""

from __future__ import annotations

from causality_oracle import Causality, Kernel, Runner, campaign, difference


def test_random_kernels_are_judged_by_the_axioms_of_the_memory_model():
    assert [] == campaign(70)


def test_the_kernels_have_races_of_all_kinds_and_lack_them():
    """A comparison that only ever met one verdict would prove little."""
    runner, races, ordered, by_fences = Runner(), 0, 0, 0
    for seed in (*range(1000, 1040), 223, 233):  # in the last two, the fence of a thread counts for another one
        kernel = Kernel(seed)
        values, said = runner.run(kernel)
        assert "" == difference(kernel, values, said)
        orders = [Causality(kernel.events, values, shared_fences=shared) for shared in (False, True)]
        races += bool(orders[1].races())
        by_fences += orders[0].races() != orders[1].races()
        pairs = [(a, b) for a in kernel.events for b in kernel.events if a.word is not None and a.word == b.word]
        ordered += any(a.block != b.block and orders[1].precedes(a, b) for a, b in pairs)
    assert races >= 20
    assert ordered >= 5
    assert by_fences == 2
