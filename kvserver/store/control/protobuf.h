/* protobuf.h - what the operations of the control plane read from and write to messages.
 *
 * Threads: any; nothing is kept.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_PROTOBUF_H
#define KV_KVSERVER_STORE_CONTROL_PROTOBUF_H

#include "proto/kv_types.h"
#include "proto/kvstore.pb-c.h"

#include <stdbool.h>
#include <stddef.h>

/* false: of another size. */
bool kvs_pb_get_id(const ProtobufCBinaryData *bytes, struct kv_id128 *ret_id);
/* Not copied. */
ProtobufCBinaryData kvs_pb_put_id(struct kv_id128 *id);
Kvpb__Outcome kvs_pb_ok_outcome(void);

/* Cuts what does not fit. */
void kvs_pb_copy_text(char *to, size_t to_bytes, const char *from);

#endif
