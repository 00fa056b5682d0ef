/* The feed of events, byte by byte: what is published is compared with messages written out
 * here, as msgpack's specification and vLLM's field names have them.  Then what readers may
 * rely on: replays are complete, however slowly they are taken; what was lost is told; memory
 * is bounded. */
#include "kvserver/base/clock.h"
#include "kvserver/event_feed.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include <cmocka.h>

enum {
    WAIT_MS = 30000, /* a slow machine needs no more */
    FRAMES_MAX = 5,
    BLOCKS = 64,
};

/* A feed with a reader of its replays. */
struct test {
    struct kvs_event_feed *feed;
    const struct kvs_event_sink *sink;
    void *context, *reader;
    zmq_msg_t frames[FRAMES_MAX];
    int n_frames;
};

static void start(struct test *test, const struct kvs_event_feed_config *like)
{
    struct kvs_event_feed_config config = *like;
    const int wait_ms = WAIT_MS, none = 0;
    char detail[256] = "";

    config.endpoint = "tcp://127.0.0.1:0";
    config.replay_endpoint = "tcp://127.0.0.1:0";
    config.topic = "topic";
    assert_int_equal(kvs_event_feed_check(&config, detail, sizeof(detail)), KV_OK);
    assert_int_equal(kvs_event_feed_create(&config, &test->feed, detail, sizeof(detail)),
                     KV_OK);
    test->sink = kvs_event_feed_sink(test->feed);
    test->context = zmq_ctx_new();
    test->reader = zmq_socket(test->context, ZMQ_DEALER);
    zmq_setsockopt(test->reader, ZMQ_RCVTIMEO, &wait_ms, sizeof(wait_ms));
    zmq_setsockopt(test->reader, ZMQ_LINGER, &none, sizeof(none));
    assert_int_equal(zmq_connect(test->reader, kvs_event_feed_replay_endpoint(test->feed)), 0);
    test->n_frames = 0;
}

static void drop_frames(struct test *test)
{
    while (test->n_frames > 0)
        zmq_msg_close(&test->frames[--test->n_frames]);
}

static void stop(struct test *test)
{
    drop_frames(test);
    zmq_close(test->reader);
    zmq_ctx_term(test->context);
    kvs_event_feed_destroy(test->feed);
}

/* Receives a message; returns false at the time limit. */
static bool receive(struct test *test)
{
    int more = 1;
    size_t more_bytes = sizeof(more);

    drop_frames(test);
    while (more) {
        assert_true(test->n_frames < FRAMES_MAX);
        zmq_msg_init(&test->frames[test->n_frames]);
        if (zmq_msg_recv(&test->frames[test->n_frames], test->reader, 0) < 0) {
            zmq_msg_close(&test->frames[test->n_frames]);
            return false;
        }
        test->n_frames++;
        zmq_getsockopt(test->reader, ZMQ_RCVMORE, &more, &more_bytes);
    }
    return true;
}

static uint64_t number(const uint8_t *bytes)
{
    uint64_t value = 0;

    for (int i = 0; i < 8; i++)
        value = value << 8 | bytes[i];
    return value;
}

static void ask(struct test *test, uint64_t sequence)
{
    uint8_t bytes[8];

    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(sequence >> (56 - 8 * i));
    assert_int_equal(zmq_send(test->reader, "", 0, ZMQ_SNDMORE), 0);
    assert_int_equal(zmq_send(test->reader, bytes, sizeof(bytes), 0), sizeof(bytes));
}

/* Receives a message of a replay and returns its number; UINT64_MAX is the end. */
static uint64_t next_sequence(struct test *test)
{
    uint64_t sequence;

    assert_true(receive(test));
    assert_int_equal(test->n_frames, 4);
    assert_int_equal(zmq_msg_size(&test->frames[0]), 0);
    assert_int_equal(zmq_msg_size(&test->frames[2]), 8);
    sequence = number(zmq_msg_data(&test->frames[2]));
    if (sequence == UINT64_MAX) {
        assert_int_equal(zmq_msg_size(&test->frames[1]), 0);
        assert_int_equal(zmq_msg_size(&test->frames[3]), 0);
    } else {
        assert_int_equal(zmq_msg_size(&test->frames[1]), strlen("topic"));
        assert_memory_equal(zmq_msg_data(&test->frames[1]), "topic", strlen("topic"));
        assert_true(zmq_msg_size(&test->frames[3]) > 10);
    }
    return sequence;
}

/* Waits until the batch of that number is published, which is then the last frame. */
static void wait_batch(struct test *test, uint64_t sequence)
{
    const uint64_t until_us = kv_clock_now(&kv_clock_real) + WAIT_MS * 1000;

    while (kv_clock_now(&kv_clock_real) < until_us) {
        ask(test, sequence);
        if (next_sequence(test) == UINT64_MAX)
            continue;
        assert_int_equal(number(zmq_msg_data(&test->frames[2])), sequence);
        return;
    }
    fail_msg("no batch %llu", (unsigned long long)sequence);
}

