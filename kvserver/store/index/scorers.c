/* scorers.c - the scorers there are: one line each. */
#include "kvserver/store/index/scorer.h"

static const struct kvs_scorer_ops *const scorers[] = {
    [KVS_SCORER_PQ] = &kvs_scorer_pq,
};

static_assert(sizeof(scorers) / sizeof(scorers[0]) == KVS_N_SCORERS, "each has its line");

const struct kvs_scorer_ops *kvs_scorer_at(enum kvs_scorer scorer)
{
    return scorers[scorer];
}
