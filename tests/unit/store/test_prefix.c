/* The index of prefixes: random operations beside a plain model of it, the order in which each
 * policy lets prefixes go, shares of tenants, pins, holds, and many prefixes. */
#include "kvserver/store/prefix/prefix.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    MANY = 100000,
    MODEL_MAX = 300,
    STEPS = 100000,
    BLOCK_BYTES = 1 << 16,
};

static struct kvs_pages *pages;
static struct kv_random rnd;

static int set_up(void **state)
{
    const char *seed = getenv("KV_TEST_SEED");

    (void)state;
    pages = kvs_pages_create(8 << 20);
    kv_random_init(&rnd, seed != NULL ? strtoull(seed, NULL, 0) : 41);
    return pages != NULL ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    kvs_pages_destroy(pages);
    return 0;
}

static struct kvs_prefixes *create(const char *policy)
{
    struct kvs_prefixes *prefixes = kvs_prefixes_create(7, kvs_eviction_find(policy), pages);

    assert_non_null(prefixes);
    return prefixes;
}

static struct kvs_prefix_home home_of(uint32_t tenant, uint64_t root)
{
    return (struct kvs_prefix_home){
        .place = {.tenant = tenant, .root = root, .n_nodes = 1, .position = 0},
        .block_bytes = BLOCK_BYTES,
    };
}

static struct kv_id128 name_of(uint64_t number)
{
    struct kv_id128 name;

    memset(&name, 0x5a, sizeof(name));
    memcpy(name.bytes, &number, sizeof(number));
    return name;
}

static struct kvs_prefix *add(struct kvs_prefixes *prefixes,
                              struct kvs_prefix *parent,
                              uint32_t tenant,
                              uint64_t number,
                              uint64_t now_us)
{
    const struct kv_id128 name = name_of(number);
    const struct kvs_prefix_home home = home_of(tenant, tenant + 100);
    struct kvs_prefix *prefix =
        kvs_prefix_create(&name, parent != NULL ? parent->depth + 1 : 0, 0, 1);

    assert_non_null(prefix);
    assert_true(kvs_prefixes_add(prefixes, parent, &home, prefix, now_us));
    kvs_prefix_release(prefixes, prefix);
    return prefix;
}

static void drop(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix)
{
    kvs_prefixes_remove(prefixes, prefix);
    kvs_prefix_release(prefixes, prefix);
}

static uint64_t spare(void)
{
    return atomic_load(&pages->spare_bytes);
}

/* ---- beside a model ---------------------------------------------------------------------- */

/* What is known of a prefix without the index. */
struct known {
    struct kvs_prefix *prefix; /* NULL: it is not there */
    struct known *parent;
    uint64_t number, used_us, n_uses;
    uint32_t tenant, n_children, n_holds;
    uint32_t n_resting; /* of these */
    uint64_t pinned_us; /* 0: it is not */
    bool is_saved, is_away;
};

static struct known model[MODEL_MAX];
static uint64_t next_number = 1;

static uint32_t n_here_behind(const struct known *known)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < MODEL_MAX; i++)
        n += model[i].prefix != NULL && model[i].parent == known && !model[i].is_away;
    return n;
}

/* From memory, or, if it is away, from the disk. */
static bool may_go(const struct known *known)
{
    const uint32_t n_waive = known->is_saved && !known->is_away ? known->n_resting : 0;

    return known->prefix != NULL && known->n_holds == n_waive && known->pinned_us == 0 &&
           (known->is_away ? known->n_children == 0 : n_here_behind(known) == 0);
}

static struct known *any_known(bool is_there)
{
    for (int i = 0; i < 20; i++) {
        struct known *known = &model[kv_random_below(&rnd, MODEL_MAX)];

        if ((known->prefix != NULL) == is_there)
            return known;
    }
    return NULL;
}

