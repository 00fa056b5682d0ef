#include "kvserver/store/rows/residency.h"

#include "kernels/checksum.h"
#include "kvserver/store/rows/arena.h"

#include <assert.h>
#include <string.h>

enum {
    CLASS_SHIFT = 32, /* in the word of a segment that is away: over its fingerprint */
    CRCS_BYTES = KV_BLOCK_TOKENS * sizeof(uint32_t),
};

/* In that word: no fingerprint is known. */
#define NO_FINGERPRINT (KVS_ROWS_AWAY >> 1)

static_assert((uint64_t)KVS_ARENA_CLASSES_MAX << CLASS_SHIFT <= NO_FINGERPRINT,
              "the word of a segment that is away has its class");
static_assert(KVS_ARENA_CLASSES_MAX <= UINT8_MAX, "a column has its class");

/* ---- the word in place of an address ------------------------------------------------------ */

/* Of all bytes: those that no row has are the same when they come back, too. */
static uint32_t fingerprint(const void *rows, size_t rows_bytes, const uint32_t *crcs)
{
    return kv_crc32c(kv_crc32c(0, rows, rows_bytes), crcs, CRCS_BYTES);
}

static int class_of_word(uint64_t word)
{
    return (int)((word & ~(KVS_ROWS_AWAY | NO_FINGERPRINT)) >> CLASS_SHIFT);
}

size_t kvs_segment_away_bytes(const struct kvs_segment_store *store,
                              const struct kvs_segment *segment)
{
    assert(kvs_segment_is_away(segment));
    return kvs_arena_class_bytes(store->arena, class_of_word(segment->rows));
}

void kvs_segment_away_release(struct kvs_segment_store *store,
                              const struct kvs_segment *segment)
{
    kvs_arena_class_release(store->arena, class_of_word(segment->rows));
}

/* ---- leaving ------------------------------------------------------------------------------ */

void kvs_residency_set_tier(struct kvs_segment_store *store,
                            const struct kvs_tier *tier,
                            void *arg)
{
    assert(store->n_away == 0);
    store->tier = tier;
    store->tier_arg = arg;
}

kv_status_t kvs_block_leave(struct kvs_segment_store *store, struct kvs_block *block)
{
    if (store->tier == NULL || block->residency == KVS_ABSENT ||
        block->residency == KVS_LEAVING || block->pins > 0 ||
        store->n_leaving == KVS_LEAVING_MAX)
        return KV_BUSY;
    store->n_away += block->residency == KVS_IN_MEMORY;
    block->residency = KVS_LEAVING;
    store->leaving[store->n_leaving++] = (struct kvs_leaving){block, store->turn};
    return KV_OK;
}

bool kvs_block_is_here(const struct kvs_block *block)
{
    for (uint32_t at = 0; block->residency != KVS_IN_MEMORY && at < block->n_segments; at++)
        if (!kvs_segment_is_here(block, at))
            return false;
    return true;
}

/* Takes the block off the list of those that leave. */
static void stop_leaving(struct kvs_segment_store *store, struct kvs_block *block)
{
    uint32_t i = 0;

    while (store->leaving[i].block != block)
        i++;
    store->leaving[i] = store->leaving[--store->n_leaving];
}

void kvs_block_stay(struct kvs_segment_store *store, struct kvs_block *block)
{
    stop_leaving(store, block);
    block->residency = kvs_block_is_here(block) ? KVS_IN_MEMORY : KVS_PARTLY;
    store->n_away -= block->residency == KVS_IN_MEMORY;
}

bool kvs_block_image(const struct kvs_segment_store *store,
                     const struct kvs_block *block,
                     uint32_t at,
                     struct kvs_segment_image *ret_image)
{
    const struct kvs_column *column = &kvs_block_codes(block, at)->column;

    if (block->segments[at].rows == 0 || kvs_segment_is_away(&block->segments[at]))
        return false;
    const int class_id = kvs_arena_class_of(store->arena, kvs_block_rows(block, at));
    *ret_image = (struct kvs_segment_image){
        .rows = kvs_block_rows(block, at),
        .rows_bytes = kvs_arena_class_bytes(store->arena, class_id),
        .crcs = kvs_block_crcs(block, at),
        .codes = column->bytes,
        .codes_bytes = column->n_bytes,
    };
    return true;
}

