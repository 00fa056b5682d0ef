/* clients.c - the clients of a node: registration, credits, and removal.
 *
 * A client is removed when it says goodbye, when its process or its channel ends, or when it
 * has been silent for too long.  Its place is free again once every data thread has closed its
 * channel.
 */
#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/store/control/control.h"

#include <stdlib.h>

enum {
    CLOSE_AGAIN_US = 20000,
};

/* ---- places and lists -------------------------------------------------------------------- */

static void list_add(struct kvs_client_record **list, struct kvs_client_record *client)
{
    client->next = *list;
    client->link = list;
    if (client->next != NULL)
        client->next->link = &client->next;
    *list = client;
}

/* Takes the client out of its list, if it is in any. */
static void list_remove(struct kvs_client_record *client)
{
    if (client->link == NULL)
        return;
    *client->link = client->next;
    if (client->next != NULL)
        client->next->link = client->link;
    client->next = NULL;
    client->link = NULL;
}

bool kvs_clients_init(struct kvs_control *control, uint64_t secret)
{
    const uint32_t n = control->config.clients_max;

    control->clients = calloc(n, sizeof(*control->clients));
    control->client_of_id = kv_map_create(secret);
    if (control->clients == NULL || control->client_of_id == NULL)
        return false;
    for (uint32_t i = n; i-- > 0;)
        list_add(&control->free_clients, &control->clients[i]);
    return true;
}

void kvs_clients_fini(struct kvs_control *control)
{
    free(control->clients);
    kv_map_destroy(control->client_of_id);
}

kv_status_t kvs_client_create(struct kvs_control *control,
                              const struct kv_id128 *id,
                              struct kvs_client_record **ret_client)
{
    struct kvs_client_record *client = control->free_clients;

    if (client == NULL)
        return KV_BUSY;
    if (!kv_map_set(control->client_of_id, id, client))
        return KV_NO_MEMORY;
    list_remove(client);
    *client = (struct kvs_client_record){
        .state = KVS_CLIENT_OPENING,
        .index = (uint32_t)(client - control->clients),
        .id = *id,
        .since_us = kv_clock_now(control->config.clock),
    };
    kv_random_fill(&control->random, &client->token, sizeof(client->token));
    client->credits = kvs_client_grant(control);
    *ret_client = client;
    return KV_OK;
}

/* Adds to the number of open clients, for metrics. */
static void count_open(struct kvs_control *control, int change)
{
    _Atomic uint64_t *clients = &control->stats.clients;

    kvs_stat_set(clients, kvs_counted(clients) + (uint64_t)change);
}

void kvs_client_opened(struct kvs_control *control, struct kvs_client_record *client)
{
    client->state = KVS_CLIENT_OPEN;
    count_open(control, 1);
    client->heard_us = kv_clock_now(control->config.clock);
    list_add(&control->unwatched_clients, client);
}

struct kvs_client_record *kvs_client_by_id(struct kvs_control *control,
                                           const struct kv_id128 *id)
{
    return kv_map_get(control->client_of_id, id);
}

struct kvs_client_record *
kvs_client_of(struct kvs_control *control, uint32_t index, const struct kv_id128 *token)
{
    if (token == NULL || index >= control->config.clients_max)
        return NULL;
    struct kvs_client_record *client = &control->clients[index];
    if (client->state != KVS_CLIENT_OPEN || !kv_token_equal(&client->token, token))
        return NULL;
    return client;
}

struct kv_channel *kvs_client_channel(const struct kvs_control *control,
                                      uint32_t index,
                                      const struct kv_id128 *token)
{
    if (index >= control->config.clients_max ||
        !kv_token_equal(&control->clients[index].token, token))
        return NULL;
    return control->clients[index].channel;
}

/* ---- credits and removal ----------------------------------------------------------------- */

uint32_t kvs_client_grant(struct kvs_control *control)
{
    uint32_t more = control->config.credits - control->credits_sure;

    if (more > control->credits_spare)
        more = control->credits_spare;
    control->credits_spare -= more;
    return control->credits_sure + more;
}

static void close_channel(struct kvs_client_record *client)
{
    if (client->channel != NULL)
        client->channel->ops->channel_close(client->channel);
    client->channel = NULL;
}

static void client_closed(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;
    struct kvs_client_record *client = call->client;
    const bool is_over = call->status == KV_OK;

    client->n_asked = 0;
    if (call->reply != NULL)
        kvs_call_reply_ok(call);
    else
        kvs_control_call_end(call);
    close_channel(client); /* which may have carried the reply */
    if (is_over) {
        client->state = KVS_CLIENT_FREE;
        control->credits_spare += client->credits - control->credits_sure;
    }
    list_add(is_over ? &control->free_clients : &control->unclosed_clients, client);
}

