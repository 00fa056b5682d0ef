/* query_rows.h - which rows a query needs, where not all are in memory.
 *
 * A query finds its candidates by codes, which stay in memory when rows are let go of
 * (rows/residency.h).  Of rows it needs those without codes, to score them; those without summaries, if
 * it asks for an estimate; and those of its candidates, which it knows after step 1 only.  So it begins
 * when the first two are there.  Its pipeline tells what candidates it has (pipeline.h, `need`); if any
 * of these are away it gives its place up, waits for them, and begins anew.  It remembers which they are,
 * so that it does not look for candidates again before it has them.  Mostly a token has the candidates of
 * the one before, and finds them in memory.
 *
 * Queries that are at work together note what they need together: each that lacks some waits for all of
 * it.
 *
 * Threads: the data thread.  Memory: from the heap, a bit for each block of each unit: of a place that has
 * met rows that are away, for as long as the thread runs, and of requests that wait, while all of these
 * together have at most KVS_QUERY_ROWS_KEPT.
 */
#ifndef KV_KVSERVER_STORE_OPS_QUERY_ROWS_H
#define KV_KVSERVER_STORE_OPS_QUERY_ROWS_H

#include "kvserver/store/ops/parse_units.h"

enum {
    KVS_QUERY_ROWS_KEPT = 4 << 20, /* bytes, of a data thread */
};

/* What the queries of a place need beside what each needs in any case. */
struct kvs_query_rows {
    uint64_t *bits; /* (n_units, n_words) */
    size_t capacity;
    uint32_t n_units, n_words;
    bool is_all; /* there was no memory for bits */
};

/* Forgets what was noted, for queries of the units of this one. */
void kvs_query_rows_begin(struct kvs_query_rows *rows, const struct kvs_request *request);
void kvs_query_rows_free(struct kvs_query_rows *rows);

/* Notes the rows of some tokens, ascending, of a unit of the request.  Returns whether all are in
 * memory. */
bool kvs_query_rows_add(struct kvs_query_rows *rows,
                        const struct kvs_request *request,
                        uint32_t unit,
                        const uint32_t *tokens,
                        uint32_t n_tokens);

/* Adds what was noted to what a request remembers, in *kept, which may be NULL.  Forgets that if there is
 * no memory: the request then begins anew to find out what it needs.
 *   n_bytes  that all requests of the data thread keep */
void kvs_query_rows_keep(struct kvs_query_rows **kept,
                         const struct kvs_query_rows *rows,
                         size_t *n_bytes);
void kvs_query_rows_drop(struct kvs_query_rows **kept, size_t *n_bytes);

/* Asks for the rows that the query needs (ops/need_rows.h).
 *   noted  NULL: those that it needs in any case */
const struct kvs_segment *kvs_need_query(struct kvs_request *request,
                                         const struct kvs_query_rows *noted);

#endif
