#include "gpu-worker/kvcache/block_cache.h"

#include <assert.h>
#include <stdlib.h>

enum {
    /* PQCache fetches up to 32 blocks at a step; here a few at a time, so that what is fetched
     * ahead does not stand in the way of the next query. */
    READS_PER_STEP = 4,
    READS = 64, /* under way in all layers */
    K_CACHE = 32,
    READ_DEADLINE_MS = 30000,
};

/* A block under way. */
struct coming {
    struct kv_op *op; /* NULL: none */
    uint32_t layer, slot;
    uint32_t *crcs; /* (n_kv_heads, KV_BLOCK_TOKENS) */
};

struct layer {
    struct kv_block_cache *cache;
    uint32_t *block_of;     /* (n_slots) */
    uint32_t *fingerprints; /* (n_slots, n_kv_heads) */
};

struct kv_held_blocks {
    struct kv_store_session *store;
    struct kv_device *device;
    struct kv_trace *trace;
    uint32_t n_layers, n_kv_heads, n_slots, n_blocks;
    size_t row_bytes;
    struct kv_buffer *buffer;        /* (n_layers, n_slots, n_kv_heads, KV_BLOCK_TOKENS) rows */
    struct kv_device_buffer *mapped; /* the same memory */
    struct layer *layers;
    struct coming coming[READS];
    uint32_t n_coming;
    uint32_t *n_held;             /* (n_kv_heads) */
    struct kv_cached_block *list; /* (n_kv_heads, n_slots) */
    uint64_t bytes_fetched;
};

static size_t slot_rows(const struct kv_held_blocks *held)
{
    return (size_t)held->n_kv_heads * KV_BLOCK_TOKENS;
}

/* The first row of a slot in the buffer. */
static size_t slot_begin(const struct kv_held_blocks *held, uint32_t layer, uint32_t slot)
{
    return ((size_t)layer * held->n_slots + slot) * slot_rows(held);
}

static kv_status_t layers_create(struct kv_held_blocks *held, enum kv_block_policy policy)
{
    kv_status_t status = KV_OK;

    held->layers = calloc(held->n_layers, sizeof(held->layers[0]));
    if (held->layers == NULL)
        return KV_NO_MEMORY;
    for (uint32_t i = 0; status == KV_OK && i < held->n_layers; i++) {
        struct layer *layer = &held->layers[i];

        layer->block_of = calloc(held->n_slots, sizeof(layer->block_of[0]));
        layer->fingerprints =
            calloc((size_t)held->n_slots * held->n_kv_heads, sizeof(layer->fingerprints[0]));
        status = layer->block_of == NULL || layer->fingerprints == NULL
                     ? KV_NO_MEMORY
                     : kv_block_cache_create(policy, held->n_blocks, held->n_slots, K_CACHE,
                                             &layer->cache);
    }
    for (uint32_t i = 0; status == KV_OK && i < READS; i++) {
        held->coming[i].crcs = calloc(slot_rows(held), sizeof(uint32_t));
        if (held->coming[i].crcs == NULL)
            status = KV_NO_MEMORY;
    }
    return status;
}

kv_status_t kv_held_blocks_create(const struct kvw_session_setup *setup,
                                  struct kv_store_session *store,
                                  enum kv_block_policy policy,
                                  uint32_t n_tokens,
                                  struct kv_held_blocks **ret_held)
{
    const struct kv_model_params *params = &setup->model->params;
    struct kv_held_blocks *held = calloc(1, sizeof(*held));
    kv_status_t status;

