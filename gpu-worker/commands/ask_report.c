#include "gpu-worker/commands/ask_report.h"

#include "gpu-worker/text/utf8_stream.h"
#include "kvserver/base/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    METHOD_WIDTH_MIN = 8,
    COLUMNS = 96,
    SENTENCE_BYTES = 1024,
};

void kvw_ask_stats_add(struct kvw_method_stats *to,
                       const struct kvw_method_stats *after,
                       const struct kvw_method_stats *before)
{
#define ADD(member) to->member += after->member - before->member
    ADD(bytes_put);
    ADD(bytes_read);
    ADD(bytes_fetched);
    ADD(rows_attended);
    ADD(rows_possible);
    ADD(exposed_wait_s);
    ADD(index_wait_s);
    ADD(rows_scored_by_code);
    ADD(rows_scored_by_key);
    ADD(rows_to_choose_from);
    ADD(rows_reranked);
    ADD(rows_estimated);
    ADD(nodes_worked_s);
    ADD(rows_selected);
    ADD(rows_cached);
    ADD(rows_sent);
    ADD(codebooks_trained);
    ADD(codebooks_found);
    ADD(recall_sum);
    ADD(recall_count);
#undef ADD
}

static double quotient(double part, double whole)
{
    return whole > 0 ? part / whole : NAN;
}

static double step_s(const struct kvw_ask_cost *cost)
{
    return quotient(cost->decode_s, cost->timed_steps);
}

static double rows_share(const struct kvw_ask_cost *cost)
{
    return quotient((double)cost->steps_stats.rows_attended,
                    (double)cost->steps_stats.rows_possible);
}

static double estimated_share(const struct kvw_ask_cost *cost)
{
    return quotient((double)cost->steps_stats.rows_estimated,
                    (double)cost->steps_stats.rows_possible);
}

static double bytes_per_step(const struct kvw_ask_cost *cost)
{
    return quotient((double)cost->steps_stats.bytes_fetched, cost->steps);
}

static double recall(const struct kvw_ask_cost *cost)
{
    return quotient(cost->steps_stats.recall_sum, (double)cost->steps_stats.recall_count);
}

static double coded_share(const struct kvw_ask_cost *cost)
{
    const struct kvw_method_stats *stats = &cost->steps_stats;

    return quotient((double)stats->rows_scored_by_code,
                    (double)(stats->rows_scored_by_code + stats->rows_scored_by_key));
}

static double cache_hits(const struct kvw_ask_cost *cost)
{
    return quotient((double)cost->steps_stats.rows_cached,
                    (double)cost->steps_stats.rows_selected);
}

static int method_width(const struct kvw_eval_plan *plan)
{
    size_t width = METHOD_WIDTH_MIN;

    for (size_t i = 0; i < plan->count; i++)
        if (strlen(plan->runs[i].method) > width)
            width = strlen(plan->runs[i].method);
    return (int)width;
}

/* ---- answers ---- */

/* Returns the first line of an answer, in whole characters; free it with free().  NULL: out of
 * memory. */
static char *first_line(const struct kvw_reply *reply)
{
    const char *end = memchr(reply->text, '\n', reply->bytes);
    const size_t bytes = end != NULL ? (size_t)(end - reply->text) : reply->bytes;
    struct kvw_utf8_stream stream = {.n_pending = 0};
    char *line = malloc(kvw_utf8_stream_bytes(bytes) + kvw_utf8_stream_bytes(0) + 1);
    size_t n;

    if (line == NULL)
        return NULL;
    n = kvw_utf8_stream_push(&stream, reply->text, bytes, line);
    n += kvw_utf8_stream_end(&stream, line + n);
    line[n] = '\0';
    return line;
}

void kvw_ask_report_question(const struct kvw_ask_about *about, size_t i)
{
    if (about->worker->options->json)
        return;
    printf("\n%2zu  %s ...\n", i + 1, about->questions->needles.list[i].beginning);
    fflush(stdout);
}

