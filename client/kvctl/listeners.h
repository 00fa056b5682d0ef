/* listeners.h - which TCP ports the process behind a local port listens on, from /proc.
 *
 * Threads: none of its own.  Memory: the caller's.
 */
#ifndef KV_CLIENT_KVCTL_LISTENERS_H
#define KV_CLIENT_KVCTL_LISTENERS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    KVCTL_LISTENERS_MAX = 256
};

struct kvctl_listener {
    uint64_t inode;
    uint16_t port;
    bool is_loopback;
    char address[72]; /* "127.0.0.1:7400" */
};

struct kvctl_listeners {
    int pid; /* 0: not visible; the list then has only this port's listeners */
    unsigned n;
    struct kvctl_listener list[KVCTL_LISTENERS_MAX];
};

/* Finds the process that listens on the port, and all of its listeners.  Returns false if no
 * process of this machine listens on it. */
bool kvctl_listeners_of_port(uint16_t port, struct kvctl_listeners *ret_listeners);

#endif
