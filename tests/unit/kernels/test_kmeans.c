/* kmeans.h: every implementation that this CPU has gives the bits of the scalar one, of any
 * shape, place, values and metric, also of NaN, infinities and ties, in one call or in many,
 * and writes nothing else.  The scalar one is checked against plain sums in double.  Then what
 * the header promises: empty centroids split large clusters, rows that are not finite spoil
 * nothing, distances fall from step to step, and centroids of the inner product stay as short
 * as rows are. */
#include "kernels/kmeans.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
#ifdef __SANITIZE_ADDRESS__
    ROUNDS = 100, /* each takes fifty times as long */
#else
    ROUNDS = 700,
#endif
    N_MAX = 300,
    GUARD = 0x5a,
};

static const char *const kind_names[] = {"uniform", "integers", "equal", "any bits", "special"};

static uint64_t seed;
static struct kv_random dice;

#define EXPECT(condition)                                                                   \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            print_error("KV_TEST_SEED=%llu round %d %s %s d %u m %u bits %u n %zu%s: %s\n", \
                        (unsigned long long)seed, world->round, kernels->name,              \
                        kind_names[world->kind], world->shape.d, world->shape.m,            \
                        world->shape.bits, world->n, world->book.augments ? " lifted" : "", \
                        #condition);                                                        \
            fail();                                                                         \
        }                                                                                   \
    } while (0)

/* Centroids and keys of a random shape. */
struct world {
    int round;
    enum float_kind kind;
    struct kv_pq_shape shape;
    size_t n, codes_stride, n_codes, n_table, size;
    struct kv_kmeans_codebook book;
    float *keys;
    void *bases[5];
};

/* What a step leaves. */
struct trace {
    struct kv_kmeans_sums sums;
    uint8_t *codes;
    void *bases[4];
};

static float *some_floats(size_t n, void **ret_base)
{
    return floats_exact(&dice, n * sizeof(float), sizeof(float), ret_base);
}

static struct kv_pq_shape some_shape(void)
{
    struct kv_pq_shape shape;

    do {
        shape.m = 1 + (uint32_t)kv_random_below(&dice, KV_PQ_SUBSPACES_MAX);
        shape.d = shape.m * (1 + (uint32_t)kv_random_below(&dice, 256 / shape.m));
    } while (shape.d < 8);
    shape.bits = 1 + (uint32_t)kv_random_below(&dice, KV_PQ_BITS_MAX);
    return shape;
}

static void make_world(struct world *world, int round)
{
    const struct kv_pq_shape *shape = &world->shape;

    memset(world, 0, sizeof(*world));
    world->round = round;
    world->kind = (enum float_kind)(round % FLOATS_N_KINDS);
    world->shape = some_shape();
    world->n = kv_random_below(&dice, kv_random_below(&dice, 4) == 0 ? N_MAX + 1 : 16);
    world->codes_stride = world->n + kv_random_below(&dice, 5);
    world->n_codes = shape->m * world->codes_stride;
    world->n_table = kv_pq_table_size(shape);
    world->size = kv_pq_centroids_size(shape);
    world->keys = some_floats(world->n * shape->d, &world->bases[0]);
    world->book.centroids = some_floats(world->size, &world->bases[1]);
    world->book.half_sq_norms = some_floats(world->n_table, &world->bases[2]);
    floats_fill(&dice, world->kind, world->keys, world->n * shape->d);
    floats_fill(&dice, world->kind, world->book.centroids, world->size);
    if (round / FLOATS_N_KINDS % 2 == 1) {
        world->book.augments = some_floats(world->n_table, &world->bases[3]);
        world->book.max_norm_sq = some_floats(shape->m, &world->bases[4]);
        memset(world->book.max_norm_sq, 0, shape->m * sizeof(float));
        kv_kmeans_kernels_at(0)->max_norm_sq(shape, world->keys, world->n / 2,
                                             world->book.max_norm_sq);
        for (size_t i = 0; i < world->n_table; i++)
            world->book.augments[i] = fabsf(floats_one(&dice, world->kind));
    }
    kv_kmeans_kernels_at(0)->half_sq_norms(shape, &world->book);
}

static void clear_world(struct world *world)
{
    for (int i = 0; i < 5; i++)
        free(world->bases[i]);
}

