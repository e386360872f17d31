/* cuMemAlloc, and its sharing by legacy IPC handles.
 *
 * Linear memory belongs to the context it was made in and can be read and written. A handle names
 * the file and its creator: it can be opened in other processes while the creator lives. What an
 * importer has open stays valid after that here; on a GPU nobody promises it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"

#define CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS 1u
#define HANDLE_MAGIC "trimsipc"

struct linear {
    int ordinal;
    unsigned opens; /* of imported memory */
    char name[NAME_BYTES];
};

/* What the 64 bytes of a handle hold here. */
struct reference {
    char magic[8];
    char name[NAME_BYTES];
};

/* A mapping that can be read and written; takes the descriptor and ``linear`` when it succeeds. */
static CUresult map(int descriptor, uint64_t bytes, enum region_kind kind, struct linear *linear,
                    CUdeviceptr *address) {
    uint64_t start = space_reserve(bytes, 0, 0);
    if (start == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_rwlock_wrlock(&space_lock);
    struct region *region = space_map(start, bytes, descriptor, 0);
    if (region != NULL) {
        region->kind = kind;
        region->ordinal = linear->ordinal;
        region->owner = linear;
        region->access[linear->ordinal] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        space_protect(region);
        *address = start;
        /* The mapping keeps the memory alive from here on. */
        close(descriptor);
    }
    pthread_rwlock_unlock(&space_lock);
    if (region == NULL)
        space_release(start, bytes);
    return region != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The space lock is held. */
static void drop(struct region *region) {
    uint64_t address = region->address, bytes = region->bytes;
    free(region->owner);
    space_unmap(region);
    space_release(address, bytes);
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (address == NULL || bytes == 0 || bytes > SIZE_MAX - GRANULARITY)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t whole = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    struct linear *linear = calloc(1, sizeof *linear);
    if (linear == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    linear->ordinal = context_device(context);
    int descriptor = registry_create(&process.machine, device_at(linear->ordinal), "linear", whole,
                                     linear->name);
    result = descriptor >= 0 ? map(descriptor, whole, REGION_LINEAR, linear, address)
                             : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        return result;
    if (descriptor >= 0)
        close(descriptor);
    free(linear);
    return result;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    /* Freeing waits for the device, as documented for cudaFree. */
    if (result == CUDA_SUCCESS)
        result = streams_synchronize(context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_rwlock_wrlock(&space_lock);
    struct region *region = space_find(address);
    bool is_ours = region != NULL && region->kind == REGION_LINEAR && region->address == address;
    if (is_ours)
        drop(region);
    pthread_rwlock_unlock(&space_lock);
    return is_ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (free_bytes == NULL || total_bytes == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const struct device *device = device_at(context_device(context));
    *total_bytes = device->total_bytes;
    *free_bytes = device->total_bytes - registry_used(&process.machine, device->id, "");
    return CUDA_SUCCESS;
}

void linear_release_context(int ordinal) {
    pthread_rwlock_wrlock(&space_lock);
    for (struct region *each = space_first(), *next; each != NULL; each = next) {
        next = each->next;
        if (each->kind != REGION_VMM && each->ordinal == ordinal)
            drop(each);
    }
    pthread_rwlock_unlock(&space_lock);
}

/* What is mapped stays mapped; the records of it go. */
void linear_reset(void) {
    pthread_rwlock_wrlock(&space_lock);
    for (struct region *each = space_first(); each != NULL; each = each->next)
        if (each->kind != REGION_VMM)
            free(each->owner);
    space_forget();
    pthread_rwlock_unlock(&space_lock);
}

/* --- legacy IPC ------------------------------------------------------------------------------- */

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS || handle == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    struct reference reference = {0};
    memcpy(reference.magic, HANDLE_MAGIC, sizeof reference.magic);
    pthread_rwlock_rdlock(&space_lock);
    struct region *region = space_find(address);
    /* The base of an allocation of this process; memory of cuMemCreate cannot be shared so. */
    if (region == NULL || region->kind != REGION_LINEAR || region->address != address)
        result = CUDA_ERROR_INVALID_VALUE;
    else
        memcpy(reference.name, ((struct linear *)region->owner)->name, sizeof reference.name);
    pthread_rwlock_unlock(&space_lock);
    memset(handle, 0, sizeof *handle);
    if (result == CUDA_SUCCESS)
        memcpy(handle->reserved, &reference, sizeof reference);
    return result;
}

/* The lock is held for writing. */
static struct region *find_open(const char *name) {
    for (struct region *each = space_first(); each != NULL; each = each->next)
        if (each->kind == REGION_IMPORTED &&
            strcmp(((struct linear *)each->owner)->name, name) == 0)
            return each;
    return NULL;
}

static CUresult check_owner(const struct trailer *trailer) {
    /* "CUDA_ERROR_INVALID_CONTEXT" is what a process gets for a handle of its own. */
    if (trailer->creator == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    bool is_alive = registry_process_start((pid_t)trailer->creator) == trailer->creator_start;
    return is_alive ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Into the current context's address space, which needs to reach the device that has the memory. */
static CUresult check_device(int ordinal, int current) {
    if (ordinal < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    bool is_reached = ordinal == current || devices_are_peers(ordinal, current);
    return is_reached ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

static CUresult import(int descriptor, const char *name, int current, CUdeviceptr *address) {
    struct trailer trailer;
    if (!registry_identify(descriptor, &trailer))
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = check_owner(&trailer);
    int ordinal = device_ordinal(trailer.device);
    if (result == CUDA_SUCCESS)
        result = check_device(ordinal, current);
    struct linear *linear = result == CUDA_SUCCESS ? calloc(1, sizeof *linear) : NULL;
    if (linear == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_OUT_OF_MEMORY;
    linear->ordinal = ordinal;
    linear->opens = 1;
    snprintf(linear->name, sizeof linear->name, "%s", name);
    result = map(descriptor, trailer.bytes, REGION_IMPORTED, linear, address);
    if (result != CUDA_SUCCESS)
        free(linear);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    ENTER();
    CUcontext context;
    struct reference reference;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    memcpy(&reference, handle.reserved, sizeof reference);
    if (address == NULL || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS ||
        memcmp(reference.magic, HANDLE_MAGIC, sizeof reference.magic) != 0 ||
        memchr(reference.name, '\0', sizeof reference.name) == NULL ||
        strchr(reference.name, '/') != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&space_lock);
    struct region *open = find_open(reference.name);
    if (open != NULL) {
        ((struct linear *)open->owner)->opens++;
        *address = open->address;
    }
    pthread_rwlock_unlock(&space_lock);
    if (open != NULL)
        return CUDA_SUCCESS;
    int descriptor = registry_open(&process.machine, reference.name);
    if (descriptor < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    result = import(descriptor, reference.name, context_device(context), address);
    if (result != CUDA_SUCCESS)
        close(descriptor);
    return result;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_rwlock_wrlock(&space_lock);
    struct region *region = space_find(address);
    bool is_ours = region != NULL && region->kind == REGION_IMPORTED && region->address == address;
    if (is_ours && --((struct linear *)region->owner)->opens == 0)
        drop(region);
    pthread_rwlock_unlock(&space_lock);
    return is_ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
