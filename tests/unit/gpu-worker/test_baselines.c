/* device.h's operations over chosen rows against plain loops; and baselines.c on a made
 * model: who is chosen, and that all rows give what full attention gives. */
#include "kvserver/base/random.h"
#include "tests/support/model_session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROWS = 700,
    Q_HEADS = 6,
    KV_HEADS = 2,
    GROUP = Q_HEADS / KV_HEADS,
    D = 64,
    TOKENS = 300,
    PROMPT = 270,
};

/* ---- operations ---- */

struct fixture {
    struct kvw_device *device;
    struct kvw_rows_shape shape;
    struct kvw_device_buffer *q, *rows, *other, *out, *lse, *other_out, *other_lse;
    float k[ROWS][KV_HEADS][D], v[ROWS][KV_HEADS][D]; /* as they were rounded */
    float queries[Q_HEADS][D];
};

static float draw(struct kv_random *dice)
{
    return (float)((double)(kv_random_next(dice) >> 11) * 0x1p-52 - 1);
}

/* Rows 0..ROWS - 1 in `rows`, the same in reverse in `other`. */
static void set_up(struct fixture *f, enum kv_dtype dtype, unsigned n_threads)
{
    const struct kvw_device_config config = {.n_threads = n_threads};
    const size_t floats = (size_t)ROWS * KV_HEADS * D;
    struct kvw_device_buffer *k, *v;
    const struct kvw_device_ops *device;
    struct kv_random dice;
    char detail[256] = "";
    size_t row_bytes;

    memset(f, 0, sizeof(*f));
    assert_int_equal(kvw_device_find("cpu")->open(&config, &f->device, detail, sizeof(detail)),
                     KV_OK);
    device = f->device->ops;
    f->shape = (struct kvw_rows_shape){Q_HEADS, KV_HEADS, D, ROWS, dtype};
    row_bytes = kvw_rows_shape_row_bytes(&f->shape);
    assert_int_equal(device->buffer_create(f->device, floats * 4, &k), KV_OK);
    assert_int_equal(device->buffer_create(f->device, floats * 4, &v), KV_OK);
    assert_int_equal(device->buffer_create(f->device, KV_HEADS * ROWS * row_bytes, &f->rows),
                     KV_OK);
    assert_int_equal(device->buffer_create(f->device, KV_HEADS * ROWS * row_bytes, &f->other),
                     KV_OK);
    assert_int_equal(device->buffer_create(f->device, sizeof(f->queries), &f->q), KV_OK);
    assert_int_equal(device->buffer_create(f->device, Q_HEADS * ROWS * sizeof(float), &f->out),
                     KV_OK);
    assert_int_equal(device->buffer_create(f->device, Q_HEADS * sizeof(float), &f->lse), KV_OK);
    assert_int_equal(device->buffer_create(f->device, Q_HEADS * sizeof(float), &f->other_lse),
                     KV_OK);
    assert_int_equal(
        device->buffer_create(f->device, Q_HEADS * D * sizeof(float), &f->other_out), KV_OK);
    kv_random_init(&dice, 3);
    for (size_t i = 0; i < floats; i++) {
        (&f->k[0][0][0])[i] = draw(&dice);
        (&f->v[0][0][0])[i] = draw(&dice);
    }
    for (size_t i = 0; i < (size_t)Q_HEADS * D; i++)
        (&f->queries[0][0])[i] = 4 * draw(&dice);
    kvw_device_write(f->device, KVW_STREAM_COMPUTE, k, 0, f->k, sizeof(f->k));
    kvw_device_write(f->device, KVW_STREAM_COMPUTE, v, 0, f->v, sizeof(f->v));
    kvw_device_write(f->device, KVW_STREAM_COMPUTE, f->q, 0, f->queries, sizeof(f->queries));
    device->rows_put(f->device, &f->shape, k, v, 0, ROWS, f->rows);
    for (uint32_t head = 0; head < KV_HEADS; head++)
        for (uint32_t row = 0; row < ROWS; row++)
            device->copy(f->device, KVW_STREAM_COMPUTE, f->other,
                         (struct kvw_place){((size_t)head * ROWS + ROWS - 1 - row) * row_bytes,
                                            row_bytes},
                         f->rows,
                         (struct kvw_place){((size_t)head * ROWS + row) * row_bytes, row_bytes},
                         (struct kvw_pieces){1, row_bytes});
    device->buffer_destroy(k);
    device->buffer_destroy(v);
}

