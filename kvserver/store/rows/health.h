/* health.h - counts of data in memory that no longer has its checksum, and of its repair.
 *
 * Everything that affects a reply has a checksum: rows have the CRC32C of their writer, other
 * data has one that the node computed when it made the data.  The structures that hold it
 * together have none: pointers, counts, the records of segments, codebooks and objects.
 *
 * Threads: the data thread.  Memory: part of the segment store.
 */
#ifndef KV_KVSERVER_STORE_ROWS_HEALTH_H
#define KV_KVSERVER_STORE_ROWS_HEALTH_H

#include <stdint.h>

enum kvs_kind {
    KVS_KIND_ROWS, /* rows or their CRCs, which cannot be told apart */
    KVS_KIND_CODES,
    KVS_KIND_CENTROIDS,
    KVS_KIND_CELLS,
    KVS_KIND_SUMMARIES,
    KVS_KIND_OBJECTS, /* pieces of objects */
    KVS_KINDS,
};

struct kvs_health {
    uint64_t found[KVS_KINDS];  /* found bad, since the start */
    uint64_t mended[KVS_KINDS]; /* of these, and of another version: written or made again */
    uint64_t rows_bad, objects_bad; /* rows, and pieces of objects, that are rejected now */
};

#endif
