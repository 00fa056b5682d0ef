#include "kvserver/store/index/codebook.h"

#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/scorer.h"

#include <assert.h>
#include <string.h>

static void release_codes(void *arg, struct kvs_block *block, uint32_t at)
{
    kvs_segment_drop_codes(arg, block, at);
}

bool kvs_codebooks_init(struct kvs_codebooks *books, struct kvs_segment_store *store)
{
    books->store = store;
    store->release_codes = release_codes;
    store->release_arg = books;
    books->serial = books->rows_summarised = books->summaries_bytes = 0;
    books->pool = kv_pool_create(KVS_CODEBOOKS_MAX, sizeof(struct kvs_codebook));
    return books->pool != NULL;
}

void kvs_codebooks_fini(struct kvs_codebooks *books)
{
    kv_pool_destroy(books->pool);
    books->pool = NULL;
}

kv_status_t kvs_codebook_create(struct kvs_codebooks *books,
                                const struct kvs_index_plan *plan,
                                uint32_t *ret_codebook)
{
    const struct kv_pq_shape *shape = &plan->shape;
    const struct kvs_scorer_ops *scorer = kvs_scorer_at(plan->scorer);
    int class_id = kvs_arena_class_rounded(books->store->arena, scorer->codebook_bytes(shape));
    struct kvs_codebook *book;

    static_assert((int)KV_TILE_BYTES_MAX <= (int)KVS_ARENA_PAGE, "a tile has a class");
    if (class_id < 0)
        return KV_TOO_LARGE;
    book = kv_pool_get(books->pool);
    if (book == NULL)
        return KV_NO_MEMORY;
    float *centroids = kvs_arena_alloc(books->store->arena, class_id);
    if (centroids == NULL) {
        kv_pool_put(books->pool, book);
        return KV_NO_MEMORY;
    }
    *book = (struct kvs_codebook){
        .scorer = scorer,
        .serial = ++books->serial,
        .refs = 1,
        .shape = *shape,
        .plan = *plan,
        .centroids = centroids,
        .class_id = class_id,
        .tile_class = kvs_arena_class_hold(books->store->arena, scorer->codes_bytes(shape)),
    };
    *ret_codebook = kv_pool_index(books->pool, book);
    return KV_OK;
}

void kvs_codebook_ref(struct kvs_codebooks *books, uint32_t codebook)
{
    kvs_codebook_at(books, codebook)->refs++;
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

void kvs_codebook_seal(struct kvs_codebook *book)
{
    book->centroids_crc =
        kv_crc32c(0, book->centroids, book->scorer->codebook_bytes(&book->shape));
}

bool kvs_codebook_centroids_are_good(const struct kvs_codebook *book)
{
    return kv_crc32c(0, book->centroids, book->scorer->codebook_bytes(&book->shape)) ==
           book->centroids_crc;
}

static uint32_t cells_crc(const struct kvs_codebook *book)
{
    return kv_crc32c(0, book->cells, book->scorer->lists_bytes(&book->shape, book->n_celled));
}

bool kvs_codebook_cells_are_good(const struct kvs_codebook *book)
{
    return book->cells == NULL || cells_crc(book) == book->cells_crc;
}

void kvs_codebook_set_cells(struct kvs_codebooks *books,
                            uint32_t codebook,
                            uint32_t *cells,
                            int cells_class,
                            uint32_t n_celled)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    kvs_arena_free(books->store->arena, book->cells_class, book->cells);
    book->cells = cells;
    book->cells_class = cells_class;
    book->n_celled = n_celled;
    book->cells_crc = cells != NULL ? cells_crc(book) : 0;
}

bool kvs_codebook_verify_cells(struct kvs_codebooks *books, uint32_t codebook)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    if (book->n_cells_lost > 0 || kvs_codebook_cells_are_good(book))
        return true;
    books->store->health.found[KVS_KIND_CELLS]++;
    book->n_cells_lost = book->n_celled;
    return false;
}

bool kvs_codebook_verify_summaries(struct kvs_codebooks *books,
                                   uint32_t codebook,
                                   uint32_t group)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);
    const struct kvs_summaries *summaries = &book->summaries;

    if (kvs_summaries_are_good(summaries, group))
        return true;
    books->store->health.found[KVS_KIND_SUMMARIES]++;
    book->lost_plan = book->plan;
    book->lost_plan.d_v = summaries->shape.d_v;
    book->lost_plan.summaries_bits = summaries->shape.bits;
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
    kvs_codebook_set_cells(books, codebook, NULL, 0, 0);
    kvs_codebook_set_summaries(books, codebook, &(struct kvs_summaries){0});
    kvs_arena_free(books->store->arena, book->class_id, book->centroids);
    kvs_arena_class_release(books->store->arena, book->tile_class);
    kv_pool_put(books->pool, book);
}

uint32_t *kvs_codebook_alloc_cells(struct kvs_codebooks *books,
                                   const struct kvs_codebook *book,
                                   uint32_t *n_rows,
                                   int *ret_class)
{
    const struct kvs_scorer_ops *scorer = book->scorer;
    const uint32_t n_pay = scorer->items_pay(&book->shape);

    if (n_pay == 0)
        return NULL;
    const uint32_t most =
        (uint32_t)((KVS_ARENA_PAGE - scorer->lists_bytes(&book->shape, 0)) / sizeof(uint32_t));
    const uint32_t n = *n_rows < most ? *n_rows : most / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    if (n < n_pay)
        return NULL;
    int class_id =
        kvs_arena_class_rounded(books->store->arena, scorer->lists_bytes(&book->shape, n));
    uint32_t *cells = class_id < 0 ? NULL : kvs_arena_alloc(books->store->arena, class_id);
    if (cells == NULL)
        return NULL;
    memset(cells, 0, scorer->lists_bytes(&book->shape, 0));
    *n_rows = n;
    *ret_class = class_id;
    return cells;
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
    assert(kvs_arena_is_in_use(arena, book->class_id, book->centroids));
    assert((book->cells != NULL) == (book->n_celled > 0));
    assert(book->n_celled % KV_BLOCK_TOKENS == 0);
    assert(book->cells == NULL || kvs_arena_is_in_use(arena, book->cells_class, book->cells));
    assert(book->n_summaries_lost == 0 || book->summaries.n_rows == 0);
    kvs_summaries_check(&book->summaries, arena);
}

void kvs_codebooks_check(const struct kvs_codebooks *books)
{
    uint64_t n_rows = 0, n_bytes = 0;

    for (uint32_t i = 0; i < KVS_CODEBOOKS_MAX; i++) {
        if (!kv_pool_is_used(books->pool, i))
            continue;
        const struct kvs_codebook *book = kvs_codebook_at(books, i);

        check_codebook(books, book);
        n_rows += book->summaries.n_rows;
        n_bytes += kvs_summaries_bytes(&book->summaries);
    }
    assert(n_rows == books->rows_summarised && n_bytes == books->summaries_bytes);
}
