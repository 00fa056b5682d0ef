#include "question.h"

#include "attend.h"
#include "checksum.h"
#include "choose.h"
#include "failing_memory.h"
#include "keys.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCKS_MIN = 8, /* of a chapter */
};

static char fault[256];

static uint64_t below(struct kv_random *random, uint64_t bound)
{
    return kv_random_below(random, bound);
}

static bool one_in(struct kv_random *random, uint64_t n)
{
    return below(random, n) == 0;
}

static uint32_t smaller(uint64_t a, uint64_t b)
{
    return (uint32_t)(a < b ? a : b);
}

static bool are_keys(const struct kv_layer_schema *layer)
{
    return kv_key_type_valid(layer->dtype);
}

static uint32_t count_candidates(const struct kv_query *query)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < query->n_ranges; i++)
        n += query->ranges[i].end - query->ranges[i].begin;
    return n;
}

/* ---- asking ------------------------------------------------------------------------------ */

static void make_ranges(struct question *question, uint32_t most, struct kv_random *random)
{
    uint32_t n = one_in(random, 2) ? 1 : 1 + (uint32_t)below(random, QUESTION_RANGES_MAX);
    uint32_t begin = one_in(random, 2) ? 0 : (uint32_t)below(random, most);

    question->query.n_ranges = 0;
    for (uint32_t i = 0; i < n && begin < most; i++) {
        uint32_t end = begin + 1 + (uint32_t)below(random, most - begin);

        if (n == 1 && !one_in(random, 3))
            end = most;
        else if (one_in(random, 3) && end - end % KV_BLOCK_TOKENS > begin)
            end -= end % KV_BLOCK_TOKENS;
        question->ranges[question->query.n_ranges++] = (struct kv_range){begin, end};
        begin = end + (one_in(random, 3) ? 0 : (uint32_t)below(random, 100));
    }
    question->tokens = question->ranges[question->query.n_ranges - 1].end;
    question->query.ranges = question->ranges;
}

/* The only content that a row may have had since then; 0: there may be several, or none. */
static uint32_t
only_content(const struct truth *truth, uint32_t unit, uint32_t token, uint64_t since)
{
    const struct truth_row *row = &truth->rows[unit][token];
    uint32_t content = 0;

    for (unsigned i = 0; i < row->n_candidates; i++) {
        const struct truth_candidate *candidate = &row->candidates[i];

        if (candidate->gone_at != 0 && candidate->gone_at <= since)
            continue;
        if (content != 0 && candidate->content != content)
            return 0;
        content = candidate->content;
    }
    return content;
}

/* What tells the block from others; false: it is not known. */
static bool instance_of(const struct truth *truth,
                        uint32_t layer,
                        uint32_t head,
                        uint32_t block,
                        uint32_t *ret_instance)
{
    const uint32_t unit = kv_schema_unit(&truth->schema, layer, head);
    const size_t row_bytes = truth->schema.layers[layer].row_bytes;
    uint32_t crcs[KV_BLOCK_TOKENS];
    uint8_t *row = failing_memory_sure(1, row_bytes);
    bool is_known = true;

    for (uint32_t i = 0; is_known && i < KV_BLOCK_TOKENS; i++) {
        uint32_t token = block * KV_BLOCK_TOKENS + i;
        uint32_t content = only_content(truth, unit, token, UINT64_MAX);

        is_known = content != 0 && truth->rows[unit][token].must;
        if (is_known) {
            truth_row_fill(row, row_bytes, content, layer, head, token);
            crcs[i] = kv_row_crc(row, row_bytes, layer, head, token);
        }
    }
    free(row);
    if (is_known)
        *ret_instance = kv_held_instance(crcs);
    return is_known;
}

static void
make_held(struct question *question, const struct truth *truth, struct kv_random *random)
{
    const struct kv_query *query = &question->query;
    uint32_t n = 0;

    for (uint32_t head = 0; head < question->n_heads; head++) {
        question->n_held[head] = 0;
        for (uint32_t block = 0; block < truth->tokens_max / KV_BLOCK_TOKENS; block++) {
            uint32_t instance = 0;

            if (!one_in(random, 3))
                continue;
            question->is_right[n] =
                instance_of(truth, query->layer, query->head_begin + head, block, &instance);
            if (one_in(random, 4)) {
                instance ^= 1 + (uint32_t)below(random, 1000);
                question->is_right[n] = false;
            }
            question->held[n++] = (struct kv_held){block, instance};
            question->n_held[head]++;
        }
    }
    question->query.n_held = question->n_held;
    question->query.held = question->held;
}

