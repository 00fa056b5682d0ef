/* tables.c - the node's tables of its state, for kvctl. */
#include "kvserver/base/token.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/control/metrics.h"
#include "kvserver/store/control/saver.h"
#include "proto/kvstore.pb-c.h"

#include <stdlib.h>
#include <string.h>

enum {
    PREFIXES_MAX = 1000, /* lines */
    TENANTS_MAX = 1000,
};

/* A table that grows line by line; `failed` is set by the first allocation that fails. */
struct builder {
    char *columns[32];
    uint32_t n_columns;
    Kvpb__Row **rows;
    size_t n_rows, room;
    const struct kvs_session_size *sizes; /* (n_sizes) for the table of sessions */
    uint32_t n_sizes;
    bool failed;
};

static void columns(struct builder *table, const char *names)
{
    /* Names are separated by spaces; they live in one copy, freed with the first column. */
    char *copy = strdup(names), *state = NULL;

    if (copy == NULL) {
        table->failed = true;
        return;
    }
    for (char *name = strtok_r(copy, " ", &state); name != NULL;
         name = strtok_r(NULL, " ", &state))
        table->columns[table->n_columns++] = name;
}

/* Adds a line; its cells follow from left to right.  After a failure, all functions do nothing,
 * so that callers test `failed` once, at the end. */
static Kvpb__Row *row(struct builder *table)
{
    if (table->failed)
        return NULL;
    if (table->n_rows == table->room) {
        size_t room = table->room > 0 ? 2 * table->room : 64;
        Kvpb__Row **rows = realloc(table->rows, room * sizeof(*rows));
        if (rows == NULL) {
            table->failed = true;
            return NULL;
        }
        table->rows = rows;
        table->room = room;
    }
    Kvpb__Row *added = calloc(1, sizeof(*added));
    Kvpb__Cell **cells = calloc(table->n_columns, sizeof(*cells));
    if (added == NULL || cells == NULL) {
        free(added);
        free(cells);
        table->failed = true;
        return NULL;
    }
    kvpb__row__init(added);
    added->cells = cells;
    table->rows[table->n_rows++] = added;
    return added;
}

static Kvpb__Cell *cell(struct builder *table, Kvpb__Row *to)
{
    Kvpb__Cell *added = to == NULL ? NULL : calloc(1, sizeof(*added));

    if (added == NULL) {
        table->failed = true;
        return NULL;
    }
    kvpb__cell__init(added);
    to->cells[to->n_cells++] = added;
    return added;
}

static void number(struct builder *table, Kvpb__Row *to, double value)
{
    Kvpb__Cell *added = cell(table, to);

    if (added != NULL) {
        added->value_case = KVPB__CELL__VALUE_NUMBER;
        added->number = value;
    }
}

static void text(struct builder *table, Kvpb__Row *to, const char *value)
{
    Kvpb__Cell *added = cell(table, to);

    if (added == NULL)
        return;
    added->value_case = KVPB__CELL__VALUE_TEXT;
    added->text = strdup(value);
    if (added->text == NULL) {
        /* A cell that says it has text must have some when it is freed. */
        added->value_case = KVPB__CELL__VALUE__NOT_SET;
        table->failed = true;
    }
}

static void id_text(struct builder *table, Kvpb__Row *to, const struct kv_id128 *id)
{
    char hex[33];

    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", id->bytes[i]);
    text(table, to, hex);
}

static void pair_text(struct builder *table, const char *name, const char *value)
{
    Kvpb__Row *to = row(table);

    text(table, to, name);
    text(table, to, value);
}

static void pair_number(struct builder *table, const char *name, double value)
{
    Kvpb__Row *to = row(table);

    text(table, to, name);
    number(table, to, value);
}

/* ---- the tables -------------------------------------------------------------------------- */

static uint32_t n_clients(const struct kvs_control *control)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < control->config.clients_max; i++)
        n += control->clients[i].state == KVS_CLIENT_OPEN;
    return n;
}

