/* token.h - compares secrets: session tokens, client tokens and client ids.
 *
 * Threads: pure functions.
 */
#ifndef KV_KVSERVER_BASE_TOKEN_H
#define KV_KVSERVER_BASE_TOKEN_H

#include "proto/kv_types.h"

#include <stdbool.h>
#include <string.h>

/* Compares in constant time, so that the time does not reveal how many bytes of a guess are
 * right. */
static inline bool kv_token_equal(const struct kv_id128 *a, const struct kv_id128 *b)
{
    uint64_t left[2], right[2];

    memcpy(left, a->bytes, sizeof(left));
    memcpy(right, b->bytes, sizeof(right));
    return ((left[0] ^ right[0]) | (left[1] ^ right[1])) == 0;
}

#endif
