#include "tests/support/oracle_bytes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define EPSILON 5.9604644775390625e-8 /* 2^-24: one rounding of fp32 */

enum {
    BYTE_MOST = 255,
    SAMPLE_EVERY = 8,
    SAMPLE_LEAST = 64, /* blocks with codes of which every 8th is enough */
    SPARE_ARRAYS = 4,  /* beside the scores */
};

/* A whole number in fp32's eyes. */
struct whole {
    int low, high;
};

/* Rows of one range and one codebook, or of none, one after the other. */
struct run {
    uint32_t begin, end; /* rows */
    uint32_t book;       /* as in oracle_rows */
};

/* All that bytes are made of. */
struct bytes {
    const struct oracle_question *question;
    const struct oracle_rows *rows;
    struct run *runs;
    uint32_t n_runs;
    bool *by_code; /* (n) */
    double base[KV_QUERIES_MAX], base_error[KV_QUERIES_MAX];
    double inv_step, inv_error; /* the latter of 1 */
    struct whole *sums;         /* (n_queries, n) */
    struct whole offsets[KV_QUERIES_MAX];
};

static void *room(size_t n, size_t bytes)
{
    void *memory = calloc(n > 0 ? n : 1, bytes);

    if (memory == NULL) {
        fprintf(stderr, "oracle: out of memory\n");
        abort();
    }
    return memory;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static int to_byte(double steps)
{
    return steps >= BYTE_MOST ? BYTE_MOST : steps > 0 ? (int)floor(steps + 0.5) : 0;
}

static struct whole round_off(double steps, double error)
{
    return (struct whole){to_byte(steps - error), to_byte(steps + error)};
}

static uint32_t block_of(const struct oracle_rows *rows, uint32_t row)
{
    return rows->tokens[row] / KV_BLOCK_TOKENS;
}

/* ---- runs -------------------------------------------------------------------------------- */

static bool goes_on(const struct oracle_rows *rows, uint32_t row)
{
    return rows->ranges[row] == rows->ranges[row - 1] &&
           rows->books_of[row] == rows->books_of[row - 1];
}

static void make_runs(struct bytes *bytes)
{
    const struct oracle_rows *rows = bytes->rows;

    bytes->runs = room(rows->n, sizeof(*bytes->runs));
    for (uint32_t i = 0; i < rows->n; i++) {
        if (i == 0 || !goes_on(rows, i))
            bytes->runs[bytes->n_runs++] = (struct run){.begin = i, .book = rows->books_of[i]};
        bytes->runs[bytes->n_runs - 1].end = i + 1;
    }
    /* A block's rows are scored by their codes if all up to the last that is eligible have some. */
    bytes->by_code = room(rows->n, sizeof(bool));
    for (uint32_t i = rows->n; i-- > 0;) {
        const bool is_last = i + 1 == rows->n || rows->ranges[i + 1] != rows->ranges[i] ||
                             block_of(rows, i + 1) != block_of(rows, i);

        bytes->by_code[i] = is_last ? rows->coded[i] : bytes->by_code[i + 1];
    }
}

/* How many blocks with codes are eligible with all of their rows, at most. */
static uint32_t count_blocks(const struct bytes *bytes)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < bytes->n_runs; i++)
        if (bytes->runs[i].book > 0)
            n += (bytes->runs[i].end - bytes->runs[i].begin) / KV_BLOCK_TOKENS;
    return n;
}

static uint32_t sample_every(const struct bytes *bytes)
{
    return count_blocks(bytes) >= SAMPLE_LEAST ? SAMPLE_EVERY : 1;
}

/* The bytes that a table of so many centroids takes when it is rounded, of one subspace. */
static size_t rounded_size(uint32_t n_centroids)
{
    return n_centroids <= 16 ? 16 : n_centroids <= 64 ? 64 : 256;
}

