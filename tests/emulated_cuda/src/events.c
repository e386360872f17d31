/* Events: a point of a stream, remembered when it is recorded. Capture modes stand here too. */
#include <stdlib.h>

#include "streams.h"

#define CU_EVENT_FLAGS 7u
#define CU_EVENT_INTERPROCESS 4u

struct event {
    struct event *next;
    CUcontext context;
    struct point point;
};

static struct event *events; /* under streams_lock */

static struct event *find_event(CUevent handle) {
    for (struct event *each = events; each != NULL; each = each->next)
        if (each == handle)
            return each;
    return NULL;
}

EXPORT CUresult cuEventCreate(CUevent *handle, unsigned flags) {
    ENTER();
    CUcontext context;
    if (handle == NULL || (flags & ~CU_EVENT_FLAGS) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if ((flags & CU_EVENT_INTERPROCESS) != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = context_current(&context);
    struct event *event = result == CUDA_SUCCESS ? calloc(1, sizeof *event) : NULL;
    if (event == NULL)
        return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
    event->context = context;
    pthread_mutex_lock(&streams_lock);
    event->next = events;
    events = event;
    pthread_mutex_unlock(&streams_lock);
    *handle = event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
    ENTER();
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&streams_lock);
    for (struct event **link = &events; *link != NULL; link = &(*link)->next)
        if (*link == handle) {
            *link = handle->next;
            free(handle);
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

EXPORT CUresult cuEventRecord(CUevent event_handle, CUstream stream_handle) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&streams_lock);
    struct event *event = find_event(event_handle);
    struct stream *stream = streams_resolve(stream_handle, context);
    if (event == NULL || stream == NULL || event->context != context)
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (!streams_append(stream, (struct point){NULL, 0}, &event->point))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&streams_lock);
    return result;
}

/* The event may be of another context. */
EXPORT CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned flags) {
    ENTER();
    CUcontext context;
    struct point ignored;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS || flags > 1)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&streams_lock);
    struct event *event = find_event(event_handle);
    struct stream *stream = streams_resolve(stream_handle, context);
    if (event == NULL || stream == NULL)
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (!streams_append(stream, event->point, &ignored))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&streams_lock);
    return result;
}

EXPORT CUresult cuEventQuery(CUevent handle) {
    ENTER();
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&streams_lock);
    struct event *event = find_event(handle);
    if (event != NULL)
        result =
            streams_is_reached(event->point) ? context_check(event->context) : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&streams_lock);
    return result;
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
    ENTER();
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&streams_lock);
    struct event *event = find_event(handle);
    if (event != NULL) {
        CUcontext context = event->context;
        streams_wait(event->point);
        result = context_check(context);
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

unsigned events_count(void) {
    unsigned count = 0;
    pthread_mutex_lock(&streams_lock);
    for (struct event *each = events; each != NULL; each = each->next)
        count++;
    pthread_mutex_unlock(&streams_lock);
    return count;
}

void events_reset(void) {
    for (struct event *next; events != NULL; events = next) {
        next = events->next;
        free(events);
    }
}

/* --- capture ---------------------------------------------------------------------------------- */

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER();
    /* CU_STREAM_CAPTURE_MODE_GLOBAL, THREAD_LOCAL, RELAXED; nothing is captured here. */
    static _Thread_local int current = 0;
    if (mode == NULL || *mode < 0 || *mode > 2)
        return CUDA_ERROR_INVALID_VALUE;
    int previous = current;
    current = *mode;
    *mode = previous;
    return CUDA_SUCCESS;
}
