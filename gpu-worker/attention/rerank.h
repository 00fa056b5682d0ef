/* rerank.h - --candidates auto, or --rerank auto where there is no first cut: how many candidates
 * per selected row a layer's queries take.
 *
 *     kvw_rerank_begin();  for each query: use factor;  kvw_rerank_note();
 *
 * The nodes estimate recall: at most one query in 64 of a layer and kv head is repeated with
 * exact scores, in spare time, and each reply has the moving average of these samples.  So the
 * same estimate comes many times, and it takes some samples until the average shows what a
 * change did.  An estimate counts once:
 *
 *   below 0.9, and lower than the last one     the factor grows by half
 *   below 0.9, but rising                      by one: the average follows slowly
 *   above 0.97                                 it shrinks by one, down to where it began
 *
 * Threads: pure functions.
 */
#ifndef KV_GPU_WORKER_ATTENTION_RERANK_H
#define KV_GPU_WORKER_ATTENTION_RERANK_H

#include <stdint.h>

enum {
    KVW_RERANK_USUAL = 4,     /* where it begins without a first cut, */
    KVW_CANDIDATES_USUAL = 8, /* and with one */
    KVW_RERANK_MAX = 16,
    KVW_RERANK_EVERY = 64,  /* queries between two estimates, as nodes sample */
    KVW_RERANK_STALE = 256, /* queries after which an equal estimate counts as a new one */
};

struct kvw_rerank {
    uint32_t usual;     /* where it began */
    uint32_t factor;    /* to be used now */
    uint32_t n_queries; /* since the last estimate that counted */
    float last;         /* that estimate; NaN: none */
};

void kvw_rerank_begin(struct kvw_rerank *rerank, uint32_t usual);

/* Takes the estimate that came with a query: the least of the layer's kv heads; NaN: unknown.
 * The factor stays at most `most`. */
void kvw_rerank_note(struct kvw_rerank *rerank, float recall, uint32_t most);

#endif
