#include "kvserver/net/message.h"
#include "kernels/checksum.h"
#include "kvserver/base/hash.h"

#include <stdbool.h>
#include <string.h>

enum {
    SEALED_BYTES = offsetof(struct kv_wire_header, header_crc)
};

void kv_message_seal(struct kv_wire_header *header, const void *body, size_t body_bytes)
{
    if (header->version == 0)
        header->version = KV_WIRE_VERSION;
    header->body_bytes = (uint32_t)body_bytes;
    /* The entries of a batch have their own. */
    header->body_crc = header->kind == KV_WIRE_BATCH ? 0 : kv_crc32c(0, body, body_bytes);
    header->header_crc = kv_crc32c(0, header, SEALED_BYTES);
}

static bool is_bulk(const struct kv_wire_header *header)
{
    return header->kind == KV_WIRE_BULK_REQUEST || header->kind == KV_WIRE_BULK_REPLY;
}

static uint64_t body_max(unsigned op)
{
    return op >= KV_OP_HELLO ? KV_WIRE_CONTROL_MAX : KV_WIRE_BODY_MAX;
}

static uint64_t bulk_max(unsigned op)
{
    return op >= KV_OP_OBJECT_PUT && op <= KV_OP_OBJECT_DELETE ? KV_OBJECT_BYTES_MAX
                                                               : KV_WIRE_BULK_MAX;
}

/* Returns the invalid field, or NULL. */
static const char *fields_fault(const struct kv_wire_header *header, size_t data_bytes)
{
    if (header->kind < KV_WIRE_REQUEST || header->kind > KV_WIRE_BATCH)
        return "message: unknown kind";
    if (header->op == 0 || header->op >= KV_OP_COUNT)
        return "message: unknown op";
    if (header->flags != 0)
        return "message: flags are not 0";
    if (header->kind == KV_WIRE_REQUEST && header->deadline_us == 0)
        return "message: a request without a deadline";
    if (header->bulk_bytes > bulk_max(header->op))
        return "message: bulk_bytes are too many";
    if (is_bulk(header)) {
        if (header->body_bytes != 0)
            return "message: a body in a bulk message";
        if (header->bulk_bytes != data_bytes)
            return "message: bulk_bytes are not what arrived";
        return NULL;
    }
    if (header->kind == KV_WIRE_BATCH &&
        (header->n_units == 0 || header->n_units > KV_WIRE_ENTRIES_MAX ||
         header->bulk_bytes != 0 || header->body_bytes > KV_WIRE_BODY_MAX))
        return "message: a batch out of bounds";
    if (header->body_bytes > body_max(header->op))
        return "message: body_bytes are too many";
    if (header->body_bytes != data_bytes &&
        (header->bulk_bytes == 0 || header->body_bytes + header->bulk_bytes != data_bytes))
        return "message: body_bytes are not what arrived";
    return NULL;
}

/* Parses and checks a header.  Writes *header even on failure. */
static kv_status_t check_header(const void *message,
                                size_t message_bytes,
                                size_t body_bytes,
                                struct kv_wire_header *header,
                                const char **ret_why)
{
    const char *fault;

    if (message_bytes != sizeof(*header)) {
        *ret_why = "message: the header is not 160 bytes";
        return KV_INVALID;
    }
    memcpy(header, message, sizeof(*header));
    /* The version is checked first: another version may have its checksum elsewhere. */
    if (header->version < KV_WIRE_VERSION_LEAST || header->version > KV_WIRE_VERSION) {
        *ret_why = "message: another version of the protocol";
        return KV_VERSION;
    }
    if (header->header_crc != kv_crc32c(0, header, SEALED_BYTES)) {
        *ret_why = "message: checksum of the header";
        return KV_CORRUPT;
    }
    fault = fields_fault(header, body_bytes);
    if (fault != NULL) {
        *ret_why = fault;
        return KV_INVALID;
    }
    return KV_OK;
}

kv_status_t kv_message_check_header(const void *message,
                                    size_t message_bytes,
                                    size_t body_bytes,
                                    struct kv_wire_header *ret_header,
                                    const char **ret_why)
{
    struct kv_wire_header header;
    kv_status_t status = check_header(message, message_bytes, body_bytes, &header, ret_why);

    if (status == KV_OK)
        *ret_header = header;
    return status;
}

kv_status_t kv_message_check(const void *message,
                             size_t message_bytes,
                             const void *body,
                             size_t body_bytes,
                             struct kv_wire_header *ret_header,
                             const char **ret_why)
{
    struct kv_wire_header header;
    kv_status_t status = check_header(message, message_bytes, body_bytes, &header, ret_why);

    if (status != KV_OK)
        return status;
    if (header.kind != KV_WIRE_BATCH &&
        header.body_crc != kv_crc32c(0, body, header.body_bytes)) {
        *ret_why = "message: checksum of the body";
        return KV_CORRUPT;
    }
    *ret_header = header;
    return KV_OK;
}

kv_status_t kv_message_entry(enum kv_wire_kind kind,
                             const uint8_t *batch,
                             size_t batch_bytes,
                             size_t *at,
                             struct kv_wire_header *ret_header,
                             const uint8_t **ret_body,
                             const char **ret_why)
{
    const uint8_t *entry = batch + *at;
    const size_t left = batch_bytes - *at;
    struct kv_wire_header header;
    kv_status_t status;

    if (left < sizeof(header)) {
        *ret_why = "batch: cut short in a header";
        return KV_INVALID;
    }
    /* The size is believed once the header's checksum is right. */
    memcpy(&header, entry, sizeof(header));
    if (kv_wire_entry_bytes(header.body_bytes) > left) {
        *ret_why = "batch: cut short in a body";
        return KV_INVALID;
    }
    status = kv_message_check(entry, sizeof(header), entry + sizeof(header), header.body_bytes,
                              &header, ret_why);
    if (status != KV_OK)
        return status;
    if (header.kind != kind || header.bulk_bytes != 0) {
        *ret_why = "batch: an entry of another kind, or with bulk";
        return KV_INVALID;
    }
    *ret_header = header;
    *ret_body = entry + sizeof(header);
    *at += kv_wire_entry_bytes(header.body_bytes);
    return KV_OK;
}
