/* batch.h: whoever else is in a batch, each gets the answer that it gets alone; all get their turns,
 * and one that fails leaves the others alone. */
#include "client/client.h"
#include "client/control_message.h"
#include "gpu-worker/engine/batch.c" /* what its check finds is broken below */
#include "tests/support/dies.h"
#include "tests/support/model_session.h"
#include "tests/support/transport_fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <string.h>

enum {
    SEQUENCES = 7,
    PROMPT_MAX = 1300,
    ANSWER = 40,
    CAPACITY = PROMPT_MAX + ANSWER,
    END = 3, /* a token that ends answers of some sequences */
};

static struct model_session s;

/* A sequence, and what it has got. */
struct asked {
    struct kvw_sequence sequence;
    const struct kvw_method_ops *row;
    uint32_t n_prompt, max_tokens;
    bool ends, fails; /* at END; when its session is opened */
    bool opens_later, publishes;
    struct kv_client *client;
    unsigned n_away; /* how often nodes are away then, before it succeeds */
    uint32_t tokens[CAPACITY];
    unsigned n_told, n_over, n_closed;
    kv_status_t status;
    struct kvw_generate_result result;
};

static struct asked alone[SEQUENCES], together[SEQUENCES];

static const struct {
    uint32_t n_prompt;
    bool ends;
} cases[SEQUENCES] = {{1300, false}, {5, true},    {256, false}, {1, false},
                      {700, true},   {257, false}, {1029, true}};

static struct kvw_method_options options_of(void)
{
    struct kvw_method_options options = kvw_method_defaults;

    options.budget = (struct kvw_budget_options){.top_k = 60, .sinks = 4, .window = 16};
    options.index.chapter_blocks = 8;
    options.index.subspaces = 4;
    options.index.iterations = 4;
    options.index.summary_rows = 1024;
    options.index.wait = true;
    options.seed = 7;
    return options;
}

