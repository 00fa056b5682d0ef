/* put and append.
 *
 * All units of a message take the same token range, all or nothing:
 *
 *     rows in the body   checked, copied, committed at once if every unit ends where they
 *                        begin
 *     rows by bulk       - direct: every unit's reservation ends where they begin; the data
 *                          lands in the segments, is checked there and committed in order
 *                        - staged: otherwise; the data lands in a buffer and goes on as if it
 *                          had come in the body
 *
 * Rows that are there already must have the same CRCs: so a put may be repeated.  They are
 * verified, and what has gone bad is written again from what came.
 *
 * A put that begins beyond what is committed waits for the rows before it.  Where some of these
 * are neither there nor landing, something must be going to bring them: messages that its
 * client has sent before (`snapshot` says so), or a put under way that has no such gap itself.
 * Else it fails at once. */
#include "kernels/checksum.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"
#include "kvserver/store/rows/verify.h"

#include <string.h>

enum standing {
    AT_END,   /* begins where the unit's reservation ends */
    THERE,    /* wholly committed already */
    OVERLAPS, /* partly committed, the rest is free to write */
    NOT_YET,  /* others must commit first */
};

static enum standing stand(const struct kv_unit *unit, uint32_t begin, uint32_t end)
{
    if (end <= unit->committed)
        return THERE;
    if (unit->broken || begin > unit->reserved)
        return NOT_YET;
    if (begin == unit->reserved)
        return AT_END;
    return begin < unit->committed && unit->reserved == unit->committed ? OVERLAPS : NOT_YET;
}

static void answer_put(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    uint32_t committed = UINT32_MAX;

    for (uint32_t i = 0; i < request->n_units; i++) {
        const struct kv_unit *unit = kvs_unit_at(work, i);
        if (unit->committed < committed)
            committed = unit->committed;
    }
    work->reply.layer = kvs_units(work)[0].layer;
    work->reply.snapshot = committed;
    work->reply.n_rows = request->n_units * request->token_count;
    kv_work_answer(work, NULL, 0, NULL, 0);
}

static void count_rows_in(struct kv_work *work, uint64_t rows, uint64_t bytes)
{
    kv_count(&work->data->stats.rows_in, rows);
    kv_count(&work->data->stats.rows_in_bytes, bytes);
    kv_count(&work->peer->rows_in, rows);
}

/* Verifies rows that are there already: they must be those that came, but for *ret_n_bad of
 * them that have gone bad.  On failure the work has failed. */
static bool same_rows(struct kv_work *work, uint32_t *ret_n_bad)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t *crcs = kvs_numbers(work);
    const uint32_t begin = request->token_begin, end = begin + request->token_count;

    *ret_n_bad = 0;
    for (uint32_t i = 0; i < request->n_units; i++, crcs += request->token_count) {
        const struct kv_unit *unit = kvs_unit_at(work, i);
        const struct kv_row_set rows = kv_unit_rows(unit);
        uint32_t there = unit->committed < end ? unit->committed : end;

        if (there > begin)
            kv_verify_run(&work->data->heap, &rows, begin, 1, there - begin);
        for (uint32_t token = begin; token < there; token++) {
            if (kv_unit_is_bad(unit, token)) {
                ++*ret_n_bad;
            } else if (*kv_unit_crc(unit, token) != crcs[token - begin]) {
                kv_work_fail(work, KV_CONFLICT,
                             "%s: layer %u head %u token %u: another row is there",
                             work->row->name, unit->layer, unit->kv_head, token);
                return false;
            }
        }
    }
    return true;
}

/* Whether the row that has gone bad was one of this checksum: its own is that, and its bytes
 * have changed, or its bytes have that, and its checksum has changed. */
static bool was_row(const struct kv_unit *unit, uint32_t token, uint32_t crc)
{
    const struct kv_row_set rows = kv_unit_rows(unit);
    uint32_t seed;

    kv_verify_seeds(&rows, &token, 1, &seed);
    return *kv_unit_crc(unit, token) == crc ||
           kv_crc32c(seed, kv_unit_row(unit, token), unit->row_bytes) == crc;
}

