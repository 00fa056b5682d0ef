#include "tests/system/traffic.h"

#include "client/include/kvclient.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"
#include "tests/support/process.h"
#include "tests/support/rows.h"
#include "tests/system/system.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    N_SESSIONS = 4,
    N_OBJECTS = 16,
    N_SLOTS = 8, /* operations in flight */
    TOKENS_MAX = 1200,
    PUT_TOKENS_MAX = 200,
    READ_TOKENS_MAX = 64,
    IDS_MAX = 24, /* of one head */
    HEADS_MAX = 3,
    SLOT_BYTES = 512 << 10,
    SLOT_ROWS = SLOT_BYTES / 128,
    OBJECT_BYTES_MAX = 300 << 10,
    TELL_EVERY = 20,
    TELLS = 200,
    LEASE_MS = 30000, /* of sessions; the library renews it */
};

struct model_session {
    struct kv_session *session; /* NULL: none */
    bool is_broken;             /* the outcome of some operation is not known */
    uint32_t n_tokens;
    uint32_t n_slots; /* in flight */
    uint64_t salts[TOKENS_MAX];
};

struct model_object {
    char name[64];
    uint32_t version; /* of the name: a new one when it is not known what the old one holds */
    bool exists, is_busy;
    uint64_t salt;
    size_t bytes;
};

enum action {
    ACTION_NONE,
    ACTION_APPEND,
    ACTION_PUT,
    ACTION_READ,
    ACTION_FETCH,
    ACTION_TRUNCATE,
    ACTION_FORK,
    ACTION_CLOSE,
    ACTION_LENGTH,
    ACTION_OBJECT,
};

struct slot {
    enum action action;
    struct kv_op *op;
    struct model_session *session;
    kv_status_t wanted;
    uint8_t *data;
    size_t offset; /* of it in the buffer */
    uint32_t *crcs;
    struct kv_ticket ticket; /* read, fetch: of the session when it began, */
    uint32_t generation;     /* and its generation */

    /* What comes back. */
    struct kv_rows box;
    uint64_t salts[READ_TOKENS_MAX];
    uint32_t layer, n_heads, n_ids[HEADS_MAX];
    uint32_t ids[HEADS_MAX * IDS_MAX];
    uint64_t id_salts[HEADS_MAX * IDS_MAX];
    struct model_session *child; /* fork: as it must be */
    uint32_t tokens;             /* length, as it must be */

    enum kv_object_verb verb;
    struct model_object *object;
    struct kv_object item;
};

struct traffic {
    const struct traffic_options *options;
    struct kv_client *client;
    struct kv_model_info model;
    struct kv_buffer *buffer;
    struct kv_random random;
    struct model_session sessions[N_SESSIONS];
    struct model_object objects[N_OBJECTS];
    struct slot slots[N_SLOTS];
    uint64_t n_ok, n_failed, n_opened, next_salt;
    bool is_wrong;
};

static uint32_t below(struct traffic *traffic, uint32_t n)
{
    return (uint32_t)kv_random_below(&traffic->random, n);
}

static void wrong(struct traffic *traffic, const char *what)
{
    process_complain("traffic: seed %llu: operation %llu: %s: %s",
                     (unsigned long long)traffic->options->seed,
                     (unsigned long long)(traffic->n_ok + traffic->n_failed), what,
                     kv_client_detail(traffic->client));
    traffic->is_wrong = true;
}

/* ---- what came back ---------------------------------------------------------------------- */

static void note_session(struct slot *slot)
{
    kv_session_ticket(slot->session->session, &slot->ticket);
    slot->generation = kv_session_generation(slot->session->session);
}

static bool is_as_it_was(const struct slot *slot)
{
    const struct kv_session *session = slot->session->session;
    struct kv_ticket ticket;

    if (session == NULL || kv_session_generation(session) != slot->generation)
        return false;
    kv_session_ticket(session, &ticket);
    return memcmp(&ticket, &slot->ticket, sizeof(ticket)) == 0;
}