static kv_status_t open_session(void *arg, struct kvw_method **ret_attention)
{
    struct asked *asked = arg;
    const struct kvw_method_setup setup = {
        .session =
            {
                .model = s.model,
                .client = asked->client,
                .dtype = KV_FP16,
                .capacity = CAPACITY,
                .chunk_tokens = KVW_FORWARD_CHUNK,
                .opens_later = asked->opens_later,
                .publishes = asked->publishes,
                .prompt = asked->tokens,
                .n_prompt = asked->publishes ? asked->n_prompt : 0,
            },
        .options = options_of(),
    };
    char detail[256] = "";

    if (asked->fails)
        return KV_CONFLICT;
    if (asked->n_away > 0) {
        asked->n_away--;
        return KV_UNREACHABLE;
    }
    if (asked->row->create(&setup, ret_attention, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    return KV_OK;
}

static void close_session(void *arg, struct kvw_method *attention)
{
    ((struct asked *)arg)->n_closed++;
    attention->ops->destroy(attention);
}

static void generated(void *arg, uint32_t token)
{
    struct asked *asked = arg;

    assert_int_equal(asked->tokens[asked->n_prompt + asked->n_told++], token);
}

static bool is_end(void *arg, uint32_t token)
{
    const struct asked *asked = arg;

    return asked->ends && token == END;
}

static void over(void *arg, kv_status_t status, const struct kvw_generate_result *result)
{
    struct asked *asked = arg;

    asked->n_over++;
    asked->status = status;
    asked->result = *result;
}

static void prepare(struct asked *asked, unsigned number, const struct kvw_method_ops *row)
{
    const struct kvw_sampler_options options = {.temperature = 0.8, .top_p = 1, .seed = number};

    memset(asked, 0, sizeof(*asked));
    asked->row = row;
    asked->n_prompt = cases[number].n_prompt;
    asked->max_tokens = ANSWER;
    asked->ends = cases[number].ends;
    asked->opens_later = true;
    asked->client = s.client;
    memcpy(asked->tokens, s.tokens + 100 * number, asked->n_prompt * sizeof(asked->tokens[0]));
    asked->sequence = (struct kvw_sequence){
        .tokens = asked->tokens,
        .n_prompt = asked->n_prompt,
        .max_tokens = ANSWER,
        .capacity = CAPACITY,
        .arg = asked,
        .open = open_session,
        .close = close_session,
        .generated = generated,
        .is_end = is_end,
        .over = over,
    };
    assert_int_equal(kvw_sampler_create(&options, MADE_VOCABULARY, &asked->sequence.sampler),
                     KV_OK);
}

/* As kvworker answers a single prompt. */
static void answer_alone(struct asked *asked)
{
    static _Atomic int stop;
    struct kvw_generate_setup setup = {.sampler = asked->sequence.sampler,
                                       .n_vocabulary = MADE_VOCABULARY,
                                       .capacity = CAPACITY,
                                       .max_tokens = asked->max_tokens,
                                       .stop = &stop,
                                       .arg = asked,
                                       .generated = generated,
                                       .is_end = is_end};

    asked->opens_later = false;
    assert_int_equal(open_session(asked, &setup.attention), KV_OK);
    assert_int_equal(kvw_forward_create(s.model, setup.attention, &setup.forward), KV_OK);
    if (kvw_generate(&setup, asked->tokens, asked->n_prompt, 0, &asked->result) != KV_OK)
        fail_msg("%s", kvw_method_detail(setup.attention));
    kvw_forward_destroy(setup.forward);
    close_session(asked, setup.attention);
    kvw_sampler_destroy(asked->sequence.sampler);
}

static struct kvw_batch *new_batch(uint32_t sequences, uint32_t tokens, uint32_t groups)
{
    const struct kvw_batch_setup setup = {
        .model = s.model, .sequences = sequences, .tokens = tokens, .groups = groups};
    struct kvw_batch *batch;

    assert_int_equal(kvw_batch_create(&setup, &batch), KV_OK);
    return batch;
}

static void run_all(struct kvw_batch *batch)
{
    uint32_t n_left;

    do {
        assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
        kvw_batch_check(batch);
    } while (n_left > 0);
}

static void expect_same(const struct asked *a, const struct asked *b)
{
    assert_int_equal(b->n_over, 1);
    assert_int_equal(b->status, KV_OK);
    assert_int_equal(a->result.generated_tokens, b->result.generated_tokens);
    assert_int_equal(a->result.passed_tokens, b->result.passed_tokens);
    assert_int_equal(a->result.end, b->result.end);
    assert_int_equal(a->n_told, b->n_told);
    assert_memory_equal(a->tokens, b->tokens, sizeof(a->tokens));
}

static void as_alone_by(const struct kvw_method_ops *row)
{
    static const struct {
        uint32_t sequences, tokens, groups;
    } ways[] = {{SEQUENCES, KVW_FORWARD_CHUNK + SEQUENCES, 1},
                {3, 600, 2},
                {SEQUENCES, 1024, 2},
                {1, KVW_FORWARD_CHUNK + 1, 1}};
    uint64_t n_answer = 0, n_prompt = 0;

    for (unsigned i = 0; i < SEQUENCES; i++) {
        prepare(&alone[i], i, row);
        answer_alone(&alone[i]);
        assert_true(alone[i].result.generated_tokens > 0);
        n_prompt += alone[i].n_prompt;
        n_answer += alone[i].result.passed_tokens - alone[i].n_prompt;
    }
    for (unsigned way = 0; way < sizeof(ways) / sizeof(ways[0]); way++) {
        struct kvw_batch *batch =
            new_batch(ways[way].sequences, ways[way].tokens, ways[way].groups);
        struct kvw_batch_stats stats;

        for (unsigned i = 0; i < SEQUENCES; i++) {
            prepare(&together[i], i, row);
            kvw_batch_add(batch, &together[i].sequence);
        }
        run_all(batch);
        kvw_batch_get_stats(batch, &stats);
        assert_int_equal(stats.prompt_tokens, n_prompt);
        assert_int_equal(stats.answer_tokens, n_answer);
        kvw_batch_destroy(batch);
        for (unsigned i = 0; i < SEQUENCES; i++) {
            expect_same(&alone[i], &together[i]);
            kvw_sampler_destroy(together[i].sequence.sampler);
        }
    }
}

static void full_as_alone(void **state)
{
    (void)state;
    as_alone_by(&kvw_method_full);
}

static void pqcache_as_alone(void **state)
{
    (void)state;
    as_alone_by(&kvw_method_pqcache);
}

/* Sequences join while others generate; one whose session cannot be opened is over at once, and in
 * the end those that are left are cancelled. */
static void they_come_and_go(void **state)
{
    struct kvw_batch *batch = new_batch(2, 600, 2);
    uint32_t n_left;

    (void)state;
    for (unsigned i = 0; i < 5; i++)
        prepare(&together[i], i, &kvw_method_full);
    together[1].fails = true;
    assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
    assert_int_equal(n_left, 0);
    kvw_batch_add(batch, &together[2].sequence);
    for (unsigned i = 0; i < 10; i++)
        assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
    assert_in_range(together[2].n_told, 5, ANSWER - 1);
    kvw_batch_add(batch, &together[1].sequence);
    kvw_batch_add(batch, &together[3].sequence);
    kvw_batch_add(batch, &together[4].sequence);
    assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
    assert_int_equal(n_left, 3);
    assert_int_equal(together[1].n_over, 1);
    assert_int_equal(together[1].status, KV_CONFLICT);
    while (together[2].n_over == 0)
        assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
    assert_int_equal(together[2].status, KV_OK);
    assert_int_equal(together[4].n_told, 0); /* it has just begun, or not yet */
    kvw_batch_check(batch);
    kvw_batch_destroy(batch);
    assert_int_equal(together[3].n_over + together[4].n_over, 2);
    assert_int_equal(together[4].status, KV_CANCELLED);
    for (unsigned i = 0; i < 5; i++)
        kvw_sampler_destroy(together[i].sequence.sampler);
}

/* A long prompt does not stop others: each pass has a token of every answer, and chunks of prompts go
 * round. */
static void prompts_take_turns(void **state)
{
    struct kvw_batch *batch = new_batch(4, KVW_FORWARD_CHUNK + 4, 1);
    uint32_t n_left;
    unsigned before;

    (void)state;
    prepare(&together[0], 3, &kvw_method_full);
    prepare(&together[1], 0, &kvw_method_full); /* five chunks and a bit */
    prepare(&together[2], 6, &kvw_method_full); /* four and a bit */
    for (unsigned i = 0; i < 3; i++)
        together[i].opens_later = false; /* no pass is before that */
    kvw_batch_add(batch, &together[0].sequence);
    assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
    kvw_batch_add(batch, &together[1].sequence);
    kvw_batch_add(batch, &together[2].sequence);
    before = together[0].n_told;
    for (unsigned i = 0; i < 8; i++)
        assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
    assert_int_equal(together[0].n_told, before + 8);
    assert_int_equal(together[1].sequence.result.passed_tokens, 4 * KVW_FORWARD_CHUNK);
    assert_int_equal(together[2].sequence.result.passed_tokens, 4 * KVW_FORWARD_CHUNK);
    run_all(batch);
    kvw_batch_destroy(batch);
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(together[i].status, KV_OK);
        kvw_sampler_destroy(together[i].sequence.sampler);
    }
}

/* Each group has passes of its own: when one's is over, the other's is under way, and what it has asked
 * the store is out.  Who generates is in one of them. */
static void groups_have_their_own_passes(void **state)
{
    struct kvw_batch *batch = new_batch(4, KVW_FORWARD_CHUNK + 4, 2);
    uint32_t n_left;
    unsigned n_told = 0, before[4];

    (void)state;
    for (unsigned i = 0; i < 4; i++) {
        prepare(&together[i], 1 + 2 * (i % 2), &kvw_method_pqcache); /* short prompts */
        together[i].ends = false;
        together[i].opens_later = false; /* all begin together */
        kvw_batch_add(batch, &together[i].sequence);
    }
    for (unsigned i = 0; n_told < 4 * 4; i++) {
        assert_true(i < 1000);
        assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
        n_told = 0;
        for (unsigned j = 0; j < 4; j++)
            n_told += together[j].n_told;
    }
    for (unsigned j = 0; j < 4; j++)
        before[j] = together[j].n_told;
    for (unsigned i = 0; i < 10; i++) {
        unsigned n = 0, n_passing = 0;

        assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
        for (unsigned j = 0; j < 4; j++) {
            n += together[j].n_told;
            n_passing += together[j].sequence.is_passing;
        }
        assert_int_equal(n, n_told + 2);
        assert_int_equal(n_passing, 2);
        n_told = n;
    }
    for (unsigned j = 0; j < 4; j++)
        assert_int_equal(together[j].n_told, before[j] + 5);
    kvw_batch_destroy(batch); /* in the middle of a pass */
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(together[i].n_over, 1);
        assert_int_equal(together[i].n_closed, 1);
        assert_int_equal(together[i].status, KV_CANCELLED);
        kvw_sampler_destroy(together[i].sequence.sampler);
    }
}

