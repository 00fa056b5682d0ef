/* transport_fault.h - a row of the table of transports that wraps another and spoils what
 * passes.
 *
 * Rules say what happens to messages of a kind and an operation, on their way out of the ports
 * of this transport or into them.  A client under test gets such a transport; the nodes keep
 * theirs.
 *
 * Threads: the test's; ports of one fault transport are driven by one thread.
 * Memory: fault_open() / the row's close.
 */
#ifndef KV_TESTS_SUPPORT_TRANSPORT_FAULT_H
#define KV_TESTS_SUPPORT_TRANSPORT_FAULT_H

#include "kvserver/net/transport.h"

enum fault_way {
    FAULT_OUT,
    FAULT_IN,
};

enum fault_action {
    FAULT_DROP,         /* nobody hears of it; large data is refused */
    FAULT_HOLD,         /* stays here until fault_release() */
    FAULT_HOLD_LANDING, /* in: it is announced, what the owner receives lands on fault_release()
                         */
    FAULT_GARBLE,       /* a byte of the data is changed */
    FAULT_FORGE,        /* the same, and the message's own checksums are made right again */
    FAULT_TWICE,        /* out: sent twice */
};

struct fault_rule {
    enum fault_way way;
    enum fault_action action;
    unsigned kind;  /* enum kv_wire_kind */
    unsigned op;    /* enum kv_op_id; 0: any */
    unsigned skip;  /* the first so many pass */
    unsigned count; /* then so many are hit; 0: all */
};

kv_status_t fault_open(const struct kv_transport_ops *row,
                       const char *transports,
                       struct kv_transport **ret_transport);

/* At most 8; the first that fits decides. */
void fault_add(struct kv_transport *transport, const struct fault_rule *rule);
void fault_clear(struct kv_transport *transport);

/* Lets go of all that is held, each in its port's next progress; rules stay. */
void fault_release(struct kv_transport *transport);

unsigned fault_held(const struct kv_transport *transport); /* messages and landings, now */
unsigned fault_hits(const struct kv_transport *transport); /* rules applied, ever */

#endif