static uint32_t pick_k(struct kv_random *random, uint32_t n)
{
    switch (below(random, 6)) {
    case 0:
        return KV_CHOSEN_MAX;
    case 1:
        return n;
    case 2:
        return 1 + (uint32_t)below(random, n);
    default:
        return 1 + (uint32_t)below(random, 1 + n / 8);
    }
}

/* Mostly the same, so that a question finds what an index made. */
static uint32_t pick_rest(struct kv_random *random)
{
    return one_in(random, 4) ? 64 : 16;
}

bool question_make(struct question *question,
                   const struct truth *truth,
                   struct kv_random *random)
{
    const struct kv_schema *schema = &truth->schema;
    const uint32_t least = truth_least(truth);
    const uint32_t most = smaller(least + (one_in(random, 8) ? 10 : 0), truth->tokens_max);
    struct kv_query *query = &question->query;
    const struct kv_layer_schema *layer;
    size_t n_floats;

    memset(question, 0, sizeof(*question));
    if (most == 0)
        return false;
    query->layer = (uint32_t)below(random, schema->n_layers);
    if (!are_keys(&schema->layers[query->layer]) && !one_in(random, 10))
        query->layer = 0;
    layer = &schema->layers[query->layer];
    question->has_codes = are_keys(layer);
    query->head_begin = one_in(random, 2) ? 0 : (uint32_t)below(random, layer->n_kv_heads);
    query->n_heads = 1 + (uint32_t)below(random, layer->n_kv_heads - query->head_begin);
    question->n_heads = query->n_heads;
    query->n_queries = one_in(random, 20) ? KV_QUERIES_MAX : 1 + (uint32_t)below(random, 4);
    query->scale = one_in(random, 3) ? 1 : 1.0f / sqrtf((float)layer->d_k);
    query->merge = (enum kv_merge)(KV_MERGE_SUM + below(random, 4));
    query->answer = (enum kv_answer)(KV_ANSWER_IDS + below(random, 3));
    query->names = query->answer == KV_ANSWER_ATTEND && one_in(random, 2);
    query->scores = one_in(random, 2);
    query->rest = one_in(random, 3) ? pick_rest(random) : 0;
    make_ranges(question, most, random);
    query->k = pick_k(random, count_candidates(query));
    if (one_in(random, 3)) {
        query->selection = one_in(random, 2) ? KV_SELECT_MASS : KV_SELECT_FROM;
        query->share = (float)(1 + below(random, 100)) / 100;
    }
    query->rerank = one_in(random, 12) ? UINT32_MAX : 1 + (uint32_t)below(random, 5);
    if (one_in(random, 10) && question->tokens + 5 < truth->tokens_max)
        query->snapshot = question->tokens += (uint32_t)below(random, 5);
    question->is_sure = question->tokens <= least;
    if (one_in(random, 2))
        make_held(question, truth, random);

    n_floats = (size_t)query->n_heads * query->n_queries * layer->d_k;
    question->vectors = failing_memory_sure(n_floats, sizeof(float));
    for (size_t i = 0; i < n_floats; i++)
        question->vectors[i] = (float)((int)below(random, 2001) - 1000) / 1000;
    query->queries = question->vectors;
    return true;
}

void question_free(struct question *question)
{
    free(question->vectors);
    question->vectors = NULL;
}

/* ---- judging ----------------------------------------------------------------------------- */

static const char *__attribute__((format(printf, 1, 2))) say(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(fault, sizeof(fault), format, args);
    va_end(args);
    return fault;
}

/* One kv head's candidates, scored by their keys. */
struct scored {
    uint32_t *tokens; /* (n) */
    uint8_t *rows;    /* (n, row_bytes) */
    float *scores;    /* (n_queries, n) */
    uint32_t n;
    bool is_known; /* every row can only have been what it is taken for */
};

