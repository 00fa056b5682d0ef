/* put and append.
 *
 * All units of a message get rows for the same token range, and all succeed or none.
 *
 *     rows in the body   verified, copied and committed at once, if every unit's committed rows
 *                        end where they begin
 *     rows as bulk       - direct: every unit's reservation ends where they begin; the data is
 *                          received into the segments, verified there, and committed in order
 *                        - staged: otherwise, and if nothing is missing before them; the
 *                          data is received into a buffer and then treated like rows in the
 *                          body
 *                        - deferred: otherwise; the data stays at the sender, so that a put
 *                          that waits has none of the buffers that others need
 *
 * Rows that are already committed must have the same CRCs, so a put may be repeated.  They are
 * verified, and bad ones are rewritten from the put's data.
 *
 * A put that begins after the committed rows waits for the rows before it.  If some of these
 * are neither committed nor being received, something must be going to bring them: earlier
 * messages of the same client (`snapshot` says so), or another put in progress that has no such
 * gap itself.  Otherwise the put fails at once. */
#include "kernels/checksum.h"
#include "kvserver/store/ops/need_rows.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"
#include "kvserver/store/rows/verify.h"

#include <string.h>

enum put_position {
    AT_END,   /* begins where the unit's reservation ends */
    THERE,    /* all its rows are committed */
    OVERLAPS, /* some rows are committed, the others can be written */
    NOT_YET,  /* other puts must commit first */
};

static enum put_position
find_put_position(const struct kvs_unit *unit, uint32_t begin, uint32_t end)
{
    if (end <= unit->committed)
        return THERE;
    if (unit->broken || begin > unit->reserved)
        return NOT_YET;
    if (begin == unit->reserved)
        return AT_END;
    return begin < unit->committed && unit->reserved == unit->committed ? OVERLAPS : NOT_YET;
}

static void set_reply(struct kvs_request *request, uint32_t committed)
{
    const struct kv_wire_header *header = &request->header;

    request->reply.layer = kvs_units(request)[0].layer;
    request->reply.snapshot = committed;
    request->reply.n_rows = header->n_units * header->token_count;
}

/* The rows are committed: replies, and wakes what waits for at most `woken` tokens. */
static void
finish_put(struct kvs_request *request, uint64_t n_new, uint64_t new_bytes, uint32_t woken)
{
    struct kvs_shard_session *session = request->session;
    struct kvs_shard *shard = request->shard;

    kvs_count(&shard->stats.rows_in, n_new);
    kvs_count(&shard->stats.rows_in_bytes, new_bytes);
    kvs_count(&request->client->rows_in, n_new);
    set_reply(request, kvs_units_committed(request));
    kvs_request_reply(request, NULL, 0, NULL, 0);
    kvs_shard_session_wake(shard, session, woken);
}

/* Returns false. */
static bool
fail_checksum(struct kvs_request *request, const struct kvs_unit *unit, uint32_t token)
{
    kvs_count(&request->shard->stats.corrupt_rows, 1);
    kvs_request_fail(request, KV_CORRUPT, "%s: layer %u head %u token %u: wrong checksum",
                     request->type->name, unit->layer, unit->kv_head, token);
    return false;
}

/* ---- rows that are committed already ----------------------------------------------------- */

/* A put may be repeated, because its reply may have been lost.  Rows that are already committed
 * are therefore compared instead of stored, by their checksums, and a row that has gone bad in
 * memory is rewritten from the new copy. */

/* Verifies the committed rows in the put's range: they must equal the put's rows, except for
 * *ret_n_bad rows that are bad.  Returns false after failing the request. */
static bool same_rows(struct kvs_request *request, uint32_t *ret_n_bad)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t *crcs = kvs_numbers(request);
    const uint32_t begin = header->token_begin, end = begin + header->token_count;

    *ret_n_bad = 0;
    for (uint32_t i = 0; i < header->n_units; i++, crcs += header->token_count) {
        const struct kvs_unit *unit = kvs_unit_at(request, i);
        const struct kvs_row_set rows = kvs_unit_rows(unit);
        uint32_t there = unit->committed < end ? unit->committed : end;

        if (there > begin)
            kvs_verify_run(&request->shard->store, &rows, begin, 1, there - begin);
        for (uint32_t token = begin; token < there; token++) {
            if (kvs_unit_is_bad(unit, token)) {
                ++*ret_n_bad;
            } else if (*kvs_unit_crc(unit, token) != crcs[token - begin]) {
                kvs_request_fail(
                    request, KV_CONFLICT,
                    "%s: layer %u head %u token %u: a different row is already committed",
                    request->type->name, unit->layer, unit->kv_head, token);
                return false;
            }
        }
    }
    return true;
}

