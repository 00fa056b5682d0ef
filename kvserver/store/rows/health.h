/* health.h - what of a data thread's memory was found to be other than what was written there,
 * and what became of it.
 *
 * Everything that decides or enters an answer has a checksum: a row its writer's CRC32C, the
 * rest one that is made when the thing is.  What keeps it together has none: pointers, counts,
 * the records of segments, codebooks and objects.
 *
 * Threads: the data thread.  Memory: of the heap.
 */
#ifndef KV_KVSERVER_STORE_ROWS_HEALTH_H
#define KV_KVSERVER_STORE_ROWS_HEALTH_H

#include <stdint.h>

enum kv_kind {
    KV_KIND_ROWS, /* or their CRCs: the two are not told apart */
    KV_KIND_CODES,
    KV_KIND_CENTROIDS,
    KV_KIND_CELLS,
    KV_KIND_SUMMARIES,
    KV_KIND_OBJECTS, /* pieces of them */
    KV_KINDS,
};

struct kv_health {
    uint64_t found[KV_KINDS];       /* bad, ever */
    uint64_t mended[KV_KINDS];      /* of them: written, or made, again */
    uint64_t rows_bad, objects_bad; /* rows, and pieces of objects, that are refused now */
};

#endif