/* Nodes that are away for a moment are waited for; those who have begun go on meanwhile. */
static void nodes_come_back(void **state)
{
    struct kvw_batch *batch = new_batch(2, 600, 1);
    uint32_t n_left;

    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        prepare(&together[i], i, &kvw_method_full);
        kvw_batch_add(batch, &together[i].sequence);
    }
    together[1].n_away = 3;
    assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
    assert_int_equal(n_left, 3);
    assert_int_equal(together[1].n_away, 2);
    run_all(batch);
    kvw_batch_destroy(batch);
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(together[i].status, KV_OK);
        assert_int_equal(together[i].n_over, 1);
        assert_int_equal(together[i].n_away, 0);
        kvw_sampler_destroy(together[i].sequence.sampler);
    }
}

/* Nodes that stay away are waited for once, not by each sequence; when they are there again, the next
 * one begins. */
static void nodes_stay_away(void **state)
{
    struct kvw_batch *batch = new_batch(2, 600, 1);
    uint32_t n_left;

    (void)state;
    for (unsigned i = 0; i < 4; i++) {
        prepare(&together[i], i, &kvw_method_full);
        together[i].n_away = i < 3 ? 1000 : 0;
        kvw_batch_add(batch, &together[i].sequence);
    }
    assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
    assert_int_equal(n_left, 4);
    batch->away_us -= AWAY_MAX_US;
    batch->retry_us = 0;
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
        assert_int_equal(n_left, 3 - i);
        assert_int_equal(together[i].status, KV_UNREACHABLE);
    }
    run_all(batch);
    assert_int_equal(together[3].status, KV_OK);
    assert_int_equal(batch->away_us, 0);
    kvw_batch_destroy(batch);
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(together[i].n_over, 1);
        kvw_sampler_destroy(together[i].sequence.sampler);
    }
}

