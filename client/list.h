/* list.h - intrusive doubly linked lists.
 *
 * A head and a link are the same struct.  A link that is in no list points to itself, so
 * removing it twice is safe.
 */
#ifndef KV_CLIENT_LIST_H
#define KV_CLIENT_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct kvc_list {
    struct kvc_list *next, *previous;
};

/* The struct that contains the link. */
#define KVC_LIST_ENTRY(link, type, member) ((type *)((char *)(link)-offsetof(type, member)))

/* Iterates over a list.  The body may remove the current entry, but not the next one. */
#define KVC_LIST_EACH(link, follow, head)                                  \
    for ((link) = (head)->next, (follow) = (link)->next; (link) != (head); \
         (link) = (follow), (follow) = (link)->next)

static inline void kvc_list_init(struct kvc_list *link)
{
    link->next = link->previous = link;
}

static inline bool kvc_list_empty(const struct kvc_list *head)
{
    return head->next == head;
}

static inline void kvc_list_append(struct kvc_list *head, struct kvc_list *link)
{
    link->previous = head->previous;
    link->next = head;
    head->previous->next = link;
    head->previous = link;
}

static inline void kvc_list_remove(struct kvc_list *link)
{
    link->previous->next = link->next;
    link->next->previous = link->previous;
    kvc_list_init(link);
}

#endif
