/* Blocks that leave memory and come back: whole, damaged, or not at all. */
#include "kvserver/store/rows/residency.h"

#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/store/rows/verify.h"
#include "kvserver/store/tier/disk_tier_private.h"
#include "tests/support/memory_tier.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>

enum {
    N_UNITS = 3,
    N_SESSIONS = 3,
    ROW_BYTES = 88, /* unit i has i more times 16: segments of sizes that are not rounded */
    TOKENS = 300,
    TILE = 1000,
    ARENA_BYTES = 64 << 20,
};

struct session {
    struct kvs_blocks blocks;
    struct kvs_unit units[N_UNITS];
};

static struct {
    struct kvs_arena *arena;
    struct kvs_segment_store store;
    struct memory_tier tier;
    struct session sessions[N_SESSIONS];
    const struct kvs_segment *arrived;
    uint32_t n_arrived, n_codes_checked;
} it;

/* ---- sessions ---------------------------------------------------------------------------- */

static void release_codes(void *arg, struct kvs_block *block, uint32_t at)
{
    struct kvs_codes *codes = kvs_block_codes_make(&it.store, block, at);

    kvs_column_drop(&codes->column, arg);
    *codes = kvs_no_codes;
}

/* As the owner of codes does it: what is bad is lost. */
static void check_codes(void *arg, struct kvs_block *block, uint32_t at, bool have_come)
{
    struct kvs_codes *codes = kvs_block_codes_make(&it.store, block, at);

    (void)arg;
    it.n_codes_checked++;
    if (have_come && kvs_column_check(&codes->column, &it.store.health))
        return;
    codes->n_lost = codes->n_coded;
    codes->n_coded = 0;
}

static void arrived(void *arg, const struct kvs_segment *segment)
{
    (void)arg;
    it.arrived = segment;
    it.n_arrived++;
}

static void open_session(struct session *session)
{
    kvs_blocks_init(&session->blocks, &it.store, session->units, N_UNITS);
    for (uint32_t i = 0; i < N_UNITS; i++)
        assert_int_equal(
            kvs_unit_init(&session->units[i], &session->blocks, i, 1, i, ROW_BYTES + 16 * i),
            KV_OK);
}

static void close_session(struct session *session)
{
    for (uint32_t i = 0; i < N_UNITS; i++)
        kvs_unit_clear(&session->units[i]);
    kvs_blocks_clear(&session->blocks);
}

static uint8_t byte_of(uint32_t unit, uint32_t token, uint32_t i)
{
    return (uint8_t)(unit * 131 + token * 7 + i * 3 + token / 128);
}

static void append(struct session *session, uint32_t n)
{
    for (uint32_t i = 0; i < N_UNITS; i++) {
        struct kvs_unit *unit = &session->units[i];
        const struct kvs_row_set rows = kvs_unit_rows(unit);
        const uint32_t end = unit->committed + n;

        assert_int_equal(kvs_unit_reserve(unit, end), KV_OK);
        for (uint32_t token = unit->committed; token < end; token++) {
            uint8_t *row = kvs_unit_row(unit, token);
            uint32_t seed;

            for (uint32_t j = 0; j < unit->row_bytes; j++)
                row[j] = byte_of(i, token, j);
            kvs_verify_seeds(&rows, &token, 1, &seed);
            *kvs_unit_crc(unit, token) = kv_crc32c(seed, row, unit->row_bytes);
        }
        unit->committed = end;
    }
}

static void give_codes(struct kvs_block *block, uint32_t at)
{
    struct kvs_codes *codes = kvs_block_codes_make(&it.store, block, at);

    assert_true(kvs_column_create(&codes->column, it.arena, KVS_COLUMN_CODES,
                                  kvs_arena_class_rounded(it.arena, TILE), TILE));
    memset(codes->column.bytes, 5 + (int)at, TILE);
    kvs_column_seal(&codes->column);
    codes->n_coded = 100;
}