static bool is_row(const struct slot *slot,
                   size_t at,
                   size_t bytes,
                   uint64_t salt,
                   uint32_t layer,
                   uint32_t head,
                   uint32_t token,
                   size_t index)
{
    const struct kv_session *session = slot->session->session;
    const uint8_t *row = slot->data + at;

    if (!test_is_row(row, bytes, salt, layer, head, token))
        return false;
    /* A truncate since then may have given the token another writer; or the session is gone, or
     * another one has its place. */
    return !is_as_it_was(slot) ||
           slot->crcs[index] == kv_row_crc(session, row, bytes, layer, head, token);
}

static bool check_read(const struct traffic *traffic, const struct slot *slot)
{
    const struct kv_rows *box = &slot->box;
    size_t at = 0, n = 0;

    for (uint32_t layer = box->layer_begin; layer < box->layer_begin + box->n_layers; layer++) {
        const struct kv_layer_schema *schema = &traffic->model.schema.layers[layer];
        uint32_t end =
            box->n_kv_heads > 0 ? box->kv_head_begin + box->n_kv_heads : schema->n_kv_heads;

        for (uint32_t head = box->kv_head_begin; head < end; head++) {
            for (uint32_t i = 0; i < box->n_tokens; i++, n++, at += schema->row_bytes)
                if (!is_row(slot, at, schema->row_bytes, slot->salts[i], layer, head,
                            box->token_begin + i, n))
                    return false;
        }
    }
    return true;
}

static bool check_fetch(const struct traffic *traffic, const struct slot *slot)
{
    size_t row_bytes = traffic->model.schema.layers[slot->layer].row_bytes;
    size_t n = 0;

    for (uint32_t head = 0; head < slot->n_heads; head++)
        for (uint32_t i = 0; i < slot->n_ids[head]; i++, n++)
            if (!is_row(slot, n * row_bytes, row_bytes, slot->id_salts[n], slot->layer, head,
                        slot->ids[n], n))
                return false;
    return true;
}

static void forget_session(struct model_session *session)
{
    kv_session_free(session->session);
    session->session = NULL;
    session->is_broken = false;
    session->n_tokens = 0;
}

/* A fork has made a session: it takes the place of one that is not in use, or is let go. */
static void keep_child(struct traffic *traffic, struct slot *slot)
{
    struct kv_session *child = kv_op_session(slot->op);
    struct kv_op *op;

    if (child == NULL) {
        wrong(traffic, "a fork without a session");
        return;
    }
    for (unsigned i = 0; i < N_SESSIONS; i++) {
        struct model_session *session = &traffic->sessions[i];

        if (session->session == NULL) {
            slot->child->n_slots = session->n_slots; /* of the one that was there before */
            *session = *slot->child;
            session->session = child;
            return;
        }
    }
    if (kv_close_begin(child, traffic->options->deadline_ms, &op) == KV_OK)
        kv_finish(op);
    kv_session_free(child);
}

static void object_ended(struct traffic *traffic, struct slot *slot, kv_status_t status)
{
    struct model_object *object = slot->object;

    if (slot->verb == KV_OBJECT_PUT) {
        object->exists = true;
    } else if (slot->verb == KV_OBJECT_DELETE) {
        object->exists = false;
    } else if (status == KV_OK) {
        if (slot->item.bytes != object->bytes ||
            (slot->verb == KV_OBJECT_GET &&
             !test_is_filled(slot->data, object->bytes, object->salt)))
            wrong(traffic, "an object with other bytes");
    }
}

static void rename_object(const struct traffic *traffic, struct model_object *object)
{
    object->version++;
    object->exists = false;
    snprintf(object->name, sizeof(object->name), "traffic/%llu/%u.%u",
             (unsigned long long)traffic->options->seed, (unsigned)(object - traffic->objects),
             object->version);
}

