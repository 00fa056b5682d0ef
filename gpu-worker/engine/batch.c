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

struct kvw_batch {
    struct kvw_batch_setup setup;
    struct kvw_forward *forwards[KVW_BATCH_GROUPS_MAX];
    struct queue waiting;
    struct queue opening; /* their sessions */
    struct queue begun;   /* those still in their prompt are in the order of their turns */
    struct queue leaving; /* answered, or failed: their rows and names are on their way */
    uint64_t away_us; /* since when no session can be opened, since nodes are away; 0: it can */
    uint64_t retry_us; /* when to try again */
    float *logits;     /* (sequences, n_vocabulary) */
    struct kvw_batch_stats stats;

    /* Of a pass. */
    struct kvw_forward_item *items[KVW_BATCH_GROUPS_MAX]; /* (sequences) */
    struct kvw_sequence **of[KVW_BATCH_GROUPS_MAX];       /* (sequences) whose they are */
    uint32_t *rows;                                       /* (sequences) */
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
    }
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
    batch->logits =
        malloc((size_t)n * setup->model->params.n_vocabulary * sizeof(batch->logits[0]));
    batch->rows = calloc(n, sizeof(batch->rows[0]));
    for (uint32_t i = 0; i < setup->groups && status == KV_OK; i++) {
        batch->items[i] = calloc(n, sizeof(batch->items[i][0]));
        batch->of[i] = calloc(n, sizeof(batch->of[i][0]));
        status =
            batch->items[i] == NULL || batch->of[i] == NULL
                ? KV_NO_MEMORY
                : kvw_forward_create_many(setup->model, setup->tokens, n, &batch->forwards[i]);
        if (status == KV_OK)
            kvw_forward_trace(batch->forwards[i], setup->trace);
    }
    if (batch->logits == NULL || batch->rows == NULL)
        status = KV_NO_MEMORY;
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
        kvw_forward_destroy(batch->forwards[i]);
        free(batch->items[i]);
        free(batch->of[i]);
    }
    free(batch->logits);
    free(batch->rows);
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
    sequence->is_generating = sequence->is_open = sequence->is_over = false;
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

struct pass {
    struct kvw_forward_group groups[KVW_BATCH_GROUPS_MAX];
    uint32_t n_tokens[KVW_BATCH_GROUPS_MAX];
    uint32_t n_left; /* tokens that it has room for */
};

static void
take_item(struct kvw_batch *batch, struct pass *pass, struct kvw_sequence *sequence, uint32_t n)
{
    const uint32_t begin = sequence->result.passed_tokens;
    const uint32_t group =
        batch->setup.groups > 1 && pass->n_tokens[1] < pass->n_tokens[0] ? 1 : 0;
    struct kvw_forward_group *to = &pass->groups[group];

    batch->of[group][to->n_items] = sequence;
    to->items[to->n_items++] = (struct kvw_forward_item){
        .attention = sequence->attention,
        .phase = sequence->is_generating ? KVW_DECODE : KVW_PREFILL,
        .tokens = sequence->tokens + begin,
        .token_begin = begin,
        .n = n,
    };
    pass->n_tokens[group] += n;
    pass->n_left -= n;
}

/* Whether a pass with n more tokens of the sequence would not wait for the store. */
static bool is_ready(struct kvw_sequence *sequence, uint32_t n)
{
    return kvw_method_is_ready(sequence->attention,
                               sequence->is_generating ? KVW_DECODE : KVW_PREFILL,
                               sequence->result.passed_tokens + n);
}

/* Answers first, a token each; then chunks of prompts.  Who gets one goes to the end of the
 * queue.  Who would have to wait for the store is left out. */
static void choose(struct kvw_batch *batch, struct pass *pass)
{
    const uint32_t n = batch->begun.n;
    struct queue served;

    *pass = (struct pass){.n_left = batch->setup.tokens};
    for (uint32_t i = 0; i < batch->setup.groups; i++)
        pass->groups[i] = (struct kvw_forward_group){batch->forwards[i], batch->items[i], 0};
    for (struct kvw_sequence *at = batch->begun.first; at != NULL; at = at->next)
        if (at->is_generating && is_ready(at, 1))
            take_item(batch, pass, at, 1);
    queue_init(&served);
    for (uint32_t i = 0; i < n; i++) {
        struct kvw_sequence *at = take_first(&batch->begun);
        const uint32_t begin = at->result.passed_tokens;
        const uint32_t n_chunk =
            at->is_generating ? 0 : kvw_forward_chunk_end(begin, at->n_prompt) - begin;
        const bool is_served = n_chunk > 0 && n_chunk <= pass->n_left && is_ready(at, n_chunk);

        if (is_served)
            take_item(batch, pass, at, n_chunk);
        append(is_served ? &served : &batch->begun, at);
    }
    while (served.n > 0)
        append(&batch->begun, take_first(&served));
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

/* Of a group: logits, and the next tokens.  Fails with the device's error. */
static kv_status_t
finish_group(struct kvw_batch *batch, const struct kvw_forward_group *group, uint32_t at)
{
    const size_t n_vocabulary = batch->setup.model->params.n_vocabulary;
    struct kvw_sequence **of = batch->of[at];
    uint32_t n_wanted = 0, row = 0;
    kv_status_t status;

    for (uint32_t i = 0; i < group->n_items; i++) {
        const struct kvw_forward_item *item = &group->items[i];

        row += item->n;
        if (item->status != KV_OK) {
            remove_from(&batch->begun, of[i]);
            leave(batch, of[i], item->status);
        } else if (note_passed(batch, of[i], item)) {
            batch->rows[n_wanted] = row - 1;
            of[n_wanted++] = of[i];
        }
    }
    status = n_wanted == 0
                 ? KV_OK
                 : kvw_forward_logits_of(group->forward, batch->rows, n_wanted, batch->logits);
    for (uint32_t i = 0; status == KV_OK && i < n_wanted; i++) {
        kv_status_t last;

        if (!go_on(of[i], batch->logits + i * n_vocabulary, &last)) {
            remove_from(&batch->begun, of[i]);
            leave(batch, of[i], last);
        }
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

static kv_status_t compute(struct kvw_batch *batch, struct pass *pass)
{
    kv_status_t status = kvw_forward_pass(pass->groups, batch->setup.groups);

    for (uint32_t i = 0; status == KV_OK && i < batch->setup.groups; i++)
        status = finish_group(batch, &pass->groups[i], i);
    return status;
}

kv_status_t kvw_batch_step(struct kvw_batch *batch, uint32_t *ret_left)
{
    struct pass pass;
    kv_status_t status = KV_OK;

    /* Once, and then everything is looked at: what ends meanwhile would not end idle(). */
    if (any_session(batch) != NULL)
        kvw_method_keepalive(any_session(batch));
    take_gone(batch);
    fill_places(batch);
    choose(batch, &pass);
    if (pass.n_left < batch->setup.tokens)
        status = compute(batch, &pass);
    else
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
