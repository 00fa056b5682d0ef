#include "tests/sim/swaps.h"

#include "client/client.h"
#include "client/node.h"
#include "client/session.h"
#include "tests/sim/node_look.h"
#include "tests/sim/truth.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    N_SESSIONS = 3,
    TOKENS = 300,
    CUT = 150,    /* the parent is truncated there */
    FORKED = 200, /* the fork has so many of the parent's rows */
    SWAPS_MAX = 4,
    TRIES = 200,
    DEADLINE_MS = 60000,
    BUFFER_BYTES = 2 << 20,
};

enum {
    PARENT,
    FORK,
    OTHER,
};

/* The three sessions while they live. */
struct trio {
    struct swaps *swaps;
    struct kv_session *sessions[N_SESSIONS];
    struct kv_buffer *buffer;
    char fault[200];
};

static void __attribute__((format(printf, 2, 3)))
complain(struct trio *trio, const char *format, ...)
{
    va_list args;

    if (trio->fault[0] != 0)
        return;
    va_start(args, format);
    vsnprintf(trio->fault, sizeof(trio->fault), format, args);
    va_end(args);
}

static uint32_t content_of(const struct trio *trio, unsigned which, uint32_t token)
{
    const uint32_t first = trio->swaps->content;

    if (which == OTHER)
        return first + 1;
    if (which == PARENT)
        return token < CUT ? first : first + 3;
    return token < FORKED ? first : first + 2;
}

/* ---- operations, waited for -------------------------------------------------------------- */

/* Waits for what was begun; gives the session that it has made, if that is wanted. */
static kv_status_t finish(struct swaps *swaps,
                          kv_status_t begun,
                          struct kv_op *op,
                          struct kv_session **ret_session)
{
    kv_status_t status;

    if (begun != KV_OK)
        return begun;
    swaps->n_begun++;
    while (kv_op_status(op) == KV_IN_PROGRESS)
        swaps->turn(swaps->world);
    status = kv_op_status(op);
    if (status == KV_OK && ret_session != NULL)
        *ret_session = kv_op_session(op);
    kv_op_free(op);
    return status;
}

static bool
put(struct trio *trio, unsigned which, uint32_t begin, uint32_t end, uint32_t content)
{
    const kv_schema_t *schema = &trio->swaps->model->schema;
    const struct kv_rows box = {
        .n_layers = schema->n_layers, .token_begin = begin, .n_tokens = end - begin};
    const struct kv_rows_io io = {.buffer = trio->buffer};
    uint8_t *row = kv_buffer_data(trio->buffer);
    struct kv_op *op = NULL;
    kv_status_t status;

    for (uint32_t layer = 0; layer < schema->n_layers; layer++) {
        const uint32_t row_bytes = schema->layers[layer].row_bytes;

        for (uint32_t head = 0; head < schema->layers[layer].n_kv_heads; head++)
            for (uint32_t token = begin; token < end; token++, row += row_bytes)
                truth_row_fill(row, row_bytes, content, layer, head, token);
    }
    status = kv_put_begin(trio->sessions[which], &box, &io, DEADLINE_MS, &op);
    return finish(trio->swaps, status, op, NULL) == KV_OK;
}

/* false: the nodes are not in a state to make them. */
static bool make_sessions(struct trio *trio)
{
    struct swaps *swaps = trio->swaps;
    struct kv_session **sessions = trio->sessions;
    struct kv_op *op = NULL;
    kv_status_t status;

    for (unsigned which = PARENT; which <= OTHER; which += OTHER) {
        status = kv_open_begin(swaps->client, swaps->model, NULL, DEADLINE_MS, &op);
        if (finish(swaps, status, op, &sessions[which]) != KV_OK)
            return false;
    }
    if (!put(trio, PARENT, 0, TOKENS, swaps->content) ||
        !put(trio, OTHER, 0, TOKENS, swaps->content + 1))
        return false;
    status = kv_fork_begin(sessions[PARENT], FORKED, DEADLINE_MS, &op);
    if (finish(swaps, status, op, &sessions[FORK]) != KV_OK ||
        !put(trio, FORK, FORKED, TOKENS, swaps->content + 2))
        return false;
    status = kv_truncate_begin(sessions[PARENT], CUT, DEADLINE_MS, &op);
    return finish(swaps, status, op, NULL) == KV_OK &&
           put(trio, PARENT, CUT, TOKENS, swaps->content + 3);
}

