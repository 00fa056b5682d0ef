/* bench: what a decode step takes, by method, context and batch.
 *
 * For each of them as many sessions are made as sequences compute together, and left to a method,
 * which goes on from there as decode does after another worker's prefill.  Two steps warm it up: the
 * first asks for an index of all rows, the second waits for it. */
#include "gpu-worker/base/time.h"
#include "gpu-worker/commands/bench_report.h"
#include "gpu-worker/commands/bench_rows.h"
#include "gpu-worker/engine/batch.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum {
    LIST_MAX = 16, /* contexts, or batches */
    WARM_STEPS = 2,
};

struct list {
    uint32_t values[LIST_MAX], n, most;
};

struct bench {
    struct kvw_context *worker;
    struct list contexts, batches;
    struct kvw_eval_plan plan;
    uint32_t *tokens; /* (n_tokens) of the text */
    size_t n_tokens;
    uint32_t n_recorded;
    struct kvw_bench_rows *rows;
    struct kvw_bench_result *results; /* (n_results) */
    size_t n_results;
    FILE *svg; /* NULL: none is wanted */
};

/* Sequences of one method that compute together. */
struct team {
    struct bench *bench;
    const struct kvw_planned_run *run;
    uint32_t context, n;         /* that are open */
    struct kvw_method **methods; /* (batch) */
    struct kvw_forward *forwards[KVW_BATCH_GROUPS_MAX];
    struct kvw_forward_item *items; /* (batch), one group after the other */
    uint32_t *rows;                 /* (batch) 0, 1, ... */
    float *logits;                  /* (batch, n_vocabulary) */
    double *step_s;                 /* (KVW_BATCH_GROUPS_MAX * steps) what passes took */
    uint32_t n_steps;
    char detail[KVW_DETAIL_BYTES]; /* why it could not be opened */
};

/* ---- options ------------------------------------------------------------------------------ */

static int parse_list(
    struct bench *bench, const char *name, const char *text, uint32_t most, struct list *list)
{
    const char *at = text;

    while (*at != '\0' && list->n < LIST_MAX) {
        const size_t bytes = strcspn(at, ",");
        char item[32];
        uint64_t value = 0;

        snprintf(item, sizeof(item), "%.*s", (int)bytes, at);
        if (bytes >= sizeof(item) || !kv_config_parse_size(item, &value) || value == 0 ||
            value > most) {
            kvw_error(bench->worker, "option: --%s: %.*s: not a number from 1 to %" PRIu32,
                      name, (int)(bytes < 64 ? bytes : 64), at, most);
            return KVW_USAGE;
        }
        list->values[list->n++] = (uint32_t)value;
        if (value > list->most)
            list->most = (uint32_t)value;
        at += bytes + (at[bytes] == ',');
    }
    if (list->n == 0 || *at != '\0') {
        kvw_error(bench->worker, "option: --%s: %s: expected 1 to %d numbers", name, text,
                  LIST_MAX);
        return KVW_USAGE;
    }
    return KVW_DONE;
}

