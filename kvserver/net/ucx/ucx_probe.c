/* ucx_probe.c - finds a shared queue that a peer left half written, and replaces it.
 *
 * Peers write into the port's shared queue directly.  A peer that is killed or stopped in the
 * middle of a message blocks all messages after it.  The port therefore sends itself a probe at
 * intervals; if one does not arrive, the queue is stuck, and the port replaces it.
 *
 * UCX closes an endpoint once what the endpoint had to write is in the peer's queue.  If that is
 * full, and the peer gone, this never happens: requests stay with UCX, and the worker is never
 * idle.  Only the end of the worker ends this, so the port replaces its queue here, too: soon if
 * UCX may write to the owner's memory, else after a while in which nothing else happens, because
 * the other peers have to connect again.
 */
#include "kvserver/net/ucx/ucx_private.h"

#include "kvserver/base/clock.h"

ucs_status_t kv_ucx_on_probe(void *arg,
                             const void *header,
                             size_t header_bytes,
                             void *data,
                             size_t data_bytes,
                             const ucp_am_recv_param_t *param)
{
    struct kv_ucx_link *link = arg;

    (void)header;
    (void)header_bytes;
    (void)data;
    (void)data_bytes;
    (void)param;
    /* An old queue that goes on after all says nothing of the one in use. */
    if (link == link->port->links[KV_UCX_LINK_SHARED])
        link->port->is_probing = false;
    return UCS_OK;
}

static void send_probe(struct kv_ucx_port *port, uint64_t now_us)
{
    struct kv_ucx_link *link = port->links[KV_UCX_LINK_SHARED];
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucp_address_t *address;
    ucs_status_ptr_t request;
    size_t bytes;

    port->probe_us = now_us;
    port->waited_us = 0;
    if (link->probe == NULL) {
        ucs_status_t ucs = ucp_worker_get_address(link->worker, &address, &bytes);

        if (ucs != UCS_OK)
            return;
        ucs = ucp_ep_create(link->worker,
                            &(ucp_ep_params_t){
                                .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                              UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                                .address = address,
                                .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                            },
                            &link->probe);
        ucp_worker_release_address(link->worker, address);
        if (ucs != UCS_OK) {
            link->probe = NULL;
            return;
        }
    }
    port->is_probing = true;
    port->must_probe = false;
    request = ucp_am_send_nbx(link->probe, KV_UCX_PROBE_ID, NULL, 0, NULL, 0, &param);
    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
    else if (UCS_PTR_IS_ERR(request))
        port->is_probing = false;
}

/* Replaces the shared queue.  Fails the channels over the old one; their owners connect again,
 * to the new one. */
static void replace_queue(struct kv_ucx_port *port)
{
    struct kv_ucx_link *old = port->links[KV_UCX_LINK_SHARED], *fresh;

    port->is_probing = false;
    if (kv_ucx_open_link(port, KV_UCX_LINK_SHARED, &fresh) != KV_OK)
        return; /* the next probe tries again */
    port->links[KV_UCX_LINK_SHARED] = fresh;
    if (kv_ucx_watch_link(port, fresh) != KV_OK || kv_ucx_make_address(port) != KV_OK) {
        port->links[KV_UCX_LINK_SHARED] = old;
        kv_ucx_close_link(fresh);
        return;
    }
    port->must_look = port->is_restless = false;
    port->left_us = port->awake_us = 0;
    for (struct kv_ucx_channel *channel = port->channels; channel != NULL;
         channel = channel->next)
        if (channel->link == old)
            kv_ucx_on_failure(channel, channel->endpoint, UCS_ERR_CONNECTION_RESET);
    old->next = port->retired;
    port->retired = old;
}

/* Whether UCX may still write to memory for a closed channel of the link. */
static bool has_left_receive(const struct kv_ucx_link *link)
{
    for (const struct kv_ucx_incoming *incoming = link->port->incomings; incoming != NULL;
         incoming = incoming->next)
        if (incoming->link == link && incoming->is_left)
            return true;
    return false;
}

