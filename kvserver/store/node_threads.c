/* The threads of a node.  Each calls its step function repeatedly, and sleeps while there is
 * nothing to do. */
#include "kvserver/store/node_private.h"

#include "kvserver/base/thread.h"

#include <stdlib.h>

enum {
    SPIN_US = 50,            /* how long an idle thread spins before it sleeps */
    SPIN_WORKING_US = 500,   /* the same, after progress on a request that has not finished */
    SLEEP_US = 50000,        /* longest sleep: deadlines of waiting requests are checked as
                              * often */
    SLEEP_WORKING_US = 1000, /* the same, while requests are in flight */
};

struct driven {
    struct kvs_node *node;
    uint32_t index;
};

/* Sleeps until there may be something to do. */
static void data_sleep(struct kvs_shard *shard, uint64_t timeout_us)
{
    int fd = -1;

    /* Arms first, then checks again, so that nothing arriving in between is slept through. */
    if (shard->port->ops->port_arm(shard->port, &fd) != KV_OK || !kvs_shard_fall_asleep(shard))
        return;
    kv_sleep_fds(&fd, 1, timeout_us);
    kvs_shard_awake(shard);
}

static void drive_data(void *arg)
{
    struct driven *driven = arg;
    struct kvs_node *node = driven->node;
    struct kvs_shard *shard = &node->shard[driven->index];
    uint64_t idle_since_us = 0;

    while (!atomic_load_explicit(&node->stopping, memory_order_acquire)) {
        if (kvs_shard_step(shard)) {
            idle_since_us = 0;
            if (shard->replies_due) {
                shard->replies_due = false;
                if (node->wake_control != NULL)
                    node->wake_control(node->wake_arg);
            }
            continue;
        }
        if (idle_since_us == 0)
            idle_since_us = shard->now_us;
        if (shard->now_us - idle_since_us < SPIN_US ||
            (kv_pool_used(shard->requests) > 0 &&
             shard->now_us - shard->moved_us < SPIN_WORKING_US)) {
            kv_relax();
            continue;
        }
        data_sleep(shard, kv_pool_used(shard->requests) > 0 ? SLEEP_WORKING_US : SLEEP_US);
        idle_since_us = 0;
    }
    free(driven);
}

/* Wakes the control thread, once for all replies that it has not seen yet: the data threads
 * reply to a broadcast at about the same time. */
static void wake_control(void *arg)
{
    struct kvs_node *node = arg;

    if (!atomic_exchange(&node->control_is_woken, true))
        node->control.port->ops->port_wake(node->control.port);
}

static void drive_control(void *arg)
{
    struct driven *driven = arg;
    struct kvs_node *node = driven->node;

    while (!atomic_load_explicit(&node->stopping, memory_order_acquire)) {
        (void)atomic_exchange(&node->control_is_woken, false);
        bool waiting = kvs_node_control_step(node);
        int fd = -1;
        if (node->control.port->ops->port_arm(node->control.port, &fd) == KV_OK &&
            !kv_ring_ready(node->control.replies))
            kv_sleep_fds(&fd, 1, waiting ? 1000 : 20000);
    }
    free(driven);
}

void kvs_node_set_control_waker(struct kvs_node *node, void (*wake)(void *arg), void *arg)
{
    node->wake_control = wake;
    node->wake_arg = arg;
}

kv_status_t kvs_node_start(struct kvs_node *node, bool with_control)
{
    uint32_t n_threads = node->n_threads + (with_control ? 1 : 0);

    if (with_control && node->control.port == NULL)
        return KV_INVALID;
    node->threads = calloc(n_threads + 1, sizeof(*node->threads));
    if (node->threads == NULL)
        return KV_NO_MEMORY;
    atomic_store(&node->stopping, false);
    if (with_control)
        kvs_node_set_control_waker(node, wake_control, node);
    for (uint32_t i = 0; i < n_threads; i++) {
        struct driven *driven = malloc(sizeof(*driven));
        char name[16];
        kv_status_t status = KV_NO_MEMORY;

        if (driven != NULL) {
            *driven = (struct driven){node, i};
            snprintf(name, sizeof(name), i < node->n_threads ? "kv-data-%u" : "kv-control", i);
            status = kv_thread_start(name, i < node->n_threads ? drive_data : drive_control,
                                     driven, &node->threads[i]);
        }
        if (status != KV_OK) {
            free(driven);
            kvs_node_stop(node);
            return status;
        }
    }
    return KV_OK;
}

void kvs_node_stop(struct kvs_node *node)
{
    if (node->threads == NULL)
        return;
    atomic_store_explicit(&node->stopping, true, memory_order_release);
    for (uint32_t i = 0; i < node->n_threads; i++)
        node->shard[i].port->ops->port_wake(node->shard[i].port);
    if (node->control.port != NULL)
        node->control.port->ops->port_wake(node->control.port);
    for (uint32_t i = 0; node->threads[i] != NULL; i++)
        kv_thread_join(node->threads[i]);
    free(node->threads);
    node->threads = NULL;
}
