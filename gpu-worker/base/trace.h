/* trace.h - a timeline of computation and requests, as Chrome trace events: a file for Perfetto
 * (ui.perfetto.dev) or chrome://tracing.
 *
 * A span is one event of the JSON array format, with a beginning and a length.  Every kind of
 * work has a track.  Viewers require that spans of a track nest or follow each other;
 * requests to the store overlap, so their tracks have lanes, and a span goes to the first
 * lane that was free when it began: "query", "query 2", ...
 *
 *     kvw_trace_span(trace, KVW_TRACE_QUERY, "query", times.begun_us, times.arrived_us,
 *                   (struct kvw_trace_arg[]){{"layer", layer}, {"rows", n_rows}}, 2);
 *
 * Times are microseconds of any one clock.  A file that ends without kvw_trace_close() lacks
 * its last bracket, which viewers do not mind.
 *
 * Threads: one at a time.  Memory: open/close; a buffer of fixed size, written when it is full.
 */
#ifndef KV_GPU_WORKER_BASE_TRACE_H
#define KV_GPU_WORKER_BASE_TRACE_H

#include "proto/kv_status.h"

#include <stdint.h>

/* The first two are of one thread that waits for what it does not compute: their spans nest. */
enum kvw_trace_track {
    KVW_TRACE_COMPUTE,
    KVW_TRACE_WAIT,
    KVW_TRACE_PUT,
    KVW_TRACE_QUERY,
    KVW_TRACE_FETCH,
    KVW_TRACE_INDEX,
    KVW_TRACE_TRACKS,
};

enum {
    KVW_TRACE_LANES = 16, /* of a track; what overlaps with more goes to the last */
};

struct kvw_trace_arg {
    const char *name;
    int64_t value;
};

struct kvw_trace;

/* Creates the file, or overwrites it.  Fails with KV_IO, with errno set, or KV_NO_MEMORY. */
kv_status_t kvw_trace_open(const char *path, struct kvw_trace **ret_trace);

/* Adds a span.  It must begin after the earlier spans of its track have ended, or enclose them.
 * If end_us is before begin_us, its length is 0.  Does nothing if `trace` is NULL.  Borrows the
 * arguments. */
void kvw_trace_span(struct kvw_trace *trace,
                    enum kvw_trace_track track,
                    const char *name,
                    uint64_t begin_us,
                    uint64_t end_us,
                    const struct kvw_trace_arg *args,
                    unsigned n_args);

/* Writes the end of the file and closes it.  Fails with KV_IO if a write failed; that was
 * logged then, and later spans were dropped.  NULL is allowed. */
kv_status_t kvw_trace_close(struct kvw_trace *trace);

#endif
