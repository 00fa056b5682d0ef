/* What the simulated disk does to whoever trusts it too much. */
#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "tests/sim/disk_sim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

enum {
    N_KEYS = 20,
    N_ROUNDS = 300,
    N_TRIES = 200,
};

static struct kv_clock clock_;
static struct kv_disk *disk;
static struct kv_disk_queue *queue;

static void begin(uint64_t seed)
{
    kv_clock_virtual_init(&clock_, 1000);
    disk = disk_sim_open(&clock_, seed);
    assert_non_null(disk);
    assert_int_equal(disk->ops->queue_open(disk, NULL, NULL, &queue), KV_OK);
}

static void end(void)
{
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

static void crash(bool power_fails)
{
    disk->ops->queue_close(queue);
    disk_sim_crash(disk, power_fails);
    assert_int_equal(disk->ops->queue_open(disk, NULL, NULL, &queue), KV_OK);
}

static void told(void *arg, kv_status_t status, size_t bytes)
{
    (void)bytes;
    *(kv_status_t *)arg = status;
}

static void settle(const kv_status_t *status)
{
    for (unsigned i = 0; *status == KV_IN_PROGRESS; i++) {
        assert_true(i < 1000000);
        clock_.virtual_us++;
        (void)kv_disk_progress(queue);
    }
}

static kv_status_t write_pair(enum kv_disk_space space, unsigned at, unsigned value)
{
    char a[16], b[16];
    kv_status_t status = KV_IN_PROGRESS;
    const struct kv_disk_write writes[] = {
        {.key = a, .key_bytes = 4, .value = &value, .value_bytes = sizeof(value)},
        {.key = b, .key_bytes = 4, .value = &value, .value_bytes = sizeof(value)},
    };

    snprintf(a, sizeof(a), "a%03u", at);
    snprintf(b, sizeof(b), "b%03u", at);
    assert_int_equal(kv_disk_write(queue, space, writes, 2, told, &status), KV_OK);
    settle(&status);
    return status;
}

static kv_status_t sync_all(void)
{
    kv_status_t status = KV_IN_PROGRESS;

    assert_int_equal(kv_disk_sync(queue, told, &status), KV_OK);
    settle(&status);
    return status;
}

/* Returns the key's value; 0: it has none. */
static unsigned read_one(enum kv_disk_space space, char letter, unsigned at)
{
    char key[16];
    unsigned value = 0;
    kv_status_t status = KV_IN_PROGRESS;

    snprintf(key, sizeof(key), "%c%03u", letter, at);
    assert_int_equal(kv_disk_read(queue, space, key, 4, &value, sizeof(value), told, &status),
                     KV_OK);
    settle(&status);
    assert_true(status == KV_OK || (status == KV_NOT_FOUND && value == 0));
    return value;
}

/* What a sync covered is there; of a write all or nothing; records that are there when the power
 * failed are those up to some write; rows are any, and then each of them whole or not. */
static void crashes_lose_what_they_may(void **state)
{
    unsigned n_lost[KV_DISK_SPACES] = {0}, n_out_of_order = 0, n_torn = 0;

    (void)state;
    for (unsigned round = 0; round < N_ROUNDS; round++) {
        const bool power_fails = round % 2 == 1;
        struct disk_sim_counts counts;
        struct kv_random random;
        unsigned n_synced;

        begin(round + 1);
        kv_random_init(&random, round);
        n_synced = (unsigned)kv_random_below(&random, N_KEYS);
        for (unsigned at = 0; at < N_KEYS; at++) {
            if (at == n_synced)
                assert_int_equal(sync_all(), KV_OK);
            assert_int_equal(write_pair(KV_DISK_RECORDS, at, 1 + at), KV_OK);
            assert_int_equal(write_pair(KV_DISK_ROWS, at, 1 + at), KV_OK);
        }
        crash(power_fails);
        for (unsigned space = 0; space < KV_DISK_SPACES; space++) {
            bool has_gap = false;

            for (unsigned at = 0; at < N_KEYS; at++) {
                const unsigned a = read_one(space, 'a', at), b = read_one(space, 'b', at);

                if (space == KV_DISK_RECORDS || !power_fails || at < n_synced)
                    assert_int_equal(a, b);
                n_torn += a != b;
                assert_true((a == 0 || a == 1 + at) && (b == 0 || b == 1 + at));
                if (at < n_synced || (space == KV_DISK_RECORDS && !power_fails))
                    assert_int_equal(a, 1 + at);
                if (space == KV_DISK_RECORDS)
                    assert_true(a == 0 || !has_gap);
                else
                    n_out_of_order += a != 0 && has_gap;
                has_gap |= a == 0;
                n_lost[space] += a == 0 && (space == KV_DISK_RECORDS || !power_fails);
            }
        }
        disk_sim_get_counts(disk, &counts);
        assert_true(power_fails || counts.n_torn == 0);
        end();
    }
    assert_true(n_torn > 0);
    assert_true(n_lost[KV_DISK_RECORDS] > 0 && n_lost[KV_DISK_ROWS] > 0 && n_out_of_order > 0);
}

/* A key that is written again, or removed, and not synced, has one of its versions. */
static void versions_are_lost_too(void **state)
{
    unsigned n_old = 0, n_new = 0, n_middle = 0;

    (void)state;
    for (unsigned round = 0; round < N_ROUNDS; round++) {
        begin(round + 1);
        assert_int_equal(write_pair(KV_DISK_ROWS, 0, 1), KV_OK);
        assert_int_equal(sync_all(), KV_OK);
        assert_int_equal(write_pair(KV_DISK_ROWS, 0, 2), KV_OK);
        assert_int_equal(write_pair(KV_DISK_ROWS, 0, 3), KV_OK);
        crash(false);
        const unsigned value = read_one(KV_DISK_ROWS, 'a', 0);
        n_old += value == 1;
        n_middle += value == 2;
        n_new += value == 3;
        /* What a crash has left stays at the next one. */
        crash(true);
        assert_int_equal(read_one(KV_DISK_ROWS, 'b', 0), value);
        end();
    }
    assert_int_equal(n_old + n_middle + n_new, N_ROUNDS);
    assert_true(n_old > 0 && n_middle > 0 && n_new > 0);
}

/* A sync covers what was told when it was started, of all queues, and nothing else. */
static void syncs_cover_what_was_told(void **state)
{
    static const unsigned value = 9;
    unsigned n_untold = 0;

    (void)state;
    for (unsigned round = 0; round < N_ROUNDS; round++) {
        struct kv_disk_queue *other;
        kv_status_t late = KV_IN_PROGRESS;
        const struct kv_disk_write write = {
            .key = "late", .key_bytes = 4, .value = &value, .value_bytes = sizeof(value)};

        begin(round + 1);
        assert_int_equal(disk->ops->queue_open(disk, NULL, NULL, &other), KV_OK);
        disk_sim_set_faults(disk, &(struct disk_sim_faults){.write_us = 1000000});
        assert_int_equal(kv_disk_write(other, KV_DISK_ROWS, &write, 1, told, &late), KV_OK);
        disk_sim_set_faults(disk, &(struct disk_sim_faults){0});
        assert_int_equal(write_pair(KV_DISK_ROWS, 1, 2), KV_OK);
        assert_int_equal(sync_all(), KV_OK);
        disk->ops->queue_close(other);
        crash(false);
        assert_int_equal(read_one(KV_DISK_ROWS, 'a', 1), 2);
        kv_status_t status = KV_IN_PROGRESS;
        unsigned got;
        assert_int_equal(
            kv_disk_read(queue, KV_DISK_ROWS, "late", 4, &got, sizeof(got), told, &status),
            KV_OK);
        settle(&status);
        n_untold += status == KV_NOT_FOUND;
        end();
    }
    assert_true(n_untold > N_ROUNDS / 4 && n_untold < N_ROUNDS);
}

static void faults_are_told(void **state)
{
    const unsigned char zeros[64] = {0};
    unsigned char value[64];
    struct disk_sim_counts counts;
    unsigned n_failed = 0, n_there = 0, n_rotten = 0;
    kv_status_t status = KV_IN_PROGRESS;

    (void)state;
    begin(1);
    disk_sim_set_faults(disk, &(struct disk_sim_faults){
                                  .fails = 4, .write_us = 10, .stalls = 5, .stall_us = 5000});
    for (unsigned at = 0; at < N_TRIES; at++)
        if (write_pair(KV_DISK_ROWS, at, 1 + at) != KV_OK) {
            n_failed++;
            n_there += read_one(KV_DISK_ROWS, 'a', at) != 0;
            assert_int_equal(read_one(KV_DISK_ROWS, 'a', at), read_one(KV_DISK_ROWS, 'b', at));
        }
    assert_true(n_failed > N_TRIES / 8 && n_failed < N_TRIES / 2);
    assert_true(n_there > 0 && n_there < n_failed);

    disk_sim_set_faults(disk, &(struct disk_sim_faults){0});
    const struct kv_disk_write write = {
        .key = "zeros", .key_bytes = 5, .value = zeros, .value_bytes = sizeof(zeros)};
    assert_int_equal(kv_disk_write(queue, KV_DISK_ROWS, &write, 1, told, &status), KV_OK);
    settle(&status);

    /* A read that fails leaves the value as it is. */
    disk_sim_set_faults(disk, &(struct disk_sim_faults){.unread = 3});
    for (unsigned i = 0, n_unread = 0; i < N_TRIES; i++) {
        status = KV_IN_PROGRESS;
        assert_int_equal(kv_disk_read(queue, KV_DISK_ROWS, "zeros", 5, value, 1, told, &status),
                         KV_OK);
        settle(&status);
        n_unread += status == KV_IO;
        if (i + 1 == N_TRIES)
            assert_in_range(n_unread, N_TRIES / 6, N_TRIES / 2);
    }

    /* A bit that has flipped stays so. */
    disk_sim_set_faults(disk, &(struct disk_sim_faults){.rots = 1});
    for (unsigned i = 0; i < 2; i++) {
        status = KV_IN_PROGRESS;
        assert_int_equal(
            kv_disk_read(queue, KV_DISK_ROWS, "zeros", 5, value, sizeof(value), told, &status),
            KV_OK);
        settle(&status);
        n_rotten = 0;
        for (unsigned at = 0; at < sizeof(value); at++)
            n_rotten += (unsigned)__builtin_popcount(value[at]);
        assert_int_equal(n_rotten, i + 1);
        disk_sim_set_faults(disk, &(struct disk_sim_faults){.rots = 1});
    }

    /* Full: told, and nothing has changed. */
    disk_sim_set_faults(disk, &(struct disk_sim_faults){.bytes_max = 1});
    const unsigned before = read_one(KV_DISK_ROWS, 'a', 0);
    assert_int_equal(write_pair(KV_DISK_ROWS, 0, 7), KV_NO_MEMORY);
    assert_int_equal(read_one(KV_DISK_ROWS, 'a', 0), before);
    disk_sim_get_counts(disk, &counts);
    assert_int_equal(counts.n_rotten, 2);
    assert_int_equal(counts.n_full, 1);
    end();
}

/* The same seed does the same. */
static void seeds_replay(void **state)
{
    unsigned values[2][N_KEYS];

    (void)state;
    for (unsigned run = 0; run < 2; run++) {
        begin(77);
        disk_sim_set_faults(disk, &(struct disk_sim_faults){.fails = 3, .write_us = 100});
        for (unsigned at = 0; at < N_KEYS; at++)
            (void)write_pair(KV_DISK_ROWS, at, 1 + at);
        crash(true);
        for (unsigned at = 0; at < N_KEYS; at++)
            values[run][at] = read_one(KV_DISK_ROWS, 'a', at);
        end();
    }
    assert_memory_equal(values[0], values[1], sizeof(values[0]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crashes_lose_what_they_may),
        cmocka_unit_test(versions_are_lost_too),
        cmocka_unit_test(syncs_cover_what_was_told),
        cmocka_unit_test(faults_are_told),
        cmocka_unit_test(seeds_replay),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
