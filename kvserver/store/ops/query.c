/* query: selects the rows that matter most to some query vectors, and returns them, their ids,
 * or attention over them.
 *
 *   begin ......... checks the request; waits for its snapshot
 *   run, run, ..... needs rows in memory, then gets a pipeline, a staging buffer (for rows)
 *                   and a buffer for the reply, then runs slices of the pipeline (pipeline.h).
 *                   Whoever waits for one of them holds none of the others: who then finds that it
 *                   needs more rows (query_rows.h) gives all back and begins anew
 *   send_reply .... rows follow the results in the body, or come as bulk
 *
 * A data thread has a few pipelines, for as many clients; queries of a batch may share one:
 * query.h. */
#include "kvserver/store/ops/query.h"

#include "kvserver/base/slice.h"
#include "kvserver/base/within.h"
#include "kvserver/store/ops/need_rows.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"
#include "kvserver/store/ops/query_parse.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    MEMORY_PART = 16, /* pipelines have this part of the memory */
    /* A node with less memory than SMALL has to give them a larger part: a query needs as much there, and
     * where rows are exchanged all the time, no page may ever be free for it. */
    SMALL_PART = 8,
    SMALL = 64 << 20,
    FLOATS_MIN = 128 << 10,  /* of one of several pipelines: smaller ones are not worth their
                             * memory */
    FLOATS_LEAST = 32 << 10, /* of one that is alone */
    ROOM_US = 2000000,       /* that a query may wait for room while rows make some */
    FIRST_ONLY = 0,
    ANY_PLACE = 1, /* lines */
};

/* ---- places ------------------------------------------------------------------------------ */

/* Returns how many pipelines there are, and the floats that each has of its own. */
static uint32_t divide(uint64_t memory_bytes, size_t *ret_floats)
{
    const uint64_t part = memory_bytes / (memory_bytes < SMALL ? SMALL_PART : MEMORY_PART);
    const uint64_t n = part / kvs_query_pipeline_bytes(FLOATS_MIN);

    const uint32_t n_places = n > KVS_QUERIES_AT_ONCE ? KVS_QUERIES_AT_ONCE
                              : n > 1                 ? (uint32_t)n
                                                      : 1;

    *ret_floats = kvs_query_pipeline_floats(part / n_places);
    if (*ret_floats < FLOATS_LEAST)
        *ret_floats = FLOATS_LEAST;
    return n_places;
}

uint64_t kvs_op_query_takes(uint64_t memory_bytes)
{
    size_t floats;
    const uint32_t n_places = divide(memory_bytes, &floats);

    return n_places * kvs_query_pipeline_bytes(floats) + kvs_recall_bytes();
}

static void line_init(struct kvs_query_line *line)
{
    line->first = NULL;
    line->end = &line->first;
}

void *kvs_op_query_open(struct kvs_shard *shard)
{
    struct kvs_query_queue *queue = calloc(1, sizeof(*queue));
    size_t floats;

    if (queue == NULL)
        return NULL;
    line_init(&queue->lines[FIRST_ONLY]);
    line_init(&queue->lines[ANY_PLACE]);
    queue->clients = calloc(shard->n_clients, sizeof(*queue->clients));
    for (uint32_t i = 0; queue->clients != NULL && i < shard->n_clients; i++)
        queue->clients[i].waiting.end = &queue->clients[i].waiting.first;
    queue->n_places = divide(shard->memory_bytes, &floats);
    queue->pages = shard->pages;
    bool is_made = queue->clients != NULL;
    for (uint32_t i = 0; i < queue->n_places; i++) {
        queue->places[i].others.end = &queue->places[i].others.first;
        queue->places[i].pipeline =
            kvs_query_pipeline_create(floats, i == 0 ? KVS_QUERY_PIPELINE_FLOATS : floats);
        is_made = is_made && queue->places[i].pipeline != NULL;
    }
    queue->recall = kvs_recall_create(shard);
    if (!is_made || queue->recall == NULL) {
        kvs_op_query_close(queue);
        return NULL;
    }
    return queue;
}

