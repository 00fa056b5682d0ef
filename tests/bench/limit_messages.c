/* The limit of messages: two processes, the table of transports, and nothing above it.
 *
 * The same row, channel mode, sizes and window as the store's data path.  A request names how
 * many bytes it wants back.  Payload is sent from cold memory and put into cold memory, as rows
 * are; it is neither checked nor looked up.
 */
#include "tests/bench/bench.h"

#include "kvserver/net/transport.h"

#include <assert.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SLOTS = 64, /* messages in flight, either way */
    ADDRESS_MAX = 4096,
    SEND_ROUNDS = 200000,
};

enum bare_kind {
    BARE_REQUEST = 1,
    BARE_REPLY,
    BARE_STOP, /* the peer sleeps until it is called again */
};

struct bare_header {
    uint32_t kind;
    uint32_t back_bytes;
    uint64_t number;
    uint8_t rest[48];
};
static_assert(sizeof(struct bare_header) == 64, "the smallest message is 64 bytes");

/* A message being sent, or data being received. */
struct slot {
    struct end *end;
    struct bare_header header;
    bool in_use;
};

/* One of the two ends. */
struct end {
    struct kv_transport *transport;
    struct kv_port *port;
    struct kv_channel *channel;
    struct kv_mapping *mapping;
    uint8_t *memory; /* both source and destination */
    size_t bytes;
    size_t cursor;
    struct slot sends[SLOTS], receives[SLOTS];
    bool failed;
    bool is_peer;
    bool running; /* the peer */
    /* The caller's side. */
    double begins[SLOTS]; /* by request number */
    struct bench_watch *watch;
    size_t arrived;
};

struct bench_wire {
    struct end end;
    int control; /* socket to the peer */
    pid_t pid;
};

static uint8_t *next_memory(struct end *end, size_t bytes)
{
    uint8_t *at;

    if (end->cursor + bytes > end->bytes)
        end->cursor = 0;
    at = end->memory + end->cursor;
    end->cursor += (bytes + 63) / 64 * 64;
    return at;
}

static struct slot *slot_get(struct end *end, struct slot *slots)
{
    for (unsigned i = 0; i < SLOTS; i++) {
        if (slots[i].in_use)
            continue;
        slots[i].in_use = true;
        slots[i].end = end;
        return &slots[i];
    }
    end->failed = true;
    return NULL;
}

static void on_sent(void *arg, kv_status_t status)
{
    struct slot *slot = arg;

    slot->in_use = false;
    if (status != KV_OK)
        slot->end->failed = true;
}

static void send_message(struct end *end, const struct bare_header *header, size_t bytes)
{
    struct slot *slot = slot_get(end, end->sends);
    kv_status_t status;

    if (slot == NULL)
        return;
    slot->header = *header;
    status = kv_channel_send(end->channel, &slot->header, sizeof(slot->header),
                             bytes > 0 ? next_memory(end, bytes) : NULL, bytes, on_sent, slot);
    if (status == KV_IN_PROGRESS)
        return;
    on_sent(slot, status);
}

/* A whole message is here, and its data too. */
static void arrive(struct end *end, const struct bare_header *header)
{
    switch (header->kind) {
    case BARE_REQUEST:
        send_message(end, &(struct bare_header){.kind = BARE_REPLY, .number = header->number},
                     header->back_bytes);
        break;
    case BARE_REPLY:
        bench_watch_add(end->watch, bench_now() - end->begins[header->number % SLOTS]);
        end->arrived++;
        break;
    default:
        end->running = false;
        break;
    }
}

static void on_message(
    void *owner, const void *header, size_t header_bytes, const void *data, size_t data_bytes)
{
    struct end *end = owner;
    struct bare_header copy;

    if (header_bytes != sizeof(copy) || data_bytes > end->bytes) {
        end->failed = true;
        return;
    }
    memcpy(&copy, header, sizeof(copy));
    if (data_bytes > 0)
        memcpy(next_memory(end, data_bytes), data, data_bytes);
    arrive(end, &copy);
}

