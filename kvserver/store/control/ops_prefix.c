/* ops_prefix.c - prefixes that sessions share by content: what an open matches, publish, and match.
 *
 * A publish asks the session's data threads for its blocks that are complete; each puts its refs
 * into prefixes that are not in the index yet.  When all have done so, those that all have, and
 * whose names are new here, go into the index.  The others give their refs back. */
#include "kvserver/base/config.h"
#include "kvserver/base/log.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"
#include "kvserver/store/control/saver.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUOTA_WARNING_US = 60 * 1000 * 1000,
};

struct kvs_prefix_place kvs_session_prefix_place(const struct kvs_session *session)
{
    return (struct kvs_prefix_place){.tenant = session->tenant,
                                     .root = session->root,
                                     .n_nodes = session->n_nodes,
                                     .position = session->position};
}

/* Returns how many names the field has; UINT32_MAX: it is malformed. */
static uint32_t count_names(const ProtobufCBinaryData *names)
{
    const size_t n = names->len / sizeof(struct kv_id128);

    return names->len % sizeof(struct kv_id128) == 0 && n <= KV_WIRE_NAMES_MAX ? (uint32_t)n
                                                                               : UINT32_MAX;
}

/* The names as they lie in a message: they are bytes, and need no alignment. */
static const struct kv_id128 *names_in(const ProtobufCBinaryData *names)
{
    return (const struct kv_id128 *)(const void *)names->data;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- what a session has ------------------------------------------------------------------ */

void kvs_prefix_come_back(struct kvs_control *control, struct kvs_prefix *prefix)
{
    kvs_events_back(control, prefix);
    kvs_prefix_set_here(control->prefixes, prefix);
}

/* The session has this prefix and those before it, or none.  Those that it was opened with are before
 * the one that it has published, and must not go: also if another session's copy of that is away, for
 * only what is here keeps what is before it here. */
static void
hold(struct kvs_control *control, struct kvs_session *session, struct kvs_prefix *prefix)
{
    if (prefix != NULL) {
        kvs_prefix_hold(control->prefixes, prefix);
        kvs_prefix_come_back(control, prefix);
    }
    kvs_session_wake(control, session);
    if (session->prefix != NULL)
        kvs_prefix_release(control->prefixes, session->prefix);
    control->n_sharing += (prefix != NULL) - (session->prefix != NULL);
    session->prefix = prefix;
}

void kvs_session_follow_prefix(struct kvs_control *control, struct kvs_session *session)
{
    const struct kvs_prefix_place place = kvs_session_prefix_place(session);
    struct kvs_prefix *left =
        kvs_prefixes_find(control->prefixes, &place, &session->model->rows_id, session->names,
                          least(session->prefix->depth + 1, session->n_names));

    if (!session->is_resting || left == NULL) {
        hold(control, session, left);
        return;
    }
    kvs_prefix_hold(control->prefixes, left);
    kvs_prefix_rest(control->prefixes, left, session->rested_us);
    kvs_prefix_wake(control->prefixes, session->prefix);
    kvs_prefix_release(control->prefixes, session->prefix);
    session->prefix = left;
}

static kv_status_t
add_names(struct kvs_session *session, uint32_t first, const struct kv_id128 *names, uint32_t n)
{
    struct kv_id128 *larger;

    if (first + n > session->n_names) {
        larger = realloc(session->names, (first + n) * sizeof(names[0]));
        if (larger == NULL)
            return KV_NO_MEMORY;
        session->names = larger;
        session->n_names = first + n;
    }
    memcpy(session->names + first, names, n * sizeof(names[0]));
    return KV_OK;
}

void kvs_session_leave_prefix(struct kvs_control *control, struct kvs_session *session)
{
    hold(control, session, NULL);
    free(session->names);
    session->names = NULL;
    session->n_names = 0;
}

void kvs_session_cut_names(struct kvs_control *control,
                           struct kvs_session *session,
                           uint32_t tokens)
{
    const struct kvs_prefix_place place = kvs_session_prefix_place(session);

    if (session->n_names <= tokens / KV_BLOCK_TOKENS)
        return;
    session->n_names = tokens / KV_BLOCK_TOKENS;
    hold(control, session,
         kvs_prefixes_find(control->prefixes, &place, &session->model->rows_id, session->names,
                           session->n_names));
}

kv_status_t kvs_session_share_names(struct kvs_control *control,
                                    const struct kvs_session *parent,
                                    struct kvs_session *child,
                                    uint32_t tokens)
{
    const struct kvs_prefix_place place = kvs_session_prefix_place(parent);
    const uint32_t n =
        tokens / KV_BLOCK_TOKENS < parent->n_names ? tokens / KV_BLOCK_TOKENS : parent->n_names;

    if (n == 0)
        return KV_OK;
    if (add_names(child, 0, parent->names, n) != KV_OK)
        return KV_NO_MEMORY;
    hold(control, child,
         kvs_prefixes_find(control->prefixes, &place, &child->model->rows_id, child->names, n));
    return KV_OK;
}

/* ---- open -------------------------------------------------------------------------------- */

void kvs_session_count_match(struct kvs_control *control, const struct kvs_session *session)
{
    const struct kvs_prefix_place place = kvs_session_prefix_place(session);
    const uint32_t n_matched = session->matched / KV_BLOCK_TOKENS;
    bool is_evicted;

    if (session->n_asked == 0)
        return;
    is_evicted = n_matched < session->n_asked &&
                 kvs_prefixes_had(control->prefixes, &place, &session->names[n_matched]);
    kvs_reuse_count(&control->reuse, place.tenant, (uint64_t)session->n_asked * KV_BLOCK_TOKENS,
                    session->matched, session->matched_on_disk,
                    is_evicted ? KVS_REUSE_EVICTED : KVS_REUSE_NEW);
}

void kvs_match_elsewhere(struct kvs_control *control,
                         uint32_t tenant,
                         const ProtobufCBinaryData *names,
                         uint32_t match_blocks)
{
    const uint32_t n = count_names(names);

    if (n != UINT32_MAX && least(n, match_blocks) > 0)
        kvs_reuse_count(&control->reuse, tenant,
                        (uint64_t)least(n, match_blocks) * KV_BLOCK_TOKENS, 0, 0,
                        KVS_REUSE_ELSEWHERE);
}

/* What is away is the end of a prefix. */
static uint32_t count_away(const struct kvs_prefix *prefix)
{
    uint32_t n = 0;

    for (; prefix != NULL && prefix->is_away; prefix = prefix->parent)
        n++;
    return n;
}

kv_status_t kvs_session_match(struct kvs_control *control,
                              struct kvs_session *session,
                              const ProtobufCBinaryData *names,
                              uint32_t match_blocks,
                              uint64_t writer)
{
    const struct kvs_prefix_place place = kvs_session_prefix_place(session);
    uint32_t n = count_names(names);
    struct kvs_prefix *prefix = NULL;
    kv_status_t status = KV_OK;

    if (n == UINT32_MAX)
        return KV_INVALID;
    if (n > 0)
        status = add_names(session, 0, names_in(names), n);
    if (status != KV_OK)
        return status;
    n = least(n, least(match_blocks, session->tokens_max / KV_BLOCK_TOKENS));
    session->n_asked = n;
    if (n > 0) {
        prefix = kvs_prefixes_find(control->prefixes, &place, &session->model->rows_id,
                                   session->names, n);
        prefix = kvs_prefix_fit(prefix, writer);
    }
    if (prefix != NULL) {
        session->writers = kvs_prefix_writers(prefix, writer);
        session->matched = (prefix->depth + 1) * KV_BLOCK_TOKENS;
        session->matched_on_disk = count_away(prefix) * KV_BLOCK_TOKENS;
        hold(control, session, prefix);
        kvs_prefix_use(control->prefixes, prefix, kv_clock_now(control->config.clock));
    } else {
        session->writers = kv_writers_create(NULL, 0, writer);
    }
    return session->writers != NULL ? KV_OK : KV_NO_MEMORY;
}

void kvs_session_found_bad(struct kvs_control *control,
                           const struct kvs_session *session,
                           uint32_t tokens)
{
    const struct kvs_prefix_place place = kvs_session_prefix_place(session);
    const uint32_t block = tokens / KV_BLOCK_TOKENS;
    struct kvs_prefix *prefix;

    prefix = kvs_prefixes_find(control->prefixes, &place, &session->model->rows_id,
                               session->names, block + 1);
    if (prefix != NULL && prefix->depth == block)
        (void)kvs_control_evict_tree(control, prefix, KVS_EVICT_BAD);
    kvs_prefixes_release_step(control);
}

/* ---- publish ----------------------------------------------------------------------------- */

uint64_t kvs_block_bytes(const kv_schema_t *schema, uint32_t n_nodes, uint32_t position)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < schema->n_layers; i++)
        for (uint32_t head = 0; head < schema->layers[i].n_kv_heads; head++)
            if (kv_placement_unit_position(kv_schema_unit(schema, i, head), n_nodes) ==
                position)
                bytes += schema->layers[i].row_bytes + sizeof(uint32_t);
    return bytes * KV_BLOCK_TOKENS;
}

