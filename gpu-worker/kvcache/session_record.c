#include "gpu-worker/kvcache/session_record.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLOTS = 8,
    KEPT = 2,       /* the last record, and the one before it */
    LOAD_TRIES = 4, /* records may be replaced while they are read */
    FORMAT = 1,
};

static const uint32_t MAGIC = 0x5353564b; /* "KVSS" */

/* The beginning of a record.  After it: messages (n_messages), tokens (n_tokens), and the texts
 * of the messages, one behind the other.
 *
 *     0  u32  magic
 *     4  u32  format       FORMAT
 *     8  u64  number
 *    16  u8   fingerprint[16]
 *    32  u8   session_id[16], token[16]
 *    64  u64  root
 *    72  u64  random[4]
 *   104  u32  n_stored
 *   108  u32  n_tokens
 *   112  u32  n_messages
 *   116  u32  is_arriving  0 or 1
 */
struct head {
    uint32_t magic, format;
    uint64_t number;
    struct kv_id128 fingerprint;
    struct kv_id128 session_id, token;
    uint64_t root;
    uint64_t random[KVW_RECORD_RANDOM_WORDS];
    uint32_t n_stored, n_tokens, n_messages, is_arriving;
};
static_assert(sizeof(struct head) == 120, "as in the byte table");

struct message {
    uint32_t role, bytes;
};
static_assert(sizeof(struct message) == 8, "as in the byte table");

bool kvw_record_is_name(const char *name)
{
    const size_t bytes = strlen(name);

    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return false;
    return bytes > 0 && bytes <= KVW_RECORD_NAME_MAX;
}

void kvw_record_fini(struct kvw_record *record)
{
    for (uint32_t i = 0; record->messages != NULL && i < record->n_messages; i++)
        free(record->messages[i].text);
    free(record->messages);
    free(record->tokens);
    record->messages = NULL;
    record->tokens = NULL;
    record->n_messages = record->n_tokens = 0;
}

/* ---- bytes ------------------------------------------------------------------------------- */

static size_t packed_bytes(const struct kvw_record *record)
{
    size_t bytes = sizeof(struct head) + record->n_messages * sizeof(struct message) +
                   record->n_tokens * sizeof(uint32_t);

    for (uint32_t i = 0; i < record->n_messages; i++)
        bytes += strlen(record->messages[i].text);
    return bytes;
}

static void pack(const struct kvw_record *record, uint64_t number, uint8_t *to)
{
    struct head head = {
        .magic = MAGIC,
        .format = FORMAT,
        .number = number,
        .fingerprint = record->fingerprint,
        .session_id = record->ticket.session_id,
        .token = record->ticket.token,
        .root = record->ticket.root,
        .n_stored = record->n_stored,
        .n_tokens = record->n_tokens,
        .n_messages = record->n_messages,
        .is_arriving = record->is_arriving,
    };

    memcpy(head.random, record->random, sizeof(head.random));
    memcpy(to, &head, sizeof(head));
    to += sizeof(head);
    for (uint32_t i = 0; i < record->n_messages; i++) {
        const struct message message = {
            .role = record->messages[i].role,
            .bytes = (uint32_t)strlen(record->messages[i].text),
        };

        memcpy(to, &message, sizeof(message));
        to += sizeof(message);
    }
    if (record->n_tokens > 0)
        memcpy(to, record->tokens, record->n_tokens * sizeof(uint32_t));
    to += record->n_tokens * sizeof(uint32_t);
    for (uint32_t i = 0; i < record->n_messages; i++) {
        const size_t bytes = strlen(record->messages[i].text);

        memcpy(to, record->messages[i].text, bytes);
        to += bytes;
    }
}

