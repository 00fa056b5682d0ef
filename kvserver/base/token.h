/* token.h - compares secrets: session and client tokens, and the ids that stand for them.
 *
 * Threads: pure functions.
 */
#ifndef KV_KVSERVER_BASE_TOKEN_H
#define KV_KVSERVER_BASE_TOKEN_H

#include "proto/kv_types.h"

#include <stdbool.h>
#include <string.h>

/* Takes the same time whatever the bytes are: how much of a guess was right does not show. */
static inline bool kv_token_equal(const struct kv_id128 *a, const struct kv_id128 *b)
{
    uint64_t left[2], right[2];

    memcpy(left, a->bytes, sizeof(left));
    memcpy(right, b->bytes, sizeof(right));
    return ((left[0] ^ right[0]) | (left[1] ^ right[1])) == 0;
}

#endif
