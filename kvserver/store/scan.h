/* scan.h - scores of a unit's candidates, in slices: by their codes where they have some, by
 * their keys where not.
 *
 *     kv_scan_begin();  while (!kv_scan_slice(...)) other work;
 *
 * Candidates are numbered through the ranges in order: candidate i's score for query vector q
 * is scores[q * n + i].  Rows that follow an open codebook (codebook.h) and have no codes yet
 * get them here.
 *
 * Threads: the data thread.  Memory: the caller's; the unit must not change between slices but
 * grow, or kv_scan_begin() starts anew.
 */
#ifndef KV_SCAN_H
#define KV_SCAN_H

#include "clock.h"
#include "kv_wire.h"
#include "unit.h"

/* One unit and what is asked of it. */
struct kv_scan {
    struct kv_unit *unit;
    enum kv_key_type type;
    uint32_t d;
    const struct kv_wire_range *ranges; /* below unit->committed */
    uint32_t n_ranges;
    uint32_t n_queries;
    const float *queries; /* (n_queries, d) */
    bool by_code;         /* false: all by their keys */
    float *scores;        /* (n_queries, n) */
    uint32_t n;           /* candidates */

    uint32_t range, token, done; /* where the next slice begins */
    uint32_t n_coded, n_exact, n_chapters;
    uint64_t serial; /* of the codebook that `tables` is for; 0: none */
    float *tables;   /* (n_queries, KV_SCAN_TABLE) of the caller */
};

enum {
    KV_SCAN_TABLE = KV_PQ_SUBSPACES_MAX << KV_PQ_BITS_MAX,
};

/* Tokens in the ranges. */
uint32_t kv_ranges_count(const struct kv_wire_range *ranges, uint32_t n_ranges);

/* Sets the cursor and the counts to the begin; the rest is the caller's. */
void kv_scan_begin(struct kv_scan *scan);

/* Works for some 50 us; true when all candidates are scored. */
bool kv_scan_slice(struct kv_scan *scan, struct kv_heap *heap, const struct kv_clock *clock);

/* Goes through tokens of the ranges by their numbers, which ascend from call to call. */
struct kv_range_walk {
    const struct kv_wire_range *ranges;
    uint32_t before; /* candidates before the range that it is in */
};
static inline uint32_t kv_range_walk_to(struct kv_range_walk *walk, uint32_t index)
{
    while (index - walk->before >= walk->ranges->end - walk->ranges->begin) {
        walk->before += walk->ranges->end - walk->ranges->begin;
        walk->ranges++;
    }
    return walk->ranges->begin + (index - walk->before);
}

#endif
