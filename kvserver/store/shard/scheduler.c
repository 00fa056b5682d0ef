/* The scheduler: what a data thread's step does next.  It takes messages, runs one slice of a
 * request, runs background jobs, and wakes requests that waited for rows. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/base/slice.h"
#include "kvserver/store/shard/op.h"

enum {
    QUERY_SLICES = 4, /* slices of queries between two rounds of messages */
    WEIGHT_MAX = 8,
};

/* The parts of the time that classes get if all have requests. */
static const uint8_t weights[KV_PRIORITY_COUNT] = {
    [KV_PRIORITY_QUERY] = WEIGHT_MAX, [KV_PRIORITY_FETCH] = 4, [KV_PRIORITY_APPEND] = 4,
    [KV_PRIORITY_READ] = 2,           [KV_PRIORITY_PUT] = 2,
};

void kvs_shard_queues_init(struct kvs_shard *shard)
{
    for (int i = 0; i < KV_PRIORITY_COUNT; i++)
        shard->classes[i].end = &shard->classes[i].first;
    for (uint32_t i = 0; i < shard->n_clients; i++)
        for (int j = 0; j < KV_PRIORITY_COUNT; j++) {
            struct kvs_client_queue *queue = &shard->clients[i].queues[j];

            queue->requests.end = &queue->requests.first;
            queue->left_us = KVS_TURN_US;
        }
}

/* ---- clients of a class ------------------------------------------------------------------ */

static void class_add_first(struct kvs_request_class *class, struct kvs_client_queue *queue)
{
    queue->next = class->first;
    queue->link = &class->first;
    if (queue->next != NULL)
        queue->next->link = &queue->next;
    else
        class->end = &queue->next;
    class->first = queue;
}

/* The queue has waited for its turn when it is first again.  What it used too much shortens that
 * turn, but at most to one slice. */
static void class_add_last(struct kvs_request_class *class, struct kvs_client_queue *queue)
{
    queue->left_us = queue->left_us > -KVS_TURN_US ? queue->left_us + KVS_TURN_US : 1;
    queue->next = NULL;
    queue->link = class->end;
    *class->end = queue;
    class->end = &queue->next;
}

static void class_remove(struct kvs_request_class *class, struct kvs_client_queue *queue)
{
    *queue->link = queue->next;
    if (queue->next != NULL)
        queue->next->link = queue->link;
    else
        class->end = queue->link;
    queue->link = NULL;
    queue->next = NULL;
}

/* The queue has its first request.  A client that left with time of its turn left, as one does
 * that has a request now and then, has its turn at once. */
static void class_add(struct kvs_shard *shard,
                      struct kvs_request_class *class,
                      struct kvs_client_queue *queue)
{
    if (class->first == NULL && class->used < shard->class_used)
        class->used = shard->class_used;
    if (queue->left_us > 0)
        class_add_first(class, queue);
    else
        class_add_last(class, queue);
}

/* ---- requests ---------------------------------------------------------------------------- */

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
    struct kvs_request_queue *queue = request->queue;

    if (queue != NULL && queue->end == &request->next)
        queue->end = request->link;
    request->queue = NULL;
    *request->link = request->next;
    if (request->next != NULL)
        request->next->link = request->link;
    request->link = NULL;
    request->next = NULL;
    if (queue != NULL && queue->first == NULL) {
        const enum kv_priority priority = kv_op_priority(request->header.op);
        struct kvs_client_queue *own = &request->client->queues[priority];

        if (queue == &own->requests)
            class_remove(&request->shard->classes[priority], own);
    }
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

static void prepend(struct kvs_request_queue *queue, struct kvs_request *request)
{
    kvs_request_unlink(request);
    request->state = KVS_REQUEST_QUEUED;
    if (queue->first == NULL)
        queue->end = &request->next;
    kvs_request_link(&queue->first, request);
    request->queue = queue;
}

/* Queues the request among those of its client: last, or first if it goes on. */
static void enqueue(struct kvs_request *request, bool goes_on)
{
    struct kvs_shard *shard = request->shard;
    const enum kv_priority priority = kv_op_priority(request->header.op);
    struct kvs_client_queue *queue = &request->client->queues[priority];

    if (goes_on)
        prepend(&queue->requests, request);
    else
        append(&queue->requests, request);
    if (queue->link == NULL)
        class_add(shard, &shard->classes[priority], queue);
}

void kvs_request_enqueue(struct kvs_request *request)
{
    enqueue(request, false);
}

void kvs_request_queue_at(struct kvs_request *request, struct kvs_request_queue *queue)
{
    append(queue, request);
}

/* For its deadline and for a cancel, the request still waits. */
static void look_at(struct kvs_shard *shard, struct kvs_request *request)
{
    append(&shard->looking, request);
    request->state = KVS_REQUEST_WAITING;
}