static int make_plan(struct bench *bench)
{
    struct kvw_context *worker = bench->worker;
    const struct kvw_options *options = worker->options;
    char detail[KVW_DETAIL_BYTES] = "", seed[32];
    struct kvw_method_options base;
    kv_status_t status;
    int outcome = kvw_attention_options(worker, &base);

    if (outcome != KVW_DONE)
        return outcome;
    snprintf(seed, sizeof(seed), "%" PRIu64, options->seed);
    status = kvw_eval_plan_make(options->methods, options->budgets, seed, &base, &bench->plan,
                                detail, sizeof(detail));
    if (status != KV_OK) {
        kvw_error(worker, "option: --%s", detail);
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    return kvw_options_are_used(worker, bench->plan.runs, bench->plan.count) ? KVW_DONE
                                                                             : KVW_USAGE;
}

static int read_text(struct bench *bench)
{
    struct kvw_context *worker = bench->worker;
    const struct kvw_options *options = worker->options;
    size_t bytes;
    char *text;
    kv_status_t status;
    int outcome;

    if (options->text_file[0] == '\0') {
        kvw_error(worker, "option: --text-file: missing");
        return KVW_USAGE;
    }
    outcome = kvw_read_file(worker, "text", options->text_file, &text, &bytes);
    if (outcome != KVW_DONE)
        return outcome;
    status = kvw_tokenizer_encode(worker->tokenizer, text, bytes, false, true, &bench->tokens,
                                  &bench->n_tokens);
    free(text);
    if (status != KV_OK) {
        kvw_error(worker, "text: tokens: %s", kv_status_name(status));
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    bench->n_recorded = (uint32_t)options->recorded / KVW_FORWARD_CHUNK * KVW_FORWARD_CHUNK;
    if (bench->n_tokens < bench->n_recorded) {
        kvw_error(worker, "text: %s: %zu tokens: --recorded takes %" PRIu32, options->text_file,
                  bench->n_tokens, bench->n_recorded);
        return KVW_USAGE;
    }
    if (bench->n_recorded > worker->model->params.context) {
        kvw_error(worker, "option: --recorded: %" PRIu32 ": the model's context is %" PRIu32,
                  bench->n_recorded, worker->model->params.context);
        return KVW_USAGE;
    }
    return KVW_DONE;
}

/* Tokens of a session: the context, and those that the steps add. */
static uint32_t capacity_of(const struct bench *bench, uint32_t context)
{
    return context + WARM_STEPS + (uint32_t)bench->worker->options->steps;
}

static int open_all(struct bench *bench)
{
    struct kvw_context *worker = bench->worker;
    const struct kvw_options *options = worker->options;
    const uint32_t capacity = capacity_of(bench, bench->contexts.most);
    int outcome;

    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE ||
        (outcome = read_text(bench)) != KVW_DONE)
        return outcome;
    worker->sessions = bench->batches.most + 1;
    worker->session_tokens = (uint64_t)bench->batches.most * capacity;
    /* Those that are recorded are there alone, and twice as large as others may be. */
    if (worker->session_tokens < 2 * (uint64_t)bench->n_recorded)
        worker->session_tokens = 2 * (uint64_t)bench->n_recorded;
    outcome = kvw_open_store(worker, capacity);
    if (outcome != KVW_DONE)
        return outcome;
    if (options->svg[0] != '\0' && (bench->svg = fopen(options->svg, "w")) == NULL) {
        kvw_error(worker, "svg: %s: %s", options->svg, strerror(errno));
        return KVW_USAGE;
    }
    bench->results = calloc(bench->plan.count * bench->contexts.n * bench->batches.n,
                            sizeof(bench->results[0]));
    if (bench->results == NULL) {
        kvw_error(worker, "out of memory: results");
        return KVW_FAILED;
    }
    return kvw_bench_record(worker, bench->tokens, bench->n_recorded, &bench->rows);
}

/* ---- a team ------------------------------------------------------------------------------- */

static void close_last(struct team *team)
{
    struct kvw_method *method = team->methods[--team->n];

    method->ops->destroy(method);
}

static void team_close(struct team *team)
{
    while (team->n > 0)
        close_last(team);
    for (uint32_t i = 0; i < KVW_BATCH_GROUPS_MAX; i++)
        kvw_forward_destroy(team->forwards[i]);
    free(team->methods);
    free(team->items);
    free(team->rows);
    free(team->logits);
    free(team->step_s);
}

static kv_status_t team_alloc(struct team *team, uint32_t batch)
{
    const struct bench *bench = team->bench;
    const struct kvw_options *options = bench->worker->options;
    kv_status_t status = KV_OK;

    team->methods = calloc(batch, sizeof(team->methods[0]));
    team->items = calloc(batch, sizeof(team->items[0]));
    team->rows = calloc(batch, sizeof(team->rows[0]));
    team->logits = malloc((size_t)batch * bench->worker->model->params.n_vocabulary *
                          sizeof(team->logits[0]));
    team->step_s = calloc(KVW_BATCH_GROUPS_MAX *
                              (options->steps > WARM_STEPS ? options->steps : WARM_STEPS),
                          sizeof(team->step_s[0]));
    if (team->methods == NULL || team->items == NULL || team->rows == NULL ||
        team->logits == NULL || team->step_s == NULL)
        return KV_NO_MEMORY;
    for (uint32_t i = 0; i < batch; i++)
        team->rows[i] = i;
    for (uint32_t i = 0; status == KV_OK && i < options->groups; i++) {
        status =
            kvw_forward_create_many(bench->worker->model, batch, batch, &team->forwards[i]);
        if (status == KV_OK)
            kvw_forward_trace(team->forwards[i], bench->worker->trace);
    }
    return status;
}

/* Sequences of a team that compute together, pass after pass. */
struct group {
    struct kvw_forward *forward;
    struct kvw_forward_item *items;
    uint32_t n_items;
    uint32_t at;                 /* the pass under way, or the next one */
    uint64_t since_us;           /* when the last one was over, or the first one began */
    bool is_passing, has_passed; /* its logits are being computed */
    float *logits;
};

/* Begins a pass: a token of each sequence.  Which one does not matter: one of the text's. */
static kv_status_t begin_pass(const struct team *team, struct group *group)
{
    const struct bench *bench = team->bench;

    for (uint32_t i = 0; i < group->n_items; i++) {
        struct kvw_forward_item *item = &group->items[i];

        item->tokens = &bench->tokens[(team->context + group->at + i) % bench->n_tokens];
        item->token_begin = team->context + group->at;
    }
    group->is_passing = true;
    group->has_passed = false;
    if (group->since_us == 0)
        group->since_us = kvw_now_us();
    return kvw_forward_begin(group->forward, group->items, group->n_items);
}

/* A layer, or a stripe of the logits. */
static kv_status_t advance(struct team *team, struct group *group, bool *ret_is_over)
{
    bool is_over = false;
    kv_status_t status = kvw_forward_advance(group->forward, &is_over);

    *ret_is_over = is_over && group->has_passed;
    if (!is_over || group->has_passed)
        return status;
    group->has_passed = true;
    for (uint32_t i = 0; i < group->n_items && status == KV_OK; i++)
        status = group->items[i].status;
    if (status == KV_OK)
        kvw_forward_logits_begin(group->forward, team->rows, group->n_items, group->logits);
    return status;
}

/* A pass is over.  Notes how long that took, the other groups' layers in between included. */
static void end_pass(struct team *team, struct group *group)
{
    const uint64_t now_us = kvw_now_us();

    team->step_s[team->n_steps++] = (double)(now_us - group->since_us) / 1e6;
    group->since_us = now_us;
    group->is_passing = false;
    group->at++;
}

/* Passes of the sequences [first, first + n), from `begin` to before `end`: as engine/batch.c has them,
 * whose groups advance one after the other. */
static kv_status_t
run_passes(struct team *team, uint32_t first, uint32_t n, uint32_t begin, uint32_t end)
{
    /* A method that asks nothing of the store waits for nothing. */
    const uint32_t n_groups = n > 1 && team->run->ops->ask != NULL
                                  ? (uint32_t)team->bench->worker->options->groups
                                  : 1;
    struct group groups[KVW_BATCH_GROUPS_MAX];
    uint32_t n_left = n_groups * (end - begin);
    kv_status_t status = KV_OK;

    for (uint32_t i = 0; i < n_groups; i++) {
        const uint32_t from = n * i / n_groups;

        groups[i] = (struct group){
            .forward = team->forwards[i],
            .items = &team->items[from],
            .n_items = n * (i + 1) / n_groups - from,
            .at = begin,
            .logits =
                team->logits + (size_t)from * team->bench->worker->model->params.n_vocabulary};
        for (uint32_t j = 0; j < groups[i].n_items; j++)
            groups[i].items[j] = (struct kvw_forward_item){
                .attention = team->methods[first + from + j], .phase = KVW_DECODE, .n = 1};
    }
    team->n_steps = 0;
    for (uint32_t at = 0; n_left > 0 && status == KV_OK; at++) {
        struct group *group = &groups[at % n_groups];
        bool is_over = false;

        if (group->is_passing)
            status = advance(team, group, &is_over);
        if (status == KV_OK && is_over) {
            end_pass(team, group);
            n_left--;
            kvw_progress("passes", team->n_steps, n_groups * (end - begin));
        }
        if (status == KV_OK && !group->is_passing && group->at < end)
            status = kvw_stop ? KV_CANCELLED : begin_pass(team, group);
    }
    for (uint32_t i = 0; i < n_groups; i++)
        kvw_forward_abandon(groups[i].forward);
    return status;
}

static kv_status_t add_sequence(struct team *team)
{
    struct bench *bench = team->bench;
    struct kvw_context *worker = bench->worker;
    const uint32_t capacity = capacity_of(bench, team->context);
    struct kvw_method_options options = team->run->options;
    struct kvw_session_share share = {.is_exact = true};
    struct kvw_session *filled;
    kv_status_t status = kvw_bench_rows_fill(bench->rows, team->n, team->context, capacity,
                                             &filled, team->detail, sizeof(team->detail));

    if (status != KV_OK)
        return status;
    kv_session_ticket(kvw_session_handle(filled), &share.ticket);
    worker->share = &share;
    options.index.wait = true; /* nothing is timed before there is one of all rows */
    status = kvw_create_method(worker, team->run->ops, &options, capacity, NULL, 0,
                               &team->methods[team->n], team->detail, sizeof(team->detail));
    worker->share = NULL;
    if (status == KV_OK)
        team->n++;
    else
        kvw_session_let_go(filled); /* nobody goes on with it */
    kvw_session_destroy(filled);
    if (status == KV_OK)
        status = run_passes(team, team->n - 1, 1, 0, WARM_STEPS);
    if (status == KV_OK && team->run->ops->has_index)
        status = team->run->ops->set_options(team->methods[team->n - 1], &team->run->options);
    return status;
}

static uint64_t row_bytes(const struct team *team)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < team->n; i++)
        sum += team->methods[i]->ops->row_bytes(team->methods[i]);
    return sum;
}

