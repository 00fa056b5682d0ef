/* stats.h - a node's statistics.  One table of names and help texts is the source for the text,
 * JSON and Prometheus forms.
 *
 * Threads: each data thread and the control thread own one struct and are its only writer; any
 * thread may read (relaxed atomics: values need not belong to the same moment).
 */
#ifndef KV_KVSERVER_STORE_SHARD_STATS_H
#define KV_KVSERVER_STORE_SHARD_STATS_H

#include "kvserver/base/histogram.h"
#include "proto/kv_status.h"
#include "proto/kv_wire.h"

/* X(name, help).  Counters only grow. */
#define KVS_COUNTERS(X)                                                               \
    X(requests, "data requests received")                                             \
    X(replies, "replies sent")                                                        \
    X(rows_in, "rows committed")                                                      \
    X(rows_in_bytes, "bytes of rows committed")                                       \
    X(rows_out, "rows sent in replies")                                               \
    X(rows_out_bytes, "bytes of rows sent in replies")                                \
    X(rows_scored_by_code, "eligible rows that queries scored by code")               \
    X(rows_scored_by_key, "eligible rows that queries scored by key")                 \
    X(rows_reranked, "candidates that queries rescored by key")                       \
    X(spans_read, "spans of rows that queries of one batch rescored together")        \
    X(spans_wanted, "the same, counted once for each query that had rows there")      \
    X(rows_selected, "rows that queries selected")                                    \
    X(rows_attended, "rows that queries computed attention over")                     \
    X(recall_samples, "queries repeated exactly to measure recall")                   \
    X(codebooks_trained, "codebooks trained")                                         \
    X(codebooks_recalled, "codebooks read from disk instead of trained again")        \
    X(rows_coded, "rows that index jobs encoded")                                     \
    X(rows_summarised, "rows that index jobs summarized")                             \
    X(summaries_failed, "chapters without summaries because memory ran out")          \
    X(rows_estimated, "rows that queries estimated from summaries")                   \
    X(read_books_bytes, "codebooks and rotations that queries read")                  \
    X(read_codes_bytes, "codes, or lists of rows by code, that queries read")         \
    X(read_copies_bytes, "copies of keys in 4 bits that queries read")                \
    X(read_keys_bytes, "keys that queries scored")                                    \
    X(read_rows_bytes, "rows that queries attended to or returned")                   \
    X(read_summaries_bytes, "summaries that queries read")                            \
    X(rows_attended_unsummarised,                                                     \
      "unselected rows attended exactly because they had no summaries")               \
    X(index_us, "time that data threads spent on index jobs")                         \
    X(index_failed, "index jobs that failed because memory ran out")                  \
    X(objects_in, "objects stored")                                                   \
    X(objects_in_bytes, "bytes of objects stored")                                    \
    X(objects_out, "object pieces sent in replies")                                   \
    X(objects_out_bytes, "bytes of object pieces sent in replies")                    \
    X(objects_expired, "objects removed because their time was over")                 \
    X(objects_evicted, "objects removed to make room")                                \
    X(objects_left, "objects that left memory for the disk")                          \
    X(receives_in_place, "bulk puts received in place, without a copy")               \
    X(receives_staged, "bulk puts received through a staging buffer")                 \
    X(direct_sends, "bulk replies sent in place, without a copy")                     \
    X(staged_sends, "bulk replies gathered in a staging buffer")                      \
    X(block_waits, "waits of requests for blocks that were not in memory")            \
    X(disk_written_bytes, "rows, codes and objects written to disk")                  \
    X(disk_read_bytes, "rows, codes and objects read from disk")                      \
    X(blocks_left, "blocks that left memory for the disk")                            \
    X(blocks_loaded, "blocks that came back from disk")                               \
    X(rows_let_go_bytes, "rows that made room for others, of sessions that are used") \
    X(rows_moved_bytes, "rows that were moved in memory to get whole pages")          \
    X(bad_saved_segments, "segments that were missing on disk, or wrong")             \
    X(bad_saved_columns, "codes, codebooks and summaries on disk that were wrong")    \
    X(bad_saved_pieces, "object pieces that were missing on disk, or wrong")          \
    X(disk_errors, "reads and writes that the disk has refused")                      \
    X(segments_copied, "shared partial segments copied before a write")               \
    X(corrupt_rows, "rows and object pieces that arrived with a wrong checksum")      \
    X(bad_rows, "rows in memory with a wrong checksum")                               \
    X(bad_codes, "blocks whose codes in memory have a wrong checksum")                \
    X(bad_centroids, "codebooks whose centroids in memory have a wrong checksum")     \
    X(bad_cells, "chapters whose cells in memory have a wrong checksum")              \
    X(bad_summaries, "summary groups in memory with a wrong checksum")                \
    X(bad_objects, "object pieces in memory with a wrong checksum")                   \
    X(mended_rows, "bad rows repaired by a new put")                                  \
    X(mended_codes, "blocks whose bad codes were rebuilt")                            \
    X(mended_centroids, "codebooks with bad centroids replaced by new ones")          \
    X(mended_cells, "chapters whose bad cells were rebuilt")                          \
    X(mended_summaries, "chapters whose bad summaries were rebuilt")                  \
    X(mended_objects, "bad object pieces repaired by a new put")                      \
    X(scrub_bytes, "bytes of memory verified in the background")                      \
    X(scrub_passes, "complete passes of background verification")                     \
    X(disk_scrub_blocks, "blocks, and pieces of objects, on disk verified")           \
    X(disk_scrub_bytes, "bytes on disk verified")                                     \
    X(disk_scrub_passes, "complete passes of verification of blocks on disk")         \
    X(disk_scrub_unread, "blocks and pieces on disk, not readable, or not mended")    \
    X(bad_saved_blocks, "blocks and pieces that verification found bad on disk")      \
    X(mended_saved_blocks, "such blocks and pieces written again from memory")        \
    X(lost_saved_blocks, "blocks not kept, and pieces not served, for one so bad")    \
    X(bad_messages, "malformed messages dropped")                                     \
    X(unknown_clients, "messages with an unknown client or token")                    \
    X(rejected, "requests answered with an error other than KV_BUSY")                 \
    X(busy, "requests answered with KV_BUSY, mostly for lack of credits or buffers")  \
    X(dropped, "requests dropped without a reply")                                    \
    X(deadline_exceeded, "requests whose deadline passed on the node")                \
    X(stalled_clients, "clients disconnected because they made no progress")          \
    X(failed_channels, "channels that the transport reported as failed")              \
    X(control_requests, "control requests received")                                  \
    X(control_refused, "control requests answered with an error")                     \
    X(sessions_opened, "sessions opened or forked")                                   \
    X(sessions_moved, "opens sent to another row of nodes of their root")             \
    X(sessions_closed, "sessions closed by a client")                                 \
    X(prefixes_published, "blocks kept under their names")                            \
    X(prefixes_evicted, "blocks evicted because memory was short")                    \
    X(prefixes_over_quota, "blocks evicted for others of a tenant with a full quota") \
    X(prefixes_off_disk, "blocks evicted because the room on disk was short")         \
    X(prefixes_deleted, "blocks no longer kept because a client said so")             \
    X(prefixes_refused, "publishes cut short by the quota of their tenant")           \
    X(prefixes_bad, "blocks no longer kept because rows in or before them were bad")  \
    X(sessions_expired, "sessions closed because their lease ended")                  \
    X(clients_registered, "clients registered")                                       \
    X(clients_lost, "clients lost without a goodbye")

