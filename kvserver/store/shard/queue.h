/* queue.h - queues of requests, and the order in which a data thread serves them.
 *
 *     class    the queued requests of one priority.  Classes share the thread's time by weight,
 *              so that none waits for ever; the most urgent one goes first where nothing else
 *              decides.
 *     client   within a class, clients have equal shares of its time, however many requests
 *              each has queued: the first client of the class has the turn until it has used
 *              KVS_TURN_US.
 *     request  a client's requests of one class take turns, slice by slice; those that move data are
 *              run one after the other (KVS_OP_RUNS_TO_END).
 *
 * Choosing a request takes the same time however many clients and requests there are.
 *
 * Threads: the data thread.  Memory: in the shard, and in its clients.
 */
#ifndef KV_KVSERVER_STORE_SHARD_QUEUE_H
#define KV_KVSERVER_STORE_SHARD_QUEUE_H

#include <stdint.h>

enum {
    KVS_TURN_US = 200, /* a few slices */
};

/* Requests in the order of their turns. */
struct kvs_request_queue {
    struct kvs_request *first, **end;
};

/* A client's queued requests of one class. */
struct kvs_client_queue {
    struct kvs_request_queue requests;
    struct kvs_client_queue *next, **link; /* list of the class; link is NULL while there are no
                                            * requests */
    int64_t left_us;                       /* of its turn; less than 0: used too much */
};

struct kvs_request_class {
    struct kvs_client_queue *first, **end; /* clients with requests */
    uint64_t used;                         /* microseconds, in inverse proportion to the weight;
                                            * a class that was empty has as many as the class
                                            * that was served last */
};

#endif
