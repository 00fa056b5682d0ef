#include "kvserver/store/rows/object.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <string.h>

enum {
    N_NAMES = 40,
    STEPS = 20000,
    CRCS = KV_OBJECT_BYTES_MAX / KV_WIRE_BULK_MAX,
};

static struct kv_id128 key_of(uint32_t i)
{
    return kv_hash128(&i, sizeof(i));
}

static void sizes_and_pieces(void **state)
{
    (void)state;
    assert_int_equal(kvs_object_n_pieces(0), 1);
    assert_int_equal(kvs_object_n_pieces(1), 1);
    assert_int_equal(kvs_object_n_pieces(KV_WIRE_BULK_MAX), 1);
    assert_int_equal(kvs_object_n_pieces(KV_WIRE_BULK_MAX + 1), 2);
    assert_int_equal(kvs_object_n_pieces(KV_OBJECT_BYTES_MAX), CRCS);
    assert_int_equal(kvs_object_piece_bytes(0, 0), 0);
    assert_int_equal(kvs_object_piece_bytes(KV_WIRE_BULK_MAX + 1, 0), KV_WIRE_BULK_MAX);
    assert_int_equal(kvs_object_piece_bytes(KV_WIRE_BULK_MAX + 1, 1), 1);
}

/* Random puts, removals and pins against a plain list. */
static void random_operations(void **state)
{
    static const uint64_t sizes[] = {0, 1, 511, 5000, 100000, 1 << 20, (1 << 20) + 1, 3 << 20};
    struct kvs_stored_object *there[N_NAMES] = {0}, *pinned[N_NAMES] = {0};
    uint64_t bytes_of[N_NAMES] = {0}, sum = 0, version = 0, seed = kv_clock_now(&kv_clock_real);
    struct kvs_arena *arena = kvs_arena_create(64 << 20);
    struct kvs_health health = {0};
    struct kvs_objects objects;
    struct kv_random random;
    uint32_t crcs[CRCS] = {0};

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kv_random_init(&random, seed);
    assert_true(kvs_objects_init(&objects, arena, &health, 7, UINT64_MAX - 2));
    for (unsigned step = 0; step < STEPS; step++) {
        uint32_t i = (uint32_t)kv_random_below(&random, N_NAMES);
        struct kv_id128 key = key_of(i);

        assert_ptr_equal(kvs_objects_find(&objects, &key), there[i]);
        switch (kv_random_below(&random, 3)) {
        case 0: {
            uint64_t bytes = sizes[kv_random_below(&random, 8)];
            struct kvs_stored_object *object;

            if (there[i] != NULL || pinned[i] != NULL)
                break;
            crcs[0] = i;
            object = kvs_object_create(&objects, &key, bytes, 0, crcs);
            if (object == NULL)
                break;
            assert_true(object->version != 0 && object->version != version);
            version = object->version;
            for (uint32_t j = 0; j < object->n_pieces; j++)
                memset(object->pieces[j].bytes, (int)i, kvs_object_piece_bytes(bytes, j));
            assert_null(kvs_objects_find(&objects, &key));
            if (kv_random_below(&random, 4) > 0) {
                assert_int_equal(kvs_objects_publish(&objects, object), KV_OK);
                there[i] = object;
                bytes_of[i] = bytes;
                sum += bytes;
            }
            kvs_object_unpin(&objects, object);
            break;
        }
        case 1:
            assert_int_equal(kvs_objects_remove(&objects, &key), there[i] != NULL);
            if (there[i] != NULL && pinned[i] == NULL)
                sum -= bytes_of[i];
            there[i] = NULL;
            break;
        default:
            if (pinned[i] != NULL) {
                const struct kvs_stored_object *object = pinned[i];

                for (uint32_t j = 0; j < object->n_pieces; j++) {
                    uint32_t bytes = kvs_object_piece_bytes(object->bytes, j);
                    if (bytes > 0)
                        assert_int_equal(object->pieces[j].bytes[bytes - 1], i);
                }
                if (there[i] == NULL)
                    sum -= bytes_of[i];
                kvs_object_unpin(&objects, pinned[i]);
                pinned[i] = NULL;
            } else if (there[i] != NULL) {
                kvs_object_pin(there[i]);
                pinned[i] = there[i];
                assert_true(kvs_object_same(there[i], bytes_of[i],
                                            there[i]->n_pieces == 1 ? &(uint32_t){i}
                                                                    : (crcs[0] = i, crcs)));
                assert_false(kvs_object_same(there[i], bytes_of[i] + 1, crcs));
            }
        }
        assert_int_equal(objects.bytes, sum);
        if (step % 100 == 0)
            kvs_objects_check(&objects);
    }
    for (uint32_t i = 0; i < N_NAMES; i++) {
        struct kv_id128 key = key_of(i);

        kvs_objects_remove(&objects, &key);
        if (pinned[i] != NULL)
            kvs_object_unpin(&objects, pinned[i]);
    }
    assert_int_equal(objects.bytes, 0);
    assert_int_equal(kvs_arena_bytes_used(arena), 0);
    kvs_objects_check(&objects);
    kvs_arena_check(arena);
    kvs_objects_fini(&objects);
    kvs_arena_destroy(arena);
}

/* An object that does not fit takes nothing. */
static void does_not_fit(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(8 << 20);
    struct kvs_health health = {0};
    struct kvs_objects objects;
    struct kv_id128 key = key_of(1);
    uint32_t crcs[CRCS] = {0};

    (void)state;
    assert_true(kvs_objects_init(&objects, arena, &health, 7, UINT64_MAX - 2));
    assert_null(kvs_object_create(&objects, &key, 60 << 20, 0, crcs));
    assert_int_equal(objects.bytes, 0);
    assert_int_equal(kvs_arena_bytes_used(arena), 0);
    kvs_objects_check(&objects);
    kvs_arena_check(arena);
    kvs_objects_fini(&objects);
    kvs_arena_destroy(arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_and_pieces),
        cmocka_unit_test(random_operations),
        cmocka_unit_test(does_not_fit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