enum {
    KVS_STATUSES = 1 - KV_IO /* a status is counted at its negative; KV_IO is the last */
};

/* The phases of the scrubber. */
enum kvs_scrub_phase {
    KVS_SCRUB_ROWS,
    KVS_SCRUB_OBJECTS,
    KVS_SCRUB_RESTS, /* between two passes */
};

struct kvs_op_stats {
    _Atomic uint64_t count;
    _Atomic uint64_t errors;
    struct kv_histogram us; /* from arrival until the reply has been sent */
};

struct kvs_stats {
#define KVS_COUNTER_FIELD(name, help) _Atomic uint64_t name;
    KVS_COUNTERS(KVS_COUNTER_FIELD)
#undef KVS_COUNTER_FIELD
    _Atomic uint64_t errors[KVS_STATUSES]; /* requests that failed, by status */
    /* Gauges, set by the owner. */
    _Atomic uint64_t memory_used; /* bytes, of whole pages: the sum of what it is used for */
    _Atomic uint64_t memory_rows, memory_codes, memory_index;
    _Atomic uint64_t memory_other;  /* records and lists of all these, and of sessions */
    _Atomic uint64_t memory_unused; /* room that is left in these pages */
    _Atomic uint64_t segments;
    _Atomic uint64_t absent_blocks;
    _Atomic uint64_t codebooks;
    _Atomic uint64_t summarised; /* rows */
    _Atomic uint64_t summaries_bytes;
    _Atomic uint64_t index_jobs; /* queued and running */
    _Atomic uint64_t objects;
    _Atomic uint64_t object_bytes;
    _Atomic uint64_t objects_evictable; /* bytes of memory that they can give */
    _Atomic uint64_t objects_away, object_pieces_away, saved_objects, saved_object_bytes;
    _Atomic uint64_t unsaved_objects, unsaved_object_bytes; /* that wait to be saved */
    _Atomic uint64_t objects_memory; /* bytes of memory, names and records included */
    _Atomic uint64_t prefixes, prefix_bytes, prefixes_pinned; /* of the control thread */
    _Atomic uint64_t prefix_tokens_bytes;                     /* likewise */
    _Atomic uint64_t sessions_resting, clients;               /* likewise */
    _Atomic uint64_t prefixes_away, saved_blocks, saved_bytes, unsaved_blocks, unsaved_bytes,
        unsaved_us; /* likewise */
    _Atomic uint64_t in_flight;
    _Atomic uint64_t rows_bad, objects_bad; /* rejected until written again: rows, and object
                                             * pieces */
    /* The scrubber's position (enum kvs_scrub_phase, session) and its passes. */
    _Atomic uint64_t scrub_phase, scrub_session, scrub_pass_bytes;
    _Atomic uint64_t scrub_last_us, scrub_last_bytes, scrub_last_blocks;
    _Atomic uint64_t scrub_since_us; /* what was there at that time has been verified since */
    /* Of objects on disk; stored after what was found, for who sees this to see that. */
    _Atomic uint64_t objects_verified_since_us;
    _Atomic uint64_t disk_scrub_pass_bytes, disk_scrub_pass_us; /* of the control thread */
    struct kvs_op_stats ops[KV_OP_COUNT];
};

static inline void kvs_count(_Atomic uint64_t *counter, uint64_t n)
{
    /* There is one writer, so a plain add is enough; the store is atomic for the readers. */
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

/* Counts a request that failed; any status but KV_OK. */
static inline void kvs_count_error(struct kvs_stats *stats, kv_status_t status)
{
    if (status < 0 && status > -KVS_STATUSES)
        kvs_count(&stats->errors[-status], 1);
}

/* Sets a gauge. */
static inline void kvs_stat_set(_Atomic uint64_t *number, uint64_t value)
{
    atomic_store_explicit(number, value, memory_order_relaxed);
}

static inline uint64_t kvs_counted(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit((_Atomic uint64_t *)counter, memory_order_relaxed);
}

#endif
