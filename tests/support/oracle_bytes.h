/* oracle_bytes.h - step 1 of a query with a first cut, found again: one byte a row, as
 * kvserver/store/query/byte_scores.h says, in plain loops.  A part of the oracle (oracle.h).
 *
 * Bytes are whole numbers, but what is rounded to them is computed in fp32: where that may go to
 * either of two, a row's byte is a range.
 *
 * Threads: one.  Memory: the caller's.
 */
#ifndef KV_TESTS_SUPPORT_ORACLE_BYTES_H
#define KV_TESTS_SUPPORT_ORACLE_BYTES_H

#include "tests/support/oracle.h"

/* Whether step 1 goes by bytes: some rows have codes, and the tables of their codebooks, one for
 * each run of rows that share one, need less room than fp32 scores of all rows would. */
bool oracle_bytes_pay(const struct oracle_question *question, const struct oracle_rows *rows);

/* The bytes of all rows, of which some have codes.
 *   key_scores  (n_queries, n) what their keys' scores may be
 *   n_wanted    candidates, fewer than rows
 *   ret_bytes   (n) */
void oracle_bytes(const struct oracle_question *question,
                  const struct oracle_rows *rows,
                  const struct oracle_range *key_scores,
                  uint32_t n_wanted,
                  struct oracle_range *ret_bytes);

#endif
