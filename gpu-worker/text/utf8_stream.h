/* utf8_stream.h - turns a stream of bytes into whole UTF-8 characters.
 *
 * A token may end inside of a character; incomplete bytes wait for the next push.  Bytes that
 * cannot belong to a character become U+FFFD, one for each maximal subpart, as the Unicode
 * standard recommends (section 3.9, U+FFFD Substitution of Maximal Subparts).  The output is
 * valid UTF-8.
 *
 * Threads: one at a time.  Memory: the caller's; all zeros is an empty stream.
 */
#ifndef KV_GPU_WORKER_TEXT_UTF8_STREAM_H
#define KV_GPU_WORKER_TEXT_UTF8_STREAM_H

#include <stddef.h>

struct kvw_utf8_stream {
    unsigned char pending[4]; /* the beginning of a character */
    size_t n_pending;         /* 0 to 3 */
};

/* Returns the most bytes that a push of `bytes`, or the end (bytes 0), can write. */
size_t kvw_utf8_stream_bytes(size_t bytes);

/* Writes the complete characters to ret_text (kvw_utf8_stream_bytes(bytes)), not 0-terminated.
 * Returns the bytes written. */
size_t kvw_utf8_stream_push(struct kvw_utf8_stream *stream,
                            const char *data,
                            size_t bytes,
                            char *ret_text);

/* Ends the stream: incomplete bytes become U+FFFD, and the stream is empty again.  Returns the
 * bytes written. */
size_t kvw_utf8_stream_end(struct kvw_utf8_stream *stream, char *ret_text);

#endif