static void tear_down(struct fixture *f)
{
    const struct kvw_device_ops *device = f->device->ops;

    device->buffer_destroy(f->q);
    device->buffer_destroy(f->rows);
    device->buffer_destroy(f->other);
    device->buffer_destroy(f->out);
    device->buffer_destroy(f->lse);
    device->buffer_destroy(f->other_out);
    device->buffer_destroy(f->other_lse);
    device->close(f->device);
}

/* Row `row` of a head, from one buffer or the other. */
static struct kvw_row_run
one_row(const struct fixture *f, uint32_t head, uint32_t row, bool other)
{
    return (struct kvw_row_run){other ? f->other : f->rows,
                                (size_t)head * ROWS + (other ? ROWS - 1 - row : row), 1};
}

static void read_back(const struct fixture *f,
                      const struct kvw_device_buffer *buffer,
                      void *to,
                      size_t bytes)
{
    kvw_device_read(f->device, KVW_STREAM_COMPUTE, buffer, 0, to, bytes);
    assert_int_equal(f->device->ops->sync(f->device), KV_OK);
}

static void attend(struct fixture *f,
                   const struct kvw_row_run *runs,
                   const uint32_t *run_begin,
                   float out[Q_HEADS][D])
{
    f->device->ops->runs_attend(f->device, &f->shape, f->q, runs, run_begin, f->out, NULL);
    read_back(f, f->out, out, sizeof(float) * Q_HEADS * D);
    assert_int_equal(f->device->ops->sync(f->device), KV_OK);
}

static double score(const struct fixture *f, uint32_t q_head, uint32_t row)
{
    double sum = 0;

    for (unsigned i = 0; i < D; i++)
        sum += (double)f->queries[q_head][i] * (double)f->k[row][q_head / GROUP][i];
    return sum / sqrt(D);
}

static void
expect(const struct fixture *f, const uint32_t *ids, unsigned n, double out[D], uint32_t q_head)
{
    double sum = 0;

    memset(out, 0, D * sizeof(out[0]));
    for (unsigned i = 0; i < n; i++) {
        const double weight = exp(score(f, q_head, ids[i]));

        sum += weight;
        for (unsigned j = 0; j < D; j++)
            out[j] += weight * (double)f->v[ids[i]][q_head / GROUP][j];
    }
    for (unsigned j = 0; j < D; j++)
        out[j] /= sum;
}

/* All rows of a token are what rows_attend() takes. */
static void test_all_rows(void **state)
{
    static const uint32_t counts[] = {1, 2, 127, 128, 129, 256, 500, ROWS};
    static struct fixture f;

    (void)state;
    for (unsigned type = KV_FP32; type <= KV_BF16; type++) {
        set_up(&f, type, type == KV_FP16 ? 3 : 1);
        for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
            static struct kvw_row_run runs[KV_HEADS * ROWS];
            float wanted[Q_HEADS][D], whole[Q_HEADS][D], single[Q_HEADS][D];
            uint32_t run_begin[KV_HEADS + 1], n = 0;

            f.device->ops->rows_attend(f.device, &f.shape, f.q, f.rows, counts[i] - 1, 1,
                                       f.out);
            read_back(&f, f.out, wanted, sizeof(wanted));

            for (uint32_t head = 0; head <= KV_HEADS; head++) {
                run_begin[head] = head;
                runs[head] = (struct kvw_row_run){f.rows, (size_t)head * ROWS, counts[i]};
            }
            attend(&f, runs, run_begin, whole);
            assert_memory_equal(wanted, whole, sizeof(wanted));

            for (uint32_t head = 0; head < KV_HEADS; head++) {
                run_begin[head] = n;
                for (uint32_t row = 0; row < counts[i]; row++)
                    runs[n++] = one_row(&f, head, row, row % 3 == 1);
            }
            run_begin[KV_HEADS] = n;
            attend(&f, runs, run_begin, single);
            assert_memory_equal(wanted, single, sizeof(wanted));
        }
        tear_down(&f);
    }
}

