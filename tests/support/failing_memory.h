/* failing_memory.h - allocations that fail when told: malloc() and its like, mmap(), threads.
 *
 * A program that is linked with it (kv_failing_memory() in tests/CMakeLists.txt) has these
 * calls of its own objects counted, those of libkvclient's, kv_store's and kv_worker's among
 * them. What gRPC, UCX and libc ask for inside of themselves is theirs.
 *
 * Over the environment, for whole programs:
 *   KV_FAIL_MEMORY=17         the 17th call fails, alone
 *   KV_FAIL_MEMORY=17+        the 17th and all after it
 *   KV_FAIL_MEMORY_TRACE=1    says on stderr who asked when the first one failed
 *   KV_FAIL_MEMORY_FILE=PATH  at its end the program writes there how many calls there were
 *
 * Threads: any.
 */
#ifndef KV_TESTS_SUPPORT_FAILING_MEMORY_H
#define KV_TESTS_SUPPORT_FAILING_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Counts from 0 again; the nth call from now on fails, `and_on`: with all after it.  0: none.
 */
void failing_memory_arm(uint64_t nth, bool and_on);

/* Calls since then. */
uint64_t failing_memory_calls(void);

/* Zeroed memory for the test itself: not counted, and there is always some. */
void *failing_memory_sure(size_t n, size_t bytes);

#endif
