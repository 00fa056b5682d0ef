/* summary.h and estimate.h: every implementation that this CPU has gives the bits of the scalar
 * one, of any shape, place and values, and writes nothing else.  Groups are built from rows of
 * any kind and say what their rows are, computed in double.  Then what the header promises:
 * with tight clusters the estimate is attention over the rows, what was scored exactly weighs
 * exactly, and where nothing is left there is nothing. */
#include "kernels/estimate.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 400,
    QUERIES_MAX = 9,
    SCORED_MAX = 200,
    GUARD = 0x5a,
};

static uint64_t seed;
static struct kv_random dice;

#define EXPECT(condition)                                                                    \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            print_error("KV_TEST_SEED=%llu round %d: %s\n", (unsigned long long)seed, round, \
                        #condition);                                                         \
            fail();                                                                          \
        }                                                                                    \
    } while (0)

static float *some_floats(size_t n, void **ret_base)
{
    return floats_exact(&dice, n * sizeof(float), sizeof(float), ret_base);
}

static uint32_t below(uint32_t n)
{
    return (uint32_t)kv_random_below(&dice, n);
}

static struct kv_summary_shape some_shape(uint32_t d_max)
{
    return (struct kv_summary_shape){
        .type = KV_KEY_FP32,
        .d_k = 1 + below(d_max),
        .d_v = 1 + below(d_max),
        .bits = below(2) == 0 ? KV_SUMMARY_16 : KV_SUMMARY_64,
        .rows = below(2) == 0 ? KV_SUMMARY_ROWS_LEAST : KV_SUMMARY_ROWS_MAX,
    };
}

static size_t elements_of(const struct kv_summary_shape *shape)
{
    return (size_t)shape->d_k + shape->d_v;
}

/* Builds from rows that lie `stride` bytes apart; returns the group, free with free(). */
static void *build(const struct kv_summary_shape *shape,
                   const void *rows,
                   size_t stride,
                   uint32_t n_rows,
                   uint64_t build_seed)
{
    void *bases[2], *group = malloc(kv_summary_bytes(shape));
    float *scratch = floats_exact(&dice, kv_summary_scratch_bytes(shape), 4, &bases[0]);
    struct kv_summary_build work;
    uint32_t first, n, n_slices = 0;

    assert_non_null(group);
    memset(scratch, GUARD, kv_summary_scratch_bytes(shape));
    kv_summary_build_begin(&work, shape, n_rows, build_seed, scratch);
    for (; kv_summary_build_next(&work, &first, &n); n_slices++) {
        /* Only those rows. */
        const size_t row_bytes = elements_of(shape) * (shape->type == KV_KEY_FP32 ? 4 : 2);
        const size_t bytes = n == 0 ? 0 : (n - 1) * stride + row_bytes;
        uint8_t *slice = floats_exact(&dice, bytes, 1, &bases[1]);

        assert_true(first + n <= n_rows && n <= KV_SUMMARY_SLICE);
        assert_true(n == 0 || first / KV_SUMMARY_SLICE == (first + n - 1) / KV_SUMMARY_SLICE);
        if (n > 0)
            memcpy(slice, (const uint8_t *)rows + first * stride, bytes);
        kv_summary_build_slice(&work, n > 0 ? slice : NULL, stride);
        free(bases[1]);
    }
    assert_true(n_slices <= 5 * (shape->rows / KV_SUMMARY_SLICE) + 4);
    kv_summary_build_end(&work, group);
    free(bases[0]);
    assert_true(kv_summary_valid(shape, group));
    return group;
}

static void *
build_floats(const struct kv_summary_shape *shape, const float *rows, uint32_t n_rows)
{
    return build(shape, rows, elements_of(shape) * sizeof(float), n_rows, 1);
}

static const uint8_t *numbers_of(const struct kv_summary_shape *shape, const void *group)
{
    return (const uint8_t *)group + kv_summary_at_numbers(shape);
}

static const uint16_t *counts_of(const struct kv_summary_shape *shape, const void *group)
{
    return (const void *)((const uint8_t *)group + kv_summary_at_counts(shape));
}

static double
key_of(const struct kv_summary_shape *shape, const void *group, size_t c, size_t i)
{
    const uint8_t *at = group;
    float scale;

    memcpy(&scale, at + kv_summary_at_key_scales(shape) + 4 * c, 4);
    return (double)scale *
           (int8_t)at[kv_summary_at_keys(shape) + kv_summary_key_element(shape, c, i)];
}

