/* members.h - the map of a store: which nodes there are, and what each is called.
 *
 * The map is all that travels.  From it, everybody computes where sessions and objects are
 * (placement.h).  A member's id is a hash of its name, or of its address where it has no name,
 * so the map is known although a node has never answered.  The order of the list means nothing:
 * two lists of the same members have the same epoch and the same placement.
 *
 * Where maps come from is a table of rows (struct kv_members_source).  The product has one: the
 * list that the user gives.
 *
 * Invariants, which kv_members_create() establishes:
 *   (1) There are 1..KV_NODES_MAX members.
 *   (2) No two members have the same id or the same address.
 *   (3) Every weight is from 1 to KV_MEMBER_WEIGHT_MAX.
 *   (4) The epoch is not 0, and depends on the ids and weights alone.
 *   (5) Names and addresses have no ASCII blanks and no control characters.
 *
 * Threads: a map is not changed once it has been made.  Memory: one block; free with free().
 */
#ifndef KV_KVSERVER_CLUSTER_MEMBERS_H
#define KV_KVSERVER_CLUSTER_MEMBERS_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    KV_NODES_MAX = 1024,
    KV_MEMBER_WEIGHT_MAX = 1 << 20,
};

struct kv_member {
    const char *name;    /* as the node calls itself; NULL or "": it may call itself anything */
    const char *address; /* as in the list */
    uint32_t weight;     /* how much it is given, relative to the others; 0: 1 */
    uint64_t id;         /* set by kv_members_create() */
};

struct kv_members {
    uint64_t epoch;
    uint32_t n_members;
    struct kv_member members[]; /* in the order in which they were given */
};

/* Returns KV_INVALID, with a detail as kv_members_create() has, if no list can have a node of this
 * name: it is longer than KV_NAME_BYTES_MAX, or has a blank, a control character, a comma or an
 * equals sign.  Nodes check their own name by it. */
kv_status_t
kv_member_check_name(const char *what, const char *name, char *detail, size_t detail_bytes);

/* Makes a map of `n_members` members; copies their texts.  Fails with KV_INVALID if there are
 * none or too many, if a name or an address cannot be one, if a weight is out of bounds, or if a
 * name, an address or an id is there twice, and with KV_NO_MEMORY; `detail` is then `what: where: value`,
 * beginning with `what`. */
kv_status_t kv_members_create(const char *what,
                              const struct kv_member *members,
                              uint32_t n_members,
                              struct kv_members **ret_members,
                              char *detail,
                              size_t detail_bytes);

/* A source of maps. */
struct kv_members_source {
    const char *name;
    /* Makes the map that `text` describes, as kv_members_create() does. */
    kv_status_t (*get)(const char *what,
                       const char *text,
                       struct kv_members **ret_members,
                       char *detail,
                       size_t detail_bytes);
};

/* The list itself: "HOST:PORT,NAME=HOST:PORT,...", all of weight 1. */
extern const struct kv_members_source kv_members_static;

#endif
