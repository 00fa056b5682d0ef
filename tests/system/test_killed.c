/* A node is killed with SIGKILL at any moment, again and again, while clients work on prompts: what was
 * said to be saved is there when it is started again, all of it and right; the rest is there as far as it
 * is, and right.
 *
 *   test_system_killed KVSERVER                  the short form
 *   test_system_killed KVSERVER --rounds N [--seed N]
 */
#include "kvserver/base/random.h"
#include "tests/system/prompts.h"
#include "tests/system/system.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_CLIENTS = 2,
    N_PROMPTS = 12, /* of each client */
    BLOCKS = 8,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
    SHORT_ROUNDS = 4,
    ROUNDS_MAX = 100000,
    CHECKS = 6, /* of what was saved earlier, in each round */
    WAIT_MS = 300,
    BUFFER_BYTES = 2 << 20,
};

static const char *const options[] = {"--transport", "tcp",    "--threads", "2", "--memory",
                                      "64M",         "--disk", "4G",        NULL};
static uint32_t rounds = SHORT_ROUNDS;
static uint64_t seed = 1;

struct killed {
    struct process_node node;
    struct process clients[N_CLIENTS];
    struct kv_client *client;
    struct kv_buffer *buffer;
    struct kv_random random;
    uint8_t blocks_saved[ROUNDS_MAX]; /* of each round's prompt */
    uint64_t n_checked, n_partly, n_whole;
};

/* ---- a prompt of each round --------------------------------------------------------------- */

static const struct kv_id128 *names_of(const struct killed *killed, uint32_t prompt)
{
    static struct kv_id128 names[BLOCKS];
    uint32_t tokens[TOKENS];

    for (uint32_t at = 0; at < TOKENS; at++)
        tokens[at] = at + prompt * TOKENS;
    kv_prompt_names(killed->client, system_model(), tokens, TOKENS, NULL, 0, names);
    return names;
}

static struct kv_session *
open_prompt(const struct killed *killed, uint32_t prompt, uint32_t *ret_tokens)
{
    const struct kv_session_options names = {.block_names = names_of(killed, prompt),
                                             .n_block_names = BLOCKS};
    struct kv_session *session;
    struct kv_op *op;

    if (kv_open_begin(killed->client, system_model(), &names, SYSTEM_DEADLINE_MS, &op) !=
            KV_OK ||
        kv_wait(op) != KV_OK)
        fail_msg("%s", kv_client_detail(killed->client));
    *ret_tokens = kv_op_tokens(op);
    session = kv_op_session(op);
    kv_op_free(op);
    return session;
}

static void close_session(const struct killed *killed, struct kv_session *session)
{
    struct kv_op *op;

    system_finish(killed->client, kv_close_begin(session, SYSTEM_DEADLINE_MS, &op), &op, KV_OK);
    kv_session_free(session);
}

static void put_prompt(const struct killed *killed, struct kv_session *session, uint32_t prompt)
{
    const struct kv_publish blocks = {.n_names = BLOCKS, .names = names_of(killed, prompt)};
    struct kv_op *op;

    system_put(killed->client, session, killed->buffer, 0, TOKENS, prompt);
    system_finish(killed->client, kv_publish_begin(session, &blocks, SYSTEM_DEADLINE_MS, &op),
                  &op, KV_OK);
}

static uint32_t save(const struct killed *killed, struct kv_session *session)
{
    struct kv_op *op;
    uint32_t tokens;

    if (kv_save_begin(session, SYSTEM_DEADLINE_MS, &op) != KV_OK || kv_wait(op) != KV_OK)
        fail_msg("%s", kv_client_detail(killed->client));
    tokens = kv_op_tokens(op);
    kv_op_free(op);
    return tokens;
}

