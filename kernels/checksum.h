/* checksum.h - CRC32C (Castagnoli, reflected 0x82f63b78) of bytes and of rows.
 *
 * This is the CRC of iSCSI (RFC 3720, section 12.1) and of the SSE4.2 instruction crc32.
 *
 * Contract: kv_crc32c(0, "123456789", 9) == 0xe3069283, and
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

/* Returns the CRC32C of `bytes` bytes, continued from `seed`; 0 starts a new one. */
uint32_t kv_crc32c(uint32_t seed, const void *data, size_t bytes);

/* Computes the CRCs of rows at any addresses: ret_crcs[i] = kv_crc32c(seeds[i], rows[i]).
 * Prefetches some rows ahead, none after the last one.
 *   rows      (n_rows) pointers
 *   seeds     (n_rows)
 *   ret_crcs  (n_rows) */
void kv_rows_crc_list(const void *const *rows,
                      size_t n_rows,
                      size_t row_bytes,
                      const uint32_t *seeds,
                      uint32_t *ret_crcs);

/* Computes the CRCs of adjacent rows.  The seed of row i is unit_seed + token * seed_step, and
 * its token is tokens[i], or token_begin + i if `tokens` is NULL; see kv_row_seed() in
 * proto/kv_wire.h for unit_seed and seed_step.
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

/* As kv_rows_crc(), but compares with `crcs` (n_rows).  Returns the index of the first row
 * whose CRC differs, n_rows if none does. */
size_t kv_rows_verify(const void *rows,
                      size_t n_rows,
                      size_t row_bytes,
                      uint32_t unit_seed,
                      uint32_t seed_step,
                      uint32_t token_begin,
                      const uint32_t *tokens,
                      const uint32_t *crcs);

/* Multiplies a polynomial by x, modulo P = 0x11edc6f41; the implementations compute their
 * constants with it.  Polynomials are reflected, as the CRC is: bit 31 of a word is the
 * coefficient of x^0. */
static inline uint32_t kv_crc32c_times_x(uint32_t a)
{
    return a >> 1 ^ (a & 1 ? 0x82f63b78u : 0);
}

/* One implementation of the family.  The last one in the list that this CPU supports is
 * used. */
struct kv_checksum_kernels {
    const char *name; /* "scalar", "sse42", "fold", "fold512" */
    int (*supported)(void);
    uint32_t (*crc32c)(uint32_t seed, const void *data, size_t bytes);
    /* kv_rows_crc_list().  is_run: the rows are adjacent, and memory after the last one may be
     * prefetched as well. */
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
