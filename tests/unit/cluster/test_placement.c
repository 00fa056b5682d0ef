/* Rows are as even as the text of the design says, a lost node takes little with it, the order
 * of the list means nothing, weights are honoured, and the units of many sessions load nodes and
 * threads as random units would.  The row function is compared with a slow one in doubles.
 *
 * Whole maps are counted, all slots of them; where a comment says so, only some slots. */
#include "kvserver/base/random.h"
#include "kvserver/cluster/placement.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME_BYTES = 16,
};

/* Makes a map of `n` members, "node-0" and so on; weights may be NULL: all 1. */
static struct kv_members *make_map(uint32_t n, const uint32_t *weights)
{
    struct kv_member *members = calloc(n, sizeof(*members));
    char(*names)[NAME_BYTES] = calloc(n, sizeof(*names));
    struct kv_members *map = NULL;
    char detail[300] = "";

    assert_true(members != NULL && names != NULL);
    for (uint32_t i = 0; i < n; i++) {
        snprintf(names[i], NAME_BYTES, "node-%u", i);
        members[i] =
            (struct kv_member){.address = names[i], .weight = weights != NULL ? weights[i] : 1};
    }
    if (kv_members_create("nodes", members, n, &map, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    free(members);
    free(names);
    return map;
}

/* ---- rows -------------------------------------------------------------------------------- */

static void rows_are_valid(void **state)
{
    static const uint32_t sizes[] = {1, 2, 3, 7, 8, 9, 50, KV_NODES_MAX};

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct kv_members *map = make_map(sizes[i], NULL);

        for (uint32_t slot = 0; slot < KV_PLACEMENT_SLOTS; slot += 211) { /* some slots */
            struct kv_placement_row row;

            kv_placement_row(map, slot, &row);
            assert_int_equal(row.n_nodes, sizes[i] < KV_ROW_NODES ? sizes[i] : KV_ROW_NODES);
            assert_int_equal(row.nodes[0], kv_placement_first(map, slot));
            for (uint32_t j = 0; j < row.n_nodes; j++) {
                assert_true(row.nodes[j] < sizes[i]);
                for (uint32_t k = 0; k < j; k++)
                    assert_int_not_equal(row.nodes[j], row.nodes[k]);
            }
        }
        free(map);
    }
}

/* The design's numbers: positions per node, the most over the mean. */
static void rows_are_even(void **state)
{
    static const struct {
        uint32_t n_nodes;
        double most;
    } cases[] = {{32, 1.025}, {100, 1.04}, {1000, 1.16}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const uint32_t n = cases[i].n_nodes;
        const double mean = (double)KV_PLACEMENT_SLOTS * KV_ROW_NODES / n;
        struct kv_members *map = make_map(n, NULL);
        uint32_t *counts = calloc(n, sizeof(*counts)), most = 0;

        assert_non_null(counts);
        for (uint32_t slot = 0; slot < KV_PLACEMENT_SLOTS; slot++) {
            struct kv_placement_row row;

            kv_placement_row(map, slot, &row);
            for (uint32_t j = 0; j < row.n_nodes; j++)
                counts[row.nodes[j]]++;
        }
        for (uint32_t node = 0; node < n; node++)
            most = counts[node] > most ? counts[node] : most;
        print_message("%u nodes: most over mean %.3f\n", n, most / mean);
        assert_true(most / mean <= cases[i].most);
        free(counts);
        free(map);
    }
}

/* How many positions change without the last member, over those that it had.  One that takes its
 * place may have had a later position of the same row, which then changes as well. */
static double changed_by_loss(uint32_t n)
{
    struct kv_members *all = make_map(n, NULL), *rest = make_map(n - 1, NULL);
    uint64_t n_changed = 0, n_lost = 0;

    for (uint32_t slot = 0; slot<KV_PLACEMENT_SLOTS; slot += n> 50 ? 7 : 3) { /* some */
        struct kv_placement_row before, after;

        kv_placement_row(all, slot, &before);
        kv_placement_row(rest, slot, &after);
        for (uint32_t j = 0; j < before.n_nodes; j++) {
            n_changed += j >= after.n_nodes || before.nodes[j] != after.nodes[j];
            n_lost += before.nodes[j] == n - 1;
        }
    }
    free(all);
    free(rest);
    return (double)n_changed / (double)n_lost;
}

static void a_lost_node_takes_little(void **state)
{
    static const struct {
        uint32_t n_nodes;
        double most;
    } cases[] = {{9, 2.2}, {16, 1.35}, {32, 1.15}, {100, 1.13}, {1000, 1.13}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const double changed = changed_by_loss(cases[i].n_nodes);

        print_message("%u nodes: a lost one changes %.3f of its share\n", cases[i].n_nodes,
                      changed);
        assert_true(changed >= 1 && changed <= cases[i].most);
    }
}

static void order_means_nothing(void **state)
{
    enum {
        N = 40,
    };
    struct kv_members *map = make_map(N, NULL), *mixed = NULL;
    struct kv_member members[N];
    char detail[300] = "";

    (void)state;
    for (uint32_t i = 0; i < N; i++)
        members[i] = map->members[(i * 7 + 3) % N];
    assert_int_equal(kv_members_create("nodes", members, N, &mixed, detail, sizeof(detail)),
                     KV_OK);
    assert_true(map->epoch == mixed->epoch);
    for (uint32_t slot = 0; slot < KV_PLACEMENT_SLOTS; slot += 17) { /* some slots */
        struct kv_placement_row left, right;

        kv_placement_row(map, slot, &left);
        kv_placement_row(mixed, slot, &right);
        for (uint32_t j = 0; j < KV_ROW_NODES; j++)
            assert_true(map->members[left.nodes[j]].id == mixed->members[right.nodes[j]].id);
    }
    free(map);
    free(mixed);
}

/* The first position goes to members exactly as their weights say. */
static void weights_are_honoured(void **state)
{
    enum {
        N = 12,
    };
    uint32_t weights[N], counts[N] = {0}, total = 0;
    struct kv_members *map;

    (void)state;
    for (uint32_t i = 0; i < N; i++)
        total += weights[i] = i < 6 ? 1 + i : 100;
    map = make_map(N, weights);
    for (uint32_t slot = 0; slot < KV_PLACEMENT_SLOTS; slot++)
        counts[kv_placement_first(map, slot)]++;
    for (uint32_t i = 0; i < N; i++) {
        const double fair = (double)KV_PLACEMENT_SLOTS * weights[i] / total;

        assert_true(fabs(counts[i] - fair) <= 5 * sqrt(fair));
    }
    free(map);
}

/* ---- the same in plain doubles ----------------------------------------------------------- */

/* -ln(hash / 2^64) / weight of a member at a position: the least has it. */
static double cost(const struct kv_member *member, uint32_t slot, uint32_t position)
{
    const uint64_t key = kv_mix64((uint64_t)slot * 8 + position + 1);
    const uint64_t hash = kv_mix64(key ^ member->id);

    /* Near 1, the difference from 1 has all digits that there are. */
    return -log1p(-((double)(~hash) + 1) / 0x1p64) / member->weight;
}

/* Whether `row` is what the definition says; ties within what doubles can tell are not
 * decided. */
static bool
is_row(const struct kv_members *map, uint32_t slot, const struct kv_placement_row *row)
{
    for (uint32_t j = 0; j < row->n_nodes; j++) {
        const double taken = cost(&map->members[row->nodes[j]], slot, j);

        for (uint32_t i = 0; i < map->n_members; i++) {
            bool is_earlier = false;

            for (uint32_t k = 0; k <= j; k++)
                is_earlier = is_earlier || row->nodes[k] == i;
            if (!is_earlier && cost(&map->members[i], slot, j) < taken * (1 - 1e-9))
                return false;
        }
    }
    return true;
}

static void as_in_doubles(void **state)
{
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 3);
    for (uint32_t round = 0; round < 60; round++) {
        const uint32_t n = 1 + (uint32_t)kv_random_below(&random, round % 10 == 0 ? 300 : 30);
        uint32_t *weights = calloc(n, sizeof(*weights));
        const uint64_t most = round % 3 == 0 ? 1 : round % 3 == 1 ? 3 : KV_MEMBER_WEIGHT_MAX;
        struct kv_members *map;

        assert_non_null(weights);
        for (uint32_t i = 0; i < n; i++)
            weights[i] = 1 + (uint32_t)kv_random_below(&random, most);
        map = make_map(n, weights);
        for (uint32_t i = 0; i < 100; i++) { /* some slots */
            const uint32_t slot = (uint32_t)kv_random_below(&random, KV_PLACEMENT_SLOTS);
            struct kv_placement_row row;

            kv_placement_row(map, slot, &row);
            if (!is_row(map, slot, &row))
                fail_msg("round %u, slot %u: not the row that doubles give", round, slot);
        }
        free(map);
        free(weights);
    }
}

