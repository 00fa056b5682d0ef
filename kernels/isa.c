#include "kernels/isa.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char *const names[KV_ISA_COUNT] = {
    [KV_ISA_SCALAR] = "scalar",
    [KV_ISA_AVX2] = "avx2",
    [KV_ISA_AVX512] = "avx512",
};

const char *kv_isa_name(enum kv_isa isa)
{
    assert(isa < KV_ISA_COUNT);
    return names[isa];
}

static enum kv_isa find(const char *name)
{
    unsigned isa = 0;

    while (isa < KV_ISA_COUNT && strcmp(names[isa], name) != 0)
        isa++;
    return (enum kv_isa)isa;
}

static enum kv_isa of_cpu(void)
{
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;

    /* Constructors may run before libgcc's own, which fills in what __builtin_cpu_supports()
     * reads.  F16C is read from CPUID, because clang 14 does not know its name. */
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__get_cpuid(1, &a, &b, &c, &d) || (c & bit_F16C) == 0)
        return KV_ISA_SCALAR;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vbmi2"))
        return KV_ISA_AVX2;
    return KV_ISA_AVX512;
#else
    return KV_ISA_SCALAR;
#endif
}

enum kv_isa kv_isa_ceiling(void)
{
    const char *name = getenv("KV_ISA");

    return name == NULL ? KV_ISA_COUNT : find(name);
}

bool kv_isa_named(void)
{
    const char *name = getenv("KV_ISA");

    return name == NULL || *name == '\0' || find(name) < KV_ISA_COUNT;
}

enum kv_isa kv_isa(void)
{
    const enum kv_isa has = of_cpu(), ceiling = kv_isa_ceiling();

    return ceiling < has ? ceiling : has;
}
