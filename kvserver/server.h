/* server.h - a storage node as a process: owns every module, starts them in order, stops them
 * in reverse.
 *
 *     folder -> control port -> metrics -> disk -> transport -> node -> data threads -> calls
 *
 * The ports come early, so that a port in use is told before memory is reserved, and /ready
 * says 503 meanwhile; calls are let in last.
 *
 *                kvs_server_create           kvs_server_drain
 *     (nothing) ------------------> serving ---------------> draining
 *
 * Threads: one thread, the control thread, calls everything here.
 */
#ifndef KV_KVSERVER_SERVER_H
#define KV_KVSERVER_SERVER_H

#include "kvserver/base/config.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvs_server;

/* As the option table fills it; "" and 0 stand for the default that depends on the machine. */
struct kvs_server_options {
    char listen[KV_CONFIG_STRING_BYTES];
    char metrics[KV_CONFIG_STRING_BYTES];
    char net_devices[KV_CONFIG_STRING_BYTES]; /* "": those that have the listening address */
    char transport[KV_CONFIG_STRING_BYTES];
    char dir[KV_CONFIG_STRING_BYTES];  /* "": $XDG_DATA_HOME/topkv or ~/.local/share/topkv */
    char name[KV_CONFIG_STRING_BYTES]; /* "": host name and port */
    char log_level[KV_CONFIG_STRING_BYTES];
    uint64_t memory;  /* bytes; 0: a quarter of what there is */
    uint64_t scrub;   /* bytes a second; 0: none */
    uint64_t threads; /* 0: one per core */
    uint64_t sessions;
    uint64_t clients;
    uint64_t credits;
    uint64_t lease_ms;
};

/* What is in effect, for people. */
struct kvs_server_info {
    char control[KV_CONFIG_STRING_BYTES]; /* HOST:PORT, the port that was taken */
    char metrics[KV_CONFIG_STRING_BYTES];
    char devices[KV_CONFIG_STRING_BYTES];
    char transports[KV_CONFIG_STRING_BYTES]; /* comma-separated */
    char dir[KV_CONFIG_STRING_BYTES];
    char name[KV_CONFIG_STRING_BYTES];
    uint64_t memory;
    uint32_t n_threads;
    bool exposed; /* listens beyond loopback */
};

/* Starts everything; on return the node serves whenever kvs_server_step() is called.  On failure
 * nothing is left but the folder.  KV_INVALID, KV_UNSUPPORTED: an option cannot be used;
 * others: the machine refuses. `detail` is `what: where: value`. */
kv_status_t kvs_server_create(const struct kvs_server_options *options,
                              struct kvs_server **ret_server,
                              char *detail,
                              size_t detail_bytes);

/* Stops everything at once; a drain comes before, if one is wanted.  NULL is allowed. */
void kvs_server_destroy(struct kvs_server *server);

/* Lent until destroy. */
const struct kvs_server_info *kvs_server_info(const struct kvs_server *server);

/* Serves; sleeps for a tenth of a second at most. */
void kvs_server_step(struct kvs_server *server);

/* Takes nothing new from now on. */
void kvs_server_drain(struct kvs_server *server);
bool kvs_server_drained(struct kvs_server *server);
/* A client asked for it. */
bool kvs_server_drain_requested(const struct kvs_server *server);

#endif
