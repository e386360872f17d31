/* The emulated NVML: every device of the machine, whatever CUDA_VISIBLE_DEVICES says, in an order
 * that need not be CUDA's. Under MIG its devices are the GPUs, and the instances are found by their
 * ids or below their GPU.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "machine.h"

#define EXPORT __attribute__((visibility("default")))
#define DRIVER_VERSION "580.00-emulated"
#define CUDA_DRIVER_VERSION 13000

typedef int nvmlReturn_t;
typedef const struct device *nvmlDevice_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

static pthread_mutex_t nvml_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned references;
static struct machine machine;
static struct device gpus[MAX_DEVICES];

static nvmlReturn_t enter(void) {
    pthread_mutex_lock(&nvml_lock);
    bool is_ready = references > 0;
    pthread_mutex_unlock(&nvml_lock);
    return is_ready ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

#define ENTER()                         \
    do {                                \
        nvmlReturn_t entered = enter(); \
        if (entered != NVML_SUCCESS)    \
            return entered;             \
    } while (0)

/* --- library ---------------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    nvmlReturn_t result = NVML_SUCCESS;
    pthread_mutex_lock(&nvml_lock);
    if (references == 0 && (!machine_read(&machine) || !machine.has_nvml))
        result = NVML_ERROR_DRIVER_NOT_LOADED;
    if (result == NVML_SUCCESS && references++ == 0)
        for (int gpu = 0; gpu < machine.gpu_count; gpu++)
            machine_gpu(gpu, &gpus[gpu]);
    pthread_mutex_unlock(&nvml_lock);
    return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&nvml_lock);
    nvmlReturn_t result = references > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    references -= references > 0;
    pthread_mutex_unlock(&nvml_lock);
    return result;
}

/* For tests inside one process: the next nvmlInit reads the environment again. */
EXPORT void trims_test_nvml_reset(void) {
    pthread_mutex_lock(&nvml_lock);
    references = 0;
    pthread_mutex_unlock(&nvml_lock);
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
        case NVML_SUCCESS:
            return "The operation was successful";
        case NVML_ERROR_UNINITIALIZED:
            return "Uninitialized";
        case NVML_ERROR_INVALID_ARGUMENT:
            return "Invalid Argument";
        case NVML_ERROR_NOT_SUPPORTED:
            return "Not Supported";
        case NVML_ERROR_NOT_FOUND:
            return "Not Found";
        case NVML_ERROR_INSUFFICIENT_SIZE:
            return "Insufficient Size";
        case NVML_ERROR_DRIVER_NOT_LOADED:
            return "Driver Not Loaded";
        case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
            return "Argument Version Mismatch";
        default:
            return "Unknown Error";
    }
}

static nvmlReturn_t copy_text(const char *text, char *into, unsigned length) {
    if (into == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(into, text);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER();
    return copy_text(DRIVER_VERSION, version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER();
    if (version == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = CUDA_DRIVER_VERSION;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

/* --- devices ---------------------------------------------------------------------------------- */

static bool is_within(nvmlDevice_t device, const struct device *devices, int count) {
    return device >= devices && device < devices + count;
}

static bool is_device(nvmlDevice_t device) {
    return is_within(device, gpus, machine.gpu_count) ||
           is_within(device, machine.devices, machine.device_count);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER();
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = (unsigned)machine.gpu_count;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    ENTER();
    if (device == NULL || index >= (unsigned)machine.gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &gpus[machine.nvml_order[index]];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *id, nvmlDevice_t *device) {
    ENTER();
    if (id == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < machine.gpu_count; i++)
        if (strcmp(gpus[i].id, id) == 0) {
            *device = &gpus[i];
            return NVML_SUCCESS;
        }
    for (int i = 0; i < machine.device_count; i++)
        if (strcmp(machine.devices[i].id, id) == 0) {
            *device = &machine.devices[i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *id, unsigned length) {
    ENTER();
    return is_device(device) ? copy_text(device->id, id, length) : NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    ENTER();
    return is_device(device) ? copy_text(device->name, name, length) : NVML_ERROR_INVALID_ARGUMENT;
}

/* --- MIG -------------------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending) {
    ENTER();
    if (!is_within(device, gpus, machine.gpu_count) || now == NULL || pending == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *now = *pending = machine.is_mig;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    ENTER();
    if (!is_within(device, gpus, machine.gpu_count) || count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = machine.is_mig ? (unsigned)(machine.device_count / machine.gpu_count) : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index,
                                                        nvmlDevice_t *instance) {
    ENTER();
    if (!is_within(device, gpus, machine.gpu_count) || instance == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!machine.is_mig)
        return NVML_ERROR_NOT_SUPPORTED;
    for (int i = 0; i < machine.device_count; i++)
        if (machine.devices[i].gpu == device->gpu &&
            machine.devices[i].instance == (int)index + 1) {
            *instance = &machine.devices[i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

/* --- memory ----------------------------------------------------------------------------------- */

static unsigned long long used(nvmlDevice_t device) {
    if (!machine.is_mig || device->instance != 0)
        return registry_used(&machine, device->id, "");
    unsigned long long bytes = 0;
    for (int i = 0; i < machine.device_count; i++)
        if (machine.devices[i].gpu == device->gpu)
            bytes += registry_used(&machine, machine.devices[i].id, "");
    return bytes;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER();
    if (!is_device(device) || memory == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    memory->total = device->total_bytes;
    memory->used = used(device);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ENTER();
    nvmlMemory_t plain;
    if (memory == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2u << 24))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t result = nvmlDeviceGetMemoryInfo(device, &plain);
    if (result != NVML_SUCCESS)
        return result;
    memory->total = plain.total;
    memory->reserved = 0;
    memory->free = plain.free;
    memory->used = plain.used;
    return NVML_SUCCESS;
}
