#include "gpu-worker/kvcache/session.h"

#include "gpu-worker/kvcache/write_behind.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TOLD_BLOCKS = 1024, /* with their tokens in one publish (kvclient.h) */
};

struct kvw_session {
    struct kv_client *client;
    struct kvw_device *device;
    uint32_t n_layers;
    uint32_t kv_head_begin, n_kv_heads; /* whose rows are put */
    size_t row_bytes;
    bool is_shared;                 /* else it is new */
    struct kvw_session_share share; /* then; else zeros */
    bool is_kept;
    struct kv_op *opening;      /* NULL: it has ended */
    kv_status_t open_status;    /* then */
    struct kv_session *session; /* NULL: not open */
    struct kv_session *parent;  /* while a fork of it is in use; NULL: none is */
    struct kvw_write_behind *writer;
    struct kvw_event *computed,
        *copied;            /* the rows of the last put: on the device; in their slot */
    struct kv_rows to_send; /* of a prompt, in the slot; no tokens: none */
    /* What names depend on; once open, NULL: nothing is published. */
    struct kv_model_info *info;
    bool publishes, tells_tokens;
    uint32_t n_reused;
    uint32_t n_exact;         /* tokens before the first with an approximate row */
    uint32_t n_published;     /* tokens */
    uint64_t bytes_read;      /* of rows that came from the store as they are */
    struct kv_op *publishing; /* NULL: none is under way */
    bool publishes_rest;      /* it is to publish all that is left */
    struct kv_op *closing;    /* NULL: not begun */
    char detail[512];
};

/* Waits. */
static void close_session(struct kv_session *session)
{
    struct kv_op *op;

    if (session != NULL && kv_close_begin(session, 0, &op) == KV_OK)
        kv_finish(op); /* on failure the session ends with its lease */
    kv_session_free(session);
}

void kvw_session_destroy(struct kvw_session *store)
{
    if (store == NULL)
        return;
    if (store->opening != NULL) {
        /* Closed, if it is there: else its lease would hold the nodes' memory. */
        (void)kv_wait(store->opening);
        (void)kvw_session_opened(store);
    }
    if (store->copied != NULL)
        store->device->ops->event_wait(store->copied); /* its slot goes now */
    store->device->ops->event_destroy(store->copied);
    store->device->ops->event_destroy(store->computed);
    kvw_write_behind_destroy(store->writer);
    kv_op_free(store->publishing);
    free(store->info);
    /* One that has waited too long for other operations of the session has not been sent. */
    const bool is_closed = store->closing != NULL && kv_finish(store->closing) != KV_DEADLINE;

    if (is_closed || (store->is_kept && store->parent == NULL))
        kv_session_free(store->session);
    else
        close_session(store->session);
    if (store->is_kept)
        kv_session_free(store->parent);
    else
        close_session(store->parent);
    free(store);
}

/* Names the full blocks of some tokens.  Returns the names, to be freed, and their number;
 * NULL: out of memory. */
static struct kv_id128 *name_blocks(struct kv_client *client,
                                    const struct kv_model_info *info,
                                    const uint32_t *tokens,
                                    uint32_t n_tokens,
                                    uint32_t *ret_n)
{
    const uint32_t n = n_tokens / KV_BLOCK_TOKENS;
    struct kv_id128 *names = malloc((n > 0 ? n : 1) * sizeof(names[0]));

    if (names != NULL)
        kv_prompt_names(client, info, tokens, n * KV_BLOCK_TOKENS, NULL, 0, names);
    *ret_n = n;
    return names;
}

/* Begins to open a new session, where others with the prompt's beginning are, or with their
 * rows. */
static kv_status_t begin_open(const struct kvw_session_setup *setup,
                              const struct kv_model_info *info,
                              struct kv_op **ret_op)
{
    /* The last token is computed in any case: the answer begins with its logits. */
    const uint32_t match_blocks =
        setup->n_prompt > 0 ? (setup->n_prompt - 1) / KV_BLOCK_TOKENS : 0;
    const uint32_t context = setup->model->params.context;
    struct kv_session_options options = {
        /* Who goes on with it may need all of the context. */
        .tokens_max = setup->is_kept && context > setup->capacity ? context : setup->capacity,
        .match_blocks_max = match_blocks,
        .is_fresh = !setup->reuses || match_blocks == 0};
    struct kv_id128 *names = name_blocks(setup->client, info, setup->prompt, setup->n_prompt,
                                         &options.n_block_names);
    kv_status_t status;

