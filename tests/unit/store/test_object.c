#include "kvserver/store/rows/object.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
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

static struct kvs_stored_object *create(struct kvs_objects *objects,
                                        uint32_t i,
                                        uint64_t bytes,
                                        const uint32_t *crcs,
                                        uint64_t expires_us,
                                        bool is_evictable)
{
    char name[16];
    const int name_bytes = snprintf(name, sizeof(name), "name %u", i);
    const struct kvs_object_facts facts = {.key = key_of(i),
                                           .bytes = bytes,
                                           .crcs = crcs,
                                           .name = name,
                                           .name_bytes = (uint32_t)name_bytes,
                                           .terms = {expires_us, is_evictable}};
    struct kvs_stored_object *object = kvs_object_create(objects, &facts);

    if (object != NULL) {
        assert_int_equal(object->name_bytes, name_bytes);
        assert_memory_equal(kvs_object_name(object), name, name_bytes);
    }
    return object;
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
            object = create(&objects, i, bytes, crcs, KVS_EXPIRY_NEVER, false);
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
    uint32_t crcs[CRCS] = {0};

    (void)state;
    assert_true(kvs_objects_init(&objects, arena, &health, 7, UINT64_MAX - 2));
    assert_null(create(&objects, 1, 60 << 20, crcs, KVS_EXPIRY_NEVER, false));
    assert_int_equal(objects.bytes, 0);
    assert_int_equal(kvs_arena_bytes_used(arena), 0);
    kvs_objects_check(&objects);
    kvs_arena_check(arena);
    kvs_objects_fini(&objects);
    kvs_arena_destroy(arena);
}

/* ---- how long they stay ------------------------------------------------------------------ */

struct bench {
    struct kvs_arena *arena;
    struct kvs_health health;
    struct kvs_objects objects;
};

static void bench_open(struct bench *bench, uint64_t bytes)
{
    *bench = (struct bench){.arena = kvs_arena_create(bytes)};
    assert_non_null(bench->arena);
    assert_true(kvs_objects_init(&bench->objects, bench->arena, &bench->health, 7, 1));
}

/* Everything is given back, what is spare to others as well. */
static void bench_close(struct bench *bench)
{
    struct kvs_objects *objects = &bench->objects;

    while (objects->first != NULL) {
        const struct kv_id128 key = objects->first->key;

        assert_true(kvs_objects_remove(objects, &key));
    }
    kvs_objects_check(objects);
    assert_int_equal(objects->bytes, 0);
    assert_int_equal(objects->memory, 0);
    assert_int_equal(kvs_arena_pages(bench->arena)->spare_bytes, 0);
    assert_int_equal(kvs_arena_bytes_used(bench->arena), 0);
    kvs_objects_fini(objects);
    kvs_arena_destroy(bench->arena);
}

static struct kvs_stored_object *
publish(struct bench *bench, uint32_t i, uint64_t bytes, uint64_t expires_us, bool is_evictable)
{
    uint32_t crcs[CRCS] = {0};
    struct kvs_stored_object *object =
        create(&bench->objects, i, bytes, crcs, expires_us, is_evictable);

    if (object == NULL)
        return NULL;
    assert_int_equal(kvs_objects_publish(&bench->objects, object), KV_OK);
    kvs_object_unpin(&bench->objects, object);
    return object;
}

static bool is_there(struct bench *bench, uint32_t i, uint64_t now_us)
{
    const struct kv_id128 key = key_of(i);

    return kvs_objects_find_live(&bench->objects, &key, now_us) != NULL;
}

/* Objects with random times, some renewed and some removed: each is there before its time and not
 * after it, whether it is asked for or freed by and by. */
