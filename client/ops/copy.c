#include "client/ops/copy.h"

#include "client/copies.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/op.h"
#include "client/ops/open.h"
#include "client/session.h"
#include "client/session_lease.h"
#include "client/state.h"

#include <assert.h>

enum {
    AT_ONCE_BYTES = 4 << 20, /* of rows; at least those of one block and layer */
    DELAY_MAX_US = 1000000,  /* until a copy begins */
};

/* ---- what is copied at once -------------------------------------------------------------- */

static size_t bytes_of(const struct kvc_copy *copy, uint32_t n_layers, uint32_t n_tokens)
{
    const struct kv_rows rows = {.n_layers = n_layers, .n_tokens = n_tokens};

    return kv_rows_bytes(&copy->from->schema, &rows);
}

/* Chooses the next rows: whole blocks of all layers, or of as many layers as there is room for. */
static void choose_rows(struct kvc_copy *copy)
{
    const uint32_t n_layers = copy->from->schema.n_layers;
    const size_t of_block = bytes_of(copy, n_layers, KV_BLOCK_TOKENS);
    struct kv_rows *rows = &copy->rows;

    rows->layer_begin += rows->n_layers;
    if (rows->layer_begin == n_layers) {
        rows->layer_begin = 0;
        rows->token_begin += rows->n_tokens;
    }
    if (of_block <= AT_ONCE_BYTES) {
        const uint32_t most = (uint32_t)(AT_ONCE_BYTES / of_block) * KV_BLOCK_TOKENS;

        rows->n_layers = n_layers;
        rows->n_tokens = copy->token_end - rows->token_begin;
        if (rows->n_tokens > most)
            rows->n_tokens = most;
        return;
    }
    rows->n_tokens = KV_BLOCK_TOKENS;
    rows->n_layers = 1;
    while (rows->layer_begin + rows->n_layers < n_layers) {
        const struct kv_rows more = {.layer_begin = rows->layer_begin,
                                     .n_layers = rows->n_layers + 1,
                                     .n_tokens = KV_BLOCK_TOKENS};

        if (kv_rows_bytes(&copy->from->schema, &more) > AT_ONCE_BYTES)
            break;
        rows->n_layers++;
    }
}

/* The most that one choice needs: one layer may be larger than what is copied at once. */
static size_t buffer_bytes(const struct kvc_copy *copy)
{
    size_t most = AT_ONCE_BYTES;

    for (uint32_t layer = 0; layer < copy->from->schema.n_layers; layer++) {
        const struct kv_rows rows = {
            .layer_begin = layer, .n_layers = 1, .n_tokens = KV_BLOCK_TOKENS};
        const size_t bytes = kv_rows_bytes(&copy->from->schema, &rows);

        most = bytes > most ? bytes : most;
    }
    return most;
}

/* ---- steps ------------------------------------------------------------------------------- */

static kv_status_t open_at(struct kv_client *client, struct kvc_copy *copy, uint64_t root)
{
    return kvc_open_at_begin(client, &copy->model, root, copy->names, copy->n_names, &copy->op);
}

/* Both sessions are open: reads what the second one lacks. */
static kv_status_t read_next(struct kvc_copy *copy)
{
    const struct kv_rows_io io = {.buffer = copy->buffer};

    choose_rows(copy);
    return kv_read_begin(copy->from, &copy->rows, &io, 0, &copy->op);
}

static kv_status_t put(struct kvc_copy *copy)
{
    const struct kv_rows_io io = {.buffer = copy->buffer};

    return kv_put_begin(copy->to, &copy->rows, &io, 0, &copy->op);
}

static bool has_all(const struct kvc_copy *copy)
{
    return copy->rows.token_begin + copy->rows.n_tokens == copy->token_end &&
           copy->rows.layer_begin + copy->rows.n_layers == copy->from->schema.n_layers;
}

