#include "tests/support/oracle.h"

#include "tests/support/oracle_bytes.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EPSILON    5.9604644775390625e-8 /* 2^-24: one rounding of fp32 */
#define EXP_ERROR  3e-7                  /* of the polynomial (kernels/select.h) */
#define EXP_LEAST  (-16.635532)          /* below it a weight is 0: -24 ln 2 */
#define EXP_UNIT   (1.0 / (1ull << 30))  /* in which masses are counted */
#define SURE_TERMS 4 /* roundings that are added to the root of their number */

enum {
    LANES = 16,   /* of an inner product */
    OPEN_MAX = 6, /* rows that may or may not be chosen: all 2^6 answers are tried */
};

static char fault[256];

static const char *__attribute__((format(printf, 1, 2))) say(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(fault, sizeof(fault), format, args);
    va_end(args);
    return fault;
}

static void *room(size_t n, size_t bytes)
{
    void *memory = calloc(n > 0 ? n : 1, bytes);

    if (memory == NULL) {
        fprintf(stderr, "oracle: out of memory\n");
        abort();
    }
    return memory;
}

/* ---- rows -------------------------------------------------------------------------------- */

void oracle_rows_make(struct oracle_rows *rows, uint32_t n, uint32_t d_k, uint32_t d_v)
{
    *rows = (struct oracle_rows){
        .n = n,
        .d_k = d_k,
        .d_v = d_v,
        .tokens = room(n, sizeof(uint32_t)),
        .ranges = room(n, sizeof(uint32_t)),
        .keys = room((size_t)n * d_k, sizeof(double)),
        .values = room((size_t)n * d_v, sizeof(double)),
        .coded = room(n, sizeof(bool)),
        .stands_for = room((size_t)n * d_k, sizeof(double)),
        .books_of = room(n, sizeof(uint32_t)),
        .codes = room(n, KV_SUBSPACES_MAX),
        .copied = room(n, sizeof(bool)),
        .copies = room((size_t)n * d_k, sizeof(double)),
    };
}

void oracle_rows_free(struct oracle_rows *rows)
{
    for (uint32_t i = 0; i < rows->n_books; i++) {
        free(rows->books[i].parts);
        free(rows->books[i].mean);
    }
    free(rows->books);
    free(rows->books_of);
    free(rows->codes);
    free(rows->copied);
    free(rows->copies);
    free(rows->tokens);
    free(rows->ranges);
    free(rows->keys);
    free(rows->values);
    free(rows->coded);
    free(rows->stands_for);
}

static double half_value(uint16_t half)
{
    const int exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
    double value;

    if (exponent == 0x1f)
        value = fraction != 0 ? NAN : INFINITY;
    else if (exponent == 0)
        value = ldexp(fraction, -24);
    else
        value = ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -value : value;
}

void oracle_load(enum kv_dtype type, const void *bytes, size_t n, double *ret_values)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        uint16_t half;
        float value;

        if (type == KV_FP32) {
            memcpy(&bits, (const uint8_t *)bytes + i * sizeof(bits), sizeof(bits));
        } else {
            memcpy(&half, (const uint8_t *)bytes + i * sizeof(half), sizeof(half));
            bits = (uint32_t)half << 16; /* bf16 */
        }
        memcpy(&value, &bits, sizeof(value));
        ret_values[i] = type == KV_FP16 ? half_value(half) : (double)value;
    }
}

/* ---- numbers ----------------------------------------------------------------------------- */

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* A key's score, or that of what a code stands for: summed in 16 lanes, or one after the other.
 */
static struct oracle_range
score(const float *query, const double *key, uint32_t d, bool by_code)
{
    const double n_terms = by_code ? d : (double)d / LANES + 4;
    double sum = 0, size = 0, error;

    for (uint32_t i = 0; i < d; i++) {
        sum += (double)query[i] * key[i];
        size += fabs((double)query[i] * key[i]);
    }
    error = (SURE_TERMS + sqrt(n_terms)) * EPSILON * size;
    return (struct oracle_range){sum - error, sum + error};
}

/* A vector rounded to 8 bits, as copies are scored with. */
struct rounded {
    float scale;
    double *q8; /* (d) */
};

static struct rounded round_query(const float *query, uint32_t d)
{
    struct rounded rounded = {.q8 = room(d, sizeof(double))};
    float most = 0;

    for (uint32_t i = 0; i < d; i++)
        most = fabsf(query[i]) > most ? fabsf(query[i]) : most;
    rounded.scale = most / 127;
    for (uint32_t i = 0; i < d && rounded.scale > 0; i++) {
        const float steps = query[i] / rounded.scale;

        rounded.q8[i] = (double)rintf(steps > 127 ? 127 : steps < -127 ? -127 : steps);
    }
    return rounded;
}

