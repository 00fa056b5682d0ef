#include "tests/sim/world.h"

#include "client/check.h"
#include "client/client.h"
#include "client/control_message.h"
#include "client/dispatch.h"
#include "client/node.h"
#include "client/op.h"
#include "client/session.h"
#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/store/node.h"
#include "tests/sim/disk_sim.h"
#include "tests/sim/members_sim.h"
#include "tests/sim/node_look.h"
#include "tests/sim/own_clock.h"
#include "tests/sim/published.h"
#include "tests/sim/question.h"
#include "tests/sim/swaps.h"
#include "tests/sim/tier_sim.h"
#include "tests/sim/transport_sim.h"
#include "tests/sim/truth.h"
#include "tests/support/failing_memory.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_CLIENTS = 3,
    THREADS_MAX = 3,
    N_MODELS = 3,
    HANDLES_MAX = 6, /* of a client */
    TASKS_MAX = 8,   /* of a client at once */
    SLOTS_MAX = 6,
    SLOT_BYTES = 6 << 20,
    GUARD_BYTES = 256,
    CANARY = 0xa7,
    TRUTHS_MAX = 24,
    N_TENANTS = 2,
    N_NAMES = 16, /* of a tenant's objects */
    N_ROOTS = 2,  /* prompts' first blocks */
    N_PROMPTS = 6,
    TOKENS_BLOCKS_MAX = 6, /* of a publish that tells its tokens */
    QUOTA_BYTES = 3 << 20,
    ROOT_SESSIONS = 2, /* of a row, at most, before its root gets more rows */
    MANY_NODES_ONE_IN = 8,
    CONTENTS_MAX = 8, /* of a name, that may have been put */
    BATCH_MAX = 3,    /* objects in one operation */
    IDS_MAX = 600,
    NODE_BYTES = 256 << 20, /* of a data thread */
    NODE_BYTES_LITTLE = 16 << 20,
    CHECK_EVERY = 128,    /* steps */
    LATEST_US = 30000000, /* no message is on its way for longer */
    LEASE_MS = 60000,
    LEASE_SHORT_MS = 4000,
    CLIENT_LEASE_MS = 30000,
    IDLE_STEP_US = 1000,
    SHORT_DEADLINE_MS = 2000,
    CREDITS_LATE_US = 5000,  /* a message and its answer may take that long */
    STRAGGLER_US = 60000000, /* no message is older */
    SETTLE_US = 40000000,
    SAVE_US = 4000000,
    BACK_US = 1000000,
    STUCK_MS = 10000, /* a node gives up a client whose data has not moved for so long */
    CLOCK_SPREAD_DAYS = 1000,
    CLOCK_DRIFT_MAX = 1000, /* parts in a million */
    CLOCK_JUMP_US = 3000000,
    CLOCK_JUMP_EVERY_US = 10000000, /* so that no lease that is renewed ends by jumps */
    DRAIN_US = 10000000,            /* a node that drains stops by then, as kvserver does */
    DRAIN_HEARD_US = 1000000,       /* answers of one that stopped are on their way */
    BOOKS_EVERY = 16,               /* turns */
    MEMORY_EVERY = 1024,
    LET_GO_ONE_IN = 200, /* steps of a data thread */
    LET_GO_MOST = 1 << 20,
};

enum task_kind {
    TASK_OPEN,
    TASK_RESUME,
    TASK_FORK,
    TASK_TRUNCATE,
    TASK_CLOSE,
    TASK_LENGTH,
    TASK_RENEW,
    TASK_PUT,
    TASK_APPEND,
    TASK_READ,
    TASK_FETCH,
    TASK_INDEX,
    TASK_PUBLISH,
    TASK_SAVE,
    TASK_QUERY,
    TASK_OBJECTS,
    TASK_MATCH,
    TASK_PREFIX,
    TASK_PING,
    TASK_TABLE,
    TASK_VERIFY,
    TASK_DRAIN,
    TASK_KINDS,
};

static const char *const task_names[TASK_KINDS] = {
    "open",   "resume", "fork",  "truncate", "close",   "length", "renew", "put",
    "append", "read",   "fetch", "index",    "publish", "save",   "query", "objects",
    "match",  "prefix", "ping",  "table",    "verify",  "drain",
};

struct slot {
    uint8_t *memory;
    struct kv_buffer *buffer;
    size_t begin, end; /* used by the last task */
    bool is_used;      /* by a task */
    bool is_waiting;   /* for the end of its quarantine */
};

struct handle {
    struct kv_session *session;
    struct truth *truth;
    unsigned n_tasks;
    unsigned n_lifecycles; /* begun and not ended */
    bool is_closing;
};

struct task {
    bool is_used;
    enum task_kind kind;
    uint64_t number;
    struct kv_op *op;
    struct handle *handle;
    struct truth *truth;
    uint64_t since;      /* step in which it began */
    uint64_t n_losses;   /* of the truth, then */
    uint32_t generation; /* that it has at most */
    uint32_t tokens;     /* truncate, fork; length: the least then */
    uint32_t deadline_ms;
    uint64_t cancel_us;
    bool was_cancelled;
    struct kv_id128 block_names[TRUTH_BLOCKS_MAX]; /* open, match, prefix: of a prompt */
    uint32_t n_block_names;
    struct published_by by; /* whose names they are */
    uint32_t blocks_most;   /* open: that it may attach; publish: the last one's end */
    uint32_t blocks_sure;   /* that it must find */
    uint32_t n_named;       /* fork: of its parent's blocks, then */
    uint64_t n_doubts;      /* of the tenant, then */
    bool is_foreign;        /* resume: another tenant's session */
    bool is_sure;           /* all that it reads must be there, and what it writes fits */
    bool was_contended;
    bool has_gap;
    uint64_t n_deaths[WORLD_NODES_MAX], n_drains;
    bool is_fragile;
    bool is_first; /* index: nobody asked before */
    struct slot *slot;
    struct kv_index_options index;
    struct question *question;
    struct kv_rows box;
    uint32_t *crcs;
    uint32_t layer, n_heads;
    uint32_t n_ids[TRUTH_UNITS_MAX];
    uint32_t ids[IDS_MAX];
    enum kv_object_verb verb;
    enum kv_prefix_verb prefix_verb;
    struct kv_object objects[BATCH_MAX];
    bool may_go[BATCH_MAX]; /* put: with a time, or evictable */
    uint32_t names[BATCH_MAX], contents[BATCH_MAX];
    bool was_gone[BATCH_MAX];
    uint32_t may_be[BATCH_MAX];    /* of the name, then */
    uint64_t n_changes[BATCH_MAX]; /* of the name, then */
    unsigned n_objects;
};

struct name {
    char text[24];
    uint32_t contents[CONTENTS_MAX];
    unsigned n_contents;
    uint32_t sure;           /* content that must be there, or 0 */
    uint64_t doubted_us;     /* when a delete ended that may still come to be */
    unsigned n_deletes;      /* under way */
    bool is_gone;            /* it was deleted, and no put can bring it back */
    uint32_t may_be;         /* a bit for each content that was put since it was gone */
    unsigned n_puts;         /* under way */
    uint64_t n_changes;      /* puts begun and puts ended */
    uint64_t put_doubted_us; /* when a put ended that may still come to be */
    uint64_t n_losses;
};

struct client {
    struct own_clock clock;
    struct world *world;
    struct kv_client *client;
    struct kv_transport *transport;
    struct handle handles[HANDLES_MAX];
    struct task tasks[TASKS_MAX];
    struct slot slots[SLOTS_MAX];
    uint32_t tenant;
    bool has_salt;
    const struct task *first; /* query of the batch that is being begun; NULL: none */
    uint64_t stalled_us;      /* until then it stands still */
    uint64_t n_begun, n_ended;
};

struct node {
    struct own_clock clock;
    struct kvs_node *node; /* NULL: dead */
    struct tier_sim *tier; /* NULL: all is in memory */
    struct kv_transport *transport;
    struct kv_disk *disk;     /* outlasts the node */
    struct node_saved *saved; /* (n_saved) what the last one here had saved when it died */
    uint64_t n_saved;
    char address[2 * KV_WIRE_ADDRESS_MAX + 16];
    uint64_t stalled_us;
    uint64_t revive_us;
    uint64_t jumped_us;
    uint64_t drained_us; /* it stops by then; 0: it does not drain */
    uint64_t n_deaths;
    uint32_t n_threads;
};

/* What may take away what a tenant has published. */
struct tenant {
    uint64_t n_doubts;   /* evictions asked for, begun and ended */
    unsigned n_evicting; /* under way */
    uint64_t doubted_us; /* when one ended that may still come to be */
};

struct world {
    struct kv_clock clock;
    struct world_options options;
    struct world_result *result;
    struct kv_random random;
    struct sim_net *net;
    struct node nodes[WORLD_NODES_MAX];
    unsigned n_nodes;
    unsigned weights;        /* of the nodes: members_sim.h */
    uint64_t n_drains;       /* begun so far */
    uint64_t drain_heard_us; /* until then, nodes are heard that drained and stopped */
    struct client clients[N_CLIENTS];
    struct kv_model_info models[N_MODELS];
    struct truth *truths;
    unsigned n_truths;
    struct name names[N_TENANTS * N_NAMES];
    struct tenant tenants[N_TENANTS];
    uint32_t turns[N_PROMPTS][TRUTH_BLOCKS_MAX]; /* what prompts' blocks say */
    struct published *published;
    bool has_doubted_crcs; /* which a node may refuse: has_doubted_crcs() */
    bool has_same_names;   /* all models' blocks: who publishes first has them */
    const char *eviction;
    uint64_t tenant_quota;
    uint64_t at;     /* steps so far */
    uint64_t n_busy; /* of the last ones, in which somebody had something to do */
    uint64_t n_tasks;
    uint32_t n_contents;
    uint64_t node_bytes; /* of a data thread */
    uint64_t disk_bytes; /* that nodes may save; 0: they do not */
    bool is_calm;        /* no new faults */
    uint32_t failing;    /* allocations, in a million */
    uint64_t starved_us; /* all allocations fail until then */
    bool power_fails;    /* where a node dies now */
};

/* ---- chance, and words ------------------------------------------------------------------- */

static uint64_t below(struct world *world, uint64_t bound)
{
    return kv_random_below(&world->random, bound);
}

static bool one_in(struct world *world, uint64_t n)
{
    return below(world, n) == 0;
}

static void remember(struct world *world, uint64_t what)
{
    world->result->hash = kv_mix64(world->result->hash ^ what);
}

static void __attribute__((format(printf, 3, 4)))
complain(struct world *world, const struct task *task, const char *format, ...)
{
    struct world_result *result = world->result;
    int n = 0;
    va_list args;

    if (result->failed)
        return;
    result->failed = true;
    if (task != NULL)
        n = snprintf(result->failure, sizeof(result->failure),
                     "operation %llu, %s, %s: %s: ", (unsigned long long)task->number,
                     task_names[task->kind], kv_status_name(kv_op_status(task->op)),
                     kv_op_detail(task->op));
    if (n < 0 || (size_t)n >= sizeof(result->failure))
        n = 0;
    va_start(args, format);
    vsnprintf(result->failure + n, sizeof(result->failure) - (size_t)n, format, args);
    va_end(args);
}

