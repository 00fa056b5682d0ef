/* index_schedule.h: what its check finds; how many iterations a layer gets; who waits. */
#define kv_op_status   test_op_status
#define kv_wait        test_wait
#define kv_client_wait test_client_wait
#define kv_index_begin test_index_begin
#include "gpu-worker/kvcache/index_schedule.c" /* its insides are broken below */
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <time.h>

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

/* ---- waiting ------------------------------------------------------------------------------ */

/* An operation that does not end, and how often somebody waited for it, or asked for another. */
static int never_ends;
static unsigned n_waits, n_asked;

kv_status_t test_op_status(const struct kv_op *op)
{
    (void)op;
    return KV_IN_PROGRESS;
}

kv_status_t test_wait(struct kv_op *op)
{
    (void)op;
    n_waits++;
    return KV_IN_PROGRESS;
}

unsigned test_client_wait(struct kv_client *client, uint64_t timeout_us)
{
    const struct timespec pause = {.tv_nsec = 1000000};

    (void)client;
    (void)timeout_us;
    n_waits++;
    nanosleep(&pause, NULL);
    return 0;
}

kv_status_t test_index_begin(struct kv_session *session,
                             const struct kv_index_options *options,
                             uint32_t deadline_ms,
                             struct kv_op **ret_op)
{
    (void)session;
    (void)options;
    (void)deadline_ms;
    n_asked++;
    *ret_op = NULL;
    return KV_IO;
}

/* How often a step of a session with a prompt of 1,024 tokens waits for the layer's codes. */
static unsigned waits_of_a_step(bool is_of_steps, bool wait_index)
{
    struct layer layers[LAYERS] = {
        {.op = (struct kv_op *)(void *)&never_ends, .is_of_steps = is_of_steps}};
    struct kvw_index_schedule index = schedule_of(layers);
    double waited_s = 0;

    index.options.wait = wait_index;
    index.prompt_rows = index.n_rows = index.n_tokens = CHAPTER;
    index.n_steps = 20;
    index.key_bytes = 128;
    n_waits = 0;
    assert_int_equal(kvw_index_schedule_await(&index, 0, &waited_s), KV_OK);
    assert_int_equal(kvw_index_schedule_await(&index, 1, &waited_s), KV_OK);
    assert_true(n_waits > 0 || index.wait_us == 0);
    assert_true(waited_s == (double)index.wait_us / 1e6);
    return n_waits;
}

/* Steps wait for the prompt's codes, as long as it pays: 20 * 1,024 * 3 keys of 128 bytes at 4 GB/s
 * are 2 ms.  For those of generated rows they wait if told to. */
static void steps_wait_for_the_prompt_only(void **state)
{
    (void)state;
    assert_in_range(waits_of_a_step(false, false), 1, 3);
    assert_int_equal(waits_of_a_step(true, false), 0);
    assert_true(waits_of_a_step(true, true) > 0);
}

/* While codes of generated rows are made, the next ones are not asked for: that would wait. */
static void steps_ask_when_nothing_is_under_way(void **state)
{
    struct layer layers[LAYERS] = {{.op = (struct kv_op *)(void *)&never_ends}};
    struct kvw_index_schedule index = schedule_of(layers);

    (void)state;
    index.prompt_rows = index.n_rows = CHAPTER;
    n_waits = n_asked = 0;
    assert_int_equal(kvw_index_schedule_end_pass(&index, KVW_DECODE, 2 * CHAPTER), KV_OK);
    assert_int_equal(index.n_rows, CHAPTER);
    layers[0].op = NULL;
    layers[2].op = (struct kv_op *)(void *)&never_ends;
    assert_int_equal(kvw_index_schedule_end_pass(&index, KVW_DECODE, 2 * CHAPTER), KV_OK);
    assert_int_equal(n_waits + n_asked, 0);
}

/* Of a session with a prompt of 1,024 tokens, whose layer 1 has an index under way. */
static struct kvw_index_schedule under_way(struct layer *layers, bool is_of_steps)
{
    struct kvw_index_schedule index = schedule_of(layers);

    layers[1] =
        (struct layer){.op = (struct kv_op *)(void *)&never_ends, .is_of_steps = is_of_steps};
    index.prompt_rows = index.n_rows = index.n_tokens = CHAPTER;
    index.n_steps = 20;
    index.key_bytes = 128;
    return index;
}

/* A pass of a prompt is ready unless it asks for an index while one is made; a step unless it
 * would wait for the prompt's, which it does as long as all its layers may: 4 times 2 ms. */
static void who_is_ready(void **state)
{
    struct layer layers[LAYERS] = {0};
    struct kvw_index_schedule index = under_way(layers, false);
    const struct timespec pause = {.tv_nsec = 10000000};
    double waited_s = 0;

    (void)state;
    assert_true(kvw_index_schedule_is_ready(&index, KVW_PREFILL, CHAPTER + 100));
    assert_false(kvw_index_schedule_is_ready(&index, KVW_PREFILL, 2 * CHAPTER));
    index.prompt_end = CHAPTER + 200; /* whole blocks of the rest are indexed then */
    assert_false(kvw_index_schedule_is_ready(&index, KVW_PREFILL, CHAPTER + 200));
    assert_false(kvw_index_schedule_is_ready(&index, KVW_DECODE, CHAPTER + 1));
    nanosleep(&pause, NULL);
    assert_true(kvw_index_schedule_is_ready(&index, KVW_DECODE, CHAPTER + 1));
    /* It has waited: the step does not do it again. */
    n_waits = 0;
    assert_int_equal(kvw_index_schedule_await(&index, 1, &waited_s), KV_OK);
    assert_int_equal(n_waits, 0);
    /* A prompt that goes on has another wait. */
    assert_int_equal(kvw_index_schedule_end_pass(&index, KVW_PREFILL, CHAPTER + 200), KV_OK);
    assert_false(kvw_index_schedule_is_ready(&index, KVW_DECODE, CHAPTER + 201));
    index = under_way(layers, true);
    assert_true(kvw_index_schedule_is_ready(&index, KVW_DECODE, CHAPTER + 1));
    index.options.wait = true;
    assert_false(kvw_index_schedule_is_ready(&index, KVW_DECODE, CHAPTER + 1));
    nanosleep(&pause, NULL);
    assert_false(kvw_index_schedule_is_ready(&index, KVW_DECODE, CHAPTER + 1));
    layers[1].op = NULL;
    assert_true(kvw_index_schedule_is_ready(&index, KVW_DECODE, CHAPTER + 1));
    assert_true(kvw_index_schedule_is_ready(&index, KVW_PREFILL, 2 * CHAPTER));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_finds),
        cmocka_unit_test(nodes_say_how_many_fit),
        cmocka_unit_test(unclear_reports_do_not_count),
        cmocka_unit_test(steps_wait_for_the_prompt_only),
        cmocka_unit_test(steps_ask_when_nothing_is_under_way),
        cmocka_unit_test(who_is_ready),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
