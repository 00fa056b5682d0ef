/* test_object_faults.c - objects on a disk that is slow, full, or fails for a while; and what clients
 * see who read, delete and put meanwhile.
 *
 * An embedded node with threads, over the loopback, a disk in memory that outlasts it, and the real
 * client library.
 */
#include "tests/support/cluster.h"
#include "tests/support/objects.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/thread.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/store/node_private.h"
#include "proto/kv_wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MEMORY_BYTES = 64 << 20,
    OBJECT_MAX = 8 << 20,
    SMALL = 1000, /* those from that number on are */
    SMALL_BYTES = 1000,
};

static struct cluster cluster;
static struct kv_client *client;
static struct kv_buffer *buffer;

static void connect_client(void)
{
    client = cluster_connect(&cluster, NULL);
    assert_int_equal(kv_buffer_alloc(client, OBJECT_MAX, &buffer), KV_OK);
}

static uint32_t n_threads = 1;
static uint64_t memory_bytes = MEMORY_BYTES;

static void open_store(uint64_t disk_bytes)
{
    const struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = 1,
        .n_threads = n_threads,
        .memory_bytes = memory_bytes,
        .disk_bytes = disk_bytes,
        .credits = 100,
    };

    assert_true(cluster_open(&cluster, &setup));
    connect_client();
}

static void close_store(void)
{
    kv_client_close(client);
    cluster_close(&cluster);
}

/* ---- objects ------------------------------------------------------------------------------ */

static size_t bytes_of(uint32_t number)
{
    return number < SMALL ? OBJECT_MAX : SMALL_BYTES;
}

static uint32_t deadline_ms = 3000;

static struct test_objects objects(void)
{
    return (struct test_objects){
        .client = client, .buffer = buffer, .bytes_of = bytes_of, .deadline_ms = deadline_ms};
}

static kv_status_t put_terms(uint32_t number, uint32_t content, uint32_t ttl_ms, bool evictable)
{
    const struct test_objects all = objects();

    return test_object_put(&all, number, content, ttl_ms, evictable);
}

static kv_status_t get(uint32_t number, uint32_t content)
{
    const struct test_objects all = objects();

    return test_object_get(&all, number, content);
}

/* Memory is full of what cannot leave, and so is the disk: what is on it is read nevertheless, of
 * objects of more pieces than are read beside the memory. */
static void lent_pieces_end(void **state)
{
    uint32_t n_put = 0, n_bad = 0;
    (void)state;
    open_store(48 << 20);
    for (uint32_t i = 0; i < 40; i++) {
        const kv_status_t status = put_terms(i, 0, 0, false);
        if (status != KV_OK)
            break;
        n_put++;
    }
    for (int round = 0; round < 2; round++)
        for (uint32_t i = 0; i < n_put; i++) {
            const kv_status_t status = get(i, 0);
            n_bad += status != KV_OK;
        }
    close_store();
    assert_int_equal(n_bad, 0);
}

static kv_status_t drop(uint32_t number)
{
    const struct test_objects all = objects();

    return test_object_delete(&all, number);
}

static void pass(uint32_t ms)
{
    for (uint32_t i = 0; i < ms; i += 10) {
        kv_client_wait(client, 1000);
        kv_sleep_fds(NULL, 0, 10000);
    }
}

/* Who lacks room no longer does not ask for it. */
static void lack_ends(void **state)
{
    struct kvs_disk_room *room;
    bool lacks;
    (void)state;
    open_store(16 << 20);
    room = &cluster.nodes[0]->control.disk_room;
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(put_terms(i, 0, 0, false), KV_OK);
    pass(3000);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(drop(i), KV_OK);
    pass(4000);
    lacks = atomic_load(&room->lacks[KVS_DISK_OBJECTS]);
    close_store();
    assert_false(lacks);
}

/* One that does not fit on the disk holds up none that does. */
static void small_ones_go_before_a_large_one(void **state)
{
    (void)state;
    open_store(OBJECT_MAX / 2);
    assert_int_equal(put_terms(0, 0, 0, false), KV_OK);
    pass(1000);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(put_terms(SMALL + i, 0, 0, false), KV_OK);
    test_wait_disk(client, "objects", 3, 3);
    assert_int_equal(get(0, 0), KV_OK);
    close_store();
}

/* Two data threads lack room: that one gets some does not mean that the other has. */
static void one_lack_is_not_the_others(void **state)
{
    struct kvs_disk_room *room;
    uint32_t of[2][8], n[2] = {0}, number = 0;
    bool lacks;
    double waiting;
    (void)state;
    n_threads = 2;
    open_store(16 << 20);
    n_threads = 1;
    room = &cluster.nodes[0]->control.disk_room;
    for (; n[0] < 3 || n[1] < 1; number++) {
        char name[32];
        const int bytes = snprintf(name, sizeof(name), "object %u", number);
        const struct kv_id128 hash = kv_hash128(name, (size_t)bytes);
        const uint32_t thread = kv_placement_object_thread(kv_placement_object_slot(&hash), 2);
        if (n[thread] < 8)
            of[thread][n[thread]++] = number;
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(put_terms(of[0][i], 0, 0, false), KV_OK);
        pass(1000);
    }
    assert_int_equal(put_terms(of[1][0], 0, 0, false), KV_OK);
    pass(3000);
    assert_int_equal(drop(of[0][0]), KV_OK);
    pass(6000);
    lacks = atomic_load(&room->lacks[KVS_DISK_OBJECTS]);
    waiting = test_disk_number(client, "waiting");
    close_store();
    assert_true(lacks == (waiting > 0));
}