static void score(struct scored *scored,
                  const struct question *question,
                  const struct truth *truth,
                  uint32_t head,
                  uint64_t since)
{
    const struct kv_query *query = &question->query;
    const struct kv_layer_schema *layer = &truth->schema.layers[query->layer];
    const uint32_t unit =
        kv_schema_unit(&truth->schema, query->layer, query->head_begin + head);
    uint32_t n = 0;

    scored->n = count_candidates(query);
    scored->tokens = malloc(scored->n * sizeof(uint32_t));
    scored->scores = malloc((size_t)query->n_queries * scored->n * sizeof(float));
    scored->rows = malloc((size_t)scored->n * layer->row_bytes);
    if (scored->tokens == NULL || scored->scores == NULL || scored->rows == NULL)
        abort();
    scored->is_known = true;
    for (uint32_t i = 0; i < query->n_ranges; i++) {
        for (uint32_t token = query->ranges[i].begin; token < query->ranges[i].end; token++) {
            uint32_t content = only_content(truth, unit, token, since);

            scored->is_known = scored->is_known && content != 0;
            truth_row_fill(scored->rows + (size_t)n * layer->row_bytes, layer->row_bytes,
                           content, query->layer, query->head_begin + head, token);
            scored->tokens[n++] = token;
        }
    }
    kv_keys_score((enum kv_key_type)layer->dtype, scored->rows, layer->row_bytes, n, layer->d_k,
                  question->vectors + (size_t)head * query->n_queries * layer->d_k,
                  query->n_queries, scored->scores, n);
}

static void forget(struct scored *scored)
{
    free(scored->tokens);
    free(scored->rows);
    free(scored->scores);
}

static struct kv_choice choice_of(const struct kv_query *query, uint32_t rerank)
{
    return (struct kv_choice){.merge = query->merge,
                              .selection = query->selection,
                              .n_queries = query->n_queries,
                              .scale = query->scale,
                              .share = query->share,
                              .k = query->k,
                              .factor = rerank};
}

/* Whether the asker said that it holds the token's block, and was right. */
static bool holds(const struct question *question, uint32_t head, uint32_t token)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < head; i++)
        at += question->n_held[i];
    for (uint32_t i = at; i < at + question->n_held[head]; i++)
        if (question->held[i].block == token / KV_BLOCK_TOKENS && question->is_right[i])
            return true;
    return false;
}

static bool names_held_only(const struct kv_query *query)
{
    return query->answer == KV_ANSWER_ATTEND && !query->names;
}

static bool are_same(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof(*a)) != 0 && !(isnan(a[i]) && isnan(b[i])))
            return false;
    return true;
}

/* Attention over the chosen rows that the asker does not hold.
 *   tokens  (n) chosen, ascending
 *   among   (n) by which vectors; NULL: all count for all */
static const char *attention_fault(const struct question *question,
                                   const struct kv_layer_schema *layer,
                                   uint32_t head,
                                   const struct scored *scored,
                                   const uint32_t *tokens,
                                   const uint32_t *among,
                                   uint32_t n,
                                   const struct kv_found *found)
{
    const uint32_t n_queries = question->query.n_queries;
    const struct kv_attend_shape shape = {.type = (enum kv_key_type)layer->dtype,
                                          .d_k = layer->d_k,
                                          .d_v = layer->d_v,
                                          .n_queries = n_queries,
                                          .scale = question->query.scale};
    const void **rows = malloc(n * sizeof(*rows));
    uint32_t *counts = malloc(n * sizeof(*counts));
    float *state = malloc(kv_attend_floats(&shape) * sizeof(*state));
    float *outputs = malloc((size_t)n_queries * layer->d_v * sizeof(*outputs));
    float lses[KV_QUERIES_MAX];
    const char *why = NULL;
    uint32_t n_rows = 0, at = 0;

    if (rows == NULL || counts == NULL || state == NULL || outputs == NULL)
        abort();
    for (uint32_t i = 0; i < n; i++) {
        while (scored->tokens[at] != tokens[i])
            at++;
        if (holds(question, head, tokens[i]))
            continue;
        counts[n_rows] = among != NULL ? among[i] : UINT32_MAX;
        rows[n_rows++] = scored->rows + (size_t)at * layer->row_bytes;
    }
    kv_attend_begin(&shape, state);
    kv_attend_rows(&shape, question->vectors + (size_t)head * n_queries * layer->d_k, rows,
                   n_rows, counts, state);
    kv_attend_end(&shape, state, outputs, lses);
    if (!are_same(found->lses, lses, n_queries))
        why = say("log-sum-exp over %u of %u rows: %.9g of the first vector, not %.9g", n_rows,
                  n, (double)found->lses[0], (double)lses[0]);
    else if (!are_same(found->outputs, outputs, (size_t)n_queries * layer->d_v))
        why = say("output over %u of %u rows: %.9g in front, not %.9g", n_rows, n,
                  (double)found->outputs[0], (double)outputs[0]);
    free(rows);
    free(counts);
    free(state);
    free(outputs);
    return why;
}