static void __attribute__((format(printf, 2, 3)))
say(const struct world *world, const char *format, ...)
{
    va_list args;

    if (!world->options.verbose)
        return;
    printf("%10.6f ", (double)world->clock.virtual_us / 1e6);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

static bool has(const struct world *world, unsigned faults)
{
    return (world->options.faults & faults) != 0;
}

/* ---- allocations ------------------------------------------------------------------------- */

/* A node or a client is at work from here to leave(): its allocations may fail. */
static void enter(struct world *world)
{
    uint64_t nth = 0;

    if (world->failing > 0 && !world->is_calm)
        nth = 1 + below(world, 2 * 1000000 / world->failing);
    if (world->clock.virtual_us < world->starved_us && !world->is_calm)
        failing_memory_arm(1, true);
    else
        failing_memory_arm(nth, false);
}

static void leave(void)
{
    failing_memory_arm(0, false);
}

/* ---- clocks ------------------------------------------------------------------------------ */

/* Of a process that begins: of another day, and a little too fast or too slow. */
static void clock_begin(struct world *world, struct own_clock *own)
{
    const uint64_t day_us = UINT64_C(86400) * 1000000;
    uint64_t shown_us = world->clock.virtual_us;
    int64_t drift = 0;

    if (has(world, WORLD_CLOCKS)) {
        shown_us = 1 + below(world, CLOCK_SPREAD_DAYS * day_us);
        drift = (int64_t)below(world, 2 * CLOCK_DRIFT_MAX + 1) - CLOCK_DRIFT_MAX;
    }
    own_clock_init(own, &world->clock, shown_us, drift);
}

/* ---- nodes ------------------------------------------------------------------------------- */

/* What goes wrong with a node's disk, for as long as the node lives. */
static void disk_faults(struct world *world, const struct node *node)
{
    struct disk_sim_faults faults = {
        .write_us = has(world, WORLD_SLOW_DISKS) ? below(world, 300000) : 0};

    if (has(world, WORLD_BAD_DISKS) && !world->is_calm) {
        faults.fails = one_in(world, 3) ? 100 : 0;
        faults.unread = one_in(world, 3) ? 50 : 0;
        faults.rots = one_in(world, 3) ? 200 : 0;
        faults.stalls = one_in(world, 3) ? 100 : 0;
        faults.stall_us = 3000000;
        faults.bytes_max = one_in(world, 4) ? 4 << 20 : 0;
    }
    disk_sim_set_faults(node->disk, &faults);
}

/* Nothing is bad on a disk that has not rotted, whatever else became of it. */
static void check_verification(struct world *world,
                               const struct task *task,
                               const struct kv_verification *verification)
{
    uint64_t n_rotten = 0;

    for (unsigned i = 0; i < world->n_nodes; i++) {
        struct disk_sim_counts counts;

        disk_sim_get_counts(world->nodes[i].disk, &counts);
        n_rotten += counts.n_rotten;
    }
    if (n_rotten == 0 && verification->disk.bad + verification->disk.lost > 0)
        complain(world, task, "blocks are bad on a disk that is good");
}

/* What the node before had saved is there, whatever it died of. */
static void check_saved(struct world *world, unsigned place)
{
    struct node *node = &world->nodes[place];
    const char *why = node_saved_fault(node->node, node->saved, node->n_saved);

    if (why != NULL)
        complain(world, NULL, "node %u: %s", place, why);
    world->result->n_saved += node->n_saved;
    free(node->saved);
    node->saved = NULL;
    node->n_saved = 0;
}

static void node_begin(struct world *world, unsigned place)
{
    struct node *node = &world->nodes[place];
    char name[16], detail[256];
    struct kvs_node_config config = {
        .name = name,
        .memory_bytes = world->node_bytes * node->n_threads,
        .n_threads = node->n_threads,
        .sessions_max = 128,
        .root_sessions = 1 + (uint32_t)below(world, ROOT_SESSIONS),
        .clients_max = 32,
        .credits = 4 + (uint32_t)below(world, 29),
        .lease_ms = LEASE_MS,
        .client_lease_ms = CLIENT_LEASE_MS,
        .stuck_send_ms = STUCK_MS,
        .seed = kv_random_next(&world->random) | 1,
        .clock = &node->clock.clock,
        .message_control = true,
        .eviction = world->eviction,
        .tenant_quota = world->tenant_quota,
    };

    clock_begin(world, &node->clock);
    snprintf(name, sizeof(name), "node%u", place);
    node->transport = sim_net_transport(world->net, place);
    config.transport = node->transport;
    if (node->disk == NULL)
        node->disk = disk_sim_open(&world->clock, kv_random_next(&world->random));
    if (node->disk == NULL) {
        fprintf(stderr, "kv_sim: out of memory: disk\n");
        abort();
    }
    disk_faults(world, node);
    config.disk = node->disk;
    config.disk_bytes = world->disk_bytes;
    config.scrub_disk_bytes = one_in(world, 2) ? UINT64_C(1) << below(world, 30) : 0;
    if (kvs_node_create(&config, &node->node, detail, sizeof(detail)) != KV_OK) {
        fprintf(stderr, "kv_sim: %s\n", detail);
        abort();
    }
    check_saved(world, place);
    if (has(world, WORLD_EVICTIONS) && world->disk_bytes == 0)
        node->tier = tier_sim_create(node->node, kv_random_next(&world->random),
                                     has(world, WORLD_LOST_BLOCKS));
    snprintf(node->address, sizeof(node->address), "%s", kvs_node_address(node->node));
    if (node->drained_us != 0)
        world->drain_heard_us = world->clock.virtual_us + DRAIN_HEARD_US;
    node->drained_us = 0;
    say(world, "node %u begins", place);
}

/* The node, and what it had, is gone. */
static void count_evictions(struct world *world, const struct node *node)
{
    struct tier_sim_counts counts;

    if (node->tier == NULL)
        return;
    tier_sim_get_counts(node->tier, &counts);
    world->result->n_evictions += counts.n_left;
    world->result->n_segments_lost += counts.n_lost;
}

/* Whether any node that is alive has lost rows, or one that has died. */
static bool has_lost_blocks(const struct world *world)
{
    bool has_lost = world->result->n_segments_lost + world->result->n_damaged > 0;

    for (unsigned i = 0; i < world->n_nodes && !has_lost; i++) {
        struct tier_sim_counts counts = {0};
        struct disk_sim_counts of_disk;

        if (world->nodes[i].tier != NULL)
            tier_sim_get_counts(world->nodes[i].tier, &counts);
        disk_sim_get_counts(world->nodes[i].disk, &of_disk);
        has_lost = counts.n_lost + of_disk.n_rotten + of_disk.n_failed + of_disk.n_unread > 0;
    }
    return has_lost;
}

/* For a look inside the nodes.  Returns false if some blocks do not come back now. */
static bool bring_back_blocks(struct world *world)
{
    bool are_here = true;

    for (unsigned i = 0; i < world->n_nodes; i++) {
        struct node *node = &world->nodes[i];

        if (node->tier != NULL)
            tier_sim_bring_back(node->tier);
        else if (node->node != NULL && world->disk_bytes > 0)
            are_here = node_bring_back(node->node) && are_here;
    }
    return are_here;
}

/* Whether all blocks of the session are in memory; what does not depend on memory is brought back. */
static bool has_all_blocks(struct world *world, const struct kv_id128 *token)
{
    for (unsigned i = 0; i < world->n_nodes; i++) {
        struct node *node = &world->nodes[i];

        if (node->tier != NULL)
            tier_sim_bring_back(node->tier);
        else if (node->node != NULL && !node_has_all(node->node, token))
            return false;
    }
    return true;
}

static void node_end(struct world *world, unsigned place)
{
    struct node *node = &world->nodes[place];

    world->result->n_loaded += node_n_loaded(node->node);
    node->saved = node_list_saved(node->node, &node->n_saved);
    kvs_node_destroy(node->node);
    node->node = NULL;
    count_evictions(world, node);
    tier_sim_destroy(node->tier);
    node->tier = NULL;
    disk_sim_crash(node->disk, world->power_fails || below(world, 2) == 0);
}

/* What the tenant has published may be gone. */
static void doubt(struct world *world, uint32_t tenant)
{
    world->tenants[tenant].n_doubts++;
    published_doubt(world->published, tenant);
}

/* What it had is gone: with a kill at once, else when it has stopped as it likes. */
static void node_stop(struct world *world, unsigned place, bool is_killed)
{
    struct node *node = &world->nodes[place];

    say(world, "node %u %s", place, is_killed ? "dies" : "stops");
    if (is_killed)
        sim_transport_kill(node->transport);
    node_end(world, place);
    node->n_deaths++;
    world->result->n_deaths++;
    node->revive_us = world->clock.virtual_us + below(world, 3000000);
    for (struct truth *truth = world->truths; truth != NULL; truth = truth->next)
        truth_node_lost(truth, place);
    for (unsigned i = 0; i < N_TENANTS * N_NAMES; i++) {
        world->names[i].sure = 0;
        world->names[i].n_losses++;
    }
    for (unsigned i = 0; i < N_TENANTS; i++)
        doubt(world, i);
}

static void node_drains(struct world *world, unsigned place)
{
    struct node *node = &world->nodes[place];

    if (node->drained_us != 0)
        return;
    say(world, "node %u drains", place);
    node->drained_us = world->clock.virtual_us + DRAIN_US;
    world->n_drains++;
}

/* A node that drains stops when it has answered all, or when it has tried for long; where
 * nothing goes wrong any more it must have answered all. */
static void drains_step(struct world *world)
{
    for (unsigned i = 0; i < world->n_nodes; i++) {
        struct node *node = &world->nodes[i];

        if (node->node == NULL)
            continue;
        if (kvs_node_drain_requested(node->node))
            node_drains(world, i);
        if (node->drained_us != 0 &&
            (kvs_node_drained(node->node) ||
             (!world->is_calm && node->drained_us <= world->clock.virtual_us)))
            node_stop(world, i, false);
    }
}

static bool is_draining(const struct world *world)
{
    for (unsigned i = 0; i < world->n_nodes; i++)
        if (world->nodes[i].node != NULL && world->nodes[i].drained_us != 0)
            return true;
    return false;
}

/* Whether a node drains, or did until it stopped: its answers may still be on their way. */
static bool may_hear_of_drain(const struct world *world)
{
    for (unsigned i = 0; i < world->n_nodes; i++)
        if (world->nodes[i].drained_us != 0)
            return true;
    return world->clock.virtual_us < world->drain_heard_us;
}

/* ---- clients ----------------------------------------------------------------------------- */

/* The address of a node is where it is now. */
static kv_status_t open_control(struct kv_client *client,
                                uint32_t index,
                                const char *address,
                                struct kvc_control **ret_control)
{
    const struct client *own = (const struct client *)(const void *)client->loop.clock;

    return kvc_control_message_open(
        client, index, own->world->nodes[members_sim_place(address)].address, ret_control);
}

static void client_begin(struct world *world, unsigned number)
{
    struct client *client = &world->clients[number];
    struct kvc_node_setup nodes[WORLD_NODES_MAX];
    char name[16], text[32], detail[256];
    struct kv_members *map = NULL;
    struct kvc_client_setup setup = {
        .nodes = nodes,
        .n_nodes = world->n_nodes,
        .open_control = open_control,
        .clock = &client->clock.clock,
        .seed = kv_random_next(&world->random) | 1,
        .name = name,
        .ops_max = 64,
        .credits = one_in(world, 2) ? 0 : 4 + (uint32_t)below(world, 8),
        .deadline_ms = 5000,
        .peer_timeout_ms = 500 + (uint32_t)below(world, 2000),
        .retry_ms = 50 + (uint32_t)below(world, 1000),
        .tenant = client->tenant,
        .salt = "salt",
        .salt_bytes = client->has_salt ? 4 : 0,
    };

    assert((void *)client == (void *)&client->clock.clock);
    client->world = world;
    clock_begin(world, &client->clock);
    snprintf(name, sizeof(name), "client%u", number);
    /* The same weights for all, each in its own order. */
    snprintf(text, sizeof(text), "%u %llu", world->n_nodes,
             (unsigned long long)(below(world, 1000) * 16 + world->weights));
    if (members_sim.get("nodes", text, &map, detail, sizeof(detail)) != KV_OK)
        abort();
    for (unsigned i = 0; i < world->n_nodes; i++)
        nodes[i] = (struct kvc_node_setup){
            .address = map->members[i].address,
            .name = map->members[i].name,
            .weight = map->members[i].weight,
            .mode = one_in(world, 2) ? KV_CHANNEL_NETWORK : KV_CHANNEL_SHARED,
        };
    client->transport = sim_net_transport(world->net, WORLD_NODES_MAX + number);
    setup.transport = client->transport;
    if (kvc_client_create(&setup, &client->client) != KV_OK)
        abort();
    free(map);
    client->n_begun = client->n_ended = 0;
    for (unsigned i = 0; i < SLOTS_MAX; i++) {
        struct slot *slot = &client->slots[i];

        slot->is_used = slot->is_waiting = false;
        memset(slot->memory + slot->begin, CANARY, slot->end - slot->begin);
        slot->begin = slot->end = GUARD_BYTES;
        if (kv_buffer_map(client->client, slot->memory, SLOT_BYTES, KV_MEMORY_HOST,
                          &slot->buffer) != KV_OK)
            abort();
    }
}

static void handle_forget(struct world *world, struct handle *handle)
{
    struct truth *truth = handle->truth;

    if (--truth->n_handles == 0)
        truth->idle_us = world->clock.virtual_us;
    *handle = (struct handle){0};
}

static void task_forget(struct task *task)
{
    if (task->truth != NULL)
        task->truth->n_tasks--;
    if (task->handle != NULL)
        task->handle->n_tasks--;
    for (unsigned i = 0; i < task->n_objects; i++)
        free((char *)task->objects[i].name);
    free(task->crcs);
    if (task->question != NULL)
        question_free(task->question);
    free(task->question);
    task->is_used = false;
}

/* The name's delete or put ends. */
static void
name_changed(struct world *world, struct name *name, enum kv_object_verb verb, bool is_certain)
{
    if (verb == KV_OBJECT_DELETE) {
        name->n_deletes--;
        if (!is_certain)
            name->doubted_us = world->clock.virtual_us;
    } else if (verb == KV_OBJECT_PUT) {
        name->n_puts--;
        name->n_changes++;
        if (!is_certain)
            name->put_doubted_us = world->clock.virtual_us;
    }
}

/* A publish ends.  If it is not known how, the session's blocks may still be published until the
 * nodes have another generation of it. */
static void publish_over(struct task *task, bool is_certain)
{
    struct truth *truth = task->truth;

    if (!is_certain) {
        if (truth->doubted_end < task->blocks_most)
            truth->doubted_end = task->blocks_most;
        if (truth->doubted_generation < task->generation)
            truth->doubted_generation = task->generation;
    }
    if (--truth->n_publishing == 0)
        truth->publishing_end = 0;
}

/* What has been asked about prefixes is over. */
static void prefix_over(struct world *world, const struct task *task, bool is_certain)
{
    struct tenant *tenant = &world->tenants[task->by.tenant];

    if (task->prefix_verb != KV_PREFIX_EVICT)
        return;
    tenant->n_evicting--;
    if (!is_certain)
        tenant->doubted_us = world->clock.virtual_us;
    doubt(world, task->by.tenant);
}

/* Whether the task puts rows with CRCs of the caller's, who does not know whose rows follow a truncate
 * that has failed. */
static bool has_doubted_crcs(const struct task *task)
{
    return (task->kind == TASK_PUT || task->kind == TASK_APPEND) && task->crcs != NULL &&
           task->truth->is_unclear;
}

static void client_end(struct world *world, unsigned number)
{
    struct client *client = &world->clients[number];

    kv_client_close(client->client);
    client->client = NULL;
    for (unsigned i = 0; i < TASKS_MAX; i++) {
        struct task *task = &client->tasks[i];

        if (!task->is_used)
            continue;
        for (unsigned j = 0; j < task->n_objects; j++) {
            name_changed(world, &world->names[task->names[j]], task->verb, false);
        }
        if (task->kind == TASK_FORK || task->kind == TASK_TRUNCATE)
            task->truth->is_unclear = true;
        world->has_doubted_crcs = world->has_doubted_crcs || has_doubted_crcs(task);
        if (task->kind == TASK_PUBLISH)
            publish_over(task, false);
        if (task->kind == TASK_PREFIX)
            prefix_over(world, task, false);
        task_forget(task);
    }
    for (unsigned i = 0; i < HANDLES_MAX; i++)
        if (client->handles[i].session != NULL)
            handle_forget(world, &client->handles[i]);
}

/* ---- memory that nobody may touch -------------------------------------------------------- */

static bool is_canary(const uint8_t *bytes, size_t n_bytes)
{
    return n_bytes == 0 || (bytes[0] == CANARY && memcmp(bytes, bytes + 1, n_bytes - 1) == 0);
}

static void slot_check(struct world *world, const struct slot *slot, const char *when)
{
    if (!is_canary(slot->memory + slot->begin, slot->end - slot->begin))
        complain(world, NULL, "%s: a byte landed in a buffer that was not busy", when);
}

static struct slot *slot_take(struct world *world, struct client *client, size_t bytes)
{
    for (unsigned i = 0; i < SLOTS_MAX; i++) {
        struct slot *slot = &client->slots[i];

        if (slot->is_used || slot->is_waiting)
            continue;
        slot_check(world, slot, "before use");
        slot->is_used = true;
        slot->begin = GUARD_BYTES + below(world, 1024) * 4;
        slot->end = slot->begin + bytes;
        assert(slot->end + GUARD_BYTES <= SLOT_BYTES);
        return slot;
    }
    return NULL;
}

static void slot_settle(struct slot *slot)
{
    if (slot->is_waiting && !kv_buffer_busy(slot->buffer)) {
        memset(slot->memory + slot->begin, CANARY, slot->end - slot->begin);
        slot->is_waiting = false;
    }
}

static void slot_give(struct world *world, struct slot *slot)
{
    if (!is_canary(slot->memory + slot->begin - GUARD_BYTES, GUARD_BYTES) ||
        !is_canary(slot->memory + slot->end, GUARD_BYTES))
        complain(world, NULL, "a byte landed beside what was asked for");
    slot->is_used = false;
    slot->is_waiting = true;
    slot_settle(slot);
}

/* ---- sessions ---------------------------------------------------------------------------- */

static struct truth *truth_new(struct world *world, const kv_schema_t *schema)
{
    struct truth *truth = truth_create(schema);

    truth->number = ++world->n_tasks;
    truth->next = world->truths;
    world->truths = truth;
    world->n_truths++;
    return truth;
}

/* Forgets sessions that nobody can name any more. */
static void truths_sweep(struct world *world)
{
    for (struct truth **link = &world->truths; *link != NULL;) {
        struct truth *truth = *link;

        if (truth->n_handles == 0 && truth->n_tasks == 0 &&
            (truth->closed_at != 0 || truth->lost_node || one_in(world, 4))) {
            *link = truth->next;
            world->n_truths--;
            truth_destroy(truth);
        } else {
            link = &truth->next;
        }
    }
}

static struct handle *handle_room(struct client *client)
{
    for (unsigned i = 0; i < HANDLES_MAX; i++)
        if (client->handles[i].session == NULL)
            return &client->handles[i];
    return NULL;
}

static struct handle *handle_pick(struct world *world, struct client *client)
{
    struct handle *handles[HANDLES_MAX];
    unsigned n = 0;

    for (unsigned i = 0; i < HANDLES_MAX; i++)
        if (client->handles[i].session != NULL && !client->handles[i].is_closing)
            handles[n++] = &client->handles[i];
    return n > 0 ? handles[below(world, n)] : NULL;
}

/* A handle that an operation has made. */
static void handle_add(struct client *client, struct kv_session *session, struct truth *truth)
{
    struct handle *handle = handle_room(client);

    if (handle == NULL) {
        kv_session_free(session);
        return;
    }
    *handle = (struct handle){.session = session, .truth = truth};
    truth->was_shared = truth->was_shared || truth->n_handles > 0;
    truth->n_handles++;
}

/* The place of a client's node. */
static unsigned place_of(const struct kv_client *client, uint32_t node_index)
{
    return members_sim_place(client->nodes[node_index].address);
}

static void truth_place(struct truth *truth, const struct kv_session *session)
{
    kv_session_ticket(session, &truth->ticket);
    truth->nodes = 0;
    for (uint32_t i = 0; i < session->row.n_nodes; i++)
        truth->nodes |= 1u << place_of(session->client, session->row.nodes[i]);
    for (uint32_t unit = 0; unit < session->schema.n_units; unit++)
        truth->node_of_unit[unit] = (uint8_t)place_of(
            session->client,
            session->row.nodes[kv_placement_unit_position(unit, session->row.n_nodes)]);
}

/* ---- beginning --------------------------------------------------------------------------- */

static struct task *task_new(struct world *world, struct client *client, enum task_kind kind)
{
    for (unsigned i = 0; i < TASKS_MAX; i++) {
        struct task *task = &client->tasks[i];

        if (task->is_used)
            continue;
        memset(task, 0, offsetof(struct task, n_ids));
        task->n_objects = 0;
        task->is_used = true;
        task->kind = kind;
        task->since = world->at;
        for (unsigned node = 0; node < world->n_nodes; node++)
            task->n_deaths[node] = world->nodes[node].n_deaths;
        task->n_drains = world->n_drains - may_hear_of_drain(world);
        task->deadline_ms = one_in(world, 20) ? 1 + (uint32_t)below(world, 30)
                                              : 3000 + (uint32_t)below(world, 4000);
        if (one_in(world, 25))
            task->cancel_us =
                world->clock.virtual_us + below(world, one_in(world, 2) ? 300 : 5000);
        return task;
    }
    return NULL;
}

static void task_of(struct task *task, struct handle *handle)
{
    struct truth *truth = handle->truth;

    task->handle = handle;
    task->truth = truth;
    task->n_losses = truth->n_losses;
    task->generation = kv_session_generation(handle->session) + handle->n_lifecycles;
    task->is_fragile = truth->is_fragile;
    task->was_contended = handle->n_tasks > 0; /* it may have to wait for them */
    truth->n_tasks++;
    handle->n_tasks++;
}

/* The layers and heads of a box; what it covers of the session's units. */
static void pick_units(struct world *world, const kv_schema_t *schema, struct kv_rows *box)
{
    uint32_t heads = UINT32_MAX;

    box->layer_begin = 0;
    box->n_layers = schema->n_layers;
    box->kv_head_begin = box->n_kv_heads = 0;
    if (!one_in(world, 4))
        return;
    box->layer_begin = (uint32_t)below(world, schema->n_layers);
    box->n_layers = 1 + (uint32_t)below(world, schema->n_layers - box->layer_begin);
    if (one_in(world, 2))
        return;
    for (uint32_t i = 0; i < box->n_layers; i++)
        if (schema->layers[box->layer_begin + i].n_kv_heads < heads)
            heads = schema->layers[box->layer_begin + i].n_kv_heads;
    box->kv_head_begin = (uint32_t)below(world, heads);
    box->n_kv_heads = 1 + (uint32_t)below(world, heads - box->kv_head_begin);
}

/* Calls `each` for every row of the box, in the order of the memory.  false: it said so. */
struct row_at {
    uint32_t layer, head, token, unit;
    uint8_t *bytes;
    size_t row_bytes;
    uint32_t *crc;
};

typedef bool (*row_fn)(struct world *world, struct task *task, const struct row_at *row);

static bool each_row(struct world *world, struct task *task, row_fn each)
{
    const kv_schema_t *schema = &task->truth->schema;
    const struct kv_rows *box = &task->box;
    struct row_at row = {
        .bytes = task->slot != NULL ? task->slot->memory + task->slot->begin : NULL,
        .crc = task->crcs,
    };

    for (row.layer = box->layer_begin; row.layer < box->layer_begin + box->n_layers;
         row.layer++) {
        uint32_t end = box->n_kv_heads > 0 ? box->kv_head_begin + box->n_kv_heads
                                           : schema->layers[row.layer].n_kv_heads;

        row.row_bytes = schema->layers[row.layer].row_bytes;
        for (row.head = box->kv_head_begin; row.head < end; row.head++) {
            row.unit = kv_schema_unit(schema, row.layer, row.head);
            for (uint32_t i = 0; i < box->n_tokens; i++) {
                row.token = box->token_begin + i;
                if (!each(world, task, &row))
                    return false;
                if (row.bytes != NULL)
                    row.bytes += row.row_bytes;
                if (row.crc != NULL)
                    row.crc++;
            }
        }
    }
    return true;
}

static uint64_t oldest_task(const struct world *world)
{
    uint64_t oldest = world->at;

    for (unsigned i = 0; i < N_CLIENTS; i++)
        for (unsigned j = 0; j < TASKS_MAX; j++)
            if (world->clients[i].tasks[j].is_used && world->clients[i].tasks[j].since < oldest)
                oldest = world->clients[i].tasks[j].since;
    return oldest;
}

/* ---- prompts ----------------------------------------------------------------------------- */

/* A few beginnings, which go on in a few ways. */
static void make_prompts(struct world *world)
{
    for (uint32_t i = 0; i < N_PROMPTS; i++) {
        const uint32_t *other = world->turns[below(world, i + 1)];
        const uint32_t n_common = i < N_ROOTS ? 0 : 1 + (uint32_t)below(world, 5);

        for (uint32_t block = 0; block < TRUTH_BLOCKS_MAX; block++)
            world->turns[i][block] = block < n_common ? other[block] : i;
    }
}

static void name_prompt(struct world *world,
                        const struct client *client,
                        uint32_t model,
                        uint32_t prompt,
                        struct kv_id128 names[TRUTH_BLOCKS_MAX])
{
    uint32_t tokens[TRUTH_BLOCKS_MAX * KV_BLOCK_TOKENS];

    for (uint32_t i = 0; i < TRUTH_BLOCKS_MAX * KV_BLOCK_TOKENS; i++)
        tokens[i] = world->turns[prompt][i / KV_BLOCK_TOKENS] * 1000 + i % 10;
    kv_prompt_names(client->client, &world->models[world->has_same_names ? 0 : model], tokens,
                    TRUTH_BLOCKS_MAX * KV_BLOCK_TOKENS, NULL, 0, names);
}

static struct published_by names_of(const struct truth *truth)
{
    return (struct published_by){.tenant = truth->tenant, .model = truth->model};
}

/* Another prompt from that block on, if no name of the one until now may come to be known. */
static void go_on_otherwise(struct world *world,
                            const struct client *client,
                            struct truth *truth,
                            uint32_t block)
{
    const uint32_t prompt = (uint32_t)below(world, N_PROMPTS);
    struct kv_id128 names[TRUTH_BLOCKS_MAX];

    if (!truth->has_prompt || block == 0 || truth->n_publishing > 0 || truth->doubted_end > 0 ||
        truth->n_named > block || truth->tenant != client->tenant)
        return;
    name_prompt(world, client, truth->model, prompt, names);
    if (memcmp(&names[block - 1], &truth->names[block - 1], sizeof(names[0])) == 0)
        memcpy(truth->names, names, sizeof(names));
}

/* Whether the row's contents may be published as they come. */
static bool is_published(const struct truth *truth, uint32_t token)
{
    const uint32_t block = token / KV_BLOCK_TOKENS;

    return block < truth->publishing_end || block < truth->doubted_end;
}

static bool row_is_open(struct world *world, struct task *task, const struct row_at *row)
{
    const struct truth *truth = task->truth;
    const struct published_by by = names_of(truth);

    return truth->rows[row->unit][row->token].n_candidates < TRUTH_CANDIDATES_MAX &&
           (!is_published(truth, row->token) ||
            published_row_has_room(world->published, &by,
                                   &truth->names[row->token / KV_BLOCK_TOKENS], row->unit,
                                   row->token % KV_BLOCK_TOKENS));
}

/* What the row may have may be published. */
static void publish_row(
    struct world *world, struct truth *truth, uint32_t unit, uint32_t token, uint32_t content)
{
    const struct published_by by = names_of(truth);

    if (!published_row_may(world->published, &by, &truth->names[token / KV_BLOCK_TOKENS], unit,
                           token % KV_BLOCK_TOKENS, content))
        complain(world, NULL, "the model has no room for what is published");
}

/* Nothing is at work that loses what was published: what is asked for must be there. */
static bool is_quiet(const struct world *world)
{
    return (world->options.faults &
            ~(unsigned)(WORLD_DOUBLES | WORLD_LARGE_DOUBLES | WORLD_SLOW_DISKS |
                        WORLD_EVICTIONS | WORLD_SWAPS | WORLD_SAVING)) == 0 &&
           world->n_nodes <= KV_ROW_NODES && world->tenant_quota == 0;
}

/* Whether nobody has asked to evict what the tenant has, since the task began. */
static bool is_undoubted(const struct world *world, const struct task *task)
{
    const struct tenant *tenant = &world->tenants[task->by.tenant];

    return tenant->n_doubts == task->n_doubts && tenant->n_evicting == 0 &&
           (tenant->doubted_us == 0 ||
            world->clock.virtual_us - tenant->doubted_us > STRAGGLER_US);
}

/* Chooses what a put writes: what may be there already, or something new. */
static bool row_write(struct world *world, struct task *task, const struct row_at *row)
{
    unsigned n_choices;
    uint32_t content = truth_row_known(task->truth, row->unit, row->token,
                                       (unsigned)below(world, 8), &n_choices);

    if (n_choices > 1)
        task->is_sure = false;
    if (task->tokens > 0 || content == 0) { /* `tokens`: a put on purpose of something else */
        if (content != 0)
            task->is_sure = false;
        content = world->n_contents;
    }
    truth_row_fill(row->bytes, row->row_bytes, content, row->layer, row->head, row->token);
    if (!truth_row_may(task->truth, row->unit, row->token, content, task->generation,
                       oldest_task(world)))
        complain(world, NULL, "the model has no room for a row's contents");
    if (is_published(task->truth, row->token))
        publish_row(world, task->truth, row->unit, row->token, content);
    if (row->crc != NULL)
        *row->crc = kv_row_crc(task->handle->session, row->bytes, row->row_bytes, row->layer,
                               row->head, row->token);
    return true;
}

static bool row_no_gap(struct world *world, struct task *task, const struct row_at *row)
{
    (void)world;
    return row->token > task->box.token_begin ||
           truth_unit_least(task->truth, row->unit) >= row->token;
}

/* Others that write the same session may fail, and then what waits for them, too. */
static bool is_written(const struct world *world, const struct truth *truth)
{
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        for (unsigned j = 0; j < TASKS_MAX; j++) {
            const struct task *task = &world->clients[i].tasks[j];

            if (task->is_used && task->truth == truth &&
                (task->kind == TASK_PUT || task->kind == TASK_APPEND) && task->op != NULL)
                return true;
        }
    }
    return false;
}

