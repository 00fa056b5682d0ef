/* pq_prefilter.h: every implementation that this CPU has takes the rows that the scalar one
 * takes, and those are right: surely chosen, open, or not.  All of it together chooses the rows
 * that choosing by all exact scores does. */
#include "kernels/pq_prefilter.h"
#include "kernels/select.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 3000,
    N_MAX = 1500,
    TILES_MAX = 20,
};

static uint64_t seed;
static struct kv_random dice;

#define EXPECT(condition)                                                   \
    do {                                                                    \
        if (!(condition)) {                                                 \
            print_error("KV_TEST_SEED=%llu round %d n %zu k %zu: %s\n",     \
                        (unsigned long long)seed, round, n, k, #condition); \
            fail();                                                         \
        }                                                                   \
    } while (0)

/* Sums about the middle, or few different ones, or all equal. */
static uint32_t some_sum(int round, uint32_t most)
{
    uint64_t sum = 0;

    switch (round % 4) {
    case 0:
        for (int i = 0; i < 8; i++)
            sum += kv_random_below(&dice, most / 8 + 1);
        return (uint32_t)sum;
    case 1:
        return (uint32_t)kv_random_below(&dice, (uint64_t)most + 1);
    case 2:
        return kv_random_below(&dice, 2) == 0 ? most : (uint32_t)kv_random_below(&dice, 4);
    default:
        return most / 2;
    }
}

static void check_rows(int round,
                       size_t n,
                       size_t k,
                       const uint32_t *sums,
                       uint32_t margin,
                       const uint32_t *sure,
                       size_t n_sure,
                       const uint32_t *open,
                       size_t n_open)
{
    size_t at_sure = 0, at_open = 0;

    EXPECT(n_sure < k && n_sure + n_open >= k);
    for (size_t i = 0; i < n; i++) {
        size_t n_above = 0, n_better = 0;
        const bool is_sure = at_sure < n_sure && sure[at_sure] == i;
        const bool is_open = at_open < n_open && open[at_open] == i;

        at_sure += is_sure;
        at_open += is_open;
        /* Rows that could be better, and rows that are. */
        for (size_t j = 0; j < n; j++) {
            n_above += j != i && sums[j] + margin >= sums[i];
            n_better += sums[j] > sums[i] + margin;
        }
        if (is_sure)
            EXPECT(n_above < k || n_better < k);
        if (!is_sure && !is_open)
            EXPECT(n_better >= k || n_above >= k);
        if (n_better >= k)
            EXPECT(!is_sure);
    }
    EXPECT(at_sure == n_sure && at_open == n_open);
}

#define CHECK(TYPE, FUNCTION, MOST)                                                           \
    do {                                                                                      \
        TYPE *sums = floats_exact(&dice, n * sizeof(TYPE), sizeof(TYPE), &bases[0]);          \
        uint32_t *sure = floats_exact(&dice, (k + 8) * 4, 4, &bases[1]);                      \
        uint32_t *open = floats_exact(&dice, (n + 8) * 4, 4, &bases[2]);                      \
        uint32_t *sure2 = floats_exact(&dice, (k + 8) * 4, 4, &bases[3]);                     \
        uint32_t *open2 = floats_exact(&dice, (n + 8) * 4, 4, &bases[4]);                     \
        size_t n_sure = 0, n_sure2 = 0;                                                       \
                                                                                              \
        for (size_t i = 0; i < n; i++)                                                        \
            sums[i] = (TYPE)(wide[i] = some_sum(round, MOST));                                \
        const size_t n_open =                                                                 \
            kv_pq_prefilter_kernels_at(0)->FUNCTION(sums, n, k, margin, sure, &n_sure, open); \
        if (n <= 200)                                                                         \
            check_rows(round, n, k, wide, margin, sure, n_sure, open, n_open);                \
        for (unsigned i = 1; kv_pq_prefilter_kernels_at(i) != NULL; i++) {                    \
            EXPECT(kv_pq_prefilter_kernels_at(i)->FUNCTION(sums, n, k, margin, sure2,         \
                                                           &n_sure2, open2) == n_open);       \
            EXPECT(n_sure2 == n_sure && memcmp(sure, sure2, n_sure * 4) == 0 &&               \
                   memcmp(open, open2, n_open * 4) == 0);                                     \
        }                                                                                     \
        for (int i = 0; i < 5; i++)                                                           \
            free(bases[i]);                                                                   \
    } while (0)

static void rows_are_right(void **state)
{
    static uint32_t wide[N_MAX];
    void *bases[5];

    (void)state;
    for (unsigned i = 0; kv_pq_prefilter_kernels_at(i) != NULL; i++)
        print_message("prefilter: %s\n", kv_pq_prefilter_kernels_at(i)->name);
    for (int round = 0; round < ROUNDS; round++) {
        const size_t n = 1 + kv_random_below(&dice, round % 5 == 0 ? N_MAX : 100);
        const size_t k = 1 + kv_random_below(&dice, n);
        const uint32_t margin = (uint32_t)kv_random_below(&dice, 20);

        CHECK(uint8_t, prefilter8, UINT8_MAX);
        CHECK(uint16_t, prefilter16, UINT16_MAX);
    }
}

static void top_is_top(void **state)
{
    size_t n_all = 0, n_scored = 0;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        struct kv_pq_shape shape = {
            .m = 1 + (uint32_t)kv_random_below(&dice, KV_PQ_SUBSPACES_MAX),
            .bits = 1 + (uint32_t)kv_random_below(&dice, KV_PQ_BITS_MAX),
        };
        const size_t n_tiles = 1 + kv_random_below(&dice, TILES_MAX);
        const size_t n = n_tiles * KV_PQ_TILE - kv_random_below(&dice, KV_PQ_TILE);
        const size_t k = kv_random_below(&dice, round % 3 ? n + 3 : 20);
        const uint8_t *tiles[TILES_MAX];
        void *bases[TILES_MAX + 3];
        uint8_t codes[KV_PQ_SUBSPACES_MAX * KV_PQ_TILE];

        if (round % 2)
            shape = (struct kv_pq_shape){.m = 2, .bits = 6};
        shape.d = shape.m;
        float *table = floats_exact(&dice, kv_pq_table_size(&shape) * 4, 4, &bases[0]);
        void *scratch = floats_exact(&dice, kv_tiles_top_bytes(n), 4, &bases[1]);
        uint32_t *rows = floats_exact(&dice, (k + KV_TOPK_SPARE) * 4, 4, &bases[2]);
        float *scores = malloc(2 * n * sizeof(float));
        uint32_t *expected = malloc((k + KV_TOPK_SPARE) * sizeof(uint32_t));
        size_t n_exact;

        assert_true(scores != NULL && expected != NULL);
        floats_fill(&dice, kind, table, kv_pq_table_size(&shape));
        for (size_t i = 0; i < n_tiles; i++) {
            uint8_t *tile = floats_exact(&dice, kv_tile_bytes(&shape), 1, &bases[3 + i]);
            const size_t n_rows = n - i * KV_PQ_TILE;

            for (size_t j = 0; j < sizeof(codes); j++)
                codes[j] = (uint8_t)kv_random_below(&dice, kv_pq_n_centroids(&shape));
            kv_tile_put(&shape, tile, 0, KV_PQ_TILE, codes, KV_PQ_TILE);
            kv_tile_score(&shape, table, 1, tile, 0, n_rows < KV_PQ_TILE ? n_rows : KV_PQ_TILE,
                          scores + i * KV_PQ_TILE, 1);
            tiles[i] = tile;
        }
        const size_t n_expected = kv_topk_select(scores, n, k, expected, scores + n);
        EXPECT(kv_tiles_top(&shape, table, tiles, n, k, scratch, rows, &n_exact) == n_expected);
        EXPECT(memcmp(rows, expected, n_expected * 4) == 0);
        EXPECT(n_exact <= n);
        if (kind == FLOATS_UNIFORM && shape.bits == 6 && shape.m == 2 && k > 0) {
            n_all += n;
            n_scored += n_exact;
        }
        for (size_t i = 0; i < n_tiles + 3; i++)
            free(bases[i]);
        free(scores);
        free(expected);
    }
    print_message("of %zu rows %zu were scored exactly\n", n_all, n_scored);
    assert_true(n_scored < n_all / 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_right),
        cmocka_unit_test(top_is_top),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