static void op_failed(struct traffic *traffic, struct slot *slot, kv_status_t status)
{
    const char *detail = kv_op_detail(slot->op);

    traffic->n_failed++;
    if (!traffic->options->nodes_may_fail) {
        wrong(traffic, kv_status_name(status));
        return;
    }
    if (kv_op_elapsed_us(slot->op) >
        (traffic->options->deadline_ms + SYSTEM_SLACK_MS) * UINT64_C(1000))
        wrong(traffic, "ended long after its deadline");
    if (slot->object != NULL) {
        /* A node that was killed has forgotten what it had. */
        if (status == KV_NOT_FOUND && slot->verb != KV_OBJECT_PUT && slot->object->exists)
            status = KV_UNREACHABLE;
        rename_object(traffic, slot->object);
    }
    if (slot->session != NULL) {
        /* What a read waits for may be a put that a dead node holds up; it ends a moment later.
         */
        bool may_wait = slot->session->is_broken || slot->session->n_slots > 1;

        slot->session->is_broken = true;
        if (status == KV_NOT_READY && may_wait)
            return;
        if (status == KV_CANCELLED || status == KV_NOT_FOUND || status == KV_STALE)
            return;
    }
    if (status != KV_UNREACHABLE && status != KV_DEADLINE && status != KV_DRAINING)
        wrong(traffic, kv_status_name(status));
    else if (detail[0] != 0 && strncmp(detail, "node ", 5) != 0 &&
             strstr(detail, ": after ") == NULL)
        wrong(traffic, "a failure that names no node");
}

static void slot_ended(struct traffic *traffic, struct slot *slot)
{
    kv_status_t status = kv_op_status(slot->op);

    if (status != slot->wanted) {
        op_failed(traffic, slot, status);
    } else {
        traffic->n_ok++;
        if (slot->action == ACTION_READ && !check_read(traffic, slot))
            wrong(traffic, "a read with wrong rows");
        else if (slot->action == ACTION_FETCH && !check_fetch(traffic, slot))
            wrong(traffic, "a fetch with wrong rows");
        else if (slot->action == ACTION_LENGTH && kv_op_tokens(slot->op) < slot->tokens)
            wrong(traffic, "a length that is too short");
        else if (slot->action == ACTION_FORK)
            keep_child(traffic, slot);
        else if (slot->action == ACTION_OBJECT)
            object_ended(traffic, slot, status);
    }
    kv_op_free(slot->op);
    free(slot->child);
    if (slot->session != NULL)
        slot->session->n_slots--;
    if (slot->session != NULL && slot->action == ACTION_CLOSE)
        forget_session(slot->session);
    if (slot->object != NULL)
        slot->object->is_busy = false;
    slot->op = NULL;
    slot->child = NULL;
    slot->session = NULL;
    slot->object = NULL;
    slot->action = ACTION_NONE;
}

/* ---- what goes out ----------------------------------------------------------------------- */

static kv_status_t
begin_put(struct traffic *traffic, struct slot *slot, uint32_t n_tokens, bool is_append)
{
    struct model_session *session = slot->session;
    const kv_schema_t *schema = &traffic->model.schema;
    struct kv_rows_io io = {.buffer = traffic->buffer, .offset = slot->offset};
    struct kv_rows box = {.n_layers = schema->n_layers, .n_tokens = n_tokens};
    uint32_t overlap = session->n_tokens < 20 ? session->n_tokens : 20;
    uint8_t *at = slot->data;

    if (session->n_tokens + n_tokens > TOKENS_MAX)
        n_tokens = box.n_tokens = TOKENS_MAX - session->n_tokens;
    /* Now and then rows are put again that are there already. */
    box.token_begin = session->n_tokens;
    if (!is_append && overlap > 0)
        box.token_begin -= below(traffic, overlap);
    box.n_tokens += session->n_tokens - box.token_begin;
    for (; session->n_tokens < box.token_begin + box.n_tokens; session->n_tokens++)
        session->salts[session->n_tokens] = traffic->next_salt++;
    for (uint32_t layer = 0; layer < schema->n_layers; layer++) {
        size_t bytes = schema->layers[layer].row_bytes;

        for (uint32_t head = 0; head < schema->layers[layer].n_kv_heads; head++)
            for (uint32_t i = 0; i < box.n_tokens; i++, at += bytes)
                test_row(at, bytes, session->salts[box.token_begin + i], layer, head,
                         box.token_begin + i);
    }
    slot->action = is_append ? ACTION_APPEND : ACTION_PUT;
    return is_append ? kv_append_begin(session->session, &box, &io,
                                       traffic->options->deadline_ms, &slot->op)
                     : kv_put_begin(session->session, &box, &io, traffic->options->deadline_ms,
                                    &slot->op);
}

