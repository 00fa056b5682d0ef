/* protobuf.h - helpers of the control operations to read fields of messages and to write them.
 *
 * Threads: any; nothing is kept.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_PROTOBUF_H
#define KV_KVSERVER_STORE_CONTROL_PROTOBUF_H

#include "proto/kv_types.h"
#include "proto/kvstore.pb-c.h"

#include <stdbool.h>
#include <stddef.h>

/* Returns false if the size is wrong. */
bool kvs_pb_get_id(const ProtobufCBinaryData *bytes, struct kv_id128 *ret_id);
/* Does not copy the id. */
ProtobufCBinaryData kvs_pb_put_id(struct kv_id128 *id);
Kvpb__Outcome kvs_pb_ok_outcome(void);

/* Copies printable text; cuts what does not fit. */
void kvs_pb_copy_text(char *to, size_t to_bytes, const char *from);

#endif
