/* The scheduler: what a data thread's step does next.  It takes messages, runs one slice of the
 * most urgent request, runs background jobs, and wakes requests that waited for rows. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/shard/op.h"

enum {
    MESSAGES_PER_STEP = 64,
    MESSAGES_US = 50,    /* while a query is running, unless one message takes longer */
    LOOKS_PER_STEP = 16, /* woken requests: each may copy its data */
    QUERY_SLICES = 4,    /* slices of queries between two rounds of messages */
};

void kvs_request_link(struct kvs_request **list, struct kvs_request *request)
{
    request->link = list;
    request->next = *list;
    if (request->next != NULL)
        request->next->link = &request->next;
    *list = request;
}

/* Works for lists and queues: `link` is what points to the request, wherever that is.  If it
 * was the last of a queue, the queue's end moves back to that place. */
void kvs_request_unlink(struct kvs_request *request)
{
    if (request->link == NULL)
        return;
    if (request->queue != NULL && request->queue->end == &request->next)
        request->queue->end = request->link;
    request->queue = NULL;
    *request->link = request->next;
    if (request->next != NULL)
        request->next->link = request->link;
    request->link = NULL;
    request->next = NULL;
}

static void append(struct kvs_request_queue *queue, struct kvs_request *request)
{
    kvs_request_unlink(request);
    request->state = KVS_REQUEST_QUEUED;
    request->queue = queue;
    request->next = NULL;
    request->link = queue->end;
    *queue->end = request;
    queue->end = &request->next;
}

void kvs_request_enqueue(struct kvs_request *request)
{
    append(&request->shard->queues[kv_op_priority(request->header.op)], request);
}

void kvs_request_queue_at(struct kvs_request *request, struct kvs_request_queue *queue)
{
    append(queue, request);
}

static void take_waiters(struct kvs_shard *shard, struct kvs_shard_session *session)
{
    session->is_woken = false;
    for (struct kvs_request *request = session->waiters, *next; request != NULL;
         request = next) {
        next = request->next;
        if (request->needs > session->woken_to)
            continue;
        append(&shard->looking, request);
        request->state = KVS_REQUEST_WAITING; /* for its deadline and for a cancel, it still
                                               * waits */
    }
}

/* Takes the waiters of all woken sessions at once: with one session per step, the last of many
 * would wait for as many steps. */
static void take_woken(struct kvs_shard *shard)
{
    for (struct kvs_shard_session *session = shard->woken; session != NULL;
         session = session->woken_next)
        take_waiters(shard, session);
    shard->woken = NULL;
    shard->woken_end = &shard->woken;
}

/* Wakes some requests; the others wait for the next step.  While queries run, a time limit
 * holds as well: a woken put may copy a whole message. */
bool kvs_shard_look_again(struct kvs_shard *shard)
{
    const bool querying = shard->queues[KV_PRIORITY_QUERY].first != NULL;

    if (shard->looking.first == NULL && shard->woken == NULL)
        return false;
    if (shard->looking.first == NULL)
        take_woken(shard);
    for (int i = 0; i < LOOKS_PER_STEP && shard->looking.first != NULL; i++) {
        struct kvs_request *request = shard->looking.first;

        kvs_request_unlink(request);
        request->state = KVS_REQUEST_BEGUN;
        request->type->wake(request);
        if (querying && kv_clock_now(shard->clock) - shard->now_us >= MESSAGES_US)
            break;
    }
    return true;
}

/* One slice of the first request of the most urgent priority.  A request that is not done goes
 * to the end of its queue, so requests of one priority take turns. */
bool kvs_shard_run_slice(struct kvs_shard *shard)
{
    for (int i = 0; i < KV_PRIORITY_COUNT; i++) {
        struct kvs_request *request = shard->queues[i].first;

        if (request != NULL) {
            kvs_request_unlink(request);
            request->state = KVS_REQUEST_BEGUN;
            if (request->type->run(request) && request->state == KVS_REQUEST_BEGUN)
                kvs_request_enqueue(request);
            return true;
        }
    }
    return false;
}

bool kvs_shard_run_background(struct kvs_shard *shard)
{
    const uint32_t turn = shard->background_turns++;

    shard->turns = 0;
    for (uint32_t i = 0; i < shard->n_background; i++) {
        const struct kvs_background_row *row = &shard->background[i];

        if (turn % row->every == 0 && row->step(shard, shard->background_state[i]))
            return true;
    }
    return false;
}

bool kvs_shard_take_messages(struct kvs_shard *shard)
{
    bool querying = shard->queues[KV_PRIORITY_QUERY].first != NULL;
    bool busy = false;

    if (querying && ++shard->query_slices < QUERY_SLICES)
        return false;
    shard->query_slices = 0;
    for (int i = 0; i < MESSAGES_PER_STEP && kv_port_progress(shard->port) > 0; i++) {
        busy = true;
        if (querying && kv_clock_now(shard->clock) - shard->now_us >= MESSAGES_US)
            break;
    }
    return busy;
}
