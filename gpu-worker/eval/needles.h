/* needles.h - needle sentences: placed in a long text, which a model is asked to complete.
 *
 * A file has one per line, `beginning|completion`; empty lines and lines that begin with # are
 * skipped:
 *
 *     The lighthouse keeper's parrot is called|Marmalade
 *
 * In the text, each is a paragraph of its own, evenly spread.  A question is the text followed
 * by the beginning of one sentence; an answer that begins with its completion has found it.
 *
 * Threads: pure functions.  Memory: read/free.
 */
#ifndef KV_GPU_WORKER_EVAL_NEEDLES_H
#define KV_GPU_WORKER_EVAL_NEEDLES_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    KVW_NEEDLES_MAX = 1024,
    KVW_NEEDLE_BYTES_MAX = 4096, /* of a line */
};

struct kvw_needle {
    char *beginning, *completion; /* trimmed; neither is empty */
};

struct kvw_needles {
    struct kvw_needle *list;
    size_t count;
};

/* Reads the sentences of a file's text.  Fails with KV_INVALID if line *ret_line (from 1) is
 * not one, with KV_NOT_FOUND if there are none, with KV_TOO_LARGE if a line is longer or there
 * are more than allowed, and with KV_NO_MEMORY. */
kv_status_t kvw_needles_read(const char *text,
                             size_t bytes,
                             struct kvw_needles *ret_needles,
                             size_t *ret_line);
/* A struct of zeros is allowed. */
void kvw_needles_free(struct kvw_needles *needles);

/* Inserts all sentences into a text: number i of n after (2 i + 1) / 2n of it, where the next
 * paragraph, line or word ends.  Free the result with free(). */
kv_status_t kvw_needles_place(const struct kvw_needles *needles,
                              const char *text,
                              size_t bytes,
                              char **ret_text,
                              size_t *ret_bytes);

/* Appends an empty line and the beginning of a sentence to a text.  Free the result with
 * free(). */
kv_status_t kvw_needle_ask(const struct kvw_needle *needle,
                           const char *text,
                           size_t bytes,
                           char **ret_text,
                           size_t *ret_bytes);

enum kvw_needle_verdict {
    KVW_NEEDLE_OPEN, /* right so far */
    KVW_NEEDLE_FOUND,
    KVW_NEEDLE_MISSED,
};

/* Judges the beginning of an answer; blanks before it do not count. */
enum kvw_needle_verdict
kvw_needle_judge(const struct kvw_needle *needle, const char *answer, size_t bytes);

#endif
