/* test_query.c - retrieval, over any row of the table of transports: what a store chooses is
 * held against a choice by brute force.
 *
 * Embedded nodes with threads of their own, or with `connect ADDRESSES TRANSPORT` whatever
 * listens there; the real client library, nothing replaced.  A key
 * is made of small multiples of 1/64, exact in every type; what it is follows from its place
 * and a salt, so that the oracle (support/oracle.h) can choose and attend again in double
 * precision. What codes stand for is taken out of the nodes, where they are in this process;
 * elsewhere choices that hang on codes are not judged.
 */
#include "tests/support/cluster.h"
#include "tests/support/node_codes.h"
#include "tests/support/oracle.h"
#include "tests/support/rows.h"
#include "tests/support/transport_fault.h"

#include "kvserver/base/hash.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BUFFER_BYTES = 24 << 20,
    MEMORY_BYTES = 256 << 20,
    TOKENS_MAX = 4096,
    LAYERS_MAX = 4,
    HEADS_MAX = 8,
    D_K_MAX = 128,
    CHAPTER_BLOCKS = 8,
    CHAPTER_TOKENS = CHAPTER_BLOCKS * KV_BLOCK_TOKENS,
    SKIPPED = 77,
};

/* What the suite runs over. */
static struct subject {
    const char *name;
    const struct kv_transport_ops *row;
    const char *transports;
    const char *addresses;       /* of nodes that are there already; NULL: embedded ones */
    uint32_t n_nodes, n_threads; /* threads 0: not known */
} subject;

static const struct subject subjects[] = {
    {"loopback", &kv_transport_loopback, NULL, NULL, 1, 1},
    {"loopback_two", &kv_transport_loopback, NULL, NULL, 2, 2},
#ifdef KV_WITH_UCX
    {"tcp", &kv_transport_ucx, "tcp", NULL, 1, 1},
    {"tcp_two", &kv_transport_ucx, "tcp", NULL, 2, 2},
    {"shm", &kv_transport_ucx, "shm", NULL, 1, 1},
    {"shm_two", &kv_transport_ucx, "shm", NULL, 2, 2},
    {"auto", &kv_transport_ucx, "auto", NULL, 1, 1},
    {"auto_two", &kv_transport_ucx, "auto", NULL, 2, 2},
#endif
};

static struct cluster cluster;

struct side {
    struct kv_client *client;
    struct kv_buffer *out, *in;
};

