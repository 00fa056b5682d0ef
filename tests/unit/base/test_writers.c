/* Runs of writers against one writer kept for every token, and rows that only their own
 * session's runs accept. */
#include "kvserver/base/writers.h"

#include "kernels/checksum.h"
#include "kvserver/base/random.h"
#include "proto/kv_wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    TOKENS = 300, /* of the plain one; what follows has the last one's writer */
    ROW_BYTES = 32,
    ROUNDS = 400,
    STEPS = 12,
};

/* A session as the runs must describe it. */
struct plain {
    uint64_t writers[TOKENS + 1]; /* the last: of all tokens that follow */
};

static uint64_t writer_of(const struct kv_writers *writers, uint32_t token)
{
    for (uint32_t i = 0; i < writers->n_runs; i++)
        if (token < writers->runs[i].end)
            return writers->runs[i].writer;
    fail_msg("token %u is in no run", token);
    return 0;
}

static void check(const struct kv_writers *writers, const struct plain *plain)
{
    assert_in_range(writers->n_runs, 1, KV_WRITER_RUNS_MAX);
    assert_int_equal(writers->runs[writers->n_runs - 1].end, UINT32_MAX);
    for (uint32_t token = 0; token <= TOKENS; token++) {
        uint32_t begin, end;
        uint64_t writer = plain->writers[token];

        assert_true(writer_of(writers, token) == writer);
        assert_int_equal(kv_writers_seed(writers, 3, 7, token, &begin, &end),
                         kv_row_seed(writer, 3, 7, 0));
        assert_true(begin <= token && token < end);
        assert_true(writer_of(writers, begin) == writer);
        assert_true(writer_of(writers, end - 1) == writer);
    }
    for (uint32_t i = 1; i < writers->n_runs; i++) {
        assert_true(writers->runs[i - 1].writer != writers->runs[i].writer);
        assert_true(writers->runs[i - 1].end < writers->runs[i].end);
    }
}

static void cuts_are_those_of_single_tokens(void **state)
{
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 7);
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t drawn = 1;
        struct kv_writers *writers = kv_writers_create(NULL, 0, drawn), *next;
        struct plain plain;

        assert_non_null(writers);
        for (uint32_t token = 0; token <= TOKENS; token++)
            plain.writers[token] = drawn;
        check(writers, &plain);
        for (unsigned step = 0; step < STEPS; step++) {
            const uint32_t tokens = (uint32_t)kv_random_below(&random, TOKENS);
            const bool is_fork = kv_random_below(&random, 2) == 0;
            const uint64_t writer = is_fork ? ++drawn : kv_writers_own(writers);

            next = kv_writers_create(writers, tokens, writer);
            assert_non_null(next);
            assert_int_equal(next->n_runs, kv_writers_count(writers, tokens, writer));
            assert_true(is_fork || next->n_runs <= writers->n_runs);
            free(writers);
            writers = next;
            for (uint32_t token = tokens; token <= TOKENS; token++)
                plain.writers[token] = writer;
            check(writers, &plain);
        }
        free(writers);
    }
}

static struct kv_writers *writers_of(const struct kv_writer_run *runs, uint32_t n_runs)
{
    struct kv_writers *writers = malloc(sizeof(*writers) + n_runs * sizeof(*runs));

    assert_non_null(writers);
    writers->n_runs = n_runs;
    memcpy(writers->runs, runs, n_runs * sizeof(*runs));
    return writers;
}

/* What a slice says of its tokens is what the whole says, in no more runs than they have. */
static void slices_say_the_same(void **state)
{
    struct kv_writer_run runs[8];
    uint64_t room[32];
    struct kv_random random;
    uint32_t n_runs = sizeof(runs) / sizeof(runs[0]);

    (void)state;
    kv_random_init(&random, 5);
    for (uint32_t i = 0, end = 0; i < n_runs; i++) {
        end += 1 + (uint32_t)kv_random_below(&random, 60);
        runs[i] = (struct kv_writer_run){i + 1, i + 1 < n_runs ? end : UINT32_MAX};
    }
    struct kv_writers *writers = writers_of(runs, n_runs);
    for (uint32_t begin = 0; begin < TOKENS; begin++)
        for (uint32_t end = begin + 1; end <= TOKENS; end += 1 + end % 7) {
            struct kv_writers *slice = (struct kv_writers *)(void *)room;
            const size_t bytes = kv_writers_slice_bytes(writers, begin, end);
            uint32_t n_wanted = 1;

            for (uint32_t token = begin + 1; token < end; token++)
                n_wanted += writer_of(writers, token) != writer_of(writers, token - 1);
            assert_int_equal(bytes, sizeof(*slice) + n_wanted * sizeof(runs[0]));
            assert_in_range(bytes, 1, sizeof(room));
            memset(room, 0xa5, sizeof(room));
            kv_writers_slice(writers, begin, end, slice);
            assert_int_equal(slice->n_runs, n_wanted);
            assert_int_equal(((const uint8_t *)room)[bytes], 0xa5);
            for (uint32_t token = begin; token < end; token++)
                assert_true(writer_of(slice, token) == writer_of(writers, token));
        }
    free(writers);
}

