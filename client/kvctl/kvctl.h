/* kvctl.h - the inside of the operator's command line.
 *
 *   main.c      options, the table of commands, exit codes
 *   kvctl.c     what commands share: clients of the nodes, how a failure is told, a clock
 *   table.c     status, sessions, clients, ops, stats, models; drain
 *   object.c    put, get, exists, delete
 *   ping.c      ping
 *   doctor.c    doctor: the checks of this machine, then those of each node
 *   doctor_node.c     its checks of a node
 *   doctor_report.c   how it tells what it found
 *   listeners.c       which ports a process listens on
 *
 * Threads: one.  Memory: all lives until the program ends, except as said.
 */
#ifndef KV_CLIENT_KVCTL_KVCTL_H
#define KV_CLIENT_KVCTL_KVCTL_H

#include "client/include/kvclient.h"
#include "kvserver/base/config.h"

#include <stdbool.h>

enum {
    KVCTL_DONE = 0,
    KVCTL_FAILED = 1,
    KVCTL_USAGE = 2,   /* wrong usage, or input that cannot be used */
    KVCTL_UNKNOWN = 3, /* exists: its node did not answer */

    KVCTL_NODES_MAX = 64,
    KVCTL_DETAIL_BYTES = 1024,
};

struct kvctl_options {
    char server[KV_CONFIG_STRING_BYTES];
    char transport[KV_CONFIG_STRING_BYTES];
    uint64_t deadline_ms;
    bool json;
    bool help;
    bool version;
};

struct kvctl {
    struct kvctl_options options;
    const char *command;
    const char *nodes[KVCTL_NODES_MAX]; /* of options.server */
    unsigned n_nodes;
    const char *const *operands;
    int n_operands;
};

/* Prints "kvctl: COMMAND: ..." to stderr. */
void kvctl_error(const struct kvctl *ctl, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* A client of the whole list.  NULL: it was told on stderr. */
struct kv_client *kvctl_open(const struct kvctl *ctl);

/* A client of one node.  NULL: it was told, see kvctl_node_failed(). */
struct kv_client *kvctl_open_node(const struct kvctl *ctl, const char *node);

/* A command comes to nothing on one node: told on stderr, and with --json on stdout, where the
 * node is not to be missing: {"node": ..., "state": "unreachable", "detail": ...}. */
void kvctl_node_failed(const struct kvctl *ctl,
                       const char *node,
                       kv_status_t status,
                       const char *detail);

/* "unreachable", or what else the node said of itself by failing so. */
const char *kvctl_state_name(kv_status_t status);

/* The rest of the library's words, which begin with the node. */
const char *kvctl_without_node(const char *node, const char *detail);

/* The same of some nodes, and hands the reason out. */
kv_status_t kvctl_open_quietly(const struct kvctl *ctl,
                               const char *nodes,
                               struct kv_client **ret_client,
                               char *detail,
                               size_t detail_bytes);

/* What a command does on one of ctl->nodes.  false: it failed, and told why. */
typedef bool (*kvctl_node_fn)(const struct kvctl *ctl, unsigned index);

/* Runs it on every node, on those after one that failed too.  Returns the exit status. */
int kvctl_each_node(const struct kvctl *ctl, kvctl_node_fn run);

/* Seconds, of a clock that never goes back. */
double kvctl_now_s(void);

/* A table of node 0.  KV_OK: *ret_table is lent until *ret_op is freed. */
kv_status_t kvctl_table(struct kv_client *client,
                        const char *name,
                        struct kv_op **ret_op,
                        const struct kv_table **ret_table);

/* The commands; each returns the exit status. */
int kvctl_tables_run(const struct kvctl *ctl);
int kvctl_drain_run(const struct kvctl *ctl);
int kvctl_ping_run(const struct kvctl *ctl);
int kvctl_put_run(const struct kvctl *ctl);
int kvctl_get_run(const struct kvctl *ctl);
int kvctl_exists_run(const struct kvctl *ctl);
int kvctl_delete_run(const struct kvctl *ctl);
int kvctl_doctor_run(const struct kvctl *ctl);

#endif
