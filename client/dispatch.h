/* dispatch.h - what can go on, goes on: operations whose nodes are ready start, and connections
 * with credits turn sub-operations into requests.
 *
 * Threads: the client's.  Memory: none.
 */
#ifndef KV_CLIENT_DISPATCH_H
#define KV_CLIENT_DISPATCH_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kv_client;
struct kv_op;
struct kv_session;

/* Starts an operation whose fields are set.  Returns KV_OK: later failures are the operation's
 * result. */
kv_status_t kvc_op_submit(struct kv_op *op, struct kv_op **ret_op);

/* Begins entry `i` of a batch, and stores in it what came of that; returns the same. */
typedef kv_status_t (*kvc_begin_entry_fn)(struct kv_client *client,
                                          void *entries,
                                          size_t i,
                                          uint32_t deadline_ms);

/* Begins all entries before anything is sent, so that what goes to one data thread can leave
 * together.  Returns the first failure; the other entries are begun all the same. */
kv_status_t kvc_batch_begin(struct kv_client *client,
                            void *entries,
                            size_t n_entries,
                            uint32_t deadline_ms,
                            kvc_begin_entry_fn begin);

/* Returns KV_INVALID, with a message, for a session of another client. */
kv_status_t kvc_batch_takes(struct kv_client *client, const struct kv_session *session);

/* Starts the operation if its nodes are ready. */
void kvc_op_prepare(struct kv_op *op);

/* Advances every operation that can be advanced; called after something was begun. */
void kvc_client_dispatch(struct kv_client *client);

#endif