/* Frees the segment's rows, if they are in memory.  Returns how many bytes that are. */
static size_t rows_leave(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    struct kvs_segment_image image;

    if (!kvs_block_image(store, block, at, &image))
        return 0;
    uint8_t *rows = kvs_block_rows(block, at);
    /* It has no element that keeps the class's size, and its units may be cleared before it. */
    const int class_id = kvs_arena_class_hold(store->arena, image.rows_bytes);

    assert(class_id == kvs_arena_class_of(store->arena, rows));
    block->segments[at].rows = KVS_ROWS_AWAY | (uint64_t)class_id << CLASS_SHIFT |
                               fingerprint(rows, image.rows_bytes, image.crcs);
    kvs_arena_unuse(store->arena, KVS_USE_ROWS, rows);
    kvs_arena_free(store->arena, class_id, rows);
    return image.rows_bytes;
}

static void codes_leave(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    const struct kvs_column *column = &kvs_block_codes(block, at)->column;

    if (column->bytes != NULL && !kvs_column_is_away(column))
        kvs_column_leave(&kvs_block_codes_make(store, block, at)->column, store->arena);
}

/* Frees the CRCs of a segment's group if all of its rows are away: they come back with the first. */
static void crcs_leave(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    const uint32_t begin = at / KVS_GROUP_SEGMENTS * KVS_GROUP_SEGMENTS;

    for (uint32_t i = begin; i < block->n_segments && i < begin + KVS_GROUP_SEGMENTS; i++)
        if (block->segments[i].rows != 0 && !kvs_segment_is_away(&block->segments[i]))
            return;
    kvs_group_crcs_free(store, block, at);
}

/* Whether somebody has the block pinned who may use that segment: a transfer, the disk, or a job that
 * gives it codes; jobs of other segments do not. */
static bool is_pinned(const struct kvs_block *block, uint32_t at)
{
    uint32_t n_others = 0;

    if (block->pins == 0 || block->segments[at].training || block->segments[at].begins_job)
        return block->pins > 0;
    for (uint32_t i = 0; i < block->n_segments; i++)
        n_others += block->segments[i].training;
    return block->pins != n_others;
}

bool kvs_block_move_rows(struct kvs_segment_store *store,
                         struct kvs_block *block,
                         const void *rows,
                         int32_t page)
{
    uint32_t at = 0;

    while (at < block->n_segments && block->segments[at].rows != (uintptr_t)rows)
        at++;
    assert(at < block->n_segments);
    if (is_pinned(block, at) || store->n_at_unit[at % KVS_WORK_UNITS] > 0)
        return false;
    uint8_t *from = kvs_block_rows(block, at);
    const int class_id = kvs_arena_class_of(store->arena, from);
    uint8_t *to = kvs_arena_alloc_outside(store->arena, class_id, page);

    if (to == NULL)
        return false;
    memcpy(to, from, kvs_arena_class_bytes(store->arena, class_id));
    block->segments[at].rows = (uintptr_t)to;
    kvs_arena_use(store->arena, KVS_USE_ROWS, to);
    kvs_arena_set_owner(store->arena, to, block);
    kvs_arena_unuse(store->arena, KVS_USE_ROWS, from);
    kvs_arena_free(store->arena, class_id, from);
    return true;
}

/* A block that lies over another is only this thread's way to say whose rows are whose: it leaves once
 * it has settled. */
size_t kvs_segment_let_go(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    const struct kvs_segment *segment = &block->segments[at];
    size_t bytes;

    if ((block->residency != KVS_IN_MEMORY && block->residency != KVS_PARTLY) ||
        is_pinned(block, at) || block->under != NULL || segment->n_written < KV_BLOCK_TOKENS ||
        kvs_segment_has_bad(block, at) || store->n_at_unit[at % KVS_WORK_UNITS] > 0)
        return 0;
    bytes = rows_leave(store, block, at);
    if (bytes > 0)
        crcs_leave(store, block, at);
    if (bytes > 0 && block->residency == KVS_IN_MEMORY) {
        block->residency = KVS_PARTLY;
        store->n_away++;
    }
    return bytes;
}

