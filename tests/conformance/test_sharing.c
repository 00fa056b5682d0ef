/* test_sharing.c - sessions that share rows in every way there is, against a plain model of
 * what each row must be; with bits flipped and segments swapped in the nodes' memory on the
 * way.
 *
 *   test_conformance_sharing [--seed N] [--rounds N]     as a program: any number of rounds
 *                            [--nodes HOST:PORT,...]     on nodes that run already, without damage
 *
 * A round is a store of its own: two nodes of two data threads, three clients of two tenants,
 * and 220 operations, one after the other, in one thread on a virtual clock; all follows from
 * the round's seed, which is printed when something is wrong.
 *
 * The model knows for each session whose row each token has in each unit: the number of the one
 * who wrote it.  Rows that an open attaches are those of somebody who published a block of that
 * name, whole in each unit; who it was, the first read tells.  Where a bit was flipped,
 * KV_CORRUPT is right, too; a row that is not what it must be, never.
 */
#include "client/client.h"
#include "client/control_message.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/node_private.h"
#include "tests/support/rows.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_NODES = 2,
    N_THREADS = 2,
    CLIENTS = 3,
    TENANTS = 2,
    UNITS = 3, /* of one layer */
    DIM = 4,
    ROW_BYTES = 2 * DIM * 2,
    BLOCKS = 5,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
    PATHS = 1 << BLOCKS, /* a bit for each block: of two that it may be */
    SESSIONS = 10,
    COPIES = 24, /* of a block, that the model knows */
    OBJECTS = 6,
    OBJECT_BYTES = 700,
    MEMORY_BYTES = 128 << 20, /* in pages, of elements of one size each */
    OPERATIONS = 220,
    ROUNDS_SHORT = 60,
    STEPS_MAX = 200000,
};

/* Who wrote each row of a block, in each unit. */
struct copy {
    uint32_t writers[UNITS][KV_BLOCK_TOKENS];
};

/* The copies that were published under a block's name. */
struct copies {
    uint32_t n;
    struct copy copies[COPIES];
};

struct sharer {
    struct kv_session *session; /* NULL: the place is free */
    unsigned client;
    uint32_t path;
    uint32_t n_tokens;
    struct copy blocks[BLOCKS];
};

static struct {
    struct kv_clock clock;
    struct kv_transport *transport;
    struct kv_disk *disks[N_NODES];
    struct kvs_node *nodes[N_NODES];
    struct kv_client *clients[CLIENTS];
    struct kv_buffer *buffers[CLIENTS];
    struct kv_model_info model;
    struct kv_random random;
    uint64_t seed;
    unsigned operation;
    const char *addresses; /* of nodes that run already; NULL: the round's own */
    bool is_damaged;       /* from now on */
    uint32_t n_writers;
    struct sharer sharers[SESSIONS];
    struct copies copies[TENANTS][BLOCKS][PATHS]; /* by the bits up to the block */
    uint32_t objects[TENANTS][OBJECTS];           /* what each has; 0: it is not there */
    struct kv_id128 names[PATHS][BLOCKS];

    uint64_t n_attached, n_corrupt, n_flips, n_rows; /* over all rounds */
} it;

static uint64_t below(uint64_t n)
{
    return kv_random_below(&it.random, n);
}

#define WRONG(...)                                                                     \
    do {                                                                               \
        print_error("round of seed %llu, operation %u: ", (unsigned long long)it.seed, \
                    it.operation);                                                     \
        fail_msg(__VA_ARGS__);                                                         \
    } while (0)

/* ---- the world --------------------------------------------------------------------------- */

static uint64_t now(const struct kv_clock *clock)
{
    (void)clock;
    return it.clock.virtual_us;
}

static void step(void)
{
    it.clock.virtual_us += 20;
    for (unsigned i = 0; i < CLIENTS; i++)
        if (it.clients[i] != NULL)
            kv_poll(it.clients[i]);
    for (unsigned i = 0; i < N_NODES; i++) {
        for (uint32_t thread = 0; thread < N_THREADS; thread++)
            kvs_node_data_step(it.nodes[i], thread);
        kvs_node_control_step(it.nodes[i]);
    }
}

