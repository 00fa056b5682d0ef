/* pq_tiles.h and pq_cells.h: what is put into a tile comes out again, next to it nothing
 * changes, and a tile is as long as it says.  Every implementation that this CPU has gives the
 * bits of the scalar one.  A rounded sum is as near the exact score as promised.  Sums of bytes
 * saturate, and the largest over queries is what brute force finds.  Cells have each row once,
 * ascending, and the score of each row. */
#include "kernels/pq_cells.h"
#include "kernels/pq_tiles.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 1500,
    QUERIES_MAX = 17,
    TILES_MAX = 7,
};

static uint64_t seed;
static struct kv_random dice;

#define EXPECT(condition)                                                              \
    do {                                                                               \
        if (!(condition)) {                                                            \
            print_error("KV_TEST_SEED=%llu round %d d %u m %u bits %u: %s\n",          \
                        (unsigned long long)seed, round, shape.d, shape.m, shape.bits, \
                        #condition);                                                   \
            fail();                                                                    \
        }                                                                              \
    } while (0)

static struct kv_pq_shape some_shape(void)
{
    struct kv_pq_shape shape = {
        .m = 1 + (uint32_t)kv_random_below(&dice, KV_PQ_SUBSPACES_MAX),
        .bits = 1 + (uint32_t)kv_random_below(&dice, KV_PQ_BITS_MAX),
    };

    if (kv_random_below(&dice, 4) == 0)
        shape = (struct kv_pq_shape){.m = 2, .bits = 6};
    shape.d = shape.m * (1 + (uint32_t)kv_random_below(&dice, 8));
    assert_true(kv_pq_shape_valid(&shape));
    return shape;
}

static uint8_t *some_codes(const struct kv_pq_shape *shape, size_t n, void **ret_base)
{
    uint8_t *codes = floats_exact(&dice, shape->m * n, 1, ret_base);

    for (size_t i = 0; i < shape->m * n; i++)
        codes[i] = (uint8_t)kv_random_below(&dice, kv_pq_n_centroids(shape));
    return codes;
}

/* Tiles, each its own allocation, with the codes of all their rows: (m, n_tiles * 128). */
struct tiles {
    size_t n;
    uint8_t *tiles[TILES_MAX], *codes;
    void *bases[TILES_MAX], *codes_base;
};

static void make_tiles(const struct kv_pq_shape *shape, size_t n, struct tiles *tiles)
{
    tiles->n = n;
    tiles->codes = some_codes(shape, n * KV_PQ_TILE, &tiles->codes_base);
    for (size_t i = 0; i < n; i++) {
        tiles->tiles[i] = floats_exact(&dice, kv_tile_bytes(shape), 1, &tiles->bases[i]);
        kv_random_fill(&dice, tiles->tiles[i], kv_tile_bytes(shape));
        kv_tile_put(shape, tiles->tiles[i], 0, KV_PQ_TILE, tiles->codes + i * KV_PQ_TILE,
                    n * KV_PQ_TILE);
    }
}

static void clear_tiles(struct tiles *tiles)
{
    for (size_t i = 0; i < tiles->n; i++)
        free(tiles->bases[i]);
    free(tiles->codes_base);
}

static void sizes(void **state)
{
    static const struct {
        struct kv_pq_shape shape;
        size_t bytes;
    } cases[] = {
        {{128, 2, 6}, 192}, {{128, 4, 6}, 384},   {{128, 1, 6}, 128}, {{192, 3, 6}, 320},
        {{128, 2, 5}, 192}, {{128, 4, 4}, 256},   {{128, 1, 1}, 64},  {{128, 2, 8}, 256},
        {{128, 2, 7}, 256}, {{128, 16, 8}, 2048},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_int_equal(kv_tile_bytes(&cases[i].shape), cases[i].bytes);
    assert_int_equal(kv_cells_n(&(struct kv_pq_shape){128, 2, 6}), 4096);
    assert_int_equal(kv_cells_n(&(struct kv_pq_shape){128, 3, 4}), 4096);
    assert_int_equal(kv_cells_n(&(struct kv_pq_shape){128, 1, 8}), 256);
    assert_int_equal(kv_cells_n(&(struct kv_pq_shape){128, 2, 7}), 0);
    assert_int_equal(kv_cells_n(&(struct kv_pq_shape){128, 16, 8}), 0);
}

/* The bytes are what other programs may have stored: they must not change unnoticed. */
static void layout(void **state)
{
    const struct kv_pq_shape six = {4, 2, 6}, four = {4, 2, 4}, eight = {4, 2, 8};
    uint8_t codes[2 * KV_PQ_TILE], tile[2 * KV_PQ_TILE];

    (void)state;
    for (unsigned i = 0; i < KV_PQ_TILE; i++) {
        codes[i] = (uint8_t)(i % 16);
        codes[KV_PQ_TILE + i] = (uint8_t)(15 - i % 16);
    }
    codes[KV_PQ_TILE + 64] = 0x39 & 63; /* 11 10 01 */
    kv_tile_put(&six, tile, 0, KV_PQ_TILE, codes, KV_PQ_TILE);
    assert_int_equal(tile[0], 0 | 1 << 6);
    assert_int_equal(tile[64], 0 | 2 << 6);
    assert_int_equal(tile[128], 15 | 3 << 6);
    assert_int_equal(tile[64 + 5], 5 | (10 >> 2) << 6);
    codes[KV_PQ_TILE + 64] = 9;
    kv_tile_put(&four, tile, 0, KV_PQ_TILE, codes, KV_PQ_TILE);
    assert_int_equal(tile[3], 3 | 3 << 4);
    assert_int_equal(tile[64], 15 | 9 << 4);
    kv_tile_put(&eight, tile, 0, KV_PQ_TILE, codes, KV_PQ_TILE);
    assert_memory_equal(tile, codes, sizeof(tile));
    assert_int_equal(KV_TILE_FORMAT, 1);
}

static void what_is_put_comes_out(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const struct kv_pq_shape shape = some_shape();
        const size_t begin = kv_random_below(&dice, KV_PQ_TILE + 1);
        const size_t n = kv_random_below(&dice, KV_PQ_TILE - begin + 1);
        struct tiles tiles;
        void *base, *out_base, *all_base;
        uint8_t *codes = some_codes(&shape, n, &base);
        uint8_t *out = floats_exact(&dice, shape.m * n, 1, &out_base);
        uint8_t *all = floats_exact(&dice, shape.m * KV_PQ_TILE, 1, &all_base);

        make_tiles(&shape, 1, &tiles);
        kv_tile_put(&shape, tiles.tiles[0], begin, n, codes, n);
        kv_tile_get(&shape, tiles.tiles[0], begin, n, out, n);
        EXPECT(memcmp(out, codes, shape.m * n) == 0);
        kv_tile_get(&shape, tiles.tiles[0], 0, KV_PQ_TILE, all, KV_PQ_TILE);
        for (size_t j = 0; j < shape.m; j++) {
            memcpy(tiles.codes + j * KV_PQ_TILE + begin, codes + j * n, n);
            EXPECT(memcmp(all + j * KV_PQ_TILE, tiles.codes + j * KV_PQ_TILE, KV_PQ_TILE) == 0);
        }
        if (kv_cells_n(&shape) > 0) {
            uint16_t cells[KV_PQ_TILE];

            kv_tile_cells(&shape, tiles.tiles[0], begin, n, cells);
            for (size_t i = 0; i < n; i++) {
                unsigned cell = 0;

                for (size_t j = 0; j < shape.m; j++)
                    cell = cell * (1u << shape.bits) + codes[j * n + i];
                EXPECT(cells[i] == cell);
            }
        }
        clear_tiles(&tiles);
        free(base);
        free(out_base);
        free(all_base);
    }
}

static void scores_are_the_same(void **state)
{
    const struct kv_tile_kernels *plain = kv_tile_kernels_at(0), *kernels;

    (void)state;
    for (unsigned i = 0; kv_tile_kernels_at(i) != NULL; i++)
        print_message("tile: %s\n", kv_tile_kernels_at(i)->name);
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const struct kv_pq_shape shape = some_shape();
        const size_t n_queries = 1 + kv_random_below(&dice, QUERIES_MAX);
        const size_t n_table = n_queries * kv_pq_table_size(&shape);
        const size_t n_tiles = 1 + kv_random_below(&dice, TILES_MAX);
        const size_t begin = kv_random_below(&dice, n_tiles * KV_PQ_TILE);
        const size_t n = kv_random_below(&dice, n_tiles * KV_PQ_TILE - begin + 1);
        void *bases[3];
        float *tables = floats_exact(&dice, n_table * sizeof(float), sizeof(float), &bases[0]);
        float *a = floats_exact(&dice, n_queries * n * sizeof(float), 4, &bases[1]);
        float *b = floats_exact(&dice, n_queries * n * sizeof(float), 4, &bases[2]);
        struct tiles tiles;

        make_tiles(&shape, n_tiles, &tiles);
        floats_fill(&dice, kind, tables, n_table);
        plain->score(&shape, tables, n_queries, (const uint8_t *const *)tiles.tiles, begin, n,
                     a, n);
        for (unsigned i = 1; (kernels = kv_tile_kernels_at(i)) != NULL; i++) {
            kernels->score(&shape, tables, n_queries, (const uint8_t *const *)tiles.tiles,
                           begin, n, b, n);
            EXPECT(floats_all_same(a, b, n_queries * n));
        }
        for (size_t q = 0; q < n_queries; q++)
            for (size_t row = 0; row < n; row++) {
                float sum = 0;

                for (size_t j = 0; j < shape.m; j++) {
                    const float value =
                        tables[q * kv_pq_table_size(&shape) + (j << shape.bits) +
                               tiles.codes[j * n_tiles * KV_PQ_TILE + begin + row]];
                    sum = j == 0 ? value : sum + value;
                }
                EXPECT(floats_same(a[q * n + row], sum));
            }
        clear_tiles(&tiles);
        for (int i = 0; i < 3; i++)
            free(bases[i]);
    }
}

