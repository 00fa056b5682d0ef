/* system.h - what system tests do with the library and the nodes' tables.
 *
 * A failure ends the test, with the library's own words.
 *
 * Threads: one client each.  Memory: all from the client.
 */
#ifndef KV_TESTS_SYSTEM_SYSTEM_H
#define KV_TESTS_SYSTEM_SYSTEM_H

#include "client/include/kvclient.h"
#include "tests/support/process.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    SYSTEM_DEADLINE_MS = 30000, /* of operations that must succeed */
    SYSTEM_PEER_MS = 30000,     /* silence of a node that lives, on a slow machine */
    SYSTEM_SLACK_MS = 30000,    /* what a slow machine adds to a deadline; a hang is longer */
};

/* What every test's main() is.  `argv`: the path of kvserver, then the test's own; or
 * `--child ROLE ...`, which runs `child`. */
int system_main(int argc,
                char **argv,
                int (*work)(int argc, char **argv),
                int (*child)(int argc, char **argv));

/* A node that must come up, and one that must end well. */
void system_node_start(struct process_node *node, const char *const *options);
void system_node_stop(struct process_node *node);

/* Connects.  A node counts as dead after SYSTEM_PEER_MS of silence. */
struct kv_client *system_open(const char *nodes, const char *transport);

struct kv_buffer *system_buffer(struct kv_client *client, size_t bytes);

/* Finishes the operation that `begun` has told of; it must end as wanted.  A pointer to it,
 * since the arguments may be evaluated in any order. */
void system_finish(struct kv_client *client,
                   kv_status_t begun,
                   struct kv_op **op,
                   kv_status_t wanted);

/* A small model of 2 layers with 2 heads, rows of 128 bytes. */
const struct kv_model_info *system_model(void);
/* One unit only: all data of a session lies on one node. */
const struct kv_model_info *system_narrow_model(void);

struct kv_session *
system_session(struct kv_client *client, const struct kv_model_info *model, uint32_t lease_ms);

struct kv_session *
system_fork(struct kv_client *client, struct kv_session *session, uint32_t tokens);

/* Puts and reads back all layers and heads of some tokens, and checks every byte; uses the
 * whole buffer. */
void system_put(struct kv_client *client,
                struct kv_session *session,
                struct kv_buffer *buffer,
                uint32_t token_begin,
                uint32_t n_tokens,
                uint64_t salt);
void system_read(struct kv_client *client,
                 struct kv_session *session,
                 struct kv_buffer *buffer,
                 uint32_t token_begin,
                 uint32_t n_tokens,
                 uint64_t salt);

/* One object, to its end. */
kv_status_t system_object(struct kv_client *client,
                          enum kv_object_verb verb,
                          const char *name,
                          struct kv_buffer *buffer,
                          size_t bytes,
                          uint32_t deadline_ms);

/* A number of the table "stats" or "status". */
double
system_number(struct kv_client *client, uint32_t node, const char *table, const char *name);

/* Whether something is on the node's disk, and nothing waits to be. */
bool system_is_saved(struct kv_client *client, uint32_t node);

/* How many rows a table has. */
uint32_t system_n_rows(struct kv_client *client, uint32_t node, const char *table);

/* The table "clients": a number about the client of that name.  false: it is not there. */
bool system_client_number(struct kv_client *client,
                          uint32_t node,
                          const char *name,
                          const char *column,
                          double *ret_number);

#endif
