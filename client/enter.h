/* enter.h - what every public function that touches a client begins with, since a thread of the
 * library's own may be at work on it (kv_client_options.progress_thread).
 *
 *   KVC_ENTER  the call begins, ends or moves something: there may be more to do after it
 *   KVC_LOOK   the call does not
 *
 * Each lasts to the end of the block in which it stands.  They nest; without a thread they do
 * nothing.  tests/tree/enter.py looks for them in every function of kvclient.h.
 *
 * Threads: any.  Memory: none.
 */
#ifndef KV_CLIENT_ENTER_H
#define KV_CLIENT_ENTER_H

#include "client/state.h"
#include "kvserver/base/progress.h"

#define KVC_ENTER(client)                                                 \
    struct kv_progress *kvc_entered __attribute__((cleanup(kvc_leave))) = \
        kvc_enter((client)->progress)

#define KVC_LOOK(client)                                                     \
    struct kv_progress *kvc_looked __attribute__((cleanup(kvc_look_away))) = \
        kvc_look((client)->progress)

static inline struct kv_progress *kvc_enter(struct kv_progress *progress)
{
    if (progress != NULL)
        kv_progress_enter(progress);
    return progress;
}

static inline void kvc_leave(struct kv_progress *const *progress)
{
    if (*progress != NULL)
        kv_progress_leave(*progress);
}

static inline struct kv_progress *kvc_look(struct kv_progress *progress)
{
    if (progress != NULL)
        kv_progress_look(progress);
    return progress;
}

static inline void kvc_look_away(struct kv_progress *const *progress)
{
    if (*progress != NULL)
        kv_progress_look_away(*progress);
}

#endif
