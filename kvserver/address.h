/* address.h - "HOST:PORT" as an operator writes it: checked, listened on, and the network
 * devices behind it.  HOST is a number or a name; IPv6 numbers stand in brackets.
 *
 * `what` begins a failure's detail: the name of the option that gave the address.
 *
 * Threads: start-up only.
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

/* Listens; port 0 takes a free one.  The descriptor is the caller's and does not block.
 * KV_INVALID: not an address of this machine; KV_IO: in use, or forbidden. */
kv_status_t kvs_address_listen(const char *what,
                               const char *address,
                               int *ret_fd,
                               uint16_t *ret_port,
                               char *detail,
                               size_t detail_bytes);

/* The host part.  KV_INVALID: not an address. */
kv_status_t kvs_address_host(const char *what,
                             const char *address,
                             char host[KVS_ADDRESS_HOST_BYTES],
                             char *detail,
                             size_t detail_bytes);

/* False also for what is not an address. */
bool kvs_address_is_loopback(const char *address);

/* The devices that have the address, comma-separated; for the address "any": all that are up.
 */
kv_status_t kvs_address_devices(const char *what,
                                const char *address,
                                char *devices,
                                size_t devices_bytes,
                                char *detail,
                                size_t detail_bytes);

#endif
