/* The entry points as symbols of libcuda.so.1, for programs that link with it or look them up with dlsym.
 *
 * A symbol keeps what its name meant when it was new: what takes other arguments today is there under the name of the
 * version that this driver has (cuda.h says which: "cuMemAdvise" is "cuMemAdvise_v2"). Each finds its function as
 * cuGetProcAddress does, when it is first called.
 */
#include <stddef.h>

typedef int (*entry_t)(long, long, long, long, long, long, long, long, long, long, long, long);

entry_t cudatool_exported(const char *symbol);
int cudatool_refusal(void);

#define EXPORTS(E)                                                                                                     \
    E(cuArray3DCreate) E(cuArray3DCreate_v2) E(cuArray3DGetDescriptor) E(cuArray3DGetDescriptor_v2) E(cuArrayCreate) \
    E(cuArrayCreate_v2) E(cuArrayDestroy) E(cuArrayGetDescriptor) E(cuArrayGetDescriptor_v2) E(cuCtxCreate) \
    E(cuCtxCreate_v2) E(cuCtxCreate_v4) E(cuCtxDestroy) E(cuCtxDestroy_v2) E(cuCtxDisablePeerAccess) \
    E(cuCtxEnablePeerAccess) E(cuCtxFromGreenCtx) E(cuCtxGetApiVersion) E(cuCtxGetCacheConfig) E(cuCtxGetCurrent) \
    E(cuCtxGetDevResource) E(cuCtxGetDevice) E(cuCtxGetDevice_v2) E(cuCtxGetFlags) E(cuCtxGetId) E(cuCtxGetLimit) \
    E(cuCtxGetStreamPriorityRange) E(cuCtxPopCurrent) E(cuCtxPopCurrent_v2) E(cuCtxPushCurrent) E(cuCtxPushCurrent_v2) \
    E(cuCtxRecordEvent) E(cuCtxResetPersistingL2Cache) E(cuCtxSetCacheConfig) E(cuCtxSetCurrent) E(cuCtxSetFlags) \
    E(cuCtxSetLimit) E(cuCtxSynchronize) E(cuCtxSynchronize_v2) E(cuCtxWaitEvent) E(cuDevResourceGenerateDesc) \
    E(cuDevSmResourceSplit) E(cuDevSmResourceSplitByCount) E(cuDeviceCanAccessPeer) E(cuDeviceComputeCapability) \
    E(cuDeviceGet) E(cuDeviceGetAttribute) E(cuDeviceGetByPCIBusId) E(cuDeviceGetCount) E(cuDeviceGetDefaultMemPool) \
    E(cuDeviceGetDevResource) E(cuDeviceGetExecAffinitySupport) E(cuDeviceGetGraphMemAttribute) E(cuDeviceGetMemPool) \
    E(cuDeviceGetName) E(cuDeviceGetP2PAttribute) E(cuDeviceGetPCIBusId) E(cuDeviceGetUuid) E(cuDeviceGetUuid_v2) \
    E(cuDeviceGraphMemTrim) E(cuDevicePrimaryCtxGetState) E(cuDevicePrimaryCtxRelease) E(cuDevicePrimaryCtxRelease_v2) \
    E(cuDevicePrimaryCtxReset) E(cuDevicePrimaryCtxReset_v2) E(cuDevicePrimaryCtxRetain) E(cuDevicePrimaryCtxSetFlags) \
    E(cuDevicePrimaryCtxSetFlags_v2) E(cuDeviceSetGraphMemAttribute) E(cuDeviceSetMemPool) E(cuDeviceTotalMem) \
    E(cuDeviceTotalMem_v2) E(cuDriverGetVersion) E(cuEventCreate) E(cuEventDestroy) E(cuEventDestroy_v2) \
    E(cuEventElapsedTime) E(cuEventElapsedTime_v2) E(cuEventQuery) E(cuEventRecord) E(cuEventRecordWithFlags) \
    E(cuEventSynchronize) E(cuFuncGetAttribute) E(cuFuncGetModule) E(cuFuncGetName) E(cuFuncGetParamCount) \
    E(cuFuncGetParamInfo) E(cuFuncIsLoaded) E(cuFuncLoad) E(cuFuncSetAttribute) E(cuFuncSetCacheConfig) \
    E(cuGetErrorName) E(cuGetErrorString) E(cuGraphAddBatchMemOpNode) E(cuGraphAddChildGraphNode) \
    E(cuGraphBatchMemOpNodeGetParams) E(cuGraphBatchMemOpNodeSetParams) E(cuGraphExecBatchMemOpNodeSetParams) \
    E(cuGraphAddDependencies_v2) \
    E(cuGraphAddEmptyNode) E(cuGraphAddEventRecordNode) E(cuGraphAddEventWaitNode) E(cuGraphAddHostNode) \
    E(cuGraphAddKernelNode_v2) E(cuGraphAddMemAllocNode) E(cuGraphAddMemFreeNode) E(cuGraphAddMemcpyNode) \
    E(cuGraphAddMemsetNode) E(cuGraphAddNode_v2) E(cuGraphChildGraphNodeGetGraph) E(cuGraphClone) \
    E(cuGraphConditionalHandleCreate) E(cuGraphCreate) E(cuGraphDebugDotPrint) E(cuGraphDestroy) E(cuGraphDestroyNode) \
    E(cuGraphEventRecordNodeGetEvent) E(cuGraphEventRecordNodeSetEvent) E(cuGraphEventWaitNodeGetEvent) \
    E(cuGraphEventWaitNodeSetEvent) E(cuGraphExecChildGraphNodeSetParams) E(cuGraphExecDestroy) \
    E(cuGraphExecEventRecordNodeSetEvent) E(cuGraphExecEventWaitNodeSetEvent) E(cuGraphExecGetFlags) E(cuGraphExecGetId) \
    E(cuGraphExecHostNodeSetParams) E(cuGraphExecKernelNodeSetParams_v2) E(cuGraphExecMemcpyNodeSetParams) \
    E(cuGraphExecMemsetNodeSetParams) E(cuGraphExecNodeSetParams) E(cuGraphExecUpdate_v2) E(cuGraphGetEdges_v2) \
    E(cuGraphGetId) E(cuGraphGetNodes) E(cuGraphGetRootNodes) E(cuGraphHostNodeGetParams) E(cuGraphHostNodeSetParams) \
    E(cuGraphInstantiateWithFlags) E(cuGraphInstantiateWithParams) E(cuGraphKernelNodeCopyAttributes) \
    E(cuGraphKernelNodeGetAttribute) E(cuGraphKernelNodeGetParams_v2) E(cuGraphKernelNodeSetAttribute) \
    E(cuGraphKernelNodeSetParams_v2) E(cuGraphLaunch) E(cuGraphMemAllocNodeGetParams) E(cuGraphMemFreeNodeGetParams) \
    E(cuGraphMemcpyNodeGetParams) E(cuGraphMemcpyNodeSetParams) E(cuGraphMemsetNodeGetParams) \
    E(cuGraphMemsetNodeSetParams) E(cuGraphNodeFindInClone) E(cuGraphNodeGetContainingGraph) \
    E(cuGraphNodeGetDependencies_v2) E(cuGraphNodeGetDependentNodes_v2) E(cuGraphNodeGetEnabled) \
    E(cuGraphNodeGetLocalId) E(cuGraphNodeGetParams) E(cuGraphNodeGetToolsId) E(cuGraphNodeGetType) \
    E(cuGraphNodeSetEnabled) E(cuGraphNodeSetParams) E(cuGraphReleaseUserObject) E(cuGraphRemoveDependencies_v2) \
    E(cuGraphRetainUserObject) E(cuGraphUpload) E(cuGreenCtxCreate) E(cuGreenCtxDestroy) E(cuGreenCtxGetDevResource) \
    E(cuGreenCtxGetId) E(cuGreenCtxRecordEvent) E(cuGreenCtxStreamCreate) E(cuGreenCtxWaitEvent) E(cuInit) \
    E(cuIpcCloseMemHandle) E(cuIpcGetEventHandle) E(cuIpcGetMemHandle) E(cuIpcOpenEventHandle) E(cuIpcOpenMemHandle) \
    E(cuIpcOpenMemHandle_v2) E(cuKernelGetAttribute) E(cuKernelGetFunction) E(cuKernelGetLibrary) E(cuKernelGetName) \
    E(cuKernelGetParamCount) E(cuKernelGetParamInfo) E(cuKernelSetAttribute) E(cuKernelSetCacheConfig) \
    E(cuLaunchCooperativeKernel) E(cuLaunchHostFunc) E(cuLaunchKernel) E(cuLaunchKernelEx) E(cuLibraryEnumerateKernels) \
    E(cuLibraryGetGlobal) E(cuLibraryGetKernel) E(cuLibraryGetKernelCount) E(cuLibraryGetManaged) E(cuLibraryGetModule) \
    E(cuLibraryLoadData) E(cuLibraryLoadFromFile) E(cuLibraryUnload) E(cuLinkAddData) E(cuLinkAddData_v2) \
    E(cuLinkAddFile) E(cuLinkAddFile_v2) E(cuLinkComplete) E(cuLinkCreate) E(cuLinkCreate_v2) E(cuLinkDestroy) \
    E(cuLogsCurrent) E(cuLogsDumpToFile) E(cuLogsDumpToMemory) E(cuLogsRegisterCallback) E(cuLogsUnregisterCallback) \
    E(cuMemAddressFree) E(cuMemAddressReserve) E(cuMemAdvise_v2) E(cuMemAlloc) E(cuMemAllocAsync) \
    E(cuMemAllocFromPoolAsync) E(cuMemAllocHost) E(cuMemAllocHost_v2) E(cuMemAllocManaged) E(cuMemAllocPitch) \
    E(cuMemAllocPitch_v2) E(cuMemAlloc_v2) E(cuMemCreate) E(cuMemDiscardAndPrefetchBatchAsync) E(cuMemDiscardBatchAsync) \
    E(cuMemExportToShareableHandle) E(cuMemFree) E(cuMemFreeAsync) E(cuMemFreeHost) E(cuMemFree_v2) E(cuMemGetAccess) \
    E(cuMemGetAddressRange) E(cuMemGetAddressRange_v2) E(cuMemGetAllocationGranularity) \
    E(cuMemGetAllocationPropertiesFromHandle) E(cuMemGetDefaultMemPool) E(cuMemGetInfo) E(cuMemGetInfo_v2) \
    E(cuMemGetMemPool) E(cuMemHostAlloc) E(cuMemHostGetDevicePointer) E(cuMemHostGetDevicePointer_v2) \
    E(cuMemHostGetFlags) E(cuMemHostRegister) E(cuMemHostRegister_v2) E(cuMemHostUnregister) \
    E(cuMemImportFromShareableHandle) E(cuMemMap) E(cuMemPoolCreate) E(cuMemPoolDestroy) E(cuMemPoolExportPointer) \
    E(cuMemPoolExportToShareableHandle) E(cuMemPoolGetAccess) E(cuMemPoolGetAttribute) \
    E(cuMemPoolImportFromShareableHandle) E(cuMemPoolImportPointer) E(cuMemPoolSetAccess) E(cuMemPoolSetAttribute) \
    E(cuMemPoolTrimTo) E(cuMemPrefetchAsync_v2) E(cuMemPrefetchBatchAsync) E(cuMemRangeGetAttribute) \
    E(cuMemRangeGetAttributes) E(cuMemRelease) E(cuMemRetainAllocationHandle) E(cuMemSetAccess) E(cuMemSetMemPool) \
    E(cuMemUnmap) E(cuMemcpy) E(cuMemcpy2D) E(cuMemcpy2DAsync) E(cuMemcpy2DAsync_v2) E(cuMemcpy2DUnaligned) \
    E(cuMemcpy2DUnaligned_v2) E(cuMemcpy2D_v2) E(cuMemcpy3D) E(cuMemcpy3DAsync) E(cuMemcpy3DAsync_v2) \
    E(cuMemcpy3DBatchAsync_v2) E(cuMemcpy3DPeer) E(cuMemcpy3DPeerAsync) E(cuMemcpy3DWithAttributesAsync) \
    E(cuMemcpy3D_v2) E(cuMemcpyAsync) E(cuMemcpyAtoA) E(cuMemcpyAtoA_v2) E(cuMemcpyAtoD) E(cuMemcpyAtoD_v2) \
    E(cuMemcpyAtoH) E(cuMemcpyAtoHAsync) E(cuMemcpyAtoHAsync_v2) E(cuMemcpyAtoH_v2) E(cuMemcpyBatchAsync_v2) \
    E(cuMemcpyDtoA) E(cuMemcpyDtoA_v2) E(cuMemcpyDtoD) E(cuMemcpyDtoDAsync) E(cuMemcpyDtoDAsync_v2) E(cuMemcpyDtoD_v2) \
    E(cuMemcpyDtoH) E(cuMemcpyDtoHAsync) E(cuMemcpyDtoHAsync_v2) E(cuMemcpyDtoH_v2) E(cuMemcpyHtoA) E(cuMemcpyHtoAAsync) \
    E(cuMemcpyHtoAAsync_v2) E(cuMemcpyHtoA_v2) E(cuMemcpyHtoD) E(cuMemcpyHtoDAsync) E(cuMemcpyHtoDAsync_v2) \
    E(cuMemcpyHtoD_v2) E(cuMemcpyPeer) E(cuMemcpyPeerAsync) E(cuMemcpyWithAttributesAsync) E(cuMemsetD16) \
    E(cuMemsetD16Async) E(cuMemsetD16_v2) E(cuMemsetD2D16) E(cuMemsetD2D16Async) E(cuMemsetD2D16_v2) E(cuMemsetD2D32) \
    E(cuMemsetD2D32Async) E(cuMemsetD2D32_v2) E(cuMemsetD2D8) E(cuMemsetD2D8Async) E(cuMemsetD2D8_v2) E(cuMemsetD32) \
    E(cuMemsetD32Async) E(cuMemsetD32_v2) E(cuMemsetD8) E(cuMemsetD8Async) E(cuMemsetD8_v2) E(cuMipmappedArrayCreate) \
    E(cuMipmappedArrayDestroy) E(cuMipmappedArrayGetLevel) E(cuModuleEnumerateFunctions) E(cuModuleGetFunction) \
    E(cuModuleGetFunctionCount) E(cuModuleGetGlobal) E(cuModuleGetGlobal_v2) E(cuModuleGetLoadingMode) E(cuModuleLoad) \
    E(cuModuleLoadData) E(cuModuleLoadDataEx) E(cuModuleLoadFatBinary) E(cuModuleUnload) \
    E(cuOccupancyAvailableDynamicSMemPerBlock) E(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
    E(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) E(cuOccupancyMaxActiveClusters) \
    E(cuOccupancyMaxPotentialBlockSize) E(cuOccupancyMaxPotentialBlockSizeWithFlags) \
    E(cuOccupancyMaxPotentialClusterSize) E(cuPointerGetAttribute) E(cuPointerGetAttributes) E(cuPointerSetAttribute) \
    E(cuProfilerStart) E(cuProfilerStop) E(cuStreamAddCallback) E(cuStreamAttachMemAsync) E(cuStreamBatchMemOp) \
    E(cuStreamBatchMemOp_v2) E(cuStreamBeginCaptureToGraph) \
    E(cuStreamBeginCapture_v2) E(cuStreamCopyAttributes) E(cuStreamCreate) E(cuStreamCreateWithPriority) \
    E(cuStreamDestroy) E(cuStreamDestroy_v2) E(cuStreamEndCapture) E(cuStreamGetAttribute) E(cuStreamGetCaptureInfo_v3) \
    E(cuStreamGetCtx) E(cuStreamGetCtx_v2) E(cuStreamGetDevResource) E(cuStreamGetDevice) E(cuStreamGetFlags) \
    E(cuStreamGetGreenCtx) E(cuStreamGetId) E(cuStreamGetPriority) E(cuStreamIsCapturing) E(cuStreamQuery) \
    E(cuStreamSetAttribute) E(cuStreamSynchronize) E(cuStreamUpdateCaptureDependencies_v2) E(cuStreamWaitEvent) \
    E(cuStreamWaitValue32) E(cuStreamWaitValue32_v2) E(cuStreamWaitValue64) E(cuStreamWaitValue64_v2) \
    E(cuStreamWriteValue32) E(cuStreamWriteValue32_v2) E(cuStreamWriteValue64) E(cuStreamWriteValue64_v2) \
    E(cuSurfObjectCreate) E(cuSurfObjectDestroy) E(cuSurfObjectGetResourceDesc) E(cuTexObjectCreate) \
    E(cuTexObjectDestroy) E(cuTexObjectGetResourceDesc) E(cuTexObjectGetResourceViewDesc) E(cuTexObjectGetTextureDesc) \
    E(cuThreadExchangeStreamCaptureMode) E(cuUserObjectCreate) E(cuUserObjectRelease) E(cuUserObjectRetain)

#define DEFINE(name)                                                                                                   \
    int name(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l) {         \
        static entry_t function;                                                                                       \
        if (!function) function = cudatool_exported(#name);                                                            \
        return function ? function(a, b, c, d, e, f, g, h, i, j, k, l) : cudatool_refusal();                           \
    }
EXPORTS(DEFINE)

/* What NVIDIA's own libraries ask for by this is not documented. They look for it without asking whether it is there. */
int cuGetExportTable(const void **table, const void *identifier) {
    (void)identifier;
    if (table) *table = NULL;
    return 500; /* CUDA_ERROR_NOT_FOUND */
}