static double
value_of(const struct kv_summary_shape *shape, const void *group, size_t c, size_t i)
{
    const uint8_t *at = group;
    float scale;

    memcpy(&scale, at + kv_summary_at_value_scales(shape) + 4 * c, 4);
    return (double)scale *
           (int8_t)at[kv_summary_at_values(shape) + kv_summary_value_element(shape, c, i)];
}

static struct kv_summary_head head_of(const void *group)
{
    struct kv_summary_head head;

    memcpy(&head, group, sizeof(head));
    return head;
}

static void tiers(void **state)
{
    unsigned n = 0, n_estimate = 0;

    (void)state;
    for (; kv_summary_kernels_at(n) != NULL; n++)
        print_message("summary: %s\n", kv_summary_kernels_at(n)->name);
    for (; kv_estimate_kernels_at(n_estimate) != NULL; n_estimate++)
        print_message("estimate: %s\n", kv_estimate_kernels_at(n_estimate)->name);
    assert_true(n >= 1 && n_estimate >= 1);
    assert_string_equal(kv_summary_kernels_at(0)->name, "scalar");
    assert_string_equal(kv_estimate_kernels_at(0)->name, "scalar");
    assert_null(kv_summary_kernels_at(~0u));
    assert_null(kv_estimate_kernels_at(~0u));
}

/* ---- implementations --------------------------------------------------------------------- */

static void check_vectors(int round,
                          const struct kv_summary_kernels *plain,
                          const struct kv_summary_kernels *kernels)
{
    const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
    const size_t n = below(20), d_k = 1 + below(40), d = d_k + 1 + below(40), stride = d;
    const float factor = below(4) == 0 ? 1 : 0.3f + (float)below(9);
    float *vectors[2], *sums[2], *squares[2], *origin, *means;
    void *bases[8];
    uint8_t numbers[20];

    for (int i = 0; i < 2; i++) {
        vectors[i] = some_floats(n * d, &bases[i]);
        sums[i] = some_floats(d, &bases[2 + i]);
        squares[i] = some_floats(d, &bases[4 + i]);
    }
    origin = some_floats(d, &bases[6]);
    means = some_floats(7 * stride, &bases[7]);
    floats_fill(&dice, kind, vectors[0], n * d);
    floats_fill(&dice, kind, sums[0], d);
    floats_fill(&dice, kind, squares[0], d);
    floats_fill(&dice, kind, origin, d);
    floats_fill(&dice, kind, means, 7 * stride);
    if (n > 0)
        memcpy(vectors[1], vectors[0], n * d * sizeof(float));
    memcpy(sums[1], sums[0], d * sizeof(float));
    memcpy(squares[1], squares[0], d * sizeof(float));
    for (size_t i = 0; i < n; i++)
        numbers[i] = (uint8_t)(below(8) == 0 ? KV_SUMMARY_NONE : below(7));

    const double distance =
        plain->distance(vectors[0], n * d / d_k < n ? 0 : n, d_k, means, stride, numbers);
    const double of_other =
        kernels->distance(vectors[0], n * d / d_k < n ? 0 : n, d_k, means, stride, numbers);
    EXPECT(memcmp(&distance, &of_other, sizeof(distance)) == 0 ||
           (isnan(distance) && isnan(of_other)));
    plain->prepare(vectors[0], n, d_k, d, factor);
    kernels->prepare(vectors[1], n, d_k, d, factor);
    EXPECT(floats_all_same(vectors[1], vectors[0], n * d));
    const size_t n_added = plain->spread(vectors[0], n, d, origin, sums[0], squares[0]);
    EXPECT(kernels->spread(vectors[0], n, d, origin, sums[1], squares[1]) == n_added);
    EXPECT(floats_all_same(sums[1], sums[0], d));
    EXPECT(floats_all_same(squares[1], squares[0], d));
    for (int i = 0; i < 8; i++)
        free(bases[i]);
}

/* A group of random numbers, which no rows need have made. */
static void *some_group(const struct kv_summary_shape *shape, void **ret_base)
{
    uint8_t *group = floats_exact(&dice, kv_summary_bytes(shape), 4, ret_base);
    const size_t n_summaries = kv_summary_count(shape);
    const struct kv_summary_head head = {.variance = (float)below(100) / 64};
    float *scales = (void *)(group + kv_summary_at_key_scales(shape));

    kv_random_fill(&dice, group, kv_summary_bytes(shape));
    memcpy(group, &head, sizeof(head));
    for (size_t i = 0; i < 2 * n_summaries; i++)
        scales[i] = (float)below(1000) / 20000;
    return group;
}