static void make_trace(const struct world *world, struct trace *ret_trace)
{
    struct trace *trace = ret_trace;

    memset(trace, 0, sizeof(*trace));
    trace->sums.sums = some_floats(world->size, &trace->bases[0]);
    trace->sums.counts = floats_exact(&dice, world->n_table * 4, 4, &trace->bases[1]);
    if (world->book.augments != NULL) {
        trace->sums.augments = some_floats(world->n_table, &trace->bases[2]);
        memset(trace->sums.augments, 0, world->n_table * sizeof(float));
    }
    trace->codes = floats_exact(&dice, world->n_codes, 1, &trace->bases[3]);
    memset(trace->sums.sums, 0, world->size * sizeof(float));
    memset(trace->sums.counts, 0, world->n_table * sizeof(uint32_t));
    memset(trace->codes, GUARD, world->n_codes);
}

static void clear_trace(struct trace *trace)
{
    for (int i = 0; i < 4; i++)
        free(trace->bases[i]);
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    for (; kv_kmeans_kernels_at(n) != NULL; n++)
        print_message("kmeans: %s\n", kv_kmeans_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_kmeans_kernels_at(0)->name, "scalar");
    assert_null(kv_kmeans_kernels_at(~0u));
}

/* A step in pieces of any length, and codes without it. */
static void check_step(const struct world *world,
                       const struct kv_kmeans_kernels *plain,
                       const struct kv_kmeans_kernels *kernels)
{
    struct trace expected, trace;

    make_trace(world, &expected);
    make_trace(world, &trace);
    plain->step(&world->shape, &world->book, world->keys, world->n, expected.codes,
                world->codes_stride, &expected.sums);
    for (size_t row = 0, n; row < world->n; row += n) {
        n = 1 + kv_random_below(&dice, world->n - row);
        kernels->step(&world->shape, &world->book, world->keys + row * world->shape.d, n,
                      trace.codes + row, world->codes_stride, &trace.sums);
    }
    EXPECT(memcmp(trace.codes, expected.codes, world->n_codes) == 0);
    EXPECT(floats_all_same(trace.sums.sums, expected.sums.sums, world->size));
    EXPECT(memcmp(trace.sums.counts, expected.sums.counts, world->n_table * 4) == 0);
    EXPECT(world->book.augments == NULL ||
           floats_all_same(trace.sums.augments, expected.sums.augments, world->n_table));
    for (size_t j = 0; j < world->shape.m; j++)
        for (size_t i = world->n; i < world->codes_stride; i++)
            EXPECT(trace.codes[j * world->codes_stride + i] == GUARD);
    memset(trace.codes, GUARD, world->n_codes);
    kernels->encode(&world->shape, &world->book, world->keys, world->n, trace.codes,
                    world->codes_stride);
    EXPECT(memcmp(trace.codes, expected.codes, world->n_codes) == 0);
    clear_trace(&expected);
    clear_trace(&trace);
}

static void check_squares(const struct world *world,
                          const struct kv_kmeans_kernels *plain,
                          const struct kv_kmeans_kernels *kernels)
{
    void *bases[3];
    float *expected = some_floats(world->shape.m, &bases[0]);
    float *longest = some_floats(world->shape.m, &bases[1]);
    float *half_squares = some_floats(world->n_table, &bases[2]);
    struct kv_kmeans_codebook book = world->book;

    memset(expected, 0, world->shape.m * sizeof(float));
    memset(longest, 0, world->shape.m * sizeof(float));
    plain->max_norm_sq(&world->shape, world->keys, world->n, expected);
    kernels->max_norm_sq(&world->shape, world->keys, world->n, longest);
    EXPECT(floats_all_same(longest, expected, world->shape.m));
    for (size_t j = 0; j < world->shape.m; j++)
        EXPECT(isfinite(longest[j]));
    book.half_sq_norms = half_squares;
    kernels->half_sq_norms(&world->shape, &book);
    EXPECT(floats_all_same(half_squares, world->book.half_sq_norms, world->n_table));
    for (int i = 0; i < 3; i++)
        free(bases[i]);
}