/* A copy's score: the sum of products is exact, what it is multiplied by is rounded, and then
 * the mean's is added.
 *   copy  (d) less the mean */
static struct oracle_range copy_score(const struct rounded *rounded,
                                      const double *copy,
                                      struct oracle_range mean_score,
                                      uint32_t d)
{
    double sum = 0, error;

    for (uint32_t i = 0; i < d; i++)
        sum += rounded->q8[i] * copy[i];
    sum *= (double)rounded->scale;
    error = 2 * EPSILON * (fabs(sum) + larger(fabs(mean_score.low), fabs(mean_score.high)));
    return (struct oracle_range){mean_score.low + sum - error, mean_score.high + sum + error};
}

static double middle(struct oracle_range range)
{
    return (range.low + range.high) / 2;
}

/* exp(scale * (score - most)), `most` being the largest score: what it is off by, it is off by
 * for all, but for what counts as nothing beside it.  The largest of those that are in may be
 * `least_most` only. */
static struct oracle_range
exp_of(struct oracle_range score, double scale, double most, double least_most)
{
    const double x = (middle(score) - most) * scale;
    const double error =
        (score.high - score.low) / 2 * scale + EPSILON * (fabs(most * scale) + fabs(x));
    struct oracle_range weight = {0, 0};

    if (x - error >= EXP_LEAST)
        weight.low = exp(x - error) * (1 - EXP_ERROR);
    if (x + error + (most - least_most) * scale >= EXP_LEAST)
        weight.high = exp(x + error) * (1 + EXP_ERROR);
    return weight;
}

/* One vector's softmax numerators over the rows that are `in`, and their sum, which has the
 * rows that may be in in its upper bound alone. */
static struct oracle_range exps_of(const struct oracle_range *scores,
                                   const bool *must,
                                   const bool *may,
                                   uint32_t n,
                                   double scale,
                                   struct oracle_range *ret_exps)
{
    struct oracle_range sum = {0, 0};
    double most = -INFINITY, least_most = -INFINITY;

    for (uint32_t i = 0; i < n; i++) {
        if (may[i])
            most = larger(most, middle(scores[i]));
        if (must[i])
            least_most = larger(least_most, middle(scores[i]));
    }
    for (uint32_t i = 0; i < n; i++) {
        ret_exps[i] = (struct oracle_range){0, 0};
        if (!may[i])
            continue;
        ret_exps[i] = exp_of(scores[i], scale, most, least_most);
        sum.low += must[i] ? larger(ret_exps[i].low - EXP_UNIT, 0) : 0;
        sum.high += ret_exps[i].high + EXP_UNIT;
    }
    return sum;
}

static void divide(struct oracle_range *exps, uint32_t n, struct oracle_range sum)
{
    for (uint32_t i = 0; i < n; i++) {
        if (exps[i].high == 0) /* by definition, and surely: no rounding makes it more */
            continue;
        exps[i].low = sum.high > 0 ? exps[i].low / sum.high * (1 - 2 * EPSILON) : 0;
        exps[i].high = sum.low > 0 ? exps[i].high / sum.low * (1 + 2 * EPSILON) : 1;
        exps[i].high = exps[i].high + 1e-44; /* where it is not a normal number */
    }
}

/* ---- classes ----------------------------------------------------------------------------- */

/* What a step goes by, where rows have it; else by their keys. */
enum by {
    BY_KEYS,
    BY_CODES,
    BY_COPIES,
};

static enum by goes_by(const struct oracle_rows *rows, enum by by, uint32_t row)
{
    const bool has = by == BY_CODES    ? rows->coded[row]
                     : by == BY_COPIES ? rows->copied[row]
                                       : false;

    return has ? by : BY_KEYS;
}

static const double *key_of(const struct oracle_rows *rows, enum by by, uint32_t row)
{
    const double *keys = by == BY_CODES    ? rows->stands_for
                         : by == BY_COPIES ? rows->copies
                                           : rows->keys;

    return keys + (size_t)row * rows->d_k;
}

/* What a row is scored by in a step. */
struct scored_by {
    const double *key;
    uint32_t d, row;
    uint32_t kind; /* enum by, and of copies the book, whose mean they lack */
};

static int compare_scored_by(const void *a, const void *b)
{
    const struct scored_by *left = a, *right = b;

    if (left->kind != right->kind)
        return left->kind < right->kind ? -1 : 1;
    for (uint32_t i = 0; i < left->d; i++)
        if (left->key[i] != right->key[i])
            return left->key[i] < right->key[i] ? -1 : 1;
    return 0;
}

