/* bpe_merge.h - byte-pair merging: merges neighboring symbols, the best pair first, until no
 * pair is a token (Sennrich et al., arXiv:1508.07909, section 3.2).  Both kinds of tokenizer
 * use it.
 *
 * The symbols are a linked list in an array.  Pairs are in a heap; a pair whose symbols have
 * been merged with others in the meantime is skipped when it is popped.  n symbols take O(n log
 * n) steps for any text.
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
    uint32_t begin, bytes;  /* in the text; bytes 0: merged into the symbol to its left */
    int32_t token;          /* KVW_TOKEN_NONE: not a token */
    int32_t previous, next; /* KVW_SYMBOL_NONE at the ends */
};

/* Returns whether two neighboring symbols merge into a token, its id, and its priority: smaller
 * ones are merged first, and of equal ones the pair farther left. */
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

/* Drops all symbols; keeps the memory. */
void kvw_merger_clear(struct kvw_merger *merger);

/* Appends a symbol, which begins where the last one ends.  At most 2^31 - 1 of them.  Returns
 * false if out of memory. */
bool kvw_merger_add(struct kvw_merger *merger, size_t bytes, int32_t token);

/* Merges.  The result is the list of symbols from index 0 on, linked by `next`.  Returns false
 * if out of memory. */
bool kvw_merger_run(struct kvw_merger *merger,
                    kvw_bpe_merge_find find,
                    const void *context,
                    const char *text);

void kvw_merger_fini(struct kvw_merger *merger);

#endif
