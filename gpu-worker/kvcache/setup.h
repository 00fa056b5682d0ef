/* setup.h - what a session is made with: the model, the store, sizes and options; the phase
 * that its tokens are in; and what is counted.
 */
#ifndef KV_GPU_WORKER_KVCACHE_SETUP_H
#define KV_GPU_WORKER_KVCACHE_SETUP_H

#include "client/include/kvclient.h"
#include "gpu-worker/attention/options.h"
#include "gpu-worker/base/trace.h"
#include "gpu-worker/model/model.h"

enum kv_phase {
    KV_PREFILL, /* tokens of a prompt */
    KV_DECODE,  /* one token that goes on from there */
};

struct kv_attention_setup {
    const struct kv_model *model;
    struct kv_client *client; /* of the store; kept */
    enum kv_dtype dtype;      /* of rows: KV_FP16, KV_BF16, KV_FP32 */
    uint32_t capacity;        /* tokens at most */
    uint32_t chunk_tokens;    /* of one attend() at most */
    struct kv_attention_options options;
    struct kv_trace *trace; /* kept; NULL: none */
};

struct kv_attention_stats {
    uint64_t bytes_put;     /* rows sent to the store */
    uint64_t bytes_fetched; /* rows and answers by attention got from it */
    uint64_t rows_attended; /* (query, kv head) pairs of one row */
    uint64_t rows_possible; /* the same, had every query attended to all before it */
    double exposed_wait_s;  /* the computation stood still for the store */
    /* Of the rows that exact scores would have chosen, how many were; 0 of 0: not measured. */
    uint64_t rows_recalled, rows_to_recall;

    /* Of an index in the store, as the nodes tell. */
    double index_wait_s;                              /* of exposed_wait_s, for codebooks */
    uint64_t rows_to_choose_from;                     /* candidates, per kv head and step */
    uint64_t rows_scored_by_code, rows_scored_by_key; /* of them, to take some for step 2 */
    uint64_t rows_reranked;
    uint64_t rows_estimated;           /* that were not chosen, by summaries */
    double nodes_worked_s;             /* of their threads, on queries */
    uint64_t rows_chosen, rows_cached; /* of them, found in the worker's cache */
    uint64_t rows_sent;                /* to answer queries */
    uint32_t codebooks_trained, codebooks_found;
    double recall_sum; /* of recall_count estimates of the nodes */
    uint64_t recall_count;
};

#endif
