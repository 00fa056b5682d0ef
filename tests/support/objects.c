#include "tests/support/objects.h"

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
