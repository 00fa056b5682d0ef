/* test_object_tier.c - objects that a node saves on disk: several times the memory, over restarts, on
 * another number of threads, and with a disk that is full, or has damaged them.
 *
 * An embedded node with threads, over the loopback, a disk in memory that outlasts it, and the real
 * client library.
 */
#include "tests/support/cluster.h"
#include "tests/support/objects.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/thread.h"
#include "kvserver/store/node_private.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_THREADS = 2,
    MEMORY_BYTES = 64 << 20,
    OBJECT_MAX = 3 << 20,
    MANY = 240, /* some two and a half times the memory */
    FEW = 12,
    NEVER_US = 600 * 1000000,
};

static struct cluster cluster;
static struct kv_client *client;
static struct kv_buffer *buffer;

static void connect_client(void)
{
    client = cluster_connect(&cluster, NULL);
    assert_int_equal(kv_buffer_alloc(client, OBJECT_MAX, &buffer), KV_OK);
}

static void open_store(uint64_t disk_bytes)
{
    const struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = 1,
        .n_threads = N_THREADS,
        .memory_bytes = MEMORY_BYTES,
        .disk_bytes = disk_bytes,
    };

    assert_true(cluster_open(&cluster, &setup));
    connect_client();
}

static void close_store(void)
{
    kv_client_close(client);
    cluster_close(&cluster);
}

/* The node ends, as by a kill, and another begins with what it had saved. */
static void restart(uint32_t n_threads)
{
    kv_client_close(client);
    cluster_end(&cluster, 0);
    cluster.setup.n_threads = n_threads;
    cluster_start(&cluster, 0);
    connect_client();
}

static double disk_number(const char *column)
{
    return test_disk_number(client, column);
}

static void wait_until(const char *column, double number)
{
    test_wait_disk(client, column, number, number);
}

static void wait_for(const char *column, double least)
{
    test_wait_disk(client, column, least, INFINITY);
}

/* ---- objects ------------------------------------------------------------------------------ */

static size_t bytes_of(uint32_t number)
{
    static const size_t sizes[] = {0, 1, 1000, 100 << 10, 1 << 20, (1 << 20) + 1, OBJECT_MAX};

    return sizes[number % (sizeof(sizes) / sizeof(sizes[0]))];
}

static struct test_objects objects(void)
{
    return (struct test_objects){.client = client, .buffer = buffer, .bytes_of = bytes_of};
}

static kv_status_t put_terms(uint32_t number, uint32_t content, uint32_t ttl_ms, bool evictable)
{
    const struct test_objects all = objects();

    return test_object_put(&all, number, content, ttl_ms, evictable);
}

static void put(uint32_t number, uint32_t content)
{
    assert_int_equal(put_terms(number, content, 0, false), KV_OK);
}

static kv_status_t get(uint32_t number, uint32_t content)
{
    const struct test_objects all = objects();

    return test_object_get(&all, number, content);
}

static void erase(uint32_t number)
{
    const struct test_objects all = objects();
    const kv_status_t status = test_object_delete(&all, number);

    assert_true(status == KV_OK || status == KV_NOT_FOUND);
}

