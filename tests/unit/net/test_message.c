/* What is sealed passes the check; a header with any one bit flipped does not, whatever the
 * bit; a header whose checksum was made right again fails in the bounds of its fields. */
#include "kernels/checksum.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"
#include "kvserver/net/message.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static char big[KV_WIRE_CONTROL_MAX + 1];

static struct kv_wire_header request(const void *body, size_t body_bytes)
{
    struct kv_wire_header header = {
        .kind = KV_WIRE_REQUEST,
        .op = KV_OP_PUT,
        .request_id = 7,
        .deadline_us = 1000,
        .bulk_bytes = 4096,
    };

    kv_message_seal(&header, body, body_bytes);
    return header;
}

static kv_status_t check(const struct kv_wire_header *header, const void *body, size_t bytes)
{
    struct kv_wire_header got;
    const char *why = NULL;
    kv_status_t status;

    memset(&got, 0x5a, sizeof(got));
    status = kv_message_check(header, sizeof(*header), body, bytes, &got, &why);
    if (status == KV_OK) {
        assert_memory_equal(&got, header, sizeof(got));
    } else {
        assert_non_null(why);
        for (size_t i = 0; i < sizeof(got); i++)
            assert_int_equal(((uint8_t *)&got)[i], 0x5a);
    }
    return status;
}

/* The checksum of the header only: as a peer would send it that means harm. */
static kv_status_t check_reseal(struct kv_wire_header header, const void *body, size_t bytes)
{
    header.header_crc = kv_crc32c(0, &header, offsetof(struct kv_wire_header, header_crc));
    return check(&header, body, bytes);
}

static void sealed_passes(void **state)
{
    struct kv_wire_header header = request("hello", 5), got;
    uint8_t unaligned[sizeof(header) + 1];
    const char *why;

    (void)state;
    assert_int_equal(header.version, KV_WIRE_VERSION);
    assert_int_equal(header.body_bytes, 5);
    assert_int_equal(check(&header, "hello", 5), KV_OK);
    memcpy(unaligned + 1, &header, sizeof(header));
    assert_int_equal(kv_message_check(unaligned + 1, sizeof(header), "hello", 5, &got, &why),
                     KV_OK);
    header = request(NULL, 0);
    assert_int_equal(check(&header, NULL, 0), KV_OK);
}

static bool is_spoken(unsigned version)
{
    return version >= KV_WIRE_VERSION_LEAST && version <= KV_WIRE_VERSION;
}

static void versions(void **state)
{
    (void)state;
    for (unsigned version = 1; version <= UINT16_MAX; version++) {
        struct kv_wire_header header = {.version = (uint16_t)version,
                                        .kind = KV_WIRE_REQUEST,
                                        .op = KV_OP_PING,
                                        .deadline_us = 1};

        kv_message_seal(&header, NULL, 0);
        assert_int_equal(header.version, version);
        assert_int_equal(check(&header, NULL, 0), is_spoken(version) ? KV_OK : KV_VERSION);
    }
    /* The greatest that both speak; 0 where the ranges do not meet. */
    assert_int_equal(kv_wire_version_of(6, 7, 6, 7), 7);
    assert_int_equal(kv_wire_version_of(6, 7, 6, 6), 6);
    assert_int_equal(kv_wire_version_of(6, 6, 6, 9), 6);
    assert_int_equal(kv_wire_version_of(6, 9, 8, 8), 8);
    assert_int_equal(kv_wire_version_of(6, 7, 8, 9), 0);
    assert_int_equal(kv_wire_version_of(6, 7, 1, 5), 0);
    assert_int_equal(kv_wire_version_of(6, 7, 0, 0), 0);
}

static void every_bit_counts(void **state)
{
    char body[] = "some rows of a model";
    struct kv_wire_header header = request(body, sizeof(body));

    (void)state;
    for (unsigned bit = 0; bit < 8 * sizeof(header); bit++) {
        struct kv_wire_header flipped = header;

        ((uint8_t *)&flipped)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(check(&flipped, body, sizeof(body)),
                         is_spoken(flipped.version) ? KV_CORRUPT : KV_VERSION);
    }
    for (unsigned bit = 0; bit < 8 * sizeof(body); bit++) {
        body[bit / 8] ^= (char)(1u << bit % 8);
        assert_int_equal(check(&header, body, sizeof(body)), KV_CORRUPT);
        body[bit / 8] ^= (char)(1u << bit % 8);
    }
}

static void sizes(void **state)
{
    struct kv_wire_header header = request("hello", 5), got;
    uint8_t longer[256] = {0};
    const char *why;

    (void)state;
    memcpy(longer, &header, sizeof(header));
    for (size_t bytes = 0; bytes < sizeof(longer); bytes++)
        if (bytes != sizeof(header))
            assert_int_equal(kv_message_check(longer, bytes, "hello", 5, &got, &why),
                             KV_INVALID);
    assert_int_equal(check(&header, "hello", 4), KV_INVALID);
    assert_int_equal(check(&header, "hello", 6), KV_INVALID);
    assert_int_equal(check(&header, NULL, 0), KV_INVALID);
}

