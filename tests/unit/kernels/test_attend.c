/* attend.h: every implementation that this CPU has gives the bits of the scalar one, of all
 * types and dimensions, of rows anywhere, with ties, infinities and NaN, however the rows are
 * cut into calls and whether they come as a list or as a run.  The scalar one is checked
 * against plain sums in double, and a merge of any partition against the whole. */
#include "kernels/attend.h"
#include "kernels/checksum.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 500,
    WHOLE_ROUNDS = 60,
    N_MAX = 200,
    PARTS_MAX = 9,
};

static const char *const type_names[] = {"", "fp32", "fp16", "bf16"};

static uint64_t seed;
static struct kv_random dice;

#define EXPECT(condition)                                                                   \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            print_error("KV_TEST_SEED=%llu round %d %s d_k %u d_v %u queries %u n %zu: "    \
                        "%s\n",                                                             \
                        (unsigned long long)seed, round, type_names[shape.type], shape.d_k, \
                        shape.d_v, shape.n_queries, n, #condition);                         \
            fail();                                                                         \
        }                                                                                   \
    } while (0)

static size_t element_bytes(enum kv_key_type type)
{
    return type == KV_KEY_FP32 ? 4 : 2;
}

static uint32_t some_d(void)
{
    static const uint32_t usual[] = {16, 32, 64, 80, 96, 128, 192, 256};

    if (kv_random_below(&dice, 40) == 0)
        return KV_ATTEND_D_MAX - (uint32_t)kv_random_below(&dice, 2);
    return kv_random_below(&dice, 2) == 0 ? usual[kv_random_below(&dice, 8)]
                                          : 1 + (uint32_t)kv_random_below(&dice, 90);
}

static struct kv_attend_shape some_shape(void)
{
    struct kv_attend_shape shape;

    shape.type = (enum kv_key_type)(1 + kv_random_below(&dice, 3));
    shape.d_k = some_d();
    shape.d_v = kv_random_below(&dice, 2) == 0 ? shape.d_k : some_d();
    shape.n_queries = 1 + (uint32_t)kv_random_below(&dice, kv_random_below(&dice, 8) == 0
                                                               ? KV_ATTEND_QUERIES_MAX
                                                               : 9);
    shape.scale = 0.01f + (float)kv_random_below(&dice, 100) / 100;
    return shape;
}

/* Elements of `kind`, of 16 bits for the small types: any bits, or of small exponents. */
static void
fill(const struct kv_attend_shape *shape, enum float_kind kind, uint8_t *at, size_t n)
{
    for (size_t i = 0; i < n; i++, at += element_bytes(shape->type)) {
        const float value = floats_one(&dice, kind);
        uint16_t half = (uint16_t)kv_random_next(&dice);
        uint32_t bits;

        memcpy(&bits, &value, sizeof(bits));
        if (shape->type == KV_KEY_BF16)
            half = (uint16_t)(bits >> 16);
        else if (kind != FLOATS_ANY_BITS && (kind != FLOATS_SPECIAL || half % 8 != 0))
            half = (uint16_t)((half & 0x83ff) | (9 + half % 6) << 10);
        memcpy(at, shape->type == KV_KEY_FP32 ? (const void *)&value : &half,
               element_bytes(shape->type));
    }
}

/* A number of rows: few, about whole groups, or many. */
static size_t some_n(void)
{
    switch (kv_random_below(&dice, 3)) {
    case 0:
        return kv_random_below(&dice, 10);
    case 1:
        return (size_t)KV_ATTEND_BATCH * (1 + kv_random_below(&dice, 2)) +
               kv_random_below(&dice, 5) - 2;
    default:
        return kv_random_below(&dice, N_MAX + 1);
    }
}

struct rows {
    uint8_t *bytes;
    const void **list;
    uint32_t *among;
    float *queries, *state, *output, *lse;
    size_t stride;
    void *bases[7];
};

static struct rows
make_rows(const struct kv_attend_shape *shape, enum float_kind kind, size_t n)
{
    const size_t row_bytes = kv_attend_row_bytes(shape);
    const size_t n_output = (size_t)shape->n_queries * shape->d_v;
    struct rows rows;

    rows.stride = row_bytes + (kv_random_below(&dice, 2) == 0 ? 0 : kv_random_below(&dice, 70));
    rows.bytes =
        floats_exact(&dice, n > 0 ? (n - 1) * rows.stride + row_bytes : 0, 1, &rows.bases[0]);
    rows.list = floats_exact(&dice, n * sizeof(void *), sizeof(void *), &rows.bases[1]);
    rows.among = floats_exact(&dice, n * 4, 4, &rows.bases[2]);
    rows.queries =
        floats_exact(&dice, (size_t)shape->n_queries * shape->d_k * 4, 4, &rows.bases[3]);
    rows.state = floats_exact(&dice, kv_attend_floats(shape) * 4, 4, &rows.bases[4]);
    rows.output = floats_exact(&dice, n_output * 4, 4, &rows.bases[5]);
    rows.lse = floats_exact(&dice, (size_t)shape->n_queries * 4, 4, &rows.bases[6]);
    for (size_t i = 0; i < n; i++) {
        rows.list[i] = rows.bytes + i * rows.stride;
        fill(shape, kind, rows.bytes + i * rows.stride, (size_t)shape->d_k + shape->d_v);
        rows.among[i] = (uint32_t)kv_random_next(&dice);
        if (kv_random_below(&dice, 4) == 0)
            rows.among[i] = 0;
    }
    floats_fill(&dice, kind, rows.queries, (size_t)shape->n_queries * shape->d_k);
    return rows;
}

