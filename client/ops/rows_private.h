/* rows_private.h - what operations with rows have in common: rows.c has it, fetch.c uses it. */
#ifndef KV_CLIENT_OPS_ROWS_PRIVATE_H
#define KV_CLIENT_OPS_ROWS_PRIVATE_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kv_trip;
struct kv_iov;
struct kv_op;

/* For the rows of operations' kinds (struct kv_op_kind). */
unsigned kv_rows_land(struct kv_trip *trip, uint64_t bytes, struct kv_iov *ret_iov);
kv_status_t
kv_rows_reply(struct kv_trip *trip, const uint8_t *body, char *detail, size_t detail_bytes);
kv_status_t kv_rows_finish(struct kv_trip *trip, char *detail, size_t detail_bytes);
void kv_rows_describe(const struct kv_op *op,
                      const struct kv_trip *trip,
                      char *text,
                      size_t text_bytes);

#endif
