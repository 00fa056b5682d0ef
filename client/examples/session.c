/* session.c - how a worker keeps a model's KV cache in the store.
 *
 *   prefill   put the rows of a prompt, all layers and heads
 *   decode    append the rows of each new token, fetch selected rows by id
 *   branch    fork the session: two continuations of one prompt
 *   hand over pass a ticket, resume the session elsewhere
 *   load      read all rows of a range of tokens
 *
 * The "model" has 4 layers and 2 kv heads of dimension 64.  It computes keys and values from
 * their place, so that every byte that is read can be checked.  Build it against the installed
 * library with
 *
 *     cc session.c $(pkg-config --cflags --libs topkv) -o session
 *
 * and run it with the nodes: ./session 127.0.0.1:7400,127.0.0.1:7500
 */
#include <kvclient.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 4,
    HEADS = 2,
    DIM = 64,
    ROW_BYTES = 2 * DIM * 2, /* a key, then a value, fp16 */
    PROMPT_TOKENS = 300,
    NEW_TOKENS = 20,
    FETCHED = 16, /* rows per head */
};

/* Makes the row of one token in one unit; `branch` distinguishes two continuations. */
static void
make_row(uint32_t branch, uint32_t layer, uint32_t head, uint32_t token, uint8_t *row)
{
    uint32_t x = branch * 7919 + layer * 1000003 + head * 65537 + token * 2654435761u + 1;

    for (unsigned i = 0; i < ROW_BYTES; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        row[i] = (uint8_t)x;
    }
}

/* Rows are in a buffer as (layer, head, token, row_bytes), dense. */
static void make_rows(uint32_t branch, const struct kv_rows *box, uint8_t *to)
{
    for (uint32_t l = 0; l < box->n_layers; l++)
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t t = 0; t < box->n_tokens; t++, to += ROW_BYTES)
                make_row(branch, box->layer_begin + l, h, box->token_begin + t, to);
}

static bool same_rows(uint32_t branch, const struct kv_rows *box, const uint8_t *from)
{
    uint8_t row[ROW_BYTES];

    for (uint32_t l = 0; l < box->n_layers; l++)
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t t = 0; t < box->n_tokens; t++, from += ROW_BYTES) {
                make_row(branch, box->layer_begin + l, h, box->token_begin + t, row);
                if (memcmp(row, from, ROW_BYTES) != 0)
                    return false;
            }
    return true;
}

/* Everything below stops at the first failure, which is printed here. */
static struct kv_client *client;

static void check(kv_status_t status, const char *what)
{
    if (status == KV_OK)
        return;
    fprintf(stderr, "session: %s: %s\n", what, kv_client_detail(client));
    kv_client_close(client);
    exit(EXIT_FAILURE);
}

static void check_true(bool is_true, const char *what)
{
    if (is_true)
        return;
    fprintf(stderr, "session: %s: not what was stored\n", what);
    kv_client_close(client);
    exit(EXIT_FAILURE);
}

/* Waits for an operation that creates a session, and takes the session. */
static struct kv_session *finish_session(struct kv_op *op, const char *what)
{
    struct kv_session *session;

    check(kv_wait(op), what);
    session = kv_op_session(op);
    kv_op_free(op);
    return session;
}

/* Stores the rows of `n` tokens, all layers and heads. */
static void store(struct kv_session *session,
                  uint32_t branch,
                  struct kv_buffer *buffer,
                  uint32_t token,
                  uint32_t n)
{
    const struct kv_rows box = {.n_layers = LAYERS, .token_begin = token, .n_tokens = n};
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    make_rows(branch, &box, kv_buffer_data(buffer));
    /* As a put, but an append sends all layers of few tokens in one message. */
    check(n > 1 ? kv_put_begin(session, &box, &io, 0, &op)
                : kv_append_begin(session, &box, &io, 0, &op),
          "store");
    check(kv_finish(op), "store");
}

/* Reads `n` tokens of all layers and compares. */
static void load(struct kv_session *session,
                 uint32_t branch,
                 struct kv_buffer *buffer,
                 uint32_t token,
                 uint32_t n)
{
    const struct kv_rows box = {.n_layers = LAYERS, .token_begin = token, .n_tokens = n};
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    check(kv_read_begin(session, &box, &io, 0, &op), "read");
    check(kv_finish(op), "read");
    check_true(same_rows(branch, &box, kv_buffer_data(buffer)), "rows read");
}