/* Rows of one class are scored by the same numbers. */
static void find_classes(const struct oracle_rows *rows, enum by by, uint32_t *ret_classes)
{
    struct scored_by *all = room(rows->n, sizeof(*all));
    uint32_t n_classes = 0;

    for (uint32_t i = 0; i < rows->n; i++) {
        const enum by its = goes_by(rows, by, i);

        all[i] = (struct scored_by){
            .key = key_of(rows, its, i),
            .d = rows->d_k,
            .row = i,
            .kind = its + (its == BY_COPIES ? rows->books_of[i] : 0),
        };
    }
    qsort(all, rows->n, sizeof(*all), compare_scored_by);
    for (uint32_t i = 0; i < rows->n; i++) {
        n_classes += i > 0 && compare_scored_by(&all[i - 1], &all[i]) != 0;
        ret_classes[all[i].row] = n_classes;
    }
    free(all);
}

/* ---- the best ---------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    const double left = *(const double *)a, right = *(const double *)b;

    return (left > right) - (left < right);
}

/* Of ascending numbers, how many are at least `bound`; is_above: above it. */
static uint32_t count_from(const double *sorted, uint32_t n, double bound, bool is_above)
{
    uint32_t begin = 0, end = n;

    while (begin < end) {
        uint32_t half = begin + (end - begin) / 2;

        if (is_above ? sorted[half] > bound : sorted[half] >= bound)
            end = half;
        else
            begin = half + 1;
    }
    return n - begin;
}

/* The best `least` to `most` of those that are in, or may be.
 *   must, may          (n) which are in
 *   ret_must, ret_may  (n) which are among the best; may be must and may */
static void find_best(const struct oracle_range *values,
                      const uint32_t *classes,
                      uint32_t n,
                      const bool *must,
                      const bool *may,
                      uint32_t least,
                      uint32_t most,
                      bool *ret_must,
                      bool *ret_may)
{
    double *lows = room(n, sizeof(*lows)), *highs = room(n, sizeof(*highs));
    uint32_t *n_class = room(n, sizeof(*n_class)); /* of each class, that may be in */
    uint32_t *must_before = room(n, sizeof(*must_before)),
             *may_before = room(n, sizeof(*n_class));
    uint32_t n_must = 0, n_may = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (must[i])
            lows[n_must++] = values[i].low;
        if (may[i])
            highs[n_may++] = values[i].high;
        n_class[classes[i]] += may[i];
    }
    qsort(lows, n_must, sizeof(*lows), ascending);
    qsort(highs, n_may, sizeof(*highs), ascending);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t class = classes[i];
        const bool is_in = must[i], may_be_in = may[i];
        /* Of its class, which has the same score, those before it are better and no others. */
        const uint32_t n_maybe_better =
            count_from(highs, n_may, values[i].low, false) - n_class[class] + may_before[class];
        const uint32_t n_surely_better =
            count_from(lows, n_must, values[i].high, true) + must_before[class];

        ret_must[i] = is_in && n_maybe_better < least;
        ret_may[i] = may_be_in && n_surely_better < most;
        must_before[class] += is_in;
        may_before[class] += may_be_in;
    }
    free(lows);
    free(highs);
    free(n_class);
    free(must_before);
    free(may_before);
}

/* ---- how many ---------------------------------------------------------------------------- */

struct count {
    uint32_t least, most;
};

static double total_of(const struct oracle_range *weights, uint32_t n, bool is_high)
{
    double total = 0;

    for (uint32_t i = 0; i < n; i++)
        total += is_high ? weights[i].high : weights[i].low;
    return total;
}

/* As few of the heaviest as have `mass`. */
static uint32_t
heaviest_with(const struct oracle_range *weights, uint32_t n, double mass, bool is_high)
{
    double *sorted = room(n, sizeof(*sorted)), sum = 0;
    uint32_t count = 0;

    for (uint32_t i = 0; i < n; i++)
        sorted[i] = is_high ? weights[i].high + EXP_UNIT : weights[i].low - EXP_UNIT;
    qsort(sorted, n, sizeof(*sorted), ascending);
    while (count < n && sum < mass)
        sum += sorted[n - ++count];
    free(sorted);
    return count;
}

static uint32_t at_most(uint32_t n, uint32_t k)
{
    return n == 0 ? 1 : n < k ? n : k; /* never nothing */
}

