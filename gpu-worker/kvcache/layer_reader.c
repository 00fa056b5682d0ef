#include "gpu-worker/kvcache/layer_reader.h"

#include "gpu-worker/base/time.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

enum {
    PIECE_TOKENS = 1024,
    SLOTS_MAX = 16,
    DEADLINE_MS = 30000,
    LOOK_US = 500 * 1000,          /* between two questions how far the rows are */
    STOPPED_US = 10 * 1000 * 1000, /* nothing has come for so long: nobody brings them */
};

/* What the slots may take together, or two of them: enough to keep the nodes busy while a layer
 * computes.  Fresh memory is slow to get: 12 MiB of it took 28 ms before the first rows came. */
static const size_t BUFFER_BYTES = 4 << 20;

struct kvw_layer_reader {
    struct kvw_layer_reader_setup setup;
    struct kv_buffer *buffer;
    size_t slot_bytes;
    uint32_t n_slots;
    uint32_t layer_pieces;     /* of each layer */
    uint32_t n_begun, n_taken; /* pieces, in their order */
    struct kv_op *ops[SLOTS_MAX];

    /* While it waits for rows that another worker brings. */
    struct kv_op *look;
    uint64_t looked_us, came_us;
    uint64_t n_arrived; /* tokens, summed over all layers */
};

static uint32_t n_pieces(const struct kvw_layer_reader *reader)
{
    return reader->setup.n_layers * reader->layer_pieces;
}

static struct kv_rows rows_of(const struct kvw_layer_reader *reader, uint32_t piece)
{
    const uint32_t begin = piece % reader->layer_pieces * PIECE_TOKENS;
    const uint32_t left = reader->setup.n_tokens - begin;

    return (struct kv_rows){
        .layer_begin = piece / reader->layer_pieces,
        .n_layers = 1,
        .token_begin = begin,
        .n_tokens = left < PIECE_TOKENS ? left : PIECE_TOKENS,
    };
}

void kvw_layer_reader_destroy(struct kvw_layer_reader *reader)
{
    if (reader == NULL)
        return;
    kvw_layer_reader_check(reader);
    kv_op_free(reader->look);
    for (uint32_t i = 0; i < reader->n_slots; i++)
        kv_op_free(reader->ops[i]);
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(reader->buffer);
    free(reader);
}

static kv_status_t begin_piece(struct kvw_layer_reader *reader, uint32_t piece)
{
    const uint32_t slot = piece % reader->n_slots;
    const struct kv_rows rows = rows_of(reader, piece);
    const struct kv_rows_io io = {.buffer = reader->buffer,
                                  .offset = slot * reader->slot_bytes};

    return kvw_session_fail(reader->setup.store,
                            kv_read_begin(kvw_session_handle(reader->setup.store), &rows, &io,
                                          DEADLINE_MS, &reader->ops[slot]));
}

static kv_status_t begin_more(struct kvw_layer_reader *reader)
{
    kv_status_t status = KV_OK;

    while (status == KV_OK && reader->n_begun < n_pieces(reader) &&
           reader->n_begun - reader->n_taken < reader->n_slots) {
        status = begin_piece(reader, reader->n_begun);
        if (status == KV_OK)
            reader->n_begun++;
    }
    return status;
}

static kv_status_t create(const struct kvw_layer_reader_setup *setup,
                          struct kvw_layer_reader **ret_reader)
{
    struct kvw_layer_reader *reader = calloc(1, sizeof(*reader));
    size_t n_slots;
    kv_status_t status;

    assert(setup->n_tokens > 0);
    if (reader == NULL)
        return KV_NO_MEMORY;
    reader->setup = *setup;
    reader->layer_pieces = (setup->n_tokens + PIECE_TOKENS - 1) / PIECE_TOKENS;
    reader->slot_bytes = (setup->n_tokens < PIECE_TOKENS ? setup->n_tokens : PIECE_TOKENS) *
                         setup->n_kv_heads * setup->row_bytes;
    n_slots = BUFFER_BYTES / reader->slot_bytes;
    reader->n_slots = n_slots < 2 ? 2 : n_slots > SLOTS_MAX ? SLOTS_MAX : (uint32_t)n_slots;
    status =
        kv_buffer_alloc(setup->client, reader->n_slots * reader->slot_bytes, &reader->buffer);
    if (status == KV_OK)
        status = begin_more(reader);
    else
        kvw_session_fail(setup->store, status);
    if (status != KV_OK) {
        kvw_layer_reader_destroy(reader);
        return status;
    }
    *ret_reader = reader;
    return KV_OK;
}

/* ---- rows that another worker brings ----------------------------------------------------- */

