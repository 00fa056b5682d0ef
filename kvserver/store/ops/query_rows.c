#include "kvserver/store/ops/query_rows.h"

#include "kvserver/store/index/encode.h"
#include "kvserver/store/ops/need_rows.h"
#include "kvserver/store/ops/query_parse.h"
#include "kvserver/store/query/estimate.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

void kvs_query_rows_begin(struct kvs_query_rows *rows, const struct kvs_request *request)
{
    rows->n_units = request->header.n_units;
    rows->n_words = (kvs_blocks_for(request->session->tokens_max) + 63) / 64;
    const size_t n = (size_t)rows->n_units * rows->n_words;
    if (n > rows->capacity) {
        free(rows->bits);
        rows->bits = malloc(n * sizeof(*rows->bits));
        rows->capacity = rows->bits != NULL ? n : 0;
    }
    rows->is_all = n > rows->capacity;
    if (!rows->is_all)
        memset(rows->bits, 0, n * sizeof(*rows->bits));
}

void kvs_query_rows_free(struct kvs_query_rows *rows)
{
    free(rows->bits);
    *rows = (struct kvs_query_rows){0};
}

static size_t bytes_of(const struct kvs_query_rows *rows)
{
    return sizeof(*rows) + (size_t)rows->n_units * rows->n_words * sizeof(*rows->bits);
}

void kvs_query_rows_keep(struct kvs_query_rows **kept,
                         const struct kvs_query_rows *rows,
                         size_t *n_bytes)
{
    const size_t n = (size_t)rows->n_units * rows->n_words, bytes = bytes_of(rows);

    if (*kept != NULL && !rows->is_all && bytes_of(*kept) == bytes) {
        for (size_t i = 0; i < n; i++)
            (*kept)->bits[i] |= rows->bits[i];
        return;
    }
    kvs_query_rows_drop(kept, n_bytes);
    if (rows->is_all || *n_bytes + bytes > KVS_QUERY_ROWS_KEPT)
        return;
    *kept = malloc(bytes);
    if (*kept == NULL)
        return;
    *n_bytes += bytes;
    **kept = (struct kvs_query_rows){
        .bits = (uint64_t *)(*kept + 1), .n_units = rows->n_units, .n_words = rows->n_words};
    memcpy((*kept)->bits, rows->bits, n * sizeof(*rows->bits));
}

void kvs_query_rows_drop(struct kvs_query_rows **kept, size_t *n_bytes)
{
    if (*kept != NULL)
        *n_bytes -= bytes_of(*kept);
    free(*kept);
    *kept = NULL;
}

/* Forks that are at work together may be of different lengths: what the first cannot have is needed as a
 * whole. */
static bool is_noted(const struct kvs_query_rows *rows, uint32_t unit, uint32_t block)
{
    return rows->is_all || block / 64 >= rows->n_words ||
           (rows->bits[(size_t)unit * rows->n_words + block / 64] >> block % 64 & 1) != 0;
}

bool kvs_query_rows_add(struct kvs_query_rows *rows,
                        const struct kvs_request *request,
                        uint32_t unit,
                        const uint32_t *tokens,
                        uint32_t n_tokens)
{
    const struct kvs_unit *of = kvs_unit_at(request, unit);
    struct kvs_segment_store *store = &request->shard->store;
    uint32_t last = UINT32_MAX;
    bool are_here = true;

    assert(rows->is_all || unit < rows->n_units);

    for (uint32_t i = 0; i < n_tokens; i++) {
        const uint32_t block = tokens[i] / KV_BLOCK_TOKENS;

        if (block == last)
            continue;
        last = block;
        if (!rows->is_all && block / 64 < rows->n_words)
            rows->bits[(size_t)unit * rows->n_words + block / 64] |= UINT64_C(1) << block % 64;
        kvs_segment_note_use(store, kvs_unit_block(of, block), of->at);
        are_here = are_here && kvs_unit_is_here(of, block);
    }
    return are_here;
}

/* Returns whether the query needs the block's rows: they are noted, have no codes in memory that may be
 * used, no copies for a first cut, or no summaries for an estimate.  Codes that are away come back with
 * their rows: alone they are as many reads, of which each takes nearly as long. */
static bool
needs(const struct kvs_request *request, const void *arg, uint32_t unit, uint32_t block)
{
    const struct kvs_query_rows *noted = arg;
    const struct kv_wire_query *query = kvs_query_of(request);
    const struct kvs_codebooks *books = &request->shard->codebooks;
    const struct kvs_unit *of = kvs_unit_at(request, unit);
    const struct kvs_codes *codes = kvs_unit_codes(of, block);

    if (noted != NULL && is_noted(noted, unit, block))
        return true;
    /* What is away was full. */
    if (kvs_segment_coded(books, codes, KV_BLOCK_TOKENS) < KV_BLOCK_TOKENS ||
        kvs_column_is_away(&codes->column) ||
        (query->first_cut != KV_CUT_NONE &&
         !kvs_codebook_at(books, codes->codebook)->plan.copies))
        return true;
    return query->summaries != 0 &&
           !kvs_estimate_has(books, of, block, kvs_summaries_bits(query->summaries),
                             kvs_summaries_rows(query->summary_blocks));
}

const struct kvs_segment *kvs_need_query(struct kvs_request *request,
                                         const struct kvs_query_rows *noted)
{
    return kvs_need_some(request, kvs_query_ranges(request), kvs_query_of(request)->n_ranges,
                         needs, noted);
}
