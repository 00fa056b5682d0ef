/* Blocks and segments: their records, and when their memory is freed.  A block lives while
 * sessions or blocks over it refer to it, or transfers have it pinned; whichever lets go of it
 * last frees it. */
#include "kvserver/store/rows/segment.h"

#include "kvserver/store/rows/residency.h"

#include <assert.h>
#include <string.h>

enum {
    CHUNK_BYTES = 16 << 10, /* divided into records at once; most */
    REST_MOST = 2,          /* bytes of it for each record that become none */
    RECORDS_STEP = 4,       /* so many have the size of an exact class */
    SETTLE_MOST = 16,       /* blocks that kvs_block_settle() looks at */
};

struct kvs_record {
    struct kvs_record *next;
};

const struct kvs_codes kvs_no_codes = {0};

/* ---- records ------------------------------------------------------------------------------ */

static size_t record_step_up(size_t bytes)
{
    return (bytes + KVS_RECORD_STEP - 1) / KVS_RECORD_STEP * KVS_RECORD_STEP;
}

/* Allocates an element of just this size, if the arena has a class for it, and not one that is
 * rounded up.  The class lasts as long as it has elements. */
static void *alloc_exact(struct kvs_segment_store *store, size_t bytes)
{
    const int class_id = kvs_arena_class_hold(store->arena, bytes);

    if (class_id < 0)
        return NULL;
    void *element = kvs_arena_alloc(store->arena, class_id);
    kvs_arena_class_release(store->arena, class_id);
    return element;
}

static void free_exact(struct kvs_segment_store *store, void *element)
{
    kvs_arena_free(store->arena, kvs_arena_class_of(store->arena, element), element);
}

/* Divides a chunk into records of `bytes`: one of the common size, if all but a few bytes of it
 * become records, or else one of whole records. */
static bool divide(struct kvs_segment_store *store, size_t bytes)
{
    struct kvs_record **first = &store->free_records[bytes / KVS_RECORD_STEP];
    size_t n = CHUNK_BYTES / bytes;
    const bool is_common = CHUNK_BYTES % bytes <= n * REST_MOST;

    if (!is_common)
        n -= n % RECORDS_STEP;
    /* Records are small and numerous; a page that was divided into records stays so. */
    char *chunk = is_common ? kvs_arena_alloc(store->arena, store->chunk_class)
                            : alloc_exact(store, n * bytes);

    if (chunk == NULL)
        return false;
    for (size_t i = n; i-- > 0;) {
        struct kvs_record *record = (struct kvs_record *)(void *)(chunk + i * bytes);

        record->next = *first;
        *first = record;
        store->records_bytes += bytes;
    }
    return true;
}

static void *record_get(struct kvs_segment_store *store, size_t bytes)
{
    bytes = record_step_up(bytes);
    if (bytes > KVS_RECORD_MAX)
        return alloc_exact(store, bytes);
    struct kvs_record **first = &store->free_records[bytes / KVS_RECORD_STEP];
    if (*first == NULL && !divide(store, bytes))
        return NULL;
    struct kvs_record *record = *first;
    *first = record->next;
    store->records_used += bytes;
    return record;
}

static void record_put(struct kvs_segment_store *store, void *memory, size_t bytes)
{
    struct kvs_record *record = memory;

    bytes = record_step_up(bytes);
    if (bytes > KVS_RECORD_MAX) {
        free_exact(store, memory);
        return;
    }
    record->next = store->free_records[bytes / KVS_RECORD_STEP];
    store->free_records[bytes / KVS_RECORD_STEP] = record;
    store->records_used -= bytes;
}

bool kvs_segment_store_init(struct kvs_segment_store *store, struct kvs_arena *arena)
{
    *store = (struct kvs_segment_store){
        .arena = arena,
        .chunk_class = kvs_arena_class_rounded(arena, CHUNK_BYTES),
    };
    return store->chunk_class >= 0;
}

