#include "kvserver/store/rows/column.h"

#include "kernels/checksum.h"

#include <assert.h>
#include <string.h>

struct column_type {
    uint8_t version;    /* of the format that this build writes and reads; 0: none */
    enum kvs_kind kind; /* as which it counts where it is bad */
};

static const struct column_type types[KVS_COLUMN_KINDS] = {
    [KVS_COLUMN_CODES] = {1, KVS_KIND_CODES},
    [KVS_COLUMN_CODEBOOK] = {1, KVS_KIND_CENTROIDS},
    [KVS_COLUMN_LISTS] = {1, KVS_KIND_CELLS},
    [KVS_COLUMN_SUMMARIES] = {2, KVS_KIND_SUMMARIES},
};

static uint32_t crc_of(const struct kvs_column *column)
{
    return kv_crc32c(0, column->bytes, column->n_bytes);
}

static bool is_current(const struct kvs_column *column)
{
    return column->version == types[column->kind].version;
}

static enum kvs_arena_use use_of(const struct kvs_column *column)
{
    return column->kind == KVS_COLUMN_CODES ? KVS_USE_CODES : KVS_USE_INDEX;
}

bool kvs_column_create(struct kvs_column *column,
                       struct kvs_arena *arena,
                       enum kvs_column_kind kind,
                       int class_id,
                       uint32_t n_bytes)
{
    void *bytes = class_id < 0 ? NULL : kvs_arena_alloc(arena, class_id);

    if (bytes == NULL)
        return false;
    assert(kvs_arena_class_bytes(arena, class_id) >= n_bytes);
    *column = (struct kvs_column){.bytes = bytes, .n_bytes = n_bytes, .kind = (uint8_t)kind};
    kvs_arena_use(arena, use_of(column), bytes);
    return true;
}

/* What the bytes of all columns that are away point to. */
static char away;

void kvs_column_leave(struct kvs_column *column, struct kvs_arena *arena)
{
    assert(column->bytes != NULL && column->bytes != &away);
    column->class_id = (uint8_t)kvs_arena_class_of(arena, column->bytes);
    kvs_arena_unuse(arena, use_of(column), column->bytes);
    kvs_arena_free(arena, column->class_id, column->bytes);
    column->bytes = &away;
}

bool kvs_column_return(struct kvs_column *column, struct kvs_arena *arena, const void *bytes)
{
    void *to = kvs_arena_alloc(arena, column->class_id);

    assert(column->bytes == &away);
    if (to == NULL)
        return false;
    if (bytes != NULL)
        memcpy(to, bytes, column->n_bytes);
    else
        memset(to, 0, column->n_bytes);
    column->bytes = to;
    kvs_arena_use(arena, use_of(column), to);
    return true;
}

bool kvs_column_is_away(const struct kvs_column *column)
{
    return column->bytes == &away;
}

void kvs_column_drop(struct kvs_column *column, struct kvs_arena *arena)
{
    if (column->bytes != NULL && column->bytes != &away) {
        kvs_arena_unuse(arena, use_of(column), column->bytes);
        kvs_arena_free(arena, kvs_arena_class_of(arena, column->bytes), column->bytes);
    }
    *column = (struct kvs_column){0};
}

uint8_t kvs_column_version(enum kvs_column_kind kind)
{
    return types[kind].version;
}

void kvs_column_seal(struct kvs_column *column)
{
    column->crc = crc_of(column);
    column->version = types[column->kind].version;
}

bool kvs_column_is_sound(const struct kvs_column *column)
{
    return is_current(column) && crc_of(column) == column->crc;
}

bool kvs_column_check(const struct kvs_column *column, struct kvs_health *health)
{
    if (kvs_column_is_sound(column))
        return true;
    health->found[types[column->kind].kind] += is_current(column);
    return false;
}

bool kvs_column_is_in_use(const struct kvs_column *column, const struct kvs_arena *arena)
{
    return column->bytes == NULL || column->bytes == &away ||
           kvs_arena_is_in_use(arena, kvs_arena_class_of(arena, column->bytes), column->bytes);
}
