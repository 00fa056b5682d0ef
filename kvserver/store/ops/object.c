/* object_put, object_get, object_exists, object_delete, and ping. */
#include "kernels/checksum.h"
#include "kvserver/base/hash.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/message.h"
#include "kvserver/store/ops/ops.h"

#include <stdlib.h>
#include <string.h>

/* ---- puts that come twice or late -------------------------------------------------------- */

static uint64_t *done_word(struct kv_peer *peer, uint32_t number)
{
    return &peer->puts_done[number / 64 % (KV_WIRE_PUTS_MAX / 64)];
}

static bool put_is_done(struct kv_peer *peer, uint32_t number)
{
    return (*done_word(peer, number) >> number % 64 & 1) != 0;
}

static void put_set_done(struct kv_peer *peer, uint32_t number)
{
    *done_word(peer, number) |= UINT64_C(1) << number % 64;
}

/* The client waits for none below `settled` any more.  Numbers go around: what is not ahead is
 * the past, in a message that comes late. */
static void settle_puts(struct kv_peer *peer, uint32_t settled)
{
    uint32_t n = settled - peer->puts_settled;

    if (n > INT32_MAX)
        return;
    if (n >= KV_WIRE_PUTS_MAX)
        memset(peer->puts_done, 0, sizeof(peer->puts_done));
    else
        for (uint32_t number = peer->puts_settled; number != settled; number++)
            *done_word(peer, number) &= ~(UINT64_C(1) << number % 64);
    peer->puts_settled = settled;
}

/* Whether the client still waits for this put.  If not, the work has failed. */
static bool put_is_due(struct kv_work *work)
{
    uint32_t settled = work->peer->puts_settled, number = work->request.put_number;

    if (number - settled < KV_WIRE_PUTS_MAX)
        return true;
    if (number - settled > INT32_MAX)
        kv_work_fail(work, KV_CANCELLED,
                     "object_put: number %u: the client waits for none below %u", number,
                     settled);
    else
        kv_work_fail(work, KV_INVALID, "object_put: number %u: at most %u beyond %u is allowed",
                     number, KV_WIRE_PUTS_MAX - 1, settled);
    return false;
}

/* ---- names ------------------------------------------------------------------------------- */

/* Reads the name off the front of the body, and from the header which puts the client waits for
 * no more.  The key is the name's hash, apart for each tenant: the one that the client said at
 * hello.  On failure the work has failed. */
static bool
object_key(struct kv_work *work, struct kv_id128 *ret_name, struct kv_id128 *ret_key)
{
    const struct kv_wire_header *request = &work->request;

    if (request->name_bytes == 0 || request->name_bytes > KV_NAME_BYTES_MAX ||
        request->name_bytes > request->body_bytes) {
        kv_work_fail(work, KV_INVALID, "%s: a name of %u bytes, 1 to %u allowed",
                     work->row->name, request->name_bytes, KV_NAME_BYTES_MAX);
        return false;
    }
    *ret_name = kv_hash128(work->body, request->name_bytes);
    if (kv_placement_object_thread(kv_placement_object_slot(ret_name), work->data->n_threads) !=
        work->data->index) {
        kv_work_fail(work, KV_MOVED, "%s: another data thread has that name", work->row->name);
        return false;
    }
    settle_puts(work->peer, request->put_settled);
    *ret_key = *ret_name;
    for (int i = 0; i < 4; i++)
        ret_key->bytes[i] ^= (uint8_t)(work->peer->tenant >> 8 * i);
    return true;
}

/* ---- put --------------------------------------------------------------------------------- */

/* All bytes are there and right: publish, unless another put of the name came first. */
static void put_finish(struct kv_work *work)
{
    struct kv_objects *objects = &work->data->objects;
    struct kv_stored_object *object = work->object;
    struct kv_stored_object *other = kv_objects_find(objects, &object->key);
    uint32_t number = work->request.put_number;

    if (!put_is_due(work))
        return;
    if (put_is_done(work->peer, number)) {
        work->reply.object_bytes = object->bytes;
        kv_work_answer(work, NULL, 0, NULL, 0);
        return;
    }
    if (other != NULL) {
        uint32_t crcs[KV_OBJECT_BYTES_MAX / KV_WIRE_BULK_MAX];
        for (uint32_t i = 0; i < object->n_pieces; i++)
            crcs[i] = object->pieces[i].crc;
        if (!kv_object_same(other, object->bytes, crcs)) {
            kv_work_fail(work, KV_EXISTS, "object_put: the name holds other bytes");
            return;
        }
        if (kv_object_n_bad(other) > 0 && kv_objects_replace(objects, object) != KV_OK) {
            kv_work_fail(work, KV_NO_MEMORY, "object_put: no memory for the name");
            return;
        }
    } else if (kv_objects_publish(objects, object) != KV_OK) {
        kv_work_fail(work, KV_NO_MEMORY, "object_put: no memory for the name");
        return;
    } else {
        kv_count(&work->data->stats.objects_in, 1);
    }
    put_set_done(work->peer, number);
    work->reply.object_bytes = object->bytes;
    kv_work_answer(work, NULL, 0, NULL, 0);
}

