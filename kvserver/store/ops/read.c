/* read and fetch.
 *
 * They wait for rows that are not committed, and fail for rows that are known to be bad.  They
 * verify nothing: the client does, when it has the rows.  There are three ways to reply.  Small
 * results are gathered into the reply's body.  Rows that lie in one piece are pinned and sent
 * in place.  All others are gathered into a staging buffer, in slices. */
#include "kernels/gather.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/ops/need_rows.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"
#include "kvserver/store/rows/verify.h"

enum {
    GATHER_BYTES = 64 << 10, /* between two looks at the clock: some us */
};

static_assert((int)KV_ROW_BYTES_MAX <= (int)GATHER_BYTES, "at least one row");

static bool is_fetch(const struct kvs_request *request)
{
    return request->header.op == KV_OP_FETCH;
}

/* Returns the number of rows of the request's unit i. */
static uint32_t rows_of(const struct kvs_request *request, uint32_t i)
{
    return is_fetch(request) ? kvs_units(request)[i].n_ids : request->header.token_count;
}

/* Gathers rows from the cursor on into dst, at most `room` bytes, and advances the cursor.
 * Returns the number of bytes written. */
static size_t gather(struct kvs_request *request, uint8_t *dst, size_t room)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t *ids = kvs_numbers(request);
    size_t done = 0;

    if (is_fetch(request))
        for (uint32_t i = 0; i < request->cursor_unit; i++)
            ids += kvs_units(request)[i].n_ids;
    for (; request->cursor_unit < header->n_units;
         request->cursor_unit++, request->cursor_row = 0) {
        const struct kvs_unit *unit = kvs_unit_at(request, request->cursor_unit);
        uint32_t n_rows = rows_of(request, request->cursor_unit);

        while (request->cursor_row < n_rows) {
            const void *rows[512];
            uint32_t n = 0;
            for (; n < 512 && request->cursor_row + n < n_rows &&
                   done + (size_t)(n + 1) * unit->row_bytes <= room;
                 n++) {
                uint32_t at = request->cursor_row + n;
                rows[n] =
                    kvs_unit_row(unit, is_fetch(request) ? ids[at] : header->token_begin + at);
            }
            if (n == 0)
                return done;
            kv_rows_gather(dst + done, rows, n, unit->row_bytes);
            done += (size_t)n * unit->row_bytes;
            request->cursor_row += n;
        }
        if (is_fetch(request))
            ids += n_rows;
    }
    return done;
}

static void gather_crcs(const struct kvs_request *request, uint32_t *ret_crcs)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t *ids = kvs_numbers(request);

    for (uint32_t i = 0; i < header->n_units; i++) {
        const struct kvs_unit *unit = kvs_unit_at(request, i);

        if (is_fetch(request)) {
            for (uint32_t j = 0; j < kvs_units(request)[i].n_ids; j++)
                *ret_crcs++ = *kvs_unit_crc(unit, *ids++);
        } else {
            kvs_unit_read_crcs(unit, header->token_begin, header->token_count, ret_crcs);
            ret_crcs += header->token_count;
        }
    }
}

/* Checks that no row is known to be bad.  Returns false after failing the request. */
static bool rows_are_good(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t *ids = kvs_numbers(request);

    for (uint32_t i = 0; i < header->n_units; i++) {
        const struct kvs_unit *unit = kvs_unit_at(request, i);
        const uint32_t n = rows_of(request, i);
        uint32_t bad = UINT32_MAX;

        if (is_fetch(request)) {
            for (uint32_t j = 0; j < n && bad == UINT32_MAX; j++)
                bad = kvs_unit_is_bad(unit, ids[j]) ? ids[j] : UINT32_MAX;
            ids += n;
        } else {
            const uint32_t first = kvs_unit_known_bad(unit, header->token_begin, n);

            bad = first < header->token_begin + n ? first : UINT32_MAX;
        }
        if (bad == UINT32_MAX)
            continue;
        return kvs_fail_bad_row(request, i, bad);
    }
    return true;
}

/* Gets a buffer for the reply's body, with `bytes` of rows after the CRCs, and writes these.
 * Returns false after failing the request. */
static bool get_reply(struct kvs_request *request, size_t bytes)
{
    const uint32_t n_rows = request->reply.n_rows;
    const size_t need = n_rows * sizeof(uint32_t) + bytes;

    /* `small` may hold the request's body: the reply then needs a buffer of its own. */
    if (request->body != request->small && need <= sizeof(request->small)) {
        request->reply_body = request->small;
    } else if (kvs_request_get_reply_slot(request, need) != KV_OK) {
        kvs_request_fail(request, KV_BUSY, "%s: no free buffer for the reply",
                         request->type->name);
        return false;
    }
    gather_crcs(request, (uint32_t *)(void *)request->reply_body);
    kvs_count(&request->shard->stats.rows_out, n_rows);
    kvs_count(&request->shard->stats.rows_out_bytes, request->cursor_bytes);
    kvs_count(&request->client->rows_out, n_rows);
    return true;
}

