/* Put, append and read: rows between the caller's memory and the nodes.
 *
 * A range of rows is (layer, head, token, row_bytes), dense.  A unit with many rows is sent in
 * messages of its own, split at multiples of KV_BLOCK_TOKENS from token 0, so that the node
 * receives whole segments.  Units with few rows share messages, one per data thread if they
 * fit.
 */
#include "client/ops/rows.h"

#include "client/buffer.h"
#include "client/connection.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/ops/rows_private.h"
#include "client/peer.h"
#include "client/request.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/base/writers.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <stdio.h>
#include <string.h>

enum {
    ALONE_BYTES = 32 << 10, /* a unit with this many bytes gets messages of its own */
};

/* ---- ranges of rows ---------------------------------------------------------------------- */

static uint32_t
heads_end(const kv_schema_t *schema, const struct kv_rows *row_range, uint32_t layer)
{
    return row_range->n_kv_heads > 0 ? row_range->kv_head_begin + row_range->n_kv_heads
                                     : schema->layers[layer].n_kv_heads;
}

static bool row_range_fits(const kv_schema_t *schema, const struct kv_rows *row_range)
{
    if (row_range->n_layers == 0 || row_range->layer_begin >= schema->n_layers ||
        row_range->n_layers > schema->n_layers - row_range->layer_begin)
        return false;
    if (row_range->n_tokens == 0 || row_range->token_begin >= KV_TOKENS_MAX ||
        row_range->n_tokens > KV_TOKENS_MAX - row_range->token_begin)
        return false;
    if (row_range->n_kv_heads == 0)
        return row_range->kv_head_begin == 0;
    for (uint32_t layer = row_range->layer_begin;
         layer < row_range->layer_begin + row_range->n_layers; layer++)
        if (row_range->kv_head_begin >= schema->layers[layer].n_kv_heads ||
            row_range->n_kv_heads > schema->layers[layer].n_kv_heads - row_range->kv_head_begin)
            return false;
    return true;
}

size_t kv_rows_bytes(const kv_schema_t *schema, const struct kv_rows *rows)
{
    uint64_t token_bytes = 0;

    if (!row_range_fits(schema, rows))
        return 0;
    for (uint32_t layer = rows->layer_begin; layer < rows->layer_begin + rows->n_layers;
         layer++)
        token_bytes += (uint64_t)(heads_end(schema, rows, layer) - rows->kv_head_begin) *
                       schema->layers[layer].row_bytes;
    return token_bytes * rows->n_tokens;
}

static size_t n_rows(const kv_schema_t *schema, const struct kv_rows *rows)
{
    size_t n_units = 0;

    for (uint32_t layer = rows->layer_begin; layer < rows->layer_begin + rows->n_layers;
         layer++)
        n_units += heads_end(schema, rows, layer) - rows->kv_head_begin;
    return n_units * rows->n_tokens;
}

uint32_t kv_row_crc(const struct kv_session *session,
                    const void *row,
                    size_t row_bytes,
                    uint32_t layer,
                    uint32_t kv_head,
                    uint32_t token)
{
    KVC_LOOK(session->client);
    const uint32_t position = kv_placement_unit_position(
        kv_schema_unit(&session->schema, layer, kv_head), session->row.n_nodes);
    uint32_t crc;

    kv_writers_crc(session->writers[position], layer, kv_head, row, 1, row_bytes, token, NULL,
                   &crc);
    return crc;
}

/* Returns the offset of a unit's rows in the memory of the range. */
static size_t unit_offset(const struct kv_session *session,
                          const struct kv_rows *row_range,
                          uint32_t layer,
                          uint32_t head)
{
    uint64_t before;

    if (row_range->n_kv_heads == 0)
        before = session->bytes_before[layer] - session->bytes_before[row_range->layer_begin];
    else
        before = (session->row_bytes_before[layer] -
                  session->row_bytes_before[row_range->layer_begin]) *
                 row_range->n_kv_heads;
    before +=
        (uint64_t)(head - row_range->kv_head_begin) * session->schema.layers[layer].row_bytes;
    return before * row_range->n_tokens;
}

