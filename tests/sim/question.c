#include "tests/sim/question.h"

#include "kernels/checksum.h"
#include "tests/support/failing_memory.h"
#include "tests/support/node_codes.h"
#include "tests/support/oracle.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCKS_MIN = 8,    /* of a chapter */
    ROTATED_MAX = 256, /* elements of keys that are rotated */
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
    return layer->dtype == KV_FP32 || layer->dtype == KV_FP16 || layer->dtype == KV_BF16;
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
static bool fingerprint_of(const struct truth *truth,
                           const struct kv_session *session,
                           uint32_t layer,
                           uint32_t head,
                           uint32_t block,
                           uint32_t *ret_fingerprint)
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
            crcs[i] = kv_row_crc(session, row, row_bytes, layer, head, token);
        }
    }
    free(row);
    if (is_known)
        *ret_fingerprint = kv_block_fingerprint(crcs);
    return is_known;
}

static void make_held(struct question *question,
                      const struct truth *truth,
                      const struct kv_session *session,
                      struct kv_random *random)
{
    const struct kv_query *query = &question->query;
    uint32_t n = 0;

    for (uint32_t head = 0; head < question->n_heads; head++) {
        question->n_held[head] = 0;
        for (uint32_t block = 0; block < truth->tokens_max / KV_BLOCK_TOKENS; block++) {
            uint32_t fingerprint = 0;

            if (!one_in(random, 3))
                continue;
            question->is_right[n] = fingerprint_of(
                truth, session, query->layer, query->kv_head_begin + head, block, &fingerprint);
            if (one_in(random, 4)) {
                fingerprint ^= 1 + (uint32_t)below(random, 1000);
                question->is_right[n] = false;
            }
            question->held[n++] = (struct kv_cached_block){block, fingerprint};
            question->n_held[head]++;
        }
    }
    question->query.n_cached = question->n_held;
    question->query.cached = question->held;
}

