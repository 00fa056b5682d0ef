/* Candidates by bytes, against one row after the other. */
#include "kvserver/store/query/byte_scores.h"

#include "kernels/select.h"
#include "kvserver/store/index/scorer.h"
#include "tests/support/units.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    D = 24,
    ROWS_MAX = 12800,
    QUERIES_MAX = 5,
    ARENA_BYTES = 64 << 20,
    ROUNDS = 120,
    SAMPLE_EVERY = 8,
    SAMPLE_LEAST = 64,
};

static struct bench bench;
static float queries[QUERIES_MAX * D], room[(QUERIES_MAX + KVS_SCORE_SPARE) * ROWS_MAX];
static struct kvs_score_run runs[KVS_SCORE_RUNS_MAX];
static float rotated[KV_QUERIES_MAX * KV_ROTATION_DIM_MAX];
static float tables[QUERIES_MAX * KVS_SCORE_TABLE];
static struct kvs_byte_scores scores;

static void
train(const struct kvs_unit *unit, uint32_t tokens, uint32_t blocks, uint32_t m, bool rotates)
{
    const struct kvs_index_plan plan = {
        .chapter_blocks = blocks,
        .shape = {.d = D, .m = m, .bits = m > 2 ? 4 : 6},
        .rotates = rotates,
        .type = KV_KEY_FP32,
        .iterations = 2,
    };

    assert_int_equal(kvs_index_schedule(bench.indexer, unit, tokens, &plan), KV_OK);
    while (kvs_indexer_step(bench.indexer))
        ;
}

static struct kvs_score score_of(struct kvs_unit *unit,
                                 const struct kv_wire_range *ranges,
                                 uint32_t n_ranges,
                                 uint32_t n)
{
    return (struct kvs_score){
        .unit = unit,
        .type = KV_KEY_FP32,
        .d = D,
        .ranges = ranges,
        .n_ranges = n_ranges,
        .n_queries = n,
        .queries = queries,
        .by_code = true,
        .n = kvs_ranges_count(ranges, n_ranges),
        .room = room,
        .room_floats = sizeof(room) / sizeof(room[0]),
        .runs = runs,
        .tables = tables,
        .rotated = rotated,
    };
}

/* The codebook of a token's block if any of its rows has codes, else NULL. */
static const struct kvs_codebook *book_of(const struct kvs_unit *unit, uint32_t token)
{
    const struct kvs_codes *codes = kvs_unit_codes(unit, token / KV_BLOCK_TOKENS);

    return codes->n_coded > 0 ? kvs_codebook_at(&bench.codebooks, codes->codebook) : NULL;
}

static bool all_coded(const struct kvs_unit *unit, uint32_t block, uint32_t n_rows)
{
    return kvs_unit_codes(unit, block)->n_coded >= n_rows;
}

static void table_of(const struct kvs_codebook *book, const float *query, float *ret_table)
{
    float own[D];

    kv_pq_tables(&book->shape, kvs_codebook_centroids(book), kvs_pq_rotate(book, query, 1, own),
                 1, ret_table);
}

/* What a row has for a vector before the offset. */
static int sum_of(const struct kvs_unit *unit,
                  uint32_t token,
                  bool by_code,
                  const float *query,
                  float base,
                  float inv_step)
{
    const struct kvs_codebook *book = book_of(unit, token);
    static float table[KVS_SCORE_TABLE];
    static uint8_t rounded[KV_PQ_SUBSPACES_MAX << 8];
    int sum = 0;

    if (!by_code) {
        float score, steps;

        kv_exact_scores_score(KV_KEY_FP32, kvs_unit_row(unit, token), unit->row_bytes, 1, D,
                              query, 1, &score, 1);
        steps = (score - base) * inv_step;
        return steps >= 255 ? 255 : steps > 0 ? (int)(steps + 0.5f) : 0;
    }
    table_of(book, query, table);
    kv_pq_table_round8_to(&book->shape, table, base, inv_step, rounded);
    for (uint32_t j = 0; j < book->shape.m; j++) {
        uint8_t own[KV_PQ_SUBSPACES_MAX];

        kv_tile_get(&book->shape, kvs_unit_codes(unit, token / KV_BLOCK_TOKENS)->column.bytes,
                    token % KV_BLOCK_TOKENS, 1, own, 1);
        sum += rounded[(j << kv_tile_width(&book->shape)) + own[j]];
    }
    return sum < 255 ? sum : 255;
}

struct wanted {
    uint32_t n;
    uint32_t tokens[ROWS_MAX];
    uint8_t bytes[ROWS_MAX];
    bool taken[ROWS_MAX];
};
static struct wanted wanted;

