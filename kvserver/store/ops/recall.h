/* recall.h - measures recall: some queries are repeated with exact scores, when the thread has
 * nothing else to do, and the selected rows are compared.
 *
 * In each unit at most one query of KVS_RECALL_EVERY is sampled, and one sample is taken at a
 * time per data thread.  The unit keeps a moving average of the fraction of exactly selected
 * rows that the query had found.
 *
 * Threads: the data thread.  Memory: create/destroy; from the first sample on also some pages of
 * the node, until few are free: then no sample is taken.
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

/* Returns the memory that it always has. */
uint64_t kvs_recall_bytes(void);

/* Returns NULL if out of memory. */
struct kvs_recall *kvs_recall_create(struct kvs_shard *shard);
void kvs_recall_destroy(struct kvs_recall *recall); /* NULL is allowed */

/* Counts a query of the unit that selected these tokens, ascending.  Takes a copy of the query
 * as a sample if one is due and none is in progress. */
void kvs_recall_note(struct kvs_recall *recall,
                     const struct kvs_shard_session *session,
                     const struct kvs_score *score,
                     const struct kvs_selection *selection,
                     const uint32_t *tokens,
                     uint32_t n_tokens);

/* Runs a slice of the sample in progress.  Returns false if there is none. */
bool kvs_recall_step(struct kvs_recall *recall);

/* Gives some pages back to a node that is short of them; ends a sample for that.  Returns false if
 * it has none. */
bool kvs_recall_drop_room(struct kvs_recall *recall);

#endif
