/* gguf_guard.h - the mapped files that the SIGBUS handler of kvw_gguf_guard() knows; for
 * gguf.c.
 *
 * Threads: any.
 */
#ifndef KV_GPU_WORKER_GGUF_GGUF_GUARD_H
#define KV_GPU_WORKER_GGUF_GGUF_GUARD_H

#include <stddef.h>

/* Adds and removes a mapped file.  Keeps `path` until the removal.  Files beyond
 * KVW_GGUF_GUARDED_MAX are not added: a fault in them ends the process without a message. */
void kvw_gguf_guard_add(const void *data, size_t bytes, const char *path);
void kvw_gguf_guard_remove(const void *data);

#endif
