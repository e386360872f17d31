/* Virtual memory management: physical allocations as handles, reservations, mappings, rights.
 *
 * An allocation lives while a handle, a mapping or, in any process, a descriptor of it is left.
 * Here it is one descriptor of its file, kept until this process has neither handle nor mapping;
 * what other processes hold is the kernel's business (registry.c). Handles are numbers that are
 * never used again, so that a stale one is noticed. Everything is guarded by space_lock.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"

/* Far from small numbers: a descriptor or an address passed as a handle is none. */
#define FIRST_HANDLE ((CUmemGenericAllocationHandle)0x7e57000000000001)
#define CU_MEM_ALLOC_GRANULARITY_RECOMMENDED 1

struct allocation {
    struct allocation *next;
    CUmemGenericAllocationHandle handle;
    unsigned references; /* of the handle; 0: it is void, a mapping is left */
    unsigned mappings;
    int descriptor;
    int ordinal;
    uint64_t bytes;
};

struct reservation {
    struct reservation *next;
    uint64_t address;
    uint64_t bytes;
};

static struct allocation *allocations;
static struct reservation *reservations;
static CUmemGenericAllocationHandle next_handle = FIRST_HANDLE;

static void lock(void) {
    pthread_rwlock_wrlock(&space_lock);
}

static CUresult unlock(CUresult result) {
    pthread_rwlock_unlock(&space_lock);
    return result;
}

static bool is_granular(uint64_t value) {
    return value % GRANULARITY == 0;
}

/* --- allocations ------------------------------------------------------------------------------ */

static struct allocation *find(CUmemGenericAllocationHandle handle) {
    for (struct allocation *each = allocations; each != NULL; each = each->next)
        if (each->handle == handle && each->references > 0)
            return each;
    return NULL;
}

