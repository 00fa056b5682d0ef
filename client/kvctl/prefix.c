/* kvctl pin, unpin, evict and hint: what nodes do with a prefix that they keep. */
#include "client/kvctl/kvctl.h"
#include "kvserver/base/json.h"

#include <stdlib.h>
#include <string.h>

enum {
    NAME_DIGITS = 32,
    TOLD_DIGITS = 16, /* of a prefix's name, in tables; zeros follow them */
};

/* Reads 32 hexadecimal digits or, of a prefix, those that tables tell. */
static bool read_name(const char *text, bool is_prefix, struct kv_id128 *ret_name)
{
    static const char digits[] = "0123456789abcdef";

    const size_t n = strlen(text);

    if (n != NAME_DIGITS && !(is_prefix && n == TOLD_DIGITS))
        return false;
    for (size_t i = 0; i < n; i++) {
        const char *digit =
            strchr(digits, text[i] >= 'A' && text[i] <= 'F' ? text[i] + 32 : text[i]);

        if (digit == NULL)
            return false;
        ret_name->bytes[i / 2] = (uint8_t)(ret_name->bytes[i / 2] << 4 | (digit - digits));
    }
    return true;
}

static enum kv_prefix_verb verb_of(const struct kvctl *ctl)
{
    static const struct {
        const char *command;
        enum kv_prefix_verb verb;
    } verbs[] = {
        {"pin", KV_PREFIX_PIN},
        {"unpin", KV_PREFIX_UNPIN},
        {"evict", KV_PREFIX_EVICT},
    };

    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++)
        if (strcmp(verbs[i].command, ctl->command) == 0)
            return verbs[i].verb;
    return KV_PREFIX_HINT;
}

static void print_blocks(const struct kvctl *ctl, const char *node, uint64_t blocks)
{
    struct kv_json json;

    if (!ctl->options.json) {
        printf("node %s: %s: %llu blocks\n", node, ctl->command, (unsigned long long)blocks);
        return;
    }
    kv_json_begin(&json, stdout);
    kv_json_text(&json, "node", node);
    kv_json_number(&json, "blocks", (double)blocks);
    kv_json_end(&json);
}

static uint64_t n_found;

static bool say_to_node(const struct kvctl *ctl, unsigned index)
{
    const char *node = ctl->nodes[index];
    struct kv_client *client = kvctl_open_node(ctl, node);
    struct kv_id128 name = {{0}};
    struct kv_prefix prefix = {.verb = verb_of(ctl), .for_ms = (uint32_t)ctl->options.for_ms};
    struct kv_op *op = NULL;
    kv_status_t status;

    if (client == NULL)
        return false;
    (void)read_name(ctl->operands[0], !ctl->options.session, &name);
    if (ctl->options.session)
        prefix.session_id = &name;
    else
        prefix.name = &name;
    status = kv_prefix_begin(client, 0, &prefix, 0, &op);
    if (status == KV_OK)
        status = kv_wait(op);
    if (status != KV_OK) {
        kvctl_node_failed(ctl, node, status, kv_client_detail(client));
    } else {
        n_found += kv_op_blocks(op);
        print_blocks(ctl, node, kv_op_blocks(op));
    }
    kv_op_free(op);
    kv_client_close(client);
    return status == KV_OK;
}

int kvctl_prefix_run(const struct kvctl *ctl)
{
    struct kv_id128 name;
    int result;

    if (!read_name(ctl->operands[0], !ctl->options.session, &name)) {
        kvctl_error(ctl, "NAME: %.64s: must be %s32 hexadecimal digits", ctl->operands[0],
                    ctl->options.session ? "" : "16 or ");
        return KVCTL_USAGE;
    }
    if (verb_of(ctl) == KV_PREFIX_HINT && ctl->options.for_ms > KV_PREFIX_HINT_MAX_MS) {
        kvctl_error(ctl, "option: --for-ms: at most %u for a hint", KV_PREFIX_HINT_MAX_MS);
        return KVCTL_USAGE;
    }
    result = kvctl_each_node(ctl, say_to_node);
    if (result == KVCTL_DONE && n_found == 0) {
        kvctl_error(ctl, "%s: %s", ctl->operands[0],
                    ctl->options.session ? "no node keeps a full block of that session"
                                         : "no node keeps it");
        result = KVCTL_FAILED;
    }
    return result;
}
