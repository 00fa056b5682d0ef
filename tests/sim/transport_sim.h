/* transport_sim.h - a network of one process on a virtual clock: a row for the table of
 * transports.
 *
 * Everything that happens is an event in one queue, ordered by (virtual time, number), and
 * every choice comes from the seed, so that a run can be repeated exactly.
 *
 *     send() --> [depart] --> arrive --> inbox --> message() or incoming()       in progress()
 *                                                     receive() --> [copy] --> done()
 *
 * Small data is copied when it departs, large data when the receiver takes it: until then, it
 * is read from the sender's memory, bit by bit as far as anybody can tell.
 *
 * Threads: one.  Memory: create/destroy; transports, ports and channels live as long as the
 * net.
 */
#ifndef KV_TESTS_SIM_TRANSPORT_SIM_H
#define KV_TESTS_SIM_TRANSPORT_SIM_H

#include "kvserver/base/clock.h"
#include "kvserver/net/transport.h"

#include <stdbool.h>

struct sim_net;

enum {
    SIM_PLACES_MAX = 16
};

/* How often, in a million messages. */
struct sim_net_faults {
    uint32_t lost;          /* small messages that never arrive */
    uint32_t doubled;       /* small messages that arrive twice */
    uint32_t delayed;       /* messages that take up to 20 s */
    uint32_t corrupted;     /* one bit of header or data flips */
    uint32_t full;          /* sends that are refused with KV_BUSY */
    uint32_t reset;         /* sends that end the connection */
    uint32_t large_lost;    /* large messages that never arrive, or not to their end */
    uint32_t large_doubled; /* large messages that arrive twice */
    uint32_t large_delayed; /* large messages that take up to 20 s, to arrive or to be copied */
};

struct sim_net *sim_net_create(const struct kv_clock *clock, uint64_t seed);
void sim_net_destroy(struct sim_net *net);

/* Lent; may be changed at any time. */
struct sim_net_faults *sim_net_faults(struct sim_net *net);

/* The transport of one process, at a place in [0, SIM_PLACES_MAX).  The net's. */
struct kv_transport *sim_net_transport(struct sim_net *net, unsigned place);

/* The process has died: from now on nothing leaves it, and what it closes nobody notices sooner
 * than by its death. */
void sim_transport_kill(struct kv_transport *transport);

/* Nothing of one place reaches the other until then: small messages are lost, or wait; large
 * data, which moves only while both hear each other, waits. */
void sim_net_cut(
    struct sim_net *net, unsigned from, unsigned to, uint64_t until_us, bool loses);

/* Ends all cuts, and tells the senders of large messages that were lost: none hears of a loss
 * any more. */
void sim_net_heal(struct sim_net *net);

/* Does what is due by the clock.  Returns when the next event is due; UINT64_MAX: there is
 * none. */
uint64_t sim_net_step(struct sim_net *net);

/* Of everything that has happened. */
uint64_t sim_net_hash(const struct sim_net *net);

#endif
