/* query: selects the rows that matter most to some query vectors, and returns them, their ids,
 * or attention over them.
 *
 *   begin ......... checks the request; waits for its snapshot
 *   run, run, ..... gets a pipeline, a staging buffer (for rows) and a buffer for the reply,
 *                   then runs slices of the pipeline (pipeline.h).  Whoever waits for one of
 *                   them holds none of the others
 *   send_reply .... rows follow the results in the body, or come as bulk
 *
 * A data thread has a few pipelines, for as many clients: query.h. */
#include "kvserver/store/ops/query.h"

#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"
#include "kvserver/store/ops/query_parse.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MEMORY_PART = 16,      /* all pipelines but the first have this part of the memory */
    FLOATS_MIN = 64 << 10, /* of a pipeline: smaller ones are not worth their memory */
    FIRST_ONLY = 0,
    ANY_PLACE = 1, /* lines */
};

/* ---- places ------------------------------------------------------------------------------ */

/* Returns how many pipelines there are besides the first, and the floats of each. */
static uint32_t divide(uint64_t memory_bytes, size_t *ret_floats)
{
    const uint64_t part = memory_bytes / MEMORY_PART;
    const uint64_t n = part / kvs_query_pipeline_bytes(FLOATS_MIN);
    const uint32_t n_places =
        n < KVS_QUERIES_AT_ONCE - 1 ? (uint32_t)n : KVS_QUERIES_AT_ONCE - 1;

    *ret_floats = n_places > 0 ? kvs_query_pipeline_floats(part / n_places) : 0;
    return n_places;
}

uint64_t kvs_op_query_takes(uint64_t memory_bytes)
{
    size_t floats;
    const uint32_t n_places = divide(memory_bytes, &floats);

    return n_places > 0 ? n_places * kvs_query_pipeline_bytes(floats) : 0;
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
    queue->n_places = 1 + divide(shard->memory_bytes, &floats);
    bool is_made = queue->clients != NULL;
    for (uint32_t i = 0; i < queue->n_places; i++) {
        queue->places[i].pipeline =
            kvs_query_pipeline_create(i == 0 ? KVS_QUERY_PIPELINE_FLOATS : floats);
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
    for (uint32_t i = 0; i < queue->n_places; i++)
        kvs_query_pipeline_destroy(queue->places[i].pipeline);
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

    return place != NULL && place->owner == request ? place : NULL;
}

/* Returns whether the place has room for the query; the first has it for every one. */
static bool fits(const struct kvs_request *request, const struct kvs_query_place *place)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const uint32_t n_eligible = kvs_ranges_count(kvs_query_ranges(request), query->n_ranges);

    return place == kvs_query_queue_of(request->shard)->places ||
           kvs_query_pipeline_need(n_eligible, query->n_queries) <=
               place->pipeline->scratch.n_floats;
}

/* The client has a query that waits and none at work: puts it at the end of its line. */
static void line_up(struct kvs_query_queue *queue, struct kvs_query_client *client)
{
    if (client->is_listed)
        return;
    /* The first place has room for all, the others are alike. */
    const bool any = fits(client->waiting.first, &queue->places[queue->n_places - 1]);
    struct kvs_query_line *line = &queue->lines[any ? ANY_PLACE : FIRST_ONLY];

    client->is_listed = true;
    client->next = NULL;
    *line->end = client;
    line->end = &client->next;
}

static void take_place(struct kvs_query_place *place, struct kvs_request *request)
{
    place->owner = request;
    place->begun = false;
    client_of(request)->place = place;
}

/* Takes the first client out of the line. */
static struct kvs_query_client *line_pop(struct kvs_query_line *line)
{
    struct kvs_query_client *client = line->first;

    line->first = client->next;
    if (line->first == NULL)
        line->end = &line->first;
    client->is_listed = false;
    return client;
}

