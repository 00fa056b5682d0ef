/* The client library against a node made of this file's functions, over the loopback, on a
 * virtual clock: what goes over the wire, and what happens when answers are late, lost, refused
 * or wrong. */
#include "client/batch.h"
#include "client/buffer.h"
#include "client/check.h"
#include "client/client.h"
#include "client/connection.h"
#include "client/control_message.h"
#include "client/node.h"
#include "client/op.h"
#include "client/request.h"
#include "client/roots.h"
#include "client/session.h"
#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/writers.h"
#include "kvserver/net/message.h"
#include "proto/kvstore.pb-c.h"
#include "tests/support/dies.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    N_LAYERS = 2,
    N_HEADS = 4,
    ROW_BYTES = 256,
    N_TOKENS = 8192,
    N_NAMES = 2, /* of an open's blocks */
    LEASE_MS = 60000,
    VERIFY_SINCE_US = 7,
    SAVE_SINCE_US = 8,
    REQUESTS_MAX = 512,
    CREDITS = 8,
    OPS_MAX = 16,
    ANSWER_BYTES = 2 << 20,
    RETRY_MS = 100,
    PEER_TIMEOUT_MS = 2000,
};

/* What is wrong with the node's answers. */
enum lie {
    NO_LIE,
    LIE_BODY_SHORT,
    LIE_BODY_LONG,
    LIE_LAYER,    /* of the header */
    LIE_SNAPSHOT, /* too few tokens are committed */
    LIE_SNAPSHOT_MANY,
    LIE_TIMES,
    LIE_UNITS_SWAPPED,
    LIE_OTHER_LAYER,
    LIE_IDS_MANY,
    LIE_IDS_FEW,
    LIE_CHOSEN_MANY,
    LIE_ID_TWICE,
    LIE_ID_DESCENDS,
    LIE_ID_BEFORE,
    LIE_ID_BETWEEN,
    LIE_ID_BEHIND,
    LIE_ID_HUGE,
    LIE_HELD,
    LIE_ROWS_MANY,
    LIE_ROWS_FEW,
    LIE_MASK_EMPTY,
    LIE_MASK_WIDE,
    LIE_MASKS_MANY, /* more rows of one vector than it may choose */
    LIE_SCORE_NAN,
    LIE_SCORE_NEGATIVE,
    LIE_SCORE_LARGE,
    LIE_REST,
    LIE_COUNTS,
    LIE_COUNTS_FEW,
    LIE_RERANKED,
    LIE_RERANKED_FEW,
    LIE_CHAPTERS,
    LIE_CHAPTERS_NONE,
    LIE_RECALL,
    LIE_RECALL_NEGATIVE,
    LIE_COMMITTED,
    LIE_COMMITTED_MANY,
    LIE_ROW,
    LIE_CRC,
    LIE_READS_NONE, /* what was asked for is not there */
    LIE_BULK_SIZE,
    LIE_BULK_ODD,
    LIE_BULK_UNASKED,
    /* With attention. */
    LIE_NAME_UNASKED,
    LIE_NAMES_MANY, /* more than rows of blocks that are held */
    LIE_OUTPUT_NAN,
    LIE_OUTPUT_INFINITE,
    LIE_OUTPUT_LARGE,
    LIE_OUTPUT_OF_NONE,
    LIE_LSE_NAN,
    LIE_LSE_INFINITE,
    LIE_LSE_LARGE,
    LIE_LSE_SMALL,
    LIE_LSE_OF_NONE,
    /* Of indexes. */
    LIE_INDEXED_ROWS,
    LIE_INDEXED_CODED,
    LIE_INDEXED_FOUND,
    LIE_INDEXED_TRAINED,
    LIE_INDEXED_PENDING,
    LIE_INDEXED_ITERATIONS,
    LIE_INDEXED_TIME,
    /* Of rows. */
    LIE_ROWS,
    /* Of objects. */
    LIE_OBJECT_BYTES,
    LIE_OBJECT_HUGE,
    LIE_OBJECT_OFFSET,
    LIE_OBJECT_VERSION,
    /* Of control operations. */
    LIE_LEASE_NONE,
    LIE_LEASE_LONG,
    LIE_TOKENS,
    LIE_TOKENS_NONE, /* as where a node has no units */
    LIE_TOKENS_MAX_NONE,
    LIE_TOKENS_MAX_MANY,
    LIE_LAYERS_FEW,
    LIE_LAYER_LESS,
    LIE_LAYER_MANY,
    LIE_GENERATION_BACK,
    LIE_LOG_GENERATION,
    LIE_LOG_TOKENS,
    LIE_LOG_WRITER,
    LIE_SHARED_TOKENS,
    LIE_WRITERS_NONE,
    LIE_WRITERS_MANY,
    LIE_WRITER_NONE,
    LIE_WRITER_TWICE,
    LIE_WRITERS_BACK,
    LIE_WRITERS_END,
    LIE_ATTACHED_MANY,
    LIE_ATTACHED_ODD,
    LIE_ATTACHED_OF_NONE,
    LIE_ATTACHED_OWN, /* the session's own writer is another */
    LIE_PUBLISHED_MANY,
    LIE_PUBLISHED_ODD,
    LIE_PUBLISHED_ALL, /* 2^32 - 1, as where a node has no units */
    LIE_MATCHED_MANY,
    LIE_MATCHED_ODD,
    LIE_MATCHED_ALL,
    LIE_TIER_LONG,
    LIE_TIER_SHORT,
    LIE_TIER_BACK,
    LIE_CELL_NAN,
    LIE_CONTROLS, /* characters that would steer a terminal, in names */
    LIE_CELLS_FEW,
    LIE_STATUS,
    LIE_SINCE,
    LIE_COUNTS_NONE,
    LIE_SAVED_MANY,
    LIE_SAVED_ODD,
    LIE_SAVED_ALL, /* as LIE_PUBLISHED_ALL */
    LIE_SHARED_MANY,
    LIE_HELLO_VERSION,
    LIE_HELLO_TOKEN,
    LIE_HELLO_NODE,
    LIE_HELLO_LANES_NONE,
    LIE_HELLO_LANES_MANY,
    LIE_HELLO_ADDRESS,
    LIE_HELLO_CREDITS,
    LIE_HELLO_BULK,
};

enum {
    OBJECT_BYTES = 100,
    HELD_FINGERPRINT = 77, /* of the blocks that the node takes for the caller's */
};

/* A request that the node got. */
struct seen {
    struct kv_wire_header header;
    uint8_t *body;
    struct kv_incoming *bulk; /* offered and not answered */
    bool is_done;
};

struct fake {
    struct kv_port *control, *data;
    uint32_t n_lanes, credits; /* that hello tells of; all lanes lead to `data` */
    struct kv_channel *to_client;
    struct kv_id128 id;
    struct seen seen[REQUESTS_MAX];
    unsigned n_seen;
    unsigned n_hellos, n_cancels, n_pings, n_batches;
    unsigned n_busy_batches; /* that are answered with KV_BUSY first */
    uint64_t cancelled;      /* the id that the last cancel named */
    bool is_manual;          /* requests are kept, the test answers them */
    bool is_deaf;            /* nothing is answered */
    bool is_mute;            /* lifecycle operations are carried out, and not answered */
    bool loses_child; /* they are carried out, and what they made is gone when it answers */
    bool denies;      /* they are not carried out: there is no such session */
    unsigned n_busy;  /* requests that are answered with KV_BUSY first */
    bool corrupts;    /* rows that go out have a wrong byte */
    bool has_faces;   /* it is several nodes: each hello comes to another one */
    unsigned n_opens, n_closes;
    unsigned n_saves, n_until_saved; /* requests; those before all is saved */
    uint32_t saved_wanted;           /* as the last one said */
    uint32_t rows_asked;             /* of the last open */
    uint32_t moves_to[7];   /* opens with 2^i rows are told so many, and go; 0: they stay */
    unsigned n_before_move; /* opens that stay before one goes */
    uint32_t rows_told;     /* those that stay are told */
    uint32_t stood_us;      /* queries are told that they waited for so long, and a little */
    enum lie lie;
    bool bulk_first; /* queries: rows go before the body */
    struct kv_wire_query_reads reads;
    uint32_t n_reranked_of_cut;   /* of each head, with a first cut */
    size_t body_bytes, n_cut_off; /* of the last query's answer, and bytes that its end lacks */
    bool no_bulk;                 /* queries: rows of their own do not go at all */
    struct kv_random *noise;      /* changes their bodies */
    uint32_t generation;
    uint64_t last_op_id;
    uint32_t last_kind;
    struct kv_wire_header last_control; /* request */
    unsigned n_lifecycle;
    unsigned n_sends_done;
    kv_status_t send_status;
    uint8_t *rows;    /* (N_LAYERS, N_HEADS, N_TOKENS, ROW_BYTES) */
    uint32_t *crcs;   /* (N_LAYERS, N_HEADS, N_TOKENS) */
    uint8_t *answers; /* (CREDITS, ANSWER_BYTES) used in turn: the client takes data later */
    unsigned n_answers;
};

struct fixture {
    struct kv_clock clock;
    struct kv_transport *transport;
    struct fake node;
    struct kv_client *client;
    struct kv_session *session;
    struct kv_buffer *buffer;
    uint8_t *memory;
};

static struct fixture f;

/* ---- the node ---------------------------------------------------------------------------- */

static void send_done(void *arg, kv_status_t status)
{
    struct fake *node = arg;

    node->n_sends_done++;
    node->send_status = status;
}

static void receive_done(void *arg, kv_status_t status)
{
    *(kv_status_t *)arg = status;
}

static void receive(struct kv_incoming *incoming, const struct kv_iov *iov)
{
    kv_status_t status = KV_IN_PROGRESS;
    const kv_status_t begun = kv_incoming_receive(incoming, iov, 1, receive_done, &status);

    if (begun != KV_IN_PROGRESS)
        status = begun;
    while (status == KV_IN_PROGRESS)
        kv_port_progress(f.node.data);
    assert_int_equal(status, KV_OK);
}

static void reply_control(const struct kv_wire_header *request, const ProtobufCMessage *message)
{
    struct kv_wire_header header = {
        .kind = KV_WIRE_REPLY,
        .op = request->op,
        .request_id = request->request_id,
        .client_token = request->client_token,
    };
    size_t bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *packed = malloc(bytes + 1);

    assert_non_null(packed);
    protobuf_c_message_pack(message, packed);
    kv_message_seal(&header, packed, bytes);
    assert_int_equal(kv_channel_send(f.node.to_client, &header, sizeof(header), packed, bytes,
                                     send_done, &f.node),
                     KV_OK);
    free(packed);
}

static void hello(const struct kv_wire_header *request, const void *body)
{
    Kvpb__HelloRequest *asked = kvpb__hello_request__unpack(NULL, request->body_bytes, body);
    Kvpb__HelloReply reply = KVPB__HELLO_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    ProtobufCBinaryData addresses[KV_THREADS_MAX + 1];
    const void *bytes;
    size_t n_bytes;

    assert_non_null(asked);
    if (f.node.to_client != NULL)
        f.node.to_client->ops->channel_close(f.node.to_client);
    assert_int_equal(f.node.control->ops->connect(f.node.control, asked->address.data,
                                                  asked->address.len, KV_CHANNEL_NETWORK, NULL,
                                                  &f.node.to_client),
                     KV_OK);
    kvpb__hello_request__free_unpacked(asked, NULL);
    f.node.data->ops->port_address(f.node.data, &bytes, &n_bytes);
    for (uint32_t i = 0; i <= KV_THREADS_MAX; i++)
        addresses[i] = (ProtobufCBinaryData){.data = (uint8_t *)bytes, .len = n_bytes};
    reply.outcome = &outcome;
    reply.version = KV_WIRE_VERSION;
    reply.client_token.data = reply.node_id.data = f.node.id.bytes;
    reply.client_token.len = reply.node_id.len = 16;
    reply.n_addresses = f.node.n_lanes;
    reply.addresses = addresses;
    reply.credits = f.node.credits;
    reply.bulk_bytes_max = KV_WIRE_BULK_MAX;
    reply.lease_ms = 60000;
    reply.node = (char *)"fake";
    f.node.n_hellos++;
    struct kv_id128 face = f.node.id;
    face.bytes[15] = (uint8_t)f.node.n_hellos;
    if (f.node.has_faces)
        reply.node_id.data = face.bytes;
    reply.version += f.node.lie == LIE_HELLO_VERSION;
    reply.client_token.len -= f.node.lie == LIE_HELLO_TOKEN;
    reply.node_id.len -= f.node.lie == LIE_HELLO_NODE;
    if (f.node.lie == LIE_HELLO_LANES_NONE)
        reply.n_addresses = 0;
    if (f.node.lie == LIE_HELLO_LANES_MANY)
        reply.n_addresses = KV_THREADS_MAX + 1;
    if (f.node.lie == LIE_HELLO_ADDRESS)
        addresses[0].len = 0;
    if (f.node.lie == LIE_HELLO_CREDITS)
        reply.credits = 0;
    if (f.node.lie == LIE_CONTROLS)
        reply.node = reply.transports = (char *)"\x1b]0;fake\a";
    if (f.node.lie == LIE_HELLO_BULK)
        reply.bulk_bytes_max = (64 << 10) - 1;
    reply_control(request, &reply.base);
}

/* What the node grants a session. */
static void tell_grant(Kvpb__OpenReply *reply)
{
    reply->lease_ms = f.node.lie == LIE_LEASE_NONE   ? 0
                      : f.node.lie == LIE_LEASE_LONG ? LEASE_MS + 1
                                                     : LEASE_MS;
    reply->tokens_max = f.node.lie == LIE_TOKENS_MAX_NONE   ? 0
                        : f.node.lie == LIE_TOKENS_MAX_MANY ? KV_TOKENS_MAX + 1
                                                            : N_TOKENS;
    reply->tokens = f.node.lie == LIE_TOKENS               ? N_TOKENS + 1
                    : f.node.last_control.op == KV_OP_OPEN ? 0
                                                           : 300;
}

/* Whose rows the session has: of two writers. */
static void tell_writers(Kvpb__OpenReply *reply)
{
    enum {
        N_MANY = KV_WRITER_RUNS_MAX + 1
    };
    static Kvpb__WriterRun runs[N_MANY], *list[N_MANY];
    const bool are_many = f.node.lie == LIE_WRITERS_MANY;

    for (uint32_t i = 0; i < N_MANY; i++) {
        runs[i] = (Kvpb__WriterRun)KVPB__WRITER_RUN__INIT;
        runs[i].writer = i + 1;
        runs[i].end = i + 1;
        list[i] = &runs[i];
    }
    reply->writers = list;
    reply->n_writers = are_many ? N_MANY : f.node.lie == LIE_WRITERS_NONE ? 0 : 2;
    runs[are_many ? N_MANY - 1 : 1].end = UINT32_MAX;
    if (f.node.lie == LIE_WRITER_NONE)
        runs[0].writer = 0;
    if (f.node.lie == LIE_WRITER_TWICE)
        runs[1].writer = runs[0].writer;
    if (f.node.lie == LIE_WRITERS_BACK)
        runs[0].end = UINT32_MAX;
    if (f.node.lie == LIE_WRITERS_END)
        runs[1].end = UINT32_MAX - 1;
    reply->shared_tokens = f.node.lie == LIE_SHARED_TOKENS ? N_TOKENS + 1 : N_TOKENS;
}

/* What an open has attached of the prompt. */
static void tell_attached(Kvpb__OpenReply *reply)
{
    if (f.node.lie < LIE_ATTACHED_MANY || f.node.lie > LIE_ATTACHED_OWN)
        return;
    tell_writers(reply);
    reply->tokens = f.node.lie == LIE_ATTACHED_MANY  ? (N_NAMES + 1) * KV_BLOCK_TOKENS
                    : f.node.lie == LIE_ATTACHED_ODD ? KV_BLOCK_TOKENS - 1
                                                     : KV_BLOCK_TOKENS;
    if (f.node.lie == LIE_ATTACHED_OF_NONE)
        reply->n_writers = 0;
}

/* What it says of the rows of an open's root.  Returns the status. */
static kv_status_t
tell_rows(const struct kv_wire_header *request, const void *body, Kvpb__OpenReply *reply)
{
    Kvpb__OpenRequest *asked = kvpb__open_request__unpack(NULL, request->body_bytes, body);
    uint32_t moves_to = 0;

    assert_non_null(asked);
    f.node.n_opens++;
    f.node.rows_asked = asked->n_rows;
    reply->n_rows = f.node.rows_told;
    if (kv_placement_is_row_count(asked->n_rows)) {
        assert_true(asked->placement->root ==
                    kv_placement_branch_root(asked->prompt_root, asked->branch, asked->n_rows));
        moves_to = f.node.moves_to[__builtin_ctz(asked->n_rows)];
    }
    kvpb__open_request__free_unpacked(asked, NULL);
    if (moves_to == 0 || f.node.n_before_move > 0) {
        f.node.n_before_move -= f.node.n_before_move > 0;
        return KV_OK;
    }
    reply->n_rows = moves_to;
    return KV_MOVED;
}

/* Open and resume.  The session has been truncated once. */
static void open_session(const struct kv_wire_header *request, const void *body)
{
    const uint8_t id[16] = {1};
    Kvpb__OpenReply reply = KVPB__OPEN_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    Kvpb__Lifecycle entry = KVPB__LIFECYCLE__INIT, *entries = &entry;
    Kvpb__Layer layer = KVPB__LAYER__INIT, *layers[N_LAYERS] = {&layer, &layer};

    reply.outcome = &outcome;
    reply.session_index = 3;
    reply.generation = f.node.generation;
    reply.fingerprint = (ProtobufCBinaryData){.data = (uint8_t *)id, .len = sizeof(id)};
    tell_grant(&reply);
    if (request->op == KV_OP_OPEN)
        outcome.status = tell_rows(request, body, &reply);
    if (request->op == KV_OP_OPEN)
        tell_attached(&reply);
    placement.n_nodes = 1;
    placement.epoch = f.client->map->epoch;
    if (f.session != NULL) {
        struct kv_ticket ticket;

        kv_session_ticket(f.session, &ticket);
        placement.root = ticket.root;
    }
    reply.placement = &placement;
    layer.kind = KV_LAYER_KV;
    layer.dtype = KV_FP16;
    layer.n_kv_heads = N_HEADS;
    layer.d_k = layer.d_v = 64;
    entry.kind = KV_OP_TRUNCATE;
    entry.generation = f.node.generation - 1 - (f.node.lie == LIE_LOG_GENERATION);
    entry.tokens = f.node.lie == LIE_LOG_TOKENS ? N_TOKENS + 1 : 300;
    entry.writer = f.node.lie != LIE_LOG_WRITER;
    if (request->op == KV_OP_RESUME) {
        reply.n_layers = N_LAYERS;
        reply.layers = layers;
        reply.n_recent = 1;
        reply.recent = &entries;
        tell_writers(&reply);
    }
    reply_control(request, &reply.base);
}

static void show_table(const struct kv_wire_header *request)
{
    Kvpb__TableReply reply = KVPB__TABLE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    Kvpb__Cell cells[2] = {KVPB__CELL__INIT, KVPB__CELL__INIT};
    Kvpb__Cell *row_cells[2] = {&cells[0], &cells[1]};
    Kvpb__Row row = KVPB__ROW__INIT, *rows = &row;
    char *columns[2] = {(char *)"name", (char *)"value"};

    cells[0].value_case = KVPB__CELL__VALUE_TEXT;
    cells[0].text = (char *)"uptime_s";
    if (f.node.lie == LIE_CONTROLS) {
        columns[1] = (char *)"val\x1b[2Jue";
        cells[0].text = (char *)"up\ttime\xc2\x9b s \xc3\x9c\x7f";
    }
    cells[1].value_case = KVPB__CELL__VALUE_NUMBER;
    cells[1].number = f.node.lie == LIE_CELL_NAN ? NAN : 7;
    row.n_cells = f.node.lie == LIE_CELLS_FEW ? 1 : 2;
    row.cells = row_cells;
    reply.outcome = &outcome;
    reply.n_columns = 2;
    reply.columns = columns;
    reply.n_rows = 1;
    reply.rows = &rows;
    reply_control(request, &reply.base);
}

/* The node keeps as many blocks as have names. */
static void publish(const struct kv_wire_header *request)
{
    Kvpb__PublishReply reply = KVPB__PUBLISH_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;

    reply.outcome = &outcome;
    outcome.status = f.node.lie == LIE_STATUS ? -7777 : KV_OK;
    reply.tokens = f.node.lie == LIE_PUBLISHED_MANY  ? (N_NAMES + 2) * KV_BLOCK_TOKENS
                   : f.node.lie == LIE_PUBLISHED_ODD ? KV_BLOCK_TOKENS + 1
                   : f.node.lie == LIE_PUBLISHED_ALL ? UINT32_MAX
                                                     : (N_NAMES + 1) * KV_BLOCK_TOKENS;
    reply_control(request, &reply.base);
}

/* It has one block of a prompt, in memory; several nodes have none. */
static void match(const struct kv_wire_header *request)
{
    Kvpb__MatchReply reply = KVPB__MATCH_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    Kvpb__MatchTier tiers[2] = {KVPB__MATCH_TIER__INIT, KVPB__MATCH_TIER__INIT};
    Kvpb__MatchTier *list[2] = {&tiers[0], &tiers[1]};

    reply.outcome = &outcome;
    outcome.status = f.node.lie == LIE_STATUS ? -7777 : KV_OK;
    reply.tokens = f.node.lie == LIE_MATCHED_MANY  ? (N_NAMES + 1) * KV_BLOCK_TOKENS
                   : f.node.lie == LIE_MATCHED_ODD ? KV_BLOCK_TOKENS - 1
                   : f.node.lie == LIE_MATCHED_ALL ? UINT32_MAX
                   : f.node.has_faces              ? 0
                                                   : KV_BLOCK_TOKENS;
    reply.tiers = list;
    reply.n_tiers = (reply.tokens > 0) + (f.node.lie == LIE_TIER_BACK);
    tiers[0].medium = tiers[1].medium = (char *)"CPU";
    tiers[0].end = reply.tokens + (f.node.lie == LIE_TIER_LONG) * KV_BLOCK_TOKENS -
                   (f.node.lie == LIE_TIER_SHORT);
    tiers[1].end = reply.tokens - 1;
    reply_control(request, &reply.base);
}

