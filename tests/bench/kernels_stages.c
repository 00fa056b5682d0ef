/* A layer's query as a storage node answers it, stage by stage, by the store's own pipeline
 * (query/pipeline.h): 8 KV heads of 4 query heads, d = 128, fp16.  1,024 rows of each head are
 * attended and verified, and all others are estimated by their summaries.
 *
 *   score       scores all eligible rows by code: all tokens except 4 sinks and the last 64
 *   candidates  merges the softmax weights of four query heads, finds the bound of the
 *               candidates
 *   expand      lists the candidates' rows
 *   cut         scores them by their copies of 4 bits, and keeps the scores for the estimate
 *   rerank      scores them exactly, and keeps the scores for the estimate
 *   select      selects the best by these scores
 *   attend      computes attention over the selected rows, and verifies them
 *   estimate    estimates all other rows, by 16 summaries per 1,024 rows, or per 3,072 (`group`)
 *   sum         all of these for one head;  layer: for all heads
 *
 * Forms without a first cut select by exact scores from 4 or 8 times as many candidates, which
 * are chosen by cells, in chapters of 128 blocks, or by rows, in chapters of 8 blocks (tiles).
 * Forms with one choose candidates by bytes (query/byte_scores.h), from codes of 4 x 6 bits of
 * rotated keys, and select by the scores of copies: 8 for each row (default), with half of the
 * rows (cheap), or 16 and smaller groups (best): the presets of gpu-worker/attention/options.c,
 * which must be changed with them.  Their score has parts, beside finding the codebooks of blocks:
 *
 *   tables      makes tables, rounds them, and sums the sample's rows
 *   scan        makes a byte of each row
 *   bound       finds the bound of the candidates, and lists them
 *
 * `bytes` are what the node counts that a head's query reads, in a stage or in all.  The limit of a
 * sum is what its stages take to read theirs from memory, in order or as isolated rows; the sum of
 * cells with 4 times as many candidates is beside each form with a first cut.
 *
 * Heads are queried in turn, with other vectors in each layer, so data is cold if a layer's
 * rows exceed the caches.  A key is one of some hundred centers plus noise as long as a center;
 * few centers have most of the rows.  Cells are therefore uneven: fewer than half of the 4,096
 * cells of a long chapter have rows.  Each query vector is near a center of its own.
 * Neighboring rows are independent, so selected rows are isolated as far as their number
 * allows.
 *
 * The best run of each record counts, so a sum may exceed the sum of its stages.  Not included:
 * the request's transport, ids in the result, and recall, which a node samples. */
#include "tests/bench/kernels.h"

#include "kernels/checksum.h"
#include "kernels/key_copies.h"
#include "kvserver/base/random.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/query/pipeline.h"
#include "kvserver/store/rows/verify.h"
#include "tests/support/lone_unit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADS = 8,
    QUERIES = 4, /* query heads of each */
    D = 128,
    ROW_BYTES = 4 * D,
    TOKENS_MAX = 128 << 10,
    SINKS = 4,
    WINDOW = 64,
    K = 1024,
    CANDIDATES_MAX = 16 * K,
    N_CENTERS = 300,
    NOISE = 1 << 16,
    LAYERS = 16, /* different questions */
    ITERATIONS = 4,
    LINE_BYTES = 64,
};

static const struct kv_layer_schema schema = {.kind = KV_LAYER_KV,
                                              .dtype = KV_FP16,
                                              .n_kv_heads = HEADS,
                                              .d_k = D,
                                              .d_v = D,
                                              .row_bytes = ROW_BYTES};

/* An index, and a query of it. */
struct form {
    const char *name;
    uint32_t chapter_blocks, summary_rows;
    uint32_t k, rerank;
    uint32_t candidates; /* of the first cut, for each row; 0: there is none */
};

static const struct form forms[] = {
    {"cells", 128, KV_SUMMARY_ROWS_LEAST, K, 4, 0}, /* `today` */
    {"cells", 128, KV_SUMMARY_ROWS_LEAST, K, 8, 0},
    {"cells", 128, KV_SUMMARY_ROWS_MAX, K, 4, 0},
    {"cells", 128, KV_SUMMARY_ROWS_MAX, K, 8, 0},
    {"tiles", 8, KV_SUMMARY_ROWS_LEAST, K, 4, 0},
    {"tiles", 8, KV_SUMMARY_ROWS_LEAST, K, 8, 0},
    {"default", 128, KV_SUMMARY_ROWS_MAX, K, 1, 8},
    {"cheap", 128, KV_SUMMARY_ROWS_MAX, K / 2, 1, 8},
    {"best", 128, KV_SUMMARY_ROWS_LEAST, K, 1, 16},
};

