/* Three nodes are started again, one after the other, while clients work on prompts: drained, killed,
 * and as a node of the next minor version.  No talk of a client ends for it: it opens its session again,
 * by the names of its blocks, finds what was published, puts the rest again, and reads the right bytes.
 * How long clients were without an answer is printed.
 *
 *   test_system_rolling KVSERVER KVSERVER-OF-THE-NEXT-VERSION
 */
#include "proto/kv_wire.h"
#include "tests/system/prompts.h"
#include "tests/system/system.h"

#include <stdio.h>
#include <string.h>

enum {
    N_NODES = 3,
    N_CLIENTS = 3,
    N_PROMPTS = 24,  /* of each client */
    TURNS = 12,      /* of each client, before and after: all its talks go on */
    DRAIN_MS = 9000, /* a node that takes longer gives up before all is saved */
};

static const char *const options[] = {"--transport", "tcp",    "--threads", "1", "--memory",
                                      "192M",        "--disk", "2G",        NULL};
static const char *this_version, *next_version;

struct trio {
    struct process_node nodes[N_NODES];
    char addresses[240];
    struct process clients[N_CLIENTS];
    struct prompts_counts counts[N_CLIENTS];
};

/* Waits until each client has had more turns from now on.  What they have done since the last time is in
 * ret_done; its away_ms is the longest of all. */
static void go_on(struct trio *trio, struct prompts_counts *ret_done)
{
    const uint64_t until_us = process_now_us() + PROCESS_PATIENCE_MS * UINT64_C(1000);

    *ret_done = (struct prompts_counts){0};
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        const struct prompts_counts before = trio->counts[i];
        struct prompts_counts *now = &trio->counts[i];
        uint64_t away_ms = 0, turns = 0; /* when it was asked first */

        do {
            if (process_now_us() > until_us)
                fail_msg("client %u does not go on", i);
            assert_true(prompts_ask(&trio->clients[i], now));
            turns = turns == 0 ? now->turns + TURNS : turns;
            if (now->away_ms > away_ms)
                away_ms = now->away_ms;
        } while (now->turns < turns);
        ret_done->turns += now->turns - before.turns;
        ret_done->failures += now->failures - before.failures;
        ret_done->resumed += now->resumed - before.resumed;
        ret_done->kept_tokens += now->kept_tokens - before.kept_tokens;
        ret_done->lost_tokens += now->lost_tokens - before.lost_tokens;
        ret_done->away_ms = away_ms > ret_done->away_ms ? away_ms : ret_done->away_ms;
    }
}

static void start_all(struct trio *trio)
{
    struct prompts_options load = {.nodes = trio->addresses,
                                   .transport = "tcp",
                                   .n_prompts = N_PROMPTS,
                                   .nodes_may_fail = true,
                                   .deadline_ms = SYSTEM_DEADLINE_MS};
    struct prompts_counts done;

    process_set_kvserver(this_version);
    for (unsigned i = 0; i < N_NODES; i++)
        system_node_start(&trio->nodes[i], options);
    snprintf(trio->addresses, sizeof(trio->addresses), "%s,%s,%s", trio->nodes[0].control,
             trio->nodes[1].control, trio->nodes[2].control);
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        load.seed = i + 1;
        assert_true(prompts_start(&trio->clients[i], &load));
    }
    go_on(trio, &done);
    assert_int_equal(done.failures, 0);
}

/* The node speaks what its version speaks, and a client of this version works with it. */
static void check_version(const struct trio *trio, unsigned i, const char *version)
{
    struct kv_client *client = system_open(trio->nodes[i].control, "tcp");

    assert_true(system_number(client, 0, "status", "wire_version") ==
                KV_WIRE_VERSION + (version == next_version));
    kv_client_close(client);
}

/* One node is stopped, or killed, and started again in its folder. */
static void restart(struct trio *trio, unsigned i, bool is_killed, const char *version)
{
    struct process_node *node = &trio->nodes[i];
    const uint64_t begin_us = process_now_us();
    struct prompts_counts done;
    uint64_t down_us;

    if (is_killed)
        process_kill(&node->process);
    else
        system_node_stop(node);
    down_us = process_now_us();
    process_set_kvserver(version);
    system_node_start(node, options);
    const uint64_t up_us = process_now_us();
    check_version(trio, i, version);

    go_on(trio, &done);
    print_message(
        "node %u %s, started again%s: it took %llu ms to end and %llu to start; the "
        "longest that a client was without an answer: %llu ms; %llu talks resumed, %llu "
        "tokens found, %llu put again; %llu operations failed\n",
        i, is_killed ? "killed" : "drained",
        version == next_version ? " as the next version" : "",
        (unsigned long long)(down_us - begin_us) / 1000,
        (unsigned long long)(up_us - down_us) / 1000, (unsigned long long)done.away_ms,
        (unsigned long long)done.resumed, (unsigned long long)done.kept_tokens,
        (unsigned long long)done.lost_tokens, (unsigned long long)done.failures);
    /* Every session has a part on every node. */
    assert_true(done.resumed >= N_CLIENTS);
    assert_true(done.kept_tokens > 0);
    /* What was published is found, but for what a killed node had no time to save. */
    if (!is_killed && down_us - begin_us < DRAIN_MS * UINT64_C(1000))
        assert_true(done.lost_tokens <= done.resumed * PROMPTS_UNPUBLISHED_TOKENS);
}

static void stop_all(struct trio *trio)
{
    for (unsigned i = 0; i < N_CLIENTS; i++)
        assert_true(prompts_stop(&trio->clients[i]));
    for (unsigned i = 0; i < N_NODES; i++)
        system_node_stop(&trio->nodes[i]);
}

/* Whoever updates three nodes does it so, and back. */
static void one_node_after_the_other(void **state)
{
    struct trio trio = {0};

    (void)state;
    start_all(&trio);
    restart(&trio, 0, false, this_version);
    restart(&trio, 1, false, next_version);
    restart(&trio, 2, true, this_version);
    restart(&trio, 1, true, this_version);
    stop_all(&trio);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_node_after_the_other),
    };

    if (argc != 2)
        return 2;
    this_version = process_kvserver();
    next_version = argv[1];
    return cmocka_run_group_tests_name("system.rolling", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, prompts_child);
}