/* Whether the sequences have room, and as many more that need what those do. */
static bool have_room(const struct team *team, uint32_t more)
{
    const uint64_t limit = team->bench->worker->options->kv_memory;

    return limit == 0 || team->n == 0 || row_bytes(team) / team->n * (team->n + more) <= limit;
}

static kv_status_t fill(struct team *team, uint32_t batch)
{
    kv_status_t status = KV_OK;

    while (status == KV_OK && team->n < batch && have_room(team, 1)) {
        if (kvw_stop)
            return KV_CANCELLED;
        status = add_sequence(team);
        if (status == KV_OK && !have_room(team, 0)) {
            close_last(team); /* not even the first one has */
            break;
        }
    }
    return status;
}

/* ---- a measurement ------------------------------------------------------------------------ */

/* What all sequences have waited for nodes, and nodes have worked for them. */
static void sum_stats(const struct team *team, double *ret_wait_s, double *ret_node_s)
{
    *ret_wait_s = *ret_node_s = 0;
    for (uint32_t i = 0; i < team->n; i++) {
        struct kvw_method_stats stats;

        kvw_method_get_stats(team->methods[i], &stats);
        *ret_wait_s += stats.exposed_wait_s;
        *ret_node_s += stats.nodes_worked_s;
    }
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static kv_status_t time_steps(struct team *team, struct kvw_bench_result *result)
{
    const uint32_t steps = (uint32_t)team->bench->worker->options->steps;
    double wait_s, node_s;
    kv_status_t status;

    sum_stats(team, &wait_s, &node_s);
    status = run_passes(team, 0, team->n, WARM_STEPS, WARM_STEPS + steps);
    if (status != KV_OK)
        return status;
    sum_stats(team, &result->wait_s, &result->node_s);
    result->wait_s = (result->wait_s - wait_s) / steps;
    result->node_s = (result->node_s - node_s) / steps;
    qsort(team->step_s, team->n_steps, sizeof(team->step_s[0]), compare);
    result->step_s = team->step_s[team->n_steps / 2];
    result->step_min_s = team->step_s[0];
    result->step_max_s = team->step_s[team->n_steps - 1];
    result->steps = steps;
    return KV_OK;
}

static const char *why(const struct team *team, kv_status_t status)
{
    for (uint32_t i = 0; i < team->n; i++)
        if (kvw_method_detail(team->methods[i])[0] != '\0')
            return kvw_method_detail(team->methods[i]);
    return team->detail[0] != '\0' ? team->detail : kv_status_name(status);
}

static int measure(struct bench *bench, uint32_t at, uint32_t context, uint32_t batch)
{
    struct team team = {.bench = bench, .run = &bench->plan.runs[at], .context = context};
    struct kvw_bench_result *result = &bench->results[bench->n_results];
    kv_status_t status = team_alloc(&team, batch);

    *result = (struct kvw_bench_result){
        .run = team.run,
        .n_runs_before = at,
        .context = context,
        .batch = batch,
        .n_layers = bench->worker->model->params.n_layers,
    };
    if (status == KV_OK)
        status = fill(&team, batch);
    if (status == KV_OK && team.n > 0)
        status = time_steps(&team, result);
    kvw_progress_end();
    if (status == KV_OK) {
        result->sequences = team.n;
        result->row_bytes = row_bytes(&team);
        bench->n_results++;
        if (bench->worker->options->json)
            kvw_bench_print_json(result, stdout);
        else
            kvw_bench_print(result, kvw_bench_name_width(&bench->plan), stdout);
        if (fflush(stdout) != 0)
            kvw_stop = SIGTERM; /* stdout is closed */
    } else if (!kvw_stop) {
        kvw_error(bench->worker, "%s: %" PRIu32 " tokens, %" PRIu32 " at a time: %s%s",
                  team.run->method, context, batch, why(&team, status), kvw_next_step(status));
    }
    team_close(&team);
    return status == KV_OK ? KVW_DONE : KVW_FAILED;
}

static int measure_all(struct bench *bench)
{
    int outcome = KVW_DONE;

    if (!bench->worker->options->json)
        kvw_bench_print_heading(kvw_bench_name_width(&bench->plan), stdout);
    for (uint32_t i = 0; i < bench->batches.n; i++)
        for (uint32_t j = 0; j < bench->contexts.n; j++)
            for (uint32_t run = 0; run < bench->plan.count && outcome == KVW_DONE; run++)
                outcome =
                    measure(bench, run, bench->contexts.values[j], bench->batches.values[i]);
    return outcome;
}

static int draw(struct bench *bench)
{
    const struct kvw_options *options = bench->worker->options;
    char title[160], limit[32] = "no limit", size[16];
    bool is_good;

    if (options->kv_memory > 0)
        snprintf(limit, sizeof(limit), "%s",
                 kv_config_format_size(options->kv_memory, size, sizeof(size)));
    snprintf(title, sizeof(title), "Decode: what a token costs (device rows: %s)", limit);
    kvw_bench_draw(bench->results, bench->n_results, title, bench->svg);
    is_good = fflush(bench->svg) == 0 && !ferror(bench->svg);
    if (!is_good)
        kvw_error(bench->worker, "svg: %s: cannot be written", options->svg);
    return is_good ? KVW_DONE : KVW_FAILED;
}

int kvw_bench_run(struct kvw_context *worker)
{
    struct bench bench = {.worker = worker};
    const uint32_t steps = (uint32_t)worker->options->steps;
    int outcome = parse_list(&bench, "contexts", worker->options->contexts,
                             KV_TOKENS_MAX - WARM_STEPS - steps, &bench.contexts);

    if (outcome == KVW_DONE)
        outcome = parse_list(&bench, "batches", worker->options->batches,
                             KVW_BATCH_SEQUENCES_MAX, &bench.batches);
    if (outcome == KVW_DONE)
        outcome = make_plan(&bench);
    if (outcome == KVW_DONE)
        outcome = open_all(&bench);
    if (outcome == KVW_DONE)
        outcome = measure_all(&bench);
    if (bench.svg != NULL) {
        /* Also of a run that has ended early: it shows what was measured until then. */
        const int drawn = draw(&bench);

        outcome = outcome == KVW_DONE ? drawn : outcome;
        fclose(bench.svg);
    }
    kvw_bench_rows_free(bench.rows);
    kvw_eval_plan_free(&bench.plan);
    free(bench.tokens);
    free(bench.results);
    return outcome;
}
