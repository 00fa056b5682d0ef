#include "kvserver/store/index/codebook.h"

#include "kvserver/store/index/encode.h"

#include <assert.h>
#include <string.h>

static void release_codes(void *arg, struct kv_segment *segment)
{
    kv_segment_drop_codes(arg, segment);
}

bool kv_codebooks_init(struct kv_codebooks *books, struct kv_heap *heap)
{
    books->heap = heap;
    heap->release_codes = release_codes;
    heap->release_arg = books;
    books->serial = books->rows_summarised = books->summaries_bytes = 0;
    books->pool = kv_pool_create(KV_CODEBOOKS_MAX, sizeof(struct kv_codebook));
    return books->pool != NULL;
}

void kv_codebooks_fini(struct kv_codebooks *books)
{
    kv_pool_destroy(books->pool);
    books->pool = NULL;
}

kv_status_t kv_codebook_create(struct kv_codebooks *books,
                               const struct kv_pq_shape *shape,
                               uint32_t *ret_codebook)
{
    const size_t n_floats = kv_pq_centroids_size(shape) + kv_pq_table_size(shape);
    int class_id = kv_arena_class_rounded(books->heap->arena, n_floats * sizeof(float));
    struct kv_codebook *book;

    static_assert((int)KV_TILE_BYTES_MAX <= (int)KV_ARENA_PAGE, "a tile has a class");
    if (class_id < 0)
        return KV_TOO_LARGE;
    book = kv_pool_get(books->pool);
    if (book == NULL)
        return KV_NO_MEMORY;
    float *centroids = kv_arena_alloc(books->heap->arena, class_id);
    if (centroids == NULL) {
        kv_pool_put(books->pool, book);
        return KV_NO_MEMORY;
    }
    *book = (struct kv_codebook){
        .serial = ++books->serial,
        .refs = 1,
        .shape = *shape,
        .centroids = centroids,
        .half_squares = centroids + kv_pq_centroids_size(shape),
        .class_id = class_id,
        .tile_class = kv_arena_class_hold(books->heap->arena, kv_tile_bytes(shape)),
    };
    *ret_codebook = kv_pool_index(books->pool, book);
    return KV_OK;
}

void kv_codebook_ref(struct kv_codebooks *books, uint32_t codebook)
{
    kv_codebook_at(books, codebook)->refs++;
}

void kv_codebook_set_summaries(struct kv_codebooks *books,
                               uint32_t codebook,
                               const struct kv_summaries *summaries)
{
    struct kv_codebook *book = kv_codebook_at(books, codebook);

    books->rows_summarised += (uint64_t)summaries->n_rows - book->summaries.n_rows;
    books->summaries_bytes +=
        kv_summaries_bytes(summaries) - kv_summaries_bytes(&book->summaries);
    kv_summaries_clear(&book->summaries, books->heap->arena);
    book->summaries = *summaries;
}

static size_t centroids_bytes(const struct kv_codebook *book)
{
    return (kv_pq_centroids_size(&book->shape) + kv_pq_table_size(&book->shape)) *
           sizeof(float);
}

void kv_codebook_seal(struct kv_codebook *book)
{
    book->centroids_crc = kv_crc32c(0, book->centroids, centroids_bytes(book));
}

bool kv_codebook_centroids_are_good(const struct kv_codebook *book)
{
    return kv_crc32c(0, book->centroids, centroids_bytes(book)) == book->centroids_crc;
}

static uint32_t cells_crc(const struct kv_codebook *book)
{
    return kv_crc32c(0, book->cells,
                     (kv_cells_head(&book->shape) + book->n_celled) * sizeof(*book->cells));
}

bool kv_codebook_cells_are_good(const struct kv_codebook *book)
{
    return book->cells == NULL || cells_crc(book) == book->cells_crc;
}

void kv_codebook_set_cells(struct kv_codebooks *books,
                           uint32_t codebook,
                           uint32_t *cells,
                           int cells_class,
                           uint32_t n_celled)
{
    struct kv_codebook *book = kv_codebook_at(books, codebook);

    kv_arena_free(books->heap->arena, book->cells_class, book->cells);
    book->cells = cells;
    book->cells_class = cells_class;
    book->n_celled = n_celled;
    book->cells_crc = cells != NULL ? cells_crc(book) : 0;
}

bool kv_codebook_verify_cells(struct kv_codebooks *books, uint32_t codebook)
{
    struct kv_codebook *book = kv_codebook_at(books, codebook);

    if (book->n_cells_lost > 0 || kv_codebook_cells_are_good(book))
        return true;
    books->heap->health.found[KV_KIND_CELLS]++;
    book->n_cells_lost = book->n_celled;
    return false;
}

bool kv_codebook_verify_summaries(struct kv_codebooks *books, uint32_t codebook, uint32_t group)
{
    struct kv_codebook *book = kv_codebook_at(books, codebook);
    const struct kv_summaries *summaries = &book->summaries;

    if (kv_summaries_are_good(summaries, group))
        return true;
    books->heap->health.found[KV_KIND_SUMMARIES]++;
    book->lost_plan = book->plan;
    book->lost_plan.d_v = summaries->shape.d_v;
    book->lost_plan.rest_bits = summaries->shape.bits;
    book->lost_plan.seed = summaries->seed;
    book->n_summaries_lost = summaries->n_rows;
    kv_codebook_set_summaries(books, codebook, &(struct kv_summaries){0});
    return false;
}

void kv_codebook_unref(struct kv_codebooks *books, uint32_t codebook)
{
    struct kv_codebook *book = kv_codebook_at(books, codebook);

    assert(book->refs > 0);
    if (--book->refs > 0)
        return;
    kv_codebook_set_cells(books, codebook, NULL, 0, 0);
    kv_codebook_set_summaries(books, codebook, &(struct kv_summaries){0});
    kv_arena_free(books->heap->arena, book->class_id, book->centroids);
    kv_arena_class_release(books->heap->arena, book->tile_class);
    kv_pool_put(books->pool, book);
}

uint32_t *kv_codebook_alloc_cells(struct kv_codebooks *books,
                                  const struct kv_codebook *book,
                                  uint32_t *n_rows,
                                  int *ret_class)
{
    const size_t head = kv_cells_head(&book->shape);
    const uint32_t most = (uint32_t)(KV_ARENA_PAGE / sizeof(uint32_t) - head);
    uint32_t n = *n_rows < most ? *n_rows : most / KV_PQ_TILE * KV_PQ_TILE;

    if (kv_cells_n(&book->shape) == 0 || n < kv_codebook_cells_pay(&book->shape))
        return NULL;
    int class_id = kv_arena_class_rounded(books->heap->arena, (head + n) * sizeof(uint32_t));
    uint32_t *cells = class_id < 0 ? NULL : kv_arena_alloc(books->heap->arena, class_id);
    if (cells == NULL)
        return NULL;
    memset(cells, 0, head * sizeof(*cells));
    *n_rows = n;
    *ret_class = class_id;
    return cells;
}
