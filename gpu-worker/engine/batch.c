#include "gpu-worker/engine/batch.h"

#include "gpu-worker/base/time.h"
#include "kvserver/base/thread.h"

#include <assert.h>
#include <stdlib.h>

enum {
    RETRY_US = 200 * 1000,
    AWAY_MAX_US = 10 * 1000 * 1000,
    NAP_US = 20 * 1000,
};

struct queue {
    struct kvw_sequence *first, **end;
    uint32_t n;
};

/* Sequences that compute together. */
struct group {
    struct kvw_forward *forward;
    /* Of its pass. */
    struct kvw_forward_item *items; /* (sequences) */
    struct kvw_sequence **of;       /* (sequences) whose they are */
    uint32_t n_items;               /* 0: there is no pass */
    uint32_t n_tokens;              /* of them all */
    bool has_passed;                /* only logits are still to come */
    uint32_t *rows;                 /* (sequences) of the pass, for which they are */
    float *logits;                  /* (sequences, n_vocabulary) */
};

struct kvw_batch {
    struct kvw_batch_setup setup;
    struct group groups[KVW_BATCH_GROUPS_MAX];
    uint32_t next_group; /* that advances, modulo their number */
    struct queue waiting;
    struct queue opening; /* their sessions */
    struct queue begun;   /* those still in their prompt are in the order of their turns */
    struct queue leaving; /* answered, or failed: their rows and names are on their way */
    uint64_t away_us; /* since when no session can be opened, since nodes are away; 0: it can */
    uint64_t retry_us; /* when to try again */
    struct kvw_batch_stats stats;
};

/* ---- lists -------------------------------------------------------------------------------- */

static void queue_init(struct queue *queue)
{
    *queue = (struct queue){.end = &queue->first};
}

static void append(struct queue *queue, struct kvw_sequence *sequence)
{
    sequence->next = NULL;
    *queue->end = sequence;
    queue->end = &sequence->next;
    queue->n++;
}

static struct kvw_sequence *take_first(struct queue *queue)
{
    struct kvw_sequence *sequence = queue->first;

    queue->first = sequence->next;
    if (queue->first == NULL)
        queue->end = &queue->first;
    queue->n--;
    return sequence;
}

/* Puts others before those of a queue, in their order. */
static void put_before(struct queue *queue, const struct queue *others)
{
    if (others->n == 0)
        return;
    *others->end = queue->first;
    if (queue->n == 0)
        queue->end = others->end;
    queue->first = others->first;
    queue->n += others->n;
}

static void remove_from(struct queue *queue, const struct kvw_sequence *sequence)
{
    struct kvw_sequence **link = &queue->first;

    while (*link != sequence)
        link = &(*link)->next;
    *link = sequence->next;
    if (*link == NULL)
        queue->end = link;
    queue->n--;
}

static uint32_t count(const struct queue *queue)
{
    uint32_t n = 0;

    for (const struct kvw_sequence *at = queue->first; at != NULL; at = at->next)
        n++;
    assert(*queue->end == NULL);
    return n;
}

/* Sequences that have a session, or are getting one. */
static uint32_t n_places(const struct kvw_batch *batch)
{
    return batch->opening.n + batch->begun.n + batch->leaving.n;
}

void kvw_batch_check(const struct kvw_batch *batch)
{
    uint32_t n_passing = 0, n_tokens = 0;

    assert(count(&batch->waiting) == batch->waiting.n);
    assert(count(&batch->opening) == batch->opening.n);
    assert(count(&batch->begun) == batch->begun.n);
    assert(count(&batch->leaving) == batch->leaving.n);
    assert(n_places(batch) <= batch->setup.sequences);
    for (const struct kvw_sequence *at = batch->opening.first; at != NULL; at = at->next)
        assert(at->attention != NULL && !at->is_open);
    for (const struct kvw_sequence *at = batch->leaving.first; at != NULL; at = at->next)
        assert(at->attention != NULL);
    for (const struct kvw_sequence *at = batch->begun.first; at != NULL; at = at->next) {
        assert(at->attention != NULL && at->is_open);
        assert(at->result.passed_tokens <= at->n_prompt + at->result.generated_tokens);
        assert(at->is_generating == (at->result.passed_tokens >= at->n_prompt));
        n_passing += at->is_passing;
    }
    for (uint32_t i = 0; i < batch->setup.groups; i++) {
        const struct group *group = &batch->groups[i];
        uint32_t n_group = 0;

        for (uint32_t j = 0; j < group->n_items; j++) {
            assert(group->of[j]->is_passing);
            assert(group->of[j]->attention == group->items[j].attention);
            n_group += group->items[j].n;
        }
        assert(n_group == group->n_tokens);
        n_tokens += n_group;
        n_passing -= group->n_items;
    }
    assert(n_passing == 0 && n_tokens <= batch->setup.tokens);
}

