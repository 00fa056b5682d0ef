#include "kvserver/store/query/selection.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    PIECE_ITEMS = 8 << 10, /* of a step of cost 1: some us */
};

/* What follows when a step has processed all items. */
enum after {
    NEXT_STEP,
    SAME_STEP,  /* repeat it */
    NEXT_QUERY, /* the first step, for the next query vector */
};

/* A selection goes through one of two lists of steps, `merged` or `per_query`.  Each step
 * processes all items, one piece at a time. */
struct step {
    uint32_t cost;       /* of an item, relative to the fastest step */
    bool costs_by_query; /* and a quarter of that for each query vector */
    bool (*begin)(struct kvs_selector *selector); /* returns false to skip the step; NULL: never
                                                   * skipped */
    void (*work)(struct kvs_selector *selector,
                 uint32_t at,
                 uint32_t n);                         /* items [at, at + n) */
    enum after (*end)(struct kvs_selector *selector); /* NULL: NEXT_STEP */
};

uint32_t kvs_selection_max(const struct kvs_selection *selection, uint32_t n)
{
    const uint64_t max = (uint64_t)kvs_selection_n_candidates(selection, selection->k) *
                         kvs_selection_groups(selection);

    return max < n ? (uint32_t)max : n;
}

static uint32_t n_candidates_of(const struct kvs_selector *selector, uint32_t group)
{
    return kvs_selection_n_candidates(&selector->selection, selector->k[group]);
}

static const uint32_t *counts_at(const struct kvs_selector *selector, uint32_t at)
{
    return selector->counts != NULL ? selector->counts + at : NULL;
}

/* ---- weights: softmax of each query vector's scores, then merged ------------------------- */

static float *scores_at(const struct kvs_selector *selector, uint32_t at)
{
    return selector->scores + (size_t)selector->query * selector->n + at;
}

static void raise_max(struct kvs_selector *selector, float most)
{
    selector->max = most > selector->max ? most : selector->max;
}

/* Starts the next query vector's weights, with its maximum. */
static bool begin_max(struct kvs_selector *selector)
{
    selector->max = selector->knows_maxima ? selector->maxima[selector->query] : -INFINITY;
    selector->sum = 0;
    return !selector->knows_maxima;
}

static void find_max(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    raise_max(selector, kv_scores_max(scores_at(selector, at), counts_at(selector, at), n));
}

static void make_exps(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    selector->sum += kv_softmax_exps(scores_at(selector, at), counts_at(selector, at), n,
                                     selector->selection.scale, selector->max);
}

static enum after end_exps(struct kvs_selector *selector)
{
    selector->factors[selector->query] = kv_softmax_factor(selector->sum);
    return ++selector->query < selector->selection.n_queries ? NEXT_QUERY : NEXT_STEP;
}

/* Merges the weights of all query vectors. */
static void merge_all(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    const struct kvs_selection *selection = &selector->selection;
    float *merged = selector->weights + at;

    memset(merged, 0, n * sizeof(*merged));
    kv_weights_merge(selection->merge == KV_MERGE_SUM ? KV_WEIGHTS_SUM : KV_WEIGHTS_MAX,
                     selector->scores + at, selector->n, selector->factors,
                     selection->n_queries, n, merged);
}

static enum after end_merge(struct kvs_selector *selector)
{
    selector->query = 0;
    selector->sum = 0;
    return NEXT_STEP;
}

/* UNION and NONE need weights only if they are requested, or determine how many are
 * selected. */
static bool per_query_weighs(struct kvs_selector *selector)
{
    return selector->wants_weights || selector->selection.selection != KV_SELECT_TOP;
}

static bool begin_per_query_max(struct kvs_selector *selector)
{
    return per_query_weighs(selector) && begin_max(selector);
}

/* On a copy, because the scores are still needed for selecting. */
static void copy_exps(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    memcpy(selector->spare + at, scores_at(selector, at), n * sizeof(*selector->spare));
    selector->sum += kv_softmax_exps(selector->spare + at, counts_at(selector, at), n,
                                     selector->selection.scale, selector->max);
}

static enum after end_per_query_exps(struct kvs_selector *selector)
{
    selector->factors[0] = kv_softmax_factor(selector->sum);
    return NEXT_STEP;
}

