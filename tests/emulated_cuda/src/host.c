/* Host memory the driver knows: allocated pinned, or the program's own and registered. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulator.h"

#define HOST_ALLOC_FLAGS 7u
#define REGISTER_FLAGS 11u /* PORTABLE, DEVICEMAP, READ_ONLY; not IOMEMORY */
#define CU_MEMHOSTREGISTER_READ_ONLY 8u

struct range {
    struct range *next;
    uint64_t address;
    uint64_t bytes;
    bool is_allocated;
};

static struct range *ranges;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

static void add(struct range *range, uint64_t address, uint64_t bytes, bool is_allocated) {
    *range = (struct range){ranges, address, bytes, is_allocated};
    ranges = range;
}

/* Its size, or 0 when there is no such range. */
static uint64_t take(uint64_t address, bool is_allocated) {
    for (struct range **link = &ranges; *link != NULL; link = &(*link)->next) {
        struct range *each = *link;
        if (each->address != address || each->is_allocated != is_allocated)
            continue;
        uint64_t bytes = each->bytes;
        *link = each->next;
        free(each);
        return bytes;
    }
    return 0;
}

bool host_find(uint64_t address, uint64_t bytes, uint64_t *start, uint64_t *size) {
    bool is_found = false;
    pthread_mutex_lock(&ranges_lock);
    for (struct range *each = ranges; each != NULL && !is_found; each = each->next) {
        is_found = address >= each->address && bytes <= each->bytes &&
                   address - each->address <= each->bytes - bytes;
        *start = each->address;
        *size = each->bytes;
    }
    pthread_mutex_unlock(&ranges_lock);
    return is_found;
}

unsigned host_count(void) {
    unsigned count = 0;
    pthread_mutex_lock(&ranges_lock);
    for (struct range *each = ranges; each != NULL; each = each->next)
        count++;
    pthread_mutex_unlock(&ranges_lock);
    return count;
}

/* The memory stays: it may still be in use. */
void host_reset(void) {
    pthread_mutex_lock(&ranges_lock);
    for (struct range *next; ranges != NULL; ranges = next) {
        next = ranges->next;
        free(ranges);
    }
    pthread_mutex_unlock(&ranges_lock);
}

/* --- allocated -------------------------------------------------------------------------------- */

static CUresult allocate(void **address, size_t bytes) {
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (address == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct range *range = calloc(1, sizeof *range);
    void *memory = range == NULL ? MAP_FAILED
                                 : mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        free(range);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&ranges_lock);
    add(range, (uint64_t)(uintptr_t)memory, bytes, true);
    pthread_mutex_unlock(&ranges_lock);
    *address = memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    ENTER();
    return (flags & ~HOST_ALLOC_FLAGS) == 0 ? allocate(address, bytes) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocHost_v2(void **address, size_t bytes) {
    ENTER();
    return allocate(address, bytes);
}

EXPORT CUresult cuMemFreeHost(void *address) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    /* A copy in flight may use it. */
    if (result == CUDA_SUCCESS)
        result = streams_synchronize(context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&ranges_lock);
    uint64_t bytes = take((uint64_t)(uintptr_t)address, true);
    pthread_mutex_unlock(&ranges_lock);
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    munmap(address, bytes);
    return CUDA_SUCCESS;
}

/* --- registered ------------------------------------------------------------------------------- */

/* Whether pages for reading, or for writing too, are mapped without a gap. Pinning pages of a
 * mapping that may not be written fails in the kernel unless it is asked for reading alone. */
static bool is_accessible(uint64_t address, uint64_t bytes, bool is_write) {
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    uint64_t end = address + bytes;
    while (maps != NULL && address < end && fgets(line, sizeof line, maps) != NULL) {
        unsigned long first, last;
        char rights[5];
        if (sscanf(line, "%lx-%lx %4s", &first, &last, rights) != 3 || last <= address)
            continue;
        if (first > address || rights[0] != 'r' || (is_write && rights[1] != 'w'))
            break;
        address = last;
    }
    if (maps != NULL)
        fclose(maps);
    return address >= end;
}

static bool overlaps(uint64_t address, uint64_t bytes) {
    for (struct range *each = ranges; each != NULL; each = each->next)
        if (each->address < address + bytes && address < each->address + each->bytes)
            return true;
    return false;
}

EXPORT CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    ENTER();
    CUcontext context;
    uint64_t address = (uint64_t)(uintptr_t)memory;
    bool is_write = (flags & CU_MEMHOSTREGISTER_READ_ONLY) == 0;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (memory == NULL || bytes == 0 || address + bytes < address ||
        (flags & ~REGISTER_FLAGS) != 0 || !is_accessible(address, bytes, is_write))
        return CUDA_ERROR_INVALID_VALUE;
    struct range *range = calloc(1, sizeof *range);
    if (range == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&ranges_lock);
    bool is_free = !overlaps(address, bytes);
    if (is_free)
        add(range, address, bytes, false);
    else
        free(range);
    pthread_mutex_unlock(&ranges_lock);
    return is_free ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

EXPORT CUresult cuMemHostUnregister(void *memory) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&ranges_lock);
    uint64_t bytes = take((uint64_t)(uintptr_t)memory, false);
    pthread_mutex_unlock(&ranges_lock);
    return bytes > 0 ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
