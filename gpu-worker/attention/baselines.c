/* The baselines oracle, window and random: all rows are in memory, and a decode step attends to
 * as many of them as a method with an index would.
 *
 *   oracle   per kv head, the k middle rows with the largest sum over its query heads of
 *            softmax(q key / sqrt(d)) over the middle; ties go to the lower row
 *   window   the k rows before the window
 *   random   k middle rows, drawn anew for every seed, layer, kv head and token
 *
 * The oracle is the best result of any index that ranks rows as PQCache does; random
 * shows the loss of an index that fails.  Recall is measured against the oracle's selection. */
#include "gpu-worker/attention/baselines_private.h"

#include "gpu-worker/kvcache/session.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct kvw_baseline *baseline_of(struct kvw_method *attention)
{
    return (struct kvw_baseline *)attention;
}

/* The whole budget is what others are compared with. */
static void use_options(struct kvw_baseline *baseline, const struct kvw_method_options *options)
{
    baseline->options = *options;
    baseline->options.budget.selects_half = false;
}

/* ---- exact top-k ---- */

/* scores_host (n_q_heads, middle rows) of a layer's middle. */
static void score_middle(struct kvw_baseline *baseline,
                         const struct kvw_budget *budget,
                         uint32_t layer,
                         const struct kvw_device_buffer *q)
{
    const struct kvw_rows_shape *shape = kvw_full_rows_shape(baseline->full_rows);
    const uint32_t n = budget->window_begin - budget->sinks;

    if (n == 0)
        return;
    baseline->device->ops->rows_score(baseline->device, shape, q,
                                      kvw_full_rows_of(baseline->full_rows, layer),
                                      budget->sinks, n, baseline->scores);
    kvw_device_read(baseline->device, KVW_STREAM_COMPUTE, baseline->scores, 0,
                    baseline->scores_host, (size_t)shape->n_q_heads * n * sizeof(float));
    baseline->device->ops->event_record(baseline->device, KVW_STREAM_COMPUTE, baseline->scored);
    baseline->device->ops->event_wait(baseline->scored);
}

static uint64_t median(uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t least = a < b ? a : b, most = a < b ? b : a;

    return c < least ? least : c > most ? most : c;
}

