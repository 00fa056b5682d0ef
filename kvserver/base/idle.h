/* idle.h - how long a thread that has nothing to do goes on looking before it sleeps.
 *
 * Whoever sleeps has to be woken: 5 us on a machine that does nothing else, 60 to 110 us where two
 * cores are shared, for each message.  Whoever looks takes a core from everybody else.
 *
 *   adaptive   looks for twice as long as what it waits for usually takes, if that is 1 ms at most,
 *              else for 50 us; sleeps at once where others want the core: where it has had to wait
 *              for one for more than an eighth of the time.  A thread that passes now and then is no
 *              reason, since being woken for each message takes more than it does
 *   busy       never sleeps
 *   sleep      sleeps at once
 *
 * Threads: one.  Memory: the caller's; zeros are an adaptive one that knows nothing yet.
 */
#ifndef KV_KVSERVER_BASE_IDLE_H
#define KV_KVSERVER_BASE_IDLE_H

#include <stdbool.h>
#include <stdint.h>

#define KV_IDLE_CHOICES "adaptive|busy|sleep"

enum kv_idle_mode {
    KV_IDLE_ADAPTIVE,
    KV_IDLE_BUSY,
    KV_IDLE_SLEEP,
};

struct kv_idle {
    enum kv_idle_mode mode;
    uint64_t gap_us;       /* moving average of the wait; 0: none yet */
    uint64_t looked_us;    /* when the load was last read */
    uint64_t core_wait_ns; /* how long this thread had waited for a core until then */
    unsigned crowd;        /* 0..KV_IDLE_CROWD: how often it had to wait */
};

enum {
    KV_IDLE_CROWD = 8,
    KV_IDLE_LEAST_US =
        50, /* of an adaptive one that has the core: less than being woken takes */
};

/* Finds a mode by name; NULL and "": adaptive.  Returns false if there is none of that name. */
bool kv_idle_find(const char *name, enum kv_idle_mode *ret_mode);

/* Returns how a process's threads idle, of which n_threads would look, if its control groups
 * grant it `cores` (cpu_quota.h; 0: any): looking counts as work there, and is taken from the
 * work.  Where each of them has less than a core, an adaptive one sleeps at once. */
enum kv_idle_mode kv_idle_within(enum kv_idle_mode mode, unsigned n_threads, double cores);

/* Something has come; `waited_us` is how long it took. */
void kv_idle_came(struct kv_idle *idle, uint64_t waited_us);

/* Returns for how long to look, from when there was nothing to do on. */
uint64_t kv_idle_spin_us(struct kv_idle *idle, uint64_t now_us);

#endif
