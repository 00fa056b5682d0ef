/* clients.c - the clients of a node: registration, credits, and removal.
 *
 * A client is removed when it says goodbye, when its process or its channel ends, or when it
 * has been silent for too long.  Its place is free again once every data thread has closed its
 * channel.
 */
#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/store/control/control.h"

enum {
    CLOSE_AGAIN_US = 20000,
};

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

uint32_t kvs_client_grant(struct kvs_control *control)
{
    uint32_t more = control->config.credits - control->credits_sure;

    if (more > control->credits_spare)
        more = control->credits_spare;
    control->credits_spare -= more;
    return control->credits_sure + more;
}

static void client_closed(struct kvs_control_call *call)
{
    struct kvs_client_record *client = call->client;

    client->n_asked = 0;
    if (call->status == KV_OK) {
        client->state = KVS_CLIENT_FREE;
        call->control->credits_spare += client->credits - call->control->credits_sure;
    }
    kvs_control_call_end(call);
}

static void client_close(struct kvs_control *control, struct kvs_client_record *client)
{
    struct kvs_control_call *call = kvs_control_call_internal(control, KV_OP_GOODBYE);

    client->closing_us = kv_clock_now(control->config.clock);
    if (call == NULL)
        return;
    call->client = client;
    client->n_asked = control->n_threads;
    kvs_control_broadcast(
        call, &(struct kvs_command){.kind = KVS_COMMAND_CLIENT_CLOSE, .index = client->index},
        client_closed);
}

void kvs_client_remove(struct kvs_control *control, struct kvs_client_record *client)
{
    if (client->state != KVS_CLIENT_OPEN && client->state != KVS_CLIENT_OPENING)
        return;
    client->state = KVS_CLIENT_CLOSING;
    client->n_asked = 0;
    if (client->channel != NULL) {
        client->channel->ops->channel_close(client->channel);
        client->channel = NULL;
    }
    client_close(control, client);
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

    if (client != NULL)
        client->attached = true;
    return client != NULL;
}

static uint64_t client_requests(const struct kvs_control *control, uint32_t index)
{
    uint64_t requests = 0;

    for (uint32_t i = 0; i < control->n_threads; i++)
        requests += kvs_counted(&control->shard[i].clients[index].n_received);
    return requests;
}

void kvs_clients_check(struct kvs_control *control, uint64_t now_us)
{
    for (uint32_t i = 0; i < control->config.clients_max; i++) {
        struct kvs_client_record *client = &control->clients[i];

        if (client->state == KVS_CLIENT_CLOSING && client->n_asked == 0 &&
            now_us - client->closing_us > CLOSE_AGAIN_US) {
            client_close(control, client); /* its last requests may have ended since */
        } else if (client->state == KVS_CLIENT_OPEN && !client->attached) {
            uint64_t requests = client_requests(control, i);
            if (requests != client->requests_seen)
                client->heard_us = now_us;
            client->requests_seen = requests;
            /* A hello that this step answered can be later than now_us. */
            if (now_us > client->heard_us &&
                now_us - client->heard_us > control->config.client_lease_ms * UINT64_C(1000)) {
                kvs_count(&control->stats.clients_lost, 1);
                kvs_client_remove(control, client);
            }
        }
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
