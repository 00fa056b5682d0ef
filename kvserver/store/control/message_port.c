/* message_port.c - the control transport without gRPC: a port of the control thread that
 * receives control requests as messages and sends the replies. */
#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/net/message.h"
#include "kvserver/store/control/control.h"
#include "proto/kvstore.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A request's reply, from the request until the reply has been sent; it frees itself. */
struct message_reply {
    struct kvs_control *control;
    struct kv_wire_header request, header;
    struct kv_channel *channel; /* created for the reply to a hello; closed with this struct */
    uint8_t *body;
};

static void message_sent(void *arg, kv_status_t status)
{
    struct message_reply *reply = arg;

    (void)status;
    /* A port that closes ends its sends and closes its channels itself. */
    if (reply->channel != NULL && !reply->control->port_closes)
        reply->channel->ops->channel_close(reply->channel);
    free(reply->body);
    free(reply);
}

/* After a successful hello, the client's record owns the channel. */
static struct kv_channel *
hello_channel(struct message_reply *reply, const uint8_t *bytes, size_t n_bytes)
{
    Kvpb__HelloReply *hello = kvpb__hello_reply__unpack(NULL, n_bytes, bytes);
    struct kv_channel *channel = reply->channel;

    if (hello != NULL && hello->outcome != NULL && hello->outcome->status == KV_OK) {
        struct kvs_client_record *client = &reply->control->clients[hello->client_index];
        /* A repeated hello has connected once more: the record keeps its first channel, and
         * message_sent() closes the other. */
        if (client->channel == NULL) {
            client->channel = channel;
            reply->channel = NULL;
        }
        channel = client->channel;
    }
    kvpb__hello_reply__free_unpacked(hello, NULL);
    return channel;
}

static void message_reply(void *arg, const uint8_t *bytes, size_t n_bytes)
{
    struct message_reply *reply = arg;
    struct kv_channel *channel = NULL;

    if (reply->channel != NULL) {
        channel = hello_channel(reply, bytes, n_bytes);
    } else {
        channel = kvs_client_channel(reply->control, reply->request.client_index,
                                     &reply->request.client_token);
    }
    if (channel == NULL) {
        message_sent(reply, KV_OK);
        return;
    }
    /* The caller's bytes are valid during the call only, and a send ends later. */
    reply->body = malloc(n_bytes > 0 ? n_bytes : 1);
    if (reply->body != NULL)
        memcpy(reply->body, bytes, n_bytes);
    else
        n_bytes = 0;
    reply->header = (struct kv_wire_header){
        .version = reply->request.version,
        .kind = KV_WIRE_REPLY,
        .op = reply->request.op,
        .status = reply->body != NULL ? KV_OK : KV_BUSY, /* KV_BUSY: the client repeats the
                                                          * request */
        .request_id = reply->request.request_id,
        .client_index = reply->request.client_index,
        .client_token = reply->request.client_token,
    };
    kv_message_seal(&reply->header, reply->body, n_bytes);
    if (kv_channel_send(channel, &reply->header, sizeof(reply->header), reply->body, n_bytes,
                        message_sent, reply) != KV_IN_PROGRESS)
        message_sent(reply, KV_OK);
}

static kv_status_t connect_hello(struct kvs_control *control,
                                 const void *body,
                                 size_t body_bytes,
                                 struct kv_channel **ret_channel)
{
    Kvpb__HelloRequest *hello = kvpb__hello_request__unpack(NULL, body_bytes, body);
    kv_status_t status = KV_INVALID;

    if (hello != NULL && hello->address.len <= KV_WIRE_ADDRESS_MAX)
        status =
            control->port->ops->connect(control->port, hello->address.data, hello->address.len,
                                        KV_CHANNEL_SHARED, NULL, ret_channel);
    kvpb__hello_request__free_unpacked(hello, NULL);
    return status;
}

/* Whether the same message came before and is being answered: the network may double it.  To
 * the second one the node could only say KV_BUSY, before the first has its answer, and a client
 * that hears this asks again: doubled each time, it would never be told anything else. */
static bool is_doubled(const struct kvs_control *control, const struct kv_wire_header *header)
{
    for (const struct kvs_control_call *call = control->calls; call != NULL;
         call = call->list_next) {
        const struct message_reply *reply = call->arg;

        if (call->reply == message_reply && reply->request.request_id == header->request_id &&
            kv_token_equal(&reply->request.client_token, &header->client_token))
            return true;
    }
    return false;
}

static void on_message(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    struct kvs_control *control = owner;
    struct kv_wire_header header;
    const char *why = "not a control request";

    if (kv_message_check(message, message_bytes, body, body_bytes, &header, &why) != KV_OK ||
        header.kind != KV_WIRE_REQUEST || !kvs_control_has_op(control, header.op)) {
        kvs_count(&control->stats.bad_messages, 1);
        KV_LOG_EVERY(KV_LOG_WARN, "message dropped: control port: %s", why);
        return;
    }
    if (is_doubled(control, &header))
        return;
    /* Control requests have no bulk data: anything after the body is unchecked and ignored. */
    body_bytes = header.body_bytes;
    struct message_reply *reply = calloc(1, sizeof(*reply));
    if (reply == NULL)
        return;
    reply->control = control;
    reply->request = header;
    if (header.op == KV_OP_HELLO &&
        connect_hello(control, body, body_bytes, &reply->channel) != KV_OK) {
        kvs_count(&control->stats.bad_messages, 1);
        free(reply);
        return;
    }
    if (!kvs_control_begin(control, header.op, header.client_index, &header.client_token, body,
                           body_bytes, message_reply, reply))
        free(reply);
}

static void on_incoming(void *owner,
                        const void *message,
                        size_t message_bytes,
                        size_t bytes,
                        struct kv_incoming *incoming)
{
    /* Control messages are small: a large one is invalid. */
    struct kvs_control *control = owner;

    (void)message;
    (void)message_bytes;
    (void)bytes;
    kvs_count(&control->stats.bad_messages, 1);
    kv_incoming_refuse(incoming);
}

/* Nothing to do: the client's silence, or a data thread, will show that it is lost. */
static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    (void)owner;
    (void)channel_arg;
    (void)status;
}

static const struct kv_port_events events = {on_message, on_incoming, on_failed};

static void write_address(struct kvs_control *control)
{
    const void *address;
    size_t bytes;

    control->port->ops->port_address(control->port, &address, &bytes);
    size_t at = (size_t)snprintf(control->address, sizeof(control->address),
                                 "%s:", control->config.transport->ops->name);
    for (size_t i = 0; i < bytes && at + 2 < sizeof(control->address); i++, at += 2)
        snprintf(control->address + at, 3, "%02x", ((const uint8_t *)address)[i]);
}

kv_status_t kvs_control_port_open(struct kvs_control *control)
{
    struct kv_transport *transport = control->config.transport;
    kv_status_t status = transport->ops->port_open(transport, &events, control, &control->port);

    if (status == KV_OK)
        write_address(control);
    return status;
}
