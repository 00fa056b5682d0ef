/* file_error.h - one-line error messages about a file, and text from the file in a printable
 * form.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_GPU_WORKER_BASE_FILE_ERROR_H
#define KV_GPU_WORKER_BASE_FILE_ERROR_H

#include "proto/kv_status.h"

#include <stddef.h>

/* Text in a file: not 0-terminated, may contain any bytes. */
struct kvw_text {
    const char *data;
    size_t bytes;
};

/* Where the message goes: the caller's buffer. */
struct kvw_file_error {
    char *text;
    size_t bytes;
    const char *path; /* of the file */
};

/* Writes `PATH: ...` and returns `status`. */
kv_status_t kvw_file_error_set(const struct kvw_file_error *detail,
                               kv_status_t status,
                               const char *format,
                               ...) __attribute__((format(printf, 3, 4)));

/* Text for such a message: unprintable bytes as `?`, truncated to fit. */
struct kvw_shown {
    char text[100];
};
struct kvw_shown kvw_show(struct kvw_text text);

#endif
