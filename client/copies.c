#include "client/copies.h"

#include <stdlib.h>
#include <string.h>

bool kvc_copies_want(struct kvc_copies *copies,
                     void (*step)(struct kv_client *client),
                     const struct kv_model_info *model,
                     uint64_t from_root,
                     uint64_t to_root,
                     const struct kv_id128 *names,
                     uint32_t n_names,
                     uint64_t at_us)
{
    const struct kv_id128 *last = &names[n_names - 1];
    struct kvc_copy *copy;

    for (copy = copies->first; copy != NULL; copy = copy->next)
        if (copy->to_root == to_root && copy->n_names >= n_names &&
            memcmp(&copy->names[n_names - 1], last, sizeof(*last)) == 0)
            return false;
    if (copies->n == KVC_COPIES_WANTED)
        return false;
    copy = calloc(1, sizeof(*copy) + n_names * sizeof(names[0]));
    if (copy == NULL)
        return false;
    copy->model = *model;
    copy->from_root = from_root;
    copy->to_root = to_root;
    copy->at_us = at_us;
    copy->n_names = n_names;
    memcpy(copy->names, names, n_names * sizeof(names[0]));
    if (copies->first == NULL)
        copies->first = copy;
    else
        copies->last->next = copy;
    copies->last = copy;
    copies->n++;
    copies->step = step;
    return true;
}

void kvc_copies_drop(struct kvc_copies *copies)
{
    struct kvc_copy *copy = copies->first;

    copies->first = copy->next;
    if (copies->first == NULL)
        copies->last = NULL;
    copies->n--;
    free(copy);
}

void kvc_copies_fini(struct kvc_copies *copies)
{
    while (copies->first != NULL) {
        kv_op_free(copies->first->op);
        copies->first->op = NULL;
        kvc_copies_drop(copies);
    }
}
