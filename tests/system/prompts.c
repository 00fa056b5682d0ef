#include "tests/system/prompts.h"

#include "client/include/kvclient.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"
#include "tests/support/process.h"
#include "tests/support/rows.h"
#include "tests/system/system.h"

#include <assert.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    N_TALKS = 3,
    N_LAYERS = 2,
    N_HEADS = 2,
    DIM = 64,
    ROW_BYTES = 2 * DIM * 2,
    TOKENS_MAX = (PROMPTS_BLOCKS + 1) * KV_BLOCK_TOKENS,
    TOKEN_BYTES = PROMPTS_UNITS * ROW_BYTES,
    PIECE_TOKENS = 96, /* of one operation */
    PIECES = (TOKENS_MAX + PIECE_TOKENS - 1) / PIECE_TOKENS,
    K = 16,
    HOT_PART = 8,
    N_OBJECTS = 64,
    OBJECT_BYTES = 256 << 10,
    RETRY_US = 20000,
    GOODBYE_MS = 1000,
    LEASE_MS = 20000,
    LINE_BYTES = 512,
};

static_assert(N_LAYERS * N_HEADS == PROMPTS_UNITS &&
                  KV_BLOCK_TOKENS * TOKEN_BYTES == PROMPTS_BLOCK_BYTES,
              "what prompts.h says");

struct talk {
    struct kv_session *session; /* NULL: none */
    uint32_t prompt;
    uint32_t length; /* of the prompt */
    uint32_t want;   /* tokens at the end of this turn */
    uint32_t had;    /* that it had when its session was lost; 0: it was not */
    uint32_t have;
    struct kv_id128 names[PROMPTS_BLOCKS + 1];
};

struct load {
    const struct prompts_options *options;
    struct kv_client *client;
    struct kv_model_info model;
    struct kv_buffer *buffer; /* of all rows of a prompt */
    struct kv_random random;
    struct talk talks[N_TALKS];
    struct prompts_counts counts;
    uint64_t object_versions[N_OBJECTS]; /* 0: none was put */
    uint64_t good_us;                    /* of the last success */
    uint64_t bad_us;                     /* since when nothing has succeeded; 0: all is well */
    bool is_wrong;
};

/* ---- rows -------------------------------------------------------------------------------- */

/* Halves below 2: what is scored has no infinities and is no number that is none. */
static uint64_t word_of(const struct load *load,
                        uint32_t prompt,
                        uint32_t layer,
                        uint32_t head,
                        uint32_t token,
                        uint32_t i)
{
    const uint64_t place = ((uint64_t)layer << 60 | (uint64_t)head << 56 |
                            (uint64_t)token << 32 | (uint64_t)i << 24 | prompt);

    return kv_mix64(load->options->seed * UINT64_C(0x9e3779b97f4a7c15) ^ place) &
           UINT64_C(0xbfffbfffbfffbfff);
}

/* Makes or compares the rows of all units, layer by layer, as kvclient.h orders them. */
static bool walk_rows(const struct load *load,
                      uint32_t prompt,
                      uint32_t begin,
                      uint32_t n_tokens,
                      uint64_t *rows,
                      bool makes)
{
    for (uint32_t layer = 0; layer < N_LAYERS; layer++)
        for (uint32_t head = 0; head < N_HEADS; head++)
            for (uint32_t token = begin; token < begin + n_tokens; token++)
                for (uint32_t i = 0; i < ROW_BYTES / 8; i++, rows++) {
                    const uint64_t word = word_of(load, prompt, layer, head, token, i);

                    if (makes)
                        *rows = word;
                    else if (*rows != word)
                        return false;
                }
    return true;
}

static bool is_row(const struct load *load,
                   uint32_t prompt,
                   uint32_t layer,
                   uint32_t head,
                   uint32_t token,
                   const uint8_t *row)
{
    for (uint32_t i = 0; i < ROW_BYTES / 8; i++) {
        const uint64_t word = word_of(load, prompt, layer, head, token, i);

        if (memcmp(row + 8 * (size_t)i, &word, 8) != 0)
            return false;
    }
    return true;
}

/* ---- outcomes ---------------------------------------------------------------------------- */

static void wrong(struct load *load, const char *what, const char *detail)
{
    process_complain("prompts: seed %llu: turn %llu: %s: %s",
                     (unsigned long long)load->options->seed,
                     (unsigned long long)load->counts.turns, what, detail);
    load->is_wrong = true;
}