static void a_fork_at_the_last_token_has_a_run_of_its_own(void **state)
{
    struct kv_writers *parent = kv_writers_create(NULL, 0, 1);
    struct kv_writers *child = kv_writers_create(parent, KV_TOKENS_MAX, 2);

    (void)state;
    assert_non_null(parent);
    assert_non_null(child);
    assert_int_equal(child->n_runs, 2);
    assert_true(kv_writers_own(child) == 2);
    assert_true(writer_of(child, KV_TOKENS_MAX - 1) == 1);
    free(child);
    free(parent);
}

/* Rows of a session of three writers: in order and picked, each row's CRC is its writer's. */
static void rows_are_checked_by_their_writers(void **state)
{
    static uint8_t rows[TOKENS][ROW_BYTES];
    const struct kv_writer_run runs[3] = {{11, 100}, {22, 101}, {33, UINT32_MAX}};
    struct kv_writers *writers = writers_of(runs, 3);
    uint32_t crcs[TOKENS], tokens[TOKENS];
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 3);
    kv_random_fill(&random, rows, sizeof(rows));
    for (unsigned picked = 0; picked < 2; picked++) {
        const uint32_t begin = 40;
        const uint32_t *given = picked != 0 ? tokens : NULL;

        for (uint32_t i = 0; i < TOKENS; i++)
            tokens[i] = picked != 0 ? (uint32_t)kv_random_below(&random, 200) : begin + i;
        kv_writers_crc(writers, 5, 6, rows, TOKENS, ROW_BYTES, begin, given, crcs);
        for (uint32_t i = 0; i < TOKENS; i++)
            assert_int_equal(
                crcs[i], kv_crc32c(kv_row_seed(writer_of(writers, tokens[i]), 5, 6, tokens[i]),
                                   rows[i], ROW_BYTES));
        assert_int_equal(
            kv_writers_verify(writers, 5, 6, rows, TOKENS, ROW_BYTES, begin, given, crcs),
            TOKENS);
        for (uint32_t i = 0; i < TOKENS; i++) {
            /* The right row, by another writer. */
            uint32_t right = crcs[i];

            crcs[i] = kv_crc32c(kv_row_seed(44, 5, 6, tokens[i]), rows[i], ROW_BYTES);
            assert_int_equal(
                kv_writers_verify(writers, 5, 6, rows, TOKENS, ROW_BYTES, begin, given, crcs),
                i);
            crcs[i] = right;
        }
    }
    assert_int_equal(kv_writers_verify(writers, 5, 6, rows, 0, ROW_BYTES, 0, NULL, crcs), 0);
    free(writers);
}

/* Rows of some units, of two sizes and more than a batch takes at once: each has the CRC that
 * it has alone. */
static void rows_of_several_units_are_summed_up_together(void **state)
{
    static uint8_t bytes[KV_CRC_BATCH * 4 * 2 * ROW_BYTES];
    const struct kv_writer_run runs[3] = {{11, 100}, {22, 101}, {33, UINT32_MAX}};
    const uint32_t counts[4] = {1, 3, 130, KV_CRC_BATCH};
    struct kv_writers *writers = writers_of(runs, 3);
    uint32_t crcs[KV_CRC_BATCH * 4], alone[KV_CRC_BATCH * 4], n = 0;
    struct kv_crc_batch batch;
    struct kv_random random;
    const uint8_t *at = bytes;

    (void)state;
    kv_random_init(&random, 4);
    kv_random_fill(&random, bytes, sizeof(bytes));
    kv_crc_batch_begin(&batch, writers, crcs);
    for (uint32_t unit = 0; unit < 9; unit++) {
        const uint32_t count = counts[unit % 4], begin = 98 + unit % 2;
        const size_t row_bytes = unit < 4 ? ROW_BYTES : 2 * ROW_BYTES;

        kv_crc_batch_add(&batch, unit, 9 - unit, at, count, row_bytes, begin);
        kv_writers_crc(writers, unit, 9 - unit, at, count, row_bytes, begin, NULL, alone + n);
        at += count * row_bytes;
        n += count;
    }
    kv_crc_batch_end(&batch);
    kv_crc_batch_end(&batch);
    assert_memory_equal(crcs, alone, n * sizeof(crcs[0]));
    free(writers);
}

/* What kv_wire.h promises of seeds. */
static void seeds_differ_where_they_must(void **state)
{
    const uint8_t a[ROW_BYTES] = {1, 2, 3}, b[ROW_BYTES] = {9};
    uint32_t seeds[4] = {kv_row_seed(1, 2, 3, 4), kv_row_seed(2, 2, 3, 4),
                         kv_row_seed(1, 3, 2, 4), kv_row_seed(1, 2, 3, 5)};

    (void)state;
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < i; j++)
            assert_int_not_equal(seeds[i], seeds[j]);
    /* From one seed to another a CRC changes by a constant, whatever the bytes are. */
    assert_int_equal(kv_crc32c(seeds[0], a, ROW_BYTES) ^ kv_crc32c(seeds[1], a, ROW_BYTES),
                     kv_crc32c(seeds[0], b, ROW_BYTES) ^ kv_crc32c(seeds[1], b, ROW_BYTES));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts_are_those_of_single_tokens),
        cmocka_unit_test(slices_say_the_same),
        cmocka_unit_test(a_fork_at_the_last_token_has_a_run_of_its_own),
        cmocka_unit_test(rows_are_checked_by_their_writers),
        cmocka_unit_test(rows_of_several_units_are_summed_up_together),
        cmocka_unit_test(seeds_differ_where_they_must),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