static void verification(const struct kv_wire_header *request)
{
    Kvpb__VerifyReply reply = KVPB__VERIFY_REPLY__INIT;
    Kvpb__VerifyCounts counts = KVPB__VERIFY_COUNTS__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;

    reply.outcome = &outcome;
    outcome.status = f.node.lie == LIE_STATUS ? -7777 : KV_OK;
    reply.since_us = VERIFY_SINCE_US + (f.node.lie == LIE_SINCE);
    reply.memory = &counts;
    reply.disk = f.node.lie == LIE_COUNTS_NONE ? NULL : &counts;
    reply_control(request, &reply.base);
}

/* It shares three blocks, of which the last ones are saved after some requests; one more that is shared
 * meanwhile is nobody's business. */
static void save(const struct kv_wire_header *request, const void *body)
{
    Kvpb__SaveRequest *asked = kvpb__save_request__unpack(NULL, request->body_bytes, body);
    Kvpb__SaveReply reply = KVPB__SAVE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;

    assert_non_null(asked);
    assert_true(asked->since_us == 0 || asked->since_us == SAVE_SINCE_US);
    f.node.saved_wanted = asked->tokens;
    reply.outcome = &outcome;
    outcome.status = f.node.lie == LIE_STATUS ? -7777 : KV_OK;
    /* That lie is none in a first reply. */
    reply.since_us = SAVE_SINCE_US + (f.node.lie == LIE_SINCE && f.node.n_saves > 0);
    reply.shared_tokens = (3 + (f.node.n_saves > 0)) * KV_BLOCK_TOKENS;
    reply.saved_tokens =
        f.node.n_saves++ < f.node.n_until_saved ? KV_BLOCK_TOKENS : 3 * KV_BLOCK_TOKENS;
    if (f.node.lie == LIE_SAVED_MANY)
        reply.saved_tokens = reply.shared_tokens + KV_BLOCK_TOKENS;
    else if (f.node.lie == LIE_SAVED_ODD)
        reply.saved_tokens++, reply.shared_tokens += KV_BLOCK_TOKENS;
    else if (f.node.lie == LIE_SAVED_ALL)
        reply.saved_tokens = reply.shared_tokens = UINT32_MAX;
    else if (f.node.lie == LIE_SHARED_MANY)
        reply.shared_tokens = N_TOKENS + KV_BLOCK_TOKENS;
    kvpb__save_request__free_unpacked(asked, NULL);
    if (!f.node.is_mute)
        reply_control(request, &reply.base);
}

static void lifecycle(const struct kv_wire_header *request, const void *body)
{
    Kvpb__OpenReply reply = KVPB__OPEN_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    Kvpb__ForkRequest *fork = NULL;
    Kvpb__TruncateRequest *truncate = NULL;
    const Kvpb__Lifecycle *operation;

    if (request->op == KV_OP_FORK) {
        fork = kvpb__fork_request__unpack(NULL, request->body_bytes, body);
        assert_non_null(fork);
        operation = fork->operation;
    } else {
        truncate = kvpb__truncate_request__unpack(NULL, request->body_bytes, body);
        assert_non_null(truncate);
        operation = truncate->operation;
    }
    f.node.n_lifecycle++;
    f.node.last_kind = operation->kind;
    if (operation->op_id != f.node.last_op_id && !f.node.is_deaf && !f.node.denies) {
        assert_int_equal(operation->generation, f.node.generation);
        f.node.generation += fork == NULL || !fork->keeps_generation;
        f.node.last_op_id = operation->op_id;
    }
    if (f.node.loses_child || f.node.denies)
        outcome.status = KV_NOT_FOUND;
    reply.outcome = &outcome;
    reply.generation = f.node.generation;
    reply.child_index = 5;
    reply.child_generation = 1;
    tell_grant(&reply);
    if (!f.node.is_mute && !f.node.is_deaf)
        reply_control(request, &reply.base);
    kvpb__fork_request__free_unpacked(fork, NULL);
    kvpb__truncate_request__free_unpacked(truncate, NULL);
}

static void on_control(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    Kvpb__SessionReply session = KVPB__SESSION_REPLY__INIT;
    uint32_t layer_tokens[N_LAYERS];
    Kvpb__RenewReply renewed = KVPB__RENEW_REPLY__INIT;
    Kvpb__CloseReply other = KVPB__CLOSE_REPLY__INIT;
    struct kv_wire_header request;
    const char *why;

    (void)owner;
    assert_int_equal(kv_message_check(message, message_bytes, body, body_bytes, &request, &why),
                     KV_OK);
    session.outcome = renewed.outcome = other.outcome = &outcome;
    if (f.node.lie == LIE_STATUS && request.op != KV_OP_HELLO)
        outcome.status = -7777;
    f.node.last_control = request;
    switch (request.op) {
    case KV_OP_HELLO:
        if (!f.node.is_deaf)
            hello(&request, body);
        break;
    case KV_OP_FORK:
    case KV_OP_TRUNCATE:
        lifecycle(&request, body);
        break;
    case KV_OP_OPEN:
    case KV_OP_RESUME:
        open_session(&request, body);
        break;
    case KV_OP_CLOSE:
        f.node.n_closes++;
        reply_control(&request, &other.base);
        break;
    case KV_OP_SESSION:
        session.generation = f.node.generation - (f.node.lie == LIE_GENERATION_BACK);
        session.tokens = f.node.lie == LIE_TOKENS        ? N_TOKENS + 1
                         : f.node.lie == LIE_TOKENS_NONE ? UINT32_MAX
                                                         : N_TOKENS;
        for (uint32_t i = 0; i < N_LAYERS; i++)
            layer_tokens[i] = N_TOKENS - (f.node.lie == LIE_LAYER_LESS);
        if (f.node.lie == LIE_LAYER_MANY)
            layer_tokens[0] = N_TOKENS + 1;
        session.n_layer_tokens = f.node.lie == LIE_LAYERS_FEW ? N_LAYERS - 1 : N_LAYERS;
        session.layer_tokens = layer_tokens;
        reply_control(&request, &session.base);
        break;
    case KV_OP_RENEW:
        renewed.lease_ms = f.node.lie == LIE_LEASE_NONE   ? 0
                           : f.node.lie == LIE_LEASE_LONG ? LEASE_MS + 1
                                                          : LEASE_MS;
        reply_control(&request, &renewed.base);
        break;
    case KV_OP_TABLE:
        show_table(&request);
        break;
    case KV_OP_PUBLISH:
        publish(&request);
        break;
    case KV_OP_MATCH:
        match(&request);
        break;
    case KV_OP_VERIFY:
        verification(&request);
        break;
    case KV_OP_SAVE:
        save(&request, body);
        break;
    case KV_OP_GOODBYE:
        break;
    default:
        reply_control(&request, &other.base);
    }
}

static uint8_t *next_answer(void)
{
    return f.node.answers + (size_t)(f.node.n_answers++ % CREDITS) * ANSWER_BYTES;
}

/* What makes a header one of an answer to that request. */
static void address(struct kv_wire_header *header, const struct kv_wire_header *request)
{
    header->op = request->op;
    header->request_id = request->request_id;
    header->client_index = request->client_index;
    header->client_token = request->client_token;
    header->session_index = request->session_index;
    header->generation = request->generation;
}

static void answer(const struct kv_wire_header *request,
                   kv_status_t status,
                   const struct kv_wire_header *fields,
                   const void *body,
                   size_t body_bytes)
{
    struct kv_wire_header header = *fields;

    header.kind = KV_WIRE_REPLY;
    header.status = status;
    address(&header, request);
    kv_message_seal(&header, body, body_bytes);
    kv_channel_send(f.node.to_client, &header, sizeof(header), body, body_bytes, send_done,
                    &f.node);
}

static size_t place(uint32_t layer, uint32_t head, uint32_t token)
{
    return ((size_t)layer * N_HEADS + head) * N_TOKENS + token;
}

/* What an answer about units says of the session. */
static struct kv_wire_header committed_of(uint32_t layer, uint32_t tokens)
{
    struct kv_wire_header fields = {.snapshot = tokens, .layer = layer};

    if (f.node.lie == LIE_LAYER)
        fields.layer ^= 1;
    if (f.node.lie == LIE_SNAPSHOT)
        fields.snapshot--;
    if (f.node.lie == LIE_SNAPSHOT_MANY)
        fields.snapshot = N_TOKENS + 1;
    return fields;
}

/* Rows of a read or fetch request: CRCs, then bytes by bulk or in the body. */
static void answer_rows(const struct seen *seen)
{
    const struct kv_wire_header *request = &seen->header;
    const struct kv_wire_unit *units = (const struct kv_wire_unit *)seen->body;
    const uint32_t *ids = (const uint32_t *)(units + request->n_units);
    struct kv_wire_header fields = committed_of(units[0].layer, request->snapshot);
    uint8_t *body = next_answer();
    uint32_t *crcs = (uint32_t *)body;
    uint8_t *rows;
    size_t crcs_bytes, bytes;

    for (uint32_t i = 0; i < request->n_units; i++)
        fields.n_rows += request->op == KV_OP_FETCH ? units[i].n_ids : request->token_count;
    crcs_bytes = fields.n_rows * sizeof(*crcs);
    bytes = (size_t)fields.n_rows * ROW_BYTES;
    rows = body + crcs_bytes;
    for (uint32_t i = 0; i < request->n_units; i++) {
        uint32_t n = request->op == KV_OP_FETCH ? units[i].n_ids : request->token_count;

        for (uint32_t j = 0; j < n; j++, rows += ROW_BYTES) {
            uint32_t token = request->op == KV_OP_FETCH ? *ids++ : request->token_begin + j;
            size_t at = place(units[i].layer, units[i].kv_head, token);

            memcpy(rows, f.node.rows + at * ROW_BYTES, ROW_BYTES);
            *crcs++ = f.node.crcs[at];
        }
    }
    rows -= bytes;
    fields.n_rows += f.node.lie == LIE_ROWS;
    if (f.node.corrupts)
        rows[5 * ROW_BYTES + 17] ^= 4;
    if (bytes <= KV_WIRE_INLINE_MAX / 2) {
        answer(request, KV_OK, &fields, body, crcs_bytes + bytes);
        return;
    }
    fields.bulk_bytes = bytes;
    answer(request, KV_OK, &fields, body, crcs_bytes);
    fields.kind = KV_WIRE_BULK_REPLY;
    address(&fields, request);
    kv_message_seal(&fields, NULL, 0);
    kv_channel_send(f.node.to_client, &fields, sizeof(fields), rows, bytes, send_done, &f.node);
}

/* The body of a query's answer, in pieces of the size that it may have at most. */
struct told {
    struct kv_wire_query_result found[N_HEADS];
    uint32_t ids[N_HEADS * N_TOKENS], heads[N_HEADS * N_TOKENS], crcs[N_HEADS * N_TOKENS];
    float scores[N_HEADS * N_TOKENS];
    float outputs[N_HEADS * KV_QUERIES_MAX * 64], lses[N_HEADS * KV_QUERIES_MAX];
    struct kv_wire_query_times times;
    uint32_t n_ids, n_rows;
};

/* The i-th of `count` tokens, spread over the ranges. */
static uint32_t
spread(const struct kv_wire_range *ranges, uint32_t n, uint32_t i, uint32_t count)
{
    uint64_t n_all = 0, at;

    for (uint32_t j = 0; j < n; j++)
        n_all += ranges[j].end - ranges[j].begin;
    for (at = i * n_all / count; at >= ranges->end - ranges->begin; ranges++)
        at -= ranges->end - ranges->begin;
    return ranges->begin + (uint32_t)at;
}

/* A weight that is told of a token. */
static float score_of(uint32_t token)
{
    return (float)token / (2 * N_TOKENS);
}

static uint32_t query_candidates(const struct kv_wire_query *query,
                                 const struct kv_wire_range *ranges)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < query->n_ranges; i++)
        n += ranges[i].end - ranges[i].begin;
    return n;
}

static void tell_lie(struct told *told, enum lie lie)
{
    struct kv_wire_query_result unit;

    switch (lie) {
    case LIE_UNITS_SWAPPED:
        unit = told->found[0];
        told->found[0] = told->found[1];
        told->found[1] = unit;
        break;
    case LIE_OTHER_LAYER:
        told->found[1].layer ^= 1;
        break;
    case LIE_ID_TWICE:
        told->ids[3] = told->ids[2];
        break;
    case LIE_ID_DESCENDS:
        told->ids[3] = told->ids[2] - 1;
        break;
    case LIE_ID_BEFORE:
        told->ids[0] = 9;
        break;
    case LIE_ID_BETWEEN:
        told->ids[10] = 150;
        break;
    case LIE_ID_BEHIND:
        told->ids[told->n_ids - 1] = 300;
        break;
    case LIE_ID_HUGE:
        told->ids[told->n_ids - 1] = ~KV_WIRE_ID_CACHED;
        break;
    case LIE_HELD:
        told->ids[told->n_ids - 1] |= KV_WIRE_ID_CACHED;
        told->n_rows--;
        break;
    case LIE_ROWS_MANY:
        told->n_rows++;
        break;
    case LIE_ROWS_FEW:
        told->n_rows--;
        break;
    case LIE_MASK_EMPTY:
        told->heads[5] = 0;
        break;
    case LIE_MASK_WIDE:
        told->heads[5] |= 8;
        break;
    case LIE_SCORE_NAN:
        told->scores[7] = NAN;
        break;
    case LIE_SCORE_NEGATIVE:
        told->scores[7] = -1;
        break;
    case LIE_SCORE_LARGE:
        told->scores[7] = 3.1f;
        break;
    case LIE_MASKS_MANY:
        for (uint32_t i = 0; i < told->n_ids; i++)
            told->heads[i] |= 2;
        break;
    case LIE_TIMES:
        told->times.service_us = 4000000000;
        break;
    case LIE_CHOSEN_MANY:
        told->found[1].n_selected = 61;
        break;
    case LIE_REST:
        told->found[1].n_estimated = 1;
        break;
    case LIE_COUNTS:
        told->found[0].n_scored_by_code = UINT32_MAX;
        told->found[0].n_scored_by_key = 191;
        break;
    case LIE_COUNTS_FEW:
        told->found[0].n_scored_by_key--;
        break;
    case LIE_RERANKED:
        told->found[2].n_reranked = 191;
        break;
    case LIE_RERANKED_FEW:
        told->found[2].n_reranked = told->found[2].n_selected - 1;
        break;
    case LIE_CHAPTERS:
        told->found[2].n_chapters = 4;
        break;
    case LIE_CHAPTERS_NONE:
        told->found[2].n_chapters = 0;
        break;
    case LIE_RECALL:
        told->found[3].recall = 1.5f;
        break;
    case LIE_RECALL_NEGATIVE:
        told->found[3].recall = -0.5f;
        break;
    case LIE_COMMITTED:
        told->found[3].committed = 299;
        break;
    case LIE_COMMITTED_MANY:
        told->found[3].committed = N_TOKENS + 1;
        break;
    case LIE_OUTPUT_NAN:
        told->outputs[70] = NAN;
        break;
    case LIE_OUTPUT_INFINITE:
        told->outputs[70] = INFINITY;
        break;
    case LIE_OUTPUT_LARGE:
        told->outputs[70] = -66000;
        break;
    case LIE_OUTPUT_OF_NONE:
        told->lses[1] = -INFINITY;
        break;
    case LIE_LSE_NAN:
        told->lses[1] = NAN;
        break;
    case LIE_LSE_INFINITE:
        told->lses[1] = INFINITY;
        break;
    case LIE_LSE_LARGE:
        told->lses[1] = 1e15f;
        break;
    case LIE_LSE_SMALL:
        told->lses[1] = -1e15f;
        break;
    case LIE_CRC:
        told->crcs[3] ^= 1;
        break;
    default:
        break;
    }
}

static void send_bulk(const struct kv_wire_header *request, const uint8_t *rows, size_t bytes)
{
    struct kv_wire_header header = {
        .kind = KV_WIRE_BULK_REPLY,
        .bulk_bytes = bytes,
    };

    address(&header, request);
    kv_message_seal(&header, NULL, 0);
    kv_channel_send(f.node.to_client, &header, sizeof(header), rows, bytes, send_done, &f.node);
}

