#include "gpu-worker/kvcache/block_cache.h"

#include <assert.h>
#include <stdlib.h>

enum {
    /* PQCache fetches up to 32 blocks a step.  Here it is a few, so that prefetches do not
     * delay the next query. */
    READS_PER_STEP = 4,
    READS = 64, /* outstanding, in all layers */
    K_CACHE = 32,
    READ_DEADLINE_MS = 30000,
};

/* An outstanding fetch of a block. */
struct coming {
    struct kv_op *op; /* NULL: none */
    uint32_t layer, slot;
    uint32_t *crcs; /* (n_kv_heads, KV_BLOCK_TOKENS) */
};

struct layer {
    struct kvw_block_policy *cache;
    uint32_t *block_of;     /* (n_slots) */
    uint32_t *fingerprints; /* (n_slots, n_kv_heads) */
};

struct kvw_block_cache {
    struct kvw_session *store;
    struct kvw_device *device;
    struct kvw_trace *trace;
    uint32_t n_layers, n_kv_heads, n_slots, n_blocks;
    size_t row_bytes;
    struct kv_buffer *buffer; /* (n_layers, n_slots, n_kv_heads, KV_BLOCK_TOKENS) rows */
    struct kvw_device_buffer *mapped; /* the same memory */
    struct layer *layers;
    struct coming coming[READS];
    uint32_t n_coming;
    uint32_t *n_cached;           /* (n_kv_heads) */
    struct kv_cached_block *list; /* (n_kv_heads, n_slots) */
    uint64_t bytes_fetched;
};

static size_t slot_rows(const struct kvw_block_cache *cached)
{
    return (size_t)cached->n_kv_heads * KV_BLOCK_TOKENS;
}

/* The first row of a slot in the buffer. */
static size_t slot_begin(const struct kvw_block_cache *cached, uint32_t layer, uint32_t slot)
{
    return ((size_t)layer * cached->n_slots + slot) * slot_rows(cached);
}

static kv_status_t layers_create(struct kvw_block_cache *cached,
                                 enum kvw_replacement_policy policy)
{
    kv_status_t status = KV_OK;

    cached->layers = calloc(cached->n_layers, sizeof(cached->layers[0]));
    if (cached->layers == NULL)
        return KV_NO_MEMORY;
    for (uint32_t i = 0; status == KV_OK && i < cached->n_layers; i++) {
        struct layer *layer = &cached->layers[i];

        layer->block_of = calloc(cached->n_slots, sizeof(layer->block_of[0]));
        layer->fingerprints = calloc((size_t)cached->n_slots * cached->n_kv_heads,
                                     sizeof(layer->fingerprints[0]));
        status = layer->block_of == NULL || layer->fingerprints == NULL
                     ? KV_NO_MEMORY
                     : kvw_block_policy_create(policy, cached->n_blocks, cached->n_slots,
                                               K_CACHE, &layer->cache);
    }
    for (uint32_t i = 0; status == KV_OK && i < READS; i++) {
        cached->coming[i].crcs = calloc(slot_rows(cached), sizeof(uint32_t));
        if (cached->coming[i].crcs == NULL)
            status = KV_NO_MEMORY;
    }
    return status;
}

kv_status_t kvw_block_cache_create(const struct kvw_session_setup *setup,
                                   struct kvw_session *store,
                                   enum kvw_replacement_policy policy,
                                   uint32_t n_tokens,
                                   struct kvw_block_cache **ret_cached)
{
    const struct kvw_model_params *params = &setup->model->params;
    struct kvw_block_cache *cached = calloc(1, sizeof(*cached));
    kv_status_t status;

    if (cached == NULL)
        return KV_NO_MEMORY;
    cached->store = store;
    cached->device = setup->model->device;
    cached->trace = setup->trace;
    cached->n_layers = params->n_layers;
    cached->n_kv_heads = params->n_kv_heads;
    cached->n_slots = n_tokens / KV_BLOCK_TOKENS;
    cached->n_blocks = setup->capacity / KV_BLOCK_TOKENS + 1;
    if (cached->n_slots > cached->n_blocks)
        cached->n_slots = cached->n_blocks;
    cached->row_bytes = (size_t)2 * params->d * kv_dtype_bytes(setup->dtype);
    cached->n_cached = calloc(cached->n_kv_heads, sizeof(cached->n_cached[0]));
    cached->list =
        calloc((size_t)cached->n_kv_heads * cached->n_slots, sizeof(cached->list[0]));
    status = cached->n_cached == NULL || cached->list == NULL ? KV_NO_MEMORY
                                                              : layers_create(cached, policy);
    if (status == KV_OK)
        status = kv_buffer_alloc(setup->client,
                                 slot_begin(cached, cached->n_layers, 0) * cached->row_bytes,
                                 &cached->buffer);
    if (status == KV_OK)
        status =
            cached->device->ops->buffer_wrap(cached->device, kv_buffer_data(cached->buffer),
                                             kv_buffer_bytes(cached->buffer), &cached->mapped);
    if (status != KV_OK) {
        kvw_block_cache_destroy(cached);
        return status;
    }
    *ret_cached = cached;
    return KV_OK;
}