/* What was not taken comes late, too: the bit of a number that has ended is another one's. */
static void answer_there(struct kv_work *work)
{
    if (!put_is_due(work))
        return;
    put_set_done(work->peer, work->request.put_number);
    kv_work_answer(work, NULL, 0, NULL, 0);
}

/* The object is there already, with the checksums that came; its data was not taken.  One piece
 * is verified per slice.  If one has gone bad the put is KV_BUSY: the client sends it again,
 * and the node, which knows by then, takes the data. */
static bool verify_there(struct kv_work *work)
{
    struct kv_stored_object *object = work->object;

    (void)kv_object_verify(&work->data->objects, object, work->cursor_unit);
    if (++work->cursor_unit < object->n_pieces)
        return true;
    if (kv_object_n_bad(object) > 0)
        kv_work_fail(work, KV_BUSY,
                     "object_put: the object has gone bad in memory: send it again");
    else
        answer_there(work);
    return false;
}

void kv_op_object_put_discarded(struct kv_work *work)
{
    if (work->object == NULL)
        answer_there(work);
    else if (verify_there(work))
        kv_work_queue(work);
}

/* One piece per slice. */
bool kv_op_object_put_run(struct kv_work *work)
{
    struct kv_stored_object *object = work->object;
    uint32_t i = work->cursor_unit;
    const struct kv_object_piece *piece = &object->pieces[i];

    if (work->discard)
        return verify_there(work);
    if (kv_crc32c(object->seed + i, piece->bytes, kv_object_piece_bytes(object->bytes, i)) !=
        piece->crc) {
        kv_count(&work->data->stats.corrupt_rows, 1);
        kv_work_fail(work, KV_CORRUPT, "object_put: piece %u: wrong checksum", i);
        return false;
    }
    if (++work->cursor_unit < object->n_pieces)
        return true;
    put_finish(work);
    return false;
}

void kv_op_object_put_landed(struct kv_work *work)
{
    if (kv_op_object_put_run(work))
        kv_work_queue(work);
}

/* The object is there: what comes is not taken, and it is verified; NULL: the put was done
 * before.
 */
static void await_discard(struct kv_work *work, struct kv_stored_object *there)
{
    if (there != NULL)
        kv_object_pin(there);
    work->object = there;
    kv_work_await_bulk(work, true);
}

void kv_op_object_put_begin(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    struct kv_id128 name, key;
    uint32_t crcs[KV_OBJECT_BYTES_MAX / KV_WIRE_BULK_MAX];

    if (!object_key(work, &name, &key))
        return;
    if (request->object_bytes > KV_OBJECT_BYTES_MAX) {
        kv_work_fail(work, KV_TOO_LARGE, "object_put: %llu bytes, at most %u",
                     (unsigned long long)request->object_bytes, KV_OBJECT_BYTES_MAX);
        return;
    }
    uint32_t n_pieces = kv_object_n_pieces(request->object_bytes);
    size_t head = request->name_bytes + n_pieces * sizeof(uint32_t);
    bool in_body = request->bulk_bytes == 0;
    if (request->body_bytes != head + (in_body ? request->object_bytes : 0) ||
        (!in_body && request->bulk_bytes != request->object_bytes)) {
        kv_work_fail(work, KV_INVALID,
                     "object_put: %llu bytes, yet a body of %u and bulk of %llu",
                     (unsigned long long)request->object_bytes, request->body_bytes,
                     (unsigned long long)request->bulk_bytes);
        return;
    }
    memcpy(crcs, work->body + request->name_bytes, n_pieces * sizeof(uint32_t));

    if (!put_is_due(work))
        return;
    struct kv_stored_object *there = kv_objects_find(&work->data->objects, &key);
    bool is_done = put_is_done(work->peer, request->put_number);
    if (!is_done && there != NULL && !kv_object_same(there, request->object_bytes, crcs)) {
        kv_work_fail(work, KV_EXISTS, "object_put: the name holds other bytes");
        return;
    }
    if (!is_done && there != NULL && in_body)
        (void)kv_object_verify(&work->data->objects, there, 0);
    if (is_done || (there != NULL && kv_object_n_bad(there) == 0)) {
        work->reply.object_bytes = request->object_bytes;
        work->small[0] = '\0';
        if (in_body)
            answer_there(work);
        else
            await_discard(work, is_done ? NULL : there);
        return;
    }
    work->object = kv_object_create(&work->data->objects, &key, request->object_bytes,
                                    kv_object_seed(&name), crcs);
    if (work->object == NULL) {
        kv_work_fail(work, KV_NO_MEMORY, "object_put: the store's memory is full");
        return;
    }
    for (uint32_t i = 0; i < n_pieces; i++)
        work->iov[work->n_iov++] = (struct kv_iov){
            work->object->pieces[i].bytes, kv_object_piece_bytes(request->object_bytes, i)};
    if (in_body) {
        memcpy(work->iov[0].base, work->body + head, request->object_bytes);
        kv_op_object_put_landed(work);
    } else {
        kv_work_await_bulk(work, false);
    }
}

