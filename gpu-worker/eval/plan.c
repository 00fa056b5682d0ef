#define _GNU_SOURCE /* strchrnul */
#include "gpu-worker/eval/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One item of a list. */
struct item {
    char text[KVW_EVAL_NAME_BYTES];
};

struct maker {
    struct kvw_eval_plan plan;
    const char *budgets, *seeds;
    const struct kvw_method_options *base;
    char *detail;
    size_t detail_bytes;
};

static kv_status_t
refuse(const struct maker *maker, const char *what, const char *where, const char *value)
{
    snprintf(maker->detail, maker->detail_bytes, "%s: %s: %s", what, where, value);
    return KV_INVALID;
}

/* Extracts the next item of a list with the separator `mark`.  Returns false after the last. */
static bool next_item(const char **at, char mark, struct item *ret_item)
{
    const char *end = strchr(*at, mark);
    const size_t bytes = end != NULL ? (size_t)(end - *at) : strlen(*at);

    if (**at == '\0')
        return false;
    snprintf(ret_item->text, sizeof(ret_item->text), "%.*s", (int)bytes, *at);
    *at += end != NULL ? bytes + 1 : bytes;
    return true;
}

static bool has_long_item(const char *list)
{
    for (const char *end; *list != '\0'; list = end + (*end == ',')) {
        end = strchrnul(list, ',');
        if (end - list >= KVW_EVAL_NAME_BYTES)
            return true;
    }
    return false;
}

/* A budget of the list replaces both limits of the options: the share and the number. */
static bool set_budget(struct kvw_method_options *options, const char *text)
{
    options->budget.ratio = 0;
    options->budget.top_k = 0;
    return strncmp(text, "k=", 2) == 0
               ? kvw_budget_parse_count(text + 2, 1, &options->budget.top_k)
               : kvw_budget_parse_ratio(text, &options->budget.ratio) &&
                     options->budget.ratio > 0;
}

/* Sets an option of an entry, "name=value". */
static kv_status_t
set_option(const struct maker *maker, char *text, struct kvw_method_options *options)
{
    char *value = strchr(text, '=');
    const char *expected = "";
    kv_status_t status;

    if (value == NULL)
        return refuse(maker, "methods", "expected option=value", text);
    *value++ = '\0';
    status = kvw_method_set_option(options, text, value, &expected);
    if (status == KV_NOT_FOUND)
        return refuse(maker, "methods", "unknown option", text);
    if (status != KV_OK)
        snprintf(maker->detail, maker->detail_bytes, "methods: %s: not %s: %s", text, expected,
                 value);
    return status;
}

/* Refuses an option that has no effect on the method. */
static kv_status_t check_use(const struct maker *maker,
                             const struct kvw_method_ops *ops,
                             char *text,
                             const struct kvw_method_options *options)
{
    const struct kvw_method_option *option;
    char users[KVW_EVAL_NAME_BYTES];

    *strchr(text, '=') = '\0';
    option = kvw_method_option_find(text);
    /* --seeds sets the seed of methods that have none, too. */
    if (option->help == NULL || kvw_method_uses(ops, options, option))
        return KV_OK;
    snprintf(maker->detail, maker->detail_bytes, "methods: %s: not used by %s, only by %s",
             text, ops->name, kvw_method_users(option, users, sizeof(users)));
    return KV_INVALID;
}

/* Whether an option of an entry, "name=value", is a preset of others. */
static bool is_preset(const char *text)
{
    const struct kvw_method_option *option;
    char name[KVW_EVAL_NAME_BYTES];

    snprintf(name, sizeof(name), "%.*s", (int)strcspn(text, "="), text);
    option = kvw_method_option_find(name);
    return option != NULL && option->is_preset;
}

/* Sets the options after an entry's name: presets, then those that are given beside them.  They are
 * checked when all are set, because one may leave another without effect. */
static kv_status_t set_options(const struct maker *maker,
                               const struct kvw_method_ops *ops,
                               const char *list,
                               struct kvw_method_options *options)
{
    const char *presets = list, *again = list;
    kv_status_t status = KV_OK;
    struct item item;

