#define _GNU_SOURCE /* getline */
#include "tests/support/recorded_messages.h"

#include "kvserver/store/node.h"
#include "tests/support/recorded.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROW_BYTES_MAX = 4096,
    RUN_LEAST = 4,     /* equal bytes that are written as one and their number */
    LINE_COLUMNS = 92, /* a line that is longer is ended */
};

/* ---- rows -------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Pieces of 16 bits whose exponent is small and not 0: in fp16, from 1/2 to 1. */
void recorded_row(
    void *row, size_t bytes, uint32_t model, uint32_t layer, uint32_t head, uint32_t token)
{
    const uint64_t seed =
        (uint64_t)model << 56 ^ (uint64_t)layer << 48 ^ (uint64_t)head << 40 ^ token;
    uint8_t *to = row;

    for (size_t i = 0; i + 1 < bytes; i += 2) {
        const uint16_t word = (uint16_t)((mix(mix(seed) + i) & 0x83ff) | 0x3800);

        memcpy(to + i, &word, sizeof(word));
    }
}

/* ---- the list ---------------------------------------------------------------------------- */

struct recorded_message *recorded_add(struct recorded_messages *list, size_t bytes)
{
    struct recorded_message *added;

    if (list->n == list->room) {
        list->room = list->room > 0 ? 2 * list->room : 64;
        list->messages = realloc(list->messages, list->room * sizeof(list->messages[0]));
        if (list->messages == NULL)
            abort();
    }
    added = &list->messages[list->n++];
    *added = (struct recorded_message){.bytes = bytes, .data = malloc(bytes > 0 ? bytes : 1)};
    if (added->data == NULL)
        abort();
    return added;
}

void recorded_free(struct recorded_messages *list)
{
    for (size_t i = 0; i < list->n; i++)
        free(list->messages[i].data);
    free(list->messages);
    memset(list, 0, sizeof(*list));
}

/* ---- to text ----------------------------------------------------------------------------- */

/* Row after row of all boxes, to find them in messages. */
struct made_rows {
    const struct recorded_box *boxes;
    uint8_t **rows; /* one piece of memory for each box */
};

static size_t n_boxes(const struct recorded_box *boxes)
{
    size_t n = 0;

    while (boxes[n].n_tokens > 0)
        n++;
    return n;
}

static void make_rows(struct made_rows *made, const struct recorded_box *boxes)
{
    const size_t n = n_boxes(boxes);

    made->boxes = boxes;
    made->rows = calloc(n, sizeof(made->rows[0]));
    for (size_t i = 0; made->rows != NULL && i < n; i++) {
        const struct recorded_box *box = &boxes[i];

        made->rows[i] = malloc((size_t)box->n_tokens * box->row_bytes);
        for (uint32_t j = 0; made->rows[i] != NULL && j < box->n_tokens; j++)
            recorded_row(made->rows[i] + (size_t)j * box->row_bytes, box->row_bytes, box->model,
                         box->layer, box->head, j);
        if (made->rows[i] == NULL)
            abort();
    }
    if (made->rows == NULL)
        abort();
}

static void free_rows(struct made_rows *made)
{
    for (size_t i = 0; made->boxes[i].n_tokens > 0; i++)
        free(made->rows[i]);
    free(made->rows);
}

/* How many rows of one box begin here, from which token on; 0: none does. */
static uint32_t find_rows(const struct made_rows *made,
                          const uint8_t *data,
                          size_t bytes,
                          size_t *ret_box,
                          uint32_t *ret_token)
{
    for (size_t i = 0; made->boxes[i].n_tokens > 0; i++) {
        const struct recorded_box *box = &made->boxes[i];
        const size_t size = box->row_bytes;
        const uint8_t *rows = made->rows[i];

        for (uint32_t token = 0; size <= bytes && token < box->n_tokens; token++) {
            uint32_t n = 0;

            while (token + n < box->n_tokens && (n + 1) * size <= bytes &&
                   memcmp(rows + (token + n) * size, data + n * size, size) == 0)
                n++;
            if (n > 0) {
                *ret_box = i;
                *ret_token = token;
                return n;
            }
        }
    }
    return 0;
}

