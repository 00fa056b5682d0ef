/* query_private.h - declarations shared by query.c and query_reply.c. */
#ifndef KV_CLIENT_OPS_QUERY_PRIVATE_H
#define KV_CLIENT_OPS_QUERY_PRIVATE_H

#include "client/ops/query.h"
#include "proto/kv_wire.h"

struct kvc_request;
struct kv_iov;

/* Relative rounding error of sums in fp32, generously. */
#define KVC_QUERY_ROUNDING 1e-3f

static inline bool kvc_query_has_rows(const struct kv_query *query)
{
    return query->answer == KV_ANSWER_ROWS;
}

static inline bool kvc_query_attends(const struct kv_query *query)
{
    return query->answer == KV_ANSWER_ATTEND;
}

/* Whether the result has outputs and log-sum-exps. */
static inline bool kvc_query_has_outputs(const struct kv_query *query)
{
    return kvc_query_attends(query) || query->summaries != 0;
}

/* Whether only ids of cached rows are returned. */
static inline bool kvc_query_names_cached_only(const struct kv_query *query)
{
    return kvc_query_attends(query) && !query->want_ids;
}

/* Whether cached blocks affect the reply. */
static inline bool kvc_query_uses_cached_blocks(const struct kv_query *query)
{
    return kvc_query_has_rows(query) || kvc_query_attends(query);
}

/* Returns the most bytes of one head's rows in the caller's buffer. */
static inline size_t kvc_query_head_bytes_max(const struct kvc_query_part *part)
{
    return kvc_query_has_rows(&part->query) ? part->n_ids_max * part->row_bytes : 0;
}

/* Returns the bytes of one head's outputs and log-sum-exps. */
static inline size_t kvc_query_outputs_bytes(const struct kvc_query_part *part)
{
    return kvc_query_has_outputs(&part->query)
               ? part->query.n_queries * ((size_t)part->d_v + 1) * sizeof(float)
               : 0;
}

/* Returns where a reply's results begin. */
static inline size_t kvc_query_results_at(const struct kvc_query_part *part)
{
    return sizeof(struct kv_wire_query_times) +
           (part->has_reads ? sizeof(struct kv_wire_query_reads) : 0);
}

/* Returns how many candidates a head has for each selected row. */
static inline uint32_t kvc_query_candidates(const struct kvc_query_part *part, uint32_t head)
{
    const struct kv_query *query = &part->query;

    if (query->candidates_each != NULL)
        return query->candidates_each[head - query->kv_head_begin];
    return query->first_cut == KV_CUT_NONE ? query->rerank : query->candidates;
}

/* Returns the bytes of a reply's body before the CRCs. */
static inline size_t
kvc_query_names_bytes(const struct kvc_query_part *part, size_t n_units, size_t n_ids)
{
    const struct kv_query *query = &part->query;
    size_t id_bytes = sizeof(uint32_t) + (query->want_weights ? sizeof(float) : 0) +
                      (query->merge == KV_MERGE_NONE ? sizeof(uint32_t) : 0);

    return kvc_query_results_at(part) +
           n_units * (sizeof(struct kv_wire_query_result) + kvc_query_outputs_bytes(part)) +
           n_ids * id_bytes;
}

static inline void *kvc_query_carve(uint8_t **at, size_t n, size_t bytes)
{
    void *piece = *at;

    *at += n * bytes;
    return piece;
}

/* Members of the query's struct kvc_op_type, in query_reply.c. */
unsigned kvc_query_land(struct kvc_request *request, uint64_t bytes, struct kv_iov *ret_iov);
kv_status_t kvc_query_reply(struct kvc_request *request,
                            const uint8_t *body,
                            char *detail,
                            size_t detail_bytes);
/* Verifies the rows of the message and stores the results of its units. */
kv_status_t kvc_query_finish(struct kvc_request *request, char *detail, size_t detail_bytes);

#endif