static void close_sessions(struct trio *trio)
{
    for (unsigned which = 0; which < N_SESSIONS; which++) {
        struct kv_op *op = NULL;
        kv_status_t status;

        if (trio->sessions[which] == NULL)
            continue;
        status = kv_close_begin(trio->sessions[which], DEADLINE_MS, &op);
        finish(trio->swaps, status, op, NULL);
        kv_session_free(trio->sessions[which]);
    }
    while (kv_buffer_free(trio->buffer) == KV_BUSY)
        trio->swaps->turn(trio->swaps->world);
}

/* ---- looking ----------------------------------------------------------------------------- */

/* A block, and the two of the three that exchange it. */
struct swap {
    unsigned node, which[2];
    struct node_place place;
    uint32_t begin, n_rows;
};

enum way {
    READ,
    FETCH,
    QUERY,
    WAYS,
};

/* Asks for rows of the block by one of three operations. */
static kv_status_t get(struct trio *trio,
                       const struct swap *swap,
                       unsigned i,
                       uint32_t begin,
                       uint32_t n,
                       enum way way)
{
    const struct node_place *place = &swap->place;
    const struct kv_rows_io io = {.buffer = trio->buffer};
    const struct kv_rows box = {place->layer, 1, place->head, 1, begin, n};
    const struct kv_range range = {begin, begin + n};
    const float vector[KV_DIM_MAX] = {1};
    uint32_t ids[KV_BLOCK_TOKENS];
    const struct kv_fetch fetch = {.layer = place->layer,
                                   .kv_head_begin = place->head,
                                   .n_kv_heads = 1,
                                   .n_ids = &n,
                                   .ids = ids};
    const struct kv_query query = {.layer = place->layer,
                                   .kv_head_begin = place->head,
                                   .n_kv_heads = 1,
                                   .n_queries = 1,
                                   .queries = vector,
                                   .scale = 1,
                                   .merge = KV_MERGE_SUM,
                                   .answer = KV_ANSWER_ROWS,
                                   .k = n,
                                   .rerank = 1,
                                   .n_ranges = 1,
                                   .ranges = &range};
    struct kv_session *session = trio->sessions[swap->which[i]];
    struct kv_op *op = NULL;
    kv_status_t status;

    for (uint32_t j = 0; j < n; j++)
        ids[j] = begin + j;
    status = way == READ    ? kv_read_begin(session, &box, &io, DEADLINE_MS, &op)
             : way == FETCH ? kv_fetch_begin(session, &fetch, &io, DEADLINE_MS, &op)
                            : kv_query_begin(session, &query, &io, DEADLINE_MS, &op);
    return finish(trio->swaps, status, op, NULL);
}

/* Whether a node's and a client's checks say what they must of rows of the block: `is_swapped`,
 * those fail that the two sessions do not have in common. */
