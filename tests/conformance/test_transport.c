/* test_transport.c - what every row of the table of transports must do.
 *
 * The suite knows no row.  main() runs it over the one that is named: two ports in one process,
 * driven by this thread, or by two, or one of them in a child process that is then killed.  All
 * data is made from numbers in the header and checked on arrival, byte by byte.
 */
#include "kvserver/net/transport.h"

#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"
#include "kvserver/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    WAIT_US = 120 * 1000 * 1000, /* then a wait has failed; nothing here takes as long */
    DATA_BYTES_MAX = 5 << 20,
    HELD_MAX = 64,
    CLOSE_STEPS = 8, /* and more than UCX takes to connect, or to close */
    ADDRESS_BYTES_MAX = 4096,
    PAGE_BYTES = 4096,
    SKIPPED = 77,
};

/* What the suite runs over. */
static struct subject {
    const char *name;
    const struct kv_transport_ops *row;
    const char *transports;
    enum kv_channel_mode mode;
    bool has_processes; /* reaches other processes */
    bool trusts_peers;
} subject;

static const struct subject subjects[] = {
    {"loopback", &kv_transport_loopback, NULL, KV_CHANNEL_NETWORK, false, false},
    {"loopback_shared", &kv_transport_loopback, NULL, KV_CHANNEL_SHARED, false, false},
#ifdef KV_WITH_UCX
    {"tcp", &kv_transport_ucx, "tcp", KV_CHANNEL_NETWORK, true, false},
    {"shm", &kv_transport_ucx, "shm", KV_CHANNEL_SHARED, true, true},
    {"shm_moved", &kv_transport_ucx, "shm", KV_CHANNEL_SHARED, true, false},
    {"auto", &kv_transport_ucx, "auto", KV_CHANNEL_NETWORK, true, false},
    {"auto_shared", &kv_transport_ucx, "auto", KV_CHANNEL_SHARED, true, true},
#endif
};

static struct kv_transport *transport;
extern char **environ;

/* Data and headers */

struct test_header {
    uint64_t seed;
    uint64_t data_bytes;
    uint64_t wants_echo;
};

static void fill(unsigned char *data, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = kv_mix64(seed + i);

        memcpy(data + i, &word, bytes - i < 8 ? bytes - i : 8);
    }
}

static bool is_filled(const unsigned char *data, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = kv_mix64(seed + i);

        if (memcmp(data + i, &word, bytes - i < 8 ? bytes - i : 8) != 0)
            return false;
    }
    return true;
}

/* One end of a conversation: a port, and a channel to the other. */

enum answer {
    RECEIVE, /* into `n_pieces` pieces */
    HOLD,
    REFUSE,
};

struct end {
    struct kv_port *port;
    struct kv_channel *channel;
    enum answer answer;
    unsigned n_pieces;

    unsigned n_received; /* whole and right */
    unsigned n_wrong;
    unsigned n_failed;
    uint64_t bytes_received;
    unsigned n_ended; /* receives, in any way, after the call */
    unsigned n_late;  /* receives of prompt data that were not over at once */
    struct kv_incoming *held[HELD_MAX];
    struct test_header held_headers[HELD_MAX];
    unsigned n_held;
};

struct receipt {
    struct end *end;
    struct test_header header;
    unsigned char *data;
    unsigned n_pieces;
    bool over;
    kv_status_t status;
};

struct echo {
    struct test_header header;
    size_t data_bytes;
    unsigned char data[];
};

static void free_echo(void *arg, kv_status_t status)
{
    (void)status;
    free(arg);
}

static void send_echo(struct end *end, const struct test_header *header, const void *data)
{
    struct echo *echo = malloc(sizeof(*echo) + header->data_bytes);
    kv_status_t status;

    if (echo == NULL)
        abort();
    echo->header = *header;
    echo->header.wants_echo = 0;
    if (header->data_bytes > 0)
        memcpy(echo->data, data, header->data_bytes);
    status = kv_channel_send(end->channel, &echo->header, sizeof(echo->header), echo->data,
                             header->data_bytes, free_echo, echo);
    if (status != KV_IN_PROGRESS)
        free(echo);
    if (status < 0)
        end->n_wrong++;
}

static void
take(struct end *end, const struct test_header *header, const void *data, size_t data_bytes)
{
    if (data_bytes != header->data_bytes || !is_filled(data, data_bytes, header->seed)) {
        end->n_wrong++;
        return;
    }
    end->n_received++;
    end->bytes_received += data_bytes;
    if (header->wants_echo)
        send_echo(end, header, data);
}

static void on_message(
    void *owner, const void *header, size_t header_bytes, const void *data, size_t data_bytes)
{
    struct end *end = owner;
    struct test_header copy;

    if (header_bytes < sizeof(copy)) {
        end->n_wrong++;
        return;
    }
    memcpy(&copy, header, sizeof(copy));
    if (!is_filled((const unsigned char *)header + sizeof(copy), header_bytes - sizeof(copy),
                   ~copy.seed))
        end->n_wrong++;
    take(end, &copy, data, data_bytes);
}

static void end_receipt(struct receipt *receipt)
{
    struct end *end = receipt->end;
    size_t bytes = receipt->header.data_bytes;
    size_t piece = bytes / receipt->n_pieces;
    unsigned char *whole = receipt->data;

    /* The pieces lie one byte apart: close the gaps. */
    for (unsigned i = 1; i < receipt->n_pieces; i++)
        memmove(whole + i * piece, whole + i * (piece + 1),
                i == receipt->n_pieces - 1 ? bytes - i * piece : piece);
    take(end, &receipt->header, whole, bytes);
    free(receipt->data);
    free(receipt);
}

static void on_received(void *arg, kv_status_t status)
{
    struct receipt *receipt = arg;

    receipt->end->n_ended++;
    if (status == KV_OK) {
        end_receipt(receipt);
        return;
    }
    receipt->end->n_failed++;
    free(receipt->data);
    free(receipt);
}

/* Returns what kv_incoming_receive() does; a failure that comes later counts in n_failed. */
static kv_status_t
receive(struct end *end, const struct test_header *header, struct kv_incoming *incoming)
{
    struct receipt *receipt = calloc(1, sizeof(*receipt));
    unsigned n_pieces = end->n_pieces > 0 ? end->n_pieces : 1;
    size_t piece = header->data_bytes / n_pieces;
    struct kv_iov iov[KV_IOV_MAX];
    kv_status_t status;

    if (receipt == NULL)
        abort();
    receipt->end = end;
    receipt->header = *header;
    receipt->n_pieces = n_pieces;
    receipt->data = malloc(header->data_bytes + n_pieces);
    if (receipt->data == NULL)
        abort();
    for (unsigned i = 0; i < n_pieces; i++) {
        iov[i].base = receipt->data + i * (piece + 1);
        iov[i].bytes = i == n_pieces - 1 ? header->data_bytes - i * piece : piece;
    }
    status = kv_incoming_receive(incoming, iov, n_pieces, on_received, receipt);
    if (status == KV_IN_PROGRESS && header->data_bytes <= KV_TRANSPORT_PROMPT_BYTES)
        end->n_late++;
    if (status == KV_OK) {
        end_receipt(receipt);
    } else if (status < 0) {
        free(receipt->data);
        free(receipt);
    }
    return status;
}

