#include "kvserver/store/query/selection.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    SLICE_ITEMS = 64 << 10, /* looked at once: some 50 us */
    COST_MAX = 16,          /* of an item, in those */
};

/* In order; MERGED ones only with SUM and MAX, EACH ones with UNION and NONE. */
enum step {
    STEP_MERGED_MAX, /* of a query vector */
    STEP_MERGED_EXPS,
    STEP_MERGED_ADD, /* of all */
    STEP_MERGED_SUM, /* for MASS */
    STEP_EACH_MAX,
    STEP_EACH_EXPS,
    STEP_EACH_ADD,
    STEP_MASS,     /* of a group */
    STEP_HEAVIEST, /* for FROM */
    STEP_FROM,
    STEP_SIFT, /* scores that may be the bound */
    STEP_SELECT,
    STEP_MARK, /* which are chosen of those that only some groups may choose */
    STEP_DONE,
};

uint32_t kv_choice_max(const struct kv_choice *choice, uint32_t n)
{
    const uint64_t max =
        (uint64_t)kv_choice_takes(choice, choice->k) * kv_choice_groups(choice);

    return max < n ? (uint32_t)max : n;
}

/* UNION and NONE need weights to answer them or to say how many. */
static bool each_weighs(const struct kv_chooser *chooser)
{
    return chooser->wants_weights || chooser->choice.selection != KV_SELECT_TOP;
}

static uint32_t takes_of(const struct kv_chooser *chooser, uint32_t group)
{
    return kv_choice_takes(&chooser->choice, chooser->k[group]);
}

static void begin_select(struct kv_chooser *chooser)
{
    const uint32_t group = chooser->query;

    kv_selector_begin(&chooser->groups[group], takes_of(chooser, group));
    chooser->step = STEP_SELECT;
    chooser->pass = 0;
    chooser->n_between = 0;
    for (uint32_t i = 0; chooser->from != NULL && i < chooser->n; i++)
        chooser->own[i] = chooser->from[i] >> group & 1;
    if (chooser->from != NULL || chooser->counts != NULL ||
        !kv_scores_guess(kv_chooser_scores(chooser, group), chooser->n,
                         takes_of(chooser, group), &chooser->least, &chooser->most))
        return;
    chooser->step = STEP_SIFT;
    chooser->n_above = 0;
}

/* All that are near the bound, if it is among them: the k-th largest of all is one of theirs.
 */
static void end_sift(struct kv_chooser *chooser)
{
    const uint64_t k = takes_of(chooser, chooser->query);

    if (chooser->n_above < k && k <= chooser->n_above + chooser->n_between)
        kv_selector_begin(&chooser->groups[chooser->query], k - chooser->n_above);
    else
        chooser->n_between = 0;
    chooser->step = STEP_SELECT;
}

