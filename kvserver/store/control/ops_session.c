/* The operations of the control plane.  Each checks everything that came from outside before it
 * changes anything, asks the data threads, and answers when they have. */
#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/shard/op.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static bool get_id(const ProtobufCBinaryData *bytes, struct kv_id128 *ret_id)
{
    if (bytes->len != sizeof(ret_id->bytes))
        return false;
    memcpy(ret_id->bytes, bytes->data, sizeof(ret_id->bytes));
    return true;
}

static ProtobufCBinaryData put_id(struct kv_id128 *id)
{
    return (ProtobufCBinaryData){sizeof(id->bytes), id->bytes};
}

static Kvpb__Outcome ok_outcome(void)
{
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;

    return outcome;
}

static void copy_text(char *to, size_t to_bytes, const char *from)
{
    size_t n = 0;

    /* Names end up in lists, logs and metrics: printable, or a dot. */
    for (; n + 1 < to_bytes && from[n] != '\0'; n++)
        to[n] = (unsigned char)from[n] < 0x20 || from[n] == 0x7f || from[n] == '"' ||
                        from[n] == '\\'
                    ? '.'
                    : from[n];
    to[n] = '\0';
}

/* ---- clients ----------------------------------------------------------------------------- */

static void hello_answer(struct kv_control_call *call)
{
    struct kv_node *node = call->node;
    struct kv_client_record *client = call->client;
    Kvpb__HelloReply reply = KVPB__HELLO_REPLY__INIT;
    Kvpb__Outcome outcome = ok_outcome();
    ProtobufCBinaryData addresses[KV_THREADS_MAX];
    char transports[256];

    for (uint32_t i = 0; i < node->n_threads; i++) {
        const void *address;
        struct kv_port *port = node->data[i].port;
        port->row->port_address(port, &address, &addresses[i].len);
        addresses[i].data = (uint8_t *)address;
    }
    node->config.transport->row->describe(node->config.transport, transports,
                                          sizeof(transports));
    reply.outcome = &outcome;
    reply.version = KV_WIRE_VERSION;
    reply.client_index = client->index;
    reply.client_token = put_id(&client->token);
    reply.n_addresses = node->n_threads;
    reply.addresses = addresses;
    reply.credits = client->credits;
    reply.bulk_bytes_max = KV_WIRE_BULK_MAX;
    reply.lease_ms = node->config.lease_ms;
    reply.node = node->name;
    reply.node_id = put_id(&node->id);
    reply.memory_bytes = node->config.memory_bytes;
    reply.transports = transports;
    kv_control_reply(call, &reply.base);
}

static void hello_opened(struct kv_control_call *call)
{
    struct kv_client_record *client = call->client;

    if (client->state != KV_CLIENT_OPENING) {
        kv_control_refuse(call, KV_UNREACHABLE, "hello: the client left meanwhile");
        return;
    }
    if (call->status != KV_OK) {
        kv_client_remove(call->node, client);
        kv_control_refuse(call, call->status, "hello: cannot reach the client's data port: %s",
                          kv_status_name(call->status));
        return;
    }
    client->state = KV_CLIENT_OPEN;
    client->heard_us = kv_clock_now(call->node->config.clock);
    client->requests_seen = 0;
    kv_count(&call->node->stats.clients_seen, 1);
    hello_answer(call);
}

static struct kv_client_record *client_place(struct kv_node *node)
{
    for (uint32_t i = 0; i < node->config.clients_max; i++)
        if (node->clients[i].state == KV_CLIENT_FREE)
            return &node->clients[i];
    return NULL;
}

static struct kv_client_record *client_by_id(struct kv_node *node, const struct kv_id128 *id)
{
    for (uint32_t i = 0; i < node->config.clients_max; i++)
        if ((node->clients[i].state == KV_CLIENT_OPEN ||
             node->clients[i].state == KV_CLIENT_OPENING) &&
            kv_token_equal(&node->clients[i].id, id))
            return &node->clients[i];
    return NULL;
}

/* A client that is known says hello again, as the answer was lost. */
static void hello_again(struct kv_control_call *call,
                        const Kvpb__HelloRequest *request,
                        struct kv_client_record *client)
{
    if (client->tenant != request->tenant) {
        kv_control_refuse(call, KV_DENIED, "hello: tenant %u, the client is of tenant %u",
                          request->tenant, client->tenant);
    } else if (client->state == KV_CLIENT_OPENING) {
        kv_control_refuse(call, KV_BUSY, "hello: the client is being opened");
    } else {
        call->client = client;
        hello_answer(call);
    }
}

