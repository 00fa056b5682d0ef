#include "kvserver/store/ops/recall.h"

#include "kvserver/base/memory.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/rows/residency.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    CANDIDATES_MAX = 1 << 18, /* eligible rows of a query that is sampled; and */
    FLOATS = 8 << 20,         /* what it may need, mostly KVS_SCORE_SPARE and one for each of
                               * its vectors for each of these rows */
    DROP_PAGES = 2,           /* given back at a time */
};

/* The weight of one sample in the moving average. */
static const float NEW_SHARE = 0.125f;

struct kvs_recall {
    struct kvs_shard *shard;
    bool busy;
    uint32_t session, serial, generation;
    uint32_t layer, kv_head;
    struct kvs_score score;
    struct kvs_selection selection;
    uint32_t k[KV_QUERIES_MAX]; /* of the selection's groups */
    bool choosing;              /* all rows are scored */
    struct kvs_selector selector;
    struct kvs_score_run runs[KV_RANGES_MAX];
    struct kv_wire_range ranges[KV_RANGES_MAX];
    float *queries;    /* (KV_QUERIES_MAX, KVS_CODEBOOK_DIM_MAX) */
    uint32_t *tokens;  /* (n_tokens) in `floats`, after what is for scores */
    uint32_t n_tokens; /* the rows that the query selected */
    float *floats;     /* FLOATS; used while pages are lent for them */
    struct kvs_lent_pages lent;
};

uint64_t kvs_recall_bytes(void)
{
    return sizeof(struct kvs_recall) +
           (size_t)KV_QUERIES_MAX * KVS_CODEBOOK_DIM_MAX * sizeof(float);
}

struct kvs_recall *kvs_recall_create(struct kvs_shard *shard)
{
    struct kvs_recall *recall = calloc(1, sizeof(*recall));

    if (recall == NULL)
        return NULL;
    recall->shard = shard;
    recall->lent.first = KVS_PAGE_NONE;
    recall->queries = calloc((size_t)KV_QUERIES_MAX * KVS_CODEBOOK_DIM_MAX, sizeof(float));
    recall->floats = kv_memory_reserve(FLOATS * sizeof(float));
    if (recall->queries == NULL || recall->floats == NULL) {
        kvs_recall_destroy(recall);
        return NULL;
    }
    return recall;
}

void kvs_recall_destroy(struct kvs_recall *recall)
{
    if (recall == NULL)
        return;
    kvs_pages_take_back(recall->shard->pages, &recall->lent, 0);
    kv_memory_release(recall->floats, FLOATS * sizeof(float));
    free(recall->queries);
    free(recall);
}

bool kvs_recall_drop_room(struct kvs_recall *recall)
{
    const uint32_t n = recall->lent.n, n_left = n > DROP_PAGES ? n - DROP_PAGES : 0;

    if (n == 0)
        return false;
    recall->busy = false;
    kv_memory_drop((char *)recall->floats + n_left * (size_t)KVS_ARENA_PAGE,
                   (n - n_left) * (size_t)KVS_ARENA_PAGE);
    kvs_pages_take_back(recall->shard->pages, &recall->lent, n_left);
    return true;
}

/* Gets memory for a sample, or a piece of it for the next one, and keeps it: a fresh page takes
 * longer than a small sample.  Returns false if it has too little. */
static bool get_room(struct kvs_recall *recall, size_t n_floats)
{
    struct kvs_pages *pages = recall->shard->pages;

    return !kvs_pages_are_short(pages) &&
           kvs_pages_lend(pages, &recall->lent, n_floats * sizeof(float)) &&
           kvs_lent_bytes(&recall->lent) >= n_floats * sizeof(float);
}

