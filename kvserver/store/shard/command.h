/* command.h - the commands of the control thread to a data thread, and its replies. */
#ifndef KV_KVSERVER_STORE_SHARD_COMMAND_H
#define KV_KVSERVER_STORE_SHARD_COMMAND_H

#include "kvserver/base/writers.h"
#include "kvserver/net/transport.h"
#include "kvserver/store/shard/ended.h"
#include "kvserver/store/tier/disk_tier.h"
#include "kvserver/store/tier/object_tier.h"
#include "proto/kv_types.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* The control thread pushes a command into a data thread's ring and gets the same struct back
 * as the reply.  Its memory belongs to the control call, or, for CLIENT_STUCK, to the
 * client. */
enum kvs_command_kind {
    KVS_COMMAND_CLIENT_OPEN,
    KVS_COMMAND_CLIENT_CLOSE,
    KVS_COMMAND_SESSION_OPEN,
    KVS_COMMAND_SESSION_FORK,
    KVS_COMMAND_SESSION_GENERATION,
    KVS_COMMAND_SESSION_TRUNCATE,
    KVS_COMMAND_SESSION_CLOSE,
    KVS_COMMAND_SESSION_LENGTH,
    KVS_COMMAND_PREFIX_PUBLISH,
    KVS_COMMAND_PREFIX_RELEASE,
    KVS_COMMAND_OBJECTS,
    KVS_COMMAND_SESSION_SIZES,
    KVS_COMMAND_TIER,         /* comes back when the job is done; others run meanwhile */
    KVS_COMMAND_CLIENT_STUCK, /* from data to control: a client lost its channel */
};

struct kvs_prefix;
struct kvs_object_page;

/* What a session has on all data threads of a node, which add to it. */
struct kvs_session_size {
    uint32_t index;
    struct kv_id128
        token; /* of the session that is meant: another may be in its place by now */
    _Atomic uint32_t tokens; /* that all its units have; UINT32_MAX: no units */
    _Atomic uint64_t bytes;  /* of its rows and their CRCs, shared ones included */
};

struct kvs_command {
    enum kvs_command_kind kind;
    uint32_t thread;
    kv_status_t status; /* reply */
    void *owner;        /* for the control thread */

    uint32_t index, child_index; /* of sessions, or of a client */
    struct kv_id128 token;
    uint32_t tenant;
    uint32_t generation;
    uint32_t tokens; /* session_fork, _truncate; session_length, prefix_publish: result;
                      * session_open: of `prefix`, and as a result those without bad rows */
    struct kvs_prefix *prefix; /* session_open: the deepest that the session begins with; NULL:
                                * none.  prefix_publish: a list by depth; prefix_release: a list */

    uint64_t root, epoch; /* session_open: its placement */
    uint32_t n_nodes, position;
    uint32_t tokens_max;
    const kv_schema_t *schema;
    const struct kv_writers *writers; /* session_open, _fork: of the new session; _truncate:
                                       * those that remain */

    struct kvs_ended ended; /* session_close: what later requests are told */

    enum kv_channel_mode mode; /* client_open */
    uint32_t credits;
    uint32_t version;
    uint32_t address_bytes;
    const uint8_t *address;

    uint32_t cursor; /* for the data thread: units done */
    bool is_begun;   /* its first slice has run */
    uint64_t bytes;  /* session_length: result */
    bool has_units;  /* there are some of the session here: `tokens` is a result */
    /* session_length: lowered to what the thread's units of each layer have, by all threads;
     * NULL: not wanted */
    _Atomic uint32_t *layer_tokens;
    struct kvs_session_size *sizes; /* (n_sizes) session_sizes */
    uint32_t n_sizes;
    enum kvs_tier_job tier_job; /* tier: what is done with these (n_tier_items) */
    struct kvs_tier_item *tier_items;
    uint32_t n_tier_items;
    bool is_kept; /* for the data thread: it is not done yet, though its slice is */
    struct kvs_object_page *object_page; /* objects: what is asked, and the answer */
    struct kvs_command *next_settling;   /* of those that wait for the disk */
};

#endif
