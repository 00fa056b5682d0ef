/* test_oracle.c - the oracle of queries against answers that were found by hand. */
#include "tests/support/oracle.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows of one element: row i's score is that of its key; its value is i. */
static void make_rows(struct oracle_rows *rows, const double *keys, uint32_t n)
{
    oracle_rows_make(rows, n, 1, 1);
    for (uint32_t i = 0; i < n; i++) {
        rows->tokens[i] = 10 + i;
        rows->keys[i] = keys[i];
        rows->values[i] = i;
    }
}

static const float ones[] = {1, 1};

static struct oracle_question top(uint32_t k)
{
    return (struct oracle_question){.queries = ones,
                                    .n_queries = 1,
                                    .scale = 1,
                                    .merge = KV_MERGE_SUM,
                                    .k = k,
                                    .factor = 1};
}

/* Whether an answer of these ids is right. */
static bool allows(const struct oracle *oracle, const uint32_t *ids, uint32_t n)
{
    const struct oracle_answer answer = {.n_chosen = n, .n_ids = n, .ids = ids};

    return oracle_choice_fault(oracle, &answer) == NULL;
}

#define ALLOWS(oracle, ...) \
    allows(oracle, (const uint32_t[]){__VA_ARGS__}, sizeof((uint32_t[]){__VA_ARGS__}) / 4)

/* Weights of 4, 1 and 2 sevenths. */
static const double sevenths[] = {1.3862943611198906, 0, 0.6931471805599453};

static void the_best_are_chosen(void **state)
{
    struct oracle_question question = top(2);
    struct oracle_rows rows;
    struct oracle oracle;
    float scores[] = {4.0f / 7, 2.0f / 7};
    struct oracle_answer answer = {
        .n_chosen = 2, .n_ids = 2, .ids = (const uint32_t[]){10, 12}, .scores = scores};

    (void)state;
    make_rows(&rows, sevenths, 3);
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 10, 12));
    assert_false(ALLOWS(&oracle, 10, 11));
    assert_false(ALLOWS(&oracle, 10));
    assert_false(ALLOWS(&oracle, 12, 10));
    assert_false(ALLOWS(&oracle, 10, 11, 12));
    assert_null(oracle_choice_fault(&oracle, &answer));
    scores[1] = 2.00001f / 7;
    assert_non_null(oracle_choice_fault(&oracle, &answer));
    oracle_free(&oracle);
    oracle_rows_free(&rows);
}

static void a_share_is_as_few_as_have_it(void **state)
{
    struct oracle_question question = top(3);
    struct oracle_rows rows;
    struct oracle oracle;

    (void)state;
    make_rows(&rows, sevenths, 3);
    question.selection = KV_SELECT_MASS;
    question.share = 0.57f; /* 4 / 7 is 0.5714 */
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 10));
    assert_false(ALLOWS(&oracle, 10, 12));
    oracle_free(&oracle);
    question.share = 0.58f;
    oracle_make(&oracle, &question, &rows);
    assert_false(ALLOWS(&oracle, 10));
    assert_true(ALLOWS(&oracle, 10, 12));
    oracle_free(&oracle);
    question.selection = KV_SELECT_THRESHOLD;
    question.share = 0.25f + 0.001f;
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 10, 12));
    assert_false(ALLOWS(&oracle, 10, 11, 12));
    oracle_free(&oracle);
    oracle_rows_free(&rows);
}

/* The same number ties, to the lower token; one that rounding may confuse with it is either. */
static void ties_and_near_ties(void **state)
{
    static const double ties[] = {0, 1, 1, 1}, near[] = {1, 1 + 1e-7, 0, 0},
                        apart[] = {1, 1 + 1e-4, 0, 0};
    struct oracle_question question = top(1);
    struct oracle_rows rows;
    struct oracle oracle;

    (void)state;
    make_rows(&rows, ties, 4);
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 11));
    assert_false(ALLOWS(&oracle, 12));
    oracle_free(&oracle);
    oracle_rows_free(&rows);

    make_rows(&rows, near, 4);
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 10));
    assert_true(ALLOWS(&oracle, 11));
    assert_false(ALLOWS(&oracle, 12));
    assert_false(ALLOWS(&oracle, 10, 11));
    oracle_free(&oracle);
    oracle_rows_free(&rows);

    make_rows(&rows, apart, 4);
    oracle_make(&oracle, &question, &rows);
    assert_false(ALLOWS(&oracle, 10));
    assert_true(ALLOWS(&oracle, 11));
    oracle_free(&oracle);
    oracle_rows_free(&rows);
}

