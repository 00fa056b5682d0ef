/* session_private.h - a helper that the lifecycle operations share. */
#ifndef KV_CLIENT_SESSION_PRIVATE_H
#define KV_CLIENT_SESSION_PRIVATE_H

#include "proto/kv_types.h"
#include "proto/kvstore.pb-c.h"

static inline ProtobufCBinaryData kvc_binary(const struct kv_id128 *id)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)id->bytes, .len = sizeof(id->bytes)};
}

#endif
