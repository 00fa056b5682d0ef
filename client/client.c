/* The client: create, close, the steps of the event loop, and information about nodes. */
#include "client/client.h"

#include "client/batch.h"
#include "client/buffer.h"
#include "client/call.h"
#include "client/check.h"
#include "client/connection.h"
#include "client/control.h"
#include "client/control_message.h"
#include "client/deadlines.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/node_connect.h"
#include "client/op.h"
#include "client/request.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/progress.h"
#include "kvserver/base/random.h"
#include "kvserver/base/thread.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEADLINE_MS = 5000,
    PEER_TIMEOUT_MS = 2000,
    RETRY_MS = 1000,
    OPS_MAX = 1024,
    WAIT_CALLS_US =
        1000, /* longest sleep while a control transport has calls and cannot wake us */
    WAIT_ATTACHED_US = 10000, /* longest sleep while it only watches a node */
    WAIT_MAX_US = 1000000,
    WAIT_BLIND_US = 100, /* if the port has no descriptor to sleep on */
    CONTROL_EVERY_US = 1000,
    PROGRESS_MAX = 64,   /* progress calls of the port in one poll */
    PARTING_US = 200000, /* that a close waits for nodes at most */
    PARTING_TURN_US = 50,
};

/* What a client with a thread shows of itself: news, and copies of texts that the thread might
 * change while the caller reads them. */
struct kvc_shown {
    struct kv_signal *ended; /* kv_client_fd() */
    bool is_wanted;          /* kv_client_arm() was called: the next end raises it */
    char detail[KVC_DETAIL_BYTES];
    struct kvc_node node;
};

/* ---- create and close -------------------------------------------------------------------- */

static void destroy(struct kv_client *client)
{
    if (client->port != NULL)
        client->port->ops->port_close(client->port);
    /* The transport no longer accesses the client's memory. */
    kvc_control_message_fini(client);
    kvc_requests_fini(client);
    kvc_batches_fini(client);
    while (!kvc_list_empty(&client->buffers))
        kvc_buffer_destroy(KVC_LIST_ENTRY(client->buffers.next, struct kv_buffer, of_client));
    while (!kvc_list_empty(&client->calls)) {
        struct kvc_list *link = client->calls.next;

        kvc_list_remove(link);
        free(KVC_LIST_ENTRY(link, struct kvc_call, of_client));
    }
    while (client->free_subops != NULL) {
        struct kvc_subop *next = client->free_subops->next;

        free(client->free_subops);
        client->free_subops = next;
    }
    kv_watch_destroy(client->watch);
    if (client->shown != NULL)
        kv_signal_destroy(client->shown->ended);
    free(client->shown);
    free(client->nodes);
    free(client->map);
    for (uint32_t i = 0; client->op_pool != NULL && i < kv_pool_size(client->op_pool); i++)
        free(((struct kv_op *)kv_pool_at(client->op_pool, i))->capacity);
    kv_pool_destroy(client->op_pool);
    if (client->owns_transport)
        client->transport->ops->close(client->transport);
    kv_signal_destroy(client->woken);
    free(client);
}

static uint64_t micros(uint32_t ms, uint32_t fallback_ms)
{
    return (uint64_t)(ms > 0 ? ms : fallback_ms) * 1000;
}

/* Makes the map of nodes, and the nodes. */
static kv_status_t make_nodes(struct kv_client *client, const struct kvc_client_setup *setup)
{
    struct kv_member *members = calloc(setup->n_nodes, sizeof(*members));
    kv_status_t status = KV_NO_MEMORY;

    client->nodes = calloc(setup->n_nodes, sizeof(*client->nodes));
    if (members == NULL || client->nodes == NULL)
        goto out;
    for (uint32_t i = 0; i < setup->n_nodes; i++)
        members[i] = (struct kv_member){.name = setup->nodes[i].name,
                                        .address = setup->nodes[i].address,
                                        .weight = setup->nodes[i].weight};
    status = kv_members_create("nodes", members, setup->n_nodes, &client->map, NULL, 0);
    if (status != KV_OK)
        goto out;
    client->n_nodes = setup->n_nodes;
    for (uint32_t i = 0; i < setup->n_nodes; i++) {
        struct kvc_node *node = &client->nodes[i];

        node->client = client;
        node->index = i;
        kvc_list_init(&node->of_calling);
        node->mode = node->first_mode = setup->nodes[i].mode;
        node->may_fall_back = setup->nodes[i].may_fall_back;
        node->address = client->map->members[i].address;
        node->listed_name = client->map->members[i].name;
    }

out:
    free(members);
    return status;
}

