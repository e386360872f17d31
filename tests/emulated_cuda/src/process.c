/* The process's part of the driver: cuInit, what every call checks first, and the tests' reset. */
#include <string.h>
#include <unistd.h>

#include "emulator.h"

struct process process;

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
/* 0 until cuInit. Read without the lock: in a forked child nothing may wait for a lock that a
 * thread of the parent held. */
static volatile pid_t initialised_in;
static volatile pid_t owner;

/* What the fixtures ask for in process.py; the order of the fields is theirs too. */
struct held {
    uint64_t handles, mappings, reservations, linear, imported, pinned, streams, events, contexts;
};

static CUresult initialise(void) {
    faults_read();
    if (!machine_read(&process.machine))
        return CUDA_ERROR_NO_DEVICE;
    process.visible_count = machine_visible(&process.machine, process.visible);
    return process.visible_count > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuInit(unsigned flags) {
    /* The real driver does not survive a fork either: it cannot be initialised again. */
    if (owner != 0 && owner != getpid())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&init_lock);
    CUresult result = CUDA_SUCCESS;
    if (initialised_in == 0) {
        result = initialise();
        if (result == CUDA_SUCCESS)
            result = faults_check("cuInit");
        if (result == CUDA_SUCCESS)
            initialised_in = owner = getpid();
    }
    pthread_mutex_unlock(&init_lock);
    return result;
}

CUresult process_enter(const char *call) {
    if (initialised_in == 0 || initialised_in != getpid())
        return CUDA_ERROR_NOT_INITIALIZED;
    return faults_check(call);
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    if (version == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

/* --- for tests inside one process ------------------------------------------------------------- */

EXPORT void trims_test_cuda_held(struct held *held) {
    memset(held, 0, sizeof *held);
    held->handles = memory_handles();
    held->reservations = memory_reservations();
    pthread_rwlock_rdlock(&space_lock);
    held->mappings = space_count(REGION_VMM);
    held->linear = space_count(REGION_LINEAR);
    held->imported = space_count(REGION_IMPORTED);
    pthread_rwlock_unlock(&space_lock);
    held->pinned = host_count();
    held->streams = streams_count();
    held->events = events_count();
    held->contexts = contexts_active();
}

/* The next cuInit reads the environment again. What is mapped stays mapped, because a tensor of a
 * failed test may still lie there. */
EXPORT void trims_test_cuda_reset(void) {
    streams_reset();
    contexts_reset();
    memory_reset();
    linear_reset();
    host_reset();
    pthread_mutex_lock(&init_lock);
    initialised_in = owner = 0;
    process.generation++;
    process.visible_count = 0;
    pthread_mutex_unlock(&init_lock);
}
