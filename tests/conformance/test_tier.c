/* test_tier.c - prefixes that nodes save on disk: several times the memory, over restarts, on another
 * number of threads, and with a disk that is full, or has damaged them.
 *
 * Embedded nodes with threads, over the loopback, a disk in memory that outlasts them, and the real
 * client library.
 */
#include "tests/support/cluster.h"
#include "tests/support/numbered_prompts.h"
#include "tests/support/objects.h"
#include "tests/support/rows.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "kvserver/base/thread.h"
#include "kvserver/store/control/manifest.h"
#include "kvserver/store/node_private.h"
#include "proto/manifest.pb-c.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_THREADS = 2,
    MEMORY_BYTES = 64 << 20,
    N_LAYERS = 2,
    N_HEADS = 4,
    DIM = 64,
    BLOCKS = 6,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
    N_UNITS = N_LAYERS * N_HEADS,
    BLOCK_BYTES = N_UNITS * (4 * DIM + 4) * KV_BLOCK_TOKENS,
    PROMPT_BYTES = BLOCKS * BLOCK_BYTES,
    BUFFER_BYTES = 2 << 20,
    FEW = 5,
    SETTLE_US = 20 * 1000 * 1000,
    SOME = 20,
    DAMAGED_ROUNDS = 40,
    /* Twice, and three times, the memory. */
    N_OPEN = (int)(2 * (int64_t)MEMORY_BYTES / PROMPT_BYTES),
    MANY = (int)(3 * (int64_t)MEMORY_BYTES / PROMPT_BYTES),
};

static struct cluster cluster;
static struct kv_client *client;
static struct kv_buffer *buffer;
static struct kv_model_info model;

/* ---- a reader of events ------------------------------------------------------------------- */

/* What a reader of a node's events knows: each block is in one medium. */
static struct reader {
    struct known {
        struct kv_id128 name;
        enum kvs_medium medium;
    } blocks[2 * MANY * BLOCKS];
    uint32_t n;
} readers[CLUSTER_NODES_MAX];

static struct known *
find(struct reader *reader, const struct kv_id128 *name, const enum kvs_medium *medium)
{
    for (uint32_t i = 0; i < reader->n; i++)
        if (memcmp(&reader->blocks[i].name, name, sizeof(*name)) == 0 &&
            (medium == NULL || reader->blocks[i].medium == *medium))
            return &reader->blocks[i];
    return NULL;
}

static void on_stored(void *arg, const struct kvs_blocks_stored *event)
{
    struct reader *reader = arg;

    assert_int_equal(event->n, 1);
    assert_null(find(reader, event->names, &event->medium));
    /* Parents are told before their children. */
    assert_true(event->parent == NULL || find(reader, event->parent, NULL) != NULL);
    reader->blocks[reader->n++] = (struct known){*event->names, event->medium};
}

static void on_removed(void *arg, const struct kvs_blocks_removed *event)
{
    struct reader *reader = arg;
    struct known *known = find(reader, event->names, &event->medium);

    assert_int_equal(event->n, 1);
    assert_non_null(known);
    *known = reader->blocks[--reader->n];
}

static void on_cleared(void *arg)
{
    (void)arg;
    fail_msg("all cleared");
}

/* Whether the block has no rows in memory. */
static bool has_left(const struct kvs_prefix *prefix)
{
    for (uint32_t thread = 0; thread < cluster.setup.n_threads; thread++) {
        struct kvs_block *const *block =
            kvs_prefix_block((struct kvs_prefix *)prefix, thread, cluster.setup.n_threads);

        if (block != NULL && *block != NULL && (*block)->residency != KVS_ABSENT)
            return false;
    }
    return true;
}

/* What counts as away and has rows in memory nevertheless. */
static uint32_t count_leaving(const struct kvs_node *node)
{
    const struct kvs_prefix *prefix;
    size_t cursor = 0;
    uint32_t n = 0;

    while ((prefix = kvs_prefixes_next(node->control.prefixes, &cursor)) != NULL)
        n += prefix->is_away && !has_left(prefix);
    return n;
}

/* The node ends what it has begun: loads that nobody waits for any more take the disk's time, and
 * others leave for them.  What has not left by then would never leave again. */
static void settle(struct kvs_node *node)
{
    const uint64_t end_us = kv_clock_now(&kv_clock_real) + SETTLE_US;

    for (int step = 0; step < 2000 || count_leaving(node) > 0; step++) {
        kvs_node_control_step(node);
        for (uint32_t thread = 0; thread < cluster.setup.n_threads; thread++)
            kvs_node_data_step(node, thread);
        if (step >= 2000 && kv_clock_now(&kv_clock_real) > end_us)
            fail_msg("%u blocks that are away have rows in memory", count_leaving(node));
    }
}

/* A reader of all events knows what the node has, and where.  Nobody uses the node any more. */
static void check_reader(uint32_t i)
{
    struct kvs_node *node = cluster.nodes[i];
    const struct kvs_prefix *prefix;
    size_t cursor = 0;
    uint32_t n = 0;

    kvs_node_stop(node);
    settle(node);
    while ((prefix = kvs_prefixes_next(node->control.prefixes, &cursor)) != NULL) {
        const struct known *known = find(&readers[i], &prefix->name, NULL);

        assert_non_null(known);
        assert_int_equal(known->medium, prefix->is_away ? KVS_MEDIUM_DISK : KVS_MEDIUM_CPU);
        n++;
    }
    assert_int_equal(n, readers[i].n);
    readers[i].n = 0;
}

/* ---- the store ---------------------------------------------------------------------------- */

static void connect_client(void)
{
    client = cluster_connect(&cluster, NULL);
    assert_int_equal(kv_buffer_alloc(client, BUFFER_BYTES, &buffer), KV_OK);
}

static uint64_t scrub_disk_bytes; /* of the next stores */

static void open_store(uint32_t n_nodes, uint64_t disk_bytes)
{
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS};
    static struct kvs_event_sink sinks[CLUSTER_NODES_MAX];
    const struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = n_nodes,
        .n_threads = N_THREADS,
        .memory_bytes = MEMORY_BYTES,
        .disk_bytes = disk_bytes,
        .scrub_disk_bytes = scrub_disk_bytes,
        .events = sinks,
    };

    for (uint32_t i = 0; i < n_nodes; i++)
        sinks[i] = (struct kvs_event_sink){on_stored, on_removed, on_cleared, &readers[i]};
    assert_true(cluster_open(&cluster, &setup));
    test_model(&model, "model", N_LAYERS, heads, DIM, DIM);
    connect_client();
}

static void close_store(void)
{
    kv_client_close(client);
    for (uint32_t i = 0; i < cluster.n_nodes; i++)
        check_reader(i);
    cluster_close(&cluster);
}

/* Ends a node that the client does not need any more. */
static void end_node(uint32_t i)
{
    check_reader(i);
    cluster_end(&cluster, i);
}

/* A number of a table, over all nodes: of lines that begin so, or, with NULL, of all. */
static double table_number(const char *name, const char *line, uint32_t column)
{
    double total = 0;

    for (uint32_t node = 0; node < cluster.n_nodes; node++) {
        const struct kv_table *table;
        struct kv_op *op;

        assert_int_equal(kv_table_begin(client, node, name, 0, &op), KV_OK);
        assert_int_equal(kv_wait(op), KV_OK);
        table = kv_op_table(op);
        for (uint32_t i = 0; i < table->n_rows; i++)
            if (line == NULL || strcmp(table->cells[i * table->n_columns].text, line) == 0)
                total += table->cells[i * table->n_columns + column].number;
        kv_op_free(op);
    }
    return total;
}

static double tier_number(const char *tier, uint32_t column)
{
    return table_number("tiers", tier, column);
}

enum {
    COLUMN_MATCHED = 2, /* of the table of reuse */
    COLUMN_MATCHED_ON_DISK = 6,
    COLUMN_BLOCKS = 1,
    COLUMN_OBJECTS = 2,
    COLUMN_BYTES = 3,
    COLUMN_WAITING = 5,
    COLUMN_LOADS = 6,
    COLUMN_BAD = 8,
};

/* The nodes end, and others begin with what they had saved. */
static void restart(uint32_t n_threads)
{
    kv_client_close(client);
    for (uint32_t i = 0; i < cluster.n_nodes; i++)
        end_node(i);
    cluster.setup.n_threads = n_threads;
    for (uint32_t i = 0; i < cluster.n_nodes; i++)
        cluster_start(&cluster, i);
    connect_client();
    /* A match does not wait for connections. */
    (void)tier_number("disk", COLUMN_BLOCKS);
}

