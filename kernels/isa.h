/* isa.h - the instruction sets that kernels are written for, and the best one of this CPU.
 *
 *   scalar   plain C, the reference
 *   avx2     AVX2, FMA, F16C
 *   avx512   AVX-512 F, BW, DQ, VL, VBMI and VBMI2 (Ice Lake, Zen 4, and later)
 *
 * The environment variable KV_ISA sets an upper limit, for tests and to rule out an instruction
 * set as the cause of an error: `KV_ISA=scalar kvserver` uses none.  Any other name sets no
 * limit; programs reject it (kv_isa_named).
 *
 * Threads: pure functions.  Memory: none.
 */
#ifndef KV_KERNELS_ISA_H
#define KV_KERNELS_ISA_H

#include <stdbool.h>

enum kv_isa {
    KV_ISA_SCALAR,
    KV_ISA_AVX2,
    KV_ISA_AVX512,
    KV_ISA_COUNT,
};

/* Returns the best instruction set that this CPU has and KV_ISA allows. */
enum kv_isa kv_isa(void);

/* Returns what KV_ISA names; KV_ISA_COUNT if it is unset or names none. */
enum kv_isa kv_isa_ceiling(void);

const char *kv_isa_name(enum kv_isa isa);

/* Returns false if KV_ISA is set to an unknown name. */
bool kv_isa_named(void);

#endif
