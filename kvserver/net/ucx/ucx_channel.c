/* ucx_channel.c - connects and closes channels, and notices dead peers of this host.
 *
 * A channel is a UCX endpoint.  A channel that is closed during kv_port_progress() waits in
 * `to_close` until UCX is no longer in the middle of its own work.
 *
 * Two ports that connect to each other share one socket, by numbers that UCX gives to their
 * endpoints (the first of each side, the second...).  A port that connects looks for a socket
 * that the peer has opened for the same number, and takes it; UCX 1.13 does not expect the peer
 * to have closed it by then.  Where the first write fails, it connects again, but leaves the
 * endpoint out of its table of connections, and aborts when that endpoint is closed; where the
 * second one does, it aborts at once.  So a channel is not closed before the peer has accepted
 * its connection, which a flush of its endpoint waits for: then the peer gets to the end of the
 * stream, which UCX handles.  It waits in `lingering`, but not for ever.
 */
#include "kvserver/net/ucx/ucx_private.h"

#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

void kv_ucx_on_failure(void *arg, ucp_ep_h endpoint, ucs_status_t ucs)
{
    struct kv_ucx_channel *channel = arg;

    (void)endpoint;
    if (channel->failed)
        return;
    channel->failed = true;
    channel->status = kv_ucx_status_of(ucs);
    channel->port->n_failures++;
}

static void channel_unlink(struct kv_ucx_channel *channel)
{
    if (channel->previous != NULL)
        channel->previous->next = channel->next;
    else
        channel->port->channels = channel->next;
    if (channel->next != NULL)
        channel->next->previous = channel->previous;
}

static void end_watch(struct kv_ucx_channel *channel)
{
    if (channel->process_fd < 0)
        return;
    epoll_ctl(channel->port->watch_fd, EPOLL_CTL_DEL, channel->process_fd, NULL);
    close(channel->process_fd);
    channel->process_fd = -1;
}

static struct kv_ucx_channel **peers_of(struct kv_ucx_port *port, uint32_t process)
{
    return &port->peers[kv_mix64(process) % KV_UCX_PEERS];
}

struct kv_ucx_channel *kv_ucx_find_peer(const struct kv_ucx_port *port, uint32_t process)
{
    struct kv_ucx_channel *channel = port->peers[kv_mix64(process) % KV_UCX_PEERS];

    while (channel != NULL && channel->process != process)
        channel = channel->next_peer;
    return channel;
}

static void add_peer(struct kv_ucx_channel *channel, uint32_t process)
{
    struct kv_ucx_channel **list = peers_of(channel->port, process);

    channel->process = process;
    channel->next_peer = *list;
    *list = channel;
}

static void remove_peer(struct kv_ucx_channel *channel)
{
    struct kv_ucx_channel **link = peers_of(channel->port, channel->process);

    while (*link != channel)
        link = &(*link)->next_peer;
    *link = channel->next_peer;
}

bool kv_ucx_has_ended(const struct kv_ucx_channel *channel, uint32_t process)
{
    struct pollfd poll_fd = {.fd = channel != NULL ? channel->process_fd : -1,
                             .events = POLLIN};
    bool has_ended;

    if (channel != NULL)
        return channel->failed || (poll_fd.fd >= 0 && poll(&poll_fd, 1, 0) == 1);
    poll_fd.fd = (int)syscall(SYS_pidfd_open, (pid_t)process, 0);
    if (poll_fd.fd < 0)
        return errno == ESRCH;
    has_ended = poll(&poll_fd, 1, 0) == 1;
    close(poll_fd.fd);
    return has_ended;
}

/* Watches the peer's process by a pidfd.  If that fails (a kernel before 5.3, no free
 * descriptor), the peer's death is not reported. */
static void begin_watch(struct kv_ucx_channel *channel)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = channel};

    channel->process_fd = (int)syscall(SYS_pidfd_open, (pid_t)channel->process, 0);
    if (channel->process_fd >= 0 &&
        epoll_ctl(channel->port->watch_fd, EPOLL_CTL_ADD, channel->process_fd, &event) != 0)
        end_watch(channel);
}

void kv_ucx_look_for_dead_peers(struct kv_ucx_port *port)
{
    struct epoll_event ready[KV_UCX_WATCH_EVENTS_MAX];
    int n = epoll_wait(port->watch_fd, ready, KV_UCX_WATCH_EVENTS_MAX, 0);

    for (int i = 0; i < n; i++) {
        struct kv_ucx_channel *channel = ready[i].data.ptr;

        end_watch(channel);
        kv_ucx_on_failure(channel, channel->endpoint, UCS_ERR_CONNECTION_RESET);
    }
}

