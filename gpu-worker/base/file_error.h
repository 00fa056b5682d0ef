/* file_error.h - one line about what is wrong in a file: where it goes, and how text from the
 * file is shown in it.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_GPU_WORKER_BASE_FILE_ERROR_H
#define KV_GPU_WORKER_BASE_FILE_ERROR_H

#include "proto/kv_status.h"

#include <stddef.h>

/* Text in a file: not ended by a zero, may hold any bytes. */
struct kv_text {
    const char *data;
    size_t bytes;
};

struct kv_detail {
    char *text;
    size_t bytes;
    const char *path; /* of the file */
};

/* Writes `PATH: ...` and returns `status`. */
kv_status_t
kv_detail(const struct kv_detail *detail, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Text for such a line: unprintable bytes as `?`, cut to what fits. */
struct kv_shown {
    char text[100];
};
struct kv_shown kv_show(struct kv_text text);

#endif
