#include "client/node_connect.h"

#include "client/batch.h"
#include "client/call.h"
#include "client/connection.h"
#include "client/control.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/peer.h"
#include "client/request.h"
#include "client/state.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/random.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BULK_BYTES_LEAST = 64 << 10, /* minimum of the protocol */
};

/* ---- connecting -------------------------------------------------------------------------- */

static void attach_lost(void *arg)
{
    struct kvc_node *node = arg;

    if (node->state == KVC_NODE_CONNECTED)
        kvc_node_fail(node, KV_UNREACHABLE, "the node stopped or its connection was lost");
}

static bool is_spoken(const struct kvc_node *node, uint32_t version)
{
    return version >= KV_WIRE_VERSION_LEAST && version <= node->client->version_max;
}

static const char *reply_fault(const Kvpb__HelloReply *reply)
{
    if (reply->client_token.len != 16 || reply->node_id.len != 16)
        return "hello: an id is not 16 bytes";
    if (reply->n_addresses == 0 || reply->n_addresses > KV_THREADS_MAX)
        return "hello: number of data threads out of bounds";
    for (size_t i = 0; i < reply->n_addresses; i++)
        if (reply->addresses[i].len == 0 || reply->addresses[i].len > KV_WIRE_ADDRESS_MAX)
            return "hello: address of a data thread out of bounds";
    if (reply->credits == 0)
        return "hello: no credits";
    if (reply->bulk_bytes_max < BULK_BYTES_LEAST)
        return "hello: bulk_bytes_max out of bounds";
    return NULL;
}

static void set_attached(struct kvc_node *node, bool has_attached)
{
    if (has_attached && !node->has_attached)
        node->client->n_attached++;
    else if (!has_attached && node->has_attached)
        node->client->n_attached--;
    node->has_attached = has_attached;
}

static void free_connections(struct kvc_node *node)
{
    for (uint32_t i = 0; i < node->n_connections; i++) {
        struct kv_channel *channel = node->connections[i].channel;

        /* else client->waiting had it */
        assert(kvc_list_empty(&node->connections[i].of_waiting));
        if (channel != NULL)
            channel->ops->channel_close(channel);
    }
    free(node->connections);
    node->connections = NULL;
    node->n_connections = 0;
}

static kv_status_t make_connections(struct kvc_node *node, const Kvpb__HelloReply *reply)
{
    struct kv_port *port = node->client->port;
    kv_status_t status = KV_OK;

    node->connections = calloc(reply->n_addresses, sizeof(*node->connections));
    if (node->connections == NULL)
        return KV_NO_MEMORY;
    node->n_connections = (uint32_t)reply->n_addresses;
    for (uint32_t i = 0; i < node->n_connections; i++)
        kvc_connection_init(&node->connections[i], node);
    for (uint32_t i = 0; i < node->n_connections && status == KV_OK; i++)
        status = port->ops->connect(port, reply->addresses[i].data, reply->addresses[i].len,
                                    node->mode, &node->connections[i].link,
                                    &node->connections[i].channel);
    return status;
}

static void store_hello_reply(struct kvc_node *node, const Kvpb__HelloReply *reply)
{
    struct kv_client *client = node->client;

    node->version = reply->version;
    node->client_index = reply->client_index;
    memcpy(node->client_token.bytes, reply->client_token.data, 16);
    node->credits = reply->credits;
    if (node->credits > KV_CREDITS_MAX)
        node->credits = KV_CREDITS_MAX;
    if (client->credits > 0 && node->credits > client->credits)
        node->credits = client->credits;
    node->bulk_bytes_max =
        reply->bulk_bytes_max < KV_WIRE_BULK_MAX ? reply->bulk_bytes_max : KV_WIRE_BULK_MAX;
    node->memory_bytes = reply->memory_bytes;
    snprintf(node->name, sizeof(node->name), "%s", reply->node);
    snprintf(node->transports, sizeof(node->transports), "%s", reply->transports);
    kvc_peer_name(node->name);
    kvc_peer_name(node->transports);
}

/* Stores the node's id.  If it has changed, the node has restarted and has no sessions. */
static void keep_id(struct kvc_node *node, const Kvpb__HelloReply *reply)
{
    if (!node->has_connected || memcmp(node->node_id.bytes, reply->node_id.data, 16) != 0)
        node->incarnation++;
    memcpy(node->node_id.bytes, reply->node_id.data, 16);
}

static void parted(
    void *arg, kv_status_t status, const uint8_t *reply, size_t reply_bytes, const char *detail)
{
    struct kv_client *client = arg;

    client->n_partings--;
    (void)status;
    (void)reply;
    (void)reply_bytes;
    (void)detail;
}