enum stage {
    STAGE_SCORE,
    STAGE_TABLES,
    STAGE_SCAN,
    STAGE_BOUND,
    STAGE_CANDIDATES,
    STAGE_EXPAND,
    STAGE_CUT,
    STAGE_RERANK,
    STAGE_SELECT,
    STAGE_ATTEND,
    STAGE_ESTIMATE,
    N_STAGES,
    SUM = N_STAGES,
    LAYER,
    N_RECORDS,
};
static const char *const names[N_RECORDS] = {
    "kernels.stages.score",  "kernels.stages.tables",     "kernels.stages.scan",
    "kernels.stages.bound",  "kernels.stages.candidates", "kernels.stages.expand",
    "kernels.stages.cut",    "kernels.stages.rerank",     "kernels.stages.select",
    "kernels.stages.attend", "kernels.stages.estimate",   "kernels.stages.sum",
    "kernels.stages.layer",
};

/* What a head's query reads, on average. */
struct reads {
    double books, codes, copies, keys, rows, summaries; /* bytes */
    double copy_lines;                                  /* different ones */
    double chapters, groups;
};

/* The store of a node. */
struct store {
    struct kvs_arena *arena;
    struct kvs_segment_store heap;
    struct kvs_codebooks codebooks;
    bool has_heap;
    struct kvs_indexer *indexer;
    struct kvs_unit units[HEADS];
};

struct stages {
    struct kernels *kernels;
    struct store today, other; /* of the first form, and of the current one if it is another */
    unsigned n_heads;          /* HEADS, but for a smoke run */
    uint32_t n_tokens;
    float *centers; /* (HEADS, N_CENTERS, D) */
    float *noise;   /* (NOISE + D) */
    float *queries; /* (LAYERS, HEADS, QUERIES, D) */

    struct kvs_query_pipeline *pipeline;
    struct kv_wire_range range;
    struct kv_wire_unit named[HEADS];
    struct kv_wire_query_result found[HEADS];
    float outputs[HEADS * QUERIES * D], lses[HEADS * QUERIES];

    const struct form *form; /* that is measured */
    unsigned record;
    struct reads reads;       /* of the form */
    struct reads counted;     /* sums of all that was read */
    double seconds[N_STAGES]; /* of a layer */
    const char *fault;        /* NULL: answers were as they should be */
};

static struct kv_pq_shape codes_of(const struct form *form)
{
    return (struct kv_pq_shape){D, form->candidates > 0 ? 4 : 2, 6};
}

/* Returns whether two forms have the same index. */
static bool are_alike(const struct form *form, const struct form *other)
{
    return form->chapter_blocks == other->chapter_blocks &&
           form->summary_rows == other->summary_rows &&
           (form->candidates > 0) == (other->candidates > 0);
}

static struct store *store_of(struct stages *stages, const struct form *form)
{
    return are_alike(form, &forms[0]) ? &stages->today : &stages->other;
}

/* ---- a layer's query --------------------------------------------------------------------- */

static struct kvs_unit *unit_at(void *arg, uint32_t i)
{
    struct store *store = arg;

    return &store->units[i];
}

/* A clock at which every piece of work is a slice. */
static uint64_t hurry(const struct kv_clock *clock)
{
    static uint64_t now_us;

    (void)clock;
    return now_us += KV_SLICE_US;
}

static const struct kv_clock hurried = {.name = "hurried", .now_us = hurry};