/* Runs an operation to its end.  It is the caller's still. */
static kv_status_t run(kv_status_t begun, struct kv_op *op)
{
    if (begun != KV_OK)
        return begun;
    if (it.addresses != NULL)
        return kv_wait(op);
    for (unsigned i = 0; kv_op_status(op) == KV_IN_PROGRESS; i++) {
        if (i == STEPS_MAX)
            WRONG("an operation does not end");
        step();
    }
    return kv_op_status(op);
}

static kv_status_t finish(kv_status_t begun, struct kv_op *op)
{
    const kv_status_t status = run(begun, op);

    if (begun == KV_OK)
        kv_op_free(op);
    return status;
}

static unsigned tenant_of(unsigned client)
{
    return client == CLIENTS - 1;
}

/* Nodes, and clients of them, that are stepped. */
static void open_own_nodes(uint64_t seed)
{
    static char addresses[N_NODES][2 * KV_WIRE_ADDRESS_MAX + 32];
    const struct kv_transport_config transport = {0};
    struct kvc_node_setup remotes[N_NODES];
    char detail[256];

    it.clock = (struct kv_clock){.name = "sharing", .now_us = now, .virtual_us = 1000000};
    assert_int_equal(
        kv_transport_loopback.open(&transport, &it.transport, detail, sizeof(detail)), KV_OK);
    for (unsigned i = 0; i < N_NODES; i++) {
        it.disks[i] = kv_disk_memory_open(&it.clock, 0);
        const struct kvs_node_config config = {
            .name = i == 0 ? "a" : "b",
            .memory_bytes = MEMORY_BYTES,
            .n_threads = N_THREADS,
            .sessions_max = 64,
            .clients_max = 8,
            .lease_ms = 3600 * 1000,
            .client_lease_ms = 3600 * 1000,
            .seed = seed + i + 1,
            .scrub_bytes = below(2) == 0 ? 1 << 20 : 0,
            .clock = &it.clock,
            .transport = it.transport,
            .message_control = true,
            .disk = it.disks[i],
        };
        if (kvs_node_create(&config, &it.nodes[i], detail, sizeof(detail)) != KV_OK)
            fail_msg("%s", detail);
        snprintf(addresses[i], sizeof(addresses[i]), "%s", kvs_node_address(it.nodes[i]));
        remotes[i] = (struct kvc_node_setup){
            .address = addresses[i], .name = config.name, .mode = KV_CHANNEL_NETWORK};
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        const struct kvc_client_setup setup = {
            .nodes = remotes,
            .n_nodes = N_NODES,
            .transport = it.transport,
            .open_control = kvc_control_message_open,
            .clock = &it.clock,
            .seed = seed + 10 + i,
            .name = "test",
            .tenant = tenant_of(i),
            .deadline_ms = 60000,
            .peer_timeout_ms = 60000,
        };

        assert_int_equal(kvc_client_create(&setup, &it.clients[i]), KV_OK);
    }
}

static void open_clients(void)
{
    char detail[512];

    for (unsigned i = 0; i < CLIENTS; i++) {
        const struct kv_client_options options = {.nodes = it.addresses,
                                                  .tenant = tenant_of(i),
                                                  .deadline_ms = 60000,
                                                  .peer_timeout_ms = 30000};

        if (kv_client_open(&options, &it.clients[i], detail, sizeof(detail)) != KV_OK)
            fail_msg("%s", detail);
    }
}

