/* shard_private.h - what the files of a data thread call of each other.
 *
 *   dispatch.c     what comes: whose it is, whether it may be done, and the work it begins
 *   request.c      a work: its life, buffers, bulk data and answer
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
static inline bool kvs_shard_notify(struct kv_data *data, struct kv_command *command)
{
    bool is_pushed = kv_ring_push(data->answers, command);

    data->answers_due = true;
    return is_pushed;
}

/* ---- dispatch.c ---- */

/* A request whose body was too large to come with its header, on its way. */
struct receipt {
    struct kv_data *data;
    struct kv_peer *peer; /* NULL: not in use */
    uint64_t since_us;
    struct kv_wire_header header;
    size_t bytes;
    uint8_t *body; /* of data->bodies */
};

extern const struct kv_port_events kv_data_events;

/* ---- request.c ---- */

static inline uint32_t n_left(const struct kv_pool *pool)
{
    return kv_pool_size(pool) - kv_pool_lent(pool);
}

/* NULL: there is no room for one more. */
struct kv_work *kv_work_create(struct kv_data *data,
                               struct kv_peer *peer,
                               const struct kv_wire_header *request);

/* The work has to be looked at by then. */
void kv_work_due(const struct kv_work *work, uint64_t due_us);

/* Gives back all that the work holds: it is gone. */
void kv_work_end(struct kv_work *work);

/* Ends a work into whose memory data may still land: what it holds of units is free for others,
 * and its segments, pinned, and its staging buffer are nobody's until the transport has done.
 */
void kv_work_give_up(struct kv_work *work);

/* The answer to what needed no data, or failed: a status, and why in words. */
void kv_work_answer_status(struct kv_work *work);

/* Answers a request that has no work, or whose work cannot answer.  A client that does not take
 * such answers hears no more of them. */
void kv_peer_note(struct kv_data *data,
                  struct kv_peer *peer,
                  const struct kv_wire_header *request,
                  kv_status_t status,
                  const char *format,
                  ...) __attribute__((format(printf, 5, 6)));

/* Bulk that the work awaits has come. */
void kv_work_receive_bulk(struct kv_work *work, struct kv_incoming *incoming);

/* The bulk has landed, or will not. */
void kv_work_received(void *arg, kv_status_t status);

/* Bulk that is not wanted has come. */
void kv_work_bulk_discarded(struct kv_work *work);

/* ---- early_bulk.c ---- */

/* Keeps bulk that came before its request.  false: the client has enough of it. */
bool kv_early_bulk_keep(struct kv_peer *peer,
                        uint64_t request_id,
                        struct kv_incoming *incoming,
                        uint64_t bytes,
                        uint64_t now_us);

/* The bulk of a request that has come; NULL: it has not come yet. */
struct kv_incoming *
kv_early_bulk_take(struct kv_peer *peer, uint64_t request_id, uint64_t *ret_bytes);

/* Refuses what came before that time. */
void kv_early_bulk_clear(struct kv_peer *peer, uint64_t before_us);

/* ---- scheduler.c ---- */

/* Puts the work at the head of the list. */
void kv_work_link(struct kv_work **list, struct kv_work *work);

/* Takes the work out of the list or queue that it is in, if any. */
void kv_work_unlink(struct kv_work *work);

/* A prompt's rows come in large messages, one behind the other: while a query is at work only
 * one of them has its turn after every few slices.  Of small ones, many have: a client that
 * asks whether the node lives is not kept waiting by what others send. */
bool kv_data_take_messages(struct kv_data *data);

/* A slice of the most urgent work; false: there was none. */
bool kv_data_run_slice(struct kv_data *data);

/* A slice of what nobody waits for, or waits patiently; false: there was none. */
bool kv_data_run_background(struct kv_data *data);

/* Works that waited look again.  One whose rows go in wakes others: these have their turn in
 * the next step, so that a long chain of them keeps the thread from nothing. */
bool kv_data_look_again(struct kv_data *data);

/* ---- deadlines.c ---- */

/* Ends what is late, and closes who is stuck. */
void kv_data_timers(struct kv_data *data);

/* ---- session.c ---- */

/* Lists the units that placement gives this thread.  The part is not visible yet. */
kv_status_t
kv_part_init(struct kv_data *data, struct kv_part *part, const struct kv_command *command);

/* Gives back the lists of units; these are clear. */
void kv_part_free(struct kv_data *data, struct kv_part *part);

/* Clears the units, and gives back their lists. */
void kv_part_clear(struct kv_data *data, struct kv_part *part);

/* The session changed: what was under way belongs to the generation before. */
void kv_part_advance(struct kv_data *data, struct kv_part *part, uint32_t generation);

/* ---- client.c ---- */

/* NULL: no such request is under way. */
struct kv_work *kv_peer_find_work(struct kv_peer *peer, uint64_t request_id);

/* Another client may have the place once nothing of this one is under way. */
void kv_peer_settle(struct kv_peer *peer);

/* Ends the client's works; its place is free when the last one has ended. */
void kv_peer_close(struct kv_data *data, struct kv_peer *peer);

/* The channel is of no use any more: close it and let the control thread forget the client. */
void kv_peer_lost(struct kv_data *data, struct kv_peer *peer);

/* ---- command.c ---- */

/* Does a slice of the command under way; true if there was one. */
bool kv_data_command_step(struct kv_data *data);

/* ---- stats.c ---- */

void kv_data_tell_stats(struct kv_data *data);

#endif