static void on_received(void *arg, kv_status_t status)
{
    struct slot *slot = arg;

    slot->in_use = false;
    if (status == KV_OK)
        arrive(slot->end, &slot->header);
    else
        slot->end->failed = true;
}

static void on_incoming(void *owner,
                        const void *header,
                        size_t header_bytes,
                        size_t data_bytes,
                        struct kv_incoming *incoming)
{
    struct end *end = owner;
    struct slot *slot = slot_get(end, end->receives);
    struct kv_iov iov;
    kv_status_t status;

    if (slot == NULL || header_bytes != sizeof(slot->header) || data_bytes > end->bytes) {
        end->failed = true;
        kv_incoming_refuse(incoming);
        return;
    }
    memcpy(&slot->header, header, sizeof(slot->header));
    iov = (struct kv_iov){.base = next_memory(end, data_bytes), .bytes = data_bytes};
    status = kv_incoming_receive(incoming, &iov, 1, on_received, slot);
    if (status != KV_IN_PROGRESS)
        on_received(slot, status);
}

static bool is_sending(const struct end *end)
{
    for (unsigned i = 0; i < SLOTS; i++)
        if (end->sends[i].in_use)
            return true;
    return false;
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    (void)channel_arg;
    (void)status;
    ((struct end *)owner)->failed = true;
}

static void end_close(struct end *end)
{
    if (end->channel != NULL)
        end->channel->ops->channel_close(end->channel);
    if (end->port != NULL)
        end->port->ops->port_close(end->port);
    if (end->mapping != NULL)
        end->transport->ops->unmap(end->transport, end->mapping);
    if (end->transport != NULL)
        end->transport->ops->close(end->transport);
}

