/* node.h - a storage node: the store as a library.
 *
 *     carriers                 control thread               data threads 0..n-1
 *     gRPC, messages  ------>  kvs_node_control_step()  -->  kvs_node_data_step(i)
 *                              models, clients,        ring  units, rows, objects,
 *                              sessions, leases       <---  memory, one port each
 *
 * The control thread owns what a session is; a data thread owns the bytes of the units that
 * placement gives it, and nothing is shared: they pass messages over bounded rings.  A thread
 * is only what calls a step function again and again: kvs_node_start() makes them
 * (node_threads.c), a simulation calls the steps itself.
 *
 * This library includes no header of UCX, gRPC or RocksDB: those are rows of the tables that
 * come in with the configuration.
 *
 * Threads: as said per function.  Memory: create/destroy.
 */
#ifndef KV_KVSERVER_STORE_NODE_H
#define KV_KVSERVER_STORE_NODE_H

#include "kvserver/store/control/config.h"

#include <stdio.h>

struct kvs_node;

/* Reserves the memory, opens the ports.  KV_NO_MEMORY, KV_INVALID, KV_IO: `detail` says what.
 */
kv_status_t kvs_node_create(const struct kvs_node_config *config,
                            struct kvs_node **ret_node,
                            char *detail,
                            size_t detail_bytes);

/* The threads must have stopped.  NULL is allowed. */
void kvs_node_destroy(struct kvs_node *node);

/* Starts one thread per data thread; with_control adds one for the control step (without it,
 * the caller's own thread calls kvs_node_control_step(), as kvserver's gRPC loop does). */
kv_status_t kvs_node_start(struct kvs_node *node, bool with_control);
void kvs_node_stop(struct kvs_node *node);

/* ---- data threads ---- */

/* One turn of a data thread: messages, then one slice of the most urgent work.  Returns false
 * if there was nothing to do.  That thread only. */
bool kvs_node_data_step(struct kvs_node *node, uint32_t thread);

/* Sleeps until there may be something to do, at most timeout_us.  That thread only. */
void kvs_node_data_sleep(struct kvs_node *node, uint32_t thread, uint64_t timeout_us);

/* ---- control thread ---- */

/* Runs one control operation of a client; calls `reply` exactly once, from this call or from a
 * later control step.  Borrows the request.  `op` must be of the control plane: carriers check
 * kvs_op_is_control() first.  Hello and goodbye need no token (NULL).  For any other operation
 * the token must be that client's, or the call returns false: nothing was done, and `reply` is
 * not called. */
bool kvs_node_control(struct kvs_node *node,
                      enum kv_op_id op,
                      uint32_t client_index,
                      const struct kv_id128 *client_token,
                      const uint8_t *request,
                      size_t request_bytes,
                      kvs_node_reply_fn reply,
                      void *arg);

/* One turn: answers of data threads, messages of the control port, leases, clients.  Returns
 * false if nothing waits for another turn soon. */
bool kvs_node_control_step(struct kvs_node *node);

/* A carrier knows that this client's process has ended.  The token keeps a late report from
 * hitting a new client in the same place. */
void kvs_node_client_gone(struct kvs_node *node,
                          uint32_t client_index,
                          const struct kv_id128 *client_token);
/* A carrier watches this client's process from now on, which so need not be heard of.  false:
 * it is no client of the node. */
bool kvs_node_attach_client(struct kvs_node *node,
                            uint32_t client_index,
                            const struct kv_id128 *client_token);
bool kvs_node_has_client(struct kvs_node *node,
                         uint32_t client_index,
                         const struct kv_id128 *client_token);

/* Called from a data thread when it has put an answer into the control thread's ring; wakes a
 * control thread that sleeps elsewhere (the gRPC loop).  Set before start. */
void kvs_node_set_control_waker(struct kvs_node *node, void (*wake)(void *arg), void *arg);

/* Refuses new sessions and objects from now on (KV_DRAINING). */
void kvs_node_drain(struct kvs_node *node);
/* True when draining and nothing is in flight.  Control thread. */
bool kvs_node_drained(struct kvs_node *node);
/* A client asked for the drain (KV_OP_DRAIN), so the program should end. */
bool kvs_node_drain_requested(const struct kvs_node *node);

/* ---- any thread ---- */

/* For kv_client_options.nodes of a client in the same process; needs message_control.  Lent for
 * the node's life. */
const char *kvs_node_address(const struct kvs_node *node);

/* When the data thread that has stood still the longest last took a step; they do so at least
 * every 50 ms.  By the node's clock. */
uint64_t kvs_node_last_step_us(const struct kvs_node *node);

/* Writes all statistics as Prometheus text.  Any thread; numbers may be a little old. */
void kvs_node_metrics(struct kvs_node *node, FILE *out);

/* `name\tplane\tsummary` of every operation. */
void kvs_node_list_ops(FILE *out);

/* "put"; NULL: no operation has that number. */
const char *kvs_op_name(enum kv_op_id op);
bool kvs_op_is_control(unsigned op);

#endif