/* Whose the block's rows are.  Returns false if out of memory. */
static bool name_writers(struct kvs_prefix *prefix, const struct kv_writers *writers)
{
    const uint32_t begin = prefix->depth * KV_BLOCK_TOKENS, end = begin + KV_BLOCK_TOKENS;
    const size_t bytes = kv_writers_slice_bytes(writers, begin, end);
    struct kv_writers *slice = malloc(bytes);

    if (slice == NULL)
        return false;
    kv_writers_slice(writers, begin, end, slice);
    if (slice->n_runs > 1) {
        prefix->mixed = slice;
        return true;
    }
    prefix->writer = slice->runs[0].writer;
    free(slice);
    return true;
}

/* At most once a minute, whoever it is. */
static void warn_of_quota(struct kvs_control *control, uint32_t tenant, uint64_t block_bytes)
{
    const uint64_t now_us = kv_clock_now(control->config.clock);
    char quota[16];

    if (control->quota_warned_us != 0 && now_us - control->quota_warned_us < QUOTA_WARNING_US)
        return;
    control->quota_warned_us = now_us;
    kv_config_format_size(control->config.tenant_quota, quota, sizeof(quota));
    kv_log(KV_LOG_WARN, "tenant %u: its quota of %s %s: blocks that it publishes are not kept",
           tenant, quota,
           block_bytes > control->config.tenant_quota ? "is less than one block"
                                                      : "is full, and nothing of it can go");
}