/* Returns whether a bad row had this checksum: either the stored checksum equals it, and the
 * bytes have changed, or the bytes have this checksum, and the stored one has changed. */
static bool was_row(const struct kvs_unit *unit, uint32_t token, uint32_t crc)
{
    const struct kvs_row_set rows = kvs_unit_rows(unit);
    uint32_t seed;

    kvs_verify_seeds(&rows, &token, 1, &seed);
    return *kvs_unit_crc(unit, token) == crc ||
           kv_crc32c(seed, kvs_unit_row(unit, token), unit->row_bytes) == crc;
}

/* Rewrites bad rows from the put's rows, which are verified.  Returns false after failing the
 * request. */
static bool mend_rows(struct kvs_request *request, const uint8_t *rows)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t *crcs = kvs_numbers(request);
    const uint32_t begin = header->token_begin, end = begin + header->token_count;

    for (uint32_t i = 0; i < header->n_units; i++, crcs += header->token_count) {
        struct kvs_unit *unit = kvs_unit_at(request, i);
        uint32_t there = unit->committed < end ? unit->committed : end;

        for (uint32_t token = begin; token < there; token++) {
            if (!kvs_unit_is_bad(unit, token))
                continue;
            if (!was_row(unit, token, crcs[token - begin])) {
                kvs_request_fail(
                    request, KV_CONFLICT,
                    "%s: layer %u head %u token %u: the committed row is corrupt and was "
                    "different",
                    request->type->name, unit->layer, unit->kv_head, token);
                return false;
            }
            kvs_unit_mend(unit, token, rows + (size_t)(token - begin) * unit->row_bytes,
                          crcs[token - begin]);
        }
        rows += (size_t)header->token_count * unit->row_bytes;
    }
    return true;
}

/* ---- waiting ----------------------------------------------------------------------------- */

/* Rows are committed in token order, but messages may overtake each other, so a put may arrive
 * before the rows that it follows.  It waits if these are on their way.  A put that nothing
 * leads up to would wait until its deadline, so it fails at once. */

/* Returns whether some rows before the put's first one are neither committed nor reserved. */
static bool has_gap(const struct kvs_request *request, const struct kvs_unit *unit)
{
    return request->header.token_begin > unit->reserved;
}

/* Queues the other waiting puts of the session, to check again whether they may wait. */
static void queue_waiting_puts(struct kvs_request *request)
{
    for (struct kvs_request *other = request->session->waiters, *next; other != NULL;
         other = next) {
        next = other->next;
        if (other != request && other->type->run == kvs_op_put_run)
            kvs_request_enqueue(other);
    }
}

/* Queues the deferred puts that begin where this one ends: its rows are reserved, so theirs can
 * be received, too. */
static void queue_next_puts(struct kvs_request *request)
{
    const uint32_t end = request->header.token_begin + request->header.token_count;

    for (struct kvs_request *other = request->session->waiters, *next; other != NULL;
         other = next) {
        next = other->next;
        if (other->deferred && other->header.token_begin == end)
            kvs_request_enqueue(other);
    }
}

static void set_coming(struct kvs_request *request, bool coming)
{
    if (request->coming == coming)
        return;
    request->coming = coming;
    for (uint32_t i = 0; i < request->header.n_units; i++) {
        struct kvs_unit *unit = kvs_unit_at(request, i);

        unit->n_coming = coming ? unit->n_coming + 1 : unit->n_coming - 1;
    }
}

/* The put cannot be done now.  Returns whether it may wait; if no put in progress leads up to
 * it, it has failed.
 */
static bool put_may_wait(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const bool was_coming = request->coming;
    const struct kvs_unit *behind = NULL;
    bool has_any = false;

    for (uint32_t i = 0; i < header->n_units; i++)
        has_any = has_any || has_gap(request, kvs_unit_at(request, i));
    set_coming(request, !has_any);
    if (was_coming && has_any)
        queue_waiting_puts(request); /* they relied on this one */
    if (!has_any || header->snapshot > 0)
        return true;
    for (uint32_t i = 0; i < header->n_units && behind == NULL; i++)
        if (has_gap(request, kvs_unit_at(request, i)) && kvs_unit_at(request, i)->n_coming == 0)
            behind = kvs_unit_at(request, i);
    if (behind != NULL)
        kvs_request_fail(
            request, KV_NOT_READY,
            "%s: layer %u head %u: begins at token %u, but %u are committed and nothing "
            "in progress fills the gap",
            request->type->name, behind->layer, behind->kv_head, header->token_begin,
            behind->committed);
    return behind == NULL;
}