/* ---- creation ----------------------------------------------------------------------------- */

kv_status_t kvw_batch_create(const struct kvw_batch_setup *setup, struct kvw_batch **ret_batch)
{
    const uint32_t n = setup->sequences;
    struct kvw_batch *batch;
    kv_status_t status = KV_OK;

    if (n == 0 || n > KVW_BATCH_SEQUENCES_MAX || setup->tokens < n + KVW_FORWARD_CHUNK ||
        setup->groups == 0 || setup->groups > KVW_BATCH_GROUPS_MAX)
        return KV_INVALID;
    batch = calloc(1, sizeof(*batch));
    if (batch == NULL)
        return KV_NO_MEMORY;
    batch->setup = *setup;
    queue_init(&batch->waiting);
    queue_init(&batch->opening);
    queue_init(&batch->begun);
    queue_init(&batch->leaving);
    for (uint32_t i = 0; i < setup->groups && status == KV_OK; i++) {
        struct group *group = &batch->groups[i];

        group->items = calloc(n, sizeof(group->items[0]));
        group->of = calloc(n, sizeof(group->of[0]));
        group->rows = calloc(n, sizeof(group->rows[0]));
        group->logits =
            malloc((size_t)n * setup->model->params.n_vocabulary * sizeof(group->logits[0]));
        status = group->items == NULL || group->of == NULL || group->rows == NULL ||
                         group->logits == NULL
                     ? KV_NO_MEMORY
                     : kvw_forward_create_many(setup->model, setup->tokens, n, &group->forward);
        if (status == KV_OK)
            kvw_forward_trace(group->forward, setup->trace);
    }
    if (status != KV_OK) {
        kvw_batch_destroy(batch);
        return status;
    }
    *ret_batch = batch;
    return KV_OK;
}

void kvw_batch_add(struct kvw_batch *batch, struct kvw_sequence *sequence)
{
    assert(sequence->n_prompt > 0 && sequence->n_prompt <= sequence->capacity);
    assert(batch->setup.row_bytes == 0 || sequence->row_bytes <= batch->setup.row_bytes);
    append(&batch->waiting, sequence);
}

/* ---- end of a sequence ------------------------------------------------------------------- */

/* Its answer is whole, and its rows are in the store; or neither will be. */
static void tell_over(struct kvw_sequence *sequence, kv_status_t status)
{
    struct kvw_generate_result *result = &sequence->result;

    if (result->generated_tokens > 1)
        result->tpot_s =
            (result->last_s - result->ttft_s) / (double)(result->generated_tokens - 1);
    result->total_s = sequence->begin_us > 0 ? kvw_seconds_since(sequence->begin_us) : 0;
    sequence->status = status;
    sequence->is_over = true;
    sequence->over(sequence->arg, status, result);
}

static void close_sequence(struct kvw_sequence *sequence)
{
    sequence->close(sequence->arg, sequence->attention);
    sequence->attention = NULL;
}

/* It is in no queue, and computes no more. */
static void leave(struct kvw_batch *batch, struct kvw_sequence *sequence, kv_status_t status)
{
    sequence->status = status;
    sequence->is_over = false;
    if (sequence->attention != NULL)
        append(&batch->leaving, sequence);
    else
        tell_over(sequence, status);
}

/* Returns whether it has gone. */
static bool go_on_leaving(struct kvw_sequence *sequence)
{
    if (!sequence->is_over) {
        const kv_status_t status = sequence->status == KV_OK
                                       ? kvw_method_flushed(sequence->attention)
                                       : sequence->status;

        if (status == KV_IN_PROGRESS)
            return false;
        tell_over(sequence, status);
    }
    if (!kvw_method_leave(sequence->attention,
                          sequence->status == KV_OK ? sequence->tokens : NULL,
                          sequence->result.passed_tokens))
        return false;
    close_sequence(sequence);
    return true;
}

