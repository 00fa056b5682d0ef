/* index_schedule.h: what its check finds; how many iterations a layer gets. */
#include "gpu-worker/kvcache/index_schedule.c" /* its insides are broken below */
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum broken {
    ASKED_FOR_ROWS_TO_COME,
    PROMPT_OF_ROWS_TO_COME,
    HALF_A_BLOCK,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kvw_index_schedule index = {
        .options.chapter_blocks = 8,
        .n_rows = 8 * KV_BLOCK_TOKENS,
        .prompt_rows = 10 * KV_BLOCK_TOKENS,
        .n_tokens = 10 * KV_BLOCK_TOKENS,
    };

    if (*broken == ASKED_FOR_ROWS_TO_COME)
        index.n_rows = 11 * KV_BLOCK_TOKENS;
    else if (*broken == PROMPT_OF_ROWS_TO_COME)
        index.prompt_rows++;
    else if (*broken == HALF_A_BLOCK)
        index.n_rows += KV_BLOCK_TOKENS / 2;
    kvw_index_schedule_check(&index);
}

static void check_finds(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
}

enum {
    LAYERS = 4,
    HEADS = 3,
    CHAPTER = 8 * KV_BLOCK_TOKENS,
};

static struct kvw_index_schedule schedule_of(struct layer *layers)
{
    return (struct kvw_index_schedule){
        .options = {.chapter_blocks = 8, .bits = 6},
        .n_layers = LAYERS,
        .n_kv_heads = HEADS,
        .layers = layers,
        .cost = kvw_kmeans_cost_assumed(64, HEADS, 6, 0),
    };
}

/* Iterations of a layer that has computed for 10 s; the clock goes on by less than 1 %. */
static uint32_t after_10_s(struct kvw_index_schedule *index, unsigned layer, uint32_t tokens)
{
    index->prompt_begin_us = kvw_now_us() - 10000000;
    return iterations_for(index, &index->layers[layer], tokens);
}

/* 5 % of 10 s for 4 layers are 125 ms.  A chapter of 1,024 rows in which nodes spend 1 ms for an
 * iteration gets 124, as encoding is one more; for two chapters 61. */
static void nodes_say_how_many_fit(void **state)
{
    struct layer layers[LAYERS] = {0};
    struct kvw_index_schedule index = schedule_of(layers);
    /* 21 ms for 20 iterations of each codebook, on the thread that took longest. */
    struct kv_index_result result = {
        .rows = HEADS * CHAPTER,
        .rows_coded = HEADS * CHAPTER,
        .n_trained = HEADS,
        .iterations = HEADS * 20,
        .train_us = 40000,
        .busiest_us = 21000,
    };
    const uint32_t guess = after_10_s(&index, 1, CHAPTER);

    (void)state;
    assert_in_range(guess, 80, 120);
    note_cost(&index, &layers[0], &result);
    assert_in_range(after_10_s(&index, 1, CHAPTER), 123, 126);
    assert_in_range(after_10_s(&index, 1, 2 * CHAPTER), 61, 63);
    /* Only new rows count, and only the time since the last ones. */
    layers[1].n_rows = CHAPTER;
    assert_in_range(after_10_s(&index, 1, 2 * CHAPTER), 123, 126);
    layers[1].asked_us = kvw_now_us() - 5000000;
    assert_in_range(after_10_s(&index, 1, 2 * CHAPTER), 61, 63);
    /* Nothing was computed since, or it is not known for how long. */
    layers[1].asked_us = kvw_now_us();
    assert_int_equal(after_10_s(&index, 1, 2 * CHAPTER), KVW_KMEANS_ITERATIONS_MIN);
    layers[1].asked_us = index.prompt_begin_us = 0;
    assert_int_equal(iterations_for(&index, &layers[1], 2 * CHAPTER),
                     KVW_KMEANS_ITERATIONS_MIN);
    index.options.iterations = 7;
    assert_int_equal(after_10_s(&index, 1, CHAPTER), 7);
}

/* A report of rows of which some had codes already, or that trained nothing, says nothing of what
 * a row costs; nor does an older one count for the rows of a later one. */
static void unclear_reports_do_not_count(void **state)
{
    struct layer layers[LAYERS] = {0};
    struct kvw_index_schedule index = schedule_of(layers);
    const struct kvw_kmeans_cost guess = index.cost;
    const struct kv_index_result found = {
        .rows_coded = HEADS * CHAPTER,
        .n_found = HEADS,
    };
    struct kv_index_result result = {
        .rows_coded = 3 * HEADS * CHAPTER,
        .n_found = 2 * HEADS,
        .n_trained = HEADS,
        .iterations = HEADS * 20,
        .busiest_us = 21000,
    };

    (void)state;
    note_cost(&index, &layers[0], &found);
    assert_memory_equal(&index.cost, &guess, sizeof(guess));
    note_cost(&index, &layers[0], &result);
    assert_memory_equal(&index.cost, &guess, sizeof(guess));
    /* The same from two chapters on: the third one's 1,024 rows took it. */
    layers[1] = (struct layer){.n_coded = 2 * HEADS * CHAPTER, .n_codebooks = 2 * HEADS};
    note_cost(&index, &layers[1], &result);
    assert_true(index.cost.row_s * CHAPTER > 0.999e-3 && index.cost.row_s * CHAPTER < 1.001e-3);
    assert_int_equal(layers[1].n_coded, result.rows_coded);
    assert_int_equal(layers[1].n_codebooks, 3 * HEADS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_finds),
        cmocka_unit_test(nodes_say_how_many_fit),
        cmocka_unit_test(unclear_reports_do_not_count),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
