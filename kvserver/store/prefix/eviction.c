#include "kvserver/store/prefix/eviction.h"

#include <stddef.h>
#include <string.h>

static double lru(const struct kvs_eviction_facts *facts)
{
    return (double)facts->used_us;
}

enum {
    /* Blocks before one at which attention over them costs as much as the rest of a layer: some
     * 8K tokens in models of 1 to 8 billion weights. */
    EVEN_BLOCKS = 64,
};

static double gdsf(const struct kvs_eviction_facts *facts)
{
    const double cost = 1 + (double)facts->depth / EVEN_BLOCKS;

    /* Of blocks of 1 MiB: the floor rises by the values of what goes, whatever their unit. */
    return facts->floor + facts->n_uses * cost * (1 << 20) / (double)facts->bytes;
}

static const struct kvs_eviction_policy policies[] = {
    {"lru", "what was used longest ago goes first", lru},
    {"gdsf", "what is seldom used and cheap to compute again, per byte, goes first", gdsf},
};

const struct kvs_eviction_policy *kvs_eviction_at(unsigned number)
{
    return number < sizeof(policies) / sizeof(policies[0]) ? &policies[number] : NULL;
}

const struct kvs_eviction_policy *kvs_eviction_find(const char *name)
{
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++)
        if (strcmp(policies[i].name, name) == 0)
            return &policies[i];
    return NULL;
}