static void on_incoming(void *owner,
                        const void *header,
                        size_t header_bytes,
                        size_t data_bytes,
                        struct kv_incoming *incoming)
{
    struct end *end = owner;
    struct test_header copy;

    if (header_bytes < sizeof(copy)) {
        end->n_wrong++;
        kv_incoming_refuse(incoming);
        return;
    }
    memcpy(&copy, header, sizeof(copy));
    if (copy.data_bytes != data_bytes)
        end->n_wrong++;
    if (end->answer == HOLD && end->n_held < HELD_MAX) {
        end->held[end->n_held] = incoming;
        end->held_headers[end->n_held++] = copy;
    } else if (end->answer == RECEIVE) {
        if (receive(end, &copy, incoming) < 0)
            end->n_failed++;
    } else {
        kv_incoming_refuse(incoming);
    }
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    struct end *end = owner;

    if (status >= 0 || channel_arg != &end->channel)
        end->n_wrong++;
    end->n_failed++;
}

static const struct kv_port_events events = {
    .message = on_message,
    .incoming = on_incoming,
    .failed = on_failed,
};

static void open_end(struct end *end)
{
    memset(end, 0, sizeof(*end));
    assert_int_equal(transport->ops->port_open(transport, &events, end, &end->port), KV_OK);
}

static kv_status_t connect_end(struct end *end, struct kv_port *peer)
{
    const void *address;
    size_t address_bytes;
    kv_status_t status;

    peer->ops->port_address(peer, &address, &address_bytes);
    assert_in_range(address_bytes, 1, ADDRESS_BYTES_MAX);
    status = end->port->ops->connect(end->port, address, address_bytes, subject.mode,
                                     &end->channel, &end->channel);
    return status;
}

static void close_channel(struct end *end)
{
    if (end->channel != NULL)
        end->channel->ops->channel_close(end->channel);
    end->channel = NULL;
}

static void close_end(struct end *end)
{
    if (end->port == NULL)
        return;
    close_channel(end);
    end->port->ops->port_close(end->port);
    end->port = NULL;
}

struct pair {
    struct end a, b;
};

static void open_pair(struct pair *pair)
{
    open_end(&pair->a);
    open_end(&pair->b);
    assert_int_equal(connect_end(&pair->a, pair->b.port), KV_OK);
    assert_int_equal(connect_end(&pair->b, pair->a.port), KV_OK);
}

static void close_pair(struct pair *pair)
{
    assert_int_equal(pair->a.n_wrong, 0);
    assert_int_equal(pair->b.n_wrong, 0);
    close_end(&pair->a);
    close_end(&pair->b);
}

static void step(struct pair *pair)
{
    if (pair->a.port != NULL)
        kv_port_progress(pair->a.port);
    if (pair->b.port != NULL)
        kv_port_progress(pair->b.port);
}

static uint64_t now_us(void)
{
    return kv_clock_now(&kv_clock_real);
}

/* Drives both ends until `condition`; fails where it does not come. */
#define DRIVE_UNTIL(pair, condition)                      \
    do {                                                  \
        uint64_t drive_begin = now_us();                  \
        while (!(condition)) {                            \
            step(pair);                                   \
            if (now_us() - drive_begin > WAIT_US)         \
                fail_msg("%s: has not come", #condition); \
        }                                                 \
    } while (0)

static void drive_for(struct pair *pair, uint64_t us)
{
    for (uint64_t begin = now_us(); now_us() - begin < us;)
        step(pair);
}

static void drive_one(struct end *end, unsigned n_steps)
{
    for (unsigned i = 0; i < n_steps; i++)
        kv_port_progress(end->port);
}

/* One send and how it ended. */
struct sending {
    struct test_header header;
    unsigned char *data;
    struct kv_mapping *mapping; /* of the data, if the transport allocated it: every fourth */
    struct kv_iov pieces[2];    /* of those that go as a pair: every other */
    _Atomic unsigned n_done;
    kv_status_t status;
};

static void on_done(void *arg, kv_status_t status)
{
    struct sending *sending = arg;

    sending->status = status;
    sending->n_done++;
}

/* `offset` makes the data unaligned. */
static kv_status_t
begin_send(struct end *end, struct sending *sending, uint64_t seed, size_t bytes, size_t offset)
{
    kv_status_t status;

    memset(sending, 0, sizeof(*sending));
    sending->header.seed = seed;
    sending->header.data_bytes = bytes;
    if (seed % 4 == 0) {
        void *memory;

        assert_int_equal(
            transport->ops->alloc(transport,
                                  (bytes + offset + PAGE_BYTES) & ~(size_t)(PAGE_BYTES - 1),
                                  &memory, &sending->mapping),
            KV_OK);
        sending->data = memory;
    } else {
        sending->data = malloc(bytes + offset + 8);
    }
    assert_non_null(sending->data);
    fill(sending->data + offset, bytes, seed);
    if (seed % 2 == 1 && bytes <= end->channel->pair_max) {
        size_t first = seed / 2 % (bytes + 1);

        sending->pieces[0] = (struct kv_iov){sending->data + offset, first};
        sending->pieces[1] = (struct kv_iov){sending->data + offset + first, bytes - first};
        status = kv_channel_send_pair(end->channel, &sending->header, sizeof(sending->header),
                                      sending->pieces, on_done, sending);
    } else {
        status = kv_channel_send(end->channel, &sending->header, sizeof(sending->header),
                                 sending->data + offset, bytes, on_done, sending);
    }
    if (status != KV_IN_PROGRESS)
        on_done(sending, status);
    return status;
}

static void end_send(struct sending *sending)
{
    assert_int_equal(sending->n_done, 1);
    if (sending->mapping != NULL)
        transport->ops->unmap(transport, sending->mapping);
    else
        free(sending->data);
    sending->data = NULL;
}

/* Tests */

static void describes_itself(void **state)
{
    struct pair pair;
    char text[256] = "";

    (void)state;
    transport->ops->describe(transport, text, sizeof(text));
    assert_int_not_equal(text[0], '\0');
    open_pair(&pair);
    print_message("%s: transport: %s\n", subject.name, text);
    pair.a.channel->ops->channel_describe(pair.a.channel, text, sizeof(text));
    assert_int_not_equal(text[0], '\0');
    print_message("%s: channel: %s\n", subject.name, text);
    if (subject.transports != NULL)
        assert_true((strstr(text, "tcp/") == NULL) == (subject.mode == KV_CHANNEL_SHARED));
    transport->ops->describe(transport, text, 4); /* what fits */
    assert_in_range(strlen(text), 0, 3);
    close_pair(&pair);
}

static void headers_only(void **state)
{
    unsigned char header[KV_TRANSPORT_HEADER_MAX + 1];
    struct pair pair;
    unsigned n = 0;

    (void)state;
    open_pair(&pair);
    for (size_t bytes = sizeof(struct test_header); bytes <= KV_TRANSPORT_HEADER_MAX; bytes++) {
        struct test_header front = {.seed = bytes};
        struct sending sending = {.n_done = 0};
        kv_status_t status;

        memcpy(header, &front, sizeof(front));
        fill(header + sizeof(front), bytes - sizeof(front), ~front.seed);
        status = kv_channel_send(pair.a.channel, header, bytes, NULL, 0, on_done, &sending);
        assert_in_range(status, KV_OK, KV_IN_PROGRESS);
        if (status == KV_IN_PROGRESS)
            DRIVE_UNTIL(&pair, sending.n_done == 1);
        n++;
    }
    DRIVE_UNTIL(&pair, pair.b.n_received == n);
    assert_int_equal(
        kv_channel_send(pair.a.channel, header, sizeof(header), NULL, 0, on_done, NULL),
        KV_INVALID);
    assert_int_equal(kv_channel_send_pair(
                         pair.a.channel, header, 16,
                         (struct kv_iov[2]){{header, 1}, {header, pair.a.channel->pair_max}},
                         on_done, NULL),
                     KV_INVALID);
    close_pair(&pair);
}

static void sizes_and_pieces(void **state)
{
    static const size_t sizes[] = {0,         1,
                                   100,       4096,
                                   8191,      8192,
                                   8193,      20000,
                                   65535,     65536,
                                   65537,     (192 << 10) - 1,
                                   192 << 10, (192 << 10) + 1,
                                   1 << 20,   DATA_BYTES_MAX};
    static const unsigned pieces[] = {1, 17, KV_IOV_MAX};
    struct pair pair;

    (void)state;
    open_pair(&pair);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (size_t j = 0; j < sizeof(pieces) / sizeof(pieces[0]); j++) {
            for (size_t offset = 0; offset < 4; offset += 3) {
                struct end *from = offset == 0 ? &pair.a : &pair.b;
                struct end *to = offset == 0 ? &pair.b : &pair.a;
                unsigned n = to->n_received;
                struct sending sending;

                to->n_pieces = pieces[j];
                assert_true(begin_send(from, &sending, i * 1000 + j, sizes[i], offset) >= 0);
                DRIVE_UNTIL(&pair, sending.n_done > 0 && to->n_received > n);
                assert_int_equal(sending.status, KV_OK);
                assert_int_equal(to->n_received, n + 1);
                end_send(&sending);
            }
        }
    }
    close_pair(&pair);
}

