/* memory.h - large memory straight from the system, in huge pages where it can be had.
 *
 * Threads: from any.
 */
#ifndef KV_KVSERVER_BASE_MEMORY_H
#define KV_KVSERVER_BASE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* Reserves address space aligned to 2 MiB; pages come when they are touched.  NULL: refused. */
void *kv_memory_reserve(size_t bytes);
void kv_memory_release(void *base, size_t bytes);

/* What this process may use: physical memory, or its control group's limit if that is less. */
uint64_t kv_memory_total(void);

#endif