static kv_status_t publish(struct kvc_copy *copy)
{
    const struct kv_publish blocks = {.n_names = copy->token_end / KV_BLOCK_TOKENS,
                                      .names = copy->names};

    return kv_publish_begin(copy->to, &blocks, 0, &copy->op);
}

/* The last operation has succeeded.  Begins the next one; KV_OK without one: there is none. */
static kv_status_t advance(struct kv_client *client,
                           struct kvc_copy *copy,
                           struct kv_session *session,
                           uint32_t tokens)
{
    kv_status_t status;

    switch (copy->stage) {
    case KVC_COPY_WANTED:
        copy->stage = KVC_COPY_OPENING_FROM;
        return open_at(client, copy, copy->from_root);
    case KVC_COPY_OPENING_FROM:
        copy->from = session;
        copy->token_end = tokens;
        copy->stage = KVC_COPY_OPENING_TO;
        return tokens > 0 ? open_at(client, copy, copy->to_root) : KV_OK;
    case KVC_COPY_OPENING_TO:
        copy->to = session;
        if (tokens >= copy->token_end)
            return KV_OK;
        status = kv_buffer_alloc(client, buffer_bytes(copy), &copy->buffer);
        if (status != KV_OK)
            return status;
        copy->rows = (struct kv_rows){.token_begin = tokens};
        copy->stage = KVC_COPY_READING;
        return read_next(copy);
    case KVC_COPY_READING:
        copy->stage = KVC_COPY_PUTTING;
        return put(copy);
    case KVC_COPY_PUTTING:
        copy->stage = has_all(copy) ? KVC_COPY_PUBLISHING : KVC_COPY_READING;
        return has_all(copy) ? publish(copy) : read_next(copy);
    case KVC_COPY_PUBLISHING:
        client->copies.n_done += tokens >= copy->token_end;
        return KV_OK;
    case KVC_COPY_OVER:
        break;
    }
    return KV_OK;
}

/* Its sessions end at their nodes, which keep what is published. */
static void end(struct kvc_copy *copy)
{
    if (copy->from != NULL)
        kvc_session_abandon(copy->from);
    if (copy->to != NULL)
        kvc_session_abandon(copy->to);
    copy->from = copy->to = NULL;
    copy->stage = KVC_COPY_OVER;
}

static void step(struct kv_client *client)
{
    struct kvc_copy *copy = client->copies.first;
    struct kv_session *session = NULL;
    kv_status_t status = KV_OK;
    uint32_t tokens = 0;

    if (copy == NULL || (copy->op != NULL && copy->op->stage != KVC_STAGE_ENDED))
        return;
    if (copy->stage == KVC_COPY_WANTED && client->loop.now_us < copy->at_us) {
        kvc_loop_set_timer(&client->loop, copy->at_us);
        return;
    }
    if (copy->stage == KVC_COPY_OVER) {
        /* A node may still read or write the buffer, after a failure. */
        if (kv_buffer_free(copy->buffer) != KV_OK)
            return;
        kvc_copies_drop(&client->copies);
        client->loop.must_dispatch = true;
        return;
    }
    if (copy->op != NULL) {
        status = copy->op->status;
        session = kv_op_session(copy->op);
        tokens = kv_op_tokens(copy->op);
        kv_op_free(copy->op);
        copy->op = NULL;
    }
    if (status == KV_OK) {
        client->copies.is_beginning = true;
        status = advance(client, copy, session, tokens);
        client->copies.is_beginning = false;
    }
    if (status != KV_OK || copy->op == NULL)
        end(copy);
    client->loop.must_dispatch = true;
}

void kvc_copy_want(struct kv_client *client,
                   const struct kv_model_info *model,
                   uint64_t from_root,
                   uint64_t to_root,
                   const struct kv_id128 *names,
                   uint32_t n_names)
{
    const uint64_t at_us = client->loop.now_us + kv_random_below(&client->random, DELAY_MAX_US);

    if (kvc_copies_want(&client->copies, step, model, from_root, to_root, names, n_names,
                        at_us))
        kvc_loop_set_timer(&client->loop, at_us);
}