/* Rows beside the computation have a bound: who would exceed it waits. */
static void rows_have_a_bound(void **state)
{
    const struct kvw_model_params *params = &s.model->params;
    const uint64_t all = kvw_method_full_row_bytes(params, KV_FP16, CAPACITY);
    static const struct {
        const struct kvw_method_ops *row;
        double of_one;        /* the bound, in prompts */
        uint32_t least, most; /* sequences that are begun at a time */
    } bounds[] = {{&kvw_method_full, 1, 1, 1},
                  {&kvw_method_full, 2.5, 2, 2},
                  {&kvw_method_pqcache, 2.5, 3, SEQUENCES}}; /* answers need less */

    (void)state;
    for (unsigned i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++) {
        const struct kvw_batch_setup setup = {
            .model = s.model,
            .sequences = SEQUENCES,
            .tokens = 600,
            .groups = 2,
            .row_bytes = (uint64_t)(bounds[i].of_one * (double)all),
        };
        struct kvw_batch_stats stats;
        struct kvw_batch *batch;

        assert_int_equal(kvw_batch_create(&setup, &batch), KV_OK);
        for (unsigned j = 0; j < SEQUENCES; j++) {
            prepare(&together[j], j, bounds[i].row);
            together[j].sequence.row_bytes = all;
            kvw_batch_add(batch, &together[j].sequence);
        }
        run_all(batch);
        kvw_batch_get_stats(batch, &stats);
        assert_in_range(stats.sequences_most, bounds[i].least, bounds[i].most);
        assert_in_range(stats.row_bytes_most, all, setup.row_bytes);
        kvw_batch_destroy(batch);
        for (unsigned j = 0; j < SEQUENCES; j++) {
            assert_int_equal(together[j].status, KV_OK);
            kvw_sampler_destroy(together[j].sequence.sampler);
        }
    }
}

