/* Runs the commands of the control thread on a data thread, in slices. */
#include "kvserver/base/slice.h"
#include "kvserver/base/token.h"
#include "kvserver/store/prefix/prefix.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/shard/object_page.h"
#include "kvserver/store/shard/shard_private.h"

#include <assert.h>
#include <string.h>

enum {
    PIECE_BLOCKS = 8, /* shared, or removed from a unit, between two looks at the clock */
    PIECE_TOKENS = PIECE_BLOCKS * KV_BLOCK_TOKENS,
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

/* Returns whether some rows of the block are known to be bad. */
static bool has_bad(const struct kvs_shard_session *session, struct kvs_block *block)
{
    for (uint32_t at = 0; at < session->n_units; at++)
        if (kvs_segment_has_bad(kvs_block_owner(block, at), at))
            return true;
    return false;
}

/* Begins a session that has the blocks of a prefix.  Returns false if the command has failed, or
 * there is nothing to share. */
static bool open_init(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];

    command->is_begun = true;
    command->status = kvs_shard_session_init(shard, session, command);
    if (command->status != KV_OK)
        return false;
    command->has_units = session->n_units > 0;
    if (command->prefix == NULL || session->n_units == 0) {
        session->used = true;
        return false;
    }
    command->status = kvs_blocks_fork_begin(&session->blocks, command->tokens);
    if (command->status != KV_OK)
        kvs_shard_session_clear(shard, session);
    return command->status == KV_OK;
}

/* Whether another session than that of the block before it has published the block. */
static bool is_of_others(const struct kvs_prefix *prefix)
{
    const struct kvs_prefix *parent = prefix->parent;

    return parent != NULL &&
           (prefix->writer != parent->writer || prefix->mixed != NULL || parent->mixed != NULL);
}

/* Notes some of the prefix's blocks where the session is to have them, the last ones first: a
 * prefix knows its parent.  Returns true when all are noted. */
static bool note_blocks(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_blocks *blocks = &shard->sessions[command->index].blocks;
    struct kvs_block **list = blocks->list;

    for (int i = 0; i < PIECE_BLOCKS && command->prefix != NULL; i++) {
        list[command->prefix->depth] =
            *kvs_prefix_block(command->prefix, shard->index, shard->n_threads);
        blocks->is_mixed = blocks->is_mixed || is_of_others(command->prefix);
        command->prefix = command->prefix->parent;
    }
    return command->prefix == NULL;
}

/* Rows that the session will need come back before it asks for them. */
static void
need_blocks(struct kvs_shard *shard, const struct kvs_blocks *blocks, uint32_t begin)
{
    for (uint32_t i = begin; i < blocks->n && shard->store.n_away > 0; i++)
        (void)kvs_block_need(&shard->store, blocks->list[i]);
}

/* Shares some of the blocks that are noted, up to the first one with bad rows.  Returns true
 * after the last. */
static bool share_blocks(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];
    struct kvs_block **list = session->blocks.list;
    const uint32_t end = kvs_blocks_for(command->tokens);

    for (uint32_t i = session->blocks.n; i < end && i < session->blocks.n + PIECE_BLOCKS; i++) {
        if (has_bad(session, list[i])) {
            command->tokens = i * KV_BLOCK_TOKENS;
            break;
        }
    }
    const uint32_t begin = session->blocks.n;
    const bool is_last =
        kvs_blocks_fork_on(list, &session->blocks, command->tokens, PIECE_BLOCKS);
    need_blocks(shard, &session->blocks, begin);
    return is_last;
}

static bool session_open(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kv_slice slice = kv_slice_begin(shard->clock, 1);

    if (!command->is_begun && !open_init(shard, command))
        return true;
    while (!note_blocks(shard, command))
        if (kv_slice_over(&slice))
            return false;
    while (!share_blocks(shard, command))
        if (kv_slice_over(&slice))
            return false;
    shard->sessions[command->index].used = true;
    return true;
}

/* Begins the child of a fork.  Returns false if the command has failed. */
static bool fork_init(struct kvs_shard *shard, struct kvs_command *command)
{
    const struct kvs_shard_session *session = &shard->sessions[command->index];
    struct kvs_shard_session *child = &shard->sessions[command->child_index];

    command->is_begun = true;
    for (uint32_t i = 0; i < session->n_units; i++) {
        if (session->units[i].committed < command->tokens) {
            command->status = KV_INVALID;
            return false;
        }
    }
    command->status = kvs_shard_session_init(shard, child, command);
    if (command->status != KV_OK || session->n_units == 0)
        return command->status == KV_OK;
    child->blocks.is_mixed = session->blocks.is_mixed;
    command->status = kvs_blocks_fork_begin(&child->blocks, command->tokens);
    if (command->status != KV_OK)
        kvs_shard_session_clear(shard, child);
    return command->status == KV_OK;
}

