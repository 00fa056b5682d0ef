/* eviction.h - what a node gives up first when memory is short: a table of policies.
 *
 * A policy says what a prefix is worth; the least valuable one goes first.  A new policy is a row
 * in eviction.c.
 *
 *   lru    when it was last used
 *   gdsf   how often it was used, and what it costs to compute it again, per byte; what was not
 *          used for long loses against what is new (Greedy-Dual-Size with frequency: Cherkasova,
 *          HP Labs 1998)
 *
 * Threads: pure functions.
 */
#ifndef KV_KVSERVER_STORE_PREFIX_EVICTION_H
#define KV_KVSERVER_STORE_PREFIX_EVICTION_H

#include <stdint.h>

/* What a policy knows of a prefix. */
struct kvs_eviction_facts {
    uint64_t used_us; /* when it was last used */
    uint32_t n_uses;
    uint32_t depth; /* blocks before it */
    uint64_t bytes;
    double floor; /* the value of what had gone last by then */
};

struct kvs_eviction_policy {
    const char *name;
    const char *summary;
    double (*value)(const struct kvs_eviction_facts *facts);
};

/* Returns the policy of that name, or NULL; those of all numbers from 0 on, then NULL. */
const struct kvs_eviction_policy *kvs_eviction_find(const char *name);
const struct kvs_eviction_policy *kvs_eviction_at(unsigned number);

#endif
