#include "kvserver/store/index/encode.h"

#include "kernels/key_copies.h"
#include "kvserver/store/index/scorer.h"

#include <assert.h>
#include <string.h>

static_assert((int)KV_PQ_TILE == (int)KV_BLOCK_TOKENS, "the codes of a block are a tile");
static_assert((int)KV_PQ_SUBSPACES_MAX == (int)KV_SUBSPACES_MAX &&
                  (int)KV_PQ_BITS_MAX == (int)KV_CODE_BITS_MAX,
              "what a caller may ask for, the kernels can");

enum {
    COPIES_ALIGN = 64, /* a copy of 128 elements is one line of the cache */
};

/* Returns where copies begin, behind the codes. */
static size_t copies_at(const struct kvs_codebook *book)
{
    return (book->scorer->codes_bytes(&book->shape) + COPIES_ALIGN - 1) / COPIES_ALIGN *
           COPIES_ALIGN;
}

uint32_t kvs_codebook_codes_bytes(const struct kvs_codebook *book)
{
    return (uint32_t)(book->plan.copies ? copies_at(book) + kv_key_copies_bytes(book->shape.d)
                                        : book->scorer->codes_bytes(&book->shape));
}

const void *kvs_segment_copies(const struct kvs_codebook *book, const struct kvs_codes *codes)
{
    return book->plan.copies && codes->column.bytes != NULL
               ? (const uint8_t *)codes->column.bytes + copies_at(book)
               : NULL;
}

/* Returns the codes of a segment that has some. */
static struct kvs_codes *
codes_of(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at)
{
    struct kvs_codes *codes = kvs_block_codes_make(books->store, block, at);

    assert(codes != NULL && codes->column.bytes != NULL);
    return codes;
}

static void lose(struct kvs_codebooks *books, struct kvs_codes *codes)
{
    kvs_codebook_at(books, codes->codebook)->n_holes += codes->in_chapter;
    codes->n_lost = codes->n_coded;
    codes->lost_chapter = codes->in_chapter;
    codes->n_coded = 0;
    codes->in_chapter = false;
}

bool kvs_segment_check_codes(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at)
{
    struct kvs_codes *codes = codes_of(books, block, at);

    if (codes->n_coded == 0 || kvs_column_check(&codes->column, &books->store->health))
        return true;
    lose(books, codes);
    return false;
}

void kvs_segment_lose_codes(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at)
{
    struct kvs_codes *codes = codes_of(books, block, at);

    if (codes->n_coded > 0)
        lose(books, codes);
}

/* Encodes rows [n_coded, n_rows). */
static void encode(struct kvs_codebooks *books,
                   const uint8_t *rows,
                   struct kvs_codes *codes,
                   enum kv_key_type type,
                   uint32_t row_bytes,
                   uint32_t n_rows)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, codes->codebook);
    const uint32_t at_once = KVS_CODEBOOK_KEYS / book->shape.d;
    float keys[KVS_CODEBOOK_KEYS];

    while (codes->n_coded < n_rows) {
        uint32_t begin = codes->n_coded;
        uint32_t n = n_rows - begin < at_once ? n_rows - begin : at_once;

        kv_exact_scores_load(type, rows + (size_t)begin * row_bytes, row_bytes, n,
                             book->shape.d, keys);
        book->scorer->encode(book, keys, begin, n, codes->column.bytes);
        if (book->plan.copies)
            kv_key_copies_put(book->shape.d, kvs_codebook_mean(book), keys, begin, n,
                              (uint8_t *)codes->column.bytes + copies_at(book));
        codes->n_coded = (uint8_t)(begin + n);
    }
    kvs_column_seal(&codes->column);
}

