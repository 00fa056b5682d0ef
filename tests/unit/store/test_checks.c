/* The checks of the store's structures, each proved: a structure that is sound passes, and one
 * in which a single invariant was broken ends the process.
 *
 * The arena's own source is part of this test, which so reaches into its pages. */
#include "kvserver/store/rows/arena.c"
#include "kvserver/store/rows/object.h"
#include "tests/support/dies.h"
#include "tests/support/units.h"

enum {
    D = 16,
    ROW_BYTES = D * sizeof(float),
    N_ROWS = 1000,
    ARENA_BYTES = 64 << 20,
};

static struct bench bench;
static struct kvs_unit unit, child;
static struct kvs_objects objects;
static struct kvs_stored_object *object[3];

static int set_up(void **state)
{
    const uint32_t crcs[2] = {0};

    (void)state;
    bench_open(&bench, ARENA_BYTES, 5);
    unit_make(&bench, &unit, 0, D, N_ROWS);
    if (lone_unit_init(&child, &bench.heap, 0, 0, ROW_BYTES) != KV_OK ||
        lone_unit_fork(&unit, &child, 300) != KV_OK ||
        !kvs_objects_init(&objects, bench.arena, &bench.heap.health, 7, 0))
        return -1;
    for (unsigned i = 0; i < 3; i++) {
        const struct kv_id128 key = {.bytes = {(uint8_t)(i + 1)}};

        object[i] = kvs_object_create(
            &objects, &(struct kvs_object_facts){
                          .key = key,
                          .bytes = 1500000,
                          .crcs = crcs,
                          .terms = {.expires_us = 1000 - i, .is_evictable = i > 0}});
        if (object[i] == NULL || kvs_objects_publish(&objects, object[i]) != KV_OK)
            return -1;
        kvs_object_unpin(&objects, object[i]);
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvs_objects_fini(&objects);
    lone_unit_clear(&child);
    lone_unit_clear(&unit);
    bench_close(&bench);
    return 0;
}

/* ---- arena ------------------------------------------------------------------------------- */

static void check_arena(void)
{
    kvs_arena_check(bench.arena);
}

/* A page that is lent and has room. */
static struct kvs_page *roomy_page(void)
{
    return page_at(bench.arena, bench.arena->classes[unit.blocks->array_class].first);
}

static void arena_free_count(void)
{
    bench.arena->pages->n_free++;
}

static void arena_used_count(void)
{
    bench.arena->n_used++;
}

static void arena_page_of_another(void)
{
    roomy_page()->owner = NULL;
}

static void arena_element_without_bit(void)
{
    roomy_page()->used[0] &= roomy_page()->used[0] - 1;
}

static void arena_element_not_counted(void)
{
    roomy_page()->n_used--;
}

static void arena_bit_behind_the_last(void)
{
    struct kvs_page *page = page_at(bench.arena, bench.arena->classes[unit.row_class].first);
    const uint32_t per_page = bench.arena->classes[unit.row_class].per_page;

    page->used[(per_page - 1) / 64] |= (uint64_t)1 << 63;
    page->used[per_page / 64] |= (uint64_t)1 << per_page % 64;
    page->n_used += 2;
}

static void arena_page_on_no_list(void)
{
    bench.arena->classes[unit.blocks->array_class].first = NONE;
}

static void arena_ring_of_free_pages(void)
{
    const int32_t first = bench.arena->pages->free_first;

    page_at(bench.arena, page_at(bench.arena, first)->next)->next = first;
}

static void arena_link_back(void)
{
    roomy_page()->prev = bench.arena->classes[unit.row_class].first;
}

static void arena_page_of_other_class(void)
{
    roomy_page()->class_id = unit.row_class;
}

static void arena_class_twice(void)
{
    bench.arena->classes[unit.blocks->array_class].bytes =
        bench.arena->classes[unit.row_class].bytes;
}

static void arena_finds(void **state)
{
    (void)state;
    check_arena();
    expect_found(arena_free_count, check_arena);
    expect_found(arena_used_count, check_arena);
    expect_found(arena_page_of_another, check_arena);
    expect_found(arena_element_without_bit, check_arena);
    expect_found(arena_element_not_counted, check_arena);
    expect_found(arena_bit_behind_the_last, check_arena);
    expect_found(arena_page_on_no_list, check_arena);
    expect_found(arena_ring_of_free_pages, check_arena);
    expect_found(arena_link_back, check_arena);
    expect_found(arena_page_of_other_class, check_arena);
    expect_found(arena_class_twice, check_arena);
}

/* ---- units, segments --------------------------------------------------------------------- */

static void check_units(void)
{
    lone_unit_check(&unit);
    lone_unit_check(&child);
}

static void unit_committed_beyond_reserved(void)
{
    unit.committed = unit.reserved + 1;
}

static void unit_segment_too_many(void)
{
    unit.reserved = unit.committed = 10;
}

static void unit_segment_too_few(void)
{
    unit.blocks->n--;
}

static void unit_broken_for_ever(void)
{
    unit.broken = true;
}

static void unit_array_given_back(void)
{
    kvs_arena_free(bench.arena, unit.blocks->array_class, unit.blocks->list);
}

static void unit_rows_not_written(void)
{
    kvs_unit_block(&unit, 1)->segments[0].n_written = KV_BLOCK_TOKENS - 1;
}

static void unit_other_class(void)
{
    unit.row_class++;
}

static struct kvs_codes *codes_at(uint32_t block)
{
    struct kvs_codes *codes =
        kvs_block_codes_make(&bench.heap, kvs_unit_block(&unit, block), 0);

    if (codes == NULL)
        _exit(3);
    return codes;
}

static void block_nobody_has(void)
{
    kvs_unit_block(&unit, 0)->refs = 0;
}

static void segment_trains_without_pin(void)
{
    kvs_unit_block(&unit, 0)->segments[0].training = true;
}

static void segment_rows_given_back(void)
{
    kvs_arena_free(bench.arena, unit.row_class, kvs_unit_row(&unit, 2 * KV_BLOCK_TOKENS));
}

static void segment_coded_beyond_written(void)
{
    codes_at(7)->n_coded = (uint8_t)(kvs_unit_segment(&unit, 7)->n_written + 1);
}

static void segment_coded_without_tile(void)
{
    codes_at(0)->n_coded = 3;
}

static void segment_bad_beyond_written(void)
{
    kvs_segment_mark_bad(&bench.heap, kvs_unit_block(&unit, 7), 0, KV_BLOCK_TOKENS - 1);
}

static void segment_bad_without_entry(void)
{
    kvs_unit_block(&unit, 3)->segments[0].has_bad = true;
}

static void block_counts_one_more(void)
{
    kvs_unit_block(&unit, 3)->n_own++;
}

static void blocks_count_one_more(void)
{
    unit.blocks->n_top++;
}

static void segment_half_in_chapter(void)
{
    codes_at(0)->in_chapter = true;
}

static void units_find(void **state)
{
    (void)state;
    assert_int_equal(kvs_unit_n_segments(&unit), 8);
    check_units();
    expect_found(unit_committed_beyond_reserved, check_units);
    expect_found(unit_segment_too_many, check_units);
    expect_found(unit_segment_too_few, check_units);
    expect_found(unit_broken_for_ever, check_units);
    expect_found(unit_array_given_back, check_units);
    expect_found(unit_rows_not_written, check_units);
    expect_found(unit_other_class, check_units);
    expect_found(block_nobody_has, check_units);
    expect_found(segment_trains_without_pin, check_units);
    expect_found(segment_rows_given_back, check_units);
    expect_found(segment_coded_beyond_written, check_units);
    expect_found(segment_coded_without_tile, check_units);
    expect_found(segment_bad_beyond_written, check_units);
    expect_found(segment_bad_without_entry, check_units);
    expect_found(block_counts_one_more, check_units);
    expect_found(blocks_count_one_more, check_units);
    expect_found(segment_half_in_chapter, check_units);
}

static void check_store(void)
{
    kvs_segment_store_check(&bench.heap);
}

static void store_record_not_counted(void)
{
    bench.heap.records_used -= KVS_RECORD_STEP;
}

/* Of the size of blocks with one unit. */
static struct kvs_record **free_record(void)
{
    struct kvs_record **first = bench.heap.free_records;

    while (*first == NULL)
        first++;
    return first;
}

static void store_record_lost(void)
{
    struct kvs_record **first = free_record();

    memcpy(first, *first, sizeof(*first)); /* a record begins with the next one */
}

static void store_ring_of_records(void)
{
    struct kvs_record **first = free_record();

    memcpy(*first, first, sizeof(*first));
}

static void store_finds(void **state)
{
    (void)state;
    check_store();
    expect_found(store_record_not_counted, check_store);
    expect_found(store_record_lost, check_store);
    expect_found(store_ring_of_records, check_store);
}

/* ---- objects ----------------------------------------------------------------------------- */

static void check_objects(void)
{
    kvs_objects_check(&objects);
}

static void object_out_of_list(void)
{
    object[0]->next = object[2];
    object[2]->prev = object[0];
}

static void object_link_back(void)
{
    object[1]->prev = NULL;
}

static void object_last(void)
{
    objects.last = object[1];
}

static void object_under_other_key(void)
{
    object[1]->key.bytes[0] ^= 0x40;
}

static void object_bytes(void)
{
    objects.bytes -= 1000;
}

static void object_bad_not_counted(void)
{
    object[1]->pieces[1].is_bad = true;
}

static void object_piece_given_back(void)
{
    kvs_arena_free(bench.arena, object[1]->pieces[0].class_id, object[1]->pieces[0].bytes);
}

static void object_looked_at_is_gone(void)
{
    static struct kvs_stored_object gone;

    objects.looked = &gone;
}

static void object_out_of_order(void)
{
    object[1]->number = 3;
}

static void object_not_in_heap(void)
{
    kvs_expiry_remove(&objects.expiries, &object[1]->expiry);
    object[1]->expiry.at_us = 999;
}

static void object_heap_out_of_order(void)
{
    object[2]->expiry.at_us = 2000;
}

static void object_not_evictable(void)
{
    object[1]->is_evictable = false;
}

static void object_used_link_back(void)
{
    object[2]->used_before = NULL;
}

static void object_spare_bytes(void)
{
    objects.spare_bytes += 1;
}

static void object_away_not_saved(void)
{
    uint8_t *bytes = object[1]->pieces[0].bytes;

    object[1]->pieces[0].bytes = NULL;
    object[1]->n_here--;
    objects.n_away++;
    kvs_arena_free(bench.arena, object[1]->pieces[0].class_id, bytes);
}

static void object_away_not_counted(void)
{
    objects.n_away++;
}

static void object_memory(void)
{
    objects.memory -= 4096;
}

static void object_walk_is_gone(void)
{
    static struct kvs_stored_object gone;

    objects.walk = &gone;
}

static void object_mark_is_gone(void)
{
    static struct kvs_stored_object gone;

    objects.marks[2].object = &gone;
}

static void objects_find(void **state)
{
    (void)state;
    check_objects();
    expect_found(object_out_of_list, check_objects);
    expect_found(object_link_back, check_objects);
    expect_found(object_last, check_objects);
    expect_found(object_under_other_key, check_objects);
    expect_found(object_bytes, check_objects);
    expect_found(object_bad_not_counted, check_objects);
    expect_found(object_piece_given_back, check_objects);
    expect_found(object_looked_at_is_gone, check_objects);
    expect_found(object_out_of_order, check_objects);
    expect_found(object_not_in_heap, check_objects);
    expect_found(object_heap_out_of_order, check_objects);
    expect_found(object_not_evictable, check_objects);
    expect_found(object_used_link_back, check_objects);
    expect_found(object_spare_bytes, check_objects);
    expect_found(object_away_not_saved, check_objects);
    expect_found(object_away_not_counted, check_objects);
    expect_found(object_memory, check_objects);
    expect_found(object_walk_is_gone, check_objects);
    expect_found(object_mark_is_gone, check_objects);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(arena_finds, set_up, tear_down),
        cmocka_unit_test_setup_teardown(units_find, set_up, tear_down),
        cmocka_unit_test_setup_teardown(store_finds, set_up, tear_down),
        cmocka_unit_test_setup_teardown(objects_find, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