/* Writes the rows again that have gone bad, from those that came, which are good.  On failure
 * the work has failed. */
static bool mend_rows(struct kv_work *work, const uint8_t *rows)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t *crcs = kvs_numbers(work);
    const uint32_t begin = request->token_begin, end = begin + request->token_count;

    for (uint32_t i = 0; i < request->n_units; i++, crcs += request->token_count) {
        struct kv_unit *unit = kvs_unit_at(work, i);
        uint32_t there = unit->committed < end ? unit->committed : end;

        for (uint32_t token = begin; token < there; token++) {
            if (!kv_unit_is_bad(unit, token))
                continue;
            if (!was_row(unit, token, crcs[token - begin])) {
                kv_work_fail(
                    work, KV_CONFLICT,
                    "%s: layer %u head %u token %u: the row there has gone bad, and was "
                    "another",
                    work->row->name, unit->layer, unit->kv_head, token);
                return false;
            }
            kv_unit_mend(unit, &work->data->heap, token,
                         rows + (size_t)(token - begin) * unit->row_bytes, crcs[token - begin]);
        }
        rows += (size_t)request->token_count * unit->row_bytes;
    }
    return true;
}

/* Not all rows up to the put's first one are there or landing. */
static bool has_gap(const struct kv_work *work, const struct kv_unit *unit)
{
    return work->request.token_begin > unit->reserved;
}

/* Other puts that wait look again when the thread comes to them. */
static void queue_waiting_puts(struct kv_work *work)
{
    for (struct kv_work *other = work->part->waiters, *next; other != NULL; other = next) {
        next = other->next;
        if (other != work && other->row->run == kv_op_put_run)
            kv_work_queue(other);
    }
}

static void set_coming(struct kv_work *work, bool coming)
{
    if (work->coming == coming)
        return;
    work->coming = coming;
    for (uint32_t i = 0; i < work->request.n_units; i++) {
        struct kv_unit *unit = kvs_unit_at(work, i);

        unit->n_coming = coming ? unit->n_coming + 1 : unit->n_coming - 1;
    }
}

/* The put cannot be done now.  false: nothing that is under way leads to it, and it has failed.
 */
static bool put_may_wait(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    const bool was_coming = work->coming;
    const struct kv_unit *behind = NULL;
    bool has_any = false;

    for (uint32_t i = 0; i < request->n_units; i++)
        has_any = has_any || has_gap(work, kvs_unit_at(work, i));
    set_coming(work, !has_any);
    if (was_coming && has_any)
        queue_waiting_puts(work); /* they counted on this one */
    if (!has_any || request->snapshot > 0)
        return true;
    for (uint32_t i = 0; i < request->n_units && behind == NULL; i++)
        if (has_gap(work, kvs_unit_at(work, i)) && kvs_unit_at(work, i)->n_coming == 0)
            behind = kvs_unit_at(work, i);
    if (behind != NULL)
        kv_work_fail(work, KV_NOT_READY,
                     "%s: layer %u head %u: begins at token %u, yet %u are there and nothing "
                     "under way fills the gap",
                     work->row->name, behind->layer, behind->kv_head, request->token_begin,
                     behind->committed);
    return behind == NULL;
}

/* Whether all rows before the put's are there, and none are landing where they go. */
static bool can_copy(const struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t begin = request->token_begin, end = begin + request->token_count;
    bool ready = true;

    for (uint32_t i = 0; i < request->n_units && ready; i++) {
        const struct kv_unit *unit = kvs_unit_at(work, i);
        enum standing standing = stand(unit, begin, end);

        ready = standing != NOT_YET && (standing != AT_END || unit->committed == begin);
    }
    return ready;
}

