/* ops_verify.c - whoever asks has all verified that the node has, in memory and on disk.
 *
 * A request says since when, and is answered at once: whether all has been verified since then, and
 * what has been counted so far.  The node does it as long as somebody asks again and again. */
#include "kvserver/store/control/disk_verify.h"
#include "kvserver/store/control/metrics.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"
#include "kvserver/store/control/saver.h"

#include <stddef.h>

#define TOTAL(control, name) kvs_stats_total(control, offsetof(struct kvs_stats, name))

/* Has the scrubbers go on until all has been verified that was in memory at that time.  Returns
 * whether it is. */
static bool ask_scrubs(struct kvs_control *control, uint64_t since_us, uint64_t now_us)
{
    bool is_done = true;

    control->scrub_asked_us = now_us;
    for (uint32_t i = 0; i < control->n_threads; i++) {
        struct kvs_shard *shard = &control->shard[i];

        if (atomic_load_explicit(&shard->scrub_wanted_us, memory_order_relaxed) < since_us)
            atomic_store_explicit(&shard->scrub_wanted_us, since_us, memory_order_relaxed);
        is_done = is_done && (shard->object_tier == NULL ||
                              atomic_load_explicit(&shard->stats.objects_verified_since_us,
                                                   memory_order_acquire) >= since_us);
        is_done = is_done && atomic_load_explicit(&shard->stats.scrub_since_us,
                                                  memory_order_acquire) >= since_us;
    }
    return is_done;
}

void kvs_verify_expire(struct kvs_control *control, uint64_t now_us)
{
    if (control->scrub_asked_us == 0 || now_us <= control->scrub_asked_us + KVS_VERIFY_ASKED_US)
        return;
    control->scrub_asked_us = 0;
    for (uint32_t i = 0; i < control->n_threads; i++)
        atomic_store_explicit(&control->shard[i].scrub_wanted_us, 0, memory_order_relaxed);
}

/* Rows, what was made of them, and pieces of objects. */
static void count_memory(const struct kvs_control *control, Kvpb__VerifyCounts *counts)
{
    counts->blocks = TOTAL(control, scrub_last_blocks);
    counts->bytes = TOTAL(control, scrub_last_bytes);
    counts->bad = TOTAL(control, bad_rows) + TOTAL(control, bad_codes) +
                  TOTAL(control, bad_centroids) + TOTAL(control, bad_cells) +
                  TOTAL(control, bad_summaries) + TOTAL(control, bad_objects);
    counts->mended = TOTAL(control, mended_rows) + TOTAL(control, mended_codes) +
                     TOTAL(control, mended_centroids) + TOTAL(control, mended_cells) +
                     TOTAL(control, mended_summaries) + TOTAL(control, mended_objects);
    counts->refused = TOTAL(control, rows_bad) + TOTAL(control, objects_bad);
}

static void count_disk(struct kvs_control *control, uint64_t now_us, Kvpb__VerifyCounts *counts)
{
    struct kvs_saver_facts facts;

    kvs_saver_get_facts(control, now_us, &facts);
    counts->blocks = TOTAL(control, disk_scrub_blocks);
    counts->bytes = TOTAL(control, disk_scrub_bytes);
    counts->bad = TOTAL(control, bad_saved_blocks);
    counts->mended = TOTAL(control, mended_saved_blocks);
    counts->lost = TOTAL(control, lost_saved_blocks);
    counts->unread = TOTAL(control, disk_scrub_unread);
    counts->all_bytes = facts.saved_bytes + TOTAL(control, saved_object_bytes);
}

static void verify(struct kvs_control_call *call, const Kvpb__VerifyRequest *request)
{
    struct kvs_control *control = call->control;
    const uint64_t now_us = kv_clock_now(control->config.clock);
    const uint64_t since_us = request->since_us > 0 ? request->since_us : now_us;
    Kvpb__VerifyReply reply = KVPB__VERIFY_REPLY__INIT;
    Kvpb__VerifyCounts memory = KVPB__VERIFY_COUNTS__INIT, disk = KVPB__VERIFY_COUNTS__INIT;
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();
    bool is_done;

    if (since_us > now_us) {
        kvs_control_refuse(call, KV_INVALID, "verify: since a time that is still to come");
        return;
    }
    if (atomic_load(&control->draining)) {
        kvs_control_refuse(call, KV_DRAINING, "verify: the node is draining");
        return;
    }
    is_done = ask_scrubs(control, since_us, now_us);
    is_done = kvs_disk_verify_ask(control, since_us, now_us) && is_done;
    count_memory(control, &memory);
    count_disk(control, now_us, &disk);
    memory.all_bytes = TOTAL(control, memory_rows) + TOTAL(control, memory_codes) +
                       TOTAL(control, object_bytes);
    reply.outcome = &outcome;
    reply.since_us = since_us;
    reply.is_done = is_done;
    reply.memory = &memory;
    reply.disk = &disk;
    kvs_control_reply(call, &reply.base);
}

void kvs_control_verify(struct kvs_control_call *call)
{
    Kvpb__VerifyRequest *request = kvs_call_unpack(call, &kvpb__verify_request__descriptor);

    if (request == NULL)
        return;
    verify(call, request);
    kvpb__verify_request__free_unpacked(request, NULL);
}
