/* ops_save.c - whoever asks has what a session shares saved on disk without delay.
 *
 * What a session shares are the blocks that it was opened with or has published, as far as they are in
 * the index: no rows behind the last whole one of these, and none at all without names.  A request is
 * answered at once, with how far that is, and the client asks again; nothing of it stays here.  The
 * first one has what waits begin, and says when that was, and up to where: what is published later is
 * not waited for.  A request fails as soon as a try in vain since then shows that waiting is no use. */
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"
#include "kvserver/store/control/saver.h"

/* Returns the first that is not saved of a prefix and those before it; NULL: all are. */
static const struct kvs_prefix *first_unsaved(const struct kvs_prefix *prefix)
{
    const struct kvs_prefix *first = NULL;

    for (; prefix != NULL && prefix->saved != KVS_PREFIX_SAVED; prefix = prefix->parent)
        first = prefix;
    return first;
}

static void
reply(struct kvs_control_call *call, uint64_t since_us, uint32_t saved, uint32_t shared)
{
    Kvpb__SaveReply message = KVPB__SAVE_REPLY__INIT;
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();

    message.outcome = &outcome;
    message.since_us = since_us;
    message.saved_tokens = saved;
    message.shared_tokens = shared;
    kvs_control_reply(call, &message.base);
}

/* Returns the session that the request names, or NULL after refusing the call. */
static struct kvs_session *session_of(struct kvs_control_call *call,
                                      const Kvpb__SaveRequest *request)
{
    struct kvs_session *session;

    if (request->session_id.len > 0)
        return kvs_session_of_id(call, &request->session_id);
    session = kvs_session_of(call, request->session_index, &request->token);
    if (session != NULL && request->generation != session->generation) {
        kvs_control_refuse(call, KV_STALE, "save: session %u is at generation %u, not %u",
                           session->index, session->generation, request->generation);
        return NULL;
    }
    return session;
}

static void save(struct kvs_control_call *call, const Kvpb__SaveRequest *request)
{
    struct kvs_control *control = call->control;
    const uint64_t now_us = kv_clock_now(control->config.clock);
    const uint64_t since_us = request->since_us > 0 ? request->since_us : now_us;
    struct kvs_session *session = session_of(call, request);
    const struct kvs_prefix *unsaved;
    struct kvs_prefix *prefix;
    uint32_t saved, shared, wanted;
    kv_status_t status = KV_OK;
    const char *why = "";

    if (session == NULL)
        return;
    if (since_us > now_us) {
        kvs_control_refuse(call, KV_INVALID, "save: since a time that is still to come");
        return;
    }
    if (session->position >= session->model->info.schema.n_units) {
        reply(call, since_us, UINT32_MAX, UINT32_MAX);
        return;
    }
    if (control->saver == NULL) {
        kvs_control_refuse(call, KV_UNSUPPORTED, "save: the node has no disk (--disk)");
        return;
    }
    if (session->prefix != NULL && session->prefix->home == NULL)
        kvs_session_follow_prefix(control, session);
    prefix = session->prefix;
    shared = prefix != NULL ? (prefix->depth + 1) * KV_BLOCK_TOKENS : 0;
    wanted = request->since_us > 0 && request->tokens < shared ? request->tokens : shared;
    if (prefix != NULL && request->since_us == 0)
        kvs_saver_hurry(control, prefix);
    unsaved = first_unsaved(prefix);
    saved = unsaved != NULL ? unsaved->depth * KV_BLOCK_TOKENS : shared;
    if (saved < wanted)
        status = kvs_saver_failure(control, unsaved, since_us, &why);
    if (status != KV_OK)
        kvs_control_refuse(call, status, "save: %u of %u tokens are saved: %s", saved, wanted,
                           why);
    else
        reply(call, since_us, saved, shared);
}

void kvs_control_save(struct kvs_control_call *call)
{
    Kvpb__SaveRequest *request = kvs_call_unpack(call, &kvpb__save_request__descriptor);

    if (request == NULL)
        return;
    save(call, request);
    kvpb__save_request__free_unpacked(request, NULL);
}