static enum stage stage_of(const struct kvs_query_pipeline *pipeline)
{
    static const enum stage stages[] = {
        [KVS_QUERY_UNIT] = STAGE_SCORE,
        [KVS_QUERY_SCORE] = STAGE_SCORE,
        [KVS_QUERY_SELECT_CANDIDATES] = STAGE_CANDIDATES,
        [KVS_QUERY_EXPAND] = STAGE_EXPAND,
        [KVS_QUERY_CUT] = STAGE_CUT,
        [KVS_QUERY_SELECT_CUT] = STAGE_SELECT,
        [KVS_QUERY_RERANK] = STAGE_RERANK,
        [KVS_QUERY_SELECT] = STAGE_SELECT,
        [KVS_QUERY_ATTEND] = STAGE_ATTEND,
        [KVS_QUERY_ESTIMATE] = STAGE_ESTIMATE,
    };
    static const enum stage parts[] = {
        [KVS_BYTES_TABLES] = STAGE_TABLES, [KVS_BYTES_ROUND] = STAGE_TABLES,
        [KVS_BYTES_SAMPLE] = STAGE_TABLES, [KVS_BYTES_SCAN] = STAGE_SCAN,
        [KVS_BYTES_BOUND] = STAGE_BOUND,   [KVS_BYTES_COLLECT] = STAGE_BOUND,
    };

    return pipeline->stage == KVS_QUERY_BYTES ? parts[pipeline->byte_scores->step]
                                              : stages[pipeline->stage];
}

/* Counts the lines that the copies of the unit's candidates are in: one for the codes of each, and
 * one for the scales of a group. */
static void count_lines(struct stages *stages, const struct kvs_query_entry *entry)
{
    uint32_t last = UINT32_MAX;

    for (uint32_t i = 0; i < entry->n_scored; i++) {
        const uint32_t group = entry->kept_tokens[i] / KV_KEY_COPIES_GROUP;

        stages->counted.copy_lines += 1 + (group != last);
        last = group;
    }
}

/* Goes through the query's pieces, and adds each one's time to its stage. */
static void time_stages(struct stages *stages, const struct kvs_query_entry *entry)
{
    struct kvs_query_pipeline *pipeline = stages->pipeline;
    double at = kernels_now();

    while (!kvs_query_pipeline_is_done(pipeline) && stages->fault == NULL) {
        const enum stage stage = stage_of(pipeline);

        do
            if (!kvs_query_pipeline_slice(pipeline, &hurried))
                stages->fault = "a row fails its checksum";
        while (stage_of(pipeline) == stage && !kvs_query_pipeline_is_done(pipeline) &&
               stages->fault == NULL);
        const double now = kernels_now();

        stages->seconds[stage] += now - at;
        if (stage == STAGE_CUT)
            count_lines(stages, entry);
        at = kernels_now();
    }
}

/* Returns how many seconds the query's pieces take in all. */
static double time_all(struct stages *stages)
{
    const double begin = kernels_now();

    while (!kvs_query_pipeline_is_done(stages->pipeline) && stages->fault == NULL)
        if (!kvs_query_pipeline_slice(stages->pipeline, &hurried))
            stages->fault = "a row fails its checksum";
    return kernels_now() - begin;
}

static struct kv_wire_query query_of(const struct form *form)
{
    return (struct kv_wire_query){
        .answer = KV_ANSWER_ATTEND,
        .merge = KV_MERGE_SUM,
        .n_queries = QUERIES,
        .k = form->k,
        .rerank = form->rerank,
        .scale = 0.08838835f,
        .n_ranges = 1,
        .summaries = 16,
        .summary_blocks = (uint16_t)(form->summary_rows / KV_BLOCK_TOKENS),
        .first_cut = form->candidates > 0 ? KV_CUT_INT4 : KV_CUT_NONE,
        .candidates = (uint16_t)form->candidates,
    };
}

static void check_answers(struct stages *stages, const struct form *form)
{
    const uint32_t n = kvs_ranges_count(&stages->range, 1);

    for (unsigned head = 0; head < stages->n_heads; head++) {
        const struct kv_wire_query_result *found = &stages->found[head];

        if (found->n_selected != form->k ||
            found->n_reranked != (form->candidates > 0 ? 0 : form->rerank * form->k))
            stages->fault = "candidates or selected rows: not as many as requested";
        else if (found->n_estimated != n - form->k)
            stages->fault = "rows estimated: not all that were not selected";
        else if (found->n_scored_by_code != n)
            stages->fault = "rows without codes";
    }
    for (unsigned q = 0; q < stages->n_heads * QUERIES; q++)
        if (!isfinite(stages->lses[q]))
            stages->fault = "a log-sum-exp that is not finite";
}

