/* Units against a plain model: a row is one number, and every unit a list of them.  The units of
 * a session share its blocks. */
#include "kvserver/store/rows/unit.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "tests/support/lone_unit.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    ROW_BYTES = 8,
    N_SESSIONS = 8,
    N_UNITS = 3, /* of each */
    N_TRANSFERS = 24,
    TOKENS_MAX = 1500,
    STEPS = 60000,
    ARENA_BYTES = 32 << 20,
    MOST_TAKEN = 512,
};

/* A unit and what must be in it. */
struct twin {
    struct kvs_unit *unit;
    uint64_t rows[TOKENS_MAX];
    uint32_t n_rows;
};

struct session {
    struct kvs_blocks blocks;
    struct kvs_unit units[N_UNITS];
    struct twin twins[N_UNITS];
    bool used;
};

/* Rows being sent: pinned, they may not change whatever becomes of the unit. */
struct sending {
    struct kvs_block *pins[TOKENS_MAX / KV_BLOCK_TOKENS + 2];
    unsigned n_pins;
    const uint8_t *at[TOKENS_MAX];
    uint64_t rows[TOKENS_MAX];
    uint32_t n_rows;
};

/* Rows being received into reserved memory: a late one may fall anywhere until unpinned, and
 * must hit nobody's rows. */
struct landing {
    struct kvs_block *pins[TOKENS_MAX / KV_BLOCK_TOKENS + 2];
    unsigned n_pins;
    struct kv_iov iov[TOKENS_MAX];
    unsigned n_iov;
};

static struct {
    struct kvs_arena *arena;
    struct kvs_segment_store heap;
    struct kv_random random;
    uint64_t number;
    struct session sessions[N_SESSIONS];
    struct sending sendings[N_TRANSFERS];
    struct landing landings[N_TRANSFERS];
} world;

static uint64_t below(uint64_t bound)
{
    return kv_random_below(&world.random, bound);
}

static void check(const struct session *session, const struct twin *twin)
{
    const struct kvs_unit *unit = twin->unit;

    kvs_unit_check(unit);
    assert_int_equal(unit->committed, twin->n_rows);
    assert_true(unit->reserved >= unit->committed);
    for (uint32_t i = 0; i < twin->n_rows; i++) {
        uint64_t row;

        memcpy(&row, kvs_unit_row(unit, i), sizeof(row));
        if (row != twin->rows[i])
            fail_msg("session %zu unit %u row %u of %u", (size_t)(session - world.sessions),
                     unit->at, i, twin->n_rows);
        assert_int_equal(*kvs_unit_crc(unit, i), (uint32_t)row);
    }
}

static void check_session(const struct session *session)
{
    kvs_blocks_check(&session->blocks);
    for (uint32_t i = 0; i < session->blocks.n; i++)
        kvs_block_check(&world.heap, session->blocks.list[i]);
    for (unsigned i = 0; i < N_UNITS; i++)
        check(session, &session->twins[i]);
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
    kvs_unit_write(twin->unit, begin, count, rows);
    kvs_unit_write_crcs(twin->unit, begin, count, crcs);
    twin->n_rows = begin + count;
    twin->unit->committed = begin + count;
}

static void append(struct twin *twin)
{
    uint32_t count = 1 + (uint32_t)below(below(4) == 0 ? 300 : 20);

    if (twin->n_rows + count > TOKENS_MAX)
        return;
    kvs_unit_unreserve(twin->unit, twin->unit->committed);
    if (kvs_unit_reserve(twin->unit, twin->n_rows + count) == KV_OK)
        write_rows(twin, twin->n_rows, count);
}

static void begin_landing(struct twin *twin)
{
    struct landing *landing = &world.landings[below(N_TRANSFERS)];
    uint32_t begin = twin->unit->reserved, count = 1 + (uint32_t)below(200);

    if (landing->n_pins > 0 || begin + count > TOKENS_MAX ||
        kvs_unit_reserve(twin->unit, begin + count) != KV_OK)
        return;
    landing->n_iov = kvs_unit_pieces(twin->unit, begin, count, landing->iov, 0, TOKENS_MAX);
    landing->n_pins = kvs_unit_pin(twin->unit, begin, count, landing->pins);
    assert_in_range(landing->n_pins, 1, count / KV_BLOCK_TOKENS + 2);
}

