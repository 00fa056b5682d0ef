#include "gpu-worker/eval/report.h"

#include "kvserver/base/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    VALUES = 31,
    METHOD_WIDTH_MIN = 12,
};

struct value {
    const char *name; /* of the member and the column */
    const char *head; /* of the table's column; NULL: none */
    double scale;     /* of the table */
    int width, digits;
    double value;
};

static void list_values(const struct kvw_eval_about *about,
                        const struct kvw_eval_result *result,
                        struct value *ret_values)
{
    const bool differs = about->has_differences;
    const struct value values[VALUES] = {
        {"perplexity", "perplexity", 1, 10, 3, result->perplexity},
        {"loss_percent", "loss %", 1, 7, 2, result->loss_percent},
        {"loss_error_percent", "+-", 1, 5, 2, result->loss_error_percent},
        {"kl", "KL", 1, 8, 5, result->kl},
        {"kl_error", "+-", 1, 7, 5, result->kl_error},
        {"loss_difference", differs ? "d loss" : NULL, 1, 8, 5, result->loss_difference},
        {"loss_difference_error", differs ? "+-" : NULL, 1, 7, 5,
         result->loss_difference_error},
        {"kl_difference", differs ? "d KL" : NULL, 1, 8, 5, result->kl_difference},
        {"kl_difference_error", differs ? "+-" : NULL, 1, 7, 5, result->kl_difference_error},
        {"recall", "recall", 1, 6, 3, result->recall},
        {"guess_cosine", about->has_guesses ? "cosine" : NULL, 1, 6, 3, result->guess_cosine},
        {"rows_coded_share", "coded %", 100, 7, 1, result->coded_share},
        {"rows_scored_exactly_share", "exact %", 100, 7, 1, result->exact_share},
        {"rows_attended_share", "rows %", 100, 6, 2, result->rows_share},
        {"rows_estimated_share", "est. %", 100, 6, 1, result->estimated_share},
        {"needles_found", "found", 1, 5, 0, result->needles_found},
        {"needles_asked", "of", 1, 4, 0, result->needles_asked},
        {"tpot_s", "ms/step", 1000, 7, 2, result->step_s},
        {"step_node_s", "node ms", 1000, 7, 2, result->step_node_s},
        {"step_bytes_read", "MB read", 1e-6, 7, 2, result->step_read},
        {"step_bytes_read_books", NULL, 1, 0, 0, result->step_books},
        {"step_bytes_read_codes", NULL, 1, 0, 0, result->step_codes},
        {"step_bytes_read_copies", NULL, 1, 0, 0, result->step_copies},
        {"step_bytes_read_keys", NULL, 1, 0, 0, result->step_keys},
        {"step_bytes_read_rows", NULL, 1, 0, 0, result->step_rows},
        {"step_bytes_read_summaries", NULL, 1, 0, 0, result->step_summaries},
        {"step_bytes_fetched", "KiB/step", 1.0 / 1024, 8, 1, result->step_bytes},
        {"exposed_wait_s", "waited s", 1, 8, 3, result->exposed_wait_s},
        {"bytes_fetched", NULL, 1, 0, 0, result->bytes_fetched},
        {"seconds", "seconds", 1, 7, 1, result->total_s},
    };

    memcpy(ret_values, values, sizeof(values));
}

/* A field of RFC 4180: a list of options holds no quotes, but may hold a comma. */
void kvw_eval_print_field(FILE *file, const char *text)
{
    if (strpbrk(text, ",\"\n") == NULL) {
        fputs(text, file);
        return;
    }
    putc('"', file);
    for (; *text != '\0'; text++) {
        if (*text == '"')
            putc('"', file);
        putc(*text, file);
    }
    putc('"', file);
}

static int method_width(const struct kvw_eval_about *about)
{
    return about->method_width > METHOD_WIDTH_MIN ? about->method_width : METHOD_WIDTH_MIN;
}