/* Sums of rounded tables are near (score - base) / step, where nothing was clamped. */
static void tables_by_base_and_step(void **state)
{
    unsigned n_near = 0;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const struct kv_pq_shape shape = some_shape();
        const size_t n_table = kv_pq_table_size(&shape), n_centroids = 1u << shape.bits;
        const size_t size = kv_pq_table_rounded_size(&shape);
        void *bases[3];
        float *table = floats_exact(&dice, n_table * sizeof(float), sizeof(float), &bases[0]);
        uint8_t *a = floats_exact(&dice, size, 1, &bases[1]);
        uint8_t *b = floats_exact(&dice, size, 1, &bases[2]);
        float least, most, least2, most2, base, inv_step;
        const struct kv_tile_kernels *kernels;

        floats_fill(&dice, kind, table, n_table);
        kv_tile_kernels_at(0)->range(&shape, table, &least, &most);
        base = least - (float)kv_random_below(&dice, 4);
        inv_step = 255 / (most - base);
        if (round % 7 == 0)
            base = floats_one(&dice, FLOATS_ANY_BITS);
        if (round % 11 == 0)
            inv_step = floats_one(&dice, FLOATS_ANY_BITS);
        memset(a, 0x55, size);
        kv_tile_kernels_at(0)->round8_to(&shape, table, base, inv_step, a);
        for (unsigned i = 1; (kernels = kv_tile_kernels_at(i)) != NULL; i++) {
            kernels->range(&shape, table, &least2, &most2);
            EXPECT(floats_same(least, least2) && floats_same(most, most2));
            memset(b, 0xaa, size);
            kernels->round8_to(&shape, table, base, inv_step, b);
            EXPECT(memcmp(a, b, size) == 0);
        }

        /* The same in double. */
        double sums[2] = {0, 0}, magnitude = fabs((double)base);
        bool is_finite = isfinite(base) && isfinite(inv_step) && inv_step > 0;

        for (size_t j = 0; j < shape.m; j++) {
            double low = INFINITY, high = -INFINITY;

            for (size_t c = 0; c < n_centroids; c++) {
                const float value = table[j * n_centroids + c];

                is_finite = is_finite && fabsf(value) < 1e30f;
                low = fmin(low, (double)value);
                high = fmax(high, (double)value);
            }
            sums[0] += low;
            sums[1] += high;
            magnitude += fmax(fabs(low), fabs(high));
            for (size_t c = n_centroids; c < size / shape.m; c++)
                EXPECT(a[j * (size / shape.m) + c] == 0);
        }
        const double error = magnitude * (shape.m + 3) * 0x1p-23;
        if (is_finite && error * (double)inv_step < 0.1 && sums[0] - (double)base > -error &&
            (sums[1] - (double)base) * (double)inv_step < 260) {
            n_near++;
            EXPECT(fabs((double)least - sums[0]) <= error);
            EXPECT(fabs((double)most - sums[1]) <= error);
            for (int turn = 0; turn < 50; turn++) {
                double score = 0, sum = 0;

                for (size_t j = 0; j < shape.m; j++) {
                    const size_t c = kv_random_below(&dice, n_centroids);

                    score += (double)table[j * n_centroids + c];
                    sum += a[j * (size / shape.m) + c];
                }
                const double exact = (score - (double)base) * (double)inv_step;
                EXPECT(fabs(sum - exact) <= 0.5 * shape.m + 0.2 + (exact > 255 ? 5 : 0));
            }
        }
        for (int i = 0; i < 3; i++)
            free(bases[i]);
    }
    assert_true(n_near > ROUNDS / 4);
}

