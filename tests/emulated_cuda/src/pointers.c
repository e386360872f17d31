/* cuPointerGetAttribute: what an address is. */
#include <string.h>

#include "emulator.h"

/* CU_POINTER_ATTRIBUTE_* and CU_MEMORYTYPE_* of cuda.h. */
enum {
    MEMORY_TYPE = 2,
    DEVICE_POINTER = 3,
    HOST_POINTER = 4,
    IS_MANAGED = 8,
    DEVICE_ORDINAL = 9,
    IS_LEGACY_CUDA_IPC_CAPABLE = 10,
    RANGE_START_ADDR = 11,
    RANGE_SIZE = 12,
    MAPPED = 13,
    ALLOWED_HANDLE_TYPES = 14,
};
enum { MEMORYTYPE_HOST = 1, MEMORYTYPE_DEVICE = 2 };

struct pointer {
    unsigned memory_type;
    int ordinal;
    uint64_t address, start, bytes;
    bool is_exportable;
    bool is_ipc_capable;
};

static bool look_up(uint64_t address, struct pointer *pointer) {
    memset(pointer, 0, sizeof *pointer);
    pointer->address = address;
    pthread_rwlock_rdlock(&space_lock);
    const struct region *region = space_find(address);
    if (region != NULL) {
        pointer->memory_type = MEMORYTYPE_DEVICE;
        pointer->ordinal = region->ordinal;
        pointer->start = region->address;
        pointer->bytes = region->bytes;
        pointer->is_exportable = region->kind == REGION_VMM;
        pointer->is_ipc_capable = region->kind == REGION_LINEAR;
    }
    pthread_rwlock_unlock(&space_lock);
    if (region != NULL)
        return true;
    pointer->memory_type = MEMORYTYPE_HOST;
    return host_find(address, 1, &pointer->start, &pointer->bytes);
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    ENTER();
    struct pointer pointer;
    if (data == NULL || !look_up(address, &pointer))
        return CUDA_ERROR_INVALID_VALUE;
    bool is_host = pointer.memory_type == MEMORYTYPE_HOST;
    switch (attribute) {
        case MEMORY_TYPE:
            *(unsigned *)data = pointer.memory_type;
            return CUDA_SUCCESS;
        case DEVICE_POINTER:
            *(CUdeviceptr *)data = pointer.address;
            return CUDA_SUCCESS;
        case HOST_POINTER:
            /* Device memory has none, although it could be read here. */
            if (is_host)
                *(uint64_t *)data = pointer.address;
            return is_host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
        case IS_MANAGED:
            *(unsigned char *)data = 0;
            return CUDA_SUCCESS;
        case DEVICE_ORDINAL:
            *(int *)data = pointer.ordinal;
            return CUDA_SUCCESS;
        case IS_LEGACY_CUDA_IPC_CAPABLE:
            *(unsigned char *)data = pointer.is_ipc_capable;
            return CUDA_SUCCESS;
        case RANGE_START_ADDR:
            *(CUdeviceptr *)data = pointer.start;
            return CUDA_SUCCESS;
        case RANGE_SIZE:
            *(size_t *)data = pointer.bytes;
            return CUDA_SUCCESS;
        case MAPPED:
            *(unsigned char *)data = 1;
            return CUDA_SUCCESS;
        case ALLOWED_HANDLE_TYPES:
            *(uint64_t *)data = pointer.is_exportable;
            return CUDA_SUCCESS;
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
}
