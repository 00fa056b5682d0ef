/* rest.c - sessions that nobody uses rest: what they share with the index may leave memory.
 *
 *   used -> 100 ms without a request -> rests: its prefix may leave, if memory is short
 *     ^                                      |
 *     +------------- a request --------------+  what is away comes back: the request waits for it
 *
 * Those that were used last leave last, so that one which pauses between two tokens stays, unless what
 * is in use at one time is more than memory.
 *
 * A session of more rows than memory is used all the time, and so may two be that do not fit together.
 * When nothing rests, the data threads let rows go that are not needed at the moment (tier/let_go.c).
 *
 * A session that rests is open all the same.  Its data threads bring blocks back when a request needs
 * them (ops/need_rows.h), and note that they serve the session; this only says of its prefix that it
 * may go, or that it is here again.  Rows that the index does not have stay in memory: those behind
 * the last whole block, and of sessions whose tokens have no names. */
#include "kvserver/store/control/control.h"

#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/saver.h"

enum {
    REST_US = 100000,      /* without a request; one that waits for rows counts as one */
    REST_SHORT_US = 10000, /* the same while memory is short */
    GIVE_US = 15000,       /* that memory is short before sessions that are used give some */
    SAVING_US = 200000,    /* the same while blocks are being saved, which may rest then */
    SOON_US = 2000000,     /* that those who lack memory wait for that */
    LOOKS_AT_ONCE = 1024,  /* some 50 us */
};

static bool can_rest(const struct kvs_session *session)
{
    const struct kvs_prefix *prefix = session->prefix;

    return !session->busy && prefix != NULL && prefix->home != NULL &&
           prefix->saved == KVS_PREFIX_SAVED;
}

static void look_at(struct kvs_control *control, struct kvs_session *session, uint64_t now_us)
{
    const uint64_t needed_us = kvs_session_needed_us(control, session);
    const uint64_t rest_us = control->lack_us != 0 ? REST_SHORT_US : REST_US;
    const bool is_idle = now_us > kvs_session_used_us(control, session) + rest_us;

    if (!session->busy && session->prefix != NULL && session->prefix->home == NULL)
        kvs_session_follow_prefix(control, session);
    if (is_idle && !session->is_resting && can_rest(session)) {
        session->is_resting = true;
        session->rested_us = needed_us;
        control->n_resting++;
        kvs_prefix_rest(control->prefixes, session->prefix, needed_us);
    } else if (session->is_resting && needed_us != session->rested_us) {
        kvs_session_wake(control, session);
    }
}

void kvs_sessions_tell_soon(struct kvs_control *control, bool is_lacking)
{
    struct kvs_pages *pages = control->pages;
    const uint64_t now_us = kv_clock_now(control->config.clock);
    const bool has_spare = atomic_load_explicit(&pages->spare_bytes, memory_order_relaxed) > 0;

    if (!is_lacking || has_spare)
        control->lack_us = 0;
    else if (control->lack_us == 0)
        control->lack_us = now_us;
    if (has_spare)
        control->is_giving = false;
    else if (control->lack_us != 0)
        control->is_giving =
            control->is_giving ||
            now_us >= control->lack_us + (kvs_saver_is_saving(control) ? SAVING_US : GIVE_US);
    atomic_store_explicit(&pages->is_giving, control->is_giving, memory_order_relaxed);
    atomic_store_explicit(&pages->spare_soon,
                          control->saver != NULL && control->n_sessions > control->n_resting &&
                              (control->lack_us == 0 || now_us < control->lack_us + SOON_US),
                          memory_order_relaxed);
}

void kvs_session_wake(struct kvs_control *control, struct kvs_session *session)
{
    struct kvs_prefix *prefix = session->prefix;
    uint64_t needed_us;

    if (!session->is_resting)
        return;
    session->is_resting = false;
    control->n_resting--;
    kvs_prefix_wake(control->prefixes, prefix);
    needed_us = kvs_session_needed_us(control, session);
    if (needed_us == session->rested_us || prefix->home == NULL)
        return; /* who renews or ends it needs nothing of it */
    /* Its requests have brought back what they needed. */
    kvs_prefix_come_back(control, prefix);
    kvs_prefix_use(control->prefixes, prefix, needed_us);
}

void kvs_sessions_rest(struct kvs_control *control, uint64_t now_us)
{
    const uint32_t n =
        control->n_sessions < LOOKS_AT_ONCE ? control->n_sessions : LOOKS_AT_ONCE;

    if (control->saver == NULL)
        return; /* there is no other place than memory */
    for (uint32_t i = 0; i < n; i++) {
        control->rest_at =
            control->rest_at + 1 < control->n_sessions ? control->rest_at + 1 : 0;
        look_at(control, control->due[control->rest_at], now_us);
    }
    kvs_stat_set(&control->stats.sessions_resting, control->n_resting);
}