static void model_add(struct kvs_prefixes *prefixes, uint64_t now_us)
{
    struct known *known = any_known(false);
    struct known *parent = kv_random_below(&rnd, 4) > 0 ? any_known(true) : NULL;

    if (known == NULL)
        return;
    *known = (struct known){.parent = parent,
                            .number = next_number++,
                            .used_us = now_us,
                            .n_uses = 1,
                            .tenant = parent != NULL ? parent->tenant
                                                     : (uint32_t)kv_random_below(&rnd, 3)};
    for (struct known *at = parent; at != NULL && at->is_away; at = at->parent)
        at->is_away = false;
    if (parent != NULL)
        kvs_prefix_set_here(prefixes, parent->prefix);
    known->prefix = add(prefixes, parent != NULL ? parent->prefix : NULL, known->tenant,
                        known->number, now_us);
    if (parent != NULL)
        parent->n_children++;
}

static void model_remove(struct kvs_prefixes *prefixes, struct known *known)
{
    struct known *parent = known->parent;

    drop(prefixes, known->prefix);
    known->prefix = NULL;
    if (parent == NULL)
        return;
    parent->n_children--;
    parent->n_uses += known->n_uses - 1;
    if (parent->used_us < known->used_us)
        parent->used_us = known->used_us;
}

/* Returns when the least recently used of a tenant was used, of those that are saved, or away, or of the
 * others; several may be. */
static uint64_t least_used_us(uint32_t tenant, bool is_saved, bool is_away)
{
    uint64_t least = UINT64_MAX;

    for (uint32_t i = 0; i < MODEL_MAX; i++)
        if (may_go(&model[i]) && model[i].is_away == is_away && model[i].tenant == tenant &&
            model[i].is_saved == is_saved && model[i].used_us < least)
            least = model[i].used_us;
    return least;
}

static struct known *known_of(const struct kvs_prefix *prefix)
{
    for (uint32_t i = 0; i < MODEL_MAX; i++)
        if (model[i].prefix == prefix)
            return &model[i];
    fail_msg("a prefix that is not there");
    return NULL;
}

static void model_evict(struct kvs_prefixes *prefixes)
{
    const uint32_t number = (uint32_t)kv_random_below(&rnd, 3);
    const struct kvs_prefix_tenant *tenant = kvs_prefixes_tenant(prefixes, number);
    struct kvs_prefix *victim = tenant != NULL ? kvs_prefixes_victim(prefixes, tenant) : NULL;

    if (victim == NULL) {
        assert_true(least_used_us(number, true, false) == UINT64_MAX);
        assert_true(least_used_us(number, false, false) == UINT64_MAX);
        return;
    }
    struct known *known = known_of(victim);
    assert_true(may_go(known) && !known->is_away && known->tenant == number);
    /* What is saved goes first: it is not lost. */
    assert_int_equal(known->is_saved, least_used_us(number, true, false) != UINT64_MAX);
    assert_int_equal(known->used_us, least_used_us(number, known->is_saved, false));
    if (known->is_saved) {
        kvs_prefix_set_away(prefixes, known->prefix);
        known->is_away = true;
        return;
    }
    assert_int_equal(known->n_uses, victim->n_uses);
    model_remove(prefixes, known);
}

/* From the disk: the least recently used of those of a tenant that are away. */
static void model_evict_away(struct kvs_prefixes *prefixes)
{
    struct kvs_prefix *victim = kvs_prefixes_disk_victim(prefixes);

    if (victim != NULL) {
        struct known *known = known_of(victim);

        assert_true(known->is_away && may_go(known));
        assert_int_equal(known->used_us, least_used_us(known->tenant, true, true));
        model_remove(prefixes, known);
        return;
    }
    for (uint32_t i = 0; i < MODEL_MAX; i++)
        assert_false(may_go(&model[i]) && model[i].is_away);
}

/* It is saved, if those before it are. */
static void model_save(struct kvs_prefixes *prefixes, struct known *known)
{
    if (known->is_saved || (known->parent != NULL && !known->parent->is_saved))
        return;
    kvs_prefix_set_saved(prefixes, known->prefix, KVS_PREFIX_SAVED);
    known->is_saved = true;
}

static void model_come_back(struct kvs_prefixes *prefixes, struct known *known)
{
    kvs_prefix_set_here(prefixes, known->prefix);
    for (; known != NULL && known->is_away; known = known->parent)
        known->is_away = false;
}

