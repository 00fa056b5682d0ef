#include "gpu-worker/commands/conversation.h"

#include "gpu-worker/kvcache/session.h"
#include "gpu-worker/text/utf8_stream.h"
#include "kvserver/base/memory.h"

#include <assert.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TRIES = 24,           /* of one answer, each after the store has failed */
    RETRY_MS = 500,       /* while no node is up */
    SAVE_TRIES = 4,       /* other workers may save, too */
    ARRIVED_US = 1 << 20, /* between two lines about rows that still come */
};

static_assert((int)KVW_SAMPLER_STATE_WORDS == (int)KVW_RECORD_RANDOM_WORDS,
              "a record has a sampler's state");

/* ---- the store --------------------------------------------------------------------------- */

const char *kvw_session_name(const struct kvw_context *worker, int *ret_outcome)
{
    const char *name = worker->options->session;

    *ret_outcome = KVW_DONE;
    if (name[0] == '\0')
        return NULL;
    if (!kvw_record_is_name(name)) {
        kvw_error(worker,
                  "option: --session: %zu bytes: expected 1 to %d, without control characters",
                  strlen(name), KVW_RECORD_NAME_MAX);
        *ret_outcome = KVW_USAGE;
    } else if (strcmp(worker->options->store, "embedded") == 0) {
        kvw_error(worker,
                  "option: --session: an embedded store ends with this process: use --store");
        *ret_outcome = KVW_USAGE;
    }
    return name;
}

/* Returns how many tokens fit: the model's context, or fewer if the embedded store or three
 * quarters of the memory that the weights leave hold fewer. */
static uint32_t context_tokens(const struct kvw_context *worker)
{
    const struct kvw_model_params *params = &worker->model->params;
    const bool is_embedded = strcmp(worker->options->store, "embedded") == 0;
    const uint64_t total = kv_memory_total();
    uint64_t fit = params->context, bytes;
    kv_schema_t *schema = malloc(sizeof(*schema));

    if (schema != NULL &&
        kvw_model_schema(params, kvw_dtype(worker->options), schema) == KV_OK) {
        bytes = kv_schema_token_bytes(schema) * (is_embedded ? 2 : 1);
        if (params->weight_bytes < total &&
            (total - params->weight_bytes) / 4 * 3 / bytes < fit)
            fit = (total - params->weight_bytes) / 4 * 3 / bytes;
        if (is_embedded && kvw_store_tokens(schema, worker->options->memory) < fit)
            fit = kvw_store_tokens(schema, worker->options->memory);
    }
    free(schema);
    return fit > 0 ? (uint32_t)fit : 1;
}

kv_status_t kvw_context_fingerprint(const struct kvw_context *worker,
                                    struct kv_id128 *ret_fingerprint)
{
    struct kv_model_info *info = calloc(1, sizeof(*info));
    kv_status_t status = KV_NO_MEMORY;

    if (info != NULL)
        status = kvw_model_info(worker->model, worker->dtype, info);
    if (status == KV_OK)
        *ret_fingerprint = info->fingerprint;
    free(info);
    return status;
}

/* ---- the record -------------------------------------------------------------------------- */

/* Checks what only the model can tell. */
static int check_record(const struct kvw_context *worker,
                        const char *name,
                        const struct kvw_record *record)
{
    struct kv_id128 own;

    if (kvw_context_fingerprint(worker, &own) != KV_OK) {
        kvw_error(worker, "out of memory: fingerprint");
        return KVW_FAILED;
    }
    if (memcmp(&own, &record->fingerprint, sizeof(own)) != 0) {
        kvw_error(worker, "session %s: of another model or --kv-type than %s with %s", name,
                  worker->options->model, worker->options->kv_type);
        return KVW_USAGE;
    }
    for (uint32_t i = 0; i < record->n_tokens; i++) {
        if (record->tokens[i] >= worker->model->params.n_vocabulary) {
            kvw_error(worker,
                      "session %s: token %" PRIu32 ": %" PRIu32 ": the model has %" PRIu32
                      " tokens",
                      name, i, record->tokens[i], worker->model->params.n_vocabulary);
            return KVW_USAGE;
        }
    }
    return KVW_DONE;
}