    if (names == NULL)
        return KV_NO_MEMORY;
    options.block_names = names;
    status = kv_open_begin(setup->client, info, &options, 0, ret_op);
    free(names);
    return status;
}

/* Whether the session has rows of this model: its ticket is from a record, which may be wrong. */
static bool is_of_model(const struct kvw_session *store)
{
    struct kv_id128 fingerprint;

    kv_session_fingerprint(store->session, &fingerprint);
    return memcmp(&fingerprint, &store->info->fingerprint, sizeof(fingerprint)) == 0;
}

static kv_status_t begin_opening(struct kvw_session *store,
                                 const struct kvw_session_setup *setup)
{
    kv_status_t status;

    store->info = calloc(1, sizeof(*store->info));
    if (store->info == NULL)
        return KV_NO_MEMORY;
    status = kvw_model_info(setup->model, setup->dtype, store->info);
    if (status != KV_OK)
        return status;
    if (setup->share != NULL)
        return kv_resume_begin(setup->client, &setup->share->ticket, 0, &store->opening);
    return begin_open(setup, store->info, &store->opening);
}

static kv_status_t take_opened(struct kvw_session *store)
{
    kv_status_t status = kv_op_status(store->opening);

    store->session = kv_op_session(store->opening);
    if (status != KV_OK)
        return kvw_session_refuse(store, status, "store: %s",
                                  kv_op_detail(store->opening)[0] != '\0'
                                      ? kv_op_detail(store->opening)
                                      : kv_status_name(status));
    if (!is_of_model(store))
        return kvw_session_refuse(store, KV_CONFLICT, "store: the session is of another model");
    if (!store->is_shared)
        store->n_reused = kv_op_tokens(store->opening);
    kvw_write_behind_go_on(store->writer, store->session);
    return KV_OK;
}

kv_status_t kvw_session_opened(struct kvw_session *store)
{
    if (store->opening == NULL)
        return store->open_status;
    if (kv_op_status(store->opening) == KV_IN_PROGRESS)
        return KV_IN_PROGRESS;
    store->open_status = take_opened(store);
    kv_op_free(store->opening);
    store->opening = NULL;
    if (!store->publishes) {
        free(store->info);
        store->info = NULL;
    }
    return store->open_status;
}

kv_status_t kvw_session_create(const struct kvw_session_setup *setup,
                               struct kvw_session **ret_store,
                               char *detail,
                               size_t detail_bytes)
{
    const struct kvw_model_params *params = &setup->model->params;
    struct kvw_session *store = calloc(1, sizeof(*store));
    kv_status_t status;

    if (store == NULL)
        return KV_NO_MEMORY;
    store->client = setup->client;
    store->device = setup->model->device;
    store->publishes = setup->publishes;
    store->tells_tokens = setup->tells_tokens;
    store->n_layers = params->n_layers;
    store->kv_head_begin = setup->kv_head_begin;
    store->n_kv_heads = setup->n_kv_heads > 0 ? setup->n_kv_heads : params->n_kv_heads;
    store->is_kept = setup->is_kept;
    store->n_exact = setup->share != NULL && !setup->share->is_exact ? 0 : UINT32_MAX;
    store->is_shared = setup->share != NULL;
    if (setup->share != NULL)
        store->share = *setup->share;
    store->row_bytes = (size_t)2 * params->d * kv_dtype_bytes(setup->dtype);
    status = store->device->ops->event_create(store->device, &store->computed);
    if (status == KV_OK)
        status = store->device->ops->event_create(store->device, &store->copied);
    /* A slot holds one layer of a chunk, or all layers of a step. */
    if (status == KV_OK)
        status = kvw_write_behind_create(setup->client, NULL,
                                         store->n_kv_heads * store->row_bytes *
                                             (setup->chunk_tokens > params->n_layers
                                                  ? setup->chunk_tokens
                                                  : params->n_layers),
                                         setup->trace, &store->writer);
    if (status == KV_OK)
        status = begin_opening(store, setup);
    if (status == KV_OK && !setup->opens_later) {
        (void)kv_wait(store->opening);
        status = kvw_session_opened(store);
    }
    if (status != KV_OK) {
        if (store->detail[0] != '\0')
            snprintf(detail, detail_bytes, "%s", store->detail);
        else
            snprintf(detail, detail_bytes, "store: %s",
                     kv_client_detail(setup->client)[0] != '\0'
                         ? kv_client_detail(setup->client)
                         : kv_status_name(status));
        kvw_session_destroy(store);
        return status;
    }
    *ret_store = store;
    return KV_OK;
}

