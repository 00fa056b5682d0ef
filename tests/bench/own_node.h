/* own_node.h - an embedded node of one data thread whose clock shows that thread's own time.
 *
 * Between start and stop the node has threads, and its clock is the real one: for set-up.
 * Otherwise the caller makes its steps, and the clock goes on only during a data thread's step,
 * by the processor time that it takes: clients, the control thread and other programs have
 * processors of their own, as it were.  What answers say of their time is then the data thread's,
 * on any machine.
 *
 * Threads: one makes the steps.  Memory: bench_own_node_open() / bench_own_node_close().
 */
#ifndef KV_TESTS_BENCH_OWN_NODE_H
#define KV_TESTS_BENCH_OWN_NODE_H

#include "client/include/kvclient.h"

#include <stdbool.h>
#include <stdint.h>

struct bench_own_node;

/* The node has been started.  NULL: failed, and it was said. */
struct bench_own_node *bench_own_node_open(uint64_t memory_bytes);
void bench_own_node_close(struct bench_own_node *own); /* NULL is allowed */

/* false: failed, and it was said. */
bool bench_own_node_start(struct bench_own_node *own);
void bench_own_node_stop(struct bench_own_node *own);

/* One step of each thread of a node that is stopped. */
void bench_own_node_step(struct bench_own_node *own);

/* A client of the node, which is started.  NULL: failed, and it was said. */
struct kv_client *bench_own_node_client(struct bench_own_node *own);

#endif
