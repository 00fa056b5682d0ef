#include "tests/support/objects.h"

#include "kvserver/base/thread.h"
#include "tests/support/rows.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

static kv_status_t act(const struct test_objects *objects,
                       enum kv_object_verb verb,
                       struct kv_object *object,
                       uint32_t number)
{
    char name[32];
    struct kv_op *op;

    snprintf(name, sizeof(name), "object %u", number);
    object->name = name;
    object->buffer = objects->buffer;
    assert_int_equal(
        kv_objects_begin(objects->client, verb, object, 1, objects->deadline_ms, &op), KV_OK);
    (void)kv_wait(op);
    kv_op_free(op);
    return object->status;
}

static uint64_t seed_of(uint32_t number, uint32_t content)
{
    return (uint64_t)number << 32 | content;
}

kv_status_t test_object_put(const struct test_objects *objects,
                            uint32_t number,
                            uint32_t content,
                            uint32_t ttl_ms,
                            bool evictable)
{
    struct kv_object object = {
        .bytes = objects->bytes_of(number), .ttl_ms = ttl_ms, .evictable = evictable};

    test_fill(kv_buffer_data(objects->buffer), object.bytes, seed_of(number, content));
    return act(objects, KV_OBJECT_PUT, &object, number);
}

kv_status_t
test_object_get(const struct test_objects *objects, uint32_t number, uint32_t content)
{
    struct kv_object object = {.bytes = kv_buffer_bytes(objects->buffer)};
    kv_status_t status;

    memset(kv_buffer_data(objects->buffer), 0, object.bytes);
    status = act(objects, KV_OBJECT_GET, &object, number);
    if (status == KV_OK) {
        assert_int_equal(object.bytes, objects->bytes_of(number));
        assert_true(test_is_filled(kv_buffer_data(objects->buffer), object.bytes,
                                   seed_of(number, content)));
    }
    return status;
}

kv_status_t test_object_delete(const struct test_objects *objects, uint32_t number)
{
    struct kv_object object = {0};

    return act(objects, KV_OBJECT_DELETE, &object, number);
}

struct kv_verification
test_verify_ask(struct kv_client *client, uint32_t node, uint64_t since_us)
{
    struct kv_verification verification;
    struct kv_op *op;

    assert_int_equal(kv_verify_begin(client, node, since_us, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("verify: %s", kv_op_detail(op));
    verification = *kv_op_verification(op);
    kv_op_free(op);
    return verification;
}

struct kv_verification test_verify(struct kv_client *client, uint32_t node)
{
    const struct kv_verification first = test_verify_ask(client, node, 0);
    struct kv_verification last = first;

    for (int i = 0; !last.is_done; i++) {
        assert_true(i < 60000);
        kv_client_wait(client, 1000);
        last = test_verify_ask(client, node, first.since_us);
        assert_int_equal(last.since_us, first.since_us);
    }
    last.disk.blocks -= first.disk.blocks;
    last.disk.bytes -= first.disk.bytes;
    last.disk.bad -= first.disk.bad;
    last.disk.mended -= first.disk.mended;
    last.disk.lost -= first.disk.lost;
    last.disk.unread -= first.disk.unread;
    last.memory.bad -= first.memory.bad;
    return last;
}

double test_disk_number(struct kv_client *client, const char *column)
{
    const struct kv_table *table;
    struct kv_op *op;
    double number = -1;

    assert_int_equal(kv_table_begin(client, 0, "tiers", 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    table = kv_op_table(op);
    assert_string_equal(table->cells[table->n_columns].text, "disk");
    for (uint32_t i = 0; i < table->n_columns; i++)
        if (strcmp(table->columns[i], column) == 0)
            number = table->cells[table->n_columns + i].number;
    assert_true(number >= 0);
    kv_op_free(op);
    return number;
}

void test_wait_disk(struct kv_client *client, const char *column, double least, double most)
{
    double number;

    for (int i = 0; (number = test_disk_number(client, column)) < least || number > most; i++) {
        if (i == 60000)
            fail_msg("%s is %.0f, not %.0f to %.0f", column, number, least, most);
        kv_client_wait(client, 1000);
        kv_sleep_fds(NULL, 0, 1000);
    }
}