static void end_replay(struct test *test)
{
    assert_int_equal(next_sequence(test), UINT64_MAX);
}

/* Compares the batch last received with one of one event. */
static void is_event(struct test *test, const void *event, size_t bytes)
{
    const uint8_t *payload = zmq_msg_data(&test->frames[3]);
    const uint64_t bits = number(payload + 2);
    double seconds, now = (double)kv_clock_unix_us() / 1e6;

    assert_int_equal(zmq_msg_size(&test->frames[3]), 11 + bytes);
    assert_int_equal(payload[0], 0x92); /* an array of 2 */
    assert_int_equal(payload[1], 0xcb); /* a double */
    memcpy(&seconds, &bits, sizeof(seconds));
    assert_true(seconds <= now && seconds > now - 600);
    assert_int_equal(payload[10], 0x91); /* an array of 1 */
    assert_memory_equal(payload + 11, event, bytes);
}
#define IS_EVENT(test, text) is_event(test, text, sizeof(text) - 1)

#define CLEARED        \
    "\x81\xa4type\xb0" \
    "AllBlocksCleared"
#define HEX_NAME "\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f"

static struct kv_id128 name_of(uint8_t first)
{
    struct kv_id128 name;

    for (unsigned i = 0; i < sizeof(name); i++)
        name.bytes[i] = (uint8_t)(first + i);
    return name;
}

static void bytes_of_events(void **state)
{
    struct test test;
    const struct kv_id128 names[] = {name_of(0x10), name_of(0x20)};
    struct kvs_blocks_removed removed = {.names = names, .n = 2};
    struct kvs_blocks_stored stored = {.names = names, .n = 1, .medium = KVS_MEDIUM_DISK};

    (void)state;
    start(&test, &(struct kvs_event_feed_config){.buffer_bytes = 1 << 20});
    wait_batch(&test, 0);
    IS_EVENT(&test, CLEARED);
    end_replay(&test);

    test.sink->removed(test.sink->arg, &removed);
    wait_batch(&test, 1);
    IS_EVENT(&test, "\x83\xa4type\xac"
                    "BlockRemoved"
                    "\xac"
                    "block_hashes\x92\xc4\x10" HEX_NAME
                    "\xc4\x10\x20\x21\x22\x23\x24\x25\x26\x27\x28\x29\x2a\x2b\x2c\x2d\x2e\x2f"
                    "\xa6medium\xa3"
                    "CPU");
    end_replay(&test);

    test.sink->stored(test.sink->arg, &stored);
    wait_batch(&test, 2);
    IS_EVENT(&test, "\x88\xa4type\xab"
                    "BlockStored"
                    "\xac"
                    "block_hashes\x91\xc4\x10" HEX_NAME "\xb1parent_block_hash\xc0"
                    "\xa9token_ids\x90"
                    "\xaa"
                    "block_size\xcc\x80"
                    "\xa7lora_id\xc0"
                    "\xa6medium\xa4"
                    "DISK"
                    "\xa9lora_name\xc0");
    end_replay(&test);

    test.sink->cleared(test.sink->arg);
    wait_batch(&test, 3);
    IS_EVENT(&test, CLEARED);
    end_replay(&test);
    stop(&test);
}

/* With a parent, with tokens of all lengths, of a tenant. */
static void bytes_of_a_tenant(void **state)
{
    static const uint32_t some[] = {0, 127, 128, 255, 256, 65535, 65536, UINT32_MAX};
    static const char front[] =
        "\x89\xa4type\xab"
        "BlockStored"
        "\xac"
        "block_hashes\x91\xc4\x10"
        "\x20\x21\x22\x23\x24\x25\x26\x27\x28\x29\x2a\x2b\x2c\x2d\x2f\x2d"
        "\xb1parent_block_hash\xc4\x10"
        "\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1f\x1d"
        "\xa9token_ids\xdc\x00\x80"
        "\x00\x7f\xcc\x80\xcc\xff\xcd\x01\x00\xcd\xff\xff"
        "\xce\x00\x01\x00\x00\xce\xff\xff\xff\xff";
    static const char back[] = "\xaa"
                               "block_size\xcc\x80\xa7lora_id\xc0\xa6medium\xa3"
                               "CPU"
                               "\xa9lora_name\xc0\xaa"
                               "extra_keys\x91\x91\xaatenant:258";
    const size_t sevens = KV_BLOCK_TOKENS - sizeof(some) / sizeof(some[0]);
    const struct kv_id128 name = name_of(0x20), parent = name_of(0x10);
    uint32_t tokens[KV_BLOCK_TOKENS];
    uint8_t expected[1024];
    struct test test;
    const struct kvs_blocks_stored stored = {
        .names = &name, .parent = &parent, .tokens = tokens, .n = 1, .tenant = 258};

    (void)state;
    for (unsigned i = 0; i < KV_BLOCK_TOKENS; i++)
        tokens[i] = i < sizeof(some) / sizeof(some[0]) ? some[i] : 7;
    memcpy(expected, front, sizeof(front) - 1);
    memset(expected + sizeof(front) - 1, 7, sevens);
    memcpy(expected + sizeof(front) - 1 + sevens, back, sizeof(back) - 1);
    start(&test, &(struct kvs_event_feed_config){.buffer_bytes = 1 << 20});
    test.sink->stored(test.sink->arg, &stored);
    wait_batch(&test, 1);
    is_event(&test, expected, sizeof(front) - 1 + sevens + sizeof(back) - 1);
    stop(&test);
}