static void hello(struct kv_control_call *call, const Kvpb__HelloRequest *request)
{
    struct kv_node *node = call->node;
    struct kv_command command = {.kind = KV_COMMAND_PEER_OPEN};
    struct kv_id128 id;

    if (request->version != KV_WIRE_VERSION) {
        kv_control_refuse(call, KV_VERSION, "hello: protocol version %u, this node speaks %u",
                          request->version, KV_WIRE_VERSION);
        return;
    }
    if (!get_id(&request->client_id, &id) || request->address.len == 0 ||
        request->address.len > KV_WIRE_ADDRESS_MAX) {
        kv_control_refuse(call, KV_INVALID, "hello: id of %zu bytes, address of %zu",
                          request->client_id.len, request->address.len);
        return;
    }
    if (atomic_load(&node->draining)) {
        kv_control_refuse(call, KV_DRAINING, "hello: the node is about to stop");
        return;
    }
    struct kv_client_record *client = client_by_id(node, &id);
    if (client != NULL) {
        hello_again(call, request, client);
        return;
    }
    client = client_place(node);
    if (client == NULL) {
        kv_control_refuse(call, KV_BUSY, "hello: %u clients already", node->config.clients_max);
        return;
    }
    call->address = malloc(request->address.len);
    if (call->address == NULL) {
        kv_control_refuse(call, KV_NO_MEMORY, "hello: the node's memory is full");
        return;
    }
    memcpy(call->address, request->address.data, request->address.len);
    uint32_t index = (uint32_t)(client - node->clients);
    *client = (struct kv_client_record){
        .state = KV_CLIENT_OPENING,
        .index = index,
        .id = id,
        .mode = request->shared_memory ? KV_CHANNEL_SHARED : KV_CHANNEL_NETWORK,
        .tenant = request->tenant,
        .since_us = kv_clock_now(node->config.clock),
    };
    copy_text(client->name, sizeof(client->name), request->name);
    kv_random_fill(&node->random, &client->token, sizeof(client->token));

    client->credits = kv_client_grant(node);
    command.index = index;
    command.token = client->token;
    command.tenant = client->tenant;
    command.credits = client->credits;
    command.mode = client->mode;
    command.address_bytes = (uint32_t)request->address.len;
    command.address = call->address;
    call->client = client;
    kv_control_ask(call, &command, hello_opened);
}

void kv_control_hello(struct kv_control_call *call)
{
    Kvpb__HelloRequest *request =
        kvpb__hello_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "hello: not a request of this protocol");
    else
        hello(call, request);
    kvpb__hello_request__free_unpacked(request, NULL);
}

void kv_control_goodbye(struct kv_control_call *call)
{
    Kvpb__GoodbyeRequest *request =
        kvpb__goodbye_request__unpack(NULL, call->request_bytes, call->request);
    struct kv_node *node = call->node;
    struct kv_id128 token;

    if (request == NULL || !get_id(&request->client_token, &token) ||
        request->client_index >= node->config.clients_max) {
        kv_control_refuse(call, KV_INVALID, "goodbye: not a request of this protocol");
    } else {
        struct kv_client_record *client = &node->clients[request->client_index];
        bool known = client->state == KV_CLIENT_OPEN && kv_token_equal(&client->token, &token);

        kv_control_refuse(call, known ? KV_OK : KV_NOT_FOUND, "%s",
                          known ? "" : "goodbye: no such client");
        if (known)
            kv_client_remove(node, client);
    }
    kvpb__goodbye_request__free_unpacked(request, NULL);
}

/* ---- models ------------------------------------------------------------------------------ */

static struct kv_model *model_find(struct kv_node *node, const struct kv_id128 *fingerprint)
{
    for (uint32_t i = 0; i < node->n_models; i++)
        if (kv_token_equal(&node->models[i]->info.fingerprint, fingerprint))
            return node->models[i];
    return NULL;
}

static bool same_schema(const kv_schema_t *a, const kv_schema_t *b)
{
    return a->n_layers == b->n_layers && a->n_units == b->n_units &&
           memcmp(a->layers, b->layers, a->n_layers * sizeof(a->layers[0])) == 0;
}

static void model_saved(void *arg, kv_status_t status)
{
    struct kv_control_call *call = arg;

    struct kv_node *node = call->node;

    call->model->saving = false;
    if (status == KV_OK) {
        kv_control_refuse(call, KV_OK, "%s", "");
        return;
    }
    for (uint32_t i = 0; i < node->n_models; i++)
        if (node->models[i] == call->model)
            node->models[i] = node->models[--node->n_models];
    free(call->model);
    kv_control_refuse(call, status, "model: cannot be saved: %s", kv_status_name(status));
}

