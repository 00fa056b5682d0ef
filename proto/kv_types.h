/* kv_types.h - what a model's cache looks like: the schema, and the names of things.
 *
 * Vocabulary (one word per idea; the field's words are in parentheses):
 *   token     a position in a session's sequence, counted from 0
 *   unit      one (layer, kv head) of a session: what is placed, indexed and queried as a whole
 *   row       one token's key and value in one unit, adjacent: K then V
 *   block     KV_BLOCK_TOKENS consecutive tokens, all units (FlashInfer: page, LMCache: chunk)
 *   segment   a block's bytes in one unit
 *   codebook  centroids that quantize the keys of consecutive blocks of a unit; a key's code
 *             names the nearest centroid in each subspace (product quantization: Jegou et al.,
 *             IEEE PAMI 2011; of keys: PQCache, arXiv:2407.12820, section 3.2)
 *   chapter   consecutive blocks of a unit with one codebook
 *   summary   a cluster's mean key, mean value and row count, made per 1,024 or 3,072
 *             rows of a chapter
 *   eligible row   a row in a query's ranges
 *   candidate      an eligible row that step 1 of a query passes to step 2
 *   selected row   a row of the result
 *   writer    64 random bits drawn for a session; the seeds of its rows' CRCs depend on them
 *   fingerprint  of a model: identifies all that makes the keys of two models comparable:
 *             weights and their quantization, geometry, RoPE parameters and style; of a block
 *             that a client has cached: a hash of its rows' CRCs in one unit
 *   version   of an object: 64 bits that no other object of its name ever has
 *   generation  of a session: incremented by each fork and truncate
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
    KV_ROW_BYTES_MAX = 16384, /* of a row; a segment of such rows is one page of the arena */
    KV_ROW_SIZES_MAX = 16,    /* different row sizes in a model */
    KV_TOKENS_MAX = 16 << 20, /* tokens of a session */
    KV_NAME_BYTES_MAX = 255,  /* of a model's or an object's name, without the final 0 */
    KV_OBJECT_BYTES_MAX = 64 << 20,
    KV_QUERIES_MAX = 32,       /* query vectors of one kv head in a query */
    KV_RANGES_MAX = 256,       /* ranges of eligible rows in a query */
    KV_SELECTED_MAX = 8192,    /* k of a query, and what each of its query vectors may select */
    KV_CANDIDATES_MAX = 16384, /* of a query whose vectors select together */
    KV_SUBSPACES_MAX = 16,
    KV_CODE_BITS_MAX = 8,
    KV_KMEANS_ITERATIONS_MAX = 1000, /* k-means iterations */
    KV_CHAPTER_BLOCKS_MIN = 8,       /* blocks of a chapter; fewer do not repay a codebook */
};

/* The type of one element of a key or a value, as stored. */
enum kv_dtype {
    KV_FP32 = 1,
    KV_FP16 = 2,
    KV_BF16 = 3,
    KV_INT8 = 4,
};

/* Where memory is. */
enum kv_memory_type {
    KV_MEMORY_HOST = 0,
    KV_MEMORY_CUDA = 1,
};

/* What a query returns. */
enum kv_answer {
    KV_ANSWER_IDS = 1,    /* tokens */
    KV_ANSWER_ROWS = 2,   /* tokens and their rows */
    KV_ANSWER_ATTEND = 3, /* attention output over the rows, and its log-sum-exp */
};

/* What a query scores its candidates by before it reads their keys. */
enum kv_first_cut {
    KV_CUT_NONE = 0,
    KV_CUT_INT4 = 1, /* copies of the keys in 4 bits (kernels/key_copies.h) */
};

/* How many rows a query selects, at most k. */
enum kv_selection {
    KV_SELECT_TOP = 0,  /* k (top-k) */
    KV_SELECT_MASS = 1, /* the fewest heaviest rows with this fraction of all weight (top-p) */
    /* The rows with at least this fraction of the largest weight.  As a threshold of scores:
     * fraction = exp(-alpha). */
    KV_SELECT_THRESHOLD = 2,
};

/* How the query vectors of one unit (the query heads that share a kv head) select together.  A
 * vector's weights are the softmax of its scores over the eligible rows. */
enum kv_merge {
    KV_MERGE_SUM = 1,   /* the k largest sums of weights (as PQCache's code) */
    KV_MERGE_MAX = 2,   /* the k largest maxima of weights (as ShadowKV) */
    KV_MERGE_UNION = 3, /* rows that any vector selects alone, k each (as A2ATS) */
    KV_MERGE_NONE = 4,  /* as UNION, and for each row which vectors selected it */
};

/* What one layer stores per token and kv head. */
enum kv_layer_kind {
    KV_LAYER_KV = 1,   /* a key and a value */
    KV_LAYER_KEYS = 2, /* a key only: values are shared, or a latent vector serves as both */
};

