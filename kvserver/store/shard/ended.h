/* ended.h - the sessions that ended lately: a request that comes too late is told what became
 * of its session, not only that there is none.
 *
 * The last KVS_ENDED_MAX are remembered, by their tokens: who does not know the token hears
 * nothing.
 *
 * Threads: each list is one thread's.  Memory: none beside the list.
 */
#ifndef KV_KVSERVER_STORE_SHARD_ENDED_H
#define KV_KVSERVER_STORE_SHARD_ENDED_H

#include "proto/kv_types.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    KVS_ENDED_MAX = 512,
    KVS_ENDED_TEXT = 96, /* bytes that the words take at most */
};

enum kvs_ended_why {
    KVS_ENDED_UNSAID = 0, /* it never was one: its open came to nothing */
    KVS_ENDED_CLOSED,     /* a client has closed it */
    KVS_ENDED_LEASE,      /* nobody used or renewed it for as long as its lease */
};

struct kvs_ended {
    struct kv_id128 token;
    uint64_t at_us;
    uint64_t lease_us;
    enum kvs_ended_why why;
};

struct kvs_ended_list {
    struct kvs_ended last[KVS_ENDED_MAX];
    uint64_t n_ever; /* the next goes to this place, counted round */
};

/* KVS_ENDED_UNSAID: nothing happens. */
void kvs_ended_add(struct kvs_ended_list *list, const struct kvs_ended *ended);

/* "its lease of 60.0 s ended 12.3 s ago".  false: no session with that token is remembered. */
bool kvs_ended_tell(const struct kvs_ended_list *list,
                    const struct kv_id128 *token,
                    uint64_t now_us,
                    char text[KVS_ENDED_TEXT]);

#endif
