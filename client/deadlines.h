/* deadlines.h - timers: deadlines of operations, resends, leases, lost nodes. */
#ifndef KV_CLIENT_DEADLINES_H
#define KV_CLIENT_DEADLINES_H

struct kv_op;
struct kv_client;

/* Ends an operation whose deadline has passed. */
void kvc_op_expire(struct kv_op *op);

/* Ends what is due, resends what is late, and sets the next timer. */
void kvc_client_timers(struct kv_client *client);

/* Excludes the time in which the caller did not poll from the nodes' timeouts. */
void kvc_client_forgive(struct kv_client *client);

#endif