/* The transfer ends: its bytes fall where it was told, whoever has the unit by now. */
static void end_landing(struct landing *landing)
{
    for (unsigned i = 0; i < landing->n_iov; i++)
        memset(landing->iov[i].base, 0xee, landing->iov[i].bytes);
    for (unsigned i = 0; i < landing->n_pins; i++)
        kvs_block_unpin(&world.heap, landing->pins[i]);
    landing->n_pins = landing->n_iov = 0;
}

static void begin_sending(struct twin *twin)
{
    struct sending *sending = &world.sendings[below(N_TRANSFERS)];

    if (sending->n_pins > 0 || twin->n_rows == 0)
        return;
    uint32_t begin = (uint32_t)below(twin->n_rows);
    uint32_t count = 1 + (uint32_t)below(twin->n_rows - begin);

    sending->n_pins = kvs_unit_pin(twin->unit, begin, count, sending->pins);
    sending->n_rows = count;
    for (uint32_t i = 0; i < count; i++) {
        sending->at[i] = kvs_unit_row(twin->unit, begin + i);
        sending->rows[i] = twin->rows[begin + i];
    }
}

static void end_sending(struct sending *sending)
{
    check_sending(sending);
    for (unsigned i = 0; i < sending->n_pins; i++)
        kvs_block_unpin(&world.heap, sending->pins[i]);
    sending->n_pins = sending->n_rows = 0;
}

static void open_session(struct session *session)
{
    session->used = true;
    kvs_blocks_init(&session->blocks, &world.heap, session->units, N_UNITS);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        session->twins[i].unit = &session->units[i];
        session->twins[i].n_rows = 0;
        assert_int_equal(
            kvs_unit_init(&session->units[i], &session->blocks, i, i, 0, ROW_BYTES), KV_OK);
    }
}

static void close_session(struct session *session)
{
    for (uint32_t i = 0; i < N_UNITS; i++)
        kvs_unit_clear(&session->units[i]);
    kvs_blocks_clear(&session->blocks);
    session->used = false;
}

static uint32_t n_in_all(const struct session *session)
{
    uint32_t least = UINT32_MAX;

    for (uint32_t i = 0; i < N_UNITS; i++)
        if (session->twins[i].n_rows < least)
            least = session->twins[i].n_rows;
    return least;
}

static void fork_session(const struct session *session)
{
    struct session *child = &world.sessions[below(N_SESSIONS)];
    uint32_t tokens = (uint32_t)below(n_in_all(session) + 1);

    if (child->used)
        return;
    open_session(child);
    if (kvs_blocks_fork_begin(&child->blocks, tokens) != KV_OK)
        return;
    while (!kvs_blocks_fork_on(session->blocks.list, &child->blocks, tokens, 3))
        ;
    for (uint32_t i = 0; i < N_UNITS; i++) {
        child->twins[i].n_rows = tokens;
        memcpy(child->twins[i].rows, session->twins[i].rows, tokens * sizeof(uint64_t));
    }
}

static void truncate_session(struct session *session)
{
    const uint32_t tokens = (uint32_t)below(n_in_all(session) + 1);

    for (uint32_t i = 0; i < N_UNITS; i++) {
        session->twins[i].n_rows = tokens;
        kvs_unit_truncate(&session->units[i], tokens);
    }
}

static void step_once(struct session *session)
{
    struct twin *twin = &session->twins[below(N_UNITS)];

    switch (below(14)) {
    case 0:
    case 1:
    case 2:
        append(twin);
        break;
    case 3: /* a token of each, as decoding adds them */
        for (uint32_t i = 0; i < N_UNITS; i++)
            append(&session->twins[i]);
        break;
    case 4:
        begin_landing(twin);
        break;
    case 5:
    case 6:
        end_landing(&world.landings[below(N_TRANSFERS)]);
        break;
    case 7:
        begin_sending(twin);
        break;
    case 8:
        end_sending(&world.sendings[below(N_TRANSFERS)]);
        break;
    case 9:
        fork_session(session);
        break;
    case 10:
        truncate_session(session);
        break;
    case 11:
        kvs_unit_unreserve(twin->unit, twin->unit->committed);
        break;
    case 12: /* as the scrubber passes */
        if (session->blocks.n > 0)
            kvs_block_settle(&world.heap, session->blocks.list[below(session->blocks.n)]);
        break;
    default:
        if (below(3) == 0)
            close_session(session);
    }
}