void kvs_segment_store_visit_free(const struct kvs_segment_store *store,
                                  void (*visit)(void *arg, const void *record),
                                  void *arg)
{
    for (size_t i = 0; i < sizeof(store->free_records) / sizeof(store->free_records[0]); i++)
        for (const struct kvs_record *record = store->free_records[i]; record != NULL;
             record = record->next)
            visit(arg, record);
}

/* ---- bad rows ----------------------------------------------------------------------------- */

static struct kvs_bad_rows **
bad_find(const struct kvs_segment_store *store, const struct kvs_block *block, uint32_t at)
{
    const uint64_t hash = ((uintptr_t)block / KVS_RECORD_STEP + at) * 0x9e3779b97f4a7c15;
    /* The list is the store's, which is not const to who changes it. */
    struct kvs_bad_rows **link =
        (struct kvs_bad_rows **)&store->bad[(hash >> 32) % KVS_BAD_LISTS];

    while (*link != NULL && ((*link)->block != block || (*link)->at != at))
        link = &(*link)->next;
    return link;
}

static void bad_link(struct kvs_segment_store *store,
                     struct kvs_block *block,
                     uint32_t at,
                     struct kvs_bad_rows *bad)
{
    struct kvs_bad_rows **link = bad_find(store, block, at);

    assert(*link == NULL);
    bad->next = NULL;
    bad->block = block;
    bad->at = at;
    *link = bad;
    block->segments[at].has_bad = true;
}

/* Makes an entry for the segment.  Returns NULL if there is no memory. */
static struct kvs_bad_rows *
bad_add(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at, uint64_t bits)
{
    struct kvs_bad_rows *bad = record_get(store, sizeof(*bad));

    if (bad == NULL)
        return NULL;
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS / 64; i++)
        bad->rows[i] = bits;
    bad_link(store, block, at, bad);
    return bad;
}

static void bad_remove(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    struct kvs_bad_rows **link = bad_find(store, block, at), *bad = *link;

    assert(bad != NULL);
    *link = bad->next;
    record_put(store, bad, sizeof(*bad));
    block->segments[at].has_bad = false;
}

static bool bad_is_empty(const struct kvs_bad_rows *bad)
{
    uint64_t any = 0;

    for (uint32_t i = 0; i < KV_BLOCK_TOKENS / 64; i++)
        any |= bad->rows[i];
    return any == 0;
}

uint32_t kvs_segment_count_bad(const struct kvs_segment_store *store,
                               const struct kvs_block *block,
                               uint32_t at)
{
    uint32_t n = 0;

    if (block->segments[at].is_all_bad)
        return KV_BLOCK_TOKENS;
    if (!block->segments[at].has_bad)
        return 0;
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS / 64; i++)
        n += (uint32_t)__builtin_popcountll((*bad_find(store, block, at))->rows[i]);
    return n;
}

bool kvs_segment_is_bad(const struct kvs_segment_store *store,
                        const struct kvs_block *block,
                        uint32_t at,
                        uint32_t row)
{
    if (!block->segments[at].has_bad)
        return block->segments[at].is_all_bad;
    return (*bad_find(store, block, at))->rows[row / 64] >> row % 64 & 1;
}

void kvs_segment_mark_bad(struct kvs_segment_store *store,
                          struct kvs_block *block,
                          uint32_t at,
                          uint32_t row)
{
    struct kvs_bad_rows *bad;

    if (kvs_segment_is_bad(store, block, at, row))
        return;
    store->health.found[KVS_KIND_ROWS]++;
    bad = block->segments[at].has_bad ? *bad_find(store, block, at)
                                      : bad_add(store, block, at, 0);
    if (bad == NULL) { /* rather too many than one too few */
        block->segments[at].is_all_bad = true;
        store->health.rows_bad += KV_BLOCK_TOKENS;
        return;
    }
    bad->rows[row / 64] |= (uint64_t)1 << row % 64;
    store->health.rows_bad++;
}