/* Fetches some rows of one layer by id, as a worker that selects rows itself does. */
static void fetch(struct kv_session *session, struct kv_buffer *buffer, uint32_t layer)
{
    uint32_t n_ids[HEADS], ids[HEADS * FETCHED];
    const struct kv_fetch wanted = {.layer = layer, .n_ids = n_ids, .ids = ids};
    const struct kv_rows_io io = {.buffer = buffer};
    const uint8_t *rows = kv_buffer_data(buffer);
    uint8_t row[ROW_BYTES];
    struct kv_op *op;

    for (uint32_t h = 0; h < HEADS; h++) {
        n_ids[h] = FETCHED;
        for (uint32_t i = 0; i < FETCHED; i++)
            ids[h * FETCHED + i] = (i * 17 + h * 5 + layer) % PROMPT_TOKENS;
    }
    check(kv_fetch_begin(session, &wanted, &io, 0, &op), "fetch");
    /* Here the worker could attend to the rows that it already has. */
    kv_poll(client);
    check(kv_finish(op), "fetch");
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t i = 0; i < FETCHED; i++, rows += ROW_BYTES) {
            make_row(0, layer, h, ids[h * FETCHED + i], row);
            check_true(memcmp(row, rows, ROW_BYTES) == 0, "rows fetched");
        }
}

int main(int argc, char **argv)
{
    const struct kv_client_options options = {
        .nodes = argc > 1 ? argv[1] : "127.0.0.1:7400",
        .name = "session example",
    };
    static struct kv_model_info model = {.name = "example, 4 layers"};
    struct kv_session *session, *fork, *resumed;
    struct kv_buffer *buffer;
    struct kv_ticket ticket;
    char detail[512];
    struct kv_op *op;

    if (kv_client_open(&options, &client, detail, sizeof(detail)) != KV_OK) {
        fprintf(stderr, "session: %s\n", detail);
        return EXIT_FAILURE;
    }
    check(kv_buffer_alloc(client, (size_t)LAYERS * HEADS * PROMPT_TOKENS * ROW_BYTES, &buffer),
          "buffer");

    /* A model has a schema, and a fingerprint of all that makes keys comparable. */
    memcpy(model.fingerprint.bytes, "example-weights1", sizeof(model.fingerprint.bytes));
    check(kv_schema_uniform(&model.schema, LAYERS, HEADS, DIM, DIM, KV_FP16), "schema");
    check(kv_open_begin(client, &model, NULL, 0, &op), "open");
    session = finish_session(op, "open");

    /* Prefill, then decode. */
    store(session, 0, buffer, 0, PROMPT_TOKENS);
    for (uint32_t token = PROMPT_TOKENS; token < PROMPT_TOKENS + NEW_TOKENS; token++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            fetch(session, buffer, layer);
        store(session, 0, buffer, token, 1);
    }

    /* Another continuation of the same prompt.  The prompt's rows are shared, not copied. */
    check(kv_fork_begin(session, PROMPT_TOKENS, 0, &op), "fork");
    fork = finish_session(op, "fork");
    store(fork, 1, buffer, PROMPT_TOKENS, NEW_TOKENS);
    load(fork, 0, buffer, 0, PROMPT_TOKENS);
    load(fork, 1, buffer, PROMPT_TOKENS, NEW_TOKENS);

    /* The session is stored in the nodes: any process of the tenant that has the ticket can
     * continue it. */
    kv_session_ticket(session, &ticket);
    kv_session_free(session);
    check(kv_resume_begin(client, &ticket, 0, &op), "resume");
    resumed = finish_session(op, "resume");
    check(kv_length_begin(resumed, 0, &op), "length");
    check(kv_wait(op), "length");
    check_true(kv_op_tokens(op) == PROMPT_TOKENS + NEW_TOKENS, "length");
    kv_op_free(op);
    load(resumed, 0, buffer, PROMPT_TOKENS, NEW_TOKENS);

    /* A session that is not closed stays until its lease expires. */
    check(kv_close_begin(fork, 0, &op), "close");
    check(kv_finish(op), "close");
    check(kv_close_begin(resumed, 0, &op), "close");
    check(kv_finish(op), "close");
    printf("session: %d tokens stored, %d decoded with %d rows fetched each, forked, resumed, "
           "read back, compared\n",
           PROMPT_TOKENS, NEW_TOKENS, LAYERS * HEADS * FETCHED);
    kv_client_close(client);
    return EXIT_SUCCESS;
}
