/* Operations on objects (object_put, object_get, object_exists, object_delete), and ping.
 *
 * A client numbers its puts, so that each is done once although messages are repeated and
 * arrive late.  An object is published when all its bytes have been verified; a put of an
 * existing name succeeds if the bytes are the same, and renews its time. */
#include "kernels/checksum.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/slice.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/message.h"
#include "kvserver/store/ops/ops.h"

#include <stdlib.h>
#include <string.h>

enum {
    CHECK_BYTES = 64 << 10, /* between two looks at the clock: some us */
};

/* ---- repeated and late puts -------------------------------------------------------------- */

static uint64_t *done_word(struct kvs_shard_client *client, uint32_t number)
{
    return &client->puts_done[number / 64 % (KV_WIRE_PUTS_MAX / 64)];
}

static bool put_is_done(struct kvs_shard_client *client, uint32_t number)
{
    return (*done_word(client, number) >> number % 64 & 1) != 0;
}

static void put_set_done(struct kvs_shard_client *client, uint32_t number)
{
    *done_word(client, number) |= UINT64_C(1) << number % 64;
}

/* The client waits for no put below `settled`.  Numbers wrap around: a number that is not ahead
 * is from the past, in a late message. */
static void settle_puts(struct kvs_shard_client *client, uint32_t settled)
{
    uint32_t n = settled - client->puts_settled;

    if (n > INT32_MAX)
        return;
    if (n >= KV_WIRE_PUTS_MAX)
        memset(client->puts_done, 0, sizeof(client->puts_done));
    else
        for (uint32_t number = client->puts_settled; number != settled; number++)
            *done_word(client, number) &= ~(UINT64_C(1) << number % 64);
    client->puts_settled = settled;
}

/* Returns whether the client still waits for this put; otherwise fails the request. */
static bool put_is_due(struct kvs_request *request)
{
    uint32_t settled = request->client->puts_settled, number = request->header.put_number;

    if (number - settled < KV_WIRE_PUTS_MAX)
        return true;
    if (number - settled > INT32_MAX)
        kvs_request_fail(request, KV_CANCELLED,
                         "object_put: number %u: the client has settled all below %u", number,
                         settled);
    else
        kvs_request_fail(request, KV_INVALID,
                         "object_put: number %u: may be at most %u above %u", number,
                         KV_WIRE_PUTS_MAX - 1, settled);
    return false;
}

/* ---- names ------------------------------------------------------------------------------- */

/* Reads the name at the beginning of the body, and the header's put_settled.  The key is the
 * name's hash, different for each tenant (as the client said at hello).  Returns false after
 * failing the request. */
static bool
object_key(struct kvs_request *request, struct kv_id128 *ret_name, struct kv_id128 *ret_key)
{
    const struct kv_wire_header *header = &request->header;

    if (header->name_bytes == 0 || header->name_bytes > KV_NAME_BYTES_MAX ||
        header->name_bytes > header->body_bytes) {
        kvs_request_fail(request, KV_INVALID, "%s: name of %u bytes: must be 1 to %u",
                         request->type->name, header->name_bytes, KV_NAME_BYTES_MAX);
        return false;
    }
    *ret_name = kv_hash128(request->body, header->name_bytes);
    if (kv_placement_object_thread(kv_placement_object_slot(ret_name),
                                   request->shard->n_threads) != request->shard->index) {
        kvs_request_fail(request, KV_MOVED, "%s: the name belongs to another data thread",
                         request->type->name);
        return false;
    }
    settle_puts(request->client, header->put_settled);
    *ret_key = *ret_name;
    kvs_object_key_of_tenant(ret_key, request->client->tenant);
    return true;
}

/* Returns the tenant's object of that name, or NULL. */
static struct kvs_stored_object *find_object(struct kvs_request *request,
                                             const struct kv_id128 *key)
{
    struct kvs_shard *shard = request->shard;
    struct kvs_stored_object *object =
        kvs_objects_find_live(&shard->objects, key, shard->now_us);

    if (object != NULL)
        kvs_object_touch(&shard->objects, object);
    return object;
}

/* ---- put --------------------------------------------------------------------------------- */

