/* query_private.h - what query.c, which asks, and query_answer.c share. */
#ifndef KV_CLIENT_OPS_QUERY_PRIVATE_H
#define KV_CLIENT_OPS_QUERY_PRIVATE_H

#include "client/ops/query.h"
#include "proto/kv_wire.h"

struct kv_trip;
struct kv_iov;

/* Of sums in single precision. */
#define ROUNDING 1e-3f

static inline bool has_rows(const struct kv_query *query)
{
    return query->answer == KV_ANSWER_ROWS;
}

static inline bool attends(const struct kv_query *query)
{
    return query->answer == KV_ANSWER_ATTEND;
}

/* Whether there are outputs and log-sum-exps. */
static inline bool has_outputs(const struct kv_query *query)
{
    return attends(query) || query->summaries != 0;
}

/* Whether only chosen rows that the caller holds are named. */
static inline bool names_held_only(const struct kv_query *query)
{
    return attends(query) && !query->want_ids;
}

/* Whether blocks that the caller holds make a difference. */
static inline bool heeds_held(const struct kv_query *query)
{
    return has_rows(query) || attends(query);
}

/* Bytes of one head's rows in the caller's buffer. */
static inline size_t head_room(const struct kv_query_part *part)
{
    return has_rows(&part->query) ? part->n_ids_max * part->row_bytes : 0;
}

/* One head's outputs and log-sum-exps. */
static inline size_t outputs_bytes(const struct kv_query_part *part)
{
    return has_outputs(&part->query)
               ? part->query.n_queries * ((size_t)part->d_v + 1) * sizeof(float)
               : 0;
}

/* What an answer's body holds before the CRCs. */
static inline size_t names_bytes(const struct kv_query_part *part, size_t n_units, size_t n_ids)
{
    const struct kv_query *query = &part->query;
    size_t id_bytes = sizeof(uint32_t) + (query->want_weights ? sizeof(float) : 0) +
                      (query->merge == KV_MERGE_NONE ? sizeof(uint32_t) : 0);

    return sizeof(struct kv_wire_query_times) +
           n_units * (sizeof(struct kv_wire_query_result) + outputs_bytes(part)) +
           n_ids * id_bytes;
}

static inline void *carve(uint8_t **at, size_t n, size_t bytes)
{
    void *piece = *at;

    *at += n * bytes;
    return piece;
}

/* query_answer.c: for the row of the operation's kind (struct kv_op_kind). */
unsigned kv_query_land(struct kv_trip *trip, uint64_t bytes, struct kv_iov *ret_iov);
kv_status_t
kv_query_reply(struct kv_trip *trip, const uint8_t *body, char *detail, size_t detail_bytes);
/* Verifies the rows of the message and hands out its units. */
kv_status_t kv_query_finish(struct kv_trip *trip, char *detail, size_t detail_bytes);

#endif