/* How many the selection wants of a group with these weights. */
static struct count
how_many(const struct oracle_question *question, const struct oracle_range *weights, uint32_t n)
{
    const double share = (double)question->share;
    struct count count = {question->k, question->k};
    double most_low = 0, most_high = 0;

    switch (question->selection) {
    case KV_SELECT_MASS:
        count.least = heaviest_with(weights, n, share * total_of(weights, n, false), true);
        count.most = heaviest_with(weights, n, share * total_of(weights, n, true), false);
        break;
    case KV_SELECT_THRESHOLD:
        for (uint32_t i = 0; i < n; i++) {
            most_low = larger(most_low, weights[i].low);
            most_high = larger(most_high, weights[i].high);
        }
        count.least = count.most = 0;
        for (uint32_t i = 0; i < n; i++) {
            count.least += weights[i].low >= share * most_high * (1 + EPSILON);
            count.most += weights[i].high >= share * most_low * (1 - EPSILON);
        }
        break;
    default:
        break;
    }
    count.least = at_most(count.least, question->k);
    count.most = at_most(count.most, question->k);
    return count;
}

/* ---- a step ------------------------------------------------------------------------------ */

static bool merges(const struct oracle_question *question)
{
    return question->merge == KV_MERGE_SUM || question->merge == KV_MERGE_MAX;
}

static uint32_t groups_of(const struct oracle_question *question)
{
    return merges(question) ? 1 : question->n_queries;
}

/* Merged weights; with UNION and NONE the largest one, which is what is answered. */
static void merge(const struct oracle_question *question,
                  const struct oracle_range *weights,
                  uint32_t n,
                  struct oracle_range *ret_merged)
{
    for (uint32_t i = 0; i < n; i++) {
        ret_merged[i] = (struct oracle_range){0, 0};
        for (uint32_t q = 0; q < question->n_queries; q++) {
            const struct oracle_range weight = weights[(size_t)q * n + i];

            if (question->merge == KV_MERGE_SUM) {
                ret_merged[i].low += weight.low * (1 - EPSILON);
                ret_merged[i].high += weight.high * (1 + EPSILON);
            } else {
                ret_merged[i].low = larger(ret_merged[i].low, weight.low);
                ret_merged[i].high = larger(ret_merged[i].high, weight.high);
            }
        }
    }
}

/* Rows that surely weigh nothing tie, whatever their scores are: one class. */
static void unite_weightless(const struct oracle_range *merged, uint32_t n, uint32_t *classes)
{
    uint32_t first = 0;

    while (first < n && merged[first].high > 0)
        first++;
    for (uint32_t i = first; i < n; i++)
        if (merged[i].high == 0)
            classes[i] = classes[first];
}

/* What a step goes by. */
struct step {
    struct oracle_range *scores;  /* (n_queries, n) */
    struct oracle_range *exps;    /* (n_queries, n) */
    struct oracle_range *weights; /* (n_queries, n) */
    struct oracle_range *merged;  /* (n) */
    uint32_t *classes;            /* (n) */
};

/* One vector's scores of all rows, by what they have.
 *   ret_scores  (n) */
static void
score_all(const struct oracle *oracle, enum by by, uint32_t q, struct oracle_range *ret_scores)
{
    const struct oracle_rows *rows = oracle->rows;
    const float *query = oracle->question.queries + (size_t)q * rows->d_k;
    struct rounded rounded = round_query(query, rows->d_k);

    for (uint32_t i = 0; i < rows->n; i++) {
        const enum by its = goes_by(rows, by, i);
        const double *key = key_of(rows, its, i);

        if (its == BY_COPIES)
            ret_scores[i] = copy_score(
                &rounded, key,
                score(query, rows->books[rows->books_of[i] - 1].mean, rows->d_k, false),
                rows->d_k);
        else
            ret_scores[i] = score(query, key, rows->d_k, its == BY_CODES);
    }
    free(rounded.q8);
}

/* Scores and weighs the rows that are in, or may be. */
static void step_make(struct step *step,
                      const struct oracle *oracle,
                      enum by by,
                      const bool *must,
                      const bool *may)
{
    const struct oracle_question *question = &oracle->question;
    const struct oracle_rows *rows = oracle->rows;
    const size_t n = rows->n, n_all = n * question->n_queries;

    *step = (struct step){
        .scores = room(n_all, sizeof(struct oracle_range)),
        .exps = room(n_all, sizeof(struct oracle_range)),
        .weights = room(n_all, sizeof(struct oracle_range)),
        .merged = room(n, sizeof(struct oracle_range)),
        .classes = room(n, sizeof(uint32_t)),
    };
    for (uint32_t q = 0; q < question->n_queries; q++) {
        struct oracle_range *exps = step->exps + q * n;

        score_all(oracle, by, q, step->scores + q * n);
        const struct oracle_range sum =
            exps_of(step->scores + q * n, must, may, rows->n, (double)question->scale, exps);
        memcpy(step->weights + q * n, exps, n * sizeof(*exps));
        divide(step->weights + q * n, rows->n, sum);
    }
    merge(question, step->weights, rows->n, step->merged);
    find_classes(rows, by, step->classes);
    if (merges(question))
        unite_weightless(step->merged, rows->n, step->classes);
}

