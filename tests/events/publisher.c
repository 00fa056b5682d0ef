/* A client that publishes prompts, for check_readers.py.
 *
 *     publisher NODE TENANT FIRST N TOKENS
 *
 * Puts and publishes prompts FIRST to FIRST + N - 1, of four blocks each, with tokens if TOKENS
 * is 1; prints the names of each prompt's blocks on a line.  Prompt i's tokens are 512 i,
 * 512 i + 1, and so on. */
#include "client/include/kvclient.h"
#include "tests/support/rows.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    BLOCKS = 4,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
    BUFFER_BYTES = 4 << 20,
    DEADLINE_MS = 30000,
};

/* A pointer to the operation, since the arguments may be evaluated in any order. */
static void done(kv_status_t begun, struct kv_op **op, const char *what)
{
    if (begun == KV_OK && kv_wait(*op) == KV_OK)
        return;
    fprintf(stderr, "publisher: %s: %s\n", what, begun == KV_OK ? kv_op_detail(*op) : "begin");
    exit(1);
}

static void publish_prompt(struct kv_client *client,
                           struct kv_buffer *buffer,
                           const struct kv_model_info *model,
                           uint32_t prompt,
                           bool with_tokens)
{
    uint32_t tokens[TOKENS];
    struct kv_id128 names[BLOCKS];
    const struct kv_session_options options = {.block_names = names, .n_block_names = BLOCKS};
    const struct kv_publish publish = {
        .n_names = BLOCKS, .names = names, .tokens = with_tokens ? tokens : NULL};
    struct kv_rows rows = {.n_layers = model->schema.n_layers, .n_tokens = TOKENS};
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_session *session;
    struct kv_op *op = NULL;

    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = prompt * TOKENS + i;
    kv_prompt_names(client, model, tokens, TOKENS, NULL, 0, names);
    done(kv_open_begin(client, model, &options, DEADLINE_MS, &op), &op, "open");
    session = kv_op_session(op);
    rows.token_begin = kv_op_tokens(op);
    rows.n_tokens -= kv_op_tokens(op);
    kv_op_free(op);
    if (rows.n_tokens > 0) {
        test_box(kv_buffer_data(buffer), &model->schema, &rows, prompt);
        done(kv_put_begin(session, &rows, &io, DEADLINE_MS, &op), &op, "put");
        kv_op_free(op);
    }
    done(kv_publish_begin(session, &publish, DEADLINE_MS, &op), &op, "publish");
    if (kv_op_tokens(op) != TOKENS) {
        fprintf(stderr, "publisher: %u of %u tokens are kept\n", kv_op_tokens(op), TOKENS);
        exit(1);
    }
    kv_op_free(op);
    done(kv_close_begin(session, DEADLINE_MS, &op), &op, "close");
    kv_op_free(op);
    kv_session_free(session);
    for (unsigned i = 0; i < BLOCKS; i++) {
        for (unsigned j = 0; j < sizeof(names[i]); j++)
            printf("%02x", names[i].bytes[j]);
        printf("%c", i + 1 < BLOCKS ? ' ' : '\n');
    }
}

int main(int argc, char **argv)
{
    static const uint16_t heads[] = {2, 2};
    struct kv_client_options options = {0};
    struct kv_client *client;
    struct kv_buffer *buffer;
    struct kv_model_info model;
    char detail[256] = "";

    if (argc != 6)
        return 2;
    options.nodes = argv[1];
    options.tenant = (uint32_t)strtoul(argv[2], NULL, 10);
    if (kv_client_open(&options, &client, detail, sizeof(detail)) != KV_OK ||
        kv_buffer_alloc(client, BUFFER_BYTES, &buffer) != KV_OK) {
        fprintf(stderr, "publisher: %s\n", detail);
        return 1;
    }
    test_model(&model, "model", sizeof(heads) / sizeof(heads[0]), heads, 64, 64);
    for (unsigned long i = 0, first = strtoul(argv[3], NULL, 10);
         i < strtoul(argv[4], NULL, 10); i++)
        publish_prompt(client, buffer, &model, (uint32_t)(first + i), argv[5][0] == '1');
    kv_client_close(client);
    return 0;
}
