/* Primary contexts, one for each visible device, and the stack of current contexts of each thread.
 *
 * The first retain makes a context and the last release destroys it, with its streams and what was
 * allocated with cuMemAlloc in it. Memory of cuMemCreate belongs to no context.
 */
#include <string.h>
#include <unistd.h>

#include "emulator.h"

#define MAX_DEPTH 64

struct context {
    unsigned references; /* active while not 0 */
    CUresult poison;     /* what every call says after an illegal access */
    int memory;          /* descriptor of the memory that the context itself takes, or -1 */
};

static struct context contexts[MAX_DEVICES];
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
/* A context is made only after the one before is gone, with its streams and memory. */
static pthread_mutex_t lifetimes_lock = PTHREAD_MUTEX_INITIALIZER;

static _Thread_local struct {
    unsigned generation;
    int depth;
    CUcontext stack[MAX_DEPTH];
} thread;

static int *thread_depth(void) {
    if (thread.generation != process.generation) {
        thread.generation = process.generation;
        thread.depth = 0;
    }
    return &thread.depth;
}

static CUcontext context_of(int ordinal) {
    return &contexts[ordinal];
}

static bool is_context(CUcontext context) {
    return context >= contexts && context < contexts + process.visible_count;
}

int context_device(CUcontext context) {
    return (int)(context - contexts);
}

CUresult context_check(CUcontext context) {
    if (!is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&contexts_lock);
    CUresult result = context->references == 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : context->poison;
    pthread_mutex_unlock(&contexts_lock);
    return result;
}

CUresult context_current(CUcontext *context) {
    int depth = *thread_depth();
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = thread.stack[depth - 1];
    return context_check(*context);
}

void context_poison(CUcontext context, CUresult why) {
    pthread_mutex_lock(&contexts_lock);
    if (context->poison == CUDA_SUCCESS)
        context->poison = why;
    pthread_mutex_unlock(&contexts_lock);
}

unsigned contexts_active(void) {
    unsigned count = 0;
    pthread_mutex_lock(&contexts_lock);
    for (int i = 0; i < MAX_DEVICES; i++)
        count += contexts[i].references != 0;
    pthread_mutex_unlock(&contexts_lock);
    return count;
}

/* --- primary contexts ------------------------------------------------------------------------- */

static CUresult create(CUcontext context, int ordinal) {
    char name[NAME_BYTES];
    uint64_t bytes = process.machine.context_bytes;
    bool is_exclusive = process.machine.is_exclusive && !process.machine.has_mps;
    memset(context, 0, sizeof *context);
    context->memory = -1;
    if (is_exclusive && registry_used(&process.machine, device_at(ordinal)->id, "context") > 0)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (is_exclusive && bytes == 0)
        bytes = 1; /* for others to see it */
    if (bytes == 0)
        return CUDA_SUCCESS;
    context->memory = registry_create(&process.machine, device_at(ordinal), "context", bytes, name);
    return context->memory < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* Without contexts_lock: the streams' threads may want to poison the context to the last. */
static void destroy(CUcontext context) {
    streams_destroy(context);
    linear_release_context(context_device(context));
    if (context->memory >= 0)
        close(context->memory);
    context->memory = -1;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal) {
    ENTER();
    if (context == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (device_at(ordinal) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    CUcontext found = context_of(ordinal);
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lifetimes_lock);
    pthread_mutex_lock(&contexts_lock);
    if (found->references == 0)
        result = create(found, ordinal);
    if (result == CUDA_SUCCESS) {
        found->references++;
        *context = found;
    }
    pthread_mutex_unlock(&contexts_lock);
    pthread_mutex_unlock(&lifetimes_lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    ENTER();
    if (device_at(ordinal) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    CUcontext context = context_of(ordinal);
    pthread_mutex_lock(&lifetimes_lock);
    pthread_mutex_lock(&contexts_lock);
    bool is_active = context->references > 0;
    bool is_last = is_active && --context->references == 0;
    pthread_mutex_unlock(&contexts_lock);
    if (is_last)
        destroy(context);
    pthread_mutex_unlock(&lifetimes_lock);
    return is_active ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
    ENTER();
    if (device_at(ordinal) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    CUcontext context = context_of(ordinal);
    pthread_mutex_lock(&lifetimes_lock);
    pthread_mutex_lock(&contexts_lock);
    bool is_active = context->references > 0;
    context->references = 0;
    pthread_mutex_unlock(&contexts_lock);
    if (is_active)
        destroy(context);
    pthread_mutex_unlock(&lifetimes_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned *flags, int *is_active) {
    ENTER();
    if (flags == NULL || is_active == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (device_at(ordinal) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&contexts_lock);
    *flags = 0;
    *is_active = context_of(ordinal)->references > 0;
    pthread_mutex_unlock(&contexts_lock);
    return CUDA_SUCCESS;
}

void contexts_reset(void) {
    for (int i = 0; i < MAX_DEVICES; i++) {
        pthread_mutex_lock(&contexts_lock);
        int memory = contexts[i].references > 0 ? contexts[i].memory : -1;
        memset(&contexts[i], 0, sizeof contexts[i]);
        pthread_mutex_unlock(&contexts_lock);
        if (memory >= 0)
            close(memory);
    }
}

/* --- the current context ---------------------------------------------------------------------- */

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER();
    if (context == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    int depth = *thread_depth();
    *context = depth > 0 ? thread.stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER();
    int *depth = thread_depth();
    if (context == NULL) {
        *depth -= *depth > 0;
        return CUDA_SUCCESS;
    }
    CUresult result = context_check(context);
    if (result != CUDA_SUCCESS)
        return result;
    *depth += *depth == 0;
    thread.stack[*depth - 1] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER();
    int *depth = thread_depth();
    CUresult result = context_check(context);
    if (result != CUDA_SUCCESS)
        return result;
    if (*depth == MAX_DEPTH)
        return CUDA_ERROR_OUT_OF_MEMORY;
    thread.stack[(*depth)++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER();
    int *depth = thread_depth();
    if (*depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    --*depth;
    if (context != NULL)
        *context = thread.stack[*depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER();
    CUcontext context;
    if (device == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_current(&context);
    if (result == CUDA_SUCCESS)
        *device = context_device(context);
    return result;
}

EXPORT CUresult cuCtxSynchronize(void) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    return result == CUDA_SUCCESS ? streams_synchronize(context) : result;
}

/* CUDA 13: of a context that need not be current; NULL means the current one. */
static CUresult choose(CUcontext given, CUcontext *context) {
    *context = given;
    return given == NULL ? context_current(context) : context_check(given);
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext given) {
    ENTER();
    CUcontext context;
    if (device == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = choose(given, &context);
    if (result == CUDA_SUCCESS)
        *device = context_device(context);
    return result;
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext given) {
    ENTER();
    CUcontext context;
    CUresult result = choose(given, &context);
    return result == CUDA_SUCCESS ? streams_synchronize(context) : result;
}
