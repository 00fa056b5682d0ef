/* background.h - background jobs: work that no request waits for, or that may take its time.
 * One table entry for each kind.
 *
 * A data thread gets the table when it is set up.  When no request has a slice to run, and
 * after every few slices of requests, the first entry that has something to do runs one slice:
 * the order of the table is the order of priority.
 */
#ifndef KV_KVSERVER_STORE_SHARD_BACKGROUND_H
#define KV_KVSERVER_STORE_SHARD_BACKGROUND_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_shard;
struct kvs_shard_setup;

enum {
    KVS_BACKGROUND_MAX = 8
};

struct kvs_background_row {
    uint32_t every; /* gets every n-th background turn; 1: all of them */

    /* A job's state on one data thread.  open() returns NULL if there is no memory; the
     * thread's segment store, objects and sessions exist by then.  If open is NULL, `state` is
     * NULL. */
    void *(*open)(struct kvs_shard *shard, const struct kvs_shard_setup *setup);
    void (*close)(void *state);

    /* Runs a slice.  Returns false if there is nothing to do. */
    bool (*step)(struct kvs_shard *shard, void *state);

    /* Updates its gauges in shard->stats.  May be NULL. */
    void (*tell)(struct kvs_shard *shard, const void *state);
};

#endif