kv_status_t kvc_client_create(const struct kvc_client_setup *setup,
                              struct kv_client **ret_client)
{
    struct kv_client *client;
    kv_status_t status = KV_NO_MEMORY;

    if (setup->n_nodes == 0 || setup->n_nodes > KV_NODES_MAX)
        return KV_INVALID;
    client = calloc(1, sizeof(*client));
    if (client == NULL)
        return KV_NO_MEMORY;
    kvc_list_init(&client->ops);
    kvc_list_init(&client->told);
    kvc_list_init(&client->sessions);
    kvc_list_init(&client->buffers);
    kvc_list_init(&client->calls);
    kvc_list_init(&client->pending_receives);
    kvc_list_init(&client->batches);
    kvc_list_init(&client->free_batches);
    kvc_list_init(&client->collecting);
    kvc_list_init(&client->waiting);
    kvc_list_init(&client->calling);
    kvc_list_init(&client->control_messages);
    kvc_loop_init(&client->loop, setup->clock);
    client->op_events = &kvc_op_events;
    client->transport = setup->transport;
    client->open_control = setup->open_control;
    client->tenant = setup->tenant;
    if (setup->salt_bytes > 0)
        client->salt = kv_hash128(setup->salt, setup->salt_bytes);
    client->credits = setup->credits;
    client->version_max =
        setup->wire_version_max != 0 ? setup->wire_version_max : KV_WIRE_VERSION;
    client->deadline_us = micros(setup->deadline_ms, DEADLINE_MS);
    client->peer_timeout_us = micros(setup->peer_timeout_ms, PEER_TIMEOUT_MS);
    client->retry_us = micros(setup->retry_ms, RETRY_MS);
    client->polled_us = client->loop.now_us;
    snprintf(client->name, sizeof(client->name), "%s", setup->name != NULL ? setup->name : "");
    if (setup->seed != 0)
        kv_random_init(&client->random, setup->seed);
    else
        kv_random_init_secure(&client->random);
    kv_random_fill(&client->random, &client->attempts, sizeof(client->attempts));
    status = make_nodes(client, setup);
    if (status != KV_OK)
        goto err_destroy;
    status = KV_NO_MEMORY;
    client->op_pool = kv_pool_create((setup->ops_max > 0 ? setup->ops_max : OPS_MAX) + 1,
                                     sizeof(struct kv_op)); /* one for copies */
    if (client->op_pool == NULL)
        goto err_destroy;
    status = kvc_requests_init(client);
    if (status != KV_OK)
        goto err_destroy;
    status = client->transport->ops->port_open(client->transport, &kvc_client_events, client,
                                               &client->port);
    if (status != KV_OK)
        goto err_destroy;
    *ret_client = client;
    return KV_OK;

err_destroy:
    destroy(client);
    return status;
}

/* Nodes that were told goodbye stop sending and answer.  Until then their messages are taken
 * from the port's queue: what finds no room there keeps a node awake, which may then replace a
 * queue that other clients use (net/ucx/ucx_probe.c). */
static void wait_for_partings(struct kv_client *client)
{
    const uint64_t until_us = client->loop.now_us + PARTING_US;

    while (client->port->has_queue && client->n_partings > 0 &&
           client->loop.now_us < until_us) {
        if (kv_port_progress(client->port) == 0)
            kv_sleep_fds(NULL, 0, PARTING_TURN_US);
        kvc_loop_update_time(&client->loop);
        for (uint32_t i = 0; i < client->n_nodes; i++)
            if (client->nodes[i].control != NULL)
                client->nodes[i].control->transport->progress(client->nodes[i].control);
    }
}

void kv_client_close(struct kv_client *client)
{
    if (client == NULL)
        return;
    kv_progress_stop(client->progress);
    client->progress = NULL;
    kvc_client_check(client);
    client->loop.is_closing = true;
    kvc_copies_fini(&client->copies);
    for (uint32_t i = 0; i < kv_pool_size(client->op_pool); i++) {
        struct kv_op *op = kv_pool_at(client->op_pool, i);

        if (op->is_in_use)
            kv_op_free(op);
    }
    while (!kvc_list_empty(&client->sessions))
        kv_session_free(KVC_LIST_ENTRY(client->sessions.next, struct kv_session, of_client));
    for (uint32_t i = 0; i < client->n_nodes; i++) {
        struct kvc_node *node = &client->nodes[i];

        if (node->state == KVC_NODE_CONNECTED && node->failure == KV_OK)
            kvc_node_goodbye(node);
    }
    wait_for_partings(client);
    for (uint32_t i = 0; i < client->n_nodes; i++)
        kvc_node_close(&client->nodes[i]);
    destroy(client);
}