/* Finds what should be taken: byte_scores.h, row by row. */
static void find(const struct kvs_score *score, uint32_t n_wanted)
{
    const struct kvs_unit *unit = score->unit;
    float bases[QUERIES_MAX], tops[QUERIES_MAX], widest = 0, inv_step;
    int offsets[QUERIES_MAX], bounds[QUERIES_MAX], least_bound = 255;
    uint32_t m = 0;
    static uint32_t blocks[ROWS_MAX / KV_BLOCK_TOKENS];
    static float table[KVS_SCORE_TABLE];
    uint32_t n_blocks = 0;

    wanted.n = 0;
    for (uint32_t r = 0; r < score->n_ranges; r++) {
        for (uint32_t token = score->ranges[r].begin; token < score->ranges[r].end; token++)
            wanted.tokens[wanted.n++] = token;
        for (uint32_t block = kvs_blocks_for(score->ranges[r].begin);
             block < score->ranges[r].end / KV_BLOCK_TOKENS; block++)
            if (book_of(unit, block * KV_BLOCK_TOKENS) != NULL)
                blocks[n_blocks++] = block;
    }
    for (uint32_t q = 0; q < score->n_queries; q++) {
        bases[q] = INFINITY;
        tops[q] = -INFINITY;
        for (uint32_t i = 0; i < wanted.n; i++) {
            const struct kvs_codebook *book = book_of(unit, wanted.tokens[i]);
            float least, most;

            if (book == NULL || (i > 0 && book == book_of(unit, wanted.tokens[i - 1])))
                continue;
            m = book->shape.m > m ? book->shape.m : m;
            table_of(book, queries + q * D, table);
            kv_pq_table_range(&book->shape, table, &least, &most);
            bases[q] = least < bases[q] ? least : bases[q];
            tops[q] = most > tops[q] ? most : tops[q];
        }
        widest = tops[q] - bases[q] > widest ? tops[q] - bases[q] : widest;
    }
    inv_step = (float)(255 - (int)m) / widest;
    for (uint32_t q = 0; q < score->n_queries; q++) {
        const uint32_t every = n_blocks >= SAMPLE_LEAST ? SAMPLE_EVERY : 1;
        uint64_t n_of[256] = {0}, n_sampled = 0, n_from = 0;
        int value = 256;

        for (uint32_t i = 0; i < n_blocks; i++) {
            if (blocks[i] % every != 0 || !all_coded(unit, blocks[i], KV_BLOCK_TOKENS))
                continue;
            for (uint32_t row = 0; row < KV_BLOCK_TOKENS; row++, n_sampled++)
                n_of[sum_of(unit, blocks[i] * KV_BLOCK_TOKENS + row, true, queries + q * D,
                            bases[q], inv_step)]++;
        }
        const uint64_t share = (n_wanted * n_sampled + wanted.n - 1) / wanted.n;
        while (value > 0 && n_from < share)
            n_from += n_of[--value];
        bounds[q] = n_sampled > 0 ? value : 0;
        least_bound = bounds[q] < least_bound ? bounds[q] : least_bound;
    }
    for (uint32_t q = 0; q < score->n_queries; q++)
        offsets[q] = least_bound - bounds[q];
    for (uint32_t i = 0; i < wanted.n; i++) {
        const uint32_t token = wanted.tokens[i], block = token / KV_BLOCK_TOKENS;
        uint32_t end = (block + 1) * KV_BLOCK_TOKENS;
        int most = 0;

        /* Of a block, all eligible rows of the range have codes, or none counts as coded. */
        for (uint32_t r = 0; r < score->n_ranges; r++)
            if (token >= score->ranges[r].begin && token < score->ranges[r].end &&
                score->ranges[r].end < end)
                end = score->ranges[r].end;
        const bool by_code = all_coded(unit, block, end - block * KV_BLOCK_TOKENS);
        for (uint32_t q = 0; q < score->n_queries; q++) {
            const int byte =
                sum_of(unit, token, by_code, queries + q * D, bases[q], inv_step) + offsets[q];

            most = byte > most ? byte : most;
        }
        wanted.bytes[i] = (uint8_t)(most < 255 ? most : 255);
        wanted.taken[i] = false;
    }
    for (uint32_t n = 0; n < n_wanted; n++) {
        uint32_t best = UINT32_MAX;

        for (uint32_t i = 0; i < wanted.n; i++)
            if (!wanted.taken[i] &&
                (best == UINT32_MAX || wanted.bytes[i] > wanted.bytes[best]))
                best = i;
        wanted.taken[best] = true;
    }
}

/* Returns whether the unit's rows can be chosen by bytes; checks what is chosen then. */
static bool check(struct kvs_unit *unit,
                  const struct kv_wire_range *ranges,
                  uint32_t n_ranges,
                  uint32_t n_queries,
                  uint32_t n_wanted)
{
    struct kvs_score score = score_of(unit, ranges, n_ranges, n_queries);
    static uint32_t tokens[ROWS_MAX + KV_TOPK_SPARE];
    uint32_t n = 0, n_pieces = 0;

    if (!kvs_byte_scores_begin(&scores, &score, &bench.codebooks, n_wanted, tokens))
        return false;
    while (!kvs_byte_scores_piece(&scores, &bench.codebooks))
        assert_true(++n_pieces < 4 * ROWS_MAX);
    find(&score, n_wanted);
    assert_int_equal(scores.n, n_wanted);
    assert_int_equal(score.n_coded + score.n_exact, score.n);
    assert_int_equal(score.n_chapters > 0, score.n_coded > 0);
    for (uint32_t i = 0; i < wanted.n; i++)
        if (wanted.taken[i])
            assert_int_equal(tokens[n++], wanted.tokens[i]);
    assert_int_equal(n, n_wanted);
    return true;
}