static void model_pin(struct kvs_prefixes *prefixes, struct known *known, uint64_t now_us)
{
    const uint64_t until_us =
        kv_random_below(&rnd, 2) > 0 ? UINT64_MAX : now_us + 1 + kv_random_below(&rnd, 500);

    if (kv_random_below(&rnd, 3) == 0) {
        kvs_prefix_unpin(prefixes, known->prefix);
        known->pinned_us = 0;
        return;
    }
    kvs_prefix_pin(prefixes, known->prefix, until_us);
    known->pinned_us = until_us;
}

static void model_expire(struct kvs_prefixes *prefixes, uint64_t now_us)
{
    kvs_prefixes_expire(prefixes, now_us);
    for (uint32_t i = 0; i < MODEL_MAX; i++)
        if (model[i].prefix != NULL && model[i].pinned_us != 0 && model[i].pinned_us <= now_us)
            model[i].pinned_us = 0;
}

static void model_find(const struct kvs_prefixes *prefixes, const struct known *known)
{
    const struct kvs_prefix_home home = home_of(known->tenant, known->tenant + 100);
    struct kv_id128 names[MODEL_MAX + 1];
    const uint32_t n = known->prefix->depth + 1;

    for (const struct known *at = known; at != NULL; at = at->parent)
        names[at->prefix->depth] = name_of(at->number);
    names[n] = name_of(UINT64_MAX);
    assert_ptr_equal(kvs_prefixes_find(prefixes, &home.place, NULL, names, n + 1),
                     known->prefix);
    assert_ptr_equal(kvs_prefixes_get(prefixes, &home.place, &names[n - 1]), known->prefix);
    struct kvs_prefix_place other = home.place;
    other.root++;
    assert_null(kvs_prefixes_find(prefixes, &other, NULL, names, n));
}

static void use(struct kvs_prefixes *prefixes, struct known *known, uint64_t now_us)
{
    kvs_prefix_use(prefixes, known->prefix, now_us);
    known->n_uses++;
    if (known->used_us < now_us)
        known->used_us = now_us;
}

static void model_rest(struct kvs_prefixes *prefixes, struct known *known, uint64_t used_us)
{
    kvs_prefix_rest(prefixes, known->prefix, used_us);
    known->n_resting++;
    if (known->used_us < used_us)
        known->used_us = used_us;
}

static void model_check(const struct kvs_prefixes *prefixes)
{
    uint64_t n = 0, n_may_go = 0, n_away = 0;

    kvs_prefixes_check(prefixes);
    for (uint32_t i = 0; i < MODEL_MAX; i++) {
        n += model[i].prefix != NULL;
        n_away += model[i].prefix != NULL && model[i].is_away;
        n_may_go += may_go(&model[i]) && !model[i].is_away;
    }
    assert_int_equal(kvs_prefixes_count(prefixes), n);
    assert_int_equal(kvs_prefixes_away(prefixes), n_away);
    assert_int_equal(kvs_prefixes_bytes(prefixes), (n - n_away) * BLOCK_BYTES);
    assert_int_equal(spare(), n_may_go * BLOCK_BYTES);
}

