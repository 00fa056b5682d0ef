/* message.h - seals and checks the messages of proto/kv_wire.h.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_NET_MESSAGE_H
#define KV_KVSERVER_NET_MESSAGE_H

#include "proto/kv_wire.h"

/* Sets body_bytes, both checksums, and the version if it is 0, to KV_WIRE_VERSION.  The last
 * change to a header before it is sent. */
void kv_message_seal(struct kv_wire_header *header, const void *body, size_t body_bytes);

/* Checks what must hold for every message: size, version, kind, op, both checksums, and the
 * bounds of body and bulk (kv_wire.h: KV_WIRE_*_MAX; bulk up to KV_OBJECT_BYTES_MAX for
 * objects).  `body` is the data that came with the header; for kinds BULK_* it is not read, and
 * only its size is compared with bulk_bytes.  Fills `ret_header` only on KV_OK.  Fails with
 * KV_INVALID, KV_VERSION or KV_CORRUPT; `*ret_why` is then a static string. */
kv_status_t kv_message_check(const void *message,
                             size_t message_bytes,
                             const void *body,
                             size_t body_bytes,
                             struct kv_wire_header *ret_header,
                             const char **ret_why);

/* Checks the entry of a batch (KV_WIRE_BATCH) that begins at `*at` bytes of its body, as
 * kv_message_check() does, and advances `*at` to the next.  Begin with 0, and stop at
 * body_bytes.  On KV_OK `*ret_body` is the entry's body, in the batch's.  Fails as
 * kv_message_check(), and with KV_INVALID if it has bulk or is not of that kind:
 * KV_WIRE_REQUEST or KV_WIRE_REPLY. */
kv_status_t kv_message_entry(enum kv_wire_kind kind,
                             const uint8_t *batch,
                             size_t batch_bytes,
                             size_t *at,
                             struct kv_wire_header *ret_header,
                             const uint8_t **ret_body,
                             const char **ret_why);

/* As kv_message_check(), before the body has arrived: checks only its size.  kv_message_check()
 * must follow. */
kv_status_t kv_message_check_header(const void *message,
                                    size_t message_bytes,
                                    size_t body_bytes,
                                    struct kv_wire_header *ret_header,
                                    const char **ret_why);

#endif
