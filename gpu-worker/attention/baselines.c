/* oracle, window, random - controls: all rows are at hand, and a decode step attends to as many
 * of them as a method with an index would.
 *
 *   oracle   per kv head, the k middle rows with the largest sum over its query heads of
 *            softmax(q key / sqrt(d)) over the middle; of equal ones the first
 *   window   the k rows before the window
 *   random   k middle rows, drawn anew for every seed, layer, kv head and token
 *
 * So the oracle is the best that an index which ranks rows as PQCache does (1A.6) can do, and
 * random shows what is lost if it fails.  Recall is measured against the oracle's choice. */
#include "gpu-worker/attention/method.h"
#include "gpu-worker/base/softmax.h"
#include "gpu-worker/kvcache/full_rows.h"
#include "gpu-worker/kvcache/session.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct chosen;

/* Puts the k rows of a budget for a layer's kv head into ret_ids (k), ascending. */
typedef void (*choose_fn)(struct chosen *chosen,
                          const struct kv_budget *budget,
                          uint32_t layer,
                          uint32_t head,
                          uint32_t *ret_ids);

struct chosen {
    struct kv_attention base;
    choose_fn choose;
    struct kv_attention_options options;
    struct kv_device *device;
    struct kv_local_rows *local;
    const struct kvw_softmax_ops *softmax;
    uint32_t prompt_rows; /* where the prompt ended */

    struct kv_device_buffer *scores; /* (n_q_heads, capacity) */
    float *scores_host;
    float *sums;     /* (capacity) */
    uint64_t *order; /* (capacity) */
    uint32_t *ids;   /* (capacity) */
    uint32_t *exact; /* (capacity) */
    struct kv_row_run *runs;
    uint32_t *run_begin; /* (n_kv_heads + 1) */

    uint64_t rows_attended, rows_possible;
    uint64_t rows_recalled, rows_to_recall;
};

static struct chosen *chosen_of(struct kv_attention *attention)
{
    return (struct chosen *)attention;
}

/* ---- exact top-k ---- */

/* scores_host (n_q_heads, middle rows) of a layer's middle. */
static void score_middle(struct chosen *chosen,
                         const struct kv_budget *budget,
                         uint32_t layer,
                         const struct kv_device_buffer *q)
{
    const struct kv_rows_shape *shape = kv_local_rows_shape(chosen->local);
    const uint32_t n = budget->window_begin - budget->sinks;

    if (n == 0)
        return;
    chosen->device->row->rows_score(chosen->device, shape, q,
                                    kv_local_rows_of(chosen->local, layer), budget->sinks, n,
                                    chosen->scores);
    chosen->device->row->read(chosen->scores, 0, chosen->scores_host,
                              (size_t)shape->n_q_heads * n * sizeof(float));
}

static uint64_t median(uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t least = a < b ? a : b, most = a < b ? b : a;

    return c < least ? least : c > most ? most : c;
}

/* Brings the k largest of order (n), which are all different, to its begin, in any order. */
static void largest_first(uint64_t *order, size_t n, size_t k)
{
    size_t begin = 0, end = n;

    while (begin < k && k < end) {
        const uint64_t pivot =
            median(order[begin], order[begin + (end - begin) / 2], order[end - 1]);
        size_t left = begin, right = end - 1;

        /* Both end where the pivot is: larger ones before it, smaller ones behind. */
        while (true) {
            uint64_t swapped;

            while (order[left] > pivot)
                left++;
            while (order[right] < pivot)
                right--;
            if (left == right)
                break;
            swapped = order[left];
            order[left] = order[right];
            order[right] = swapped;
        }
        if (k <= left)
            end = left;
        else
            begin = left + 1;
    }
}