static kv_status_t model_from(const Kvpb__ModelRequest *request,
                              struct kv_model_info *info,
                              char *detail,
                              size_t detail_bytes)
{
    memset(info, 0, sizeof(*info));
    if (!get_id(&request->fingerprint, &info->fingerprint) || request->name[0] == '\0' ||
        strlen(request->name) > KV_NAME_BYTES_MAX || request->n_layers > KV_LAYERS_MAX) {
        snprintf(detail, detail_bytes,
                 "model: a name of %zu bytes, a fingerprint of %zu, %zu layers",
                 strlen(request->name), request->fingerprint.len, request->n_layers);
        return KV_INVALID;
    }
    copy_text(info->name, sizeof(info->name), request->name);
    info->schema.n_layers = (uint32_t)request->n_layers;
    for (size_t i = 0; i < request->n_layers; i++) {
        const Kvpb__Layer *layer = request->layers[i];

        if (layer->kind > UINT8_MAX || layer->dtype > UINT8_MAX ||
            layer->n_kv_heads > UINT16_MAX || layer->d_k > UINT16_MAX ||
            layer->d_v > UINT16_MAX) {
            snprintf(detail, detail_bytes, "model: layer %zu: a number is out of bounds", i);
            return KV_INVALID;
        }
        info->schema.layers[i] = (struct kv_layer_schema){
            .kind = (uint8_t)layer->kind,
            .dtype = (uint8_t)layer->dtype,
            .n_kv_heads = (uint16_t)layer->n_kv_heads,
            .d_k = (uint16_t)layer->d_k,
            .d_v = (uint16_t)layer->d_v,
        };
    }
    return kv_schema_finish(&info->schema, detail, detail_bytes);
}

/* The record of a model on the disk. */
struct model_key {
    char bytes[6 + sizeof(struct kv_id128)];
};

static struct model_key model_key(const struct kv_id128 *fingerprint)
{
    struct model_key key;

    memcpy(key.bytes, "model/", 6);
    memcpy(key.bytes + 6, fingerprint, sizeof(*fingerprint));
    return key;
}

/* Forgets the model that was used longest ago, if the table is full.  false: sessions use all.
 */
static bool model_make_room(struct kv_node *node)
{
    uint32_t oldest = KV_MODELS_MAX;

    if (node->n_models < KV_MODELS_MAX)
        return true;
    for (uint32_t i = 0; i < node->n_models; i++) {
        const struct kv_model *model = node->models[i];

        if (model->n_sessions == 0 && !model->saving &&
            (oldest == KV_MODELS_MAX || model->used_us < node->models[oldest]->used_us))
            oldest = i;
    }
    if (oldest == KV_MODELS_MAX)
        return false;
    struct model_key key = model_key(&node->models[oldest]->info.fingerprint);
    kv_log(KV_LOG_INFO, "model: %s: forgotten, no session uses it",
           node->models[oldest]->info.name);
    node->config.disk->row->remove(node->config.disk, key.bytes, sizeof(key.bytes));
    free(node->models[oldest]);
    node->models[oldest] = node->models[--node->n_models];
    return true;
}

static void model(struct kv_control_call *call, const Kvpb__ModelRequest *request)
{
    struct kv_node *node = call->node;
    struct kv_model_info info;
    char detail[256] = "";

    kv_status_t status = model_from(request, &info, detail, sizeof(detail));
    if (status != KV_OK) {
        kv_control_refuse(call, status, "%s", detail);
        return;
    }
    struct kv_model *known = model_find(node, &info.fingerprint);
    if (known != NULL) {
        known->used_us = kv_clock_now(node->config.clock);
        if (!same_schema(&known->info.schema, &info.schema))
            kv_control_refuse(call, KV_EXISTS,
                              "model: %s: its fingerprint is %s's, with another schema",
                              info.name, known->info.name);
        else if (known->saving)
            kv_control_refuse(call, KV_BUSY, "model: %s: is being saved", info.name);
        else
            kv_control_refuse(call, KV_OK, "%s", "");
        return;
    }
    if (!model_make_room(node)) {
        kv_control_refuse(call, KV_NO_MEMORY, "model: %s: %d models are in use already",
                          info.name, KV_MODELS_MAX);
        return;
    }
    struct kv_model *added = calloc(1, sizeof(*added));
    if (added == NULL) {
        kv_control_refuse(call, KV_NO_MEMORY, "model: out of memory");
        return;
    }
    added->info = info;
    added->saving = true;
    added->used_us = kv_clock_now(node->config.clock);
    call->model = added;
    struct model_key key = model_key(&info.fingerprint);
    status = node->config.disk->row->put(node->config.disk, key.bytes, sizeof(key.bytes),
                                         call->request, call->request_bytes, model_saved, call);
    if (status != KV_OK) {
        free(added);
        kv_control_refuse(call, status, "model: cannot be saved: %s", kv_status_name(status));
        return;
    }
    node->models[node->n_models++] = added;
    kv_log(KV_LOG_INFO, "model: %s: %u layers, %u units, %llu bytes per token", info.name,
           info.schema.n_layers, info.schema.n_units,
           (unsigned long long)kv_schema_token_bytes(&info.schema));
}