static void objects_expire(void **state)
{
    enum {
        N = 500,
        TIMES = 1000
    };
    uint64_t seed = kv_clock_now(&kv_clock_real), ends_us[N] = {0};
    struct kv_random random;
    struct bench bench;
    size_t n = 0;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kv_random_init(&random, seed);
    bench_open(&bench, 64 << 20);
    for (uint64_t now_us = 1; now_us <= 3 * TIMES; now_us++) {
        const uint32_t i = (uint32_t)kv_random_below(&random, N);
        const struct kv_id128 key = key_of(i);
        const bool stays = kv_random_below(&random, 8) == 0;
        const uint64_t end_us =
            stays ? KVS_EXPIRY_NEVER : now_us + 1 + kv_random_below(&random, TIMES);
        struct kvs_stored_object *object = kvs_objects_find_live(&bench.objects, &key, now_us);

        assert_int_equal(object != NULL, ends_us[i] > now_us);
        if (object == NULL) {
            assert_non_null(publish(&bench, i, 100, end_us, false));
            ends_us[i] = end_us;
        } else if (kv_random_below(&random, 4) == 0) {
            assert_true(kvs_objects_remove(&bench.objects, &key));
            ends_us[i] = 0;
        } else {
            const struct kvs_object_terms terms = {end_us, false};

            kvs_object_renew(&bench.objects, object, &terms);
            ends_us[i] = end_us > ends_us[i] ? end_us : ends_us[i];
        }
        if (now_us % 3 == 0)
            while (kvs_objects_expire(&bench.objects, now_us))
                n++;
        if (now_us % 3 == 0) {
            size_t n_live = 0;

            for (uint32_t j = 0; j < N; j++)
                n_live += ends_us[j] > now_us;
            assert_int_equal(kv_map_count(bench.objects.map), n_live);
        }
        if (now_us % 50 == 0)
            kvs_objects_check(&bench.objects);
    }
    assert_true(n > 0 && bench.objects.n_expired >= n);
    bench_close(&bench);
}

/* What is used is evicted last; what is pinned, or was put to stay, is not evicted. */
static void the_least_used_go_first(void **state)
{
    const struct kvs_object_terms stay = {KVS_EXPIRY_NEVER, false};
    struct kvs_stored_object *objects[6];
    struct bench bench;

    (void)state;
    bench_open(&bench, 16 << 20);
    for (uint32_t i = 0; i < 6; i++)
        objects[i] = publish(&bench, i, 1000, i == 5 ? 40 : KVS_EXPIRY_NEVER, i != 4);
    assert_int_equal(bench.objects.lists[KVS_OBJECTS_EVICT].n, 5);
    assert_true(bench.objects.spare_bytes >= 5000 &&
                bench.objects.spare_bytes < bench.objects.memory);
    kvs_object_touch(&bench.objects, objects[0]);
    kvs_object_pin(objects[1]);
    kvs_object_renew(&bench.objects, objects[3], &stay);
    kvs_objects_check(&bench.objects);

    /* 2, 5, 0 are left, in this order. */
    assert_true(kvs_objects_evict(&bench.objects));
    assert_false(is_there(&bench, 2, 1));
    assert_true(kvs_objects_evict(&bench.objects));
    assert_false(is_there(&bench, 5, 1));
    assert_true(is_there(&bench, 0, 1));
    assert_true(kvs_objects_evict(&bench.objects));
    assert_false(is_there(&bench, 0, 1));
    assert_false(kvs_objects_evict(&bench.objects));
    assert_false(kvs_objects_expire(&bench.objects, 100)); /* 5 is gone from there, too */
    kvs_object_unpin(&bench.objects, objects[1]);
    assert_true(is_there(&bench, 1, 1) && is_there(&bench, 3, 1) && is_there(&bench, 4, 1));
    assert_true(kvs_objects_evict(&bench.objects));
    assert_false(is_there(&bench, 1, 1));
    assert_int_equal(bench.objects.n_evicted, 4);
    kvs_objects_check(&bench.objects);
    bench_close(&bench);
}