/* Changes some bits of an answer, or its size; returns its new end. */
static uint8_t *spoil(uint8_t *body, uint8_t *end, struct kv_wire_header *fields)
{
    uint64_t dice = kv_random_next(f.node.noise);

    for (unsigned i = 0; i <= dice % 3; i++) {
        uint64_t bit = kv_random_below(f.node.noise, (uint64_t)(end - body) * 8);

        /* Mostly where the counts are. */
        if (dice >> 8 & 1)
            bit %= (8 + 4 * 32) * 8;
        body[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    if (dice >> 16 & 1)
        fields->n_rows = (uint32_t)kv_random_below(f.node.noise, 1000);
    if ((dice >> 24 & 7) == 0)
        end = body + kv_random_below(f.node.noise, (uint64_t)(end - body));
    return end;
}

/* Chooses k tokens of each unit, whatever the vectors are. */
static void answer_query(const struct seen *seen)
{
    static struct told told;
    const struct kv_wire_header *request = &seen->header;
    const struct kv_wire_query *query = (const struct kv_wire_query *)seen->body;
    const struct kv_wire_unit *units = (const struct kv_wire_unit *)(query + 1);
    const struct kv_wire_range *ranges =
        (const struct kv_wire_range *)(units + request->n_units);
    const uint32_t *each = (const uint32_t *)(ranges + query->n_ranges);
    const bool has_each = (query->flags & KV_WIRE_EACH) != 0;
    const float *vectors = (const float *)(each + (has_each ? request->n_units : 0));
    const struct kv_wire_cached_block *held =
        (const struct kv_wire_cached_block *)(vectors +
                                              request->n_units * query->n_queries * 64);
    const bool attends = query->answer == KV_ANSWER_ATTEND;
    const bool is_cut = query->first_cut != KV_CUT_NONE;
    struct kv_wire_header fields = committed_of(units[0].layer, request->snapshot);
    uint8_t *body = next_answer(), *at = body;
    uint8_t *rows = body + ANSWER_BYTES / 2, *row = rows;
    uint32_t n_all;
    size_t bytes;

    memset(&told, 0, sizeof(told));
    told.times =
        (struct kv_wire_query_times){.queue_us = 11 + f.node.stood_us, .service_us = 22};
    n_all = query_candidates(query, ranges);
    for (uint32_t i = 0; i < request->n_units; i++) {
        uint32_t n_ids = query->k < n_all ? query->k : n_all;
        const uint32_t candidates = has_each ? each[i]
                                    : is_cut ? query->candidates
                                             : query->rerank;
        const bool is_scored = (uint64_t)query->k * candidates < n_all;
        uint32_t n_held = 0;

        n_ids += f.node.lie == LIE_IDS_MANY || f.node.lie == LIE_MASKS_MANY;
        n_ids -= f.node.lie == LIE_IDS_FEW;

        told.found[i] = (struct kv_wire_query_result){
            .layer = units[i].layer,
            .kv_head = units[i].kv_head,
            .n_selected = n_ids,
            .n_scored_by_code = is_scored ? n_all / 2 : 0,
            .n_scored_by_key = is_scored ? n_all - n_all / 2 : 0,
            .n_reranked = is_cut      ? f.node.n_reranked_of_cut
                          : is_scored ? candidates > 1 ? n_ids : 0
                          : query->k < n_all || query->flags & KV_WIRE_WEIGHTS ? n_ids
                                                                               : 0,
            .n_chapters = is_scored,
            .recall = NAN,
            .committed = request->snapshot,
        };
        for (uint32_t j = 0; j < n_ids; j++) {
            uint32_t token = spread(ranges, query->n_ranges, j, n_ids);
            bool is_held = false;

            for (uint32_t h = 0; h < units[i].n_ids; h++)
                is_held |= held[h].block == token / KV_BLOCK_TOKENS &&
                           held[h].fingerprint == HELD_FINGERPRINT;
            if (attends && !is_held && !(query->flags & KV_WIRE_IDS) &&
                f.node.lie != LIE_NAME_UNASKED && f.node.lie != LIE_NAMES_MANY)
                continue;
            told.heads[told.n_ids] = 1 + j % ((1u << query->n_queries) - 1);
            told.scores[told.n_ids] = score_of(token);
            told.ids[told.n_ids++] = token | (is_held ? KV_WIRE_ID_CACHED : 0);
            told.found[i].n_ids++;
            n_held += is_held;
            if (!is_held && query->answer == KV_ANSWER_ROWS) {
                size_t from = place(units[i].layer, units[i].kv_head, token);

                told.crcs[told.n_rows++] = f.node.crcs[from];
                memcpy(row, f.node.rows + from * ROW_BYTES, ROW_BYTES);
                row += ROW_BYTES;
            }
        }
        held += units[i].n_ids;
        for (uint32_t q = 0; q < query->n_queries && attends; q++) {
            bool is_empty = n_held == n_ids && f.node.lie != LIE_LSE_OF_NONE;

            told.lses[i * query->n_queries + q] = is_empty ? -INFINITY : 5;
            for (uint32_t j = 0; j < 64; j++)
                told.outputs[(i * query->n_queries + q) * 64 + j] = is_empty ? 0 : 0.5f;
        }
    }
    if (f.node.lie == LIE_ROW)
        rows[3 * ROW_BYTES + 9] ^= 1;
    tell_lie(&told, f.node.lie);

#define TELL(from, n_bytes) (memcpy(at, (from), (n_bytes)), at += (n_bytes))
    TELL(&told.times, sizeof(told.times));
    if ((query->flags & KV_WIRE_READS) && f.node.lie != LIE_READS_NONE)
        TELL(&f.node.reads, sizeof(f.node.reads));
    TELL(told.found, request->n_units * sizeof(told.found[0]));
    TELL(told.ids, told.n_ids * sizeof(told.ids[0]));
    if (query->flags & KV_WIRE_WEIGHTS)
        TELL(told.scores, told.n_ids * sizeof(told.scores[0]));
    if (query->merge == KV_MERGE_NONE)
        TELL(told.heads, told.n_ids * sizeof(told.heads[0]));
    if (attends) {
        TELL(told.outputs, request->n_units * query->n_queries * 64 * sizeof(float));
        TELL(told.lses, request->n_units * query->n_queries * sizeof(float));
    }
    TELL(told.crcs, told.n_rows * sizeof(told.crcs[0]));
    bytes = (size_t)told.n_rows * ROW_BYTES;
    fields.n_rows = told.n_rows;
    if (bytes <= KV_WIRE_INLINE_MAX / 2) {
        TELL(rows, bytes);
        if (f.node.noise != NULL)
            at = spoil(body, at, &fields);
        at += (f.node.lie == LIE_BODY_LONG) * 4 - (f.node.lie == LIE_BODY_SHORT) * 4;
        f.node.body_bytes = (size_t)(at - body);
        at -= f.node.n_cut_off;
        answer(request, KV_OK, &fields, body, (size_t)(at - body));
        if (f.node.lie == LIE_BULK_UNASKED)
            send_bulk(request, rows, ROW_BYTES);
        return;
    }
    if (f.node.noise != NULL)
        at = spoil(body, at, &fields);
    fields.bulk_bytes = bytes;
    bytes += (f.node.lie == LIE_BULK_SIZE) * ROW_BYTES + (f.node.lie == LIE_BULK_ODD);
    if (f.node.bulk_first)
        send_bulk(request, rows, bytes);
    answer(request, KV_OK, &fields, body, (size_t)(at - body));
    if (!f.node.bulk_first && !f.node.no_bulk)
        send_bulk(request, rows, bytes);
#undef TELL
}

static void answer_index(const struct seen *seen)
{
    const struct kv_wire_header *request = &seen->header;
    const struct kv_wire_index *asked = (const struct kv_wire_index *)seen->body;
    const struct kv_wire_unit *units = (const struct kv_wire_unit *)(asked + 1);
    struct kv_wire_header fields = committed_of(units[0].layer, request->token_count);
    struct kv_wire_index_result indexed = {
        .rows = (uint64_t)request->n_units * request->token_count,
        .rows_coded = request->n_units * 100,
        .n_found = 1,
        .n_trained = 2,
        .n_pending = (asked->flags & KV_WIRE_INDEX_WAIT) ? 0 : 3,
        .iterations = 8,
        .train_us = 1000,
    };

    indexed.rows += f.node.lie == LIE_INDEXED_ROWS;
    if (f.node.lie == LIE_INDEXED_CODED)
        indexed.rows_coded = indexed.rows + 1;
    if (f.node.lie == LIE_INDEXED_FOUND)
        indexed.n_found = request->n_units * 3 + 1;
    if (f.node.lie == LIE_INDEXED_TRAINED)
        indexed.n_trained = UINT32_MAX;
    if (f.node.lie == LIE_INDEXED_PENDING)
        indexed.n_pending = (asked->flags & KV_WIRE_INDEX_WAIT) ? 1 : UINT32_MAX;
    if (f.node.lie == LIE_INDEXED_ITERATIONS)
        indexed.iterations = 2 * KV_KMEANS_ITERATIONS_MAX + 1;
    if (f.node.lie == LIE_INDEXED_TIME)
        indexed.train_us = UINT64_MAX;
    answer(request, KV_OK, &fields, &indexed, sizeof(indexed) - (f.node.lie == LIE_BODY_SHORT));
}

/* Objects are all of 100 bytes. */
static void answer_object(const struct seen *seen)
{
    const struct kv_wire_header *request = &seen->header;
    uint8_t *bytes = next_answer();
    struct kv_id128 hash = kv_hash128(seen->body, request->name_bytes);
    bool is_get = request->op == KV_OP_OBJECT_GET;
    struct kv_wire_header fields = {.object_bytes = OBJECT_BYTES, .object_version = 9};

    memset(bytes, 0x5a, 2 * OBJECT_BYTES);
    fields.object_crc = kv_crc32c(kv_object_seed(&hash), bytes, OBJECT_BYTES);
    if (f.node.lie == LIE_OBJECT_BYTES)
        fields.object_bytes--;
    if (f.node.lie == LIE_OBJECT_HUGE)
        fields.object_bytes = (uint64_t)KV_OBJECT_BYTES_MAX + 1;
    if (f.node.lie == LIE_OBJECT_OFFSET)
        fields.offset = KV_WIRE_BULK_MAX;
    if (f.node.lie == LIE_OBJECT_VERSION)
        fields.object_version = 0;
    answer(request, f.node.lie == LIE_STATUS ? -7777 : KV_OK, &fields, bytes,
           (is_get ? OBJECT_BYTES : 0) + (f.node.lie == LIE_BODY_LONG));
}

/* Checks the CRCs and keeps the rows of a put. */
static void store_rows(const struct seen *seen, const uint8_t *rows)
{
    const struct kv_wire_header *request = &seen->header;
    const struct kv_wire_unit *units = (const struct kv_wire_unit *)seen->body;
    const uint32_t *crcs = (const uint32_t *)(units + request->n_units);

    for (uint32_t i = 0; i < request->n_units; i++) {
        for (uint32_t j = 0; j < request->token_count; j++, rows += ROW_BYTES, crcs++) {
            uint32_t token = request->token_begin + j;
            size_t at = place(units[i].layer, units[i].kv_head, token);

            assert_int_equal(*crcs, kv_row_crc(f.session, rows, ROW_BYTES, units[i].layer,
                                               units[i].kv_head, token));
            memcpy(f.node.rows + at * ROW_BYTES, rows, ROW_BYTES);
            f.node.crcs[at] = *crcs;
        }
    }
}

/* Does what a request asks, once its data is there. */
static void carry_out(struct seen *seen)
{
    const struct kv_wire_header *request = &seen->header;
    struct kv_wire_header fields = {0};

    if (seen->is_done || (request->bulk_bytes > 0 && seen->bulk == NULL))
        return;
    seen->is_done = true;
    if (f.node.n_busy > 0) {
        f.node.n_busy--;
        if (seen->bulk != NULL)
            kv_incoming_refuse(seen->bulk);
        seen->bulk = NULL;
        answer(request, KV_BUSY, &fields, "later", 5);
        return;
    }
    if (request->op == KV_OP_READ || request->op == KV_OP_FETCH) {
        answer_rows(seen);
    } else if (request->op == KV_OP_QUERY) {
        answer_query(seen);
    } else if (request->op == KV_OP_INDEX) {
        answer_index(seen);
    } else if (request->op == KV_OP_PUT || request->op == KV_OP_APPEND) {
        const uint8_t *rows = seen->body + request->n_units * sizeof(struct kv_wire_unit) +
                              (size_t)request->n_units * request->token_count * 4;

        if (seen->bulk != NULL) {
            struct kv_iov iov = {.base = next_answer(), .bytes = request->bulk_bytes};

            receive(seen->bulk, &iov);
            seen->bulk = NULL;
            rows = iov.base;
        }
        store_rows(seen, rows);
        fields = committed_of(((const struct kv_wire_unit *)seen->body)->layer,
                              request->token_begin + request->token_count);
        fields.n_rows = request->n_units * request->token_count + (f.node.lie == LIE_ROWS);
        answer(request, KV_OK, &fields, rows, f.node.lie == LIE_BODY_LONG);
    } else if (request->op == KV_OP_PING) {
        answer(request, KV_OK, &fields, next_answer(),
               request->token_count + (f.node.lie == LIE_BODY_LONG));
    } else if (request->op >= KV_OP_OBJECT_PUT && request->op <= KV_OP_OBJECT_DELETE) {
        answer_object(seen);
    } else {
        answer(request, KV_OK, &fields, NULL, 0);
    }
}

static void on_data(void *owner,
                    const void *message,
                    size_t message_bytes,
                    const void *body,
                    size_t body_bytes);

static void on_batch(const struct kv_wire_header *batch, const uint8_t *body)
{
    const uint8_t *entry;
    struct kv_wire_header header;
    uint32_t n_entries = 0;
    const char *why = "";
    size_t at = 0;

    for (; at < batch->body_bytes; n_entries++) {
        if (kv_message_entry(KV_WIRE_REQUEST, body, batch->body_bytes, &at, &header, &entry,
                             &why) != KV_OK)
            fail_msg("%s", why);
        on_data(NULL, &header, sizeof(header), entry, header.body_bytes);
    }
    assert_int_equal(n_entries, batch->n_units);
    assert_int_equal(batch->request_id,
                     f.node.seen[f.node.n_seen - n_entries].header.request_id);
    f.node.n_batches++;
}

static void on_data(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    struct seen *seen = &f.node.seen[f.node.n_seen];
    const char *why;

    (void)owner;
    assert_true(f.node.n_seen < REQUESTS_MAX);
    assert_int_equal(
        kv_message_check(message, message_bytes, body, body_bytes, &seen->header, &why), KV_OK);
    if (seen->header.kind == KV_WIRE_BATCH) {
        const struct kv_wire_header batch = seen->header;
        const struct kv_wire_header fields = {.n_units = batch.n_units};

        if (f.node.n_busy_batches > 0) {
            f.node.n_busy_batches--;
            answer(&batch, KV_BUSY, &fields, "later", 5);
            return;
        }
        on_batch(&batch, body);
        return;
    }
    assert_int_equal(seen->header.kind, KV_WIRE_REQUEST);
    if (seen->header.op == KV_OP_CANCEL) {
        f.node.n_cancels++;
        f.node.cancelled = seen->header.offset;
        return;
    }
    f.node.n_pings += seen->header.op == KV_OP_PING;
    seen->body = malloc(body_bytes + 1);
    assert_non_null(seen->body);
    if (body_bytes > 0)
        memcpy(seen->body, body, body_bytes);
    seen->bulk = NULL;
    seen->is_done = false;
    f.node.n_seen++;
    if (!f.node.is_manual && !f.node.is_deaf)
        carry_out(seen);
}

static void on_bulk(void *owner,
                    const void *message,
                    size_t message_bytes,
                    size_t bytes,
                    struct kv_incoming *incoming)
{
    struct kv_wire_header header;
    const char *why;

    (void)owner;
    assert_int_equal(kv_message_check(message, message_bytes, NULL, bytes, &header, &why),
                     KV_OK);
    for (unsigned i = 0; i < f.node.n_seen; i++) {
        struct seen *seen = &f.node.seen[i];

        if (seen->header.request_id == header.request_id) {
            assert_int_equal(seen->header.bulk_bytes, bytes);
            seen->bulk = incoming;
            if (!f.node.is_manual && !f.node.is_deaf)
                carry_out(seen);
            return;
        }
    }
    fail_msg("data without its request");
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    (void)owner;
    (void)channel_arg;
    (void)status;
}

static const struct kv_port_events control_events = {
    .message = on_control,
    .failed = on_failed,
};
static const struct kv_port_events data_events = {
    .message = on_data,
    .incoming = on_bulk,
    .failed = on_failed,
};

/* Counts requests from 0 again. */
static void forget(void)
{
    for (unsigned i = 0; i < f.node.n_seen; i++)
        free(f.node.seen[i].body);
    f.node.n_seen = 0;
}

/* ---- driving ----------------------------------------------------------------------------- */

/* Everything that can happen now happens; then time moves on. */
static void turn(uint64_t us)
{
    for (unsigned i = 0; i < 8; i++) {
        kv_poll(f.client);
        while (kv_port_progress(f.node.control) + kv_port_progress(f.node.data) > 0)
            ;
    }
    kv_poll(f.client);
    kvc_client_check(f.client);
    f.clock.virtual_us += us;
}

static kv_status_t run(struct kv_op *op, uint64_t most_us)
{
    uint64_t until_us = f.clock.virtual_us + most_us;

    while (kv_op_status(op) == KV_IN_PROGRESS && f.clock.virtual_us < until_us)
        turn(1000);
    return kv_op_status(op);
}

static int set_up_lanes(uint32_t n_lanes, uint32_t credits, uint32_t ops_max)
{
    struct kv_transport_config config = {0};
    struct kvc_client_setup setup = {0};
    struct kvc_node_setup remote = {.mode = KV_CHANNEL_NETWORK};
    struct kv_model_info model = {.name = "model"};
    char detail[256], address[256] = "loopback:";
    const void *bytes;
    size_t n_bytes;
    struct kv_op *op;

    memset(&f, 0, sizeof(f));
    f.node.n_lanes = n_lanes;
    f.node.credits = credits;
    kv_clock_virtual_init(&f.clock, 1000000);
    assert_int_equal(kv_transport_loopback.open(&config, &f.transport, detail, sizeof(detail)),
                     KV_OK);
    assert_int_equal(
        f.transport->ops->port_open(f.transport, &control_events, NULL, &f.node.control),
        KV_OK);
    assert_int_equal(f.transport->ops->port_open(f.transport, &data_events, NULL, &f.node.data),
                     KV_OK);
    f.node.id.bytes[0] = 1;
    f.node.generation = 1;
    f.node.rows = calloc(N_LAYERS * N_HEADS * N_TOKENS, ROW_BYTES);
    f.node.crcs = calloc(N_LAYERS * N_HEADS * N_TOKENS, sizeof(uint32_t));
    f.node.answers = malloc((size_t)CREDITS * ANSWER_BYTES);
    assert_true(f.node.rows != NULL && f.node.crcs != NULL && f.node.answers != NULL);

    f.node.control->ops->port_address(f.node.control, &bytes, &n_bytes);
    for (size_t i = 0; i < n_bytes; i++)
        snprintf(address + strlen(address), 3, "%02x", ((const uint8_t *)bytes)[i]);
    remote.address = address;
    setup.nodes = &remote;
    setup.n_nodes = 1;
    setup.transport = f.transport;
    setup.open_control = kvc_control_message_open;
    setup.clock = &f.clock;
    setup.seed = 7;
    setup.ops_max = ops_max;
    setup.retry_ms = RETRY_MS;
    setup.peer_timeout_ms = PEER_TIMEOUT_MS;
    assert_int_equal(kvc_client_create(&setup, &f.client), KV_OK);

    assert_int_equal(kv_schema_uniform(&model.schema, N_LAYERS, N_HEADS, 64, 64, KV_FP16),
                     KV_OK);
    assert_int_equal(kv_open_begin(f.client, &model, NULL, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    f.session = kv_op_session(op);
    assert_non_null(f.session);
    kv_op_free(op);
    assert_int_equal(kv_buffer_alloc(f.client, 8 << 20, &f.buffer), KV_OK);
    f.memory = kv_buffer_data(f.buffer);
    for (size_t i = 0; i < 8 << 20; i++)
        f.memory[i] = (uint8_t)(i * 2654435761u >> 11);
    return 0;
}

static int set_up(void **state)
{
    (void)state;
    return set_up_lanes(1, CREDITS, OPS_MAX);
}

static int set_up_many(void **state)
{
    (void)state;
    return set_up_lanes(3, 2 * KVC_MESSAGES_LARGE_MAX, 2 * KVC_MESSAGES_LARGE_MAX);
}

static int tear_down(void **state)
{
    (void)state;
    kv_client_close(f.client);
    forget();
    if (f.node.to_client != NULL)
        f.node.to_client->ops->channel_close(f.node.to_client);
    f.node.data->ops->port_close(f.node.data);
    f.node.control->ops->port_close(f.node.control);
    f.transport->ops->close(f.transport);
    free(f.node.rows);
    free(f.node.crcs);
    free(f.node.answers);
    return 0;
}

static struct kv_op *begin_put(const struct kv_rows *rows, size_t offset)
{
    struct kv_rows_io io = {.buffer = f.buffer, .offset = offset};
    struct kv_op *op;

    assert_int_equal(kv_put_begin(f.session, rows, &io, 0, &op), KV_OK);
    return op;
}

static struct kv_op *begin_read(const struct kv_rows *rows, size_t offset)
{
    struct kv_rows_io io = {.buffer = f.buffer, .offset = offset};
    struct kv_op *op;

    assert_int_equal(kv_read_begin(f.session, rows, &io, 0, &op), KV_OK);
    return op;
}

static void put(const struct kv_rows *rows)
{
    struct kv_op *op = begin_put(rows, 0);

    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
}

/* ---- tests ------------------------------------------------------------------------------- */

static void test_hello(void **state)
{
    struct kv_node_info info;

    (void)state;
    kv_client_node(f.client, 0, &info);
    assert_string_equal(info.name, "fake");
    assert_int_equal(info.state, KV_NODE_CONNECTED);
    assert_int_equal(info.n_threads, 1);
    assert_int_equal(f.node.n_hellos, 1);
    assert_int_equal(kv_session_generation(f.session), 1);
}

/* A unit's large share goes by bulk, cut where blocks begin, and comes back the same. */
static void test_large(void **state)
{
    struct kv_rows rows = {.layer_begin = 1,
                           .n_layers = 1,
                           .kv_head_begin = 2,
                           .n_kv_heads = 1,
                           .token_begin = 100};
    size_t bytes;
    struct kv_op *op;
    uint32_t token = 100;

    (void)state;
    rows.n_tokens = 6000;
    bytes = kv_rows_bytes(kv_session_schema(f.session), &rows);
    assert_int_equal(bytes, 6000 * ROW_BYTES);
    put(&rows);
    for (unsigned i = 0; i < f.node.n_seen; i++) {
        const struct kv_wire_header *header = &f.node.seen[i].header;

        assert_int_equal(header->op, KV_OP_PUT);
        assert_int_equal(header->n_units, 1);
        assert_int_equal(header->token_begin, token);
        assert_int_equal(header->bulk_bytes, header->token_count * ROW_BYTES);
        assert_true(header->bulk_bytes <= KV_WIRE_BULK_MAX);
        token += header->token_count;
        assert_true(token == 6100 || token % KV_BLOCK_TOKENS == 0);
    }
    assert_int_equal(token, 6100);
    assert_int_equal(f.node.n_seen, 2);

    op = begin_read(&rows, 4 << 20);
    assert_true(kv_buffer_busy(f.buffer));
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_memory_equal(f.memory, f.memory + (4 << 20), bytes);
    assert_false(kv_buffer_busy(f.buffer));
}

/* Small shares of many units travel in one message. */
static void test_small(void **state)
{
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 20};
    uint32_t n_ids[N_HEADS] = {3, 0, 2, 1};
    uint32_t ids[] = {19, 0, 7, 4, 4, 18};
    struct kv_fetch fetch = {.layer = 1, .n_ids = n_ids, .ids = ids};
    uint32_t crcs[6];
    struct kv_rows_io io = {.buffer = f.buffer, .offset = 4 << 20, .crcs = crcs};
    size_t bytes = kv_rows_bytes(kv_session_schema(f.session), &rows);
    uint32_t head = 0, left = n_ids[0];
    struct kv_op *op;

    (void)state;
    put(&rows);
    assert_int_equal(f.node.n_seen, 1);
    assert_int_equal(f.node.seen[0].header.n_units, N_LAYERS * N_HEADS);
    assert_int_equal(f.node.seen[0].header.bulk_bytes, 0);
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.n_seen, 2);
    assert_memory_equal(f.memory, f.memory + (4 << 20), bytes);

    assert_int_equal(kv_fetch_begin(f.session, &fetch, &io, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.n_seen, 3);
    assert_int_equal(f.node.seen[2].header.n_units, 3);
    assert_int_equal(f.node.seen[2].header.snapshot, 20);
    for (unsigned i = 0; i < 6; i++) {
        const uint8_t *row;

        while (left == 0)
            left = n_ids[++head];
        left--;
        row = f.memory + ((N_HEADS + head) * 20 + ids[i]) * ROW_BYTES;
        assert_memory_equal(f.memory + (4 << 20) + i * ROW_BYTES, row, ROW_BYTES);
        assert_int_equal(crcs[i], kv_row_crc(f.session, row, ROW_BYTES, 1, head, ids[i]));
    }
}

static void test_arguments(void **state)
{
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 1};
    struct kv_rows_io io = {.buffer = f.buffer, .offset = (8 << 20) - 1};
    struct kv_op *op, *many[OPS_MAX];

    (void)state;
    assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_INVALID);
    rows.token_begin = N_TOKENS;
    io.offset = 0;
    assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_TOO_LARGE);
    rows.token_begin = 0;
    rows.kv_head_begin = 1;
    assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_INVALID);
    rows.kv_head_begin = 0;
    rows.n_layers = N_LAYERS + 1;
    assert_int_equal(kv_rows_bytes(kv_session_schema(f.session), &rows), 0);
    f.node.is_manual = true;
    rows.n_layers = 1;
    for (unsigned i = 0; i < OPS_MAX; i++)
        assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &many[i]), KV_OK);
    assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_BUSY);
    turn(0);
    assert_true(f.node.n_seen <= CREDITS);
    for (unsigned i = 0; i < OPS_MAX; i++)
        kv_op_free(many[i]);
}

/* Reads that wait at the node leave credits for the writes that bring their rows, however few the
 * credits are. */
static void test_few_credits(void **state)
{
    const uint32_t least = 3, most = 2 * KV_PRIORITY_COUNT;

    (void)state;
    for (uint32_t credits = least; credits <= most; credits++) {
        const struct kv_rows rows = {.n_layers = 1, .n_tokens = 20};
        const struct kv_rows next = {.n_layers = 1, .token_begin = 20, .n_tokens = 1};
        struct kv_rows_io io = {.buffer = f.buffer};
        struct kv_op *reads[2 * KV_PRIORITY_COUNT], *write, *append;

        tear_down(NULL);
        set_up_lanes(1, credits, OPS_MAX);
        io.buffer = f.buffer;
        f.node.is_manual = true;
        for (uint32_t i = 0; i < credits; i++)
            reads[i] = begin_read(&rows, 0);
        turn(0);
        assert_in_range(f.node.n_seen, 1, credits - 2);
        write = begin_put(&rows, 0);
        assert_int_equal(kv_append_begin(f.session, &next, &io, 0, &append), KV_OK);
        turn(0);
        for (unsigned op = KV_OP_PUT; op <= KV_OP_APPEND; op++) {
            unsigned n = 0;

            for (unsigned i = 0; i < f.node.n_seen; i++)
                n += f.node.seen[i].header.op == op;
            assert_int_equal(n, 1);
        }
        for (uint32_t i = 0; i < credits; i++)
            kv_op_free(reads[i]);
        kv_op_free(append);
        kv_op_free(write);
    }
}

/* What comes after the deadline lands nowhere, and is not taken for something else. */
static void test_late_answer(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 1000};
    struct kv_op *op;
    unsigned n_sends;

    (void)state;
    put(&rows);
    f.node.is_manual = true;
    memset(f.memory + (4 << 20), 0xee, 1000 * ROW_BYTES);
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 50000), KV_IN_PROGRESS);
    f.clock.virtual_us += 6000000;
    turn(0);
    assert_int_equal(kv_op_status(op), KV_DEADLINE);
    assert_non_null(strstr(kv_op_detail(op), ": read: deadline: after "));
    assert_non_null(strstr(kv_client_detail(f.client), "layer 0"));
    assert_false(kv_buffer_busy(f.buffer));
    assert_true(f.node.n_cancels > 0);
    n_sends = f.node.n_sends_done;
    carry_out(&f.node.seen[f.node.n_seen - 1]);
    turn(0);
    turn(0);
    assert_int_equal(f.node.n_sends_done, n_sends + 1); /* refused */
    for (size_t i = 0; i < 1000 * ROW_BYTES; i++)
        assert_int_equal(f.memory[(4 << 20) + i], 0xee);
    assert_int_equal(kv_op_status(op), KV_DEADLINE);
    kv_op_free(op);
}