void kvs_segment_mark_all_bad(struct kvs_segment_store *store,
                              struct kvs_block *block,
                              uint32_t at)
{
    const uint32_t n_written = (uint32_t)block->segments[at].n_written;
    const uint32_t n_before = kvs_segment_count_bad(store, block, at);

    if (block->segments[at].is_all_bad)
        return;
    if (block->segments[at].has_bad)
        bad_remove(store, block, at);
    block->segments[at].is_all_bad = true;
    store->health.rows_bad += KV_BLOCK_TOKENS - n_before;
    store->health.found[KVS_KIND_ROWS] += n_written > n_before ? n_written - n_before : 0;
}

/* Takes the marks from row `filled` on away. */
static void bad_keep(struct kvs_bad_rows *bad, uint32_t filled)
{
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS / 64; i++) {
        const uint32_t n = filled <= i * 64 ? 0 : filled - i * 64;

        bad->rows[i] &= n >= 64 ? UINT64_MAX : ((uint64_t)1 << n) - 1;
    }
}

bool kvs_segment_list_bad(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    struct kvs_bad_rows *bad;

    if (!block->segments[at].is_all_bad)
        return true;
    bad = bad_add(store, block, at, UINT64_MAX);
    if (bad == NULL)
        return false;
    store->health.rows_bad -= KV_BLOCK_TOKENS;
    block->segments[at].is_all_bad = false;
    bad_keep(bad, (uint32_t)block->segments[at].n_written);
    store->health.rows_bad += kvs_segment_count_bad(store, block, at);
    return true;
}

void kvs_segment_unmark_bad(struct kvs_segment_store *store,
                            struct kvs_block *block,
                            uint32_t at,
                            uint32_t row)
{
    assert(kvs_segment_is_bad(store, block, at, row));
    if (!kvs_segment_list_bad(store, block, at))
        return; /* it counts as bad until there is memory to say otherwise */
    struct kvs_bad_rows *bad = *bad_find(store, block, at);
    bad->rows[row / 64] &= ~((uint64_t)1 << row % 64);
    store->health.rows_bad--;
    if (bad_is_empty(bad))
        bad_remove(store, block, at);
}

/* Rows from `filled` on no longer count as bad. */
static void forget_bad(struct kvs_segment_store *store,
                       struct kvs_block *block,
                       uint32_t at,
                       uint32_t filled)
{
    assert(!block->segments[at].is_all_bad || filled == 0); /* kvs_segment_list_bad() */
    store->health.rows_bad -= kvs_segment_count_bad(store, block, at);
    block->segments[at].is_all_bad = false;
    if (block->segments[at].has_bad) {
        struct kvs_bad_rows *bad = *bad_find(store, block, at);

        bad_keep(bad, filled);
        if (bad_is_empty(bad))
            bad_remove(store, block, at);
    }
    store->health.rows_bad += kvs_segment_count_bad(store, block, at);
}

bool kvs_bad_rows_copy(struct kvs_segment_store *store,
                       const struct kvs_block *from,
                       uint32_t at,
                       uint32_t filled,
                       struct kvs_bad_rows **ret_bad)
{
    struct kvs_bad_rows *bad = NULL;

    if (kvs_segment_has_bad(from, at)) {
        bad = record_get(store, sizeof(*bad));
        if (bad == NULL)
            return false;
        memset(bad, 0, sizeof(*bad));
        for (uint32_t row = 0; row < filled; row++)
            if (kvs_segment_is_bad(store, from, at, row))
                bad->rows[row / 64] |= (uint64_t)1 << row % 64;
        if (bad_is_empty(bad)) {
            kvs_bad_rows_free(store, bad);
            bad = NULL;
        }
    }
    *ret_bad = bad;
    return true;
}

void kvs_bad_rows_free(struct kvs_segment_store *store, struct kvs_bad_rows *bad)
{
    if (bad != NULL)
        record_put(store, bad, sizeof(*bad));
}

void kvs_segment_give_bad(struct kvs_segment_store *store,
                          struct kvs_block *block,
                          uint32_t at,
                          struct kvs_bad_rows *bad)
{
    if (bad == NULL)
        return;
    bad_link(store, block, at, bad);
    store->health.rows_bad += kvs_segment_count_bad(store, block, at);
}

