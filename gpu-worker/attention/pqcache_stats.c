/* The statistics of pqcache: rows, bytes, and the work that nodes report. */
#include "gpu-worker/attention/pqcache_private.h"

#include <math.h>

void kvw_pqcache_count_found(struct kvw_pqcache *pq,
                             const struct kvw_budget *budget,
                             const struct kv_query_result *found)
{
    pq->node_stats.rows_to_choose_from += budget->window_begin - budget->sinks;
    pq->node_stats.rows_scored_by_code += found->n_scored_by_code;
    pq->node_stats.rows_scored_by_key += found->n_scored_by_key;
    pq->node_stats.rows_reranked += found->n_reranked;
    pq->node_stats.rows_estimated += found->n_estimated;
    pq->node_stats.rows_selected += found->n_selected;
    pq->node_stats.rows_sent += found->n_rows;
    pq->rows_attended += found->n_selected;
    pq->bytes_fetched += found->n_rows * pq->row_bytes;
    if (found->outputs != NULL)
        pq->bytes_fetched +=
            (size_t)kvw_pqcache_group_of(pq) * (pq->d + 1) * sizeof(found->outputs[0]);
    if (!isnan(found->recall)) {
        pq->node_stats.recall_sum += (double)found->recall;
        pq->node_stats.recall_count++;
    }
}

void kvw_pqcache_count_reads(struct kvw_pqcache *pq, const struct kv_op *op)
{
    struct kv_query_reads *sum = &pq->node_stats.nodes_read, reads;

    kv_op_query_reads(op, &reads);
    sum->books += reads.books;
    sum->codes += reads.codes;
    sum->copies += reads.copies;
    sum->keys += reads.keys;
    sum->rows += reads.rows;
    sum->summaries += reads.summaries;
}

/* The time that nodes worked on a query.  Heads answered by one message report that message's
 * times, so each message is counted once. */
uint64_t kvw_pqcache_worked_us(const struct kv_query_result *found, uint32_t n_heads)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < n_heads; i++) {
        bool is_told = false;

        for (uint32_t j = 0; j < i; j++)
            is_told = is_told || (found[j].node == found[i].node &&
                                  found[j].service_us == found[i].service_us &&
                                  found[j].queue_us == found[i].queue_us);
        sum += is_told ? 0 : found[i].service_us;
    }
    return sum;
}

void kvw_pqcache_count_wait(struct kvw_pqcache *pq,
                            uint32_t layer,
                            const struct kv_op_times *times,
                            uint64_t queue_us,
                            uint64_t wait_us)
{
    const double whole_us =
        times->ended_us > times->begun_us ? (double)(times->ended_us - times->begun_us) : 1;
    const double node = fmin((double)times->node_us / whole_us, 1);
    const double queue = fmin((double)queue_us / whole_us, node);
    const double wait_s = (double)wait_us / 1e6;

    pq->waits.queue_s += wait_s * queue;
    pq->waits.node_s += wait_s * (node - queue);
    pq->waits.wire_s += wait_s * (1 - node);
    pq->layer_wait_s[layer] += wait_s;
}

void kvw_pqcache_stats(const struct kvw_method *attention, struct kvw_method_stats *stats)
{
    const struct kvw_pqcache *pq = (const struct kvw_pqcache *)attention;
    const struct kvw_method_stats counted = *stats;
    struct kvw_index_stats index;

    kvw_index_schedule_stats(pq->index, &index);
    *stats = pq->node_stats;
    stats->bytes_put = counted.bytes_put;
    stats->bytes_read = counted.bytes_read;
    stats->bytes_fetched = pq->bytes_fetched;
    if (pq->cached != NULL)
        stats->bytes_fetched += kvw_block_cache_bytes_fetched(pq->cached);
    stats->rows_attended = pq->rows_attended;
    stats->rows_possible = pq->rows_possible;
    stats->step_rows_attended = pq->rows_attended - pq->prompt_rows_attended;
    stats->step_rows_possible = pq->rows_possible - pq->prompt_rows_attended;
    stats->rows_recalled = (uint64_t)(pq->node_stats.recall_sum * 1000);
    stats->rows_to_recall = pq->node_stats.recall_count * 1000;
    stats->index_wait_s = index.wait_s;
    stats->codebooks_trained = index.codebooks_trained;
    stats->codebooks_found = index.codebooks_found;
    stats->waits = pq->waits;
    stats->waits.index_s = index.wait_s;
    stats->waits.rows_s = (double)pq->rows_wait_us / 1e6 + counted.waits.rows_s;
    stats->layer_wait_s = pq->layer_wait_s;
}
