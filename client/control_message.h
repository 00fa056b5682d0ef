/* control_message.h - the control transport that sends control operations as data messages.
 *
 * The node's address is "loopback:HEX", where HEX is the address of its control port.  Messages
 * are sent from the client's port; replies arrive there, too, and are recognized by their ids.
 *
 * Threads: the client's.  Memory: a control transport is valid until it is closed, a message
 * until the transport has released it.
 */
#ifndef KV_CLIENT_CONTROL_MESSAGE_H
#define KV_CLIENT_CONTROL_MESSAGE_H

#include "client/control.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_client;

/* Set in the ids of control messages, and in no request's id. */
#define KVC_CONTROL_ID_BIT (UINT64_C(1) << 63)

/* The low bits of the ids of all messages: the node's index above a slot, which is a request's in
 * the pool of requests, or counts a call's attempts. */
enum {
    KVC_ID_SLOT_BITS = 16,
    KVC_ID_NODE_BITS = 10,
};

/* For kvc_client_setup.open_control. */
kv_status_t kvc_control_message_open(struct kv_client *client,
                                     uint32_t node_index,
                                     const char *address,
                                     struct kvc_control **ret_control);

/* Whether a call waits for this reply: compares id, op and client_token. */
bool kvc_control_message_awaits(const struct kvc_control *control,
                                const struct kv_wire_header *header);

/* Handles a reply that arrived at the client's port.  Borrows its arguments. */
void kvc_control_message_reply(struct kvc_control *control,
                               const struct kv_wire_header *header,
                               const uint8_t *body);
extern const struct kvc_control_transport kvc_control_transport_messages;

/* Frees the messages that the transport had.  The port must be closed. */
void kvc_control_message_fini(struct kv_client *client);

#endif