/* ---- segments ----------------------------------------------------------------------------- */

/* Rows from `filled` on will be overwritten, so what is known of them no longer holds.  Without
 * all its codes the segment leaves its chapter, whose cells list whole segments; codes that it lost
 * are not made again then. */
void kvs_segment_forget_rows(struct kvs_segment_store *store,
                             struct kvs_block *block,
                             uint32_t at,
                             uint32_t filled)
{
    if (kvs_segment_has_bad(block, at))
        forget_bad(store, block, at, filled);
    if (block->n_checked > filled)
        block->n_checked = (uint8_t)filled;
    if (kvs_block_group(block, at)->codes == NULL)
        return;
    struct kvs_codes *codes = kvs_block_codes_make(store, block, at);
    if (codes->n_coded > filled) {
        codes->n_coded = (uint8_t)filled;
        codes->in_chapter = false;
    }
    if (codes->n_lost > filled && codes->lost_chapter)
        store->release_codes(store->release_arg, block, at); /* its codebook waits for all */
    else if (codes->n_lost > filled)
        codes->n_lost = (uint8_t)filled;
}

/* Returns how many of the block's segments are in the group of one. */
static uint32_t n_of_group(const struct kvs_block *block, uint32_t at)
{
    const uint32_t left = block->n_segments - at / KVS_GROUP_SEGMENTS * KVS_GROUP_SEGMENTS;

    return left < KVS_GROUP_SEGMENTS ? left : KVS_GROUP_SEGMENTS;
}

static int
codes_class(const struct kvs_segment_store *store, const struct kvs_block *block, uint32_t at)
{
    return kvs_arena_class_rounded(store->arena,
                                   n_of_group(block, at) * sizeof(struct kvs_codes));
}

struct kvs_codes *
kvs_block_codes_make(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    struct kvs_segment_group *group = kvs_block_group(block, at);

    if (group->codes == NULL) {
        const int class_id = codes_class(store, block, at);

        group->codes = class_id < 0 ? NULL : kvs_arena_alloc(store->arena, class_id);
        if (group->codes == NULL)
            return NULL;
        memset(group->codes, 0, n_of_group(block, at) * sizeof(*group->codes));
    }
    return &group->codes[at % KVS_GROUP_SEGMENTS];
}

bool kvs_block_crcs_make(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    struct kvs_segment_group *group = kvs_block_group(block, at);

    if (group->crcs == NULL) {
        group->crcs = alloc_exact(store, (size_t)n_of_group(block, at) * KV_BLOCK_TOKENS *
                                             sizeof(uint32_t));
        if (group->crcs != NULL)
            kvs_arena_use(store->arena, KVS_USE_ROWS, group->crcs);
    }
    return group->crcs != NULL;
}

/* Lets go of what is under the block, if the block hides all of it. */
static void drop_hidden(struct kvs_segment_store *store, struct kvs_block *block)
{
    struct kvs_block *under = block->under;

    if (under == NULL || block->n_own < block->n_segments)
        return;
    block->under = NULL;
    kvs_block_unref(store, under);
}

bool kvs_segment_add(struct kvs_segment_store *store,
                     struct kvs_block *block,
                     uint32_t at,
                     uint8_t *rows)
{
    assert(block->segments[at].rows == 0);
    if (!kvs_block_crcs_make(store, block, at))
        return false;
    block->segments[at] = (struct kvs_segment){.rows = (uintptr_t)rows};
    assert(kvs_block_rows(block, at) == rows);
    block->n_own++;
    store->n_segments++;
    kvs_segment_note_use(store, block, at);
    kvs_arena_use(store->arena, KVS_USE_ROWS, rows);
    kvs_arena_set_owner(store->arena, rows, block);
    drop_hidden(store, block);
    return true;
}

