#include "gpu-worker/commands/bench_report.h"

#include "kvserver/base/config.h"
#include "kvserver/base/json.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* ---- numbers ------------------------------------------------------------------------------ */

static double tokens_per_s(const struct kvw_bench_result *result)
{
    return result->step_s > 0 ? result->sequences / result->step_s : 0;
}

static double node_ms_per_layer(const struct kvw_bench_result *result)
{
    return result->sequences > 0 ? 1e3 * result->node_s / result->sequences / result->n_layers
                                 : 0;
}

/* Of a node's core, were it never idle. */
static double tokens_per_core_s(const struct kvw_bench_result *result)
{
    return result->node_s > 0 ? result->sequences / result->node_s : 0;
}

static const char *name_of(const struct kvw_planned_run *run, char *name, size_t bytes)
{
    snprintf(name, bytes, "%s%s%s", run->method, run->budget[0] != '\0' ? " " : "",
             run->budget);
    return name;
}

int kvw_bench_name_width(const struct kvw_eval_plan *plan)
{
    int width = (int)strlen("method");

    for (size_t i = 0; i < plan->count; i++) {
        char name[2 * KVW_EVAL_NAME_BYTES + 1];
        const int own = (int)strlen(name_of(&plan->runs[i], name, sizeof(name)));

        width = own > width ? own : width;
    }
    return width;
}

/* ---- table and JSON ----------------------------------------------------------------------- */

void kvw_bench_print_heading(int width, FILE *out)
{
    fprintf(out, "%-*s %8s %5s %5s %8s %8s %7s %8s %8s\n", width, "", "", "", "", "ms per",
            "tokens", "exposed", "node ms", "device");
    fprintf(out, "%-*s %8s %5s %5s %8s %8s %7s %8s %8s\n", width, "method", "context", "batch",
            "fit", "step", "per s", "wait ms", "a layer", "rows");
}

void kvw_bench_print(const struct kvw_bench_result *result, int width, FILE *out)
{
    char name[2 * KVW_EVAL_NAME_BYTES + 1], rows[16];

    fprintf(out, "%-*s %8" PRIu32 " %5" PRIu32 " ", width,
            name_of(result->run, name, sizeof(name)), result->context, result->batch);
    if (result->sequences == 0) {
        fprintf(out, "    0  its rows are more than --kv-memory\n");
        return;
    }
    fprintf(out, "%5" PRIu32 " %8.1f %8.1f %7.2f %8.3f %8s\n", result->sequences,
            1e3 * result->step_s, tokens_per_s(result), 1e3 * result->wait_s,
            node_ms_per_layer(result),
            kv_config_format_size(result->row_bytes, rows, sizeof(rows)));
}

void kvw_bench_print_json(const struct kvw_bench_result *result, FILE *out)
{
    struct kv_json json;

    kv_json_begin(&json, out);
    kv_json_text(&json, "method", result->run->method);
    if (result->run->budget[0] != '\0')
        kv_json_text(&json, "budget", result->run->budget);
    kv_json_number(&json, "context", result->context);
    kv_json_number(&json, "batch", result->batch);
    kv_json_number(&json, "sequences", result->sequences);
    if (result->sequences > 0) {
        kv_json_number(&json, "steps", result->steps);
        kv_json_number(&json, "step_s", result->step_s);
        kv_json_number(&json, "step_min_s", result->step_min_s);
        kv_json_number(&json, "step_max_s", result->step_max_s);
        kv_json_number(&json, "tokens_per_s", tokens_per_s(result));
        kv_json_number(&json, "exposed_wait_s", result->wait_s);
        kv_json_number(&json, "nodes_worked_s", result->node_s);
        kv_json_number(&json, "node_ms_per_token_and_layer", node_ms_per_layer(result));
        kv_json_number(&json, "tokens_per_node_core_s", tokens_per_core_s(result));
        kv_json_number(&json, "device_row_bytes", (double)result->row_bytes);
    }
    kv_json_end(&json);
}

/* ---- picture ------------------------------------------------------------------------------ */