/* Moves the k largest of order (n), which are all different, to its front, in any order. */
static void largest_first(uint64_t *order, size_t n, size_t k)
{
    size_t begin = 0, end = n;

    while (begin < k && k < end) {
        const uint64_t pivot =
            median(order[begin], order[begin + (end - begin) / 2], order[end - 1]);
        size_t left = begin, right = end - 1;

        /* Both end where the pivot is: larger ones before it, smaller ones after it. */
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

void kvw_baseline_choose_best(
    struct kvw_baseline *baseline, float *scores, uint32_t n, uint32_t k, uint32_t *ret_places)
{
    const struct kvw_rows_shape *shape = kvw_full_rows_shape(baseline->full_rows);
    const uint32_t group = shape->n_q_heads / shape->n_kv_heads;

    memset(baseline->sums, 0, n * sizeof(baseline->sums[0]));
    for (uint32_t g = 0; n > 0 && g < group; g++) {
        float *of_head = scores + (size_t)g * n;
        const float most = baseline->softmax->max(of_head, n);
        const float scale = 1 / baseline->softmax->exp_sum(of_head, n, most);

        for (uint32_t i = 0; i < n; i++)
            baseline->sums[i] += of_head[i] * scale;
    }
    /* Sums are not negative, so their bits sort as they do; among equal sums the first row
     * is the largest. */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits;

        memcpy(&bits, &baseline->sums[i], sizeof(bits));
        baseline->order[i] = (uint64_t)bits << 32 | (UINT32_MAX - i);
    }
    largest_first(baseline->order, n, k);
    for (uint32_t i = 0; i < k; i++)
        ret_places[i] = UINT32_MAX - (uint32_t)baseline->order[i];
    qsort(ret_places, k, sizeof(ret_places[0]), compare_ids);
}

/* Uses up the head's scores. */
static void choose_exactly(struct kvw_baseline *baseline,
                           const struct kvw_budget *budget,
                           uint32_t head,
                           uint32_t *ret_ids)
{
    const struct kvw_rows_shape *shape = kvw_full_rows_shape(baseline->full_rows);
    const uint32_t group = shape->n_q_heads / shape->n_kv_heads;
    const uint32_t n = budget->window_begin - budget->sinks;

    kvw_baseline_choose_best(baseline, baseline->scores_host + (size_t)head * group * n, n,
                             budget->k, ret_ids);
    for (uint32_t i = 0; i < budget->k; i++)
        ret_ids[i] += budget->sinks;
}

/* ---- selection ---- */

static void choose_oracle(struct kvw_baseline *baseline,
                          const struct kvw_budget *budget,
                          uint32_t layer,
                          uint32_t head,
                          uint32_t *ret_ids)
{
    (void)layer;
    choose_exactly(baseline, budget, head, ret_ids);
}

static void choose_window(struct kvw_baseline *baseline,
                          const struct kvw_budget *budget,
                          uint32_t layer,
                          uint32_t head,
                          uint32_t *ret_ids)
{
    (void)baseline;
    (void)layer;
    (void)head;
    for (uint32_t i = 0; i < budget->k; i++)
        ret_ids[i] = budget->window_begin - budget->k + i;
}

/* Knuth's algorithm S: takes each row with probability (rows still to take) / (rows left). */
static void choose_random(struct kvw_baseline *baseline,
                          const struct kvw_budget *budget,
                          uint32_t layer,
                          uint32_t head,
                          uint32_t *ret_ids)
{
    const uint64_t place = (uint64_t)layer << 32 | head;
    struct kv_random dice;
    uint32_t taken = 0;

    kv_random_init(
        &dice, kv_mix64(kv_mix64(kv_mix64(baseline->options.seed) + place) + budget->n_rows));
    for (uint32_t row = budget->sinks; taken < budget->k; row++)
        if (kv_random_below(&dice, budget->window_begin - row) < budget->k - taken)
            ret_ids[taken++] = row;
}

/* ---- runs ---- */

static void add_run(struct kvw_row_run *runs,
                    uint32_t *n_runs,
                    uint32_t head_begin,
                    const struct kvw_row_run *run)
{
    if (run->n_rows == 0)
        return;
    if (*n_runs > head_begin) {
        struct kvw_row_run *last = &runs[*n_runs - 1];

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

static void attend_baseline(struct kvw_baseline *baseline,
                            uint32_t layer,
                            uint32_t token,
                            const struct kvw_device_buffer *q,
                            struct kvw_device_buffer *out)
{
    const struct kvw_rows_shape *shape = kvw_full_rows_shape(baseline->full_rows);
    const struct kvw_device_buffer *rows = kvw_full_rows_of(baseline->full_rows, layer);
    const struct kvw_budget budget =
        kvw_budget_of(&baseline->options.budget, baseline->prompt_rows, token + 1);
    const bool is_sample =
        baseline->options.recall_every > 0 && token % baseline->options.recall_every == 0;
    uint32_t n_runs = 0;

    if (baseline->needs_scores || is_sample)
        score_middle(baseline, &budget, layer, q);
    for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
        const size_t first = (size_t)head * shape->capacity;
        const uint32_t head_begin = n_runs;
        struct kvw_row_run run = {rows, first, budget.sinks};

        baseline->run_begin[head] = n_runs;
        baseline->choose(baseline, &budget, layer, head, baseline->ids);
        add_run(baseline->runs, &n_runs, head_begin, &run);
        for (uint32_t i = 0; i < budget.k; i++) {
            run = (struct kvw_row_run){rows, first + baseline->ids[i], 1};
            add_run(baseline->runs, &n_runs, head_begin, &run);
        }
        run = (struct kvw_row_run){rows, first + budget.window_begin,
                                   budget.n_rows - budget.window_begin};
        add_run(baseline->runs, &n_runs, head_begin, &run);

        if (is_sample) {
            if (!baseline->is_exact)
                choose_exactly(baseline, &budget, head, baseline->exact);
            baseline->rows_to_recall += budget.k;
            baseline->rows_recalled += baseline->is_exact
                                           ? budget.k
                                           : n_common(baseline->ids, baseline->exact, budget.k);
        }
        baseline->rows_attended +=
            budget.sinks + budget.k + budget.n_rows - budget.window_begin;
    }
    baseline->run_begin[shape->n_kv_heads] = n_runs;
    baseline->device->ops->runs_attend(baseline->device, shape, q, baseline->runs,
                                       baseline->run_begin, out, NULL);
}

/* ---- the method's table ---- */

void kvw_baseline_close(struct kvw_baseline *baseline)
{
    kvw_full_rows_destroy(baseline->full_rows);
    baseline->device->ops->buffer_destroy(baseline->scores);
    baseline->device->ops->event_destroy(baseline->scored);
    free(baseline->scores_host);
    free(baseline->sums);
    free(baseline->order);
    free(baseline->ids);
    free(baseline->exact);
    free(baseline->runs);
    free(baseline->run_begin);
}

kv_status_t kvw_baseline_open(struct kvw_baseline *baseline,
                              const struct kvw_method_setup *setup,
                              const struct kvw_method_ops *ops,
                              char *detail,
                              size_t detail_bytes)
{
    const struct kvw_model_params *params = &setup->session.model->params;
    const size_t capacity = setup->session.capacity;
    const size_t scores_bytes = params->n_q_heads * capacity * sizeof(float);
    kv_status_t status = KV_NO_MEMORY;

    snprintf(detail, detail_bytes, "out of memory: scores of %zu tokens", capacity);
    baseline->base.ops = ops;
    baseline->options = setup->options;
    baseline->device = setup->session.model->device;
    baseline->softmax = kvw_softmax();
    baseline->scores_host = malloc(scores_bytes);
    baseline->sums = malloc(capacity * sizeof(baseline->sums[0]));
    baseline->order = malloc(capacity * sizeof(baseline->order[0]));
    baseline->ids = malloc(capacity * sizeof(baseline->ids[0]));
    baseline->exact = malloc(capacity * sizeof(baseline->exact[0]));
    /* Rows that do not touch, between sinks and window. */
    baseline->runs =
        malloc(params->n_kv_heads * (capacity / 2 + 3) * sizeof(baseline->runs[0]));
    baseline->run_begin = calloc(params->n_kv_heads + 1, sizeof(baseline->run_begin[0]));
    if (baseline->scores_host != NULL && baseline->sums != NULL && baseline->order != NULL &&
        baseline->ids != NULL && baseline->exact != NULL && baseline->runs != NULL &&
        baseline->run_begin != NULL)
        status = baseline->device->ops->event_create(baseline->device, &baseline->scored);
    if (status == KV_OK)
        status = baseline->device->ops->buffer_create(baseline->device, scores_bytes,
                                                      &baseline->scores);
    if (status == KV_OK)
        status =
            kvw_full_rows_create(&setup->session, &baseline->full_rows, detail, detail_bytes);
    if (status == KV_OK)
        baseline->base.session = kvw_full_rows_session(baseline->full_rows);
    return status;
}

static void baseline_destroy(struct kvw_method *attention)
{
    kvw_baseline_close(baseline_of(attention));
    free(attention);
}

static kv_status_t create(const struct kvw_method_setup *setup,
                          const struct kvw_method_ops *ops,
                          kvw_choose_fn choose,
                          struct kvw_method **ret_attention,
                          char *detail,
                          size_t detail_bytes)
{
    struct kvw_baseline *baseline = calloc(1, sizeof(*baseline));
    kv_status_t status;

    if (baseline == NULL) {
        snprintf(detail, detail_bytes, "out of memory: method");
        return KV_NO_MEMORY;
    }
    baseline->choose = choose;
    baseline->is_exact = baseline->needs_scores = choose == choose_oracle;
    status = kvw_baseline_open(baseline, setup, ops, detail, detail_bytes);
    if (status != KV_OK) {
        baseline_destroy(&baseline->base);
        return status;
    }
    use_options(baseline, &setup->options);
    *ret_attention = &baseline->base;
    return KV_OK;
}

static kv_status_t oracle_create(const struct kvw_method_setup *setup,
                                 struct kvw_method **ret_attention,
                                 char *detail,
                                 size_t detail_bytes)
{
    return create(setup, &kvw_method_oracle, choose_oracle, ret_attention, detail,
                  detail_bytes);
}

static kv_status_t window_create(const struct kvw_method_setup *setup,
                                 struct kvw_method **ret_attention,
                                 char *detail,
                                 size_t detail_bytes)
{
    return create(setup, &kvw_method_window, choose_window, ret_attention, detail,
                  detail_bytes);
}

static kv_status_t random_create(const struct kvw_method_setup *setup,
                                 struct kvw_method **ret_attention,
                                 char *detail,
                                 size_t detail_bytes)
{
    return create(setup, &kvw_method_random, choose_random, ret_attention, detail,
                  detail_bytes);
}

kv_status_t kvw_baseline_attend(struct kvw_method *attention,
                                enum kvw_phase phase,
                                uint32_t layer,
                                uint32_t token_begin,
                                uint32_t n,
                                const struct kvw_device_buffer *q,
                                const struct kvw_device_buffer *k,
                                const struct kvw_device_buffer *v,
                                struct kvw_device_buffer *out)
{
    struct kvw_baseline *baseline = baseline_of(attention);
    const struct kvw_rows_shape *shape = kvw_full_rows_shape(baseline->full_rows);
    const uint64_t possible = kvw_method_rows_possible(shape, token_begin, n);
    const kv_status_t status =
        kvw_full_rows_put(baseline->full_rows, phase, layer, token_begin, n, k, v);

    if (status != KV_OK)
        return status;
    baseline->rows_possible += possible;
    if (phase == KVW_DECODE) {
        attend_baseline(baseline, layer, token_begin, q, out);
        return KV_OK;
    }
    baseline->device->ops->rows_attend(baseline->device, shape, q,
                                       kvw_full_rows_of(baseline->full_rows, layer),
                                       token_begin, n, out);
    baseline->rows_attended += possible;
    baseline->prompt_rows_attended += possible;
    return kvw_session_poll(attention->session);
}

kv_status_t kvw_baseline_end_pass(struct kvw_method *attention,
                                  enum kvw_phase phase,
                                  uint32_t token_begin,
                                  uint32_t n)
{
    if (phase == KVW_PREFILL)
        baseline_of(attention)->prompt_rows = token_begin + n;
    return KV_OK;
}

static kv_status_t baseline_set_options(struct kvw_method *attention,
                                        const struct kvw_method_options *options)
{
    use_options(baseline_of(attention), options);
    return KV_OK;
}

kv_status_t kvw_baseline_rewind(struct kvw_method *attention, uint32_t tokens)
{
    struct kvw_baseline *baseline = baseline_of(attention);

    if (baseline->prompt_rows > tokens)
        baseline->prompt_rows = tokens;
    return KV_OK;
}

uint64_t kvw_baseline_row_bytes(const struct kvw_method *attention)
{
    return kvw_full_rows_bytes(((const struct kvw_baseline *)attention)->full_rows);
}

void kvw_baseline_stats(const struct kvw_method *attention, struct kvw_method_stats *stats)
{
    const struct kvw_baseline *baseline = (const struct kvw_baseline *)attention;

    stats->rows_attended = baseline->rows_attended;
    stats->rows_possible = baseline->rows_possible;
    stats->step_rows_attended = baseline->rows_attended - baseline->prompt_rows_attended;
    stats->step_rows_possible = baseline->rows_possible - baseline->prompt_rows_attended;
    stats->rows_recalled = baseline->rows_recalled;
    stats->rows_to_recall = baseline->rows_to_recall;
    stats->waits.rows_s += kvw_full_rows_wait_s(baseline->full_rows);
}

#define BASELINE_FUNCTIONS                                                  \
    .destroy = baseline_destroy, .attend = kvw_baseline_attend,             \
    .end_pass = kvw_baseline_end_pass, .set_options = baseline_set_options, \
    .rewind = kvw_baseline_rewind, .row_bytes = kvw_baseline_row_bytes,     \
    .stats = kvw_baseline_stats

const struct kvw_method_ops kvw_method_oracle = {
    .name = "oracle",
    .summary = "a step attends to sinks, window and exactly the k best rows between them",
    .has_budget = true,
    .create = oracle_create,
    BASELINE_FUNCTIONS,
};

const struct kvw_method_ops kvw_method_window = {
    .name = "window",
    .summary = "a step attends to sinks and the most recent rows",
    .has_budget = true,
    .create = window_create,
    BASELINE_FUNCTIONS,
};

const struct kvw_method_ops kvw_method_random = {
    .name = "random",
    .summary = "a step attends to sinks, window and k random rows between them",
    .has_budget = true,
    .has_seed = true,
    .create = random_create,
    BASELINE_FUNCTIONS,
};
