/* buffer.h - registered memory, and the count of its users.
 *
 * Each operation that has not ended and each request that is not released holds its buffer.
 * While the count is not 0, a transfer may still access the memory.  After the operation has
 * ended, that is the quarantine.
 *
 * Threads: the client's.  Memory: kv_buffer_alloc() or kv_buffer_map() / kv_buffer_free().
 */
#ifndef KV_CLIENT_BUFFER_H
#define KV_CLIENT_BUFFER_H

#include "client/list.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_client;
struct kv_mapping;

struct kv_buffer {
    struct kvc_list of_client;
    struct kv_client *client;
    uint8_t *base;
    size_t bytes;
    struct kv_mapping *mapping;
    uint32_t n_holds;
};

static inline void kvc_buffer_hold(struct kv_buffer *buffer)
{
    if (buffer != NULL)
        buffer->n_holds++;
}

static inline void kvc_buffer_release(struct kv_buffer *buffer)
{
    if (buffer != NULL)
        buffer->n_holds--;
}

/* Whether [offset, offset + bytes) lies in a buffer of this client. */
static inline bool kvc_buffer_holds(const struct kv_client *client,
                                    const struct kv_buffer *buffer,
                                    size_t offset,
                                    size_t bytes)
{
    return buffer != NULL && buffer->client == client && offset <= buffer->bytes &&
           bytes <= buffer->bytes - offset;
}

void kvc_buffer_destroy(struct kv_buffer *buffer);

#endif