static void
check(struct trio *trio, const struct swap *swap, unsigned i, bool is_swapped, bool row_for_row)
{
    const struct node_place *place = &swap->place;
    const struct kv_layer_schema *layer = &trio->swaps->model->schema.layers[place->layer];
    const enum way n_ways =
        layer->dtype == KV_INT8 ? QUERY : WAYS; /* keys that none can score */
    bool is_bad[KV_BLOCK_TOKENS];
    uint32_t n_bad = 0;

    if (node_verify(trio->swaps->nodes[swap->node], place, i, is_bad) != swap->n_rows)
        complain(trio, "block %u has not %u rows", place->block, swap->n_rows);
    for (uint32_t j = 0; j < swap->n_rows; j++) {
        const uint32_t token = swap->begin + j, own = content_of(trio, swap->which[i], token);
        const bool must = is_swapped && own != content_of(trio, swap->which[1 - i], token);
        kv_status_t status, wanted = must ? KV_CORRUPT : KV_OK;

        n_bad += must;
        if (is_bad[j] != must)
            complain(trio, "token %u: the node takes it for %s", token,
                     must ? "right" : "corrupt");
        if (!row_for_row)
            continue;
        status = get(trio, swap, i, token, 1, (enum way)(j % n_ways));
        if (status != wanted)
            complain(trio, "token %u: %s, not %s: %s", token, kv_status_name(status),
                     kv_status_name(wanted), kv_client_detail(trio->swaps->client));
        if (status == KV_OK && truth_row_content(kv_buffer_data(trio->buffer), layer->row_bytes,
                                                 place->layer, place->head, token) != own)
            complain(trio, "token %u: another session's row was served", token);
    }
    for (enum way way = READ; way < n_ways; way++) {
        kv_status_t status = get(trio, swap, i, swap->begin, swap->n_rows, way);

        if (status != (n_bad > 0 ? KV_CORRUPT : KV_OK))
            complain(trio, "block %u: %u wrong rows: %s", place->block, n_bad,
                     kv_status_name(status));
    }
    trio->swaps->n_rows += n_bad;
}

/* Returns false if the session is not on the node. */
static bool find_on(const struct kv_session *session, unsigned node, uint32_t *ret_index)
{
    const uint32_t position = kvc_row_position(&session->row, &session->client->nodes[node]);

    if (position == KV_ROW_NODES)
        return false;
    *ret_index = session->nodes[position].index;
    return true;
}

/* Chooses any block; its segments change places.  false: they are on two threads or on two nodes,
 * or one. */
static bool exchange(struct trio *trio, struct swap *swap)
{
    const kv_schema_t *schema = &trio->swaps->model->schema;
    struct kv_random *random = trio->swaps->random;
    struct node_place *place = &swap->place;

    swap->node = (unsigned)kv_random_below(random, trio->swaps->n_nodes);
    swap->which[0] = (unsigned)kv_random_below(random, N_SESSIONS);
    swap->which[1] = (swap->which[0] + 1) % N_SESSIONS;
    for (unsigned i = 0; i < 2; i++)
        if (!find_on(trio->sessions[swap->which[i]], swap->node, &place->sessions[i]))
            return false;
    place->layer = (uint32_t)kv_random_below(random, schema->n_layers);
    place->head = (uint32_t)kv_random_below(random, schema->layers[place->layer].n_kv_heads);
    place->block = (uint32_t)kv_random_below(random, TOKENS / KV_BLOCK_TOKENS + 1);
    swap->begin = place->block * KV_BLOCK_TOKENS;
    swap->n_rows =
        TOKENS - swap->begin < KV_BLOCK_TOKENS ? TOKENS - swap->begin : KV_BLOCK_TOKENS;
    return node_swap(trio->swaps->nodes[swap->node], place);
}

const char *swaps_fault(struct swaps *swaps)
{
    static struct trio trio;
    bool are_made;

    trio = (struct trio){.swaps = swaps};
    if (kv_buffer_alloc(swaps->client, BUFFER_BYTES, &trio.buffer) != KV_OK)
        return NULL;
    are_made = make_sessions(&trio);
    for (unsigned i = 0; are_made && i < TRIES && swaps->n_swaps < 2 * SWAPS_MAX; i++) {
        struct swap swap;

        if (!exchange(&trio, &swap))
            continue;
        for (unsigned j = 0; j < 2; j++)
            check(&trio, &swap, j, true, swaps->n_swaps == 0);
        swaps->n_swaps += 2;
        if (!node_swap(swaps->nodes[swap.node], &swap.place))
            complain(&trio, "a session ended while its segment was in a wrong place");
        for (unsigned j = 0; j < 2; j++)
            check(&trio, &swap, j, false, false);
    }
    close_sessions(&trio);
    return trio.fault[0] != 0 ? trio.fault : NULL;
}
