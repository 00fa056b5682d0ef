#include "kvserver/store/ops/parse_units.h"

static bool
fail_unit(struct kvs_request *request, uint32_t i, kv_status_t status, const char *fault)
{
    const struct kv_wire_unit *unit = &kvs_units(request)[i];

    kvs_request_fail(request, status, "%s: layer %u head %u: %s", request->type->name,
                     unit->layer, unit->kv_head, fault);
    return false;
}

bool kvs_fail_units(struct kvs_request *request)
{
    kvs_request_fail(request, KV_INVALID, "%s: %u units in a body of %u bytes",
                     request->type->name, request->header.n_units, request->header.body_bytes);
    return false;
}

bool kvs_fail_bad_row(struct kvs_request *request, uint32_t i, uint32_t token)
{
    const struct kv_wire_unit *unit = &kvs_units(request)[i];

    kvs_request_fail(
        request, KV_CORRUPT,
        "%s: layer %u head %u token %u: the row is corrupt in memory: put it again",
        request->type->name, unit->layer, unit->kv_head, token);
    return false;
}

uint32_t kvs_units_committed(const struct kvs_request *request)
{
    uint32_t committed = UINT32_MAX;

    for (uint32_t i = 0; i < request->header.n_units; i++) {
        const struct kvs_unit *unit = kvs_unit_at(request, i);

        if (unit->committed < committed)
            committed = unit->committed;
    }
    return committed;
}

bool kvs_check_unit_is_known(struct kvs_request *request, uint32_t i)
{
    const struct kv_wire_unit *unit = &kvs_units(request)[i];
    const struct kv_schema *schema = request->session->schema;

    return (unit->layer < schema->n_layers &&
            unit->kv_head < schema->layers[unit->layer].n_kv_heads) ||
           fail_unit(request, i, KV_INVALID, "not in the schema");
}

bool kvs_check_unit_is_here(struct kvs_request *request, uint32_t i)
{
    return kvs_unit_at(request, i) != NULL ||
           fail_unit(request, i, KV_MOVED, "not on this data thread");
}

bool kvs_check_unit_is_single(struct kvs_request *request, uint32_t i)
{
    struct kvs_unit *unit = kvs_unit_at(request, i);

    if (unit->mark == request->shard->marks)
        return fail_unit(request, i, KV_INVALID, "named twice");
    unit->mark = request->shard->marks;
    return true;
}

bool kvs_check_unit_has_no_ids(struct kvs_request *request, uint32_t i)
{
    return kvs_units(request)[i].n_ids == 0 ||
           fail_unit(request, i, KV_INVALID, "must not have ids");
}

bool kvs_parse_units(struct kvs_request *request,
                     bool fetch,
                     uint64_t *ret_rows,
                     uint64_t *ret_bytes)
{
    const struct kv_wire_header *header = &request->header;
    uint64_t n_rows = 0, bytes = 0;

    if (!kvs_units_are_there(request))
        return kvs_fail_units(request);
    if (!fetch && (header->token_count == 0 || header->token_count > KV_WIRE_ROWS_MAX ||
                   header->token_begin > request->session->tokens_max ||
                   header->token_count > request->session->tokens_max - header->token_begin)) {
        kvs_request_fail(request, KV_INVALID,
                         "%s: tokens %u + %u: limit %u per message and %u in all",
                         request->type->name, header->token_begin, header->token_count,
                         KV_WIRE_ROWS_MAX, request->session->tokens_max);
        return false;
    }
    kvs_begin_units(request);
    for (uint32_t i = 0; i < header->n_units; i++) {
        if (!kvs_check_unit_is_known(request, i) || !kvs_check_unit_is_here(request, i) ||
            !kvs_check_unit_is_single(request, i) ||
            (!fetch && !kvs_check_unit_has_no_ids(request, i)))
            return false;
        uint64_t rows = fetch ? kvs_units(request)[i].n_ids : header->token_count;
        n_rows += rows;
        bytes += rows * kvs_unit_at(request, i)->row_bytes;
    }
    if (n_rows > KV_WIRE_ROWS_MAX || bytes > KV_WIRE_BULK_MAX) {
        kvs_request_fail(request, KV_TOO_LARGE, "%s: %llu rows, %llu bytes: limits %u and %u",
                         request->type->name, (unsigned long long)n_rows,
                         (unsigned long long)bytes, KV_WIRE_ROWS_MAX, KV_WIRE_BULK_MAX);
        return false;
    }
    *ret_rows = n_rows;
    *ret_bytes = bytes;
    return true;
}
