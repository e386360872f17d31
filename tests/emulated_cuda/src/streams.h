/* What streams.c and events.c share. */
#ifndef STREAMS_H
#define STREAMS_H

#include "emulator.h"

/* An operation of a stream by its number; it is reached when that operation is complete. */
struct point {
    struct stream *stream; /* NULL: reached from the start */
    uint64_t ticket;
};

/* One lock and one condition serve all streams of the process: simple, and quick enough here. */
extern pthread_mutex_t streams_lock;

/* With the lock held: */

/* The stream a handle means in a context, NULL when there is none. */
struct stream *streams_resolve(CUstream handle, CUcontext context);
/* Queue an empty operation that waits for a point; false without memory. */
bool streams_append(struct stream *stream, struct point wanted, struct point *reached);
bool streams_is_reached(struct point point);
void streams_wait(struct point point);
void events_reset(void);

#endif