/* Returns what is wrong with the counts and lengths, or NULL. */
static const char *fault_of(const struct head *head, const uint8_t *data, size_t bytes)
{
    uint64_t expected = sizeof(*head);

    if (head->number == 0 || head->number > INT64_MAX || head->is_arriving > 1)
        return "number";
    if (head->n_tokens == 0 || head->n_tokens > KV_TOKENS_MAX ||
        head->n_stored > head->n_tokens)
        return "tokens";
    if (head->n_messages > KVW_RECORD_MESSAGES_MAX)
        return "messages";
    expected += (uint64_t)head->n_messages * sizeof(struct message) +
                (uint64_t)head->n_tokens * sizeof(uint32_t);
    if (expected > bytes)
        return "size";
    for (uint32_t i = 0; i < head->n_messages; i++) {
        struct message message;

        memcpy(&message, data + sizeof(*head) + i * sizeof(message), sizeof(message));
        if (message.role > UINT8_MAX)
            return "role of a message";
        expected += message.bytes;
    }
    if (expected != bytes)
        return "size";
    return NULL;
}

/* Copies what fault_of() has found nothing wrong with; a text may still have a zero. */
static kv_status_t copy(const struct head *head, const uint8_t *data, struct kvw_record *record)
{
    const uint8_t *messages = data + sizeof(*head);
    const uint8_t *tokens = messages + head->n_messages * sizeof(struct message);
    const uint8_t *text = tokens + head->n_tokens * sizeof(uint32_t);

    record->tokens = malloc(head->n_tokens * sizeof(record->tokens[0]));
    record->messages =
        calloc(head->n_messages > 0 ? head->n_messages : 1, sizeof(record->messages[0]));
    if (record->tokens == NULL || record->messages == NULL)
        return KV_NO_MEMORY;
    memcpy(record->tokens, tokens, head->n_tokens * sizeof(record->tokens[0]));
    record->n_tokens = head->n_tokens;
    for (uint32_t i = 0; i < head->n_messages; i++) {
        struct message message;
        char *copied;

        memcpy(&message, messages + i * sizeof(message), sizeof(message));
        copied = malloc((size_t)message.bytes + 1);
        if (copied == NULL)
            return KV_NO_MEMORY;
        memcpy(copied, text, message.bytes);
        copied[message.bytes] = '\0';
        record->messages[record->n_messages++] =
            (struct kvw_record_message){.role = message.role, .text = copied};
        if (strlen(copied) != message.bytes)
            return KV_CORRUPT;
        text += message.bytes;
    }
    return KV_OK;
}

static kv_status_t unpack(const uint8_t *data,
                          size_t bytes,
                          struct kvw_record *ret_record,
                          char *detail,
                          size_t detail_bytes)
{
    const char *fault = "size";
    struct head head;
    kv_status_t status;

    if (bytes >= sizeof(head)) {
        memcpy(&head, data, sizeof(head));
        if (head.magic != MAGIC) {
            fault = "it does not begin like one";
        } else if (head.format != FORMAT) {
            snprintf(detail, detail_bytes,
                     "record of format %" PRIu32 ": this kvworker reads format %d", head.format,
                     FORMAT);
            return KV_VERSION;
        } else {
            fault = fault_of(&head, data, bytes);
        }
    }
    *ret_record = (struct kvw_record){.number = 0};
    if (fault != NULL) {
        snprintf(detail, detail_bytes, "not a record of kvworker: %s", fault);
        return KV_CORRUPT;
    }
    ret_record->number = head.number;
    ret_record->fingerprint = head.fingerprint;
    ret_record->ticket = (struct kv_ticket){
        .session_id = head.session_id, .token = head.token, .root = head.root};
    memcpy(ret_record->random, head.random, sizeof(head.random));
    ret_record->n_stored = head.n_stored;
    ret_record->is_arriving = head.is_arriving != 0;
    status = copy(&head, data, ret_record);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "%s",
                 status == KV_CORRUPT ? "not a record of kvworker: text of a message"
                                      : "out of memory: record");
        kvw_record_fini(ret_record);
    }
    return status;
}

/* ---- objects ----------------------------------------------------------------------------- */

struct names {
    char text[SLOTS][KV_NAME_BYTES_MAX + 1];
};