static void take_gone(struct kvw_batch *batch)
{
    for (uint32_t n = batch->leaving.n; n > 0; n--) {
        struct kvw_sequence *sequence = take_first(&batch->leaving);

        if (!go_on_leaving(sequence))
            append(&batch->leaving, sequence);
    }
}

/* Waits for what is on its way. */
static void end_now(struct kvw_sequence *sequence, kv_status_t status)
{
    if (status == KV_OK && !sequence->is_over)
        status = kvw_method_flush(sequence->attention);
    if (!sequence->is_over)
        tell_over(sequence, status);
    if (sequence->attention != NULL)
        close_sequence(sequence);
}

void kvw_batch_destroy(struct kvw_batch *batch)
{
    if (batch == NULL)
        return;
    for (uint32_t i = 0; i < batch->setup.groups; i++)
        if (batch->groups[i].forward != NULL)
            kvw_forward_abandon(batch->groups[i].forward);
    while (batch->leaving.n > 0) {
        struct kvw_sequence *sequence = take_first(&batch->leaving);

        end_now(sequence, sequence->status);
    }
    while (batch->begun.n > 0)
        end_now(take_first(&batch->begun), KV_CANCELLED);
    while (batch->opening.n > 0)
        end_now(take_first(&batch->opening), KV_CANCELLED);
    while (batch->waiting.n > 0)
        end_now(take_first(&batch->waiting), KV_CANCELLED);
    for (uint32_t i = 0; i < batch->setup.groups; i++) {
        kvw_forward_destroy(batch->groups[i].forward);
        free(batch->groups[i].items);
        free(batch->groups[i].of);
        free(batch->groups[i].rows);
        free(batch->groups[i].logits);
    }
    free(batch);
}

/* ---- begin of a sequence ----------------------------------------------------------------- */

/* Returns whether a sequence that could not begin is to try again, since nodes may come back. */
static bool waits_for_nodes(struct kvw_batch *batch, kv_status_t status)
{
    const uint64_t now_us = kvw_now_us();

    if (status != KV_UNREACHABLE) {
        batch->away_us = 0;
        return false;
    }
    if (batch->away_us == 0)
        batch->away_us = now_us;
    if (now_us >= batch->away_us + AWAY_MAX_US)
        return false;
    batch->retry_us = now_us + RETRY_US;
    return true;
}

/* Takes what has become of an open: the sequence begins, is over, or is to try again. */
static void take_opened(struct kvw_batch *batch,
                        struct kvw_sequence *sequence,
                        kv_status_t status,
                        uint32_t n_passed,
                        struct queue *again)
{
    const bool is_again = waits_for_nodes(batch, status);

    if (is_again && sequence->attention != NULL)
        close_sequence(sequence);
    if (is_again) {
        append(again, sequence);
    } else if (status != KV_OK) {
        leave(batch, sequence, status);
    } else {
        assert(n_passed < sequence->n_prompt);
        sequence->is_open = true;
        sequence->result.reused_tokens = sequence->result.passed_tokens = n_passed;
        kvw_method_prompt_hint(sequence->attention, sequence->n_prompt, sequence->max_tokens);
        append(&batch->begun, sequence);
    }
}

static void look_at_opening(struct kvw_batch *batch)
{
    struct queue again;

    queue_init(&again);
    for (uint32_t n = batch->opening.n; n > 0; n--) {
        struct kvw_sequence *sequence = take_first(&batch->opening);
        uint32_t n_passed;
        const kv_status_t status = kvw_method_opened(sequence->attention, &n_passed);

        if (status == KV_IN_PROGRESS)
            append(&batch->opening, sequence);
        else
            take_opened(batch, sequence, status, n_passed, &again);
    }
    put_before(&batch->waiting, &again);
}