/* What a vector's answer is if all that was not chosen were attended.
 *   is_own  only what was chosen and is attended
 *   Returns the log-sum-exp; -INFINITY: of no row. */
static double attended(const struct question *question,
                       const struct kv_layer_schema *layer,
                       uint32_t head,
                       const struct scored *scored,
                       const uint32_t *tokens,
                       const uint32_t *among,
                       uint32_t n,
                       uint32_t q,
                       bool is_own,
                       double *ret_output)
{
    const struct kv_query *query = &question->query;
    const float *scores = scored->scores + (size_t)q * scored->n;
    const size_t value_at = layer->row_bytes / (layer->d_k + layer->d_v) * layer->d_k;
    float *value = malloc(layer->d_v * sizeof(*value));
    double most = -INFINITY, sum = 0;

    if (value == NULL)
        abort();
    memset(ret_output, 0, layer->d_v * sizeof(*ret_output));
    for (uint32_t i = 0; i < scored->n; i++)
        most = fmax(most, (double)query->scale * (double)scores[i]);
    for (uint32_t i = 0, at = 0; i < scored->n; i++) {
        bool is_chosen = at < n && tokens[at] == scored->tokens[i];

        if (is_chosen && among != NULL)
            is_chosen = among[at] >> q & 1;
        at += at < n && tokens[at] == scored->tokens[i];
        if (is_chosen
                ? query->answer != KV_ANSWER_ATTEND || holds(question, head, scored->tokens[i])
                : is_own)
            continue;
        const double weight = exp((double)query->scale * (double)scores[i] - most);
        kv_keys_load((enum kv_key_type)layer->dtype,
                     scored->rows + (size_t)i * layer->row_bytes + value_at, layer->row_bytes,
                     1, layer->d_v, value);
        sum += weight;
        for (uint32_t j = 0; j < layer->d_v; j++)
            ret_output[j] += weight * (double)value[j];
    }
    for (uint32_t j = 0; sum > 0 && j < layer->d_v; j++)
        ret_output[j] /= sum;
    free(value);
    return sum > 0 ? most + log(sum) : -INFINITY;
}

/* With a rest: where no summaries were used it is attention over all, but for what is held or
 * not asked for; where some were, more than that over what was chosen, by values that there
 * are. */