static bool write_all(int fd, const void *data, size_t bytes)
{
    const char *at = data;

    while (bytes > 0) {
        ssize_t n = write(fd, at, bytes);

        if (n <= 0)
            return false;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool read_all(int fd, void *data, size_t bytes)
{
    char *at = data;

    while (bytes > 0) {
        ssize_t n = read(fd, at, bytes);

        if (n <= 0)
            return false;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

/* Opens the end and connects it to the one behind the socket. */
static bool end_open(struct end *end, const char *transport, size_t bytes, int control)
{
    static const struct kv_port_events events = {on_message, on_incoming, on_failed};
    const struct kv_transport_config config = {
        .transports = transport, .devices = "lo", .trusts_peers = !end->is_peer};
    enum kv_channel_mode mode =
        strcmp(transport, "shm") == 0 ? KV_CHANNEL_SHARED : KV_CHANNEL_NETWORK;
    const void *address;
    void *memory;
    char other[ADDRESS_MAX];
    size_t address_bytes, other_bytes;
    char detail[256] = "";

    if (kv_transport_ucx.open(&config, &end->transport, detail, sizeof(detail)) != KV_OK) {
        bench_complain("bare messages: transport %s: %s", transport, detail);
        return false;
    }
    if (end->transport->ops->alloc(end->transport, bytes, &memory, &end->mapping) != KV_OK) {
        bench_complain("bare messages: memory: refused");
        return false;
    }
    end->memory = memory;
    end->bytes = bytes;
    bench_fill(end->memory, bytes, (uint64_t)end->is_peer);
    if (end->transport->ops->port_open(end->transport, &events, end, &end->port) != KV_OK) {
        bench_complain("bare messages: port: cannot open");
        return false;
    }
    end->port->ops->port_address(end->port, &address, &address_bytes);
    if (!write_all(control, &address_bytes, sizeof(address_bytes)) ||
        !write_all(control, address, address_bytes) ||
        !read_all(control, &other_bytes, sizeof(other_bytes)) || other_bytes > sizeof(other) ||
        !read_all(control, other, other_bytes)) {
        bench_complain("bare messages: peer: ended");
        return false;
    }
    if (end->port->ops->connect(end->port, other, other_bytes, mode, NULL, &end->channel) !=
        KV_OK) {
        bench_complain("bare messages: %s: cannot connect", transport);
        return false;
    }
    return true;
}

/* ---- the peer ---------------------------------------------------------------------------- */

int bench_wire_peer(const char *transport, uint64_t data_bytes, int cpu)
{
    struct end *end = calloc(1, sizeof(*end));
    char call;
    bool is_good;

    bench_pin(cpu);
    if (end == NULL)
        return EXIT_FAILURE;
    end->is_peer = true;
    is_good = end_open(end, transport, data_bytes, STDIN_FILENO);
    while (is_good && read(STDIN_FILENO, &call, 1) == 1) {
        end->running = true;
        while (end->running && !end->failed)
            kv_port_progress(end->port);
        is_good = !end->failed;
        if (!is_good)
            bench_complain("bare messages: peer: a message failed");
    }
    end_close(end);
    free(end);
    return is_good ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- the caller's side ------------------------------------------------------------------- */

bool bench_wire_open(struct bench *bench, const char *transport, struct bench_wire **ret_wire)
{
    struct bench_wire *wire = calloc(1, sizeof(*wire));
    char bytes_text[32], cpu_text[16];
    char *const argv[] = {
        (char *)"/proc/self/exe",
        (char *)"--peer",
        (char *)"messages",
        (char *)transport,
        bytes_text,
        cpu_text,
        NULL,
    };

    if (wire == NULL)
        return false;
    snprintf(bytes_text, sizeof(bytes_text), "%llu", (unsigned long long)bench->data_bytes);
    snprintf(cpu_text, sizeof(cpu_text), "%d", bench->server_cpu);
    if (!bench_spawn(argv, bench->server_cpu, NULL, NULL, &wire->control, &wire->pid)) {
        free(wire);
        return false;
    }
    if (!end_open(&wire->end, transport, bench->data_bytes, wire->control)) {
        bench_wire_close(wire);
        return false;
    }
    *ret_wire = wire;
    return true;
}

void bench_wire_close(struct bench_wire *wire)
{
    if (wire == NULL)
        return;
    close(wire->control);
    end_close(&wire->end);
    bench_reap(wire->pid);
    free(wire);
}

bool bench_wire_measure(void *arg, struct bench_sample *ret_sample)
{
    const struct bench_exchange *exchange = arg;
    struct end *end = &exchange->wire->end;
    struct bench_watch watch;
    size_t begun = 0;
    struct bench_stall stall = {0};

    if (write(exchange->wire->control, "g", 1) != 1 || !bench_watch_start(&watch, exchange->n))
        return false;
    end->watch = &watch;
    end->arrived = 0;
    while (end->arrived < exchange->n && !end->failed) {
        size_t seen = end->arrived;

        while (begun < exchange->n && begun - end->arrived < exchange->window) {
            struct bare_header header = {
                .kind = BARE_REQUEST,
                .back_bytes = (uint32_t)exchange->back_bytes,
                .number = begun,
            };

            if (exchange->back_bytes <= sizeof(header))
                header.back_bytes = 0;
            end->begins[begun % SLOTS] = bench_now();
            send_message(end, &header,
                         exchange->out_bytes > sizeof(header)
                             ? exchange->out_bytes - sizeof(header)
                             : 0);
            begun++;
        }
        kv_port_progress(end->port);
        if (bench_stalled(&stall, end->arrived > seen))
            end->failed = true;
    }
    if (exchange->times)
        bench_watch_times(&watch, ret_sample);
    else
        bench_watch_rate(&watch,
                         exchange->back_bytes > exchange->out_bytes ? exchange->back_bytes
                                                                    : exchange->out_bytes,
                         ret_sample);
    send_message(end, &(struct bare_header){.kind = BARE_STOP}, 0);
    for (unsigned round = 0; round < SEND_ROUNDS && is_sending(end); round++)
        kv_port_progress(end->port);
    return !end->failed;
}
