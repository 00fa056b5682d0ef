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
struct kv_session;

/* Starts an operation whose fields are set.  Returns KV_OK: later failures are the operation's
 * result. */
kv_status_t kvc_op_submit(struct kv_op *op, struct kv_op **ret_op);

/* Between the two, operations that are begun are not sent, so that what goes to one data thread
 * can leave together.  kvc_op_hold() is called before each begin, and fails with KV_INVALID for
 * a session of another client than the first. */
kv_status_t kvc_op_hold(struct kv_session *first, const struct kv_session *session);
void kvc_op_release_held(struct kv_client *client);

/* Starts the operation if its nodes are ready. */
void kvc_op_prepare(struct kv_op *op);

/* Advances every operation that can be advanced; called after something was begun. */
void kvc_client_dispatch(struct kv_client *client);

#endif