/* Returns how long the put says that its object stays. */
static struct kvs_object_terms terms_of(const struct kvs_request *request)
{
    const struct kvs_shard *shard = request->shard;
    const struct kv_wire_header *header = &request->header;
    const uint64_t ttl_us =
        header->token_begin != 0 ? header->token_begin * UINT64_C(1000) : shard->object_ttl_us;

    return (struct kvs_object_terms){
        .expires_us = ttl_us == 0 || header->token_begin == KV_OBJECT_TTL_NONE
                          ? KVS_EXPIRY_NEVER
                          : shard->now_us + ttl_us,
        .is_evictable = header->token_count == KV_WIRE_OBJECT_EVICTABLE,
    };
}

/* Returns whether the put says what it may; otherwise fails the request. */
static bool check_terms(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;

    if (header->token_begin > KV_OBJECT_TTL_MAX_MS && header->token_begin != KV_OBJECT_TTL_NONE)
        kvs_request_fail(request, KV_INVALID, "object_put: ttl of %u ms: limit %u",
                         header->token_begin, KV_OBJECT_TTL_MAX_MS);
    else if (header->token_count > KV_WIRE_OBJECT_EVICTABLE)
        kvs_request_fail(request, KV_INVALID, "object_put: evictable: %u: must be 0 or 1",
                         header->token_count);
    else
        return true;
    return false;
}

/* Returns whether other bytes of that name could be there again after a crash, which a put's own would
 * then not replace, or a delete would not have deleted; fails the request if so: its client sends it
 * again. */
static bool is_erasing(struct kvs_request *request, const struct kv_id128 *key)
{
    if (kvs_objects_erasure(&request->shard->objects, key) == NULL)
        return false;
    kvs_request_fail(request, KV_BUSY, "%s: what the name had is being erased from the disk",
                     request->type->name);
    return true;
}

/* Whether a put's bytes are of use to an object that has the same. */
static bool needs_data(const struct kvs_stored_object *object)
{
    return object->n_here - object->n_lent < object->n_pieces || kvs_object_n_bad(object) > 0;
}

/* All bytes have been verified: publishes the object, unless another put of the name was
 * first. */
static void put_finish(struct kvs_request *request)
{
    struct kvs_objects *objects = &request->shard->objects;
    struct kvs_stored_object *object = request->object;
    struct kvs_stored_object *other = find_object(request, &object->key);
    uint32_t number = request->header.put_number;

    if (!put_is_due(request))
        return;
    if (is_erasing(request, &object->key))
        return;
    if (put_is_done(request->client, number)) {
        request->reply.object_bytes = object->bytes;
        kvs_request_reply(request, NULL, 0, NULL, 0);
        return;
    }
    if (other != NULL) {
        uint32_t crcs[KV_OBJECT_BYTES_MAX / KV_WIRE_BULK_MAX];
        for (uint32_t i = 0; i < object->n_pieces; i++)
            crcs[i] = object->pieces[i].crc;
        if (!kvs_object_same(other, object->bytes, crcs)) {
            kvs_request_fail(request, KV_EXISTS, "object_put: the name holds other bytes");
            return;
        }
        const struct kvs_object_terms terms = terms_of(request);
        kvs_object_renew(objects, other, &terms);
        if (needs_data(other) && kvs_objects_replace(objects, object) != KV_OK) {
            kvs_request_fail(request, KV_NO_MEMORY, "object_put: out of memory");
            return;
        }
    } else if (kvs_objects_publish(objects, object) != KV_OK) {
        kvs_request_fail(request, KV_NO_MEMORY, "object_put: out of memory");
        return;
    } else {
        kvs_count(&request->shard->stats.objects_in, 1);
        kvs_count(&request->shard->stats.objects_in_bytes, object->bytes);
    }
    put_set_done(request->client, number);
    request->reply.object_bytes = object->bytes;
    kvs_request_reply(request, NULL, 0, NULL, 0);
}

/* Replies to a put whose object exists.  The discarded data may arrive late, when the bit of a
 * settled number belongs to another put: so it is checked again. */
static void reply_there(struct kvs_request *request)
{
    if (!put_is_due(request))
        return;
    put_set_done(request->client, request->header.put_number);
    kvs_request_reply(request, NULL, 0, NULL, 0);
}

