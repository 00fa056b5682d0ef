/* full - every query attends to every row before it. */
#include "gpu-worker/attention/method.h"
#include "gpu-worker/kvcache/full_rows.h"
#include "gpu-worker/kvcache/session.h"

#include <stdlib.h>

struct full {
    struct kv_attention base;
    struct kv_device *device;
    struct kv_local_rows *local;
    uint64_t rows_attended;
};

static struct full *full_of(struct kv_attention *attention)
{
    return (struct full *)attention;
}

static void full_destroy(struct kv_attention *attention)
{
    kv_local_rows_destroy(full_of(attention)->local);
    free(attention);
}

static kv_status_t full_create(const struct kv_attention_setup *setup,
                               struct kv_attention **ret_attention,
                               char *detail,
                               size_t detail_bytes)
{
    struct full *full = calloc(1, sizeof(*full));
    kv_status_t status;

    if (full == NULL)
        return KV_NO_MEMORY;
    full->base.row = &kv_attention_full;
    full->device = setup->session.model->device;
    status = kv_local_rows_create(&setup->session, &full->local, detail, detail_bytes);
    if (status != KV_OK) {
        free(full);
        return status;
    }
    full->base.session = kv_local_rows_session(full->local);
    *ret_attention = &full->base;
    return KV_OK;
}

static kv_status_t full_attend(struct kv_attention *attention,
                               enum kv_phase phase,
                               uint32_t layer,
                               uint32_t token_begin,
                               uint32_t n,
                               const struct kv_device_buffer *q,
                               const struct kv_device_buffer *k,
                               const struct kv_device_buffer *v,
                               struct kv_device_buffer *out)
{
    struct full *full = full_of(attention);
    const struct kv_rows_shape *shape = kv_local_rows_shape(full->local);
    const kv_status_t status =
        kv_local_rows_put(full->local, phase, layer, token_begin, n, k, v);

    if (status != KV_OK)
        return status;
    full->device->row->rows_attend(full->device, shape, q, kv_local_rows_of(full->local, layer),
                                   token_begin, n, out);
    full->rows_attended += kv_attention_rows_possible(shape, token_begin, n);
    return phase == KV_PREFILL ? kv_store_session_poll(attention->session) : KV_OK;
}

static kv_status_t full_retune(struct kv_attention *attention,
                               const struct kv_attention_options *options)
{
    (void)attention;
    (void)options;
    return KV_OK;
}

static void full_stats(const struct kv_attention *attention, struct kv_attention_stats *stats)
{
    const struct full *full = (const struct full *)attention;

    stats->rows_attended = full->rows_attended;
    stats->rows_possible = full->rows_attended;
}

const struct kv_attention_row kv_attention_full = {
    .name = "full",
    .summary = "every token attends to all before it",
    .create = full_create,
    .destroy = full_destroy,
    .attend = full_attend,
    .retune = full_retune,
    .stats = full_stats,
};
