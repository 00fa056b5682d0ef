/* object_verify.c - what is saved of objects is read, one piece at a time, and compared with its
 * checksum: the object that was verified longest ago first, in the background or because somebody
 * waits for all (control/disk_verify.h has the same for blocks).
 *
 * A piece that is bad on disk is written again in its place if memory has a good one, and counts as
 * mended after a sync.  Otherwise it is bad from then on, as one that was lost on the way back: who
 * reads the object gets KV_CORRUPT until it is put again. */
#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/log.h"
#include "kvserver/store/tier/object_tier_private.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    READ_TRIES = 3,
    PASS_US = 600 * 1000 * 1000,
    LAG_US = 1000 * 1000, /* delay that may be caught up */
    WARN_US = 60 * 1000 * 1000,
};

/* A piece that is verified.  Its object is pinned. */
struct kvs_piece_check {
    struct kvs_object_tier *tier;
    struct kvs_stored_object *object;
    uint32_t piece, bytes, n_tries;
    bool is_writing; /* it is mended */
    uint8_t memory[];
};

static uint64_t now_of(const struct kvs_object_tier *tier)
{
    return kv_clock_now(tier->setup.clock);
}

/* ---- the list ----------------------------------------------------------------------------- */

void kvs_object_verify_add(struct kvs_object_tier *tier,
                           struct kvs_object_kept *kept,
                           uint64_t verified_us)
{
    assert(kept->verify_link == NULL);
    kept->verified_us = verified_us;
    kept->verify_next = NULL;
    kept->verify_link = tier->verify.end;
    *tier->verify.end = kept;
    tier->verify.end = &kept->verify_next;
}

void kvs_object_verify_remove(struct kvs_object_tier *tier, struct kvs_object_kept *kept)
{
    if (kept->verify_link == NULL)
        return;
    *kept->verify_link = kept->verify_next;
    if (kept->verify_next != NULL)
        kept->verify_next->verify_link = kept->verify_link;
    else
        tier->verify.end = kept->verify_link;
    kept->verify_link = NULL;
    if (tier->verify.at == kept)
        tier->verify.at = NULL;
}

/* ---- a piece ------------------------------------------------------------------------------ */

static void check_end(struct kvs_piece_check *check)
{
    struct kvs_object_tier *tier = check->tier;

    kvs_object_count(&tier->counts.verified_pieces, 1);
    kvs_object_count(&tier->counts.verified_bytes, check->bytes);
    kvs_object_unpin(tier->objects, check->object);
    tier->verify.check = NULL;
    free(check);
}

static void mended(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_piece_check *check = arg;

    (void)bytes;
    if (status != KV_OK)
        kvs_object_count(&check->tier->counts.failed, 1);
    kvs_object_count(status == KV_OK ? &check->tier->counts.mended_pieces
                                     : &check->tier->counts.unread_pieces,
                     1);
    check_end(check);
}

static void written(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_piece_check *check = arg;

    if (status == KV_OK)
        status = kv_disk_sync(check->tier->queue, mended, check);
    if (status != KV_OK)
        mended(check, status, bytes);
}

/* Writes what memory has.  A copy: it may leave memory meanwhile. */
static void mend(struct kvs_piece_check *check)
{
    const struct kvs_stored_object *object = check->object;
    const struct kvs_object_piece_key key =
        kvs_object_piece_key(&object->key, object->version, check->piece);
    const struct kv_disk_write write = {.key = &key,
                                        .key_bytes = sizeof(key),
                                        .value = check->memory,
                                        .value_bytes = check->bytes};
    kv_status_t status;

    memcpy(check->memory, object->pieces[check->piece].bytes, check->bytes);
    check->is_writing = true;
    status = kv_disk_write(check->tier->queue, KV_DISK_ROWS, &write, 1, written, check);
    if (status != KV_OK)
        mended(check, status, 0);
}

static void
warn(struct kvs_object_tier *tier, const struct kvs_piece_check *check, bool is_lost)
{
    const uint64_t now_us = now_of(tier);

    if (tier->verify.warned_us != 0 && now_us < tier->verify.warned_us + WARN_US)
        return;
    tier->verify.warned_us = now_us;
    kv_log(KV_LOG_WARN, "disk: verified: piece %u of a saved object is bad: %s", check->piece,
           is_lost ? "it cannot be read until it is put again"
                   : "it is written again from memory");
}

static void judge(struct kvs_piece_check *check, bool is_right)
{
    struct kvs_object_tier *tier = check->tier;
    struct kvs_stored_object *object = check->object;
    struct kvs_object_piece *one = &object->pieces[check->piece];

    /* What was removed may have been erased; what is loading is judged when it is back. */
    if (is_right || !object->published || one->is_loading ||
        (one->is_bad && one->bytes == NULL)) {
        check_end(check);
        return;
    }
    kvs_object_count(&tier->counts.bad_pieces, 1);
    if (one->bytes != NULL && kvs_object_verify(tier->objects, object, check->piece)) {
        warn(tier, check, false);
        mend(check);
        return;
    }
    warn(tier, check, true);
    kvs_object_mark_bad(tier->objects, object, check->piece);
    kvs_object_count(&tier->counts.dropped_pieces, 1);
    check_end(check);
}

