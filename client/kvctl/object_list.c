/* kvctl objects and delete --prefix: a node's objects, some at a time. */
#include "client/kvctl/kvctl.h"
#include "kvserver/base/json.h"

#include <stdlib.h>
#include <string.h>

enum {
    PAGE = 1000, /* objects asked for at once */
    N_COLUMNS = 7,
};

/* Objects of one node, list after list. */
struct listing {
    const struct kvctl *ctl;
    struct kv_client *client;
    struct kv_object_list_options options;
    uint64_t n_left;                   /* to be listed */
    uint64_t n, bytes;                 /* so far, or deleted */
    const struct kv_object_list *list; /* the present one */
};

/* Gets the next list, and hands it to `take`.  Fails as that does. */
static kv_status_t next_list(struct listing *listing,
                             kv_status_t (*take)(struct listing *listing, const char *node),
                             const char *node)
{
    struct kv_op *op;
    kv_status_t status;

    listing->options.limit = listing->n_left < PAGE ? (uint32_t)listing->n_left : PAGE;
    status = kv_object_list_begin(listing->client, 0, &listing->options, 0, &op);
    if (status != KV_OK)
        return status;
    status = kv_wait(op);
    listing->list = kv_op_object_list(op);
    if (status == KV_OK) {
        listing->options.from = listing->list->next;
        status = take(listing, node);
    }
    if (status == KV_OK && listing->list->is_last)
        listing->n_left = 0;
    kv_op_free(op);
    return status;
}

static kv_status_t print_list(struct listing *listing, const char *node)
{
    static const char *const columns[N_COLUMNS] = {
        "name", "bytes", "age_s", "ttl_left_s", "evictable", "pinned", "bad_pieces"};
    const struct kv_object_list *list = listing->list;
    const struct kv_table table = {
        .n_columns = N_COLUMNS, .n_rows = list->n_objects, .columns = columns};
    struct kv_table filled = table;
    struct kv_cell *cells;
    kv_status_t status;
    char(*names)[KV_NAME_BYTES_MAX + 1];

    if (list->n_objects == 0)
        return KV_OK;
    cells = calloc(list->n_objects, N_COLUMNS * sizeof(*cells));
    names = calloc(list->n_objects, sizeof(*names));
    if (cells == NULL || names == NULL) {
        free(cells);
        free(names);
        return KV_NO_MEMORY;
    }
    for (uint32_t i = 0; i < list->n_objects; i++) {
        const struct kv_object_info *object = &list->objects[i];
        struct kv_cell *row = &cells[(size_t)i * N_COLUMNS];

        snprintf(names[i], sizeof(names[i]), "%s", object->name);
        if (!listing->ctl->options.json) /* which escapes them */
            kvctl_harmless(names[i]);
        row[0].text = names[i];
        row[1].number = (double)object->bytes;
        row[2].number = (double)object->age_ms / 1e3;
        if (object->ttl_left_ms == UINT64_MAX)
            row[3].text = "none";
        else
            row[3].number = (double)object->ttl_left_ms / 1e3;
        row[4].text = object->evictable ? "yes" : "no";
        row[5].text = object->pinned ? "yes" : "no";
        row[6].number = object->bad_pieces;
    }
    filled.cells = cells;
    status = kvctl_print_table(listing->ctl, node, &filled);
    free(cells);
    free(names);
    listing->n += list->n_objects;
    listing->n_left -= list->n_objects;
    return status;
}

static kv_status_t count_list(struct listing *listing, const char *node)
{
    (void)node;
    for (uint32_t i = 0; i < listing->list->n_objects; i++)
        listing->bytes += listing->list->objects[i].bytes;
    listing->n += listing->list->n_objects + listing->list->n_deleted;
    listing->bytes += listing->list->bytes_deleted;
    return KV_OK;
}

/* Goes through all lists of a node.  Returns false after a message if that failed. */
static bool go_through(struct listing *listing,
                       const char *node,
                       kv_status_t (*take)(struct listing *listing, const char *node))
{
    kv_status_t status = KV_OK;

    listing->options.from = (struct kv_object_cursor){0};
    listing->client = kvctl_open_node(listing->ctl, node);
    if (listing->client == NULL)
        return false;
    while (status == KV_OK && listing->n_left > 0)
        status = next_list(listing, take, node);
    if (status != KV_OK)
        kvctl_node_failed(listing->ctl, node, status,
                          status == KV_NO_MEMORY ? "out of memory"
                                                 : kv_client_detail(listing->client));
    kv_client_close(listing->client);
    return status == KV_OK;
}

int kvctl_objects_run(const struct kvctl *ctl)
{
    const uint64_t limit = ctl->options.limit > 0 ? ctl->options.limit : UINT64_MAX;
    struct listing listing = {.ctl = ctl, .options.prefix = ctl->options.prefix};
    int result = KVCTL_DONE;

    for (uint32_t i = 0; i < ctl->n_nodes && listing.n < limit; i++) {
        if (!ctl->options.json && ctl->n_nodes > 1)
            printf("%snode %s\n", i > 0 ? "\n" : "", ctl->nodes[i]);
        listing.n_left = limit - listing.n;
        if (!go_through(&listing, ctl->nodes[i], print_list))
            result = KVCTL_FAILED;
    }
    return result;
}

int kvctl_delete_prefix_run(const struct kvctl *ctl)
{
    struct listing listing = {
        .ctl = ctl, .options = {.prefix = ctl->options.prefix, .deletes = ctl->options.yes}};
    struct kv_json json;
    int result = KVCTL_DONE;

    for (uint32_t i = 0; i < ctl->n_nodes; i++) {
        listing.n_left = UINT64_MAX;
        if (!go_through(&listing, ctl->nodes[i], count_list))
            result = KVCTL_FAILED;
    }
    if (ctl->options.json) {
        kv_json_begin(&json, stdout);
        kv_json_text(&json, "prefix", ctl->options.prefix);
        kv_json_number(&json, ctl->options.yes ? "deleted" : "found", (double)listing.n);
        kv_json_number(&json, "bytes", (double)listing.bytes);
        kv_json_end(&json);
    } else {
        printf("%s %llu objects, %llu bytes\n", ctl->options.yes ? "deleted" : "found",
               (unsigned long long)listing.n, (unsigned long long)listing.bytes);
    }
    if (ctl->options.yes || result != KVCTL_DONE)
        return result;
    kvctl_error(ctl, "%s: nothing is deleted without --yes", ctl->options.prefix);
    return KVCTL_USAGE;
}