/* Both ways at once, up to `window` in flight each, from a fixed set of buffers. */
static void exchange(struct pair *pair, unsigned n_messages, unsigned window, size_t bytes_max)
{
    struct end *ends[2] = {&pair->a, &pair->b};
    struct sending *sendings = calloc(2 * window, sizeof(*sendings));
    unsigned n_sent[2] = {0, 0};
    unsigned n_before[2] = {pair->a.n_received, pair->b.n_received};
    uint64_t begin = now_us();
    struct kv_random random;

    assert_non_null(sendings);
    kv_random_init(&random, n_messages);
    for (;;) {
        bool busy = false;

        for (unsigned side = 0; side < 2; side++) {
            for (unsigned i = 0; i < window; i++) {
                struct sending *sending = &sendings[side * window + i];
                kv_status_t status;

                if (sending->data != NULL && sending->n_done == 0) {
                    busy = true;
                    continue;
                }
                if (sending->data != NULL)
                    end_send(sending);
                if (n_sent[side] == n_messages)
                    continue;
                status = begin_send(ends[side], sending, kv_random_next(&random),
                                    kv_random_below(&random, bytes_max + 1), n_sent[side] % 8);
                if (status == KV_BUSY) {
                    end_send(sending);
                    break;
                }
                assert_in_range(status, KV_OK, KV_IN_PROGRESS);
                n_sent[side]++;
                busy = true;
            }
        }
        if (!busy && pair->a.n_received == n_before[0] + n_messages &&
            pair->b.n_received == n_before[1] + n_messages)
            break;
        step(pair);
        if (now_us() - begin > WAIT_US)
            fail_msg("%u of %u messages arrived", pair->b.n_received, n_messages);
    }
    free(sendings);
}

static void many_small_both_ways(void **state)
{
    struct pair pair;

    (void)state;
    open_pair(&pair);
    exchange(&pair, 10000, 64, 100);
    close_pair(&pair);
}

static void many_mixed_both_ways(void **state)
{
    struct pair pair;

    (void)state;
    open_pair(&pair);
    pair.a.n_pieces = 3;
    exchange(&pair, 1000, 16, 400 << 10);
    close_pair(&pair);
}

/* A sender that gets far ahead of its receiver is held back or queued; nothing is lost. */
static void flood(void **state)
{
    enum {
        FLOOD = 6000
    };
    struct sending *sendings = calloc(FLOOD, sizeof(*sendings));
    struct pair pair;
    unsigned n = 0;

    (void)state;
    assert_non_null(sendings);
    open_pair(&pair);
    for (unsigned i = 0; i < FLOOD; i++) {
        kv_status_t status = begin_send(&pair.a, &sendings[i], i, 1000, 0);

        if (status == KV_BUSY)
            end_send(&sendings[i]);
        else
            n++;
    }
    assert_in_range(n, 64, FLOOD);
    DRIVE_UNTIL(&pair, pair.b.n_received == n);
    for (unsigned i = 0; i < FLOOD; i++) {
        if (sendings[i].data == NULL)
            continue;
        DRIVE_UNTIL(&pair, sendings[i].n_done == 1);
        assert_int_equal(sendings[i].status, KV_OK);
        end_send(&sendings[i]);
    }
    free(sendings);
    close_pair(&pair);
}

/* Data that is read from a peer's memory is read at most about 1 MiB at a time, however much has
 * been announced: whoever drives a port looks after others in between. */
static void reads_little_at_a_time(void **state)
{
    enum {
        N = 24,
        BYTES = 1 << 20,
    };
    struct sending sendings[N];
    struct pair pair;
    uint64_t most = 0;

    (void)state;
    if (subject.has_processes && subject.mode != KV_CHANNEL_SHARED)
        skip(); /* read from sockets */
    open_pair(&pair);
    for (unsigned round = 0; round < 4; round++) { /* UCX takes more at a time as it learns */
        for (unsigned i = 0; i < N; i++)
            assert_int_equal(begin_send(&pair.a, &sendings[i], 2 * i, BYTES, 0),
                             KV_IN_PROGRESS);
        drive_one(&pair.a, 1000);
        for (uint64_t begun = now_us(); pair.b.n_received < (round + 1) * N;) {
            const uint64_t before = pair.b.bytes_received;

            assert_true(now_us() - begun < WAIT_US);
            step(&pair);
            if (pair.b.bytes_received - before > most)
                most = pair.b.bytes_received - before;
        }
        for (unsigned i = 0; i < N; i++) {
            DRIVE_UNTIL(&pair, sendings[i].n_done == 1);
            assert_int_equal(sendings[i].status, KV_OK);
            end_send(&sendings[i]);
        }
    }
    print_message("%s: at most %llu KiB at a time\n", subject.name,
                  (unsigned long long)most >> 10);
    assert_true(most <= 2 * BYTES);
    close_pair(&pair);
}

