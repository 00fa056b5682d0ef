/* writers.h - the writers of a session's rows: runs of tokens, each with one writer.
 *
 *     token  0             300           512
 *            |-- writer a --|-- writer b --|-- writer c ---->
 *
 *     A session of writer a was forked at 300, and the fork, of writer b, at 512.
 *
 * A writer is 64 bits that a client draws for each session that it opens or forks.  The seed of
 * a row's CRC depends on it (kv_row_seed() in proto/kv_wire.h), so a row of another session
 * fails its check even at its own place.  A fork keeps its parent's writers for the rows that
 * it inherits.  The last run is the session's own writer, for the rows that it has written or
 * may write.
 *
 * Two sessions never have different rows of one writer at one place.  A session whose rows a
 * fork has inherited therefore gets a new own writer when it truncates those rows.
 *
 * The runs belong to the session, not to the segments: a segment in the wrong unit must fail
 * the check of that unit's session.
 *
 * Threads: constant after kv_writers_create(), so any thread may read.  Memory: free().
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

/* 1..KV_WRITER_RUNS_MAX runs whose ends ascend; neighbors have different writers. */
struct kv_writers {
    uint32_t n_runs;
    struct kv_writer_run runs[];
};

/* Creates the runs of a session that keeps the first `tokens` rows of `from` and writes later
 * rows as `writer`: of a new session (`from` NULL), of a fork, or of a session after a
 * truncate.  Returns NULL if out of memory. */
struct kv_writers *
kv_writers_create(const struct kv_writers *from, uint32_t tokens, uint64_t writer);

/* Returns how many runs kv_writers_create() would make.  The caller must check the number
 * against KV_WRITER_RUNS_MAX. */
uint32_t kv_writers_count(const struct kv_writers *from, uint32_t tokens, uint64_t writer);

/* Returns the session's own writer. */
static inline uint64_t kv_writers_own(const struct kv_writers *writers)
{
    return writers->runs[writers->n_runs - 1].writer;
}

/* Copy the runs of the tokens [begin, end), at least one: the bytes of the copy, and the copy,
 * which is valid for these tokens only. */
size_t kv_writers_slice_bytes(const struct kv_writers *writers, uint32_t begin, uint32_t end);
void kv_writers_slice(const struct kv_writers *writers,
                      uint32_t begin,
                      uint32_t end,
                      struct kv_writers *ret_slice);

/* Returns the unit_seed of kv_rows_crc() for the unit's rows [*ret_begin, *ret_end), which
 * include `token`. */
uint32_t kv_writers_seed(const struct kv_writers *writers,
                         uint32_t layer,
                         uint32_t kv_head,
                         uint32_t token,
                         uint32_t *ret_begin,
                         uint32_t *ret_end);

/* As kv_rows_crc() and kv_rows_verify(), with the seed of each row's writer. */
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

/* Computes the CRCs of rows of several units.  A decode step has one row per unit; a batch lets
 * the kernel process such rows side by side, like rows of one unit.
 *
 *     kv_crc_batch_begin();  for each unit: kv_crc_batch_add();  kv_crc_batch_end();
 *
 * The CRCs are in the order of the rows and complete after kv_crc_batch_end(); the rows must be
 * valid until then. */
enum {
    KV_CRC_BATCH = 256, /* rows processed side by side */
};

struct kv_crc_batch {
    const struct kv_writers *writers;
    uint32_t *crcs; /* of rows[0] on */
    size_t row_bytes;
    uint32_t n;
    uint64_t writer;             /* of the tokens [run_begin, run_end) */
    uint32_t run_begin, run_end; /* equal: not known */
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
