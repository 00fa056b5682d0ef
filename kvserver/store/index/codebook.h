/* codebook.h - the codebooks of one data thread: centroids for the keys of a chapter (some
 * consecutive segments of a unit), and the lists of a long chapter's rows by cell.
 *
 * Cells (kernels/pq_cells.h) and summaries (summaries.h) are made for the chapter's first full
 * segments, which are marked `in_chapter` (unit.h).  Rows that were encoded with the codebook
 * later are in neither.  In each place of the chapter there is at most one such segment,
 * whichever units refer to it.
 *
 * A codebook is made by an index job (builder.h) and lives as long as a segment has its codes:
 * forks inherit it with the segments.  Its centroids never change.  Its cells may be made again
 * by a later job if they went bad; its summaries also by a job that needs a different size.
 *
 * Codes may be of rotated keys (kernels/rotation.h).  The chapters of a unit share the rotation
 * that was made for the first of them, because a query reads a chapter's codebook and its
 * rotation: of one for each chapter, twice as many bytes.
 *
 * A codebook may keep the mean of its keys, too: then copies of the keys in 4 bits, less the mean,
 * lie behind the codes of each segment, in the same column: they are made, verified, lost and
 * made again with the codes.
 *
 * Cells and summaries with a wrong checksum are counted and lost: they are not used any more,
 * until new ones have been made (kvs_index_repair()).
 *
 * Invariants, which kvs_codebooks_check() asserts of each:
 *   (1) Somebody refers to it, and its serial is one that was given.
 *   (2) Its centroids, cells and summaries are elements of the arena in use.
 *   (3) Cells are of whole blocks, one at least; without any, none are counted.
 *   (4) Summaries are there or lost, not both.
 * and of all together:
 *   (5) Their summaries are of as many rows, and bytes, as are counted.
 *   (6) A rotation has a ref of each that uses it, and of nobody else.
 *
 * Threads: the data thread.  Memory: records from the system, as they are used; centroids from
 * the arena.
 */
#ifndef KV_KVSERVER_STORE_INDEX_CODEBOOK_H
#define KV_KVSERVER_STORE_INDEX_CODEBOOK_H

#include "kernels/exact_scores.h"
#include "kernels/pq_cells.h"
#include "kernels/rotation.h"
#include "kvserver/base/pool.h"
#include "kvserver/store/index/summaries.h"
#include "kvserver/store/rows/segment.h"
#include "proto/kv_status.h"

enum {
    KVS_CODEBOOKS_MAX = 64 << 10, /* on one data thread */
    KVS_CODEBOOK_DIM_MAX = 1024,
    KVS_CODEBOOK_KEYS = 16 << 10, /* elements of keys converted at a time */
};

/* What codes are, and how rows are scored by them (scorer.h, scorers.c). */
enum kvs_scorer {
    KVS_SCORER_PQ,
    KVS_N_SCORERS,
};
struct kvs_scorer_ops;

struct kvs_rotation {
    uint32_t refs; /* codebooks that use it */
    uint32_t d;
    struct kvs_column matrix;
};

/* How to make codes. */
struct kvs_index_plan {
    enum kvs_scorer scorer;
    uint32_t chapter_blocks; /* 0: one codebook for all rows, and open (codebook.h) */
    struct kv_pq_shape shape;
    bool rotates; /* codes are of rotated keys; d is at most KV_ROTATION_DIM_MAX */
    bool copies;  /* beside their codes, keys are kept in 4 bits (kernels/key_copies.h) */
    enum kv_key_type type;
    uint32_t d_v;            /* elements of a value */
    uint32_t summaries_bits; /* KV_SUMMARY_16, KV_SUMMARY_64; 0: no summaries */
    uint32_t summaries_rows; /* of a group of them */
    uint32_t iterations;     /* maximum, of k-means */
    uint64_t budget_us;      /* of thread time for k-means; 0: no limit */
    uint64_t seed;
};

struct kvs_codebook {
    const struct kvs_scorer_ops *scorer;
    uint64_t serial; /* counts up with every codebook of the thread */
    uint32_t refs;   /* segments that have its codes, and the job that makes it */
    bool open;       /* a query encodes rows after its segments when it first reads them */
    bool is_broken;  /* its centroids are bad, or it replaced bad ones only in part: its codes,
                      * cells and summaries are not used */
    uint16_t pass;   /* the scrubber's last pass here (scrub.h) */
    uint16_t count_pass; /* the last to count n_seen */
    uint32_t n_seen; /* most full segments of its chapter in any unit, by that pass so far */
    uint32_t n_most; /* the same, by the pass before that */
    struct kv_pq_shape shape;
    struct kvs_rotation *rotation; /* NULL: none; of a job that trains: none yet */
    struct kvs_column learnt;      /* what the scorer has learnt: codebook_bytes() (scorer.h);
                                    * with copies, then the keys' mean (d) */
    int tile_class;                /* of codes, and copies */
    struct kvs_column lists;       /* (kernels/pq_cells.h) of the first n_celled rows */
    uint32_t n_celled;
    struct kvs_summaries summaries; /* of the first segments' rows, keys and values */
    uint32_t n_holes;               /* segments of its chapter that have lost their codes */
    bool
        is_mixed; /* of a session with blocks of several (unit.h): others may have holes in it */
    uint32_t n_cells_lost;     /* rows whose cells are to be made again */
    uint32_t n_summaries_lost; /* the same of summaries, made again by lost_plan */
    struct kvs_index_plan lost_plan;
    struct kvs_index_plan plan; /* by which it was made */
    uint32_t block_begin;       /* the chapter's first block */
    uint32_t n_blocks; /* of which it has learnt, from that one on; the last may not be full */
    uint32_t iterations; /* of k-means */
    uint64_t train_us;   /* thread time */
};

