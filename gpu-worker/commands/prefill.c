/* prefill: stores the rows of a prompt in a session that kvworker decode answers, in another
 * process and at the same time if it likes.
 *
 * All tokens but the last one are stored: decode computes that one, to know what comes next.  So
 * the record, which says how many tokens there are, can be saved before anything is computed. */
#include "gpu-worker/base/time.h"
#include "gpu-worker/commands/conversation.h"
#include "gpu-worker/kvcache/session.h"
#include "kvserver/base/json.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    JOIN_TRIES = 4, /* other workers may begin the session at the same time */
};

struct prefill {
    struct kvw_context *worker;
    const char *name;
    struct kvw_record record; /* of this prompt */
    uint32_t n_reused;        /* tokens that the session had */
    double prefill_s;
};

/* Parses --kv-heads. */
static int take_heads(struct kvw_context *worker)
{
    const char *text = worker->options->kv_heads;
    const uint32_t n_heads = worker->model->params.n_kv_heads;
    unsigned long begin = 0, end = n_heads;
    char *at = NULL;

    if (text[0] != '\0') {
        begin = strtoul(text, &at, 10);
        if (text[0] < '0' || text[0] > '9' || *at != '-' || at[1] < '0' || at[1] > '9')
            end = 0;
        else
            end = strtoul(at + 1, &at, 10);
        if (end <= begin || end > n_heads || *at != '\0') {
            kvw_error(worker, "option: --kv-heads: not A-B with 0 <= A < B <= %" PRIu32 ": %s",
                      n_heads, text);
            return KVW_USAGE;
        }
    }
    if (end - begin < n_heads && worker->options->publish_tokens) {
        kvw_error(worker,
                  "option: --publish-tokens: not with --kv-heads %s: blocks are published "
                  "with the rows of all KV heads",
                  text);
        return KVW_USAGE;
    }
    worker->kv_head_begin = (uint32_t)begin;
    worker->n_kv_heads = (uint32_t)(end - begin);
    return KVW_DONE;
}

static bool is_same_prompt(const struct kvw_record *record, const struct kvw_record *other)
{
    return other->is_arriving && record->n_tokens == other->n_tokens &&
           memcmp(record->tokens, other->tokens,
                  record->n_tokens * sizeof(record->tokens[0])) == 0;
}

/* Opens a session: another worker's, or a new one.  Prints no error. */
static kv_status_t open_session(struct prefill *prefill,
                                const struct kv_ticket *ticket,
                                char *detail,
                                size_t detail_bytes)
{
    struct kvw_session_share share = {.is_exact = true};
    struct kvw_context *worker = prefill->worker;
    kv_status_t status;

    if (ticket != NULL)
        share.ticket = *ticket;
    worker->share = ticket != NULL ? &share : NULL;
    worker->is_kept = true;
    worker->reuses = !worker->options->fresh;
    worker->publishes = true;
    status = kvw_try_attention(worker, &kvw_method_full, &kvw_method_defaults,
                               prefill->record.tokens, prefill->record.n_tokens, detail,
                               detail_bytes);
    worker->share = NULL;
    if (status == KV_OK)
        kv_session_ticket(kvw_session_handle(worker->attention->session),
                          &prefill->record.ticket);
    return status;
}

/* Joins the session of the same prompt that another worker has begun, or begins it. */
static int join(struct prefill *prefill)
{
    struct kvw_context *worker = prefill->worker;
    struct kvw_record *record = &prefill->record;
    char detail[KVW_DETAIL_BYTES] = "";
    kv_status_t status = KV_EXISTS;

    for (unsigned i = 0; i < JOIN_TRIES && status == KV_EXISTS; i++) {
        struct kvw_record other;
        bool is_new, is_same;
        int outcome = kvw_conversation_load(worker, prefill->name, &other, &is_new);

        if (outcome != KVW_DONE)
            return outcome;
        is_same = !is_new && is_same_prompt(record, &other);
        if (is_same) {
            status = open_session(prefill, &other.ticket, detail, sizeof(detail));
            if (status == KV_OK) {
                kvw_record_fini(&other);
                prefill->n_reused = kvw_session_stored(worker->attention->session);
                return KVW_DONE;
            }
            kvw_error(worker, "session %s: %s: begun again", prefill->name, detail);
        } else if (!is_new) {
            kvw_error(worker,
                      "session %s: replaced: it had %" PRIu32 " tokens, not the prompt's",
                      prefill->name, other.n_tokens);
        }
        record->number = is_new ? 0 : other.number;
        if (!is_new)
            kvw_record_fini(&other);
        status = open_session(prefill, NULL, detail, sizeof(detail));
        if (status == KV_OK) {
            prefill->n_reused = kvw_session_reused(worker->attention->session);
            status =
                kvw_record_save(worker->client, prefill->name, record, detail, sizeof(detail));
            if (status == KV_EXISTS) {
                /* Another worker was faster. */
                kvw_session_let_go(worker->attention->session);
                kvw_close_attention(worker);
            }
        }
    }
    if (status == KV_OK)
        return KVW_DONE;
    kvw_error(worker, "session %s: %s", prefill->name, detail);
    return KVW_FAILED;
}