/* Returns false if it could not. */
static bool begin_sequence(struct kvw_batch *batch, struct kvw_sequence *sequence)
{
    struct queue again;
    kv_status_t status;

    sequence->attention = NULL;
    sequence->is_generating = sequence->is_open = sequence->is_over = sequence->is_passing =
        false;
    if (sequence->begin_us == 0)
        sequence->begin_us = kvw_now_us();
    sequence->result = (struct kvw_generate_result){.prompt_tokens = sequence->n_prompt};
    status = sequence->open(sequence->arg, &sequence->attention);
    if (status == KV_OK) {
        append(&batch->opening, sequence);
        return true;
    }
    queue_init(&again);
    take_opened(batch, sequence, status, 0, &again);
    put_before(&batch->waiting, &again);
    return false;
}

/* Device rows: until it generates, at least those of all its tokens. */
static uint64_t needed_by(const struct kvw_sequence *sequence)
{
    const uint64_t now = sequence->attention->ops->row_bytes(sequence->attention);

    return sequence->is_generating || now > sequence->row_bytes ? now : sequence->row_bytes;
}

/* Of all that have a session. */
static uint64_t row_bytes_of_all(const struct kvw_batch *batch)
{
    const struct queue *const queues[] = {&batch->opening, &batch->begun, &batch->leaving};
    uint64_t sum = 0;

    for (unsigned i = 0; i < sizeof(queues) / sizeof(queues[0]); i++)
        for (const struct kvw_sequence *at = queues[i]->first; at != NULL; at = at->next)
            sum += needed_by(at);
    return sum;
}

static bool has_room(const struct kvw_batch *batch, const struct kvw_sequence *sequence)
{
    const uint64_t limit = batch->setup.row_bytes;

    return limit == 0 || n_places(batch) == 0 ||
           row_bytes_of_all(batch) + sequence->row_bytes <= limit;
}

static void fill_places(struct kvw_batch *batch)
{
    struct kvw_batch_stats *stats = &batch->stats;
    uint64_t row_bytes;

    /* After one that could not begin the caller has the word. */
    while (batch->waiting.n > 0 && n_places(batch) < batch->setup.sequences &&
           has_room(batch, batch->waiting.first) && batch->retry_us <= kvw_now_us() &&
           begin_sequence(batch, take_first(&batch->waiting)))
        ;
    look_at_opening(batch);
    row_bytes = row_bytes_of_all(batch);
    if (stats->row_bytes_most < row_bytes)
        stats->row_bytes_most = row_bytes;
    if (stats->sequences_most < n_places(batch))
        stats->sequences_most = n_places(batch);
}

/* ---- what a pass computes ----------------------------------------------------------------- */

static void take_item(struct group *group, struct kvw_sequence *sequence, uint32_t n)
{
    const uint32_t begin = sequence->result.passed_tokens;

    sequence->is_passing = true;
    group->of[group->n_items] = sequence;
    group->items[group->n_items++] = (struct kvw_forward_item){
        .attention = sequence->attention,
        .phase = sequence->is_generating ? KVW_DECODE : KVW_PREFILL,
        .tokens = sequence->tokens + begin,
        .token_begin = begin,
        .n = n,
    };
    group->n_tokens += n;
}

/* Whether a pass with n more tokens of the sequence would not wait for the store. */
static bool is_ready(struct kvw_sequence *sequence, uint32_t n)
{
    return !sequence->is_passing &&
           kvw_method_is_ready(sequence->attention,
                               sequence->is_generating ? KVW_DECODE : KVW_PREFILL,
                               sequence->result.passed_tokens + n);
}

/* Takes answers for a pass, a token each: those that are in no other pass, at most the group's share
 * of all.  Returns how many are left for passes of other groups. */
static uint32_t take_answers(struct kvw_batch *batch, struct group *group)
{
    uint32_t n = 0, n_left = 0;

    for (const struct kvw_sequence *at = batch->begun.first; at != NULL; at = at->next)
        n += at->is_generating;
    n = (n + batch->setup.groups - 1) / batch->setup.groups;
    for (struct kvw_sequence *at = batch->begun.first; at != NULL; at = at->next)
        if (at->is_generating && n > 0 && is_ready(at, 1)) {
            take_item(group, at, 1);
            n--;
        } else {
            n_left += at->is_generating && !at->is_passing;
        }
    return n_left;
}

/* Takes chunks of prompts, of n_room tokens at most.  A sequence that gets one goes to the end of the
 * queue. */
