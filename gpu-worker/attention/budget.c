#include "gpu-worker/attention/budget.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A tenth of 40 is 4, though 0.1 in binary is a little more or less. */
static uint32_t share_of(double ratio, double rows)
{
    return rows > 0 ? (uint32_t)floor(ratio * rows + 1e-9) : 0;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

struct kvw_budget
kvw_budget_of(const struct kvw_budget_options *options, uint32_t prompt_rows, uint32_t n_rows)
{
    const uint32_t sinks = smaller(options->sinks, n_rows - 1);
    const bool is_half = options->window == KVW_WINDOW_HALF;
    const uint32_t half =
        options->ratio > 0
            ? share_of(options->ratio / 2, (double)prompt_rows - (double)options->sinks)
            : options->top_k;
    uint32_t window = is_half ? half : options->window;
    uint32_t k = UINT32_MAX;

    window = smaller(window > 0 ? window : 1, n_rows - sinks);
    if (is_half)
        k = half;
    else if (options->ratio > 0) {
        const uint32_t rows = share_of(options->ratio, n_rows);

        k = rows > sinks + window ? rows - sinks - window : 0;
    }
    if (options->top_k > 0)
        k = smaller(k, options->top_k);
    k = smaller(k, n_rows - sinks - window);
    return (struct kvw_budget){
        .n_rows = n_rows,
        .sinks = sinks,
        .window_begin = n_rows - window,
        .k = options->selects_half ? k / 2 + k % 2 : k,
    };
}

static bool parse_number(const char *text, const char **ret_end, double *ret_value)
{
    char *end;

    *ret_value = strtod(text, &end);
    *ret_end = end;
    return end != text && *ret_value >= 0 && *ret_value <= 1e9;
}

bool kvw_budget_parse_ratio(const char *text, double *ret_ratio)
{
    double ratio, below = 1;
    const char *end;

    if (!parse_number(text, &end, &ratio))
        return false;
    if (*end == '/' && (!parse_number(end + 1, &end, &below) || !(below > 0)))
        return false;
    ratio /= below;
    if (*end != '\0' || !(ratio <= 1))
        return false;
    *ret_ratio = ratio;
    return true;
}

bool kvw_budget_parse_count(const char *text, uint32_t least, uint32_t *ret_count)
{
    uint64_t value = 0;

    if (*text == '\0')
        return false;
    for (; *text >= '0' && *text <= '9'; text++) {
        value = value * 10 + (uint64_t)(*text - '0');
        if (value >= UINT32_MAX)
            return false;
    }
    if (*text != '\0' || value < least)
        return false;
    *ret_count = (uint32_t)value;
    return true;
}

bool kvw_budget_parse_window(const char *text, uint32_t *ret_window)
{
    if (strcmp(text, "half") == 0) {
        *ret_window = KVW_WINDOW_HALF;
        return true;
    }
    return kvw_budget_parse_count(text, 1, ret_window);
}
