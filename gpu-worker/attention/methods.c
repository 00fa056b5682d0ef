/* The attention methods there are, and what all of them do with their session. */
#include "gpu-worker/attention/method.h"
#include "gpu-worker/kvcache/session.h"

#include <string.h>

static const struct kv_attention_row *const rows[] = {
    &kv_attention_full,   &kv_attention_pqcache, &kv_attention_oracle,
    &kv_attention_window, &kv_attention_random,
};

const struct kv_attention_row *kv_attention_find(const char *name)
{
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (strcmp(rows[i]->name, name) == 0)
            return rows[i];
    return NULL;
}

kv_status_t kvw_attention_passed(struct kv_attention *attention,
                                 enum kv_phase phase,
                                 uint32_t token_begin,
                                 uint32_t n)
{
    const kv_status_t status = kv_store_session_passed(attention->session, phase, token_begin);

    if (status != KV_OK || attention->row->passed == NULL)
        return status;
    return attention->row->passed(attention, phase, token_begin, n);
}

void kvw_attention_expect(struct kv_attention *attention, uint32_t prompt_end, uint32_t n_steps)
{
    if (attention->row->expect != NULL)
        attention->row->expect(attention, prompt_end, n_steps);
}

static kv_status_t rewind_to(struct kv_attention *attention, uint32_t tokens)
{
    return attention->row->rewind != NULL ? attention->row->rewind(attention, tokens) : KV_OK;
}

kv_status_t kvw_attention_branch(struct kv_attention *attention, uint32_t tokens)
{
    const kv_status_t status = rewind_to(attention, tokens);

    return status == KV_OK ? kv_store_session_branch(attention->session, tokens) : status;
}

kv_status_t kvw_attention_unbranch(struct kv_attention *attention, uint32_t tokens)
{
    const kv_status_t status = rewind_to(attention, tokens);

    return status == KV_OK ? kv_store_session_unbranch(attention->session) : status;
}

kv_status_t kvw_attention_truncate(struct kv_attention *attention, uint32_t tokens)
{
    const kv_status_t status = rewind_to(attention, tokens);

    return status == KV_OK ? kv_store_session_truncate(attention->session, tokens) : status;
}

kv_status_t kvw_attention_flush(struct kv_attention *attention)
{
    return kv_store_session_flush(attention->session);
}

void kvw_attention_idle(struct kv_attention *attention)
{
    kv_store_session_poll(attention->session);
}

const char *kvw_attention_detail(const struct kv_attention *attention)
{
    return kv_store_session_detail(attention->session);
}

void kvw_attention_stats(const struct kv_attention *attention,
                         struct kv_attention_stats *ret_stats)
{
    *ret_stats = (struct kv_attention_stats){
        .bytes_put = kv_store_session_bytes_put(attention->session),
        .exposed_wait_s = kv_store_session_wait_s(attention->session),
    };
    attention->row->stats(attention, ret_stats);
}
