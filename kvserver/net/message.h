/* message.h - seals and checks the messages of proto/kv_wire.h.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_NET_MESSAGE_H
#define KV_KVSERVER_NET_MESSAGE_H

#include "proto/kv_wire.h"

/* Fills version, body_bytes and both checksums: the last thing done to a header before it is
 * sent. */
void kv_message_seal(struct kv_wire_header *header, const void *body, size_t body_bytes);

/* Checks what every message must hold, whoever sent it: size, version, kind, op, both
 * checksums, body and bulk bounds (kv_wire.h: KV_WIRE_*_MAX; bulk up to KV_OBJECT_BYTES_MAX for
 * objects). `body` is the data beside the header; for kinds BULK_* it is not looked at, only
 * its size is held against bulk_bytes.  Fills `ret_header` only on KV_OK. KV_INVALID,
 * KV_VERSION, KV_CORRUPT: `*ret_why` is a static text. */
kv_status_t kv_message_check(const void *message,
                             size_t message_bytes,
                             const void *body,
                             size_t body_bytes,
                             struct kv_wire_header *ret_header,
                             const char **ret_why);

/* The same before the body is there, of which only the size is looked at: kv_message_check()
 * has to follow. */
kv_status_t kv_message_check_header(const void *message,
                                    size_t message_bytes,
                                    size_t body_bytes,
                                    struct kv_wire_header *ret_header,
                                    const char **ret_why);

/* The seed of an object's CRC, from its name: a right object under a wrong name fails too. */
uint32_t kv_object_seed(const struct kv_id128 *name_hash);

#endif
