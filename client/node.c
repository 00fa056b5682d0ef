#include "client/node.h"

#include "client/call.h"
#include "client/client.h"
#include "client/connection.h"
#include "client/control.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/request.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/random.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BULK_BYTES_LEAST = 64 << 10, /* a node that takes less is not of this protocol */
};

void kv_remote_fail(struct kv_remote *remote, kv_status_t status, const char *why)
{
    if (remote->failure != KV_OK)
        return;
    remote->failure = status;
    snprintf(remote->failure_text, sizeof(remote->failure_text), "%s", why);
    remote->client->n_failed++;
}

void kv_remote_heard(struct kv_remote *remote)
{
    remote->owed_us = remote->n_trips > 0 ? remote->client->loop.now_us : 0;
}

/* ---- connecting -------------------------------------------------------------------------- */

static void attach_lost(void *arg)
{
    struct kv_remote *remote = arg;

    if (remote->state == KV_REMOTE_CONNECTED)
        kv_remote_fail(remote, KV_UNREACHABLE, "the node ended or was lost");
}

static const char *reply_fault(const Kvpb__HelloReply *reply)
{
    if (reply->version != KV_WIRE_VERSION)
        return "it speaks another version of the protocol";
    if (reply->client_token.len != 16 || reply->node_id.len != 16)
        return "hello: an id that is not 16 bytes";
    if (reply->n_addresses == 0 || reply->n_addresses > KV_THREADS_MAX)
        return "hello: the number of its data threads";
    for (size_t i = 0; i < reply->n_addresses; i++)
        if (reply->addresses[i].len == 0 || reply->addresses[i].len > KV_WIRE_ADDRESS_MAX)
            return "hello: an address of a data thread";
    if (reply->credits == 0)
        return "hello: no credits";
    if (reply->bulk_bytes_max < BULK_BYTES_LEAST)
        return "hello: bulk_bytes_max";
    return NULL;
}

static void free_lanes(struct kv_remote *remote)
{
    for (uint32_t i = 0; i < remote->n_lanes; i++) {
        struct kv_channel *channel = remote->lanes[i].channel;

        if (channel != NULL)
            channel->row->channel_close(channel);
    }
    free(remote->lanes);
    remote->lanes = NULL;
    remote->n_lanes = 0;
}

static kv_status_t make_lanes(struct kv_remote *remote, const Kvpb__HelloReply *reply)
{
    struct kv_port *port = remote->client->port;
    kv_status_t status = KV_OK;

    remote->lanes = calloc(reply->n_addresses, sizeof(*remote->lanes));
    if (remote->lanes == NULL)
        return KV_NO_MEMORY;
    remote->n_lanes = (uint32_t)reply->n_addresses;
    for (uint32_t i = 0; i < remote->n_lanes; i++)
        kv_lane_init(&remote->lanes[i], remote);
    for (uint32_t i = 0; i < remote->n_lanes && status == KV_OK; i++)
        status =
            port->row->connect(port, reply->addresses[i].data, reply->addresses[i].len,
                               remote->mode, &remote->lanes[i].link, &remote->lanes[i].channel);
    return status;
}

static void keep_facts(struct kv_remote *remote, const Kvpb__HelloReply *reply)
{
    struct kv_client *client = remote->client;

    remote->client_index = reply->client_index;
    memcpy(remote->client_token.bytes, reply->client_token.data, 16);
    remote->credits = reply->credits;
    if (remote->credits > KV_CREDITS_MAX)
        remote->credits = KV_CREDITS_MAX;
    if (client->credits > 0 && remote->credits > client->credits)
        remote->credits = client->credits;
    remote->bulk_bytes_max =
        reply->bulk_bytes_max < KV_WIRE_BULK_MAX ? reply->bulk_bytes_max : KV_WIRE_BULK_MAX;
    remote->memory_bytes = reply->memory_bytes;
    snprintf(remote->name, sizeof(remote->name), "%s", reply->node);
    snprintf(remote->transports, sizeof(remote->transports), "%s", reply->transports);
    kv_peer_name(remote->name);
    kv_peer_name(remote->transports);
}

/* That it is this node.  Another one than before has none of the sessions. */
static void keep_id(struct kv_remote *remote, const Kvpb__HelloReply *reply)
{
    if (!remote->has_connected || memcmp(remote->node_id.bytes, reply->node_id.data, 16) != 0)
        remote->incarnation++;
    memcpy(remote->node_id.bytes, reply->node_id.data, 16);
}

