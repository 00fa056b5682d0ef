/* gguf_guard.h - the mapped files that the handler of kvw_gguf_guard() knows.  For gguf.c.
 *
 * Threads: from any.
 */
#ifndef KV_GPU_WORKER_GGUF_GGUF_GUARD_H
#define KV_GPU_WORKER_GGUF_GGUF_GUARD_H

#include <stddef.h>

/* Keeps `path` until the removal.  Further files than KVW_GGUF_GUARDED_MAX get no
 * message. */
void kvw_gguf_guard_add(const void *data, size_t bytes, const char *path);
void kvw_gguf_guard_remove(const void *data);

#endif