/* A request's body comes before the data that belongs to it, whatever else is on its way; and
 * data of any size is read in pieces. */
static void reads_prompt_data_at_once(void **state)
{
    enum {
        N = 12,
        LARGE = 8 << 20,
    };
    struct sending sendings[N];
    struct pair pair;
    unsigned n_steps = 0;

    (void)state;
    if (subject.has_processes && !subject.trusts_peers)
        skip(); /* moved by UCX */
    open_pair(&pair);
    for (unsigned i = 0; i < N; i++)
        assert_int_equal(begin_send(&pair.a, &sendings[i], 2 * i,
                                    i % 2 == 0 ? LARGE : KV_TRANSPORT_PROMPT_BYTES, 0),
                         KV_IN_PROGRESS);
    drive_one(&pair.a, 1000);
    for (uint64_t begun = now_us(); pair.b.n_received < N; n_steps++) {
        assert_true(now_us() - begun < WAIT_US);
        step(&pair);
    }
    assert_int_equal(pair.b.n_late, 0);
    assert_true(n_steps >= N / 2 * (LARGE >> 20));
    for (unsigned i = 0; i < N; i++) {
        DRIVE_UNTIL(&pair, sendings[i].n_done == 1);
        assert_int_equal(sendings[i].status, KV_OK);
        end_send(&sendings[i]);
    }
    assert_int_equal(pair.b.n_wrong + pair.b.n_failed, 0);
    close_pair(&pair);
}

static void answered_later(void **state)
{
    struct sending sendings[3];
    struct pair pair;

    (void)state;
    open_pair(&pair);
    pair.b.answer = HOLD;
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(begin_send(&pair.a, &sendings[i], i, 1 << 20, 0), KV_IN_PROGRESS);
    DRIVE_UNTIL(&pair, pair.b.n_held == 3);
    drive_for(&pair, 20000);
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(sendings[i].n_done, 0);
    /* Not in the order of arrival. */
    for (unsigned i = 3; i-- > 0;)
        assert_true(receive(&pair.b, &pair.b.held_headers[i], pair.b.held[i]) >= 0);
    for (unsigned i = 0; i < 3; i++) {
        DRIVE_UNTIL(&pair, sendings[i].n_done == 1);
        assert_int_equal(sendings[i].status, KV_OK);
        end_send(&sendings[i]);
    }
    DRIVE_UNTIL(&pair, pair.b.n_received == 3);
    close_pair(&pair);
}

static void refused(void **state)
{
    struct sending sending;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    pair.b.answer = REFUSE;
    assert_int_equal(begin_send(&pair.a, &sending, 1, 1 << 20, 0), KV_IN_PROGRESS);
    DRIVE_UNTIL(&pair, sending.n_done == 1);
    assert_int_equal(sending.status, KV_OK);
    end_send(&sending);

    pair.b.answer = HOLD;
    assert_int_equal(begin_send(&pair.a, &sending, 2, 1 << 20, 0), KV_IN_PROGRESS);
    DRIVE_UNTIL(&pair, pair.b.n_held == 1);
    kv_incoming_refuse(pair.b.held[0]);
    DRIVE_UNTIL(&pair, sending.n_done == 1);
    assert_int_equal(sending.status, KV_OK);
    end_send(&sending);

    pair.b.answer = RECEIVE;
    exchange(&pair, 10, 4, 1 << 20);
    assert_int_equal(pair.b.n_received, 10);
    close_pair(&pair);
}

/* The peer's port goes away: every send ends, once. */
static void peer_closes(void **state)
{
    struct sending sendings[8];
    struct pair pair;

    (void)state;
    open_pair(&pair);
    exchange(&pair, 10, 4, 100);
    pair.b.answer = HOLD;
    for (unsigned i = 0; i < 8; i++)
        assert_true(begin_send(&pair.a, &sendings[i], i, i % 2 == 0 ? 1 << 20 : 100, 0) >= 0);
    DRIVE_UNTIL(&pair, pair.b.n_held >= 1);
    close_end(&pair.b);

    if (subject.mode == KV_CHANNEL_NETWORK) {
        DRIVE_UNTIL(&pair, pair.a.n_failed == 1);
        for (unsigned i = 0; i < 2; i++) {
            struct sending late;

            /* Nothing can be sent any more, and nothing is called for it later. */
            assert_int_equal(begin_send(&pair.a, &late, i, i << 20, 0), KV_UNREACHABLE);
            end_send(&late);
        }
    } else {
        drive_for(&pair, 20000);
    }
    close_channel(&pair.a);
    for (unsigned i = 0; i < 8; i++) {
        DRIVE_UNTIL(&pair, sendings[i].n_done == 1);
        end_send(&sendings[i]);
    }
    drive_for(&pair, 20000);
    for (unsigned i = 0; i < 8; i++)
        assert_int_equal(sendings[i].n_done, 1);
    close_pair(&pair);
}

/* The sender closes its channel: the sends end with KV_UNREACHABLE, and the receiver, who still
 * holds the offers, gets a failure and never the bytes that lie there now. */
static void sender_closes(void **state)
{
    struct sending sendings[3];
    struct pair pair;
    unsigned n_failed = 0;

    (void)state;
    open_pair(&pair);
    pair.b.answer = HOLD;
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(begin_send(&pair.a, &sendings[i], i, 1 << 20, 0), KV_IN_PROGRESS);
    DRIVE_UNTIL(&pair, pair.b.n_held == 3);
    close_channel(&pair.a);
    for (unsigned i = 0; i < 3; i++) {
        DRIVE_UNTIL(&pair, sendings[i].n_done == 1);
        assert_int_equal(sendings[i].status, KV_UNREACHABLE);
        memset(sendings[i].data, 0xee, 1 << 20);
    }
    pair.b.n_failed = 0; /* its channel to the one that went away may have failed too */
    if (receive(&pair.b, &pair.b.held_headers[0], pair.b.held[0]) < 0)
        n_failed++;
    kv_incoming_refuse(pair.b.held[1]);
    pair.b.n_pieces = 17;
    if (receive(&pair.b, &pair.b.held_headers[2], pair.b.held[2]) < 0)
        n_failed++;
    drive_for(&pair, 20000);
    close_channel(&pair.b);
    DRIVE_UNTIL(&pair, n_failed + pair.b.n_failed >= 2);
    assert_int_equal(pair.b.n_received, 0);
    for (unsigned i = 0; i < 3; i++)
        end_send(&sendings[i]);
    close_pair(&pair);
}

