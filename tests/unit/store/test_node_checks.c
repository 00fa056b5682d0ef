/* The checks of a node's books, each proved: one invariant after another is broken in a node
 * with a client and a request that waits, and the check ends the process. */
#include "kvserver/base/clock.h"
#include "kvserver/disk/disk.h"
#include "kvserver/net/transport.h"
#include "kvserver/store/node_private.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/shard/shard_private.h"
#include "tests/support/dies.h"

#include <stdlib.h>
#include <string.h>

static struct kv_transport *transport;
static struct kv_disk *disk;
static struct kvs_node *node;
static struct kvs_control *control;
static struct kvs_shard *shard;
static struct kvs_shard_client *client;
static struct kvs_request *request;
static struct kv_channel channel;

/* A request of a client that data thread 0 has opened by itself; no message ever comes. */
static int set_up(void **state)
{
    const struct kv_transport_config transport_config = {0};
    const struct kv_wire_header header = {.op = KV_OP_PING, .deadline_us = 1000};
    char detail[256];

    (void)state;
    if (kv_transport_loopback.open(&transport_config, &transport, detail, sizeof(detail)) !=
        KV_OK)
        return -1;
    disk = kv_disk_memory_open(&kv_clock_real, 0);
    const struct kvs_node_config config = {.memory_bytes = 32 << 20,
                                           .n_threads = 1,
                                           .sessions_max = 8,
                                           .clients_max = 4,
                                           .clock = &kv_clock_real,
                                           .transport = transport,
                                           .disk = disk};
    if (kvs_node_create(&config, &node, detail, sizeof(detail)) != KV_OK)
        return -1;
    control = &node->control;
    shard = &node->shard[0];
    client = &shard->clients[1];
    client->index = 1;
    client->state = KVS_SHARD_CLIENT_OPEN;
    client->channel = &channel;
    client->credits = 8;
    client->due_us = UINT64_MAX;
    request = kvs_request_create(shard, client, &header);
    kvs_request_enqueue(request);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvs_request_end(request);
    client->channel = NULL;
    client->state = KVS_SHARD_CLIENT_FREE;
    kvs_node_check_memory(node);
    kvs_node_destroy(node);
    kv_disk_close(disk);
    transport->ops->close(transport);
    return 0;
}

/* ---- a data thread ----------------------------------------------------------------------- */

static void check_shard(void)
{
    kvs_shard_check(shard);
}

static void request_of_no_client(void)
{
    client->requests = NULL;
    client->n_requests = 0;
    atomic_store(&client->in_flight, 0);
}

static void request_not_counted(void)
{
    client->n_requests = 0;
}

static void request_left_in_between(void)
{
    kvs_request_unlink(request);
    request->state = KVS_REQUEST_BEGUN;
}

static void request_queued_in_no_queue(void)
{
    kvs_request_unlink(request);
}

static void request_of_other_priority(void)
{
    const unsigned priority = kv_op_priority(request->header.op);

    kvs_request_queue_at(request, &client->queues[(priority + 1) % KV_PRIORITY_COUNT].requests);
}

static void request_sends_and_is_queued(void)
{
    request->n_sends = 1;
}

static void request_never_looked_at(void)
{
    client->due_us = UINT64_MAX;
}

static void clients_in_another_order(void)
{
    shard->clients[2].due_us = 0;
}

static void queue_end(void)
{
    shard->looking.end = &request->next;
}

static void body_of_nobody(void)
{
    (void)kv_pool_get(shard->bodies);
}

static void body_not_counted(void)
{
    request->body_slot = kv_pool_get(shard->bodies);
}

static void staging_given_back(void)
{
    request->staging = kv_pool_get(shard->stagings);
    client->n_stagings = 1;
    kv_pool_put(shard->stagings, request->staging);
}

static void more_requests_than_credits(void)
{
    client->credits = 0;
}

static void more_credits_than_requests(void)
{
    client->credits = kv_pool_size(shard->requests) + 1;
}

static void open_without_channel(void)
{
    client->channel = NULL;
}

static void note_not_counted(void)
{
    client->notes[0].busy = true;
}

static void shard_finds(void **state)
{
    (void)state;
    check_shard();
    expect_found(request_of_no_client, check_shard);
    expect_found(request_not_counted, check_shard);
    expect_found(request_left_in_between, check_shard);
    expect_found(request_queued_in_no_queue, check_shard);
    expect_found(request_of_other_priority, check_shard);
    expect_found(request_sends_and_is_queued, check_shard);
    expect_found(request_never_looked_at, check_shard);
    expect_found(clients_in_another_order, check_shard);
    expect_found(queue_end, check_shard);
    expect_found(body_of_nobody, check_shard);
    expect_found(body_not_counted, check_shard);
    expect_found(staging_given_back, check_shard);
    expect_found(more_requests_than_credits, check_shard);
    expect_found(more_credits_than_requests, check_shard);
    expect_found(open_without_channel, check_shard);
    expect_found(note_not_counted, check_shard);
}

