/* dispatch.h - what can go on, goes on: operations whose nodes are ready start, and connections
 * with credits turn sub-operations into requests.
 *
 * Threads: the client's.  Memory: none.
 */
#ifndef KV_CLIENT_DISPATCH_H
#define KV_CLIENT_DISPATCH_H

#include "proto/kv_status.h"

struct kv_client;
struct kv_op;

/* Starts an operation whose fields are set.  Returns KV_OK: later failures are the operation's
 * result. */
kv_status_t kvc_op_submit(struct kv_op *op, struct kv_op **ret_op);

/* Starts the operation if its nodes are ready. */
void kvc_op_prepare(struct kv_op *op);

/* Advances every operation that can be advanced; called after something was begun. */
void kvc_client_dispatch(struct kv_client *client);

#endif