/* So many blocks, on all nodes, are saved. */
static void wait_saved(double n)
{
    for (int i = 0; tier_number("disk", COLUMN_BLOCKS) != n; i++) {
        if (i == 60000)
            fail_msg("%.0f blocks are saved, not %.0f; %.0f wait",
                     tier_number("disk", COLUMN_BLOCKS), n,
                     tier_number("disk", COLUMN_WAITING));
        kv_client_wait(client, 1000);
        kv_sleep_fds(NULL, 0, 1000);
    }
}

/* ---- operations --------------------------------------------------------------------------- */

static struct test_prompts prompts(void)
{
    return (struct test_prompts){.client = client, .model = &model, .n_blocks = BLOCKS};
}

static const struct kv_id128 *names_of(uint32_t prompt)
{
    const struct test_prompts all = prompts();

    return test_prompt_names(&all, prompt);
}

static struct kv_session *open_blocks(uint32_t prompt, uint32_t n_blocks, uint32_t *ret_tokens)
{
    const struct test_prompts all = prompts();

    return test_prompt_open(&all, prompt, n_blocks, ret_tokens);
}

static struct kv_session *open_prompt(uint32_t prompt, uint32_t *ret_tokens)
{
    return open_blocks(prompt, BLOCKS, ret_tokens);
}

static void put(uint32_t prompt, struct kv_session *session, uint32_t begin)
{
    const struct kv_rows rows = {
        .n_layers = N_LAYERS, .token_begin = begin, .n_tokens = TOKENS - begin};
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    test_box(kv_buffer_data(buffer), &model.schema, &rows, prompt);
    /* On a slow machine room may take longer to be made than a node has its clients wait. */
    for (int i = 0;; i++) {
        assert_int_equal(kv_put_begin(session, &rows, &io, 0, &op), KV_OK);
        if (kv_wait(op) != KV_NO_MEMORY || i == 50)
            break;
        kv_op_free(op);
        kv_sleep_fds(NULL, 0, 100000);
    }
    test_finish(op, "put");
}

static kv_status_t read_rows(uint32_t prompt, struct kv_session *session)
{
    const struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = TOKENS};
    const struct kv_rows_io io = {.buffer = buffer};
    kv_status_t status;
    struct kv_op *op;

    memset(kv_buffer_data(buffer), 0, BUFFER_BYTES);
    assert_int_equal(kv_read_begin(session, &rows, &io, 0, &op), KV_OK);
    status = kv_wait(op);
    kv_op_free(op);
    if (status == KV_OK)
        assert_true(test_is_box(kv_buffer_data(buffer), &model.schema, &rows, prompt));
    return status;
}

static void publish(uint32_t prompt, struct kv_session *session)
{
    const struct test_prompts all = prompts();

    test_prompt_publish(&all, prompt, session);
}

