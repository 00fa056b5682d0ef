/* peer_files.h - reads the memory files of other processes (memory_file.h).
 *
 * A file is opened once, as /proc/PROCESS/fd/DESCRIPTOR, which takes less privilege than to read
 * the process by address.  It is opened only if it lies where this process's own memfds lie:
 * whatever else a peer may name (a pipe, a device, a file system in user space) can make the
 * opener wait.  Its bytes are then read as those of any file; this process maps none of it, so
 * neither a file that shrinks nor one of holes does it any harm.
 *
 * A caller asks for files of its peers alone, and forgets a peer that has left: a file that is
 * open keeps the memory of a process that is dead.  What is open is bounded, in all and for each
 * process: beyond that, the file that was not read for the longest is closed.  A process id that
 * is in use again is no danger: numbers differ from file to file, and one that is wrong is looked
 * for in the file that the process has now.
 *
 * Threads: any.  Memory: kv_peer_files_create() / kv_peer_files_free().
 */
#ifndef KV_KVSERVER_NET_UCX_PEER_FILES_H
#define KV_KVSERVER_NET_UCX_PEER_FILES_H

#include "kvserver/net/ucx/offer.h"

#include <stddef.h>
#include <stdint.h>

struct kv_peer_files;

/* Returns NULL if the system has no such files, or out of memory. */
struct kv_peer_files *kv_peer_files_create(void);
void kv_peer_files_free(struct kv_peer_files *files); /* NULL: nothing */

/* Reads an offer that names a file, as kv_offer_read() does. */
enum kv_offer_outcome kv_peer_files_read(struct kv_peer_files *files,
                                         const struct kv_offer_tail *tail,
                                         size_t bytes,
                                         const struct kv_iov *iov,
                                         unsigned n_iov);

/* Closes the files of a process that may have ended.  They are opened again when needed. */
void kv_peer_files_forget(struct kv_peer_files *files, uint32_t process);

/* How many are open. */
unsigned kv_peer_files_open(struct kv_peer_files *files);

#endif
