#include "kvserver/base/random.h"
#include "kvserver/base/hash.h"

#include <assert.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

static uint64_t rotate_left(uint64_t x, unsigned bits)
{
    return x << bits | x >> (64 - bits);
}

static void system_bytes(void *data, size_t bytes)
{
    uint8_t *at = data;

    while (bytes > 0) {
        ssize_t n = getrandom(at, bytes, 0);

        if (n < 0) {
            /* Without it tokens would be predictable, so abort. */
            assert(errno == EINTR);
            continue;
        }
        at += n;
        bytes -= (size_t)n;
    }
}

void kv_random_init(struct kv_random *random, uint64_t seed)
{
    random->secure = 0;
    for (unsigned i = 0; i < 4; i++) { /* splitmix64: never four zeros */
        seed += 0x9e3779b97f4a7c15u;
        random->state[i] = kv_mix64(seed);
    }
}

void kv_random_init_secure(struct kv_random *random)
{
    uint64_t seed;

    system_bytes(&seed, sizeof(seed));
    kv_random_init(random, seed);
    random->secure = 1;
}

uint64_t kv_random_next(struct kv_random *random)
{
    uint64_t *state = random->state;
    uint64_t result = rotate_left(state[1] * 5, 7) * 9;
    uint64_t shifted = state[1] << 17;

    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= shifted;
    state[3] = rotate_left(state[3], 45);
    return result;
}

uint64_t kv_random_below(struct kv_random *random, uint64_t bound)
{
    uint64_t skip, x;

    assert(bound > 0);
    /* Skips 2^64 mod bound numbers, so that all remainders are equally likely. */
    skip = (0 - bound) % bound;
    do {
        x = kv_random_next(random);
    } while (x < skip);
    return x % bound;
}

void kv_random_fill(struct kv_random *random, void *data, size_t bytes)
{
    uint8_t *at = data;

    if (random->secure) {
        system_bytes(data, bytes);
        return;
    }
    while (bytes > 0) {
        uint64_t word = kv_random_next(random);
        size_t n = bytes < sizeof(word) ? bytes : sizeof(word);

        memcpy(at, &word, n);
        at += n;
        bytes -= n;
    }
}
