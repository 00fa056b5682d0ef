/* pq_tiles.h - packed codes of KV_PQ_TILE rows: their layout, and scores computed from them.
 *
 * A tile stores each code in 4, 6 or 8 bits, the least width that holds it: short codes make a
 * scan of all rows read less memory.  As in the fast-scan indexes of FAISS, which have
 * blocks of 32 rows and codes of 4 bits, the codes of a subspace are stored together, so that a
 * shuffle looks up a register of them (Andre et al., Cache locality is not enough, VLDB 2015):
 *
 *   width 4   per subspace 64 bytes: byte i = code of row i | code of row 64 + i << 4
 *   width 6   per two subspaces A, B three times 64 bytes, with x = B's code of row 64 + i:
 *               A of row i      | (x & 3) << 6
 *               A of row 64 + i | (x >> 2 & 3) << 6
 *               B of row i      | (x >> 4) << 6
 *             and if m is odd, the last subspace as with width 8
 *   width 8   per subspace 128 bytes, a code each
 *
 * A tile has no pointers: it may be moved, stored and compared as bytes.  KV_TILE_FORMAT names
 * the layout where tiles are stored.
 *
 * Scores from codes:
 *   fp32    table[0][code 0] + table[1][code 1] + ..., left to right: the score of pq.h
 *   8 bits  the sum of one byte per subspace, from a table that was rounded by a base and a step
 *           (kv_pq_table_round8_to()): a fast, rough score of all rows.  Tables of several
 *           chapters and queries share them, so that their sums can be compared.  Sums saturate
 *           at 255.
 *
 * Every instruction set gives the same bits; the payload of a NaN is not specified.  Shapes
 * must be valid and codes below 2^bits.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_PQ_TILES_H
#define KV_KERNELS_PQ_TILES_H

#include "kernels/pq.h"

enum {
    KV_TILE_FORMAT = 1,
    KV_TILE_BYTES_MAX = KV_PQ_SUBSPACES_MAX * KV_PQ_TILE,
};

/* Returns the bits in which a tile stores a code: 4, 6 or 8. */
static inline uint32_t kv_tile_width(const struct kv_pq_shape *shape)
{
    return shape->bits <= 4 ? 4 : shape->bits <= 6 ? 6 : 8;
}

/* Returns the bytes of a tile, at most KV_TILE_BYTES_MAX. */
size_t kv_tile_bytes(const struct kv_pq_shape *shape);

/* Store codes of rows [begin, begin + n) in a tile, leaving other rows as they are, and load
 * them.  The code of row begin + i in subspace j is codes[j * codes_stride + i]. */
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

/* Computes the cells (pq_cells.h) of rows [begin, begin + n) of a tile -> ret_cells (n).  A
 * row's cell is its codes as one number, subspace 0's in the highest bits; m * bits <= 12. */
void kv_tile_cells(const struct kv_pq_shape *shape,
                   const uint8_t *tile,
                   size_t begin,
                   size_t n,
                   uint16_t *ret_cells);

/* Computes the fp32 scores of rows [begin, begin + n) of several tiles for n_queries queries:
 * row i is row i % KV_PQ_TILE of tile i / KV_PQ_TILE.  Each call reorders the tables for vector
 * loads, which pays if it scores many rows.  Tiles are prefetched.
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

/* As kv_tiles_score(), for one tile. */
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

/* Computes the least and the largest sum that a row can have by a table (m, 2^bits), in fp32:
 * the least values of the subspaces added left to right, beginning with 0, and the largest
 * values in the same way.  NaNs are skipped; of NaNs alone, the least value is inf and the
 * largest is -inf. */
void kv_pq_table_range(const struct kv_pq_shape *shape,
                       const float *table,
                       float *ret_least,
                       float *ret_most);

/* Rounds a table (m, 2^bits) to bytes by a given base and step -> ret_rounded (m, 2^width),
 * with zeros after the last centroid: a row's sum is about (score - base) / step, clamped to
 * 0..255.  With
 *      least[j]  the least value of subspace j, NaNs skipped
 *      shift     the least sum (kv_pq_table_range()) - base
 * the byte of a value v of subspace j is
 *      (v - least[j]) * inv_step             j > 0
 *      ((v - least[j]) + shift) * inv_step   j = 0
 * each operation rounded to fp32, clamped to 0..255 (a NaN to 0), plus 0.5, cut to a whole
 * number.  Where nothing was clamped, a sum is m / 2 away from (score - base) * inv_step at
 * most, besides what fp32 loses. */
void kv_pq_table_round8_to(const struct kv_pq_shape *shape,
                           const float *table,
                           float base,
                           float inv_step,
                           uint8_t *ret_rounded);

/* The number of elements of a rounded table. */
static inline size_t kv_pq_table_rounded_size(const struct kv_pq_shape *shape)
{
    return (size_t)shape->m << kv_tile_width(shape);
}

/* Computes the rounded sums of all rows of n_tiles tiles, given by pointers; tiles are
 * prefetched.  Bytes are added by saturating additions, left to right.
 *   tables    (n_queries, m, 2^width)
 *   ret_sums  (n_queries, n_tiles * KV_PQ_TILE), sums_stride apart */
void kv_tiles_scan8(const struct kv_pq_shape *shape,
                    const uint8_t *tables,
                    size_t n_queries,
                    const uint8_t *const *tiles,
                    size_t n_tiles,
                    uint8_t *ret_sums,
                    size_t sums_stride);

/* Computes for each row of n_tiles tiles the largest over the queries of
 * clamp(sum + offset, 0, 255), sums being those of kv_tiles_scan8().  With one query and offset
 * 0 it is that function.  Tiles are prefetched.  Fastest if no row's sum can be above 255, which
 * a step of at least the widest range of scores / (255 - m) makes sure of.
 *   tables    (n_queries, m, 2^width), at least one
 *   offsets   (n_queries), -255..255
 *   ret_most  (n_tiles * KV_PQ_TILE) */
void kv_tiles_scan8_max(const struct kv_pq_shape *shape,
                        const uint8_t *tables,
                        const int16_t *offsets,
                        size_t n_queries,
                        const uint8_t *const *tiles,
                        size_t n_tiles,
                        uint8_t *ret_most);

/* One implementation of the family; functions as above.  The last one in the list that this CPU
 * supports is used. */
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
    void (*range)(const struct kv_pq_shape *shape,
                  const float *table,
                  float *ret_least,
                  float *ret_most);
    void (*round8_to)(const struct kv_pq_shape *shape,
                      const float *table,
                      float base,
                      float inv_step,
                      uint8_t *ret_rounded);
    void (*scan8)(const struct kv_pq_shape *shape,
                  const uint8_t *tables,
                  size_t n_queries,
                  const uint8_t *const *tiles,
                  size_t n_tiles,
                  uint8_t *ret_sums,
                  size_t sums_stride);
    void (*scan8_max)(const struct kv_pq_shape *shape,
                      const uint8_t *tables,
                      const int16_t *offsets,
                      size_t n_queries,
                      const uint8_t *const *tiles,
                      size_t n_tiles,
                      uint8_t *ret_most);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_tile_kernels *kv_tile_kernels_at(unsigned i);

#endif