static void step_free(struct step *step)
{
    free(step->scores);
    free(step->exps);
    free(step->weights);
    free(step->merged);
    free(step->classes);
}

/* What a group orders rows by. */
static const struct oracle_range *
order_of(const struct step *step, const struct oracle *oracle, uint32_t group)
{
    return merges(&oracle->question) ? step->merged
                                     : step->scores + (size_t)group * oracle->rows->n;
}

/* Rows that a group takes of which it wants k in the end. */
static uint32_t takes(const struct oracle_question *question, uint32_t k, uint32_t factor)
{
    const uint32_t most = merges(question) ? KV_CANDIDATES_MAX : KV_SELECTED_MAX;
    const uint64_t n = (uint64_t)k * factor;

    return n < most ? (uint32_t)n : most;
}

/* Of each row, those that step 1 takes. */
static uint32_t first_factor(const struct oracle_question *question)
{
    return question->first_cut == KV_CUT_NONE ? question->factor : question->candidates;
}

/* Adds the bit of a group to its rows. */
static void set_bits(uint32_t *must_bits,
                     uint32_t *may_bits,
                     const bool *must,
                     const bool *may,
                     uint32_t n,
                     uint32_t group)
{
    for (uint32_t i = 0; i < n; i++) {
        must_bits[i] |= (uint32_t)must[i] << group;
        may_bits[i] |= (uint32_t)may[i] << group;
    }
}

static void get_bits(const uint32_t *bits, uint32_t n, uint32_t mask, bool *ret_set)
{
    for (uint32_t i = 0; i < n; i++)
        ret_set[i] = (bits[i] & mask) != 0;
}

static uint32_t count_set(const uint32_t *bits, uint32_t n)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < n; i++)
        count += bits[i] != 0;
    return count;
}

/* Step 1: which rows each group takes, and how many it wants in the end. */
static void take(struct oracle *oracle, bool is_last, struct count *ret_counts)
{
    const struct oracle_question *question = &oracle->question;
    const uint32_t n = oracle->rows->n;
    bool *all = room(n, sizeof(bool)), *must = room(n, sizeof(bool)),
         *may = room(n, sizeof(bool));
    struct step step;

    memset(all, true, n);
    step_make(&step, oracle, BY_CODES, all, all);
    for (uint32_t group = 0; group < groups_of(question); group++) {
        const struct oracle_range *weights =
            merges(question) ? step.merged : step.exps + (size_t)group * n;
        const struct count count = how_many(question, weights, n);

        find_best(order_of(&step, oracle, group), step.classes, n, all, all,
                  takes(question, count.least, first_factor(question)),
                  takes(question, count.most, first_factor(question)), must, may);
        set_bits(oracle->must, oracle->may, must, may, n, group);
        ret_counts[group] = count;
    }
    if (is_last)
        memcpy(oracle->weights, step.merged, n * sizeof(*step.merged));
    step_free(&step);
    free(all);
    free(must);
    free(may);
}

static bool goes_by_bytes(const struct oracle *oracle)
{
    return oracle->question.first_cut != KV_CUT_NONE && merges(&oracle->question) &&
           oracle->question.selection == KV_SELECT_TOP &&
           oracle_bytes_pay(&oracle->question, oracle->rows);
}

/* Rows of the same byte tie; one that may have either of two is alone. */
static void
classes_of_bytes(const struct oracle_range *bytes, uint32_t n, uint32_t *ret_classes)
{
    uint32_t class_of[256], n_classes = 0;
    bool is_known[256] = {false};

    for (uint32_t i = 0; i < n; i++) {
        const unsigned byte = (unsigned)bytes[i].low;

        if (bytes[i].low != bytes[i].high) {
            ret_classes[i] = n_classes++;
            continue;
        }
        if (!is_known[byte])
            class_of[byte] = n_classes++;
        is_known[byte] = true;
        ret_classes[i] = class_of[byte];
    }
}