static void same(void **state)
{
    const struct kv_kmeans_kernels *plain = kv_kmeans_kernels_at(0), *kernels;
    struct world world;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        make_world(&world, round);
        for (unsigned i = 1; (kernels = kv_kmeans_kernels_at(i)) != NULL; i++) {
            check_squares(&world, plain, kernels);
            check_step(&world, plain, kernels);
        }
        clear_world(&world);
    }
}

static double centroid_at(const struct world *world, size_t j, size_t code, size_t i)
{
    const size_t n_centroids = kv_pq_n_centroids(&world->shape);
    const size_t width = world->shape.d / world->shape.m;

    return (double)world->book.centroids[(j * width + i) * n_centroids + code];
}

static double key_at(const struct world *world, size_t row, size_t j, size_t i)
{
    return (double)
        world->keys[row * world->shape.d + j * (world->shape.d / world->shape.m) + i];
}

/* In double, as is `ret_magnitude`, the size of what was summed. */
static double
distance_of(const struct world *world, size_t row, size_t j, size_t code, double *ret_magnitude)
{
    const size_t width = world->shape.d / world->shape.m;
    const size_t at = j * kv_pq_n_centroids(&world->shape) + code;
    double sum = 0, size = 0, square = 0, lift = 0;

    for (size_t i = 0; i < width; i++) {
        const double x = key_at(world, row, j, i), c = centroid_at(world, j, code, i);

        sum += c * c / 2 - x * c;
        size += c * c + fabs(x * c);
        square += x * x;
    }
    if (world->book.augments != NULL) {
        const double c = (double)world->book.augments[at];

        if ((double)world->book.max_norm_sq[j] > square)
            lift = sqrt((double)world->book.max_norm_sq[j] - square);
        sum += c * c / 2 - lift * c;
        /* A lift's own rounding is at most the root of its square's. */
        size += c * c + lift * c + c * sqrt((double)world->book.max_norm_sq[j] * 0x1p24);
    }
    *ret_magnitude = size;
    return sum;
}

/* Nothing is nearer than the code's centroid, but for rounding. */
static void check_nearest(const struct world *world, const struct kv_kmeans_kernels *kernels)
{
    const size_t width = world->shape.d / world->shape.m;
    const size_t n_centroids = kv_pq_n_centroids(&world->shape);
    uint8_t *codes = malloc(world->shape.m * world->n + 1);

    assert_non_null(codes);
    kernels->encode(&world->shape, &world->book, world->keys, world->n, codes, world->n);
    for (size_t row = 0; row < world->n; row++)
        for (size_t j = 0; j < world->shape.m; j++) {
            const size_t code = codes[j * world->n + row];
            double least = INFINITY, of_code = INFINITY, magnitude = 0;
            size_t first = 0;

            EXPECT(code < n_centroids);
            for (size_t c = 0; c < n_centroids; c++) {
                double size, distance = distance_of(world, row, j, c, &size);

                magnitude = size > magnitude ? size : magnitude;
                of_code = c == code ? distance : of_code;
                if (distance < least) {
                    least = distance;
                    first = c;
                }
            }
            EXPECT(of_code - least <= (double)(2 * width + 4) * 0x1p-24 * magnitude);
            /* Sums of small integers are exact: of ties it is the lower code. */
            if (world->kind == FLOATS_INTEGERS && world->book.augments == NULL)
                EXPECT(code == first);
        }
    free(codes);
}