static uint32_t below(uint32_t n)
{
    return (uint32_t)kv_random_below(&bench.random, n);
}

static uint32_t some_ranges(struct kv_wire_range *ranges, uint32_t max, uint32_t tokens)
{
    uint32_t n = 0, begin = below(tokens / 4);

    while (n < max && begin < tokens) {
        uint32_t end = begin + 1 + below(tokens - begin);

        ranges[n++] = (struct kv_wire_range){begin, end};
        begin = end + below(3) * 40;
    }
    return n;
}

static void random_queries(float size)
{
    for (int i = 0; i < QUERIES_MAX * D; i++)
        queries[i] = ((float)below(2001) / 1000 - 1) * size;
}

/* Chapters of two shapes, rotated and not, blocks without codes, a block with some. */
static void as_row_by_row(void **state)
{
    struct kv_wire_range ranges[6];
    struct kvs_unit unit;
    unsigned n_by_bytes = 0;

    (void)state;
    unit_make(&bench, &unit, 0, D, 3500);
    train(&unit, 1500, 8, 2, true);
    train(&unit, 2700, 8, 4, false);
    train(&unit, 3000, 0, 4, true); /* open: its last block is coded in part */
    assert_int_equal(unit_append(&bench, &unit, 500), KV_OK);
    /* Rows behind an open codebook are coded when they are first read. */
    ranges[0] = (struct kv_wire_range){0, 4000};
    struct kvs_score score = score_of(&unit, ranges, 1, 1);
    kvs_score_begin(&score, &bench.codebooks);
    while (!kvs_score_piece(&score, &bench.codebooks))
        ;
    for (int round = 0; round < ROUNDS; round++) {
        const uint32_t n_ranges = some_ranges(ranges, 1 + below(6), 4000);
        const uint32_t n = kvs_ranges_count(ranges, n_ranges);

        random_queries(below(2) == 0 ? 1 : 1000);
        if (n > 1)
            n_by_bytes +=
                check(&unit, ranges, n_ranges, 1 + below(QUERIES_MAX), 1 + below(n - 1));
    }
    assert_true(n_by_bytes > ROUNDS / 2);
    lone_unit_clear(&unit);
}

/* As many blocks as a sample is taken of. */
static void from_a_sample(void **state)
{
    const struct kv_wire_range range = {4, 100 * KV_BLOCK_TOKENS - 64};
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 100 * KV_BLOCK_TOKENS);
    train(&unit, 100 * KV_BLOCK_TOKENS, 48, 4, true);
    random_queries(1);
    assert_true(check(&unit, &range, 1, QUERIES_MAX, 800));
    lone_unit_clear(&unit);
}

/* Ties go to the lower row: of keys that are all alike, the first are taken; zeros have no range. */
static void ties_go_to_the_lower_row(void **state)
{
    const struct kv_wire_range range = {100, 2000};
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 2048);
    for (uint32_t row = 1; row < 2048; row++)
        memcpy(kvs_unit_row(&unit, row), kvs_unit_row(&unit, 0), unit.row_bytes);
    unit_seal(&unit, 0, 2048);
    train(&unit, 2048, 8, 4, false);
    struct kvs_score score = score_of(&unit, &range, 1, 2);
    static uint32_t tokens[2048 + KV_TOPK_SPARE];
    for (int zeros = 0; zeros < 2; zeros++) {
        random_queries(zeros ? 0 : 1);
        assert_true(kvs_byte_scores_begin(&scores, &score, &bench.codebooks, 300, tokens));
        while (!kvs_byte_scores_piece(&scores, &bench.codebooks))
            ;
        for (uint32_t i = 0; i < 300; i++)
            assert_int_equal(tokens[i], 100 + i);
    }
    lone_unit_clear(&unit);
}

/* Rows without codes, and too few rows for the tables of their chapters, are for others. */
static void not_for_all(void **state)
{
    struct kv_wire_range ranges[8];
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 8 * 1024);
    random_queries(1);
    ranges[0] = (struct kv_wire_range){0, 8 * 1024};
    assert_false(check(&unit, ranges, 1, 2, 100));
    train(&unit, 8 * 1024, 8, 2, false);
    assert_true(check(&unit, ranges, 1, 2, 100));
    for (uint32_t i = 0; i < 8; i++)
        ranges[i] = (struct kv_wire_range){i * 1024, i * 1024 + 2};
    assert_false(check(&unit, ranges, 8, 2, 3));
    lone_unit_clear(&unit);
}

static int set_up(void **state)
{
    (void)state;
    bench_open(&bench, ARENA_BYTES, 11);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    bench_close(&bench);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_row_by_row),
        cmocka_unit_test(from_a_sample),
        cmocka_unit_test(ties_go_to_the_lower_row),
        cmocka_unit_test(not_for_all),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