/* Returns how many units of the range are before this one. */
static size_t unit_rank(const struct kv_session *session,
                        const struct kv_rows *row_range,
                        uint32_t layer,
                        uint32_t head)
{
    const kv_schema_t *schema = &session->schema;

    if (row_range->n_kv_heads == 0)
        return kv_schema_unit(schema, layer, head) -
               kv_schema_unit(schema, row_range->layer_begin, 0);
    return (size_t)(layer - row_range->layer_begin) * row_range->n_kv_heads +
           (head - row_range->kv_head_begin);
}

/* Advances to the first unit of the range, at or after (layer, head), that the connection owns.
 */
static bool seek(const struct kv_op *op,
                 const struct kvc_connection *connection,
                 uint32_t *layer,
                 uint32_t *head)
{
    const struct kv_session *session = op->session;
    const struct kv_rows *row_range = &kvc_rows_of(op)->row_range;

    while (*layer < row_range->layer_begin + row_range->n_layers) {
        for (; *head < heads_end(&session->schema, row_range, *layer); ++*head)
            if (kvc_session_connection(session, *layer, *head) == connection)
                return true;
        ++*layer;
        *head = row_range->kv_head_begin;
    }
    return false;
}

/* ---- a reply's rows ---------------------------------------------------------------------- */

/* The rows of one unit of a request, in the caller's memory. */
struct piece {
    uint32_t layer, head;
    uint8_t *rows;
    size_t n_rows;
    size_t row_bytes;
    uint32_t *crcs; /* the caller's, or NULL */
    uint32_t token; /* of the first, if ids is NULL */
    const uint32_t *ids;
    /* For piece_next() only. */
    uint32_t next_unit;
    uint32_t next_id;
};

static bool piece_next(const struct kvc_request *request, struct piece *piece)
{
    const struct kv_op *op = kvc_request_op(request);
    const struct kv_wire_unit *unit =
        (const struct kv_wire_unit *)request->message->body + piece->next_unit;
    size_t first; /* fetch: rows before in the caller's memory */

    if (piece->next_unit >= request->header.n_units)
        return false;
    piece->layer = unit->layer;
    piece->head = unit->kv_head;
    piece->row_bytes = op->session->schema.layers[unit->layer].row_bytes;
    if (op->type->id != KV_OP_FETCH) {
        const struct kv_rows *row_range = &kvc_rows_of(op)->row_range;
        uint32_t skipped = request->header.token_begin - row_range->token_begin;

        piece->n_rows = request->header.token_count;
        piece->token = request->header.token_begin;
        piece->ids = NULL;
        piece->rows = kvc_rows_of(op)->base +
                      unit_offset(op->session, row_range, unit->layer, unit->kv_head) +
                      (size_t)skipped * piece->row_bytes;
        piece->crcs = kvc_rows_of(op)->crcs != NULL
                          ? kvc_rows_of(op)->crcs +
                                unit_rank(op->session, row_range, unit->layer, unit->kv_head) *
                                    row_range->n_tokens +
                                skipped
                          : NULL;
    } else {
        const uint32_t *ids =
            (const uint32_t *)((const struct kv_wire_unit *)request->message->body +
                               request->header.n_units);

        first = kvc_fetch_of(op)->begin[unit->kv_head - kvc_fetch_of(op)->kv_head_begin];
        if (piece->next_unit == 0)
            first += request->position;
        piece->n_rows = unit->n_ids;
        piece->token = 0;
        piece->ids = ids + piece->next_id;
        piece->rows = kvc_fetch_of(op)->base + first * piece->row_bytes;
        piece->crcs = kvc_fetch_of(op)->crcs != NULL ? kvc_fetch_of(op)->crcs + first : NULL;
        piece->next_id += unit->n_ids;
    }
    piece->next_unit++;
    return true;
}

unsigned kvc_rows_land(struct kvc_request *request, uint64_t bytes, struct kv_iov *ret_iov)
{
    struct piece piece = {0};
    unsigned n_iov = 0;

    if (bytes != request->bytes)
        return 0;
    while (piece_next(request, &piece)) {
        size_t piece_bytes = piece.n_rows * piece.row_bytes;

        if (n_iov > 0 &&
            (uint8_t *)ret_iov[n_iov - 1].base + ret_iov[n_iov - 1].bytes == piece.rows) {
            ret_iov[n_iov - 1].bytes += piece_bytes;
            continue;
        }
        if (n_iov == KV_IOV_MAX)
            return 0;
        ret_iov[n_iov++] = (struct kv_iov){.base = piece.rows, .bytes = piece_bytes};
    }
    return n_iov;
}