static void contend(struct world *world, const struct truth *truth)
{
    for (unsigned i = 0; i < N_CLIENTS; i++)
        for (unsigned j = 0; j < TASKS_MAX; j++)
            if (world->clients[i].tasks[j].is_used && world->clients[i].tasks[j].truth == truth)
                world->clients[i].tasks[j].was_contended = true;
}

static uint32_t pick_length(struct world *world)
{
    switch (below(world, 6)) {
    case 0:
        return 1;
    case 4: /* a prompt with a chapter or more */
        return 1000 + (uint32_t)below(world, 500);
    case 1:
        return 1 + (uint32_t)below(world, 16);
    case 2:
        return KV_BLOCK_TOKENS;
    case 3:
        return 1 + (uint32_t)below(world, 100);
    default:
        return 100 + (uint32_t)below(world, 200);
    }
}

static kv_status_t begin_put(struct world *world, struct client *client, struct task *task)
{
    struct truth *truth = task->truth;
    struct kv_session *session = task->handle->session;
    uint32_t begin, tokens = pick_length(world);
    struct kv_rows_io io = {0};
    size_t bytes;

    pick_units(world, &truth->schema, &task->box);
    begin = truth->tokens_max;
    for (uint32_t layer = task->box.layer_begin;
         layer < task->box.layer_begin + task->box.n_layers; layer++) {
        uint32_t end = task->box.n_kv_heads > 0 ? task->box.kv_head_begin + task->box.n_kv_heads
                                                : truth->schema.layers[layer].n_kv_heads;
        for (uint32_t head = task->box.kv_head_begin; head < end; head++) {
            uint32_t least =
                truth_unit_least(truth, kv_schema_unit(&truth->schema, layer, head));
            begin = least < begin ? least : begin;
        }
    }
    if (one_in(world, 8) && begin > 0)
        begin -= (uint32_t)below(world, begin < 50 ? begin : 50);
    else if (one_in(world, 4))
        begin += (uint32_t)below(world, 100); /* behind what is under way, if it is */
    if (begin >= truth->tokens_max)
        return KV_CANCELLED;
    if (begin == 0 && one_in(world, 3)) /* a prompt with a chapter, or two */
        tokens = (one_in(world, 3) ? 2048 : 1024) + (uint32_t)below(world, 250);
    if (tokens > truth->tokens_max - begin)
        tokens = truth->tokens_max - begin;
    if (task->kind == TASK_APPEND && tokens > 8)
        tokens = 1 + tokens % 8;
    task->box.token_begin = begin;
    task->box.n_tokens = tokens;
    if (!each_row(world, task, row_is_open))
        return KV_CANCELLED;
    bytes = kv_rows_bytes(&truth->schema, &task->box);
    task->slot = slot_take(world, client, bytes);
    if (task->slot == NULL)
        return KV_CANCELLED;
    /* A truncate under way may change whose rows these are. */
    if (one_in(world, 2) && task->handle->n_lifecycles == 0)
        task->crcs = failing_memory_sure(bytes / 8, sizeof(uint32_t));
    task->was_contended |= is_written(world, truth);
    contend(world, truth);
    task->has_gap = !each_row(world, task, row_no_gap);
    task->is_sure = !task->has_gap;
    task->tokens = one_in(world, 40);
    world->n_contents++;
    each_row(world, task, row_write);
    io = (struct kv_rows_io){
        .buffer = task->slot->buffer, .offset = task->slot->begin, .crcs = task->crcs};
    return (task->kind == TASK_PUT ? kv_put_begin : kv_append_begin)(
        session, &task->box, &io, task->deadline_ms, &task->op);
}

static bool row_is_sure(struct world *world, struct task *task, const struct row_at *row)
{
    (void)world;
    return task->truth->rows[row->unit][row->token].must;
}

static kv_status_t begin_read(struct world *world, struct client *client, struct task *task)
{
    struct truth *truth = task->truth;
    uint32_t most = truth_least(truth) + (one_in(world, 6) ? 20 : 0);
    size_t bytes;

    if (most > truth->tokens_max)
        most = truth->tokens_max;
    if (most == 0)
        return KV_CANCELLED;
    pick_units(world, &truth->schema, &task->box);
    task->box.token_begin = (uint32_t)below(world, most);
    if (one_in(world, 3))
        task->box.token_begin -= task->box.token_begin % KV_BLOCK_TOKENS;
    task->box.n_tokens = 1 + (uint32_t)below(world, most - task->box.token_begin);
    bytes = kv_rows_bytes(&truth->schema, &task->box);
    task->slot = slot_take(world, client, bytes);
    if (task->slot == NULL)
        return KV_CANCELLED;
    if (one_in(world, 2))
        task->crcs = failing_memory_sure(bytes / 8, sizeof(uint32_t));
    task->is_sure = each_row(world, task, row_is_sure);

    struct kv_rows_io io = {
        .buffer = task->slot->buffer, .offset = task->slot->begin, .crcs = task->crcs};
    return kv_read_begin(task->handle->session, &task->box, &io, task->deadline_ms, &task->op);
}

/* Every head that is named must have all tokens up to the greatest id of any: a node waits for
 * them (kv_fetch.snapshot). */
static bool fetch_is_sure(const struct task *task)
{
    const uint32_t *id = task->ids;
    uint32_t n_needed = 0;

    for (uint32_t i = 0, n = 0; i < task->n_heads; i++)
        for (uint32_t j = 0; j < task->n_ids[i]; j++, n++)
            if (task->ids[n] >= n_needed)
                n_needed = task->ids[n] + 1;
    for (uint32_t i = 0; i < task->n_heads; i++) {
        uint32_t unit =
            kv_schema_unit(&task->truth->schema, task->layer, task->box.kv_head_begin + i);

        if (task->n_ids[i] > 0 && truth_unit_least(task->truth, unit) < n_needed)
            return false;
        for (uint32_t j = 0; j < task->n_ids[i]; j++)
            if (!task->truth->rows[unit][*id++].must)
                return false;
    }
    return true;
}

static kv_status_t begin_fetch(struct world *world, struct client *client, struct task *task)
{
    struct truth *truth = task->truth;
    uint32_t most = truth_least(truth) + (one_in(world, 6) ? 10 : 0);
    uint32_t heads, n_ids = 0, each_most;
    struct kv_fetch fetch;

    if (most > truth->tokens_max)
        most = truth->tokens_max;
    if (most == 0)
        return KV_CANCELLED;
    task->layer = (uint32_t)below(world, truth->schema.n_layers);
    heads = truth->schema.layers[task->layer].n_kv_heads;
    task->box.kv_head_begin = one_in(world, 2) ? 0 : (uint32_t)below(world, heads);
    task->n_heads = 1 + (uint32_t)below(world, heads - task->box.kv_head_begin);
    each_most = one_in(world, 3) ? IDS_MAX / task->n_heads : 12;
    for (uint32_t i = 0; i < task->n_heads; i++) {
        task->n_ids[i] = (uint32_t)below(world, each_most + 1);
        for (uint32_t j = 0; j < task->n_ids[i]; j++)
            task->ids[n_ids++] = (uint32_t)below(world, most);
    }
    task->slot =
        slot_take(world, client, (size_t)n_ids * truth->schema.layers[task->layer].row_bytes);
    if (task->slot == NULL)
        return KV_CANCELLED;
    if (one_in(world, 2))
        task->crcs = failing_memory_sure(n_ids + 1, sizeof(uint32_t));
    task->is_sure = fetch_is_sure(task);
    fetch = (struct kv_fetch){
        .layer = task->layer,
        .kv_head_begin = task->box.kv_head_begin,
        .n_kv_heads = task->n_heads,
        .n_ids = task->n_ids,
        .ids = task->ids,
    };
    struct kv_rows_io io = {
        .buffer = task->slot->buffer, .offset = task->slot->begin, .crcs = task->crcs};
    return kv_fetch_begin(task->handle->session, &fetch, &io, task->deadline_ms, &task->op);
}

static kv_status_t begin_index(struct world *world, struct task *task)
{
    struct truth *truth = task->truth;

    if (!question_index(&task->index, truth, &world->random))
        return KV_CANCELLED;
    task->is_sure = question_index_is_sure(&task->index, truth);
    task->is_first = truth->n_indexes++ == 0;
    return kv_index_begin(task->handle->session, &task->index, task->deadline_ms, &task->op);
}

