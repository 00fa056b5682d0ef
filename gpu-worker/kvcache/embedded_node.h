/* embedded_node.h - a storage node inside this process.
 *
 * The worker uses it as it uses a remote node: it has its own threads and is reached through
 * the client library, over loopback.  Its memory is reserved at startup and committed as it is
 * used.
 *
 * Threads: the caller's.  Memory: open/close; clients of the node are closed before it.
 */
#ifndef KV_GPU_WORKER_KVCACHE_EMBEDDED_NODE_H
#define KV_GPU_WORKER_KVCACHE_EMBEDDED_NODE_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kvw_embedded;

/* Starts the node.  Fails with KV_NO_MEMORY, KV_INVALID or KV_IO; `detail` says why. */
kv_status_t kvw_embedded_open(uint64_t memory_bytes,
                              struct kvw_embedded **ret_embedded,
                              char *detail,
                              size_t detail_bytes);
void kvw_embedded_close(struct kvw_embedded *embedded); /* NULL is allowed */

/* Returns the address for kv_client_options.nodes; valid until the close. */
const char *kvw_embedded_address(const struct kvw_embedded *embedded);

#endif