/* ---- the event loop ---------------------------------------------------------------------- */

/* Lets the control transports work that have calls, and now and then those that watch the
 * client. */
static unsigned progress_controls(struct kv_client *client)
{
    struct kvc_list *link, *follow;
    unsigned n = 0;

    KVC_LIST_EACH(link, follow, &client->calling)
    {
        struct kvc_node *node = KVC_LIST_ENTRY(link, struct kvc_node, of_calling);

        if (node->control != NULL)
            n += node->control->transport->progress(node->control);
    }
    if (client->n_attached == 0 || client->loop.now_us - client->attached_us < CONTROL_EVERY_US)
        return n;
    client->attached_us = client->loop.now_us;
    for (uint32_t i = 0; i < client->n_nodes; i++) {
        struct kvc_node *node = &client->nodes[i];

        if (node->has_attached && node->n_calls == 0)
            n += node->control->transport->progress(node->control);
    }
    return n;
}

void kvc_client_step(struct kv_client *client)
{
    kvc_loop_update_time(&client->loop);
    kvc_client_forgive(client);
    for (unsigned i = 0; i < PROGRESS_MAX; i++)
        if (kv_port_progress(client->port) > 0)
            client->moved_us = client->loop.now_us;
        else
            break;
    (void)progress_controls(client);
    if (client->loop.now_us >= client->loop.next_due_us)
        kvc_client_timers(client);
    kvc_client_dispatch(client);
}

static void move_on(struct kv_client *client)
{
    kvc_client_step(client);
    kvc_nodes_step(client);
    kvc_client_dispatch(client);
    if (client->copies.first != NULL)
        client->copies.step(client);
}

unsigned kv_poll(struct kv_client *client)
{
    KVC_ENTER(client);
    unsigned n_ended;

    if (client->loop.untold[0] != '\0')
        memcpy(client->loop.detail, client->loop.untold, sizeof(client->loop.detail));
    client->loop.untold[0] = '\0';
    move_on(client);
    if (client->progress != NULL)
        kv_progress_moved(client->progress);
    n_ended = client->loop.n_ended;
    client->loop.n_ended = 0;
    return n_ended;
}

/* Prepares to sleep: finds out for how long, and what ends the sleep before.  Returns false if there
 * is something to do first.
 *   ret_fds  (2) of the port and of calls; -1: none */
static bool
arm(struct kv_client *client, uint64_t until_us, int ret_fds[2], uint64_t *ret_wait_us)
{
    uint64_t now_us = kv_clock_now(client->loop.clock);
    uint64_t wake_us =
        until_us < client->loop.next_due_us ? until_us : client->loop.next_due_us;
    uint64_t wait_us = wake_us > now_us ? wake_us - now_us : 0;
    const bool has_calls = !kvc_list_empty(&client->calling);

    ret_fds[0] = ret_fds[1] = -1;
    if (wait_us > WAIT_MAX_US)
        wait_us = WAIT_MAX_US;
    if (has_calls && client->woken != NULL) {
        /* What ended before this is seen now, what ends after it ends the sleep. */
        kv_signal_clear(client->woken);
        if (progress_controls(client) > 0)
            return false;
        ret_fds[1] = kv_signal_fd(client->woken);
    } else if (has_calls && wait_us > WAIT_CALLS_US) {
        wait_us = WAIT_CALLS_US;
    }
    if (client->n_attached > 0 && wait_us > WAIT_ATTACHED_US)
        wait_us = WAIT_ATTACHED_US;
    if (wait_us == 0 || client->n_failed > 0 || client->loop.must_dispatch ||
        client->port->ops->port_arm(client->port, &ret_fds[0]) != KV_OK)
        return false;
    if (ret_fds[0] < 0 && wait_us > WAIT_BLIND_US)
        wait_us = WAIT_BLIND_US;
    *ret_wait_us = wait_us;
    return true;
}

void kvc_client_wait_for_event(struct kv_client *client, uint64_t until_us)
{
    uint64_t wait_us;
    int fds[2];

    if (!arm(client, until_us, fds, &wait_us))
        return;
    kv_sleep_fds(fds, 2, wait_us);
    /* Messages of nodes would have ended the sleep, so the time counts as polled. */
    client->polled_us = kv_clock_now(client->loop.clock);
}

