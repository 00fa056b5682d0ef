#include "kvserver/store/rows/arena.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_PAGES = 8,
    N_SIZES = 7,
    LENT_MAX = 4096,
    STEPS = 60000,
};

struct lent {
    uint8_t *at;
    unsigned size;
    uint8_t mark;
};

static const size_t sizes[N_SIZES] = {512, 704, 4096, 65536, 100032, 1 << 20, 2 << 20};

static void fill(const struct lent *lent, size_t bytes)
{
    memset(lent->at, lent->mark, bytes);
}

static void check(const struct lent *lent, size_t bytes)
{
    assert_int_equal(lent->at[0], lent->mark);
    assert_int_equal(lent->at[bytes / 2], lent->mark);
    assert_int_equal(lent->at[bytes - 1], lent->mark);
}

/* Random runs and frees: elements never overlap, lie in the arena, and all memory comes back.
 */
static void lends_and_takes_back(void **state)
{
    static struct lent lent[LENT_MAX];
    struct kvs_arena *arena = kvs_arena_create((uint64_t)N_PAGES * KVS_ARENA_PAGE);
    uint64_t seed = kv_clock_now(&kv_clock_real);
    struct kv_random random;
    int classes[N_SIZES];
    uint8_t *base;
    size_t n = 0;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kv_random_init(&random, seed);
    assert_non_null(arena);
    base = kvs_arena_base(arena);
    assert_int_equal(kvs_arena_bytes(arena), (uint64_t)N_PAGES * KVS_ARENA_PAGE);
    for (unsigned i = 0; i < N_SIZES; i++) {
        classes[i] = kvs_arena_class_hold(arena, sizes[i]);
        assert_true(classes[i] >= 0);
        assert_int_equal(kvs_arena_class_hold(arena, sizes[i]), classes[i]);
    }
    for (unsigned step = 0; step < STEPS; step++) {
        if (kv_random_below(&random, 100) < (step / 5000 % 2 == 0 ? 60u : 40u)) {
            unsigned size = (unsigned)kv_random_below(&random, N_SIZES);
            uint32_t want = 1 + (uint32_t)kv_random_below(&random, 20), count = 0;
            uint64_t room = kvs_arena_room(arena, classes[size]);

            if (n + want > LENT_MAX)
                continue;
            uint8_t *run = kvs_arena_alloc_run(arena, classes[size], want, &count);
            if (run == NULL) {
                assert_int_equal(room, 0);
                continue;
            }
            assert_in_range(count, 1, want);
            assert_int_equal(kvs_arena_room(arena, classes[size]), room - count);
            for (uint32_t i = 0; i < count; i++, run += sizes[size]) {
                assert_true(run >= base && run + sizes[size] <= base + kvs_arena_bytes(arena));
                lent[n] = (struct lent){run, size, (uint8_t)kv_random_next(&random)};
                fill(&lent[n++], sizes[size]);
            }
        } else if (n > 0) {
            size_t i = kv_random_below(&random, n);

            check(&lent[i], sizes[lent[i].size]);
            kvs_arena_free(arena, classes[lent[i].size], lent[i].at);
            lent[i] = lent[--n];
        }
    }
    while (n-- > 0) {
        check(&lent[n], sizes[lent[n].size]);
        kvs_arena_free(arena, classes[lent[n].size], lent[n].at);
    }
    assert_int_equal(kvs_arena_bytes_used(arena), 0);
    kvs_arena_free(arena, classes[0], NULL);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* In an empty arena a run is whole as long as a page has room. */
static void runs_are_adjacent(void **state)
{
    struct kvs_arena *arena = kvs_arena_create((uint64_t)N_PAGES * KVS_ARENA_PAGE);
    int class_id = kvs_arena_class_hold(arena, 64 << 10);
    uint32_t count;

    (void)state;
    assert_non_null(kvs_arena_alloc_run(arena, class_id, 20, &count));
    assert_int_equal(count, 20);
    assert_non_null(kvs_arena_alloc_run(arena, class_id, 12, &count));
    assert_int_equal(count, 12);
    assert_int_equal(kvs_arena_bytes_used(arena), KVS_ARENA_PAGE);
    /* More than a page: as much as one gives. */
    assert_non_null(kvs_arena_alloc_run(arena, class_id, 1000, &count));
    assert_int_equal(count, 32);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

static void full_and_one_class_takes_all(void **state)
{
    struct kvs_arena *arena = kvs_arena_create((uint64_t)N_PAGES * KVS_ARENA_PAGE + 12345);
    int small = kvs_arena_class_hold(arena, 512),
        page = kvs_arena_class_hold(arena, KVS_ARENA_PAGE);
    uint8_t *elements[N_PAGES];

    (void)state;
    for (unsigned i = 0; i < N_PAGES; i++) {
        elements[i] = kvs_arena_alloc(arena, page);
        assert_non_null(elements[i]);
    }
    assert_null(kvs_arena_alloc(arena, page));
    assert_null(kvs_arena_alloc(arena, small));
    assert_int_equal(kvs_arena_room(arena, small), 0);
    assert_int_equal(kvs_arena_bytes_used(arena), kvs_arena_bytes(arena));
    kvs_arena_free(arena, page, elements[3]);
    uint8_t *first = kvs_arena_alloc(arena, small);
    assert_ptr_equal(first, elements[3]);
    assert_null(kvs_arena_alloc(arena, page));
    kvs_arena_free(arena, small, first);
    assert_ptr_equal(kvs_arena_alloc(arena, page), elements[3]);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

static void classes_round_little(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(64 << 20);
    bool is_seen[KVS_ARENA_CLASSES_MAX] = {false};
    unsigned n_classes = 0;

    (void)state;
    assert_true(kvs_arena_class_hold(arena, KVS_ARENA_PAGE + 1) < 0);
    assert_true(kvs_arena_class_rounded(arena, KVS_ARENA_PAGE + 1) < 0);
    /* Every size up to a page has a class, and few serve all. */
    for (size_t bytes = 1; bytes <= KVS_ARENA_PAGE; bytes += bytes < 4096 ? 1 : 64) {
        int class_id = kvs_arena_class_rounded(arena, bytes);
        uint8_t *element;

        assert_in_range(class_id, 0, KVS_ARENA_CLASSES_MAX - 1);
        assert_in_range(kvs_arena_class_bytes(arena, class_id), bytes,
                        bytes < KVS_ARENA_ELEMENT_MIN ? KVS_ARENA_ELEMENT_MIN : bytes * 5 / 4);
        n_classes += !is_seen[class_id];
        is_seen[class_id] = true;
        element = kvs_arena_alloc(arena, class_id);
        assert_non_null(element);
        memset(element, 1, bytes);
        kvs_arena_free(arena, class_id, element);
    }
    assert_in_range(kvs_arena_class_rounded(arena, KVS_ARENA_PAGE), 0,
                    KVS_ARENA_CLASSES_MAX - 1);
    assert_in_range(n_classes, 1, KVS_ARENA_CLASSES_MAX - KVS_ARENA_EXACT_MAX);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* The i-th of some thousand sizes that no rounded class has. */
static size_t odd_size(unsigned i)
{
    return 8192 + 64 + 128 * (size_t)i;
}

/* More sizes than there are classes, one after the other: each has its own while it is in use.
 */
static void unused_classes_serve_other_sizes(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(64 << 20);
    int kept = kvs_arena_class_hold(arena, odd_size(5000));
    uint8_t *element = kvs_arena_alloc(arena, kept);

    (void)state;
    assert_int_equal(kvs_arena_class_bytes(arena, kept), odd_size(5000));
    memset(element, 7, odd_size(5000));
    kvs_arena_class_release(arena, kept); /* its element is still lent */
    for (unsigned i = 0; i < 10 * KVS_ARENA_CLASSES_MAX; i++) {
        int held = kvs_arena_class_hold(arena, odd_size(i));
        uint8_t *other = kvs_arena_alloc(arena, held);

        assert_int_equal(kvs_arena_class_bytes(arena, held), odd_size(i));
        assert_int_equal(kvs_arena_class_hold(arena, odd_size(i)), held);
        assert_int_not_equal(held, kept);
        memset(other, 9, odd_size(i));
        kvs_arena_free(arena, held, other);
        kvs_arena_class_release(arena, held);
        kvs_arena_class_release(arena, held);
    }
    for (size_t i = 0; i < odd_size(5000); i++)
        assert_int_equal(element[i], 7);
    assert_int_equal(kvs_arena_class_bytes(arena, kept), odd_size(5000));
    kvs_arena_free(arena, kept, element);
    assert_int_equal(kvs_arena_bytes_used(arena), 0);
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* More sizes than there are classes, at once: the last ones share rounded classes. */
static void many_sizes_at_once_are_rounded(void **state)
{
    struct kvs_arena *arena = kvs_arena_create(64 << 20);
    int classes[KVS_ARENA_EXACT_MAX], late;

    (void)state;
    for (unsigned i = 0; i < KVS_ARENA_EXACT_MAX; i++) {
        classes[i] = kvs_arena_class_hold(arena, odd_size(i));
        assert_int_equal(kvs_arena_class_bytes(arena, classes[i]), odd_size(i));
    }
    for (unsigned i = KVS_ARENA_EXACT_MAX; i < 1000; i++) {
        late = kvs_arena_class_hold(arena, odd_size(i));
        assert_in_range(late, 0, KVS_ARENA_CLASSES_MAX - 1);
        assert_in_range(kvs_arena_class_bytes(arena, late), odd_size(i) + 1,
                        odd_size(i) * 5 / 4);
        assert_int_equal(late, kvs_arena_class_rounded(arena, odd_size(i)));
        kvs_arena_class_release(arena, late);
    }
    for (unsigned i = 0; i < KVS_ARENA_EXACT_MAX; i++)
        assert_int_equal(kvs_arena_class_bytes(arena, classes[i]), odd_size(i));
    kvs_arena_class_release(arena, classes[3]);
    late = kvs_arena_class_hold(arena, odd_size(2000));
    assert_int_equal(late, classes[3]);
    assert_int_equal(kvs_arena_class_bytes(arena, late), odd_size(2000));
    kvs_arena_check(arena);
    kvs_arena_destroy(arena);
}

/* What is lent is not written to, however far the page behind it has been touched. */
static void touching_spares_what_is_in_use(void **state)
{
    (void)state;
    for (unsigned n_before = 0; n_before < 40; n_before += 3) {
        struct kvs_arena *arena = kvs_arena_create((uint64_t)N_PAGES * KVS_ARENA_PAGE);
        struct lent lent[2] = {{.size = KVS_ARENA_PAGE, .mark = 7},
                               {.size = KVS_ARENA_PAGE, .mark = 9}};

        assert_non_null(arena);
        for (unsigned i = 0; i < 2; i++) {
            for (unsigned touch = 0; touch < n_before; touch++)
                assert_int_equal(kvs_arena_touch_ahead(arena), 1);
            lent[i].at = kvs_arena_alloc(arena, kvs_arena_class_hold(arena, lent[i].size));
            assert_non_null(lent[i].at);
            fill(&lent[i], lent[i].size);
        }
        while (kvs_arena_touch_ahead(arena) > 0)
            ;
        for (unsigned i = 0; i < 2; i++)
            for (size_t at = 0; at < lent[i].size; at += 64)
                assert_int_equal(lent[i].at[at], lent[i].mark);
        kvs_arena_check(arena);
        kvs_arena_destroy(arena);
    }
}

/* Two arenas of a node: what one has no use for is the other's, to the last page. */
static void arenas_share_pages(void **state)
{
    struct kvs_pages *pages = kvs_pages_create((uint64_t)N_PAGES * KVS_ARENA_PAGE);
    struct kvs_arena *arenas[2];
    void *elements[N_PAGES + 1] = {NULL};
    int classes[2];

    (void)state;
    assert_non_null(pages);
    for (unsigned i = 0; i < 2; i++) {
        arenas[i] = kvs_arena_create_in(pages);
        assert_non_null(arenas[i]);
        classes[i] = kvs_arena_class_hold(arenas[i], KVS_ARENA_PAGE);
        assert_int_equal(kvs_arena_room(arenas[i], classes[i]), N_PAGES);
    }
    for (unsigned i = 0; i < N_PAGES; i++) {
        elements[i] = kvs_arena_alloc(arenas[i == 0], classes[i == 0]);
        assert_non_null(elements[i]);
        memset(elements[i], (int)i + 1, 64);
    }
    while (kvs_arena_touch_ahead(arenas[0]) > 0)
        ;
    for (unsigned i = 0; i < 2; i++) {
        assert_null(kvs_arena_alloc(arenas[i], classes[i]));
        assert_int_equal(kvs_arena_room(arenas[i], classes[i]), 0);
        kvs_arena_check(arenas[i]);
        assert_true(kvs_arena_is_in_use(arenas[i], classes[i], elements[1 - i]));
        assert_false(kvs_arena_is_in_use(arenas[i], classes[i], elements[i]));
    }
    kvs_pages_check(pages);
    assert_int_equal(kvs_arena_bytes_used(arenas[0]), (N_PAGES - 1) * (uint64_t)KVS_ARENA_PAGE);
    assert_int_equal(kvs_arena_bytes_used(arenas[1]), KVS_ARENA_PAGE);

    kvs_arena_free(arenas[0], classes[0], elements[3]);
    elements[3] = kvs_arena_alloc(arenas[1], classes[1]);
    assert_non_null(elements[3]);
    kvs_arena_check(arenas[1]);
    for (unsigned i = 0; i < N_PAGES; i++)
        if (i != 3)
            assert_int_equal(*(uint8_t *)elements[i], i + 1);
    kvs_arena_destroy(arenas[0]); /* with all that it has */
    assert_int_equal(kvs_arena_room(arenas[1], classes[1]), N_PAGES - 2);
    kvs_arena_destroy(arenas[1]);
    kvs_pages_check(pages);
    kvs_pages_destroy(pages);
}

/* Pages that are lent are nobody else's until they are back. */
static void lent_pages_are_missing(void **state)
{
    struct kvs_pages *pages = kvs_pages_create((uint64_t)N_PAGES * KVS_ARENA_PAGE);
    struct kvs_arena *arena = kvs_arena_create_in(pages);
    const int class_id = kvs_arena_class_hold(arena, KVS_ARENA_PAGE);
    struct kvs_lent_pages lent = {KVS_PAGE_NONE, 0}, more = {KVS_PAGE_NONE, 0};
    void *element = kvs_arena_alloc(arena, class_id);

    (void)state;
    memset(element, 7, KVS_ARENA_PAGE);
    assert_false(kvs_pages_are_short(pages));
    while (kvs_lent_bytes(&lent) < 2 * KVS_ARENA_PAGE + 1)
        assert_true(kvs_pages_lend(pages, &lent, 2 * KVS_ARENA_PAGE + 1));
    assert_int_equal(lent.n, 3);
    assert_int_equal(kvs_arena_room(arena, class_id), N_PAGES - 4);
    while (kvs_pages_lend(pages, &more, UINT64_MAX))
        ;
    assert_int_equal(more.n, N_PAGES - 4);
    assert_null(kvs_arena_alloc(arena, class_id));
    assert_true(kvs_pages_are_short(pages));
    kvs_pages_check(pages);
    kvs_arena_check(arena);

    kvs_pages_take_back(pages, &lent, 0);
    kvs_pages_check(pages);
    for (unsigned i = 0; i < 3; i++)
        assert_non_null(kvs_arena_alloc(arena, class_id));
    assert_null(kvs_arena_alloc(arena, class_id));
    kvs_pages_take_back(pages, &more, 2);
    assert_int_equal(more.n, 2);
    kvs_pages_take_back(pages, &more, 2);
    assert_int_equal(kvs_arena_room(arena, class_id), N_PAGES - 4 - 2);
    kvs_pages_take_back(pages, &more, 0);
    kvs_pages_take_back(pages, &more, 0);
    assert_int_equal(kvs_arena_room(arena, class_id), N_PAGES - 4);
    for (size_t at = 0; at < KVS_ARENA_PAGE; at += 64)
        assert_int_equal(((uint8_t *)element)[at], 7);
    kvs_arena_destroy(arena);
    kvs_pages_check(pages);
    kvs_pages_destroy(pages);
}

/* Even where they are so few that an eighth of them is none. */
static void a_few_pages_are_short(void **state)
{
    struct kvs_pages *pages = kvs_pages_create((uint64_t)(N_PAGES - 1) * KVS_ARENA_PAGE);
    struct kvs_lent_pages lent = {KVS_PAGE_NONE, 0};

    (void)state;
    assert_false(kvs_pages_are_short(pages));
    assert_true(kvs_pages_lend(pages, &lent, 4 * KVS_ARENA_PAGE));
    assert_int_equal(lent.n, 4);
    assert_true(kvs_pages_are_short(pages));
    kvs_pages_take_back(pages, &lent, 0);
    kvs_pages_destroy(pages);
}

/* What is left of a sparse page goes to others, of the same class, that are in use: then the page is
 * whole again.  Elements without an owner stay where they are. */
static void sparse_pages_become_whole(void **state)
{
    enum {
        BYTES = 32 << 10,
        PER_PAGE = KVS_ARENA_PAGE / BYTES,
        N = 3 * PER_PAGE
    };
    struct kvs_arena *arena = kvs_arena_create((uint64_t)4 * KVS_ARENA_PAGE);
    const int class_id = kvs_arena_class_rounded(arena, BYTES);
    static int whose[N];
    void *elements[N], *owner, *element;
    uint32_t at = 0, n = 0;

    (void)state;
    for (unsigned i = 0; i < N; i++) {
        elements[i] = kvs_arena_alloc(arena, class_id);
        assert_null(kvs_arena_owner(arena, elements[i]));
        kvs_arena_set_owner(arena, elements[i], &whose[i]);
    }
    assert_int_equal(kvs_arena_sparsest(arena, class_id, 0), KVS_PAGE_NONE);
    /* 3 are left of the second page, and 60 of each other one. */
    for (unsigned i = 0; i < N; i++)
        if (i / PER_PAGE == 1 ? i % PER_PAGE >= 3 : i % PER_PAGE >= 60) {
            kvs_arena_free(arena, class_id, elements[i]);
            elements[i] = NULL;
        }
    kvs_arena_check(arena);
    const int32_t page = kvs_arena_sparsest(arena, class_id, 0);
    assert_int_equal(page, 1);
    assert_int_equal(kvs_arena_sparsest(arena, class_id, 1), 0);
    assert_int_equal(kvs_arena_sparsest(arena, class_id, 2), 2);
    assert_int_equal(kvs_arena_sparsest(arena, class_id, 3), KVS_PAGE_NONE);
    /* What has no owner would stay. */
    kvs_arena_set_owner(arena, elements[PER_PAGE], NULL);
    assert_int_equal(kvs_arena_sparsest(arena, class_id, 0), 0);
    kvs_arena_set_owner(arena, elements[PER_PAGE], &whose[PER_PAGE]);
    assert_true(kvs_arena_has_page(arena, page));
    while ((element = kvs_arena_next_owned(arena, page, &at, &owner)) != NULL) {
        void *to = kvs_arena_alloc_outside(arena, class_id, page);

        assert_ptr_equal(owner, &whose[PER_PAGE + n++]);
        assert_non_null(to);
        assert_true((uint64_t)((char *)to - (char *)kvs_arena_base(arena)) / KVS_ARENA_PAGE !=
                    1);
        kvs_arena_set_owner(arena, to, owner);
        kvs_arena_free(arena, class_id, element);
        assert_ptr_equal(kvs_arena_owner(arena, to), owner);
        kvs_arena_check(arena);
    }
    assert_int_equal(n, 3);
    assert_false(kvs_arena_has_page(arena, page));
    assert_int_equal(kvs_arena_bytes_used(arena), (uint64_t)2 * KVS_ARENA_PAGE);
    at = 0;
    assert_null(kvs_arena_next_owned(arena, page, &at, &owner));
    /* Eight less three are free: no page, and no fresh one is taken. */
    assert_int_equal(kvs_arena_sparsest(arena, class_id, 0), KVS_PAGE_NONE);
    for (n = 0; kvs_arena_alloc_outside(arena, class_id, page) != NULL; n++)
        ;
    assert_int_equal(n, 8 - 3);
    kvs_arena_destroy(arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sparse_pages_become_whole),
        cmocka_unit_test(lends_and_takes_back),
        cmocka_unit_test(arenas_share_pages),
        cmocka_unit_test(lent_pages_are_missing),
        cmocka_unit_test(a_few_pages_are_short),
        cmocka_unit_test(runs_are_adjacent),
        cmocka_unit_test(full_and_one_class_takes_all),
        cmocka_unit_test(classes_round_little),
        cmocka_unit_test(unused_classes_serve_other_sizes),
        cmocka_unit_test(many_sizes_at_once_are_rounded),
        cmocka_unit_test(touching_spares_what_is_in_use),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
