#include "gpu-worker/kvcache/index_schedule.h"

#include "gpu-worker/base/time.h"
#include "gpu-worker/kvcache/kmeans_budget.h"

#include <assert.h>
#include <stdlib.h>

enum {
    DEADLINE_MS = 600000,
};

/* The share of a prompt's time that clustering may add where both use the same processors. */
static const double CLUSTERING_SHARE = 0.05;
/* Bytes of keys that a node scores per second without an index, about.  A step waits for an
 * index only as long as scoring without one would take. */
static const double EXACT_BYTES_PER_S = 4e9;

/* A layer's index. */
struct layer {
    struct kv_op *op;     /* outstanding; NULL: none */
    uint32_t n_rows;      /* requested so far */
    uint64_t asked_us;    /* when; 0: not yet */
    uint64_t n_coded;     /* of the last result: rows with codes, in all kv heads */
    uint32_t n_codebooks; /* of the last result */
    bool is_of_steps;     /* the last one was asked for while tokens are generated */
};

struct kvw_index_schedule {
    struct kv_client *client;
    struct kvw_session *store;
    struct kvw_trace *trace;
    struct kvw_index_options options;
    uint64_t seed;
    uint32_t n_layers, n_kv_heads;
    size_t key_bytes;

    struct layer *layers; /* (n_layers) */
    uint32_t n_rows;      /* index requested in all layers */
    uint32_t n_tokens;    /* computed so far */
    uint32_t prompt_rows; /* see kvw_index_schedule_prompt_rows() */

    /* The announced prompt. */
    uint32_t prompt_end, n_steps;
    uint64_t prompt_begin_us; /* 0: not begun */

    /* Of kvw_index_schedule_is_ready(). */
    uint64_t held_us;    /* since when it says no to steps; 0: it has not */
    bool is_held_enough; /* steps go on without the prompt's index */

    struct kvw_kmeans_cost cost; /* as the nodes report it */

    uint64_t wait_us;
    uint32_t n_trained, n_found;
};

kv_status_t kvw_index_schedule_create(const struct kvw_session_setup *setup,
                                      struct kvw_session *store,
                                      const struct kvw_index_options *options,
                                      uint64_t seed,
                                      struct kvw_index_schedule **ret_index)
{
    const struct kvw_model_params *params = &setup->model->params;
    struct kvw_index_schedule *index = calloc(1, sizeof(*index));

    if (index == NULL)
        return KV_NO_MEMORY;
    index->client = setup->client;
    index->store = store;
    index->trace = setup->trace;
    index->options = *options;
    index->seed = seed;
    index->n_layers = params->n_layers;
    index->n_kv_heads = params->n_kv_heads;
    index->key_bytes = params->d * kv_dtype_bytes(setup->dtype);
    index->cost = kvw_kmeans_cost_assumed(params->d, params->n_kv_heads, options->bits,
                                          options->summaries);
    index->layers = calloc(index->n_layers, sizeof(index->layers[0]));
    if (index->layers == NULL) {
        free(index);
        return KV_NO_MEMORY;
    }
    *ret_index = index;
    return KV_OK;
}

void kvw_index_schedule_destroy(struct kvw_index_schedule *index)
{
    if (index == NULL)
        return;
    kvw_index_schedule_give_up(index);
    free(index->layers);
    free(index);
}

void kvw_index_schedule_give_up(struct kvw_index_schedule *index)
{
    for (uint32_t i = 0; i < index->n_layers; i++) {
        kv_op_free(index->layers[i].op);
        index->layers[i].op = NULL;
    }
}

void kvw_index_schedule_prompt_hint(struct kvw_index_schedule *index,
                                    uint32_t prompt_end,
                                    uint32_t n_steps)
{
    index->prompt_end = prompt_end;
    index->n_steps = n_steps;
    index->prompt_begin_us = kvw_now_us();
}

void kvw_index_schedule_wait(struct kvw_index_schedule *index, bool wait_index)
{
    index->options.wait = wait_index;
}