static void take_chunks(struct kvw_batch *batch, struct group *group, uint32_t n_room)
{
    struct queue served;

    queue_init(&served);
    for (uint32_t n = batch->begun.n; n > 0; n--) {
        struct kvw_sequence *at = take_first(&batch->begun);
        const uint32_t begin = at->result.passed_tokens;
        const uint32_t n_chunk =
            at->is_generating ? 0 : kvw_forward_chunk_end(begin, at->n_prompt) - begin;
        const bool is_served = n_chunk > 0 && n_chunk <= n_room && is_ready(at, n_chunk);

        if (is_served) {
            take_item(group, at, n_chunk);
            n_room -= n_chunk;
        }
        append(is_served ? &served : &batch->begun, at);
    }
    while (served.n > 0)
        append(&batch->begun, take_first(&served));
}

/* Begins passes of the groups that have none: answers first, then chunks of prompts.  A sequence that
 * would have to wait for the store is left out.  All answers have room, whichever pass they are in. */
static kv_status_t begin_passes(struct kvw_batch *batch)
{
    kv_status_t status = KV_OK;

    for (uint32_t i = 0; i < batch->setup.groups && status == KV_OK; i++) {
        struct group *group = &batch->groups[i];
        uint32_t n_taken = 0;

        if (group->n_items > 0)
            continue;
        n_taken = take_answers(batch, group);
        for (uint32_t j = 0; j < batch->setup.groups; j++)
            n_taken += batch->groups[j].n_tokens;
        assert(n_taken <= batch->setup.tokens);
        take_chunks(batch, group, batch->setup.tokens - n_taken);
        if (group->n_items > 0)
            status = kvw_forward_begin(group->forward, group->items, group->n_items);
        group->has_passed = false;
    }
    return status;
}

/* ---- after a pass ------------------------------------------------------------------------- */

/* Samples the next token of a sequence whose last token has passed.  Returns false if it is over,
 * with `status`. */
static bool go_on(struct kvw_sequence *sequence, float *logits, kv_status_t *status)
{
    struct kvw_generate_result *result = &sequence->result;
    const uint32_t n = result->prompt_tokens + result->generated_tokens;
    uint32_t token;

    *status = KV_OK;
    result->end = KVW_END_MAX;
    if (sequence->max_tokens == 0)
        return false;
    result->end = KVW_END_TOKEN;
    *status = kvw_sampler_next(sequence->sampler, logits, &token);
    if (*status != KV_OK || sequence->is_end(sequence->arg, token))
        return false;
    sequence->tokens[n] = token;
    result->generated_tokens++;
    result->last_s = kvw_seconds_since(sequence->begin_us);
    if (result->generated_tokens == 1)
        result->ttft_s = result->last_s;
    else if (result->generated_tokens == 2)
        result->tt2t_s = result->last_s;
    sequence->generated(sequence->arg, token);
    result->end =
        result->generated_tokens == sequence->max_tokens ? KVW_END_MAX : KVW_END_CAPACITY;
    return result->generated_tokens < sequence->max_tokens && n < sequence->capacity;
}

/* Notes what has passed of an item.  Returns whether the sequence needs logits. */
static bool note_passed(struct kvw_batch *batch,
                        struct kvw_sequence *sequence,
                        const struct kvw_forward_item *item)
{
    struct kvw_generate_result *result = &sequence->result;

    result->passed_tokens += item->n;
    if (item->phase == KVW_DECODE) {
        batch->stats.answer_tokens++;
        if (result->generated_tokens == 1 || result->passed_tokens % KV_BLOCK_TOKENS == 0)
            kvw_method_publish(sequence->attention, sequence->tokens, result->passed_tokens,
                               false);
        return true;
    }
    batch->stats.prompt_tokens += item->n;
    if (result->passed_tokens < sequence->n_prompt) {
        kvw_method_publish(sequence->attention, sequence->tokens, result->passed_tokens, false);
        return false;
    }
    sequence->is_generating = true;
    result->prefill_s = kvw_seconds_since(sequence->begin_us);
    return true;
}

