/* dispatch.h - private to kernels/: the kernel tables of all families and instruction sets.
 *
 * A family's x.c defines the scalar table and selects the one in use.  x86/x_avx2.c and, for
 * most families, x86/x_avx512.c define the other tables, which are declared on x86 only.  The
 * tables' types are declared and not defined here, so that a change to a family's header
 * rebuilds that family only; a file that uses a table includes the family's header as well.
 *
 * KV_EMULATE_AVX512 is for tests: the functions of the AVX-512 tables are built from AVX2 and
 * plain C, and are available on CPUs without AVX-512, whatever KV_ISA says.
 *
 * Threads: constants.  Memory: none.
 */
#ifndef KV_KERNELS_DISPATCH_H
#define KV_KERNELS_DISPATCH_H

#include "kernels/isa.h"

#if defined(__x86_64__)

struct kv_attend_kernels;
struct kv_bytes_kernels;
struct kv_cells_kernels;
struct kv_checksum_kernels;
struct kv_estimate_kernels;
struct kv_gather_kernels;
struct kv_exact_scores_kernels;
struct kv_key_copies_kernels;
struct kv_kmeans_kernels;
struct kv_pq_kernels;
struct kv_summary_kernels;
struct kv_rope_kernels;
struct kv_topk_kernels;
struct kv_tile_kernels;

/* Require what the table's own supported() tests: SSE4.2 and PCLMULQDQ, VPCLMULQDQ, or both
 * with AVX-512.  KV_ISA_AVX2 implies none of these. */
extern const struct kv_checksum_kernels kv_checksum_sse42;
extern const struct kv_checksum_kernels kv_checksum_fold;
extern const struct kv_checksum_kernels kv_checksum_fold512;

/* Require kv_has_avx2(). */
extern const struct kv_attend_kernels kv_attend_avx2;
extern const struct kv_bytes_kernels kv_bytes_avx2;
extern const struct kv_cells_kernels kv_cells_avx2;
extern const struct kv_estimate_kernels kv_estimate_avx2;
extern const struct kv_gather_kernels kv_gather_avx2;
extern const struct kv_exact_scores_kernels kv_exact_scores_avx2;
extern const struct kv_key_copies_kernels kv_key_copies_avx2;
extern const struct kv_kmeans_kernels kv_kmeans_avx2;
extern const struct kv_pq_kernels kv_pq_avx2;
extern const struct kv_summary_kernels kv_summary_avx2;
extern const struct kv_rope_kernels kv_rope_avx2;
extern const struct kv_topk_kernels kv_topk_avx2;
extern const struct kv_tile_kernels kv_tile_avx2;

static inline int kv_has_avx2(void)
{
    return kv_isa() >= KV_ISA_AVX2;
}

/* Require kv_has_avx512(). */
extern const struct kv_attend_kernels kv_attend_avx512;
extern const struct kv_bytes_kernels kv_bytes_avx512;
extern const struct kv_cells_kernels kv_cells_avx512;
extern const struct kv_estimate_kernels kv_estimate_avx512;
extern const struct kv_exact_scores_kernels kv_exact_scores_avx512;
extern const struct kv_kmeans_kernels kv_kmeans_avx512;
extern const struct kv_pq_kernels kv_pq_avx512;
extern const struct kv_summary_kernels kv_summary_avx512;
extern const struct kv_topk_kernels kv_topk_avx512;
extern const struct kv_tile_kernels kv_tile_avx512;

static inline int kv_has_avx512(void)
{
#if defined(KV_EMULATE_AVX512)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return kv_isa() >= KV_ISA_AVX512;
#endif
}

/* Requires kv_has_avx512() and VNNI, which processors with VBMI2 have, but which a hypervisor
 * may hide. */
extern const struct kv_key_copies_kernels kv_key_copies_avx512;

static inline int kv_has_avx512vnni(void)
{
#if defined(KV_EMULATE_AVX512)
    return kv_has_avx512();
#else
    return kv_has_avx512() && __builtin_cpu_supports("avx512vnni");
#endif
}

#endif

#endif