/* Verifies rows that came.  On failure the work has failed. */
static bool verify_put(struct kv_work *work, const uint8_t *rows)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t *crcs = kvs_numbers(work);
    const uint32_t begin = request->token_begin, count = request->token_count;
    struct kv_crc_batch batch;
    uint32_t computed[KV_WIRE_ROWS_MAX], i = 0;

    kv_crc_batch_begin(&batch, work->part->writers, computed);
    for (uint32_t unit = 0; unit < request->n_units; unit++) {
        const struct kv_unit *of = kvs_unit_at(work, unit);

        kv_crc_batch_add(&batch, of->layer, of->kv_head, rows, count, of->row_bytes, begin);
        rows += (size_t)count * of->row_bytes;
    }
    kv_crc_batch_end(&batch);
    if (memcmp(computed, crcs, (size_t)request->n_units * count * sizeof(*crcs)) == 0)
        return true;
    while (computed[i] == crcs[i])
        i++;
    kv_count(&work->data->stats.corrupt_rows, 1);
    kv_work_fail(work, KV_CORRUPT, "%s: layer %u head %u token %u: wrong checksum",
                 work->row->name, kvs_unit_at(work, i / count)->layer,
                 kvs_unit_at(work, i / count)->kv_head, begin + i % count);
    return false;
}

/* Rows in a buffer: the body's, or a staging buffer's. */
static void put_copy(struct kv_work *work, const uint8_t *rows)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t *crcs = kvs_numbers(work);
    uint32_t begin = request->token_begin, count = request->token_count, end = begin + count;
    uint64_t n_rows = 0, bytes = 0;
    uint32_t n_bad;

    if (!can_copy(work)) {
        if (put_may_wait(work))
            kv_work_wait(work, begin);
        return;
    }
    if (!same_rows(work, &n_bad) || !verify_put(work, rows))
        return;
    if (n_bad > 0 && !mend_rows(work, rows))
        return;
    for (uint32_t i = 0; i < request->n_units; i++) {
        struct kv_unit *unit = kvs_unit_at(work, i);
        if (end > unit->reserved && kv_unit_reserve(unit, &work->data->heap, end) != KV_OK) {
            while (i-- > 0) {
                struct kv_unit *done = kvs_unit_at(work, i);
                if (done->committed < end)
                    kv_unit_unreserve(done, &work->data->heap, done->committed);
            }
            kv_work_fail(work, KV_NO_MEMORY, "%s: the store's memory is full", work->row->name);
            return;
        }
    }
    for (uint32_t i = 0; i < request->n_units; i++, crcs += count) {
        struct kv_unit *unit = kvs_unit_at(work, i);
        size_t unit_bytes = (size_t)count * unit->row_bytes;

        if (end > unit->committed) {
            uint32_t skip = unit->committed - begin;
            kv_unit_write(unit, begin + skip, count - skip,
                          rows + (size_t)skip * unit->row_bytes);
            kv_unit_write_crcs(unit, begin + skip, count - skip, crcs + skip);
            unit->committed = end;
            n_rows += count - skip;
            bytes += (uint64_t)(count - skip) * unit->row_bytes;
        }
        rows += unit_bytes;
    }
    const bool was_coming = work->coming;
    set_coming(work, false);
    count_rows_in(work, n_rows, bytes);
    struct kv_part *part = work->part;
    struct kv_data *data = work->data;
    answer_put(work);
    /* Those behind a gap counted on it. */
    kv_part_wake(data, part, was_coming ? UINT32_MAX : end);
}

/* Reserves, pins and lists where the data lands.  KV_NO_MEMORY; KV_TOO_LARGE: in more pieces
 * than a transfer takes, or of segments that take no more transfers. */