static void names_as_numbers(void **state)
{
    const struct kv_id128 name = name_of(0x10);
    const struct kvs_blocks_removed removed = {.names = &name, .n = 1};
    struct test test;

    (void)state;
    start(&test, &(struct kvs_event_feed_config){.buffer_bytes = 1 << 20, .int_hashes = true});
    test.sink->removed(test.sink->arg, &removed);
    wait_batch(&test, 1);
    IS_EVENT(&test, "\x83\xa4type\xac"
                    "BlockRemoved"
                    "\xac"
                    "block_hashes\x91\xcf\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f"
                    "\xa6medium\xa3"
                    "CPU");
    stop(&test);
}

/* A run of blocks with tokens, larger than a piece of the queue. */
static void tell_blocks(struct test *test, unsigned n)
{
    static struct kv_id128 names[KVS_EVENT_BLOCKS_MAX];
    static uint32_t tokens[KVS_EVENT_BLOCKS_MAX * KV_BLOCK_TOKENS];
    struct kvs_blocks_stored stored = {.names = names, .tokens = tokens, .n = n};

    test->sink->stored(test->sink->arg, &stored);
}

static unsigned long long metric(struct test *test, const char *name)
{
    char *text = NULL, row[64];
    size_t bytes;
    unsigned long long value = 0;
    FILE *out = open_memstream(&text, &bytes);

    kvs_event_feed_metrics(test->feed, out);
    fclose(out);
    snprintf(row, sizeof(row), "\n%s ", name);
    assert_non_null(strstr(text, row));
    value = strtoull(strstr(text, row) + strlen(row), NULL, 10);
    free(text);
    return value;
}

static void loss_is_told(void **state)
{
    struct test test;

    (void)state;
    start(&test, &(struct kvs_event_feed_config){.buffer_bytes = 1 << 20, .queue_bytes = 4096});
    test.sink->cleared(test.sink->arg);
    wait_batch(&test, 1);
    end_replay(&test);
    tell_blocks(&test, BLOCKS); /* 33 KiB: the queue never takes them */
    wait_batch(&test, 3);       /* 2 is left out */
    IS_EVENT(&test, CLEARED);
    end_replay(&test);
    ask(&test, 1);
    assert_int_equal(next_sequence(&test), 1);
    assert_int_equal(next_sequence(&test), 3);
    end_replay(&test);
    assert_int_equal(metric(&test, "topkv_events_dropped_total"), 1);
    assert_int_equal(metric(&test, "topkv_event_losses_total"), 1);
    /* Then it goes on. */
    tell_blocks(&test, 1);
    wait_batch(&test, 4);
    stop(&test);
}

static void few_are_kept(void **state)
{
    enum {
        LAST = 100
    };
    struct test test;
    uint64_t first, at;

    (void)state;
    start(&test, &(struct kvs_event_feed_config){.buffer_bytes = 2000});
    for (uint64_t i = 1; i <= LAST; i++) {
        test.sink->cleared(test.sink->arg);
        wait_batch(&test, i);
        end_replay(&test);
    }
    ask(&test, 0);
    first = next_sequence(&test);
    /* 35 bytes each, and what the feed needs to know of it. */
    assert_true(first > LAST - 2000 / 35 && first < LAST - 5);
    for (at = first + 1; at <= LAST; at++)
        assert_int_equal(next_sequence(&test), at);
    end_replay(&test);
    stop(&test);
}