/* Step 1 by bytes. */
static void take_by_bytes(struct oracle *oracle, struct count *ret_counts)
{
    const struct oracle_question *question = &oracle->question;
    const uint32_t n = oracle->rows->n,
                   n_wanted = takes(question, question->k, question->candidates);
    struct oracle_range *scores = room((size_t)n * question->n_queries, sizeof(*scores)),
                        *bytes = room(n, sizeof(*bytes));
    bool *all = room(n, sizeof(bool)), *must = room(n, sizeof(bool)),
         *may = room(n, sizeof(bool));
    uint32_t *classes = room(n, sizeof(*classes));

    memset(all, true, n);
    for (uint32_t q = 0; q < question->n_queries; q++)
        score_all(oracle, BY_KEYS, q, scores + (size_t)q * n);
    oracle_bytes(question, oracle->rows, scores, n_wanted, bytes);
    classes_of_bytes(bytes, n, classes);
    find_best(bytes, classes, n, all, all, n_wanted, n_wanted, must, may);
    set_bits(oracle->must, oracle->may, must, may, n, 0);
    ret_counts[0] = (struct count){question->k, question->k};
    free(scores);
    free(bytes);
    free(all);
    free(must);
    free(may);
    free(classes);
}

/* The cut, and step 2: of the rows that were taken, those that each group chooses. */
static void
choose(struct oracle *oracle, const struct count *counts, enum by by, uint32_t factor)
{
    const struct oracle_question *question = &oracle->question;
    const uint32_t n = oracle->rows->n;
    uint32_t *must_taken = oracle->must, *may_taken = oracle->may;
    bool *must = room(n, sizeof(bool)), *may = room(n, sizeof(bool));
    struct step step;

    oracle->must = room(n, sizeof(uint32_t));
    oracle->may = room(n, sizeof(uint32_t));
    get_bits(must_taken, n, UINT32_MAX, must);
    get_bits(may_taken, n, UINT32_MAX, may);
    step_make(&step, oracle, by, must, may);
    for (uint32_t group = 0; group < groups_of(question); group++) {
        get_bits(must_taken, n, 1u << group, must);
        get_bits(may_taken, n, 1u << group, may);
        find_best(order_of(&step, oracle, group), step.classes, n, must, may,
                  takes(question, counts[group].least, factor),
                  takes(question, counts[group].most, factor), must, may);
        set_bits(oracle->must, oracle->may, must, may, n, group);
    }
    memcpy(oracle->weights, step.merged, n * sizeof(*step.merged));
    step_free(&step);
    free(must_taken);
    free(may_taken);
    free(must);
    free(may);
}

/* Weighs what was chosen by its keys, which a cut has not looked at. */
static void weigh(struct oracle *oracle)
{
    const uint32_t n = oracle->rows->n;
    bool *must = room(n, sizeof(bool)), *may = room(n, sizeof(bool));
    struct step step;

    get_bits(oracle->must, n, UINT32_MAX, must);
    get_bits(oracle->may, n, UINT32_MAX, may);
    step_make(&step, oracle, BY_KEYS, must, may);
    memcpy(oracle->weights, step.merged, n * sizeof(*step.merged));
    step_free(&step);
    free(must);
    free(may);
}

/* Rows of which the group, or all of them, may choose so many. */
static void count_chosen(struct oracle *oracle, const struct count *counts)
{
    const struct oracle_question *question = &oracle->question;
    const uint32_t n = oracle->rows->n;

    oracle->chosen_least = count_set(oracle->must, n);
    oracle->chosen_most = count_set(oracle->may, n);
    for (uint32_t group = 0; group < groups_of(question); group++) {
        const uint32_t least = counts[group].least < n ? counts[group].least : n;

        if (least > oracle->chosen_least)
            oracle->chosen_least = least;
    }
    if (merges(question) && counts[0].most < oracle->chosen_most)
        oracle->chosen_most = counts[0].most;
}

void oracle_make(struct oracle *oracle,
                 const struct oracle_question *question,
                 const struct oracle_rows *rows)
{
    const uint32_t n = rows->n;
    struct count counts[KV_QUERIES_MAX];

    *oracle = (struct oracle){
        .question = *question,
        .rows = rows,
        .skips = question->selection == KV_SELECT_TOP &&
                 takes(question, question->k, first_factor(question)) >= n,
        .must = room(n, sizeof(uint32_t)),
        .may = room(n, sizeof(uint32_t)),
        .weights = room(n, sizeof(struct oracle_range)),
    };
    if (oracle->skips) {
        for (uint32_t group = 0; group < groups_of(question); group++) {
            counts[group] = (struct count){question->k, question->k};
            for (uint32_t i = 0; i < n; i++) {
                oracle->must[i] |= 1u << group;
                oracle->may[i] |= 1u << group;
            }
        }
    } else if (goes_by_bytes(oracle)) {
        take_by_bytes(oracle, counts);
    } else {
        take(oracle, first_factor(question) == 1, counts);
    }
    oracle->taken_least = count_set(oracle->must, n);
    oracle->taken_most = count_set(oracle->may, n);
    const bool is_cut = question->first_cut != KV_CUT_NONE &&
                        (oracle->skips ? takes(question, question->k, question->factor) < n
                                       : question->candidates > question->factor);
    if (is_cut)
        choose(oracle, counts, BY_COPIES, question->factor);
    if ((oracle->skips && !is_cut) || question->factor != 1)
        choose(oracle, counts, BY_KEYS, 1);
    else if (question->first_cut != KV_CUT_NONE)
        weigh(oracle);
    count_chosen(oracle, counts);
}

