/* ops_private.h - what the operations of the control plane share.  Each checks everything that
 * came from outside before it changes anything, asks the data threads, and answers when they
 * have.
 *
 *   ops_client.c    hello, goodbye
 *   ops_model.c     model
 *   ops_session.c   open, resume, close, renew, session
 *   ops_fork.c      fork, truncate
 *   ops_node.c      table, drain
 *
 * Threads: the control thread.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_OPS_PRIVATE_H
#define KV_KVSERVER_STORE_CONTROL_OPS_PRIVATE_H

#include "kvserver/store/control/control.h"

/* ---- ops_model.c ---- */

/* NULL: there is none. */
struct kvs_model *kvs_model_find(struct kvs_control *control,
                                 const struct kv_id128 *fingerprint);

/* ---- ops_session.c ---- */

/* The session that the call names.  NULL: it may not have it now, and the call has ended. */
struct kvs_session *
kvs_session_of(struct kvs_control_call *call, uint32_t index, const ProtobufCBinaryData *token);
/* In microseconds: what was asked for, and at most what the node grants. */
uint64_t kvs_lease_of(const struct kvs_control *control, uint32_t lease_ms);
struct kvs_command kvs_session_command(enum kvs_command_kind kind,
                                       const struct kvs_session *session);
/* Ends the call with what there is to say of its session. */
void kvs_session_reply(struct kvs_control_call *call, bool with_schema);

#endif