/* ---- units and objects ------------------------------------------------------------------- */

/* Sessions of 256 units over 100 nodes of 128 threads: the busiest thread and the busiest node
 * are what random units would make of them. */
static void units_are_even(void **state)
{
    enum {
        NODES = 100,
        THREADS = 128,
        SESSIONS = 10000,
        UNITS = 256,
    };
    static uint32_t threads[NODES][THREADS], nodes[NODES], random_units[NODES * THREADS];
    const double mean = (double)SESSIONS * UNITS / NODES / THREADS;
    struct kv_members *map = make_map(NODES, NULL);
    uint32_t most = 0, most_node = 0, most_random = 0, least = UINT32_MAX;
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 1);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        const uint64_t root = kv_random_next(&random);
        struct kv_placement_row row;

        kv_placement_row(map, kv_placement_root_slot(root), &row);
        for (uint32_t unit = 0; unit < UNITS; unit++) {
            const uint32_t node = row.nodes[kv_placement_unit_position(unit, row.n_nodes)];

            nodes[node]++;
            threads[node][kv_placement_unit_thread(root, unit, row.n_nodes, THREADS)]++;
            random_units[kv_random_below(&random, NODES * THREADS)]++;
        }
    }
    for (uint32_t node = 0; node < NODES; node++) {
        most_node = nodes[node] > most_node ? nodes[node] : most_node;
        for (uint32_t thread = 0; thread < THREADS; thread++) {
            const uint32_t there = random_units[node * THREADS + thread];

            most = threads[node][thread] > most ? threads[node][thread] : most;
            least = threads[node][thread] < least ? threads[node][thread] : least;
            most_random = there > most_random ? there : most_random;
        }
    }
    print_message("busiest thread %.3f of the mean (random units: %.3f), idlest %.3f, busiest "
                  "node %.3f\n",
                  most / mean, most_random / mean, least / mean, most_node / mean / THREADS);
    assert_true(most / mean <= 1.35 && least / mean >= 0.65);
    assert_true(most_node / mean / THREADS <= 1.12);
    free(map);
}