static kv_status_t begin_read(struct traffic *traffic, struct slot *slot)
{
    struct model_session *session = slot->session;
    const kv_schema_t *schema = &traffic->model.schema;
    struct kv_rows_io io = {
        .buffer = traffic->buffer, .offset = slot->offset, .crcs = slot->crcs};
    struct kv_rows *box = &slot->box;

    *box = (struct kv_rows){.n_layers = schema->n_layers};
    if (below(traffic, 2) == 0) {
        box->layer_begin = below(traffic, schema->n_layers);
        box->n_layers = 1;
        box->kv_head_begin = below(traffic, schema->layers[box->layer_begin].n_kv_heads);
        box->n_kv_heads = 1 + below(traffic, schema->layers[box->layer_begin].n_kv_heads -
                                                 box->kv_head_begin);
    }
    box->token_begin = below(traffic, session->n_tokens);
    box->n_tokens = 1 + below(traffic, READ_TOKENS_MAX);
    if (box->n_tokens > session->n_tokens - box->token_begin)
        box->n_tokens = session->n_tokens - box->token_begin;
    memcpy(slot->salts, session->salts + box->token_begin,
           box->n_tokens * sizeof(slot->salts[0]));
    memset(slot->data, 0, kv_rows_bytes(schema, box));
    slot->action = ACTION_READ;
    note_session(slot);
    return kv_read_begin(session->session, box, &io, traffic->options->deadline_ms, &slot->op);
}

static kv_status_t begin_fetch(struct traffic *traffic, struct slot *slot)
{
    struct model_session *session = slot->session;
    const kv_schema_t *schema = &traffic->model.schema;
    struct kv_rows_io io = {
        .buffer = traffic->buffer, .offset = slot->offset, .crcs = slot->crcs};
    struct kv_fetch fetch = {.n_ids = slot->n_ids, .ids = slot->ids};
    uint32_t n = 0;

    slot->layer = fetch.layer = below(traffic, schema->n_layers);
    slot->n_heads = schema->layers[slot->layer].n_kv_heads;
    for (uint32_t head = 0; head < slot->n_heads; head++) {
        slot->n_ids[head] = below(traffic, IDS_MAX + 1);
        if (head + 1 == slot->n_heads && n == 0 && slot->n_ids[head] == 0)
            slot->n_ids[head] = 1;
        for (uint32_t i = 0; i < slot->n_ids[head]; i++, n++) {
            slot->ids[n] = below(traffic, session->n_tokens);
            slot->id_salts[n] = session->salts[slot->ids[n]];
        }
    }
    memset(slot->data, 0, n * schema->layers[slot->layer].row_bytes);
    slot->action = ACTION_FETCH;
    note_session(slot);
    return kv_fetch_begin(session->session, &fetch, &io, traffic->options->deadline_ms,
                          &slot->op);
}

static kv_status_t begin_fork(struct traffic *traffic, struct slot *slot)
{
    struct model_session *session = slot->session;
    uint32_t tokens = below(traffic, session->n_tokens + 1);

    slot->child = malloc(sizeof(*slot->child));
    if (slot->child == NULL)
        abort();
    *slot->child = *session;
    slot->child->n_tokens = tokens;
    slot->action = ACTION_FORK;
    return kv_fork_begin(session->session, tokens, traffic->options->deadline_ms, &slot->op);
}