/* Any bytes, or bytes of which the largest sum is 255, the last that needs no saturation, or
 * one more. */
static void fill_bytes(const struct kv_pq_shape *shape, int round, uint8_t *table)
{
    const size_t size = kv_pq_table_rounded_size(shape) / shape->m;
    unsigned left = round % 3 == 1 ? 255 : 256;

    for (size_t j = 0; j < shape->m; j++) {
        unsigned most = j + 1 < shape->m ? (unsigned)kv_random_below(&dice, left + 1) : left;

        most = most < 255 ? most : 255;
        left -= most;
        most = round % 3 == 0 ? 255 : most;
        for (size_t c = 0; c < size; c++)
            table[j * size + c] = (uint8_t)kv_random_below(&dice, most + 1);
        table[j * size + kv_random_below(&dice, size)] = (uint8_t)most;
    }
}

static void sums_of_bytes(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const struct kv_pq_shape shape = some_shape();
        const size_t n_queries = 1 + kv_random_below(&dice, QUERIES_MAX);
        const size_t n_tiles = 1 + kv_random_below(&dice, TILES_MAX), n = n_tiles * KV_PQ_TILE;
        const size_t size = kv_pq_table_rounded_size(&shape);
        void *bases[6];
        uint8_t *rounded = floats_exact(&dice, n_queries * size, 1, &bases[0]);
        uint8_t *a = floats_exact(&dice, n_queries * n, 1, &bases[1]);
        uint8_t *b = floats_exact(&dice, n_queries * n, 1, &bases[2]);
        uint8_t *c = floats_exact(&dice, n, 1, &bases[3]);
        uint8_t *d = floats_exact(&dice, n, 1, &bases[4]);
        int16_t *offsets = floats_exact(&dice, n_queries * 2, 2, &bases[5]);
        const uint8_t *const *tiles_at;
        const struct kv_tile_kernels *kernels;
        struct tiles tiles;

        make_tiles(&shape, n_tiles, &tiles);
        tiles_at = (const uint8_t *const *)tiles.tiles;
        for (size_t q = 0; q < n_queries; q++) {
            fill_bytes(&shape, round, rounded + q * size);
            offsets[q] = (int16_t)((int)kv_random_below(&dice, 511) - 255);
            if (round % 4 == 0)
                offsets[q] = 0;
        }
        kv_tile_kernels_at(0)->scan8(&shape, rounded, n_queries, tiles_at, n_tiles, a, n);
        kv_tile_kernels_at(0)->scan8_max(&shape, rounded, offsets, n_queries, tiles_at, n_tiles,
                                         c);
        for (unsigned i = 1; (kernels = kv_tile_kernels_at(i)) != NULL; i++) {
            kernels->scan8(&shape, rounded, n_queries, tiles_at, n_tiles, b, n);
            EXPECT(memcmp(a, b, n_queries * n) == 0);
            memset(d, 0xee, n);
            kernels->scan8_max(&shape, rounded, offsets, n_queries, tiles_at, n_tiles, d);
            EXPECT(memcmp(c, d, n) == 0);
            kernels->scan8_max(&shape, rounded, (const int16_t[]){0}, 1, tiles_at, n_tiles, d);
            EXPECT(memcmp(a, d, n) == 0);
        }
        for (size_t row = 0; row < n; row++) {
            int most = 0;

            for (size_t q = 0; q < n_queries; q++) {
                int sum = 0;

                for (size_t j = 0; j < shape.m; j++)
                    sum += rounded[q * size + j * (size / shape.m) + tiles.codes[j * n + row]];
                sum = sum < 255 ? sum : 255;
                EXPECT(a[q * n + row] == sum);
                sum += offsets[q];
                most = sum > most ? sum : most;
            }
            EXPECT(c[row] == (most < 255 ? most : 255));
        }
        clear_tiles(&tiles);
        for (int i = 0; i < 6; i++)
            free(bases[i]);
    }
}