/* Goes on with the CRC of the piece at the cursor, of the request's object.  Returns true at the
 * end of the piece. */
static bool crc_some(struct kvs_request *request)
{
    const struct kvs_stored_object *object = request->object;
    const uint32_t i = request->cursor_unit;
    const size_t bytes = kvs_object_piece_bytes(object->bytes, i);
    const size_t done = request->cursor_bytes;
    const size_t n = bytes - done < CHECK_BYTES ? bytes - done : CHECK_BYTES;

    request->crc = kv_crc32c(done > 0 ? request->crc : object->seed + i,
                             object->pieces[i].bytes + done, n);
    request->cursor_bytes = done + n < bytes ? done + n : 0;
    return request->cursor_bytes == 0;
}

/* Verifies the existing object for a slice; the put's own data was discarded.  If a piece is bad,
 * fails the put with KV_BUSY: the client sends it again, and the node, which then knows the piece
 * to be bad, accepts the data.  Returns true if there is more to verify. */
static bool verify_there(struct kvs_request *request)
{
    struct kvs_stored_object *object = request->object;
    struct kv_slice slice = kv_slice_begin(request->shard->clock, 1);

    do {
        if (!crc_some(request))
            continue;
        if (request->crc != object->pieces[request->cursor_unit].crc)
            kvs_object_mark_bad(&request->shard->objects, object, request->cursor_unit);
        if (++request->cursor_unit < object->n_pieces)
            continue;
        if (kvs_object_n_bad(object) > 0)
            kvs_request_fail(request, KV_BUSY,
                             "object_put: the stored object is corrupt: send it again");
        else
            reply_there(request);
        return false;
    } while (!kv_slice_over(&slice));
    return true;
}

void kvs_op_object_put_discarded(struct kvs_request *request)
{
    if (request->object == NULL)
        reply_there(request);
    else if (verify_there(request))
        kvs_request_enqueue(request);
}

/* Verifies some of the put's data.  Returns false if a piece is wrong, which ended the request. */
static bool check_some(struct kvs_request *request)
{
    const uint32_t i = request->cursor_unit;

    if (!crc_some(request))
        return true;
    request->cursor_unit++;
    if (request->crc == request->object->pieces[i].crc)
        return true;
    kvs_count(&request->shard->stats.corrupt_rows, 1);
    kvs_request_fail(request, KV_CORRUPT, "object_put: piece %u: wrong checksum", i);
    return false;
}

bool kvs_op_object_put_run(struct kvs_request *request)
{
    if (request->discard)
        return verify_there(request);
    struct kv_slice slice = kv_slice_begin(request->shard->clock, 1);
    do {
        if (!check_some(request))
            return false;
        if (request->cursor_unit == request->object->n_pieces) {
            put_finish(request);
            return false;
        }
    } while (!kv_slice_over(&slice));
    return true;
}

void kvs_op_object_put_received(struct kvs_request *request)
{
    if (kvs_op_object_put_run(request))
        kvs_request_enqueue(request);
}

/* Discards the data that arrives, because the object exists and will be verified, or, if
 * `there` is NULL, because this put was done before.
 */
static void await_discard(struct kvs_request *request, struct kvs_stored_object *there)
{
    if (there != NULL)
        kvs_object_pin(there);
    request->object = there;
    kvs_request_await_bulk(request, true);
}

