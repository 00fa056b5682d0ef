/* node_list.h - the list of nodes that defines a store, as users write it: "HOST:PORT,...".
 *
 * Threads: pure functions.
 */
#ifndef KV_KVSERVER_CLUSTER_NODE_LIST_H
#define KV_KVSERVER_CLUSTER_NODE_LIST_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

/* Splits the list in place.  Fails with KV_INVALID if an address has no port or is in the list
 * twice, or if there are more than addresses_max; `detail` is then `what: where: value`,
 * beginning with `what`. */
kv_status_t kv_node_list_split(const char *what,
                               char *list,
                               uint32_t addresses_max,
                               const char **ret_addresses,
                               uint32_t *ret_n_addresses,
                               char *detail,
                               size_t detail_bytes);

#endif
