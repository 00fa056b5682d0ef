/* summary_common.h - private to kernels/: what the files of summaries and of estimates have in
 * common.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_SUMMARY_COMMON_H
#define KV_KERNELS_SUMMARY_COMMON_H

#include <stddef.h>
#include <stdint.h>

/* An array of a group, at an offset that kv_rest_at_*() says. */
static inline const void *kv_summary_at(const void *group, size_t offset)
{
    return (const uint8_t *)group + offset;
}

#endif
