/* A session of a data thread: its units, and who waits for rows of them. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/cluster/placement.h"

#include <assert.h>
#include <stdlib.h>

static_assert(KV_UNITS_MAX * sizeof(struct kv_unit) <= KV_ARENA_PAGE,
              "any session's units fit a page of the arena");

void kv_part_free(struct kv_data *data, struct kv_part *part)
{
    if (part->units != NULL)
        kv_arena_free(data->arena, part->units_class, part->units);
    if (part->unit_of != NULL)
        kv_arena_free(data->arena, part->unit_of_class, part->unit_of);
    part->units = NULL;
    part->unit_of = NULL;
    part->writers = NULL;
    part->n_units = 0;
}

void kv_part_clear(struct kv_data *data, struct kv_part *part)
{
    for (uint32_t i = 0; i < part->n_units; i++)
        kv_unit_clear(&part->units[i], &data->heap);
    kv_part_free(data, part);
}

/* Makes the units that the part lists; on failure n_units says how many were. */
static kv_status_t
units_init(struct kv_data *data, struct kv_part *part, const kv_schema_t *schema)
{
    for (uint32_t layer = 0; layer < schema->n_layers; layer++) {
        for (uint32_t head = 0; head < schema->layers[layer].n_kv_heads; head++) {
            uint16_t at = part->unit_of[kv_schema_unit(schema, layer, head)];
            if (at == UINT16_MAX)
                continue;
            kv_status_t status = kv_unit_init(&part->units[at], &data->heap, layer, head,
                                              schema->layers[layer].row_bytes);
            part->units[at].writers = &part->writers;
            if (status != KV_OK)
                return status;
            part->n_units = at + 1u; /* units come in this order */
        }
    }
    return KV_OK;
}

kv_status_t
kv_part_init(struct kv_data *data, struct kv_part *part, const struct kv_command *command)
{
    const kv_schema_t *schema = command->schema;
    struct kv_placement *placement = malloc(sizeof(*placement));
    kv_status_t status = KV_NO_MEMORY;
    uint32_t n_units = 0;

    assert(!part->used && part->units == NULL && part->n_units == 0);
    if (placement == NULL)
        return KV_NO_MEMORY;
    kv_placement_init(placement, command->n_nodes);

    part->unit_of_class =
        kv_arena_class_rounded(data->arena, schema->n_units * sizeof(*part->unit_of));
    if (part->unit_of_class < 0)
        goto err_free;
    part->unit_of = kv_arena_alloc(data->arena, part->unit_of_class);
    if (part->unit_of == NULL)
        goto err_free;
    for (uint32_t i = 0; i < schema->n_units; i++) {
        uint32_t slot = kv_placement_unit_slot(command->root, i);
        bool here =
            placement->node_of[slot] == command->node_index &&
            kv_placement_unit_thread(slot, command->n_nodes, data->n_threads) == data->index;
        part->unit_of[i] = here ? (uint16_t)n_units++ : UINT16_MAX;
    }
    if (n_units > 0) {
        part->units_class = kv_arena_class_rounded(data->arena, n_units * sizeof(*part->units));
        if (part->units_class < 0)
            goto err_free;
        part->units = kv_arena_alloc(data->arena, part->units_class);
        if (part->units == NULL)
            goto err_free;
    }
    status = units_init(data, part, schema);
    if (status != KV_OK) {
        kv_part_clear(data, part);
        goto err_free;
    }
    part->schema = schema;
    part->root = command->root;
    part->epoch = command->epoch;
    part->tokens_max = command->tokens_max;
    part->token = command->token;
    part->tenant = command->tenant;
    part->generation = command->generation;
    part->writers = command->writers;
    part->serial++; /* some of the session before may not have heard yet that it ended */
    free(placement);
    return KV_OK;

err_free:
    kv_part_free(data, part);
    free(placement);
    return status;
}

void kv_part_advance(struct kv_data *data, struct kv_part *part, uint32_t generation)
{
    part->generation = generation;
    for (uint32_t i = 0; i < part->n_units; i++)
        kv_unit_truncate(&part->units[i], &data->heap, part->units[i].committed);
    kv_part_wake(data, part, UINT32_MAX);
}

struct kv_unit *kv_part_unit(const struct kv_part *part, uint32_t layer, uint32_t kv_head)
{
    if (layer >= part->schema->n_layers || kv_head >= part->schema->layers[layer].n_kv_heads)
        return NULL;
    uint16_t at = part->unit_of[kv_schema_unit(part->schema, layer, kv_head)];
    return at == UINT16_MAX ? NULL : &part->units[at];
}

uint32_t kv_part_verify(const struct kv_part *part,
                        const struct kv_unit *unit,
                        uint32_t begin,
                        uint32_t count,
                        const void *rows,
                        const uint32_t *crcs)
{
    return (uint32_t)kv_writers_verify(part->writers, unit->layer, unit->kv_head, rows, count,
                                       unit->row_bytes, begin, NULL, crcs);
}

void kv_part_wake(struct kv_data *data, struct kv_part *part, uint32_t tokens)
{
    if (part->waiters == NULL)
        return;
    if (!part->is_woken) {
        part->is_woken = true;
        part->woken_to = 0;
        part->woken_next = NULL;
        *data->woken_end = part;
        data->woken_end = &part->woken_next;
    }
    if (part->woken_to < tokens)
        part->woken_to = tokens;
}
