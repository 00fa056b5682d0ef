/* A client on a data thread: looking up its requests, and closing it. */
#include "kvserver/store/shard/shard_private.h"

struct kvs_request *kvs_shard_client_find_request(struct kvs_shard_client *client,
                                                  uint64_t request_id)
{
    for (struct kvs_request *request = client->requests; request != NULL;
         request = request->client_next)
        if (request->header.request_id == request_id)
            return request;
    return NULL;
}

void kvs_shard_client_close(struct kvs_shard *shard, struct kvs_shard_client *client)
{
    if (client->state != KVS_SHARD_CLIENT_OPEN)
        return;
    kvs_replies_flush(shard);
    client->state = KVS_SHARD_CLIENT_CLOSING;
    kvs_early_bulk_clear(client, UINT64_MAX);
    for (struct kvs_request *request = client->requests, *next; request != NULL;
         request = next) {
        next = request->client_next;
        request->orphan = true;
        if (request->state == KVS_REQUEST_AWAIT_BULK || request->state == KVS_REQUEST_WAITING ||
            request->state == KVS_REQUEST_QUEUED)
            kvs_request_end(request);
        else if (request->state == KVS_REQUEST_RECEIVING)
            kvs_request_give_up(request);
    }
    struct kv_channel *channel = client->channel;
    client->channel = NULL;
    channel->ops->channel_close(channel); /* ends the requests that are sending */
    kvs_shard_client_settle(client);
}

void kvs_shard_client_lost(struct kvs_shard *shard, struct kvs_shard_client *client)
{
    /* The notice is out of the ring before the place can be opened again, because the control
     * thread gets the reply to the client's close after it.
 */
    if (!client->is_told) {
        client->notice = (struct kvs_command){
            .kind = KVS_COMMAND_CLIENT_STUCK,
            .thread = shard->index,
            .index = client->index,
            .token = client->token,
        };
        client->is_told = kvs_shard_notify(shard, &client->notice);
    }
    kvs_shard_client_close(shard, client);
}

void kvs_shard_client_settle(struct kvs_shard_client *client)
{
    if (client->state == KVS_SHARD_CLIENT_CLOSING && client->n_requests == 0 &&
        client->n_pending_receives == 0 && client->n_notes == 0)
        client->state = KVS_SHARD_CLIENT_FREE;
}
