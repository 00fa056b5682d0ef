#include "client/control_message.h"

#include "client/control.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/state.h"
#include "kvserver/base/token.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/message.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <stdlib.h>
#include <string.h>

/* Ids: KVC_CONTROL_ID_BIT, a number per call, the node, a number per attempt. */
enum {
    ID_NODE_SHIFT = KVC_ID_SLOT_BITS,
    ID_CALL_SHIFT = KVC_ID_SLOT_BITS + KVC_ID_NODE_BITS,
    ID_ATTEMPT_MASK = (1 << KVC_ID_SLOT_BITS) - 1,
    RETRY_DOUBLINGS = 8,
    SOON_US = 1000, /* until the next attempt when the transport is full */
};

struct message_control {
    struct kvc_control base;
    struct kvc_link link; /* of the channel */
    struct kv_client *client;
    struct kvc_node *node;
    struct kv_channel *channel;
    struct kvc_list calls; /* not yet ended */
};

/* Valid until it has ended and the transport has released it. */
struct message_call {
    struct kvc_list of_control;
    struct kvc_list of_client;
    struct message_control *control; /* NULL: ended */
    enum kv_op_id op;
    kvc_control_done_fn done;
    void *arg;
    uint64_t id; /* of the last attempt */
    uint64_t deadline_us, resend_us, retry_after_us;
    kv_status_t outcome; /* KV_IN_PROGRESS: no reply yet */
    uint8_t *reply;
    size_t reply_bytes;
    bool busy; /* the transport has header and body */
    struct kv_wire_header header;
    size_t body_bytes;
    uint8_t body[] __attribute__((aligned(16)));
};

static void call_free(struct message_call *call)
{
    kvc_list_remove(&call->of_control);
    kvc_list_remove(&call->of_client);
    free(call->reply);
    free(call);
}

static void send_done(void *arg, kv_status_t status)
{
    struct message_call *call = arg;

    (void)status;
    call->busy = false;
    if (call->control == NULL)
        call_free(call);
}

static kv_status_t send(struct message_call *call)
{
    struct message_control *control = call->control;
    struct kv_client *client = control->client;
    const struct kvc_node *node = control->node;
    uint64_t left = kvc_loop_left_us(&client->loop, call->deadline_us);
    kv_status_t status;

    call->resend_us = client->loop.now_us + call->retry_after_us;
    if (call->busy)
        return KV_OK;
    if (call->retry_after_us < client->retry_us * RETRY_DOUBLINGS)
        call->retry_after_us *= 2;
    call->id = (call->id & ~(uint64_t)ID_ATTEMPT_MASK) | ((call->id + 1) & ID_ATTEMPT_MASK);
    call->header = (struct kv_wire_header){
        /* A hello is in the version that every peer can read. */
        .version = (uint16_t)(node->state == KVC_NODE_CONNECTED ? node->version
                                                                : KV_WIRE_VERSION_LEAST),
        .kind = KV_WIRE_REQUEST,
        .op = (uint8_t)call->op,
        .request_id = call->id,
        .tenant = client->tenant,
        .epoch = kv_placement_epoch32(client->map->epoch),
        .deadline_us = left < UINT32_MAX ? (uint32_t)left : UINT32_MAX,
    };
    if (node->state == KVC_NODE_CONNECTED) {
        call->header.client_index = node->client_index;
        call->header.client_token = node->client_token;
    }
    if (call->op == KV_OP_HELLO)
        call->header.client_token = node->client_id;
    kv_message_seal(&call->header, call->body, call->body_bytes);
    call->busy = true;
    status = kv_channel_send(control->channel, &call->header, sizeof(call->header), call->body,
                             call->body_bytes, send_done, call);
    if (status != KV_IN_PROGRESS)
        call->busy = false;
    if (status == KV_BUSY || status == KV_NO_MEMORY) {
        call->resend_us = client->loop.now_us + SOON_US;
        status = KV_OK;
    }
    return status < KV_OK ? status : KV_OK;
}

static kv_status_t message_row_call(struct kvc_control *base,
                                    enum kv_op_id op,
                                    const uint8_t *packed,
                                    size_t packed_bytes,
                                    uint64_t deadline_us,
                                    kvc_control_done_fn done,
                                    void *arg)
{
    struct message_control *control = (struct message_control *)base;
    struct kv_client *client = control->client;
    struct message_call *call;
    kv_status_t status;

    if (packed_bytes > KV_WIRE_CONTROL_MAX)
        return KV_TOO_LARGE;
    call = calloc(1, sizeof(*call) + packed_bytes);
    if (call == NULL)
        return KV_NO_MEMORY;
    call->control = control;
    call->op = op;
    call->done = done;
    call->arg = arg;
    call->id = KVC_CONTROL_ID_BIT |
               ((++client->attempts << ID_CALL_SHIFT) & ~KVC_CONTROL_ID_BIT) |
               (uint64_t)control->node->index << ID_NODE_SHIFT;
    call->deadline_us = client->loop.now_us + deadline_us;
    call->retry_after_us = client->retry_us;
    call->outcome = KV_IN_PROGRESS;
    call->body_bytes = packed_bytes;
    memcpy(call->body, packed, packed_bytes);
    kvc_list_append(&control->calls, &call->of_control);
    kvc_list_append(&client->control_messages, &call->of_client);
    status = send(call);
    if (status != KV_OK)
        call_free(call);
    return status;
}