static const char *rest_fault(const struct question *question,
                              const struct kv_layer_schema *layer,
                              uint32_t head,
                              const struct scored *scored,
                              const uint32_t *tokens,
                              const uint32_t *among,
                              uint32_t n,
                              const struct kv_found *found)
{
    double *wanted = malloc(layer->d_v * sizeof(*wanted));
    const char *why = NULL;

    if (wanted == NULL)
        abort();
    if (found->n_rest > scored->n - (among == NULL ? n : 0))
        why = say("summaries stand for %u rows of %u, and %u were chosen", found->n_rest,
                  scored->n, n);
    for (uint32_t q = 0; why == NULL && q < question->query.n_queries; q++) {
        const bool is_bound = found->n_rest > 0;
        const float *output = found->outputs + (size_t)q * layer->d_v;
        const double lse = (double)found->lses[q];
        const double least =
            attended(question, layer, head, scored, tokens, among, n, q, is_bound, wanted);

        if (isinf(least) && !is_bound ? !isinf(lse)
            : is_bound                ? !(lse > least - 1e-3 * (1 + fabs(least)))
                                      : !(fabs(lse - least) < 1e-3 * (1 + fabs(least))))
            why = say("vector %u: log-sum-exp %.9g with a rest of %u rows by summaries, not "
                      "%.9g",
                      q, lse, found->n_rest, least);
        for (uint32_t j = 0; why == NULL && j < layer->d_v; j++)
            if (is_bound ? !(fabs((double)output[j]) < 2.02)
                         : !(fabs((double)output[j] - wanted[j]) < 2e-3))
                why = say("vector %u: output %.9g with a rest of %u rows by summaries, not "
                          "%.9g",
                          q, (double)output[j], found->n_rest, wanted[j]);
    }
    free(wanted);
    return why;
}

/* What there is of outputs. */
static const char *outputs_fault(const struct question *question,
                                 const struct kv_layer_schema *layer,
                                 uint32_t head,
                                 const struct scored *scored,
                                 const uint32_t *tokens,
                                 const uint32_t *among,
                                 uint32_t n,
                                 const struct kv_found *found)
{
    if (question->query.rest != 0)
        return rest_fault(question, layer, head, scored, tokens, among, n, found);
    if (question->query.answer == KV_ANSWER_ATTEND)
        return attention_fault(question, layer, head, scored, tokens, among, n, found);
    return NULL;
}

/* Both steps, where no row has a code. */
static const char *choice_fault(const struct question *question,
                                const struct kv_layer_schema *layer,
                                uint32_t head,
                                const struct scored *scored,
                                const struct kv_found *found)
{
    const struct kv_query *query = &question->query;
    const struct kv_choice take = choice_of(query, query->rerank);
    struct kv_choice choice = choice_of(query, 1);
    const uint32_t n = scored->n;
    uint32_t *taken = calloc(n + KV_SELECT_SPARE, sizeof(uint32_t)),
             *among = calloc(n, sizeof(uint32_t));
    uint32_t *chosen = calloc(n + KV_SELECT_SPARE, sizeof(uint32_t)),
             *heads = calloc(n, sizeof(uint32_t));
    float *own = calloc((size_t)n * query->n_queries, sizeof(float));
    float *weights = calloc((size_t)n * KV_CHOOSE_ROOM, sizeof(float));
    float *spare = calloc(n, sizeof(float));
    float *lost = calloc((size_t)n * query->n_queries, sizeof(float));
    static struct kv_chooser chooser;
    const char *why = NULL;
    uint32_t n_taken, n_chosen, at = 0, each[KV_QUERIES_MAX];

    if (taken == NULL || among == NULL || chosen == NULL || heads == NULL || own == NULL ||
        weights == NULL || spare == NULL || lost == NULL)
        abort();
    memcpy(lost, scored->scores, (size_t)n * query->n_queries * sizeof(float));
    n_taken =
        kv_choose(&chooser, &take, lost, NULL, n, query->rerank == 1, weights, taken, among);
    for (uint32_t q = 0; q < query->n_queries; q++)
        for (uint32_t i = 0; i < n_taken; i++)
            own[(size_t)q * n_taken + i] = scored->scores[(size_t)q * n + taken[i]];
    if (query->rerank == 1) { /* step 1 is the answer, and its weights */
        n_chosen = n_taken;
        for (uint32_t i = 0; i < n_chosen; i++) {
            spare[i] = weights[taken[i]];
            chosen[i] = scored->tokens[taken[i]];
            heads[i] = among[i];
        }
    } else {
        memcpy(each, chooser.k, sizeof(each));
        choice.selection = KV_SELECT_TOP;
        choice.each = each;
        n_chosen = kv_choose(&chooser, &choice, own, kv_choice_merges(&choice) ? NULL : among,
                             n_taken, true, weights, chosen, heads);
        for (uint32_t i = 0; i < n_chosen; i++) {
            spare[i] = weights[chosen[i]];
            chosen[i] = scored->tokens[taken[chosen[i]]];
        }
    }
    if (n_chosen != found->n_chosen)
        why = say("%u rows chosen, not %u", found->n_chosen, n_chosen);
    for (uint32_t i = 0; why == NULL && i < n_chosen; i++) {
        if (names_held_only(query) && !holds(question, head, chosen[i]))
            continue;
        if (at == found->n_ids || chosen[i] != found->ids[at])
            why = say("choice %u of %u: token %u is name %u of %u, not token %u", i, n_chosen,
                      chosen[i], at, found->n_ids, at < found->n_ids ? found->ids[at] : 0);
        else if (found->heads != NULL && found->heads[at] != heads[i])
            why = say("token %u: vectors %#x chose it, not %#x", chosen[i], found->heads[at],
                      heads[i]);
        else if (found->scores != NULL &&
                 memcmp(&found->scores[at], &spare[i], sizeof(float)) != 0)
            why = say("token %u: weight %.9g, not %.9g", chosen[i], (double)found->scores[at],
                      (double)spare[i]);
        at++;
    }
    if (why == NULL && at != found->n_ids)
        why = say("%u rows are named, not %u", found->n_ids, at);
    if (why == NULL)
        why = outputs_fault(question, layer, head, scored, chosen,
                            query->merge == KV_MERGE_NONE ? heads : NULL, n_chosen, found);
    free(taken);
    free(among);
    free(chosen);
    free(heads);
    free(own);
    free(weights);
    free(spare);
    free(lost);
    return why;
}