/* The sender's port closes with offers held by a receiver. */
static void sender_port_closes(void **state)
{
    struct sending sending;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    pair.b.answer = HOLD;
    assert_int_equal(begin_send(&pair.a, &sending, 1, 1 << 20, 0), KV_IN_PROGRESS);
    DRIVE_UNTIL(&pair, pair.b.n_held == 1);
    close_end(&pair.a);
    assert_int_equal(sending.status, KV_UNREACHABLE);
    end_send(&sending);
    drive_for(&pair, 20000);
    if (receive(&pair.b, &pair.b.held_headers[0], pair.b.held[0]) == KV_IN_PROGRESS) {
        close_channel(&pair.b);
        drive_for(&pair, 20000);
    }
    assert_int_equal(pair.b.n_received, 0);
    close_pair(&pair);
}

static void connects_again(void **state)
{
    struct pair pair;

    (void)state;
    open_pair(&pair);
    for (unsigned i = 0; i < 30; i++) {
        exchange(&pair, 20, 4, 100 << 10);
        close_channel(&pair.a);
        close_channel(&pair.b);
        drive_for(&pair, i % 3 == 0 ? 0 : 1000);
        assert_int_equal(connect_end(&pair.a, pair.b.port), KV_OK);
        assert_int_equal(connect_end(&pair.b, pair.a.port), KV_OK);
    }
    close_pair(&pair);
}

/* A port that was connected to connects back, and finds the first channel closed: at each step
 * that the two may have come to by then. */
static void closed_before_the_way_back(void **state)
{
    (void)state;
    for (unsigned i = 0; i < CLOSE_STEPS * CLOSE_STEPS; i++) {
        struct pair pair;

        open_end(&pair.a);
        open_end(&pair.b);
        assert_int_equal(connect_end(&pair.a, pair.b.port), KV_OK);
        drive_one(&pair.a, i / CLOSE_STEPS);
        close_channel(&pair.a);
        drive_one(&pair.a, CLOSE_STEPS);
        drive_one(&pair.b, i % CLOSE_STEPS);
        assert_int_equal(connect_end(&pair.b, pair.a.port), KV_OK);
        assert_int_equal(connect_end(&pair.a, pair.b.port), KV_OK);
        exchange(&pair, 4, 2, 1000);
        close_channel(&pair.b);
        drive_for(&pair, 1000);
        close_pair(&pair);
    }
}

/* One port that many lead to, as a server's. */
static void many_ports(void **state)
{
    enum {
        CLIENTS = 24
    };
    struct sending sendings[CLIENTS];
    struct end server;
    struct end *clients = calloc(CLIENTS, sizeof(*clients));
    uint64_t begin;

    (void)state;
    assert_non_null(clients);
    open_end(&server);
    for (unsigned i = 0; i < CLIENTS; i++) {
        open_end(&clients[i]);
        assert_int_equal(connect_end(&clients[i], server.port), KV_OK);
        assert_true(begin_send(&clients[i], &sendings[i], i, i * 20000, 0) >= 0);
    }
    begin = now_us();
    while (server.n_received < CLIENTS && now_us() - begin < WAIT_US) {
        kv_port_progress(server.port);
        for (unsigned i = 0; i < CLIENTS; i++)
            kv_port_progress(clients[i].port);
    }
    assert_int_equal(server.n_received, CLIENTS);
    for (unsigned i = 0; i < CLIENTS; i++) {
        while (sendings[i].n_done == 0 && now_us() - begin < WAIT_US)
            kv_port_progress(clients[i].port);
        end_send(&sendings[i]);
        close_end(&clients[i]);
    }
    assert_int_equal(server.n_wrong, 0);
    close_end(&server);
    free(clients);
}

static void bad_addresses(void **state)
{
    unsigned char copy[ADDRESS_BYTES_MAX];
    unsigned char garbage[ADDRESS_BYTES_MAX];
    const void *address;
    size_t address_bytes;
    struct kv_channel *channel = NULL;
    struct kv_random random;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    kv_random_init(&random, 7);
    pair.b.port->ops->port_address(pair.b.port, &address, &address_bytes);
    for (unsigned i = 0; i < 4000; i++) {
        size_t bytes = address_bytes;
        kv_status_t status;

        memcpy(copy, address, address_bytes);
        kv_random_fill(&random, garbage, sizeof(garbage));
        if (i % 4 == 0) {
            bytes = kv_random_below(&random, sizeof(garbage) + 1);
            memcpy(copy, garbage, bytes);
        } else if (i % 4 == 1) {
            bytes = kv_random_below(&random, address_bytes);
        } else if (i % 4 == 2) {
            copy[kv_random_below(&random, bytes)] ^= (unsigned char)(1 << (i / 4) % 8);
        } else {
            copy[bytes++] = 0;
        }
        status =
            pair.a.port->ops->connect(pair.a.port, copy, bytes, subject.mode, NULL, &channel);
        /* A flipped bit of a loopback address may name the other port, by its number. */
        if (status == KV_OK)
            channel->ops->channel_close(channel);
        else
            assert_true(status == KV_INVALID || status == KV_UNREACHABLE);
        if (subject.has_processes)
            assert_int_equal(status, KV_INVALID);
    }
    exchange(&pair, 10, 4, 1000);
    close_pair(&pair);
}

static void maps_memory(void **state)
{
    static unsigned char memory[1 << 16];
    struct kv_mapping *mapping = NULL;

    (void)state;
    assert_int_equal(
        transport->ops->map(transport, memory, sizeof(memory), KV_MEMORY_HOST, &mapping),
        KV_OK);
    transport->ops->unmap(transport, mapping);
    assert_int_equal(
        transport->ops->map(transport, memory, sizeof(memory), KV_MEMORY_CUDA, &mapping),
        KV_UNSUPPORTED);
}

/* Two threads */

struct other_thread {
    struct end end;
    _Atomic bool stop;
    _Atomic bool is_armed; /* about to sleep, or asleep: n_slept does not count that yet */
    _Atomic unsigned n_slept;
    bool sleeps;
};

static void run_other(void *arg)
{
    struct other_thread *other = arg;

    while (!other->stop) {
        int fd;

        if (kv_port_progress(other->end.port) > 0 || !other->sleeps)
            continue;
        if (other->end.port->ops->port_arm(other->end.port, &fd) != KV_OK)
            continue;
        other->is_armed = true;
        bool is_woken = fd >= 0 && kv_sleep_fds(&fd, 1, WAIT_US);
        other->is_armed = false;
        other->n_slept += is_woken;
    }
}

/* Asks the other thread for `n` echoes of up to `bytes_max` bytes.  `sleeper`: that thread,
 * which is to be asleep before each; NULL: it does not matter. */
static void ask_for_echoes(struct pair *pair,
                           unsigned n,
                           size_t bytes_max,
                           const struct other_thread *sleeper)
{
    struct sending sending;
    struct kv_random random;

    kv_random_init(&random, n);
    for (unsigned i = 0; i < n; i++) {
        size_t bytes = kv_random_below(&random, bytes_max + 1);
        unsigned n_received = pair->a.n_received;

        memset(&sending, 0, sizeof(sending));
        sending.header = (struct test_header){i, bytes, 1};
        sending.data = malloc(bytes + 8);
        assert_non_null(sending.data);
        fill(sending.data, bytes, i);
        if (sleeper != NULL)
            DRIVE_UNTIL(pair, sleeper->is_armed);
        if (kv_channel_send(pair->a.channel, &sending.header, sizeof(sending.header),
                            sending.data, bytes, on_done, &sending) == KV_OK)
            on_done(&sending, KV_OK);
        DRIVE_UNTIL(pair, sending.n_done == 1 && pair->a.n_received == n_received + 1);
        assert_int_equal(sending.status, KV_OK);
        end_send(&sending);
    }
}

