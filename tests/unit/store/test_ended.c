/* ended.h: the last ones are told of, each as it ended, and nobody else. */
#include "kvserver/store/shard/ended.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static struct kvs_ended_list list;

static int setup(void **state)
{
    (void)state;
    list = (struct kvs_ended_list){.n_ever = 0};
    return 0;
}

static struct kv_id128 token_of(unsigned i)
{
    return (struct kv_id128){.bytes = {(uint8_t)i, (uint8_t)(i >> 8), [15] = 1}};
}

static void add(unsigned i, enum kvs_ended_why why, uint64_t at_us)
{
    kvs_ended_add(&list,
                  &(struct kvs_ended){
                      .token = token_of(i), .at_us = at_us, .lease_us = 60000000, .why = why});
}

static bool tell(unsigned i, uint64_t now_us, char text[KVS_ENDED_TEXT])
{
    const struct kv_id128 token = token_of(i);

    return kvs_ended_tell(&list, &token, now_us, text);
}

static void words(void **state)
{
    char text[KVS_ENDED_TEXT];

    (void)state;
    assert_false(tell(0, 0, text));
    add(1, KVS_ENDED_LEASE, 5000000);
    add(2, KVS_ENDED_CLOSED, 5000000);
    add(3, KVS_ENDED_UNSAID, 5000000);
    assert_true(tell(1, 17300000, text));
    assert_string_equal(text, "its lease of 60.0 s ended 12.3 s ago");
    assert_true(tell(2, 17300000, text));
    assert_string_equal(text, "a client closed it 12.3 s ago");
    assert_false(tell(3, 17300000, text));
    assert_false(tell(4, 17300000, text));
    /* A data thread's clock may be a step behind. */
    assert_true(tell(1, 4999999, text));
    assert_string_equal(text, "its lease of 60.0 s ended 0.0 s ago");
    /* The longest words fit. */
    kvs_ended_add(&list, &(struct kvs_ended){.token = token_of(4),
                                             .lease_us = UINT64_MAX,
                                             .why = KVS_ENDED_LEASE});
    assert_true(tell(4, UINT64_MAX, text));
    assert_string_equal(text, "its lease of 18446744073709.6 s ended 18446744073709.6 s ago");
}

static void the_latest_counts(void **state)
{
    char text[KVS_ENDED_TEXT];

    (void)state;
    add(1, KVS_ENDED_LEASE, 1000000);
    add(1, KVS_ENDED_CLOSED, 2000000);
    assert_true(tell(1, 2000000, text));
    assert_string_equal(text, "a client closed it 0.0 s ago");
}

static void so_many_are_kept(void **state)
{
    char text[KVS_ENDED_TEXT];

    (void)state;
    for (unsigned i = 0; i < 3 * KVS_ENDED_MAX + 7; i++)
        add(i, KVS_ENDED_CLOSED, i);
    for (unsigned i = 0; i < 3 * KVS_ENDED_MAX + 7; i++)
        assert_int_equal(tell(i, 0, text), i >= 2 * KVS_ENDED_MAX + 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(words, setup),
        cmocka_unit_test_setup(the_latest_counts, setup),
        cmocka_unit_test_setup(so_many_are_kept, setup),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