/* ---- the rows of one root ---------------------------------------------------------------- */

/* Names a prompt's blocks, each by those before it and its own text. */
static void name_blocks(struct kv_random *random,
                        struct kv_id128 *names,
                        uint32_t n_common,
                        uint32_t n_names)
{
    for (uint32_t i = n_common; i < n_names; i++)
        kv_random_fill(random, &names[i], sizeof(names[i]));
}

/* Sessions whose prompts have their first block in common and no other: over k rows as evenly as
 * chance does it, and over nodes the more so, the more rows. */
static void rows_of_a_root(void **state)
{
    enum {
        NODES = 100,
        SESSIONS = 10000,
        BLOCKS = 16,
    };
    /* The busiest node, over the mean of all nodes, is at most: with one row it is one of eight
     * nodes that have everything. */
    static const struct {
        uint32_t n_rows;
        double most;
    } cases[] = {{1, 12.6}, {2, 12.6}, {4, 6.4}, {8, 4.8}, {16, 3.3}, {32, 2.8}, {64, 2.4}};
    static uint32_t branches[SESSIONS];
    struct kv_members *map = make_map(NODES, NULL);
    struct kv_id128 names[BLOCKS];
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 5);
    name_blocks(&random, names, 0, BLOCKS);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        const uint32_t n_names = 2 + (uint32_t)kv_random_below(&random, BLOCKS - 1);

        name_blocks(&random, names, 1, n_names);
        branches[i] = kv_placement_branch(names, n_names);
    }
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        const uint32_t k = cases[c].n_rows;
        uint32_t of_row[KV_ROOT_ROWS_MAX] = {0}, of_node[NODES] = {0};
        uint32_t least = SESSIONS, most = 0, most_node = 0;

        for (uint32_t i = 0; i < SESSIONS; i++)
            of_row[branches[i] % k]++;
        for (uint32_t branch = 0; branch < k; branch++) {
            const uint64_t root = kv_placement_branch_root(12345, branch, k);
            struct kv_placement_row row;

            kv_placement_row(map, kv_placement_root_slot(root), &row);
            for (uint32_t j = 0; j < row.n_nodes; j++)
                of_node[row.nodes[j]] += of_row[branch];
            least = of_row[branch] < least ? of_row[branch] : least;
            most = of_row[branch] > most ? of_row[branch] : most;
        }
        for (uint32_t node = 0; node < NODES; node++)
            most_node = of_node[node] > most_node ? of_node[node] : most_node;
        const double mean = (double)SESSIONS / k,
                     mean_node = (double)SESSIONS * KV_ROW_NODES / NODES;

        print_message("%u rows: idlest %.3f of the mean, busiest %.3f; busiest node %.2f\n", k,
                      least / mean, most / mean, most_node / mean_node);
        assert_true(least >= mean - 4 * sqrt(mean) && most <= mean + 4 * sqrt(mean));
        assert_true(most_node / mean_node <= cases[c].most);
    }
    free(map);
}

