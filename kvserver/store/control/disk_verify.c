#include "kvserver/store/control/disk_verify.h"

#include "kvserver/base/log.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/control/saver.h"

#include <assert.h>
#include <stdlib.h>

enum {
    BLOCKS_AT_ONCE = 256,
    BYTES_AT_ONCE = 64 << 20, /* of those that somebody waits for; else one second's share */
    PASS_US = 600 * 1000 * 1000,
    LAG_US = 1000 * 1000, /* delay that may be caught up */
    WARN_US = 60 * 1000 * 1000,
};

struct kvs_disk_verify {
    struct kvs_prefix *first, **end; /* by verified_us */
    uint64_t n;
    struct kvs_control_call *call; /* NULL: nothing is under way */
    struct kvs_tier_item items[BLOCKS_AT_ONCE];
    uint32_t n_items;
    uint64_t due_us;       /* of the next ones in the background */
    uint64_t begun_us;     /* when the pass began; what was verified later is of the next one */
    uint64_t bytes_before; /* verified before it */
    bool is_in_pass;
    uint64_t wanted_us, asked_us; /* since when it is wanted; when somebody asked last */
    uint64_t warned_us;
};

/* ---- the list ----------------------------------------------------------------------------- */

static void
list_last(struct kvs_disk_verify *verify, struct kvs_prefix *prefix, uint64_t verified_us)
{
    prefix->verified_us = verified_us;
    prefix->verify_next = NULL;
    prefix->verify_link = verify->end;
    *verify->end = prefix;
    verify->end = &prefix->verify_next;
    verify->n++;
}

static void unlist(struct kvs_disk_verify *verify, struct kvs_prefix *prefix)
{
    *prefix->verify_link = prefix->verify_next;
    if (prefix->verify_next != NULL)
        prefix->verify_next->verify_link = prefix->verify_link;
    else
        verify->end = prefix->verify_link;
    prefix->verify_link = NULL;
    prefix->verify_next = NULL;
    verify->n--;
}

void kvs_disk_verify_add(struct kvs_control *control,
                         struct kvs_prefix *prefix,
                         uint64_t verified_us)
{
    list_last(control->disk_verify, prefix, verified_us);
}

void kvs_disk_verify_remove(struct kvs_control *control, struct kvs_prefix *prefix)
{
    if (prefix->verify_link != NULL)
        unlist(control->disk_verify, prefix);
}

/* Whether all that was saved at that time has been verified since. */
static bool is_verified(const struct kvs_disk_verify *verify, uint64_t since_us)
{
    return verify->first == NULL || verify->first->verified_us >= since_us;
}

/* ---- a batch ------------------------------------------------------------------------------ */