static void check_add(int round,
                      const struct kv_estimate_kernels *plain,
                      const struct kv_estimate_kernels *kernels)
{
    const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
    const struct kv_summary_shape shape = some_shape(round % 7 == 0 ? 200 : 40);
    const size_t n_summaries = kv_summary_count(&shape), n_queries = below(QUERIES_MAX + 1);
    const size_t n_scored = below(3) == 0 ? 0 : below(SCORED_MAX);
    const size_t stride = n_scored + below(4);
    const bool shared = below(2) == 0;
    const size_t n_state = kv_estimate_floats(&shape, n_queries);
    void *bases[9];
    float *queries = some_floats(n_queries * shape.d_k, &bases[0]);
    int16_t *elements =
        floats_exact(&dice, n_queries * kv_summary_up(shape.d_k) * 2, 2, &bases[8]);
    float *scores = some_floats(n_queries * stride, &bases[1]);
    uint8_t *numbers = floats_exact(&dice, n_scored, 1, &bases[2]);
    uint16_t *counts =
        floats_exact(&dice, (shared ? 1 : n_queries) * n_summaries * 2, 2, &bases[3]);
    float *expected = some_floats(n_state, &bases[4]), *state = some_floats(n_state, &bases[5]);
    float *squares = some_floats(n_queries, &bases[7]), steps[QUERIES_MAX];

    floats_fill(&dice, kind, queries, n_queries * shape.d_k);
    const struct kv_estimate_queries prepared =
        kv_estimate_prepare(shape.d_k, queries, n_queries, elements, steps, squares);
    floats_fill(&dice, kind, scores, n_queries * stride);
    for (size_t i = 0; i < n_scored; i++)
        numbers[i] = below(5) == 0 ? KV_SUMMARY_NONE : (uint8_t)below((uint32_t)n_summaries);
    for (size_t i = 0; i < (shared ? 1 : n_queries) * n_summaries; i++)
        counts[i] = (uint16_t)(below(4) == 0 ? 0 : below(shape.rows + 1));
    /* Of some of the rows, so that others exceed their largest. */
    const size_t n_known = below(2) == 0 ? 0 : below((uint32_t)n_scored + 1);
    kv_estimate_begin(&shape, n_queries, 0.125f, scores, n_known, stride, expected);
    kv_estimate_begin(&shape, n_queries, 0.125f, scores, n_known, stride, state);
    for (size_t query = 0; query < n_queries; query++) {
        const float *of_query = scores + query * stride;
        const float most = plain->largest(of_query, n_known);
        const float of_other = kernels->largest(of_query, n_known);

        EXPECT(floats_all_same(&of_other, &most, 1) || (most == 0 && of_other == 0));
        for (size_t i = 0; i < n_known; i++)
            EXPECT(!(of_query[i] > most));
    }
    for (int i = 0; i < 3; i++) {
        const struct kv_estimate_input input = {
            .queries = prepared,
            .scale = i == 0 ? 0.125f : 1.5f,
            .counts = counts,
            .counts_stride = shared ? 0 : n_summaries,
            .numbers = numbers,
            .scores = scores,
            .n_scored = n_scored,
            .scores_stride = stride,
            .next = i == 1 ? NULL : queries, /* whatever is there is not read */
        };
        const void *group = some_group(&shape, &bases[6]);

        plain->add(&shape, group, &input, expected);
        kernels->add(&shape, group, &input, state);
        EXPECT(floats_all_same(state, expected, n_state));
        free(bases[6]);
    }
    for (int i = 0; i < 9; i++)
        if (i != 6)
            free(bases[i]);
}

static void same(void **state)
{
    const struct kv_summary_kernels *kernels;
    const struct kv_estimate_kernels *estimate;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        for (unsigned i = 1; (kernels = kv_summary_kernels_at(i)) != NULL; i++)
            check_vectors(round, kv_summary_kernels_at(0), kernels);
        for (unsigned i = 1; (estimate = kv_estimate_kernels_at(i)) != NULL; i++)
            check_add(round, kv_estimate_kernels_at(0), estimate);
    }
}

/* ---- groups ------------------------------------------------------------------------------ */

static bool is_in(const float *row, size_t d)
{
    for (size_t i = 0; i < d; i++)
        if (!(fabsf(row[i]) <= KV_SUMMARY_MOST))
            return false;
    return true;
}