bool kv_model_restore(struct kv_node *node, const void *packed, size_t packed_bytes)
{
    Kvpb__ModelRequest *request = kvpb__model_request__unpack(NULL, packed_bytes, packed);
    struct kv_model *added = calloc(1, sizeof(*added));
    char detail[256];
    bool good = request != NULL && added != NULL &&
                model_from(request, &added->info, detail, sizeof(detail)) == KV_OK;

    if (good)
        node->models[node->n_models++] = added;
    else
        free(added);
    kvpb__model_request__free_unpacked(request, NULL);
    return good;
}

void kv_control_model(struct kv_control_call *call)
{
    Kvpb__ModelRequest *request =
        kvpb__model_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "model: not a request of this protocol");
    else
        model(call, request);
    kvpb__model_request__free_unpacked(request, NULL);
}

/* ---- sessions: what all replies say ------------------------------------------------------ */

/* Who has the token of a session that has ended is told what became of it; nobody else hears
 * whether there was one. */
static void
refuse_session(struct kv_control_call *call, const ProtobufCBinaryData *token, const char *what)
{
    const struct kv_node *node = call->node;
    const char *name = kv_ops[call->op].name;
    char ended[KV_ENDED_TEXT];
    struct kv_id128 given;

    if (get_id(token, &given) &&
        kv_ended_tell(&node->ended, &given, kv_clock_now(node->config.clock), ended))
        kv_control_refuse(call, KV_NOT_FOUND, "%s: %s: %s", name, what, ended);
    else
        kv_control_refuse(call, KV_NOT_FOUND, "%s: no %s with that token", name, what);
}

static struct kv_session *
session_of(struct kv_control_call *call, uint32_t index, const ProtobufCBinaryData *token)
{
    struct kv_node *node = call->node;
    struct kv_session *session =
        index < node->config.sessions_max ? &node->sessions[index] : NULL;
    struct kv_id128 given;
    char what[32];

    if (session == NULL || !session->used || !get_id(token, &given) ||
        !kv_token_equal(&session->token, &given)) {
        snprintf(what, sizeof(what), "session %u", index);
        refuse_session(call, token, what);
        return NULL;
    }
    if (session->tenant != call->tenant) {
        kv_control_refuse(call, KV_DENIED, "%s: session %u is another tenant's",
                          kv_ops[call->op].name, index);
        return NULL;
    }
    if (session->busy) {
        kv_control_refuse(call, KV_BUSY, "%s: session %u is being changed",
                          kv_ops[call->op].name, index);
        return NULL;
    }
    session->renewed_us = kv_clock_now(node->config.clock);
    return session;
}

static uint64_t lease_of(const struct kv_node *node, uint32_t lease_ms)
{
    if (lease_ms == 0 || lease_ms > node->config.lease_ms)
        lease_ms = node->config.lease_ms;
    return lease_ms * UINT64_C(1000);
}

/* The session's runs as a message has them; in one piece, the caller's to free.  NULL: out of
 * memory. */
static Kvpb__WriterRun **writers_message(const struct kv_writers *writers)
{
    const size_t n_runs = writers->n_runs;
    Kvpb__WriterRun **list = malloc(n_runs * (sizeof(*list) + sizeof(**list)));

    if (list == NULL)
        return NULL;
    for (size_t i = 0; i < n_runs; i++) {
        list[i] = (Kvpb__WriterRun *)(list + n_runs) + i;
        kvpb__writer_run__init(list[i]);
        list[i]->writer = writers->runs[i].writer;
        list[i]->end = writers->runs[i].end;
    }
    return list;
}

/* What a message says of a session, besides itself, to a client that takes it up. */
struct session_facts {
    struct kv_model_info info; /* copied: the message has no const */
    Kvpb__Layer layers[KV_LAYERS_MAX], *layer_list[KV_LAYERS_MAX];
    struct kv_lifecycle entries[KV_LIFECYCLE_LOG];
    Kvpb__Lifecycle log[KV_LIFECYCLE_LOG], *log_list[KV_LIFECYCLE_LOG];
};

static void add_schema(Kvpb__OpenReply *reply, struct session_facts *facts)
{
    const kv_schema_t *schema = &facts->info.schema;

    for (uint32_t i = 0; i < schema->n_layers; i++) {
        const struct kv_layer_schema *layer = &schema->layers[i];

        facts->layers[i] = (Kvpb__Layer)KVPB__LAYER__INIT;
        facts->layers[i].kind = layer->kind;
        facts->layers[i].dtype = layer->dtype;
        facts->layers[i].n_kv_heads = layer->n_kv_heads;
        facts->layers[i].d_k = layer->d_k;
        facts->layers[i].d_v = layer->d_v;
        facts->layer_list[i] = &facts->layers[i];
    }
    reply->n_layers = schema->n_layers;
    reply->layers = facts->layer_list;
}

