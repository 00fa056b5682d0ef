/* Exact attention over cached rows.  Rows are processed in runs of RUN tokens, from token 0 on.
 * The partial result of a run has, for each query, the largest score, the sum of the weights
 * and the weighted sum of the values.  Partial results are merged in order, rescaled to the
 * larger maximum (online softmax).
 *
 *   few tokens      parts are (kv head, run); merged when all are done
 *   many tokens     parts are (kv head, some queries); each merges its runs one by one
 *   selected rows   as few tokens, over the sequence of the selected rows
 *
 * All compute the same sums in the same order, so a token's result does not depend on the other
 * tokens of the call.  The query heads of one kv head are computed together, so that its rows
 * are read once for all of them. */
#include "kernels/attend.h"
#include "gpu-worker/device/cpu/cpu.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    RUN = 128,
    QUERIES_MANY = 192, /* approximate size of a part: tokens x query heads */
};

struct job {
    struct kvw_cpu *cpu;
    const struct kvw_rows_shape *shape;
    uint32_t group; /* query heads of a kv head */
    const float *k, *v, *q;
    const char *rows;
    char *rows_out;
    uint32_t token_begin, n;
    uint32_t n_runs;
    uint32_t tokens; /* many: tokens of a part */
    const struct kvw_row_run *selected;
    const uint32_t *selected_begin;
    float *out, *lse; /* lse NULL: not wanted */
};

static size_t row_bytes(const struct job *job)
{
    return kvw_rows_shape_row_bytes(job->shape);
}

/* ---- rows into the cache ---- */

static void put_head(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const struct kvw_rows_shape *shape = job->shape;
    const size_t d = shape->d, bytes = row_bytes(job);
    char *row = job->rows_out + ((size_t)part * shape->capacity + job->token_begin) * bytes;

    (void)thread_index;
    for (size_t t = 0; t < job->n; t++, row += bytes) {
        const size_t from = (t * shape->n_kv_heads + part) * d;

        job->cpu->dot->store[shape->dtype](job->k + from, row, d);
        job->cpu->dot->store[shape->dtype](job->v + from, row + bytes / 2, d);
    }
}

void kvw_cpu_rows_put(struct kvw_device *device,
                      const struct kvw_rows_shape *shape,
                      const struct kvw_device_buffer *k,
                      const struct kvw_device_buffer *v,
                      uint32_t token_begin,
                      uint32_t n,
                      struct kvw_device_buffer *rows)
{
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .shape = shape,
        .k = kvw_cpu_floats(k),
        .v = kvw_cpu_floats(v),
        .rows_out = ((struct kvw_cpu_buffer *)rows)->data,
        .token_begin = token_begin,
        .n = n,
    };

    assert(n <= shape->capacity && token_begin <= shape->capacity - n);
    if (n == 1) /* not worth waking the other threads */
        for (unsigned head = 0; head < shape->n_kv_heads; head++)
            put_head(&job, head, 0);
    else
        kvw_thread_pool_run(job.cpu->thread_pool, put_head, &job, shape->n_kv_heads);
}

/* ---- few tokens ---- */

/* Returns the floats of a partial result, per query head. */
static size_t partial_floats(const struct kvw_rows_shape *shape)
{
    return 2 + (size_t)shape->d; /* maximum, sum, values */
}

/* Merges the partial result of a run into that of the earlier ones: maximum, sum and values
 * (d). */
static void fold(float *most,
                 float *sum,
                 float *values,
                 const float of_run[2],
                 const float *run_values,
                 size_t d)
{
    const float larger = of_run[0] > *most ? of_run[0] : *most;
    const float before = expf(*most - larger), now = expf(of_run[0] - larger);

    *most = larger;
    *sum = *sum * before + of_run[1] * now;
    for (size_t j = 0; j < d; j++)
        values[j] = values[j] * before + run_values[j] * now;
}

static uint32_t n_selected_rows(const struct job *job, uint32_t head)
{
    uint32_t n = 0;

    for (uint32_t i = job->selected_begin[head]; i < job->selected_begin[head + 1]; i++)
        n += job->selected[i].n_rows;
    return n;
}