static void free_rows(struct rows *rows)
{
    for (int i = 0; i < 7; i++)
        free(rows->bases[i]);
}

/* All rows in one call, or cut anywhere between groups into lists and runs. */
static void attend(const struct kv_attend_kernels *kernels,
                   const struct kv_attend_shape *shape,
                   const struct rows *rows,
                   size_t n,
                   bool among,
                   bool cut,
                   float *state)
{
    const uint32_t *masks = among ? rows->among : NULL;

    kv_attend_begin(shape, state);
    if (!cut) {
        uint32_t *seeds = malloc((n + 1) * sizeof(*seeds)),
                 *crcs = malloc((n + 1) * sizeof(*crcs));

        assert_true(seeds != NULL && crcs != NULL);
        for (size_t i = 0; i < n; i++)
            seeds[i] = (uint32_t)kv_random_next(&dice);
        kernels->rows(shape, rows->queries, rows->list, n, masks, seeds, crcs, state);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(crcs[i],
                             kv_crc32c(seeds[i], rows->list[i], kv_attend_row_bytes(shape)));
        free(seeds);
        free(crcs);
        return;
    }
    for (size_t from = 0, count; from < n || kv_random_below(&dice, 3) == 0; from += count) {
        count = KV_ATTEND_BATCH * kv_random_below(&dice, 4);
        count = count < n - from ? count : n - from;
        if (kv_random_below(&dice, 2) == 0)
            kernels->rows(shape, rows->queries, rows->list + from, count,
                          among ? masks + from : NULL, NULL, NULL, state);
        else
            kernels->run(shape, rows->queries, rows->bytes + from * rows->stride, rows->stride,
                         count, among ? masks + from : NULL, state);
    }
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    for (; kv_attend_kernels_at(n) != NULL; n++)
        print_message("attend: %s\n", kv_attend_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_attend_kernels_at(0)->name, "scalar");
    assert_null(kv_attend_kernels_at(~0u));
}

static void shapes(void **state)
{
    const struct kv_attend_shape good = {KV_KEY_FP16, 64, 64, 3, 0.125f};
    struct kv_attend_shape bad[9];

    (void)state;
    assert_true(kv_attend_shape_valid(&good));
    assert_int_equal(kv_attend_row_bytes(&good), 256);
    assert_int_equal(kv_attend_floats(&good), 3 * 66);
    for (int i = 0; i < 9; i++)
        bad[i] = good;
    bad[0].type = (enum kv_key_type)0;
    bad[1].d_k = 0;
    bad[2].d_v = 0;
    bad[3].d_k = KV_ATTEND_D_MAX + 1;
    bad[4].n_queries = 0;
    bad[5].n_queries = KV_ATTEND_QUERIES_MAX + 1;
    bad[6].scale = 0;
    bad[7].scale = NAN;
    bad[8].scale = INFINITY;
    for (int i = 0; i < 9; i++)
        assert_false(kv_attend_shape_valid(&bad[i]));
}

static void same_bits(void **unused)
{
    (void)unused;
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const struct kv_attend_shape shape = some_shape();
        const size_t n = some_n(), n_floats = kv_attend_floats(&shape);
        const bool among = kv_random_below(&dice, 2) == 0;
        struct rows rows = make_rows(&shape, kind, n);
        float *expected = malloc(n_floats * sizeof(float));
        const struct kv_attend_kernels *kernels;

        assert_non_null(expected);
        attend(kv_attend_kernels_at(0), &shape, &rows, n, among, false, expected);
        for (unsigned i = 0; (kernels = kv_attend_kernels_at(i)) != NULL; i++)
            for (int cut = 0; cut < 2; cut++) {
                attend(kernels, &shape, &rows, n, among, cut, rows.state);
                EXPECT(floats_all_same(rows.state, expected, n_floats));
            }
        kv_attend_end(&shape, rows.state, rows.output, rows.lse);
        for (uint32_t query = 0; query < shape.n_queries; query++)
            EXPECT(rows.lse[query] <= FLT_MAX); /* no NaN, no +inf, whatever the rows are */
        free(expected);
        free_rows(&rows);
    }
}

