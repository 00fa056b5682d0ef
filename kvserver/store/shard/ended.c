#include "kvserver/store/shard/ended.h"

#include "kvserver/base/token.h"

#include <stdio.h>

void kvs_ended_add(struct kvs_ended_list *list, const struct kvs_ended *ended)
{
    if (ended->why != KVS_ENDED_UNSAID)
        list->last[list->n_ever++ % KVS_ENDED_MAX] = *ended;
}

/* Returns the latest entry with that token: an id may be opened again with the same token. */
static const struct kvs_ended *find(const struct kvs_ended_list *list,
                                    const struct kv_id128 *token)
{
    uint64_t n = list->n_ever < KVS_ENDED_MAX ? list->n_ever : KVS_ENDED_MAX;

    for (uint64_t i = 1; i <= n; i++) {
        const struct kvs_ended *ended = &list->last[(list->n_ever - i) % KVS_ENDED_MAX];

        if (kv_token_equal(&ended->token, token))
            return ended;
    }
    return NULL;
}

bool kvs_ended_tell(const struct kvs_ended_list *list,
                    const struct kv_id128 *token,
                    uint64_t now_us,
                    char text[KVS_ENDED_TEXT])
{
    const struct kvs_ended *ended = find(list, token);
    double ago_s;

    if (ended == NULL)
        return false;
    ago_s = now_us > ended->at_us ? (double)(now_us - ended->at_us) / 1e6 : 0;
    if (ended->why == KVS_ENDED_LEASE)
        snprintf(text, KVS_ENDED_TEXT, "its lease of %.1f s ended %.1f s ago",
                 (double)ended->lease_us / 1e6, ago_s);
    else
        snprintf(text, KVS_ENDED_TEXT, "%s closed it %.1f s ago",
                 ended->why == KVS_ENDED_OPERATOR ? "an operator" : "a client", ago_s);
    return true;
}
