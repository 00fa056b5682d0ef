#include "kvserver/store/query/selection.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    SLICE_ITEMS = 64 << 10, /* looked at once: some 50 us */
    COST_MAX = 16,          /* of an item, in those */
};

/* What a step that has looked at all items leads to. */
enum after {
    NEXT_STEP,
    SAME_STEP,  /* once more */
    NEXT_QUERY, /* the first step, for the next query vector */
};

/* A selection goes through one of two lists of steps, `merged` or `per_query`; each step looks at
 * all items, a slice of them at a time. */
struct step {
    uint32_t cost;       /* of an item, where that of the fastest step is 1 */
    bool costs_by_query; /* ... and a quarter of that for each query vector */
    bool (*begin)(struct kv_chooser *chooser); /* false: it is left out; NULL: it never is */
    void (*work)(struct kv_chooser *chooser, uint32_t at, uint32_t n); /* items [at, at + n) */
    enum after (*end)(struct kv_chooser *chooser);                     /* NULL: NEXT_STEP */
};

uint32_t kv_choice_max(const struct kv_choice *choice, uint32_t n)
{
    const uint64_t max =
        (uint64_t)kv_choice_takes(choice, choice->k) * kv_choice_groups(choice);

    return max < n ? (uint32_t)max : n;
}

static uint32_t takes_of(const struct kv_chooser *chooser, uint32_t group)
{
    return kv_choice_takes(&chooser->choice, chooser->k[group]);
}

static const uint32_t *counts_at(const struct kv_chooser *chooser, uint32_t at)
{
    return chooser->counts != NULL ? chooser->counts + at : NULL;
}

/* ---- weights ----------------------------------------------------------------------------- */

static float *scores_at(const struct kv_chooser *chooser, uint32_t at)
{
    return chooser->scores + (size_t)chooser->query * chooser->n + at;
}

static void raise_max(struct kv_chooser *chooser, float most)
{
    chooser->max = most > chooser->max ? most : chooser->max;
}

/* The next query vector's weights are made, which begins with its maximum. */
static bool begin_max(struct kv_chooser *chooser)
{
    chooser->max = chooser->knows_maxima ? chooser->maxima[chooser->query] : -INFINITY;
    chooser->sum = 0;
    return !chooser->knows_maxima;
}

static void find_max(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    raise_max(chooser, kv_scores_max(scores_at(chooser, at), counts_at(chooser, at), n));
}

static void make_exps(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    chooser->sum += kv_softmax_exps(scores_at(chooser, at), counts_at(chooser, at), n,
                                    chooser->choice.scale, chooser->max);
}

static enum after end_exps(struct kv_chooser *chooser)
{
    chooser->factors[chooser->query] = kv_softmax_factor(chooser->sum);
    return ++chooser->query < chooser->choice.n_queries ? NEXT_QUERY : NEXT_STEP;
}

/* The weights of all query vectors, together. */
static void merge_all(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    const struct kv_choice *choice = &chooser->choice;
    float *merged = chooser->weights + at;

    memset(merged, 0, n * sizeof(*merged));
    if (choice->merge == KV_MERGE_SUM)
        kv_merge_sum(chooser->scores + at, chooser->n, chooser->factors, choice->n_queries, n,
                     merged);
    else
        kv_merge_max(chooser->scores + at, chooser->n, chooser->factors, choice->n_queries, n,
                     merged);
}

static enum after end_merge(struct kv_chooser *chooser)
{
    chooser->query = 0;
    chooser->sum = 0;
    return NEXT_STEP;
}

/* UNION and NONE need weights to answer them or to say how many. */
static bool each_weighs(struct kv_chooser *chooser)
{
    return chooser->wants_weights || chooser->choice.selection != KV_SELECT_TOP;
}

static bool begin_each_max(struct kv_chooser *chooser)
{
    return each_weighs(chooser) && begin_max(chooser);
}

/* The scores are still to be chosen by. */
static void copy_exps(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    memcpy(chooser->spare + at, scores_at(chooser, at), n * sizeof(*chooser->spare));
    chooser->sum += kv_softmax_exps(chooser->spare + at, counts_at(chooser, at), n,
                                    chooser->choice.scale, chooser->max);
}