/* No node is asked to keep a request for longer than any may. */
static void test_longest_deadline(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 10};
    struct kv_rows_io io = {.buffer = f.buffer};
    struct kv_op *op;

    (void)state;
    put(&rows);
    f.node.is_manual = true;
    assert_int_equal(kv_read_begin(f.session, &rows, &io, UINT32_MAX, &op), KV_OK);
    turn(0);
    assert_int_equal(f.node.n_seen, 2);
    assert_in_range(f.node.seen[1].header.deadline_us, KV_WIRE_DEADLINE_MAX_US / 2,
                    KV_WIRE_DEADLINE_MAX_US);
    kv_op_free(op);
}

/* A put that was given up holds its buffer while the node may still take the data. */
static void test_quarantine(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 1000};
    struct kv_op *op;

    (void)state;
    f.node.is_manual = true;
    op = begin_put(&rows, 0);
    assert_int_equal(run(op, 5000), KV_IN_PROGRESS);
    assert_int_equal(f.node.n_seen, 1);
    assert_non_null(f.node.seen[0].bulk);
    kv_cancel(op);
    assert_int_equal(kv_op_status(op), KV_CANCELLED);
    kv_op_free(op);
    turn(0);
    assert_int_equal(f.node.n_cancels, 1);
    assert_int_equal(f.node.cancelled, f.node.seen[0].header.request_id);
    assert_true(kv_buffer_busy(f.buffer));
    assert_int_equal(kv_buffer_free(f.buffer), KV_BUSY);
    kv_incoming_refuse(f.node.seen[0].bulk);
    f.node.seen[0].bulk = NULL;
    turn(0);
    assert_false(kv_buffer_busy(f.buffer));
    assert_int_equal(kv_buffer_free(f.buffer), KV_OK);
}

static void test_busy(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 1000};
    struct kv_op *op;

    (void)state;
    f.node.n_busy = 3;
    op = begin_put(&rows, 0);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(f.node.n_seen, 4);
    assert_true(kv_op_elapsed_us(op) >= 1400); /* 200 + 400 + 800 */
    kv_op_free(op);
    f.node.n_busy = UINT32_MAX;
    op = begin_read(&rows, 0);
    assert_int_equal(run(op, 10000000), KV_DEADLINE);
    kv_op_free(op);
}

/* What is asked again has a new id; an answer to the old one is not taken.  It was sent when it
 * was sent first. */
static void test_resend(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 10};
    struct kv_op_times times;
    struct kv_op *op;

    (void)state;
    put(&rows);
    f.node.is_manual = true;
    op = begin_read(&rows, 4 << 20);
    turn((RETRY_MS + 1) * 1000);
    turn(0);
    assert_int_equal(f.node.n_seen, 3);
    assert_int_equal(f.node.cancelled, f.node.seen[1].header.request_id);
    assert_true(f.node.seen[1].header.request_id != f.node.seen[2].header.request_id);
    carry_out(&f.node.seen[1]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    carry_out(&f.node.seen[2]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_OK);
    kv_op_get_times(op, &times);
    assert_in_range(times.sent_us - times.begun_us, 0, 1000);
    assert_true(times.arrived_us - times.begun_us > RETRY_MS * 1000);
    carry_out(&f.node.seen[2]);
    turn(0);
    kv_op_free(op);
    assert_memory_equal(f.memory, f.memory + (4 << 20), 10 * ROW_BYTES);
}

static struct kv_op *begin_object_put(struct kv_object *object)
{
    struct kv_op *op;

    *object = (struct kv_object){.name = "object", .buffer = f.buffer, .bytes = OBJECT_BYTES};
    assert_int_equal(kv_objects_begin(f.client, KV_OBJECT_PUT, object, 1, 0, &op), KV_OK);
    turn(0);
    return op;
}

/* Each put of an object has a number of its own, the same when it is sent again, and tells
 * which ones have ended.  No more go than the node keeps account of. */
static void test_puts_are_numbered(void **state)
{
    const struct kv_wire_header fields = {.object_bytes = OBJECT_BYTES};
    struct kv_object first_object, object;
    struct kv_op *first, *op = NULL;
    struct kv_wire_header header;
    unsigned n_put = 0;

    (void)state;
    f.node.is_manual = true;
    first = begin_object_put(&first_object);
    turn((RETRY_MS + 1) * 1000);
    turn(0);
    assert_int_equal(f.node.n_seen, 2);
    assert_true(f.node.seen[1].header.request_id != f.node.seen[0].header.request_id);
    assert_int_equal(f.node.seen[0].header.put_number, 0);
    assert_int_equal(f.node.seen[1].header.put_number, 0);
    header = f.node.seen[1].header;
    while (n_put < 2 * KV_WIRE_PUTS_MAX) {
        forget();
        op = begin_object_put(&object);
        if (f.node.n_seen == 0)
            break;
        assert_int_equal(f.node.seen[0].header.put_number, ++n_put);
        assert_int_equal(f.node.seen[0].header.put_settled, 0);
        carry_out(&f.node.seen[0]);
        turn(0);
        assert_int_equal(kv_op_status(op), KV_OK);
        kv_op_free(op);
    }
    assert_int_equal(n_put, KV_WIRE_PUTS_MAX - 1);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    answer(&header, KV_OK, &fields, NULL, 0);
    turn(0);
    turn(0);
    assert_int_equal(kv_op_status(first), KV_OK);
    assert_int_equal(f.node.n_seen, 1);
    assert_int_equal(f.node.seen[0].header.put_number, KV_WIRE_PUTS_MAX);
    assert_int_equal(f.node.seen[0].header.put_settled, KV_WIRE_PUTS_MAX);
    carry_out(&f.node.seen[0]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_OK);
    kv_op_free(op);
    kv_op_free(first);
}

/* What is wrong with a forged answer: all else in it is as the node would have made it. */
enum forgery {
    FORGED_NO_TOKEN,
    FORGED_ANY_TOKEN,
    FORGED_BIT_OF_TOKEN,
    FORGED_ID_NEAR,    /* ids about the last one */
    FORGED_ID_COUNTED, /* as many as "kvctl clients" tells */
    FORGED_ID_ANY,
    FORGED_OP,
    FORGED_CLIENT_INDEX,
    FORGED_SESSION,
    FORGED_GENERATION,
    N_FORGERIES,
};

static void forge(struct kv_wire_header *header, enum forgery how, struct kv_random *random)
{
    unsigned bit = (unsigned)kv_random_below(random, 128);
    uint64_t slot = kv_random_below(random, CREDITS);

    switch (how) {
    case FORGED_NO_TOKEN:
        memset(&header->client_token, 0, sizeof(header->client_token));
        break;
    case FORGED_ANY_TOKEN:
        kv_random_fill(random, &header->client_token, sizeof(header->client_token));
        break;
    case FORGED_BIT_OF_TOKEN:
        header->client_token.bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        break;
    case FORGED_ID_NEAR:
        header->request_id += (1 + kv_random_below(random, 1000)) << 24;
        break;
    case FORGED_ID_COUNTED:
        header->request_id =
            kv_random_below(random, 2 * f.client->nodes[0].requests + 2) << 24 | slot;
        break;
    case FORGED_ID_ANY:
        header->request_id = (kv_random_next(random) >> 1 & ~UINT64_C(0xffffff)) | slot;
        break;
    case FORGED_OP:
        header->op = header->op == KV_OP_READ ? KV_OP_FETCH : KV_OP_READ;
        break;
    case FORGED_CLIENT_INDEX:
        header->client_index++;
        break;
    case FORGED_SESSION:
        header->session_index++;
        break;
    default:
        header->generation += 1 + (uint32_t)kv_random_below(random, 3);
    }
}

/* Answers a request as a stranger would who knows the client's address. */
static void answer_forged(const struct kv_wire_header *request,
                          enum forgery how,
                          struct kv_random *random,
                          uint32_t n_rows)
{
    static uint32_t body[1000 + KV_WIRE_BODY_MAX / sizeof(uint32_t)];
    struct kv_wire_header header = {.kind = KV_WIRE_REPLY, .n_rows = n_rows};
    size_t rows_bytes = (size_t)n_rows * ROW_BYTES, bytes = n_rows * sizeof(uint32_t);
    bool by_bulk = rows_bytes > KV_WIRE_INLINE_MAX / 2;
    uint8_t *rows = (uint8_t *)body + bytes;

    memset(rows, 0x77, rows_bytes);
    for (uint32_t i = 0; i < n_rows; i++)
        body[i] = kv_row_crc(f.session, rows + (size_t)i * ROW_BYTES, ROW_BYTES, 0, 0, i);
    address(&header, request);
    forge(&header, how, random);
    switch (kv_random_below(random, 4)) {
    case 0: /* a failure */
        header.status = KV_NOT_FOUND;
        header.n_rows = 0;
        kv_message_seal(&header, "no such thing", 13);
        kv_channel_send(f.node.to_client, &header, sizeof(header), "no such thing", 13,
                        send_done, &f.node);
        return;
    case 1: /* the rows before, or without, the rest */
        header.bulk_bytes = rows_bytes;
        header.kind = KV_WIRE_BULK_REPLY;
        kv_message_seal(&header, NULL, 0);
        kv_channel_send(f.node.to_client, &header, sizeof(header), rows, rows_bytes, send_done,
                        &f.node);
        return;
    case 2: /* all in a body that is too large to come at once */
        kv_message_seal(&header, body, bytes + rows_bytes);
        kv_channel_send(f.node.to_client, &header, sizeof(header), body, bytes + rows_bytes,
                        send_done, &f.node);
        return;
    default:
        header.bulk_bytes = by_bulk ? rows_bytes : 0;
        bytes += by_bulk ? 0 : rows_bytes;
        kv_message_seal(&header, body, bytes);
        kv_channel_send(f.node.to_client, &header, sizeof(header), body, bytes, send_done,
                        &f.node);
        if (!by_bulk)
            return;
        header.kind = KV_WIRE_BULK_REPLY;
        kv_message_seal(&header, NULL, 0);
        kv_channel_send(f.node.to_client, &header, sizeof(header), rows, rows_bytes, send_done,
                        &f.node);
    }
}

/* Answers that are right but for who sent them, or for what they answer, are never taken; the
 * node's own is, afterwards. */
static void test_forged(void **state)
{
    enum {
        TRIES = 3000
    };
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 600};
    size_t bytes;
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 3);
    put(&rows);
    f.node.is_manual = true;
    for (unsigned i = 0; i < 3; i++) {
        static const uint32_t counts[] = {1, 100, 600};
        const struct kv_wire_header *request;
        struct kv_op *op;

        rows.n_tokens = counts[i];
        bytes = (size_t)counts[i] * ROW_BYTES;
        memset(f.memory + (4 << 20), 0xee, bytes);
        forget();
        op = begin_read(&rows, 4 << 20);
        turn(0);
        assert_int_equal(f.node.n_seen, 1);
        request = &f.node.seen[0].header;
        assert_true(request->request_id >> 24 > 1000000); /* not a count of requests */
        for (unsigned j = 0; j < TRIES; j++) {
            uint64_t n_dropped = f.client->n_dropped;

            answer_forged(request, (enum forgery)(j % N_FORGERIES), &random, counts[i]);
            turn(0);
            assert_true(f.client->n_dropped > n_dropped);
            assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
        }
        assert_int_equal(f.node.n_seen, 1);
        for (size_t j = 0; j < bytes; j++)
            assert_int_equal(f.memory[(4 << 20) + j], 0xee);
        carry_out(&f.node.seen[0]);
        assert_int_equal(run(op, 50000), KV_OK);
        kv_op_free(op);
        assert_memory_equal(f.memory, f.memory + (4 << 20), bytes);
    }
}

static struct {
    unsigned n_received, n_refused;
} offers;

static kv_status_t receive_offer(struct kv_incoming *incoming,
                                 const struct kv_iov *iov,
                                 unsigned n_iov,
                                 kv_transport_done_fn done,
                                 void *arg)
{
    (void)incoming;
    (void)iov;
    (void)n_iov;
    (void)done;
    (void)arg;
    offers.n_received++;
    return KV_IO;
}

static void refuse_offer(struct kv_incoming *incoming)
{
    (void)incoming;
    offers.n_refused++;
}

/* What is too large to come at once is not even received, where nothing waits for it. */
static void test_forged_offers(void **state)
{
    enum {
        BYTES = 100000
    };
    static const struct kv_transport_ops row = {.receive = receive_offer,
                                                .refuse = refuse_offer};
    static const uint8_t body[BYTES];
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 600};
    struct kv_incoming incoming = {.ops = &row};
    struct kv_wire_header header;
    struct kv_random random;
    struct kv_op *op;

    (void)state;
    kv_random_init(&random, 5);
    memset(&offers, 0, sizeof(offers));
    f.node.is_manual = true;
    op = begin_read(&rows, 4 << 20);
    turn(0);
    for (unsigned i = 0; i < 4 * N_FORGERIES; i++) {
        bool is_bulk = i / N_FORGERIES % 2 == 1;

        header = (struct kv_wire_header){.kind = is_bulk ? KV_WIRE_BULK_REPLY : KV_WIRE_REPLY};
        address(&header, &f.node.seen[0].header);
        if (is_bulk)
            header.bulk_bytes = BYTES;
        forge(&header, (enum forgery)(i % N_FORGERIES), &random);
        if (i >= 2 * N_FORGERIES)
            header.request_id |= KVC_CONTROL_ID_BIT;
        kv_message_seal(&header, body, is_bulk ? 0 : BYTES);
        kvc_client_events.incoming(f.client, &header, sizeof(header), BYTES, &incoming);
        assert_int_equal(offers.n_received, 0);
        assert_int_equal(offers.n_refused, i + 1);
    }
    header = (struct kv_wire_header){.kind = KV_WIRE_REPLY};
    address(&header, &f.node.seen[0].header);
    kv_message_seal(&header, body, BYTES);
    kvc_client_events.incoming(f.client, &header, sizeof(header), BYTES, &incoming);
    assert_int_equal(offers.n_received, 1);
    kv_op_free(op);
}

/* Strangers cannot end a control operation either, nor keep a node alive that says nothing. */
static void test_forged_control(void **state)
{
    Kvpb__OpenReply opened = KVPB__OPEN_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 10};
    uint64_t begin_us, n_dropped = f.client->n_dropped;
    struct kv_wire_header request;
    struct kv_random random;
    struct kv_op *op;

    (void)state;
    kv_random_init(&random, 4);
    put(&rows);
    f.node.is_mute = true;
    assert_int_equal(kv_truncate_begin(f.session, 5, 0, &op), KV_OK);
    turn(0);
    assert_int_equal(f.node.last_control.op, KV_OP_TRUNCATE);
    opened.outcome = &outcome;
    opened.generation = f.node.generation;
    tell_grant(&opened);
    for (unsigned i = 0; i < 1000; i++) {
        request = f.node.last_control;
        forge(&request, (enum forgery)(i % (FORGED_OP + 1)), &random);
        if (i % N_FORGERIES >= FORGED_ID_NEAR && i % N_FORGERIES < FORGED_OP)
            request.request_id |= KVC_CONTROL_ID_BIT;
        reply_control(&request, &opened.base);
        turn(0);
        assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    }
    assert_true(f.client->n_dropped - n_dropped >= 1000);
    reply_control(&f.node.last_control, &opened.base);
    assert_int_equal(run(op, 50000), KV_OK);
    kv_op_free(op);

    f.node.is_deaf = true;
    forget();
    begin_us = f.clock.virtual_us;
    op = begin_read(&rows, 4 << 20);
    while (kv_op_status(op) == KV_IN_PROGRESS) {
        turn(20000);
        answer_forged(&f.node.seen[0].header, FORGED_NO_TOKEN, &random, 10);
    }
    assert_int_equal(kv_op_status(op), KV_UNREACHABLE);
    assert_true(f.clock.virtual_us - begin_us < 2 * PEER_TIMEOUT_MS * 1000);
    kv_op_free(op);
}

static void test_corrupt(void **state)
{
    struct kv_rows rows = {
        .n_layers = 1, .kv_head_begin = 3, .n_kv_heads = 1, .n_tokens = 1000};
    struct kv_op *op;

    (void)state;
    put(&rows);
    f.node.corrupts = true;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_CORRUPT);
    assert_non_null(strstr(kv_op_detail(op), "layer 0, kv head 3, token 5"));
    kv_op_free(op);
    rows.n_tokens = 10;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_CORRUPT);
    kv_op_free(op);
    assert_int_equal(f.client->n_corrupt, 2);
    assert_false(kv_buffer_busy(f.buffer));
}

/* A node that says nothing is asked, then given up; the next operation connects anew. */
static void test_silence(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 10};
    struct kv_node_info info;
    struct kv_op *op;
    uint64_t begin_us = f.clock.virtual_us;

    (void)state;
    put(&rows);
    f.node.is_deaf = true;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 10000000), KV_UNREACHABLE);
    assert_true(f.clock.virtual_us - begin_us < 2 * PEER_TIMEOUT_MS * 1000);
    assert_non_null(strstr(kv_op_detail(op), "no reply for"));
    assert_true(f.node.n_pings > 0);
    kv_op_free(op);
    kv_client_node(f.client, 0, &info);
    assert_int_equal(info.state, KV_NODE_LOST);

    f.node.is_deaf = false;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.n_hellos, 2);
    kv_client_node(f.client, 0, &info);
    assert_int_equal(info.reconnects, 1);

    /* Another node in its place has no such session. */
    f.node.is_deaf = true;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 10000000), KV_UNREACHABLE);
    kv_op_free(op);
    f.node.is_deaf = false;
    f.node.id.bytes[1]++;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_NOT_FOUND);
    kv_op_free(op);
}

/* However long a client takes silence for life, its cancels are requests that a node takes. */
static void test_patient(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 10};
    struct kv_op *op;

    (void)state;
    f.client->peer_timeout_us = (UINT64_C(1) << 29) * 1000;
    f.node.is_manual = true;
    op = begin_read(&rows, 0);
    turn(0);
    kv_op_free(op);
    turn(0);
    assert_int_equal(f.node.n_cancels, 1);
}

/* A node that answers pings is slow, not dead. */
static void test_slow(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 10};
    struct kv_op *op;
    unsigned n_done = 0;

    (void)state;
    put(&rows);
    f.node.is_manual = true;
    op = begin_read(&rows, 4 << 20);
    for (unsigned i = 0; i < 4000; i++) {
        turn(1000);
        for (; n_done < f.node.n_seen; n_done++)
            if (f.node.seen[n_done].header.op == KV_OP_PING)
                carry_out(&f.node.seen[n_done]);
    }
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    assert_true(f.node.n_pings > 0);
    f.node.is_manual = false;
    assert_int_equal(run(op, 2000000), KV_OK);
    kv_op_free(op);
}

/* A lifecycle operation whose answer is lost is completed before the session is used again. */
static void test_catch_up(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 10};
    struct kv_op *op, *behind;
    uint64_t op_id;

    (void)state;
    put(&rows);
    f.node.is_deaf = true; /* the operation does not get there */
    assert_int_equal(kv_truncate_begin(f.session, 15, 1000, &op), KV_OK);
    behind = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 3000000), KV_DEADLINE);
    kv_op_free(op);
    assert_int_equal(kv_session_generation(f.session), 2);
    assert_int_equal(f.node.generation, 1);
    f.node.is_deaf = false;
    assert_int_equal(run(behind, 1000000), KV_OK);
    kv_op_free(behind);
    assert_int_equal(f.node.generation, 2);
    assert_int_equal(f.node.seen[f.node.n_seen - 1].header.generation, 2);

    f.node.is_mute = true; /* it gets there, the answer does not come */
    assert_int_equal(kv_truncate_begin(f.session, 5, 1000, &op), KV_OK);
    assert_int_equal(run(op, 3000000), KV_DEADLINE);
    kv_op_free(op);
    assert_int_equal(f.node.generation, 3);
    op_id = f.node.last_op_id;
    f.node.is_mute = false;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.generation, 3);
    assert_true(f.node.last_op_id == op_id);

    assert_int_equal(kv_fork_begin(f.session, 5, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    struct kv_session *child = kv_op_session(op);

    assert_non_null(child);
    assert_null(kv_op_session(op));
    kv_op_free(op);
    assert_int_equal(kv_session_generation(f.session), 3);
    assert_int_equal(kv_session_generation(child), 1);
    kv_session_free(child);

    /* Nobody gets the child of a fork that has failed, and nothing is to be caught up with. */
    f.node.is_deaf = true;
    assert_int_equal(kv_fork_begin(f.session, 5, 1000, &op), KV_OK);
    assert_int_equal(run(op, 3000000), KV_DEADLINE);
    assert_null(kv_op_session(op));
    kv_op_free(op);
    f.node.is_deaf = false;
    f.node.n_lifecycle = 0;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.n_lifecycle, 0);
    assert_int_equal(kv_session_generation(f.session), 3);
}

/* A node that does not find what a lifecycle operation names is asked how far it is.  It may
 * have done the operation after all; if not, what it says cannot be, and it is not asked for
 * ever. */
static void test_catch_up_not_found(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 10};
    struct kv_op *op;

    (void)state;
    put(&rows);
    for (unsigned i = 0; i < 2; i++) {
        f.node.is_deaf = true;
        assert_int_equal(kv_truncate_begin(f.session, 15, 1000, &op), KV_OK);
        assert_int_equal(run(op, 3000000), KV_DEADLINE);
        kv_op_free(op);
        f.node.is_deaf = false;
        f.node.loses_child = i == 0;
        f.node.denies = i == 1;
        f.node.n_lifecycle = 0;
        op = begin_read(&rows, 4 << 20);
        assert_int_equal(run(op, 1000000), i == 0 ? KV_OK : KV_CORRUPT);
        if (i == 1)
            assert_non_null(strstr(kv_op_detail(op), "the node cannot catch up"));
        kv_op_free(op);
        assert_int_equal(f.node.n_lifecycle, 1);
        f.node.loses_child = f.node.denies = false;
    }
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
}

/* A ping of a large or a small message; the bytes that are to come back tell its lane. */
static void begin_ping(uint32_t lane, bool is_large)
{
    struct kv_op *op;

    assert_int_equal(kv_ping_begin(f.client, 0, lane, is_large ? KVC_MESSAGE_SMALL + 1 : 0,
                                   lane + 1, 0, &op),
                     KV_OK);
}

