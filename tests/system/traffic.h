/* traffic.h - random operations against a model of what they must do.
 *
 * A client with several sessions and objects and some operations in flight at once.  Every row
 * that comes back is compared with what was put, byte by byte, and so is its CRC.
 *
 * Threads: one.  Memory: traffic_run() frees all it made.
 */
#ifndef KV_TESTS_SYSTEM_TRAFFIC_H
#define KV_TESTS_SYSTEM_TRAFFIC_H

#include <stdbool.h>
#include <stdint.h>

struct traffic_options {
    const char *nodes;
    const char *transport;
    uint64_t seed;
    uint64_t n_ops;       /* 0: until stdin is closed */
    bool nodes_may_fail;  /* then operations may fail, but never lie */
    uint32_t deadline_ms; /* of every operation */
};

/* Tells on stdout, every now and then and at the end,
 *   traffic ok=N failed=N sessions=N rows=IN0/OUT0,IN1/OUT1,...
 * and on stderr what went wrong.  Returns an exit status. */
int traffic_run(const struct traffic_options *options);

#endif
