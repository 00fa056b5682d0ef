/* logits: the scores of all tokens at every position of a text, as a NumPy file.
 *
 * Rows are written as they are computed: a file of a long text does not have to fit into
 * memory. */
#include "gpu-worker/commands/context.h"
#include "kvserver/base/json.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    NPY_ALIGN = 64,
};

/* Version 1.0 of numpy.lib.format: magic, version, length of what follows, a Python dictionary
 * padded with blanks, so that the data begin at a multiple of NPY_ALIGN. */
static bool write_header(FILE *file, uint64_t n_rows, uint64_t n_columns)
{
    char text[128];
    int bytes = snprintf(text, sizeof(text),
                         "{'descr': '<f4', 'fortran_order': False, 'shape': (%" PRIu64
                         ", %" PRIu64 "), }",
                         n_rows, n_columns);
    const unsigned total = ((unsigned)bytes + 11 + NPY_ALIGN - 1) / NPY_ALIGN * NPY_ALIGN;
    const unsigned length = total - 10;

    fwrite("\x93NUMPY\x01\x00", 1, 8, file);
    fputc((int)(length & 255), file);
    fputc((int)(length >> 8), file);
    fwrite(text, 1, (size_t)bytes, file);
    for (unsigned i = (unsigned)bytes + 11; i < total; i++)
        fputc(' ', file);
    return fputc('\n', file) != EOF;
}

/* The tokens before `from` in chunks, the others as decode steps. */
static int write_rows(
    struct kvw_context *worker, const uint32_t *tokens, uint32_t n, uint32_t from, FILE *file)
{
    const uint32_t n_vocabulary = worker->model->params.n_vocabulary;
    float *logits = malloc(n_vocabulary * sizeof(logits[0]));
    kv_status_t status = logits != NULL ? KV_OK : KV_NO_MEMORY;
    int error = 0; /* of writing */
    uint32_t begin = 0;

    while (status == KV_OK && error == 0 && begin < n && !kvw_stop) {
        const enum kvw_phase phase = begin < from ? KVW_PREFILL : KVW_DECODE;
        const uint32_t end =
            phase == KVW_PREFILL ? kvw_forward_chunk_end(begin, from) : begin + 1;

        status = kvw_forward_step(worker->forward, phase, tokens + begin, begin, end - begin);
        if (status == KV_OK && begin >= from) {
            status = kvw_forward_logits(worker->forward, 0, 1, logits);
            if (status == KV_OK &&
                fwrite(logits, sizeof(logits[0]), n_vocabulary, file) != n_vocabulary)
                error = errno;
        }
        begin = end;
        kvw_progress("logits", begin, n);
    }
    free(logits);
    kvw_progress_end();
    if (status == KV_OK)
        status = kvw_method_flush(worker->attention);
    if (status != KV_OK) {
        kvw_step_error(worker, status);
        return KVW_FAILED;
    }
    if (error != 0) {
        kvw_error(worker, "out: %s: %s", worker->options->out, strerror(error));
        return KVW_FAILED;
    }
    if (begin < n) {
        kvw_error(worker, "stopped: after %" PRIu32 " of %" PRIu32 " tokens", begin, n);
        return KVW_FAILED;
    }
    return KVW_DONE;
}

static void print_json(const struct kvw_context *worker, uint32_t n_tokens)
{
    struct kv_json json;

    kv_json_begin(&json, stdout);
    kv_json_text(&json, "out", worker->options->out);
    kv_json_number(&json, "prompt_tokens", n_tokens);
    kv_json_number(&json, "from", (double)worker->options->from);
    kv_json_number(&json, "rows", (double)(n_tokens - worker->options->from));
    kv_json_number(&json, "columns", worker->model->params.n_vocabulary);
    kv_json_text(&json, "attention", worker->attention->ops->name);
    kv_json_text(&json, "kv_type", worker->options->kv_type);
    kv_json_text(&json, "store", worker->options->store);
    kv_json_end(&json);
}

int kvw_logits_run(struct kvw_context *worker)
{
    const struct kvw_options *options = worker->options;
    char path[KV_CONFIG_STRING_BYTES + sizeof(".part")];
    uint32_t *tokens = NULL;
    FILE *file = NULL;
    char *text = NULL;
    struct stat was;
    size_t bytes, n;
    kv_status_t status;
    bool is_special;
    int outcome;

    if (options->out[0] == '\0') {
        kvw_error(worker, "option: --out: missing");
        return KVW_USAGE;
    }
    if ((outcome = kvw_read_prompt(worker, &text, &bytes)) != KVW_DONE)
        return outcome;
    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE)
        goto end;
    status = kvw_tokenizer_encode(worker->tokenizer, text, bytes, false, true, &tokens, &n);
    if (status != KV_OK) {
        kvw_error(worker, "prompt: tokens: %s", kv_status_name(status));
        outcome = KVW_FAILED;
        goto end;
    }
    outcome = KVW_USAGE;
    if (n == 0 || n > worker->model->params.context) {
        kvw_error(worker, "prompt: %zu tokens: expected 1..%" PRIu32 ", the model's context", n,
                  worker->model->params.context);
        goto end;
    }
    if (options->from >= n) {
        kvw_error(worker, "option: --from: %" PRIu64 ": the prompt has %zu tokens",
                  options->from, n);
        goto end;
    }
    outcome = kvw_open_session(worker, (uint32_t)n, tokens, (uint32_t)n);
    if (outcome != KVW_DONE)
        goto end;

    outcome = KVW_FAILED;
    /* Writes to a temporary file next to it until the file is complete; a pipe or a device is
     * written directly. */
    is_special = stat(options->out, &was) == 0 && !S_ISREG(was.st_mode);
    snprintf(path, sizeof(path), "%s%s", options->out, is_special ? "" : ".part");
    file = fopen(path, "wb");
    if (file == NULL ||
        !write_header(file, n - options->from, worker->model->params.n_vocabulary))
        kvw_error(worker, "out: %s: %s", options->out, strerror(errno));
    else
        outcome = write_rows(worker, tokens, (uint32_t)n, (uint32_t)options->from, file);
    if (file != NULL && fclose(file) != 0 && outcome == KVW_DONE) {
        kvw_error(worker, "out: %s: %s", options->out, strerror(errno));
        outcome = KVW_FAILED;
    }
    if (file != NULL && outcome == KVW_DONE && !is_special && rename(path, options->out) != 0) {
        kvw_error(worker, "out: %s: %s", options->out, strerror(errno));
        outcome = KVW_FAILED;
    }
    if (file != NULL && outcome != KVW_DONE && !is_special)
        remove(path);
    if (outcome == KVW_DONE && options->json)
        print_json(worker, (uint32_t)n);

end:
    free(tokens);
    free(text);
    return outcome;
}