static float *partial_at(const struct job *job, uint32_t head, uint32_t run)
{
    return job->cpu->partials +
           ((size_t)head * job->n_runs + run) * job->group * partial_floats(job->shape);
}

/* Computes the partial result of one run: at most RUN consecutive rows.  `scratch` has
 * attend_floats(). */
static void attend_run(const struct job *job,
                       uint32_t head,
                       const char *rows,
                       uint32_t n_rows,
                       float *scratch,
                       float *partial)
{
    const struct kvw_rows_shape *shape = job->shape;
    const struct kvw_dot_table *dot = job->cpu->dot;
    const struct kvw_softmax_ops *softmax = job->cpu->softmax;
    const size_t d = shape->d, bytes = row_bytes(job);
    const float scale = 1 / sqrtf((float)d);
    float *queries = scratch;
    float *scores = queries + job->group * d;
    float *values = scores + job->group * RUN;

    for (size_t i = 0; i < job->group * d; i++)
        queries[i] = job->q[(size_t)head * job->group * d + i] * scale;
    dot->score[shape->dtype](rows, bytes, n_rows, queries, job->group, d, scores, RUN);
    memset(values, 0, job->group * d * sizeof(values[0]));
    for (uint32_t g = 0; g < job->group; g++) {
        float *of_query = partial + g * partial_floats(shape);

        of_query[0] = softmax->max(scores + g * RUN, n_rows);
        of_query[1] = softmax->exp_sum(scores + g * RUN, n_rows, of_query[0]);
    }
    dot->gather[shape->dtype](rows + bytes / 2, bytes, n_rows, scores, RUN, job->group, d,
                              values);
    for (uint32_t g = 0; g < job->group; g++)
        memcpy(partial + g * partial_floats(shape) + 2, values + g * d, d * sizeof(values[0]));
}

static size_t attend_floats(const struct job *job)
{
    return (size_t)job->group * (2 * job->shape->d + RUN);
}

static void few_tokens(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const uint32_t head = part / job->n_runs, run = part % job->n_runs;
    const uint32_t begin = run * RUN, n_tokens = job->token_begin + 1;
    const char *rows =
        job->rows + ((size_t)head * job->shape->capacity + begin) * row_bytes(job);

    attend_run(job, head, rows, n_tokens - begin < RUN ? n_tokens - begin : RUN,
               kvw_cpu_scratch(job->cpu, thread_index), partial_at(job, head, run));
}

/* Returns the number of runs of a head's rows. */
static uint32_t runs_of(const struct job *job, uint32_t head)
{
    return job->selected == NULL ? job->n_runs : (n_selected_rows(job, head) + RUN - 1) / RUN;
}

/* Provides memory for the partial results of n_runs runs of each head.  Returns false if out of
 * memory, which sync() reports. */
static bool reserve_partials(const struct job *job)
{
    struct kvw_cpu *cpu = job->cpu;
    const size_t bytes = (size_t)job->shape->n_q_heads * job->n_runs *
                         partial_floats(job->shape) * sizeof(float);
    float *larger;

    if (bytes <= cpu->partials_bytes)
        return true;
    larger = realloc(cpu->partials, bytes * 2);
    if (larger == NULL) {
        cpu->failure = KV_NO_MEMORY;
        return false;
    }
    cpu->partials = larger;
    cpu->partials_bytes = bytes * 2;
    return true;
}

static void merge(const struct job *job, float *out)
{
    const struct kvw_rows_shape *shape = job->shape;
    const size_t d = shape->d, floats = partial_floats(shape);

    for (uint32_t i = 0; i < shape->n_q_heads; i++) {
        const float *partial = partial_at(job, i / job->group, 0) + i % job->group * floats;
        const uint32_t n_runs = runs_of(job, i / job->group);
        float most = -INFINITY, sum = 0;
        float *to = out + i * d;

        memset(to, 0, d * sizeof(to[0]));
        for (uint32_t run = 0; run < n_runs; run++, partial += job->group * floats)
            fold(&most, &sum, to, partial, partial + 2, d);
        for (size_t j = 0; n_runs > 0 && j < d; j++)
            to[j] /= sum;
        if (job->lse != NULL)
            job->lse[i] = n_runs > 0 ? (float)((double)most + log((double)sum)) : -INFINITY;
    }
}

