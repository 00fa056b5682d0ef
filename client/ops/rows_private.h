/* rows_private.h - functions of rows.c that fetch.c uses, too. */
#ifndef KV_CLIENT_OPS_ROWS_PRIVATE_H
#define KV_CLIENT_OPS_ROWS_PRIVATE_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kvc_request;
struct kv_iov;
struct kv_op;

/* Members of struct kvc_op_type. */
unsigned kvc_rows_land(struct kvc_request *request, uint64_t bytes, struct kv_iov *ret_iov);
kv_status_t kvc_rows_reply(struct kvc_request *request,
                           const uint8_t *body,
                           char *detail,
                           size_t detail_bytes);
kv_status_t kvc_rows_finish(struct kvc_request *request, char *detail, size_t detail_bytes);
void kvc_rows_describe(const struct kv_op *op,
                       const struct kvc_request *request,
                       char *text,
                       size_t text_bytes);

#endif
