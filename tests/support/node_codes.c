#include "tests/support/node_codes.h"

#include "kvserver/store/index/encode.h"
#include "kvserver/store/node_private.h"
#include "kvserver/store/rows/residency.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    COPIES_GROUP = 32, /* rows whose copies lie together */
};

static void *room(size_t n, size_t bytes)
{
    void *memory = calloc(n > 0 ? n : 1, bytes);

    if (memory == NULL) {
        fprintf(stderr, "node codes: out of memory\n");
        abort();
    }
    return memory;
}

/* The code of a row in subspace j, as kernels/pq_tiles.h says that they lie. */
static uint32_t
code_at(const struct kv_pq_shape *shape, const uint8_t *tile, uint32_t row, uint32_t j)
{
    const uint32_t half = row / 64, at = row % 64;

    if (shape->bits <= 4)
        return tile[j * 64 + at] >> 4 * half & 15;
    if (shape->bits > 6)
        return tile[j * 128 + row];
    const uint8_t *pair = tile + j / 2 * 192;
    if (j == shape->m - 1 && j % 2 == 0)
        return pair[row];
    if (j % 2 == 0)
        return pair[64 * half + at] & 63;
    if (half == 0)
        return pair[128 + at] & 63;
    return pair[at] >> 6 | pair[64 + at] >> 6 << 2 | pair[128 + at] >> 6 << 4;
}

/* ---- codebooks --------------------------------------------------------------------------- */

/* What a centroid adds to a key, in the axes of keys. */
static void
part_of(const struct kvs_codebook *book, uint32_t j, uint32_t centroid, double *ret_part)
{
    const uint32_t d = book->shape.d, width = d / book->shape.m;
    const float *centroids = kvs_codebook_centroids(book),
                *rotation = kvs_codebook_rotation(book);
    double rotated[KV_ROTATION_DIM_MAX];

    for (uint32_t i = 0; rotation == NULL && i < d; i++)
        ret_part[i] = 0;
    for (uint32_t i = 0; i < width; i++)
        (rotation == NULL ? ret_part + (size_t)j * width : rotated)[i] =
            (double)centroids[((size_t)j * width + i) << book->shape.bits | centroid];
    for (uint32_t i = 0; rotation != NULL && i < d; i++) {
        const size_t stride = kv_rotation_size(d) / d;

        ret_part[i] = 0;
        for (uint32_t r = 0; r < width; r++)
            ret_part[i] += (double)rotation[i * stride + (size_t)j * width + r] * rotated[r];
    }
}

/* Adds a codebook.  Returns its number, from 1. */
static uint32_t add_book(struct oracle_rows *rows, const struct kvs_codebook *book)
{
    const uint32_t d = book->shape.d, n_centroids = 1u << book->shape.bits;
    struct oracle_book *books = realloc(rows->books, (rows->n_books + 1) * sizeof(*books));
    struct oracle_book *to = books + rows->n_books;

    if (books == NULL)
        abort();
    rows->books = books;
    *to = (struct oracle_book){.m = book->shape.m, .n_centroids = n_centroids};
    to->parts = room((size_t)to->m * n_centroids * d, sizeof(double));
    for (uint32_t j = 0; j < to->m; j++)
        for (uint32_t c = 0; c < n_centroids; c++)
            part_of(book, j, c, to->parts + ((size_t)j * n_centroids + c) * d);
    if (book->plan.copies) {
        to->mean = room(d, sizeof(double));
        for (uint32_t i = 0; i < d; i++)
            to->mean[i] = (double)kvs_codebook_mean(book)[i];
    }
    return ++rows->n_books;
}

/* ---- rows -------------------------------------------------------------------------------- */

static double half_value(const uint8_t *at)
{
    double value;
    uint16_t half;

    memcpy(&half, at, sizeof(half));
    oracle_load(KV_FP16, &half, 1, &value);
    return value;
}