static void piece_read(void *arg, kv_status_t status, size_t bytes);

static kv_status_t start(struct kvs_piece_check *check)
{
    const struct kvs_stored_object *object = check->object;
    const struct kvs_object_piece_key key =
        kvs_object_piece_key(&object->key, object->version, check->piece);

    return kv_disk_read(check->tier->queue, KV_DISK_ROWS, &key, sizeof(key), check->memory,
                        check->bytes, piece_read, check);
}

static void piece_read(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_piece_check *check = arg;
    const struct kvs_stored_object *object = check->object;

    if (status != KV_OK && status != KV_NOT_FOUND) {
        kvs_object_count(&check->tier->counts.failed, 1);
        if (++check->n_tries < READ_TRIES && start(check) == KV_OK)
            return;
        /* Neither right nor wrong: it is read again in the next pass. */
        kvs_object_count(&check->tier->counts.unread_pieces, 1);
        check_end(check);
        return;
    }
    judge(check, status == KV_OK && bytes == check->bytes &&
                     kv_crc32c(object->seed + check->piece, check->memory, bytes) ==
                         object->pieces[check->piece].crc);
}

/* Returns false if it is to be tried again later. */
static bool begin(struct kvs_object_tier *tier, struct kvs_object_kept *kept, uint32_t piece)
{
    struct kvs_stored_object *object = kept->object;
    const uint32_t bytes = kvs_object_piece_bytes(object->bytes, piece);
    struct kvs_piece_check *check = malloc(sizeof(*check) + bytes);

    if (check == NULL)
        return false;
    *check = (struct kvs_piece_check){
        .tier = tier, .object = object, .piece = piece, .bytes = bytes};
    kvs_object_pin(object);
    tier->verify.check = check;
    if (start(check) == KV_OK)
        return true;
    tier->verify.check = NULL;
    kvs_object_unpin(tier->objects, object);
    free(check);
    return false;
}

bool kvs_object_verify_is_writing(const struct kvs_object_tier *tier)
{
    return tier->verify.check != NULL && tier->verify.check->is_writing;
}

/* ---- passes ------------------------------------------------------------------------------- */

/* Whether the first one is due: somebody waits for it, or it is of the pass in the background. */
static bool is_due(struct kvs_object_tier *tier, uint64_t now_us)
{
    struct kvs_object_verify *verify = &tier->verify;
    const uint64_t verified_us = verify->first->verified_us;

    if (verified_us < atomic_load_explicit(tier->setup.verify_wanted_us, memory_order_relaxed))
        return true;
    if (tier->setup.verify_bytes == 0)
        return false;
    if (verify->begun_us == 0 ||
        (verified_us >= verify->begun_us && now_us >= verify->begun_us + PASS_US))
        verify->begun_us = verify->due_us = now_us;
    return verified_us < verify->begun_us && now_us >= verify->due_us;
}

static void note(struct kvs_object_tier *tier, uint32_t bytes, uint64_t now_us)
{
    struct kvs_object_verify *verify = &tier->verify;

    if (tier->setup.verify_bytes == 0)
        return;
    if (verify->due_us + LAG_US < now_us)
        verify->due_us = now_us - LAG_US;
    verify->due_us += bytes * UINT64_C(1000000) / tier->setup.verify_bytes;
}

bool kvs_object_tier_verify(struct kvs_object_tier *tier)
{
    struct kvs_object_verify *verify = &tier->verify;
    struct kvs_object_kept *kept = verify->first;
    const uint64_t now_us = now_of(tier);

    /* Whoever reads is before this. */
    if (tier->queue == NULL || kept == NULL || verify->check != NULL || tier->loads != NULL ||
        tier->n_loading > 0 ||
        atomic_load_explicit(tier->setup.draining, memory_order_relaxed) ||
        !is_due(tier, now_us))
        return false;
    /* Whoever has begun to wait meanwhile wants all its pieces. */
    if (verify->at != kept || verify->at_us < atomic_load_explicit(tier->setup.verify_wanted_us,
                                                                   memory_order_relaxed)) {
        verify->at = kept;
        verify->at_us = now_us;
        verify->piece = 0;
    }
    if (verify->piece == kept->n_pieces) {
        kvs_object_verify_remove(tier, kept);
        kvs_object_verify_add(tier, kept, now_us);
        return true;
    }
    if (!begin(tier, kept, verify->piece))
        return false;
    note(tier, kvs_object_piece_bytes(kept->object->bytes, verify->piece), now_us);
    verify->piece++;
    return true;
}

uint64_t kvs_object_tier_verified_since(const struct kvs_object_tier *tier)
{
    const struct kvs_object_kept *first = tier->verify.first;

    return first != NULL ? first->verified_us : UINT64_MAX;
}

void kvs_object_verify_close(struct kvs_object_tier *tier)
{
    free(tier->verify.check);
}