/* Pins the rows if they can be sent from where they are.  Returns false if they cannot. */
static bool pin_piece(struct kvs_request *request, struct kv_iov *ret_piece)
{
    const struct kv_wire_header *header = &request->header;

    if (is_fetch(request) || header->n_units != 1)
        return false;
    const struct kvs_unit *unit = kvs_unit_at(request, 0);
    if (kvs_unit_pieces(unit, header->token_begin, header->token_count, ret_piece, 0, 1) != 1)
        return false;
    request->n_pins =
        kvs_unit_pin(unit, header->token_begin, header->token_count, request->pins);
    return true;
}

/* Returns whether the rows are in memory; if not, it waits for them, or has failed. */
static bool are_here(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const struct kvs_segment *missing =
        is_fetch(request) ? kvs_need_ids(request)
                          : kvs_need_tokens(request, header->token_begin,
                                            header->token_begin + header->token_count);

    if (missing != NULL)
        kvs_request_wait_for_segment(request, missing);
    return missing == NULL;
}

/* All rows are committed: replies, or queues a request that needs a staging buffer.  Until it
 * has that, it holds no other. */
static void read_ready(struct kvs_request *request)
{
    const size_t bytes = request->cursor_bytes; /* of all rows; set by begin */
    const size_t crc_bytes = request->reply.n_rows * sizeof(uint32_t);
    struct kv_iov piece;

    if (!rows_are_good(request) || !are_here(request))
        return;
    if (bytes <= KV_WIRE_INLINE_MAX / 2) {
        if (!get_reply(request, bytes))
            return;
        gather(request, request->reply_body + crc_bytes, bytes);
        kvs_request_reply(request, request->reply_body, crc_bytes + bytes, NULL, 0);
    } else if (pin_piece(request, &piece)) {
        if (!get_reply(request, 0))
            return;
        kvs_count(&request->shard->stats.direct_sends, 1);
        kvs_request_reply(request, request->reply_body, crc_bytes, piece.base, piece.bytes);
    } else {
        kvs_request_enqueue(request);
    }
}

bool kvs_op_read_run(struct kvs_request *request)
{
    if (!kvs_request_check_current(request))
        return false;
    /* As long as it waits for a buffer, its rows may leave, and come back bad. */
    if (request->reply_body == NULL && (!rows_are_good(request) || !are_here(request)))
        return false;
    if (request->staging == NULL && !kvs_request_acquire_staging(request))
        return false;
    if (request->reply_body == NULL) {
        if (!get_reply(request, 0))
            return false;
        kvs_need_begin_work(request, true);
        kvs_count(&request->shard->stats.staged_sends, 1);
        request->cursor_bytes = 0;
    }
    struct kv_slice slice = kv_slice_begin(request->shard->clock, 1);
    do {
        request->cursor_bytes +=
            gather(request, request->staging + request->cursor_bytes, GATHER_BYTES);
    } while (request->cursor_unit < request->header.n_units && !kv_slice_over(&slice));
    if (request->cursor_unit < request->header.n_units)
        return true;
    kvs_request_reply(request, request->reply_body, request->reply.n_rows * sizeof(uint32_t),
                      request->staging, request->cursor_bytes);
    return false;
}

void kvs_op_read_wake(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    uint32_t committed;

    if (!kvs_request_check_current(request))
        return;
    committed = kvs_units_committed(request);
    if (committed < header->snapshot) {
        kvs_request_wait(request, header->snapshot);
        return;
    }
    request->reply.layer = kvs_units(request)[0].layer;
    request->reply.snapshot = committed;
    read_ready(request);
}

void kvs_op_read_begin(struct kvs_request *request)
{
    struct kv_wire_header *header = &request->header;
    uint64_t n_rows, bytes;
    uint32_t need = header->token_begin + header->token_count;

    if (!kvs_parse_units(request, is_fetch(request), &n_rows, &bytes))
        return;
    size_t expected = header->n_units * sizeof(struct kv_wire_unit) +
                      (is_fetch(request) ? n_rows * sizeof(uint32_t) : 0);
    if (header->body_bytes != expected || n_rows == 0) {
        kvs_request_fail(
            request, KV_INVALID, "%s: body of %u bytes for %llu rows, expected %zu",
            request->type->name, header->body_bytes, (unsigned long long)n_rows, expected);
        return;
    }
    if (is_fetch(request)) {
        uint32_t last = 0;
        for (uint64_t i = 0; i < n_rows; i++)
            if (kvs_numbers(request)[i] > last)
                last = kvs_numbers(request)[i];
        if (last >= request->session->tokens_max) {
            kvs_request_fail(request, KV_INVALID,
                             "%s: token %u: the session's limit is %u tokens",
                             request->type->name, last, request->session->tokens_max);
            return;
        }
        need = last + 1;
    }
    if (header->snapshot > request->session->tokens_max) {
        kvs_request_fail(request, KV_INVALID,
                         "%s: snapshot %u: the session's limit is %u tokens",
                         request->type->name, header->snapshot, request->session->tokens_max);
        return;
    }
    if (header->snapshot < need)
        header->snapshot = need;
    request->reply.n_rows = (uint32_t)n_rows;
    request->cursor_bytes = bytes;
    kvs_op_read_wake(request);
}
