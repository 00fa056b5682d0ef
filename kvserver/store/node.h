/* node.h - a storage node, as a library.
 *
 *     transports               control thread               data threads 0..n-1
 *     gRPC, messages  ------>  kvs_node_control_step()  -->  kvs_node_data_step(i)
 *                              models, clients,        ring  units, rows, objects,
 *                              sessions, leases       <---  memory, one port each
 *
 * The control thread owns the sessions; each data thread owns the bytes of the units that
 * placement assigns to it.  They share no mutable data but pass messages over bounded rings.
 * Any thread that calls a step function repeatedly will do: kvs_node_start() creates such
 * threads (node_threads.c), and a simulation calls the steps itself.
 *
 * This library includes no header of UCX, gRPC or RocksDB: the configuration brings the
 * transport and the disk as tables of functions.
 *
 * Threads: as stated for each function.  Memory: create/destroy.
 */
#ifndef KV_KVSERVER_STORE_NODE_H
#define KV_KVSERVER_STORE_NODE_H

#include "kvserver/store/control/config.h"

#include <stdio.h>

struct kvs_node;

/* Fails with KV_INVALID if the node could not be created with such values on any machine, with
 * KV_NO_MEMORY if not on this one; `detail` has the reason.  Looks at values only. */
kv_status_t
kvs_node_check_config(const struct kvs_node_config *config, char *detail, size_t detail_bytes);

/* Reserves the memory and opens the ports.  Fails with KV_NO_MEMORY, KV_INVALID or KV_IO;
 * `detail` has the reason.
 */
kv_status_t kvs_node_create(const struct kvs_node_config *config,
                            struct kvs_node **ret_node,
                            char *detail,
                            size_t detail_bytes);

/* Frees the node, and stops its threads if kvs_node_start() started them.  NULL is allowed. */
void kvs_node_destroy(struct kvs_node *node);

/* Starts one thread per data thread; with_control adds one for the control step.  Without it, a
 * thread of the caller's calls kvs_node_control_step(), as kvserver's gRPC loop does. */
kv_status_t kvs_node_start(struct kvs_node *node, bool with_control);
void kvs_node_stop(struct kvs_node *node);

/* ---- data threads ---- */

/* One step of a data thread: messages, then one slice of the most urgent request.  Returns
 * false if there was nothing to do.  That data thread only. */
bool kvs_node_data_step(struct kvs_node *node, uint32_t thread);

/* ---- control thread ---- */

/* Runs one control operation of a client and calls `reply` exactly once, from this call or from
 * a later control step.  Borrows the packed message.  `op` must be a control operation: callers check
 * kvs_op_is_control() first.  Hello and goodbye need no token (NULL).  For any other operation
 * the token must be that client's; otherwise the call returns false, does nothing, and does not
 * call `reply`. */
bool kvs_node_control(struct kvs_node *node,
                      enum kv_op_id op,
                      uint32_t client_index,
                      const struct kv_id128 *client_token,
                      const uint8_t *packed,
                      size_t packed_bytes,
                      kvs_node_reply_fn reply,
                      void *arg);

/* One step: replies of data threads, messages of the control port, leases, clients.  Returns
 * false if no further step is due soon. */
bool kvs_node_control_step(struct kvs_node *node);

/* Tells the node that this client's process has ended.  The token protects a new client in the
 * same place from a late report. */
void kvs_node_client_gone(struct kvs_node *node,
                          uint32_t client_index,
                          const struct kv_id128 *client_token);
/* Tells the node that a control transport watches this client's process from now on, so that
 * silence is no reason to remove it.  Returns false if the node has no such client. */
bool kvs_node_attach_client(struct kvs_node *node,
                            uint32_t client_index,
                            const struct kv_id128 *client_token);
bool kvs_node_has_client(struct kvs_node *node,
                         uint32_t client_index,
                         const struct kv_id128 *client_token);
/* Returns how many clients the node has lost since it was created. */
uint64_t kvs_node_clients_lost(const struct kvs_node *node);

/* Sets the function that wakes a control thread that sleeps elsewhere (the gRPC loop).  A data
 * thread calls it after it has put a reply into the control thread's ring.  Set it before
 * kvs_node_start(). */
void kvs_node_set_control_waker(struct kvs_node *node, void (*wake)(void *arg), void *arg);

/* Rejects new sessions and objects from now on (KV_DRAINING). */
void kvs_node_drain(struct kvs_node *node);
/* Returns true if the node is draining and nothing is in flight.  Control thread. */
bool kvs_node_drained(struct kvs_node *node);
/* Returns true if a client requested a drain (KV_OP_DRAIN): the program should then exit. */
bool kvs_node_drain_requested(const struct kvs_node *node);

/* ---- no thread: the node's own have stopped, or all steps are the caller's ---- */

/* Asserts that the books of the control thread, of every data thread and of its queries are
 * right (control.h, shard.h and ops/query.h number their invariants), and, where no control
 * operation is under way, that
 *   (1) the sessions in use are the same on the data threads on which the control thread has
 *       placed them, and on no other, with the same token, tenant, generation, placement,
 *       writers and schema;
 *   (2) a client that is open is open there, with the same token, tenant and credits, or the
 *       control thread was told that it is lost; one that is free is free there. */
void kvs_node_check(const struct kvs_node *node);
/* The same of all that lies in memory: walks every segment. */
void kvs_node_check_memory(const struct kvs_node *node);

/* ---- any thread ---- */

/* Returns the address for kv_client_options.nodes of a client in the same process; needs
 * message_control.  Valid for the node's life. */
const char *kvs_node_address(const struct kvs_node *node);

/* Returns the time, by the node's clock, of the oldest last step of any data thread.  A healthy
 * data thread makes a step at least every 50 ms. */
uint64_t kvs_node_last_step_us(const struct kvs_node *node);

/* Writes all statistics as Prometheus text.  Any thread; values may be slightly out of date. */
void kvs_node_metrics(struct kvs_node *node, FILE *out);

/* Prints `name\tplane\tsummary` for every operation. */
void kvs_node_list_ops(FILE *out);

/* Returns the operation's name, such as "put", or NULL if the number is unknown. */
const char *kvs_op_name(enum kv_op_id op);
bool kvs_op_is_control(unsigned op);

#endif