static void check_all(void)
{
    for (unsigned i = 0; i < N_SESSIONS; i++)
        if (world.sessions[i].used)
            check_session(&world.sessions[i]);
    for (unsigned i = 0; i < N_TRANSFERS; i++)
        check_sending(&world.sendings[i]);
    kvs_segment_store_check(&world.heap);
    kvs_arena_check(world.arena);
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
        struct session *session = &world.sessions[below(N_SESSIONS)];

        if (!session->used)
            open_session(session);
        step_once(session);
        if (session->used)
            check_session(session);
        if (step % 100 == 0)
            check_all();
    }
    for (unsigned i = 0; i < N_TRANSFERS; i++) {
        end_landing(&world.landings[i]);
        end_sending(&world.sendings[i]);
    }
    check_all();
    for (unsigned i = 0; i < N_SESSIONS; i++)
        if (world.sessions[i].used)
            close_session(&world.sessions[i]);
    assert_int_equal(world.heap.n_segments, 0);
    assert_int_equal(world.heap.n_blocks, 0);
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
    assert_int_equal(lone_unit_init(&unit, &heap, 1, 2, 512), KV_OK);
    assert_int_equal(lone_unit_init(&child, &heap, 1, 2, 512), KV_OK);
    while (kvs_unit_reserve(&unit, end + 100) == KV_OK) {
        for (uint32_t i = end; i < end + 100; i++)
            memcpy(kvs_unit_row(&unit, i), &(uint64_t){i}, sizeof(row));
        end += 100;
        unit.committed = end;
    }
    assert_int_equal(unit.reserved, end);
    assert_int_equal(unit.committed, end);
    uint64_t n_segments = heap.n_segments;
    assert_int_equal(kvs_unit_reserve(&unit, end + 100000), KV_NO_MEMORY);
    assert_int_equal(heap.n_segments, n_segments);
    for (uint32_t i = 0; i < end; i++) {
        memcpy(&row, kvs_unit_row(&unit, i), sizeof(row));
        assert_int_equal(row, i);
    }
    /* A child shares what there is; writing its half-filled segment takes a copy. */
    if (lone_unit_fork(&unit, &child, end) == KV_OK) {
        kv_status_t status = kvs_unit_reserve(&child, end + 1);

        if (status == KV_OK)
            assert_ptr_not_equal(kvs_unit_block(&child, end / KV_BLOCK_TOKENS),
                                 kvs_unit_block(&unit, end / KV_BLOCK_TOKENS));
        else
            assert_int_equal(child.reserved, end);
    }
    lone_unit_clear(&child);
    lone_unit_clear(&unit);
    assert_int_equal(heap.n_segments, 0);
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* Takes all memory that marks could be in.  Returns the number of elements taken; *ret_last is a
 * block over all others that were made. */
static size_t fill(struct kvs_segment_store *heap, void **taken, struct kvs_block **ret_last)
{
    struct kvs_block *last = NULL, *block;
    size_t n = 0;

    while (n < MOST_TAKEN &&
           (taken[n] = kvs_arena_alloc(heap->arena, heap->chunk_class)) != NULL)
        n++;
    assert_in_range(n, 1, MOST_TAKEN - 1);
    /* Blocks of one unit take as much as a mark. */
    while ((block = kvs_block_create(heap, 1, last)) != NULL)
        last = block;
    *ret_last = last;
    return n;
}

static void
empty(struct kvs_segment_store *heap, void **taken, size_t n, struct kvs_block *last)
{
    while (n > 0)
        kvs_arena_free(heap->arena, heap->chunk_class, taken[--n]);
    kvs_block_unref(heap, last); /* and all under it */
}

/* A bad row that there is no memory to mark makes all of its segment count as bad, until there
 * is memory and the row has been written again. */
