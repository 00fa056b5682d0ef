/* How a data thread is given a command: one that sleeps is woken, once, and no other.  The port
 * tells whether it was woken: it does not let its thread sleep after that. */
#include "kvserver/base/clock.h"
#include "kvserver/disk/disk.h"
#include "kvserver/net/transport.h"
#include "kvserver/store/node_private.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static struct kv_transport *transport;
static struct kv_disk *disk;
static struct kvs_node *node;
static struct kvs_shard *shard;

static int set_up(void **state)
{
    const struct kv_transport_config transport_config = {0};
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
    shard = &node->shard[0];
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvs_node_destroy(node);
    kv_disk_close(disk);
    transport->ops->close(transport);
    return 0;
}

static struct kvs_command length_command(void)
{
    return (struct kvs_command){.kind = KVS_COMMAND_SESSION_LENGTH};
}

/* Whether the thread was woken since the last call. */
static bool was_woken(void)
{
    int fd;

    return shard->port->ops->port_arm(shard->port, &fd) == KV_BUSY;
}

/* Runs all commands, and takes them back. */
static void run_all(void)
{
    while (kvs_node_data_step(node, 0))
        continue;
    while (kv_ring_pop(node->control.replies) != NULL)
        continue;
}

static void who_is_awake_is_not_woken(void **state)
{
    struct kvs_command command = length_command();

    (void)state;
    run_all();
    (void)was_woken();
    kvs_shard_give(shard, &command);
    assert_false(was_woken());
    assert_false(kvs_shard_fall_asleep(shard)); /* before it has carried out the command */
    run_all();
    assert_true(kvs_shard_fall_asleep(shard));
    kvs_shard_awake(shard);
    kvs_shard_give(shard, &command);
    assert_false(was_woken());
    run_all();
}

static void who_sleeps_is_woken_once(void **state)
{
    struct kvs_command first = length_command(), second = length_command();

    (void)state;
    run_all();
    (void)was_woken();
    assert_true(kvs_shard_fall_asleep(shard));
    kvs_shard_give(shard, &first);
    assert_true(was_woken());
    kvs_shard_give(shard, &second);
    assert_false(was_woken());
    run_all();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(who_is_awake_is_not_woken, set_up, tear_down),
        cmocka_unit_test_setup_teardown(who_sleeps_is_woken_once, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
