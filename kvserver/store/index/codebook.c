#include "kvserver/store/index/codebook.h"

#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/kept.h"
#include "kvserver/store/index/learnt.h"
#include "kvserver/store/index/scorer.h"

#include <assert.h>
#include <string.h>

static void release_codes(void *arg, struct kvs_block *block, uint32_t at)
{
    kvs_segment_drop_codes(arg, block, at);
}

static void check_codes(void *arg, struct kvs_block *block, uint32_t at, bool have_come)
{
    if (have_come)
        (void)kvs_segment_check_codes(arg, block, at);
    else
        kvs_segment_lose_codes(arg, block, at);
}

static bool kept(void *arg,
                 enum kvs_column_kind kind,
                 const struct kvs_block *block,
                 uint32_t at,
                 uint32_t number,
                 struct kvs_kept_column *ret_column)
{
    return kvs_kept_give(arg, kind, block, at, number, ret_column);
}

static size_t
learnt(void *arg, const struct kvs_block *block, uint32_t at, uint32_t number, void *ret_bytes)
{
    return kvs_learnt_give(arg, block, at, number, ret_bytes);
}

bool kvs_codebooks_init(struct kvs_codebooks *books, struct kvs_segment_store *store)
{
    books->store = store;
    store->release_codes = release_codes;
    store->check_codes = check_codes;
    store->kept = kept;
    store->learnt = learnt;
    store->release_arg = books;
    books->serial = books->rows_summarised = books->summaries_bytes = 0;
    books->pool = kv_pool_create(KVS_CODEBOOKS_MAX, sizeof(struct kvs_codebook));
    books->rotations = kv_pool_create(KVS_CODEBOOKS_MAX, sizeof(struct kvs_rotation));
    return books->pool != NULL && books->rotations != NULL;
}

void kvs_codebooks_fini(struct kvs_codebooks *books)
{
    kv_pool_destroy(books->pool);
    kv_pool_destroy(books->rotations);
    books->pool = books->rotations = NULL;
}

kv_status_t kvs_codebook_create(struct kvs_codebooks *books,
                                const struct kvs_index_plan *plan,
                                uint32_t *ret_codebook)
{
    const struct kv_pq_shape *shape = &plan->shape;
    const struct kvs_scorer_ops *scorer = kvs_scorer_at(plan->scorer);
    const size_t n_bytes =
        scorer->codebook_bytes(shape) + (plan->copies ? shape->d * sizeof(float) : 0);
    const int class_id = kvs_arena_class_rounded(books->store->arena, n_bytes);
    struct kvs_column learnt;
    struct kvs_codebook *book;

    static_assert((int)KV_TILE_BYTES_MAX + KV_PQ_TILE * KVS_CODEBOOK_DIM_MAX <=
                      (int)KVS_ARENA_PAGE,
                  "codes and copies have a class");
    if (class_id < 0)
        return KV_TOO_LARGE;
    book = kv_pool_get(books->pool);
    if (book == NULL)
        return KV_NO_MEMORY;
    if (!kvs_column_create(&learnt, books->store->arena, KVS_COLUMN_CODEBOOK, class_id,
                           (uint32_t)n_bytes)) {
        kv_pool_put(books->pool, book);
        return KV_NO_MEMORY;
    }
    *book = (struct kvs_codebook){
        .scorer = scorer,
        .serial = ++books->serial,
        .refs = 1,
        .shape = *shape,
        .plan = *plan,
        .learnt = learnt,
    };
    book->tile_class =
        kvs_arena_class_hold(books->store->arena, kvs_codebook_codes_bytes(book));
    *ret_codebook = kv_pool_index(books->pool, book);
    return KV_OK;
}

void kvs_codebook_ref(struct kvs_codebooks *books, uint32_t codebook)
{
    kvs_codebook_at(books, codebook)->refs++;
}

void kvs_codebook_share_rotation(struct kvs_codebook *book, struct kvs_rotation *rotation)
{
    assert(book->rotation == NULL && rotation->d == book->shape.d);
    rotation->refs++;
    book->rotation = rotation;
}

