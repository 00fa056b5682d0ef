/* length.h - asks the nodes of a session how many tokens are committed there.
 *
 * Threads: the client's.  Memory: none.
 */
#ifndef KV_CLIENT_OPS_LENGTH_H
#define KV_CLIENT_OPS_LENGTH_H

#include "client/call.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_op;
struct kv_session;

/* Asks all nodes of the session; `done` gets the reply of each, a Kvpb__SessionReply, with the
 * lengths of the layers if they are wanted and the node tells them.  The operation fails if a
 * request cannot be sent. */
void kvc_ask_lengths(struct kv_op *op,
                     struct kv_session *session,
                     bool with_layers,
                     kvc_call_done_fn done);

/* For `done`: lowers *least to the node's length.  Returns false if the operation has ended, or
 * fails now, because the node did not tell, or is not at the session's generation. */
bool kvc_take_length(const struct kvc_call *call,
                     kv_status_t status,
                     const struct ProtobufCMessage *message,
                     const char *detail,
                     uint32_t *least);

#endif