static enum after end_each_exps(struct kv_chooser *chooser)
{
    chooser->factors[0] = kv_softmax_factor(chooser->sum);
    return NEXT_STEP;
}

static bool wants_weights(struct kv_chooser *chooser)
{
    return chooser->wants_weights;
}

static void merge_one(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    if (chooser->query == 0)
        memset(chooser->weights + at, 0, n * sizeof(*chooser->weights));
    kv_merge_max(chooser->spare + at, n, chooser->factors, 1, n, chooser->weights + at);
}

/* ---- how many ---------------------------------------------------------------------------- */

/* The group's weights. */
static const float *weights_at(const struct kv_chooser *chooser, uint32_t at)
{
    return (kv_choice_merges(&chooser->choice) ? chooser->weights : chooser->spare) + at;
}

/* The selection wants k rows. */
static void limit_k(struct kv_chooser *chooser, uint64_t k)
{
    if (k < chooser->choice.k)
        chooser->k[chooser->query] = k > 0 ? (uint32_t)k : 1; /* never nothing */
}

static bool is_by_mass(struct kv_chooser *chooser)
{
    return chooser->choice.selection == KV_SELECT_MASS;
}

static void sum_weights(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    chooser->sum += kv_weights_sum(chooser->weights + at, counts_at(chooser, at), n);
}

static bool begin_mass(struct kv_chooser *chooser)
{
    if (!is_by_mass(chooser))
        return false;
    chooser->pass = 0;
    kv_mass_begin(&chooser->mass, chooser->sum, (double)chooser->choice.share);
    return true;
}

static void count_mass(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    kv_mass_count(&chooser->mass, weights_at(chooser, at), counts_at(chooser, at), n);
}

static enum after end_mass(struct kv_chooser *chooser)
{
    kv_mass_next(&chooser->mass);
    if (++chooser->pass < KV_SELECTOR_PASSES)
        return SAME_STEP;
    limit_k(chooser, chooser->mass.n_rows);
    return NEXT_STEP;
}

static bool is_by_threshold(struct kv_chooser *chooser)
{
    return chooser->choice.selection == KV_SELECT_THRESHOLD;
}

static bool begin_heaviest(struct kv_chooser *chooser)
{
    if (!is_by_threshold(chooser))
        return false;
    chooser->sum = 0;
    chooser->max = -INFINITY;
    return true;
}

static void find_heaviest(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    raise_max(chooser, kv_scores_max(weights_at(chooser, at), counts_at(chooser, at), n));
}

static void count_from(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    chooser->sum += kv_count_from(weights_at(chooser, at), counts_at(chooser, at), n,
                                  chooser->max * chooser->choice.share);
}

static enum after end_from(struct kv_chooser *chooser)
{
    limit_k(chooser, chooser->sum);
    return NEXT_STEP;
}

/* ---- which ------------------------------------------------------------------------------- */

/* Looks for scores that may be the bound, if a sample says which. */
static bool begin_sift(struct kv_chooser *chooser)
{
    const uint32_t group = chooser->query;

    kv_selector_begin(&chooser->groups[group], takes_of(chooser, group));
    chooser->pass = 0;
    chooser->n_between = 0;
    chooser->n_above = 0;
    for (uint32_t i = 0; chooser->from != NULL && i < chooser->n; i++)
        chooser->own[i] = chooser->from[i] >> group & 1;
    return chooser->from == NULL && chooser->counts == NULL &&
           kv_scores_guess(kv_chooser_scores(chooser, group), chooser->n,
                           takes_of(chooser, group), &chooser->least, &chooser->most);
}

static void sift(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    size_t n_above;

    chooser->n_between += (uint32_t)kv_scores_between(
        kv_chooser_scores(chooser, chooser->query) + at, n, chooser->least, chooser->most,
        (float *)(void *)chooser->own + chooser->n_between, &n_above);
    chooser->n_above += n_above;
}