struct kv_session *kvw_session_handle(const struct kvw_session *store)
{
    return store->session;
}

bool kvw_session_is_arriving(const struct kvw_session *store)
{
    return store->share.is_arriving;
}

bool kvw_session_is_stopped(const struct kvw_session *store)
{
    return store->share.stop != NULL && *store->share.stop;
}

void kvw_session_tell_arrived(const struct kvw_session *store,
                              uint32_t layer,
                              uint32_t tokens,
                              uint32_t needed)
{
    if (store->share.arrived != NULL)
        store->share.arrived(store->share.arg, layer, tokens, needed);
}

/* Sends the rows of a prompt that are in their slot, or, if they are not yet, waits for them if told
 * to. */
static kv_status_t send_rows(struct kvw_session *store, bool waits)
{
    const struct kv_rows rows = store->to_send;

    if (rows.n_tokens == 0 ||
        (!waits && !store->device->ops->event_has_happened(store->copied)))
        return KV_OK;
    store->device->ops->event_wait(store->copied);
    store->to_send.n_tokens = 0;
    return kvw_write_behind_send(store->writer, &rows, false);
}

kv_status_t kvw_session_put(struct kvw_session *store,
                            enum kvw_phase phase,
                            uint32_t layer,
                            uint32_t token_begin,
                            uint32_t n,
                            const struct kvw_device_buffer *rows,
                            size_t capacity,
                            size_t first)
{
    const struct kv_rows box = {
        .layer_begin = layer,
        .n_layers = 1,
        .kv_head_begin = store->kv_head_begin,
        .n_kv_heads = store->n_kv_heads,
        .token_begin = token_begin,
        .n_tokens = n,
    };
    const size_t head_bytes = n * store->row_bytes;
    /* The rows of a step stay in the slot until those of all layers are there. */
    const size_t offset = phase == KVW_DECODE ? layer * store->n_kv_heads * head_bytes : 0;
    kv_status_t status = send_rows(store, true);
    void *slot;

    if (status == KV_OK)
        status = kvw_write_behind_slot(store->writer, &slot);
    if (status != KV_OK)
        return status;
    kvw_device_follow(store->device, KVW_STREAM_TRANSFER, KVW_STREAM_COMPUTE, store->computed);
    store->device->ops->read(
        store->device, KVW_STREAM_TRANSFER, rows,
        (struct kvw_place){(store->kv_head_begin * capacity + first) * store->row_bytes,
                           capacity * store->row_bytes},
        (char *)slot + offset, head_bytes, (struct kvw_pieces){store->n_kv_heads, head_bytes});
    store->device->ops->event_record(store->device, KVW_STREAM_TRANSFER, store->copied);
    if (phase == KVW_PREFILL) {
        store->to_send = box;
        status = send_rows(store, false);
    }
    return status;
}

kv_status_t
kvw_session_end_pass(struct kvw_session *store, enum kvw_phase phase, uint32_t token_begin)
{
    const struct kv_rows rows = {
        .n_layers = store->n_layers,
        .kv_head_begin = store->kv_head_begin,
        .n_kv_heads = store->n_kv_heads,
        .token_begin = token_begin,
        .n_tokens = 1,
    };
    kv_status_t status = send_rows(store, true);

    if (status == KV_OK && phase == KVW_DECODE) {
        store->device->ops->event_wait(store->copied);
        status = kvw_write_behind_send(store->writer, &rows, true);
    }
    return status == KV_OK ? kvw_write_behind_poll(store->writer) : status;
}

kv_status_t kvw_session_poll(struct kvw_session *store)
{
    const kv_status_t status = send_rows(store, false);

    return status == KV_OK ? kvw_write_behind_poll(store->writer) : status;
}

kv_status_t kvw_session_flush(struct kvw_session *store)
{
    const kv_status_t status = send_rows(store, true);

    kvw_write_behind_check(store->writer);
    return status == KV_OK ? kvw_write_behind_flush(store->writer) : status;
}

kv_status_t kvw_session_flushed(struct kvw_session *store)
{
    /* Whoever looks after many has polled; a poll here would take the ends of others. */
    kv_status_t status = send_rows(store, false);

    if (status == KV_OK)
        status = kvw_write_behind_take(store->writer);
    return status == KV_OK &&
                   (store->to_send.n_tokens > 0 || !kvw_write_behind_is_empty(store->writer))
               ? KV_IN_PROGRESS
               : status;
}

