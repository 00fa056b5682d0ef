/* shard_private.h - what the files of a shard call of each other.
 *
 *   dispatch.c     messages: client, session, checks, and the request that begins
 *   request.c      a request: its life, buffers, bulk data and reply
 *   replies.c      replies that leave together
 *   early_bulk.c   bulk that arrived before its request
 *   scheduler.c    what a step does next
 *   deadlines.c    late requests, and clients without progress
 *   session.c      a session's units, and the requests that wait for their rows
 *   client.c       a client and its end
 *   command.c      commands of the control thread
 *   object_page.c  some objects at a time, to list or to delete them
 *   stats.c        gauges
 *   shard.c        creation, destruction, one step
 *   check.c        asserts the invariants of shard.h
 */
#ifndef KV_KVSERVER_STORE_SHARD_SHARD_PRIVATE_H
#define KV_KVSERVER_STORE_SHARD_SHARD_PRIVATE_H

#include "kvserver/store/shard/shard.h"

/* Hands a command that was carried out back to the control thread, or sends it a notice.
 * Returns false if the ring is full. */
static inline bool kvs_shard_notify(struct kvs_shard *shard, struct kvs_command *command)
{
    bool is_pushed = kv_ring_push(shard->replies, command);

    shard->replies_due = true;
    return is_pushed;
}

/* ---- dispatch.c ---- */

/* A request whose body was too large to come with its header, and is still arriving. */
struct kvs_pending_receive {
    struct kvs_shard *shard;
    struct kvs_shard_client *client; /* NULL: not in use */
    uint64_t since_us;
    struct kv_wire_header header;
    size_t bytes;
    uint8_t *body; /* from shard->bodies */
};

extern const struct kv_port_events kvs_shard_events;

/* ---- request.c ---- */

static inline uint32_t kvs_n_free(const struct kv_pool *pool)
{
    return kv_pool_size(pool) - kv_pool_used(pool);
}

/* Creates a request.  Returns NULL if all are in use. */
struct kvs_request *kvs_request_create(struct kvs_shard *shard,
                                       struct kvs_shard_client *client,
                                       const struct kv_wire_header *header);

/* Ends the request and releases everything that it holds. */
void kvs_request_end(struct kvs_request *request);

/* Ends a request for its client while data may still be written into its memory.  Its hold on
 * units is released at once; its pinned segments and staging buffer stay reserved until the
 * transport is done with them.
 */
void kvs_request_give_up(struct kvs_request *request);

/* Replies to a request that failed or needs no data: a status and a message. */
void kvs_request_reply_status(struct kvs_request *request);

/* Replies to a message that has no kvs_request, or whose kvs_request cannot reply.  If the
 * client does not receive such replies, further ones are dropped. */
void kvs_shard_client_note(struct kvs_shard *shard,
                           struct kvs_shard_client *client,
                           const struct kv_wire_header *header,
                           kv_status_t status,
                           const char *format,
                           ...) __attribute__((format(printf, 5, 6)));

/* The bulk that the request awaits has begun to arrive. */
void kvs_request_receive_bulk(struct kvs_request *request, struct kv_incoming *incoming);

/* The whole bulk of a deferred request has arrived: keeps a copy, or fails the request with
 * KV_BUSY. */
void kvs_request_keep_bulk(struct kvs_request *request, const uint8_t *bytes);

/* The bulk has been received, or `status` says why not. */
void kvs_request_received(void *arg, kv_status_t status);

/* The bulk has arrived and was discarded. */
void kvs_request_bulk_discarded(struct kvs_request *request);

/* A message of the request's reply has left, or failed: the last of them ends the request. */
void kvs_request_reply_sent(void *arg, kv_status_t status);

/* ---- replies.c ---- */

/* Replies of one client in one message that the transport has. */
struct kvs_reply_batch {
    struct kvs_shard *shard;
    struct kvs_request *requests[KV_WIRE_ENTRIES_MAX];
    uint32_t n;
    struct kv_wire_header header;
    uint8_t body[KVS_REPLY_BATCH_BYTES] __attribute__((aligned(KV_WIRE_BATCH_ALIGN)));
};

/* Keeps a sealed reply without bulk, and its body, until kvs_replies_flush(), to send it with
 * others of the same client.  Returns false if it must be sent alone: it is large, or the
 * client's version does not have batches of replies. */
bool kvs_replies_collect(struct kvs_request *request, const void *body, size_t body_bytes);

/* Sends what has been collected.  A step does this after each piece of work, and so no reply
 * waits for more than its own piece to end. */
void kvs_replies_flush(struct kvs_shard *shard);

/* ---- early_bulk.c ---- */

/* Keeps bulk that arrived before its request, for a second.  Returns false if the client has
 * too much of it. */
bool kvs_early_bulk_keep(struct kvs_shard *shard,
                         struct kvs_shard_client *client,
                         uint64_t request_id,
                         struct kv_incoming *incoming,
                         uint64_t bytes);

