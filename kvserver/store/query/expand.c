#include "kvserver/store/query/expand.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLICE_ROWS = 32 << 10,
    AHEAD = 8, /* cells whose lists are fetched meanwhile */
};

struct kv_picker *kv_picker_create(void)
{
    struct kv_picker *picker = calloc(1, sizeof(*picker));

    if (picker == NULL)
        return NULL;
    picker->rows = calloc(KV_PICK_ROWS_MAX + KV_SELECT_SPARE, sizeof(*picker->rows));
    picker->marks = calloc(KV_PICK_ROWS_MAX, sizeof(*picker->marks));
    picker->above = calloc(KV_PICK_ROWS_MAX / 64, sizeof(*picker->above));
    picker->at_bound = calloc(KV_PICK_ROWS_MAX / 64, sizeof(*picker->at_bound));
    if (picker->rows == NULL || picker->marks == NULL || picker->above == NULL ||
        picker->at_bound == NULL) {
        kv_picker_destroy(picker);
        return NULL;
    }
    return picker;
}

void kv_picker_destroy(struct kv_picker *picker)
{
    if (picker == NULL)
        return;
    free(picker->rows);
    free(picker->marks);
    free(picker->above);
    free(picker->at_bound);
    free(picker);
}

void kv_pick_begin(struct kv_picker *picker,
                   const struct kv_scan *scan,
                   struct kv_chooser *chooser,
                   uint32_t *tokens,
                   uint32_t *heads)
{
    picker->scan = scan;
    picker->chooser = chooser;
    picker->tokens = tokens;
    picker->heads = heads;
    picker->n = picker->part = picker->done = 0;
    memset(picker->n_of, 0, sizeof(picker->n_of));
    picker->n_max = kv_choice_max(&chooser->choice, scan->n);
}

/* Rows of the group's chosen cells, counted from the part's first row on. */
static size_t pick_cells(struct kv_picker *picker,
                         const struct kv_codebooks *books,
                         const struct kv_scan_part *part,
                         uint32_t group)
{
    const struct kv_codebook *book = kv_codebook_at(books, part->codebook);
    const uint32_t first = book->block_begin * KV_BLOCK_TOKENS;
    const uint32_t begin = part->token_begin - first, end = part->token_end - first;
    const uint32_t *counts = picker->scan->counts + part->item;
    const float *scores = kv_chooser_scores(picker->chooser, group) + part->item;
    const struct kv_cells cells = kv_codebook_cells(book);
    struct kv_selector *selector = &picker->chooser->groups[group];
    const uint32_t n_cells = part->n_items;
    uint32_t above[KV_CELLS_MAX + KV_SELECT_SPARE], equal[KV_CELLS_MAX + KV_SELECT_SPARE];
    size_t n_above, n_equal;

    kv_selector_items(selector, scores, counts, n_cells, above, &n_above, equal, &n_equal);
    for (size_t i = 0; i < n_above; i++) {
        if (i + AHEAD < n_above)
            __builtin_prefetch(cells.rows + cells.offsets[above[i + AHEAD]]);
        kv_cells_mark(&cells, above[i], begin, end, 0, picker->above);
    }
    for (size_t i = 0; selector->ties > 0 && i < n_equal; i++)
        kv_cells_mark(&cells, equal[i], begin, end, 0, picker->at_bound);
    if (selector->ties > 0 && n_equal > 0) {
        const size_t n_ties =
            kv_bits_take(picker->at_bound, begin / 64 * 64, end, selector->ties, picker->rows);

        selector->ties -= n_ties;
        for (size_t i = 0; i < n_ties; i++)
            picker->above[picker->rows[i] / 64] |= (uint64_t)1 << picker->rows[i] % 64;
    }
    const size_t n =
        kv_bits_take(picker->above, begin / 64 * 64, end, KV_PICK_ROWS_MAX, picker->rows);
    for (size_t i = 0; i < n; i++)
        picker->rows[i] -= begin;
    return n;
}

