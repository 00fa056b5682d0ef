/* transport_tap.h - a row of the table of transports that wraps the loopback and shows every
 * message that is sent.
 *
 * Its ports are numbered in the order in which they are opened, and the number is all that
 * their addresses say: "port-00".  So messages that carry addresses are the same in every run.
 *
 * Threads: one.  Memory: tap_open() / the row's close.
 */
#ifndef KV_TESTS_SUPPORT_TRANSPORT_TAP_H
#define KV_TESTS_SUPPORT_TRANSPORT_TAP_H

#include "kvserver/net/transport.h"

enum {
    TAP_PORTS_MAX = 16,
};

/* A message that was sent; its data is in two pieces.  Lent for the call. */
typedef void (*tap_fn)(void *arg,
                       unsigned from,
                       unsigned to,
                       const void *header,
                       size_t header_bytes,
                       const struct kv_iov data[2]);

kv_status_t tap_open(tap_fn sent, void *arg, struct kv_transport **ret_transport);

/* What connect() takes for the port of that number. */
enum {
    TAP_ADDRESS_BYTES = 8
};
void tap_address(unsigned number, char ret_address[TAP_ADDRESS_BYTES]);

#endif
