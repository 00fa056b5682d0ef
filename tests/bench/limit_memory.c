/* The limits of memory: what one processor can read, copy and gather. */
#include "tests/bench/bench.h"

#include "kernels/gather.h"
#include "kvserver/base/memory.h"

#include <stdlib.h>
#include <string.h>

typedef uint64_t lanes __attribute__((vector_size(32)));

bool bench_memory_open(struct bench *bench, struct bench_memory *ret_memory)
{
    struct bench_memory memory = {.bytes = bench->data_bytes, .n = 1};

    memory.from = kv_memory_reserve(memory.bytes);
    memory.to = kv_memory_reserve(memory.bytes);
    if (memory.from == NULL || memory.to == NULL) {
        bench_complain("memory: %zu bytes: refused", memory.bytes);
        bench_memory_close(&memory);
        return false;
    }
    bench_fill(memory.from, memory.bytes, 3);
    bench_fill(memory.to, memory.bytes, 4);
    *ret_memory = memory;
    return true;
}

void bench_memory_close(struct bench_memory *memory)
{
    if (memory->from != NULL)
        kv_memory_release(memory->from, memory->bytes);
    if (memory->to != NULL)
        kv_memory_release(memory->to, memory->bytes);
}

bool bench_memory_copy(void *arg, struct bench_sample *ret_sample)
{
    const struct bench_memory *memory = arg;
    double begin = bench_now();
    size_t piece = 1 << 20;

    /* In pieces of a message, as data moves; one huge memcpy would take another path. */
    for (size_t at = 0; at + piece <= memory->bytes; at += piece)
        memcpy(memory->to + at, memory->from + at, piece);
    ret_sample->value = (double)memory->bytes / (bench_now() - begin) / 1e9;
    return true;
}

bool bench_memory_read(void *arg, struct bench_sample *ret_sample)
{
    const struct bench_memory *memory = arg;
    const lanes *at = (const lanes *)memory->from;
    size_t n = memory->bytes / sizeof(lanes) / 8 * 8;
    lanes sums[8] = {{0}};
    double begin = bench_now();

    for (size_t i = 0; i < n; i += 8)
        for (unsigned j = 0; j < 8; j++)
            sums[j] ^= at[i + j];
    for (unsigned j = 1; j < 8; j++)
        sums[0] ^= sums[j];
    __asm__ volatile("" : : "m"(sums)); /* somebody might look at them */
    ret_sample->value = (double)(n * sizeof(lanes)) / (bench_now() - begin) / 1e9;
    return true;
}

bool bench_memory_gather(void *arg, struct bench_sample *ret_sample)
{
    const struct bench_memory *memory = arg;
    size_t all = memory->bytes / memory->row_bytes;
    size_t payload = memory->rows * memory->row_bytes;
    const void **rows = malloc(memory->n * memory->rows * sizeof(*rows));
    static uint64_t state = 1;
    struct bench_watch watch;
    size_t cursor = 0;

    if (rows == NULL || !bench_watch_start(&watch, memory->n)) {
        free(rows);
        return false;
    }
    for (size_t i = 0; i < memory->n * memory->rows; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        rows[i] = memory->from + (state >> 33) % all * memory->row_bytes;
    }
    watch.begin = bench_now();
    for (size_t i = 0; i < memory->n; i++) {
        double begin = bench_now();

        if (cursor + payload > memory->bytes)
            cursor = 0;
        kv_rows_gather(memory->to + cursor, rows + i * memory->rows, memory->rows,
                       memory->row_bytes);
        cursor += payload;
        bench_watch_add(&watch, bench_now() - begin);
    }
    if (memory->times)
        bench_watch_times(&watch, ret_sample);
    else
        bench_watch_rate(&watch, payload, ret_sample);
    free(rows);
    return true;
}