/* When memory is full, room is wanted as long as there is something to evict, and no longer. */
static void room_is_made(void **state)
{
    struct kvs_pages *pages;
    struct bench bench;
    uint32_t n = 0, n_tries = 0;

    (void)state;
    bench_open(&bench, 32 << 20);
    pages = kvs_arena_pages(bench.arena);
    assert_false(kvs_pages_are_wanted(pages));
    while (publish(&bench, n, 1 << 20, KVS_EXPIRY_NEVER, n < 20) != NULL)
        n++;
    assert_true(kvs_pages_are_wanted(pages)); /* few are left */
    while (publish(&bench, 1000, 9 << 20, KVS_EXPIRY_NEVER, false) == NULL) {
        assert_true(kvs_pages_want(pages, 9 << 20));
        assert_true(++n_tries < 100);
        while (kvs_pages_are_wanted(pages) && kvs_objects_evict(&bench.objects))
            ;
    }
    assert_true(n_tries > 0);
    assert_true(n > 20);
    for (uint32_t i = 20; i < n; i++)
        assert_true(is_there(&bench, i, 1));
    while (publish(&bench, 1001 + n_tries, 1 << 20, KVS_EXPIRY_NEVER, false) != NULL ||
           kvs_objects_evict(&bench.objects))
        n_tries++;
    assert_int_equal(bench.objects.lists[KVS_OBJECTS_EVICT].n, 0);
    assert_false(kvs_pages_want(pages, 1 << 20));
    kvs_objects_check(&bench.objects);
    bench_close(&bench);
}

/* ---- objects that are saved ---- */

/* Keeps objects in a list of its own; a piece comes back when the test says so. */
struct kvs_object_kept {
    unsigned n_renewed;
    bool is_removed;
};

static struct {
    struct kvs_object_kept kept[8];
    unsigned n_kept, n_loads;
    struct kvs_stored_object *asked;
    uint32_t piece;
} keeper_;

static void on_published(void *arg, struct kvs_stored_object *object)
{
    assert_ptr_equal(arg, &keeper_);
    object->kept = &keeper_.kept[keeper_.n_kept++];
}

static void on_renewed(void *arg, struct kvs_stored_object *object)
{
    (void)arg;
    object->kept->n_renewed++;
}

static void on_removed(void *arg, struct kvs_stored_object *object)
{
    (void)arg;
    object->kept->is_removed = true;
}

static bool on_load(void *arg, struct kvs_stored_object *object, uint32_t piece)
{
    (void)arg;
    keeper_.n_loads++;
    keeper_.asked = object;
    keeper_.piece = piece;
    return true;
}

static const void *on_erasure(void *arg, const struct kv_id128 *key)
{
    (void)arg;
    (void)key;
    return NULL;
}

static uint64_t on_removals(void *arg, uint64_t *ret_oldest)
{
    (void)arg;
    (void)ret_oldest;
    return 0;
}

static const struct kvs_object_keeper keeper = {on_published, on_renewed, on_removed,
                                                on_load,      on_erasure, on_removals};

static void bring_back(struct bench *bench)
{
    const uint32_t bytes = kvs_object_piece_bytes(keeper_.asked->bytes, keeper_.piece);
    const int class_id = kvs_arena_class_rounded(bench->arena, bytes);

    kvs_object_piece_back(&bench->objects, keeper_.asked, keeper_.piece,
                          kvs_arena_alloc(bench->arena, class_id), class_id);
    kvs_objects_check(&bench->objects);
}

/* What is saved leaves before anything is evicted, piece by piece comes back, and is what can make
 * room again. */