static uint32_t first_layer(const struct kvc_request *request)
{
    return ((const struct kv_wire_unit *)request->message->body)->layer;
}

kv_status_t kvc_rows_reply(struct kvc_request *request,
                           const uint8_t *body,
                           char *detail,
                           size_t detail_bytes)
{
    const struct kv_wire_header *reply = &request->reply;
    size_t crcs_bytes = (size_t)request->n_rows * sizeof(uint32_t);
    struct piece piece = {0};
    kv_status_t status = kvc_reply_check_units(request, first_layer(request),
                                               request->header.snapshot, detail, detail_bytes);

    if (status != KV_OK)
        return status;
    if (reply->n_rows != request->n_rows)
        return kvc_reply_refuse(detail, detail_bytes, "n_rows: %u of %u", reply->n_rows,
                                request->n_rows);
    if (reply->bulk_bytes != 0
            ? reply->bulk_bytes != request->bytes || reply->body_bytes != crcs_bytes
            : reply->body_bytes != crcs_bytes + request->bytes)
        return kvc_reply_refuse(detail, detail_bytes,
                                "a body of %u bytes and bulk of %llu: %u rows of %zu bytes",
                                reply->body_bytes, (unsigned long long)reply->bulk_bytes,
                                request->n_rows, request->bytes);
    memcpy(request->message->body + request->crcs_offset, body, crcs_bytes);
    if (reply->bulk_bytes != 0)
        return KV_OK;
    body += crcs_bytes;
    while (piece_next(request, &piece)) {
        size_t bytes = piece.n_rows * piece.row_bytes;

        memcpy(piece.rows, body, bytes);
        body += bytes;
    }
    return KV_OK;
}

kv_status_t kvc_rows_finish(struct kvc_request *request, char *detail, size_t detail_bytes)
{
    const uint32_t *crcs = (const uint32_t *)(request->message->body + request->crcs_offset);
    const struct kv_writers *writers =
        kvc_session_writers(kvc_request_op(request)->session, request->node);
    struct piece piece = {0};

    while (piece_next(request, &piece)) {
        size_t bad =
            kv_writers_verify(writers, piece.layer, piece.head, piece.rows, piece.n_rows,
                              piece.row_bytes, piece.token, piece.ids, crcs);

        if (bad < piece.n_rows) {
            snprintf(detail, detail_bytes,
                     "the row of layer %u, kv head %u, token %u fails its "
                     "checksum",
                     piece.layer, piece.head,
                     piece.ids != NULL ? piece.ids[bad] : piece.token + (uint32_t)bad);
            return KV_CORRUPT;
        }
        if (piece.crcs != NULL)
            memcpy(piece.crcs, crcs, piece.n_rows * sizeof(*crcs));
        crcs += piece.n_rows;
    }
    request->node->rows_out += request->n_rows;
    return KV_OK;
}

static kv_status_t
reply_put(struct kvc_request *request, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *asked = &request->header, *reply = &request->reply;
    kv_status_t status =
        kvc_reply_check_units(request, first_layer(request),
                              asked->token_begin + asked->token_count, detail, detail_bytes);

    (void)body;
    if (status != KV_OK)
        return status;
    if (reply->n_rows != request->n_rows)
        return kvc_reply_refuse(detail, detail_bytes, "n_rows: %u of %u", reply->n_rows,
                                request->n_rows);
    if (reply->body_bytes != 0 || reply->bulk_bytes != 0)
        return kvc_reply_refuse(detail, detail_bytes, "a body of %u bytes and bulk of %llu",
                                reply->body_bytes, (unsigned long long)reply->bulk_bytes);
    request->node->rows_in += request->n_rows;
    return KV_OK;
}

