/* recall.h - how good the codes are: some queries are answered a second time, by all keys, when
 * there is nothing else to do, and the choices are compared.
 *
 * At least every KV_RECALL_EVERY-th query of a unit is, one at a time; the unit keeps a moving
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
    KV_RECALL_EVERY = 64,
};

struct kv_recall;

/* NULL: out of memory. */
struct kv_recall *kv_recall_create(struct kv_data *data);
void kv_recall_destroy(struct kv_recall *recall); /* NULL is allowed */

/* Counts a query of the unit that was answered with these tokens, ascending; takes it for a
 * look if one is due and there is room. */
void kv_recall_note(struct kv_recall *recall,
                    const struct kv_part *part,
                    const struct kv_scan *scan,
                    const struct kv_choice *choice,
                    const uint32_t *tokens,
                    uint32_t n_tokens);

/* A slice of the look under way.  Returns false if there is none. */
bool kv_recall_step(struct kv_recall *recall);

#endif