/* The put could be done now.  Returns whether what it compares with, copies or changes is in
 * memory; if not, it waits for that, or has failed.  Puts after a gap may rely on it meanwhile. */
static bool blocks_are_here(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const struct kvs_segment *missing = kvs_need_to_write(
        request, header->token_begin, header->token_begin + header->token_count);

    if (missing != NULL && put_may_wait(request))
        kvs_request_wait_for_segment(request, missing);
    return missing == NULL;
}

/* ---- rows in a buffer: verified, copied, committed --------------------------------------- */

/* Returns whether all rows before the put's are committed, and its place is not being
 * written. */
static bool can_copy(const struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t begin = header->token_begin, end = begin + header->token_count;
    bool ready = true;

    for (uint32_t i = 0; i < header->n_units && ready; i++) {
        const struct kvs_unit *unit = kvs_unit_at(request, i);
        enum put_position put_position = find_put_position(unit, begin, end);

        ready = put_position != NOT_YET && (put_position != AT_END || unit->committed == begin);
    }
    return ready;
}

/* Verifies the put's rows.  Returns false after failing the request. */
static bool verify_put(struct kvs_request *request, const uint8_t *rows)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t *crcs = kvs_numbers(request);
    const uint32_t begin = header->token_begin, count = header->token_count;
    struct kv_crc_batch batch;
    uint32_t computed[KV_WIRE_ROWS_MAX], i = 0;

    kv_crc_batch_begin(&batch, request->session->writers, computed);
    for (uint32_t unit = 0; unit < header->n_units; unit++) {
        const struct kvs_unit *of = kvs_unit_at(request, unit);

        kv_crc_batch_add(&batch, of->layer, of->kv_head, rows, count, of->row_bytes, begin);
        rows += (size_t)count * of->row_bytes;
    }
    kv_crc_batch_end(&batch);
    if (memcmp(computed, crcs, (size_t)header->n_units * count * sizeof(*crcs)) == 0)
        return true;
    while (computed[i] == crcs[i])
        i++;
    return fail_checksum(request, kvs_unit_at(request, i / count), begin + i % count);
}

/* Stores rows from a buffer: the body or a staging buffer. */
static void put_copy(struct kvs_request *request, const uint8_t *rows)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t *crcs = kvs_numbers(request);
    uint32_t begin = header->token_begin, count = header->token_count, end = begin + count;
    uint64_t n_rows = 0, bytes = 0;
    uint32_t n_bad;

    if (!can_copy(request)) {
        if (put_may_wait(request))
            kvs_request_wait(request, begin);
        return;
    }
    if (!blocks_are_here(request))
        return;
    if (!same_rows(request, &n_bad) || !verify_put(request, rows))
        return;
    if (n_bad > 0 && !mend_rows(request, rows))
        return;
    for (uint32_t i = 0; i < header->n_units; i++) {
        struct kvs_unit *unit = kvs_unit_at(request, i);
        if (end > unit->reserved && kvs_unit_reserve(unit, end) != KV_OK) {
            while (i-- > 0) {
                struct kvs_unit *done = kvs_unit_at(request, i);
                if (done->committed < end)
                    kvs_unit_unreserve(done, done->committed);
            }
            kvs_request_fail_full(request, header->body_bytes + header->bulk_bytes);
            return;
        }
    }
    for (uint32_t i = 0; i < header->n_units; i++, crcs += count) {
        struct kvs_unit *unit = kvs_unit_at(request, i);
        size_t unit_bytes = (size_t)count * unit->row_bytes;

        if (end > unit->committed) {
            uint32_t skip = unit->committed - begin;
            kvs_unit_write(unit, begin + skip, count - skip,
                           rows + (size_t)skip * unit->row_bytes);
            kvs_unit_write_crcs(unit, begin + skip, count - skip, crcs + skip);
            unit->committed = end;
            n_rows += count - skip;
            bytes += (uint64_t)(count - skip) * unit->row_bytes;
        }
        rows += unit_bytes;
    }
    const bool was_coming = request->coming;
    set_coming(request, false);
    /* Puts after a gap relied on this one. */
    finish_put(request, n_rows, bytes, was_coming ? UINT32_MAX : end);
}

/* ---- rows received in place -------------------------------------------------------------- */

