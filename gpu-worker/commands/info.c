/* info: what a model file contains, and what fits. */
#include "gpu-worker/commands/context.h"
#include "kvserver/base/json.h"
#include "kvserver/base/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct facts {
    struct kvw_model_params params;
    uint64_t token_bytes;   /* of rows, all layers */
    uint64_t memory_tokens; /* that fit into memory next to the weights, at most the model's
                               context */
    uint64_t store_tokens;  /* that fit into the embedded store, likewise */
    char types[256];        /* "Q4_1 211, F32 61" */
};

/* Writes the types of tensors with their counts. */
static void list_types(const struct kvw_gguf *gguf, char *text, size_t text_bytes)
{
    size_t used = 0;

    text[0] = '\0';
    for (size_t i = 0; kvw_tensor_layout_at(i) != NULL; i++) {
        const struct kvw_tensor_layout *layout = kvw_tensor_layout_at(i);
        size_t n = 0;

        for (size_t j = 0; j < kvw_gguf_n_tensors(gguf); j++)
            n += kvw_gguf_tensor_at(gguf, j)->type == layout->type;
        if (n > 0 && used < text_bytes)
            used += (size_t)snprintf(text + used, text_bytes - used, "%s%s %zu",
                                     used > 0 ? ", " : "", layout->name, n);
    }
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void print_text(const struct kvw_context *worker, const struct facts *facts)
{
    const struct kvw_model_params *params = &facts->params;
    const bool is_embedded = strcmp(worker->options->store, "embedded") == 0;
    char size[16], rows[16], total[16];

    printf("file          %s, GGUF %" PRIu32 ", %s\n", worker->options->model,
           kvw_gguf_version(worker->gguf),
           kv_config_format_size(kvw_gguf_bytes(worker->gguf), size, sizeof(size)));
    printf("model         %s, %s\n", params->name[0] != '\0' ? params->name : "no name",
           params->architecture);
    printf("weights       %.1f million in %zu tensors: %s\n", (double)params->n_weights / 1e6,
           kvw_gguf_n_tensors(worker->gguf), facts->types);
    printf("layers        %" PRIu32 ", hidden %" PRIu32 ", feed forward %" PRIu32 "\n",
           params->n_layers, params->n_hidden, params->n_ffn);
    printf("heads         %" PRIu32 " query, %" PRIu32 " kv, of %" PRIu32 "\n",
           params->n_q_heads, params->n_kv_heads, params->d);
    printf("rope          base %g, %" PRIu32 " elements, scaling %s", (double)params->rope_base,
           params->n_rot,
           params->rope_factors != NULL ? "by factors"
           : params->rope_scale != 1    ? "linear"
                                        : "none");
    if (params->rope_scale != 1)
        printf(" %g", (double)params->rope_scale);
    printf("\nvocabulary    %" PRIu32 " tokens, output %s\n", params->n_vocabulary,
           params->has_output ? "of its own" : "tied to the embedding");
    printf("tokenizer     %s %s\n", kvw_tokenizer_model(worker->tokenizer),
           kvw_tokenizer_pre(worker->tokenizer));
    printf("context       %" PRIu32 " tokens\n", params->context);
    printf("rows          %s per token (%s)\n",
           kv_config_format_size(facts->token_bytes, rows, sizeof(rows)),
           worker->options->kv_type);
    printf("fits          %" PRIu64 " tokens in %s of memory", facts->memory_tokens,
           kv_config_format_size(kv_memory_total(), total, sizeof(total)));
    if (is_embedded)
        printf(", %" PRIu64 " in %s of embedded store", facts->store_tokens,
               kv_config_format_size(worker->options->memory, size, sizeof(size)));
    putchar('\n');
}

static void print_json(const struct kvw_context *worker, const struct facts *facts)
{
    const struct kvw_model_params *params = &facts->params;
    struct kv_json json;

    kv_json_begin(&json, stdout);
    kv_json_text(&json, "file", worker->options->model);
    kv_json_number(&json, "gguf_version", kvw_gguf_version(worker->gguf));
    kv_json_number(&json, "file_bytes", (double)kvw_gguf_bytes(worker->gguf));
    kv_json_text(&json, "architecture", params->architecture);
    kv_json_text(&json, "name", params->name);
    kv_json_number(&json, "weights", (double)params->n_weights);
    kv_json_number(&json, "weight_bytes", (double)params->weight_bytes);
    kv_json_number(&json, "tensors", (double)kvw_gguf_n_tensors(worker->gguf));
    kv_json_text(&json, "tensor_types", facts->types);
    kv_json_number(&json, "layers", params->n_layers);
    kv_json_number(&json, "hidden", params->n_hidden);
    kv_json_number(&json, "feed_forward", params->n_ffn);
    kv_json_number(&json, "query_heads", params->n_q_heads);
    kv_json_number(&json, "kv_heads", params->n_kv_heads);
    kv_json_number(&json, "head_dim", params->d);
    kv_json_number(&json, "rope_base", (double)params->rope_base);
    kv_json_number(&json, "rope_scale", (double)params->rope_scale);
    kv_json_bool(&json, "rope_factors", params->rope_factors != NULL);
    kv_json_number(&json, "vocabulary", params->n_vocabulary);
    kv_json_bool(&json, "tied_output", !params->has_output);
    kv_json_text(&json, "tokenizer", kvw_tokenizer_model(worker->tokenizer));
    kv_json_text(&json, "pre_tokenizer", kvw_tokenizer_pre(worker->tokenizer));
    kv_json_number(&json, "context", params->context);
    kv_json_text(&json, "kv_type", worker->options->kv_type);
    kv_json_number(&json, "kv_bytes_per_token", (double)facts->token_bytes);
    kv_json_number(&json, "memory_bytes", (double)kv_memory_total());
    kv_json_number(&json, "memory_tokens", (double)facts->memory_tokens);
    if (strcmp(worker->options->store, "embedded") == 0) {
        kv_json_number(&json, "store_bytes", (double)worker->options->memory);
        kv_json_number(&json, "store_tokens", (double)facts->store_tokens);
    }
    kv_json_end(&json);
}

int kvw_info_run(struct kvw_context *worker)
{
    const bool is_embedded = strcmp(worker->options->store, "embedded") == 0;
    struct facts *facts = calloc(1, sizeof(*facts));
    kv_schema_t *schema = calloc(1, sizeof(*schema));
    char detail[KVW_DETAIL_BYTES] = "out of memory";
    uint64_t memory = kv_memory_total();
    int outcome = KVW_FAILED;

    if (facts == NULL || schema == NULL) {
        kvw_error(worker, "%s", detail);
        goto end;
    }
    outcome = kvw_open_file(worker);
    if (outcome != KVW_DONE)
        goto end;
    outcome = KVW_USAGE;
    if (kvw_model_read(worker->gguf, &facts->params, detail, sizeof(detail)) != KV_OK ||
        kvw_tokenizer_create(worker->gguf, &worker->tokenizer, detail, sizeof(detail)) !=
            KV_OK) {
        kvw_error(worker, "%s", detail);
        goto end;
    }
    if (kvw_model_schema(&facts->params, kvw_dtype(worker->options), schema) != KV_OK) {
        kvw_error(worker, "model: %s: %u layers of %u KV heads: more than a store supports",
                  worker->options->model, facts->params.n_layers, facts->params.n_kv_heads);
        goto end;
    }
    facts->token_bytes = kv_schema_token_bytes(schema);
    memory -= least(memory, facts->params.weight_bytes);
    facts->memory_tokens =
        least(memory / (facts->token_bytes * (is_embedded ? 2 : 1)), facts->params.context);
    facts->store_tokens =
        least(kvw_store_tokens(schema, worker->options->memory), facts->params.context);
    list_types(worker->gguf, facts->types, sizeof(facts->types));
    if (worker->options->json)
        print_json(worker, facts);
    else
        print_text(worker, facts);
    outcome = KVW_DONE;

end:
    free(schema);
    free(facts);
    return outcome;
}
