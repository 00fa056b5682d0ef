/* write_behind.h: what its check finds; what it says of its slots. */
#define kv_op_status test_op_status
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

static kv_status_t of_oldest;

kv_status_t test_op_status(const struct kv_op *op)
{
    (void)op;
    return of_oldest;
}

/* A slot is free where it was taken back or is about to be; after a failure nobody waits for
 * one. */
static void slots_are_told(void **state)
{
    struct kvw_write_behind writer = {.n_begun = 3, .n_ended = 3};

    (void)state;
    assert_true(kvw_write_behind_is_empty(&writer) && kvw_write_behind_has_slot(&writer));
    of_oldest = KV_IN_PROGRESS;
    writer.n_begun = 3 + SLOTS - 1;
    assert_true(!kvw_write_behind_is_empty(&writer) && kvw_write_behind_has_slot(&writer));
    writer.n_begun = 3 + SLOTS;
    assert_false(kvw_write_behind_has_slot(&writer));
    of_oldest = KV_OK;
    assert_true(!kvw_write_behind_is_empty(&writer) && kvw_write_behind_has_slot(&writer));
    of_oldest = KV_IN_PROGRESS;
    writer.failure = KV_IO;
    assert_true(kvw_write_behind_has_slot(&writer));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_finds),
        cmocka_unit_test(slots_are_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
