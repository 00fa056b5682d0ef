/* index_schedule.h: what its check finds. */
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_finds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