/* ---- one that has to wait for the store -------------------------------------------------- */

enum {
    STEPS_MAX = 20000, /* more have gone wrong */
    SLOTS_OF_ROWS = 16,
    TRIES = 20,
};

/* A client of the embedded node whose messages may be held. */
static struct kv_client *open_holding_client(struct kv_transport *transport)
{
    const struct kvc_node_setup node = {.address = kvw_embedded_address(s.embedded),
                                        .name = "embedded",
                                        .mode = KV_CHANNEL_NETWORK};
    const struct kvc_client_setup setup = {
        .nodes = &node,
        .n_nodes = 1,
        .transport = transport,
        .open_control = kvc_control_message_open,
        .clock = &kv_clock_real,
        .name = "holding",
        .ops_max = 1024,
        .deadline_ms = 600000,
        .peer_timeout_ms = 600000,
        .retry_ms = 600000, /* what is held is not sent again */
    };
    struct kv_client *client;

    assert_int_equal(kvc_client_create(&setup, &client), KV_OK);
    return client;
}

static void expect_not_open(const struct asked *slow)
{
    assert_false(slow->sequence.is_open);
    assert_int_equal(slow->n_told, 0);
}

static void expect_in_prompt(const struct asked *slow)
{
    assert_true(slow->sequence.is_open);
    assert_in_range(slow->sequence.result.passed_tokens, 1, slow->n_prompt - 1);
    assert_int_equal(slow->n_told, 0);
}

/* The first token needs the prompt alone, the next one its index. */
static void expect_no_step(const struct asked *slow)
{
    assert_int_equal(slow->sequence.result.passed_tokens, slow->n_prompt);
    assert_int_equal(slow->n_told, 1);
}

/* A step's rows are in a slot until they are sent: with all of them in use, steps end. */
static void expect_few_steps(const struct asked *slow)
{
    assert_in_range(slow->n_told, 2, SLOTS_OF_ROWS + 1);
    assert_int_equal(slow->n_over, 0);
}

static void expect_whole(const struct asked *slow)
{
    assert_int_equal(slow->n_over, 1);
    assert_int_equal(slow->status, KV_OK);
    assert_int_equal(slow->n_closed, 0);
}

static void expect_answered(const struct asked *slow)
{
    assert_int_equal(slow->n_told, 3);
    assert_int_equal(slow->n_over, 0);
}

/* While the store does not do what one sequence needs, others begin, answer and leave; then it
 * goes on, and all have the bits that they have alone. */