/* As fill() makes them, in double. */
static double value_of(const struct kv_attend_shape *shape, const void *row, size_t i)
{
    float value;

    kv_exact_scores_kernels_at(0)->load(
        shape->type, (const uint8_t *)row + i * element_bytes(shape->type), 0, 1, 1, &value);
    return (double)value;
}

/* Softmax in double over the rows that count, each in its part; part < 0: over all. */
static double exact(const struct kv_attend_shape *shape,
                    const struct rows *rows,
                    size_t n,
                    bool among,
                    uint32_t query,
                    double *ret_output)
{
    double scores[N_MAX], most = -INFINITY, sum = 0;

    for (size_t i = 0; i < n; i++) {
        scores[i] = -INFINITY;
        if (among && (rows->among[i] >> query & 1) == 0)
            continue;
        scores[i] = 0;
        for (size_t j = 0; j < shape->d_k; j++)
            scores[i] += (double)rows->queries[(size_t)query * shape->d_k + j] *
                         value_of(shape, rows->list[i], j);
        scores[i] *= (double)shape->scale;
        most = scores[i] > most ? scores[i] : most;
    }
    memset(ret_output, 0, shape->d_v * sizeof(*ret_output));
    if (most == -INFINITY)
        return most;
    for (size_t i = 0; i < n; i++) {
        const double weight = exp(scores[i] - most);

        sum += weight;
        for (size_t j = 0; j < shape->d_v; j++)
            ret_output[j] += weight * value_of(shape, rows->list[i], shape->d_k + j);
    }
    for (size_t j = 0; j < shape->d_v; j++)
        ret_output[j] /= sum;
    return most + log(sum);
}

/* Values are below 2 and |s| below 40: far within the 1e-5 of the header, relative to them. */
static void is_softmax_and_merges(void **unused)
{
    static double output[KV_ATTEND_D_MAX];
    double worst = 0, worst_merged = 0;

    (void)unused;
    for (int round = 0; round < WHOLE_ROUNDS; round++) {
        struct kv_attend_shape shape = some_shape();
        const size_t n = some_n() % (N_MAX + 1),
                     n_parts = kv_random_below(&dice, PARTS_MAX + 1);
        const bool among = kv_random_below(&dice, 2) == 0;
        struct rows rows;
        float *outputs[PARTS_MAX + 1], *lses[PARTS_MAX + 1];
        size_t n_output;

        shape.scale /= sqrtf((float)shape.d_k);
        rows = make_rows(&shape, FLOATS_UNIFORM, n);
        n_output = (size_t)shape.n_queries * shape.d_v;
        attend(kv_attend_kernels_at(round % 2 == 0 || kv_attend_kernels_at(1) == NULL ? 0 : 1),
               &shape, &rows, n, among, true, rows.state);
        kv_attend_end(&shape, rows.state, rows.output, rows.lse);

        /* Each row goes to a part by dice; some stay empty. */
        for (size_t part = 0; part < n_parts; part++) {
            outputs[part] = malloc(n_output * sizeof(float));
            lses[part] = malloc(shape.n_queries * sizeof(float));
            assert_non_null(outputs[part]);
            assert_non_null(lses[part]);
        }
        for (size_t part = 0; part < n_parts; part++) {
            const void *list[N_MAX];
            uint32_t masks[N_MAX];
            size_t count = 0;

            for (size_t i = 0; i < n; i++)
                if ((i * 2654435761u >> 8) % n_parts == part) {
                    list[count] = rows.list[i];
                    masks[count++] = rows.among[i];
                }
            kv_attend_begin(&shape, rows.state);
            kv_attend_rows(&shape, rows.queries, list, count, among ? masks : NULL, rows.state);
            kv_attend_end(&shape, rows.state, outputs[part], lses[part]);
        }
        outputs[n_parts] = malloc(n_output * sizeof(float));
        lses[n_parts] = malloc(shape.n_queries * sizeof(float));
        assert_non_null(outputs[n_parts]);
        assert_non_null(lses[n_parts]);
        kv_attend_merge(shape.n_queries, shape.d_v, n_parts, (const float *const *)outputs,
                        (const float *const *)lses, outputs[n_parts], lses[n_parts]);

        for (uint32_t query = 0; query < shape.n_queries; query++) {
            const double lse = exact(&shape, &rows, n, among, query, output);

            if (lse == -INFINITY) {
                EXPECT(rows.lse[query] == -INFINITY);
                EXPECT(lses[n_parts][query] == -INFINITY);
            } else {
                EXPECT(fabs((double)rows.lse[query] - lse) <= 1e-5 * fmax(1, fabs(lse)));
                EXPECT(n_parts == 0 ||
                       fabs((double)lses[n_parts][query] - lse) <= 1e-5 * fmax(1, fabs(lse)));
            }
            for (size_t j = 0; j < shape.d_v; j++) {
                const size_t at = (size_t)query * shape.d_v + j;
                const double merged = (double)outputs[n_parts][at];
                const double error = fabs((double)rows.output[at] - output[j]);

                worst = error > worst ? error : worst;
                EXPECT(n_parts > 0 || merged == 0);
                if (n_parts > 0 && fabs(merged - output[j]) > worst_merged)
                    worst_merged = fabs(merged - output[j]);
            }
        }
        EXPECT(worst <= 1e-5 && worst_merged <= 1e-5);
        /* A merge in place is the same; of one part, that part. */
        if (n_parts > 0) {
            kv_attend_merge(shape.n_queries, shape.d_v, n_parts, (const float *const *)outputs,
                            (const float *const *)lses, outputs[0], lses[0]);
            EXPECT(floats_all_same(outputs[0], outputs[n_parts], n_output));
            EXPECT(floats_all_same(lses[0], lses[n_parts], shape.n_queries));
            kv_attend_merge(shape.n_queries, shape.d_v, 1, (const float *const *)outputs,
                            (const float *const *)lses, outputs[n_parts], lses[n_parts]);
            EXPECT(floats_all_same(outputs[0], outputs[n_parts], n_output));
            EXPECT(floats_all_same(lses[0], lses[n_parts], shape.n_queries));
        }
        for (size_t part = 0; part <= n_parts; part++) {
            free(outputs[part]);
            free(lses[part]);
        }
        free_rows(&rows);
    }
    print_message("attend: output off by %.2g, merged by %.2g\n", worst, worst_merged);
}