void kvs_segment_free(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    assert(block->segments[at].rows != 0);
    if (block->segments[at].is_wanted)
        kvs_segment_give_up(store, block, at);
    if (kvs_block_codes(block, at)->column.bytes != NULL)
        store->release_codes(store->release_arg, block, at);
    kvs_segment_forget_rows(store, block, at, 0);
    if (kvs_segment_is_away(&block->segments[at])) {
        kvs_segment_away_release(store, &block->segments[at]);
    } else {
        uint8_t *rows = kvs_block_rows(block, at);

        kvs_arena_unuse(store->arena, KVS_USE_ROWS, rows);
        kvs_arena_free(store->arena, kvs_arena_class_of(store->arena, rows), rows);
    }
    block->segments[at] = (struct kvs_segment){0};
    block->n_own--;
    store->n_segments--;
}

/* ---- blocks ------------------------------------------------------------------------------- */

static uint32_t n_groups(uint32_t n_segments)
{
    return (n_segments + KVS_GROUP_SEGMENTS - 1) / KVS_GROUP_SEGMENTS;
}

static size_t block_bytes(uint32_t n_segments)
{
    return sizeof(struct kvs_block) + n_segments * sizeof(struct kvs_segment) +
           n_groups(n_segments) * sizeof(struct kvs_segment_group);
}

struct kvs_block *
kvs_block_create(struct kvs_segment_store *store, uint32_t n_segments, struct kvs_block *under)
{
    struct kvs_block *block = record_get(store, block_bytes(n_segments));

    if (block == NULL)
        return NULL;
    memset(block, 0, block_bytes(n_segments));
    block->refs = 1;
    block->n_segments = (uint16_t)n_segments;
    block->under = under;
    store->n_blocks++;
    return block;
}

void kvs_group_crcs_free(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    struct kvs_segment_group *group = kvs_block_group(block, at);

    if (group->crcs != NULL) {
        kvs_arena_unuse(store->arena, KVS_USE_ROWS, group->crcs);
        free_exact(store, group->crcs);
    }
    group->crcs = NULL;
}

void kvs_block_crcs_free(struct kvs_segment_store *store, struct kvs_block *block)
{
    for (uint32_t at = 0; at < block->n_segments; at += KVS_GROUP_SEGMENTS)
        kvs_group_crcs_free(store, block, at);
}

static void free_groups(struct kvs_segment_store *store, struct kvs_block *block)
{
    kvs_block_crcs_free(store, block);
    for (uint32_t at = 0; at < block->n_segments; at += KVS_GROUP_SEGMENTS) {
        struct kvs_segment_group *group = kvs_block_group(block, at);

        if (group->codes != NULL)
            kvs_arena_free(store->arena, codes_class(store, block, at), group->codes);
    }
}

/* Moves the mark of a segment's bad rows along with the rows. */
static void bad_move(struct kvs_segment_store *store,
                     const struct kvs_block *from,
                     struct kvs_block *to,
                     uint32_t at)
{
    struct kvs_bad_rows **link = bad_find(store, from, at), *bad = *link;

    *link = bad->next;
    bad_link(store, to, at, bad);
}

/* Moves a segment's rows, and what was made of them, to the block over it that has none.
 * Returns false if there is no memory; nothing has changed then. */
static bool segment_move(struct kvs_segment_store *store,
                         struct kvs_block *from,
                         struct kvs_block *to,
                         uint32_t at)
{
    struct kvs_codes *codes = NULL;

    if (!kvs_block_crcs_make(store, to, at))
        return false;
    if (kvs_block_codes(from, at)->column.bytes != NULL) {
        codes = kvs_block_codes_make(store, to, at);
        if (codes == NULL)
            return false;
        *codes = *kvs_block_codes(from, at);
        *kvs_block_codes_make(store, from, at) = kvs_no_codes;
    }
    memcpy(kvs_block_crcs(to, at), kvs_block_crcs(from, at),
           KV_BLOCK_TOKENS * sizeof(uint32_t));
    if (from->segments[at].has_bad)
        bad_move(store, from, to, at);
    to->segments[at] = from->segments[at];
    from->segments[at] = (struct kvs_segment){0};
    if (!kvs_segment_is_away(&to->segments[at]))
        kvs_arena_set_owner(store->arena, kvs_block_rows(to, at), to);
    to->n_own++;
    from->n_own--;
    return true;
}

