/* Copies and fills, on the streams.
 *
 * As with the real driver, whether the host's side is pinned decides when a call returns: a copy
 * from pageable memory has taken its bytes away on return, one to pageable memory is complete on
 * return, and only with pinned memory both sides are left alone until the stream gets there (CUDA
 * driver API, "API synchronization behavior"). An address that is not mapped is refused; one whose
 * rights do not allow the access poisons the context when the copy runs, as a fault of the copy
 * engine does.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "emulator.h"

struct copy {
    uint64_t target;
    uint64_t source; /* 0: the staged bytes, or a fill */
    uint64_t bytes;
    int ordinal; /* of the device whose stream it is on */
    bool is_target_device;
    bool is_source_device;
    bool is_fill;
    unsigned char value;
    unsigned char staged[];
};

static void rest(long ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) < 0)
        continue;
}

static void delay(void) {
    char held[PATH_MAX];
    snprintf(held, sizeof held, "%s/held", process.machine.directory);
    if (process.machine.copy_delay_ms > 0)
        rest(process.machine.copy_delay_ms);
    while (access(held, F_OK) == 0)
        rest(1);
}

/* Looked at again when the copy runs: it may have been unmapped in the meantime. */
static bool is_allowed(const struct copy *copy) {
    if (copy->is_target_device &&
        space_reach(copy->target, copy->bytes, true, copy->ordinal) != REACH_ALLOWED)
        return false;
    return !copy->is_source_device ||
           space_reach(copy->source, copy->bytes, false, copy->ordinal) == REACH_ALLOWED;
}

/* What an IOMMU in the way makes of a copy between devices. */
static bool is_lost(const struct copy *copy) {
    return process.machine.loses_peer_copies && copy->is_target_device && copy->is_source_device &&
           space_find(copy->target)->ordinal != space_find(copy->source)->ordinal;
}

static CUresult run(void *argument) {
    const struct copy *copy = argument;
    void *target = (void *)(uintptr_t)copy->target;
    CUresult result = CUDA_ERROR_ILLEGAL_ADDRESS;
    delay();
    /* Nothing is unmapped while bytes are moving. */
    pthread_rwlock_rdlock(&space_lock);
    if (is_allowed(copy)) {
        result = CUDA_SUCCESS;
        if (copy->is_fill)
            memset(target, copy->value, copy->bytes);
        else if (is_lost(copy))
            memset(target, 0xff, copy->bytes);
        else if (copy->source == 0)
            memcpy(target, copy->staged, copy->bytes);
        else
            memmove(target, (const void *)(uintptr_t)copy->source, copy->bytes);
    }
    pthread_rwlock_unlock(&space_lock);
    return result;
}

static bool is_mapped(uint64_t address, uint64_t bytes) {
    pthread_rwlock_rdlock(&space_lock);
    enum reach reach = space_reach(address, bytes, false, 0);
    pthread_rwlock_unlock(&space_lock);
    return reach != REACH_UNMAPPED;
}

static bool is_pinned(const void *host, uint64_t bytes) {
    uint64_t start, size;
    return host_find((uint64_t)(uintptr_t)host, bytes, &start, &size);
}

static CUresult submit(const struct copy *description, CUstream stream, const void *stage,
                       bool is_awaited) {
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t bytes = description->bytes;
    if ((description->is_target_device && !is_mapped(description->target, bytes)) ||
        (description->is_source_device && !is_mapped(description->source, bytes)))
        return CUDA_ERROR_INVALID_VALUE;
    struct copy *copy = malloc(sizeof *copy + (stage != NULL ? bytes : 0));
    if (copy == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = *description;
    copy->ordinal = context_device(context);
    if (stage != NULL)
        memcpy(copy->staged, stage, bytes);
    return stream_submit(stream, run, copy, is_awaited);
}

static CUresult to_device(CUdeviceptr target, const void *source, size_t bytes, CUstream stream,
                          bool is_awaited) {
    struct copy copy = {.target = target, .bytes = bytes, .is_target_device = true};
    if (source == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    bool is_staged = !is_awaited && !is_pinned(source, bytes);
    if (!is_staged)
        copy.source = (uint64_t)(uintptr_t)source;
    return submit(&copy, stream, is_staged ? source : NULL, is_awaited);
}

static CUresult to_host(void *target, CUdeviceptr source, size_t bytes, CUstream stream,
                        bool is_awaited) {
    struct copy copy = {.target = (uint64_t)(uintptr_t)target,
                        .source = source,
                        .bytes = bytes,
                        .is_source_device = true};
    if (target == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return submit(&copy, stream, NULL, is_awaited || !is_pinned(target, bytes));
}

static CUresult within_device(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream,
                              bool is_awaited) {
    struct copy copy = {.target = target,
                        .source = source,
                        .bytes = bytes,
                        .is_target_device = true,
                        .is_source_device = true};
    return submit(&copy, stream, NULL, is_awaited);
}

static CUresult fill(CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream,
                     bool is_awaited) {
    struct copy copy = {.target = target,
                        .bytes = bytes,
                        .is_target_device = true,
                        .is_fill = true,
                        .value = value};
    return submit(&copy, stream, NULL, is_awaited);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t bytes) {
    ENTER();
    return to_device(target, source, bytes, NULL, true);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t bytes,
                                     CUstream stream) {
    ENTER();
    return to_device(target, source, bytes, stream, false);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t bytes) {
    ENTER();
    return to_host(target, source, bytes, NULL, true);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t bytes,
                                     CUstream stream) {
    ENTER();
    return to_host(target, source, bytes, stream, false);
}

/* Between places in device memory even the call without "Async" does not wait. */
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
    ENTER();
    return within_device(target, source, bytes, NULL, false);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes,
                                     CUstream stream) {
    ENTER();
    return within_device(target, source, bytes, stream, false);
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                                  CUcontext source_context, size_t bytes, CUstream stream) {
    ENTER();
    CUresult result = context_check(target_context);
    if (result == CUDA_SUCCESS)
        result = context_check(source_context);
    if (result != CUDA_SUCCESS)
        return result;
    return within_device(target, source, bytes, stream, false);
}

/* Fills of device memory do not wait either. */
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t bytes) {
    ENTER();
    return fill(target, value, bytes, NULL, false);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t bytes,
                                CUstream stream) {
    ENTER();
    return fill(target, value, bytes, stream, false);
}