/* A sequence of rows, cut into runs in two ways, and for each head another. */
static void test_chosen_rows(void **state)
{
    static const uint32_t strides[KV_HEADS] = {2, 5}; /* of rows chosen */
    static struct kvw_row_run runs[KV_HEADS * ROWS];
    static struct fixture f;

    (void)state;
    for (unsigned n_threads = 1; n_threads <= 3; n_threads += 2) {
        uint32_t run_begin[KV_HEADS + 1], ids[KV_HEADS][ROWS], counts[KV_HEADS], n = 0;
        float pairs[Q_HEADS][D], singles[Q_HEADS][D];

        set_up(&f, KV_FP32, n_threads);
        for (uint32_t head = 0; head < KV_HEADS; head++) {
            run_begin[head] = n;
            counts[head] = 0;
            for (uint32_t row = head; row + 1 < ROWS; row += strides[head] + 1) {
                runs[n] = one_row(&f, head, row, false);
                runs[n++].n_rows = 2;
                ids[head][counts[head]++] = row;
                ids[head][counts[head]++] = row + 1;
            }
        }
        run_begin[KV_HEADS] = n;
        attend(&f, runs, run_begin, pairs);
        n = 0;
        for (uint32_t head = 0; head < KV_HEADS; head++) {
            run_begin[head] = n;
            for (uint32_t i = 0; i < counts[head]; i++)
                runs[n++] = one_row(&f, head, ids[head][i], i % 2 == 0);
        }
        run_begin[KV_HEADS] = n;
        attend(&f, runs, run_begin, singles);
        assert_memory_equal(pairs, singles, sizeof(pairs));

        for (uint32_t q_head = 0; q_head < Q_HEADS; q_head++) {
            double wanted[D];

            expect(&f, ids[q_head / GROUP], counts[q_head / GROUP], wanted, q_head);
            for (unsigned j = 0; j < D; j++)
                assert_true(fabs((double)pairs[q_head][j] - wanted[j]) < 1e-5);
        }
        tear_down(&f);
    }
}

/* Every second row or so, in one head, others in the next; then the rest of them. */
static void some_rows(const struct fixture *f,
                      bool rest,
                      struct kvw_row_run *runs,
                      uint32_t run_begin[KV_HEADS + 1])
{
    uint32_t n = 0;

    for (uint32_t head = 0; head < KV_HEADS; head++) {
        run_begin[head] = n;
        for (uint32_t row = 0; row < ROWS; row++)
            if ((row * (head + 3) % 7 < 3) != rest)
                runs[n++] = one_row(f, head, row, false);
    }
    run_begin[KV_HEADS] = n;
}

/* Answers over two halves of the rows, merged, are the answer over all; over no row, nothing.
 */
static void test_merged_answers(void **state)
{
    static struct kvw_row_run runs[KV_HEADS * ROWS];
    static struct fixture f;
    static uint32_t ids[ROWS];
    float some[Q_HEADS][D], plain[Q_HEADS][D], merged[Q_HEADS][D];
    float lse[Q_HEADS], merged_lse[Q_HEADS];
    uint32_t run_begin[KV_HEADS + 1];
    const struct kvw_device_ops *device;

    (void)state;
    for (uint32_t i = 0; i < ROWS; i++)
        ids[i] = i;
    set_up(&f, KV_FP32, 2);
    device = f.device->ops;
    some_rows(&f, true, runs, run_begin);
    attend(&f, runs, run_begin, plain);
    device->runs_attend(f.device, &f.shape, f.q, runs, run_begin, f.other_out, f.other_lse);
    read_back(&f, f.other_out, some, sizeof(some));
    assert_memory_equal(some, plain, sizeof(some)); /* the same, asked for or not */

    some_rows(&f, false, runs, run_begin);
    device->runs_attend(f.device, &f.shape, f.q, runs, run_begin, f.out, f.lse);
    device->answers_merge(f.device, &f.shape, f.other_out, f.other_lse, f.out, f.lse);
    read_back(&f, f.out, merged, sizeof(merged));
    read_back(&f, f.lse, merged_lse, sizeof(merged_lse));
    assert_int_equal(device->sync(f.device), KV_OK);
    for (uint32_t q_head = 0; q_head < Q_HEADS; q_head++) {
        double wanted[D], sum = 0;

        expect(&f, ids, ROWS, wanted, q_head);
        for (uint32_t row = 0; row < ROWS; row++)
            sum += exp(score(&f, q_head, row));
        assert_true(fabs((double)merged_lse[q_head] - log(sum)) < 1e-5);
        for (unsigned j = 0; j < D; j++)
            assert_true(fabs((double)merged[q_head][j] - wanted[j]) < 1e-5);
    }

    memset(run_begin, 0, sizeof(run_begin));
    device->runs_attend(f.device, &f.shape, f.q, runs, run_begin, f.other_out, f.other_lse);
    read_back(&f, f.other_out, some, sizeof(some));
    read_back(&f, f.other_lse, lse, sizeof(lse));
    for (unsigned i = 0; i < Q_HEADS; i++)
        assert_true(isinf(lse[i]) && lse[i] < 0 && some[i][0] == 0 && some[i][D - 1] == 0);
    device->answers_merge(f.device, &f.shape, f.other_out, f.other_lse, f.out, f.lse);
    read_back(&f, f.out, some, sizeof(some));
    read_back(&f, f.lse, lse, sizeof(lse));
    assert_memory_equal(some, merged, sizeof(some));
    assert_memory_equal(lse, merged_lse, sizeof(lse));
    tear_down(&f);
}

