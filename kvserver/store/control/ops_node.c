/* ops_node.c - the node itself: its tables, and drain. */
#include "kvserver/store/control/ops_private.h"
#include "proto/kvstore.pb-c.h"

#include <stdlib.h>
#include <string.h>

static void sizes_told(struct kvs_control_call *call)
{
    kvs_tables_reply(call, "sessions");
}

/* The data threads know how long sessions are. */
static void ask_sizes(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;

    call->sizes = malloc((control->n_sessions + 1) * sizeof(*call->sizes));
    if (call->sizes == NULL) {
        kvs_control_refuse(call, KV_BUSY, "table: out of memory");
        return;
    }
    for (uint32_t i = 0; i < control->config.sessions_max; i++) {
        const struct kvs_session *session = &control->sessions[i];

        if (!session->used)
            continue;
        struct kvs_session_size *size = &call->sizes[call->n_sizes++];
        size->index = i;
        size->token = session->token;
        atomic_init(&size->tokens, UINT32_MAX);
        atomic_init(&size->bytes, 0);
    }
    kvs_control_broadcast(call,
                          &(struct kvs_command){.kind = KVS_COMMAND_SESSION_SIZES,
                                                .sizes = call->sizes,
                                                .n_sizes = call->n_sizes},
                          sizes_told);
}

void kvs_control_table(struct kvs_control_call *call)
{
    Kvpb__TableRequest *request = kvs_call_unpack(call, &kvpb__table_request__descriptor);

    if (request == NULL)
        return;
    if (strcmp(request->name, "sessions") == 0)
        ask_sizes(call);
    else
        kvs_tables_reply(call, request->name);
    kvpb__table_request__free_unpacked(request, NULL);
}

void kvs_control_drain_begin(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;

    kvs_control_drain(control);
    atomic_store(&control->drain_requested, true);
    kvs_call_reply_ok(call);
}
