#include "tests/sim/node_look.h"

#include "kvserver/store/index/builder.h"
#include "kvserver/store/index/scorer_pq.h"
#include "kvserver/store/node_private.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/tier/disk_tier_private.h"
#include "kvserver/store/tier/object_tier_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOVES_MOST = 16, /* slices, in a step */
};

/* Pages with free records: these stay with the store, and so do the pages where they are. */
struct held {
    const char *base;
    bool *pages;
};

static void hold(void *arg, const void *record)
{
    const struct held *held = arg;

    held->pages[(uint64_t)((const char *)record - held->base) / KVS_ARENA_PAGE] = true;
}

static uint64_t record_bytes(const struct kvs_segment_store *store)
{
    const uint64_t n_pages = kvs_arena_bytes(store->arena) / KVS_ARENA_PAGE;
    struct held held = {kvs_arena_base(store->arena), calloc(n_pages, sizeof(bool))};
    uint64_t n_held = 0;

    if (held.pages == NULL)
        abort();
    kvs_segment_store_visit_free(store, hold, &held);
    for (uint64_t i = 0; i < n_pages; i++)
        n_held += held.pages[i];
    free(held.pages);
    return n_held * KVS_ARENA_PAGE;
}

void node_look(struct kvs_node *node, struct node_look *ret_look)
{
    struct node_look look = {.sessions = node->control.n_sessions,
                             .calls = node->control.n_calls,
                             .prefixes = kvs_prefixes_count(node->control.prefixes)};

    for (uint32_t i = 0; i < node->control.config.clients_max; i++)
        look.clients += node->control.clients[i].state != KVS_CLIENT_FREE;
    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kvs_shard *data = &node->shard[i];
        uint64_t lent = kvs_arena_bytes_used(data->arena);
        uint64_t records = record_bytes(&data->store);

        look.works += kv_pool_used(data->requests);
        look.bodies += kv_pool_used(data->bodies);
        look.stagings += kv_pool_used(data->stagings);
        look.segments += data->store.n_segments;
        struct kvs_indexer_stats index;
        kvs_indexer_get_stats(data->indexer, &index);
        look.codebooks += kv_pool_used(data->codebooks.pool);
        look.jobs += index.n_jobs;
        look.queriers += !kvs_query_queue_is_idle(kvs_query_queue_of(data));
        look.objects += kv_map_count(data->objects.map);
        look.object_bytes += data->objects.bytes;
        look.bytes_strayed += lent > records ? lent - records : 0;
        look.corrupt_rows += kvs_counted(&data->stats.corrupt_rows);
        look.bad_messages += kvs_counted(&data->stats.bad_messages);
    }
    *ret_look = look;
}

/* Are these the codes that the codebook gives the segment's keys? */
static bool are_codes(const struct kvs_codebook *book,
                      const struct kvs_codes *codes,
                      const uint8_t *rows,
                      enum kv_key_type type,
                      uint32_t row_bytes)
{
    static float keys[KV_PQ_TILE * KVS_CODEBOOK_DIM_MAX],
        turned[KV_PQ_TILE * KVS_CODEBOOK_DIM_MAX];
    static uint8_t right[KV_PQ_SUBSPACES_MAX * KV_PQ_TILE], own[sizeof(right)];
    const struct kv_kmeans_codebook kmeans = kvs_pq_kmeans(book);

    kv_exact_scores_load(type, rows, row_bytes, codes->n_coded, book->shape.d, keys);
    kv_kmeans_encode(&book->shape, &kmeans, kvs_pq_rotate(book, keys, codes->n_coded, turned),
                     codes->n_coded, right, KV_PQ_TILE);
    kv_tile_get(&book->shape, codes->column.bytes, 0, codes->n_coded, own, KV_PQ_TILE);
    for (uint32_t j = 0; j < book->shape.m; j++)
        if (memcmp(right + (size_t)j * KV_PQ_TILE, own + (size_t)j * KV_PQ_TILE,
                   codes->n_coded) != 0)
            return false;
    return true;
}

