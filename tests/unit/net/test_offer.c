/* Data read from the sender's memory: whole, over, or not to be had.  The sender is this
 * process. */
#include "kvserver/net/ucx/offer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    BYTES = 100000,
    NO_PROCESS = 0x7fffffff,
};

static struct kv_offers offers;
static unsigned char data[BYTES], got[BYTES];

static int set_up(void **state)
{
    (void)state;
    for (size_t i = 0; i < BYTES; i++)
        data[i] = (unsigned char)(i * 131 >> 3);
    memset(got, 0, BYTES);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kv_offers_free(&offers);
    return 0;
}

static struct kv_offer *
offer_data(const char *header, uint32_t process, struct kv_offer_tail *ret_tail)
{
    struct kv_offer *offer = kv_offer_take(&offers);
    size_t bytes;

    assert_non_null(offer);
    bytes = kv_offer_write(offer, header, strlen(header), data, process);
    assert_int_equal(bytes, strlen(header) + sizeof(*ret_tail));
    assert_memory_equal(offer->message, header, strlen(header));
    memcpy(ret_tail, offer->message + strlen(header), sizeof(*ret_tail));
    return offer;
}

static enum kv_offer_outcome read_pieces(const struct kv_offer_tail *tail, unsigned n)
{
    struct kv_iov iov[KV_IOV_MAX];
    size_t at = 0;

    for (unsigned i = 0; i < n; i++) {
        size_t end = i + 1 == n ? BYTES : BYTES / n * (i + 1);

        iov[i] = (struct kv_iov){got + at, end - at};
        at = end;
    }
    return kv_offer_read(tail, BYTES, iov, n);
}

/* Some containers forbid it; the transport then does without. */
static void skip_if_refused(enum kv_offer_outcome outcome)
{
    if (outcome == KV_OFFER_REFUSED)
        skip();
}

static void data_is_read_in_pieces(void **state)
{
    static const unsigned pieces[] = {1, 3, KV_IOV_MAX};
    struct kv_offer_tail tail;
    struct kv_offer *offer = offer_data("header", (uint32_t)getpid(), &tail);

    (void)state;
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        enum kv_offer_outcome outcome = read_pieces(&tail, pieces[i]);

        skip_if_refused(outcome);
        assert_int_equal(outcome, KV_OFFER_WHOLE);
        assert_memory_equal(got, data, BYTES);
        memset(got, 0, BYTES);
    }
    kv_offer_put(&offers, offer);
}

static void an_offer_that_is_over_gives_nothing(void **state)
{
    struct kv_offer_tail tail, next;
    struct kv_offer *offer = offer_data("", (uint32_t)getpid(), &tail), *again;

    (void)state;
    skip_if_refused(read_pieces(&tail, 1));
    kv_offer_end(offer);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_GONE);
    kv_offer_put(&offers, offer);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_GONE);

    /* The same place with another number: the late reader is not fooled. */
    again = offer_data("", (uint32_t)getpid(), &next);
    assert_ptr_equal(again, offer);
    assert_true(next.number != tail.number && next.number != 0);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_GONE);
    assert_int_equal(read_pieces(&next, 1), KV_OFFER_WHOLE);
    kv_offer_put(&offers, again);
}

static void a_process_that_is_gone(void **state)
{
    struct kv_offer_tail tail;
    struct kv_offer *offer = offer_data("", NO_PROCESS, &tail);

    (void)state;
    skip_if_refused(read_pieces(&tail, 1));
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_GONE);
    kv_offer_put(&offers, offer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(data_is_read_in_pieces),
        cmocka_unit_test(an_offer_that_is_over_gives_nothing),
        cmocka_unit_test(a_process_that_is_gone),
    };

    return cmocka_run_group_tests_name("offer", tests, set_up, tear_down);
}