/* Returns the seconds of all stages, if `is_whole`, or else of each in `seconds`. */
static double answer(struct stages *stages, const struct form *form, size_t i, bool is_whole)
{
    static const struct kv_wire_cached_block none;
    struct store *store = store_of(stages, form);
    const struct kv_wire_query query = query_of(form);
    const struct kvs_query_input input = {
        .query = &query,
        .ranges = &stages->range,
        .n_units = stages->n_heads,
        .named = stages->named,
        .unit_at = unit_at,
        .arg = store,
        .queries = stages->queries + i % LAYERS * (HEADS * QUERIES * D),
        .cached = &none,
        .layers = &schema,
        .found = stages->found,
        .outputs = stages->outputs,
        .lses = stages->lses,
        .store = &store->heap,
        .codebooks = &store->codebooks,
        .indexer = store->indexer,
    };
    double seconds = 0;

    kvs_query_pipeline_begin(stages->pipeline);
    struct kvs_query_entry *entry = kvs_query_pipeline_add(stages->pipeline, &input);

    if (entry == NULL) {
        stages->fault = "the pipeline has no room for the query";
        return 0;
    }
    if (is_whole)
        seconds = time_all(stages);
    else
        time_stages(stages, entry);
    if (stages->fault == NULL)
        check_answers(stages, form);
    stages->counted.books += (double)entry->reads.books;
    stages->counted.codes += (double)entry->reads.codes;
    stages->counted.copies += (double)entry->reads.copies;
    stages->counted.keys += (double)entry->reads.keys;
    stages->counted.rows += (double)entry->reads.rows;
    stages->counted.summaries += (double)entry->reads.summaries;
    return seconds;
}

static double measured(void *arg, size_t i)
{
    struct stages *stages = arg;
    const double *seconds = stages->seconds;

    memset(stages->seconds, 0, sizeof(stages->seconds));
    const double all = answer(stages, stages->form, i, stages->record >= SUM);
    if (stages->record == LAYER)
        return all;
    return (stages->record == SUM           ? all
            : stages->record == STAGE_SCORE ? seconds[STAGE_SCORE] + seconds[STAGE_TABLES] +
                                                  seconds[STAGE_SCAN] + seconds[STAGE_BOUND]
                                            : seconds[stages->record]) /
           stages->n_heads;
}

/* The first form's query, instead. */
static double measured_today(void *arg, size_t i)
{
    struct stages *stages = arg;
    const double all = answer(stages, &forms[0], i, true);

    return stages->record == LAYER ? all : all / stages->n_heads;
}

/* ---- data -------------------------------------------------------------------------------- */

/* Of a number that is neither too large for fp16 nor no number; the nearest, halves away from
 * zero; tiny ones are 0. */
static uint16_t half_of(float value)
{
    const uint32_t bias = 112u << 23; /* between the exponents' */
    uint32_t bits, magnitude;

    memcpy(&bits, &value, sizeof(bits));
    magnitude = (bits & 0x7fffffff) + 0x1000;
    return (uint16_t)((bits >> 16 & 0x8000) |
                      (magnitude < bias + (1u << 23) ? 0 : (magnitude - bias) >> 13));
}

static const float *centre_at(const struct stages *stages, unsigned head, uint32_t center)
{
    return stages->centers + ((size_t)head * N_CENTERS + center) * D;
}

static void fill_rows(const struct stages *stages, struct kvs_unit *unit, unsigned head)
{
    const struct kernels *kernels = stages->kernels;
    struct kv_random random;

    kv_random_init(&random, head + 1);
    for (uint32_t token = 0; token < stages->n_tokens; token++) {
        uint8_t *row = kvs_unit_row(unit, token);
        const double place = (double)kv_random_below(&random, NOISE) / NOISE;
        const float *center = centre_at(stages, head, (uint32_t)(place * place * N_CENTERS));
        const float *noise = stages->noise + kv_random_below(&random, NOISE);
        const size_t at = ((size_t)head * stages->n_tokens + token) * (ROW_BYTES / 2);
        uint16_t key[D];

        for (uint32_t i = 0; i < D; i++)
            key[i] = half_of(center[i] + noise[i]);
        memcpy(row, key, sizeof(key));
        memcpy(row + sizeof(key), kernels->from + at % kernels->bytes, ROW_BYTES / 2);
    }
}