/* Deletes all by the beginning of their names. */
static void delete_all(void)
{
    struct kv_object_list_options options = {.prefix = "obj", .deletes = true};
    bool is_last = false;

    while (!is_last) {
        const struct kv_object_list *page;
        struct kv_op *op;

        assert_int_equal(kv_object_list_begin(client, 0, &options, 0, &op), KV_OK);
        assert_int_equal(kv_wait(op), KV_OK);
        page = kv_op_object_list(op);
        is_last = page->is_last;
        options.from = page->next;
        kv_op_free(op);
    }
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

/* How many keys the disk has; nothing else uses it. */
static uint32_t count_keys(enum kv_disk_space space, const char *prefix)
{
    uint32_t n = 0;

    assert_int_equal(kv_disk_scan(cluster.disks[0], space, prefix, strlen(prefix), count, &n),
                     KV_OK);
    return n;
}

/* ---- tests -------------------------------------------------------------------------------- */

static void a_restart_loses_nothing(void **state)
{
    (void)state;
    open_store(UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        put(i, 0);
    wait_until("objects", FEW);
    for (uint32_t round = 0; round < 3; round++) {
        restart(1 + round);
        for (uint32_t i = 0; i < FEW; i++)
            assert_int_equal(get(i, 0), KV_OK);
        /* The same bytes again are no other object, and bytes that come are kept. */
        put(FEW - 1, 0);
        assert_int_equal(disk_number("objects"), FEW);
    }
    assert_int_equal(disk_number("bad"), 0);
    close_store();
}

/* All that is put is there, though it is several times the memory: nothing may be evicted. */
static void more_than_memory(void **state)
{
    double bytes = 0;

    (void)state;
    open_store(UINT64_MAX);
    for (uint32_t i = 0; i < MANY; i++) {
        put(i, 0);
        bytes += (double)bytes_of(i);
    }
    assert_true(bytes > 2.5 * MEMORY_BYTES);
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(get(i, 0), KV_OK);
    assert_true(disk_number("loads") > MANY / 3);
    wait_until("objects", MANY);
    restart(N_THREADS);
    for (uint32_t i = MANY; i-- > 0;)
        assert_int_equal(get(i, 0), KV_OK);
    close_store();
}

/* What was deleted stays so, and what was put after it is there, as soon as the client has heard. */
static void what_is_deleted_is_gone(void **state)
{
    (void)state;
    open_store(UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        put(i, 0);
    wait_until("objects", FEW);
    for (uint32_t i = 0; i < FEW; i += 2)
        erase(i);
    /* Put again with other bytes, which nobody waits for until they are saved. */
    for (uint32_t i = 0; i < FEW; i += 4)
        put(i, 1);
    restart(N_THREADS);
    for (uint32_t i = 0; i < FEW; i++) {
        const kv_status_t status = get(i, i % 4 == 0);

        if (i % 4 != 0)
            assert_int_equal(status, i % 2 != 0 ? KV_OK : KV_NOT_FOUND);
        else
            assert_true(status == KV_OK || status == KV_NOT_FOUND);
    }
    delete_all();
    restart(N_THREADS);
    for (uint32_t i = 0; i < FEW; i++)
        assert_int_equal(get(i, 0), KV_NOT_FOUND);
    wait_until("bytes", 0);
    kv_client_close(client);
    cluster_end(&cluster, 0);
    assert_int_equal(count_keys(KV_DISK_ROWS, ""), 0);
    assert_int_equal(count_keys(KV_DISK_RECORDS, "object/"), 0);
    cluster_start(&cluster, 0);
    connect_client();
    close_store();
}

/* Times go on over a restart, and so does whether an object may be evicted. */
static void terms_are_kept(void **state)
{
    kv_status_t status;
    uint64_t begin_us;

    (void)state;
    open_store(UINT64_MAX);
    assert_int_equal(put_terms(2, 0, 4000, false), KV_OK);
    begin_us = kv_clock_now(&kv_clock_real);
    assert_int_equal(put_terms(3, 0, NEVER_US / 1000, true), KV_OK);
    wait_until("objects", 2);
    /* A later put renews: what is on disk says so after a while. */
    assert_int_equal(put_terms(3, 0, 0, true), KV_OK);
    kv_sleep_fds(NULL, 0,
                 1500000); /* it waits for half a second, which a node tells after a moment */
    wait_until("waiting", 0);
    restart(N_THREADS);
    status = get(2, 0);
    assert_true(status == KV_OK || kv_clock_now(&kv_clock_real) > begin_us + 3900000);
    const struct kv_object_list_options options = {.prefix = "object 3"};
    struct kv_op *op;
    assert_int_equal(kv_object_list_begin(client, 0, &options, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    assert_int_equal(kv_op_object_list(op)->n_objects, 1);
    assert_true(kv_op_object_list(op)->objects[0].evictable);
    assert_int_equal(kv_op_object_list(op)->objects[0].ttl_left_ms, UINT64_MAX);
    kv_op_free(op);
    restart(N_THREADS);
    while (kv_clock_now(&kv_clock_real) < begin_us + 4100000)
        kv_sleep_fds(NULL, 0, 50000);
    assert_int_equal(get(2, 0), KV_NOT_FOUND);
    restart(N_THREADS);
    assert_int_equal(get(2, 0), KV_NOT_FOUND);
    assert_int_equal(get(3, 0), KV_OK);
    close_store();
}

struct flip {
    uint32_t at, which, n;
};

static void
flip(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct flip *flip = arg;

    (void)key;
    (void)key_bytes;
    if (flip->at++ % 3 == flip->which && value_bytes > 0) {
        ((uint8_t *)value)[value_bytes / 2] ^= 4;
        flip->n++;
    }
}

/* A piece that is wrong on disk is never read as if it were right; put again, it is. */
static void damage_is_found(void **state)
{
    (void)state;
    open_store(UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        put(i, 0);
    wait_until("objects", FEW);
    for (uint32_t round = 0; round < 3; round++) {
        struct flip one = {.which = round};
        uint32_t n_bad = 0;

        kv_client_close(client);
        cluster_end(&cluster, 0);
        assert_int_equal(kv_disk_scan(cluster.disks[0], KV_DISK_ROWS, "", 0, flip, &one),
                         KV_OK);
        cluster_start(&cluster, 0);
        connect_client();
        for (uint32_t i = 0; i < FEW; i++) {
            const kv_status_t status = get(i, 0);

            assert_true(status == KV_OK || status == KV_CORRUPT);
            n_bad += status == KV_CORRUPT;
            put(i, 0);
            assert_int_equal(get(i, 0), KV_OK);
        }
        assert_true(n_bad > 0 && n_bad <= one.n);
        wait_for("bad", n_bad);
        wait_until("waiting", 0);
        wait_until("objects", FEW);
        restart(N_THREADS);
        for (uint32_t i = 0; i < FEW; i++)
            assert_int_equal(get(i, 0), KV_OK);
    }
    close_store();
}

static struct kv_verify_counts verify_disk(void)
{
    return test_verify(client, 0).disk;
}

/* What was saved is verified: all of it, again and again; while objects come and go. */
static void saved_objects_are_verified(void **state)
{
    uint64_t n_pieces = 0, bytes = 0;
    struct kv_verify_counts found;

    (void)state;
    open_store(UINT64_MAX);
    found = verify_disk();
    assert_true(found.blocks == 0 && found.bad == 0);
    for (uint32_t i = 0; i < FEW; i++) {
        put(i, 0);
        n_pieces += bytes_of(i) == 0 ? 1 : (bytes_of(i) + (1 << 20) - 1) >> 20;
        bytes += bytes_of(i);
    }
    wait_until("objects", FEW);
    for (int round = 0; round < 2; round++) {
        for (int again = 0; again < 2; again++) {
            found = verify_disk();
            assert_int_equal(found.blocks, n_pieces);
            assert_int_equal(found.bytes, bytes);
            assert_int_equal(found.bad + found.unread + found.lost + found.mended, 0);
        }
        restart(N_THREADS);
    }
    for (uint32_t i = 0; i < FEW; i++)
        erase(i);
    found = verify_disk();
    assert_true(found.blocks <= n_pieces && found.bad == 0);
    close_store();
}

/* Bad pieces on disk are written again from memory; without these they are bad until the object is
 * put again, and never read. */
static void verify_mends_objects(void **state)
{
    (void)state;
    open_store(UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        put(i, 0);
    wait_until("objects", FEW);
    for (uint32_t round = 0; round < 6; round++) {
        const bool is_in_memory = round % 2 == 0;
        struct flip some = {.which = round / 2};
        struct kv_verify_counts found;
        uint32_t n_bad = 0;

        kv_client_close(client);
        cluster_end(&cluster, 0);
        if (!is_in_memory)
            assert_int_equal(kv_disk_scan(cluster.disks[0], KV_DISK_ROWS, "", 0, flip, &some),
                             KV_OK);
        cluster_start(&cluster, 0);
        connect_client();
        if (is_in_memory) {
            for (uint32_t i = 0; i < FEW; i++)
                assert_int_equal(get(i, 0), KV_OK);
            kvs_node_stop(cluster.nodes[0]);
            assert_int_equal(kv_disk_scan(cluster.disks[0], KV_DISK_ROWS, "", 0, flip, &some),
                             KV_OK);
            assert_int_equal(kvs_node_start(cluster.nodes[0], true), KV_OK);
        }
        found = verify_disk();
        assert_true(found.bad > 0 && found.bad == some.n && found.unread == 0);
        assert_int_equal(is_in_memory ? found.mended : found.lost, found.bad);
        for (uint32_t i = 0; i < FEW; i++) {
            const kv_status_t status = get(i, 0);

            assert_true(status == KV_OK || (status == KV_CORRUPT && !is_in_memory));
            n_bad += status == KV_CORRUPT;
            put(i, 0);
        }
        assert_true((n_bad > 0) == !is_in_memory);
        wait_until("waiting", 0);
        wait_until("objects", FEW);
        found = verify_disk();
        assert_int_equal(found.bad, 0);
        restart(N_THREADS);
        for (uint32_t i = 0; i < FEW; i++)
            assert_int_equal(get(i, 0), KV_OK);
    }
    close_store();
}

/* Puts one that is to stay: what can go leaves memory, and then the disk, which takes a moment. */
static kv_status_t put_at_last(uint32_t number)
{
    kv_status_t status = KV_BUSY;

    for (int i = 0; i < 50 && status != KV_OK; i++) {
        if (i > 0)
            kv_sleep_fds(NULL, 0, 50000);
        status = put_terms(number, 0, 0, false);
        assert_true(status == KV_OK || status == KV_NO_MEMORY || status == KV_BUSY ||
                    status == KV_DEADLINE);
    }
    return status;
}

/* With room for a part, what may be evicted goes, on disk as well; what may not stays, and when there
 * is no room for more, the client hears so. */
static void a_full_disk_is_told(void **state)
{
    const uint64_t room = 24 << 20;
    uint32_t n_there = 0, n_put = 0;
    double bytes = 0;

    (void)state;
    open_store(room);
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(put_terms(i, 0, 0, true), KV_OK);
    assert_true(disk_number("bytes") <= (double)room);
    for (uint32_t i = 0; i < MANY; i++)
        n_there += get(i, 0) == KV_OK;
    print_message("%u of %d evictable objects are there\n", n_there, MANY);
    assert_true(n_there > 5 && n_there < MANY);
    restart(N_THREADS);
    assert_true(disk_number("bytes") <= (double)room);
    for (uint32_t i = 0; i < MANY; i++)
        (void)get(i, 0);
    /* They make room for those that are to stay. */
    for (uint32_t i = MANY; i < 2 * MANY && put_at_last(i) == KV_OK; i++) {
        n_put++;
        bytes += (double)bytes_of(i);
    }
    print_message("%u objects of %.0f MiB that stay were put\n", n_put, bytes / (1 << 20));
    assert_true(n_put < MANY && bytes > 0.7 * (double)(MEMORY_BYTES + room) - (8 << 20));
    for (uint32_t i = MANY; i < MANY + n_put; i++)
        assert_int_equal(get(i, 0), KV_OK);
    close_store();
}

/* A node that drains saves first, however little time it has had. */
static void a_drain_saves(void **state)
{
    uint64_t until_us;
    struct kvs_node *node;

    (void)state;
    open_store(UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        put(i, 0);
    kv_client_close(client);
    node = cluster.nodes[0];
    kvs_node_stop(node);
    kvs_node_drain(node);
    until_us = kv_clock_now(&kv_clock_real) + 60 * UINT64_C(1000000);
    while (!kvs_node_drained(node)) {
        assert_true(kv_clock_now(&kv_clock_real) < until_us);
        kvs_node_control_step(node);
        for (uint32_t thread = 0; thread < N_THREADS; thread++)
            kvs_node_data_step(node, thread);
    }
    cluster_end(&cluster, 0);
    cluster_start(&cluster, 0);
    connect_client();
    for (uint32_t i = 0; i < FEW; i++)
        assert_int_equal(get(i, 0), KV_OK);
    close_store();
}

static void
flip_record(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    const uint32_t *round = arg;

    (void)key;
    (void)key_bytes;
    if (value_bytes > 0)
        ((uint8_t *)value)[*round * 7 % value_bytes] ^= (uint8_t)(1 << *round % 8);
}

/* What damaged records say is not believed where it cannot be. */
static void damaged_records_lie(void **state)
{
    uint32_t n_gone = 0;

    (void)state;
    open_store(UINT64_MAX);
    for (uint32_t round = 0; round < 40; round++) {
        for (uint32_t i = 0; i < FEW; i++) {
            const kv_status_t status = get(i, 0);

            n_gone += round > 0 && status != KV_OK;
            assert_true(status == KV_OK || status == KV_CORRUPT || status == KV_NOT_FOUND);
            if (status != KV_OK) {
                erase(i);
                put(i, 0);
            }
        }
        wait_until("waiting", 0);
        kv_client_close(client);
        cluster_end(&cluster, 0);
        assert_int_equal(
            kv_disk_scan(cluster.disks[0], KV_DISK_RECORDS, "object/", 7, flip_record, &round),
            KV_OK);
        cluster_start(&cluster, 0);
        connect_client();
    }
    assert_true(n_gone > 0);
    close_store();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_restart_loses_nothing),
        cmocka_unit_test(more_than_memory),
        cmocka_unit_test(what_is_deleted_is_gone),
        cmocka_unit_test(terms_are_kept),
        cmocka_unit_test(damage_is_found),
        cmocka_unit_test(a_full_disk_is_told),
        cmocka_unit_test(saved_objects_are_verified),
        cmocka_unit_test(verify_mends_objects),
        cmocka_unit_test(a_drain_saves),
        cmocka_unit_test(damaged_records_lie),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
