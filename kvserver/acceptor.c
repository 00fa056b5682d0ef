#define _GNU_SOURCE /* accept4 */
#include "acceptor.h"

#include "address.h"
#include "log.h"
#include "thread.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SLEEP_US = 60000000,
    RETRY_US = 100000, /* after a failure that may pass: no descriptor, no memory */
};

/* A connection that was given away.  Whoever has it closes it without telling; its number in
 * the file system says whether the descriptor is still the same one. */
struct connection {
    int fd;
    ino_t inode;
};

struct kv_acceptor {
    int fd;
    uint16_t port;
    kv_acceptor_take_fn take;
    void *arg;
    struct kv_thread *thread;
    struct kv_signal *stop;
    atomic_bool stopping;
    uint32_t connections_max, n_connections;
    struct connection connections[];
};

static void sweep(struct kv_acceptor *acceptor)
{
    uint32_t n_open = 0;

    for (uint32_t i = 0; i < acceptor->n_connections; i++) {
        struct connection connection = acceptor->connections[i];
        struct stat now;

        if (fstat(connection.fd, &now) == 0 && now.st_ino == connection.inode)
            acceptor->connections[n_open++] = connection;
    }
    acceptor->n_connections = n_open;
}

static void admit(struct kv_acceptor *acceptor, int fd)
{
    struct stat opened;
    int one = 1;

    if (acceptor->n_connections == acceptor->connections_max)
        sweep(acceptor);
    if (acceptor->n_connections == acceptor->connections_max || fstat(fd, &opened) != 0) {
        KV_LOG_EVERY(KV_LOG_WARN, "listen: port %u: connection closed: %u are open already",
                     (unsigned)acceptor->port, acceptor->connections_max);
        close(fd);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    acceptor->connections[acceptor->n_connections++] = (struct connection){fd, opened.st_ino};
    acceptor->take(acceptor->arg, fd);
}

static void run(void *arg)
{
    struct kv_acceptor *acceptor = arg;
    int fds[2] = {acceptor->fd, kv_signal_fd(acceptor->stop)};

    while (!atomic_load(&acceptor->stopping)) {
        int fd = accept4(acceptor->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            admit(acceptor, fd);
        } else if (errno == EAGAIN) {
            kv_sleep_fds(fds, 2, SLEEP_US);
        } else if (errno != EINTR && errno != ECONNABORTED) {
            KV_LOG_EVERY(KV_LOG_WARN, "listen: port %u: connections must wait: %s",
                         (unsigned)acceptor->port, strerror(errno));
            kv_sleep_fds(&fds[1], 1, RETRY_US);
        }
    }
}

kv_status_t kv_acceptor_create(const char *address,
                               uint32_t connections_max,
                               struct kv_acceptor **ret_acceptor,
                               char *detail,
                               size_t detail_bytes)
{
    struct kv_acceptor *acceptor =
        calloc(1, sizeof(*acceptor) + connections_max * sizeof(acceptor->connections[0]));
    kv_status_t status = KV_NO_MEMORY;

    snprintf(detail, detail_bytes, "listen: %s: out of memory", address);
    if (acceptor == NULL)
        return status;
    acceptor->connections_max = connections_max;
    acceptor->fd = -1;
    acceptor->stop = kv_signal_create();
    if (acceptor->stop == NULL)
        goto err;
    status = kv_address_listen("listen", address, &acceptor->fd, &acceptor->port, detail,
                               detail_bytes);
    if (status != KV_OK)
        goto err;
    *ret_acceptor = acceptor;
    return KV_OK;

err:
    kv_acceptor_destroy(acceptor);
    return status;
}

void kv_acceptor_destroy(struct kv_acceptor *acceptor)
{
    if (acceptor == NULL)
        return;
    atomic_store(&acceptor->stopping, true);
    if (acceptor->thread != NULL) {
        kv_signal_raise(acceptor->stop);
        kv_thread_join(acceptor->thread);
    }
    if (acceptor->stop != NULL)
        kv_signal_destroy(acceptor->stop);
    if (acceptor->fd >= 0)
        close(acceptor->fd);
    free(acceptor);
}

uint16_t kv_acceptor_port(const struct kv_acceptor *acceptor)
{
    return acceptor->port;
}

kv_status_t kv_acceptor_start(struct kv_acceptor *acceptor, kv_acceptor_take_fn take, void *arg)
{
    acceptor->take = take;
    acceptor->arg = arg;
    return kv_thread_start("kv-accept", run, acceptor, &acceptor->thread);
}