static void check(const struct session *session)
{
    for (uint32_t i = 0; i < N_UNITS; i++)
        kvs_unit_check(&session->units[i]);
    for (uint32_t i = 0; i < session->blocks.n; i++)
        for (const struct kvs_block *block = session->blocks.list[i]; block != NULL;
             block = block->under)
            kvs_block_check(&it.store, block);
    kvs_segment_store_check(&it.store);
    kvs_arena_check(it.arena);
}

static uint32_t n_bad_rows(const struct kvs_unit *unit)
{
    const struct kvs_row_set rows = kvs_unit_rows(unit);
    uint32_t n = 0;

    for (uint32_t token = 0; token < unit->committed; token++)
        n += kvs_verify_run(&it.store, &rows, token, 1, 1) == 0;
    return n;
}

static void assert_whole(const struct session *session)
{
    for (uint32_t i = 0; i < N_UNITS; i++) {
        const struct kvs_unit *unit = &session->units[i];

        assert_int_equal(n_bad_rows(unit), 0);
        for (uint32_t token = 0; token < unit->committed; token++)
            for (uint32_t j = 0; j < unit->row_bytes; j++)
                assert_int_equal(kvs_unit_row(unit, token)[j], byte_of(i, token, j));
    }
}

static int set_up(void **state)
{
    (void)state;
    memset(&it, 0, sizeof(it));
    it.arena = kvs_arena_create(ARENA_BYTES);
    assert_true(kvs_segment_store_init(&it.store, it.arena));
    it.store.release_codes = release_codes;
    it.store.check_codes = check_codes;
    it.store.release_arg = it.arena;
    it.store.arrived = arrived;
    open_session(&it.sessions[0]);
    append(&it.sessions[0], TOKENS);
    assert_int_equal(kvs_block_leave(&it.store, it.sessions[0].blocks.list[0]), KV_BUSY);
    memory_tier_init(&it.tier, &it.store);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    assert_int_equal(it.store.n_blocks, 0);
    assert_int_equal(it.store.n_away, 0);
    assert_null(it.tier.kept);
    kvs_segment_store_check(&it.store);
    kvs_arena_check(it.arena);
    kvs_arena_destroy(it.arena);
    return 0;
}

static void settle(void)
{
    for (int i = 0; i < 10; i++)
        (void)kvs_residency_step(&it.store);
}

static struct kvs_block *evict(struct session *session, uint32_t i)
{
    struct kvs_block *block = session->blocks.list[i];

    assert_int_equal(kvs_block_leave(&it.store, block), KV_OK);
    settle();
    assert_int_equal(block->residency, KVS_ABSENT);
    return block;
}

/* ---- tests ------------------------------------------------------------------------------- */

/* All of its memory is free while it is away, and all of its bytes are the same after. */
static void blocks_come_back_whole(void **state)
{
    struct session *session = &it.sessions[0];

    (void)state;
    for (uint32_t i = 0; i < N_UNITS; i++)
        give_codes(session->blocks.list[1], i);
    for (uint32_t i = 0; i < 3; i++)
        (void)evict(session, i);
    check(session);
    assert_int_equal(kvs_residency_n_absent(&it.store), 3);
    for (uint32_t i = 0; i < 3; i++) {
        struct kvs_block *block = session->blocks.list[i];

        assert_false(kvs_block_is_here(block));
        assert_null(kvs_block_group(block, 0)->crcs);
        assert_false(kvs_block_need(&it.store, block));
        assert_false(kvs_block_need(&it.store, block)); /* asked for once */
        assert_int_equal(it.tier.n_asked, i + 1);
        assert_int_equal(it.n_arrived, i * N_UNITS);
        assert_true(memory_tier_bring_back(&it.tier, block));
        assert_ptr_equal(it.arrived, &block->segments[N_UNITS - 1]);
        assert_true(kvs_block_need(&it.store, block));
        check(session);
    }
    assert_int_equal(it.store.n_away, 0);
    assert_whole(session);
    assert_int_equal(it.n_codes_checked, N_UNITS);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        const struct kvs_codes *codes = kvs_block_codes(session->blocks.list[1], i);

        assert_true(kvs_column_is_sound(&codes->column));
        assert_int_equal(codes->n_coded, 100);
    }
    append(session, 100);
    assert_whole(session);
    close_session(session);
}

