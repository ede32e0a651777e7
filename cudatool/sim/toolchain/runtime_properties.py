"""What cudaGetDeviceProperties returns, from the driver API: most fields are an attribute of the device each.

Source: CUDA Runtime API, ``cudaDeviceProp``, and CUDA Driver API, ``CUdevice_attribute``, which describe them alike.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any, Final

__all__ = ["ATTRIBUTES", "device_properties"]

ATTRIBUTES: Final[dict[str, str | tuple[str, ...]]] = {
    "ECCEnabled": "ECC_ENABLED",
    "accessPolicyMaxWindowSize": "MAX_ACCESS_POLICY_WINDOW_SIZE",
    "asyncEngineCount": "ASYNC_ENGINE_COUNT",
    "canMapHostMemory": "CAN_MAP_HOST_MEMORY",
    "canUseHostPointerForRegisteredMem": "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "clusterLaunch": "CLUSTER_LAUNCH",
    "computePreemptionSupported": "COMPUTE_PREEMPTION_SUPPORTED",
    "concurrentKernels": "CONCURRENT_KERNELS",
    "concurrentManagedAccess": "CONCURRENT_MANAGED_ACCESS",
    "cooperativeLaunch": "COOPERATIVE_LAUNCH",
    "deferredMappingCudaArraySupported": "DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED",
    "deviceNumaConfig": "NUMA_CONFIG",
    "deviceNumaId": "NUMA_ID",
    "directManagedMemAccessFromHost": "DIRECT_MANAGED_MEM_ACCESS_FROM_HOST",
    "globalL1CacheSupported": "GLOBAL_L1_CACHE_SUPPORTED",
    "gpuDirectRDMAFlushWritesOptions": "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    "gpuDirectRDMASupported": "GPU_DIRECT_RDMA_SUPPORTED",
    "gpuDirectRDMAWritesOrdering": "GPU_DIRECT_RDMA_WRITES_ORDERING",
    "gpuPciDeviceID": "GPU_PCI_DEVICE_ID",
    "gpuPciSubsystemID": "GPU_PCI_SUBSYSTEM_ID",
    "hostNativeAtomicSupported": "HOST_NATIVE_ATOMIC_SUPPORTED",
    "hostNumaId": "HOST_NUMA_ID",
    "hostNumaMultinodeIpcSupported": "HOST_NUMA_MULTINODE_IPC_SUPPORTED",
    "hostRegisterReadOnlySupported": "READ_ONLY_HOST_REGISTER_SUPPORTED",
    "hostRegisterSupported": "HOST_REGISTER_SUPPORTED",
    "integrated": "INTEGRATED",
    "ipcEventSupported": "IPC_EVENT_SUPPORTED",
    "isMultiGpuBoard": "MULTI_GPU_BOARD",
    "l2CacheSize": "L2_CACHE_SIZE",
    "localL1CacheSupported": "LOCAL_L1_CACHE_SUPPORTED",
    "major": "COMPUTE_CAPABILITY_MAJOR",
    "managedMemory": "MANAGED_MEMORY",
    "maxBlocksPerMultiProcessor": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "maxGridSize": ("MAX_GRID_DIM_X", "MAX_GRID_DIM_Y", "MAX_GRID_DIM_Z"),
    "maxSurface1D": "MAXIMUM_SURFACE1D_WIDTH",
    "maxSurface1DLayered": ("MAXIMUM_SURFACE1D_LAYERED_WIDTH", "MAXIMUM_SURFACE1D_LAYERED_LAYERS"),
    "maxSurface2D": ("MAXIMUM_SURFACE2D_WIDTH", "MAXIMUM_SURFACE2D_HEIGHT"),
    "maxSurface2DLayered": (
        "MAXIMUM_SURFACE2D_LAYERED_WIDTH",
        "MAXIMUM_SURFACE2D_LAYERED_HEIGHT",
        "MAXIMUM_SURFACE2D_LAYERED_LAYERS",
    ),
    "maxSurface3D": ("MAXIMUM_SURFACE3D_WIDTH", "MAXIMUM_SURFACE3D_HEIGHT", "MAXIMUM_SURFACE3D_DEPTH"),
    "maxSurfaceCubemap": "MAXIMUM_SURFACECUBEMAP_WIDTH",
    "maxSurfaceCubemapLayered": ("MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH", "MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS"),
    "maxTexture1D": "MAXIMUM_TEXTURE1D_WIDTH",
    "maxTexture1DLayered": ("MAXIMUM_TEXTURE1D_LAYERED_WIDTH", "MAXIMUM_TEXTURE1D_LAYERED_LAYERS"),
    "maxTexture1DMipmap": "MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH",
    "maxTexture2D": ("MAXIMUM_TEXTURE2D_WIDTH", "MAXIMUM_TEXTURE2D_HEIGHT"),
    "maxTexture2DGather": ("MAXIMUM_TEXTURE2D_GATHER_WIDTH", "MAXIMUM_TEXTURE2D_GATHER_HEIGHT"),
    "maxTexture2DLayered": (
        "MAXIMUM_TEXTURE2D_LAYERED_WIDTH",
        "MAXIMUM_TEXTURE2D_LAYERED_HEIGHT",
        "MAXIMUM_TEXTURE2D_LAYERED_LAYERS",
    ),
    "maxTexture2DLinear": (
        "MAXIMUM_TEXTURE2D_LINEAR_WIDTH",
        "MAXIMUM_TEXTURE2D_LINEAR_HEIGHT",
        "MAXIMUM_TEXTURE2D_LINEAR_PITCH",
    ),
    "maxTexture2DMipmap": ("MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH", "MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT"),
    "maxTexture3D": ("MAXIMUM_TEXTURE3D_WIDTH", "MAXIMUM_TEXTURE3D_HEIGHT", "MAXIMUM_TEXTURE3D_DEPTH"),
    "maxTexture3DAlt": (
        "MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE",
        "MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE",
        "MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE",
    ),
    "maxTextureCubemap": "MAXIMUM_TEXTURECUBEMAP_WIDTH",
    "maxTextureCubemapLayered": ("MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH", "MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS"),
    "maxThreadsDim": ("MAX_BLOCK_DIM_X", "MAX_BLOCK_DIM_Y", "MAX_BLOCK_DIM_Z"),
    "maxThreadsPerBlock": "MAX_THREADS_PER_BLOCK",
    "maxThreadsPerMultiProcessor": "MAX_THREADS_PER_MULTIPROCESSOR",
    "memPitch": "MAX_PITCH",
    "memoryBusWidth": "GLOBAL_MEMORY_BUS_WIDTH",
    "memoryPoolSupportedHandleTypes": "MEMPOOL_SUPPORTED_HANDLE_TYPES",
    "memoryPoolsSupported": "MEMORY_POOLS_SUPPORTED",
    "minor": "COMPUTE_CAPABILITY_MINOR",
    "mpsEnabled": "MPS_ENABLED",
    "multiGpuBoardGroupID": "MULTI_GPU_BOARD_GROUP_ID",
    "multiProcessorCount": "MULTIPROCESSOR_COUNT",
    "pageableMemoryAccess": "PAGEABLE_MEMORY_ACCESS",
    "pageableMemoryAccessUsesHostPageTables": "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    "pciBusID": "PCI_BUS_ID",
    "pciDeviceID": "PCI_DEVICE_ID",
    "pciDomainID": "PCI_DOMAIN_ID",
    "persistingL2CacheMaxSize": "MAX_PERSISTING_L2_CACHE_SIZE",
    "regsPerBlock": "MAX_REGISTERS_PER_BLOCK",
    "regsPerMultiprocessor": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "reservedSharedMemPerBlock": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "sharedMemPerBlock": "MAX_SHARED_MEMORY_PER_BLOCK",
    "sharedMemPerBlockOptin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "sharedMemPerMultiprocessor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "sparseCudaArraySupported": "SPARSE_CUDA_ARRAY_SUPPORTED",
    "streamPrioritiesSupported": "STREAM_PRIORITIES_SUPPORTED",
    "surfaceAlignment": "SURFACE_ALIGNMENT",
    "tccDriver": "TCC_DRIVER",
    "textureAlignment": "TEXTURE_ALIGNMENT",
    "texturePitchAlignment": "TEXTURE_PITCH_ALIGNMENT",
    "timelineSemaphoreInteropSupported": "TIMELINE_SEMAPHORE_INTEROP_SUPPORTED",
    "totalConstMem": "TOTAL_CONSTANT_MEMORY",
    "unifiedAddressing": "UNIFIED_ADDRESSING",
    "unifiedFunctionPointers": "UNIFIED_FUNCTION_POINTERS",
    "warpSize": "WARP_SIZE",
}
"""The attribute that is a field's value, or those that are its elements."""

_NAME_BYTES: Final = 256


def device_properties(driver: Any, runtime: ModuleType, device: int) -> tuple[Any, ...]:
    """Return a status of the driver, and the ``cudaDeviceProp`` of a device, or None."""

    def attribute(name: str) -> int:
        number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.cuDeviceGetAttribute(number, device)[1])

    status, memory = driver.cuDeviceTotalMem(device)
    if int(status):
        return status, None
    found = runtime.cudaDeviceProp()
    found.totalGlobalMem = memory
    name, _, _ = driver.cuDeviceGetName(_NAME_BYTES, device)[1].partition(b"\0")  # the bindings add spaces
    found.name = name.ljust(_NAME_BYTES, b"\0")
    ctypes.memmove(found.uuid.getPtr(), driver.cuDeviceGetUuid(device)[1].bytes, 16)  # the bindings cannot set it
    for field, names in ATTRIBUTES.items():
        setattr(found, field, attribute(names) if isinstance(names, str) else [attribute(name) for name in names])
    return status, found  # the luid is undefined outside of Windows
