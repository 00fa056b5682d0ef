/* What the control thread asks of a data thread, done in slices. */
#include "kvserver/store/shard/shard.h"

#include "kvserver/cluster/placement.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    UNITS_PER_SLICE = 16,
    SEGMENTS_PER_SLICE = 4096,
};

static_assert(KV_UNITS_MAX * sizeof(struct kv_unit) <= KV_ARENA_PAGE,
              "any session's units fit a page of the arena");

static void part_free(struct kv_data *data, struct kv_part *part)
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

static void part_clear(struct kv_data *data, struct kv_part *part)
{
    for (uint32_t i = 0; i < part->n_units; i++)
        kv_unit_clear(&part->units[i], &data->heap);
    part_free(data, part);
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

/* Lists the units that placement gives this thread.  The part is not visible yet. */
static kv_status_t
part_init(struct kv_data *data, struct kv_part *part, const struct kv_command *command)
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
        part_clear(data, part);
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
    part_free(data, part);
    free(placement);
    return status;
}

/* The session changed: what was under way belongs to the generation before. */
static void part_advance(struct kv_data *data, struct kv_part *part, uint32_t generation)
{
    part->generation = generation;
    for (uint32_t i = 0; i < part->n_units; i++)
        kv_unit_truncate(&part->units[i], &data->heap, part->units[i].committed);
    kv_part_wake(data, part, UINT32_MAX);
}

/* Each returns true when the command is done, with command->status set. */

static bool peer_open(struct kv_data *data, struct kv_command *command)
{
    struct kv_peer *peer = &data->peers[command->index];

    if (peer->state != KV_PEER_FREE) {
        command->status = KV_BUSY; /* works of the one before still finish */
        return true;
    }
    peer->index = command->index;
    peer->credits = command->credits;
    command->status =
        data->port->row->connect(data->port, command->address, command->address_bytes,
                                 command->mode, peer, &peer->channel);
    if (command->status == KV_OK) {
        peer->state = KV_PEER_OPEN;
        peer->token = command->token;
        peer->tenant = command->tenant;
        peer->is_told = false;
        peer->puts_settled = 0;
        memset(peer->puts_done, 0, sizeof(peer->puts_done));
        peer->heard_us = data->now_us;
        peer->due_us = UINT64_MAX;
        atomic_store_explicit(&peer->requests, 0, memory_order_relaxed);
        atomic_store_explicit(&peer->busy, 0, memory_order_relaxed);
        atomic_store_explicit(&peer->dropped, 0, memory_order_relaxed);
        atomic_store_explicit(&peer->rows_in, 0, memory_order_relaxed);
        atomic_store_explicit(&peer->rows_out, 0, memory_order_relaxed);
    }
    return true;
}

static bool peer_close(struct kv_data *data, struct kv_command *command)
{
    struct kv_peer *peer = &data->peers[command->index];

    kv_peer_close(data, peer);
    /* The place is free once its last work has ended. */
    command->status = peer->state == KV_PEER_FREE ? KV_OK : KV_BUSY;
    return true;
}

static bool session_open(struct kv_data *data, struct kv_command *command)
{
    struct kv_part *part = &data->parts[command->index];

    command->status = part_init(data, part, command);
    if (command->status == KV_OK)
        part->used = true;
    return true;
}

static bool session_fork(struct kv_data *data, struct kv_command *command)
{
    struct kv_part *part = &data->parts[command->index];
    struct kv_part *child = &data->parts[command->child_index];
    uint32_t n_segments = 0;

    if (command->cursor == 0) {
        for (uint32_t i = 0; i < part->n_units; i++) {
            if (part->units[i].committed < command->tokens) {
                command->status = KV_INVALID;
                return true;
            }
        }
        command->status = part_init(data, child, command);
        if (command->status != KV_OK)
            return true;
    }
    for (; command->cursor < part->n_units && n_segments < SEGMENTS_PER_SLICE;
         command->cursor++) {
        command->status =
            kv_unit_fork(&part->units[command->cursor], &child->units[command->cursor],
                         &data->heap, command->tokens);
        if (command->status != KV_OK) {
            part_clear(data, child);
            return true;
        }
        n_segments += child->units[command->cursor].n_segments + 1;
    }
    if (command->cursor < part->n_units)
        return false;
    child->used = true;
    return true;
}

static bool session_generation(struct kv_data *data, struct kv_command *command)
{
    part_advance(data, &data->parts[command->index], command->generation);
    return true;
}

static bool session_truncate(struct kv_data *data, struct kv_command *command)
{
    struct kv_part *part = &data->parts[command->index];
    uint32_t end = command->cursor + UNITS_PER_SLICE;

    /* From the first slice on nobody may use the units as they were, and before the last one
     * nobody may use them as they will be. */
    if (command->cursor == 0) {
        part->changing = true;
        part_advance(data, part, command->generation);
    }
    for (; command->cursor < part->n_units && command->cursor < end; command->cursor++)
        kv_unit_truncate(&part->units[command->cursor], &data->heap, command->tokens);
    if (command->cursor < part->n_units)
        return false;
    /* Rows that are gone were checked by the runs as they were. */
    part->writers = command->writers;
    part->changing = false;
    return true;
}

static bool session_close(struct kv_data *data, struct kv_command *command)
{
    struct kv_part *part = &data->parts[command->index];
    uint32_t end = command->cursor + UNITS_PER_SLICE;

    if (command->cursor == 0 && part->used) {
        part->used = false; /* stale from here on, for every work that names it */
        kv_ended_add(&data->ended, &command->ended);
        kv_part_wake(data, part, UINT32_MAX);
    }
    for (; command->cursor < part->n_units && command->cursor < end; command->cursor++)
        kv_unit_clear(&part->units[command->cursor], &data->heap);
    if (command->cursor < part->n_units)
        return false;
    part_free(data, part);
    return true;
}

static bool session_length(struct kv_data *data, struct kv_command *command)
{
    const struct kv_part *part = &data->parts[command->index];

    command->tokens = UINT32_MAX;
    command->has_units = part->n_units > 0;
    for (uint32_t i = 0; i < part->n_units; i++) {
        const struct kv_unit *unit = &part->units[i];
        if (unit->committed < command->tokens)
            command->tokens = unit->committed;
        command->bytes +=
            (uint64_t)unit->n_segments * KV_BLOCK_TOKENS * (unit->row_bytes + sizeof(uint32_t));
    }
    return true;
}

static bool (*const run[])(struct kv_data *data, struct kv_command *command) = {
    [KV_COMMAND_PEER_OPEN] = peer_open,
    [KV_COMMAND_PEER_CLOSE] = peer_close,
    [KV_COMMAND_SESSION_OPEN] = session_open,
    [KV_COMMAND_SESSION_FORK] = session_fork,
    [KV_COMMAND_SESSION_GENERATION] = session_generation,
    [KV_COMMAND_SESSION_TRUNCATE] = session_truncate,
    [KV_COMMAND_SESSION_CLOSE] = session_close,
    [KV_COMMAND_SESSION_LENGTH] = session_length,
};

bool kv_data_command_step(struct kv_data *data)
{
    if (data->command == NULL) {
        data->command = kv_ring_pop(data->commands);
        if (data->command == NULL)
            return false;
        data->command->cursor = 0;
        data->command->status = KV_OK;
    }
    if (run[data->command->kind](data, data->command)) {
        /* The ring has room for every command there is: see kv_control_send(). */
        bool pushed = kv_ring_push(data->answers, data->command);
        assert(pushed);
        (void)pushed;
        data->answers_due = true;
        data->command = NULL;
    }
    return true;
}