/* What a group says is what its rows are. */
static void check_group(int round,
                        const struct kv_summary_shape *shape,
                        const void *group,
                        const float *rows,
                        uint32_t n_rows)
{
    const size_t d_k = shape->d_k, d = elements_of(shape);
    const uint8_t *numbers = numbers_of(shape, group);
    double variance = 0, magnitude = 0;
    size_t n_in = 0;

    EXPECT(head_of(group).n_rows == n_rows);
    for (size_t c = 0; c < kv_summary_count(shape); c++) {
        const size_t count = counts_of(shape, group)[c];

        for (size_t half = 0; half < 2; half++) {
            const size_t begin = half == 0 ? 0 : d_k, end = half == 0 ? d_k : d;
            double means[80], most = 0, size = 0;

            for (size_t i = begin; i < end; i++) {
                means[i] = 0;
                for (size_t row = 0; row < n_rows; row++)
                    if (numbers[row] == c) {
                        const double x = (double)rows[row * d + i];

                        means[i] += x / (double)count;
                        size = fabs(x) > size ? fabs(x) : size;
                    }
                most = fabs(means[i]) > most ? fabs(means[i]) : most;
            }
            for (size_t i = begin; i < end; i++) {
                const double mean =
                    half == 0 ? key_of(shape, group, c, i) : value_of(shape, group, c, i - d_k);

                /* Half a step of the integers, and the sum of `count` rows in fp32. */
                EXPECT(fabs(mean - means[i]) <=
                       most / 127 * 0.501 + ((double)count + 4) * 0x1p-23 * size + 1e-38);
            }
            for (size_t row = 0; row < n_rows && half == 0; row++)
                for (size_t i = 0; i < d_k && numbers[row] == c; i++) {
                    const double x = (double)rows[row * d + i];

                    variance += (x - means[i]) * (x - means[i]);
                    magnitude += x * x;
                }
        }
    }
    for (size_t row = 0; row < n_rows; row++) {
        EXPECT((numbers[row] != KV_SUMMARY_NONE) == is_in(rows + row * d, d));
        n_in += numbers[row] != KV_SUMMARY_NONE;
    }
    if (n_in > 0) {
        variance /= (double)(n_in * d_k);
        magnitude /= (double)(n_in * d_k);
    }
    EXPECT(fabs((double)head_of(group).variance - variance) <=
           1e-4 * variance + 1e-8 * magnitude + 1e-38);
}

static void groups(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS / 4; round++) {
        static const uint32_t lengths[] = {1,  2,  5,    15,   16,   17,   63,
                                           64, 65, 1023, 1024, 1025, 3071, 3072};
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const struct kv_summary_shape shape = some_shape(40);
        const size_t d = elements_of(&shape);
        const uint32_t n_lengths = sizeof(lengths) / sizeof(lengths[0]);
        const uint32_t length =
            lengths[below(n_lengths - (shape.rows == KV_SUMMARY_ROWS_LEAST ? 3 : 0))];
        const uint32_t n_rows = below(2) == 0 ? length : 1 + below(300);
        float *rows = malloc(n_rows * d * sizeof(float));
        void *group;

        assert_non_null(rows);
        floats_fill(&dice, kind, rows, n_rows * d);
        group = build_floats(&shape, rows, n_rows);
        check_group(round, &shape, group, rows, n_rows);
        free(group);
        free(rows);
    }
}

/* The same rows in other strides, and as another type, make the same group; another seed
 * another one. */
static void same_rows_same_group(void **state)
{
    enum {
        D = 24,
        N = 700
    };
    struct kv_summary_shape shape = {
        .type = KV_KEY_FP32, .d_k = 16, .d_v = 8, .bits = KV_SUMMARY_16, .rows = 1024};
    static float rows[N][D];
    static uint16_t halves[N][D];
    static uint8_t apart[N * 131];
    const size_t bytes = kv_summary_bytes(&shape);
    void *plain, *other;

    (void)state;
    for (size_t row = 0; row < N; row++)
        for (size_t i = 0; i < D; i++) {
            const float x = floats_uniform(&dice);
            uint32_t bits;

            memcpy(&bits, &x, sizeof(bits));
            bits &= 0xffff0000;
            memcpy(&rows[row][i], &bits, sizeof(bits));
            halves[row][i] = (uint16_t)(bits >> 16);
        }
    for (size_t row = 0; row < N; row++)
        memcpy(apart + row * 131, rows[row], sizeof(rows[row]));
    plain = build(&shape, rows, sizeof(rows[0]), N, 5);
    other = build(&shape, apart, 131, N, 5);
    assert_memory_equal(plain, other, bytes);
    free(other);
    other = build(&shape, rows, sizeof(rows[0]), N, 6);
    assert_memory_not_equal(plain, other, bytes);
    free(other);
    shape.type = KV_KEY_BF16;
    other = build(&shape, halves, sizeof(halves[0]), N, 5);
    assert_memory_equal(plain, other, bytes);
    free(other);
    free(plain);
}

