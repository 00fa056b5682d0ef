#include "gpu-worker/kvcache/embedded_node.h"

#include "kvserver/base/cpu_quota.h"
#include "kvserver/base/idle.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/node.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    SCRUB_BYTES = 64 << 20, /* a second: kvserver's default */
};

struct kvw_embedded {
    struct kv_transport *transport;
    struct kv_disk *disk;
    struct kvs_node *node;
};

void kvw_embedded_close(struct kvw_embedded *embedded)
{
    if (embedded == NULL)
        return;
    if (embedded->node != NULL)
        kvs_node_stop(embedded->node);
    kvs_node_destroy(embedded->node);
    kv_disk_close(embedded->disk);
    if (embedded->transport != NULL)
        embedded->transport->ops->close(embedded->transport);
    free(embedded);
}

kv_status_t kvw_embedded_open(uint64_t memory_bytes,
                              struct kvw_embedded **ret_embedded,
                              char *detail,
                              size_t detail_bytes)
{
    const struct kv_transport_config transport_config = {0};
    struct kvw_embedded *embedded = calloc(1, sizeof(*embedded));
    kv_status_t status = KV_NO_MEMORY;

    snprintf(detail, detail_bytes, "store: embedded: out of memory");
    if (embedded == NULL)
        return KV_NO_MEMORY;
    status = kv_transport_loopback.open(&transport_config, &embedded->transport, detail,
                                        detail_bytes);
    if (status != KV_OK)
        goto err;
    embedded->disk = kv_disk_memory_open(&kv_clock_real, 0);
    if (embedded->disk == NULL) {
        status = KV_NO_MEMORY;
        goto err;
    }

    /* One data thread: more would take processors from the computation. */
    const struct kvs_node_config config = {
        .name = "embedded",
        .memory_bytes = memory_bytes,
        .scrub_bytes = SCRUB_BYTES,
        .n_threads = 1,
        /* The client's thread looks, too. */
        .poll = kv_idle_within(KV_IDLE_ADAPTIVE, 2, kv_cpu_quota()) == KV_IDLE_SLEEP ? "sleep"
                                                                                     : NULL,
        .clock = &kv_clock_real,
        .transport = embedded->transport,
        .message_control = true,
        .disk = embedded->disk,
    };

    status = kvs_node_create(&config, &embedded->node, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    status = kvs_node_start(embedded->node, true);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "store: embedded: threads: %s", kv_status_name(status));
        goto err;
    }
    detail[0] = '\0';
    *ret_embedded = embedded;
    return KV_OK;

err:
    kvw_embedded_close(embedded);
    return status;
}

const char *kvw_embedded_address(const struct kvw_embedded *embedded)
{
    return kvs_node_address(embedded->node);
}
