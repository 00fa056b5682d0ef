#include "kvserver/store/ops/need_rows.h"

#include "kvserver/store/rows/residency.h"

/* What a request needs of a store of which something is away. */
struct need {
    struct kvs_request *request;
    bool only_looks; /* asks for nothing that is away */
    bool is_preferred;
    const struct kvs_segment *missing; /* NULL: none yet */
};

typedef void (*walk_fn)(struct need *need, const void *arg);

static void need_segment(struct need *need, struct kvs_block *block, uint32_t at)
{
    struct kvs_segment_store *store = &need->request->shard->store;

    if (need->only_looks && !kvs_segment_is_here(block, at)) {
        need->missing = &block->segments[at];
        return;
    }
    if (need->is_preferred && store->tier->prefer != NULL)
        store->tier->prefer(store->tier_arg, block, at);
    kvs_segment_note_use(store, block, at);
    if (!kvs_segment_need(store, block, at))
        need->missing = &block->segments[at];
}

/* Needs block i in all units, which may have their rows in several ones of a chain. */
static void need_in_units(struct need *need, uint32_t i)
{
    for (uint32_t unit = 0; unit < need->request->header.n_units; unit++) {
        const struct kvs_unit *of = kvs_unit_at(need->request, unit);

        need_segment(need, kvs_unit_block(of, i), of->at);
    }
}

/* Returns what is missing.  The first request that misses something is preferred from then on, until
 * it is served: what it needs stays in memory.  One that misses nothing only says so: what the
 * preferred one has been given stays as it is. */
static const struct kvs_segment *
find_missing(struct kvs_request *request, walk_fn walk, const void *arg)
{
    struct kvs_shard *shard = request->shard;
    const struct kvs_segment_store *store = &shard->store;
    struct need need = {.request = request, .only_looks = true};

    /* Nearly always: a request then looks at no block. */
    if (store->n_away == 0)
        return NULL;
    walk(&need, arg);
    if (need.missing == NULL)
        return NULL;
    need = (struct need){.request = request};
    if (shard->preferred == NULL || shard->preferred == request) {
        shard->preferred = request;
        need.is_preferred = true;
        if (store->tier->prefer_none != NULL)
            store->tier->prefer_none(store->tier_arg);
    }
    walk(&need, arg);
    /* It may have waited for its turn for long, and the session rests: it does not any more. */
    atomic_store_explicit(&request->session->used_us, shard->now_us, memory_order_relaxed);
    return need.missing;
}

void kvs_need_begin_work(struct kvs_request *request, bool knows_all)
{
    for (uint32_t i = 0; i < request->header.n_units; i++)
        kvs_work_add(&request->at_work, kvs_unit_at(request, i)->at);
    kvs_request_begin_work(request);
    if (knows_all)
        kvs_request_is_served(request);
}

/* ---- by what it names --------------------------------------------------------------------- */

static void walk_tokens(struct need *need, const void *arg)
{
    const struct kv_wire_range *range = arg;

    for (uint32_t i = range->begin / KV_BLOCK_TOKENS; i < kvs_blocks_for(range->end); i++)
        need_in_units(need, i);
}

const struct kvs_segment *
kvs_need_tokens(struct kvs_request *request, uint32_t begin, uint32_t end)
{
    return find_missing(request, walk_tokens,
                        &(struct kv_wire_range){.begin = begin, .end = end});
}

struct some {
    const struct kv_wire_range *ranges;
    uint32_t n_ranges;
    kvs_needs_fn needs;
    const void *arg;
};

static void walk_some(struct need *need, const void *arg)
{
    const struct some *some = arg;
    const struct kvs_request *request = need->request;

    for (uint32_t unit = 0; unit < request->header.n_units; unit++) {
        const struct kvs_unit *of = kvs_unit_at(request, unit);

        for (uint32_t r = 0; r < some->n_ranges; r++) {
            const struct kv_wire_range *range = &some->ranges[r];

            for (uint32_t i = range->begin / KV_BLOCK_TOKENS; i < kvs_blocks_for(range->end);
                 i++) {
                struct kvs_block *block = kvs_unit_block(of, i);

                if (some->needs(request, some->arg, unit, i))
                    need_segment(need, block, of->at);
                else if (block->residency == KVS_LEAVING)
                    kvs_block_stay(&request->shard->store, block);
            }
        }
    }
}

const struct kvs_segment *kvs_need_some(struct kvs_request *request,
                                        const struct kv_wire_range *ranges,
                                        uint32_t n_ranges,
                                        kvs_needs_fn needs,
                                        const void *arg)
{
    return find_missing(request, walk_some, &(struct some){ranges, n_ranges, needs, arg});
}

static void walk_ids(struct need *need, const void *arg)
{
    const struct kvs_request *request = need->request;
    const uint32_t *ids = arg;

    for (uint32_t i = 0; i < request->header.n_units; i++) {
        const struct kvs_unit *unit = kvs_unit_at(request, i);

        uint32_t last = UINT32_MAX; /* ids of a block follow each other, mostly */

        for (uint32_t j = 0; j < kvs_units(request)[i].n_ids; j++, ids++) {
            if (*ids / KV_BLOCK_TOKENS != last)
                need_segment(need, kvs_unit_block(unit, *ids / KV_BLOCK_TOKENS), unit->at);
            last = *ids / KV_BLOCK_TOKENS;
        }
    }
}

const struct kvs_segment *kvs_need_ids(struct kvs_request *request)
{
    return find_missing(request, walk_ids, kvs_numbers(request));
}

struct of_unit {
    uint32_t unit; /* of the request */
    uint32_t end;
};

static void walk_unit(struct need *need, const void *arg)
{
    const struct of_unit *one = arg;
    const struct kvs_unit *of = kvs_unit_at(need->request, one->unit);

    for (uint32_t i = 0; i < kvs_blocks_for(one->end); i++)
        need_segment(need, kvs_unit_block(of, i), of->at);
}

const struct kvs_segment *
kvs_need_unit(struct kvs_request *request, uint32_t unit, uint32_t end)
{
    return find_missing(request, walk_unit, &(struct of_unit){.unit = unit, .end = end});
}

/* A session's own block with absent rows gets no others: all of it comes back. */
static void walk_written(struct need *need, const void *arg)
{
    const struct kv_wire_range *range = arg;
    const struct kvs_blocks *blocks = &need->request->session->blocks;

    for (uint32_t i = range->begin / KV_BLOCK_TOKENS;
         i < kvs_blocks_for(range->end) && i < blocks->n; i++) {
        need_in_units(need, i);
        for (uint32_t at = 0; at < blocks->list[i]->n_segments; at++)
            need_segment(need, blocks->list[i], at);
    }
}

const struct kvs_segment *
kvs_need_to_write(struct kvs_request *request, uint32_t begin, uint32_t end)
{
    return find_missing(request, walk_written,
                        &(struct kv_wire_range){.begin = begin, .end = end});
}
