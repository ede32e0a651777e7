"""cuda.core's virtual memory resource on the software device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

MIB = 1 << 20


@pytest.fixture
def resource(machine: Any) -> Any:
    from cuda.core import Device, VirtualMemoryResource, VirtualMemoryResourceOptions

    device = Device(0)
    device.set_current()
    return VirtualMemoryResource(device, config=VirtualMemoryResourceOptions(handle_type=None))


def test_buffer_of_virtual_memory_holds_bytes(resource: Any) -> None:
    from cuda.bindings import driver

    with resource.allocate(5 * MIB) as buffer:
        assert (6 * MIB, True) == (buffer.size, buffer.is_device_accessible)
        address = int(buffer.handle)
        driver.cuMemsetD8(address, 3, 6 * MIB)
        back = np.zeros(6 * MIB, np.uint8)
        driver.cuMemcpyDtoH(back.ctypes.data, address, back.size)
        assert 3 == back.min() == back.max()


def test_buffer_can_grow_and_keeps_its_bytes(resource: Any) -> None:
    from cuda.bindings import driver

    buffer = resource.allocate(4 * MIB)
    driver.cuMemsetD8(int(buffer.handle), 5, 4 * MIB)
    driver.cuCtxSynchronize()
    grown = resource.modify_allocation(buffer, 8 * MIB)
    assert 8 * MIB == grown.size
    back = np.zeros(4 * MIB, np.uint8)
    driver.cuMemcpyDtoH(back.ctypes.data, int(grown.handle), back.size)
    assert 5 == back.min() == back.max()
    grown.close()
