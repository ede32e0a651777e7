"""What LLVM is told of the host's processor."""

from __future__ import annotations

import pytest

from cudatool.sim.jit import native


@pytest.mark.parametrize(("name", "avoids"), [("znver4", True), ("sapphirerapids", False)])
def test_gathers_are_left_out_where_they_take_longer_than_loads(monkeypatch, name: str, avoids: bool) -> None:
    monkeypatch.setattr(native.llvm, "get_host_cpu_name", lambda: name)
    assert avoids == ("+prefer-no-gather" in native._features().split(","))