static void open_side_as(struct side *side, const struct cluster_client *setup)
{
    struct kv_client_options options = {.nodes = subject.addresses,
                                        .transport = subject.transports,
                                        .deadline_ms = 60000,
                                        .peer_timeout_ms = 60000};
    char detail[256] = "";

    if (subject.addresses == NULL)
        side->client = cluster_connect(&cluster, setup);
    else if (kv_client_open(&options, &side->client, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    subject.n_nodes = kv_client_n_nodes(side->client);
    assert_int_equal(kv_buffer_alloc(side->client, BUFFER_BYTES, &side->out), KV_OK);
    assert_int_equal(kv_buffer_alloc(side->client, BUFFER_BYTES, &side->in), KV_OK);
}

static void open_side(struct side *side)
{
    open_side_as(side, NULL);
}

static void close_side(struct side *side)
{
    kv_client_close(side->client);
    side->client = NULL;
}

/* ---- models and rows --------------------------------------------------------------------- */

enum {
    HALVES,    /* fp16, equal heads */
    FLOATS,    /* fp32, a key longer than its value */
    BRAINS,    /* bf16 */
    KEYS_ONLY, /* fp16, no values */
    RAGGED,    /* fp16, other heads in each layer */
    N_MODELS,
};
static struct kv_model_info models[N_MODELS];

static void make_model(unsigned model,
                       const char *name,
                       enum kv_dtype dtype,
                       uint32_t n_layers,
                       const uint16_t *heads,
                       uint32_t d_k,
                       uint32_t d_v)
{
    struct kv_model_info *info = &models[model];
    char detail[128];

    test_model(info, name, n_layers, heads, d_k, d_v);
    for (uint32_t i = 0; i < n_layers; i++)
        info->schema.layers[i].dtype = (uint8_t)dtype;
    assert_int_equal(kv_schema_finish(&info->schema, detail, sizeof(detail)), KV_OK);
}

static void make_models(void)
{
    static const uint16_t even[] = {4, 4, 4, 4}, two[] = {3, 3}, ragged[] = {1, 5, 8, 2};

    make_model(HALVES, "query halves", KV_FP16, 2, even, 64, 64);
    make_model(FLOATS, "query floats", KV_FP32, 2, two, 96, 64);
    make_model(BRAINS, "query brains", KV_BF16, 2, two, 128, 128);
    make_model(KEYS_ONLY, "query keys", KV_FP16, 2, two, 64, 0);
    make_model(RAGGED, "query ragged", KV_FP16, 4, ragged, 32, 16);
}

/* Salts from here on make keys about a mean of their own in each chapter of CHAPTER_TOKENS. */
#define SALT_MEANS (UINT64_C(1) << 29)
/* Salts from here on make rows of only a few kinds. */
#define SALT_KINDS (UINT64_C(1) << 30)
#define N_KINDS    12
/* Salts from here on make values of any bits, which no number may be. */
#define SALT_RAW (UINT64_C(1) << 31)
/* Salts from here on make rows of zeros. */
#define SALT_ZEROS (UINT64_C(1) << 32)

/* Element i of a key, and of the value behind it: at most 127 / 64 in size. */
static float key_of(uint64_t salt, uint32_t layer, uint32_t head, uint32_t token, uint32_t i)
{
    if (salt >= SALT_KINDS && salt < SALT_RAW)
        token = token * 31 % N_KINDS;
    uint64_t place = (uint64_t)layer << 56 ^ (uint64_t)head << 48 ^ (uint64_t)token << 16 ^ i;

    if (salt >= SALT_ZEROS)
        return 0;
    if (salt >= SALT_MEANS && salt < SALT_KINDS) {
        const uint64_t mean =
            kv_mix64(kv_mix64(salt) ^ (token / CHAPTER_TOKENS + 1) * 1000 ^ i);

        return (float)((int)(kv_mix64(kv_mix64(salt) ^ place) % 127) - 63 +
                       (mean & 1 ? 64 : -64)) /
               64;
    }
    return (float)((int)(kv_mix64(kv_mix64(salt) ^ place) % 255) - 127) / 64;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static void store(uint8_t *at, unsigned dtype, float value)
{
    uint32_t bits = bits_of(value);
    uint16_t half = (uint16_t)(bits >> 16); /* bf16 */

    if (dtype == KV_FP32) {
        memcpy(at, &bits, sizeof(bits));
        return;
    }
    if (dtype == KV_FP16) { /* exact, and far from the smallest */
        half = (uint16_t)(bits >> 16 & 0x8000);
        if (value != 0)
            half |= (uint16_t)(((bits >> 23 & 0xff) - 112) << 10 | (bits >> 13 & 0x3ff));
    }
    memcpy(at, &half, sizeof(half));
}

static void make_row(uint8_t *row,
                     const struct kv_layer_schema *schema,
                     uint64_t salt,
                     uint32_t layer,
                     uint32_t head,
                     uint32_t token)
{
    uint32_t step = kv_dtype_bytes(schema->dtype);

    test_row(row, schema->row_bytes, salt, layer, head, token);
    for (uint32_t i = 0; i < (salt < SALT_RAW ? schema->d_k + schema->d_v : schema->d_k); i++)
        store(row + i * step, schema->dtype, key_of(salt, layer, head, token, i));
}

static void
make_box(uint8_t *at, const kv_schema_t *schema, const struct kv_rows *box, uint64_t salt)
{
    for (uint32_t layer = 0; layer < schema->n_layers; layer++)
        for (uint32_t head = 0; head < schema->layers[layer].n_kv_heads; head++)
            for (uint32_t i = 0; i < box->n_tokens; i++) {
                make_row(at, &schema->layers[layer], salt, layer, head, box->token_begin + i);
                at += schema->layers[layer].row_bytes;
            }
}

/* ---- operations, waited for -------------------------------------------------------------- */

static void expect(struct kv_op *op, kv_status_t begun, kv_status_t wanted, const char *what)
{
    kv_status_t status = begun == KV_OK ? kv_wait(op) : begun;

    if (status != wanted)
        fail_msg("%s: %s, not %s: %s", what, kv_status_name(status), kv_status_name(wanted),
                 begun == KV_OK ? kv_op_detail(op) : "at once");
    if (begun == KV_OK)
        kv_op_free(op);
}

static struct kv_session *take_session(struct kv_op *op, const char *what)
{
    struct kv_session *session;

    if (kv_wait(op) != KV_OK)
        fail_msg("%s: %s", what, kv_op_detail(op));
    session = kv_op_session(op);
    assert_non_null(session);
    kv_op_free(op);
    return session;
}

static struct kv_session *open_session(struct side *side, const struct kv_model_info *model)
{
    struct kv_op *op;

    assert_int_equal(kv_open_begin(side->client, model, NULL, 0, &op), KV_OK);
    return take_session(op, "open");
}

static struct kv_session *fork_session(struct kv_session *session, uint32_t tokens)
{
    struct kv_op *op;

    assert_int_equal(kv_fork_begin(session, tokens, 0, &op), KV_OK);
    return take_session(op, "fork");
}

static void close_session(struct kv_session *session)
{
    struct kv_op *op = NULL;
    kv_status_t status = kv_close_begin(session, 0, &op);

    expect(op, status, KV_OK, "close");
    kv_session_free(session);
}

static void truncate_session(struct kv_session *session, uint32_t tokens)
{
    struct kv_op *op = NULL;
    kv_status_t status = kv_truncate_begin(session, tokens, 0, &op);

    expect(op, status, KV_OK, "truncate");
}

static void put(struct side *side,
                struct kv_session *session,
                uint32_t begin,
                uint32_t count,
                uint64_t salt)
{
    const kv_schema_t *schema = kv_session_schema(session);
    struct kv_rows_io io = {.buffer = side->out};
    struct kv_rows box = {
        .n_layers = schema->n_layers, .token_begin = begin, .n_tokens = count};
    struct kv_op *op = NULL;
    kv_status_t status;

    assert_in_range(kv_rows_bytes(schema, &box), 1, BUFFER_BYTES);
    make_box(kv_buffer_data(side->out), schema, &box, salt);
    status = count == 1 ? kv_append_begin(session, &box, &io, 0, &op)
                        : kv_put_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_OK, "put");
}

static struct kv_index_options index_of(uint32_t tokens, uint32_t chapter_blocks)
{
    return (struct kv_index_options){
        .tokens = tokens,
        .chapter_blocks = chapter_blocks,
        .m = 2,
        .bits = 6,
        .iterations = 6,
        .seed = 1,
        .wait = true,
    };
}

/* A message that waits is sent again after eight times the client's second, and the node then
 * counts what the first had made as found. */
enum {
    ASKS_AGAIN_US = 8000000
};

static bool asked_again; /* by the last make_index() */

static struct kv_index_result make_index(struct kv_session *session,
                                         const struct kv_index_options *index)
{
    struct kv_index_result indexed;
    struct kv_op_times times;
    struct kv_op *op;

    assert_int_equal(kv_index_begin(session, index, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("index: %s", kv_op_detail(op));
    kv_op_index_result(op, &indexed);
    kv_op_get_times(op, &times);
    asked_again = times.ended_us - times.begun_us >= ASKS_AGAIN_US;
    kv_op_free(op);
    /* Each data thread has one message. */
    assert_true(indexed.busiest_us <= indexed.train_us);
    if (subject.n_threads > 0) /* nodes that others have started have as many as they have */
        assert_true(indexed.busiest_us * subject.n_nodes * subject.n_threads >=
                    indexed.train_us);
    return indexed;
}

/* All codebooks of an index that was just made are new. */
static void expect_trained(const struct kv_index_result *indexed, uint32_t n_books)
{
    assert_int_equal(indexed->n_found + indexed->n_trained, n_books);
    assert_int_equal(indexed->n_pending, 0);
    if (!asked_again)
        assert_int_equal(indexed->n_found, 0);
}

/* ---- what must be found ------------------------------------------------------------------ */

/* A question, and the rows that it is about. */
struct question {
    struct kv_query query;
    struct kv_range ranges[3];
    float vectors[HEADS_MAX * 8 * D_K_MAX];
    struct {
        uint32_t begin; /* tokens from here on have the salt, up to the next */
        uint64_t salt;
    } salts[4];
    unsigned n_salts;
    bool codes_come; /* they are being made: it is not known which ones it goes by */
};

static uint64_t salt_of(const struct question *question, uint32_t token)
{
    unsigned i = question->n_salts;

    while (question->salts[--i].begin > token)
        ;
    return question->salts[i].salt;
}

/* A question about rows of one salt, in [0, n_tokens), of a whole layer. */
static void
make_question(struct question *question, uint32_t layer, uint32_t n_tokens, uint64_t salt)
{
    memset(question, 0, sizeof(*question));
    question->salts[0].salt = salt;
    question->n_salts = 1;
    question->ranges[0] = (struct kv_range){0, n_tokens};
    for (size_t i = 0; i < sizeof(question->vectors) / sizeof(float); i++)
        question->vectors[i] =
            (float)(kv_mix64(kv_mix64(salt + 1) + layer * 1000003 + i) % 20001) / 10000 - 1;
    question->query = (struct kv_query){
        .layer = layer,
        .n_queries = 3,
        .queries = question->vectors,
        .scale = 0.25f,
        .merge = KV_MERGE_SUM,
        .answer = KV_ANSWER_ROWS,
        .k = 20,
        .rerank = 1,
        .n_ranges = 1,
        .ranges = question->ranges,
    };
}

/* Step 2 sees all but a few candidates, so that codes are used and decide next to nothing. */
static void rerank_most(struct question *question)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < question->query.n_ranges; i++)
        n += question->ranges[i].end - question->ranges[i].begin;
    question->query.rerank = (n - 1) / question->query.k;
}

/* A head's candidates. */
static void find_candidates(struct oracle_rows *rows,
                            const struct question *question,
                            const struct kv_layer_schema *schema,
                            uint32_t head)
{
    const struct kv_query *query = &question->query;
    uint32_t n = 0;

    for (uint32_t i = 0; i < query->n_ranges; i++)
        n += query->ranges[i].end - query->ranges[i].begin;
    oracle_rows_make(rows, n, schema->d_k, schema->d_v);
    n = 0;
    for (uint32_t i = 0; i < query->n_ranges; i++) {
        for (uint32_t token = query->ranges[i].begin; token < query->ranges[i].end; token++) {
            const uint64_t salt = salt_of(question, token);

            for (uint32_t e = 0; e < schema->d_k; e++)
                rows->keys[(size_t)n * schema->d_k + e] =
                    (double)key_of(salt, query->layer, head, token, e);
            for (uint32_t e = 0; e < schema->d_v; e++)
                rows->values[(size_t)n * schema->d_v + e] =
                    (double)key_of(salt, query->layer, head, token, schema->d_k + e);
            rows->ranges[n] = i;
            rows->tokens[n++] = token;
        }
    }
}

/* Adds what the rows' codes and copies stand for.  false: the nodes are elsewhere. */
static bool find_codes(struct oracle_rows *rows,
                       struct kv_session *session,
                       uint32_t layer,
                       uint32_t head,
                       uint32_t *ret_coded)
{
    struct kv_ticket ticket;
    bool is_found = false;

    kv_session_ticket(session, &ticket);
    for (uint32_t i = 0; i < cluster.n_nodes && !is_found; i++) {
        kvs_node_stop(cluster.nodes[i]);
        is_found = node_codes(cluster.nodes[i], &ticket.token, layer, head, rows);
        assert_int_equal(kvs_node_start(cluster.nodes[i], true), KV_OK);
    }
    *ret_coded = 0;
    for (uint32_t i = 0; i < rows->n; i++)
        *ret_coded += rows->coded[i];
    assert_true(is_found || subject.addresses != NULL);
    return is_found;
}

/* Of a head, for each row that is chosen. */
static uint32_t candidates_of(const struct kv_query *query, uint32_t head)
{
    if (query->candidates_each != NULL)
        return query->candidates_each[head - query->kv_head_begin];
    return query->first_cut == KV_CUT_NONE ? query->rerank : query->candidates;
}

/* What the oracle says of one head.  false: codes decide, and are not known. */
static bool ask_oracle(struct oracle *oracle,
                       struct oracle_rows *rows,
                       struct kv_session *session,
                       const struct question *question,
                       uint32_t head,
                       const struct kv_query_result *found)
{
    const struct kv_query *query = &question->query;
    const struct oracle_question asked = {
        .queries = query->queries +
                   (size_t)(head - query->kv_head_begin) * query->n_queries * rows->d_k,
        .n_queries = query->n_queries,
        .scale = query->scale,
        .merge = query->merge,
        .selection = query->selection,
        .share = query->fraction,
        .k = query->k,
        .factor = query->first_cut == KV_CUT_NONE ? candidates_of(query, head) : query->rerank,
        .first_cut = query->first_cut,
        .candidates = candidates_of(query, head),
    };
    bool is_known = true;

    /* A cut by copies knows nothing of how step 1 has gone, which may have been skipped. */
    if (found->n_scored_by_code > 0 || query->first_cut != KV_CUT_NONE) {
        uint32_t n_coded = 0;

        is_known = find_codes(rows, session, query->layer, head, &n_coded);
        if (is_known && found->n_scored_by_code > 0 && n_coded != found->n_scored_by_code) {
            assert_true(question->codes_come && n_coded > found->n_scored_by_code);
            is_known = false;
        }
    }
    oracle_make(oracle, &asked, rows);
    return is_known;
}

static struct oracle_answer answer_of(const struct kv_query_result *found, const bool *held)
{
    return (struct oracle_answer){
        .n_chosen = found->n_selected,
        .n_ids = found->n_ids,
        .ids = found->ids,
        .heads = found->query_mask,
        .scores = found->weights,
        .held = held,
    };
}

/* Holds what was found of one head against the oracle's choice. */
static void check_choice(struct oracle_rows *rows,
                         struct kv_session *session,
                         const struct question *question,
                         uint32_t head,
                         const struct kv_query_result *found)
{
    const struct oracle_answer answer = answer_of(found, NULL);
    struct oracle oracle;

    if (ask_oracle(&oracle, rows, session, question, head, found)) {
        const char *why = oracle_choice_fault(&oracle, &answer);

        if (why != NULL)
            fail_msg(
                "layer %u, head %u, merge %d, selection %d of %g, k %u, rerank %u, first cut "
                "%d of %u: %s",
                question->query.layer, head, (int)question->query.merge,
                (int)question->query.selection, (double)question->query.fraction,
                question->query.k, question->query.rerank, (int)question->query.first_cut,
                candidates_of(&question->query, head), why);
    }
    oracle_free(&oracle);
}

/* What holds for every answer: ids among the candidates, ascending; rows that are the ids'. */
static void check_form(const struct kv_session *session,
                       const struct question *question,
                       const struct oracle_rows *rows,
                       const struct kv_layer_schema *schema,
                       uint32_t head,
                       const struct kv_query_result *found)
{
    const struct kv_query *query = &question->query;
    uint8_t row[1024];
    uint32_t n_rows = 0, j = 0;

    assert_in_range(schema->row_bytes, 1, sizeof(row));
    /* Who takes all need not score them. */
    if (found->n_scored_by_code + found->n_scored_by_key > 0 ||
        (uint64_t)query->k * candidates_of(query, head) < rows->n)
        assert_int_equal(found->n_scored_by_code + found->n_scored_by_key, rows->n);
    assert_true(isnan(found->recall) || (found->recall >= 0 && found->recall <= 1));
    if (query->selection == KV_SELECT_TOP)
        assert_true(found->n_ids >= (query->k < rows->n ? query->k : rows->n));
    assert_true(found->node < subject.n_nodes);
    assert_int_equal(found->weights != NULL, query->want_weights);
    assert_int_equal(found->query_mask != NULL, query->merge == KV_MERGE_NONE);
    assert_int_equal(found->row_index != NULL, query->answer == KV_ANSWER_ROWS);
    assert_int_equal(found->n_selected, found->n_ids);
    assert_int_equal(found->n_estimated, 0);
    assert_null(found->outputs);
    assert_null(found->lses);
    for (uint32_t i = 0; i < found->n_ids; i++, j++) {
        while (j < rows->n && rows->tokens[j] < found->ids[i])
            j++;
        assert_true(j < rows->n && rows->tokens[j] == found->ids[i]);
        if (found->row_index == NULL || found->row_index[i] == KV_ROW_CACHED)
            continue;
        assert_int_equal(found->row_index[i], n_rows);
        make_row(row, schema, salt_of(question, found->ids[i]), query->layer, head,
                 found->ids[i]);
        assert_memory_equal((const uint8_t *)found->rows + n_rows * schema->row_bytes, row,
                            schema->row_bytes);
        assert_int_equal(found->crcs[n_rows], kv_row_crc(session, row, schema->row_bytes,
                                                         query->layer, head, found->ids[i]));
        n_rows++;
    }
    assert_int_equal(found->n_rows, n_rows);
}

static struct kv_op *
begin_query(struct side *side, struct kv_session *session, const struct kv_query *query)
{
    struct kv_rows_io io = {.buffer = side->in, .offset = 64};
    size_t room = kv_query_rows_bytes_max(kv_session_schema(session), query);
    struct kv_op *op;

    assert_int_equal(room > 0, query->answer == KV_ANSWER_ROWS);
    assert_in_range(room, 0, BUFFER_BYTES - 64);
    memset(kv_buffer_data(side->in), 0xa5, room + 64);
    if (kv_query_begin(session, query, &io, 0, &op) != KV_OK)
        fail_msg("%s", kv_client_detail(side->client));
    return op;
}

/* What the answers to a question sum up to. */
struct sums {
    uint32_t n_coded, n_exact, n_chapters, n_held, n_rows;
};

static struct sums
check_answer(struct kv_op *op, struct kv_session *session, const struct question *question)
{
    const struct kv_query *query = &question->query;
    const struct kv_layer_schema *schema = &kv_session_schema(session)->layers[query->layer];
    uint32_t n_heads = query->n_kv_heads > 0 ? query->n_kv_heads : schema->n_kv_heads;
    struct sums sums = {0};
    struct kv_query_result found;

    for (uint32_t i = 0; i < n_heads; i++) {
        struct oracle_rows rows;

        assert_int_equal(kv_op_query_result(op, i, &found), KV_OK);
        find_candidates(&rows, question, schema, query->kv_head_begin + i);
        check_form(session, question, &rows, schema, query->kv_head_begin + i, &found);
        check_choice(&rows, session, question, query->kv_head_begin + i, &found);
        oracle_rows_free(&rows);
        sums.n_coded += found.n_scored_by_code;
        sums.n_exact += found.n_scored_by_key;
        sums.n_chapters += found.n_chapters;
        sums.n_held += found.n_ids - found.n_rows;
        sums.n_rows += found.n_rows;
    }
    assert_int_equal(kv_op_query_result(op, n_heads, &found), KV_INVALID);
    return sums;
}

static struct sums
ask(struct side *side, struct kv_session *session, const struct question *question)
{
    struct kv_op *op = begin_query(side, session, &question->query);
    struct sums sums;

    if (kv_wait(op) != KV_OK)
        fail_msg("query: %s", kv_op_detail(op));
    sums = check_answer(op, session, question);
    kv_op_free(op);
    return sums;
}

/* ---- attention --------------------------------------------------------------------------- */

static void assert_same_floats(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bits_of(a[i]) != bits_of(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            fail_msg("element %zu of %zu: %.9g, not %.9g", i, n, (double)a[i], (double)b[i]);
}

static struct kv_op *
answered(struct side *side, struct kv_session *session, const struct kv_query *query)
{
    struct kv_op *op = begin_query(side, session, query);

    if (kv_wait(op) != KV_OK)
        fail_msg("query: %s", kv_op_detail(op));
    return op;
}

/* The same rows are chosen, all of them or those held. */
static void
check_names(const struct kv_query_result *found, const struct kv_query_result *ids, bool all)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < ids->n_ids; i++) {
        if (at == found->n_ids || found->ids[at] != ids->ids[i]) {
            assert_false(all);
            continue;
        }
        if (found->query_mask != NULL)
            assert_int_equal(found->query_mask[at], ids->query_mask[i]);
        if (found->weights != NULL)
            assert_same_floats(&found->weights[at], &ids->weights[i], 1);
        assert_true(all ? found->row_index[at] == 0 || found->row_index[at] == KV_ROW_CACHED
                        : found->row_index[at] == KV_ROW_CACHED);
        at++;
    }
    assert_int_equal(at, found->n_ids);
    assert_int_equal(found->query_mask != NULL, ids->query_mask != NULL);
    assert_int_equal(found->weights != NULL, ids->weights != NULL);
    assert_int_equal(found->n_selected, ids->n_ids);
    assert_int_equal(found->n_estimated + found->n_rows, 0);
    assert_null(found->rows);
}

/* Holds one head's outputs against attention over the rows that the answer names and that are
 * not held.  Returns how many are. */
static uint32_t check_attention(struct kv_session *session,
                                const struct question *question,
                                const struct kv_layer_schema *schema,
                                uint32_t head,
                                const struct kv_query_result *names)
{
    struct oracle_answer answer;
    struct oracle_rows rows;
    struct oracle oracle;
    const char *why = NULL;
    uint32_t n_held = 0;
    bool *held;

    find_candidates(&rows, question, schema, head);
    held = calloc(rows.n, sizeof(*held));
    assert_non_null(held);
    for (uint32_t i = 0, at = 0; i < names->n_ids; i++) {
        while (rows.tokens[at] != names->ids[i])
            at++;
        held[at] = names->row_index[i] == KV_ROW_CACHED;
        n_held += held[at];
    }
    answer = answer_of(names, held);
    if (ask_oracle(&oracle, &rows, session, question, head, names))
        why = oracle_choice_fault(&oracle, &answer);
    if (why == NULL)
        why = oracle_attention_fault(&oracle, &answer, names->outputs, names->lses, NULL);
    if (why != NULL)
        fail_msg("layer %u, head %u: %s", question->query.layer, head, why);
    oracle_free(&oracle);
    oracle_rows_free(&rows);
    free(held);
    return n_held;
}

/* Asks for ids, for attention with names, and without: it is the attention over the rows that
 * are chosen and not held.  Returns how many were held. */
static uint32_t
ask_attend(struct side *side, struct kv_session *session, const struct question *question)
{
    struct kv_query query = question->query;
    const struct kv_layer_schema *schema = &kv_session_schema(session)->layers[query.layer];
    const uint32_t n_heads = query.n_kv_heads > 0 ? query.n_kv_heads : schema->n_kv_heads;
    struct kv_op *ids_op, *names_op, *op;
    uint32_t n_held = 0;

    query.answer = KV_ANSWER_IDS;
    ids_op = answered(side, session, &query);
    query.answer = KV_ANSWER_ATTEND;
    op = answered(side, session, &query);
    query.want_ids = true;
    names_op = answered(side, session, &query);
    for (uint32_t i = 0; i < n_heads; i++) {
        struct kv_query_result ids, names, found;

        assert_int_equal(kv_op_query_result(ids_op, i, &ids), KV_OK);
        assert_int_equal(kv_op_query_result(names_op, i, &names), KV_OK);
        assert_int_equal(kv_op_query_result(op, i, &found), KV_OK);
        check_names(&names, &ids, true);
        check_names(&found, &ids, false);
        const uint32_t n_held_here =
            check_attention(session, question, schema, query.kv_head_begin + i, &names);
        assert_int_equal(found.n_ids, n_held_here);
        n_held += n_held_here;
        assert_same_floats(found.lses, names.lses, query.n_queries);
        assert_same_floats(found.outputs, names.outputs, (size_t)query.n_queries * schema->d_v);
    }
    kv_op_free(ids_op);
    kv_op_free(names_op);
    kv_op_free(op);
    return n_held;
}

/* ---- the rest ---------------------------------------------------------------------------- */

/* Of one vector: the attention over all candidates but for chosen ones, where `all` is false.
 *   names  the answer for the head, of which all chosen rows are named */
static double attention_over(const struct question *question,
                             const struct kv_layer_schema *schema,
                             uint32_t head,
                             uint32_t q,
                             const struct kv_query_result *names,
                             bool all,
                             double *ret_output)
{
    const struct kv_query *query = &question->query;
    const float *vector =
        query->queries +
        ((size_t)(head - query->kv_head_begin) * query->n_queries + q) * schema->d_k;
    struct oracle_rows rows;
    bool *in;
    double lse;

    find_candidates(&rows, question, schema, head);
    in = calloc(rows.n, sizeof(*in));
    assert_non_null(in);
    for (uint32_t i = 0, at = 0; i < rows.n; i++) {
        const bool is_named = at < names->n_ids && names->ids[at] == rows.tokens[i];
        const bool is_chosen =
            is_named && (names->query_mask == NULL || (names->query_mask[at] >> q & 1) != 0);

        in[i] = all || !is_chosen;
        at += is_named;
    }
    lse = oracle_attend(&rows, vector, query->scale, in, ret_output);
    oracle_rows_free(&rows);
    free(in);
    return lse;
}

/* Asks for attention and for names, each with the rest; both are near what they estimate.
 * Tokens before `n_summarised` have summaries of that size. */
static void ask_rest_near(struct side *side,
                          struct kv_session *session,
                          const struct question *question,
                          uint32_t n_summarised,
                          double lse_margin,
                          double margin)
{
    static const enum kv_answer answers[] = {KV_ANSWER_ATTEND, KV_ANSWER_IDS, KV_ANSWER_ROWS};
    struct kv_query query = question->query;
    const struct kv_layer_schema *schema = &kv_session_schema(session)->layers[query.layer];
    const uint32_t n_heads = query.n_kv_heads > 0 ? query.n_kv_heads : schema->n_kv_heads;
    const uint32_t all = UINT32_MAX >> (32 - query.n_queries);
    static double wanted[D_K_MAX];

    for (unsigned a = 0; a < 3; a++) {
        query.answer = answers[a];
        query.want_ids = answers[a] == KV_ANSWER_ATTEND;
        struct kv_op *op = answered(side, session, &query);
        for (uint32_t head = 0; head < n_heads; head++) {
            struct kv_query_result found;
            uint32_t n_rest = 0;

            assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
            assert_int_equal(found.n_ids, found.n_selected);
            assert_int_equal(found.n_rows, a == 2 ? found.n_ids : 0);
            for (uint32_t i = 0; i < query.n_ranges; i++)
                for (uint32_t token = query.ranges[i].begin; token < query.ranges[i].end;
                     token++)
                    n_rest += token < n_summarised;
            for (uint32_t i = 0; i < found.n_ids; i++)
                n_rest -= found.ids[i] < n_summarised &&
                          (found.query_mask == NULL || found.query_mask[i] == all);
            assert_int_equal(found.n_estimated, n_rest);
            for (uint32_t q = 0; q < query.n_queries; q++) {
                double lse = attention_over(question, schema, query.kv_head_begin + head, q,
                                            &found, a == 0, wanted);

                if (isinf(lse)) {
                    assert_true(isinf(found.lses[q]) && found.lses[q] < 0);
                    continue;
                }
                if (!(fabs((double)found.lses[q] - lse) < lse_margin))
                    fail_msg("answer %u: log-sum-exp %g, not %g", a, (double)found.lses[q],
                             lse);
                for (uint32_t j = 0; j < schema->d_v; j++)
                    if (!(fabs((double)found.outputs[q * schema->d_v + j] - wanted[j]) <
                          margin))
                        fail_msg("answer %u: output %u: %g, not %g", a, j,
                                 (double)found.outputs[q * schema->d_v + j], wanted[j]);
            }
        }
        kv_op_free(op);
    }
}

static void ask_rest(struct side *side,
                     struct kv_session *session,
                     const struct question *question,
                     uint32_t n_summarised,
                     double margin)
{
    ask_rest_near(side, session, question, n_summarised, margin, margin);
}

static void query_fails(struct side *side,
                        struct kv_session *session,
                        const struct question *question,
                        uint32_t deadline_ms,
                        kv_status_t wanted)
{
    struct kv_rows_io io = {.buffer = side->in};
    struct kv_op *op = NULL;
    kv_status_t status = kv_query_begin(session, &question->query, &io, deadline_ms, &op);

    expect(op, status, wanted, "query");
}

/* ---- the suite: without codes ------------------------------------------------------------ */

/* Every merge and every form of answer, on each layer of each model. */
static void every_model_and_merge(void **state)
{
    static struct question question;
    struct side side;

    (void)state;
    open_side(&side);
    for (unsigned model = 0; model < N_MODELS; model++) {
        struct kv_session *session = open_session(&side, &models[model]);

        put(&side, session, 0, 700, 1);
        for (uint32_t token = 700; token < 710; token++)
            put(&side, session, token, 1, 1);
        for (uint32_t layer = 0; layer < models[model].schema.n_layers; layer++) {
            for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
                make_question(&question, layer, 710, 1);
                question.query.merge = (enum kv_merge)merge;
                question.query.want_weights = merge % 2;
                assert_int_equal(ask(&side, session, &question).n_coded, 0);
                question.query.rerank = 4;
                question.query.want_weights = !question.query.want_weights;
                question.query.answer = KV_ANSWER_IDS;
                ask(&side, session, &question);
                question.query.n_queries = 1;
                question.query.k = 1;
                ask(&side, session, &question);
                question.query.n_queries = 8;
                question.query.k = 100;
                question.query.rerank = 2;
                ask(&side, session, &question);
            }
        }
        close_session(session);
    }
    close_side(&side);
}

