/* checksum.h - CRC32C (Castagnoli, reflected 0x82f63b78) of bytes and of rows.
 *
 * Numerical contract: kv_crc32c(0, "123456789", 9) == 0xe3069283, and
 * kv_crc32c(kv_crc32c(seed, a), b) == kv_crc32c(seed, ab).  Every instruction set gives the
 * same numbers.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.
 */
#ifndef KV_KERNELS_CHECKSUM_H
#define KV_KERNELS_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* CRC32C of `bytes` bytes, continuing from `seed` (0 to begin). */
uint32_t kv_crc32c(uint32_t seed, const void *data, size_t bytes);

/* CRCs of rows that lie anywhere: ret_crcs[i] = crc32c(seeds[i], rows[i]).  Some rows ahead are
 * fetched meanwhile, but not beyond the last one.
 *   rows      (n_rows) pointers
 *   seeds     (n_rows)
 *   ret_crcs  (n_rows) */
void kv_rows_crc_list(const void *const *rows,
                      size_t n_rows,
                      size_t row_bytes,
                      const uint32_t *seeds,
                      uint32_t *ret_crcs);

/* CRCs of rows that lie `row_bytes` apart: ret_crcs[i] = crc32c(seed of row i, row i).  The
 * seed is unit_seed + token * seed_step, and the token is tokens[i], or token_begin + i if
 * `tokens` is NULL; see kv_row_seed() in proto/kv_wire.h for unit_seed and seed_step.
 *   rows      (n_rows, row_bytes)
 *   ret_crcs  (n_rows) */
void kv_rows_crc(const void *rows,
                 size_t n_rows,
                 size_t row_bytes,
                 uint32_t unit_seed,
                 uint32_t seed_step,
                 uint32_t token_begin,
                 const uint32_t *tokens,
                 uint32_t *ret_crcs);

/* As kv_rows_crc, but compares with `crcs`.  Returns the index of the first row that differs,
 * n_rows if none does. */
size_t kv_rows_verify(const void *rows,
                      size_t n_rows,
                      size_t row_bytes,
                      uint32_t unit_seed,
                      uint32_t seed_step,
                      uint32_t token_begin,
                      const uint32_t *tokens,
                      const uint32_t *crcs);

/* For the implementations' constants: a polynomial times x.  Polynomials modulo P = 0x11edc6f41
 * are kept reflected, as the CRC itself is: bit 31 of a word holds the coefficient of x^0. */
static inline uint32_t kv_crc32c_times_x(uint32_t a)
{
    return a >> 1 ^ (a & 1 ? 0x82f63b78u : 0);
}

/* One implementation of the family.  An instruction set that lacks a function points at the one
 * below.  Slowest first: the last row that this CPU supports is used. */
struct kv_checksum_kernels {
    const char *name; /* "scalar", "sse42", "fold", "fold512" */
    int (*supported)(void);
    uint32_t (*crc32c)(uint32_t seed, const void *data, size_t bytes);
    /* As kv_rows_crc_list(); is_run: the rows lie side by side, and what is behind them may be
     * fetched, too. */
    void (*list_crc)(const void *const *rows,
                     size_t n_rows,
                     bool is_run,
                     size_t row_bytes,
                     const uint32_t *seeds,
                     uint32_t *ret_crcs);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_checksum_kernels *kv_checksum_kernels_at(unsigned i);

#endif