static void table_status(struct kvs_control *control, struct builder *table)
{
    char transports[256];
    uint64_t now_us = kv_clock_now(control->config.clock);

    control->config.transport->ops->describe(control->config.transport, transports,
                                             sizeof(transports));
    columns(table, "name value");
    pair_text(table, "name", control->name);
    pair_text(table, "state", atomic_load(&control->draining) ? "draining" : "serving");
    pair_number(table, "uptime_s", (double)(now_us - control->started_us) / 1e6);
    pair_text(table, "version", TOPKV_VERSION);
    pair_number(table, "wire_version", KV_WIRE_VERSION);
    pair_text(table, "transports", transports);
    pair_number(table, "threads", control->n_threads);
    pair_number(table, "memory_bytes", (double)control->config.memory_bytes);
    pair_number(table, "memory_used_bytes",
                (double)kvs_stats_total(control, offsetof(struct kvs_stats, memory_used)));
    for (size_t i = 1; i < kvs_n_memory_uses; i++) {
        char name[40];

        snprintf(name, sizeof(name), "memory_%s_bytes", kvs_memory_uses[i].name);
        pair_number(table, name, (double)kvs_stats_total(control, kvs_memory_uses[i].offset));
    }
    pair_number(table, "memory_free_bytes", (double)kvs_memory_free(control));
    pair_number(table, "models", control->n_models);
    pair_number(table, "sessions", control->n_sessions);
    pair_number(table, "clients", n_clients(control));
    pair_number(table, "requests_in_flight",
                (double)kvs_stats_total(control, offsetof(struct kvs_stats, in_flight)));
}

/* Returns how many tokens of the prefix and those before it are on disk only. */
static uint64_t tokens_away(const struct kvs_prefix *prefix)
{
    uint64_t n = 0;

    for (; prefix != NULL && prefix->home != NULL && prefix->is_away; prefix = prefix->parent)
        n += KV_BLOCK_TOKENS;
    return n;
}

/* Of the sessions whose sizes the data threads have told. */
static void table_sessions(struct kvs_control *control, struct builder *table)
{
    uint64_t now_us = kv_clock_now(control->config.clock);

    columns(table,
            "session id model generation tenant lease_left_ms nodes position tokens bytes "
            "owner age_s away_tokens");
    for (uint32_t i = 0; i < table->n_sizes; i++) {
        const struct kvs_session_size *size = &table->sizes[i];
        const struct kvs_session *session = &control->sessions[size->index];
        const uint32_t tokens = atomic_load_explicit(&size->tokens, memory_order_relaxed);
        if (!session->used || !kv_token_equal(&session->token, &size->token))
            continue; /* it was closed meanwhile */
        Kvpb__Row *to = row(table);
        number(table, to, session->index);
        id_text(table, to, &session->id);
        text(table, to, session->model->info.name);
        number(table, to, session->generation);
        number(table, to, session->tenant);
        number(table, to, (double)(kvs_session_lease_left_us(control, session, now_us) / 1000));
        number(table, to, session->n_nodes);
        number(table, to, session->position);
        number(table, to, tokens == UINT32_MAX ? 0 : tokens);
        number(table, to, (double)atomic_load_explicit(&size->bytes, memory_order_relaxed));
        text(table, to, session->owner);
        number(table, to, (double)(now_us - session->opened_us) / 1e6);
        number(table, to, (double)tokens_away(session->prefix));
    }
}

static void table_clients(struct kvs_control *control, struct builder *table)
{
    static const char *const states[] = {"free", "opening", "open", "closing"};
    uint64_t now_us = kv_clock_now(control->config.clock);

    columns(table, "client name state transport tenant age_s requests in_flight busy dropped "
                   "rows_in rows_out");
    for (uint32_t i = 0; i < control->config.clients_max; i++) {
        const struct kvs_client_record *client = &control->clients[i];
        uint64_t requests = 0, in_flight = 0, busy = 0, dropped = 0, in = 0, out = 0;
        if (client->state == KVS_CLIENT_FREE)
            continue;
        for (uint32_t j = 0; j < control->n_threads; j++) {
            const struct kvs_shard_client *shard_client = &control->shard[j].clients[i];
            requests += kvs_counted(&shard_client->n_received);
            in_flight += kvs_counted(&shard_client->in_flight);
            busy += kvs_counted(&shard_client->busy);
            dropped += kvs_counted(&shard_client->dropped);
            in += kvs_counted(&shard_client->rows_in);
            out += kvs_counted(&shard_client->rows_out);
        }
        Kvpb__Row *to = row(table);
        number(table, to, client->index);
        text(table, to, client->name);
        text(table, to, states[client->state]);
        text(table, to, client->mode == KV_CHANNEL_SHARED ? "shm" : "tcp");
        number(table, to, client->tenant);
        number(table, to, (double)(now_us - client->since_us) / 1e6);
        number(table, to, (double)requests);
        number(table, to, (double)in_flight);
        number(table, to, (double)busy);
        number(table, to, (double)dropped);
        number(table, to, (double)in);
        number(table, to, (double)out);
    }
}

