/* fuzz.h - what the fuzzing programs share. */
#ifndef KV_TESTS_FUZZ_FUZZ_H
#define KV_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* What must hold whatever the input is. */
#define FUZZ_CHECK(condition) \
    do {                      \
        if (!(condition))     \
            abort();          \
    } while (0)

/* libFuzzer's entry. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#endif