static void note_good(struct load *load)
{
    const uint64_t now_us = process_now_us(),
                   away_ms = load->good_us != 0 ? (now_us - load->good_us) / 1000 : 0;

    if (away_ms > load->counts.away_ms)
        load->counts.away_ms = away_ms;
    load->good_us = now_us;
    load->bad_us = 0;
}

/* What a node that stops, is away, or has come back without the session may answer. */
static bool is_of_absence(kv_status_t status)
{
    return status == KV_UNREACHABLE || status == KV_DEADLINE || status == KV_DRAINING ||
           status == KV_NOT_FOUND || status == KV_STALE || status == KV_CANCELLED ||
           status == KV_NOT_READY;
}

/* Returns whether the status is KV_OK.  Else the talk has to be opened again. */
static bool is_good(struct load *load, const char *what, kv_status_t status, const char *detail)
{
    const uint64_t now_us = process_now_us();

    if (status == KV_OK) {
        note_good(load);
        return true;
    }
    load->counts.failures++;
    if (load->bad_us == 0)
        load->bad_us = now_us;
    if (!load->options->nodes_may_fail || !is_of_absence(status))
        wrong(load, what, detail);
    else if (now_us - load->bad_us > PROCESS_PATIENCE_MS * UINT64_C(1000))
        wrong(load, "a talk that does not go on", detail);
    return false;
}

/* Waits for the operation, and frees it.  A pointer to it, since the arguments may be evaluated in any
 * order. */
static bool finish(struct load *load, const char *what, kv_status_t begun, struct kv_op **op)
{
    bool good;

    if (begun != KV_OK)
        return is_good(load, what, begun, kv_client_detail(load->client));
    begun = kv_wait(*op);
    good = is_good(load, what, begun, kv_op_detail(*op));
    kv_op_free(*op);
    return good;
}

/* ---- what a talk does -------------------------------------------------------------------- */

