/* health.h - what of a data thread's memory was found to be other than what was written there,
 * and what became of it.
 *
 * Everything that decides or enters an answer has a checksum: a row its writer's CRC32C, the
 * rest one that is made when the thing is.  What keeps it together has none: pointers, counts,
 * the records of segments, codebooks and objects.
 *
 * Threads: the data thread.  Memory: of the segment store.
 */
#ifndef KV_KVSERVER_STORE_ROWS_HEALTH_H
#define KV_KVSERVER_STORE_ROWS_HEALTH_H

#include <stdint.h>

enum kvs_kind {
    KVS_KIND_ROWS, /* or their CRCs: the two are not told apart */
    KVS_KIND_CODES,
    KVS_KIND_CENTROIDS,
    KVS_KIND_CELLS,
    KVS_KIND_SUMMARIES,
    KVS_KIND_OBJECTS, /* pieces of them */
    KVS_KINDS,
};

struct kvs_health {
    uint64_t found[KVS_KINDS];      /* bad, ever */
    uint64_t mended[KVS_KINDS];     /* of them: written, or made, again */
    uint64_t rows_bad, objects_bad; /* rows, and pieces of objects, that are refused now */
};

#endif