void kvs_segment_recode(struct kvs_codebooks *books,
                        struct kvs_block *block,
                        uint32_t at,
                        enum kv_key_type type,
                        uint32_t row_bytes)
{
    struct kvs_codes *codes = codes_of(books, block, at);
    struct kvs_codebook *book = kvs_codebook_at(books, codes->codebook);

    assert(codes->n_coded == 0 && codes->n_lost > 0);
    book->n_holes -= codes->lost_chapter;
    memset(codes->column.bytes, 0, codes->column.n_bytes);
    encode(books, kvs_block_rows(block, at), codes, type, row_bytes, codes->n_lost);
    codes->in_chapter = codes->lost_chapter;
    codes->n_lost = 0;
    codes->lost_chapter = false;
    books->store->health.mended[KVS_KIND_CODES]++;
}

/* Gives a segment room for the codebook's codes. */
static kv_status_t begin_codes(struct kvs_codebooks *books,
                               struct kvs_block *block,
                               uint32_t at,
                               uint32_t codebook)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, codebook);
    struct kvs_codes *codes = kvs_block_codes_make(books->store, block, at);

    if (codes == NULL ||
        !kvs_column_create(&codes->column, books->store->arena, KVS_COLUMN_CODES,
                           book->tile_class, kvs_codebook_codes_bytes(book)))
        return KV_NO_MEMORY;
    memset(codes->column.bytes, 0, codes->column.n_bytes);
    codes->codebook = codebook;
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
    struct kvs_codes *codes;

    assert(n_rows <= block->segments[at].n_written);
    if (kvs_block_codes(block, at)->column.bytes == NULL &&
        begin_codes(books, block, at, codebook) != KV_OK)
        return KV_NO_MEMORY;
    codes = codes_of(books, block, at);
    /* A new checksum would make bad codes look good. */
    if (codes->n_coded < n_rows)
        (void)kvs_segment_check_codes(books, block, at);
    assert(codes->codebook == codebook);
    if (codes->n_lost > 0)
        return KV_CORRUPT;
    encode(books, kvs_block_rows(block, at), codes, type, row_bytes, n_rows);
    return KV_OK;
}

kv_status_t kvs_segment_set_codes(struct kvs_codebooks *books,
                                  struct kvs_block *block,
                                  uint32_t at,
                                  uint32_t codebook,
                                  const void *bytes)
{
    struct kvs_codes *codes;

    assert(block->segments[at].n_written == KV_BLOCK_TOKENS &&
           kvs_block_codes(block, at)->column.bytes == NULL);
    if (begin_codes(books, block, at, codebook) != KV_OK)
        return KV_NO_MEMORY;
    codes = codes_of(books, block, at);
    memcpy(codes->column.bytes, bytes, codes->column.n_bytes);
    kvs_column_seal(&codes->column);
    codes->n_coded = KV_BLOCK_TOKENS;
    codes->in_chapter = true;
    return KV_OK;
}

uint32_t kvs_codebook_chapter_end(const struct kvs_codebook *book,
                                  const struct kvs_unit *unit,
                                  uint32_t at,
                                  uint32_t end)
{
    const uint32_t codebook = kvs_unit_codes(unit, at)->codebook;

    if (book->n_holes > 0 || book->is_mixed || unit->blocks->is_mixed)
        return kvs_unit_chapter_end(unit, at, end);
    if (end > kvs_unit_n_segments(unit))
        end = kvs_unit_n_segments(unit);
    if (at >= end)
        return at;
    /* The end is in [at, end]; mostly the unit has them all. */
    for (uint32_t look = end - 1; at < end; look = at + (end - at) / 2) {
        const struct kvs_codes *codes = kvs_unit_codes(unit, look);

        if (codes->in_chapter && codes->codebook == codebook)
            at = look + 1;
        else
            end = look;
    }
    return end;
}

void kvs_segment_drop_codes(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at)
{
    struct kvs_codes *codes = codes_of(books, block, at);
    struct kvs_codebook *book = kvs_codebook_at(books, codes->codebook);

    book->n_holes -= codes->lost_chapter;
    kvs_column_drop(&codes->column, books->store->arena);
    kvs_codebook_unref(books, codes->codebook);
    *codes = kvs_no_codes;
}