uint32_t kvw_index_schedule_prompt_rows(const struct kvw_index_schedule *index)
{
    return index->prompt_rows;
}

/* Returns the iterations for a layer's next rows: those that fit into the computation since its
 * last ones.  Computation and clustering may share the processors, so only a part of that time
 * counts. */
static uint32_t iterations_for(const struct kvw_index_schedule *index,
                               const struct layer *layer,
                               uint32_t tokens)
{
    const uint64_t since_us =
        layer->asked_us > index->prompt_begin_us ? layer->asked_us : index->prompt_begin_us;
    const uint64_t spent_us = since_us > 0 ? kvw_now_us() - since_us : 0;
    const uint32_t rows = tokens > layer->n_rows ? tokens - layer->n_rows : tokens;

    if (index->options.iterations > 0)
        return index->options.iterations;
    return kvw_kmeans_budget(&index->cost, rows,
                             CLUSTERING_SHARE * (double)spent_us / 1e6 / index->n_layers);
}

/* Takes what the nodes report of a layer's clustering.  If some of the rows got their codes for
 * another session, it is not known how many rows the time is for. */
static void note_cost(struct kvw_index_schedule *index,
                      struct layer *layer,
                      const struct kv_index_result *indexed)
{
    const uint32_t n_codebooks = indexed->n_found + indexed->n_trained;

    if (indexed->n_trained > 0 && indexed->n_found <= layer->n_codebooks &&
        indexed->rows_coded > layer->n_coded)
        kvw_kmeans_cost_report(
            &index->cost, (double)(indexed->rows_coded - layer->n_coded) / index->n_kv_heads,
            (double)indexed->iterations / indexed->n_trained,
            (double)indexed->busiest_us / 1e6);
    layer->n_coded = indexed->rows_coded;
    layer->n_codebooks = n_codebooks;
}

/* Takes the result of a layer's index operation, which has ended.  A node without memory for
 * codes scores rows by their keys, which is slower and gives a correct result. */
static kv_status_t ended(struct kvw_index_schedule *index, uint32_t layer)
{
    struct kv_op **op = &index->layers[layer].op;
    kv_status_t status = kv_op_status(*op);
    struct kv_index_result indexed;
    struct kv_op_times times;

    kv_op_index_result(*op, &indexed);
    kv_op_get_times(*op, &times);
    const struct kvw_trace_arg args[] = {{"layer", layer},
                                         {"codebooks", indexed.n_trained},
                                         {"iterations", indexed.iterations},
                                         {"node_us", (int64_t)indexed.train_us}};
    kvw_trace_span(index->trace, KVW_TRACE_INDEX, "cluster", times.begun_us, times.ended_us,
                   args, 4);
    if (status == KV_OK)
        note_cost(index, &index->layers[layer], &indexed);
    index->n_trained += indexed.n_trained;
    index->n_found += indexed.n_found;
    if (status == KV_NO_MEMORY || status == KV_BUSY || status == KV_DEADLINE)
        status = KV_OK;
    kvw_session_fail(index->store, status);
    kv_op_free(*op);
    *op = NULL;
    return status;
}

/* Takes the results that are there, so that the next layers profit from what nodes report of
 * the first ones. */
static kv_status_t take_ended(struct kvw_index_schedule *index)
{
    kv_status_t status = KV_OK;

    for (uint32_t i = 0; status == KV_OK && i < index->n_layers; i++)
        if (index->layers[i].op != NULL && kv_op_status(index->layers[i].op) != KV_IN_PROGRESS)
            status = ended(index, i);
    return status;
}

/* Counts a wait that has ended.  Returns its seconds. */
static double note_wait(struct kvw_index_schedule *index, uint64_t begin_us)
{
    const uint64_t end_us = kvw_now_us();

    index->wait_us += end_us - begin_us;
    kvw_trace_span(index->trace, KVW_TRACE_WAIT, "index", begin_us, end_us, NULL, 0);
    return (double)(end_us - begin_us) / 1e6;
}