/* Whether an operation has ended that the user has not been told of. */
static bool has_news(const struct kv_client *client)
{
    return client->loop.n_ended > 0 || !kvc_list_empty(&client->told);
}

/* kv_client_arm() where the thread sees to everything else. */
static bool arm_for_ends(struct kv_client *client, uint64_t *ret_timeout_us)
{
    kv_signal_clear(client->shown->ended);
    if (has_news(client))
        return false;
    client->shown->is_wanted = true;
    *ret_timeout_us = WAIT_MAX_US;
    kv_progress_hand_over(client->progress);
    return true;
}

bool kv_client_arm(struct kv_client *client, uint64_t *ret_timeout_us)
{
    KVC_LOOK(client);
    bool is_watched = true;
    int fds[2];

    *ret_timeout_us = 0;
    if (client->progress != NULL)
        return arm_for_ends(client, ret_timeout_us);
    /* Nobody else clears it when the last call has ended. */
    if (client->watch != NULL && client->woken != NULL && kvc_list_empty(&client->calling))
        kv_signal_clear(client->woken);
    if (!kvc_list_empty(&client->told) || !arm(client, UINT64_MAX, fds, ret_timeout_us))
        return false;
    /* Somebody else sleeps now, for as long at most, and nodes' messages end that. */
    client->polled_us = kv_clock_now(client->loop.clock);
    for (unsigned i = 0; i < 2; i++)
        if (fds[i] >= 0)
            is_watched =
                client->watch != NULL && kv_watch_add(client->watch, fds[i]) && is_watched;
    if (!is_watched && *ret_timeout_us > WAIT_BLIND_US)
        *ret_timeout_us = WAIT_BLIND_US;
    return true;
}

int kv_client_fd(struct kv_client *client)
{
    KVC_LOOK(client);

    if (client->progress != NULL)
        return kv_signal_fd(client->shown->ended);
    if (client->watch == NULL)
        client->watch = kv_watch_create();
    return client->watch != NULL ? kv_watch_fd(client->watch) : -1;
}

struct kv_op *kv_client_next_ended(struct kv_client *client)
{
    KVC_LOOK(client);
    struct kv_op *op;

    if (kvc_list_empty(&client->told))
        return NULL;
    op = KVC_LIST_ENTRY(client->told.next, struct kv_op, of_told);
    kvc_list_remove(&op->of_told);
    return op;
}

/* A step of the thread, which has nobody to tell of ends: they count for the user's next
 * poll. */
static bool step_alone(void *arg, int *ret_fds, uint64_t *ret_wait_us)
{
    struct kv_client *client = arg;
    bool may_sleep;

    /* Messages of nodes would have ended its sleep, so the time counts as polled. */
    client->polled_us = kv_clock_now(client->loop.clock);
    client->loop.is_unwatched = true;
    move_on(client);
    may_sleep = arm(client, UINT64_MAX, ret_fds, ret_wait_us);
    client->loop.is_unwatched = false;
    if (client->shown->is_wanted && has_news(client)) {
        client->shown->is_wanted = false;
        kv_signal_raise(client->shown->ended);
    }
    return may_sleep;
}

kv_status_t kvc_client_start_thread(struct kv_client *client, char *detail, size_t detail_bytes)
{
    kv_status_t status = KV_NO_MEMORY;

    if (client->loop.clock != &kv_clock_real) {
        snprintf(detail, detail_bytes, "progress_thread: not on the clock \"%s\"",
                 client->loop.clock->name);
        return KV_UNSUPPORTED;
    }
    client->shown = calloc(1, sizeof(*client->shown));
    if (client->shown != NULL) {
        client->shown->ended = kv_signal_create();
        status = client->shown->ended == NULL
                     ? KV_IO
                     : kv_progress_start("kvclient", step_alone, client, &client->progress);
    }
    if (status != KV_OK)
        snprintf(detail, detail_bytes,
                 "progress_thread: %s: no memory, thread or descriptor for it",
                 kv_status_name(status));
    return status;
}