static uint32_t match(uint32_t prompt, uint32_t *ret_in_memory)
{
    const struct kv_match *matches;
    uint32_t tokens, n;
    struct kv_op *op;

    assert_int_equal(kv_match_begin(client, names_of(prompt), BLOCKS, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("match: %s", kv_op_detail(op));
    tokens = kv_op_tokens(op);
    matches = kv_op_matches(op, &n);
    *ret_in_memory = UINT32_MAX;
    for (uint32_t i = 0; i < n; i++)
        if (matches[i].tokens_in_memory < *ret_in_memory)
            *ret_in_memory = matches[i].tokens_in_memory;
    kv_op_free(op);
    return tokens;
}

/* A session with the prompt, of which the store is to have `expected` tokens: reads all; what is not
 * there is put and published. */
static void use_prompt(uint32_t prompt, uint32_t expected)
{
    uint32_t tokens;
    struct kv_session *session = open_prompt(prompt, &tokens);

    assert_int_equal(tokens, expected);
    if (tokens < TOKENS)
        put(prompt, session, tokens);
    assert_int_equal(read_rows(prompt, session), KV_OK);
    if (tokens < TOKENS)
        publish(prompt, session);
    test_session_close(session);
}

/* Opens sessions with the first prompts, which are put and published. */
static void open_many(struct kv_session **ret_sessions, uint32_t n)
{
    uint32_t tokens;

    for (uint32_t i = 0; i < n; i++) {
        ret_sessions[i] = open_prompt(i, &tokens);
        assert_int_equal(tokens, 0);
        put(i, ret_sessions[i], 0);
        publish(i, ret_sessions[i]);
    }
}

/* ---- verification ------------------------------------------------------------------------- */

static struct kv_verification ask(uint32_t node, uint64_t since_us)
{
    return test_verify_ask(client, node, since_us);
}

static struct kv_verification verify(uint32_t node)
{
    return test_verify(client, node);
}

/* All that is saved is verified, and right. */
static void nothing_is_bad(uint32_t node, uint64_t n_blocks)
{
    const struct kv_verification found = verify(node);

    assert_int_equal(found.disk.blocks, n_blocks);
    assert_int_equal(found.disk.bytes, found.disk.all_bytes);
    assert_int_equal(found.disk.bad, 0);
    assert_int_equal(found.disk.mended, 0);
    assert_int_equal(found.disk.lost, 0);
    assert_int_equal(found.disk.unread, 0);
    assert_int_equal(found.memory.bad, 0);
    assert_int_equal(found.memory.refused, 0);
}

/* ---- saving on request -------------------------------------------------------------------- */

/* Saves what the session shares.  *ret_detail is valid until the next one. */
static kv_status_t
try_save(struct kv_session *session, uint32_t *ret_tokens, const char **ret_detail)
{
    static char detail[512];
    kv_status_t status;
    struct kv_op *op;

    assert_int_equal(kv_save_begin(session, 0, &op), KV_OK);
    status = kv_wait(op);
    *ret_tokens = kv_op_tokens(op);
    snprintf(detail, sizeof(detail), "%s", kv_op_detail(op));
    *ret_detail = detail;
    kv_op_free(op);
    return status;
}

/* Saves what the session shares, which is so much.  Returns the microseconds that it took. */
static uint64_t save(struct kv_session *session, uint32_t expected)
{
    const uint64_t begun_us = kv_clock_now(&kv_clock_real);
    const char *detail;
    uint32_t tokens;

    if (try_save(session, &tokens, &detail) != KV_OK)
        fail_msg("%s", detail);
    assert_int_equal(tokens, expected);
    return kv_clock_now(&kv_clock_real) - begun_us;
}

/* The save fails like that, and says so. */
static void save_fails(struct kv_session *session, kv_status_t expected, const char *words)
{
    const char *detail;
    uint32_t tokens;

    if (try_save(session, &tokens, &detail) != expected || strstr(detail, words) == NULL)
        fail_msg("save: not %s, '%s': %s", kv_status_name(expected), words, detail);
    assert_int_equal(tokens, 0);
}

/* The nodes die at once, without time for what they have not done, and others begin with what is on
 * disk. */
static void kill_all(void)
{
    kv_client_close(client);
    for (uint32_t i = 0; i < cluster.n_nodes; i++) {
        cluster_end(&cluster, i);
        readers[i].n = 0;
    }
    for (uint32_t i = 0; i < cluster.n_nodes; i++)
        cluster_start(&cluster, i);
    connect_client();
    (void)tier_number("disk", COLUMN_BLOCKS); /* a match does not wait for connections */
}

/* A disk that fails when it is told. */
static struct kv_disk_ops failing_ops;
static const struct kv_disk_ops *well;
static _Atomic bool fails_rows, fails_erasures, fails_records, fails_reads;

static kv_status_t write_or_fail(struct kv_disk_queue *queue,
                                 enum kv_disk_space space,
                                 const struct kv_disk_write *writes,
                                 unsigned n,
                                 kv_disk_done_fn done,
                                 void *arg)
{
    /* Rows may be erased all the same, or not. */
    const bool fails = space == KV_DISK_RECORDS  ? atomic_load(&fails_records)
                       : writes[0].value == NULL ? atomic_load(&fails_erasures)
                                                 : atomic_load(&fails_rows);

    return fails ? KV_IO : well->write(queue, space, writes, n, done, arg);
}

struct failed_read {
    kv_disk_done_fn done;
    void *arg;
};

static void read_has_failed(void *arg, kv_status_t status, size_t bytes)
{
    struct failed_read read = *(struct failed_read *)arg;

    free(arg);
    (void)status;
    (void)bytes;
    read.done(read.arg, KV_IO, 0);
}

static kv_status_t read_or_fail(struct kv_disk_queue *queue,
                                enum kv_disk_space space,
                                const void *key,
                                size_t key_bytes,
                                void *value,
                                size_t room,
                                kv_disk_done_fn done,
                                void *arg)
{
    struct failed_read *read;
    kv_status_t status;

    if (space == KV_DISK_RECORDS || !atomic_load(&fails_reads))
        return well->read(queue, space, key, key_bytes, value, room, done, arg);
    read = malloc(sizeof(*read));
    assert_non_null(read);
    *read = (struct failed_read){done, arg};
    status = well->read(queue, space, key, key_bytes, value, room, read_has_failed, read);
    if (status != KV_OK)
        free(read);
    return status;
}

static void open_store_that_fails(void)
{
    open_store(1, UINT64_MAX);
    kv_client_close(client);
    end_node(0);
    well = cluster.disks[0]->ops;
    failing_ops = *well;
    failing_ops.write = write_or_fail;
    failing_ops.read = read_or_fail;
    cluster.disks[0]->ops = &failing_ops;
    cluster_start(&cluster, 0);
    connect_client();
}

/* ---- what is on the disk of a node -------------------------------------------------------- */

static void
count_one(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    (void)key;
    (void)key_bytes;
    (void)value;
    (void)value_bytes;
    ++*(uint32_t *)arg;
}

static uint32_t count_keys(uint32_t node, enum kv_disk_space space, const char *prefix)
{
    uint32_t n = 0;

    assert_int_equal(
        kv_disk_scan(cluster.disks[node], space, prefix, strlen(prefix), count_one, &n), KV_OK);
    return n;
}

struct damage {
    uint32_t at, every; /* flips a bit of each so many values */
};

/* The disk in memory lends its values: damage is done in place. */
static void
flip_some(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct damage *damage = arg;

    (void)key;
    (void)key_bytes;
    if (damage->at++ % damage->every == 0)
        ((uint8_t *)value)[damage->at * 977 % value_bytes] ^= 4;
}

/* Flips bits of what is saved while the node stands still. */
static void damage_disk(uint32_t node, uint32_t every)
{
    struct damage damage = {.every = every};

    kvs_node_stop(cluster.nodes[node]);
    assert_int_equal(kv_disk_scan(cluster.disks[node], KV_DISK_ROWS, "", 0, flip_some, &damage),
                     KV_OK);
    assert_int_equal(kvs_node_start(cluster.nodes[node], true), KV_OK);
}

/* The disk has so many blocks of a node, and nothing besides. */
static void wait_erased(uint32_t n_blocks)
{
    wait_saved(n_blocks);
    for (int i = 0; tier_number("disk", COLUMN_BYTES) > (double)n_blocks * BLOCK_BYTES; i++) {
        assert_true(i < 60000);
        kv_sleep_fds(NULL, 0, 1000);
    }
    kvs_node_stop(cluster.nodes[0]);
    assert_int_equal(count_keys(0, KV_DISK_ROWS, ""), n_blocks * N_UNITS);
    assert_int_equal(count_keys(0, KV_DISK_RECORDS, "prefix/"), n_blocks);
    assert_int_equal(kvs_node_start(cluster.nodes[0], true), KV_OK);
}

struct swapped {
    uint8_t *first;
    size_t bytes;
    bool is_done;
};

/* Exchanges the first two values. */
static void
swap_two(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct swapped *swapped = arg;
    uint8_t *other = (uint8_t *)value;

    (void)key;
    (void)key_bytes;
    if (swapped->is_done)
        return;
    if (swapped->first == NULL) {
        swapped->first = other;
        swapped->bytes = value_bytes;
        return;
    }
    assert_int_equal(value_bytes, swapped->bytes);
    for (size_t i = 0; i < value_bytes; i++) {
        const uint8_t byte = other[i];

        other[i] = swapped->first[i];
        swapped->first[i] = byte;
    }
    swapped->is_done = true;
}

/* ---- tests -------------------------------------------------------------------------------- */

/* What was saved is there after a restart: found at once, and read back when a session is opened. */
static void a_restart_loses_nothing(void **state)
{
    uint32_t in_memory;

    (void)state;
    open_store(2, UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(2 * FEW * BLOCKS);
    for (int round = 0; round < 2; round++) {
        restart(N_THREADS);
        for (uint32_t i = 0; i < FEW; i++) {
            assert_int_equal(match(i, &in_memory), TOKENS);
            assert_int_equal(in_memory, 0);
            use_prompt(i, TOKENS);
            assert_int_equal(match(i, &in_memory), TOKENS);
            assert_int_equal(in_memory, TOKENS);
            use_prompt(i, TOKENS);
        }
        assert_true(table_number("reuse", NULL, COLUMN_MATCHED) == 2 * 2 * FEW * TOKENS);
        assert_true(table_number("reuse", NULL, COLUMN_MATCHED_ON_DISK) == 2 * FEW * TOKENS);
        assert_true(tier_number("disk", COLUMN_LOADS) >= 2 * FEW * BLOCKS);
        assert_true(tier_number("disk", COLUMN_BAD) == 0);
    }
    close_store();
}

/* The rows of a unit are found by its number, whichever thread it is on. */
static void threads_may_be_others(void **state)
{
    (void)state;
    open_store(2, UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(2 * FEW * BLOCKS);
    restart(1);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, TOKENS);
    use_prompt(FEW, 0);
    wait_saved(2 * (FEW + 1) * BLOCKS);
    restart(2);
    for (uint32_t i = 0; i <= FEW; i++)
        use_prompt(i, TOKENS);
    close_store();
}

/* Three times the memory: all of it is there all the time, in whatever order it is asked for. */
static void more_than_memory(void **state)
{
    uint32_t n_whole = 0, in_memory;

    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < MANY; i++) {
        use_prompt(i, 0);
        /* So many fit the memory beside what is saved. */
        if (i % FEW == 0)
            wait_saved((i + 1) * BLOCKS);
    }
    wait_saved(MANY * BLOCKS);
    for (uint32_t i = 0; i < MANY; i++)
        use_prompt(i, TOKENS);
    for (uint32_t i = MANY; i-- > 0;)
        use_prompt(i * 7 % MANY, TOKENS);
    for (uint32_t i = 0; i < MANY; i++) {
        assert_int_equal(match(i, &in_memory), TOKENS);
        n_whole += in_memory == TOKENS;
    }
    print_message("%u of %d prompts are in memory; %.0f blocks were read back\n", n_whole, MANY,
                  tier_number("disk", COLUMN_LOADS));
    assert_in_range(n_whole, 1, MEMORY_BYTES / PROMPT_BYTES);
    close_store();
}

/* Tokens of open sessions that are on disk only. */
static double tokens_away(void)
{
    const struct kv_table *table;
    struct kv_op *op;
    double total = 0;

    assert_int_equal(kv_table_begin(client, 0, "sessions", 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    table = kv_op_table(op);
    assert_string_equal(table->columns[table->n_columns - 1], "away_tokens");
    for (uint32_t i = 0; i < table->n_rows; i++)
        total += table->cells[(i + 1) * table->n_columns - 1].number;
    kv_op_free(op);
    return total;
}

/* Sessions that stay open, of twice the memory together: those that nobody uses leave it, and are
 * read again as if they had not. */
static void idle_sessions_leave_memory(void **state)
{
    struct kv_session *sessions[N_OPEN];
    uint32_t tokens;

    (void)state;
    open_store(1, UINT64_MAX);
    open_many(sessions, N_OPEN);
    wait_saved(N_OPEN * BLOCKS);
    print_message("%.0f of %d tokens are away\n", tokens_away(), N_OPEN * TOKENS);
    assert_true(tokens_away() >=
                (N_OPEN * PROMPT_BYTES - MEMORY_BYTES) / PROMPT_BYTES * TOKENS);
    for (uint32_t i = 0; i < 2 * N_OPEN; i++)
        assert_int_equal(read_rows(i * 7 % N_OPEN, sessions[i * 7 % N_OPEN]), KV_OK);
    for (uint32_t i = 0; i < N_OPEN; i += 3) {
        struct kv_session *session = open_prompt(i, &tokens);

        assert_int_equal(tokens, TOKENS);
        assert_int_equal(read_rows(i, session), KV_OK);
        test_session_close(session);
    }
    assert_true(tier_number("disk", COLUMN_BAD) == 0);
    for (uint32_t i = 0; i < N_OPEN; i++) {
        if (i % 2 == 0)
            assert_int_equal(read_rows(i, sessions[i]), KV_OK);
        test_session_close(sessions[i]);
    }
    close_store();
}

/* ---- one session of more than the memory -------------------------------------------------- */

enum {
    LARGE_PIECES = (int)(MEMORY_BYTES / PROMPT_BYTES) + FEW, /* of BLOCKS blocks each */
    LARGE_BLOCKS = LARGE_PIECES * BLOCKS,
};

static kv_status_t
piece(struct kv_session *session, uint32_t i, bool is_put, uint32_t deadline_ms)
{
    const struct kv_rows rows = {
        .n_layers = N_LAYERS, .token_begin = i * TOKENS, .n_tokens = TOKENS};
    const struct kv_rows_io io = {.buffer = buffer};
    kv_status_t status;
    struct kv_op *op;

    if (is_put) {
        test_box(kv_buffer_data(buffer), &model.schema, &rows, i);
        assert_int_equal(kv_put_begin(session, &rows, &io, deadline_ms, &op), KV_OK);
    } else {
        memset(kv_buffer_data(buffer), 0, BUFFER_BYTES);
        assert_int_equal(kv_read_begin(session, &rows, &io, deadline_ms, &op), KV_OK);
    }
    status = kv_wait(op);
    kv_op_free(op);
    if (!is_put && status == KV_OK)
        assert_true(test_is_box(kv_buffer_data(buffer), &model.schema, &rows, i));
    return status;
}

/* The blocks' names of a prompt of LARGE_PIECES pieces. */
static const struct kv_id128 *name_large(void)
{
    static uint32_t tokens[LARGE_PIECES * TOKENS];
    static struct kv_id128 names[LARGE_BLOCKS];

    for (uint32_t i = 0; i < LARGE_PIECES * TOKENS; i++)
        tokens[i] = i + 1000000;
    kv_prompt_names(client, &model, tokens, LARGE_PIECES * TOKENS, NULL, 0, names);
    return names;
}

static struct kv_session *open_large(const struct kv_id128 *names, uint32_t *ret_tokens)
{
    const struct kv_session_options options = {.block_names = names,
                                               .n_block_names = LARGE_BLOCKS};
    struct kv_session *session;
    struct kv_op *op;

    assert_int_equal(kv_open_begin(client, &model, &options, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    *ret_tokens = kv_op_tokens(op);
    session = kv_op_session(op);
    kv_op_free(op);
    return session;
}

static void put_piece(struct kv_session *session, uint32_t i)
{
    assert_int_equal(piece(session, i, true, 0), KV_OK);
}

/* Puts and publishes its pieces from one on. */
static void put_large(struct kv_session *session,
                      const struct kv_id128 *names,
                      uint32_t i,
                      void (*put_one)(struct kv_session *session, uint32_t i))
{
    struct kv_op *op;

    for (; i < LARGE_PIECES; i++) {
        const struct kv_publish blocks = {
            .first_block = i * BLOCKS, .n_names = BLOCKS, .names = &names[i * BLOCKS]};

        put_one(session, i);
        assert_int_equal(kv_publish_begin(session, &blocks, 0, &op), KV_OK);
        test_finish(op, "publish");
    }
}

/* A session whose rows are more than memory is put, read and forked as any other: what a request
 * needs is in memory, and other rows of the session make room.  So it is over restarts. */
static void a_session_of_more_than_memory(void **state)
{
    struct kv_session *session, *other, *child;
    const struct kv_id128 *names;
    uint32_t n_tokens;
    struct kv_op *op;

    (void)state;
    open_store(1, UINT64_MAX);
    names = name_large();
    session = open_large(names, &n_tokens);
    put_large(session, names, 0, put_piece);
    wait_saved(LARGE_BLOCKS);
    for (int round = 0; round < 4; round++) {
        if (round >= 2) {
            kv_session_free(session);
            restart((uint32_t)round - 1);
            session = open_large(names, &n_tokens);
            assert_int_equal(n_tokens, LARGE_PIECES * TOKENS);
        }
        for (uint32_t i = 0; i < LARGE_PIECES; i++)
            assert_int_equal(piece(session, i, false, 0), KV_OK);
        other = open_prompt((uint32_t)round, &n_tokens);
        put((uint32_t)round, other, 0);
        assert_int_equal(read_rows((uint32_t)round, other), KV_OK);
        test_session_close(other);
        assert_int_equal(kv_fork_begin(session, LARGE_PIECES * TOKENS - 70, 0, &op), KV_OK);
        assert_int_equal(kv_wait(op), KV_OK);
        child = kv_op_session(op);
        kv_op_free(op);
        for (uint32_t i = 0; i + 1 < LARGE_PIECES; i += 7) {
            assert_int_equal(piece(session, i, false, 0), KV_OK);
            assert_int_equal(piece(child, LARGE_PIECES - 2 - i, false, 0), KV_OK);
        }
        test_session_close(child);
    }
    assert_true(cluster_total(client, "stats", "rows_let_go_bytes") > 0);
    assert_true(tier_number("disk", COLUMN_BAD) == 0);
    test_session_close(session);
    close_store();
}

/* An object that the disk does not take is no memory that will be free in a moment: a session of more rows
 * than memory is read all the same, and the object is saved once the disk takes it. */
static void objects_that_fail_hold_no_rows_up(void **state)
{
    struct kv_object object = {.name = "object", .buffer = NULL, .bytes = 1000};
    struct kv_session *session;
    const struct kv_id128 *names;
    uint32_t n_tokens;
    struct kv_op *op;

    (void)state;
    open_store_that_fails();
    names = name_large();
    session = open_large(names, &n_tokens);
    put_large(session, names, 0, put_piece);
    wait_saved(LARGE_BLOCKS);
    atomic_store(&fails_rows, true);
    atomic_store(&fails_records, true);
    object.buffer = buffer;
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_PUT, &object, 1, 0, &op), KV_OK);
    test_finish(op, "put");
    for (int i = 0; cluster_total(client, "stats", "disk_errors") == 0; i++) {
        assert_true(i < 10000);
        cluster_look(&cluster);
        kv_client_wait(client, 1000);
    }
    for (int round = 0; round < 2; round++)
        for (uint32_t i = 0; i < LARGE_PIECES; i++)
            assert_int_equal(piece(session, i, false, 0), KV_OK);
    atomic_store(&fails_rows, false);
    atomic_store(&fails_records, false);
    for (int i = 0; tier_number("disk", COLUMN_OBJECTS) != 1; i++) {
        assert_true(i < 10000);
        cluster_look(&cluster);
        kv_client_wait(client, 1000);
    }
    test_session_close(session);
    close_store();
}

/* Rows whose keys can be indexed. */
static void put_finite(struct kv_session *session, uint32_t i)
{
    const struct kv_rows rows = {
        .n_layers = N_LAYERS, .token_begin = i * TOKENS, .n_tokens = TOKENS};
    const struct kv_rows_io io = {.buffer = buffer};
    uint16_t *halves = kv_buffer_data(buffer);
    struct kv_random random;
    struct kv_op *op;

    kv_random_init(&random, 100 + i);
    for (uint32_t j = 0; j < N_UNITS * TOKENS * 2 * DIM; j++) /* below 2 */
        halves[j] =
            (uint16_t)(kv_random_below(&random, 0x4000) | kv_random_below(&random, 2) << 15);
    assert_int_equal(kv_put_begin(session, &rows, &io, 0, &op), KV_OK);
    test_finish(op, "put");
}

static void index_large(struct kv_session *session)
{
    const struct kv_index_options index = {.tokens = LARGE_PIECES * TOKENS,
                                           .n_layers = N_LAYERS,
                                           .chapter_blocks = 64,
                                           .m = 4,
                                           .bits = 4,
                                           .iterations = 2,
                                           .seed = 1,
                                           .wait = true};
    struct kv_op *op;

    assert_int_equal(kv_index_begin(session, &index, 600000, &op), KV_OK);
    test_finish(op, "index");
}

/* Asks for the best rows of a layer for one vector of each head. */
static void query_large(struct kv_session *session, uint32_t layer)
{
    const struct kv_range range = {0, LARGE_PIECES * TOKENS};
    float vectors[N_HEADS * DIM];
    struct kv_random random;

    kv_random_init(&random, layer);
    for (uint32_t i = 0; i < N_HEADS * DIM; i++)
        vectors[i] = (float)kv_random_below(&random, 2001) / 1000 - 1;
    const struct kv_query query = {.layer = layer,
                                   .n_kv_heads = N_HEADS,
                                   .n_queries = 1,
                                   .queries = vectors,
                                   .scale = 0.125f,
                                   .merge = KV_MERGE_SUM,
                                   .answer = KV_ANSWER_ATTEND,
                                   .k = 16,
                                   .rerank = 4,
                                   .n_ranges = 1,
                                   .ranges = &range};
    struct kv_op *op;

    assert_int_equal(kv_query_begin(session, &query, NULL, 0, &op), KV_OK);
    test_finish(op, "query");
}

/* Queries over a session of more than the memory, layer after layer, ask for the same rows again and
 * again: these stay, and others go. */
static void what_queries_touch_stays(void **state)
{
    enum {
        PASSES = 8,
        WARM = 4
    };
    struct kv_session *session;
    const struct kv_id128 *names;
    double read_bytes = 0;
    uint32_t n_tokens;

    (void)state;
    open_store(1, UINT64_MAX);
    names = name_large();
    session = open_large(names, &n_tokens);
    put_large(session, names, 0, put_finite);
    wait_saved(LARGE_BLOCKS);
    index_large(session);
    for (uint32_t pass = 0; pass < PASSES; pass++) {
        if (pass == WARM)
            read_bytes = cluster_total(client, "stats", "disk_read_bytes");
        for (uint32_t layer = 0; layer < N_LAYERS; layer++)
            query_large(session, layer);
    }
    read_bytes = cluster_total(client, "stats", "disk_read_bytes") - read_bytes;
    print_message("%.1f MB of %.1f were read in %d passes\n", read_bytes / 1e6,
                  LARGE_BLOCKS * (double)BLOCK_BYTES / 1e6, PASSES - WARM);
    assert_true(cluster_total(client, "stats", "rows_let_go_bytes") > 0);
    assert_true(read_bytes < LARGE_BLOCKS * (double)BLOCK_BYTES / 4);
    test_session_close(session);
    close_store();
}

/* Removes a prompt's last block from the nodes. */
static void evict_end(uint32_t prompt)
{
    const struct kv_prefix prefix = {.verb = KV_PREFIX_EVICT,
                                     .name = &names_of(prompt)[BLOCKS - 1]};
    struct kv_op *op;

    assert_int_equal(kv_prefix_begin(client, KV_NODES_ALL, &prefix, 0, &op), KV_OK);
    test_finish(op, "evict");
}

/* Sessions that rest, and whose last block is deleted, have the others as before: these leave memory,
 * come back, and leave again. */
static void what_is_deleted_rests(void **state)
{
    struct kv_session *sessions[N_OPEN];

    (void)state;
    open_store(1, UINT64_MAX);
    open_many(sessions, N_OPEN);
    wait_saved(N_OPEN * BLOCKS);
    for (uint32_t i = 0; i < N_OPEN; i++)
        evict_end(i);
    for (uint32_t i = 0; i < 3 * N_OPEN; i++)
        assert_int_equal(read_rows(i * 7 % N_OPEN, sessions[i * 7 % N_OPEN]), KV_OK);
    for (uint32_t i = 0; i < N_OPEN; i++) {
        if (i % 2 == 0)
            assert_int_equal(read_rows(i, sessions[i]), KV_OK);
        test_session_close(sessions[i]);
    }
    for (uint32_t i = 0; i < N_OPEN; i++)
        use_prompt(i, TOKENS - KV_BLOCK_TOKENS);
    close_store();
}

/* Who renews or ends a session needs nothing of it: what is away stays away, and readers of events are
 * told so. */
static void an_end_brings_nothing_back(void **state)
{
    struct kv_session *sessions[N_OPEN];
    uint32_t in_memory, n_away = 0;
    struct kv_op *op;

    (void)state;
    open_store(1, UINT64_MAX);
    open_many(sessions, N_OPEN);
    wait_saved(N_OPEN * BLOCKS);
    for (uint32_t i = 0; i < N_OPEN; i++) {
        assert_int_equal(match(i, &in_memory), TOKENS);
        if (in_memory > 0)
            continue;
        n_away++;
        assert_int_equal(kv_renew_begin(sessions[i], 0, 0, &op), KV_OK);
        test_finish(op, "renew");
        kv_sleep_fds(NULL, 0, 50000);
        (void)match(i, &in_memory);
        assert_int_equal(in_memory, 0);
        test_session_close(sessions[i]);
        sessions[i] = NULL;
        (void)match(i, &in_memory);
        assert_int_equal(in_memory, 0);
    }
    assert_true(n_away > 0 && n_away < N_OPEN);
    for (uint32_t i = 0; i < N_OPEN; i++)
        if (sessions[i] != NULL)
            test_session_close(sessions[i]);
    close_store();
}

/* A session ends, or is cut, while what was deleted of it comes back. */
static void an_end_amid_what_comes_back(void **state)
{
    const struct kv_id128 *names;
    struct kv_session *session;
    struct kv_op *op;

    (void)state;
    open_store(1, UINT64_MAX);
    names = name_large();
    for (int round = 0; round < 3; round++) {
        const struct kv_prefix prefix = {.verb = KV_PREFIX_EVICT, .name = &names[round]};
        uint32_t n;

        session = open_large(names, &n);
        put_large(session, names, n / TOKENS, put_piece);
        wait_saved(LARGE_BLOCKS);
        kv_session_free(session);
        restart(1 + round % 2);
        session = open_large(names, &n);
        assert_int_equal(kv_prefix_begin(client, KV_NODES_ALL, &prefix, 0, &op), KV_OK);
        test_finish(op, "evict");
        kv_sleep_fds(NULL, 0, round * 5000);
        if (round == 2) {
            assert_int_equal(kv_truncate_begin(session, 100, 0, &op), KV_OK);
            test_finish(op, "truncate");
        }
        test_session_close(session);
    }
    close_store();
}

/* Sessions that were opened with a beginning of their prompt, and publish a copy of the rest, whose
 * first copy is away: what they were opened with stays theirs, and leaves when they have ended. */
static void copies_of_what_is_away(void **state)
{
    struct kv_session *sessions[FEW];
    uint32_t tokens;

    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < MANY; i++) {
        use_prompt(i, 0);
        if (i % FEW == 0)
            wait_saved((i + 1) * BLOCKS);
    }
    wait_saved(MANY * BLOCKS);
    for (uint32_t i = 0; i < FEW; i++) {
        sessions[i] = open_blocks(i, BLOCKS / 2, &tokens);
        assert_int_equal(tokens, TOKENS / 2);
        put(i, sessions[i], tokens);
        publish(i, sessions[i]);
    }
    for (uint32_t i = FEW; i < MANY; i++)
        use_prompt(i, TOKENS);
    for (uint32_t i = 0; i < FEW; i++) {
        assert_int_equal(read_rows(i, sessions[i]), KV_OK);
        test_session_close(sessions[i]);
    }
    for (uint32_t i = FEW; i < 2 * FEW; i++)
        use_prompt(i, TOKENS);
    assert_true(tier_number("disk", COLUMN_BAD) == 0);
    close_store();
}

/* What is wrong on the disk is a miss: never a wrong row, and put again. */
static void damage_is_a_miss(void **state)
{
    uint32_t n_bad = 0, n_good = 0;

    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(FEW * BLOCKS);
    for (int kind = 0; kind < 2; kind++) {
        struct damage damage = {.every = FEW * BLOCKS * N_UNITS / 2};
        struct swapped swapped = {0};

        kv_client_close(client);
        end_node(0);
        assert_int_equal(
            kind == 0 ? kv_disk_scan(cluster.disks[0], KV_DISK_ROWS, "", 0, flip_some, &damage)
                      : kv_disk_scan(cluster.disks[0], KV_DISK_ROWS, "", 0, swap_two, &swapped),
            KV_OK);
        cluster_start(&cluster, 0);
        connect_client();
        for (uint32_t i = 0; i < FEW; i++) {
            uint32_t tokens;
            struct kv_session *session = open_prompt(i, &tokens);
            const kv_status_t status = read_rows(i, session);

            assert_int_equal(tokens, TOKENS);
            assert_true(status == KV_OK || status == KV_CORRUPT);
            n_bad += status == KV_CORRUPT;
            n_good += status == KV_OK;
            test_session_close(session);
            if (status == KV_OK)
                continue;
            /* The next one has what is before the damage, and brings the rest. */
            session = open_prompt(i, &tokens);
            assert_true(tokens < TOKENS);
            put(i, session, tokens);
            assert_int_equal(read_rows(i, session), KV_OK);
            publish(i, session);
            test_session_close(session);
        }
        assert_true(tier_number("disk", COLUMN_BAD) > 0);
        wait_saved(FEW * BLOCKS);
        restart(N_THREADS);
        for (uint32_t i = 0; i < FEW; i++)
            use_prompt(i, TOKENS);
    }
    assert_true(n_bad >= 2 && n_good >= 2);
    close_store();
}

/* What is deleted is gone from the disk, too, also if it was away. */
static void what_is_deleted_is_gone(void **state)
{
    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(FEW * BLOCKS);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < FEW; i++) {
            const struct kv_prefix prefix = {.verb = KV_PREFIX_EVICT, .name = names_of(i)};
            struct kv_op *op;

            assert_int_equal(kv_prefix_begin(client, KV_NODES_ALL, &prefix, 0, &op), KV_OK);
            test_finish(op, "evict");
        }
        wait_saved(0);
        for (int i = 0; tier_number("disk", COLUMN_BYTES) > 0; i++) {
            assert_true(i < 60000);
            kv_sleep_fds(NULL, 0, 1000);
        }
        kv_client_close(client);
        end_node(0);
        assert_int_equal(count_keys(0, KV_DISK_ROWS, ""), 0);
        assert_int_equal(count_keys(0, KV_DISK_RECORDS, "prefix/"), 0);
        cluster_start(&cluster, 0);
        connect_client();
        if (round > 0)
            break;
        for (uint32_t i = 0; i < FEW; i++)
            use_prompt(i, 0);
        wait_saved(FEW * BLOCKS);
        restart(N_THREADS);
    }
    close_store();
}

/* A node that drains erases before it ends. */
static void a_drain_erases(void **state)
{
    struct kvs_node *node;
    uint64_t until_us;

    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(FEW * BLOCKS);
    for (uint32_t i = 0; i < FEW; i++) {
        const struct kv_prefix prefix = {.verb = KV_PREFIX_EVICT, .name = names_of(i)};
        struct kv_op *op;

        assert_int_equal(kv_prefix_begin(client, KV_NODES_ALL, &prefix, 0, &op), KV_OK);
        test_finish(op, "evict");
    }
    kv_client_close(client);
    node = cluster.nodes[0];
    kvs_node_stop(node);
    kvs_node_drain(node);
    until_us = kv_clock_now(&kv_clock_real) + 60 * UINT64_C(1000000);
    while (!kvs_node_drained(node)) {
        assert_true(kv_clock_now(&kv_clock_real) < until_us);
        kvs_node_control_step(node);
        for (uint32_t thread = 0; thread < N_THREADS; thread++)
            kvs_node_data_step(node, thread);
    }
    assert_int_equal(count_keys(0, KV_DISK_ROWS, ""), 0);
    assert_int_equal(count_keys(0, KV_DISK_RECORDS, "prefix/"), 0);
    cluster_end(&cluster, 0);
    readers[0].n = 0;
    cluster_start(&cluster, 0);
    connect_client();
    close_store();
}

/* Where nothing is wrong nothing is found, wherever it is. */
static void verify_finds_nothing(void **state)
{
    uint32_t tokens, in_memory;
    struct kv_session *session;
    struct kv_op *op;

    (void)state;
    open_store(2, UINT64_MAX);
    nothing_is_bad(0, 0);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(2 * FEW * BLOCKS);
    for (int round = 0; round < 2; round++) {
        nothing_is_bad(0, FEW * BLOCKS);
        nothing_is_bad(1, FEW * BLOCKS);
        restart(N_THREADS);
        /* What is away stays there. */
        nothing_is_bad(0, FEW * BLOCKS);
        nothing_is_bad(1, FEW * BLOCKS);
        assert_int_equal(match(0, &in_memory), TOKENS);
        assert_int_equal(in_memory, 0);
        assert_true(tier_number("disk", COLUMN_LOADS) == 0);
        session = open_prompt(0, &tokens);
        assert_int_equal(read_rows(0, session), KV_OK);
        assert_in_range(verify(0).memory.blocks, BLOCKS, N_THREADS * BLOCKS);
        assert_int_equal(verify(0).memory.bytes + verify(1).memory.bytes, PROMPT_BYTES);
        test_session_close(session);
    }
    assert_true(tier_number("disk", COLUMN_BAD) == 0);
    assert_int_equal(kv_verify_begin(client, 0, UINT64_MAX, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_INVALID);
    kv_op_free(op);
    close_store();
}

/* What is bad on disk and in memory is written again, and is right after the node was killed. */
static void verify_mends_from_memory(void **state)
{
    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(FEW * BLOCKS);
    for (uint32_t every = 1; every <= 64; every *= 4) {
        const uint64_t n_segments = FEW * BLOCKS * N_UNITS;
        struct kv_verification found;

        damage_disk(0, every);
        found = verify(0);
        assert_in_range(found.disk.bad, n_segments / (every < N_UNITS ? N_UNITS : every),
                        FEW * BLOCKS);
        assert_int_equal(found.disk.mended, found.disk.bad);
        assert_int_equal(found.disk.lost, 0);
        assert_int_equal(found.disk.unread, 0);
        nothing_is_bad(0, FEW * BLOCKS);
    }
    assert_true(cluster_total(client, "stats", "bad_saved_blocks") ==
                cluster_total(client, "stats", "mended_saved_blocks"));
    assert_true(tier_number("disk", COLUMN_BAD) >= FEW * BLOCKS * N_UNITS);
    restart(1);
    nothing_is_bad(0, FEW * BLOCKS);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, TOKENS);
    close_store();
}

/* What cannot be read now is not bad: it is counted, and stays. */
static void verify_takes_no_error_for_damage(void **state)
{
    struct kv_verification found;

    (void)state;
    open_store_that_fails();
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(FEW * BLOCKS);
    for (int round = 0; round < 2; round++) {
        atomic_store(&fails_reads, true);
        found = verify(0);
        atomic_store(&fails_reads, false);
        assert_true(found.disk.unread > 0);
        assert_int_equal(found.disk.bad, 0);
        assert_int_equal(found.disk.mended, 0);
        assert_int_equal(found.disk.lost, 0);
        nothing_is_bad(0, FEW * BLOCKS);
        restart(N_THREADS);
    }
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, TOKENS);
    close_store();
}