static void
add_log(Kvpb__OpenReply *reply, const struct kv_session *session, struct session_facts *facts)
{
    const uint32_t n = session->n_log < KV_LIFECYCLE_LOG ? session->n_log : KV_LIFECYCLE_LOG;

    for (uint32_t i = 0; i < n; i++) {
        struct kv_lifecycle *entry = &facts->entries[i];
        Kvpb__Lifecycle *told = facts->log_list[i] = &facts->log[i];

        *entry = session->log[(session->n_log - n + i) % KV_LIFECYCLE_LOG];
        *told = (Kvpb__Lifecycle)KVPB__LIFECYCLE__INIT;
        told->op_id = entry->op_id;
        told->kind = entry->kind;
        told->generation = entry->generation;
        told->tokens = entry->tokens;
        told->child_session_id = put_id(&entry->child_id);
        told->child_token = put_id(&entry->child_token);
        told->writer = entry->writer;
    }
    reply->n_recent = n;
    reply->recent = facts->log_list;
}

static void session_reply(struct kv_control_call *call, bool with_schema)
{
    struct kv_session *session = call->session;
    Kvpb__OpenReply reply = KVPB__OPEN_REPLY__INIT;
    Kvpb__Outcome outcome = ok_outcome();
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    struct session_facts facts;

    facts.info = session->model->info;
    placement.epoch = session->epoch;
    placement.n_nodes = session->n_nodes;
    placement.node_index = session->node_index;
    placement.root = session->root;
    reply.outcome = &outcome;
    reply.session_index = session->index;
    reply.generation = session->generation;
    reply.tokens = call->tokens;
    reply.tokens_max = session->tokens_max;
    reply.lease_ms = (uint32_t)(session->lease_us / 1000);
    reply.placement = &placement;
    reply.fingerprint = put_id(&facts.info.fingerprint);
    reply.model = facts.info.name;
    if (call->child != NULL) {
        reply.child_index = call->child->index;
        reply.child_generation = call->child->generation;
    }
    if (with_schema) {
        add_schema(&reply, &facts);
        add_log(&reply, session, &facts);
        reply.shared_tokens = session->shared_tokens;
        reply.n_writers = session->writers->n_runs;
        reply.writers = writers_message(session->writers);
        if (reply.writers == NULL) {
            kv_control_refuse(call, KV_NO_MEMORY, "%s: out of memory", kv_ops[call->op].name);
            return;
        }
    }
    Kvpb__WriterRun **writers = reply.writers;
    kv_control_reply(call, &reply.base);
    free(writers);
}

/* ---- open, resume ------------------------------------------------------------------------ */

static void open_undone(struct kv_control_call *call)
{
    kv_status_t status = (kv_status_t)(int)call->bytes; /* kept across the undoing */

    kv_session_destroy(call->node, call->session);
    kv_control_refuse(call, status, "open: %s",
                      status == KV_NO_MEMORY ? "the store's memory is full"
                                             : kv_status_name(status));
}

static void open_done(struct kv_control_call *call)
{
    struct kv_session *session = call->session;

    if (call->status != KV_OK) {
        call->bytes = (uint64_t)(int64_t)call->status;
        kv_session_close(call, session, KV_ENDED_UNSAID, open_undone);
        return;
    }
    session->busy = false;
    session->renewed_us = kv_clock_now(call->node->config.clock);
    kv_count(&call->node->stats.sessions_opened, 1);
    session_reply(call, false);
}

/* What a data thread needs to know of a session to make its part of it. */
static struct kv_command session_command(enum kv_command_kind kind,
                                         const struct kv_session *session)
{
    return (struct kv_command){
        .kind = kind,
        .index = session->index,
        .token = session->token,
        .tenant = session->tenant,
        .generation = session->generation,
        .root = session->root,
        .epoch = session->epoch,
        .n_nodes = session->n_nodes,
        .node_index = session->node_index,
        .tokens_max = session->tokens_max,
        .schema = &session->model->info.schema,
        .writers = session->writers,
    };
}