static unsigned wait(struct kv_client *client, const struct kv_op *op, uint64_t until_us)
{
    unsigned n_ended = kv_poll(client);
    const uint64_t begun_us = client->loop.now_us;
    uint64_t idle_us = begun_us; /* since when nothing has moved, and nobody has slept */
    bool has_waited = false;

    while (op != NULL ? op->stage != KVC_STAGE_ENDED : n_ended == 0) {
        const uint64_t now_us = client->loop.now_us;
        const uint64_t spin_us = kv_idle_spin_us(&client->idle, now_us);
        const uint64_t least_us = spin_us < KV_IDLE_LEAST_US ? spin_us : KV_IDLE_LEAST_US;

        if (now_us >= until_us)
            return n_ended;
        if (client->moved_us > idle_us)
            idle_us = client->moved_us;
        if (now_us - idle_us < least_us || now_us - begun_us < spin_us) {
            kv_relax();
        } else {
            kvc_client_wait_for_event(client, until_us);
            idle_us = client->polled_us;
        }
        n_ended += kv_poll(client);
        has_waited = true;
    }
    if (has_waited)
        kv_idle_came(&client->idle, client->loop.now_us - begun_us);
    return n_ended;
}

unsigned kv_client_wait(struct kv_client *client, uint64_t timeout_us)
{
    KVC_ENTER(client);
    uint64_t now_us = kv_clock_now(client->loop.clock);

    return wait(client, NULL,
                timeout_us < UINT64_MAX - now_us ? now_us + timeout_us : UINT64_MAX);
}

kv_status_t kv_wait(struct kv_op *op)
{
    KVC_ENTER(op->client);

    (void)wait(op->client, op, UINT64_MAX);
    /* Another one may have failed since this one did. */
    if (op->status != KV_OK)
        memcpy(op->client->loop.detail, op->detail, sizeof(op->detail));
    return op->status;
}

kv_status_t kv_finish(struct kv_op *op)
{
    KVC_ENTER(op->client);
    kv_status_t status = kv_wait(op);

    kv_op_free(op);
    return status;
}

/* ---- information ------------------------------------------------------------------------- */

uint64_t kv_client_now_us(const struct kv_client *client)
{
    return kv_clock_now(client->loop.clock);
}

const char *kv_client_detail(const struct kv_client *client)
{
    KVC_LOOK(client);

    if (client->shown == NULL)
        return client->loop.detail;
    memcpy(client->shown->detail, client->loop.detail, sizeof(client->loop.detail));
    return client->shown->detail;
}

uint32_t kv_client_n_nodes(const struct kv_client *client)
{
    return client->n_nodes;
}

void kv_client_node(const struct kv_client *client,
                    uint32_t node_index,
                    struct kv_node_info *ret_info)
{
    KVC_LOOK(client);
    const struct kvc_node *node = &client->nodes[node_index < client->n_nodes ? node_index : 0];

    if (client->shown != NULL) {
        client->shown->node = *node;
        node = &client->shown->node;
    }
    *ret_info = (struct kv_node_info){
        .address = node->address,
        .name = node->name,
        .transport = node->transport,
        .transports = node->transports,
        .state = node->state == KVC_NODE_CONNECTED ? KV_NODE_CONNECTED
                 : node->has_connected             ? KV_NODE_LOST
                                                   : KV_NODE_UNREACHED,
        .detail = node->failure_text,
        .n_threads = node->n_connections,
        .memory_bytes = node->memory_bytes,
        .requests = node->requests,
        .rows_in = node->rows_in,
        .rows_out = node->rows_out,
        .reconnects = node->reconnects,
    };
}

/* Returns what a block's name has of the keys that apply to its tokens. */
static struct kv_id128
extra_of(const struct kv_extra_key *keys, uint32_t n_keys, uint32_t first_token)
{
    struct kv_id128 extra = {{0}};

    for (uint32_t i = 0; i < n_keys; i++) {
        const uint64_t begin = keys[i].first_token, end = begin + keys[i].n_tokens;

        if (begin < (uint64_t)first_token + KV_BLOCK_TOKENS && end > first_token)
            extra = kv_block_extra(&extra, (int64_t)begin - first_token, keys[i].bytes,
                                   keys[i].n_bytes);
    }
    return extra;
}

void kv_prompt_names(const struct kv_client *client,
                     const struct kv_model_info *model,
                     const uint32_t *tokens,
                     uint32_t n_tokens,
                     const struct kv_extra_key *keys,
                     uint32_t n_keys,
                     struct kv_id128 *ret_names)
{
    static const struct kv_id128 none; /* before the first block */

    for (uint32_t i = 0; i < n_tokens / KV_BLOCK_TOKENS; i++) {
        const struct kv_id128 extra = extra_of(keys, n_keys, i * KV_BLOCK_TOKENS);

        ret_names[i] =
            kv_block_name(i > 0 ? &ret_names[i - 1] : &none, &model->fingerprint, &client->salt,
                          &extra, tokens + (size_t)i * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS);
    }
}

const char *kv_client_version(void)
{
    return KV_VERSION_TEXT;
}