/* The rows of a large put are received into the segments themselves, so that no copy is made.
 * They are reserved and pinned before, verified after, and committed when all puts before them
 * are.  If a transfer fails, its unit is `broken` until the last transfer in progress has
 * ended: these were to follow the failed rows, so none of them can be committed. */

/* Reserves and pins the rows, and lists their memory for the transfer.  Fails with
 * KV_NO_MEMORY, or with KV_TOO_LARGE if they are more pieces than a transfer may
 * have. */
static kv_status_t put_reserve(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    uint32_t begin = header->token_begin, count = header->token_count;
    kv_status_t status = KV_OK;
    uint32_t i;

    if (header->n_units * (count / KV_BLOCK_TOKENS + 2) > KVS_PINS_MAX)
        return KV_TOO_LARGE;
    for (i = 0; i < header->n_units; i++) {
        struct kvs_unit *unit = kvs_unit_at(request, i);

        status = kvs_unit_reserve(unit, begin + count);
        if (status != KV_OK)
            goto err_unreserve;
        request->n_iov =
            kvs_unit_pieces(unit, begin, count, request->iov, request->n_iov, KV_IOV_MAX);
        if (request->n_iov > KV_IOV_MAX) {
            i++;
            status = KV_TOO_LARGE;
            goto err_unreserve;
        }
    }
    for (i = 0; i < header->n_units; i++) {
        struct kvs_unit *unit = kvs_unit_at(request, i);
        request->n_pins += kvs_unit_pin(unit, begin, count, request->pins + request->n_pins);
        unit->n_transfers++;
    }
    request->transfer = true;
    return KV_OK;

err_unreserve:
    request->n_iov = 0;
    while (i-- > 0)
        kvs_unit_unreserve(kvs_unit_at(request, i), begin);
    return status;
}

static void stop_transfer(struct kvs_request *request)
{
    request->transfer = false;
    for (uint32_t i = 0; i < request->header.n_units; i++) {
        struct kvs_unit *unit = kvs_unit_at(request, i);

        unit->broken = true;
        if (--unit->n_transfers == 0) {
            unit->broken = false;
            kvs_unit_unreserve(unit, unit->committed);
        }
    }
}

void kvs_op_put_release(struct kvs_request *request)
{
    if (!request->transfer && !request->coming)
        return;
    if (kvs_request_stale(request)) { /* the change of the session has reset its units */
        request->transfer = request->coming = false;
        return;
    }
    if (request->transfer)
        stop_transfer(request);
    set_coming(request, false);
    queue_waiting_puts(request);
}

static void put_commit(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    uint32_t begin = header->token_begin, end = begin + header->token_count;
    bool ready = true;
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < header->n_units; i++) {
        const struct kvs_unit *unit = kvs_unit_at(request, i);
        if (unit->broken) {
            kvs_request_fail(request, KV_NOT_READY,
                             "%s: layer %u head %u: an earlier put failed before token %u",
                             request->type->name, unit->layer, unit->kv_head, begin);
            return;
        }
        ready = ready && unit->committed == begin;
    }
    if (!ready) {
        kvs_request_wait(request, begin);
        return;
    }
    for (uint32_t i = 0; i < header->n_units; i++) {
        struct kvs_unit *unit = kvs_unit_at(request, i);
        unit->committed = end;
        unit->n_transfers--;
        bytes += (uint64_t)header->token_count * unit->row_bytes;
    }
    request->transfer = false;
    finish_put(request, (uint64_t)header->n_units * header->token_count, bytes, end);
}

/* ---- the operation ----------------------------------------------------------------------- */

/* Checks sizes.  *ret_head: bytes of the body before the rows.  Returns false after failing the
 * request. */
static bool check_put(struct kvs_request *request,
                      size_t *ret_head,
                      uint64_t *ret_rows,
                      uint64_t *ret_bytes)
{
    const struct kv_wire_header *header = &request->header;

    if (!kvs_parse_units(request, false, ret_rows, ret_bytes))
        return false;
    *ret_head = header->n_units * sizeof(struct kv_wire_unit) + *ret_rows * sizeof(uint32_t);
    if (header->body_bytes != *ret_head + (header->bulk_bytes > 0 ? 0 : *ret_bytes) ||
        (header->bulk_bytes > 0 && header->bulk_bytes != *ret_bytes)) {
        kvs_request_fail(request, KV_INVALID,
                         "%s: %llu rows of %llu bytes, but a body of %u and bulk of %llu bytes",
                         request->type->name, (unsigned long long)*ret_rows,
                         (unsigned long long)*ret_bytes, header->body_bytes,
                         (unsigned long long)header->bulk_bytes);
        return false;
    }
    if (header->snapshot != 0 && header->snapshot != header->token_begin) {
        kvs_request_fail(request, KV_INVALID, "%s: snapshot %u: must be 0 or token_begin %u",
                         request->type->name, header->snapshot, header->token_begin);
        return false;
    }
    return true;
}