void kvs_recall_note(struct kvs_recall *recall,
                     const struct kvs_shard_session *session,
                     const struct kvs_score *score,
                     const struct kvs_selection *selection,
                     const uint32_t *tokens,
                     uint32_t n_tokens)
{
    const size_t n_floats =
        n_tokens + (size_t)score->n * (score->n_queries + KVS_SCORE_SPARE) + KV_TOPK_SPARE;
    struct kvs_unit *unit = score->unit;

    /* A sample stays due until one has been taken. */
    if (++unit->n_queries < KVS_RECALL_EVERY || recall->busy || n_tokens == 0 ||
        n_floats > FLOATS || score->n > CANDIDATES_MAX || !get_room(recall, n_floats))
        return;
    unit->n_queries = 0;
    recall->busy = true;
    recall->session = session->index;
    recall->serial = session->serial;
    recall->generation = session->generation;
    recall->layer = unit->layer;
    recall->kv_head = unit->kv_head;
    recall->selection = *selection;
    recall->score = *score;
    memcpy(recall->ranges, score->ranges, score->n_ranges * sizeof(*score->ranges));
    memcpy(recall->queries, score->queries,
           (size_t)score->n_queries * score->d * sizeof(*score->queries));
    recall->tokens = (uint32_t *)(void *)(recall->floats + n_floats - n_tokens);
    memcpy(recall->tokens, tokens, n_tokens * sizeof(*tokens));
    recall->n_tokens = n_tokens;
    recall->score.ranges = recall->ranges;
    recall->score.queries = recall->queries;
    recall->score.room = recall->floats;
    recall->score.room_floats = n_floats - n_tokens;
    recall->score.runs = recall->runs;
    recall->score.by_code = recall->score.by_cell = false;
    recall->choosing = false;
    if (selection->per_query != NULL) {
        memcpy(recall->k, selection->per_query,
               kvs_selection_groups(selection) * sizeof(*recall->k));
        recall->selection.per_query = recall->k;
    }
    kvs_score_begin(&recall->score, &recall->shard->codebooks);
}

/* Counts the tokens that are in both lists, which ascend. */
static uint32_t n_common(const struct kvs_recall *recall, const uint32_t *indices, uint32_t n)
{
    struct kvs_range_walk walk = {.ranges = recall->ranges};
    uint32_t common = 0, at = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t token = kvs_range_walk_to(&walk, indices[i]);

        while (at < recall->n_tokens && recall->tokens[at] < token)
            at++;
        common += at < recall->n_tokens && recall->tokens[at] == token;
    }
    return common;
}

/* Scores some rows, or selects among some.  Returns true when all are selected. */
static bool select_piece(struct kvs_recall *recall)
{
    struct kvs_score *score = &recall->score;

    if (recall->choosing)
        return kvs_select_piece(&recall->selector);
    recall->choosing = kvs_score_piece(score, &recall->shard->codebooks);
    if (recall->choosing)
        kvs_select_begin(&recall->selector, &recall->selection, score->scores, score->maxima,
                         NULL, NULL, score->n, false, kvs_score_spare(score));
    return false;
}

/* Returns whether all eligible rows are still in memory.  A sample may take long, while index jobs
 * go first: it is not at work. */
static bool are_here(const struct kvs_recall *recall)
{
    const struct kvs_score *score = &recall->score;

    if (recall->shard->store.n_away == 0)
        return true;
    for (uint32_t i = 0; i < score->n_ranges; i++)
        for (uint32_t at = score->ranges[i].begin / KV_BLOCK_TOKENS;
             at < kvs_blocks_for(score->ranges[i].end); at++)
            if (!kvs_unit_is_here(score->unit, at))
                return false;
    return true;
}

bool kvs_recall_step(struct kvs_recall *recall)
{
    const struct kvs_shard_session *session = &recall->shard->sessions[recall->session];
    struct kvs_score *score = &recall->score;

    if (!recall->busy)
        return false;
    if (!session->used || session->serial != recall->serial ||
        session->generation != recall->generation) {
        /* The sample's rows may be gone: another query will be sampled. */
        recall->busy = false;
        return true;
    }
    /* The session's units may have moved in memory. */
    score->unit = kvs_shard_session_unit(session, recall->layer, recall->kv_head);
    if (!are_here(recall)) {
        recall->busy = false;
        return true;
    }
    struct kv_slice slice = kv_slice_begin(recall->shard->clock, 1);
    while (!select_piece(recall))
        if (kv_slice_over(&slice))
            return true;

    uint32_t *indices = (uint32_t *)(void *)(kvs_score_spare(score) +
                                             (size_t)score->n_items * KVS_SELECT_CAPACITY);
    uint32_t n = kvs_select_rows(&recall->selector, indices, NULL);
    float share = n > 0 ? (float)n_common(recall, indices, n) / (float)n : 1;
    /* A moving average, so that one odd query does not decide; the first sample begins it. */
    struct kvs_unit *unit = score->unit;
    unit->recall =
        isnan(unit->recall) ? share : unit->recall + NEW_SHARE * (share - unit->recall);
    kvs_count(&recall->shard->stats.recall_samples, 1);
    recall->busy = false;
    return true;
}
