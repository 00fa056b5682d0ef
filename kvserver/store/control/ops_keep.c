/* ops_keep.c - what a client says of prefixes by name: pin, unpin, evict, hint.
 *
 * With a session, a block's name is looked up where the session's blocks are.  Without one, where a
 * prompt was placed is not known: all prefixes are looked through, some in each step of the control
 * thread, one call after the other.  What enters or leaves meanwhile may be missed. */
#include "kvserver/base/slice.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"

#include <string.h>

enum {
    LOOKS_AT_ONCE = 64, /* between two looks at the clock */
    SLICES = 4,         /* in one step: ten million prefixes take some seconds */
    WAITING_MAX = 64, /* a small part of all calls (KVS_CALLS_MAX): others go on beside them */
};

static void reply(struct kvs_control_call *call)
{
    Kvpb__PrefixReply message = KVPB__PREFIX_REPLY__INIT;
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();

    message.outcome = &outcome;
    message.blocks = call->keep.n_blocks;
    kvs_control_reply(call, &message.base);
}

/* Evicts the call's prefix and those behind it.  Returns false if some are left. */
static bool evict_some(struct kvs_control_call *call, struct kv_slice *slice)
{
    struct kvs_control *control = call->control;
    struct kvs_prefix *root = call->prefix, *last;

    for (last = root->home != NULL ? kvs_prefix_last(root) : NULL; last != NULL;) {
        struct kvs_prefix *parent = last->parent;
        const bool is_root = last == root;

        kvs_control_evict(control, last, KVS_EVICT_ASKED);
        call->keep.n_blocks++;
        last = is_root ? NULL : kvs_prefix_last(parent);
        if (last != NULL && kv_slice_over(slice))
            return false;
    }
    call->prefix = NULL;
    kvs_prefix_release(control->prefixes, root);
    return true;
}

static void apply(struct kvs_control_call *call, struct kvs_prefix *prefix)
{
    struct kvs_prefixes *prefixes = call->control->prefixes;

    switch (call->keep.verb) {
    case KV_PREFIX_PIN:
        kvs_prefix_pin(prefixes, prefix, call->keep.until_us);
        break;
    case KV_PREFIX_UNPIN:
        kvs_prefix_unpin(prefixes, prefix);
        break;
    case KV_PREFIX_HINT:
        kvs_prefix_use(prefixes, prefix, call->keep.until_us);
        break;
    case KV_PREFIX_EVICT:
        kvs_prefix_hold(prefixes, prefix); /* until it is gone: evict_some() */
        call->prefix = prefix;
        return;
    }
    call->keep.n_blocks++;
}

/* Whether the call names the prefix: as it is, or as a table tells it. */
static bool is_named(const struct kvs_keep *keep, const struct kvs_prefix *prefix)
{
    const struct kv_id128 told = kvs_prefix_name_told(&prefix->name);

    return memcmp(&prefix->name, &keep->name, sizeof(keep->name)) == 0 ||
           memcmp(&told, &keep->name, sizeof(keep->name)) == 0;
}

/* Goes on with the first call.  Returns true when it is done. */
static bool walk(struct kvs_control_call *call, struct kv_slice *slice)
{
    struct kvs_control *control = call->control;
    struct kvs_prefix *prefix;

    /* Prefixes come and go between two slices, and what the call evicts goes in the middle. */
    kvs_prefixes_watch(control->prefixes, &call->keep.cursor);
    for (uint32_t n = 1;; n++) {
        if (call->prefix != NULL && !evict_some(call, slice))
            return false;
        if (!call->keep.is_walk)
            return true;
        prefix = kvs_prefixes_next(control->prefixes, &call->keep.cursor);
        if (prefix == NULL)
            return true;
        if (prefix->home->place.tenant == call->tenant && is_named(&call->keep, prefix))
            apply(call, prefix);
        if (n % LOOKS_AT_ONCE == 0 && kv_slice_over(slice))
            return false;
    }
}

