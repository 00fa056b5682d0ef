/* address.h - parses "HOST:PORT" addresses, listens on them, and finds the network devices
 * behind them.  HOST is a name or an IP address; IPv6 addresses are written in brackets.
 *
 * `what` is the name of the option that gave the address; error messages begin with it.
 *
 * Threads: startup only.
 */
#ifndef KV_KVSERVER_ADDRESS_H
#define KV_KVSERVER_ADDRESS_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVS_ADDRESS_HOST_BYTES = 256
};

/* Listens on the address; port 0 picks a free port.  The caller owns the descriptor, which is
 * non-blocking.  Fails with KV_INVALID if this machine does not have the address, and with
 * KV_IO if it is in use or not permitted. */
kv_status_t kvs_address_listen(const char *what,
                               const char *address,
                               int *ret_fd,
                               uint16_t *ret_port,
                               char *detail,
                               size_t detail_bytes);

/* Copies the host part.  Fails with KV_INVALID if the text is not an address. */
kv_status_t kvs_address_host(const char *what,
                             const char *address,
                             char host[KVS_ADDRESS_HOST_BYTES],
                             char *detail,
                             size_t detail_bytes);

/* Returns false also for text that is not an address. */
bool kvs_address_is_loopback(const char *address);

/* Writes the names of the devices that have the address, comma-separated; for the wildcard
 * address, all devices that are up.
 */
kv_status_t kvs_address_devices(const char *what,
                                const char *address,
                                char *devices,
                                size_t devices_bytes,
                                char *detail,
                                size_t detail_bytes);

#endif