/* Rows of a NaN among the first of each part are in no summary, and all others are. */
static void rows_that_are_none(void **state)
{
    enum {
        D = 12,
        N = 256
    };
    const struct kv_summary_shape shape = {
        .type = KV_KEY_FP32, .d_k = 4, .d_v = 8, .bits = KV_SUMMARY_64, .rows = 3072};
    static float rows[N][D];

    (void)state;
    for (int kept = 0; kept < 3; kept++) {
        void *group;
        size_t n_none = 0;

        floats_fill(&dice, FLOATS_UNIFORM, rows[0], (size_t)N * D);
        for (size_t row = 0; row < N; row++)
            if (kept == 0 || row != N - 1 || kept == 2)
                if (kept != 2 || row % 2 == 0)
                    rows[row][row % D] = row % 3 == 0 ? NAN : row % 3 == 1 ? -INFINITY : 2e15f;
        group = build_floats(&shape, rows[0], N);
        for (size_t row = 0; row < N; row++)
            n_none += numbers_of(&shape, group)[row] == KV_SUMMARY_NONE;
        assert_int_equal(n_none, kept == 0 ? N : kept == 1 ? N - 1 : N / 2);
        check_group(kept, &shape, group, rows[0], N);
        free(group);
    }
}

static void validity(void **state)
{
    const struct kv_summary_shape shape = {
        .type = KV_KEY_FP32, .d_k = 5, .d_v = 7, .bits = KV_SUMMARY_16, .rows = 1024};
    const struct kv_summary_shape other = {
        .type = KV_KEY_FP32, .d_k = 6, .d_v = 7, .bits = KV_SUMMARY_16, .rows = 1024};
    const struct kv_summary_shape longer = {
        .type = KV_KEY_FP32, .d_k = 5, .d_v = 7, .bits = KV_SUMMARY_16, .rows = 3072};
    float rows[100 * 12], huge = INFINITY;
    uint8_t *group, *copy = malloc(kv_summary_bytes(&longer));
    const size_t numbers = kv_summary_at_numbers(&shape);

    (void)state;
    assert_non_null(copy);
    assert_false(kv_summary_shape_valid(
        &(struct kv_summary_shape){KV_KEY_FP32, 0, 7, KV_SUMMARY_16, 1024}));
    assert_false(
        kv_summary_shape_valid(&(struct kv_summary_shape){KV_KEY_FP32, 5, 7, 5, 1024}));
    for (uint32_t of_group = 0; of_group <= 4096; of_group += 128)
        assert_int_equal(kv_summary_shape_valid(&(struct kv_summary_shape){
                             KV_KEY_FP32, 5, 7, KV_SUMMARY_16, of_group}),
                         of_group == 1024 || of_group == 3072);
    assert_true(kv_summary_shape_valid(&shape));
    /* What is on disk stays where it is. */
    assert_int_equal(kv_summary_at_counts(&shape), 16);
    assert_int_equal(kv_summary_at_key_scales(&shape), 48);
    assert_int_equal(kv_summary_at_value_scales(&shape), 112);
    assert_int_equal(kv_summary_at_keys(&shape), 176);
    assert_int_equal(kv_summary_at_values(&shape), 432);
    assert_int_equal(kv_summary_at_numbers(&shape), 688);
    assert_int_equal(kv_summary_bytes(&shape), 1712);
    assert_int_equal(kv_summary_at_numbers(&longer), 688);
    assert_int_equal(kv_summary_bytes(&longer), 3760);
    assert_int_equal(offsetof(struct kv_summary_head, rows), 10);
    assert_int_equal(offsetof(struct kv_summary_head, variance), 12);
    floats_fill(&dice, FLOATS_UNIFORM, rows, 100 * 12);
    group = build_floats(&shape, rows, 100);
    assert_false(kv_summary_valid(&other, group));
    memset(copy, KV_SUMMARY_NONE, kv_summary_bytes(&longer));
    memcpy(copy, group, kv_summary_bytes(&shape));
    assert_false(kv_summary_valid(&longer, copy)); /* a group of the other size */
    for (size_t i = 0; i < 12; i++) {
        memcpy(copy, group, kv_summary_bytes(&shape));
        copy[i] ^= 0x80;
        /* 128 rows more, which are in no summary, are nothing bad. */
        assert_int_equal(kv_summary_valid(&shape, copy), i == 2);
    }
    for (size_t i = 0; i < 5; i++) {
        const size_t places[] = {12, 16, kv_summary_at_key_scales(&shape) + 8,
                                 kv_summary_at_value_scales(&shape) + 60, 48};

        memcpy(copy, group, kv_summary_bytes(&shape));
        memcpy(copy + places[i], &huge, sizeof(huge));
        assert_false(kv_summary_valid(&shape, copy));
    }
    memcpy(copy, group, kv_summary_bytes(&shape));
    copy[numbers + 3] = 16;
    assert_false(kv_summary_valid(&shape, copy));
    copy[numbers + 3] = KV_SUMMARY_NONE; /* its count is one too many */
    assert_false(kv_summary_valid(&shape, copy));
    memcpy(copy, group, kv_summary_bytes(&shape));
    copy[numbers + 100] = 0;
    assert_false(kv_summary_valid(&shape, copy));
    free(group);
    free(copy);
}

