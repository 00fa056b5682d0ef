#include "kvserver/store/rows/expiry.h"

#include <assert.h>
#include <stdbool.h>

/* Returns the link to the node of that number, and its parent.  The root is number 1, and the
 * children of i are 2i and 2i + 1: the bits of a number below its highest are the way to it. */
static struct kvs_expiry **
link_to(struct kvs_expiries *heap, size_t number, struct kvs_expiry **ret_parent)
{
    struct kvs_expiry **link = &heap->first;
    int bit = 0;

    while (number >> (bit + 1) != 0)
        bit++;
    *ret_parent = NULL;
    while (bit-- > 0) {
        *ret_parent = *link;
        link = (number >> bit & 1) != 0 ? &(*link)->right : &(*link)->left;
    }
    return link;
}

static struct kvs_expiry **link_of(struct kvs_expiries *heap, const struct kvs_expiry *node)
{
    struct kvs_expiry *parent = node->parent;

    if (parent == NULL)
        return &heap->first;
    return parent->left == node ? &parent->left : &parent->right;
}

static void
set_children(struct kvs_expiry *node, struct kvs_expiry *left, struct kvs_expiry *right)
{
    node->left = left;
    node->right = right;
    if (left != NULL)
        left->parent = node;
    if (right != NULL)
        right->parent = node;
}

/* Exchanges a node and its parent. */
static void raise_node(struct kvs_expiries *heap, struct kvs_expiry *node)
{
    struct kvs_expiry *parent = node->parent;
    struct kvs_expiry *left = node->left, *right = node->right;
    const bool is_left = parent->left == node;

    *link_of(heap, parent) = node;
    node->parent = parent->parent;
    set_children(node, is_left ? parent : parent->left, is_left ? parent->right : parent);
    set_children(parent, left, right);
}

static void sift(struct kvs_expiries *heap, struct kvs_expiry *node)
{
    while (node->parent != NULL && node->at_us < node->parent->at_us)
        raise_node(heap, node);
    for (;;) {
        struct kvs_expiry *least = node->left;

        if (node->right != NULL && node->right->at_us < least->at_us)
            least = node->right;
        if (least == NULL || least->at_us >= node->at_us)
            return;
        raise_node(heap, least);
    }
}

void kvs_expiry_add(struct kvs_expiries *heap, struct kvs_expiry *node, uint64_t at_us)
{
    struct kvs_expiry *parent;
    struct kvs_expiry **link = link_to(heap, ++heap->n, &parent);

    *node = (struct kvs_expiry){.at_us = at_us, .parent = parent};
    *link = node;
    sift(heap, node);
}

void kvs_expiry_remove(struct kvs_expiries *heap, struct kvs_expiry *node)
{
    struct kvs_expiry *parent, *last;
    struct kvs_expiry **link = link_to(heap, heap->n--, &parent);

    /* The last node takes the place that becomes free. */
    last = *link;
    *link = NULL;
    if (last != node) {
        *link_of(heap, node) = last;
        last->parent = node->parent;
        set_children(last, node->left, node->right);
        sift(heap, last);
    }
    *node = (struct kvs_expiry){0};
}

void kvs_expiries_check(const struct kvs_expiries *heap)
{
    for (size_t i = 1; i <= heap->n; i++) {
        struct kvs_expiry *parent;
        const struct kvs_expiry *node = *link_to((struct kvs_expiries *)heap, i, &parent);

        assert(node != NULL && node->parent == parent);
        assert(parent == NULL || parent->at_us <= node->at_us);
        assert((node->left != NULL) == (2 * i <= heap->n));
        assert((node->right != NULL) == (2 * i + 1 <= heap->n));
    }
    assert(heap->n > 0 || heap->first == NULL);
}
