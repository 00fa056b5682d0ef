#include "client/node.h"

#include "client/loop.h"
#include "client/state.h"

#include <stdio.h>

void kvc_node_fail(struct kvc_node *node, kv_status_t status, const char *why)
{
    if (node->failure != KV_OK)
        return;
    node->failure = status;
    snprintf(node->failure_text, sizeof(node->failure_text), "%s", why);
    node->client->n_failed++;
}

void kvc_node_mark_alive(struct kvc_node *node)
{
    node->unanswered_since_us = node->n_requests > 0 ? node->client->loop.now_us : 0;
}
