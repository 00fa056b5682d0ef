/* The commands of kvctl that print a table of each node, of their own name: status, sessions and
 * so on; and drain and close, which act on what the tables show.
 *
 * The node defines what a table contains; this file only prints it.  As JSON, a table of names
 * and values is one object, any other table is one object per line.
 */
#include "client/kvctl/kvctl.h"
#include "kvserver/base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    WIDE = 120, /* columns; more are not read as lines on a terminal */
};

kv_status_t kvctl_table(struct kv_client *client,
                        const char *name,
                        struct kv_op **ret_op,
                        const struct kv_table **ret_table)
{
    struct kv_op *op;
    kv_status_t status = kv_table_begin(client, 0, name, 0, &op);

    if (status != KV_OK)
        return status;
    status = kv_wait(op);
    if (status == KV_OK && kv_op_table(op) == NULL)
        status = KV_CORRUPT;
    if (status != KV_OK) {
        kv_op_free(op);
        return status;
    }
    *ret_op = op;
    *ret_table = kv_op_table(op);
    return KV_OK;
}

static const struct kv_cell *
cell_at(const struct kv_table *table, uint32_t row, uint32_t column)
{
    return &table->cells[(size_t)row * table->n_columns + column];
}

static bool is_name_value(const struct kv_table *table)
{
    return table->n_columns >= 2 && strcmp(table->columns[0], "name") == 0 &&
           strcmp(table->columns[1], "value") == 0;
}

/* ---- text -------------------------------------------------------------------------------- */

static bool counts_bytes(const char *name)
{
    static const char ending[] = "_bytes";
    size_t bytes = strlen(name);

    return strcmp(name, "bytes") == 0 ||
           (bytes >= sizeof(ending) &&
            strcmp(name + bytes - (sizeof(ending) - 1), ending) == 0);
}

/* The cell as it is shown. */
static void format_cell(
    const struct kv_table *table, uint32_t row, uint32_t column, char *text, size_t text_bytes)
{
    const struct kv_cell *cell = cell_at(table, row, column);
    const char *name = table->columns[column];
    char human[16];

    if (cell->text != NULL) {
        snprintf(text, text_bytes, "%s", cell->text);
        return;
    }
    if (is_name_value(table) && column == 1 && cell_at(table, row, 0)->text != NULL)
        name = cell_at(table, row, 0)->text;
    if (cell->number != floor(cell->number))
        snprintf(text, text_bytes, "%.1f", cell->number);
    else if (counts_bytes(name) && cell->number >= 1024 && cell->number < 0x1p63)
        snprintf(text, text_bytes, "%.0f (%s)", cell->number,
                 kv_config_format_size((uint64_t)cell->number, human, sizeof(human)));
    else
        snprintf(text, text_bytes, "%.0f", cell->number);
}

static size_t columns_of(const char *text)
{
    size_t columns = 0;

    while (*text != '\0') {
        unsigned bytes = kv_utf8_bytes(text);

        text += bytes > 0 ? bytes : 1;
        columns++;
    }
    return columns;
}

static void print_cell(const char *text, size_t width, bool is_right, bool is_last)
{
    size_t columns = columns_of(text);
    int blanks = width > columns ? (int)(width - columns) : 0;

    if (is_right)
        printf("%*s%s", blanks, "", text);
    else if (is_last)
        printf("%s", text);
    else
        printf("%s%*s", text, blanks, "");
    fputs(is_last ? "\n" : "  ", stdout);
}

/* A table as it is shown: a line of names, then its rows; or, on its side, a line for each
 * column, which begins with its name. */
struct view {
    const struct kv_table *table;
    bool is_turned;
    uint32_t n_lines, n_fields;
    size_t *widths; /* (n_fields) */
    size_t width;
};

static void format_field(
    const struct view *view, uint32_t line, uint32_t field, char *text, size_t text_bytes)
{
    const uint32_t row = view->is_turned ? field : line;
    const uint32_t column = view->is_turned ? line : field;

    if (row == 0)
        snprintf(text, text_bytes, "%s", view->table->columns[column]);
    else
        format_cell(view->table, row - 1, column, text, text_bytes);
}

