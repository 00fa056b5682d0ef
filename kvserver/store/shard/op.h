/* op.h - an entry of the operation table: one per operation, of both planes.
 *
 * Dispatch, size checks, statistics, --list-ops and the protocol tests use the table.  A data
 * thread gets it when it is set up, and knows no operation by name.
 */
#ifndef KV_KVSERVER_STORE_SHARD_OP_H
#define KV_KVSERVER_STORE_SHARD_OP_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_control_call;
struct kvs_shard;
struct kvs_request;

enum kvs_op_flags {
    KVS_OP_NEEDS_SESSION = 1 << 0, /* names a session; it is checked before begin() */
    KVS_OP_TAKES_BULK = 1 << 1,    /* its data may come as bulk */
    KVS_OP_WRITES = 1 << 2,        /* rejected while the node is draining */
    KVS_OP_KEEPS_BODY = 1 << 3,    /* needs its body aligned, or after begin(): it is copied
                                    * first */
    KVS_OP_RUNS_TO_END = 1 << 4,   /* once begun, it is run to its end before the next one of
                                    * its client and class: large data is under way, and at
                                    * work at the other end, while the next is gathered */
};

struct kvs_op_type {
    const char *name;    /* as in logs, statistics and --list-ops */
    const char *summary; /* one line */
    uint32_t flags;
    uint32_t body_min;     /* minimum body size accepted */
    uint32_t fixed_bytes;  /* of the body, before its list of units */
    const char *waits_for; /* for the message when waiting times out; NULL: rows */

    /* State of the operation on one data thread, shard->op_state[op].  takes() says how much
     * it takes of the thread's share of the memory: pages have the rest.  open() returns
     * NULL if there is no memory; the thread's segment store, objects and indexer exist by
     * then.  All may be NULL. */
    uint64_t (*takes)(uint64_t memory_bytes);
    void *(*open)(struct kvs_shard *shard);
    void (*close)(void *state);

    /* Data plane, on the data thread.
     *
     *   begin      the request's header and session have been checked
     *   received   the bulk has arrived in request->iov
     *   discarded  begin() chose to discard the bulk, and it has arrived; NULL: send the reply
     *   run        runs a slice of a queued request; returns true while there is more
     *   wake       rows were committed or removed
     *   release    the request ends for any reason: undo what it holds on units.  If it
     *              was in a list or queue, it still is.  May be called more than once */
    void (*begin)(struct kvs_request *request);
    void (*received)(struct kvs_request *request);
    void (*discarded)(struct kvs_request *request);
    bool (*run)(struct kvs_request *request);
    void (*wake)(struct kvs_request *request);
    void (*release)(struct kvs_request *request);

    /* Control plane, on the control thread. */
    void (*control)(struct kvs_control_call *call);
};

#endif
