/* rows.h - models, and rows made from numbers: what a row must be follows from its place.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_TESTS_SUPPORT_ROWS_H
#define KV_TESTS_SUPPORT_ROWS_H

#include "client/include/kvclient.h"

#include <stdbool.h>

/* A model whose fingerprint follows from its name.  `heads`: of each layer. */
void test_model(struct kv_model_info *ret_model,
                const char *name,
                uint32_t n_layers,
                const uint16_t *heads,
                uint32_t d_k,
                uint32_t d_v);

/* Bytes that follow from the seed. */
void test_fill(void *data, size_t bytes, uint64_t seed);
bool test_is_filled(const void *data, size_t bytes, uint64_t seed);

/* The row of a place; `salt` tells apart what different writers put there. */
void test_row(
    void *row, size_t bytes, uint64_t salt, uint32_t layer, uint32_t head, uint32_t token);
bool test_is_row(const void *row,
                 size_t bytes,
                 uint64_t salt,
                 uint32_t layer,
                 uint32_t head,
                 uint32_t token);

/* A box of rows, dense, as kvclient.h orders it.  test_is_box() prints the first wrong row. */
void test_box(void *base, const kv_schema_t *schema, const struct kv_rows *box, uint64_t salt);
bool test_is_box(const void *base,
                 const kv_schema_t *schema,
                 const struct kv_rows *box,
                 uint64_t salt);

#endif
