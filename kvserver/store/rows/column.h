/* column.h - columns: what was made of rows and can be made of them again.
 *
 *   kind        made of                      by                     made again by
 *   codes       a segment's keys             a codebook (encode.h)  kvs_segment_recode()
 *   codebook    the keys of a chapter        a scorer (scorer.h)    kvs_index_replace()
 *   (rotation)  keys of the first chapter    kernels/rotation.h     with its codebook, as one
 *   lists       a chapter's codes            a scorer               kvs_index_repair()
 *   summaries   rows of a chapter, a group   kernels/summary.h      kvs_index_repair()
 *
 * Whatever the kind, a column is one piece of the arena, written once, and sealed with a checksum
 * and the version of its kind's format; sessions share it with the blocks that it was made of; it
 * is dropped with these, or if it is bad, or of another version.  The scrub (ops/scrub.h) looks at
 * all of them at its rate and has those made again that are not sound.
 *
 * A new format of a kind is a new version in column.c; a new kind is a row there.
 *
 * Threads: the data thread.  Memory: the arena's.
 */
#ifndef KV_KVSERVER_STORE_ROWS_COLUMN_H
#define KV_KVSERVER_STORE_ROWS_COLUMN_H

#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/health.h"

enum kvs_column_kind {
    KVS_COLUMN_CODES,
    KVS_COLUMN_CODEBOOK,
    KVS_COLUMN_LISTS,
    KVS_COLUMN_SUMMARIES,
    KVS_COLUMN_KINDS,
};

/* All zeros: there is none. */
struct kvs_column {
    void *bytes; /* an element of the arena; NULL: none */
    uint32_t n_bytes;
    uint32_t crc;     /* CRC32C of the bytes, when they were sealed */
    uint8_t kind;     /* enum kvs_column_kind */
    uint8_t version;  /* of the kind's format, when they were sealed */
    uint8_t class_id; /* of the bytes, while they are away */
};

/* Allocates a column from a class that holds n_bytes.  Its bytes are undefined.  Returns false if
 * there is no memory. */
bool kvs_column_create(struct kvs_column *column,
                       struct kvs_arena *arena,
                       enum kvs_column_kind kind,
                       int class_id,
                       uint32_t n_bytes);

/* Frees it; there is none any more.  Allowed if there was none. */
void kvs_column_drop(struct kvs_column *column, struct kvs_arena *arena);

/* Its bytes leave memory, and come back as a copy of others: the rest of it stays meanwhile, and
 * it counts as there.  Nobody may read the bytes until they are back.  They come back unverified,
 * as zeros if `bytes` is NULL; kvs_column_return() returns false if there is no memory. */
void kvs_column_leave(struct kvs_column *column, struct kvs_arena *arena);
bool kvs_column_return(struct kvs_column *column, struct kvs_arena *arena, const void *bytes);
bool kvs_column_is_away(const struct kvs_column *column);

/* Returns the version of the kind's format that this build writes and reads. */
uint8_t kvs_column_version(enum kvs_column_kind kind);

/* Its bytes are final, until they are sealed again. */
void kvs_column_seal(struct kvs_column *column);

/* Returns whether its bytes are those that were sealed, in the format of today. */
bool kvs_column_is_sound(const struct kvs_column *column);

/* The same, for who stops using a column that is not sound: counts it as found bad, unless it is
 * merely of another version. */
bool kvs_column_check(const struct kvs_column *column, struct kvs_health *health);

/* Returns whether it is an element of the arena in use, or none, or away. */
bool kvs_column_is_in_use(const struct kvs_column *column, const struct kvs_arena *arena);

#endif
