/* The list of attention methods, and what all of them do with their session. */
#include "gpu-worker/attention/method.h"
#include "gpu-worker/kvcache/session.h"

#include <stdio.h>
#include <string.h>

static const struct kvw_method_ops *const rows[] = {
    &kvw_method_full,   &kvw_method_pqcache, &kvw_method_oracle,     &kvw_method_oracle_rest,
    &kvw_method_window, &kvw_method_random,  &kvw_method_speculated,
};

const struct kvw_method_ops *kvw_method_find(const char *name)
{
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (strcmp(rows[i]->name, name) == 0)
            return rows[i];
    return NULL;
}

static bool can_use(const struct kvw_method_ops *ops, const struct kvw_method_option *option)
{
    if ((option->is_of_codes && ops->is_exact) || (option->is_of_answer && ops->has_rows) ||
        (option->is_of_guess && ops->guess == NULL))
        return false;
    return option->needs_index ? ops->has_index : ops->has_budget;
}

bool kvw_method_uses(const struct kvw_method_ops *ops,
                     const struct kvw_method_options *options,
                     const struct kvw_method_option *option)
{
    return can_use(ops, option) && (option->matters == NULL || option->matters(options));
}

const char *kvw_method_users(const struct kvw_method_option *option, char *text, size_t bytes)
{
    size_t used = 0;

    text[0] = '\0';
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]) && used < bytes; i++)
        if (can_use(rows[i], option))
            used += (size_t)snprintf(text + used, bytes - used, "%s%s", used > 0 ? ", " : "",
                                     rows[i]->name);
    if (option->condition != NULL && used < bytes)
        snprintf(text + used, bytes - used, " %s", option->condition);
    return text;
}

kv_status_t kvw_method_end_pass(struct kvw_method *attention,
                                enum kvw_phase phase,
                                uint32_t token_begin,
                                uint32_t n)
{
    const kv_status_t status = kvw_session_end_pass(attention->session, phase, token_begin);

    if (phase == KVW_DECODE && attention->ops->has_budget)
        kvw_session_approximate(attention->session, token_begin);
    if (status != KV_OK || attention->ops->end_pass == NULL)
        return status;
    return attention->ops->end_pass(attention, phase, token_begin, n);
}

void kvw_method_prompt_hint(struct kvw_method *attention, uint32_t prompt_end, uint32_t n_steps)
{
    if (attention->ops->prompt_hint != NULL)
        attention->ops->prompt_hint(attention, prompt_end, n_steps);
}

static kv_status_t rewind_to(struct kvw_method *attention, uint32_t tokens)
{
    return attention->ops->rewind != NULL ? attention->ops->rewind(attention, tokens) : KV_OK;
}

kv_status_t kvw_method_enter_fork(struct kvw_method *attention, uint32_t tokens)
{
    const kv_status_t status = rewind_to(attention, tokens);

    return status == KV_OK ? kvw_session_enter_fork(attention->session, tokens) : status;
}

kv_status_t kvw_method_leave_fork(struct kvw_method *attention, uint32_t tokens)
{
    const kv_status_t status = rewind_to(attention, tokens);

    return status == KV_OK ? kvw_session_leave_fork(attention->session) : status;
}

kv_status_t kvw_method_truncate(struct kvw_method *attention, uint32_t tokens)
{
    const kv_status_t status = rewind_to(attention, tokens);

    return status == KV_OK ? kvw_session_truncate(attention->session, tokens) : status;
}

kv_status_t kvw_method_flush(struct kvw_method *attention)
{
    return kvw_session_flush(attention->session);
}

void kvw_method_publish(struct kvw_method *attention,
                        const uint32_t *tokens,
                        uint32_t n_tokens,
                        bool waits)
{
    kvw_session_publish(attention->session, tokens, n_tokens, waits);
}

kv_status_t kvw_method_opened(struct kvw_method *attention, uint32_t *ret_reused)
{
    const kv_status_t status = kvw_session_opened(attention->session);

    *ret_reused = kvw_session_reused(attention->session);
    return status;
}

bool kvw_method_is_ready(struct kvw_method *attention, enum kvw_phase phase, uint32_t tokens)
{
    return kvw_session_takes_rows(attention->session) &&
           (attention->ops->is_ready == NULL ||
            attention->ops->is_ready(attention, phase, tokens));
}

kv_status_t kvw_method_flushed(struct kvw_method *attention)
{
    return kvw_session_flushed(attention->session);
}

bool kvw_method_leave(struct kvw_method *attention, const uint32_t *tokens, uint32_t n_tokens)
{
    if (attention->ops->quit != NULL)
        attention->ops->quit(attention);
    return kvw_session_leave(attention->session, tokens, n_tokens);
}

void kvw_method_wait(struct kvw_method *attention, uint64_t timeout_us)
{
    kvw_session_wait(attention->session, timeout_us);
}

void kvw_method_keepalive(struct kvw_method *attention)
{
    kvw_session_poll(attention->session);
}

const char *kvw_method_detail(const struct kvw_method *attention)
{
    return kvw_session_detail(attention->session);
}

void kvw_method_get_stats(const struct kvw_method *attention,
                          struct kvw_method_stats *ret_stats)
{
    *ret_stats = (struct kvw_method_stats){
        .bytes_put = kvw_session_bytes_put(attention->session),
        .bytes_read = kvw_session_bytes_read(attention->session),
        .waits.rows_s = kvw_session_wait_s(attention->session),
    };
    attention->ops->stats(attention, ret_stats);
    const struct kvw_waits *waits = &ret_stats->waits;
    ret_stats->exposed_wait_s =
        waits->node_s + waits->queue_s + waits->wire_s + waits->index_s + waits->rows_s;
}
