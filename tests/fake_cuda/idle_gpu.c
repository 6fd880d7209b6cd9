/* A CUDA driver and runtime of one GPU that does nothing, for torch's build for CUDA on a machine
 * without a driver. Devices, streams and events exist; kernels do not run.
 *
 * Loaded before torch (LD_PRELOAD); only what torch calls for fake tensors is here. The rest comes
 * from the real runtime, which says that there is no driver. */

#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#define DONE(name) \
    int name() { return 0; }

static size_t handles = 0;

static int made(void **handle) {
    *handle = (void *)++handles;
    return 0;
}

DONE(idle)

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return 0;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "NVIDIA H100 (idle)");
    found->major = 9;
    found->warpSize = 32;
    found->multiProcessorCount = 132;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->sharedMemPerBlockOptin = 232448;
    found->totalGlobalMem = (size_t)80 << 30;
    return 0;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return 0;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *left = *total = (size_t)80 << 30;
    return 0;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return 0;
}

cudaError_t cudaMalloc(void **memory, size_t size) {
    return posix_memalign(memory, 512, size) ? cudaErrorMemoryAllocation : 0;
}

cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) {
    return cudaMalloc(memory, size);
}

cudaError_t cudaFree(void *memory) {
    free(memory);
    return 0;
}

cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *memory) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeHost; /* what pinning asks */
    return 0;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return made((void **)stream);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return made((void **)event);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return made((void **)event); }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    *ms = 1;
    return 0;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return 0;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    if (id) *id = 0;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *function = (void *)idle;
    if (result) *result = cudaDriverEntryPointSuccess;
    return 0;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = 0;
    return 0;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    memcpy(to, from, size);
    return 0;
}

const char *cudaGetErrorName(cudaError_t error) { return error ? "error" : "cudaSuccess"; }
const char *cudaGetErrorString(cudaError_t error) { return error ? "error" : "no error"; }

cudaError_t cudaSetDevice(int device) { return 0; }
cudaError_t cudaGetLastError(void) { return 0; }
cudaError_t cudaPeekAtLastError(void) { return 0; }
cudaError_t cudaDeviceSynchronize(void) { return 0; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return 0; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return 0; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return 0;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return 0; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return 0; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return 0; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return 0;
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream) {
    return 0;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream) { return 0; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }

/* The driver: torch asks whether a device is in use, and looks the others up. */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

DONE(cuCtxGetCurrent)
DONE(cuCtxSetCurrent)
DONE(cuDeviceGet)
DONE(cuDeviceGetAttribute)
DONE(cuDevicePrimaryCtxRetain)
DONE(cuFuncGetAttribute)
DONE(cuFuncSetAttribute)
DONE(cuFuncSetCacheConfig)
DONE(cuGetErrorString)
DONE(cuLaunchCooperativeKernel)
DONE(cuLaunchKernel)
DONE(cuLinkAddData_v2)
DONE(cuLinkComplete)
DONE(cuLinkCreate_v2)
DONE(cuModuleGetFunction)
DONE(cuModuleLoad)
DONE(cuModuleLoadData)
DONE(cuModuleLoadDataEx)
DONE(cuModuleUnload)
DONE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
DONE(cuPointerGetAttribute)
DONE(cuTensorMapEncodeTiled)