static const char *unit_fault(const struct kvs_shard *data,
                              const struct kvs_shard_session *part,
                              const struct kvs_unit *unit)
{
    const struct kv_layer_schema *layer = &part->schema->layers[unit->layer];
    static char text[160];
    const char *why = NULL;

    for (uint32_t i = 0; i < kvs_unit_n_segments(unit) && why == NULL; i++) {
        const struct kvs_segment *segment = kvs_unit_segment(unit, i);
        const struct kvs_codes *codes = kvs_unit_codes(unit, i);
        const struct kvs_codebook *book;

        if (segment->training && kvs_unit_block(unit, i)->pins == 0)
            why = "a job has it, and it is not pinned";
        if (codes->column.bytes == NULL)
            continue;
        book = kvs_codebook_at(&data->codebooks, codes->codebook);
        if (!kvs_block_is_here(kvs_unit_block(unit, i)) || codes->n_lost > 0 ||
            kvs_segment_has_bad(kvs_unit_block(unit, i), unit->at))
            continue;
        if (codes->n_coded == 0 || codes->n_coded > segment->n_written)
            why = "its codes are too few or too many";
        else if (book->refs == 0 || book->shape.d != layer->d_k)
            why = "its codebook is not its own";
        else if (!are_codes(book, codes, kvs_unit_row(unit, i * KV_BLOCK_TOKENS),
                            (enum kv_key_type)layer->dtype, unit->row_bytes))
            why = "its codes are not those of its keys";
        if (why != NULL)
            snprintf(text, sizeof(text), "layer %u, head %u, block %u: %u rows, %u codes: %s",
                     unit->layer, unit->kv_head, i, (unsigned)segment->n_written,
                     codes->n_coded, why);
    }
    return why != NULL ? text : NULL;
}

const char *node_codes_fault(struct kvs_node *node)
{
    const char *why = NULL;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kvs_shard *data = &node->shard[i];

        for (uint32_t j = 0; j < data->n_sessions; j++)
            for (uint32_t k = 0; data->sessions[j].used && k < data->sessions[j].n_units; k++)
                if (why == NULL)
                    why = unit_fault(data, &data->sessions[j], &data->sessions[j].units[k]);
    }
    return why;
}

/* The unit of a session; NULL: that data thread does not have it. */
static struct kvs_unit *
unit_of(const struct kvs_shard *data, const struct node_place *place, unsigned which)
{
    const struct kvs_shard_session *part = &data->sessions[place->sessions[which]];

    return part->used ? kvs_shard_session_unit(part, place->layer, place->head) : NULL;
}

bool node_swap(struct kvs_node *node, const struct node_place *place)
{
    for (uint32_t i = 0; i < node->n_threads; i++) {
        struct kvs_unit *a = unit_of(&node->shard[i], place, 0);
        struct kvs_unit *b = unit_of(&node->shard[i], place, 1);

        if (a == NULL || b == NULL || place->block >= kvs_unit_n_segments(a) ||
            place->block >= kvs_unit_n_segments(b))
            continue;
        struct kvs_block **of_a = &a->blocks->list[place->block];
        struct kvs_block **of_b = &b->blocks->list[place->block];
        struct kvs_block *block = *of_a;

        *of_a = *of_b;
        *of_b = block;
        return kvs_unit_block(a, place->block) != kvs_unit_block(b, place->block);
    }
    return false;
}

/* Any segment in memory of what is kept by name; NULL: there is none. */
static struct kvs_block *any_kept(struct kvs_node *node,
                                  struct kv_random *random,
                                  uint32_t *ret_at,
                                  struct kvs_segment_image *ret_image)
{
    const uint32_t thread = (uint32_t)kv_random_below(random, node->n_threads);
    const uint64_t n = kvs_prefixes_count(node->control.prefixes);
    struct kvs_prefix *prefix = NULL;
    size_t cursor = 0;

    for (uint64_t i = n > 0 ? 1 + kv_random_below(random, n) : 0; i > 0; i--)
        prefix = kvs_prefixes_next(node->control.prefixes, &cursor);
    if (prefix == NULL)
        return NULL;
    struct kvs_block **block = kvs_prefix_block(prefix, thread, node->n_threads);
    if (block == NULL || *block == NULL || !kvs_block_is_here(*block) ||
        (*block)->n_segments == 0)
        return NULL;
    *ret_at = (uint32_t)kv_random_below(random, (*block)->n_segments);
    return kvs_block_image(&node->shard[thread].store, *block, *ret_at, ret_image) ? *block
                                                                                   : NULL;
}