void kvc_rows_describe(const struct kv_op *op,
                       const struct kvc_request *request,
                       char *text,
                       size_t text_bytes)
{
    uint32_t layer = op->type->id == KV_OP_FETCH ? kvc_fetch_of(op)->layer
                                                 : kvc_rows_of(op)->row_range.layer_begin;

    if (request != NULL && request->message != NULL && request->header.n_units > 0)
        layer = first_layer(request);
    kvc_session_describe(op->session, layer, text, text_bytes);
}

/* ---- put, append, read ------------------------------------------------------------------- */

static bool is_put(const struct kv_op *op)
{
    return op->type->id == KV_OP_PUT || op->type->id == KV_OP_APPEND;
}

/* Tokens of one unit in the next message, from `token` on. */
static uint32_t
cut(const struct kvc_connection *connection, size_t row_bytes, uint32_t token, uint32_t end)
{
    uint32_t most = (uint32_t)(connection->link.node->bulk_bytes_max / row_bytes);
    uint32_t step = KV_BLOCK_TOKENS;

    if (most > KV_WIRE_ROWS_MAX)
        most = KV_WIRE_ROWS_MAX;
    if (end - token <= most)
        return end - token;
    while (step > most)
        step /= 2;
    return (token + most) / step * step - token;
}

/* Whether one more unit fits a message that has some already. */
static bool fits(
    const struct kvc_subop *subop, uint32_t n_units, size_t bytes, size_t more, uint32_t tokens)
{
    size_t sum = bytes + more;

    if (more >= ALONE_BYTES || n_units >= KV_WIRE_UNITS_MAX ||
        ((uint64_t)n_units + 1) * tokens > KV_WIRE_ROWS_MAX)
        return false;
    if (is_put(subop->op))
        return sum <= KV_WIRE_INLINE_MAX;
    /* A reply's rows that are not in its body are received in pieces. */
    return sum <= KVC_INLINE_WANTED ||
           (n_units < KV_IOV_MAX && sum <= subop->connection->link.node->bulk_bytes_max);
}

/* Copies CRCs and, if they are sent in the body, rows. */
static void fill_put(struct kvc_request *request, bool is_inline)
{
    uint32_t *crcs =
        (uint32_t *)((struct kv_wire_unit *)request->message->body + request->header.n_units);
    uint8_t *rows = (uint8_t *)(crcs + request->n_rows);
    struct kv_crc_batch batch;
    struct piece piece = {0};

    kv_crc_batch_begin(
        &batch, kvc_session_writers(kvc_request_op(request)->session, request->node), crcs);
    while (piece_next(request, &piece)) {
        if (piece.crcs != NULL) {
            memcpy(crcs, piece.crcs, piece.n_rows * sizeof(*crcs));
            crcs += piece.n_rows;
        } else {
            kv_crc_batch_add(&batch, piece.layer, piece.head, piece.rows, piece.n_rows,
                             piece.row_bytes, piece.token);
        }
        if (!is_inline) {
            request->bulk = piece.rows;
            continue;
        }
        memcpy(rows, piece.rows, piece.n_rows * piece.row_bytes);
        rows += piece.n_rows * piece.row_bytes;
    }
    kv_crc_batch_end(&batch);
}