/* Puts a prefix into the index.  Returns the one that has its name from now on, held; NULL:
 * there is no room, and it stays the caller's. */
static struct kvs_prefix *index_one(struct kvs_control_call *call,
                                    struct kvs_prefix *parent,
                                    const struct kvs_prefix_home *home,
                                    struct kvs_prefix *prefix)
{
    struct kvs_control *control = call->control;
    struct kvs_prefix *old;

    old = kvs_prefixes_get(control->prefixes, &home->place, &prefix->name);
    if (old != NULL) {
        /* A name says what is before it, and of which model.  A client that says otherwise gets
         * nothing. */
        if (old->parent != parent ||
            memcmp(&old->home->rows_id, &home->rows_id, sizeof(home->rows_id)) != 0)
            return NULL;
        kvs_prefix_hold(control->prefixes, old);
        kvs_prefix_give_back(control, prefix);
        return old;
    }
    if (!kvs_prefixes_admit(control, home->place.tenant, home->block_bytes)) {
        kvs_count(&control->stats.prefixes_refused, 1);
        warn_of_quota(control, home->place.tenant, home->block_bytes);
        return NULL;
    }
    /* Blocks in memory are behind others in memory.  Those come back when somebody needs them. */
    if (parent != NULL)
        kvs_prefix_come_back(control, parent);
    if (!name_writers(prefix, call->session->writers) ||
        !kvs_prefixes_add(control->prefixes, parent, home, prefix,
                          kv_clock_now(control->config.clock)))
        return NULL;
    kvs_count(&control->stats.prefixes_published, 1);
    kvs_events_stored(control, prefix);
    kvs_saver_add(control, prefix);
    return prefix;
}

/* Puts what all data threads have into the index; the list is not the call's any more. */
static struct kvs_prefix *index_list(struct kvs_control_call *call, uint32_t n_complete)
{
    struct kvs_control *control = call->control;
    const struct kvs_session *session = call->session;
    const struct kvs_prefix_home home = {
        .place = kvs_session_prefix_place(session),
        .rows_id = session->model->rows_id,
        .n_units = session->model->info.schema.n_units,
        .block_bytes =
            kvs_block_bytes(&session->model->info.schema, session->n_nodes, session->position)};
    struct kvs_prefix *parent = call->prefix, *next, *added;
    /* It may have been found bad meanwhile. */
    bool goes_on = parent == NULL || parent->home != NULL;

    /* The last one is held until the next is behind it: what makes room for that must not be it. */
    for (struct kvs_prefix *prefix = call->prefixes; prefix != NULL; prefix = next) {
        next = prefix->next;
        prefix->next = NULL;
        goes_on = goes_on && prefix->depth < n_complete;
        added = goes_on ? index_one(call, parent, &home, prefix) : NULL;
        goes_on = added != NULL;
        if (!goes_on) {
            kvs_prefix_give_back(control, prefix);
            continue;
        }
        if (parent != NULL)
            kvs_prefix_release(control->prefixes, parent);
        parent = added;
    }
    call->prefix = parent;
    call->prefixes = NULL;
    return parent != NULL && parent->home != NULL ? parent : NULL;
}