/* Codes say that row 10 is the best and row 12 next; keys say 11, 12, 10. */
static void codes_take_and_keys_choose(void **state)
{
    static const double keys[] = {0, 2, 1}, stands_for[] = {2, 0, 1};
    struct oracle_question question = top(1);
    struct oracle_rows rows;
    struct oracle oracle;

    (void)state;
    make_rows(&rows, keys, 3);
    memcpy(rows.stands_for, stands_for, sizeof(stands_for));
    memset(rows.coded, true, 3);
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 10));
    oracle_free(&oracle);
    question.factor = 2; /* 10 and 12 */
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 12));
    assert_false(ALLOWS(&oracle, 10));
    assert_int_equal(oracle.taken_least, 2);
    assert_int_equal(oracle.taken_most, 2);
    oracle_free(&oracle);
    question.factor = 3; /* all: codes are not looked at */
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 11));
    oracle_free(&oracle);
    oracle_rows_free(&rows);
}

/* Without codes step 1 goes by keys.  Row 12 has no copy: it is cut by its key. */
static void copies_cut(void **state)
{
    static const double keys[] = {5, 4, 3, 2}, copies[] = {0, 2, 0, 9}, mean = 0.5;
    struct oracle_question question = top(1);
    struct oracle_rows rows;
    struct oracle oracle;

    (void)state;
    make_rows(&rows, keys, 4);
    rows.books = calloc(1, sizeof(*rows.books));
    rows.books[0] = (struct oracle_book){.m = 1, .n_centroids = 1};
    rows.books[0].parts = calloc(1, sizeof(double));
    rows.books[0].mean = calloc(1, sizeof(double));
    rows.books[0].mean[0] = mean;
    rows.n_books = 1;
    memcpy(rows.copies, copies, sizeof(copies));
    for (uint32_t i = 0; i < 4; i++) {
        rows.books_of[i] = i != 2;
        rows.copied[i] = i != 2;
    }
    question.merge = KV_MERGE_NONE; /* not by bytes */
    question.first_cut = KV_CUT_INT4;
    question.candidates = 3; /* 10, 11, 12 by keys; scores 0.5, 2.5 and 3 of the cut */
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 12));
    assert_false(ALLOWS(&oracle, 10));
    assert_int_equal(oracle.taken_least, 3);
    oracle_free(&oracle);
    question.candidates = 4; /* step 1 is skipped */
    oracle_make(&oracle, &question, &rows);
    assert_true(oracle.skips);
    assert_true(ALLOWS(&oracle, 13));
    assert_false(ALLOWS(&oracle, 10));
    oracle_free(&oracle);
    question.factor = 2; /* 13 and 12 are left, and their keys choose */
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 12));
    assert_false(ALLOWS(&oracle, 13));
    oracle_free(&oracle);
    question.factor = 4; /* nothing is cut */
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 10));
    oracle_free(&oracle);
    question.factor = question.candidates = 2; /* nor here: 10 and 11 by keys */
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 10));
    oracle_free(&oracle);
    oracle_rows_free(&rows);
}

/* A block of rows with codes of two centroids in each of two subspaces, and one row without.  The
 * first vector's scores are 0 to 4, the second one's 0 to 1.9; a step is 4 / 253. */
static void bytes_take(void **state)
{
    static const float queries[] = {1, 3, 1.9f, 0};
    static const double parts[] = {0, 0, 1, 0, 0, 0, 0, 1};
    struct oracle_question question = top(2);
    struct oracle_rows rows;
    struct oracle oracle;

    (void)state;
    oracle_rows_make(&rows, 129, 2, 1);
    rows.books = calloc(1, sizeof(*rows.books));
    rows.books[0] = (struct oracle_book){.m = 2, .n_centroids = 2};
    rows.books[0].parts = calloc(8, sizeof(double));
    memcpy(rows.books[0].parts, parts, sizeof(parts));
    rows.n_books = 1;
    for (uint32_t i = 0; i < 129; i++) {
        rows.tokens[i] = i;
        rows.books_of[i] = i < 128;
        rows.coded[i] = i < 128;
    }
    /* Sums of the first vector: 253, 190, 63, of the second: 120, 0, 120.  Of each the wanted 2 of
     * 128 have at least 190, and at least 120: offsets are -70 and 0. */
    rows.codes[5 * KV_SUBSPACES_MAX] = rows.codes[5 * KV_SUBSPACES_MAX + 1] = 1;
    rows.codes[7 * KV_SUBSPACES_MAX + 1] = 1;
    rows.codes[9 * KV_SUBSPACES_MAX] = 1;
    question.queries = queries;
    question.n_queries = 2;
    question.k = 1;
    question.first_cut = KV_CUT_INT4;
    question.candidates = 2; /* 5 has 183, 7 and 9 both have 120 */
    question.factor = 2;
    rows.keys[7 * 2] = 9; /* of what is taken, keys choose */
    rows.keys[9 * 2] = 99;
    oracle_make(&oracle, &question, &rows);
    assert_int_equal(oracle.taken_least, 2);
    assert_int_equal(oracle.taken_most, 2);
    assert_true(allows(&oracle, (const uint32_t[]){7}, 1));
    assert_false(allows(&oracle, (const uint32_t[]){9}, 1));
    oracle_free(&oracle);
    rows.keys[128 * 2 + 1] = 1; /* 120, too: the row without codes is behind 7 */
    oracle_make(&oracle, &question, &rows);
    assert_true(allows(&oracle, (const uint32_t[]){7}, 1));
    oracle_free(&oracle);
    rows.keys[128 * 2 + 1] = 10; /* above all */
    oracle_make(&oracle, &question, &rows);
    assert_true(allows(&oracle, (const uint32_t[]){128}, 1));
    oracle_free(&oracle);
    oracle_rows_free(&rows);
}