static kv_status_t build_rows(struct kvc_subop *subop, struct kvc_request *request)
{
    struct kv_op *op = subop->op;
    const struct kv_session *session = op->session;
    const struct kv_rows *row_range = &kvc_rows_of(op)->row_range;
    struct kv_wire_unit units[KV_WIRE_UNITS_MAX];
    uint32_t end = row_range->token_begin + row_range->n_tokens;
    uint32_t layer = subop->layer, head = subop->head;
    uint32_t token = (uint32_t)subop->position;
    size_t row_bytes = session->schema.layers[layer].row_bytes;
    uint32_t n_tokens = cut(subop->connection, row_bytes, token, end);
    size_t bytes = n_tokens * row_bytes;
    bool packs = n_tokens == row_range->n_tokens && bytes < ALONE_BYTES;
    bool is_inline = is_put(op);
    uint32_t n_units = 1;
    bool more;
    size_t capacity;

    units[0] = (struct kv_wire_unit){.layer = (uint16_t)layer, .kv_head = (uint16_t)head};
    if (token + n_tokens < end) {
        token += n_tokens;
        more = true;
    } else {
        token = row_range->token_begin;
        head++;
        more = seek(op, subop->connection, &layer, &head);
        while (more && packs) {
            size_t share = (size_t)session->schema.layers[layer].row_bytes * n_tokens;

            if (!fits(subop, n_units, bytes, share, n_tokens))
                break;
            units[n_units++] =
                (struct kv_wire_unit){.layer = (uint16_t)layer, .kv_head = (uint16_t)head};
            bytes += share;
            head++;
            more = seek(op, subop->connection, &layer, &head);
        }
    }
    if (n_units == 1 && bytes > KVC_INLINE_WANTED)
        is_inline = false;

    request->n_rows = n_units * n_tokens;
    request->bytes = bytes;
    request->body_bytes = n_units * sizeof(units[0]);
    capacity =
        request->body_bytes + request->n_rows * sizeof(uint32_t) + (is_inline ? bytes : 0);
    if (!kvc_request_message(request, capacity))
        return KV_BUSY;
    memcpy(request->message->body, units, request->body_bytes);
    request->header.op = (uint8_t)op->type->id;
    request->header.n_units = n_units;
    request->header.token_begin = (uint32_t)subop->position;
    request->header.token_count = n_tokens;
    if (is_put(op)) {
        request->header.bulk_bytes = is_inline ? 0 : bytes;
        request->body_bytes = capacity;
        fill_put(request, is_inline);
    } else {
        request->header.snapshot = request->header.token_begin + n_tokens;
        request->crcs_offset = request->body_bytes;
    }
    subop->layer = layer;
    subop->head = head;
    subop->position = token;
    subop->finished = !more || subop->alone;
    return KV_OK;
}

/* Adds one sub-operation for each connection that owns a unit of the range. */
static void start_rows(struct kv_op *op)
{
    const struct kv_rows *row_range = &kvc_rows_of(op)->row_range;

    kvc_connections_unmark(op->client);
    for (uint32_t layer = row_range->layer_begin;
         layer < row_range->layer_begin + row_range->n_layers; layer++) {
        uint32_t end = heads_end(&op->session->schema, row_range, layer);

        for (uint32_t head = row_range->kv_head_begin; head < end; head++) {
            if (!kvc_op_ask_unit(op, layer, head, row_range->token_begin))
                return;
        }
    }
}

/* ---- puts that lead up to others --------------------------------------------------------- */

/* The nearer a put's rows are to what is committed, the earlier it is sent: so none waits at a
 * node, with a credit, for one that waits for a credit. */
static uint32_t rank(const struct kv_op *op)
{
    return kvc_rows_of(op)->row_range.token_begin;
}

static bool runs_meet(uint32_t a, uint32_t n_a, uint32_t b, uint32_t n_b)
{
    return a < b + n_b && b < a + n_a;
}

/* Whether the first range has all units of the second, up to its first row. */
static bool leads_up_to(const struct kv_rows *first, const struct kv_rows *second)
{
    return first->token_begin + first->n_tokens >= second->token_begin &&
           first->layer_begin <= second->layer_begin &&
           first->layer_begin + first->n_layers >= second->layer_begin + second->n_layers &&
           (first->n_kv_heads == 0 ||
            (second->n_kv_heads > 0 && first->kv_head_begin <= second->kv_head_begin &&
             first->kv_head_begin + first->n_kv_heads >=
                 second->kv_head_begin + second->n_kv_heads));
}

/* Whether the ranges may share a unit, and the first one begins before the second. */
static bool leads_to(const struct kv_rows *first, const struct kv_rows *second)
{
    return first->token_begin < second->token_begin &&
           runs_meet(first->layer_begin, first->n_layers, second->layer_begin,
                     second->n_layers) &&
           (first->n_kv_heads == 0 || second->n_kv_heads == 0 ||
            runs_meet(first->kv_head_begin, first->n_kv_heads, second->kv_head_begin,
                      second->n_kv_heads));
}

/* Whether the rows before the request's are committed or outstanding.  Rows of the same put
 * are.  Rows before the put's range may be another put's, unless that one waits for this one to
 * end. */
