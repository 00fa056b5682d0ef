/* iov.h - a piece of memory: what is sent from or received into in one go is a list of these. */
#ifndef KV_KVSERVER_BASE_IOV_H
#define KV_KVSERVER_BASE_IOV_H

#include <stddef.h>

struct kv_iov {
    void *base;
    size_t bytes;
};

#endif