/* Sums, counts, means and how far the centroids moved, in double; then empty ones. */
static void check_update(const struct world *world, const struct kv_kmeans_kernels *kernels)
{
    const size_t n_centroids = kv_pq_n_centroids(&world->shape);
    const size_t width = world->shape.d / world->shape.m;
    const double split = 1.0 / 256;
    struct world after = *world;
    struct trace trace;
    double moved, expected = 0;
    void *bases[3] = {NULL};

    make_trace(world, &trace);
    kernels->step(&world->shape, &world->book, world->keys, world->n, trace.codes,
                  world->codes_stride, &trace.sums);
    after.book.centroids = some_floats(world->size, &bases[0]);
    after.book.half_sq_norms = some_floats(world->n_table, &bases[1]);
    memcpy(after.book.centroids, world->book.centroids, world->size * sizeof(float));
    if (world->book.augments != NULL) {
        after.book.augments = some_floats(world->n_table, &bases[2]);
        memcpy(after.book.augments, world->book.augments, world->n_table * sizeof(float));
    }
    moved = kv_kmeans_update(&world->shape, &after.book, &trace.sums);
    for (size_t j = 0; j < world->shape.m; j++) {
        size_t counts[1 << KV_PQ_BITS_MAX] = {0}, left[1 << KV_PQ_BITS_MAX];
        double means[1 << KV_PQ_BITS_MAX][256], bounds[1 << KV_PQ_BITS_MAX][256];

        for (size_t row = 0; row < world->n; row++)
            counts[trace.codes[j * world->codes_stride + row]]++;
        memcpy(left, counts, sizeof(left));
        for (size_t c = 0; c < n_centroids; c++)
            for (size_t i = 0; i < width; i++) {
                const double old = centroid_at(world, j, c, i);
                double sum = 0, magnitude = 0;

                for (size_t row = 0; row < world->n; row++)
                    if (trace.codes[j * world->codes_stride + row] == c) {
                        sum += key_at(world, row, j, i);
                        magnitude += fabs(key_at(world, row, j, i));
                    }
                means[c][i] = counts[c] > 0 ? sum / (double)counts[c] : old;
                bounds[c][i] = counts[c] > 0 ? ((double)counts[c] + 2) * 0x1p-24 * magnitude /
                                                   (double)counts[c]
                                             : 0;
                expected += (means[c][i] - old) * (means[c][i] - old);
            }
        for (size_t c = 0; c < n_centroids; c++) {
            size_t largest = 0;

            if (counts[c] > 0)
                continue;
            for (size_t other = 1; other < n_centroids; other++)
                largest = left[other] > left[largest] ? other : largest;
            if (left[largest] < 2)
                break;
            left[c] = left[largest] / 2;
            left[largest] -= left[c];
            for (size_t i = 0; i < width; i++) {
                const double by = i % 2 == 0 ? split : -split;

                bounds[c][i] = bounds[largest][i] * 2 + 0x1p-23 * fabs(means[largest][i]);
                means[c][i] = means[largest][i] * (1 + by);
            }
        }
        for (size_t c = 0; c < n_centroids; c++)
            for (size_t i = 0; i < width; i++)
                EXPECT(fabs(centroid_at(&after, j, c, i) - means[c][i]) <= bounds[c][i]);
    }
    EXPECT(fabs(moved - expected) <= 1e-5 * expected);
    for (size_t i = 0; i < world->size; i++)
        EXPECT(trace.sums.sums[i] == 0);
    for (size_t i = 0; i < world->n_table; i++)
        EXPECT(trace.sums.counts[i] == 0 &&
               (trace.sums.augments == NULL || trace.sums.augments[i] == 0));
    for (size_t j = 0; j < world->shape.m; j++)
        for (size_t c = 0; c < n_centroids; c++) {
            const size_t at = j * n_centroids + c;
            double sum = 0;

            for (size_t i = 0; i < width; i++)
                sum += pow(centroid_at(&after, j, c, i), 2) / 2;
            if (after.book.augments != NULL)
                sum += pow((double)after.book.augments[at], 2) / 2;
            EXPECT(fabs((double)after.book.half_sq_norms[at] - sum) <=
                   (double)(width + 1) * 0x1p-24 * sum);
        }
    for (int i = 0; i < 3; i++)
        free(bases[i]);
    clear_trace(&trace);
}

static void right(void **state)
{
    const struct kv_kmeans_kernels *kernels;
    struct world world;

    (void)state;
    for (int round = 0; round < ROUNDS / 4; round++) {
        /* uniform, integers; without lifts and with */
        make_world(&world, round / 2 * FLOATS_N_KINDS + round % 2);
        for (unsigned i = 0; (kernels = kv_kmeans_kernels_at(i)) != NULL; i++) {
            if (world.n > 40)
                world.n = 40;
            check_nearest(&world, kernels);
            check_update(&world, kernels);
        }
        clear_world(&world);
    }
}

