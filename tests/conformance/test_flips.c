/* test_flips.c - bits flip in the memory of a node that is at work.
 *
 *     test_conformance_flips [FLIPS [SEED]]
 *
 * A node and a client, whole and over the loopback, in one thread by a clock that the test
 * turns: a run repeats exactly.  In each round some bits are flipped in the node's arena: in
 * rows, their checksums, codes and the copies behind them, centroids and the mean behind them,
 * cells, summaries and objects.  Then
 *
 *   - clients ask, before and after the scrub has come by: an answer is right, or KV_CORRUPT
 *     that names a flipped row.  Attention is held against the same in double precision, over
 *     rows as they were written and summaries as they were made.
 *   - the scrub goes through everything once: every flip is found
 *   - what was flipped in rows and objects is put again, and after that and another pass every
 *     byte in the arena is what it was before
 */
#include "client/client.h"
#include "client/control_message.h"
#include "client/session.h"
#include "kernels/checksum.h"
#include "kernels/key_copies.h"
#include "kernels/summary.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "kvserver/base/slice.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/ops/scrub.h"
#include "tests/support/memory_tier.h"
#include "tests/support/node_data.h"
#include "tests/support/rows.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    FLIPS = 300,
    TOKENS = 3000,
    FORKED = 2500,
    LAYERS = 2,
    HEADS = 2,
    UNITS = LAYERS * HEADS,
    D = 64, /* of a key, of a value */
    ROW_BYTES = 4 * D,
    CHAPTER = 8 * KV_BLOCK_TOKENS, /* one group of summaries */
    CHAPTERS_MAX = 4,
    BLOCKS = (TOKENS + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS,
    QUERIES = 3,
    OBJECTS = 5,
    CODES_BYTES = 8192, /* of a block's codes and copies, at most */
    FLIPS_AT_ONCE = 4,
    MEMORY_BYTES = 64 << 20,
    BUFFER_BYTES = 8 << 20,
    SCRUB_BYTES = 64 << 20, /* a second */
    STEP_US = 2,
};

/* Sessions: by chapters with cells and summaries; by one open codebook; a fork of the first. */
enum {
    BY_CHAPTER,
    OPEN,
    FORK,
    SESSIONS,
};
static const uint32_t lengths[SESSIONS] = {TOKENS, TOKENS, FORKED};

enum kind {
    ROW,
    CRC,
    CODES,
    CENTROIDS,
    CELLS,
    SUMMARIES,
    OBJECT,
    KINDS,
};
static const char *const kind_names[KINDS] = {"row",   "crc",       "codes", "centroids",
                                              "cells", "summaries", "object"};

/* Where a bit was flipped. */
struct flip {
    enum kind kind;
    unsigned session, layer, head; /* not FORK */
    uint32_t token;                /* ROW, CRC; else the first one of its block or chapter */
    unsigned object;
};

/* A block as it was made, and a codebook. */
struct block_copy {
    uint8_t rows[KV_BLOCK_TOKENS * ROW_BYTES];
    uint32_t crcs[KV_BLOCK_TOKENS];
    uint8_t codes[CODES_BYTES]; /* and copies */
    uint32_t n_coded;
};
struct book_copy {
    float learnt[4096]; /* centroids, and the keys' mean */
    uint32_t cells[8192], n_celled;
    uint8_t group[8192];
    uint32_t n_summarised;
};

static struct {
    struct kv_clock clock;
    struct kv_transport *transport;
    struct kv_disk *disk;
    struct kvs_node *node;
    struct kv_client *client;
    struct kv_buffer *out, *in;
    struct kv_model_info model;
    struct kv_session *sessions[SESSIONS];
    struct kv_random random;
    float rows[2][LAYERS][HEADS][TOKENS][2 * D];
    struct block_copy blocks[2][LAYERS][HEADS][BLOCKS];
    struct book_copy books[2][LAYERS][HEADS][CHAPTERS_MAX];
    uint64_t object_bytes[OBJECTS];
    struct flip flips[FLIPS_AT_ONCE];
    unsigned n_flips;
    char corrupt[256]; /* what the last KV_CORRUPT said */
} it;

static uint64_t scrub_bytes = SCRUB_BYTES; /* of the node's own scrub */
static uint32_t summary_rows = 1024;       /* of what is made, and asked for */

static struct {
    uint64_t flips[KINDS], answers, refusals, rest, cuts, passes;
} counted;

static uint32_t below(uint32_t bound)
{
    return (uint32_t)kv_random_below(&it.random, bound);
}

/* ---- a node and a client in one thread --------------------------------------------------- */

static void step(uint64_t us)
{
    it.clock.virtual_us += us;
    if (it.client != NULL)
        kv_poll(it.client);
    kvs_node_data_step(it.node, 0);
    kvs_node_control_step(it.node);
}

static kv_status_t run(struct kv_op *op)
{
    while (kv_op_status(op) == KV_IN_PROGRESS)
        step(STEP_US);
    return kv_op_status(op);
}

static void run_well(kv_status_t begun, struct kv_op *op, const char *what)
{
    if (begun != KV_OK || run(op) != KV_OK)
        fail_msg("%s: %s: %s", what, kv_status_name(begun != KV_OK ? begun : kv_op_status(op)),
                 begun != KV_OK ? kv_client_detail(it.client) : kv_op_detail(op));
    kv_op_free(op);
}

static struct kvs_shard *data(void)
{
    return node_data(it.node, 0);
}

