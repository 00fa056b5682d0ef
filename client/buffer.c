#include "client/buffer.h"

#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/state.h"
#include "kvserver/net/transport.h"

#include <stdlib.h>

enum {
    PAGE_BYTES = 4096
};

static size_t padded(size_t bytes)
{
    return (bytes + PAGE_BYTES - 1) & ~(size_t)(PAGE_BYTES - 1);
}

/* `base` NULL: the transport allocates the memory. */
static kv_status_t
make(struct kv_client *client, void *base, size_t bytes, struct kv_buffer **ret_buffer)
{
    struct kv_transport *transport = client->transport;
    struct kv_buffer *buffer = calloc(1, sizeof(*buffer));
    kv_status_t status;

    if (buffer == NULL)
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "buffer: out of memory");
    buffer->client = client;
    buffer->bytes = bytes;
    if (base == NULL)
        status = transport->ops->alloc(transport, padded(bytes), &base, &buffer->mapping);
    else
        status = transport->ops->map(transport, base, bytes, KV_MEMORY_HOST, &buffer->mapping);
    buffer->base = base;
    if (status == KV_NO_MEMORY) {
        free(buffer);
        return kvc_set_error(&client->loop, status, "buffer: out of memory: %zu bytes", bytes);
    }
    if (status != KV_OK) {
        free(buffer);
        return kvc_set_error(&client->loop, status,
                             "buffer: %zu bytes: %s: the transport cannot register it", bytes,
                             kv_status_name(status));
    }
    kvc_list_append(&client->buffers, &buffer->of_client);
    *ret_buffer = buffer;
    return KV_OK;
}

kv_status_t
kv_buffer_alloc(struct kv_client *client, size_t bytes, struct kv_buffer **ret_buffer)
{
    KVC_ENTER(client);

    if (bytes == 0 || padded(bytes) < bytes)
        return kvc_set_error(&client->loop, KV_INVALID, "buffer: %zu bytes: out of bounds",
                             bytes);
    return make(client, NULL, bytes, ret_buffer);
}

kv_status_t kv_buffer_map(struct kv_client *client,
                          void *base,
                          size_t bytes,
                          enum kv_memory_type memory,
                          struct kv_buffer **ret_buffer)
{
    KVC_ENTER(client);

    if (base == NULL || bytes == 0 || bytes > SIZE_MAX - (uintptr_t)base)
        return kvc_set_error(&client->loop, KV_INVALID,
                             "buffer: %zu bytes at %p: NULL, empty or past the end of memory",
                             bytes, base);
    /* Checksums are computed in place, which needs memory that the CPU can read. */
    if (memory != KV_MEMORY_HOST)
        return kvc_set_error(&client->loop, KV_UNSUPPORTED,
                             "buffer: device memory is not implemented");
    return make(client, base, bytes, ret_buffer);
}

void *kv_buffer_data(const struct kv_buffer *buffer)
{
    return buffer->base;
}

size_t kv_buffer_bytes(const struct kv_buffer *buffer)
{
    return buffer->bytes;
}

bool kv_buffer_busy(const struct kv_buffer *buffer)
{
    KVC_LOOK(buffer->client);

    return buffer->n_holds > 0;
}

void kvc_buffer_destroy(struct kv_buffer *buffer)
{
    struct kv_transport *transport = buffer->client->transport;

    if (buffer->mapping != NULL)
        transport->ops->unmap(transport, buffer->mapping);
    kvc_list_remove(&buffer->of_client);
    free(buffer);
}

kv_status_t kv_buffer_free(struct kv_buffer *buffer)
{
    if (buffer == NULL)
        return KV_OK;
    KVC_LOOK(buffer->client);

    if (buffer->n_holds > 0)
        return kvc_set_error(&buffer->client->loop, KV_BUSY,
                             "buffer: in use by an operation or in quarantine");
    kvc_buffer_destroy(buffer);
    return KV_OK;
}