    if (held == NULL)
        return KV_NO_MEMORY;
    held->store = store;
    held->device = setup->model->device;
    held->trace = setup->trace;
    held->n_layers = params->n_layers;
    held->n_kv_heads = params->n_kv_heads;
    held->n_slots = n_tokens / KV_BLOCK_TOKENS;
    held->n_blocks = setup->capacity / KV_BLOCK_TOKENS + 1;
    if (held->n_slots > held->n_blocks)
        held->n_slots = held->n_blocks;
    held->row_bytes = (size_t)2 * params->d * kv_dtype_bytes(setup->dtype);
    held->n_held = calloc(held->n_kv_heads, sizeof(held->n_held[0]));
    held->list = calloc((size_t)held->n_kv_heads * held->n_slots, sizeof(held->list[0]));
    status =
        held->n_held == NULL || held->list == NULL ? KV_NO_MEMORY : layers_create(held, policy);
    if (status == KV_OK)
        status = kv_buffer_alloc(setup->client,
                                 slot_begin(held, held->n_layers, 0) * held->row_bytes,
                                 &held->buffer);
    if (status == KV_OK)
        status = held->device->row->buffer_wrap(held->device, kv_buffer_data(held->buffer),
                                                kv_buffer_bytes(held->buffer), &held->mapped);
    if (status != KV_OK) {
        kv_held_blocks_destroy(held);
        return status;
    }
    *ret_held = held;
    return KV_OK;
}

void kv_held_blocks_destroy(struct kv_held_blocks *held)
{
    if (held == NULL)
        return;
    for (uint32_t i = 0; i < READS; i++) {
        kv_op_free(held->coming[i].op);
        free(held->coming[i].crcs);
    }
    held->device->row->buffer_destroy(held->mapped);
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(held->buffer);
    for (uint32_t i = 0; held->layers != NULL && i < held->n_layers; i++) {
        kv_block_cache_destroy(held->layers[i].cache);
        free(held->layers[i].block_of);
        free(held->layers[i].fingerprints);
    }
    free(held->layers);
    free(held->n_held);
    free(held->list);
    free(held);
}

/* ---- what is held ------------------------------------------------------------------------ */

static int compare_held(const void *a, const void *b)
{
    const struct kv_cached_block *x = a, *y = b;

    return (x->block > y->block) - (x->block < y->block);
}

void kv_held_blocks_list(struct kv_held_blocks *held,
                         uint32_t layer,
                         const uint32_t **ret_n_held,
                         const struct kv_cached_block **ret_blocks)
{
    const struct layer *of = &held->layers[layer];
    struct kv_cached_block *at = held->list;

    for (uint32_t head = 0; head < held->n_kv_heads; head++) {
        struct kv_cached_block *begin = at;

        for (uint32_t slot = 0; slot < held->n_slots; slot++)
            if (kv_block_cache_slot(of->cache, of->block_of[slot]) == slot)
                *at++ = (struct kv_cached_block){
                    of->block_of[slot], of->fingerprints[slot * held->n_kv_heads + head]};
        held->n_held[head] = (uint32_t)(at - begin);
        qsort(begin, held->n_held[head], sizeof(*begin), compare_held);
    }
    *ret_n_held = held->n_held;
    *ret_blocks = held->list;
}

bool kv_held_blocks_has(const struct kv_held_blocks *held, uint32_t layer, uint32_t token)
{
    return kv_block_cache_slot(held->layers[layer].cache, token / KV_BLOCK_TOKENS) !=
           KV_BLOCK_NO_SLOT;
}

struct kv_row_run kv_held_blocks_run(const struct kv_held_blocks *held,
                                     uint32_t layer,
                                     uint32_t head,
                                     uint32_t token)
{
    const uint32_t slot =
        kv_block_cache_slot(held->layers[layer].cache, token / KV_BLOCK_TOKENS);

    assert(slot != KV_BLOCK_NO_SLOT);
    return (struct kv_row_run){
        .buffer = held->mapped,
        .first_row = slot_begin(held, layer, slot) + (size_t)head * KV_BLOCK_TOKENS +
                     token % KV_BLOCK_TOKENS,
        .n_rows = 1,
    };
}

void kv_held_blocks_note(struct kv_held_blocks *held, uint32_t layer, uint32_t token)
{
    kv_block_cache_note(held->layers[layer].cache, token / KV_BLOCK_TOKENS);
}