/* ---- many tokens ---- */

static void many_tokens(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const struct kvw_rows_shape *shape = job->shape;
    const struct kvw_dot_table *dot = job->cpu->dot;
    const struct kvw_softmax_ops *softmax = job->cpu->softmax;
    const uint32_t head = part % shape->n_kv_heads, group = job->group;
    const uint32_t first = part / shape->n_kv_heads * job->tokens; /* of the chunk */
    const uint32_t n = job->n - first < job->tokens ? job->n - first : job->tokens;
    const size_t d = shape->d, bytes = row_bytes(job), m = (size_t)n * group;
    const uint32_t token = job->token_begin + first; /* position of the first query */
    const float scale = 1 / sqrtf((float)d);
    float *queries = kvw_cpu_scratch(job->cpu, thread_index);
    float *keys = queries + m * d;
    float *values = keys + RUN * d;
    float *scores = values + RUN * d;
    float *mixed = scores + m * RUN; /* of the run */
    float *acc = mixed + m * d;
    float *most = acc + m * d;
    float *sums = most + m;
    float *of_run = sums + m; /* (m, 2): maximum and sum of the run */

    assert((size_t)(of_run + 2 * m - queries) * sizeof(float) <= KVW_CPU_SCRATCH_BYTES);
    for (size_t i = 0; i < m; i++) {
        const float *from =
            job->q + ((first + i / group) * shape->n_q_heads + head * group + i % group) * d;

        for (size_t j = 0; j < d; j++)
            queries[i * d + j] = from[j] * scale;
        sums[i] = 0;
        most[i] = -INFINITY;
    }
    memset(acc, 0, m * d * sizeof(acc[0]));

    for (uint32_t begin = 0; begin < token + n; begin += RUN) {
        const uint32_t end = token + n - begin < RUN ? token + n : begin + RUN;
        const char *row = job->rows + ((size_t)head * shape->capacity + begin) * bytes;
        /* Queries before `blind` attend to no row of this run. */
        const size_t blind = begin > token ? (size_t)(begin - token) * group : 0;

        for (uint32_t t = 0; t < end - begin; t++, row += bytes) {
            dot->load[shape->dtype](row, keys + t * d, d);
            dot->load[shape->dtype](row + bytes / 2, values + t * d, d);
        }
        dot->products(queries + blind * d, d, m - blind, keys, d, end - begin, d,
                      scores + blind * RUN, RUN);
        memset(mixed, 0, m * d * sizeof(mixed[0]));
        for (size_t i = blind; i < m; i++) {
            const uint32_t position = token + (uint32_t)(i / group);
            const uint32_t seen = position >= end ? end - begin : position + 1 - begin;
            float *weights = scores + i * RUN;

            of_run[2 * i] = softmax->max(weights, seen);
            of_run[2 * i + 1] = softmax->exp_sum(weights, seen, of_run[2 * i]);
            memset(weights + seen, 0, (end - begin - seen) * sizeof(weights[0]));
        }
        dot->gather[KV_FP32](values, d * sizeof(float), end - begin, scores + blind * RUN, RUN,
                             m - blind, d, mixed + blind * d);
        for (size_t i = blind; i < m; i++)
            fold(&most[i], &sums[i], acc + i * d, of_run + 2 * i, mixed + i * d, d);
    }

    for (size_t i = 0; i < m; i++) {
        float *to =
            job->out + ((first + i / group) * shape->n_q_heads + head * group + i % group) * d;

        for (size_t j = 0; j < d; j++)
            to[j] = acc[i * d + j] / sums[i];
    }
}