/* Rows that are not those that left are found before anybody sees them, and no others are. */
static void damage_is_found(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_block *block = session->blocks.list[0];

    (void)state;
    give_codes(block, 0);
    give_codes(block, 1);
    for (int what = 0; what < 5; what++) {
        struct kvs_segment_image *image;

        (void)evict(session, 0);
        image = memory_tier_find(&it.tier, block, 1);
        if (what == 0)
            ((uint8_t *)image->rows)[5000] ^= 4;
        else if (what == 1)
            ((uint8_t *)image->crcs)[10] ^= 1;
        else if (what == 2)
            ((uint8_t *)image->codes)[TILE - 1] ^= 1;
        else if (what == 3) /* another segment's */
            memcpy((void *)image->rows, memory_tier_find(&it.tier, block, 0)->rows, 1000);
        else
            image->rows_bytes -= 16;
        (void)kvs_block_need(&it.store, block);
        assert_true(memory_tier_bring_back(&it.tier, block));
        check(session);
        assert_int_equal(kvs_segment_has_bad(block, 1), what != 2);
        assert_int_equal(n_bad_rows(&session->units[1]), what == 2 ? 0 : KV_BLOCK_TOKENS);
        assert_int_equal(n_bad_rows(&session->units[0]), 0);
        assert_int_equal(n_bad_rows(&session->units[2]), 0);
        assert_int_equal(kvs_block_codes(block, 0)->n_coded, 100);
        assert_int_equal(kvs_block_codes(block, 1)->n_lost, what == 2 ? 100 : 0);
        if (what == 2) { /* made again */
            struct kvs_codes *codes = kvs_block_codes_make(&it.store, block, 1);

            codes->n_lost = 0;
            codes->n_coded = 100;
            memset(codes->column.bytes, 6, TILE);
            kvs_column_seal(&codes->column);
            continue;
        }
        for (uint32_t token = 0; token < KV_BLOCK_TOKENS; token++) { /* put again */
            const struct kvs_row_set rows = kvs_unit_rows(&session->units[1]);
            uint8_t row[ROW_BYTES + 16];
            uint32_t seed;

            for (uint32_t j = 0; j < sizeof(row); j++)
                row[j] = byte_of(1, token, j);
            kvs_verify_seeds(&rows, &token, 1, &seed);
            kvs_unit_mend(&session->units[1], token, row, kv_crc32c(seed, row, sizeof(row)));
        }
        assert_int_equal(it.store.health.rows_bad, 0);
        assert_whole(session);
    }
    close_session(session);
}

/* What is lost has no good row, and no codes. */
static void lost_segments_have_no_good_row(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_block *block = session->blocks.list[1];

    (void)state;
    give_codes(block, 2);
    (void)evict(session, 1);
    memory_tier_forget(&it.tier, block);
    (void)kvs_block_need(&it.store, block);
    assert_true(memory_tier_bring_back(&it.tier, block));
    check(session);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        assert_int_equal(n_bad_rows(&session->units[i]), KV_BLOCK_TOKENS);
        assert_int_equal(kvs_unit_known_bad(&session->units[i], 100, 100), KV_BLOCK_TOKENS);
    }
    assert_int_equal(kvs_block_codes(block, 2)->n_coded, 0);
    assert_int_equal(it.store.health.rows_bad, N_UNITS * KV_BLOCK_TOKENS);
    close_session(session);
}

/* A row of a lost segment that is put again counts as mended when its mark has gone, which takes
 * memory: that of the other rows stays. */