void kvc_node_goodbye(struct kvc_node *node)
{
    Kvpb__GoodbyeRequest request = KVPB__GOODBYE_REQUEST__INIT;
    uint8_t packed[64];

    request.client_index = node->client_index;
    request.client_token.data = node->client_token.bytes;
    request.client_token.len = sizeof(node->client_token.bytes);
    if (kvpb__goodbye_request__get_packed_size(&request) > sizeof(packed))
        return;
    if (node->control->transport->call(
            node->control, KV_OP_GOODBYE, packed, kvpb__goodbye_request__pack(&request, packed),
            node->client->peer_timeout_us, parted, node->client) == KV_OK)
        node->client->n_partings++;
}

/* Returns another entry of the list with the same node, or NULL. */
static const struct kvc_node *twin_of(const struct kvc_node *node,
                                      const Kvpb__HelloReply *reply)
{
    const struct kv_client *client = node->client;

    for (uint32_t i = 0; i < client->n_nodes; i++) {
        const struct kvc_node *other = &client->nodes[i];

        if (other != node && other->state == KVC_NODE_CONNECTED &&
            memcmp(other->node_id.bytes, reply->node_id.data, 16) == 0)
            return other;
    }
    return NULL;
}

/* Checks that the node is the one in the list.  Returns false after saying why it is not. */
static bool check_identity(struct kvc_node *node, const Kvpb__HelloReply *reply)
{
    const struct kvc_node *twin = twin_of(node, reply);
    char text[240];

    if (twin != NULL)
        snprintf(text, sizeof(text), "hello: twice in the list: the same node as %.120s",
                 twin->address);
    else if (node->listed_name[0] != '\0' && strcmp(node->listed_name, reply->node) != 0)
        snprintf(text, sizeof(text), "hello: the list calls it %.80s, it calls itself %.80s",
                 node->listed_name, node->name);
    else
        return true;
    kvc_node_goodbye(node);
    kvc_node_fail(node, KV_INVALID, text);
    return false;
}

/* Reconnects over the network: the node is on this host, but its shared memory is not
 * accessible (another user or container). */
static void try_network(struct kvc_node *node)
{
    free_connections(node);
    node->mode = KV_CHANNEL_NETWORK;
    node->state = KVC_NODE_IDLE;
    kvc_node_connect(node);
}

static void connected(struct kvc_node *node)
{
    struct kv_channel *channel = node->connections[0].channel;

    channel->ops->channel_describe(channel, node->transport, sizeof(node->transport));
    node->reconnects += node->has_connected;
    node->has_connected = true;
    set_attached(node, node->control->transport->attach != NULL);
    node->unanswered_since_us = 0;
    node->last_failure = KV_OK;
    node->failure_text[0] = '\0';
    node->state = KVC_NODE_CONNECTED;
    node->client->loop.must_dispatch = true;
}

static void hello_done(struct kvc_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const Kvpb__HelloReply *reply = (const Kvpb__HelloReply *)message;
    struct kvc_node *node = call->node;
    char text[200];
    const char *fault;

    if (node->state != KVC_NODE_CONNECTING)
        return;
    if (status == KV_UNREACHABLE && node->mode == KV_CHANNEL_SHARED && node->may_fall_back &&
        message != NULL) {
        try_network(node);
        return;
    }
    if (status != KV_OK) {
        snprintf(text, sizeof(text), "hello: %s%s%s", kv_status_name(status),
                 detail[0] != 0 ? ": " : "", detail);
        kvc_node_fail(node, status == KV_DEADLINE ? KV_UNREACHABLE : status, text);
        return;
    }
    if (!is_spoken(node, reply->version)) {
        snprintf(text, sizeof(text),
                 "hello: the node speaks protocol version %u, the client %u to %u",
                 reply->version, KV_WIRE_VERSION_LEAST, node->client->version_max);
        kvc_node_fail(node, KV_VERSION, text);
        return;
    }
    fault = reply_fault(reply);
    if (fault != NULL) {
        kvc_node_fail(node, KV_CORRUPT, fault);
        return;
    }
    store_hello_reply(node, reply);
    if (!check_identity(node, reply))
        return;
    keep_id(node, reply);
    status = make_connections(node, reply);
    if (status == KV_UNREACHABLE && node->mode == KV_CHANNEL_SHARED && node->may_fall_back) {
        kvc_node_goodbye(node);
        try_network(node);
        return;
    }
    if (status == KV_OK && node->control->transport->attach != NULL)
        status = node->control->transport->attach(node->control, node->client_index,
                                                  &node->client_token, attach_lost, node);
    if (status != KV_OK) {
        snprintf(
            text, sizeof(text), "connecting to its data threads: %s%s", kv_status_name(status),
            node->mode == KV_CHANNEL_SHARED ? ": over shared memory: another user or container?"
                                            : "");
        kvc_node_fail(node, KV_UNREACHABLE, text);
        return;
    }
    connected(node);
}