static void open_world(uint64_t seed)
{
    static const uint16_t heads[] = {UNITS};
    uint32_t tokens[TOKENS];
    char name[48];

    it.seed = seed;
    it.is_damaged = false;
    it.n_writers = 0;
    memset(it.sharers, 0, sizeof(it.sharers));
    memset(it.objects, 0, sizeof(it.objects));
    for (unsigned i = 0; i < TENANTS; i++)
        for (unsigned j = 0; j < BLOCKS; j++)
            for (unsigned k = 0; k < PATHS; k++)
                it.copies[i][j][k].n = 0;
    kv_random_init(&it.random, seed);
    /* On nodes that go on, each round has names of its own. */
    snprintf(name, sizeof(name), "sharing-%llu-%llu", (unsigned long long)seed,
             (unsigned long long)(it.addresses != NULL ? kv_clock_now(&kv_clock_real) : 0));
    test_model(&it.model, name, 1, heads, DIM, DIM);
    if (it.addresses != NULL)
        open_clients();
    else
        open_own_nodes(seed);
    for (unsigned i = 0; i < CLIENTS; i++) {
        assert_int_equal(
            kv_buffer_alloc(it.clients[i], (size_t)TOKENS * UNITS * ROW_BYTES, &it.buffers[i]),
            KV_OK);
    }
    for (uint32_t path = 0; path < PATHS; path++) {
        for (uint32_t i = 0; i < TOKENS; i++)
            tokens[i] = i % 7 + 10 * (path >> i / KV_BLOCK_TOKENS & 1);
        kv_prompt_names(it.clients[0], &it.model, tokens, TOKENS, NULL, 0, it.names[path]);
    }
}

static void close_world(void)
{
    for (unsigned i = 0; i < CLIENTS; i++) {
        kv_client_close(it.clients[i]);
        it.clients[i] = NULL;
    }
    if (it.addresses != NULL)
        return;
    for (int i = 0; i < 200; i++)
        step();
    for (unsigned i = 0; i < N_NODES; i++) {
        kvs_node_check(it.nodes[i]);
        kvs_node_check_memory(it.nodes[i]);
        kvs_node_destroy(it.nodes[i]);
        kv_disk_close(it.disks[i]);
    }
    it.transport->ops->close(it.transport);
}

/* ---- rows -------------------------------------------------------------------------------- */

static bool is_row(const uint8_t *row, uint32_t writer, uint32_t unit, uint32_t token)
{
    return test_is_row(row, ROW_BYTES, writer, 0, unit, token);
}

static struct copies *copies_of(unsigned client, uint32_t path, uint32_t block)
{
    return &it.copies[tenant_of(client)][block][path & ((2u << block) - 1)];
}

/* Reads all rows of a range.  Returns KV_CORRUPT only if something was damaged. */
static kv_status_t read_rows(const struct sharer *sharer, uint32_t begin, uint32_t end)
{
    const struct kv_rows rows = {.n_layers = 1, .token_begin = begin, .n_tokens = end - begin};
    const struct kv_rows_io io = {.buffer = it.buffers[sharer->client]};
    struct kv_op *op = NULL;
    kv_status_t status = kv_read_begin(sharer->session, &rows, &io, 0, &op);

    status = finish(status, op);
    if (status == KV_CORRUPT && it.is_damaged)
        it.n_corrupt++;
    else if (status != KV_OK)
        WRONG("read [%u, %u): %s", begin, end, kv_client_detail(it.clients[sharer->client]));
    return status;
}

static const uint8_t *row_read(
    const struct sharer *sharer, uint32_t begin, uint32_t end, uint32_t unit, uint32_t token)
{
    return (const uint8_t *)kv_buffer_data(it.buffers[sharer->client]) +
           ((size_t)unit * (end - begin) + (token - begin)) * ROW_BYTES;
}

static void check_rows(const struct sharer *sharer, uint32_t begin, uint32_t end)
{
    for (uint32_t unit = 0; unit < UNITS; unit++) {
        for (uint32_t token = begin; token < end; token++) {
            const struct copy *block = &sharer->blocks[token / KV_BLOCK_TOKENS];
            const uint32_t writer = block->writers[unit][token % KV_BLOCK_TOKENS];

            if (!is_row(row_read(sharer, begin, end, unit, token), writer, unit, token))
                WRONG("unit %u, token %u: not the row of writer %u", unit, token, writer);
            it.n_rows++;
        }
    }
}

/* ---- damage ------------------------------------------------------------------------------ */

/* A segment of a block that some node keeps by name, in memory; NULL: there is none. */
static struct kvs_block *any_kept(uint32_t *ret_at)
{
    const unsigned node = (unsigned)below(N_NODES);
    struct kvs_control *control = &it.nodes[node]->control;
    struct kvs_prefix *prefix = NULL, *next;
    size_t cursor = 0;

