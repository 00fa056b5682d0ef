/* due.h - things that are due at some time, the earliest first.
 *
 * A pairing heap, of links in the things themselves, so it needs no memory of its own.  Looking
 * at the earliest takes no look at the others; setting one or taking one out takes about as many
 * as the logarithm of how many there are, on average.
 *
 * Invariants, which kvc_dues_check() asserts:
 *   (1) The first one is due at some time, and no other one before its parent.
 *   (2) Every link back is the reverse of a link forward.
 *
 * Threads: one at a time.  Memory: a member of the thing, which is set to KVC_NEVER before it is
 * freed.
 */
#ifndef KV_CLIENT_DUE_H
#define KV_CLIENT_DUE_H

#include <stddef.h>
#include <stdint.h>

#define KVC_NEVER UINT64_MAX

/* The struct that contains the link. */
#define KVC_DUE_ENTRY(due, type, member) ((type *)((char *)(due)-offsetof(type, member)))

struct kvc_due {
    uint64_t at_us; /* KVC_NEVER: it is in no heap */
    struct kvc_due *child, *next;
    struct kvc_due *previous; /* of its siblings; the first one's is their parent */
};

/* Zeros are an empty one. */
struct kvc_dues {
    struct kvc_due *first; /* NULL: none */
    uint64_t n_looks;      /* comparisons ever made */
};

static inline void kvc_due_init(struct kvc_due *due)
{
    *due = (struct kvc_due){.at_us = KVC_NEVER};
}

/* Sets when it is due.  It may be in `dues`, and in no other heap. */
void kvc_due_set(struct kvc_dues *dues, struct kvc_due *due, uint64_t at_us);

/* Returns when the first is due; KVC_NEVER: there is none. */
static inline uint64_t kvc_dues_first_us(const struct kvc_dues *dues)
{
    return dues->first != NULL ? dues->first->at_us : KVC_NEVER;
}

/* Returns how many there are, in time linear in that. */
size_t kvc_dues_check(const struct kvc_dues *dues);

#endif
