/* events.h - what a node tells a reader of its events: which blocks it has got, and which are gone.
 *
 * A router that knows where blocks are sends a prompt to the node that has most of it.  The node
 * calls a sink, a table of functions in its configuration; kvserver's publishes to any number of
 * readers.  The events are those of vLLM's KV event feed, so that the routers that read
 * that one can read this one.
 *
 * An event is about one medium: a block that leaves memory and stays on disk is removed from the
 * one and not from the other.
 *
 * What the events say is at most what is there: a sink that loses one says `cleared` to its
 * readers, never less.
 *
 * Threads: the control thread calls the sink.  Memory: a sink copies what it keeps.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_EVENTS_H
#define KV_KVSERVER_STORE_CONTROL_EVENTS_H

#include "proto/kv_types.h"

#include <stdint.h>

enum {
    KVS_EVENT_BLOCKS_MAX = 1024 /* of one event; whoever has more calls several times */
};

enum kvs_medium {
    KVS_MEDIUM_CPU,  /* memory of the node */
    KVS_MEDIUM_DISK, /* not in memory */
};

/* Returns the medium's name in events. */
static inline const char *kvs_medium_name(enum kvs_medium medium)
{
    static const char *const names[] = {
        [KVS_MEDIUM_CPU] = "CPU",
        [KVS_MEDIUM_DISK] = "DISK",
    };

    return names[medium];
}

/* Consecutive blocks of a prompt that are there from now on, on all data threads that have units of
 * them.  Blocks in order may be told one by one: the sink joins what goes on from the last one. */
struct kvs_blocks_stored {
    const struct kv_id128 *names;  /* (n), parents before children */
    const struct kv_id128 *parent; /* of the first; NULL: it begins the prompt */
    const uint32_t *tokens; /* (n * KV_BLOCK_TOKENS); NULL: the session does not publish them */
    uint32_t n;             /* 1..KVS_EVENT_BLOCKS_MAX */
    uint32_t tenant;        /* whose they are; no other tenant can have them */
    enum kvs_medium medium;
};

/* Blocks that are there no more. */
struct kvs_blocks_removed {
    const struct kv_id128 *names; /* (n) in any order */
    uint32_t n;                   /* 1..KVS_EVENT_BLOCKS_MAX */
    uint32_t tenant;
    enum kvs_medium medium;
};

/* The functions return at once and cannot fail. */
struct kvs_event_sink {
    void (*stored)(void *arg, const struct kvs_blocks_stored *event);
    void (*removed)(void *arg, const struct kvs_blocks_removed *event);
    void (*cleared)(void *arg); /* no block is there any more, in any medium, of any tenant */
    void *arg;
};

#endif
