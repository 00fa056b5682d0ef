#include "kvserver/store/index/encode.h"

#include "kernels/checksum.h"
#include "kvserver/store/index/scorer.h"

#include <assert.h>
#include <string.h>

static_assert((int)KV_PQ_TILE == (int)KV_BLOCK_TOKENS, "the codes of a block are a tile");
static_assert((int)KV_PQ_SUBSPACES_MAX == (int)KV_SUBSPACES_MAX &&
                  (int)KV_PQ_BITS_MAX == (int)KV_CODE_BITS_MAX,
              "what a caller may ask for, the kernels can");

static uint32_t tile_crc(const struct kvs_codebooks *books, const struct kvs_column *column)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, column->codebook);

    return kv_crc32c(0, column->codes, book->scorer->codes_bytes(&book->shape));
}

bool kvs_segment_codes_are_good(const struct kvs_codebooks *books,
                                const struct kvs_column *column)
{
    return tile_crc(books, column) == column->crc;
}

/* Returns the column of a segment that has one. */
static struct kvs_column *
column_of(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at)
{
    struct kvs_column *column = kvs_block_column_make(books->store, block, at);

    assert(column != NULL && column->codes != NULL);
    return column;
}

static void lose_codes(struct kvs_codebooks *books, struct kvs_column *column)
{
    books->store->health.found[KVS_KIND_CODES]++;
    kvs_codebook_at(books, column->codebook)->n_holes += column->in_chapter;
    column->n_lost = column->n_coded;
    column->lost_chapter = column->in_chapter;
    column->n_coded = 0;
    column->in_chapter = false;
}

void kvs_segment_lose_codes(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at)
{
    lose_codes(books, column_of(books, block, at));
}

/* Encodes rows [n_coded, n_rows). */
static void encode(struct kvs_codebooks *books,
                   const uint8_t *rows,
                   struct kvs_column *column,
                   enum kv_key_type type,
                   uint32_t row_bytes,
                   uint32_t n_rows)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, column->codebook);
    const uint32_t at_once = KVS_CODEBOOK_KEYS / book->shape.d;
    float keys[KVS_CODEBOOK_KEYS];

    while (column->n_coded < n_rows) {
        uint32_t begin = column->n_coded;
        uint32_t n = n_rows - begin < at_once ? n_rows - begin : at_once;

        kv_exact_scores_load(type, rows + (size_t)begin * row_bytes, row_bytes, n,
                             book->shape.d, keys);
        book->scorer->encode(book, keys, begin, n, column->codes);
        column->n_coded = (uint8_t)(begin + n);
    }
    column->crc = tile_crc(books, column);
}

void kvs_segment_recode(struct kvs_codebooks *books,
                        struct kvs_block *block,
                        uint32_t at,
                        enum kv_key_type type,
                        uint32_t row_bytes)
{
    struct kvs_column *column = column_of(books, block, at);
    struct kvs_codebook *book = kvs_codebook_at(books, column->codebook);

    assert(column->n_coded == 0 && column->n_lost > 0);
    book->n_holes -= column->lost_chapter;
    memset(column->codes, 0, book->scorer->codes_bytes(&book->shape));
    encode(books, kvs_block_rows(block, at), column, type, row_bytes, column->n_lost);
    column->in_chapter = column->lost_chapter;
    column->n_lost = 0;
    column->lost_chapter = false;
    books->store->health.mended[KVS_KIND_CODES]++;
}

/* Gives a segment room for the codebook's codes. */
static kv_status_t begin_codes(struct kvs_codebooks *books,
                               struct kvs_block *block,
                               uint32_t at,
                               uint32_t codebook)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, codebook);
    struct kvs_column *column = kvs_block_column_make(books->store, block, at);
    uint8_t *codes =
        column == NULL ? NULL : kvs_arena_alloc(books->store->arena, book->tile_class);

    if (codes == NULL)
        return KV_NO_MEMORY;
    memset(codes, 0, book->scorer->codes_bytes(&book->shape));
    *column = (struct kvs_column){.codes = codes, .codebook = codebook};
    kvs_codebook_ref(books, codebook);
    return KV_OK;
}

kv_status_t kvs_segment_encode(struct kvs_codebooks *books,
                               struct kvs_block *block,
                               uint32_t at,
                               uint32_t codebook,
                               enum kv_key_type type,
                               uint32_t row_bytes,
                               uint32_t n_rows)
{
    struct kvs_column *column;

    assert(n_rows <= block->segments[at].n_written);
    if (kvs_block_column(block, at)->codes == NULL &&
        begin_codes(books, block, at, codebook) != KV_OK)
        return KV_NO_MEMORY;
    column = column_of(books, block, at);
    /* A new checksum would make bad codes look good. */
    if (column->n_coded < n_rows && column->n_coded > 0 &&
        !kvs_segment_codes_are_good(books, column))
        lose_codes(books, column);
    assert(column->codebook == codebook);
    if (column->n_lost > 0)
        return KV_CORRUPT;
    encode(books, kvs_block_rows(block, at), column, type, row_bytes, n_rows);
    return KV_OK;
}

uint32_t kvs_codebook_chapter_end(const struct kvs_codebook *book,
                                  const struct kvs_unit *unit,
                                  uint32_t at,
                                  uint32_t end)
{
    const uint32_t codebook = kvs_unit_column(unit, at)->codebook;

    if (book->n_holes > 0)
        return kvs_unit_chapter_end(unit, at, end);
    if (end > kvs_unit_n_segments(unit))
        end = kvs_unit_n_segments(unit);
    if (at >= end)
        return at;
    /* The end is in [at, end]; mostly the unit has them all. */
    for (uint32_t look = end - 1; at < end; look = at + (end - at) / 2) {
        const struct kvs_column *column = kvs_unit_column(unit, look);

        if (column->in_chapter && column->codebook == codebook)
            at = look + 1;
        else
            end = look;
    }
    return end;
}

void kvs_segment_drop_codes(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at)
{
    struct kvs_column *column = column_of(books, block, at);
    struct kvs_codebook *book = kvs_codebook_at(books, column->codebook);

    book->n_holes -= column->lost_chapter;
    kvs_arena_free(books->store->arena, book->tile_class, column->codes);
    kvs_codebook_unref(books, column->codebook);
    *column = kvs_no_column;
}