static bool wants_weights(struct kvs_selector *selector)
{
    return selector->wants_weights;
}

static void merge_one(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    if (selector->query == 0)
        memset(selector->weights + at, 0, n * sizeof(*selector->weights));
    kv_weights_merge(KV_WEIGHTS_MAX, selector->spare + at, n, selector->factors, 1, n,
                     selector->weights + at);
}

/* ---- how many: MASS and THRESHOLD determine k from the weights --------------------------- */

/* Returns the group's weights. */
static const float *weights_at(const struct kvs_selector *selector, uint32_t at)
{
    return (kvs_selection_merges(&selector->selection) ? selector->weights : selector->spare) +
           at;
}

/* Limits the group to k rows, at least one. */
static void limit_k(struct kvs_selector *selector, uint64_t k)
{
    if (k < selector->selection.k)
        selector->k[selector->query] = k > 0 ? (uint32_t)k : 1;
}

static bool is_by_mass(struct kvs_selector *selector)
{
    return selector->selection.selection == KV_SELECT_MASS;
}

static void sum_weights(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    selector->sum += kv_weights_sum(selector->weights + at, counts_at(selector, at), n);
}

static bool begin_mass(struct kvs_selector *selector)
{
    if (!is_by_mass(selector))
        return false;
    selector->pass = 0;
    kv_mass_begin(&selector->mass, selector->sum, (double)selector->selection.share);
    return true;
}

static void count_mass(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    kv_mass_count(&selector->mass, weights_at(selector, at), counts_at(selector, at), n);
}

static enum after end_mass(struct kvs_selector *selector)
{
    kv_mass_next(&selector->mass);
    if (++selector->pass < KV_TOPK_PASSES)
        return SAME_STEP;
    limit_k(selector, selector->mass.n_rows);
    return NEXT_STEP;
}

static bool is_by_threshold(struct kvs_selector *selector)
{
    return selector->selection.selection == KV_SELECT_THRESHOLD;
}

static bool begin_heaviest(struct kvs_selector *selector)
{
    if (!is_by_threshold(selector))
        return false;
    selector->sum = 0;
    selector->max = -INFINITY;
    return true;
}

static void find_heaviest(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    raise_max(selector, kv_scores_max(weights_at(selector, at), counts_at(selector, at), n));
}

static void count_from(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    selector->sum += kv_count_from(weights_at(selector, at), counts_at(selector, at), n,
                                   selector->max * selector->selection.share);
}

static enum after end_from(struct kvs_selector *selector)
{
    limit_k(selector, selector->sum);
    return NEXT_STEP;
}

/* ---- which: the k-th largest score is the bound; rows above it are selected -------------- */

/* Guesses from a sample between which values the bound lies.  Returns false if it cannot. */
static bool begin_sift(struct kvs_selector *selector)
{
    const uint32_t group = selector->query;

    kv_topk_begin(&selector->groups[group], n_candidates_of(selector, group));
    selector->pass = 0;
    selector->n_between = 0;
    selector->n_above = 0;
    for (uint32_t i = 0; selector->query_mask != NULL && i < selector->n; i++)
        selector->own[i] = selector->query_mask[i] >> group & 1;
    return selector->query_mask == NULL && selector->counts == NULL &&
           kv_scores_guess(kvs_selector_scores(selector, group), selector->n,
                           n_candidates_of(selector, group), &selector->least, &selector->most);
}

static void sift(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    size_t n_above;

    selector->n_between += (uint32_t)kv_scores_between(
        kvs_selector_scores(selector, selector->query) + at, n, selector->least, selector->most,
        (float *)(void *)selector->own + selector->n_between, &n_above);
    selector->n_above += n_above;
}

/* If the bound is among the scores in between, only these are counted from here on: the k-th
 * largest of all is one of them. */
static enum after end_sift(struct kvs_selector *selector)
{
    const uint64_t k = n_candidates_of(selector, selector->query);

    if (selector->n_above < k && k <= selector->n_above + selector->n_between)
        kv_topk_begin(&selector->groups[selector->query], k - selector->n_above);
    else
        selector->n_between = 0;
    return NEXT_STEP;
}