static size_t run_at(const uint8_t *data, size_t bytes)
{
    size_t n = 1;

    while (n < bytes && data[n] == data[0])
        n++;
    return n;
}

static void print_bytes(FILE *out, const struct made_rows *made, const uint8_t *data, size_t n)
{
    int column = 0, group = 0;
    size_t at = 0, box;
    uint32_t token;

    while (at < n) {
        const uint32_t n_rows = find_rows(made, data + at, n - at, &box, &token);
        const size_t run = run_at(data + at, n - at);

        if (column > 0 && (n_rows > 0 || column > LINE_COLUMNS)) {
            fputc('\n', out);
            column = group = 0;
        }
        if (n_rows > 0) {
            const struct recorded_box *of = &made->boxes[box];

            fprintf(out, "  rows %u %u %u %u %u\n", of->model, of->layer, of->head, token,
                    n_rows);
            at += (size_t)n_rows * of->row_bytes;
        } else if (run >= RUN_LEAST) {
            column += fprintf(out, "%s%02x*%zu", column == 0 ? "  " : " ", data[at], run);
            group = 0;
            at += run;
        } else {
            const char *before = column == 0 ? "  " : group % 4 == 0 ? " " : "";

            column += fprintf(out, "%s%02x", before, data[at++]);
            group++;
        }
        if (column == 0)
            group = 0;
    }
    if (column > 0)
        fputc('\n', out);
}

/* "put request", "query reply: deadline"; of what has another header, nothing. */
static const char *name_of(const struct recorded_message *message)
{
    static const char *const kinds[] = {"message", "request", "reply", "data", "reply's data"};
    static char text[128];
    struct kv_wire_header header;
    const char *op;

    if (message->header_bytes != sizeof(header))
        return "";
    memcpy(&header, message->data, sizeof(header));
    op = header.op < KV_OP_COUNT ? kvs_op_name((enum kv_op_id)header.op) : NULL;
    snprintf(text, sizeof(text), "%s %s%s%s", op != NULL ? op : "unknown",
             kinds[header.kind <= KV_WIRE_BULK_REPLY ? header.kind : 0],
             header.status != KV_OK ? ": " : "",
             header.status != KV_OK ? kv_status_name((kv_status_t)header.status) : "");
    return text;
}

bool recorded_save(const char *path,
                   const char *head,
                   const struct recorded_messages *list,
                   const struct recorded_box *boxes)
{
    FILE *file = fopen(path, "w");
    struct made_rows made;
    bool failed;

    if (file == NULL) {
        perror(path);
        return false;
    }
    make_rows(&made, boxes);
    recorded_print_head(file, head);
    for (size_t i = 0; i < list->n; i++) {
        const struct recorded_message *message = &list->messages[i];
        const char *name = name_of(message);

        fprintf(file, "\n%s%s%smessage %zu round %llu at %llu from %u to %u header %zu\n",
                name[0] != '\0' ? "# " : "", name, name[0] != '\0' ? "\n" : "", i,
                (unsigned long long)message->round, (unsigned long long)message->at_us,
                message->from, message->to, message->header_bytes);
        print_bytes(file, &made, message->data, message->header_bytes);
        print_bytes(file, &made, message->data + message->header_bytes,
                    message->bytes - message->header_bytes);
    }
    free_rows(&made);
    failed = ferror(file) != 0;
    if (fclose(file) != 0 || failed) {
        perror(path);
        return false;
    }
    return true;
}

/* ---- from text --------------------------------------------------------------------------- */

