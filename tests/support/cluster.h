/* cluster.h - storage nodes inside the test's process, and clients of them.
 *
 * Nodes have real threads and a control port on the transport (message carrier), over any row
 * of the table of transports.  What cannot be set up ends the test.
 *
 * Threads: the test's.  Memory: open/close.
 */
#ifndef KV_TESTS_SUPPORT_CLUSTER_H
#define KV_TESTS_SUPPORT_CLUSTER_H

#include "client/client.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/control/events.h"
#include "kvserver/store/node.h"

enum {
    CLUSTER_NODES_MAX = 12,
};

struct cluster_setup {
    const struct kv_transport_ops *row;
    const char *transports; /* of the row's configuration */
    uint32_t n_nodes, n_threads;
    uint64_t memory_bytes; /* of each node */
    uint32_t lease_ms, sessions_max, root_sessions, credits;
    uint64_t scrub_bytes, scrub_disk_bytes;
    uint32_t object_ttl_s;
    const char *eviction; /* NULL: the node's default */
    uint64_t tenant_quota;
    uint64_t disk_bytes;                 /* room for what is saved; 0: nothing is */
    const struct kvs_event_sink *events; /* (n_nodes) NULL: none */
    uint32_t wire_version_max;
};

struct cluster {
    struct cluster_setup setup;
    struct kv_transport *transport;
    struct kv_disk *disks[CLUSTER_NODES_MAX];
    struct kvs_node *nodes[CLUSTER_NODES_MAX];
    uint32_t n_nodes;
};

/* false: this machine does not have the row; a reason was printed. */
bool cluster_open(struct cluster *cluster, const struct cluster_setup *setup);
void cluster_close(struct cluster *cluster);

/* Starts a node that was ended, with what its disk has. */
void cluster_start(struct cluster *cluster, uint32_t node);

/* Ends one node; clients that are connected lose it. */
void cluster_end(struct cluster *cluster, uint32_t node);

struct cluster_client {
    struct kv_transport *transport; /* NULL: the cluster's */
    uint32_t deadline_ms, peer_timeout_ms, retry_ms;
    uint32_t credits, tenant;
    const char *salt; /* NULL: none */
    uint32_t wire_version_max;
    bool is_reversed; /* the list of nodes */
    bool has_thread;  /* the library's own */
};

/* `setup` may be NULL.  With CLUSTER_THREAD in the environment, every client has a thread. */
struct kv_client *cluster_connect(const struct cluster *cluster,
                                  const struct cluster_client *setup);

/* A number of a node's table of names and values: "status", "memory_used_bytes". */
double
cluster_number(struct kv_client *client, uint32_t node, const char *table, const char *name);

/* The same, summed over all nodes. */
double cluster_total(struct kv_client *client, const char *table, const char *name);

/* Waits until the nodes' tables say what was so when it was called, or later: data threads fill
 * in what they say of their memory now and then. */
void cluster_look(const struct cluster *cluster);

/* Waits until the total is `value`; false: it has not become that in time. */
bool cluster_becomes(struct kv_client *client,
                     const char *table,
                     const char *name,
                     double value);

#endif