/* What is bad on disk and away is a miss, with what is behind it, and is erased; readers are told. */
static void verify_forgets_what_is_away(void **state)
{
    uint32_t n_there = 0, in_memory;
    struct kv_verification found;

    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(FEW * BLOCKS);
    restart(N_THREADS);
    damage_disk(0, 3 * N_UNITS + 1);
    found = verify(0);
    assert_in_range(found.disk.bad, FEW, FEW * BLOCKS / 2);
    assert_int_equal(found.disk.mended, 0);
    assert_in_range(found.disk.lost, found.disk.bad, FEW * BLOCKS);
    for (uint32_t i = 0; i < FEW; i++)
        n_there += match(i, &in_memory) / KV_BLOCK_TOKENS;
    assert_int_equal(n_there, FEW * BLOCKS - found.disk.lost);
    assert_true(cluster_total(client, "stats", "prefixes_bad") == (double)found.disk.lost);
    wait_erased(n_there);
    nothing_is_bad(0, n_there);
    for (uint32_t i = 0; i < FEW; i++) {
        uint32_t tokens;
        struct kv_session *session = open_prompt(i, &tokens);

        if (tokens < TOKENS)
            put(i, session, tokens);
        assert_int_equal(read_rows(i, session), KV_OK);
        publish(i, session);
        test_session_close(session);
    }
    wait_saved(FEW * BLOCKS);
    restart(N_THREADS);
    nothing_is_bad(0, FEW * BLOCKS);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, TOKENS);
    close_store();
}