static void append(struct recorded_message *message, const void *data, size_t bytes)
{
    message->data = realloc(message->data, message->bytes + bytes + 1);
    if (message->data == NULL)
        abort();
    memcpy(message->data + message->bytes, data, bytes);
    message->bytes += bytes;
}

/* "0500010b" or "00*4". */
static bool read_token(struct recorded_message *message, const char *token)
{
    unsigned value;
    size_t count;
    int end = 0;

    if (sscanf(token, "%2x*%zu%n", &value, &count, &end) == 2 && token[end] == '\0') {
        const uint8_t byte = (uint8_t)value;

        for (size_t i = 0; i < count; i++)
            append(message, &byte, 1);
        return true;
    }
    for (; *token != '\0'; token += 2) {
        if (token[1] == '\0' || sscanf(token, "%2x%n", &value, &end) != 1 || end != 2)
            return false;
        const uint8_t byte = (uint8_t)value;

        append(message, &byte, 1);
    }
    return true;
}

static bool
read_rows(struct recorded_message *message, const struct recorded_box *boxes, const char *line)
{
    uint8_t row[ROW_BYTES_MAX];
    uint32_t model, layer, head, token, n;

    if (sscanf(line, " rows %u %u %u %u %u", &model, &layer, &head, &token, &n) != 5)
        return false;
    for (; boxes->n_tokens > 0; boxes++) {
        if (boxes->model != model || boxes->layer != layer || boxes->head != head ||
            boxes->row_bytes > sizeof(row))
            continue;
        for (uint32_t i = 0; i < n; i++) {
            recorded_row(row, boxes->row_bytes, model, layer, head, token + i);
            append(message, row, boxes->row_bytes);
        }
        return true;
    }
    return false;
}

static bool
read_line(struct recorded_messages *list, const struct recorded_box *boxes, char *line)
{
    struct recorded_message *last = list->n > 0 ? &list->messages[list->n - 1] : NULL;
    unsigned long long round, at_us;
    unsigned from, to;
    size_t number, header_bytes;
    char *state = NULL;

    if (sscanf(line, "message %zu round %llu at %llu from %u to %u header %zu", &number, &round,
               &at_us, &from, &to, &header_bytes) == 6) {
        if (number != list->n)
            return false;
        last = recorded_add(list, 0);
        last->round = round;
        last->at_us = at_us;
        last->from = from;
        last->to = to;
        last->header_bytes = header_bytes;
        return true;
    }
    if (last == NULL)
        return false;
    if (strstr(line, "rows") != NULL)
        return read_rows(last, boxes, line);
    for (char *token = strtok_r(line, " \n", &state); token != NULL;
         token = strtok_r(NULL, " \n", &state))
        if (!read_token(last, token))
            return false;
    return true;
}

bool recorded_load(const char *path,
                   const struct recorded_box *boxes,
                   struct recorded_messages *ret_list)
{
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t room = 0;
    unsigned number = 0;
    bool good = true;

    memset(ret_list, 0, sizeof(*ret_list));
    if (file == NULL) {
        perror(path);
        return false;
    }
    while (good && getline(&line, &room, file) > 0) {
        number++;
        if (line[0] != '#' && line[0] != '\n')
            good = read_line(ret_list, boxes, line);
    }
    for (size_t i = 0; good && i < ret_list->n; i++)
        good = ret_list->messages[i].bytes >= ret_list->messages[i].header_bytes;
    if (!good)
        fprintf(stderr, "%s:%u: not a recorded message\n", path, number);
    free(line);
    fclose(file);
    return good;
}

/* ---- comparing --------------------------------------------------------------------------- */

struct field {
    size_t offset;
    const char *name;
};

#define HEADER(name)                                 \
    {                                                \
        offsetof(struct kv_wire_header, name), #name \
    }