int kvw_conversation_load(struct kvw_context *worker,
                          const char *name,
                          struct kvw_record *ret_record,
                          bool *ret_is_new)
{
    char detail[KVW_DETAIL_BYTES] = "", other_detail[KVW_DETAIL_BYTES] = "";
    bool is_lost = false;
    kv_status_t status =
        kvw_record_load(worker->client, name, ret_record, &is_lost, detail, sizeof(detail));
    int outcome;

    if (status == KV_UNREACHABLE || is_lost) {
        struct kvw_record other;

        /* Whoever went on without a node that is down has saved where it is not needed. */
        if (kvw_reconnect(worker, other_detail, sizeof(other_detail)) != KV_OK) {
            kvw_error(worker, "store: %s", other_detail);
            kvw_record_fini(ret_record);
            return KVW_FAILED;
        }
        if (kvw_record_load(worker->client, name, &other, &is_lost, other_detail,
                            sizeof(other_detail)) == KV_OK) {
            if (status != KV_OK || other.number > ret_record->number) {
                kvw_record_fini(ret_record);
                *ret_record = other;
            } else {
                kvw_record_fini(&other);
            }
            status = KV_OK;
        }
        if (status == KV_OK)
            kvw_error(worker,
                      "session %s: its last record may be lost: going on with record "
                      "%" PRIu64,
                      name, ret_record->number);
    }
    *ret_is_new = status == KV_NOT_FOUND;
    if (*ret_is_new)
        return KVW_DONE;
    if (status != KV_OK) {
        kvw_error(worker, "session %s: %s%s", name, detail, kvw_next_step(status));
        return status == KV_CORRUPT || status == KV_VERSION ? KVW_USAGE : KVW_FAILED;
    }
    outcome = check_record(worker, name, ret_record);
    if (outcome != KVW_DONE)
        kvw_record_fini(ret_record);
    return outcome;
}

/* Saves a record as the last one, whatever other workers have saved since it was loaded. */
static kv_status_t save_record(struct kvw_context *worker,
                               const char *name,
                               struct kvw_record *record,
                               char *detail,
                               size_t detail_bytes)
{
    kv_status_t status = KV_EXISTS;

    for (unsigned i = 0; i < SAVE_TRIES && status == KV_EXISTS; i++) {
        struct kvw_record last;
        bool is_lost;

        status = kvw_record_save(worker->client, name, record, detail, detail_bytes);
        if (status == KV_EXISTS && kvw_record_load(worker->client, name, &last, &is_lost,
                                                   detail, detail_bytes) == KV_OK) {
            record->number = last.number > record->number ? last.number : record->number;
            kvw_record_fini(&last);
        }
    }
    return status;
}

/* Saves what the conversation is now.  It goes on if that fails. */
static void save(struct kvw_conversation *conversation)
{
    struct kvw_context *worker = conversation->worker;
    struct kvw_record *record = &conversation->record;
    const uint64_t number = record->number;
    char detail[KVW_DETAIL_BYTES] = "";
    kv_status_t status;

    if (conversation->name == NULL)
        return;
    record->n_stored = conversation->n_passed;
    record->is_arriving = false;
    kv_session_ticket(kvw_session_handle(worker->attention->session), &record->ticket);
    kvw_sampler_get_state(conversation->sampler, record->random);
    status = save_record(worker, conversation->name, record, detail, sizeof(detail));
    if (status != KV_OK)
        kvw_error(worker, "session %s: not saved: %s", conversation->name, detail);
    else if (record->number > number + 1)
        kvw_error(worker, "session %s: another worker has saved it, too: this one is the last",
                  conversation->name);
}

/* ---- opening ----------------------------------------------------------------------------- */