void kvs_keep_step(struct kvs_control *control)
{
    for (int i = 0; i < SLICES && control->keeping != NULL; i++) {
        struct kvs_control_call *call = control->keeping;
        struct kv_slice slice = kv_slice_begin(control->config.clock, 1);

        if (!walk(call, &slice))
            continue;
        kvs_prefixes_watch(control->prefixes, NULL);
        control->keeping = call->keep.next;
        reply(call);
    }
}

/* Continues when it is the call's turn.  Refuses it if too many wait for theirs. */
static void enqueue(struct kvs_control_call *call)
{
    struct kvs_control_call **end = &call->control->keeping;
    unsigned n = 0;

    for (; *end != NULL; n++)
        end = &(*end)->keep.next;
    if (n < WAITING_MAX)
        *end = call;
    else
        kvs_control_refuse(call, KV_BUSY, "prefix: more than %d are looked for", WAITING_MAX);
}

static bool check(struct kvs_control_call *call, const Kvpb__PrefixRequest *request)
{
    if (request->verb < KV_PREFIX_PIN || request->verb > KV_PREFIX_HINT)
        kvs_control_refuse(call, KV_INVALID, "prefix: verb %u: unknown", request->verb);
    else if ((request->name.len != 0 && request->name.len != sizeof(struct kv_id128)) ||
             (request->session_id.len != 0 &&
              request->session_id.len != sizeof(struct kv_id128)) ||
             request->name.len + request->session_id.len == 0)
        kvs_control_refuse(
            call, KV_INVALID,
            "prefix: a name of %zu bytes, a session's id of %zu: 16 each, or none "
            "of one of them",
            request->name.len, request->session_id.len);
    else if (request->verb == KV_PREFIX_HINT && request->for_ms > KV_PREFIX_HINT_MAX_MS)
        kvs_control_refuse(call, KV_INVALID, "prefix: hint: in %u ms: limit %u",
                           request->for_ms, KV_PREFIX_HINT_MAX_MS);
    else
        return true;
    return false;
}

/* Returns what the session has of that name, or, without one, the deepest that it has; NULL:
 * nothing. */
static struct kvs_prefix *prefix_of_session(struct kvs_control_call *call,
                                            const Kvpb__PrefixRequest *request)
{
    struct kvs_control *control = call->control;
    struct kvs_prefix *prefix;
    struct kv_id128 id, name;
    const struct kvs_session *session = kvs_pb_get_id(&request->session_id, &id)
                                            ? kv_map_get(control->session_of_id, &id)
                                            : NULL;

    if (session == NULL || session->tenant != call->tenant)
        return NULL;
    if (kvs_pb_get_id(&request->name, &name)) {
        const struct kvs_prefix_place place = kvs_session_prefix_place(session);

        return kvs_prefixes_get(control->prefixes, &place, &name);
    }
    prefix = session->prefix;
    return prefix != NULL && prefix->home != NULL ? prefix : NULL;
}

static void keep(struct kvs_control_call *call, const Kvpb__PrefixRequest *request)
{
    const uint64_t now_us = kv_clock_now(call->control->config.clock);
    struct kvs_prefix *prefix;

    if (!check(call, request))
        return;
    call->keep.verb = request->verb;
    call->keep.until_us = request->verb == KV_PREFIX_PIN && request->for_ms == 0
                              ? UINT64_MAX
                              : now_us + request->for_ms * UINT64_C(1000);
    if (request->session_id.len != 0) {
        prefix = prefix_of_session(call, request);
        if (prefix != NULL)
            apply(call, prefix);
    } else {
        call->keep.is_walk = kvs_pb_get_id(&request->name, &call->keep.name);
    }
    if (call->prefix == NULL && !call->keep.is_walk)
        reply(call);
    else
        enqueue(call);
}

void kvs_control_prefix(struct kvs_control_call *call)
{
    Kvpb__PrefixRequest *request = kvs_call_unpack(call, &kvpb__prefix_request__descriptor);

    if (request == NULL)
        return;
    keep(call, request);
    kvpb__prefix_request__free_unpacked(request, NULL);
}