static void agrees_with_model(void **state)
{
    struct kvs_prefixes *prefixes = create("lru");
    uint64_t now_us = 1000;

    (void)state;
    memset(model, 0, sizeof(model));
    for (int i = 0; i < STEPS; i++) {
        struct known *known = any_known(true);
        const uint64_t what = kv_random_below(&rnd, 28);

        now_us += kv_random_below(&rnd, 3);
        if (what < 6 || known == NULL)
            model_add(prefixes, now_us);
        else if (what < 10)
            model_evict(prefixes);
        else if (what < 13)
            use(prefixes, known, now_us + (what == 10 ? 300 : 0));
        else if (what < 14)
            model_pin(prefixes, known, now_us);
        else if (what < 15)
            model_expire(prefixes, now_us);
        else if (what < 16)
            model_find(prefixes, known);
        else if (what < 18)
            model_save(prefixes, known);
        else if (what < 19)
            model_come_back(prefixes, known);
        else if (what < 20)
            model_evict_away(prefixes);
        else if (what < 22 && known->n_holds < 3) {
            kvs_prefix_hold(prefixes, known->prefix);
            known->n_holds++;
        } else if (what < 24 && known->n_holds > known->n_resting) {
            kvs_prefix_release(prefixes, known->prefix);
            known->n_holds--;
        } else if (what < 26 && known->n_holds > known->n_resting) {
            model_rest(prefixes, known, now_us - kv_random_below(&rnd, 100));
        } else if (known->n_resting > 0) {
            kvs_prefix_wake(prefixes, known->prefix);
            known->n_resting--;
        }
        if (i % 16 == 0)
            model_check(prefixes);
    }
    model_check(prefixes);
    for (uint32_t i = 0; i < MODEL_MAX; i++)
        while (model[i].prefix != NULL && model[i].n_holds-- > 0) {
            if (model[i].n_resting > 0)
                kvs_prefix_wake(prefixes, model[i].prefix);
            model[i].n_resting -= model[i].n_resting > 0;
            kvs_prefix_release(prefixes, model[i].prefix);
        }
    kvs_prefixes_destroy(prefixes);
    atomic_store(&pages->spare_bytes, 0);
}

/* ---- what goes first --------------------------------------------------------------------- */

static uint64_t number_of(const struct kvs_prefix *prefix)
{
    uint64_t number;

    assert_non_null(prefix);
    memcpy(&number, prefix->name.bytes, sizeof(number));
    return number;
}

static void expect_order(struct kvs_prefixes *prefixes, const uint64_t *numbers, int n)
{
    for (int i = 0; i < n; i++) {
        struct kvs_prefix *victim = kvs_prefixes_victim(prefixes, NULL);

        assert_int_equal(number_of(victim), numbers[i]);
        drop(prefixes, victim);
        kvs_prefixes_check(prefixes);
    }
    assert_null(kvs_prefixes_victim(prefixes, NULL));
    assert_int_equal(spare(), 0);
}

/* 1 <- 2 <- 3, and 4 <- 5, used in that order; then 2, which means 1 as well. */
static void lru_goes_by_last_use(void **state)
{
    struct kvs_prefixes *prefixes = create("lru");
    struct kvs_prefix *one = add(prefixes, NULL, 0, 1, 10);
    struct kvs_prefix *two = add(prefixes, one, 0, 2, 11);
    struct kvs_prefix *three = add(prefixes, two, 0, 3, 12);
    struct kvs_prefix *four = add(prefixes, NULL, 0, 4, 13);

    (void)state;
    (void)three;
    (void)add(prefixes, four, 0, 5, 14);
    kvs_prefix_use(prefixes, two, 20);
    expect_order(prefixes, (const uint64_t[]){3, 5, 4, 2, 1}, 5);
    kvs_prefixes_destroy(prefixes);
}

/* What will be used soon counts as used then. */
static void hint_keeps_until_then(void **state)
{
    struct kvs_prefixes *prefixes = create("lru");
    struct kvs_prefix *one = add(prefixes, NULL, 0, 1, 10);

    (void)state;
    kvs_prefix_use(prefixes, one, 2000);
    (void)add(prefixes, NULL, 0, 2, 1999);
    (void)add(prefixes, NULL, 0, 3, 2001);
    expect_order(prefixes, (const uint64_t[]){2, 1, 3}, 3);
    kvs_prefixes_destroy(prefixes);
}

/* Often used stays, deep stays longer than shallow, and what was often used once goes in the
 * end. */