    for (uint64_t n = below(20); (next = kvs_prefixes_next(control->prefixes, &cursor)) != NULL;
         n--) {
        prefix = next;
        if (n == 0)
            break;
    }
    if (prefix == NULL)
        return NULL;
    struct kvs_block **block = kvs_prefix_block(prefix, (uint32_t)below(N_THREADS), N_THREADS);
    if (block == NULL || *block == NULL || (*block)->residency != KVS_IN_MEMORY)
        return NULL;
    *ret_at = (uint32_t)below((*block)->n_segments);
    return (*block)->segments[*ret_at].rows != 0 ? *block : NULL;
}

static void flip(void)
{
    uint32_t at;
    struct kvs_block *block = any_kept(&at);

    if (block == NULL)
        return;
    it.is_damaged = true;
    it.n_flips++;
    kvs_block_rows(block, at)[below(KV_BLOCK_TOKENS * ROW_BYTES)] ^= (uint8_t)(1u << below(8));
}

static void swap(void)
{
    uint32_t at, other_at;
    struct kvs_block *block = any_kept(&at), *other = any_kept(&other_at);
    uint8_t rows[KV_BLOCK_TOKENS * ROW_BYTES];

    if (block == NULL || other == NULL || (block == other && at == other_at))
        return;
    it.is_damaged = true;
    it.n_flips++;
    memcpy(rows, kvs_block_rows(block, at), sizeof(rows));
    memcpy(kvs_block_rows(block, at), kvs_block_rows(other, other_at), sizeof(rows));
    memcpy(kvs_block_rows(other, other_at), rows, sizeof(rows));
    if (below(2) == 0) { /* with their checksums */
        uint32_t crcs[KV_BLOCK_TOKENS];

        memcpy(crcs, kvs_block_crcs(block, at), sizeof(crcs));
        memcpy(kvs_block_crcs(block, at), kvs_block_crcs(other, other_at), sizeof(crcs));
        memcpy(kvs_block_crcs(other, other_at), crcs, sizeof(crcs));
    }
}

/* ---- operations -------------------------------------------------------------------------- */

static void end_session(struct sharer *sharer)
{
    struct kv_op *op = NULL;
    kv_status_t status = kv_close_begin(sharer->session, 0, &op);

    status = finish(status, op);
    if (status != KV_OK)
        WRONG("close: %s", kv_client_detail(it.clients[sharer->client]));
    kv_session_free(sharer->session);
    sharer->session = NULL;
}

/* What a client does that finds a corrupt row: nobody is to get it again. */
static void give_up(struct sharer *sharer)
{
    const struct kv_prefix prefix = {.verb = KV_PREFIX_EVICT,
                                     .name = &it.names[sharer->path][0]};
    struct kv_op *op = NULL;
    kv_status_t status =
        kv_prefix_begin(it.clients[sharer->client], KV_NODES_ALL, &prefix, 0, &op);

    status = finish(status, op);
    if (status != KV_OK)
        WRONG("evict: %s", kv_client_detail(it.clients[sharer->client]));
    end_session(sharer);
}

/* Finds out whose the attached rows are: in each unit those of one who published the block. */
static bool recognize(struct sharer *sharer)
{
    if (sharer->n_tokens > 0 && read_rows(sharer, 0, sharer->n_tokens) != KV_OK)
        return false;
    for (uint32_t block = 0; block < sharer->n_tokens / KV_BLOCK_TOKENS; block++) {
        const struct copies *copies = copies_of(sharer->client, sharer->path, block);

        for (uint32_t unit = 0; unit < UNITS; unit++) {
            bool is_found = false;

            for (uint32_t i = 0; i < copies->n && !is_found; i++) {
                is_found = true;
                for (uint32_t j = 0; j < KV_BLOCK_TOKENS && is_found; j++) {
                    const uint32_t token = block * KV_BLOCK_TOKENS + j;

                    is_found = is_row(row_read(sharer, 0, sharer->n_tokens, unit, token),
                                      copies->copies[i].writers[unit][j], unit, token);
                }
                if (is_found)
                    memcpy(sharer->blocks[block].writers[unit], copies->copies[i].writers[unit],
                           sizeof(copies->copies[i].writers[unit]));
            }
            if (!is_found)
                WRONG("attached: block %u, unit %u: nobody's who published it (%u did)", block,
                      unit, copies->n);
        }
    }
    it.n_attached += sharer->n_tokens;
    return true;
}

