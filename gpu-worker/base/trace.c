#include "gpu-worker/base/trace.h"

#include "kvserver/base/json.h"
#include "kvserver/base/log.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BUFFER_BYTES = 64 << 10,
};

static const struct {
    const char *name;
    unsigned n_lanes;
} tracks[KVW_TRACE_TRACKS] = {
    [KVW_TRACE_COMPUTE] = {"compute", 1},
    [KVW_TRACE_WAIT] = {"wait", 1},
    [KVW_TRACE_PUT] = {"put", KVW_TRACE_LANES},
    [KVW_TRACE_QUERY] = {"query", KVW_TRACE_LANES},
    [KVW_TRACE_FETCH] = {"fetch", KVW_TRACE_LANES},
    [KVW_TRACE_INDEX] = {"index", KVW_TRACE_LANES},
};

struct lane {
    bool is_named;
    uint64_t end_us; /* of its last span */
};

struct kvw_trace {
    FILE *file;
    bool has_events;
    bool has_failed;
    char *path;
    struct lane lanes[KVW_TRACE_TRACKS][KVW_TRACE_LANES];
    char buffer[BUFFER_BYTES];
};

/* Logs the first failed write; later spans are then dropped. */
static void look(struct kvw_trace *trace, bool failed)
{
    if (trace->has_failed || (!failed && !ferror(trace->file)))
        return;
    trace->has_failed = true;
    kv_log(KV_LOG_WARN, "trace: %s: %s: the trace is incomplete from here on", trace->path,
           strerror(errno));
}

/* Viewers show tracks as threads, in the order of their numbers. */
static unsigned thread_of(enum kvw_trace_track track, unsigned lane)
{
    return 1 + (unsigned)track * KVW_TRACE_LANES + lane;
}

static void begin_event(struct kvw_trace *trace, struct kv_json *json)
{
    fputs(trace->has_events ? "," : "[\n", trace->file);
    trace->has_events = true;
    kv_json_begin(json, trace->file);
}

static void
add_name(struct kvw_trace *trace, const char *what, unsigned thread, const char *name)
{
    struct kv_json json;

    begin_event(trace, &json);
    kv_json_text(&json, "name", what);
    kv_json_text(&json, "ph", "M");
    kv_json_number(&json, "pid", 1);
    kv_json_number(&json, "tid", thread);
    kv_json_object(&json, "args");
    kv_json_text(&json, "name", name);
    kv_json_object_end(&json);
    kv_json_end(&json);
}

kv_status_t kvw_trace_open(const char *path, struct kvw_trace **ret_trace)
{
    struct kvw_trace *trace = calloc(1, sizeof(*trace));
    kv_status_t status = KV_NO_MEMORY;

    if (trace == NULL || (trace->path = strdup(path)) == NULL)
        goto fail;
    status = KV_IO;
    trace->file = fopen(path, "we");
    if (trace->file == NULL)
        goto fail;
    setvbuf(trace->file, trace->buffer, _IOFBF, sizeof(trace->buffer));
    add_name(trace, "process_name", 0, "kvworker");
    *ret_trace = trace;
    return KV_OK;

fail:
    if (trace != NULL)
        free(trace->path);
    free(trace);
    return status;
}

/* Returns the first sub-track that was free when the span began. */
static unsigned
lane_for(const struct kvw_trace *trace, enum kvw_trace_track track, uint64_t begin)
{
    unsigned lane = 0;

    while (lane + 1 < tracks[track].n_lanes && trace->lanes[track][lane].end_us > begin)
        lane++;
    return lane;
}

static void name_lane(struct kvw_trace *trace, enum kvw_trace_track track, unsigned lane)
{
    char text[32];

    if (lane == 0)
        snprintf(text, sizeof(text), "%s", tracks[track].name);
    else
        snprintf(text, sizeof(text), "%s %u", tracks[track].name, lane + 1);
    add_name(trace, "thread_name", thread_of(track, lane), text);
    trace->lanes[track][lane].is_named = true;
}

void kvw_trace_span(struct kvw_trace *trace,
                    enum kvw_trace_track track,
                    const char *name,
                    uint64_t begin_us,
                    uint64_t end_us,
                    const struct kvw_trace_arg *args,
                    unsigned n_args)
{
    struct kv_json json;
    unsigned lane;

    if (trace == NULL || trace->has_failed)
        return;
    if (end_us < begin_us)
        end_us = begin_us;
    lane = lane_for(trace, track, begin_us);
    if (!trace->lanes[track][lane].is_named)
        name_lane(trace, track, lane);
    if (trace->lanes[track][lane].end_us < end_us)
        trace->lanes[track][lane].end_us = end_us;

    begin_event(trace, &json);
    kv_json_text(&json, "name", name);
    kv_json_text(&json, "cat", tracks[track].name);
    kv_json_text(&json, "ph", "X");
    kv_json_number(&json, "pid", 1);
    kv_json_number(&json, "tid", thread_of(track, lane));
    kv_json_number(&json, "ts", (double)begin_us);
    kv_json_number(&json, "dur", (double)(end_us - begin_us));
    if (n_args > 0) {
        kv_json_object(&json, "args");
        for (unsigned i = 0; i < n_args; i++)
            kv_json_number(&json, args[i].name, (double)args[i].value);
        kv_json_object_end(&json);
    }
    kv_json_end(&json);
    look(trace, false);
}

kv_status_t kvw_trace_close(struct kvw_trace *trace)
{
    kv_status_t status;

    if (trace == NULL)
        return KV_OK;
    fputs("]\n", trace->file);
    look(trace, false);
    if (fclose(trace->file) != 0)
        look(trace, true);
    status = trace->has_failed ? KV_IO : KV_OK;
    free(trace->path);
    free(trace);
    return status;
}
