/* Tells the node's sink of events (events.h) what comes into the index of prefixes, and what leaves
 * it. */
#include "kvserver/store/control/events.h"

#include "kvserver/store/control/control.h"

void kvs_events_stored(const struct kvs_control *control, const struct kvs_prefix *prefix)
{
    const struct kvs_event_sink *sink = control->config.events;

    if (sink != NULL)
        sink->stored(sink->arg,
                     &(struct kvs_blocks_stored){
                         .names = &prefix->name,
                         .parent = prefix->parent != NULL ? &prefix->parent->name : NULL,
                         .tokens = prefix->tokens,
                         .n = 1,
                         .tenant = prefix->home->place.tenant,
                         .medium = KVS_MEDIUM_CPU});
}

void kvs_events_removed(const struct kvs_control *control, const struct kvs_prefix *prefix)
{
    const struct kvs_event_sink *sink = control->config.events;

    if (sink != NULL)
        sink->removed(sink->arg,
                      &(struct kvs_blocks_removed){.names = &prefix->name,
                                                   .n = 1,
                                                   .tenant = prefix->home->place.tenant,
                                                   .medium = KVS_MEDIUM_CPU});
}