void kvs_shard_segment_arrived(void *arg, const struct kvs_segment *segment)
{
    kvs_shard_arrived(arg, segment);
}

void kvs_shard_arrived(void *arg, const void *what)
{
    struct kvs_shard *shard = arg;

    for (struct kvs_request *request = shard->missing.first, *next; request != NULL;
         request = next) {
        next = request->next;
        if (request->missing == what)
            look_at(shard, request);
    }
}

void kvs_request_is_served(struct kvs_request *request)
{
    struct kvs_shard *shard = request->shard;
    struct kvs_request *next = shard->missing.first;

    if (shard->preferred != request)
        return;
    while (next != NULL && next->session == NULL)
        next = next->next; /* it waits for an object */
    shard->preferred = next;
    /* What was found of this one says nothing of the next. */
    if (shard->store.tier->prefer_none != NULL)
        shard->store.tier->prefer_none(shard->store.tier_arg);
    if (next != NULL)
        look_at(shard, next); /* it may have been given up */
}

void kvs_shard_wake_missing(struct kvs_shard *shard, const struct kvs_shard_session *session)
{
    for (struct kvs_request *request = shard->missing.first, *next; request != NULL;
         request = next) {
        next = request->next;
        if (request->session == session)
            look_at(shard, request);
    }
}

static void take_waiters(struct kvs_shard *shard, struct kvs_shard_session *session)
{
    session->is_woken = false;
    for (struct kvs_request *request = session->waiters, *next; request != NULL;
         request = next) {
        next = request->next;
        if (request->needs > session->woken_to)
            continue;
        look_at(shard, request);
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

/* Wakes some requests; the others wait for the next step.  A woken put may copy a whole
 * message. */
bool kvs_shard_look_again(struct kvs_shard *shard)
{
    if (shard->looking.first == NULL && shard->woken == NULL)
        return false;
    if (shard->looking.first == NULL)
        take_woken(shard);
    struct kv_slice slice = kv_slice_begin(shard->clock, 1);
    while (shard->looking.first != NULL) {
        struct kvs_request *request = shard->looking.first;

        kvs_request_unlink(request);
        request->state = KVS_REQUEST_BEGUN;
        request->type->wake(request);
        if (kv_slice_over(&slice))
            break;
    }
    return true;
}

/* Returns the class with requests that has used least; the most urgent one of several. */
static enum kv_priority next_class(const struct kvs_shard *shard)
{
    enum kv_priority next = KV_PRIORITY_COUNT;

    for (enum kv_priority i = 0; i < KV_PRIORITY_COUNT; i++)
        if (kvs_shard_has_queued(shard, i) &&
            (next == KV_PRIORITY_COUNT || shard->classes[i].used < shard->classes[next].used))
            next = i;
    return next;
}

/* A slice of no measurable length counts as well: a virtual clock may stand still. */
static void charge(struct kvs_shard *shard,
                   enum kv_priority priority,
                   struct kvs_client_queue *queue,
                   uint64_t us)
{
    struct kvs_request_class *class = &shard->classes[priority];

    class->used += (us + 1) * (WEIGHT_MAX / weights[priority]);
    queue->left_us -= (int64_t)us + 1;
    if (queue->left_us <= 0 && queue->link != NULL) {
        class_remove(class, queue);
        class_add_last(class, queue);
    }
}

bool kvs_shard_run_slice(struct kvs_shard *shard)
{
    const enum kv_priority priority = next_class(shard);

    if (priority == KV_PRIORITY_COUNT)
        return false;
    struct kvs_client_queue *queue = shard->classes[priority].first;
    struct kvs_request *request = queue->requests.first;
    const uint64_t begun_us = kv_clock_now(shard->clock);

    shard->class_used = shard->classes[priority].used;
    kvs_request_unlink(request);
    request->state = KVS_REQUEST_BEGUN;
    const bool is_done = !request->type->run(request);
    charge(shard, priority, queue, kv_clock_now(shard->clock) - begun_us);
    if (!is_done && request->state == KVS_REQUEST_BEGUN)
        enqueue(request, (request->type->flags & KVS_OP_RUNS_TO_END) != 0);
    return true;
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
    bool busy = false;

    if (kvs_shard_has_queued(shard, KV_PRIORITY_QUERY) && ++shard->query_slices < QUERY_SLICES)
        return false;
    shard->query_slices = 0;
    struct kv_slice slice = kv_slice_begin_at(shard->clock, shard->now_us, 1);
    while (kv_port_progress(shard->port) > 0) {
        busy = true;
        kvs_replies_flush(shard);
        if (kv_slice_over(&slice))
            break;
    }
    return busy;
}
