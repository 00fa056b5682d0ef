/* shard_private.h - what the files of a data thread call of each other.
 *
 *   dispatch.c     what comes: whose it is, whether it may be done, and the request it begins
 *   request.c      a request: its life, buffers, bulk data and answer
 *   early_bulk.c   bulk that came before its request
 *   scheduler.c    what a step does next
 *   deadlines.c    what is late, and who is stuck
 *   session.c      a session's units, and who waits for their rows
 *   client.c       a client and its end
 *   command.c      what the control thread asks
 *   stats.c        numbers told
 *   shard.c        life, one step
 */
#ifndef KV_KVSERVER_STORE_SHARD_SHARD_PRIVATE_H
#define KV_KVSERVER_STORE_SHARD_SHARD_PRIVATE_H

#include "kvserver/store/shard/shard.h"

/* To the control thread: an answer, or news.  false: the ring is full. */
static inline bool kvs_shard_notify(struct kvs_shard *shard, struct kvs_command *command)
{
    bool is_pushed = kv_ring_push(shard->answers, command);

    shard->answers_due = true;
    return is_pushed;
}

/* ---- dispatch.c ---- */

/* A request whose body was too large to come with its header, on its way. */
struct kvs_pending_receive {
    struct kvs_shard *shard;
    struct kvs_shard_client *client; /* NULL: not in use */
    uint64_t since_us;
    struct kv_wire_header header;
    size_t bytes;
    uint8_t *body; /* of data->bodies */
};

extern const struct kv_port_events kvs_shard_events;

/* ---- request.c ---- */

static inline uint32_t kvs_n_left(const struct kv_pool *pool)
{
    return kv_pool_size(pool) - kv_pool_used(pool);
}

/* NULL: there is no room for one more. */
struct kvs_request *kvs_request_create(struct kvs_shard *shard,
                                       struct kvs_shard_client *client,
                                       const struct kv_wire_header *header);

/* The request has to be looked at by then. */
void kvs_request_due(const struct kvs_request *request, uint64_t due_us);

/* Gives back all that the request holds: it is gone. */
void kvs_request_end(struct kvs_request *request);

/* Ends a request into whose memory data may still land: what it holds of units is free for others,
 * and its segments, pinned, and its staging buffer are nobody's until the transport has done.
 */
void kvs_request_give_up(struct kvs_request *request);

/* The answer to what needed no data, or failed: a status, and why in words. */
void kvs_request_answer_status(struct kvs_request *request);

/* Answers a message that has no request, or whose request cannot answer.  A client that does not
 * take such answers hears no more of them. */
void kvs_shard_client_note(struct kvs_shard *shard,
                           struct kvs_shard_client *client,
                           const struct kv_wire_header *header,
                           kv_status_t status,
                           const char *format,
                           ...) __attribute__((format(printf, 5, 6)));

/* Bulk that the request awaits has come. */
void kvs_request_receive_bulk(struct kvs_request *request, struct kv_incoming *incoming);

/* The bulk has landed, or will not. */
void kvs_request_received(void *arg, kv_status_t status);

/* Bulk that is not wanted has come. */
void kvs_request_bulk_discarded(struct kvs_request *request);

/* ---- early_bulk.c ---- */

/* Keeps bulk that came before its request.  false: the client has enough of it. */
bool kvs_early_bulk_keep(struct kvs_shard_client *client,
                         uint64_t request_id,
                         struct kv_incoming *incoming,
                         uint64_t bytes,
                         uint64_t now_us);

/* The bulk of a request that has come; NULL: it has not come yet. */
struct kv_incoming *
kvs_early_bulk_take(struct kvs_shard_client *client, uint64_t request_id, uint64_t *ret_bytes);

/* Refuses what came before that time. */
void kvs_early_bulk_clear(struct kvs_shard_client *client, uint64_t before_us);

/* ---- scheduler.c ---- */

/* Puts the request at the head of the list. */
void kvs_request_link(struct kvs_request **list, struct kvs_request *request);

/* Takes the request out of the list or queue that it is in, if any. */
void kvs_request_unlink(struct kvs_request *request);

/* A prompt's rows come in large messages, one behind the other: while a query is at work only
 * one of them has its turn after every few slices.  Of small ones, many have: a client that
 * asks whether the node lives is not kept waiting by what others send. */
bool kvs_shard_take_messages(struct kvs_shard *shard);

/* A slice of the most urgent work; false: there was none. */
bool kvs_shard_run_slice(struct kvs_shard *shard);

/* A slice of what nobody waits for, or waits patiently; false: there was none. */
bool kvs_shard_run_background(struct kvs_shard *shard);

/* Requests that waited look again.  One whose rows go in wakes others: these have their turn in
 * the next step, so that a long chain of them keeps the thread from nothing. */
bool kvs_shard_look_again(struct kvs_shard *shard);

/* ---- deadlines.c ---- */

/* Ends what is late, and closes who is stuck. */
void kvs_shard_timers(struct kvs_shard *shard);

/* ---- session.c ---- */

/* Lists the units that placement gives this thread.  The session is not visible yet. */
kv_status_t kvs_shard_session_init(struct kvs_shard *shard,
                                   struct kvs_shard_session *session,
                                   const struct kvs_command *command);

/* Gives back the lists of units; these are clear. */
void kvs_shard_session_free(struct kvs_shard *shard, struct kvs_shard_session *session);

/* Clears the units, and gives back their lists. */
void kvs_shard_session_clear(struct kvs_shard *shard, struct kvs_shard_session *session);

/* The session changed: what was under way belongs to the generation before. */
void kvs_shard_session_advance(struct kvs_shard *shard,
                               struct kvs_shard_session *session,
                               uint32_t generation);

/* ---- client.c ---- */

/* NULL: no such request is under way. */
struct kvs_request *kvs_shard_client_find_request(struct kvs_shard_client *client,
                                                  uint64_t request_id);

/* Another client may have the place once nothing of this one is under way. */
void kvs_shard_client_settle(struct kvs_shard_client *client);

/* Ends the client's requests; its place is free when the last one has ended. */
void kvs_shard_client_close(struct kvs_shard *shard, struct kvs_shard_client *client);

/* The channel is of no use any more: close it and let the control thread forget the client. */
void kvs_shard_client_lost(struct kvs_shard *shard, struct kvs_shard_client *client);

/* ---- command.c ---- */

/* Does a slice of the command under way; true if there was one. */
bool kvs_shard_command_step(struct kvs_shard *shard);

/* ---- stats.c ---- */

void kvs_shard_tell_stats(struct kvs_shard *shard);

#endif