static void do_open(struct sharer *sharer)
{
    const uint32_t path = (uint32_t)below(PATHS);
    const unsigned client = (unsigned)below(CLIENTS);
    const struct kv_session_options options = {.block_names = it.names[path],
                                               .n_block_names = BLOCKS,
                                               .is_fresh = below(8) == 0,
                                               .tokens_max = TOKENS};
    struct kv_op *op = NULL;
    kv_status_t status = kv_open_begin(it.clients[client], &it.model, &options, 0, &op);

    status = run(status, op);
    if (status != KV_OK)
        WRONG("open: %s", kv_client_detail(it.clients[client]));
    *sharer = (struct sharer){.session = kv_op_session(op),
                              .client = client,
                              .path = path,
                              .n_tokens = kv_op_tokens(op)};
    kv_op_free(op);
    if (options.is_fresh && sharer->n_tokens != 0)
        WRONG("a fresh session with %u tokens", sharer->n_tokens);
    if (!recognize(sharer))
        give_up(sharer);
}

static void do_put(struct sharer *sharer)
{
    const uint32_t begin = sharer->n_tokens, room = TOKENS - begin;
    const uint32_t n = room == 0 ? 0 : 1 + (uint32_t)below(room < 300 ? room : 300);
    const struct kv_rows rows = {.n_layers = 1, .token_begin = begin, .n_tokens = n};
    const struct kv_rows_io io = {.buffer = it.buffers[sharer->client]};
    const uint32_t writer = ++it.n_writers;
    struct kv_op *op = NULL;
    kv_status_t status;

    if (n == 0)
        return;
    test_box(kv_buffer_data(io.buffer), &it.model.schema, &rows, writer);
    status = n < 4 ? kv_append_begin(sharer->session, &rows, &io, 0, &op)
                   : kv_put_begin(sharer->session, &rows, &io, 0, &op);
    status = finish(status, op);
    if (status == KV_CORRUPT && it.is_damaged) {
        give_up(sharer);
        return;
    }
    if (status != KV_OK)
        WRONG("put of %u at %u: %s", n, begin, kv_client_detail(it.clients[sharer->client]));
    for (uint32_t unit = 0; unit < UNITS; unit++)
        for (uint32_t token = begin; token < begin + n; token++)
            sharer->blocks[token / KV_BLOCK_TOKENS].writers[unit][token % KV_BLOCK_TOKENS] =
                writer;
    sharer->n_tokens += n;
}

static void do_publish(struct sharer *sharer)
{
    const uint32_t n_full = sharer->n_tokens / KV_BLOCK_TOKENS;
    const uint32_t n = 1 + (uint32_t)below(BLOCKS);
    const struct kv_publish publish = {.n_names = n, .names = it.names[sharer->path]};
    struct kv_op *op = NULL;
    kv_status_t status;

    /* They may be found from now on, whatever is answered. */
    for (uint32_t i = 0; i < n && i < n_full; i++) {
        struct copies *copies = copies_of(sharer->client, sharer->path, i);

        if (copies->n == COPIES)
            return;
        copies->copies[copies->n++] = sharer->blocks[i];
    }
    status = kv_publish_begin(sharer->session, &publish, 0, &op);
    status = run(status, op);
    if (status != KV_OK)
        WRONG("publish: %s", kv_client_detail(it.clients[sharer->client]));
    if (kv_op_tokens(op) > n * KV_BLOCK_TOKENS ||
        (!it.is_damaged && n <= n_full && kv_op_tokens(op) != n * KV_BLOCK_TOKENS))
        WRONG("publish: %u tokens of %u blocks, %u full", kv_op_tokens(op), n, n_full);
    kv_op_free(op);
}