    while (status == KV_OK && next_item(&presets, ':', &item))
        if (is_preset(item.text))
            status = set_option(maker, item.text, options);
    while (status == KV_OK && next_item(&list, ':', &item))
        if (!is_preset(item.text))
            status = set_option(maker, item.text, options);
    while (status == KV_OK && next_item(&again, ':', &item))
        status = check_use(maker, ops, item.text, options);
    return status;
}

static kv_status_t add_run(struct maker *maker, const struct kvw_planned_run *run)
{
    struct kvw_eval_plan *plan = &maker->plan;
    void *larger;

    if (plan->count == KVW_EVAL_RUNS_MAX)
        return refuse(maker, "methods", "runs", "too many");
    larger = realloc(plan->runs, (plan->count + 1) * sizeof(plan->runs[0]));
    if (larger == NULL)
        return KV_NO_MEMORY;
    plan->runs = larger;
    plan->runs[plan->count++] = *run;
    return KV_OK;
}

/* Adds the runs of one entry of the methods: each budget with each seed. */
static kv_status_t add_method(struct maker *maker, const char *entry)
{
    struct kvw_planned_run run = {.ops = NULL};
    const char *options = strchrnul(entry, ':');
    struct item name, budget, seed;
    const char *budgets, *seeds;
    kv_status_t status;

    snprintf(name.text, sizeof(name.text), "%.*s", (int)(options - entry), entry);
    run.ops = kvw_method_find(name.text);
    if (run.ops == NULL)
        return refuse(maker, "methods", "unknown", name.text);
    snprintf(run.method, sizeof(run.method), "%s", entry);
    seeds = run.ops->has_seed ? maker->seeds : "0";
    while (next_item(&seeds, ',', &seed)) {
        budgets = run.ops->has_budget ? maker->budgets : "1";
        while (next_item(&budgets, ',', &budget)) {
            const char *expected;

            run.options = *maker->base;
            if (!set_budget(&run.options, budget.text))
                return refuse(maker, "budgets", "not a share or k=rows", budget.text);
            if (kvw_method_set_option(&run.options, "seed", seed.text, &expected) != KV_OK)
                return refuse(maker, "seeds", "not a number", seed.text);
            if (run.ops->has_budget)
                snprintf(run.budget, sizeof(run.budget), "%s", budget.text);
            status = set_options(maker, run.ops, *options == ':' ? options + 1 : options,
                                 &run.options);
            if (status == KV_OK)
                status = add_run(maker, &run);
            if (status != KV_OK)
                return status;
        }
    }
    return KV_OK;
}

kv_status_t kvw_eval_plan_make(const char *methods,
                               const char *budgets,
                               const char *seeds,
                               const struct kvw_method_options *base,
                               struct kvw_eval_plan *ret_plan,
                               char *detail,
                               size_t detail_bytes)
{
    struct maker maker = {.budgets = budgets,
                          .seeds = seeds,
                          .base = base,
                          .detail = detail,
                          .detail_bytes = detail_bytes};
    struct item item;
    kv_status_t status;

    if (*methods == '\0' || *budgets == '\0' || *seeds == '\0')
        return refuse(&maker, "methods, budgets, seeds", "expected", "at least one of each");
    if (has_long_item(methods) || has_long_item(budgets) || has_long_item(seeds))
        return refuse(&maker, "methods, budgets, seeds", "an entry", "too long");
    status = add_method(&maker, kvw_method_full.name);
    while (status == KV_OK && next_item(&methods, ',', &item))
        if (strcmp(item.text, kvw_method_full.name) != 0)
            status = add_method(&maker, item.text);
    if (status == KV_NO_MEMORY)
        snprintf(detail, detail_bytes, "out of memory: runs");
    if (status != KV_OK) {
        kvw_eval_plan_free(&maker.plan);
        return status;
    }
    *ret_plan = maker.plan;
    return KV_OK;
}

void kvw_eval_plan_free(struct kvw_eval_plan *plan)
{
    free(plan->runs);
    *plan = (struct kvw_eval_plan){.runs = NULL};
}
