/* bench_rows.h - sessions of any length for kvworker bench, without their prompts' computation.
 *
 * The rows of a real text are recorded once.  A session has them again and again: values as they are,
 * keys rotated to their new positions, so that those of the first repetition are what the model
 * makes, and those of later ones what it would make of the same layer inputs there.  What a step
 * costs depends on how many rows there are and on how their keys lie, not on what the text says.
 *
 * Threads: one.  Memory: record/free.
 */
#ifndef KV_GPU_WORKER_COMMANDS_BENCH_ROWS_H
#define KV_GPU_WORKER_COMMANDS_BENCH_ROWS_H

#include "gpu-worker/commands/context.h"

struct kvw_bench_rows;

/* Computes the first n of the tokens, a multiple of KVW_FORWARD_CHUNK, with full attention, in a
 * session of the worker's store, and keeps their rows.  Returns the exit status after printing what is
 * wrong. */
int kvw_bench_record(struct kvw_context *worker,
                     const uint32_t *tokens,
                     uint32_t n,
                     struct kvw_bench_rows **ret_rows);
void kvw_bench_rows_free(struct kvw_bench_rows *rows); /* NULL is allowed */

/* Opens a session of `capacity` tokens with `n` made rows per kv head, for a method to go on with by its
 * ticket.  It is the caller's: kvw_session_destroy() leaves it to that method and to its lease, unless
 * kvw_session_let_go() was called.  Sequences begin at different chunks of the text, as long as there
 * are no more of them than chunks.  `detail`: `what: where: value`. */
kv_status_t kvw_bench_rows_fill(struct kvw_bench_rows *rows,
                                uint32_t sequence,
                                uint32_t n,
                                uint32_t capacity,
                                struct kvw_session **ret_session,
                                char *detail,
                                size_t detail_bytes);

#endif
