/* ended.h - recently ended sessions: a request that arrives too late is told how its session
 * ended, not only that it does not exist.
 *
 * The last KVS_ENDED_MAX sessions are remembered by token, so only a client that knows the
 * token is told.
 *
 * Threads: each list belongs to one thread.  Memory: none beyond the list.
 */
#ifndef KV_KVSERVER_STORE_SHARD_ENDED_H
#define KV_KVSERVER_STORE_SHARD_ENDED_H

#include "proto/kv_types.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    KVS_ENDED_MAX = 512,
    KVS_ENDED_TEXT = 96, /* maximum size of the text */
};

enum kvs_ended_why {
    KVS_ENDED_UNSAID = 0, /* its open failed: it never existed for a client */
    KVS_ENDED_CLOSED,     /* closed by a client */
    KVS_ENDED_OPERATOR,   /* closed by an operator */
    KVS_ENDED_LEASE,      /* not used or renewed for the length of its lease */
};

struct kvs_ended {
    struct kv_id128 token;
    uint64_t at_us;
    uint64_t lease_us;
    enum kvs_ended_why why;
};

struct kvs_ended_list {
    struct kvs_ended last[KVS_ENDED_MAX];
    uint64_t n_ever; /* sessions ever added; the next entry is this, modulo KVS_ENDED_MAX */
};

/* Adds a session.  Ignores KVS_ENDED_UNSAID. */
void kvs_ended_add(struct kvs_ended_list *list, const struct kvs_ended *ended);

/* Writes, for example, "its lease of 60.0 s ended 12.3 s ago".  Returns false if no session
 * with that token is remembered. */
bool kvs_ended_tell(const struct kvs_ended_list *list,
                    const struct kv_id128 *token,
                    uint64_t now_us,
                    char text[KVS_ENDED_TEXT]);

#endif