static void count(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    struct kv_topk *topk = &selector->groups[selector->query];
    const uint32_t *counts = selector->query_mask != NULL ? selector->own : selector->counts;

    if (selector->n_between > 0)
        kv_topk_count(topk, (const float *)(const void *)selector->own + at, NULL, n);
    else
        kv_topk_count(topk, kvs_selector_scores(selector, selector->query) + at,
                      counts != NULL ? counts + at : NULL, n);
}

static enum after end_count(struct kvs_selector *selector)
{
    kv_topk_next(&selector->groups[selector->query]);
    if (++selector->pass < KV_TOPK_PASSES)
        return SAME_STEP;
    return ++selector->query < kvs_selection_groups(&selector->selection) ? NEXT_QUERY
                                                                          : NEXT_STEP;
}

static bool is_query_mask(struct kvs_selector *selector)
{
    return selector->query_mask != NULL;
}

/* Sets bit g of a row's mark if group g, which may select the row, does.  Each group may select
 * only few rows, and all together 32 times as many, so only the groups in a row's mask are
 * checked. */
static void mark_selected(struct kvs_selector *selector, uint32_t at, uint32_t n)
{
    const uint32_t all = UINT32_MAX >> (32 - kvs_selection_groups(&selector->selection));
    uint32_t *marks = (uint32_t *)(void *)selector->spare;

    for (uint32_t i = at; i < at + n; i++) {
        marks[i] = 0;
        for (uint32_t left = selector->query_mask[i] & all; left != 0; left &= left - 1) {
            const uint32_t group = (uint32_t)__builtin_ctz(left);
            struct kv_topk *topk = &selector->groups[group];
            const uint32_t image = kv_score_key(kvs_selector_scores(selector, group)[i]);
            const bool is_tie = image == topk->bound && topk->ties > 0;

            if (image <= topk->bound && !is_tie)
                continue;
            topk->ties -= is_tie;
            marks[i] |= 1u << group;
        }
    }
}

/* ---- the steps --------------------------------------------------------------------------- */

/* SUM and MAX: the first two steps for each query vector, then the others for the merged
 * weights, which are computed from all query vectors at once. */
static const struct step merged[] = {
    {.cost = 1, .begin = begin_max, .work = find_max},
    {.cost = 1, .work = make_exps, .end = end_exps},
    {.cost = 1, .costs_by_query = true, .work = merge_all, .end = end_merge},
    {.cost = 4, .begin = is_by_mass, .work = sum_weights},
    {.cost = 4, .begin = begin_mass, .work = count_mass, .end = end_mass},
    {.cost = 1, .begin = begin_heaviest, .work = find_heaviest},
    {.cost = 1, .begin = is_by_threshold, .work = count_from, .end = end_from},
    {.cost = 1, .begin = begin_sift, .work = sift, .end = end_sift},
    {.cost = 1, .work = count, .end = end_count},
    {.work = NULL},
};

/* UNION and NONE: all steps but the last for each query vector.  The last one is expensive: it
 * reads scores of many vectors for one row, which lie far apart. */
static const struct step per_query[] = {
    {.cost = 1, .begin = begin_per_query_max, .work = find_max},
    {.cost = 1, .begin = per_query_weighs, .work = copy_exps, .end = end_per_query_exps},
    {.cost = 1, .begin = wants_weights, .work = merge_one},
    {.cost = 4, .begin = begin_mass, .work = count_mass, .end = end_mass},
    {.cost = 1, .begin = begin_heaviest, .work = find_heaviest},
    {.cost = 1, .begin = is_by_threshold, .work = count_from, .end = end_from},
    {.cost = 1, .begin = begin_sift, .work = sift, .end = end_sift},
    {.cost = 1, .work = count, .end = end_count},
    {.cost = 16, .begin = is_query_mask, .work = mark_selected},
    {.work = NULL},
};

static const struct step *step_of(const struct kvs_selector *selector)
{
    return (kvs_selection_merges(&selector->selection) ? merged : per_query) + selector->step;
}

static bool is_done(const struct kvs_selector *selector)
{
    return step_of(selector)->work == NULL;
}

