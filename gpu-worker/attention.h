/* attention.h - an attention method: a table of functions over (layer, q, k, v) and the store.
 *
 * A forward pass calls, for each run of tokens:
 *
 *     for each layer     attend()     takes the layer's new keys and values, gives its output
 *     after the last     passed()     the tokens have been through all layers
 *
 * Tokens come in order and without gaps.  The method decides which cached rows a query attends
 * to, where they are, and what goes to the store; sinks, windows and indexes are its own
 * business. It writes every row to the store, in the background of the computation: flush()
 * waits for that.
 *
 * A new method is one file and one row in attention.c.
 *
 * Threads: one at a time.  Memory: create/destroy.
 */
#ifndef KV_ATTENTION_H
#define KV_ATTENTION_H

#include "kvclient.h"
#include "model.h"

struct kv_attention_row;

struct kv_attention_setup {
    const struct kv_model *model;
    struct kv_client *client; /* of the store; kept */
    enum kv_dtype dtype;      /* of rows: KV_FP16, KV_BF16, KV_FP32 */
    uint32_t capacity;        /* tokens at most */
    uint32_t chunk_tokens;    /* of one attend() at most */
};

struct kv_attention_stats {
    uint64_t bytes_put;     /* rows sent to the store */
    uint64_t bytes_fetched; /* rows got from it */
    uint64_t rows_attended; /* (query, kv head) pairs of one row */
    uint64_t rows_possible; /* the same, had every query attended to all before it */
    double exposed_wait_s;  /* the computation stood still for the store */
};

/* What every method begins with. */
struct kv_attention {
    const struct kv_attention_row *row;
};

struct kv_attention_row {
    const char *name;    /* "full" */
    const char *summary; /* for --help */

    /* Opens a session of the model in the store.  `detail`: `what: where: value`. */
    kv_status_t (*create)(const struct kv_attention_setup *setup,
                          struct kv_attention **ret_attention,
                          char *detail,
                          size_t detail_bytes);
    /* Closes the session, and with it the store's rows. */
    void (*destroy)(struct kv_attention *attention);

    /* q, out (n, n_q_heads, d); k, v (n, n_kv_heads, d): of the tokens from token_begin on,
     * turned by position.  Buffers of the model's device. */
    kv_status_t (*attend)(struct kv_attention *attention,
                          uint32_t layer,
                          uint32_t token_begin,
                          uint32_t n,
                          const struct kv_device_buffer *q,
                          const struct kv_device_buffer *k,
                          const struct kv_device_buffer *v,
                          struct kv_device_buffer *out);
    kv_status_t (*passed)(struct kv_attention *attention, uint32_t token_begin, uint32_t n);

    /* Forgets the tokens from `tokens` on. */
    kv_status_t (*truncate)(struct kv_attention *attention, uint32_t tokens);
    /* Waits until the store has every row. */
    kv_status_t (*flush)(struct kv_attention *attention);
    /* While nothing is computed, every second or so: keeps the session alive. */
    void (*idle)(struct kv_attention *attention);

    /* What went wrong, `what: where: value`; lent until the next call. */
    const char *(*detail)(const struct kv_attention *attention);
    void (*stats)(const struct kv_attention *attention, struct kv_attention_stats *ret_stats);
};

extern const struct kv_attention_row kv_attention_full;

/* By name; NULL: there is none. */
const struct kv_attention_row *kv_attention_find(const char *name);
/* All there are; NULL behind the last. */
const struct kv_attention_row *kv_attention_at(unsigned index);

#endif