static int compare_ids(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

static void choose_exactly(struct chosen *chosen,
                           const struct kv_budget *budget,
                           uint32_t head,
                           uint32_t *ret_ids)
{
    const struct kv_rows_shape *shape = kv_local_rows_shape(chosen->local);
    const uint32_t group = shape->n_q_heads / shape->n_kv_heads;
    const uint32_t n = budget->window_begin - budget->sinks;

    memset(chosen->sums, 0, n * sizeof(chosen->sums[0]));
    for (uint32_t g = 0; n > 0 && g < group; g++) {
        float *scores = chosen->scores_host + (size_t)(head * group + g) * n;
        const float most = chosen->softmax->max(scores, n);
        const float scale = 1 / chosen->softmax->exp_sum(scores, n, most);

        for (uint32_t i = 0; i < n; i++)
            chosen->sums[i] += scores[i] * scale;
    }
    /* Sums are not negative, so their bits are in their order; of equal ones the first row is
     * the largest. */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits;

        memcpy(&bits, &chosen->sums[i], sizeof(bits));
        chosen->order[i] = (uint64_t)bits << 32 | (UINT32_MAX - i);
    }
    largest_first(chosen->order, n, budget->k);
    for (uint32_t i = 0; i < budget->k; i++)
        ret_ids[i] = budget->sinks + (UINT32_MAX - (uint32_t)chosen->order[i]);
    qsort(ret_ids, budget->k, sizeof(ret_ids[0]), compare_ids);
}

/* ---- who chooses ---- */

static void choose_oracle(struct chosen *chosen,
                          const struct kv_budget *budget,
                          uint32_t layer,
                          uint32_t head,
                          uint32_t *ret_ids)
{
    (void)layer;
    choose_exactly(chosen, budget, head, ret_ids);
}

static void choose_window(struct chosen *chosen,
                          const struct kv_budget *budget,
                          uint32_t layer,
                          uint32_t head,
                          uint32_t *ret_ids)
{
    (void)chosen;
    (void)layer;
    (void)head;
    for (uint32_t i = 0; i < budget->k; i++)
        ret_ids[i] = budget->window_begin - budget->k + i;
}

/* Knuth's algorithm S: each row with the chance that as many are left to take as are wanted. */
static void choose_random(struct chosen *chosen,
                          const struct kv_budget *budget,
                          uint32_t layer,
                          uint32_t head,
                          uint32_t *ret_ids)
{
    const uint64_t place = (uint64_t)layer << 32 | head;
    struct kv_random dice;
    uint32_t taken = 0;

    kv_random_init(&dice,
                   kv_mix64(kv_mix64(kv_mix64(chosen->options.seed) + place) + budget->n_rows));
    for (uint32_t row = budget->sinks; taken < budget->k; row++)
        if (kv_random_below(&dice, budget->window_begin - row) < budget->k - taken)
            ret_ids[taken++] = row;
}

/* ---- runs ---- */

static void add_run(struct kv_row_run *runs,
                    uint32_t *n_runs,
                    uint32_t head_begin,
                    const struct kv_row_run *run)
{
    if (run->n_rows == 0)
        return;
    if (*n_runs > head_begin) {
        struct kv_row_run *last = &runs[*n_runs - 1];

        if (last->first_row + last->n_rows == run->first_row) {
            last->n_rows += run->n_rows;
            return;
        }
    }
    runs[(*n_runs)++] = *run;
}

static uint64_t n_common(const uint32_t *a, const uint32_t *b, uint32_t n)
{
    uint64_t common = 0;

    for (uint32_t i = 0, j = 0; i < n && j < n;) {
        common += a[i] == b[j];
        if (a[i] <= b[j])
            i++;
        else
            j++;
    }
    return common;
}

static void attend_chosen(struct chosen *chosen,
                          uint32_t layer,
                          uint32_t token,
                          const struct kv_device_buffer *q,
                          struct kv_device_buffer *out)
{
    const struct kv_rows_shape *shape = kv_local_rows_shape(chosen->local);
    const struct kv_device_buffer *rows = kv_local_rows_of(chosen->local, layer);
    const struct kv_budget budget =
        kv_budget_of(&chosen->options.budget, chosen->prompt_rows, token + 1);
    const bool is_oracle = chosen->choose == choose_oracle;
    const bool is_sample =
        chosen->options.recall_every > 0 && token % chosen->options.recall_every == 0;
    uint32_t n_runs = 0;

