/* scrub.h - the scrubber: verifies everything in a data thread's memory that has a checksum,
 * again and again, in the background.
 *
 *   a pass   the segments of every session's units (rows and codes, and with the first
 *            segment of each codebook its centroids, cells and summaries), then the objects
 *   found    bad rows and objects are marked, counted, and rejected until they are written
 *            again; other bad data is not used any more, and is made again from good rows
 *
 * Data written after a pass began may be left to the next pass.  Segments that units share are
 * verified once per pass.
 *
 * The scrubber runs in every other background turn (background.h), in slices of about 20 us (a
 * segment of the largest rows takes 150 us), and verifies at most the configured number of
 * bytes per second; any number while somebody waits for it (shard->scrub_wanted_us).  No request
 * does any of its work.
 *
 * Threads: the data thread; its statistics have the progress.  Memory: create/destroy.
 */
#ifndef KV_KVSERVER_STORE_OPS_SCRUB_H
#define KV_KVSERVER_STORE_OPS_SCRUB_H

#include "kvserver/store/shard/shard.h"

struct kvs_scrub;

/* Creates a scrubber; with bytes_per_s 0 it never runs.  Returns NULL if out of memory. */
struct kvs_scrub *kvs_scrub_create(struct kvs_shard *shard, uint64_t bytes_per_s);
void kvs_scrub_destroy(struct kvs_scrub *scrub); /* NULL is allowed */

/* Runs a slice.  Returns false if none is due. */
bool kvs_scrub_step(struct kvs_scrub *scrub);

struct kvs_scrub_progress {
    enum kvs_scrub_phase phase;
    uint32_t session;      /* KVS_SCRUB_ROWS: the session being checked */
    uint64_t bytes;        /* checked since the start */
    uint64_t since_us;     /* the last complete pass began then */
    uint64_t pass_bytes;   /* of this pass */
    uint64_t n_passes;     /* completed */
    uint64_t last_pass_us; /* duration of the last pass */
    uint64_t last_pass_bytes;
    uint64_t pass_blocks, last_pass_blocks; /* those that several sessions have once */
};
void kvs_scrub_get_progress(const struct kvs_scrub *scrub,
                            struct kvs_scrub_progress *ret_progress);

#endif
