/* Prints an answer while it is generated, and its cost. */
#include "gpu-worker/commands/context.h"
#include "gpu-worker/text/utf8_stream.h"
#include "kvserver/base/json.h"

#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>

/* ---- an answer ---- */

kv_status_t kvw_answer_init(struct kvw_answer *answer, const struct kvw_context *worker)
{
    *answer = (struct kvw_answer){
        .worker = worker,
        .room = 4096,
        .text = calloc(1, 4096),
        .stream = calloc(1, sizeof(*answer->stream)),
        .prints = !worker->options->json,
        .is_first = kvw_tokenizer_adds_space(worker->tokenizer) && !worker->options->raw,
    };
    if (answer->text != NULL && answer->stream != NULL)
        return KV_OK;
    kvw_answer_fini(answer);
    return KV_NO_MEMORY;
}

/* Keeps the text, and prints it unless the output is JSON.  Zero bytes are not kept, because a
 * C string cannot hold them. */
static void take(struct kvw_answer *answer, const char *text, size_t bytes)
{
    if (answer->prints) {
        fwrite(text, 1, bytes, stdout);
        if (fflush(stdout) != 0)
            kvw_stop = SIGTERM; /* stdout is closed */
    }
    if (answer->room - answer->bytes <= bytes) {
        const size_t room = 2 * answer->room + bytes;
        char *larger = realloc(answer->text, room);

        if (larger == NULL)
            return; /* what is kept ends here */
        answer->text = larger;
        answer->room = room;
    }
    for (size_t i = 0; i < bytes; i++)
        if (text[i] != '\0')
            answer->text[answer->bytes++] = text[i];
    answer->text[answer->bytes] = '\0';
}

void kvw_answer_token(struct kvw_answer *answer, uint32_t token)
{
    const struct kvw_tokenizer *tokenizer = answer->worker->tokenizer;
    struct kvw_text piece;
    char *whole;

    answer->has_begun = true;
    if (token >= kvw_tokenizer_n_tokens(tokenizer))
        return; /* padding of the vocabulary */
    kvw_progress_end();
    piece = kvw_tokenizer_piece(tokenizer, token, false);
    if (answer->is_first && piece.bytes > 0 && piece.data[0] == ' ') {
        piece.data++;
        piece.bytes--;
    }
    answer->is_first = false;
    whole = malloc(kvw_utf8_stream_bytes(piece.bytes) + 1);
    if (whole == NULL)
        return;
    take(answer, whole, kvw_utf8_stream_push(answer->stream, piece.data, piece.bytes, whole));
    free(whole);
}

void kvw_answer_end(struct kvw_answer *answer)
{
    char tail[64];

    if (kvw_utf8_stream_bytes(0) <= sizeof(tail))
        take(answer, tail, kvw_utf8_stream_end(answer->stream, tail));
    if (answer->prints) {
        fputc('\n', stdout);
        fflush(stdout);
    }
}

void kvw_answer_break_off(struct kvw_answer *answer)
{
    if (answer->bytes > 0)
        kvw_answer_end(answer);
}

void kvw_answer_fini(struct kvw_answer *answer)
{
    free(answer->text);
    free(answer->stream);
    answer->text = NULL;
    answer->stream = NULL;
}

/* ---- its cost ---- */

static double share(uint64_t part, uint64_t whole)
{
    return whole > 0 ? (double)part / (double)whole : 1;
}