/* What attend.h says of scores that are not finite, one element each. */
static void odd_scores(void **state)
{
    static const struct {
        float keys[3], output, lse;
    } cases[] = {
        {{NAN, NAN, NAN}, 0, -INFINITY},      {{-INFINITY, NAN, -INFINITY}, 0, -INFINITY},
        {{0, NAN, -INFINITY}, 1, 0},          {{NAN, -0.0f, 0}, 6, 0.69314718f},
        {{5, INFINITY, NAN}, 4, FLT_MAX},     {{INFINITY, 3, INFINITY}, 4.5f, FLT_MAX},
        {{FLT_MAX, -FLT_MAX, 0}, 1, FLT_MAX}, {{-FLT_MAX, -INFINITY, NAN}, 1, -FLT_MAX},
    };
    static const float values[3] = {1, 4, 8};
    const struct kv_attend_shape shape = {KV_KEY_FP32, 1, 1, 1, 1};
    const struct kv_attend_kernels *kernels;

    (void)state;
    for (unsigned tier = 0; (kernels = kv_attend_kernels_at(tier)) != NULL; tier++)
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
            const float query = 1;
            float rows[3][2], running[3], output, lse;

            for (int row = 0; row < 3; row++) {
                rows[row][0] = cases[i].keys[row];
                rows[row][1] = values[row];
            }
            kv_attend_begin(&shape, running);
            kernels->run(&shape, &query, rows, sizeof(rows[0]), 3, NULL, running);
            kv_attend_end(&shape, running, &output, &lse);
            assert_true(output == cases[i].output);
            assert_true(lse == cases[i].lse);
        }
}

static void odd_merges(void **state)
{
    const float a[2] = {1, 2}, b[2] = {NAN, INFINITY}, c[2] = {3, 4};
    const float zero = 0, none = -INFINITY, nan = NAN, most = INFINITY;
    const float *outputs[3] = {a, b, c};
    float output[2] = {7, 7}, lse = 7;

    (void)state;
    kv_attend_merge(1, 2, 0, NULL, NULL, output, &lse);
    assert_true(output[0] == 0 && output[1] == 0 && lse == -INFINITY);
    kv_attend_merge(1, 2, 3, outputs, (const float *const[3]){&none, &nan, &none}, output,
                    &lse);
    assert_true(output[0] == 0 && output[1] == 0 && lse == -INFINITY);
    kv_attend_merge(1, 2, 3, outputs, (const float *const[3]){&zero, &nan, &zero}, output,
                    &lse);
    assert_true(output[0] == 2 && output[1] == 3 && lse == (float)log(2));
    kv_attend_merge(1, 2, 3, outputs, (const float *const[3]){&zero, &none, &most}, output,
                    &lse);
    assert_true(output[0] == 3 && output[1] == 4 && lse == FLT_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),      cmocka_unit_test(shapes),
        cmocka_unit_test(same_bits),  cmocka_unit_test(is_softmax_and_merges),
        cmocka_unit_test(odd_scores), cmocka_unit_test(odd_merges),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
