/* peer.h - statuses and texts that a node sent: what the caller may be told of them.
 *
 * Threads: any.  Memory: none.
 */
#ifndef KV_CLIENT_PEER_H
#define KV_CLIENT_PEER_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

/* Formats why a reply is invalid.  Returns KV_CORRUPT. */
kv_status_t kvc_reply_refuse(char *detail, size_t detail_bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns a peer's status if it is a known failure, else KV_CORRUPT. */
kv_status_t kvc_peer_status(int32_t status);

/* Copies a peer's text, truncated to fit, with '?' for bytes that could control a terminal. */
void kvc_peer_text(char *to, size_t to_bytes, const char *from, size_t from_bytes);

/* Replaces control characters of a name by '?'; other bytes (UTF-8) are kept. */
void kvc_peer_name(char *name);

#endif
