/* background.h - work that nobody waits for, or waits patiently: one row for each kind.
 *
 * A data thread gets the table when it is set up.  Where no request has a slice to do, and after
 * every few slices of requests, the first row that has something to do does a slice of it: the
 * order of the rows is the order of service.
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
    uint32_t every; /* it has one turn in so many; 1: all of them */

    /* What it keeps for a data thread.  open: NULL if there is no memory; the thread's segment store,
     * objects and sessions are there already.  Without them, `state` is NULL. */
    void *(*open)(struct kvs_shard *shard, const struct kvs_shard_setup *setup);
    void (*close)(void *state);

    /* A slice; false: there is nothing to do. */
    bool (*step)(struct kvs_shard *shard, void *state);

    /* Sets its gauges in data->stats.  May be NULL. */
    void (*tell)(struct kvs_shard *shard, const void *state);
};

#endif
