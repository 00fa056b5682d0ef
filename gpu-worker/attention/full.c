/* The method full: every query attends to all earlier rows. */
#include "gpu-worker/attention/method.h"
#include "gpu-worker/kvcache/full_rows.h"
#include "gpu-worker/kvcache/session.h"

#include <stdlib.h>

struct full {
    struct kvw_method base;
    struct kvw_device *device;
    struct kvw_full_rows *full_rows;
    uint64_t rows_attended, step_rows;
};

static struct full *full_of(struct kvw_method *attention)
{
    return (struct full *)attention;
}

static void full_destroy(struct kvw_method *attention)
{
    kvw_full_rows_destroy(full_of(attention)->full_rows);
    free(attention);
}

static kv_status_t full_create(const struct kvw_method_setup *setup,
                               struct kvw_method **ret_attention,
                               char *detail,
                               size_t detail_bytes)
{
    struct full *full = calloc(1, sizeof(*full));
    kv_status_t status;

    if (full == NULL)
        return KV_NO_MEMORY;
    full->base.ops = &kvw_method_full;
    full->device = setup->session.model->device;
    status = kvw_full_rows_create(&setup->session, &full->full_rows, detail, detail_bytes);
    if (status != KV_OK) {
        free(full);
        return status;
    }
    full->base.session = kvw_full_rows_session(full->full_rows);
    *ret_attention = &full->base;
    return KV_OK;
}

static kv_status_t full_attend(struct kvw_method *attention,
                               enum kvw_phase phase,
                               uint32_t layer,
                               uint32_t token_begin,
                               uint32_t n,
                               const struct kvw_device_buffer *q,
                               const struct kvw_device_buffer *k,
                               const struct kvw_device_buffer *v,
                               struct kvw_device_buffer *out)
{
    struct full *full = full_of(attention);
    const struct kvw_rows_shape *shape = kvw_full_rows_shape(full->full_rows);
    const kv_status_t status =
        kvw_full_rows_put(full->full_rows, phase, layer, token_begin, n, k, v);

    if (status != KV_OK)
        return status;
    full->device->ops->rows_attend(
        full->device, shape, q, kvw_full_rows_of(full->full_rows, layer), token_begin, n, out);
    full->rows_attended += kvw_method_rows_possible(shape, token_begin, n);
    if (phase == KVW_DECODE)
        full->step_rows += kvw_method_rows_possible(shape, token_begin, n);
    return phase == KVW_PREFILL ? kvw_session_poll(attention->session) : KV_OK;
}

static kv_status_t full_set_options(struct kvw_method *attention,
                                    const struct kvw_method_options *options)
{
    (void)attention;
    (void)options;
    return KV_OK;
}

static uint64_t full_row_bytes(const struct kvw_method *attention)
{
    return kvw_full_rows_bytes(((const struct full *)attention)->full_rows);
}

static void full_stats(const struct kvw_method *attention, struct kvw_method_stats *stats)
{
    const struct full *full = (const struct full *)attention;

    stats->rows_attended = full->rows_attended;
    stats->rows_possible = full->rows_attended;
    stats->step_rows_attended = stats->step_rows_possible = full->step_rows;
    stats->waits.rows_s += kvw_full_rows_wait_s(full->full_rows);
}

const struct kvw_method_ops kvw_method_full = {
    .name = "full",
    .summary = "every token attends to all earlier tokens",
    .create = full_create,
    .destroy = full_destroy,
    .attend = full_attend,
    .set_options = full_set_options,
    .row_bytes = full_row_bytes,
    .stats = full_stats,
};
