/* Checksums: of bytes as messages have them, and of rows as blocks have them. */
#include "tests/bench/kernels.h"

#include "kernels/checksum.h"

enum {
    PIECE_BYTES = 64 << 10,
    HOT_BYTES = 16 << 10,
    BLOCK_ROWS = 128,
};

struct checksum {
    const uint8_t *data;
    size_t bytes; /* of all that is walked through */
    size_t piece, row_bytes;
    volatile uint32_t crc; /* somebody might look at it */
};

static const uint8_t *piece_at(const struct checksum *checksum, size_t i)
{
    return checksum->data + i % (checksum->bytes / checksum->piece) * checksum->piece;
}

static void crc_bytes(void *arg, size_t i)
{
    struct checksum *checksum = arg;

    checksum->crc = kv_crc32c(0, piece_at(checksum, i), checksum->piece);
}

static void crc_rows(void *arg, size_t i)
{
    struct checksum *checksum = arg;
    uint32_t crcs[BLOCK_ROWS];

    kv_rows_crc(piece_at(checksum, i), BLOCK_ROWS, checksum->row_bytes, 1, 3, 0, NULL, crcs);
    checksum->crc = crcs[0];
}

static bool measure(struct kernels *kernels,
                    const char *name,
                    const char *shape,
                    bool is_hot,
                    size_t piece,
                    size_t row_bytes)
{
    struct checksum checksum = {kernels->from, is_hot ? piece : kernels->bytes, piece,
                                row_bytes, 0};

    return kernels_measure(kernels, &(struct kernels_case){
                                        .name = name,
                                        .unit = "GB/s",
                                        .amount = 1e-9 * (double)piece,
                                        .params = {.shape = shape,
                                                   .bytes = piece,
                                                   .rows = row_bytes > 0 ? BLOCK_ROWS : 0,
                                                   .data = is_hot ? "hot" : "cold"},
                                        .n_needs = 1,
                                        .needs = {{KERNELS_READ, (double)piece, 0, 0}},
                                        .turn = row_bytes > 0 ? crc_rows : crc_bytes,
                                        .arg = &checksum,
                                    });
}

bool kernels_checksum(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);

    (void)load;
    if (kernels == NULL ||
        !measure(kernels, "kernels.checksum.bytes", NULL, false, PIECE_BYTES, 0) ||
        !measure(kernels, "kernels.checksum.bytes", NULL, true, HOT_BYTES, 0))
        return false;
    for (unsigned i = 0; i < KERNELS_N_SHAPES; i++) {
        const size_t row_bytes = kernels_row_bytes(&kernels_shapes[i]);

        if (!measure(kernels, "kernels.checksum.rows", kernels_shapes[i].name, false,
                     BLOCK_ROWS * row_bytes, row_bytes))
            return false;
    }
    return true;
}