void kvs_op_object_put_begin(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    struct kv_id128 name, key;
    uint32_t crcs[KV_OBJECT_BYTES_MAX / KV_WIRE_BULK_MAX];

    if (!object_key(request, &name, &key))
        return;
    if (header->object_bytes > KV_OBJECT_BYTES_MAX) {
        kvs_request_fail(request, KV_TOO_LARGE, "object_put: %llu bytes, limit %u",
                         (unsigned long long)header->object_bytes, KV_OBJECT_BYTES_MAX);
        return;
    }
    uint32_t n_pieces = kvs_object_n_pieces(header->object_bytes);
    size_t head = header->name_bytes + n_pieces * sizeof(uint32_t);
    bool in_body = header->bulk_bytes == 0;
    if (header->body_bytes != head + (in_body ? header->object_bytes : 0) ||
        (!in_body && header->bulk_bytes != header->object_bytes)) {
        kvs_request_fail(request, KV_INVALID,
                         "object_put: %llu bytes, but a body of %u and bulk of %llu bytes",
                         (unsigned long long)header->object_bytes, header->body_bytes,
                         (unsigned long long)header->bulk_bytes);
        return;
    }
    memcpy(crcs, request->body + header->name_bytes, n_pieces * sizeof(uint32_t));

    if (!check_terms(request) || !put_is_due(request) || is_erasing(request, &key))
        return;
    const struct kvs_object_terms terms = terms_of(request);
    struct kvs_stored_object *there = find_object(request, &key);
    bool is_done = put_is_done(request->client, header->put_number);
    if (!is_done && there != NULL && !kvs_object_same(there, header->object_bytes, crcs)) {
        kvs_request_fail(request, KV_EXISTS, "object_put: the name holds other bytes");
        return;
    }
    /* From here on the object stays for this put, too; while it is verified, it is pinned. */
    if (!is_done && there != NULL)
        kvs_object_renew(&request->shard->objects, there, &terms);
    if (!is_done && there != NULL && in_body)
        (void)kvs_object_verify(&request->shard->objects, there, 0);
    if (is_done || (there != NULL && !needs_data(there))) {
        request->reply.object_bytes = header->object_bytes;
        request->small[0] = '\0';
        if (in_body)
            reply_there(request);
        else
            await_discard(request, is_done ? NULL : there);
        return;
    }
    request->object = kvs_object_create(
        &request->shard->objects, &(struct kvs_object_facts){.key = key,
                                                             .bytes = header->object_bytes,
                                                             .seed = kv_object_seed(&name),
                                                             .tenant = request->client->tenant,
                                                             .crcs = crcs,
                                                             .name = request->body,
                                                             .name_bytes = header->name_bytes,
                                                             .now_us = request->shard->now_us,
                                                             .terms = terms});
    if (request->object == NULL) {
        kvs_request_fail_full(request, header->object_bytes);
        return;
    }
    for (uint32_t i = 0; i < n_pieces; i++)
        request->iov[request->n_iov++] = (struct kv_iov){
            request->object->pieces[i].bytes, kvs_object_piece_bytes(header->object_bytes, i)};
    if (in_body) {
        memcpy(request->iov[0].base, request->body + head, header->object_bytes);
        kvs_op_object_put_received(request);
    } else {
        kvs_request_await_bulk(request, false);
    }
}

/* ---- get, exists, delete ----------------------------------------------------------------- */

static uint32_t piece_of(const struct kvs_request *request)
{
    return (uint32_t)(request->header.offset / KV_WIRE_BULK_MAX);
}

/* Replies with a piece of the request's object, which is here, or bad. */
static void send_piece(struct kvs_request *request)
{
    struct kvs_stored_object *object = request->object;
    const uint32_t index = piece_of(request);
    const struct kvs_object_piece *piece = &object->pieces[index];
    const uint32_t bytes = kvs_object_piece_bytes(object->bytes, index);

    if (piece->is_bad) {
        kvs_request_fail(request, KV_CORRUPT,
                         "object_get: piece %u is corrupt %s: put the object again", index,
                         piece->bytes != NULL ? "in memory" : "on disk");
        return;
    }
    request->reply.offset = request->header.offset;
    request->reply.object_bytes = object->bytes;
    request->reply.object_crc = piece->crc;
    request->reply.object_version = object->version;
    kvs_count(&request->shard->stats.objects_out, 1);
    kvs_count(&request->shard->stats.objects_out_bytes, bytes);
    request->sends_lent = piece->class_id == KVS_PIECE_LENT;
    if (request->sends_lent)
        kvs_object_piece_send(object, index);
    if (bytes <= KV_WIRE_INLINE_MAX / 2)
        kvs_request_reply(request, piece->bytes, bytes, NULL, 0);
    else
        kvs_request_reply(request, NULL, 0, piece->bytes, bytes);
}