/* ---- answers ----------------------------------------------------------------------------- */

/* Tokens of [0, end), each with a chance of 1 in `of`. */
static size_t some_tokens(uint32_t end, uint32_t of, uint32_t *ret_tokens)
{
    size_t n = 0;

    for (uint32_t token = 0; token < end; token++)
        if (below(of) == 0)
            ret_tokens[n++] = token;
    return n;
}

static bool has(const uint32_t *tokens, size_t n, uint32_t token)
{
    for (size_t i = 0; i < n; i++)
        if (tokens[i] == token)
            return true;
    return false;
}

static void counting(void **state)
{
    enum {
        END = 900
    };
    static uint32_t taken[END], scored[END];
    static uint8_t marks[KV_SUMMARY_ROWS_MAX];
    static float rows[400 * 8];

    (void)state;
    for (int round = 0; round < ROUNDS / 4; round++) {
        const struct kv_summary_shape shape = {
            .type = KV_KEY_FP32, .d_k = 4, .d_v = 4, .bits = KV_SUMMARY_16, .rows = 1024};
        const uint32_t n_rows = 1 + below(400), first = below(END - n_rows);
        const uint32_t begin = below(3) == 0 ? below(END) : 0;
        const uint32_t end = below(3) == 0 ? begin + below(END) : UINT32_MAX;
        const size_t n_taken = some_tokens(END, 1 + below(20), taken);
        const size_t n_scored = some_tokens(END, 1 + below(9), scored);
        uint16_t counts[16], expected[16] = {0};
        uint8_t numbers[KV_SUMMARY_ROWS_MAX];
        const uint32_t from = begin > first ? begin : first;
        size_t n_before = 0, n_scored_before = 0, at = 0, n_left = 0;
        struct kv_estimate_counted counted;
        void *group;

        floats_fill(&dice, FLOATS_UNIFORM, rows, 400 * 8);
        rows[below(n_rows) * 8] = NAN;
        group = build_floats(&shape, rows, n_rows);
        while (n_before < n_taken && taken[n_before] < from)
            n_before++;
        while (n_scored_before < n_scored && scored[n_scored_before] < from)
            n_scored_before++;
        counted = kv_estimate_count(&shape, group, first, begin, end, taken + n_before,
                                    n_taken - n_before, scored + n_scored_before,
                                    n_scored - n_scored_before, marks, counts, numbers);
        for (uint32_t row = 0; row < n_rows; row++) {
            const uint32_t token = first + row;
            const uint8_t number = numbers_of(&shape, group)[row];

            const bool is_left = number != KV_SUMMARY_NONE && !has(taken, n_taken, token);

            if (token < begin || token >= end)
                continue;
            n_left += is_left;
            if (!has(scored, n_scored, token)) {
                if (is_left)
                    expected[number]++;
                continue;
            }
            EXPECT(at < counted.n_scored && scored[n_scored_before + at] == token);
            EXPECT(numbers[at] == (is_left ? number : KV_SUMMARY_NONE));
            at++;
        }
        EXPECT(counted.n_scored == at && counted.n_rows == n_left);
        for (size_t i = 0; i < counted.n_selected; i++)
            EXPECT(taken[n_before + i] < first + n_rows && taken[n_before + i] < end);
        EXPECT(n_before + counted.n_selected == n_taken ||
               taken[n_before + counted.n_selected] >= end ||
               taken[n_before + counted.n_selected] >= first + n_rows);
        for (size_t i = 0; i < sizeof(marks); i++)
            EXPECT(marks[i] == 0);
        EXPECT(memcmp(counts, expected, sizeof(counts)) == 0);
        free(group);
    }
}