/* What the node has of the prompt is what was put, and no less than was saved. */
static void check_prompt(struct killed *killed, uint32_t prompt)
{
    const uint32_t saved = killed->blocks_saved[prompt] * (uint32_t)KV_BLOCK_TOKENS;
    uint32_t tokens;
    struct kv_session *session = open_prompt(killed, prompt, &tokens);

    if (tokens < saved)
        fail_msg("prompt %u: %u tokens are there, and %u were saved", prompt, tokens, saved);
    if (tokens > 0)
        system_read(killed->client, session, killed->buffer, 0, tokens, prompt);
    close_session(killed, session);
    killed->n_checked++;
    killed->n_whole += tokens == TOKENS;
    killed->n_partly += tokens > 0 && tokens < TOKENS;
}

/* ---- rounds ------------------------------------------------------------------------------- */

static void connect_client(struct killed *killed)
{
    killed->client = system_open(killed->node.control, "tcp");
    killed->buffer = system_buffer(killed->client, BUFFER_BYTES);
}

/* Puts a prompt, saves it on request in three rounds of four, and kills the node shortly after. */
static void one_round(struct killed *killed, uint32_t round)
{
    const bool is_saved = kv_random_below(&killed->random, 4) > 0;
    uint32_t tokens;
    struct kv_session *session = open_prompt(killed, round, &tokens);

    assert_int_equal(tokens, 0);
    put_prompt(killed, session, round);
    if (is_saved) {
        assert_int_equal(save(killed, session), TOKENS);
        killed->blocks_saved[round] = BLOCKS;
    }
    if (!is_saved || kv_random_below(&killed->random, 2) == 0)
        (void)poll(NULL, 0, (int)kv_random_below(&killed->random, WAIT_MS));
    process_kill(&killed->node.process);
    kv_session_free(session);
    kv_client_close(killed->client);
    system_node_start(&killed->node, options);
    connect_client(killed);
    check_prompt(killed, round);
    for (int i = 0; i < CHECKS; i++)
        check_prompt(killed, (uint32_t)kv_random_below(&killed->random, round + 1));
}

static void tell(const struct killed *killed, uint32_t round)
{
    print_message("%u rounds: %llu prompts checked, %llu there as a whole, %llu in part\n",
                  round, (unsigned long long)killed->n_checked,
                  (unsigned long long)killed->n_whole, (unsigned long long)killed->n_partly);
    fflush(stdout);
}

static void what_is_saved_outlasts_the_node(void **state)
{
    static struct killed killed;
    struct prompts_options load = {.transport = "tcp",
                                   .n_prompts = N_PROMPTS,
                                   .nodes_may_fail = true,
                                   .deadline_ms = SYSTEM_DEADLINE_MS};

    (void)state;
    kv_random_init(&killed.random, seed);
    system_node_start(&killed.node, options);
    connect_client(&killed);
    load.nodes = killed.node.control;
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        load.seed = i + 1;
        assert_true(prompts_start(&killed.clients[i], &load));
    }
    for (uint32_t round = 0; round < rounds; round++) {
        one_round(&killed, round);
        if ((round + 1) % 50 == 0)
            tell(&killed, round + 1);
    }
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        struct prompts_counts counts;

        assert_true(prompts_ask(&killed.clients[i], &counts));
        print_message("client %u: %llu turns, %llu failed, %llu talks resumed\n", i,
                      (unsigned long long)counts.turns, (unsigned long long)counts.failures,
                      (unsigned long long)counts.resumed);
        assert_true(prompts_stop(&killed.clients[i]));
    }
    for (uint32_t round = 0; round < rounds; round++)
        check_prompt(&killed, round);
    tell(&killed, rounds);
    kv_client_close(killed.client);
    system_node_stop(&killed.node);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_saved_outlasts_the_node),
    };

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--rounds") == 0)
            rounds = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[i + 1], NULL, 10);
        else
            return 2;
    }
    if (argc % 2 == 0 || rounds == 0 || rounds > ROUNDS_MAX)
        return 2;
    return cmocka_run_group_tests_name("system.killed", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, prompts_child);
}