/* What the copy of a block's row stands for, less the mean. */
static void read_copy(const uint8_t *copies, uint32_t d, uint32_t row, double *ret_key)
{
    const size_t h = ((d + 1) / 2 + 15) / 16 * 16;
    const uint8_t *group = copies + row / COPIES_GROUP * (COPIES_GROUP * (h + 2));
    const uint8_t *codes = group + row % COPIES_GROUP * h;
    const double scale =
        half_value(group + COPIES_GROUP * h + (size_t)2 * (row % COPIES_GROUP));

    for (uint32_t i = 0; i < d; i++) {
        const unsigned code = i < h ? codes[i] & 15u : codes[i - h] >> 4u;

        ret_key[i] = (2.0 * code - 15) * scale;
    }
}

static bool are_here(const struct kvs_unit *unit, uint32_t n_tokens)
{
    for (uint32_t i = 0; i < kvs_blocks_for(n_tokens); i++)
        if (!kvs_block_is_here(kvs_unit_block(unit, i)))
            return false;
    return true;
}

/* One row that has codes. */
static void code_of_row(const struct kvs_codebook *book,
                        const struct kvs_codes *codes,
                        struct oracle_rows *rows,
                        uint32_t i)
{
    const struct oracle_book *its = &rows->books[rows->books_of[i] - 1];
    const uint32_t row = rows->tokens[i] % KV_BLOCK_TOKENS, d = rows->d_k;
    double *key = rows->stands_for + (size_t)i * d;

    memset(key, 0, d * sizeof(*key));
    for (uint32_t j = 0; j < its->m; j++) {
        const uint32_t code = code_at(&book->shape, codes->column.bytes, row, j);
        const double *part = its->parts + ((size_t)j * its->n_centroids + code) * d;

        rows->codes[(size_t)i * KV_SUBSPACES_MAX + j] = (uint8_t)code;
        for (uint32_t e = 0; e < d; e++)
            key[e] += part[e];
    }
    rows->copied[i] = its->mean != NULL;
    if (its->mean != NULL)
        read_copy(kvs_segment_copies(book, codes), d, row, rows->copies + (size_t)i * d);
}

static void codes_of_unit(const struct kvs_shard *data,
                          const struct kvs_unit *unit,
                          struct oracle_rows *rows)
{
    uint32_t last = UINT32_MAX, number = 0;

    for (uint32_t i = 0; i < rows->n; i++) {
        const struct kvs_codes *codes = kvs_unit_codes(unit, rows->tokens[i] / KV_BLOCK_TOKENS);
        const bool has_some = codes->column.bytes != NULL && codes->n_coded > 0;

        if (has_some && codes->codebook != last) {
            last = codes->codebook;
            number = add_book(rows, kvs_codebook_at(&data->codebooks, last));
        }
        rows->books_of[i] = has_some ? number : 0;
        rows->coded[i] = has_some && rows->tokens[i] % KV_BLOCK_TOKENS < codes->n_coded;
        if (rows->coded[i])
            code_of_row(kvs_codebook_at(&data->codebooks, last), codes, rows, i);
    }
}

bool node_codes(struct kvs_node *node,
                const struct kv_id128 *session_token,
                uint32_t layer,
                uint32_t kv_head,
                struct oracle_rows *rows)
{
    const uint32_t n_tokens = rows->tokens[rows->n - 1] + 1;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kvs_shard *data = &node->shard[i];

        for (uint32_t j = 0; j < data->n_sessions; j++) {
            const struct kvs_shard_session *part = &data->sessions[j];
            const struct kvs_unit *unit;

            if (!part->used || memcmp(&part->token, session_token, sizeof(*session_token)) != 0)
                continue;
            unit = kvs_shard_session_unit(part, layer, kv_head);
            if (unit == NULL || unit->committed < n_tokens || !are_here(unit, n_tokens))
                continue;
            codes_of_unit(data, unit, rows);
            return true;
        }
    }
    return false;
}