/* A group's tokens have passed: keeps those of its items whose next tokens are to be sampled. */
static void keep_sampled(struct kvw_batch *batch, struct group *group)
{
    const uint32_t n_items = group->n_items;
    uint32_t row = 0;

    group->n_items = group->n_tokens = 0;
    group->has_passed = true;
    for (uint32_t i = 0; i < n_items; i++) {
        const struct kvw_forward_item item = group->items[i];
        struct kvw_sequence *sequence = group->of[i];

        row += item.n;
        sequence->is_passing = false;
        if (item.status != KV_OK) {
            remove_from(&batch->begun, sequence);
            leave(batch, sequence, item.status);
        } else if (note_passed(batch, sequence, &item)) {
            sequence->is_passing = true;
            group->rows[group->n_items] = row - 1;
            group->of[group->n_items] = sequence;
            group->items[group->n_items++] = item;
            group->n_tokens += item.n;
        }
    }
}

/* The logits are there: samples the next tokens. */
static void sample(struct kvw_batch *batch, struct group *group)
{
    const size_t n_vocabulary = batch->setup.model->params.n_vocabulary;
    const uint32_t n_items = group->n_items;

    group->n_items = group->n_tokens = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        struct kvw_sequence *sequence = group->of[i];
        kv_status_t status;

        sequence->is_passing = false;
        if (!go_on(sequence, group->logits + i * n_vocabulary, &status)) {
            remove_from(&batch->begun, sequence);
            leave(batch, sequence, status);
        }
    }
}

/* A layer, or a stripe of the logits.  *ret_is_over: the pass is, and there is none now.  Fails with
 * the device's error. */
static kv_status_t advance(struct kvw_batch *batch, struct group *group, bool *ret_is_over)
{
    bool is_over = false;
    const kv_status_t status = kvw_forward_advance(group->forward, &is_over);

    if (status == KV_OK && is_over && group->has_passed) {
        sample(batch, group);
    } else if (status == KV_OK && is_over) {
        keep_sampled(batch, group);
        if (group->n_items > 0)
            kvw_forward_logits_begin(group->forward, group->rows, group->n_items,
                                     group->logits);
    }
    *ret_is_over = group->n_items == 0;
    return status;
}

/* Group after group advances, until the pass of one is over.  While one computes, the others' questions
 * are out. */
static kv_status_t advance_groups(struct kvw_batch *batch)
{
    bool is_over = false;
    kv_status_t status = KV_OK;

    while (status == KV_OK && !is_over) {
        struct group *group = &batch->groups[batch->next_group++ % batch->setup.groups];

        if (group->n_items > 0)
            status = advance(batch, group, &is_over);
    }
    return status;
}

/* A session by which the client of all can be driven; NULL: there is none. */
static struct kvw_method *any_session(const struct kvw_batch *batch)
{
    const struct queue *const queues[] = {&batch->opening, &batch->leaving, &batch->begun};

    for (unsigned i = 0; i < sizeof(queues) / sizeof(queues[0]); i++)
        if (queues[i]->n > 0)
            return queues[i]->first->attention;
    return NULL;
}

/* Nobody can compute: waits for something to happen. */
static void idle(struct kvw_batch *batch)
{
    struct kvw_method *any = any_session(batch);
    const uint64_t begin_us = kvw_now_us();

    if (any != NULL)
        kvw_method_wait(any, NAP_US);
    else if (batch->waiting.n > 0 && batch->retry_us > begin_us)
        kv_sleep_fds(NULL, 0, NAP_US);
    batch->stats.idle_s += kvw_seconds_since(begin_us);
}

static bool has_pass(const struct kvw_batch *batch)
{
    for (uint32_t i = 0; i < batch->setup.groups; i++)
        if (batch->groups[i].n_items > 0)
            return true;
    return false;
}

kv_status_t kvw_batch_step(struct kvw_batch *batch, uint32_t *ret_left)
{
    kv_status_t status;

    /* Once, and then everything is looked at: what ends meanwhile would not end idle(). */
    if (any_session(batch) != NULL)
        kvw_method_keepalive(any_session(batch));
    take_gone(batch);
    fill_places(batch);
    status = begin_passes(batch);
    if (status == KV_OK && has_pass(batch))
        status = advance_groups(batch);
    else if (status == KV_OK)
        idle(batch);
    take_gone(batch);
    *ret_left = n_places(batch) + batch->waiting.n;
    kvw_batch_check(batch); /* its cost is negligible against a pass */
    return status;
}

void kvw_batch_get_stats(const struct kvw_batch *batch, struct kvw_batch_stats *ret_stats)
{
    *ret_stats = batch->stats;
}
