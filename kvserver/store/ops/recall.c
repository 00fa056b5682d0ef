#include "kvserver/store/ops/recall.h"

#include "kvserver/base/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    CANDIDATES_MAX = 1 << 18, /* times (query vectors + 3): a longer one is not looked at */
    FLOATS = 8 << 20,
};

/* The weight of one look in the average. */
static const float NEW_SHARE = 0.125f;

struct kv_recall {
    struct kv_data *data;
    bool busy;
    uint32_t part, serial, generation;
    uint32_t layer, kv_head;
    struct kv_scan scan;
    struct kv_choice choice;
    uint32_t k[KV_QUERIES_MAX]; /* of the choice's groups */
    bool choosing;              /* all is scored */
    struct kv_chooser chooser;
    struct kv_scan_part parts[KV_RANGES_MAX];
    struct kv_wire_range ranges[KV_RANGES_MAX];
    float *queries;    /* (KV_QUERIES_MAX, KV_CODEBOOK_DIM_MAX) */
    uint32_t *tokens;  /* (n_tokens) */
    uint32_t n_tokens; /* the answer */
    float *floats;     /* FLOATS, from the system as they are used */
};

struct kv_recall *kv_recall_create(struct kv_data *data)
{
    struct kv_recall *recall = calloc(1, sizeof(*recall));

    if (recall == NULL)
        return NULL;
    recall->data = data;
    recall->queries = calloc((size_t)KV_QUERIES_MAX * KV_CODEBOOK_DIM_MAX, sizeof(float));
    recall->tokens = calloc((size_t)KV_QUERIES_MAX * KV_SELECTED_MAX, sizeof(uint32_t));
    recall->floats = kv_memory_reserve(FLOATS * sizeof(float));
    if (recall->queries == NULL || recall->tokens == NULL || recall->floats == NULL) {
        kv_recall_destroy(recall);
        return NULL;
    }
    return recall;
}

void kv_recall_destroy(struct kv_recall *recall)
{
    if (recall == NULL)
        return;
    kv_memory_release(recall->floats, FLOATS * sizeof(float));
    free(recall->tokens);
    free(recall->queries);
    free(recall);
}

void kv_recall_note(struct kv_recall *recall,
                    const struct kv_part *part,
                    const struct kv_scan *scan,
                    const struct kv_choice *choice,
                    const uint32_t *tokens,
                    uint32_t n_tokens)
{
    struct kv_unit *unit = scan->unit;

    /* Due from then on, until it has been looked at. */
    if (++unit->n_queries < KV_RECALL_EVERY || recall->busy || n_tokens == 0 ||
        (size_t)scan->n * (scan->n_queries + KV_SCAN_SPARE) + KV_SELECT_SPARE > FLOATS ||
        scan->n > CANDIDATES_MAX)
        return;
    unit->n_queries = 0;
    recall->busy = true;
    recall->part = part->index;
    recall->serial = part->serial;
    recall->generation = part->generation;
    recall->layer = unit->layer;
    recall->kv_head = unit->kv_head;
    recall->choice = *choice;
    recall->scan = *scan;
    memcpy(recall->ranges, scan->ranges, scan->n_ranges * sizeof(*scan->ranges));
    memcpy(recall->queries, scan->queries,
           (size_t)scan->n_queries * scan->d * sizeof(*scan->queries));
    memcpy(recall->tokens, tokens, n_tokens * sizeof(*tokens));
    recall->n_tokens = n_tokens;
    recall->scan.ranges = recall->ranges;
    recall->scan.queries = recall->queries;
    recall->scan.room = recall->floats;
    recall->scan.room_floats = FLOATS;
    recall->scan.parts = recall->parts;
    recall->scan.by_code = recall->scan.by_cell = false;
    recall->choosing = false;
    if (choice->each != NULL) {
        memcpy(recall->k, choice->each, kv_choice_groups(choice) * sizeof(*recall->k));
        recall->choice.each = recall->k;
    }
    kv_scan_begin(&recall->scan, &recall->data->codebooks);
}

/* Tokens that are in both lists, which ascend. */
static uint32_t n_common(const struct kv_recall *recall, const uint32_t *indices, uint32_t n)
{
    struct kv_range_walk walk = {.ranges = recall->ranges};
    uint32_t common = 0, at = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t token = kv_range_walk_to(&walk, indices[i]);

        while (at < recall->n_tokens && recall->tokens[at] < token)
            at++;
        common += at < recall->n_tokens && recall->tokens[at] == token;
    }
    return common;
}

bool kv_recall_step(struct kv_recall *recall)
{
    const struct kv_part *part = &recall->data->parts[recall->part];
    struct kv_scan *scan = &recall->scan;

    if (!recall->busy)
        return false;
    if (!part->used || part->serial != recall->serial ||
        part->generation != recall->generation) {
        recall->busy = false;
        return true;
    }
    /* The part's units may have moved to another place. */
    scan->unit = kv_part_unit(part, recall->layer, recall->kv_head);
    if (!recall->choosing) {
        if (!kv_scan_slice(scan, &recall->data->codebooks, recall->data->clock))
            return true;
        kv_choose_begin(&recall->chooser, &recall->choice, scan->scores, scan->maxima, NULL,
                        NULL, scan->n, false, kvs_scan_spare(scan));
        recall->choosing = true;
    }
    if (!kv_choose_slice(&recall->chooser))
        return true;

    uint32_t *indices =
        (uint32_t *)(void *)(kvs_scan_spare(scan) + (size_t)scan->n_items * KV_CHOOSE_ROOM);
    uint32_t n = kv_choose_rows(&recall->chooser, indices, NULL);
    float share = n > 0 ? (float)n_common(recall, indices, n) / (float)n : 1;
    struct kv_unit *unit = scan->unit;
    unit->recall =
        isnan(unit->recall) ? share : unit->recall + NEW_SHARE * (share - unit->recall);
    kv_count(&recall->data->stats.recall_samples, 1);
    recall->busy = false;
    return true;
}