/* Takes what the record says, in memory for the tokens to come. */
static int take_record(struct kvw_conversation *conversation)
{
    struct kvw_context *worker = conversation->worker;
    struct kvw_record *record = &conversation->record;
    const size_t room = (size_t)worker->capacity + worker->options->max_tokens;
    uint32_t *tokens;

    if (record->n_tokens > worker->capacity) {
        kvw_error(worker, "session %s: %" PRIu32 " tokens: limit %" PRIu32, conversation->name,
                  record->n_tokens, worker->capacity);
        return KVW_USAGE;
    }
    tokens = calloc(room, sizeof(tokens[0]));
    if (tokens == NULL) {
        kvw_error(worker, "out of memory: tokens");
        return KVW_FAILED;
    }
    if (record->n_tokens > 0)
        memcpy(tokens, record->tokens, record->n_tokens * sizeof(tokens[0]));
    free(record->tokens);
    record->tokens = tokens;
    conversation->messages_room = record->n_messages;
    if (conversation->is_new)
        return kvw_context_fingerprint(worker, &record->fingerprint) == KV_OK ? KVW_DONE
                                                                              : KVW_FAILED;
    kvw_sampler_set_state(conversation->sampler, record->random);
    conversation->n_passed = record->n_stored;
    conversation->has_share = true;
    conversation->is_resumed = !record->is_arriving;
    conversation->share = (struct kvw_session_share){
        .ticket = record->ticket,
        .is_arriving = record->is_arriving,
        .stop = &kvw_stop,
    };
    return KVW_DONE;
}

void kvw_conversation_say(const struct kvw_conversation *conversation)
{
    const struct kvw_record *record = &conversation->record;

    if (conversation->name == NULL || conversation->worker->options->json)
        return;
    if (conversation->is_new)
        fprintf(stderr, "kvworker: session %s: not in the store: it begins now\n",
                conversation->name);
    else
        fprintf(stderr, "kvworker: session %s: %" PRIu32 " messages, %" PRIu32 " tokens\n",
                conversation->name, record->n_messages, record->n_tokens);
}

int kvw_conversation_open(struct kvw_conversation *conversation, struct kvw_context *worker)
{
    int outcome;

    *conversation = (struct kvw_conversation){.worker = worker, .is_new = true};
    conversation->name = kvw_session_name(worker, &outcome);
    if (outcome != KVW_DONE ||
        (outcome = kvw_open_sampler(worker, &conversation->sampler)) != KVW_DONE ||
        (outcome = kvw_attention_options(worker, &conversation->method)) != KVW_DONE ||
        (outcome = kvw_open_store(worker, context_tokens(worker))) != KVW_DONE)
        return outcome;
    conversation->n_nodes = kv_client_n_nodes(worker->client);
    worker->is_kept = conversation->name != NULL;
    worker->reuses = !worker->options->fresh;
    worker->publishes = true;
    if (conversation->name != NULL)
        outcome = kvw_conversation_load(worker, conversation->name, &conversation->record,
                                        &conversation->is_new);
    return outcome == KVW_DONE ? take_record(conversation) : outcome;
}

void kvw_conversation_close(struct kvw_conversation *conversation)
{
    kvw_answer_fini(&conversation->answer);
    kvw_record_fini(&conversation->record);
    kvw_sampler_destroy(conversation->sampler);
    kvw_chat_template_destroy(conversation->template);
}

/* ---- messages ---------------------------------------------------------------------------- */

bool kvw_conversation_takes(const struct kvw_context *worker, const char *text, size_t bytes)
{
    if (strlen(text) == bytes)
        return true;
    kvw_error(worker, "prompt: byte %zu: zero: expected text", strlen(text));
    return false;
}

int kvw_conversation_add(struct kvw_conversation *conversation,
                         enum kvw_chat_role role,
                         char *text)
{
    struct kvw_record *record = &conversation->record;

    if (record->n_messages == conversation->messages_room) {
        const size_t room =
            conversation->messages_room > 0 ? conversation->messages_room * 2 : 16;
        void *larger = realloc(record->messages, room * sizeof(record->messages[0]));

        if (larger == NULL) {
            free(text);
            kvw_error(conversation->worker, "out of memory: messages");
            return KVW_FAILED;
        }
        record->messages = larger;
        conversation->messages_room = room;
    }
    record->messages[record->n_messages++] =
        (struct kvw_record_message){.role = role, .text = text};
    return KVW_DONE;
}

