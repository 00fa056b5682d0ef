#include "tests/system/system.h"

#include "tests/support/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int system_main(int argc,
                char **argv,
                int (*work)(int argc, char **argv),
                int (*child)(int argc, char **argv))
{
    if (argc > 2 && strcmp(argv[1], "--child") == 0) {
        process_set_kvserver("");
        return child(argc - 2, argv + 2);
    }
    if (argc < 2) {
        process_complain("%s: usage: %s KVSERVER [...]", argv[0], argv[0]);
        return 2;
    }
    if (access("/sys/class/net", F_OK) != 0) {
        printf("skipped: no /sys/class/net: UCX has no tcp here\n");
        return 77;
    }
    process_set_kvserver(argv[1]);
    return process_supervise(work, argc - 1, argv + 1);
}

void system_node_start(struct process_node *node, const char *const *options)
{
    assert_true(process_node_start(node, options));
}

void system_node_stop(struct process_node *node)
{
    assert_int_equal(process_node_stop(node), 0);
}

struct kv_client *system_open(const char *nodes, const char *transport)
{
    const struct kv_client_options options = {
        .nodes = nodes,
        .transport = transport,
        .deadline_ms = SYSTEM_DEADLINE_MS,
        .peer_timeout_ms = SYSTEM_PEER_MS,
    };
    struct kv_client *client;
    char detail[512];

