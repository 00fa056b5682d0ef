/* Attention cut into slices against attention in one piece; and over what there is none. */
#include "kvserver/store/query/attend.h"

#include "tests/support/floats.h"
#include "tests/support/units.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 60,
    N_MAX = 1500,
    ELEMENTS_MAX = 1 << 20,
};

static struct kv_random dice;
static struct kvs_attention attention;

/* Rows that are added one by one amount to what they do in a run. */
static void slices_are_one_answer(void **state)
{
    static const uint16_t sizes[] = {1, 16, 64, 128, 512, KV_ATTEND_D_MAX};
    static float rows[ELEMENTS_MAX], queries[KV_ATTEND_QUERIES_MAX * KV_ATTEND_D_MAX];
    static float whole[KV_ATTEND_QUERIES_MAX * (2 + KV_ATTEND_D_MAX)];
    static float outputs[2][KV_ATTEND_QUERIES_MAX * KV_ATTEND_D_MAX];
    static uint32_t among[N_MAX];
    float lses[2][KV_ATTEND_QUERIES_MAX];
    struct bench bench;
    struct kvs_unit unit;

    (void)state;
    bench_open(&bench, 64 << 20, 7);
    for (size_t i = 0; i < ELEMENTS_MAX; i++)
        rows[i] = floats_uniform(&dice);
    for (unsigned round = 0; round < ROUNDS; round++) {
        const struct kv_layer_schema layer = {.kind = KV_LAYER_KV,
                                              .dtype = KV_FP32,
                                              .d_k = sizes[kv_random_below(&dice, 6)],
                                              .d_v = sizes[kv_random_below(&dice, 6)]};
        const size_t n_elements = (size_t)layer.d_k + layer.d_v;
        const size_t most =
            ELEMENTS_MAX / n_elements < N_MAX ? ELEMENTS_MAX / n_elements : N_MAX;
        const size_t n = kv_random_below(&dice, 8) == 0 ? 0 : kv_random_below(&dice, most + 1);
        const uint32_t n_queries = 1 + (uint32_t)kv_random_below(&dice, KV_ATTEND_QUERIES_MAX);
        const bool each = kv_random_below(&dice, 2) == 0;
        struct kv_attend_shape shape;

        for (size_t i = 0; i < n_queries * layer.d_k; i++)
            queries[i] = floats_uniform(&dice);
        for (size_t i = 0; i < n; i++)
            among[i] = (uint32_t)kv_random_next(&dice);
        assert_null(kvs_attention_shape(&layer, n_queries, 0.1f, &shape));
        unit_make(&bench, &unit, 0, (uint32_t)n_elements, n > 0 ? (uint32_t)n : 1);
        for (uint32_t i = 0; i < n; i++)
            memcpy(kvs_unit_row(&unit, i), rows + i * n_elements, n_elements * sizeof(float));
        unit_seal(&unit, 0, (uint32_t)n);
        kvs_attention_begin(&attention, &shape, &unit, queries, each);
        assert_in_range(attention.piece_rows, KV_ATTEND_BATCH, KVS_ATTENTION_ROWS);
        assert_int_equal(attention.piece_rows % KV_ATTEND_BATCH, 0);
        for (uint32_t i = 0; i < n; i++)
            if (kvs_attention_add(&attention, i, among[i]))
                assert_int_equal(kvs_attention_piece(&attention, &bench.heap), UINT32_MAX);
        assert_int_equal(kvs_attention_piece(&attention, &bench.heap), UINT32_MAX);
        assert_int_equal(kvs_attention_piece(&attention, &bench.heap),
                         UINT32_MAX); /* nothing */
        kvs_attention_end(&attention, outputs[0], lses[0]);

        kv_attend_begin(&shape, whole);
        kv_attend_run(&shape, queries, rows, n_elements * sizeof(float), n, each ? among : NULL,
                      whole);
        kv_attend_end(&shape, whole, outputs[1], lses[1]);
        assert_memory_equal(outputs[0], outputs[1],
                            (size_t)n_queries * layer.d_v * sizeof(float));
        assert_memory_equal(lses[0], lses[1], n_queries * sizeof(float));
        lone_unit_clear(&unit);
    }
    bench_close(&bench);
}

static void what_cannot_be_attended(void **state)
{
    const struct kv_layer_schema good = {
        .kind = KV_LAYER_KV, .dtype = KV_FP16, .d_k = KV_ATTEND_D_MAX, .d_v = KV_ATTEND_D_MAX};
    struct kv_layer_schema layer = good;
    struct kv_attend_shape shape;

    (void)state;
    assert_null(kvs_attention_shape(&layer, KV_QUERIES_MAX, 1, &shape));
    assert_true(kv_attend_shape_valid(&shape));
    assert_non_null(kvs_attention_shape(&layer, KV_QUERIES_MAX, INFINITY, &shape));
    layer.kind = KV_LAYER_KEYS;
    layer.d_v = 0;
    assert_non_null(kvs_attention_shape(&layer, 1, 1, &shape));
    layer = good;
    layer.d_v++;
    assert_non_null(kvs_attention_shape(&layer, 1, 1, &shape));
    layer = good;
    layer.d_k++;
    assert_non_null(kvs_attention_shape(&layer, 1, 1, &shape));
    layer = good;
    layer.dtype = KV_INT8;
    assert_non_null(kvs_attention_shape(&layer, 1, 1, &shape));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slices_are_one_answer),
        cmocka_unit_test(what_cannot_be_attended),
    };
    uint64_t seed = floats_seed();

    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