void kvs_op_query_close(void *state)
{
    struct kvs_query_queue *queue = state;

    kvs_recall_destroy(queue->recall);
    for (uint32_t i = 0; i < queue->n_places; i++) {
        if (queue->places[i].pipeline != NULL)
            kvs_pages_take_back(queue->pages, &queue->places[i].pipeline->lent, 0);
        kvs_query_pipeline_destroy(queue->places[i].pipeline);
        kvs_query_rows_free(&queue->places[i].rows);
    }
    free(queue->clients);
    free(queue);
}

static struct kvs_query_client *client_of(const struct kvs_request *request)
{
    return &kvs_query_queue_of(request->shard)->clients[request->client->index];
}

/* Returns the request's place, or NULL. */
static struct kvs_query_place *place_of(const struct kvs_request *request)
{
    struct kvs_query_place *place = client_of(request)->place;

    return place != NULL && (place->owner == request || request->work != NULL) ? place : NULL;
}

/* Returns the request of an entry. */
static struct kvs_request *request_of(const struct kvs_query_entry *entry)
{
    return entry->input.arg;
}

/* Returns the floats that the query needs. */
static size_t need_of(const struct kvs_request *request)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const uint32_t n_eligible = kvs_ranges_count(kvs_query_ranges(request), query->n_ranges);

    return kvs_query_pipeline_need(query, n_eligible);
}

/* Returns whether the place has room for the query; the first gets it for every one. */
static bool fits(const struct kvs_request *request, const struct kvs_query_place *place)
{
    return place == kvs_query_queue_of(request->shard)->places ||
           need_of(request) <= place->pipeline->n_floats;
}

/* Returns the line for a client whose first query is this one.  The first place has room for all,
 * the others are alike. */
static struct kvs_query_line *line_of(struct kvs_query_queue *queue,
                                      const struct kvs_request *request)
{
    const bool any = fits(request, &queue->places[queue->n_places - 1]);

    return &queue->lines[any ? ANY_PLACE : FIRST_ONLY];
}

static void line_leave(struct kvs_query_client *client)
{
    if (client->line == NULL)
        return;
    *client->link = client->next;
    if (client->next != NULL)
        client->next->link = client->link;
    else
        client->line->end = client->link;
    client->line = NULL;
    client->link = NULL;
    client->next = NULL;
}

/* Puts the client at the end of the line for its first query, if it has one that waits and none
 * at work; it stays where it is if it is in that line. */
static void line_up(struct kvs_query_queue *queue, struct kvs_query_client *client)
{
    const bool waits = client->place == NULL && client->waiting.first != NULL;
    struct kvs_query_line *line = waits ? line_of(queue, client->waiting.first) : NULL;

    if (line == client->line)
        return;
    line_leave(client);
    if (line == NULL)
        return;
    client->line = line;
    client->next = NULL;
    client->link = line->end;
    *line->end = client;
    line->end = &client->next;
}

static void take_place(struct kvs_query_place *place, struct kvs_request *request)
{
    struct kvs_query_client *client = client_of(request);

    assert(place->owner == NULL && client->place == NULL);
    line_leave(client);
    place->owner = request;
    place->begun = false;
    client->place = place;
}

/* Gives the place, which is free, to the first client in line that can use it. */
static void pass_on(struct kvs_query_queue *queue, struct kvs_query_place *place)
{
    for (int i = place == &queue->places[0] ? FIRST_ONLY : ANY_PLACE; i <= ANY_PLACE; i++) {
        if (queue->lines[i].first == NULL)
            continue;
        struct kvs_request *request = queue->lines[i].first->waiting.first;

        take_place(place, request);
        kvs_request_enqueue(request);
        return;
    }
}

/* A request that has no place ends.  If it was its client's first, the next one may fit places
 * that are free. */
static void stop_waiting(struct kvs_query_queue *queue,
                         struct kvs_query_client *client,
                         struct kvs_request *request)
{
    if (request->queue != &client->waiting)
        return;
    kvs_request_unlink(request);
    line_up(queue, client);
    for (uint32_t i = 0; i < queue->n_places; i++)
        if (queue->places[i].owner == NULL)
            pass_on(queue, &queue->places[i]);
}