static kv_status_t begin_query(struct world *world, struct client *client, struct task *task)
{
    const struct kv_query *like =
        client->first != NULL ? &client->first->question->query : NULL;
    struct kv_rows_io io = {0};
    size_t bytes;

    task->question = failing_memory_sure(1, sizeof(*task->question));
    if (!question_make(task->question, task->truth, task->handle->session, like,
                       &world->random))
        return KV_CANCELLED;
    task->is_sure = task->question->is_sure;
    bytes = kv_query_rows_bytes_max(&task->truth->schema, &task->question->query);
    if (bytes > 0) {
        task->slot = slot_take(world, client, bytes);
        if (task->slot == NULL)
            return KV_CANCELLED;
        io = (struct kv_rows_io){.buffer = task->slot->buffer, .offset = task->slot->begin};
    }
    return kv_query_begin(task->handle->session, &task->question->query, &io, task->deadline_ms,
                          &task->op);
}

static size_t object_bytes(uint32_t content)
{
    uint64_t mixed = kv_mix64(content);

    switch (mixed % 5) {
    case 0:
        return 0;
    case 1:
        return 4 + mixed / 8 % 1000;
    case 2:
        return 4 + mixed / 8 % 100000;
    case 3:
        return (1 << 20) + (mixed & 1);
    default:
        return 4 + mixed / 8 % (1300 << 10);
    }
}

static kv_status_t begin_objects(struct world *world, struct client *client, struct task *task)
{
    size_t bytes[BATCH_MAX], sum = 0;

    task->verb = (enum kv_object_verb)below(world, 4);
    if (one_in(world, 2))
        task->verb = KV_OBJECT_GET;
    task->n_objects = 1 + (unsigned)below(world, BATCH_MAX);
    for (unsigned i = 0; i < task->n_objects; i++) {
        /* Names of one operation differ. */
        task->names[i] = i == 0
                             ? (uint32_t)below(world, N_NAMES)
                             : (task->names[i - 1] + 1 + (uint32_t)below(world, 5)) % N_NAMES;
        for (unsigned j = 0; j < i; j++)
            if (task->names[j] == task->names[i])
                task->names[i] = (task->names[i] + 1) % N_NAMES;
    }
    for (unsigned i = 0; i < task->n_objects; i++) {
        struct name *name;
        char *text = failing_memory_sure(1, sizeof(name->text));

        task->names[i] += client->tenant * N_NAMES;
        name = &world->names[task->names[i]];
        memcpy(text, name->text, sizeof(name->text));
        task->objects[i] = (struct kv_object){.name = text};
        bytes[i] = 1400 << 10;
        if (task->verb == KV_OBJECT_PUT) {
            task->contents[i] =
                name->n_contents > 0 ? name->contents[below(world, name->n_contents)] : 0;
            if (name->n_contents < CONTENTS_MAX &&
                (name->n_contents == 0 || one_in(world, 3))) {
                task->contents[i] = ++world->n_contents;
                name->contents[name->n_contents++] = task->contents[i];
            }
            bytes[i] = object_bytes(task->contents[i]);
        }
        sum += bytes[i];
    }
    task->slot = slot_take(world, client, sum);
    if (task->slot == NULL)
        return KV_CANCELLED;
    sum = task->slot->begin;
    for (unsigned i = 0; i < task->n_objects; i++) {
        struct name *name = &world->names[task->names[i]];

        task->objects[i].buffer = task->slot->buffer;
        task->objects[i].offset = sum;
        task->objects[i].bytes = bytes[i];
        /* It may go by itself: what was put to stay before stays nevertheless. */
        task->may_go[i] = task->verb == KV_OBJECT_PUT && one_in(world, 4);
        if (task->may_go[i] && one_in(world, 2))
            task->objects[i].evictable = true;
        else if (task->may_go[i])
            task->objects[i].ttl_ms = 1 + (uint32_t)below(world, 3000);
        if (task->verb == KV_OBJECT_PUT && bytes[i] > 0)
            truth_row_fill(task->slot->memory + sum, bytes[i], task->contents[i], 0, 0,
                           task->names[i]);
        if (task->verb == KV_OBJECT_DELETE) {
            name->n_deletes++;
            name->n_losses++;
        } else if (task->verb == KV_OBJECT_PUT) {
            name->n_puts++;
            name->n_changes++;
            name->is_gone = false;
            for (unsigned j = 0; j < name->n_contents; j++)
                if (name->contents[j] == task->contents[i])
                    name->may_be |= UINT32_C(1) << j;
        }
        task->was_gone[i] = name->is_gone;
        task->may_be[i] = name->may_be;
        task->n_changes[i] = name->n_changes;
        /* What it must find, and how often that was doubted. */
        task->n_ids[i] = name->sure;
        if (task->verb == KV_OBJECT_DELETE)
            name->sure = 0;
        task->ids[i] = (uint32_t)name->n_losses;
        sum += bytes[i];
    }
    return kv_objects_begin(client->client, task->verb, task->objects, task->n_objects,
                            task->deadline_ms, &task->op);
}

static kv_status_t begin_lifecycle(struct world *world, struct task *task)
{
    struct truth *truth = task->truth;
    uint32_t least = truth_least(truth);
    kv_status_t status;

    task->tokens = (uint32_t)below(world, least + 1);
    if (one_in(world, 3))
        task->tokens -= task->tokens % KV_BLOCK_TOKENS;
    if (task->kind == TASK_TRUNCATE && !one_in(world, 4) && least < 200)
        return KV_CANCELLED;
    if (one_in(world, 30) && least + 20 < truth->tokens_max)
        task->tokens = least + 1 + (uint32_t)below(world, 19);
    if (task->kind == TASK_FORK) {
        task->is_sure = task->tokens <= least;
        task->n_named = truth->n_named;
        truth->n_indexes += 2; /* the child's are its parent's, too */
        status =
            kv_fork_begin(task->handle->session, task->tokens, task->deadline_ms, &task->op);
    } else {
        truth_cut_begin(truth, task->number, task->tokens, task->generation);
        if (truth->n_named > task->tokens / KV_BLOCK_TOKENS)
            truth->n_named = task->tokens / KV_BLOCK_TOKENS;
        if (truth->n_shared > truth->n_named)
            truth->n_shared = truth->n_named;
        task->is_sure = true;
        status = kv_truncate_begin(task->handle->session, task->tokens, task->deadline_ms,
                                   &task->op);
    }
    if (status == KV_OK)
        task->handle->n_lifecycles++;
    return status;
}

/* The first blocks of a prompt. */
static void
name_blocks(struct world *world, const struct client *client, struct task *task, uint32_t model)
{
    task->by = (struct published_by){.tenant = client->tenant, .model = model};
    task->n_doubts = world->tenants[client->tenant].n_doubts;
    task->n_block_names = (uint32_t)below(world, one_in(world, 2) ? 6 : TRUTH_BLOCKS_MAX + 1);
    name_prompt(world, client, model, (uint32_t)below(world, N_PROMPTS), task->block_names);
}

static kv_status_t begin_open(struct world *world, struct client *client, struct task *task)
{
    const uint32_t number = (uint32_t)below(world, N_MODELS);
    const struct kv_model_info *model = &world->models[number];
    struct kv_session_options options = {
        .lease_ms = one_in(world, 5) ? LEASE_SHORT_MS : 0,
        .tokens_max = one_in(world, 2) ? TRUTH_TOKENS_MAX : 0,
        .block_names = task->block_names,
        .match_blocks_max = one_in(world, 8) ? (uint32_t)below(world, 4) : 0,
        .is_fresh = one_in(world, 12),
    };
    struct truth *truth;

    name_blocks(world, client, task, number);
    options.n_block_names = task->n_block_names;
    task->blocks_most = options.is_fresh ? 0 : task->n_block_names;
    if (options.match_blocks_max != 0 && task->blocks_most > options.match_blocks_max)
        task->blocks_most = options.match_blocks_max;
    if (is_quiet(world))
        task->blocks_sure =
            published_sure(world->published, &task->by, task->block_names, task->blocks_most);
    truth = truth_new(world, &model->schema);
    truth->tenant = client->tenant;
    truth->model = number;
    truth->has_prompt = task->n_block_names > 0;
    memcpy(truth->names, task->block_names, sizeof(truth->names));
    task->truth = truth;
    truth->n_tasks++;
    truth->is_fragile = options.lease_ms != 0;
    return kv_open_begin(client->client, model, &options, task->deadline_ms, &task->op);
}

/* Whether all that the row may have can be published. */
static bool
row_fits(const struct world *world, const struct truth *truth, uint32_t unit, uint32_t token)
{
    const struct published_by by = names_of(truth);
    const struct kv_id128 *name = &truth->names[token / KV_BLOCK_TOKENS];
    const struct truth_row *row = &truth->rows[unit][token];
    const struct published_row *known =
        published_row(world->published, &by, name, unit, token % KV_BLOCK_TOKENS);
    uint32_t n = known != NULL ? known->n : 0;

    for (unsigned i = 0; i < row->n_candidates; i++) {
        bool is_new = row->candidates[i].gone_at == 0;

        for (uint32_t j = 0; is_new && known != NULL && j < known->n; j++)
            is_new = known->contents[j] != row->candidates[i].content;
        n += is_new;
    }
    return n <= PUBLISHED_CONTENTS_MAX;
}

/* What the session has of its prompt, mostly as far as it has it. */
static kv_status_t begin_publish(struct world *world, struct task *task)
{
    struct truth *truth = task->truth;
    const uint32_t n_here = truth_least(truth) / KV_BLOCK_TOKENS;
    struct kv_publish publish = {0};
    uint32_t tokens[TOKENS_BLOCKS_MAX * KV_BLOCK_TOKENS] = {0};
    kv_status_t status;

    task->by = names_of(truth);
    task->n_doubts = world->tenants[truth->tenant].n_doubts;
    task->blocks_most =
        one_in(world, 3) ? 1 + (uint32_t)below(world, TRUTH_BLOCKS_MAX) : n_here;
    if (one_in(world, 4))
        publish.first_block = (uint32_t)below(world, truth->n_named + 1);
    if (!truth->has_prompt || task->blocks_most <= publish.first_block)
        return KV_CANCELLED;
    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++)
        for (uint32_t token = 0; token < task->blocks_most * KV_BLOCK_TOKENS; token++)
            if (!row_fits(world, truth, unit, token))
                return KV_CANCELLED;
    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++)
        for (uint32_t token = 0; token < task->blocks_most * KV_BLOCK_TOKENS; token++)
            for (unsigned i = 0; i < truth->rows[unit][token].n_candidates; i++)
                if (truth->rows[unit][token].candidates[i].gone_at == 0)
                    publish_row(world, truth, unit, token,
                                truth->rows[unit][token].candidates[i].content);
    if (is_quiet(world) && !world->has_same_names)
        task->blocks_sure = n_here < task->blocks_most ? n_here : task->blocks_most;
    task->is_sure = true;
    publish.n_names = task->blocks_most - publish.first_block;
    publish.names = truth->names + publish.first_block;
    /* As many as go into a small message: this world's port of control takes no others. */
    publish.tokens = publish.n_names <= TOKENS_BLOCKS_MAX && one_in(world, 2) ? tokens : NULL;
    task->tokens = publish.first_block * KV_BLOCK_TOKENS;
    status = kv_publish_begin(task->handle->session, &publish, task->deadline_ms, &task->op);
    if (status != KV_OK)
        return status;
    truth->n_publishing++;
    truth->n_indexes += 2; /* who is opened with its blocks may ask for their codes */
    if (truth->publishing_end < task->blocks_most)
        truth->publishing_end = task->blocks_most;
    return KV_OK;
}

static kv_status_t begin_save(struct world *world, struct task *task)
{
    const struct truth *truth = task->truth;

    task->by = names_of(truth);
    task->n_doubts = world->tenants[truth->tenant].n_doubts;
    task->is_sure = true;
    if (is_quiet(world) && truth->has_prompt)
        task->blocks_sure =
            published_sure(world->published, &task->by, truth->names, truth->n_shared);
    return kv_save_begin(task->handle->session, task->deadline_ms, &task->op);
}

static bool is_connected(const struct kv_client *client)
{
    for (uint32_t i = 0; i < client->n_nodes; i++)
        if (client->nodes[i].state != KVC_NODE_CONNECTED)
            return false;
    return true;
}

static kv_status_t begin_match(struct world *world, struct client *client, struct task *task)
{
    name_blocks(world, client, task, (uint32_t)below(world, N_MODELS));
    if (task->n_block_names == 0)
        return KV_CANCELLED;
    task->is_sure = true;
    /* A node that has no units of a model keeps nothing of it, and cannot tell that it need not. */
    if (is_quiet(world) && is_connected(client->client) &&
        world->models[task->by.model].schema.n_units >= world->n_nodes)
        task->blocks_sure =
            published_sure(world->published, &task->by, task->block_names, task->n_block_names);
    return kv_match_begin(client->client, task->block_names, task->n_block_names,
                          task->deadline_ms, &task->op);
}

/* Pins, unpins, hints, evicts: mostly by name, else what a session has. */
static kv_status_t begin_prefix(struct world *world, struct client *client, struct task *task)
{
    static const enum kv_prefix_verb verbs[] = {KV_PREFIX_PIN, KV_PREFIX_PIN, KV_PREFIX_UNPIN,
                                                KV_PREFIX_HINT, KV_PREFIX_EVICT};
    const struct handle *handle = handle_pick(world, client);
    struct kv_prefix prefix = {.verb = verbs[below(world, 5)]};
    kv_status_t status;

    name_blocks(world, client, task, (uint32_t)below(world, N_MODELS));
    if (task->n_block_names == 0)
        return KV_CANCELLED;
    prefix.name = &task->block_names[task->n_block_names - 1];
    if (handle != NULL && one_in(world, 3)) {
        prefix.session_id = &handle->truth->ticket.session_id;
        if (one_in(world, 2)) {
            prefix.name = NULL;
            task->n_block_names = 0;
        }
    }
    if (prefix.verb == KV_PREFIX_HINT || one_in(world, 2))
        prefix.for_ms = (uint32_t)below(world, 5000);
    task->prefix_verb = prefix.verb;
    task->is_sure = true;
    status = kv_prefix_begin(client->client,
                             one_in(world, 4) ? (uint32_t)below(world, world->n_nodes)
                                              : KV_NODES_ALL,
                             &prefix, task->deadline_ms, &task->op);
    if (status == KV_OK && prefix.verb == KV_PREFIX_EVICT) {
        world->tenants[client->tenant].n_evicting++;
        doubt(world, client->tenant);
    }
    return status;
}

static kv_status_t begin_resume(struct world *world, struct client *client, struct task *task)
{
    struct truth *truths[TRUTHS_MAX * 4];
    unsigned n = 0;

    for (struct truth *truth = world->truths; truth != NULL && n < TRUTHS_MAX * 4;
         truth = truth->next)
        if (truth->ticket.token.bytes[0] != 0 || truth->ticket.token.bytes[1] != 0)
            truths[n++] = truth;
    if (n == 0)
        return KV_CANCELLED;
    task->truth = truths[below(world, n)];
    if (task->truth->tenant != client->tenant && !one_in(world, 4)) {
        task->truth = NULL;
        return KV_CANCELLED;
    }
    task->is_foreign = task->truth->tenant != client->tenant;
    task->truth->n_tasks++;
    if (task->truth->n_handles == 0 &&
        (task->truth->is_fragile ||
         world->clock.virtual_us - task->truth->idle_us > LEASE_MS * 500ull)) {
        task->truth->is_fragile = true;
        truth_all_unsure(task->truth);
    }
    /* Whoever has it now may change it before the resume ends, and be gone then. */
    task->truth->was_shared = task->truth->was_shared || task->truth->n_handles > 0;
    task->is_fragile = task->truth->is_fragile;
    task->n_losses = task->truth->n_losses;
    task->tokens = truth_least(task->truth);
    return kv_resume_begin(client->client, &task->truth->ticket, task->deadline_ms, &task->op);
}

static enum task_kind pick_kind(struct world *world)
{
    static const uint8_t shares[TASK_KINDS] = {
        [TASK_OPEN] = 6,   [TASK_RESUME] = 4,  [TASK_FORK] = 4,  [TASK_TRUNCATE] = 5,
        [TASK_CLOSE] = 4,  [TASK_LENGTH] = 2,  [TASK_RENEW] = 1, [TASK_PUT] = 16,
        [TASK_APPEND] = 8, [TASK_READ] = 10,   [TASK_FETCH] = 6, [TASK_INDEX] = 6,
        [TASK_QUERY] = 13, [TASK_OBJECTS] = 4, [TASK_MATCH] = 2, [TASK_PUBLISH] = 5,
        [TASK_PREFIX] = 2, [TASK_PING] = 1,    [TASK_TABLE] = 1,
    };
    uint64_t pick = below(world, 100);

    for (unsigned kind = 0; kind < TASK_KINDS; kind++) {
        if (pick < shares[kind])
            return (enum task_kind)kind;
        pick -= shares[kind];
    }
    return TASK_READ;
}