void kvw_block_cache_destroy(struct kvw_block_cache *cached)
{
    if (cached == NULL)
        return;
    for (uint32_t i = 0; i < READS; i++) {
        kv_op_free(cached->coming[i].op);
        free(cached->coming[i].crcs);
    }
    cached->device->ops->buffer_destroy(cached->mapped);
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(cached->buffer);
    for (uint32_t i = 0; cached->layers != NULL && i < cached->n_layers; i++) {
        kvw_block_policy_destroy(cached->layers[i].cache);
        free(cached->layers[i].block_of);
        free(cached->layers[i].fingerprints);
    }
    free(cached->layers);
    free(cached->n_cached);
    free(cached->list);
    free(cached);
}

/* ---- cached blocks ----------------------------------------------------------------------- */

static int compare_held(const void *a, const void *b)
{
    const struct kv_cached_block *x = a, *y = b;

    return (x->block > y->block) - (x->block < y->block);
}

void kvw_block_cache_list(struct kvw_block_cache *cached,
                          uint32_t layer,
                          const uint32_t **ret_n_cached,
                          const struct kv_cached_block **ret_blocks)
{
    const struct layer *of = &cached->layers[layer];
    struct kv_cached_block *at = cached->list;

    for (uint32_t head = 0; head < cached->n_kv_heads; head++) {
        struct kv_cached_block *begin = at;

        for (uint32_t slot = 0; slot < cached->n_slots; slot++)
            if (kvw_block_policy_slot(of->cache, of->block_of[slot]) == slot)
                *at++ = (struct kv_cached_block){
                    of->block_of[slot], of->fingerprints[slot * cached->n_kv_heads + head]};
        cached->n_cached[head] = (uint32_t)(at - begin);
        qsort(begin, cached->n_cached[head], sizeof(*begin), compare_held);
    }
    *ret_n_cached = cached->n_cached;
    *ret_blocks = cached->list;
}

bool kvw_block_cache_has(const struct kvw_block_cache *cached, uint32_t layer, uint32_t token)
{
    return kvw_block_policy_slot(cached->layers[layer].cache, token / KV_BLOCK_TOKENS) !=
           KVW_BLOCK_NO_SLOT;
}

struct kvw_row_run kvw_block_cache_run(const struct kvw_block_cache *cached,
                                       uint32_t layer,
                                       uint32_t head,
                                       uint32_t token)
{
    const uint32_t slot =
        kvw_block_policy_slot(cached->layers[layer].cache, token / KV_BLOCK_TOKENS);

    assert(slot != KVW_BLOCK_NO_SLOT);
    return (struct kvw_row_run){
        .buffer = cached->mapped,
        .first_row = slot_begin(cached, layer, slot) + (size_t)head * KV_BLOCK_TOKENS +
                     token % KV_BLOCK_TOKENS,
        .n_rows = 1,
    };
}

void kvw_block_cache_note(struct kvw_block_cache *cached, uint32_t layer, uint32_t token)
{
    kvw_block_policy_note(cached->layers[layer].cache, token / KV_BLOCK_TOKENS);
}

/* ---- fetches ----------------------------------------------------------------------------- */

static kv_status_t landed(struct kvw_block_cache *cached, struct coming *coming)
{
    struct layer *layer = &cached->layers[coming->layer];
    const struct kvw_trace_arg args[] = {{"layer", coming->layer}};
    struct kv_op_times times;
    kv_status_t status = kv_wait(coming->op);

    kv_op_get_times(coming->op, &times);
    kvw_trace_span(cached->trace, KVW_TRACE_FETCH, "block", times.begun_us, times.ended_us,
                   args, 1);
    kv_op_free(coming->op);
    coming->op = NULL;
    cached->n_coming--;
    if (status != KV_OK)
        return kvw_session_fail(cached->store, status);
    for (uint32_t head = 0; head < cached->n_kv_heads; head++)
        layer->fingerprints[coming->slot * cached->n_kv_heads + head] =
            kv_block_fingerprint(coming->crcs + (size_t)head * KV_BLOCK_TOKENS);
    kvw_block_policy_landed(layer->cache, coming->slot);
    return KV_OK;
}