bool kvw_session_takes_rows(const struct kvw_session *store)
{
    return kvw_write_behind_has_slot(store->writer);
}

void kvw_session_wait(struct kvw_session *store, uint64_t timeout_us)
{
    kv_client_wait(store->client, timeout_us);
}

kv_status_t kvw_session_fail(struct kvw_session *store, kv_status_t status)
{
    if (status != KV_OK && store->detail[0] == '\0')
        snprintf(store->detail, sizeof(store->detail), "store: %s",
                 kv_client_detail(store->client)[0] != '\0' ? kv_client_detail(store->client)
                                                            : kv_status_name(status));
    return status;
}

kv_status_t
kvw_session_refuse(struct kvw_session *store, kv_status_t status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    if (store->detail[0] == '\0')
        vsnprintf(store->detail, sizeof(store->detail), format, arguments);
    va_end(arguments);
    return status;
}

uint32_t kvw_session_reused(const struct kvw_session *store)
{
    return store->n_reused;
}

uint32_t kvw_session_stored(const struct kvw_session *store)
{
    struct kv_op *op;
    uint32_t tokens = 0;

    if (kv_length_begin(kvw_session_handle(store), 0, &op) != KV_OK)
        return 0;
    if (kv_wait(op) == KV_OK)
        tokens = kv_op_tokens(op);
    kv_op_free(op);
    return tokens;
}

/* What a publish that has ended says. */
static void end_publishing(struct kvw_session *store)
{
    if (kv_op_status(store->publishing) == KV_OK)
        store->n_published = kv_op_tokens(store->publishing);
    kv_op_free(store->publishing);
    store->publishing = NULL;
}

static kv_status_t
begin_publishing(struct kvw_session *store, const uint32_t *tokens, uint32_t n_tokens)
{
    struct kv_publish publish = {.first_block = 0};
    struct kv_id128 *names =
        name_blocks(store->client, store->info, tokens, n_tokens, &publish.n_names);
    kv_status_t status;

    if (names == NULL)
        return KV_NO_MEMORY;
    publish.names = names;
    if (store->tells_tokens) {
        publish.first_block = store->n_published / KV_BLOCK_TOKENS;
        publish.n_names -= publish.first_block;
        if (publish.n_names > TOLD_BLOCKS)
            publish.n_names = TOLD_BLOCKS; /* the next one goes on */
        publish.names += publish.first_block;
        publish.tokens = tokens + (size_t)publish.first_block * KV_BLOCK_TOKENS;
    }
    status = kv_publish_begin(store->session, &publish, 0, &store->publishing);
    free(names);
    return status;
}

void kvw_session_let_go(struct kvw_session *store)
{
    store->is_kept = false;
}

bool kvw_session_disown(struct kvw_session *store, const uint32_t *prompt)
{
    struct kv_id128 name;
    const struct kv_prefix prefix = {.verb = KV_PREFIX_EVICT, .name = &name};
    struct kv_op *op;
    kv_status_t status;

    kvw_session_let_go(store);
    if (store->info == NULL || store->n_reused == 0)
        return false;
    /* Which block is bad is not known here; all begin with the first. */
    kv_prompt_names(store->client, store->info, prompt, KV_BLOCK_TOKENS, NULL, 0, &name);
    status = kv_prefix_begin(store->client, KV_NODES_ALL, &prefix, 0, &op);
    return status == KV_OK && kv_finish(op) == KV_OK;
}

void kvw_session_approximate(struct kvw_session *store, uint32_t token_begin)
{
    if (store->n_exact > token_begin)
        store->n_exact = token_begin;
}

/* Whether blocks of these tokens are not published.  Those of approximate rows never are. */
static bool is_any_unpublished(const struct kvw_session *store, uint32_t n_tokens)
{
    return n_tokens / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS > store->n_published;
}

/* Publishes what is left, in as many steps as it takes; the rows are there.  Returns false
 * while one is under way. */
static bool publish_rest(struct kvw_session *store, const uint32_t *tokens, uint32_t n_tokens)
{
    const uint32_t before = store->n_published;
    const bool was_rest = store->publishes_rest;

    if (store->publishing != NULL) {
        if (kv_op_status(store->publishing) == KV_IN_PROGRESS)
            return false;
        end_publishing(store);
    }
    store->publishes_rest = false;
    /* With their tokens, one publish may not take all of them; else another one takes no
     * more. */
    if (!is_any_unpublished(store, n_tokens) ||
        (was_rest && (!store->tells_tokens || store->n_published <= before)))
        return true;
    store->publishes_rest = begin_publishing(store, tokens, n_tokens) == KV_OK;
    return !store->publishes_rest;
}