/* A NaN is never the nearest, and where all are, it is the first. */
static void nan_is_never_nearest(void **state)
{
    const struct kv_pq_shape shape = {.d = 8, .m = 1, .bits = 5};
    const struct kv_kmeans_kernels *kernels;
    float centroids[8 * 32], half_squares[32], keys[7 * 8];
    const struct kv_kmeans_codebook book = {.centroids = centroids,
                                            .half_sq_norms = half_squares};
    uint8_t codes[7];

    (void)state;
    for (unsigned tier = 0; (kernels = kv_kmeans_kernels_at(tier)) != NULL; tier++)
        for (unsigned only = 0; only < 32; only++) {
            floats_fill(&dice, FLOATS_UNIFORM, centroids, 8 * 32);
            floats_fill(&dice, FLOATS_UNIFORM, keys, 7 * 8);
            for (unsigned c = 0; c < 32; c++)
                centroids[3 * 32 + c] = c == only ? 0.5f : NAN;
            keys[6 * 8] = NAN;
            kernels->half_sq_norms(&shape, &book);
            kernels->encode(&shape, &book, keys, 7, codes, 7);
            for (unsigned row = 0; row < 7; row++)
                assert_int_equal(codes[row], row == 6 ? 0 : only);
        }
}

enum {
    D = 24,
    M = 2,
    BITS = 5,
    N = 700,
    STEPS = 12,
};

/* A k-means of N keys from the first ones on. */
struct run {
    struct kv_pq_shape shape;
    float keys[N][D], centroids[D << BITS], half_squares[M << BITS], sums[D << BITS];
    float augments[M << BITS], longest[M], lift_sums[M << BITS];
    uint32_t counts[M << BITS];
    uint8_t codes[M * N];
    struct kv_kmeans_codebook book;
    struct kv_kmeans_sums all;
};

static struct run run;

static void start_run(bool lifted)
{
    run.shape = (struct kv_pq_shape){.d = D, .m = M, .bits = BITS};
    run.book = (struct kv_kmeans_codebook){.centroids = run.centroids,
                                           .half_sq_norms = run.half_squares};
    run.all = (struct kv_kmeans_sums){.sums = run.sums, .counts = run.counts};
    memset(run.sums, 0, sizeof(run.sums));
    memset(run.counts, 0, sizeof(run.counts));
    if (lifted) {
        run.book.augments = run.augments;
        run.book.max_norm_sq = run.longest;
        run.all.augments = run.lift_sums;
        memset(run.lift_sums, 0, sizeof(run.lift_sums));
        memset(run.longest, 0, sizeof(run.longest));
        kv_kmeans_max_norm_sq(&run.shape, run.keys[0], N, run.longest);
    }
    for (uint32_t c = 0; c < 1u << BITS; c++)
        kv_kmeans_set_centroid(&run.shape, &run.book, c, run.keys[c]);
    kv_kmeans_half_sq_norms(&run.shape, &run.book);
}

static double run_step(void)
{
    kv_kmeans_step(&run.shape, &run.book, run.keys[0], N, run.codes, N, &run.all);
    return kv_kmeans_update(&run.shape, &run.book, &run.all);
}

static unsigned codes_in_use(size_t j)
{
    bool seen[1 << BITS] = {false};
    unsigned n = 0;

    for (size_t row = 0; row < N; row++) {
        n += !seen[run.codes[j * N + row]];
        seen[run.codes[j * N + row]] = true;
    }
    return n;
}

/* Squared distances of all finite rows to their centroids, with lifts if there are any. */
static double run_error(void)
{
    const size_t width = D / M;
    double sum = 0;

    for (size_t row = 0; row < N; row++)
        for (size_t j = 0; j < M; j++) {
            const size_t code = run.codes[j * N + row];
            double part = 0, square = 0;

            for (size_t i = 0; i < width; i++) {
                const double x = (double)run.keys[row][j * width + i];
                const double c = (double)run.centroids[((j * width + i) << BITS) + code];

                part += (x - c) * (x - c);
                square += x * x;
            }
            if (run.book.augments != NULL) {
                const double left = (double)run.longest[j] - square;

                part += pow(
                    sqrt(left > 0 ? left : 0) - (double)run.augments[(j << BITS) + code], 2);
            }
            sum += isfinite(part) ? part : 0;
        }
    return sum;
}