static void flip(struct kv_random *random, void *bytes, size_t n_bytes)
{
    ((uint8_t *)bytes)[kv_random_below(random, n_bytes)] ^=
        (uint8_t)(1 << kv_random_below(random, 8));
}

bool node_damage(struct kvs_node *node, struct kv_random *random)
{
    const size_t crcs_bytes = KV_BLOCK_TOKENS * sizeof(uint32_t);
    struct kvs_segment_image image, other_image;
    uint32_t at, other_at;
    struct kvs_block *block = any_kept(node, random, &at, &image), *other;

    if (block == NULL)
        return false;
    switch (kv_random_below(random, 4)) {
    case 0:
        flip(random, kvs_block_crcs(block, at), crcs_bytes);
        return true;
    case 1:
        other = any_kept(node, random, &other_at, &other_image);
        if (other == NULL || image.rows_bytes != other_image.rows_bytes ||
            (other == block && other_at == at))
            return false;
        memcpy(kvs_block_rows(block, at), kvs_block_rows(other, other_at), image.rows_bytes);
        if (kv_random_below(random, 2) == 0)
            memcpy(kvs_block_crcs(block, at), kvs_block_crcs(other, other_at), crcs_bytes);
        return true;
    default:
        flip(random, kvs_block_rows(block, at), image.rows_bytes);
        return true;
    }
}

struct node_saved {
    struct kv_id128 name, rows_id; /* of an object: its key */
    struct kvs_prefix_place place;
    uint32_t depth;
    bool is_object;
    uint64_t version, ends_us; /* of an object; on the lasting clock */
};

/* Whether the object is on disk as it is: a later put may have given it other times, which are still to be
 * written. */
static bool is_as_saved(const struct kvs_stored_object *object)
{
    return object->is_saved && !object->kept->is_in_batch && object->kept->link == NULL;
}

/* Adds the objects that are saved. */
static struct node_saved *
list_objects(const struct kvs_node *node, struct node_saved *list, uint64_t *n)
{
    const struct kv_clock *clock = node->control.config.clock;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kvs_objects *objects = &node->shard[i].objects;

        list = realloc(list, (*n + kv_map_count(objects->map) + 1) * sizeof(*list));
        if (list == NULL)
            abort();
        for (const struct kvs_stored_object *object = objects->first; object != NULL;
             object = object->next)
            if (is_as_saved(object))
                list[(*n)++] = (struct node_saved){
                    .name = object->key,
                    .is_object = true,
                    .version = object->version,
                    .ends_us = object->expiry.at_us == KVS_EXPIRY_NEVER
                                   ? KVS_EXPIRY_NEVER
                                   : kv_clock_lasting(clock) + object->expiry.at_us -
                                         kv_clock_now(clock)};
    }
    return list;
}

static bool has_object(const struct kvs_node *node, const struct node_saved *saved)
{
    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kvs_stored_object *object =
            kvs_objects_find(&node->shard[i].objects, &saved->name);

        if (object != NULL && object->version == saved->version && object->is_saved)
            return true;
    }
    return saved->ends_us <= kv_clock_lasting(node->control.config.clock);
}

struct node_saved *node_list_saved(const struct kvs_node *node, uint64_t *ret_n)
{
    const uint64_t most = kvs_prefixes_count(node->control.prefixes);
    struct node_saved *list = malloc((most + 1) * sizeof(*list));
    const struct kvs_prefix *prefix;
    size_t cursor = 0;

    *ret_n = 0;
    if (list == NULL)
        abort();
    while ((prefix = kvs_prefixes_next(node->control.prefixes, &cursor)) != NULL)
        if (prefix->saved == KVS_PREFIX_SAVED)
            list[(*ret_n)++] = (struct node_saved){.name = prefix->name,
                                                   .rows_id = prefix->home->rows_id,
                                                   .place = prefix->home->place,
                                                   .depth = prefix->depth};
    return list_objects(node, list, ret_n);
}