static bool is_right(const struct view *view, uint32_t field)
{
    const struct kv_table *table = view->table;

    if (view->is_turned)
        return field > 0;
    for (uint32_t r = 0; r < table->n_rows; r++)
        if (cell_at(table, r, field)->text != NULL)
            return false;
    return table->n_rows > 0;
}

static struct view view_of(const struct kv_table *table, bool is_turned, size_t *widths)
{
    struct view view = {.table = table, .is_turned = is_turned, .widths = widths};
    char text[KVCTL_DETAIL_BYTES];

    view.n_lines = is_turned ? table->n_columns : table->n_rows + 1;
    view.n_fields = is_turned ? table->n_rows + 1 : table->n_columns;
    for (uint32_t field = 0; field < view.n_fields; field++) {
        widths[field] = 0;
        for (uint32_t line = 0; line < view.n_lines; line++) {
            format_field(&view, line, field, text, sizeof(text));
            if (columns_of(text) > widths[field])
                widths[field] = columns_of(text);
        }
        view.width += widths[field] + (field > 0 ? 2 : 0);
    }
    return view;
}

/* A wide table lies on its side, if that is narrower. */
static kv_status_t print_text(const struct kv_table *table)
{
    size_t *widths = calloc((size_t)table->n_columns + table->n_rows + 1, sizeof(*widths));
    char text[KVCTL_DETAIL_BYTES];
    struct view view, turned;

    if (widths == NULL)
        return KV_NO_MEMORY;
    view = view_of(table, false, widths);
    if (view.width > WIDE) {
        turned = view_of(table, true, widths + table->n_columns);
        if (turned.width < view.width)
            view = turned;
    }
    for (uint32_t line = 0; line < view.n_lines; line++)
        for (uint32_t field = 0; field < view.n_fields; field++) {
            format_field(&view, line, field, text, sizeof(text));
            print_cell(text, view.widths[field], is_right(&view, field),
                       field + 1 == view.n_fields);
        }
    free(widths);
    return KV_OK;
}

/* ---- JSON -------------------------------------------------------------------------------- */

static void add_cell(struct kv_json *json, const char *key, const struct kv_cell *cell)
{
    if (cell->text != NULL)
        kv_json_text(json, key, cell->text);
    else
        kv_json_number(json, key, cell->number);
}

static void print_json(const char *node, const struct kv_table *table)
{
    struct kv_json json;

    if (is_name_value(table)) {
        kv_json_begin(&json, stdout);
        kv_json_text(&json, "node", node);
        for (uint32_t r = 0; r < table->n_rows; r++)
            if (cell_at(table, r, 0)->text != NULL)
                add_cell(&json, cell_at(table, r, 0)->text, cell_at(table, r, 1));
        kv_json_end(&json);
        return;
    }
    for (uint32_t r = 0; r < table->n_rows; r++) {
        kv_json_begin(&json, stdout);
        kv_json_text(&json, "node", node);
        for (uint32_t c = 0; c < table->n_columns; c++)
            add_cell(&json, table->columns[c], cell_at(table, r, c));
        kv_json_end(&json);
    }
}

kv_status_t
kvctl_print_table(const struct kvctl *ctl, const char *node, const struct kv_table *table)
{
    if (!ctl->options.json)
        return print_text(table);
    print_json(node, table);
    return KV_OK;
}

/* ---- commands ---------------------------------------------------------------------------- */

/* What stands in the place of a node's table. */
static void print_failure(kv_status_t status, const char *detail)
{
    const struct kv_cell cells[] = {
        {.text = "state"},
        {.text = kvctl_state_name(status)},
        {.text = "detail"},
        {.text = detail},
    };
    const struct kv_table table = {.n_columns = 2,
                                   .n_rows = 2,
                                   .columns = (const char *const[]){"name", "value"},
                                   .cells = cells};

    (void)print_text(&table);
}