static void write_stats(struct kv_json *json, const struct kvw_ask_cost *cost)
{
    const struct kvw_method_stats *steps = &cost->steps_stats, *all = &cost->all_stats;

    kv_json_number(json, "generated_tokens", cost->generated_tokens);
    kv_json_number(json, "steps", cost->steps);
    kv_json_number(json, "tpot_s", step_s(cost));
    kv_json_number(json, "rows_attended_share", rows_share(cost));
    kv_json_number(json, "rows_estimated_share", estimated_share(cost));
    kv_json_number(json, "step_bytes_fetched", bytes_per_step(cost));
    kv_json_number(json, "step_node_s", quotient(steps->nodes_worked_s, cost->steps));
    kv_json_number(json, "bytes_fetched", (double)(all->bytes_read + all->bytes_fetched));
    kv_json_number(json, "bytes_put", (double)all->bytes_put);
    kv_json_number(json, "exposed_wait_s", all->exposed_wait_s);
    kv_json_number(json, "index_wait_s", all->index_wait_s);
    kv_json_number(json, "rows_coded_share", coded_share(cost));
    kv_json_number(json, "rows_scored_by_code", (double)steps->rows_scored_by_code);
    kv_json_number(json, "rows_scored_exactly", (double)steps->rows_scored_by_key);
    kv_json_number(json, "rows_reranked", (double)steps->rows_reranked);
    kv_json_number(json, "rows_chosen", (double)steps->rows_selected);
    kv_json_number(json, "rows_sent", (double)steps->rows_sent);
    kv_json_number(json, "block_cache_hit_rate", cache_hits(cost));
    kv_json_number(json, "recall_estimate", recall(cost));
}

static void begin_json(struct kv_json *json, const struct kvw_planned_run *run)
{
    kv_json_begin(json, stdout);
    kv_json_text(json, "method", run->method);
    kv_json_text(json, "attention", run->ops->name);
    kv_json_text(json, "budget", run->budget);
    kv_json_number(json, "seed", run->ops->has_seed ? (double)run->options.seed : NAN);
}

void kvw_ask_report_answer(const struct kvw_ask_about *about,
                           size_t method,
                           size_t question,
                           const struct kvw_reply *reply,
                           const struct kvw_ask_cost *cost)
{
    const struct kvw_needle *needle = &about->questions->needles.list[question];
    const struct kvw_planned_run *run = &about->plan->runs[method];
    char *line = first_line(reply);
    struct kv_json json;

    if (about->worker->options->json) {
        begin_json(&json, run);
        kv_json_number(&json, "question", (double)question + 1);
        kv_json_text(&json, "beginning", needle->beginning);
        kv_json_text(&json, "completion", needle->completion);
        kv_json_text(&json, "answer", line != NULL ? line : "");
        kv_json_bool(&json, "found", cost->found > 0);
        kv_json_number(&json, "prompt_tokens", reply->result.prompt_tokens);
        kv_json_number(&json, "reused_tokens", reply->result.reused_tokens);
        kv_json_number(&json, "fork_s", cost->fork_s);
        kv_json_number(&json, "ttft_s", cost->ttft_s);
        kv_json_number(&json, "codebooks_trained", cost->all_stats.codebooks_trained);
        kv_json_number(&json, "codebooks_found", cost->all_stats.codebooks_found);
        write_stats(&json, cost);
        kv_json_end(&json);
    } else {
        printf("      %-*s  %s  %s\n", method_width(about->plan), run->method,
               cost->found > 0 ? "right" : "wrong", line != NULL ? line : "");
    }
    fflush(stdout);
    free(line);
}

/* ---- totals ---- */

static void
write_sum(const struct kvw_ask_about *about, size_t method, const struct kvw_ask_sum *sum)
{
    const struct kvw_context *worker = about->worker;
    const struct kvw_ask_cost *cost = &sum->cost;
    struct kv_json json;
    char device[64];

    worker->device->ops->describe(worker->device, device, sizeof(device));
    begin_json(&json, &about->plan->runs[method]);
    kv_json_number(&json, "found", cost->found);
    kv_json_number(&json, "asked", cost->questions);
    kv_json_number(&json, "common_tokens", about->questions->n_common);
    kv_json_number(&json, "prefill_s", sum->prefill_s);
    kv_json_number(&json, "ttft_s", quotient(cost->ttft_s, cost->questions));
    kv_json_number(&json, "codebooks_trained_first", sum->codebooks_first);
    kv_json_number(&json, "codebooks_trained_later", sum->codebooks_later);
    write_stats(&json, cost);
    kv_json_text(&json, "kv_type", worker->options->kv_type);
    kv_json_text(&json, "store", worker->options->store);
    kv_json_text(&json, "device", device);
    kv_json_end(&json);
}

static void print_number(int width, int digits, double value)
{
    if (isnan(value))
        printf("  %*s", width, "-");
    else
        printf("  %*.*f", width, digits, value);
}

static void print_size(int width, double bytes)
{
    char size[16];

    printf("  %*s", width,
           isnan(bytes) ? "-" : kv_config_format_size((uint64_t)bytes, size, sizeof(size)));
}

