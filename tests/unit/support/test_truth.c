/* test_truth.c - what the simulator takes for sure, where answers are heard out of order. */
#include "tests/sim/truth.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    CONTENT = 5,
    OTHER = 6,
    CUT_ID = 1,
};

static struct truth *make_truth(void)
{
    kv_schema_t schema = {
        .n_layers = 1,
        .layers = {
            {.kind = KV_LAYER_KV, .dtype = KV_FP16, .n_kv_heads = 1, .d_k = 8, .d_v = 8}}};

    assert_int_equal(kv_schema_finish(&schema, NULL, 0), KV_OK);
    return truth_create(&schema);
}

static void
put_begins(struct truth *truth, uint32_t begin, uint32_t end, uint32_t content, uint32_t at)
{
    for (uint32_t token = begin; token < end; token++)
        assert_true(truth_row_may(truth, 0, token, content, at, 0));
}

static void
put_ends(struct truth *truth, uint32_t begin, uint32_t end, uint32_t content, uint32_t at)
{
    for (uint32_t token = begin; token < end; token++)
        truth_row_put(truth, 0, token, content, at, 1);
}

/* The node was asked for the length, cut, and both answers came at once. */
static void length_from_before_a_cut(void **state)
{
    struct truth *truth = make_truth();

    (void)state;
    put_begins(truth, 0, 10, CONTENT, 1);
    put_ends(truth, 0, 10, CONTENT, 1);
    assert_int_equal(truth_least(truth), 10);

    truth_cut_begin(truth, CUT_ID, 4, 1);
    truth_exists(truth, 10, 1);
    assert_int_equal(truth_least(truth), 4);
    truth_cut_done(truth, CUT_ID, 4, 1, 1);
    truth_exists(truth, 10, 1);
    assert_int_equal(truth_least(truth), 4);

    /* Others in their place make it no truer; who knows of the cut does. */
    put_begins(truth, 4, 7, OTHER, 2);
    truth_exists(truth, 10, 1);
    assert_int_equal(truth_least(truth), 4);
    truth_exists(truth, 7, 2);
    assert_int_equal(truth_least(truth), 7);
    truth_destroy(truth);
}

/* The same for a put, of rows that another repeats after the cut. */
static void put_from_before_a_cut(void **state)
{
    struct truth *truth = make_truth();

    (void)state;
    put_begins(truth, 0, 2, CONTENT, 1);
    truth_cut_begin(truth, CUT_ID, 0, 1);
    put_begins(truth, 0, 2, CONTENT, 2);
    truth_cut_done(truth, CUT_ID, 0, 1, 1);
    put_ends(truth, 0, 2, CONTENT, 1);
    assert_int_equal(truth_least(truth), 0);
    put_ends(truth, 0, 2, CONTENT, 2);
    assert_int_equal(truth_least(truth), 2);
    truth_destroy(truth);
}

/* A cut leaves what is before it. */
static void length_of_what_a_cut_left(void **state)
{
    struct truth *truth = make_truth();

    (void)state;
    put_begins(truth, 0, 10, CONTENT, 1);
    truth_cut_begin(truth, CUT_ID, 4, 1);
    assert_true(truth_is_half_cut(truth, 4) && !truth_is_half_cut(truth, 3));
    truth_cut_done(truth, CUT_ID, 4, 1, 1);
    assert_false(truth_is_half_cut(truth, 4));
    truth_exists(truth, 10, 1);
    assert_int_equal(truth_least(truth), 4);
    truth_destroy(truth);
}

/* What dies elsewhere takes nothing; before it is known where the session is, it may. */
static void deaths_elsewhere(void **state)
{
    struct truth *truth = make_truth();

    (void)state;
    put_begins(truth, 0, 10, CONTENT, 1);
    put_ends(truth, 0, 10, CONTENT, 1);
    truth->nodes = 1u << 3 | 1u << 11;
    truth->node_of_unit[0] = 11;
    truth_node_lost(truth, 5);
    assert_false(truth->lost_node);
    assert_int_equal(truth_least(truth), 10);
    truth_node_lost(truth, 3);
    assert_true(truth->lost_node);
    assert_int_equal(truth_least(truth), 10);
    truth_node_lost(truth, 11);
    assert_int_equal(truth_least(truth), 0);
    truth->nodes = 0;
    assert_true(truth_is_on(truth, 5));
    truth_destroy(truth);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(length_from_before_a_cut),
        cmocka_unit_test(put_from_before_a_cut),
        cmocka_unit_test(length_of_what_a_cut_left),
        cmocka_unit_test(deaths_elsewhere),
    };

    return cmocka_run_group_tests_name("unit.truth", tests, NULL, NULL);
}
