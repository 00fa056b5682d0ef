/* metrics.h - a node's statistics: sums over all threads.  metrics.c writes them as Prometheus
 * text (kvs_control_metrics()); tables.c puts them into tables.
 *
 * Threads: any; values may be slightly out of date.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_METRICS_H
#define KV_KVSERVER_STORE_CONTROL_METRICS_H

#include "kvserver/store/control/control.h"

#include <stdio.h>

struct kvs_counter {
    const char *name, *help;
    size_t offset; /* in struct kvs_stats */
};

/* (kvs_n_counters) the entries of KVS_COUNTERS. */
extern const struct kvs_counter kvs_counters[];
extern const size_t kvs_n_counters;

/* What the memory that a data thread has is used for, and the sum of it. */
extern const struct kvs_counter kvs_memory_uses[];
extern const size_t kvs_n_memory_uses;

/* Returns the sum over all threads of the number at that offset in struct kvs_stats. */
uint64_t kvs_stats_total(const struct kvs_control *control, size_t offset);

/* Returns the bytes of pages that nobody has. */
uint64_t kvs_memory_free(const struct kvs_control *control);

/* Sums one operation's numbers over all threads. */
void kvs_op_totals(const struct kvs_control *control,
                   unsigned op,
                   uint64_t *ret_count,
                   uint64_t *ret_errors,
                   struct kv_histogram *ret_us);

/* Writes all statistics as Prometheus text. */
void kvs_control_metrics(struct kvs_control *control, FILE *out);

/* Adds up how long blocks took to come back from disk, in microseconds. */
void kvs_load_times(const struct kvs_control *control, struct kv_histogram *ret_us);
/* The same of pieces of objects. */
void kvs_object_load_times(const struct kvs_control *control, struct kv_histogram *ret_us);

#endif