/* Takes how far each layer is, and tells it of the layer that is waited for. */
static void look_ended(struct kvw_layer_reader *reader, uint32_t layer)
{
    const uint32_t n_tokens = reader->setup.n_tokens;
    uint64_t n_arrived = 0;

    if (kv_op_status(reader->look) == KV_OK) {
        for (uint32_t i = 0; i < reader->setup.n_layers; i++) {
            const uint32_t tokens = kv_op_layer_tokens(reader->look, i);

            n_arrived += tokens < n_tokens ? tokens : n_tokens;
        }
        if (n_arrived != reader->n_arrived)
            reader->came_us = kvw_now_us();
        reader->n_arrived = n_arrived;
        kvw_session_tell_arrived(reader->setup.store, layer,
                                 kv_op_layer_tokens(reader->look, layer), n_tokens);
    }
    kv_op_free(reader->look);
    reader->look = NULL;
}

static kv_status_t
wait_for_late(struct kvw_layer_reader *reader, const struct kv_op *op, uint32_t layer)
{
    reader->came_us = kvw_now_us(); /* when the last piece was needed does not matter */
    while (kv_op_status(op) == KV_IN_PROGRESS) {
        const uint64_t now_us = kvw_now_us();

        if (reader->look != NULL && kv_op_status(reader->look) != KV_IN_PROGRESS)
            look_ended(reader, layer);
        if (kvw_session_is_stopped(reader->setup.store))
            return KV_CANCELLED;
        if (now_us > reader->came_us + STOPPED_US)
            return kvw_session_refuse(reader->setup.store, KV_NOT_READY,
                                      "rows of layer %" PRIu32 ": none has come for %d s",
                                      layer, STOPPED_US / 1000000);
        if (reader->look == NULL && now_us > reader->looked_us + LOOK_US) {
            reader->looked_us = now_us;
            if (kv_length_begin(kvw_session_handle(reader->setup.store), 0, &reader->look) !=
                KV_OK)
                reader->look = NULL; /* the read itself will tell what is wrong */
        }
        kv_client_wait(reader->setup.client, LOOK_US / 8);
    }
    return kv_op_status(op);
}

/* ---- taking ------------------------------------------------------------------------------ */

static kv_status_t take_next(struct kvw_layer_reader *reader)
{
    const uint32_t piece = reader->n_taken, slot = piece % reader->n_slots;
    const struct kv_rows rows = rows_of(reader, piece);
    const bool is_late = kvw_session_is_arriving(reader->setup.store);
    struct kv_op **op = &reader->ops[slot];
    kv_status_t status;

    while (true) {
        status = is_late ? wait_for_late(reader, *op, rows.layer_begin) : kv_wait(*op);
        if (kv_op_status(*op) != KV_NOT_READY || !is_late)
            break;
        /* Its deadline has passed, and rows still come: again. */
        kv_op_free(*op);
        *op = NULL;
        status = begin_piece(reader, piece);
        if (status != KV_OK)
            break;
    }
    if (status == KV_OK) {
        kvw_session_count_read(reader->setup.store, &rows);
        reader->setup.take(reader->setup.arg, &rows,
                           (const uint8_t *)kv_buffer_data(reader->buffer) +
                               slot * reader->slot_bytes);
    } else {
        kvw_session_fail(reader->setup.store, status);
    }
    kv_op_free(*op);
    *op = NULL;
    reader->n_taken++;
    return status == KV_OK ? begin_more(reader) : status;
}

kv_status_t kvw_layer_reader_pass(struct kvw_layer_reader **reader,
                                  const struct kvw_layer_reader_setup *setup,
                                  uint32_t layer,
                                  uint64_t *ret_wait_us)
{
    const uint64_t begin_us = kvw_now_us();
    struct kvw_layer_reader *now;
    kv_status_t status = KV_OK;

    if (*reader == NULL)
        status = create(setup, reader);
    now = *reader;
    while (status == KV_OK && now->n_taken < (layer + 1) * now->layer_pieces)
        status = take_next(now);
    *ret_wait_us += kvw_now_us() - begin_us;
    /* What has come of later layers makes room for more. */
    while (status == KV_OK && now->n_taken < now->n_begun &&
           kv_op_status(now->ops[now->n_taken % now->n_slots]) == KV_OK)
        status = take_next(now);
    if (status == KV_OK && layer + 1 == setup->n_layers) {
        kvw_layer_reader_destroy(now);
        *reader = NULL;
    }
    return status;
}

void kvw_layer_reader_check(const struct kvw_layer_reader *reader)
{
    const uint32_t n_under_way = reader->n_begun - reader->n_taken;

    assert(n_under_way <= reader->n_slots && reader->n_begun <= n_pieces(reader));
    for (uint32_t i = 0; i < reader->n_slots; i++)
        assert((reader->ops[(reader->n_taken + i) % reader->n_slots] != NULL) ==
               (i < n_under_way));
}