/* Takes over the rows of the block under it that nobody else has, and frees those that it hides.
 * Returns false if there is no memory for all. */
static bool absorb(struct kvs_segment_store *store, struct kvs_block *block)
{
    struct kvs_block *under = block->under;

    if (block->pass != under->pass)
        block->n_checked = 0;
    else if (block->n_checked > under->n_checked)
        block->n_checked = under->n_checked;
    for (uint32_t at = 0; under->n_own > 0; at++) {
        if (under->segments[at].rows == 0)
            continue;
        if (block->segments[at].rows != 0)
            kvs_segment_free(store, under, at);
        else if (!segment_move(store, under, block, at))
            return false;
    }
    block->under = under->under;
    under->under = NULL;
    kvs_block_unref(store, under);
    drop_hidden(store, block);
    return true;
}

void kvs_block_settle(struct kvs_segment_store *store, struct kvs_block *block)
{
    for (uint32_t n = 0; block->under != NULL && n < SETTLE_MOST; n++)
        if (block->under->refs > 1 || block->under->pins > 0 ||
            block->residency != KVS_IN_MEMORY || block->under->residency != KVS_IN_MEMORY)
            block = block->under; /* where one is absent, later */
        else if (!absorb(store, block))
            return;
}

/* Frees the block if nobody has it any more, and then those under it. */
static void free_unused(struct kvs_segment_store *store, struct kvs_block *block)
{
    while (block != NULL && block->refs == 0 && block->pins == 0) {
        struct kvs_block *under = block->under;

        if (block->residency != KVS_IN_MEMORY)
            kvs_block_forget(store, block);
        for (uint32_t at = 0; block->n_own > 0; at++)
            if (block->segments[at].rows != 0)
                kvs_segment_free(store, block, at);
        free_groups(store, block);
        record_put(store, block, block_bytes(block->n_segments));
        store->n_blocks--;
        if (under != NULL)
            under->refs--;
        block = under;
    }
}

void kvs_block_unref(struct kvs_segment_store *store, struct kvs_block *block)
{
    assert(block->refs > 0);
    block->refs--;
    free_unused(store, block);
}

void kvs_block_unpin(struct kvs_segment_store *store, struct kvs_block *block)
{
    assert(block->pins > 0);
    block->pins--;
    free_unused(store, block);
}

/* ---- checks ------------------------------------------------------------------------------- */

static void
check_segment(const struct kvs_segment_store *store, const struct kvs_block *block, uint32_t at)
{
    const struct kvs_segment *segment = &block->segments[at];
    const struct kvs_codes *codes = kvs_block_codes(block, at);

    assert(block->pins > 0 || (!segment->training && !segment->begins_job));
    if (kvs_segment_is_away(segment)) {
        assert(block->residency != KVS_IN_MEMORY);
        assert(block->residency != KVS_ABSENT || codes->column.bytes == NULL ||
               kvs_column_is_away(&codes->column));
    } else {
        const uint8_t *rows = kvs_block_rows(block, at);

        assert(block->residency != KVS_ABSENT && !kvs_column_is_away(&codes->column));
        assert(kvs_arena_is_in_use(store->arena, kvs_arena_class_of(store->arena, rows), rows));
        assert(kvs_arena_owner(store->arena, rows) == block ||
               kvs_arena_owner(store->arena, rows) == NULL);
        assert(kvs_block_group(block, at)->crcs != NULL);
    }
    assert(!segment->is_wanted ||
           (kvs_segment_is_away(segment) && block->residency == KVS_PARTLY));
    assert(segment->n_written <= KV_BLOCK_TOKENS);
    assert(codes->n_coded <= segment->n_written && codes->n_lost <= segment->n_written);
    assert(segment->has_bad == (*bad_find(store, block, at) != NULL));
    assert(!segment->has_bad || !segment->is_all_bad);
    for (uint32_t row = (uint32_t)segment->n_written; row < KV_BLOCK_TOKENS; row++)
        assert(segment->is_all_bad || !kvs_segment_is_bad(store, block, at, row));
    /* Codes are lost as a whole: a segment has good ones or lost ones, never both. */
    assert(codes->n_coded == 0 || codes->n_lost == 0);
    assert(codes->column.bytes != NULL || (codes->n_coded == 0 && codes->n_lost == 0));
    assert(kvs_column_is_in_use(&codes->column, store->arena));
    assert(!codes->in_chapter || codes->n_coded == KV_BLOCK_TOKENS);
    assert(!codes->lost_chapter || codes->n_lost == KV_BLOCK_TOKENS);
}

