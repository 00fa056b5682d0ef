/* trace.h - when what was under way, as Chrome trace events: a file for Perfetto
 * (ui.perfetto.dev) or chrome://tracing.
 *
 * A span is one event of the JSON array format, with a beginning and a length.  Every kind of
 * work has a track.  Viewers want the spans of a track to nest or to lie behind each other;
 * what the store is asked for overlaps, so its tracks have lanes, and a span goes to the first
 * lane that was free when it began: "query", "query 2", ...
 *
 *     kv_trace_span(trace, KV_TRACE_QUERY, "query", times.begun_us, times.arrived_us,
 *                   (struct kv_trace_arg[]){{"layer", layer}, {"rows", n_rows}}, 2);
 *
 * Times are microseconds of any one clock.  A file that ends without kv_trace_close() lacks its
 * last bracket, which viewers do not mind.
 *
 * Threads: one at a time.  Memory: open/close; a buffer of fixed size, written when it is full.
 */
#ifndef KV_GPU_WORKER_BASE_TRACE_H
#define KV_GPU_WORKER_BASE_TRACE_H

#include "proto/kv_status.h"

#include <stdint.h>

/* The first two are of one thread that waits for what it does not compute: their spans nest. */
enum kv_trace_track {
    KV_TRACE_COMPUTE,
    KV_TRACE_WAIT,
    KV_TRACE_PUT,
    KV_TRACE_QUERY,
    KV_TRACE_FETCH,
    KV_TRACE_INDEX,
    KV_TRACE_TRACKS,
};

enum {
    KV_TRACE_LANES = 16, /* of a track; what overlaps with more goes to the last */
};

struct kv_trace_arg {
    const char *name;
    int64_t value;
};

struct kv_trace;

/* A file that exists is overwritten.  KV_IO: it cannot be opened, errno says why;
 * KV_NO_MEMORY. */
kv_status_t kv_trace_open(const char *path, struct kv_trace **ret_trace);

/* Adds a span, at or behind the end of the ones before it on its track or around them.  What
 * ends before it begins has no length.  `trace` NULL: does nothing.  Borrows all. */
void kv_trace_span(struct kv_trace *trace,
                   enum kv_trace_track track,
                   const char *name,
                   uint64_t begin_us,
                   uint64_t end_us,
                   const struct kv_trace_arg *args,
                   unsigned n_args);

/* KV_IO: not all of it could be written; that was logged when it happened, and what came
 * behind was left out.  NULL is allowed. */
kv_status_t kv_trace_close(struct kv_trace *trace);

#endif
