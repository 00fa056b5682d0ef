#include "kvserver/store/prefix/reuse.h"

const char *kvs_reuse_name(enum kvs_reuse_kind kind)
{
    static const char *const names[KVS_REUSE_KINDS] = {
        [KVS_REUSE_ASKED] = "asked",
        [KVS_REUSE_MATCHED] = "matched",
        [KVS_REUSE_NEW] = "missed_new",
        [KVS_REUSE_EVICTED] = "missed_evicted",
        [KVS_REUSE_ELSEWHERE] = "missed_elsewhere",
        [KVS_REUSE_MATCHED_ON_DISK] = "matched_on_disk",
    };

    return names[kind];
}

static struct kvs_reuse_tenant *tenant_of(struct kvs_reuse *reuse, uint32_t tenant)
{
    const uint32_t n = atomic_load_explicit(&reuse->n_tenants, memory_order_relaxed);

    for (uint32_t i = 0; i < n && i < KVS_REUSE_TENANTS - 1; i++)
        if (reuse->tenants[i].tenant == tenant)
            return &reuse->tenants[i];
    if (n < KVS_REUSE_TENANTS) {
        reuse->tenants[n].tenant = n < KVS_REUSE_TENANTS - 1 ? tenant : UINT32_MAX;
        atomic_store_explicit(&reuse->n_tenants, n + 1, memory_order_release);
        return &reuse->tenants[n];
    }
    return &reuse->tenants[KVS_REUSE_TENANTS - 1];
}

static void add(_Atomic uint64_t *counter, uint64_t n)
{
    /* There is one writer. */
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

void kvs_reuse_count(struct kvs_reuse *reuse,
                     uint32_t tenant,
                     uint64_t asked,
                     uint64_t matched,
                     uint64_t on_disk,
                     enum kvs_reuse_kind why)
{
    struct kvs_reuse_tenant *of = tenant_of(reuse, tenant);

    add(&of->tokens[KVS_REUSE_ASKED], asked);
    add(&of->tokens[KVS_REUSE_MATCHED], matched);
    add(&of->tokens[KVS_REUSE_MATCHED_ON_DISK], on_disk);
    add(&of->tokens[why], asked - matched);
}
