/* What a step of a data thread does next: messages, slices of requests, work in the background,
 * and works that waited. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/shard/op.h"

enum {
    MESSAGES_PER_STEP = 64,
    MESSAGES_US = 50,    /* while a query is at work, unless one message alone takes longer */
    LOOKS_PER_STEP = 16, /* of works that waited: each may copy what came with it */
    QUERY_SLICES = 4,    /* of queries, before messages are looked at again */
};

void kv_work_link(struct kv_work **list, struct kv_work *work)
{
    work->link = list;
    work->next = *list;
    if (work->next != NULL)
        work->next->link = &work->next;
    *list = work;
}

void kv_work_unlink(struct kv_work *work)
{
    if (work->link == NULL)
        return;
    if (work->queue != NULL && work->queue->end == &work->next)
        work->queue->end = work->link;
    work->queue = NULL;
    *work->link = work->next;
    if (work->next != NULL)
        work->next->link = work->link;
    work->link = NULL;
    work->next = NULL;
}

static void append_work(struct kv_work_queue *queue, struct kv_work *work)
{
    kv_work_unlink(work);
    work->state = KV_WORK_QUEUED;
    work->queue = queue;
    work->next = NULL;
    work->link = queue->end;
    *queue->end = work;
    queue->end = &work->next;
}

void kv_work_queue(struct kv_work *work)
{
    append_work(&work->data->queues[kv_op_priority(work->request.op)], work);
}

void kv_work_queue_at(struct kv_work *work, struct kv_work_queue *queue)
{
    append_work(queue, work);
}

static void take_waiters(struct kv_data *data, struct kv_part *part)
{
    part->is_woken = false;
    for (struct kv_work *work = part->waiters, *next; work != NULL; work = next) {
        next = work->next;
        if (work->needs > part->woken_to)
            continue;
        append_work(&data->looking, work);
        work->state = KV_WORK_WAITING; /* it may be late, or cancelled */
    }
}

/* Of all sessions that were woken: with one of them in each step, the last of many would wait for
 * as many steps. */
static void take_woken(struct kv_data *data)
{
    for (struct kv_part *part = data->woken; part != NULL; part = part->woken_next)
        take_waiters(data, part);
    data->woken = NULL;
    data->woken_end = &data->woken;
}

bool kv_data_look_again(struct kv_data *data)
{
    const bool querying = data->queues[KV_PRIORITY_QUERY].first != NULL;

    if (data->looking.first == NULL && data->woken == NULL)
        return false;
    if (data->looking.first == NULL)
        take_woken(data);
    for (int i = 0; i < LOOKS_PER_STEP && data->looking.first != NULL; i++) {
        struct kv_work *work = data->looking.first;

        kv_work_unlink(work);
        work->state = KV_WORK_BEGUN;
        work->row->wake(work);
        if (querying && kv_clock_now(data->clock) - data->now_us >= MESSAGES_US)
            break;
    }
    return true;
}

bool kv_data_run_slice(struct kv_data *data)
{
    for (int i = 0; i < KV_PRIORITY_COUNT; i++) {
        struct kv_work *work = data->queues[i].first;

        if (work != NULL) {
            kv_work_unlink(work);
            work->state = KV_WORK_BEGUN;
            if (work->row->run(work) && work->state == KV_WORK_BEGUN)
                kv_work_queue(work);
            return true;
        }
    }
    return false;
}

bool kv_data_run_background(struct kv_data *data)
{
    const uint32_t turn = data->background_turns++;

    data->turns = 0;
    for (uint32_t i = 0; i < data->n_background; i++) {
        const struct kvs_background_row *row = &data->background[i];

        if (turn % row->every == 0 && row->step(data, data->background_state[i]))
            return true;
    }
    return false;
}

bool kv_data_take_messages(struct kv_data *data)
{
    bool querying = data->queues[KV_PRIORITY_QUERY].first != NULL;
    bool busy = false;

    if (querying && ++data->query_slices < QUERY_SLICES)
        return false;
    data->query_slices = 0;
    for (int i = 0; i < MESSAGES_PER_STEP && kv_port_progress(data->port) > 0; i++) {
        busy = true;
        if (querying && kv_clock_now(data->clock) - data->now_us >= MESSAGES_US)
            break;
    }
    return busy;
}