static const struct field header_fields[] = {
    HEADER(version),        HEADER(kind),         HEADER(op),
    HEADER(status),         HEADER(request_id),   HEADER(client_index),
    HEADER(session_index),  HEADER(generation),   HEADER(tenant),
    HEADER(token),          HEADER(client_token), HEADER(epoch),
    HEADER(deadline_us),    HEADER(flags),        HEADER(body_bytes),
    HEADER(bulk_bytes),     HEADER(body_crc),     HEADER(n_units),
    HEADER(token_begin),    HEADER(token_count),  HEADER(snapshot),
    HEADER(layer),          HEADER(offset),       HEADER(object_bytes),
    HEADER(object_version), HEADER(object_crc),   HEADER(n_rows),
    HEADER(name_bytes),     HEADER(put_number),   HEADER(put_settled),
    HEADER(header_crc),
};

#define INDEX(name)                                          \
    {                                                        \
        offsetof(struct kv_wire_index, name), "index." #name \
    }
#define INDEXED(name)                                                 \
    {                                                                 \
        offsetof(struct kv_wire_index_result, name), "indexed." #name \
    }
#define QUERY(name)                                          \
    {                                                        \
        offsetof(struct kv_wire_query, name), "query." #name \
    }
#define FOUND(name)                                                 \
    {                                                               \
        offsetof(struct kv_wire_query_result, name), "found." #name \
    }
static const struct field index_fields[] = {
    INDEX(chapter_blocks), INDEX(m),         INDEX(bits),
    INDEX(iterations),     INDEX(budget_us), INDEX(seed),
    INDEX(flags),          INDEX(summaries), INDEX(summary_blocks),
};
static const struct field indexed_fields[] = {
    INDEXED(rows),      INDEXED(rows_coded), INDEXED(n_found),  INDEXED(n_trained),
    INDEXED(n_pending), INDEXED(iterations), INDEXED(train_us),
};
static const struct field query_fields[] = {
    QUERY(answer),    QUERY(merge),          QUERY(n_queries), QUERY(k),
    QUERY(rerank),    QUERY(scale),          QUERY(n_ranges),  QUERY(flags),
    QUERY(summaries), QUERY(summary_blocks), QUERY(selection), QUERY(fraction),
    QUERY(reserved),
};
static const struct field found_fields[] = {
    FOUND(layer),           FOUND(kv_head),    FOUND(n_ids),       FOUND(n_scored_by_code),
    FOUND(n_scored_by_key), FOUND(n_reranked), FOUND(n_chapters),  FOUND(recall),
    FOUND(committed),       FOUND(n_selected), FOUND(n_estimated),
};

#define FIELD_AT(fields, offset) field_at(fields, sizeof(fields) / sizeof(fields[0]), offset)
static const char *field_at(const struct field *fields, size_t n, size_t offset)
{
    const char *name = fields[0].name;

    for (size_t i = 0; i < n && fields[i].offset <= offset; i++)
        name = fields[i].name;
    return name;
}

/* What a byte of a body is of. */
static const char *part_of(const struct kv_wire_header *header, size_t offset)
{
    const bool is_request = header->kind == KV_WIRE_REQUEST;
    const size_t units = header->n_units * sizeof(struct kv_wire_unit);
    const size_t answer = sizeof(struct kv_wire_query_times);
    const size_t n_units = header->n_units;

    if (header->op == KV_OP_INDEX && is_request && offset < sizeof(struct kv_wire_index))
        return FIELD_AT(index_fields, offset);
    if (header->op == KV_OP_INDEX && !is_request &&
        offset < sizeof(struct kv_wire_index_result))
        return FIELD_AT(indexed_fields, offset);
    if (header->op == KV_OP_QUERY && is_request && offset < sizeof(struct kv_wire_query))
        return FIELD_AT(query_fields, offset);
    if (header->op == KV_OP_QUERY && !is_request && offset < answer)
        return offset < 4 ? "answer.waited_us" : "answer.worked_us";
    if (header->op == KV_OP_QUERY && !is_request &&
        offset < answer + n_units * sizeof(struct kv_wire_query_result))
        return FIELD_AT(found_fields, (offset - answer) % sizeof(struct kv_wire_query_result));
    if (header->op == KV_OP_QUERY && !is_request)
        return "ids and what follows them";
    if (header->op != KV_OP_PUT && header->op != KV_OP_APPEND)
        return "body";
    if (!is_request || offset < units)
        return is_request ? "units" : "body";
    return offset < units + n_units * header->token_count * sizeof(uint32_t) ? "crcs" : "rows";
}

