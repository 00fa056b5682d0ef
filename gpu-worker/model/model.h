/* model.h - a language model of a GGUF file: its parameters, checked, and its weights on a
 * device.
 *
 * Architectures: llama, qwen2.  A layer is
 *
 *     h = rms_norm(x, attn_norm)
 *     q, k, v = h Wq, h Wk, h Wv (+ biases);  q, k turned by position
 *     x += attention(q, k, v) Wo
 *     h = rms_norm(x, ffn_norm)
 *     x += (silu(h Wgate) * (h Wup)) Wdown
 *
 * and logits are rms_norm(x, output_norm) Woutput, where Woutput is the embedding if the file
 * has no tensor of its own for it (tied).
 *
 * All that changes the result must be known: a tensor or a RoPE scaling that this file does not
 * understand makes the model unusable, it is never passed over.
 *
 * Threads: read-only once open.  Memory: open/close; keeps the file and the device.
 */
#ifndef KV_GPU_WORKER_MODEL_MODEL_H
#define KV_GPU_WORKER_MODEL_MODEL_H

#include "gpu-worker/device/device.h"
#include "gpu-worker/gguf/gguf.h"

enum {
    KVW_MODEL_NAME_BYTES = 128,
    KVW_MODEL_HEADS_MAX = 256,     /* query heads */
    KVW_MODEL_D_MAX = 256,         /* elements of a head */
    KVW_MODEL_WIDTH_MAX = 1 << 18, /* columns of any weight */
};

struct kvw_model_params {
    char architecture[KVW_MODEL_NAME_BYTES];
    char name[KVW_MODEL_NAME_BYTES]; /* general.name; printable ASCII, may be empty */
    uint32_t n_layers;
    uint32_t n_hidden; /* width of a token's state */
    uint32_t n_ffn;
    uint32_t n_q_heads, n_kv_heads;
    uint32_t d;       /* of a head: 64..256, a multiple of 8 */
    uint32_t n_rot;   /* elements of a head that RoPE turns */
    uint32_t context; /* tokens that the model was made for */
    uint32_t n_vocabulary;
    float epsilon; /* of RMS norm */
    enum kv_rope_style rope_style;
    float rope_base;
    float rope_scale; /* linear scaling: positions are divided by it */
    const float
        *rope_factors;  /* Llama 3's: (n_rot / 2) divisors of the frequencies; NULL: none */
    bool has_output;    /* false: tied to the embedding */
    uint64_t n_weights; /* elements of all tensors */
    uint64_t weight_bytes;
};

/* Reads and checks the parameters and every tensor's name, type and shape.  KV_UNSUPPORTED: an
 * architecture or feature that is not computed here; KV_INVALID: the file contradicts itself.
 * `detail` is one line: the key or tensor, its value, what was expected. */
kv_status_t kvw_model_read(const struct kvw_gguf *gguf,
                           struct kvw_model_params *ret_params,
                           char *detail,
                           size_t detail_bytes);

/* Rows as the store keeps them; n_tokens of them take kv_schema_token_bytes() x n_tokens. */
kv_status_t kvw_model_schema(const struct kvw_model_params *params,
                             enum kv_dtype dtype,
                             kv_schema_t *ret_schema);

struct kvw_model_layer {
    struct kvw_weight *attn_norm, *q, *k, *v, *attn_output;
    struct kvw_weight *ffn_norm, *gate, *up, *down;
    /* NULL: none */
    struct kvw_weight *q_bias, *k_bias, *v_bias, *attn_output_bias;
    struct kvw_weight *gate_bias, *up_bias, *down_bias;
};

struct kvw_model {
    struct kvw_model_params params;
    const struct kvw_gguf *gguf;
    struct kvw_device *device;
    struct kvw_weight *embedding, *output_norm;
    struct kvw_weight *output; /* the embedding, if tied */
    struct kvw_model_layer *layers;
};

/* kvw_model_read(), and the weights.  KV_NO_MEMORY also if the machine's memory cannot hold the
 * file: it would be read from the disk again for every token. */
kv_status_t kvw_model_open(const struct kvw_gguf *gguf,
                           struct kvw_device *device,
                           struct kvw_model **ret_model,
                           char *detail,
                           size_t detail_bytes);
void kvw_model_close(struct kvw_model *model); /* NULL is allowed */

/* Reads the weights once, so that the first pass finds them in memory; `progress` (may be NULL)
 * is called with the bytes so far, and stops it by returning false. */
void kvw_model_warm(const struct kvw_model *model,
                    bool (*progress)(void *arg, uint64_t done, uint64_t total),
                    void *arg);

/* What a store is told: name, schema, and a fingerprint over the file's values, the list of its
 * tensors, samples of each one's bytes (beginning, middle, end), and the element type of rows.
 */
kv_status_t kvw_model_info(const struct kvw_model *model,
                           enum kv_dtype dtype,
                           struct kv_model_info *ret_info);

/* Cosine and sine for the tokens from token_begin on: ret_turns (n, n_rot / 2, 2). */
void kvw_model_turns(const struct kvw_model_params *params,
                     uint32_t token_begin,
                     uint32_t n,
                     float *ret_turns);

#endif