static void block_go(struct kvs_segment_store *store, struct kvs_block *block)
{
    if (block->pins > 0 || !store->tier->keep(store->tier_arg, block)) {
        kvs_block_stay(store, block);
        return;
    }
    stop_leaving(store, block);
    for (uint32_t at = 0; at < block->n_segments; at++) {
        (void)rows_leave(store, block, at);
        codes_leave(store, block, at);
    }
    kvs_block_crcs_free(store, block);
    block->residency = KVS_ABSENT;
}

/* A turn ends when all have ended that began in the one before: those who began in a block's turn,
 * or earlier, have ended two turns later. */
bool kvs_residency_step(struct kvs_segment_store *store)
{
    if (store->n_leaving == 0)
        return false;
    if (store->n_at_work[(store->turn + 1) % 2] == 0)
        store->turn++;
    for (uint32_t i = 0; i < store->n_leaving; i++)
        if (store->turn - store->leaving[i].turn >= 2) {
            block_go(store, store->leaving[i].block);
            break;
        }
    return true;
}

/* Counts one more at each of the units, or one less. */
static void
count_units(struct kvs_segment_store *store, const struct kvs_work *work, uint32_t by)
{
    for (uint32_t i = 0; i < KVS_WORK_UNITS / 64; i++)
        for (uint64_t left = work->units[i]; left != 0; left &= left - 1)
            store->n_at_unit[i * 64 + (uint32_t)__builtin_ctzll(left)] += by;
}

void kvs_work_begin(struct kvs_segment_store *store, struct kvs_work *work)
{
    assert(work->turn == 0);
    store->n_at_work[store->turn % 2]++;
    work->turn = (uint8_t)(1 + store->turn % 2);
    count_units(store, work, 1);
}

void kvs_work_end(struct kvs_segment_store *store, struct kvs_work *work)
{
    assert(work->turn > 0 && store->n_at_work[work->turn - 1] > 0);
    store->n_at_work[work->turn - 1]--;
    count_units(store, work, UINT32_MAX);
    *work = (struct kvs_work){0};
}

/* ---- coming back -------------------------------------------------------------------------- */

bool kvs_block_need(struct kvs_segment_store *store, struct kvs_block *block)
{
    if (block->residency == KVS_LEAVING)
        kvs_block_stay(store, block);
    if (block->residency == KVS_IN_MEMORY)
        return true;
    /* Who has want() may have given it up meanwhile. */
    if (block->residency == KVS_ABSENT || store->tier->want != NULL) {
        block->residency = KVS_PARTLY;
        store->tier->load(store->tier_arg, block);
    }
    return false;
}

bool kvs_segment_need(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    struct kvs_segment *segment = &block->segments[at];

    if (block->residency == KVS_LEAVING)
        kvs_block_stay(store, block);
    if (!kvs_segment_is_away(segment))
        return true;
    if (segment->is_wanted)
        return false;
    if (store->tier->want == NULL)
        (void)kvs_block_need(store, block);
    block->residency = KVS_PARTLY;
    segment->is_wanted = true;
    if (store->tier->want != NULL)
        store->tier->want(store->tier_arg, block, at);
    return false;
}

void kvs_block_need_columns(struct kvs_segment_store *store, struct kvs_block *block)
{
    if (block->residency == KVS_LEAVING)
        kvs_block_stay(store, block);
    /* Who has load() only brings blocks back as a whole. */
    if (block->residency == KVS_ABSENT && store->tier->want != NULL)
        block->residency = KVS_PARTLY;
}

static void tell_arrived(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    block->segments[at].is_wanted = false;
    if (store->arrived != NULL)
        store->arrived(store->arrived_arg, &block->segments[at]);
}

void kvs_segment_give_up(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    tell_arrived(store, block, at);
}

/* Whether the image has the codes that the block had. */
static bool
has_codes_of(const struct kvs_segment_image *image, const struct kvs_block *block, uint32_t at)
{
    return image != NULL && image->codes != NULL &&
           image->codes_bytes == kvs_block_codes(block, at)->column.n_bytes;
}

