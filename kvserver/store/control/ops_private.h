/* ops_private.h - what the control operations share.  Each handler validates its input before
 * it changes anything, sends commands to the data threads, and replies when all are carried
 * out.
 *
 *   ops_client.c    hello, goodbye
 *   ops_model.c     model
 *   ops_session.c   open, resume, close, renew, session
 *   ops_fork.c      fork, truncate
 *   ops_prefix.c    publish, match
 *   ops_keep.c      prefix
 *   ops_objects.c   objects
 *   ops_node.c      table, drain
 *   ops_verify.c    verify
 *   ops_save.c      save
 *
 * Threads: the control thread.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_OPS_PRIVATE_H
#define KV_KVSERVER_STORE_CONTROL_OPS_PRIVATE_H

#include "kvserver/store/control/control.h"
#include "proto/kvstore.pb-c.h"

/* ---- call.c ---- */

/* Returns the call's message, unpacked, to be freed by the caller with the function that
 * kvstore.pb-c.h has for its type.  If the message is malformed, replies so, which ends the call,
 * and returns NULL. */
void *kvs_call_unpack(struct kvs_control_call *call, const ProtobufCMessageDescriptor *type);

/* ---- ops_model.c ---- */

/* Returns the model with that fingerprint, or NULL. */
struct kvs_model *kvs_model_find(struct kvs_control *control,
                                 const struct kv_id128 *fingerprint);

/* ---- ops_session.c ---- */

/* Returns the session that the call names, and renews its lease.  Otherwise fails the call and
 * returns NULL. */
struct kvs_session *
kvs_session_of(struct kvs_control_call *call, uint32_t index, const ProtobufCBinaryData *token);
/* Returns the tenant's session of that id, for an operator, who has no token.  Otherwise fails the
 * call and returns NULL. */
struct kvs_session *kvs_session_of_id(struct kvs_control_call *call,
                                      const ProtobufCBinaryData *bytes);
/* Returns the lease in microseconds: the requested one, limited to the node's maximum. */
uint64_t kvs_lease_of(const struct kvs_control *control, uint32_t lease_ms);
struct kvs_command kvs_session_command(enum kvs_command_kind kind,
                                       const struct kvs_session *session);
/* Whether a request's placement can be one. */
bool kvs_is_placement(const Kvpb__Placement *placement);
/* Ends the call with a description of its session. */
void kvs_session_reply(struct kvs_control_call *call, bool with_schema);

/* ---- ops_prefix.c ---- */

/* Returns where the session's blocks are kept under their names. */
struct kvs_prefix_place kvs_session_prefix_place(const struct kvs_session *session);

#endif