/* The first vector likes row 10, the second one row 12, both row 11 a little less. */
static void merges(void **state)
{
    static const float queries[] = {1, 0, 0, 1};
    static const double keys[] = {3, 0, 2.8, 2.8, 0, 3};
    struct oracle_question question = top(1);
    struct oracle_rows rows;
    struct oracle oracle;
    uint32_t heads[] = {1, 2};
    struct oracle_answer answer = {
        .n_chosen = 2, .n_ids = 2, .ids = (const uint32_t[]){10, 12}, .heads = heads};

    (void)state;
    oracle_rows_make(&rows, 3, 2, 1);
    for (uint32_t i = 0; i < 3; i++)
        rows.tokens[i] = 10 + i;
    memcpy(rows.keys, keys, sizeof(keys));
    question.queries = queries;
    question.n_queries = 2;
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 11));
    oracle_free(&oracle);
    question.merge = KV_MERGE_MAX; /* 10 and 12 are alike for it */
    oracle_make(&oracle, &question, &rows);
    assert_false(ALLOWS(&oracle, 11));
    oracle_free(&oracle);
    question.merge = KV_MERGE_UNION;
    oracle_make(&oracle, &question, &rows);
    assert_true(ALLOWS(&oracle, 10, 12));
    assert_false(ALLOWS(&oracle, 10));
    oracle_free(&oracle);
    question.merge = KV_MERGE_NONE;
    oracle_make(&oracle, &question, &rows);
    assert_null(oracle_choice_fault(&oracle, &answer));
    heads[1] = 3;
    assert_non_null(oracle_choice_fault(&oracle, &answer));
    oracle_free(&oracle);
    oracle_rows_free(&rows);
}

/* Over rows 10 and 12, whose weights are 4 and 2: values 0 and 2. */
static void attention(void **state)
{
    struct oracle_question question = top(2);
    struct oracle_rows rows;
    struct oracle oracle;
    bool held[] = {false, false, false};
    struct oracle_answer answer = {
        .n_chosen = 2, .n_ids = 2, .ids = (const uint32_t[]){10, 12}, .held = held};
    float output = 2.0f / 3, lse = logf(6);

    (void)state;
    make_rows(&rows, sevenths, 3);
    oracle_make(&oracle, &question, &rows);
    assert_null(oracle_attention_fault(&oracle, &answer, &output, &lse, NULL));
    output = 0.6667f;
    assert_non_null(oracle_attention_fault(&oracle, &answer, &output, &lse, NULL));
    output = 2.0f / 3;
    lse = logf(6.0001f);
    assert_non_null(oracle_attention_fault(&oracle, &answer, &output, &lse, NULL));
    /* One is held, and not named but for that. */
    held[0] = true;
    answer.names_held_only = true;
    answer.n_ids = 1;
    output = 2;
    lse = logf(2);
    assert_null(oracle_choice_fault(&oracle, &answer));
    assert_null(oracle_attention_fault(&oracle, &answer, &output, &lse, NULL));
    held[2] = true;
    answer.n_ids = 2;
    output = 0;
    lse = -INFINITY;
    assert_null(oracle_attention_fault(&oracle, &answer, &output, &lse, NULL));
    oracle_free(&oracle);
    oracle_rows_free(&rows);
}

static void elements_of_every_type(void **state)
{
    static const uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7c00, 0x3555},
                          brains[] = {0x3f80, 0xc000};
    static const float floats[] = {1.5f};
    double values[5];

    (void)state;
    oracle_load(KV_FP16, halves, 5, values);
    assert_true(values[0] == 1 && values[1] == -2 && values[2] == ldexp(1, -24));
    assert_true(isinf(values[3]) && fabs(values[4] - 1.0 / 3) < 1e-4);
    oracle_load(KV_BF16, brains, 2, values);
    assert_true(values[0] == 1 && values[1] == -2);
    oracle_load(KV_FP32, floats, 1, values);
    assert_true(values[0] == 1.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_best_are_chosen),
        cmocka_unit_test(a_share_is_as_few_as_have_it),
        cmocka_unit_test(ties_and_near_ties),
        cmocka_unit_test(codes_take_and_keys_choose),
        cmocka_unit_test(copies_cut),
        cmocka_unit_test(bytes_take),
        cmocka_unit_test(merges),
        cmocka_unit_test(attention),
        cmocka_unit_test(elements_of_every_type),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
