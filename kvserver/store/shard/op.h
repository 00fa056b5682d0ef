/* op.h - a row of the operation table: one per operation of both planes.
 *
 * Dispatch, size checks, statistics, --list-ops and the protocol tests walk the table.  A data
 * thread gets it when it is set up: it knows no operation by name.
 */
#ifndef KV_KVSERVER_STORE_SHARD_OP_H
#define KV_KVSERVER_STORE_SHARD_OP_H

#include <stdbool.h>
#include <stdint.h>

struct kv_control_call;
struct kv_data;
struct kv_work;

enum kv_op_flags {
    KV_OP_NEEDS_SESSION = 1 << 0, /* names a session; checked before begin() */
    KV_OP_TAKES_BULK = 1 << 1,    /* its data may come by bulk */
    KV_OP_WRITES = 1 << 2,        /* refused while draining */
    KV_OP_KEEPS_BODY = 1 << 3,    /* needs its body after begin() or aligned: copied first */
};

struct kv_op_row {
    const char *name;    /* as in logs, statistics and --list-ops */
    const char *summary; /* one line */
    uint32_t flags;
    uint32_t body_min;     /* smallest body accepted */
    uint32_t fixed_bytes;  /* of the body, before the units that it names */
    const char *waits_for; /* in words, for one that waited too long; NULL: rows */

    /* What the operation keeps for a data thread, data->op_state[op].  open: NULL if there is
     * no memory; the thread's heap, objects and index are there already.  Both may be NULL. */
    void *(*open)(struct kv_data *data);
    void (*close)(void *state);

    /* Data plane, on the data thread.  begin: header and session are checked.  landed: the bulk
     * is where work->iov said.  discarded: it came and was not taken, as begin() wanted; NULL:
     * the answer leaves.  run: a slice of queued work; true while there is more.  wake:
     * rows came or went.  release: the work ends, however; undo what it holds on units. */
    void (*begin)(struct kv_work *work);
    void (*landed)(struct kv_work *work);
    void (*discarded)(struct kv_work *work);
    bool (*run)(struct kv_work *work);
    void (*wake)(struct kv_work *work);
    void (*release)(struct kv_work *work);

    /* Control plane, on the control thread. */
    void (*control)(struct kv_control_call *call);
};

#endif
