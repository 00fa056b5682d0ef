/* The writers of a session's rows: runs of tokens, each by one writer, in order, the last one
 * without an end.  A row's CRC is seeded with its writer, so a fork's rows and those of its
 * parent after the fork cannot be taken for each other. */
#include "kvserver/base/writers.h"

#include "kernels/checksum.h"
#include "proto/kv_wire.h"

#include <stdlib.h>
#include <string.h>

/* Returns the index of the run that has `token`. */
static uint32_t find_run(const struct kv_writers *writers, uint32_t token)
{
    uint32_t low = 0, high = writers->n_runs - 1;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (token < writers->runs[middle].end)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Returns how many runs are at least partly before `tokens`. */
static uint32_t count_before(const struct kv_writers *from, uint32_t tokens)
{
    return from != NULL && tokens > 0 ? find_run(from, tokens - 1) + 1 : 0;
}

uint32_t kv_writers_count(const struct kv_writers *from, uint32_t tokens, uint64_t writer)
{
    uint32_t n_kept = count_before(from, tokens);

    return n_kept > 0 && from->runs[n_kept - 1].writer == writer ? n_kept : n_kept + 1;
}

struct kv_writers *
kv_writers_create(const struct kv_writers *from, uint32_t tokens, uint64_t writer)
{
    uint32_t n_kept = count_before(from, tokens);
    uint32_t n_runs = kv_writers_count(from, tokens, writer);
    struct kv_writers *writers = malloc(sizeof(*writers) + n_runs * sizeof(writers->runs[0]));

    if (writers == NULL)
        return NULL;
    writers->n_runs = n_runs;
    /* If the same writer continues, kv_writers_count() has counted one run for both, and the
     * last line makes the run that was cut endless again. */
    if (n_kept > 0) {
        memcpy(writers->runs, from->runs, n_kept * sizeof(writers->runs[0]));
        writers->runs[n_kept - 1].end = tokens;
    }
    writers->runs[n_runs - 1] = (struct kv_writer_run){.writer = writer, .end = UINT32_MAX};
    return writers;
}

static uint32_t slice_runs(const struct kv_writers *writers, uint32_t begin, uint32_t end)
{
    return find_run(writers, end - 1) - find_run(writers, begin) + 1;
}

size_t kv_writers_slice_bytes(const struct kv_writers *writers, uint32_t begin, uint32_t end)
{
    return sizeof(*writers) + slice_runs(writers, begin, end) * sizeof(writers->runs[0]);
}

void kv_writers_slice(const struct kv_writers *writers,
                      uint32_t begin,
                      uint32_t end,
                      struct kv_writers *ret_slice)
{
    ret_slice->n_runs = slice_runs(writers, begin, end);
    memcpy(ret_slice->runs, &writers->runs[find_run(writers, begin)],
           ret_slice->n_runs * sizeof(writers->runs[0]));
}

uint32_t kv_writers_seed(const struct kv_writers *writers,
                         uint32_t layer,
                         uint32_t kv_head,
                         uint32_t token,
                         uint32_t *ret_begin,
                         uint32_t *ret_end)
{
    uint32_t at = find_run(writers, token);

    *ret_begin = at > 0 ? writers->runs[at - 1].end : 0;
    *ret_end = writers->runs[at].end;
    return kv_row_seed(writers->runs[at].writer, layer, kv_head, 0);
}

/* Iterates over rows of one unit, one writer at a time. */
struct stretch {
    size_t first, n_rows; /* of the rows given */
    uint32_t unit_seed;
    uint32_t token;         /* of the first */
    const uint32_t *tokens; /* from the first on, or NULL */
};

/* Advances to the next writer's rows.  Returns false at the end. */
static bool stretch_next(const struct kv_writers *writers,
                         uint32_t layer,
                         uint32_t kv_head,
                         size_t n_rows,
                         uint32_t token_begin,
                         const uint32_t *tokens,
                         struct stretch *stretch)
{
    size_t first = stretch->first + stretch->n_rows, end = first + 1;
    uint32_t token, run_begin, run_end;

    if (first >= n_rows)
        return false;
    token = tokens != NULL ? tokens[first] : token_begin + (uint32_t)first;
    stretch->unit_seed = kv_writers_seed(writers, layer, kv_head, token, &run_begin, &run_end);
    /* Most sessions have one writer.  With a list of tokens the run's end must be searched. */
    if (writers->n_runs == 1)
        end = n_rows;
    else if (tokens == NULL)
        end = run_end - token < n_rows - first ? first + (run_end - token) : n_rows;
    else
        while (end < n_rows && tokens[end] >= run_begin && tokens[end] < run_end)
            end++;
    stretch->first = first;
    stretch->n_rows = end - first;
    stretch->token = token;
    stretch->tokens = tokens != NULL ? tokens + first : NULL;
    return true;
}

void kv_writers_crc(const struct kv_writers *writers,
                    uint32_t layer,
                    uint32_t kv_head,
                    const void *rows,
                    size_t n_rows,
                    size_t row_bytes,
                    uint32_t token_begin,
                    const uint32_t *tokens,
                    uint32_t *ret_crcs)
{
    struct stretch at = {0};

    while (stretch_next(writers, layer, kv_head, n_rows, token_begin, tokens, &at))
        kv_rows_crc((const uint8_t *)rows + at.first * row_bytes, at.n_rows, row_bytes,
                    at.unit_seed, KV_ROW_SEED_STEP, at.token, at.tokens, ret_crcs + at.first);
}

size_t kv_writers_verify(const struct kv_writers *writers,
                         uint32_t layer,
                         uint32_t kv_head,
                         const void *rows,
                         size_t n_rows,
                         size_t row_bytes,
                         uint32_t token_begin,
                         const uint32_t *tokens,
                         const uint32_t *crcs)
{
    struct stretch at = {0};

    while (stretch_next(writers, layer, kv_head, n_rows, token_begin, tokens, &at)) {
        size_t bad = kv_rows_verify((const uint8_t *)rows + at.first * row_bytes, at.n_rows,
                                    row_bytes, at.unit_seed, KV_ROW_SEED_STEP, at.token,
                                    at.tokens, crcs + at.first);

        if (bad < at.n_rows)
            return at.first + bad;
    }
    return n_rows;
}

void kv_crc_batch_begin(struct kv_crc_batch *batch,
                        const struct kv_writers *writers,
                        uint32_t *ret_crcs)
{
    batch->writers = writers;
    batch->crcs = ret_crcs;
    batch->n = 0;
    batch->row_bytes = 0;
    batch->run_begin = batch->run_end = 0;
}

void kv_crc_batch_end(struct kv_crc_batch *batch)
{
    kv_rows_crc_list(batch->rows, batch->n, batch->row_bytes, batch->seeds, batch->crcs);
    batch->crcs += batch->n;
    batch->n = 0;
}

void kv_crc_batch_add(struct kv_crc_batch *batch,
                      uint32_t layer,
                      uint32_t kv_head,
                      const void *rows,
                      size_t n_rows,
                      size_t row_bytes,
                      uint32_t token_begin)
{
    const uint8_t *at = rows;

    /* The kernel takes rows of one size; their seeds, and so their units, may differ. */
    if (batch->n > 0 && row_bytes != batch->row_bytes)
        kv_crc_batch_end(batch);
    batch->row_bytes = row_bytes;
    for (uint32_t token = token_begin; token < token_begin + n_rows; token++, at += row_bytes) {
        if (token < batch->run_begin || token >= batch->run_end) {
            const uint32_t run = find_run(batch->writers, token);

            batch->writer = batch->writers->runs[run].writer;
            batch->run_begin = run > 0 ? batch->writers->runs[run - 1].end : 0;
            batch->run_end = batch->writers->runs[run].end;
        }
        batch->rows[batch->n] = at;
        batch->seeds[batch->n++] = kv_row_seed(batch->writer, layer, kv_head, token);
        if (batch->n == KV_CRC_BATCH)
            kv_crc_batch_end(batch);
    }
}
