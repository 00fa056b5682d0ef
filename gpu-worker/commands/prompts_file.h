/* prompts_file.h - a file of prompts: a JSON object a line.
 *
 *     {"prompt": "Why is the sky blue?", "max_tokens": 40, "id": "q1"}
 *
 * "id", a string, and "max_tokens" may be missing.  Empty lines do not count; any other member is an
 * error, so that none is misspelt and has no effect.
 *
 * Threads: pure functions.  Memory: kvw_prompts_free().
 */
#ifndef KV_GPU_WORKER_COMMANDS_PROMPTS_FILE_H
#define KV_GPU_WORKER_COMMANDS_PROMPTS_FILE_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kvw_prompt {
    char *text; /* (bytes) 0-terminated */
    size_t bytes;
    char *id;            /* NULL: none */
    uint32_t max_tokens; /* 0: not said */
    uint32_t line;       /* from 1 */
};

struct kvw_prompts {
    struct kvw_prompt *prompts;
    size_t n;
};

/* Reads a text of such lines.  Fails with KV_INVALID, and says which line is wrong and how, or with
 * KV_NO_MEMORY; there is nothing to be freed then. */
kv_status_t kvw_prompts_read(const char *text,
                             size_t bytes,
                             uint32_t most_tokens,
                             struct kvw_prompts *ret_prompts,
                             char *detail,
                             size_t detail_bytes);
void kvw_prompts_free(struct kvw_prompts *prompts);

#endif
