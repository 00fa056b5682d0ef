/* summary_common.h - private to kernels/: access to a summary group, for the files of summaries
 * and of estimates.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_SUMMARY_COMMON_H
#define KV_KERNELS_SUMMARY_COMMON_H

#include <stddef.h>
#include <stdint.h>

/* Returns an array of a group, at an offset from one of summary.h's functions, such as
 * kv_summary_at_keys(). */
static inline const void *kv_summary_at(const void *group, size_t offset)
{
    return (const uint8_t *)group + offset;
}

#endif