void kvw_conversation_drop(struct kvw_conversation *conversation)
{
    struct kvw_record *record = &conversation->record;

    free(record->messages[--record->n_messages].text);
}

int kvw_conversation_template(struct kvw_conversation *conversation)
{
    const struct kvw_context *worker = conversation->worker;
    char detail[KVW_DETAIL_BYTES] = "";
    const kv_status_t status = kvw_chat_template_create(
        worker->gguf, worker->tokenizer, NULL, &conversation->template, detail, sizeof(detail));

    if (status == KV_OK)
        return KVW_DONE;
    kvw_error(worker, "%s", detail);
    return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
}

int kvw_conversation_encode(struct kvw_conversation *conversation,
                            uint32_t **ret_tokens,
                            size_t *ret_count)
{
    const struct kvw_record *record = &conversation->record;
    const struct kvw_context *worker = conversation->worker;
    struct kvw_chat_message *messages;
    kv_status_t status;

    messages = calloc(record->n_messages, sizeof(messages[0]));
    if (messages == NULL) {
        kvw_error(worker, "out of memory: messages");
        return KVW_FAILED;
    }
    for (uint32_t i = 0; i < record->n_messages; i++)
        messages[i] = (struct kvw_chat_message){
            .role = (enum kvw_chat_role)record->messages[i].role,
            .text = record->messages[i].text,
            .bytes = strlen(record->messages[i].text),
        };
    status = kvw_chat_template_encode(conversation->template, messages, record->n_messages,
                                      ret_tokens, ret_count);
    free(messages);
    if (status != KV_OK) {
        kvw_error(worker, "prompt: tokens: %s", kv_status_name(status));
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    return KVW_DONE;
}

int kvw_conversation_append(struct kvw_conversation *conversation,
                            const char *text,
                            size_t bytes,
                            uint32_t **ret_tokens,
                            size_t *ret_count)
{
    const struct kvw_record *record = &conversation->record;
    const struct kvw_context *worker = conversation->worker;
    uint32_t *added, *tokens;
    size_t n;
    /* A text begins in its own way; what continues one does not. */
    const kv_status_t status = kvw_tokenizer_encode(worker->tokenizer, text, bytes, false,
                                                    conversation->is_new, &added, &n);

    if (status != KV_OK) {
        kvw_error(worker, "prompt: tokens: %s", kv_status_name(status));
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    tokens = malloc((record->n_tokens + n) * sizeof(tokens[0]));
    if (tokens == NULL) {
        kvw_error(worker, "out of memory: tokens");
        free(added);
        return KVW_FAILED;
    }
    if (record->n_tokens > 0)
        memcpy(tokens, record->tokens, record->n_tokens * sizeof(tokens[0]));
    memcpy(tokens + record->n_tokens, added, n * sizeof(tokens[0]));
    free(added);
    *ret_tokens = tokens;
    *ret_count = record->n_tokens + n;
    return KVW_DONE;
}

int kvw_conversation_check(const struct kvw_conversation *conversation, bool is_raw)
{
    const struct kvw_record *record = &conversation->record;

    if (conversation->is_new)
        return KVW_DONE;
    if (is_raw != (record->n_messages == 0)) {
        kvw_error(conversation->worker, "session %s: %s: expected %s", conversation->name,
                  is_raw ? "a conversation" : "a text without a chat template (--raw)",
                  is_raw ? "a text without a chat template" : "a conversation");
        return KVW_USAGE;
    }
    if (record->is_arriving ||
        (!is_raw && record->messages[record->n_messages - 1].role != KVW_CHAT_ASSISTANT)) {
        kvw_error(conversation->worker,
                  "session %s: it has no answer yet: kvworker decode gives it",
                  conversation->name);
        return KVW_USAGE;
    }
    return KVW_DONE;
}

int kvw_conversation_fit(struct kvw_conversation *conversation, size_t n_tokens)
{
    struct kvw_context *worker = conversation->worker;
    const uint64_t wanted = (uint64_t)n_tokens + worker->options->max_tokens;

    if (n_tokens == 0 || n_tokens > worker->capacity) {
        kvw_error(worker, "prompt: %zu tokens: expected 1 to %" PRIu32, n_tokens,
                  worker->capacity);
        return KVW_USAGE;
    }
    if (wanted < worker->capacity)
        worker->capacity = (uint32_t)wanted;
    return KVW_DONE;
}

/* ---- an answer --------------------------------------------------------------------------- */

static void prefilled(void *arg, uint32_t done, uint32_t total)
{
    (void)arg;
    kvw_progress("prompt", done, total);
}

static void generated(void *arg, uint32_t token)
{
    struct kvw_conversation *conversation = arg;

    conversation->n_generated++;
    kvw_answer_token(&conversation->answer, token);
}

static bool is_end(void *arg, uint32_t token)
{
    return kvw_tokenizer_is_end(((const struct kvw_conversation *)arg)->worker->tokenizer,
                                token);
}

/* Rows of a layer are still coming. */
static void arrived(void *arg, uint32_t layer, uint32_t tokens, uint32_t needed)
{
    const struct kvw_conversation *conversation = arg;
    char what[64];

    snprintf(what, sizeof(what), "layer %" PRIu32 " of %" PRIu32 " arrives", layer + 1,
             conversation->worker->model->params.n_layers);
    kvw_progress(what, tokens < needed ? tokens : needed, needed);
}

/* Whether the rows may be lost while the text is not: they can be computed again. */
static bool is_recoverable(kv_status_t status)
{
    switch (status) {
    case KV_NOT_FOUND:
    case KV_STALE:
    case KV_CONFLICT:
    case KV_MOVED:
    case KV_NOT_READY:
    case KV_CORRUPT:
    case KV_DEADLINE:
    case KV_UNREACHABLE:
    case KV_DRAINING:
    case KV_DENIED: /* the tenant's other session has the id */
        return true;
    default:
        return false;
    }
}

static void keep_detail(struct kvw_conversation *conversation, kv_status_t status)
{
    const struct kvw_context *worker = conversation->worker;
    const char *detail = worker->attention != NULL ? kvw_method_detail(worker->attention) : "";

    snprintf(conversation->detail, sizeof(conversation->detail), "%s",
             detail[0] != '\0' ? detail : kv_status_name(status));
}

/* Opens the session of the record, or a new one for the n tokens. */
static kv_status_t open_session(struct kvw_conversation *conversation, uint32_t n)
{
    struct kvw_context *worker = conversation->worker;
    const struct kvw_method_ops *ops = kvw_method_find(worker->options->attention);
    const uint32_t *tokens = conversation->record.tokens;

    conversation->share.arg = conversation;
    conversation->share.arrived = arrived;
    worker->share = conversation->has_share ? &conversation->share : NULL;
    return kvw_try_attention(worker, ops, &conversation->method, tokens, n,
                             conversation->detail, sizeof(conversation->detail));
}

/* Says what a failure of the store costs, once it is known. */
static void say_lost(struct kvw_conversation *conversation, uint32_t n)
{
    const uint32_t n_nodes = kv_client_n_nodes(conversation->worker->client);
    char nodes[64] = "";

    if (n_nodes < conversation->n_nodes)
        snprintf(nodes, sizeof(nodes), ", on %" PRIu32 " of %" PRIu32 " nodes", n_nodes,
                 conversation->n_nodes);
    kvw_error(conversation->worker,
              "%s: %" PRIu32 " of %" PRIu32 " tokens are computed again%s", conversation->lost,
              n - conversation->n_passed, n, nodes);
    conversation->lost[0] = '\0';
}

/* One try to answer to the first n tokens, of which the last n_generated are of the answer. */
static kv_status_t try_answer(struct kvw_conversation *conversation,
                              uint32_t n,
                              struct kvw_generate_result *ret_result)
{
    struct kvw_context *worker = conversation->worker;
    const struct kvw_generate_setup setup = {
        .sampler = conversation->sampler,
        .n_vocabulary = worker->model->params.n_vocabulary,
        .capacity = worker->capacity,
        .max_tokens = (uint32_t)worker->options->max_tokens - conversation->n_generated,
        .stop = &kvw_stop,
        .arg = conversation,
        .prefilled = prefilled,
        .generated = generated,
        .is_end = is_end,
    };
    struct kvw_generate_setup ready = setup;
    kv_status_t status = KV_OK;

    if (worker->attention == NULL) {
        status = open_session(conversation, n);
        if (status != KV_OK)
            return status;
        if (!conversation->has_share)
            conversation->n_passed = kvw_session_reused(worker->attention->session);
        if (conversation->lost[0] != '\0')
            say_lost(conversation, n);
    }
    if (conversation->is_resumed) {
        status = kvw_method_truncate(worker->attention, conversation->n_passed);
        conversation->is_resumed = false;
    }
    if (status == KV_OK) {
        ready.forward = worker->forward;
        ready.attention = worker->attention;
        status = kvw_generate(&ready, conversation->record.tokens, n, conversation->n_passed,
                              ret_result);
    }
    if (status != KV_OK)
        keep_detail(conversation, status);
    return status;
}

/* Rows that the session began with are corrupt: the next one is not to begin with them, too. */
static void drop_corrupt(const struct kvw_conversation *conversation)
{
    struct kvw_context *worker = conversation->worker;
    struct kvw_session *session = worker->attention->session;

    if (!kvw_session_disown(session, conversation->record.tokens) &&
        kvw_session_reused(session) > 0)
        worker->reuses = false;
}

/* After a failure: prepares the next try for n tokens.  Returns false if the store cannot be used
 * now. */
static bool recover(struct kvw_conversation *conversation, uint32_t n, kv_status_t status)
{
    struct kvw_context *worker = conversation->worker;
    const bool was_arriving = conversation->has_share && conversation->share.is_arriving;
    char detail[KVW_DETAIL_BYTES] = "";
    uint32_t passed = 0;

    kvw_progress_end();
    if (conversation->lost[0] == '\0')
        snprintf(conversation->lost, sizeof(conversation->lost), "%s", conversation->detail);
    if (status == KV_NOT_READY && was_arriving) {
        /* Whoever brings the rows has stopped.  If it still goes on, it brings the same. */
        passed = worker->attention != NULL ? kvw_session_stored(worker->attention->session) : 0;
        conversation->share.is_arriving = false;
    } else {
        conversation->has_share = false;
    }
    conversation->is_resumed = false;
    conversation->n_passed = passed < n ? passed : n - 1;
    if (status == KV_CORRUPT && worker->attention != NULL)
        drop_corrupt(conversation);
    kvw_close_attention(worker);
    if (status != KV_UNREACHABLE && status != KV_DEADLINE && worker->client != NULL)
        return true;
    if (kvw_reconnect(worker, detail, sizeof(detail)) == KV_OK)
        return true;
    if (!conversation->is_waiting)
        kvw_error(worker, "%s; waiting for a node", conversation->lost);
    conversation->is_waiting = true;
    return false;
}

/* Goes back to what the cache and the new tokens have in common, and takes these. */
static kv_status_t
go_back(struct kvw_conversation *conversation, const uint32_t *tokens, uint32_t n)
{
    struct kvw_record *record = &conversation->record;
    struct kvw_method *attention = conversation->worker->attention;
    uint32_t same = 0;
    kv_status_t status = KV_OK;

    while (same < conversation->n_passed && same + 1 < n &&
           record->tokens[same] == tokens[same])
        same++;
    if (same < conversation->n_passed && attention != NULL) {
        status = kvw_method_truncate(attention, same);
    } else if (same < conversation->n_passed && !conversation->is_resumed) {
        conversation->has_share = false; /* another worker is bringing other rows */
        same = 0;
    }
    conversation->n_passed = same;
    memmove(record->tokens, tokens, n * sizeof(tokens[0]));
    return status;
}

/* Generates, also if the store fails on the way: at most TRIES times. */
static kv_status_t generate(struct kvw_conversation *conversation,
                            const uint32_t *tokens,
                            uint32_t n,
                            struct kvw_generate_result *ret_result)
{
    kv_status_t status = go_back(conversation, tokens, n), failure = KV_OK;

    conversation->n_generated = 0;
    conversation->is_waiting = false;
    conversation->lost[0] = '\0';
    if (status != KV_OK)
        keep_detail(conversation, status);
    for (unsigned i = 0; i < TRIES; i++) {
        const uint32_t before = conversation->n_generated;
        bool is_up = true;

        if (status == KV_OK)
            status = try_answer(conversation, n + before, ret_result);
        if (status == KV_OK) {
            ret_result->prompt_tokens = n;
            /* What the last try found may end with tokens of the answer. */
            if (ret_result->reused_tokens > n)
                ret_result->reused_tokens = n;
            ret_result->generated_tokens = conversation->n_generated;
            return KV_OK;
        }
        if (!is_recoverable(status) || kvw_stop)
            break;
        failure = status;
        is_up = recover(conversation, n + conversation->n_generated, status);
        if (!is_up)
            poll(NULL, 0, RETRY_MS);
        status = is_up ? KV_OK : KV_UNREACHABLE;
    }
    return status != KV_OK ? status : failure;
}

/* Adds the answer to the messages, or to the last one, which it continues. */
static int add_answer(struct kvw_conversation *conversation)
{
    struct kvw_record *record = &conversation->record;
    struct kvw_record_message *last = &record->messages[record->n_messages - 1];
    char *text = strdup(conversation->answer.text);

    if (text == NULL) {
        kvw_error(conversation->worker, "out of memory: messages");
        return KVW_FAILED;
    }
    if (last->role == KVW_CHAT_ASSISTANT) {
        const size_t bytes = strlen(last->text);
        char *joined = realloc(text, bytes + strlen(text) + 1);

        if (joined == NULL) {
            free(text);
            kvw_error(conversation->worker, "out of memory: messages");
            return KVW_FAILED;
        }
        memmove(joined + bytes, joined, strlen(joined) + 1);
        memcpy(joined, last->text, bytes);
        text = joined;
        kvw_conversation_drop(conversation);
    }
    return kvw_conversation_add(conversation, KVW_CHAT_ASSISTANT, text);
}

int kvw_conversation_answer(struct kvw_conversation *conversation,
                            const uint32_t *tokens,
                            size_t n_tokens,
                            struct kvw_generate_result *ret_result)
{
    struct kvw_context *worker = conversation->worker;
    struct kvw_record *record = &conversation->record;
    int outcome = KVW_DONE;
    kv_status_t status;

    assert(n_tokens > 0 && n_tokens <= worker->capacity);
    kvw_answer_fini(&conversation->answer);
    status = kvw_answer_init(&conversation->answer, worker);
    if (status != KV_OK) {
        kvw_error(worker, "out of memory: answer");
        return KVW_FAILED;
    }
    status = generate(conversation, tokens, (uint32_t)n_tokens, ret_result);
    kvw_progress_end();
    if (status != KV_OK) {
        kvw_answer_break_off(&conversation->answer);
        kvw_error(worker, "%s", conversation->detail);
        return KVW_FAILED;
    }
    kvw_answer_end(&conversation->answer);
    conversation->n_passed = ret_result->passed_tokens;
    record->n_tokens = (uint32_t)n_tokens + ret_result->generated_tokens;
    conversation->has_share = true;
    conversation->share.is_arriving = false;
    kv_session_ticket(kvw_session_handle(worker->attention->session),
                      &conversation->share.ticket);
    if (ret_result->generated_tokens > 0 || ret_result->end != KVW_END_INTERRUPT) {
        if (record->n_messages > 0)
            outcome = add_answer(conversation);
        if (outcome == KVW_DONE)
            save(conversation); /* before whoever reads the report relies on it */
    }
    if (worker->options->json)
        kvw_report_json(worker, ret_result, conversation->answer.text,
                        record->tokens + n_tokens);
    return outcome;
}