static void open_session(struct kv_control_call *call, const Kvpb__OpenRequest *request)
{
    struct kv_node *node = call->node;
    const Kvpb__Placement *placement = request->placement;
    struct kv_id128 id, token, fingerprint;

    if (!get_id(&request->session_id, &id) || !get_id(&request->token, &token) ||
        !get_id(&request->fingerprint, &fingerprint) || placement == NULL ||
        placement->n_nodes == 0 || placement->n_nodes > KV_NODES_MAX ||
        placement->node_index >= placement->n_nodes || request->tokens_max > KV_TOKENS_MAX ||
        request->writer == 0) {
        kv_control_refuse(call, KV_INVALID,
                          "open: an id, the placement, tokens_max %u or writer %llx",
                          request->tokens_max, (unsigned long long)request->writer);
        return;
    }
    struct kv_session *session = kv_map_get(node->session_of_id, &id);
    if (session != NULL) { /* asked again, its answer got lost; or somebody else's id */
        if (!kv_token_equal(&session->token, &token))
            kv_control_refuse(call, KV_EXISTS, "open: the id is another session's");
        else if (session->tenant != call->tenant)
            kv_control_refuse(call, KV_DENIED, "open: the session is another tenant's");
        else if (session->busy)
            kv_control_refuse(call, KV_BUSY, "open: the session is being opened");
        else {
            call->session = session;
            session_reply(call, false);
        }
        return;
    }
    if (atomic_load(&node->draining)) {
        kv_control_refuse(call, KV_DRAINING, "open: the node is about to stop");
        return;
    }
    struct kv_model *known = model_find(node, &fingerprint);
    if (known == NULL || known->saving) {
        kv_control_refuse(call, KV_NOT_FOUND, "open: no model with that fingerprint");
        return;
    }
    session = kv_session_create(node, &id, known);
    if (session == NULL) {
        kv_control_refuse(call, KV_BUSY, "open: %u sessions already", node->n_sessions);
        return;
    }
    session->writers = kv_writers_create(NULL, 0, request->writer);
    if (session->writers == NULL) {
        kv_session_destroy(node, session);
        kv_control_refuse(call, KV_NO_MEMORY, "open: out of memory");
        return;
    }
    session->token = token;
    session->tenant = call->tenant;
    session->tokens_max = request->tokens_max > 0 ? request->tokens_max : KV_TOKENS_MAX;
    session->lease_us = lease_of(node, request->lease_ms);
    session->root = placement->root;
    session->epoch = placement->epoch;
    session->n_nodes = placement->n_nodes;
    session->node_index = placement->node_index;
    call->session = session;
    struct kv_command command = session_command(KV_COMMAND_SESSION_OPEN, session);
    kv_control_ask(call, &command, open_done);
}

void kv_control_open(struct kv_control_call *call)
{
    Kvpb__OpenRequest *request =
        kvpb__open_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "open: not a request of this protocol");
    else
        open_session(call, request);
    kvpb__open_request__free_unpacked(request, NULL);
}

static void resume_done(struct kv_control_call *call)
{
    call->session->busy = false;
    session_reply(call, true);
}

static void resume(struct kv_control_call *call, const Kvpb__ResumeRequest *request)
{
    struct kv_node *node = call->node;
    struct kv_id128 id;
    struct kv_session *session =
        get_id(&request->session_id, &id) ? kv_map_get(node->session_of_id, &id) : NULL;

    if (session == NULL) {
        refuse_session(call, &request->token, "session");
        return;
    }
    session = session_of(call, session->index, &request->token);
    if (session == NULL)
        return;
    if (request->lease_ms != 0)
        session->lease_us = lease_of(node, request->lease_ms);
    session->busy = true;
    call->session = session;
    call->tokens = UINT32_MAX;
    kv_control_ask(
        call, &(struct kv_command){.kind = KV_COMMAND_SESSION_LENGTH, .index = session->index},
        resume_done);
}

void kv_control_resume(struct kv_control_call *call)
{
    Kvpb__ResumeRequest *request =
        kvpb__resume_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "resume: not a request of this protocol");
    else
        resume(call, request);
    kvpb__resume_request__free_unpacked(request, NULL);
}

/* ---- lifecycle: fork, truncate ----------------------------------------------------------- */

static void lifecycle_record(struct kv_control_call *call)
{
    struct kv_session *session = call->session;

    session->generation++;
    session->busy = false;
    session->log[session->n_log++ % KV_LIFECYCLE_LOG] = call->lifecycle;
}

/* Finds the session and checks that the operation is the next one for it.  Answers by itself,
 * and returns NULL, where it is not, or was done before. */
static struct kv_session *lifecycle_begin(struct kv_control_call *call,
                                          uint32_t index,
                                          const ProtobufCBinaryData *token,
                                          const Kvpb__Lifecycle *operation)
{
    struct kv_node *node = call->node;
    struct kv_session *session = session_of(call, index, token);

    if (session == NULL)
        return NULL;
    if (operation == NULL || operation->tokens > session->tokens_max) {
        kv_control_refuse(call, KV_INVALID, "%s: tokens %u, at most %u", kv_ops[call->op].name,
                          operation != NULL ? operation->tokens : 0, session->tokens_max);
        return NULL;
    }
    uint32_t n_log = session->n_log < KV_LIFECYCLE_LOG ? session->n_log : KV_LIFECYCLE_LOG;
    for (uint32_t i = 0; i < n_log; i++) {
        const struct kv_lifecycle *done = &session->log[i];
        if (done->op_id != operation->op_id)
            continue;
        call->session = session;
        if (done->kind == KV_OP_FORK) {
            call->child = kv_map_get(node->session_of_id, &done->child_id);
            if (call->child == NULL) {
                kv_control_refuse(call, KV_NOT_FOUND, "fork: was done, but the child is gone");
                return NULL;
            }
        }
        session_reply(call, false);
        return NULL;
    }
    if (operation->generation != session->generation) {
        kv_control_refuse(call, KV_STALE, "%s: session %u is at generation %u, not %u",
                          kv_ops[call->op].name, index, session->generation,
                          operation->generation);
        return NULL;
    }
    if (operation->writer == 0) {
        kv_control_refuse(call, KV_INVALID, "%s: writer 0", kv_ops[call->op].name);
        return NULL;
    }
    if (kv_writers_count(session->writers, operation->tokens, operation->writer) >
        KV_WRITER_RUNS_MAX) {
        kv_control_refuse(call, KV_TOO_LARGE,
                          "%s: rows of more than %d writers: too many forks of forks",
                          kv_ops[call->op].name, KV_WRITER_RUNS_MAX);
        return NULL;
    }
    call->session = session;
    call->lifecycle = (struct kv_lifecycle){
        .op_id = operation->op_id,
        .kind = call->op,
        .generation = operation->generation,
        .tokens = operation->tokens,
        .writer = operation->writer,
    };
    return session;
}

