/* memory_file.h - memory of this process that peers on the same host read through a file.
 *
 *   file, named by process and descriptor
 *   | head | free | piece | piece |        free        |
 *     |             ^ address = head.base + place in the file
 *     magic, base
 *
 * A peer that reads memory of another process by address waits for as long as the owner likes:
 * its pages may come from a userfaultfd or from a file system in user space.  A read of a file
 * in memory (memfd) waits for nobody, ends before a place that is missing, and allocates nothing
 * where nothing was written.
 *
 * One file for all pieces: a peer opens it once, and it takes one descriptor.  The file is larger
 * than any memory, but has pages only where pieces were written.  It is created with the first
 * piece.  A process that was forked shares the pieces; it can neither add nor empty any.
 *
 * Threads: any.  Memory: kv_memory_file_alloc() / kv_memory_file_free().
 */
#ifndef KV_KVSERVER_NET_UCX_MEMORY_FILE_H
#define KV_KVSERVER_NET_UCX_MEMORY_FILE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KV_MEMORY_FILE_MAGIC UINT64_C(0x31656c69662d766b) /* "kv-file1" */

/* No piece lies before this place: the head has what is. */
#define KV_MEMORY_FILE_PIECES ((size_t)2 << 20)

/* The file begins with it.  Its bytes are seen by other processes. */
struct kv_memory_file_head {
    uint64_t magic;
    uint64_t base; /* address of the file's first byte in its process */
};

struct kv_lock;
struct kv_memory_file_piece;

struct kv_memory_file {
    struct kv_lock *lock;
    _Atomic uintptr_t base; /* 0: not created */
    size_t bytes;
    int fd;
    bool has_failed; /* the system has no such files */
    int process;     /* that created it */
    uint64_t seed;   /* of the numbers of offers: another file has others */
    _Atomic uint64_t n_numbers;
    struct kv_memory_file_piece *pieces; /* by address */
};

void kv_memory_file_init(struct kv_memory_file *file);
void kv_memory_file_fini(struct kv_memory_file *file); /* frees all pieces */

/* Returns a piece of whole pages, aligned to 2 MiB if it is as large, of zeros; NULL if there is
 * no memory, or the system has no such files. */
void *kv_memory_file_alloc(struct kv_memory_file *file, size_t bytes);

/* Has the system provide the piece's pages, of 2 MiB where it grants them: files get those only
 * by this request.  Of a large piece only the beginning; the rest comes on first access. */
void kv_memory_file_provide(void *piece, size_t bytes);

/* Frees a piece at once, whoever has the file open. */
void kv_memory_file_free(struct kv_memory_file *file, void *piece);

/* Whether peers find the memory, which the caller owns, in the file. */
static inline bool
kv_memory_file_has(const struct kv_memory_file *file, const void *data, size_t bytes)
{
    const uintptr_t base = atomic_load_explicit(&file->base, memory_order_acquire);
    const uintptr_t at = (uintptr_t)data;

    return base != 0 && at >= base && at - base < file->bytes &&
           bytes <= file->bytes - (at - base);
}

/* Returns a number that no offer has had before, of this file or another; never 0. */
uint64_t kv_memory_file_number(struct kv_memory_file *file);

#endif