static void do_read(struct sharer *sharer)
{
    if (sharer->n_tokens == 0)
        return;
    const uint32_t begin = (uint32_t)below(sharer->n_tokens);
    const uint32_t end = begin + 1 + (uint32_t)below(sharer->n_tokens - begin);

    if (read_rows(sharer, begin, end) == KV_OK)
        check_rows(sharer, begin, end);
    else
        give_up(sharer);
}

static void do_query(struct sharer *sharer)
{
    const struct kv_range range = {0, sharer->n_tokens};
    const struct kv_rows_io io = {.buffer = it.buffers[sharer->client]};
    float vectors[UNITS * DIM];
    struct kv_query query = {.n_kv_heads = UNITS,
                             .n_queries = 1,
                             .queries = vectors,
                             .scale = 0.1f,
                             .merge = KV_MERGE_SUM,
                             .answer = KV_ANSWER_ROWS,
                             .k = 1 + (uint32_t)below(20),
                             .rerank = 2,
                             .n_ranges = 1,
                             .ranges = &range};
    struct kv_query_result result;
    struct kv_op *op = NULL;
    kv_status_t status;

    if (sharer->n_tokens == 0)
        return;
    for (unsigned i = 0; i < UNITS * DIM; i++)
        vectors[i] = (float)below(2001) / 1000 - 1;
    if (below(2) == 0) {
        query.first_cut = KV_CUT_INT4;
        query.candidates = query.rerank + (uint32_t)below(8);
    }
    status = kv_query_begin(sharer->session, &query, &io, 0, &op);
    status = run(status, op);
    if (status == KV_CORRUPT && it.is_damaged) {
        it.n_corrupt++;
        kv_op_free(op);
        give_up(sharer);
        return;
    }
    if (status != KV_OK)
        WRONG("query: %s", kv_client_detail(it.clients[sharer->client]));
    for (uint32_t unit = 0; unit < UNITS; unit++) {
        assert_int_equal(kv_op_query_result(op, unit, &result), KV_OK);
        for (uint32_t i = 0; i < result.n_ids; i++) {
            const uint32_t token = result.ids[i];
            const struct copy *block = &sharer->blocks[token / KV_BLOCK_TOKENS];

            if (token >= sharer->n_tokens ||
                !is_row((const uint8_t *)result.rows + result.row_index[i] * ROW_BYTES,
                        block->writers[unit][token % KV_BLOCK_TOKENS], unit, token))
                WRONG("query: unit %u, token %u: another row", unit, token);
        }
    }
    kv_op_free(op);
}

static void do_index(struct sharer *sharer)
{
    const struct kv_index_options index = {.tokens = sharer->n_tokens,
                                           .m = 2,
                                           .bits = 4,
                                           .rotates = sharer->n_tokens % 2 == 0,
                                           .copies = sharer->n_tokens % 3 == 0,
                                           .iterations = 2,
                                           .wait = true};
    struct kv_op *op = NULL;
    kv_status_t status;

    if (sharer->n_tokens < 64)
        return;
    status = kv_index_begin(sharer->session, &index, 0, &op);
    status = finish(status, op);
    if (status != KV_OK && !(status == KV_CORRUPT && it.is_damaged))
        WRONG("index: %s", kv_client_detail(it.clients[sharer->client]));
}

static void do_fork(struct sharer *sharer, struct sharer *place)
{
    const uint32_t tokens = (uint32_t)below(sharer->n_tokens + 1);
    struct kv_op *op = NULL;
    kv_status_t status = kv_fork_begin(sharer->session, tokens, 0, &op);

    status = run(status, op);
    if (status != KV_OK)
        WRONG("fork: %s", kv_client_detail(it.clients[sharer->client]));
    *place = *sharer;
    place->session = kv_op_session(op);
    place->n_tokens = tokens;
    kv_op_free(op);
}

