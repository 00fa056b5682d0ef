#include "kvserver/store/ops/ops.h"

const struct kv_op_row kv_ops[KV_OP_COUNT] = {
    [KV_OP_PING] = {.name = "ping",
                    .summary = "a round trip; answers as many bytes as asked",
                    .begin = kv_op_ping_begin},
    [KV_OP_PUT] = {.name = "put",
                   .summary = "stores rows of a token range, as prefill produces them",
                   .flags =
                       KV_OP_NEEDS_SESSION | KV_OP_TAKES_BULK | KV_OP_WRITES | KV_OP_KEEPS_BODY,
                   .body_min = sizeof(struct kv_wire_unit) + sizeof(uint32_t),
                   .begin = kv_op_put_begin,
                   .landed = kv_op_put_landed,
                   .run = kv_op_put_run,
                   .wake = kv_op_put_wake,
                   .release = kv_op_put_release},
    [KV_OP_APPEND] = {.name = "append",
                      .summary = "stores the new rows of a decode step",
                      .flags = KV_OP_NEEDS_SESSION | KV_OP_TAKES_BULK | KV_OP_WRITES |
                               KV_OP_KEEPS_BODY,
                      .body_min = sizeof(struct kv_wire_unit) + sizeof(uint32_t),
                      .begin = kv_op_put_begin,
                      .landed = kv_op_put_landed,
                      .run = kv_op_put_run,
                      .wake = kv_op_put_wake,
                      .release = kv_op_put_release},
    [KV_OP_FETCH] = {.name = "fetch",
                     .summary = "answers rows by id",
                     .flags = KV_OP_NEEDS_SESSION | KV_OP_KEEPS_BODY,
                     .body_min = sizeof(struct kv_wire_unit) + sizeof(uint32_t),
                     .begin = kv_op_read_begin,
                     .run = kv_op_read_run,
                     .wake = kv_op_read_wake},
    [KV_OP_READ] = {.name = "read",
                    .summary = "answers a token range, whole",
                    .flags = KV_OP_NEEDS_SESSION | KV_OP_KEEPS_BODY,
                    .body_min = sizeof(struct kv_wire_unit),
                    .begin = kv_op_read_begin,
                    .run = kv_op_read_run,
                    .wake = kv_op_read_wake},
    /* Looked at before any work is made for it (dispatch.c): it frees work, and takes none. */
    [KV_OP_CANCEL] = {.name = "cancel", .summary = "drops a request that still waits"},
    [KV_OP_OBJECT_PUT] = {.name = "object_put",
                          .summary = "stores immutable bytes under a name",
                          .flags = KV_OP_TAKES_BULK | KV_OP_WRITES,
                          .body_min = 1,
                          .begin = kv_op_object_put_begin,
                          .landed = kv_op_object_put_landed,
                          .discarded = kv_op_object_put_discarded,
                          .run = kv_op_object_put_run},
    [KV_OP_OBJECT_GET] = {.name = "object_get",
                          .summary = "answers one piece of an object",
                          .body_min = 1,
                          .begin = kv_op_object_get_begin},
    [KV_OP_OBJECT_EXISTS] = {.name = "object_exists",
                             .summary = "tells whether a name is taken, and the size",
                             .body_min = 1,
                             .begin = kv_op_object_exists_begin},
    [KV_OP_OBJECT_DELETE] = {.name = "object_delete",
                             .summary = "frees a name that still has that version",
                             .body_min = 1,
                             .begin = kv_op_object_delete_begin},
    [KV_OP_INDEX] = {.name = "index",
                     .summary = "makes codebooks and codes for rows, in the background",
                     .flags = KV_OP_NEEDS_SESSION | KV_OP_KEEPS_BODY,
                     .body_min = sizeof(struct kv_wire_index) + sizeof(struct kv_wire_unit),
                     .waits_for = "rows or their codes",
                     .begin = kv_op_index_begin,
                     .run = kv_op_index_run,
                     .wake = kv_op_index_wake},
    [KV_OP_QUERY] = {.name = "query",
                     .summary = "answers the rows that matter most to some query vectors",
                     .flags = KV_OP_NEEDS_SESSION | KV_OP_KEEPS_BODY,
                     .body_min = sizeof(struct kv_wire_query) + sizeof(struct kv_wire_unit) +
                                 sizeof(struct kv_wire_range) + sizeof(float),
                     .begin = kv_op_query_begin,
                     .run = kv_op_query_run,
                     .wake = kv_op_query_wake,
                     .release = kv_op_query_release},

    [KV_OP_HELLO] = {.name = "hello",
                     .summary = "a client introduces itself: addresses, limits, credits",
                     .control = kv_control_hello},
    [KV_OP_GOODBYE] = {.name = "goodbye",
                       .summary = "a client leaves",
                       .control = kv_control_goodbye},
    [KV_OP_MODEL] = {.name = "model",
                     .summary = "makes a model and its schema known",
                     .control = kv_control_model},
    [KV_OP_OPEN] = {.name = "open", .summary = "a new session", .control = kv_control_open},
    [KV_OP_RESUME] = {.name = "resume",
                      .summary = "takes up a session by its ticket",
                      .control = kv_control_resume},
    [KV_OP_FORK] = {.name = "fork",
                    .summary = "a new session that shares the first tokens",
                    .control = kv_control_fork},
    [KV_OP_TRUNCATE] = {.name = "truncate",
                        .summary = "forgets a session's last tokens",
                        .control = kv_control_truncate},
    [KV_OP_CLOSE] = {.name = "close",
                     .summary = "ends a session and frees its memory",
                     .control = kv_control_close},
    [KV_OP_RENEW] = {.name = "renew",
                     .summary = "renews a session's lease",
                     .control = kv_control_renew},
    [KV_OP_SESSION] = {.name = "session",
                       .summary = "tells a session's length, bytes and lease",
                       .control = kv_control_session},
    [KV_OP_TABLE] =
        {.name = "table",
         .summary =
             "tells about the node: status, sessions, clients, models, ops, stats, scrub",
         .control = kv_control_table},
    [KV_OP_DRAIN] = {.name = "drain",
                     .summary = "takes nothing new, finishes, stops",
                     .control = kv_control_drain},
};

static_assert(KV_OP_COUNT == 44, "operation added or removed: its row, and KV_WIRE_VERSION");

const char *kv_op_name(enum kv_op_id op)
{
    return (unsigned)op < KV_OP_COUNT ? kv_ops[op].name : NULL;
}

bool kv_op_is_control(unsigned op)
{
    return op < KV_OP_COUNT && kv_ops[op].control != NULL;
}

void kv_node_list_ops(FILE *out)
{
    for (unsigned op = 0; op < KV_OP_COUNT; op++)
        if (kv_ops[op].name != NULL)
            fprintf(out, "%s\t%s\t%s\n", kv_ops[op].name,
                    kv_op_is_control(op) ? "control" : "data", kv_ops[op].summary);
}
