/* net_devices.h - finds the network devices through which the nodes are reached.
 *
 * Threads: any.  Memory: none kept.
 */
#ifndef KV_CLIENT_NET_DEVICES_H
#define KV_CLIENT_NET_DEVICES_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Returns the devices, comma-separated, in ret_devices.  Skips nodes whose name cannot be
 * resolved or that no device reaches: they may be down.  Fails with KV_INVALID if an address is
 * not HOST:PORT or no name can be resolved, and with KV_UNREACHABLE if no device reaches any
 * node. */
kv_status_t kvc_device_find(const char *const *addresses,
                            uint32_t n_addresses,
                            char *ret_devices,
                            size_t devices_bytes,
                            char *detail,
                            size_t detail_bytes);
/* Whether a node's address is this host's. */
bool kvc_device_is_local(const char *address);

#endif