/* Whether UCX still has a send over the link: of a channel that was closed, or of another. */
static bool has_send(const struct kv_ucx_link *link, bool is_closed)
{
    for (const struct kv_ucx_pending_send *pending = link->port->pending_sends; pending != NULL;
         pending = pending->next)
        if (pending->link == link && (pending->channel == NULL) == is_closed)
            return true;
    return false;
}

/* Whether UCX has kept what closed channels left behind for too long. */
static bool is_left_too_long(struct kv_ucx_port *port, uint64_t passed_us)
{
    const struct kv_ucx_link *link = port->links[KV_UCX_LINK_SHARED];
    const bool has_receive = has_left_receive(link);

    port->must_look = has_receive || has_send(link, true);
    port->left_us = has_receive ? port->left_us + passed_us : 0;
    /* A peer that is only slow keeps the port awake, too. */
    if (port->is_kept_awake && !has_send(link, false))
        port->awake_us += passed_us;
    port->quiet_us = port->is_quiet ? port->quiet_us + passed_us : 0;
    port->is_kept_awake = false;
    port->is_quiet = true;
    return port->left_us >= KV_UCX_LEFT_US ||
           (port->awake_us >= KV_UCX_AWAKE_ALONE_US && link->n_channels == 0) ||
           (port->awake_us >= KV_UCX_AWAKE_US && port->quiet_us >= KV_UCX_QUIET_US) ||
           port->awake_us >= KV_UCX_AWAKE_MAX_US;
}

static void look_at_left(struct kv_ucx_port *port, uint64_t passed_us)
{
    if (!port->is_restless || port->settle > 0 || !is_left_too_long(port, passed_us))
        return;
    port->left_us = port->awake_us = 0;
    replace_queue(port);
}

/* A port that nobody drives receives no probe, and the queue is none the worse for it: such a
 * time counts little. */
void kv_ucx_look_at_queue(struct kv_ucx_port *port)
{
    const struct kv_ucx_link *link = port->links[KV_UCX_LINK_SHARED];
    uint64_t now_us, passed_us;

    if (link == NULL || port->closing ||
        (link->n_channels == 0 && !port->is_probing && !port->is_restless))
        return;
    now_us = kv_clock_now(&kv_clock_real);
    passed_us = now_us - port->look_us;
    if (passed_us > KV_UCX_PROBE_STEP_US)
        passed_us = KV_UCX_PROBE_STEP_US;
    port->look_us = now_us;
    look_at_left(port, passed_us);
    link = port->links[KV_UCX_LINK_SHARED];
    if (port->is_probing) {
        port->waited_us += passed_us;
        if (port->waited_us > KV_UCX_PROBE_LOST_US)
            replace_queue(port);
    } else if (link->n_channels > 0 &&
               (port->must_probe || now_us - port->probe_us > KV_UCX_PROBE_EVERY_US)) {
        send_probe(port, now_us);
    }
}

/* Returns whether the port's owner still has an object of the link.  Requests that only UCX
 * still has are given up. */
static bool is_held(const struct kv_ucx_link *link)
{
    if (link->n_channels > 0)
        return true;
    for (const struct kv_ucx_incoming *incoming = link->port->incomings; incoming != NULL;
         incoming = incoming->next)
        if (incoming->link == link && !incoming->receiving)
            return true;
    return false;
}

void kv_ucx_retire_links(struct kv_ucx_port *port)
{
    struct kv_ucx_link **next_link = &port->retired;

    if (port->settle > 0)
        return;
    while (*next_link != NULL) {
        struct kv_ucx_link *link = *next_link;

        if (is_held(link)) {
            next_link = &link->next;
            continue;
        }
        *next_link = link->next;
        kv_ucx_close_link(link);
    }
}
