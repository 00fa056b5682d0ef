/* pq_tiles.h - packed codes of KV_PQ_TILE rows: how they lie, and scores from them.
 *
 * The codes of a tile's rows are as short as their width, the least of 4, 6 and 8 bits that
 * holds them, because a scan is bound by memory (FAISS's fast scan packs 4 bits alike):
 *
 *   width 4   per subspace 64 bytes: byte i = code of row i | code of row 64 + i << 4
 *   width 6   per two subspaces A, B three times 64 bytes, with x = B's code of row 64 + i:
 *               A of row i      | (x & 3) << 6
 *               A of row 64 + i | (x >> 2 & 3) << 6
 *               B of row i      | (x >> 4) << 6
 *             and if m is odd, the last subspace as with width 8
 *   width 8   per subspace 128 bytes, a code each
 *
 * A tile holds its codes by itself: it may be moved, kept and compared as bytes.  What is
 * stored elsewhere says KV_TILE_FORMAT.
 *
 * Scores from codes:
 *   fp32     table[0][code 0] + table[1][code 1] + ..., left to right: the score of pq.h
 *   8 bits   the sum of one byte per subspace, from kv_pq_table_round8(): where all scores are
 *            wanted roughly, to find the few whose exact ones matter
 *   16 bits  the same with finer steps
 *
 * The rounded sums r of any two rows, with exact scores s:
 *      r1 > r2 + margin   =>   s1 > s2
 *
 * Every instruction set gives the same bits (which NaN a NaN is, is left open).  Nothing is
 * checked: shapes are valid, codes below 2^bits.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  What is read and what is written do not overlap.
 */
#ifndef KV_KERNELS_PQ_TILES_H
#define KV_KERNELS_PQ_TILES_H

#include "kernels/pq.h"

enum {
    KV_TILE_FORMAT = 1,
    KV_TILE_BYTES_MAX = KV_PQ_SUBSPACES_MAX * KV_PQ_TILE,
};

static inline uint32_t kv_tile_width(const struct kv_pq_shape *shape)
{
    return shape->bits <= 4 ? 4 : shape->bits <= 6 ? 6 : 8;
}

size_t kv_tile_bytes(const struct kv_pq_shape *shape);

/* Codes of rows [begin, begin + n) into the tile, and out of it; other rows keep theirs.  The
 * code of row begin + i in subspace j is codes[j * codes_stride + i]. */
void kv_tile_put(const struct kv_pq_shape *shape,
                 uint8_t *tile,
                 size_t begin,
                 size_t n,
                 const uint8_t *codes,
                 size_t codes_stride);
void kv_tile_get(const struct kv_pq_shape *shape,
                 const uint8_t *tile,
                 size_t begin,
                 size_t n,
                 uint8_t *ret_codes,
                 size_t codes_stride);

/* The codes of one row as one number, subspace 0's in its highest bits: the row's cell
 * (pq_cells.h), where m * bits <= 12.  Rows [begin, begin + n) of the tile. */
void kv_tile_cells(const struct kv_pq_shape *shape,
                   const uint8_t *tile,
                   size_t begin,
                   size_t n,
                   uint16_t *ret_cells);

/* Exact scores of rows [begin, begin + n), numbered through the tiles (row i is row
 * i % KV_PQ_TILE of tile i / KV_PQ_TILE), for n_queries queries at once.  Tables are ordered
 * anew in each call, which pays when many rows are scored; tiles are prefetched.
 *   tables      (n_queries, m, 2^bits)
 *   ret_scores  (n_queries, n), scores_stride apart */
void kv_tiles_score(const struct kv_pq_shape *shape,
                    const float *tables,
                    size_t n_queries,
                    const uint8_t *const *tiles,
                    size_t begin,
                    size_t n,
                    float *ret_scores,
                    size_t scores_stride);

/* Those of one tile. */
static inline void kv_tile_score(const struct kv_pq_shape *shape,
                                 const float *tables,
                                 size_t n_queries,
                                 const uint8_t *tile,
                                 size_t begin,
                                 size_t n,
                                 float *ret_scores,
                                 size_t scores_stride)
{
    kv_tiles_score(shape, tables, n_queries, &tile, begin, n, ret_scores, scores_stride);
}

/* Exact scores of some rows, numbered alike.
 *   rows        (n)
 *   ret_scores  (n) */
void kv_tiles_score_rows(const struct kv_pq_shape *shape,
                         const float *table,
                         const uint8_t *const *tiles,
                         const uint32_t *rows,
                         size_t n,
                         float *ret_scores);

/* How a table was rounded: score is about offset + step * sum, by at most error. */
struct kv_pq_table_rounding {
    float offset, step, error;
    uint32_t margin; /* of two sums, see above */
};

/* A table (m, 2^bits) in whole steps: ret_rounded (m, 2^width), 0 after the last centroid, for
 * sums of at most 255 or 65535.  False, and nothing is written, where that says nothing: a
 * value that is not finite, or numbers too large for their differences. */
bool kv_pq_table_round8(const struct kv_pq_shape *shape,
                        const float *table,
                        uint8_t *ret_rounded,
                        struct kv_pq_table_rounding *ret_rounding);
bool kv_pq_table_round16(const struct kv_pq_shape *shape,
                         const float *table,
                         uint16_t *ret_rounded,
                         struct kv_pq_table_rounding *ret_rounding);

/* Elements of a rounded table. */
static inline size_t kv_pq_table_rounded_size(const struct kv_pq_shape *shape)
{
    return (size_t)shape->m << kv_tile_width(shape);
}

/* Rounded sums of all rows of n_tiles tiles, wherever those lie; they are prefetched.
 *   tables    (n_queries, m, 2^width)
 *   ret_sums  (n_queries, n_tiles * KV_PQ_TILE), sums_stride apart */
void kv_tiles_scan8(const struct kv_pq_shape *shape,
                    const uint8_t *tables,
                    size_t n_queries,
                    const uint8_t *const *tiles,
                    size_t n_tiles,
                    uint8_t *ret_sums,
                    size_t sums_stride);
void kv_tiles_scan16(const struct kv_pq_shape *shape,
                     const uint16_t *tables,
                     size_t n_queries,
                     const uint8_t *const *tiles,
                     size_t n_tiles,
                     uint16_t *ret_sums,
                     size_t sums_stride);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_tile_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    void (*score)(const struct kv_pq_shape *shape,
                  const float *tables,
                  size_t n_queries,
                  const uint8_t *const *tiles,
                  size_t begin,
                  size_t n,
                  float *ret_scores,
                  size_t scores_stride);
    void (*cells)(const struct kv_pq_shape *shape,
                  const uint8_t *tile,
                  size_t begin,
                  size_t n,
                  uint16_t *ret_cells);
    void (*scan8)(const struct kv_pq_shape *shape,
                  const uint8_t *tables,
                  size_t n_queries,
                  const uint8_t *const *tiles,
                  size_t n_tiles,
                  uint8_t *ret_sums,
                  size_t sums_stride);
    void (*scan16)(const struct kv_pq_shape *shape,
                   const uint16_t *tables,
                   size_t n_queries,
                   const uint8_t *const *tiles,
                   size_t n_tiles,
                   uint16_t *ret_sums,
                   size_t sums_stride);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_tile_kernels *kv_tile_kernels_at(unsigned i);

#endif
