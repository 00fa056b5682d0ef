/* node_connect.h - how a node is connected, lost, and found to be silent.
 *
 * What depends on a lost node is told by the client's op_events (state.h).
 *
 * Threads: the client's.  Memory: none.
 */
#ifndef KV_CLIENT_NODE_CONNECT_H
#define KV_CLIENT_NODE_CONNECT_H

struct kv_client;
struct kvc_node;

/* Begins to connect, unless the node is connecting or connected. */
void kvc_node_connect(struct kvc_node *node);

/* Closes the connections of failed nodes and ends what depended on them. */
void kvc_nodes_step(struct kv_client *client);

/* Sends goodbye to the node; its reply is ignored. */
void kvc_node_goodbye(struct kvc_node *node);

/* Closes the control transport and the channels without reporting to operations. */
void kvc_node_close(struct kvc_node *node);

/* Pings nodes that do not reply; fails those that have not replied within peer_timeout_us. */
void kvc_nodes_timers(struct kv_client *client);

#endif