static kv_status_t ask(struct kvw_index_schedule *index, uint32_t layer, uint32_t tokens)
{
    struct layer *own = &index->layers[layer];
    struct kv_index_options asked = {
        .layer_begin = layer,
        .n_layers = 1,
        .tokens = tokens,
        .chapter_blocks = index->options.chapter_blocks,
        .m = index->options.subspaces,
        .bits = index->options.bits,
        .rotates = index->options.rotates,
        .copies = index->options.copies,
        .seed = index->seed,
        .summaries = index->options.summaries,
        .summary_rows = index->options.summary_rows,
        .wait = true,
    };
    kv_status_t status;

    /* One operation at a time for a layer: the last one is for earlier rows, and nearly
     * done. */
    if (own->op != NULL) {
        const uint64_t begin_us = kvw_now_us();

        kv_wait(own->op);
        note_wait(index, begin_us);
    }
    status = take_ended(index);
    if (status != KV_OK)
        return status;
    asked.iterations = iterations_for(index, own, tokens);
    own->n_rows = tokens;
    own->asked_us = kvw_now_us();
    status = kv_index_begin(kvw_session_handle(index->store), &asked, DEADLINE_MS, &own->op);
    return kvw_session_fail(index->store, status);
}

static kv_status_t ask_all(struct kvw_index_schedule *index, uint32_t rows, bool is_of_steps)
{
    kv_status_t status = KV_OK;

    for (uint32_t i = 0; status == KV_OK && i < index->n_layers; i++) {
        status = ask(index, i, rows);
        index->layers[i].is_of_steps = is_of_steps;
    }
    index->n_rows = rows;
    return status;
}

/* Rows to index, of the first `tokens`: whole chapters during the prompt, whole blocks at its
 * end (all rows if one chapter holds the prompt). */
static uint32_t rows_of(const struct kvw_index_schedule *index, uint32_t tokens, bool is_end)
{
    const uint32_t chapter = index->options.chapter_blocks * KV_BLOCK_TOKENS;

    if (chapter == 0)
        return is_end ? tokens : 0;
    return is_end ? tokens / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS : tokens / chapter * chapter;
}

kv_status_t
kvw_index_schedule_rows(struct kvw_index_schedule *index, uint32_t layer, uint32_t tokens)
{
    const uint32_t rows = rows_of(index, tokens, tokens == index->prompt_end);

    if (index->prompt_begin_us == 0)
        index->prompt_begin_us = kvw_now_us();
    if (rows <= index->n_rows)
        return KV_OK;
    index->layers[layer].is_of_steps = false;
    return ask(index, layer, rows);
}

static bool is_any_under_way(const struct kvw_index_schedule *index)
{
    for (uint32_t i = 0; i < index->n_layers; i++)
        if (index->layers[i].op != NULL && kv_op_status(index->layers[i].op) == KV_IN_PROGRESS)
            return true;
    return false;
}

kv_status_t kvw_index_schedule_end_pass(struct kvw_index_schedule *index,
                                        enum kvw_phase phase,
                                        uint32_t tokens)
{
    const bool is_end = phase == KVW_DECODE || tokens == index->prompt_end;
    const uint32_t rows = rows_of(index, tokens, is_end);

    index->n_tokens = tokens;
    if (phase == KVW_PREFILL) {
        index->held_us = 0;
        index->is_held_enough = false;
        index->prompt_rows = is_end ? tokens : 0;
        if (index->n_rows < rows)
            index->n_rows = rows;
        return KV_OK;
    }
    if (index->options.chapter_blocks == 0 ||
        rows < index->n_rows + KV_CHAPTER_BLOCKS_MIN * KV_BLOCK_TOKENS)
        return KV_OK;
    /* Steps wait for none: while one is made, its successor is not asked for. */
    if (!index->options.wait && is_any_under_way(index))
        return take_ended(index);
    return ask_all(index, rows, true);
}

kv_status_t kvw_index_schedule_end_prompt(struct kvw_index_schedule *index)
{
    const uint32_t rows = rows_of(index, index->n_tokens, true);

    index->prompt_rows = index->n_tokens;
    return rows > index->n_rows ? ask_all(index, rows, false) : KV_OK;
}