static kv_status_t begin(struct world *world, struct client *client, struct task *task)
{
    static const char *const tables[] = {"status", "sessions", "clients", "ops",   "stats",
                                         "models", "prefixes", "tenants", "reuse", "tiers"};

    switch (task->kind) {
    case TASK_OPEN:
        return begin_open(world, client, task);
    case TASK_RESUME:
        return begin_resume(world, client, task);
    case TASK_FORK:
    case TASK_TRUNCATE:
        return begin_lifecycle(world, task);
    case TASK_CLOSE:
        task->truth->is_closing = true;
        truth_all_unsure(task->truth);
        task->handle->is_closing = true;
        return kv_close_begin(task->handle->session, task->deadline_ms, &task->op);
    case TASK_LENGTH:
        task->tokens = truth_least(task->truth);
        return kv_length_begin(task->handle->session, task->deadline_ms, &task->op);
    case TASK_RENEW:
        return kv_renew_begin(task->handle->session, 0, task->deadline_ms, &task->op);
    case TASK_PUT:
    case TASK_APPEND:
        return begin_put(world, client, task);
    case TASK_READ:
        return begin_read(world, client, task);
    case TASK_FETCH:
        return begin_fetch(world, client, task);
    case TASK_INDEX:
        return begin_index(world, task);
    case TASK_PUBLISH:
        return begin_publish(world, task);
    case TASK_SAVE:
        return begin_save(world, task);
    case TASK_MATCH:
        return begin_match(world, client, task);
    case TASK_PREFIX:
        return begin_prefix(world, client, task);
    case TASK_QUERY:
        return begin_query(world, client, task);
    case TASK_OBJECTS:
        return begin_objects(world, client, task);
    case TASK_PING:
        return kv_ping_begin(client->client, (uint32_t)below(world, world->n_nodes), 0,
                             (uint32_t)below(world, 100000), (uint32_t)below(world, 100000),
                             task->deadline_ms, &task->op);
    case TASK_VERIFY:
        return kv_verify_begin(client->client, (uint32_t)below(world, world->n_nodes), 0,
                               task->deadline_ms, &task->op);
    case TASK_TABLE:
        return kv_table_begin(client->client, (uint32_t)below(world, world->n_nodes),
                              tables[below(world, 9)], task->deadline_ms, &task->op);
    case TASK_DRAIN:
        return kv_drain_begin(client->client, (uint32_t)below(world, world->n_nodes),
                              task->deadline_ms, &task->op);
    case TASK_KINDS:
        break;
    }
    return KV_INVALID;
}

/* Returns the task, or NULL if it could not begin. */
static struct task *task_begin(struct world *world, struct client *client, enum task_kind kind)
{
    struct handle *handle = NULL;
    struct task *task;
    kv_status_t status;

    if (kind == TASK_TABLE && one_in(world, 3))
        kind = TASK_VERIFY;
    if (kind == TASK_LENGTH && has(world, WORLD_SAVING))
        kind = TASK_SAVE;
    if (kind == TASK_OPEN && (world->n_truths >= TRUTHS_MAX || handle_room(client) == NULL))
        kind = TASK_CLOSE;
    if ((kind == TASK_RESUME || kind == TASK_FORK) &&
        (handle_room(client) == NULL || world->n_truths >= TRUTHS_MAX))
        kind = TASK_READ;
    if (kind >= TASK_FORK && kind <= TASK_QUERY) {
        handle = handle_pick(world, client);
        /* Mostly about rows that may have codes. */
        for (int i = 0; i < 3 && kind == TASK_QUERY && handle != NULL &&
                        (handle->truth->n_indexes == 0 || truth_least(handle->truth) < 500);
             i++)
            handle = handle_pick(world, client);
        if (client->first != NULL && !client->first->handle->is_closing && one_in(world, 2))
            handle = client->first->handle;
        if (handle == NULL)
            kind = TASK_OPEN;
    }
    task = task_new(world, client, kind);
    if (task == NULL)
        return NULL;
    task->number = ++world->n_tasks;
    if (handle != NULL)
        task_of(task, handle);
    enter(world);
    status = begin(world, client, task);
    leave();
    if (status == KV_OK) {
        world->result->n_ops++;
        client->n_begun++;
        say(world, "client %d: %llu: %s begins, session %llu, tokens %u: %u+%u, generation %u",
            (int)(client - world->clients), (unsigned long long)task->number, task_names[kind],
            task->truth != NULL ? (unsigned long long)task->truth->number : 0, task->tokens,
            task->box.token_begin, task->box.n_tokens, task->generation);
        return task;
    }
    for (unsigned i = 0; kind == TASK_OBJECTS && i < task->n_objects; i++)
        if (task->verb == KV_OBJECT_DELETE && task->slot != NULL)
            world->names[task->names[i]].n_deletes--;
    if (status != KV_CANCELLED && status != KV_TOO_LARGE &&
        !(status == KV_INVALID && kind == TASK_FORK) &&
        !(status == KV_NO_MEMORY && has(world, WORLD_FAILING_ALLOCATIONS)))
        complain(world, NULL, "%s cannot begin: %s: %s", task_names[kind],
                 kv_status_name(status), kv_client_detail(client->client));
    if (task->slot != NULL)
        slot_give(world, task->slot);
    task_forget(task);
    return NULL;
}

struct query_batch {
    struct world *world;
    struct client *client;
};

static kv_status_t
begin_batched(struct kv_client *client, void *arg, size_t i, uint32_t deadline_ms)
{
    const struct query_batch *batch = arg;
    const struct task *task = task_begin(batch->world, batch->client, TASK_QUERY);

    (void)client;
    (void)i;
    (void)deadline_ms;
    if (batch->client->first == NULL && task != NULL && task->kind == TASK_QUERY)
        batch->client->first = task;
    return KV_OK;
}

/* Begins some queries in one call, mostly of the same layer and heads, and half of them of one
 * session. */
static void batch_begin(struct world *world, struct client *client)
{
    struct query_batch batch = {world, client};

    kvc_batch_begin(client->client, &batch, 2 + below(world, 5), 0, begin_batched);
    client->first = NULL;
}

/* ---- judging ----------------------------------------------------------------------------- */

static bool is_same_row(struct world *world, struct task *task, const struct row_at *row)
{
    uint32_t content =
        truth_row_content(row->bytes, row->row_bytes, row->layer, row->head, row->token);

    if (content == 0 ||
        !truth_row_allows(task->truth, row->unit, row->token, content, task->since)) {
        complain(world, task, "session %llu, layer %u, head %u, token %u: content %u was read",
                 (unsigned long long)task->truth->number, row->layer, row->head, row->token,
                 content);
        return false;
    }
    truth_row_seen(task->truth, row->unit, row->token, content, world->at);
    if (row->crc != NULL &&
        *row->crc != kv_row_crc(task->handle->session, row->bytes, row->row_bytes, row->layer,
                                row->head, row->token)) {
        complain(world, task, "a wrong CRC was handed out");
        return false;
    }
    return true;
}

static void check_fetched(struct world *world, struct task *task)
{
    const kv_schema_t *schema = &task->truth->schema;
    size_t row_bytes = schema->layers[task->layer].row_bytes;
    const uint32_t *id = task->ids;
    struct row_at row = {
        .layer = task->layer,
        .bytes = task->slot->memory + task->slot->begin,
        .row_bytes = row_bytes,
        .crc = task->crcs,
    };

    for (uint32_t i = 0; i < task->n_heads; i++) {
        row.head = task->box.kv_head_begin + i;
        row.unit = kv_schema_unit(schema, row.layer, row.head);
        for (uint32_t j = 0; j < task->n_ids[i]; j++) {
            row.token = *id++;
            if (!is_same_row(world, task, &row))
                return;
            row.bytes += row_bytes;
            if (row.crc != NULL)
                row.crc++;
        }
    }
}

static bool row_acknowledge(struct world *world, struct task *task, const struct row_at *row)
{
    uint32_t content =
        truth_row_content(row->bytes, row->row_bytes, row->layer, row->head, row->token);
    unsigned place = task->truth->node_of_unit[row->unit];
    bool must = task->truth->rows[row->unit][row->token].must;

    truth_row_put(task->truth, row->unit, row->token, content,
                  kv_session_generation(task->handle->session), world->at);
    /* The node that said so has died since. */
    if (world->nodes[place].n_deaths != task->n_deaths[place])
        task->truth->rows[row->unit][row->token].must = must;
    return true;
}

static bool row_undisputed(struct world *world, struct task *task, const struct row_at *row)
{
    uint32_t content =
        truth_row_content(row->bytes, row->row_bytes, row->layer, row->head, row->token);

    (void)world;
    return !truth_row_disputes(task->truth, row->unit, row->token, content, task->since) &&
           !truth_is_half_cut(task->truth, row->token);
}

/* Whether a node has died that its session is on. */
static bool has_died(const struct world *world, const struct task *task)
{
    for (unsigned i = 0; i < world->n_nodes; i++)
        if (world->nodes[i].n_deaths != task->n_deaths[i] &&
            (task->truth == NULL || truth_is_on(task->truth, i)))
            return true;
    return false;
}

static bool still_sure(const struct task *task)
{
    return task->is_sure && task->truth->n_losses == task->n_losses;
}

/* Operations that wait for rows may hold all credits of their class, to their deadlines:
 * another one gets none, or gets them too late for an answer.  Messages that are sent again do
 * not count: what had time to be answered must have been. */
static bool lacked_credits(const struct task *task)
{
    struct kv_op_times times;

    kv_op_get_times(task->op, &times);
    return strstr(kv_op_detail(task->op), "waiting for credits") != NULL ||
           times.ended_us - times.sent_us < CREDITS_LATE_US;
}

/* A node that drains refuses what is new: rows, objects, sessions (also one that it has missed,
 * and without which the session is not current there), clients.  It answers for what it has. */
static bool may_be_draining(const struct world *world, const struct task *task)
{
    const char *detail = kv_op_detail(task->op);

    if (world->n_drains <= task->n_drains)
        return false;
    if (strstr(detail, "hello: ") != NULL || strstr(detail, "cannot catch up: fork: ") != NULL)
        return true;
    return task->kind == TASK_OPEN || task->kind == TASK_FORK || task->kind == TASK_PUT ||
           task->kind == TASK_APPEND || task->kind == TASK_VERIFY ||
           /* The detail is that of the first object that failed. */
           (task->kind == TASK_OBJECTS &&
            (task->verb == KV_OBJECT_PUT || kv_op_status(task->op) != KV_DRAINING));
}

static bool has_small_disks(const struct world *world)
{
    return world->disk_bytes != 0 && world->disk_bytes != UINT64_MAX;
}

/* Whether an operation may end so at all, whatever the rows are. */
static bool may_end(const struct world *world, const struct task *task, kv_status_t status)
{
    const struct truth *truth = task->truth;
    const unsigned faults = world->options.faults;
    const unsigned outside =
        faults & ~(unsigned)(WORLD_EVICTIONS | WORLD_LOST_BLOCKS | WORLD_SAVING);

    switch (status) {
    case KV_CANCELLED:
        return task->was_cancelled;
    case KV_DEADLINE:
        return faults != 0 || task->deadline_ms < SHORT_DEADLINE_MS || !task->is_sure ||
               task->was_contended || lacked_credits(task);
    case KV_UNREACHABLE:
        return outside != 0;
    case KV_CORRUPT:
        return has(world, WORLD_CORRUPTION) || has_lost_blocks(world) ||
               has_doubted_crcs(task) ||
               /* What has gone bad in memory is not saved. */
               (task->kind == TASK_SAVE && has(world, WORLD_DAMAGE)) ||
               /* Two clients cut the session to the same generation: a node knows one's writer. */
               ((task->kind == TASK_PUT || task->kind == TASK_APPEND) && truth->was_shared &&
                truth->is_unclear);
    case KV_BUSY:
        return outside != 0;
    case KV_DRAINING:
        return may_be_draining(world, task);
    case KV_UNSUPPORTED:
        return task->kind == TASK_SAVE && world->disk_bytes == 0;
    case KV_NO_MEMORY:
        return has(world, WORLD_LITTLE_MEMORY | WORLD_FAILING_ALLOCATIONS | WORLD_BAD_DISKS) ||
               (task->kind == TASK_SAVE && has_small_disks(world));
    case KV_IO: /* a model cannot be saved */
        return has(world, WORLD_BAD_DISKS) ||
               (task->kind == TASK_SAVE &&
                strstr(kv_op_detail(task->op), "is not erased yet") != NULL);
    case KV_NOT_FOUND:
        return truth != NULL && (truth->is_closing || truth->lost_node || truth->is_fragile);
    case KV_CONFLICT: /* truncates of two clients, each of which reached a part of the nodes */
        return truth != NULL && task->kind == TASK_RESUME && truth->was_shared &&
               truth->is_unclear;
    case KV_DENIED: /* its place is another session's by now */
        return truth != NULL &&
               (task->is_foreign || truth->is_closing || truth->lost_node || truth->is_fragile);
    case KV_STALE:
        return truth != NULL && (truth->was_shared || truth->is_unclear || truth->is_closing ||
                                 truth->is_fragile);
    default:
        return false;
    }
}

static void end_put(struct world *world, struct task *task, kv_status_t status)
{
    world->has_doubted_crcs = world->has_doubted_crcs || has_doubted_crcs(task);
    if (status == KV_OK) {
        each_row(world, task, row_acknowledge);
    } else if (status == KV_CONFLICT) {
        /* A put that would mend lost rows cannot know that they were the same. */
        if (each_row(world, task, row_undisputed) && !has_lost_blocks(world))
            complain(world, task, "no other rows can be there");
    } else if (status == KV_NOT_READY) {
        if (!task->has_gap && !task->was_contended && task->truth->n_losses == task->n_losses &&
            world->options.faults == 0)
            complain(world, task, "all rows before are there");
        if (still_sure(task) && world->options.faults == 0 && !task->was_contended)
            complain(world, task, "all rows before are there");
    } else if (!may_end(world, task, status)) {
        complain(world, task, "not so");
    }
}

static void end_read(struct world *world, struct task *task, kv_status_t status)
{
    if (status == KV_OK) {
        if (task->truth->closed_at != 0 && task->truth->closed_at < task->since &&
            task->slot->end > task->slot->begin)
            complain(world, task, "the session was closed before");
        else if (task->kind == TASK_READ)
            each_row(world, task, is_same_row);
        else
            check_fetched(world, task);
    } else if (status == KV_NOT_READY) {
        if (still_sure(task) && !task->truth->is_fragile)
            complain(world, task, "session %llu: rows that were acknowledged are gone",
                     (unsigned long long)task->truth->number);
    } else if (!may_end(world, task, status)) {
        complain(world, task, "not so");
    }
}

/* Codes may take longer than there is time; and where they need not be waited for, rows that are on their
 * way back from a slow disk. */
static bool may_take_long(const struct world *world, const struct task *task)
{
    return task->index.wait
               ? world->options.faults != 0 || task->deadline_ms < SHORT_DEADLINE_MS
               : world->disk_bytes > 0 && has(world, WORLD_SLOW_DISKS | WORLD_BAD_DISKS);
}

static void end_retrieval(struct world *world, struct task *task, kv_status_t status)
{
    const struct truth *truth = task->truth;
    const bool is_index = task->kind == TASK_INDEX;
    const char *why = NULL;

    if (status == KV_OK && truth->closed_at != 0 && truth->closed_at < task->since) {
        complain(world, task, "the session was closed before");
    } else if (status == KV_OK && is_index) {
        /* Codes may also fail to come, where memory is short, and go with the rows. */
        bool is_first = task->is_first && truth->n_indexes == 1 &&
                        truth->n_losses == task->n_losses && !has(world, WORLD_LITTLE_MEMORY) &&
                        !has_died(world, task) && !has_lost_blocks(world);
        struct kv_index_result indexed;

        kv_op_index_result(task->op, &indexed);
        why = question_index_fault(&task->index, truth, is_first, &indexed);
    } else if (status == KV_OK) {
        struct kvs_node *nodes[WORLD_NODES_MAX];

        const bool are_here = has_all_blocks(world, &truth->ticket.token);

        for (unsigned i = 0; i < world->n_nodes; i++)
            nodes[i] = world->nodes[i].node;
        const bool has_same_codes =
            are_here && truth->n_losses == task->n_losses && !has_lost_blocks(world);
        task->question->may_lack_crcs = has_lost_blocks(world);
        task->question->may_be_damaged = world->result->n_damaged > 0;
        why = question_fault(task->question, truth, has_same_codes ? nodes : NULL,
                             task->handle->session, task->since, task->op);
    } else if (status == KV_NOT_READY) {
        if (still_sure(task) && !truth->is_fragile && !(is_index && may_take_long(world, task)))
            complain(world, task, "session %llu: all that it needs is there",
                     (unsigned long long)truth->number);
    } else if (status == KV_UNSUPPORTED) {
        if (is_index ? question_index_is_possible(&task->index, truth)
                     : task->question->has_codes)
            complain(world, task, "not so");
    } else if (!may_end(world, task, status)) {
        complain(world, task, "not so");
    }
    if (why != NULL)
        complain(world, task, "session %llu: %s", (unsigned long long)truth->number, why);
}

