/* recorded.h - answers of an earlier build, kept as text, and those of this one beside them.
 *
 * A file has one answer a line: its name, a colon, what it was.  Empty lines and those that
 * begin with # do not count.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_TESTS_SUPPORT_RECORDED_H
#define KV_TESTS_SUPPORT_RECORDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* FNV-1a, of the tests alone: nothing of the product changes it. */
uint64_t recorded_hash(const void *data, size_t bytes);

/* " 3f800000 ...": the bits. */
void recorded_print_floats(FILE *out, const float *values, size_t n);

/* `head`: lines that say what the file is; they become comments. */
bool recorded_write(const char *path, const char *head, const char *text);

/* Prints the first line that differs, here and there. */
bool recorded_same(const char *path, const char *text);

/* Lines as comments, each behind "# ". */
void recorded_print_head(FILE *out, const char *head);

#endif
