/* embedded_node.h - a storage node inside of this process, over loopback.
 *
 * What a worker talks to is the same as over a network: a node with threads of its own, reached
 * by the client library.  Its memory is reserved at the start and taken as it is used.
 *
 * Threads: the caller's.  Memory: open/close; clients of the node are closed before it.
 */
#ifndef KV_GPU_WORKER_KVCACHE_EMBEDDED_NODE_H
#define KV_GPU_WORKER_KVCACHE_EMBEDDED_NODE_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kvw_embedded;

/* KV_NO_MEMORY, KV_INVALID, KV_IO: `detail` says what. */
kv_status_t kvw_embedded_open(uint64_t memory_bytes,
                              struct kvw_embedded **ret_embedded,
                              char *detail,
                              size_t detail_bytes);
void kvw_embedded_close(struct kvw_embedded *embedded); /* NULL is allowed */

/* For kv_client_options.nodes; lent until the close. */
const char *kvw_embedded_address(const struct kvw_embedded *embedded);

#endif
