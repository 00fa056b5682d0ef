/* ops.h - the tables that a data thread is set up with: its operations (ops.c), whose functions
 * are declared here, and its background jobs (background.c).
 *
 * Threads: the data thread.
 */
#ifndef KV_KVSERVER_STORE_OPS_OPS_H
#define KV_KVSERVER_STORE_OPS_OPS_H

#include "kvserver/store/shard/background.h"
#include "kvserver/store/shard/op.h"
#include "kvserver/store/shard/shard.h"

/* (KV_OP_COUNT) by number; entries without a name are unused. */
extern const struct kvs_op_type kvs_ops[KV_OP_COUNT];

/* In order of priority. */
enum kvs_background_id {
    KVS_BACKGROUND_ROOM,
    KVS_BACKGROUND_OBJECTS,
    KVS_BACKGROUND_SCRUB,
    KVS_BACKGROUND_DISK,
    KVS_BACKGROUND_INDEX,
    KVS_BACKGROUND_RECALL,
    KVS_BACKGROUND_COUNT,
};

extern const struct kvs_background_row kvs_background[KVS_BACKGROUND_COUNT];

/* ops/put.c */
void kvs_op_put_begin(struct kvs_request *request);
void kvs_op_put_received(struct kvs_request *request);
void kvs_op_put_wake(struct kvs_request *request);
bool kvs_op_put_run(struct kvs_request *request);
void kvs_op_put_release(struct kvs_request *request);

/* ops/read.c */
void kvs_op_read_begin(struct kvs_request *request);
bool kvs_op_read_run(struct kvs_request *request);
void kvs_op_read_wake(struct kvs_request *request);

/* ops/index.c */
void *kvs_op_index_open(struct kvs_shard *shard);
void kvs_op_index_close(void *state);
void kvs_op_index_begin(struct kvs_request *request);
bool kvs_op_index_run(struct kvs_request *request);
void kvs_op_index_wake(struct kvs_request *request);

/* ops/query.c */
uint64_t kvs_op_query_takes(uint64_t memory_bytes);
void *kvs_op_query_open(struct kvs_shard *shard);
void kvs_op_query_close(void *state);
void kvs_op_query_begin(struct kvs_request *request);
bool kvs_op_query_run(struct kvs_request *request);
void kvs_op_query_wake(struct kvs_request *request);
void kvs_op_query_release(struct kvs_request *request);

/* ops/object.c */
void kvs_op_object_put_begin(struct kvs_request *request);
void kvs_op_object_put_received(struct kvs_request *request);
void kvs_op_object_put_discarded(struct kvs_request *request);
bool kvs_op_object_put_run(struct kvs_request *request);
void kvs_op_object_get_begin(struct kvs_request *request);
void kvs_op_object_get_wake(struct kvs_request *request);
void kvs_op_object_exists_begin(struct kvs_request *request);
void kvs_op_object_delete_begin(struct kvs_request *request);
void kvs_op_object_delete_wake(struct kvs_request *request);
void kvs_op_ping_begin(struct kvs_request *request);

#endif