/* What the counters must say. */
static const char *
counts_fault(const struct kv_query *query, uint32_t n, const struct kv_found *found)
{
    const struct kv_choice take = choice_of(query, query->rerank), choice = choice_of(query, 1);
    const bool is_merged = kv_choice_merges(&take);
    const bool is_top = query->selection == KV_SELECT_TOP;
    const uint32_t takes = kv_choice_takes(&take, take.k);
    const bool takes_all = is_top && takes >= n;
    const uint32_t least = is_top ? smaller(choice.k, n) : 1, most = kv_choice_max(&choice, n);
    const uint32_t n_scored = takes_all ? 0 : n;
    uint32_t reranked_least = is_top ? smaller(takes, n) : 1;
    uint32_t reranked_most = kv_choice_max(&take, n);

    if (found->n_chosen < least || found->n_chosen > (is_merged && is_top ? least : most))
        return say("%u rows chosen of %u, k %u", found->n_chosen, n, query->k);
    if (names_held_only(query) ? found->n_ids > found->n_chosen
                               : found->n_ids != found->n_chosen)
        return say("%u rows chosen, %u named", found->n_chosen, found->n_ids);
    if (found->n_coded + found->n_exact != n_scored)
        return say("%u rows scored by code and %u by key, of %u", found->n_coded,
                   found->n_exact, n_scored);
    if (takes_all ? choice.k >= n && !query->scores : query->rerank == 1)
        reranked_least = reranked_most = 0;
    if (found->n_reranked < reranked_least || found->n_reranked > reranked_most)
        return say("%u rows were reranked, not %u to %u", found->n_reranked, reranked_least,
                   reranked_most);
    if ((found->n_coded > 0) != (found->n_chapters > 0))
        return say("%u rows were scored by codes of %u codebooks", found->n_coded,
                   found->n_chapters);
    return NULL;
}

/* One vector's weights of reranked rows are as the softmax says, beside each other. */
static const char *weights_fault(const struct kv_query *query,
                                 const struct scored *scored,
                                 const struct kv_found *found)
{
    double first = 0;

    if (found->scores == NULL || query->n_queries != 1 || found->n_reranked == 0)
        return NULL;
    for (uint32_t i = 0, at = 0; i < found->n_ids; i++) {
        double rest;

        while (scored->tokens[at] != found->ids[i])
            at++;
        if (found->scores[i] < 1e-30f || !isfinite(scored->scores[at]))
            return NULL; /* underflow */
        rest =
            log((double)found->scores[i]) - (double)query->scale * (double)scored->scores[at];
        if (i == 0)
            first = rest;
        else if (fabs(rest - first) > 1e-3 * (1 + fabs(first)))
            return say("token %u: its weight is %g times that of token %u", found->ids[i],
                       exp(rest - first), found->ids[0]);
    }
    return NULL;
}

