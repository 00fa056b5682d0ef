/* Units against a plain model: a row is one number, and every unit a list of them. */
#include "kvserver/store/rows/unit.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    ROW_BYTES = 8,
    N_UNITS = 8,
    N_TRANSFERS = 24,
    TOKENS_MAX = 1500,
    STEPS = 60000,
    ARENA_BYTES = 32 << 20,
};

/* A unit and what must be in it. */
struct twin {
    struct kvs_unit unit;
    uint64_t rows[TOKENS_MAX];
    uint32_t n_rows;
    bool used;
};

/* Rows being sent: pinned, they may not change whatever becomes of the unit. */
struct sending {
    struct kvs_segment *pins[TOKENS_MAX / KV_BLOCK_TOKENS + 2];
    unsigned n_pins;
    const uint8_t *at[TOKENS_MAX];
    uint64_t rows[TOKENS_MAX];
    uint32_t n_rows;
};

/* Rows being received into reserved memory: a late one may fall anywhere until unpinned, and
 * must hit nobody's rows. */
struct landing {
    struct kvs_segment *pins[TOKENS_MAX / KV_BLOCK_TOKENS + 2];
    unsigned n_pins;
    struct kv_iov iov[TOKENS_MAX];
    unsigned n_iov;
};

static struct {
    struct kvs_arena *arena;
    struct kvs_segment_store heap;
    struct kv_random random;
    uint64_t number;
    struct twin twins[N_UNITS];
    struct sending sendings[N_TRANSFERS];
    struct landing landings[N_TRANSFERS];
} world;

static uint64_t below(uint64_t bound)
{
    return kv_random_below(&world.random, bound);
}