void kvs_op_query_wake(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;

    if (!kvs_request_check_current(request))
        return;
    if (kvs_units_committed(request) < header->snapshot)
        kvs_request_wait(request, header->snapshot);
    else
        kvs_request_enqueue(request);
}

void kvs_op_query_begin(struct kvs_request *request)
{
    struct kv_wire_header *header = &request->header;

    if (!kvs_query_check(request))
        return;
    uint32_t need = kvs_query_ranges(request)[kvs_query_of(request)->n_ranges - 1].end;
    if (header->snapshot > request->session->tokens_max) {
        kvs_request_fail(request, KV_INVALID,
                         "query: snapshot %u: the session's limit is %u tokens",
                         header->snapshot, request->session->tokens_max);
        return;
    }
    if (header->snapshot < need)
        header->snapshot = need;
    kvs_op_query_wake(request);
}

/* The request has no place any more, and waits for none. */
static void leave(struct kvs_request *request)
{
    struct kvs_query_queue *queue = kvs_query_queue_of(request->shard);
    struct kvs_query_client *client = client_of(request);
    struct kvs_query_place *place = place_of(request);

    if (place == NULL) {
        stop_waiting(queue, client, request);
        return;
    }
    struct kvs_query_entry *entry = request->work;

    request->work = NULL;
    if (entry != NULL && entry->is_active)
        kvs_query_pipeline_remove(place->pipeline, entry);
    if (place->owner != request)
        return;
    place->owner = place->others.first;
    if (place->owner != NULL) { /* it has the slices from now on */
        kvs_request_enqueue(place->owner);
        return;
    }
    if (kvs_pages_are_short(queue->pages))
        kvs_query_pipeline_end_room(place->pipeline);
    client->place = NULL;
    line_up(queue, client);
    /* At once: if the next request ends before it runs, it comes through here as well. */
    pass_on(queue, place);
}

void kvs_op_query_release(struct kvs_request *request)
{
    leave(request);
    kvs_query_rows_drop(&request->noted, &kvs_query_queue_of(request->shard)->noted_bytes);
}

/* ---- the reply --------------------------------------------------------------------------- */

static uint8_t *append(uint8_t *to, const void *from, size_t bytes)
{
    memmove(to, from, bytes);
    return to + bytes;
}

static void count(struct kvs_request *request, const struct kvs_query_entry *entry)
{
    struct kvs_stats *stats = &request->shard->stats;

    for (uint32_t i = 0; i < request->header.n_units; i++) {
        const struct kv_wire_query_result *found = &entry->input.found[i];

        kvs_count(&stats->rows_scored_by_code, found->n_scored_by_code);
        kvs_count(&stats->rows_scored_by_key, found->n_scored_by_key);
        kvs_count(&stats->rows_reranked, found->n_reranked);
        kvs_count(&stats->rows_selected, found->n_selected);
        kvs_count(&stats->rows_estimated, found->n_estimated);
    }
    kvs_count(&stats->read_books_bytes, entry->reads.books);
    kvs_count(&stats->read_codes_bytes, entry->reads.codes);
    kvs_count(&stats->read_copies_bytes, entry->reads.copies);
    kvs_count(&stats->read_keys_bytes, entry->reads.keys);
    kvs_count(&stats->read_rows_bytes, entry->reads.rows);
    kvs_count(&stats->read_summaries_bytes, entry->reads.summaries);
    kvs_count(&stats->rows_attended, entry->n_attended);
    kvs_count(&stats->rows_attended_unsummarised, entry->n_attended_unsummarised);
    kvs_count(&stats->rows_out, entry->n_rows);
    kvs_count(&stats->rows_out_bytes, entry->rows_bytes);
    kvs_count(&request->client->rows_out, entry->n_rows);
}

/* Checks that every output is finite.  One row with a NaN or an infinity spoils a whole
 * element, and the client could not tell that from a faulty node.  Returns false after failing
 * the request. */