static void mending_takes_memory(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_unit *unit = &session->units[0];
    struct kvs_block *block = session->blocks.list[1];
    const int page_class = kvs_arena_class_rounded(it.arena, KVS_ARENA_PAGE);
    const uint8_t row[ROW_BYTES] = {7};
    static void *taken[ARENA_BYTES >> 14];
    uint32_t n_pages = 0, n = 0;

    (void)state;
    (void)evict(session, 1);
    memory_tier_forget(&it.tier, block);
    (void)kvs_block_need(&it.store, block);
    assert_true(memory_tier_bring_back(&it.tier, block));
    while ((taken[n_pages] = kvs_arena_alloc(it.arena, page_class)) != NULL)
        n_pages++;
    void **chunks = taken + n_pages;
    while ((chunks[n] = kvs_arena_alloc(it.arena, it.store.chunk_class)) != NULL)
        n++;
    kvs_unit_mend(unit, KV_BLOCK_TOKENS, row, 1);
    assert_true(kvs_unit_is_bad(unit, KV_BLOCK_TOKENS));
    assert_int_equal(it.store.health.mended[KVS_KIND_ROWS], 0);
    for (uint32_t i = 0; i < n; i++)
        kvs_arena_free(it.arena, it.store.chunk_class, chunks[i]);
    for (uint32_t i = 0; i < n_pages; i++)
        kvs_arena_free(it.arena, page_class, taken[i]);
    kvs_unit_mend(unit, KV_BLOCK_TOKENS, row, 1);
    assert_false(kvs_unit_is_bad(unit, KV_BLOCK_TOKENS));
    assert_true(kvs_unit_is_bad(unit, KV_BLOCK_TOKENS + 1));
    assert_int_equal(it.store.health.mended[KVS_KIND_ROWS], 1);
    check(session);
    close_session(session);
}

/* Forks, truncates and ends of sessions need no row, and what nobody has is forgotten. */
static void absent_blocks_are_shared_and_freed(void **state)
{
    struct session *session = &it.sessions[0], *child = &it.sessions[1];

    (void)state;
    for (uint32_t i = 0; i < N_UNITS; i++)
        give_codes(session->blocks.list[0], i);
    for (uint32_t i = 0; i < 3; i++)
        (void)evict(session, i);
    open_session(child);
    assert_int_equal(kvs_blocks_fork_begin(&child->blocks, 200), KV_OK);
    assert_true(kvs_blocks_fork_on(session->blocks.list, &child->blocks, 200, 3));
    check(child);
    assert_false(kvs_segment_need(&it.store, session->blocks.list[2], 1));
    for (uint32_t i = 0; i < N_UNITS; i++) /* the last block goes, while it is loading */
        kvs_unit_truncate(&session->units[i], 150);
    assert_int_equal(it.n_arrived, 1);
    assert_int_equal(it.store.n_away, 2);
    check(session);
    close_session(session);
    assert_int_equal(it.store.n_away, 2);
    for (uint32_t i = 0; i < 2; i++) {
        (void)kvs_block_need(&it.store, child->blocks.list[i]);
        assert_true(memory_tier_bring_back(&it.tier, child->blocks.list[i]));
    }
    append(child, 100);
    assert_whole(child);
    check(child);
    (void)evict(child, 0);
    close_session(child);
}

/* A session's block over one that is absent: neither gets the other's rows until both are there. */
static void chains_wait_for_each_other(void **state)
{
    struct session *session = &it.sessions[0], *child = &it.sessions[1];

    (void)state;
    open_session(child);
    assert_int_equal(kvs_blocks_fork_begin(&child->blocks, 200), KV_OK);
    assert_true(kvs_blocks_fork_on(session->blocks.list, &child->blocks, 200, 3));
    assert_int_equal(kvs_unit_reserve(&child->units[0], 250), KV_OK);
    struct kvs_block *over = child->blocks.list[1], *under = over->under;
    assert_ptr_equal(under, session->blocks.list[1]);
    (void)evict(session, 1);
    close_session(session);
    kvs_block_settle(&it.store, over);
    assert_ptr_equal(over->under, under);
    check(child);
    (void)kvs_block_need(&it.store, under);
    assert_true(memory_tier_bring_back(&it.tier, under));
    kvs_block_settle(&it.store, over);
    assert_null(over->under);
    kvs_unit_truncate(&child->units[0], 200);
    check(child);
    assert_whole(child);
    close_session(child);
}

enum {
    N_SIZES = KVS_ARENA_EXACT_MAX + N_UNITS,
};