static kv_status_t put_reserve(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    struct kv_heap *heap = &work->data->heap;
    uint32_t begin = request->token_begin, count = request->token_count;
    kv_status_t status = KV_OK;
    uint32_t i;

    if (request->n_units * (count / KV_BLOCK_TOKENS + 2) > KV_PINS_MAX)
        return KV_TOO_LARGE;
    for (i = 0; i < request->n_units; i++) {
        struct kv_unit *unit = kvs_unit_at(work, i);

        status = kv_unit_reserve(unit, heap, begin + count);
        if (status != KV_OK)
            goto err_unreserve;
        work->n_iov = kv_unit_pieces(unit, begin, count, work->iov, work->n_iov, KV_IOV_MAX);
        if (work->n_iov > KV_IOV_MAX || !kv_unit_can_pin(unit, begin, count)) {
            i++;
            status = KV_TOO_LARGE;
            goto err_unreserve;
        }
    }
    for (i = 0; i < request->n_units; i++) {
        struct kv_unit *unit = kvs_unit_at(work, i);
        work->n_pins += kv_unit_pin(unit, begin, count, work->pins + work->n_pins);
        unit->n_landings++;
    }
    work->landing = true;
    return KV_OK;

err_unreserve:
    work->n_iov = 0;
    while (i-- > 0)
        kv_unit_unreserve(kvs_unit_at(work, i), heap, begin);
    return status;
}

static void stop_landing(struct kv_work *work)
{
    work->landing = false;
    for (uint32_t i = 0; i < work->request.n_units; i++) {
        struct kv_unit *unit = kvs_unit_at(work, i);

        unit->broken = true;
        if (--unit->n_landings == 0) {
            unit->broken = false;
            kv_unit_unreserve(unit, &work->data->heap, unit->committed);
        }
    }
}

void kv_op_put_release(struct kv_work *work)
{
    if (!work->landing && !work->coming)
        return;
    if (kv_work_stale(work)) { /* whoever changed the session has reset its units */
        work->landing = work->coming = false;
        return;
    }
    if (work->landing)
        stop_landing(work);
    set_coming(work, false);
    queue_waiting_puts(work);
}

static void put_commit(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    uint32_t begin = request->token_begin, end = begin + request->token_count;
    bool ready = true;
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < request->n_units; i++) {
        const struct kv_unit *unit = kvs_unit_at(work, i);
        if (unit->broken) {
            kv_work_fail(work, KV_NOT_READY,
                         "%s: layer %u head %u: rows before token %u failed", work->row->name,
                         unit->layer, unit->kv_head, begin);
            return;
        }
        ready = ready && unit->committed == begin;
    }
    if (!ready) {
        kv_work_wait(work, begin);
        return;
    }
    for (uint32_t i = 0; i < request->n_units; i++) {
        struct kv_unit *unit = kvs_unit_at(work, i);
        unit->committed = end;
        unit->n_landings--;
        bytes += (uint64_t)request->token_count * unit->row_bytes;
    }
    work->landing = false;
    count_rows_in(work, (uint64_t)request->n_units * request->token_count, bytes);
    struct kv_part *part = work->part;
    struct kv_data *data = work->data;
    answer_put(work);
    kv_part_wake(data, part, end);
}

/* *ret_head: bytes of the body before rows.  On failure the work has failed. */
static bool
check_put(struct kv_work *work, size_t *ret_head, uint64_t *ret_rows, uint64_t *ret_bytes)
{
    const struct kv_wire_header *request = &work->request;

    if (!kv_parse_units(work, false, ret_rows, ret_bytes))
        return false;
    *ret_head = request->n_units * sizeof(struct kv_wire_unit) + *ret_rows * sizeof(uint32_t);
    if (request->body_bytes != *ret_head + (request->bulk_bytes > 0 ? 0 : *ret_bytes) ||
        (request->bulk_bytes > 0 && request->bulk_bytes != *ret_bytes)) {
        kv_work_fail(
            work, KV_INVALID, "%s: %llu rows of %llu bytes, yet a body of %u and bulk of %llu",
            work->row->name, (unsigned long long)*ret_rows, (unsigned long long)*ret_bytes,
            request->body_bytes, (unsigned long long)request->bulk_bytes);
        return false;
    }
    if (request->snapshot != 0 && request->snapshot != request->token_begin) {
        kv_work_fail(work, KV_INVALID, "%s: snapshot %u, neither 0 nor token_begin %u",
                     work->row->name, request->snapshot, request->token_begin);
        return false;
    }
    return true;
}