static void the_saved_leave(void **state)
{
    const struct kvs_object_terms stay = {KVS_EXPIRY_NEVER, false};
    struct kvs_stored_object *evictable, *saved, *waiting;
    struct bench bench;
    uint64_t spare;

    (void)state;
    memset(&keeper_, 0, sizeof(keeper_));
    bench_open(&bench, 32 << 20);
    evictable = publish(&bench, 0, 1000, KVS_EXPIRY_NEVER, true);
    assert_null(evictable->kept);
    (void)kvs_objects_remove(&bench.objects, &evictable->key);
    kvs_objects_set_keeper(&bench.objects, &keeper, &keeper_);

    evictable = publish(&bench, 0, 1000, KVS_EXPIRY_NEVER, true);
    saved = publish(&bench, 1, (2 << 20) + 5, KVS_EXPIRY_NEVER, false);
    waiting = publish(&bench, 2, 3000, KVS_EXPIRY_NEVER, false);
    /* What waits to be saved can leave soon, unless it cannot be saved. */
    spare = bench.objects.spare_bytes;
    assert_true(spare > (2 << 20) + 4000);
    kvs_object_set_stuck(&bench.objects, waiting, true);
    assert_true(bench.objects.spare_bytes <= spare - 3000);
    kvs_object_set_saved(&bench.objects, saved, true);
    kvs_objects_check(&bench.objects);

    assert_true(kvs_objects_evict(&bench.objects));
    assert_int_equal(saved->n_here, 0);
    assert_int_equal(bench.objects.n_away, 3);
    assert_true(is_there(&bench, 0, 1) && is_there(&bench, 1, 1));
    kvs_objects_check(&bench.objects);
    assert_int_equal(kvs_object_need(&bench.objects, saved, 1), KV_NOT_READY);
    assert_int_equal(kvs_object_need(&bench.objects, saved, 1), KV_NOT_READY);
    assert_int_equal(keeper_.n_loads, 1);
    bring_back(&bench);
    assert_int_equal(kvs_object_need(&bench.objects, saved, 1), KV_OK);
    assert_int_equal(saved->n_here, 1);
    /* Nobody is to touch what somebody uses; then what is evictable goes. */
    kvs_object_pin(saved);
    assert_true(kvs_objects_evict(&bench.objects));
    assert_false(is_there(&bench, 0, 1));
    assert_true(keeper_.kept[0].is_removed);
    assert_false(kvs_objects_evict(&bench.objects));
    kvs_object_unpin(&bench.objects, saved);

    /* A piece that has gone bad in memory is read again; one that is lost is bad. */
    kvs_object_mark_bad(&bench.objects, saved, 1);
    assert_int_equal(kvs_object_need(&bench.objects, saved, 1), KV_NOT_READY);
    assert_int_equal(kvs_object_n_bad(saved), 0);
    bring_back(&bench);
    assert_int_equal(kvs_object_need(&bench.objects, saved, 0), KV_NOT_READY);
    kvs_object_piece_back(&bench.objects, saved, 0, NULL, 0);
    assert_int_equal(kvs_object_need(&bench.objects, saved, 0), KV_OK);
    assert_int_equal(kvs_object_n_bad(saved), 1);
    kvs_objects_check(&bench.objects);

    /* What is lent goes with the last pin. */
    kvs_object_pin(saved);
    assert_int_equal(kvs_object_need(&bench.objects, saved, 2), KV_NOT_READY);
    kvs_object_piece_back(&bench.objects, saved, 2, malloc(5), KVS_PIECE_LENT);
    assert_int_equal(saved->n_here, 2);
    kvs_objects_check(&bench.objects);
    kvs_object_unpin(&bench.objects, saved);
    assert_int_equal(saved->n_here, 1);
    assert_int_equal(bench.objects.n_lent, 0);

    kvs_object_renew(&bench.objects, saved, &stay);
    assert_int_equal(saved->kept->n_renewed, 0); /* nothing is new */
    bench_close(&bench);
}

/* An object with the same bytes takes the place of one that is away, and what is saved of it is its
 * own; but not of one that is bad, which is erased. */
