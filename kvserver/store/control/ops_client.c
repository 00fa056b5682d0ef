/* ops_client.c - hello and goodbye. */
#include "kvserver/base/token.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"

#include <stdlib.h>
#include <string.h>

static void hello_reply(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;
    struct kvs_client_record *client = call->client;
    Kvpb__HelloReply reply = KVPB__HELLO_REPLY__INIT;
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();
    ProtobufCBinaryData addresses[KV_THREADS_MAX];
    char transports[256];

    /* The addresses are the ports' and the names the node's: the reply owns nothing. */
    for (uint32_t i = 0; i < control->n_threads; i++) {
        const void *address;
        struct kv_port *port = control->shard[i].port;
        port->ops->port_address(port, &address, &addresses[i].len);
        addresses[i].data = (uint8_t *)address;
    }
    control->config.transport->ops->describe(control->config.transport, transports,
                                             sizeof(transports));
    reply.outcome = &outcome;
    reply.version = client->version;
    reply.client_index = client->index;
    reply.client_token = kvs_pb_put_id(&client->token);
    reply.n_addresses = control->n_threads;
    reply.addresses = addresses;
    reply.credits = client->credits;
    reply.bulk_bytes_max = KV_WIRE_BULK_MAX;
    reply.lease_ms = control->config.lease_ms;
    reply.node = control->name;
    reply.node_id = kvs_pb_put_id(&control->id);
    reply.memory_bytes = control->config.memory_bytes;
    reply.transports = transports;
    kvs_control_reply(call, &reply.base);
}

/* Every data thread has opened the client, or one has failed to. */
static void hello_opened(struct kvs_control_call *call)
{
    struct kvs_client_record *client = call->client;

    if (client->state != KVS_CLIENT_OPENING) {
        kvs_control_refuse(call, KV_UNREACHABLE,
                           "hello: the client left while the request was waiting");
        return;
    }
    if (call->status != KV_OK) {
        kvs_client_remove(call->control, client);
        kvs_control_refuse(call, call->status, "hello: cannot reach the client's data port: %s",
                           kv_status_name(call->status));
        return;
    }
    /* Silence counts from now on: opening may have taken long. */
    kvs_client_opened(call->control, client);
    kvs_count(&call->control->stats.clients_registered, 1);
    hello_reply(call);
}

/* Replies again to a registered client, whose first reply was lost. */
static void hello_again(struct kvs_control_call *call,
                        const Kvpb__HelloRequest *request,
                        struct kvs_client_record *client)
{
    if (client->tenant != request->tenant) {
        kvs_control_refuse(call, KV_DENIED,
                           "hello: tenant %u, but the client belongs to tenant %u",
                           request->tenant, client->tenant);
    } else if (client->state == KVS_CLIENT_OPENING) {
        kvs_control_refuse(call, KV_BUSY, "hello: another hello of the client is in progress");
    } else {
        call->client = client;
        hello_reply(call);
    }
}

static uint32_t wire_version_max(const struct kvs_control *control)
{
    return control->config.wire_version_max != 0 ? control->config.wire_version_max
                                                 : KV_WIRE_VERSION;
}

static void hello(struct kvs_control_call *call, const Kvpb__HelloRequest *request)
{
    struct kvs_control *control = call->control;
    struct kvs_command command = {.kind = KVS_COMMAND_CLIENT_OPEN};
    struct kv_id128 id;
    const uint32_t greatest = wire_version_max(control);
    const uint32_t least =
        request->version_least != 0 ? request->version_least : request->version;
    const uint32_t version =
        kv_wire_version_of(KV_WIRE_VERSION_LEAST, greatest, least, request->version);

    if (version == 0) {
        kvs_control_refuse(call, KV_VERSION,
                           "hello: the client speaks protocol versions %u to %u, the node %u "
                           "to %u: update the older side",
                           least, request->version, KV_WIRE_VERSION_LEAST, greatest);
        return;
    }
    if (!kvs_pb_get_id(&request->client_id, &id) || request->address.len == 0 ||
        request->address.len > KV_WIRE_ADDRESS_MAX) {
        kvs_control_refuse(call, KV_INVALID,
                           "hello: invalid id (%zu bytes) or address (%zu bytes)",
                           request->client_id.len, request->address.len);
        return;
    }
    if (atomic_load(&control->draining)) {
        kvs_control_refuse(call, KV_DRAINING, "hello: node is draining");
        return;
    }
    struct kvs_client_record *client = kvs_client_by_id(control, &id);
    if (client != NULL) {
        hello_again(call, request, client);
        return;
    }
    kv_status_t status = KV_NO_MEMORY;
    /* Data threads read the address after this function has returned, and the message with it
     * has been freed. */
    call->address = malloc(request->address.len);
    if (call->address != NULL)
        status = kvs_client_create(control, &id, &client);
    if (status == KV_BUSY) {
        kvs_control_refuse(call, KV_BUSY, "hello: too many clients: limit %u",
                           control->config.clients_max);
        return;
    }
    if (status != KV_OK) {
        kvs_control_refuse(call, status, "hello: out of memory");
        return;
    }
    memcpy(call->address, request->address.data, request->address.len);
    client->mode = request->shared_memory ? KV_CHANNEL_SHARED : KV_CHANNEL_NETWORK;
    client->tenant = request->tenant;
    client->version = version;
    kvs_pb_copy_text(client->name, sizeof(client->name), request->name);
    command.index = client->index;
    command.token = client->token;
    command.tenant = client->tenant;
    command.credits = client->credits;
    command.version = version;
    command.mode = client->mode;
    command.address_bytes = (uint32_t)request->address.len;
    command.address = call->address;
    call->client = client;
    kvs_control_broadcast(call, &command, hello_opened);
}

void kvs_control_hello(struct kvs_control_call *call)
{
    Kvpb__HelloRequest *request = kvs_call_unpack(call, &kvpb__hello_request__descriptor);

    if (request == NULL)
        return;
    hello(call, request);
    kvpb__hello_request__free_unpacked(request, NULL);
}

void kvs_control_goodbye(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;
    Kvpb__GoodbyeRequest *request = kvs_call_unpack(call, &kvpb__goodbye_request__descriptor);
    struct kv_id128 token;

    if (request == NULL)
        return;
    if (!kvs_pb_get_id(&request->client_token, &token) ||
        request->client_index >= control->config.clients_max) {
        kvs_control_refuse(call, KV_INVALID, "goodbye: malformed request");
    } else {
        struct kvs_client_record *client = &control->clients[request->client_index];
        bool known = client->state == KVS_CLIENT_OPEN && kv_token_equal(&client->token, &token);

        /* The reply says that nothing is sent to the client any more. */
        if (known)
            kvs_client_part(client, call);
        else
            kvs_control_refuse(call, KV_NOT_FOUND, "goodbye: unknown client");
    }
    kvpb__goodbye_request__free_unpacked(request, NULL);
}
