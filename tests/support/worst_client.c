#include "tests/support/worst_client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_OBJECTS = 2,
    N_SESSIONS = 2,
    N_LAYERS = 4,
    N_HEADS = 3,
    D = 64,
    PUT_TOKENS = 256,
    N_PUTS = 32, /* of a session, all in flight */
    PUT_BYTES = N_LAYERS * N_HEADS * PUT_TOKENS * D * 4,
    LEASE_MS = 10000,
    DEADLINE_MS = 10000,
    GOODBYE_MS = 3000,
};

/* One object: deleted and put, in turn. */
struct object_work {
    char name[32];
    struct kv_object object;
    struct kv_op *op;
    bool is_put;
};

/* One session: opened, filled, indexed, closed, in turn. */
enum rows_phase {
    ROWS_OPEN,
    ROWS_PUT,
    ROWS_INDEX,
    ROWS_CLOSE,
    N_ROWS_PHASES,
};

struct rows_work {
    enum rows_phase phase;
    struct kv_session *session;
    struct kv_op *ops[N_PUTS];
    unsigned n_ops;
};

struct worst_client {
    struct kv_client *client;
    struct kv_model_info model;
    struct kv_buffer *buffer;
    struct object_work objects[N_OBJECTS];
    struct rows_work rows[N_SESSIONS];
    bool has_object, has_index; /* begun so far */
};

/* Frees the operations if all have ended. */
static bool have_ended(struct kv_op **ops, unsigned *n_ops)
{
    for (unsigned i = 0; i < *n_ops; i++)
        if (kv_op_status(ops[i]) == KV_IN_PROGRESS)
            return false;
    for (unsigned i = 0; i < *n_ops; i++)
        kv_op_free(ops[i]);
    *n_ops = 0;
    return true;
}

static void step_object(struct worst_client *worst, struct object_work *work)
{
    const enum kv_object_verb verb = work->is_put ? KV_OBJECT_DELETE : KV_OBJECT_PUT;
    unsigned n_ops = work->op != NULL ? 1 : 0;

    if (!have_ended(&work->op, &n_ops))
        return;
    work->object = (struct kv_object){
        .name = work->name, .buffer = worst->buffer, .bytes = WORST_CLIENT_BYTES};
    if (kv_objects_begin(worst->client, verb, &work->object, 1, DEADLINE_MS, &work->op) !=
        KV_OK)
        work->op = NULL;
    work->is_put = !work->is_put;
    worst->has_object = worst->has_object || work->is_put;
}

static void begin_open(struct worst_client *worst, struct rows_work *work)
{
    const struct kv_session_options options = {.lease_ms = LEASE_MS};

    if (kv_open_begin(worst->client, &worst->model, &options, DEADLINE_MS, work->ops) == KV_OK)
        work->n_ops = 1;
}

/* From the last to the first. */
static void begin_puts(struct worst_client *worst, struct rows_work *work)
{
    for (unsigned i = N_PUTS; i-- > 0;) {
        const struct kv_rows box = {0, N_LAYERS, 0, 0, i * PUT_TOKENS, PUT_TOKENS};
        const struct kv_rows_io io = {.buffer = worst->buffer, .offset = (size_t)i * PUT_BYTES};

        if (kv_put_begin(work->session, &box, &io, DEADLINE_MS, &work->ops[work->n_ops]) ==
            KV_OK)
            work->n_ops++;
    }
}

static void begin_index(struct rows_work *work)
{
    const struct kv_index_options index = {
        .tokens = N_PUTS * PUT_TOKENS,
        .chapter_blocks = KV_CHAPTER_BLOCKS_MIN,
        .m = 4,
        .bits = KV_CODE_BITS_MAX,
        .iterations = KV_KMEANS_ITERATIONS_MAX,
        .summaries = 64,
        .wait = true,
    };

    if (kv_index_begin(work->session, &index, DEADLINE_MS, work->ops) == KV_OK)
        work->n_ops = 1;
}

static void begin_close(struct rows_work *work)
{
    if (kv_close_begin(work->session, DEADLINE_MS, work->ops) == KV_OK)
        work->n_ops = 1;
}

static void step_rows(struct worst_client *worst, struct rows_work *work)
{
    struct kv_session *opened = NULL;

    if (work->phase == ROWS_OPEN && work->n_ops == 1 && kv_op_status(work->ops[0]) == KV_OK)
        opened = kv_op_session(work->ops[0]);
    if (opened != NULL)
        work->session = opened;
    if (!have_ended(work->ops, &work->n_ops))
        return;
    work->phase = (work->phase + 1) % N_ROWS_PHASES;
    if (work->session == NULL || work->phase == ROWS_OPEN) {
        kv_session_free(work->session);
        work->session = NULL;
        work->phase = ROWS_OPEN;
        begin_open(worst, work);
    } else if (work->phase == ROWS_PUT)
        begin_puts(worst, work);
    else if (work->phase == ROWS_INDEX) {
        worst->has_index = true;
        begin_index(work);
    } else
        begin_close(work);
}

struct worst_client *worst_client_open(struct kv_client *client, struct kv_buffer *buffer)
{
    struct worst_client *worst = calloc(1, sizeof(*worst));

    if (worst == NULL)
        return NULL;
    worst->client = client;
    worst->buffer = buffer;
    snprintf(worst->model.name, sizeof(worst->model.name), "bench-worst");
    memcpy(worst->model.fingerprint.bytes, "bench-worst", 11);
    kv_schema_uniform(&worst->model.schema, N_LAYERS, N_HEADS, D, D, KV_BF16);
    for (unsigned i = 0; i < N_OBJECTS; i++)
        snprintf(worst->objects[i].name, sizeof(worst->objects[i].name), "worst-%u", i);
    for (unsigned i = 0; i < N_SESSIONS; i++)
        worst->rows[i].phase = ROWS_CLOSE; /* the next is to open one */
    return worst;
}

void worst_client_step(struct worst_client *worst)
{
    for (unsigned i = 0; i < N_OBJECTS; i++)
        step_object(worst, &worst->objects[i]);
    for (unsigned i = 0; i < N_SESSIONS; i++)
        step_rows(worst, &worst->rows[i]);
}

bool worst_client_is_at_work(const struct worst_client *worst)
{
    return worst->has_object && worst->has_index;
}

static void cancel_all(struct worst_client *worst)
{
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        kv_op_free(worst->objects[i].op);
        worst->objects[i].op = NULL;
    }
    for (unsigned i = 0; i < N_SESSIONS; i++) {
        struct rows_work *work = &worst->rows[i];

        while (work->n_ops > 0)
            kv_op_free(work->ops[--work->n_ops]);
    }
}

void worst_client_leave(struct worst_client *worst)
{
    struct kv_op *op;

    cancel_all(worst);
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        worst->objects[i].object.name = worst->objects[i].name;
        if (kv_objects_begin(worst->client, KV_OBJECT_DELETE, &worst->objects[i].object, 1,
                             GOODBYE_MS, &op) == KV_OK)
            kv_finish(op);
    }
    for (unsigned i = 0; i < N_SESSIONS; i++)
        if (worst->rows[i].session != NULL &&
            kv_close_begin(worst->rows[i].session, GOODBYE_MS, &op) == KV_OK)
            kv_finish(op);
}

void worst_client_close(struct worst_client *worst)
{
    cancel_all(worst);
    free(worst);
}