static bool session_fork(struct kvs_shard *shard, struct kvs_command *command)
{
    const struct kvs_shard_session *session = &shard->sessions[command->index];
    struct kvs_shard_session *child = &shard->sessions[command->child_index];
    struct kv_slice slice = kv_slice_begin(shard->clock, 1);

    if (!command->is_begun && !fork_init(shard, command))
        return true;
    while (session->n_units > 0 && !kvs_blocks_fork_on(session->blocks.list, &child->blocks,
                                                       command->tokens, PIECE_BLOCKS))
        if (kv_slice_over(&slice))
            return false;
    child->used = true;
    return true;
}

static bool session_generation(struct kvs_shard *shard, struct kvs_command *command)
{
    kvs_shard_session_advance(shard, &shard->sessions[command->index], command->generation);
    return true;
}

/* Truncates the session's units from the cursor on, some rows at a time, and clears them if
 * `clears`.  No request may use them any more.  Returns true when all are done. */
static bool
cut_units(struct kvs_shard *shard, struct kvs_command *command, uint32_t tokens, bool clears)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];
    struct kv_slice slice = kv_slice_begin(shard->clock, 1);

    while (command->cursor < session->n_units) {
        struct kvs_unit *unit = &session->units[command->cursor];
        const bool is_last =
            unit->committed <= tokens || unit->committed - tokens <= PIECE_TOKENS;
        const uint32_t end = is_last ? tokens : unit->committed - PIECE_TOKENS;

        if (clears)
            kvs_unit_check_from(unit, end);
        kvs_unit_truncate(unit, end);
        if (is_last && clears)
            kvs_unit_clear(unit);
        command->cursor += is_last;
        if (kv_slice_over(&slice))
            break;
    }
    return command->cursor == session->n_units;
}

static bool session_truncate(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];

    /* Between the first slice and the last one, some units are truncated and others are not, so
     * no request may use them. */
    if (!session->changing) {
        session->changing = true;
        kvs_shard_session_advance(shard, session, command->generation);
    }
    if (!cut_units(shard, command, command->tokens, false))
        return false;
    /* The removed rows were checked against the previous writers. */
    session->writers = command->writers;
    session->changing = false;
    return true;
}

static bool session_close(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kvs_shard_session *session = &shard->sessions[command->index];

    if (session->used) {
        session->used = false; /* from now on, every request that names it is stale */
        kvs_ended_add(&shard->ended, &command->ended);
        kvs_shard_session_wake(shard, session, UINT32_MAX);
    }
    if (!cut_units(shard, command, 0, true))
        return false;
    kvs_shard_session_free(shard, session);
    return true;
}

/* Relaxed: the control thread reads it after the last thread's reply. */
static void lower(_Atomic uint32_t *least, uint32_t tokens)
{
    uint32_t now = atomic_load_explicit(least, memory_order_relaxed);

    while (tokens < now && !atomic_compare_exchange_weak_explicit(
                               least, &now, tokens, memory_order_relaxed, memory_order_relaxed))
        ;
}

static uint64_t unit_bytes(const struct kvs_unit *unit)
{
    return (uint64_t)kvs_unit_n_segments(unit) * KV_BLOCK_TOKENS *
           (unit->row_bytes + sizeof(uint32_t));
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
        if (command->layer_tokens != NULL)
            lower(&command->layer_tokens[unit->layer], unit->committed);
        command->bytes += unit_bytes(unit);
    }
    return true;
}

