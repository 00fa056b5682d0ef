/* A session on a data thread: its units, and the requests that wait for their rows. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/cluster/placement.h"

#include <assert.h>
#include <stdlib.h>

static_assert(KV_UNITS_MAX * sizeof(struct kvs_unit) <= KVS_ARENA_PAGE,
              "any session's units fit a page of the arena");

void kvs_shard_session_free(struct kvs_shard *shard, struct kvs_shard_session *session)
{
    if (session->units != NULL)
        kvs_blocks_clear(&session->blocks);
    if (session->units != NULL)
        kvs_arena_free(shard->arena, session->units_class, session->units);
    if (session->unit_of != NULL)
        kvs_arena_free(shard->arena, session->unit_of_class, session->unit_of);
    session->units = NULL;
    session->unit_of = NULL;
    session->writers = NULL;
    session->n_units = 0;
}

void kvs_shard_session_clear(struct kvs_shard *shard, struct kvs_shard_session *session)
{
    for (uint32_t i = 0; i < session->n_units; i++)
        kvs_unit_clear(&session->units[i]);
    kvs_shard_session_free(shard, session);
}

/* Initializes the units listed in unit_of; on failure, n_units is the number initialized. */
static kv_status_t units_init(struct kvs_shard_session *session, const kv_schema_t *schema)
{
    for (uint32_t layer = 0; layer < schema->n_layers; layer++) {
        for (uint32_t head = 0; head < schema->layers[layer].n_kv_heads; head++) {
            uint16_t at = session->unit_of[kv_schema_unit(schema, layer, head)];
            if (at == UINT16_MAX)
                continue;
            kv_status_t status = kvs_unit_init(&session->units[at], &session->blocks, at, layer,
                                               head, schema->layers[layer].row_bytes);
            session->units[at].writers = &session->writers;
            session->units[at].session = session->index;
            if (status != KV_OK)
                return status;
            session->n_units = at + 1u; /* units come in this order */
        }
    }
    return KV_OK;
}

kv_status_t kvs_shard_session_init(struct kvs_shard *shard,
                                   struct kvs_shard_session *session,
                                   const struct kvs_command *command)
{
    const kv_schema_t *schema = command->schema;
    kv_status_t status = KV_NO_MEMORY;
    uint32_t n_units = 0;

    assert(!session->used && session->units == NULL && session->n_units == 0);
    session->unit_of_class =
        kvs_arena_class_rounded(shard->arena, schema->n_units * sizeof(*session->unit_of));
    if (session->unit_of_class < 0)
        goto err_free;
    session->unit_of = kvs_arena_alloc(shard->arena, session->unit_of_class);
    if (session->unit_of == NULL)
        goto err_free;
    /* The placement decides which of the model's units are here: unit_of leads from a unit's
     * number in the schema to its place in `units`, which has only those. */
    for (uint32_t i = 0; i < schema->n_units; i++) {
        const bool here =
            kv_placement_unit_position(i, command->n_nodes) == command->position &&
            kv_placement_unit_thread(command->root, i, command->n_nodes, shard->n_threads) ==
                shard->index;

        session->unit_of[i] = here ? (uint16_t)n_units++ : UINT16_MAX;
    }
    if (n_units > 0) {
        session->units_class =
            kvs_arena_class_rounded(shard->arena, n_units * sizeof(*session->units));
        if (session->units_class < 0)
            goto err_free;
        session->units = kvs_arena_alloc(shard->arena, session->units_class);
        if (session->units == NULL)
            goto err_free;
        kvs_blocks_init(&session->blocks, &shard->store, session->units, n_units);
    }
    status = units_init(session, schema);
    if (status != KV_OK) {
        kvs_shard_session_clear(shard, session);
        goto err_free;
    }
    session->schema = schema;
    session->root = command->root;
    session->epoch = command->epoch;
    session->tokens_max = command->tokens_max;
    session->token = command->token;
    session->tenant = command->tenant;
    session->generation = command->generation;
    session->writers = command->writers;
    session->serial++; /* requests of the previous session in this place may not have ended
                        * yet */
    return KV_OK;

err_free:
    kvs_shard_session_free(shard, session);
    return status;
}

void kvs_shard_session_advance(struct kvs_shard *shard,
                               struct kvs_shard_session *session,
                               uint32_t generation)
{
    /* Reservations go: they are of puts of the generation before, which fail when they are
     * woken. */
    session->generation = generation;
    for (uint32_t i = 0; i < session->n_units; i++)
        kvs_unit_truncate(&session->units[i], session->units[i].committed);
    kvs_shard_session_wake(shard, session, UINT32_MAX);
}

struct kvs_unit *kvs_shard_session_unit(const struct kvs_shard_session *session,
                                        uint32_t layer,
                                        uint32_t kv_head)
{
    if (layer >= session->schema->n_layers ||
        kv_head >= session->schema->layers[layer].n_kv_heads)
        return NULL;
    uint16_t at = session->unit_of[kv_schema_unit(session->schema, layer, kv_head)];
    return at == UINT16_MAX ? NULL : &session->units[at];
}

uint32_t kvs_shard_session_verify(const struct kvs_shard_session *session,
                                  const struct kvs_unit *unit,
                                  uint32_t begin,
                                  uint32_t count,
                                  const void *rows,
                                  const uint32_t *crcs)
{
    return (uint32_t)kv_writers_verify(session->writers, unit->layer, unit->kv_head, rows,
                                       count, unit->row_bytes, begin, NULL, crcs);
}

void kvs_shard_session_wake(struct kvs_shard *shard,
                            struct kvs_shard_session *session,
                            uint32_t tokens)
{
    if (tokens == UINT32_MAX)
        kvs_shard_wake_missing(shard, session);
    if (session->waiters == NULL)
        return;
    /* The waiters are looked at in a later step, not in the middle of the caller's operation.
     * A session is listed once, with the largest length that it was woken for. */
    if (!session->is_woken) {
        session->is_woken = true;
        session->woken_to = 0;
        session->woken_next = NULL;
        *shard->woken_end = session;
        shard->woken_end = &session->woken_next;
    }
    if (session->woken_to < tokens)
        session->woken_to = tokens;
}