/* Far more than its queue and the network hold waits for a reader that takes its time. */
static void slow_replay_is_complete(void **state)
{
    enum {
        EVENTS = 2000
    };
    struct test test;
    uint64_t last = 0, sequence;
    size_t bytes = 0;

    (void)state;
    start(&test,
          &(struct kvs_event_feed_config){.buffer_bytes = 256 << 20, .queue_bytes = 256 << 20});
    for (unsigned i = 0; i < EVENTS; i++)
        tell_blocks(&test, BLOCKS);
    while (metric(&test, "topkv_event_queue_bytes") > 0)
        zmq_poll(NULL, 0, 1);
    ask(&test, 0);
    assert_int_equal(next_sequence(&test), 0);
    zmq_poll(NULL, 0, 500); /* nothing is taken meanwhile */
    bytes = 0;
    while ((sequence = next_sequence(&test)) != UINT64_MAX) {
        assert_int_equal(sequence, last + 1);
        last = sequence;
        bytes += zmq_msg_size(&test.frames[3]);
    }
    assert_true(last > 512 && bytes > EVENTS * BLOCKS * (18 + KV_BLOCK_TOKENS));
    stop(&test);
}

static void noise_is_ignored(void **state)
{
    static char large[4096];
    struct test test;

    (void)state;
    start(&test, &(struct kvs_event_feed_config){.buffer_bytes = 1 << 20});
    wait_batch(&test, 0);
    end_replay(&test);
    zmq_send(test.reader, "", 0, 0);
    zmq_send(test.reader, "12345678", 8, 0);
    zmq_send(test.reader, "", 0, ZMQ_SNDMORE);
    zmq_send(test.reader, "1234567", 7, 0);
    zmq_send(test.reader, "x", 1, ZMQ_SNDMORE);
    zmq_send(test.reader, "12345678", 8, 0);
    for (int i = 0; i < 100; i++)
        zmq_send(test.reader, "\0\0\0\0\0\0\0\0", 8, i < 99 ? ZMQ_SNDMORE : 0);
    wait_batch(&test, 0);
    end_replay(&test);
    /* One that is too long ends the connection; it comes back. */
    zmq_send(test.reader, "", 0, ZMQ_SNDMORE);
    zmq_send(test.reader, large, sizeof(large), 0);
    stop(&test);
    start(&test, &(struct kvs_event_feed_config){.buffer_bytes = 1 << 20});
    wait_batch(&test, 0);
    stop(&test);
}

static void endpoints(void **state)
{
    static const struct {
        const char *endpoint, *replay;
        kv_status_t status;
        const char *detail;
    } cases[] = {
        {"tcp://127.0.0.1:7403", "", KV_OK, ""},
        {"tcp://*:7403", "tcp://[::1]:7404", KV_OK, ""},
        {"tcp://lo:0", "", KV_OK, ""},
        {"127.0.0.1:7403", "", KV_INVALID, "events: not tcp://HOST:PORT: 127.0.0.1:7403"},
        {"ipc:///tmp/x", "", KV_INVALID, "events: not tcp://HOST:PORT: ipc:///tmp/x"},
        {"tcp://127.0.0.1", "", KV_INVALID, "events: not HOST:PORT: 127.0.0.1"},
        {"tcp://*:0", "tcp://*:65536", KV_INVALID, "events-replay: not HOST:PORT: *:65536"},
        {"tcp://no.such.host:1", "", KV_INVALID,
         "events: neither an IP address, an interface nor *: no.such.host"},
    };
    char detail[256];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct kvs_event_feed_config config = {
            .endpoint = cases[i].endpoint, .replay_endpoint = cases[i].replay, .topic = ""};

        detail[0] = 0;
        assert_int_equal(kvs_event_feed_check(&config, detail, sizeof(detail)),
                         cases[i].status);
        assert_string_equal(detail, cases[i].detail);
    }
}

static void port_in_use(void **state)
{
    struct kvs_event_feed_config config = {.replay_endpoint = "", .topic = ""};
    char detail[256], expected[256];
    struct kvs_event_feed *feed = NULL;
    struct test test;

    (void)state;
    start(&test, &(struct kvs_event_feed_config){.buffer_bytes = 1 << 20});
    config.endpoint = kvs_event_feed_endpoint(test.feed);
    assert_true(kvs_event_feed_is_local(test.feed));
    assert_int_equal(kvs_event_feed_create(&config, &feed, detail, sizeof(detail)), KV_IO);
    snprintf(expected, sizeof(expected), "events: %s: Address already in use", config.endpoint);
    assert_string_equal(detail, expected);
    stop(&test);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_of_events),  cmocka_unit_test(bytes_of_a_tenant),
        cmocka_unit_test(names_as_numbers), cmocka_unit_test(loss_is_told),
        cmocka_unit_test(few_are_kept),     cmocka_unit_test(slow_replay_is_complete),
        cmocka_unit_test(noise_is_ignored), cmocka_unit_test(endpoints),
        cmocka_unit_test(port_in_use),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
