/* pqcache_private.h - internals of the method pqcache, shared by its three files.
 *
 *   pqcache.c         the method: creation, passes, options
 *   pqcache_query.c   a decode step of a layer: the query, and attention over its result
 *   pqcache_stats.c   statistics
 */
#ifndef KV_GPU_WORKER_ATTENTION_PQCACHE_PRIVATE_H
#define KV_GPU_WORKER_ATTENTION_PQCACHE_PRIVATE_H

#include "gpu-worker/attention/method.h"
#include "gpu-worker/attention/rerank.h"
#include "gpu-worker/kvcache/block_cache.h"
#include "gpu-worker/kvcache/device_rows.h"
#include "gpu-worker/kvcache/index_schedule.h"

struct kvw_pqcache {
    struct kvw_method base;
    struct kvw_method_setup setup;
    struct kvw_method_options options;
    struct kvw_device *device;
    struct kvw_device_rows *device_rows;
    struct kvw_block_cache *cached; /* NULL: no cache */
    uint32_t n_layers, d;
    size_t row_bytes;
    struct kvw_rerank *rerank; /* (n_layers) for adapted numbers of candidates */
    struct kvw_index_schedule *index;

    /* A query: asked, and not answered yet, while asked.op is there. */
    struct {
        struct kv_op *op;
        struct kvw_budget budget; /* of the step; also without a query */
        bool is_due;              /* to be sent, when q is here */
    } asked;
    struct kvw_event *computed, *here; /* q: on the device; in memory */
    struct kvw_event *attended;        /* what was asked for, and may be forgotten */
    float *q;                          /* (n_q_heads, d) */
    struct kv_buffer *landing;
    struct kvw_device_buffer
        *landed; /* a device buffer of the same memory; both NULL: no rows are fetched */
    enum kv_answer answer; /* of the outstanding query; IDS: rows are fetched after it */
    uint32_t *fetch_ids;   /* ids of rows that have to be fetched after it */
    uint32_t *fetch_n;     /* (n_kv_heads) */
    struct kvw_row_run *runs;
    uint32_t *run_begin;           /* (n_kv_heads + 1) */
    float *outputs, *lses;         /* (n_q_heads, d), (n_q_heads): of the nodes */
    struct kvw_device_buffer *lse; /* (n_q_heads): of sinks and window, then of all */
    struct kvw_device_buffer *found_out,
        *found_lse; /* the same shapes as out, lse: of selected rows */

    uint64_t rows_attended, rows_possible, bytes_fetched;
    uint64_t prompt_rows_attended;      /* of rows_attended: all that were possible */
    uint64_t rows_wait_us;              /* for rows that were read */
    struct kvw_waits waits;             /* for queries and fetches */
    double *layer_wait_s;               /* (n_layers) */
    struct kvw_method_stats node_stats; /* reported by the nodes */
};

static inline uint32_t kvw_pqcache_smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Query vectors per kv head. */
static inline uint32_t kvw_pqcache_group_of(const struct kvw_pqcache *pq)
{
    const struct kvw_model_params *params = &pq->setup.session.model->params;

    return params->n_q_heads / params->n_kv_heads;
}

/* The number of candidates that one adapts from. */
static inline uint32_t kvw_pqcache_usual(const struct kvw_pqcache *pq)
{
    return pq->options.first_cut == KV_CUT_NONE ? KVW_RERANK_USUAL : KVW_CANDIDATES_USUAL;
}

/* A decode step in one layer, of which other rows than the token's own are on the device: asks the
 * store, if there is anything to ask. */
kv_status_t kvw_pqcache_ask(struct kvw_pqcache *pq,
                            uint32_t layer,
                            uint32_t token,
                            const struct kvw_device_buffer *q);
/* Sends the question if its vectors are here, or, if told to, waits for them. */
kv_status_t kvw_pqcache_send(struct kvw_pqcache *pq, uint32_t layer, bool waits);
/* Then, with the token's row on the device: computes its attention. */
kv_status_t kvw_pqcache_answer(struct kvw_pqcache *pq,
                               uint32_t layer,
                               const struct kvw_device_buffer *q,
                               struct kvw_device_buffer *out);
/* Gives a question up that will not be answered. */
void kvw_pqcache_forget_question(struct kvw_pqcache *pq);

/* Adds a query's result for one kv head to the statistics. */
void kvw_pqcache_count_found(struct kvw_pqcache *pq,
                             const struct kvw_budget *budget,
                             const struct kv_query_result *found);

/* Adds what nodes read for a query. */
void kvw_pqcache_count_reads(struct kvw_pqcache *pq, const struct kv_op *op);

/* Adds a wait for an operation in a layer's attention, of the length that it has had since it began;
 * `queue_us`: how long it waited in a node. */
void kvw_pqcache_count_wait(struct kvw_pqcache *pq,
                            uint32_t layer,
                            const struct kv_op_times *times,
                            uint64_t queue_us,
                            uint64_t wait_us);

/* Returns the time that nodes worked on a query, from its results `found` (n_kv_heads). */
uint64_t kvw_pqcache_worked_us(const struct kv_query_result *found, uint32_t n_heads);

void kvw_pqcache_stats(const struct kvw_method *attention, struct kvw_method_stats *stats);

#endif