/* Returns how many of these sizes a class has; all, if so many exact classes are free. */
static uint32_t hold_sizes(int held[N_SIZES])
{
    uint32_t n_exact = 0;

    for (uint32_t i = 0; i < N_SIZES; i++) {
        const size_t bytes = (1 << 16) + 64 * (1 + 3 * i); /* but one is rounded */

        held[i] = kvs_arena_class_hold(it.arena, bytes);
        n_exact += kvs_arena_class_bytes(it.arena, held[i]) == bytes;
    }
    return n_exact;
}

static void release_sizes(const int held[N_SIZES])
{
    for (uint32_t i = 0; i < N_SIZES; i++)
        kvs_arena_class_release(it.arena, held[i]);
}

/* A session ends with a block over one that is absent: units are cleared, and the sizes of their
 * rows given up, before the block under it is freed.  If that comes back meanwhile it gets memory
 * of the size that it had. */
static void sizes_are_kept_for_what_is_absent(void **state)
{
    struct session *session = &it.sessions[0], *child = &it.sessions[1];
    int held[N_SIZES];

    (void)state;
    open_session(child);
    assert_int_equal(kvs_blocks_fork_begin(&child->blocks, 200), KV_OK);
    assert_true(kvs_blocks_fork_on(session->blocks.list, &child->blocks, 200, 3));
    assert_int_equal(kvs_unit_reserve(&child->units[0], 250), KV_OK);
    struct kvs_block *under = child->blocks.list[1]->under;
    (void)evict(session, 1);
    close_session(session);
    (void)kvs_block_need(&it.store, under);
    for (uint32_t i = 0; i + 1 < N_UNITS; i++)
        kvs_unit_clear(&child->units[i]);
    assert_true(kvs_segment_is_away(&under->segments[1]));
    const uint32_t n_exact = hold_sizes(held);
    assert_true(memory_tier_bring_back(&it.tier, under));
    for (uint32_t i = 0; i < N_UNITS; i++)
        assert_false(kvs_segment_has_bad(under, i));
    kvs_block_check(&it.store, under);
    release_sizes(held);
    close_session(child);

    /* And for no longer. */
    assert_int_equal(hold_sizes(held), n_exact + N_UNITS);
    release_sizes(held);
}

/* Only a segment of it is left when it comes back. */
static void segments_go_while_their_block_is_away(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_block *block = evict(session, 2);

    (void)state;
    kvs_unit_truncate(&session->units[0], 10);
    kvs_unit_truncate(&session->units[2], 200);
    check(session);
    assert_int_equal(block->n_own, 1);
    (void)kvs_block_need(&it.store, block);
    assert_true(memory_tier_bring_back(&it.tier, block));
    check(session);
    assert_whole(session);
    close_session(session);
}

/* Who was at work when a block was marked may touch it until it ends; who began later, and needs
 * it, keeps it. */
static void blocks_in_use_stay(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_block *block = session->blocks.list[0];
    struct kvs_work works[6] = {0}, work = {0};

    (void)state;
    for (int i = 0; i < 3; i++) { /* of several turns */
        kvs_work_begin(&it.store, &works[i]);
        assert_int_equal(kvs_block_leave(&it.store, session->blocks.list[2]), KV_OK);
        settle();
        assert_true(kvs_block_need(&it.store, session->blocks.list[2]));
    }
    assert_int_equal(kvs_block_leave(&it.store, block), KV_OK);
    assert_int_equal(kvs_block_leave(&it.store, block), KV_BUSY);
    for (int i = 0; i < 3; i++) {
        settle();
        check(session);
        assert_true(kvs_block_is_here(block));
        kvs_work_begin(&it.store, &works[3 + i]); /* in the same turn, or the next */
        kvs_work_end(&it.store, &works[i]);
    }
    settle();
    kvs_work_end(&it.store, &works[3]);
    kvs_work_end(&it.store, &works[4]);
    settle();
    kvs_work_end(&it.store, &works[5]);
    settle();
    assert_int_equal(block->residency, KVS_ABSENT);
    (void)kvs_block_need(&it.store, block);
    assert_true(memory_tier_bring_back(&it.tier, block));

    kvs_work_begin(&it.store, &work);
    assert_int_equal(kvs_block_leave(&it.store, block), KV_OK);
    settle();
    assert_true(kvs_block_need(&it.store, block)); /* takes the mark away */
    kvs_work_end(&it.store, &work);
    settle();
    assert_int_equal(block->residency, KVS_IN_MEMORY);
    close_session(session);
}

