#include "client/due.h"

#include <assert.h>

/* Makes one heap of two, of which neither is empty. */
static struct kvc_due *meld(struct kvc_dues *dues, struct kvc_due *a, struct kvc_due *b)
{
    dues->n_looks++;
    if (b->at_us < a->at_us) {
        struct kvc_due *swap = a;

        a = b;
        b = swap;
    }
    b->previous = a;
    b->next = a->child;
    if (a->child != NULL)
        a->child->previous = b;
    a->child = b;
    a->next = a->previous = NULL;
    return a;
}

/* Makes one heap of siblings: in pairs from left to right, and of the pairs from right to left,
 * which is what keeps later calls cheap. */
static struct kvc_due *meld_all(struct kvc_dues *dues, struct kvc_due *siblings)
{
    struct kvc_due *pairs = NULL, *whole = NULL;

    while (siblings != NULL) {
        struct kvc_due *a = siblings, *b = a->next;

        siblings = b != NULL ? b->next : NULL;
        if (b != NULL)
            a = meld(dues, a, b);
        a->next = pairs;
        pairs = a;
    }
    while (pairs != NULL) {
        struct kvc_due *pair = pairs;

        pairs = pair->next;
        pair->next = pair->previous = NULL;
        whole = whole != NULL ? meld(dues, pair, whole) : pair;
    }
    return whole;
}

static void take_out(struct kvc_dues *dues, struct kvc_due *due)
{
    struct kvc_due *rest = meld_all(dues, due->child);

    if (due == dues->first) {
        dues->first = rest;
    } else {
        if (due->previous->child == due)
            due->previous->child = due->next;
        else
            due->previous->next = due->next;
        if (due->next != NULL)
            due->next->previous = due->previous;
        if (rest != NULL)
            dues->first = meld(dues, dues->first, rest);
    }
    kvc_due_init(due);
}

void kvc_due_set(struct kvc_dues *dues, struct kvc_due *due, uint64_t at_us)
{
    if (due->at_us != KVC_NEVER)
        take_out(dues, due);
    if (at_us == KVC_NEVER)
        return;
    due->at_us = at_us;
    dues->first = dues->first != NULL ? meld(dues, dues->first, due) : due;
}

/* Returns the next one of the heap after its parents, or NULL. */
static const struct kvc_due *after(const struct kvc_due *due)
{
    if (due->child != NULL)
        return due->child;
    while (due->next == NULL) {
        while (due->previous != NULL && due->previous->child != due)
            due = due->previous;
        if (due->previous == NULL)
            return NULL;
        due = due->previous;
    }
    return due->next;
}

size_t kvc_dues_check(const struct kvc_dues *dues)
{
    size_t n = 0;

    if (dues->first != NULL)
        assert(dues->first->previous == NULL && dues->first->next == NULL);
    /* Not by recursion: a heap may be as deep as it has members. */
    for (const struct kvc_due *due = dues->first; due != NULL; due = after(due)) {
        assert(due->at_us != KVC_NEVER && (due->child == NULL || due->child->previous == due));
        assert(due->next == NULL || due->next->previous == due);
        for (const struct kvc_due *child = due->child; child != NULL; child = child->next)
            assert(child->at_us >= due->at_us);
        n++;
    }
    return n;
}
