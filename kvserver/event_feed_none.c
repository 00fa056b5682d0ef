/* In place of event_feed.c in a build without ZeroMQ: there is never a feed. */
#include "kvserver/event_feed.h"

kv_status_t kvs_event_feed_check(const struct kvs_event_feed_config *config,
                                 char *detail,
                                 size_t detail_bytes)
{
    snprintf(detail, detail_bytes, "events: %s: built without ZeroMQ (KV_WITH_ZMQ)",
             config->endpoint);
    return KV_UNSUPPORTED;
}

kv_status_t kvs_event_feed_create(const struct kvs_event_feed_config *config,
                                  struct kvs_event_feed **ret_feed,
                                  char *detail,
                                  size_t detail_bytes)
{
    (void)ret_feed;
    return kvs_event_feed_check(config, detail, detail_bytes);
}

void kvs_event_feed_destroy(struct kvs_event_feed *feed)
{
    (void)feed;
}

const struct kvs_event_sink *kvs_event_feed_sink(const struct kvs_event_feed *feed)
{
    (void)feed;
    return NULL;
}

const char *kvs_event_feed_endpoint(const struct kvs_event_feed *feed)
{
    (void)feed;
    return "";
}

const char *kvs_event_feed_replay_endpoint(const struct kvs_event_feed *feed)
{
    (void)feed;
    return "";
}

bool kvs_event_feed_is_local(const struct kvs_event_feed *feed)
{
    (void)feed;
    return true;
}

void kvs_event_feed_metrics(const struct kvs_event_feed *feed, FILE *out)
{
    (void)feed;
    (void)out;
}