/* A second line: requests to the store and what they returned. */
static void report_retrieval(const struct kvw_context *worker,
                             const struct kvw_generate_result *result,
                             const struct kvw_method_stats *stats)
{
    const uint64_t scored = stats->rows_scored_by_code + stats->rows_scored_by_key;
    const double steps = result->generated_tokens > 1 ? result->generated_tokens - 1 : 1;
    const double waited_s =
        (stats->waits.node_s + stats->waits.queue_s + stats->waits.wire_s) / steps;
    const double of_step = result->tpot_s > 0 ? 100 / steps / result->tpot_s : 0;
    char where[64] = "attended to by the nodes", fetched[16], per_token[16];

    if (stats->rows_sent + stats->rows_cached > 0)
        snprintf(where, sizeof(where), "%.0f %% of them cached",
                 100 * share(stats->rows_cached, stats->rows_selected));
    fprintf(
        stderr,
        "kvworker: steps selected %.0f rows per layer and KV head, %s; "
        "%.0f %% of eligible rows scored by code; "
        "%s fetched, %s per token; waited %.2f ms per layer, %.0f %% of "
        "the time per token (nodes' work %.0f %%, queues %.0f %%, wire and wake-ups %.0f %%), "
        "and %.0f ms for the index; %" PRIu32 " codebooks trained, %" PRIu32 " reused",
        (double)stats->rows_selected / steps /
            (worker->model->params.n_layers * worker->model->params.n_kv_heads),
        where, 100 * share(stats->rows_scored_by_code, scored),
        kv_config_format_size(stats->bytes_read + stats->bytes_fetched, fetched,
                              sizeof(fetched)),
        kv_config_format_size((uint64_t)((double)stats->bytes_fetched / steps), per_token,
                              sizeof(per_token)),
        1000 * waited_s / worker->model->params.n_layers,
        result->tpot_s > 0 ? 100 * waited_s / result->tpot_s : 0, of_step * stats->waits.node_s,
        of_step * stats->waits.queue_s, of_step * stats->waits.wire_s,
        1000 * stats->index_wait_s, stats->codebooks_trained, stats->codebooks_found);
    if (stats->recall_count > 0)
        fprintf(stderr, "; recall %.2f", stats->recall_sum / (double)stats->recall_count);
    fputc('\n', stderr);
}

void kvw_report_text(const struct kvw_context *worker, const struct kvw_generate_result *result)
{
    const double new_tokens = result->prompt_tokens - result->reused_tokens;
    struct kvw_method_stats stats;
    char put[16];

    kvw_method_get_stats(worker->attention, &stats);
    fflush(stdout);
    fprintf(stderr,
            "kvworker: prompt %" PRIu32 " tokens (%" PRIu32
            " reused) in %.2f s, %.0f/s; answer %" PRIu32 " tokens (%s)",
            result->prompt_tokens, result->reused_tokens, result->prefill_s,
            result->prefill_s > 0 ? new_tokens / result->prefill_s : 0,
            result->generated_tokens, kvw_generate_end_name(result->end));
    if (result->tpot_s > 0)
        fprintf(stderr, ", %.1f/s", 1 / result->tpot_s);
    fprintf(stderr, "; attention %s, store %s: %s put, waited %.3f s\n",
            worker->attention->ops->name, worker->options->store,
            kv_config_format_size(stats.bytes_put, put, sizeof(put)), stats.exposed_wait_s);
    if (stats.rows_selected > 0)
        report_retrieval(worker, result, &stats);
}

static void write_ids(struct kv_json *json, const uint32_t *ids, uint32_t n)
{
    kv_json_list(json, "token_ids");
    for (uint32_t i = 0; i < n; i++)
        kv_json_item_number(json, ids[i]);
    kv_json_list_end(json);
}

static void write_nodes(struct kv_json *json, const struct kvw_context *worker)
{
    struct kv_client *client = worker->client;

    kv_json_list(json, "nodes");
    for (uint32_t i = 0; i < kv_client_n_nodes(client); i++) {
        struct kv_node_info info;

        kv_client_node(client, i, &info);
        kv_json_item(json);
        kv_json_text(json, "node", worker->embedded != NULL ? "embedded" : info.address);
        kv_json_number(json, "rows_put", (double)info.rows_in);
        kv_json_number(json, "rows_served", (double)info.rows_out);
        kv_json_item_end(json);
    }
    kv_json_list_end(json);
}

