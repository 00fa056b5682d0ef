#include "tests/sim/members_sim.h"

#include "kvserver/base/random.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    MEMBERS_MAX = 16,
    WEIGHT_MAX = 3,
    WEIGHTINGS = 16,
};

static void swap(struct kv_member *a, struct kv_member *b)
{
    const struct kv_member other = *a;

    *a = *b;
    *b = other;
}

static kv_status_t get(const char *what,
                       const char *text,
                       struct kv_members **ret_members,
                       char *detail,
                       size_t detail_bytes)
{
    struct kv_member members[MEMBERS_MAX];
    char names[MEMBERS_MAX][16], addresses[MEMBERS_MAX][16];
    struct kv_random weights, order;
    unsigned long long seed;
    unsigned n;

    if (sscanf(text, "%u %llu", &n, &seed) != 2 || n == 0 || n > MEMBERS_MAX) {
        snprintf(detail, detail_bytes, "%s: %.80s: must be a number and a seed", what, text);
        return KV_INVALID;
    }
    kv_random_init(&weights, seed % WEIGHTINGS);
    kv_random_init(&order, seed);
    for (unsigned i = 0; i < n; i++) {
        snprintf(names[i], sizeof(names[i]), "node%u", i);
        snprintf(addresses[i], sizeof(addresses[i]), "sim:%u", i);
        members[i] = (struct kv_member){.name = names[i], .address = addresses[i], .weight = 1};
        if (seed % WEIGHTINGS != 0)
            members[i].weight += (uint32_t)kv_random_below(&weights, WEIGHT_MAX);
    }
    for (unsigned i = n; i > 1; i--)
        swap(&members[i - 1], &members[kv_random_below(&order, i)]);
    return kv_members_create(what, members, n, ret_members, detail, detail_bytes);
}

const struct kv_members_source members_sim = {"sim", get};

unsigned members_sim_place(const char *address)
{
    unsigned place = 0;

    if (sscanf(address, "sim:%u", &place) != 1)
        abort();
    return place;
}
