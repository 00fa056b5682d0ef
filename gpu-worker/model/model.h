/* model.h - a language model of a GGUF file: its parameters, checked, and its weights on a
 * device.
 *
 * Architectures: llama, qwen2.  A layer is
 *
 *     h = rms_norm(x, attn_norm)
 *     q, k, v = h Wq, h Wk, h Wv (+ biases);  q, k rotated by position (RoPE)
 *     x += attention(q, k, v) Wo
 *     h = rms_norm(x, ffn_norm)
 *     x += (silu(h Wgate) * (h Wup)) Wdown
 *
 * and logits are rms_norm(x, output_norm) Woutput, where Woutput is the embedding if the file
 * has no tensor of its own for it (tied).
 *
 * Everything in the file that changes the result must be supported: an unknown tensor or RoPE
 * scaling is an error, it is never ignored.
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
    uint32_t n_rot;   /* elements of a head that RoPE rotates */
    uint32_t context; /* tokens that the model was trained for */
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

/* Reads and checks the parameters and every tensor's name, type and shape.  Fails with
 * KV_UNSUPPORTED if an architecture or feature is not implemented, and with KV_INVALID if the
 * file contradicts itself.  `detail` is one line: the key or tensor, its value, what was
 * expected. */
kv_status_t kvw_model_read(const struct kvw_gguf *gguf,
                           struct kvw_model_params *ret_params,
                           char *detail,
                           size_t detail_bytes);

/* Returns the schema of the model's rows in the store, with elements of type `dtype`. */
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

/* Reads the parameters (kvw_model_read()) and gives the weights to the device.  The model keeps
 * `gguf` and `device`.  Fails with KV_TOO_LARGE if the weights exceed the memory of the machine
 * or container: they would be read from the disk again for every token. */
kv_status_t kvw_model_open(const struct kvw_gguf *gguf,
                           struct kvw_device *device,
                           struct kvw_model **ret_model,
                           char *detail,
                           size_t detail_bytes);
void kvw_model_close(struct kvw_model *model); /* NULL is allowed */

/* Reads every page of the file once, so that the first pass finds the weights in memory.  Calls
 * `progress` (may be NULL) with the bytes read so far; returning false stops. */
void kvw_model_warm(const struct kvw_model *model,
                    bool (*progress)(void *arg, uint64_t done, uint64_t total),
                    void *arg);

/* Returns what identifies the model in a store: its name, schema, and a fingerprint over the
 * file's values, the list of its tensors, samples of each one's bytes (beginning, middle, end),
 * and the element type of rows.  Fails with KV_NO_MEMORY. */
kv_status_t kvw_model_info(const struct kvw_model *model,
                           enum kv_dtype dtype,
                           struct kv_model_info *ret_info);

/* Computes the rotations of n tokens from token_begin on: ret_rotations (n, n_rot / 2, 2),
 * cosine and sine. */
void kvw_model_rotations(const struct kvw_model_params *params,
                         uint32_t token_begin,
                         uint32_t n,
                         float *ret_rotations);

#endif