/* Rows of a unit are let go of and come back while others are used; codes and CRCs stay.  Then all of it
 * leaves. */
static void units_leave_one_by_one(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_block *block = session->blocks.list[0], *pins[4];
    struct kvs_work work = {0};

    (void)state;
    give_codes(block, 1);
    assert_true(memory_tier_keep(&it.tier, block));
    kvs_work_add(&work, 1);
    kvs_work_begin(&it.store, &work);
    assert_int_equal(kvs_segment_let_go(&it.store, block, 1), 0);
    assert_true(kvs_segment_let_go(&it.store, block, 0) >= KV_BLOCK_TOKENS * ROW_BYTES);
    assert_int_equal(kvs_segment_let_go(&it.store, block, 0), 0);
    assert_int_equal(block->residency, KVS_PARTLY);
    check(session);
    kvs_work_end(&it.store, &work);
    assert_int_equal(kvs_unit_pin(&session->units[2], 0, 10, pins), 1);
    assert_int_equal(kvs_segment_let_go(&it.store, block, 1), 0);
    kvs_block_unpin(&it.store, block);
    assert_true(kvs_segment_let_go(&it.store, block, 1) > 0);
    assert_false(kvs_column_is_away(&kvs_block_codes(block, 1)->column));
    assert_true(kvs_segment_need(&it.store, block, 2));
    assert_false(kvs_segment_need(&it.store, block, 1));
    check(session);
    for (uint32_t at = 0; at < 2; at++) {
        assert_false(kvs_block_is_here(block));
        assert_true(
            kvs_block_restore(&it.store, block, at, memory_tier_find(&it.tier, block, at)));
        kvs_block_restored(&it.store, block);
    }
    assert_int_equal(block->residency, KVS_IN_MEMORY);
    check(session);
    assert_whole(session);

    /* A part of it, and nobody needs the rest. */
    assert_true(kvs_segment_let_go(&it.store, block, 1) > 0);
    assert_int_equal(kvs_block_leave(&it.store, block), KV_OK);
    assert_true(kvs_segment_need(&it.store, block, 0));
    assert_int_equal(block->residency, KVS_PARTLY);
    assert_int_equal(kvs_block_leave(&it.store, block), KV_OK);
    settle();
    assert_int_equal(block->residency, KVS_ABSENT);
    check(session);
    (void)kvs_block_need(&it.store, block);
    assert_true(memory_tier_bring_back(&it.tier, block));
    assert_whole(session);
    close_session(session);
}

enum {
    N_OTHERS = 40,
};

static int32_t page_of(const void *element)
{
    return (int32_t)(((uintptr_t)element - (uintptr_t)kvs_arena_base(it.arena)) /
                     KVS_ARENA_PAGE);
}