static void cells_are_the_rows(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const struct kv_pq_shape shape = some_shape();
        const uint32_t n_cells = kv_cells_n(&shape);
        const size_t n_tiles = 1 + kv_random_below(&dice, TILES_MAX);
        const size_t n = n_tiles * KV_PQ_TILE - kv_random_below(&dice, KV_PQ_TILE);
        const uint32_t first = (uint32_t)kv_random_below(&dice, 1000);
        struct tiles tiles;

        if (n_cells == 0)
            continue;
        make_tiles(&shape, n_tiles, &tiles);
        const size_t n_words = kv_cells_n_words(&shape), n_bits = (first + n + 63) / 64;
        const size_t n_queries = 1 + kv_random_below(&dice, 6);
        const size_t n_table = kv_pq_table_size(&shape);
        /* As much as there is, so that nothing is read or written behind it. */
        uint32_t *memory = calloc(kv_cells_head(&shape) + n, sizeof(uint32_t));
        float *tables = malloc(n_queries * n_table * sizeof(float)), own[KV_PQ_TILE];
        uint32_t *expected = calloc(n_cells, sizeof(uint32_t));
        uint32_t *numbers = malloc((n + 1) * sizeof(uint32_t));
        uint64_t *bits = calloc(n_bits, sizeof(uint64_t));
        uint8_t *seen = calloc(n, 1);
        assert_true(memory && tables && expected && numbers && bits && seen);

        const struct kv_cells cells = kv_cells_at(&shape, memory, (uint32_t)n);
        for (size_t i = 0; i < n_tiles; i++)
            kv_cells_count(&shape, tiles.tiles[i],
                           i + 1 < n_tiles ? KV_PQ_TILE : n - i * KV_PQ_TILE, &cells);
        kv_cells_sum(&shape, &cells);
        for (size_t i = 0; i < n_tiles; i++)
            kv_cells_place(&shape, tiles.tiles[i],
                           i + 1 < n_tiles ? KV_PQ_TILE : n - i * KV_PQ_TILE,
                           (uint32_t)(i * KV_PQ_TILE), &cells);
        kv_cells_end(&shape, &cells);

        /* Every row is in its cell's list once, and no list is empty. */
        const uint32_t n_full = kv_cells_n_full(&shape, &cells);
        EXPECT(cells.offsets[0] == 0 && cells.offsets[n_full] == n);
        EXPECT(cells.before[0] == 0 && n_full <= n_cells);
        for (uint32_t cell = 0, i = 0; cell < n_cells; cell++) {
            if (!(cells.full[cell / 64] >> cell % 64 & 1))
                continue;
            EXPECT(kv_cells_item(&cells, cell) == i);
            EXPECT(cells.offsets[i + 1] > cells.offsets[i]);
            for (uint32_t at = cells.offsets[i]; at < cells.offsets[i + 1]; at++) {
                const uint32_t row = cells.rows[at];
                uint16_t number;

                EXPECT(row < n && seen[row]++ == 0);
                EXPECT(at == cells.offsets[i] || row > cells.rows[at - 1]);
                kv_tile_cells(&shape, tiles.tiles[row / KV_PQ_TILE], row % KV_PQ_TILE, 1,
                              &number);
                EXPECT(number == cell);
            }
            i++;
            EXPECT(cells.before[n_words] >= i);
        }

        float *scores = malloc((n_queries * (n_full + 3) - 3) * sizeof(float));
        float *others = malloc((n_queries * (n_full + 3) - 3) * sizeof(float));
        uint32_t *counts = calloc(n_full, sizeof(uint32_t));
        uint32_t *lengths = calloc(n_full, sizeof(uint32_t));
        assert_true(scores && others && counts && lengths);
        floats_fill(&dice, (enum float_kind)(round % FLOATS_N_KINDS), tables,
                    n_queries * n_table);
        kv_cells_score(&shape, tables, n_queries, &cells, scores, n_full + 3);
        kv_cells_counts(&shape, &cells, 0, (uint32_t)n, counts);
        for (unsigned i = 0; kv_cells_kernels_at(i) != NULL; i++) {
            const struct kv_cells_kernels *kernels = kv_cells_kernels_at(i);

            kernels->score(&shape, tables, n_queries, &cells, others, n_full + 3);
            for (size_t query = 0; query < n_queries; query++)
                EXPECT(floats_all_same(scores + query * (n_full + 3),
                                       others + query * (n_full + 3), n_full));
            kernels->lengths(cells.offsets, n_full, lengths);
            EXPECT(memcmp(lengths, counts, n_full * sizeof(*lengths)) == 0);
        }
        for (uint32_t i = 0; i < n_full; i++)
            for (uint32_t at = cells.offsets[i]; at < cells.offsets[i + 1]; at++)
                for (size_t query = 0; query < n_queries; query++) {
                    const uint32_t row = cells.rows[at];

                    kv_tile_score(&shape, tables + query * n_table, 1,
                                  tiles.tiles[row / KV_PQ_TILE], row % KV_PQ_TILE, 1, own, 1);
                    EXPECT(floats_same(own[0], scores[query * (n_full + 3) + i]));
                }

        /* Some rows cut off in front and behind: counts and bits. */
        const uint32_t begin = (uint32_t)kv_random_below(&dice, n + 1);
        const uint32_t end = begin + (uint32_t)kv_random_below(&dice, n - begin + 1);
        kv_cells_counts(&shape, &cells, begin, end, counts);
        for (uint32_t row = begin; row < end; row++) {
            uint16_t cell;

            kv_tile_cells(&shape, tiles.tiles[row / KV_PQ_TILE], row % KV_PQ_TILE, 1, &cell);
            expected[kv_cells_item(&cells, cell)]++;
        }
        EXPECT(memcmp(counts, expected, n_full * sizeof(uint32_t)) == 0);
        for (uint32_t i = 0; i < n_full; i++)
            EXPECT(kv_cells_mark(&cells, i, begin, end, first, bits) == counts[i]);
        const size_t max = kv_random_below(&dice, n + 2);
        const size_t n_taken = kv_bits_take(bits, 0, first + n, max, numbers);
        EXPECT(n_taken == (end - begin < max ? end - begin : max));
        for (size_t i = 0; i < n_taken; i++)
            EXPECT(numbers[i] == first + begin + i);
        for (size_t i = 0; i < n_bits; i++)
            EXPECT(bits[i] == 0);
        clear_tiles(&tiles);
        free(memory);
        free(tables);
        free(expected);
        free(numbers);
        free(bits);
        free(scores);
        free(others);
        free(counts);
        free(lengths);
        free(seen);
    }
}