static void check_length(struct world *world,
                         struct task *task,
                         const struct kv_session *session,
                         uint32_t tokens)
{
    struct truth *truth = task->truth;

    if (tokens < task->tokens && truth->n_losses == task->n_losses && !truth->is_fragile)
        complain(world, task, "%u tokens, and %u were acknowledged", tokens, task->tokens);
    if (tokens > truth_most(truth, task->since))
        complain(world, task, "%u tokens, and %u were put", tokens,
                 truth_most(truth, task->since));
    /* What was there when the node answered may have been cut off since. */
    if (truth->n_losses == task->n_losses)
        truth_exists(truth, tokens, kv_session_generation(session));
}

/* Whether a session is where its prompt says, over however many rows. */
static bool
is_well_placed(struct world *world, const struct task *task, const struct kv_ticket *ticket)
{
    const uint32_t most = world->n_nodes > KV_ROW_NODES ? KV_ROOT_ROWS_MAX : 1;
    uint64_t root;
    uint32_t branch;

    if (task->n_block_names == 0) {
        memcpy(&root, &ticket->session_id, sizeof(root));
        return root == ticket->root;
    }
    root = kv_placement_prompt_root(&task->block_names[0]);
    world->result->n_moved += ticket->root != root;
    /* Or where its beginning is. */
    for (uint32_t blocks = 16; blocks > 0; blocks /= 2) {
        branch = kv_placement_branch(
            task->block_names, blocks < task->n_block_names ? blocks : task->n_block_names);
        for (uint32_t n_rows = 1; n_rows <= most; n_rows *= 2)
            if (ticket->root == kv_placement_branch_root(root, branch, n_rows))
                return true;
    }
    return false;
}

/* What the session has been opened with. */
static void attach(struct world *world, struct task *task, uint32_t tokens)
{
    struct truth *truth = task->truth;
    const uint32_t n_blocks = tokens / KV_BLOCK_TOKENS;
    const uint32_t most = published_most(world->published, &task->by, task->block_names,
                                         task->blocks_most, truth->schema.n_units);

    if (tokens % KV_BLOCK_TOKENS != 0 || n_blocks > most)
        complain(world, task, "%u tokens of %u blocks, of which %u were published", tokens,
                 task->blocks_most, most);
    else if (n_blocks < task->blocks_sure && is_undoubted(world, task))
        complain(world, task, "%u tokens, and %u blocks must be there", tokens,
                 task->blocks_sure);
    else if (tokens > 0) {
        world->result->n_attached += tokens;
        /* Nodes that had more have been made to forget it. */
        truth->n_named = truth->n_shared = n_blocks;
        truth->n_indexes += 2; /* its codes are those of whoever published it */
        for (uint32_t unit = 0; unit < truth->schema.n_units; unit++)
            for (uint32_t token = 0; token < tokens; token++) {
                const struct published_row *row = published_row(
                    world->published, &task->by, &task->block_names[token / KV_BLOCK_TOKENS],
                    unit, token % KV_BLOCK_TOKENS);

                truth_row_attach(truth, unit, token, row->contents, row->n);
            }
    }
}

static void end_session(struct world *world, struct client *client, struct task *task)
{
    struct kv_session *session = kv_op_session(task->op);
    struct truth *truth = task->truth;

    if (session == NULL) {
        complain(world, task, "there is no session");
        return;
    }
    if (task->kind == TASK_OPEN) {
        truth_place(truth, session);
        truth->lost_node = has_died(world, task);
        if (!is_well_placed(world, task, &truth->ticket))
            complain(world, task, "it is not where its prompt says");
        attach(world, task, kv_op_tokens(task->op));
        for (unsigned i = 0; i < world->n_nodes; i++)
            if (world->nodes[i].n_deaths != task->n_deaths[i])
                truth_node_lost(truth, i);
    }
    if (task->kind == TASK_FORK) {
        truth = truth_new(world, &task->truth->schema);
        truth_fork(task->truth, truth, task->tokens, task->since);
        truth_place(truth, session);
        truth->tenant = task->truth->tenant;
        truth->model = task->truth->model;
        truth->has_prompt = task->truth->has_prompt;
        memcpy(truth->names, task->truth->names, sizeof(truth->names));
        truth->n_named = task->n_named < task->tokens / KV_BLOCK_TOKENS
                             ? task->n_named
                             : task->tokens / KV_BLOCK_TOKENS;
        if (one_in(world, 2))
            go_on_otherwise(world, client, truth, task->tokens / KV_BLOCK_TOKENS);
        for (unsigned i = 0; i < world->n_nodes; i++)
            if (world->nodes[i].n_deaths != task->n_deaths[i])
                truth_node_lost(truth, i);
    } else if (task->kind == TASK_RESUME) {
        if (task->is_foreign)
            complain(world, task, "it is another tenant's");
        /* The first node may have died after it answered for the length. */
        if (!has_died(world, task)) {
            check_length(world, task, session, kv_op_tokens(task->op));
        }
        truth_place(truth, session);
    }
    handle_add(client, session, truth);
}

static void end_publish(struct world *world, struct task *task, kv_status_t status)
{
    struct truth *truth = task->truth;
    const uint32_t n_blocks = kv_op_tokens(task->op) / KV_BLOCK_TOKENS;
    uint32_t most;

    publish_over(task, status == KV_OK || status == KV_INVALID || status == KV_CONFLICT);
    if (status == KV_INVALID && task->tokens > 0 && !still_sure(task))
        return; /* the names before it were taken away */
    if (status != KV_OK) {
        if (!may_end(world, task, status))
            complain(world, task, "not so");
        return;
    }
    most = published_most(world->published, &task->by, truth->names, task->blocks_most,
                          truth->schema.n_units);
    world->result->n_published += n_blocks;
    if (kv_op_tokens(task->op) % KV_BLOCK_TOKENS != 0 || n_blocks > most)
        complain(world, task, "%u blocks, and at most %u are there", n_blocks, most);
    if (!still_sure(task))
        return;
    if (truth->n_named < task->blocks_most)
        truth->n_named = task->blocks_most;
    if (truth->n_shared < n_blocks)
        truth->n_shared = n_blocks;
    if (!is_undoubted(world, task) || !is_quiet(world))
        return;
    if (n_blocks < task->blocks_sure)
        complain(world, task, "%u blocks, and %u must be there", n_blocks, task->blocks_sure);
    published_make_sure(world->published, &task->by, truth->names, n_blocks);
}

/* What a client is told that is saved is, on all of the session's nodes. */
static void end_save(struct world *world, struct task *task, kv_status_t status)
{
    const struct truth *truth = task->truth;
    const uint32_t n_blocks = kv_op_tokens(task->op) / KV_BLOCK_TOKENS;
    uint32_t n_on = 0, n_saved = 0;
    const uint32_t most = truth->has_prompt
                              ? published_most(world->published, &task->by, truth->names,
                                               TRUTH_BLOCKS_MAX, truth->schema.n_units)
                              : 0;

    if (status != KV_OK) {
        if (!may_end(world, task, status))
            complain(world, task, "not so");
        return;
    }
    world->result->n_saves += n_blocks;
    if (kv_op_tokens(task->op) % KV_BLOCK_TOKENS != 0 || n_blocks > most)
        complain(world, task, "%u tokens of %u blocks that were published",
                 kv_op_tokens(task->op), most);
    /* What was saved may be evicted as soon as it is. */
    if (!is_undoubted(world, task) || !still_sure(task) || !is_quiet(world) ||
        has_small_disks(world))
        return;
    if (n_blocks < task->blocks_sure)
        complain(world, task, "%u blocks, and %u must be there", n_blocks, task->blocks_sure);
    for (unsigned i = 0; i < world->n_nodes; i++)
        if (truth_is_on(truth, i)) {
            n_on++;
            n_saved +=
                node_count_saved(world->nodes[i].node, truth->names, n_blocks) == n_blocks;
        }
    /* Some of its nodes have no units of it. */
    if (n_saved < n_on && n_saved < truth->schema.n_units)
        complain(world, task, "%u blocks are saved on %u of %u nodes", n_blocks, n_saved, n_on);
}

static void end_match(struct world *world, struct task *task, kv_status_t status)
{
    const uint32_t most = published_parts(world->published, task->by.tenant, task->block_names,
                                          task->n_block_names);
    const struct kv_match *matches;
    uint32_t n_matches;

    if (status != KV_OK) {
        if (!may_end(world, task, status))
            complain(world, task, "not so");
        return;
    }
    matches = kv_op_matches(task->op, &n_matches);
    for (uint32_t i = 0; i < n_matches; i++)
        if (matches[i].tokens > most * KV_BLOCK_TOKENS ||
            matches[i].tokens_in_memory > matches[i].tokens)
            complain(world, task, "node %u: %u tokens of %u blocks that were published",
                     matches[i].node, matches[i].tokens, most);
    if (kv_op_tokens(task->op) > most * KV_BLOCK_TOKENS)
        complain(world, task, "%u tokens of %u blocks that were published",
                 kv_op_tokens(task->op), most);
    else if (kv_op_tokens(task->op) < task->blocks_sure * KV_BLOCK_TOKENS &&
             is_undoubted(world, task))
        complain(world, task, "%u tokens, and %u blocks must be there", kv_op_tokens(task->op),
                 task->blocks_sure);
}

static void end_prefix(struct world *world, struct task *task, kv_status_t status)
{
    const uint32_t most = published_parts(world->published, task->by.tenant, task->block_names,
                                          task->n_block_names);

    prefix_over(world, task, status == KV_OK);
    if (status != KV_OK && !may_end(world, task, status))
        complain(world, task, "not so");
    else if (status == KV_OK && kv_op_blocks(task->op) > 0 && task->n_block_names > most)
        complain(world, task, "block %u was found, and %u were published",
                 task->n_block_names - 1, most);
}

/* No message from then is on its way any more; 0: never. */
static bool is_long_ago(const struct world *world, uint64_t us)
{
    return us == 0 || world->clock.virtual_us - us > STRAGGLER_US;
}

static void end_objects(struct world *world, struct task *task, kv_status_t status)
{
    kv_status_t first = KV_OK;

    for (unsigned i = 0; i < task->n_objects; i++) {
        const struct kv_object *object = &task->objects[i];
        struct name *name = &world->names[task->names[i]];
        bool is_sure = task->n_ids[i] != 0 && task->ids[i] == (uint32_t)name->n_losses;
        const uint8_t *bytes = task->slot->memory + object->offset;
        uint32_t content = 0;

        if (first == KV_OK)
            first = object->status;
        /* What has succeeded is done with: no message of it changes what comes later. */
        bool is_unchanged = task->n_changes[i] == name->n_changes && name->n_puts == 0;
        name_changed(world, name, task->verb,
                     object->status == KV_OK || object->status == KV_NOT_FOUND ||
                         object->status == KV_EXISTS);
        if (task->verb == KV_OBJECT_DELETE) {
            name->n_losses++;
            name->is_gone =
                name->is_gone || (is_unchanged && is_long_ago(world, name->put_doubted_us) &&
                                  (object->status == KV_OK || object->status == KV_NOT_FOUND));
            if (name->is_gone)
                name->may_be = 0;
        }
        if (object->status == KV_OK && task->was_gone[i] && is_unchanged)
            complain(world, task, "object %s was deleted", name->text);
        if (object->status == KV_OK) {
            if (task->verb == KV_OBJECT_GET && object->bytes > 0)
                content = truth_row_content(bytes, object->bytes, 0, 0, task->names[i]);
            bool is_known = task->verb == KV_OBJECT_PUT || task->verb == KV_OBJECT_DELETE;
            for (unsigned j = 0; j < name->n_contents; j++)
                if (((task->may_be[i] >> j & 1) != 0 || !is_unchanged) &&
                    object_bytes(name->contents[j]) == object->bytes &&
                    (task->verb != KV_OBJECT_GET || object->bytes == 0 ||
                     content == name->contents[j]))
                    is_known = true;
            if (!is_known)
                complain(world, task, "object %s: content %u, %zu bytes", name->text, content,
                         object->bytes);
            if (is_sure && task->verb == KV_OBJECT_GET && object->bytes > 0 &&
                content != task->n_ids[i])
                complain(world, task, "object %s: content %u, %u was put", name->text, content,
                         task->n_ids[i]);
            if (task->verb == KV_OBJECT_PUT && !task->may_go[i] &&
                task->ids[i] == (uint32_t)name->n_losses && name->n_deletes == 0 &&
                !has_died(world, task) && is_long_ago(world, name->doubted_us))
                name->sure = task->contents[i];
        } else if (object->status == KV_NOT_FOUND) {
            if (is_sure)
                complain(world, task, "object %s was put", name->text);
        } else if (object->status == KV_EXISTS) {
            if (task->verb != KV_OBJECT_PUT || name->n_contents < 2)
                complain(world, task, "object %s", name->text);
        } else if (object->status == KV_CONFLICT) {
            /* Replaced between two pieces, if only by the same bytes: a put was under way. */
            bool was_put = !is_unchanged || !is_long_ago(world, name->put_doubted_us);
            if (task->verb != KV_OBJECT_GET || (name->n_contents < 2 && !was_put))
                complain(world, task, "object %s: conflict", name->text);
        } else if (!may_end(world, task, object->status)) {
            complain(world, task, "object %s: %s: not so", name->text,
                     kv_status_name(object->status));
        }
    }
    if ((status == KV_OK) != (first == KV_OK))
        complain(world, task, "the first that failed: %s", kv_status_name(first));
}

static void
end_other(struct world *world, struct client *client, struct task *task, kv_status_t status)
{
    struct truth *truth = task->truth;
    bool is_lifecycle = task->kind == TASK_FORK || task->kind == TASK_TRUNCATE;

    if (is_lifecycle) {
        task->handle->n_lifecycles--;
        truth->is_unclear = truth->is_unclear || status != KV_OK;
    }
    if (status != KV_OK) {
        if (status == KV_INVALID && task->kind == TASK_FORK) {
            if (still_sure(task) && !truth->is_fragile)
                complain(world, task, "%u tokens are there", task->tokens);
        } else if (status == KV_NOT_FOUND && task->kind == TASK_OPEN &&
                   has(world, WORLD_NODE_DEATHS)) {
            /* The node died between the model and the session. */
        } else if (!may_end(world, task, status)) {
            complain(world, task, "not so");
        }
        if (task->kind == TASK_OPEN)
            truth->closed_at = world->at;
        return;
    }
    switch (task->kind) {
    case TASK_OPEN:
    case TASK_RESUME:
    case TASK_FORK:
        end_session(world, client, task);
        break;
    case TASK_TRUNCATE: {
        const uint32_t before = kv_session_generation(task->handle->session) - 1;

        truth_cut_done(truth, task->number, task->tokens, before, world->at);
        /* A publish may have come between. */
        if (truth->n_named > task->tokens / KV_BLOCK_TOKENS)
            truth->n_named = task->tokens / KV_BLOCK_TOKENS;
        if (truth->n_shared > truth->n_named)
            truth->n_shared = truth->n_named;
        if (truth->doubted_generation <= before)
            truth->doubted_end = truth->doubted_generation = 0;
        if (one_in(world, 2) && truth->n_losses == task->n_losses + 1)
            go_on_otherwise(world, client, truth, task->tokens / KV_BLOCK_TOKENS);
        break;
    }
    case TASK_CLOSE:
        truth->closed_at = world->at;
        break;
    case TASK_LENGTH:
        if (!has_died(world, task)) {
            check_length(world, task, task->handle->session, kv_op_tokens(task->op));
        }
        break;
    case TASK_VERIFY:
        check_verification(world, task, kv_op_verification(task->op));
        break;
    default:
        break;
    }
}

/* Whether the failure names a node that the session is on, or none. */
static bool is_named_well(const struct task *task)
{
    static const char begin[] = "node ";
    const char *detail = kv_op_detail(task->op);

    return task->truth == NULL || strncmp(detail, begin, sizeof(begin) - 1) != 0 ||
           truth_is_on(task->truth, members_sim_place(detail + sizeof(begin) - 1));
}

/* Whether a node is dead that the session is not on. */
static bool is_beside_dead(const struct world *world, const struct task *task)
{
    for (unsigned i = 0; task->truth != NULL && i < world->n_nodes; i++)
        if (world->nodes[i].node == NULL && !truth_is_on(task->truth, i))
            return true;
    return false;
}