/* Takes the descriptor, also when it fails. */
static CUresult add(int descriptor, int ordinal, uint64_t bytes,
                    CUmemGenericAllocationHandle *handle) {
    struct allocation *allocation = calloc(1, sizeof *allocation);
    if (allocation == NULL) {
        close(descriptor);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    lock();
    *allocation = (struct allocation){.next = allocations,
                                      .handle = next_handle++,
                                      .references = 1,
                                      .descriptor = descriptor,
                                      .ordinal = ordinal,
                                      .bytes = bytes};
    allocations = allocation;
    *handle = allocation->handle;
    return unlock(CUDA_SUCCESS);
}

static void drop_when_unused(struct allocation *allocation) {
    if (allocation->references > 0 || allocation->mappings > 0)
        return;
    for (struct allocation **link = &allocations; *link != NULL; link = &(*link)->next)
        if (*link == allocation) {
            *link = allocation->next;
            break;
        }
    close(allocation->descriptor);
    free(allocation);
}

static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (properties == NULL || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        properties->win32HandleMetaData != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (device_at(properties->location.id) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    return process.machine.can_share ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                              int which) {
    ENTER();
    if (bytes == NULL || which < 0 || which > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_properties(properties);
    if (result == CUDA_SUCCESS)
        *bytes = GRANULARITY;
    return result;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *properties, unsigned long long flags) {
    ENTER();
    char name[NAME_BYTES];
    if (handle == NULL || flags != 0 || bytes == 0 || !is_granular(bytes))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_properties(properties);
    if (result != CUDA_SUCCESS)
        return result;
    int ordinal = properties->location.id;
    int descriptor = registry_create(&process.machine, device_at(ordinal), "vmm", bytes, name);
    if (descriptor < 0)
        return descriptor == -ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
    return add(descriptor, ordinal, bytes, handle);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER();
    lock();
    struct allocation *allocation = find(handle);
    if (allocation == NULL)
        return unlock(CUDA_ERROR_INVALID_VALUE);
    allocation->references--;
    drop_when_unused(allocation);
    return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER();
    lock();
    struct region *region = space_find((uint64_t)(uintptr_t)address);
    if (handle == NULL || region == NULL || region->kind != REGION_VMM)
        return unlock(CUDA_ERROR_INVALID_VALUE);
    struct allocation *allocation = region->owner;
    allocation->references++;
    *handle = allocation->handle;
    return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                       CUmemGenericAllocationHandle handle) {
    ENTER();
    lock();
    struct allocation *allocation = find(handle);
    if (properties == NULL || allocation == NULL)
        return unlock(CUDA_ERROR_INVALID_VALUE);
    memset(properties, 0, sizeof *properties);
    properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties->location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, allocation->ordinal};
    return unlock(CUDA_SUCCESS);
}

/* --- between processes ------------------------------------------------------------------------ */

EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                             int type, unsigned long long flags) {
    ENTER();
    if (shareable == NULL || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    struct allocation *allocation = find(handle);
    if (allocation == NULL)
        return unlock(CUDA_ERROR_INVALID_VALUE);
    /* Not close-on-exec: nothing is documented, so callers must not rely on it. */
    int descriptor = fcntl(allocation->descriptor, F_DUPFD, 0);
    if (descriptor < 0)
        return unlock(CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareable = descriptor;
    return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                               void *shareable, int type) {
    ENTER();
    struct trailer trailer;
    if (handle == NULL || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    /* The descriptor itself stands in place of the pointer; it stays the caller's. */
    int given = (int)(intptr_t)shareable;
    if (!registry_identify(given, &trailer))
        return CUDA_ERROR_INVALID_VALUE;
    int ordinal = device_ordinal(trailer.device);
    if (ordinal < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    int descriptor = fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (descriptor < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    return add(descriptor, ordinal, trailer.bytes, handle);
}

/* --- reservations ----------------------------------------------------------------------------- */

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                                    CUdeviceptr hint, unsigned long long flags) {
    ENTER();
    /* Documented are multiples of the host's page; what is then mapped needs the granularity. */
    if (address == NULL || flags != 0 || bytes == 0 || !is_granular(bytes) ||
        (alignment & (alignment - 1)) != 0 || hint % 4096 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct reservation *reservation = calloc(1, sizeof *reservation);
    uint64_t start = reservation != NULL ? space_reserve(bytes, alignment, hint) : 0;
    if (start == 0) {
        free(reservation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    lock();
    *reservation = (struct reservation){reservations, start, bytes};
    reservations = reservation;
    *address = start;
    return unlock(CUDA_SUCCESS);
}

static bool is_anything_mapped(uint64_t address, uint64_t bytes) {
    for (struct region *each = space_first(); each != NULL; each = each->next)
        if (each->address < address + bytes && address < each->address + each->bytes)
            return true;
    return false;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER();
    lock();
    for (struct reservation **link = &reservations; *link != NULL; link = &(*link)->next) {
        struct reservation *each = *link;
        if (each->address != address || each->bytes != bytes)
            continue;
        if (is_anything_mapped(address, bytes))
            break;
        *link = each->next;
        space_release(address, bytes);
        free(each);
        return unlock(CUDA_SUCCESS);
    }
    return unlock(CUDA_ERROR_INVALID_VALUE);
}

static bool is_reserved(uint64_t address, uint64_t bytes) {
    for (struct reservation *each = reservations; each != NULL; each = each->next)
        if (address >= each->address && bytes <= each->bytes &&
            address - each->address <= each->bytes - bytes)
            return true;
    return false;
}

/* --- mappings --------------------------------------------------------------------------------- */

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER();
    /* "offset: currently must be zero" */
    if (flags != 0 || bytes == 0 || offset != 0 || !is_granular(bytes) || !is_granular(address))
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    struct allocation *allocation = find(handle);
    if (allocation == NULL || bytes != allocation->bytes || !is_reserved(address, bytes) ||
        is_anything_mapped(address, bytes))
        return unlock(CUDA_ERROR_INVALID_VALUE);
    struct region *region = space_map(address, bytes, allocation->descriptor, offset);
    if (region == NULL)
        return unlock(CUDA_ERROR_OUT_OF_MEMORY);
    region->kind = REGION_VMM;
    region->ordinal = allocation->ordinal;
    region->owner = allocation;
    allocation->mappings++;
    return unlock(CUDA_SUCCESS);
}

/* "cuMemUnmap cannot unmap a sub-range"; several mappings at once are not promised either. */
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER();
    lock();
    struct region *region = space_find(address);
    if (region == NULL || region->kind != REGION_VMM || region->address != address ||
        region->bytes != bytes)
        return unlock(CUDA_ERROR_INVALID_VALUE);
    struct allocation *allocation = region->owner;
    space_unmap(region);
    allocation->mappings--;
    drop_when_unused(allocation);
    return unlock(CUDA_SUCCESS);
}

/* --- rights ----------------------------------------------------------------------------------- */

static bool is_access(int flags) {
    return flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
           flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

static CUresult check_access(const struct region *region, const CUmemAccessDesc *wanted,
                             size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (wanted[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_access(wanted[i].flags))
            return CUDA_ERROR_INVALID_VALUE;
        int ordinal = wanted[i].location.id;
        if (device_at(ordinal) == NULL)
            return CUDA_ERROR_INVALID_DEVICE;
        if (ordinal != region->ordinal && !devices_are_peers(ordinal, region->ordinal))
            return CUDA_ERROR_INVALID_DEVICE;
    }
    return CUDA_SUCCESS;
}

/* "The range must be a fully mapped address range containing all allocations": whole mappings,
 * without a gap. */
static CUresult check_range(uint64_t address, uint64_t bytes, const CUmemAccessDesc *wanted,
                            size_t count) {
    for (uint64_t end = address + bytes; address < end;) {
        const struct region *region = space_find(address);
        if (region == NULL || region->kind != REGION_VMM || region->address != address ||
            region->bytes > end - address)
            return CUDA_ERROR_INVALID_VALUE;
        CUresult result = check_access(region, wanted, count);
        if (result != CUDA_SUCCESS)
            return result;
        address += region->bytes;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *wanted,
                               size_t count) {
    ENTER();
    if (bytes == 0 || address + bytes < address || wanted == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    CUresult result = check_range(address, bytes, wanted, count);
    if (result != CUDA_SUCCESS)
        return unlock(result);
    for (uint64_t end = address + bytes; address < end;) {
        struct region *region = space_find(address);
        for (size_t i = 0; i < count; i++)
            region->access[wanted[i].location.id] = (unsigned char)wanted[i].flags;
        space_protect(region);
        address += region->bytes;
    }
    return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                               CUdeviceptr address) {
    ENTER();
    if (flags == NULL || location == NULL || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (device_at(location->id) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    lock();
    const struct region *region = space_find(address);
    if (region == NULL || region->kind != REGION_VMM)
        return unlock(CUDA_ERROR_INVALID_VALUE);
    *flags = region->access[location->id];
    return unlock(CUDA_SUCCESS);
}

/* --- counts ----------------------------------------------------------------------------------- */

unsigned memory_handles(void) {
    unsigned count = 0;
    lock();
    for (struct allocation *each = allocations; each != NULL; each = each->next)
        count += each->references;
    unlock(CUDA_SUCCESS);
    return count;
}

unsigned memory_reservations(void) {
    unsigned count = 0;
    lock();
    for (struct reservation *each = reservations; each != NULL; each = each->next)
        count++;
    unlock(CUDA_SUCCESS);
    return count;
}

void memory_reset(void) {
    lock();
    for (struct allocation *next; allocations != NULL; allocations = next) {
        next = allocations->next;
        close(allocations->descriptor);
        free(allocations);
    }
    for (struct reservation *next; reservations != NULL; reservations = next) {
        next = reservations->next;
        free(reservations);
    }
    unlock(CUDA_SUCCESS);
}