/* As whoever wrote them would have. */
static void seal_rows(struct kvs_unit *unit, uint32_t n_tokens)
{
    const struct kvs_row_set rows = kvs_unit_rows(unit);

    for (uint32_t token = 0; token < n_tokens; token++) {
        uint32_t seed;

        kvs_verify_seeds(&rows, &token, 1, &seed);
        *kvs_unit_crc(unit, token) = kv_crc32c(seed, kvs_unit_row(unit, token), ROW_BYTES);
    }
}

static void fill_queries(const struct stages *stages)
{
    struct kv_random random;

    kv_random_init(&random, 23);
    for (size_t i = 0; i < (size_t)LAYERS * HEADS * QUERIES; i++) {
        const unsigned head = i / QUERIES % HEADS;
        const float *center =
            centre_at(stages, head, (uint32_t)kv_random_below(&random, N_CENTERS));
        const float *noise = stages->noise + kv_random_below(&random, NOISE);

        for (uint32_t j = 0; j < D; j++)
            stages->queries[i * D + j] = 0.5f * center[j] + 0.5f * noise[j];
    }
}

static void close_store(const struct stages *stages, struct store *store)
{
    if (store->has_heap) {
        for (unsigned head = 0; head < stages->n_heads; head++)
            if (store->units[head].row_bytes > 0)
                lone_unit_clear(&store->units[head]);
        kvs_indexer_destroy(store->indexer);
        kvs_codebooks_fini(&store->codebooks);
    }
    if (store->arena != NULL)
        kvs_arena_destroy(store->arena);
    memset(store, 0, sizeof(*store));
}

/* One thread's units, indexed.  false: no memory, said; close_store() all the same. */
static bool
open_store(const struct stages *stages, struct store *store, const struct form *form)
{
    const uint64_t rows_bytes = (uint64_t)stages->n_tokens * ROW_BYTES * stages->n_heads;
    const struct kvs_index_plan plan = {
        .chapter_blocks = form->chapter_blocks,
        .shape = codes_of(form),
        .rotates = form->candidates > 0,
        .copies = form->candidates > 0,
        .type = KV_KEY_FP16,
        .d_v = D,
        .summaries_bits = KV_SUMMARY_16,
        .summaries_rows = form->summary_rows,
        .iterations = ITERATIONS,
        .seed = 1,
    };
    bool is_good;

    store->arena = kvs_arena_create(2 * rows_bytes + (64 << 20));
    store->has_heap = store->arena != NULL &&
                      kvs_segment_store_init(&store->heap, store->arena) &&
                      kvs_codebooks_init(&store->codebooks, &store->heap);
    if (store->has_heap)
        store->indexer = kvs_indexer_create(&store->codebooks, &kv_clock_real, 1);
    is_good = store->indexer != NULL;
    for (unsigned head = 0; is_good && head < stages->n_heads; head++) {
        struct kvs_unit *unit = &store->units[head];

        is_good = lone_unit_init(unit, &store->heap, 0, head, ROW_BYTES) == KV_OK &&
                  kvs_unit_reserve(unit, stages->n_tokens) == KV_OK;
        if (!is_good)
            break;
        fill_rows(stages, unit, head);
        seal_rows(unit, stages->n_tokens);
        unit->committed = stages->n_tokens;
        is_good = kvs_index_schedule(store->indexer, unit, unit->committed, &plan) == KV_OK;
        while (kvs_indexer_step(store->indexer))
            ;
    }
    if (!is_good)
        bench_complain("units: %u tokens of %u heads: refused", stages->n_tokens,
                       stages->n_heads);
    return is_good;
}

/* ---- records ----------------------------------------------------------------------------- */

/* Groups of summaries of so many rows. */
static uint32_t n_groups_of(const struct form *form, uint32_t n_rows)
{
    return (n_rows + form->summary_rows - 1) / form->summary_rows;
}

/* Counts what a head's query reads. */
static void count_reads(struct stages *stages)
{
    const uint32_t chapter = stages->form->chapter_blocks * KV_BLOCK_TOKENS;
    const double n = (double)LAYERS * stages->n_heads;
    const struct reads *counted = &stages->counted;

    memset(&stages->counted, 0, sizeof(stages->counted));
    for (size_t i = 0; i < LAYERS; i++)
        answer(stages, stages->form, i, false);
    stages->reads = (struct reads){
        .books = counted->books / n,
        .codes = counted->codes / n,
        .copies = counted->copies / n,
        .keys = counted->keys / n,
        .rows = counted->rows / n,
        .summaries = counted->summaries / n,
        .copy_lines = counted->copy_lines / n,
        .chapters = (stages->n_tokens + chapter - 1) / chapter,
        .groups = stages->n_tokens / chapter * n_groups_of(stages->form, chapter) +
                  n_groups_of(stages->form, stages->n_tokens % chapter),
    };
}