void kvs_block_check(const struct kvs_segment_store *store, const struct kvs_block *block)
{
    uint32_t n_own = 0;

    assert(block->refs > 0 || block->pins > 0);
    assert(block->under == NULL ||
           (block->under->refs > 0 && block->under->n_segments == block->n_segments));
    assert(block->n_checked <= KV_BLOCK_TOKENS);
    assert(block->residency <= KVS_PARTLY);
    assert(block->residency != KVS_ABSENT || block->pins == 0);
    for (uint32_t at = 0; at < block->n_segments; at++) {
        const struct kvs_segment_group *group = kvs_block_group(block, at);

        assert(group->crcs == NULL ||
               kvs_arena_is_in_use(store->arena, kvs_arena_class_of(store->arena, group->crcs),
                                   group->crcs));
        assert(group->codes == NULL ||
               kvs_arena_is_in_use(store->arena, codes_class(store, block, at), group->codes));
        if (block->segments[at].rows != 0) {
            check_segment(store, block, at);
            n_own++;
        } else {
            assert(kvs_block_codes(block, at)->column.bytes == NULL);
        }
    }
    assert(n_own == block->n_own);
    assert(block->under == NULL || n_own < block->n_segments);
}

/* What is free, by memory. */
struct free_count {
    const struct kvs_segment_store *store;
    uint64_t n;
};

static void count_free(void *arg, const void *record)
{
    struct free_count *count = arg;
    const uintptr_t at = (uintptr_t)record - (uintptr_t)kvs_arena_base(count->store->arena);

    assert(at < kvs_arena_bytes(count->store->arena));
    count->n++;
    assert(count->n <= kvs_arena_bytes(count->store->arena) / KVS_RECORD_STEP); /* no cycle */
}

void kvs_segment_store_check(const struct kvs_segment_store *store)
{
    uint64_t bytes = 0;
    struct free_count count = {.store = store};

    assert(store->n_leaving <= KVS_LEAVING_MAX && store->n_leaving <= store->n_away);
    assert(store->n_away <= store->n_blocks);
    for (uint32_t i = 0; i < store->n_leaving; i++) {
        assert(store->leaving[i].block->residency == KVS_LEAVING);
        for (uint32_t j = 0; j < i; j++)
            assert(store->leaving[i].block != store->leaving[j].block);
    }
    kvs_segment_store_visit_free(store, count_free, &count);
    for (size_t i = 0; i < sizeof(store->free_records) / sizeof(store->free_records[0]); i++)
        for (const struct kvs_record *record = store->free_records[i]; record != NULL;
             record = record->next)
            bytes += i * KVS_RECORD_STEP;
    assert(bytes + store->records_used == store->records_bytes);
}

uint64_t kvs_block_record_bytes(const struct kvs_block *block)
{
    const size_t bytes = record_step_up(block_bytes(block->n_segments));

    return bytes <= KVS_RECORD_MAX ? bytes : 0;
}

void kvs_segment_store_check_used(const struct kvs_segment_store *store,
                                  uint64_t of_blocks,
                                  uint64_t n_marked)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < KVS_BAD_LISTS; i++)
        for (const struct kvs_bad_rows *bad = store->bad[i]; bad != NULL; bad = bad->next) {
            n++;
            assert(n <= n_marked); /* no ring */
            assert(bad->block->segments[bad->at].has_bad);
        }
    assert(n == n_marked);
    assert(store->records_used == of_blocks + n * record_step_up(sizeof(struct kvs_bad_rows)));
}