static void sift(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    size_t n_above;

    chooser->n_between += (uint32_t)kv_scores_between(
        kv_chooser_scores(chooser, chooser->query) + at, n, chooser->least, chooser->most,
        (float *)(void *)chooser->own + chooser->n_between, &n_above);
    chooser->n_above += n_above;
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

/* How many the group wants, of weights with this exp sum. */
static void begin_how_many(struct kv_chooser *chooser, uint64_t sum)
{
    chooser->k[chooser->query] =
        chooser->choice.each != NULL ? chooser->choice.each[chooser->query] : chooser->choice.k;
    chooser->pass = 0;
    if (chooser->choice.selection == KV_SELECT_MASS) {
        kv_mass_begin(&chooser->mass, sum, (double)chooser->choice.share);
        chooser->step = STEP_MASS;
    } else if (chooser->choice.selection == KV_SELECT_FROM) {
        chooser->step = STEP_HEAVIEST;
        chooser->sum = 0;
        chooser->max = -INFINITY;
    } else {
        begin_select(chooser);
    }
}

/* The next query vector's weights are made, which begins with its maximum. */
static void begin_weights(struct kv_chooser *chooser, enum step find_max)
{
    chooser->max = chooser->knows_maxima ? chooser->maxima[chooser->query] : -INFINITY;
    chooser->sum = 0;
    chooser->step = chooser->knows_maxima ? find_max + 1 : find_max;
}

static void begin_each(struct kv_chooser *chooser)
{
    if (each_weighs(chooser))
        begin_weights(chooser, STEP_EACH_MAX);
    else
        begin_how_many(chooser, 0);
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
    if (kv_choice_merges(choice))
        begin_weights(chooser, STEP_MERGED_MAX);
    else
        begin_each(chooser);
}

/* The weights of all query vectors for items [at, at + n), together. */
static void merge_all(const struct kv_chooser *chooser, uint32_t at, uint32_t n)
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

/* The step at items [at, at + n). */
static void work_on(struct kv_chooser *chooser, uint32_t at, uint32_t n)
{
    const struct kv_choice *choice = &chooser->choice;
    const uint32_t *counts = chooser->counts != NULL ? chooser->counts + at : NULL;
    float *scores = chooser->scores + (size_t)chooser->query * chooser->n + at;
    const bool merges = kv_choice_merges(choice);
    float most;

    switch ((enum step)chooser->step) {
    case STEP_MERGED_MAX:
    case STEP_EACH_MAX:
        most = kv_scores_max(scores, counts, n);
        chooser->max = most > chooser->max ? most : chooser->max;
        break;
    case STEP_MERGED_EXPS:
        chooser->sum += kv_softmax_exps(scores, counts, n, choice->scale, chooser->max);
        break;
    case STEP_EACH_EXPS: /* the scores are still to be chosen by */
        memcpy(chooser->spare + at, scores, n * sizeof(*scores));
        chooser->sum +=
            kv_softmax_exps(chooser->spare + at, counts, n, choice->scale, chooser->max);
        break;
    case STEP_MERGED_ADD:
        merge_all(chooser, at, n);
        break;
    case STEP_MERGED_SUM:
        chooser->sum += kv_weights_sum(chooser->weights + at, counts, n);
        break;
    case STEP_EACH_ADD:
        if (chooser->query == 0)
            memset(chooser->weights + at, 0, n * sizeof(*chooser->weights));
        kv_merge_max(chooser->spare + at, n, chooser->factors, 1, n, chooser->weights + at);
        break;
    case STEP_MASS:
        kv_mass_count(&chooser->mass, (merges ? chooser->weights : chooser->spare) + at, counts,
                      n);
        break;
    case STEP_HEAVIEST:
        most = kv_scores_max((merges ? chooser->weights : chooser->spare) + at, counts, n);
        chooser->max = most > chooser->max ? most : chooser->max;
        break;
    case STEP_FROM:
        chooser->sum += kv_count_from((merges ? chooser->weights : chooser->spare) + at, counts,
                                      n, chooser->max * choice->share);
        break;
    case STEP_SIFT:
        sift(chooser, at, n);
        break;
    case STEP_SELECT:
        count(chooser, at, n);
        break;
    case STEP_MARK:
        mark_chosen(chooser, at, n);
        break;
    case STEP_DONE:
        break;
    }
}

static void limit_k(struct kv_chooser *chooser, uint64_t k)
{
    if (k < chooser->choice.k)
        chooser->k[chooser->query] = k > 0 ? (uint32_t)k : 1; /* never nothing */
    begin_select(chooser);
}

/* All items have been looked at. */
static void next_step(struct kv_chooser *chooser)
{
    const struct kv_choice *choice = &chooser->choice;

    chooser->cursor = 0;
    switch ((enum step)chooser->step) {
    case STEP_MERGED_MAX:
    case STEP_EACH_MAX:
    case STEP_HEAVIEST:
        chooser->step++;
        break;
    case STEP_MERGED_EXPS:
        chooser->factors[chooser->query] = kv_softmax_factor(chooser->sum);
        if (++chooser->query < choice->n_queries)
            begin_weights(chooser, STEP_MERGED_MAX);
        else
            chooser->step = STEP_MERGED_ADD;
        break;
    case STEP_MERGED_ADD:
        chooser->query = 0;
        chooser->sum = 0;
        if (choice->selection == KV_SELECT_MASS)
            chooser->step = STEP_MERGED_SUM;
        else
            begin_how_many(chooser, 0);
        break;
    case STEP_MERGED_SUM:
        begin_how_many(chooser, chooser->sum);
        break;
    case STEP_EACH_EXPS:
        chooser->factors[0] = kv_softmax_factor(chooser->sum);
        if (chooser->wants_weights)
            chooser->step = STEP_EACH_ADD;
        else
            begin_how_many(chooser, chooser->sum);
        break;
    case STEP_EACH_ADD:
        begin_how_many(chooser, chooser->sum);
        break;
    case STEP_MASS:
        kv_mass_next(&chooser->mass);
        if (++chooser->pass == KV_SELECTOR_PASSES)
            limit_k(chooser, chooser->mass.n_rows);
        break;
    case STEP_FROM:
        limit_k(chooser, chooser->sum);
        break;
    case STEP_SIFT:
        end_sift(chooser);
        break;
    case STEP_SELECT:
        kv_selector_next(&chooser->groups[chooser->query]);
        if (++chooser->pass < KV_SELECTOR_PASSES)
            break;
        if (++chooser->query < kv_choice_groups(choice))
            begin_each(chooser);
        else
            chooser->step = chooser->from != NULL ? STEP_MARK : STEP_DONE;
        break;
    case STEP_MARK:
        chooser->step = STEP_DONE;
        break;
    case STEP_DONE:
        break;
    }
}

/* How much longer the step takes for an item: weights are merged of all vectors at once, and
 * summed one by one; scores of many vectors for one row are far apart. */
static uint32_t cost_of(const struct kv_chooser *chooser)
{
    switch ((enum step)chooser->step) {
    case STEP_MERGED_ADD:
        return 1 + chooser->choice.n_queries / 4;
    case STEP_MASS:
    case STEP_MERGED_SUM:
        return 4;
    case STEP_MARK:
        return COST_MAX;
    default:
        return 1;
    }
}

/* That the step looks at. */
static uint32_t items_of(const struct kv_chooser *chooser)
{
    return chooser->step == STEP_SELECT && chooser->n_between > 0 ? chooser->n_between
                                                                  : chooser->n;
}

bool kv_choose_slice(struct kv_chooser *chooser)
{
    uint32_t left = SLICE_ITEMS;

    while (chooser->step != STEP_DONE) {
        const uint32_t cost = cost_of(chooser);
        const uint32_t n_all = items_of(chooser), rest = n_all - chooser->cursor;
        const uint32_t n = rest < left / cost ? rest : left / cost;

        work_on(chooser, chooser->cursor, n);
        chooser->cursor += n;
        left -= n * cost;
        if (chooser->cursor == n_all)
            next_step(chooser);
        if (left < COST_MAX)
            return chooser->step == STEP_DONE;
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
