#include "choose.h"

#include "select.h"

#include <math.h>
#include <string.h>

static bool is_merged(const struct kv_choice *choice)
{
    return choice->merge == KV_MERGE_SUM || choice->merge == KV_MERGE_MAX;
}

uint32_t kv_choice_max(const struct kv_choice *choice, uint32_t n)
{
    uint64_t max = is_merged(choice) ? choice->k : (uint64_t)choice->k * choice->n_queries;

    return max < n ? (uint32_t)max : n;
}

static void weigh(const struct kv_choice *choice,
                  const float *scores,
                  uint32_t n,
                  float *ret_weights,
                  float *spare)
{
    memset(ret_weights, 0, n * sizeof(*ret_weights));
    for (uint32_t q = 0; q < choice->n_queries; q++) {
        const float *own = scores + (size_t)q * n;
        float max = kv_scores_max(own, n);
        double sum = kv_scores_exp_sum(own, n, choice->scale, max);
        float lse = sum > 0 ? (float)((double)choice->scale * max + log(sum)) : -INFINITY;

        if (choice->merge == KV_MERGE_SUM) {
            kv_merge_softmax(own, n, choice->scale, lse, ret_weights);
        } else {
            memset(spare, 0, n * sizeof(*spare));
            kv_merge_softmax(own, n, choice->scale, lse, spare);
            kv_merge_max(spare, n, ret_weights);
        }
    }
}

/* Each vector's own choice; `marks` (n) collects who chose what. */
static void choose_each(const struct kv_choice *choice,
                        const float *scores,
                        const uint32_t *among,
                        uint32_t n,
                        uint32_t *marks,
                        uint32_t *indices,
                        float *own)
{
    uint32_t scratch[KV_SELECT_SCRATCH];

    memset(marks, 0, n * sizeof(*marks));
    for (uint32_t q = 0; q < choice->n_queries; q++) {
        const float *from = scores + (size_t)q * n;
        uint32_t n_own = 0;

        if (among == NULL) {
            size_t n_chosen = kv_select(from, n, choice->k, indices, scratch);
            for (size_t i = 0; i < n_chosen; i++)
                marks[indices[i]] |= 1u << q;
            continue;
        }
        for (uint32_t i = 0; i < n; i++)
            if (among[i] >> q & 1)
                own[n_own++] = from[i];
        size_t n_chosen = kv_select(own, n_own, choice->k, indices, scratch);
        /* Back from places in `own`: both ascend. */
        for (uint32_t i = 0, at = 0, chosen = 0; chosen < n_chosen; i++) {
            if ((among[i] >> q & 1) == 0)
                continue;
            if (indices[chosen] == at++) {
                marks[i] |= 1u << q;
                chosen++;
            }
        }
    }
}

uint32_t kv_choose(const struct kv_choice *choice,
                   const float *scores,
                   const uint32_t *among,
                   uint32_t n,
                   bool weights,
                   uint32_t *ret_indices,
                   uint32_t *ret_heads,
                   float *ret_weights,
                   float *spare)
{
    uint32_t scratch[KV_SELECT_SCRATCH];
    uint32_t n_chosen = 0;

    if (is_merged(choice)) {
        weigh(choice, scores, n, ret_weights, spare);
        n_chosen = (uint32_t)kv_select(ret_weights, n, choice->k, ret_indices, scratch);
        for (uint32_t i = 0; ret_heads != NULL && i < n_chosen; i++)
            ret_heads[i] = UINT32_MAX;
        return n_chosen;
    }
    uint32_t *marks = (uint32_t *)(void *)spare;
    choose_each(choice, scores, among, n, marks, ret_indices, ret_weights);
    for (uint32_t i = 0; i < n; i++) {
        if (marks[i] == 0)
            continue;
        if (ret_heads != NULL)
            ret_heads[n_chosen] = marks[i];
        ret_indices[n_chosen++] = i;
    }
    if (weights)
        weigh(choice, scores, n, ret_weights, spare);
    return n_chosen;
}
