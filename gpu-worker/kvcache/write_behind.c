#include "gpu-worker/kvcache/write_behind.h"

#include "gpu-worker/base/time.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    SLOTS = 16,
    DEADLINE_MS = 30000, /* of a put; a store that takes longer is considered lost */
};

struct kvw_write_behind {
    struct kv_client *client;
    struct kv_session *session;
    struct kv_buffer *buffer;
    size_t slot_bytes;
    struct kvw_trace *trace;
    struct kv_op *ops[SLOTS]; /* by slot; NULL: free */
    unsigned n_begun;         /* slots sent so far: the next is n_begun % SLOTS */
    unsigned n_ended;
    kv_status_t failure;
    char detail[512];
    uint64_t wait_us;
    uint64_t bytes;
};

kv_status_t kvw_write_behind_create(struct kv_client *client,
                                    struct kv_session *session,
                                    size_t slot_bytes,
                                    struct kvw_trace *trace,
                                    struct kvw_write_behind **ret_writer)
{
    struct kvw_write_behind *writer = calloc(1, sizeof(*writer));
    kv_status_t status;

    if (writer == NULL)
        return KV_NO_MEMORY;
    writer->client = client;
    writer->session = session;
    writer->slot_bytes = slot_bytes;
    writer->trace = trace;
    status = kv_buffer_alloc(client, slot_bytes * SLOTS, &writer->buffer);
    if (status != KV_OK) {
        free(writer);
        return status;
    }
    *ret_writer = writer;
    return KV_OK;
}

void kvw_write_behind_destroy(struct kvw_write_behind *writer)
{
    if (writer == NULL)
        return;
    for (unsigned i = 0; i < SLOTS; i++)
        kv_op_free(writer->ops[i]);
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(writer->buffer);
    free(writer);
}

void kvw_write_behind_go_on(struct kvw_write_behind *writer, struct kv_session *session)
{
    writer->session = session;
}

/* Takes the result of the oldest slot, which has ended. */
static void collect(struct kvw_write_behind *writer)
{
    struct kv_op **op = &writer->ops[writer->n_ended++ % SLOTS];
    struct kv_op_times times;

    kv_op_get_times(*op, &times);
    kvw_trace_span(writer->trace, KVW_TRACE_PUT, "put", times.begun_us, times.ended_us, NULL,
                   0);
    if (kv_op_status(*op) != KV_OK && writer->failure == KV_OK) {
        writer->failure = kv_op_status(*op);
        snprintf(writer->detail, sizeof(writer->detail), "store: %s", kv_op_detail(*op));
    }
    kv_op_free(*op);
    *op = NULL;
}

static bool oldest_ended(const struct kvw_write_behind *writer)
{
    return writer->n_ended != writer->n_begun &&
           kv_op_status(writer->ops[writer->n_ended % SLOTS]) != KV_IN_PROGRESS;
}

static void wait_for_oldest(struct kvw_write_behind *writer)
{
    const uint64_t begin_us = kvw_now_us();

    kv_wait(writer->ops[writer->n_ended % SLOTS]);
    const uint64_t end_us = kvw_now_us();
    writer->wait_us += end_us - begin_us;
    kvw_trace_span(writer->trace, KVW_TRACE_WAIT, "put", begin_us, end_us, NULL, 0);
    collect(writer);
}

kv_status_t kvw_write_behind_take(struct kvw_write_behind *writer)
{
    while (oldest_ended(writer))
        collect(writer);
    return writer->failure;
}

kv_status_t kvw_write_behind_poll(struct kvw_write_behind *writer)
{
    kv_poll(writer->client);
    return kvw_write_behind_take(writer);
}

void kvw_write_behind_give_up(struct kvw_write_behind *writer)
{
    for (; writer->n_ended != writer->n_begun; writer->n_ended++) {
        kv_op_free(writer->ops[writer->n_ended % SLOTS]);
        writer->ops[writer->n_ended % SLOTS] = NULL;
    }
}

kv_status_t kvw_write_behind_slot(struct kvw_write_behind *writer, void **ret_slot)
{
    while (oldest_ended(writer))
        collect(writer);
    if (writer->n_begun - writer->n_ended == SLOTS)
        wait_for_oldest(writer);
    if (writer->failure != KV_OK)
        return writer->failure;
    *ret_slot =
        (char *)kv_buffer_data(writer->buffer) + writer->n_begun % SLOTS * writer->slot_bytes;
    return KV_OK;
}

kv_status_t
kvw_write_behind_send(struct kvw_write_behind *writer, const struct kv_rows *rows, bool is_step)
{
    const unsigned slot = writer->n_begun % SLOTS;
    const struct kv_rows_io io = {.buffer = writer->buffer,
                                  .offset = slot * writer->slot_bytes};
    const size_t bytes = kv_rows_bytes(kv_session_schema(writer->session), rows);
    kv_status_t status;

    assert(bytes > 0 && bytes <= writer->slot_bytes && writer->ops[slot] == NULL);
    status = is_step
                 ? kv_append_begin(writer->session, rows, &io, DEADLINE_MS, &writer->ops[slot])
                 : kv_put_begin(writer->session, rows, &io, DEADLINE_MS, &writer->ops[slot]);
    if (status != KV_OK) {
        writer->failure = status;
        snprintf(writer->detail, sizeof(writer->detail), "store: %s",
                 kv_client_detail(writer->client));
        return status;
    }
    writer->n_begun++;
    writer->bytes += bytes;
    return KV_OK;
}

bool kvw_write_behind_is_empty(const struct kvw_write_behind *writer)
{
    return writer->n_ended == writer->n_begun;
}

bool kvw_write_behind_has_slot(const struct kvw_write_behind *writer)
{
    return writer->failure != KV_OK || writer->n_begun - writer->n_ended < SLOTS ||
           oldest_ended(writer);
}

kv_status_t kvw_write_behind_flush(struct kvw_write_behind *writer)
{
    while (writer->n_ended != writer->n_begun)
        wait_for_oldest(writer);
    return writer->failure;
}

const char *kvw_write_behind_detail(const struct kvw_write_behind *writer)
{
    return writer->detail;
}

double kvw_write_behind_wait_s(const struct kvw_write_behind *writer)
{
    return (double)writer->wait_us / 1e6;
}

uint64_t kvw_write_behind_bytes(const struct kvw_write_behind *writer)
{
    return writer->bytes;
}

void kvw_write_behind_check(const struct kvw_write_behind *writer)
{
    const unsigned n_under_way = writer->n_begun - writer->n_ended;

    assert(n_under_way <= SLOTS);
    for (unsigned i = 0; i < SLOTS; i++)
        assert((writer->ops[(writer->n_ended + i) % SLOTS] != NULL) == (i < n_under_way));
}