static void
two_threads(struct other_thread *other, struct pair *pair, struct kv_thread **thread)
{
    memset(pair, 0, sizeof(*pair));
    memset(other, 0, sizeof(*other));
    open_end(&pair->a);
    open_end(&other->end);
    assert_int_equal(connect_end(&pair->a, other->end.port), KV_OK);
    assert_int_equal(connect_end(&other->end, pair->a.port), KV_OK);
    other->sleeps = true;
    assert_int_equal(kv_thread_start("other", run_other, other, thread), KV_OK);
}

static void echoes_between_threads(void **state)
{
    struct other_thread other;
    struct kv_thread *thread;
    struct pair pair;

    (void)state;
    two_threads(&other, &pair, &thread);
    ask_for_echoes(&pair, 2000, 1000, NULL);
    ask_for_echoes(&pair, 100, 300 << 10, NULL);
    other.stop = true;
    other.end.port->ops->port_wake(other.end.port);
    kv_thread_join(thread);
    assert_int_equal(other.end.n_wrong, 0);
    close_end(&other.end);
    close_pair(&pair);
}

static void sleeps_and_wakes(void **state)
{
    struct other_thread other;
    struct kv_thread *thread;
    struct pair pair;
    unsigned n_slept;

    (void)state;
    two_threads(&other, &pair, &thread);
    ask_for_echoes(&pair, 20, 100, &other);
    assert_in_range(other.n_slept, 5, 1 << 20);
    do {
        n_slept = other.n_slept;
        DRIVE_UNTIL(&pair, other.is_armed);
    } while (n_slept != other.n_slept);
    other.stop = true;
    other.end.port->ops->port_wake(other.end.port);
    kv_thread_join(thread);
    assert_true(other.n_slept > n_slept); /* woken, not over-slept */
    close_end(&other.end);
    close_pair(&pair);
}

/* A wake that comes before the arm is not lost. */
static void wake_before_arm(void **state)
{
    struct pair pair;
    int fd = -1;

    (void)state;
    open_pair(&pair);
    exchange(&pair, 5, 1, 100);
    for (unsigned i = 0; i < 3; i++) {
        kv_status_t status = KV_BUSY;

        /* Whatever is left to do is done first. */
        for (uint64_t begin = now_us(); status == KV_BUSY && now_us() - begin < WAIT_US;) {
            step(&pair);
            status = pair.a.port->ops->port_arm(pair.a.port, &fd);
        }
        assert_int_equal(status, KV_OK);
        kv_port_progress(pair.a.port);
        pair.a.port->ops->port_wake(pair.a.port);
        status = pair.a.port->ops->port_arm(pair.a.port, &fd);
        assert_true(status == KV_BUSY || (status == KV_OK && kv_sleep_fds(&fd, 1, WAIT_US)));
    }
    close_pair(&pair);
}

/* The bytes of shared memory that this process has mapped. */
static uint64_t shared_bytes(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    uint64_t bytes = 0;
    char line[512];

    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps) != NULL) {
        uint64_t from, to;

        if ((strstr(line, "/dev/shm/") != NULL || strstr(line, "posix") != NULL) &&
            sscanf(line, "%" SCNx64 "-%" SCNx64, &from, &to) == 2)
            bytes += to - from;
    }
    fclose(maps);
    return bytes;
}

/* A node has 1,000 clients, and each of them a port. */
static void ports_take_little_shared_memory(void **state)
{
    const uint64_t before = shared_bytes();
    struct end ends[8];

    (void)state;
    for (unsigned i = 0; i < 8; i++)
        open_end(&ends[i]);
    assert_in_range(shared_bytes() - before, 0, 8 << 20);
    for (unsigned i = 0; i < 8; i++)
        ends[i].port->ops->port_close(ends[i].port);
}

/* Closes and sends race with a receiver that is copying. */
static void closes_while_received(void **state)
{
    enum {
        ROUNDS = 100,
        WINDOW = 4
    };

    (void)state;
    for (unsigned round = 0; round < ROUNDS; round++) {
        struct sending sendings[WINDOW];
        struct other_thread other;
        struct kv_thread *thread;
        struct pair pair;

        two_threads(&other, &pair, &thread);
        for (unsigned i = 0; i < WINDOW; i++)
            assert_true(begin_send(&pair.a, &sendings[i], i, 1 << 20, 0) >= 0);
        for (uint64_t begin = now_us(); now_us() - begin < round * 20;)
            kv_port_progress(pair.a.port);
        if (round % 2 == 0) {
            close_channel(&pair.a);
            for (unsigned i = 0; i < WINDOW; i++)
                DRIVE_UNTIL(&pair, sendings[i].n_done == 1);
        }
        close_end(&pair.a);
        for (unsigned i = 0; i < WINDOW; i++) {
            memset(sendings[i].data, 0xee, 1 << 20);
            end_send(&sendings[i]);
        }
        other.stop = true;
        other.end.port->ops->port_wake(other.end.port);
        kv_thread_join(thread);
        assert_int_equal(other.end.n_wrong, 0);
        close_end(&other.end);
        close_pair(&pair);
    }
}

/* How many descriptors of this process are memory files, its own or a peer's. */
static unsigned n_memory_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    unsigned n = 0;

    assert_non_null(folder);
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char name[64] = "";

        if (readlinkat(dirfd(folder), entry->d_name, name, sizeof(name) - 1) > 0 &&
            strstr(name, "memfd:topkv") != NULL)
            n++;
    }
    closedir(folder);
    return n;
}

/* Connects to a port whose address names another process, as a peer may make it. */
static void connect_as_other_process(struct end *end, struct kv_port *peer)
{
    enum {
        CRC_AT = 4, /* of all that follows it */
        PROCESS_AT = 8,
    };
    unsigned char address[ADDRESS_BYTES_MAX];
    const void *own;
    size_t bytes;
    uint32_t number = (uint32_t)getppid();

    peer->ops->port_address(peer, &own, &bytes);
    memcpy(address, own, bytes);
    memcpy(address + PROCESS_AT, &number, sizeof(number));
    number = kv_crc32c(0, address + PROCESS_AT, bytes - PROCESS_AT);
    memcpy(address + CRC_AT, &number, sizeof(number));
    assert_int_equal(end->port->ops->connect(end->port, address, bytes, subject.mode,
                                             &end->channel, &end->channel),
                     KV_OK);
}