static uint32_t counted(_Atomic uint32_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static void
warn(struct kvs_control *control, uint64_t n_mended, uint64_t n_bad, uint64_t n_lost)
{
    struct kvs_disk_verify *verify = control->disk_verify;
    const uint64_t now_us = kv_clock_now(control->config.clock);

    if (verify->warned_us != 0 && now_us - verify->warned_us < WARN_US)
        return;
    verify->warned_us = now_us;
    kv_log(KV_LOG_WARN,
           "disk: verified: %llu saved blocks were bad: %llu are written again from memory, "
           "and %llu "
           "are forgotten, with those behind them",
           (unsigned long long)n_bad, (unsigned long long)n_mended, (unsigned long long)n_lost);
}

static void batch_end(struct kvs_control *control)
{
    struct kvs_disk_verify *verify = control->disk_verify;
    struct kvs_control_call *call = verify->call;

    for (uint32_t i = 0; i < verify->n_items; i++)
        kvs_prefix_unref(verify->items[i].prefix);
    verify->n_items = 0;
    verify->call = NULL;
    kvs_control_call_end(call);
}

/* What the data threads say of the items counts; `is_kept`: what they have written stays. */
static void settle(struct kvs_control *control, bool is_kept)
{
    struct kvs_disk_verify *verify = control->disk_verify;
    struct kvs_stats *stats = &control->stats;
    uint64_t n_bad = 0, n_mended = 0, n_lost = 0;

    for (uint32_t i = 0; i < verify->n_items; i++) {
        struct kvs_tier_item *item = &verify->items[i];
        const bool is_gone =
            item->prefix->home == NULL; /* it is erased, or was bad with another */
        const bool is_bad = counted(&item->n_bad) > 0;
        const bool was_bad = is_bad || counted(&item->n_mended) > 0;
        const bool is_unread = counted(&item->n_unread) + counted(&item->n_failed) > 0 ||
                               (was_bad && !is_bad && !is_kept);

        if (is_gone)
            continue;
        kvs_count(&stats->disk_scrub_blocks, 1);
        kvs_count(&stats->disk_scrub_bytes, item->block_bytes);
        kvs_count(&stats->disk_scrub_unread, is_unread && !is_bad);
        n_bad += was_bad;
        n_mended += was_bad && !is_bad && !is_unread;
        if (is_bad)
            n_lost += kvs_control_evict_tree(control, item->prefix, KVS_EVICT_BAD);
    }
    kvs_count(&stats->bad_saved_blocks, n_bad);
    kvs_count(&stats->mended_saved_blocks, n_mended);
    kvs_count(&stats->lost_saved_blocks, n_lost);
    if (n_bad > 0)
        warn(control, n_mended, n_bad, n_lost);
    batch_end(control);
    kvs_prefixes_release_step(control);
}

static void synced(void *arg, kv_status_t status, size_t bytes)
{
    (void)bytes;
    settle(arg, status == KV_OK);
}

static void verified(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;
    struct kvs_disk_verify *verify = control->disk_verify;
    bool has_mended = false;

    for (uint32_t i = 0; i < verify->n_items; i++)
        has_mended = has_mended || counted(&verify->items[i].n_mended) > 0;
    if (!has_mended)
        settle(control, true);
    else if (kv_disk_sync(control->disk, synced, control) != KV_OK)
        settle(control, false);
}

/* Begins with the first ones that have not been verified since that time, up to so many bytes, and at
 * least one.  Returns the bytes. */
static uint64_t begin(struct kvs_control *control, uint64_t since_us, uint64_t bytes_most)
{
    struct kvs_disk_verify *verify = control->disk_verify;
    const uint64_t now_us = kv_clock_now(control->config.clock); /* not before since_us */
    uint64_t bytes = 0;

    verify->call = kvs_control_call_internal(control, KV_OP_VERIFY);
    if (verify->call == NULL)
        return 0;
    while (verify->n_items < BLOCKS_AT_ONCE && !is_verified(verify, since_us)) {
        struct kvs_prefix *prefix = verify->first;

        if (bytes > 0 && bytes + prefix->home->block_bytes > bytes_most)
            break;
        bytes += prefix->home->block_bytes;
        kvs_prefix_ref(prefix);
        verify->items[verify->n_items++] = kvs_saver_item(prefix);
        unlist(verify, prefix);
        list_last(verify, prefix, now_us);
    }
    kvs_control_broadcast(verify->call,
                          &(struct kvs_command){.kind = KVS_COMMAND_TIER,
                                                .tier_job = KVS_TIER_VERIFY,
                                                .tier_items = verify->items,
                                                .n_tier_items = verify->n_items},
                          verified);
    return bytes;
}

/* ---- passes ------------------------------------------------------------------------------- */

/* Ends the pass whose blocks have all been verified, and begins the next one if it is due. */
static void turn_pass(struct kvs_control *control, uint64_t now_us)
{
    struct kvs_disk_verify *verify = control->disk_verify;
    struct kvs_stats *stats = &control->stats;

    if (verify->is_in_pass && is_verified(verify, verify->begun_us)) {
        verify->is_in_pass = false;
        kvs_count(&stats->disk_scrub_passes, 1);
        kvs_stat_set(&stats->disk_scrub_pass_us, now_us - verify->begun_us);
    }
    if (!verify->is_in_pass && verify->n > 0 &&
        (verify->begun_us == 0 || now_us >= verify->begun_us + PASS_US)) {
        verify->is_in_pass = true;
        verify->begun_us = verify->due_us = now_us;
        verify->bytes_before = kvs_counted(&stats->disk_scrub_bytes);
    }
    kvs_stat_set(&stats->disk_scrub_pass_bytes,
                 kvs_counted(&stats->disk_scrub_bytes) - verify->bytes_before);
}

static void go_on(struct kvs_control *control, uint64_t now_us)
{
    struct kvs_disk_verify *verify = control->disk_verify;
    const uint64_t rate = control->config.scrub_disk_bytes;
    uint64_t bytes;

    if (verify->wanted_us > 0 && !is_verified(verify, verify->wanted_us)) {
        (void)begin(control, verify->wanted_us, BYTES_AT_ONCE);
        return;
    }
    if (rate == 0 || !verify->is_in_pass || is_verified(verify, verify->begun_us) ||
        now_us < verify->due_us)
        return;
    bytes = begin(control, verify->begun_us, rate);
    if (verify->due_us + LAG_US < now_us)
        verify->due_us = now_us - LAG_US;
    verify->due_us += bytes * UINT64_C(1000000) / rate;
}

void kvs_disk_verify_step(struct kvs_control *control, uint64_t now_us)
{
    struct kvs_disk_verify *verify = control->disk_verify;

    if (verify == NULL || verify->call != NULL)
        return;
    if (verify->wanted_us > 0 && now_us > verify->asked_us + KVS_VERIFY_ASKED_US)
        verify->wanted_us = 0;
    if (control->config.scrub_disk_bytes > 0)
        turn_pass(control, now_us);
    if (!atomic_load(&control->draining))
        go_on(control, now_us);
}

bool kvs_disk_verify_ask(struct kvs_control *control, uint64_t since_us, uint64_t now_us)
{
    struct kvs_disk_verify *verify = control->disk_verify;

    if (verify == NULL)
        return true;
    if (verify->wanted_us < since_us)
        verify->wanted_us = since_us;
    verify->asked_us = now_us;
    return verify->call == NULL && is_verified(verify, since_us);
}

/* ---- start and end ------------------------------------------------------------------------ */

bool kvs_disk_verify_create(struct kvs_control *control)
{
    if (control->saver == NULL)
        return true;
    control->disk_verify = calloc(1, sizeof(*control->disk_verify));
    if (control->disk_verify == NULL)
        return false;
    control->disk_verify->end = &control->disk_verify->first;
    return true;
}

void kvs_disk_verify_destroy(struct kvs_control *control)
{
    struct kvs_disk_verify *verify = control->disk_verify;

    if (verify == NULL)
        return;
    for (uint32_t i = 0; i < verify->n_items; i++)
        kvs_prefix_unref(verify->items[i].prefix);
    free(verify);
    control->disk_verify = NULL;
}

void kvs_disk_verify_check(const struct kvs_control *control)
{
    const struct kvs_disk_verify *verify = control->disk_verify;
    const struct kvs_prefix *prefix;
    uint64_t n_listed = 0, n_saved = 0, before_us = 0;
    size_t cursor = 0;

    while ((prefix = kvs_prefixes_next(control->prefixes, &cursor)) != NULL) {
        assert((prefix->verify_link != NULL) == (prefix->saved == KVS_PREFIX_SAVED));
        n_saved += prefix->verify_link != NULL;
    }
    if (verify == NULL) {
        assert(n_saved == 0);
        return;
    }
    for (prefix = verify->first; prefix != NULL; prefix = prefix->verify_next) {
        assert(*prefix->verify_link == prefix && prefix->verified_us >= before_us);
        before_us = prefix->verified_us;
        n_listed++;
    }
    assert(n_listed == n_saved && n_listed == verify->n && *verify->end == NULL);
}