static void some_heads_and_ranges(void **state)
{
    static struct question question;
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[RAGGED]);
    put(&side, session, 0, 1500, 1);
    make_question(&question, 2, 1500, 1);
    question.query.kv_head_begin = 3;
    question.query.n_kv_heads = 4;
    ask(&side, session, &question);
    question.query.n_kv_heads = 1;
    ask(&side, session, &question);
    question.query.kv_head_begin = 0;
    question.query.n_kv_heads = 0;

    question.query.n_ranges = 3;
    question.ranges[0] = (struct kv_range){4, 5};
    question.ranges[1] = (struct kv_range){100, 400};
    question.ranges[2] = (struct kv_range){400, 1437};
    ask(&side, session, &question);
    question.query.want_weights = true;
    question.query.merge = KV_MERGE_NONE;
    ask(&side, session, &question);

    /* Fewer candidates than k: all of them. */
    question.query.n_ranges = 2;
    question.ranges[1] = (struct kv_range){1490, 1500};
    ask(&side, session, &question);
    question.query.want_weights = false; /* nothing is scored */
    ask(&side, session, &question);
    question.query.want_weights = true;
    question.query.merge = KV_MERGE_SUM;
    ask(&side, session, &question);
    question.query.k = KV_SELECTED_MAX;
    question.query.rerank = UINT32_MAX;
    struct kv_op *op = begin_query(&side, session, &question.query);
    question.query.rerank = 1; /* what it is cut to does not matter */
    assert_int_equal(kv_wait(op), KV_OK);
    check_answer(op, session, &question);
    kv_op_free(op);
    question.query.n_ranges = 1;
    question.ranges[0] = (struct kv_range){0, 1};
    ask(&side, session, &question);
    close_session(session);
    close_side(&side);
}

/* Equal weights: the lower token. */
static void ties_go_to_the_lower_token(void **state)
{
    static struct question question;
    struct kv_session *session;
    struct kv_query_result found;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, 600, SALT_ZEROS + 1);
    make_question(&question, 0, 600, SALT_ZEROS + 1);
    question.ranges[0].begin = 7;
    for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        question.query.merge = (enum kv_merge)merge;
        struct kv_op *op = begin_query(&side, session, &question.query);
        assert_int_equal(kv_wait(op), KV_OK);
        for (uint32_t head = 0; head < 4; head++) {
            assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
            assert_int_equal(found.n_ids, 20);
            for (uint32_t i = 0; i < 20; i++)
                assert_int_equal(found.ids[i], 7 + i);
        }
        kv_op_free(op);
    }
    close_session(session);
    close_side(&side);
}

/* Answers of several messages: more rows, or more ids, than one may carry. */
static void large_answers(void **state)
{
    static struct question question;
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[BRAINS]); /* 512 bytes a row */
    put(&side, session, 0, 2000, 1);
    put(&side, session, 2000, 2000, 1);
    make_question(&question, 1, 4000, 1);
    question.query.k = 1500;
    ask(&side, session, &question);
    question.query.k = 2000;
    question.query.merge = KV_MERGE_MAX;
    question.query.want_weights = true;
    ask(&side, session, &question);
    question.query.k = 2049;
    query_fails(&side, session, &question, 0, KV_TOO_LARGE);
    question.query.answer = KV_ANSWER_IDS;
    ask(&side, session, &question);
    question.query.k = KV_SELECTED_MAX;
    question.query.merge = KV_MERGE_NONE;
    ask(&side, session, &question);
    close_session(session);
    close_side(&side);
}

/* Rows of blocks that the caller has are chosen and not sent; other rows under the same number
 * are sent. */
static void held_blocks(void **state)
{
    static struct question question;
    static uint32_t crcs[4 * 640];
    uint32_t n_held[4] = {5, 0, 2, 1};
    struct kv_cached_block held[8];
    struct kv_rows box = {.layer_begin = 1, .n_layers = 1, .n_tokens = 640};
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, 640, 1);
    make_question(&question, 1, 640, 1);
    question.query.k = 200;
    struct sums all = ask(&side, session, &question);

    assert_int_equal(all.n_held, 0);
    struct kv_rows_io io = {.buffer = side.in, .crcs = crcs};
    struct kv_op *op = NULL;
    kv_status_t status = kv_read_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_OK, "read");