static kv_status_t begin_object(struct traffic *traffic, struct slot *slot)
{
    static const enum kv_object_verb verbs[] = {KV_OBJECT_PUT, KV_OBJECT_GET, KV_OBJECT_GET,
                                                KV_OBJECT_EXISTS, KV_OBJECT_DELETE};
    struct model_object *object = slot->object;

    slot->action = ACTION_OBJECT;
    slot->verb = verbs[below(traffic, 5)];
    if (slot->verb == KV_OBJECT_PUT && !object->exists) {
        object->salt = traffic->next_salt++;
        /* Small ones and large ones as often. */
        object->bytes = 1 + below(traffic, OBJECT_BYTES_MAX >> below(traffic, 14));
    }
    if (slot->verb == KV_OBJECT_PUT)
        test_fill(slot->data, object->bytes, object->salt);
    else if (!object->exists)
        slot->wanted = KV_NOT_FOUND;
    slot->item = (struct kv_object){
        .name = object->name,
        .buffer = traffic->buffer,
        .offset = slot->offset,
        .bytes = slot->verb == KV_OBJECT_PUT ? object->bytes : OBJECT_BYTES_MAX,
    };
    return kv_objects_begin(traffic->client, slot->verb, &slot->item, 1,
                            traffic->options->deadline_ms, &slot->op);
}

static void open_session(struct traffic *traffic, struct model_session *session)
{
    struct kv_op *op;
    kv_status_t status;

    status = kv_open_begin(traffic->client, &traffic->model, NULL,
                           traffic->options->deadline_ms, &op);
    if (status == KV_OK) {
        status = kv_wait(op);
        session->session = kv_op_session(op);
        kv_op_free(op);
    }
    if (status == KV_OK) {
        traffic->n_opened++;
        traffic->n_ok++;
    } else {
        traffic->n_failed++;
        if (!traffic->options->nodes_may_fail)
            wrong(traffic, "open");
    }
}

static kv_status_t begin_on_session(struct traffic *traffic, struct slot *slot)
{
    struct model_session *session = slot->session;
    uint32_t dice = below(traffic, 1000);

    if (dice < 4) {
        slot->action = ACTION_CLOSE;
        return kv_close_begin(session->session, traffic->options->deadline_ms, &slot->op);
    }
    if (dice < 12)
        return begin_fork(traffic, slot);
    if (dice < 24 || session->n_tokens > TOKENS_MAX - PUT_TOKENS_MAX) {
        session->n_tokens = below(traffic, session->n_tokens + 1);
        slot->action = ACTION_TRUNCATE;
        return kv_truncate_begin(session->session, session->n_tokens,
                                 traffic->options->deadline_ms, &slot->op);
    }
    if (dice < 44) {
        slot->action = ACTION_LENGTH;
        return kv_length_begin(session->session, traffic->options->deadline_ms, &slot->op);
    }
    if (dice < 90 || session->n_tokens == 0)
        return begin_put(traffic, slot, 1 + below(traffic, PUT_TOKENS_MAX), false);
    if (dice < 400)
        return begin_put(traffic, slot, 1 + below(traffic, 4), true);
    return dice < 700 ? begin_read(traffic, slot) : begin_fetch(traffic, slot);
}

/* Begins something in a free slot. */
static void begin(struct traffic *traffic, struct slot *slot)
{
    struct model_session *session = &traffic->sessions[below(traffic, N_SESSIONS)];
    struct model_object *object = &traffic->objects[below(traffic, N_OBJECTS)];
    kv_status_t status;

    slot->wanted = KV_OK;
    if (below(traffic, 8) == 0) {
        if (object->is_busy)
            return;
        slot->object = object;
        object->is_busy = true;
        status = begin_object(traffic, slot);
    } else {
        if (session->is_broken && session->n_slots == 0)
            forget_session(session);
        if (session->session == NULL)
            open_session(traffic, session);
        if (session->session == NULL || session->is_broken)
            return;
        slot->session = session;
        session->n_slots++;
        status = begin_on_session(traffic, slot);
        /* Nothing more is begun behind it. */
        if (slot->action == ACTION_CLOSE)
            session->is_broken = true;
    }
    if (status != KV_OK)
        wrong(traffic, "an operation cannot be begun");
}

/* ---- running ----------------------------------------------------------------------------- */

