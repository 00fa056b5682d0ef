/* keep_prompt.c - a session of a prompt whose blocks nodes keep by name, for test_commands.sh.
 *
 *   keep_prompt NODES FORK
 *
 * Opens a session with the names of a prompt's blocks, stores what of it is not there yet and
 * publishes it.  Prompts differ from block FORK on.  Does not close the session.  Prints
 *
 *   matched TOKENS
 *   published TOKENS
 *   session ID
 *   block NAME    for each block
 */
#include "client/include/kvclient.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 2,
    HEADS = 4,
    DIM = 32,
    BLOCKS = 4,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
    LEASE_MS = 600000,
};

static struct kv_client *client;

static void check(kv_status_t status, const char *what)
{
    if (status == KV_OK)
        return;
    fprintf(stderr, "keep_prompt: %s: %s\n", what, kv_client_detail(client));
    exit(EXIT_FAILURE);
}

static void print_id(const char *what, const struct kv_id128 *id)
{
    printf("%s ", what);
    for (size_t i = 0; i < sizeof(id->bytes); i++)
        printf("%02x", id->bytes[i]);
    printf("\n");
}

static void put_rest(struct kv_session *session, uint32_t begin)
{
    const struct kv_rows rows = {
        .n_layers = LAYERS, .token_begin = begin, .n_tokens = TOKENS - begin};
    struct kv_rows_io io = {0};
    struct kv_op *op;

    check(kv_buffer_alloc(client, kv_rows_bytes(kv_session_schema(session), &rows), &io.buffer),
          "buffer");
    memset(kv_buffer_data(io.buffer), 1, kv_buffer_bytes(io.buffer));
    check(kv_put_begin(session, &rows, &io, 0, &op), "put");
    check(kv_finish(op), "put");
}

int main(int argc, char **argv)
{
    const struct kv_client_options options = {.nodes = argc == 3 ? argv[1] : "",
                                              .name = "keep_prompt"};
    const uint32_t fork = argc == 3 ? (uint32_t)atoi(argv[2]) : 0;
    static struct kv_model_info model = {.name = "kept"};
    uint32_t tokens[TOKENS];
    struct kv_id128 names[BLOCKS];
    const struct kv_session_options session_options = {
        .lease_ms = LEASE_MS, .block_names = names, .n_block_names = BLOCKS};
    const struct kv_publish publish = {.n_names = BLOCKS, .names = names};
    struct kv_session *session;
    struct kv_ticket ticket;
    char detail[512];
    struct kv_op *op;

    if (kv_client_open(&options, &client, detail, sizeof(detail)) != KV_OK) {
        fprintf(stderr, "keep_prompt: %s\n", detail);
        return EXIT_FAILURE;
    }
    memcpy(model.fingerprint.bytes, "keep_prompt-kept", sizeof(model.fingerprint.bytes));
    check(kv_schema_uniform(&model.schema, LAYERS, HEADS, DIM, DIM, KV_FP16), "schema");
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = i + (i >= fork * KV_BLOCK_TOKENS ? fork * 1000 : 0);
    kv_prompt_names(client, &model, tokens, TOKENS, NULL, 0, names);

    check(kv_open_begin(client, &model, &session_options, 0, &op), "open");
    check(kv_wait(op), "open");
    session = kv_op_session(op);
    printf("matched %u\n", kv_op_tokens(op));
    if (kv_op_tokens(op) < TOKENS)
        put_rest(session, kv_op_tokens(op));
    kv_op_free(op);
    check(kv_publish_begin(session, &publish, 0, &op), "publish");
    check(kv_wait(op), "publish");
    printf("published %u\n", kv_op_tokens(op));
    kv_op_free(op);
    kv_session_ticket(session, &ticket);
    print_id("session", &ticket.session_id);
    for (uint32_t i = 0; i < BLOCKS; i++)
        print_id("block", &names[i]);
    kv_session_free(session);
    kv_client_close(client);
    return EXIT_SUCCESS;
}
