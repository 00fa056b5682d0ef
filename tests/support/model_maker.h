/* model_maker.h - GGUF files with a whole small model of random weights, right ones and ones
 * with a flaw. */
#ifndef KV_TESTS_SUPPORT_MODEL_MAKER_H
#define KV_TESTS_SUPPORT_MODEL_MAKER_H

#include "tests/support/gguf_maker.h"
#include "tests/support/tokenizer_maker.h"

enum {
    MADE_LAYERS = 2,
    MADE_HIDDEN = 128,
    MADE_FFN = 72,
    MADE_D = 64,
    MADE_Q_HEADS = 4,
    MADE_KV_HEADS = 2,
    MADE_VOCABULARY = 50, /* without a tokenizer */
    MADE_TENSORS = 3 + MADE_LAYERS * 12,
};

#define MADE_EPSILON 1e-5

struct made_tensor {
    char name[64];
    uint64_t columns, rows;
    float *values;
};

/* What is wrong with a made file; all zeros: nothing. */
struct made_flaw {
    const char *architecture;
    const char *lacking_key, *lacking_tensor, *extra_tensor, *scaling;
    float factor, old_factor; /* of the scaling; 0: no key */
    uint32_t kv_heads, experts, extra_columns;
    const char *expected; /* in the detail */
    kv_status_t status;
};

struct made_model {
    struct gguf_maker maker;
    struct made_tensor tensors[MADE_TENSORS + 1];
    size_t n_tensors;
    void *aligned;
    struct kvw_gguf *gguf;
};

/* With a tokenizer unless it is NULL; the vocabulary is then the tokenizer's.  The same
 * arguments make the same file. */
void make_model(struct made_model *made,
                const struct made_flaw *flaw,
                const struct small_tokenizer *tokenizer);
void unmake_model(struct made_model *made);

#endif