bool kvs_block_restore(struct kvs_segment_store *store,
                       struct kvs_block *block,
                       uint32_t at,
                       const struct kvs_segment_image *image)
{
    const uint64_t word = block->segments[at].rows;
    const int class_id = class_of_word(word);
    const bool has_codes = kvs_column_is_away(&kvs_block_codes(block, at)->column);
    const bool have_come = has_codes && has_codes_of(image, block, at);

    assert(block->residency == KVS_PARTLY);
    if (!kvs_segment_is_away(&block->segments[at]))
        return true;
    const size_t rows_bytes = kvs_arena_class_bytes(store->arena, class_id);
    const bool is_good = image != NULL && image->rows_bytes == rows_bytes &&
                         ((word & NO_FINGERPRINT) != 0 ||
                          fingerprint(image->rows, rows_bytes, image->crcs) == (uint32_t)word);
    uint8_t *rows = kvs_arena_alloc(store->arena, class_id);
    if (rows == NULL)
        return false;
    if (!kvs_block_crcs_make(store, block, at) ||
        (has_codes && !kvs_column_return(&kvs_block_codes_make(store, block, at)->column,
                                         store->arena, have_come ? image->codes : NULL))) {
        kvs_arena_free(store->arena, class_id, rows);
        return false;
    }
    /* What was damaged is put back as far as it goes: if it is put again, one of the two may
     * still be right, the row or its CRC. */
    const size_t n_good = image == NULL                    ? 0
                          : image->rows_bytes < rows_bytes ? image->rows_bytes
                                                           : rows_bytes;
    memset(rows + n_good, 0, rows_bytes - n_good);
    kvs_segment_away_release(store, &block->segments[at]);
    block->segments[at].rows = (uintptr_t)rows;
    kvs_segment_note_use(store, block, at);
    kvs_arena_use(store->arena, KVS_USE_ROWS, rows);
    kvs_arena_set_owner(store->arena, rows, block);
    if (image != NULL) {
        memcpy(rows, image->rows, n_good);
        memcpy(kvs_block_crcs(block, at), image->crcs, CRCS_BYTES);
    } else {
        memset(kvs_block_crcs(block, at), 0, CRCS_BYTES);
    }
    if (!is_good)
        kvs_segment_mark_all_bad(store, block, at);
    if (has_codes)
        store->check_codes(store->release_arg, block, at, have_come);
    tell_arrived(store, block, at);
    return true;
}

/* Gives the segment a word in place of rows.  Returns false if no class holds so many bytes. */
static bool add_away(struct kvs_segment_store *store,
                     struct kvs_block *block,
                     uint32_t at,
                     uint32_t row_bytes)
{
    const int class_id =
        kvs_arena_class_hold(store->arena, (size_t)row_bytes * KV_BLOCK_TOKENS);

    if (class_id < 0)
        return false;
    block->segments[at].rows =
        KVS_ROWS_AWAY | NO_FINGERPRINT | (uint64_t)class_id << CLASS_SHIFT;
    block->segments[at].n_written = KV_BLOCK_TOKENS;
    block->n_own++;
    store->n_segments++;
    return true;
}

struct kvs_block *kvs_block_create_absent(struct kvs_segment_store *store,
                                          const uint32_t *row_bytes,
                                          uint32_t n_segments)
{
    struct kvs_block *block = kvs_block_create(store, n_segments, NULL);
    bool is_good = block != NULL;

    for (uint32_t at = 0; at < n_segments && is_good; at++)
        is_good = add_away(store, block, at, row_bytes[at]);
    if (is_good) {
        block->residency = KVS_ABSENT;
        store->n_away++;
    } else if (block != NULL) {
        for (uint32_t at = 0; block->n_own > 0; at++)
            kvs_segment_free(store, block, at);
        kvs_block_unref(store, block);
    }
    return is_good ? block : NULL;
}

void kvs_block_restored(struct kvs_segment_store *store, struct kvs_block *block)
{
    if (block->residency != KVS_PARTLY || !kvs_block_is_here(block))
        return;
    block->residency = KVS_IN_MEMORY;
    store->n_away--;
}

void kvs_block_forget(struct kvs_segment_store *store, struct kvs_block *block)
{
    if (block->residency == KVS_LEAVING)
        kvs_block_stay(store, block);
    if (block->residency == KVS_IN_MEMORY)
        return;
    store->n_away--;
    store->tier->forget(store->tier_arg, block);
    for (uint32_t at = 0; at < block->n_segments; at++)
        if (block->segments[at].is_wanted)
            tell_arrived(store, block, at);
}
