#include "gpu-worker/text/utf8_stream.h"

#include <string.h>

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

enum {
    REPLACEMENT_BYTES = 3,
};

/* Returns the length of the character that begins with these n bytes (1 to 4), 0 if they begin
 * none.  After some first bytes the range of the second is narrower than 80..BF, which excludes
 * overlong forms, surrogates, and numbers above U+10FFFF (Unicode, table 3-7). */
static size_t length_of(const unsigned char *at, size_t n)
{
    unsigned char low = 0x80, high = 0xbf;
    size_t length;

    if (at[0] < 0x80)
        return 1;
    if (at[0] < 0xc2 || at[0] > 0xf4)
        return 0;
    length = at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    if (at[0] == 0xe0)
        low = 0xa0;
    else if (at[0] == 0xed)
        high = 0x9f;
    else if (at[0] == 0xf0)
        low = 0x90;
    else if (at[0] == 0xf4)
        high = 0x8f;
    for (size_t i = 1; i < n && i < length; i++) {
        if (at[i] < low || at[i] > high)
            return 0;
        low = 0x80;
        high = 0xbf;
    }
    return length;
}

size_t kvw_utf8_stream_bytes(size_t bytes)
{
    return (bytes + 1) * REPLACEMENT_BYTES;
}

size_t kvw_utf8_stream_push(struct kvw_utf8_stream *stream,
                            const char *data,
                            size_t bytes,
                            char *ret_text)
{
    size_t written = 0;

    for (size_t i = 0; i < bytes; i++) {
        size_t length;

        stream->pending[stream->n_pending] = (unsigned char)data[i];
        length = length_of(stream->pending, stream->n_pending + 1);
        if (length == 0 && stream->n_pending > 0) {
            /* What was begun does not go on: this byte begins anew. */
            written += kvw_utf8_stream_end(stream, ret_text + written);
            stream->pending[0] = (unsigned char)data[i];
            length = length_of(stream->pending, 1);
        }
        stream->n_pending++;
        if (length == 0) {
            written += kvw_utf8_stream_end(stream, ret_text + written);
        } else if (stream->n_pending == length) {
            memcpy(ret_text + written, stream->pending, length);
            written += length;
            stream->n_pending = 0;
        }
    }
    return written;
}

size_t kvw_utf8_stream_end(struct kvw_utf8_stream *stream, char *ret_text)
{
    if (stream->n_pending == 0)
        return 0;
    stream->n_pending = 0;
    memcpy(ret_text, replacement, REPLACEMENT_BYTES);
    return REPLACEMENT_BYTES;
}