/* The lane of the request that came last. */
static uint32_t last_lane(void)
{
    return f.node.seen[f.node.n_seen - 1].header.token_count - 1;
}

/* Large envelopes, which all lanes share, have run out: a lane that waits for one holds up
 * neither its own small messages of another class, nor those of others, nor, when one comes
 * back, their large ones. */
static void test_lanes_share(void **state)
{
    const struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 1};
    bool has_units[3] = {false};
    struct kv_op *op;

    (void)state;
    for (uint32_t unit = 0; unit < N_LAYERS * N_HEADS; unit++)
        has_units[kvc_session_connection(f.session, unit / N_HEADS, unit % N_HEADS) -
                  f.client->nodes[0].connections] = true;
    assert_true(has_units[0] && has_units[1] && has_units[2]);
    f.node.is_manual = true;
    for (unsigned i = 0; i < KVC_MESSAGES_LARGE_MAX + 4; i++)
        begin_ping(0, true);
    turn(0);
    assert_int_equal(f.node.n_seen, KVC_MESSAGES_LARGE_MAX);
    op = begin_read(&rows, 0);
    turn(0);
    assert_int_equal(f.node.n_seen, KVC_MESSAGES_LARGE_MAX + 3);
    kv_op_free(op);
    turn(0);
    f.node.n_seen -= 3; /* counts on as without it */
    for (unsigned i = 0; i < 3; i++)
        free(f.node.seen[f.node.n_seen + i].body);
    begin_ping(1, false);
    begin_ping(2, false);
    turn(0);
    assert_int_equal(f.node.n_seen, KVC_MESSAGES_LARGE_MAX + 2);
    for (uint32_t lane = 1; lane < 3; lane++)
        for (unsigned i = 0; i < 2; i++)
            begin_ping(lane, true);
    turn(0);
    assert_int_equal(f.node.n_seen, KVC_MESSAGES_LARGE_MAX + 2);
    for (unsigned i = 0; i < 6; i++) {
        carry_out(&f.node.seen[i]);
        turn(0);
        assert_int_equal(f.node.n_seen, KVC_MESSAGES_LARGE_MAX + 3 + i);
        assert_int_equal(last_lane(), i % 3);
    }
}

/* ---- retrieval --------------------------------------------------------------------------- */

/* What the caller of a query brings. */
struct asked {
    struct kv_range ranges[2];
    float queries[N_HEADS * KV_QUERIES_MAX * 64];
    uint32_t n_held[N_HEADS];
    struct kv_cached_block held[4];
    struct kv_query query;
};

/* 190 candidates of each head of layer 1, in two ranges; rows of 300 tokens are there. */
static struct asked *ask(uint32_t k)
{
    static struct asked asked;
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 300};

    put(&rows);
    memset(&asked, 0, sizeof(asked));
    asked.ranges[0] = (struct kv_range){10, 100};
    asked.ranges[1] = (struct kv_range){200, 300};
    for (unsigned i = 0; i < sizeof(asked.queries) / sizeof(float); i++)
        asked.queries[i] = (float)i;
    asked.query = (struct kv_query){
        .layer = 1,
        .n_queries = 3,
        .queries = asked.queries,
        .scale = 0.125f,
        .merge = KV_MERGE_SUM,
        .answer = KV_ANSWER_ROWS,
        .k = k,
        .rerank = 4,
        .n_ranges = 2,
        .ranges = asked.ranges,
    };
    forget();
    return &asked;
}

static struct kv_op *begin_query(const struct kv_query *query)
{
    struct kv_rows_io io = {.buffer = f.buffer, .offset = 4 << 20};
    struct kv_op *op;

    memset(f.memory + (4 << 20), 0xee, 4 << 20);
    if (kv_query_begin(f.session, query, &io, 0, &op) != KV_OK)
        fail_msg("%s", kv_client_detail(f.client));
    return op;
}

/* Each id of every head, and its row, as the node chooses and has them. */
static void check_found(struct kv_op *op, const struct kv_query *query, const uint32_t *held)
{
    const struct kv_wire_range ranges[2] = {{query->ranges[0].begin, query->ranges[0].end},
                                            {query->ranges[1].begin, query->ranges[1].end}};
    uint32_t n_kv_heads = query->n_kv_heads > 0 ? query->n_kv_heads : N_HEADS;
    struct kv_query_result found;

    for (uint32_t head = 0; head < n_kv_heads; head++) {
        uint32_t row = 0;

        assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
        assert_int_equal(found.n_ids, query->k < 190 ? query->k : 190);
        assert_int_equal(found.n_scored_by_code + found.n_scored_by_key,
                         query->k * query->rerank < 190 ? 190 : 0);
        assert_int_equal(found.queue_us, 11);
        assert_int_equal(found.service_us, 22);
        assert_int_equal(found.node, 0);
        assert_true(isnan(found.recall));
        assert_int_equal(found.row_index != NULL, query->answer == KV_ANSWER_ROWS);
        assert_int_equal(found.weights != NULL, query->want_weights);
        assert_int_equal(found.query_mask != NULL, query->merge == KV_MERGE_NONE);
        for (uint32_t i = 0; i < found.n_ids; i++) {
            uint32_t token = spread(ranges, query->n_ranges, i, found.n_ids);
            size_t from = place(query->layer, query->kv_head_begin + head, token);

            assert_int_equal(found.ids[i], token);
            if (found.weights != NULL)
                assert_true(found.weights[i] == score_of(token));
            if (found.query_mask != NULL)
                assert_int_equal(found.query_mask[i], 1 + i % ((1u << query->n_queries) - 1));
            if (found.row_index == NULL)
                continue;
            if (held != NULL && held[head] == token / KV_BLOCK_TOKENS) {
                assert_int_equal(found.row_index[i], KV_ROW_CACHED);
                continue;
            }
            assert_int_equal(found.row_index[i], row);
            assert_int_equal(found.crcs[row], f.node.crcs[from]);
            assert_memory_equal((const uint8_t *)found.rows + row * ROW_BYTES,
                                f.node.rows + from * ROW_BYTES, ROW_BYTES);
            row++;
        }
        assert_int_equal(found.n_rows, row);
    }
    assert_int_equal(kv_op_query_result(op, n_kv_heads, &found), KV_INVALID);
}

/* One message for all heads; what it says, and what becomes of its answer. */
static void test_query(void **state)
{
    struct asked *asked = ask(20);
    const struct kv_wire_query *query;
    const struct kv_wire_unit *units;
    const struct kv_wire_range *ranges;
    const struct kv_wire_cached_block *held;
    struct kv_op_times times;
    struct kv_query_result found;
    struct kv_index_result indexed;
    const uint8_t *body;
    struct kv_op *op;

    (void)state;
    asked->query.kv_head_begin = 1;
    asked->query.n_kv_heads = 3;
    asked->query.want_weights = true;
    asked->query.merge = KV_MERGE_NONE;
    asked->n_held[0] = 2;
    asked->n_held[2] = 1;
    asked->held[0] = (struct kv_cached_block){0, HELD_FINGERPRINT};
    asked->held[1] = (struct kv_cached_block){9, HELD_FINGERPRINT};
    asked->held[2] = (struct kv_cached_block){2, HELD_FINGERPRINT + 1};
    asked->query.n_cached = asked->n_held;
    asked->query.cached = asked->held;
    op = begin_query(&asked->query);
    assert_true(kv_buffer_busy(f.buffer));
    assert_int_equal(kv_op_query_result(op, 0, &found), KV_INVALID);
    kv_op_get_times(op, &times);
    assert_int_equal(times.arrived_us, 0);
    f.clock.virtual_us += 10;
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_false(kv_buffer_busy(f.buffer));
    assert_int_equal(f.node.n_seen, 1);
    assert_int_equal(f.node.seen[0].header.op, KV_OP_QUERY);
    assert_int_equal(f.node.seen[0].header.snapshot, 300);
    assert_int_equal(f.node.seen[0].header.n_units, 3);

    body = f.node.seen[0].body;
    query = (const struct kv_wire_query *)body;
    units = (const struct kv_wire_unit *)(query + 1);
    ranges = (const struct kv_wire_range *)(units + 3);
    assert_int_equal(query->answer, KV_ANSWER_ROWS);
    assert_int_equal(query->merge, KV_MERGE_NONE);
    assert_int_equal(query->n_queries, 3);
    assert_int_equal(query->k, 20);
    assert_int_equal(query->rerank, 4);
    assert_true(query->scale == 0.125f);
    assert_int_equal(query->n_ranges, 2);
    assert_int_equal(query->flags, KV_WIRE_WEIGHTS);
    assert_int_equal(query->summaries | query->summary_blocks | query->reserved, 0);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(units[i].layer, 1);
        assert_int_equal(units[i].kv_head, 1 + i);
        assert_int_equal(units[i].n_ids, asked->n_held[i]);
    }
    assert_memory_equal(ranges, asked->ranges, sizeof(asked->ranges));
    assert_memory_equal(ranges + 2, asked->queries, 3 * 3 * 64 * sizeof(float));
    held = (const struct kv_wire_cached_block *)((const float *)(ranges + 2) + 3 * 3 * 64);
    assert_memory_equal(held, asked->held, 3 * sizeof(*held));
    assert_int_equal(f.node.seen[0].header.body_bytes, (const uint8_t *)(held + 3) - body);

    /* Head 2 has nothing; head 3 has other rows than the node. */
    check_found(op, &asked->query, (uint32_t[]){0, UINT32_MAX, UINT32_MAX});
    kv_op_get_times(op, &times);
    assert_true(times.begun_us > 0 && times.begun_us <= times.sent_us);
    assert_true(times.sent_us + 10 <= times.arrived_us && times.arrived_us <= times.ended_us);
    assert_true(times.ended_us <= kv_client_now_us(f.client));
    kv_op_index_result(op, &indexed);
    assert_int_equal(indexed.rows, 0);
    kv_op_free(op);
}

/* All rows are held: an answer without data. */
static void test_query_all_held(void **state)
{
    struct asked *asked = ask(20);
    struct kv_query_result found;
    struct kv_op *op;

    (void)state;
    asked->query.n_kv_heads = 1;
    asked->n_held[0] = 3;
    for (uint32_t i = 0; i < 3; i++)
        asked->held[i] = (struct kv_cached_block){i, HELD_FINGERPRINT};
    asked->query.n_cached = asked->n_held;
    asked->query.cached = asked->held;
    op = begin_query(&asked->query);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(kv_op_query_result(op, 0, &found), KV_OK);
    assert_int_equal(found.n_ids, 20);
    assert_int_equal(found.n_rows, 0);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(found.row_index[i], KV_ROW_CACHED);
    kv_op_free(op);
    /* Without rows nothing is held, and no buffer is needed. */
    asked->query.answer = KV_ANSWER_IDS;
    asked->query.n_kv_heads = 0;
    asked->query.snapshot = 1000;
    assert_int_equal(kv_query_begin(f.session, &asked->query, NULL, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(f.node.seen[1].header.snapshot, 1000);
    check_found(op, &asked->query, NULL);
    kv_op_free(op);
}

/* Rows that come as data of their own, before and after the body; more candidates wanted than
 * there are. */
static void test_query_bulk(void **state)
{
    struct asked *asked = ask(1000);
    struct kv_op *op;

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        f.node.bulk_first = i;
        op = begin_query(&asked->query);
        assert_int_equal(run(op, 1000000), KV_OK);
        assert_int_equal(f.node.n_seen, i + 1);
        check_found(op, &asked->query, NULL);
        kv_op_free(op);
    }
}

/* What goes to one data thread travels in one message, and each entry has its own outcome. */
static void test_batch(void **state)
{
    struct asked *asked = ask(9);
    struct kv_query wrong = asked->query, other = asked->query;
    struct kv_query_entry entries[] = {
        {.session = f.session, .query = &asked->query},
        {.session = f.session, .query = &wrong},
        {.session = f.session, .query = &other},
    };

    (void)state;
    asked->query.answer = other.answer = KV_ANSWER_IDS;
    wrong.k = 0;
    other.layer = 0;
    for (unsigned round = 0; round < 3; round++) {
        forget();
        f.node.n_batches = 0;
        f.node.n_busy_batches = round; /* all of a batch is sent again */
        assert_int_equal(kv_query_begin_batch(entries, 3, 0), KV_INVALID);
        assert_int_equal(entries[1].status, KV_INVALID);
        assert_null(entries[1].op);
        for (unsigned i = 0; i < 3; i += 2) {
            assert_int_equal(entries[i].status, KV_OK);
            if (run(entries[i].op, 500000) != KV_OK)
                fail_msg("%s", kv_op_detail(entries[i].op));
            check_found(entries[i].op, entries[i].query, NULL);
            kv_op_free(entries[i].op);
        }
        assert_int_equal(f.node.n_seen, 2);
        assert_int_equal(f.node.n_batches, round == 0);
    }
    assert_int_equal(kv_query_begin_batch(NULL, 0, 0), KV_OK);
}

/* Requests that left alone are of no batch: the answer to one without an id is not theirs. */
static void test_busy_batch_of_none(void **state)
{
    const struct kv_wire_header none = {.client_token = f.node.id}, fields = {.n_units = 1};
    struct kv_wire_header busy = none;
    uint64_t n_dropped;
    struct kv_op *op;

    (void)state;
    forget();
    f.node.is_manual = true;
    assert_int_equal(kv_ping_begin(f.client, 0, 0, 0, 0, 0, &op), KV_OK);
    turn(0);
    assert_int_equal(f.node.n_seen, 1);
    busy.op = f.node.seen[0].header.op;
    n_dropped = f.client->n_dropped;
    answer(&busy, KV_BUSY, &fields, "later", 5);
    turn(RETRY_MS * 500);
    turn(0);
    assert_int_equal(f.node.n_seen, 1); /* it was not sent again */
    assert_int_equal(f.client->n_dropped, n_dropped + 1);
    carry_out(&f.node.seen[0]);
    assert_int_equal(run(op, 5000), KV_OK);
    kv_op_free(op);
}

/* Puts of one session, and how often each was looked at for the order of others. */
static double order_looks(uint32_t n_puts)
{
    struct kv_op **ops = calloc(n_puts, sizeof(struct kv_op *));
    uint64_t n_looks;

    assert_non_null(ops);
    set_up_lanes(3, CREDITS, n_puts);
    n_looks = f.client->n_order_looks;
    for (uint32_t i = 0; i < n_puts; i++) {
        const struct kv_rows rows = {.n_layers = N_LAYERS, .token_begin = i, .n_tokens = 1};

        ops[i] = begin_put(&rows, 0);
    }
    while (kv_pool_used(f.client->requests) > 0) {
        turn(0);
        forget();
    }
    for (uint32_t i = 0; i < n_puts; i++) {
        assert_int_equal(kv_op_status(ops[i]), KV_OK);
        kv_op_free(ops[i]);
    }
    free(ops);
    n_looks = f.client->n_order_looks - n_looks;
    tear_down(NULL);
    return (double)n_looks / n_puts;
}

/* Those that cannot be sent yet cost the others nothing. */
static void test_many_puts(void **state)
{
    const double few = order_looks(128), many = order_looks(1024);

    (void)state;
    print_message("%.1f looks at others for each of 128 puts, %.1f of 1024\n", few, many);
    assert_true(many < 2 * few);
}

/* The rows of two decode steps: in order, in one message. */
static void test_append_batch(void **state)
{
    const struct kv_rows first = {.n_layers = N_LAYERS, .n_tokens = 1},
                         second = {.n_layers = N_LAYERS, .token_begin = 1, .n_tokens = 1};
    const struct kv_rows_io io = {.buffer = f.buffer};
    struct kv_append_entry entries[] = {
        {.session = f.session, .rows = &first, .io = &io},
        {.session = f.session, .rows = &second, .io = &io},
    };

    (void)state;
    forget();
    assert_int_equal(kv_append_begin_batch(entries, 2, 0), KV_OK);
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(run(entries[i].op, 1000000), KV_OK);
        kv_op_free(entries[i].op);
    }
    assert_int_equal(f.node.n_seen, 2);
    assert_int_equal(f.node.n_batches, 1);
    assert_int_equal(f.node.seen[1].header.token_begin, 1);
    assert_int_equal(f.node.seen[1].header.op, KV_OP_APPEND);
}

/* A large request is sent alone, in its place among those that are sent together. */
static void test_large_requests_leave_alone(void **state)
{
    enum {
        FITS = KVC_BATCH_REQUEST_MAX / (N_LAYERS * N_HEADS * ROW_BYTES) - 1, /* tokens */
    };
    const struct kv_rows_io io = {.buffer = f.buffer};

    (void)state;
    for (uint32_t more = 0; more < 2; more++) {
        const struct kv_rows rows[] = {
            {.n_layers = N_LAYERS, .n_tokens = 1},
            {.n_layers = N_LAYERS, .token_begin = 1, .n_tokens = FITS + more},
            {.n_layers = N_LAYERS, .token_begin = 1 + FITS + more, .n_tokens = 1},
        };
        struct kv_append_entry entries[3];

        for (unsigned i = 0; i < 3; i++)
            entries[i] =
                (struct kv_append_entry){.session = f.session, .rows = &rows[i], .io = &io};
        forget();
        f.node.n_batches = 0;
        assert_int_equal(kv_append_begin_batch(entries, 3, 0), KV_OK);
        for (unsigned i = 0; i < 3; i++) {
            assert_int_equal(run(entries[i].op, 1000000), KV_OK);
            kv_op_free(entries[i].op);
        }
        assert_int_equal(f.node.n_seen, 3);
        assert_int_equal(f.node.n_batches, more == 0);
        for (unsigned i = 0; i < 3; i++) {
            assert_int_equal(f.node.seen[i].header.token_begin, rows[i].token_begin);
            assert_int_equal(f.node.seen[i].header.bulk_bytes, 0);
        }
    }
}

/* ---- replies that come together ---------------------------------------------------------- */

enum {
    N_TOGETHER = 3,
    TOGETHER_BYTES = 1024,
};

/* Pings that were sent, and the batch of their replies: the second has failed. */
struct together {
    struct kv_op *ops[N_TOGETHER];
    struct kv_wire_header header, replies[N_TOGETHER];
    uint8_t body[TOGETHER_BYTES] __attribute__((aligned(KV_WIRE_BATCH_ALIGN)));
    size_t ends[N_TOGETHER]; /* of each reply, in the body */
};

static void fill_together(struct together *together)
{
    static const char text[] = "no";
    size_t at = 0;

    for (uint32_t i = 0; i < N_TOGETHER; i++) {
        const size_t bytes = i == 1 ? sizeof(text) - 1 : i;

        kv_message_seal(&together->replies[i], i == 1 ? text : (const char *)f.memory, bytes);
        memcpy(together->body + at, &together->replies[i], sizeof(together->header));
        memcpy(together->body + at + sizeof(together->header),
               i == 1 ? text : (const char *)f.memory, bytes);
        at += kv_wire_entry_bytes(bytes);
        together->ends[i] = at;
    }
    together->header = together->replies[0];
    together->header.kind = KV_WIRE_BATCH;
    together->header.n_units = N_TOGETHER;
}

static void begin_together(struct together *together)
{
    memset(together, 0, sizeof(*together));
    forget();
    f.node.is_manual = true;
    for (uint32_t i = 0; i < N_TOGETHER; i++)
        assert_int_equal(kv_ping_begin(f.client, 0, 0, 0, i, 0, &together->ops[i]), KV_OK);
    turn(10);
    assert_int_equal(f.node.n_seen, N_TOGETHER);
    for (uint32_t i = 0; i < N_TOGETHER; i++) {
        together->replies[i] = (struct kv_wire_header){.kind = KV_WIRE_REPLY,
                                                       .status = i == 1 ? KV_INVALID : KV_OK};
        address(&together->replies[i], &f.node.seen[i].header);
    }
    fill_together(together);
}

static void send_together(struct together *together, size_t bytes)
{
    kv_message_seal(&together->header, together->body, bytes);
    kv_channel_send(f.node.to_client, &together->header, sizeof(together->header),
                    together->body, bytes, send_done, &f.node);
    turn(10);
}

/* So many have their reply; the others get it by a message of their own. */
static void end_together(struct together *together, uint32_t n_ended)
{
    for (uint32_t i = 0; i < N_TOGETHER; i++) {
        const kv_status_t status = i == 1 ? KV_INVALID : KV_OK;
        const struct kv_wire_header fields = {0};

        assert_int_equal(kv_op_status(together->ops[i]), i < n_ended ? status : KV_IN_PROGRESS);
        if (i >= n_ended)
            answer(&f.node.seen[i].header, status, &fields, i == 1 ? "no" : (char *)f.memory,
                   i == 1 ? 2 : i);
    }
    turn(10);
    for (uint32_t i = 0; i < N_TOGETHER; i++) {
        assert_int_equal(kv_op_status(together->ops[i]), i == 1 ? KV_INVALID : KV_OK);
        kv_op_free(together->ops[i]);
    }
}

/* Each has its own status, and one that comes again is dropped. */
static void test_replies_together(void **state)
{
    struct together together;
    uint64_t n_dropped;

    (void)state;
    begin_together(&together);
    n_dropped = f.client->n_dropped;
    send_together(&together, together.ends[N_TOGETHER - 1]);
    assert_int_equal(f.client->n_dropped, n_dropped);
    assert_non_null(strstr(kv_op_detail(together.ops[1]), "no"));
    send_together(&together, together.ends[N_TOGETHER - 1]);
    assert_int_equal(f.client->n_dropped, n_dropped + N_TOGETHER);
    end_together(&together, N_TOGETHER);
}

/* Those before the cut are taken. */
static void test_replies_cut_short(void **state)
{
    struct together together;
    uint64_t n_dropped;

    (void)state;
    for (size_t bytes = 0;; bytes++) {
        uint32_t n_whole = 0;

        begin_together(&together);
        if (bytes == together.ends[N_TOGETHER - 1]) {
            end_together(&together, 0);
            return;
        }
        while (together.ends[n_whole] <= bytes)
            n_whole++;
        n_dropped = f.client->n_dropped;
        send_together(&together, bytes);
        assert_int_equal(f.client->n_dropped, n_dropped + 1);
        end_together(&together, n_whole);
    }
}

/* A second entry that is no reply of this node, a count that is wrong, and a batch of a version
 * that has none. */
