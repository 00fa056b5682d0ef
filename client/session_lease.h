/* session_lease.h - how a session stays on its nodes, and how it leaves one.
 *
 * Threads: the client's.  Memory: none.
 */
#ifndef KV_CLIENT_SESSION_LEASE_H
#define KV_CLIENT_SESSION_LEASE_H

#include <stdbool.h>
#include <stdint.h>

struct kv_client;
struct kv_id128;
struct kv_session;
struct kvc_call;
struct kvc_node;

/* Renews leases in the background. */
void kvc_sessions_timers(struct kv_client *client);

/* Sets when the lease of a session is renewed next, which has just been granted. */
void kvc_session_leased(struct kv_session *session);
/* The session has ended: nothing is renewed. */
void kvc_session_unleased(struct kv_session *session);

/* Whether a call is one that renews a lease in the background. */
bool kvc_call_renews(const struct kvc_call *call);

/* Closes a session on one node, best effort; the reply is ignored. */
void kvc_session_drop(struct kvc_node *node, uint32_t index, const struct kv_id128 *token);

/* Closes a session that only some of its nodes have opened: it is on none. */
void kvc_session_withdraw(struct kv_session *session);
/* The same, and frees its handle. */
void kvc_session_abandon(struct kv_session *session);

#endif