struct kvs_rotation *kvs_codebook_make_rotation(struct kvs_codebooks *books,
                                                struct kvs_codebook *book)
{
    struct kvs_arena *arena = books->store->arena;
    const size_t n_bytes = kv_rotation_size(book->shape.d) * sizeof(float);
    struct kvs_rotation *rotation = kv_pool_get(books->rotations);

    static_assert(KV_ROTATION_DIM_MAX * KV_ROTATION_DIM_MAX * sizeof(float) <= KVS_ARENA_PAGE,
                  "a matrix has a class");
    if (rotation == NULL)
        return NULL;
    *rotation = (struct kvs_rotation){.d = book->shape.d};
    if (!kvs_column_create(&rotation->matrix, arena, KVS_COLUMN_CODEBOOK,
                           kvs_arena_class_rounded(arena, n_bytes), (uint32_t)n_bytes)) {
        kv_pool_put(books->rotations, rotation);
        return NULL;
    }
    kvs_codebook_share_rotation(book, rotation);
    return rotation;
}

static void drop_rotation(struct kvs_codebooks *books, struct kvs_rotation *rotation)
{
    if (rotation == NULL || --rotation->refs > 0)
        return;
    kvs_column_drop(&rotation->matrix, books->store->arena);
    kv_pool_put(books->rotations, rotation);
}

void kvs_codebook_set_summaries(struct kvs_codebooks *books,
                                uint32_t codebook,
                                const struct kvs_summaries *summaries)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    books->rows_summarised += (uint64_t)summaries->n_rows - book->summaries.n_rows;
    books->summaries_bytes +=
        kvs_summaries_bytes(summaries) - kvs_summaries_bytes(&book->summaries);
    kvs_summaries_clear(&book->summaries, books->store->arena);
    book->summaries = *summaries;
}

void kvs_codebook_set_lists(struct kvs_codebooks *books,
                            uint32_t codebook,
                            const struct kvs_column *lists,
                            uint32_t n_celled)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    kvs_column_drop(&book->lists, books->store->arena);
    book->lists = *lists;
    book->n_celled = n_celled;
}

bool kvs_codebook_verify_learnt(struct kvs_codebooks *books, uint32_t codebook)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    if (!book->is_broken &&
        (!kvs_column_check(&book->learnt, &books->store->health) ||
         (book->rotation != NULL &&
          !kvs_column_check(&book->rotation->matrix, &books->store->health))))
        book->is_broken = true;
    return !book->is_broken;
}

bool kvs_codebook_verify_cells(struct kvs_codebooks *books, uint32_t codebook)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    if (book->lists.bytes == NULL || book->n_cells_lost > 0 ||
        kvs_column_check(&book->lists, &books->store->health))
        return true;
    book->n_cells_lost = book->n_celled;
    return false;
}

bool kvs_codebook_verify_summaries(struct kvs_codebooks *books,
                                   uint32_t codebook,
                                   uint32_t group)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);
    const struct kvs_summaries *summaries = &book->summaries;

    if (kvs_column_check(&summaries->groups[group], &books->store->health))
        return true;
    book->lost_plan = book->plan;
    book->lost_plan.d_v = summaries->shape.d_v;
    book->lost_plan.summaries_bits = summaries->shape.bits;
    book->lost_plan.summaries_rows = summaries->shape.rows;
    book->lost_plan.seed = summaries->seed;
    book->n_summaries_lost = summaries->n_rows;
    kvs_codebook_set_summaries(books, codebook, &(struct kvs_summaries){0});
    return false;
}

void kvs_codebook_unref(struct kvs_codebooks *books, uint32_t codebook)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    assert(book->refs > 0);
    if (--book->refs > 0)
        return;
    kvs_codebook_set_lists(books, codebook, &(struct kvs_column){0}, 0);
    kvs_codebook_set_summaries(books, codebook, &(struct kvs_summaries){0});
    kvs_column_drop(&book->learnt, books->store->arena);
    drop_rotation(books, book->rotation);
    kvs_arena_class_release(books->store->arena, book->tile_class);
    kv_pool_put(books->pool, book);
}