void kvw_eval_report_head(enum kvw_eval_format format, const struct kvw_eval_about *about)
{
    const struct kvw_eval_result none = {.perplexity = 0};
    struct value values[VALUES];

    list_values(about, &none, values);
    if (format == KVW_EVAL_TABLE) {
        if (about->has_many_texts)
            printf("%s, %" PRIu32 " tokens\n", about->text, about->tokens);
        printf("%-*s %-7s %4s", method_width(about), "method", "budget", "seed");
        for (unsigned i = 0; values[i].name != NULL; i++)
            if (values[i].head != NULL)
                printf(" %*s", values[i].width, values[i].head);
        putchar('\n');
    } else if (format == KVW_EVAL_CSV) {
        fputs("method,budget,seed,tokens,from", stdout);
        for (unsigned i = 0; values[i].name != NULL; i++)
            printf(",%s", values[i].name);
        puts(",kv_type,store,device,text");
    }
    fflush(stdout);
}

static void print_table(const struct kvw_eval_about *about,
                        const struct kvw_planned_run *run,
                        const struct value *values)
{
    printf("%-*s %-7s", method_width(about), run->method, run->budget);
    if (run->ops->has_seed)
        printf(" %4" PRIu64, run->options.seed);
    else
        printf(" %4s", "");
    for (; values->name != NULL; values++) {
        if (values->head == NULL)
            continue;
        if (isnan(values->value))
            printf(" %*s", values->width, "-");
        else
            printf(" %*.*f", values->width, values->digits, values->value * values->scale);
    }
    putchar('\n');
}

static void print_csv(const struct kvw_eval_about *about,
                      const struct kvw_planned_run *run,
                      const struct value *values)
{
    kvw_eval_print_field(stdout, run->method);
    printf(",%s,", run->budget);
    if (run->ops->has_seed)
        printf("%" PRIu64, run->options.seed);
    printf(",%" PRIu32 ",%" PRIu32, about->tokens, about->from);
    for (; values->name != NULL; values++) {
        putchar(',');
        if (!isnan(values->value))
            printf("%.9g", values->value);
    }
    printf(",%s,", about->kv_type);
    kvw_eval_print_field(stdout, about->store);
    putchar(',');
    kvw_eval_print_field(stdout, about->device);
    putchar(',');
    kvw_eval_print_field(stdout, about->text);
    putchar('\n');
}

static void print_json(const struct kvw_eval_about *about,
                       const struct kvw_planned_run *run,
                       const struct value *values,
                       const double *guess_cosines)
{
    struct kv_json json;

    kv_json_begin(&json, stdout);
    kv_json_text(&json, "method", run->method);
    kv_json_text(&json, "attention", run->ops->name);
    kv_json_text(&json, "budget", run->budget);
    kv_json_number(&json, "seed", run->ops->has_seed ? (double)run->options.seed : NAN);
    kv_json_number(&json, "tokens", about->tokens);
    kv_json_number(&json, "from", about->from);
    for (; values->name != NULL; values++)
        kv_json_number(&json, values->name, values->value);
    if (guess_cosines != NULL) {
        kv_json_list(&json, "guess_cosine_by_layer");
        for (uint32_t i = 0; i < about->n_layers; i++)
            kv_json_item_number(&json, guess_cosines[i]);
        kv_json_list_end(&json);
    }
    kv_json_text(&json, "kv_type", about->kv_type);
    kv_json_text(&json, "store", about->store);
    kv_json_text(&json, "device", about->device);
    kv_json_text(&json, "text", about->text);
    kv_json_end(&json);
}

void kvw_eval_report(enum kvw_eval_format format,
                     const struct kvw_eval_about *about,
                     const struct kvw_planned_run *run,
                     const struct kvw_eval_result *result,
                     const double *guess_cosines)
{
    struct value values[VALUES];

    list_values(about, result, values);
    switch (format) {
    case KVW_EVAL_TABLE:
        print_table(about, run, values);
        break;
    case KVW_EVAL_JSON:
        print_json(about, run, values, guess_cosines);
        break;
    case KVW_EVAL_CSV:
        print_csv(about, run, values);
        break;
    }
    fflush(stdout);
}