/* Copies of pieces: those of three heads, from one place in each to another; what lies between them
 * stays as it is. */
static void test_pieces(void **state)
{
    enum {
        HEADS = 3,
        PIECE = 40,
        FROM_STRIDE = 100,
        TO_STRIDE = 64,
    };
    const struct kvw_device_config config = {.n_threads = 1};
    uint8_t bytes[HEADS * FROM_STRIDE], got[HEADS * TO_STRIDE], back[HEADS * FROM_STRIDE] = {0};
    const struct kvw_place from_place = {7, FROM_STRIDE}, to_place = {11, TO_STRIDE};
    const struct kvw_pieces pieces = {HEADS, PIECE};
    struct kvw_device_buffer *from, *to;
    const struct kvw_device_ops *ops;
    struct kvw_device *device;
    char detail[128];

    (void)state;
    assert_int_equal(kvw_device_find("cpu")->open(&config, &device, detail, sizeof(detail)),
                     KV_OK);
    ops = device->ops;
    assert_int_equal(ops->buffer_create(device, sizeof(bytes), &from), KV_OK);
    assert_int_equal(ops->buffer_create(device, sizeof(got), &to), KV_OK);
    for (unsigned i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)(i * 37 + 1);
    kvw_device_write(device, KVW_STREAM_COMPUTE, from, 0, bytes, sizeof(bytes));
    ops->copy(device, KVW_STREAM_COMPUTE, to, to_place, from, from_place, pieces);
    kvw_device_read(device, KVW_STREAM_COMPUTE, to, 0, got, sizeof(got));
    ops->read(device, KVW_STREAM_COMPUTE, to, to_place, back + from_place.offset, FROM_STRIDE,
              pieces);
    assert_int_equal(ops->sync(device), KV_OK);
    for (unsigned i = 0; i < sizeof(got); i++) {
        const unsigned head = i / TO_STRIDE, at = i % TO_STRIDE;

        assert_int_equal(
            got[i], at >= 11 && at < 11 + PIECE ? bytes[head * FROM_STRIDE + 7 + at - 11] : 0);
    }
    for (unsigned i = 0; i < sizeof(back); i++) {
        const unsigned at = i % FROM_STRIDE;

        assert_int_equal(back[i], at >= 7 && at < 7 + PIECE ? bytes[i] : 0);
    }
    ops->write(device, KVW_STREAM_COMPUTE, to, (struct kvw_place){0, TO_STRIDE}, bytes, 10,
               (struct kvw_pieces){HEADS, 10});
    kvw_device_read(device, KVW_STREAM_COMPUTE, to, 0, got, sizeof(got));
    assert_int_equal(ops->sync(device), KV_OK);
    for (unsigned head = 0; head < HEADS; head++)
        assert_memory_equal(got + head * TO_STRIDE, bytes + head * 10, 10);
    ops->buffer_destroy(from);
    ops->buffer_destroy(to);
    ops->close(device);
}

static void test_scores(void **state)
{
    static const struct {
        uint32_t begin, n;
    } cases[] = {{0, 1}, {0, ROWS}, {5, 128}, {130, 300}, {ROWS - 1, 1}};
    static float scores[Q_HEADS * ROWS];
    static struct fixture f;

    (void)state;
    set_up(&f, KV_FP32, 2);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        f.device->ops->rows_score(f.device, &f.shape, f.q, f.rows, cases[i].begin, cases[i].n,
                                  f.out);
        read_back(&f, f.out, scores, Q_HEADS * cases[i].n * sizeof(float));
        for (uint32_t h = 0; h < Q_HEADS; h++)
            for (uint32_t r = 0; r < cases[i].n; r++)
                assert_true(fabs((double)scores[h * cases[i].n + r] -
                                 score(&f, h, cases[i].begin + r)) < 1e-5);
    }
    tear_down(&f);
}

/* ---- methods ---- */

