/* control_message.h - the control transport of control operations that sends them as messages.
 *
 * They go to "loopback:HEX", HEX being the address of the node's control port, over the client's
 * own port; answers come there too, told from those to requests by their ids.
 *
 * Threads: the client's.  Memory: a control transport's until it is closed, messages' until the transport
 * has let go of them.
 */
#ifndef KV_CLIENT_CONTROL_MESSAGE_H
#define KV_CLIENT_CONTROL_MESSAGE_H

#include "client/control.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_client;

/* A row for kvc_client_setup.open_control. */
kv_status_t kvc_control_message_open(struct kv_client *client,
                                     uint32_t node_index,
                                     const char *address,
                                     struct kvc_control **ret_control);

/* Whether a call waits for this answer, by id, op and client_token. */
bool kvc_control_message_awaits(const struct kvc_control *control,
                                const struct kv_wire_header *header);

/* An answer that came to the client's port.  Borrows all. */
void kvc_control_message_reply(struct kvc_control *control,
                               const struct kv_wire_header *header,
                               const uint8_t *body);
extern const struct kvc_control_transport kvc_control_transport_messages;

/* After the port has closed: frees requests that the transport held. */
void kvc_control_message_fini(struct kv_client *client);

#endif
