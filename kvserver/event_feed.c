/* The only file that knows ZeroMQ and msgpack.  All sockets are the feed's thread's from its start
 * to its end.
 *
 * A batch lies in one message of ZeroMQ, which counts its references: what waits for readers and
 * what is kept for replays is the same memory.
 */
#include "kvserver/event_feed.h"

#include "kvserver/address.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/ring.h"
#include "kvserver/base/thread.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <msgpack.h>
#include <net/if.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

enum {
    ITEM_BLOCKS = 64,    /* a larger event travels in pieces, and is joined again */
    QUEUE_ITEMS = 16384, /* rounded as ring.h says */
    QUEUE_BYTES = 16 << 20,
    BATCH_BYTES = 64 << 10, /* a batch that has so many takes no further item */
    BATCH_ITEMS = 1024,
    BATCHES_MAX = 16384,  /* kept for replays */
    READER_BATCHES = 256, /* that wait for a reader; further ones it loses */
    REPLAYS_MAX = 8,      /* at once */
    REPLAY_BURST = 64,    /* batches for one reader, before the next one's turn */
    REPLAY_RETRY_MS = 2,
    REPLAY_US = 10000000, /* a reader that takes nothing for so long is given up */
    LINGER_MS = 200,      /* for what waits for readers at the end */
    INPUT_BYTES = 1024,   /* of a message from a reader: a subscription, or a request */
    IDENTITY_BYTES = 255, /* of a reader; ZeroMQ's limit */
    ENDPOINT_BYTES = 512,
    SEQUENCE_BYTES = 8,
};

static const char scheme[] = "tcp://";

enum item_kind {
    ITEM_STORED,
    ITEM_REMOVED,
    ITEM_CLEARED,
};

/* An event, or a piece of one, on its way to the feed's thread. */
struct item {
    enum item_kind kind;
    enum kvs_medium medium;
    uint32_t n, tenant;
    bool has_parent;
    struct kv_id128 parent;
    const uint32_t *tokens;  /* behind the names; NULL: none */
    struct kv_id128 names[]; /* (n) */
};

struct batch {
    uint64_t sequence;
    zmq_msg_t payload;
};

/* A replay under way.  Batches are counted from the feed's start: batch i is at i modulo
 * BATCHES_MAX. */
struct replay {
    bool busy;
    uint8_t identity[IDENTITY_BYTES];
    size_t identity_bytes;
    uint64_t next, end; /* batches */
    uint64_t moved_us;  /* when the reader last took one */
};

struct kvs_event_feed {
    struct kvs_event_sink sink;
    struct kvs_event_feed_config config;
    char topic[ENDPOINT_BYTES];
    char endpoint[ENDPOINT_BYTES], replay_endpoint[ENDPOINT_BYTES];
    struct kv_ring *ring;
    struct kv_signal *signal;
    struct kv_thread *thread;
    atomic_bool stopping;

    /* Set where an event is dropped.  Until the feed's thread has said so to its readers, and
     * unset it, all further ones are dropped too. */
    atomic_bool lost;
    _Atomic uint64_t queued_bytes;

    /* the feed's thread */
    void *context, *publisher, *router; /* router: NULL: no replay */
    msgpack_sbuffer packed;
    struct item *items[BATCH_ITEMS];
    uint64_t sequence;     /* of the next batch */
    struct batch *batches; /* (BATCHES_MAX) */
    uint64_t begin, end;   /* batches kept */
    uint64_t kept_bytes;
    struct replay replays[REPLAYS_MAX];

    _Atomic uint64_t n_events, n_batches, n_dropped, n_losses, n_replays, n_replayed;
    _Atomic uint64_t shown_kept_bytes;
};