    if (is_oracle || is_sample)
        score_middle(chosen, &budget, layer, q);
    for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
        const size_t first = (size_t)head * shape->capacity;
        const uint32_t head_begin = n_runs;
        struct kv_row_run run = {rows, first, budget.sinks};

        chosen->run_begin[head] = n_runs;
        chosen->choose(chosen, &budget, layer, head, chosen->ids);
        add_run(chosen->runs, &n_runs, head_begin, &run);
        for (uint32_t i = 0; i < budget.k; i++) {
            run = (struct kv_row_run){rows, first + chosen->ids[i], 1};
            add_run(chosen->runs, &n_runs, head_begin, &run);
        }
        run = (struct kv_row_run){rows, first + budget.window_begin,
                                  budget.n_rows - budget.window_begin};
        add_run(chosen->runs, &n_runs, head_begin, &run);

        if (is_sample) {
            if (!is_oracle)
                choose_exactly(chosen, &budget, head, chosen->exact);
            chosen->rows_to_recall += budget.k;
            chosen->rows_recalled +=
                is_oracle ? budget.k : n_common(chosen->ids, chosen->exact, budget.k);
        }
        chosen->rows_attended += budget.sinks + budget.k + budget.n_rows - budget.window_begin;
    }
    chosen->run_begin[shape->n_kv_heads] = n_runs;
    chosen->device->row->runs_attend(chosen->device, shape, q, chosen->runs, chosen->run_begin,
                                     out, NULL);
}

/* ---- the method's table ---- */

static void chosen_destroy(struct kv_attention *attention)
{
    struct chosen *chosen = chosen_of(attention);

    kv_local_rows_destroy(chosen->local);
    chosen->device->row->buffer_destroy(chosen->scores);
    free(chosen->scores_host);
    free(chosen->sums);
    free(chosen->order);
    free(chosen->ids);
    free(chosen->exact);
    free(chosen->runs);
    free(chosen->run_begin);
    free(chosen);
}

static kv_status_t create(const struct kv_attention_setup *setup,
                          const struct kv_attention_row *row,
                          choose_fn choose,
                          struct kv_attention **ret_attention,
                          char *detail,
                          size_t detail_bytes)
{
    const struct kv_model_params *params = &setup->session.model->params;
    const size_t capacity = setup->session.capacity;
    const size_t scores_bytes = params->n_q_heads * capacity * sizeof(float);
    struct chosen *chosen = calloc(1, sizeof(*chosen));
    kv_status_t status = KV_NO_MEMORY;

    snprintf(detail, detail_bytes, "memory: scores of %zu tokens: refused", capacity);
    if (chosen == NULL)
        return KV_NO_MEMORY;
    chosen->base.row = row;
    chosen->choose = choose;
    chosen->options = setup->options;
    chosen->device = setup->session.model->device;
    chosen->softmax = kvw_softmax();
    chosen->scores_host = malloc(scores_bytes);
    chosen->sums = malloc(capacity * sizeof(chosen->sums[0]));
    chosen->order = malloc(capacity * sizeof(chosen->order[0]));
    chosen->ids = malloc(capacity * sizeof(chosen->ids[0]));
    chosen->exact = malloc(capacity * sizeof(chosen->exact[0]));
    /* Rows that do not touch, between sinks and window. */
    chosen->runs = malloc(params->n_kv_heads * (capacity / 2 + 3) * sizeof(chosen->runs[0]));
    chosen->run_begin = calloc(params->n_kv_heads + 1, sizeof(chosen->run_begin[0]));
    if (chosen->scores_host != NULL && chosen->sums != NULL && chosen->order != NULL &&
        chosen->ids != NULL && chosen->exact != NULL && chosen->runs != NULL &&
        chosen->run_begin != NULL)
        status =
            chosen->device->row->buffer_create(chosen->device, scores_bytes, &chosen->scores);
    if (status == KV_OK)
        status = kv_local_rows_create(&setup->session, &chosen->local, detail, detail_bytes);
    if (status != KV_OK) {
        chosen_destroy(&chosen->base);
        return status;
    }
    chosen->base.session = kv_local_rows_session(chosen->local);
    *ret_attention = &chosen->base;
    return KV_OK;
}