/* What the nodes reported about queries; nothing if there were none. */
static void write_retrieval(struct kv_json *json, const struct kvw_method_stats *stats)
{
    const uint64_t scored = stats->rows_scored_by_code + stats->rows_scored_by_key;

    if (stats->rows_selected == 0)
        return;
    kv_json_number(json, "block_cache_hit_rate",
                   share(stats->rows_cached, stats->rows_selected));
    kv_json_number(json, "rows_coded_share", share(stats->rows_scored_by_code, scored));
    kv_json_number(json, "rows_scored_by_code", (double)stats->rows_scored_by_code);
    kv_json_number(json, "rows_scored_exactly", (double)stats->rows_scored_by_key);
    kv_json_number(json, "rows_reranked", (double)stats->rows_reranked);
    kv_json_number(json, "rows_estimated_share",
                   share(stats->rows_estimated, stats->rows_possible));
    kv_json_number(json, "rows_chosen", (double)stats->rows_selected);
    kv_json_number(json, "rows_sent", (double)stats->rows_sent);
    kv_json_number(json, "codebooks_trained", stats->codebooks_trained);
    kv_json_number(json, "codebooks_found", stats->codebooks_found);
    kv_json_number(json, "nodes_worked_s", stats->nodes_worked_s);
    kv_json_number(json, "nodes_read_bytes",
                   (double)(stats->nodes_read.books + stats->nodes_read.codes +
                            stats->nodes_read.copies + stats->nodes_read.keys +
                            stats->nodes_read.rows + stats->nodes_read.summaries));
    if (stats->recall_count > 0)
        kv_json_number(json, "recall_estimate",
                       stats->recall_sum / (double)stats->recall_count);
}

/* The exposed wait by cause, and by layer. */
static void write_waits(struct kv_json *json,
                        const struct kvw_context *worker,
                        const struct kvw_method_stats *stats)
{
    const struct kvw_waits *waits = &stats->waits;

    kv_json_object(json, "exposed_wait");
    kv_json_number(json, "node_s", waits->node_s);
    kv_json_number(json, "queue_s", waits->queue_s);
    kv_json_number(json, "wire_s", waits->wire_s);
    kv_json_number(json, "index_s", waits->index_s);
    kv_json_number(json, "rows_s", waits->rows_s);
    kv_json_object_end(json);
    if (stats->layer_wait_s == NULL)
        return;
    kv_json_list(json, "exposed_wait_by_layer_s");
    for (uint32_t i = 0; i < worker->model->params.n_layers; i++)
        kv_json_item_number(json, stats->layer_wait_s[i]);
    kv_json_list_end(json);
}

void kvw_report_json(const struct kvw_context *worker,
                     const struct kvw_generate_result *result,
                     const char *text,
                     const uint32_t *ids)
{
    struct kvw_method_stats stats;
    struct kv_json json;
    char device[64];

    kvw_method_get_stats(worker->attention, &stats);
    worker->device->ops->describe(worker->device, device, sizeof(device));
    kv_json_begin(&json, stdout);
    kv_json_text(&json, "text", text);
    write_ids(&json, ids, result->generated_tokens);
    kv_json_text(&json, "end", kvw_generate_end_name(result->end));
    kv_json_number(&json, "prompt_tokens", result->prompt_tokens);
    kv_json_number(&json, "reused_tokens", result->reused_tokens);
    kv_json_number(&json, "generated_tokens", result->generated_tokens);
    kv_json_number(&json, "prefill_s", result->prefill_s);
    kv_json_number(&json, "ttft_s", result->ttft_s);
    kv_json_number(&json, "tt2t_s", result->tt2t_s);
    kv_json_number(&json, "tpot_s", result->tpot_s);
    kv_json_number(&json, "bytes_put", (double)stats.bytes_put);
    kv_json_number(&json, "bytes_fetched", (double)(stats.bytes_read + stats.bytes_fetched));
    kv_json_number(&json, "rows_attended_share",
                   share(stats.step_rows_attended, stats.step_rows_possible));
    write_retrieval(&json, &stats);
    kv_json_number(&json, "exposed_wait_s", stats.exposed_wait_s);
    kv_json_number(&json, "index_wait_s", stats.index_wait_s);
    write_waits(&json, worker, &stats);
    kv_json_text(&json, "attention", worker->attention->ops->name);
    kv_json_text(&json, "kv_type", worker->options->kv_type);
    kv_json_text(&json, "store", worker->options->store);
    write_nodes(&json, worker);
    kv_json_text(&json, "device", device);
    kv_json_end(&json);
    fflush(stdout);
}