enum {
    WIDTH = 430,
    HEIGHT = 280,
    LEFT = 62,
    TOP = 70,
    GAP = 90,
    LINES = 8, /* colours */
};

struct chart {
    const char *heading;
    uint32_t batch;
    bool is_rate; /* tokens per second, not time */
    double x, least_x, most_x, least_y, most_y;
};

static const char *const colours[LINES] = {"#444444", "#d1495b", "#00798c", "#edae49",
                                           "#30638e", "#7b2d8b", "#5fa55a", "#b07d62"};

static double value_of(const struct chart *chart, const struct kvw_bench_result *result)
{
    return chart->is_rate ? tokens_per_s(result) : 1e3 * result->step_s;
}

static bool is_on(const struct chart *chart, const struct kvw_bench_result *result)
{
    return result->batch == chart->batch && value_of(chart, result) > 0;
}

/* Both axes are logarithmic. */
static double part(double value, double least, double most)
{
    return most > least ? log(value / least) / log(most / least) : 0.5;
}

static double x_of(const struct chart *chart, double value)
{
    return chart->x + WIDTH * part(value, chart->least_x, chart->most_x);
}

static double y_of(const struct chart *chart, double value)
{
    return TOP + HEIGHT * (1 - part(value, chart->least_y, chart->most_y));
}

/* Text that a method's name may have no part of the markup in. */
static void put_text(const char *text, FILE *out)
{
    for (; *text != '\0'; text++) {
        if (*text == '<' || *text == '>' || *text == '&')
            fprintf(out, "&#%d;", *text);
        else
            fputc(*text, out);
    }
}

static void find_ranges(struct chart *chart, const struct kvw_bench_result *results, size_t n)
{
    chart->least_x = chart->least_y = INFINITY;
    chart->most_x = chart->most_y = 0;
    for (size_t i = 0; i < n; i++) {
        if (!is_on(chart, &results[i]))
            continue;
        chart->least_x = fmin(chart->least_x, results[i].context);
        chart->most_x = fmax(chart->most_x, results[i].context);
        chart->least_y = fmin(chart->least_y, value_of(chart, &results[i]));
        chart->most_y = fmax(chart->most_y, value_of(chart, &results[i]));
    }
    /* Some room. */
    chart->least_y /= 1.3;
    chart->most_y *= 1.3;
}

/* Whether another method has a point there: its label is there, too. */
static bool
is_context_before(const struct chart *chart, const struct kvw_bench_result *results, size_t at)
{
    for (size_t i = 0; i < at; i++)
        if (is_on(chart, &results[i]) && results[i].context == results[at].context)
            return true;
    return false;
}

static void draw_axes(const struct chart *chart,
                      const struct kvw_bench_result *results,
                      size_t n,
                      FILE *out)
{
    static const double steps[] = {1, 2, 3, 5, 7};

    fprintf(out,
            "<text x=\"%.0f\" y=\"%d\" font-weight=\"bold\">%s</text>\n"
            "<rect x=\"%.0f\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"none\" "
            "stroke=\"#999\"/>\n",
            chart->x, TOP - 12, chart->heading, chart->x, TOP, WIDTH, HEIGHT);
    for (double ten = pow(10, floor(log10(chart->least_y))); ten <= chart->most_y; ten *= 10)
        for (unsigned i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
            const double y = ten * steps[i];

            if (y < chart->least_y || y > chart->most_y)
                continue;
            fprintf(out,
                    "<path d=\"M%.0f %.1fh%d\" stroke=\"#ddd\"/>"
                    "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
                    chart->x, y_of(chart, y), WIDTH, chart->x - 6, y_of(chart, y) + 4, y);
        }
    for (size_t i = 0; i < n; i++) {
        const double x = x_of(chart, results[i].context);
        char size[16];

        if (!is_on(chart, &results[i]) || is_context_before(chart, results, i))
            continue;
        kv_config_format_size(results[i].context, size, sizeof(size));
        fprintf(out,
                "<path d=\"M%.1f %dv5\" stroke=\"#999\"/>"
                "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
                x, TOP + HEIGHT, x, TOP + HEIGHT + 18, size);
    }
    fprintf(out, "<text x=\"%.0f\" y=\"%d\" text-anchor=\"middle\">tokens of context</text>\n",
            chart->x + WIDTH / 2.0, TOP + HEIGHT + 36);
}

