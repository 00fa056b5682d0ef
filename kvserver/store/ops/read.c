/* read and fetch.
 *
 * They wait for rows that are not committed, and fail for those that are known to be bad.  They
 * verify nothing: the client does, when the rows are there.  Small answers are gathered into
 * the reply; rows that lie in one piece are sent from where they lie, pinned; the rest is
 * gathered into a staging buffer in slices. */
#include "kernels/gather.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"
#include "kvserver/store/rows/verify.h"

static bool is_fetch(const struct kv_work *work)
{
    return work->request.op == KV_OP_FETCH;
}

/* Rows of unit i of the request. */
static uint32_t rows_of(const struct kv_work *work, uint32_t i)
{
    return is_fetch(work) ? kvs_units(work)[i].n_ids : work->request.token_count;
}

/* Gathers rows from the cursor on into dst, at most `room` bytes; advances the cursor.  Returns
 * the bytes written. */
static size_t gather(struct kv_work *work, uint8_t *dst, size_t room)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t *ids = kvs_numbers(work);
    size_t done = 0;

    if (is_fetch(work))
        for (uint32_t i = 0; i < work->cursor_unit; i++)
            ids += kvs_units(work)[i].n_ids;
    for (; work->cursor_unit < request->n_units; work->cursor_unit++, work->cursor_row = 0) {
        const struct kv_unit *unit = kvs_unit_at(work, work->cursor_unit);
        uint32_t n_rows = rows_of(work, work->cursor_unit);

        while (work->cursor_row < n_rows) {
            const void *rows[512];
            uint32_t n = 0;
            for (; n < 512 && work->cursor_row + n < n_rows &&
                   done + (size_t)(n + 1) * unit->row_bytes <= room;
                 n++) {
                uint32_t at = work->cursor_row + n;
                rows[n] =
                    kv_unit_row(unit, is_fetch(work) ? ids[at] : request->token_begin + at);
            }
            if (n == 0)
                return done;
            kv_rows_gather(dst + done, rows, n, unit->row_bytes);
            done += (size_t)n * unit->row_bytes;
            work->cursor_row += n;
        }
        if (is_fetch(work))
            ids += n_rows;
    }
    return done;
}

static void gather_crcs(const struct kv_work *work, uint32_t *ret_crcs)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t *ids = kvs_numbers(work);

    for (uint32_t i = 0; i < request->n_units; i++) {
        const struct kv_unit *unit = kvs_unit_at(work, i);

        if (is_fetch(work)) {
            for (uint32_t j = 0; j < kvs_units(work)[i].n_ids; j++)
                *ret_crcs++ = *kv_unit_crc(unit, *ids++);
        } else {
            kv_unit_read_crcs(unit, request->token_begin, request->token_count, ret_crcs);
            ret_crcs += request->token_count;
        }
    }
}

/* Whether no row is known to be bad.  On failure the work has failed. */
static bool rows_are_good(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t *ids = kvs_numbers(work);

    for (uint32_t i = 0; i < request->n_units; i++) {
        const struct kv_unit *unit = kvs_unit_at(work, i);
        const uint32_t n = rows_of(work, i);
        uint32_t bad = UINT32_MAX;

        if (is_fetch(work)) {
            for (uint32_t j = 0; j < n && bad == UINT32_MAX; j++)
                bad = kv_unit_is_bad(unit, ids[j]) ? ids[j] : UINT32_MAX;
            ids += n;
        } else {
            const uint32_t first = kv_unit_known_bad(unit, request->token_begin, n);

            bad = first < request->token_begin + n ? first : UINT32_MAX;
        }
        if (bad == UINT32_MAX)
            continue;
        kv_work_fail(
            work, KV_CORRUPT,
            "%s: layer %u head %u token %u: the row has gone bad in memory: put it again",
            work->row->name, unit->layer, unit->kv_head, bad);
        return false;
    }
    return true;
}