static void send_one(struct pair *pair, uint64_t seed)
{
    const unsigned n = pair->b.n_received;
    struct sending sending;

    assert_true(begin_send(&pair->a, &sending, seed, 100000, 0) >= 0);
    DRIVE_UNTIL(pair, sending.n_done == 1 && pair->b.n_received > n);
    assert_int_equal(sending.status, KV_OK);
    end_send(&sending);
}

/* Those that are no longer needed are closed by a thread of their own. */
static void wait_until_closed(void)
{
    for (uint64_t begun = now_us(); n_memory_files() > 1;)
        assert_true(now_us() - begun < WAIT_US);
}

/* Files are opened of processes that the port has a channel to, and of no others; none stays
 * open after its channel.  Data that is offered in another one arrives nevertheless. */
static void opens_files_of_peers_alone(void **state)
{
    struct pair pair;

    (void)state;
    if (subject.mode != KV_CHANNEL_SHARED || !subject.trusts_peers)
        skip();
    wait_until_closed();
    open_end(&pair.a);
    open_end(&pair.b);
    assert_int_equal(connect_end(&pair.a, pair.b.port), KV_OK);
    connect_as_other_process(&pair.b, pair.a.port);
    for (unsigned i = 0; i < 8; i++)
        send_one(&pair, i);
    assert_in_range(n_memory_files(), 0, 1); /* this process's own */
    close_pair(&pair);

    open_pair(&pair);
    send_one(&pair, 0);
    assert_in_range(n_memory_files(), 0, 2);
    close_channel(&pair.b);
    wait_until_closed();
    close_pair(&pair);
}

/* What is received when neither end has a channel any more ends at once: nobody moves it. */
static void received_after_the_channels(void **state)
{
    struct sending sending;
    struct pair pair;

    (void)state;
    if (subject.mode != KV_CHANNEL_SHARED || !subject.trusts_peers)
        skip();
    open_pair(&pair);
    pair.b.answer = HOLD;
    assert_int_equal(begin_send(&pair.a, &sending, 1, 100000, 0), KV_IN_PROGRESS);
    DRIVE_UNTIL(&pair, pair.b.n_held == 1);
    close_channel(&pair.a);
    close_channel(&pair.b);
    assert_int_equal(receive(&pair.b, &pair.b.held_headers[0], pair.b.held[0]), KV_UNREACHABLE);
    DRIVE_UNTIL(&pair, sending.n_done == 1);
    end_send(&sending);
    close_pair(&pair);
}

/* Another process */