static void fork_advanced(struct kv_control_call *call)
{
    struct kv_session *session = call->session, *child = call->child;

    if (call->lifecycle.tokens > session->shared_tokens)
        session->shared_tokens = call->lifecycle.tokens;

    child->busy = false;
    child->renewed_us = kv_clock_now(call->node->config.clock);
    lifecycle_record(call);
    kv_count(&call->node->stats.sessions_opened, 1);
    session_reply(call, false);
}

static void fork_undone(struct kv_control_call *call)
{
    kv_status_t status = (kv_status_t)(int)call->bytes;

    call->session->busy = false;
    kv_session_destroy(call->node, call->child);
    if (status == KV_INVALID)
        kv_control_refuse(call, status, "fork: fewer than %u tokens are committed",
                          call->lifecycle.tokens);
    else
        kv_control_refuse(call, status, "fork: %s",
                          status == KV_NO_MEMORY ? "the store's memory is full"
                                                 : kv_status_name(status));
}

static void fork_done(struct kv_control_call *call)
{
    if (call->status != KV_OK) {
        call->bytes = (uint64_t)(int64_t)call->status;
        kv_session_close(call, call->child, KV_ENDED_UNSAID, fork_undone);
        return;
    }
    kv_control_ask(call,
                   &(struct kv_command){.kind = KV_COMMAND_SESSION_GENERATION,
                                        .index = call->session->index,
                                        .generation = call->session->generation + 1},
                   fork_advanced);
}

static void fork_session(struct kv_control_call *call, const Kvpb__ForkRequest *request)
{
    struct kv_node *node = call->node;
    struct kv_session *session =
        lifecycle_begin(call, request->session_index, &request->token, request->operation);

    if (session == NULL)
        return;
    if (!get_id(&request->operation->child_session_id, &call->lifecycle.child_id) ||
        !get_id(&request->operation->child_token, &call->lifecycle.child_token) ||
        kv_map_get(node->session_of_id, &call->lifecycle.child_id) != NULL) {
        kv_control_refuse(call, KV_INVALID, "fork: the child's id or token");
        return;
    }
    if (atomic_load(&node->draining)) {
        kv_control_refuse(call, KV_DRAINING, "fork: the node is about to stop");
        return;
    }
    struct kv_session *child =
        kv_session_create(node, &call->lifecycle.child_id, session->model);
    if (child == NULL) {
        kv_control_refuse(call, KV_BUSY, "fork: %u sessions already", node->n_sessions);
        return;
    }
    child->writers =
        kv_writers_create(session->writers, call->lifecycle.tokens, call->lifecycle.writer);
    if (child->writers == NULL) {
        kv_session_destroy(node, child);
        kv_control_refuse(call, KV_NO_MEMORY, "fork: out of memory");
        return;
    }
    child->token = call->lifecycle.child_token;
    child->tenant = session->tenant;
    child->tokens_max = session->tokens_max;
    child->lease_us = lease_of(node, request->lease_ms);
    child->root = session->root;
    child->epoch = session->epoch;
    child->n_nodes = session->n_nodes;
    child->node_index = session->node_index;
    session->busy = true;
    call->child = child;
    call->lifecycle.child_index = child->index;

    struct kv_command command = session_command(KV_COMMAND_SESSION_FORK, child);
    command.index = session->index;
    command.child_index = child->index;
    command.tokens = call->lifecycle.tokens;
    kv_control_ask(call, &command, fork_done);
}

void kv_control_fork(struct kv_control_call *call)
{
    Kvpb__ForkRequest *request =
        kvpb__fork_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "fork: not a request of this protocol");
    else
        fork_session(call, request);
    kvpb__fork_request__free_unpacked(request, NULL);
}

