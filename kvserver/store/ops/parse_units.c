#include "kvserver/store/ops/parse_units.h"

#include "kvserver/store/shard/op.h"

bool kv_parse_units(struct kv_work *work, bool fetch, uint64_t *ret_rows, uint64_t *ret_bytes)
{
    const struct kv_wire_header *request = &work->request;
    const struct kv_wire_unit *units = units_of(work);
    uint64_t n_rows = 0, bytes = 0;
    uint64_t mark = ++work->data->marks;

    if (request->n_units == 0 || request->n_units > KV_WIRE_UNITS_MAX ||
        request->n_units * sizeof(*units) > request->body_bytes) {
        kv_work_fail(work, KV_INVALID, "%s: %u units in a body of %u bytes", work->row->name,
                     request->n_units, request->body_bytes);
        return false;
    }
    if (!fetch && (request->token_count == 0 || request->token_count > KV_WIRE_ROWS_MAX ||
                   request->token_begin > work->part->tokens_max ||
                   request->token_count > work->part->tokens_max - request->token_begin)) {
        kv_work_fail(work, KV_INVALID, "%s: tokens %u + %u, at most %u at once and %u in all",
                     work->row->name, request->token_begin, request->token_count,
                     KV_WIRE_ROWS_MAX, work->part->tokens_max);
        return false;
    }
    for (uint32_t i = 0; i < request->n_units; i++) {
        struct kv_unit *unit = kv_part_unit(work->part, units[i].layer, units[i].kv_head);

        if (unit == NULL) {
            bool known =
                units[i].layer < work->part->schema->n_layers &&
                units[i].kv_head < work->part->schema->layers[units[i].layer].n_kv_heads;
            kv_work_fail(work, known ? KV_MOVED : KV_INVALID, "%s: layer %u head %u: %s",
                         work->row->name, units[i].layer, units[i].kv_head,
                         known ? "not on this data thread" : "not in the schema");
            return false;
        }
        if (unit->mark == mark || (!fetch && units[i].n_ids != 0)) {
            kv_work_fail(work, KV_INVALID, "%s: layer %u head %u: %s", work->row->name,
                         units[i].layer, units[i].kv_head,
                         unit->mark == mark ? "named twice" : "ids given");
            return false;
        }
        unit->mark = mark;
        uint64_t rows = fetch ? units[i].n_ids : request->token_count;
        n_rows += rows;
        bytes += rows * unit->row_bytes;
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