/* ---- get, exists, delete ----------------------------------------------------------------- */

void kv_op_object_get_begin(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    struct kv_id128 name, key;

    if (!object_key(work, &name, &key))
        return;
    struct kv_stored_object *object = kv_objects_find(&work->data->objects, &key);
    if (object == NULL) {
        kv_work_fail(work, KV_NOT_FOUND, "object_get: no such object");
        return;
    }
    if (request->offset % KV_WIRE_BULK_MAX != 0 ||
        request->offset / KV_WIRE_BULK_MAX >= object->n_pieces) {
        /* Who has had the first piece knew the size: it is a shorter object by now. */
        kv_work_fail(work, request->offset % KV_WIRE_BULK_MAX != 0 ? KV_INVALID : KV_CONFLICT,
                     "object_get: offset %llu of an object of %llu bytes",
                     (unsigned long long)request->offset, (unsigned long long)object->bytes);
        return;
    }
    uint32_t index = (uint32_t)(request->offset / KV_WIRE_BULK_MAX);
    const struct kv_object_piece *piece = &object->pieces[index];
    uint32_t bytes = kv_object_piece_bytes(object->bytes, index);

    if (piece->is_bad) {
        kv_work_fail(work, KV_CORRUPT,
                     "object_get: piece %u: it has gone bad in memory: put the object again",
                     index);
        return;
    }
    kv_object_pin(object);
    work->object = object;
    work->reply.offset = request->offset;
    work->reply.object_bytes = object->bytes;
    work->reply.object_crc = piece->crc;
    work->reply.object_version = object->version;
    kv_count(&work->data->stats.objects_out, 1);
    if (bytes <= KV_WIRE_INLINE_MAX / 2)
        kv_work_answer(work, piece->bytes, bytes, NULL, 0);
    else
        kv_work_answer(work, NULL, 0, piece->bytes, bytes);
}

void kv_op_object_exists_begin(struct kv_work *work)
{
    struct kv_id128 name, key;

    if (!object_key(work, &name, &key))
        return;
    const struct kv_stored_object *object = kv_objects_find(&work->data->objects, &key);
    if (object == NULL) {
        kv_work_fail(work, KV_NOT_FOUND, "object_exists: no such object");
        return;
    }
    work->reply.object_bytes = object->bytes;
    work->reply.object_version = object->version;
    kv_work_answer(work, NULL, 0, NULL, 0);
}

/* Of one version: sent again, it finds that version gone and whatever was put since alone. */
void kv_op_object_delete_begin(struct kv_work *work)
{
    struct kv_objects *objects = &work->data->objects;
    uint64_t version = work->request.object_version;
    struct kv_id128 name, key;

    if (!object_key(work, &name, &key))
        return;
    if (version == 0) {
        kv_work_fail(work, KV_INVALID, "object_delete: version 0: no object has it");
        return;
    }
    const struct kv_stored_object *object = kv_objects_find(objects, &key);
    if (object != NULL && object->version == version)
        (void)kv_objects_remove(objects, &key);
    kv_work_answer(work, NULL, 0, NULL, 0);
}

/* ---- ping -------------------------------------------------------------------------------- */

void kv_op_ping_begin(struct kv_work *work)
{
    uint32_t bytes = work->request.token_count;

    if (bytes > KV_WIRE_BODY_MAX) {
        kv_work_fail(work, KV_TOO_LARGE, "ping: %u bytes to send back, at most %u", bytes,
                     KV_WIRE_BODY_MAX);
        return;
    }
    if (bytes <= sizeof(work->small)) {
        work->answer = work->small;
    } else if (kv_work_answer_slot(work, bytes) != KV_OK) {
        kv_work_fail(work, KV_BUSY, "ping: no buffer for the answer");
        return;
    }
    memset(work->answer, 0, bytes); /* not what another client's request left there */
    kv_work_answer(work, work->answer, bytes, NULL, 0);
}