/* Sessions that have what is found bad keep what they have of it, and it is erased after them. */
static void verify_leaves_sessions_alone(void **state)
{
    struct kv_session *sessions[FEW];
    uint32_t tokens, in_memory, n_there = 0;
    uint64_t n_lost;

    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(FEW * BLOCKS);
    restart(N_THREADS);
    damage_disk(0, N_UNITS * BLOCKS);
    for (uint32_t i = 0; i < FEW; i++) {
        sessions[i] = open_prompt(i, &tokens);
        assert_int_equal(tokens, TOKENS);
    }
    /* Of each prompt one block is bad.  What is on its way meanwhile is for the second time. */
    n_lost = verify(0).disk.lost;
    for (uint32_t i = 0; i < FEW; i++)
        assert_int_equal(read_rows(i, sessions[i]), KV_CORRUPT);
    n_lost += verify(0).disk.lost;
    for (uint32_t i = 0; i < FEW; i++) {
        tokens = match(i, &in_memory);
        assert_true(tokens < TOKENS);
        n_there += tokens / KV_BLOCK_TOKENS;
        use_prompt(i, tokens);
    }
    assert_int_equal(n_lost, FEW * BLOCKS - n_there);
    for (uint32_t i = 0; i < FEW; i++)
        test_session_close(sessions[i]);
    wait_erased(FEW * BLOCKS);
    nothing_is_bad(0, FEW * BLOCKS);
    close_store();
}

