/* inbox.c - the queue that a port receives from, and the registry of all open ports.
 *
 * Any thread of the process may put messages into an inbox; the port's thread takes them out.
 * Nodes of messages are kept for reuse, so that a busy inbox does not allocate.
 */
#include "kvserver/net/loopback/loopback_private.h"

#include <assert.h>
#include <stdlib.h>

enum {
    SMALL_MAX = 4 << 10,        /* data of a small message node */
    INBOX_MESSAGES_MAX = 4096,  /* waiting in one inbox, then KV_BUSY */
    INBOX_BYTES_MAX = 64 << 20, /* the same for their data */
    SPARE_SMALL_MAX = 256,      /* nodes kept for reuse, per inbox */
    SPARE_LARGE_MAX = 32,       /* the same for nodes of INLINE_MAX */
};

struct registry kv_loopback_registry;

/* The lock is made by whoever comes first, and lives as long as the process. */
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

/* Inboxes */

static void free_messages(struct message *message)
{
    while (message != NULL) {
        struct message *next = message->next;

        free(message);
        message = next;
    }
}

void kv_loopback_inbox_unref(struct inbox *inbox)
{
    if (inbox == NULL || atomic_fetch_sub(&inbox->refs, 1) > 1)
        return;
    assert(inbox->first == NULL && inbox->first_finished == NULL);
    free_messages(inbox->spare_small);
    free_messages(inbox->spare_large);
    kv_signal_destroy(inbox->signal);
    kv_lock_destroy(inbox->lock);
    free(inbox);
}

struct inbox *kv_loopback_inbox_create(void)
{
    struct inbox *inbox = calloc(1, sizeof(*inbox));

    if (inbox == NULL)
        return NULL;
    inbox->lock = kv_lock_create();
    inbox->signal = kv_signal_create();
    if (inbox->lock == NULL || inbox->signal == NULL) {
        if (inbox->lock != NULL)
            kv_lock_destroy(inbox->lock);
        if (inbox->signal != NULL)
            kv_signal_destroy(inbox->signal);
        free(inbox);
        return NULL;
    }
    atomic_init(&inbox->refs, 1);
    atomic_init(&inbox->open, true);
    return inbox;
}

/* Call with the lock held; returns what to do after its release. */
bool kv_loopback_must_raise(struct inbox *inbox)
{
    bool raise = inbox->sleeping;

    inbox->sleeping = false;
    return raise;
}

/* Takes a place in the inbox and a node for it. */
kv_status_t
kv_loopback_inbox_reserve(struct inbox *inbox, size_t data_bytes, struct message **ret_message)
{
    bool is_large = data_bytes > SMALL_MAX;
    struct message *message = NULL;
    kv_status_t status = KV_OK;

    kv_lock_take(inbox->lock);
    if (!atomic_load(&inbox->open)) {
        status = KV_UNREACHABLE;
    } else if (inbox->n_messages >= INBOX_MESSAGES_MAX ||
               inbox->n_bytes + data_bytes > INBOX_BYTES_MAX) {
        status = KV_BUSY;
    } else {
        struct message **spare = is_large ? &inbox->spare_large : &inbox->spare_small;
        unsigned *n_spare = is_large ? &inbox->n_spare_large : &inbox->n_spare_small;

        message = *spare;
        if (message != NULL) {
            *spare = message->next;
            --*n_spare;
        }
        inbox->n_messages++;
        inbox->n_bytes += data_bytes;
    }
    kv_lock_release(inbox->lock);
    if (status != KV_OK)
        return status;

    if (message == NULL) {
        size_t bytes = sizeof(*message) + (is_large ? INLINE_MAX : SMALL_MAX);

        message = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        if (message == NULL) {
            kv_lock_take(inbox->lock);
            inbox->n_messages--;
            inbox->n_bytes -= data_bytes;
            kv_lock_release(inbox->lock);
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

/* Gives a node back; call with the lock held. */
void kv_loopback_inbox_recycle(struct inbox *inbox, struct message *message)
{
    struct message **spare = message->is_large ? &inbox->spare_large : &inbox->spare_small;
    unsigned *n_spare = message->is_large ? &inbox->n_spare_large : &inbox->n_spare_small;
    unsigned max = message->is_large ? SPARE_LARGE_MAX : SPARE_SMALL_MAX;

    inbox->n_messages--;
    inbox->n_bytes -= message->data_bytes;
    if (*n_spare >= max) {
        free(message);
        return;
    }
    message->next = *spare;
    *spare = message;
    ++*n_spare;
}

/* Queues a filled node.  KV_UNREACHABLE: the port has closed since it was reserved; the node is
 * gone. */
kv_status_t kv_loopback_inbox_push(struct inbox *inbox, struct message *message)
{
    bool raise;

    kv_lock_take(inbox->lock);
    if (!atomic_load(&inbox->open)) {
        kv_loopback_inbox_recycle(inbox, message);
        kv_lock_release(inbox->lock);
        return KV_UNREACHABLE;
    }
    if (inbox->last != NULL)
        inbox->last->next = message;
    else
        inbox->first = message;
    inbox->last = message;
    atomic_fetch_add_explicit(&inbox->n_waiting, 1, memory_order_relaxed);
    raise = kv_loopback_must_raise(inbox);
    kv_lock_release(inbox->lock);
    if (raise)
        kv_signal_raise(inbox->signal);
    return KV_OK;
}
