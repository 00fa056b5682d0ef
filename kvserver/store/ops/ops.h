/* ops.h - what the rows of the operation table (ops.c) call on the data plane: shard/op.h says
 * what each is asked for.
 *
 * Threads: the data thread.
 */
#ifndef KV_KVSERVER_STORE_OPS_OPS_H
#define KV_KVSERVER_STORE_OPS_OPS_H

#include "kvserver/store/shard/op.h"

/* ops/put.c */
void kv_op_put_begin(struct kv_work *work);
void kv_op_put_landed(struct kv_work *work);
void kv_op_put_wake(struct kv_work *work);
bool kv_op_put_run(struct kv_work *work);
void kv_op_put_release(struct kv_work *work);

/* ops/read.c */
void kv_op_read_begin(struct kv_work *work);
bool kv_op_read_run(struct kv_work *work);
void kv_op_read_wake(struct kv_work *work);

/* ops/index.c */
void kv_op_index_begin(struct kv_work *work);
bool kv_op_index_run(struct kv_work *work);
void kv_op_index_wake(struct kv_work *work);

/* ops/query.c */
void kv_op_query_begin(struct kv_work *work);
bool kv_op_query_run(struct kv_work *work);
void kv_op_query_wake(struct kv_work *work);
void kv_op_query_release(struct kv_work *work);

/* ops/object.c */
void kv_op_object_put_begin(struct kv_work *work);
void kv_op_object_put_landed(struct kv_work *work);
void kv_op_object_put_discarded(struct kv_work *work);
bool kv_op_object_put_run(struct kv_work *work);
void kv_op_object_get_begin(struct kv_work *work);
void kv_op_object_exists_begin(struct kv_work *work);
void kv_op_object_delete_begin(struct kv_work *work);
void kv_op_ping_begin(struct kv_work *work);

#endif