/* Whoever begins to have all verified, and goes, leaves nothing behind; others go on beside it. */
static void verify_may_be_given_up(void **state)
{
    struct kv_verification first;

    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t i = 0; i < SOME; i++)
        use_prompt(i, 0);
    wait_saved(SOME * BLOCKS);
    for (int round = 0; round < 4; round++) {
        first = ask(0, 0);
        assert_false(first.is_done);
        if (round == 1)
            damage_disk(0, SOME * BLOCKS * N_UNITS / FEW);
        if (round < 2) {
            restart(N_THREADS);
            continue;
        }
        /* Two at once, and sessions beside them. */
        (void)ask(0, 0);
        for (uint32_t i = 0; i < SOME; i++) {
            uint32_t tokens;
            struct kv_session *session = open_prompt(i, &tokens);

            if (tokens < TOKENS)
                put(i, session, tokens);
            assert_true(read_rows(i, session) == KV_OK || tokens == TOKENS);
            test_session_close(session);
            (void)ask(0, first.since_us);
        }
    }
    (void)verify(0);
    nothing_is_bad(0, (uint64_t)tier_number("disk", COLUMN_BLOCKS));
    close_store();
}

/* The node verifies its disk by itself. */
static void the_background_verifies_the_disk(void **state)
{
    uint32_t n_there = 0, in_memory;

    (void)state;
    scrub_disk_bytes = 64 << 20;
    open_store(1, UINT64_MAX);
    scrub_disk_bytes = 0;
    for (uint32_t i = 0; i < FEW; i++)
        use_prompt(i, 0);
    wait_saved(FEW * BLOCKS);
    kv_client_close(client);
    end_node(0);
    assert_int_equal(kv_disk_scan(cluster.disks[0], KV_DISK_ROWS, "", 0, flip_some,
                                  &(struct damage){.every = FEW * BLOCKS * N_UNITS / 2}),
                     KV_OK);
    cluster_start(&cluster, 0);
    connect_client();
    assert_true(cluster_becomes(client, "stats", "disk_scrub_passes", 1));
    assert_true(cluster_total(client, "stats", "bad_saved_blocks") == 2);
    for (uint32_t i = 0; i < FEW; i++)
        n_there += match(i, &in_memory) / KV_BLOCK_TOKENS;
    assert_true(cluster_total(client, "stats", "lost_saved_blocks") ==
                (double)(FEW * BLOCKS - n_there));
    wait_erased(n_there);
    nothing_is_bad(0, n_there);
    close_store();
}