void oracle_free(struct oracle *oracle)
{
    free(oracle->must);
    free(oracle->may);
    free(oracle->weights);
}

/* ---- judging ----------------------------------------------------------------------------- */

static bool is_held(const struct oracle_answer *answer, uint32_t row)
{
    return answer->held != NULL && answer->held[row];
}

/* One row that the answer names, as its name `at`. */
static const char *name_fault(const struct oracle *oracle,
                              const struct oracle_answer *answer,
                              uint32_t row,
                              uint32_t at)
{
    const struct oracle_range weight = oracle->weights[row];
    const uint32_t token = oracle->rows->tokens[row], must = oracle->must[row];

    if (oracle->may[row] == 0)
        return say("token %u was chosen, and is not among the best", token);
    if (answer->names_held_only && !is_held(answer, row))
        return say("token %u is named, and not held", token);
    if (answer->heads != NULL && ((answer->heads[at] & ~oracle->may[row]) != 0 ||
                                  (must & ~answer->heads[at]) != 0 || answer->heads[at] == 0))
        return say("token %u: vectors %#x chose it, not %#x to %#x", token, answer->heads[at],
                   must, oracle->may[row]);
    if (answer->scores != NULL && !((double)answer->scores[at] >= weight.low &&
                                    (double)answer->scores[at] <= weight.high))
        return say("token %u: weight %.9g, not %.9g to %.9g", token, (double)answer->scores[at],
                   weight.low, weight.high);
    return NULL;
}

const char *oracle_choice_fault(const struct oracle *oracle, const struct oracle_answer *answer)
{
    const struct oracle_rows *rows = oracle->rows;
    uint32_t at = 0;

    if (answer->n_chosen < oracle->chosen_least || answer->n_chosen > oracle->chosen_most)
        return say("%u rows chosen of %u, not %u to %u", answer->n_chosen, rows->n,
                   oracle->chosen_least, oracle->chosen_most);
    for (uint32_t i = 0; i < rows->n; i++) {
        const bool is_named = at < answer->n_ids && answer->ids[at] == rows->tokens[i];
        const char *why = is_named ? name_fault(oracle, answer, i, at) : NULL;

        if (why != NULL)
            return why;
        if (!is_named && oracle->must[i] != 0 &&
            !(answer->names_held_only && !is_held(answer, i)))
            return say("token %u is among the best, and is not named", rows->tokens[i]);
        at += is_named;
    }
    return at == answer->n_ids ? NULL
                               : say("name %u of %u, token %u: no candidate, or out of order",
                                     at, answer->n_ids, answer->ids[at]);
}

/* ---- attention --------------------------------------------------------------------------- */

/* One vector's scores of the rows that are `in`. */
static void score_rows(const struct oracle_rows *rows,
                       const float *query,
                       const bool *in,
                       struct oracle_range *ret_scores)
{
    for (uint32_t i = 0; i < rows->n; i++)
        if (in[i])
            ret_scores[i] = score(query, rows->keys + (size_t)i * rows->d_k, rows->d_k, false);
}

static double attend(const struct oracle_rows *rows,
                     const struct oracle_range *scores,
                     float scale,
                     const bool *in,
                     double *ret_output)
{
    double most = -INFINITY, sum = 0;

    for (uint32_t j = 0; j < rows->d_v; j++)
        ret_output[j] = 0;
    for (uint32_t i = 0; i < rows->n; i++)
        if (in[i])
            most = larger(most, (double)scale * middle(scores[i]));
    for (uint32_t i = 0; i < rows->n; i++) {
        if (!in[i])
            continue;
        const double weight = exp((double)scale * middle(scores[i]) - most);
        sum += weight;
        for (uint32_t j = 0; j < rows->d_v; j++)
            ret_output[j] += weight * rows->values[(size_t)i * rows->d_v + j];
    }
    for (uint32_t j = 0; sum > 0 && j < rows->d_v; j++)
        ret_output[j] /= sum;
    return sum > 0 ? most + log(sum) : -INFINITY;
}

double oracle_attend(const struct oracle_rows *rows,
                     const float *query,
                     float scale,
                     const bool *in,
                     double *ret_output)
{
    struct oracle_range *scores = room(rows->n, sizeof(*scores));
    double lse;

    score_rows(rows, query, in, scores);
    lse = attend(rows, scores, scale, in, ret_output);
    free(scores);
    return lse;
}