/* The call ends when every data thread has closed its channel to the client. */
static void client_close(struct kvs_client_record *client, struct kvs_control_call *call)
{
    list_remove(client);
    call->client = client;
    client->n_asked = call->control->n_threads;
    kvs_control_broadcast(
        call, &(struct kvs_command){.kind = KVS_COMMAND_CLIENT_CLOSE, .index = client->index},
        client_closed);
}

/* As client_close(), where nobody waits for a reply. */
static void client_close_itself(struct kvs_control *control, struct kvs_client_record *client)
{
    struct kvs_control_call *call = kvs_control_call_internal(control, KV_OP_GOODBYE);

    client->closing_us = kv_clock_now(control->config.clock);
    if (call != NULL)
        client_close(client, call);
}

/* It is known no more. */
static void forget(struct kvs_control *control, struct kvs_client_record *client)
{
    if (client->state == KVS_CLIENT_OPEN)
        count_open(control, -1);
    client->state = KVS_CLIENT_CLOSING;
    client->n_asked = 0;
    client->closing_us = kv_clock_now(control->config.clock);
    kv_map_remove(control->client_of_id, &client->id);
    list_remove(client);
    list_add(&control->unclosed_clients, client);
}

void kvs_client_part(struct kvs_client_record *client, struct kvs_control_call *goodbye)
{
    forget(goodbye->control, client);
    client_close(client, goodbye);
}

void kvs_client_remove(struct kvs_control *control, struct kvs_client_record *client)
{
    if (client->state != KVS_CLIENT_OPEN && client->state != KVS_CLIENT_OPENING)
        return;
    forget(control, client);
    close_channel(client);
    client_close_itself(control, client);
}

void kvs_control_client_gone(struct kvs_control *control,
                             uint32_t client_index,
                             const struct kv_id128 *client_token)
{
    struct kvs_client_record *client = kvs_client_of(control, client_index, client_token);

    if (client == NULL)
        return;
    kvs_count(&control->stats.clients_lost, 1);
    kv_log(KV_LOG_DEBUG, "client gone: %s", client->name);
    kvs_client_remove(control, client);
}

bool kvs_control_attach_client(struct kvs_control *control,
                               uint32_t client_index,
                               const struct kv_id128 *client_token)
{
    struct kvs_client_record *client = kvs_client_of(control, client_index, client_token);

    if (client == NULL)
        return false;
    client->attached = true;
    list_remove(client);
    return true;
}

static uint64_t client_requests(const struct kvs_control *control, uint32_t index)
{
    uint64_t requests = 0;

    for (uint32_t i = 0; i < control->n_threads; i++)
        requests += kvs_counted(&control->shard[i].clients[index].n_received);
    return requests;
}

/* Removes a client that has been silent for too long. */
static void
check_silence(struct kvs_control *control, struct kvs_client_record *client, uint64_t now_us)
{
    const uint64_t requests = client_requests(control, client->index);

    if (requests != client->requests_seen)
        client->heard_us = now_us;
    client->requests_seen = requests;
    /* A hello that this step answered can be later than now_us. */
    if (now_us <= client->heard_us ||
        now_us - client->heard_us <= control->config.client_lease_ms * UINT64_C(1000))
        return;
    kvs_count(&control->stats.clients_lost, 1);
    kvs_client_remove(control, client);
}

void kvs_clients_check(struct kvs_control *control, uint64_t now_us)
{
    struct kvs_client_record *client, *next;

    for (client = control->unclosed_clients; client != NULL; client = next) {
        next = client->next;
        if (now_us - client->closing_us > CLOSE_AGAIN_US)
            client_close_itself(control, client); /* its last requests may have ended */
    }
    for (client = control->unwatched_clients; client != NULL; client = next) {
        next = client->next;
        check_silence(control, client, now_us);
    }
}

void kvs_client_stuck(struct kvs_control *control, const struct kvs_command *notice)
{
    struct kvs_client_record *client = &control->clients[notice->index];

    if (client->state == KVS_CLIENT_OPEN && kv_token_equal(&client->token, &notice->token)) {
        kvs_count(&control->stats.clients_lost, 1);
        kv_log(KV_LOG_INFO, "client lost: %s: channel failed or replies not received",
               client->name);
        kvs_client_remove(control, client);
    }
}