static void name_slots(const char *name, struct names *ret_names)
{
    assert(kvw_record_is_name(name));
    for (unsigned i = 0; i < SLOTS; i++)
        snprintf(ret_names->text[i], sizeof(ret_names->text[i]), "kvworker/session/%s/%u", name,
                 i);
}

/* Runs a verb on objects (n); each has its own status then. */
static kv_status_t run(struct kv_client *client,
                       enum kv_object_verb verb,
                       struct kv_object *objects,
                       size_t n,
                       char *detail,
                       size_t detail_bytes)
{
    struct kv_op *op;
    kv_status_t status = kv_objects_begin(client, verb, objects, n, 0, &op);

    if (status == KV_OK) {
        status = kv_wait(op);
        if (status != KV_OK)
            snprintf(detail, detail_bytes, "%s", kv_op_detail(op));
        kv_op_free(op);
    } else {
        snprintf(detail, detail_bytes, "%s", kv_client_detail(client));
        for (size_t i = 0; i < n; i++)
            objects[i].status = status;
    }
    return status;
}

/* One look at all slots.  KV_CONFLICT: they changed in between. */
static kv_status_t look(struct kv_client *client,
                        struct kv_object *objects,
                        struct kvw_record *ret_record,
                        bool *ret_lost,
                        char *detail,
                        size_t detail_bytes)
{
    struct kv_object there[SLOTS];
    struct kv_buffer *buffer = NULL;
    size_t n = 0, bytes = 0;
    kv_status_t status, worst = KV_NOT_FOUND;
    bool has_changed = false;

    *ret_lost = false;
    snprintf(detail, detail_bytes, "no such session");
    run(client, KV_OBJECT_EXISTS, objects, SLOTS, detail, detail_bytes);
    for (unsigned i = 0; i < SLOTS; i++) {
        if (objects[i].status == KV_OK && objects[i].bytes <= KV_OBJECT_BYTES_MAX) {
            there[n] = objects[i];
            there[n].offset = bytes;
            bytes += objects[i].bytes;
            n++;
        } else if (objects[i].status != KV_NOT_FOUND) {
            worst = objects[i].status == KV_OK ? KV_CORRUPT : objects[i].status;
            *ret_lost = true;
            if (objects[i].status == KV_OK)
                snprintf(detail, detail_bytes, "not a record of kvworker: %zu bytes",
                         objects[i].bytes);
        }
    }
    if (n == 0) {
        if (!*ret_lost)
            snprintf(detail, detail_bytes, "no such session");
        return worst;
    }
    status = kv_buffer_alloc(client, bytes > 0 ? bytes : 1, &buffer);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "%s", kv_client_detail(client));
        return status;
    }
    for (size_t i = 0; i < n; i++)
        there[i].buffer = buffer;
    run(client, KV_OBJECT_GET, there, n, detail, detail_bytes);
    for (size_t i = 0; i < n; i++) {
        struct kvw_record record;

        status = there[i].status;
        if (status == KV_NOT_FOUND || status == KV_CONFLICT || status == KV_TOO_LARGE) {
            has_changed = true;
            continue;
        }
        if (status == KV_OK)
            status = unpack((const uint8_t *)kv_buffer_data(buffer) + there[i].offset,
                            there[i].bytes, &record, detail, detail_bytes);
        if (status != KV_OK) {
            worst = status;
            *ret_lost = true;
        } else if (record.number > ret_record->number) {
            kvw_record_fini(ret_record);
            *ret_record = record;
        } else {
            kvw_record_fini(&record);
        }
    }
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(buffer);
    if (has_changed)
        return KV_CONFLICT;
    return ret_record->number > 0 ? KV_OK : worst;
}