/* Returns the early bulk of a request, or NULL if there is none. */
struct kv_incoming *
kvs_early_bulk_take(struct kvs_shard_client *client, uint64_t request_id, uint64_t *ret_bytes);

/* Refuses early bulk that has been kept long enough; UINT64_MAX: all. */
void kvs_early_bulk_clear(struct kvs_shard_client *client, uint64_t now_us);

/* Returns when some of it has been kept long enough; UINT64_MAX: there is none. */
uint64_t kvs_early_bulk_next_look(const struct kvs_shard_client *client);

/* ---- scheduler.c ---- */

/* Puts the request at the head of the list. */
void kvs_request_link(struct kvs_request **list, struct kvs_request *request);

/* Takes messages for a slice: one large message of a prompt's rows, or many small ones, so that
 * a client's ping does not wait for what others send.  While a query is running, this happens
 * only after every few slices. */
bool kvs_shard_take_messages(struct kvs_shard *shard);

/* Empties the queues of all clients. */
void kvs_shard_queues_init(struct kvs_shard *shard);

/* Returns whether a request of that class is queued. */
static inline bool kvs_shard_has_queued(const struct kvs_shard *shard,
                                        enum kv_priority priority)
{
    return shard->classes[priority].first != NULL;
}

/* Runs one slice of a request, in the order of queue.h.  Returns false if none is queued. */
bool kvs_shard_run_slice(struct kvs_shard *shard);

/* Runs one slice of a background job.  Returns false if there was nothing to do. */
bool kvs_shard_run_background(struct kvs_shard *shard);

/* Wakes the requests that wait for something of the tiers. */
void kvs_shard_arrived(void *arg, const void *what);
/* The same for a segment: store->arrived. */
void kvs_shard_segment_arrived(void *arg, const struct kvs_segment *segment);
/* Wakes those of a session that wait for any: it has changed. */
void kvs_shard_wake_missing(struct kvs_shard *shard, const struct kvs_shard_session *session);

/* Runs woken requests.  A request that commits rows wakes others, which are run in the next
 * step, so that a long chain does not block the thread. */
bool kvs_shard_look_again(struct kvs_shard *shard);

/* ---- deadlines.c ---- */

/* No client has anything to check. */
void kvs_shard_due_init(struct kvs_shard *shard);

/* Makes sure that the client is checked by `due_us`. */
void kvs_shard_client_due(struct kvs_shard *shard,
                          struct kvs_shard_client *client,
                          uint64_t due_us);

/* Returns when the request has to be checked next. */
uint64_t kvs_request_next_look(const struct kvs_request *request);

/* Ends the request that needs more rows at once than there is memory for. */
void kvs_shard_end_stuck(struct kvs_shard *shard);

/* Ends late requests, and disconnects clients that make no progress.  Looks only at clients
 * that are due: at one with a steady load about once per deadline. */
void kvs_shard_timers(struct kvs_shard *shard);

/* ---- session.c ---- */

/* Creates the units that placement assigns to this thread.  The session is not visible to
 * requests yet. */
kv_status_t kvs_shard_session_init(struct kvs_shard *shard,
                                   struct kvs_shard_session *session,
                                   const struct kvs_command *command);

/* Frees the lists of units, which must be clear. */
void kvs_shard_session_free(struct kvs_shard *shard, struct kvs_shard_session *session);

/* Clears the units and frees their lists. */
void kvs_shard_session_clear(struct kvs_shard *shard, struct kvs_shard_session *session);

/* Sets the generation after a change; requests of the previous generation become stale. */
void kvs_shard_session_advance(struct kvs_shard *shard,
                               struct kvs_shard_session *session,
                               uint32_t generation);

/* ---- client.c ---- */

/* Returns the client's request with that id, or NULL. */
struct kvs_request *kvs_shard_client_find_request(struct kvs_shard_client *client,
                                                  uint64_t request_id);

/* Frees the client's place if it is closing and nothing of it is in progress. */
void kvs_shard_client_settle(struct kvs_shard_client *client);

/* Closes the channel and ends the client's requests; its place is free when the last has
 * ended. */
void kvs_shard_client_close(struct kvs_shard *shard, struct kvs_shard_client *client);

/* The channel is unusable: closes it and tells the control thread to remove the client. */
void kvs_shard_client_lost(struct kvs_shard *shard, struct kvs_shard_client *client);

/* ---- command.c ---- */

/* Runs a slice of the current command.  Returns true if there was one. */
bool kvs_shard_command_step(struct kvs_shard *shard);
/* Ends the pages of objects whose deletion the disk has. */
void kvs_shard_settle(struct kvs_shard *shard);

/* A job of the tier is done: its command goes back. */
void kvs_shard_tier_done(void *arg, enum kvs_tier_job job);

/* ---- stats.c ---- */

void kvs_shard_tell_stats(struct kvs_shard *shard);

#endif
