/* What the control thread asks of a data thread, done in slices. */
#include "kvserver/store/shard/shard_private.h"

#include <assert.h>
#include <string.h>

enum {
    UNITS_PER_SLICE = 16,
    SEGMENTS_PER_SLICE = 4096,
};

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

    command->status = kv_part_init(data, part, command);
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
        command->status = kv_part_init(data, child, command);
        if (command->status != KV_OK)
            return true;
    }
    for (; command->cursor < part->n_units && n_segments < SEGMENTS_PER_SLICE;
         command->cursor++) {
        command->status =
            kv_unit_fork(&part->units[command->cursor], &child->units[command->cursor],
                         &data->heap, command->tokens);
        if (command->status != KV_OK) {
            kv_part_clear(data, child);
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
    kv_part_advance(data, &data->parts[command->index], command->generation);
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
        kv_part_advance(data, part, command->generation);
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
    kv_part_free(data, part);
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
        /* The ring has room for every command there is, as the one that brings them. */
        bool is_told = kvs_shard_notify(data, data->command);
        assert(is_told);
        (void)is_told;
        data->command = NULL;
    }
    return true;
}