static void task_end(struct world *world, struct client *client, struct task *task)
{
    kv_status_t status = kv_op_status(task->op);

    if (status == KV_OK)
        world->result->n_outside += is_beside_dead(world, task);
    else if (!is_named_well(task))
        complain(world, task, "its session is not on that node");

    remember(world, task->number << 16 ^ (uint64_t)(uint32_t)status);
    world->result->n_good += status == KV_OK;
    say(world, "client %d: %llu: %s: %s %s", (int)(client - world->clients),
        (unsigned long long)task->number, task_names[task->kind], kv_status_name(status),
        kv_op_detail(task->op));
    if (kv_op_elapsed_us(task->op) == 0 && status == KV_IN_PROGRESS)
        complain(world, task, "it has not ended");
    if (task->kind == TASK_PUT || task->kind == TASK_APPEND)
        end_put(world, task, status);
    else if (task->kind == TASK_READ || task->kind == TASK_FETCH)
        end_read(world, task, status);
    else if (task->kind == TASK_INDEX || task->kind == TASK_QUERY)
        end_retrieval(world, task, status);
    else if (task->kind == TASK_OBJECTS)
        end_objects(world, task, status);
    else if (task->kind == TASK_PUBLISH)
        end_publish(world, task, status);
    else if (task->kind == TASK_SAVE)
        end_save(world, task, status);
    else if (task->kind == TASK_MATCH)
        end_match(world, task, status);
    else if (task->kind == TASK_PREFIX)
        end_prefix(world, task, status);
    else
        end_other(world, client, task, status);
    kv_op_free(task->op);
    if (task->slot != NULL)
        slot_give(world, task->slot);
    task_forget(task);
}

/* Looks at what the client's turn has brought. */
static void client_check(struct world *world, struct client *client)
{
    for (unsigned i = 0; i < TASKS_MAX; i++) {
        struct task *task = &client->tasks[i];

        if (!task->is_used)
            continue;
        if (task->cancel_us != 0 && task->cancel_us <= world->clock.virtual_us) {
            task->cancel_us = 0;
            if (kv_op_status(task->op) == KV_IN_PROGRESS) {
                task->was_cancelled = true;
                kv_cancel(task->op);
            }
        }
        if (kv_op_status(task->op) != KV_IN_PROGRESS)
            task_end(world, client, task);
        else if (task->op->owner.deadline_us <= client->client->loop.now_us)
            complain(world, task, "it did not end by its deadline");
    }
    for (unsigned i = 0; i < SLOTS_MAX; i++)
        slot_settle(&client->slots[i]);
    for (unsigned i = 0; i < HANDLES_MAX; i++) {
        struct handle *handle = &client->handles[i];

        /* Mostly when nothing is under way; else what is is cancelled. */
        if (handle->session == NULL ||
            !(handle->is_closing ? handle->n_tasks == 0
                                 : one_in(world, handle->n_tasks == 0 ? 4000 : 40000)))
            continue;
        for (unsigned j = 0; j < TASKS_MAX; j++)
            if (client->tasks[j].is_used && client->tasks[j].handle == handle) {
                client->tasks[j].was_cancelled = true;
                kv_cancel(client->tasks[j].op);
                task_end(world, client, &client->tasks[j]);
            }
        kv_session_free(handle->session);
        handle_forget(world, handle);
    }
}

/* ---- turning ----------------------------------------------------------------------------- */

static void step_client(struct world *world, unsigned number)
{
    struct client *client = &world->clients[number];

    if (client->stalled_us > world->clock.virtual_us)
        return;
    enter(world);
    client->n_ended += kv_poll(client->client);
    if (world->at % CHECK_EVERY == 0)
        kvc_client_check(client->client);
    leave();
    client_check(world, client);
}

static bool step_node(struct world *world, unsigned place, unsigned part)
{
    struct node *node = &world->nodes[place];
    bool is_busy = false;

    if (node->node == NULL || node->stalled_us > world->clock.virtual_us)
        return false;
    enter(world);
    if (part == 0)
        is_busy = kvs_node_control_step(node->node);
    else if (part <= node->n_threads)
        is_busy = kvs_node_data_step(node->node, part - 1);
    if (node->tier != NULL && part > 0 && part <= node->n_threads)
        tier_sim_step(node->tier, part - 1, world->clock.virtual_us, world->is_calm);
    if (has(world, WORLD_SAVING) && !world->is_calm && part > 0 && part <= node->n_threads &&
        one_in(world, LET_GO_ONE_IN))
        world->result->let_go_bytes +=
            node_let_go(node->node, part - 1, kv_random_below(&world->random, LET_GO_MOST));
    leave();
    return is_busy;
}

/* The books of all nodes: a walk of requests and sessions is cheap, one of all memory is
 * not. */
static void check_books(struct world *world)
{
    for (unsigned i = 0; i < world->n_nodes; i++) {
        if (world->nodes[i].node == NULL)
            continue;
        if (world->at % BOOKS_EVERY == 0)
            kvs_node_check(world->nodes[i].node);
        if (world->at % MEMORY_EVERY == 0)
            kvs_node_check_memory(world->nodes[i].node);
    }
}

/* A disk has more to do than it had: now the power fails, if that was to be. */
static void cut_power(struct world *world, unsigned place)
{
    struct world_result *result = world->result;

    if (world->options.cut_at == 0 || result->was_cut || world->is_calm)
        return;
    result->n_disk = 0;
    for (unsigned i = 0; i < world->n_nodes; i++) {
        struct disk_sim_counts counts;

        disk_sim_get_counts(world->nodes[i].disk, &counts);
        result->n_disk += counts.n_writes + counts.n_syncs;
    }
    if (result->n_disk < world->options.cut_at || world->nodes[place].node == NULL)
        return;
    result->was_cut = true;
    world->power_fails = true;
    node_stop(world, place, true);
    world->power_fails = false;
}

/* One turn of everybody, in any order; then time goes on. */
static void turn(struct world *world, uint64_t most_us)
{
    const unsigned n_actors = N_CLIENTS + world->n_nodes * (1 + THREADS_MAX);
    uint8_t order[N_CLIENTS + WORLD_NODES_MAX * (1 + THREADS_MAX)];
    uint64_t next_us, now_us = world->clock.virtual_us;
    bool is_busy = false;

    world->at++;
    sim_net_step(world->net);
    for (unsigned i = 0; i < n_actors; i++) {
        unsigned j = (unsigned)below(world, i + 1);

        order[i] = order[j];
        order[j] = (uint8_t)i;
    }
    for (unsigned i = 0; i < n_actors; i++) {
        unsigned actor = order[i];

        if (one_in(world, 8))
            continue;
        if (actor < N_CLIENTS) {
            step_client(world, actor);
            continue;
        }
        is_busy |= step_node(world, (actor - N_CLIENTS) / (1 + THREADS_MAX),
                             (actor - N_CLIENTS) % (1 + THREADS_MAX));
        cut_power(world, (actor - N_CLIENTS) / (1 + THREADS_MAX));
    }
    check_books(world);
    next_us = sim_net_step(world->net);
    world->n_busy = is_busy || next_us <= now_us ? world->n_busy + 1 : 0;
    if (world->n_busy > 0) {
        /* What is busy for long waits for something: in larger steps. */
        uint64_t step_us = 1 + below(world, 20);

        world->clock.virtual_us += step_us * (1 + world->n_busy / 64);
    } else {
        uint64_t until_us = now_us + most_us;

        world->clock.virtual_us = next_us < until_us ? next_us : until_us;
    }
}

static void client_kill(struct world *world, unsigned number)
{
    say(world, "client %u dies", number);
    if (!one_in(world, 3))
        sim_transport_kill(world->clients[number].transport);
    client_end(world, number);
    client_begin(world, number);
    world->result->n_deaths++;
}

static void cut(struct world *world, unsigned from, unsigned to, uint64_t until_us, bool loses)
{
    say(world, "place %u is cut from place %u", to, from);
    sim_net_cut(world->net, from, to, until_us, loses);
}

static void strike_cut(struct world *world, unsigned place, unsigned number)
{
    uint64_t until_us =
        world->clock.virtual_us + below(world, one_in(world, 3) ? 8000000 : 200000);
    bool loses = one_in(world, 2);

    cut(world, place, WORLD_NODES_MAX + number, until_us, loses);
    cut(world, WORLD_NODES_MAX + number, place, until_us, loses);
}

static void strike_one_way_cut(struct world *world, unsigned place, unsigned number)
{
    uint64_t until_us =
        world->clock.virtual_us + below(world, one_in(world, 3) ? 8000000 : 200000);
    bool loses = !one_in(world, 3);

    if (one_in(world, 2))
        cut(world, place, WORLD_NODES_MAX + number, until_us, loses);
    else
        cut(world, WORLD_NODES_MAX + number, place, until_us, loses);
}

static void strike_stall(struct world *world, unsigned place, unsigned number)
{
    uint64_t until_us =
        world->clock.virtual_us + below(world, one_in(world, 3) ? 4000000 : 100000);
    bool is_node = one_in(world, 2);

    say(world, "%s %u stands still", is_node ? "node" : "client", is_node ? place : number);
    if (is_node)
        world->nodes[place].stalled_us = until_us;
    else
        world->clients[number].stalled_us = until_us;
    /* As a machine that is suspended: its clock stands still, too. */
    if (has(world, WORLD_CLOCKS) && one_in(world, 3))
        own_clock_stop(is_node ? &world->nodes[place].clock : &world->clients[number].clock,
                       until_us);
}

static void strike_clock(struct world *world, unsigned place, unsigned number)
{
    struct node *node = &world->nodes[place];

    if (one_in(world, 2)) {
        own_clock_jump(&world->clients[number].clock, below(world, CLOCK_JUMP_US));
        say(world, "the clock of client %u jumps", number);
    } else if (node->jumped_us + CLOCK_JUMP_EVERY_US <= world->clock.virtual_us) {
        own_clock_jump(&node->clock, below(world, CLOCK_JUMP_US));
        node->jumped_us = world->clock.virtual_us;
        say(world, "the clock of node %u jumps", place);
    }
}

static void strike_node(struct world *world, unsigned place, unsigned number)
{
    (void)number;
    if (world->nodes[place].node != NULL && one_in(world, 3))
        node_stop(world, place, true);
}

static void strike_client(struct world *world, unsigned place, unsigned number)
{
    (void)place;
    if (one_in(world, 3))
        client_kill(world, number);
}

/* As by a signal, or by an operation of a client. */
static void strike_drain(struct world *world, unsigned place, unsigned number)
{
    struct node *node = &world->nodes[place];

    if (node->node == NULL || !one_in(world, 3))
        return;
    if (one_in(world, 2)) {
        task_begin(world, &world->clients[number], TASK_DRAIN);
    } else {
        kvs_node_drain(node->node);
        node_drains(world, place);
    }
}

/* For a while there is none at all. */
static void strike_allocations(struct world *world, unsigned place, unsigned number)
{
    (void)place;
    (void)number;
    world->starved_us = world->clock.virtual_us + below(world, 2000);
}

static void strike_damage(struct world *world, unsigned place, unsigned number)
{
    (void)number;
    for (uint64_t n = 1 + below(world, 4); n > 0 && world->nodes[place].node != NULL; n--)
        if (node_damage(world->nodes[place].node, &world->random)) {
            world->result->n_damaged++;
            say(world, "node %u: something is damaged", place);
        }
}

/* What may go wrong: bit i of the faults is row i.  `strike`: now and then, to a node or to a
 * client; NULL: chances that a world is given when it begins. */
static const struct {
    const char *name;
    void (*strike)(struct world *world, unsigned place, unsigned number);
} faults[WORLD_N_FAULTS] = {
    {"loss", NULL},
    {"doubles", NULL},
    {"delays", NULL},
    {"corruption", NULL},
    {"full", NULL},
    {"resets", NULL},
    {"cuts", strike_cut},
    {"stalls", strike_stall},
    {"node_deaths", strike_node},
    {"client_deaths", strike_client},
    {"slow_disks", NULL},
    {"little_memory", NULL},
    {"clocks", strike_clock},
    {"one_way_cuts", strike_one_way_cut},
    {"large_loss", NULL},
    {"large_doubles", NULL},
    {"large_delays", NULL},
    {"drains", strike_drain},
    {"failing_allocations", strike_allocations},
    {"swaps", NULL},
    {"evictions", NULL},
    {"lost_blocks", NULL},
    {"damage", strike_damage},
    {"saving", NULL},
    {"bad_disks", NULL},
};

static void mischief(struct world *world)
{
    unsigned place = (unsigned)below(world, world->n_nodes);
    unsigned number = (unsigned)below(world, N_CLIENTS);
    unsigned fault = (unsigned)below(world, WORLD_N_FAULTS);

    if (has(world, 1u << fault) && faults[fault].strike != NULL)
        faults[fault].strike(world, place, number);
}

static void revive(struct world *world)
{
    for (unsigned i = 0; i < world->n_nodes; i++)
        if (world->nodes[i].node == NULL &&
            (world->is_calm || world->nodes[i].revive_us <= world->clock.virtual_us))
            node_begin(world, i);
}

/* ---- a run ------------------------------------------------------------------------------- */

static void make_models(struct world *world)
{
    static const struct kv_layer_schema mixed[] = {
        {.kind = KV_LAYER_KV, .dtype = KV_FP16, .n_kv_heads = 3, .d_k = 16, .d_v = 16},
        {.kind = KV_LAYER_KEYS, .dtype = KV_INT8, .n_kv_heads = 2, .d_k = 24},
        {.kind = KV_LAYER_KV, .dtype = KV_FP32, .n_kv_heads = 4, .d_k = 64, .d_v = 64},
    };

    for (unsigned i = 0; i < N_MODELS; i++) {
        struct kv_model_info *model = &world->models[i];

        snprintf(model->name, sizeof(model->name), "model %u", i);
        model->fingerprint.bytes[0] = (uint8_t)(i + 1);
    }
    world->models[0].schema.n_layers = 3;
    memcpy(world->models[0].schema.layers, mixed, sizeof(mixed));
    if (kv_schema_finish(&world->models[0].schema, NULL, 0) != KV_OK ||
        kv_schema_uniform(&world->models[1].schema, 1, 1, 512, 512, KV_FP32) != KV_OK ||
        kv_schema_uniform(&world->models[2].schema, 4, 2, 32, 32, KV_BF16) != KV_OK)
        abort();
}

static uint32_t rate(struct world *world, unsigned fault, uint32_t most)
{
    return has(world, fault) && !one_in(world, 3) ? (uint32_t)below(world, most) : 0;
}

static void set_faults(struct world *world)
{
    *sim_net_faults(world->net) = (struct sim_net_faults){
        .lost = rate(world, WORLD_LOSS, one_in(world, 3) ? 60000 : 5000),
        .doubled = rate(world, WORLD_DOUBLES, 60000),
        .delayed = rate(world, WORLD_DELAYS, 5000),
        .corrupted = rate(world, WORLD_CORRUPTION, 5000),
        .full = rate(world, WORLD_FULL, 20000),
        .reset = rate(world, WORLD_RESETS, 400),
        .large_lost = rate(world, WORLD_LARGE_LOSS, one_in(world, 3) ? 100000 : 10000),
        .large_doubled = rate(world, WORLD_LARGE_DOUBLES, 100000),
        .large_delayed = rate(world, WORLD_LARGE_DELAYS, one_in(world, 3) ? 200000 : 20000),
    };
}

static unsigned n_tasks(const struct world *world)
{
    unsigned n = 0;

    for (unsigned i = 0; i < N_CLIENTS; i++)
        for (unsigned j = 0; j < TASKS_MAX; j++)
            n += world->clients[i].tasks[j].is_used;
    return n;
}

/* Returns false if some blocks do not come back: they may be more than memory. */
static bool wait_for_blocks(struct world *world)
{
    const uint64_t until_us = world->clock.virtual_us + BACK_US;

    while (!bring_back_blocks(world)) {
        if (world->clock.virtual_us > until_us)
            return false;
        turn(world, IDLE_STEP_US);
    }
    return true;
}

/* Of what is in memory. */
static void check_codes(struct world *world)
{
    if (world->result->n_damaged > 0) /* keys are not what their codes were made of */
        return;
    for (unsigned i = 0; i < world->n_nodes; i++) {
        const struct node *node = &world->nodes[i];
        const char *why;

        if (node->tier != NULL)
            tier_sim_bring_back(node->tier);
        why = node->node != NULL ? node_codes_fault(node->node) : NULL;
        if (why != NULL)
            complain(world, NULL, "node %u: %s", i, why);
    }
}

static void work(struct world *world)
{
    while (world->result->n_ops < world->options.n_ops && !world->result->failed) {
        for (unsigned i = 0; i < N_CLIENTS; i++) {
            struct client *client = &world->clients[i];

            if (client->stalled_us > world->clock.virtual_us || !one_in(world, 12))
                continue;
            const enum task_kind kind = pick_kind(world);
            if (kind == TASK_QUERY && one_in(world, 3))
                batch_begin(world, client);
            else
                task_begin(world, client, kind);
        }
        if (world->options.faults != 0 && one_in(world, 250))
            mischief(world);
        if (world->n_truths > TRUTHS_MAX / 2 && one_in(world, 50))
            truths_sweep(world);
        drains_step(world);
        revive(world);
        turn(world, IDLE_STEP_US);
        if (one_in(world, 2000))
            check_codes(world);
        if (one_in(world, 20000))
            world->clock.virtual_us += below(world, 400000);
    }
    /* What was published last is saved, too. */
    for (const uint64_t until_us = world->clock.virtual_us + SAVE_US;
         world->options.cut_at > 0 && world->clock.virtual_us < until_us &&
         !world->result->failed;) {
        drains_step(world);
        revive(world);
        turn(world, IDLE_STEP_US);
    }
}

