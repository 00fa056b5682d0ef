#include "client/peer.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

kv_status_t kvc_reply_refuse(char *detail, size_t detail_bytes, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(detail, detail_bytes, format, args);
    va_end(args);
    return KV_CORRUPT;
}

kv_status_t kvc_peer_status(int32_t status)
{
    bool exists = status < KV_OK && strcmp(kv_status_name((kv_status_t)status), "unknown") != 0;

    return exists ? (kv_status_t)status : KV_CORRUPT;
}

void kvc_peer_text(char *to, size_t to_bytes, const char *from, size_t from_bytes)
{
    size_t bytes = from_bytes < to_bytes - 1 ? from_bytes : to_bytes - 1;

    for (size_t i = 0; i < bytes; i++)
        to[i] = from[i] >= ' ' && from[i] <= '~' ? from[i] : '?';
    to[bytes] = 0;
}

void kvc_peer_name(char *name)
{
    for (uint8_t *at = (uint8_t *)name; at[0] != 0; at++)
        if (at[0] < ' ' || at[0] == 0x7f)
            at[0] = '?';
        else if (at[0] == 0xc2 && at[1] >= 0x80 && at[1] <= 0x9f) /* U+0080 to U+009F */
            at[0] = at[1] = '?';
}
