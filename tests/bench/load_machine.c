/* The machine itself: the limits alone, so that the others can be judged. */
#include "tests/bench/bench.h"

static bool run_memory(struct bench *bench, const struct bench_load *load)
{
    struct bench_memory memory;
    bool is_good;

    (void)load;
    if (!bench_memory_open(bench, &memory))
        return false;
    memory.row_bytes = 256;
    memory.rows = 256;
    memory.n = bench_count(bench, 1000);
    is_good = bench_compare(bench,
                            &(struct bench_comparison){
                                .name = "machine.read",
                                .unit = "GB/s",
                                .is_alone = true,
                                .params = {.bytes = memory.bytes},
                                .n_sides = 1,
                                .sides = {{NULL, bench_memory_read, &memory}},
                            }) &&
              bench_compare(bench,
                            &(struct bench_comparison){
                                .name = "machine.copy",
                                .unit = "GB/s",
                                .is_alone = true,
                                .params = {.bytes = memory.bytes},
                                .n_sides = 2,
                                .sides = {{NULL, bench_memory_copy, &memory},
                                          {"memory read", bench_memory_read, &memory}},
                            }) &&
              bench_compare(bench, &(struct bench_comparison){
                                       .name = "machine.gather",
                                       .unit = "GB/s",
                                       .is_alone = true,
                                       .params = {.bytes = memory.row_bytes * memory.rows,
                                                  .rows = (unsigned)memory.rows},
                                       .n_sides = 2,
                                       .sides = {{NULL, bench_memory_gather, &memory},
                                                 {"memory read", bench_memory_read, &memory}},
                                   });
    bench_memory_close(&memory);
    return is_good;
}

const struct bench_load bench_machine_loads[] = {
    {"machine", "what one processor can read, copy and gather", run_memory, 0},
    {NULL, NULL, NULL, 0},
};