static void test_replies_of_strangers(void **state)
{
    struct together together;

    (void)state;
    for (unsigned fault = 0; fault < 10; fault++) {
        struct kv_wire_header *second = &together.replies[1];
        uint32_t n_taken = 1;
        uint64_t n_dropped;

        begin_together(&together);
        n_dropped = f.client->n_dropped;
        if (fault == 0)
            second->kind = KV_WIRE_BATCH, second->n_units = 1;
        else if (fault == 1)
            second->kind = KV_WIRE_REQUEST, second->deadline_us = 1;
        else if (fault == 2)
            second->kind = KV_WIRE_BULK_REPLY;
        else if (fault == 3)
            second->bulk_bytes = 64;
        else if (fault == 4)
            second->client_token.bytes[3] ^= 1;
        else if (fault == 5)
            second->version = KV_WIRE_VERSION_LEAST;
        else if (fault == 6)
            second->request_id |= UINT64_C(1) << KVC_ID_SLOT_BITS; /* another node's */
        else if (fault == 7) /* as if it were for a batch of requests */
            second->status = KV_BUSY, second->n_units = 1;
        fill_together(&together);
        if (fault == 8)
            together.header.n_units = 1;
        if (fault == 9)
            together.header.version = KV_WIRE_VERSION_REPLIES - 1, n_taken = 0;
        send_together(&together, together.ends[N_TOGETHER - 1]);
        assert_int_equal(f.client->n_dropped, n_dropped + 1);
        end_together(&together, n_taken);
    }
}

/* As many messages as the largest answers need, each with its own place for its rows. */
static void test_query_split(void **state)
{
    struct asked *asked = ask(2048);
    struct kv_rows rows = {.n_layers = 1, .layer_begin = 1, .n_tokens = 2200};
    struct kv_query_result found;
    const uint8_t *last = f.memory + (4 << 20);
    struct kv_op *op;

    (void)state;
    put(&rows);
    forget();
    asked->ranges[0] = (struct kv_range){0, 1000};
    asked->ranges[1] = (struct kv_range){1000, 2100};
    asked->query.n_ranges = 2;
    assert_int_equal(kv_query_rows_bytes_max(kv_session_schema(f.session), &asked->query),
                     N_HEADS * 2048 * ROW_BYTES);
    op = begin_query(&asked->query);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(f.node.n_seen, 2); /* 512 KiB of rows for each head */
    for (uint32_t head = 0; head < N_HEADS; head++) {
        assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
        assert_int_equal(found.n_rows, 2048);
        assert_ptr_equal(found.rows, last);
        for (uint32_t i = 0; i < 2048; i++)
            assert_memory_equal(last + i * ROW_BYTES,
                                f.node.rows + place(1, head, found.ids[i]) * ROW_BYTES,
                                ROW_BYTES);
        last += 2048 * ROW_BYTES;
    }
    kv_op_free(op);

    /* 98 KB of ids, scores and masks for each head. */
    forget();
    asked->ranges[1].end = N_TOKENS;
    asked->query.answer = KV_ANSWER_IDS;
    asked->query.merge = KV_MERGE_NONE;
    asked->query.want_weights = true;
    asked->query.k = KV_SELECTED_MAX;
    op = begin_query(&asked->query);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(f.node.n_seen, N_HEADS);
    for (uint32_t head = 0; head < N_HEADS; head++) {
        assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
        assert_int_equal(found.n_ids, N_TOKENS);
        assert_int_equal(found.ids[N_TOKENS - 1], N_TOKENS - 1);
    }
    kv_op_free(op);
}

static void test_query_arguments(void **state)
{
    struct asked *asked = ask(20);
    const kv_schema_t *schema = kv_session_schema(f.session);
    const struct kv_query good = asked->query;
    const struct kv_range ranges[2] = {asked->ranges[0], asked->ranges[1]};
    struct kv_query *query = &asked->query;
    struct kv_rows_io io = {.buffer = f.buffer};
    struct kv_op *op;

    (void)state;
    assert_int_equal(kv_query_rows_bytes_max(schema, query), N_HEADS * 20 * ROW_BYTES);
    query->merge = KV_MERGE_UNION;
    assert_int_equal(kv_query_rows_bytes_max(schema, query), N_HEADS * 60 * ROW_BYTES);
    query->k = 100;
    assert_int_equal(kv_query_rows_bytes_max(schema, query), N_HEADS * 190 * ROW_BYTES);
    query->answer = KV_ANSWER_IDS;
    assert_int_equal(kv_query_rows_bytes_max(schema, query), 0);

#define REFUSED(field, value, status)                                            \
    do {                                                                         \
        *query = good;                                                           \
        query->field = (value);                                                  \
        assert_int_equal(kv_query_begin(f.session, query, &io, 0, &op), status); \
        assert_non_null(strstr(kv_client_detail(f.client), "query: "));          \
    } while (0)
    REFUSED(layer, N_LAYERS, KV_INVALID);
    assert_int_equal(kv_query_rows_bytes_max(schema, query), 0);
    REFUSED(kv_head_begin, 1, KV_INVALID);
    REFUSED(n_kv_heads, N_HEADS + 1, KV_INVALID);
    REFUSED(n_queries, 0, KV_INVALID);
    REFUSED(n_queries, KV_QUERIES_MAX + 1, KV_INVALID);
    REFUSED(k, 0, KV_INVALID);
    REFUSED(k, KV_SELECTED_MAX + 1, KV_INVALID);
    REFUSED(rerank, 0, KV_INVALID);
    REFUSED(first_cut, (enum kv_first_cut)(KV_CUT_INT4 + 1), KV_INVALID);
    REFUSED(first_cut, KV_CUT_INT4, KV_INVALID); /* without candidates */
    REFUSED(candidates, 4, KV_INVALID);          /* without a first cut */
    static const uint32_t each[N_HEADS] = {[N_HEADS - 1] = UINT32_MAX};
    REFUSED(candidates_each, each, KV_INVALID);
    /* More candidates than a node takes, unless all eligible rows are. */
    f.session->tokens_max = KV_CANDIDATES_MAX + 1;
    asked->ranges[1].end = KV_CANDIDATES_MAX + 1;
    asked->ranges[0] = (struct kv_range){0, 1};
    asked->ranges[1].begin = 1;
    REFUSED(rerank, KV_CANDIDATES_MAX / good.k + 1, KV_INVALID);
    assert_non_null(strstr(kv_client_detail(f.client), "rerank * k"));
    *query = good;
    query->first_cut = KV_CUT_INT4;
    query->rerank = 1;
    query->candidates = KV_CANDIDATES_MAX / good.k + 1;
    assert_int_equal(kv_query_begin(f.session, query, &io, 0, &op), KV_INVALID);
    assert_non_null(strstr(kv_client_detail(f.client), "candidates * k"));
    asked->ranges[1].end = KV_CANDIDATES_MAX;
    query->answer = KV_ANSWER_IDS; /* the node has no such rows */
    assert_int_equal(kv_query_begin(f.session, query, &io, 0, &op), KV_OK);
    kv_op_free(op);
    *query = good;
    query->answer = KV_ANSWER_IDS;
    query->rerank = KV_CANDIDATES_MAX / good.k + 1;
    assert_int_equal(kv_query_begin(f.session, query, &io, 0, &op), KV_OK);
    kv_op_free(op);
    f.session->tokens_max = N_TOKENS;
    asked->ranges[0] = ranges[0];
    asked->ranges[1] = ranges[1];
    REFUSED(scale, 0, KV_INVALID);
    REFUSED(scale, NAN, KV_INVALID);
    REFUSED(scale, INFINITY, KV_INVALID);
    REFUSED(merge, (enum kv_merge)0, KV_INVALID);
    REFUSED(merge, (enum kv_merge)5, KV_INVALID);
    REFUSED(answer, (enum kv_answer)0, KV_INVALID);
    REFUSED(answer, (enum kv_answer)4, KV_INVALID);
    REFUSED(selection, (enum kv_selection)3, KV_INVALID);
    REFUSED(selection, KV_SELECT_MASS, KV_INVALID); /* of no share */
    REFUSED(fraction, 0.5f, KV_INVALID);            /* of nothing */
    REFUSED(fraction, 1.5f, KV_INVALID);
    REFUSED(summaries, 1, KV_INVALID);
    REFUSED(summaries, 65, KV_INVALID);
    REFUSED(summary_rows, 1, KV_INVALID);
    REFUSED(summary_rows, 2048, KV_INVALID);
    REFUSED(summary_rows, 3073, KV_INVALID);
    REFUSED(snapshot, N_TOKENS + 1, KV_INVALID);
    REFUSED(n_ranges, 0, KV_INVALID);
    REFUSED(n_ranges, KV_RANGES_MAX + 1, KV_INVALID);
    asked->ranges[1] = (struct kv_range){99, 300};
    REFUSED(k, 20, KV_INVALID);
    asked->ranges[1] = (struct kv_range){200, 200};
    REFUSED(k, 20, KV_INVALID);
    asked->ranges[1] = (struct kv_range){200, N_TOKENS + 1};
    REFUSED(k, 20, KV_INVALID);
    asked->ranges[1] = (struct kv_range){200, KV_TOKENS_MAX + 1};
    REFUSED(k, 20, KV_INVALID);
    asked->ranges[1] = (struct kv_range){200, N_TOKENS};
    REFUSED(k, 4097, KV_TOO_LARGE); /* rows */
    asked->ranges[1] = (struct kv_range){200, 300};
    asked->queries[700] = NAN;
    REFUSED(k, 20, KV_INVALID);
    asked->queries[700] = 0;
    asked->n_held[3] = 1;
    asked->held[0] = (struct kv_cached_block){KV_TOKENS_MAX / KV_BLOCK_TOKENS, 0};
    query->cached = asked->held;
    *query = good;
    query->cached = asked->held;
    query->n_cached = asked->n_held;
    assert_int_equal(kv_query_begin(f.session, query, &io, 0, &op), KV_INVALID);
    asked->n_held[3] = 2;
    asked->held[0].block = asked->held[1].block = 5;
    assert_int_equal(kv_query_begin(f.session, query, &io, 0, &op), KV_INVALID);
    assert_int_equal(kv_query_begin(f.session, &good, NULL, 0, &op), KV_INVALID);
    io.offset = (8 << 20) - N_HEADS * 20 * ROW_BYTES + 1;
    assert_int_equal(kv_query_begin(f.session, &good, &io, 0, &op), KV_INVALID);
    io.offset--;
    assert_int_equal(kv_query_begin(f.session, &good, &io, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
#undef REFUSED
}

/* What each lie is called.  NULL: it is none with this question. */
struct exposed {
    enum lie lie;
    const char *words;
};

static void expose(struct kv_op *op, const struct exposed *exposed)
{
    const kv_status_t wanted = exposed->words != NULL ? KV_CORRUPT : KV_OK;

    if (run(op, 1000000) != wanted)
        fail_msg("lie %d: %s: %s", (int)exposed->lie, kv_status_name(kv_op_status(op)),
                 kv_op_detail(op));
    if (wanted != KV_OK && (strstr(kv_op_detail(op), exposed->words) == NULL ||
                            strstr(kv_op_detail(op), "node loopback:") == NULL))
        fail_msg("lie %d: not '%s': %s", (int)exposed->lie, exposed->words, kv_op_detail(op));
    kv_op_free(op);
    f.node.lie = NO_LIE;
    turn(0);
    assert_false(kv_buffer_busy(f.buffer));
}

/* Nothing that a node says of chosen rows is believed before it is checked. */
static void test_query_lies(void **state)
{
    static const struct exposed lies[] = {
        {NO_LIE, NULL},
        {LIE_BODY_SHORT, "a body of "},
        {LIE_BODY_LONG, "a body of "},
        {LIE_LAYER, "query: corrupt: after 0.000 s: layer: 0"},
        {LIE_SNAPSHOT, "snapshot: 299"},
        {LIE_SNAPSHOT_MANY, "snapshot: 8193"},
        {LIE_TIMES, "queue_us + service_us: 4000000011"},
        {LIE_UNITS_SWAPPED, "layer 1 head 0: kv head: 1"},
        {LIE_OTHER_LAYER, "layer 1 head 1: layer: 0"},
        {LIE_IDS_MANY, "layer 1 head 0: n_selected: 21"},
        {LIE_IDS_FEW, "layer 1 head 0: n_selected: 19"},
        {LIE_CHOSEN_MANY, "layer 1 head 1: n_selected: 61"},
        {LIE_ID_TWICE, "layer 1 head 0: ids: not ascending: "},
        {LIE_ID_DESCENDS, "layer 1 head 0: ids: not ascending: "},
        {LIE_ID_BEFORE, "layer 1 head 0: ids: not eligible: 9"},
        {LIE_ID_BETWEEN, "layer 1 head 0: ids: not eligible: 150"},
        {LIE_ID_BEHIND, "layer 1 head 3: ids: not eligible: 300"},
        {LIE_ID_HUGE, "layer 1 head 3: ids: not eligible: 2147483647"},
        {LIE_HELD, "layer 1 head 3: ids: not cached: "},
        {LIE_ROWS_MANY, "n_rows: "},
        {LIE_ROWS_FEW, "layer 1 head 3: n_rows: fewer than ids: "},
        {LIE_MASK_EMPTY, "layer 1 head 0: query_mask: 0"},
        {LIE_MASK_WIDE, "layer 1 head 0: query_mask: 1"},
        {LIE_MASKS_MANY, "layer 1 head 0: query_mask: rows of one vector: 21"},
        {LIE_SCORE_NAN, "layer 1 head 0: weights: "},
        {LIE_SCORE_NEGATIVE, "layer 1 head 0: weights: -1"},
        {LIE_SCORE_LARGE, "layer 1 head 0: weights: 3.0999"},
        {LIE_REST, "layer 1 head 1: n_estimated: 1"},
        {LIE_COUNTS, "layer 1 head 0: n_scored_by_code + n_scored_by_key: 4294967486"},
        {LIE_COUNTS_FEW, "layer 1 head 0: n_scored_by_code + n_scored_by_key: 189"},
        {LIE_RERANKED, "layer 1 head 2: n_reranked: 191"},
        {LIE_RERANKED_FEW, "layer 1 head 2: n_reranked: 19"},
        {LIE_CHAPTERS, "layer 1 head 2: n_chapters: 4"},
        {LIE_CHAPTERS_NONE, "layer 1 head 2: n_chapters: 0"},
        {LIE_RECALL, "layer 1 head 3: recall: 1.5"},
        {LIE_RECALL_NEGATIVE, "layer 1 head 3: recall: -0.5"},
        {LIE_COMMITTED, "layer 1 head 3: committed: 299"},
        {LIE_COMMITTED_MANY, "layer 1 head 3: committed: 8193"},
        {LIE_ROW, "layer 1, kv head 0, token "},
        {LIE_CRC, "layer 1, kv head 0, token "},
        {LIE_BULK_SIZE, "the reply's data has another size"},
        {LIE_BULK_ODD, "data arrived that was not requested"},
        {LIE_BULK_UNASKED, NULL},
    };
    struct asked *asked = ask(20);

    (void)state;
    asked->query.want_weights = true;
    asked->query.n_kv_heads = N_HEADS;
    asked->held[0] = (struct kv_cached_block){0, HELD_FINGERPRINT};
    asked->query.n_cached = asked->n_held;
    asked->query.cached = asked->held;
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        enum lie lie = lies[i].lie;
        bool is_bulk = lie == LIE_BULK_SIZE || lie == LIE_BULK_ODD;

        for (unsigned first = 0; first <= is_bulk; first++) {
            struct kv_query query = asked->query;
            size_t end;

            if (lie == LIE_MASK_EMPTY || lie == LIE_MASK_WIDE || lie == LIE_MASKS_MANY ||
                lie == LIE_CHOSEN_MANY)
                query.merge = KV_MERGE_NONE;
            /* No more fits the place than there is, and not all are sent. */
            if (is_bulk)
                query.k = 150;
            asked->n_held[0] = lie == LIE_ROWS_MANY || lie == LIE_BULK_SIZE;
            f.node.lie = lie;
            f.node.bulk_first = first;
            end = (4 << 20) + kv_query_rows_bytes_max(kv_session_schema(f.session), &query);
            expose(begin_query(&query), &lies[i]);
            for (size_t j = end; j < end + 65536; j++)
                assert_int_equal(f.memory[j], 0xee);
        }
    }
    assert_int_equal(f.client->n_corrupt, sizeof(lies) / sizeof(lies[0]));
}

/* A first cut, candidates of each head, and what was read: what the message says, and what
 * becomes of its answer, whole and cut at every byte. */
static void test_query_first_cut(void **state)
{
    static const uint32_t each[N_HEADS] = {2, 8, 12, 3};
    static const struct exposed lies[] = {
        {NO_LIE, NULL},
        {LIE_READS_NONE, "layer 1 head 0: layer: "}, /* they are taken for it */
        {LIE_BODY_SHORT, "a body of "},
        {LIE_BODY_LONG, "a body of "},
        {LIE_COUNTS_FEW, "layer 1 head 0: n_scored_by_code + n_scored_by_key: 189"},
    };
    struct asked *asked = ask(20);
    struct kv_query *query = &asked->query;
    const struct kv_wire_query *sent;
    struct kv_query_reads reads;
    struct kv_op *op;

    (void)state;
    query->answer = KV_ANSWER_IDS;
    const struct kv_query good = *query;
    query->first_cut = KV_CUT_INT4;
    query->rerank = 2;
    query->candidates = 12;
    query->candidates_each = each;
    query->want_reads = true;
    f.node.reads = (struct kv_wire_query_reads){1, 20, 300, UINT64_MAX / 8, 50000, 600000};
    f.node.n_reranked_of_cut = 2 * 40;
    op = begin_query(query);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_query_reads(op, &reads);
    const uint64_t n_messages = f.node.n_seen;
    assert_true(reads.books == n_messages && reads.codes == 20 * n_messages);
    assert_true(reads.copies == 300 * n_messages && reads.keys == UINT64_MAX / 8 * n_messages);
    assert_true(reads.rows == 50000 * n_messages && reads.summaries == 600000 * n_messages);
    for (uint32_t i = 0; i < f.node.n_seen; i++) {
        sent = (const struct kv_wire_query *)f.node.seen[i].body;
        const uint32_t n_units = f.node.seen[i].header.n_units;
        const struct kv_wire_unit *units = (const struct kv_wire_unit *)(sent + 1);
        const uint32_t *of_each =
            (const uint32_t *)((const struct kv_wire_range *)(units + n_units) + 2);

        assert_int_equal(sent->flags, KV_WIRE_EACH | KV_WIRE_READS);
        assert_int_equal(sent->first_cut, KV_CUT_INT4);
        assert_int_equal(sent->reserved, 0);
        assert_int_equal(sent->rerank, 2);
        assert_int_equal(sent->candidates, 12);
        for (uint32_t j = 0; j < n_units; j++)
            assert_int_equal(of_each[j], each[units[j].kv_head]);
    }
    kv_op_free(op);
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        f.node.lie = lies[i].lie;
        expose(begin_query(query), &lies[i]);
    }
    for (size_t n = 1; n <= f.node.body_bytes; n++) {
        f.node.n_cut_off = n;
        expose(begin_query(query), &(struct exposed){NO_LIE, "a body of "});
        forget();
    }
    f.node.n_cut_off = 0;
    /* Each candidate may be scored twice, and there are 2 * 20 of head 0. */
    f.node.n_reranked_of_cut = 2 * 40 + 1;
    expose(begin_query(query), &(struct exposed){NO_LIE, "layer 1 head 0: n_reranked: 81"});
    f.node.n_reranked_of_cut = 0;
    expose(begin_query(query), &(struct exposed){NO_LIE, NULL});

    /* Nobody wants to know, or the node cannot count: nothing is told.  As many candidates as can
     * be said are all. */
    for (unsigned is_old = 0; is_old < 2; is_old++) {
        f.client->nodes[0].version = is_old ? KV_WIRE_VERSION_FIRST_CUT - 1 : KV_WIRE_VERSION;
        forget();
        *query = good;
        query->rerank = UINT32_MAX;
        query->want_reads = is_old != 0;
        op = begin_query(query);
        turn(0);
        sent = (const struct kv_wire_query *)f.node.seen[0].body;
        assert_int_equal(sent->flags, 0);
        assert_int_equal(sent->rerank, is_old ? KV_SELECTED_MAX : KV_CANDIDATES_MAX);
        if (!is_old) /* to whom the node of this test answers */
            assert_int_equal(run(op, 1000000), KV_OK);
        kv_op_query_reads(op, &reads);
        assert_true(reads.books == 0 && reads.keys == 0 && reads.rows == 0);
        kv_op_free(op);
    }
    f.client->nodes[0].version = KV_WIRE_VERSION;
    static const uint32_t all[N_HEADS] = {UINT32_MAX, UINT32_MAX, 1, UINT32_MAX};
    forget();
    *query = good;
    query->rerank = UINT32_MAX;
    query->candidates_each = all;
    op = begin_query(query);
    assert_int_equal(run(op, 1000000), KV_OK);
    for (uint32_t i = 0; i < f.node.n_seen; i++) {
        sent = (const struct kv_wire_query *)f.node.seen[i].body;
        const uint32_t n_units = f.node.seen[i].header.n_units;
        const struct kv_wire_unit *units = (const struct kv_wire_unit *)(sent + 1);
        const uint32_t *of_each =
            (const uint32_t *)((const struct kv_wire_range *)(units + n_units) + 2);

        for (uint32_t j = 0; j < n_units; j++)
            assert_int_equal(of_each[j], units[j].kv_head == 2 ? 1 : KV_CANDIDATES_MAX);
    }
    kv_op_free(op);
}

/* Nor what it says of attention, which has no checksum. */
static void test_attend_lies(void **state)
{
    static const struct exposed lies[] = {
        {NO_LIE, NULL},
        {LIE_NAME_UNASKED, "layer 1 head 0: ids: not requested: 205"},
        {LIE_NAMES_MANY, "layer 1 head 1: n_ids: 20"},
        {LIE_REST, "layer 1 head 1: n_estimated: 1"},
        {LIE_OUTPUT_NAN, "layer 1 head 1: output: "},
        {LIE_OUTPUT_INFINITE, "layer 1 head 1: output: inf"},
        {LIE_OUTPUT_LARGE, "layer 1 head 1: output: -66000"},
        {LIE_OUTPUT_OF_NONE, "layer 1 head 1: output: 0.5"},
        {LIE_LSE_NAN, "layer 1 head 1: log-sum-exp: "},
        {LIE_LSE_INFINITE, "layer 1 head 1: log-sum-exp: inf"},
        {LIE_LSE_LARGE, "layer 1 head 1: log-sum-exp: 9.99"},
        {LIE_LSE_SMALL, "layer 1 head 1: log-sum-exp: -9.99"},
        {LIE_LSE_OF_NONE, "layer 1 head 0: log-sum-exp: 5"},
    };
    struct asked *asked = ask(20);

    (void)state;
    asked->query.answer = KV_ANSWER_ATTEND;
    asked->query.n_queries = 1;
    asked->query.n_kv_heads = 2;
    asked->n_held[0] = 3;
    for (uint32_t i = 0; i < 3; i++)
        asked->held[i] = (struct kv_cached_block){i, HELD_FINGERPRINT};
    asked->query.n_cached = asked->n_held;
    asked->query.cached = asked->held;
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        asked->n_held[0] = lies[i].lie == LIE_NAME_UNASKED ? 1 : 3;
        asked->n_held[1] = lies[i].lie == LIE_NAME_UNASKED;
        f.node.lie = lies[i].lie;
        expose(begin_query(&asked->query), &lies[i]);
    }
    assert_int_equal(f.client->n_corrupt, sizeof(lies) / sizeof(lies[0]) - 1);
}

