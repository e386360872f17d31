/* Device queries. A device's number is its place among the visible ones. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

const struct device *device_at(int ordinal) {
    if (ordinal < 0 || ordinal >= process.visible_count)
        return NULL;
    return &process.machine.devices[process.visible[ordinal]];
}

int device_ordinal(const char *id) {
    for (int i = 0; i < process.visible_count; i++)
        if (strcmp(device_at(i)->id, id) == 0)
            return i;
    return -1;
}

bool devices_are_peers(int one, int other) {
    return one != other && process.machine.has_peer_access && !process.machine.is_mig;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    ENTER();
    if (count == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *count = process.visible_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    if (device == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (device_at(ordinal) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal) {
    ENTER();
    const struct device *device = device_at(ordinal);
    if (name == NULL || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (device == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", device->name);
    return CUDA_SUCCESS;
}

static CUresult get_uuid(CUuuid *uuid, CUdevice ordinal, bool is_of_instance) {
    const struct device *device = device_at(ordinal);
    if (uuid == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (device == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid->bytes, is_of_instance ? device->uuid : device->gpu_uuid, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal) {
    ENTER();
    return get_uuid(uuid, ordinal, false);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal) {
    ENTER();
    return get_uuid(uuid, ordinal, true);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal) {
    ENTER();
    const struct device *device = device_at(ordinal);
    if (bytes == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (device == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = device->total_bytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice one, CUdevice other) {
    ENTER();
    if (can == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (device_at(one) == NULL || device_at(other) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    *can = devices_are_peers(one, other);
    return CUDA_SUCCESS;
}

/* Which link is fastest is of this machine's making: the one between neighbours. */
EXPORT CUresult cuDeviceGetP2PAttribute(int *value, int which, CUdevice one, CUdevice other) {
    ENTER();
    const struct device *first = device_at(one), *second = device_at(other);
    if (value == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (first == NULL || second == NULL || one == other)
        return CUDA_ERROR_INVALID_DEVICE;
    if (which == CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)
        *value = abs(first->gpu - second->gpu) - 1;
    else if (which == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)
        *value = devices_are_peers(one, other);
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* CU_DEVICE_ATTRIBUTE_* of cuda.h. One that is not here is an error rather than a made-up value. */
static bool attribute(const struct device *device, int which, int *value) {
    int compute_mode = process.machine.is_exclusive ? 3 : 0; /* EXCLUSIVE_PROCESS, DEFAULT */
    const struct {
        int which, value;
    } attributes[] = {
        {10, 32},                         /* WARP_SIZE */
        {16, 132},                        /* MULTIPROCESSOR_COUNT */
        {18, 0},                          /* INTEGRATED */
        {19, 1},                          /* CAN_MAP_HOST_MEMORY */
        {20, compute_mode},               /* COMPUTE_MODE */
        {32, 1},                          /* ECC_ENABLED */
        {33, device->gpu + 1},            /* PCI_BUS_ID */
        {34, 0},                          /* PCI_DEVICE_ID */
        {40, 2},                          /* ASYNC_ENGINE_COUNT */
        {41, 1},                          /* UNIFIED_ADDRESSING */
        {50, 0},                          /* PCI_DOMAIN_ID */
        {75, 9},                          /* COMPUTE_CAPABILITY_MAJOR */
        {76, 0},                          /* COMPUTE_CAPABILITY_MINOR */
        {91, 1},                          /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
        {99, 1},                          /* HOST_REGISTER_SUPPORTED */
        {102, 1},                         /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
        {103, process.machine.can_share}, /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
        {113, 1},                         /* READ_ONLY_HOST_REGISTER_SUPPORTED */
        {115, 0},                         /* MEMORY_POOLS_SUPPORTED */
        {124, 0},                         /* DMA_BUF_SUPPORTED */
        {125, 0},                         /* IPC_EVENT_SUPPORTED */
        {133, process.machine.has_mps},   /* MPS_ENABLED */
    };
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (attributes[i].which == which) {
            *value = attributes[i].value;
            return true;
        }
    return false;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int which, CUdevice ordinal) {
    ENTER();
    const struct device *device = device_at(ordinal);
    if (device == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    if (value == NULL || !attribute(device, which, value))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
