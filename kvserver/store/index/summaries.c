#include "kvserver/store/index/summaries.h"

#include <assert.h>
#include <string.h>

void kvs_summaries_clear(struct kvs_summaries *summaries, struct kvs_arena *arena)
{
    for (uint32_t i = 0; i < kvs_summaries_n_groups(summaries); i++)
        kvs_column_drop(&summaries->groups[i], arena);
    if (summaries->groups != NULL)
        kvs_arena_free(arena, summaries->list_class, summaries->groups);
    *summaries = (struct kvs_summaries){0};
}

static void *alloc_rounded(struct kvs_arena *arena, size_t bytes, int *ret_class)
{
    *ret_class = kvs_arena_class_rounded(arena, bytes);
    return *ret_class < 0 ? NULL : kvs_arena_alloc(arena, *ret_class);
}

kv_status_t kvs_summaries_create(struct kvs_arena *arena,
                                 const struct kv_summary_shape *shape,
                                 uint32_t n_rows,
                                 struct kvs_summaries *ret_summaries)
{
    const int class_id = kvs_arena_class_rounded(arena, kv_summary_bytes(shape));
    struct kvs_summaries made = {.shape = *shape, .n_rows = n_rows};
    const size_t list_bytes = kvs_summaries_n_groups(&made) * sizeof(*made.groups);

    assert(n_rows > 0);
    made.groups = alloc_rounded(arena, list_bytes, &made.list_class);
    if (made.groups == NULL)
        return KV_NO_MEMORY;
    memset(made.groups, 0, list_bytes);
    for (uint32_t i = 0; i < kvs_summaries_n_groups(&made); i++)
        if (!kvs_column_create(&made.groups[i], arena, KVS_COLUMN_SUMMARIES, class_id,
                               (uint32_t)kv_summary_bytes(shape))) {
            kvs_summaries_clear(&made, arena);
            return KV_NO_MEMORY;
        }
    *ret_summaries = made;
    return KV_OK;
}

kv_status_t kvs_summarise_begin(struct kvs_summariser *summariser,
                                struct kvs_arena *arena,
                                const struct kv_summary_shape *shape,
                                uint32_t n_rows,
                                uint64_t seed)
{
    struct kvs_summariser begun = {
        .arena = arena,
        .seed = seed,
    };
    kv_status_t status;

    begun.scratch = alloc_rounded(arena, kv_summary_scratch_bytes(shape), &begun.scratch_class);
    if (begun.scratch == NULL)
        return KV_NO_MEMORY;
    /* All groups are allocated now: summaries that cannot be stored need not be made. */
    status = kvs_summaries_create(arena, shape, n_rows, &begun.made);
    if (status == KV_OK)
        *summariser = begun;
    else
        kvs_arena_free(arena, begun.scratch_class, begun.scratch);
    return status;
}

static uint32_t rows_of_group(const struct kvs_summariser *summariser)
{
    const struct kvs_summaries *made = &summariser->made;
    const uint32_t left = made->n_rows - summariser->group * made->shape.rows;

    return left < made->shape.rows ? left : made->shape.rows;
}

void kvs_summarise_next(const struct kvs_summariser *summariser,
                        uint32_t *ret_first,
                        uint32_t *ret_n)
{
    uint32_t first = 0, n = 0;

    if (summariser->begun)
        (void)kv_summary_build_next(&summariser->build, &first, &n);
    *ret_first = summariser->group * summariser->made.shape.rows + first;
    *ret_n = n;
}

bool kvs_summarise_piece(struct kvs_summariser *summariser, const void *rows, size_t stride)
{
    struct kvs_summaries *made = &summariser->made;
    uint32_t first, n;

    if (!summariser->begun) {
        kv_summary_build_begin(&summariser->build, &made->shape, rows_of_group(summariser),
                               summariser->seed + summariser->group, summariser->scratch);
        summariser->begun = true;
        return true;
    }
    if (kv_summary_build_next(&summariser->build, &first, &n)) {
        kv_summary_build_slice(&summariser->build, rows, stride);
        return true;
    }
    struct kvs_column *group = &made->groups[summariser->group];
    kv_summary_build_end(&summariser->build, group->bytes);
    kvs_column_seal(group);
    summariser->begun = false;
    return ++summariser->group < kvs_summaries_n_groups(made);
}

struct kvs_summaries kvs_summarise_end(struct kvs_summariser *summariser)
{
    const struct kvs_summaries made = summariser->made;

    assert(summariser->group == kvs_summaries_n_groups(&made));
    kvs_arena_free(summariser->arena, summariser->scratch_class, summariser->scratch);
    summariser->scratch = NULL;
    summariser->made = (struct kvs_summaries){0};
    return made;
}

void kvs_summarise_drop(struct kvs_summariser *summariser)
{
    kvs_arena_free(summariser->arena, summariser->scratch_class, summariser->scratch);
    summariser->scratch = NULL;
    kvs_summaries_clear(&summariser->made, summariser->arena);
}

void kvs_summaries_check(const struct kvs_summaries *summaries, const struct kvs_arena *arena)
{
    assert((summaries->n_rows > 0) == (summaries->groups != NULL));
    if (summaries->groups == NULL)
        return;
    assert(kvs_arena_is_in_use(arena, summaries->list_class, summaries->groups));
    for (uint32_t i = 0; i < kvs_summaries_n_groups(summaries); i++)
        assert(summaries->groups[i].bytes != NULL &&
               kvs_column_is_in_use(&summaries->groups[i], arena));
}