static void table_models(struct kvs_control *control, struct builder *table)
{
    columns(table, "model fingerprint layers units bytes_per_token");
    for (uint32_t i = 0; i < control->n_models; i++) {
        const struct kv_model_info *info = &control->models[i]->info;
        Kvpb__Row *to = row(table);
        text(table, to, info->name);
        id_text(table, to, &info->fingerprint);
        number(table, to, info->schema.n_layers);
        number(table, to, info->schema.n_units);
        number(table, to, (double)kv_schema_token_bytes(&info->schema));
    }
}

static void table_ops(struct kvs_control *control, struct builder *table)
{
    struct kv_histogram us;
    uint64_t count, errors;

    columns(table, "op plane count errors p50_us p99_us max_us");
    for (unsigned op = 0; op < KV_OP_COUNT; op++) {
        if (control->ops[op].name == NULL)
            continue;
        kvs_op_totals(control, op, &count, &errors, &us);
        Kvpb__Row *to = row(table);
        text(table, to, control->ops[op].name);
        text(table, to, kvs_control_has_op(control, op) ? "control" : "data");
        number(table, to, (double)count);
        number(table, to, (double)errors);
        number(table, to, (double)kv_histogram_quantile(&us, 0.5));
        number(table, to, (double)kv_histogram_quantile(&us, 0.99));
        number(table, to, (double)kv_histogram_quantile(&us, 1));
    }
}

static void table_stats(struct kvs_control *control, struct builder *table)
{
    columns(table, "name value help");
    for (size_t i = 0; i < kvs_n_counters; i++) {
        Kvpb__Row *to = row(table);
        text(table, to, kvs_counters[i].name);
        number(table, to, (double)kvs_stats_total(control, kvs_counters[i].offset));
        text(table, to, kvs_counters[i].help);
    }
}

/* Formats the position of a data thread's scrubber. */
static void scrub_position(const struct kvs_stats *stats, char *text, size_t text_bytes)
{
    switch ((enum kvs_scrub_phase)kvs_counted(&stats->scrub_phase)) {
    case KVS_SCRUB_ROWS:
        snprintf(text, text_bytes, "session %llu",
                 (unsigned long long)kvs_counted(&stats->scrub_session));
        break;
    case KVS_SCRUB_OBJECTS:
        snprintf(text, text_bytes, "objects");
        break;
    case KVS_SCRUB_RESTS:
        snprintf(text, text_bytes, "rests");
        break;
    }
}

static void table_scrub(struct kvs_control *control, struct builder *table)
{
    columns(table, "thread rate_bytes checked_bytes passes position pass_bytes last_pass_bytes "
                   "last_pass_s bad_rows bad_codes bad_centroids bad_cells bad_summaries "
                   "bad_objects refused_rows refused_objects");
    for (uint32_t i = 0; i < control->n_threads; i++) {
        const struct kvs_stats *stats = &control->shard[i].stats;
        const _Atomic uint64_t *const found[KVS_KINDS] = {
            [KVS_KIND_ROWS] = &stats->bad_rows,
            [KVS_KIND_CODES] = &stats->bad_codes,
            [KVS_KIND_CENTROIDS] = &stats->bad_centroids,
            [KVS_KIND_CELLS] = &stats->bad_cells,
            [KVS_KIND_SUMMARIES] = &stats->bad_summaries,
            [KVS_KIND_OBJECTS] = &stats->bad_objects,
        };
        Kvpb__Row *to = row(table);
        char position[32];

        number(table, to, i);
        number(table, to, (double)control->config.scrub_bytes / control->n_threads);
        number(table, to, (double)kvs_counted(&stats->scrub_bytes));
        number(table, to, (double)kvs_counted(&stats->scrub_passes));
        scrub_position(stats, position, sizeof(position));
        text(table, to, control->config.scrub_bytes == 0 ? "off" : position);
        number(table, to, (double)kvs_counted(&stats->scrub_pass_bytes));
        number(table, to, (double)kvs_counted(&stats->scrub_last_bytes));
        number(table, to, (double)kvs_counted(&stats->scrub_last_us) / 1e6);
        for (unsigned kind = 0; kind < KVS_KINDS; kind++)
            number(table, to, (double)kvs_counted(found[kind]));
        number(table, to, (double)kvs_counted(&stats->rows_bad));
        number(table, to, (double)kvs_counted(&stats->objects_bad));
    }
}