uint32_t node_count_saved(const struct kvs_node *node, const struct kv_id128 *names, uint32_t n)
{
    uint64_t n_saved;
    struct node_saved *saved = node_list_saved(node, &n_saved);
    bool is_saved = true;
    uint32_t count = 0;

    while (count < n && is_saved) {
        is_saved = false;
        for (uint64_t i = 0; i < n_saved; i++)
            is_saved = is_saved || (!saved[i].is_object && saved[i].depth == count &&
                                    memcmp(&saved[i].name, &names[count], sizeof(*names)) == 0);
        count += is_saved;
    }
    free(saved);
    return count;
}

const char *
node_saved_fault(const struct kvs_node *node, const struct node_saved *saved, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        const struct kvs_prefix *prefix;

        if (saved[i].is_object) {
            if (!has_object(node, &saved[i]))
                return "an object that was saved is not there";
            continue;
        }
        prefix = kvs_prefixes_get(node->control.prefixes, &saved[i].place, &saved[i].name);

        if (prefix == NULL)
            return "a block that was saved is not there";
        if (prefix->depth != saved[i].depth ||
            memcmp(&prefix->home->rows_id, &saved[i].rows_id, sizeof(saved[i].rows_id)) != 0)
            return "a block that was saved is another";
    }
    return NULL;
}

bool node_bring_back(struct kvs_node *node)
{
    bool are_here = true;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        struct kvs_shard *shard = &node->shard[i];

        for (uint32_t j = 0; j < shard->n_sessions; j++)
            for (uint32_t k = 0; k < shard->sessions[j].blocks.n; k++)
                for (struct kvs_block *block = shard->sessions[j].blocks.list[k]; block != NULL;
                     block = block->under)
                    are_here = kvs_block_need(&shard->store, block) && are_here;
    }
    return are_here;
}

uint64_t node_let_go(struct kvs_node *node, uint32_t thread, size_t bytes)
{
    struct kvs_disk_tier *tier = node->shard[thread].tier;
    _Atomic bool *is_giving = &node->control.pages->is_giving;
    const bool was_giving = atomic_load(is_giving);
    size_t n;

    if (tier == NULL)
        return 0;
    atomic_store(is_giving, true);
    n = kvs_let_go(tier, bytes);
    for (unsigned i = 0; i < MOVES_MOST && kvs_condense(tier); i++)
        ;
    atomic_store(is_giving, was_giving);
    return n;
}

bool node_has_all(const struct kvs_node *node, const struct kv_id128 *token)
{
    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kvs_shard *shard = &node->shard[i];

        for (uint32_t j = 0; j < shard->n_sessions; j++) {
            const struct kvs_shard_session *session = &shard->sessions[j];

            if (!session->used || memcmp(&session->token, token, sizeof(*token)) != 0)
                continue;
            for (uint32_t k = 0; k < session->blocks.n; k++)
                for (const struct kvs_block *block = session->blocks.list[k]; block != NULL;
                     block = block->under)
                    if (!kvs_block_is_here(block))
                        return false;
        }
    }
    return true;
}

uint64_t node_n_loaded(const struct kvs_node *node)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < node->n_threads; i++)
        if (node->shard[i].tier != NULL)
            n +=
                kvs_counted(&kvs_disk_tier_counts(node->shard[i].tier)->loaded_blocks) +
                kvs_counted(&kvs_object_tier_counts(node->shard[i].object_tier)->load_us.count);
    return n;
}

uint32_t node_verify(struct kvs_node *node,
                     const struct node_place *place,
                     unsigned which,
                     bool ret_is_bad[KV_BLOCK_TOKENS])
{
    const uint32_t begin = place->block * KV_BLOCK_TOKENS;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kvs_shard *data = &node->shard[i];
        const struct kvs_unit *unit = unit_of(data, place, which);

        if (unit == NULL || unit->committed <= begin)
            continue;
        uint32_t n_rows = unit->committed - begin;
        if (n_rows > KV_BLOCK_TOKENS)
            n_rows = KV_BLOCK_TOKENS;
        for (uint32_t j = 0; j < n_rows; j++)
            ret_is_bad[j] =
                kvs_shard_session_verify(&data->sessions[place->sessions[which]], unit,
                                         begin + j, 1, kvs_unit_row(unit, begin + j),
                                         kvs_unit_crc(unit, begin + j)) == 0;
        return n_rows;
    }
    return 0;
}
