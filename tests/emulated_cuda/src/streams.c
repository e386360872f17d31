/* Streams. Each is a queue with a thread of its own, so that a copy is really in flight after the
 * call that ordered it, and a missing synchronisation shows.
 *
 * Order between streams is a list of points that must be reached before an operation starts. The
 * legacy default stream waits for all blocking streams, and they wait for it.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "streams.h"

#define CU_STREAM_LEGACY ((CUstream)1)
#define CU_STREAM_NON_BLOCKING 1u

struct operation {
    struct operation *next;
    work run;
    void *argument;
    bool *is_done; /* set at the end, for one who waits */
    unsigned need_count;
    struct point needs[];
};

struct stream {
    struct stream *next;
    CUcontext context;
    bool is_default;
    bool is_blocking;
    bool is_closing; /* destroyed: its handle is void, what it was given is still done */
    bool has_thread;
    uint64_t submitted;
    uint64_t completed;
    struct operation *head, *tail;
};

pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t streams_changed = PTHREAD_COND_INITIALIZER;
/* Destroyed ones stay, because an event or an operation may name them; the reset frees them. */
static struct stream *streams;

/* --- the thread of a stream ------------------------------------------------------------------- */

bool streams_is_reached(struct point point) {
    return point.stream == NULL || point.stream->completed >= point.ticket;
}

static bool is_ready(const struct operation *operation) {
    for (unsigned i = 0; i < operation->need_count; i++)
        if (!streams_is_reached(operation->needs[i]))
            return false;
    return true;
}

/* Takes the lock away and gives it back. */
static void perform(struct stream *stream, struct operation *operation) {
    pthread_mutex_unlock(&streams_lock);
    /* After an illegal access nothing in this context runs any more. */
    bool is_poisoned = context_check(stream->context) == CUDA_ERROR_ILLEGAL_ADDRESS;
    bool is_wanted = operation->run != NULL && !is_poisoned;
    CUresult result = is_wanted ? operation->run(operation->argument) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        context_poison(stream->context, result);
    pthread_mutex_lock(&streams_lock);
}

static void *serve(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&streams_lock);
    for (;;) {
        struct operation *operation = stream->head;
        if (operation == NULL && stream->is_closing)
            break;
        if (operation == NULL || !is_ready(operation)) {
            pthread_cond_wait(&streams_changed, &streams_lock);
            continue;
        }
        perform(stream, operation);
        stream->head = operation->next;
        if (stream->head == NULL)
            stream->tail = NULL;
        stream->completed++;
        if (operation->is_done != NULL)
            *operation->is_done = true;
        free(operation->argument);
        free(operation);
        pthread_cond_broadcast(&streams_changed);
    }
    stream->has_thread = false;
    pthread_cond_broadcast(&streams_changed);
    pthread_mutex_unlock(&streams_lock);
    return NULL;
}

static bool start_thread(struct stream *stream) {
    pthread_t thread;
    sigset_t all, before;
    if (stream->has_thread)
        return true;
    /* The program's signal handlers belong on the program's threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    stream->has_thread = pthread_create(&thread, NULL, serve, stream) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (stream->has_thread)
        pthread_detach(thread);
    return stream->has_thread;
}

/* --- submitting; the lock is held ------------------------------------------------------------- */

static struct stream *new_stream(CUcontext context, bool is_default, bool is_blocking) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return NULL;
    stream->context = context;
    stream->is_default = is_default;
    stream->is_blocking = is_blocking;
    stream->next = streams;
    streams = stream;
    return stream;
}

static struct stream *default_stream(CUcontext context) {
    for (struct stream *each = streams; each != NULL; each = each->next)
        if (each->is_default && !each->is_closing && each->context == context)
            return each;
    return new_stream(context, true, false);
}

/* NULL when it is no stream of this context (any context: NULL). */
static struct stream *find_stream(CUstream handle, CUcontext context) {
    for (struct stream *each = streams; each != NULL; each = each->next)
        if (each == handle && !each->is_default && !each->is_closing &&
            (context == NULL || each->context == context))
            return each;
    return NULL;
}

struct stream *streams_resolve(CUstream handle, CUcontext context) {
    bool is_default = handle == NULL || handle == CU_STREAM_LEGACY;
    return is_default ? default_stream(context) : find_stream(handle, context);
}

/* Whether the rules of the legacy default stream make one wait for what the other has to do. */
static bool must_follow(const struct stream *one, const struct stream *other) {
    return one->context == other->context && other->completed < other->submitted &&
           ((one->is_default && other->is_blocking) || (one->is_blocking && other->is_default));
}