/* Prompts that have a block 1, 2, 4, 8 or 16 in common, and not the next of these, are on one row,
 * however many there are; those with another one may be anywhere. */
static void branches_meet(void **state)
{
    enum {
        ROUNDS = 2000,
        BLOCKS = 40,
    };
    struct kv_id128 names[BLOCKS];
    uint32_t n_apart = 0;
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 6);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        const uint32_t d = 1u << kv_random_below(&random, 5);
        const uint32_t most = d < 16 ? 2 * d : BLOCKS;
        const uint32_t n_left = d + (uint32_t)kv_random_below(&random, most - d);
        const uint32_t n_right = d + (uint32_t)kv_random_below(&random, most - d);
        uint32_t left, right;

        name_blocks(&random, names, 0, n_left);
        left = kv_placement_branch(names, n_left);
        assert_true(left < KV_ROOT_ROWS_MAX);
        name_blocks(&random, names, d, n_right);
        right = kv_placement_branch(names, n_right);
        for (uint32_t k = 1; k <= KV_ROOT_ROWS_MAX; k *= 2)
            assert_true(kv_placement_branch_root(i, left, k) ==
                        kv_placement_branch_root(i, right, k));
        name_blocks(&random, names, d - 1, n_right);
        n_apart += kv_placement_branch(names, n_right) != left;
    }
    assert_in_range(n_apart, ROUNDS - ROUNDS / 32, ROUNDS);
}

/* Twice as many rows move half of the branches, and none back. */
static void rows_split(void **state)
{
    (void)state;
    for (uint32_t k = 2; k <= KV_ROOT_ROWS_MAX; k *= 2) {
        uint32_t n_moved = 0;

        for (uint32_t branch = 0; branch < KV_ROOT_ROWS_MAX; branch++)
            n_moved += kv_placement_branch_root(9, branch, k) !=
                       kv_placement_branch_root(9, branch, k / 2);
        assert_int_equal(n_moved, KV_ROOT_ROWS_MAX / 2);
    }
    for (uint32_t n = 0; n <= 200; n++)
        assert_int_equal(kv_placement_is_row_count(n),
                         n == 1 || n == 2 || n == 4 || n == 8 || n == 16 || n == 32 || n == 64);
}

/* A session's units go round its nodes, and a node's go round its threads: no share is off by
 * more than one. */
static void units_are_dealt(void **state)
{
    (void)state;
    for (uint32_t n_nodes = 1; n_nodes <= KV_ROW_NODES; n_nodes++) {
        for (uint32_t n_threads = 1; n_threads <= 5; n_threads++) {
            uint32_t counts[KV_ROW_NODES][5] = {{0}};
            uint32_t n_units = 61 + n_nodes;

            for (uint32_t unit = 0; unit < n_units; unit++)
                counts[kv_placement_unit_position(unit, n_nodes)]
                      [kv_placement_unit_thread(99, unit, n_nodes, n_threads)]++;
            for (uint32_t i = 0; i < n_nodes; i++)
                for (uint32_t j = 0; j < n_threads; j++)
                    assert_in_range(counts[i][j], n_units / n_nodes / n_threads,
                                    n_units / n_nodes / n_threads + 2);
        }
    }
}

/* A node asks only the threads that can have units of a session: too few, and some unit has no
 * place; too many, and threads without one are asked. */
