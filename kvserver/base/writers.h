/* writers.h - whose rows a session has: runs of tokens, each with the writer of its rows.
 *
 *     token  0             300           512
 *            |-- writer a --|-- writer b --|-- writer c ---->
 *
 *     A session of writer a was forked at 300, and the fork, of writer b, at 512.
 *
 * A writer is 64 bits that a client draws for each session that it opens or forks.  The seed of
 * a row's CRC covers it (kv_row_seed() in proto/kv_wire.h), so a row of another session fails
 * its check even in its own place.  A fork keeps its parent's writers for the rows that it
 * inherits.  The last run is the session's own writer, for what it has written or may write.
 *
 * No two sessions have different rows of one writer at one place.  So a session whose rows a
 * fork has inherited gets another own writer when it truncates those rows and may write others.
 *
 * The runs are the session's, not the segments': a segment that got into a wrong unit must fail
 * by what that unit's session says.
 *
 * Threads: nothing changes after kv_writers_create(), so any may read.  Memory: free().
 */
#ifndef KV_KVSERVER_BASE_WRITERS_H
#define KV_KVSERVER_BASE_WRITERS_H

#include "proto/kv_types.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    KV_WRITER_RUNS_MAX = 4096 /* of a session; a fork adds one at most */
};

struct kv_writer_run {
    uint64_t writer; /* not 0 */
    uint32_t end;    /* the first token after the run; UINT32_MAX in the last one */
};

/* 1..KV_WRITER_RUNS_MAX runs whose ends ascend; neighbours have different writers. */
struct kv_writers {
    uint32_t n_runs;
    struct kv_writer_run runs[];
};

/* The runs of a session that keeps the first `tokens` rows of `from` and writes what follows as
 * `writer`: a new session's (`from` NULL), a fork's, or those that a truncate leaves.  NULL:
 * out of memory. */
struct kv_writers *
kv_writers_create(const struct kv_writers *from, uint32_t tokens, uint64_t writer);

/* How many runs those have: the caller's to hold against KV_WRITER_RUNS_MAX. */
uint32_t kv_writers_count(const struct kv_writers *from, uint32_t tokens, uint64_t writer);

/* The session's own writer. */
static inline uint64_t kv_writers_own(const struct kv_writers *writers)
{
    return writers->runs[writers->n_runs - 1].writer;
}

bool kv_writers_same(const struct kv_writers *a, const struct kv_writers *b);

/* The runs that tokens [begin, end), one at least, lie in: bytes of a copy, and the copy, which
 * knows of these tokens alone. */
size_t kv_writers_slice_bytes(const struct kv_writers *writers, uint32_t begin, uint32_t end);
void kv_writers_slice(const struct kv_writers *writers,
                      uint32_t begin,
                      uint32_t end,
                      struct kv_writers *ret_slice);

/* The unit_seed of kv_rows_crc() for the unit's rows [*ret_begin, *ret_end), which `token` is
 * one of. */
uint32_t kv_writers_seed(const struct kv_writers *writers,
                         uint32_t layer,
                         uint32_t kv_head,
                         uint32_t token,
                         uint32_t *ret_begin,
                         uint32_t *ret_end);

/* kv_rows_crc() and kv_rows_verify() of rows of one unit, each row with its writer's seed. */
void kv_writers_crc(const struct kv_writers *writers,
                    uint32_t layer,
                    uint32_t kv_head,
                    const void *rows,
                    size_t n_rows,
                    size_t row_bytes,
                    uint32_t token_begin,
                    const uint32_t *tokens,
                    uint32_t *ret_crcs);
size_t kv_writers_verify(const struct kv_writers *writers,
                         uint32_t layer,
                         uint32_t kv_head,
                         const void *rows,
                         size_t n_rows,
                         size_t row_bytes,
                         uint32_t token_begin,
                         const uint32_t *tokens,
                         const uint32_t *crcs);

/* CRCs of rows of several units, some of each: a step has one row of a unit, and such rows are
 * summed up side by side, as those of one unit are.
 *
 *     kv_crc_batch_begin();  for each unit: kv_crc_batch_add();  kv_crc_batch_end();
 *
 * The CRCs come in the order of the rows, all of them by kv_crc_batch_end(); the rows must stay
 * until then. */
enum {
    KV_CRC_BATCH = 256, /* rows side by side */
};

struct kv_crc_batch {
    const struct kv_writers *writers;
    uint32_t *crcs; /* of rows[0] on */
    size_t row_bytes;
    uint32_t n;
    uint64_t writer;             /* of the tokens [run_begin, run_end) */
    uint32_t run_begin, run_end; /* equal: none is known */
    const void *rows[KV_CRC_BATCH];
    uint32_t seeds[KV_CRC_BATCH];
};

void kv_crc_batch_begin(struct kv_crc_batch *batch,
                        const struct kv_writers *writers,
                        uint32_t *ret_crcs);
void kv_crc_batch_add(struct kv_crc_batch *batch,
                      uint32_t layer,
                      uint32_t kv_head,
                      const void *rows,
                      size_t n_rows,
                      size_t row_bytes,
                      uint32_t token_begin);
void kv_crc_batch_end(struct kv_crc_batch *batch);

#endif