static void truncate_done(struct kv_control_call *call)
{
    struct kv_session *session = call->session;

    if (kv_writers_own(call->writers) != kv_writers_own(session->writers))
        session->shared_tokens = 0;
    free(session->writers);
    session->writers = call->writers;
    call->writers = NULL;
    lifecycle_record(call);
    session_reply(call, false);
}

static void truncate_session(struct kv_control_call *call, struct kv_session *session)
{
    const struct kv_lifecycle *lifecycle = &call->lifecycle;

    call->writers = kv_writers_create(session->writers, lifecycle->tokens, lifecycle->writer);
    if (call->writers == NULL) {
        kv_control_refuse(call, KV_NO_MEMORY, "truncate: out of memory");
        return;
    }
    session->busy = true;
    kv_control_ask(call,
                   &(struct kv_command){.kind = KV_COMMAND_SESSION_TRUNCATE,
                                        .index = session->index,
                                        .generation = session->generation + 1,
                                        .tokens = lifecycle->tokens,
                                        .writers = call->writers},
                   truncate_done);
}

void kv_control_truncate(struct kv_control_call *call)
{
    Kvpb__TruncateRequest *request =
        kvpb__truncate_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL) {
        kv_control_refuse(call, KV_INVALID, "truncate: not a request of this protocol");
        return;
    }
    struct kv_session *session =
        lifecycle_begin(call, request->session_index, &request->token, request->operation);
    if (session != NULL)
        truncate_session(call, session);
    kvpb__truncate_request__free_unpacked(request, NULL);
}

/* ---- close, renew, session --------------------------------------------------------------- */

static void close_done(struct kv_control_call *call)
{
    kv_count(&call->node->stats.sessions_closed, 1);
    kv_session_destroy(call->node, call->session);
    kv_control_refuse(call, KV_OK, "%s", "");
}

void kv_control_close(struct kv_control_call *call)
{
    Kvpb__CloseRequest *request =
        kvpb__close_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL) {
        kv_control_refuse(call, KV_INVALID, "close: not a request of this protocol");
        return;
    }
    struct kv_session *session = session_of(call, request->session_index, &request->token);
    if (session != NULL) {
        session->busy = true;
        call->session = session;
        kv_session_close(call, session, KV_ENDED_CLOSED, close_done);
    }
    kvpb__close_request__free_unpacked(request, NULL);
}

void kv_control_renew(struct kv_control_call *call)
{
    Kvpb__RenewRequest *request =
        kvpb__renew_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL) {
        kv_control_refuse(call, KV_INVALID, "renew: not a request of this protocol");
        return;
    }
    struct kv_session *session = session_of(call, request->session_index, &request->token);
    if (session != NULL) {
        Kvpb__RenewReply reply = KVPB__RENEW_REPLY__INIT;
        Kvpb__Outcome outcome = ok_outcome();

        if (request->lease_ms != 0)
            session->lease_us = lease_of(call->node, request->lease_ms);
        reply.outcome = &outcome;
        reply.lease_ms = (uint32_t)(session->lease_us / 1000);
        kv_control_reply(call, &reply.base);
    }
    kvpb__renew_request__free_unpacked(request, NULL);
}

static void session_told(struct kv_control_call *call)
{
    struct kv_session *session = call->session;
    Kvpb__SessionReply reply = KVPB__SESSION_REPLY__INIT;
    Kvpb__Outcome outcome = ok_outcome();

    session->busy = false;
    reply.outcome = &outcome;
    reply.generation = session->generation;
    reply.tokens = call->tokens;
    reply.bytes = call->bytes;
    uint64_t now_us = kv_clock_now(call->node->config.clock);
    reply.lease_left_ms =
        (uint32_t)(kv_session_lease_left_us(call->node, session, now_us) / 1000);
    kv_control_reply(call, &reply.base);
}

void kv_control_session(struct kv_control_call *call)
{
    Kvpb__SessionRequest *request =
        kvpb__session_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL) {
        kv_control_refuse(call, KV_INVALID, "session: not a request of this protocol");
        return;
    }
    struct kv_session *session = session_of(call, request->session_index, &request->token);
    if (session != NULL) {
        session->busy = true;
        call->session = session;
        call->tokens = UINT32_MAX;
        kv_control_ask(
            call,
            &(struct kv_command){.kind = KV_COMMAND_SESSION_LENGTH, .index = session->index},
            session_told);
    }
    kvpb__session_request__free_unpacked(request, NULL);
}

/* ---- table, drain ------------------------------------------------------------------------ */

void kv_control_table(struct kv_control_call *call)
{
    Kvpb__TableRequest *request =
        kvpb__table_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "table: not a request of this protocol");
    else
        kv_tables_reply(call, request->name);
    kvpb__table_request__free_unpacked(request, NULL);
}

void kv_control_drain(struct kv_control_call *call)
{
    struct kv_node *node = call->node;

    kv_node_drain(node);
    atomic_store(&node->drain_requested, true);
    kv_control_refuse(call, KV_OK, "%s", "");
}