static bool awaits_rows(const struct kvc_request *request)
{
    const struct kv_op *op = kvc_request_op(request);
    struct kvc_list *link, *follow;

    if (request->header.token_begin != kvc_rows_of(op)->row_range.token_begin)
        return true;
    KVC_LIST_EACH(link, follow, &op->session->ranked)
    {
        const struct kv_op *other = KVC_LIST_ENTRY(link, struct kv_op, of_ranked);

        if (other->stage != KVC_STAGE_QUEUED &&
            leads_to(&kvc_rows_of(other)->row_range, &kvc_rows_of(op)->row_range))
            return true;
    }
    return false;
}

static bool follows_sent(const struct kvc_request *request)
{
    const struct kv_op *op = kvc_request_op(request);
    struct kvc_list *link, *follow, *request_link, *request_follow;

    KVC_LIST_EACH(link, follow, &op->session->ranked)
    {
        struct kv_op *other = KVC_LIST_ENTRY(link, struct kv_op, of_ranked);

        if (rank(other) > rank(op))
            break;
        op->client->n_order_looks++;
        if (other != op &&
            !leads_to(&kvc_rows_of(other)->row_range, &kvc_rows_of(op)->row_range))
            continue;
        KVC_LIST_EACH(request_link, request_follow, &other->owner.requests)
        {
            const struct kvc_request *earlier =
                KVC_LIST_ENTRY(request_link, struct kvc_request, of_owner);

            op->client->n_order_looks++;
            if (earlier->connection == request->connection &&
                earlier->header.token_begin < request->header.token_begin)
                return true;
        }
    }
    return false;
}

static bool requeue(struct kvc_request *request, uint64_t due_us)
{
    const struct kv_wire_unit *unit = (const struct kv_wire_unit *)request->message->body;

    return kvc_subop_requeue(request, unit->layer, unit->kv_head, request->header.token_begin,
                             due_us);
}

/* Handles requests whose node waits for rows of the put that has ended.  Those with no other
 * put to wait for are resent, so that their node replies at once. */
static void ended_put(struct kv_op *op)
{
    const struct kv_rows *row_range = &kvc_rows_of(op)->row_range;
    struct kv_client *client = op->client;
    struct kvc_list *link, *follow, *request_link, *request_follow;

    KVC_LIST_EACH(link, follow, &op->session->ranked)
    {
        struct kv_op *other = KVC_LIST_ENTRY(link, struct kv_op, of_ranked);
        if (!leads_to(row_range, &kvc_rows_of(other)->row_range))
            continue;
        const bool is_met =
            op->status == KV_OK && leads_up_to(row_range, &kvc_rows_of(other)->row_range);
        KVC_LIST_EACH(request_link, request_follow, &other->owner.requests)
        {
            struct kvc_request *request =
                KVC_LIST_ENTRY(request_link, struct kvc_request, of_owner);

            if (request->header.snapshot == 0 || (!is_met && follows_sent(request)))
                continue;
            request->header.snapshot = 0; /* nothing is left to look at */
            if (is_met)
                continue;
            request->resend_us = client->loop.now_us;
            kvc_loop_set_timer(&client->loop, request->resend_us);
        }
    }
}

static kv_status_t begin_rows(const struct kvc_op_type *type,
                              struct kv_session *session,
                              const struct kv_rows *rows,
                              const struct kv_rows_io *io,
                              uint32_t deadline_ms,
                              struct kv_op **ret_op)
{
    struct kv_client *client = session->client;
    size_t bytes = kv_rows_bytes(&session->schema, rows);
    kv_status_t status;
    struct kv_op *op;

