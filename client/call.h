/* call.h - kvc_call: one control operation on one node.
 *
 * A call goes to the node's control transport (control.h), again when the node was busy, and ends once.
 *
 * Threads: the client's.  Memory: from kvc_call_begin() until its handler has returned.
 */
#ifndef KV_CLIENT_CALL_H
#define KV_CLIENT_CALL_H

#include "client/list.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvc_call;
struct ProtobufCMessage;
struct kv_client;
struct kvc_node;
struct kvc_owner;
struct kv_session;

/* How a control operation on one node ended.  KV_OK: `reply` is the unpacked reply, whose
 * outcome is KV_OK, lent for the call.  call->owner is NULL if the operation has ended before. */
typedef void (*kvc_call_done_fn)(struct kvc_call *call,
                                 kv_status_t status,
                                 const struct ProtobufCMessage *reply,
                                 const char *detail);

struct kvc_call {
    struct kvc_list of_client;
    struct kv_client *client;
    struct kvc_node *node;
    struct kvc_owner *owner;    /* NULL: the library, or one that has ended */
    struct kv_session *session; /* for the handler; NULL once the handle is freed */
    kvc_call_done_fn done;
    enum kv_op_id id;
    uint64_t deadline_us;
    uint64_t resend_us; /* KV_BUSY was the answer */
    uint64_t retry_after_us;
    bool is_out;   /* with the control transport */
    bool has_left; /* once, at least */
    size_t request_bytes;
    uint8_t request[];
};

/* Borrows `request`.  `owner` and `session` may be NULL.  Nothing is called on failure. */
kv_status_t kvc_call_begin(struct kvc_node *node,
                           struct kvc_owner *owner,
                           struct kv_session *session,
                           enum kv_op_id id,
                           const struct ProtobufCMessage *request,
                           kvc_call_done_fn done);
void kvc_calls_timers(struct kv_client *client);

/* The node is lost: ends the calls that wait for another try. */
void kvc_calls_lose(struct kvc_node *node);

/* The owner has ended: its calls are nobody's. */
void kvc_calls_disown(struct kv_client *client, const struct kvc_owner *owner);

#endif