/* Data that comes as bulk can be received in place. */
static void receive_in_place(struct kvs_request *request)
{
    const bool was_coming = request->coming;

    kvs_request_release_staging(request);
    set_coming(request, false);
    kvs_count(&request->shard->stats.receives_in_place, 1);
    if (was_coming)
        queue_waiting_puts(request);
    else
        queue_next_puts(request);
    kvs_request_await_bulk(request, false);
}

/* All rows of data that comes as bulk are committed, and the same. */
static void discard_rows(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;

    if (request->coming) {
        set_coming(request, false);
        queue_waiting_puts(request);
    }
    set_reply(request, header->token_begin + header->token_count);
    request->small[0] = '\0';
    kvs_request_release_staging(request);
    kvs_request_await_bulk(request, true);
}

/* Receives data that comes as bulk, or defers it. */
static void put_bulk(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t begin = header->token_begin, end = begin + header->token_count;
    bool direct = true, there = true;

    for (uint32_t i = 0; i < header->n_units; i++) {
        enum put_position put_position = find_put_position(kvs_unit_at(request, i), begin, end);
        direct = direct && put_position == AT_END;
        there = there && put_position == THERE;
    }
    if ((there || direct || can_copy(request)) && !blocks_are_here(request))
        return;
    if (there) {
        uint32_t n_bad;

        if (!same_rows(request, &n_bad))
            return;
        if (n_bad == 0) {
            discard_rows(request);
            return;
        }
    }
    if (direct) {
        kv_status_t status = put_reserve(request);
        if (status == KV_OK) {
            receive_in_place(request);
            return;
        }
        if (status == KV_NO_MEMORY) {
            kvs_request_fail_full(request,
                                  request->header.body_bytes + request->header.bulk_bytes);
            return;
        }
    }
    if (!put_may_wait(request))
        return;
    if (!can_copy(request)) {
        kvs_request_release_staging(request);
        kvs_request_defer_bulk(request, begin);
        return;
    }
    if (request->staging == NULL && !kvs_request_acquire_staging(request))
        return;
    kvs_count(&request->shard->stats.receives_staged, 1);
    request->iov[0] = (struct kv_iov){request->staging, header->bulk_bytes};
    request->n_iov = 1;
    kvs_request_await_bulk(request, false);
}

void kvs_op_put_begin(struct kvs_request *request)
{
    uint64_t n_rows, bytes;
    size_t head;

    if (!check_put(request, &head, &n_rows, &bytes))
        return;
    if (request->header.bulk_bytes > 0)
        put_bulk(request);
    else
        put_copy(request, request->body + head);
}

void kvs_op_put_received(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const uint32_t *crcs = kvs_numbers(request);

    if (!kvs_request_check_current(request))
        return;
    if (request->staging != NULL) {
        put_copy(request, request->staging);
        return;
    }
    for (uint32_t i = 0; i < header->n_units; i++) {
        struct kvs_unit *unit = kvs_unit_at(request, i);
        uint32_t end = header->token_begin + header->token_count, step;

        for (uint32_t token = header->token_begin; token < end; token += step, crcs += step) {
            step = KV_BLOCK_TOKENS - token % KV_BLOCK_TOKENS;
            step = step < end - token ? step : end - token;
            uint32_t bad = kvs_shard_session_verify(request->session, unit, token, step,
                                                    kvs_unit_row(unit, token), crcs);

            if (bad < step) {
                fail_checksum(request, unit, token + bad);
                return;
            }
            kvs_unit_write_crcs(unit, token, step, crcs);
        }
    }
    put_commit(request);
}

void kvs_op_put_wake(struct kvs_request *request)
{
    if (!kvs_request_check_current(request))
        return;
    if (request->transfer) {
        put_commit(request);
    } else if (request->header.bulk_bytes == 0) {
        put_copy(request, request->body +
                              request->header.n_units * sizeof(struct kv_wire_unit) +
                              (size_t)request->header.n_units * request->header.token_count *
                                  sizeof(uint32_t));
    } else if (request->received) {
        put_copy(request, request->bulk_slot != NULL ? request->bulk_slot : request->staging);
    } else {
        put_bulk(request);
    }
}

bool kvs_op_put_run(struct kvs_request *request)
{
    kvs_op_put_wake(request);
    return false;
}
