/* loop.h - the client's event loop as its other files see it: the time, the next timer, and
 * whether there is something to dispatch.
 *
 * The loop does not know what it drives.  Other files set must_dispatch or a timer; client.c
 * runs the loop.
 *
 * Threads: the client's.  Memory: a member of the client.
 */
#ifndef KV_CLIENT_LOOP_H
#define KV_CLIENT_LOOP_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_clock;

enum {
    KVC_DETAIL_BYTES = 512,
};

struct kvc_loop {
    const struct kv_clock *clock; /* borrowed for the client's life */
    uint64_t now_us;              /* of this call */
    uint64_t next_due_us;         /* when the earliest timer is due */
    bool must_dispatch;           /* something may be able to advance */
    bool is_held;                 /* not yet: several operations are being begun as one batch */
    bool is_closing;
    uint32_t n_ended; /* operations since the last poll */
    char detail[KVC_DETAIL_BYTES];
    bool is_unwatched; /* the library's own thread runs the loop */
    /* What has failed meanwhile: detail's, from the next poll on. */
    char untold[KVC_DETAIL_BYTES];
};

void kvc_loop_init(struct kvc_loop *loop, const struct kv_clock *clock);

/* Reads the clock, at the start of a call of the user or of a step. */
void kvc_loop_update_time(struct kvc_loop *loop);

/* Makes sure that timers are checked at at_us. */
static inline void kvc_loop_set_timer(struct kvc_loop *loop, uint64_t at_us)
{
    if (at_us < loop->next_due_us)
        loop->next_due_us = at_us;
}

/* Returns the time left until at_us, at least 1: a request's deadline must not be 0. */
static inline uint64_t kvc_loop_left_us(const struct kvc_loop *loop, uint64_t at_us)
{
    return at_us > loop->now_us ? at_us - loop->now_us : 1;
}

/* Returns where the reason for a failure is stored. */
static inline char *kvc_loop_detail(struct kvc_loop *loop)
{
    return loop->is_unwatched ? loop->untold : loop->detail;
}

/* Stores the reason why a call of the user failed (kv_client_detail()).  Returns `status`. */
kv_status_t kvc_set_error(struct kvc_loop *loop, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