static bool show_node(const struct kvctl *ctl, unsigned node)
{
    const char *name = ctl->nodes[node];
    bool is_headed = !ctl->options.json && ctl->n_nodes > 1;
    char detail[KVCTL_DETAIL_BYTES];
    struct kv_client *client = NULL;
    const struct kv_table *table;
    struct kv_table shown;
    struct kv_op *op = NULL;
    kv_status_t status = kvctl_open_quietly(ctl, name, &client, detail, sizeof(detail));

    if (is_headed)
        printf("%snode %s\n", node > 0 ? "\n" : "", name);
    if (status == KV_OK) {
        status = kvctl_table(client, ctl->command, &op, &table);
        snprintf(detail, sizeof(detail), "%s", kv_client_detail(client));
    }
    if (status == KV_OK) {
        shown = *table;
        if (ctl->options.limit > 0 && ctl->options.limit < shown.n_rows &&
            !is_name_value(table))
            shown.n_rows = (uint32_t)ctl->options.limit;
        status = kvctl_print_table(ctl, name, &shown);
        if (status != KV_OK)
            snprintf(detail, sizeof(detail), "out of memory");
    }
    if (status != KV_OK) {
        if (is_headed)
            print_failure(status, kvctl_without_node(name, detail));
        kvctl_node_failed(ctl, name, status, detail);
    }
    kv_op_free(op);
    kv_client_close(client);
    return status == KV_OK;
}

int kvctl_tables_run(const struct kvctl *ctl)
{
    return kvctl_each_node(ctl, show_node);
}

static bool drain_node(const struct kvctl *ctl, unsigned index)
{
    const char *node = ctl->nodes[index];
    struct kv_client *client = kvctl_open_node(ctl, node);
    struct kv_json json;
    struct kv_op *op;
    kv_status_t status;

    if (client == NULL)
        return false;
    status = kv_drain_begin(client, 0, 0, &op);
    if (status == KV_OK)
        status = kv_finish(op);
    if (status != KV_OK)
        kvctl_node_failed(ctl, node, status, kv_client_detail(client));
    else if (ctl->options.json) {
        kv_json_begin(&json, stdout);
        kv_json_text(&json, "node", node);
        kv_json_bool(&json, "draining", true);
        kv_json_end(&json);
    } else
        printf(
            "node %s: draining: finishes outstanding requests, saves what is to be saved, and "
            "stops; its sessions end\n",
            node);
    kv_client_close(client);
    return status == KV_OK;
}

int kvctl_drain_run(const struct kvctl *ctl)
{
    return kvctl_each_node(ctl, drain_node);
}

/* Closes the session on one node.  Returns KV_NOT_FOUND, and says nothing, if it is not there. */
static kv_status_t
close_on(const struct kvctl *ctl, const char *node, const struct kv_id128 *session_id)
{
    struct kv_client *client = kvctl_open_node(ctl, node);
    struct kv_op *op;
    kv_status_t status;

    if (client == NULL)
        return KV_UNREACHABLE;
    status = kv_close_id_begin(client, 0, session_id, 0, &op);
    if (status == KV_OK)
        status = kv_finish(op);
    if (status != KV_OK && status != KV_NOT_FOUND)
        kvctl_node_failed(ctl, node, status, kv_client_detail(client));
    kv_client_close(client);
    return status;
}

int kvctl_close_run(const struct kvctl *ctl)
{
    struct kv_id128 id;
    uint32_t n_closed = 0, n_failed = 0;
    struct kv_json json;

    if (!kvctl_session_id(ctl, &id))
        return KVCTL_USAGE;
    for (uint32_t i = 0; i < ctl->n_nodes; i++) {
        const kv_status_t status = close_on(ctl, ctl->nodes[i], &id);

        n_closed += status == KV_OK;
        n_failed += status != KV_OK && status != KV_NOT_FOUND;
    }
    if (ctl->options.json) {
        kv_json_begin(&json, stdout);
        kv_json_text(&json, "session", ctl->operands[0]);
        kv_json_number(&json, "nodes_closed", n_closed);
        kv_json_end(&json);
    } else if (n_closed > 0) {
        printf("closed %s on %u of %u nodes\n", ctl->operands[0], n_closed, ctl->n_nodes);
    }
    if (n_closed == 0 && n_failed == 0)
        kvctl_error(ctl, "%s: no such session", ctl->operands[0]);
    return n_closed > 0 && n_failed == 0 ? KVCTL_DONE : KVCTL_FAILED;
}
