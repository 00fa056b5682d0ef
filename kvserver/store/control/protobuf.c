#include "kvserver/store/control/protobuf.h"

#include <string.h>

bool kvs_pb_get_id(const ProtobufCBinaryData *bytes, struct kv_id128 *ret_id)
{
    if (bytes->len != sizeof(ret_id->bytes))
        return false;
    memcpy(ret_id->bytes, bytes->data, sizeof(ret_id->bytes));
    return true;
}

ProtobufCBinaryData kvs_pb_put_id(struct kv_id128 *id)
{
    return (ProtobufCBinaryData){sizeof(id->bytes), id->bytes};
}

Kvpb__Outcome kvs_pb_ok_outcome(void)
{
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;

    return outcome;
}

void kvs_pb_copy_text(char *to, size_t to_bytes, const char *from)
{
    size_t n = 0;

    /* Names appear in tables, logs and metrics: anything else than printable characters becomes
     * a dot. */
    for (; n + 1 < to_bytes && from[n] != '\0'; n++)
        to[n] = (unsigned char)from[n] < 0x20 || from[n] == 0x7f || from[n] == '"' ||
                        from[n] == '\\'
                    ? '.'
                    : from[n];
    to[n] = '\0';
}
