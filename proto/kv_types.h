/* kv_types.h - what a model's cache looks like: the schema, and the names of things.
 *
 * Vocabulary (one word per idea, used so in the whole project):
 *   token     a position in a session's sequence, counted from 0
 *   unit      one (layer, kv head) of a session: what is placed, indexed and worked on
 *   row       one token's key and value in one unit, adjacent: K then V
 *   block     KV_BLOCK_TOKENS consecutive tokens, all units (FlashInfer: page, LMCache: chunk)
 *   segment   a block's bytes in one unit
 *   codebook  centroids that stand for the keys of some consecutive blocks of a unit; a key's
 *             code names the nearest one in each of its subspaces (product quantisation)
 *   chapter   consecutive blocks of a unit with one codebook
 *   writer    64 bits that are drawn for a session: the seeds of its rows' CRCs cover them
 *   fingerprint  of a model: names all that makes two models' keys comparable: weights and
 *             their quantisation, geometry, RoPE parameters and style; of a block that a client
 *             holds: a hash of its rows' CRCs in one unit
 *   version   of an object: 64 bits that no other object of its name ever has
 *
 * Memory: everything here is plain data, copied by assignment.
 */
#ifndef KV_PROTO_KV_TYPES_H
#define KV_PROTO_KV_TYPES_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KV_BLOCK_TOKENS = 128,    /* tokens in a block */
    KV_LAYERS_MAX = 256,      /* layers of a model */
    KV_HEADS_MAX = 256,       /* kv heads of a layer */
    KV_UNITS_MAX = 16384,     /* units of a session, over all layers */
    KV_DIM_MAX = 4096,        /* d_k or d_v */
    KV_ROW_BYTES_MAX = 16384, /* a row: a segment of such ones is a page of a node's memory */
    KV_ROW_SIZES_MAX = 16,    /* different sizes of rows in a model */
    KV_TOKENS_MAX = 16 << 20, /* tokens of a session */
    KV_NAME_BYTES_MAX = 255,  /* name of a model or an object, without a final 0 */
    KV_OBJECT_BYTES_MAX = 64 << 20,
    KV_QUERIES_MAX = 32,    /* query vectors of one kv head in a query */
    KV_RANGES_MAX = 256,    /* ranges of candidates in a query */
    KV_SELECTED_MAX = 8192, /* k, and rerank times k, of one query vector */
    KV_SUBSPACES_MAX = 16,
    KV_CODE_BITS_MAX = 8,
    KV_KMEANS_ITERATIONS_MAX = 1000, /* of k-means */
    KV_CHAPTER_BLOCKS_MIN = 8,       /* fewer blocks are not worth a codebook */
};

/* The type of one element of a key or a value, as it is stored. */
enum kv_dtype {
    KV_FP32 = 1,
    KV_FP16 = 2,
    KV_BF16 = 3,
    KV_INT8 = 4,
};

/* What a query answers with. */
enum kv_answer {
    KV_ANSWER_IDS = 1,    /* tokens */
    KV_ANSWER_ROWS = 2,   /* tokens and their rows */
    KV_ANSWER_ATTEND = 3, /* softmax attention over their rows, and its log-sum-exp */
};

/* How many tokens a choice is, never more than k. */
enum kv_selection {
    KV_SELECT_TOP = 0,  /* k */
    KV_SELECT_MASS = 1, /* as few of the heaviest as have a share of all the weight (top-p) */
    KV_SELECT_THRESHOLD =
        2, /* those with at least a share of the largest weight (a threshold of
                           scores: share = exp(-alpha)) */
};

/* How the query vectors of one unit, the query heads that share a kv head, become one choice.
 * A vector's weights are the softmax of its scores over the candidates. */
enum kv_merge {
    KV_MERGE_SUM = 1,   /* the k largest sums of weights (PQCache's code) */
    KV_MERGE_MAX = 2,   /* the k largest of the largest weights (ShadowKV's) */
    KV_MERGE_UNION = 3, /* what any vector would choose alone, k each (A2ATS) */
    KV_MERGE_NONE = 4,  /* the same, and for each token which vectors chose it */
};

/* What one layer keeps per token and kv head. */
enum kv_layer_kind {
    KV_LAYER_KV = 1,   /* a key and a value */
    KV_LAYER_KEYS = 2, /* a key only (shared values, or a latent that serves as both) */
};

struct kv_layer_schema {
    uint8_t kind;        /* enum kv_layer_kind */
    uint8_t dtype;       /* enum kv_dtype */
    uint16_t n_kv_heads; /* 1..KV_HEADS_MAX */
    uint16_t d_k;        /* elements of a key, 1..KV_DIM_MAX */
    uint16_t d_v;        /* elements of a value; 0 where the kind has none */
    uint32_t row_bytes;  /* (d_k + d_v) * bytes of the dtype; kv_schema_finish() fills it */
    uint32_t unit_begin; /* number of the layer's first unit; kv_schema_finish() fills it */
};

/* The shape of a model's cache.  Everything that needs a size asks here; nothing assumes
 * 2 x heads x d. */
typedef struct kv_schema {
    uint32_t n_layers;
    uint32_t n_units; /* sum of n_kv_heads; kv_schema_finish() fills it */
    struct kv_layer_schema layers[KV_LAYERS_MAX];
} kv_schema_t;

/* 128 bits, compared by bytes. */
struct kv_id128 {
    uint8_t bytes[16];
};

/* A model: data of two fingerprints never meet. */
struct kv_model_info {
    char name[KV_NAME_BYTES_MAX + 1];
    struct kv_id128 fingerprint;
    kv_schema_t schema;
};

/* Bytes of one element; 0 for a number that is no kv_dtype. */
uint32_t kv_dtype_bytes(unsigned dtype);

/* Checks every field that the caller sets and fills those that follow from them.
 * KV_INVALID: a field is out of bounds; `detail` says which and its value. */
kv_status_t kv_schema_finish(kv_schema_t *schema, char *detail, size_t detail_bytes);

/* A schema of equal layers, finished.  d_v = 0 makes layers of keys only. */
kv_status_t kv_schema_uniform(kv_schema_t *ret_schema,
                              uint32_t n_layers,
                              uint32_t n_kv_heads,
                              uint32_t d_k,
                              uint32_t d_v,
                              enum kv_dtype dtype);

/* The unit's number in its session, in [0, n_units).  Both arguments must be in bounds. */
static inline uint32_t kv_schema_unit(const kv_schema_t *schema, uint32_t layer, uint32_t head)
{
    return schema->layers[layer].unit_begin + head;
}

/* Bytes that one token takes over all units. */
uint64_t kv_schema_token_bytes(const kv_schema_t *schema);

#ifdef __cplusplus
}
#endif
#endif
