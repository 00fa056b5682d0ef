/* node_private.h - the parts of a node: the shards of its data threads, the control thread's
 * state, and the threads that step them (node_threads.c), if it has its own.
 */
#ifndef KV_KVSERVER_STORE_NODE_PRIVATE_H
#define KV_KVSERVER_STORE_NODE_PRIVATE_H

#include "kvserver/base/idle.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/node.h"

struct kvs_node {
    struct kvs_shard *shard; /* (n_threads) */
    uint32_t n_threads;
    struct kvs_pages *pages; /* of all shards */
    struct kvs_control control;

    /* node_threads.c */
    enum kv_idle_mode idle; /* of data threads */
    void (*wake_control)(void *arg);
    void *wake_arg;
    _Atomic bool control_is_woken; /* by a data thread, since its last step began */
    struct kv_thread **threads;
    _Atomic bool stopping;
};

#endif