static bool is_masked(const struct kv_wire_header *header, size_t offset)
{
    const char *field;

    if (header->kind != KV_WIRE_REPLY || header->status == KV_OK)
        return false;
    if (offset >= sizeof(*header))
        return true;
    field = FIELD_AT(header_fields, offset);
    return strcmp(field, "body_bytes") == 0 || strcmp(field, "body_crc") == 0 ||
           strcmp(field, "header_crc") == 0;
}

/* Checksums follow from the other bytes, which say more. */
static bool is_checksum(size_t offset)
{
    const char *field =
        offset < sizeof(struct kv_wire_header) ? FIELD_AT(header_fields, offset) : "";

    return strcmp(field, "body_crc") == 0 || strcmp(field, "header_crc") == 0;
}

/* The first byte that differs, of checksums or of all else; SIZE_MAX: none does. */
static size_t first_other(const struct recorded_message *recorded,
                          const struct recorded_message *now,
                          bool checksums)
{
    const size_t most = recorded->bytes > now->bytes ? recorded->bytes : now->bytes;
    struct kv_wire_header header;

    memcpy(&header, recorded->data, sizeof(header));
    for (size_t i = 0; i < most; i++)
        if (is_checksum(i) == checksums && !is_masked(&header, i) &&
            (i >= recorded->bytes || i >= now->bytes || recorded->data[i] != now->data[i]))
            return i;
    return SIZE_MAX;
}

static uint8_t byte_at(const struct recorded_message *message, size_t offset)
{
    return offset < message->bytes ? message->data[offset] : 0;
}

static bool is_same(size_t number,
                    const struct recorded_message *recorded,
                    const struct recorded_message *now)
{
    struct kv_wire_header header;
    size_t at;

    if (recorded->from != now->from || recorded->to != now->to ||
        recorded->header_bytes != sizeof(header) || now->header_bytes != sizeof(header)) {
        fprintf(stderr, "message %zu: port %u to %u, %s\n", number, now->from, now->to,
                name_of(now));
        fprintf(stderr, "recorded: port %u to %u, %s\n", recorded->from, recorded->to,
                name_of(recorded));
        return false;
    }
    memcpy(&header, recorded->data, sizeof(header));
    at = first_other(recorded, now, false);
    if (at == SIZE_MAX)
        at = first_other(recorded, now, true);
    if (at == SIZE_MAX)
        return true;
    fprintf(stderr, "message %zu (%s), %zu bytes of %zu: byte %zu, %s: %02x, recorded: %02x\n",
            number, name_of(recorded), now->bytes, recorded->bytes, at,
            at < sizeof(header) ? FIELD_AT(header_fields, at)
                                : part_of(&header, at - sizeof(header)),
            byte_at(now, at), byte_at(recorded, at));
    return false;
}

bool recorded_messages_same(const struct recorded_messages *recorded,
                            const struct recorded_messages *now)
{
    const size_t least = recorded->n < now->n ? recorded->n : now->n;

    for (size_t i = 0; i < least; i++)
        if (!is_same(i, &recorded->messages[i], &now->messages[i]))
            return false;
    if (recorded->n == now->n)
        return true;
    const struct recorded_messages *longer = recorded->n > now->n ? recorded : now;

    fprintf(stderr, "%zu messages, recorded: %zu; the first that is %s: %s\n", now->n,
            recorded->n, longer == now ? "new" : "not there",
            name_of(&longer->messages[least]));
    return false;
}