/* Completes fetches that have ended; with `wait`, waits for all. */
static kv_status_t collect(struct kvw_block_cache *cached, bool wait)
{
    kv_status_t status = KV_OK;

    for (uint32_t i = 0; status == KV_OK && cached->n_coming > 0 && i < READS; i++) {
        struct coming *coming = &cached->coming[i];

        if (coming->op != NULL && (wait || kv_op_status(coming->op) != KV_IN_PROGRESS))
            status = landed(cached, coming);
    }
    return status;
}

static kv_status_t fetch(struct kvw_block_cache *cached, uint32_t layer, uint32_t block)
{
    struct coming *coming = cached->coming;
    const uint32_t slot = kvw_block_policy_admit(cached->layers[layer].cache, block);
    const struct kv_rows box = {
        .layer_begin = layer,
        .n_layers = 1,
        .token_begin = block * KV_BLOCK_TOKENS,
        .n_tokens = KV_BLOCK_TOKENS,
    };
    kv_status_t status;

    if (slot == KVW_BLOCK_NO_SLOT)
        return KV_OK;
    while (coming->op != NULL)
        coming++;
    const struct kv_rows_io io = {
        .buffer = cached->buffer,
        .offset = slot_begin(cached, layer, slot) * cached->row_bytes,
        .crcs = coming->crcs,
    };
    status = kv_read_begin(kvw_session_handle(cached->store), &box, &io, READ_DEADLINE_MS,
                           &coming->op);
    if (status != KV_OK)
        return kvw_session_fail(cached->store, status);
    coming->layer = layer;
    coming->slot = slot;
    cached->layers[layer].block_of[slot] = block;
    cached->n_coming++;
    cached->bytes_fetched += slot_rows(cached) * cached->row_bytes;
    return KV_OK;
}

kv_status_t kvw_block_cache_end(struct kvw_block_cache *cached, uint32_t layer, uint32_t n_rows)
{
    const uint32_t *wanted;
    const uint32_t n_wanted =
        kvw_block_policy_end(cached->layers[layer].cache, n_rows / KV_BLOCK_TOKENS, &wanted);
    kv_status_t status = collect(cached, false);

    for (uint32_t i = 0; i < n_wanted && i < READS_PER_STEP; i++)
        if (status == KV_OK && cached->n_coming < READS)
            status = fetch(cached, layer, wanted[i]);
    return status;
}

kv_status_t kvw_block_cache_truncate(struct kvw_block_cache *cached, uint32_t tokens)
{
    const kv_status_t status = collect(cached, true);

    for (uint32_t i = 0; status == KV_OK && i < cached->n_layers; i++)
        kvw_block_policy_drop(cached->layers[i].cache, tokens / KV_BLOCK_TOKENS);
    return status;
}

uint64_t kvw_block_cache_bytes(const struct kvw_block_cache *cached)
{
    return kv_buffer_bytes(cached->buffer);
}

uint64_t kvw_block_cache_bytes_fetched(const struct kvw_block_cache *cached)
{
    return cached->bytes_fetched;
}

void kvw_block_cache_check(const struct kvw_block_cache *cached)
{
    uint32_t n_coming = 0;

    for (uint32_t i = 0; i < cached->n_layers; i++) {
        const struct layer *layer = &cached->layers[i];

        kvw_block_policy_check(layer->cache);
        for (uint32_t block = 0; block < cached->n_blocks; block++) {
            const uint32_t slot = kvw_block_policy_slot(layer->cache, block);

            assert(slot == KVW_BLOCK_NO_SLOT || layer->block_of[slot] == block);
        }
    }
    for (uint32_t i = 0; i < READS; i++) {
        const struct coming *coming = &cached->coming[i];

        if (coming->op == NULL)
            continue;
        n_coming++;
        assert(coming->layer < cached->n_layers && coming->slot < cached->n_slots);
        assert(
            kvw_block_policy_is_coming(cached->layers[coming->layer].cache, coming->slot,
                                       cached->layers[coming->layer].block_of[coming->slot]));
    }
    assert(n_coming == cached->n_coming);
}