static void do_truncate(struct sharer *sharer)
{
    const uint32_t tokens = (uint32_t)below(sharer->n_tokens + 1);
    struct kv_op *op = NULL;
    kv_status_t status = kv_truncate_begin(sharer->session, tokens, 0, &op);

    status = finish(status, op);
    if (status != KV_OK)
        WRONG("truncate: %s", kv_client_detail(it.clients[sharer->client]));
    sharer->n_tokens = tokens;
}

static void do_resume(struct sharer *sharer)
{
    const unsigned client = tenant_of(sharer->client) ? sharer->client : (unsigned)below(2);
    struct kv_ticket ticket;
    struct kv_op *op = NULL;
    kv_status_t status;

    kv_session_ticket(sharer->session, &ticket);
    kv_session_free(sharer->session);
    status = kv_resume_begin(it.clients[client], &ticket, 0, &op);
    status = run(status, op);
    if (status != KV_OK)
        WRONG("resume: %s", kv_client_detail(it.clients[client]));
    if (kv_op_tokens(op) != sharer->n_tokens)
        WRONG("resume: %u tokens, not %u", kv_op_tokens(op), sharer->n_tokens);
    sharer->session = kv_op_session(op);
    sharer->client = client;
    kv_op_free(op);
}

static void do_match(void)
{
    const unsigned client = (unsigned)below(CLIENTS);
    const uint32_t path = (uint32_t)below(PATHS);
    struct kv_op *op = NULL;
    kv_status_t status = kv_match_begin(it.clients[client], it.names[path], BLOCKS, 0, &op);
    uint32_t n = 0;

    status = run(status, op);
    if (status != KV_OK)
        WRONG("match: %s", kv_client_detail(it.clients[client]));
    while (n < BLOCKS && copies_of(client, path, n)->n > 0)
        n++;
    if (kv_op_tokens(op) > n * KV_BLOCK_TOKENS)
        WRONG("match: %u tokens, %u blocks were published", kv_op_tokens(op), n);
    kv_op_free(op);
}

static void do_prefix(void)
{
    static const enum kv_prefix_verb verbs[] = {KV_PREFIX_PIN, KV_PREFIX_UNPIN, KV_PREFIX_EVICT,
                                                KV_PREFIX_HINT};
    const unsigned client = (unsigned)below(CLIENTS);
    const struct kv_prefix prefix = {.verb = verbs[below(4)],
                                     .name = &it.names[below(PATHS)][below(BLOCKS)],
                                     .for_ms = 1 + (uint32_t)below(1000)};
    struct kv_op *op = NULL;
    kv_status_t status = kv_prefix_begin(it.clients[client], KV_NODES_ALL, &prefix, 0, &op);

    status = finish(status, op);
    if (status != KV_OK)
        WRONG("prefix: %s", kv_client_detail(it.clients[client]));
}

static void do_object(void)
{
    const unsigned client = (unsigned)below(CLIENTS), which = (unsigned)below(OBJECTS);
    uint32_t *there = &it.objects[tenant_of(client)][which];
    const uint32_t content = below(3) == 0 || *there == 0 ? 1 + (uint32_t)below(1000) : *there;
    char name[64];
    struct kv_object object = {
        .name = name, .buffer = it.buffers[client], .bytes = OBJECT_BYTES};
    const enum kv_object_verb verb = (const enum kv_object_verb[]){
        KV_OBJECT_PUT, KV_OBJECT_GET, KV_OBJECT_GET, KV_OBJECT_DELETE}[below(4)];
    kv_status_t status, expected;
    struct kv_op *op = NULL;

    snprintf(name, sizeof(name), "%.40s %u", it.model.name, which);
    if (verb == KV_OBJECT_PUT)
        test_fill(kv_buffer_data(object.buffer), OBJECT_BYTES, content);
    status = kv_objects_begin(it.clients[client], verb, &object, 1, 0, &op);
    status = finish(status, op);
    if (verb == KV_OBJECT_PUT)
        expected = *there != 0 && *there != content ? KV_EXISTS : KV_OK;
    else
        expected = *there != 0 ? KV_OK : KV_NOT_FOUND;
    if (status != expected)
        WRONG("object %u: verb %d: %s, not %s", which, (int)verb, kv_status_name(status),
              kv_status_name(expected));
    if (status == KV_OK && verb == KV_OBJECT_PUT)
        *there = content;
    if (status == KV_OK && verb == KV_OBJECT_DELETE)
        *there = 0;
    if (status == KV_OK && verb == KV_OBJECT_GET &&
        !test_is_filled(kv_buffer_data(object.buffer), OBJECT_BYTES, *there))
        WRONG("object %u: other bytes", which);
}