static void close_endpoint(struct kv_ucx_channel *channel)
{
    struct kv_ucx_port *port = channel->port;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
    };
    ucs_status_ptr_t request = ucp_ep_close_nbx(channel->endpoint, &param);

    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
    port->settle = KV_UCX_SETTLE_ROUNDS;
    channel->link->n_channels--;
    if (channel->link == port->links[KV_UCX_LINK_SHARED]) {
        port->must_probe = true;
        port->must_look = true;
        port->is_restless = true;
    }
    free(channel);
}

static void on_flushed(void *request, ucs_status_t ucs, void *user_data)
{
    struct kv_ucx_flush *flush = request;

    (void)ucs; /* a peer that failed is not waited for either */
    (void)user_data;
    if (flush->channel != NULL)
        flush->channel->flush = NULL;
    ucp_request_free(request);
}

/* false: nothing to wait for. */
static bool linger(struct kv_ucx_channel *channel)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK,
        .cb.send = on_flushed,
    };
    ucs_status_ptr_t request;

    if (!channel->may_linger)
        return false;
    request = ucp_ep_flush_nbx(channel->endpoint, &param);
    if (!UCS_PTR_IS_PTR(request))
        return false;
    channel->flush = request;
    channel->flush->channel = channel;
    channel->linger_until_us = kv_clock_now(&kv_clock_real) + KV_UCX_LINGER_US;
    channel->next = channel->port->lingering;
    channel->port->lingering = channel;
    return true;
}

void kv_ucx_end_lingering(struct kv_ucx_port *port, bool is_all)
{
    struct kv_ucx_channel **next_channel = &port->lingering;
    uint64_t now_us = port->lingering != NULL ? kv_clock_now(&kv_clock_real) : 0;

    while (*next_channel != NULL) {
        struct kv_ucx_channel *channel = *next_channel;

        if (!is_all && channel->flush != NULL && now_us < channel->linger_until_us) {
            next_channel = &channel->next;
            continue;
        }
        *next_channel = channel->next;
        if (channel->flush != NULL)
            channel->flush->channel = NULL;
        close_endpoint(channel);
    }
}

void kv_ucx_channel_close(struct kv_channel *base)
{
    struct kv_ucx_channel *channel = (struct kv_ucx_channel *)base;
    struct kv_ucx_port *port = channel->port;

    channel_unlink(channel);
    channel->may_linger = channel->link->kind == KV_UCX_LINK_NETWORK && !channel->failed;
    for (struct kv_ucx_pending_send *pending_send = port->pending_sends; pending_send != NULL;
         pending_send = pending_send->next) {
        if (pending_send->channel == channel) {
            pending_send->channel = NULL;
            channel->may_linger = false; /* its memory must not be read any more */
        }
    }
    if (channel->failed && !channel->reported)
        port->n_failures--;
    end_watch(channel);
    if (channel->process != 0) {
        kv_ucx_mark_left(port, channel->process);
        remove_peer(channel); /* first: no file of its process is opened after this */
        if (port->transport->peer_files != NULL)
            kv_peer_files_forget(port->transport->peer_files, channel->process);
    }
    /* Nothing may name it from now on, not even a failure that comes before it is closed. */
    channel->failed = true;
    if (!port->in_progress) {
        if (!linger(channel))
            close_endpoint(channel);
        return;
    }
    channel->next = port->to_close;
    port->to_close = channel;
}

static kv_status_t read_address(const void *address,
                                size_t address_bytes,
                                const unsigned char *ret_parts[KV_UCX_N_LINKS],
                                struct kv_ucx_address_prefix *ret_prefix)
{
    const unsigned char *at = address;
    struct kv_ucx_address_prefix prefix;
    size_t bytes = sizeof(prefix);
    size_t crc_begin = offsetof(struct kv_ucx_address_prefix, process);

    if (address_bytes < sizeof(prefix) || address_bytes > KV_UCX_ADDRESS_BYTES_MAX)
        return KV_INVALID;
    memcpy(&prefix, at, sizeof(prefix));
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++)
        bytes += prefix.bytes[kind];
    if (prefix.magic != KV_UCX_ADDRESS_MAGIC || bytes != address_bytes ||
        prefix.crc != kv_crc32c(0, at + crc_begin, address_bytes - crc_begin))
        return KV_INVALID;
    at += sizeof(prefix);
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++) {
        ret_parts[kind] = at;
        at += prefix.bytes[kind];
    }
    *ret_prefix = prefix;
    return KV_OK;
}

