/* session_record.c over a store inside of the process: what is saved comes back, whole or not at
 * all, whoever else writes, and whatever else is there. */
#include "gpu-worker/kvcache/session_record.c" /* its layout is written by hand below */

#include "gpu-worker/kvcache/embedded_node.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    TOKENS = 5000,
    ROUNDS = 30,
    CORRUPTIONS = 3000,
};

static struct kvw_embedded *embedded;
static struct kv_client *client;
static char detail[256];

static struct kv_client *connect_as(uint32_t tenant)
{
    const struct kv_client_options options = {
        .nodes = kvw_embedded_address(embedded), .tenant = tenant, .peer_timeout_ms = 60000};
    struct kv_client *opened;

    if (kv_client_open(&options, &opened, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    return opened;
}

static char *text_of(const char *text)
{
    char *copied = malloc(strlen(text) + 1);

    assert_non_null(copied);
    strcpy(copied, text);
    return copied;
}

/* A record whose content follows from `salt`. */
static struct kvw_record make(uint32_t salt)
{
    struct kvw_record record = {
        .ticket = {.session_id = {{(uint8_t)salt, 1}}, .token = {{2}}, .root = salt},
        .fingerprint = {{3, (uint8_t)salt}},
        .n_tokens = TOKENS + salt,
        .n_stored = TOKENS - salt,
        .is_arriving = salt % 2 == 1,
        .n_messages = 2,
        .random = {salt, 1, 2, 3},
    };

    record.tokens = malloc(record.n_tokens * sizeof(record.tokens[0]));
    record.messages = malloc(2 * sizeof(record.messages[0]));
    assert_true(record.tokens != NULL && record.messages != NULL);
    for (uint32_t i = 0; i < record.n_tokens; i++)
        record.tokens[i] = i * (salt + 1);
    record.messages[0] = (struct kvw_record_message){1, text_of("Who?")};
    record.messages[1] = (struct kvw_record_message){2, text_of("")};
    return record;
}

static void expect_made(const struct kvw_record *record, uint32_t salt)
{
    struct kvw_record wanted = make(salt);

    assert_memory_equal(&record->ticket, &wanted.ticket, sizeof(wanted.ticket));
    assert_memory_equal(&record->fingerprint, &wanted.fingerprint, sizeof(wanted.fingerprint));
    assert_memory_equal(record->random, wanted.random, sizeof(wanted.random));
    assert_int_equal(record->n_stored, wanted.n_stored);
    assert_int_equal(record->is_arriving, wanted.is_arriving);
    assert_int_equal(record->n_tokens, wanted.n_tokens);
    assert_memory_equal(record->tokens, wanted.tokens, wanted.n_tokens * sizeof(uint32_t));
    assert_int_equal(record->n_messages, 2);
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(record->messages[i].role, wanted.messages[i].role);
        assert_string_equal(record->messages[i].text, wanted.messages[i].text);
    }
    kvw_record_fini(&wanted);
}

static void save(struct kv_client *by, const char *name, uint64_t *number, uint32_t salt)
{
    struct kvw_record record = make(salt);

    record.number = *number;
    if (kvw_record_save(by, name, &record, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    *number = record.number;
    kvw_record_fini(&record);
}

static void expect(struct kv_client *by, const char *name, uint64_t number, uint32_t salt)
{
    struct kvw_record record;
    bool is_lost;

    if (kvw_record_load(by, name, &record, &is_lost, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    assert_int_equal(record.number, number);
    assert_false(is_lost);
    expect_made(&record, salt);
    kvw_record_fini(&record);
}

static void expect_none(struct kv_client *by, const char *name, kv_status_t wanted)
{
    struct kvw_record record;
    bool is_lost;

    assert_int_equal(kvw_record_load(by, name, &record, &is_lost, detail, sizeof(detail)),
                     wanted);
}

static unsigned n_objects(const char *name)
{
    struct names names;
    unsigned n = 0;

    name_slots(name, &names);
    for (unsigned i = 0; i < SLOTS; i++) {
        struct kv_object object = {.name = names.text[i]};

        n += run(client, KV_OBJECT_EXISTS, &object, 1, detail, sizeof(detail)) == KV_OK;
    }
    return n;
}

static void put(const char *name, const void *data, size_t bytes)
{
    struct kv_object object = {.name = name, .bytes = bytes};

    assert_int_equal(kv_buffer_alloc(client, bytes > 0 ? bytes : 1, &object.buffer), KV_OK);
    memcpy(kv_buffer_data(object.buffer), data, bytes);
    assert_int_equal(run(client, KV_OBJECT_PUT, &object, 1, detail, sizeof(detail)), KV_OK);
    assert_int_equal(kv_buffer_free(object.buffer), KV_OK);
}

/* ---- tests ------------------------------------------------------------------------------- */

static void names_are_bounded(void **state)
{
    char name[KVW_RECORD_NAME_MAX + 2];

    (void)state;
    memset(name, 'x', sizeof(name));
    name[KVW_RECORD_NAME_MAX] = '\0';
    assert_true(kvw_record_is_name(name) && kvw_record_is_name("a b/\xc3\xa4"));
    name[KVW_RECORD_NAME_MAX] = 'x';
    name[KVW_RECORD_NAME_MAX + 1] = '\0';
    assert_false(kvw_record_is_name(name) || kvw_record_is_name("") ||
                 kvw_record_is_name("a\nb") || kvw_record_is_name("\x7f"));
}

/* The last one counts, and few are kept. */
static void the_last_one_counts(void **state)
{
    uint64_t number = 0;

    (void)state;
    expect_none(client, "last", KV_NOT_FOUND);
    assert_string_equal(detail, "no such session");
    for (uint32_t i = 0; i < ROUNDS; i++) {
        save(client, "last", &number, i);
        assert_int_equal(number, i + 1);
        expect(client, "last", i + 1, i);
        assert_true(n_objects("last") <= KEPT);
    }
    expect_none(client, "las", KV_NOT_FOUND);
}

/* A name is a tenant's own. */
static void tenants_do_not_meet(void **state)
{
    struct kv_client *other = connect_as(7);
    uint64_t number = 0, others_number = 0;

    (void)state;
    save(client, "tenant", &number, 1);
    expect_none(other, "tenant", KV_NOT_FOUND);
    save(other, "tenant", &others_number, 2);
    expect(client, "tenant", 1, 1);
    expect(other, "tenant", 1, 2);
    kv_client_close(other);
}

/* Whoever comes second with a number is told so; then the later one wins. */
static void two_writers(void **state)
{
    struct kv_client *other = connect_as(0);
    struct kvw_record record = make(5);
    uint64_t number = 0, others_number;

    (void)state;
    save(client, "two", &number, 1);
    others_number = number;
    save(other, "two", &others_number, 2);
    record.number = number;
    assert_int_equal(kvw_record_save(client, "two", &record, detail, sizeof(detail)),
                     KV_EXISTS);
    assert_int_equal(record.number, number);
    expect(client, "two", others_number, 2);
    kvw_record_fini(&record);
    number = others_number;
    save(client, "two", &number, 3);
    expect(other, "two", others_number + 1, 3);
    kv_client_close(other);
}

/* A writer died before it had deleted anything: its successor meets what was left. */
static void what_is_left_over_is_replaced(void **state)
{
    struct kvw_record record = make(1);
    const size_t bytes = packed_bytes(&record);
    uint8_t *data = malloc(bytes);
    uint64_t number = SLOTS;
    char name[80];

    (void)state;
    assert_non_null(data);
    for (uint64_t i = 1; i <= SLOTS; i++) {
        pack(&record, i, data);
        snprintf(name, sizeof(name), "kvworker/session/left/%u", (unsigned)(i % SLOTS));
        put(name, data, bytes);
    }
    expect(client, "left", SLOTS, 1);
    for (uint32_t i = 0; i < SLOTS; i++) {
        save(client, "left", &number, 2);
        expect(client, "left", SLOTS + 1 + i, 2);
    }
    assert_int_equal(n_objects("left"), KEPT);
    free(data);
    kvw_record_fini(&record);
}

/* What is no record is never taken for one; the one before it is still good, and it is told that
 * there may be a later one. */
static void what_is_no_record(void **state)
{
    static const char text[] = "something else";
    struct kvw_record record;
    uint64_t number = 0;
    bool is_lost;

    (void)state;
    put("kvworker/session/none/3", text, sizeof(text));
    expect_none(client, "none", KV_CORRUPT);
    assert_non_null(strstr(detail, "not a record of kvworker"));
    put("kvworker/session/none/4", "", 0);
    expect_none(client, "none", KV_CORRUPT);
    save(client, "none", &number, 1);
    assert_int_equal(kvw_record_load(client, "none", &record, &is_lost, detail, sizeof(detail)),
                     KV_OK);
    assert_true(is_lost);
    expect_made(&record, 1);
    kvw_record_fini(&record);
    /* It is overwritten once its turn has come. */
    save(client, "none", &number, 2);
    save(client, "none", &number, 3);
    assert_int_equal(number, 3);
    save(client, "none", &number, 4);
    expect(client, "none", 4, 4);
}

/* Every field that says how much there is, and then anything. */
static void lies_are_found(void **state)
{
    struct kvw_record record = make(1), read;
    const size_t bytes = packed_bytes(&record);
    uint8_t *data = malloc(bytes + 1), *broken;
    struct kv_random dice;
    struct head head;

    (void)state;
    assert_non_null(data);
    kv_random_init(&dice, 1);
    pack(&record, 9, data);
    memcpy(&head, data, sizeof(head));
    assert_int_equal(unpack(data, bytes, &read, detail, sizeof(detail)), KV_OK);
    expect_made(&read, 1);
    kvw_record_fini(&read);

    for (size_t less = 1; less <= bytes; less = less < 200 ? less + 1 : less * 2)
        assert_int_equal(unpack(data, bytes - less, &read, detail, sizeof(detail)), KV_CORRUPT);
    data[bytes] = 0;
    assert_int_equal(unpack(data, bytes + 1, &read, detail, sizeof(detail)), KV_CORRUPT);
    struct head lies[] = {head, head, head, head, head, head, head, head};
    lies[0].magic++;
    lies[1].number = 0;
    lies[2].is_arriving = 2;
    lies[3].n_tokens = 0;
    lies[4].n_tokens = UINT32_MAX;
    lies[5].n_stored = head.n_tokens + 1;
    lies[6].n_messages = UINT32_MAX;
    lies[7].n_messages++;
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        memcpy(data, &lies[i], sizeof(head));
        assert_int_equal(unpack(data, bytes, &read, detail, sizeof(detail)), KV_CORRUPT);
    }
    head.format++;
    memcpy(data, &head, sizeof(head));
    assert_int_equal(unpack(data, bytes, &read, detail, sizeof(detail)), KV_VERSION);
    assert_non_null(strstr(detail, "record of format 2"));

    /* A zero in a text, and a text that would reach further than the record. */
    pack(&record, 9, data);
    data[bytes - 1] = '\0';
    assert_int_equal(unpack(data, bytes, &read, detail, sizeof(detail)), KV_CORRUPT);
    pack(&record, 9, data);
    memset(data + sizeof(head) + 4, 0xff, 4);
    assert_int_equal(unpack(data, bytes, &read, detail, sizeof(detail)), KV_CORRUPT);

    /* In memory of its own size, so that the address sanitizer sees what is read beyond it. */
    broken = malloc(bytes);
    assert_non_null(broken);
    for (unsigned i = 0; i < CORRUPTIONS; i++) {
        pack(&record, 9, broken);
        for (unsigned j = 0; j <= i % 3; j++)
            broken[kv_random_below(&dice, i % 2 == 0 ? 160 : bytes)] =
                (uint8_t)kv_random_next(&dice);
        if (unpack(broken, bytes, &read, detail, sizeof(detail)) == KV_OK)
            kvw_record_fini(&read);
    }
    free(broken);
    free(data);
    kvw_record_fini(&record);
}

static int set_up(void **state)
{
    (void)state;
    assert_int_equal(kvw_embedded_open(64 << 20, &embedded, detail, sizeof(detail)), KV_OK);
    client = connect_as(0);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kv_client_close(client);
    kvw_embedded_close(embedded);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_bounded),
        cmocka_unit_test(the_last_one_counts),
        cmocka_unit_test(tenants_do_not_meet),
        cmocka_unit_test(two_writers),
        cmocka_unit_test(what_is_left_over_is_replaced),
        cmocka_unit_test(what_is_no_record),
        cmocka_unit_test(lies_are_found),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