/* By how much an fp32 answer of one vector over these rows may differ: a log-sum-exp, and an
 * output as a share of the largest value. */
static double attend_error(const struct oracle_rows *rows,
                           const struct oracle_range *scores,
                           float scale,
                           const bool *in,
                           double *ret_value_most)
{
    double error = 0, n_in = 0;

    *ret_value_most = 0;
    for (uint32_t i = 0; i < rows->n; i++) {
        if (!in[i])
            continue;
        error = larger(error, (scores[i].high - scores[i].low) / 2 * (double)scale +
                                  2 * EPSILON * (double)scale * fabs(middle(scores[i])));
        n_in++;
        for (uint32_t j = 0; j < rows->d_v; j++)
            *ret_value_most =
                larger(*ret_value_most, fabs(rows->values[(size_t)i * rows->d_v + j]));
    }
    return 2 * error + EXP_ERROR + (SURE_TERMS + sqrt(n_in)) * EPSILON;
}

/* What is wrong with one vector's answer, if it is attention over the rows that are `in`.
 *   wanted  (d_v) of room */
static const char *vector_fault(const struct oracle *oracle,
                                uint32_t q,
                                const bool *in,
                                const float *output,
                                float lse,
                                double *wanted)
{
    const struct oracle_rows *rows = oracle->rows;
    const float scale = oracle->question.scale;
    struct oracle_range *scores = room(rows->n, sizeof(*scores));
    const char *why = NULL;
    double exact, error, most;

    score_rows(rows, oracle->question.queries + (size_t)q * rows->d_k, in, scores);
    exact = attend(rows, scores, scale, in, wanted);
    error = attend_error(rows, scores, scale, in, &most);
    free(scores);
    if (isinf(exact) ? !(isinf(lse) && lse < 0)
                     : !(fabs((double)lse - exact) <= error + 2 * EPSILON * fabs(exact)))
        why = say("vector %u: log-sum-exp %.9g, not %.9g", q, (double)lse, exact);
    for (uint32_t j = 0; why == NULL && j < rows->d_v; j++)
        if (!(fabs((double)output[j] - wanted[j]) <= error * most))
            why = say("vector %u: element %u is %.9g, not %.9g", q, j, (double)output[j],
                      wanted[j]);
    return why;
}

/* The rows that vector q attends to: `ret_in` certainly; the n_open in `ret_open` perhaps.
 * Returns n_open. */
static uint32_t attended(const struct oracle *oracle,
                         const struct oracle_answer *answer,
                         uint32_t q,
                         bool *ret_in,
                         uint32_t *ret_open)
{
    const bool is_each = oracle->question.merge == KV_MERGE_NONE;
    const uint32_t mask = is_each ? 1u << q : UINT32_MAX;
    uint32_t n_open = 0, at = 0;

    for (uint32_t i = 0; i < oracle->rows->n; i++) {
        const bool is_named = at < answer->n_ids && answer->ids[at] == oracle->rows->tokens[i];
        bool is_chosen = (oracle->must[i] & mask) != 0;

        if (!answer->names_held_only)
            is_chosen = is_named && (!is_each || (answer->heads[at] & mask) != 0);
        else if (!is_chosen && (oracle->may[i] & mask) != 0 && !is_held(answer, i))
            ret_open[n_open++] = i;
        ret_in[i] = is_chosen && !is_held(answer, i);
        at += is_named;
    }
    return n_open;
}

const char *oracle_attention_fault(const struct oracle *oracle,
                                   const struct oracle_answer *answer,
                                   const float *outputs,
                                   const float *lses,
                                   bool *ret_undecided)
{
    const struct oracle_rows *rows = oracle->rows;
    bool *in = room(rows->n, sizeof(bool)), is_undecided = false;
    uint32_t *open = room(rows->n, sizeof(uint32_t));
    double *wanted = room(rows->d_v, sizeof(double));
    const char *why = NULL;

    for (uint32_t q = 0; why == NULL && q < oracle->question.n_queries; q++) {
        const uint32_t n_open = attended(oracle, answer, q, in, open);

        is_undecided = is_undecided || n_open > OPEN_MAX;
        for (uint32_t pick = 0; n_open <= OPEN_MAX && pick < 1u << n_open; pick++) {
            for (uint32_t i = 0; i < n_open; i++)
                in[open[i]] = pick >> i & 1;
            why = vector_fault(oracle, q, in, outputs + (size_t)q * rows->d_v, lses[q], wanted);
            if (why == NULL)
                break;
        }
    }
    if (ret_undecided != NULL)
        *ret_undecided = is_undecided;
    free(in);
    free(open);
    free(wanted);
    return why;
}
