#include "gpu-worker/attention/rerank.h"

#include <math.h>
#include <stdbool.h>

/* The range in which recall is kept. */
static const float RECALL_WANTED = 0.9f, RECALL_PLENTY = 0.97f;

void kvw_rerank_begin(struct kvw_rerank *rerank, uint32_t usual)
{
    *rerank = (struct kvw_rerank){.usual = usual, .factor = usual, .last = NAN};
}

static bool is_new(const struct kvw_rerank *rerank, float recall)
{
    if (isnan(rerank->last))
        return true;
    /* Samples of several kv heads arrive one by one; they are one estimate. */
    return rerank->n_queries >= (recall < rerank->last || recall > rerank->last
                                     ? KVW_RERANK_EVERY
                                     : KVW_RERANK_STALE);
}

void kvw_rerank_note(struct kvw_rerank *rerank, float recall, uint32_t most)
{
    const uint32_t now = rerank->factor;

    if (rerank->n_queries < KVW_RERANK_STALE)
        rerank->n_queries++;
    if (isnan(recall) || !is_new(rerank, recall))
        return;
    if (recall < RECALL_WANTED)
        rerank->factor += recall > rerank->last ? 1 : (now + 1) / 2;
    else if (recall > RECALL_PLENTY && now > rerank->usual)
        rerank->factor--;
    if (rerank->factor > now && rerank->factor > most)
        rerank->factor = now > most ? now : most;
    rerank->last = recall;
    rerank->n_queries = 0;
}
