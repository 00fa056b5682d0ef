/* Runs the commands of the control thread on a data thread, in slices. */
#include "kvserver/store/shard/shard_private.h"

#include <assert.h>
#include <string.h>

enum {
    UNITS_PER_SLICE = 16,
    BLOCKS_PER_SLICE = 1024,
};

/* Each function returns true when the command is done, with command->status set. */

static bool client_open(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_client *client = &shard->clients[command->index];

    if (client->state != KVS_SHARD_CLIENT_FREE) {
        command->status = KV_BUSY; /* requests of the previous client have not ended */
        return true;
    }
    client->index = command->index;
    client->credits = command->credits;
    command->status =
        shard->port->ops->connect(shard->port, command->address, command->address_bytes,
                                  command->mode, client, &client->channel);
    if (command->status == KV_OK) {
        client->state = KVS_SHARD_CLIENT_OPEN;
        client->token = command->token;
        client->tenant = command->tenant;
        client->version = command->version;
        client->is_told = false;
        client->puts_settled = 0;
        memset(client->puts_done, 0, sizeof(client->puts_done));
        client->heard_us = shard->now_us;
        atomic_store_explicit(&client->n_received, 0, memory_order_relaxed);
        atomic_store_explicit(&client->busy, 0, memory_order_relaxed);
        atomic_store_explicit(&client->dropped, 0, memory_order_relaxed);
        atomic_store_explicit(&client->rows_in, 0, memory_order_relaxed);
        atomic_store_explicit(&client->rows_out, 0, memory_order_relaxed);
    }
    return true;
}

static bool client_close(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_client *client = &shard->clients[command->index];

    kvs_shard_client_close(shard, client);
    /* The place becomes free when the client's last request has ended. */
    command->status = client->state == KVS_SHARD_CLIENT_FREE ? KV_OK : KV_BUSY;
    kvs_shard_check(shard); /* rare enough for it */
    return true;
}

static bool session_open(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];

    command->status = kvs_shard_session_init(shard, session, command);
    if (command->status == KV_OK)
        session->used = true;
    return true;
}

static bool session_fork(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];
    struct kvs_shard_session *child = &shard->sessions[command->child_index];

    if (command->cursor == 0) {
        for (uint32_t i = 0; i < session->n_units; i++) {
            if (session->units[i].committed < command->tokens) {
                command->status = KV_INVALID;
                return true;
            }
        }
        command->status = kvs_shard_session_init(shard, child, command);
        if (command->status != KV_OK)
            return true;
        if (session->n_units > 0)
            command->status = kvs_blocks_fork_begin(&child->blocks, command->tokens);
        if (command->status != KV_OK) {
            kvs_shard_session_clear(shard, child);
            return true;
        }
        command->cursor = 1;
    }
    if (session->n_units > 0 && !kvs_blocks_fork_on(&session->blocks, &child->blocks,
                                                    command->tokens, BLOCKS_PER_SLICE))
        return false;
    child->used = true;
    return true;
}

static bool session_generation(struct kvs_shard *shard, struct kvs_command *command)
{
    kvs_shard_session_advance(shard, &shard->sessions[command->index], command->generation);
    return true;
}

static bool session_truncate(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];
    uint32_t end = command->cursor + UNITS_PER_SLICE;

    /* Between the first slice and the last one, some units are truncated and others are not, so
     * no request may use them. */
    if (command->cursor == 0) {
        session->changing = true;
        kvs_shard_session_advance(shard, session, command->generation);
    }
    for (; command->cursor < session->n_units && command->cursor < end; command->cursor++)
        kvs_unit_truncate(&session->units[command->cursor], command->tokens);
    if (command->cursor < session->n_units)
        return false;
    /* The removed rows were checked against the previous writers. */
    session->writers = command->writers;
    session->changing = false;
    return true;
}

static bool session_close(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];
    uint32_t end = command->cursor + UNITS_PER_SLICE;

    if (command->cursor == 0 && session->used) {
        session->used = false; /* from now on, every request that names it is stale */
        kvs_ended_add(&shard->ended, &command->ended);
        kvs_shard_session_wake(shard, session, UINT32_MAX);
    }
    for (; command->cursor < session->n_units && command->cursor < end; command->cursor++) {
        kvs_unit_check(&session->units[command->cursor]);
        kvs_unit_clear(&session->units[command->cursor]);
    }
    if (command->cursor < session->n_units)
        return false;
    kvs_shard_session_free(shard, session);
    return true;
}

static bool session_length(struct kvs_shard *shard, struct kvs_command *command)
{
    const struct kvs_shard_session *session = &shard->sessions[command->index];

    command->tokens = UINT32_MAX;
    command->has_units = session->n_units > 0;
    for (uint32_t i = 0; i < session->n_units; i++) {
        const struct kvs_unit *unit = &session->units[i];
        if (unit->committed < command->tokens)
            command->tokens = unit->committed;
        command->bytes += (uint64_t)kvs_unit_n_segments(unit) * KV_BLOCK_TOKENS *
                          (unit->row_bytes + sizeof(uint32_t));
    }
    return true;
}

static bool (*const run[])(struct kvs_shard *shard, struct kvs_command *command) = {
    [KVS_COMMAND_CLIENT_OPEN] = client_open,
    [KVS_COMMAND_CLIENT_CLOSE] = client_close,
    [KVS_COMMAND_SESSION_OPEN] = session_open,
    [KVS_COMMAND_SESSION_FORK] = session_fork,
    [KVS_COMMAND_SESSION_GENERATION] = session_generation,
    [KVS_COMMAND_SESSION_TRUNCATE] = session_truncate,
    [KVS_COMMAND_SESSION_CLOSE] = session_close,
    [KVS_COMMAND_SESSION_LENGTH] = session_length,
};

/* Whoever of the two comes second with the flag sees what the other one has done before: the
 * thread the command, or its giver that the thread sleeps. */
void kvs_shard_give(struct kvs_shard *shard, struct kvs_command *command)
{
    /* The ring has room for all commands that sessions, clients and calls can have in progress
     * at once. */
    const bool is_pushed = kv_ring_push(shard->commands, command);

    assert(is_pushed);
    (void)is_pushed;
    if (atomic_exchange(&shard->is_asleep, false))
        shard->port->ops->port_wake(shard->port);
}

bool kvs_shard_fall_asleep(struct kvs_shard *shard)
{
    (void)atomic_exchange(&shard->is_asleep, true);
    if (!kv_ring_ready(shard->commands))
        return true;
    kvs_shard_awake(shard);
    return false;
}

void kvs_shard_awake(struct kvs_shard *shard)
{
    /* Relaxed: a wake too many costs no more than that. */
    atomic_store_explicit(&shard->is_asleep, false, memory_order_relaxed);
}

bool kvs_shard_command_step(struct kvs_shard *shard)
{
    if (shard->command == NULL) {
        shard->command = kv_ring_pop(shard->commands);
        if (shard->command == NULL)
            return false;
        shard->command->cursor = 0;
        shard->command->status = KV_OK;
    }
    if (run[shard->command->kind](shard, shard->command)) {
        /* The ring of replies is as large as all rings of commands together. */
        bool is_told = kvs_shard_notify(shard, shard->command);
        assert(is_told);
        (void)is_told;
        shard->command = NULL;
    }
    return true;
}