static const char *
held_fault(const struct question *question, uint32_t head, const struct kv_found *found)
{
    if (found->row_of == NULL)
        return NULL;
    for (uint32_t i = 0; i < found->n_ids; i++) {
        bool is_held = holds(question, head, found->ids[i]);

        if (is_held != (found->row_of[i] == KV_ROW_HELD))
            return say("token %u: %s", found->ids[i], is_held ? "held, and sent" : "not sent");
    }
    return NULL;
}

static const char *rows_fault(const struct question *question,
                              const struct truth *truth,
                              uint64_t since,
                              uint32_t head,
                              const struct kv_found *found)
{
    const uint32_t layer = question->query.layer, kv_head = question->query.head_begin + head;
    const uint32_t unit = kv_schema_unit(&truth->schema, layer, kv_head);
    const size_t row_bytes = truth->schema.layers[layer].row_bytes;
    uint32_t n_rows = 0;

    for (uint32_t i = 0; i < found->n_ids; i++) {
        const uint32_t token = found->ids[i];
        const uint8_t *row;
        uint32_t content;

        if (question->query.answer != KV_ANSWER_ROWS || found->row_of[i] == KV_ROW_HELD)
            continue;
        if (found->row_of[i] != n_rows++ || found->row_of[i] >= found->n_rows)
            return say("token %u is row %u of %u", token, found->row_of[i], found->n_rows);
        row = (const uint8_t *)found->rows + (size_t)found->row_of[i] * row_bytes;
        content = truth_row_content(row, row_bytes, layer, kv_head, token);
        if (content == 0 || !truth_row_allows(truth, unit, token, content, since))
            return say("layer %u, head %u, token %u: content %u was sent", layer, kv_head,
                       token, content);
        if (found->crcs[found->row_of[i]] != kv_row_crc(row, row_bytes, layer, kv_head, token))
            return say("token %u: a wrong CRC", token);
    }
    return n_rows != found->n_rows ? say("%u rows, and %u are named", found->n_rows, n_rows)
                                   : NULL;
}

static const char *ids_fault(const struct kv_query *query, const struct kv_found *found)
{
    uint32_t range = 0;

    for (uint32_t i = 0; i < found->n_ids; i++) {
        if (i > 0 && found->ids[i] <= found->ids[i - 1])
            return say("token %u behind token %u", found->ids[i], found->ids[i - 1]);
        while (range < query->n_ranges && found->ids[i] >= query->ranges[range].end)
            range++;
        if (range == query->n_ranges || found->ids[i] < query->ranges[range].begin)
            return say("token %u is no candidate", found->ids[i]);
    }
    return NULL;
}

const char *question_fault(const struct question *question,
                           const struct truth *truth,
                           uint64_t since,
                           const struct kv_op *op)
{
    const struct kv_query *query = &question->query;
    const struct kv_layer_schema *layer = &truth->schema.layers[query->layer];
    const char *why = NULL;

    for (uint32_t head = 0; why == NULL && head < question->n_heads; head++) {
        struct scored scored;
        struct kv_found found;

        if (kv_op_found(op, head, &found) != KV_OK)
            return "nothing was found";
        score(&scored, question, truth, head, since);
        why = ids_fault(query, &found);
        if (why == NULL)
            why = counts_fault(query, scored.n, &found);
        if (why == NULL)
            why = rows_fault(question, truth, since, head, &found);
        if (why == NULL)
            why = held_fault(question, head, &found);
        if (why == NULL && scored.is_known && found.n_coded == 0)
            why = choice_fault(question, layer, head, &scored, &found);
        else if (why == NULL && scored.is_known && !names_held_only(query))
            why = outputs_fault(question, layer, head, &scored, found.ids, found.heads,
                                found.n_ids, &found);
        if (why == NULL && scored.is_known)
            why = weights_fault(query, &scored, &found);
        forget(&scored);
    }
    return why;
}

/* ---- index ------------------------------------------------------------------------------- */