kv_status_t kvw_record_load(struct kv_client *client,
                            const char *name,
                            struct kvw_record *ret_record,
                            bool *ret_lost,
                            char *detail,
                            size_t detail_bytes)
{
    struct kv_object objects[SLOTS];
    kv_status_t status = KV_CONFLICT;
    struct names names;

    name_slots(name, &names);
    for (unsigned tries = 0; tries < LOAD_TRIES && status == KV_CONFLICT; tries++) {
        *ret_record = (struct kvw_record){.number = 0};
        for (unsigned i = 0; i < SLOTS; i++)
            objects[i] = (struct kv_object){.name = names.text[i]};
        status = look(client, objects, ret_record, ret_lost, detail, detail_bytes);
        if (status != KV_OK)
            kvw_record_fini(ret_record);
    }
    if (status == KV_CONFLICT)
        snprintf(detail, detail_bytes, "other workers keep replacing its record");
    return status;
}

/* Whether a slot has what was to be deleted long ago, or no record at all. */
static bool is_outdated(struct kv_client *client, const char *name, uint64_t number)
{
    struct kv_object object = {.name = name};
    struct kvw_record record = {.number = 0};
    struct kv_buffer *buffer;
    bool is_outdated = false;
    char detail[80];

    if (run(client, KV_OBJECT_EXISTS, &object, 1, detail, sizeof(detail)) != KV_OK ||
        kv_buffer_alloc(client, object.bytes > 0 ? object.bytes : 1, &buffer) != KV_OK)
        return false;
    object.buffer = buffer;
    if (run(client, KV_OBJECT_GET, &object, 1, detail, sizeof(detail)) == KV_OK) {
        const kv_status_t status =
            unpack(kv_buffer_data(buffer), object.bytes, &record, detail, sizeof(detail));

        is_outdated = status == KV_CORRUPT || (status == KV_OK && record.number < number);
        kvw_record_fini(&record);
    }
    kv_buffer_free(buffer);
    return is_outdated;
}

/* Deletes the records before the last ones.  What fails stays until the next time. */
static void delete_old(struct kv_client *client, const struct names *names, uint64_t number)
{
    struct kv_object objects[SLOTS];
    size_t n = 0;
    char detail[8];

    /* Half of the slots: a writer that is this far behind may find the others in use by one that
     * is ahead. */
    for (uint64_t old = KEPT; old < KEPT + SLOTS / 4 && old < number; old++)
        objects[n++] = (struct kv_object){.name = names->text[(number - old) % SLOTS]};
    if (n > 0)
        run(client, KV_OBJECT_DELETE, objects, n, detail, sizeof(detail));
}

kv_status_t kvw_record_save(struct kv_client *client,
                            const char *name,
                            struct kvw_record *record,
                            char *detail,
                            size_t detail_bytes)
{
    const size_t bytes = packed_bytes(record);
    const uint64_t number = record->number + 1;
    struct kv_object object = {.bytes = bytes};
    struct kv_buffer *buffer;
    struct names names;
    kv_status_t status;

    name_slots(name, &names);
    if (bytes > KV_OBJECT_BYTES_MAX || record->n_messages > KVW_RECORD_MESSAGES_MAX) {
        snprintf(detail, detail_bytes, "record: %zu bytes, %" PRIu32 " messages: limit %d, %d",
                 bytes, record->n_messages, KV_OBJECT_BYTES_MAX, KVW_RECORD_MESSAGES_MAX);
        return KV_TOO_LARGE;
    }
    status = kv_buffer_alloc(client, bytes, &buffer);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "%s", kv_client_detail(client));
        return status;
    }
    pack(record, number, kv_buffer_data(buffer));
    object.name = names.text[number % SLOTS];
    object.buffer = buffer;
    status = run(client, KV_OBJECT_PUT, &object, 1, detail, detail_bytes);
    if (status == KV_EXISTS && is_outdated(client, object.name, number)) {
        struct kv_object old = {.name = object.name};

        run(client, KV_OBJECT_DELETE, &old, 1, detail, detail_bytes);
        status = run(client, KV_OBJECT_PUT, &object, 1, detail, detail_bytes);
    }
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(buffer);
    if (status != KV_OK)
        return status;
    record->number = number;
    delete_old(client, &names, number);
    return KV_OK;
}
