/* session_private.h - what the operations of a session's life share. */
#ifndef KV_CLIENT_SESSION_PRIVATE_H
#define KV_CLIENT_SESSION_PRIVATE_H

#include "proto/kv_types.h"
#include "proto/kvstore.pb-c.h"

struct kv_op;
struct kv_trip;

static inline ProtobufCBinaryData binary(const struct kv_id128 *id)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)id->bytes, .len = sizeof(id->bytes)};
}

/* session.c: what an operation of a session's life is about, for texts. */
void kv_session_describe_op(const struct kv_op *op,
                            const struct kv_trip *trip,
                            char *text,
                            size_t text_bytes);

#endif
