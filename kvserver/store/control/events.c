/* Tells the node's sink of events (events.h) what comes into the index of prefixes, and what leaves
 * it. */
#include "kvserver/store/control/events.h"

#include "kvserver/store/control/control.h"

#include <stdlib.h>

static enum kvs_medium medium_of(const struct kvs_prefix *prefix)
{
    return prefix->is_away ? KVS_MEDIUM_DISK : KVS_MEDIUM_CPU;
}

static void tell_stored(const struct kvs_event_sink *sink,
                        const struct kvs_prefix *prefix,
                        enum kvs_medium medium)
{
    sink->stored(sink->arg, &(struct kvs_blocks_stored){
                                .names = &prefix->name,
                                .parent = prefix->parent != NULL ? &prefix->parent->name : NULL,
                                .tokens = prefix->tokens,
                                .n = 1,
                                .tenant = prefix->home->place.tenant,
                                .medium = medium});
}

static void tell_removed(const struct kvs_event_sink *sink,
                         const struct kvs_prefix *prefix,
                         enum kvs_medium medium)
{
    sink->removed(sink->arg, &(struct kvs_blocks_removed){.names = &prefix->name,
                                                          .n = 1,
                                                          .tenant = prefix->home->place.tenant,
                                                          .medium = medium});
}

void kvs_events_stored(const struct kvs_control *control, const struct kvs_prefix *prefix)
{
    if (control->config.events != NULL)
        tell_stored(control->config.events, prefix, medium_of(prefix));
}

void kvs_events_removed(const struct kvs_control *control, const struct kvs_prefix *prefix)
{
    if (control->config.events != NULL)
        tell_removed(control->config.events, prefix, medium_of(prefix));
}

void kvs_events_moved(const struct kvs_control *control,
                      const struct kvs_prefix *prefix,
                      enum kvs_medium from,
                      enum kvs_medium to)
{
    if (control->config.events == NULL)
        return;
    tell_stored(control->config.events, prefix, to);
    tell_removed(control->config.events, prefix, from);
}

void kvs_events_back(const struct kvs_control *control, const struct kvs_prefix *prefix)
{
    const struct kvs_prefix **path;
    uint32_t n = 0;

    if (control->config.events == NULL || !prefix->is_away)
        return;
    path = malloc((prefix->depth + 1) * sizeof(path[0]));
    /* Without memory readers think that it is on disk: an error that costs them time. */
    if (path == NULL)
        return;
    for (; prefix != NULL && prefix->is_away; prefix = prefix->parent)
        path[n++] = prefix;
    /* Parents first. */
    while (n > 0)
        kvs_events_moved(control, path[--n], KVS_MEDIUM_DISK, KVS_MEDIUM_CPU);
    free(path);
}