/* Begins the step, or the first one after it that is not skipped. */
static void begin_step(struct kvs_selector *selector, uint32_t step)
{
    selector->step = step;
    while (!is_done(selector) && step_of(selector)->begin != NULL &&
           !step_of(selector)->begin(selector))
        selector->step++;
}

/* All items have been processed. */
static void end_step(struct kvs_selector *selector)
{
    const struct step *step = step_of(selector);
    const enum after after = step->end != NULL ? step->end(selector) : NEXT_STEP;

    selector->cursor = 0;
    if (after != SAME_STEP)
        begin_step(selector, after == NEXT_QUERY ? 0 : selector->step + 1);
}

static uint32_t cost_of(const struct kvs_selector *selector)
{
    const struct step *step = step_of(selector);

    return step->cost + (step->costs_by_query ? selector->selection.n_queries / 4 : 0);
}

/* Returns the number of items that the step processes. */
static uint32_t items_of(const struct kvs_selector *selector)
{
    return step_of(selector)->work == count && selector->n_between > 0 ? selector->n_between
                                                                       : selector->n;
}

void kvs_select_begin(struct kvs_selector *selector,
                      const struct kvs_selection *selection,
                      float *scores,
                      const float *maxima,
                      const uint32_t *counts,
                      const uint32_t *query_mask,
                      uint32_t n,
                      bool weights,
                      float *room)
{
    assert(query_mask == NULL || (counts == NULL && !kvs_selection_merges(selection)));
    selector->selection = *selection;
    selector->scores = scores;
    selector->counts = counts;
    selector->query_mask = query_mask;
    selector->n = n;
    selector->wants_weights = weights;
    selector->weights = room;
    selector->spare = room + n;
    selector->own = (uint32_t *)(void *)(room + 2 * (size_t)n);
    selector->query = selector->cursor = selector->pass = 0;
    selector->knows_maxima = maxima != NULL;
    if (maxima != NULL)
        memcpy(selector->maxima, maxima, selection->n_queries * sizeof(*maxima));
    for (uint32_t group = 0; group < kvs_selection_groups(selection); group++)
        selector->k[group] =
            selection->per_query != NULL ? selection->per_query[group] : selection->k;
    begin_step(selector, 0);
}

bool kvs_select_piece(struct kvs_selector *selector)
{
    if (is_done(selector))
        return true;
    const uint32_t n_all = items_of(selector), n_rest = n_all - selector->cursor;
    const uint32_t most = PIECE_ITEMS / cost_of(selector);
    const uint32_t n = n_rest < most ? n_rest : most;

    step_of(selector)->work(selector, selector->cursor, n);
    selector->cursor += n;
    if (selector->cursor == n_all)
        end_step(selector);
    return is_done(selector);
}

uint32_t
kvs_select_rows(struct kvs_selector *selector, uint32_t *ret_indices, uint32_t *ret_query_masks)
{
    const uint32_t n_groups = kvs_selection_groups(&selector->selection);
    uint32_t *marks = (uint32_t *)(void *)selector->spare, n_selected = 0;

    if (n_groups == 1 && selector->query_mask == NULL) {
        n_selected =
            (uint32_t)kv_topk_collect(&selector->groups[0], kvs_selector_scores(selector, 0),
                                      NULL, selector->n, 0, ret_indices);
        for (uint32_t i = 0; ret_query_masks != NULL && i < n_selected; i++)
            ret_query_masks[i] = kvs_selection_merges(&selector->selection) ? UINT32_MAX : 1;
        return n_selected;
    }
    if (selector->query_mask == NULL) {
        memset(marks, 0, selector->n * sizeof(*marks));
        for (uint32_t group = 0; group < n_groups; group++) {
            const size_t n =
                kv_topk_collect(&selector->groups[group], kvs_selector_scores(selector, group),
                                NULL, selector->n, 0, ret_indices);

            for (size_t i = 0; i < n; i++)
                marks[ret_indices[i]] |= 1u << group;
        }
    }
    for (uint32_t i = 0; i < selector->n; i++) {
        if (marks[i] == 0)
            continue;
        if (ret_query_masks != NULL)
            ret_query_masks[n_selected] = marks[i];
        ret_indices[n_selected++] = i;
    }
    return n_selected;
}