static void publish_done(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;
    struct kvs_session *session = call->session;
    Kvpb__PublishReply reply = KVPB__PUBLISH_REPLY__INIT;
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();
    struct kvs_prefix *deepest = NULL;

    session->busy = false;
    reply.tokens = UINT32_MAX;
    if (call->has_units) {
        deepest = index_list(call, call->tokens / KV_BLOCK_TOKENS);
        reply.tokens = deepest != NULL ? (deepest->depth + 1) * KV_BLOCK_TOKENS : 0;
        /* It may be less than the session has had before. */
        if (deepest != NULL && (session->prefix == NULL || session->prefix->home == NULL ||
                                deepest->depth >= session->prefix->depth))
            hold(control, session, deepest);
        if (call->prefix != NULL)
            kvs_prefix_release(control->prefixes, call->prefix);
        call->prefix = NULL; /* the session's, by now */
        if (reply.tokens > session->shared_tokens)
            session->shared_tokens = reply.tokens;
    }
    kvs_prefixes_release_step(control);
    reply.outcome = &outcome;
    kvs_control_reply(call, &reply.base);
}

/* Lists prefixes for the names of [first, end).  Returns false if out of memory. */
static bool make_list(struct kvs_control_call *call, uint32_t first, uint32_t end)
{
    const struct kvs_session *session = call->session;
    struct kvs_prefix **tail = &call->prefixes;

    for (uint32_t i = first; i < end; i++) {
        *tail =
            kvs_prefix_create(&session->names[i], i, session->first_thread, session->n_threads);
        if (*tail == NULL)
            return false;
        tail = &(*tail)->next;
    }
    return true;
}

/* Gives each prefix its tokens, if there are readers of events. */
static bool give_tokens(struct kvs_control_call *call, const Kvpb__PublishRequest *request)
{
    const size_t bytes = KV_BLOCK_TOKENS * sizeof(uint32_t);

    if (request->tokens.len == 0 || call->control->config.events == NULL)
        return true;
    for (struct kvs_prefix *prefix = call->prefixes; prefix != NULL; prefix = prefix->next) {
        if (prefix->depth < request->first_block)
            continue;
        prefix->tokens = malloc(bytes);
        if (prefix->tokens == NULL)
            return false;
        memcpy(prefix->tokens,
               request->tokens.data + (prefix->depth - request->first_block) * bytes, bytes);
    }
    return true;
}

/* Returns false after refusing the call. */
static bool check_publish(struct kvs_control_call *call,
                          const struct kvs_session *session,
                          const Kvpb__PublishRequest *request)
{
    const uint32_t n = count_names(&request->block_names), first = request->first_block;

    if (request->generation != session->generation) {
        kvs_control_refuse(call, KV_STALE, "publish: session %u is at generation %u, not %u",
                           session->index, session->generation, request->generation);
        return false;
    }
    if (n == UINT32_MAX || first > session->n_names ||
        first > session->tokens_max / KV_BLOCK_TOKENS ||
        n > session->tokens_max / KV_BLOCK_TOKENS - first) {
        kvs_control_refuse(call, KV_INVALID,
                           "publish: names of %zu bytes from block %u on: %u blocks have names",
                           request->block_names.len, first, session->n_names);
        return false;
    }
    if (request->tokens.len != 0 &&
        request->tokens.len != (size_t)n * KV_BLOCK_TOKENS * sizeof(uint32_t)) {
        kvs_control_refuse(call, KV_INVALID, "publish: tokens: %zu bytes, for %u blocks",
                           request->tokens.len, n);
        return false;
    }
    for (uint32_t i = first; i < session->n_names && i - first < n; i++) {
        if (memcmp(&session->names[i], &names_in(&request->block_names)[i - first],
                   sizeof(session->names[0])) != 0) {
            kvs_control_refuse(call, KV_CONFLICT, "publish: block %u has another name", i);
            return false;
        }
    }
    return true;
}