static void marks_need_no_memory(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(8 << 20);
    struct kvs_segment_store heap;
    struct kvs_unit unit;
    const uint64_t row = 7;
    struct kvs_block *last;
    void *taken[MOST_TAKEN];

    (void)state;
    assert_true(kvs_segment_store_init(&heap, arena));
    assert_int_equal(lone_unit_init(&unit, &heap, 0, 0, ROW_BYTES), KV_OK);
    assert_int_equal(kvs_unit_reserve(&unit, 2 * KV_BLOCK_TOKENS), KV_OK);
    unit.committed = unit.reserved;
    const size_t n = fill(&heap, taken, &last);
    kvs_segment_mark_bad(&heap, kvs_unit_block(&unit, 1), 0, 30);
    assert_true(kvs_unit_is_bad(&unit, KV_BLOCK_TOKENS + 30));
    assert_true(kvs_unit_is_bad(&unit, KV_BLOCK_TOKENS + 31));
    assert_false(kvs_unit_is_bad(&unit, 30));
    assert_int_equal(heap.health.rows_bad, KV_BLOCK_TOKENS);
    lone_unit_check(&unit);
    kvs_unit_mend(&unit, KV_BLOCK_TOKENS + 30, &row, 1);
    assert_true(kvs_unit_is_bad(&unit, KV_BLOCK_TOKENS + 30));
    empty(&heap, taken, n, last);
    kvs_unit_mend(&unit, KV_BLOCK_TOKENS + 30, &row, 1);
    assert_false(kvs_unit_is_bad(&unit, KV_BLOCK_TOKENS + 30));
    assert_true(kvs_unit_is_bad(&unit, KV_BLOCK_TOKENS + 31));
    assert_int_equal(heap.health.rows_bad, KV_BLOCK_TOKENS - 1);
    kvs_unit_truncate(&unit, KV_BLOCK_TOKENS + 20);
    assert_int_equal(kvs_unit_reserve(&unit, KV_BLOCK_TOKENS + 40), KV_OK);
    assert_int_equal(heap.health.rows_bad, 20);
    lone_unit_check(&unit);
    lone_unit_clear(&unit);
    assert_int_equal(heap.health.rows_bad, 0);
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* Of a segment that is not full, and counts as bad for want of memory, rows that were never
 * written do not; those that are written later are good. */
static void later_rows_are_good(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(8 << 20);
    struct kvs_segment_store heap;
    struct kvs_unit unit;
    struct kvs_block *last;
    void *taken[MOST_TAKEN];
    const uint64_t row = 7;

    (void)state;
    assert_true(kvs_segment_store_init(&heap, arena));
    for (int is_mended = 0; is_mended < 2; is_mended++) {
        assert_int_equal(lone_unit_init(&unit, &heap, 0, 0, ROW_BYTES), KV_OK);
        assert_int_equal(kvs_unit_reserve(&unit, 50), KV_OK);
        unit.committed = unit.reserved;
        const size_t n = fill(&heap, taken, &last);
        kvs_segment_mark_bad(&heap, kvs_unit_block(&unit, 0), 0, 30);
        empty(&heap, taken, n, last);
        assert_int_equal(heap.health.rows_bad, KV_BLOCK_TOKENS);
        if (is_mended) {
            kvs_unit_mend(&unit, 30, &row, 1);
            assert_int_equal(heap.health.rows_bad, 49);
            lone_unit_check(&unit);
        }
        assert_int_equal(kvs_unit_reserve(&unit, 60), KV_OK);
        assert_true(kvs_unit_is_bad(&unit, 49));
        assert_false(kvs_unit_is_bad(&unit, 50));
        assert_int_equal(heap.health.rows_bad, 50 - is_mended);
        lone_unit_check(&unit);
        lone_unit_clear(&unit);
    }
    assert_int_equal(heap.health.rows_bad, 0);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* A fork writes after a bad row: without memory for the mark in its copy it does not get the rows,
 * which would count as bad when they are good.  The same for a unit that nobody shares, whose
 * segment counts as bad as a whole. */
static void rows_wait_for_marks(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(8 << 20);
    struct kvs_segment_store heap;
    struct kvs_unit unit, child;
    struct kvs_block *last, *spare;
    void *taken[MOST_TAKEN];

    (void)state;
    assert_true(kvs_segment_store_init(&heap, arena));
    for (int is_forked = 0; is_forked < 2; is_forked++) {
        struct kvs_unit *writer = is_forked ? &child : &unit;

        assert_int_equal(lone_unit_init(&unit, &heap, 0, 0, ROW_BYTES), KV_OK);
        assert_int_equal(lone_unit_init(&child, &heap, 0, 0, ROW_BYTES), KV_OK);
        assert_int_equal(kvs_unit_reserve(&unit, 50), KV_OK);
        unit.committed = unit.reserved;
        if (is_forked) {
            kvs_segment_mark_bad(&heap, kvs_unit_block(&unit, 0), 0, 30);
            assert_int_equal(lone_unit_fork(&unit, &child, 50), KV_OK);
        }
        const size_t n = fill(&heap, taken, &last);
        if (!is_forked)
            kvs_segment_mark_bad(&heap, kvs_unit_block(&unit, 0), 0, 30);
        if (is_forked) { /* memory for the block of its own, and no more */
            spare = last;
            last = spare->under;
            spare->under = NULL;
            kvs_block_unref(&heap, spare);
        }
        const uint64_t n_bad = heap.health.rows_bad;
        assert_int_equal(kvs_unit_reserve(writer, 60), KV_NO_MEMORY);
        assert_int_equal(heap.health.rows_bad, n_bad);
        assert_int_equal(writer->reserved, 50);
        lone_unit_check(writer);
        empty(&heap, taken, n, last);
        assert_int_equal(kvs_unit_reserve(writer, 60), KV_OK);
        assert_true(kvs_unit_is_bad(writer, 30));
        assert_int_equal(kvs_unit_is_bad(writer, 49), !is_forked);
        assert_false(kvs_unit_is_bad(writer, 50));
        assert_int_equal(heap.health.rows_bad, is_forked ? 2 : 50);
        lone_unit_check(writer);
        lone_unit_clear(&child);
        lone_unit_clear(&unit);
    }
    assert_int_equal(heap.health.rows_bad, 0);
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* What blocks of so many units take is what segment.h says, but for the ends of pages. */
static void bookkeeping_is_small(void **state)
{
    static const uint32_t n_units[] = {1, 8, 9, 18, 32, 36, 72, 128, 320, 400, 406, 640};

    (void)state;
    for (size_t i = 0; i < sizeof(n_units) / sizeof(n_units[0]); i++) {
        const uint32_t n = n_units[i];
        const double most = 64 - sizeof(struct kvs_block *) + 8 * n + (n - 1) / 256 * 16;
        const double crcs = n < KVS_GROUP_SEGMENTS ? n * KV_BLOCK_TOKENS * 4 : 0;
        struct kvs_arena *arena = kvs_arena_create(256 << 20);
        struct kvs_segment_store heap;
        struct kvs_block *block;

        assert_true(kvs_segment_store_init(&heap, arena));
        const int rows_class = kvs_arena_class_rounded(arena, 1 << 10);
        uint8_t *rows = kvs_arena_alloc(arena, rows_class);
        /* Nothing is freed: all have the same rows. */
        while ((block = kvs_block_create(&heap, n, NULL)) != NULL)
            if (crcs > 0 && !kvs_segment_add(&heap, block, n - 1, rows))
                break;
        const double bytes = (double)(kvs_arena_bytes(arena) - KVS_ARENA_PAGE);
        assert_true(bytes / (double)heap.n_blocks <= (most + crcs) * 1.03);
        kvs_arena_destroy(arena);
    }
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
    assert_int_equal(lone_unit_init(&unit, &heap, 0, 0, 256), KV_OK);
    assert_int_equal(kvs_unit_reserve(&unit, 1000), KV_OK);
    assert_int_equal(kvs_unit_pieces(&unit, 10, 980, iov, 0, 8), 1);
    assert_ptr_equal(iov[0].base, kvs_unit_row(&unit, 10));
    assert_int_equal(iov[0].bytes, 980 * 256);
    assert_int_equal(kvs_unit_pieces(&unit, 990, 10, iov, 1, 8), 1);
    assert_int_equal(iov[0].bytes, 990 * 256);
    assert_int_equal(kvs_unit_pieces(&unit, 0, 10, iov, 1, 1), 2);
    lone_unit_clear(&unit);
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

        assert_int_equal(lone_unit_init(&unit, &heap, 0, 0, row_bytes), KV_OK);
        assert_int_equal(kvs_arena_class_bytes(arena, unit.row_class),
                         row_bytes * KV_BLOCK_TOKENS);
        lone_unit_clear(&unit);
    }
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* Fails unless nothing changes: a copy of the last segment would not get the rows that are
 * landing in it. */
static void expect_busy(struct kvs_unit *unit, uint32_t end)
{
    const struct kvs_unit before = *unit;
    const uint32_t n_blocks = unit->blocks->n;

    assert_int_equal(kvs_unit_reserve(unit, end), KV_BUSY);
    assert_int_equal(unit->reserved, before.reserved);
    assert_int_equal(unit->blocks->n, n_blocks);
}

/* Rows that are landing go where the unit looks for them, whoever shares the segment and
 * however far others had reserved it. */
static void rows_land_where_the_unit_has_them(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(16 << 20);
    struct kvs_block *pins[2];
    struct kv_iov iov;
    struct kvs_segment_store heap;
    struct kvs_unit unit, child;

    (void)state;
    assert_true(kvs_segment_store_init(&heap, arena));
    for (unsigned is_forked = 0; is_forked < 2; is_forked++) {
        assert_int_equal(lone_unit_init(&unit, &heap, 0, 0, 256), KV_OK);
        assert_int_equal(lone_unit_init(&child, &heap, 0, 0, 256), KV_OK);
        assert_int_equal(kvs_unit_reserve(&unit, 100), KV_OK);
        unit.committed = 100;
        assert_int_equal(kvs_unit_reserve(&unit, 110), KV_OK);
        assert_int_equal(kvs_unit_pieces(&unit, 100, 10, &iov, 0, 1), 1);
        assert_int_equal(kvs_unit_pin(&unit, 100, 10, pins), 1);
        if (is_forked) {
            assert_int_equal(lone_unit_fork(&unit, &child, 100), KV_OK);
        } else { /* one behind it finds no memory in another unit of its message */
            assert_int_equal(kvs_unit_reserve(&unit, 120), KV_OK);
            kvs_unit_unreserve(&unit, 110);
        }
        expect_busy(&unit, 115);
        expect_busy(&unit, 1000);
        assert_ptr_equal(iov.base, kvs_unit_row(&unit, 100));
        memset(iov.base, 7, iov.bytes);
        unit.committed = 110;
        kvs_block_unpin(&heap, pins[0]);
        assert_int_equal(kvs_unit_reserve(&unit, 1000), KV_OK);
        assert_memory_equal(kvs_unit_row(&unit, 109), &(uint64_t){0x0707070707070707}, 8);
        lone_unit_clear(&child);
        lone_unit_clear(&unit);
    }
    assert_int_equal(heap.n_segments, 0);
    kvs_segment_store_check(&heap);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* Rows of sessions that have gone are kept only if somebody finds them. */
static void hidden_rows_go(void **state)
{
    struct session *session = &world.sessions[0], *child;
    const uint64_t row = 7;

    (void)state;
    memset(&world, 0, sizeof(world));
    world.arena = kvs_arena_create(ARENA_BYTES);
    assert_true(kvs_segment_store_init(&world.heap, world.arena));
    open_session(session);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        assert_int_equal(kvs_unit_reserve(&session->units[i], 20), KV_OK);
        write_rows(&session->twins[i], 0, 20);
    }
    kvs_segment_mark_bad(&world.heap, session->blocks.list[0], 2, 3);
    /* Each is a fork of the one before, which is closed, and writes to one unit. */
    for (uint32_t i = 1; i < 100; i++, session = child) {
        child = &world.sessions[i % 2];
        open_session(child);
        assert_int_equal(kvs_blocks_fork_begin(&child->blocks, 10), KV_OK);
        assert_true(kvs_blocks_fork_on(session->blocks.list, &child->blocks, 10, 3));
        for (uint32_t j = 0; j < N_UNITS; j++) {
            child->twins[j].n_rows = 10;
            memcpy(child->twins[j].rows, session->twins[j].rows, 10 * sizeof(uint64_t));
        }
        assert_int_equal(kvs_unit_reserve(&child->units[i % 2], 20), KV_OK);
        write_rows(&child->twins[i % 2], 10, 10);
        close_session(session);
        check_session(child);
        assert_in_range(world.heap.n_blocks, 1, 3);
        assert_in_range(world.heap.n_segments, N_UNITS, 2 * N_UNITS);
    }
    kvs_block_settle(&world.heap, session->blocks.list[0]);
    assert_int_equal(world.heap.n_blocks, 1);
    assert_int_equal(world.heap.n_segments, N_UNITS);
    check_session(session);
    assert_true(kvs_unit_is_bad(&session->units[2], 3));
    kvs_unit_mend(&session->units[2], 3, &row, (uint32_t)row);
    close_session(session);
    assert_int_equal(world.heap.n_blocks, 0);
    kvs_arena_check(world.arena);
    kvs_arena_destroy(world.arena);
}

/* A session whose last rows are read, removed and written again, by one that lets go of each
 * read only during the next. */
static void rows_written_again_do_not_pile_up(void **state)
{
    struct session *session = &world.sessions[0];
    struct kvs_block *pins[2] = {NULL};

    (void)state;
    memset(&world, 0, sizeof(world));
    world.arena = kvs_arena_create(ARENA_BYTES);
    assert_true(kvs_segment_store_init(&world.heap, world.arena));
    open_session(session);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        assert_int_equal(kvs_unit_reserve(&session->units[i], 10), KV_OK);
        write_rows(&session->twins[i], 0, 10);
    }
    for (uint32_t i = 0; i < 100; i++) {
        assert_int_equal(kvs_unit_reserve(&session->units[0], 20), KV_OK);
        write_rows(&session->twins[0], 10, 10);
        assert_int_equal(kvs_unit_pin(&session->units[0], 0, 20, &pins[i % 2]), 1);
        kvs_unit_truncate(&session->units[0], 10);
        session->twins[0].n_rows = 10;
        if (i > 0)
            kvs_block_unpin(&world.heap, pins[(i + 1) % 2]);
        check_session(session);
        assert_in_range(world.heap.n_segments, N_UNITS, 2 * N_UNITS);
    }
    kvs_block_unpin(&world.heap, pins[1]);
    close_session(session);
    assert_int_equal(world.heap.n_blocks, 0);
    kvs_arena_check(world.arena);
    kvs_arena_destroy(world.arena);
}

/* Codes, as a segment has them. */
static void release_codes(void *arg, struct kvs_block *block, uint32_t at)
{
    struct kvs_codes *codes = kvs_block_codes_make(&world.heap, block, at);

    kvs_column_drop(&codes->column, arg);
    *codes = kvs_no_codes;
}

static void give_codes(struct kvs_block *block, uint32_t at, uint8_t n_coded)
{
    struct kvs_codes *codes = kvs_block_codes_make(&world.heap, block, at);

    assert_true(kvs_column_create(&codes->column, world.arena, KVS_COLUMN_CODES,
                                  kvs_arena_class_rounded(world.arena, 1000), 1000));
    codes->n_coded = n_coded;
}

/* A fork has codes and rows of its own of one unit, and those of the others from a session that
 * has gone. */
static void codes_stay_with_their_rows(void **state)
{
    struct session *session = &world.sessions[0], *child = &world.sessions[1];

    (void)state;
    memset(&world, 0, sizeof(world));
    world.arena = kvs_arena_create(ARENA_BYTES);
    assert_true(kvs_segment_store_init(&world.heap, world.arena));
    world.heap.release_codes = release_codes;
    world.heap.release_arg = world.arena;
    open_session(session);
    open_session(child);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        assert_int_equal(kvs_unit_reserve(&session->units[i], 20), KV_OK);
        give_codes(session->blocks.list[0], i, (uint8_t)(10 + i));
    }
    for (uint32_t i = 0; i < N_UNITS; i++)
        session->units[i].committed = 20;
    assert_int_equal(kvs_blocks_fork_begin(&child->blocks, 20), KV_OK);
    assert_true(kvs_blocks_fork_on(session->blocks.list, &child->blocks, 20, 3));
    assert_int_equal(kvs_unit_reserve(&child->units[1], 30), KV_OK);
    give_codes(child->blocks.list[0], 1, 15);
    close_session(session);
    kvs_block_settle(&world.heap, child->blocks.list[0]);
    assert_int_equal(world.heap.n_blocks, 1);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        kvs_unit_check(&child->units[i]);
        assert_int_equal(kvs_unit_codes(&child->units[i], 0)->n_coded, i == 1 ? 15 : 10 + i);
    }
    kvs_block_check(&world.heap, child->blocks.list[0]);
    close_session(child);
    assert_int_equal(world.heap.n_blocks, 0);
    kvs_arena_check(world.arena);
    kvs_arena_destroy(world.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations),
        cmocka_unit_test(refuses_whole),
        cmocka_unit_test(marks_need_no_memory),
        cmocka_unit_test(later_rows_are_good),
        cmocka_unit_test(rows_wait_for_marks),
        cmocka_unit_test(bookkeeping_is_small),
        cmocka_unit_test(pieces_are_joined),
        cmocka_unit_test(cleared_units_leave_their_class),
        cmocka_unit_test(rows_land_where_the_unit_has_them),
        cmocka_unit_test(hidden_rows_go),
        cmocka_unit_test(rows_written_again_do_not_pile_up),
        cmocka_unit_test(codes_stay_with_their_rows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