enum {
    DK = 24,
    DV = 20,
    POINTS = 16,
    N = 56 * POINTS,
    G = 5,
};

static const struct kv_summary_shape answered = {
    .type = KV_KEY_FP32, .d_k = DK, .d_v = DV, .bits = KV_SUMMARY_16, .rows = 3072};

/* Rows about points, `spread` from them, one point after the other: so that the first
 * centroids, one from each part of the rows, are of all points. */
static void tight_rows(float rows[N][DK + DV], float spread)
{
    float points[POINTS][DK + DV];

    floats_fill(&dice, FLOATS_UNIFORM, points[0], sizeof(points) / sizeof(float));
    for (size_t row = 0; row < N; row++)
        for (size_t i = 0; i < DK + DV; i++)
            rows[row][i] = points[row * POINTS / N][i] + spread * floats_uniform(&dice);
}

static double score_of(const float *query, const float *row)
{
    double sum = 0;

    for (size_t i = 0; i < DK; i++)
        sum += (double)query[i] * (double)row[i];
    return sum;
}

/* Attention in double over rows that `among` says. */
static double exact(const float rows[N][DK + DV],
                    const float *query,
                    double scale,
                    const bool *among,
                    double *ret_output)
{
    double sum = 0;

    memset(ret_output, 0, DV * sizeof(*ret_output));
    for (size_t row = 0; row < N; row++)
        if (among[row]) {
            const double weight = exp(scale * score_of(query, rows[row]));

            sum += weight;
            for (size_t i = 0; i < DV; i++)
                ret_output[i] += weight * (double)rows[row][DK + i];
        }
    for (size_t i = 0; i < DV && sum > 0; i++)
        ret_output[i] /= sum;
    return log(sum);
}

/* One estimate for all heads, in two parts of the scored ones if asked. */
static void ask(const void *group,
                const float *queries,
                const uint16_t *counts,
                const uint8_t *numbers,
                const float *scores,
                size_t n_scored,
                float ret_output[G][DV],
                float *ret_lse)
{
    float squares[G], steps[G];
    int16_t elements[G * 32];
    const struct kv_estimate_input input = {
        .queries = kv_estimate_prepare(DK, queries, G, elements, steps, squares),
        .scale = 0.5f,
        .counts = counts,
        .numbers = numbers,
        .scores = scores,
        .n_scored = n_scored,
        .scores_stride = n_scored,
    };
    float state[G * (1 + KV_ESTIMATE_LANES + DV)];

    kv_estimate_begin(&answered, G, 0.5f, scores, n_scored, n_scored, state);
    kv_estimate_add(&answered, group, &input, state);
    kv_estimate_end(&answered, G, state, ret_output[0], ret_lse);
}

static void estimate_is_near(void **state)
{
    static float rows[N][DK + DV];
    static const float spreads[] = {0, 0.01f, 0.1f};

    (void)state;
    for (int round = 0; round < 3; round++) {
        float queries[G][DK], output[G][DV], lse[G];
        bool all[N];
        void *group;

        tight_rows(rows, spreads[round]);
        floats_fill(&dice, FLOATS_UNIFORM, queries[0], (size_t)G * DK);
        memset(all, 1, sizeof(all));
        group = build_floats(&answered, rows[0], N);
        ask(group, queries[0], counts_of(&answered, group), NULL, NULL, 0, output, lse);
        for (size_t query = 0; query < G; query++) {
            double values[DV];
            const double exact_lse = exact(rows, queries[query], 0.5, all, values);

            /* Integers of 8 bits, up to 1/254 of 1, in 24 elements. */
            EXPECT(fabs((double)lse[query] - exact_lse) <= 0.03 + (double)spreads[round] / 4);
            for (size_t i = 0; i < DV; i++)
                EXPECT(fabs((double)output[query][i] - values[i]) <=
                       0.03 + (double)spreads[round] / 4);
        }
        free(group);
    }
}

/* All rows taken: nothing.  All scored and none taken: exactly their weights, of mean values.
 * Some of each, in two groups: the parts add up. */