/* Puts or reads tokens in pieces, all at once.  What is read is compared. */
static bool
move_rows(struct load *load, struct talk *talk, uint32_t begin, uint32_t end, bool puts)
{
    struct kv_op *ops[PIECES];
    uint32_t n = 0, n_left = end - begin;
    bool good = true;

    for (; n * PIECE_TOKENS < n_left && good; n++) {
        const uint32_t from = begin + n * PIECE_TOKENS;
        const struct kv_rows box = {.n_layers = N_LAYERS,
                                    .token_begin = from,
                                    .n_tokens =
                                        end - from < PIECE_TOKENS ? end - from : PIECE_TOKENS};
        const struct kv_rows_io io = {.buffer = load->buffer,
                                      .offset = (size_t)(from - begin) * TOKEN_BYTES};
        uint64_t *rows = (uint64_t *)((uint8_t *)kv_buffer_data(load->buffer) + io.offset);
        kv_status_t status;

        if (puts)
            walk_rows(load, talk->prompt, from, box.n_tokens, rows, true);
        else
            memset(rows, 0xff, (size_t)box.n_tokens * TOKEN_BYTES);
        status =
            puts ? kv_put_begin(talk->session, &box, &io, load->options->deadline_ms, &ops[n])
                 : kv_read_begin(talk->session, &box, &io, load->options->deadline_ms, &ops[n]);
        if (status != KV_OK) {
            good = finish(load, puts ? "put" : "read", status, NULL);
            break;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        if (finish(load, puts ? "put" : "read", KV_OK, &ops[i]))
            continue;
        good = false;
    }
    if (!good || puts) {
        load->counts.put_bytes += good ? (uint64_t)n_left * TOKEN_BYTES : 0;
        return good;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t from = begin + i * PIECE_TOKENS;

        if (!walk_rows(load, talk->prompt, from,
                       end - from < PIECE_TOKENS ? end - from : PIECE_TOKENS,
                       (uint64_t *)((uint8_t *)kv_buffer_data(load->buffer) +
                                    (size_t)(from - begin) * TOKEN_BYTES),
                       false))
            wrong(load, "read", "other rows came back");
    }
    load->counts.read_bytes += (uint64_t)n_left * TOKEN_BYTES;
    return !load->is_wrong;
}

static bool open_talk(struct load *load, struct talk *talk)
{
    const struct kv_session_options options = {.lease_ms = LEASE_MS,
                                               .block_names = talk->names,
                                               .n_block_names = talk->want / KV_BLOCK_TOKENS};
    struct kv_op *op = NULL;
    kv_status_t status =
        kv_open_begin(load->client, &load->model, &options, load->options->deadline_ms, &op);

    if (status == KV_OK && (status = kv_wait(op)) == KV_OK) {
        talk->session = kv_op_session(op);
        talk->have = kv_op_tokens(op);
        load->counts.attached_bytes += (uint64_t)talk->have * TOKEN_BYTES;
    }
    is_good(load, "open", status,
            op != NULL ? kv_op_detail(op) : kv_client_detail(load->client));
    kv_op_free(op);
    if (talk->session == NULL)
        return false;
    return talk->have == 0 || move_rows(load, talk, 0, talk->have, false);
}

static bool put_rest(struct load *load, struct talk *talk)
{
    const struct kv_publish publish = {.n_names = talk->want / KV_BLOCK_TOKENS,
                                       .names = talk->names};
    const uint32_t begin = talk->have;
    struct kv_op *op;
    kv_status_t status;

    if (begin < talk->want && !move_rows(load, talk, begin, talk->want, true))
        return false;
    talk->have = talk->want;
    status = kv_publish_begin(talk->session, &publish, load->options->deadline_ms, &op);
    return finish(load, "publish", status, &op) &&
           (begin == talk->want || move_rows(load, talk, begin, talk->want, false));
}

static bool ask(struct load *load, struct talk *talk)
{
    float vectors[N_HEADS * DIM];
    const struct kv_range range = {0, talk->have};
    const struct kv_query query = {
        .layer = (uint32_t)kv_random_below(&load->random, N_LAYERS),
        .n_queries = 1,
        .queries = vectors,
        .scale = 0.125f,
        .merge = KV_MERGE_SUM,
        .answer = KV_ANSWER_ROWS,
        .k = K,
        .rerank = 2,
        .n_ranges = 1,
        .ranges = &range,
    };
    const struct kv_rows_io io = {.buffer = load->buffer};
    struct kv_query_result result;
    struct kv_op *op;
    kv_status_t status;

    for (uint32_t i = 0; i < N_HEADS * DIM; i++)
        vectors[i] = (float)kv_random_below(&load->random, 2001) / 1000 - 1;
    status = kv_query_begin(talk->session, &query, &io, load->options->deadline_ms, &op);
    if (status == KV_OK && kv_wait(op) == KV_OK) {
        for (uint32_t head = 0; head < N_HEADS; head++) {
            if (kv_op_query_result(op, head, &result) != KV_OK || result.n_ids != K)
                wrong(load, "query", "too few rows");
            for (uint32_t i = 0; i < result.n_ids && !load->is_wrong; i++)
                if (!is_row(load, talk->prompt, query.layer, head, result.ids[i],
                            (const uint8_t *)result.rows +
                                (size_t)result.row_index[i] * ROW_BYTES))
                    wrong(load, "query", "other rows came back");
        }
    }
    return finish(load, "query", status, &op) && !load->is_wrong;
}

/* Codes leave memory and come back with their rows. */
static bool index_some(struct load *load, struct talk *talk)
{
    const struct kv_index_options index = {
        .n_layers = 1, .tokens = talk->have, .m = 8, .bits = 4, .iterations = 2};
    struct kv_op *op;

    return finish(load, "index",
                  kv_index_begin(talk->session, &index, load->options->deadline_ms, &op), &op);
}

static bool work_on_objects(struct load *load)
{
    const uint32_t number = (uint32_t)kv_random_below(&load->random, N_OBJECTS);
    const uint64_t version = load->object_versions[number];
    const bool puts = version == 0 || kv_random_below(&load->random, 2) == 0;
    struct kv_object object = {
        .buffer = load->buffer, .bytes = OBJECT_BYTES, .evictable = true};
    const uint64_t seed =
        load->options->seed * 1000003 + number * UINT64_C(65537) + version + puts;
    char name[64];
    struct kv_op *op;
    kv_status_t status;

    snprintf(name, sizeof(name), "prompts/%llu/%u.%llu",
             (unsigned long long)load->options->seed, number,
             (unsigned long long)(version + puts));
    object.name = name;
    if (puts)
        test_fill(kv_buffer_data(load->buffer), OBJECT_BYTES, seed);
    status = kv_objects_begin(load->client, puts ? KV_OBJECT_PUT : KV_OBJECT_GET, &object, 1,
                              load->options->deadline_ms, &op);
    /* It was evicted, or finds no page: rows need all, and what is evictable goes first. */
    if (status == KV_OK && kv_wait(op) == (puts ? KV_NO_MEMORY : KV_NOT_FOUND)) {
        load->object_versions[number] = puts ? version : 0;
        kv_op_free(op);
        return true;
    }
    if (!finish(load, "object", status, &op))
        return false;
    if (puts)
        load->object_versions[number] = version + 1;
    else if (!test_is_filled(kv_buffer_data(load->buffer), OBJECT_BYTES, seed))
        wrong(load, "object", "other bytes came back");
    load->counts.objects += !puts;
    return !load->is_wrong;
}

/* ---- turns ------------------------------------------------------------------------------- */

static void choose_prompt(struct load *load, struct talk *talk)
{
    uint32_t tokens[TOKENS_MAX], n = load->options->n_prompts;
    uint64_t hash;

    /* Some are asked for often. */
    if (n >= HOT_PART && kv_random_below(&load->random, 4) == 0)
        n /= HOT_PART;
    *talk = (struct talk){.prompt = (uint32_t)kv_random_below(&load->random, n)};
    hash = kv_mix64(load->options->seed ^ (uint64_t)talk->prompt << 32);
    talk->length =
        (uint32_t)((PROMPTS_BLOCKS / 2 + hash % (PROMPTS_BLOCKS / 2 + 1)) * KV_BLOCK_TOKENS +
                   (hash >> 32) % KV_BLOCK_TOKENS);
    talk->want = talk->length / 2;
    for (uint32_t i = 0; i < TOKENS_MAX; i++)
        tokens[i] = (uint32_t)(load->options->seed << 20) + talk->prompt * 31 + i;
    kv_prompt_names(load->client, &load->model, tokens, TOKENS_MAX, NULL, 0, talk->names);
}

static bool close_talk(struct load *load, struct talk *talk)
{
    struct kv_op *op;
    const bool good = finish(
        load, "close", kv_close_begin(talk->session, load->options->deadline_ms, &op), &op);

    kv_session_free(talk->session);
    talk->session = NULL;
    return good;
}

/* Nodes that still have the session need not keep it until its lease ends. */
static void lose_session(struct load *load, struct talk *talk)
{
    struct kv_op *op;

    if (talk->session == NULL)
        return;
    if (kv_close_begin(talk->session, GOODBYE_MS, &op) == KV_OK)
        (void)kv_finish(op);
    kv_session_free(talk->session);
    talk->session = NULL;
    talk->had = talk->have;
    (void)load;
}

static bool turn(struct load *load, struct talk *talk)
{
    if (talk->session == NULL) {
        if (!open_talk(load, talk))
            return false;
        if (talk->had > 0) {
            const uint32_t kept = talk->have < talk->had ? talk->have : talk->had;

            load->counts.kept_tokens += kept;
            load->counts.lost_tokens += talk->had - kept;
            load->counts.resumed++;
            talk->had = 0;
        }
        /* Another talk on the prompt may have published more than this one wants. */
        if (talk->want < talk->have)
            talk->want = talk->have;
    }
    if (!put_rest(load, talk) || !ask(load, talk))
        return false;
    if (kv_random_below(&load->random, 8) == 0 && !index_some(load, talk))
        return false;
    if (kv_random_below(&load->random, 8) == 0 && !move_rows(load, talk, 0, talk->have, false))
        return false;
    load->counts.turns++;
    if (talk->want < talk->length) {
        talk->want += PROMPTS_TURN_TOKENS;
        if (talk->want > talk->length)
            talk->want = talk->length;
        return true;
    }
    if (!close_talk(load, talk))
        return false;
    choose_prompt(load, talk);
    return true;
}

/* ---- who asks ---------------------------------------------------------------------------- */

/* false: stdin was closed. */
static bool tell_if_asked(struct load *load)
{
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
    struct prompts_counts *counts = &load->counts;
    char byte;

    while (poll(&in, 1, 0) > 0) {
        if (read(STDIN_FILENO, &byte, 1) != 1)
            return false;
        const uint64_t away_ms =
            load->good_us != 0 ? (process_now_us() - load->good_us) / 1000 : 0;
        printf("prompts %llu %llu %llu %llu %llu %llu %llu %llu %llu %llu\n",
               (unsigned long long)counts->turns, (unsigned long long)counts->put_bytes,
               (unsigned long long)counts->read_bytes,
               (unsigned long long)counts->attached_bytes, (unsigned long long)counts->objects,
               (unsigned long long)counts->failures, (unsigned long long)counts->resumed,
               (unsigned long long)counts->kept_tokens, (unsigned long long)counts->lost_tokens,
               (unsigned long long)(away_ms > counts->away_ms ? away_ms : counts->away_ms));
        fflush(stdout);
        counts->away_ms = 0;
    }
    return true;
}

static void run(struct load *load)
{
    for (uint32_t i = 0; i < N_TALKS; i++)
        choose_prompt(load, &load->talks[i]);
    for (uint32_t i = 0; !load->is_wrong && tell_if_asked(load); i = (i + 1) % N_TALKS) {
        if (!turn(load, &load->talks[i]) && !load->is_wrong) {
            lose_session(load, &load->talks[i]);
            kv_client_wait(load->client, RETRY_US);
        }
        if (load->options->has_objects && !load->is_wrong)
            (void)work_on_objects(load);
    }
}

static int run_load(const struct prompts_options *options)
{
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS};
    const struct kv_client_options client_options = {
        .nodes = options->nodes,
        .transport = options->transport,
        .deadline_ms = options->deadline_ms,
        .peer_timeout_ms = SYSTEM_PEER_MS,
    };
    struct load *load = calloc(1, sizeof(*load));
    int result = EXIT_FAILURE;
    char detail[512];

    if (load == NULL)
        return result;
    load->options = options;
    kv_random_init(&load->random, options->seed ^ (uint64_t)getpid() << 32);
    test_model(&load->model, "prompts", N_LAYERS, heads, DIM, DIM);
    if (kv_client_open(&client_options, &load->client, detail, sizeof(detail)) != KV_OK) {
        process_complain("prompts: %s", detail);
        free(load);
        return result;
    }
    if (kv_buffer_alloc(load->client, (size_t)TOKENS_MAX * TOKEN_BYTES, &load->buffer) ==
        KV_OK) {
        run(load);
        result = load->is_wrong ? EXIT_FAILURE : EXIT_SUCCESS;
    }
    kv_client_close(load->client);
    free(load);
    return result;
}