/* Nor what it says of an index, of rows, objects and pings. */
static void test_other_lies(void **state)
{
    static const struct exposed indexes[] = {
        {NO_LIE, NULL},
        {LIE_BODY_SHORT, "a body of 39 bytes"},
        {LIE_LAYER, "layer: 1"},
        {LIE_SNAPSHOT, "snapshot: 299"},
        {LIE_SNAPSHOT_MANY, "snapshot: 8193"},
        {LIE_INDEXED_ROWS, "rows: 2401"},
        {LIE_INDEXED_CODED, "rows_coded: 2401"},
        {LIE_INDEXED_FOUND, "n_found: 25"},
        {LIE_INDEXED_TRAINED, "n_trained: 4294967295"},
        {LIE_INDEXED_PENDING, "n_pending: 1"},
        {LIE_INDEXED_ITERATIONS, "iterations: "},
        {LIE_INDEXED_TIME, "train_us: 18446744073709551615"},
    };
    static const struct exposed writes[] = {
        {NO_LIE, NULL},
        {LIE_BODY_LONG, "a body of 1 bytes"},
        {LIE_LAYER, "layer: 1"},
        {LIE_SNAPSHOT, "snapshot: 299"},
        {LIE_ROWS, "n_rows: 301 of 300"},
        {LIE_SNAPSHOT_MANY, "snapshot: 8193"},
    };
    static const struct exposed reads[] = {
        {NO_LIE, NULL},
        {LIE_LAYER, "layer: 1"},
        {LIE_SNAPSHOT, "snapshot: 9: "},
        {LIE_SNAPSHOT_MANY, "snapshot: 8193"},
        {LIE_ROWS, "n_rows: 81 of 80"},
    };
    static const struct {
        enum kv_object_verb verb;
        struct exposed exposed;
    } objects[] = {
        {KV_OBJECT_PUT, {NO_LIE, NULL}},
        {KV_OBJECT_PUT, {LIE_OBJECT_BYTES, "object_bytes: 99"}},
        {KV_OBJECT_PUT, {LIE_BODY_LONG, "a body of 1 bytes"}},
        {KV_OBJECT_GET, {NO_LIE, NULL}},
        {KV_OBJECT_GET, {LIE_OBJECT_BYTES, "a body of 100 bytes"}},
        {KV_OBJECT_GET, {LIE_OBJECT_HUGE, "object_bytes: 67108865"}},
        {KV_OBJECT_GET, {LIE_OBJECT_OFFSET, "offset: 1048576"}},
        {KV_OBJECT_GET, {LIE_STATUS, "status: -7777"}},
        {KV_OBJECT_EXISTS, {NO_LIE, NULL}},
        {KV_OBJECT_EXISTS, {LIE_OBJECT_HUGE, "object_bytes: 67108865"}},
        {KV_OBJECT_EXISTS, {LIE_BODY_LONG, "a body of 1 bytes"}},
        {KV_OBJECT_DELETE, {NO_LIE, NULL}},
        {KV_OBJECT_DELETE, {LIE_OBJECT_VERSION, "an object without a version"}},
    };
    const struct exposed ping = {LIE_BODY_LONG, "a body of 11 bytes"};
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 300};
    struct kv_rows_io io = {.buffer = f.buffer};
    struct kv_index_options index = {
        .tokens = 300, .m = 2, .bits = 6, .iterations = 10, .seed = 3, .wait = true};
    struct kv_op *op;

    (void)state;
    for (size_t i = 0; i < sizeof(writes) / sizeof(writes[0]); i++) {
        f.node.lie = writes[i].lie;
        assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_OK);
        expose(op, &writes[i]);
    }
    for (size_t i = 0; i < sizeof(indexes) / sizeof(indexes[0]); i++) {
        f.node.lie = indexes[i].lie;
        assert_int_equal(kv_index_begin(f.session, &index, 0, &op), KV_OK);
        expose(op, &indexes[i]);
    }
    rows.n_tokens = 10;
    for (size_t i = 0; i < sizeof(reads) / sizeof(reads[0]); i++) {
        f.node.lie = reads[i].lie;
        expose(begin_read(&rows, 4 << 20), &reads[i]);
    }
    for (size_t i = 0; i < sizeof(objects) / sizeof(objects[0]); i++) {
        struct kv_object object = {.name = "name", .buffer = f.buffer, .bytes = OBJECT_BYTES};

        f.node.lie = objects[i].exposed.lie;
        assert_int_equal(kv_objects_begin(f.client, objects[i].verb, &object, 1, 0, &op),
                         KV_OK);
        expose(op, &objects[i].exposed);
    }
    f.node.lie = ping.lie;
    assert_int_equal(kv_ping_begin(f.client, 0, 0, 0, 10, 0, &op), KV_OK);
    expose(op, &ping);
}

static struct kv_op *begin_control(enum kv_op_id id)
{
    static const struct kv_id128 names[N_NAMES];
    const struct kv_session_options options = {
        .lease_ms = LEASE_MS, .block_names = names, .n_block_names = N_NAMES};
    struct kv_model_info model = {.name = "model"};
    struct kv_ticket ticket;
    struct kv_op *op = NULL;
    kv_status_t status = KV_INVALID;

    assert_int_equal(kv_schema_uniform(&model.schema, N_LAYERS, N_HEADS, 64, 64, KV_FP16),
                     KV_OK);
    kv_session_ticket(f.session, &ticket);
    if (id == KV_OP_OPEN)
        status = kv_open_begin(f.client, &model, &options, 0, &op);
    else if (id == KV_OP_RESUME)
        status = kv_resume_begin(f.client, &ticket, 0, &op);
    else if (id == KV_OP_FORK)
        status = kv_fork_begin(f.session, 5, 0, &op);
    else if (id == KV_OP_SESSION)
        status = kv_length_begin(f.session, 0, &op);
    else if (id == KV_OP_RENEW)
        status = kv_renew_begin(f.session, LEASE_MS, 0, &op);
    else if (id == KV_OP_TABLE)
        status = kv_table_begin(f.client, 0, "status", 0, &op);
    else if (id == KV_OP_PUBLISH)
        status = kv_publish_begin(
            f.session,
            &(struct kv_publish){.first_block = 1, .n_names = N_NAMES, .names = names}, 0, &op);
    else if (id == KV_OP_MATCH)
        status = kv_match_begin(f.client, names, N_NAMES, 0, &op);
    else if (id == KV_OP_VERIFY)
        status = kv_verify_begin(f.client, 0, VERIFY_SINCE_US, 0, &op);
    else if (id == KV_OP_SAVE)
        status = kv_save_begin(f.session, 0, &op);
    else if (id == KV_OP_PREFIX)
        status = kv_prefix_begin(
            f.client, 0, &(struct kv_prefix){.verb = KV_PREFIX_PIN, .name = names}, 0, &op);
    assert_int_equal(status, KV_OK);
    return op;
}

/* Nor what it says of sessions and itself. */
static void test_control_lies(void **state)
{
    static const struct {
        enum kv_op_id id;
        struct exposed exposed;
    } lies[] = {
        {KV_OP_OPEN, {NO_LIE, NULL}},
        {KV_OP_OPEN,
         {LIE_LEASE_NONE, "open: corrupt: after 0.000 s: lease_ms: does not match"}},
        {KV_OP_OPEN, {LIE_LEASE_LONG, "lease_ms: does not match"}},
        {KV_OP_OPEN, {LIE_TOKENS, "tokens: does not match"}},
        {KV_OP_OPEN, {LIE_TOKENS_MAX_NONE, "tokens_max: does not match"}},
        {KV_OP_OPEN, {LIE_TOKENS_MAX_MANY, "tokens_max: does not match"}},
        {KV_OP_OPEN, {LIE_ATTACHED_MANY, "384 tokens matched, of 256"}},
        {KV_OP_OPEN, {LIE_ATTACHED_ODD, "127 tokens matched, of 256"}},
        {KV_OP_OPEN, {LIE_ATTACHED_OF_NONE, "128 tokens matched, with 0 runs of writers"}},
        {KV_OP_OPEN, {LIE_ATTACHED_OWN, "128 tokens matched, with 2 runs of writers"}},
        {KV_OP_RESUME, {NO_LIE, NULL}},
        {KV_OP_RESUME, {LIE_LEASE_NONE, "lease_ms: does not match"}},
        {KV_OP_RESUME, {LIE_TOKENS, "tokens: does not match"}},
        {KV_OP_RESUME, {LIE_TOKENS_MAX_MANY, "tokens_max: does not match"}},
        {KV_OP_RESUME, {LIE_LOG_GENERATION, "recent: generation: does not match"}},
        {KV_OP_RESUME, {LIE_LOG_TOKENS, "recent: tokens: does not match"}},
        {KV_OP_RESUME, {LIE_LOG_WRITER, "recent: writer: does not match"}},
        {KV_OP_RESUME, {LIE_SHARED_TOKENS, "shared_tokens: does not match"}},
        {KV_OP_RESUME, {LIE_WRITERS_NONE, "writers: end: does not match"}},
        {KV_OP_RESUME, {LIE_WRITERS_MANY, "n_writers: does not match"}},
        {KV_OP_RESUME, {LIE_WRITER_NONE, "writers: does not match"}},
        {KV_OP_RESUME, {LIE_WRITER_TWICE, "writers: does not match"}},
        {KV_OP_RESUME, {LIE_WRITERS_BACK, "writers: does not match"}},
        {KV_OP_RESUME, {LIE_WRITERS_END, "writers: end: does not match"}},
        {KV_OP_SESSION, {NO_LIE, NULL}},
        {KV_OP_SESSION, {LIE_TOKENS, "tokens: does not match"}},
        {KV_OP_SESSION, {LIE_TOKENS_NONE, "tokens: does not match"}},
        {KV_OP_SESSION, {LIE_LAYERS_FEW, "layer_tokens: does not match"}},
        {KV_OP_SESSION, {LIE_LAYER_LESS, "layer_tokens: does not match"}},
        {KV_OP_SESSION, {LIE_LAYER_MANY, "layer_tokens: does not match"}},
        {KV_OP_SESSION, {LIE_GENERATION_BACK, "generation: does not match"}},
        {KV_OP_RENEW, {NO_LIE, NULL}},
        {KV_OP_RENEW, {LIE_LEASE_NONE, "lease_ms: does not match"}},
        {KV_OP_RENEW, {LIE_LEASE_LONG, "lease_ms: does not match"}},
        {KV_OP_RENEW, {LIE_STATUS, "renew: corrupt"}},
        {KV_OP_PUBLISH, {NO_LIE, NULL}},
        {KV_OP_PUBLISH, {LIE_PUBLISHED_MANY, "publish: corrupt: after 0.000 s: 512 tokens"}},
        {KV_OP_PUBLISH, {LIE_PUBLISHED_ODD, "129 tokens published"}},
        {KV_OP_PUBLISH, {LIE_PUBLISHED_ALL, "4294967295 tokens published"}},
        {KV_OP_PUBLISH, {LIE_STATUS, "publish: corrupt"}},
        {KV_OP_MATCH, {NO_LIE, NULL}},
        {KV_OP_MATCH, {LIE_MATCHED_MANY, "match: corrupt: after 0.000 s: 384 tokens matched"}},
        {KV_OP_MATCH, {LIE_MATCHED_ODD, "127 tokens matched, in 1 tiers, of 2 blocks"}},
        {KV_OP_MATCH, {LIE_MATCHED_ALL, "4294967295 tokens matched, in 1 tiers, of 2 blocks"}},
        {KV_OP_MATCH, {LIE_TIER_LONG, "128 tokens matched, in 1 tiers, of 2 blocks"}},
        {KV_OP_MATCH, {LIE_TIER_SHORT, "128 tokens matched, in 1 tiers, of 2 blocks"}},
        {KV_OP_MATCH, {LIE_TIER_BACK, "128 tokens matched, in 2 tiers, of 2 blocks"}},
        {KV_OP_PREFIX, {NO_LIE, NULL}},
        {KV_OP_PREFIX, {LIE_STATUS, "prefix: corrupt"}},
        {KV_OP_VERIFY, {NO_LIE, NULL}},
        {KV_OP_VERIFY, {LIE_STATUS, "verify: corrupt"}},
        {KV_OP_VERIFY, {LIE_SINCE, "since_us or counts: does not match"}},
        {KV_OP_VERIFY, {LIE_COUNTS_NONE, "since_us or counts: does not match"}},
        {KV_OP_SAVE, {NO_LIE, NULL}},
        {KV_OP_SAVE, {LIE_STATUS, "save: corrupt"}},
        {KV_OP_SAVE, {LIE_SINCE, "since_us: does not match"}},
        {KV_OP_SAVE, {LIE_SAVED_MANY, "saved_tokens: does not match"}},
        {KV_OP_SAVE, {LIE_SAVED_ODD, "saved_tokens: does not match"}},
        {KV_OP_SAVE, {LIE_SAVED_ALL, "shared_tokens: does not match"}},
        {KV_OP_SAVE, {LIE_SHARED_MANY, "shared_tokens: does not match"}},
        {KV_OP_TABLE, {NO_LIE, NULL}},
        {KV_OP_TABLE, {LIE_CELL_NAN, "a number of a row: does not match"}},
        {KV_OP_TABLE, {LIE_CELLS_FEW, "columns of a row: does not match"}},
        {KV_OP_FORK, {NO_LIE, NULL}},
        {KV_OP_FORK, {LIE_LEASE_NONE, "lease_ms: does not match"}},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        struct kv_op *op;

        f.node.lie = lies[i].exposed.lie;
        f.node.n_saves = 0;
        f.node.n_until_saved = 2;
        op = begin_control(lies[i].id);
        expose(op, &lies[i].exposed);
    }
}

/* A save asks until all is saved that was shared at first, less and less often; its deadline says how
 * far it was. */
