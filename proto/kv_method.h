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

/* The prefix of a method's path; the method's name follows. */
#define KV_METHOD_PREFIX "/kvpb.KvStore/"

/* The only method that is not an operation: its call stays open while the client runs. */
#define KV_METHOD_ATTACH "Attach"

/* The metadata that identifies the client, in every call except Hello and Goodbye: its index
 * (u32, little-endian) and its token (16 bytes). */
#define KV_METHOD_CLIENT "topkv-client-bin"
enum {
    KV_METHOD_CLIENT_BYTES = sizeof(uint32_t) + sizeof(struct kv_id128)
};

/* Returns "Open" for KV_OP_OPEN; NULL if `op` is not a control operation. */
const char *kv_method_name(enum kv_op_id op);

/* Returns the control operation of that name; 0 if there is none. */
enum kv_op_id kv_method_op(const char *name);

#ifdef __cplusplus
}
#endif
#endif