#define FINGERPRINT(head, block) \
    kv_block_fingerprint(crcs + (head)*640 + (block)*KV_BLOCK_TOKENS)
    for (uint32_t block = 0; block < 5; block++)
        held[block] = (struct kv_cached_block){block, FINGERPRINT(0, block)};
    held[5] = (struct kv_cached_block){1, FINGERPRINT(2, 1) + 1}; /* other rows */
    held[6] = (struct kv_cached_block){3, FINGERPRINT(2, 3)};
    held[7] = (struct kv_cached_block){2, FINGERPRINT(2, 2)}; /* of another head */
#undef INSTANCE
    question.query.n_cached = n_held;
    question.query.cached = held;
    op = begin_query(&side, session, &question.query);
    if (kv_wait(op) != KV_OK)
        fail_msg("query: %s", kv_op_detail(op));
    struct sums sums = check_answer(op, session, &question);
    assert_int_equal(sums.n_held + sums.n_rows, all.n_rows);
    for (uint32_t head = 0; head < 4; head++) {
        struct kv_query_result found;

        assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
        for (uint32_t i = 0; i < found.n_ids; i++) {
            bool is_held = head == 0 || (head == 2 && found.ids[i] / KV_BLOCK_TOKENS == 3);

            assert_int_equal(found.row_index[i] == KV_ROW_CACHED, is_held);
        }
    }
    kv_op_free(op);
    close_session(session);
    close_side(&side);
}

/* Attention by the node over what is chosen: every model and merge. */
static void attention_of_every_model_and_merge(void **state)
{
    static struct question question;
    struct side side;

    (void)state;
    open_side(&side);
    for (unsigned model = 0; model < N_MODELS; model++) {
        struct kv_session *session = open_session(&side, &models[model]);

        put(&side, session, 0, 1300, 1);
        for (uint32_t layer = 0; layer < models[model].schema.n_layers; layer++) {
            for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
                make_question(&question, layer, 1300, 1);
                question.query.merge = (enum kv_merge)merge;
                question.query.answer = KV_ANSWER_ATTEND;
                if (model == KEYS_ONLY) {
                    query_fails(&side, session, &question, 0, KV_UNSUPPORTED);
                    continue;
                }
                ask_attend(&side, session, &question);
                question.query.rerank = 3;
                question.query.want_weights = true;
                question.query.n_queries = 8;
                question.query.k = 64 + merge;
                ask_attend(&side, session, &question);
                question.query.selection = merge % 2 ? KV_SELECT_MASS : KV_SELECT_THRESHOLD;
                question.query.fraction = 0.5f;
                ask_attend(&side, session, &question);
            }
            if (model == KEYS_ONLY)
                continue;
            /* All candidates. */
            question.query.selection = KV_SELECT_TOP;
            question.query.fraction = 0;
            question.query.k = KV_SELECTED_MAX;
            ask_attend(&side, session, &question);
            question.query.want_weights = false;
            question.query.n_queries = 1;
            ask_attend(&side, session, &question);
            question.query.merge = KV_MERGE_SUM;
            question.query.n_ranges = 2;
            question.ranges[0] = (struct kv_range){3, 4};
            question.ranges[1] = (struct kv_range){5, 1299};
            ask_attend(&side, session, &question);
        }
        if (model != KEYS_ONLY) {
            struct kv_index_options index = index_of(1280, CHAPTER_BLOCKS);

            make_index(session, &index);
            make_question(&question, 1, 1300, 1);
            for (uint32_t rerank = 1; rerank <= 4; rerank += 3) {
                question.query.rerank = rerank;
                ask_attend(&side, session, &question);
            }
        }
        close_session(session);
    }
    close_side(&side);
}

/* More rows than could be sent or named; values that are no numbers; and what may not be asked.
 */
static void attention_of_many_rows(void **state)
{
    static struct question question;
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[BRAINS]);
    put(&side, session, 0, 2000, 1);
    put(&side, session, 2000, 2000, 1);
    put(&side, session, 4000, 200, SALT_RAW + 1);
    make_question(&question, 1, 4000, 1);
    question.query.k = KV_SELECTED_MAX;
    for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        question.query.merge = (enum kv_merge)merge;
        question.query.want_weights = merge % 2;
        ask_attend(&side, session, &question);
        question.ranges[0] = (struct kv_range){200, 4200};
        question.query.answer = KV_ANSWER_ATTEND;
        question.query.want_weights = false;
        query_fails(&side, session, &question, 0, KV_INVALID); /* values that are no numbers */
        question.ranges[0] = (struct kv_range){0, 4000};
    }
    question.query.answer = KV_ANSWER_ROWS;
    question.query.want_ids = true;
    query_fails(&side, session, &question, 0, KV_INVALID); /* rows are named anyway */
    question.query.want_ids = false;
    question.query.answer = (enum kv_answer)(KV_ANSWER_ATTEND + 1);
    query_fails(&side, session, &question, 0, KV_INVALID);
    close_session(session);
    close_side(&side);
}

/* Rows with an infinite key share the answer, as if there were no others: a log-sum-exp that no
 * product of numbers makes, and right all the same. */
static void keys_that_are_infinite(void **state)
{
    static const uint16_t infinite = 0x7c00;
    const struct kv_layer_schema *layer = &models[HALVES].schema.layers[1];
    const uint32_t n_tokens = 100, odd = 7;
    const struct kv_rows box = {.n_layers = 2, .n_tokens = n_tokens};
    static struct question question;
    struct kv_session *session;
    struct kv_query_result found;
    struct side side;
    struct kv_op *op;
    uint8_t *row;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    make_box(kv_buffer_data(side.out), kv_session_schema(session), &box, 1);
    row = (uint8_t *)kv_buffer_data(side.out) +
          (layer->unit_begin * n_tokens + odd) * layer->row_bytes;
    memcpy(row, &infinite, sizeof(infinite));
    assert_int_equal(
        kv_put_begin(session, &box, &(struct kv_rows_io){.buffer = side.out}, 0, &op), KV_OK);
    expect(op, KV_OK, KV_OK, "put");

    make_question(&question, 1, n_tokens, 1);
    question.query.n_kv_heads = 1;
    question.query.answer = KV_ANSWER_ATTEND;
    question.query.k = n_tokens;
    for (uint32_t q = 0; q < question.query.n_queries; q++)
        question.vectors[q * layer->d_k] = q == 1 ? -0.5f : 0.5f;
    op = answered(&side, session, &question.query);
    assert_int_equal(kv_op_query_result(op, 0, &found), KV_OK);
    assert_int_equal(found.n_selected, n_tokens);
    for (uint32_t q = 0; q < question.query.n_queries; q++) {
        if (q == 1) { /* to this vector it is the last of all */
            assert_true(fabsf(found.lses[q]) < 1000);
            continue;
        }
        assert_true(found.lses[q] == FLT_MAX);
        for (uint32_t i = 0; i < layer->d_v; i++)
            assert_true(found.outputs[q * layer->d_v + i] ==
                        key_of(1, 1, 0, odd, layer->d_k + i));
    }
    kv_op_free(op);
    close_session(session);
    close_side(&side);
}

/* What is not chosen is estimated where there are summaries, and attended where not: near the
 * attention over all. */
static void rest_by(uint32_t summary_rows, uint32_t chapter_blocks)
{
    static struct question question;
    struct side side;

    open_side(&side);
    for (unsigned model = HALVES; model <= BRAINS; model++) {
        struct kv_session *session = open_session(&side, &models[model]), *fork;
        struct kv_index_options index = index_of(2100, chapter_blocks);

        put(&side, session, 0, 2300, SALT_KINDS);
        make_question(&question, 1, 2300, SALT_KINDS);
        question.query.summaries = 64;
        question.query.summary_rows = summary_rows;
        question.query.n_kv_heads = 2;
        ask_rest(&side, session, &question, 0, 1e-3);
        index.summaries = 64;
        index.summary_rows = summary_rows;
        make_index(session, &index);
        for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
            question.query.merge = (enum kv_merge)merge;
            question.query.rerank = 1;
            ask_rest(&side, session, &question, 2 * CHAPTER_TOKENS, 0.05);
            question.query.rerank = merge % 2 ? 4 : UINT32_MAX; /* step 1 takes all */
            ask_rest(&side, session, &question, 2 * CHAPTER_TOKENS, 0.05);
        }
        question.query.k = KV_SELECTED_MAX; /* nothing is left over */
        question.query.merge = KV_MERGE_SUM;
        question.query.rerank = 1;
        question.ranges[0].end = 600;
        ask_rest(&side, session, &question, 2 * CHAPTER_TOKENS, 1e-3);
        question.query.k = 20;
        question.ranges[0].end = 2300;
        question.query.summaries = 16; /* there are none */
        ask_rest(&side, session, &question, 0, 1e-3);
        question.query.summaries = 64; /* nor of such groups */
        question.query.summary_rows = summary_rows == 3072 ? 1024 : 3072;
        ask_rest(&side, session, &question, 0, 1e-3);
        question.query.summary_rows = summary_rows;

        /* A fork has them, and ranges cut groups. */
        fork = fork_session(session, 1500);
        put(&side, fork, 1500, 300, SALT_KINDS + 1);
        question.query.summaries = 64;
        question.query.n_ranges = 3;
        question.ranges[0] = (struct kv_range){5, 6};
        question.ranges[1] = (struct kv_range){100, 1100};
        question.ranges[2] = (struct kv_range){1300, 1800};
        question.salts[1].begin = 1500;
        question.salts[1].salt = SALT_KINDS + 1;
        question.n_salts = 2;
        ask_rest(&side, fork, &question, 1408, 0.05);
        question.n_salts = 1;
        close_session(session);
        question.ranges[2].end = 1450;
        truncate_session(fork, 1450);
        ask_rest(&side, fork, &question, 1408, 0.05); /* the block behind it is a copy */
        close_session(fork);
    }
    struct kv_session *session = open_session(&side, &models[KEYS_ONLY]);
    struct kv_index_options index = index_of(1024, CHAPTER_BLOCKS);
    struct kv_op *op = NULL;

    put(&side, session, 0, 1100, 1);
    make_question(&question, 1, 1100, 1);
    question.query.summaries = 16;
    query_fails(&side, session, &question, 0, KV_UNSUPPORTED);
    question.query.summaries = 17;
    query_fails(&side, session, &question, 0, KV_INVALID);
    index.summaries = 16;
    kv_status_t status = kv_index_begin(session, &index, 0, &op);
    expect(op, status, KV_UNSUPPORTED, "index");
    close_session(session);
    close_side(&side);
}

static void the_rest(void **state)
{
    (void)state;
    rest_by(0, CHAPTER_BLOCKS);
    rest_by(3072, 2 * CHAPTER_BLOCKS);
}

/* With what the caller attends to itself, the rows that an answer names as held, it is the
 * attention of an answer that held none. */
static void check_parts(const struct question *question,
                        const struct kv_layer_schema *schema,
                        uint32_t head,
                        const struct kv_query_result *found,
                        const float *outputs,
                        const float *lses)
{
    const uint32_t n_queries = question->query.n_queries, d_v = schema->d_v;
    double own[D_K_MAX];
    struct oracle_rows rows;
    bool *held;

    find_candidates(&rows, question, schema, head);
    held = calloc(rows.n, sizeof(*held));
    assert_non_null(held);
    for (uint32_t q = 0; q < n_queries; q++) {
        const float *vector =
            question->query.queries + ((size_t)head * n_queries + q) * schema->d_k;

        for (uint32_t i = 0, at = 0; i < rows.n; i++) {
            const bool is_named = at < found->n_ids && found->ids[at] == rows.tokens[i];

            held[i] = is_named &&
                      (found->query_mask == NULL || (found->query_mask[at] >> q & 1) != 0);
            at += is_named;
        }
        const double own_lse = oracle_attend(&rows, vector, question->query.scale, held, own);
        const double own_sum = exp(own_lse), their_sum = exp((double)found->lses[q]);
        assert_true(fabs(log(own_sum + their_sum) - (double)lses[q]) <= 1e-4);
        for (uint32_t j = 0; j < d_v; j++) {
            const double merged =
                (own_sum * own[j] + their_sum * (double)found->outputs[(size_t)q * d_v + j]) /
                (own_sum + their_sum);
            assert_true(fabs(merged - (double)outputs[(size_t)q * d_v + j]) <= 1e-4);
        }
    }
    oracle_rows_free(&rows);
    free(held);
}

/* Rows that the caller holds are chosen, named and left out: with the caller's own part it is
 * the attention over all. */