bool question_index(struct kv_index *index, const struct truth *truth, struct kv_random *random)
{
    const uint32_t least = truth_least(truth);
    const uint32_t most = smaller(least + (one_in(random, 8) ? 10 : 0), truth->tokens_max);

    if (most == 0)
        return false;
    *index = (struct kv_index){
        .tokens = one_in(random, 3) ? 1 + (uint32_t)below(random, most) : most,
        .chapter_blocks =
            one_in(random, most < BLOCKS_MIN * KV_BLOCK_TOKENS ? 2 : 4) ? 0 : BLOCKS_MIN,
        .m = 1u << below(random, 3),
        .bits = 1 + (uint32_t)below(random, 4),
        .iterations = 1 + (uint32_t)below(random, 3),
        .budget_us = one_in(random, 3) ? (uint32_t)below(random, 1000) : 0,
        .seed = below(random, 5),
        .wait = !one_in(random, 3),
        .rest = one_in(random, 2) ? pick_rest(random) : 0,
    };
    if (index->chapter_blocks > 0 && one_in(random, 4))
        index->chapter_blocks += (uint32_t)below(random, 10);
    if (one_in(random, 30))
        index->bits = KV_CODE_BITS_MAX;
    if (one_in(random, 3) || !question_index_is_possible(index, truth)) {
        index->layer_begin = (uint32_t)below(random, truth->schema.n_layers);
        if (!are_keys(&truth->schema.layers[index->layer_begin]) && !one_in(random, 10))
            index->layer_begin = 0;
        index->n_layers = 1;
    }
    return true;
}

static uint32_t layers_end(const struct kv_index *index, const struct truth *truth)
{
    return index->n_layers == 0 ? truth->schema.n_layers : index->layer_begin + index->n_layers;
}

bool question_index_is_sure(const struct kv_index *index, const struct truth *truth)
{
    for (uint32_t layer = index->layer_begin; layer < layers_end(index, truth); layer++)
        for (uint32_t head = 0; head < truth->schema.layers[layer].n_kv_heads; head++)
            if (truth_unit_least(truth, kv_schema_unit(&truth->schema, layer, head)) <
                index->tokens)
                return false;
    return true;
}

bool question_index_is_possible(const struct kv_index *index, const struct truth *truth)
{
    for (uint32_t layer = index->layer_begin; layer < layers_end(index, truth); layer++)
        if (!are_keys(&truth->schema.layers[layer]))
            return false;
    return true;
}

/* Rows of a unit that have codes when nobody asked for others before. */
static uint32_t rows_coded(const struct kv_index *index)
{
    uint32_t n_blocks = index->tokens / KV_BLOCK_TOKENS, rest;

    if (index->chapter_blocks == 0)
        return index->tokens < 2u << index->bits ? 0 : index->tokens;
    rest = n_blocks % index->chapter_blocks;
    return (n_blocks - (rest < BLOCKS_MIN ? rest : 0)) * KV_BLOCK_TOKENS;
}

const char *question_index_fault(const struct kv_index *index,
                                 const struct truth *truth,
                                 bool is_first,
                                 const struct kv_indexed *indexed)
{
    uint64_t n_units = 0;

    for (uint32_t layer = index->layer_begin; layer < layers_end(index, truth); layer++)
        n_units += truth->schema.layers[layer].n_kv_heads;
    if (indexed->rows != n_units * index->tokens || indexed->rows_coded > indexed->rows)
        return say("%llu rows of %llu units, %llu of them with codes",
                   (unsigned long long)indexed->rows, (unsigned long long)n_units,
                   (unsigned long long)indexed->rows_coded);
    if (index->wait && indexed->n_pending > 0)
        return say("%u codebooks are still to come", indexed->n_pending);
    if (!index->wait || !is_first)
        return NULL;
    const uint32_t most = rows_coded(index);
    /* Who writes on while codes are made for a half-filled block may get a copy of it, without
     * them. */
    const uint32_t least = most / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    if (indexed->rows_coded < n_units * least || indexed->rows_coded > n_units * most)
        return say("%llu rows have codes, not %llu", (unsigned long long)indexed->rows_coded,
                   (unsigned long long)(n_units * most));
    return NULL;
}