static void report(const struct prefill *prefill)
{
    const struct kvw_context *worker = prefill->worker;
    const uint32_t n_stored = prefill->record.n_stored;
    struct kvw_method_stats stats;
    struct kv_json json;

    kvw_method_get_stats(worker->attention, &stats);
    if (!worker->options->json) {
        fprintf(stderr,
                "kvworker: session %s: %" PRIu32 " tokens of KV heads %" PRIu32 " to %" PRIu32
                " stored (%" PRIu32 " were) in %.2f s, %.0f/s; store %s: waited %.3f s\n",
                prefill->name, n_stored, worker->kv_head_begin,
                worker->kv_head_begin + worker->n_kv_heads - 1, prefill->n_reused,
                prefill->prefill_s,
                prefill->prefill_s > 0 ? (n_stored - prefill->n_reused) / prefill->prefill_s
                                       : 0,
                worker->options->store, stats.exposed_wait_s);
        return;
    }
    kv_json_begin(&json, stdout);
    kv_json_text(&json, "session", prefill->name);
    kv_json_number(&json, "prompt_tokens", prefill->record.n_tokens);
    kv_json_number(&json, "stored_tokens", n_stored);
    kv_json_number(&json, "reused_tokens", prefill->n_reused);
    kv_json_number(&json, "kv_head_begin", worker->kv_head_begin);
    kv_json_number(&json, "kv_heads", worker->n_kv_heads);
    kv_json_number(&json, "prefill_s", prefill->prefill_s);
    kv_json_number(&json, "bytes_put", (double)stats.bytes_put);
    kv_json_number(&json, "exposed_wait_s", stats.exposed_wait_s);
    kv_json_text(&json, "kv_type", worker->options->kv_type);
    kv_json_text(&json, "store", worker->options->store);
    kv_json_end(&json);
}

static int compute(struct prefill *prefill)
{
    const struct kvw_context *worker = prefill->worker;
    const uint32_t n_stored = prefill->record.n_stored;
    const uint64_t begin_us = kvw_now_us();
    kv_status_t status = KV_OK;

    if (prefill->n_reused > n_stored)
        prefill->n_reused = n_stored;
    for (uint32_t begin = prefill->n_reused, end; status == KV_OK && begin < n_stored;
         begin = end) {
        end = kvw_forward_chunk_end(begin, n_stored);
        status = kvw_stop
                     ? KV_CANCELLED
                     : kvw_forward_step(worker->forward, KVW_PREFILL,
                                        prefill->record.tokens + begin, begin, end - begin);
        kvw_progress("prompt", end, n_stored);
    }
    if (status == KV_OK)
        status = kvw_method_flush(worker->attention);
    if (status == KV_OK && worker->n_kv_heads == worker->model->params.n_kv_heads)
        kvw_method_publish(worker->attention, prefill->record.tokens, n_stored, true);
    kvw_progress_end();
    prefill->prefill_s = kvw_seconds_since(begin_us);
    if (status != KV_OK) {
        kvw_step_error(worker, status);
        kvw_drop_corrupt(worker, status, prefill->record.tokens);
        return KVW_FAILED;
    }
    report(prefill);
    return KVW_DONE;
}

/* Makes the record of the prompt; transfers `text`, which is its message unless it is raw. */
static int make_record(struct prefill *prefill, char *text, size_t bytes)
{
    const struct kvw_context *worker = prefill->worker;
    struct kvw_record *record = &prefill->record;
    size_t n_tokens = 0;
    int outcome = KVW_USAGE;

    if (worker->options->raw || kvw_conversation_takes(worker, text, bytes))
        outcome = kvw_encode_prompt(worker, text, bytes, &record->tokens, &n_tokens);

    if (outcome == KVW_DONE && (n_tokens == 0 || n_tokens > worker->model->params.context)) {
        kvw_error(worker, "prompt: %zu tokens: expected 1 to %" PRIu32, n_tokens,
                  worker->model->params.context);
        outcome = KVW_USAGE;
    }
    if (outcome == KVW_DONE && !worker->options->raw) {
        record->messages = calloc(1, sizeof(record->messages[0]));
        if (record->messages == NULL) {
            kvw_error(worker, "out of memory: messages");
            outcome = KVW_FAILED;
        } else {
            record->n_messages = 1;
            record->messages[0] =
                (struct kvw_record_message){.role = KVW_CHAT_USER, .text = text};
            text = NULL;
        }
    }
    record->n_tokens = (uint32_t)n_tokens;
    record->n_stored = n_tokens > 0 ? record->n_tokens - 1 : 0;
    record->is_arriving = true;
    free(text);
    return outcome;
}

int kvw_prefill_run(struct kvw_context *worker)
{
    struct prefill prefill = {.worker = worker};
    char *text = NULL;
    size_t bytes;
    int outcome;

    prefill.name = kvw_session_name(worker, &outcome);
    if (outcome != KVW_DONE)
        return outcome;
    if (prefill.name == NULL) {
        kvw_error(worker, "option: --session: missing");
        return KVW_USAGE;
    }
    if ((outcome = kvw_read_prompt(worker, &text, &bytes)) != KVW_DONE)
        return outcome;
    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE ||
        (outcome = take_heads(worker)) != KVW_DONE) {
        free(text);
        return outcome;
    }
    if ((outcome = make_record(&prefill, text, bytes)) == KVW_DONE &&
        (outcome = kvw_open_store(worker, prefill.record.n_tokens)) == KVW_DONE) {
        outcome = KVW_FAILED;
        if (kvw_context_fingerprint(worker, &prefill.record.fingerprint) == KV_OK)
            outcome = join(&prefill);
        else
            kvw_error(worker, "out of memory: fingerprint");
    }
    if (outcome == KVW_DONE)
        outcome = compute(&prefill);
    kvw_record_fini(&prefill.record);
    return outcome;
}