static bool check_outputs(struct kvs_request *request, const struct kvs_query_entry *entry)
{
    const float *output = entry->input.outputs;

    if (!kvs_query_has_outputs(kvs_query_of(request)))
        return true;
    for (uint32_t unit = 0; unit < request->header.n_units; unit++) {
        const size_t n =
            (size_t)kvs_query_of(request)->n_queries * kvs_unit_layer(request, unit)->d_v;

        if (!kv_are_finite(output, n)) {
            kvs_request_fail(
                request, KV_INVALID,
                "query: layer %u head %u: the output is not finite: a row attended "
                "holds a NaN, an infinity, or values too large to add",
                kvs_units(request)[unit].layer, kvs_units(request)[unit].kv_head);
            return false;
        }
        output += n;
    }
    return true;
}

/* Completes the body of the reply, in which the result is, without the gaps in it.  Returns its
 * end. */
static uint8_t *close_body(struct kvs_request *request, const struct kvs_query_entry *entry)
{
    const struct kvs_query_input *input = &entry->input;
    const uint64_t begun_us = place_of(request)->begun_us;
    const size_t ids_bytes = entry->n_ids * sizeof(uint32_t);
    const struct kv_wire_query_times times = {
        .queue_us = (uint32_t)(begun_us - request->begin_us),
        .service_us = (uint32_t)(kv_clock_now(request->shard->clock) - begun_us),
    };
    uint8_t *to = (uint8_t *)input->ids + ids_bytes;

    memcpy(request->reply_body, &times, sizeof(times));
    if (kvs_query_of(request)->flags & KV_WIRE_READS)
        memcpy(request->reply_body + sizeof(times), &entry->reads, sizeof(entry->reads));
    if (input->weights != NULL)
        to = append(to, input->weights, ids_bytes);
    if (input->query_masks != NULL)
        to = append(to, input->query_masks, ids_bytes);
    to = append(to, input->outputs, entry->n_outputs * sizeof(float));
    to = append(to, input->lses, entry->n_lses * sizeof(float));
    if (input->crcs != NULL)
        to = append(to, input->crcs, entry->n_rows * sizeof(uint32_t));
    return to;
}

static void send_reply(struct kvs_request *request, const struct kvs_query_entry *entry)
{
    const size_t bytes = entry->rows_bytes;
    uint8_t *to = close_body(request, entry);
    uint32_t committed = UINT32_MAX;

    for (uint32_t i = 0; i < request->header.n_units; i++)
        if (entry->input.found[i].committed < committed)
            committed = entry->input.found[i].committed;
    for (uint32_t i = 0; entry->input.need != NULL && i < request->header.n_units; i++)
        kvs_pass_end(&request->shard->store, kvs_unit_at(request, i)->at,
                     &kvs_unit_at(request, i)->pass);
    request->reply.layer = kvs_units(request)[0].layer;
    request->reply.snapshot = committed;
    request->reply.n_rows = entry->n_rows;
    count(request, entry);

    bool in_body = bytes <= KV_WIRE_INLINE_MAX / 2 &&
                   (size_t)(to - request->reply_body) + bytes <= KV_WIRE_BODY_MAX;
    if (in_body && bytes > 0)
        to = append(to, request->staging, bytes);
    kvs_op_query_release(request);
    kvs_request_reply(request, request->reply_body, (size_t)(to - request->reply_body),
                      request->staging, in_body ? 0 : bytes);
}

/* ---- running ----------------------------------------------------------------------------- */

static void note_selected(void *arg,
                          const struct kvs_score *score,
                          const struct kvs_selection *selection,
                          const uint32_t *tokens,
                          uint32_t n_tokens)
{
    struct kvs_request *request = arg;

    kvs_recall_note(kvs_query_queue_of(request->shard)->recall, request->session, score,
                    selection, tokens, n_tokens);
}

static bool note_needed(void *arg, uint32_t unit, const uint32_t *tokens, uint32_t n_tokens)
{
    const struct kvs_request *request = arg;

    return kvs_query_rows_add(&place_of(request)->rows, request, unit, tokens, n_tokens);
}