struct kvs_codebooks {
    struct kvs_segment_store *store; /* of the segments that have codes */
    struct kv_pool *pool, *rotations;
    uint64_t serial;                           /* of the newest codebook */
    uint64_t rows_summarised, summaries_bytes; /* of all codebooks */
};

/* Returns what a plan's summaries are. */
static inline struct kv_summary_shape kvs_plan_summaries(const struct kvs_index_plan *plan)
{
    return (struct kv_summary_shape){.type = plan->type,
                                     .d_k = plan->shape.d,
                                     .d_v = plan->d_v,
                                     .bits = plan->summaries_bits,
                                     .rows = plan->summaries_rows};
}

/* Initializes the codebooks for the segments of that segment store, which must not move. */
bool kvs_codebooks_init(struct kvs_codebooks *books, struct kvs_segment_store *store);
/* Frees the codebooks, when no segment has codes any more. */
void kvs_codebooks_fini(struct kvs_codebooks *books);

/* Looks at each. */
void kvs_codebooks_check(const struct kvs_codebooks *books);

/* One of the plan, with a ref of the caller's; centroids are whatever they are.  KV_NO_MEMORY:
 * no page, or KVS_CODEBOOKS_MAX of them; KV_TOO_LARGE: its centroids do not fit a page. */
kv_status_t kvs_codebook_create(struct kvs_codebooks *books,
                                const struct kvs_index_plan *plan,
                                uint32_t *ret_codebook);
void kvs_codebook_ref(struct kvs_codebooks *books, uint32_t codebook);
void kvs_codebook_unref(struct kvs_codebooks *books, uint32_t codebook);

/* Replaces its lists, of the first n_celled rows; all zeros: it has none.  It owns the new ones.
 */
void kvs_codebook_set_lists(struct kvs_codebooks *books,
                            uint32_t codebook,
                            const struct kvs_column *lists,
                            uint32_t n_celled);

/* Gives a codebook the rotation of another one, or a new one, whose matrix is undefined.  Returns
 * NULL if there is no memory, or too many. */
void kvs_codebook_share_rotation(struct kvs_codebook *book, struct kvs_rotation *rotation);
struct kvs_rotation *kvs_codebook_make_rotation(struct kvs_codebooks *books,
                                                struct kvs_codebook *book);

/* Verifies what was learnt, and the rotation.  Returns false if it is not sound: the codebook
 * is broken now. */
bool kvs_codebook_verify_learnt(struct kvs_codebooks *books, uint32_t codebook);

/* Verifies its cells, if it has any that are not lost.  Returns false if they are lost now.
 * Their memory stays, because a query may be reading it. */
bool kvs_codebook_verify_cells(struct kvs_codebooks *books, uint32_t codebook);

/* Verifies a group of its summaries.  Returns false if it was bad; the codebook has then lost
 * all its summaries. */
bool kvs_codebook_verify_summaries(struct kvs_codebooks *books,
                                   uint32_t codebook,
                                   uint32_t group);

/* Replaces the codebook's summaries.  It owns the new ones. */
void kvs_codebook_set_summaries(struct kvs_codebooks *books,
                                uint32_t codebook,
                                const struct kvs_summaries *summaries);

/* Allocates lists of the first *n_rows rows, or of fewer if a page holds no more; their head is
 * 0.  Returns false if there are too many cells, too few rows for cells to pay, or no memory. */
bool kvs_codebook_alloc_lists(struct kvs_codebooks *books,
                              const struct kvs_codebook *book,
                              uint32_t *n_rows,
                              struct kvs_column *ret_lists);

/* Return whether n_rows rows from the chapter's first on are enough to make lost cells or
 * summaries again: all that had them, or as many of those as any unit still has. */
bool kvs_codebook_can_mend_cells(const struct kvs_codebook *book, uint32_t n_rows);
bool kvs_codebook_can_mend_summaries(const struct kvs_codebook *book, uint32_t n_rows);

/* Return what was learnt, the rotation's matrix, and the lists; NULL: there are none. */
static inline float *kvs_codebook_centroids(const struct kvs_codebook *book)
{
    return book->learnt.bytes;
}

/* Returns the mean of the keys, of a codebook with copies. */
static inline float *kvs_codebook_mean(const struct kvs_codebook *book)
{
    return (float *)(void *)((uint8_t *)book->learnt.bytes + book->learnt.n_bytes) -
           book->shape.d;
}

static inline const float *kvs_codebook_rotation(const struct kvs_codebook *book)
{
    return book->rotation != NULL ? book->rotation->matrix.bytes : NULL;
}

static inline uint32_t *kvs_codebook_lists(const struct kvs_codebook *book)
{
    return book->lists.bytes;
}

static inline struct kv_cells kvs_codebook_cells(const struct kvs_codebook *book)
{
    return kv_cells_at(&book->shape, kvs_codebook_lists(book), book->n_celled);
}

static inline struct kvs_codebook *kvs_codebook_at(const struct kvs_codebooks *books,
                                                   uint32_t codebook)
{
    return kv_pool_at(books->pool, codebook);
}

#endif