struct record_flip {
    uint32_t at, which;
};

static void
flip_record(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct record_flip *flip = arg;

    (void)key;
    (void)key_bytes;
    if (flip->at++ == flip->which && value_bytes > 0)
        ((uint8_t *)value)[flip->which * 31 % value_bytes] ^=
            (uint8_t)(1 << flip->which * 7 % 8);
}

/* Records that are damaged: what they say is not believed where it cannot be, and never a wrong row
 * comes of it. */
static void damaged_records_lie(void **state)
{
    uint32_t n_less = 0;

    (void)state;
    open_store(1, UINT64_MAX);
    for (uint32_t round = 0; round < DAMAGED_ROUNDS; round++) {
        struct record_flip flip = {.which = round * 5 % (FEW * BLOCKS)};

        for (uint32_t i = 0; i < FEW; i++) {
            uint32_t tokens;
            struct kv_session *session = open_prompt(i, &tokens);
            const kv_status_t status = tokens < TOKENS ? KV_CORRUPT : read_rows(i, session);

            n_less += round > 0 && tokens < TOKENS;
            if (tokens < TOKENS)
                put(i, session, tokens);
            /* A writer may be another now: then no row of the block is right. */
            assert_true(status == KV_OK || status == KV_CORRUPT);
            if (tokens < TOKENS && read_rows(i, session) == KV_OK)
                publish(i, session);
            test_session_close(session);
        }
        kv_client_close(client);
        end_node(0);
        assert_int_equal(
            kv_disk_scan(cluster.disks[0], KV_DISK_RECORDS, "prefix/", 7, flip_record, &flip),
            KV_OK);
        cluster_start(&cluster, 0);
        connect_client();
        (void)tier_number("disk", COLUMN_BLOCKS);
    }
    assert_true(n_less > 0);
    close_store();
}

/* With room for a part, that is what is there: the rest is forgotten, and told to be. */
static void a_full_disk_forgets(void **state)
{
    const uint64_t room = FEW * PROMPT_BYTES;
    uint32_t n_there = 0, in_memory;

    (void)state;
    open_store(1, room);
    for (uint32_t i = 0; i < MANY; i++)
        use_prompt(i, 0);
    assert_true(tier_number("disk", COLUMN_BYTES) <= (double)room);
    for (uint32_t i = 0; i < MANY; i++)
        n_there += match(i, &in_memory) == TOKENS;
    print_message("%u of %d prompts are there\n", n_there, MANY);
    assert_true(n_there >= 1 && n_there < MANY);
    restart(N_THREADS);
    assert_true(tier_number("disk", COLUMN_BYTES) <= (double)room);
    for (uint32_t i = 0; i < MANY; i++) {
        uint32_t tokens;
        struct kv_session *session = open_prompt(i, &tokens);

        if (tokens < TOKENS)
            put(i, session, tokens);
        assert_int_equal(read_rows(i, session), KV_OK);
        test_session_close(session);
    }
    close_store();
}

/* What a save says is saved outlasts a node that dies the moment after, and the save does not wait as
 * long as nodes do by themselves. */
static void save_is_for_sure(void **state)
{
    uint64_t us, least_us = UINT64_MAX;

    (void)state;
    for (uint32_t n_nodes = 1; n_nodes <= 2; n_nodes++) {
        open_store(n_nodes, UINT64_MAX);
        for (uint32_t i = 0; i < FEW; i++) {
            uint32_t tokens;
            struct kv_session *session = open_prompt(i, &tokens);

            assert_int_equal(tokens, 0);
            put(i, session, 0);
            save(session, 0);
            publish(i, session);
            us = save(session, TOKENS);
            least_us = us < least_us ? us : least_us;
            /* Another session has the same, and it is saved. */
            struct kv_session *other = open_prompt(i, &tokens);
            assert_int_equal(tokens, TOKENS);
            save(other, TOKENS);
            kv_session_free(session);
            kv_session_free(other);
            kill_all();
            for (uint32_t j = 0; j <= i; j++)
                use_prompt(j, TOKENS);
        }
        close_store();
    }
    print_message("at least %llu us\n", (unsigned long long)least_us);
    assert_true(least_us < 400000);
}