bool oracle_bytes_pay(const struct oracle_question *question, const struct oracle_rows *rows)
{
    struct bytes bytes = {.question = question, .rows = rows};
    size_t n_coded = 0, table = 0, rounded = 0, n_bytes = 0;

    make_runs(&bytes);
    for (uint32_t i = 0; i < bytes.n_runs; i++) {
        const uint32_t number = bytes.runs[i].book;
        const struct oracle_book *book = number > 0 ? &rows->books[number - 1] : NULL;

        n_coded += book != NULL;
        if (book != NULL && (size_t)book->m * book->n_centroids > table)
            table = (size_t)book->m * book->n_centroids;
        if (book != NULL && book->m * rounded_size(book->n_centroids) > rounded)
            rounded = book->m * rounded_size(book->n_centroids);
    }
    for (uint32_t i = 0; i < rows->n; i++)
        if (i == 0 || rows->ranges[i] != rows->ranges[i - 1] ||
            block_of(rows, i) != block_of(rows, i - 1))
            n_bytes += KV_BLOCK_TOKENS;
    const uint32_t every = sample_every(&bytes);
    const size_t n_sample = count_blocks(&bytes) / every + (every > 1 ? n_coded : 0);
    const size_t n_tables = n_coded * question->n_queries;
    const size_t n_floats =
        n_tables * table +
        (n_tables * rounded + n_sample * KV_BLOCK_TOKENS * question->n_queries + n_bytes) /
            sizeof(float) +
        2;

    free(bytes.runs);
    free(bytes.by_code);
    return n_coded > 0 && n_floats <= (size_t)rows->n * (question->n_queries + SPARE_ARRAYS);
}

/* ---- tables ------------------------------------------------------------------------------ */

/* What a centroid adds to a vector's scores. */
static double entry_of(const struct bytes *bytes,
                       const struct oracle_book *book,
                       uint32_t j,
                       uint32_t centroid,
                       uint32_t q,
                       double *ret_error)
{
    const uint32_t d = bytes->rows->d_k;
    const float *query = bytes->question->queries + (size_t)q * d;
    const double *part = book->parts + ((size_t)j * book->n_centroids + centroid) * d;
    double sum = 0, query_size = 0, part_size = 0;

    for (uint32_t i = 0; i < d; i++) {
        sum += (double)query[i] * part[i];
        query_size += (double)query[i] * (double)query[i];
        part_size += part[i] * part[i];
    }
    *ret_error = (4 + 2 * sqrt(d)) * EPSILON * sqrt(query_size * part_size);
    return sum;
}

/* The least and the largest entry of a subspace, and by how much any may be off. */
static void subspace_range(const struct bytes *bytes,
                           const struct oracle_book *book,
                           uint32_t j,
                           uint32_t q,
                           double *ret_least,
                           double *ret_most,
                           double *ret_error)
{
    *ret_least = INFINITY;
    *ret_most = -INFINITY;
    *ret_error = 0;
    for (uint32_t c = 0; c < book->n_centroids; c++) {
        double error;
        const double entry = entry_of(bytes, book, j, c, q, &error);

        *ret_least = entry < *ret_least ? entry : *ret_least;
        *ret_most = larger(entry, *ret_most);
        *ret_error = larger(error, *ret_error);
    }
}

static void
book_range(const struct bytes *bytes, const struct oracle_book *book, uint32_t q, double *ret)
{
    ret[0] = ret[1] = ret[2] = 0;
    for (uint32_t j = 0; j < book->m; j++) {
        double least, most, error;

        subspace_range(bytes, book, j, q, &least, &most, &error);
        ret[0] += least;
        ret[1] += most;
        ret[2] += error + EPSILON * larger(fabs(ret[0]), fabs(ret[1]));
    }
}