/* Ends a call; its memory is freed when the transport has released it. */
static void finish(struct message_call *call, kv_status_t status, const char *detail)
{
    kvc_control_done_fn done = call->done;
    uint8_t *reply = call->reply;
    size_t reply_bytes = call->reply_bytes;
    void *arg = call->arg;

    call->reply = NULL;
    call->control = NULL;
    kvc_list_remove(&call->of_control);
    if (!call->busy)
        call_free(call);
    done(arg, status, reply, reply_bytes, detail);
    free(reply);
}

static unsigned message_row_progress(struct kvc_control *base)
{
    struct message_control *control = (struct message_control *)base;
    struct kv_client *client = control->client;
    unsigned n_callbacks = 0;
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &control->calls)
    {
        struct message_call *call = KVC_LIST_ENTRY(link, struct message_call, of_control);

        if (call->outcome == KV_IN_PROGRESS) {
            if (call->deadline_us <= client->loop.now_us) {
                call->outcome = KV_DEADLINE;
            } else if (call->resend_us <= client->loop.now_us) {
                kv_status_t status = send(call);

                if (status != KV_OK)
                    call->outcome = status;
            }
        }
        if (call->outcome != KV_IN_PROGRESS) {
            finish(call, call->outcome, call->outcome == KV_DEADLINE ? "no answer" : "");
            n_callbacks++;
        }
    }
    return n_callbacks;
}

static void message_row_close(struct kvc_control *base)
{
    struct message_control *control = (struct message_control *)base;

    while (!kvc_list_empty(&control->calls)) {
        struct message_call *call =
            KVC_LIST_ENTRY(control->calls.next, struct message_call, of_control);

        if (call->outcome != KV_IN_PROGRESS)
            finish(call, call->outcome, "");
        else
            finish(call, KV_UNREACHABLE, "connection closed");
    }
    control->channel->ops->channel_close(control->channel);
    free(control);
}

const struct kvc_control_transport kvc_control_transport_messages = {
    .name = "message",
    .call = message_row_call,
    .progress = message_row_progress,
    .close = message_row_close,
};

/* Returns the call that waits for this reply, or NULL. */
static struct message_call *find(const struct message_control *control,
                                 const struct kv_wire_header *header)
{
    struct kvc_list *link;

    for (link = control->calls.next; link != &control->calls; link = link->next) {
        struct message_call *call = KVC_LIST_ENTRY(link, struct message_call, of_control);

        if ((call->id | ID_ATTEMPT_MASK) != (header->request_id | ID_ATTEMPT_MASK))
            continue;
        if (call->outcome != KV_IN_PROGRESS || header->op != call->op ||
            !kv_token_equal(&header->client_token, &call->header.client_token))
            return NULL;
        /* A later hello registers the client again, which makes the reply of an earlier one
         * invalid. */
        if (call->op == KV_OP_HELLO && header->request_id != call->id)
            return NULL;
        return call;
    }
    return NULL;
}

bool kvc_control_message_awaits(const struct kvc_control *base,
                                const struct kv_wire_header *header)
{
    return find((const struct message_control *)base, header) != NULL;
}

void kvc_control_message_reply(struct kvc_control *base,
                               const struct kv_wire_header *header,
                               const uint8_t *body)
{
    struct message_call *call = find((struct message_control *)base, header);

    if (call == NULL)
        return;
    if (header->status != KV_OK) {
        call->outcome = header->status < 0 ? header->status : KV_CORRUPT;
        return;
    }
    call->reply = malloc(header->body_bytes > 0 ? header->body_bytes : 1);
    if (call->reply == NULL)
        return;
    if (header->body_bytes > 0)
        memcpy(call->reply, body, header->body_bytes);
    call->reply_bytes = header->body_bytes;
    call->outcome = KV_OK;
}

void kvc_control_message_fini(struct kv_client *client)
{
    while (!kvc_list_empty(&client->control_messages))
        call_free(
            KVC_LIST_ENTRY(client->control_messages.next, struct message_call, of_client));
}

static int digit_of(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

kv_status_t kvc_control_message_open(struct kv_client *client,
                                     uint32_t node_index,
                                     const char *address,
                                     struct kvc_control **ret_control)
{
    static const char scheme[] = "loopback:";
    uint8_t bytes[KV_WIRE_ADDRESS_MAX];
    size_t n_bytes = 0;
    struct message_control *control;
    kv_status_t status;

    if (strncmp(address, scheme, sizeof(scheme) - 1) != 0)
        return KV_INVALID;
    address += sizeof(scheme) - 1;
    for (; address[0] != 0; address += 2) {
        int high = digit_of(address[0]);
        int low = high < 0 ? -1 : digit_of(address[1]);

        if (low < 0 || n_bytes == sizeof(bytes))
            return KV_INVALID;
        bytes[n_bytes++] = (uint8_t)(high << 4 | low);
    }
    control = calloc(1, sizeof(*control));
    if (control == NULL)
        return KV_NO_MEMORY;
    control->base.transport = &kvc_control_transport_messages;
    control->client = client;
    control->node = &client->nodes[node_index];
    control->link.node = control->node;
    kvc_list_init(&control->calls);
    status = client->port->ops->connect(client->port, bytes, n_bytes, KV_CHANNEL_NETWORK,
                                        &control->link, &control->channel);
    if (status != KV_OK) {
        free(control);
        return status;
    }
    *ret_control = &control->base;
    return KV_OK;
}