static void ignored(
    void *arg, kv_status_t status, const uint8_t *reply, size_t reply_bytes, const char *detail)
{
    (void)arg;
    (void)status;
    (void)reply;
    (void)reply_bytes;
    (void)detail;
}

void kv_remote_goodbye(struct kv_remote *remote)
{
    Kvpb__GoodbyeRequest request = KVPB__GOODBYE_REQUEST__INIT;
    uint8_t packed[64];

    request.client_index = remote->client_index;
    request.client_token.data = remote->client_token.bytes;
    request.client_token.len = sizeof(remote->client_token.bytes);
    if (kvpb__goodbye_request__get_packed_size(&request) > sizeof(packed))
        return;
    (void)remote->control->row->call(remote->control, KV_OP_GOODBYE, packed,
                                     kvpb__goodbye_request__pack(&request, packed),
                                     remote->client->peer_timeout_us, ignored, NULL);
}

/* Another entry of the list that leads to the same node; NULL: there is none. */
static const struct kv_remote *twin_of(const struct kv_remote *remote,
                                       const Kvpb__HelloReply *reply)
{
    const struct kv_client *client = remote->client;

    for (uint32_t i = 0; i < client->n_remotes; i++) {
        const struct kv_remote *other = &client->remotes[i];

        if (other != remote && other->state == KV_REMOTE_CONNECTED &&
            memcmp(other->node_id.bytes, reply->node_id.data, 16) == 0)
            return other;
    }
    return NULL;
}

/* The node is on this host, yet its memory is not to be had: another user's, or another
 * container's. */
static void try_network(struct kv_remote *remote)
{
    free_lanes(remote);
    remote->mode = KV_CHANNEL_NETWORK;
    remote->state = KV_REMOTE_IDLE;
    kv_remote_connect(remote);
}

static void connected(struct kv_remote *remote)
{
    struct kv_channel *channel = remote->lanes[0].channel;

    channel->row->channel_describe(channel, remote->transport, sizeof(remote->transport));
    remote->reconnects += remote->has_connected;
    remote->has_connected = true;
    remote->has_attached = remote->control->row->attach != NULL;
    remote->owed_us = 0;
    remote->last_failure = KV_OK;
    remote->failure_text[0] = '\0';
    remote->state = KV_REMOTE_CONNECTED;
    remote->client->loop.must_dispatch = true;
}

static void hello_done(struct kv_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const Kvpb__HelloReply *reply = (const Kvpb__HelloReply *)message;
    struct kv_remote *remote = call->remote;
    const struct kv_remote *twin;
    char text[200];
    const char *fault;

    if (remote->state != KV_REMOTE_CONNECTING)
        return;
    if (status == KV_UNREACHABLE && remote->mode == KV_CHANNEL_SHARED &&
        remote->may_fall_back && message != NULL) {
        try_network(remote);
        return;
    }
    if (status != KV_OK) {
        snprintf(text, sizeof(text), "hello: %s%s%s", kv_status_name(status),
                 detail[0] != 0 ? ": " : "", detail);
        kv_remote_fail(remote, status == KV_DEADLINE ? KV_UNREACHABLE : status, text);
        return;
    }
    fault = reply_fault(reply);
    if (fault != NULL) {
        kv_remote_fail(remote, reply->version != KV_WIRE_VERSION ? KV_VERSION : KV_CORRUPT,
                       fault);
        return;
    }
    keep_facts(remote, reply);
    twin = twin_of(remote, reply);
    if (twin != NULL) {
        kv_remote_goodbye(remote);
        snprintf(text, sizeof(text), "hello: twice in the list: it is node %.120s",
                 twin->address);
        kv_remote_fail(remote, KV_INVALID, text);
        return;
    }
    keep_id(remote, reply);
    status = make_lanes(remote, reply);
    if (status == KV_UNREACHABLE && remote->mode == KV_CHANNEL_SHARED &&
        remote->may_fall_back) {
        kv_remote_goodbye(remote);
        try_network(remote);
        return;
    }
    if (status == KV_OK && remote->control->row->attach != NULL)
        status = remote->control->row->attach(remote->control, remote->client_index,
                                              &remote->client_token, attach_lost, remote);
    if (status != KV_OK) {
        snprintf(text, sizeof(text), "connecting to its data threads: %s%s",
                 kv_status_name(status),
                 remote->mode == KV_CHANNEL_SHARED
                     ? ": over shared memory: it belongs to another user or container?"
                     : "");
        kv_remote_fail(remote, KV_UNREACHABLE, text);
        return;
    }
    connected(remote);
}

