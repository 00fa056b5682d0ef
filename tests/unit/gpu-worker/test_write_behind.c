/* write_behind.h: what its check finds. */
#include "gpu-worker/kvcache/write_behind.c" /* its insides are broken below */
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum broken {
    SENT_WITHOUT_OPERATION,
    FREE_WITH_OPERATION,
    MORE_THAN_SLOTS,
    ENDED_BEFORE_BEGUN,
    N_BROKEN,
};

/* Three slots are under way, at the end of the ring and at its beginning. */
static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kvw_write_behind writer = {.n_begun = SLOTS + 1, .n_ended = SLOTS - 2};
    struct kv_op *op = (struct kv_op *)&writer; /* any but NULL */

    writer.ops[SLOTS - 2] = writer.ops[SLOTS - 1] = writer.ops[0] = op;
    if (*broken == SENT_WITHOUT_OPERATION)
        writer.ops[0] = NULL;
    else if (*broken == FREE_WITH_OPERATION)
        writer.ops[1] = op;
    else if (*broken == MORE_THAN_SLOTS)
        writer.n_begun += SLOTS;
    else if (*broken == ENDED_BEFORE_BEGUN)
        writer.n_ended = writer.n_begun + 1;
    kvw_write_behind_check(&writer);
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
