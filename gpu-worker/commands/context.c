#include "gpu-worker/commands/context.h"

#include "gpu-worker/base/thread_pool.h"
#include "gpu-worker/text/chat_template.h"
#include "kvserver/base/memory.h"
#include "kvserver/base/thread.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CLIENT_OPS = 1024, /* of a client that is not told otherwise (kvclient.h) */
};

_Atomic int kvw_stop;

void kvw_error(const struct kvw_context *worker, const char *format, ...)
{
    va_list arguments;

    kvw_progress_end();
    fflush(stdout); /* in one terminal, in the right order */
    fputs("kvworker: ", stderr);
    if (worker->command != NULL)
        fprintf(stderr, "%s: ", worker->command);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

/* Returns the exit status: unusable input, or a failure. */
static int exit_status(kv_status_t status)
{
    switch (status) {
    case KV_INVALID:
    case KV_UNSUPPORTED:
    case KV_NOT_FOUND:
    case KV_TOO_LARGE:
        return KVW_USAGE;
    default:
        return KVW_FAILED;
    }
}

const char *kvw_next_step(kv_status_t status)
{
    return status == KV_UNREACHABLE ? "; start the node, or take it out of --store" : "";
}

void kvw_step_error(const struct kvw_context *worker, kv_status_t status)
{
    const char *detail = worker->attention != NULL ? kvw_method_detail(worker->attention) : "";

    kvw_error(worker, "%s%s", detail[0] != '\0' ? detail : kv_status_name(status),
              kvw_next_step(status));
}

void kvw_drop_corrupt(const struct kvw_context *worker,
                      kv_status_t status,
                      const uint32_t *prompt)
{
    if (status == KV_CORRUPT && kvw_session_disown(worker->attention->session, prompt))
        kvw_error(worker,
                  "what the nodes kept of this prompt is dropped: the next run computes "
                  "it anew");
}

/* ---- progress ---- */

static bool progress_shown;

void kvw_progress(const char *what, uint64_t done, uint64_t total)
{
    if (!isatty(STDERR_FILENO) || total == 0)
        return;
    fprintf(stderr, "\r%s: %3.0f %%", what, 100.0 * (double)done / (double)total);
    fflush(stderr);
    progress_shown = true;
}

void kvw_progress_end(void)
{
    if (progress_shown)
        fputs("\r\033[K", stderr);
    progress_shown = false;
}

static bool loaded(void *arg, uint64_t done, uint64_t total)
{
    (void)arg;
    kvw_progress("loading", done, total);
    return !kvw_stop;
}

/* ---- opening ---- */

int kvw_open_file(struct kvw_context *worker)
{
    char detail[KVW_DETAIL_BYTES] = "";
    kv_status_t status;

    if (worker->options->model[0] == '\0') {
        kvw_error(worker, "option: --model: missing");
        return KVW_USAGE;
    }
    status = kvw_gguf_open(worker->options->model, &worker->gguf, detail, sizeof(detail));
    if (status != KV_OK) {
        kvw_error(worker, "%s", detail);
        return KVW_USAGE;
    }
    return KVW_DONE;
}

int kvw_open_model(struct kvw_context *worker)
{
    const struct kvw_device_config config = {
        .n_threads = worker->options->threads > 0 ? (unsigned)worker->options->threads
                     : kv_thread_cores() < KVW_THREAD_POOL_THREADS_MAX
                         ? kv_thread_cores()
                         : KVW_THREAD_POOL_THREADS_MAX,
    };
    char detail[KVW_DETAIL_BYTES] = "";
    kv_status_t status;

    status = kvw_device_find(worker->options->device)
                 ->open(&config, &worker->device, detail, sizeof(detail));
    if (status == KV_OK)
        status = kvw_model_open(worker->gguf, worker->device, &worker->model, detail,
                                sizeof(detail));
    if (status == KV_OK)
        status = kvw_tokenizer_create(worker->gguf, &worker->tokenizer, detail, sizeof(detail));
    if (status != KV_OK) {
        kvw_error(worker, "%s", detail);
        return exit_status(status);
    }
    if (kvw_tokenizer_n_tokens(worker->tokenizer) > worker->model->params.n_vocabulary) {
        kvw_error(worker,
                  "model: %s: tokenizer: %" PRIu32 " tokens: expected at most %" PRIu32
                  ", the rows of the embedding",
                  worker->options->model, kvw_tokenizer_n_tokens(worker->tokenizer),
                  worker->model->params.n_vocabulary);
        return KVW_USAGE;
    }
    kvw_model_warm(worker->model, loaded, worker);
    kvw_progress_end();
    return KVW_DONE;
}

enum kv_dtype kvw_dtype(const struct kvw_options *options)
{
    return strcmp(options->kv_type, "fp32") == 0   ? KV_FP32
           : strcmp(options->kv_type, "bf16") == 0 ? KV_BF16
                                                   : KV_FP16;
}

uint64_t kvw_store_tokens(const kv_schema_t *schema, uint64_t memory)
{
    enum {
        COPY_SHARE = 8, /* of a row of fp16: half a byte for each element of its key */
        CODE_BYTES = 8, /* codes and summaries */
    };
    const uint64_t rows = kv_schema_token_bytes(schema),
                   block_bytes = (rows + rows / COPY_SHARE +
                                  schema->n_units * (sizeof(uint32_t) + CODE_BYTES)) *
                                 KV_BLOCK_TOKENS;

    return (memory - memory / 8) / block_bytes * KV_BLOCK_TOKENS;
}

/* Tokens of all sessions that may be open at the same time. */
static uint64_t tokens_of_all(const struct kvw_context *worker)
{
    if (worker->session_tokens > 0)
        return worker->session_tokens;
    return (uint64_t)worker->capacity * (worker->sessions > 0 ? worker->sessions : 1);
}

/* Checks that the weights, two copies of the rows and everything else fit into memory. */
static bool
memory_suffices(const struct kvw_context *worker, uint64_t rows_bytes, uint64_t store_tokens)
{
    const bool is_embedded = strcmp(worker->options->store, "embedded") == 0;
    const uint64_t weights = worker->model->params.weight_bytes;
    const uint64_t total = kv_memory_total();
    const uint64_t tokens = tokens_of_all(worker);

    if (is_embedded && tokens > store_tokens) {
        kvw_error(worker,
                  "memory: %" PRIu64 " tokens: the embedded store of %" PRIu64
                  " MiB (--memory) holds %" PRIu64 " tokens",
                  tokens, worker->options->memory >> 20, store_tokens);
        return false;
    }
    if (weights > total || rows_bytes > (total - weights) / (is_embedded ? 2 : 1)) {
        kvw_error(worker,
                  "memory: %" PRIu64 " tokens: %" PRIu64 " MiB of rows%s, %" PRIu64
                  " MiB of weights: the machine or container has %" PRIu64 " MiB",
                  tokens, rows_bytes >> 20, is_embedded ? " twice" : "", weights >> 20,
                  total >> 20);
        return false;
    }
    return true;
}

int kvw_attention_options(const struct kvw_context *worker,
                          struct kvw_method_options *ret_options)
{
    const struct kvw_options *options = worker->options;
    const struct kvw_method_option *option;

    *ret_options = kvw_method_defaults;
    ret_options->seed = options->seed;
    /* Those of the environment, then those of the command line, of which one may be a preset. */
    for (int is_given = 0; is_given < 2; is_given++)
        for (unsigned i = 0; (option = kvw_method_option_at(i)) != NULL; i++) {
            const union kvw_method_value *given = &options->method[i];
            const char *value = !option->is_flag ? given->text : given->is_set ? "yes" : "";

            if (options->is_given[i] == (is_given == 1) && value[0] != '\0' &&
                !option->set(ret_options, value)) {
                kvw_error(worker, "option: --%s: not %s: %s", option->name, option->expected,
                          value);
                return KVW_USAGE;
            }
        }
    return KVW_DONE;
}

static bool
is_used(const struct kvw_method_option *option, const struct kvw_planned_run *runs, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (kvw_method_uses(runs[i].ops, &runs[i].options, option))
            return true;
    return false;
}

bool kvw_options_are_used(const struct kvw_context *worker,
                          const struct kvw_planned_run *runs,
                          size_t n)
{
    const struct kvw_options *options = worker->options;
    const struct kvw_method_option *option, *rerank = kvw_method_option_find("rerank");

    for (size_t i = 0; i < n; i++) {
        const char *conflict = kvw_method_uses(runs[i].ops, &runs[i].options, rerank)
                                   ? kvw_method_conflict(&runs[i].options)
                                   : NULL;

        if (conflict == NULL)
            continue;
        kvw_error(worker, "option: %s", conflict);
        return false;
    }
    for (unsigned i = 0; (option = kvw_method_option_at(i)) != NULL; i++) {
        char users[KVW_EVAL_NAME_BYTES];

        if (!options->is_given[i] || is_used(option, runs, n))
            continue;
        kvw_error(worker, "option: --%s: not used by %s, only by %s", option->name,
                  options->attention[0] != '\0' ? options->attention : options->methods,
                  kvw_method_users(option, users, sizeof(users)));
        return false;
    }
    return true;
}

static kv_status_t
open_client(struct kvw_context *worker, const char *nodes, char *detail, size_t detail_bytes)
{
    const uint32_t ops_max = worker->sessions * kvw_session_ops_max(&worker->model->params);
    const struct kv_client_options options = {
        .salt = worker->salt,
        .salt_bytes = worker->salt_bytes,
        .nodes = nodes,
        .poll = worker->options->poll,
        .progress_thread = strcmp(worker->options->progress, "thread") == 0,
        .ops_max = ops_max > CLIENT_OPS ? ops_max : 0,
        /* Threads of an embedded node wait for the processors that compute. */
        .peer_timeout_ms = worker->embedded != NULL ? 10000 : 0,
    };

    return kv_client_open(&options, &worker->client, detail, detail_bytes);
}

int kvw_open_store(struct kvw_context *worker, uint32_t capacity)
{
    const struct kvw_options *options = worker->options;
    const bool is_embedded = strcmp(options->store, "embedded") == 0;
    char detail[KVW_DETAIL_BYTES] = "";
    kv_schema_t *schema;
    uint64_t rows_bytes, store_tokens;
    kv_status_t status;

    worker->capacity = capacity;
    worker->dtype = kvw_dtype(options);
    schema = malloc(sizeof(*schema));
    if (schema == NULL ||
        kvw_model_schema(&worker->model->params, worker->dtype, schema) != KV_OK) {
        kvw_error(worker,
                  "model: out of memory, or more layers and KV heads than a store supports");
        free(schema);
        return KVW_FAILED;
    }
    if (options->trace[0] != '\0' && worker->trace == NULL &&
        kvw_trace_open(options->trace, &worker->trace) != KV_OK) {
        kvw_error(worker, "trace: %s: %s", options->trace, strerror(errno));
        free(schema);
        return KVW_USAGE;
    }
    rows_bytes = kv_schema_token_bytes(schema) * tokens_of_all(worker);
    store_tokens = kvw_store_tokens(schema, options->memory);
    free(schema);
    if (!memory_suffices(worker, rows_bytes, store_tokens))
        return KVW_USAGE;
    if (options->salt_file[0] != '\0') {
        const int result = kvw_read_file(worker, "salt-file", options->salt_file, &worker->salt,
                                         &worker->salt_bytes);

        if (result != KVW_DONE)
            return result;
        if (worker->salt_bytes == 0) {
            kvw_error(worker, "salt-file: %s: empty: a secret has one byte at least",
                      options->salt_file);
            return KVW_USAGE;
        }
    }

    if (is_embedded) {
        status = kvw_embedded_open(options->memory, &worker->embedded, detail, sizeof(detail));
        if (status != KV_OK) {
            kvw_error(worker, "%s", detail);
            return exit_status(status);
        }
    }

    status = open_client(worker,
                         is_embedded ? kvw_embedded_address(worker->embedded) : options->store,
                         detail, sizeof(detail));
    if (status != KV_OK) {
        kvw_error(worker, "store: %.200s%s: %s%s", options->store,
                  strlen(options->store) > 200 ? "..." : "",
                  detail[0] != '\0' ? detail : kv_status_name(status), kvw_next_step(status));
        return exit_status(status);
    }
    return KVW_DONE;
}

/* Whether an entry of the list of nodes, of that many bytes, is a node that the client has not
 * connected to. */
static bool is_lost(const struct kv_client *client, const char *entry, size_t bytes)
{
    const char *equals = memchr(entry, '=', bytes);
    const char *address = equals != NULL ? equals + 1 : entry;
    const size_t address_bytes = bytes - (size_t)(address - entry);
    struct kv_node_info info;

    for (uint32_t i = 0; i < kv_client_n_nodes(client); i++) {
        kv_client_node(client, i, &info);
        if (strlen(info.address) == address_bytes &&
            memcmp(info.address, address, address_bytes) == 0)
            return info.state != KV_NODE_CONNECTED;
    }
    return false;
}

/* Returns the nodes of the list that the client has connected to.  NULL: out of memory. */
static char *living_nodes(const struct kv_client *client, const char *nodes)
{
    char *living = calloc(1, strlen(nodes) + 1);

    for (const char *entry = nodes; living != NULL && *entry != '\0';) {
        const size_t bytes = strcspn(entry, ",");

        if (bytes > 0 && !is_lost(client, entry, bytes)) {
            if (living[0] != '\0')
                strcat(living, ",");
            strncat(living, entry, bytes);
        }
        entry += bytes + (entry[bytes] == ',');
    }
    return living;
}

kv_status_t kvw_reconnect(struct kvw_context *worker, char *detail, size_t detail_bytes)
{
    const char *nodes = worker->embedded != NULL ? kvw_embedded_address(worker->embedded)
                                                 : worker->options->store;
    char *living = NULL;
    kv_status_t status;

    kvw_close_attention(worker);
    kv_client_close(worker->client);
    worker->client = NULL;
    status = open_client(worker, nodes, detail, detail_bytes);
    if (status != KV_OK || worker->embedded != NULL)
        return status;
    living = living_nodes(worker->client, nodes);
    if (living == NULL) {
        snprintf(detail, detail_bytes, "out of memory: list of nodes");
        return KV_NO_MEMORY;
    }
    if (strlen(living) < strlen(nodes)) {
        /* A session has all nodes of its client's list, if there are no more than eight: without
         * those that are down, it needs another list. */
        kv_client_close(worker->client);
        worker->client = NULL;
        status = open_client(worker, living, detail, detail_bytes);
    }
    free(living);
    return status;
}

void kvw_close_attention(struct kvw_context *worker)
{
    kvw_forward_destroy(worker->forward);
    if (worker->attention != NULL)
        worker->attention->ops->destroy(worker->attention);
    worker->forward = NULL;
    worker->attention = NULL;
}

kv_status_t kvw_create_method(const struct kvw_context *worker,
                              const struct kvw_method_ops *ops,
                              const struct kvw_method_options *options,
                              uint32_t capacity,
                              const uint32_t *prompt,
                              uint32_t n_prompt,
                              struct kvw_method **ret_attention,
                              char *detail,
                              size_t detail_bytes)
{
    const struct kvw_method_setup setup = {
        .session =
            {
                .model = worker->model,
                .client = worker->client,
                .dtype = worker->dtype,
                .capacity = capacity,
                .chunk_tokens = KVW_FORWARD_CHUNK,
                .prompt = prompt,
                .n_prompt = n_prompt,
                .share = worker->share,
                .is_kept = worker->is_kept,
                .reuses = worker->reuses,
                .publishes = worker->publishes,
                .opens_later = worker->opens_later,
                .tells_tokens = worker->options->publish_tokens,
                .kv_head_begin = worker->kv_head_begin,
                .n_kv_heads = worker->n_kv_heads,
                .trace = worker->trace,
            },
        .options = *options,
    };

    return ops->create(&setup, ret_attention, detail, detail_bytes);
}

kv_status_t kvw_try_attention(struct kvw_context *worker,
                              const struct kvw_method_ops *ops,
                              const struct kvw_method_options *options,
                              const uint32_t *prompt,
                              uint32_t n_prompt,
                              char *detail,
                              size_t detail_bytes)
{
    kv_status_t status;

    kvw_close_attention(worker);
    status = kvw_create_method(worker, ops, options, worker->capacity, prompt, n_prompt,
                               &worker->attention, detail, detail_bytes);
    if (status == KV_OK) {
        snprintf(detail, detail_bytes, "out of memory: buffers of the forward pass");
        status = kvw_forward_create(worker->model, worker->attention, &worker->forward);
    }
    if (status == KV_OK)
        kvw_forward_trace(worker->forward, worker->trace);
    return status;
}

int kvw_open_attention(struct kvw_context *worker,
                       const struct kvw_method_ops *ops,
                       const struct kvw_method_options *options,
                       const uint32_t *prompt,
                       uint32_t n_prompt)
{
    char detail[KVW_DETAIL_BYTES] = "";
    const kv_status_t status =
        kvw_try_attention(worker, ops, options, prompt, n_prompt, detail, sizeof(detail));

    if (status == KV_OK)
        return KVW_DONE;
    kvw_error(worker, "%s%s", detail, kvw_next_step(status));
    return exit_status(status);
}

int kvw_open_session(struct kvw_context *worker,
                     uint32_t capacity,
                     const uint32_t *prompt,
                     uint32_t n_prompt)
{
    struct kvw_method_options options;
    int outcome = kvw_attention_options(worker, &options);

    if (outcome == KVW_DONE)
        outcome = kvw_open_store(worker, capacity);
    return outcome == KVW_DONE
               ? kvw_open_attention(worker, kvw_method_find(worker->options->attention),
                                    &options, prompt, n_prompt)
               : outcome;
}

void kvw_close(struct kvw_context *worker)
{
    kvw_close_attention(worker);
    kvw_trace_close(worker->trace);
    kv_client_close(worker->client);
    kvw_embedded_close(worker->embedded);
    kvw_tokenizer_destroy(worker->tokenizer);
    kvw_model_close(worker->model);
    if (worker->device != NULL)
        worker->device->ops->close(worker->device);
    kvw_gguf_close(worker->gguf);
    free(worker->salt);
}

kv_status_t kvw_prefill(const struct kvw_context *worker,
                        const char *what,
                        const uint32_t *tokens,
                        uint32_t n,
                        uint32_t n_steps)
{
    struct kvw_method *attention = worker->attention;

    kvw_method_prompt_hint(attention, n, n_steps);
    for (uint32_t begin = 0, end; begin < n; begin = end) {
        kv_status_t status;

        end = kvw_forward_chunk_end(begin, n);
        if (kvw_stop)
            return KV_CANCELLED;
        status =
            kvw_forward_step(worker->forward, KVW_PREFILL, tokens + begin, begin, end - begin);
        if (status != KV_OK)
            return status;
        kvw_progress(what, end, n);
    }
    return KV_OK;
}

/* ---- prompt and sampler ---- */

int kvw_read_file(const struct kvw_context *worker,
                  const char *what,
                  const char *path,
                  char **ret_text,
                  size_t *ret_bytes)
{
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    size_t bytes = 0, room = 1 << 16;
    char *text = malloc(room);
    int result = KVW_USAGE;

    if (file == NULL) {
        kvw_error(worker, "%s: %s: %s", what, path, strerror(errno));
        goto end;
    }
    while (text != NULL) {
        char *larger;

        bytes += fread(text + bytes, 1, room - bytes, file);
        if (bytes < room || bytes > KVW_PROMPT_BYTES_MAX)
            break;
        larger = realloc(text, room * 2);
        if (larger == NULL) {
            free(text);
            text = NULL;
            break;
        }
        text = larger;
        room *= 2;
    }
    if (text == NULL)
        kvw_error(worker, "%s: %s: out of memory", what, path);
    else if (ferror(file))
        kvw_error(worker, "%s: %s: cannot be read", what, path);
    else if (bytes > KVW_PROMPT_BYTES_MAX)
        kvw_error(worker, "%s: %s: more than %d MiB", what, path, KVW_PROMPT_BYTES_MAX >> 20);
    else
        result = KVW_DONE;

end:
    if (file != NULL && file != stdin)
        fclose(file);
    if (result != KVW_DONE) {
        free(text);
        return result;
    }
    *ret_text = text;
    *ret_bytes = bytes;
    return KVW_DONE;
}

int kvw_read_prompt(const struct kvw_context *worker, char **ret_text, size_t *ret_bytes)
{
    const struct kvw_options *options = worker->options;

    if ((options->prompt != NULL) == (options->prompt_file[0] != '\0')) {
        kvw_error(worker, "option: --prompt, --prompt-file: exactly one is required%s",
                  options->prompt != NULL ? ": both given" : "");
        return KVW_USAGE;
    }
    if (options->prompt == NULL) {
        const int outcome =
            kvw_read_file(worker, "prompt", options->prompt_file, ret_text, ret_bytes);
        char *larger = outcome == KVW_DONE ? realloc(*ret_text, *ret_bytes + 1) : NULL;

        if (larger != NULL) {
            larger[*ret_bytes] = '\0';
            *ret_text = larger;
        } else if (outcome == KVW_DONE) {
            kvw_error(worker, "out of memory: prompt");
            free(*ret_text);
            return KVW_FAILED;
        }
        return outcome;
    }
    *ret_bytes = strlen(options->prompt);
    *ret_text = strdup(options->prompt);
    return *ret_text != NULL ? KVW_DONE : KVW_FAILED;
}

/* A number in least..most. */
static bool parse_real(const char *text, double least, double most, double *ret_value)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end != '\0' || !(value >= least && value <= most))
        return false;
    *ret_value = value;
    return true;
}