/* Gives the place, which is free, to the first client in line that can use it. */
static void pass_on(struct kvs_query_queue *queue, struct kvs_query_place *place)
{
    for (int i = place == &queue->places[0] ? FIRST_ONLY : ANY_PLACE; i <= ANY_PLACE; i++) {
        while (queue->lines[i].first != NULL) {
            struct kvs_query_client *client = line_pop(&queue->lines[i]);
            struct kvs_request *request = client->waiting.first;

            if (request == NULL)
                continue; /* its queries ended */
            if (!fits(request, place)) {
                line_up(queue, client); /* the first one ended: this one is larger */
                continue;
            }
            take_place(place, request);
            kvs_request_enqueue(request);
            return;
        }
    }
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

void kvs_op_query_release(struct kvs_request *request)
{
    struct kvs_query_queue *queue = kvs_query_queue_of(request->shard);
    struct kvs_query_client *client = client_of(request);
    struct kvs_query_place *place = place_of(request);

    if (place == NULL)
        return;
    kvs_query_pipeline_end(place->pipeline);
    place->owner = NULL;
    client->place = NULL;
    if (client->waiting.first != NULL)
        line_up(queue, client);
    /* At once: if the next request ends before it runs, it comes through here as well. */
    pass_on(queue, place);
}

/* ---- the reply --------------------------------------------------------------------------- */

static uint8_t *append(uint8_t *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    return to + bytes;
}

static void count(struct kvs_request *request, const struct kvs_query_pipeline *pipeline)
{
    struct kvs_stats *stats = &request->shard->stats;

    for (uint32_t i = 0; i < request->header.n_units; i++) {
        kvs_count(&stats->rows_scored_by_code, pipeline->found[i].n_scored_by_code);
        kvs_count(&stats->rows_scored_by_key, pipeline->found[i].n_scored_by_key);
        kvs_count(&stats->rows_reranked, pipeline->found[i].n_reranked);
        kvs_count(&stats->rows_selected, pipeline->found[i].n_selected);
        kvs_count(&stats->rows_estimated, pipeline->found[i].n_estimated);
    }
    kvs_count(&stats->rows_attended, pipeline->n_attended);
    kvs_count(&stats->rows_attended_unsummarised, pipeline->n_attended_unsummarised);
    kvs_count(&stats->rows_out, pipeline->n_rows);
    kvs_count(&stats->rows_out_bytes, pipeline->rows_bytes);
    kvs_count(&request->client->rows_out, pipeline->n_rows);
}

/* Checks that every output is finite.  One row with a NaN or an infinity spoils a whole
 * element, and the client could not tell that from a faulty node.  Returns false after failing
 * the request. */
static bool check_outputs(struct kvs_request *request,
                          const struct kvs_query_pipeline *pipeline)
{
    const float *output = pipeline->outputs;

    if (!kvs_query_has_outputs(kvs_query_of(request)))
        return true;
    for (uint32_t unit = 0; unit < request->header.n_units; unit++) {
        const float *end = output + (size_t)kvs_query_of(request)->n_queries *
                                        kvs_unit_layer(request, unit)->d_v;

        for (; output < end; output++) {
            if (isfinite(*output))
                continue;
            kvs_request_fail(
                request, KV_INVALID,
                "query: layer %u head %u: the output is not finite: a row attended "
                "holds a NaN, an infinity, or values too large to add",
                kvs_units(request)[unit].layer, kvs_units(request)[unit].kv_head);
            return false;
        }
    }
    return true;
}

static void send_reply(struct kvs_request *request, struct kvs_query_pipeline *pipeline)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const uint64_t begun_us = place_of(request)->begun_us;
    const size_t ids_bytes = pipeline->n_ids * sizeof(uint32_t);
    const struct kv_wire_query_times times = {
        .queue_us = (uint32_t)(begun_us - request->begin_us),
        .service_us = (uint32_t)(kv_clock_now(request->shard->clock) - begun_us),
    };
    const size_t bytes = pipeline->rows_bytes;
    uint32_t committed = UINT32_MAX;
    uint8_t *to = request->reply_body;

    to = append(to, &times, sizeof(times));
    to = append(to, pipeline->found, request->header.n_units * sizeof(pipeline->found[0]));
    to = append(to, pipeline->ids, ids_bytes);
    if (query->flags & KV_WIRE_WEIGHTS)
        to = append(to, pipeline->scores, ids_bytes);
    if (query->merge == KV_MERGE_NONE)
        to = append(to, pipeline->query_masks, ids_bytes);
    to = append(to, pipeline->outputs, pipeline->n_outputs * sizeof(float));
    to = append(to, pipeline->lses, pipeline->n_lses * sizeof(float));
    to = append(to, pipeline->crcs, pipeline->n_rows * sizeof(uint32_t));
    for (uint32_t i = 0; i < request->header.n_units; i++)
        if (pipeline->found[i].committed < committed)
            committed = pipeline->found[i].committed;
    request->reply.layer = kvs_units(request)[0].layer;
    request->reply.snapshot = committed;
    request->reply.n_rows = pipeline->n_rows;
    count(request, pipeline);

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
    if (client->place == NULL)
        line_up(queue, client);
    return NULL;
}

/* Gets the buffers of a request that has a place.  Returns false if the request waits for one,
 * without its place, or has failed. */
static bool get_buffers(struct kvs_request *request)
{
    if (kvs_query_of(request)->answer == KV_ANSWER_ROWS && request->staging == NULL &&
        !kvs_request_acquire_staging(request)) {
        kvs_op_query_release(request);
        return false;
    }
    if (kvs_request_get_reply_slot(request, KV_WIRE_BODY_MAX) != KV_OK) {
        kvs_request_fail(request, KV_BUSY, "query: no free buffer for the reply");
        return false;
    }
    return true;
}

static void begin(struct kvs_request *request, struct kvs_query_place *place)
{
    struct kvs_query_input input;

    place->begun = true;
    place->begun_us = kv_clock_now(request->shard->clock);
    kvs_query_parse(request, place->units, &input);
    input.selected = note_selected;
    input.arg = request;
    kvs_query_pipeline_begin(place->pipeline, &input);
}

bool kvs_op_query_run(struct kvs_request *request)
{
    if (!kvs_request_check_current(request))
        return false;
    struct kvs_query_place *place = get_place(request);
    if (place == NULL)
        return false;
    if (!place->begun) {
        if (!get_buffers(request))
            return false;
        begin(request, place);
    }
    struct kvs_query_pipeline *pipeline = place->pipeline;
    if (!kvs_query_pipeline_slice(pipeline)) {
        kvs_fail_bad_row(request, pipeline->unit, pipeline->bad);
        return false;
    }
    if (!kvs_query_pipeline_is_done(pipeline))
        return true;
    if (check_outputs(request, pipeline))
        send_reply(request, pipeline);
    return false;
}
