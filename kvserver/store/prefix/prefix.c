#include "kvserver/store/prefix/prefix.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/map.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEAP_ROOM_MIN = 64,
    LEFT_KNOWN = 1 << 16, /* a power of two */
    PINS_AT_ONCE = 512,   /* that are looked at for their end */
};

struct kvs_prefixes {
    const struct kvs_eviction_policy *policy;
    struct kv_map *map;                      /* kvs_prefix, by name and place */
    struct kv_map *tenants;                  /* kvs_prefix_tenant */
    struct kvs_prefix *pinned, **pinned_end; /* those that were looked at last at the end */
    uint64_t n_pinned;
    struct kvs_pages *pages; /* NULL: none */
    uint64_t bytes;          /* of those in memory */
    uint64_t n_away, away_bytes;
    uint64_t tokens_bytes; /* of the tokens that they have */
    double floor;          /* the value of what went last */
    uint64_t
        left[LEFT_KNOWN]; /* of keys that left: each in one place, where the last one stays */
};

/* ---- keys -------------------------------------------------------------------------------- */

static bool is_same(const struct kv_id128 *a, const struct kv_id128 *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

static bool is_same_place(const struct kvs_prefix_place *a, const struct kvs_prefix_place *b)
{
    return a->tenant == b->tenant && a->root == b->root && a->n_nodes == b->n_nodes &&
           a->position == b->position;
}

/* A name is unique already; what else it is looked for by is mixed into it. */
static struct kv_id128 key_of(const struct kvs_prefix_place *place, const struct kv_id128 *name)
{
    const uint64_t where =
        (uint64_t)place->tenant << 32 | place->n_nodes << 16 | place->position;
    uint64_t half[2];
    struct kv_id128 key;

    memcpy(half, name->bytes, sizeof(half));
    half[0] ^= kv_mix64(where + 1);
    half[1] ^= kv_mix64(place->root + 2);
    memcpy(key.bytes, half, sizeof(half));
    return key;
}

static struct kv_id128 tenant_key(uint32_t tenant)
{
    struct kv_id128 key = {{0}};

    memcpy(key.bytes, &tenant, sizeof(tenant));
    return key;
}

/* What is remembered of a key that left, never 0. */
static uint64_t left_mark(const struct kv_id128 *key)
{
    uint64_t half[2];

    memcpy(half, key->bytes, sizeof(half));
    return kv_mix64(half[0] ^ half[1]) | 1;
}

static uint32_t left_place(uint64_t mark)
{
    return mark >> 1 & (LEFT_KNOWN - 1);
}

bool kvs_prefixes_had(const struct kvs_prefixes *prefixes,
                      const struct kvs_prefix_place *place,
                      const struct kv_id128 *name)
{
    const struct kv_id128 key = key_of(place, name);
    const uint64_t mark = left_mark(&key);

    return prefixes->left[left_place(mark)] == mark;
}

/* ---- the heap of those that may go ------------------------------------------------------- */

static void heap_place(struct kvs_prefix_heap *heap, uint32_t at, struct kvs_prefix *prefix)
{
    heap->list[at] = prefix;
    prefix->heap_at = at;
}

/* Moves the prefix to its place, up or down from the one that it has. */
static void heap_sift(struct kvs_prefix_heap *heap, struct kvs_prefix *prefix)
{
    uint32_t at = prefix->heap_at, child;

    for (; at > 0 && heap->list[(at - 1) / 2]->value > prefix->value; at = (at - 1) / 2)
        heap_place(heap, at, heap->list[(at - 1) / 2]);
    for (; (child = 2 * at + 1) < heap->n; at = child) {
        if (child + 1 < heap->n && heap->list[child + 1]->value < heap->list[child]->value)
            child++;
        if (heap->list[child]->value >= prefix->value)
            break;
        heap_place(heap, at, heap->list[child]);
    }
    heap_place(heap, at, prefix);
}

/* Room for n prefixes. */
static bool heap_grow(struct kvs_prefix_heap *heap, uint64_t n)
{
    uint32_t room = heap->room > 0 ? heap->room : HEAP_ROOM_MIN;
    struct kvs_prefix **list;

    if (n <= heap->room)
        return true;
    if (n > UINT32_MAX / 2)
        return false;
    while (room < n)
        room *= 2;
    list = realloc(heap->list, room * sizeof(list[0]));
    if (list == NULL)
        return false;
    heap->list = list;
    heap->room = room;
    return true;
}

/* For all prefixes of the tenant in each, so that none fails to enter later. */
static bool heaps_grow(struct kvs_prefix_tenant *tenant)
{
    for (int where = 0; where < KVS_PREFIX_PLACES; where++)
        if (!heap_grow(&tenant->heaps[where], tenant->n_prefixes + 1))
            return false;
    return true;
}

static enum kvs_prefix_where where_of(const struct kvs_prefix *prefix)
{
    return prefix->is_away                     ? KVS_PREFIX_AWAY
           : prefix->saved == KVS_PREFIX_SAVED ? KVS_PREFIX_IN_BOTH
                                               : KVS_PREFIX_IN_MEMORY;
}

static struct kvs_prefix_heap *heap_of(const struct kvs_prefix *prefix)
{
    return &prefix->home->tenant->heaps[where_of(prefix)];
}

static void heap_leave(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    struct kvs_prefix_heap *heap = heap_of(prefix);
    struct kvs_prefix *last = heap->list[--heap->n];

    if (prefixes->pages != NULL && !prefix->is_away)
        kvs_pages_sub_spare(prefixes->pages, prefix->home->block_bytes);
    if (last != prefix) {
        last->heap_at = prefix->heap_at;
        heap_sift(heap, last);
    }
    prefix->heap_at = UINT32_MAX;
}

static bool may_go(const struct kvs_prefix *prefix)
{
    const bool is_in_both = where_of(prefix) == KVS_PREFIX_IN_BOTH;

    return (prefix->is_away ? prefix->child == NULL : prefix->n_here == 0) &&
           prefix->n_holders == (is_in_both ? prefix->n_resting : 0) &&
           prefix->pinned_link == NULL;
}

/* Something has changed of what the heap depends on. */
static void heap_update(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    const struct kvs_eviction_facts facts = {.used_us = prefix->used_us,
                                             .n_uses = prefix->n_uses,
                                             .depth = prefix->depth,
                                             .bytes = prefix->home->block_bytes,
                                             .floor = prefix->floor};
    struct kvs_prefix_heap *heap = heap_of(prefix);

    if (!may_go(prefix)) {
        if (prefix->heap_at != UINT32_MAX)
            heap_leave(prefixes, prefix);
        return;
    }
    prefix->value = prefixes->policy->value(&facts);
    if (prefix->heap_at == UINT32_MAX) {
        prefix->heap_at = heap->n++;
        if (prefixes->pages != NULL && !prefix->is_away)
            kvs_pages_add_spare(prefixes->pages, facts.bytes);
    }
    heap_sift(heap, prefix);
}

/* The prefix counts as in memory, or no longer. */
static void count_here(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    const uint64_t bytes = prefix->home->block_bytes;

    prefixes->bytes += bytes;
    prefix->home->tenant->bytes += bytes;
    if (prefix->parent != NULL)
        prefix->parent->n_here++;
}

static void count_gone(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    const uint64_t bytes = prefix->home->block_bytes;

    prefixes->bytes -= bytes;
    prefix->home->tenant->bytes -= bytes;
    if (prefix->parent != NULL)
        prefix->parent->n_here--;
}

static void count_away(struct kvs_prefixes *prefixes, const struct kvs_prefix *prefix)
{
    prefixes->n_away++;
    prefixes->away_bytes += prefix->home->block_bytes;
    prefix->home->tenant->away_bytes += prefix->home->block_bytes;
}

static void count_not_away(struct kvs_prefixes *prefixes, const struct kvs_prefix *prefix)
{
    prefixes->n_away--;
    prefixes->away_bytes -= prefix->home->block_bytes;
    prefix->home->tenant->away_bytes -= prefix->home->block_bytes;
}

void kvs_prefix_set_saved(struct kvs_prefixes *prefixes,
                          struct kvs_prefix *prefix,
                          enum kvs_prefix_saved saved)
{
    assert(!prefix->is_away);
    if (prefix->heap_at != UINT32_MAX)
        heap_leave(prefixes, prefix);
    prefix->saved = (uint8_t)saved;
    heap_update(prefixes, prefix);
}

void kvs_prefix_set_away(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    assert(prefix->saved == KVS_PREFIX_SAVED && !prefix->is_away && prefix->n_here == 0);
    if (prefix->heap_at != UINT32_MAX)
        heap_leave(prefixes, prefix);
    count_gone(prefixes, prefix);
    prefix->is_away = true;
    count_away(prefixes, prefix);
    heap_update(prefixes, prefix);
    if (prefix->parent != NULL)
        heap_update(prefixes, prefix->parent);
}

void kvs_prefix_set_here(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    for (; prefix != NULL && prefix->is_away; prefix = prefix->parent) {
        if (prefix->heap_at != UINT32_MAX)
            heap_leave(prefixes, prefix);
        prefix->is_away = false;
        count_not_away(prefixes, prefix);
        count_here(prefixes, prefix);
        heap_update(prefixes, prefix);
    }
    if (prefix != NULL)
        heap_update(prefixes, prefix);
}

/* ---- tenants ----------------------------------------------------------------------------- */

struct kvs_prefix_tenant *kvs_prefixes_tenant(const struct kvs_prefixes *prefixes,
                                              uint32_t tenant)
{
    const struct kv_id128 key = tenant_key(tenant);

    return kv_map_get(prefixes->tenants, &key);
}

static struct kvs_prefix_tenant *tenant_make(struct kvs_prefixes *prefixes, uint32_t number)
{
    const struct kv_id128 key = tenant_key(number);
    struct kvs_prefix_tenant *tenant = kv_map_get(prefixes->tenants, &key);

    if (tenant != NULL)
        return tenant;
    tenant = calloc(1, sizeof(*tenant));
    if (tenant == NULL || !kv_map_set(prefixes->tenants, &key, tenant)) {
        free(tenant);
        return NULL;
    }
    tenant->tenant = number;
    return tenant;
}

static void tenant_free(struct kvs_prefix_tenant *tenant)
{
    for (int where = 0; where < KVS_PREFIX_PLACES; where++)
        free(tenant->heaps[where].list);
    free(tenant);
}

/* Nothing is kept for a tenant that has nothing. */
static void tenant_settle(struct kvs_prefixes *prefixes, struct kvs_prefix_tenant *tenant)
{
    const struct kv_id128 key = tenant_key(tenant->tenant);

    if (tenant->n_prefixes > 0)
        return;
    kv_map_remove(prefixes->tenants, &key);
    tenant_free(tenant);
}

/* ---- the index --------------------------------------------------------------------------- */

struct kvs_prefixes *kvs_prefixes_create(uint64_t secret,
                                         const struct kvs_eviction_policy *policy,
                                         struct kvs_pages *pages)
{
    struct kvs_prefixes *prefixes = calloc(1, sizeof(*prefixes));

    if (prefixes == NULL)
        return NULL;
    prefixes->policy = policy;
    prefixes->pinned_end = &prefixes->pinned;
    prefixes->pages = pages;
    prefixes->map = kv_map_create(secret);
    prefixes->tenants = kv_map_create(kv_mix64(secret));
    if (prefixes->map == NULL || prefixes->tenants == NULL) {
        kvs_prefixes_destroy(prefixes);
        return NULL;
    }
    return prefixes;
}

static void prefix_free(struct kvs_prefix *prefix)
{
    free(prefix->mixed);
    free(prefix->tokens);
    free(prefix);
}

void kvs_prefixes_destroy(struct kvs_prefixes *prefixes)
{
    struct kvs_prefix *prefix;
    struct kvs_prefix_tenant *tenant;
    size_t cursor = 0;

    if (prefixes == NULL)
        return;
    while (prefixes->map != NULL && (prefix = kv_map_next(prefixes->map, &cursor)) != NULL) {
        if (prefix->depth == 0)
            free(prefix->home);
        prefix_free(prefix);
    }
    cursor = 0;
    while (prefixes->tenants != NULL &&
           (tenant = kv_map_next(prefixes->tenants, &cursor)) != NULL)
        tenant_free(tenant);
    kv_map_destroy(prefixes->map);
    kv_map_destroy(prefixes->tenants);
    free(prefixes);
}

struct kvs_prefix *kvs_prefix_create(const struct kv_id128 *name,
                                     uint32_t depth,
                                     uint32_t first_thread,
                                     uint32_t n_threads)
{
    struct kvs_prefix *prefix =
        calloc(1, sizeof(*prefix) + n_threads * sizeof(prefix->blocks[0]));

    if (prefix == NULL)
        return NULL;
    prefix->name = *name;
    prefix->depth = depth;
    prefix->first_thread = (uint8_t)first_thread;
    prefix->n_threads = (uint8_t)n_threads;
    prefix->n_holders = 1;
    prefix->heap_at = UINT32_MAX;
    return prefix;
}

struct kvs_prefix *kvs_prefixes_get(const struct kvs_prefixes *prefixes,
                                    const struct kvs_prefix_place *place,
                                    const struct kv_id128 *name)
{
    const struct kv_id128 key = key_of(place, name);
    struct kvs_prefix *prefix = kv_map_get(prefixes->map, &key);

    /* Who knows a name, and where it is, can make another that has its key elsewhere. */
    return prefix != NULL && is_same(&prefix->name, name) &&
                   is_same_place(&prefix->home->place, place)
               ? prefix
               : NULL;
}

static struct kvs_prefix *find(const struct kvs_prefixes *prefixes,
                               const struct kvs_prefix_place *place,
                               const struct kv_id128 *rows_id,
                               const struct kv_id128 *name,
                               uint32_t depth)
{
    struct kvs_prefix *prefix = kvs_prefixes_get(prefixes, place, name);

    /* A name says how deep it is, and of which model; a client that says otherwise finds
     * nothing. */
    return prefix != NULL && prefix->depth == depth &&
                   (rows_id == NULL || is_same(&prefix->home->rows_id, rows_id))
               ? prefix
               : NULL;
}

struct kvs_prefix *kvs_prefixes_find(const struct kvs_prefixes *prefixes,
                                     const struct kvs_prefix_place *place,
                                     const struct kv_id128 *rows_id,
                                     const struct kv_id128 *names,
                                     uint32_t n)
{
    struct kvs_prefix *deepest = NULL;
    uint32_t low = 0, high = n;

    /* [0, low) are here, `high` is not: a prefix has its parent here. */
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        struct kvs_prefix *prefix = find(prefixes, place, rows_id, &names[middle], middle);

        if (prefix != NULL) {
            deepest = prefix;
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return deepest;
}

static struct kvs_prefix_home *home_make(struct kvs_prefixes *prefixes,
                                         const struct kvs_prefix_home *from)
{
    struct kvs_prefix_home *home = malloc(sizeof(*home));

    if (home == NULL)
        return NULL;
    *home = *from;
    home->n_prefixes = 0;
    home->tenant = tenant_make(prefixes, from->place.tenant);
    if (home->tenant == NULL) {
        free(home);
        return NULL;
    }
    return home;
}

static void home_settle(struct kvs_prefixes *prefixes, struct kvs_prefix_home *home)
{
    if (home->n_prefixes > 0)
        return;
    tenant_settle(prefixes, home->tenant);
    free(home);
}

static void link_to_parent(struct kvs_prefix *prefix, struct kvs_prefix *parent)
{
    prefix->parent = parent;
    prefix->prev = NULL;
    prefix->next = parent != NULL ? parent->child : NULL;
    if (prefix->next != NULL)
        prefix->next->prev = prefix;
    if (parent != NULL)
        parent->child = prefix;
}

static uint64_t tokens_bytes(const struct kvs_prefix *prefix)
{
    return prefix->tokens != NULL ? KV_BLOCK_TOKENS * sizeof(prefix->tokens[0]) : 0;
}

bool kvs_prefixes_add(struct kvs_prefixes *prefixes,
                      struct kvs_prefix *parent,
                      const struct kvs_prefix_home *home,
                      struct kvs_prefix *prefix,
                      uint64_t now_us)
{
    const struct kv_id128 key = key_of(&home->place, &prefix->name);
    struct kvs_prefix_home *own = parent != NULL ? parent->home : NULL;

    assert(prefix->depth == (parent != NULL ? parent->depth + 1 : 0));
    assert(parent == NULL || parent->home != NULL);
    if (kv_map_get(prefixes->map, &key) != NULL)
        return false;
    if (own == NULL)
        own = home_make(prefixes, home);
    if (own == NULL)
        return false;
    if (!heaps_grow(own->tenant) || !kv_map_set(prefixes->map, &key, prefix)) {
        home_settle(prefixes, own);
        return false;
    }
    prefix->home = own;
    prefix->used_us = prefix->added_us = now_us;
    prefix->floor = prefixes->floor;
    prefix->n_uses = 1;
    link_to_parent(prefix, parent);
    own->n_prefixes++;
    own->tenant->n_prefixes++;
    if (prefix->is_away)
        count_away(prefixes, prefix);
    else
        count_here(prefixes, prefix);
    prefixes->tokens_bytes += tokens_bytes(prefix);
    heap_update(prefixes, prefix);
    if (parent != NULL)
        heap_update(prefixes, parent);
    return true;
}

void kvs_prefix_use(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix, uint64_t now_us)
{
    /* Those before it hear of it when it goes (kvs_prefixes_remove()): until then it is here, and
     * so are they. */
    if (prefix->used_us < now_us)
        prefix->used_us = now_us;
    prefix->floor = prefixes->floor;
    if (prefix->n_uses < UINT32_MAX)
        prefix->n_uses++;
    heap_update(prefixes, prefix);
}

void kvs_prefix_hold(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    prefix->n_holders++;
    if (prefix->home != NULL)
        heap_update(prefixes, prefix);
}

void kvs_prefix_release(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    assert(prefix->n_holders > 0);
    prefix->n_holders--;
    if (prefix->home != NULL)
        heap_update(prefixes, prefix);
    else if (prefix->n_holders + prefix->n_refs == 0)
        prefix_free(prefix);
}

void kvs_prefix_rest(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix, uint64_t used_us)
{
    assert(prefix->n_resting < prefix->n_holders);
    prefix->n_resting++;
    if (prefix->used_us < used_us)
        prefix->used_us = used_us;
    if (prefix->home != NULL)
        heap_update(prefixes, prefix);
}

void kvs_prefix_wake(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    assert(prefix->n_resting > 0);
    prefix->n_resting--;
    if (prefix->home != NULL)
        heap_update(prefixes, prefix);
}

void kvs_prefix_ref(struct kvs_prefix *prefix)
{
    prefix->n_refs++;
}

void kvs_prefix_unref(struct kvs_prefix *prefix)
{
    assert(prefix->n_refs > 0);
    if (--prefix->n_refs == 0 && prefix->home == NULL && prefix->n_holders == 0)
        prefix_free(prefix);
}

/* The least valuable of those of all tenants that are there. */
static struct kvs_prefix *victim_of_all(const struct kvs_prefixes *prefixes,
                                        enum kvs_prefix_where where)
{
    struct kvs_prefix *least[2] = {NULL,
                                   NULL}; /* of tenants above their share, of the others */
    const uint64_t n_tenants = kv_map_count(prefixes->tenants);
    const struct kvs_prefix_tenant *tenant;
    size_t cursor = 0;

    while ((tenant = kv_map_next(prefixes->tenants, &cursor)) != NULL) {
        const struct kvs_prefix_heap *heap = &tenant->heaps[where];
        const bool is_modest = where == KVS_PREFIX_AWAY
                                   ? tenant->away_bytes <= prefixes->away_bytes / n_tenants
                                   : tenant->bytes <= prefixes->bytes / n_tenants;
        struct kvs_prefix **of = &least[is_modest];

        if (heap->n > 0 && (*of == NULL || heap->list[0]->value < (*of)->value))
            *of = heap->list[0];
    }
    return least[0] != NULL ? least[0] : least[1];
}

static struct kvs_prefix *victim_of(const struct kvs_prefixes *prefixes,
                                    const struct kvs_prefix_tenant *tenant,
                                    enum kvs_prefix_where where)
{
    if (tenant == NULL)
        return victim_of_all(prefixes, where);
    return tenant->heaps[where].n > 0 ? tenant->heaps[where].list[0] : NULL;
}

struct kvs_prefix *kvs_prefixes_victim(const struct kvs_prefixes *prefixes,
                                       const struct kvs_prefix_tenant *tenant)
{
    struct kvs_prefix *victim = victim_of(prefixes, tenant, KVS_PREFIX_IN_BOTH);

    return victim != NULL ? victim : victim_of(prefixes, tenant, KVS_PREFIX_IN_MEMORY);
}

struct kvs_prefix *kvs_prefixes_unsaved_victim(const struct kvs_prefixes *prefixes)
{
    return victim_of_all(prefixes, KVS_PREFIX_IN_MEMORY);
}

struct kvs_prefix *kvs_prefixes_disk_victim(const struct kvs_prefixes *prefixes)
{
    return victim_of_all(prefixes, KVS_PREFIX_AWAY);
}

struct kvs_prefix *kvs_prefix_last(struct kvs_prefix *prefix)
{
    while (prefix->child != NULL)
        prefix = prefix->child;
    return prefix;
}

/* What was known of the one that goes is true of its parent, too.  Its first use, by who published
 * it, was counted there: who opened the parent used it, and who published both has one for each. */
static void inherit(struct kvs_prefix *parent, const struct kvs_prefix *prefix)
{
    if (parent->used_us < prefix->used_us)
        parent->used_us = prefix->used_us;
    if (parent->floor < prefix->floor)
        parent->floor = prefix->floor;
    parent->n_uses = parent->n_uses < UINT32_MAX - prefix->n_uses
                         ? parent->n_uses + prefix->n_uses - 1
                         : UINT32_MAX;
}

void kvs_prefixes_remove(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    struct kvs_prefix_home *home = prefix->home;
    struct kvs_prefix *parent = prefix->parent;
    const struct kv_id128 key = key_of(&home->place, &prefix->name);

    assert(prefix->home != NULL && prefix->child == NULL);
    if (prefix->pinned_link != NULL)
        kvs_prefix_unpin(prefixes, prefix);
    if (prefix->heap_at != UINT32_MAX) {
        if (prefix->value > prefixes->floor)
            prefixes->floor = prefix->value;
        heap_leave(prefixes, prefix);
    }
    kv_map_remove(prefixes->map, &key);
    prefixes->left[left_place(left_mark(&key))] = left_mark(&key);
    if (prefix->prev != NULL)
        prefix->prev->next = prefix->next;
    else if (parent != NULL)
        parent->child = prefix->next;
    if (prefix->next != NULL)
        prefix->next->prev = prefix->prev;
    prefix->next = prefix->prev = NULL;
    if (prefix->is_away)
        count_not_away(prefixes, prefix);
    else
        count_gone(prefixes, prefix);
    prefix->home = NULL;
    prefix->n_holders++;
    prefixes->tokens_bytes -= tokens_bytes(prefix);
    home->tenant->n_prefixes--;
    home->n_prefixes--;
    if (parent != NULL) {
        inherit(parent, prefix);
        heap_update(prefixes, parent);
    }
    home_settle(prefixes, home);
}

/* ---- pins -------------------------------------------------------------------------------- */

static void list_pin(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    prefix->pinned_next = NULL;
    prefix->pinned_link = prefixes->pinned_end;
    *prefixes->pinned_end = prefix;
    prefixes->pinned_end = &prefix->pinned_next;
}

static void unlist_pin(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    *prefix->pinned_link = prefix->pinned_next;
    if (prefix->pinned_next != NULL)
        prefix->pinned_next->pinned_link = prefix->pinned_link;
    else
        prefixes->pinned_end = prefix->pinned_link;
    prefix->pinned_link = NULL;
    prefix->pinned_next = NULL;
}

void kvs_prefix_pin(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix, uint64_t until_us)
{
    prefix->pinned_us = until_us;
    if (prefix->pinned_link != NULL)
        return;
    list_pin(prefixes, prefix);
    prefixes->n_pinned++;
    heap_update(prefixes, prefix);
}

void kvs_prefix_unpin(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    if (prefix->pinned_link == NULL)
        return;
    unlist_pin(prefixes, prefix);
    prefixes->n_pinned--;
    heap_update(prefixes, prefix);
}

void kvs_prefixes_expire(struct kvs_prefixes *prefixes, uint64_t now_us)
{
    const uint64_t n = prefixes->n_pinned < PINS_AT_ONCE ? prefixes->n_pinned : PINS_AT_ONCE;

    for (uint64_t i = 0; i < n; i++) {
        struct kvs_prefix *prefix = prefixes->pinned;

        if (prefix->pinned_us <= now_us) {
            kvs_prefix_unpin(prefixes, prefix);
        } else {
            unlist_pin(prefixes, prefix);
            list_pin(prefixes, prefix);
        }
    }
}

/* ---- sums and lists ---------------------------------------------------------------------- */

uint64_t kvs_prefixes_count(const struct kvs_prefixes *prefixes)
{
    return kv_map_count(prefixes->map);
}

uint64_t kvs_prefixes_bytes(const struct kvs_prefixes *prefixes)
{
    return prefixes->bytes;
}

uint64_t kvs_prefixes_away(const struct kvs_prefixes *prefixes)
{
    return prefixes->n_away;
}

uint64_t kvs_prefixes_pinned(const struct kvs_prefixes *prefixes)
{
    return prefixes->n_pinned;
}

uint64_t kvs_prefixes_tokens_bytes(const struct kvs_prefixes *prefixes)
{
    return prefixes->tokens_bytes;
}

const struct kvs_prefix_tenant *kvs_prefixes_next_tenant(const struct kvs_prefixes *prefixes,
                                                         size_t *cursor)
{
    return kv_map_next(prefixes->tenants, cursor);
}

struct kvs_prefix *kvs_prefixes_next(const struct kvs_prefixes *prefixes, size_t *cursor)
{
    return kv_map_next(prefixes->map, cursor);
}

void kvs_prefixes_watch(struct kvs_prefixes *prefixes, size_t *cursor)
{
    kv_map_watch(prefixes->map, cursor);
}

/* ---- writers ----------------------------------------------------------------------------- */

static uint32_t n_runs_in(const struct kvs_prefix *prefix)
{
    return prefix->mixed != NULL ? prefix->mixed->n_runs : 1;
}

static uint64_t writer_of_run(const struct kvs_prefix *prefix, uint32_t run)
{
    return prefix->mixed != NULL ? prefix->mixed->runs[run].writer : prefix->writer;
}

static uint64_t last_writer(const struct kvs_prefix *prefix)
{
    return writer_of_run(prefix, n_runs_in(prefix) - 1);
}

/* The runs of all blocks up to the prefix, from the last one on backwards.  Returns their number;
 * `runs` has room for that many, or is NULL.  Neighbors of one writer are one run. */
static uint32_t runs_of(const struct kvs_prefix *prefix, uint32_t n, struct kv_writer_run *runs)
{
    uint32_t n_runs = 0;
    uint64_t after = 0;

    for (; prefix != NULL; prefix = prefix->parent) {
        const uint32_t end = (prefix->depth + 1) * KV_BLOCK_TOKENS;
        const uint32_t n_here = n_runs_in(prefix);

        for (uint32_t i = n_here; i-- > 0;) {
            const uint64_t writer = writer_of_run(prefix, i);

            if (writer == after)
                continue;
            after = writer;
            n_runs++;
            if (runs != NULL)
                runs[n - n_runs] = (struct kv_writer_run){
                    .writer = writer,
                    .end = i + 1 == n_here ? end : prefix->mixed->runs[i].end};
        }
    }
    return n_runs;
}

struct kvs_prefix *kvs_prefix_fit(struct kvs_prefix *prefix, uint64_t writer)
{
    uint32_t n = runs_of(prefix, 0, NULL);

    for (; prefix != NULL && n + (last_writer(prefix) != writer) > KV_WRITER_RUNS_MAX;
         prefix = prefix->parent) {
        /* A run that begins before the block is still there without it. */
        const bool is_joined =
            prefix->parent != NULL && last_writer(prefix->parent) == writer_of_run(prefix, 0);

        n -= n_runs_in(prefix) - is_joined;
    }
    return prefix;
}

struct kv_writers *kvs_prefix_writers(const struct kvs_prefix *prefix, uint64_t writer)
{
    const uint32_t n = runs_of(prefix, 0, NULL);
    struct kv_writers *writers = malloc(sizeof(*writers) + (n + 1) * sizeof(writers->runs[0]));

    if (writers == NULL)
        return NULL;
    (void)runs_of(prefix, n, writers->runs);
    /* The one who wrote the last rows may go on: that is no new run. */
    writers->n_runs = writers->runs[n - 1].writer == writer ? n : n + 1;
    writers->runs[writers->n_runs - 1] =
        (struct kv_writer_run){.writer = writer, .end = UINT32_MAX};
    return writers;
}

/* ---- check ------------------------------------------------------------------------------- */

static void check_prefix(const struct kvs_prefixes *prefixes, const struct kvs_prefix *prefix)
{
    const struct kvs_prefix *parent = prefix->parent;
    const struct kvs_prefix_heap *heap = heap_of(prefix);
    uint32_t n_here = 0;

    for (const struct kvs_prefix *child = prefix->child; child != NULL; child = child->next)
        n_here += !child->is_away;
    assert(n_here == prefix->n_here && prefix->n_resting <= prefix->n_holders);
    assert(!prefix->is_away || (prefix->saved == KVS_PREFIX_SAVED && n_here == 0));
    assert(parent == NULL || prefix->saved != KVS_PREFIX_SAVED ||
           parent->saved == KVS_PREFIX_SAVED);
    assert(find(prefixes, &prefix->home->place, NULL, &prefix->name, prefix->depth) == prefix);
    assert(prefix->depth == (parent != NULL ? parent->depth + 1 : 0));
    assert(parent == NULL || parent->home == prefix->home);
    assert(prefix->prev != NULL ? prefix->prev->next == prefix
                                : parent == NULL || parent->child == prefix);
    assert(prefix->next == NULL || prefix->next->prev == prefix);
    assert(prefix->child == NULL ||
           (prefix->child->parent == prefix && prefix->child->prev == NULL));
    assert(may_go(prefix) == (prefix->heap_at != UINT32_MAX));
    assert(prefix->heap_at == UINT32_MAX || heap->list[prefix->heap_at] == prefix);
}

static void check_heap(const struct kvs_prefix_tenant *tenant, enum kvs_prefix_where where)
{
    const struct kvs_prefix_heap *heap = &tenant->heaps[where];

    assert(heap->n <= tenant->n_prefixes && tenant->n_prefixes <= heap->room);
    for (uint32_t i = 0; i < heap->n; i++) {
        const struct kvs_prefix *prefix = heap->list[i];

        assert(prefix->heap_at == i && prefix->home->tenant == tenant);
        assert(where_of(prefix) == where);
        assert(i == 0 || heap->list[(i - 1) / 2]->value <= prefix->value);
    }
}

void kvs_prefixes_check(const struct kvs_prefixes *prefixes)
{
    const struct kvs_prefix_tenant *tenant;
    const struct kvs_prefix *prefix;
    uint64_t bytes = 0, of_tokens = 0, of_tenants = 0, n_pinned = 0, n_listed = 0, n = 0;
    uint64_t n_away = 0, away_bytes = 0, of_tenants_away = 0;
    size_t cursor = 0;

    kv_map_check(prefixes->map);
    while ((prefix = kv_map_next(prefixes->map, &cursor)) != NULL) {
        check_prefix(prefixes, prefix);
        bytes += prefix->is_away ? 0 : prefix->home->block_bytes;
        away_bytes += prefix->is_away ? prefix->home->block_bytes : 0;
        n_away += prefix->is_away;
        of_tokens += tokens_bytes(prefix);
        n_pinned += prefix->pinned_link != NULL;
    }
    cursor = 0;
    while ((tenant = kv_map_next(prefixes->tenants, &cursor)) != NULL) {
        assert(tenant->n_prefixes > 0);
        of_tenants += tenant->bytes;
        of_tenants_away += tenant->away_bytes;
        n += tenant->n_prefixes;
        for (int where = 0; where < KVS_PREFIX_PLACES; where++)
            check_heap(tenant, where);
    }
    for (prefix = prefixes->pinned; prefix != NULL; prefix = prefix->pinned_next) {
        assert(*prefix->pinned_link == prefix);
        n_listed++;
    }
    assert(n_pinned == n_listed && n_pinned == prefixes->n_pinned);
    assert(*prefixes->pinned_end == NULL);
    assert(away_bytes == prefixes->away_bytes && of_tenants_away == away_bytes);
    assert(of_tokens == prefixes->tokens_bytes && n_away == prefixes->n_away);
    assert(bytes == prefixes->bytes && of_tenants == bytes && n == kv_map_count(prefixes->map));
}