static void open_session(struct model_session *s,
                         const struct kvw_method_ops *row,
                         const struct kvw_method_options *options)
{
    model_session_open(s, row, options, KV_FP16, TOKENS);
}

static void pass(struct model_session *s, uint32_t begin, float logits[][MADE_VOCABULARY])
{
    model_session_pass(s, begin, PROMPT, TOKENS, logits);
}

static const struct kvw_method_ops *const methods[] = {&kvw_method_oracle, &kvw_method_window,
                                                       &kvw_method_random};

enum {
    N_METHODS = 3,
    N_LOGITS = TOKENS - PROMPT + 1,
    SMALL = 17, /* k */
};

static float by_full[N_LOGITS][MADE_VOCABULARY];
static float by_method[N_METHODS][N_LOGITS][MADE_VOCABULARY];

static void test_methods(void **state)
{
    static struct model_session s;
    const struct kvw_method_options all = {.budget = {0, 0, 4, 8}};
    const struct kvw_method_options few = {
        .budget = {0, SMALL, 4, 8}, .seed = 1, .recall_every = 1};
    struct kvw_method_stats before, after;
    struct kv_node_info node;

    (void)state;
    open_session(&s, &kvw_method_full, &all);
    pass(&s, 0, by_full);
    model_session_close(&s);
    for (unsigned m = 0; m < N_METHODS; m++) {
        static float again[N_LOGITS][MADE_VOCABULARY];
        const uint64_t units = MADE_LAYERS * MADE_KV_HEADS, steps = TOKENS - PROMPT;

        /* With nothing left out, the same bits. */
        open_session(&s, methods[m], &all);
        pass(&s, 0, by_method[m]);
        assert_memory_equal(by_full, by_method[m], sizeof(by_full));
        kv_client_node(s.client, 0, &node);
        assert_int_equal(node.rows_in, TOKENS * units);

        /* Back to the prompt, with less. */
        kvw_method_get_stats(s.attention, &before);
        assert_int_equal(before.rows_attended, before.rows_possible);
        assert_int_equal(before.rows_to_recall, 0);
        assert_int_equal(s.attention->ops->set_options(s.attention, &few), KV_OK);
        assert_int_equal(kvw_method_truncate(s.attention, PROMPT), KV_OK);
        pass(&s, PROMPT, by_method[m]);
        assert_memory_not_equal(by_full[1], by_method[m][1], sizeof(by_full[1]));
        kvw_method_get_stats(s.attention, &after);
        assert_int_equal(after.rows_attended - before.rows_attended,
                         steps * units * (4 + SMALL + 8));
        assert_int_equal(after.rows_to_recall, steps * units * SMALL);
        if (methods[m] == &kvw_method_oracle)
            assert_int_equal(after.rows_recalled, after.rows_to_recall);
        else
            assert_true(after.rows_recalled < after.rows_to_recall / 2);
        model_session_close(&s);

        /* As if it had never been otherwise: and a prompt's last token attends to all. */
        open_session(&s, methods[m], &few);
        pass(&s, 0, again);
        assert_memory_equal(by_full[0], again[0], sizeof(by_full[0]));
        assert_memory_equal(by_method[m][1], again[1], sizeof(again) - sizeof(again[0]));

        /* A seed draws other rows, for who draws. */
        if (methods[m]->has_seed) {
            struct kvw_method_options other = few;

            other.seed = 2;
            assert_int_equal(s.attention->ops->set_options(s.attention, &other), KV_OK);
            assert_int_equal(kvw_method_truncate(s.attention, PROMPT), KV_OK);
            pass(&s, PROMPT, again);
            assert_memory_not_equal(by_method[m][1], again[1], sizeof(again[1]));
        }
        model_session_close(&s);
    }
}

/* The oracle loses least: a made model's attention is flat, so only on average. */
static void test_order(void **state)
{
    double off[N_METHODS] = {0};

    (void)state;
    for (unsigned m = 0; m < N_METHODS; m++)
        for (unsigned i = 1; i < N_LOGITS; i++)
            for (unsigned j = 0; j < MADE_VOCABULARY; j++)
                off[m] += pow((double)by_method[m][i][j] - (double)by_full[i][j], 2);
    assert_true(off[0] < off[1] && off[0] < off[2]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_rows),       cmocka_unit_test(test_chosen_rows),
        cmocka_unit_test(test_merged_answers), cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_scores),         cmocka_unit_test(test_methods),
        cmocka_unit_test(test_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