static void another_takes_its_place(void **state)
{
    struct kvs_stored_object *old, *new;
    struct bench bench;

    (void)state;
    for (unsigned round = 0; round < 3; round++) {
        const bool is_saved = round > 0, is_bad = round == 2;
        uint32_t crcs[CRCS] = {0};
        uint64_t version;

        memset(&keeper_, 0, sizeof(keeper_));
        bench_open(&bench, 16 << 20);
        kvs_objects_set_keeper(&bench.objects, &keeper, &keeper_);
        old = publish(&bench, 1, 1000, 5000, true);
        version = old->version;
        if (is_saved) {
            kvs_object_set_saved(&bench.objects, old, true);
            assert_true(kvs_objects_evict(&bench.objects));
        }
        if (is_bad) {
            assert_int_equal(kvs_object_need(&bench.objects, old, 0), KV_NOT_READY);
            kvs_object_piece_back(&bench.objects, old, 0, NULL, 0);
        }
        new = create(&bench.objects, 1, 1000, crcs, 9000, true);
        assert_int_equal(kvs_objects_replace(&bench.objects, new), KV_OK);
        kvs_object_unpin(&bench.objects, new);
        kvs_objects_check(&bench.objects);
        assert_int_equal(new->is_saved, is_saved && !is_bad);
        assert_int_equal(new->version == version, is_saved && !is_bad);
        assert_int_equal(keeper_.kept[0].is_removed, !is_saved || is_bad);
        assert_int_equal(keeper_.n_kept, is_saved && !is_bad ? 1 : 2);
        assert_int_equal(kvs_object_need(&bench.objects, new, 0), KV_OK);
        bench_close(&bench);
    }
}

/* A walk in pieces sees every object that stays, once and in order, whatever goes or comes
 * meanwhile, and whether its place is remembered or not. */
static void walks_go_on(void **state)
{
    enum {
        N = 300
    };
    uint64_t seed = kv_clock_now(&kv_clock_real);
    struct kv_random random;
    struct bench bench;
    uint32_t n_more = N;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kv_random_init(&random, seed);
    bench_open(&bench, 32 << 20);
    for (uint32_t i = 0; i < N; i++)
        publish(&bench, i, 10, KVS_EXPIRY_NEVER, true);
    for (unsigned round = 0; round < 20; round++) {
        const uint64_t until = bench.objects.number;
        bool is_seen[4096] = {false};
        uint64_t after = 0;

        while (after < until) {
            uint32_t n = 1 + (uint32_t)kv_random_below(&random, 20);
            const struct kvs_stored_object *object;
            uint64_t last = after;

            kvs_objects_walk_begin(&bench.objects, after);
            while (bench.objects.walk != NULL && bench.objects.walk->number <= after)
                kvs_objects_walk_on(&bench.objects);
            for (; (object = bench.objects.walk) != NULL && n > 0; n--) {
                assert_true(object->number > last && object->number < 4096);
                last = object->number;
                is_seen[last] = true;
                kvs_objects_walk_on(&bench.objects);
                if (kv_random_below(&random, 8) == 0 && bench.objects.walk != NULL) {
                    const struct kv_id128 key = bench.objects.walk->key;

                    kvs_objects_remove(&bench.objects, &key);
                }
            }
            if (object == NULL)
                break;
            after = last;
            /* Others' walks may push the place out. */
            for (uint64_t i = kv_random_below(&random, 2 * KVS_OBJECTS_MARKS); i > 0; i--) {
                struct kvs_stored_object *walk = bench.objects.walk;

                kvs_objects_walk_begin(&bench.objects, 0);
                kvs_objects_walk_end(&bench.objects, 0);
                bench.objects.walk = walk;
            }
            kvs_objects_walk_end(&bench.objects, after);
            kvs_objects_check(&bench.objects);
            for (unsigned i = 0; i < 2; i++)
                publish(&bench, n_more++, 10, KVS_EXPIRY_NEVER, true);
            if (kv_random_below(&random, 2) == 0)
                kvs_objects_evict(&bench.objects);
        }
        for (const struct kvs_stored_object *object = bench.objects.first; object != NULL;
             object = object->next)
            assert_true(object->number > until || is_seen[object->number]);
    }
    bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_and_pieces),
        cmocka_unit_test(random_operations),
        cmocka_unit_test(does_not_fit),
        cmocka_unit_test(objects_expire),
        cmocka_unit_test(the_least_used_go_first),
        cmocka_unit_test(the_saved_leave),
        cmocka_unit_test(another_takes_its_place),
        cmocka_unit_test(room_is_made),
        cmocka_unit_test(walks_go_on),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
