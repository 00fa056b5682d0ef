/* session_catchup.h - the log of forks and truncates, and how nodes that missed one catch up.
 *
 * A lagging node is sent the entries that it missed before the session uses it.
 *
 * Threads: the client's.  Memory: none.
 */
#ifndef KV_CLIENT_SESSION_CATCHUP_H
#define KV_CLIENT_SESSION_CATCHUP_H

#include "client/call.h"
#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>

struct kv_session;
struct kvc_log_entry;
struct kvc_node;
struct kvc_owner;

/* Returns KV_OK if the session can use the node, KV_IN_PROGRESS while the node catches up, or a
 * failure; `detail` then says why. */
kv_status_t kvc_session_ready(struct kv_session *session,
                              struct kvc_node *node,
                              char *detail,
                              size_t detail_bytes);

/* Whether a call is one of those that bring a node up to the session's generation. */
bool kvc_call_catches_up(const struct kvc_call *call);

/* Adds an entry to the log.  Returns false if it is full. */
bool kvc_session_log(struct kv_session *session, const struct kvc_log_entry *entry);
void kvc_session_trim(struct kv_session *session);

/* Sends one lifecycle operation to one node. */
kv_status_t kvc_log_entry_send(struct kv_session *session,
                               struct kvc_node *node,
                               struct kvc_owner *owner,
                               const struct kvc_log_entry *entry,
                               kvc_call_done_fn done);

#endif