/* Bits of the lists flip: whatever is counted and marked then, nothing is read or written
 * outside of the arrays, which the address sanitizer sees, and no row is that is none. */
static void cells_that_went_bad(void **state)
{
    const struct kv_pq_shape shape = {.d = 8, .m = 2, .bits = 4};
    enum {
        TILES = 5,
        ROWS = TILES * KV_PQ_TILE,
        FLIPS = 4000,
    };
    const size_t n_words = kv_cells_head(&shape) + ROWS, n_cells = kv_cells_n(&shape);
    const float *table;
    struct tiles tiles;

    (void)state;
    make_tiles(&shape, TILES, &tiles);
    uint32_t *memory = calloc(n_words, sizeof(uint32_t));
    uint32_t *good = malloc(n_words * sizeof(uint32_t));
    uint64_t *bits = calloc(ROWS / 64, sizeof(uint64_t));
    uint32_t *counts = malloc(n_cells * sizeof(uint32_t));
    uint32_t *numbers = malloc(ROWS * sizeof(uint32_t));
    float *tables = calloc(kv_pq_table_size(&shape), sizeof(float));
    float *scores = malloc(n_cells * sizeof(float));
    assert_true(memory && good && bits && counts && numbers && tables && scores);
    const struct kv_cells cells = kv_cells_at(&shape, memory, ROWS);
    table = tables;
    for (unsigned i = 0; i < TILES; i++)
        kv_cells_count(&shape, tiles.tiles[i], KV_PQ_TILE, &cells);
    kv_cells_sum(&shape, &cells);
    for (unsigned i = 0; i < TILES; i++)
        kv_cells_place(&shape, tiles.tiles[i], KV_PQ_TILE, i * KV_PQ_TILE, &cells);
    kv_cells_end(&shape, &cells);
    memcpy(good, memory, n_words * sizeof(uint32_t));

    for (int round = 0; round < FLIPS; round++) {
        const uint32_t begin = (uint32_t)kv_random_below(&dice, ROWS + 1);
        const uint32_t end = begin + (uint32_t)kv_random_below(&dice, ROWS - begin + 1);

        memcpy(memory, good, n_words * sizeof(uint32_t));
        for (unsigned i = 0; (int)i <= round % 3; i++)
            memory[kv_random_below(&dice, n_words)] ^= 1u << kv_random_below(&dice, 32);
        const uint32_t n_full = kv_cells_n_full(&shape, &cells);
        EXPECT(n_full <= n_cells);
        kv_cells_score(&shape, table, 1, &cells, scores, n_cells);
        kv_cells_counts(&shape, &cells, round % 2 == 0 ? 0 : begin, round % 2 == 0 ? ROWS : end,
                        counts);
        for (uint32_t i = 0; i < n_full; i++) {
            EXPECT(counts[i] <= ROWS);
            kv_cells_mark(&cells, i, begin, end, 0, bits);
        }
        const size_t n = kv_bits_take(bits, 0, ROWS, ROWS, numbers);
        for (size_t i = 0; i < n; i++)
            EXPECT(numbers[i] >= begin && numbers[i] < end);
        for (uint32_t cell = 0; cell < n_cells; cell++)
            EXPECT(kv_cells_item(&cells, cell) < n_cells);
    }
    free(memory);
    free(good);
    free(bits);
    free(counts);
    free(numbers);
    free(tables);
    free(scores);
    clear_tiles(&tiles);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),
        cmocka_unit_test(layout),
        cmocka_unit_test(what_is_put_comes_out),
        cmocka_unit_test(scores_are_the_same),
        cmocka_unit_test(tables_by_base_and_step),
        cmocka_unit_test(sums_of_bytes),
        cmocka_unit_test(cells_are_the_rows),
        cmocka_unit_test(cells_that_went_bad),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