    if (kv_client_open(&options, &client, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    return client;
}

struct kv_buffer *system_buffer(struct kv_client *client, size_t bytes)
{
    struct kv_buffer *buffer;

    assert_int_equal(kv_buffer_alloc(client, bytes, &buffer), KV_OK);
    return buffer;
}

void system_finish(struct kv_client *client,
                   kv_status_t begun,
                   struct kv_op **op,
                   kv_status_t wanted)
{
    kv_status_t status = begun == KV_OK ? kv_finish(*op) : begun;

    if (status != wanted)
        fail_msg("%s, not %s: %s", kv_status_name(status), kv_status_name(wanted),
                 kv_client_detail(client));
}

static const struct kv_model_info *
make_model(struct kv_model_info *model, const char *name, uint32_t n_layers, uint16_t n_heads)
{
    const uint16_t heads[] = {n_heads, n_heads};

    if (model->name[0] == 0)
        test_model(model, name, n_layers, heads, 32, 32);
    return model;
}

const struct kv_model_info *system_model(void)
{
    static struct kv_model_info model;

    return make_model(&model, "system", 2, 2);
}

const struct kv_model_info *system_narrow_model(void)
{
    static struct kv_model_info model;

    return make_model(&model, "system-narrow", 1, 1);
}

struct kv_session *
system_session(struct kv_client *client, const struct kv_model_info *model, uint32_t lease_ms)
{
    const struct kv_session_options options = {.lease_ms = lease_ms};
    struct kv_session *session;
    struct kv_op *op;

    if (kv_open_begin(client, model, &options, SYSTEM_DEADLINE_MS, &op) != KV_OK ||
        kv_wait(op) != KV_OK)
        fail_msg("%s", kv_client_detail(client));
    session = kv_op_session(op);
    assert_non_null(session);
    kv_op_free(op);
    return session;
}

struct kv_session *
system_fork(struct kv_client *client, struct kv_session *session, uint32_t tokens)
{
    struct kv_session *child;
    struct kv_op *op;

    if (kv_fork_begin(session, tokens, SYSTEM_DEADLINE_MS, &op) != KV_OK ||
        kv_wait(op) != KV_OK)
        fail_msg("%s", kv_client_detail(client));
    child = kv_op_session(op);
    assert_non_null(child);
    kv_op_free(op);
    return child;
}

static struct kv_rows whole_box(const kv_schema_t *schema, uint32_t token, uint32_t n_tokens)
{
    return (struct kv_rows){
        .n_layers = schema->n_layers, .token_begin = token, .n_tokens = n_tokens};
}

void system_put(struct kv_client *client,
                struct kv_session *session,
                struct kv_buffer *buffer,
                uint32_t token_begin,
                uint32_t n_tokens,
                uint64_t salt)
{
    const kv_schema_t *schema = kv_session_schema(session);
    struct kv_rows box = whole_box(schema, token_begin, n_tokens);
    struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    assert_true(kv_rows_bytes(schema, &box) <= kv_buffer_bytes(buffer));
    test_box(kv_buffer_data(buffer), schema, &box, salt);
    system_finish(client, kv_put_begin(session, &box, &io, SYSTEM_DEADLINE_MS, &op), &op,
                  KV_OK);
}

void system_read(struct kv_client *client,
                 struct kv_session *session,
                 struct kv_buffer *buffer,
                 uint32_t token_begin,
                 uint32_t n_tokens,
                 uint64_t salt)
{
    const kv_schema_t *schema = kv_session_schema(session);
    struct kv_rows box = whole_box(schema, token_begin, n_tokens);
    struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    assert_true(kv_rows_bytes(schema, &box) <= kv_buffer_bytes(buffer));
    memset(kv_buffer_data(buffer), 0, kv_rows_bytes(schema, &box));
    system_finish(client, kv_read_begin(session, &box, &io, SYSTEM_DEADLINE_MS, &op), &op,
                  KV_OK);
    assert_true(test_is_box(kv_buffer_data(buffer), schema, &box, salt));
}

kv_status_t system_object(struct kv_client *client,
                          enum kv_object_verb verb,
                          const char *name,
                          struct kv_buffer *buffer,
                          size_t bytes,
                          uint32_t deadline_ms)
{
    struct kv_object object = {.name = name, .buffer = buffer, .bytes = bytes};
    struct kv_op *op;
    kv_status_t status = kv_objects_begin(client, verb, &object, 1, deadline_ms, &op);

    return status == KV_OK ? kv_finish(op) : status;
}

/* ---- tables ------------------------------------------------------------------------------ */

static const struct kv_table *
get_table(struct kv_client *client, uint32_t node, const char *name, struct kv_op **ret_op)
{
    kv_status_t status = kv_table_begin(client, node, name, SYSTEM_DEADLINE_MS, ret_op);

    if (status != KV_OK || kv_wait(*ret_op) != KV_OK)
        fail_msg("table %s: %s", name, kv_client_detail(client));
    return kv_op_table(*ret_op);
}

static const struct kv_cell *
cell_of(const struct kv_table *table, uint32_t row, const char *column)
{
    for (uint32_t i = 0; i < table->n_columns; i++)
        if (strcmp(table->columns[i], column) == 0)
            return &table->cells[row * table->n_columns + i];
    fail_msg("no column %s", column);
    return NULL;
}

double
system_number(struct kv_client *client, uint32_t node, const char *name, const char *what)
{
    struct kv_op *op;
    const struct kv_table *table = get_table(client, node, name, &op);
    double number = -1;

    for (uint32_t row = 0; row < table->n_rows; row++)
        if (strcmp(cell_of(table, row, "name")->text, what) == 0)
            number = cell_of(table, row, "value")->number;
    kv_op_free(op);
    if (number < 0)
        fail_msg("table %s has no %s", name, what);
    return number;
}

bool system_is_saved(struct kv_client *client, uint32_t node)
{
    struct kv_op *op;
    const struct kv_table *table = get_table(client, node, "tiers", &op);
    bool is_saved = false;

    for (uint32_t row = 0; row < table->n_rows; row++)
        if (strcmp(cell_of(table, row, "tier")->text, "disk") == 0)
            is_saved = cell_of(table, row, "blocks")->number > 0 &&
                       cell_of(table, row, "waiting")->number == 0;
    kv_op_free(op);
    return is_saved;
}

uint32_t system_n_rows(struct kv_client *client, uint32_t node, const char *name)
{
    struct kv_op *op;
    uint32_t n_rows = get_table(client, node, name, &op)->n_rows;

    kv_op_free(op);
    return n_rows;
}

bool system_client_number(struct kv_client *client,
                          uint32_t node,
                          const char *name,
                          const char *column,
                          double *ret_number)
{
    struct kv_op *op;
    const struct kv_table *table = get_table(client, node, "clients", &op);
    bool found = false;

    for (uint32_t row = 0; row < table->n_rows; row++) {
        if (strcmp(cell_of(table, row, "name")->text, name) == 0) {
            *ret_number = cell_of(table, row, column)->number;
            found = true;
        }
    }
    kv_op_free(op);
    return found;
}
