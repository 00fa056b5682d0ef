/* device_rows.h: what its check finds. */
#include "gpu-worker/kvcache/device_rows.c" /* its insides are broken below */
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum broken {
    FULL_AND_WINDOWED,
    MORE_THAN_THERE_IS_ROOM_FOR,
    FULL_FROM_THE_MIDDLE,
    NO_WINDOW,
    MORE_THAN_THE_WINDOW,
    BEGINS_BEHIND_THE_END,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kvw_device_buffer **buffers = (struct kvw_device_buffer **)arg; /* any but NULL */
    struct kvw_device_rows rows = {
        .some = buffers,
        .shape.capacity = 1000,
        .sinks = 4,
        .window = 64,
        .n_tokens = 500,
        .begin = 500 - 64,
    };

    if (*broken == FULL_AND_WINDOWED)
        rows.all = buffers;
    else if (*broken == MORE_THAN_THERE_IS_ROOM_FOR)
        rows.shape.capacity = 499;
    else if (*broken == FULL_FROM_THE_MIDDLE)
        rows.all = buffers, rows.some = NULL;
    else if (*broken == NO_WINDOW)
        rows.window = 0;
    else if (*broken == MORE_THAN_THE_WINDOW)
        rows.begin--;
    else if (*broken == BEGINS_BEHIND_THE_END)
        rows.begin = rows.n_tokens + 1;
    kvw_device_rows_check(&rows);
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