/* Returns the request's place, or NULL: it waits for one. */
static struct kvs_query_place *get_place(struct kvs_request *request)
{
    struct kvs_query_queue *queue = kvs_query_queue_of(request->shard);
    struct kvs_query_client *client = client_of(request);
    struct kvs_query_place *place = place_of(request);

    if (place != NULL)
        return place;
    for (uint32_t i = 0; client->place == NULL && client->waiting.first == NULL &&
                         place == NULL && i < queue->n_places;
         i++)
        if (queue->places[i].owner == NULL && fits(request, &queue->places[i]))
            place = &queue->places[i];
    if (place != NULL) {
        take_place(place, request);
        return place;
    }
    kvs_request_release_staging(request); /* it waited for that before */
    kvs_request_queue_at(request, &client->waiting);
    line_up(queue, client);
    return NULL;
}

bool kvs_query_queue_drop_room(struct kvs_query_queue *queue)
{
    struct kvs_query_place *first = &queue->places[0];

    if (!kvs_pages_are_short(queue->pages))
        return false;
    if (first->owner == NULL)
        kvs_query_pipeline_end_room(first->pipeline);
    /* A query that has not begun may be getting room. */
    return ((first->owner == NULL || first->begun) &&
            kvs_query_pipeline_drop_room(first->pipeline, queue->pages)) ||
           kvs_recall_drop_room(queue->recall);
}

/* Gets the buffers of a request that has a place.  Returns false if the request waits for one,
 * without its place, or has failed. */
static bool get_buffers(struct kvs_request *request)
{
    if (kvs_query_of(request)->answer == KV_ANSWER_ROWS && request->staging == NULL &&
        !kvs_request_acquire_staging(request)) {
        leave(request);
        return false;
    }
    if (kvs_request_get_reply_slot(request, KV_WIRE_BODY_MAX) != KV_OK) {
        kvs_request_fail(request, KV_BUSY, "query: no free buffer for the reply");
        return false;
    }
    return true;
}

/* Returns whether the rows that a query needs to begin are in memory; if not, it waits for them,
 * without its place, or has failed. */
static bool are_here(struct kvs_request *request)
{
    const struct kvs_segment *missing = kvs_need_query(request, request->noted);

    if (missing == NULL)
        return true;
    leave(request);
    kvs_request_wait_for_segment(request, missing);
    return false;
}

/* The query, which has begun, needs rows that are away: waits for them, and for those that the
 * others of its place need, and begins anew. */
static void wait_for_rows(struct kvs_request *request)
{
    const struct kvs_query_rows *rows = &place_of(request)->rows;

    kvs_query_rows_keep(&request->noted, rows,
                        &kvs_query_queue_of(request->shard)->noted_bytes);
    kvs_request_end_work(request);
    /* Before the place is another's. */
    const struct kvs_segment *missing =
        kvs_need_query(request, request->noted != NULL ? request->noted : rows);

    leave(request);
    kvs_request_release_reply_slot(request);
    kvs_request_release_staging(request);
    if (missing != NULL)
        kvs_request_wait_for_segment(request, missing);
    else
        kvs_request_enqueue(request);
}

/* ---- queries of a batch ------------------------------------------------------------------ */

/* Returns the block of the first row of the request's first unit: forks of a session share it. */
static const struct kvs_block *first_block(const struct kvs_request *request)
{
    return kvs_unit_block(kvs_unit_at(request, 0), 0);
}

static bool names_same_units(const struct kvs_request *a, const struct kvs_request *b)
{
    if (a->header.n_units != b->header.n_units)
        return false;
    for (uint32_t i = 0; i < a->header.n_units; i++)
        if (kvs_units(a)[i].layer != kvs_units(b)[i].layer ||
            kvs_units(a)[i].kv_head != kvs_units(b)[i].kv_head)
            return false;
    return true;
}

/* Returns whether the query may be at work together with others.  One that returns rows needs a
 * staging buffer, of which there are few. */
static bool may_join(const struct kvs_request *request)
{
    return request->is_of_batch && kvs_query_of(request)->answer != KV_ANSWER_ROWS;
}