static void attention_without_held_blocks(void **state)
{
    static struct question question;
    static uint32_t crcs[4 * 640];
    static float outputs[4][3 * 64], lses[4][3];
    uint32_t n_held[4] = {5, 0, 2, 1};
    struct kv_cached_block held[8];
    struct kv_rows box = {.layer_begin = 1, .n_layers = 1, .n_tokens = 640};
    const struct kv_layer_schema *schema = &models[HALVES].schema.layers[1];
    struct kv_session *session;
    struct kv_query_result found;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, 640, 1);
    struct kv_rows_io io = {.buffer = side.in, .crcs = crcs};
    struct kv_op *op = NULL;
    kv_status_t status = kv_read_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_OK, "read");
#define FINGERPRINT(head, block) \
    kv_block_fingerprint(crcs + (head)*640 + (block)*KV_BLOCK_TOKENS)
    for (uint32_t block = 0; block < 5; block++)
        held[block] = (struct kv_cached_block){block, FINGERPRINT(0, block)};
    held[5] = (struct kv_cached_block){1, FINGERPRINT(2, 1) + 1}; /* other rows */
    held[6] = (struct kv_cached_block){3, FINGERPRINT(2, 3)};
    held[7] = (struct kv_cached_block){2, FINGERPRINT(2, 2)}; /* of another head */
#undef INSTANCE
    for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        make_question(&question, 1, 640, 1);
        question.query.merge = (enum kv_merge)merge;
        question.query.k = 200;
        question.query.rerank = 1 + merge % 2;
        question.query.want_weights = merge % 2;
        assert_int_equal(ask_attend(&side, session, &question), 0);
        question.query.answer = KV_ANSWER_ATTEND;
        op = answered(&side, session, &question.query);
        for (uint32_t head = 0; head < 4; head++) {
            assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
            assert_int_equal(found.n_ids, 0);
            memcpy(outputs[head], found.outputs, sizeof(outputs[head]));
            memcpy(lses[head], found.lses, sizeof(lses[head]));
        }
        kv_op_free(op);

        question.query.n_cached = n_held;
        question.query.cached = held;
        assert_in_range(ask_attend(&side, session, &question), 200, 1600);
        op = answered(&side, session, &question.query);
        for (uint32_t head = 0; head < 4; head++) {
            assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
            assert_int_equal(found.n_ids == found.n_selected, head == 0);
            assert_int_equal(found.n_ids > 0, head == 0 || head == 2);
            for (uint32_t i = 0; head > 0 && i < found.n_ids; i++)
                assert_int_equal(found.ids[i] / KV_BLOCK_TOKENS, 3);
            check_parts(&question, schema, head, &found, outputs[head], lses[head]);
        }
        kv_op_free(op);
    }
    close_session(session);
    close_side(&side);
}

/* A weight must not depend on how many others are asked for. */
static void assert_same_weights(const struct kv_query_result *few,
                                const struct kv_query_result *many)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < few->n_ids; i++, at++) {
        while (at < many->n_ids && many->ids[at] < few->ids[i])
            at++;
        assert_true(at < many->n_ids && many->ids[at] == few->ids[i]);
        assert_true(few->weights[i] == many->weights[at]);
    }
}

/* Codes of so few bits that chapters are scored by cell, and have far more rows than cells:
 * every merge, ranges that cut chapters, and weights that no step 2 has touched. */
static void chapters_by_cell(void **state)
{
    static struct question question;
    struct kv_index_options index = index_of(3072, CHAPTER_BLOCKS);
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[FLOATS]);
    put(&side, session, 0, 3100, 1);
    index.bits = 3;
    make_index(session, &index);
    for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        make_question(&question, 0, 3100, 1);
        question.query.merge = (enum kv_merge)merge;
        rerank_most(&question);
        assert_true(ask(&side, session, &question).n_coded > 0);
        question.ranges[0] = (struct kv_range){4, 900};
        question.ranges[1] = (struct kv_range){1000, 2900};
        question.ranges[2] = (struct kv_range){2950, 3050};
        question.query.n_ranges = 3;
        rerank_most(&question);
        assert_true(ask(&side, session, &question).n_coded > 0);
    }
    for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        struct kv_query_result found[2];
        struct kv_op *ops[2];

        make_question(&question, 0, 3072, 1);
        question.query.merge = (enum kv_merge)merge;
        question.query.answer = KV_ANSWER_IDS;
        question.query.n_queries = 1;
        question.query.want_weights = true;
        for (unsigned i = 0; i < 2; i++) {
            question.query.k = i == 0 ? 30 : 2500;
            ops[i] = begin_query(&side, session, &question.query);
            if (kv_wait(ops[i]) != KV_OK)
                fail_msg("query: %s", kv_op_detail(ops[i]));
        }
        assert_int_equal(kv_op_query_result(ops[0], 1, &found[0]), KV_OK);
        assert_int_equal(kv_op_query_result(ops[1], 1, &found[1]), KV_OK);
        assert_int_equal(found[0].n_ids, 30);
        assert_int_equal(found[1].n_ids, 2500);
        assert_same_weights(&found[0], &found[1]);
        for (unsigned i = 0; i < 2; i++)
            kv_op_free(ops[i]);
    }
    close_session(session);
    close_side(&side);
}

/* A query sees the tokens that it names: it waits for them, to its deadline. */
static void queries_wait_for_rows(void **state)
{
    static struct question question;
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, 300, 1);
    make_question(&question, 0, 301, 1);
    struct kv_rows_io io = {.buffer = side.in};
    struct kv_op *op;
    assert_int_equal(kv_query_begin(session, &question.query, &io, 300, &op), KV_OK);
    kv_status_t status = kv_finish(op);
    assert_true(status == KV_NOT_READY || status == KV_DEADLINE);

    op = begin_query(&side, session, &question.query);
    kv_client_wait(side.client, 20000);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    put(&side, session, 300, 1, 1);
    if (kv_wait(op) != KV_OK)
        fail_msg("query: %s", kv_op_detail(op));
    check_answer(op, session, &question);
    kv_op_free(op);

    /* A snapshot beyond the ranges. */
    question.query.snapshot = 303;
    op = begin_query(&side, session, &question.query);
    put(&side, session, 301, 1, 1);
    kv_client_wait(side.client, 20000);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    put(&side, session, 302, 1, 1);
    if (kv_wait(op) != KV_OK)
        fail_msg("query: %s", kv_op_detail(op));
    check_answer(op, session, &question);
    kv_op_free(op);
    close_session(session);
    close_side(&side);
}

/* Forks see their own rows, truncated sessions the new ones; who is behind is told. */
static void forks_and_truncates(void **state)
{
    static struct question question;
    struct kv_session *session, *child, *there;
    struct kv_ticket ticket;
    struct side side, other;
    struct kv_index_options index = index_of(500, 0);
    struct kv_op *op;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, 500, 1);
    child = fork_session(session, 450);
    put(&side, child, 450, 200, 2);
    put(&side, session, 500, 150, 1);
    for (uint32_t layer = 0; layer < 2; layer++) {
        make_question(&question, layer, 650, 1);
        ask(&side, session, &question);
        question.salts[1].begin = 450;
        question.salts[1].salt = 2;
        question.n_salts = 2;
        ask(&side, child, &question);
        ask_attend(&side, child, &question);
    }
    truncate_session(session, 130);
    put(&side, session, 130, 400, 3);
    make_question(&question, 1, 530, 1);
    question.salts[1].begin = 130;
    question.salts[1].salt = 3;
    question.n_salts = 2;
    ask(&side, session, &question);
    ask_attend(&side, session, &question);

    open_side(&other);
    kv_session_ticket(session, &ticket);
    assert_int_equal(kv_resume_begin(other.client, &ticket, 0, &op), KV_OK);
    there = take_session(op, "resume");
    ask(&other, there, &question);
    truncate_session(session, 520);
    query_fails(&other, there, &question, 0, KV_STALE);
    question.query.answer = KV_ANSWER_ATTEND;
    query_fails(&other, there, &question, 0, KV_STALE);
    question.query.answer = KV_ANSWER_ROWS;
    assert_int_equal(kv_index_begin(there, &index, 0, &op), KV_OK);
    expect(op, KV_OK, KV_STALE, "index");
    kv_session_free(there);
    close_side(&other);
    close_session(child);
    close_session(session);
    query_fails(&side, open_session(&side, &models[HALVES]), &question, 200, KV_NOT_READY);
    close_side(&side);
}

/* Every layer's question at once, behind each other's back. */
static void questions_in_flight(void **state)
{
    enum {
        N = 24
    };
    static struct question questions[N];
    struct kv_session *session;
    struct kv_op *ops[N];
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[RAGGED]);
    put(&side, session, 0, 1000, 1);
    for (unsigned i = 0; i < N; i++) {
        struct kv_rows_io io = {.buffer = side.in, .offset = (size_t)i << 19};

        make_question(&questions[i], i % 4, 1000 - i, 1);
        questions[i].query.merge = (enum kv_merge)(1 + i / 4 % 4);
        assert_int_equal(kv_query_begin(session, &questions[i].query, &io, 0, &ops[i]), KV_OK);
    }
    for (unsigned i = 0; i < N; i++) {
        struct kv_op_times times;

        if (i % 5 == 4) {
            kv_cancel(ops[i]);
            assert_true(kv_op_status(ops[i]) == KV_CANCELLED || kv_op_status(ops[i]) == KV_OK);
            continue;
        }
        if (kv_wait(ops[i]) != KV_OK)
            fail_msg("query: %s", kv_op_detail(ops[i]));
        check_answer(ops[i], session, &questions[i]);
        kv_op_get_times(ops[i], &times);
        assert_true(times.begun_us <= times.sent_us && times.sent_us <= times.arrived_us);
        assert_true(times.arrived_us <= times.ended_us);
    }
    for (unsigned i = 0; i < N; i++)
        kv_op_free(ops[i]);
    assert_true(cluster_becomes(side.client, "status", "requests_in_flight", 0));
    close_session(session);
    close_side(&side);
}

/* ---- the suite: with codes --------------------------------------------------------------- */

static uint32_t n_units(const struct kv_session *session)
{
    return kv_session_schema(session)->n_units;
}

/* One codebook for all: rows have codes, and step 2 makes good what they do not tell. */
static void one_codebook(void **state)
{
    static struct question question;
    const uint32_t tokens = 1280;
    struct kv_index_options index = index_of(tokens, 0);
    struct side side;

    (void)state;
    open_side(&side);
    for (unsigned model = 0; model < N_MODELS; model++) {
        struct kv_session *session = open_session(&side, &models[model]);
        struct kv_index_result indexed;
        uint64_t n_coded = 0;

        put(&side, session, 0, tokens, 1);
        indexed = make_index(session, &index);
        assert_int_equal(indexed.rows, (uint64_t)n_units(session) * tokens);
        assert_int_equal(indexed.rows_coded, indexed.rows);
        expect_trained(&indexed, n_units(session));
        assert_true(indexed.iterations <= indexed.n_trained * index.iterations);
        assert_true(indexed.iterations > 0 || asked_again);
        for (uint32_t layer = 0; layer < models[model].schema.n_layers; layer++) {
            make_question(&question, layer, tokens, 1);
            rerank_most(&question);
            for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
                question.query.merge = (enum kv_merge)merge;
                struct sums sums = ask(&side, session, &question);

                assert_int_equal(sums.n_exact, 0);
                n_coded += merge == KV_MERGE_SUM ? sums.n_coded : 0;
                assert_int_equal(sums.n_chapters,
                                 models[model].schema.layers[layer].n_kv_heads);
            }
            question.query.merge = KV_MERGE_SUM;
            question.query.rerank = 1;
            question.query.want_weights = true;
            ask(&side, session, &question);
            question.query.merge = KV_MERGE_NONE;
            question.query.rerank = 2;
            ask(&side, session, &question);
        }
        assert_int_equal(n_coded, indexed.rows_coded);

        /* Rows that come later. */
        put(&side, session, tokens, 200, 1);
        make_question(&question, 0, tokens + 200, 1);
        rerank_most(&question);
        assert_int_equal(ask(&side, session, &question).n_exact, 0);
        close_session(session);
    }
    close_side(&side);
}

