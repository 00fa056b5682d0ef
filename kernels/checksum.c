#include "kernels/checksum.h"
#include "kernels/dispatch.h"

#include <string.h>

/* The scalar reference is slicing-by-8 (Kounavis and Berry, A Systematic Approach to Building
 * High Performance Software-based CRC Generators, 2005): eight table lookups take the state
 * over eight bytes. */
enum {
    SLICES = 8,
    SOME_ROWS = 512, /* rows of one call of a kernel; bounds the arrays on the stack (6 KiB) */
};

/* slices[s][b]: the CRC state after byte b followed by s zero bytes. */
static uint32_t slices[SLICES][256];
static const struct kv_checksum_kernels *best;

static void slices_init(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        slices[0][i] = i;
        for (int bit = 0; bit < 8; bit++)
            slices[0][i] = kv_crc32c_times_x(slices[0][i]);
    }
    for (int slice = 1; slice < SLICES; slice++)
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t before = slices[slice - 1][i];

            slices[slice][i] = before >> 8 ^ slices[0][before & 255];
        }
}

static int always(void)
{
    return 1;
}

static uint32_t scalar_crc32c(uint32_t seed, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint32_t state = ~seed;

    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint32_t low, high;

        memcpy(&low, at, 4);
        memcpy(&high, at + 4, 4);
        low ^= state;
        state = slices[7][low & 255] ^ slices[6][low >> 8 & 255] ^ slices[5][low >> 16 & 255] ^
                slices[4][low >> 24] ^ slices[3][high & 255] ^ slices[2][high >> 8 & 255] ^
                slices[1][high >> 16 & 255] ^ slices[0][high >> 24];
    }
    for (; bytes > 0; bytes--, at++)
        state = state >> 8 ^ slices[0][(state ^ *at) & 255];
    return ~state;
}

static void scalar_list_crc(const void *const *rows,
                            size_t n_rows,
                            bool is_run,
                            size_t row_bytes,
                            const uint32_t *seeds,
                            uint32_t *ret_crcs)
{
    (void)is_run;
    for (size_t i = 0; i < n_rows; i++)
        ret_crcs[i] = scalar_crc32c(seeds[i], rows[i], row_bytes);
}

static const struct kv_checksum_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .crc32c = scalar_crc32c,
    .list_crc = scalar_list_crc,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_checksum_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_checksum_sse42,
    &kv_checksum_fold,
    &kv_checksum_fold512,
#endif
};

/* Before main(), so that no call needs to check whether the tables are ready. */
__attribute__((constructor)) static void checksum_init(void)
{
    slices_init();
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_checksum_kernels *kv_checksum_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

uint32_t kv_crc32c(uint32_t seed, const void *data, size_t bytes)
{
    return best->crc32c(seed, data, bytes);
}

void kv_rows_crc_list(const void *const *rows,
                      size_t n_rows,
                      size_t row_bytes,
                      const uint32_t *seeds,
                      uint32_t *ret_crcs)
{
    best->list_crc(rows, n_rows, false, row_bytes, seeds, ret_crcs);
}

void kv_rows_crc(const void *rows,
                 size_t n_rows,
                 size_t row_bytes,
                 uint32_t unit_seed,
                 uint32_t seed_step,
                 uint32_t token_begin,
                 const uint32_t *tokens,
                 uint32_t *ret_crcs)
{
    const void *list[SOME_ROWS];
    uint32_t seeds[SOME_ROWS];

    /* A decode step writes one row per unit, for which the list kernels have no advantage. */
    if (n_rows == 1) {
        const uint32_t token = tokens != NULL ? tokens[0] : token_begin;

        ret_crcs[0] = best->crc32c(unit_seed + token * seed_step, rows, row_bytes);
        return;
    }
    for (size_t row = 0, n; row < n_rows; row += n) {
        n = n_rows - row < SOME_ROWS ? n_rows - row : SOME_ROWS;
        for (size_t i = 0; i < n; i++) {
            const uint32_t token =
                tokens != NULL ? tokens[row + i] : token_begin + (uint32_t)(row + i);

            list[i] = (const uint8_t *)rows + (row + i) * row_bytes;
            seeds[i] = unit_seed + token * seed_step;
        }
        best->list_crc(list, n, true, row_bytes, seeds, ret_crcs + row);
    }
}

size_t kv_rows_verify(const void *rows,
                      size_t n_rows,
                      size_t row_bytes,
                      uint32_t unit_seed,
                      uint32_t seed_step,
                      uint32_t token_begin,
                      const uint32_t *tokens,
                      const uint32_t *crcs)
{
    uint32_t computed[SOME_ROWS];

    for (size_t row = 0; row < n_rows;) {
        size_t n = n_rows - row < SOME_ROWS ? n_rows - row : SOME_ROWS;

        kv_rows_crc((const uint8_t *)rows + row * row_bytes, n, row_bytes, unit_seed, seed_step,
                    token_begin + (uint32_t)row, tokens != NULL ? tokens + row : NULL,
                    computed);
        if (memcmp(computed, crcs + row, n * sizeof(*crcs)) != 0)
            for (size_t i = 0; i < n; i++)
                if (computed[i] != crcs[row + i])
                    return row + i;
        row += n;
    }
    return n_rows;
}