static void one_waits_and_others_go_on(void **state)
{
    static const struct {
        unsigned op, count; /* messages that are held: 0: all */
        unsigned slow, others[2];
        uint32_t max_tokens; /* of the slow one; 0: as the others */
        void (*expect)(const struct asked *slow);
    } ways[] = {
        {KV_OP_OPEN, 1, 4, {1, 2}, 0, expect_not_open},
        /* The others are too short for one. */
        {KV_OP_INDEX, 0, 0, {1, 3}, 0, expect_in_prompt},
        {KV_OP_INDEX, 0, 4, {1, 3}, 0, expect_no_step},
        {KV_OP_APPEND, 1, 3, {4, 0}, 0, expect_few_steps},
        {KV_OP_APPEND, 1, 3, {4, 0}, 3, expect_answered},
        {KV_OP_PUBLISH, 0, 4, {1, 2}, 0, expect_whole},
        {KV_OP_CLOSE, 1, 3, {4, 2}, 3, expect_whole},
    };
    struct kv_transport *transport;
    struct kv_client *client;
    unsigned n_tries = 0;

    (void)state;
    assert_int_equal(fault_open(&kv_transport_loopback, NULL, &transport), KV_OK);
    client = open_holding_client(transport);
    for (unsigned way = 0; way < sizeof(ways) / sizeof(ways[0]); way++) {
        const unsigned numbers[] = {ways[way].slow, ways[way].others[0], ways[way].others[1]};
        const struct fault_rule hold = {FAULT_OUT,    FAULT_HOLD, KV_WIRE_REQUEST,
                                        ways[way].op, 0,          ways[way].count};
        struct kvw_batch *batch = new_batch(3, 1024, 2);
        const struct asked *slow = &together[0];
        uint32_t n_left;

        fault_add(transport, &hold);
        for (unsigned i = 0; i < 3; i++) {
            const uint32_t max_tokens =
                i == 0 && ways[way].max_tokens > 0 ? ways[way].max_tokens : ANSWER;

            prepare(&alone[i], numbers[i], &kvw_method_pqcache);
            prepare(&together[i], numbers[i], &kvw_method_pqcache);
            alone[i].max_tokens = together[i].sequence.max_tokens = max_tokens;
            together[i].client = client;
            /* The first row of a step is the slow one's if its prompt passes first. */
            together[i].opens_later = ways[way].op != KV_OP_APPEND;
            together[i].publishes = i == 0 && ways[way].op == KV_OP_PUBLISH;
            answer_alone(&alone[i]);
            kvw_batch_add(batch, &together[i].sequence);
        }
        for (unsigned i = 0; together[1].n_closed + together[2].n_closed < 2; i++) {
            assert_true(i < STEPS_MAX);
            assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
        }
        /* What it can do without the store it has done by now, or does now. */
        for (unsigned i = 0; i < 2 * SLOTS_OF_ROWS; i++)
            assert_int_equal(kvw_batch_step(batch, &n_left), KV_OK);
        /* A row of a step is sent again if a put of the prompt ends after it: once more, then. */
        const bool is_again = n_left == 0 && ways[way].op == KV_OP_APPEND && ++n_tries < TRIES;
        if (!is_again && (n_left != 1 || fault_held(transport) == 0))
            fail_msg("way %u: %u left, %u messages held", way, n_left, fault_held(transport));
        if (!is_again)
            ways[way].expect(slow);
        fault_clear(transport);
        fault_release(transport);
        run_all(batch);
        kvw_batch_destroy(batch);
        for (unsigned i = 0; i < 3; i++) {
            expect_same(&alone[i], &together[i]);
            assert_int_equal(together[i].n_closed, 1);
            kvw_sampler_destroy(together[i].sequence.sampler);
        }
        way -= is_again;
    }
    kv_client_close(client);
    transport->ops->close(transport);
}