static void sessions_have_threads(void **state)
{
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 3);
    for (unsigned i = 0; i < 2000; i++) {
        const uint64_t root = kv_random_next(&random);
        const uint32_t n_nodes = 1 + (uint32_t)kv_random_below(&random, KV_ROW_NODES);
        const uint32_t n_threads = 1 + (uint32_t)kv_random_below(&random, 128);
        const uint32_t n_units = 1 + (uint32_t)kv_random_below(&random, 300);
        const uint32_t n_asked = kv_placement_session_threads(n_units, n_nodes, n_threads);
        const uint32_t first = kv_placement_unit_thread(root, 0, n_nodes, n_threads);
        bool has_units[128] = {false};

        for (uint32_t unit = 0; unit < n_units; unit++)
            has_units[kv_placement_unit_thread(root, unit, n_nodes, n_threads)] = true;
        for (uint32_t j = 0; j < n_threads; j++)
            assert_int_equal(has_units[(first + j) % n_threads], j < n_asked);
    }
}

static void objects_are_even(void **state)
{
    enum {
        OBJECTS = 16 * KV_PLACEMENT_SLOTS
    };
    static uint32_t counts[KV_PLACEMENT_SLOTS];
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 2);
    for (uint32_t i = 0; i < OBJECTS; i++) {
        struct kv_id128 name;
        uint32_t slot;

        kv_random_fill(&random, &name, sizeof(name));
        slot = kv_placement_object_slot(&name);
        assert_true(slot < KV_PLACEMENT_SLOTS);
        assert_int_equal(slot, kv_placement_object_slot(&name));
        counts[slot]++;
    }
    for (uint32_t slot = 0; slot < KV_PLACEMENT_SLOTS; slot++)
        assert_in_range(counts[slot], 1, 48);
}

/* The numbers are part of the contract between client and node: they must not drift.  Worked out
 * elsewhere, with 50 decimal digits. */
static void numbers_stay(void **state)
{
    static const uint32_t weights[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    struct kv_members *map = make_map(10, NULL), *weighted = make_map(10, weights);
    struct kv_id128 name = {{1, 2, 3}};
    struct kv_placement_row row;

    (void)state;
    assert_true(map->members[0].id == UINT64_C(0x7a2ef76b1ec46c7c));
    assert_true(map->epoch == UINT64_C(0x2cb9fbfd865de3e0));
    kv_placement_row(map, 12345, &row);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(row.nodes[i], ((const uint16_t[]){4, 0, 2, 8, 6, 5, 3, 9})[i]);
    kv_placement_row(weighted, 12345, &row);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(row.nodes[i], ((const uint16_t[]){4, 0, 2, 8, 6, 5, 7, 3})[i]);
    assert_int_equal(kv_placement_root_slot(12345), 56657);
    assert_int_equal(kv_placement_object_slot(&name), 8689);
    assert_true(kv_placement_prompt_root(&name) == 0x030201);
    assert_int_equal(kv_placement_branch(&name, 1), 8689 % 64);
    assert_true(kv_placement_branch_root(12345, 4, 4) == 12345);
    assert_true(kv_placement_branch_root(12345, 5, 4) == UINT64_C(0x9e3779b97f4aac4e));
    assert_true(kv_placement_branch_root(12345, 63, 64) == UINT64_C(0xefa6f4a65354b964));
    assert_int_equal(kv_placement_unit_thread(12345, 678, 8, 128), 37);
    assert_int_equal(kv_placement_object_thread(1000, 4), 0);
    assert_int_equal(kv_placement_epoch32(UINT64_C(0x0000000300000005)), 6);
    assert_int_equal(kv_placement_epoch32(UINT64_C(0x0000000500000005)), 1);
    free(map);
    free(weighted);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_valid),
        cmocka_unit_test(rows_are_even),
        cmocka_unit_test(a_lost_node_takes_little),
        cmocka_unit_test(order_means_nothing),
        cmocka_unit_test(weights_are_honoured),
        cmocka_unit_test(as_in_doubles),
        cmocka_unit_test(units_are_even),
        cmocka_unit_test(units_are_dealt),
        cmocka_unit_test(rows_of_a_root),
        cmocka_unit_test(branches_meet),
        cmocka_unit_test(rows_split),
        cmocka_unit_test(sessions_have_threads),
        cmocka_unit_test(objects_are_even),
        cmocka_unit_test(numbers_stay),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