bool kvs_codebook_alloc_lists(struct kvs_codebooks *books,
                              const struct kvs_codebook *book,
                              uint32_t *n_rows,
                              struct kvs_column *ret_lists)
{
    const struct kvs_scorer_ops *scorer = book->scorer;
    const uint32_t n_pay = scorer->items_pay(&book->shape);

    if (n_pay == 0)
        return false;
    const uint32_t most =
        (uint32_t)((KVS_ARENA_PAGE - scorer->lists_bytes(&book->shape, 0)) / sizeof(uint32_t));
    const uint32_t n = *n_rows < most ? *n_rows : most / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    if (n < n_pay)
        return false;
    const size_t n_bytes = scorer->lists_bytes(&book->shape, n);
    if (!kvs_column_create(ret_lists, books->store->arena, KVS_COLUMN_LISTS,
                           kvs_arena_class_rounded(books->store->arena, n_bytes),
                           (uint32_t)n_bytes))
        return false;
    memset(ret_lists->bytes, 0, scorer->lists_bytes(&book->shape, 0));
    *n_rows = n;
    return true;
}

/* Returns whether n_rows are all of the lost rows, or as many of them as any unit still has. */
static bool has_most(const struct kvs_codebook *book, uint32_t n_rows, uint32_t n_lost)
{
    const uint32_t n_left = book->n_most * KV_BLOCK_TOKENS;

    return n_lost > 0 && n_rows >= (n_left < n_lost ? n_left : n_lost);
}

bool kvs_codebook_can_mend_cells(const struct kvs_codebook *book, uint32_t n_rows)
{
    return has_most(book, n_rows, book->n_cells_lost) &&
           n_rows >= book->scorer->items_pay(&book->shape);
}

bool kvs_codebook_can_mend_summaries(const struct kvs_codebook *book, uint32_t n_rows)
{
    return has_most(book, n_rows, book->n_summaries_lost);
}

static void check_codebook(const struct kvs_codebooks *books, const struct kvs_codebook *book)
{
    const struct kvs_arena *arena = books->store->arena;

    assert(book->refs > 0 && book->serial > 0 && book->serial <= books->serial);
    assert(book->learnt.bytes != NULL && kvs_column_is_in_use(&book->learnt, arena));
    assert((book->lists.bytes != NULL) == (book->n_celled > 0));
    assert(book->n_celled % KV_BLOCK_TOKENS == 0);
    assert(kvs_column_is_in_use(&book->lists, arena));
    assert(book->n_summaries_lost == 0 || book->summaries.n_rows == 0);
    assert(
        book->rotation == NULL ||
        (book->plan.rotates && book->rotation->d == book->shape.d &&
         kv_pool_is_used(books->rotations, kv_pool_index(books->rotations, book->rotation)) &&
         kvs_column_is_in_use(&book->rotation->matrix, arena)));
    kvs_summaries_check(&book->summaries, arena);
}

void kvs_codebooks_check(const struct kvs_codebooks *books)
{
    uint64_t n_rows = 0, n_bytes = 0, n_rotated = 0, n_refs = 0;

    for (uint32_t i = 0; i < KVS_CODEBOOKS_MAX; i++) {
        if (!kv_pool_is_used(books->pool, i))
            continue;
        const struct kvs_codebook *book = kvs_codebook_at(books, i);

        check_codebook(books, book);
        n_rows += book->summaries.n_rows;
        n_bytes += kvs_summaries_bytes(&book->summaries);
        n_rotated += book->rotation != NULL;
    }
    for (uint32_t i = 0; i < KVS_CODEBOOKS_MAX; i++) {
        if (!kv_pool_is_used(books->rotations, i))
            continue;
        const struct kvs_rotation *rotation = kv_pool_at(books->rotations, i);

        assert(rotation->refs > 0);
        n_refs += rotation->refs;
    }
    assert(n_refs == n_rotated);
    assert(n_rows == books->rows_summarised && n_bytes == books->summaries_bytes);
}
