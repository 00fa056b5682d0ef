/* bpe_merge.h - merges neighbours, the best pair first, until no pair is left: what both kinds
 * of tokenizer do.
 *
 * The symbols are a linked list in an array; pairs wait in a heap, and one that has changed
 * since it was put there is passed over.  n symbols take n log n steps, whatever they are.
 *
 * Threads: one at a time.  Memory: all zeros is an empty merger; it keeps its arrays from text
 * to text, and kv_merger_fini() frees them.
 */
#ifndef KV_GPU_WORKER_TEXT_BPE_MERGE_H
#define KV_GPU_WORKER_TEXT_BPE_MERGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_SYMBOL_NONE = -1,
};

struct kv_symbol {
    uint32_t begin, bytes;  /* in the text; bytes 0: it is part of the symbol to its left now */
    int32_t token;          /* KV_TOKEN_NONE: it is none */
    int32_t previous, next; /* KV_SYMBOL_NONE at the ends */
};

/* Whether two neighbours make a token: its id, and its priority, smaller first.  Of equal
 * priorities the pair to the left goes first. */
typedef bool (*kv_merge_find)(const void *context,
                              const char *text,
                              const struct kv_symbol *left,
                              const struct kv_symbol *right,
                              int32_t *ret_token,
                              uint32_t *ret_priority);

struct kv_merge_pair;

struct kv_merger {
    struct kv_symbol *symbols;
    size_t n_symbols, symbols_capacity;
    struct kv_merge_pair *pairs; /* a heap */
    size_t n_pairs, pairs_capacity;
};

/* Forgets the symbols of the text before. */
void kv_merger_clear(struct kv_merger *merger);

/* Puts a symbol behind the last one; where it begins is where that ends.  Fewer than 2^31 of
 * them. false: out of memory. */
bool kv_merger_add(struct kv_merger *merger, size_t bytes, int32_t token);

/* Merges.  What is left are the symbols from the first on, by `next`.  false: out of memory. */
bool kv_merger_run(struct kv_merger *merger,
                   kv_merge_find find,
                   const void *context,
                   const char *text);

void kv_merger_fini(struct kv_merger *merger);

#endif