/* Rows move to another page unless somebody uses them, and are what they were. */
static void rows_move(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_work work = {0};
    struct kvs_block *pins[4];
    uint32_t n_moved = 0;

    (void)state;
    for (uint32_t i = 0; i < session->blocks.n; i++)
        for (uint32_t at = 0; at < N_UNITS; at++) {
            struct kvs_block *block = session->blocks.list[i];
            const uint8_t *rows = kvs_block_rows(block, at);
            const int class_id = kvs_arena_class_of(it.arena, rows);
            const int32_t page = page_of(rows);
            void *others[N_OTHERS], *beside[KVS_PAGE_ELEMENTS_MAX];
            uint32_t n_others = 0, n_beside = 0;

            assert_ptr_equal(kvs_arena_owner(it.arena, rows), block);
            /* Before any has moved, no other page has room. */
            assert_true(n_moved >= N_UNITS ||
                        !kvs_block_move_rows(&it.store, block, rows, page));
            /* Another page has more of them. */
            while (n_others < N_OTHERS) {
                void *element = kvs_arena_alloc(it.arena, class_id);

                if (page_of(element) == page)
                    beside[n_beside++] = element;
                else
                    others[n_others++] = element;
            }
            while (n_beside > 0)
                kvs_arena_free(it.arena, class_id, beside[--n_beside]);
            kvs_work_add(&work, at);
            kvs_work_begin(&it.store, &work);
            assert_false(kvs_block_move_rows(&it.store, block, rows, page));
            kvs_work_end(&it.store, &work);
            assert_true(kvs_unit_pin(&session->units[at], i * KV_BLOCK_TOKENS, 1, pins) == 1);
            assert_false(kvs_block_move_rows(&it.store, block, rows, page));
            kvs_block_unpin(&it.store, block);
            assert_true(kvs_block_move_rows(&it.store, block, rows, page));
            assert_true(kvs_block_rows(block, at) != rows);
            assert_ptr_equal(kvs_arena_owner(it.arena, kvs_block_rows(block, at)), block);
            n_moved++;
            while (n_others > 0)
                kvs_arena_free(it.arena, class_id, others[--n_others]);
            check(session);
        }
    assert_int_equal(n_moved, kvs_blocks_for(TOKENS) * N_UNITS);
    assert_whole(session);
    close_session(session);
}

/* Rows leave a sparse page for another, unless what has no owner would stay behind: rows of two such pages
 * would go to and fro, and none would be let go of meanwhile. */
static void rows_move_only_if_their_page_becomes_free(void **state)
{
    enum {
        MOST = 100,
    };
    static struct kvs_disk_tier tier;
    struct session *session = &it.sessions[0];
    const uint8_t *rows = kvs_block_rows(session->blocks.list[0], 0);
    const int class_id = kvs_arena_class_of(it.arena, rows);
    const size_t bytes = kvs_arena_class_bytes(it.arena, class_id);
    const int32_t page = page_of(rows);
    void *beside[KVS_PAGE_ELEMENTS_MAX], *others[2];
    uint32_t n_beside = 0, n = 0;
    struct kv_clock clock;

    (void)state;
    kv_clock_virtual_init(&clock, 1);
    tier = (struct kvs_disk_tier){
        .store = &it.store,
        .clock = &clock,
        .page = KVS_PAGE_NONE,
        .page_class = class_id,
    };
    /* One that stays beside the rows, and two on another page. */
    while (page_of(others[0] = kvs_arena_alloc(it.arena, class_id)) == page)
        beside[n_beside++] = others[0];
    others[1] = kvs_arena_alloc(it.arena, class_id);
    while (n_beside > 1)
        kvs_arena_free(it.arena, class_id, beside[--n_beside]);
    while (n < MOST && kvs_condense(&tier))
        n++;
    assert_true(n < MOST);
    assert_int_equal(tier.counts.moved_bytes, 0);

    kvs_arena_free(it.arena, class_id, beside[0]);
    while (n < MOST && kvs_condense(&tier))
        n++;
    assert_true(n < MOST);
    assert_int_equal(tier.counts.moved_bytes, kvs_blocks_for(TOKENS) * bytes);
    assert_false(kvs_arena_has_page(it.arena, page));
    check(session);
    assert_whole(session);
    kvs_arena_free(it.arena, class_id, others[0]);
    kvs_arena_free(it.arena, class_id, others[1]);
    close_session(session);
}

/* Who queries a unit again is in the next pass; another session is in the same one. */
static void what_two_passes_have_not_used_is_idle(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_block *block = session->blocks.list[0], *other = session->blocks.list[1];
    uint8_t first = 0, second = 0;

    (void)state;
    kvs_segment_note_use(&it.store, block, 1);
    kvs_segment_note_use(&it.store, other, 1);
    kvs_pass_end(&it.store, 1, &first);
    assert_int_equal(it.store.n_passes, 1);
    kvs_pass_end(&it.store, 1, &second);
    assert_int_equal(it.store.n_passes, 1);
    kvs_segment_note_use(&it.store, other, 1);
    assert_false(kvs_segment_is_idle(&it.store, block, 1));
    kvs_pass_end(&it.store, 1, &first);
    assert_true(kvs_segment_is_idle(&it.store, block, 1));
    assert_false(kvs_segment_is_idle(&it.store, other, 1));
    assert_false(kvs_segment_is_idle(&it.store, block, 0));
    kvs_segment_note_use(&it.store, block, 1);
    assert_false(kvs_segment_is_idle(&it.store, block, 1));
    close_session(session);
}

