/* metrics.h - what a node has counted: the numbers of all threads together.  metrics.c writes
 * them as Prometheus text (kvs_control_metrics()), tables.c puts them into tables.
 *
 * Threads: any; numbers may be a little old.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_METRICS_H
#define KV_KVSERVER_STORE_CONTROL_METRICS_H

#include "kvserver/store/control/control.h"

#include <stdio.h>

struct kvs_counter {
    const char *name, *help;
    size_t offset; /* in struct kvs_stats */
};

/* (kvs_n_counters) KVS_COUNTERS, one by one. */
extern const struct kvs_counter kvs_counters[];
extern const size_t kvs_n_counters;

/* The number at that offset in the statistics of all threads, added up. */
uint64_t kvs_stats_total(const struct kvs_control *control, size_t offset);

/* All threads' numbers of one operation, in one histogram. */
void kvs_op_totals(const struct kvs_control *control,
                   unsigned op,
                   uint64_t *ret_count,
                   uint64_t *ret_errors,
                   struct kv_histogram *ret_us);

/* Writes all statistics as Prometheus text. */
void kvs_control_metrics(struct kvs_control *control, FILE *out);

#endif
