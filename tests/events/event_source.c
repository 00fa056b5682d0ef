/* A feed without a node: check_readers.py tells it what to publish.
 *
 *     event_source TOPIC BUFFER-BYTES bytes|int
 *
 * First line of output: the two endpoints.  Lines of input:
 *
 *     stored FIRST N TOKENS TENANT MEDIUM   blocks FIRST to FIRST + N - 1, with tokens if TOKENS is 1
 *     removed FIRST N TENANT MEDIUM
 *     cleared
 *     metrics                               prints them, and an empty line
 *     repeat N                              the block FIRST = 0 is stored and removed N times
 *
 * Block i's name is i and 0x9e3779b97f4a7c15 i, 8 bytes each, big-endian; its tokens are 128 i,
 * 128 i + 1, and so on.  A block's parent is the one before it; block 0 has none. */
#include "kvserver/event_feed.h"

#include <stdlib.h>
#include <string.h>

static struct kv_id128 name_of(uint32_t block)
{
    const uint64_t mixed = block * UINT64_C(0x9e3779b97f4a7c15);
    struct kv_id128 name;

    for (unsigned i = 0; i < 8; i++) {
        name.bytes[i] = (uint8_t)((uint64_t)block >> (56 - 8 * i));
        name.bytes[8 + i] = (uint8_t)(mixed >> (56 - 8 * i));
    }
    return name;
}

static void stored(const struct kvs_event_sink *sink,
                   uint32_t first,
                   uint32_t n,
                   bool with_tokens,
                   uint32_t tenant,
                   enum kvs_medium medium)
{
    static struct kv_id128 names[KVS_EVENT_BLOCKS_MAX];
    static uint32_t tokens[KVS_EVENT_BLOCKS_MAX * KV_BLOCK_TOKENS];
    const struct kv_id128 parent = name_of(first - 1);

    for (uint32_t i = 0; i < n; i++)
        names[i] = name_of(first + i);
    for (uint32_t i = 0; i < n * KV_BLOCK_TOKENS; i++)
        tokens[i] = first * KV_BLOCK_TOKENS + i;
    sink->stored(sink->arg, &(struct kvs_blocks_stored){.names = names,
                                                        .parent = first == 0 ? NULL : &parent,
                                                        .tokens = with_tokens ? tokens : NULL,
                                                        .n = n,
                                                        .tenant = tenant,
                                                        .medium = medium});
}

static void removed(const struct kvs_event_sink *sink,
                    uint32_t first,
                    uint32_t n,
                    uint32_t tenant,
                    enum kvs_medium medium)
{
    static struct kv_id128 names[KVS_EVENT_BLOCKS_MAX];

    for (uint32_t i = 0; i < n; i++)
        names[i] = name_of(first + i);
    sink->removed(sink->arg, &(struct kvs_blocks_removed){
                                 .names = names, .n = n, .tenant = tenant, .medium = medium});
}

static enum kvs_medium medium_of(const char *name)
{
    return strcmp(name, kvs_medium_name(KVS_MEDIUM_DISK)) == 0 ? KVS_MEDIUM_DISK
                                                               : KVS_MEDIUM_CPU;
}

static void obey(struct kvs_event_feed *feed, const char *line)
{
    const struct kvs_event_sink *sink = kvs_event_feed_sink(feed);
    unsigned first, n, with_tokens, tenant;
    char medium[8];

    if (sscanf(line, "stored %u %u %u %u %7s", &first, &n, &with_tokens, &tenant, medium) == 5)
        stored(sink, first, n, with_tokens, tenant, medium_of(medium));
    else if (sscanf(line, "removed %u %u %u %7s", &first, &n, &tenant, medium) == 4)
        removed(sink, first, n, tenant, medium_of(medium));
    else if (strcmp(line, "cleared\n") == 0)
        sink->cleared(sink->arg);
    else if (strcmp(line, "metrics\n") == 0) {
        kvs_event_feed_metrics(feed, stdout);
        printf("\n");
    } else if (sscanf(line, "repeat %u", &n) == 1) {
        for (unsigned i = 0; i < n; i++) {
            stored(sink, 0, 1, true, 0, KVS_MEDIUM_CPU);
            removed(sink, 0, 1, 0, KVS_MEDIUM_CPU);
        }
    } else {
        fprintf(stderr, "event_source: what: %s", line);
        exit(2);
    }
}

int main(int argc, char **argv)
{
    struct kvs_event_feed_config config = {.endpoint = "tcp://127.0.0.1:0",
                                           .replay_endpoint = "tcp://127.0.0.1:0"};
    struct kvs_event_feed *feed;
    char detail[256], line[256];

    if (argc != 4)
        return 2;
    config.topic = argv[1];
    config.buffer_bytes = strtoull(argv[2], NULL, 10);
    config.int_hashes = strcmp(argv[3], "int") == 0;
    if (kvs_event_feed_create(&config, &feed, detail, sizeof(detail)) != KV_OK) {
        fprintf(stderr, "event_source: %s\n", detail);
        return 1;
    }
    printf("%s %s\n", kvs_event_feed_endpoint(feed), kvs_event_feed_replay_endpoint(feed));
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin) != NULL) {
        obey(feed, line);
        fflush(stdout);
    }
    kvs_event_feed_destroy(feed);
    return 0;
}