/* ---- what is fetched --------------------------------------------------------------------- */

static kv_status_t landed(struct kv_held_blocks *held, struct coming *coming)
{
    struct layer *layer = &held->layers[coming->layer];
    const struct kv_trace_arg args[] = {{"layer", coming->layer}};
    struct kv_op_times times;
    kv_status_t status = kv_wait(coming->op);

    kv_op_get_times(coming->op, &times);
    kv_trace_span(held->trace, KV_TRACE_FETCH, "block", times.begun_us, times.ended_us, args,
                  1);
    kv_op_free(coming->op);
    coming->op = NULL;
    held->n_coming--;
    if (status != KV_OK)
        return kv_store_session_fail(held->store, status);
    for (uint32_t head = 0; head < held->n_kv_heads; head++)
        layer->fingerprints[coming->slot * held->n_kv_heads + head] =
            kv_block_fingerprint(coming->crcs + (size_t)head * KV_BLOCK_TOKENS);
    kv_block_cache_landed(layer->cache, coming->slot);
    return KV_OK;
}

/* Takes what has come; all that is under way, if `wait`. */
static kv_status_t collect(struct kv_held_blocks *held, bool wait)
{
    kv_status_t status = KV_OK;

    for (uint32_t i = 0; status == KV_OK && held->n_coming > 0 && i < READS; i++) {
        struct coming *coming = &held->coming[i];

        if (coming->op != NULL && (wait || kv_op_status(coming->op) != KV_IN_PROGRESS))
            status = landed(held, coming);
    }
    return status;
}

static kv_status_t fetch(struct kv_held_blocks *held, uint32_t layer, uint32_t block)
{
    struct coming *coming = held->coming;
    const uint32_t slot = kv_block_cache_admit(held->layers[layer].cache, block);
    const struct kv_rows box = {
        .layer_begin = layer,
        .n_layers = 1,
        .token_begin = block * KV_BLOCK_TOKENS,
        .n_tokens = KV_BLOCK_TOKENS,
    };
    kv_status_t status;

    if (slot == KV_BLOCK_NO_SLOT)
        return KV_OK;
    while (coming->op != NULL)
        coming++;
    const struct kv_rows_io io = {
        .buffer = held->buffer,
        .offset = slot_begin(held, layer, slot) * held->row_bytes,
        .crcs = coming->crcs,
    };
    status = kv_read_begin(kv_store_session_handle(held->store), &box, &io, READ_DEADLINE_MS,
                           &coming->op);
    if (status != KV_OK)
        return kv_store_session_fail(held->store, status);
    coming->layer = layer;
    coming->slot = slot;
    held->layers[layer].block_of[slot] = block;
    held->n_coming++;
    held->bytes_fetched += slot_rows(held) * held->row_bytes;
    return KV_OK;
}

kv_status_t kv_held_blocks_end(struct kv_held_blocks *held, uint32_t layer, uint32_t n_rows)
{
    const uint32_t *wanted;
    const uint32_t n_wanted =
        kv_block_cache_end(held->layers[layer].cache, n_rows / KV_BLOCK_TOKENS, &wanted);
    kv_status_t status = collect(held, false);

    for (uint32_t i = 0; i < n_wanted && i < READS_PER_STEP; i++)
        if (status == KV_OK && held->n_coming < READS)
            status = fetch(held, layer, wanted[i]);
    return status;
}

kv_status_t kv_held_blocks_truncate(struct kv_held_blocks *held, uint32_t tokens)
{
    const kv_status_t status = collect(held, true);

    for (uint32_t i = 0; status == KV_OK && i < held->n_layers; i++)
        kv_block_cache_drop(held->layers[i].cache, tokens / KV_BLOCK_TOKENS);
    return status;
}

uint64_t kv_held_blocks_bytes_fetched(const struct kv_held_blocks *held)
{
    return held->bytes_fetched;
}
