/* copies.h - prefixes that the client is to copy to another row, in the background.
 *
 * A session goes to another row than the one that keeps its prompt's prefix when that row has too
 * many sessions of the root (kvserver/cluster/placement.h).  The next ones should find the prefix
 * where they are sent, so it is copied: ops/copy.c does it, one prefix at a time.  A copy has rows
 * only: codes, codebooks and summaries are not read from nodes.  Who opens a session there and
 * indexes it makes them anew, for itself and those that come after it.
 *
 * Threads: the client's.  Memory: a part of the client; zeros are an empty queue.  An entry's is
 * kvc_copies_want() / kvc_copies_drop().
 */
#ifndef KV_CLIENT_COPIES_H
#define KV_CLIENT_COPIES_H

#include "client/include/kvclient.h"

struct kvc_copy;

enum {
    KVC_COPIES_WANTED = 8, /* more are not remembered: a later session wants them again */
};

struct kvc_copies {
    struct kvc_copy *first, *last;
    void (*step)(struct kv_client *client); /* goes on with the first one, if it can */
    uint32_t n;
    uint64_t n_done;   /* prefixes copied */
    bool is_beginning; /* operations that are begun now are the library's own */
};

enum kvc_copy_stage {
    KVC_COPY_WANTED,
    KVC_COPY_OPENING_FROM,
    KVC_COPY_OPENING_TO,
    KVC_COPY_READING,
    KVC_COPY_PUTTING,
    KVC_COPY_PUBLISHING,
    KVC_COPY_OVER, /* done or given up: once nobody uses its buffer, it leaves */
};

struct kvc_copy {
    struct kvc_copy *next;
    struct kv_model_info model;
    uint64_t from_root, to_root;
    uint64_t at_us; /* when it begins */
    enum kvc_copy_stage stage;
    struct kv_op *op; /* what it waits for */
    struct kv_session *from, *to;
    struct kv_buffer *buffer;
    struct kv_rows rows; /* in the buffer */
    uint32_t token_end;  /* of what is copied */
    uint32_t n_names;
    struct kv_id128 names[]; /* (n_names) of the prefix's blocks, from the first one on */
};

/* Remembers that the row of `from_root` keeps the first n_names blocks, and that of `to_root` does
 * not: from at_us on it is copied, by `step`, which is the same each time.  Returns false if it is
 * remembered already, or cannot be. */
bool kvc_copies_want(struct kvc_copies *copies,
                     void (*step)(struct kv_client *client),
                     const struct kv_model_info *model,
                     uint64_t from_root,
                     uint64_t to_root,
                     const struct kv_id128 *names,
                     uint32_t n_names,
                     uint64_t at_us);

/* Returns how many operations the copies have. */
static inline uint32_t kvc_copies_ops(const struct kvc_copies *copies)
{
    return copies->first != NULL && copies->first->op != NULL;
}

/* Frees the first one, which holds nothing any more. */
void kvc_copies_drop(struct kvc_copies *copies);

/* The client closes: nothing is copied any more.  It frees the sessions and buffers of a copy with
 * all others. */
void kvc_copies_fini(struct kvc_copies *copies);

#endif