void kvs_op_object_get_begin(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    struct kv_id128 name, key;

    if (!object_key(request, &name, &key))
        return;
    struct kvs_stored_object *object = find_object(request, &key);
    if (object == NULL) {
        kvs_request_fail(request, KV_NOT_FOUND, "object_get: no such object");
        return;
    }
    if (header->offset % KV_WIRE_BULK_MAX != 0 ||
        header->offset / KV_WIRE_BULK_MAX >= object->n_pieces) {
        /* The client learned the size with the first piece: the object has been replaced
         * since. */
        kvs_request_fail(request,
                         header->offset % KV_WIRE_BULK_MAX != 0 ? KV_INVALID : KV_CONFLICT,
                         "object_get: offset %llu of an object of %llu bytes",
                         (unsigned long long)header->offset, (unsigned long long)object->bytes);
        return;
    }
    const kv_status_t status =
        kvs_object_need(&request->shard->objects, object, piece_of(request));

    kvs_object_pin(object);
    request->object = object;
    if (status == KV_OK)
        send_piece(request);
    else if (status == KV_BUSY)
        kvs_request_fail(request, KV_BUSY, "object_get: out of memory");
    else
        kvs_request_wait_for(request, &object->pieces[piece_of(request)]);
}

/* The piece is back, or was. */
void kvs_op_object_get_wake(struct kvs_request *request)
{
    struct kvs_stored_object *object = request->object;
    const struct kvs_object_piece *piece = &object->pieces[piece_of(request)];

    if (piece->bytes != NULL || (piece->is_bad && object->published))
        send_piece(request);
    else if (object->published &&
             kvs_object_need(&request->shard->objects, object, piece_of(request)) != KV_BUSY)
        kvs_request_wait_for(request, piece);
    else
        kvs_request_fail(request, KV_BUSY,
                         "object_get: the object has changed, or there is no memory");
}

void kvs_op_object_exists_begin(struct kvs_request *request)
{
    struct kv_id128 name, key;

    if (!object_key(request, &name, &key))
        return;
    const struct kvs_stored_object *object = find_object(request, &key);
    if (object == NULL) {
        if (request->header.token_count != KV_WIRE_OBJECT_TO_DELETE ||
            !is_erasing(request, &key))
            kvs_request_fail(request, KV_NOT_FOUND, "object_exists: no such object");
        return;
    }
    request->reply.object_bytes = object->bytes;
    request->reply.object_version = object->version;
    kvs_request_reply(request, NULL, 0, NULL, 0);
}

/* Deletes one version: when repeated, it does not delete an object put since. */
void kvs_op_object_delete_begin(struct kvs_request *request)
{
    struct kvs_objects *objects = &request->shard->objects;
    uint64_t version = request->header.object_version;
    struct kv_id128 name, key;

    if (!object_key(request, &name, &key))
        return;
    if (version == 0) {
        kvs_request_fail(request, KV_INVALID, "object_delete: version must not be 0");
        return;
    }
    const struct kvs_stored_object *object = kvs_objects_find(objects, &key);
    if (object != NULL && object->version == version)
        (void)kvs_objects_remove(objects, &key);
    kvs_op_object_delete_wake(request);
}

/* What is deleted stays so, whatever becomes of the node. */
void kvs_op_object_delete_wake(struct kvs_request *request)
{
    struct kv_id128 name, key;
    const void *erasure;

    if (!object_key(request, &name, &key))
        return;
    erasure = kvs_objects_erasure(&request->shard->objects, &key);
    if (erasure != NULL)
        kvs_request_wait_for(request, erasure);
    else
        kvs_request_reply(request, NULL, 0, NULL, 0);
}

/* ---- ping -------------------------------------------------------------------------------- */

void kvs_op_ping_begin(struct kvs_request *request)
{
    uint32_t bytes = request->header.token_count;

    if (bytes > KV_WIRE_BODY_MAX) {
        kvs_request_fail(request, KV_TOO_LARGE, "ping: %u bytes to send back, limit %u", bytes,
                         KV_WIRE_BODY_MAX);
        return;
    }
    if (bytes <= sizeof(request->small)) {
        request->reply_body = request->small;
    } else if (kvs_request_get_reply_slot(request, bytes) != KV_OK) {
        kvs_request_fail(request, KV_BUSY, "ping: no free buffer for the reply");
        return;
    }
    memset(request->reply_body, 0, bytes); /* clears what another client's request left there */
    kvs_request_reply(request, request->reply_body, bytes, NULL, 0);
}
