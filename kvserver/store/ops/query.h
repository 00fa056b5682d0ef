/* query.h - the queries of a data thread.
 *
 * Some queries are at work at a time, one of each client, each in a place, which has a pipeline
 * of its own; the order of requests (queue.h) gives them their slices.  All pipelines have the
 * same room, from a part of the thread's memory.  The first takes larger queries as well: it gets
 * room for them from the pages of the node, and keeps it until few are free.  A client whose
 * query has to wait comes after those that waited before.
 *
 * Queries that a client sent in batches are at work together, as one, if they are over the same
 * units of sessions that share rows: the client waits for all of a batch, and together they take
 * less time (pipeline.h).  Each has its own end: by its reply, a cancel, its deadline or a change
 * of its session.
 *
 * Invariants, which kvs_query_queue_check() asserts between two steps:
 *   (1) A client has no place or the one that has it, whose requests are all the client's.
 *   (2) A client is in a line while it has no place and queries that wait for one, and only then:
 *       in the line of its first one.  No place is free that this one could have.
 *   (3) The entries of a place's pipeline are those of its requests; there are none before the
 *       owner's query begins.
 *
 * Threads: the data thread.  Memory: kvs_op_query_open() / kvs_op_query_close().
 */
#ifndef KV_KVSERVER_STORE_OPS_QUERY_H
#define KV_KVSERVER_STORE_OPS_QUERY_H

#include "kvserver/store/ops/query_rows.h"
#include "kvserver/store/ops/recall.h"
#include "kvserver/store/query/pipeline.h"

enum {
    KVS_QUERIES_AT_ONCE = 4,
};

/* A pipeline and the requests that have it, all of one client. */
struct kvs_query_place {
    struct kvs_query_pipeline *pipeline;
    struct kvs_request *owner;       /* gets the slices, for all; NULL: none */
    struct kvs_request_queue others; /* with it */
    bool begun;                      /* the owner's query has begun */
    uint64_t begun_us;               /* time of the first slice */
    struct kvs_query_rows rows;      /* that they need, if some rows are away */
};

/* A client's queries. */
struct kvs_query_client {
    struct kvs_query_place *place;         /* of its query at work, or NULL */
    struct kvs_request_queue waiting;      /* for a place */
    struct kvs_query_line *line;           /* that it is in, or NULL */
    struct kvs_query_client *next, **link; /* list of the line */
};

/* Clients that wait, in the order in which they began to. */
struct kvs_query_line {
    struct kvs_query_client *first, **end;
};

struct kvs_query_queue {
    struct kvs_query_place places[KVS_QUERIES_AT_ONCE];
    uint32_t n_places;
    struct kvs_pages *pages;          /* of the node */
    struct kvs_query_client *clients; /* by index */
    /* [0] clients whose first query fits the first place only, [1] those whose first one fits
     * any */
    struct kvs_query_line lines[2];
    struct kvs_recall *recall; /* is given the selected rows */
    size_t noted_bytes;        /* of what requests remember of the rows that they wait for */
};

static inline struct kvs_query_queue *kvs_query_queue_of(const struct kvs_shard *shard)
{
    return shard->op_state[KV_OP_QUERY];
}

/* Gives a piece of the first pipeline's room, or of that for samples of recall, back to a node
 * that is short of pages, if no query uses it.  Returns false if there is nothing to do. */
bool kvs_query_queue_drop_room(struct kvs_query_queue *queue);

/* Returns whether no query uses any runs of its unit: kvs_query_pipeline_is_between(). */
static inline bool kvs_query_queue_is_between(const struct kvs_query_queue *queue)
{
    for (uint32_t i = 0; i < queue->n_places; i++)
        if (!kvs_query_pipeline_is_between(queue->places[i].pipeline))
            return false;
    return true;
}

/* Returns whether no query is at work or waits. */
static inline bool kvs_query_queue_is_idle(const struct kvs_query_queue *queue)
{
    for (uint32_t i = 0; i < queue->n_places; i++)
        if (queue->places[i].owner != NULL)
            return false;
    return queue->lines[0].first == NULL && queue->lines[1].first == NULL;
}

/* Walks the clients and their queries. */
void kvs_query_queue_check(const struct kvs_shard *shard);

#endif