void kv_remote_connect(struct kv_remote *remote)
{
    struct kv_client *client = remote->client;
    Kvpb__HelloRequest request = KVPB__HELLO_REQUEST__INIT;
    const void *address;
    size_t address_bytes;
    kv_status_t status = KV_OK;

    /* A failure that is noted is dealt with first: then the operation that waits hears of it.
     */
    if (remote->state != KV_REMOTE_IDLE || remote->failure != KV_OK)
        return;
    remote->state = KV_REMOTE_CONNECTING;
    if (remote->control == NULL)
        status = client->open_control(client, remote->index, remote->address, &remote->control);
    if (status != KV_OK) {
        kv_remote_fail(remote, status, "it cannot be reached at this address");
        return;
    }
    client->port->row->port_address(client->port, &address, &address_bytes);
    request.version = KV_WIRE_VERSION;
    request.name = client->name;
    request.address.data = (uint8_t *)address;
    request.address.len = address_bytes;
    request.shared_memory = remote->mode == KV_CHANNEL_SHARED;
    request.tenant = client->tenant;
    kv_random_fill(&client->random, &remote->client_id, sizeof(remote->client_id));
    request.client_id.data = remote->client_id.bytes;
    request.client_id.len = sizeof(remote->client_id.bytes);
    status = kv_call_begin(remote, NULL, NULL, KV_OP_HELLO, &request.base, hello_done);
    if (status != KV_OK)
        kv_remote_fail(remote, status, "hello cannot be sent");
}

/* ---- losing ------------------------------------------------------------------------------ */

void kv_remote_close(struct kv_remote *remote)
{
    struct kv_client *client = remote->client;
    struct kv_control *control = remote->control;

    remote->state = KV_REMOTE_IDLE;
    remote->control = NULL;
    remote->has_attached = false;
    remote->owed_us = 0;
    if (remote->ping != NULL)
        kv_trip_end(remote->ping);
    for (uint32_t i = 0; i < kv_pool_size(client->trips); i++) {
        struct kv_trip *trip = kv_pool_at(client->trips, i);

        if (trip->is_live && trip->remote == remote)
            trip->lane = NULL;
    }
    if (control != NULL)
        control->row->close(control);
    kv_calls_lose(remote);
    free_lanes(remote);
}

static void lose(struct kv_remote *remote)
{
    bool was_connecting = remote->state == KV_REMOTE_CONNECTING;

    remote->state = KV_REMOTE_IDLE;
    remote->mode = remote->first_mode;
    remote->client->op_events->node_lost(remote, was_connecting);
    kv_remote_close(remote);
    remote->last_failure = remote->failure;
    remote->failure = KV_OK;
    remote->client->loop.must_dispatch = true;
}

void kv_remotes_step(struct kv_client *client)
{
    if (client->n_failed == 0)
        return;
    client->n_failed = 0;
    for (uint32_t i = 0; i < client->n_remotes; i++)
        if (client->remotes[i].failure != KV_OK)
            lose(&client->remotes[i]);
}

/* ---- silence ----------------------------------------------------------------------------- */

static void ping(struct kv_remote *remote)
{
    struct kv_lane *lane = &remote->lanes[0];

    for (uint32_t i = 0; i < remote->n_lanes; i++)
        if (remote->lanes[i].n_in_flight > 0)
            lane = &remote->lanes[i];
    remote->ping = kv_trip_take(lane, kv_op_priority(KV_OP_PING), NULL);
    if (remote->ping == NULL)
        return;
    if (!kv_trip_envelope(remote->ping, 0)) {
        kv_trip_end(remote->ping);
        return;
    }
    remote->ping->header.op = KV_OP_PING;
    kv_trip_send(remote->ping);
}

void kv_remotes_timers(struct kv_client *client)
{
    for (uint32_t i = 0; i < client->n_remotes; i++) {
        struct kv_remote *remote = &client->remotes[i];
        /* Answers queue behind the large data that goes the same way. */
        uint64_t most_us = client->peer_timeout_us + remote->bulk_moving / KV_BULK_SLOWEST;
        uint64_t silent_us;
        char text[80];

        if (remote->state != KV_REMOTE_CONNECTED || remote->owed_us == 0)
            continue;
        silent_us = client->loop.now_us - remote->owed_us;
        if (silent_us >= most_us) {
            snprintf(text, sizeof(text), "silent for %.3f s", (double)silent_us / 1e6);
            kv_remote_fail(remote, KV_UNREACHABLE, text);
        } else if (silent_us >= client->peer_timeout_us / 4) {
            if (remote->ping == NULL)
                ping(remote);
            else if (remote->ping->resend_us <= client->loop.now_us)
                kv_trip_send(remote->ping);
        }
    }
}