void kvw_session_publish(struct kvw_session *store,
                         const uint32_t *tokens,
                         uint32_t n_tokens,
                         bool waits)
{
    if (store->info == NULL || store->parent != NULL)
        return;
    if (n_tokens > store->n_exact)
        n_tokens = store->n_exact;
    if (waits) {
        if (is_any_unpublished(store, n_tokens) && kvw_session_flush(store) != KV_OK)
            return;
        while (!publish_rest(store, tokens, n_tokens))
            (void)kv_wait(store->publishing);
        return;
    }
    if (store->publishing != NULL) {
        (void)kv_poll(store->client); /* where nothing else has, for a while */
        if (kv_op_status(store->publishing) == KV_IN_PROGRESS)
            return;
        end_publishing(store);
    }
    if (is_any_unpublished(store, n_tokens))
        (void)begin_publishing(store, tokens, n_tokens);
}

bool kvw_session_leave(struct kvw_session *store, const uint32_t *tokens, uint32_t n_tokens)
{
    assert(store->parent == NULL);
    if (store->opening != NULL && kvw_session_opened(store) == KV_IN_PROGRESS)
        return false;
    if (store->closing == NULL) {
        if (tokens == NULL) {
            store->to_send.n_tokens = 0;
            kvw_write_behind_give_up(store->writer);
        }
        if (n_tokens > store->n_exact)
            n_tokens = store->n_exact;
        if (tokens != NULL && store->info != NULL && store->open_status == KV_OK &&
            !publish_rest(store, tokens, n_tokens))
            return false;
        if (store->session == NULL || store->is_kept ||
            kv_close_begin(store->session, 0, &store->closing) != KV_OK)
            return true;
    }
    return kv_op_status(store->closing) != KV_IN_PROGRESS;
}

kv_status_t kvw_session_truncate(struct kvw_session *store, uint32_t tokens)
{
    struct kv_op *op;
    kv_status_t status = kvw_session_flush(store);

    if (status != KV_OK)
        return status;
    status = kv_truncate_begin(store->session, tokens, 0, &op);
    if (status == KV_OK)
        status = kv_finish(op);
    if (store->n_exact != 0 && store->n_exact >= tokens)
        store->n_exact = UINT32_MAX;
    if (store->n_published > tokens)
        store->n_published = tokens / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    return kvw_session_fail(store, status);
}

kv_status_t kvw_session_enter_fork(struct kvw_session *store, uint32_t tokens)
{
    struct kv_op *op;
    kv_status_t status = kvw_session_flush(store);

    if (status != KV_OK)
        return status;
    if (store->parent != NULL)
        return KV_UNSUPPORTED;
    status = kv_fork_begin(store->session, tokens, 0, &op);
    if (status == KV_OK) {
        status = kv_wait(op);
        if (status == KV_OK) {
            store->parent = store->session;
            store->session = kv_op_session(op);
            kvw_write_behind_go_on(store->writer, store->session);
        }
        kv_op_free(op);
    }
    return kvw_session_fail(store, status);
}

kv_status_t kvw_session_leave_fork(struct kvw_session *store)
{
    kv_status_t status = kvw_session_flush(store);

    if (store->parent == NULL)
        return KV_INVALID;
    close_session(store->session);
    store->session = store->parent;
    store->parent = NULL;
    kvw_write_behind_go_on(store->writer, store->session);
    return status;
}

const char *kvw_session_detail(const struct kvw_session *store)
{
    return store->detail[0] != '\0' ? store->detail : kvw_write_behind_detail(store->writer);
}

uint64_t kvw_session_bytes_put(const struct kvw_session *store)
{
    return kvw_write_behind_bytes(store->writer);
}

void kvw_session_count_read(struct kvw_session *store, const struct kv_rows *rows)
{
    store->bytes_read += kv_rows_bytes(kv_session_schema(store->session), rows);
}

uint64_t kvw_session_bytes_read(const struct kvw_session *store)
{
    return store->bytes_read;
}

double kvw_session_wait_s(const struct kvw_session *store)
{
    return kvw_write_behind_wait_s(store->writer);
}