static void gdsf_goes_by_worth(void **state)
{
    struct kvs_prefixes *prefixes = create("gdsf");
    struct kvs_prefix *often = add(prefixes, NULL, 0, 1, 10), *deep = NULL, *last = NULL;
    uint64_t n_gone = 0;

    (void)state;
    for (int i = 0; i < 10; i++)
        kvs_prefix_use(prefixes, often, 11);
    (void)add(prefixes, NULL, 0, 2, 20);
    for (uint64_t i = 0; i < 129; i++)
        deep = add(prefixes, deep, 0, 1000 + i, 21);
    /* Of those without children: 2 (worth 1 use at depth 0), then the deep one (3 times that). */
    assert_int_equal(number_of(kvs_prefixes_victim(prefixes, NULL)), 2);
    drop(prefixes, kvs_prefixes_victim(prefixes, NULL));
    assert_ptr_equal(kvs_prefixes_victim(prefixes, NULL), deep);
    /* New ones come all the time; the old favorite is not used again. */
    for (uint64_t i = 0; often != NULL; i++) {
        (void)add(prefixes, NULL, 0, 5000 + i, 30 + i);
        last = kvs_prefixes_victim(prefixes, NULL);
        if (last == often)
            often = NULL;
        drop(prefixes, last);
        n_gone++;
        assert_true(n_gone < 10000);
    }
    assert_true(n_gone > 5);
    kvs_prefixes_check(prefixes);
    kvs_prefixes_destroy(prefixes);
    atomic_store(&pages->spare_bytes, 0);
}

/* Of two prompts that are worth the same, one goes as a whole before the other one. */
static void gdsf_takes_one_by_one(void **state)
{
    struct kvs_prefixes *prefixes = create("gdsf");
    struct kvs_prefix *parents[2] = {NULL, NULL};

    (void)state;
    for (uint64_t i = 0; i < 6; i++)
        parents[i / 3] = add(prefixes, parents[i / 3], 0, i, i);
    kvs_prefix_use(prefixes, parents[1], 10);
    expect_order(prefixes, (const uint64_t[]){2, 1, 0, 5, 4, 3}, 6);
    kvs_prefixes_destroy(prefixes);
}

static void held_and_pinned_stay(void **state)
{
    struct kvs_prefixes *prefixes = create("lru");
    struct kvs_prefix *held = add(prefixes, NULL, 0, 1, 10);
    struct kvs_prefix *parent = add(prefixes, NULL, 0, 2, 11);
    struct kvs_prefix *pinned = add(prefixes, parent, 0, 3, 12);

    (void)state;
    kvs_prefix_hold(prefixes, held);
    kvs_prefix_pin(prefixes, pinned, 100);
    assert_null(kvs_prefixes_victim(prefixes, NULL));
    kvs_prefixes_expire(prefixes, 99);
    assert_null(kvs_prefixes_victim(prefixes, NULL));
    kvs_prefix_pin(prefixes, pinned, 200); /* replaces the first */
    kvs_prefixes_expire(prefixes, 150);
    assert_null(kvs_prefixes_victim(prefixes, NULL));
    kvs_prefixes_expire(prefixes, 200);
    assert_ptr_equal(kvs_prefixes_victim(prefixes, NULL), pinned);
    kvs_prefix_release(prefixes, held);
    expect_order(prefixes, (const uint64_t[]){1, 3, 2}, 3);
    kvs_prefixes_destroy(prefixes);
}

/* However many pins there are, few are looked at in a call; all are, in some calls. */
static void pins_end_some_at_a_time(void **state)
{
    enum {
        N_PINS = 5000
    };
    struct kvs_prefixes *prefixes = create("lru");
    uint64_t n_before = N_PINS, n_calls = 0;

    (void)state;
    for (uint64_t i = 0; i < N_PINS; i++)
        kvs_prefix_pin(prefixes, add(prefixes, NULL, 0, i, 1), i % 10 == 0 ? 300 : 200);
    while (kvs_prefixes_pinned(prefixes) > N_PINS / 10) {
        kvs_prefixes_expire(prefixes, 200);
        kvs_prefixes_check(prefixes);
        assert_true(n_before - kvs_prefixes_pinned(prefixes) <= 512);
        n_before = kvs_prefixes_pinned(prefixes);
        n_calls++;
    }
    assert_in_range(n_calls, N_PINS / 512, 2 * N_PINS / 512);
    kvs_prefix_unpin(prefixes,
                     kvs_prefixes_get(prefixes, &(const struct kvs_prefix_place){0, 100, 1, 0},
                                      &(const struct kv_id128[]){name_of(10)}[0]));
    for (n_calls = 0; n_calls < 3; n_calls++)
        kvs_prefixes_expire(prefixes, 299);
    assert_int_equal(kvs_prefixes_pinned(prefixes), N_PINS / 10 - 1);
    kvs_prefixes_expire(prefixes, 300);
    assert_int_equal(kvs_prefixes_pinned(prefixes), 0);
    kvs_prefixes_check(prefixes);
    kvs_prefixes_destroy(prefixes);
    atomic_store(&pages->spare_bytes, 0);
}

