/* world.h - one to three nodes, or nine to twelve, and three clients in one thread, on virtual clocks, with what can
 * go wrong around them, and a check of everything that they say.
 *
 * Threads: one.  Memory: a run owns all that it makes.
 */
#ifndef KV_TESTS_SIM_WORLD_H
#define KV_TESTS_SIM_WORLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What may go wrong. */
enum world_fault {
    WORLD_LOSS = 1 << 0,    /* messages vanish */
    WORLD_DOUBLES = 1 << 1, /* messages come twice */
    WORLD_DELAYS = 1 << 2,  /* messages take seconds */
    WORLD_CORRUPTION = 1 << 3,
    WORLD_FULL = 1 << 4,   /* the transport takes no more for now */
    WORLD_RESETS = 1 << 5, /* connections end */
    WORLD_CUTS = 1 << 6,   /* a client and a node do not reach each other */
    WORLD_STALLS = 1 << 7, /* a process stands still */
    WORLD_NODE_DEATHS = 1 << 8,
    WORLD_CLIENT_DEATHS = 1 << 9,
    WORLD_SLOW_DISKS = 1 << 10,
    WORLD_LITTLE_MEMORY = 1 << 11,
    WORLD_CLOCKS = 1 << 12,       /* differ, drift, jump forward and stand still */
    WORLD_ONE_WAY_CUTS = 1 << 13, /* one hears the other, and is not heard */
    WORLD_LARGE_LOSS = 1 << 14,   /* large messages vanish, or break off */
    WORLD_LARGE_DOUBLES = 1 << 15,
    WORLD_LARGE_DELAYS = 1 << 16,
    WORLD_DRAINS = 1 << 17, /* a node takes nothing new, and stops */
    WORLD_FAILING_ALLOCATIONS = 1 << 18,
    WORLD_SWAPS = 1 << 19,       /* two sessions' segments change places, at the end */
    WORLD_EVICTIONS = 1 << 20,   /* blocks leave memory, and come back */
    WORLD_LOST_BLOCKS = 1 << 21, /* some of these damaged, or not at all */
    WORLD_DAMAGE = 1 << 22, /* bits flip, and rows change places, in what is kept by name */
    WORLD_SAVING = 1 << 23, /* nodes save on disk, and have what they saved after a restart */
    WORLD_BAD_DISKS = 1 << 24, /* that fails, rots, stalls, and is full */
    WORLD_N_FAULTS = 25,
    WORLD_ALL_FAULTS = (1 << WORLD_N_FAULTS) - 1,
};

/* "none", "all", or names in a list: "loss,stalls".  false: one is unknown. */
bool world_faults_read(const char *text, unsigned *ret_faults);
/* The i-th fault's name. */
const char *world_fault_name(unsigned i);

enum {
    WORLD_NODES_FEW = 3,  /* all in every row (kvserver/cluster/placement.h) */
    WORLD_NODES_MAX = 12, /* more than a row has */
};

struct world_options {
    uint64_t seed;
    uint64_t n_ops;
    unsigned faults;
    unsigned
        n_nodes; /* 0: the seed draws 1 to WORLD_NODES_FEW, now and then more than a row has */
    /* When so many writes and syncs have begun on all disks, the power of the node that began the last
     * one fails, once; 0: never.  Then nodes save, and may die. */
    uint64_t cut_at;
    bool verbose;
};

struct world_result {
    uint64_t n_ops, n_good; /* begun; ended with KV_OK */
    uint64_t virtual_us;
    uint64_t hash; /* of everything that happened */
    uint64_t n_deaths;
    bool was_cut;       /* at options.cut_at, */
    uint64_t n_disk;    /* when so many writes and syncs had begun */
    uint64_t n_outside; /* operations that ended well beside a dead node outside of their row */
    uint64_t
        n_moved; /* sessions that were opened on another row of their root than the first */
    uint64_t n_swaps, n_rows_swapped; /* segments; their rows that had to be found, and were */
    uint64_t n_evictions, n_segments_lost; /* blocks that left memory; what did not come back */
    uint64_t n_damaged;                    /* segments of what is kept by name */
    uint64_t n_published; /* blocks that publishes found kept, when they ended */
    uint64_t n_attached;  /* tokens that opens began with */
    uint64_t n_saves;     /* blocks of which clients were told that they are saved */
    uint64_t
        n_saved; /* blocks that nodes which died had saved, and had when they began again */
    uint64_t n_loaded; /* blocks that came back from disk */
    /* Of rows that left memory while sessions used others of their blocks. */
    uint64_t let_go_bytes;
    bool failed;
    char failure[512];
};

void world_run(const struct world_options *options, struct world_result *ret_result);

#endif
