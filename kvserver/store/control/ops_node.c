/* ops_node.c - the node itself: its tables, and drain. */
#include "kvserver/store/control/ops_private.h"
#include "proto/kvstore.pb-c.h"

void kvs_control_table(struct kvs_control_call *call)
{
    Kvpb__TableRequest *request = kvs_call_unpack(call, &kvpb__table_request__descriptor);

    if (request == NULL)
        return;
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
