/* Verifies stored rows, in batches that the checksum kernel computes several at a time, and
 * marks those that are bad. */
#include "kvserver/store/rows/verify.h"

#include "kernels/checksum.h"
#include "proto/kv_wire.h"

enum {
    SOME_ROWS = 256, /* rows per batch */
};

/* A cache of seeds: consecutive tokens mostly have the same writer. */
struct seeds {
    const struct kvs_row_set *rows;
    uint32_t unit_seed, begin, end; /* for these tokens */
};

static uint32_t seed_of(struct seeds *seeds, uint32_t token)
{
    const struct kvs_row_set *rows = seeds->rows;

    if (token < seeds->begin || token >= seeds->end) {
        if (rows->writers != NULL) {
            seeds->unit_seed = kv_writers_seed(rows->writers, rows->layer, rows->kv_head, token,
                                               &seeds->begin, &seeds->end);
        } else {
            seeds->unit_seed = kv_row_seed(0, rows->layer, rows->kv_head, 0);
            seeds->begin = 0;
            seeds->end = UINT32_MAX;
        }
    }
    return seeds->unit_seed + token * KV_ROW_SEED_STEP;
}

void kvs_verify_seeds(const struct kvs_row_set *rows,
                      const uint32_t *tokens,
                      uint32_t n,
                      uint32_t *ret_seeds)
{
    struct seeds seeds = {.rows = rows};

    for (uint32_t i = 0; i < n; i++)
        ret_seeds[i] = seed_of(&seeds, tokens[i]);
}

/* Returns the block that has a row. */
static struct kvs_block *block_of(const struct kvs_row_set *rows, uint32_t token)
{
    return kvs_block_owner(rows->blocks[token / KV_BLOCK_TOKENS - rows->block], rows->at);
}

uint32_t kvs_verify_crcs(struct kvs_segment_store *store,
                         const struct kvs_row_set *rows,
                         const uint32_t *tokens,
                         const uint32_t *computed,
                         uint32_t n)
{
    uint32_t first = n;

    for (uint32_t i = 0; i < n; i++) {
        struct kvs_block *block = block_of(rows, tokens[i]);
        const uint32_t row = tokens[i] % KV_BLOCK_TOKENS;

        /* A mark outlives a good reading: memory that failed once may do so again. */
        if (computed[i] != kvs_block_crcs(block, rows->at)[row])
            kvs_segment_mark_bad(store, block, rows->at, row);
        if (first == n && kvs_segment_is_bad(store, block, rows->at, row))
            first = i;
    }
    return first;
}

uint32_t kvs_verify_run(struct kvs_segment_store *store,
                        const struct kvs_row_set *rows,
                        uint32_t begin,
                        uint32_t stride,
                        uint32_t n)
{
    uint32_t tokens[SOME_ROWS], seeds[SOME_ROWS], computed[SOME_ROWS], first = n;
    const void *at[SOME_ROWS];

    for (uint32_t done = 0, some; done < n; done += some) {
        some = n - done < SOME_ROWS ? n - done : SOME_ROWS;
        for (uint32_t i = 0; i < some; i++) {
            tokens[i] = begin + (done + i) * stride;
            at[i] = kvs_block_rows(block_of(rows, tokens[i]), rows->at) +
                    (size_t)(tokens[i] % KV_BLOCK_TOKENS) * rows->row_bytes;
        }
        kvs_verify_seeds(rows, tokens, some, seeds);
        kv_rows_crc_list(at, some, rows->row_bytes, seeds, computed);
        const uint32_t bad = kvs_verify_crcs(store, rows, tokens, computed, some);
        if (first == n && bad < some)
            first = done + bad;
    }
    return first;
}

uint32_t kvs_unit_known_bad(const struct kvs_unit *unit, uint32_t begin, uint32_t n)
{
    const uint32_t end = begin + n;

    for (uint32_t token = begin; token < end;) {
        const struct kvs_block *block = kvs_unit_block(unit, token / KV_BLOCK_TOKENS);

        /* Nearly every segment: one test for all its rows. */
        if (!kvs_segment_has_bad(block, unit->at)) {
            token = (token / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS;
            continue;
        }
        if (kvs_unit_is_bad(unit, token))
            return token;
        token++;
    }
    return end;
}