static void count(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static uint64_t counted(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

/* ---- the sink: the control thread ------------------------------------------------------------ */

static size_t item_bytes(const struct item *item)
{
    return sizeof(*item) + item->n * sizeof(item->names[0]) +
           (item->tokens == NULL ? 0 : item->n * KV_BLOCK_TOKENS * sizeof(item->tokens[0]));
}

/* Copies an event into an item, or drops it. */
static void tell(struct kvs_event_feed *feed,
                 const struct item *like,
                 const struct kv_id128 *names,
                 const uint32_t *tokens)
{
    const size_t names_bytes = like->n * sizeof(names[0]);
    const size_t tokens_bytes = like->n * KV_BLOCK_TOKENS * sizeof(tokens[0]);
    const size_t bytes = sizeof(*like) + names_bytes + (tokens == NULL ? 0 : tokens_bytes);
    struct item *item = NULL;

    if (!atomic_load(&feed->lost) &&
        atomic_load(&feed->queued_bytes) + bytes <= feed->config.queue_bytes)
        item = malloc(bytes);
    if (item != NULL) {
        *item = *like;
        if (names != NULL)
            memcpy(item->names, names, names_bytes);
        if (tokens != NULL)
            item->tokens = memcpy(&item->names[like->n], tokens, tokens_bytes);
        atomic_fetch_add(&feed->queued_bytes, bytes);
        if (!kv_ring_push(feed->ring, item)) {
            atomic_fetch_sub(&feed->queued_bytes, bytes);
            free(item);
            item = NULL;
        }
    }
    if (item == NULL) {
        count(&feed->n_dropped, 1);
        atomic_store(&feed->lost, true);
    }
    kv_signal_raise(feed->signal);
}

static void on_stored(void *arg, const struct kvs_blocks_stored *event)
{
    for (uint32_t at = 0; at < event->n; at += ITEM_BLOCKS) {
        const struct kv_id128 *parent = at == 0 ? event->parent : &event->names[at - 1];
        struct item item = {.kind = ITEM_STORED,
                            .medium = event->medium,
                            .tenant = event->tenant,
                            .n = event->n - at < ITEM_BLOCKS ? event->n - at : ITEM_BLOCKS,
                            .has_parent = parent != NULL};

        if (parent != NULL)
            item.parent = *parent;
        tell(arg, &item, event->names + at,
             event->tokens == NULL ? NULL : event->tokens + (size_t)at * KV_BLOCK_TOKENS);
    }
}

static void on_removed(void *arg, const struct kvs_blocks_removed *event)
{
    for (uint32_t at = 0; at < event->n; at += ITEM_BLOCKS) {
        struct item item = {.kind = ITEM_REMOVED,
                            .medium = event->medium,
                            .tenant = event->tenant,
                            .n = event->n - at < ITEM_BLOCKS ? event->n - at : ITEM_BLOCKS};

        tell(arg, &item, event->names + at, NULL);
    }
}

static void on_cleared(void *arg)
{
    tell(arg, &(struct item){.kind = ITEM_CLEARED}, NULL, NULL);
}

/* ---- packing --------------------------------------------------------------------------------- */

/* Returns how many items, from the first on, are one event. */
static uint32_t event_items(struct item *const *items, uint32_t n)
{
    const struct item *first = items[0];
    uint32_t i;

    for (i = 1; i < n && first->kind != ITEM_CLEARED; i++) {
        const struct item *item = items[i], *last = items[i - 1];

        if (item->kind != first->kind || item->tenant != first->tenant ||
            item->medium != first->medium || (item->tokens == NULL) != (first->tokens == NULL))
            break;
        if (item->kind == ITEM_STORED &&
            (!item->has_parent ||
             memcmp(&item->parent, &last->names[last->n - 1], sizeof(item->parent)) != 0))
            break;
    }
    return i;
}

static int pack_text(msgpack_packer *packer, const char *text)
{
    return msgpack_pack_str_with_body(packer, text, strlen(text));
}

static int pack_name(const struct kvs_event_feed *feed,
                     msgpack_packer *packer,
                     const struct kv_id128 *name,
                     uint32_t tenant)
{
    struct kv_id128 own = *name;
    uint64_t number = 0;

    for (unsigned i = 0; i < sizeof(tenant); i++)
        own.bytes[sizeof(own) - 1 - i] ^= (uint8_t)(tenant >> 8 * i);
    if (!feed->config.int_hashes)
        return msgpack_pack_bin_with_body(packer, own.bytes, sizeof(own));
    for (unsigned i = sizeof(own) - sizeof(number); i < sizeof(own); i++)
        number = number << 8 | own.bytes[i];
    return msgpack_pack_uint64(packer, number);
}

static int pack_names(const struct kvs_event_feed *feed,
                      msgpack_packer *packer,
                      struct item *const *items,
                      uint32_t n_items,
                      uint32_t n_blocks)
{
    int failed = pack_text(packer, "block_hashes");

    failed |= msgpack_pack_array(packer, n_blocks);
    for (uint32_t i = 0; i < n_items; i++) {
        for (uint32_t block = 0; block < items[i]->n; block++)
            failed |= pack_name(feed, packer, &items[i]->names[block], items[i]->tenant);
    }
    return failed;
}

static int pack_tokens(msgpack_packer *packer,
                       struct item *const *items,
                       uint32_t n_items,
                       uint32_t n_blocks)
{
    const bool told = items[0]->tokens != NULL;
    int failed = pack_text(packer, "token_ids");

    failed |= msgpack_pack_array(packer, told ? (size_t)n_blocks * KV_BLOCK_TOKENS : 0);
    for (uint32_t i = 0; told && i < n_items; i++) {
        for (uint32_t token = 0; token < items[i]->n * KV_BLOCK_TOKENS; token++)
            failed |= msgpack_pack_uint32(packer, items[i]->tokens[token]);
    }
    return failed;
}

/* What else tells blocks of equal tokens apart, for each block. */
static int pack_extra_keys(msgpack_packer *packer, uint32_t tenant, uint32_t n_blocks)
{
    int failed = pack_text(packer, "extra_keys");
    char text[24];

    snprintf(text, sizeof(text), "tenant:%u", (unsigned)tenant);
    failed |= msgpack_pack_array(packer, n_blocks);
    for (uint32_t block = 0; block < n_blocks; block++) {
        failed |= msgpack_pack_array(packer, 1);
        failed |= pack_text(packer, text);
    }
    return failed;
}

static int pack_event(const struct kvs_event_feed *feed,
                      msgpack_packer *packer,
                      struct item *const *items,
                      uint32_t n_items)
{
    const struct item *first = items[0];
    uint32_t n_blocks = 0;
    int failed = 0;

    for (uint32_t i = 0; i < n_items; i++)
        n_blocks += items[i]->n;
    switch (first->kind) {
    case ITEM_STORED:
        failed |= msgpack_pack_map(packer, first->tenant == 0 ? 8 : 9);
        failed |= pack_text(packer, "type") | pack_text(packer, "BlockStored");
        failed |= pack_names(feed, packer, items, n_items, n_blocks);
        failed |= pack_text(packer, "parent_block_hash");
        failed |= first->has_parent ? pack_name(feed, packer, &first->parent, first->tenant)
                                    : msgpack_pack_nil(packer);
        failed |= pack_tokens(packer, items, n_items, n_blocks);
        failed |= pack_text(packer, "block_size");
        failed |= msgpack_pack_uint32(packer, KV_BLOCK_TOKENS);
        failed |= pack_text(packer, "lora_id") | msgpack_pack_nil(packer);
        failed |= pack_text(packer, "medium");
        failed |= pack_text(packer, kvs_medium_name(first->medium));
        failed |= pack_text(packer, "lora_name") | msgpack_pack_nil(packer);
        if (first->tenant != 0)
            failed |= pack_extra_keys(packer, first->tenant, n_blocks);
        break;
    case ITEM_REMOVED:
        failed |= msgpack_pack_map(packer, 3);
        failed |= pack_text(packer, "type") | pack_text(packer, "BlockRemoved");
        failed |= pack_names(feed, packer, items, n_items, n_blocks);
        failed |= pack_text(packer, "medium");
        failed |= pack_text(packer, kvs_medium_name(first->medium));
        break;
    case ITEM_CLEARED:
        failed |= msgpack_pack_map(packer, 1);
        failed |= pack_text(packer, "type") | pack_text(packer, "AllBlocksCleared");
        break;
    }
    return failed;
}

/* Packs the items as one batch.  *ret_events is how many events they are.  Returns false if out of
 * memory. */
static bool pack_batch(struct kvs_event_feed *feed,
                       struct item *const *items,
                       uint32_t n_items,
                       uint32_t *ret_events)
{
    msgpack_packer packer;
    uint32_t n_events = 0;
    int failed = 0;

    for (uint32_t at = 0; at < n_items; at += event_items(items + at, n_items - at))
        n_events++;
    msgpack_sbuffer_clear(&feed->packed);
    msgpack_packer_init(&packer, &feed->packed, msgpack_sbuffer_write);
    failed |= msgpack_pack_array(&packer, 2);
    failed |= msgpack_pack_double(&packer, (double)kv_clock_unix_us() / 1e6);
    failed |= msgpack_pack_array(&packer, n_events);
    for (uint32_t at = 0; at < n_items;) {
        const uint32_t n = event_items(items + at, n_items - at);

        failed |= pack_event(feed, &packer, items + at, n);
        at += n;
    }
    *ret_events = n_events;
    return failed == 0;
}

/* ---- publishing ------------------------------------------------------------------------------ */

static void drop_oldest(struct kvs_event_feed *feed)
{
    struct batch *batch = &feed->batches[feed->begin % BATCHES_MAX];

    feed->kept_bytes -= zmq_msg_size(&batch->payload) + sizeof(*batch);
    zmq_msg_close(&batch->payload);
    feed->begin++;
}

/* Takes the payload. */
static void keep(struct kvs_event_feed *feed, uint64_t sequence, zmq_msg_t *payload)
{
    const uint64_t bytes = zmq_msg_size(payload) + sizeof(struct batch);
    struct batch *batch;

    while (feed->begin < feed->end && (feed->end - feed->begin == BATCHES_MAX ||
                                       feed->kept_bytes + bytes > feed->config.buffer_bytes))
        drop_oldest(feed);
    if (feed->router == NULL || bytes > feed->config.buffer_bytes) {
        zmq_msg_close(payload);
    } else {
        batch = &feed->batches[feed->end % BATCHES_MAX];
        batch->sequence = sequence;
        zmq_msg_init(&batch->payload);
        zmq_msg_move(&batch->payload, payload);
        zmq_msg_close(payload);
        feed->kept_bytes += bytes;
        feed->end++;
    }
    atomic_store_explicit(&feed->shown_kept_bytes, feed->kept_bytes, memory_order_relaxed);
}

static void put_sequence(uint8_t bytes[SEQUENCE_BYTES], uint64_t sequence)
{
    for (unsigned i = 0; i < SEQUENCE_BYTES; i++)
        bytes[i] = (uint8_t)(sequence >> (56 - 8 * i));
}

/* Sends the three frames that a batch has everywhere. */
static bool send_frames(void *socket, const char *topic, uint64_t sequence, zmq_msg_t *payload)
{
    uint8_t bytes[SEQUENCE_BYTES];
    zmq_msg_t copy;

    put_sequence(bytes, sequence);
    zmq_msg_init(&copy);
    if (zmq_msg_copy(&copy, payload) != 0 ||
        zmq_send(socket, topic, strlen(topic), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
        zmq_send(socket, bytes, sizeof(bytes), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
        zmq_msg_send(&copy, socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(&copy);
        return false;
    }
    return true;
}

/* Publishes the items as one batch.  Returns false if out of memory: nothing was published then. */
static bool publish(struct kvs_event_feed *feed, struct item *const *items, uint32_t n_items)
{
    uint32_t n_events;
    zmq_msg_t payload;

    if (!pack_batch(feed, items, n_items, &n_events) ||
        zmq_msg_init_size(&payload, feed->packed.size) != 0)
        return false;
    memcpy(zmq_msg_data(&payload), feed->packed.data, feed->packed.size);
    /* A reader that is not ready for it loses it, and can ask for it. */
    send_frames(feed->publisher, feed->topic, feed->sequence, &payload);
    keep(feed, feed->sequence, &payload);
    feed->sequence++;
    count(&feed->n_events, n_events);
    count(&feed->n_batches, 1);
    return true;
}

static bool publish_cleared(struct kvs_event_feed *feed)
{
    struct item cleared = {.kind = ITEM_CLEARED};

    return publish(feed, (struct item *[]){&cleared}, 1);
}

static void free_items(struct kvs_event_feed *feed, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        atomic_fetch_sub(&feed->queued_bytes, item_bytes(feed->items[i]));
        free(feed->items[i]);
    }
}

/* Takes items for one batch; returns how many. */
static uint32_t take_items(struct kvs_event_feed *feed)
{
    size_t bytes = 0;
    uint32_t n = 0;

    while (n < BATCH_ITEMS && bytes < BATCH_BYTES) {
        struct item *item = kv_ring_pop(feed->ring);

        if (item == NULL)
            break;
        bytes += item_bytes(item);
        feed->items[n++] = item;
    }
    return n;
}

/* Publishes what there is.  Where events are lost, nothing comes after them until `lost` is
 * unset, so what was told before is all in the ring when it has been seen. */
static void publish_all(struct kvs_event_feed *feed)
{
    const bool lost = atomic_load(&feed->lost);
    uint32_t n;

    while ((n = take_items(feed)) > 0) {
        if (!publish(feed, feed->items, n)) {
            count(&feed->n_dropped, n);
            atomic_store(&feed->lost, true);
        }
        free_items(feed, n);
    }
    if (!lost)
        return;
    feed->sequence++;
    if (publish_cleared(feed)) {
        count(&feed->n_losses, 1);
        atomic_store(&feed->lost, false);
    }
}

/* ---- replays --------------------------------------------------------------------------------- */

/* Returns the first batch that is kept and has at least that number. */
static uint64_t find_batch(const struct kvs_event_feed *feed, uint64_t sequence)
{
    uint64_t low = feed->begin, high = feed->end;

    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;

        if (feed->batches[middle % BATCHES_MAX].sequence < sequence)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns the replay for a reader: its last one, a free one, or the one that has waited longest. */
static struct replay *
get_replay(struct kvs_event_feed *feed, const uint8_t *identity, size_t identity_bytes)
{
    struct replay *found = &feed->replays[0];

    for (unsigned i = 0; i < REPLAYS_MAX; i++) {
        struct replay *replay = &feed->replays[i];

        if (replay->busy && replay->identity_bytes == identity_bytes &&
            memcmp(replay->identity, identity, identity_bytes) == 0)
            return replay;
        if (found->busy && (!replay->busy || replay->moved_us < found->moved_us))
            found = replay;
    }
    return found;
}

/* Receives one request, if there is one; those that are none are ignored. */
static bool take_request(struct kvs_event_feed *feed)
{
    uint8_t identity[IDENTITY_BYTES], frame[INPUT_BYTES];
    int bytes = zmq_recv(feed->router, identity, sizeof(identity), ZMQ_DONTWAIT);
    const size_t identity_bytes = (size_t)bytes;
    uint64_t sequence = 0;
    struct replay *replay;
    bool is_request = true;
    size_t more_bytes = sizeof(int);
    int more = 1;

    if (bytes < 0)
        return false;
    for (unsigned n = 1; more; n++) {
        zmq_getsockopt(feed->router, ZMQ_RCVMORE, &more, &more_bytes);
        if (!more) {
            is_request = is_request && n == 3;
            break;
        }
        bytes = zmq_recv(feed->router, frame, sizeof(frame), ZMQ_DONTWAIT);
        if (bytes < 0)
            return false;
        is_request = is_request && bytes == (n == 1 ? 0 : SEQUENCE_BYTES);
    }
    if (!is_request || identity_bytes > sizeof(identity))
        return true;
    for (unsigned i = 0; i < SEQUENCE_BYTES; i++)
        sequence = sequence << 8 | frame[i];
    replay = get_replay(feed, identity, identity_bytes);
    replay->busy = true;
    memcpy(replay->identity, identity, identity_bytes);
    replay->identity_bytes = identity_bytes;
    replay->next = find_batch(feed, sequence);
    replay->end = feed->end;
    replay->moved_us = kv_clock_now(&kv_clock_real);
    count(&feed->n_replays, 1);
    return true;
}

/* Sends what is due next of a replay.  Returns false if the reader takes nothing now, or is
 * gone. */
static bool send_replay(struct kvs_event_feed *feed, struct replay *replay)
{
    zmq_msg_t empty;
    bool sent;

    if (zmq_send(feed->router, replay->identity, replay->identity_bytes,
                 ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
        /* Not EAGAIN: this reader is not connected any more. */
        replay->busy = errno == EAGAIN;
        return false;
    }
    zmq_send(feed->router, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT);
    if (replay->next < feed->begin)
        replay->next = feed->begin;
    if (replay->next < replay->end) {
        struct batch *batch = &feed->batches[replay->next % BATCHES_MAX];

        sent = send_frames(feed->router, feed->topic, batch->sequence, &batch->payload);
        replay->next++;
        count(&feed->n_replayed, 1);
    } else {
        zmq_msg_init(&empty);
        sent = send_frames(feed->router, "", UINT64_MAX, &empty);
        zmq_msg_close(&empty);
        replay->busy = false;
    }
    replay->moved_us = kv_clock_now(&kv_clock_real);
    return sent;
}

/* Returns for how long to sleep unless something comes, in milliseconds; -1: for ever. */
static long serve_replays(struct kvs_event_feed *feed)
{
    const uint64_t now_us = kv_clock_now(&kv_clock_real);
    long sleep_ms = -1;

    while (feed->router != NULL && take_request(feed))
        ;
    for (unsigned i = 0; i < REPLAYS_MAX; i++) {
        struct replay *replay = &feed->replays[i];
        unsigned n = 0;

        while (replay->busy && n < REPLAY_BURST && send_replay(feed, replay))
            n++;
        if (replay->busy && n == 0 && now_us - replay->moved_us > REPLAY_US)
            replay->busy = false;
        if (replay->busy && n == REPLAY_BURST)
            sleep_ms = 0;
        else if (replay->busy && sleep_ms < 0)
            sleep_ms = REPLAY_RETRY_MS;
    }
    return sleep_ms;
}

/* ---- the feed's thread ----------------------------------------------------------------------- */

static void drive(void *arg)
{
    struct kvs_event_feed *feed = arg;

    publish_cleared(feed);
    while (!atomic_load(&feed->stopping)) {
        zmq_pollitem_t polled[] = {
            {.fd = kv_signal_fd(feed->signal), .events = ZMQ_POLLIN},
            {.socket = feed->router, .events = ZMQ_POLLIN},
        };
        long sleep_ms;

        kv_signal_clear(feed->signal);
        publish_all(feed);
        sleep_ms = serve_replays(feed);
        if (atomic_load(&feed->lost))
            sleep_ms = REPLAY_RETRY_MS;
        zmq_poll(polled, feed->router == NULL ? 1 : 2, sleep_ms);
    }
    publish_all(feed);
    publish_cleared(feed);
}

/* ---- start and end --------------------------------------------------------------------------- */

static kv_status_t
check_endpoint(const char *what, const char *endpoint, char *detail, size_t detail_bytes)
{
    char host[KVS_ADDRESS_HOST_BYTES];
    uint8_t address[16];
    kv_status_t status;

    if (strncmp(endpoint, scheme, strlen(scheme)) != 0) {
        snprintf(detail, detail_bytes, "%s: not tcp://HOST:PORT: %s", what, endpoint);
        return KV_INVALID;
    }
    status = kvs_address_host(what, endpoint + strlen(scheme), host, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    if (strcmp(host, "*") != 0 && inet_pton(AF_INET, host, address) != 1 &&
        inet_pton(AF_INET6, host, address) != 1 && if_nametoindex(host) == 0) {
        snprintf(detail, detail_bytes, "%s: neither an IP address, an interface nor *: %s",
                 what, host);
        return KV_INVALID;
    }
    return KV_OK;
}

kv_status_t kvs_event_feed_check(const struct kvs_event_feed_config *config,
                                 char *detail,
                                 size_t detail_bytes)
{
    kv_status_t status = check_endpoint("events", config->endpoint, detail, detail_bytes);

    if (status == KV_OK && config->replay_endpoint[0] != 0)
        status = check_endpoint("events-replay", config->replay_endpoint, detail, detail_bytes);
    return status;
}

/* Opens a socket and binds it. */
static kv_status_t open_socket(struct kvs_event_feed *feed,
                               int type,
                               const char *what,
                               const char *endpoint,
                               void **ret_socket,
                               char bound[ENDPOINT_BYTES],
                               char *detail,
                               size_t detail_bytes)
{
    void *socket = zmq_socket(feed->context, type);
    const int batches = READER_BATCHES, linger = LINGER_MS, one = 1;
    const int64_t input = INPUT_BYTES;
    size_t bound_bytes = ENDPOINT_BYTES;
    int error;

    if (socket == NULL) {
        snprintf(detail, detail_bytes, "%s: %s: %s", what, endpoint, zmq_strerror(errno));
        return KV_NO_MEMORY;
    }
    *ret_socket = socket;
    zmq_setsockopt(socket, ZMQ_SNDHWM, &batches, sizeof(batches));
    zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof(linger));
    zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &input, sizeof(input));
    /* Tells when a reader is slow, rather than drop what it asked for. */
    if (type == ZMQ_ROUTER)
        zmq_setsockopt(socket, ZMQ_ROUTER_MANDATORY, &one, sizeof(one));
    if (strchr(endpoint, '[') != NULL)
        zmq_setsockopt(socket, ZMQ_IPV6, &one, sizeof(one));
    if (zmq_bind(socket, endpoint) != 0) {
        error = zmq_errno();
        snprintf(detail, detail_bytes, "%s: %s: %s", what, endpoint, zmq_strerror(error));
        return error == EADDRNOTAVAIL || error == ENODEV || error == EINVAL ? KV_INVALID
                                                                            : KV_IO;
    }
    zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, bound, &bound_bytes);
    return KV_OK;
}

static kv_status_t open_sockets(struct kvs_event_feed *feed,
                                const struct kvs_event_feed_config *config,
                                char *detail,
                                size_t detail_bytes)
{
    kv_status_t status = open_socket(feed, ZMQ_PUB, "events", config->endpoint,
                                     &feed->publisher, feed->endpoint, detail, detail_bytes);

    if (status == KV_OK && config->replay_endpoint[0] != 0)
        status = open_socket(feed, ZMQ_ROUTER, "events-replay", config->replay_endpoint,
                             &feed->router, feed->replay_endpoint, detail, detail_bytes);
    return status;
}

kv_status_t kvs_event_feed_create(const struct kvs_event_feed_config *config,
                                  struct kvs_event_feed **ret_feed,
                                  char *detail,
                                  size_t detail_bytes)
{
    struct kvs_event_feed *feed = calloc(1, sizeof(*feed));
    kv_status_t status = KV_NO_MEMORY;

    snprintf(detail, detail_bytes, "events: out of memory");
    if (feed == NULL)
        return KV_NO_MEMORY;
    feed->sink = (struct kvs_event_sink){on_stored, on_removed, on_cleared, feed};
    feed->config = *config;
    if (feed->config.queue_bytes == 0)
        feed->config.queue_bytes = QUEUE_BYTES;
    snprintf(feed->topic, sizeof(feed->topic), "%s", config->topic);
    msgpack_sbuffer_init(&feed->packed);
    feed->ring = kv_ring_create(QUEUE_ITEMS);
    feed->signal = kv_signal_create();
    feed->batches = calloc(BATCHES_MAX, sizeof(feed->batches[0]));
    feed->context = zmq_ctx_new();
    if (feed->ring == NULL || feed->signal == NULL || feed->batches == NULL ||
        feed->context == NULL)
        goto err;
    status = open_sockets(feed, config, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    status = kv_thread_start("kv-events", drive, feed, &feed->thread);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "events: cannot start a thread");
        goto err;
    }
    *ret_feed = feed;
    return KV_OK;

err:
    kvs_event_feed_destroy(feed);
    return status;
}

void kvs_event_feed_destroy(struct kvs_event_feed *feed)
{
    if (feed == NULL)
        return;
    if (feed->thread != NULL) {
        atomic_store(&feed->stopping, true);
        kv_signal_raise(feed->signal);
        kv_thread_join(feed->thread);
    }
    while (feed->begin < feed->end)
        drop_oldest(feed);
    if (feed->publisher != NULL)
        zmq_close(feed->publisher);
    if (feed->router != NULL)
        zmq_close(feed->router);
    if (feed->context != NULL)
        zmq_ctx_term(feed->context);
    msgpack_sbuffer_destroy(&feed->packed);
    free(feed->batches);
    kv_signal_destroy(feed->signal);
    kv_ring_destroy(feed->ring);
    free(feed);
}

const struct kvs_event_sink *kvs_event_feed_sink(const struct kvs_event_feed *feed)
{
    return &feed->sink;
}

const char *kvs_event_feed_endpoint(const struct kvs_event_feed *feed)
{
    return feed->endpoint;
}

const char *kvs_event_feed_replay_endpoint(const struct kvs_event_feed *feed)
{
    return feed->replay_endpoint;
}

bool kvs_event_feed_is_local(const struct kvs_event_feed *feed)
{
    return kvs_address_is_loopback(feed->endpoint + strlen(scheme)) &&
           (feed->router == NULL ||
            kvs_address_is_loopback(feed->replay_endpoint + strlen(scheme)));
}

void kvs_event_feed_metrics(const struct kvs_event_feed *feed, FILE *out)
{
    const struct {
        const char *name, *type, *help;
        const _Atomic uint64_t *value;
    } rows[] = {
        {"events_published_total", "counter", "events published", &feed->n_events},
        {"event_batches_published_total", "counter", "messages they were in", &feed->n_batches},
        {"events_dropped_total", "counter",
         "events not published, because they came faster than they were packed",
         &feed->n_dropped},
        {"event_losses_total", "counter",
         "times that readers were told to forget all, since events were dropped",
         &feed->n_losses},
        {"event_replays_total", "counter", "replays asked for", &feed->n_replays},
        {"event_batches_replayed_total", "counter", "messages sent again", &feed->n_replayed},
        {"event_queue_bytes", "gauge", "of events not yet packed", &feed->queued_bytes},
        {"event_buffer_bytes", "gauge", "kept for replays", &feed->shown_kept_bytes},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        fprintf(out, "# HELP topkv_%s %s\n# TYPE topkv_%s %s\n", rows[i].name, rows[i].help,
                rows[i].name, rows[i].type);
        fprintf(out, "topkv_%s %llu\n", rows[i].name,
                (unsigned long long)counted(rows[i].value));
    }
}
