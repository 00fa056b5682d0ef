/* net_devices.h - which network devices lead to the nodes.
 *
 * Threads: any.  Memory: none kept.
 */
#ifndef KV_CLIENT_NET_DEVICES_H
#define KV_CLIENT_NET_DEVICES_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The network devices that lead to the nodes, comma-separated.  A node whose name is not known
 * now, or to which no device leads, is left out: it may be down.  KV_INVALID: an address that is
 * not HOST:PORT, or no name is known; KV_UNREACHABLE: no device leads to any. */
kv_status_t kvc_device_find(const char *const *addresses,
                            uint32_t n_addresses,
                            char *ret_devices,
                            size_t devices_bytes,
                            char *detail,
                            size_t detail_bytes);
/* Whether a node's address is this host's. */
bool kvc_device_is_local(const char *address);

#endif