static void print_row(const struct kvw_planned_run *run,
                      int width,
                      bool has_recall,
                      const struct kvw_ask_sum *sum)
{
    const struct kvw_ask_cost *cost = &sum->cost;
    char found[32], codebooks[32] = "-";

    snprintf(found, sizeof(found), "%" PRIu32 " of %" PRIu32, cost->found, cost->questions);
    if (run->ops->has_index)
        snprintf(codebooks, sizeof(codebooks), "%" PRIu32 ", then %" PRIu32,
                 sum->codebooks_first, sum->codebooks_later);
    printf("%-*s  %8s", width, run->method, found);
    print_number(9, 1, sum->prefill_s);
    print_number(6, 2, quotient(cost->ttft_s, cost->questions));
    print_number(8, 1, 1000 * step_s(cost));
    print_number(6, 1, 100 * rows_share(cost));
    print_size(13, bytes_per_step(cost));
    print_number(7, 0, 100 * cache_hits(cost));
    print_number(7, 0, 100 * coded_share(cost));
    if (has_recall)
        print_number(6, 2, recall(cost));
    printf("  %12s\n", codebooks);
}

/* Returns whether model and store compute on the same processors. */
static bool shares_processors(const char *store)
{
    if (strcmp(store, "embedded") == 0)
        return true;
    while (*store != '\0') {
        const size_t bytes = strcspn(store, ",");
        const char *equals = memchr(store, '=', bytes), *host = equals ? equals + 1 : store;

        if (strncmp(host, "127.", 4) != 0 && strncmp(host, "localhost", 9) != 0)
            return false;
        store += bytes + (store[bytes] == ',');
    }
    return true;
}

static void print_wrapped(const char *text)
{
    size_t column = 0;

    while (*text != '\0') {
        const size_t word = strcspn(text, " ");

        if (column > 0 && column + 1 + word > COLUMNS) {
            putchar('\n');
            column = 0;
        } else if (column > 0) {
            putchar(' ');
            column++;
        }
        printf("%.*s", (int)word, text);
        column += word;
        text += word + (text[word] == ' ');
    }
    putchar('\n');
}

/* Compares the time of an indexed method's steps with that of full attention. */
static void print_comparison(const struct kvw_ask_about *about,
                             const struct kvw_planned_run *run,
                             const struct kvw_ask_cost *full,
                             const struct kvw_ask_cost *cost)
{
    const struct kvw_context *worker = about->worker;
    const double row_bytes =
        2.0 * worker->model->params.d * (double)kv_dtype_bytes(worker->dtype);
    char all[16], some[16], why[256] = "", sentence[SENTENCE_BYTES];

    if (isnan(step_s(full)) || isnan(step_s(cost)) || full->steps == 0 || cost->steps == 0)
        return;
    kv_config_format_size(
        (uint64_t)((double)full->steps_stats.rows_attended * row_bytes / full->steps), all,
        sizeof(all));
    kv_config_format_size(
        (uint64_t)((double)cost->steps_stats.rows_attended * row_bytes / cost->steps), some,
        sizeof(some));
    if (step_s(cost) > step_s(full))
        snprintf(why, sizeof(why),
                 ": it queries the store in each of %" PRIu32
                 " layers%s, while full attention has all rows in the worker's own memory",
                 worker->model->params.n_layers,
                 shares_processors(worker->options->store)
                     ? ", and the store runs on the same processors as the model"
                     : "");
    snprintf(
        sentence, sizeof(sentence),
        "%s takes %.1f ms per token, %.1f times full attention's %.1f%s. A step attends to "
        "%.1f %% of the rows: %s of keys and values instead of %s.",
        run->method, 1000 * step_s(cost), step_s(cost) / step_s(full), 1000 * step_s(full), why,
        100 * rows_share(cost), some, all);
    putchar('\n');
    print_wrapped(sentence);
}

void kvw_ask_report_sums(const struct kvw_ask_about *about, const struct kvw_ask_sum *sums)
{
    const struct kvw_eval_plan *plan = about->plan;
    const int width = method_width(plan);
    bool has_recall = false;

    if (about->worker->options->json) {
        for (size_t i = 0; i < plan->count; i++)
            write_sum(about, i, &sums[i]);
        fflush(stdout);
        return;
    }
    /* Nodes sample recall only now and then: a short answer may have no sample. */
    for (size_t i = 0; i < plan->count; i++)
        has_recall = has_recall || !isnan(recall(&sums[i].cost));
    printf("\n%-*s  %8s  %9s  %6s  %8s  %6s  %13s  %7s  %7s%s  %12s\n", width, "method",
           "found", "prefill s", "TTFT s", "ms/token", "rows %", "fetched/token", "cache %",
           "coded %", has_recall ? "  recall" : "", "codebooks");
    for (size_t i = 0; i < plan->count; i++)
        print_row(&plan->runs[i], width, has_recall, &sums[i]);
    for (size_t i = 1; i < plan->count; i++)
        if (plan->runs[i].ops->has_index)
            print_comparison(about, &plan->runs[i], &sums[0].cost, &sums[i].cost);
    fflush(stdout);
}
