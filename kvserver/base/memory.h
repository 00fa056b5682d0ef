/* memory.h - large memory from the system, in huge pages where the system grants them.
 *
 * Threads: any.
 */
#ifndef KV_KVSERVER_BASE_MEMORY_H
#define KV_KVSERVER_BASE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* Reserves address space aligned to 2 MiB; pages are allocated on first access.  Returns NULL
 * if the system refuses.  Free with kv_memory_release(). */
void *kv_memory_reserve(size_t bytes);
void kv_memory_release(void *base, size_t bytes);

/* Has the system provide these pages, whatever their bytes: others may write to them meanwhile.
 * A system that cannot do so ahead does it on first access. */
void kv_memory_provide(void *from, size_t bytes);

/* Gives the whole pages within these bytes back to the system; they are 0 when they are next
 * used. */
void kv_memory_drop(void *from, size_t bytes);

/* Returns the bytes that this process may use: physical memory, or its control group's limit if
 * that is lower. */
uint64_t kv_memory_total(void);

#endif