kv_status_t kv_ucx_connect(struct kv_port *base,
                           const void *address,
                           size_t address_bytes,
                           enum kv_channel_mode mode,
                           void *channel_arg,
                           struct kv_channel **ret_channel)
{
    struct kv_ucx_port *port = kv_ucx_port_of(base);
    const unsigned char *parts[KV_UCX_N_LINKS];
    struct kv_ucx_address_prefix prefix;
    struct kv_ucx_channel *channel;
    char lanes[256] = "";
    enum kv_ucx_link_kind kind;
    void *part;
    ucs_status_t ucs;
    kv_status_t status;

    status = read_address(address, address_bytes, parts, &prefix);
    if (status != KV_OK)
        return status;
    /* With one kind of link, both modes use it. */
    kind = mode == KV_CHANNEL_SHARED ? KV_UCX_LINK_SHARED : KV_UCX_LINK_NETWORK;
    if (port->links[kind] == NULL)
        kind = kind == KV_UCX_LINK_SHARED ? KV_UCX_LINK_NETWORK : KV_UCX_LINK_SHARED;
    if (prefix.bytes[kind] == 0 || (mode == KV_CHANNEL_SHARED && kind != KV_UCX_LINK_SHARED &&
                                    !port->transport->is_users_choice))
        return KV_UNREACHABLE;

    channel = calloc(1, sizeof(*channel));
    part = malloc(prefix.bytes[kind]);
    if (channel == NULL || part == NULL) {
        free(part);
        free(channel);
        return KV_NO_MEMORY;
    }
    memcpy(part, parts[kind], prefix.bytes[kind]); /* aligned, as UCX gave it */
    channel->base.ops = port->base.ops;
    channel->port = port;
    channel->link = port->links[kind];
    channel->process_fd = -1;
    channel->channel_arg = channel_arg;
    ucs = ucp_ep_create(channel->link->worker,
                        &(ucp_ep_params_t){
                            .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                          UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                          UCP_EP_PARAM_FIELD_ERR_HANDLER,
                            .address = part,
                            .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                            .err_handler = {kv_ucx_on_failure, channel},
                        },
                        &channel->endpoint);
    free(part);
    if (ucs != UCS_OK) {
        free(channel);
        return ucs == UCS_ERR_NO_MEMORY ? KV_NO_MEMORY : KV_UNREACHABLE;
    }

    channel->base.pair_max =
        kind == KV_UCX_LINK_SHARED ? KV_UCX_SHARED_EAGER_MAX : KV_UCX_NETWORK_EAGER_MAX;
    channel->link->n_channels++;
    channel->next = port->channels;
    if (port->channels != NULL)
        port->channels->previous = channel;
    port->channels = channel;
    if (mode == KV_CHANNEL_SHARED && kind != KV_UCX_LINK_SHARED) {
        /* The user's own choice of transports may make this shared memory. */
        kv_ucx_describe_endpoint(channel->endpoint, lanes, sizeof(lanes));
        if (strstr(lanes, "/memory") == NULL) {
            kv_ucx_channel_close(&channel->base);
            return KV_UNREACHABLE;
        }
    }
    if (kind == KV_UCX_LINK_SHARED && prefix.process != 0) {
        add_peer(channel, prefix.process);
        begin_watch(channel);
    }
    *ret_channel = &channel->base;
    return KV_OK;
}

void kv_ucx_channel_describe(struct kv_channel *base, char *text, size_t text_bytes)
{
    struct kv_ucx_channel *channel = (struct kv_ucx_channel *)base;

    if (text_bytes == 0)
        return;
    text[0] = '\0';
    kv_ucx_describe_endpoint(channel->endpoint, text, text_bytes);
    /* Large data goes beside UCX (ucx.c). */
    if (channel->link->kind == KV_UCX_LINK_SHARED)
        kv_ucx_add_direct(text, text_bytes);
}

void kv_ucx_close_endpoints(struct kv_ucx_port *port)
{
    while (port->to_close != NULL) {
        struct kv_ucx_channel *channel = port->to_close;

        port->to_close = channel->next;
        if (!linger(channel))
            close_endpoint(channel);
    }
}
