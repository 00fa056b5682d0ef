/* call.h - kvc_call: one control operation on one node.
 *
 * A call is sent over the node's control transport (control.h), again if the node was busy, and
 * ends exactly once.
 *
 * Threads: the client's.  Memory: valid from kvc_call_begin() until `done` returns.
 */
#ifndef KV_CLIENT_CALL_H
#define KV_CLIENT_CALL_H

#include "client/due.h"
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

/* Reports the result of a control operation on one node.  On KV_OK, `reply` is the unpacked
 * reply, valid during the call; on any other status it is unchecked, and may be NULL.
 * call->owner is NULL if the operation has already ended. */
typedef void (*kvc_call_done_fn)(struct kvc_call *call,
                                 kv_status_t status,
                                 const struct ProtobufCMessage *reply,
                                 const char *detail);

struct kvc_call {
    struct kvc_list of_client;
    struct kv_client *client;
    struct kvc_node *node;
    struct kvc_owner *owner;    /* NULL: the library, or an operation that has ended */
    struct kv_session *session; /* for the handler; NULL once the handle is freed */
    struct kvc_list of_owner, of_session;
    kvc_call_done_fn done;
    enum kv_op_id id;
    uint64_t deadline_us;
    struct kvc_due resend; /* after KV_BUSY, or not sent yet: in client->resends */
    uint64_t retry_after_us;
    bool is_out;   /* the control transport has it */
    bool has_left; /* sent at least once */
    size_t packed_bytes;
    uint8_t packed[]; /* the message that it sends */
};

/* Begins a call; `done` reports its result.  Borrows `request`.  `owner` and `session` may be
 * NULL.  If it fails, `done` is not called. */
kv_status_t kvc_call_begin(struct kvc_node *node,
                           struct kvc_owner *owner,
                           struct kv_session *session,
                           enum kv_op_id id,
                           const struct ProtobufCMessage *request,
                           kvc_call_done_fn done);
/* The same with a deadline of its own, before its owner's: KV_DEADLINE is then not the owner's. */
kv_status_t kvc_call_begin_until(struct kvc_node *node,
                                 struct kvc_owner *owner,
                                 struct kv_session *session,
                                 enum kv_op_id id,
                                 const struct ProtobufCMessage *request,
                                 uint64_t deadline_us,
                                 kvc_call_done_fn done);
/* The same, with the owner's deadline: the call is sent at that time.  Fails with KV_UNREACHABLE if the
 * node is not connected now. */
kv_status_t kvc_call_begin_later(struct kvc_node *node,
                                 struct kvc_owner *owner,
                                 struct kv_session *session,
                                 enum kv_op_id id,
                                 const struct ProtobufCMessage *request,
                                 uint64_t at_us,
                                 kvc_call_done_fn done);
void kvc_calls_timers(struct kv_client *client);

/* Ends the calls to a lost node that wait to be sent again. */
void kvc_calls_lose(struct kvc_node *node);

/* Detaches the calls of an owner that has ended: their replies are ignored. */
void kvc_calls_disown(struct kvc_owner *owner);

/* Detaches the calls of a session whose handle is freed. */
void kvc_calls_forget_session(struct kv_session *session);

#endif