void kv_op_put_begin(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    uint64_t n_rows, bytes;
    uint32_t begin = request->token_begin, end;
    size_t head;
    bool direct = true, there = true;

    if (!check_put(work, &head, &n_rows, &bytes))
        return;
    if (request->bulk_bytes == 0) {
        put_copy(work, work->body + head);
        return;
    }

    end = begin + request->token_count;
    for (uint32_t i = 0; i < request->n_units; i++) {
        enum standing standing = stand(kvs_unit_at(work, i), begin, end);
        direct = direct && standing == AT_END;
        there = there && standing == THERE;
    }
    if (there) {
        uint32_t n_bad;

        if (!same_rows(work, &n_bad))
            return;
        if (n_bad == 0) {
            work->reply.layer = kvs_units(work)[0].layer;
            work->reply.snapshot = end;
            work->reply.n_rows = (uint32_t)n_rows;
            work->small[0] = '\0';
            kv_work_await_bulk(work, true);
            return;
        }
    }
    if (direct) {
        kv_status_t status = put_reserve(work);
        if (status == KV_OK) {
            kv_count(&work->data->stats.receives_in_place, 1);
            kv_work_await_bulk(work, false);
            return;
        }
        if (status == KV_NO_MEMORY) {
            kv_work_fail(work, status, "%s: the store's memory is full", work->row->name);
            return;
        }
    }
    if (!put_may_wait(work))
        return;
    if (!kv_work_stage_bulk(work)) {
        kv_work_fail(work, KV_BUSY, "%s: no staging buffer", work->row->name);
        return;
    }
    kv_count(&work->data->stats.receives_staged, 1);
    work->iov[0] = (struct kv_iov){work->staging, bytes};
    work->n_iov = 1;
    kv_work_await_bulk(work, false);
}

void kv_op_put_landed(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    const uint32_t *crcs = kvs_numbers(work);

    if (kv_work_stale(work)) {
        kv_work_fail(work, KV_STALE, "%s: session %u was changed meanwhile", work->row->name,
                     request->session_index);
        return;
    }
    if (work->staging != NULL) {
        put_copy(work, work->staging);
        return;
    }
    for (uint32_t i = 0; i < request->n_units; i++) {
        struct kv_unit *unit = kvs_unit_at(work, i);
        uint32_t end = request->token_begin + request->token_count, step;

        for (uint32_t token = request->token_begin; token < end; token += step, crcs += step) {
            step = KV_BLOCK_TOKENS - token % KV_BLOCK_TOKENS;
            step = step < end - token ? step : end - token;
            uint32_t bad =
                kv_part_verify(work->part, unit, token, step, kv_unit_row(unit, token), crcs);

            if (bad < step) {
                kv_count(&work->data->stats.corrupt_rows, 1);
                kv_work_fail(work, KV_CORRUPT, "%s: layer %u head %u token %u: wrong checksum",
                             work->row->name, unit->layer, unit->kv_head, token + bad);
                return;
            }
            kv_unit_write_crcs(unit, token, step, crcs);
        }
    }
    put_commit(work);
}

void kv_op_put_wake(struct kv_work *work)
{
    if (kv_work_stale(work)) {
        kv_work_fail(work, KV_STALE, "%s: session %u was changed meanwhile", work->row->name,
                     work->request.session_index);
    } else if (work->landing) {
        put_commit(work);
    } else if (work->staging != NULL) {
        put_copy(work, work->staging);
    } else {
        put_copy(work, work->body + work->request.n_units * sizeof(struct kv_wire_unit) +
                           (size_t)work->request.n_units * work->request.token_count *
                               sizeof(uint32_t));
    }
}

bool kv_op_put_run(struct kv_work *work)
{
    kv_op_put_wake(work);
    return false;
}