/* An object is deleted while it is read: it is not there, and nothing is bad. */
static void deleted_is_not_corrupt(void **state)
{
    enum {
        N = 7
    };
    struct kv_object objects[N] = {{0}};
    char names[N][32];
    struct kv_buffer *large;
    struct kv_op *op;
    (void)state;
    memory_bytes = 160 << 20;
    open_store(UINT64_MAX);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    kv_disk_close(cluster.disks[0]);
    cluster.disks[0] = kv_disk_memory_open(&kv_clock_real, 200000);
    cluster_start(&cluster, 0);
    connect_client();
    deadline_ms = 10000;
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(put_terms(i, 0, 0, false), KV_OK);
    while (test_disk_number(client, "objects") != N)
        pass(50);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    cluster_start(&cluster, 0);
    connect_client();
    assert_int_equal(kv_buffer_alloc(client, N * OBJECT_MAX, &large), KV_OK);
    for (uint32_t i = 0; i < N; i++) {
        snprintf(names[i], sizeof(names[i]), "object %u", i);
        objects[i] = (struct kv_object){.name = names[i],
                                        .buffer = large,
                                        .offset = (size_t)i * OBJECT_MAX,
                                        .bytes = OBJECT_MAX};
    }
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_GET, objects, N, 10000, &op), KV_OK);
    pass(250);
    assert_int_equal(drop(N - 1), KV_OK);
    (void)kv_wait(op);
    pass(100);
    const double bad = test_disk_number(client, "bad");
    const kv_status_t status = objects[N - 1].status;
    kv_op_free(op);
    kv_buffer_free(large);
    close_store();
    memory_bytes = MEMORY_BYTES;
    assert_int_not_equal(status, KV_CORRUPT);
    assert_true(bad == 0);
}

/* Who deletes by the beginning of names waits for the disk, and others do not. */
static void a_delete_holds_nobody_up(void **state)
{
    struct kv_object_list_options options = {.prefix = "obj", .deletes = true};
    struct kv_client *other;
    struct kv_op *op, *exists;
    struct kv_object one = {.name = "none"};
    (void)state;
    open_store(UINT64_MAX);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    kv_disk_close(cluster.disks[0]);
    cluster.disks[0] = kv_disk_memory_open(&kv_clock_real, 600000);
    cluster_start(&cluster, 0);
    connect_client();
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(put_terms(i, 0, 0, false), KV_OK);
    while (test_disk_number(client, "objects") != 2)
        pass(50);
    assert_int_equal(kv_object_list_begin(client, 0, &options, 0, &op), KV_OK);
    pass(100);
    const uint64_t begin_us = kv_clock_now(&kv_clock_real);
    other = cluster_connect(&cluster, NULL);
    assert_int_equal(kv_objects_begin(other, KV_OBJECT_EXISTS, &one, 1, 10000, &exists), KV_OK);
    (void)kv_wait(exists);
    const uint64_t us = kv_clock_now(&kv_clock_real) - begin_us;
    kv_op_free(exists);
    kv_client_close(other);
    (void)kv_wait(op);
    kv_op_free(op);
    close_store();
    assert_true(us < 300000);
}

static struct kv_disk_ops ops;
static const struct kv_disk_ops *real_ops;
static _Atomic uint32_t n_to_fail, n_to_spoil;

/* In the data thread: the object that is about to be saved goes bad in memory. */
static void spoil(void)
{
    const struct kv_id128 key = kv_hash128("object 0", 8);
    struct kvs_stored_object *object =
        kvs_objects_find(&cluster.nodes[0]->shard[0].objects, &key);

    if (object == NULL || n_to_spoil == 0)
        return;
    n_to_spoil--;
    object->pieces[3].bytes[0] ^= 1;
}

static kv_status_t fail_removal(struct kv_disk_queue *queue,
                                enum kv_disk_space space,
                                const struct kv_disk_write *writes,
                                unsigned n,
                                kv_disk_done_fn done,
                                void *arg)
{
    if (space == KV_DISK_ROWS && writes[0].value == NULL && n_to_fail > 0) {
        n_to_fail--;
        return KV_NO_MEMORY;
    }
    if (space == KV_DISK_RECORDS && memcmp(writes[0].key, "object/", 7) == 0)
        spoil();
    return real_ops->write(queue, space, writes, n, done, arg);
}

