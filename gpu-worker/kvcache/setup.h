/* setup.h - the parameters of a session's rows: model, store, sizes; and the phases of a
 * session's tokens.
 */
#ifndef KV_GPU_WORKER_KVCACHE_SETUP_H
#define KV_GPU_WORKER_KVCACHE_SETUP_H

#include "client/include/kvclient.h"
#include "gpu-worker/base/trace.h"
#include "gpu-worker/model/model.h"

#include <stdbool.h>

enum kvw_phase {
    KVW_PREFILL, /* tokens of a prompt */
    KVW_DECODE,  /* one token after the prompt */
};

/* A session that other workers use as well, before this one or at the same time.  It has, or is
 * being given, the rows of all tokens before the first pass, which reads them layer by layer. */
struct kvw_session_share {
    struct kv_ticket ticket;
    bool is_arriving; /* another worker may still be bringing the rows */
    bool is_exact;    /* no row is from a step that attended to some rows only */
    /* is_arriving: becomes true to end the wait for rows; NULL: never. */
    const _Atomic int *stop;
    /* is_arriving: called now and then while a layer is waited for, with what the store has of
     * it, of the tokens that are needed; may be NULL. */
    void *arg;
    void (*arrived)(void *arg, uint32_t layer, uint32_t tokens, uint32_t needed);
};

struct kvw_session_setup {
    const struct kvw_model *model;
    struct kv_client *client; /* of the store; kept */
    enum kv_dtype dtype;      /* of rows: KV_FP16, KV_BF16, KV_FP32 */
    uint32_t capacity;        /* tokens at most */
    uint32_t chunk_tokens;    /* of one pass at most */
    const uint32_t *prompt;   /* (n_prompt) that it begins with, as far as known when it is
                               * opened; not kept */
    uint32_t n_prompt;
    /* The session to go on with; NULL: a new one is opened. */
    const struct kvw_session_share *share;
    /* A new session begins with what is stored of the prompt, but for its last token. */
    bool reuses;
    bool publishes; /* the blocks that kvw_session_publish() is told of are kept for others */
    bool tells_tokens; /* with their tokens, for readers of the nodes' events */
    bool is_kept;      /* it is not closed at the end, but left to its lease */
    bool opens_later;  /* what is created is not open yet: kvw_session_opened() tells */
    /* Only rows of these kv heads are put; n_kv_heads 0: all. */
    uint32_t kv_head_begin, n_kv_heads;
    struct kvw_trace *trace; /* kept; NULL: none */
};

/* As device.h's shape of all rows of a layer. */
static inline struct kvw_rows_shape
kvw_session_rows_shape(const struct kvw_session_setup *setup)
{
    const struct kvw_model_params *params = &setup->model->params;

    return (struct kvw_rows_shape){
        .n_q_heads = params->n_q_heads,
        .n_kv_heads = params->n_kv_heads,
        .d = params->d,
        .capacity = setup->capacity,
        .dtype = setup->dtype,
    };
}

/* Returns how many operations of its client a session may have at once: reads of cached blocks, puts, an
 * index of each layer, a query, a publish, and some more. */
static inline uint32_t kvw_session_ops_max(const struct kvw_model_params *params)
{
    return 128 + params->n_layers;
}

#endif