/* Returns false if there is no room for the request: it goes on waiting, without a buffer. */
static bool join(struct kvs_query_place *place, struct kvs_request *request)
{
    struct kvs_query_input input;

    if (request->reply_body == NULL &&
        kvs_request_get_spare_slot(request, KV_WIRE_BODY_MAX) != KV_OK)
        return false;
    kvs_query_parse(request, &input);
    input.selected = note_selected;
    input.need = request->shard->store.n_away > 0 ? note_needed : NULL;
    request->work = kvs_query_pipeline_add(place->pipeline, &input);
    if (request->work == NULL) {
        kvs_request_release_reply_slot(request);
        return false;
    }
    kvs_need_begin_work(request, input.need == NULL);
    if (request != place->owner)
        kvs_request_queue_at(request, &place->others);
    return true;
}

/* Lets those requests of the queue join the owner that share its rows, while there is room. */
static void join_from(struct kvs_query_place *place, struct kvs_request_queue *queue)
{
    const struct kvs_request *owner = place->owner;

    for (struct kvs_request *request = queue->first, *next; request != NULL; request = next) {
        next = request->next;
        if (request->type == owner->type && may_join(request) && !kvs_request_stale(request) &&
            first_block(request) == first_block(owner) && names_same_units(request, owner) &&
            kvs_need_query(request, request->noted) == NULL && !join(place, request))
            return;
    }
}

/* ---- slices ------------------------------------------------------------------------------ */

static void begin(struct kvs_query_place *place)
{
    struct kvs_request *owner = place->owner;

    place->begun = true;
    place->begun_us = kv_clock_now(owner->shard->clock);
    kvs_query_pipeline_begin(place->pipeline);
    if (owner->shard->store.n_away > 0)
        kvs_query_rows_begin(&place->rows, owner);
    const bool has_joined = join(place, owner);
    assert(has_joined);
    (void)has_joined;
    if (!may_join(owner))
        return;
    join_from(place, &owner->client->queues[kv_op_priority(owner->header.op)].requests);
    join_from(place, &client_of(owner)->waiting);
}

/* Fails the requests with the owner whose sessions have changed. */
static void check_others(struct kvs_query_place *place)
{
    for (struct kvs_request *request = place->others.first, *next; request != NULL;
         request = next) {
        next = request->next;
        (void)kvs_request_check_current(request);
    }
}

static void run_slice(struct kvs_query_place *place)
{
    struct kvs_query_pipeline *pipeline = place->pipeline;
    struct kvs_shard *shard = place->owner->shard;
    struct kvs_stats *stats = &shard->stats;
    const uint64_t n_read = pipeline->spans_read, n_wanted = pipeline->spans_wanted;
    const bool is_good = kvs_query_pipeline_slice(pipeline, shard->clock);

    kvs_count(&stats->spans_read, pipeline->spans_read - n_read);
    kvs_count(&stats->spans_wanted, pipeline->spans_wanted - n_wanted);
    if (!is_good) {
        struct kvs_request *request = request_of(&pipeline->entries[pipeline->entry]);

        if (kvs_unit_is_here(kvs_unit_at(request, pipeline->unit),
                             pipeline->bad / KV_BLOCK_TOKENS)) {
            kvs_fail_bad_row(request, pipeline->unit, pipeline->bad);
        } else { /* codes or summaries have gone bad since it began */
            (void)note_needed(request, pipeline->unit, &pipeline->bad, 1);
            wait_for_rows(request);
        }
    } else if (pipeline->done != NULL) {
        struct kvs_request *request = request_of(pipeline->done);

        if (pipeline->done->lacks_rows)
            wait_for_rows(request);
        else if (check_outputs(request, pipeline->done))
            send_reply(request, pipeline->done);
    }
}

/* Whether rows of sessions that are used may make room for a query that has found none. */
static bool room_comes(struct kvs_request *request, size_t n_floats)
{
    struct kvs_shard *shard = request->shard;

    if (request->lacks_us == 0)
        request->lacks_us = shard->now_us;
    if (atomic_load_explicit(&shard->pages->n_givers, memory_order_relaxed) == 0 ||
        shard->now_us > request->lacks_us + ROOM_US ||
        !kvs_pages_want(shard->pages, kvs_query_pipeline_bytes(n_floats)))
        return false;
    shard->replies_due = true; /* the control thread says when */
    return true;
}