/* A tenant that has little loses nothing to one that has much, however old it is. */
static void shares_of_tenants(void **state)
{
    struct kvs_prefixes *prefixes = create("lru");
    uint32_t n[2] = {20, 80};

    (void)state;
    for (uint32_t i = 0; i < n[0]; i++)
        (void)add(prefixes, NULL, 0, i, i);
    for (uint32_t i = 0; i < n[1]; i++)
        (void)add(prefixes, NULL, 1, 1000 + i, 1000 + i);
    while (n[1] > n[0]) {
        struct kvs_prefix *victim = kvs_prefixes_victim(prefixes, NULL);

        assert_int_equal(victim->home->place.tenant, 1);
        drop(prefixes, victim);
        n[1]--;
    }
    /* Both have the same: the oldest of all goes. */
    assert_int_equal(number_of(kvs_prefixes_victim(prefixes, NULL)), 0);
    /* Nothing of the one above its share may go: then it is the other. */
    drop(prefixes, kvs_prefixes_victim(prefixes, NULL));
    for (uint32_t i = 60; i < 80; i++)
        kvs_prefix_hold(prefixes,
                        kvs_prefixes_get(prefixes, &(struct kvs_prefix_place){1, 101, 1, 0},
                                         &(const struct kv_id128[]){name_of(1000 + i)}[0]));
    assert_int_equal(kvs_prefixes_victim(prefixes, NULL)->home->place.tenant, 0);
    kvs_prefixes_check(prefixes);
    kvs_prefixes_destroy(prefixes);
    atomic_store(&pages->spare_bytes, 0);
}

/* ---- names made to deceive --------------------------------------------------------------- */

/* What a name is looked for by besides is mixed into it, and no secret: a client makes a name
 * that is taken for one in another place, and finds nothing there. */
static void made_names_find_nothing(void **state)
{
    struct kvs_prefixes *prefixes = create("lru");
    const struct kvs_prefix_home there = home_of(3, 103), here = home_of(3, 500);
    struct kvs_prefix *prefix = add(prefixes, NULL, 3, 1, 1), *made;
    struct kv_id128 name = name_of(1);
    uint64_t half[2];

    (void)state;
    memcpy(half, name.bytes, sizeof(half));
    half[1] ^= kv_mix64(there.place.root + 2) ^ kv_mix64(here.place.root + 2);
    memcpy(name.bytes, half, sizeof(half));
    assert_null(kvs_prefixes_get(prefixes, &here.place, &name));
    assert_null(kvs_prefixes_find(prefixes, &here.place, NULL, &name, 1));
    made = kvs_prefix_create(&name, 0, 0, 1);
    assert_non_null(made);
    assert_false(kvs_prefixes_add(prefixes, NULL, &here, made, 2));
    kvs_prefix_release(prefixes, made);
    kvs_prefixes_check(prefixes);
    assert_ptr_equal(
        kvs_prefixes_get(prefixes, &there.place, &(const struct kv_id128[]){name_of(1)}[0]),
        prefix);
    kvs_prefixes_destroy(prefixes);
    atomic_store(&pages->spare_bytes, 0);
}

/* ---- writers ----------------------------------------------------------------------------- */