/* Returns the bytes that a stage of a head's query reads, or all stages. */
static double bytes_of(const struct reads *reads, unsigned record)
{
    switch (record) {
    case STAGE_SCORE:
        return reads->books + reads->codes;
    case STAGE_CUT:
        return reads->copies;
    case STAGE_RERANK:
        return reads->keys;
    case STAGE_ATTEND:
        return reads->rows;
    case STAGE_ESTIMATE:
        return reads->summaries;
    case SUM:
        return reads->books + reads->codes + reads->copies + reads->keys + reads->rows +
               reads->summaries;
    default:
        return 0;
    }
}

/* What stages do without that the memory of a sum's stages takes: multiplications. */
static double fmas_of(const struct stages *stages, unsigned record)
{
    const struct reads *reads = &stages->reads;
    const struct kv_pq_shape codes = codes_of(stages->form);
    const struct kv_summary_shape summaries = {KV_KEY_FP16, D, D, KV_SUMMARY_16,
                                               stages->form->summary_rows};
    const double pair = 2.0 * QUERIES;

    switch (record) {
    case STAGE_SCORE:
        return reads->chapters * pair * (double)kv_pq_centroids_size(&codes) +
               (stages->form->candidates > 0 ? pair * D * D : 0);
    case STAGE_RERANK:
        return reads->keys / (2 * D) * pair * D;
    case STAGE_ATTEND:
        return reads->rows / ROW_BYTES * pair * 2 * D;
    case STAGE_ESTIMATE:
        return reads->groups * (double)kv_summary_count(&summaries) * pair * 2 * D;
    default:
        return 0;
    }
}

/* Returns what a stage reads from memory.  amount 0: nothing. */
static struct kernels_need memory_of(const struct stages *stages, unsigned record)
{
    const double bytes = bytes_of(&stages->reads, record);

    switch (record) {
    case STAGE_CUT:
        return (struct kernels_need){KERNELS_ROWS, stages->reads.copy_lines * LINE_BYTES,
                                     LINE_BYTES, LINE_BYTES};
    case STAGE_RERANK:
        return (struct kernels_need){KERNELS_ROWS, bytes, ROW_BYTES, ROW_BYTES / 2};
    case STAGE_ATTEND:
        return (struct kernels_need){KERNELS_ROWS, bytes, ROW_BYTES, ROW_BYTES};
    default:
        return (struct kernels_need){KERNELS_READ, bytes, 0, 0};
    }
}

/* Seconds that all stages take to read what they read. */
static double read_all(void *arg, size_t i)
{
    const struct stages *stages = arg;
    double seconds = 0;

    (void)i;
    for (unsigned stage = 0; stage < N_STAGES; stage++) {
        const struct kernels_need need = memory_of(stages, stage);

        if (need.amount > 0)
            seconds += need.amount / kernels_limit_rate(stages->kernels, &need);
    }
    return stages->record == LAYER ? seconds * stages->n_heads : seconds;
}

/* Returns whether the current form has such a record. */
static bool has_record(const struct form *form, unsigned record)
{
    switch (record) {
    case STAGE_TABLES:
    case STAGE_SCAN:
    case STAGE_BOUND:
    case STAGE_CUT:
        return form->candidates > 0;
    case STAGE_CANDIDATES:
    case STAGE_EXPAND:
        return form->candidates == 0;
    case STAGE_RERANK:
        return form->rerank > 1;
    default:
        return true;
    }
}