static void setups_are_checked(void **state)
{
    static const struct kvw_batch_setup wrong[] = {
        {.sequences = 0, .tokens = 1000, .groups = 1},
        {.sequences = KVW_BATCH_SEQUENCES_MAX + 1, .tokens = 1000, .groups = 1},
        {.sequences = 4, .tokens = KVW_FORWARD_CHUNK + 3, .groups = 1},
        {.sequences = 4, .tokens = 1000, .groups = 0},
        {.sequences = 4, .tokens = 1000, .groups = KVW_BATCH_GROUPS_MAX + 1},
    };
    struct kvw_batch *batch;

    (void)state;
    for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct kvw_batch_setup setup = wrong[i];

        setup.model = s.model;
        assert_int_equal(kvw_batch_create(&setup, &batch), KV_INVALID);
    }
}

enum broken {
    MORE_THAN_COUNTED,
    FEWER_THAN_COUNTED,
    MORE_THAN_PLACES,
    NO_SESSION,
    MORE_PASSED_THAN_THERE_ARE,
    A_PROMPT_THAT_HAS_PASSED,
    WRONG_END,
    PASSING_WITHOUT_A_PASS,
    NOT_PASSING_IN_A_PASS,
    PASS_OF_ANOTHER_SESSION,
    WRONG_TOKENS_OF_A_PASS,
    MORE_TOKENS_THAN_ALLOWED,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kvw_sequence one = {
        .attention = (struct kvw_method *)arg, .n_prompt = 10, .is_open = true};
    struct kvw_sequence *of[] = {&one};
    struct kvw_forward_item item = {.attention = one.attention, .n = 1};
    struct kvw_batch batch = {.setup = {.sequences = 1, .tokens = 1, .groups = 1},
                              .groups[0] = {.items = &item, .of = of}};
    struct group *group = &batch.groups[0];

    queue_init(&batch.waiting);
    queue_init(&batch.opening);
    queue_init(&batch.begun);
    queue_init(&batch.leaving);
    append(&batch.begun, &one);
    if (*broken == MORE_THAN_COUNTED)
        batch.begun.n = 0;
    else if (*broken == FEWER_THAN_COUNTED)
        batch.waiting.n = 1;
    else if (*broken == MORE_THAN_PLACES)
        batch.setup.sequences = 0;
    else if (*broken == NO_SESSION)
        one.attention = NULL;
    else if (*broken == MORE_PASSED_THAN_THERE_ARE)
        one.result.passed_tokens = 11, one.is_generating = true;
    else if (*broken == A_PROMPT_THAT_HAS_PASSED)
        one.result.passed_tokens = 10;
    else if (*broken == WRONG_END)
        batch.begun.end = &batch.begun.first;
    if (*broken >= PASSING_WITHOUT_A_PASS) {
        group->n_items = group->n_tokens = 1;
        one.is_passing = true;
    }
    if (*broken == PASSING_WITHOUT_A_PASS)
        group->n_items = group->n_tokens = 0;
    else if (*broken == NOT_PASSING_IN_A_PASS)
        one.is_passing = false;
    else if (*broken == PASS_OF_ANOTHER_SESSION)
        item.attention = NULL;
    else if (*broken == WRONG_TOKENS_OF_A_PASS)
        group->n_tokens = 0;
    else if (*broken == MORE_TOKENS_THAN_ALLOWED)
        item.n = group->n_tokens = 2;
    kvw_batch_check(&batch);
}

static void check_finds(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
}

static int set_up(void **state)
{
    const struct kvw_method_options options = options_of();

    (void)state;
    model_session_open(&s, &kvw_method_full, &options, KV_FP16, 2 * PROMPT_MAX);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    model_session_close(&s);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_finds),
        cmocka_unit_test(setups_are_checked),
        cmocka_unit_test(full_as_alone),
        cmocka_unit_test(pqcache_as_alone),
        cmocka_unit_test(they_come_and_go),
        cmocka_unit_test(prompts_take_turns),
        cmocka_unit_test(rows_have_a_bound),
        cmocka_unit_test(nodes_come_back),
        cmocka_unit_test(nodes_stay_away),
        cmocka_unit_test(one_waits_and_others_go_on),
        cmocka_unit_test(groups_have_their_own_passes),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
