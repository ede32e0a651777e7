"""What a recording says of the launches that a program asks the driver for, whichever call it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cudatool import _driver, recording
from cudatool.trace.events import Kind, LaunchFlag, unpack_dims
from cudatool.trace.reader import read

_PTX = b""".version 8.3
.target sm_90
.address_size 64
.visible .entry nothing() { ret; }
.visible .entry early() { griddepcontrol.launch_dependents; ret; }
\0"""
GRID, BLOCK, SHARED = (2, 3, 4), (8, 4, 2), 48


def ok(result: tuple[Any, ...]) -> Any:
    assert 0 == result[0], result
    return result[1] if len(result) == 2 else None


def launch(driver: Any, call: str, function: Any, stream: Any) -> None:
    if call == "cuLaunchKernelEx":
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = GRID
        config.blockDimX, config.blockDimY, config.blockDimZ = BLOCK
        config.sharedMemBytes, config.hStream = SHARED, stream
        ok(driver.cuLaunchKernelEx(config, function, 0, 0))
    elif call == "cuLaunchKernel":
        ok(driver.cuLaunchKernel(function, *GRID, *BLOCK, SHARED, stream, 0, 0))
    else:
        ok(driver.cuLaunchCooperativeKernel(function, *GRID, *BLOCK, SHARED, stream, 0))


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"])
def test_a_launch_has_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, blocking: bool) -> None:
    path = tmp_path / "t.ctrace"
    with recording.record(path, device="sim"):
        from cuda.bindings import driver

        machine = _driver.initialize().machine
        assert machine is not None
        monkeypatch.setattr(machine.options, "launch_blocking", blocking)
        ok(driver.cuInit(0))
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        stream, module = ok(driver.cuStreamCreate(1)), ok(driver.cuModuleLoadData(_PTX))
        for _ in range(2):  # the second is like one before
            for name in (b"nothing", b"early"):
                launch(driver, call, ok(driver.cuModuleGetFunction(module, name)), stream)
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuStreamDestroy(stream))
        ok(driver.cuModuleUnload(module))
        ok(driver.cuCtxSetCurrent(0))
        ok(driver.cuDevicePrimaryCtxRelease(0))
    trace = read(path)
    launches = trace.of_kind(Kind.KERNEL_LAUNCH)
    assert [GRID] * 4 == [unpack_dims(int(word)) for word in launches["aux0"]]
    assert [BLOCK] * 4 == [unpack_dims(int(word)) for word in launches["aux1"]]
    assert [SHARED] * 4 == launches["size"].tolist()
    assert ["nothing", "early"] * 2 == [trace.names[int(name)] for name in launches["name"]]
    assert [0, LaunchFlag.TRIGGERS] * 2 == launches["flags"].tolist()
    assert launches["correlation"].tolist() == trace.of_kind(Kind.EXECUTION)["correlation"].tolist()