static void fields(void **state)
{
    struct kv_wire_header header;

    (void)state;
#define REFUSED(field, value)                                           \
    do {                                                                \
        header = request("hello", 5);                                   \
        header.field = value;                                           \
        assert_int_equal(check_reseal(header, "hello", 5), KV_INVALID); \
    } while (0)
    REFUSED(kind, 0);
    REFUSED(kind, 5);
    REFUSED(op, 0);
    REFUSED(op, KV_OP_COUNT);
    REFUSED(op, 255);
    REFUSED(flags, 1);
    REFUSED(deadline_us, 0);
    REFUSED(bulk_bytes, KV_WIRE_BULK_MAX + 1);
    REFUSED(bulk_bytes, UINT64_MAX);
    REFUSED(body_bytes, UINT32_MAX);
#undef REFUSED
    header = request("hello", 5);
    header.kind = KV_WIRE_REPLY;
    header.deadline_us = 0;
    assert_int_equal(check_reseal(header, "hello", 5), KV_OK);
}

static void body_bounds(void **state)
{
    static const struct {
        uint8_t op;
        size_t max;
    } cases[] = {
        {KV_OP_PING, KV_WIRE_BODY_MAX},
        {KV_OP_OBJECT_DELETE, KV_WIRE_BODY_MAX},
        {KV_OP_HELLO, KV_WIRE_CONTROL_MAX},
        {KV_OP_DRAIN, KV_WIRE_CONTROL_MAX},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_wire_header header = {
            .kind = KV_WIRE_REPLY,
            .op = cases[i].op,
        };

        kv_message_seal(&header, big, cases[i].max);
        assert_int_equal(check(&header, big, cases[i].max), KV_OK);
        kv_message_seal(&header, big, cases[i].max + 1);
        assert_int_equal(check(&header, big, cases[i].max + 1), KV_INVALID);
    }
}

static void bulk(void **state)
{
    struct kv_wire_header header = {
        .kind = KV_WIRE_BULK_REQUEST,
        .op = KV_OP_PUT,
        .bulk_bytes = KV_WIRE_BULK_MAX,
    };

    (void)state;
    kv_message_seal(&header, NULL, 0);
    /* The data is not looked at: it may be in the memory of a device. */
    assert_int_equal(check(&header, NULL, KV_WIRE_BULK_MAX), KV_OK);
    assert_int_equal(check(&header, NULL, KV_WIRE_BULK_MAX - 1), KV_INVALID);
    header.bulk_bytes = KV_WIRE_BULK_MAX + 1;
    assert_int_equal(check_reseal(header, NULL, KV_WIRE_BULK_MAX + 1), KV_INVALID);
    header.kind = KV_WIRE_BULK_REPLY;
    header.op = KV_OP_OBJECT_GET;
    header.bulk_bytes = KV_OBJECT_BYTES_MAX;
    assert_int_equal(check_reseal(header, NULL, KV_OBJECT_BYTES_MAX), KV_OK);
    header.bulk_bytes = KV_OBJECT_BYTES_MAX + 1;
    assert_int_equal(check_reseal(header, NULL, KV_OBJECT_BYTES_MAX + 1), KV_INVALID);
    header.bulk_bytes = 16;
    header.body_bytes = 16;
    assert_int_equal(check_reseal(header, NULL, 16), KV_INVALID);
}

static void random_headers(void **state)
{
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 1);
    for (int i = 0; i < 200000; i++) {
        struct kv_wire_header header;

        kv_random_fill(&random, &header, sizeof(header));
        header.version = KV_WIRE_VERSION;
        header.kind %= 8;
        header.op %= 64;
        if (i % 2 == 0)
            header.flags = 0;
        assert_int_not_equal(check(&header, big, 100), KV_OK);
        assert_int_not_equal(check_reseal(header, big, 100), KV_OK);
    }
}

static void object_seeds(void **state)
{
    struct kv_id128 name = {{0}};
    uint32_t seed = kv_object_seed(&name);

    (void)state;
    for (unsigned bit = 0; bit < 128; bit++) {
        name.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_not_equal(kv_object_seed(&name), seed);
        name.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_int_equal(kv_object_seed(&name), seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sealed_passes), cmocka_unit_test(every_bit_counts),
        cmocka_unit_test(versions),      cmocka_unit_test(sizes),
        cmocka_unit_test(fields),        cmocka_unit_test(body_bounds),
        cmocka_unit_test(bulk),          cmocka_unit_test(random_headers),
        cmocka_unit_test(object_seeds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
