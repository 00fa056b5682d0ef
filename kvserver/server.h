/* server.h - a storage node as a process: owns every module, starts them in order, and stops
 * them in reverse.
 *
 *     values of options -> data directory -> control port -> feed of events -> metrics -> disk
 *         -> transport -> node -> data threads -> control calls
 *
 * A value that is wrong is so whatever else is in use, so it is reported first.  The ports are
 * bound early, so that a port in use is reported before memory is reserved; until the node
 * serves, /ready returns 503.  Control calls are accepted last.
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

/* Filled from the option table.  "" and 0 select a default that depends on the machine. */
struct kvs_server_options {
    char listen[KV_CONFIG_STRING_BYTES];
    char metrics[KV_CONFIG_STRING_BYTES];
    char net_devices[KV_CONFIG_STRING_BYTES]; /* "": those that have the control address */
    char transport[KV_CONFIG_STRING_BYTES];
    char dir[KV_CONFIG_STRING_BYTES];  /* "": $XDG_DATA_HOME/topkv or ~/.local/share/topkv */
    char name[KV_CONFIG_STRING_BYTES]; /* "": host name and port */
    char disk[KV_CONFIG_STRING_BYTES]; /* a size, "auto", or "none" */
    char log_level[KV_CONFIG_STRING_BYTES];
    char poll[KV_CONFIG_STRING_BYTES];
    char eviction[KV_CONFIG_STRING_BYTES];
    char events[KV_CONFIG_STRING_BYTES]; /* "": no feed of events */
    char events_replay[KV_CONFIG_STRING_BYTES];
    char events_topic[KV_CONFIG_STRING_BYTES];
    char events_hashes[KV_CONFIG_STRING_BYTES];
    uint64_t events_buffer; /* bytes */
    uint64_t memory;        /* bytes; 0: a quarter of the memory available */
    uint64_t scrub;         /* bytes per second; 0: none */
    uint64_t scrub_disk;    /* likewise */
    uint64_t threads;       /* 0: one per core */
    uint64_t sessions;
    uint64_t root_sessions; /* 0: a sixteenth of those */
    uint64_t clients;
    uint64_t credits;
    uint64_t lease_ms;
    uint64_t object_ttl;   /* seconds; 0: none */
    uint64_t tenant_quota; /* bytes; 0: any */
};

/* The settings in effect, for display. */
struct kvs_server_info {
    char control[KV_CONFIG_STRING_BYTES]; /* HOST:PORT with the bound port */
    char metrics[KV_CONFIG_STRING_BYTES];
    char devices[KV_CONFIG_STRING_BYTES];
    char transports[KV_CONFIG_STRING_BYTES]; /* comma-separated */
    char dir[KV_CONFIG_STRING_BYTES];
    char name[KV_CONFIG_STRING_BYTES];
    char events[KV_CONFIG_STRING_BYTES]; /* with the bound port; "": there is no feed */
    char events_replay[KV_CONFIG_STRING_BYTES];
    uint64_t memory;
    uint64_t disk; /* bytes for what is saved; 0: nothing is */
    uint32_t n_threads;
    bool exposed;        /* listens beyond loopback */
    bool events_exposed; /* the feed does */
};

/* Starts everything.  After it returns, the node serves whenever the caller calls
 * kvs_server_step().  On failure nothing but the data directory may remain.  Fails with
 * KV_INVALID or KV_UNSUPPORTED if an option cannot be used, and with other codes if a resource
 * is in use or lacking.  `detail` has the form `what: where: value`. */
kv_status_t kvs_server_create(const struct kvs_server_options *options,
                              struct kvs_server **ret_server,
                              char *detail,
                              size_t detail_bytes);

/* Stops everything at once; call kvs_server_drain() before for a clean end.  NULL is
 * allowed. */
void kvs_server_destroy(struct kvs_server *server);

/* Valid until kvs_server_destroy(). */
const struct kvs_server_info *kvs_server_get_info(const struct kvs_server *server);

/* Serves control calls for one step; sleeps for at most a tenth of a second. */
void kvs_server_step(struct kvs_server *server);

/* Rejects new sessions and objects from now on. */
void kvs_server_drain(struct kvs_server *server);
bool kvs_server_drained(struct kvs_server *server);
/* Returns whether a client has requested the drain. */
bool kvs_server_drain_requested(const struct kvs_server *server);

#endif