/* ---- the child --------------------------------------------------------------------------- */

int prompts_child(int argc, char **argv)
{
    if (argc != 8 || strcmp(argv[0], "prompts") != 0)
        return 2;
    return run_load(&(struct prompts_options){
        .nodes = argv[1],
        .transport = argv[2],
        .seed = strtoull(argv[3], NULL, 10),
        .n_prompts = (uint32_t)strtoul(argv[4], NULL, 10),
        .has_objects = argv[5][0] == '1',
        .nodes_may_fail = argv[6][0] == '1',
        .deadline_ms = (uint32_t)strtoul(argv[7], NULL, 10),
    });
}

bool prompts_start(struct process *process, const struct prompts_options *options)
{
    char seed[24], n_prompts[16], deadline_ms[16];
    const char *const arguments[] = {options->nodes,
                                     options->transport,
                                     seed,
                                     n_prompts,
                                     options->has_objects ? "1" : "0",
                                     options->nodes_may_fail ? "1" : "0",
                                     deadline_ms,
                                     NULL};

    snprintf(seed, sizeof(seed), "%llu", (unsigned long long)options->seed);
    snprintf(n_prompts, sizeof(n_prompts), "%u", options->n_prompts);
    snprintf(deadline_ms, sizeof(deadline_ms), "%u", options->deadline_ms);
    return process_start_self(process, "prompts", arguments);
}

bool prompts_ask(struct process *process, struct prompts_counts *ret_counts)
{
    unsigned long long numbers[10];
    char line[PROCESS_LINE_BYTES];

    if (write(process->in, "?", 1) != 1 ||
        !process_read_line(process, line, PROCESS_PATIENCE_MS) ||
        sscanf(line, "prompts %llu %llu %llu %llu %llu %llu %llu %llu %llu %llu", &numbers[0],
               &numbers[1], &numbers[2], &numbers[3], &numbers[4], &numbers[5], &numbers[6],
               &numbers[7], &numbers[8], &numbers[9]) != 10)
        return false;
    *ret_counts = (struct prompts_counts){
        .turns = numbers[0],
        .put_bytes = numbers[1],
        .read_bytes = numbers[2],
        .attached_bytes = numbers[3],
        .objects = numbers[4],
        .failures = numbers[5],
        .resumed = numbers[6],
        .kept_tokens = numbers[7],
        .lost_tokens = numbers[8],
        .away_ms = numbers[9],
    };
    return true;
}

bool prompts_stop(struct process *process)
{
    close(process->in);
    process->in = -1;
    return process_wait(process, PROCESS_PATIENCE_MS) == 0;
}
