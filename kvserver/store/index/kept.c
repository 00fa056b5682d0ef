#include "kvserver/store/index/kept.h"

#include "kernels/checksum.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/learnt.h"

#include <string.h>

enum {
    BESIDE_BYTES = 128, /* what a tier has beside each column */
};

/* ---- identities, which are not 0 ---------------------------------------------------------- */

static uint32_t identity_of_codes(const struct kvs_codebook *book)
{
    const struct {
        uint32_t version, learnt, rotation;
    } of = {
        .version = kvs_column_version(KVS_COLUMN_CODES),
        .learnt = book->learnt.crc,
        .rotation = book->rotation != NULL ? book->rotation->matrix.crc : 0,
    };

    static_assert(sizeof(of) == 12, "no holes");
    return kv_crc32c(0, &of, sizeof(of)) | 1;
}

static uint32_t identity_of_summaries(const struct kvs_codebook *book,
                                      const struct kv_summary_shape *shape,
                                      uint32_t n_rows,
                                      uint64_t seed)
{
    const struct {
        uint64_t seed;
        uint32_t version, codes, block_begin, n_rows, type, d_k, d_v, bits, rows, zero;
    } of = {
        .seed = seed,
        .version = kvs_column_version(KVS_COLUMN_SUMMARIES),
        .codes = identity_of_codes(book),
        .block_begin = book->block_begin,
        .n_rows = n_rows,
        .type = shape->type,
        .d_k = (uint32_t)shape->d_k,
        .d_v = (uint32_t)shape->d_v,
        .bits = (uint32_t)shape->bits,
        .rows = shape->rows,
    };

    static_assert(sizeof(of) == 48, "no holes");
    return kv_crc32c(0, &of, sizeof(of)) | 1;
}

/* ---- giving ------------------------------------------------------------------------------- */

static bool fits(uint32_t n_columns, uint32_t n_bytes)
{
    return (uint64_t)n_columns * (n_bytes + BESIDE_BYTES) <= KVS_KEPT_BYTES_MAX;
}

static bool give_codes(const struct kvs_codebook *book,
                       const struct kvs_codes *codes,
                       struct kvs_kept_column *ret_column)
{
    /* More than that is not recalled. */
    if (codes->n_coded < KV_BLOCK_TOKENS || !fits(book->n_blocks, codes->column.n_bytes) ||
        kvs_column_is_away(&codes->column))
        return false;
    *ret_column = (struct kvs_kept_column){&codes->column, identity_of_codes(book),
                                           book->block_begin, book->n_blocks};
    return true;
}

static bool give_summaries(const struct kvs_codebook *book,
                           uint32_t number,
                           struct kvs_kept_column *ret_column)
{
    const struct kvs_summaries *summaries = &book->summaries;
    uint32_t end;

    if (number < book->block_begin || book->n_summaries_lost > 0)
        return false;
    end = (number - book->block_begin + 1) * KV_BLOCK_TOKENS;
    if (end > summaries->n_rows ||
        (end < summaries->n_rows && end % summaries->shape.rows != 0))
        return false;
    *ret_column = (struct kvs_kept_column){
        &summaries->groups[(end - 1) / summaries->shape.rows],
        identity_of_summaries(book, &summaries->shape, summaries->n_rows, summaries->seed),
        book->block_begin, book->n_blocks};
    return true;
}

bool kvs_kept_give(const struct kvs_codebooks *books,
                   enum kvs_column_kind kind,
                   const struct kvs_block *block,
                   uint32_t at,
                   uint32_t number,
                   struct kvs_kept_column *ret_column)
{
    const struct kvs_codes *codes = kvs_block_codes(block, at);
    const struct kvs_codebook *book;

    if (codes->column.bytes == NULL || !codes->in_chapter)
        return false;
    book = kvs_codebook_at(books, codes->codebook);
    if (!kvs_learnt_is_kept(book))
        return false;
    return kind == KVS_COLUMN_CODES       ? give_codes(book, codes, ret_column)
           : kind == KVS_COLUMN_SUMMARIES ? give_summaries(book, number, ret_column)
                                          : false;
}

bool kvs_kept_has_tier(const struct kvs_codebooks *books)
{
    return books->store->tier != NULL && books->store->tier->recall_columns != NULL;
}

bool kvs_kept_keep(const struct kvs_codebooks *books,
                   const struct kvs_block *block,
                   uint32_t at)
{
    return !kvs_kept_has_tier(books) ||
           books->store->tier->keep_columns(books->store->tier_arg, block, at);
}

/* ---- recalling ---------------------------------------------------------------------------- */

struct kvs_columns_asked kvs_kept_codes(const struct kvs_codebook *book,
                                        struct kvs_block *const *blocks,
                                        uint32_t n_blocks,
                                        uint32_t at)
{
    return (struct kvs_columns_asked){.kind = KVS_COLUMN_CODES,
                                      .blocks = blocks,
                                      .n_blocks = n_blocks,
                                      .per_column = 1,
                                      .at = at,
                                      .n_bytes = kvs_codebook_codes_bytes(book),
                                      .identity = identity_of_codes(book)};
}

struct kvs_columns_asked kvs_kept_summaries(const struct kvs_codebook *book,
                                            const struct kvs_index_plan *plan,
                                            uint32_t n_rows,
                                            struct kvs_block *const *blocks,
                                            uint32_t at)
{
    const struct kv_summary_shape shape = kvs_plan_summaries(plan);

    return (struct kvs_columns_asked){
        .kind = KVS_COLUMN_SUMMARIES,
        .blocks = blocks,
        .n_blocks = n_rows / KV_BLOCK_TOKENS,
        .per_column = shape.rows / KV_BLOCK_TOKENS,
        .at = at,
        .n_bytes = (uint32_t)kv_summary_bytes(&shape),
        .identity = identity_of_summaries(book, &shape, n_rows, plan->seed)};
}

kv_status_t kvs_kept_recall(const struct kvs_codebooks *books,
                            const struct kvs_columns_asked *asked)
{
    if (!kvs_kept_has_tier(books) || !fits(kvs_columns_asked_n(asked), asked->n_bytes))
        return KV_NOT_FOUND;
    return books->store->tier->recall_columns(books->store->tier_arg, asked);
}

struct kvs_columns_asked
kvs_kept_first(const struct kvs_codebook *book, struct kvs_block *const *block, uint32_t at)
{
    struct kvs_columns_asked asked = kvs_kept_codes(book, block, 1, at);

    asked.identity = 0;
    return asked;
}

bool kvs_kept_may_have(const struct kvs_codebooks *books,
                       const struct kvs_block *block,
                       uint32_t at)
{
    return kvs_kept_has_tier(books) &&
           books->store->tier->may_recall(books->store->tier_arg, block, at);
}

struct kvs_recalled kvs_kept_at(const struct kvs_codebooks *books, uint32_t i)
{
    return books->store->tier->recalled(books->store->tier_arg, i);
}
