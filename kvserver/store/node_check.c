/* Whether a node's books are right: the control thread's, each data thread's with its queries,
 * and what the two say of the same session or client; node.h numbers that. */
#include "kvserver/store/node_private.h"

#include "kvserver/base/token.h"
#include "kvserver/store/ops/query.h"

#include <assert.h>

static void check_session(const struct kvs_control *control,
                          const struct kvs_session *session,
                          uint32_t thread,
                          const struct kvs_shard_session *there)
{
    assert(there->used == (session->used && kvs_session_is_on(control, session, thread)));
    if (!there->used)
        return;
    assert(kv_token_equal(&there->token, &session->token) && !there->changing);
    assert(there->generation == session->generation && there->epoch == session->epoch);
    assert(there->tenant == session->tenant && there->tokens_max == session->tokens_max);
    assert(there->writers == session->writers);
    assert(there->schema == &session->model->info.schema);
}

static void check_client(const struct kvs_client_record *client,
                         const struct kvs_shard_client *there)
{
    if (client->state == KVS_CLIENT_FREE)
        assert(there->state == KVS_SHARD_CLIENT_FREE);
    if (client->state != KVS_CLIENT_OPEN)
        return;
    assert(there->state == KVS_SHARD_CLIENT_OPEN || there->is_told);
    assert(kv_token_equal(&there->token, &client->token));
    assert(there->tenant == client->tenant && there->credits == client->credits);
}

/* Without calls under way, the threads know the same. */
static void check_agreement(const struct kvs_control *control, const struct kvs_shard *shard)
{
    assert(shard->command == NULL);
    for (uint32_t i = 0; i < control->config.sessions_max; i++)
        check_session(control, &control->sessions[i], shard->index, &shard->sessions[i]);
    for (uint32_t i = 0; i < control->config.clients_max; i++)
        check_client(&control->clients[i], &shard->clients[i]);
}

void kvs_node_check(const struct kvs_node *node)
{
    kvs_control_check(&node->control);
    for (uint32_t i = 0; i < node->n_threads; i++) {
        kvs_shard_check(&node->shard[i]);
        kvs_query_queue_check(&node->shard[i]);
        if (node->control.n_calls == 0)
            check_agreement(&node->control, &node->shard[i]);
    }
}

/* ---- blocks that prefixes keep ----------------------------------------------------------- */

struct kept_visit {
    uint32_t thread, n_threads;
    void (*visit)(void *visitor, const struct kvs_block *block);
    void *visitor;
};

static void visit_prefix(const struct kept_visit *to, struct kvs_prefix *prefix)
{
    struct kvs_block *const *block = kvs_prefix_block(prefix, to->thread, to->n_threads);

    if (block != NULL && *block != NULL)
        to->visit(to->visitor, *block);
}

static void visit_list(const struct kept_visit *to, struct kvs_prefix *list)
{
    for (; list != NULL; list = list->next)
        visit_prefix(to, list);
}

/* Those in the index, those that a call is about to put there, and those that are to be freed. */
static void visit_kept(const void *arg,
                       uint32_t thread,
                       void (*visit)(void *visitor, const struct kvs_block *block),
                       void *visitor)
{
    const struct kvs_control *control = arg;
    const struct kept_visit to = {thread, control->n_threads, visit, visitor};
    struct kvs_prefix *prefix;
    size_t cursor = 0;

    while ((prefix = kvs_prefixes_next(control->prefixes, &cursor)) != NULL)
        visit_prefix(&to, prefix);
    visit_list(&to, control->released);
    for (const struct kvs_control_call *call = control->calls; call != NULL;
         call = call->list_next)
        visit_list(&to, call->prefixes);
}

void kvs_node_check_memory(const struct kvs_node *node)
{
    const struct kvs_kept_blocks kept = {visit_kept, &node->control};

    kvs_pages_check(node->pages);
    for (uint32_t i = 0; i < node->n_threads; i++)
        kvs_shard_check_memory(&node->shard[i], &kept);
}
