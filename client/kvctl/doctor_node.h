/* doctor_node.h - doctor's checks of a node, in the order in which a client depends on them.
 *
 * Threads: none of its own.  Memory: the caller's.
 */
#ifndef KV_CLIENT_KVCTL_DOCTOR_NODE_H
#define KV_CLIENT_KVCTL_DOCTOR_NODE_H

#include "client/kvctl/doctor_report.h"

/* All checks of doctor->node. */
void kvctl_doctor_node(struct kvctl_doctor *doctor);

#endif
