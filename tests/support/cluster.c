#include "tests/support/cluster.h"

#include "client/control_message.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    BECOMES_US = 120 * 1000 * 1000,
    LOOK_AGAIN_US = 2000,
    /* A test waits for one client while another is silent, under a sanitizer for minutes. */
    CLIENT_LEASE_MS = 30 * 60 * 1000,
};

static void node_name(uint32_t i, char ret_name[16])
{
    snprintf(ret_name, 16, "node-%u", i);
}

void cluster_start(struct cluster *cluster, uint32_t i)
{
    const struct cluster_setup *setup = &cluster->setup;
    char name[16], detail[256] = "";
    struct kvs_node_config node = {
        .name = name,
        .memory_bytes = setup->memory_bytes,
        .n_threads = setup->n_threads,
        .sessions_max = setup->sessions_max,
        .root_sessions = setup->root_sessions,
        .scrub_bytes = setup->scrub_bytes,
        .scrub_disk_bytes = setup->scrub_disk_bytes,
        .object_ttl_s = setup->object_ttl_s,
        .eviction = setup->eviction,
        .tenant_quota = setup->tenant_quota,
        .credits = setup->credits,
        .lease_ms = setup->lease_ms,
        .client_lease_ms = CLIENT_LEASE_MS,
        .wire_version_max = setup->wire_version_max,
        .clock = &kv_clock_real,
        .transport = cluster->transport,
        .message_control = true,
        .disk = cluster->disks[i],
        .disk_bytes = setup->disk_bytes,
        .events = setup->events != NULL ? &setup->events[i] : NULL,
    };

    assert_null(cluster->nodes[i]);
    node_name(i, name);
    if (kvs_node_create(&node, &cluster->nodes[i], detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    assert_int_equal(kvs_node_start(cluster->nodes[i], true), KV_OK);
}

bool cluster_open(struct cluster *cluster, const struct cluster_setup *setup)
{
    struct kv_transport_config config = {.transports = setup->transports};
    char detail[256] = "";

    *cluster = (struct cluster){.setup = *setup};
    assert_in_range(setup->n_nodes, 1, CLUSTER_NODES_MAX);
    if (setup->row->open(&config, &cluster->transport, detail, sizeof(detail)) != KV_OK) {
        print_message("%s: %s\n", setup->row->name, detail);
        return false;
    }
    for (; cluster->n_nodes < setup->n_nodes; cluster->n_nodes++) {
        uint32_t i = cluster->n_nodes;

        cluster->disks[i] = kv_disk_memory_open(&kv_clock_real, 0);
        assert_non_null(cluster->disks[i]);
        cluster_start(cluster, i);
    }
    return true;
}

void cluster_end(struct cluster *cluster, uint32_t node)
{
    if (cluster->nodes[node] == NULL)
        return;
    kvs_node_stop(cluster->nodes[node]);
    kvs_node_check_memory(cluster->nodes[node]);
    kvs_node_destroy(cluster->nodes[node]);
    cluster->nodes[node] = NULL;
}

void cluster_close(struct cluster *cluster)
{
    for (uint32_t i = 0; i < cluster->n_nodes; i++) {
        cluster_end(cluster, i);
        kv_disk_close(cluster->disks[i]);
    }
    if (cluster->transport != NULL)
        cluster->transport->ops->close(cluster->transport);
    memset(cluster, 0, sizeof(*cluster));
}

struct kv_client *cluster_connect(const struct cluster *cluster,
                                  const struct cluster_client *setup)
{
    static char addresses[CLUSTER_NODES_MAX][2 * KV_WIRE_ADDRESS_MAX + 32];
    char names[CLUSTER_NODES_MAX][16];
    struct kvc_node_setup remotes[CLUSTER_NODES_MAX];
    struct kvc_client_setup client_setup = {
        .nodes = remotes,
        .n_nodes = cluster->n_nodes,
        .transport = cluster->transport,
        .open_control = kvc_control_message_open,
        .clock = &kv_clock_real,
        .name = "test",
        .deadline_ms = 60000, /* under a sanitizer, on a busy machine */
        .peer_timeout_ms = 60000,
    };
    struct kv_client *client = NULL;

    for (uint32_t i = 0; i < cluster->n_nodes; i++) {
        /* The carrier knows one scheme, whatever the row's addresses are. */
        const char *address = strchr(kvs_node_address(cluster->nodes[i]), ':');

        assert_non_null(address);
        snprintf(addresses[i], sizeof(addresses[i]), "loopback%s", address);
        node_name(i, names[i]);
        remotes[setup != NULL && setup->is_reversed ? cluster->n_nodes - 1 - i : i] =
            (struct kvc_node_setup){
                .address = addresses[i], .name = names[i], .mode = KV_CHANNEL_NETWORK};
    }
    if (setup != NULL) {
        if (setup->transport != NULL)
            client_setup.transport = setup->transport;
        if (setup->deadline_ms > 0)
            client_setup.deadline_ms = setup->deadline_ms;
        if (setup->peer_timeout_ms > 0)
            client_setup.peer_timeout_ms = setup->peer_timeout_ms;
        client_setup.retry_ms = setup->retry_ms;
        client_setup.credits = setup->credits;
        client_setup.tenant = setup->tenant;
        client_setup.salt = setup->salt;
        client_setup.salt_bytes = setup->salt != NULL ? strlen(setup->salt) : 0;
        client_setup.wire_version_max = setup->wire_version_max;
    }
    assert_int_equal(kvc_client_create(&client_setup, &client), KV_OK);
    if ((setup != NULL && setup->has_thread) || getenv("CLUSTER_THREAD") != NULL) {
        char detail[256] = "";

        if (kvc_client_start_thread(client, detail, sizeof(detail)) != KV_OK)
            fail_msg("%s", detail);
    }
    return client;
}

double
cluster_number(struct kv_client *client, uint32_t node, const char *table, const char *name)
{
    const struct kv_table *answer;
    struct kv_op *op;
    double number = -1;

    assert_int_equal(kv_table_begin(client, node, table, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("table %s: %s", table, kv_op_detail(op));
    answer = kv_op_table(op);
    assert_non_null(answer);
    for (uint32_t i = 0; i < answer->n_rows; i++) {
        const struct kv_cell *row = &answer->cells[i * answer->n_columns];

        if (row[0].text != NULL && strcmp(row[0].text, name) == 0)
            number = row[1].number;
    }
    kv_op_free(op);
    return number;
}

double cluster_total(struct kv_client *client, const char *table, const char *name)
{
    double total = 0;

    for (uint32_t i = 0; i < kv_client_n_nodes(client); i++)
        total += cluster_number(client, i, table, name);
    return total;
}

/* Every data thread has begun a look since this was called. */
static void begin_look(const struct cluster *cluster)
{
    uint64_t begin_us = kv_clock_now(&kv_clock_real);

    for (uint32_t i = 0; i < cluster->n_nodes; i++)
        while (kvs_node_last_step_us(cluster->nodes[i]) < begin_us) {
            if (kv_clock_now(&kv_clock_real) - begin_us > BECOMES_US)
                fail_msg("node %u: a data thread stands still", i);
            kv_sleep_fds(NULL, 0, LOOK_AGAIN_US);
        }
}

void cluster_look(const struct cluster *cluster)
{
    /* A look is over when the next begins. */
    begin_look(cluster);
    begin_look(cluster);
}

bool cluster_becomes(struct kv_client *client,
                     const char *table,
                     const char *name,
                     double value)
{
    uint64_t begin = kv_clock_now(&kv_clock_real);
    double total = 0;

    do {
        total = cluster_total(client, table, name);
        if (total == value)
            return true;
        kv_client_wait(client, 0);
        kv_sleep_fds(NULL, 0, LOOK_AGAIN_US);
    } while (kv_clock_now(&kv_clock_real) - begin < BECOMES_US);
    print_error("%s: %s is %.0f, not %.0f\n", table, name, total, value);
    return false;
}