/* The same of what is on disk, on all threads. */
static void table_scrub_disk(struct kvs_control *control, struct builder *table)
{
    const uint64_t passes_us = kvs_counted(&control->stats.disk_scrub_pass_us);
    static const size_t counters[] = {
        offsetof(struct kvs_stats, disk_scrub_blocks),
        offsetof(struct kvs_stats, disk_scrub_bytes),
        offsetof(struct kvs_stats, disk_scrub_passes),
        offsetof(struct kvs_stats, disk_scrub_pass_bytes),
        offsetof(struct kvs_stats, disk_scrub_unread),
        offsetof(struct kvs_stats, bad_saved_blocks),
        offsetof(struct kvs_stats, mended_saved_blocks),
        offsetof(struct kvs_stats, lost_saved_blocks),
        offsetof(struct kvs_stats, bad_saved_columns),
    };
    Kvpb__Row *to;

    columns(table,
            "rate_bytes checked_blocks checked_bytes passes pass_bytes unread bad_blocks "
            "mended_blocks lost_blocks bad_columns last_pass_s");
    to = row(table);
    number(table, to,
           control->config.disk_bytes > 0 ? (double)control->config.scrub_disk_bytes : 0);
    for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++)
        number(table, to, (double)kvs_stats_total(control, counters[i]));
    number(table, to, (double)passes_us / 1e6);
}

/* What each data thread holds. */
static void table_threads(struct kvs_control *control, struct builder *table)
{
    columns(table, "thread used_bytes rows_bytes codes_bytes index_bytes objects_bytes "
                   "records_bytes unused_bytes objects evictable_bytes segments");
    for (uint32_t i = 0; i < control->n_threads; i++) {
        const struct kvs_stats *stats = &control->shard[i].stats;
        Kvpb__Row *to = row(table);

        number(table, to, i);
        for (size_t use = 0; use < kvs_n_memory_uses; use++)
            number(
                table, to,
                (double)kvs_counted((const _Atomic uint64_t *)((const char *)stats +
                                                               kvs_memory_uses[use].offset)));
        number(table, to, (double)kvs_counted(&stats->objects));
        number(table, to, (double)kvs_counted(&stats->objects_evictable));
        number(table, to, (double)kvs_counted(&stats->segments));
    }
}

/* Some of them, in no order: there may be millions. */
static void table_prefixes(struct kvs_control *control, struct builder *table)
{
    const uint64_t now_us = kv_clock_now(control->config.clock);
    const struct kvs_prefix *prefix;
    size_t cursor = 0;

    columns(table, "name tenant tokens bytes unused_s uses sessions pinned_s");
    while (table->n_rows < PREFIXES_MAX && !table->failed &&
           (prefix = kvs_prefixes_next(control->prefixes, &cursor)) != NULL) {
        Kvpb__Row *to = row(table);
        const struct kv_id128 told = kvs_prefix_name_told(&prefix->name);
        const bool is_pinned = prefix->pinned_link != NULL;

        id_text(table, to, &told);
        number(table, to, prefix->home->place.tenant);
        number(table, to, (double)(prefix->depth + 1) * KV_BLOCK_TOKENS);
        number(table, to, (double)prefix->home->block_bytes);
        number(table, to,
               prefix->used_us < now_us ? (double)((now_us - prefix->used_us) / 1000000) : 0);
        number(table, to, prefix->n_uses);
        number(table, to, prefix->n_holders);
        if (is_pinned && prefix->pinned_us == UINT64_MAX)
            text(table, to, "always");
        else
            number(table, to,
                   is_pinned && prefix->pinned_us > now_us
                       ? (double)((prefix->pinned_us - now_us) / 1000000)
                       : 0);
    }
}

static void table_tenants(struct kvs_control *control, struct builder *table)
{
    const struct kvs_prefix_tenant *tenant;
    size_t cursor = 0;

    columns(table, "tenant prefixes bytes quota_bytes evictable_leaves");
    while (table->n_rows < TENANTS_MAX && !table->failed &&
           (tenant = kvs_prefixes_next_tenant(control->prefixes, &cursor)) != NULL) {
        Kvpb__Row *to = row(table);

        number(table, to, tenant->tenant);
        number(table, to, (double)tenant->n_prefixes);
        number(table, to, (double)tenant->bytes);
        number(table, to, (double)control->config.tenant_quota);
        number(table, to,
               tenant->heaps[KVS_PREFIX_IN_MEMORY].n + tenant->heaps[KVS_PREFIX_IN_BOTH].n);
    }
}

static void table_reuse(struct kvs_control *control, struct builder *table)
{
    const uint32_t n = atomic_load_explicit(&control->reuse.n_tenants, memory_order_relaxed);

    columns(table, "tenant asked matched missed_new missed_evicted missed_elsewhere "
                   "matched_on_disk");
    for (uint32_t i = 0; i < n; i++) {
        Kvpb__Row *to = row(table);

        if (i < KVS_REUSE_TENANTS - 1)
            number(table, to, control->reuse.tenants[i].tenant);
        else
            text(table, to, "others");
        for (int kind = 0; kind < KVS_REUSE_KINDS; kind++)
            number(table, to, (double)kvs_counted(&control->reuse.tenants[i].tokens[kind]));
    }
}