static void draw_line(const struct chart *chart,
                      const struct kvw_bench_result *results,
                      size_t n,
                      uint32_t line,
                      FILE *out)
{
    const char *colour = colours[line % LINES];
    const char *move = "M";

    fprintf(out, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"2\" d=\"", colour);
    for (size_t i = 0; i < n; i++) {
        if (results[i].n_runs_before != line || !is_on(chart, &results[i]))
            continue;
        fprintf(out, "%s%.1f %.1f", move, x_of(chart, results[i].context),
                y_of(chart, value_of(chart, &results[i])));
        move = "L";
    }
    fputs("\"/>\n", out);
    for (size_t i = 0; i < n; i++)
        if (results[i].n_runs_before == line && is_on(chart, &results[i]))
            fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"%s\"/>\n",
                    x_of(chart, results[i].context), y_of(chart, value_of(chart, &results[i])),
                    colour);
}

static uint32_t count_lines(const struct kvw_bench_result *results, size_t n)
{
    uint32_t n_lines = 0;

    for (size_t i = 0; i < n; i++)
        if (results[i].n_runs_before >= n_lines)
            n_lines = results[i].n_runs_before + 1;
    return n_lines;
}

static void draw_legend(const struct kvw_bench_result *results, size_t n, FILE *out)
{
    const uint32_t n_lines = count_lines(results, n);

    for (uint32_t line = 0; line < n_lines; line++) {
        const int y = TOP + HEIGHT + 62 + 18 * (int)line;
        char name[2 * KVW_EVAL_NAME_BYTES + 1];
        size_t i = 0;

        while (i < n && results[i].n_runs_before != line)
            i++;
        if (i == n)
            continue;
        fprintf(out,
                "<path d=\"M%d %dh24\" stroke=\"%s\" stroke-width=\"2\"/>"
                "<text x=\"%d\" y=\"%d\">",
                LEFT, y - 4, colours[line % LINES], LEFT + 32, y);
        put_text(name_of(results[i].run, name, sizeof(name)), out);
        fputs("</text>\n", out);
    }
}

void kvw_bench_draw(const struct kvw_bench_result *results,
                    size_t n,
                    const char *title,
                    FILE *out)
{
    uint32_t least = UINT32_MAX, most = 0;
    char headings[2][80];

    for (size_t i = 0; i < n; i++) {
        least = results[i].batch < least ? results[i].batch : least;
        most = results[i].batch > most ? results[i].batch : most;
    }
    snprintf(headings[0], sizeof(headings[0]),
             "ms per token, %" PRIu32 " at a time: less is better", least);
    snprintf(headings[1], sizeof(headings[1]),
             "tokens per second, up to %" PRIu32 " at a time: more is better", most);
    struct chart charts[2] = {
        {.heading = headings[0], .batch = least, .x = LEFT},
        {.heading = headings[1], .batch = most, .is_rate = true, .x = LEFT + WIDTH + GAP},
    };

    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
            "<text x=\"%d\" y=\"26\" font-size=\"15\">",
            LEFT + 2 * WIDTH + GAP + 30, TOP + HEIGHT + 70 + 18 * (int)count_lines(results, n),
            LEFT);
    put_text(title, out);
    fputs("</text>\n", out);
    for (unsigned i = 0; i < 2; i++) {
        find_ranges(&charts[i], results, n);
        if (charts[i].most_x == 0)
            continue; /* nothing fits */
        draw_axes(&charts[i], results, n, out);
        for (uint32_t line = 0; line < count_lines(results, n); line++)
            draw_line(&charts[i], results, n, line, out);
    }
    draw_legend(results, n, out);
    fputs("</svg>\n", out);
}