/* The length of a step, the same for all vectors, and where each one's steps begin. */
static void find_steps(struct bytes *bytes)
{
    double widest = 0, widest_error = 0;
    uint32_t m = 0;

    for (uint32_t q = 0; q < bytes->question->n_queries; q++) {
        double least = INFINITY, most = -INFINITY, error = 0, range[3];

        for (uint32_t i = 0; i < bytes->n_runs; i++) {
            if (bytes->runs[i].book == 0)
                continue;
            const struct oracle_book *book = &bytes->rows->books[bytes->runs[i].book - 1];

            book_range(bytes, book, q, range);
            least = range[0] < least ? range[0] : least;
            most = larger(most, range[1]);
            error = larger(error, range[2]);
            m = book->m > m ? book->m : m;
        }
        bytes->base[q] = least;
        bytes->base_error[q] = error;
        widest = larger(widest, most - least);
        widest_error = larger(widest_error, 2 * error);
    }
    bytes->inv_step = widest > 0 ? (BYTE_MOST - m) / widest : 0;
    bytes->inv_error = widest > 0 ? widest_error / widest + 4 * EPSILON : 0;
}

/* Of a codebook's table for a vector, rounded.
 *   ret_table  (m, n_centroids) */
static void round_table(const struct bytes *bytes,
                        const struct oracle_book *book,
                        uint32_t q,
                        struct whole *ret_table)
{
    double range[3];

    book_range(bytes, book, q, range);
    for (uint32_t j = 0; j < book->m; j++) {
        double least, most, most_error;

        subspace_range(bytes, book, j, q, &least, &most, &most_error);
        for (uint32_t c = 0; c < book->n_centroids; c++) {
            double error, above = entry_of(bytes, book, j, c, q, &error) - least;

            error += most_error;
            if (j == 0) {
                above += range[0] - bytes->base[q];
                error += range[2] + bytes->base_error[q];
            }
            ret_table[(size_t)j * book->n_centroids + c] =
                round_off(above * bytes->inv_step,
                          error * bytes->inv_step + above * bytes->inv_step * bytes->inv_error);
        }
    }
}

/* ---- sums -------------------------------------------------------------------------------- */

static struct whole sum_of(const struct oracle_rows *rows,
                           const struct oracle_book *book,
                           const struct whole *table,
                           uint32_t row)
{
    struct whole sum = {0, 0};

    for (uint32_t j = 0; j < book->m; j++) {
        const uint8_t code = rows->codes[(size_t)row * KV_SUBSPACES_MAX + j];
        const struct whole entry = table[(size_t)j * book->n_centroids + code];

        sum.low += entry.low;
        sum.high += entry.high;
    }
    sum.low = sum.low < BYTE_MOST ? sum.low : BYTE_MOST;
    sum.high = sum.high < BYTE_MOST ? sum.high : BYTE_MOST;
    return sum;
}

static struct whole sum_of_key(const struct bytes *bytes, uint32_t q, struct oracle_range score)
{
    const double low = (score.low - bytes->base[q]) * bytes->inv_step,
                 high = (score.high - bytes->base[q]) * bytes->inv_step;
    const double error = bytes->base_error[q] * bytes->inv_step +
                         larger(fabs(low), fabs(high)) * bytes->inv_error;

    return (struct whole){to_byte(low - error), to_byte(high + error)};
}

static void find_sums(struct bytes *bytes, const struct oracle_range *key_scores)
{
    const struct oracle_rows *rows = bytes->rows;

    bytes->sums = room((size_t)bytes->question->n_queries * rows->n, sizeof(struct whole));
    for (uint32_t i = 0; i < bytes->n_runs; i++) {
        const struct run *run = &bytes->runs[i];
        const struct oracle_book *book = run->book > 0 ? &rows->books[run->book - 1] : NULL;
        struct whole *table =
            book == NULL ? NULL : room((size_t)book->m * book->n_centroids, sizeof(*table));

        for (uint32_t q = 0; q < bytes->question->n_queries; q++) {
            const size_t at = (size_t)q * rows->n;

            if (book != NULL)
                round_table(bytes, book, q, table);
            for (uint32_t row = run->begin; row < run->end; row++)
                bytes->sums[at + row] = bytes->by_code[row]
                                            ? sum_of(rows, book, table, row)
                                            : sum_of_key(bytes, q, key_scores[at + row]);
        }
        free(table);
    }
}

