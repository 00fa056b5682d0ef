#include "kvserver/store/ops/parse_units.h"

static bool fail_unit(struct kv_work *work, uint32_t i, kv_status_t status, const char *fault)
{
    const struct kv_wire_unit *unit = &kvs_units(work)[i];

    kv_work_fail(work, status, "%s: layer %u head %u: %s", work->row->name, unit->layer,
                 unit->kv_head, fault);
    return false;
}

bool kvs_fail_units(struct kv_work *work)
{
    kv_work_fail(work, KV_INVALID, "%s: %u units in a body of %u bytes", work->row->name,
                 work->request.n_units, work->request.body_bytes);
    return false;
}

bool kvs_check_unit_is_known(struct kv_work *work, uint32_t i)
{
    const struct kv_wire_unit *unit = &kvs_units(work)[i];
    const struct kv_schema *schema = work->part->schema;

    return (unit->layer < schema->n_layers &&
            unit->kv_head < schema->layers[unit->layer].n_kv_heads) ||
           fail_unit(work, i, KV_INVALID, "not in the schema");
}

bool kvs_check_unit_is_here(struct kv_work *work, uint32_t i)
{
    return kvs_unit_at(work, i) != NULL ||
           fail_unit(work, i, KV_MOVED, "not on this data thread");
}

bool kvs_check_unit_is_single(struct kv_work *work, uint32_t i)
{
    struct kv_unit *unit = kvs_unit_at(work, i);

    if (unit->mark == work->data->marks)
        return fail_unit(work, i, KV_INVALID, "named twice");
    unit->mark = work->data->marks;
    return true;
}

bool kvs_check_unit_has_no_ids(struct kv_work *work, uint32_t i)
{
    return kvs_units(work)[i].n_ids == 0 || fail_unit(work, i, KV_INVALID, "ids given");
}

bool kv_parse_units(struct kv_work *work, bool fetch, uint64_t *ret_rows, uint64_t *ret_bytes)
{
    const struct kv_wire_header *request = &work->request;
    uint64_t n_rows = 0, bytes = 0;

    if (!kvs_units_are_there(work))
        return kvs_fail_units(work);
    if (!fetch && (request->token_count == 0 || request->token_count > KV_WIRE_ROWS_MAX ||
                   request->token_begin > work->part->tokens_max ||
                   request->token_count > work->part->tokens_max - request->token_begin)) {
        kv_work_fail(work, KV_INVALID, "%s: tokens %u + %u, at most %u at once and %u in all",
                     work->row->name, request->token_begin, request->token_count,
                     KV_WIRE_ROWS_MAX, work->part->tokens_max);
        return false;
    }
    kvs_begin_units(work);
    for (uint32_t i = 0; i < request->n_units; i++) {
        if (!kvs_check_unit_is_known(work, i) || !kvs_check_unit_is_here(work, i) ||
            !kvs_check_unit_is_single(work, i) ||
            (!fetch && !kvs_check_unit_has_no_ids(work, i)))
            return false;
        uint64_t rows = fetch ? kvs_units(work)[i].n_ids : request->token_count;
        n_rows += rows;
        bytes += rows * kvs_unit_at(work, i)->row_bytes;
    }
    if (n_rows > KV_WIRE_ROWS_MAX || bytes > KV_WIRE_BULK_MAX) {
        kv_work_fail(work, KV_TOO_LARGE, "%s: %llu rows, %llu bytes, at most %u and %u",
                     work->row->name, (unsigned long long)n_rows, (unsigned long long)bytes,
                     KV_WIRE_ROWS_MAX, KV_WIRE_BULK_MAX);
        return false;
    }
    *ret_rows = n_rows;
    *ret_bytes = bytes;
    return true;
}
