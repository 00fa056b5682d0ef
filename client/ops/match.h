/* match.h - the rows that may keep a prefix of a prompt, and what their nodes have of it.
 *
 * Used by match, and by an open that begins where most of its prompt is stored.
 */
#ifndef KV_CLIENT_OPS_MATCH_H
#define KV_CLIENT_OPS_MATCH_H

#include "client/call.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_types.h"

struct kv_op;
struct Kvpb__MatchReply;

enum {
    KVC_MATCH_PLACES = 5, /* of blocks 16, 8, 4, 2 and 1 (kvserver/cluster/placement.h) */
};

/* A row that may keep a prefix of a prompt. */
struct kvc_match_place {
    uint64_t root;
    uint32_t branch;
    uint32_t tokens; /* the least that a node of the row keeps that can have a part of it;
                      * UINT32_MAX: none has replied */
    /* The same of each node, and how many units the prefix's model has, as far as a node has
     * said: nodes of the row beyond these have no part.  0: none has. */
    uint32_t kept[KV_ROW_NODES];
    uint32_t n_units;
};

/* Computes the places of a prompt, without repeats: the whole prompt's, then those of its
 * beginnings.  Returns their number.
 *   names  (n_names), n_names > 0 */
uint32_t kvc_match_places(const struct kv_client *client,
                          const struct kv_id128 *names,
                          uint32_t n_names,
                          struct kvc_match_place ret_places[KVC_MATCH_PLACES]);

/* Asks all nodes of the places how much of the prompt they keep, until a time of the client's
 * clock; `done` gives each reply to kvc_match_hear().  A node that cannot be asked keeps
 * nothing. */
void kvc_match_ask(struct kv_op *op,
                   struct kvc_match_place *places,
                   uint32_t n_places,
                   const struct kv_id128 *names,
                   uint32_t n_names,
                   uint64_t until_us,
                   kvc_call_done_fn done);

/* Takes a reply for its place.  Returns false if the node keeps nothing that a session could have:
 * the call has failed, or the reply is not sound. */
bool kvc_match_hear(const struct kvc_call *call,
                    kv_status_t status,
                    const struct Kvpb__MatchReply *reply,
                    uint32_t n_names,
                    struct kvc_match_place *places,
                    uint32_t n_places);

#endif
