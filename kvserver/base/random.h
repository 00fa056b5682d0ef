/* random.h - random numbers: a seeded generator for reproducible sequences, and random bytes
 * from the system for tokens and ids.
 *
 * Threads: a generator belongs to one thread at a time.
 */
#ifndef KV_KVSERVER_BASE_RANDOM_H
#define KV_KVSERVER_BASE_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* xoshiro256**.  Equal seeds give equal sequences on every machine. */
struct kv_random {
    uint64_t state[4];
    int secure; /* kv_random_fill() uses the system's random bytes */
};

void kv_random_init(struct kv_random *random, uint64_t seed);

/* Initializes a generator from the system; its kv_random_fill() is secure enough for secrets.
 */
void kv_random_init_secure(struct kv_random *random);

uint64_t kv_random_next(struct kv_random *random);

/* Returns a uniform number in [0, bound); bound must be above 0. */
uint64_t kv_random_below(struct kv_random *random, uint64_t bound);

/* Fills `bytes` bytes: from the system if the generator is secure, else from the sequence. */
void kv_random_fill(struct kv_random *random, void *data, size_t bytes);

#endif
