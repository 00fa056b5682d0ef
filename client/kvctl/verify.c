/* kvctl verify: a node verifies all that it has, and this tells how far it is and what it has found. */
#include "client/kvctl/kvctl.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    ASK_EVERY_MS = 200, /* a node that is not asked for seconds stops */
    N_COLUMNS = 8,
};

static const double PROGRESS_S = 1; /* without a word */

/* What a node has counted meanwhile. */
static struct kv_verify_counts since(const struct kv_verify_counts *first,
                                     const struct kv_verify_counts *last)
{
    return (struct kv_verify_counts){
        .blocks = last->blocks - first->blocks,
        .bytes = last->bytes - first->bytes,
        .bad = last->bad - first->bad,
        .mended = last->mended - first->mended,
        .lost = last->lost - first->lost,
        .unread = last->unread - first->unread,
        .refused = last->refused,
    };
}

static void show_progress(const char *node,
                          const struct kv_verification *first,
                          const struct kv_verification *last)
{
    char memory[16], disk[16], all[16];

    fprintf(stderr, "\rnode %s: %s in memory, %s of %s on disk ", node,
            kv_config_format_size(last->memory.all_bytes, memory, sizeof(memory)),
            kv_config_format_size(last->disk.bytes - first->disk.bytes, disk, sizeof(disk)),
            kv_config_format_size(last->disk.all_bytes, all, sizeof(all)));
}

static kv_status_t
ask(struct kv_client *client, uint64_t since_us, struct kv_verification *ret_verification)
{
    struct kv_op *op = NULL;
    kv_status_t status = kv_verify_begin(client, 0, since_us, 0, &op);

    if (status == KV_OK)
        status = kv_wait(op);
    if (status == KV_OK)
        *ret_verification = *kv_op_verification(op);
    kv_op_free(op);
    return status;
}

/* Asks until all is verified. */
static kv_status_t go_on(struct kv_client *client,
                         const char *node,
                         struct kv_verification *ret_first,
                         struct kv_verification *ret_last)
{
    const double begun_s = kvctl_now_s();
    const bool is_watched = isatty(STDERR_FILENO) != 0;
    bool has_shown = false;
    kv_status_t status = ask(client, 0, ret_first);

    *ret_last = *ret_first;
    while (status == KV_OK && !ret_last->is_done) {
        usleep(ASK_EVERY_MS * 1000);
        status = ask(client, ret_first->since_us, ret_last);
        if (status == KV_OK && is_watched && kvctl_now_s() - begun_s > PROGRESS_S) {
            show_progress(node, ret_first, ret_last);
            has_shown = true;
        }
    }
    if (has_shown)
        fputc('\n', stderr);
    return status;
}

static void fill(struct kv_cell *row, const char *tier, const struct kv_verify_counts *counts)
{
    const uint64_t numbers[] = {counts->blocks, counts->bytes,  counts->bad,    counts->mended,
                                counts->lost,   counts->unread, counts->refused};

    row[0].text = tier;
    for (size_t i = 0; i < N_COLUMNS - 1; i++)
        row[1 + i].number = (double)numbers[i];
}

static bool verify_node(const struct kvctl *ctl, unsigned index)
{
    static const char *const columns[N_COLUMNS] = {"tier",   "blocks", "bytes",  "bad",
                                                   "mended", "lost",   "unread", "refused"};
    const char *node = ctl->nodes[index];
    struct kv_client *client = kvctl_open_node(ctl, node);
    struct kv_cell cells[2 * N_COLUMNS] = {{0}};
    const struct kv_table table = {
        .n_columns = N_COLUMNS, .n_rows = 2, .columns = columns, .cells = cells};
    struct kv_verification first = {0}, last = {0};
    struct kv_verify_counts memory, disk;
    kv_status_t status;

    if (client == NULL)
        return false;
    if (!ctl->options.json && ctl->n_nodes > 1)
        printf("%snode %s\n", index > 0 ? "\n" : "", node);
    status = go_on(client, node, &first, &last);
    if (status != KV_OK)
        kvctl_node_failed(ctl, node, status, kv_client_detail(client));
    kv_client_close(client);
    if (status != KV_OK)
        return false;
    memory = since(&first.memory, &last.memory);
    memory.blocks = last.memory.blocks;
    memory.bytes = last.memory.bytes;
    disk = since(&first.disk, &last.disk);
    fill(cells, "memory", &memory);
    fill(cells + N_COLUMNS, "disk", &disk);
    if (kvctl_print_table(ctl, node, &table) != KV_OK) {
        kvctl_node_failed(ctl, node, KV_NO_MEMORY, "out of memory");
        return false;
    }
    if (disk.lost + disk.unread + memory.refused == 0)
        return true;
    kvctl_error(
        ctl,
        "node %s: %llu blocks or pieces of objects on disk are lost, %llu could not be "
        "verified; %llu rows and pieces of objects in memory are refused until they are "
        "put again",
        node, (unsigned long long)disk.lost, (unsigned long long)disk.unread,
        (unsigned long long)memory.refused);
    return false;
}

int kvctl_verify_run(const struct kvctl *ctl)
{
    return kvctl_each_node(ctl, verify_node);
}