static uint32_t pick_k(struct kv_random *random, uint32_t n)
{
    switch (below(random, 6)) {
    case 0:
        return KV_SELECTED_MAX;
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

static uint32_t pick_rest_rows(struct kv_random *random)
{
    return one_in(random, 3) ? 3072 : 0;
}

static void
pick_heads(struct kv_query *query, const struct kv_schema *schema, struct kv_random *random)
{
    query->layer = (uint32_t)below(random, schema->n_layers);
    if (!are_keys(&schema->layers[query->layer]) && !one_in(random, 10))
        query->layer = 0;
    const uint32_t n_heads = schema->layers[query->layer].n_kv_heads;
    query->kv_head_begin = one_in(random, 2) ? 0 : (uint32_t)below(random, n_heads);
    query->n_kv_heads = 1 + (uint32_t)below(random, n_heads - query->kv_head_begin);
}

/* A first cut, and candidates of each head, or neither. */
static void pick_cut(struct question *question, struct kv_random *random)
{
    struct kv_query *query = &question->query;

    if (one_in(random, 2)) {
        query->first_cut = KV_CUT_INT4;
        query->rerank = 1 + (uint32_t)below(random, 4);
        query->candidates =
            one_in(random, 10) ? UINT16_MAX : query->rerank + (uint32_t)below(random, 13);
    }
    query->want_reads = one_in(random, 2);
    if (!one_in(random, 3))
        return;
    const uint32_t least = query->first_cut == KV_CUT_NONE ? 1 : query->rerank;
    const uint32_t most = query->first_cut == KV_CUT_NONE ? query->rerank : query->candidates;
    for (uint32_t i = 0; i < query->n_kv_heads; i++)
        question->each[i] =
            one_in(random, 3) ? most
                              : least + (uint32_t)below(random, smaller(most - least, 15) + 1);
    query->candidates_each = question->each;
}

/* Of a head, for each row that is chosen. */
static uint32_t candidates_of(const struct kv_query *query, uint32_t head)
{
    if (query->candidates_each != NULL)
        return query->candidates_each[head];
    return query->first_cut == KV_CUT_NONE ? query->rerank : query->candidates;
}

static bool has_heads_of(const struct kv_schema *schema, const struct kv_query *query)
{
    return query->layer < schema->n_layers &&
           query->kv_head_begin + query->n_kv_heads <= schema->layers[query->layer].n_kv_heads;
}

bool question_make(struct question *question,
                   const struct truth *truth,
                   const struct kv_session *session,
                   const struct kv_query *like,
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
    if (like != NULL && has_heads_of(schema, like)) {
        query->layer = like->layer;
        query->kv_head_begin = like->kv_head_begin;
        query->n_kv_heads = like->n_kv_heads;
    } else {
        pick_heads(query, schema, random);
    }
    layer = &schema->layers[query->layer];
    question->has_codes = are_keys(layer);
    question->n_heads = query->n_kv_heads;
    query->n_queries = one_in(random, 20) ? KV_QUERIES_MAX : 1 + (uint32_t)below(random, 4);
    query->scale = one_in(random, 3) ? 1 : 1.0f / sqrtf((float)layer->d_k);
    query->merge = (enum kv_merge)(KV_MERGE_SUM + below(random, 4));
    query->answer = (enum kv_answer)(KV_ANSWER_IDS + below(random, 3));
    query->want_ids = query->answer == KV_ANSWER_ATTEND && one_in(random, 2);
    query->want_weights = one_in(random, 2);
    query->summaries = one_in(random, 3) ? pick_rest(random) : 0;
    query->summary_rows = pick_rest_rows(random);
    make_ranges(question, most, random);
    query->k = pick_k(random, count_candidates(query));
    if (one_in(random, 3)) {
        query->selection = one_in(random, 2) ? KV_SELECT_MASS : KV_SELECT_THRESHOLD;
        query->fraction = (float)(1 + below(random, 100)) / 100;
    }
    query->rerank = one_in(random, 12) ? UINT32_MAX : 1 + (uint32_t)below(random, 5);
    pick_cut(question, random);
    if (one_in(random, 10) && question->tokens + 5 < truth->tokens_max)
        query->snapshot = question->tokens += (uint32_t)below(random, 5);
    question->is_sure = question->tokens <= least;
    if (one_in(random, 2))
        make_held(question, truth, session, random);

    n_floats = (size_t)query->n_kv_heads * query->n_queries * layer->d_k;
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

/* One kv head's candidates, as the truth has them. */
struct candidates {
    struct oracle_rows rows;
    bool *held;    /* (n) the asker said so, and was right, and the node knew it */
    bool is_known; /* every row can only have been what it is taken for */
};

/* Whether the answer says of a row of the block that the asker has it. */
static bool is_left_out(const struct kv_query_result *found, uint32_t block)
{
    for (uint32_t i = 0; found->row_index != NULL && i < found->n_ids; i++)
        if (found->ids[i] / KV_BLOCK_TOKENS == block && found->row_index[i] == KV_ROW_CACHED)
            return true;
    return false;
}

/* Whether the asker said that it holds the token's block, was right, and the node knew it.  A node
 * that may lack CRCs of the block knew it if it left out any row.  If it left out rows and named
 * none of them, attention over what was chosen is not what it answered. */
static bool holds(const struct question *question,
                  uint32_t head,
                  uint32_t token,
                  const struct kv_query_result *found)
{
    const uint32_t block = token / KV_BLOCK_TOKENS;
    uint32_t at = 0;

    for (uint32_t i = 0; i < head; i++)
        at += question->n_held[i];
    for (uint32_t i = at; i < at + question->n_held[head]; i++)
        if (question->held[i].block == block && question->is_right[i])
            return !question->may_lack_crcs || is_left_out(found, block);
    return false;
}

static bool names_held_only(const struct kv_query *query)
{
    return query->answer == KV_ANSWER_ATTEND && !query->want_ids;
}

static void candidates_make(struct candidates *candidates,
                            const struct question *question,
                            const struct truth *truth,
                            uint32_t head,
                            uint64_t since,
                            const struct kv_query_result *found)
{
    const struct kv_query *query = &question->query;
    const struct kv_layer_schema *layer = &truth->schema.layers[query->layer];
    const enum kv_dtype type = (enum kv_dtype)layer->dtype;
    const uint32_t unit =
        kv_schema_unit(&truth->schema, query->layer, query->kv_head_begin + head);
    uint8_t *row = failing_memory_sure(1, layer->row_bytes);
    uint32_t n = count_candidates(query);
    struct oracle_rows *rows = &candidates->rows;

    oracle_rows_make(rows, n, layer->d_k, layer->d_v);
    candidates->held = failing_memory_sure(n, sizeof(bool));
    candidates->is_known = true;
    n = 0;
    for (uint32_t i = 0; i < query->n_ranges; i++) {
        for (uint32_t token = query->ranges[i].begin; token < query->ranges[i].end; token++) {
            uint32_t content = only_content(truth, unit, token, since);

            candidates->is_known = candidates->is_known && content != 0;
            truth_row_fill(row, layer->row_bytes, content, query->layer,
                           query->kv_head_begin + head, token);
            oracle_load(type, row, layer->d_k, rows->keys + (size_t)n * layer->d_k);
            oracle_load(type, row + kv_dtype_bytes(type) * layer->d_k, layer->d_v,
                        rows->values + (size_t)n * layer->d_v);
            candidates->held[n] = holds(question, head, token, found);
            rows->ranges[n] = i;
            rows->tokens[n++] = token;
        }
    }
    free(row);
}

static void candidates_free(struct candidates *candidates)
{
    oracle_rows_free(&candidates->rows);
    free(candidates->held);
}

/* Adds what the node's codes stand for; false: they are not those that the query went by, which
 * was earlier. */
static bool candidates_code(struct candidates *candidates,
                            const struct question *question,
                            const struct truth *truth,
                            struct kvs_node *const *nodes,
                            uint32_t head,
                            const struct kv_query_result *found)
{
    struct oracle_rows *rows = &candidates->rows;
    const uint32_t kv_head = question->query.kv_head_begin + head;
    const unsigned place =
        truth->node_of_unit[kv_schema_unit(&truth->schema, question->query.layer, kv_head)];
    uint32_t n_coded = 0;
    bool has_book = false;
    const bool is_there =
        nodes[place] != NULL &&
        node_codes(nodes[place], &truth->ticket.token, question->query.layer, kv_head, rows);

    for (uint32_t i = 0; is_there && i < rows->n; i++) {
        n_coded += rows->coded[i];
        has_book = has_book || rows->books_of[i] > 0;
    }
    /* A job that has begun since, and coded none of these, decides how rows without codes are scored. */
    return is_there && n_coded == found->n_scored_by_code && (n_coded > 0 || !has_book);
}

static struct oracle_question asked(const struct question *question, uint32_t d, uint32_t head)
{
    const struct kv_query *query = &question->query;

    return (struct oracle_question){
        .queries = question->vectors + (size_t)head * query->n_queries * d,
        .n_queries = query->n_queries,
        .scale = query->scale,
        .merge = query->merge,
        .selection = query->selection,
        .share = query->fraction,
        .k = query->k,
        .factor = query->first_cut == KV_CUT_NONE ? candidates_of(query, head) : query->rerank,
        .first_cut = query->first_cut,
        .candidates = candidates_of(query, head),
    };
}

static struct oracle_answer answer_of(const struct kv_query *query,
                                      const struct candidates *candidates,
                                      const struct kv_query_result *found)
{
    return (struct oracle_answer){
        .n_chosen = found->n_selected,
        .n_ids = found->n_ids,
        .ids = found->ids,
        .heads = found->query_mask,
        .scores = found->weights,
        .held = candidates->held,
        .names_held_only = names_held_only(query),
    };
}

/* With a rest: where no summaries were used it is attention over all, but for what is held or
 * not asked for; where some were, more than that over what was chosen, by values that there
 * are.
 *   chosen  (n) by that vector
 *   ret_in  (n) what the answer certainly is attention over */
static void attended(const struct question *question,
                     const struct candidates *candidates,
                     const bool *chosen,
                     bool has_summaries,
                     bool *ret_in)
{
    for (uint32_t i = 0; i < candidates->rows.n; i++)
        ret_in[i] = chosen[i]
                        ? question->query.answer == KV_ANSWER_ATTEND && !candidates->held[i]
                        : !has_summaries;
}

/* Which candidates vector q chose: as the answer names them, or if it does not, as the oracle
 * knows.  false: it does not know of all. */
static bool chosen_by(const struct oracle *oracle,
                      const struct oracle_answer *answer,
                      uint32_t q,
                      bool *ret_in)
{
    const uint32_t mask = oracle->question.merge == KV_MERGE_NONE ? 1u << q : UINT32_MAX;

    for (uint32_t i = 0, at = 0; i < oracle->rows->n; i++) {
        const bool is_named = at < answer->n_ids && answer->ids[at] == oracle->rows->tokens[i];

        if (!answer->names_held_only)
            ret_in[i] = is_named && (answer->heads == NULL || (answer->heads[at] & mask) != 0);
        else if ((oracle->must[i] & mask) != 0 || (oracle->may[i] & mask) == 0)
            ret_in[i] = (oracle->must[i] & mask) != 0;
        else
            return false;
        at += is_named;
    }
    return true;
}

static const char *rest_vector_fault(const struct candidates *candidates,
                                     const float *query,
                                     float scale,
                                     const bool *in,
                                     const struct kv_query_result *found,
                                     uint32_t q)
{
    const uint32_t d = candidates->rows.d_v;
    const bool is_bound = found->n_estimated > 0;
    const float *output = found->outputs + (size_t)q * d;
    const double lse = (double)found->lses[q];
    double *wanted = failing_memory_sure(d, sizeof(*wanted));
    const double least = oracle_attend(&candidates->rows, query, scale, in, wanted);
    const char *why = NULL;

    /* Of a vector that chose all, with NONE, summaries that others need add nothing. */
    if (isinf(least) ? (is_bound ? isnan(lse) : !isinf(lse))
        : is_bound   ? !(lse > least - 1e-3 * (1 + fabs(least)))
                     : !(fabs(lse - least) < 1e-3 * (1 + fabs(least))))
        why = say("vector %u: log-sum-exp %.9g with a rest of %u rows by summaries, not %.9g",
                  q, lse, found->n_estimated, least);
    for (uint32_t j = 0; why == NULL && j < d; j++)
        if (is_bound ? !(fabs((double)output[j]) < 2.02)
                     : !(fabs((double)output[j] - wanted[j]) < 2e-3))
            why = say("vector %u: output %.9g with a rest of %u rows by summaries, not %.9g", q,
                      (double)output[j], found->n_estimated, wanted[j]);
    free(wanted);
    return why;
}

static const char *rest_fault(const struct question *question,
                              uint32_t head,
                              const struct candidates *candidates,
                              const struct oracle *oracle,
                              const struct oracle_answer *answer,
                              const struct kv_query_result *found)
{
    const struct kv_query *query = &question->query;
    const uint32_t n = candidates->rows.n, d = candidates->rows.d_k;
    bool *chosen = failing_memory_sure(n, sizeof(bool)),
         *in = failing_memory_sure(n, sizeof(bool));
    const char *why = NULL;

    if (found->n_estimated > n - (query->merge == KV_MERGE_NONE ? 0 : found->n_selected))
        why = say("summaries stand for %u rows of %u, and %u were chosen", found->n_estimated,
                  n, found->n_selected);
    for (uint32_t q = 0; why == NULL && q < query->n_queries; q++) {
        if (!chosen_by(oracle, answer, q, chosen))
            break;
        attended(question, candidates, chosen, found->n_estimated > 0, in);
        why = rest_vector_fault(candidates,
                                question->vectors + ((size_t)head * query->n_queries + q) * d,
                                query->scale, in, found, q);
    }
    free(chosen);
    free(in);
    return why;
}

/* What was chosen, and attention over it, against the oracle.
 *   knows_codes  the candidates have them, or no codes were looked at: the choice is known */
static const char *choice_fault(const struct question *question,
                                uint32_t head,
                                const struct candidates *candidates,
                                bool knows_codes,
                                const struct kv_query_result *found)
{
    const struct kv_query *query = &question->query;
    const struct oracle_question asks = asked(question, candidates->rows.d_k, head);
    const struct oracle_answer answer = answer_of(query, candidates, found);
    struct oracle oracle;
    const char *why = NULL;

    oracle_make(&oracle, &asks, &candidates->rows);
    if (knows_codes)
        why = oracle_choice_fault(&oracle, &answer);
    if (why == NULL && query->answer == KV_ANSWER_ATTEND && query->summaries == 0 &&
        (knows_codes || !names_held_only(query)))
        why = oracle_attention_fault(&oracle, &answer, found->outputs, found->lses, NULL);
    if (why == NULL && query->summaries != 0 && (knows_codes || !names_held_only(query)))
        why = rest_fault(question, head, candidates, &oracle, &answer, found);
    if (why != NULL && why != fault)
        why = say("%s", why);
    oracle_free(&oracle);
    return why;
}

/* What the counters must say. */
static const char *counts_fault(const struct kv_query *query,
                                uint32_t head,
                                uint32_t n,
                                const struct kv_query_result *found)
{
    const bool is_merged = query->merge == KV_MERGE_SUM || query->merge == KV_MERGE_MAX;
    const bool is_top = query->selection == KV_SELECT_TOP;
    const uint64_t n_groups = is_merged ? 1 : query->n_queries;
    const uint32_t candidates = candidates_of(query, head);
    const uint32_t takes = smaller((uint64_t)query->k * candidates,
                                   is_merged ? KV_CANDIDATES_MAX : KV_SELECTED_MAX);
    const bool takes_all = is_top && takes >= n;
    const uint32_t least = is_top ? smaller(query->k, n) : 1;
    const uint32_t most = smaller(smaller(query->k, KV_SELECTED_MAX) * n_groups, n);
    const uint32_t n_scored = takes_all ? 0 : n;
    uint32_t reranked_least = is_top ? smaller(takes, n) : 1;
    uint32_t reranked_most = smaller(takes * n_groups, n);

    if (found->n_selected < least || found->n_selected > (is_merged && is_top ? least : most))
        return say("%u rows chosen of %u, k %u", found->n_selected, n, query->k);
    if (names_held_only(query) ? found->n_ids > found->n_selected
                               : found->n_ids != found->n_selected)
        return say("%u rows chosen, %u named", found->n_selected, found->n_ids);
    if (found->n_scored_by_code + found->n_scored_by_key != n_scored)
        return say("%u rows scored by code and %u by key, of %u", found->n_scored_by_code,
                   found->n_scored_by_key, n_scored);
    if (takes_all ? query->k >= n && !query->want_weights : candidates == 1)
        reranked_least = reranked_most = 0;
    if (query->first_cut != KV_CUT_NONE) { /* in the cut without copies, and behind it */
        reranked_least = 0;
        reranked_most = 2 * smaller(takes * n_groups, n);
    }
    if (found->n_reranked < reranked_least || found->n_reranked > reranked_most)
        return say("%u rows were reranked, not %u to %u", found->n_reranked, reranked_least,
                   reranked_most);
    if ((found->n_scored_by_code > 0) != (found->n_chapters > 0))
        return say("%u rows were scored by codes of %u codebooks", found->n_scored_by_code,
                   found->n_chapters);
    return NULL;
}

static const char *
held_fault(const struct question *question, uint32_t head, const struct kv_query_result *found)
{
    if (found->row_index == NULL)
        return NULL;
    for (uint32_t i = 0; i < found->n_ids; i++) {
        bool is_held = holds(question, head, found->ids[i], found);

        if (is_held != (found->row_index[i] == KV_ROW_CACHED))
            return say("token %u: %s", found->ids[i], is_held ? "held, and sent" : "not sent");
    }
    return NULL;
}

static const char *rows_fault(const struct question *question,
                              const struct truth *truth,
                              const struct kv_session *session,
                              uint64_t since,
                              uint32_t head,
                              const struct kv_query_result *found)
{
    const uint32_t layer = question->query.layer,
                   kv_head = question->query.kv_head_begin + head;
    const uint32_t unit = kv_schema_unit(&truth->schema, layer, kv_head);
    const size_t row_bytes = truth->schema.layers[layer].row_bytes;
    uint32_t n_rows = 0;

    for (uint32_t i = 0; i < found->n_ids; i++) {
        const uint32_t token = found->ids[i];
        const uint8_t *row;
        uint32_t content;

        if (question->query.answer != KV_ANSWER_ROWS || found->row_index[i] == KV_ROW_CACHED)
            continue;
        if (found->row_index[i] != n_rows++ || found->row_index[i] >= found->n_rows)
            return say("token %u is row %u of %u", token, found->row_index[i], found->n_rows);
        row = (const uint8_t *)found->rows + (size_t)found->row_index[i] * row_bytes;
        content = truth_row_content(row, row_bytes, layer, kv_head, token);
        if (content == 0 || !truth_row_allows(truth, unit, token, content, since))
            return say("layer %u, head %u, token %u: content %u was sent", layer, kv_head,
                       token, content);
        if (found->crcs[found->row_index[i]] !=
            kv_row_crc(session, row, row_bytes, layer, kv_head, token))
            return say("token %u: a wrong CRC", token);
    }
    return n_rows != found->n_rows ? say("%u rows, and %u are named", found->n_rows, n_rows)
                                   : NULL;
}

static const char *ids_fault(const struct kv_query *query, const struct kv_query_result *found)
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

/* Whether what was chosen hangs on no codes or copies.  A cut of all rows goes by copies, and does
 * not say which. */
static bool
goes_by_keys(const struct kv_query *query, uint32_t n, const struct kv_query_result *found)
{
    const bool is_scored = found->n_scored_by_code + found->n_scored_by_key > 0;

    if (query->first_cut == KV_CUT_NONE)
        return found->n_scored_by_code == 0;
    return !is_scored && (uint64_t)query->k * query->rerank >= n;
}

/* Whether the node's codes now are those that the query went by. */
static bool has_codes_of(const struct kv_query *query, const struct kv_query_result *found)
{
    return query->first_cut == KV_CUT_NONE ||
           found->n_scored_by_code + found->n_scored_by_key > 0;
}

const char *question_fault(const struct question *question,
                           const struct truth *truth,
                           struct kvs_node *const *nodes,
                           const struct kv_session *session,
                           uint64_t since,
                           const struct kv_op *op)
{
    const struct kv_query *query = &question->query;
    const char *why = NULL;

    for (uint32_t head = 0; why == NULL && head < question->n_heads; head++) {
        struct candidates candidates;
        struct kv_query_result found;

        if (kv_op_query_result(op, head, &found) != KV_OK)
            return "nothing was found";
        candidates_make(&candidates, question, truth, head, since, &found);
        why = ids_fault(query, &found);
        if (why == NULL)
            why = counts_fault(query, head, candidates.rows.n, &found);
        if (why == NULL)
            why = rows_fault(question, truth, session, since, head, &found);
        if (why == NULL)
            why = held_fault(question, head, &found);
        if (why == NULL && candidates.is_known && !question->may_be_damaged)
            why = choice_fault(
                question, head, &candidates,
                goes_by_keys(query, candidates.rows.n, &found) ||
                    (nodes != NULL && has_codes_of(query, &found) &&
                     candidates_code(&candidates, question, truth, nodes, head, &found)),
                &found);
        candidates_free(&candidates);
    }
    return why;
}

/* ---- index ------------------------------------------------------------------------------- */

bool question_index(struct kv_index_options *index,
                    const struct truth *truth,
                    struct kv_random *random)
{
    const uint32_t least = truth_least(truth);
    const uint32_t most = smaller(least + (one_in(random, 8) ? 10 : 0), truth->tokens_max);

    if (most == 0)
        return false;
    *index = (struct kv_index_options){
        .tokens = one_in(random, 3) ? 1 + (uint32_t)below(random, most) : most,
        .chapter_blocks =
            one_in(random, most < BLOCKS_MIN * KV_BLOCK_TOKENS ? 2 : 4) ? 0 : BLOCKS_MIN,
        .m = 1u << below(random, 3),
        .bits = 1 + (uint32_t)below(random, 4),
        .rotates = one_in(random, 2),
        .copies = one_in(random, 2),
        .iterations = 1 + (uint32_t)below(random, 3),
        .budget_us = one_in(random, 3) ? (uint32_t)below(random, 1000) : 0,
        .seed = below(random, 5),
        .wait = !one_in(random, 3),
        .summaries = one_in(random, 2) ? pick_rest(random) : 0,
        .summary_rows = pick_rest_rows(random),
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

static uint32_t layers_end(const struct kv_index_options *index, const struct truth *truth)
{
    return index->n_layers == 0 ? truth->schema.n_layers : index->layer_begin + index->n_layers;
}

bool question_index_is_sure(const struct kv_index_options *index, const struct truth *truth)
{
    for (uint32_t layer = index->layer_begin; layer < layers_end(index, truth); layer++)
        for (uint32_t head = 0; head < truth->schema.layers[layer].n_kv_heads; head++)
            if (truth_unit_least(truth, kv_schema_unit(&truth->schema, layer, head)) <
                index->tokens)
                return false;
    return true;
}

bool question_index_is_possible(const struct kv_index_options *index, const struct truth *truth)
{
    for (uint32_t layer = index->layer_begin; layer < layers_end(index, truth); layer++)
        if (!are_keys(&truth->schema.layers[layer]) ||
            (index->rotates && truth->schema.layers[layer].d_k > ROTATED_MAX))
            return false;
    return true;
}

/* Rows of a unit that have codes when nobody asked for others before. */
static uint32_t rows_coded(const struct kv_index_options *index)
{
    uint32_t n_blocks = index->tokens / KV_BLOCK_TOKENS, rest;

    if (index->chapter_blocks == 0)
        return index->tokens < 2u << index->bits ? 0 : index->tokens;
    rest = n_blocks % index->chapter_blocks;
    return (n_blocks - (rest < BLOCKS_MIN ? rest : 0)) * KV_BLOCK_TOKENS;
}

const char *question_index_fault(const struct kv_index_options *index,
                                 const struct truth *truth,
                                 bool is_first,
                                 const struct kv_index_result *indexed)
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