static bool prefix_publish(struct kvs_shard *shard, struct kvs_command *command)
{
    const struct kvs_shard_session *session = &shard->sessions[command->index];
    struct kv_slice slice = kv_slice_begin(shard->clock, 1);

    if (!command->is_begun) {
        command->is_begun = true;
        command->has_units = session->n_units > 0;
        command->tokens = command->has_units ? UINT32_MAX : 0;
        for (uint32_t i = 0; i < session->n_units; i++)
            if (session->units[i].committed < command->tokens)
                command->tokens = session->units[i].committed;
    }
    for (;
         command->prefix != NULL && command->prefix->depth < command->tokens / KV_BLOCK_TOKENS;
         command->prefix = command->prefix->next) {
        struct kvs_block *block = session->blocks.list[command->prefix->depth];

        if (kv_slice_over(&slice))
            return false;
        if (has_bad(session, block)) {
            command->tokens = command->prefix->depth * KV_BLOCK_TOKENS;
            break;
        }
        block->refs++;
        *kvs_prefix_block(command->prefix, shard->index, shard->n_threads) = block;
    }
    return true;
}

static bool prefix_release(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kv_slice slice = kv_slice_begin(shard->clock, 1);

    while (command->prefix != NULL) {
        struct kvs_block **block =
            kvs_prefix_block(command->prefix, shard->index, shard->n_threads);

        if (block != NULL && *block != NULL) {
            if (shard->tier != NULL)
                kvs_disk_tier_release(shard->tier, *block);
            kvs_block_unref(&shard->store, *block);
            *block = NULL;
        }
        command->prefix = command->prefix->next;
        /* Also of those that it has nothing of: a list may have a block for each that a session
         * could have. */
        if (kv_slice_over(&slice))
            break;
    }
    return command->prefix == NULL;
}

static bool session_sizes(struct kvs_shard *shard, struct kvs_command *command)
{
    struct kv_slice slice = kv_slice_begin(shard->clock, 1);

    while (command->cursor < command->n_sizes) {
        struct kvs_session_size *size = &command->sizes[command->cursor++];
        const struct kvs_shard_session *session = &shard->sessions[size->index];
        const bool is_it = session->used && kv_token_equal(&session->token, &size->token);
        uint64_t bytes = 0;

        for (uint32_t i = 0; is_it && i < session->n_units; i++) {
            lower(&size->tokens, session->units[i].committed);
            bytes += unit_bytes(&session->units[i]);
        }
        atomic_fetch_add_explicit(&size->bytes, bytes, memory_order_relaxed);
        if (kv_slice_over(&slice))
            break;
    }
    return command->cursor == command->n_sizes;
}

static bool objects_page(struct kvs_shard *shard, struct kvs_command *command)
{
    if (kvs_object_page_slice(command->object_page, &shard->objects, shard->clock,
                              shard->now_us))
        return true;
    if (command->object_page->settled_us == 0)
        return false;
    /* It waits for the disk, and others need not. */
    command->is_kept = true;
    command->next_settling = shard->settling;
    shard->settling = command;
    return true;
}

void kvs_shard_settle(struct kvs_shard *shard)
{
    struct kvs_command **link = &shard->settling;

    while (*link != NULL) {
        struct kvs_command *command = *link;

        if (kvs_object_page_slice(command->object_page, &shard->objects, shard->clock,
                                  shard->now_us)) {
            *link = command->next_settling;
            const bool is_told = kvs_shard_notify(shard, command);

            assert(is_told);
            (void)is_told;
        } else {
            link = &command->next_settling;
        }
    }
}

static bool tier(struct kvs_shard *shard, struct kvs_command *command)
{
    command->is_kept = true;
    shard->tier_commands[command->tier_job] = command;
    kvs_disk_tier_begin(shard->tier, command->tier_job, command->tier_items,
                        command->n_tier_items);
    return true;
}

void kvs_shard_tier_done(void *arg, enum kvs_tier_job job)
{
    struct kvs_shard *shard = arg;
    const bool is_told = kvs_shard_notify(shard, shard->tier_commands[job]);

    assert(is_told);
    (void)is_told;
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
    [KVS_COMMAND_OBJECTS] = objects_page,
    [KVS_COMMAND_SESSION_SIZES] = session_sizes,
    [KVS_COMMAND_TIER] = tier,
    [KVS_COMMAND_PREFIX_PUBLISH] = prefix_publish,
    [KVS_COMMAND_PREFIX_RELEASE] = prefix_release,
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
        shard->command->is_begun = false;
        shard->command->is_kept = false;
        shard->command->status = KV_OK;
    }
    if (run[shard->command->kind](shard, shard->command)) {
        /* The ring of replies is as large as all rings of commands together. */
        bool is_told = shard->command->is_kept || kvs_shard_notify(shard, shard->command);
        assert(is_told);
        (void)is_told;
        shard->command = NULL;
    }
    return true;
}