static void
count(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    (void)key;
    (void)key_bytes;
    (void)value;
    (void)value_bytes;
    ++*(uint32_t *)arg;
}

static uint32_t count_keys(enum kv_disk_space space, const char *prefix)
{
    uint32_t n = 0;

    assert_int_equal(kv_disk_scan(cluster.disks[0], space, prefix, strlen(prefix), count, &n),
                     KV_OK);
    return n;
}

/* An object that has gone bad before it was saved is put again: what was written of the first is
 * erased, and the second is not. */
static void what_is_mended_stays(void **state)
{
    kv_status_t status = KV_BUSY;
    (void)state;
    open_store(UINT64_MAX);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    real_ops = cluster.disks[0]->ops;
    ops = *real_ops;
    ops.write = fail_removal;
    cluster.disks[0]->ops = &ops;
    n_to_fail = n_to_spoil = 1;
    cluster_start(&cluster, 0);
    connect_client();
    deadline_ms = 10000;
    assert_int_equal(put_terms(0, 0, 0, false), KV_OK);
    while (n_to_fail > 0)
        pass(10);
    status = put_terms(0, 0, 0, false);
    assert_int_equal(status, KV_OK);
    for (int i = 0; i < 300 && test_disk_number(client, "objects") != 1; i++)
        pass(10);
    pass(3000);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    assert_int_equal(count_keys(KV_DISK_ROWS, ""), OBJECT_MAX / KV_WIRE_BULK_MAX);
    cluster_start(&cluster, 0);
    connect_client();
    status = get(0, 0);
    close_store();
    assert_int_equal(status, KV_OK);
}

/* What lived too short to be saved is, when it stays longer. */
static void renewed_is_saved(void **state)
{
    double n;
    (void)state;
    open_store(UINT64_MAX);
    assert_int_equal(put_terms(0, 0, 1500, false), KV_OK);
    assert_int_equal(put_terms(0, 0, KV_OBJECT_TTL_NONE, false), KV_OK);
    pass(4000);
    n = test_disk_number(client, "objects");
    print_message("get: %s; saved: %g\n", kv_status_name(get(0, 0)), n);
    close_store();
    assert_true(n == 1);
}

/* What is deleted stays so when the client has heard that it is, however slow the disk. */
static void a_delete_is_for_good(void **state)
{
    struct kv_object other = {.name = "object 1"};
    struct kv_op *op;

    (void)state;
    open_store(UINT64_MAX);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    kv_disk_close(cluster.disks[0]);
    cluster.disks[0] = kv_disk_memory_open(&kv_clock_real, 300000);
    cluster_start(&cluster, 0);
    connect_client();
    deadline_ms = 10000;
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(put_terms(i, 0, 0, false), KV_OK);
    while (test_disk_number(client, "objects") != 2)
        pass(50);
    /* The disk is at work for another: a node that ends finishes only what it has begun. */
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_DELETE, &other, 1, 10000, &op), KV_OK);
    pass(100);
    assert_int_equal(drop(0), KV_OK);
    kv_op_free(op);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    cluster_start(&cluster, 0);
    connect_client();
    assert_int_equal(get(0, 0), KV_NOT_FOUND);
    close_store();
}

/* What is deleted by the beginning of its name stays so when the client has heard that it is. */
static void pages_are_deleted(void **state)
{
    struct kv_object_list_options options = {.prefix = "object 1", .deletes = true};
    struct kv_object first = {.name = "object 0"};
    struct kv_op *op, *other;
    kv_status_t deleted, there;
    (void)state;
    open_store(UINT64_MAX);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    kv_disk_close(cluster.disks[0]);
    cluster.disks[0] = kv_disk_memory_open(&kv_clock_real, 600000);
    cluster_start(&cluster, 0);
    connect_client();
    deadline_ms = 20000;
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(put_terms(i, 0, 0, false), KV_OK);
    while (test_disk_number(client, "objects") != 2)
        pass(50);
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_DELETE, &first, 1, 20000, &other),
                     KV_OK);
    pass(200);
    assert_int_equal(kv_object_list_begin(client, 0, &options, 20000, &op), KV_OK);
    deleted = kv_wait(op);
    kv_op_free(op);
    (void)kv_cancel(other);
    kv_op_free(other);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    cluster_start(&cluster, 0);
    connect_client();
    there = get(1, 0);
    close_store();
    assert_true(deleted != KV_OK || there == KV_NOT_FOUND);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(renewed_is_saved),
        cmocka_unit_test(a_delete_is_for_good),
        cmocka_unit_test(pages_are_deleted),
        cmocka_unit_test(what_is_mended_stays),
        cmocka_unit_test(deleted_is_not_corrupt),
        cmocka_unit_test(a_delete_holds_nobody_up),
        cmocka_unit_test(lack_ends),
        cmocka_unit_test(small_ones_go_before_a_large_one),
        cmocka_unit_test(one_lack_is_not_the_others),
        cmocka_unit_test(lent_pieces_end),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