struct kv_layer_schema {
    uint8_t kind;        /* enum kv_layer_kind */
    uint8_t dtype;       /* enum kv_dtype */
    uint16_t n_kv_heads; /* 1..KV_HEADS_MAX */
    uint16_t d_k;        /* elements of a key, 1..KV_DIM_MAX */
    uint16_t d_v;        /* elements of a value, 1..KV_DIM_MAX; 0 with KV_LAYER_KEYS */
    uint32_t row_bytes;  /* (d_k + d_v) * bytes of the dtype; set by kv_schema_finish() */
    uint32_t unit_begin; /* number of the layer's first unit; set by kv_schema_finish() */
};

/* The shape of a model's cache.  All sizes come from here, since layers may differ: no code
 * assumes 2 x heads x d. */
typedef struct kv_schema {
    uint32_t n_layers;
    uint32_t n_units; /* sum of n_kv_heads; set by kv_schema_finish() */
    struct kv_layer_schema layers[KV_LAYERS_MAX];
} kv_schema_t;

/* 128 bits, compared bytewise. */
struct kv_id128 {
    uint8_t bytes[16];
};

/* How long an object stays, in milliseconds. */
#define KV_OBJECT_TTL_MAX_MS 2592000000u /* 30 days */
#define KV_OBJECT_TTL_NONE   UINT32_MAX  /* it is not removed, whatever the node's default is */

/* What a client does with objects. */
enum kv_object_verb {
    KV_OBJECT_PUT,    /* KV_EXISTS: the name has different bytes; KV_NO_MEMORY: store full;
                         KV_UNSUPPORTED: ttl_ms, and the node speaks a version below 9.  A put
                         of the same bytes renews the time: an object stays as long as any of
                         its puts asked for, and is evictable only if all of them said so */
    KV_OBJECT_GET,    /* KV_NOT_FOUND; KV_TOO_LARGE: `bytes` is the size, nothing was written;
                         KV_CONFLICT: replaced while it was read, try again */
    KV_OBJECT_EXISTS, /* KV_OK or KV_NOT_FOUND; `bytes` is the size */
    KV_OBJECT_DELETE, /* KV_OK: the object that the node found is deleted; one put later is not;
                         KV_NOT_FOUND: it found none */
};

/* What a client says of a prefix that nodes keep. */
enum kv_prefix_verb {
    KV_PREFIX_PIN = 1, /* it stays, and those before it, for a time or until it is unpinned */
    KV_PREFIX_UNPIN = 2,
    KV_PREFIX_EVICT = 3, /* it goes, and those behind it */
    KV_PREFIX_HINT = 4,  /* it will be used after that time */
};

#define KV_PREFIX_HINT_MAX_MS 3600000u /* an hour */

/* Whether a client is connected to a node. */
enum kv_node_state {
    KV_NODE_CONNECTED,
    KV_NODE_LOST,      /* the next operation that needs the node reconnects */
    KV_NODE_UNREACHED, /* not connected so far; only `address` and `detail` are set.  The next
                          operation that needs the node connects */
};

/* A model.  Sessions of different fingerprints never share data. */
struct kv_model_info {
    char name[KV_NAME_BYTES_MAX + 1]; /* 0-terminated, not empty */
    struct kv_id128 fingerprint;
    kv_schema_t schema;
};

/* What the keys and values of a prompt depend on beside the model and the tokens: the name of
 * an adapter (of all tokens), the hash of an image (of the tokens that stand for it). */
struct kv_extra_key {
    uint32_t first_token,
        n_tokens;      /* of the prompt; up to UINT32_MAX, which is all that follow */
    const void *bytes; /* (n_bytes) */
    size_t n_bytes;
};

/* Returns the bytes of one element; 0 if `dtype` is not a kv_dtype. */
uint32_t kv_dtype_bytes(unsigned dtype);

/* Checks every field that the caller sets and computes the others.  Fails with KV_INVALID if a
 * field is out of bounds; `detail` then names the field and its value. */
kv_status_t kv_schema_finish(kv_schema_t *schema, char *detail, size_t detail_bytes);

/* Makes a finished schema of equal layers.  With d_v 0, the layers have keys only.  Fails as
 * kv_schema_finish(). */
kv_status_t kv_schema_uniform(kv_schema_t *ret_schema,
                              uint32_t n_layers,
                              uint32_t n_kv_heads,
                              uint32_t d_k,
                              uint32_t d_v,
                              enum kv_dtype dtype);

/* Returns the unit's number in its session, in [0, n_units).  `layer` and `head` must be in
 * bounds. */
static inline uint32_t kv_schema_unit(const kv_schema_t *schema, uint32_t layer, uint32_t head)
{
    return schema->layers[layer].unit_begin + head;
}

/* Returns the bytes that one token takes in all units together. */
uint64_t kv_schema_token_bytes(const kv_schema_t *schema);

#ifdef __cplusplus
}
#endif
#endif
