/* tiers.h - private to kernels/: what the files of one family share.
 *
 * A family's x.c has its scalar table and chooses; x_avx2.c and, where there is one, x_avx512.c
 * have the others.  Those are declared, and used, on x86 only.
 *
 * KV_EMULATE_AVX512, of tests: the functions of the AVX-512 tables are built from AVX2, and a
 * CPU without AVX-512 has them whatever KV_ISA says.
 *
 * Threads: constants.  Memory: none.
 */
#ifndef KV_TIERS_H
#define KV_TIERS_H

#include "attend.h"
#include "cells.h"
#include "gather.h"
#include "isa.h"
#include "keys.h"
#include "kmeans.h"
#include "pq.h"
#include "rest.h"
#include "rope.h"
#include "select.h"
#include "sieve.h"
#include "tile.h"

#if defined(__x86_64__)

/* The functions may be called where tiers_has_avx2(). */
extern const struct kv_attend_kernels kv_attend_avx2;
extern const struct kv_cells_kernels kv_cells_avx2;
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
