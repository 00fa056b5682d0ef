/* iov.h - a piece of memory.  Scatter/gather transfers use arrays of them. */
#ifndef KV_KVSERVER_BASE_IOV_H
#define KV_KVSERVER_BASE_IOV_H

#include <stddef.h>

struct kv_iov {
    void *base;
    size_t bytes;
};

#endif
