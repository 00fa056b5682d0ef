/* clients.c - the clients of a node: who they are, what they are granted, and when they go.
 *
 * A client goes when it says so, when its process or its channel does, or when nothing was heard
 * of it for too long.  Its place is free again once every data thread has closed its channel.
 */
#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/store/control/control.h"

enum {
    CLOSE_AGAIN_US = 20000,
};

struct kv_client_record *
kv_client_of(struct kv_node *node, uint32_t index, const struct kv_id128 *token)
{
    if (token == NULL || index >= node->config.clients_max)
        return NULL;
    struct kv_client_record *client = &node->clients[index];
    if (client->state != KV_CLIENT_OPEN || !kv_token_equal(&client->token, token))
        return NULL;
    return client;
}

uint32_t kv_client_grant(struct kv_node *node)
{
    uint32_t more = node->config.credits - node->credits_sure;

    if (more > node->credits_spare)
        more = node->credits_spare;
    node->credits_spare -= more;
    return node->credits_sure + more;
}

static void client_closed(struct kv_control_call *call)
{
    struct kv_client_record *client = call->client;

    client->n_asked = 0;
    if (call->status == KV_OK) {
        client->state = KV_CLIENT_FREE;
        call->node->credits_spare += client->credits - call->node->credits_sure;
    }
    kv_control_call_end(call);
}

static void client_close(struct kv_node *node, struct kv_client_record *client)
{
    struct kv_control_call *call = kv_control_call_internal(node, KV_OP_GOODBYE);

    client->closing_us = kv_clock_now(node->config.clock);
    if (call == NULL)
        return;
    call->client = client;
    client->n_asked = node->n_threads;
    kv_control_ask(call,
                   &(struct kv_command){.kind = KV_COMMAND_PEER_CLOSE, .index = client->index},
                   client_closed);
}

void kv_client_remove(struct kv_node *node, struct kv_client_record *client)
{
    if (client->state != KV_CLIENT_OPEN && client->state != KV_CLIENT_OPENING)
        return;
    client->state = KV_CLIENT_CLOSING;
    client->n_asked = 0;
    if (client->channel != NULL) {
        client->channel->row->channel_close(client->channel);
        client->channel = NULL;
    }
    client_close(node, client);
}

void kv_node_client_gone(struct kv_node *node,
                         uint32_t client_index,
                         const struct kv_id128 *client_token)
{
    struct kv_client_record *client = kv_client_of(node, client_index, client_token);

    if (client == NULL)
        return;
    kv_count(&node->stats.clients_gone, 1);
    kv_log(KV_LOG_DEBUG, "client gone: %s", client->name);
    kv_client_remove(node, client);
}

bool kv_node_client_known(struct kv_node *node,
                          uint32_t client_index,
                          const struct kv_id128 *client_token)
{
    struct kv_client_record *client = kv_client_of(node, client_index, client_token);

    if (client != NULL)
        client->attached = true;
    return client != NULL;
}

static uint64_t client_requests(const struct kv_node *node, uint32_t index)
{
    uint64_t requests = 0;

    for (uint32_t i = 0; i < node->n_threads; i++)
        requests += kv_counted(&node->data[i].peers[index].requests);
    return requests;
}

void kv_clients_check(struct kv_node *node, uint64_t now_us)
{
    for (uint32_t i = 0; i < node->config.clients_max; i++) {
        struct kv_client_record *client = &node->clients[i];

        if (client->state == KV_CLIENT_CLOSING && client->n_asked == 0 &&
            now_us - client->closing_us > CLOSE_AGAIN_US) {
            client_close(node, client); /* what it had under way may have ended by now */
        } else if (client->state == KV_CLIENT_OPEN && !client->attached) {
            uint64_t requests = client_requests(node, i);
            if (requests != client->requests_seen)
                client->heard_us = now_us;
            client->requests_seen = requests;
            /* A hello answered in this very step is younger than the step. */
            if (now_us > client->heard_us &&
                now_us - client->heard_us > node->config.client_lease_ms * UINT64_C(1000)) {
                kv_count(&node->stats.clients_gone, 1);
                kv_client_remove(node, client);
            }
        }
    }
}

void kv_client_stuck(struct kv_node *node, const struct kv_command *notice)
{
    struct kv_client_record *client = &node->clients[notice->index];

    if (client->state == KV_CLIENT_OPEN && kv_token_equal(&client->token, &notice->token)) {
        kv_count(&node->stats.clients_gone, 1);
        kv_log(KV_LOG_INFO, "client lost: %s: its channel failed or it took no replies",
               client->name);
        kv_client_remove(node, client);
    }
}