/* A row's weight by its codes does not depend on how many rows are chosen, of few cells. */
static void weights_of_few_cells(void **state)
{
    static struct question question;
    const uint32_t tokens = 1280;
    struct kv_index_options index = index_of(tokens, 0);
    struct side side;
    struct kv_session *session;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, tokens, 1);
    index.bits = 3;
    make_index(session, &index);
    make_question(&question, 0, tokens, 1);
    question.query.n_queries = 1;
    question.query.want_weights = true;
    question.query.answer = KV_ANSWER_IDS;
    for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        struct kv_op *few, *many;

        question.query.merge = (enum kv_merge)merge;
        question.query.k = 20;
        few = begin_query(&side, session, &question.query);
        assert_int_equal(kv_wait(few), KV_OK);
        question.query.k = 1000;
        many = begin_query(&side, session, &question.query);
        assert_int_equal(kv_wait(many), KV_OK);
        check_answer(many, session, &question);
        for (uint32_t i = 0; i < 4; i++) {
            struct kv_query_result a, b;
            uint32_t at = 0;

            assert_int_equal(kv_op_query_result(few, i, &a), KV_OK);
            assert_int_equal(kv_op_query_result(many, i, &b), KV_OK);
            assert_int_equal(a.n_ids, 20);
            assert_int_equal(b.n_ids, 1000);
            for (uint32_t j = 0; j < a.n_ids; j++) {
                while (at < b.n_ids && b.ids[at] < a.ids[j])
                    at++;
                assert_true(at < b.n_ids && b.ids[at] == a.ids[j]);
                assert_memory_equal(&a.weights[j], &b.weights[at], sizeof(float));
            }
        }
        kv_op_free(few);
        kv_op_free(many);
    }
    close_session(session);
    close_side(&side);
}

/* A codebook for each chapter: the rest is scored by its keys, forks and repeats find what is
 * there. */
static void chapters(void **state)
{
    static struct question question;
    const uint32_t tokens = 2 * CHAPTER_TOKENS + 3 * KV_BLOCK_TOKENS + 17;
    struct kv_index_options index = index_of(tokens, CHAPTER_BLOCKS);
    struct kv_session *session, *child;
    struct kv_index_result indexed;
    struct sums sums;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, tokens, 1);
    make_question(&question, 0, tokens, 1);
    rerank_most(&question);
    assert_int_equal(ask(&side, session, &question).n_exact, 4 * tokens);

    indexed = make_index(session, &index);
    assert_int_equal(indexed.rows, (uint64_t)n_units(session) * tokens);
    assert_int_equal(indexed.rows_coded, n_units(session) * 2 * CHAPTER_TOKENS);
    expect_trained(&indexed, 2 * n_units(session));
    sums = ask(&side, session, &question);
    assert_int_equal(sums.n_coded, 4 * 2 * CHAPTER_TOKENS);
    assert_int_equal(sums.n_exact, 4 * (tokens - 2 * CHAPTER_TOKENS));
    assert_int_equal(sums.n_chapters, 4 * 2);
    question.ranges[0] = (struct kv_range){100, 900};
    rerank_most(&question);
    sums = ask(&side, session, &question);
    assert_int_equal(sums.n_coded, 4 * 800);
    assert_int_equal(sums.n_chapters, 4);

    /* Again: nothing is trained. */
    indexed = make_index(session, &index);
    assert_int_equal(indexed.rows_coded, n_units(session) * 2 * CHAPTER_TOKENS);
    assert_int_equal(indexed.n_trained + indexed.n_pending, 0);
    assert_int_equal(indexed.n_found, 2 * n_units(session));

    /* A fork has its parent's codes. */
    child = fork_session(session, tokens - 100);
    put(&side, child, tokens - 100, 300, 2);
    make_question(&question, 1, tokens + 200, 1);
    question.salts[1].begin = tokens - 100;
    question.salts[1].salt = 2;
    question.n_salts = 2;
    rerank_most(&question);
    sums = ask(&side, child, &question);
    assert_int_equal(sums.n_coded, 4 * 2 * CHAPTER_TOKENS);
    index.tokens = tokens;
    indexed = make_index(child, &index);
    assert_int_equal(indexed.n_trained, 0);
    assert_int_equal(indexed.n_found, 2 * n_units(session));

    /* Rows that took the place of others are not scored by the others' codes. */
    truncate_session(session, CHAPTER_TOKENS + 300);
    put(&side, session, CHAPTER_TOKENS + 300, 2000, 3);
    make_question(&question, 0, CHAPTER_TOKENS + 2300, 1);
    question.salts[1].begin = CHAPTER_TOKENS + 300;
    question.salts[1].salt = 3;
    question.n_salts = 2;
    rerank_most(&question);
    sums = ask(&side, session, &question);
    assert_true(sums.n_coded >= 4 * CHAPTER_TOKENS);
    assert_true(sums.n_coded <= 4 * (CHAPTER_TOKENS + 300));
    index.tokens = CHAPTER_TOKENS + 2300;
    indexed = make_index(session, &index);
    if (!asked_again)
        assert_int_equal(indexed.n_trained,
                         n_units(session)); /* too little is left of the second */
    assert_int_equal(indexed.n_pending, 0);
    sums = ask(&side, session, &question);
    assert_true(sums.n_coded >= 4 * 2 * CHAPTER_TOKENS);

    /* The fork has its own. */
    make_question(&question, 0, tokens + 200, 1);
    question.salts[1].begin = tokens - 100;
    question.salts[1].salt = 2;
    question.n_salts = 2;
    rerank_most(&question);
    close_session(session);
    sums = ask(&side, child, &question);
    assert_int_equal(sums.n_coded, 4 * 2 * CHAPTER_TOKENS);
    close_session(child);
    close_side(&side);
}

/* Without waiting: queries meanwhile are right, and in the end the codes are there. */
static void codes_in_the_background(void **state)
{
    static struct question question;
    struct kv_index_options index = index_of(3 * CHAPTER_TOKENS, CHAPTER_BLOCKS);
    struct kv_session *session;
    struct kv_index_result indexed;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, 3 * CHAPTER_TOKENS, 1);
    index.wait = false;
    indexed = make_index(session, &index);
    assert_int_equal(indexed.n_found + indexed.n_trained + indexed.n_pending,
                     3 * n_units(session));
    make_question(&question, 1, 3 * CHAPTER_TOKENS, 1);
    rerank_most(&question);
    question.codes_come = true;
    for (unsigned i = 0; i < 20; i++)
        ask(&side, session, &question);
    question.codes_come = false;
    index.wait = true;
    indexed = make_index(session, &index);
    assert_int_equal(indexed.rows_coded, indexed.rows);
    assert_int_equal(indexed.n_pending, 0);
    assert_int_equal(ask(&side, session, &question).n_exact, 0);
    /* A session that ends while its codes are being made. */
    struct kv_session *brief = open_session(&side, &models[FLOATS]);
    put(&side, brief, 0, 3 * CHAPTER_TOKENS, 2);
    index.wait = false;
    index.iterations = 100;
    make_index(brief, &index);
    close_session(brief);
    ask(&side, session, &question);
    close_session(session);
    assert_true(cluster_becomes(side.client, "status", "requests_in_flight", 0));
    close_side(&side);
}

/* ---- the suite: with prefixes that sessions share ----------------------------------------- */

enum {
    SHARED_BLOCKS = 2 * CHAPTER_BLOCKS + 3,
    SHARED_TOKENS = SHARED_BLOCKS * KV_BLOCK_TOKENS,
};

/* Names that no test has used before, also at nodes that were there before. */
static void make_names(struct side *side,
                       const struct kv_model_info *model,
                       struct kv_id128 names[SHARED_BLOCKS])
{
    static uint32_t tokens[SHARED_TOKENS];
    static uint64_t n_made;
    const uint64_t number = kv_mix64(kv_client_now_us(side->client)) + n_made++;

    for (uint32_t i = 0; i < SHARED_TOKENS; i++)
        tokens[i] = (uint32_t)kv_mix64(number + i);
    kv_prompt_names(side->client, model, tokens, SHARED_TOKENS, NULL, 0, names);
}

