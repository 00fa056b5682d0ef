/* recall.h - how good the codes are: some queries are answered a second time, by all keys, when
 * there is nothing else to do, and the choices are compared.
 *
 * At least every KVS_RECALL_EVERY-th query of a unit is, one at a time; the unit keeps a moving
 * average of the share of exact top-k that its answer had.
 *
 * Threads: the data thread.  Memory: create/destroy.
 */
#ifndef KV_KVSERVER_STORE_OPS_RECALL_H
#define KV_KVSERVER_STORE_OPS_RECALL_H

#include "kvserver/store/query/score.h"
#include "kvserver/store/query/selection.h"
#include "kvserver/store/shard/shard.h"

enum {
    KVS_RECALL_EVERY = 64,
};

struct kvs_recall;

/* NULL: out of memory. */
struct kvs_recall *kvs_recall_create(struct kvs_shard *shard);
void kvs_recall_destroy(struct kvs_recall *recall); /* NULL is allowed */

/* Counts a query of the unit that was answered with these tokens, ascending; takes it for a
 * look if one is due and there is room. */
void kvs_recall_note(struct kvs_recall *recall,
                     const struct kvs_shard_session *session,
                     const struct kvs_score *score,
                     const struct kvs_selection *selection,
                     const uint32_t *tokens,
                     uint32_t n_tokens);

/* A slice of the look under way.  Returns false if there is none. */
bool kvs_recall_step(struct kvs_recall *recall);

#endif
