#include "kvserver/store/index/learnt.h"

#include "kvserver/store/rows/residency.h"

#include <string.h>

enum {
    ROWS_FOR_BYTES = 8, /* what is learnt takes at most this part of its rows' bytes */
};

struct head {
    uint32_t format; /* of the column */
    uint32_t block_begin, n_blocks;
    uint32_t scorer, d, m, bits;
    uint32_t rotates, copies, type;
    uint32_t most_iterations; /* of the plan */
    uint32_t iterations;      /* that it took */
    uint64_t seed;
    uint32_t rotation_bytes, learnt_bytes;
};
static_assert(sizeof(struct head) == 64, "no holes");

static struct head head_of(const struct kvs_codebook *book)
{
    const struct kvs_index_plan *plan = &book->plan;

    return (struct head){
        .format = kvs_column_version(KVS_COLUMN_CODEBOOK),
        .block_begin = book->block_begin,
        .n_blocks = book->n_blocks,
        .scorer = plan->scorer,
        .d = plan->shape.d,
        .m = plan->shape.m,
        .bits = plan->shape.bits,
        .rotates = plan->rotates,
        .copies = plan->copies,
        .type = plan->type,
        .most_iterations = plan->iterations,
        .iterations = book->iterations,
        .seed = plan->seed,
        .rotation_bytes =
            plan->rotates ? (uint32_t)(kv_rotation_size(plan->shape.d) * sizeof(float)) : 0,
        .learnt_bytes = book->learnt.n_bytes,
    };
}

static size_t bytes_of(const struct head *head)
{
    return sizeof(*head) + head->rotation_bytes + head->learnt_bytes;
}

/* Whether the bytes are few, compared with the rows. */
static bool is_worth_it(const struct kvs_codebook *book)
{
    const struct kvs_index_plan *plan = &book->plan;
    const struct head head = head_of(book);
    const uint64_t row_bytes = ((uint64_t)plan->shape.d + plan->d_v) *
                               (plan->type == KV_KEY_FP32 ? sizeof(float) : sizeof(uint16_t));

    return bytes_of(&head) <= book->n_blocks * row_bytes * KV_BLOCK_TOKENS / ROWS_FOR_BYTES;
}

bool kvs_learnt_is_kept(const struct kvs_codebook *book)
{
    return !book->is_broken && (book->rotation != NULL) == book->plan.rotates &&
           is_worth_it(book);
}

size_t kvs_learnt_give(const struct kvs_codebooks *books,
                       const struct kvs_block *block,
                       uint32_t at,
                       uint32_t number,
                       void *ret_bytes)
{
    const struct kvs_codes *codes = kvs_block_codes(block, at);
    const struct kvs_codebook *book;
    struct head head;
    uint8_t *to = ret_bytes;

    if (codes->column.bytes == NULL || !codes->in_chapter)
        return 0;
    book = kvs_codebook_at(books, codes->codebook);
    if (book->block_begin + book->n_blocks != number + 1 || !kvs_learnt_is_kept(book))
        return 0;
    head = head_of(book);
    if (to == NULL)
        return bytes_of(&head);
    /* Bad bytes would become good ones with a new checksum. */
    if (!kvs_column_is_sound(&book->learnt) ||
        (book->rotation != NULL && !kvs_column_is_sound(&book->rotation->matrix)))
        return 0;
    memcpy(to, &head, sizeof(head));
    to += sizeof(head);
    if (head.rotation_bytes > 0)
        memcpy(to, kvs_codebook_rotation(book), head.rotation_bytes);
    memcpy(to + head.rotation_bytes, book->learnt.bytes, head.learnt_bytes);
    return bytes_of(&head);
}

static bool has_tier(const struct kvs_codebooks *books)
{
    return books->store->tier != NULL && books->store->tier->recall_learnt != NULL;
}

void kvs_learnt_keep(const struct kvs_codebooks *books,
                     const struct kvs_block *last,
                     uint32_t at)
{
    if (has_tier(books))
        books->store->tier->keep_learnt(books->store->tier_arg, last, at);
}

/* Gives the codebook the rotation whose matrix this is. */
static bool set_rotation(struct kvs_codebooks *books,
                         struct kvs_codebook *book,
                         struct kvs_rotation *before,
                         const void *matrix,
                         uint32_t n_bytes)
{
    struct kvs_rotation *rotation;

    if (before != NULL && memcmp(before->matrix.bytes, matrix, n_bytes) == 0) {
        kvs_codebook_share_rotation(book, before);
        return true;
    }
    rotation = kvs_codebook_make_rotation(books, book);
    if (rotation == NULL)
        return false;
    memcpy(rotation->matrix.bytes, matrix, n_bytes);
    kvs_column_seal(&rotation->matrix);
    return true;
}

/* Whether the bytes are of the rows and the plan of the codebook. */
static bool are_for(const struct head *head, const struct head *wanted)
{
    struct head same = *wanted;

    /* How much work it was is nobody's business, as for codes that are in memory. */
    same.most_iterations = head->most_iterations;
    same.iterations = head->iterations;
    return memcmp(head, &same, sizeof(same)) == 0;
}

kv_status_t kvs_learnt_recall(struct kvs_codebooks *books,
                              uint32_t codebook,
                              const struct kvs_block *last,
                              uint32_t at,
                              struct kvs_rotation *rotation)
{
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);
    const struct kvs_segment_store *store = books->store;
    const struct head wanted = head_of(book);
    struct head head;
    const uint8_t *bytes;
    const void *value;
    kv_status_t status;

    if (!has_tier(books) || !is_worth_it(book))
        return KV_NOT_FOUND;
    status = store->tier->recall_learnt(store->tier_arg, last, at, bytes_of(&wanted), &value);
    if (status != KV_OK)
        return status;
    memcpy(&head, value, sizeof(head));
    bytes = (const uint8_t *)value + sizeof(head);
    if (!are_for(&head, &wanted))
        status = KV_NOT_FOUND;
    else if (head.rotation_bytes > 0 &&
             !set_rotation(books, book, rotation, bytes, head.rotation_bytes))
        return KV_NO_MEMORY;
    if (status == KV_OK) {
        memcpy(book->learnt.bytes, bytes + head.rotation_bytes, head.learnt_bytes);
        kvs_column_seal(&book->learnt);
        book->iterations = head.iterations;
    }
    kvs_recall_end(books);
    return status;
}

void kvs_recall_end(const struct kvs_codebooks *books)
{
    if (has_tier(books))
        books->store->tier->end_recall(books->store->tier_arg);
}