/* All rows are committed: answer, or queue what takes a staging buffer. */
static void read_ready(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    uint32_t n_rows = work->reply.n_rows;
    size_t bytes = work->cursor_bytes; /* of all rows, kept there by begin */
    size_t crc_bytes = n_rows * sizeof(uint32_t);
    bool in_body = bytes <= KV_WIRE_INLINE_MAX / 2;

    if (!rows_are_good(work))
        return;
    if (work->answer == NULL) {
        size_t need = crc_bytes + (in_body ? bytes : 0);
        /* `small` may hold the request's body: the answer then needs a slot of its own. */
        if (work->body != work->small && need <= sizeof(work->small)) {
            work->answer = work->small;
        } else if (kv_work_answer_slot(work, need) != KV_OK) {
            kv_work_fail(work, KV_BUSY, "%s: no buffer for the answer", work->row->name);
            return;
        }
        gather_crcs(work, (uint32_t *)(void *)work->answer);
        kv_count(&work->data->stats.rows_out, n_rows);
        kv_count(&work->data->stats.rows_out_bytes, bytes);
        kv_count(&work->peer->rows_out, n_rows);
    }
    if (in_body) {
        gather(work, work->answer + crc_bytes, bytes);
        kv_work_answer(work, work->answer, crc_bytes + bytes, NULL, 0);
        return;
    }
    if (!is_fetch(work) && request->n_units == 1) {
        struct kv_unit *unit = kvs_unit_at(work, 0);
        struct kv_iov piece;

        if (kv_unit_pieces(unit, request->token_begin, request->token_count, &piece, 0, 1) ==
                1 &&
            kv_unit_can_pin(unit, request->token_begin, request->token_count)) {
            work->n_pins =
                kv_unit_pin(unit, request->token_begin, request->token_count, work->pins);
            kv_count(&work->data->stats.direct_sends, 1);
            kv_work_answer(work, work->answer, crc_bytes, piece.base, piece.bytes);
            return;
        }
    }
    kv_work_queue(work);
}

bool kv_op_read_run(struct kv_work *work)
{
    if (kv_work_stale(work)) {
        kv_work_fail(work, KV_STALE, "%s: session %u was changed meanwhile", work->row->name,
                     work->request.session_index);
        return false;
    }
    if (work->staging == NULL && !kv_work_stage(work))
        return false;
    if (work->cursor_unit == 0 && work->cursor_row == 0) {
        kv_count(&work->data->stats.staged_sends, 1);
        work->cursor_bytes = 0;
    }
    work->cursor_bytes += gather(work, work->staging + work->cursor_bytes, KV_SLICE_BYTES);
    if (work->cursor_unit < work->request.n_units)
        return true;
    kv_work_answer(work, work->answer, work->reply.n_rows * sizeof(uint32_t), work->staging,
                   work->cursor_bytes);
    return false;
}

void kv_op_read_wake(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    uint32_t least = UINT32_MAX;

    if (kv_work_stale(work)) {
        kv_work_fail(work, KV_STALE, "%s: session %u was changed meanwhile", work->row->name,
                     request->session_index);
        return;
    }
    for (uint32_t i = 0; i < request->n_units; i++) {
        const struct kv_unit *unit = kvs_unit_at(work, i);
        if (unit->committed < least)
            least = unit->committed;
    }
    if (least < request->snapshot) {
        kv_work_wait(work, request->snapshot);
        return;
    }
    work->reply.layer = kvs_units(work)[0].layer;
    work->reply.snapshot = least;
    read_ready(work);
}

void kv_op_read_begin(struct kv_work *work)
{
    struct kv_wire_header *request = &work->request;
    uint64_t n_rows, bytes;
    uint32_t need = request->token_begin + request->token_count;

    if (!kv_parse_units(work, is_fetch(work), &n_rows, &bytes))
        return;
    size_t expected = request->n_units * sizeof(struct kv_wire_unit) +
                      (is_fetch(work) ? n_rows * sizeof(uint32_t) : 0);
    if (request->body_bytes != expected || n_rows == 0) {
        kv_work_fail(work, KV_INVALID, "%s: a body of %u bytes for %llu rows, %zu expected",
                     work->row->name, request->body_bytes, (unsigned long long)n_rows,
                     expected);
        return;
    }
    if (is_fetch(work)) {
        uint32_t last = 0;
        for (uint64_t i = 0; i < n_rows; i++)
            if (kvs_numbers(work)[i] > last)
                last = kvs_numbers(work)[i];
        if (last >= work->part->tokens_max) {
            kv_work_fail(work, KV_INVALID, "%s: token %u, at most %u in a session",
                         work->row->name, last, work->part->tokens_max);
            return;
        }
        need = last + 1;
    }
    if (request->snapshot > work->part->tokens_max) {
        kv_work_fail(work, KV_INVALID, "%s: snapshot %u, at most %u tokens in a session",
                     work->row->name, request->snapshot, work->part->tokens_max);
        return;
    }
    if (request->snapshot < need)
        request->snapshot = need;
    work->reply.n_rows = (uint32_t)n_rows;
    work->cursor_bytes = bytes;
    kv_op_read_wake(work);
}
