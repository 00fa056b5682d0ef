/* kvctl save: nodes save on disk what a session shares by name, without delay. */
#include "client/kvctl/kvctl.h"
#include "kvserver/base/json.h"

#include <stdio.h>

/* What nodes have said of the session. */
struct saved {
    uint32_t n_nodes, n_failed;
    uint32_t tokens; /* the least; UINT32_MAX: none has units of it */
};

static void save_on(const struct kvctl *ctl,
                    const char *node,
                    const struct kv_id128 *session_id,
                    struct saved *saved)
{
    struct kv_client *client = kvctl_open_node(ctl, node);
    struct kv_op *op = NULL;
    kv_status_t status;

    if (client == NULL) {
        saved->n_failed++;
        return;
    }
    status = kv_save_id_begin(client, 0, session_id, 0, &op);
    if (status == KV_OK)
        status = kv_wait(op);
    if (status == KV_OK) {
        saved->n_nodes++;
        if (kv_op_tokens(op) < saved->tokens)
            saved->tokens = kv_op_tokens(op);
    } else if (status != KV_NOT_FOUND) {
        saved->n_failed++;
        kvctl_node_failed(ctl, node, status, kv_client_detail(client));
    }
    kv_op_free(op);
    kv_client_close(client);
}

static void print_saved(const struct kvctl *ctl, const struct saved *saved)
{
    struct kv_json json;

    if (!ctl->options.json) {
        printf("saved %u tokens of %s on %u of %u nodes\n", saved->tokens, ctl->operands[0],
               saved->n_nodes, ctl->n_nodes);
        return;
    }
    kv_json_begin(&json, stdout);
    kv_json_text(&json, "session", ctl->operands[0]);
    kv_json_number(&json, "nodes_saved", saved->n_nodes);
    kv_json_number(&json, "tokens", saved->tokens);
    kv_json_end(&json);
}

int kvctl_save_run(const struct kvctl *ctl)
{
    struct saved saved = {.tokens = UINT32_MAX};
    struct kv_id128 id;

    if (!kvctl_session_id(ctl, &id))
        return KVCTL_USAGE;
    for (uint32_t i = 0; i < ctl->n_nodes; i++)
        save_on(ctl, ctl->nodes[i], &id, &saved);
    /* If one node failed, what all nodes have saved is unknown. */
    if (saved.n_failed > 0)
        return KVCTL_FAILED;
    if (saved.n_nodes == 0) {
        kvctl_error(ctl, "%s: no such session", ctl->operands[0]);
        return KVCTL_FAILED;
    }
    if (saved.tokens == UINT32_MAX)
        saved.tokens = 0;
    print_saved(ctl, &saved);
    return KVCTL_DONE;
}
