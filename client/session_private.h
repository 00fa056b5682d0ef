/* session_private.h - a helper that the lifecycle operations share. */
#ifndef KV_CLIENT_SESSION_PRIVATE_H
#define KV_CLIENT_SESSION_PRIVATE_H

#include "proto/kv_types.h"
#include "proto/kvstore.pb-c.h"

#include <stdbool.h>

struct kvc_call;

static inline ProtobufCBinaryData kvc_binary(const struct kv_id128 *id)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)id->bytes, .len = sizeof(id->bytes)};
}

/* Whether a call is one of those that renew a lease in the background, or that bring a node up
 * to the session's generation. */
bool kvc_call_renews(const struct kvc_call *call);
bool kvc_call_catches_up(const struct kvc_call *call);

#endif
