/* utf8_stream.h - turns a stream of bytes into whole UTF-8 characters.
 *
 * A token may end inside of a character: what is incomplete waits for the next push.  Bytes
 * that cannot belong to a character come out as U+FFFD, one for each longest run that could
 * have begun one, as the Unicode standard recommends (3.9, U+FFFD substitution of maximal
 * subparts).  What comes out is valid UTF-8.
 *
 * Threads: one at a time.  Memory: the caller's; all zeros is an empty stream.
 */
#ifndef KV_GPU_WORKER_TEXT_UTF8_STREAM_H
#define KV_GPU_WORKER_TEXT_UTF8_STREAM_H

#include <stddef.h>

struct kvw_utf8_stream {
    unsigned char pending[4]; /* the begin of a character */
    size_t n_pending;         /* 0 to 3 */
};

/* The most that a push of `bytes`, or the end (bytes 0), can write. */
size_t kvw_utf8_stream_bytes(size_t bytes);

/* Returns the bytes written to `ret_text` (kvw_utf8_stream_bytes(bytes)); it is not ended by a
 * zero. */
size_t kvw_utf8_stream_push(struct kvw_utf8_stream *stream,
                            const char *data,
                            size_t bytes,
                            char *ret_text);

/* What is still incomplete comes out as U+FFFD; the stream is empty again. */
size_t kvw_utf8_stream_end(struct kvw_utf8_stream *stream, char *ret_text);

#endif