/* Many sessions at once, also forks, and some that are closed meanwhile. */
static void saves_go_on_side_by_side(void **state)
{
    struct kv_session *sessions[SOME], *child;
    struct kv_op *ops[SOME], *op;

    (void)state;
    open_store(2, UINT64_MAX);
    for (uint32_t i = 0; i < SOME; i++) {
        uint32_t tokens;

        sessions[i] = open_prompt(i, &tokens);
        put(i, sessions[i], 0);
        publish(i, sessions[i]);
        assert_int_equal(kv_save_begin(sessions[i], 0, &ops[i]), KV_OK);
        if (i % 3 == 0) {
            kv_cancel(ops[i]);
            test_session_close(sessions[i]);
        }
    }
    for (uint32_t i = 0; i < SOME; i++) {
        if (i % 3 == 0) {
            kv_op_free(ops[i]);
            continue;
        }
        if (kv_wait(ops[i]) != KV_OK)
            fail_msg("save: %s", kv_op_detail(ops[i]));
        assert_int_equal(kv_op_tokens(ops[i]), TOKENS);
        kv_op_free(ops[i]);
    }
    assert_int_equal(kv_fork_begin(sessions[1], TOKENS / 2, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    child = kv_op_session(op);
    kv_op_free(op);
    save(child, TOKENS / 2);
    test_session_close(child);
    assert_int_equal(kv_truncate_begin(sessions[1], KV_BLOCK_TOKENS + 1, 0, &op), KV_OK);
    test_finish(op, "truncate");
    save(sessions[1], KV_BLOCK_TOKENS);
    for (uint32_t i = 0; i < SOME; i++)
        if (i % 3 != 0)
            kv_session_free(sessions[i]);
    kill_all();
    for (uint32_t i = 0; i < SOME; i++)
        if (i % 3 != 0)
            use_prompt(i, TOKENS);
    close_store();
}

/* A save has as much as there is room for, says so, and loses nothing of the rest. */
static void save_on_a_full_disk(void **state)
{
    const uint64_t room = 3 * (uint64_t)BLOCK_BYTES + BLOCK_BYTES / 2;
    struct kv_session *session;
    uint32_t tokens, in_memory;

    (void)state;
    open_store(1, room);
    session = open_prompt(0, &tokens);
    put(0, session, 0);
    publish(0, session);
    for (int i = 0; i < 2; i++)
        save_fails(session, KV_NO_MEMORY,
                   "384 of 768 tokens are saved: there is no room on disk (--disk)");
    assert_int_equal(read_rows(0, session), KV_OK);
    assert_int_equal(match(0, &in_memory), TOKENS);
    kv_session_free(session);
    kill_all();
    use_prompt(0, TOKENS / 2);
    close_store();
}

/* Nothing waits to be saved any more: for longer than it takes until it is tried again. */
static void wait_given_up(void)
{
    const uint64_t begun_us = kv_clock_now(&kv_clock_real);
    uint64_t since_us = begun_us, now_us = begun_us;

    while (now_us < since_us + 2000000) {
        if (tier_number("disk", COLUMN_WAITING) > 0)
            since_us = now_us;
        assert_true(now_us < begun_us + 60000000);
        kv_sleep_fds(NULL, 0, 10000);
        now_us = kv_clock_now(&kv_clock_real);
    }
}

/* A save that the disk fails ends soon, and another one has it tried again, also what was given up. */
static void save_on_a_disk_that_fails(void **state)
{
    struct kv_session *session;
    uint32_t tokens;

    (void)state;
    open_store_that_fails();
    session = open_prompt(0, &tokens);
    put(0, session, 0);
    publish(0, session);
    atomic_store(&fails_records, true);
    for (int i = 0; i < 2; i++)
        save_fails(session, KV_IO, "0 of 768 tokens are saved: the disk cannot be written");
    atomic_store(&fails_records, false);
    save(session, TOKENS);
    test_session_close(session);

    session = open_prompt(1, &tokens);
    put(1, session, 0);
    publish(1, session);
    atomic_store(&fails_rows, true);
    save_fails(session, KV_IO, "0 of 768 tokens are saved: the disk cannot be written");
    save_fails(session, KV_IO, "0 of 768 tokens are saved: the disk cannot be written");
    wait_given_up();
    atomic_store(&fails_rows, false);
    save(session, TOKENS);
    assert_int_equal(read_rows(1, session), KV_OK);
    test_session_close(session);

    session = open_prompt(2, &tokens);
    put(2, session, 0);
    publish(2, session);
    atomic_store(&fails_rows, true);
    atomic_store(&fails_erasures, true);
    save_fails(session, KV_IO, "0 of 768 tokens are saved: the disk cannot be written");
    save_fails(session, KV_IO, "0 of 768 tokens are saved: what the disk had of them before");
    atomic_store(&fails_rows, false);
    atomic_store(&fails_erasures, false);
    save(session, TOKENS);
    kv_session_free(session);
    kill_all();
    for (uint32_t i = 0; i < 3; i++)
        use_prompt(i, TOKENS);
    close_store();
}

/* What cannot be saved: nothing has a name, there is no disk, the session is gone. */
static void save_of_nothing(void **state)
{
    const struct kv_session_options options = {0};
    struct kv_session *session;
    struct kv_ticket ticket;
    uint32_t tokens;
    struct kv_op *op;

    (void)state;
    open_store(1, UINT64_MAX);
    assert_int_equal(kv_open_begin(client, &model, &options, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    session = kv_op_session(op);
    kv_op_free(op);
    put(0, session, 0);
    save(session, 0);
    kv_session_ticket(session, &ticket);
    assert_int_equal(kv_save_id_begin(client, 0, &ticket.session_id, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    assert_int_equal(kv_op_tokens(op), 0);
    kv_op_free(op);
    assert_int_equal(kv_save_id_begin(client, 1, &ticket.session_id, 0, &op), KV_INVALID);
    assert_int_equal(kv_close_id_begin(client, 0, &ticket.session_id, 0, &op), KV_OK);
    test_finish(op, "close");
    save_fails(session, KV_NOT_FOUND, "an operator closed it");
    kv_session_free(session);
    assert_int_equal(kv_save_id_begin(client, 0, &ticket.session_id, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_NOT_FOUND);
    kv_op_free(op);
    close_store();

    open_store(1, 0);
    session = open_prompt(0, &tokens);
    put(0, session, 0);
    publish(0, session);
    save_fails(session, KV_UNSUPPORTED, "the node has no disk (--disk)");
    test_session_close(session);
    close_store();
}

static void write_format(uint32_t version)
{
    Kvpb__DiskFormat message = KVPB__DISK_FORMAT__INIT;
    struct kv_disk *disk = cluster.disks[0];
    struct kv_disk_queue *queue;
    uint8_t packed[64];

    message.version = version;
    const struct kv_disk_write write = {.key = "format",
                                        .key_bytes = 6,
                                        .value = packed,
                                        .value_bytes =
                                            kvpb__disk_format__pack(&message, packed)};
    assert_int_equal(disk->ops->queue_open(disk, NULL, NULL, &queue), KV_OK);
    assert_int_equal(kv_disk_write(queue, KV_DISK_RECORDS, &write, 1, NULL, NULL), KV_OK);
    disk->ops->queue_close(queue);
}

/* What a newer version wrote is refused by name, and not touched. */
static void a_newer_format_is_refused(void **state)
{
    struct kvs_node_config config = {.memory_bytes = MEMORY_BYTES,
                                     .n_threads = 1,
                                     .clock = &kv_clock_real,
                                     .disk_bytes = UINT64_MAX};
    struct kvs_node *node = NULL;
    char detail[256] = "";

    (void)state;
    open_store(1, UINT64_MAX);
    use_prompt(0, 0);
    wait_saved(BLOCKS);
    kv_client_close(client);
    end_node(0);
    write_format(KVS_DISK_FORMAT + 1);
    config.transport = cluster.transport;
    config.disk = cluster.disks[0];
    assert_int_equal(kvs_node_create(&config, &node, detail, sizeof(detail)), KV_UNSUPPORTED);
    assert_non_null(strstr(detail, "format 2"));
    write_format(KVS_DISK_FORMAT);
    cluster_start(&cluster, 0);
    connect_client();
    use_prompt(0, TOKENS);
    close_store();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_restart_loses_nothing),
        cmocka_unit_test(threads_may_be_others),
        cmocka_unit_test(more_than_memory),
        cmocka_unit_test(idle_sessions_leave_memory),
        cmocka_unit_test(a_session_of_more_than_memory),
        cmocka_unit_test(what_queries_touch_stays),
        cmocka_unit_test(what_is_deleted_rests),
        cmocka_unit_test(an_end_brings_nothing_back),
        cmocka_unit_test(an_end_amid_what_comes_back),
        cmocka_unit_test(copies_of_what_is_away),
        cmocka_unit_test(damage_is_a_miss),
        cmocka_unit_test(what_is_deleted_is_gone),
        cmocka_unit_test(a_drain_erases),
        cmocka_unit_test(damaged_records_lie),
        cmocka_unit_test(a_full_disk_forgets),
        cmocka_unit_test(a_newer_format_is_refused),
        cmocka_unit_test(save_is_for_sure),
        cmocka_unit_test(saves_go_on_side_by_side),
        cmocka_unit_test(save_on_a_full_disk),
        cmocka_unit_test(save_on_a_disk_that_fails),
        cmocka_unit_test(objects_that_fail_hold_no_rows_up),
        cmocka_unit_test(save_of_nothing),
        cmocka_unit_test(verify_finds_nothing),
        cmocka_unit_test(verify_mends_from_memory),
        cmocka_unit_test(verify_takes_no_error_for_damage),
        cmocka_unit_test(verify_forgets_what_is_away),
        cmocka_unit_test(verify_leaves_sessions_alone),
        cmocka_unit_test(verify_may_be_given_up),
        cmocka_unit_test(the_background_verifies_the_disk),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
