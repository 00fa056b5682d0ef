/* Tables about a node (kvstore.proto, TableReply), and what its operator does: drain, and close a
 * session. */
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/peer.h"
#include "client/session_private.h"
#include "client/state.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TABLE_NAME_BYTES = 32
};

struct table_part {
    uint32_t node_index;
    char name[TABLE_NAME_BYTES];
    struct kv_id128 session_id; /* close */
    struct kv_table table;
    void *memory; /* of the table */
};
static_assert(sizeof(struct table_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct table_part *table_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static char *copy_text(char **text, const char *from)
{
    size_t bytes = strlen(from) + 1;
    char *to = *text;

    memcpy(to, from, bytes);
    kvc_peer_name(to);
    *text += bytes;
    return to;
}

/* One block of memory: columns, cells, texts, which must not steer a terminal. */
static kv_status_t keep_table(struct kv_op *op, const Kvpb__TableReply *reply)
{
    size_t n_cells = reply->n_columns * reply->n_rows;
    size_t text_bytes = 0;
    const char **columns;
    struct kv_cell *cells;
    char *text;

    for (size_t i = 0; i < reply->n_columns; i++)
        text_bytes += strlen(reply->columns[i]) + 1;
    for (size_t i = 0; i < reply->n_rows; i++) {
        const Kvpb__Row *row = reply->rows[i];

        for (size_t j = 0; j < row->n_cells; j++)
            if (row->cells[j]->value_case == KVPB__CELL__VALUE_TEXT)
                text_bytes += strlen(row->cells[j]->text) + 1;
    }
    table_of(op)->memory =
        malloc(n_cells * sizeof(*cells) + reply->n_columns * sizeof(*columns) + text_bytes + 1);
    if (table_of(op)->memory == NULL)
        return KV_NO_MEMORY;
    cells = table_of(op)->memory;
    columns = (const char **)(cells + n_cells);
    text = (char *)(columns + reply->n_columns);
    for (size_t i = 0; i < reply->n_columns; i++)
        columns[i] = copy_text(&text, reply->columns[i]);
    for (size_t i = 0; i < n_cells; i++) {
        const Kvpb__Cell *cell = reply->rows[i / reply->n_columns]->cells[i % reply->n_columns];
        bool is_text = cell->value_case == KVPB__CELL__VALUE_TEXT;

        cells[i].text = is_text ? copy_text(&text, cell->text) : NULL;
        cells[i].number = is_text ? 0 : cell->number;
    }
    table_of(op)->table = (struct kv_table){
        .n_columns = (uint32_t)reply->n_columns,
        .n_rows = (uint32_t)reply->n_rows,
        .columns = columns,
        .cells = cells,
    };
    return KV_OK;
}

static void table_done(struct kvc_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    struct kv_op *op = kvc_call_op(call);

    if (op == NULL)
        return;
    if (status == KV_OK && op->type->id == KV_OP_TABLE)
        status = keep_table(op, (const Kvpb__TableReply *)message);
    if (status != KV_OK)
        kvc_op_fail(op, call->node, NULL, status, "%s", detail);
}

static void start_table(struct kv_op *op)
{
    struct kvc_node *node = &op->client->nodes[table_of(op)->node_index];
    Kvpb__TableRequest table = KVPB__TABLE_REQUEST__INIT;
    Kvpb__DrainRequest drain = KVPB__DRAIN_REQUEST__INIT;
    Kvpb__CloseRequest close = KVPB__CLOSE_REQUEST__INIT;
    const ProtobufCMessage *request = op->type->id == KV_OP_TABLE   ? &table.base
                                      : op->type->id == KV_OP_DRAIN ? &drain.base
                                                                    : &close.base;
    kv_status_t status;

    if (op->type->id == KV_OP_CLOSE && node->version < KV_WIRE_VERSION_PREFIXES) {
        kvc_op_fail(op, node, NULL, KV_UNSUPPORTED,
                    "the node's version closes no session without its token");
        return;
    }
    table.name = table_of(op)->name;
    close.session_id = kvc_binary(&table_of(op)->session_id);
    status = kvc_call_begin(node, &op->owner, NULL, op->type->id, request, table_done);
    if (status != KV_OK)
        kvc_op_fail(op, node, NULL, status, "cannot send the request");
}

static void fini_table(struct kv_op *op)
{
    free(table_of(op)->memory);
    table_of(op)->memory = NULL;
}

static const struct kvc_op_type table_type = {
    .name = "table",
    .id = KV_OP_TABLE,
    .start = start_table,
    .fini = fini_table,
};

static const struct kvc_op_type drain_type = {
    .name = "drain",
    .id = KV_OP_DRAIN,
    .start = start_table,
};

static const struct kvc_op_type close_type = {
    .name = "close",
    .id = KV_OP_CLOSE,
    .start = start_table,
};

static kv_status_t begin_table(struct kv_client *client,
                               const struct kvc_op_type *type,
                               uint32_t node_index,
                               const char *name,
                               const struct kv_id128 *session_id,
                               uint32_t deadline_ms,
                               struct kv_op **ret_op)
{
    kv_status_t status;
    struct kv_op *op;

    if (node_index >= client->n_nodes || strlen(name) >= TABLE_NAME_BYTES)
        return kvc_set_error(&client->loop, KV_INVALID, "%s: node %u: %.32s", type->name,
                             node_index, name);
    status = kvc_op_begin(client, type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    table_of(op)->node_index = node_index;
    snprintf(table_of(op)->name, sizeof(table_of(op)->name), "%s", name);
    if (session_id != NULL)
        table_of(op)->session_id = *session_id;
    kvc_op_require_node(op, node_index);
    return kvc_op_submit(op, ret_op);
}

kv_status_t kv_table_begin(struct kv_client *client,
                           uint32_t node_index,
                           const char *name,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    KVC_ENTER(client);

    return begin_table(client, &table_type, node_index, name, NULL, deadline_ms, ret_op);
}

const struct kv_table *kv_op_table(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->type == &table_type && op->status == KV_OK ? &table_of(op)->table : NULL;
}

kv_status_t kv_drain_begin(struct kv_client *client,
                           uint32_t node_index,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    KVC_ENTER(client);

    return begin_table(client, &drain_type, node_index, "", NULL, deadline_ms, ret_op);
}

kv_status_t kv_close_id_begin(struct kv_client *client,
                              uint32_t node_index,
                              const struct kv_id128 *session_id,
                              uint32_t deadline_ms,
                              struct kv_op **ret_op)
{
    KVC_ENTER(client);

    return begin_table(client, &close_type, node_index, "", session_id, deadline_ms, ret_op);
}
