/* tiers.h - private to kernels/: what the files of one family share.
 *
 * A family's x.c has its scalar table and chooses; x_avx2.c has the other table.  The second is
 * declared, and used, on x86 only.
 *
 * Threads: constants.  Memory: none.
 */
#ifndef KV_TIERS_H
#define KV_TIERS_H

#include "keys.h"
#include "pq.h"
#include "select.h"

#if defined(__x86_64__)

#include <cpuid.h>

/* The functions may be called where tiers_has_avx2(). */
extern const struct kv_keys_kernels kv_keys_avx2;
extern const struct kv_pq_kernels kv_pq_avx2;
extern const struct kv_select_kernels kv_select_avx2;

/* Constructors ask before libgcc may have asked the CPU.  F16C is asked of the CPU itself:
 * clang 14 does not know its name. */
static inline int tiers_has_avx2(void)
{
    unsigned a, b, c = 0, d;

    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

#endif

#endif