static bool read_all(int fd, void *data, size_t bytes)
{
    unsigned char *at = data;

    while (bytes > 0) {
        ssize_t n = read(fd, at, bytes);

        if (n <= 0)
            return false;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

static void write_address(int fd, struct kv_port *port)
{
    const void *address;
    size_t bytes;

    port->ops->port_address(port, &address, &bytes);
    if (write(fd, &bytes, sizeof(bytes)) != (ssize_t)sizeof(bytes) ||
        write(fd, address, bytes) != (ssize_t)bytes)
        abort();
}

static kv_status_t read_address_and_connect(int fd, struct end *end)
{
    unsigned char address[ADDRESS_BYTES_MAX];
    size_t bytes;

    if (!read_all(fd, &bytes, sizeof(bytes)) || bytes > sizeof(address) ||
        !read_all(fd, address, bytes))
        abort();
    return end->port->ops->connect(end->port, address, bytes, subject.mode, &end->channel,
                                   &end->channel);
}

/* The child: echoes, or holds what is large, or sends large data, until it is killed or its
 * input ends. */
static int run_child(const char *task)
{
    static struct sending sending;
    static struct end end;

    open_end(&end);
    end.answer = strcmp(task, "hold") == 0 ? HOLD : RECEIVE;
    write_address(STDOUT_FILENO, end.port);
    if (read_address_and_connect(STDIN_FILENO, &end) != KV_OK)
        return 1;
    if (strcmp(task, "send") == 0 && begin_send(&end, &sending, 0, 1 << 20, 0) < 0)
        return 1;
    for (;;)
        kv_port_progress(end.port);
}

struct child {
    pid_t process;
    int to, from;
};

static void start_child(struct child *child, const char *task)
{
    char *const arguments[] = {(char *)"child", (char *)subject.name, (char *)task, NULL};
    posix_spawn_file_actions_t actions;
    int to[2], from[2];

    assert_int_equal(pipe(to), 0);
    assert_int_equal(pipe(from), 0);
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, to[1]);
    posix_spawn_file_actions_addclose(&actions, from[0]);
    assert_int_equal(
        posix_spawn(&child->process, "/proc/self/exe", &actions, NULL, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    child->to = to[1];
    child->from = from[0];
}

static void kill_child(struct child *child)
{
    int status;

    assert_int_equal(kill(child->process, SIGKILL), 0);
    assert_int_equal(waitpid(child->process, &status, 0), child->process);
    close(child->to);
    close(child->from);
}

static void meet_child(struct pair *pair, struct child *child, const char *task)
{
    memset(pair, 0, sizeof(*pair));
    start_child(child, task);
    open_end(&pair->a);
    write_address(child->to, pair->a.port);
    assert_int_equal(read_address_and_connect(child->from, &pair->a), KV_OK);
}

static void talks_to_child(void **state)
{
    struct child child;
    struct pair pair;

    (void)state;
    if (!subject.has_processes)
        skip();
    meet_child(&pair, &child, "echo");
    ask_for_echoes(&pair, 1000, 1000, 0);
    pair.a.n_pieces = 17;
    ask_for_echoes(&pair, 100, 1 << 20, 0);
    kill_child(&child);
    close_pair(&pair);
}

/* The peer is killed with sends of every kind in flight. */
static void peer_is_killed(void **state)
{
    struct sending sendings[32];
    struct child child;
    struct pair pair;

    (void)state;
    if (!subject.has_processes)
        skip();
    for (unsigned round = 0; round < 3; round++) {
        uint64_t begin;

        meet_child(&pair, &child, round > 0 ? "hold" : "echo");
        ask_for_echoes(&pair, 10, 1000, 0);
        for (unsigned i = 0; i < 32; i++)
            assert_true(begin_send(&pair.a, &sendings[i], i, i % 4 * 300000 + i, 0) >= 0);
        if (round > 1)
            drive_for(&pair, 10000);
        kill_child(&child);
        begin = now_us();
        if (subject.mode == KV_CHANNEL_NETWORK) {
            DRIVE_UNTIL(&pair, pair.a.n_failed == 1);
        } else {
            /* Nobody need report it; whether sends go on or fail, closing ends them. */
            drive_for(&pair, 10000);
            for (unsigned i = 0; i < 100; i++) {
                struct sending late;
                kv_status_t status = begin_send(&pair.a, &late, i, 100, 0);

                if (status == KV_IN_PROGRESS) {
                    drive_for(&pair, 3 * 1000 * 1000);
                    close_channel(&pair.a);
                    DRIVE_UNTIL(&pair, late.n_done == 1);
                }
                end_send(&late);
                if (status != KV_OK)
                    break;
            }
        }
        print_message("%s: round %u: %u failures reported after %.3f s\n", subject.name, round,
                      pair.a.n_failed, (double)(now_us() - begin) / 1e6);
        close_channel(&pair.a);
        for (unsigned i = 0; i < 32; i++) {
            DRIVE_UNTIL(&pair, sendings[i].n_done == 1);
            end_send(&sendings[i]);
        }
        close_pair(&pair);
    }
}

static void await_sleep(struct pair *pair)
{
    struct kv_port *port = pair->a.port;
    kv_status_t status = KV_BUSY;
    int fd = -1;

    for (uint64_t begin = now_us(); status == KV_BUSY && now_us() - begin < WAIT_US;) {
        step(pair);
        status = port->ops->port_arm(port, &fd);
    }
    assert_int_equal(status, KV_OK);
}

/* Kills a stopped peer whose queue is full, and closes the channel.  All sends end. */
static void kill_with_a_full_queue(struct pair *pair, struct child *child, size_t bytes)
{
    enum {
        N_SENDINGS = 400 /* more than a queue has room for */
    };
    static struct sending sendings[N_SENDINGS];
    unsigned n_ended;

    for (unsigned i = 0; i < N_SENDINGS; i++)
        assert_true(begin_send(&pair->a, &sendings[i], 2, bytes, 0) >= 0);
    kill_child(child);
    drive_for(pair, 10000);
    close_channel(&pair->a);
    do {
        n_ended = 0;
        step(pair);
        for (unsigned i = 0; i < N_SENDINGS; i++)
            n_ended += sendings[i].n_done;
    } while (n_ended < N_SENDINGS);
    for (unsigned i = 0; i < N_SENDINGS; i++)
        end_send(&sendings[i]);
}

/* What it had of messages is no reason to stay awake for ever. */
static void killed_with_a_full_queue(void **state)
{
    struct child child;
    struct pair pair;

    (void)state;
    if (!subject.has_processes)
        skip();
    for (unsigned i = 0; i < 2; i++) {
        meet_child(&pair, &child, "echo");
        ask_for_echoes(&pair, 10, 1000, 0);
        assert_int_equal(kill(child.process, SIGSTOP), 0);
        kill_with_a_full_queue(&pair, &child, i == 0 ? 100 : 20000);
        await_sleep(&pair);
        close_pair(&pair);
    }
}

/* It is killed before its data has come: nothing stays with the transport for ever. */
static void sender_is_killed_with_a_full_queue(void **state)
{
    struct child child;
    struct pair pair;
    kv_status_t status;

    (void)state;
    if (!subject.has_processes)
        skip();
    meet_child(&pair, &child, "send");
    pair.a.answer = HOLD;
    DRIVE_UNTIL(&pair, pair.a.n_held == 1);
    assert_int_equal(kill(child.process, SIGSTOP), 0);
    status = receive(&pair.a, &pair.a.held_headers[0], pair.a.held[0]);
    drive_for(&pair, 10000);
    kill_with_a_full_queue(&pair, &child, 100);
    if (status == KV_IN_PROGRESS)
        DRIVE_UNTIL(&pair, pair.a.n_ended == 1);
    await_sleep(&pair);
    close_pair(&pair);
}

/* Configuration */

static void bad_configurations(void **state)
{
    struct kv_transport *other = NULL;
    char detail[256] = "";

    (void)state;
    if (subject.transports == NULL)
        skip();
    assert_int_equal(
        subject.row->open(&(struct kv_transport_config){.transports = "carrier pigeon"}, &other,
                          detail, sizeof(detail)),
        KV_INVALID);
    assert_non_null(strstr(detail, "carrier pigeon"));
    assert_int_equal(subject.row->open(&(struct kv_transport_config){.transports = "tcp",
                                                                     .devices = "lo,nodev9"},
                                       &other, detail, sizeof(detail)),
                     KV_UNSUPPORTED);
    assert_non_null(strstr(detail, "nodev9"));
    assert_null(other);
}

static int open_transport(void **state)
{
    struct kv_transport_config config = {.transports = subject.transports,
                                         .trusts_peers = subject.trusts_peers};
    char detail[256] = "";

    (void)state;
    if (subject.row->open(&config, &transport, detail, sizeof(detail)) == KV_OK)
        return 0;
    print_error("%s: %s\n", subject.name, detail);
    return -1;
}

static int close_transport(void **state)
{
    (void)state;
    transport->ops->close(transport);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(describes_itself),
        cmocka_unit_test(headers_only),
        cmocka_unit_test(sizes_and_pieces),
        cmocka_unit_test(many_small_both_ways),
        cmocka_unit_test(many_mixed_both_ways),
        cmocka_unit_test(flood),
        cmocka_unit_test(reads_little_at_a_time),
        cmocka_unit_test(reads_prompt_data_at_once),
        cmocka_unit_test(answered_later),
        cmocka_unit_test(refused),
        cmocka_unit_test(peer_closes),
        cmocka_unit_test(sender_closes),
        cmocka_unit_test(sender_port_closes),
        cmocka_unit_test(connects_again),
        cmocka_unit_test(closed_before_the_way_back),
        cmocka_unit_test(many_ports),
        cmocka_unit_test(bad_addresses),
        cmocka_unit_test(maps_memory),
        cmocka_unit_test(echoes_between_threads),
        cmocka_unit_test(sleeps_and_wakes),
        cmocka_unit_test(wake_before_arm),
        cmocka_unit_test(ports_take_little_shared_memory),
        cmocka_unit_test(closes_while_received),
        cmocka_unit_test(opens_files_of_peers_alone),
        cmocka_unit_test(received_after_the_channels),
        cmocka_unit_test(talks_to_child),
        cmocka_unit_test(peer_is_killed),
        cmocka_unit_test(killed_with_a_full_queue),
        cmocka_unit_test(sender_is_killed_with_a_full_queue),
        cmocka_unit_test(bad_configurations),
    };
    bool is_child = argc == 3 && strcmp(argv[0], "child") == 0;
    int n_failed = 0;
    bool found = false;

    if (argc > 2 && !is_child)
        cmocka_set_test_filter(argv[2]); /* "peer_*" */
    for (size_t i = 0; i < sizeof(subjects) / sizeof(subjects[0]); i++) {
        /* Without a name: all of them. */
        if (argc > 1 && strcmp(argv[1], subjects[i].name) != 0)
            continue;
        subject = subjects[i];
        found = true;
        if (subject.transports != NULL && strcmp(subject.transports, "shm") != 0 &&
            access("/sys/class/net", F_OK) != 0) {
            printf("%s: skipped: no /sys/class/net: UCX has no tcp here\n", subject.name);
            if (argc > 1)
                return SKIPPED;
            continue;
        }
        if (is_child)
            return open_transport(NULL) == 0 ? run_child(argv[2]) : 1;
        n_failed +=
            cmocka_run_group_tests_name(subject.name, tests, open_transport, close_transport);
    }
    if (!found) {
        printf("no row named %s in this build\n", argv[1]);
        return SKIPPED;
    }
    return n_failed == 0 ? 0 : 1;
}
