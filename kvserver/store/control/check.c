/* check.c - whether the control thread's books are right; control.h numbers what is asserted
 * here.
 */
#include "kvserver/base/token.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/control/disk_verify.h"

#include <assert.h>
#include <string.h>

/* ---- calls ------------------------------------------------------------------------------- */

static void check_calls(const struct kvs_control *control)
{
    struct kvs_control_call *const *link = &control->calls;
    uint32_t n = 0;

    for (; *link != NULL; link = &(*link)->list_next) {
        const struct kvs_control_call *call = *link;

        assert(call->list_link == link && call->control == control);
        assert(kvs_control_has_op(control, call->op));
        assert(call->session == NULL || (call->session->used && call->session->busy));
        assert(call->child == NULL || (call->child->used && call->child->busy));
        n++;
        assert(n <= control->n_calls);
    }
    assert(n == control->n_calls);
}

static uint32_t n_calls_of_session(const struct kvs_control *control,
                                   const struct kvs_session *session)
{
    uint32_t n = 0;

    for (const struct kvs_control_call *call = control->calls; call != NULL;
         call = call->list_next)
        n += (call->session == session) + (call->child == session);
    return n;
}

static uint32_t n_calls_of_client(const struct kvs_control *control,
                                  const struct kvs_client_record *client,
                                  enum kv_op_id op)
{
    uint32_t n = 0;

    for (const struct kvs_control_call *call = control->calls; call != NULL;
         call = call->list_next)
        n += call->client == client && call->op == op;
    return n;
}

/* ---- models ------------------------------------------------------------------------------ */

static uint32_t n_sessions_of(const struct kvs_control *control, const struct kvs_model *model)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < control->config.sessions_max; i++)
        n += control->sessions[i].used && control->sessions[i].model == model;
    return n;
}

static void check_models(const struct kvs_control *control)
{
    uint32_t n_sessions = 0;

    assert(control->n_models <= KVS_MODELS_MAX);
    for (uint32_t i = 0; i < control->n_models; i++) {
        const struct kvs_model *model = control->models[i];

        assert(model->n_sessions == n_sessions_of(control, model));
        assert(model->n_sessions == 0 || !model->saving);
        for (uint32_t j = 0; j < i; j++)
            assert(!kv_token_equal(&control->models[j]->info.fingerprint,
                                   &model->info.fingerprint));
        n_sessions += model->n_sessions;
    }
    assert(n_sessions == control->n_sessions);
}

/* ---- sessions ---------------------------------------------------------------------------- */

static void check_log(const struct kvs_session *session)
{
    const uint32_t n = session->n_log < KVS_LOG_ENTRIES ? session->n_log : KVS_LOG_ENTRIES;

    assert(session->generation == session->n_log + 1);
    for (uint32_t i = session->n_log - n; i < session->n_log; i++) {
        const struct kvs_log_entry *entry = &session->log[i % KVS_LOG_ENTRIES];

        assert(entry->kind == KV_OP_FORK || entry->kind == KV_OP_TRUNCATE);
        assert(entry->generation == i + 1 && entry->writer != 0);
        assert(entry->tokens <= session->tokens_max);
        for (uint32_t j = i + 1; j < session->n_log; j++)
            assert(session->log[j % KVS_LOG_ENTRIES].op_id != entry->op_id);
    }
}

static void check_writers(const struct kv_writers *writers)
{
    assert(writers->n_runs >= 1 && writers->n_runs <= KV_WRITER_RUNS_MAX);
    for (uint32_t i = 0; i < writers->n_runs; i++) {
        assert(writers->runs[i].writer != 0);
        if (i > 0)
            assert(writers->runs[i - 1].end < writers->runs[i].end &&
                   writers->runs[i - 1].writer != writers->runs[i].writer);
    }
    assert(writers->runs[writers->n_runs - 1].end == UINT32_MAX);
}

/* The heap of leases, and the list of free places. */
static void check_places(const struct kvs_control *control)
{
    uint32_t n_free = 0;

    for (uint32_t i = 0; i < control->n_sessions; i++) {
        const struct kvs_session *session = control->due[i];

        assert(session->used && session->due_at == i);
        assert(i == 0 || control->due[(i - 1) / 2]->due_us <= session->due_us);
    }
    for (const struct kvs_session *session = control->free_session; session != NULL;
         session = session->next_free) {
        assert(!session->used && n_free < control->config.sessions_max);
        n_free++;
    }
    assert(control->n_sessions + n_free == control->config.sessions_max);
}

/* Takes all sessions out of the counts of their roots. */
static void count_out(const struct kvs_control *control)
{
    for (uint32_t i = 0; i < control->config.sessions_max; i++) {
        const struct kvs_session *session = &control->sessions[i];
        struct kvs_root *root = session->shared_root;

        if (!session->used || root == NULL)
            continue;
        assert(kv_map_get(control->roots, &root->key) == root);
        assert(session->row_then < session->rows_then && session->rows_then <= root->n_rows);
        root->n_sessions--;
        root->n_since[session->row_then] -= session->rows_then == root->n_rows;
    }
}

/* Puts them back. */
static void count_in(const struct kvs_control *control)
{
    for (uint32_t i = 0; i < control->config.sessions_max; i++) {
        const struct kvs_session *session = &control->sessions[i];
        struct kvs_root *root = session->shared_root;

        if (!session->used || root == NULL)
            continue;
        root->n_sessions++;
        root->n_since[session->row_then] += session->rows_then == root->n_rows;
    }
}

/* There may be as many roots as sessions: instead of looking for the sessions of each, counts all
 * sessions out, and in again. */