static struct kv_session *open_named(struct side *side,
                                     const struct kv_model_info *model,
                                     const struct kv_id128 *names,
                                     uint32_t expected)
{
    const struct kv_session_options options = {.block_names = names,
                                               .n_block_names = SHARED_BLOCKS};
    struct kv_op *op;

    assert_int_equal(kv_open_begin(side->client, model, &options, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("open: %s", kv_op_detail(op));
    assert_int_equal(kv_op_tokens(op), expected);
    return take_session(op, "open");
}

static void publish(struct kv_session *session, const struct kv_id128 *names)
{
    const struct kv_publish blocks = {.n_names = SHARED_BLOCKS, .names = names};
    struct kv_op *op;

    assert_int_equal(kv_publish_begin(session, &blocks, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("publish: %s", kv_op_detail(op));
    assert_int_equal(kv_op_tokens(op), SHARED_TOKENS);
    kv_op_free(op);
}

/* Questions that go by codes, by cells and by summaries. */
enum {
    BY_CODE,
    BY_WEIGHT,
    BY_SUMMARY,
    ATTENDED,
    N_QUESTIONS,
};

static void ask_for(unsigned kind, uint32_t n_tokens, uint64_t salt, struct question *question)
{
    make_question(question, 1, n_tokens, salt);
    question->query.answer = KV_ANSWER_IDS;
    question->query.rerank = kind == BY_CODE ? 4 : 1;
    question->query.want_weights = kind == BY_WEIGHT;
    question->query.summaries = kind >= BY_SUMMARY ? 64 : 0;
    if (kind == ATTENDED) {
        question->query.answer = KV_ANSWER_ATTEND;
        question->query.want_ids = true;
    }
}

static void assert_same_answer(const struct kv_query_result *a,
                               const struct kv_query_result *b,
                               const struct kv_query *query,
                               uint32_t d_v)
{
    assert_int_equal(a->n_ids, b->n_ids);
    assert_memory_equal(a->ids, b->ids, a->n_ids * sizeof(a->ids[0]));
    if (query->want_weights)
        assert_same_floats(a->weights, b->weights, a->n_ids);
    if (query->summaries > 0) {
        assert_same_floats(a->outputs, b->outputs, (size_t)query->n_queries * d_v);
        assert_same_floats(a->lses, b->lses, query->n_queries);
    }
    assert_int_equal(a->n_scored_by_code, b->n_scored_by_code);
    assert_int_equal(a->n_scored_by_key, b->n_scored_by_key);
    assert_int_equal(a->n_estimated, b->n_estimated);
    assert_int_equal(a->n_reranked, b->n_reranked);
    assert_int_equal(a->n_chapters, b->n_chapters);
}

/* What the first session was answered, one session that shares its rows is answered, too. */
static void expect_same_answers(struct side *side,
                                struct kv_session *session,
                                struct kv_op *const first[N_QUESTIONS],
                                uint32_t n_tokens,
                                uint64_t salt)
{
    static struct question question;
    const struct kv_layer_schema *schema = &kv_session_schema(session)->layers[1];

    for (unsigned kind = 0; kind < N_QUESTIONS; kind++) {
        ask_for(kind, n_tokens, salt, &question);
        struct kv_op *op = answered(side, session, &question.query);

        for (uint32_t head = 0; head < schema->n_kv_heads; head++) {
            struct kv_query_result found, wanted;

            assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
            assert_int_equal(kv_op_query_result(first[kind], head, &wanted), KV_OK);
            assert_same_answer(&found, &wanted, &question.query, schema->d_v);
            assert_int_equal(found.n_scored_by_code, 2 * CHAPTER_TOKENS);
            assert_int_equal(found.n_chapters, 2);
            assert_int_equal(found.n_estimated > 0, kind >= BY_SUMMARY);
        }
        kv_op_free(op);
    }
}

/* Who opens a session by names gets codes, codebooks, cells, rotations and summaries with the
 * rows, whether they were made before the blocks were published or after: nothing is trained
 * again, and the answers are those of the first session, bit for bit. */
static void prefixes_have_codes(void **state)
{
    static struct question question;
    struct kv_index_options index = index_of(2 * CHAPTER_TOKENS, CHAPTER_BLOCKS);
    const struct cluster_client reversed = {.is_reversed = true};
    struct side side, other;

    (void)state;
    open_side(&side);
    open_side_as(&other, &reversed);
    index.summaries = 64;
    for (unsigned model = HALVES; model <= BRAINS; model++) {
        struct kv_id128 names[SHARED_BLOCKS];
        struct kv_op *first[N_QUESTIONS];
        const uint64_t salt = SALT_KINDS + model;
        struct kv_session *session, *there, *again;
        struct kv_index_result indexed;

        make_names(&side, &models[model], names);
        index.rotates = model == BRAINS;
        index.bits = model == FLOATS ? 3 : 6; /* 3: by cell */
        session = open_named(&side, &models[model], names, 0);
        put(&side, session, 0, SHARED_TOKENS, salt);
        if (model == FLOATS)
            publish(session, names);
        indexed = make_index(session, &index);
        expect_trained(&indexed, 2 * n_units(session));
        if (model != FLOATS)
            publish(session, names);
        for (unsigned kind = 0; kind < N_QUESTIONS; kind++) {
            ask_for(kind, SHARED_TOKENS, salt, &question);
            first[kind] = answered(&side, session, &question.query);
        }

        there = open_named(&other, &models[model], names, SHARED_TOKENS);
        expect_same_answers(&other, there, first, SHARED_TOKENS, salt);
        indexed = make_index(there, &index);
        assert_int_equal(indexed.n_found, 2 * n_units(there));
        assert_int_equal(indexed.n_trained + indexed.n_pending, 0);
        assert_int_equal(indexed.rows_coded, indexed.rows);

        /* The first one ends, and the second one gets blocks of its own behind the first
         * chapter: in what it still shares, it has the codes; and who comes later has all. */
        close_session(session);
        truncate_session(there, CHAPTER_TOKENS + 300);
        put(&other, there, CHAPTER_TOKENS + 300, 800, salt + 100);
        make_question(&question, 1, CHAPTER_TOKENS, salt);
        rerank_most(&question);
        assert_int_equal(ask(&other, there, &question).n_exact, 0);
        again = open_named(&side, &models[model], names, SHARED_TOKENS);
        close_session(there);
        expect_same_answers(&side, again, first, SHARED_TOKENS, salt);
        for (unsigned kind = 0; kind < N_QUESTIONS; kind++)
            kv_op_free(first[kind]);
        close_session(again);
    }
    close_side(&other);
    close_side(&side);
}

/* ---- the suite: first cuts --------------------------------------------------------------- */

static uint32_t pick(uint64_t *state, uint32_t n)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)(kv_mix64(*state) % n);
}

/* Question of any kind with a first cut, or without one and with candidates of each head. */
static void make_cut_question(struct question *question,
                              uint32_t *each,
                              const struct kv_schema *schema,
                              uint32_t n_tokens,
                              uint64_t salt,
                              uint64_t *state)
{
    struct kv_query *query = &question->query;

    make_question(question, pick(state, schema->n_layers), n_tokens, salt);
    query->n_queries = 1 + pick(state, 4);
    query->merge = (enum kv_merge)(KV_MERGE_SUM + pick(state, 4));
    query->scale = pick(state, 2) ? 0.25f : 0.05f;
    query->k = 1 + pick(state, pick(state, 4) == 0 ? 300 : 40);
    if (pick(state, 3) == 0) {
        query->selection = pick(state, 2) ? KV_SELECT_MASS : KV_SELECT_THRESHOLD;
        query->fraction = (float)(1 + pick(state, 99)) / 100;
    }
    query->rerank = 1 + pick(state, 4);
    if (pick(state, 8) != 0) {
        query->first_cut = KV_CUT_INT4;
        query->candidates = query->rerank + pick(state, 17 - query->rerank);
    } else if (pick(state, 2)) {
        query->rerank = UINT32_MAX; /* more than a message says */
    }
    query->want_weights = pick(state, 3) == 0;
    if (pick(state, 3) == 0) {
        const uint32_t least = query->first_cut == KV_CUT_NONE ? 1 : query->rerank;
        const uint32_t most =
            query->first_cut == KV_CUT_NONE ? query->rerank : query->candidates;

        for (uint32_t i = 0; i < HEADS_MAX; i++)
            each[i] = pick(state, 3) == 0
                          ? most
                          : least + pick(state, most - least < 16 ? most - least + 1 : 16);
        query->candidates_each = each;
    }
    if (pick(state, 2)) {
        question->ranges[0] = (struct kv_range){pick(state, 200), 300 + pick(state, 200)};
        question->ranges[1] =
            (struct kv_range){question->ranges[0].end + (pick(state, 2) ? 0 : pick(state, 100)),
                              800 + pick(state, 200)};
        question->ranges[2] = (struct kv_range){1000 + pick(state, 100), n_tokens};
        query->n_ranges = 1 + pick(state, 3);
    }
    query->answer = (enum kv_answer)(KV_ANSWER_IDS + pick(state, 3));
}

/* What nodes say that they have read, where all rows have copies.  `n_heads` heads. */
static void check_reads(const struct question *question,
                        const struct kv_layer_schema *schema,
                        const struct kv_op *op,
                        uint32_t n_heads)
{
    const struct kv_query *query = &question->query;
    const uint64_t copy_bytes = ((schema->d_k + 1) / 2 + 15) / 16 * 16 + 2,
                   key_bytes = (uint64_t)kv_dtype_bytes(schema->dtype) * schema->d_k;
    const bool merges = query->merge < KV_MERGE_UNION;
    uint64_t cut = 0, reranked = 0, rows = 0;
    uint32_t n = 0;
    bool is_scored = false;
    struct kv_query_reads reads;

    for (uint32_t i = 0; i < query->n_ranges; i++)
        n += query->ranges[i].end - query->ranges[i].begin;
    for (uint32_t i = 0; i < n_heads; i++) {
        const uint64_t candidates =
            (uint64_t)query->k * candidates_of(query, query->kv_head_begin + i);
        const uint64_t left = (uint64_t)query->k * query->rerank;
        const uint64_t first = candidates < n ? candidates : n;
        struct kv_query_result found;

        assert_int_equal(kv_op_query_result(op, i, &found), KV_OK);
        rows += query->answer == KV_ANSWER_ROWS ? found.n_rows : 0;
        is_scored = is_scored || found.n_scored_by_code > 0;
        cut += left < first ? first : 0;
        reranked +=
            query->rerank > 1 || query->want_weights ? (left < first ? left : first) : 0;
    }
    kv_op_query_reads(op, &reads);
    assert_int_equal(reads.summaries, 0);
    assert_true(is_scored == (reads.codes > 0) && is_scored == (reads.books > 0));
    if (query->answer != KV_ANSWER_ATTEND)
        assert_int_equal(reads.rows, rows * schema->row_bytes);
    if (query->first_cut == KV_CUT_NONE) {
        assert_int_equal(reads.copies, 0);
    } else if (query->selection == KV_SELECT_TOP && merges) {
        assert_int_equal(reads.copies, cut * copy_bytes);
        assert_int_equal(reads.keys, reranked * key_bytes);
    } else if (query->rerank == 1 && !query->want_weights) {
        assert_int_equal(reads.keys, 0);
    }
}

enum {
    CUT_ROUNDS = 60,
    CUT_TOKENS = 1500,
};

/* Answers to the same questions, in the order in which they are asked, whatever the nodes. */
static struct {
    uint64_t answers[N_MODELS][CUT_ROUNDS];
    bool is_known;
} said;

static uint64_t mixed_in(uint64_t sum, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        sum = kv_mix64(sum ^ ((const uint8_t *)data)[i]);
    return sum;
}

/* A sum over all that the answers of some heads say of rows. */
static uint64_t sum_of_answer(const struct question *question,
                              const struct kv_layer_schema *schema,
                              const struct kv_op *op)
{
    const uint32_t n_queries = question->query.n_queries;
    struct kv_query_result found;
    uint64_t sum = 0;

    for (uint32_t i = 0; i < schema->n_kv_heads; i++) {
        assert_int_equal(kv_op_query_result(op, i, &found), KV_OK);
        sum = mixed_in(sum, &found.n_selected, sizeof(found.n_selected));
        sum = mixed_in(sum, found.ids, found.n_ids * sizeof(*found.ids));
        if (found.weights != NULL)
            sum = mixed_in(sum, found.weights, found.n_ids * sizeof(float));
        if (found.query_mask != NULL)
            sum = mixed_in(sum, found.query_mask, found.n_ids * sizeof(uint32_t));
        if (found.outputs != NULL)
            sum = mixed_in(sum, found.outputs, (size_t)n_queries * schema->d_v * sizeof(float));
        if (found.lses != NULL)
            sum = mixed_in(sum, found.lses, n_queries * sizeof(float));
    }
    return sum;
}

/* Asks at random, and again for what was read.
 *   all_copied  of all rows, and they are coded
 *   ret_sums    (n) of answers; may be NULL */
static void ask_cuts(struct side *side,
                     struct kv_session *session,
                     uint32_t n_tokens,
                     unsigned n,
                     uint64_t seed,
                     bool all_copied,
                     uint64_t *ret_sums)
{
    static struct question question;
    const kv_schema_t *schema = kv_session_schema(session);
    uint32_t each[HEADS_MAX];
    uint64_t random = seed;

    for (unsigned i = 0; i < n; i++) {
        make_cut_question(&question, each, schema, n_tokens, 1, &random);
        const struct kv_layer_schema *layer = &schema->layers[question.query.layer];

        if (layer->d_v == 0 && question.query.answer == KV_ANSWER_ATTEND)
            question.query.answer = KV_ANSWER_IDS;
        if (question.query.answer == KV_ANSWER_ATTEND)
            ask_attend(side, session, &question);
        else
            ask(side, session, &question);
        question.query.want_reads = true;
        struct kv_op *op = answered(side, session, &question.query);
        if (all_copied)
            check_reads(&question, layer, op, layer->n_kv_heads);
        if (ret_sums != NULL)
            ret_sums[i] = sum_of_answer(&question, layer, op);
        kv_op_free(op);
    }
}

/* Every merge, selection and answer, with copies of all rows: what brute force finds; and on
 * however many nodes and threads the same bits. */
static void first_cuts(void **state)
{
    struct side side;

    (void)state;
    open_side(&side);
    for (unsigned model = 0; model < N_MODELS; model++) {
        struct kv_session *session = open_session(&side, &models[model]);
        struct kv_index_options index = index_of(CUT_TOKENS, 0);
        uint64_t sums[CUT_ROUNDS];

        index.m = model % 2 ? 4 : 2;
        index.bits = model == BRAINS ? 4 : 6;
        index.rotates = model % 2;
        index.copies = true;
        put(&side, session, 0, CUT_TOKENS, 1);
        make_index(session, &index);
        ask_cuts(&side, session, CUT_TOKENS, CUT_ROUNDS, 100 + model, true, sums);
        for (unsigned i = 0; said.is_known && i < CUT_ROUNDS; i++)
            if (sums[i] != said.answers[model][i])
                fail_msg("model %u, round %u: another answer of other nodes", model, i);
        memcpy(said.answers[model], sums, sizeof(sums));
        close_session(session);
    }
    said.is_known = true;
    close_side(&side);
}

/* Rows that come behind those of an open codebook get codes and copies when they are scored, and
 * the first query finds what the next one does. */
static void first_cuts_of_later_rows(void **state)
{
    static struct question question;
    struct kv_index_options index = index_of(1280, 0);
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    index.copies = true;
    put(&side, session, 0, 1280, 1);
    make_index(session, &index);
    for (uint32_t n_tokens = 1280; n_tokens < 3000; n_tokens += 300) {
        put(&side, session, n_tokens, 300, 1);
        make_question(&question, 1, n_tokens + 300, 1);
        question.query.first_cut = KV_CUT_INT4;
        question.query.candidates = 3;
        question.query.scale = 0.05f;
        question.ranges[0] = (struct kv_range){7, 900};
        question.ranges[1] = (struct kv_range){900, n_tokens + 300};
        question.query.n_ranges = 2;
        for (unsigned again = 0; again < 2; again++) {
            const struct sums sums = ask(&side, session, &question);

            assert_int_equal(sums.n_exact, 0);
            assert_int_equal(sums.n_chapters, 4);
        }
    }
    close_session(session);
    close_side(&side);
}

/* Of rows of few kinds most tie, and of zeros all: to the lower token, at each step. */
static void first_cuts_of_ties(void **state)
{
    static struct question question;
    const uint64_t salts[] = {SALT_KINDS, SALT_ZEROS + 1};
    struct side side;

    (void)state;
    open_side(&side);
    for (unsigned i = 0; i < 2; i++) {
        struct kv_session *session = open_session(&side, &models[HALVES]);
        struct kv_index_options index = index_of(1280, 0);

        index.copies = true;
        put(&side, session, 0, 1280, salts[i]);
        make_index(session, &index);
        for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
            make_question(&question, 1, 1280, salts[i]);
            question.query.merge = (enum kv_merge)merge;
            question.query.first_cut = KV_CUT_INT4;
            question.query.candidates = 7;
            ask(&side, session, &question);
            question.query.rerank = 3;
            ask(&side, session, &question);
        }
        close_session(session);
    }
    close_side(&side);
}

/* Without copies, with those of some chapters, and with rows behind them that have no codes; in a
 * fork of it, too. */
static void first_cuts_of_some_copies(void **state)
{
    static struct question question;
    const uint32_t n_tokens = 2 * CHAPTER_TOKENS + 300;
    struct kv_session *session, *fork;
    struct kv_query_reads reads;
    struct side side;

    (void)state;
    open_side(&side);
    for (unsigned model = HALVES; model <= BRAINS; model++) {
        struct kv_index_options index = index_of(CHAPTER_TOKENS, CHAPTER_BLOCKS);

        session = open_session(&side, &models[model]);
        put(&side, session, 0, n_tokens, 1);
        make_question(&question, 1, n_tokens, 1);
        question.query.first_cut = KV_CUT_INT4;
        question.query.candidates = 8;
        question.query.want_reads = true;
        for (unsigned round = 0; round < 3; round++) {
            ask_cuts(&side, session, n_tokens, 15, 200 + model + 10 * round, false, NULL);
            struct kv_op *op = answered(&side, session, &question.query);
            kv_op_query_reads(op, &reads);
            assert_int_equal(reads.copies > 0, round == 2);
            assert_true(reads.keys > 0);
            kv_op_free(op);
            index.tokens = (round + 1) * CHAPTER_TOKENS;
            index.copies = round > 0;
            if (round < 2) {
                const uint32_t n_trained = make_index(session, &index).n_trained;

                assert_true(n_trained == n_units(session) || asked_again);
            }
        }
        fork = fork_session(session, CHAPTER_TOKENS + 200);
        put(&side, fork, CHAPTER_TOKENS + 200, 400, 1);
        close_session(session);
        ask_cuts(&side, fork, CHAPTER_TOKENS + 600, 15, 300 + model, false, NULL);
        close_session(fork);
    }
    close_side(&side);
}

/* Of a head's rows, those of several chapters are scored one after the other, each less the mean
 * of its own chapter. */
static void first_cuts_of_other_means(void **state)
{
    static struct question question;
    const uint32_t n_tokens = 3 * CHAPTER_TOKENS + 100;
    struct kv_index_options index = index_of(n_tokens, CHAPTER_BLOCKS);
    struct kv_query_reads reads;
    struct side side;

    (void)state;
    open_side(&side);
    index.copies = true;
    for (unsigned model = HALVES; model <= BRAINS; model++) {
        struct kv_session *session = open_session(&side, &models[model]);

        put(&side, session, 0, n_tokens, SALT_MEANS);
        make_index(session, &index);
        for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
            make_question(&question, merge % 2, n_tokens, SALT_MEANS);
            question.query.merge = (enum kv_merge)merge;
            question.query.scale = 0.05f;
            question.query.first_cut = KV_CUT_INT4;
            question.query.want_reads = true;
            for (uint32_t rerank = 1; rerank <= 3; rerank += 2) {
                question.query.rerank = rerank;
                question.query.candidates = UINT16_MAX; /* step 1 takes all */
                ask(&side, session, &question);
                struct kv_op *op = answered(&side, session, &question.query);
                kv_op_query_reads(op, &reads);
                assert_true(reads.copies > 0);
                kv_op_free(op);
                question.query.candidates = 8;
                ask(&side, session, &question);
            }
        }
        close_session(session);
    }
    close_side(&side);
}

