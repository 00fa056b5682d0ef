/* eviction.c - prefixes leave the index: because memory, room on disk or a tenant's quota is short,
 * because their rows are bad, or because a client says so; and how data threads give the refs of their
 * blocks back.
 *
 *   kvs_control_evict() -> released -> a command to all data threads -> pages are free
 *
 * What has left waits until the data threads have carried out the last such command, so one is
 * on its way at a time, with all that has gathered.  Until it is done, memory that comes back
 * counts as spare: a request that finds none is told to try again. */
#include "kvserver/base/slice.h"
#include "kvserver/store/control/metrics.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/saver.h"

#include <assert.h>

enum {
    EVICT_AT_ONCE = 256, /* for memory; the next ones when these are freed: some 100 us */
    EVICT_SLICE = 4,     /* between two looks at the clock: a look at all tenants for each */
};

static void release_done(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;

    kvs_prefixes_drop(control, call->prefixes);
    call->prefixes = NULL;
    control->is_releasing = false;
    kvs_pages_sub_spare(control->pages, control->releasing_bytes);
    control->releasing_bytes = 0;
    kvs_control_call_end(call);
    kvs_prefixes_release_step(control);
}

void kvs_prefixes_release_step(struct kvs_control *control)
{
    struct kvs_control_call *call;

    if (control->is_releasing || control->released == NULL)
        return;
    call = kvs_control_call_internal(control, KV_OP_PUBLISH);
    if (call == NULL)
        return; /* the next step tries again */
    call->prefixes = control->released;
    control->released = NULL;
    control->releasing_bytes = control->released_bytes;
    control->released_bytes = 0;
    control->is_releasing = true;
    kvs_control_broadcast(
        call,
        &(struct kvs_command){.kind = KVS_COMMAND_PREFIX_RELEASE, .prefix = call->prefixes},
        release_done);
}

void kvs_prefix_give_back(struct kvs_control *control, struct kvs_prefix *prefix)
{
    prefix->next = control->released;
    control->released = prefix;
}

void kvs_prefixes_drop(struct kvs_control *control, struct kvs_prefix *list)
{
    struct kvs_prefix *next;

    for (; list != NULL; list = next) {
        next = list->next;
        list->next = NULL;
        kvs_prefix_release(control->prefixes, list);
    }
}

void kvs_control_evict(struct kvs_control *control,
                       struct kvs_prefix *prefix,
                       enum kvs_evict_why why)
{
    _Atomic uint64_t *const counters[] = {
        [KVS_EVICT_MEMORY] = &control->stats.prefixes_evicted,
        [KVS_EVICT_QUOTA] = &control->stats.prefixes_over_quota,
        [KVS_EVICT_DISK] = &control->stats.prefixes_off_disk,
        [KVS_EVICT_BAD] = &control->stats.prefixes_bad,
        [KVS_EVICT_ASKED] = &control->stats.prefixes_deleted,
    };
    const uint64_t bytes = prefix->is_away ? 0 : prefix->home->block_bytes;

    kvs_saver_remove(control, prefix);
    /* In this order: what is on its way is spare all the time. */
    kvs_pages_add_spare(control->pages, bytes);
    control->released_bytes += bytes;
    kvs_events_removed(control, prefix);
    kvs_prefixes_remove(control->prefixes, prefix);
    kvs_count(counters[why], 1);
    kvs_prefix_give_back(control, prefix);
}

uint64_t kvs_control_evict_tree(struct kvs_control *control,
                                struct kvs_prefix *prefix,
                                enum kvs_evict_why why)
{
    struct kvs_prefix *last, *parent;
    uint64_t n = 0;

    /* Always on from where the last one was: the way from the first one may be long. */
    for (last = prefix; last != NULL; last = last != prefix ? parent : NULL) {
        last = kvs_prefix_last(last);
        parent = last->parent;
        kvs_control_evict(control, last, why);
        n++;
    }
    return n;
}

static void tell_stats(struct kvs_control *control)
{
    struct kvs_saver_facts facts;

    kvs_saver_get_facts(control, kv_clock_now(control->config.clock), &facts);
    kvs_stat_set(&control->stats.prefixes_away, kvs_prefixes_away(control->prefixes));
    kvs_stat_set(&control->stats.saved_blocks, facts.saved_blocks);
    kvs_stat_set(&control->stats.saved_bytes, facts.saved_bytes);
    kvs_stat_set(&control->stats.unsaved_blocks, facts.waiting_blocks);
    kvs_stat_set(&control->stats.unsaved_bytes, facts.waiting_bytes);
    kvs_stat_set(&control->stats.unsaved_us, facts.waiting_us);
    kvs_stat_set(&control->stats.prefixes, kvs_prefixes_count(control->prefixes));
    kvs_stat_set(&control->stats.prefix_bytes, kvs_prefixes_bytes(control->prefixes));
    kvs_stat_set(&control->stats.prefixes_pinned, kvs_prefixes_pinned(control->prefixes));
    kvs_stat_set(&control->stats.prefix_tokens_bytes,
                 kvs_prefixes_tokens_bytes(control->prefixes));
}

