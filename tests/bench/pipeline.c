/* Operations of the client library, many at a time. */
#include "tests/bench/bench.h"

#include <string.h>

bool bench_finish_op(struct kv_client *client,
                     const char *what,
                     kv_status_t status,
                     struct kv_op *op)
{
    if (status == KV_OK)
        status = kv_finish(op);
    if (status == KV_OK)
        return true;
    bench_complain("%s: %s: %s", what, kv_status_name(status), kv_client_detail(client));
    return false;
}

/* Negative: it is not there. */
static double number_in(const struct kv_table *table, const char *row, const char *column)
{
    uint32_t at = 0, of = 0;

    while (at < table->n_columns && strcmp(table->columns[at], column) != 0)
        at++;
    for (; of < table->n_rows; of++) {
        const char *text = table->cells[(size_t)of * table->n_columns].text;

        if (row == NULL ? of + 1 == table->n_rows : text != NULL && strcmp(text, row) == 0)
            break;
    }
    return at < table->n_columns && of < table->n_rows
               ? table->cells[(size_t)of * table->n_columns + at].number
               : -1;
}

double bench_table_number(struct kv_client *client,
                          const char *name,
                          const char *row,
                          const char *column)
{
    double number = -1;
    struct kv_op *op;
    const kv_status_t status = kv_table_begin(client, 0, name, 0, &op);

    if (status == KV_OK && kv_wait(op) == KV_OK)
        number = number_in(kv_op_table(op), row, column);
    if (!bench_finish_op(client, "table", status, op))
        return -1;
    if (number < 0)
        bench_complain("table %s: no %s of %s", name, column, row != NULL ? row : "any row");
    return number;
}

bool bench_pipeline_run(const struct bench_pipeline *pipeline, struct bench_watch *watch)
{
    struct kv_op *ops[BENCH_WINDOW_MAX];
    double begins[BENCH_WINDOW_MAX];
    size_t begun = 0, ended = 0;
    bool is_good = true;

    while (is_good && ended < pipeline->n) {
        unsigned slot = (unsigned)(ended % pipeline->window);

        while (begun < pipeline->n && begun - ended < pipeline->window) {
            unsigned next = (unsigned)(begun % pipeline->window);
            kv_status_t status;

            begins[next] = bench_now();
            status = pipeline->begin(pipeline->load, begun, &ops[next]);
            if (status != KV_OK) {
                is_good = bench_finish_op(pipeline->client, "begin", status, NULL);
                break;
            }
            begun++;
        }
        if (!is_good)
            break;
        is_good = bench_finish_op(pipeline->client, "operation", KV_OK, ops[slot]);
        ended++;
        bench_watch_add(watch, bench_now() - begins[slot]);
    }
    for (; ended < begun; ended++)
        kv_op_free(ops[ended % pipeline->window]);
    return is_good;
}

void bench_fill(void *memory, size_t bytes, uint64_t seed)
{
    uint8_t *at = memory;

    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t number = seed + i * 0x9e3779b97f4a7c15u;
        size_t left = bytes - i;

        number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9u;
        number ^= number >> 27;
        memcpy(at + i, &number, left < sizeof(number) ? left : sizeof(number));
    }
}