void kvc_node_connect(struct kvc_node *node)
{
    struct kv_client *client = node->client;
    Kvpb__HelloRequest request = KVPB__HELLO_REQUEST__INIT;
    const void *address;
    size_t address_bytes;
    kv_status_t status = KV_OK;

    /* A recorded failure is handled first, so that the waiting operation is told. */
    if (node->state != KVC_NODE_IDLE || node->failure != KV_OK)
        return;
    node->state = KVC_NODE_CONNECTING;
    if (node->control == NULL)
        status = client->open_control(client, node->index, node->address, &node->control);
    if (status != KV_OK) {
        kvc_node_fail(node, status, "cannot open a connection to this address");
        return;
    }
    client->port->ops->port_address(client->port, &address, &address_bytes);
    request.version = client->version_max;
    request.version_least = KV_WIRE_VERSION_LEAST;
    request.name = client->name;
    request.address.data = (uint8_t *)address;
    request.address.len = address_bytes;
    request.shared_memory = node->mode == KV_CHANNEL_SHARED;
    request.tenant = client->tenant;
    kv_random_fill(&client->random, &node->client_id, sizeof(node->client_id));
    request.client_id.data = node->client_id.bytes;
    request.client_id.len = sizeof(node->client_id.bytes);
    status = kvc_call_begin(node, NULL, NULL, KV_OP_HELLO, &request.base, hello_done);
    if (status != KV_OK)
        kvc_node_fail(node, status, "cannot send hello");
}

/* ---- losing ------------------------------------------------------------------------------ */

void kvc_node_close(struct kvc_node *node)
{
    struct kv_client *client = node->client;
    struct kvc_control *control = node->control;

    node->state = KVC_NODE_IDLE;
    node->control = NULL;
    set_attached(node, false);
    node->unanswered_since_us = 0;
    if (node->ping != NULL)
        kvc_request_end(node->ping);
    for (uint32_t i = 0; i < kv_pool_size(client->requests); i++) {
        struct kvc_request *request = kv_pool_at(client->requests, i);

        if (request->is_live && request->node == node)
            request->connection = NULL;
    }
    kvc_batches_lose(node);
    if (control != NULL)
        control->transport->close(control);
    kvc_calls_lose(node);
    free_connections(node);
}

static void lose(struct kvc_node *node)
{
    bool was_connecting = node->state == KVC_NODE_CONNECTING;

    node->state = KVC_NODE_IDLE;
    node->mode = node->first_mode;
    node->client->op_events->node_lost(node, was_connecting);
    kvc_node_close(node);
    node->last_failure = node->failure;
    node->failure = KV_OK;
    node->client->loop.must_dispatch = true;
}

void kvc_nodes_step(struct kv_client *client)
{
    if (client->n_failed == 0)
        return;
    client->n_failed = 0;
    for (uint32_t i = 0; i < client->n_nodes; i++)
        if (client->nodes[i].failure != KV_OK)
            lose(&client->nodes[i]);
}

/* ---- silence ----------------------------------------------------------------------------- */

static void ping(struct kvc_node *node)
{
    struct kvc_connection *connection = &node->connections[0];

    for (uint32_t i = 0; i < node->n_connections; i++)
        if (node->connections[i].n_in_flight > 0)
            connection = &node->connections[i];
    node->ping = kvc_request_take(connection, kv_op_priority(KV_OP_PING), NULL);
    if (node->ping == NULL)
        return;
    if (!kvc_request_message(node->ping, 0)) {
        kvc_request_end(node->ping);
        return;
    }
    node->ping->header.op = KV_OP_PING;
    kvc_request_send(node->ping);
}

void kvc_nodes_timers(struct kv_client *client)
{
    for (uint32_t i = 0; i < client->n_nodes; i++) {
        struct kvc_node *node = &client->nodes[i];
        /* Replies queue after large data in the same direction. */
        uint64_t most_us = client->peer_timeout_us + node->bulk_moving / KVC_BULK_SLOWEST;
        uint64_t silent_us;
        char text[80];

        if (node->state != KVC_NODE_CONNECTED || node->unanswered_since_us == 0)
            continue;
        silent_us = client->loop.now_us - node->unanswered_since_us;
        if (silent_us >= most_us) {
            snprintf(text, sizeof(text), "no reply for %.3f s", (double)silent_us / 1e6);
            kvc_node_fail(node, KV_UNREACHABLE, text);
        } else if (silent_us >= client->peer_timeout_us / 4) {
            if (node->ping == NULL)
                ping(node);
            else if (node->ping->resend_us <= client->loop.now_us)
                kvc_request_send(node->ping);
        }
    }
}