static void pinned_blocks_stay(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_block *block = session->blocks.list[0], *pins[4];

    (void)state;
    assert_int_equal(kvs_unit_pin(&session->units[0], 0, 10, pins), 1);
    assert_int_equal(kvs_block_leave(&it.store, block), KV_BUSY);
    kvs_block_unpin(&it.store, block);
    assert_int_equal(kvs_block_leave(&it.store, block), KV_OK);
    assert_int_equal(kvs_unit_pin(&session->units[0], 0, 10, pins), 1);
    settle();
    assert_int_equal(block->residency, KVS_IN_MEMORY);
    kvs_block_unpin(&it.store, block);
    it.tier.is_full = true;
    assert_int_equal(kvs_block_leave(&it.store, block), KV_OK);
    settle();
    assert_int_equal(block->residency, KVS_IN_MEMORY);
    /* One that is freed while it leaves. */
    assert_int_equal(kvs_block_leave(&it.store, block), KV_OK);
    close_session(session);
}

/* Without memory a block comes back in parts, whenever there is some. */
static void blocks_come_back_when_there_is_memory(void **state)
{
    struct session *session = &it.sessions[0];
    struct kvs_block *block = evict(session, 0);
    const int page_class = kvs_arena_class_rounded(it.arena, KVS_ARENA_PAGE);
    static void *taken[1 << 16];
    uint32_t n_pages = 0, n = 0;
    const int class_id = session->units[2].row_class;

    (void)state;
    while (n_pages < 1 << 10 &&
           (taken[n_pages] = kvs_arena_alloc(it.arena, page_class)) != NULL)
        n_pages++;
    void **rows = taken + n_pages;
    while ((rows[n] = kvs_arena_alloc(it.arena, class_id)) != NULL)
        n++;
    (void)kvs_block_need(&it.store, block);
    assert_false(memory_tier_bring_back(&it.tier, block));
    check(session);
    assert_int_equal(block->residency, KVS_PARTLY);
    for (uint32_t i = 0; i < n; i++)
        kvs_arena_free(it.arena, class_id, rows[i]);
    for (uint32_t i = 0; i < n_pages; i++)
        kvs_arena_free(it.arena, page_class, taken[i]);
    assert_true(memory_tier_bring_back(&it.tier, block));
    check(session);
    assert_whole(session);
    close_session(session);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(blocks_come_back_whole, set_up, tear_down),
        cmocka_unit_test_setup_teardown(damage_is_found, set_up, tear_down),
        cmocka_unit_test_setup_teardown(lost_segments_have_no_good_row, set_up, tear_down),
        cmocka_unit_test_setup_teardown(mending_takes_memory, set_up, tear_down),
        cmocka_unit_test_setup_teardown(absent_blocks_are_shared_and_freed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(chains_wait_for_each_other, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sizes_are_kept_for_what_is_absent, set_up, tear_down),
        cmocka_unit_test_setup_teardown(segments_go_while_their_block_is_away, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(blocks_in_use_stay, set_up, tear_down),
        cmocka_unit_test_setup_teardown(units_leave_one_by_one, set_up, tear_down),
        cmocka_unit_test_setup_teardown(rows_move, set_up, tear_down),
        cmocka_unit_test_setup_teardown(rows_move_only_if_their_page_becomes_free, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(what_two_passes_have_not_used_is_idle, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(pinned_blocks_stay, set_up, tear_down),
        cmocka_unit_test_setup_teardown(blocks_come_back_when_there_is_memory, set_up,
                                        tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