/* A session may write as the one did whose rows it has: neighbors have different writers. */
static void writers_are_runs(void **state)
{
    struct kvs_prefixes *prefixes = create("lru");
    struct kvs_prefix *first = add(prefixes, NULL, 1, 1, 1);
    struct kvs_prefix *second = add(prefixes, first, 1, 2, 1);
    struct kv_writers *writers;

    (void)state;
    first->writer = 7;
    second->writer = 8;
    writers = kvs_prefix_writers(second, 9);
    assert_non_null(writers);
    assert_int_equal(writers->n_runs, 3);
    assert_int_equal(writers->runs[0].end, KV_BLOCK_TOKENS);
    assert_int_equal(writers->runs[1].end, 2 * KV_BLOCK_TOKENS);
    assert_int_equal(kv_writers_own(writers), 9);
    free(writers);
    writers = kvs_prefix_writers(second, 8);
    assert_non_null(writers);
    assert_int_equal(writers->n_runs, 2);
    assert_int_equal(writers->runs[1].writer, 8);
    assert_int_equal(writers->runs[1].end, UINT32_MAX);
    free(writers);

    /* The limit: with a run of its own, a session has one more than what it begins with. */
    first->mixed = malloc(sizeof(*writers) + KV_WRITER_RUNS_MAX * sizeof(writers->runs[0]));
    assert_non_null(first->mixed);
    for (uint32_t i = 0; i < KV_WRITER_RUNS_MAX; i++)
        first->mixed->runs[i] = (struct kv_writer_run){100 + i, i + 1};
    first->mixed->n_runs = KV_WRITER_RUNS_MAX - 2;
    assert_ptr_equal(kvs_prefix_fit(second, 9), second);
    first->mixed->n_runs = KV_WRITER_RUNS_MAX - 1;
    assert_ptr_equal(kvs_prefix_fit(second, 8), second);
    assert_ptr_equal(kvs_prefix_fit(second, 9), first);
    second->writer = first->mixed->runs[KV_WRITER_RUNS_MAX - 2].writer;
    assert_ptr_equal(kvs_prefix_fit(second, 9), second); /* the same run in both */
    first->mixed->n_runs = KV_WRITER_RUNS_MAX;
    assert_ptr_equal(kvs_prefix_fit(second, 9), NULL);
    assert_ptr_equal(kvs_prefix_fit(first, 9), NULL);
    assert_ptr_equal(kvs_prefix_fit(first, 100 + KV_WRITER_RUNS_MAX - 1), first);
    kvs_prefixes_destroy(prefixes);
    atomic_store(&pages->spare_bytes, 0);
}

/* ---- many -------------------------------------------------------------------------------- */

static void many_prefixes(void **state)
{
    struct kvs_prefixes *prefixes = create("lru");
    struct kvs_prefix *parent = NULL;
    uint64_t before = 0;

    (void)state;
    for (uint64_t i = 0; i < MANY; i++)
        parent = add(prefixes, i % 100 != 0 ? parent : NULL, i / 100 % 7, i, i);
    kvs_prefixes_check(prefixes);
    assert_int_equal(kvs_prefixes_count(prefixes), MANY);
    assert_int_equal(spare(), MANY / 100 * (uint64_t)BLOCK_BYTES);
    for (uint64_t i = 0; i < MANY; i++) {
        struct kvs_prefix *victim = kvs_prefixes_victim(prefixes, NULL);

        assert_non_null(victim);
        assert_null(victim->child);
        before = victim->depth;
        drop(prefixes, victim);
    }
    assert_int_equal(before, 0);
    assert_int_equal(kvs_prefixes_count(prefixes), 0);
    assert_int_equal(kvs_prefixes_bytes(prefixes), 0);
    assert_int_equal(spare(), 0);
    kvs_prefixes_destroy(prefixes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_model),       cmocka_unit_test(lru_goes_by_last_use),
        cmocka_unit_test(hint_keeps_until_then),   cmocka_unit_test(gdsf_goes_by_worth),
        cmocka_unit_test(gdsf_takes_one_by_one),   cmocka_unit_test(held_and_pinned_stay),
        cmocka_unit_test(pins_end_some_at_a_time), cmocka_unit_test(shares_of_tenants),
        cmocka_unit_test(made_names_find_nothing), cmocka_unit_test(writers_are_runs),
        cmocka_unit_test(many_prefixes),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
