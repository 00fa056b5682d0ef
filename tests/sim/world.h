/* world.h - two nodes and three clients in one thread, on a virtual clock, with what can go
 * wrong around them, and a check of everything that they say.
 *
 * Threads: one.  Memory: a run owns all that it makes.
 */
#ifndef WORLD_H
#define WORLD_H

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
    WORLD_ALL_FAULTS = (1 << 12) - 1,
};

/* "none", "all", or names in a list: "loss,stalls".  false: one is unknown. */
bool world_faults_read(const char *text, unsigned *ret_faults);

struct world_options {
    uint64_t seed;
    uint64_t n_ops;
    unsigned faults;
    bool verbose;
};

struct world_result {
    uint64_t n_ops, n_good; /* begun; ended with KV_OK */
    uint64_t virtual_us;
    uint64_t hash; /* of everything that happened */
    uint64_t n_deaths;
    bool failed;
    char failure[512];
};

void world_run(const struct world_options *options, struct world_result *ret_result);

#endif
