/* cuGetProcAddress: which function a name means in which version of CUDA.
 *
 * The bindings ask for every function they know, by its name without suffix and the version in
 * which its present signature appeared (both from NVIDIA's cudaTypedefs.h); what is not here they
 * report as "function ... is not found".
 */
#include <dlfcn.h>
#include <string.h>

#include "emulator.h"

enum { LOOKUP_SUCCESS = 0, LOOKUP_NOT_FOUND = 1, LOOKUP_VERSION_NOT_SUFFICIENT = 2 };

/* A name may stand here several times: the youngest signature that is old enough counts. */
static const struct symbol {
    const char *name;
    int since;
    const char *exported;
} symbols[] = {
    {"cuGetErrorString", 6000, "cuGetErrorString"},
    {"cuGetErrorName", 6000, "cuGetErrorName"},
    {"cuInit", 2000, "cuInit"},
    {"cuDriverGetVersion", 2020, "cuDriverGetVersion"},
    {"cuGetProcAddress", 11030, "cuGetProcAddress"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuDeviceGet", 2000, "cuDeviceGet"},
    {"cuDeviceGetCount", 2000, "cuDeviceGetCount"},
    {"cuDeviceGetName", 2000, "cuDeviceGetName"},
    {"cuDeviceGetUuid", 9020, "cuDeviceGetUuid"},
    {"cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"},
    {"cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"},
    {"cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute"},
    {"cuDeviceCanAccessPeer", 4000, "cuDeviceCanAccessPeer"},
    {"cuDeviceGetP2PAttribute", 8000, "cuDeviceGetP2PAttribute"},
    {"cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain"},
    {"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    {"cuDevicePrimaryCtxGetState", 7000, "cuDevicePrimaryCtxGetState"},
    {"cuDevicePrimaryCtxReset", 11000, "cuDevicePrimaryCtxReset_v2"},
    {"cuCtxGetCurrent", 4000, "cuCtxGetCurrent"},
    {"cuCtxSetCurrent", 4000, "cuCtxSetCurrent"},
    {"cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"},
    {"cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"},
    {"cuCtxGetDevice", 2000, "cuCtxGetDevice"},
    {"cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"},
    {"cuCtxSynchronize", 2000, "cuCtxSynchronize"},
    {"cuCtxSynchronize", 13000, "cuCtxSynchronize_v2"},
    {"cuThreadExchangeStreamCaptureMode", 10010, "cuThreadExchangeStreamCaptureMode"},
    {"cuStreamCreate", 2000, "cuStreamCreate"},
    {"cuStreamDestroy", 4000, "cuStreamDestroy_v2"},
    {"cuStreamSynchronize", 2000, "cuStreamSynchronize"},
    {"cuStreamQuery", 2000, "cuStreamQuery"},
    {"cuStreamWaitEvent", 3020, "cuStreamWaitEvent"},
    {"cuEventCreate", 2000, "cuEventCreate"},
    {"cuEventRecord", 2000, "cuEventRecord"},
    {"cuEventQuery", 2000, "cuEventQuery"},
    {"cuEventSynchronize", 2000, "cuEventSynchronize"},
    {"cuEventDestroy", 4000, "cuEventDestroy_v2"},
    {"cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2"},
    {"cuMemcpyDtoH", 3020, "cuMemcpyDtoH_v2"},
    {"cuMemcpyDtoD", 3020, "cuMemcpyDtoD_v2"},
    {"cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2"},
    {"cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2"},
    {"cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2"},
    {"cuMemcpyPeerAsync", 4000, "cuMemcpyPeerAsync"},
    {"cuMemsetD8", 3020, "cuMemsetD8_v2"},
    {"cuMemsetD8Async", 3020, "cuMemsetD8Async"},
    {"cuMemGetInfo", 3020, "cuMemGetInfo_v2"},
    {"cuMemGetAllocationGranularity", 10020, "cuMemGetAllocationGranularity"},
    {"cuMemGetAllocationPropertiesFromHandle", 10020, "cuMemGetAllocationPropertiesFromHandle"},
    {"cuMemCreate", 10020, "cuMemCreate"},
    {"cuMemRelease", 10020, "cuMemRelease"},
    {"cuMemRetainAllocationHandle", 11000, "cuMemRetainAllocationHandle"},
    {"cuMemExportToShareableHandle", 10020, "cuMemExportToShareableHandle"},
    {"cuMemImportFromShareableHandle", 10020, "cuMemImportFromShareableHandle"},
    {"cuMemAddressReserve", 10020, "cuMemAddressReserve"},
    {"cuMemAddressFree", 10020, "cuMemAddressFree"},
    {"cuMemMap", 10020, "cuMemMap"},
    {"cuMemUnmap", 10020, "cuMemUnmap"},
    {"cuMemSetAccess", 10020, "cuMemSetAccess"},
    {"cuMemGetAccess", 10020, "cuMemGetAccess"},
    {"cuMemAlloc", 3020, "cuMemAlloc_v2"},
    {"cuMemFree", 3020, "cuMemFree_v2"},
    {"cuMemHostAlloc", 2020, "cuMemHostAlloc"},
    {"cuMemAllocHost", 3020, "cuMemAllocHost_v2"},
    {"cuMemFreeHost", 2000, "cuMemFreeHost"},
    {"cuMemHostRegister", 6050, "cuMemHostRegister_v2"},
    {"cuMemHostUnregister", 4000, "cuMemHostUnregister"},
    {"cuIpcGetMemHandle", 4010, "cuIpcGetMemHandle"},
    {"cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2"},
    {"cuIpcCloseMemHandle", 4010, "cuIpcCloseMemHandle"},
    {"cuPointerGetAttribute", 4000, "cuPointerGetAttribute"},
};

/* By its own name: a look-up among all libraries might find a real driver. */
static void *find_export(const char *exported) {
    static void *self;
    Dl_info info;
    if (self == NULL && dladdr((void *)find_export, &info) != 0)
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return self != NULL ? dlsym(self, exported) : NULL;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                                    int *status) {
    const struct symbol *found = NULL;
    int outcome = LOOKUP_NOT_FOUND;
    /* Flags choose between the two kinds of default stream; there is one kind here. */
    (void)flags;
    if (name == NULL || address == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *address = NULL;
    if (version > DRIVER_VERSION)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        if (strcmp(symbols[i].name, name) != 0)
            continue;
        outcome = LOOKUP_VERSION_NOT_SUFFICIENT;
        if (symbols[i].since <= version && (found == NULL || found->since < symbols[i].since))
            found = &symbols[i];
    }
    if (found != NULL) {
        *address = find_export(found->exported);
        outcome = LOOKUP_SUCCESS;
    }
    if (status != NULL)
        *status = outcome;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **address, int version, uint64_t flags) {
    CUresult result = cuGetProcAddress_v2(name, address, version, flags, NULL);
    return result == CUDA_SUCCESS && *address == NULL ? CUDA_ERROR_NOT_FOUND : result;
}
