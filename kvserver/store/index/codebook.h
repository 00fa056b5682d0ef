/* codebook.h - the codebooks of one data thread: centroids that stand for the keys of some
 * consecutive segments of a unit (a chapter), and the lists of a long chapter's rows by cell.
 *
 * Cells (kernels/pq_cells.h) and summaries (summaries.h) are made for the chapter's first full
 * segments, which are marked `in_chapter` (unit.h): rows that came under the codebook later are
 * in none.  There is one such segment at most in each of the chapter's places, whoever has it.
 *
 * A codebook is made by an index job (builder.h) and lives as long as a segment has its codes:
 * it is inherited with the segments, and goes with the last of them.  Its centroids never
 * change.  Its cells and summaries may be made again by a later job, where they have gone bad,
 * and summaries by one that wants others.
 *
 * Cells and summaries that fail their checksums are counted and lost: not used any more, until
 * others are made (kvs_index_repair()).
 *
 * Threads: the data thread.  Memory: records from the system as they are used, centroids from
 * the arena.
 */
#ifndef KV_KVSERVER_STORE_INDEX_CODEBOOK_H
#define KV_KVSERVER_STORE_INDEX_CODEBOOK_H

#include "kernels/exact_scores.h"
#include "kernels/kmeans.h"
#include "kernels/pq_cells.h"
#include "kvserver/base/pool.h"
#include "kvserver/store/index/summaries.h"
#include "kvserver/store/rows/segment.h"
#include "proto/kv_status.h"

enum {
    KVS_CODEBOOKS_MAX = 64 << 10, /* of one data thread */
    KVS_CODEBOOK_DIM_MAX = 1024,
    KVS_CODEBOOK_KEYS = 16 << 10, /* elements of keys that are converted at once */
};

/* What codes are, and how rows are scored by them (scorer.h, scorers.c). */
enum kvs_scorer {
    KVS_SCORER_PQ,
    KVS_N_SCORERS,
};
struct kvs_scorer_ops;

/* How to make codes. */
struct kvs_index_plan {
    enum kvs_scorer scorer;
    uint32_t chapter_blocks; /* 0: one codebook for all rows, and open (codebook.h) */
    struct kv_pq_shape shape;
    enum kv_key_type type;
    uint32_t d_v;            /* elements of a value */
    uint32_t summaries_bits; /* KV_SUMMARY_16, KV_SUMMARY_64; 0: no summaries are asked for */
    uint32_t iterations;     /* of k-means at most */
    uint64_t budget_us;      /* of the thread's time for k-means; 0: no limit */
    uint64_t seed;
};

struct kvs_codebook {
    const struct kvs_scorer_ops *scorer;
    uint64_t serial; /* counts up with every codebook of the thread */
    uint32_t refs;   /* segments that have its codes, and the job that makes it */
    bool open;       /* rows behind its segments get its codes when a query first meets them */
    bool is_broken;  /* its centroids are bad: its codes, cells and summaries are not used */
    uint16_t pass;   /* of the scrub that last came by (scrub.h) */
    uint32_t n_most; /* full segments of its chapter that one unit has, by the pass before */
    uint32_t n_seen; /* ... and by this one so far */
    struct kv_pq_shape shape;
    float *centroids, *half_squares; /* see kmeans.h */
    int class_id, tile_class;
    uint32_t *cells; /* lists (kernels/pq_cells.h) of the first n_celled rows; NULL: none */
    int cells_class;
    uint32_t n_celled;
    struct kvs_summaries summaries;    /* of the first segments' rows, key and value */
    uint32_t centroids_crc, cells_crc; /* centroids and half_sq_norms; cells, heads and rows */
    uint32_t n_cells_lost;             /* rows whose cells are to be made again */
    uint32_t n_summaries_lost;         /* rows whose summaries are to be made again, by: */
    struct kvs_index_plan lost_plan;
    struct kvs_index_plan plan; /* by which it was made */
    uint32_t block_begin;       /* the chapter's first block */
    uint32_t iterations;        /* of k-means that made it */
    uint64_t train_us;          /* of the thread's time */
};

struct kvs_codebooks {
    struct kvs_segment_store *store; /* of the segments that have its codes */
    struct kv_pool *pool;
    uint64_t serial;                           /* of the last one made */
    uint64_t rows_summarised, summaries_bytes; /* of all there are */
};

/* For the segments of that segment store, which must stay where it is. */
bool kvs_codebooks_init(struct kvs_codebooks *books, struct kvs_segment_store *store);
/* No segment has codes any more. */
void kvs_codebooks_fini(struct kvs_codebooks *books);

/* One of the plan, with a ref of the caller's; centroids are whatever they are.  KV_NO_MEMORY: no page, or
 * KVS_CODEBOOKS_MAX of them; KV_TOO_LARGE: its centroids do not fit a page. */
kv_status_t kvs_codebook_create(struct kvs_codebooks *books,
                                const struct kvs_index_plan *plan,
                                uint32_t *ret_codebook);
void kvs_codebook_ref(struct kvs_codebooks *books, uint32_t codebook);
void kvs_codebook_unref(struct kvs_codebooks *books, uint32_t codebook);

/* Its centroids are what they will be: makes their checksum. */
void kvs_codebook_seal(struct kvs_codebook *book);

/* Compares centroids and cells with the checksums that were made of them. */
bool kvs_codebook_centroids_are_good(const struct kvs_codebook *book);
bool kvs_codebook_cells_are_good(const struct kvs_codebook *book);

/* Gives it its cells, of the first n_celled rows, or takes them from it (NULL). */
void kvs_codebook_set_cells(struct kvs_codebooks *books,
                            uint32_t codebook,
                            uint32_t *cells,
                            int cells_class,
                            uint32_t n_celled);

/* Verifies its cells, if it has any that are not lost already.  False: they are now.  They stay
 * where they are, as a query may be in the middle of them. */
bool kvs_codebook_verify_cells(struct kvs_codebooks *books, uint32_t codebook);

/* Verifies a group of its summaries.  False: it was bad, and the codebook has none any more. */
bool kvs_codebook_verify_summaries(struct kvs_codebooks *books,
                                   uint32_t codebook,
                                   uint32_t group);

/* Puts summaries in the place of what the codebook has; they are its own from then on. */
void kvs_codebook_set_summaries(struct kvs_codebooks *books,
                                uint32_t codebook,
                                const struct kvs_summaries *summaries);

/* Room for lists of the first *n_rows rows, fewer if a page holds no more; their head is 0.
 * NULL: there are too many cells, too few rows for them to pay, or no memory. */
uint32_t *kvs_codebook_alloc_cells(struct kvs_codebooks *books,
                                   const struct kvs_codebook *book,
                                   uint32_t *n_rows,
                                   int *ret_class);

static inline struct kv_cells kvs_codebook_cells(const struct kvs_codebook *book)
{
    return kv_cells_at(&book->shape, book->cells, book->n_celled);
}

static inline struct kvs_codebook *kvs_codebook_at(const struct kvs_codebooks *books,
                                                   uint32_t codebook)
{
    return kv_pool_at(books->pool, codebook);
}

/* As the kernels of k-means take it. */
static inline struct kv_kmeans_codebook kvs_codebook_kmeans(const struct kvs_codebook *book)
{
    return (struct kv_kmeans_codebook){
        .centroids = book->centroids,
        .half_sq_norms = book->half_squares,
    };
}

#endif
