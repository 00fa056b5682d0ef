/* bpe_merge.h - merges neighbours, the best pair first, until no pair is left: what both kinds
 * of tokenizer do.
 *
 * The symbols are a linked list in an array; pairs wait in a heap, and one that has changed
 * since it was put there is passed over.  n symbols take n log n steps, whatever they are.
 *
 * Threads: one at a time.  Memory: all zeros is an empty merger; it keeps its arrays from text
 * to text, and kvw_merger_fini() frees them.
 */
#ifndef KV_GPU_WORKER_TEXT_BPE_MERGE_H
#define KV_GPU_WORKER_TEXT_BPE_MERGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVW_SYMBOL_NONE = -1,
};

struct kvw_symbol {
    uint32_t begin, bytes;  /* in the text; bytes 0: it is part of the symbol to its left now */
    int32_t token;          /* KVW_TOKEN_NONE: it is none */
    int32_t previous, next; /* KVW_SYMBOL_NONE at the ends */
};

/* Whether two neighbours make a token: its id, and its priority, smaller first.  Of equal
 * priorities the pair to the left goes first. */
typedef bool (*kvw_bpe_merge_find)(const void *context,
                                   const char *text,
                                   const struct kvw_symbol *left,
                                   const struct kvw_symbol *right,
                                   int32_t *ret_token,
                                   uint32_t *ret_priority);

struct kvw_bpe_pair;

struct kvw_merger {
    struct kvw_symbol *symbols;
    size_t n_symbols, symbols_capacity;
    struct kvw_bpe_pair *pairs; /* a heap */
    size_t n_pairs, pairs_capacity;
};

/* Forgets the symbols of the text before. */
void kvw_merger_clear(struct kvw_merger *merger);

/* Puts a symbol behind the last one; where it begins is where that ends.  Fewer than 2^31 of
 * them. false: out of memory. */
bool kvw_merger_add(struct kvw_merger *merger, size_t bytes, int32_t token);

/* Merges.  What is left are the symbols from the first on, by `next`.  false: out of memory. */
bool kvw_merger_run(struct kvw_merger *merger,
                    kvw_bpe_merge_find find,
                    const void *context,
                    const char *text);

void kvw_merger_fini(struct kvw_merger *merger);

#endif