/* ---- its queries ------------------------------------------------------------------------- */

static struct kvs_query_queue *queue;
static struct kvs_query_client *querier;

static void check_queries(void)
{
    kvs_query_queue_check(shard);
}

/* A small query that waits while its client has the first place: sound. */
static void query_waits(void)
{
    static struct {
        struct kv_wire_query query;
        struct kv_wire_range range;
    } body = {.query = {.n_queries = 1, .k = 1, .rerank = 1, .n_ranges = 1}, .range = {0, 8}};

    request->body = (uint8_t *)&body;
    queue->places[0].owner = request;
    querier->place = &queue->places[0];
    kvs_request_queue_at(request, &querier->waiting);
}

static void query_waits_in_no_line(void)
{
    query_waits();
    queue->places[0].owner = NULL;
    querier->place = NULL;
}

static void client_waits_with_no_query(void)
{
    querier->line = &queue->lines[1];
    querier->link = querier->line->end;
    *querier->link = querier;
    querier->line->end = &querier->next;
}

static void client_waits_with_a_place(void)
{
    query_waits();
    client_waits_with_no_query();
}

static void query_waits_for_a_free_place(void)
{
    query_waits();
    queue->places[0].owner = NULL;
    querier->place = NULL;
    client_waits_with_no_query();
}

static void end_of_line(void)
{
    queue->lines[0].end = &querier->next;
}

static void client_has_a_free_place(void)
{
    querier->place = &queue->places[0];
}

static void place_of_two_clients(void)
{
    query_waits();
    queue->clients[2].place = querier->place;
}

static void place_that_client_has_not(void)
{
    queue->places[0].owner = request;
}

static void query_begun_without_entry(void)
{
    query_waits();
    queue->places[0].begun = true;
}

static void entry_of_no_query(void)
{
    queue->places[0].pipeline->n_active++;
}

static void queries_find(void **state)
{
    (void)state;
    queue = kvs_query_queue_of(shard);
    querier = &queue->clients[client->index];
    check_queries();
    assert_false(finds(check_queries, query_waits));
    expect_found(query_waits_in_no_line, check_queries);
    expect_found(client_waits_with_no_query, check_queries);
    expect_found(client_waits_with_a_place, check_queries);
    expect_found(query_waits_for_a_free_place, check_queries);
    expect_found(end_of_line, check_queries);
    expect_found(client_has_a_free_place, check_queries);
    expect_found(place_of_two_clients, check_queries);
    expect_found(place_that_client_has_not, check_queries);
    expect_found(query_begun_without_entry, check_queries);
    expect_found(entry_of_no_query, check_queries);
}

/* ---- memory ------------------------------------------------------------------------------ */

static void check_memory(void)
{
    kvs_shard_check_memory(shard, NULL);
}

/* In the first session's place, not in use. */
static struct kvs_unit *unit_with_rows(void)
{
    struct kvs_unit *unit = calloc(1, sizeof(*unit));
    struct kvs_shard_session *session = &shard->sessions[0];

    kvs_blocks_init(&session->blocks, &shard->store, unit, 1);
    if (unit == NULL || kvs_unit_init(unit, &session->blocks, 0, 0, 0, 64) != KV_OK ||
        kvs_unit_reserve(unit, 200) != KV_OK)
        _exit(3);
    unit->committed = 200;
    session->units = unit;
    session->n_units = 1;
    return unit;
}

static struct kvs_command at_it = {.index = 0};

/* While a command is at the session it may have units: this alone is sound. */
static void units_and_a_command(void)
{
    (void)unit_with_rows();
    shard->command = &at_it;
}

static void units_without_a_command(void)
{
    (void)unit_with_rows();
}

static void block_ref_too_many(void)
{
    units_and_a_command();
    kvs_unit_block(&shard->sessions[0].units[0], 1)->refs++;
}

static void block_pin_too_many(void)
{
    units_and_a_command();
    kvs_unit_block(&shard->sessions[0].units[0], 1)->pins++;
}

static void block_of_nobody(void)
{
    units_and_a_command();
    shard->sessions[0].blocks.n = 1;
    shard->sessions[0].units[0].committed = shard->sessions[0].units[0].reserved = 100;
}

static struct kvs_block *marked_block(void)
{
    units_and_a_command();
    struct kvs_block *block = kvs_unit_block(&shard->sessions[0].units[0], 0);

    kvs_segment_mark_bad(&shard->store, block, 0, 3);
    return block;
}