static kv_status_t oracle_create(const struct kv_attention_setup *setup,
                                 struct kv_attention **ret_attention,
                                 char *detail,
                                 size_t detail_bytes)
{
    return create(setup, &kv_attention_oracle, choose_oracle, ret_attention, detail,
                  detail_bytes);
}

static kv_status_t window_create(const struct kv_attention_setup *setup,
                                 struct kv_attention **ret_attention,
                                 char *detail,
                                 size_t detail_bytes)
{
    return create(setup, &kv_attention_window, choose_window, ret_attention, detail,
                  detail_bytes);
}

static kv_status_t random_create(const struct kv_attention_setup *setup,
                                 struct kv_attention **ret_attention,
                                 char *detail,
                                 size_t detail_bytes)
{
    return create(setup, &kv_attention_random, choose_random, ret_attention, detail,
                  detail_bytes);
}

static kv_status_t chosen_attend(struct kv_attention *attention,
                                 enum kv_phase phase,
                                 uint32_t layer,
                                 uint32_t token_begin,
                                 uint32_t n,
                                 const struct kv_device_buffer *q,
                                 const struct kv_device_buffer *k,
                                 const struct kv_device_buffer *v,
                                 struct kv_device_buffer *out)
{
    struct chosen *chosen = chosen_of(attention);
    const struct kv_rows_shape *shape = kv_local_rows_shape(chosen->local);
    const uint64_t possible = kv_attention_rows_possible(shape, token_begin, n);
    const kv_status_t status =
        kv_local_rows_put(chosen->local, phase, layer, token_begin, n, k, v);

    if (status != KV_OK)
        return status;
    chosen->rows_possible += possible;
    if (phase == KV_DECODE) {
        attend_chosen(chosen, layer, token_begin, q, out);
        return KV_OK;
    }
    chosen->device->row->rows_attend(
        chosen->device, shape, q, kv_local_rows_of(chosen->local, layer), token_begin, n, out);
    chosen->rows_attended += possible;
    return kv_store_session_poll(attention->session);
}

static kv_status_t chosen_passed(struct kv_attention *attention,
                                 enum kv_phase phase,
                                 uint32_t token_begin,
                                 uint32_t n)
{
    if (phase == KV_PREFILL)
        chosen_of(attention)->prompt_rows = token_begin + n;
    return KV_OK;
}

static kv_status_t chosen_retune(struct kv_attention *attention,
                                 const struct kv_attention_options *options)
{
    chosen_of(attention)->options = *options;
    return KV_OK;
}

static kv_status_t chosen_rewind(struct kv_attention *attention, uint32_t tokens)
{
    struct chosen *chosen = chosen_of(attention);

    if (chosen->prompt_rows > tokens)
        chosen->prompt_rows = tokens;
    return KV_OK;
}

static void chosen_stats(const struct kv_attention *attention, struct kv_attention_stats *stats)
{
    const struct chosen *chosen = (const struct chosen *)attention;

    stats->rows_attended = chosen->rows_attended;
    stats->rows_possible = chosen->rows_possible;
    stats->rows_recalled = chosen->rows_recalled;
    stats->rows_to_recall = chosen->rows_to_recall;
}

#define CHOSEN_FUNCTIONS                                                         \
    .destroy = chosen_destroy, .attend = chosen_attend, .passed = chosen_passed, \
    .retune = chosen_retune, .rewind = chosen_rewind, .stats = chosen_stats

const struct kv_attention_row kv_attention_oracle = {
    .name = "oracle",
    .summary = "a step attends to sinks, window and exactly the best k rows between them",
    .has_budget = true,
    .create = oracle_create,
    CHOSEN_FUNCTIONS,
};

const struct kv_attention_row kv_attention_window = {
    .name = "window",
    .summary = "a step attends to sinks and the last rows",
    .has_budget = true,
    .create = window_create,
    CHOSEN_FUNCTIONS,
};

const struct kv_attention_row kv_attention_random = {
    .name = "random",
    .summary = "a step attends to sinks, window and k rows drawn at random",
    .has_budget = true,
    .has_seed = true,
    .create = random_create,
    CHOSEN_FUNCTIONS,
};
