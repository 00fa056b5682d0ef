/* summary_rows.h - the rows of a group of summaries, as a caller names them and as they are sent.
 *
 * Threads: pure functions.  Memory: none.
 */
#ifndef KV_CLIENT_OPS_SUMMARY_ROWS_H
#define KV_CLIENT_OPS_SUMMARY_ROWS_H

#include "proto/kv_types.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    KVC_SUMMARY_ROWS = 1024,
    KVC_SUMMARY_ROWS_MORE = 3072,
};

static inline bool kvc_summary_rows_valid(uint32_t rows)
{
    return rows == 0 || rows == KVC_SUMMARY_ROWS || rows == KVC_SUMMARY_ROWS_MORE;
}

/* Returns what a message says of them (proto/kv_wire.h): 0, which nodes of any version
 * understand, unless there are summaries, of the larger groups. */
static inline uint16_t kvc_summary_blocks(uint32_t summaries, uint32_t rows)
{
    return summaries != 0 && rows == KVC_SUMMARY_ROWS_MORE
               ? KVC_SUMMARY_ROWS_MORE / KV_BLOCK_TOKENS
               : 0;
}

#endif