static void check_roots(const struct kvs_control *control)
{
    static const uint32_t nobody[KV_ROOT_ROWS_MAX];
    const struct kvs_root *root;
    size_t cursor = 0;

    while ((root = kv_map_next(control->roots, &cursor)) != NULL)
        assert(kv_placement_is_row_count(root->n_rows) && root->n_sessions > 0);
    count_out(control);
    cursor = 0;
    while ((root = kv_map_next(control->roots, &cursor)) != NULL)
        assert(root->n_sessions == 0 && memcmp(root->n_since, nobody, sizeof(nobody)) == 0);
    count_in(control);
}

static void check_sessions(const struct kvs_control *control)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < control->config.sessions_max; i++) {
        const struct kvs_session *session = &control->sessions[i];

        if (!session->used) {
            assert(session->writers == NULL);
            continue;
        }
        n++;
        assert(session->index == i);
        assert(kv_map_get(control->session_of_id, &session->id) == session);
        assert(n_calls_of_session(control, session) == (session->busy ? 1u : 0u));
        assert(session->position < session->n_nodes && session->n_nodes <= KV_ROW_NODES);
        assert(session->epoch != 0);
        assert(session->tokens_max > 0 && session->shared_tokens <= session->tokens_max);
        check_log(session);
        check_writers(session->writers);
    }
    check_places(control);
    assert(n == control->n_sessions && n == kv_map_count(control->session_of_id));
    assert(atomic_load(&control->n_sessions_seen) == n);
}

/* ---- clients ----------------------------------------------------------------------------- */

static void check_client(const struct kvs_control *control,
                         const struct kvs_client_record *client)
{
    assert(client == &control->clients[client->index]);
    assert(client->credits >= control->credits_sure &&
           client->credits <= control->config.credits);
    assert(client->state != KVS_CLIENT_CLOSING || client->channel == NULL ||
           client->n_asked > 0);
    assert(client->state != KVS_CLIENT_OPENING ||
           n_calls_of_client(control, client, KV_OP_HELLO) == 1);
    assert((client->n_asked > 0) == (n_calls_of_client(control, client, KV_OP_GOODBYE) > 0));
    if (client->state != KVS_CLIENT_CLOSING)
        assert(kv_map_get(control->client_of_id, &client->id) == client);
}

static bool is_free(const struct kvs_client_record *client)
{
    return client->state == KVS_CLIENT_FREE;
}

static bool is_unwatched(const struct kvs_client_record *client)
{
    return client->state == KVS_CLIENT_OPEN && !client->attached;
}

static bool is_unclosed(const struct kvs_client_record *client)
{
    return client->state == KVS_CLIENT_CLOSING && client->n_asked == 0;
}

/* In the list are exactly the clients that belong there. */
static void check_client_list(const struct kvs_control *control,
                              struct kvs_client_record *const *list,
                              bool (*belongs)(const struct kvs_client_record *client))
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < control->config.clients_max; i++)
        n += belongs(&control->clients[i]);
    for (; *list != NULL; list = &(*list)->next, n--)
        assert(n > 0 && (*list)->link == list && belongs(*list));
    assert(n == 0);
}

static void check_clients(const struct kvs_control *control)
{
    const struct kvs_node_config *config = &control->config;
    uint32_t n_granted = config->clients_max * control->credits_sure, n_known = 0, n_open = 0;

    for (uint32_t i = 0; i < config->clients_max; i++) {
        const struct kvs_client_record *client = &control->clients[i];

        if (client->state == KVS_CLIENT_FREE) {
            assert(client->channel == NULL && client->n_asked == 0);
            continue;
        }
        check_client(control, client);
        n_granted += client->credits - control->credits_sure;
        n_known += client->state != KVS_CLIENT_CLOSING;
        n_open += client->state == KVS_CLIENT_OPEN;
    }
    assert(n_granted + control->credits_spare == kvs_node_requests_max(config));
    assert(n_known == kv_map_count(control->client_of_id));
    assert(n_open == kvs_counted(&control->stats.clients));
    check_client_list(control, &control->free_clients, is_free);
    check_client_list(control, &control->unwatched_clients, is_unwatched);
    check_client_list(control, &control->unclosed_clients, is_unclosed);
}

/* ---- prefixes ---------------------------------------------------------------------------- */

static uint32_t n_holders_of(const struct kvs_control *control, const struct kvs_prefix *prefix)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < control->config.sessions_max; i++)
        n += control->sessions[i].used && control->sessions[i].prefix == prefix;
    for (const struct kvs_control_call *call = control->calls; call != NULL;
         call = call->list_next)
        n += call->prefix == prefix;
    return n;
}

/* There may be many: those that sessions or calls have are counted, and the others have no
 * holder. */
static void check_prefixes(const struct kvs_control *control)
{
    const struct kvs_prefix *prefix;
    uint32_t n_sharing = 0, n_resting = 0;
    size_t cursor = 0;

    kvs_prefixes_check(control->prefixes);
    kvs_disk_verify_check(control);
    while ((prefix = kvs_prefixes_next(control->prefixes, &cursor)) != NULL)
        assert(prefix->n_holders == 0 || prefix->n_holders == n_holders_of(control, prefix));
    for (uint32_t i = 0; i < control->config.sessions_max; i++) {
        const struct kvs_session *session = &control->sessions[i];

        assert(session->prefix == NULL || (session->used && session->prefix->n_holders > 0));
        assert(!session->is_resting ||
               (session->prefix != NULL && session->prefix->n_resting > 0));
        n_resting += session->is_resting;
        n_sharing += session->prefix != NULL;
        assert(session->matched <= session->tokens_max);
    }
    assert(n_sharing == control->n_sharing && n_resting == control->n_resting);
}

void kvs_control_check(const struct kvs_control *control)
{
    check_prefixes(control);
    check_calls(control);
    check_models(control);
    check_sessions(control);
    check_roots(control);
    check_clients(control);
}