static void bad_row_not_counted(void)
{
    (void)marked_block();
    shard->store.health.rows_bad--;
}

static void mark_as_it_should_be(void)
{
    (void)marked_block();
}

static void mark_of_no_segment(void)
{
    marked_block()->segments[0].has_bad = false;
    shard->store.health.rows_bad--;
}

/* As one who removes a mark, and does not give its memory back. */
static void record_of_a_mark_lost(void)
{
    struct kvs_block *block = marked_block();

    for (uint32_t i = 0; i < KVS_BAD_LISTS; i++)
        shard->store.bad[i] = NULL;
    block->segments[0].has_bad = false;
    shard->store.health.rows_bad--;
}

static void codebook_ref_too_many(void)
{
    const struct kvs_index_plan plan = {.shape = {.d = 16, .m = 2, .bits = 4}};
    uint32_t codebook;

    if (kvs_codebook_create(&shard->codebooks, &plan, &codebook) != KV_OK)
        _exit(3);
}

static void woken_not_in_list(void)
{
    shard->sessions[3].is_woken = true;
}

static void memory_finds(void **state)
{
    (void)state;
    check_memory();
    assert_false(finds(check_memory, units_and_a_command));
    expect_found(units_without_a_command, check_memory);
    expect_found(block_ref_too_many, check_memory);
    expect_found(block_pin_too_many, check_memory);
    expect_found(block_of_nobody, check_memory);
    expect_found(bad_row_not_counted, check_memory);
    assert_false(finds(check_memory, mark_as_it_should_be));
    expect_found(mark_of_no_segment, check_memory);
    expect_found(record_of_a_mark_lost, check_memory);
    expect_found(codebook_ref_too_many, check_memory);
    expect_found(woken_not_in_list, check_memory);
}

/* ---- the control thread ------------------------------------------------------------------ */

static void check_control(void)
{
    kvs_control_check(control);
}

static void call_not_counted(void)
{
    control->n_calls++;
}

static void session_in_no_map(void)
{
    control->sessions[2].used = true;
}

static void session_not_counted(void)
{
    control->n_sessions++;
}

static void credits_lost(void)
{
    control->credits_spare--;
}

static void client_without_hello(void)
{
    control->clients[0].state = KVS_CLIENT_OPENING;
    control->clients[0].credits = kvs_client_grant(control);
}

static void place_not_free(void)
{
    control->free_clients = control->free_clients->next;
    control->free_clients->link = &control->free_clients;
}

static void client_of_no_list(void)
{
    const struct kv_id128 id = {.bytes = {5}};
    struct kvs_client_record *record;

    if (kvs_client_create(control, &id, &record) != KV_OK)
        _exit(3);
    record->state = KVS_CLIENT_OPEN;
}

/* A client as hello leaves it: sound. */
static void open_client(void)
{
    const struct kv_id128 id = {.bytes = {5}};
    struct kvs_client_record *record;

    if (kvs_client_create(control, &id, &record) != KV_OK)
        _exit(3);
    kvs_client_opened(control, record);
}

static void client_in_no_map(void)
{
    open_client();
    kv_map_remove(control->client_of_id, &control->unwatched_clients->id);
}

static void attached_client_watched(void)
{
    open_client();
    control->unwatched_clients->attached = true;
}

static void client_not_closed(void)
{
    open_client();
    kv_map_remove(control->client_of_id, &control->unwatched_clients->id);
    control->unwatched_clients->state = KVS_CLIENT_CLOSING;
    control->unwatched_clients = NULL;
}

static struct kvs_model model;
static struct kvs_session *session;

/* A session as open leaves it: sound. */
static void open_session(void)
{
    const struct kv_id128 id = {.bytes = {7}};

    control->models[control->n_models++] = &model;
    if (kvs_session_create(control, &id, &model, &session) != KV_OK)
        _exit(3);
    session->busy = false;
    session->n_nodes = 1;
    session->epoch = 1;
    session->tokens_max = 1000;
    session->writers = kv_writers_create(NULL, 0, 1);
}

static void session_busy_for_ever(void)
{
    open_session();
    session->busy = true;
}

static void generation_without_operation(void)
{
    open_session();
    session->generation++;
}

static void operation_of_other_generation(void)
{
    open_session();
    session->log[session->n_log++] =
        (struct kvs_log_entry){.kind = KV_OP_TRUNCATE, .writer = 1, .generation = 2};
    session->generation++;
}

static void model_forgets_session(void)
{
    open_session();
    model.n_sessions = 0;
}

static void writer_nobody(void)
{
    open_session();
    session->writers->runs[0].writer = 0;
}

static void lease_at_another_place(void)
{
    open_session();
    session->due_at++;
}