bool kvs_op_query_run(struct kvs_request *request)
{
    if (!kvs_request_check_current(request) || (request->work == NULL && !are_here(request)))
        return false;
    struct kvs_query_place *place = get_place(request);
    if (place == NULL)
        return false;
    if (!place->begun) {
        const size_t n_floats = need_of(request);
        const kv_status_t status = kvs_query_pipeline_get_room(
            place->pipeline, kvs_query_queue_of(request->shard)->pages, n_floats);

        if (status == KV_IN_PROGRESS ||
            (status == KV_NO_MEMORY && room_comes(request, n_floats)))
            return true;
        if (status != KV_OK) {
            kvs_request_fail(request, status,
                             "query: working memory of %zu bytes: the node has too little free",
                             kvs_query_pipeline_bytes(n_floats));
            return false;
        }
        request->lacks_us = 0;
        if (!get_buffers(request))
            return false;
        begin(place);
    }
    struct kv_slice slice = kv_slice_begin(request->shard->clock, 1);
    check_others(place);
    do
        run_slice(place);
    while (place->pipeline->done != NULL && place->begun && place->owner != NULL &&
           !kv_slice_over(&slice));
    return place->owner == request;
}

/* ---- check ------------------------------------------------------------------------------- */

static void check_client(const struct kvs_query_queue *queue,
                         const struct kvs_query_client *client)
{
    const struct kvs_request *first = client->waiting.first;

    assert((client->line != NULL) == (client->place == NULL && first != NULL));
    if (client->place != NULL)
        assert(client->place->owner != NULL && client_of(client->place->owner) == client);
    if (client->line == NULL)
        return;
    assert(client->line == line_of((struct kvs_query_queue *)queue, first));
    for (uint32_t i = 0; i < queue->n_places; i++)
        assert(queue->places[i].owner != NULL || !fits(first, &queue->places[i]));
}

/* Returns how many clients are in the line. */
static uint32_t check_line(const struct kvs_query_line *line, uint32_t n_clients)
{
    struct kvs_query_client *const *link = &line->first;
    uint32_t n = 0;

    for (; *link != NULL; link = &(*link)->next) {
        assert((*link)->link == link && (*link)->line == line);
        assert(++n <= n_clients);
    }
    assert(line->end == link);
    return n;
}

/* A request of the place, whose query has begun. */
static void check_at_work(const struct kvs_query_place *place,
                          const struct kvs_request *request)
{
    const struct kvs_query_entry *entry = request->work;

    assert(client_of(request)->place == place && request->reply_slot != NULL);
    assert(entry != NULL && entry->is_active && request_of(entry) == request);
}

static void check_place(const struct kvs_query_place *place)
{
    uint32_t n_at_work = 0;

    if (place->owner == NULL || !place->begun) {
        assert(place->others.first == NULL && kvs_query_pipeline_is_done(place->pipeline));
        assert(place->owner == NULL ||
               (client_of(place->owner)->place == place && place->owner->work == NULL));
        return;
    }
    check_at_work(place, place->owner);
    for (const struct kvs_request *other = place->others.first; other != NULL;
         other = other->next, n_at_work++)
        check_at_work(place, other);
    assert(place->pipeline->n_active == n_at_work + 1);
}

void kvs_query_queue_check(const struct kvs_shard *shard)
{
    const struct kvs_query_queue *queue = kvs_query_queue_of(shard);
    uint32_t n_in_line = 0;

    assert(queue->noted_bytes <= KVS_QUERY_ROWS_KEPT);
    for (int i = FIRST_ONLY; i <= ANY_PLACE; i++)
        n_in_line += check_line(&queue->lines[i], shard->n_clients);
    for (uint32_t i = 0; i < shard->n_clients; i++) {
        check_client(queue, &queue->clients[i]);
        n_in_line -= queue->clients[i].line != NULL;
    }
    assert(n_in_line == 0);
    for (uint32_t i = 0; i < queue->n_places; i++)
        check_place(&queue->places[i]);
}