/* What is saved leaves memory only.  Returns false if that cannot be. */
static bool
let_go(struct kvs_control *control, struct kvs_prefix *victim, enum kvs_evict_why why)
{
    if (victim->saved == KVS_PREFIX_SAVED && !victim->is_away)
        return kvs_saver_let_go(control, victim);
    kvs_control_evict(control, victim, why);
    return true;
}

/* Whether the records of blocks that are away take so much memory that some are to go. */
static bool have_many_records(const struct kvs_control *control)
{
    return kvs_stats_total(control, offsetof(struct kvs_stats, memory_other)) >
           control->pages->bytes / 2;
}

/* What goes next for memory: when leaving is slow, what is not saved; else what is saved first, and
 * then nothing while the disk is at work: those who lack memory write no faster than it does. */
static struct kvs_prefix *choose_victim(const struct kvs_control *control)
{
    const bool is_slow = kvs_saver_is_slow(control);
    struct kvs_prefix *victim = is_slow ? kvs_prefixes_unsaved_victim(control->prefixes)
                                        : kvs_prefixes_victim(control->prefixes, NULL);

    if (victim != NULL && kvs_saver_will_save(control, victim))
        return NULL;
    if (victim == NULL && have_many_records(control))
        victim = kvs_prefixes_disk_victim(control->prefixes);
    return victim;
}

/* Evicts until that many bytes are on their way, or it takes too long: the more tenants there are,
 * the longer it takes to find the one whose prefix goes. */
static void evict_some(struct kvs_control *control, uint64_t lacking)
{
    struct kv_slice slice = kv_slice_begin(control->config.clock, EVICT_SLICE);
    const bool is_slow = kvs_saver_is_slow(control);

    for (int i = 0; i < EVICT_AT_ONCE; i++) {
        /* What is slow to leave is not counted on. */
        const uint64_t coming = is_slow ? 0 : kvs_saver_leaving_bytes(control);
        struct kvs_prefix *victim =
            control->released_bytes + coming < lacking ? choose_victim(control) : NULL;

        if (victim == NULL || !let_go(control, victim, KVS_EVICT_MEMORY) ||
            kv_slice_over(&slice))
            break;
    }
}

void kvs_prefixes_make_room(struct kvs_control *control)
{
    uint64_t lacking;

    atomic_store_explicit(&control->pages->loose_bytes,
                          kvs_stats_total(control, offsetof(struct kvs_stats, memory_unused)),
                          memory_order_relaxed);
    lacking = kvs_pages_lacking(control->pages) * (uint64_t)KVS_ARENA_PAGE;
    kvs_sessions_tell_soon(control, lacking > 0);

    /* What is on its way may be enough. */
    if (!control->is_releasing && control->released == NULL &&
        (kvs_saver_leaving_bytes(control) == 0 || kvs_saver_is_slow(control)))
        evict_some(control, lacking);
    kvs_prefixes_release_step(control);
    tell_stats(control);
}

bool kvs_prefixes_admit(struct kvs_control *control, uint32_t tenant, uint64_t bytes)
{
    const struct kvs_prefix_tenant *of = kvs_prefixes_tenant(control->prefixes, tenant);
    const uint64_t quota = control->config.tenant_quota;

    if (quota == 0)
        return true;
    if (bytes > quota)
        return false;
    while (of != NULL && of->bytes > quota - bytes) {
        struct kvs_prefix *victim = kvs_prefixes_victim(control->prefixes, of);

        if (victim == NULL)
            return false;
        if (!let_go(control, victim, KVS_EVICT_QUOTA))
            return false;
        of = kvs_prefixes_tenant(control->prefixes, tenant); /* it may have had no other */
    }
    return true;
}

kv_status_t kvs_control_full(struct kvs_control *control)
{
    return kvs_pages_want(control->pages, 0) ? KV_BUSY : KV_NO_MEMORY;
}

void kvs_prefixes_stop(struct kvs_control *control)
{
    if (control->prefixes != NULL)
        kvs_prefixes_drop(control, control->released);
    control->released = NULL;
    kvs_prefixes_destroy(control->prefixes);
}