/* The session of a root that has two rows. */
static void open_branch(void)
{
    open_session();
    if (!kvs_root_enter(control, session, 7, 1, 2))
        _exit(3);
}

static void root_forgets_session(void)
{
    open_branch();
    session->shared_root->n_sessions--;
}

static void root_counts_another_row(void)
{
    open_branch();
    session->row_then = 0;
}

static void root_of_three_rows(void)
{
    open_branch();
    session->shared_root->n_rows = session->rows_then = 3;
}

static void root_of_nobody(void)
{
    open_branch();
    session->shared_root = NULL;
}

static void place_in_no_list(void)
{
    control->free_session = control->free_session->next_free;
}

static void control_finds(void **state)
{
    (void)state;
    check_control();
    assert_false(finds(check_control, open_session));
    expect_found(call_not_counted, check_control);
    expect_found(session_in_no_map, check_control);
    expect_found(session_not_counted, check_control);
    expect_found(credits_lost, check_control);
    expect_found(client_without_hello, check_control);
    expect_found(place_not_free, check_control);
    expect_found(client_of_no_list, check_control);
    assert_false(finds(check_control, open_client));
    expect_found(client_in_no_map, check_control);
    expect_found(attached_client_watched, check_control);
    expect_found(client_not_closed, check_control);
    expect_found(session_busy_for_ever, check_control);
    expect_found(generation_without_operation, check_control);
    expect_found(operation_of_other_generation, check_control);
    expect_found(model_forgets_session, check_control);
    expect_found(writer_nobody, check_control);
    expect_found(lease_at_another_place, check_control);
    expect_found(place_in_no_list, check_control);
    assert_false(finds(check_control, open_branch));
    expect_found(root_forgets_session, check_control);
    expect_found(root_counts_another_row, check_control);
    expect_found(root_of_three_rows, check_control);
    expect_found(root_of_nobody, check_control);
}

static void check_node(void)
{
    kvs_node_check(node);
}

/* The client, which the control thread does not know, is gone: sound. */
static void client_gone(void)
{
    kvs_request_end(request);
    client->channel = NULL;
    client->state = KVS_SHARD_CLIENT_FREE;
}

static void client_gone_with_entry(void)
{
    client_gone();
    kvs_query_queue_of(shard)->places[0].pipeline->n_active++;
}

static void node_finds(void **state)
{
    (void)state;
    expect_found(check_control, check_node);
    assert_false(finds(check_node, client_gone));
    expect_found(client_gone_with_entry, check_node);
}

/* A node is called what it was told, whole. */
static void names_are_whole(void **state)
{
    char name[KV_NAME_BYTES_MAX + 2], detail[256];
    struct kvs_node_config config = control->config;
    struct kvs_node *other = NULL;

    (void)state;
    memset(name, 'n', sizeof(name));
    name[KV_NAME_BYTES_MAX + 1] = '\0';
    config.name = name;
    assert_int_equal(kvs_node_create(&config, &other, detail, sizeof(detail)), KV_INVALID);
    assert_string_equal(detail, "node: name: nnnnnnnnnnnnnnnnnnnn...: more than 255 bytes");
    name[KV_NAME_BYTES_MAX] = '\0';
    assert_int_equal(kvs_node_create(&config, &other, detail, sizeof(detail)), KV_OK);
    assert_string_equal(other->control.name, name);
    kvs_node_destroy(other);
}

/* A node has no name that its clients could not list. */
static void names_can_be_listed(void **state)
{
    static const char *const names[] = {
        "a b",      " a",        "a\t", "a\n", "\x1b[2J", "\x7f",
        "\xc2\x85", "a\xc2\x9f", "a,b", "a=b", "=",
    };
    struct kvs_node_config config = control->config;
    struct kvs_node *other = NULL;
    char detail[256];

    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        config.name = names[i];
        assert_int_equal(kvs_node_create(&config, &other, detail, sizeof(detail)), KV_INVALID);
        assert_memory_equal(detail, "node: name: ", strlen("node: name: "));
    }
    config.name = "\xc3\xa0:7400/\xc2\xa0";
    assert_int_equal(kvs_node_create(&config, &other, detail, sizeof(detail)), KV_OK);
    assert_string_equal(other->control.name, config.name);
    kvs_node_destroy(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(shard_finds, set_up, tear_down),
        cmocka_unit_test_setup_teardown(queries_find, set_up, tear_down),
        cmocka_unit_test_setup_teardown(memory_finds, set_up, tear_down),
        cmocka_unit_test_setup_teardown(control_finds, set_up, tear_down),
        cmocka_unit_test_setup_teardown(node_finds, set_up, tear_down),
        cmocka_unit_test_setup_teardown(names_are_whole, set_up, tear_down),
        cmocka_unit_test_setup_teardown(names_can_be_listed, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
