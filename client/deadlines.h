/* deadlines.h - what ends by the clock. */
#ifndef KV_CLIENT_DEADLINES_H
#define KV_CLIENT_DEADLINES_H

struct kv_op;
struct kv_client;

/* Ends the operation by its deadline. */
void kvc_op_expire(struct kv_op *op);

/* Ends what is due, sends again what is late, and sets when to look next. */
void kvc_client_timers(struct kv_client *client);

/* Time in which the caller did not poll is not a node's silence. */
void kvc_client_forgive(struct kv_client *client);

#endif
