/* dispatch.h - private to kernels/: what the files of one family share.
 *
 * A family's x.c has its scalar table and chooses; x86/x_avx2.c and, where there is one,
 * x86/x_avx512.c have the others.  Those are declared, and used, on x86 only.
 *
 * KV_EMULATE_AVX512, of tests: the functions of the AVX-512 tables are built from AVX2, and a
 * CPU without AVX-512 has them whatever KV_ISA says.
 *
 * Threads: constants.  Memory: none.
 */
#ifndef KV_KERNELS_DISPATCH_H
#define KV_KERNELS_DISPATCH_H

#include "kernels/attend.h"
#include "kernels/checksum.h"
#include "kernels/estimate.h"
#include "kernels/exact_scores.h"
#include "kernels/gather.h"
#include "kernels/isa.h"
#include "kernels/kmeans.h"
#include "kernels/pq.h"
#include "kernels/pq_cells.h"
#include "kernels/pq_prefilter.h"
#include "kernels/pq_tiles.h"
#include "kernels/rope.h"
#include "kernels/select.h"
#include "kernels/summary.h"

#if defined(__x86_64__)

/* The functions may be called where the table's own supported() says so: what they need is older
 * than AVX2, or is no part of it. */
extern const struct kv_checksum_kernels kv_checksum_sse42;
extern const struct kv_checksum_kernels kv_checksum_fold;
extern const struct kv_checksum_kernels kv_checksum_fold512;

/* The functions may be called where tiers_has_avx2(). */
extern const struct kv_attend_kernels kv_attend_avx2;
extern const struct kv_cells_kernels kv_cells_avx2;
extern const struct kv_estimate_kernels kv_estimate_avx2;
extern const struct kv_gather_kernels kv_gather_avx2;
extern const struct kv_keys_kernels kv_keys_avx2;
extern const struct kv_kmeans_kernels kv_kmeans_avx2;
extern const struct kv_pq_kernels kv_pq_avx2;
extern const struct kv_rest_kernels kv_rest_avx2;
extern const struct kv_rope_kernels kv_rope_avx2;
extern const struct kv_select_kernels kv_select_avx2;
extern const struct kv_sieve_kernels kv_sieve_avx2;
extern const struct kv_tile_kernels kv_tile_avx2;

static inline int tiers_has_avx2(void)
{
    return kv_isa() >= KV_ISA_AVX2;
}

/* The functions may be called where tiers_has_avx512(). */
extern const struct kv_attend_kernels kv_attend_avx512;
extern const struct kv_cells_kernels kv_cells_avx512;
extern const struct kv_estimate_kernels kv_estimate_avx512;
extern const struct kv_keys_kernels kv_keys_avx512;
extern const struct kv_kmeans_kernels kv_kmeans_avx512;
extern const struct kv_pq_kernels kv_pq_avx512;
extern const struct kv_rest_kernels kv_rest_avx512;
extern const struct kv_rope_kernels kv_rope_avx512;
extern const struct kv_select_kernels kv_select_avx512;
extern const struct kv_sieve_kernels kv_sieve_avx512;
extern const struct kv_tile_kernels kv_tile_avx512;

static inline int tiers_has_avx512(void)
{
#if defined(KV_EMULATE_AVX512)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return kv_isa() >= KV_ISA_AVX512;
#endif
}

#endif

#endif
