/* kv_method.h - the names of control operations, as gRPC carries them (kvstore.proto).
 *
 * Threads: pure functions.  Memory: the strings are static.
 */
#ifndef KV_PROTO_KV_METHOD_H
#define KV_PROTO_KV_METHOD_H

#include "proto/kv_wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a method's path begins with; the name follows. */
#define KV_METHOD_PREFIX "/kvpb.KvStore/"

/* The one method that is no operation: its call stays open while the client lives. */
#define KV_METHOD_ATTACH "Attach"

/* The metadata that says which client calls, in every call but Hello and Goodbye: its index,
 * u32 little-endian, and its token, 16 bytes. */
#define KV_METHOD_CLIENT "topkv-client-bin"
enum {
    KV_METHOD_CLIENT_BYTES = sizeof(uint32_t) + sizeof(struct kv_id128)
};

/* "Open" for KV_OP_OPEN; NULL if it is no operation of the control plane. */
const char *kv_method_name(enum kv_op_id op);

/* The inverse; 0 if there is none of that name. */
enum kv_op_id kv_method_op(const char *name);

#ifdef __cplusplus
}
#endif
#endif