/* Returns the tokens of a part, from the shape alone: about QUERIES_MANY rows, and no more than
 * fit into the scratch. */
static uint32_t many_part(const struct kvw_rows_shape *shape, uint32_t group)
{
    const size_t fixed = (size_t)2 * RUN * shape->d;
    const size_t of_token = group * ((size_t)3 * shape->d + RUN + 4);
    const size_t most = (KVW_CPU_SCRATCH_BYTES / sizeof(float) - fixed) / of_token;
    uint32_t tokens = QUERIES_MANY / group > 8 ? QUERIES_MANY / group : 8;

    return tokens < most ? tokens : (uint32_t)most;
}

void kvw_cpu_rows_attend(struct kvw_device *device,
                         const struct kvw_rows_shape *shape,
                         const struct kvw_device_buffer *q,
                         const struct kvw_device_buffer *rows,
                         uint32_t token_begin,
                         uint32_t n,
                         struct kvw_device_buffer *out)
{
    const size_t token_floats = (size_t)shape->n_q_heads * shape->d;
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .shape = shape,
        .group = shape->n_q_heads / shape->n_kv_heads,
        .q = kvw_cpu_floats(q),
        .rows = ((const struct kvw_cpu_buffer *)rows)->data,
        .token_begin = token_begin,
        .n = n,
        .out = kvw_cpu_floats(out),
    };

    assert(n <= shape->capacity && token_begin <= shape->capacity - n);
    if (n >= KVW_CPU_MANY) {
        job.tokens = many_part(shape, job.group);
        kvw_thread_pool_run(job.cpu->thread_pool, many_tokens, &job,
                            shape->n_kv_heads * ((n + job.tokens - 1) / job.tokens));
        return;
    }
    for (uint32_t i = 0; i < n; i++, job.q += token_floats, job.token_begin++) {
        job.n_runs = job.token_begin / RUN + 1;
        if (!reserve_partials(&job))
            return;
        kvw_thread_pool_run(job.cpu->thread_pool, few_tokens, &job,
                            shape->n_kv_heads * job.n_runs);
        merge(&job, job.out + i * token_floats);
    }
}

/* ---- one token, selected rows ---- */

static const char *run_data(const struct kvw_row_run *run)
{
    return ((const struct kvw_cpu_buffer *)run->buffer)->data;
}

/* Attends to up to RUN of a head's selected rows, gathered if they are not contiguous. */
static void attend_selected(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const uint32_t head = part / job->n_runs;
    const uint32_t end = job->selected_begin[head + 1];
    const size_t bytes = row_bytes(job);
    float *scratch = kvw_cpu_scratch(job->cpu, thread_index);
    char *gathered = (char *)(scratch + attend_floats(job));
    uint32_t skip = part % job->n_runs * RUN, n = 0, at = job->selected_begin[head];
    const char *rows = gathered;

    for (; at < end && job->selected[at].n_rows <= skip; at++)
        skip -= job->selected[at].n_rows;
    for (; at < end && n < RUN; at++, skip = 0) {
        const struct kvw_row_run *run = &job->selected[at];
        const uint32_t left = run->n_rows - skip;
        const uint32_t count = left < RUN - n ? left : RUN - n;
        const char *from = run_data(run) + (run->first_row + skip) * bytes;

        if (n == 0 && (count == RUN || at + 1 == end))
            rows = from;
        else
            memcpy(gathered + n * bytes, from, count * bytes);
        n += count;
    }
    if (n > 0) /* this head may have fewer than another */
        attend_run(job, head, rows, n, scratch, partial_at(job, head, part % job->n_runs));
}