/* The time that scoring by keys would take in a layer, in all later steps. */
static uint64_t exact_us(const struct kvw_index_schedule *index)
{
    const double exact_s = (double)index->n_steps * index->prompt_rows * index->n_kv_heads *
                           (double)index->key_bytes / EXACT_BYTES_PER_S;

    return (uint64_t)(exact_s * 1e6);
}

bool kvw_index_schedule_is_ready(struct kvw_index_schedule *index,
                                 enum kvw_phase phase,
                                 uint32_t tokens)
{
    bool is_any_of_prompt = false;
    uint64_t now_us;

    if (!is_any_under_way(index))
        return true;
    /* One operation at a time for a layer: the next one waits for the last. */
    if (phase == KVW_PREFILL)
        return rows_of(index, tokens, tokens == index->prompt_end) <= index->n_rows;
    if (index->options.wait)
        return false;
    for (uint32_t i = 0; i < index->n_layers; i++)
        is_any_of_prompt =
            is_any_of_prompt || (!index->layers[i].is_of_steps && index->layers[i].op != NULL &&
                                 kv_op_status(index->layers[i].op) == KV_IN_PROGRESS);
    if (!is_any_of_prompt || index->is_held_enough)
        return true;
    now_us = kvw_now_us();
    if (index->held_us == 0)
        index->held_us = now_us;
    index->is_held_enough = now_us >= index->held_us + index->n_layers * exact_us(index);
    return index->is_held_enough;
}

kv_status_t
kvw_index_schedule_await(struct kvw_index_schedule *index, uint32_t layer, double *waited_s)
{
    const uint64_t begin_us = kvw_now_us();
    const struct layer *own = &index->layers[layer];
    const uint64_t limit_us =
        begin_us + (own->is_of_steps || index->is_held_enough ? 0 : exact_us(index));
    uint64_t now_us = begin_us;

    if (own->op == NULL)
        return KV_OK;
    if (kv_op_status(own->op) == KV_IN_PROGRESS && (index->options.wait || now_us < limit_us)) {
        if (index->options.wait)
            kv_wait(own->op);
        while (kv_op_status(own->op) == KV_IN_PROGRESS && now_us < limit_us) {
            kv_client_wait(index->client, limit_us - now_us);
            now_us = kvw_now_us();
        }
        *waited_s += note_wait(index, begin_us);
    }
    return kv_op_status(own->op) != KV_IN_PROGRESS ? ended(index, layer) : KV_OK;
}

kv_status_t kvw_index_schedule_settle(struct kvw_index_schedule *index)
{
    kv_status_t status = KV_OK;

    for (uint32_t i = 0; status == KV_OK && i < index->n_layers; i++) {
        if (index->layers[i].op == NULL)
            continue;
        kv_wait(index->layers[i].op);
        status = ended(index, i);
    }
    return status;
}

void kvw_index_schedule_truncate(struct kvw_index_schedule *index, uint32_t tokens)
{
    index->n_tokens = tokens;
    if (index->prompt_rows > tokens)
        index->prompt_rows = tokens;
    if (index->n_rows > tokens)
        index->n_rows = tokens / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    for (uint32_t i = 0; i < index->n_layers; i++)
        if (index->layers[i].n_rows > index->n_rows)
            index->layers[i].n_rows = index->n_rows;
    index->prompt_begin_us = 0;
}

void kvw_index_schedule_stats(const struct kvw_index_schedule *index,
                              struct kvw_index_stats *ret_stats)
{
    *ret_stats = (struct kvw_index_stats){
        .wait_s = (double)index->wait_us / 1e6,
        .codebooks_trained = index->n_trained,
        .codebooks_found = index->n_found,
    };
}

void kvw_index_schedule_check(const struct kvw_index_schedule *index)
{
    assert(index->n_rows <= index->n_tokens && index->prompt_rows <= index->n_tokens);
    assert(index->options.chapter_blocks == 0 || index->n_rows % KV_BLOCK_TOKENS == 0);
}
