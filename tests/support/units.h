/* units.h - units with rows of random fp32 keys, for tests of what works on units directly.
 *
 * Threads: one.  Memory: a bench owns its arena; units are the caller's, cleared with
 * lone_unit_clear().
 */
#ifndef KV_TESTS_SUPPORT_UNITS_H
#define KV_TESTS_SUPPORT_UNITS_H

#include "kernels/checksum.h"
#include "kernels/key_copies.h"
#include "kvserver/base/random.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/scorer_pq.h"
#include "kvserver/store/rows/unit.h"
#include "kvserver/store/rows/verify.h"
#include "tests/support/lone_unit.h"

#include <stdlib.h>
#include <string.h>

enum {
    BENCH_SESSIONS = 4, /* whose units may have index jobs */
};

struct bench {
    struct kvs_arena *arena;
    struct kvs_segment_store heap;
    struct kvs_codebooks codebooks;
    struct kvs_indexer *indexer;
    struct kv_random random;
};

/* How far a look at the clock of an indexer moves it: at first, every piece of work is a slice. */
static uint64_t bench_look_us = KV_SLICE_US;

static inline uint64_t bench_look(const struct kv_clock *clock)
{
    static uint64_t now_us;

    (void)clock;
    return now_us += bench_look_us;
}

static const struct kv_clock bench_clock = {.name = "looks", .now_us = bench_look};

static inline void bench_open(struct bench *bench, uint64_t bytes, uint64_t seed)
{
    bench->arena = kvs_arena_create(bytes);
    if (bench->arena == NULL || !kvs_segment_store_init(&bench->heap, bench->arena) ||
        !kvs_codebooks_init(&bench->codebooks, &bench->heap))
        abort();
    bench->indexer = kvs_indexer_create(&bench->codebooks, &bench_clock, BENCH_SESSIONS);
    if (bench->indexer == NULL)
        abort();
    kv_random_init(&bench->random, seed);
}

static inline void bench_close(struct bench *bench)
{
    kvs_segment_store_check(&bench->heap);
    kvs_codebooks_check(&bench->codebooks);
    kvs_indexer_check(bench->indexer);
    kvs_arena_check(bench->arena);
    kvs_indexer_destroy(bench->indexer);
    kvs_codebooks_fini(&bench->codebooks);
    kvs_arena_destroy(bench->arena);
}

/* The CRCs of rows that a test has written into the unit, as their writer would have made them.
 */
static inline void unit_seal(struct kvs_unit *unit, uint32_t begin, uint32_t count)
{
    const struct kvs_row_set rows = kvs_unit_rows(unit);

    for (uint32_t row = begin; row < begin + count; row++) {
        uint32_t seed;

        kvs_verify_seeds(&rows, &row, 1, &seed);
        *kvs_unit_crc(unit, row) = kv_crc32c(seed, kvs_unit_row(unit, row), unit->row_bytes);
    }
}

/* Appends rows whose elements are in (-1, 1), as the random numbers have them. */
static inline kv_status_t
unit_append(struct bench *bench, struct kvs_unit *unit, uint32_t count)
{
    uint32_t begin = unit->committed;
    kv_status_t status = kvs_unit_reserve(unit, begin + count);

    if (status != KV_OK)
        return status;
    for (uint32_t row = begin; row < begin + count; row++) {
        float *key = (float *)(void *)kvs_unit_row(unit, row);

        for (uint32_t i = 0; i < unit->row_bytes / sizeof(float); i++)
            key[i] =
                (float)((double)(kv_random_next(&bench->random) >> 40) / (1 << 24) * 2 - 1);
    }
    unit_seal(unit, begin, count);
    unit->committed = begin + count;
    return KV_OK;
}

static inline void
unit_make(struct bench *bench, struct kvs_unit *unit, uint32_t head, uint32_t d, uint32_t rows)
{
    if (lone_unit_init(unit, &bench->heap, 0, head, d * (uint32_t)sizeof(float)) != KV_OK ||
        unit_append(bench, unit, rows) != KV_OK)
        abort();
}

/* Whether the copies of the keys that have codes, if the codebook has any, are those of the keys
 * less its mean. */
static inline bool unit_copies_are_right(const struct kvs_codebook *book,
                                         const struct kvs_codes *codes,
                                         const float *keys)
{
    static _Alignas(64) uint8_t right[KV_PQ_TILE * (KVS_CODEBOOK_DIM_MAX / 2 + 2)];
    static _Alignas(64) uint8_t own[sizeof(right)];
    const uint32_t d = book->shape.d;
    const size_t n_bytes = kv_key_copies_bytes(d);
    const void *copies = kvs_segment_copies(book, codes);

    if (copies == NULL)
        return !book->plan.copies;
    memcpy(right, copies, n_bytes); /* rows without codes are as they are */
    memcpy(own, copies, n_bytes);
    kv_key_copies_put(d, kvs_codebook_mean(book), keys, 0, codes->n_coded, right);
    return memcmp(right, own, n_bytes) == 0;
}

/* Whether all codes of the unit's rows are what their codebooks give. */
static inline bool unit_codes_are_right(const struct bench *bench, const struct kvs_unit *unit)
{
    uint8_t right[KV_PQ_SUBSPACES_MAX * KV_PQ_TILE], own[sizeof(right)];
    static float turned[KV_PQ_TILE * KVS_CODEBOOK_DIM_MAX];

    for (uint32_t i = 0; i < kvs_unit_n_segments(unit); i++) {
        const struct kvs_codes *codes = kvs_unit_codes(unit, i);

        if (codes->column.bytes == NULL)
            continue;
        const struct kvs_codebook *book = kvs_codebook_at(&bench->codebooks, codes->codebook);
        const struct kv_kmeans_codebook kmeans = kvs_pq_kmeans(book);
        const float *keys =
            (const float *)(const void *)kvs_unit_row(unit, i * KV_BLOCK_TOKENS);
        kv_kmeans_encode(&book->shape, &kmeans,
                         kvs_pq_rotate(book, keys, codes->n_coded, turned), codes->n_coded,
                         right, KV_PQ_TILE);
        kv_tile_get(&book->shape, codes->column.bytes, 0, codes->n_coded, own, KV_PQ_TILE);
        if (!unit_copies_are_right(book, codes, keys))
            return false;
        for (uint32_t j = 0; j < book->shape.m; j++)
            if (memcmp(right + j * KV_PQ_TILE, own + j * KV_PQ_TILE, codes->n_coded) != 0)
                return false;
    }
    return true;
}

#endif
