/* event_feed.h - publishes a node's events over ZeroMQ, as vLLM does
 * (vllm/distributed/kv_events.py): routers that know which node has which blocks read it.
 *
 *     control thread                    the feed's thread                        readers
 *     sink: copies the event  --(ring)-> joins events, packs batches  --PUB-->    SUB, any number
 *                                       keeps the last ones          <-ROUTER->  DEALER or REQ
 *
 *   PUB     frames: topic, sequence number (8 bytes, big-endian), batch
 *   batch   msgpack: [time in seconds, [event, ...]]
 *   event   msgpack: a map; `type` is BlockStored, BlockRemoved or AllBlocksCleared, the other
 *           names are those of vLLM's fields
 *   replay  request: (empty), first sequence number wanted (8 bytes)
 *           reply: a message per batch that is kept: (empty), topic, sequence number, batch;
 *           then (empty), empty, -1 (8 bytes), empty
 *
 * A reader that stands still, or that asks and does not take what it asked for, loses messages;
 * the node loses nothing, and keeps for it at most a number of messages.  It notices by the
 * sequence numbers, which have no gaps, and asks for what it has missed.  If the first batch of
 * a replay is not the one that it asked for, the rest is gone, and it must forget all it knew
 * of the node.
 *
 * The first batch, number 0, and the last one say AllBlocksCleared: there is nothing in a node
 * that has started, or ended.  The same if events had to be dropped, because they came faster
 * than they were packed: a number is left out, and the batch after it says AllBlocksCleared.
 * So a reader that follows never takes a block for there that it was not told of since.
 *
 * Block names go out as they are, but for those of a tenant other than 0: their last 32 bits
 * are xored with its number, so that names that two tenants have in common are two.
 *
 * Threads: create, destroy and the sink: the control thread; kvs_event_feed_metrics(): any.
 * Memory: create/destroy.
 */
#ifndef KV_KVSERVER_EVENT_FEED_H
#define KV_KVSERVER_EVENT_FEED_H

#include "kvserver/store/control/events.h"
#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct kvs_event_feed;

struct kvs_event_feed_config {
    const char *endpoint; /* tcp://HOST:PORT; HOST is an IP address, an interface, or * */
    const char *replay_endpoint; /* "": no replay */
    const char *topic;
    bool int_hashes;       /* names go out as numbers: their last 64 bits, for readers without
                            * names of bytes */
    uint64_t buffer_bytes; /* of the last batches, kept for replays */
    uint64_t queue_bytes;  /* of events on their way to the feed's thread; 0: 16 MiB */
};

/* Fails with KV_INVALID if the configuration could not be used on any machine, and with
 * KV_UNSUPPORTED in a build without ZeroMQ.  Looks at values only. */
kv_status_t kvs_event_feed_check(const struct kvs_event_feed_config *config,
                                 char *detail,
                                 size_t detail_bytes);

/* Takes the ports and starts the thread.  Fails with KV_INVALID, KV_IO or KV_NO_MEMORY; `detail`
 * has the reason. */
kv_status_t kvs_event_feed_create(const struct kvs_event_feed_config *config,
                                  struct kvs_event_feed **ret_feed,
                                  char *detail,
                                  size_t detail_bytes);

/* Publishes what it has been told, and the end; then closes the ports.  NULL is allowed. */
void kvs_event_feed_destroy(struct kvs_event_feed *feed);

/* Valid until kvs_event_feed_destroy(). */
const struct kvs_event_sink *kvs_event_feed_sink(const struct kvs_event_feed *feed);
/* With the bound ports; "" if there is no replay. */
const char *kvs_event_feed_endpoint(const struct kvs_event_feed *feed);
const char *kvs_event_feed_replay_endpoint(const struct kvs_event_feed *feed);

/* Returns whether only this machine can read it. */
bool kvs_event_feed_is_local(const struct kvs_event_feed *feed);

/* Writes its numbers as Prometheus text. */
void kvs_event_feed_metrics(const struct kvs_event_feed *feed, FILE *out);

#endif