/* All that are near the bound, if it is among them: the k-th largest of all is one of theirs.
 */
static enum after end_sift(struct kv_chooser *chooser)
{
    const uint64_t k = takes_of(chooser, chooser->query);

    if (chooser->n_above < k && k <= chooser->n_above + chooser->n_between)
        kv_selector_begin(&chooser->groups[chooser->query], k - chooser->n_above);
    else
        chooser->n_between = 0;
    return NEXT_STEP;
}

static void count(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    struct kv_selector *selector = &chooser->groups[chooser->query];
    const uint32_t *counts = chooser->from != NULL ? chooser->own : chooser->counts;

    if (chooser->n_between > 0)
        kv_selector_count(selector, (const float *)(const void *)chooser->own + at, NULL, n);
    else
        kv_selector_count(selector, kv_chooser_scores(chooser, chooser->query) + at,
                          counts != NULL ? counts + at : NULL, n);
}

static enum after end_count(struct kv_chooser *chooser)
{
    kv_selector_next(&chooser->groups[chooser->query]);
    if (++chooser->pass < KV_SELECTOR_PASSES)
        return SAME_STEP;
    return ++chooser->query < kv_choice_groups(&chooser->choice) ? NEXT_QUERY : NEXT_STEP;
}

static bool is_among(struct kv_chooser *chooser)
{
    return chooser->from != NULL;
}

/* Bit g of a row's mark: group g, which may choose it, does.  A group may choose few of the
 * rows, together they may be 32 times as many: the others are not looked at. */
static void mark_chosen(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    const uint32_t all = UINT32_MAX >> (32 - kv_choice_groups(&chooser->choice));
    uint32_t *marks = (uint32_t *)(void *)chooser->spare;

    for (uint32_t i = at; i < at + n; i++) {
        marks[i] = 0;
        for (uint32_t left = chooser->from[i] & all; left != 0; left &= left - 1) {
            const uint32_t group = (uint32_t)__builtin_ctz(left);
            struct kv_selector *selector = &chooser->groups[group];
            const uint32_t image = kv_score_image(kv_chooser_scores(chooser, group)[i]);
            const bool is_tie = image == selector->bound && selector->ties > 0;

            if (image <= selector->bound && !is_tie)
                continue;
            selector->ties -= is_tie;
            marks[i] |= 1u << group;
        }
    }
}

/* ---- the steps --------------------------------------------------------------------------- */

/* SUM and MAX: the first two for each query vector, then all for the merged weights.  These are
 * made of all vectors at once, and summed one by one. */
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

/* UNION and NONE: all but the last for each query vector.  The last one looks at scores of many
 * vectors for one row, which are far apart. */
static const struct step per_query[] = {
    {.cost = 1, .begin = begin_each_max, .work = find_max},
    {.cost = 1, .begin = each_weighs, .work = copy_exps, .end = end_each_exps},
    {.cost = 1, .begin = wants_weights, .work = merge_one},
    {.cost = 4, .begin = begin_mass, .work = count_mass, .end = end_mass},
    {.cost = 1, .begin = begin_heaviest, .work = find_heaviest},
    {.cost = 1, .begin = is_by_threshold, .work = count_from, .end = end_from},
    {.cost = 1, .begin = begin_sift, .work = sift, .end = end_sift},
    {.cost = 1, .work = count, .end = end_count},
    {.cost = COST_MAX, .begin = is_among, .work = mark_chosen},
    {.work = NULL},
};

static const struct step *step_of(const struct kv_chooser *chooser)
{
    return (kv_choice_merges(&chooser->choice) ? merged : per_query) + chooser->step;
}

static bool is_done(const struct kv_chooser *chooser)
{
    return step_of(chooser)->work == NULL;
}

/* Begins the step, or the first one behind it that is not left out. */
static void begin_step(struct kv_chooser *chooser, uint32_t step)
{
    chooser->step = step;
    while (!is_done(chooser) && step_of(chooser)->begin != NULL &&
           !step_of(chooser)->begin(chooser))
        chooser->step++;
}

