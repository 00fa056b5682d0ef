/* inbox.c - the receive queue of a port, and the registry of all open ports.
 *
 * Any thread of the process may add messages to a receive queue; the port's thread removes
 * them.  Message nodes are reused, so that a busy receive queue does not allocate.
 */
#include "kvserver/net/loopback/loopback_private.h"

#include <assert.h>
#include <stdlib.h>

enum {
    SMALL_MAX = 4 << 10,                /* data of a small message node */
    RECEIVE_QUEUE_MESSAGES_MAX = 4096,  /* waiting in one receive queue, then KV_BUSY */
    RECEIVE_QUEUE_BYTES_MAX = 64 << 20, /* the same for their data */
    SPARE_SMALL_MAX = 256,              /* nodes kept for reuse, per receive queue */
    SPARE_LARGE_MAX = 32,               /* the same for nodes of KV_LOOPBACK_INLINE_MAX */
};

struct kv_loopback_registry kv_loopback_registry;

/* The first caller creates the lock, which is kept until the process ends. */
kv_status_t kv_loopback_registry_init(void)
{
    struct kv_lock *expected = NULL;
    struct kv_lock *lock;

    if (atomic_load(&kv_loopback_registry.lock) != NULL)
        return KV_OK;
    lock = kv_lock_create();
    if (lock == NULL)
        return KV_NO_MEMORY;
    if (!atomic_compare_exchange_strong(&kv_loopback_registry.lock, &expected, lock))
        kv_lock_destroy(lock);
    return KV_OK;
}

void kv_loopback_registry_take(void)
{
    kv_lock_take(atomic_load(&kv_loopback_registry.lock));
}

void kv_loopback_registry_release(void)
{
    kv_lock_release(atomic_load(&kv_loopback_registry.lock));
}

/* Receive queues */

static void free_messages(struct kv_loopback_message *message)
{
    while (message != NULL) {
        struct kv_loopback_message *next = message->next;

        free(message);
        message = next;
    }
}

void kv_loopback_receive_queue_unref(struct kv_loopback_receive_queue *receive_queue)
{
    if (receive_queue == NULL || atomic_fetch_sub(&receive_queue->refs, 1) > 1)
        return;
    assert(receive_queue->first == NULL && receive_queue->first_finished == NULL);
    free_messages(receive_queue->spare_small);
    free_messages(receive_queue->spare_large);
    kv_signal_destroy(receive_queue->signal);
    kv_lock_destroy(receive_queue->lock);
    free(receive_queue);
}

struct kv_loopback_receive_queue *kv_loopback_receive_queue_create(void)
{
    struct kv_loopback_receive_queue *receive_queue = calloc(1, sizeof(*receive_queue));

    if (receive_queue == NULL)
        return NULL;
    receive_queue->lock = kv_lock_create();
    receive_queue->signal = kv_signal_create();
    if (receive_queue->lock == NULL || receive_queue->signal == NULL) {
        if (receive_queue->lock != NULL)
            kv_lock_destroy(receive_queue->lock);
        if (receive_queue->signal != NULL)
            kv_signal_destroy(receive_queue->signal);
        free(receive_queue);
        return NULL;
    }
    atomic_init(&receive_queue->refs, 1);
    atomic_init(&receive_queue->open, true);
    return receive_queue;
}

/* Returns whether to raise the signal after the lock is released.  Call with the lock held. */
bool kv_loopback_must_raise(struct kv_loopback_receive_queue *receive_queue)
{
    bool raise = receive_queue->sleeping;

    receive_queue->sleeping = false;
    return raise;
}

/* Reserves a place in the receive queue, and a message for it. */
kv_status_t kv_loopback_receive_queue_reserve(struct kv_loopback_receive_queue *receive_queue,
                                              size_t data_bytes,
                                              struct kv_loopback_message **ret_message)
{
    bool is_large = data_bytes > SMALL_MAX;
    struct kv_loopback_message *message = NULL;
    kv_status_t status = KV_OK;

    kv_lock_take(receive_queue->lock);
    if (!atomic_load(&receive_queue->open)) {
        status = KV_UNREACHABLE;
    } else if (receive_queue->n_messages >= RECEIVE_QUEUE_MESSAGES_MAX ||
               receive_queue->n_bytes + data_bytes > RECEIVE_QUEUE_BYTES_MAX) {
        status = KV_BUSY;
    } else {
        struct kv_loopback_message **spare =
            is_large ? &receive_queue->spare_large : &receive_queue->spare_small;
        unsigned *n_spare =
            is_large ? &receive_queue->n_spare_large : &receive_queue->n_spare_small;

        message = *spare;
        if (message != NULL) {
            *spare = message->next;
            --*n_spare;
        }
        receive_queue->n_messages++;
        receive_queue->n_bytes += data_bytes;
    }
    kv_lock_release(receive_queue->lock);
    if (status != KV_OK)
        return status;

    if (message == NULL) {
        size_t bytes = sizeof(*message) + (is_large ? KV_LOOPBACK_INLINE_MAX : SMALL_MAX);

        message = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        if (message == NULL) {
            kv_lock_take(receive_queue->lock);
            receive_queue->n_messages--;
            receive_queue->n_bytes -= data_bytes;
            kv_lock_release(receive_queue->lock);
            return KV_NO_MEMORY;
        }
        message->is_large = is_large;
    }
    message->next = NULL;
    message->offer = NULL;
    message->data_bytes = data_bytes;
    *ret_message = message;
    return KV_OK;
}

/* Returns a message to the free list.  Call with the lock held. */
void kv_loopback_receive_queue_recycle(struct kv_loopback_receive_queue *receive_queue,
                                       struct kv_loopback_message *message)
{
    struct kv_loopback_message **spare =
        message->is_large ? &receive_queue->spare_large : &receive_queue->spare_small;
    unsigned *n_spare =
        message->is_large ? &receive_queue->n_spare_large : &receive_queue->n_spare_small;
    unsigned max = message->is_large ? SPARE_LARGE_MAX : SPARE_SMALL_MAX;

    receive_queue->n_messages--;
    receive_queue->n_bytes -= message->data_bytes;
    if (*n_spare >= max) {
        free(message);
        return;
    }
    message->next = *spare;
    *spare = message;
    ++*n_spare;
}

/* Queues a filled message.  Fails with KV_UNREACHABLE if the port has closed since it was
 * reserved; the message is then freed. */
kv_status_t kv_loopback_receive_queue_push(struct kv_loopback_receive_queue *receive_queue,
                                           struct kv_loopback_message *message)
{
    bool raise;

    kv_lock_take(receive_queue->lock);
    if (!atomic_load(&receive_queue->open)) {
        kv_loopback_receive_queue_recycle(receive_queue, message);
        kv_lock_release(receive_queue->lock);
        return KV_UNREACHABLE;
    }
    if (receive_queue->last != NULL)
        receive_queue->last->next = message;
    else
        receive_queue->first = message;
    receive_queue->last = message;
    atomic_fetch_add_explicit(&receive_queue->n_waiting, 1, memory_order_relaxed);
    raise = kv_loopback_must_raise(receive_queue);
    kv_lock_release(receive_queue->lock);
    if (raise)
        kv_signal_raise(receive_queue->signal);
    return KV_OK;
}
