/* scrub.h - goes through everything in a data thread's memory that has a checksum, again and
 * again, in the background.
 *
 *   a pass   the segments of every session's units: rows and codes, and with the first
 *            segment of each codebook its centroids, cells and summaries; then the objects
 *   found    rows and objects are marked, counted, and refused until they are written again;
 *            the others are not used any more, and made again from good rows
 *
 * What came after a pass began may be left to the next one.  Segments that units share are
 * verified once a pass.
 *
 * It works in slices of some 20 us (a segment of the largest rows takes 150), when nothing else
 * waits or after every 16 slices of requests, and checks no more bytes a second than allowed.
 * No request does any of its work.
 *
 * Threads: the data thread; progress is told by its stats.  Memory: create/destroy.
 */
#ifndef KV_KVSERVER_STORE_OPS_SCRUB_H
#define KV_KVSERVER_STORE_OPS_SCRUB_H

#include "kvserver/store/shard/shard.h"

struct kvs_scrub;

/* bytes_per_s 0: never.  NULL: out of memory. */
struct kvs_scrub *kvs_scrub_create(struct kvs_shard *shard, uint64_t bytes_per_s);
void kvs_scrub_destroy(struct kvs_scrub *scrub); /* NULL is allowed */

/* A slice, if one is due; false: none is. */
bool kvs_scrub_step(struct kvs_scrub *scrub);

struct kvs_scrub_progress {
    enum kvs_scrub_phase phase;
    uint32_t session;      /* KVS_SCRUB_ROWS: at it */
    uint64_t bytes;        /* checked, ever */
    uint64_t pass_bytes;   /* of this pass */
    uint64_t n_passes;     /* done */
    uint64_t last_pass_us; /* how long the last one took */
    uint64_t last_pass_bytes;
};
void kvs_scrub_progress(const struct kvs_scrub *scrub, struct kvs_scrub_progress *ret_progress);

#endif