static void test_save_asks_again(void **state)
{
    struct kv_ticket ticket;
    struct kv_op *op;

    (void)state;
    f.node.n_until_saved = 12;
    op = begin_control(KV_OP_SAVE);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(kv_op_tokens(op), 3 * KV_BLOCK_TOKENS);
    assert_int_equal(f.node.n_saves, 13);
    assert_int_equal(f.node.saved_wanted, 3 * KV_BLOCK_TOKENS);
    assert_in_range(kv_op_elapsed_us(op), 300000, 600000);
    kv_op_free(op);

    kv_session_ticket(f.session, &ticket);
    f.node.n_saves = 0;
    assert_int_equal(kv_save_id_begin(f.client, 0, &ticket.session_id, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(kv_op_tokens(op), 3 * KV_BLOCK_TOKENS);
    kv_op_free(op);
    assert_int_equal(kv_save_id_begin(f.client, 1, &ticket.session_id, 0, &op), KV_INVALID);
    f.node.lie = LIE_SAVED_ALL; /* of a session by its id, a node may have nothing */
    assert_int_equal(kv_save_id_begin(f.client, 0, &ticket.session_id, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(kv_op_tokens(op), UINT32_MAX);
    kv_op_free(op);
    f.node.lie = NO_LIE;

    f.node.n_saves = 0;
    f.node.n_until_saved = UINT_MAX;
    assert_int_equal(kv_save_begin(f.session, 500, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_DEADLINE);
    assert_non_null(strstr(kv_op_detail(op), ", 128 tokens saved"));
    assert_int_equal(kv_op_tokens(op), 0);
    kv_op_free(op);
    /* The node is lost, or the caller does not want to know, between two requests. */
    op = begin_control(KV_OP_SAVE);
    turn(1000);
    turn(0);
    kvc_node_fail(&f.client->nodes[0], KV_UNREACHABLE, "lost by the test");
    assert_int_equal(run(op, 1000000), KV_UNREACHABLE);
    kv_op_free(op);
    op = begin_control(KV_OP_SAVE);
    turn(1000);
    kv_cancel(op);
    kv_op_free(op);
    turn(1000000);
    turn(0);

    f.client->nodes[0].version = KV_WIRE_VERSION_SAVE - 1;
    f.node.n_saves = 0;
    op = begin_control(KV_OP_SAVE);
    assert_int_equal(run(op, 1000000), KV_UNSUPPORTED);
    assert_non_null(strstr(kv_op_detail(op), "the node's version does not save on request"));
    assert_int_equal(f.node.n_saves, 0);
    kv_op_free(op);
    f.client->nodes[0].version = KV_WIRE_VERSION;
}

/* Nor what it says when it is connected to. */
static void test_hello_lies(void **state)
{
    static const struct exposed lies[] = {
        {LIE_HELLO_TOKEN, "table: corrupt: after 0.000 s: hello: an id is not 16 bytes"},
        {LIE_HELLO_NODE, "hello: an id is not 16 bytes"},
        {LIE_HELLO_LANES_NONE, "hello: number of data threads"},
        {LIE_HELLO_LANES_MANY, "hello: number of data threads"},
        {LIE_HELLO_ADDRESS, "hello: address of a data thread"},
        {LIE_HELLO_CREDITS, "hello: no credits"},
        {LIE_HELLO_BULK, "hello: bulk_bytes_max"},
        {NO_LIE, NULL},
    };
    struct kv_op *op;

    (void)state;
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        kvc_node_fail(&f.client->nodes[0], KV_UNREACHABLE, "lost by the test");
        turn(0);
        f.node.lie = lies[i].lie;
        op = begin_control(KV_OP_TABLE);
        expose(op, &lies[i]);
    }
    kvc_node_fail(&f.client->nodes[0], KV_UNREACHABLE, "lost by the test");
    turn(0);
    f.node.lie = LIE_HELLO_VERSION;
    op = begin_control(KV_OP_TABLE);
    assert_int_equal(run(op, 1000000), KV_VERSION);
    kv_op_free(op);
}

/* ---- roots with rows --------------------------------------------------------------------- */

enum {
    FACES = 9, /* one more than a row has */
};

static kv_status_t open_face(struct kv_client *client,
                             uint32_t index,
                             const char *address,
                             struct kvc_control **ret_control)
{
    char control[256] = "loopback:";
    const void *bytes;
    size_t n_bytes;

    (void)address;
    f.node.control->ops->port_address(f.node.control, &bytes, &n_bytes);
    for (size_t i = 0; i < n_bytes; i++)
        snprintf(control + strlen(control), 3, "%02x", ((const uint8_t *)bytes)[i]);
    return kvc_control_message_open(client, index, control, ret_control);
}

/* A client of so many nodes, all of them the fake. */
static int set_up_faces(void **state)
{
    struct kvc_node_setup nodes[FACES];
    char addresses[FACES][16];
    struct kvc_client_setup setup = {
        .nodes = nodes,
        .n_nodes = FACES,
        .open_control = open_face,
        .clock = &f.clock,
        .seed = 8,
        .ops_max = OPS_MAX,
        .retry_ms = RETRY_MS,
        .peer_timeout_ms = PEER_TIMEOUT_MS,
    };

    (void)state;
    set_up(NULL);
    kv_client_close(f.client);
    f.session = NULL;
    f.node.has_faces = true;
    setup.transport = f.transport;
    for (unsigned i = 0; i < FACES; i++) {
        snprintf(addresses[i], sizeof(addresses[i]), "face:%u", i);
        nodes[i] = (struct kvc_node_setup){.address = addresses[i], .mode = KV_CHANNEL_NETWORK};
    }
    return kvc_client_create(&setup, &f.client) == KV_OK ? 0 : -1;
}

/* Opens a session of the prompt whose blocks have these names. */
static struct kv_op *open_prompt(const struct kv_id128 *names, uint32_t n_names)
{
    struct kv_session_options options = {.block_names = names, .n_block_names = n_names};
    struct kv_model_info model = {.name = "model"};
    struct kv_op *op;

    assert_int_equal(kv_schema_uniform(&model.schema, N_LAYERS, N_HEADS, 64, 64, KV_FP16),
                     KV_OK);
    f.node.n_opens = f.node.n_closes = 0;
    assert_int_equal(kv_open_begin(f.client, &model, &options, 0, &op), KV_OK);
    run(op, 1000000);
    for (unsigned i = 0; i < 10; i++)
        turn(1000);
    return op;
}

/* Opens one and says where it is: the root. */
static uint64_t root_of(const struct kv_id128 *names, uint32_t n_names)
{
    struct kv_op *op = open_prompt(names, n_names);
    struct kv_session *session = kv_op_session(op);
    struct kv_ticket ticket;

    if (session == NULL)
        fail_msg("%s", kv_op_detail(op));
    kv_op_free(op);
    kv_session_ticket(session, &ticket);
    kv_session_free(session);
    return ticket.root;
}

/* A root has as many rows as nodes tell: an open that is sent elsewhere gets there, what other
 * nodes had opened is closed, and the next one goes there at once. */
static void test_rows(void **state)
{
    struct kv_id128 names[3] = {{{7}}, {{8}}, {{9}}};
    uint32_t branch;

    (void)state;
    do {
        names[1].bytes[15]++;
        branch = kv_placement_branch(names, 3);
    } while (branch % 2 == 0 || branch % 8 < 2); /* of 1, 2 and 8 rows, each time another one */
    assert_true(root_of(names, 3) == 7);
    assert_int_equal(f.node.n_opens, KV_ROW_NODES);
    assert_int_equal(f.node.rows_asked, 1);

    f.node.moves_to[0] = 2;
    f.node.n_before_move = 3;
    assert_true(root_of(names, 3) == kv_placement_branch_root(7, branch, 2));
    assert_in_range(f.node.n_opens, KV_ROW_NODES + 4, 2 * KV_ROW_NODES);
    assert_int_equal(f.node.n_closes, 3);
    assert_true(root_of(names, 3) == kv_placement_branch_root(7, branch, 2));
    assert_int_equal(f.node.n_opens, KV_ROW_NODES);
    assert_int_equal(f.node.rows_asked, 2);

    /* Those that stay are told as well. */
    f.node.rows_told = 8;
    assert_true(root_of(names, 3) == kv_placement_branch_root(7, branch, 2));
    assert_true(root_of(names, 3) == kv_placement_branch_root(7, branch, 8));
    /* A node of an older version tells nothing. */
    f.node.rows_told = 0;
    assert_true(root_of(names, 3) == kv_placement_branch_root(7, branch, 8));

    /* All the way. */
    for (unsigned i = 0; i < 6; i++)
        f.node.moves_to[i] = 2u << i;
    assert_true(root_of(&names[1], 2) ==
                kv_placement_branch_root(8, kv_placement_branch(&names[1], 2), 64));
    assert_int_equal(f.node.rows_asked, 64);
    /* What was told long ago is asked again. */
    memset(f.node.moves_to, 0, sizeof(f.node.moves_to));
    f.clock.virtual_us += KVC_ROOT_US;
    assert_true(root_of(names, 3) == 7);
    assert_int_equal(f.node.rows_asked, 1);
    /* So it is if nodes have since told only what they have from the client itself. */
    f.node.rows_told = 8;
    assert_true(root_of(names, 3) == 7);
    for (unsigned i = 0; i < 3; i++) {
        f.clock.virtual_us += KVC_ROOT_US / 3 + 1;
        (void)root_of(names, 3);
        assert_int_equal(f.node.rows_asked, i < 2 ? 8 : 1);
    }
}

static void refuses(const char *why)
{
    const struct kv_id128 names[1] = {{{0x2a}}};
    struct kv_op *op = open_prompt(names, 1);

    assert_int_equal(kv_op_status(op), KV_CORRUPT);
    if (strstr(kv_op_detail(op), why) == NULL)
        fail_msg("%s: not: %s", kv_op_detail(op), why);
    kv_op_free(op);
}

/* What a node tells of rows is a number that may be, and more each time. */
static void test_row_lies(void **state)
{
    (void)state;
    f.node.moves_to[0] = 3;
    refuses("moved: root 000000000000002a: 3 rows, after 1");
    f.node.moves_to[0] = 128;
    refuses("moved: root 000000000000002a: 128 rows, after 1");
    f.node.moves_to[0] = UINT32_MAX;
    refuses("moved: root 000000000000002a: 4294967295 rows, after 1");
    f.node.moves_to[0] = 1;
    refuses("moved: root 000000000000002a: 1 rows, after 1");
    f.node.moves_to[0] = 0;
    f.node.rows_told = 5;
    refuses("root 000000000000002a: 5 rows, after 1");
    /* They cannot be moved for ever. */
    f.node.rows_told = 0;
    for (unsigned i = 0; i < 7; i++)
        f.node.moves_to[i] = i < 6 ? 2u << i : 64;
    refuses("moved: root 000000000000002a: 64 rows, after 64");
    f.node.moves_to[6] = 0;
    f.node.rows_told = 32;
    refuses("root 000000000000002a: 32 rows, after 64");
}

/* Its names are shown to people, whose terminals they must not steer. */
static void test_names(void **state)
{
    const struct kv_table *table;
    struct kv_node_info info;
    struct kv_op *op;

    (void)state;
    f.node.lie = LIE_CONTROLS;
    kvc_node_fail(&f.client->nodes[0], KV_UNREACHABLE, "lost by the test");
    kv_poll(f.client);
    op = begin_control(KV_OP_TABLE);
    assert_int_equal(run(op, 1000000), KV_OK);
    table = kv_op_table(op);
    assert_string_equal(table->columns[0], "name");
    assert_string_equal(table->columns[1], "val?[2Jue");
    assert_string_equal(table->cells[0].text, "up?time?? s \xc3\x9c?");
    kv_op_free(op);
    kv_client_node(f.client, 0, &info);
    assert_string_equal(info.name, "?]0;fake?");
    assert_string_equal(info.transports, "?]0;fake?");
}

/* Answers with wrong bits anywhere: what is not refused is in its bounds, and nothing lands
 * where it should not. */
static void test_query_noise(void **state)
{
    struct asked *asked = ask(20);
    struct kv_random noise;
    struct kv_query_result found;
    unsigned n_taken = 0;
    struct kv_op *op;

    (void)state;
    asked->query.want_weights = true;
    asked->query.merge = KV_MERGE_NONE;
    kv_random_init(&noise, 5);
    f.node.noise = &noise;
    for (unsigned i = 0; i < 2000; i++) {
        asked->query.k = i % 2 ? 20 : 150;
        asked->query.answer = i % 3 ? KV_ANSWER_ROWS : KV_ANSWER_IDS;
        size_t room = kv_query_rows_bytes_max(kv_session_schema(f.session), &asked->query);

        op = begin_query(&asked->query);
        assert_true(run(op, 1000000) == KV_OK || kv_op_status(op) == KV_CORRUPT);
        for (uint32_t head = 0; kv_op_query_result(op, head, &found) == KV_OK; head++) {
            n_taken++;
            assert_in_range(found.n_ids, asked->query.k, 190);
            for (uint32_t j = 0; j < found.n_ids; j++)
                assert_true((found.ids[j] >= 10 && found.ids[j] < 100) ||
                            (found.ids[j] >= 200 && found.ids[j] < 300));
        }
        kv_op_free(op);
        assert_false(kv_buffer_busy(f.buffer));
        for (size_t j = (4 << 20) + room; j < (4 << 20) + room + 65536; j++)
            assert_int_equal(f.memory[j], 0xee);
        forget();
    }
    assert_true(n_taken > 0); /* scores, times */
}

/* An answer that is late, lost, refused or for nobody. */
static void test_query_troubles(void **state)
{
    struct asked *asked = ask(150);
    struct kv_op *op;
    unsigned n;

    (void)state;
    f.node.n_busy = 2;
    op = begin_query(&asked->query);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(f.node.n_seen, 3);
    check_found(op, &asked->query, NULL);
    kv_op_free(op);

    /* Asked again: the first answer counts no more. */
    f.node.is_manual = true;
    n = f.node.n_seen;
    op = begin_query(&asked->query);
    turn((RETRY_MS + 1) * 1000);
    turn(0);
    assert_int_equal(f.node.n_seen, n + 2);
    carry_out(&f.node.seen[n]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    carry_out(&f.node.seen[n + 1]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_OK);
    check_found(op, &asked->query, NULL);
    kv_op_free(op);

    /* Its body comes, its rows do not: what was kept of it gives way to the next. */
    n = f.node.n_seen;
    f.node.no_bulk = true;
    op = begin_query(&asked->query);
    turn(0);
    carry_out(&f.node.seen[n]);
    f.node.no_bulk = false;
    turn((RETRY_MS + 1) * 1000);
    turn(0);
    assert_int_equal(f.node.n_seen, n + 2);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    carry_out(&f.node.seen[n + 1]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_OK);
    check_found(op, &asked->query, NULL);
    kv_op_free(op);

    /* Cancelled: nothing lands, and the node is told. */
    n = f.node.n_seen;
    op = begin_query(&asked->query);
    turn(0);
    kv_cancel(op);
    turn(0);
    assert_int_equal(f.node.cancelled, f.node.seen[n].header.request_id);
    assert_false(kv_buffer_busy(f.buffer));
    carry_out(&f.node.seen[n]);
    turn(0);
    for (size_t i = 4 << 20; i < 8 << 20; i++)
        assert_int_equal(f.memory[i], 0xee);
    kv_op_free(op);

    /* Both stood still for longer than the operation had: what the node measured is right. */
    n = f.node.n_seen;
    op = begin_query(&asked->query);
    turn(0);
    f.node.stood_us = 12000000;
    f.clock.virtual_us += f.node.stood_us;
    carry_out(&f.node.seen[n]);
    f.node.stood_us = 0;
    turn(0);
    if (kv_op_status(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    kv_op_free(op);

    /* Too late. */
    op = begin_query(&asked->query);
    assert_int_equal(run(op, 50000), KV_IN_PROGRESS);
    f.clock.virtual_us += 6000000;
    turn(0);
    assert_int_equal(kv_op_status(op), KV_DEADLINE);
    assert_non_null(strstr(kv_op_detail(op), ": query: deadline: after "));
    assert_non_null(strstr(kv_op_detail(op), "layer 1"));
    kv_op_free(op);
}

static void test_index(void **state)
{
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 300};
    const struct kv_index_options good = {
        .tokens = 300,
        .chapter_blocks = 128,
        .m = 2,
        .bits = 6,
        .iterations = 10,
        .budget_us = 5000,
        .seed = 3,
        .wait = true,
    };
    struct kv_index_options index = good;
    const struct kv_wire_index *asked;
    const struct kv_wire_unit *units;
    struct kv_index_result indexed;
    struct kv_query_result found;
    struct kv_op *op;

    (void)state;
    put(&rows);
    forget();
    assert_int_equal(kv_index_begin(f.session, &index, 0, &op), KV_OK);
    kv_op_index_result(op, &indexed);
    assert_int_equal(indexed.rows, 0);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(f.node.n_seen, 1);
    assert_int_equal(f.node.seen[0].header.n_units, N_LAYERS * N_HEADS);
    assert_int_equal(f.node.seen[0].header.token_begin, 0);
    assert_int_equal(f.node.seen[0].header.token_count, 300);
    asked = (const struct kv_wire_index *)f.node.seen[0].body;
    units = (const struct kv_wire_unit *)(asked + 1);
    assert_int_equal(asked->chapter_blocks, 128);
    assert_int_equal(asked->m, 2);
    assert_int_equal(asked->bits, 6);
    assert_int_equal(asked->iterations, 10);
    assert_int_equal(asked->budget_us, 5000);
    assert_int_equal(asked->seed, 3);
    assert_int_equal(asked->flags, KV_WIRE_INDEX_WAIT);
    for (uint32_t i = 0; i < N_LAYERS * N_HEADS; i++) {
        assert_int_equal(units[i].layer, i / N_HEADS);
        assert_int_equal(units[i].kv_head, i % N_HEADS);
        assert_int_equal(units[i].n_ids, 0);
    }
    kv_op_index_result(op, &indexed);
    assert_int_equal(indexed.rows, 300 * N_LAYERS * N_HEADS);
    assert_int_equal(indexed.rows_coded, 100 * N_LAYERS * N_HEADS);
    assert_int_equal(indexed.n_found, 1);
    assert_int_equal(indexed.n_trained, 2);
    assert_int_equal(indexed.n_pending, 0);
    assert_int_equal(indexed.iterations, 8);
    assert_int_equal(indexed.train_us, 1000);
    assert_int_equal(indexed.busiest_us, 1000);
    assert_int_equal(kv_op_query_result(op, 0, &found), KV_INVALID);
    kv_op_free(op);

    index.layer_begin = 1;
    index.n_layers = 1;
    index.wait = false;
    assert_int_equal(kv_index_begin(f.session, &index, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(f.node.seen[1].header.n_units, N_HEADS);
    assert_int_equal(((const struct kv_wire_index *)f.node.seen[1].body)->flags, 0);
    kv_op_free(op);
    /* An answer that takes its time is not asked for again and again. */
    f.node.is_manual = true;
    forget();
    index = good;
    assert_int_equal(kv_index_begin(f.session, &index, 0, &op), KV_OK);
    for (unsigned i = 0; i < 4; i++)
        turn(RETRY_MS * 1000);
    assert_int_equal(f.node.n_seen, 1);
    carry_out(&f.node.seen[0]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_OK);
    kv_op_free(op);

#define REFUSED(field, value)                                                    \
    do {                                                                         \
        index = good;                                                            \
        index.field = (value);                                                   \
        assert_int_equal(kv_index_begin(f.session, &index, 0, &op), KV_INVALID); \
    } while (0)
    REFUSED(layer_begin, 1);
    REFUSED(n_layers, N_LAYERS + 1);
    REFUSED(tokens, 0);
    REFUSED(summaries, 8);
    REFUSED(summaries, 128);
    REFUSED(summary_rows, 1023);
    REFUSED(summary_rows, 2048);
    REFUSED(summary_rows, 3072 << 16);
    REFUSED(tokens, N_TOKENS + 1);
    REFUSED(m, 0);
    REFUSED(m, KV_SUBSPACES_MAX + 1);
    REFUSED(bits, 0);
    REFUSED(bits, KV_CODE_BITS_MAX + 1);
    REFUSED(iterations, 0);
    REFUSED(iterations, KV_KMEANS_ITERATIONS_MAX + 1);
    REFUSED(chapter_blocks, KV_TOKENS_MAX / KV_BLOCK_TOKENS + 1);
#undef REFUSED
}

/* Groups of 1,024 rows are what is meant where nothing is said, so that older nodes understand;
 * those of 3,072 are said, and older nodes not asked. */
static void test_summary_rows(void **state)
{
    static const struct {
        uint32_t summaries, rows;
        uint16_t blocks; /* in the message */
    } cases[] = {{16, 0, 0}, {16, 1024, 0}, {64, 3072, 24}, {0, 3072, 0}};
    struct asked *asked = ask(20);
    struct kv_op *op;

    (void)state;
    asked->query.answer = KV_ANSWER_IDS;
    for (unsigned i = 0; i < 2 * sizeof(cases) / sizeof(cases[0]); i++) {
        const bool is_old = i % 2 != 0, is_refused = is_old && cases[i / 2].blocks != 0;
        const struct kv_index_options index = {.tokens = 300,
                                               .m = 2,
                                               .bits = 6,
                                               .iterations = 10,
                                               .summaries = cases[i / 2].summaries,
                                               .summary_rows = cases[i / 2].rows};

        f.client->nodes[0].version = is_old ? KV_WIRE_VERSION_FIRST_CUT - 1 : KV_WIRE_VERSION;
        forget();
        asked->query.summaries = cases[i / 2].summaries;
        asked->query.summary_rows = cases[i / 2].rows;
        assert_int_equal(kv_index_begin(f.session, &index, 0, &op),
                         is_refused ? KV_UNSUPPORTED : KV_OK);
        if (!is_refused) {
            turn(0);
            const struct kv_wire_index *sent = (const void *)f.node.seen[0].body;
            assert_int_equal(sent->summaries, cases[i / 2].summaries);
            assert_int_equal(sent->summary_blocks, cases[i / 2].blocks);
            kv_op_free(op);
        } else {
            assert_int_equal(f.node.n_seen, 0);
            assert_non_null(strstr(kv_client_detail(f.client), "summary_rows"));
        }
        forget();
        assert_int_equal(kv_query_begin(f.session, &asked->query, NULL, 0, &op),
                         is_refused ? KV_UNSUPPORTED : KV_OK);
        if (!is_refused) {
            turn(0);
            const struct kv_wire_query *sent = (const void *)f.node.seen[0].body;
            assert_int_equal(sent->summaries, cases[i / 2].summaries);
            assert_int_equal(sent->summary_blocks, cases[i / 2].blocks);
            kv_op_free(op);
        } else {
            assert_int_equal(f.node.n_seen, 0);
            assert_non_null(strstr(kv_client_detail(f.client), "summary_rows"));
        }
    }
    f.client->nodes[0].version = KV_WIRE_VERSION;
}

/* Closing a client in the middle of everything leaves nothing behind (the sanitizers look). */
static void test_close_amid(void **state)
{
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 1000};
    struct kv_op *op;

    (void)state;
    f.node.is_manual = true;
    begin_put(&rows, 0);
    begin_read(&rows, 4 << 20);
    assert_int_equal(kv_truncate_begin(f.session, 5, 1000, &op), KV_OK);
    turn(1000);
    assert_true(f.node.n_seen > 1);
    for (unsigned i = 0; i < f.node.n_seen; i++)
        if (f.node.seen[i].header.op == KV_OP_READ)
            carry_out(&f.node.seen[i]);
}

/* ---- invariants -------------------------------------------------------------------------- */

/* What there is in the scene of test_check_finds(). */
static struct kv_op *first_op(void)
{
    return KVC_LIST_ENTRY(f.client->ops.next, struct kv_op, of_client);
}

static struct kv_op *queued_op(void)
{
    return KVC_LIST_ENTRY(f.client->ops.previous, struct kv_op, of_client);
}

static struct kvc_request *first_request(void)
{
    return KVC_LIST_ENTRY(first_op()->owner.requests.next, struct kvc_request, of_owner);
}

static struct kvc_subop *first_subop(void)
{
    struct kv_op *op = first_op();

    while (kvc_list_empty(&op->subops))
        op = KVC_LIST_ENTRY(op->of_client.next, struct kv_op, of_client);
    return KVC_LIST_ENTRY(op->subops.next, struct kvc_subop, of_op);
}

/* The first of a list is its last one now. */
static void move_back(struct kvc_list *head)
{
    struct kvc_list *first = head->next;

    kvc_list_remove(first);
    kvc_list_append(head, first);
}

/* Breaks the number-th thing.  false: there are not so many. */
static bool break_it(unsigned number)
{
    struct kvc_node *node = &f.client->nodes[0];
    struct kvc_connection *connection = &node->connections[0];

    switch (number) {
    case 0: /* (1) */
        f.client->ops.next->previous = f.client->ops.next;
        return true;
    case 1:
        kvc_list_remove(&first_op()->of_client);
        return true;
    case 2: /* (2) */
        f.client->loop.next_due_us = UINT64_MAX;
        return true;
    case 3: /* (3) */
        node->failure = KV_UNREACHABLE;
        return true;
    case 4: /* (4) */
        node->control = NULL;
        return true;
    case 5:
        node->state = KVC_NODE_IDLE;
        return true;
    case 6: /* (5) */
        node->n_requests++;
        return true;
    case 7:
        node->bulk_moving++;
        return true;
    case 8:
        node->n_calls++;
        return true;
    case 9:
        node->n_pending_receives++;
        return true;
    case 10: /* (6) */
        connection->n_in_flight--;
        return true;
    case 11:
        connection->in_flight[first_request()->priority]--;
        return true;
    case 12:
        node->credits = 1;
        return true;
    case 13: /* (7) */
        connection->put_next++;
        return true;
    case 14:
        connection->puts_ended[1] |= 4;
        return true;
    case 15: /* (8) */
        first_subop()->finished = true;
        return true;
    case 16:
        kvc_list_remove(&first_subop()->of_connection);
        return true;
    case 17: /* (9) */
        first_request()->owner = NULL;
        return true;
    case 18:
        first_request()->is_over = true;
        return true;
    case 19: /* (10) */
        first_request()->connection++;
        return true;
    case 20:
        first_request()->id ^= 1;
        return true;
    case 21: /* (11) */
        f.client->n_large++;
        return true;
    case 22:
        f.client->free_small = first_request()->message;
        return true;
    case 23: /* (12) */
        f.buffer->n_holds = 1;
        return true;
    case 24: /* (13) */
        first_op()->is_in_use = false;
        return true;
    case 25:
        first_op()->stage = KVC_STAGE_ENDED;
        return true;
    case 26:
        kvc_list_remove(&queued_op()->of_session);
        return true;
    case 27: /* (14) */
        queued_op()->stage = KVC_STAGE_RUNNING;
        f.session->n_queued--;
        return true;
    case 28: /* (15) */
        first_op()->owner.n_calls++;
        return true;
    case 29:
        f.client->n_preparing++;
        return true;
    case 30:
        f.session->n_queued++;
        return true;
    case 31:
        f.session->n_exclusive--;
        return true;
    case 32: /* (16) */
        queued_op()->stage = KVC_STAGE_PREPARING;
        f.client->n_preparing++;
        f.session->n_queued--;
        return true;
    case 33: /* (17) */
        f.session->n_log = 1;
        f.session->log[0].generation = f.session->generation + 1;
        return true;
    case 34: /* (19) */
        f.session->n_renewing++;
        return true;
    case 35:
        f.session->nodes[0].is_catching_up = true;
        return true;
    case 36: /* pools */
        (void)kv_pool_get(f.client->requests);
        return true;
    case 37: /* (5), (8): lists of nodes and connections */
        kvc_list_append(&f.client->calling, &node->of_calling);
        return true;
    case 38:
        f.client->n_attached++;
        return true;
    case 39:
        kvc_list_remove(&connection->of_waiting);
        f.client->n_waiting--;
        return true;
    case 40: /* (2) */
        f.session->renewal.at_us = 1;
        return true;
    case 41:
        kvc_due_init(&f.session->renewal);
        return true;
    case 42: /* (13) */
        kvc_list_remove(&first_op()->of_ranked);
        return true;
    case 43:
        move_back(&f.session->ranked);
        return true;
    case 44:
        move_back(&connection->subops[KV_PRIORITY_PUT]);
        return true;
    default:
        return false;
    }
}

static void check_broken(void *arg)
{
    const unsigned *number = arg;

    if (break_it(*number))
        kvc_client_check(f.client);
}

/* With requests and sub-operations under way and an operation that waits, whatever is broken is
 * found. */
static void test_check_finds(void **state)
{
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 1};
    unsigned number = 0;
    struct kv_op *op;

    (void)state;
    f.node.is_manual = true;
    for (; rows.token_begin < CREDITS + 2; rows.token_begin++)
        begin_put(&rows, (size_t)rows.token_begin << 16);
    assert_int_equal(kv_truncate_begin(f.session, 1, 1000, &op), KV_OK);
    turn(1000);
    while (dies(check_broken, &number))
        number++;
    if (break_it(number))
        fail_msg("broken thing %u was not found", number);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hello, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_large, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_small, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_arguments, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_few_credits, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_late_answer, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_longest_deadline, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_quarantine, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_busy, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_resend, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_puts_are_numbered, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_forged, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_forged_offers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_forged_control, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_corrupt, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_silence, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_patient, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_slow, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_catch_up, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_catch_up_not_found, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_lanes_share, set_up_many, tear_down),
        cmocka_unit_test_setup_teardown(test_query, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_query_all_held, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_query_bulk, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_query_split, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_batch, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_busy_batch_of_none, set_up, tear_down),
        cmocka_unit_test(test_many_puts),
        cmocka_unit_test_setup_teardown(test_append_batch, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_large_requests_leave_alone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_replies_together, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_replies_cut_short, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_replies_of_strangers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_query_arguments, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_query_lies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_query_first_cut, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_attend_lies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_other_lies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_control_lies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_save_asks_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_hello_lies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rows, set_up_faces, tear_down),
        cmocka_unit_test_setup_teardown(test_row_lies, set_up_faces, tear_down),
        cmocka_unit_test_setup_teardown(test_query_noise, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_query_troubles, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_index, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_summary_rows, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_close_amid, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_check_finds, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
