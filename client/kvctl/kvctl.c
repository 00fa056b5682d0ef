/* What the commands share: opening clients, reporting failures, a clock. */
#define _GNU_SOURCE /* asprintf() */
#include "client/kvctl/kvctl.h"

#include "kvserver/base/json.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void kvctl_error(const struct kvctl *ctl, const char *format, ...)
{
    va_list arguments;

    fflush(stdout); /* in one terminal, in the right order */
    fputs("kvctl: ", stderr);
    if (ctl->command != NULL)
        fprintf(stderr, "%s: ", ctl->command);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

/* Returns the entry of the list that has this address, with the name that the node must call
 * itself; a copy of `nodes` if there is none, or it has no name.  Free with free().  Returns
 * NULL if out of memory. */
static char *entry_of(const struct kvctl *ctl, const char *nodes)
{
    char *entry;

    for (uint32_t i = 0; i < ctl->map->n_members; i++) {
        const struct kv_member *member = &ctl->map->members[i];

        if (strcmp(member->address, nodes) != 0 || member->name == NULL ||
            member->name[0] == '\0')
            continue;
        return asprintf(&entry, "%s=%s", member->name, member->address) < 0 ? NULL : entry;
    }
    return strdup(nodes);
}

kv_status_t kvctl_open_quietly(const struct kvctl *ctl,
                               const char *nodes,
                               struct kv_client **ret_client,
                               char *detail,
                               size_t detail_bytes)
{
    char *entry = entry_of(ctl, nodes);
    const struct kv_client_options options = {
        .nodes = entry,
        .transport = ctl->options.transport,
        .deadline_ms = (uint32_t)ctl->options.deadline_ms,
        .tenant = (uint32_t)ctl->options.tenant,
    };
    kv_status_t status;

    detail[0] = '\0';
    status = entry != NULL ? kv_client_open(&options, ret_client, detail, detail_bytes)
                           : KV_NO_MEMORY;
    free(entry);
    if (status != KV_OK && detail[0] == '\0')
        snprintf(detail, detail_bytes, "node %s: %s", nodes, kv_status_name(status));
    return status;
}

struct kv_client *kvctl_open(const struct kvctl *ctl)
{
    char detail[KVCTL_DETAIL_BYTES];
    struct kv_client *client;

    kv_status_t status =
        kvctl_open_quietly(ctl, ctl->options.server, &client, detail, sizeof(detail));

    if (status == KV_OK)
        return client;
    kvctl_error(ctl, "%s%s", detail, kvctl_next_step(status));
    return NULL;
}

struct kv_client *kvctl_open_node(const struct kvctl *ctl, const char *node)
{
    char detail[KVCTL_DETAIL_BYTES];
    struct kv_client *client;
    kv_status_t status = kvctl_open_quietly(ctl, node, &client, detail, sizeof(detail));

    if (status == KV_OK)
        return client;
    kvctl_node_failed(ctl, node, status, detail);
    return NULL;
}

const char *kvctl_state_name(kv_status_t status)
{
    return kv_status_name(status == KV_DEADLINE ? KV_UNREACHABLE : status);
}

const char *kvctl_next_step(kv_status_t status)
{
    return status == KV_UNREACHABLE ? "; start the node, or see kvctl doctor" : "";
}

const char *kvctl_without_node(const char *node, const char *detail)
{
    size_t bytes = strlen(node);

    if (strncmp(detail, "node ", 5) == 0 && strncmp(detail + 5, node, bytes) == 0 &&
        strncmp(detail + 5 + bytes, ": ", 2) == 0)
        return detail + 5 + bytes + 2;
    return detail;
}

void kvctl_node_failed(const struct kvctl *ctl,
                       const char *node,
                       kv_status_t status,
                       const char *detail)
{
    struct kv_json json;

    kvctl_error(ctl, "%s%s", detail, kvctl_next_step(status));
    if (!ctl->options.json)
        return;
    kv_json_begin(&json, stdout);
    kv_json_text(&json, "node", node);
    kv_json_text(&json, "state", kvctl_state_name(status));
    kv_json_text(&json, "detail", kvctl_without_node(node, detail));
    kv_json_end(&json);
}

int kvctl_each_node(const struct kvctl *ctl, kvctl_node_fn run)
{
    int result = KVCTL_DONE;

    for (unsigned i = 0; i < ctl->n_nodes; i++)
        if (!run(ctl, i))
            result = KVCTL_FAILED;
    return result;
}

void kvctl_harmless(char *name)
{
    for (uint8_t *at = (uint8_t *)name; at[0] != 0; at++)
        if (at[0] < ' ' || at[0] == 0x7f)
            at[0] = '?';
        else if (at[0] == 0xc2 && at[1] >= 0x80 && at[1] <= 0x9f) /* U+0080 to U+009F */
            at[0] = at[1] = '?';
}

bool kvctl_session_id(const struct kvctl *ctl, struct kv_id128 *ret_id)
{
    static const char digits[] = "0123456789abcdef";
    const char *text = ctl->operands[0];

    if (strlen(text) != 2 * sizeof(ret_id->bytes) ||
        strspn(text, digits) != 2 * sizeof(ret_id->bytes)) {
        kvctl_error(ctl,
                    "SESSION-ID: %s: must be 32 hexadecimal digits, as kvctl sessions has it",
                    text);
        return false;
    }
    for (size_t i = 0; i < sizeof(ret_id->bytes); i++)
        ret_id->bytes[i] = (uint8_t)((strchr(digits, text[2 * i]) - digits) << 4 |
                                     (strchr(digits, text[2 * i + 1]) - digits));
    return true;
}

double kvctl_now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}