void kvw_cpu_runs_attend(struct kvw_device *device,
                         const struct kvw_rows_shape *shape,
                         const struct kvw_device_buffer *q,
                         const struct kvw_row_run *runs,
                         const uint32_t *run_begin,
                         struct kvw_device_buffer *out,
                         struct kvw_device_buffer *lse)
{
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .shape = shape,
        .group = shape->n_q_heads / shape->n_kv_heads,
        .q = kvw_cpu_floats(q),
        .selected = runs,
        .selected_begin = run_begin,
        .out = kvw_cpu_floats(out),
        .lse = lse != NULL ? kvw_cpu_floats(lse) : NULL,
    };

    assert(lse == NULL || shape->n_q_heads * sizeof(float) <= lse->bytes);
    assert(attend_floats(&job) * sizeof(float) + RUN * row_bytes(&job) <=
           KVW_CPU_SCRATCH_BYTES);
    for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
        assert(run_begin[head] <= run_begin[head + 1]);
        for (uint32_t i = run_begin[head]; i < run_begin[head + 1]; i++)
            assert((runs[i].first_row + runs[i].n_rows) * row_bytes(&job) <=
                   runs[i].buffer->bytes);
        if (runs_of(&job, head) > job.n_runs)
            job.n_runs = runs_of(&job, head);
    }
    if (!reserve_partials(&job))
        return;
    if (job.n_runs > 0)
        kvw_thread_pool_run(job.cpu->thread_pool, attend_selected, &job,
                            shape->n_kv_heads * job.n_runs);
    merge(&job, job.out);
}

void kvw_cpu_answers_merge(struct kvw_device *device,
                           const struct kvw_rows_shape *shape,
                           const struct kvw_device_buffer *other_out,
                           const struct kvw_device_buffer *other_lse,
                           struct kvw_device_buffer *out,
                           struct kvw_device_buffer *lse)
{
    const float *const all_outputs[] = {kvw_cpu_floats(out), kvw_cpu_floats(other_out)};
    const float *const all_lses[] = {kvw_cpu_floats(lse), kvw_cpu_floats(other_lse)};
    const size_t lse_bytes = shape->n_q_heads * sizeof(float);

    (void)device;
    assert(lse_bytes <= lse->bytes && lse_bytes <= other_lse->bytes);
    assert(shape->d * lse_bytes <= out->bytes && shape->d * lse_bytes <= other_out->bytes);
    kv_attend_merge(shape->n_q_heads, shape->d, 2, all_outputs, all_lses, kvw_cpu_floats(out),
                    kvw_cpu_floats(lse));
}

static void score_run(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const struct kvw_rows_shape *shape = job->shape;
    const uint32_t head = part / job->n_runs, begin = part % job->n_runs * RUN;
    const uint32_t n = job->n - begin < RUN ? job->n - begin : RUN;
    const size_t d = shape->d, bytes = row_bytes(job);
    const float scale = 1 / sqrtf((float)d);
    float *queries = kvw_cpu_scratch(job->cpu, thread_index);

    for (size_t i = 0; i < job->group * d; i++)
        queries[i] = job->q[(size_t)head * job->group * d + i] * scale;
    job->cpu->dot->score[shape->dtype](
        job->rows + ((size_t)head * shape->capacity + job->token_begin + begin) * bytes, bytes,
        n, queries, job->group, d, job->out + (size_t)head * job->group * job->n + begin,
        job->n);
}

void kvw_cpu_rows_score(struct kvw_device *device,
                        const struct kvw_rows_shape *shape,
                        const struct kvw_device_buffer *q,
                        const struct kvw_device_buffer *rows,
                        uint32_t row_begin,
                        uint32_t n,
                        struct kvw_device_buffer *out)
{
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .shape = shape,
        .group = shape->n_q_heads / shape->n_kv_heads,
        .q = kvw_cpu_floats(q),
        .rows = ((const struct kvw_cpu_buffer *)rows)->data,
        .token_begin = row_begin,
        .n = n,
        .n_runs = (n + RUN - 1) / RUN,
        .out = kvw_cpu_floats(out),
    };

    assert(n <= shape->capacity && row_begin <= shape->capacity - n);
    assert((size_t)shape->n_q_heads * n * sizeof(float) <= out->bytes);
    kvw_thread_pool_run(job.cpu->thread_pool, score_run, &job, shape->n_kv_heads * job.n_runs);
}
