/* The device's part of the address space: which file is mapped where, with which rights.
 *
 * Reserved space is a mapping without rights; a region put over it is shared memory of the
 * allocation's file. Nothing of it survives a fork: the real driver's addresses mean nothing in a
 * child, and a child must not keep device memory alive by accident.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulator.h"

pthread_rwlock_t space_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct region *regions;

struct region *space_first(void) {
    return regions;
}

struct region *space_find(uint64_t address) {
    for (struct region *each = regions; each != NULL; each = each->next)
        if (address >= each->address && address - each->address < each->bytes)
            return each;
    return NULL;
}

static int permitted(const struct region *region) {
    int most = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    for (int i = 0; i < MAX_DEVICES; i++)
        if (region->access[i] > most)
            most = region->access[i];
    return most;
}

/* Linear memory needs no rights: peer access to it is a matter of contexts, which is not modelled. */
static int permitted_to(const struct region *region, int ordinal) {
    return region->kind == REGION_VMM ? region->access[ordinal] : permitted(region);
}

/* A range may run over several regions that lie back to back. */
enum reach space_reach(uint64_t address, uint64_t bytes, bool is_write, int ordinal) {
    enum reach reach = REACH_ALLOWED;
    int needed = is_write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    if (address + bytes < address)
        return REACH_UNMAPPED;
    for (uint64_t end = address + bytes; address < end;) {
        const struct region *region = space_find(address);
        if (region == NULL)
            return REACH_UNMAPPED;
        if (permitted_to(region, ordinal) < needed)
            reach = REACH_FORBIDDEN;
        address = region->address + region->bytes;
    }
    return reach;
}

/* Put in place of whatever is there; every new mapping needs the advice again. */
static bool place(uint64_t address, uint64_t bytes, int flags, int descriptor, uint64_t offset) {
    void *wanted = (void *)(uintptr_t)address;
    if (mmap(wanted, bytes, PROT_NONE, flags | MAP_FIXED, descriptor, (off_t)offset) == MAP_FAILED)
        return false;
    madvise(wanted, bytes, MADV_DONTFORK);
    madvise(wanted, bytes, MADV_DONTDUMP);
    return true;
}

static bool place_nothing(uint64_t address, uint64_t bytes) {
    return place(address, bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

uint64_t space_reserve(uint64_t bytes, uint64_t alignment, uint64_t hint) {
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    uint64_t larger = bytes + alignment;
    if (larger < bytes)
        return 0;
    void *start = mmap((void *)(uintptr_t)hint, larger, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return 0;
    uint64_t first = (uint64_t)(uintptr_t)start;
    uint64_t address = (first + alignment - 1) / alignment * alignment;
    if (address > first)
        munmap(start, address - first);
    if (first + larger > address + bytes)
        munmap((void *)(uintptr_t)(address + bytes), first + larger - (address + bytes));
    place_nothing(address, bytes);
    return address;
}

struct region *space_map(uint64_t address, uint64_t bytes, int descriptor, uint64_t offset) {
    struct region *region = calloc(1, sizeof *region);
    if (region == NULL || !place(address, bytes, MAP_SHARED, descriptor, offset)) {
        free(region);
        return NULL;
    }
    region->address = address;
    region->bytes = bytes;
    region->next = regions;
    regions = region;
    return region;
}

void space_protect(const struct region *region) {
    int access = permitted(region), protection = PROT_NONE;
    if (access >= CU_MEM_ACCESS_FLAGS_PROT_READ)
        protection = PROT_READ;
    if (access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        protection = PROT_READ | PROT_WRITE;
    mprotect((void *)(uintptr_t)region->address, region->bytes, protection);
}

void space_unmap(struct region *region) {
    for (struct region **link = &regions; *link != NULL; link = &(*link)->next)
        if (*link == region) {
            *link = region->next;
            break;
        }
    place_nothing(region->address, region->bytes);
    free(region);
}

void space_release(uint64_t address, uint64_t bytes) {
    munmap((void *)(uintptr_t)address, bytes);
}

unsigned space_count(enum region_kind kind) {
    unsigned count = 0;
    for (struct region *each = regions; each != NULL; each = each->next)
        count += each->kind == kind;
    return count;
}

void space_forget(void) {
    for (struct region *next; regions != NULL; regions = next) {
        next = regions->next;
        free(regions);
    }
}
