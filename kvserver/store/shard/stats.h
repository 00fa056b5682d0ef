/* stats.h - what a node counts.  One table: name, help; text, JSON and Prometheus come from it.
 *
 * Threads: each data thread and the control thread own one struct and are its only writer;
 * anyone reads (relaxed atomics: numbers of one moment need not agree with each other).
 */
#ifndef KV_KVSERVER_STORE_SHARD_STATS_H
#define KV_KVSERVER_STORE_SHARD_STATS_H

#include "kvserver/base/histogram.h"
#include "proto/kv_wire.h"

/* X(name, help).  Counters only grow. */
#define KVS_COUNTERS(X)                                                                        \
    X(requests, "data requests taken")                                                         \
    X(replies, "replies sent whole")                                                           \
    X(rows_in, "rows committed")                                                               \
    X(rows_in_bytes, "bytes of rows committed")                                                \
    X(rows_out, "rows answered")                                                               \
    X(rows_out_bytes, "bytes of rows answered")                                                \
    X(rows_scored_by_code, "candidates of queries scored by their codes")                      \
    X(rows_scored_by_key, "candidates of queries scored by their keys")                        \
    X(rows_reranked, "rows that queries scored again, by their keys")                          \
    X(rows_selected, "rows that queries chose")                                                \
    X(rows_attended, "rows that queries had attention computed over")                          \
    X(recall_samples, "queries answered a second time by all keys, to see how good codes are") \
    X(codebooks_trained, "codebooks made")                                                     \
    X(rows_coded, "rows that index jobs gave codes")                                           \
    X(rows_summarised, "rows that index jobs made summaries of")                               \
    X(summaries_failed, "chapters left without summaries for want of memory")                  \
    X(rows_estimated, "rows that summaries stood for in queries' answers")                     \
    X(rows_attended_unsummarised, "rows of queries' rests attended for want of summaries")     \
    X(index_us, "time of data threads for index jobs")                                         \
    X(index_failed, "index jobs that found no memory")                                         \
    X(objects_in, "objects stored")                                                            \
    X(objects_out, "object pieces answered")                                                   \
    X(receives_in_place, "bulk puts that landed in place, without a copy")                     \
    X(receives_staged, "bulk puts that went through a staging buffer")                         \
    X(direct_sends, "bulk answers sent from where the rows lie")                               \
    X(staged_sends, "bulk answers gathered into a staging buffer")                             \
    X(segments_copied, "half-filled segments copied before a write")                           \
    X(corrupt_rows, "rows, and pieces of objects, that arrived with a wrong checksum")         \
    X(bad_rows, "rows in memory that failed their checksum")                                   \
    X(bad_codes, "blocks whose codes in memory failed their checksum")                         \
    X(bad_centroids, "codebooks whose centroids in memory failed their checksum")              \
    X(bad_cells, "chapters whose cells in memory failed their checksum")                       \
    X(bad_summaries, "groups of rows whose summaries in memory failed their checksum")         \
    X(bad_objects, "pieces of objects in memory that failed their checksum")                   \
    X(mended_rows, "bad rows that were written again")                                         \
    X(mended_codes, "blocks whose bad codes were made again")                                  \
    X(mended_centroids, "codebooks with bad centroids whose place a new one took")             \
    X(mended_cells, "chapters whose bad cells were made again")                                \
    X(mended_summaries, "chapters whose bad summaries were made again")                        \
    X(mended_objects, "bad pieces of objects that were written again")                         \
    X(scrub_bytes, "bytes of memory checked in the background")                                \
    X(scrub_passes, "times that all of the memory was checked in the background")              \
    X(bad_messages, "messages that no check could make sense of")                              \
    X(unknown_clients, "messages without the token of a client of this node")                  \
    X(rejected, "requests answered with an error of the request")                              \
    X(busy, "requests refused for want of credits or buffers")                                 \
    X(dropped, "requests dropped from clients that take no answers")                           \
    X(deadline_exceeded, "requests whose deadline passed here")                                \
    X(stalled_clients, "clients that lost their channel for standing still")                   \
    X(failed_channels, "channels reported dead by the transport")                              \
    X(control_requests, "control requests taken")                                              \
    X(control_refused, "control requests answered with an error")                              \
    X(sessions_opened, "sessions opened or forked")                                            \
    X(sessions_closed, "sessions closed by a client")                                          \
    X(sessions_expired, "sessions freed because their lease ended")                            \
    X(clients_registered, "clients that said hello")                                           \
    X(clients_lost, "clients that were lost or left without goodbye")

/* What the scrub is at. */
enum kvs_scrub_phase {
    KVS_SCRUB_ROWS,
    KVS_SCRUB_OBJECTS,
    KVS_SCRUB_RESTS, /* a pass has ended, and the next one has not begun */
};

struct kvs_op_stats {
    _Atomic uint64_t count;
    _Atomic uint64_t errors;
    struct kv_histogram us; /* from arrival to reply handed over */
};

struct kvs_stats {
#define KVS_COUNTER_FIELD(name, help) _Atomic uint64_t name;
    KVS_COUNTERS(KVS_COUNTER_FIELD)
#undef KVS_COUNTER_FIELD
    /* Gauges, set by the owner. */
    _Atomic uint64_t memory_used; /* bytes */
    _Atomic uint64_t segments;
    _Atomic uint64_t codebooks;
    _Atomic uint64_t summarised; /* rows */
    _Atomic uint64_t summaries_bytes;
    _Atomic uint64_t index_jobs; /* queued and at work */
    _Atomic uint64_t objects;
    _Atomic uint64_t object_bytes;
    _Atomic uint64_t in_flight;
    _Atomic uint64_t rows_bad, objects_bad; /* refused until they are written again: rows, and
                                             * pieces of objects */
    /* Of the scrub: where it is (enum kvs_scrub_phase, session), and its passes. */
    _Atomic uint64_t scrub_phase, scrub_session, scrub_pass_bytes;
    _Atomic uint64_t scrub_last_us, scrub_last_bytes;
    struct kvs_op_stats ops[KV_OP_COUNT];
};

static inline void kvs_count(_Atomic uint64_t *counter, uint64_t n)
{
    /* One writer: a plain add, made visible whole. */
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

/* A number that another keeps. */
static inline void kvs_stat_set(_Atomic uint64_t *number, uint64_t value)
{
    atomic_store_explicit(number, value, memory_order_relaxed);
}

static inline uint64_t kvs_counted(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit((_Atomic uint64_t *)counter, memory_order_relaxed);
}

#endif