/* Of memory and of the disk: what both have comes first.  Bytes, and what follows, are of blocks and
 * objects. */
static void table_tiers(struct kvs_control *control, struct builder *table)
{
    const uint64_t away = kvs_prefixes_away(control->prefixes);
    const uint64_t n_objects =
        kvs_stats_total(control, offsetof(struct kvs_stats, objects)) -
        kvs_stats_total(control, offsetof(struct kvs_stats, objects_away));
    struct kvs_saver_facts facts;
    struct kv_histogram us, pieces_us;
    Kvpb__Row *to;

    kvs_saver_get_facts(control, kv_clock_now(control->config.clock), &facts);
    kvs_load_times(control, &us);
    kvs_object_load_times(control, &pieces_us);
    kv_histogram_merge(&us, &pieces_us);
    columns(table, "tier blocks objects bytes room_bytes waiting loads p99_ms bad errors");
    to = row(table);
    text(table, to, "memory");
    number(table, to, (double)(kvs_prefixes_count(control->prefixes) - away));
    number(table, to, (double)n_objects);
    number(table, to,
           (double)(kvs_prefixes_bytes(control->prefixes) +
                    kvs_stats_total(control, offsetof(struct kvs_stats, objects_memory))));
    number(table, to, (double)control->pages->bytes);
    for (int i = 0; i < 5; i++)
        number(table, to, 0);
    to = row(table);
    text(table, to, "disk");
    number(table, to, (double)facts.saved_blocks);
    number(table, to,
           (double)kvs_stats_total(control, offsetof(struct kvs_stats, saved_objects)));
    number(table, to,
           (double)(facts.saved_bytes +
                    kvs_stats_total(control, offsetof(struct kvs_stats, saved_object_bytes))));
    number(table, to, (double)facts.room_bytes);
    number(table, to,
           (double)(facts.waiting_blocks +
                    kvs_stats_total(control, offsetof(struct kvs_stats, unsaved_objects))));
    number(table, to, (double)kvs_counted(&us.count));
    number(table, to, (double)kv_histogram_quantile(&us, 0.99) / 1e3);
    number(table, to,
           (double)(kvs_stats_total(control, offsetof(struct kvs_stats, bad_saved_segments)) +
                    kvs_stats_total(control, offsetof(struct kvs_stats, bad_saved_columns)) +
                    kvs_stats_total(control, offsetof(struct kvs_stats, bad_saved_pieces))));
    number(table, to,
           (double)kvs_stats_total(control, offsetof(struct kvs_stats, disk_errors)));
}

static const struct {
    const char *name;
    void (*fill)(struct kvs_control *control, struct builder *table);
} tables[] = {
    {"status", table_status},
    {"sessions", table_sessions},
    {"clients", table_clients},
    {"models", table_models},
    {"ops", table_ops},
    {"stats", table_stats},
    {"scrub", table_scrub},
    {"threads", table_threads},
    {"prefixes", table_prefixes},
    {"tenants", table_tenants},
    {"reuse", table_reuse},
    {"tiers", table_tiers},
    {"scrub-disk", table_scrub_disk},
};

void kvs_tables_reply(struct kvs_control_call *call, const char *name)
{
    struct builder table = {.sizes = call->sizes, .n_sizes = call->n_sizes};
    Kvpb__TableReply reply = KVPB__TABLE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    size_t which = 0;

    while (which < sizeof(tables) / sizeof(tables[0]) && strcmp(tables[which].name, name) != 0)
        which++;
    if (which == sizeof(tables) / sizeof(tables[0])) {
        kvs_control_refuse(call, KV_NOT_FOUND, "table: unknown table: %.40s", name);
        return;
    }
    tables[which].fill(call->control, &table);
    reply.outcome = &outcome;
    reply.n_columns = table.n_columns;
    reply.columns = table.columns;
    reply.n_rows = table.n_rows;
    reply.rows = table.rows;
    if (table.failed)
        kvs_control_refuse(call, KV_NO_MEMORY, "table: out of memory");
    else if (kvpb__table_reply__get_packed_size(&reply) > KV_WIRE_CONTROL_MAX)
        kvs_control_refuse(call, KV_TOO_LARGE, "table: %zu lines do not fit into a reply",
                           table.n_rows);
    else
        kvs_control_reply(call, &reply.base);

    for (size_t i = 0; i < table.n_rows; i++)
        kvpb__row__free_unpacked(table.rows[i], NULL);
    free(table.rows);
    free(table.columns[0]);
}
