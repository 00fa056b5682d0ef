/* loop.h - the client's event loop, as its parts see it: what time it is, when to look again, and
 * what they leave for it.
 *
 * Nothing in here knows what it is that moves: parts of the client note that something may be
 * able to move on, or by when they have to be looked at, and client.c turns.
 *
 * Threads: the client's.  Memory: lives with the client.
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
    uint64_t next_due_us;         /* the earliest moment at which a timer is due */
    bool must_dispatch;           /* something may be able to move on */
    bool is_closing;
    uint32_t n_ended; /* operations since the last poll */
    char detail[KVC_DETAIL_BYTES];
};

void kvc_loop_init(struct kvc_loop *loop, const struct kv_clock *clock);

/* Reads the clock: a call of the user's begins, or a turn. */
void kvc_loop_update_time(struct kvc_loop *loop);

/* Makes sure that timers are looked at by then. */
static inline void kvc_loop_set_timer(struct kvc_loop *loop, uint64_t at_us)
{
    if (at_us < loop->next_due_us)
        loop->next_due_us = at_us;
}

/* What is left until then, at least 1: what is to be sent still has a moment. */
static inline uint64_t kvc_loop_left_us(const struct kvc_loop *loop, uint64_t at_us)
{
    return at_us > loop->now_us ? at_us - loop->now_us : 1;
}

/* Keeps why a call of the user's was refused.  Returns `status`. */
kv_status_t kvc_set_error(struct kvc_loop *loop, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