static void check(const struct twin *twin)
{
    const struct kvs_unit *unit = &twin->unit;

    kvs_unit_check(unit, &world.heap);
    assert_int_equal(unit->committed, twin->n_rows);
    assert_true(unit->reserved >= unit->committed);
    assert_int_equal(unit->n_segments,
                     (unit->reserved + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS);
    for (uint32_t i = 0; i < twin->n_rows; i++) {
        uint64_t row;

        memcpy(&row, kvs_unit_row(unit, i), sizeof(row));
        if (row != twin->rows[i])
            fail_msg("unit %zu row %u of %u", (size_t)(twin - world.twins), i, twin->n_rows);
        assert_int_equal(*kvs_unit_crc(unit, i), (uint32_t)row);
    }
}

static void check_sending(const struct sending *sending)
{
    for (uint32_t i = 0; i < sending->n_rows; i++)
        assert_memory_equal(sending->at[i], &sending->rows[i], sizeof(uint64_t));
}

/* Writes from [begin, begin + count) on, as numbers that never come twice. */
static void write_rows(struct twin *twin, uint32_t begin, uint32_t count)
{
    static uint64_t rows[TOKENS_MAX];
    static uint32_t crcs[TOKENS_MAX];

    for (uint32_t i = 0; i < count; i++) {
        rows[i] = ++world.number;
        crcs[i] = (uint32_t)rows[i];
        twin->rows[begin + i] = rows[i];
    }
    kvs_unit_write(&twin->unit, begin, count, rows);
    kvs_unit_write_crcs(&twin->unit, begin, count, crcs);
    twin->n_rows = begin + count;
    twin->unit.committed = begin + count;
}

static void append(struct twin *twin)
{
    uint32_t count = 1 + (uint32_t)below(below(4) == 0 ? 300 : 20);

    if (twin->n_rows + count > TOKENS_MAX)
        return;
    kvs_unit_unreserve(&twin->unit, &world.heap, twin->unit.committed);
    if (kvs_unit_reserve(&twin->unit, &world.heap, twin->n_rows + count) == KV_OK)
        write_rows(twin, twin->n_rows, count);
}

static void begin_landing(struct twin *twin)
{
    struct landing *landing = &world.landings[below(N_TRANSFERS)];
    uint32_t begin = twin->unit.reserved, count = 1 + (uint32_t)below(200);

    if (landing->n_pins > 0 || begin + count > TOKENS_MAX ||
        kvs_unit_reserve(&twin->unit, &world.heap, begin + count) != KV_OK)
        return;
    landing->n_iov = kvs_unit_pieces(&twin->unit, begin, count, landing->iov, 0, TOKENS_MAX);
    landing->n_pins = kvs_unit_pin(&twin->unit, begin, count, landing->pins);
    assert_in_range(landing->n_pins, 1, count / KV_BLOCK_TOKENS + 2);
}

/* The transfer ends: its bytes fall where it was told, whoever has the unit by now. */
static void end_landing(struct landing *landing)
{
    for (unsigned i = 0; i < landing->n_iov; i++)
        memset(landing->iov[i].base, 0xee, landing->iov[i].bytes);
    for (unsigned i = 0; i < landing->n_pins; i++)
        kvs_segment_unpin(&world.heap, landing->pins[i]);
    landing->n_pins = landing->n_iov = 0;
}

static void begin_sending(struct twin *twin)
{
    struct sending *sending = &world.sendings[below(N_TRANSFERS)];

    if (sending->n_pins > 0 || twin->n_rows == 0)
        return;
    uint32_t begin = (uint32_t)below(twin->n_rows);
    uint32_t count = 1 + (uint32_t)below(twin->n_rows - begin);

    sending->n_pins = kvs_unit_pin(&twin->unit, begin, count, sending->pins);
    sending->n_rows = count;
    for (uint32_t i = 0; i < count; i++) {
        sending->at[i] = kvs_unit_row(&twin->unit, begin + i);
        sending->rows[i] = twin->rows[begin + i];
    }
}

static void end_sending(struct sending *sending)
{
    check_sending(sending);
    for (unsigned i = 0; i < sending->n_pins; i++)
        kvs_segment_unpin(&world.heap, sending->pins[i]);
    sending->n_pins = sending->n_rows = 0;
}

static void fork_unit(const struct twin *twin)
{
    struct twin *child = &world.twins[below(N_UNITS)];
    uint32_t tokens = (uint32_t)below(twin->n_rows + 1);

    if (child->used)
        return;
    assert_int_equal(kvs_unit_init(&child->unit, &world.heap, 0, 0, ROW_BYTES), KV_OK);
    if (kvs_unit_fork(&twin->unit, &child->unit, &world.heap, tokens) != KV_OK) {
        kvs_unit_clear(&child->unit, &world.heap);
        return;
    }
    child->used = true;
    child->n_rows = tokens;
    memcpy(child->rows, twin->rows, tokens * sizeof(uint64_t));
}

static void random_operations(void **state)
{
    uint64_t seed = kv_clock_now(&kv_clock_real);

    (void)state;
    if (getenv("KV_TEST_SEED") != NULL)
        seed = strtoull(getenv("KV_TEST_SEED"), NULL, 10);
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    memset(&world, 0, sizeof(world));
    kv_random_init(&world.random, seed);
    world.arena = kvs_arena_create(ARENA_BYTES);
    assert_non_null(world.arena);
    assert_true(kvs_segment_store_init(&world.heap, world.arena));
    for (unsigned step = 0; step < STEPS; step++) {
        struct twin *twin = &world.twins[below(N_UNITS)];

        if (!twin->used) {
            assert_int_equal(kvs_unit_init(&twin->unit, &world.heap, 0, 0, ROW_BYTES), KV_OK);
            twin->used = true;
            twin->n_rows = 0;
        }
        switch (below(12)) {
        case 0:
        case 1:
        case 2:
            append(twin);
            break;
        case 3:
            begin_landing(twin);
            break;
        case 4:
        case 5:
            end_landing(&world.landings[below(N_TRANSFERS)]);
            break;
        case 6:
            begin_sending(twin);
            break;
        case 7:
            end_sending(&world.sendings[below(N_TRANSFERS)]);
            break;
        case 8:
            fork_unit(twin);
            break;
        case 9:
            twin->n_rows = (uint32_t)below(twin->n_rows + 1);
            kvs_unit_truncate(&twin->unit, &world.heap, twin->n_rows);
            break;
        case 10:
            kvs_unit_unreserve(&twin->unit, &world.heap, twin->unit.committed);
            break;
        default:
            if (below(3) > 0)
                break;
            kvs_unit_clear(&twin->unit, &world.heap);
            twin->used = false;
            continue;
        }
        check(twin);
        if (step % 100 == 0) {
            for (unsigned i = 0; i < N_UNITS; i++)
                if (world.twins[i].used)
                    check(&world.twins[i]);
            for (unsigned i = 0; i < N_TRANSFERS; i++)
                check_sending(&world.sendings[i]);
            kvs_segment_store_check(&world.heap);
            kvs_arena_check(world.arena);
        }
    }
    for (unsigned i = 0; i < N_TRANSFERS; i++) {
        end_landing(&world.landings[i]);
        end_sending(&world.sendings[i]);
    }
    for (unsigned i = 0; i < N_UNITS; i++) {
        if (world.twins[i].used) {
            check(&world.twins[i]);
            kvs_unit_clear(&world.twins[i].unit, &world.heap);
        }
    }
    assert_int_equal(world.heap.n_segments, 0);
    kvs_segment_store_check(&world.heap);
    kvs_arena_check(world.arena);
    kvs_arena_destroy(world.arena);
}

/* A full arena changes nothing. */
static void refuses_whole(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(8 << 20);
    struct kvs_segment_store heap;
    struct kvs_unit unit, child;
    uint32_t end = 0;
    uint64_t row;

    (void)state;
    assert_true(kvs_segment_store_init(&heap, arena));
    assert_int_equal(kvs_unit_init(&unit, &heap, 1, 2, 512), KV_OK);
    assert_int_equal(kvs_unit_init(&child, &heap, 1, 2, 512), KV_OK);
    while (kvs_unit_reserve(&unit, &heap, end + 100) == KV_OK) {
        for (uint32_t i = end; i < end + 100; i++)
            memcpy(kvs_unit_row(&unit, i), &(uint64_t){i}, sizeof(row));
        end += 100;
        unit.committed = end;
    }
    assert_int_equal(unit.reserved, end);
    assert_int_equal(unit.committed, end);
    uint64_t n_segments = heap.n_segments;
    assert_int_equal(kvs_unit_reserve(&unit, &heap, end + 100000), KV_NO_MEMORY);
    assert_int_equal(heap.n_segments, n_segments);
    for (uint32_t i = 0; i < end; i++) {
        memcpy(&row, kvs_unit_row(&unit, i), sizeof(row));
        assert_int_equal(row, i);
    }
    /* A child shares what there is; writing its half-filled segment takes a copy. */
    if (kvs_unit_fork(&unit, &child, &heap, end) == KV_OK) {
        kv_status_t status = kvs_unit_reserve(&child, &heap, end + 1);

        if (status == KV_OK)
            assert_ptr_not_equal(child.segments[end / KV_BLOCK_TOKENS],
                                 unit.segments[end / KV_BLOCK_TOKENS]);
        else
            assert_int_equal(child.reserved, end);
    }
    kvs_unit_clear(&child, &heap);
    kvs_unit_clear(&unit, &heap);
    assert_int_equal(heap.n_segments, 0);
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* Segments reserved together lie in one piece. */
static void pieces_are_joined(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(16 << 20);
    struct kv_iov iov[8];
    struct kvs_segment_store heap;
    struct kvs_unit unit;

    (void)state;
    assert_true(kvs_segment_store_init(&heap, arena));
    assert_int_equal(kvs_unit_init(&unit, &heap, 0, 0, 256), KV_OK);
    assert_int_equal(kvs_unit_reserve(&unit, &heap, 1000), KV_OK);
    assert_int_equal(kvs_unit_pieces(&unit, 10, 980, iov, 0, 8), 1);
    assert_ptr_equal(iov[0].base, kvs_unit_row(&unit, 10));
    assert_int_equal(iov[0].bytes, 980 * 256);
    assert_int_equal(kvs_unit_pieces(&unit, 990, 10, iov, 1, 8), 1);
    assert_int_equal(iov[0].bytes, 990 * 256);
    assert_int_equal(kvs_unit_pieces(&unit, 0, 10, iov, 1, 1), 2);
    kvs_unit_clear(&unit, &heap);
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* More sizes of rows than there are exact classes, one after the other: each finds one. */
static void cleared_units_leave_their_class(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(16 << 20);
    struct kvs_segment_store heap;

    (void)state;
    assert_true(kvs_segment_store_init(&heap, arena));
    for (uint32_t i = 0; i < 2 * KVS_ARENA_EXACT_MAX; i++) {
        const uint32_t row_bytes = 8 * (2 * i + 33); /* a segment of no rounded size */
        struct kvs_unit unit;

        assert_int_equal(kvs_unit_init(&unit, &heap, 0, 0, row_bytes), KV_OK);
        assert_int_equal(kvs_arena_class_bytes(arena, unit.row_class),
                         row_bytes * KV_BLOCK_TOKENS);
        kvs_unit_clear(&unit, &heap);
    }
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* Fails unless nothing changes: a copy of the last segment would not get the rows that are
 * landing in it. */
static void expect_busy(struct kvs_unit *unit, struct kvs_segment_store *heap, uint32_t end)
{
    const struct kvs_unit before = *unit;

    assert_int_equal(kvs_unit_reserve(unit, heap, end), KV_BUSY);
    assert_int_equal(unit->reserved, before.reserved);
    assert_int_equal(unit->n_segments, before.n_segments);
}

/* Rows that are landing go where the unit looks for them, whoever shares the segment and
 * however far others had reserved it. */
static void rows_land_where_the_unit_has_them(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(16 << 20);
    struct kvs_segment *pins[2];
    struct kv_iov iov;
    struct kvs_segment_store heap;
    struct kvs_unit unit, child;

    (void)state;
    assert_true(kvs_segment_store_init(&heap, arena));
    for (unsigned is_forked = 0; is_forked < 2; is_forked++) {
        assert_int_equal(kvs_unit_init(&unit, &heap, 0, 0, 256), KV_OK);
        assert_int_equal(kvs_unit_init(&child, &heap, 0, 0, 256), KV_OK);
        assert_int_equal(kvs_unit_reserve(&unit, &heap, 100), KV_OK);
        unit.committed = 100;
        assert_int_equal(kvs_unit_reserve(&unit, &heap, 110), KV_OK);
        assert_int_equal(kvs_unit_pieces(&unit, 100, 10, &iov, 0, 1), 1);
        assert_int_equal(kvs_unit_pin(&unit, 100, 10, pins), 1);
        if (is_forked) {
            assert_int_equal(kvs_unit_fork(&unit, &child, &heap, 100), KV_OK);
        } else { /* one behind it finds no memory in another unit of its message */
            assert_int_equal(kvs_unit_reserve(&unit, &heap, 120), KV_OK);
            kvs_unit_unreserve(&unit, &heap, 110);
        }
        expect_busy(&unit, &heap, 115);
        expect_busy(&unit, &heap, 1000);
        assert_ptr_equal(iov.base, kvs_unit_row(&unit, 100));
        memset(iov.base, 7, iov.bytes);
        unit.committed = 110;
        kvs_segment_unpin(&heap, pins[0]);
        assert_int_equal(kvs_unit_reserve(&unit, &heap, 1000), KV_OK);
        assert_memory_equal(kvs_unit_row(&unit, 109), &(uint64_t){0x0707070707070707}, 8);
        kvs_unit_clear(&child, &heap);
        kvs_unit_clear(&unit, &heap);
    }
    assert_int_equal(heap.n_segments, 0);
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations),
        cmocka_unit_test(refuses_whole),
        cmocka_unit_test(pieces_are_joined),
        cmocka_unit_test(cleared_units_leave_their_class),
        cmocka_unit_test(rows_land_where_the_unit_has_them),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