static void tell(struct traffic *traffic)
{
    printf("traffic ok=%llu failed=%llu sessions=%llu rows=", (unsigned long long)traffic->n_ok,
           (unsigned long long)traffic->n_failed, (unsigned long long)traffic->n_opened);
    for (uint32_t i = 0; i < kv_client_n_nodes(traffic->client); i++) {
        struct kv_node_info info;

        kv_client_node(traffic->client, i, &info);
        printf("%s%llu/%llu", i > 0 ? "," : "", (unsigned long long)info.rows_in,
               (unsigned long long)info.rows_out);
    }
    printf("\n");
    fflush(stdout);
}

static bool is_stopped(const struct traffic *traffic)
{
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};

    if (traffic->options->n_ops > 0)
        return traffic->n_ok + traffic->n_failed >= traffic->options->n_ops;
    return poll(&in, 1, 0) > 0;
}

static void run(struct traffic *traffic)
{
    /* All lines of a run of known length fit the pipe: the reader may be busy with another. */
    uint64_t tell_every = traffic->options->n_ops / TELLS > TELL_EVERY
                              ? traffic->options->n_ops / TELLS
                              : TELL_EVERY;
    uint64_t told = 0;
    bool is_ending = false;

    while (!traffic->is_wrong) {
        unsigned n_busy = 0;

        for (unsigned i = 0; i < N_SLOTS && !traffic->is_wrong; i++) {
            struct slot *slot = &traffic->slots[i];

            if (slot->op != NULL && kv_op_status(slot->op) != KV_IN_PROGRESS)
                slot_ended(traffic, slot);
            if (slot->op == NULL && !is_ending)
                begin(traffic, slot);
            n_busy += slot->op != NULL;
        }
        if (is_ending && n_busy == 0)
            break;
        if (traffic->n_ok >= told + tell_every || (traffic->n_ok + traffic->n_failed) % 64 == 0)
            is_ending = is_ending || is_stopped(traffic);
        if (traffic->n_ok >= told + tell_every) {
            told = traffic->n_ok;
            tell(traffic);
        }
        kv_client_wait(traffic->client, 20000);
    }
}

int traffic_run(const struct traffic_options *options)
{
    static const uint16_t heads[] = {2, 1, 3};
    struct kv_client_options client_options = {
        .nodes = options->nodes,
        .transport = options->transport,
        .deadline_ms = options->deadline_ms,
        .peer_timeout_ms = SYSTEM_PEER_MS,
    };
    struct traffic *traffic = calloc(1, sizeof(*traffic));
    int result = EXIT_FAILURE;
    char detail[512];

    if (traffic == NULL)
        return result;
    traffic->options = options;
    traffic->next_salt = kv_mix64(options->seed);
    kv_random_init(&traffic->random, options->seed);
    test_model(&traffic->model, "traffic", 3, heads, 32, 32);
    if (kv_client_open(&client_options, &traffic->client, detail, sizeof(detail)) != KV_OK) {
        process_complain("traffic: %s", detail);
        free(traffic);
        return result;
    }
    if (kv_buffer_alloc(traffic->client, (size_t)N_SLOTS * SLOT_BYTES, &traffic->buffer) !=
        KV_OK)
        goto out;
    for (unsigned i = 0; i < N_SLOTS; i++) {
        traffic->slots[i].offset = (size_t)i * SLOT_BYTES;
        traffic->slots[i].data =
            (uint8_t *)kv_buffer_data(traffic->buffer) + traffic->slots[i].offset;
        traffic->slots[i].crcs = calloc(SLOT_ROWS, sizeof(uint32_t));
        if (traffic->slots[i].crcs == NULL)
            goto out;
    }
    for (unsigned i = 0; i < N_OBJECTS; i++)
        rename_object(traffic, &traffic->objects[i]);
    run(traffic);
    tell(traffic);
    result = traffic->is_wrong ? EXIT_FAILURE : EXIT_SUCCESS;

out:
    kv_client_close(traffic->client);
    for (unsigned i = 0; i < N_SLOTS; i++) {
        free(traffic->slots[i].crcs);
        free(traffic->slots[i].child);
    }
    free(traffic);
    return result;
}
