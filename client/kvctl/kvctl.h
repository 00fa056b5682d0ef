/* kvctl.h - what the files of kvctl, the operator's command line, share.
 *
 *   main.c            options, the table of commands, exit codes
 *   kvctl.c           what commands share: opening clients, reporting failures, a clock
 *   table.c           status, sessions and all others that print a table; drain, close
 *   object.c          put, get, exists, delete
 *   object_list.c     objects, delete --prefix
 *   ping.c            ping
 *   prefix.c          pin, unpin, evict, hint
 *   save.c            save
 *   verify.c          verify
 *   doctor.c          doctor: checks of this machine, then of each node
 *   doctor_node.c     doctor's checks of a node
 *   doctor_report.c   doctor's output
 *   listeners.c       the ports that a process listens on
 *
 * Threads: one.  Memory: valid until the program ends, unless a function says otherwise.
 */
#ifndef KV_CLIENT_KVCTL_KVCTL_H
#define KV_CLIENT_KVCTL_KVCTL_H

#include "client/include/kvclient.h"
#include "kvserver/base/config.h"
#include "kvserver/cluster/members.h"

#include <stdbool.h>

enum {
    KVCTL_DONE = 0,
    KVCTL_FAILED = 1,
    KVCTL_USAGE = 2,   /* wrong usage, or invalid input */
    KVCTL_UNKNOWN = 3, /* exists: its node did not respond */

    KVCTL_DETAIL_BYTES = 1024,
};

struct kvctl_options {
    const char *server; /* the argument or environment variable itself */
    char transport[KV_CONFIG_STRING_BYTES];
    uint64_t deadline_ms;
    bool json;
    const char *prefix; /* NULL: not given */
    uint64_t limit;     /* 0: none */
    uint64_t for_ms;    /* 0: none */
    uint64_t tenant;
    bool session;
    uint64_t ttl; /* seconds; 0: the node's default */
    bool evictable, yes;
    bool help;
    bool version;
};

struct kvctl {
    struct kvctl_options options;
    const char *command;
    const struct kv_members *map;    /* of options.server */
    const char *nodes[KV_NODES_MAX]; /* its addresses */
    uint32_t n_nodes;
    const char *const *operands;
    int n_operands;
};

/* Prints "kvctl: COMMAND: ..." to stderr. */
void kvctl_error(const struct kvctl *ctl, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Opens a client of the whole list.  Returns NULL after a message on stderr. */
struct kv_client *kvctl_open(const struct kvctl *ctl);

/* Opens a client of one node.  Returns NULL after kvctl_node_failed(). */
struct kv_client *kvctl_open_node(const struct kvctl *ctl, const char *node);

/* Reports that a command failed on one node: on stderr, and with --json on stdout, too, so that
 * every node has a line: {"node": ..., "state": "unreachable", "detail": ...}. */
void kvctl_node_failed(const struct kvctl *ctl,
                       const char *node,
                       kv_status_t status,
                       const char *detail);

/* Returns the node's state that follows from a failure: "unreachable" or the status. */
const char *kvctl_state_name(kv_status_t status);

/* Returns what messages advise after a failure; "": nothing. */
const char *kvctl_next_step(kv_status_t status);

/* Returns the library's detail without the node that it begins with. */
const char *kvctl_without_node(const char *node, const char *detail);

/* Opens a client of some nodes; prints nothing.  `detail` receives the reason of a failure. */
kv_status_t kvctl_open_quietly(const struct kvctl *ctl,
                               const char *nodes,
                               struct kv_client **ret_client,
                               char *detail,
                               size_t detail_bytes);

/* Runs a command on one of ctl->nodes.  Returns false after a message if it failed. */
typedef bool (*kvctl_node_fn)(const struct kvctl *ctl, unsigned index);

/* Runs `run` on every node, also after failures.  Returns the exit status. */
int kvctl_each_node(const struct kvctl *ctl, kvctl_node_fn run);

/* Replaces characters of a name that could steer a terminal. */
void kvctl_harmless(char *name);

/* Parses the first operand as a session's id, as the table of sessions shows it.  Returns false after
 * a message on stderr. */
bool kvctl_session_id(const struct kvctl *ctl, struct kv_id128 *ret_id);

/* Returns seconds of a monotonic clock. */
double kvctl_now_s(void);

/* Requests a table of node 0.  *ret_table is valid until the caller frees *ret_op. */
kv_status_t kvctl_table(struct kv_client *client,
                        const char *name,
                        struct kv_op **ret_op,
                        const struct kv_table **ret_table);

/* Prints a table, as JSON if the options say so; lines of JSON begin with the node.  Fails with
 * KV_NO_MEMORY. */
kv_status_t
kvctl_print_table(const struct kvctl *ctl, const char *node, const struct kv_table *table);

/* The commands; each returns the exit status. */
int kvctl_tables_run(const struct kvctl *ctl);
int kvctl_prefix_run(const struct kvctl *ctl);
int kvctl_drain_run(const struct kvctl *ctl);
int kvctl_close_run(const struct kvctl *ctl);
int kvctl_ping_run(const struct kvctl *ctl);
int kvctl_put_run(const struct kvctl *ctl);
int kvctl_get_run(const struct kvctl *ctl);
int kvctl_exists_run(const struct kvctl *ctl);
int kvctl_delete_run(const struct kvctl *ctl);
int kvctl_delete_prefix_run(const struct kvctl *ctl);
int kvctl_objects_run(const struct kvctl *ctl);
int kvctl_doctor_run(const struct kvctl *ctl);
int kvctl_verify_run(const struct kvctl *ctl);
int kvctl_save_run(const struct kvctl *ctl);

#endif
