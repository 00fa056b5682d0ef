/* The threads of a node.  Each calls its step function repeatedly, and sleeps while there is
 * nothing to do. */
#include "kvserver/store/node_private.h"

#include "kvserver/base/idle.h"
#include "kvserver/base/thread.h"

#include <stdlib.h>

enum {
    SPIN_WORKING_US = 500,   /* how long a thread spins after progress on a request that has not
                              * finished */
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

/* Since when a data thread has had nothing to do, and has had no request: what it does in the
 * background meanwhile does not count. */
struct quiet {
    struct kv_idle idle;
    uint64_t idle_since_us; /* 0: it has something to do */
    uint64_t since_us;      /* without a request; 0: it has some */
    uint64_t n_requests;    /* that have come until then */
};

/* Learns how long requests take to come. */
static void note_requests(struct quiet *quiet, const struct kvs_shard *shard)
{
    const uint64_t n_requests = kvs_counted(&shard->stats.requests);

    if (n_requests != quiet->n_requests) {
        if (quiet->since_us != 0)
            kv_idle_came(&quiet->idle, shard->now_us - quiet->since_us);
        quiet->n_requests = n_requests;
        quiet->since_us = 0;
    }
    if (quiet->since_us == 0 && kv_pool_used(shard->requests) == 0)
        quiet->since_us = shard->now_us;
}

/* Whether to look again, rather than sleep. */
static bool looks_again(struct quiet *quiet, struct kvs_shard *shard)
{
    const uint64_t spin_us = kv_idle_spin_us(&quiet->idle, shard->now_us);
    const uint64_t least_us = spin_us < KV_IDLE_LEAST_US ? spin_us : KV_IDLE_LEAST_US;

    /* The wait for a request is counted from the end of the last one, sleep included. */
    return shard->now_us - quiet->idle_since_us < least_us ||
           shard->now_us - quiet->since_us < spin_us ||
           (kv_pool_used(shard->requests) > 0 &&
            shard->now_us - shard->moved_us < SPIN_WORKING_US);
}

static void drive_data(void *arg)
{
    struct driven *driven = arg;
    struct kvs_node *node = driven->node;
    struct kvs_shard *shard = &node->shard[driven->index];
    struct quiet quiet = {.idle.mode = node->idle};

    while (!atomic_load_explicit(&node->stopping, memory_order_acquire)) {
        const bool has_moved = kvs_shard_step(shard);

        note_requests(&quiet, shard);
        if (has_moved) {
            quiet.idle_since_us = 0;
            if (shard->replies_due) {
                shard->replies_due = false;
                if (node->wake_control != NULL)
                    node->wake_control(node->wake_arg);
            }
            continue;
        }
        if (quiet.idle_since_us == 0)
            quiet.idle_since_us = shard->now_us;
        if (looks_again(&quiet, shard)) {
            kv_relax();
            continue;
        }
        /* One that is to make room for another's request is not woken for it. */
        data_sleep(shard,
                   kv_pool_used(shard->requests) > 0 ||
                           atomic_load_explicit(&shard->pages->is_giving, memory_order_relaxed)
                       ? SLEEP_WORKING_US
                       : SLEEP_US);
        quiet.idle_since_us = 0;
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