static bool measure_record(struct stages *stages, unsigned record)
{
    const struct form *form = stages->form;
    const struct kernels_need memory = memory_of(stages, record);
    const double bytes = bytes_of(&stages->reads, record == LAYER ? (unsigned)SUM : record);
    const double fmas = fmas_of(stages, record);
    struct kernels_case one = {
        .name = names[record],
        .unit = "us",
        .params = {.shape = "8b",
                   .bytes = (size_t)(record == LAYER ? bytes * stages->n_heads : bytes),
                   .rows = (form->candidates > 0 ? form->candidates : form->rerank) * form->k,
                   .data = "cold",
                   .queries = QUERIES,
                   .n = stages->n_tokens,
                   .k = form->k,
                   .form = form->name,
                   .chapter = form->chapter_blocks * KV_BLOCK_TOKENS,
                   .group =
                       form->summary_rows == KV_SUMMARY_ROWS_LEAST ? 0 : form->summary_rows},
        .part = measured,
        .arg = stages,
    };

    stages->record = record;
    if (record < SUM && memory.amount > 0)
        one.needs[one.n_needs++] = memory;
    if (record < SUM && fmas > 0)
        one.needs[one.n_needs++] = (struct kernels_need){KERNELS_FMA, fmas, 0, 0};
    if (record >= SUM)
        one.others[one.n_others++] = (struct kernels_other){"memory of its stages", read_all};
    if (record >= SUM && form->candidates > 0)
        one.others[one.n_others++] =
            (struct kernels_other){"cells, 4 candidates", measured_today};
    return kernels_measure(stages->kernels, &one);
}

static bool measure(struct stages *stages, const struct form *form)
{
    bool is_good = true;

    stages->form = form;
    count_reads(stages);
    for (unsigned record = 0; is_good && record < N_RECORDS && stages->fault == NULL; record++)
        is_good = !has_record(form, record) || measure_record(stages, record);
    if (is_good && stages->fault != NULL) {
        bench_complain("kernels.stages: %s: %s", form->name, stages->fault);
        is_good = false;
    }
    return is_good;
}

static bool measure_all(struct stages *stages)
{
    bool is_good = true;

    kernels_fill_normal(stages->centers, HEADS * N_CENTERS * D, 21);
    kernels_fill_normal(stages->noise, NOISE + D, 22);
    fill_queries(stages);
    for (unsigned i = 0; is_good && i < sizeof(forms) / sizeof(forms[0]); i++) {
        if (i == 0 || !are_alike(&forms[i], &forms[i - 1])) {
            close_store(stages, &stages->other);
            is_good = open_store(stages, store_of(stages, &forms[i]), &forms[i]);
        }
        is_good = is_good && measure(stages, &forms[i]);
    }
    close_store(stages, &stages->other);
    close_store(stages, &stages->today);
    return is_good;
}

bool kernels_stages(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);
    struct stages *stages;
    size_t n_tokens;
    bool is_good = false;

    (void)load;
    if (kernels == NULL)
        return false;
    stages = kernels_alloc(1, sizeof(*stages));
    if (stages == NULL)
        return false;
    /* As many tokens as the requested memory holds, and at least enough to select from. */
    n_tokens = kernels->bytes / (HEADS * ROW_BYTES);
    n_tokens = n_tokens < 2 * CANDIDATES_MAX ? 2 * CANDIDATES_MAX : n_tokens;
    n_tokens = n_tokens > TOKENS_MAX ? TOKENS_MAX
                                     : n_tokens / KV_SUMMARY_ROWS_LEAST * KV_SUMMARY_ROWS_LEAST;
    stages->kernels = kernels;
    stages->n_heads = bench->smoke ? 2 : HEADS;
    stages->n_tokens = (uint32_t)n_tokens;
    stages->range = (struct kv_wire_range){SINKS, stages->n_tokens - WINDOW};
    for (uint32_t head = 0; head < HEADS; head++)
        stages->named[head].kv_head = (uint16_t)head;
    stages->centers = kernels_alloc(HEADS * N_CENTERS * D, sizeof(float));
    stages->noise = kernels_alloc(NOISE + D, sizeof(float));
    stages->queries = kernels_alloc(LAYERS * HEADS * QUERIES * D, sizeof(float));
    stages->pipeline =
        kvs_query_pipeline_create(KVS_QUERY_PIPELINE_FLOATS, KVS_QUERY_PIPELINE_FLOATS);
    if (stages->pipeline == NULL)
        bench_complain("memory: a query pipeline: refused");
    if (stages->centers != NULL && stages->noise != NULL && stages->queries != NULL &&
        stages->pipeline != NULL)
        is_good = measure_all(stages);
    kvs_query_pipeline_destroy(stages->pipeline);
    free(stages->centers);
    free(stages->noise);
    free(stages->queries);
    free(stages);
    return is_good;
}