static void publish(struct kvs_control_call *call, const Kvpb__PublishRequest *request)
{
    struct kvs_control *control = call->control;
    struct kvs_session *session = kvs_session_of(call, request->session_index, &request->token);
    const uint32_t n = count_names(&request->block_names);

    if (session == NULL || !check_publish(call, session, request))
        return;
    const struct kvs_prefix_place place = kvs_session_prefix_place(session);
    const uint32_t end = request->first_block + n;

    if (n > 0 &&
        add_names(session, request->first_block, names_in(&request->block_names), n) != KV_OK) {
        kvs_control_refuse(call, KV_NO_MEMORY, "publish: out of memory");
        return;
    }
    call->session = session;
    /* From the first one on that is not here: what was evicted meanwhile comes back. */
    call->prefix = kvs_prefixes_find(control->prefixes, &place, &session->model->rows_id,
                                     session->names, end);
    if (call->prefix != NULL)
        kvs_prefix_hold(control->prefixes, call->prefix);
    if (!make_list(call, call->prefix != NULL ? call->prefix->depth + 1 : 0, end) ||
        !give_tokens(call, request)) {
        kvs_control_refuse(call, KV_NO_MEMORY, "publish: out of memory");
        return;
    }
    session->busy = true;
    call->tokens = UINT32_MAX;
    kvs_control_broadcast_session(call, session,
                                  &(struct kvs_command){.kind = KVS_COMMAND_PREFIX_PUBLISH,
                                                        .index = session->index,
                                                        .prefix = call->prefixes},
                                  publish_done);
}

void kvs_control_publish(struct kvs_control_call *call)
{
    Kvpb__PublishRequest *request = kvs_call_unpack(call, &kvpb__publish_request__descriptor);

    if (request == NULL)
        return;
    publish(call, request);
    kvpb__publish_request__free_unpacked(request, NULL);
}

void kvs_call_drop_prefixes(struct kvs_control_call *call)
{
    struct kvs_control *control = call->control;

    if (call->prefix != NULL)
        kvs_prefix_release(control->prefixes, call->prefix);
    kvs_prefixes_drop(control, call->prefixes);
    call->prefix = call->prefixes = NULL;
}

/* ---- match ------------------------------------------------------------------------------- */

/* What is away of a prompt is its end.  Returns how many tiers have some of it. */
static size_t
tiers_of(const struct kvs_prefix *prefix, Kvpb__MatchTier *tiers, Kvpb__MatchTier **ret_list)
{
    const enum kvs_medium media[] = {KVS_MEDIUM_CPU, KVS_MEDIUM_DISK};
    const struct kvs_prefix *here = prefix;
    uint32_t ends[2] = {0}, begin = 0;
    size_t n = 0;

    while (here != NULL && here->is_away)
        here = here->parent;
    ends[0] = here != NULL ? (here->depth + 1) * KV_BLOCK_TOKENS : 0;
    ends[1] = prefix != NULL ? (prefix->depth + 1) * KV_BLOCK_TOKENS : 0;
    for (int i = 0; i < 2; i++) {
        if (ends[i] == begin)
            continue;
        tiers[n] = (Kvpb__MatchTier)KVPB__MATCH_TIER__INIT;
        tiers[n].medium = (char *)kvs_medium_name(media[i]);
        tiers[n].end = begin = ends[i];
        ret_list[n] = &tiers[n];
        n++;
    }
    return n;
}

static void match(struct kvs_control_call *call, const Kvpb__MatchRequest *request)
{
    struct kvs_control *control = call->control;
    const uint32_t n = count_names(&request->block_names);
    Kvpb__MatchReply reply = KVPB__MATCH_REPLY__INIT;
    Kvpb__MatchTier tiers[2], *list[2];
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();

    if (n == UINT32_MAX || !kvs_is_placement(request->placement)) {
        kvs_control_refuse(call, KV_INVALID, "match: invalid placement, or names of %zu bytes",
                           request->block_names.len);
        return;
    }
    const struct kvs_prefix_place place = {.tenant = call->tenant,
                                           .root = request->placement->root,
                                           .n_nodes = request->placement->n_nodes,
                                           .position = request->placement->position};
    const struct kvs_prefix *prefix =
        kvs_prefixes_find(control->prefixes, &place, NULL, names_in(&request->block_names), n);

    reply.outcome = &outcome;
    reply.tokens = prefix != NULL ? (prefix->depth + 1) * KV_BLOCK_TOKENS : 0;
    reply.tiers = list;
    reply.n_tiers = tiers_of(prefix, tiers, list);
    reply.n_units = prefix != NULL ? prefix->home->n_units : 0;
    kvs_control_reply(call, &reply.base);
}

void kvs_control_match(struct kvs_control_call *call)
{
    Kvpb__MatchRequest *request = kvs_call_unpack(call, &kvpb__match_request__descriptor);

    if (request == NULL)
        return;
    match(call, request);
    kvpb__match_request__free_unpacked(request, NULL);
}