/* No more faults: what is under way ends. */
static void settle(struct world *world)
{
    uint64_t until_us = world->clock.virtual_us + SETTLE_US;

    world->is_calm = true;
    for (unsigned i = 0; i < world->n_nodes; i++)
        disk_faults(world, &world->nodes[i]);
    *sim_net_faults(world->net) = (struct sim_net_faults){0};
    sim_net_heal(world->net);
    for (unsigned i = 0; i < world->n_nodes; i++) {
        world->nodes[i].stalled_us = 0;
        own_clock_stop(&world->nodes[i].clock, world->clock.virtual_us);
    }
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        world->clients[i].stalled_us = 0;
        own_clock_stop(&world->clients[i].clock, world->clock.virtual_us);
    }
    while ((n_tasks(world) > 0 || is_draining(world)) && world->clock.virtual_us < until_us &&
           !world->result->failed) {
        turn(world, IDLE_STEP_US);
        drains_step(world);
        revive(world);
    }
    if (n_tasks(world) > 0)
        complain(world, NULL, "operations are still under way");
    else if (is_draining(world))
        complain(world, NULL, "a node has not answered all, and it drains");
    revive(world);
}

static void turn_idle(void *world)
{
    turn(world, IDLE_STEP_US);
}

/* A transfer that was lost hangs at its node, whose client it will cost the connection: nothing
 * may be told from that, so it is waited for. */
static void outlast_lost_transfers(struct world *world)
{
    const uint64_t until_us = world->clock.virtual_us + STUCK_MS * UINT64_C(1200);

    while (world->clock.virtual_us < until_us && !world->result->failed)
        turn(world, 20 * IDLE_STEP_US);
}

/* Sessions whose segments change places, on top of what the world has. */
static void check_swaps(struct world *world)
{
    struct client *client = &world->clients[below(world, N_CLIENTS)];
    struct kvs_node *nodes[WORLD_NODES_MAX];
    struct swaps swaps = {
        .client = client->client,
        .model = &world->models[below(world, N_MODELS)],
        .nodes = nodes,
        .n_nodes = world->n_nodes,
        .random = &world->random,
        .turn = turn_idle,
        .world = world,
        .content = world->n_contents + 1,
    };
    const char *why;

    outlast_lost_transfers(world);
    if (!wait_for_blocks(world))
        return;
    for (unsigned i = 0; i < world->n_nodes; i++)
        nodes[i] = world->nodes[place_of(client->client, i)].node;
    why = swaps_fault(&swaps);
    world->n_contents += SWAPS_CONTENTS;
    client->n_begun += swaps.n_begun;
    world->result->n_swaps += swaps.n_swaps;
    world->result->n_rows_swapped += swaps.n_rows;
    if (why != NULL)
        complain(world, NULL, "segments in wrong places: %s", why);
    else if (swaps.n_swaps == 0 && world->options.faults == WORLD_SWAPS)
        complain(world, NULL, "no segment was swapped");
}

/* A node forgets a client that has had nothing to do for long, which the client hears from the
 * data threads only. */
static void ping_all(struct world *world, struct client *client)
{
    struct kv_op *op;

    for (uint32_t i = 0; i < 2 * world->n_nodes; i++) {
        if (kv_ping_begin(client->client, i % world->n_nodes, 0, 0, 0, 10000, &op) != KV_OK)
            continue;
        client->n_begun++;
        while (kv_op_status(op) == KV_IN_PROGRESS)
            turn(world, IDLE_STEP_US);
        kv_op_free(op);
    }
}

/* Those of the client's tenant. */
static void delete_objects(struct world *world, struct client *client)
{
    struct kv_object objects[N_NAMES];
    unsigned n_good = 0;
    uint64_t until_us;
    struct kv_op *op;

    for (unsigned i = 0; i < N_NAMES; i++)
        objects[i] = (struct kv_object){.name = world->names[i].text};
    ping_all(world, client);
    /* What came late may have brought one back, or ended a connection: again, later. */
    for (unsigned round = 0; round < 6 && n_good < 2 && !world->result->failed; round++) {
        kv_status_t status =
            kv_objects_begin(client->client, KV_OBJECT_DELETE, objects, N_NAMES, 10000, &op);

        if (status != KV_OK) {
            complain(world, NULL, "objects cannot be deleted: %s", kv_status_name(status));
            return;
        }
        client->n_begun++;
        while (kv_op_status(op) == KV_IN_PROGRESS)
            turn(world, IDLE_STEP_US);
        /* The operation tells one failure; another may lie beside it. */
        unsigned n_gone = 0;
        for (unsigned i = 0; i < N_NAMES; i++) {
            n_gone += objects[i].status == KV_OK || objects[i].status == KV_NOT_FOUND;
            if (objects[i].status != KV_OK && objects[i].status != KV_NOT_FOUND &&
                objects[i].status != KV_UNREACHABLE &&
                !(objects[i].status == KV_DEADLINE &&
                  has(world, WORLD_DELAYS | WORLD_FAILING_ALLOCATIONS)))
                complain(world, NULL, "objects cannot be deleted: %s", kv_op_detail(op));
        }
        n_good += n_gone == N_NAMES;
        kv_op_free(op);
        until_us = world->clock.virtual_us + LATEST_US;
        while (world->clock.virtual_us < until_us)
            turn(world, 50000);
    }
}

/* All prefixes that the client can name, with their roots: nothing publishes any more. */
static void evict_all(struct world *world, struct client *client)
{
    struct kv_id128 names[TRUTH_BLOCKS_MAX];
    char detail[256] = "";
    struct kv_op *op;

    ping_all(world, client);
    for (uint32_t i = 0; i < N_MODELS * N_ROOTS && !world->result->failed; i++) {
        struct kv_prefix prefix = {.verb = KV_PREFIX_EVICT, .name = &names[0]};
        kv_status_t status = KV_UNREACHABLE;

        name_prompt(world, client, i % N_MODELS, i / N_MODELS, names);
        for (unsigned round = 0;
             round < 6 && (status == KV_UNREACHABLE || status == KV_DEADLINE); round++) {
            status = kv_prefix_begin(client->client, KV_NODES_ALL, &prefix, 10000, &op);
            if (status != KV_OK)
                break;
            client->n_begun++;
            while (kv_op_status(op) == KV_IN_PROGRESS)
                turn(world, IDLE_STEP_US);
            status = kv_op_status(op);
            snprintf(detail, sizeof(detail), "%s", kv_op_detail(op));
            kv_op_free(op);
        }
        if (status != KV_OK)
            complain(world, NULL, "prefixes cannot be evicted: %s: %s", kv_status_name(status),
                     detail);
    }
}

/* Ends sessions, one way or another, and deletes all objects and prefixes. */
static void clean_up(struct world *world)
{
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        struct client *client = &world->clients[i];

        for (unsigned j = 0; j < HANDLES_MAX; j++)
            if (client->handles[j].session != NULL && one_in(world, 2))
                task_begin(world, client, TASK_CLOSE);
    }
    settle(world);
    for (uint32_t tenant = 0; tenant < N_TENANTS; tenant++)
        for (unsigned i = 0; i < N_CLIENTS; i++)
            if (world->clients[i].tenant == tenant) {
                delete_objects(world, &world->clients[i]);
                break;
            }
    for (unsigned i = 0; i < N_CLIENTS && !world->result->failed; i++) {
        bool is_done = false;

        for (unsigned j = 0; j < i; j++)
            is_done = is_done || (world->clients[j].tenant == world->clients[i].tenant &&
                                  world->clients[j].has_salt == world->clients[i].has_salt);
        if (!is_done)
            evict_all(world, &world->clients[i]);
    }
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        struct client *client = &world->clients[i];

        client->n_ended += kv_poll(client->client);
        if (client->n_begun != client->n_ended)
            complain(world, NULL, "client %u: %llu operations were begun, %llu ended", i,
                     (unsigned long long)client->n_begun, (unsigned long long)client->n_ended);
        for (unsigned j = 0; j < SLOTS_MAX; j++) {
            struct slot *slot = &client->slots[j];

            if (slot->is_waiting && !world->result->failed)
                complain(world, NULL, "client %u: a buffer is in quarantine for ever", i);
            if (!is_canary(slot->memory, SLOT_BYTES))
                complain(world, NULL, "client %u: a byte landed in a buffer at rest", i);
        }
    }
}

static void
count_row(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    (void)key;
    (void)key_bytes;
    (void)value;
    (void)value_bytes;
    ++*(uint64_t *)arg;
}

/* All that was saved has been evicted: nothing is left on the disk, unless memory was lacking to say
 * that something is to be erased. */
static void check_disk(struct world *world, unsigned place)
{
    uint64_t n = 0;

    if (has(world, WORLD_FAILING_ALLOCATIONS))
        return;
    (void)kv_disk_scan(world->nodes[place].disk, KV_DISK_ROWS, "", 0, count_row, &n);
    if (n > 0)
        complain(world, NULL, "node %u at the end: %llu rows' values are left on its disk",
                 place, (unsigned long long)n);
}

static void check_nodes(struct world *world)
{
    uint64_t until_us = world->clock.virtual_us + (LEASE_MS + CLIENT_LEASE_MS + 5000) * 1000ull;
    struct node_look look;

    while (world->clock.virtual_us < until_us) {
        sim_net_step(world->net);
        for (unsigned i = 0; i < world->n_nodes; i++)
            for (unsigned part = 0; part <= THREADS_MAX; part++)
                step_node(world, i, part);
        world->clock.virtual_us += 10000;
    }
    for (unsigned i = 0; i < world->n_nodes; i++) {
        node_look(world->nodes[i].node, &look);
        remember(world, look.corrupt_rows << 32 ^ look.bad_messages);
        check_disk(world, i);
        if (look.sessions + look.clients + look.calls + look.works + look.bodies +
                look.stagings + look.segments + look.objects + look.object_bytes +
                look.bytes_strayed + look.codebooks + look.jobs + look.queriers +
                look.prefixes >
            0)
            complain(world, NULL,
                     "node %u at the end: sessions %llu, clients %llu, calls %llu, works %llu, "
                     "bodies %llu, stagings %llu, segments %llu, objects %llu of %llu bytes, "
                     "%llu bytes of memory, codebooks %llu, jobs %llu, queriers %llu, "
                     "prefixes %llu",
                     i, (unsigned long long)look.sessions, (unsigned long long)look.clients,
                     (unsigned long long)look.calls, (unsigned long long)look.works,
                     (unsigned long long)look.bodies, (unsigned long long)look.stagings,
                     (unsigned long long)look.segments, (unsigned long long)look.objects,
                     (unsigned long long)look.object_bytes,
                     (unsigned long long)look.bytes_strayed, (unsigned long long)look.codebooks,
                     (unsigned long long)look.jobs, (unsigned long long)look.queriers,
                     (unsigned long long)look.prefixes);
        if (!has(world, WORLD_CORRUPTION | WORLD_DAMAGE) && !world->has_doubted_crcs &&
            look.corrupt_rows + look.bad_messages > 0)
            complain(
                world, NULL, "node %u at the end: %llu rows and %llu messages were corrupt", i,
                (unsigned long long)look.corrupt_rows, (unsigned long long)look.bad_messages);
    }
}

static unsigned draw_many_nodes(struct world *world)
{
    return KV_ROW_NODES + 1 + (unsigned)below(world, WORLD_NODES_MAX - KV_ROW_NODES);
}

void world_run(const struct world_options *options, struct world_result *ret_result)
{
    struct world *world = calloc(1, sizeof(*world));

    if (world == NULL)
        abort();
    *ret_result = (struct world_result){0};
    world->options = *options;
    /* Where blocks are evicted by the simulator some nodes do not save. */
    if (options->cut_at > 0)
        world->options.faults =
            (options->faults | WORLD_SAVING | WORLD_NODE_DEATHS) & ~(unsigned)WORLD_EVICTIONS;
    world->result = ret_result;
    kv_clock_virtual_init(&world->clock, 1000000);
    kv_random_init(&world->random, options->seed);
    world->net = sim_net_create(&world->clock, kv_random_next(&world->random));
    world->node_bytes =
        has(world, WORLD_LITTLE_MEMORY) && one_in(world, 2) ? NODE_BYTES_LITTLE : NODE_BYTES;
    world->n_nodes = options->n_nodes > 0 ? options->n_nodes
                     : one_in(world, MANY_NODES_ONE_IN)
                         ? draw_many_nodes(world)
                         : 1 + (unsigned)below(world, WORLD_NODES_FEW);
    world->weights = one_in(world, 2) ? 0 : (unsigned)below(world, 16);
    make_models(world);
    set_faults(world);
    world->failing = rate(world, WORLD_FAILING_ALLOCATIONS, one_in(world, 3) ? 100000 : 5000);
    for (unsigned i = 0; i < N_TENANTS * N_NAMES; i++)
        snprintf(world->names[i].text, sizeof(world->names[i].text), "object-%u", i % N_NAMES);
    world->published = published_create();
    make_prompts(world);
    world->has_same_names = one_in(world, 6);
    world->eviction = one_in(world, 2) ? "lru" : "gdsf";
    world->tenant_quota = one_in(world, 4) ? 1 + below(world, QUOTA_BYTES) : 0;
    /* A node has one tier: the other one is the simulator's. */
    if (has(world, WORLD_SAVING) && (!has(world, WORLD_EVICTIONS) || one_in(world, 2)))
        world->disk_bytes = one_in(world, 4) ? 1 + below(world, QUOTA_BYTES) : UINT64_MAX;
    world->clients[N_CLIENTS - 1].tenant = (uint32_t)below(world, N_TENANTS);
    for (unsigned i = 0; i < N_CLIENTS; i++)
        world->clients[i].has_salt = one_in(world, 6);
    for (unsigned i = 0; i < world->n_nodes; i++) {
        world->nodes[i].n_threads =
            one_in(world, 2) ? 1 : 1 + (uint32_t)below(world, THREADS_MAX);
        node_begin(world, i);
    }
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        for (unsigned j = 0; j < SLOTS_MAX; j++) {
            world->clients[i].slots[j].memory = malloc(SLOT_BYTES);
            if (world->clients[i].slots[j].memory == NULL)
                abort();
            memset(world->clients[i].slots[j].memory, CANARY, SLOT_BYTES);
        }
        client_begin(world, i);
    }

    work(world);
    settle(world);
    check_codes(world);
    if (!ret_result->failed && has(world, WORLD_SWAPS))
        check_swaps(world);
    if (!ret_result->failed)
        clean_up(world);
    for (unsigned i = 0; i < N_CLIENTS; i++)
        client_end(world, i);
    if (!ret_result->failed)
        check_nodes(world);

    ret_result->virtual_us = world->clock.virtual_us;
    remember(world, sim_net_hash(world->net));
    for (unsigned i = 0; i < world->n_nodes; i++)
        if (world->nodes[i].node != NULL)
            node_end(world, i);
    for (unsigned i = 0; i < world->n_nodes; i++) {
        free(world->nodes[i].saved);
        kv_disk_close(world->nodes[i].disk);
    }
    while (world->truths != NULL) {
        struct truth *next = world->truths->next;

        truth_destroy(world->truths);
        world->truths = next;
    }
    for (unsigned i = 0; i < N_CLIENTS; i++)
        for (unsigned j = 0; j < SLOTS_MAX; j++)
            free(world->clients[i].slots[j].memory);
    published_destroy(world->published);
    sim_net_destroy(world->net);
    free(world);
}

const char *world_fault_name(unsigned i)
{
    return faults[i].name;
}

static unsigned fault_of(const char *name, size_t bytes)
{
    if (bytes == 3 && memcmp(name, "all", 3) == 0)
        return WORLD_ALL_FAULTS;
    for (unsigned i = 0; i < WORLD_N_FAULTS; i++)
        if (strlen(faults[i].name) == bytes && memcmp(faults[i].name, name, bytes) == 0)
            return 1u << i;
    return 0;
}

bool world_faults_read(const char *text, unsigned *ret_faults)
{
    *ret_faults = 0;
    if (strcmp(text, "none") == 0)
        return true;
    while (*text != 0) {
        size_t bytes = strcspn(text, ",");
        unsigned found = fault_of(text, bytes);

        if (found == 0)
            return false;
        *ret_faults |= found;
        text += bytes;
        text += *text == ',';
    }
    return true;
}