static struct operation *new_operation(const struct stream *stream, struct point event) {
    unsigned count = 1;
    for (struct stream *each = streams; each != NULL; each = each->next)
        count += must_follow(stream, each);
    struct operation *operation = calloc(1, sizeof *operation + count * sizeof *operation->needs);
    if (operation == NULL)
        return NULL;
    operation->needs[operation->need_count++] = event;
    for (struct stream *each = streams; each != NULL; each = each->next)
        if (must_follow(stream, each))
            operation->needs[operation->need_count++] = (struct point){each, each->submitted};
    return operation;
}

static struct operation *append(struct stream *stream, struct point event) {
    struct operation *operation = start_thread(stream) ? new_operation(stream, event) : NULL;
    if (operation == NULL)
        return NULL;
    if (stream->tail != NULL)
        stream->tail->next = operation;
    else
        stream->head = operation;
    stream->tail = operation;
    stream->submitted++;
    pthread_cond_broadcast(&streams_changed);
    return operation;
}

bool streams_append(struct stream *stream, struct point wanted, struct point *reached) {
    if (append(stream, wanted) == NULL)
        return false;
    *reached = (struct point){stream, stream->submitted};
    return true;
}

void streams_wait(struct point point) {
    while (!streams_is_reached(point))
        pthread_cond_wait(&streams_changed, &streams_lock);
}

static CUresult submit(CUstream handle, CUcontext context, work run, void *argument,
                       bool is_awaited) {
    bool is_done = false;
    struct stream *stream = streams_resolve(handle, context);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    struct operation *operation = append(stream, (struct point){NULL, 0});
    if (operation == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    operation->run = run;
    operation->argument = argument;
    if (!is_awaited)
        return CUDA_SUCCESS;
    operation->is_done = &is_done;
    while (!is_done)
        pthread_cond_wait(&streams_changed, &streams_lock);
    return CUDA_SUCCESS;
}

CUresult stream_submit(CUstream handle, work run, void *argument, bool is_awaited) {
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS) {
        free(argument);
        return result;
    }
    pthread_mutex_lock(&streams_lock);
    result = submit(handle, context, run, argument, is_awaited);
    pthread_mutex_unlock(&streams_lock);
    if (result != CUDA_SUCCESS)
        free(argument);
    return result == CUDA_SUCCESS && is_awaited ? context_check(context) : result;
}

/* --- streams ---------------------------------------------------------------------------------- */

EXPORT CUresult cuStreamCreate(CUstream *handle, unsigned flags) {
    ENTER();
    CUcontext context;
    if (handle == NULL || (flags & ~CU_STREAM_NON_BLOCKING) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&streams_lock);
    *handle = new_stream(context, false, (flags & CU_STREAM_NON_BLOCKING) == 0);
    pthread_mutex_unlock(&streams_lock);
    return *handle != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void close_stream(struct stream *stream) {
    stream->is_closing = true;
    pthread_cond_broadcast(&streams_changed);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    ENTER();
    pthread_mutex_lock(&streams_lock);
    struct stream *stream = find_stream(handle, NULL);
    if (stream != NULL)
        close_stream(stream);
    pthread_mutex_unlock(&streams_lock);
    return stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    ENTER();
    /* An empty operation, so that the default stream's peculiar order holds here too. */
    return stream_submit(handle, NULL, NULL, true);
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    ENTER();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&streams_lock);
    struct stream *stream = streams_resolve(handle, context);
    if (stream == NULL)
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (stream->completed < stream->submitted)
        result = CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&streams_lock);
    return result;
}

CUresult streams_synchronize(CUcontext context) {
    pthread_mutex_lock(&streams_lock);
    /* New ones are put in front: the rest of the list stays as it is while we wait. */
    for (struct stream *each = streams; each != NULL; each = each->next)
        if (each->context == context)
            streams_wait((struct point){each, each->submitted});
    pthread_mutex_unlock(&streams_lock);
    return context_check(context);
}

/* Of a context, or of all (NULL); the lock is held. */
static void close_streams(CUcontext context) {
    for (struct stream *each = streams; each != NULL; each = each->next)
        if (context == NULL || each->context == context)
            close_stream(each);
    for (struct stream *each = streams; each != NULL; each = each->next)
        while ((context == NULL || each->context == context) && each->has_thread)
            pthread_cond_wait(&streams_changed, &streams_lock);
}

void streams_destroy(CUcontext context) {
    pthread_mutex_lock(&streams_lock);
    close_streams(context);
    pthread_mutex_unlock(&streams_lock);
}

unsigned streams_count(void) {
    unsigned count = 0;
    pthread_mutex_lock(&streams_lock);
    for (struct stream *each = streams; each != NULL; each = each->next)
        count += !each->is_default && !each->is_closing;
    pthread_mutex_unlock(&streams_lock);
    return count;
}

void streams_reset(void) {
    pthread_mutex_lock(&streams_lock);
    close_streams(NULL);
    for (struct stream *next; streams != NULL; streams = next) {
        next = streams->next;
        free(streams);
    }
    events_reset();
    pthread_mutex_unlock(&streams_lock);
}
