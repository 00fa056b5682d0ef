#include "kvserver/store/index/encode.h"

#include "kernels/checksum.h"
#include "kvserver/store/index/scorer.h"

#include <assert.h>
#include <string.h>

static_assert((int)KV_PQ_TILE == (int)KV_BLOCK_TOKENS, "the codes of a block are a tile");
static_assert((int)KV_PQ_SUBSPACES_MAX == (int)KV_SUBSPACES_MAX &&
                  (int)KV_PQ_BITS_MAX == (int)KV_CODE_BITS_MAX,
              "what a caller may ask for, the kernels can");

static uint32_t tile_crc(const struct kvs_codebooks *books, const struct kvs_segment *segment)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, segment->codebook);

    return kv_crc32c(0, segment->codes, book->scorer->codes_bytes(&book->shape));
}

bool kvs_segment_codes_are_good(const struct kvs_codebooks *books,
                                const struct kvs_segment *segment)
{
    return tile_crc(books, segment) == segment->codes_crc;
}

void kvs_segment_lose_codes(struct kvs_codebooks *books, struct kvs_segment *segment)
{
    books->store->health.found[KVS_KIND_CODES]++;
    kvs_codebook_at(books, segment->codebook)->n_holes += segment->in_chapter;
    segment->n_lost = segment->n_coded;
    segment->lost_chapter = segment->in_chapter;
    segment->n_coded = 0;
    segment->in_chapter = false;
}

/* Encodes rows [n_coded, n_rows). */
static void encode(struct kvs_codebooks *books,
                   struct kvs_segment *segment,
                   enum kv_key_type type,
                   uint32_t row_bytes,
                   uint32_t n_rows)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, segment->codebook);
    const uint32_t at_once = KVS_CODEBOOK_KEYS / book->shape.d;
    float keys[KVS_CODEBOOK_KEYS];

    while (segment->n_coded < n_rows) {
        uint32_t begin = segment->n_coded;
        uint32_t n = n_rows - begin < at_once ? n_rows - begin : at_once;

        kv_exact_scores_load(type, segment->rows + (size_t)begin * row_bytes, row_bytes, n,
                             book->shape.d, keys);
        book->scorer->encode(book, keys, begin, n, segment->codes);
        segment->n_coded = (uint8_t)(begin + n);
    }
    segment->codes_crc = tile_crc(books, segment);
}

void kvs_segment_recode(struct kvs_codebooks *books,
                        struct kvs_segment *segment,
                        enum kv_key_type type,
                        uint32_t row_bytes)
{
    struct kvs_codebook *book = kvs_codebook_at(books, segment->codebook);

    assert(segment->n_coded == 0 && segment->n_lost > 0);
    book->n_holes -= segment->lost_chapter;
    memset(segment->codes, 0, book->scorer->codes_bytes(&book->shape));
    encode(books, segment, type, row_bytes, segment->n_lost);
    segment->in_chapter = segment->lost_chapter;
    segment->n_lost = 0;
    segment->lost_chapter = false;
    books->store->health.mended[KVS_KIND_CODES]++;
}

kv_status_t kvs_segment_encode(struct kvs_codebooks *books,
                               struct kvs_segment *segment,
                               uint32_t codebook,
                               enum kv_key_type type,
                               uint32_t row_bytes,
                               uint32_t n_rows)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    assert(n_rows <= segment->n_written);
    if (segment->codes == NULL) {
        segment->codes = kvs_arena_alloc(books->store->arena, book->tile_class);
        if (segment->codes == NULL)
            return KV_NO_MEMORY;
        memset(segment->codes, 0, book->scorer->codes_bytes(&book->shape));
        segment->codebook = codebook;
        segment->n_coded = 0;
        kvs_codebook_ref(books, codebook);
    } else if (segment->n_coded < n_rows && segment->n_coded > 0 &&
               !kvs_segment_codes_are_good(books, segment)) {
        /* A new checksum would make bad codes look good. */
        kvs_segment_lose_codes(books, segment);
    }
    assert(segment->codebook == codebook);
    if (segment->n_lost > 0)
        return KV_CORRUPT;
    encode(books, segment, type, row_bytes, n_rows);
    return KV_OK;
}

uint32_t kvs_codebook_chapter_end(const struct kvs_codebook *book,
                                  const struct kvs_unit *unit,
                                  uint32_t at,
                                  uint32_t end)
{
    const uint32_t codebook = unit->segments[at]->codebook;

    if (book->n_holes > 0)
        return kvs_unit_chapter_end(unit, at, end);
    end = end < unit->n_segments ? end : unit->n_segments;
    if (at >= end)
        return at;
    /* The end is in [at, end]; mostly the unit has them all. */
    for (uint32_t look = end - 1; at < end; look = at + (end - at) / 2) {
        const struct kvs_segment *segment = unit->segments[look];

        if (segment->in_chapter && segment->codebook == codebook)
            at = look + 1;
        else
            end = look;
    }
    return end;
}

void kvs_segment_drop_codes(struct kvs_codebooks *books, struct kvs_segment *segment)
{
    struct kvs_codebook *book = kvs_codebook_at(books, segment->codebook);

    book->n_holes -= segment->lost_chapter;
    kvs_arena_free(books->store->arena, book->tile_class, segment->codes);
    kvs_codebook_unref(books, segment->codebook);
    segment->codes = NULL;
    segment->n_coded = segment->n_lost = 0;
    segment->in_chapter = segment->lost_chapter = false;
}
