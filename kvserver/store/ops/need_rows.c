#include "kvserver/store/ops/need_rows.h"

#include "kvserver/store/rows/residency.h"

/* Nearly always: a request then looks at no block. */
static bool all_are_here(const struct kvs_request *request)
{
    return request->shard->store.n_away == 0;
}

static void
need(struct kvs_request *request, struct kvs_block *block, const struct kvs_block **missing)
{
    if (kvs_block_need(&request->shard->store, block))
        return;
    *missing = block;
    /* It may have waited for its turn for long, and the session rests: it does not any more. */
    atomic_store_explicit(&request->session->used_us, request->shard->now_us,
                          memory_order_relaxed);
}

/* Needs block i in all units, which may have their rows in several ones of a chain. */
static void
need_in_units(struct kvs_request *request, uint32_t i, const struct kvs_block **missing)
{
    for (uint32_t unit = 0; unit < request->header.n_units; unit++) {
        need(request, kvs_unit_block(kvs_unit_at(request, unit), i), missing);
        if (request->session->blocks.list[i]->under == NULL)
            break;
    }
}

static void need_tokens(struct kvs_request *request,
                        uint32_t begin,
                        uint32_t end,
                        const struct kvs_block **missing)
{
    for (uint32_t i = begin / KV_BLOCK_TOKENS; i < kvs_blocks_for(end); i++)
        need_in_units(request, i, missing);
}

const struct kvs_block *
kvs_need_tokens(struct kvs_request *request, uint32_t begin, uint32_t end)
{
    const struct kvs_block *missing = NULL;

    if (!all_are_here(request))
        need_tokens(request, begin, end, &missing);
    return missing;
}

const struct kvs_block *kvs_need_ranges(struct kvs_request *request,
                                        const struct kv_wire_range *ranges,
                                        uint32_t n_ranges)
{
    const struct kvs_block *missing = NULL;

    for (uint32_t i = 0; !all_are_here(request) && i < n_ranges; i++)
        need_tokens(request, ranges[i].begin, ranges[i].end, &missing);
    return missing;
}

const struct kvs_block *kvs_need_ids(struct kvs_request *request)
{
    const uint32_t *ids = kvs_numbers(request);
    const struct kvs_block *missing = NULL;

    if (all_are_here(request))
        return NULL;
    for (uint32_t i = 0; i < request->header.n_units; i++)
        for (uint32_t j = 0; j < kvs_units(request)[i].n_ids; j++)
            need(request, kvs_unit_block(kvs_unit_at(request, i), *ids++ / KV_BLOCK_TOKENS),
                 &missing);
    return missing;
}

const struct kvs_block *
kvs_need_to_write(struct kvs_request *request, uint32_t begin, uint32_t end)
{
    const struct kvs_blocks *blocks = &request->session->blocks;
    const struct kvs_block *missing = NULL;

    if (all_are_here(request))
        return NULL;
    for (uint32_t i = begin / KV_BLOCK_TOKENS; i < kvs_blocks_for(end) && i < blocks->n; i++) {
        need_in_units(request, i, &missing);
        need(request, blocks->list[i], &missing);
    }
    return missing;
}