bool kv_pick_slice(struct kv_picker *picker, const struct kv_codebooks *books)
{
    const struct kv_scan_part *part = &picker->scan->parts[picker->part];
    const bool is_cells = part->codebook != KV_SCAN_ROWS;
    const uint32_t n_groups = kv_choice_groups(&picker->chooser->choice);
    const uint32_t begin = part->token_begin + picker->done;
    uint32_t n_rows = part->token_end - begin;

    if (!is_cells && n_rows > SLICE_ROWS)
        n_rows = SLICE_ROWS;
    assert(n_rows <= KV_PICK_ROWS_MAX);
    if (n_groups > 1)
        memset(picker->marks, 0, n_rows * sizeof(*picker->marks));
    for (uint32_t group = 0; group < n_groups; group++) {
        const size_t n = is_cells
                             ? pick_cells(picker, books, part, group)
                             : kv_selector_collect(&picker->chooser->groups[group],
                                                   kv_chooser_scores(picker->chooser, group) +
                                                       part->item + picker->done,
                                                   NULL, n_rows, 0, picker->rows);

        picker->n_of[group] += (uint32_t)n;
        for (size_t i = 0; n_groups > 1 && i < n; i++)
            picker->marks[picker->rows[i]] |= 1u << group;
        for (size_t i = 0; n_groups == 1 && i < n && picker->n < picker->n_max; i++) {
            picker->heads[picker->n] =
                kv_choice_merges(&picker->chooser->choice) ? UINT32_MAX : 1;
            picker->tokens[picker->n++] = begin + picker->rows[i];
        }
    }
    for (uint32_t i = 0; n_groups > 1 && i < n_rows; i++) {
        if (picker->marks[i] == 0 || picker->n == picker->n_max)
            continue;
        picker->heads[picker->n] = picker->marks[i];
        picker->tokens[picker->n++] = begin + i;
    }
    picker->done += n_rows;
    if (part->token_begin + picker->done == part->token_end) {
        picker->part++;
        picker->done = 0;
    }
    return picker->part == picker->scan->n_parts;
}

bool kv_pick_is_whole(const struct kv_picker *picker)
{
    const struct kv_chooser *chooser = picker->chooser;

    for (uint32_t group = 0; group < kv_choice_groups(&chooser->choice); group++) {
        const uint32_t takes = kv_choice_takes(&chooser->choice, chooser->k[group]);

        if (picker->n_of[group] != (takes < picker->scan->n ? takes : picker->scan->n))
            return false;
    }
    return true;
}

/* The item of a token in such a part, which is its cell's.  While the query waited, the unit
 * may have got a copy of its last segment to write behind what that was filled to, and the copy
 * has no codes, or other ones: those of the key are made again. */
static uint32_t item_of(const struct kv_scan *scan,
                        const struct kv_codebooks *books,
                        const struct kv_scan_part *part,
                        uint32_t token)
{
    const struct kv_codebook *book = kv_codebook_at(books, part->codebook);
    const struct kv_kmeans_book kmeans = kv_codebook_kmeans(book);
    const struct kv_segment *segment = scan->unit->segments[token / KV_BLOCK_TOKENS];
    const uint32_t row = token % KV_BLOCK_TOKENS;
    float key[KV_CODEBOOK_DIM_MAX];
    const struct kv_cells cells = kv_codebook_cells(book);
    uint8_t codes[KV_PQ_SUBSPACES_MAX];
    uint32_t cell = 0;

    if (segment->codes != NULL && segment->codebook == part->codebook &&
        row < segment->n_coded) {
        uint16_t kept;

        kv_tile_cells(&book->shape, segment->codes, row, 1, &kept);
        return kv_cells_item(&cells, kept);
    }
    kv_keys_load(scan->type, kv_unit_row(scan->unit, token), scan->unit->row_bytes, 1,
                 book->shape.d, key);
    kv_kmeans_encode(&book->shape, &kmeans, key, 1, codes, 1);
    for (uint32_t j = 0; j < book->shape.m; j++)
        cell = cell << book->shape.bits | codes[j];
    return kv_cells_item(&cells, cell);
}

void kv_pick_weights(const struct kv_scan *scan,
                     const struct kv_chooser *chooser,
                     const struct kv_codebooks *books,
                     const uint32_t *tokens,
                     uint32_t n,
                     float *ret_weights)
{
    const struct kv_scan_part *part = scan->parts;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t item;

        while (tokens[i] >= part->token_end)
            part++;
        item = part->codebook == KV_SCAN_ROWS ? tokens[i] - part->token_begin
                                              : item_of(scan, books, part, tokens[i]);
        ret_weights[i] = chooser->weights[part->item + item];
    }
}