static void open_node(void)
{
    const struct kv_transport_config transport = {0};
    static char address[2 * KV_WIRE_ADDRESS_MAX + 32];
    char detail[256];

    kv_clock_virtual_init(&it.clock, 1000000);
    assert_int_equal(
        kv_transport_loopback.open(&transport, &it.transport, detail, sizeof(detail)), KV_OK);
    it.disk = kv_disk_memory_open(&it.clock, 0);
    const struct kvs_node_config config = {
        .name = "flips",
        .memory_bytes = MEMORY_BYTES,
        .n_threads = 1,
        .sessions_max = 16,
        .clients_max = 4,
        .lease_ms = 3600 * 1000 * 24,
        .client_lease_ms = 3600 * 1000,
        .scrub_bytes = scrub_bytes,
        .seed = 1,
        .clock = &it.clock,
        .transport = it.transport,
        .message_control = true,
        .disk = it.disk,
    };
    if (kvs_node_create(&config, &it.node, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    snprintf(address, sizeof(address), "%s", kvs_node_address(it.node));
    const struct kvc_node_setup remote = {.address = address, .mode = KV_CHANNEL_NETWORK};
    const struct kvc_client_setup setup = {
        .nodes = &remote,
        .n_nodes = 1,
        .transport = it.transport,
        .open_control = kvc_control_message_open,
        .clock = &it.clock,
        .seed = 2,
        .name = "test",
        .deadline_ms = 60000,
        .peer_timeout_ms = 60000,
    };
    assert_int_equal(kvc_client_create(&setup, &it.client), KV_OK);
    assert_int_equal(kv_buffer_alloc(it.client, BUFFER_BYTES, &it.out), KV_OK);
    assert_int_equal(kv_buffer_alloc(it.client, BUFFER_BYTES, &it.in), KV_OK);
}

static void close_node(void)
{
    kv_client_close(it.client);
    it.client = NULL;
    kvs_node_check_memory(it.node);
    kvs_node_destroy(it.node);
    kv_disk_close(it.disk);
    it.transport->ops->close(it.transport);
}

/* ---- what it holds ----------------------------------------------------------------------- */

/* Whose rows a session's are. */
static unsigned owner_of(unsigned session)
{
    return session == FORK ? BY_CHAPTER : session;
}

/* A multiple of 1/64, exact in fp16. */
static uint16_t half_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    if (value == 0)
        return 0;
    return (uint16_t)((bits >> 16 & 0x8000) | ((bits >> 23 & 0xff) - 112) << 10 |
                      (bits >> 13 & 0x3ff));
}

static void make_rows(void)
{
    for (unsigned session = 0; session < 2; session++)
        for (unsigned layer = 0; layer < LAYERS; layer++)
            for (unsigned head = 0; head < HEADS; head++)
                for (uint32_t token = 0; token < TOKENS; token++)
                    for (unsigned i = 0; i < 2 * D; i++)
                        it.rows[session][layer][head][token][i] =
                            (float)((int)below(255) - 127) / 64;
}

/* The rows of all heads of these layers, as a put wants them. */
static size_t write_box(unsigned owner, const struct kv_rows *box, uint16_t *to)
{
    size_t n = 0;

    for (uint32_t layer = box->layer_begin; layer < box->layer_begin + box->n_layers; layer++)
        for (unsigned head = 0; head < HEADS; head++)
            for (uint32_t i = 0; i < box->n_tokens; i++)
                for (unsigned j = 0; j < 2 * D; j++)
                    to[n++] = half_of(it.rows[owner][layer][head][box->token_begin + i][j]);
    return n * sizeof(*to);
}

static void put(unsigned session, uint32_t layer, uint32_t n_layers, uint32_t begin, uint32_t n)
{
    const struct kv_rows box = {
        .layer_begin = layer, .n_layers = n_layers, .token_begin = begin, .n_tokens = n};
    const struct kv_rows_io io = {.buffer = it.out};
    struct kv_op *op = NULL;

    write_box(owner_of(session), &box, kv_buffer_data(it.out));
    const kv_status_t status = kv_put_begin(it.sessions[session], &box, &io, 0, &op);
    run_well(status, op, "put");
}

static uint8_t object_byte(unsigned object, uint64_t at)
{
    return (uint8_t)((at * 31 + object) ^ at >> 9);
}

static kv_status_t object(enum kv_object_verb verb, unsigned which)
{
    char name[16];
    struct kv_object one = {.name = name,
                            .buffer = verb == KV_OBJECT_PUT ? it.out : it.in,
                            .bytes = it.object_bytes[which]};
    struct kv_op *op = NULL;
    kv_status_t status;

    snprintf(name, sizeof(name), "object-%u", which);
    if (verb == KV_OBJECT_PUT)
        for (uint64_t i = 0; i < one.bytes; i++)
            ((uint8_t *)kv_buffer_data(it.out))[i] = object_byte(which, i);
    assert_int_equal(kv_objects_begin(it.client, verb, &one, 1, 0, &op), KV_OK);
    status = run(op);
    if (status == KV_OK && verb == KV_OBJECT_GET) {
        assert_int_equal(one.bytes, it.object_bytes[which]);
        for (uint64_t i = 0; i < one.bytes; i++)
            assert_int_equal(((uint8_t *)kv_buffer_data(it.in))[i], object_byte(which, i));
    }
    kv_op_free(op);
    return status;
}

static struct kv_session *session_of(kv_status_t begun, struct kv_op *op)
{
    struct kv_session *session;

    assert_int_equal(begun, KV_OK);
    assert_int_equal(run(op), KV_OK);
    session = kv_op_session(op);
    kv_op_free(op);
    return session;
}

static void make_index(unsigned session, uint32_t chapter_blocks, uint32_t rest)
{
    const struct kv_index_options index = {.tokens = lengths[session],
                                           .chapter_blocks = chapter_blocks,
                                           .m = 2,
                                           .bits = 4,
                                           .rotates = true,
                                           .copies = true,
                                           .iterations = 4,
                                           .seed = 5,
                                           .summaries = rest,
                                           .summary_rows = summary_rows,
                                           .wait = true};
    struct kv_op *op = NULL;
    const kv_status_t status = kv_index_begin(it.sessions[session], &index, 0, &op);

    run_well(status, op, "index");
}

static void fill_node(void)
{
    static const uint64_t sizes[OBJECTS] = {1, 700, 40000, (1 << 20) + 17, 3 << 20};
    const uint16_t heads[LAYERS] = {HEADS, HEADS};
    struct kv_op *op = NULL;
    kv_status_t status;

    test_model(&it.model, "flips", LAYERS, heads, D, D);
    make_rows();
    for (unsigned i = 0; i < 2; i++) {
        status = kv_open_begin(it.client, &it.model, NULL, 0, &op);
        it.sessions[i] = session_of(status, op);
        for (uint32_t begin = 0; begin < TOKENS; begin += 1000)
            put(i, 0, LAYERS, begin, 1000);
    }
    make_index(BY_CHAPTER, CHAPTER / KV_BLOCK_TOKENS, 16);
    make_index(OPEN, 0, 0);
    status = kv_fork_begin(it.sessions[BY_CHAPTER], FORKED, 0, &op);
    it.sessions[FORK] = session_of(status, op);
    for (unsigned i = 0; i < OBJECTS; i++) {
        it.object_bytes[i] = sizes[i];
        assert_int_equal(object(KV_OBJECT_PUT, i), KV_OK);
    }
}

/* ---- the node's memory ------------------------------------------------------------------- */

static struct kvs_unit *unit_at(unsigned session, unsigned layer, unsigned head)
{
    return kvs_shard_session_unit(&data()->sessions[it.sessions[session]->nodes[0].index],
                                  layer, head);
}

/* The codebook of the segment that begins the chapter; NULL: it has none. */
static struct kvs_codebook *book_at(const struct kvs_unit *unit, uint32_t block)
{
    const struct kvs_codes *codes = kvs_unit_codes(unit, block);

    return codes->column.bytes == NULL ? NULL
                                       : kvs_codebook_at(&data()->codebooks, codes->codebook);
}

/* Of the copies of a segment that has codes: they end its column. */
static size_t copies_bytes(const struct kvs_codebook *book, const struct kvs_codes *codes)
{
    const uint8_t *end = (const uint8_t *)codes->column.bytes + codes->column.n_bytes;

    return (size_t)(end - (const uint8_t *)kvs_segment_copies(book, codes));
}

static size_t n_cells(const struct kvs_codebook *book)
{
    return kvs_codebook_lists(book) == NULL ? 0 : kv_cells_head(&book->shape) + book->n_celled;
}

static void copy_book(const struct kvs_codebook *book, struct book_copy *copy)
{
    assert_true(book->learnt.n_bytes <= sizeof(copy->learnt));
    assert_true(n_cells(book) <= sizeof(copy->cells) / sizeof(uint32_t));
    memcpy(copy->learnt, book->learnt.bytes, book->learnt.n_bytes);
    if (kvs_codebook_lists(book) != NULL)
        memcpy(copy->cells, kvs_codebook_lists(book), n_cells(book) * sizeof(uint32_t));
    copy->n_celled = book->n_celled;
    copy->n_summarised = book->summaries.n_rows;
    if (copy->n_summarised > 0) {
        assert_int_equal(kvs_summaries_n_groups(&book->summaries), 1);
        assert_true(kv_summary_bytes(&book->summaries.shape) <= sizeof(copy->group));
        memcpy(copy->group, book->summaries.groups[0].bytes,
               kv_summary_bytes(&book->summaries.shape));
    }
}

static void copy_memory(void)
{
    unsigned n_celled = 0, n_summarised = 0, n_coded = 0;

    for (unsigned at = 0; at < 2 * UNITS; at++) {
        const unsigned session = at / UNITS, layer = at / HEADS % LAYERS, head = at % HEADS;
        const struct kvs_unit *unit = unit_at(session, layer, head);

        for (uint32_t i = 0; i < BLOCKS; i++) {
            const struct kvs_codes *codes = kvs_unit_codes(unit, i);
            const uint8_t *rows = kvs_unit_row(unit, i * KV_BLOCK_TOKENS);
            const uint32_t *crcs = kvs_unit_crc(unit, i * KV_BLOCK_TOKENS);
            struct block_copy *copy = &it.blocks[session][layer][head][i];

            memcpy(copy->rows, rows, sizeof(copy->rows));
            memcpy(copy->crcs, crcs, sizeof(copy->crcs));
            copy->n_coded = codes->n_coded;
            n_coded += codes->n_coded;
            const struct kvs_codebook *book = book_at(unit, i);
            if (book != NULL) {
                assert_true(codes->column.n_bytes <= sizeof(copy->codes));
                memcpy(copy->codes, codes->column.bytes, codes->column.n_bytes);
                assert_true(copies_bytes(book, codes) >= kv_key_copies_bytes(D));
            }
            if (book == NULL || book->block_begin != i)
                continue;
            copy_book(book, &it.books[session][layer][head][i * KV_BLOCK_TOKENS / CHAPTER]);
            n_celled += book->n_celled;
            n_summarised += book->summaries.n_rows;
        }
    }
    /* There is something of every kind. */
    assert_true(n_coded > 0 && n_celled > 0 && n_summarised > 0);
}

static bool has_same_codes(const struct kvs_codes *codes, const struct block_copy *copy)
{
    return codes->column.bytes == NULL ||
           memcmp(codes->column.bytes, copy->codes, codes->column.n_bytes) == 0;
}

static bool has_same_learnt(const struct kvs_codebook *book, const struct book_copy *copy)
{
    return !book->is_broken &&
           memcmp(book->learnt.bytes, copy->learnt, book->learnt.n_bytes) == 0;
}

static bool has_same_cells(const struct kvs_codebook *book, const struct book_copy *copy)
{
    return book->n_cells_lost == 0 && book->n_celled == copy->n_celled &&
           (kvs_codebook_lists(book) == NULL || memcmp(kvs_codebook_lists(book), copy->cells,
                                                       n_cells(book) * sizeof(uint32_t)) == 0);
}

static bool has_same_summaries(const struct kvs_codebook *book, const struct book_copy *copy)
{
    return book->n_summaries_lost == 0 && book->summaries.n_rows == copy->n_summarised &&
           (copy->n_summarised == 0 || memcmp(book->summaries.groups[0].bytes, copy->group,
                                              kv_summary_bytes(&book->summaries.shape)) == 0);
}

static bool is_same_book(const struct kvs_codebook *book, const struct book_copy *copy)
{
    return book != NULL && has_same_learnt(book, copy) && has_same_cells(book, copy) &&
           has_same_summaries(book, copy);
}

/* NULL: all is as it was when it was copied. */
static const char *difference(void)
{
    static char text[128];

    for (unsigned at = 0; at < 2 * UNITS; at++) {
        const unsigned session = at / UNITS, layer = at / HEADS % LAYERS, head = at % HEADS;
        const struct kvs_unit *unit = unit_at(session, layer, head);

        for (uint32_t i = 0; i < BLOCKS; i++) {
            const struct kvs_codes *codes = kvs_unit_codes(unit, i);
            const uint8_t *rows = kvs_unit_row(unit, i * KV_BLOCK_TOKENS);
            const uint32_t *crcs = kvs_unit_crc(unit, i * KV_BLOCK_TOKENS);
            const struct block_copy *copy = &it.blocks[session][layer][head][i];
            const uint32_t n = TOKENS - i * KV_BLOCK_TOKENS < KV_BLOCK_TOKENS
                                   ? TOKENS - i * KV_BLOCK_TOKENS
                                   : KV_BLOCK_TOKENS;
            const struct kvs_codebook *book = book_at(unit, i);
            const char *what = NULL;

            if (memcmp(rows, copy->rows, (size_t)n * ROW_BYTES) != 0)
                what = "rows";
            else if (memcmp(crcs, copy->crcs, n * sizeof(uint32_t)) != 0)
                what = "checksums";
            else if (kvs_segment_has_bad(kvs_unit_block(unit, i), unit->at))
                what = "marks";
            else if (codes->n_coded != copy->n_coded || codes->n_lost > 0)
                what = "codes, how many";
            else if (!has_same_codes(codes, copy))
                what = "codes";
            else if (book != NULL && book->block_begin == i &&
                     !is_same_book(
                         book, &it.books[session][layer][head][i * KV_BLOCK_TOKENS / CHAPTER]))
                what = "codebook";
            if (what == NULL)
                continue;
            snprintf(text, sizeof(text), "session %u, layer %u, head %u, block %u: %s", session,
                     layer, head, i, what);
            return text;
        }
    }
    return NULL;
}

/* ---- flips ------------------------------------------------------------------------------- */

static void flip_bit(void *memory, size_t bytes)
{
    const uint64_t bit = kv_random_below(&it.random, 8 * bytes);

    ((uint8_t *)memory)[bit / 8] ^= (uint8_t)(1 << bit % 8);
}

/* Of a segment's codes, or of the copies behind them, which are most of the column. */
static void flip_codes(const struct kvs_codebook *book, const struct kvs_codes *codes)
{
    const size_t of_copies = copies_bytes(book, codes);
    uint8_t *bytes = codes->column.bytes;

    if (below(2) == 0)
        flip_bit(bytes + codes->column.n_bytes - of_copies, of_copies);
    else
        flip_bit(bytes, kv_tile_bytes(&book->shape));
}

/* Of a codebook, the mean of its keys, or their rotation: they are found and mended as one. */
static void flip_learnt(struct kvs_codebook *book)
{
    const uint32_t part = below(4);

    if (book->rotation != NULL && part < 2)
        flip_bit(book->rotation->matrix.bytes, book->rotation->matrix.n_bytes);
    else if (part == 2)
        flip_bit(kvs_codebook_mean(book), D * sizeof(float));
    else
        flip_bit(book->learnt.bytes, book->learnt.n_bytes);
}

static bool is_same_place(const struct flip *a, const struct flip *b)
{
    if (a->kind == OBJECT || b->kind == OBJECT)
        return a->kind == b->kind && a->object == b->object;
    return a->session == b->session && a->layer == b->layer && a->head == b->head &&
           (a->kind == b->kind || (a->kind <= CRC && b->kind <= CRC)) && a->token == b->token;
}

static struct kvs_stored_object *object_at(unsigned which)
{
    struct kvs_stored_object *stored = data()->objects.first;

    while (stored != NULL && stored->bytes != it.object_bytes[which])
        stored = stored->next;
    assert_non_null(stored);
    return stored;
}

/* One somewhere; false: there is nothing of the kind at the place, or a flip already. */
static bool plant(void)
{
    struct flip flip = {.kind = (enum kind)below(KINDS), .session = below(2)};
    struct kvs_unit *unit;
    struct kvs_codebook *book;

    flip.layer = below(LAYERS);
    flip.head = below(HEADS);
    flip.object = below(OBJECTS);
    flip.token = below(TOKENS);
    if (flip.kind == CODES)
        flip.token -= flip.token % KV_BLOCK_TOKENS;
    else if (flip.kind > CODES)
        flip.token = flip.session == OPEN ? 0 : flip.token - flip.token % CHAPTER;
    for (unsigned i = 0; i < it.n_flips; i++)
        if (is_same_place(&it.flips[i], &flip))
            return false;
    unit = unit_at(flip.session, flip.layer, flip.head);
    const struct kvs_codes *codes = kvs_unit_codes(unit, flip.token / KV_BLOCK_TOKENS);
    book = book_at(unit, flip.token / KV_BLOCK_TOKENS);
    if (flip.kind >= CODES && flip.kind < OBJECT && book == NULL)
        return false;
    switch (flip.kind) {
    case ROW:
        flip_bit(kvs_unit_row(unit, flip.token), ROW_BYTES);
        break;
    case CRC:
        flip_bit(kvs_unit_crc(unit, flip.token), sizeof(uint32_t));
        break;
    case CODES:
        flip_codes(book, codes);
        break;
    case CENTROIDS:
        flip_learnt(book);
        break;
    case CELLS:
        if (kvs_codebook_lists(book) == NULL)
            return false;
        flip_bit(kvs_codebook_lists(book), n_cells(book) * sizeof(uint32_t));
        break;
    case SUMMARIES:
        if (book->summaries.n_rows == 0)
            return false;
        flip_bit(book->summaries.groups[0].bytes, kv_summary_bytes(&book->summaries.shape));
        break;
    default: {
        struct kvs_stored_object *stored = object_at(flip.object);
        const uint32_t piece = below(stored->n_pieces);

        flip_bit(stored->pieces[piece].bytes, kvs_object_piece_bytes(stored->bytes, piece));
    }
    }
    it.flips[it.n_flips++] = flip;
    counted.flips[flip.kind]++;
    return true;
}

/* The flip of a row that a failure names, in words; NULL: it names none that was flipped. */
static const struct flip *named(unsigned session, const char *detail)
{
    const char *at = strstr(detail, "layer ");
    unsigned layer, head, token;

    if (at == NULL ||
        (sscanf(at, "layer %u head %u token %u", &layer, &head, &token) != 3 &&
         sscanf(at, "layer %u, kv head %u, token %u", &layer, &head, &token) != 3))
        return NULL;
    for (unsigned i = 0; i < it.n_flips; i++) {
        const struct flip *flip = &it.flips[i];

        if (flip->kind <= CRC && flip->session == owner_of(session) && flip->layer == layer &&
            flip->head == head && flip->token == token)
            return flip;
    }
    return NULL;
}

/* An operation on rows failed: that must be for a row that was flipped, and is named. */
static void check_failure(unsigned session, struct kv_op *op, const char *what)
{
    if (kv_op_status(op) != KV_CORRUPT || named(session, kv_op_detail(op)) == NULL) {
        for (unsigned i = 0; i < it.n_flips; i++)
            print_error("flip: kind %d: session %u layer %u head %u token %u\n",
                        (int)it.flips[i].kind, it.flips[i].session, it.flips[i].layer,
                        it.flips[i].head, it.flips[i].token);
        fail_msg("%s: %s: %s", what, kv_status_name(kv_op_status(op)), kv_op_detail(op));
    }
    counted.refusals++;
}

/* ---- queries ----------------------------------------------------------------------------- */

/* What is asked of one head, and the answer. */
static struct {
    unsigned session, layer, head;
    float vectors[QUERIES][D];
    struct kv_range ranges[2];
    struct kv_query query;
    struct kv_query_result found;
    bool is_candidate[TOKENS], is_chosen[TOKENS], is_scored[TOKENS];
} q;

static void make_query(void)
{
    static const enum kv_answer answers[] = {KV_ANSWER_IDS, KV_ANSWER_ROWS, KV_ANSWER_ATTEND,
                                             KV_ANSWER_ATTEND};
    static const enum kv_merge merges[] = {KV_MERGE_SUM, KV_MERGE_MAX, KV_MERGE_UNION};

    q.session = below(SESSIONS);
    q.layer = below(LAYERS);
    q.head = below(HEADS);
    if (below(3) > 0 && it.n_flips > 0) { /* near a flip */
        const struct flip *flip = &it.flips[below(it.n_flips)];

        if (owner_of(q.session) != flip->session)
            q.session = flip->session;
        q.layer = flip->layer;
        q.head = flip->head;
    }
    const uint32_t end = lengths[q.session];
    for (unsigned i = 0; i < QUERIES; i++)
        for (unsigned j = 0; j < D; j++)
            q.vectors[i][j] = (float)((int)below(2001) - 1000) / 1000;
    q.ranges[0] = (struct kv_range){below(4), end - below(200)};
    if (below(3) == 0) {
        q.ranges[0].end = 1 + q.ranges[0].begin + below(end / 2);
        q.ranges[1] = (struct kv_range){end / 2 + 10 + below(200), end};
    } else {
        q.ranges[1].end = 0;
    }
    q.query = (struct kv_query){
        .layer = q.layer,
        .kv_head_begin = q.head,
        .n_kv_heads = 1,
        .n_queries = 1 + below(QUERIES),
        .queries = q.vectors[0],
        .scale = 0.25f,
        .merge = merges[below(3)],
        .answer = answers[below(4)],
        .k = below(8) == 0 ? TOKENS : 1 + below(200),
        .rerank = below(2) == 0 ? 1 : 1 + below(8),
        .want_ids = false,
        .summaries = below(2) == 0 ? 16 : 0,
        .summary_rows = summary_rows,
        .n_ranges = q.ranges[1].end > 0 ? 2 : 1,
        .ranges = q.ranges,
    };
    /* A rest would weigh candidates by copies, and the model here knows their keys only. */
    if (q.query.summaries == 0 && below(2) == 0) {
        q.query.first_cut = KV_CUT_INT4;
        q.query.candidates = q.query.rerank + below(8);
        q.query.want_reads = true;
    }
    q.query.want_ids = q.query.answer == KV_ANSWER_ATTEND;
    if (q.query.k == TOKENS && q.query.answer == KV_ANSWER_ROWS)
        q.query.k = 200;
}

static const float *row_of(uint32_t token)
{
    return it.rows[owner_of(q.session)][q.layer][q.head][token];
}

static void note_answer(void)
{
    const struct kvs_query_entry *querier =
        &kvs_query_queue_of(data())->places[0].pipeline->entries[0];

    memset(q.is_candidate, 0, sizeof(q.is_candidate));
    memset(q.is_chosen, 0, sizeof(q.is_chosen));
    memset(q.is_scored, 0, sizeof(q.is_scored));
    for (uint32_t i = 0; i < q.query.n_ranges; i++)
        for (uint32_t token = q.ranges[i].begin; token < q.ranges[i].end; token++)
            q.is_candidate[token] = true;
    for (uint32_t i = 0; i < q.found.n_ids; i++) {
        assert_true(q.found.ids[i] < TOKENS && q.is_candidate[q.found.ids[i]]);
        assert_true(i == 0 || q.found.ids[i] > q.found.ids[i - 1]);
        q.is_chosen[q.found.ids[i]] = true;
    }
    if (q.query.summaries == 0 || querier->n_scored == 0)
        return;
    for (uint32_t i = 0; i < querier->n_scored; i++)
        q.is_scored[querier->kept_tokens[i]] = true;
}

/* A sum of weighed values. */
struct sum {
    double weight, values[D];
};

static void add(struct sum *sum, double weight, const float *values)
{
    sum->weight += weight;
    for (unsigned i = 0; i < D; i++)
        sum->values[i] += weight * (double)values[i];
}

static double score_of(const float *vector, const float *key)
{
    double score = 0;

    for (unsigned i = 0; i < D; i++)
        score += (double)vector[i] * (double)key[i];
    return score * (double)q.query.scale;
}

/* A chapter's rows that were not chosen, by its summaries (kernels/estimate.h). */
static uint32_t add_summaries(unsigned chapter, const float *vector, struct sum *sum)
{
    const struct kv_summary_shape shape = {KV_KEY_FP16, D, D, KV_SUMMARY_16, summary_rows};
    const uint8_t *group = it.books[owner_of(q.session)][q.layer][q.head][chapter].group;
    const uint8_t *numbers = group + kv_summary_at_numbers(&shape);
    const int8_t *keys = (const int8_t *)group + kv_summary_at_keys(&shape);
    const int8_t *means = (const int8_t *)group + kv_summary_at_values(&shape);
    float key_scales[16], value_scales[16];
    uint32_t counts[16] = {0}, n = 0;
    struct kv_summary_head head;
    double square = 0;

    memcpy(&head, group, sizeof(head));
    memcpy(key_scales, group + kv_summary_at_key_scales(&shape), sizeof(key_scales));
    memcpy(value_scales, group + kv_summary_at_value_scales(&shape), sizeof(value_scales));
    for (unsigned i = 0; i < D; i++)
        square += (double)vector[i] * (double)vector[i];
    const double by = (double)q.query.scale;
    const double corr = fmin(1, 0.15 * square * by * by * (double)head.variance);
    for (unsigned s = 0; s < 16; s++) {
        double score = 0, weight;
        float values[D];

        for (unsigned i = 0; i < D; i++) {
            score += (double)vector[i] * keys[kv_summary_key_element(&shape, s, i)];
            values[i] = value_scales[s] * means[kv_summary_value_element(&shape, s, i)];
        }
        weight = 0;
        for (uint32_t row = 0; row < CHAPTER; row++) {
            const uint32_t token = chapter * CHAPTER + row;

            if (numbers[row] != s || !q.is_candidate[token] || q.is_chosen[token])
                continue;
            n++;
            if (q.is_scored[token])
                weight += exp(score_of(vector, row_of(token)));
            else
                counts[s]++;
        }
        weight += counts[s] * exp(score * (double)key_scales[s] * by + corr);
        add(sum, weight, values);
    }
    return n;
}

/* How far the answer for a vector is from what it should be, were the chapters of `summarised`
 * estimated and all other rows attended; infinite: not by so many rows. */
static double error_of(unsigned vector, unsigned summarised)
{
    const float *output = q.found.outputs + (size_t)vector * D;
    struct sum sum = {0};
    uint32_t n_rest = 0;
    double error = 0;

    for (uint32_t token = 0; token < TOKENS; token++) {
        const bool is_estimated =
            !q.is_chosen[token] && (summarised >> token / CHAPTER & 1) != 0;
        const bool counts = q.query.answer == KV_ANSWER_ATTEND || !q.is_chosen[token];

        if (q.is_candidate[token] && counts && !is_estimated &&
            (q.is_chosen[token] || q.query.summaries != 0))
            add(&sum, exp(score_of(q.vectors[vector], row_of(token))), row_of(token) + D);
    }
    for (unsigned chapter = 0; chapter < CHAPTERS_MAX; chapter++)
        if (summarised >> chapter & 1)
            n_rest += add_summaries(chapter, q.vectors[vector], &sum);
    if (n_rest != q.found.n_estimated)
        return INFINITY;
    if (sum.weight == 0)
        return q.found.lses[vector] == -INFINITY ? 0 : INFINITY;
    for (unsigned i = 0; i < D; i++)
        error = fmax(error, fabs((double)output[i] - sum.values[i] / sum.weight));
    return fmax(error, fabs((double)q.found.lses[vector] - log(sum.weight)));
}

/* A candidate that was scored by a flipped key, and not chosen: it weighs in the estimate. */
static bool weighs_in(void)
{
    for (unsigned i = 0; i < it.n_flips; i++) {
        const struct flip *flip = &it.flips[i];

        if (flip->kind == ROW && flip->session == owner_of(q.session) &&
            flip->layer == q.layer && flip->head == q.head && q.is_scored[flip->token] &&
            !q.is_chosen[flip->token])
            return true;
    }
    return false;
}

static void check_outputs(void)
{
    unsigned possible = 0;

    if (q.query.summaries == 0) {
        assert_int_equal(q.found.n_estimated, 0);
    } else {
        counted.rest++;
        for (unsigned chapter = 0; chapter < CHAPTERS_MAX; chapter++) {
            const struct book_copy *copy =
                &it.books[owner_of(q.session)][q.layer][q.head][chapter];

            if (copy->n_summarised > 0 && chapter * CHAPTER < lengths[q.session])
                possible |= 1u << chapter;
        }
    }
    for (unsigned vector = 0; vector < q.query.n_queries; vector++) {
        double least = INFINITY;

        for (unsigned subset = possible;; subset = (subset - 1) & possible) {
            least = fmin(least, error_of(vector, subset));
            if (subset == 0)
                break;
        }
        if (weighs_in() ? !isfinite(least) : !(least < 1e-3))
            fail_msg("vector %u: an output is %g from that over rows as they were written",
                     vector, least);
    }
}

/* Summaries that a query with a rest used are good, or gone. */
static void check_summaries(void)
{
    const struct kvs_unit *unit = unit_at(q.session, q.layer, q.head);

    for (unsigned chapter = 0; q.query.summaries != 0 && chapter < CHAPTERS_MAX; chapter++) {
        const uint32_t block = chapter * (CHAPTER / KV_BLOCK_TOKENS);
        bool is_used = false;

        for (uint32_t token = chapter * CHAPTER; token < (chapter + 1) * CHAPTER; token++)
            is_used = is_used || (token < TOKENS && q.is_candidate[token]);
        if (!is_used || block * KV_BLOCK_TOKENS >= lengths[q.session])
            continue;
        const struct kvs_codebook *book = book_at(unit, block);
        if (book != NULL && !book->is_broken && book->summaries.n_rows > 0)
            assert_memory_equal(book->summaries.groups[0].bytes,
                                it.books[owner_of(q.session)][q.layer][q.head][chapter].group,
                                kv_summary_bytes(&book->summaries.shape));
    }
}

static void check_found_rows(void)
{
    for (uint32_t i = 0; i < q.found.n_rows; i++) {
        uint16_t row[2 * D];

        for (unsigned j = 0; j < 2 * D; j++)
            row[j] = half_of(row_of(q.found.ids[i])[j]);
        assert_memory_equal((const uint8_t *)q.found.rows + (size_t)i * ROW_BYTES, row,
                            ROW_BYTES);
    }
}

static void ask(void)
{
    const struct kv_rows_io io = {.buffer = it.in};
    struct kv_query_reads reads;
    struct kv_op *op = NULL;

    make_query();
    assert_int_equal(kv_query_begin(it.sessions[q.session], &q.query,
                                    q.query.answer == KV_ANSWER_ROWS ? &io : NULL, 0, &op),
                     KV_OK);
    if (run(op) != KV_OK) {
        check_failure(q.session, op, "query");
        kv_op_free(op);
        return;
    }
    counted.answers++;
    assert_int_equal(kv_op_query_result(op, 0, &q.found), KV_OK);
    kv_op_query_reads(op, &reads);
    counted.cuts += reads.copies > 0;
    note_answer();
    check_found_rows();
    if (q.found.outputs != NULL)
        check_outputs();
    check_summaries();
    kv_op_free(op);
}

/* Rows in order. */
static void read_some(void)
{
    const unsigned session = below(SESSIONS);
    const struct kv_rows box = {.layer_begin = below(LAYERS),
                                .n_layers = 1,
                                .token_begin = below(lengths[session] - 400),
                                .n_tokens = 1 + below(400)};
    const struct kv_rows_io io = {.buffer = it.in};
    struct kv_op *op = NULL;

    assert_int_equal(kv_read_begin(it.sessions[session], &box, &io, 0, &op), KV_OK);
    if (run(op) == KV_OK) {
        const size_t bytes = write_box(owner_of(session), &box, kv_buffer_data(it.out));

        assert_memory_equal(kv_buffer_data(it.in), kv_buffer_data(it.out), bytes);
        counted.answers++;
    } else {
        check_failure(session, op, "read");
    }
    kv_op_free(op);
}

static void get_some(void)
{
    const unsigned which = below(OBJECTS);
    const kv_status_t status = object(KV_OBJECT_GET, which);
    bool is_flipped = false;

    for (unsigned i = 0; i < it.n_flips; i++)
        is_flipped = is_flipped || (it.flips[i].kind == OBJECT && it.flips[i].object == which);
    assert_int_equal(status, is_flipped ? KV_CORRUPT : KV_OK);
}

static void ask_some(void)
{
    for (unsigned i = 0; i < 5; i++)
        ask();
    read_some();
    get_some();
}

/* ---- a round ----------------------------------------------------------------------------- */

/* Until a pass that begins now has ended, and what jobs it queued. */
static void scrub(void)
{
    struct kvs_scrub_progress progress;
    struct kvs_indexer_stats jobs;

    kvs_scrub_get_progress(data()->background_state[KVS_BACKGROUND_SCRUB], &progress);
    const uint64_t end = progress.n_passes + 2;
    do {
        step(500);
        kvs_scrub_get_progress(data()->background_state[KVS_BACKGROUND_SCRUB], &progress);
        kvs_indexer_get_stats(data()->indexer, &jobs);
    } while (progress.n_passes < end || jobs.n_jobs > 0);
    counted.passes++;
}

static bool is_found(const struct flip *flip)
{
    if (flip->kind == OBJECT)
        return kvs_object_n_bad(object_at(flip->object)) > 0;
    const struct kvs_unit *unit = unit_at(flip->session, flip->layer, flip->head);
    if (flip->kind <= CRC)
        return kvs_unit_is_bad(unit, flip->token);
    /* These are known by what became of them. */
    const uint32_t block = flip->token / KV_BLOCK_TOKENS;
    const struct block_copy *copy = &it.blocks[flip->session][flip->layer][flip->head][block];
    const struct book_copy *book_copy =
        &it.books[flip->session][flip->layer][flip->head][block * KV_BLOCK_TOKENS / CHAPTER];
    const struct kvs_codebook *book = book_at(unit, block);
    if (book == NULL || book->is_broken)
        return true;
    switch (flip->kind) {
    case CODES:
        return kvs_unit_codes(unit, block)->n_lost > 0 ||
               has_same_codes(kvs_unit_codes(unit, block), copy);
    case CENTROIDS:
        return has_same_learnt(book, book_copy);
    case CELLS:
        return book->n_cells_lost > 0 || has_same_cells(book, book_copy);
    default:
        return book->n_summaries_lost > 0 || has_same_summaries(book, book_copy);
    }
}

/* What was flipped in rows and objects, from whoever has it. */
static void put_again(void)
{
    for (unsigned i = 0; i < it.n_flips; i++) {
        const struct flip *flip = &it.flips[i];
        /* By message or by bulk; from before, and to behind it. */
        const uint32_t n = below(2) == 0 ? 1 : 300;
        const uint32_t least = flip->token < n ? 0 : flip->token - n + 1;
        unsigned session = flip->session;
        uint32_t begin = least + below(flip->token - least + 1);

        if (flip->kind == OBJECT)
            assert_int_equal(object(KV_OBJECT_PUT, flip->object), KV_OK);
        if (flip->kind > CRC)
            continue;
        if (session == BY_CHAPTER && begin + n <= FORKED && below(2) == 0)
            session = FORK;
        if (begin + n > lengths[session])
            begin = lengths[session] - n;
        put(session, flip->layer, 1, begin, n);
    }
}

static void round_of_flips(unsigned round)
{
    const unsigned n = 1 + below(FLIPS_AT_ONCE);
    const bool waits = below(4) > 0; /* else the put itself is the first to see */
    const char *why;

    it.n_flips = 0;
    while (it.n_flips < n)
        (void)plant();
    if (waits) {
        ask_some();
        scrub();
        for (unsigned i = 0; i < it.n_flips; i++)
            if (!is_found(&it.flips[i]))
                fail_msg("round %u: a flip in %s is not found in one pass: session %u, layer "
                         "%u, head %u, token %u",
                         round, kind_names[it.flips[i].kind], it.flips[i].session,
                         it.flips[i].layer, it.flips[i].head, it.flips[i].token);
        ask_some();
    }
    put_again();
    assert_int_equal(data()->store.health.rows_bad, 0);
    assert_int_equal(data()->store.health.objects_bad, 0);
    for (unsigned i = 0; i < 3 && difference() != NULL; i++)
        scrub();
    why = difference();
    if (why != NULL)
        fail_msg("round %u: not as before: %s", round, why);
    it.n_flips = 0;
    ask_some();
}

/* The object that the scrub is in the middle of goes, a smaller one comes to lie in its place,
 * and what was between them in the list goes, too: the smaller one is looked at from its begin.
 */
static void objects_go_while_the_scrub_is_at_them(void **state)
{
    enum {
        LARGE,
        BEHIND,
        SMALL
    };
    static const uint64_t sizes[] = {3 << 20, 1, 2};
    const uint64_t begun = KV_WIRE_BULK_MAX * 3 / 2, ends = KV_WIRE_BULK_MAX * 5 / 2;
    const struct kvs_stored_object *large;
    struct kvs_scrub_progress progress;

    (void)state;
    open_node();
    memcpy(it.object_bytes, sizes, sizeof(sizes));
    assert_int_equal(object(KV_OBJECT_PUT, LARGE), KV_OK);
    assert_int_equal(object(KV_OBJECT_PUT, BEHIND), KV_OK);
    large = object_at(LARGE);
    do {
        step(STEP_US);
        kvs_scrub_get_progress(data()->background_state[KVS_BACKGROUND_SCRUB], &progress);
    } while (data()->objects.looked != large || progress.pass_bytes < begun ||
             progress.pass_bytes > ends);

    assert_int_equal(object(KV_OBJECT_DELETE, LARGE), KV_OK);
    assert_int_equal(object(KV_OBJECT_PUT, SMALL), KV_OK);
    assert_ptr_equal(object_at(SMALL), large);
    assert_int_equal(object(KV_OBJECT_DELETE, BEHIND), KV_OK);
    assert_ptr_equal(data()->objects.looked, large);
    scrub();
    assert_int_equal(data()->store.health.objects_bad, 0);
    assert_int_equal(object(KV_OBJECT_GET, SMALL), KV_OK);
    close_node();
}

static void flip_centroid(struct kvs_unit *unit)
{
    struct kvs_codebook *book = book_at(unit, 0);

    assert_non_null(book);
    flip_bit(book->learnt.bytes, book->learnt.n_bytes);
}

/* A clock at which every piece of work is a slice. */
static uint64_t hurry(const struct kv_clock *clock)
{
    (void)clock;
    return it.clock.virtual_us += KV_SLICE_US;
}

/* While a query is in the middle of codes, they stay; the scrub goes on all the same. */
static void queries_do_not_stop_the_scrub(void **state)
{
    struct kvs_scrub_progress progress = {0};
    const struct kvs_codebook *book;
    struct kvs_scrub *scrub;
    struct kv_op *op = NULL;

    (void)state;
    kv_random_init(&it.random, 4);
    scrub_bytes = 0;
    open_node();
    fill_node();
    scrub = kvs_scrub_create(data(), SCRUB_BYTES);
    assert_non_null(scrub);
    flip_centroid(unit_at(BY_CHAPTER, 0, 0));
    make_query();
    q.query.answer = KV_ANSWER_IDS;
    q.query.want_ids = false;
    assert_int_equal(kv_query_begin(it.sessions[q.session], &q.query, NULL, 0, &op), KV_OK);
    const struct kv_clock still = it.clock;
    it.clock.now_us = hurry;
    while (kvs_query_pipeline_is_between(kvs_query_queue_of(data())->places[0].pipeline))
        step(STEP_US);
    it.clock.now_us = still.now_us;
    for (unsigned i = 0; i < 10000 && progress.n_passes < 2; i++) {
        it.clock.virtual_us += 10000;
        data()->now_us = it.clock.virtual_us;
        kvs_scrub_step(scrub);
        kvs_scrub_get_progress(scrub, &progress);
    }
    assert_int_equal(progress.n_passes, 2);
    assert_true(book_at(unit_at(BY_CHAPTER, 0, 0), 0)->is_broken);
    assert_int_equal(run(op), KV_OK);
    kv_op_free(op);
    for (unsigned i = 0; i < 10000 && progress.n_passes < 4; i++) {
        step(10000);
        kvs_scrub_step(scrub);
        kvs_scrub_get_progress(scrub, &progress);
    }
    while (kvs_indexer_step(data()->indexer))
        ;
    book = book_at(unit_at(BY_CHAPTER, 0, 0), 0);
    assert_true(book != NULL && !book->is_broken);
    kvs_scrub_destroy(scrub);
    close_node();
    scrub_bytes = SCRUB_BYTES;
}

static void close_session(unsigned session)
{
    struct kv_op *op = NULL;
    const kv_status_t status = kv_close_begin(it.sessions[session], 0, &op);

    run_well(status, op, "close");
    kv_session_free(it.sessions[session]);
}

/* A session with chapters, and a fork of less than the first, which the scrub comes to first.
 */
static void fork_chapter(uint32_t blocks, uint32_t forked)
{
    const uint16_t heads[LAYERS] = {HEADS, HEADS};
    struct kv_op *op = NULL;
    kv_status_t status;

    test_model(&it.model, "flips", LAYERS, heads, D, D);
    make_rows();
    status = kv_open_begin(it.client, &it.model, NULL, 0, &op);
    it.sessions[OPEN] = session_of(status, op);
    status = kv_open_begin(it.client, &it.model, NULL, 0, &op);
    it.sessions[BY_CHAPTER] = session_of(status, op);
    for (uint32_t begin = 0; begin < TOKENS; begin += 1000)
        put(BY_CHAPTER, 0, LAYERS, begin, 1000);
    make_index(BY_CHAPTER, blocks, 16);
    close_session(OPEN);
    status = kv_fork_begin(it.sessions[BY_CHAPTER], forked, 0, &op);
    it.sessions[FORK] = session_of(status, op);
    assert_true(it.sessions[FORK]->nodes[0].index < it.sessions[BY_CHAPTER]->nodes[0].index);
}

/* A slice of the scrub looks at a limited number of segments, even if all of them were checked
 * before, or have no rows. */
static void long_sessions_take_many_slices(void **state)
{
    enum {
        MANY = 1000, /* blocks */
        LEAST = 3    /* slices */
    };
    const uint16_t heads[LAYERS] = {HEADS, HEADS};
    struct kvs_scrub_progress progress;
    struct kvs_scrub *scrub;
    struct kv_op *op = NULL;
    unsigned n_slices = 0;

    (void)state;
    scrub_bytes = 0;
    open_node();
    test_model(&it.model, "flips", LAYERS, heads, D, D);
    const kv_status_t status = kv_open_begin(it.client, &it.model, NULL, 0, &op);
    it.sessions[OPEN] = session_of(status, op);
    struct kvs_unit *unit = unit_at(OPEN, 0, 0);
    assert_int_equal(kvs_unit_reserve(unit, MANY * KV_BLOCK_TOKENS), KV_OK);
    unit->committed = unit->reserved;
    for (uint32_t i = 0; i < MANY; i++) { /* as if a session that shares them had come first */
        unit->blocks->list[i]->pass = 1;
        unit->blocks->list[i]->n_checked = KV_BLOCK_TOKENS;
    }
    scrub = kvs_scrub_create(data(), SCRUB_BYTES);
    assert_non_null(scrub);
    do {
        it.clock.virtual_us += 10000;
        data()->now_us = it.clock.virtual_us;
        kvs_scrub_step(scrub);
        kvs_scrub_get_progress(scrub, &progress);
        n_slices += progress.phase == KVS_SCRUB_ROWS;
    } while (progress.phase == KVS_SCRUB_ROWS);
    assert_int_equal(progress.bytes, 0);
    kvs_scrub_destroy(scrub);
    kvs_unit_truncate(unit, 0);
    close_node();
    scrub_bytes = SCRUB_BYTES;
    assert_true(n_slices >= LEAST);
}

/* Rows of a shared block that only the session which the scrub comes to later has. */
static void shared_blocks_are_scrubbed_whole(void **state)
{
    enum {
        SHARED = 2 * KV_BLOCK_TOKENS + 60
    };
    const struct kvs_unit *fork, *unit;

    (void)state;
    kv_random_init(&it.random, 6);
    open_node();
    fork_chapter(16, SHARED);
    fork = unit_at(FORK, 1, 1);
    unit = unit_at(BY_CHAPTER, 1, 1);
    assert_ptr_equal(kvs_unit_block(fork, 2), kvs_unit_block(unit, 2));
    flip_bit(kvs_unit_row(unit, SHARED + 10), ROW_BYTES);
    flip_bit(kvs_unit_row(unit, SHARED - 10), ROW_BYTES);
    scrub();
    assert_true(kvs_unit_is_bad(unit, SHARED + 10));
    assert_true(kvs_unit_is_bad(unit, SHARED - 10) && kvs_unit_is_bad(fork, SHARED - 10));
    assert_int_equal(data()->store.health.rows_bad, 2);
    close_node();
}

/* What is lost of a chapter that sessions share is made again as far as one of them has it, not
 * as far as the first one has. */
static void chapters_are_made_again(uint32_t rows_of_group)
{
    enum {
        CHAPTER_BLOCKS = 16,
        FORKED_BLOCKS = 11
    };
    const struct kvs_unit *unit;
    struct kvs_codebook *book;

    summary_rows = rows_of_group;
    kv_random_init(&it.random, 3);
    open_node();
    fork_chapter(CHAPTER_BLOCKS, FORKED_BLOCKS * KV_BLOCK_TOKENS);
    unit = unit_at(BY_CHAPTER, 0, 0);
    scrub();
    flip_centroid(unit_at(BY_CHAPTER, 0, 0));
    scrub();
    scrub();
    book = book_at(unit, 0);
    assert_true(book != NULL && !book->is_broken);
    for (uint32_t i = 0; i < CHAPTER_BLOCKS; i++) {
        assert_int_equal(kvs_unit_codes(unit, i)->n_coded, KV_BLOCK_TOKENS);
        assert_ptr_equal(book_at(unit, i), book);
    }
    assert_int_equal(book->summaries.n_rows, CHAPTER_BLOCKS * KV_BLOCK_TOKENS);

    /* Nobody has the rest of it any more. */
    close_session(BY_CHAPTER);
    scrub();
    flip_bit(book->summaries.groups[0].bytes, kv_summary_bytes(&book->summaries.shape));
    flip_bit(kvs_codebook_lists(book), n_cells(book) * sizeof(uint32_t));
    scrub();
    scrub();
    assert_ptr_equal(book_at(unit_at(FORK, 0, 0), 0), book);
    assert_int_equal(book->summaries.n_rows, FORKED_BLOCKS * KV_BLOCK_TOKENS);
    assert_int_equal(book->summaries.shape.rows, rows_of_group);
    assert_int_equal(book->n_celled, FORKED_BLOCKS * KV_BLOCK_TOKENS);
    assert_int_equal(book->n_summaries_lost, 0);
    assert_int_equal(book->n_cells_lost, 0);
    close_node();
    summary_rows = 1024;
}

static void chapters_are_made_again_whole(void **state)
{
    (void)state;
    chapters_are_made_again(1024);
    chapters_are_made_again(3072);
}

/* Returns a checksum over those of all columns of the unit's first chapter; fails unless each is
 * sound. */
static uint32_t columns_crc(const struct kvs_unit *unit, uint32_t blocks)
{
    const struct kvs_codebook *book = book_at(unit, 0);
    const struct kvs_column *of_book[] = {&book->learnt, &book->lists,
                                          &book->summaries.groups[0]};
    uint32_t crc = 0;

    for (uint32_t i = 0; i < blocks; i++) {
        const struct kvs_column *column = &kvs_unit_codes(unit, i)->column;

        assert_true(kvs_column_is_sound(column));
        assert_ptr_equal(book_at(unit, i), book);
        crc = kv_crc32c(crc, &column->crc, sizeof(column->crc));
    }
    for (unsigned i = 0; i < sizeof(of_book) / sizeof(of_book[0]); i++) {
        assert_true(kvs_column_is_sound(of_book[i]));
        crc = kv_crc32c(crc, &of_book[i]->crc, sizeof(of_book[i]->crc));
    }
    return crc;
}

/* What another build made in another format is not found bad, but made again from the rows. */
static void older_versions_are_made_again(void **state)
{
    enum {
        CHAPTER_BLOCKS = 16
    };
    struct kvs_codebook *book;
    struct kvs_unit *unit;
    uint32_t before, codebook;

    (void)state;
    kv_random_init(&it.random, 7);
    open_node();
    fork_chapter(CHAPTER_BLOCKS, 3 * KV_BLOCK_TOKENS);
    unit = unit_at(BY_CHAPTER, 0, 0);
    book = book_at(unit, 0);
    before = columns_crc(unit, CHAPTER_BLOCKS);
    for (uint32_t i = 0; i < CHAPTER_BLOCKS; i += 3)
        kvs_block_codes_make(&data()->store, kvs_unit_block(unit, i), unit->at)
            ->column.version--;
    book->lists.version++;
    book->summaries.groups[0].version--;
    scrub();
    scrub();
    assert_ptr_equal(book_at(unit, 0), book);
    assert_int_equal(columns_crc(unit, CHAPTER_BLOCKS), before);

    codebook = kvs_unit_codes(unit, 0)->codebook;
    book->learnt.version--;
    scrub();
    scrub();
    assert_int_not_equal(kvs_unit_codes(unit, 0)->codebook, codebook);
    assert_int_equal(columns_crc(unit, CHAPTER_BLOCKS), before);
    for (unsigned i = 0; i < KVS_KINDS; i++)
        assert_int_equal(data()->store.health.found[i], 0);
    close_node();
}

static void scrub_passes(struct kvs_scrub *scrub, uint64_t n)
{
    struct kvs_scrub_progress progress;

    kvs_scrub_get_progress(scrub, &progress);
    for (const uint64_t end = progress.n_passes + n; progress.n_passes < end;
         kvs_scrub_get_progress(scrub, &progress)) {
        it.clock.virtual_us += 10000;
        data()->now_us = it.clock.virtual_us;
        kvs_scrub_step(scrub);
    }
}

/* A row goes bad while the codebook of its chapter is being replaced, too late for a codebook of
 * what follows: when the row is good again, the whole chapter gets one. */
static void chapters_are_replaced_whole(void **state)
{
    enum {
        CHAPTER_BLOCKS = 16,
        BAD_BLOCK = 10
    };
    const struct kvs_unit *unit;
    const struct kvs_codebook *book;
    struct kvs_codebook before;
    struct kvs_scrub *scrub;

    (void)state;
    kv_random_init(&it.random, 5);
    scrub_bytes = 0;
    open_node();
    fork_chapter(CHAPTER_BLOCKS, 3 * KV_BLOCK_TOKENS);
    scrub = kvs_scrub_create(data(), SCRUB_BYTES);
    assert_non_null(scrub);
    unit = unit_at(BY_CHAPTER, 0, 0);
    before = *book_at(unit, 0);
    scrub_passes(scrub, 2);
    const uint32_t broken = kvs_unit_codes(unit, 0)->codebook;
    flip_centroid(unit_at(BY_CHAPTER, 0, 0));
    scrub_passes(scrub, 1);
    const struct kv_clock still = it.clock;
    it.clock.now_us = hurry;
    while (kvs_unit_codes(unit, BAD_BLOCK - 1)->codebook == broken)
        assert_true(kvs_indexer_step(data()->indexer));
    it.clock.now_us = still.now_us;
    flip_bit(kvs_unit_row(unit, BAD_BLOCK * KV_BLOCK_TOKENS), 1);
    while (kvs_indexer_step(data()->indexer))
        ;
    assert_int_equal(kvs_unit_codes(unit, BAD_BLOCK)->codebook, broken);
    assert_true(kvs_unit_is_bad(unit, BAD_BLOCK * KV_BLOCK_TOKENS));
    scrub_passes(scrub, 3);
    assert_false(kvs_indexer_step(data()->indexer));

    put(BY_CHAPTER, 0, 1, BAD_BLOCK * KV_BLOCK_TOKENS, 1);
    scrub_passes(scrub, 2);
    while (kvs_indexer_step(data()->indexer))
        ;
    book = book_at(unit, 0);
    for (uint32_t i = 0; i < CHAPTER_BLOCKS; i++) {
        assert_int_equal(kvs_unit_codes(unit, i)->n_coded, KV_BLOCK_TOKENS);
        assert_ptr_equal(book_at(unit, i), book);
    }
    assert_false(book->is_broken);
    assert_int_equal(book->learnt.crc, before.learnt.crc);
    assert_int_equal(book->lists.crc, before.lists.crc);
    assert_int_equal(book->summaries.n_rows, before.summaries.n_rows);
    assert_int_equal(data()->store.health.found[KVS_KIND_CENTROIDS], 1);
    assert_int_equal(data()->store.health.mended[KVS_KIND_CENTROIDS], 1);
    kvs_scrub_destroy(scrub);
    close_node();
    scrub_bytes = SCRUB_BYTES;
}

/* The last segment of a chapter is absent while its codebook breaks: a fork that has only its
 * first ones does not get one for these. */
static void absent_segments_count_in_their_chapters(void **state)
{
    enum {
        CHAPTER_BLOCKS = 16,
        FORKED_BLOCKS = 11
    };
    const struct kvs_unit *unit;
    const struct kvs_codebook *book;
    struct kvs_codebook before;
    struct memory_tier tier;
    struct kvs_block *block;

    (void)state;
    kv_random_init(&it.random, 8);
    open_node();
    fork_chapter(CHAPTER_BLOCKS, FORKED_BLOCKS * KV_BLOCK_TOKENS);
    unit = unit_at(BY_CHAPTER, 0, 0);
    before = *book_at(unit, 0);
    memory_tier_init(&tier, &data()->store);
    block = kvs_unit_block(unit, CHAPTER_BLOCKS - 1);
    assert_int_equal(kvs_block_leave(&data()->store, block), KV_OK);
    while (block->residency != KVS_ABSENT)
        step(STEP_US);
    scrub();
    flip_centroid(unit_at(BY_CHAPTER, 0, 0));
    scrub();
    assert_true(book_at(unit, 0)->is_broken);
    assert_false(kvs_block_need(&data()->store, block));
    assert_true(memory_tier_bring_back(&tier, block));
    scrub();
    book = book_at(unit, 0);
    for (uint32_t i = 0; i < CHAPTER_BLOCKS; i++) {
        assert_int_equal(kvs_unit_codes(unit, i)->n_coded, KV_BLOCK_TOKENS);
        assert_ptr_equal(book_at(unit, i), book);
    }
    assert_false(book->is_broken);
    assert_int_equal(book->learnt.crc, before.learnt.crc);
    close_node();
}

/* Codes stay in memory when their rows leave it, and are scrubbed there; damaged ones are made again when the
 * rows are back. */
static void codes_of_absent_rows_are_scrubbed(void **state)
{
    enum {
        CHAPTER_BLOCKS = 16,
        AWAY = 3
    };
    const struct kvs_unit *unit;
    const struct kvs_codes *codes;
    struct memory_tier tier;
    struct kvs_block *block;
    uint32_t crc;

    (void)state;
    kv_random_init(&it.random, 9);
    open_node();
    fork_chapter(CHAPTER_BLOCKS, CHAPTER_BLOCKS * KV_BLOCK_TOKENS);
    unit = unit_at(BY_CHAPTER, 0, 0);
    block = kvs_unit_block(unit, AWAY);
    codes = kvs_unit_codes(unit, AWAY);
    crc = codes->column.crc;
    memory_tier_init(&tier, &data()->store);
    assert_true(memory_tier_keep(&tier, block));
    assert_true(kvs_segment_let_go(&data()->store, block, unit->at) > 0);
    scrub();
    assert_int_equal(data()->store.health.found[KVS_KIND_CODES], 0);
    ((uint8_t *)codes->column.bytes)[0] ^= 1;
    scrub();
    assert_int_equal(data()->store.health.found[KVS_KIND_CODES], 1);
    assert_int_equal(codes->n_lost, KV_BLOCK_TOKENS);
    scrub();
    assert_int_equal(data()->store.health.mended[KVS_KIND_CODES], 0);
    assert_true(kvs_block_restore(&data()->store, block, unit->at,
                                  memory_tier_find(&tier, block, unit->at)));
    scrub();
    assert_int_equal(data()->store.health.mended[KVS_KIND_CODES], 1);
    assert_int_equal(codes->n_lost, 0);
    assert_int_equal(codes->column.crc, crc);
    memory_tier_forget(&tier, block);
    close_node();
}

/* Where only the first segments of a chapter have a new codebook all get one. */
static void chapters_of_two_codebooks_are_made_again(void **state)
{
    enum {
        CHAPTER_BLOCKS = 16,
        FORKED_BLOCKS = 11
    };
    const struct kvs_unit *unit, *fork;
    const struct kvs_codebook *book;
    struct kvs_codebook before;

    (void)state;
    kv_random_init(&it.random, 9);
    open_node();
    fork_chapter(CHAPTER_BLOCKS, FORKED_BLOCKS * KV_BLOCK_TOKENS);
    unit = unit_at(BY_CHAPTER, 0, 0);
    fork = unit_at(FORK, 0, 0);
    before = *book_at(unit, 0);
    scrub();
    book_at(unit, 0)->is_broken = true;
    assert_int_equal(kvs_index_replace(data()->indexer, fork, 0, fork->committed, &before.plan),
                     KV_OK);
    while (kvs_indexer_step(data()->indexer))
        ;
    assert_ptr_not_equal(book_at(unit, 0), book_at(unit, CHAPTER_BLOCKS - 1));
    assert_false(book_at(unit, 0)->is_broken);
    scrub();
    scrub();
    book = book_at(unit, 0);
    for (uint32_t i = 0; i < CHAPTER_BLOCKS; i++) {
        assert_int_equal(kvs_unit_codes(unit, i)->n_coded, KV_BLOCK_TOKENS);
        assert_ptr_equal(book_at(unit, i), book);
    }
    assert_false(book->is_broken);
    assert_int_equal(book->learnt.crc, before.learnt.crc);
    close_node();
}

static unsigned long n_wanted = FLIPS, seed = 1;

static void flips_enter(unsigned long of_seed)
{
    unsigned long n = 0;
    unsigned round = 0;

    memset(&counted, 0, sizeof(counted));
    kv_random_init(&it.random, of_seed);
    open_node();
    fill_node();
    copy_memory();
    ask_some();
    while (n < n_wanted) {
        round_of_flips(round++);
        n = 0;
        for (unsigned kind = 0; kind < KINDS; kind++)
            n += counted.flips[kind];
    }
    print_message("seed %lu, summaries per %u rows: %lu flips in %u rounds:", of_seed,
                  summary_rows, n, round);
    for (unsigned kind = 0; kind < KINDS; kind++)
        print_message(" %s %llu", kind_names[kind], (unsigned long long)counted.flips[kind]);
    print_message(
        "\n%llu answers (%llu with a rest, %llu by copies), %llu refusals that named a row, "
        "%llu passes\n",
        (unsigned long long)counted.answers, (unsigned long long)counted.rest,
        (unsigned long long)counted.cuts, (unsigned long long)counted.refusals,
        (unsigned long long)counted.passes);
    assert_true(n < 200 || (counted.refusals > 0 && counted.rest > 0 && counted.cuts > 0));
    close_node();
}

static void flips_enter_no_answer(void **state)
{
    (void)state;
    flips_enter(seed);
    summary_rows = 3072;
    flips_enter(seed + 1);
    summary_rows = 1024;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flips_enter_no_answer),
        cmocka_unit_test(objects_go_while_the_scrub_is_at_them),
        cmocka_unit_test(long_sessions_take_many_slices),
        cmocka_unit_test(shared_blocks_are_scrubbed_whole),
        cmocka_unit_test(chapters_are_made_again_whole),
        cmocka_unit_test(older_versions_are_made_again),
        cmocka_unit_test(chapters_are_replaced_whole),
        cmocka_unit_test(absent_segments_count_in_their_chapters),
        cmocka_unit_test(codes_of_absent_rows_are_scrubbed),
        cmocka_unit_test(chapters_of_two_codebooks_are_made_again),
        cmocka_unit_test(queries_do_not_stop_the_scrub),
    };

    if (argc > 1)
        n_wanted = strtoul(argv[1], NULL, 10);
    if (argc > 2)
        seed = strtoul(argv[2], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
