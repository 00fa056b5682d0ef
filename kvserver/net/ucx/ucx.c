/* ucx.c - the transport over UCX: tcp between hosts, shared memory within one.
 *
 * Two contexts, and so two workers per port, because UCX chooses the links of an endpoint by
 * context and not by endpoint:
 *
 *   network   tcp on the named devices                      KV_CHANNEL_NETWORK
 *   shared    posix shared memory; large data is read       KV_CHANNEL_SHARED
 *             straight from the sender's memory
 *
 * All endpoints have error mode PEER.  Mode NONE would let UCX read large data through CMA, but
 * its endpoints cannot be closed while the peer does not answer, and the peer might read memory
 * of a send that was completed long ago.  So large data goes as an offer (offer.h): its message
 * is UCX's RTS, and the ATS that answers it ends the send.  Where it cannot be read, UCX moves
 * the data itself, which is slower.
 *
 * Who may keep whom waiting: a client trusts its node, and reads the node's memory by address
 * (process_vm_readv).  A node trusts no client, whose memory may hang, and reads only files in
 * memory; a client's data is in such a file (kv_ucx_alloc()) or copied to it.  What an older
 * client offers by address, UCX moves.  UCX itself is given no means to read by address.
 *
 * UCX calls back in the middle of its own work.  What must not happen there waits for the end
 * of kv_port_progress(): endpoints are closed, and failures reported, from there.
 *
 * This UCX has assertions compiled in, and a damaged worker address or message aborts the
 * process: addresses travel in an envelope with a checksum, and peers are trusted (README).
 */
#include "kvserver/net/ucx/ucx_private.h"

const struct kv_transport_ops kv_transport_ucx = {
    .name = "ucx",
    .open = kv_ucx_open,
    .close = kv_ucx_close,
    .map = kv_ucx_map,
    .alloc = kv_ucx_alloc,
    .unmap = kv_ucx_unmap,
    .describe = kv_ucx_describe,
    .port_open = kv_ucx_port_open,
    .port_close = kv_ucx_port_close,
    .port_address = kv_ucx_port_address,
    .port_progress = kv_ucx_port_progress,
    .port_arm = kv_ucx_port_arm,
    .port_wake = kv_ucx_port_wake,
    .connect = kv_ucx_connect,
    .channel_close = kv_ucx_channel_close,
    .channel_describe = kv_ucx_channel_describe,
    .send = kv_ucx_send,
    .send_pair = kv_ucx_send_pair,
    .receive = kv_ucx_receive,
    .refuse = kv_ucx_refuse,
};