    if (bytes == 0)
        return kvc_set_error(&client->loop, KV_INVALID,
                             "%s: rows do not fit the schema: layers %u+%u, heads %u+%u, "
                             "tokens %u+%u",
                             type->name, rows->layer_begin, rows->n_layers, rows->kv_head_begin,
                             rows->n_kv_heads, rows->token_begin, rows->n_tokens);
    if ((uint64_t)rows->token_begin + rows->n_tokens > session->tokens_max)
        return kvc_set_error(&client->loop, KV_TOO_LARGE,
                             "%s: token %u: session limit %u tokens", type->name,
                             rows->token_begin + rows->n_tokens - 1, session->tokens_max);
    if (!kvc_buffer_holds(client, io->buffer, io->offset, bytes))
        return kvc_set_error(&client->loop, KV_INVALID, "%s: %zu bytes do not fit the buffer",
                             type->name, bytes);
    status = kvc_op_begin(client, type, session, io->buffer, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    kvc_rows_of(op)->row_range = *rows;
    kvc_rows_of(op)->base = io->buffer->base + io->offset;
    kvc_rows_of(op)->crcs = io->crcs;
    if (io->crcs != NULL && is_put(op)) {
        size_t crcs_bytes = n_rows(&session->schema, rows) * sizeof(*io->crcs);
        uint8_t *capacity = kvc_op_capacity(op, crcs_bytes);

        if (capacity == NULL) {
            kvc_op_discard(op);
            return kvc_set_error(&client->loop, KV_NO_MEMORY, "%s: out of memory", type->name);
        }
        kvc_rows_of(op)->crcs = kvc_op_keep(&capacity, io->crcs, crcs_bytes);
    }
    kvc_op_require_units(op, rows->layer_begin, rows->layer_begin + rows->n_layers,
                         rows->kv_head_begin, rows->n_kv_heads);
    return kvc_op_submit(op, ret_op);
}

/* The client does the same for a put and an append. */
#define WRITE_TYPE(NAME, ID)                                                                  \
    {                                                                                         \
        .name = NAME, .id = ID, .needs_current = true, .start = start_rows,                   \
        .build = build_rows, .ended = ended_put, .describe = kvc_rows_describe, .rank = rank, \
        .requests = {.awaits = awaits_rows,                                                   \
                     .follows_sent = follows_sent,                                            \
                     .requeue = requeue,                                                      \
                     .reply = reply_put},                                                     \
    }

static const struct kvc_op_type put_type = WRITE_TYPE("put", KV_OP_PUT);
static const struct kvc_op_type append_type = WRITE_TYPE("append", KV_OP_APPEND);

#undef WRITE_TYPE

static const struct kvc_op_type read_type = {
    .name = "read",
    .id = KV_OP_READ,
    .needs_current = true,
    .start = start_rows,
    .build = build_rows,
    .requests.land = kvc_rows_land,
    .requests.reply = kvc_rows_reply,
    .requests.finish = kvc_rows_finish,
    .describe = kvc_rows_describe,
};

kv_status_t kv_put_begin(struct kv_session *session,
                         const struct kv_rows *rows,
                         const struct kv_rows_io *io,
                         uint32_t deadline_ms,
                         struct kv_op **ret_op)
{
    KVC_ENTER(session->client);

    return begin_rows(&put_type, session, rows, io, deadline_ms, ret_op);
}

kv_status_t kv_append_begin(struct kv_session *session,
                            const struct kv_rows *rows,
                            const struct kv_rows_io *io,
                            uint32_t deadline_ms,
                            struct kv_op **ret_op)
{
    KVC_ENTER(session->client);

    return begin_rows(&append_type, session, rows, io, deadline_ms, ret_op);
}

static kv_status_t
begin_append_entry(struct kv_client *client, void *entries, size_t i, uint32_t deadline_ms)
{
    struct kv_append_entry *entry = (struct kv_append_entry *)entries + i;

    entry->op = NULL;
    entry->status = kvc_batch_takes(client, entry->session);
    if (entry->status == KV_OK)
        entry->status =
            kv_append_begin(entry->session, entry->rows, entry->io, deadline_ms, &entry->op);
    return entry->status;
}

kv_status_t
kv_append_begin_batch(struct kv_append_entry *entries, size_t n_entries, uint32_t deadline_ms)
{
    if (n_entries == 0)
        return KV_OK;
    KVC_ENTER(entries[0].session->client);

    return kvc_batch_begin(entries[0].session->client, entries, n_entries, deadline_ms,
                           begin_append_entry);
}

kv_status_t kv_read_begin(struct kv_session *session,
                          const struct kv_rows *rows,
                          const struct kv_rows_io *io,
                          uint32_t deadline_ms,
                          struct kv_op **ret_op)
{
    KVC_ENTER(session->client);

    return begin_rows(&read_type, session, rows, io, deadline_ms, ret_op);
}