static void distances_fall(void **state)
{
    (void)state;
    for (int lifted = 0; lifted < 2; lifted++) {
        double before = INFINITY;

        for (size_t row = 0; row < N; row++)
            for (size_t i = 0; i < D; i++)
                run.keys[row][i] = floats_uniform(&dice) + (float)(row % 9) * (float)(i % 3);
        start_run(lifted);
        for (int step = 0; step < STEPS; step++) {
            const double moved = run_step(), error = run_error();

            /* With a cluster split the next step may not be lower by as much. */
            assert_true(moved >= 0);
            assert_true(error <= before * 1.001);
            before = error;
        }
    }
}

/* All centroids but one are far away from all rows, so that one cluster has them all. */
static void empty_ones_split_the_largest(void **state)
{
    (void)state;
    floats_fill(&dice, FLOATS_UNIFORM, run.keys[0], N * D);
    start_run(false);
    for (uint32_t c = 1; c < 1u << BITS; c++)
        for (size_t i = 0; i < D; i++)
            run.centroids[(i << BITS) + c] = 1000 + (float)c;
    kv_kmeans_half_sq_norms(&run.shape, &run.book);
    run_step();
    for (size_t j = 0; j < M; j++)
        assert_int_equal(codes_in_use(j), 1);
    for (int step = 0; step < STEPS; step++)
        run_step();
    for (size_t j = 0; j < M; j++)
        assert_int_equal(codes_in_use(j), 1 << BITS);
}

/* The first centroid is right from the beginning, and stays. */
static void equal_rows(void **state)
{
    (void)state;
    for (size_t row = 0; row < N; row++)
        for (size_t i = 0; i < D; i++)
            run.keys[row][i] = (float)i - 3;
    start_run(false);
    for (int step = 0; step < 4; step++)
        assert_true(run_step() == 0);
    kv_kmeans_encode(&run.shape, &run.book, run.keys[0], N, run.codes, N);
    assert_true(run_error() == 0);
}

/* Rows of NaN and infinities, a third of them among the first, are added nowhere. */
static void not_finite(void **state)
{
    (void)state;
    for (int lifted = 0; lifted < 2; lifted++) {
        floats_fill(&dice, FLOATS_UNIFORM, run.keys[0], N * D);
        for (size_t row = 0; row < N; row += 3)
            run.keys[row][row / 3 % D] = row % 2 == 0 ? NAN : row % 4 == 1 ? INFINITY : FLT_MAX;
        start_run(lifted);
        for (int step = 0; step < STEPS; step++)
            run_step();
        for (size_t i = 0; i < (size_t)D << BITS; i++)
            assert_true(isfinite(run.centroids[i]));
        for (size_t j = 0; j < M; j++)
            assert_true(codes_in_use(j) > (1 << BITS) / 2);
    }
    for (size_t row = 0; row < N; row++)
        run.keys[row][0] = run.keys[row][D / M] = NAN;
    start_run(false);
    for (int step = 0; step < STEPS; step++)
        assert_true(run_step() == 0);
    for (size_t i = 0; i < M * N; i++)
        assert_int_equal(run.codes[i], 0);
}

/* Few long rows, many short ones: centroids stay in the ball of the rows, and more than the
 * long ones' are in use. */
static void inner_products_stay(void **state)
{
    const size_t width = D / M;

    (void)state;
    for (size_t row = 0; row < N; row++)
        for (size_t i = 0; i < D; i++)
            run.keys[row][i] = floats_uniform(&dice) * (row % 50 == 0 ? 30 : 1);
    start_run(true);
    for (int step = 0; step < 4 * STEPS; step++) {
        run_step();
        for (size_t j = 0; j < M; j++)
            for (uint32_t c = 0; c < 1u << BITS; c++) {
                double square = 0;

                for (size_t i = 0; i < width; i++)
                    square += pow((double)run.centroids[((j * width + i) << BITS) + c], 2);
                square += pow((double)run.augments[(j << BITS) + c], 2);
                assert_true(square <= (double)run.longest[j] * 1.01);
            }
    }
    for (size_t j = 0; j < M; j++)
        assert_true(codes_in_use(j) > (1 << BITS) / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),
        cmocka_unit_test(same),
        cmocka_unit_test(right),
        cmocka_unit_test(nan_is_never_nearest),
        cmocka_unit_test(distances_fall),
        cmocka_unit_test(empty_ones_split_the_largest),
        cmocka_unit_test(equal_rows),
        cmocka_unit_test(not_finite),
        cmocka_unit_test(inner_products_stay),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