/* With the rest by summaries: near the attention over all. */
static void first_cuts_and_the_rest(void **state)
{
    static struct question question;
    struct kv_index_options index = index_of(2100, CHAPTER_BLOCKS);
    struct kv_query_reads reads;
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    index.copies = true;
    index.summaries = 64;
    put(&side, session, 0, 2300, SALT_KINDS);
    make_index(session, &index);
    for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        make_question(&question, 1, 2300, SALT_KINDS);
        question.query.merge = (enum kv_merge)merge;
        question.query.summaries = 64;
        question.query.scale = 0.05f; /* the rest goes by scores of copies where it has some */
        question.query.first_cut = KV_CUT_INT4;
        for (uint32_t rerank = 1; rerank <= 4; rerank += 3) {
            question.query.rerank = rerank;
            question.query.candidates = 8;
            ask_rest(&side, session, &question, 2 * CHAPTER_TOKENS, 0.05);
            question.query.candidates = UINT16_MAX; /* step 1 takes all */
            ask_rest(&side, session, &question, 2 * CHAPTER_TOKENS, 0.05);
        }
        question.query.want_reads = true;
        struct kv_op *op = answered(&side, session, &question.query);
        kv_op_query_reads(op, &reads);
        assert_true(reads.summaries > 0 && reads.rows > 0 && reads.copies > 0);
        kv_op_free(op);
        question.query.want_reads = false;
        op = answered(&side, session, &question.query);
        kv_op_query_reads(op, &reads);
        assert_int_equal(reads.summaries + reads.rows + reads.copies + reads.keys, 0);
        kv_op_free(op);
    }
    close_session(session);
    close_side(&side);
}

/* Of candidates that a cut has left, the rest goes by scores of keys.  Here that is nearly all rows,
 * and so nearly exact; by scores of copies its sum is 0.01 off. */
static void exact_scores_in_the_rest(void **state)
{
    static struct question question;
    const uint32_t n_tokens = 2 * CHAPTER_TOKENS + 100;
    struct kv_index_options index = index_of(n_tokens, CHAPTER_BLOCKS);
    struct kv_query_reads reads;
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[HALVES]);
    index.copies = true;
    index.summaries = 64;
    put(&side, session, 0, n_tokens, SALT_KINDS);
    make_index(session, &index);
    for (unsigned merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        make_question(&question, 1, n_tokens, SALT_KINDS);
        question.query.merge = (enum kv_merge)merge;
        question.query.summaries = 64;
        question.query.first_cut = KV_CUT_INT4;
        rerank_most(&question);
        question.query.candidates = UINT16_MAX;
        ask_rest_near(&side, session, &question, 2 * CHAPTER_TOKENS, 5e-4, 0.05);
        question.query.want_reads = true;
        struct kv_op *op = answered(&side, session, &question.query);
        kv_op_query_reads(op, &reads);
        assert_true(reads.copies > 0 && reads.keys > 0 && reads.summaries > 0);
        kv_op_free(op);
    }
    close_session(session);
    close_side(&side);
}

/* ---- faults ------------------------------------------------------------------------------ */

/* Messages get lost, come late and come twice: answers are right. */
static void lost_and_doubled_messages(void **state)
{
    static const struct fault_rule rules[] = {
        {FAULT_OUT, FAULT_DROP, KV_WIRE_REQUEST, KV_OP_QUERY, 1, 2},
        {FAULT_IN, FAULT_DROP, KV_WIRE_REPLY, KV_OP_QUERY, 0, 2},
        {FAULT_IN, FAULT_DROP, KV_WIRE_BULK_REPLY, KV_OP_QUERY, 0, 1},
        {FAULT_OUT, FAULT_TWICE, KV_WIRE_REQUEST, KV_OP_QUERY, 0, 0},
        {FAULT_OUT, FAULT_GARBLE, KV_WIRE_REQUEST, KV_OP_QUERY, 0, 3},
        {FAULT_IN, FAULT_GARBLE, KV_WIRE_REPLY, KV_OP_QUERY, 0, 3},
        {FAULT_OUT, FAULT_TWICE, KV_WIRE_REQUEST, KV_OP_INDEX, 0, 0},
    };
    static struct question question;
    struct kv_index_options index = index_of(1100, CHAPTER_BLOCKS);
    struct kv_transport *transport;
    struct kv_session *session;
    struct side side;

    (void)state;
    if (subject.addresses != NULL)
        skip();
    assert_int_equal(fault_open(subject.row, subject.transports, &transport), KV_OK);
    open_side_as(&side, &(struct cluster_client){.transport = transport, .retry_ms = 100});
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        session = open_session(&side, &models[HALVES]);
        put(&side, session, 0, 1100, 1);
        fault_add(transport, &rules[i]);
        for (unsigned round = 0; round < 2; round++) {
            for (uint32_t k = 10; k < 1000; k += 390) {
                make_question(&question, 1, 1100, 1);
                question.query.k = k;
                if (k < 400)
                    rerank_most(&question);
                ask(&side, session, &question);
            }
            if (round == 0)
                make_index(session, &index);
        }
        fault_clear(transport);
        close_session(session);
    }
    assert_true(fault_hits(transport) > 0);
    assert_true(cluster_becomes(side.client, "status", "requests_in_flight", 0));
    close_side(&side);
    transport->ops->close(transport);
}

/* An answer that was changed on its way, checksums and all: at most its rows can be wrong, and
 * these are not believed. */
static void changed_answers_are_refused(void **state)
{
    static struct question question;
    struct kv_transport *transport;
    struct kv_session *session;
    struct side side;

    (void)state;
    if (subject.addresses != NULL)
        skip();
    assert_int_equal(fault_open(subject.row, subject.transports, &transport), KV_OK);
    open_side_as(&side, &(struct cluster_client){.transport = transport, .retry_ms = 15000});
    session = open_session(&side, &models[HALVES]);
    put(&side, session, 0, 1000, 1);
    make_question(&question, 1, 1000, 1);
    question.query.n_kv_heads = 1;
    question.query.kv_head_begin = 2;
    fault_add(transport, &(struct fault_rule){FAULT_IN, FAULT_FORGE, KV_WIRE_REPLY, KV_OP_QUERY,
                                              0, 1}); /* in the last row */
    query_fails(&side, session, &question, 0, KV_CORRUPT);
    fault_clear(transport);
    ask(&side, session, &question);
    question.query.k = 900;
    fault_add(transport, &(struct fault_rule){FAULT_IN, FAULT_GARBLE, KV_WIRE_BULK_REPLY,
                                              KV_OP_QUERY, 0, 1});
    query_fails(&side, session, &question, 0, KV_CORRUPT);
    fault_clear(transport);
    ask(&side, session, &question);
    close_session(session);
    close_side(&side);
    transport->ops->close(transport);
}

/* ---- running ----------------------------------------------------------------------------- */

static int open_cluster(void **state)
{
    struct cluster_setup setup = {
        .row = subject.row,
        .transports = subject.transports,
        .n_nodes = subject.n_nodes,
        .n_threads = subject.n_threads,
        .memory_bytes = MEMORY_BYTES,
        .sessions_max = 256,
    };

    (void)state;
    return subject.addresses != NULL || cluster_open(&cluster, &setup) ? 0 : -1;
}

static int close_cluster(void **state)
{
    (void)state;
    if (subject.addresses == NULL)
        cluster_close(&cluster);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_model_and_merge),
        cmocka_unit_test(some_heads_and_ranges),
        cmocka_unit_test(ties_go_to_the_lower_token),
        cmocka_unit_test(large_answers),
        cmocka_unit_test(held_blocks),
        cmocka_unit_test(attention_of_every_model_and_merge),
        cmocka_unit_test(attention_of_many_rows),
        cmocka_unit_test(keys_that_are_infinite),
        cmocka_unit_test(attention_without_held_blocks),
        cmocka_unit_test(the_rest),
        cmocka_unit_test(chapters_by_cell),
        cmocka_unit_test(queries_wait_for_rows),
        cmocka_unit_test(forks_and_truncates),
        cmocka_unit_test(questions_in_flight),
        cmocka_unit_test(one_codebook),
        cmocka_unit_test(weights_of_few_cells),
        cmocka_unit_test(chapters),
        cmocka_unit_test(codes_in_the_background),
        cmocka_unit_test(first_cuts),
        cmocka_unit_test(first_cuts_of_later_rows),
        cmocka_unit_test(first_cuts_of_ties),
        cmocka_unit_test(first_cuts_of_some_copies),
        cmocka_unit_test(first_cuts_of_other_means),
        cmocka_unit_test(first_cuts_and_the_rest),
        cmocka_unit_test(exact_scores_in_the_rest),
        cmocka_unit_test(prefixes_have_codes),
        cmocka_unit_test(lost_and_doubled_messages),
        cmocka_unit_test(changed_answers_are_refused),
    };
    int n_failed = 0;
    bool found = false;
    char name[64];

    make_models();
    if (argc == 4 && strcmp(argv[1], "connect") == 0) {
        subject = (struct subject){.addresses = argv[2], .transports = argv[3]};
        return cmocka_run_group_tests_name("connect", tests, open_cluster, close_cluster);
    }
    if (argc > 2)
        cmocka_set_test_filter(argv[2]); /* "held_*" */
    for (size_t i = 0; i < sizeof(subjects) / sizeof(subjects[0]); i++) {
        if (strcmp(argc > 1 ? argv[1] : "loopback", subjects[i].name) != 0)
            continue;
        subject = subjects[i];
        found = true;
        snprintf(name, sizeof(name), "%s, nodes %u, data threads %u", subject.name,
                 subject.n_nodes, subject.n_threads);
        n_failed = cmocka_run_group_tests_name(name, tests, open_cluster, close_cluster);
    }
    if (!found) {
        printf("no row named %s in this build\n", argc > 1 ? argv[1] : "loopback");
        return SKIPPED;
    }
    return n_failed == 0 ? 0 : 1;
}
