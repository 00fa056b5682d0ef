/* control_message.h - the carrier of control operations that sends them as messages.
 *
 * They go to "loopback:HEX", HEX being the address of the node's control port, over the client's
 * own port; answers come there too, told from those to trips by their ids.
 *
 * Threads: the client's.  Memory: a carrier's until it is closed, messages' until the transport
 * has let go of them.
 */
#ifndef KV_CLIENT_CONTROL_MESSAGE_H
#define KV_CLIENT_CONTROL_MESSAGE_H

#include "client/control.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_client;

/* A row for kv_client_setup.open_control. */
kv_status_t kv_control_message_open(struct kv_client *client,
                                    uint32_t node,
                                    const char *address,
                                    struct kv_control **ret_control);

/* Whether a call waits for this answer, by id, op and client_token. */
bool kv_control_message_awaits(const struct kv_control *control,
                               const struct kv_wire_header *header);

/* An answer that came to the client's port.  Borrows all. */
void kv_control_message_reply(struct kv_control *control,
                              const struct kv_wire_header *header,
                              const uint8_t *body);
extern const struct kv_control_row kv_control_message_row;

/* After the port has closed: frees requests that the transport held. */
void kv_control_message_fini(struct kv_client *client);

#endif