static void leftovers(void **state)
{
    static float rows[N][DK + DV], scores[G][N];
    static uint32_t tokens[N];
    static uint8_t numbers[KV_SUMMARY_ROWS_MAX], marks[KV_SUMMARY_ROWS_MAX];
    float queries[G][DK], output[G][DV], lse[G];
    uint16_t counts[16];
    bool all[N];
    void *group;
    struct kv_estimate_counted n;
    int round = 0;

    (void)state;
    tight_rows(rows, 0.3f);
    floats_fill(&dice, FLOATS_UNIFORM, queries[0], (size_t)G * DK);
    memset(all, 1, sizeof(all));
    for (uint32_t row = 0; row < N; row++)
        tokens[row] = 70 + row;
    group = build_floats(&answered, rows[0], N);

    n = kv_estimate_count(&answered, group, 70, 0, 70 + N, tokens, N, NULL, 0, marks, counts,
                          numbers);
    assert_int_equal(n.n_selected, N);
    assert_int_equal(n.n_rows, 0);
    ask(group, queries[0], counts, NULL, NULL, 0, output, lse);
    for (size_t query = 0; query < G; query++) {
        EXPECT(lse[query] == -INFINITY);
        for (size_t i = 0; i < DV; i++)
            EXPECT(output[query][i] == 0);
    }

    n = kv_estimate_count(&answered, group, 70, 0, 70 + N, NULL, 0, tokens, N, marks, counts,
                          numbers);
    assert_int_equal(n.n_scored, N);
    assert_int_equal(n.n_rows, N);
    for (size_t i = 0; i < 16; i++)
        assert_int_equal(counts[i], 0);
    for (size_t query = 0; query < G; query++)
        for (size_t row = 0; row < N; row++)
            scores[query][row] = (float)score_of(queries[query], rows[row]);
    ask(group, queries[0], counts, numbers, scores[0], N, output, lse);
    for (size_t query = 0; query < G; query++) {
        double values[DV], expected[DV] = {0}, sum = 0;

        EXPECT(fabs((double)lse[query] - exact(rows, queries[query], 0.5, all, values)) < 1e-5);
        for (size_t row = 0; row < N; row++) {
            const double weight = exp(0.5 * (double)scores[query][row]);

            sum += weight;
            for (size_t i = 0; i < DV; i++)
                expected[i] += weight * value_of(&answered, group, numbers[row], i);
        }
        for (size_t i = 0; i < DV; i++)
            EXPECT(fabs((double)output[query][i] - expected[i] / sum) < 1e-4);
    }
    free(group);
}

/* corr as the header says, and never above 1: one summary of two rows. */
static void correction(void **state)
{
    const struct kv_summary_shape shape = {
        .type = KV_KEY_FP32, .d_k = 2, .d_v = 1, .bits = KV_SUMMARY_16, .rows = 1024};
    float vectors[2][3] = {{1, 2, 3}, {1, 2, 3}}, query[2] = {0, 0}, output[1], lse[1];
    float work[2 + KV_ESTIMATE_LANES], square, step;
    int16_t elements[16];
    void *group = build_floats(&shape, vectors[0], 2);
    struct kv_estimate_input input = {.scale = 1, .counts = counts_of(&shape, group)};
    struct kv_summary_head head = head_of(group);
    int round = 0;

    (void)state;
    head.variance = 0.5f;
    memcpy(group, &head, sizeof(head));
    for (round = 0; round < 9; round++) {
        const double corr = 0.15 * round * round * 0.5;

        query[0] = (float)round * 2;
        query[1] = -(float)round; /* its product with the key is 0 */
        input.queries = kv_estimate_prepare(2, query, 1, elements, &step, &square);
        kv_estimate_begin(&shape, 1, 1, NULL, 0, 0, work);
        kv_estimate_add(&shape, group, &input, work);
        kv_estimate_end(&shape, 1, work, output, lse);
        EXPECT(fabs((double)lse[0] - log(2) - fmin(1, corr * 5)) < 0.02 + 0.03 * round);
        EXPECT(fabs((double)output[0] - 3) < 1e-5);
    }
    free(group);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),
        cmocka_unit_test(same),
        cmocka_unit_test(groups),
        cmocka_unit_test(same_rows_same_group),
        cmocka_unit_test(rows_that_are_none),
        cmocka_unit_test(validity),
        cmocka_unit_test(counting),
        cmocka_unit_test(estimate_is_near),
        cmocka_unit_test(leftovers),
        cmocka_unit_test(correction),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