/* ---- offsets ----------------------------------------------------------------------------- */

static int descending(const void *a, const void *b)
{
    return *(const int *)b - *(const int *)a;
}

/* Rows of blocks that have codes, and are eligible, with all of their rows: of every block, or
 * every 8th.  Returns their number.
 *   ret_sample  (n) */
static uint32_t find_sample(const struct bytes *bytes, uint32_t *ret_sample)
{
    const struct oracle_rows *rows = bytes->rows;
    const uint32_t every = sample_every(bytes);
    uint32_t n = 0;

    for (uint32_t i = 0; i < bytes->n_runs; i++) {
        const struct run *run = &bytes->runs[i];

        for (uint32_t row = run->begin; run->book > 0 && row < run->end; row++) {
            const uint32_t block = block_of(rows, row),
                           at = rows->tokens[row] % KV_BLOCK_TOKENS;
            const bool is_whole = row - run->begin >= at &&
                                  run->end - row >= KV_BLOCK_TOKENS - at && bytes->by_code[row];

            if (is_whole && block % every == 0)
                ret_sample[n++] = row;
        }
    }
    return n;
}

static void find_offsets(struct bytes *bytes, uint32_t n_wanted)
{
    const uint32_t n = bytes->rows->n, n_queries = bytes->question->n_queries;
    uint32_t *sample = room(n, sizeof(*sample));
    const uint32_t n_sampled = find_sample(bytes, sample);
    const uint64_t wanted = ((uint64_t)n_wanted * n_sampled + n - 1) / n;
    int *lows = room(n, sizeof(int)), *highs = room(n, sizeof(int));
    struct whole bounds[KV_QUERIES_MAX] = {{0, 0}}, least = {BYTE_MOST, BYTE_MOST};

    for (uint32_t q = 0; q < n_queries; q++) {
        for (uint32_t i = 0; i < n_sampled; i++) {
            lows[i] = bytes->sums[(size_t)q * n + sample[i]].low;
            highs[i] = bytes->sums[(size_t)q * n + sample[i]].high;
        }
        qsort(lows, n_sampled, sizeof(int), descending);
        qsort(highs, n_sampled, sizeof(int), descending);
        if (n_sampled > 0)
            bounds[q] = (struct whole){lows[wanted - 1], highs[wanted - 1]};
        least.low = bounds[q].low < least.low ? bounds[q].low : least.low;
        least.high = bounds[q].high < least.high ? bounds[q].high : least.high;
    }
    for (uint32_t q = 0; q < n_queries; q++)
        bytes->offsets[q] =
            (struct whole){least.low - bounds[q].high, least.high - bounds[q].low};
    free(sample);
    free(lows);
    free(highs);
}

void oracle_bytes(const struct oracle_question *question,
                  const struct oracle_rows *rows,
                  const struct oracle_range *key_scores,
                  uint32_t n_wanted,
                  struct oracle_range *ret_bytes)
{
    struct bytes bytes = {.question = question, .rows = rows};

    make_runs(&bytes);
    find_steps(&bytes);
    find_sums(&bytes, key_scores);
    find_offsets(&bytes, n_wanted);
    for (uint32_t i = 0; i < rows->n; i++) {
        ret_bytes[i] = (struct oracle_range){0, 0};
        for (uint32_t q = 0; q < question->n_queries; q++) {
            const struct whole sum = bytes.sums[(size_t)q * rows->n + i];

            ret_bytes[i].low = larger(ret_bytes[i].low, sum.low + bytes.offsets[q].low);
            ret_bytes[i].high = larger(ret_bytes[i].high, sum.high + bytes.offsets[q].high);
        }
    }
    free(bytes.runs);
    free(bytes.by_code);
    free(bytes.sums);
}