/* All items have been looked at. */
static void end_step(struct kv_chooser *chooser)
{
    const struct step *step = step_of(chooser);
    const enum after after = step->end != NULL ? step->end(chooser) : NEXT_STEP;

    chooser->cursor = 0;
    if (after != SAME_STEP)
        begin_step(chooser, after == NEXT_QUERY ? 0 : chooser->step + 1);
}

static uint32_t cost_of(const struct kv_chooser *chooser)
{
    const struct step *step = step_of(chooser);

    return step->cost + (step->costs_by_query ? chooser->choice.n_queries / 4 : 0);
}

/* That the step looks at. */
static uint32_t items_of(const struct kv_chooser *chooser)
{
    return step_of(chooser)->work == count && chooser->n_between > 0 ? chooser->n_between
                                                                     : chooser->n;
}

void kv_choose_begin(struct kv_chooser *chooser,
                     const struct kv_choice *choice,
                     float *scores,
                     const float *maxima,
                     const uint32_t *counts,
                     const uint32_t *among,
                     uint32_t n,
                     bool weights,
                     float *room)
{
    assert(among == NULL || (counts == NULL && !kv_choice_merges(choice)));
    chooser->choice = *choice;
    chooser->scores = scores;
    chooser->counts = counts;
    chooser->from = among;
    chooser->n = n;
    chooser->wants_weights = weights;
    chooser->weights = room;
    chooser->spare = room + n;
    chooser->own = (uint32_t *)(void *)(room + 2 * (size_t)n);
    chooser->query = chooser->cursor = chooser->pass = 0;
    chooser->knows_maxima = maxima != NULL;
    if (maxima != NULL)
        memcpy(chooser->maxima, maxima, choice->n_queries * sizeof(*maxima));
    for (uint32_t group = 0; group < kv_choice_groups(choice); group++)
        chooser->k[group] = choice->each != NULL ? choice->each[group] : choice->k;
    begin_step(chooser, 0);
}

bool kv_choose_slice(struct kv_chooser *chooser)
{
    uint32_t left = SLICE_ITEMS;

    while (!is_done(chooser)) {
        const uint32_t cost = cost_of(chooser);
        const uint32_t n_all = items_of(chooser), rest = n_all - chooser->cursor;
        const uint32_t n = rest < left / cost ? rest : left / cost;

        step_of(chooser)->work(chooser, chooser->cursor, n);
        chooser->cursor += n;
        left -= n * cost;
        if (chooser->cursor == n_all)
            end_step(chooser);
        if (left < COST_MAX)
            return is_done(chooser);
    }
    return true;
}

uint32_t kv_choose_rows(struct kv_chooser *chooser, uint32_t *ret_indices, uint32_t *ret_heads)
{
    const uint32_t n_groups = kv_choice_groups(&chooser->choice);
    uint32_t *marks = (uint32_t *)(void *)chooser->spare, n_chosen = 0;

    if (n_groups == 1 && chooser->from == NULL) {
        n_chosen =
            (uint32_t)kv_selector_collect(&chooser->groups[0], kv_chooser_scores(chooser, 0),
                                          NULL, chooser->n, 0, ret_indices);
        for (uint32_t i = 0; ret_heads != NULL && i < n_chosen; i++)
            ret_heads[i] = kv_choice_merges(&chooser->choice) ? UINT32_MAX : 1;
        return n_chosen;
    }
    if (chooser->from == NULL) {
        memset(marks, 0, chooser->n * sizeof(*marks));
        for (uint32_t group = 0; group < n_groups; group++) {
            const size_t n =
                kv_selector_collect(&chooser->groups[group], kv_chooser_scores(chooser, group),
                                    NULL, chooser->n, 0, ret_indices);

            for (size_t i = 0; i < n; i++)
                marks[ret_indices[i]] |= 1u << group;
        }
    }
    for (uint32_t i = 0; i < chooser->n; i++) {
        if (marks[i] == 0)
            continue;
        if (ret_heads != NULL)
            ret_heads[n_chosen] = marks[i];
        ret_indices[n_chosen++] = i;
    }
    return n_chosen;
}
