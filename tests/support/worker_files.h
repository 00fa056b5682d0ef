/* worker_files.h - what kvworker is given in tests: files in the test's folder (process.h),
 * with a made model and a text that its tokenizer has tokens for.
 *
 * Threads: one.  Memory: the caller's.  All must go well, or the test fails.
 */
#ifndef KV_TESTS_SUPPORT_WORKER_FILES_H
#define KV_TESTS_SUPPORT_WORKER_FILES_H

#include "tests/support/process.h"

/* Writes a file and says where it is. */
void worker_file_write(char ret_path[PROCESS_PATH_BYTES],
                       const char *name,
                       const void *data,
                       size_t bytes);

/* Writes the made model, the same one every time, with a small tokenizer; and the same model with
 * a chat template. */
void worker_file_write_model(char ret_path[PROCESS_PATH_BYTES], const char *name);
void worker_file_write_chat_model(char ret_path[PROCESS_PATH_BYTES], const char *name);

/* The first so many bytes of a text without an end; words come back, never in one order. */
void worker_text(char *ret_text, size_t bytes);

/* The value of a member in a line of JSON that kvworker has printed: as it stands there, and as a
 * number, NAN for null. */
const char *worker_json_value(const char *line, const char *name);
double worker_json_number(const char *line, const char *name);

#endif