int kvw_encode_prompt(const struct kvw_context *worker,
                      const char *text,
                      size_t bytes,
                      uint32_t **ret_tokens,
                      size_t *ret_count)
{
    const struct kvw_chat_message message = {
        .role = KVW_CHAT_USER, .text = text, .bytes = bytes};
    char detail[KVW_DETAIL_BYTES] = "";
    struct kvw_chat_template *chat;
    kv_status_t status;

    if (worker->options->raw) {
        status = kvw_tokenizer_encode(worker->tokenizer, text, bytes, false, true, ret_tokens,
                                      ret_count);
    } else {
        status = kvw_chat_template_create(worker->gguf, worker->tokenizer, NULL, &chat, detail,
                                          sizeof(detail));
        if (status != KV_OK) {
            kvw_error(worker, "%s%s", detail,
                      status == KV_NOT_FOUND ? ": use --raw to run without a chat template"
                                             : "");
            return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
        }
        status = kvw_chat_template_encode(chat, &message, 1, ret_tokens, ret_count);
        kvw_chat_template_destroy(chat);
    }
    if (status != KV_OK) {
        kvw_error(worker, "prompt: tokens: %s", kv_status_name(status));
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    return KVW_DONE;
}

int kvw_open_sampler(const struct kvw_context *worker, struct kvw_sampler **ret_sampler)
{
    const struct kvw_options *options = worker->options;
    struct kvw_sampler_options sampler = {
        .top_k = (uint32_t)options->sample_top_k,
        .seed = options->seed,
    };

    if (!parse_real(options->temperature, 0, 100, &sampler.temperature)) {
        kvw_error(worker, "option: --temperature: not a number from 0 to 100: %s",
                  options->temperature);
        return KVW_USAGE;
    }
    if (!parse_real(options->sample_top_p, 0, 1, &sampler.top_p)) {
        kvw_error(worker, "option: --sample-top-p: not a number from 0 to 1: %s",
                  options->sample_top_p);
        return KVW_USAGE;
    }
    if (kvw_sampler_create(&sampler, worker->model->params.n_vocabulary, ret_sampler) !=
        KV_OK) {
        kvw_error(worker, "out of memory: sampler");
        return KVW_FAILED;
    }
    return KVW_DONE;
}