/* ---- rounds ------------------------------------------------------------------------------ */

static struct sharer *any_sharer(bool is_open)
{
    for (unsigned tries = 0; tries < 3 * SESSIONS; tries++) {
        struct sharer *sharer = &it.sharers[below(SESSIONS)];

        if ((sharer->session != NULL) == is_open)
            return sharer;
    }
    return NULL;
}

static void do_something(void)
{
    struct sharer *sharer = any_sharer(true), *place = any_sharer(false);

    if (sharer == NULL || (place != NULL && below(6) == 0)) {
        if (place != NULL)
            do_open(place);
        return;
    }
    switch (below(24)) {
    case 0:
    case 1:
    case 2:
    case 3:
        do_put(sharer);
        break;
    case 4:
    case 5:
    case 6:
        do_publish(sharer);
        break;
    case 7:
    case 8:
    case 9:
        do_read(sharer);
        break;
    case 10:
    case 11:
        do_query(sharer);
        break;
    case 12:
        do_index(sharer);
        break;
    case 13:
        if (place != NULL)
            do_fork(sharer, place);
        break;
    case 14:
        do_truncate(sharer);
        break;
    case 15:
    case 16:
        do_resume(sharer);
        break;
    case 17:
        do_match();
        break;
    case 18:
        do_prefix();
        break;
    case 19:
    case 20:
        do_object();
        break;
    case 21:
    case 22:
        end_session(sharer);
        break;
    default:
        if (it.addresses != NULL || it.operation < OPERATIONS / 2 || it.seed % 4 == 0)
            break; /* half of a round, and every fourth one, are without damage */
        if (below(2) == 0)
            flip();
        else
            swap();
    }
}

static void run_round(uint64_t seed)
{
    open_world(seed);
    for (it.operation = 0; it.operation < OPERATIONS; it.operation++)
        do_something();
    for (unsigned i = 0; i < SESSIONS; i++)
        if (it.sharers[i].session != NULL)
            do_read(&it.sharers[i]);
    for (unsigned i = 0; i < SESSIONS && it.addresses != NULL; i++)
        if (it.sharers[i].session != NULL)
            end_session(&it.sharers[i]);
    close_world();
}

static uint64_t first_seed = 1, n_rounds = ROUNDS_SHORT;

static void rounds(void **state)
{
    (void)state;
    print_message("seeds %llu to %llu\n", (unsigned long long)first_seed,
                  (unsigned long long)(first_seed + n_rounds - 1));
    for (uint64_t i = 0; i < n_rounds; i++)
        run_round(first_seed + i);
    print_message(
        "%llu rounds of %d operations: %llu tokens attached, %llu rows compared, %llu flips "
        "and swaps, %llu found\n",
        (unsigned long long)n_rounds, OPERATIONS, (unsigned long long)it.n_attached,
        (unsigned long long)it.n_rows, (unsigned long long)it.n_flips,
        (unsigned long long)it.n_corrupt);
    assert_true(n_rounds < 10 || it.n_attached > 0);
    assert_true(n_rounds < 20 || it.addresses != NULL || (it.n_flips > 0 && it.n_corrupt > 0));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rounds)};

    for (int i = 1; i + 1 < argc; i += 2) {
        uint64_t *to = strcmp(argv[i], "--seed") == 0     ? &first_seed
                       : strcmp(argv[i], "--rounds") == 0 ? &n_rounds
                                                          : NULL;

        if (strcmp(argv[i], "--nodes") == 0) {
            it.addresses = argv[i + 1];
            continue;
        }
        if (to == NULL)
            return 2;
        *to = strtoull(argv[i + 1], NULL, 10);
    }
    return cmocka_run_group_tests_name("sharing", tests, NULL, NULL);
}
