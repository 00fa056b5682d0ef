/* op.h - a row of the operation table: one per operation of both planes.
 *
 * Dispatch, size checks, statistics, --list-ops and the protocol tests walk the table.  A data
 * thread gets it when it is set up: it knows no operation by name.
 */
#ifndef KV_KVSERVER_STORE_SHARD_OP_H
#define KV_KVSERVER_STORE_SHARD_OP_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_control_call;
struct kvs_shard;
struct kvs_request;

enum kvs_op_flags {
    KVS_OP_NEEDS_SESSION = 1 << 0, /* names a session; checked before begin() */
    KVS_OP_TAKES_BULK = 1 << 1,    /* its data may come by bulk */
    KVS_OP_WRITES = 1 << 2,        /* refused while draining */
    KVS_OP_KEEPS_BODY = 1 << 3,    /* needs its body after begin() or aligned: copied first */
};

struct kvs_op_type {
    const char *name;    /* as in logs, statistics and --list-ops */
    const char *summary; /* one line */
    uint32_t flags;
    uint32_t body_min;     /* smallest body accepted */
    uint32_t fixed_bytes;  /* of the body, before the units that it names */
    const char *waits_for; /* in words, for one that waited too long; NULL: rows */

    /* What the operation keeps for a data thread, data->op_state[op].  open: NULL if there is
     * no memory; the thread's segment store, objects and index are there already.  Both may be NULL. */
    void *(*open)(struct kvs_shard *shard);
    void (*close)(void *state);

    /* Data plane, on the data thread.  begin: header and session are checked.  landed: the bulk
     * is where work->iov said.  discarded: it came and was not taken, as begin() wanted; NULL:
     * the answer leaves.  run: a slice of queued work; true while there is more.  wake:
     * rows came or went.  release: the request ends, however; undo what it holds on units. */
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
