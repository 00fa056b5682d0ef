/* chapters record MODEL TEXT TOKENS SKIP LAYERS OUT
 * chapters measure CHAPTERS SHARES RERANKS ITERATIONS SEED RECORDED...
 * chapters blocks SHARES RERANKS CACHES SEED RECORDED...
 *
 * How long chapters should be: recall and time on a model's own keys.  For measure_chapters.sh.
 * And what queries over rows on a disk would read.
 *
 *   record    TOKENS tokens of a text, from token SKIP on, pass through the model by full
 *             attention.  OUT keeps the rows of LAYERS layers, evenly through the model, as they
 *             are stored, and the query vectors of the last QUERIES positions.
 *   measure   puts the rows of all files, one after the other, into a node in this process, and
 *             asks with the queries of the last file for the best rows between the sinks and the
 *             first of its positions: by keys, then by the codes of chapters of each length
 *             (blocks; 0: one for all).  Several files are several contexts, each with its own
 *             positions; the queries look for rows in all of them.
 *   blocks    asks in the same way, by rotated codes of all rows, position after position, and
 *             counts the blocks of KV_BLOCK_TOKENS rows in which the candidates are, whose keys the
 *             second step reads, and those of the chosen, whose values are read.  CACHES: shares of
 *             a unit's blocks that memory holds, of those that were touched last.
 *
 * CHAPTERS, SHARES and RERANKS are lists: 8,32,0 and 0.0078125,0.05 and 1,4.  A query is of one
 * KV head with all its query heads, as the worker asks.  Prints one JSON object a line for each
 * length, share and rerank factor:
 *
 *   recall        rows that exact scores select and codes found: mean over units and queries
 *   recall_worst  the mean of the tenth of the units that has the least
 *   train_us      a thread's time for a unit's codebooks and codes, of all its rows
 *   query_us      a node's time for a query of one unit, median; exact_us: without codes
 *   keys_read     of the rows, share that the second step scores by key
 *   codebook_bytes, of a unit
 *
 * blocks prints, as shares of a unit's blocks, means over units and the later half of the positions:
 *
 *   touched       with candidates; touched_values: with chosen rows
 *   fresh         with candidates, and none at the position before
 *   missed        with candidates, and not in the memory of each of CACHES
 *   touched_any   with candidates of any unit that was recorded: what is read if a block comes and
 *                 goes with all its units */
#include "gpu-worker/engine/forward.h"
#include "gpu-worker/kvcache/embedded_node.h"
#include "gpu-worker/kvcache/session.h"
#include "gpu-worker/text/tokenizer.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DETAIL_BYTES = 1024,
    TEXT_BYTES = 4 << 20,
    BLOCKS_MAX = 1024,
    QUERIES = 64,
    SINKS = 4,
    SUBSPACES = 2,
    BITS = 6,
    LIST_MAX = 8,
    PUT_TOKENS = 1024,
    DEADLINE_MS = 600000,
    MAGIC = 0x4b56430a,
};
#define NODE_BYTES (UINT64_C(8) << 30)

/* What a file begins with; then rows (n_layers, n_kv_heads, n_rows, 2 d) of fp16, and queries
 * (n_layers, n_kv_heads, QUERIES, n_group, d) of float. */
struct shape {
    uint32_t magic, n_layers, n_kv_heads, n_group, d, n_rows;
};

static char detail[DETAIL_BYTES];

__attribute__((noreturn)) static void fail(const char *what, const char *why)
{
    fprintf(stderr, "chapters: %s: %s\n", what, why);
    exit(1);
}

static void check(kv_status_t status, const char *what)
{
    if (status == KV_OK)
        return;
    fprintf(stderr, "chapters: %s: %s: %s\n", what, kv_status_name(status), detail);
    exit(1);
}

static void *get(size_t n, size_t bytes)
{
    void *memory = calloc(n > 0 ? n : 1, bytes);

    if (memory == NULL)
        fail("out of memory", "rows");
    return memory;
}

/* Waits for an operation and frees it. */
static void
finish(struct kv_client *client, kv_status_t status, struct kv_op *op, const char *what)
{
    if (status == KV_OK)
        status = kv_wait(op);
    if (status != KV_OK) {
        fprintf(stderr, "chapters: %s: %s: %s\n", what, kv_status_name(status),
                kv_client_detail(client));
        exit(1);
    }
    kv_op_free(op);
}

static size_t unit_floats(const struct shape *shape)
{
    return (size_t)QUERIES * shape->n_group * shape->d;
}

static size_t row_bytes(const struct shape *shape)
{
    return (size_t)2 * shape->d * sizeof(uint16_t);
}

static uint32_t n_units(const struct shape *shape)
{
    return shape->n_layers * shape->n_kv_heads;
}

/* ---- record ------------------------------------------------------------------------------ */

/* Full attention, which keeps the query vectors that pass. */
struct recorder {
    struct kvw_method base;
    struct kvw_method *full;
    struct kvw_device *device;
    struct shape shape;
    uint32_t n_model_layers;
    float *chunk;   /* (KVW_FORWARD_CHUNK, n_q_heads, d) */
    float *queries; /* as in a file */
};

/* The recorded layer's number in the model. */
static uint32_t model_layer(const struct recorder *recorder, uint32_t i)
{
    const uint32_t n = recorder->shape.n_layers;

    return n == 1 ? recorder->n_model_layers / 2
                  : (uint32_t)((uint64_t)i * (recorder->n_model_layers - 1) / (n - 1));
}

static void keep_queries(struct recorder *recorder,
                         uint32_t layer,
                         uint32_t token_begin,
                         uint32_t n,
                         const struct kvw_device_buffer *q)
{
    const struct shape *shape = &recorder->shape;
    const size_t token_floats = (size_t)shape->n_kv_heads * shape->n_group * shape->d;
    const uint32_t first = shape->n_rows - QUERIES;

    kvw_device_read(recorder->device, KVW_STREAM_COMPUTE, q, 0, recorder->chunk,
                    n * token_floats * sizeof(float));
    (void)recorder->device->ops->sync(recorder->device);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t head = 0; token_begin + i >= first && head < shape->n_kv_heads; head++)
            memcpy(recorder->queries +
                       ((size_t)layer * shape->n_kv_heads + head) * unit_floats(shape) +
                       (size_t)(token_begin + i - first) * shape->n_group * shape->d,
                   recorder->chunk + i * token_floats +
                       (size_t)head * shape->n_group * shape->d,
                   (size_t)shape->n_group * shape->d * sizeof(float));
}

static kv_status_t recorder_attend(struct kvw_method *attention,
                                   enum kvw_phase phase,
                                   uint32_t layer,
                                   uint32_t token_begin,
                                   uint32_t n,
                                   const struct kvw_device_buffer *q,
                                   const struct kvw_device_buffer *k,
                                   const struct kvw_device_buffer *v,
                                   struct kvw_device_buffer *out)
{
    struct recorder *recorder = (struct recorder *)attention;

    if (token_begin + n > recorder->shape.n_rows - QUERIES)
        for (uint32_t i = 0; i < recorder->shape.n_layers; i++)
            if (model_layer(recorder, i) == layer)
                keep_queries(recorder, i, token_begin, n, q);
    return recorder->full->ops->attend(recorder->full, phase, layer, token_begin, n, q, k, v,
                                       out);
}

static const struct kvw_method_ops recorder_ops = {.name = "recorder",
                                                   .attend = recorder_attend};

static uint32_t *read_tokens(const struct kvw_gguf *gguf, const char *path, size_t needed)
{
    struct kvw_tokenizer *tokenizer;
    FILE *file = fopen(path, "rb");
    char *text = get(TEXT_BYTES, 1);
    uint32_t *tokens;
    size_t n;

    if (file == NULL)
        fail(path, strerror(errno));
    check(kvw_tokenizer_create(gguf, &tokenizer, detail, sizeof(detail)), "tokenizer");
    check(kvw_tokenizer_encode(tokenizer, text, fread(text, 1, TEXT_BYTES, file), false, true,
                               &tokens, &n),
          path);
    if (n < needed) {
        fprintf(stderr, "chapters: %s: %zu tokens, %zu needed\n", path, n, needed);
        exit(2);
    }
    kvw_tokenizer_destroy(tokenizer);
    fclose(file);
    free(text);
    return tokens;
}

static void
pass(struct recorder *recorder, const struct kvw_model *model, const uint32_t *tokens)
{
    const uint32_t n = recorder->shape.n_rows;
    struct kvw_forward *forward;

    check(kvw_forward_create(model, &recorder->base, &forward), "forward");
    for (uint32_t begin = 0, end; begin < n; begin = end) {
        end = kvw_forward_chunk_end(begin, n);
        check(kvw_forward_step(forward, KVW_PREFILL, tokens + begin, begin, end - begin),
              "forward");
    }
    check(kvw_method_flush(recorder->full), "store");
    kvw_forward_destroy(forward);
}

static void write_all(FILE *file, const void *data, size_t bytes, const char *path)
{
    if (fwrite(data, 1, bytes, file) != bytes)
        fail(path, "cannot be written");
}

/* The rows are read back from the store, where full attention has put them. */
static void save(const struct recorder *recorder, struct kv_client *client, const char *path)
{
    const struct shape *shape = &recorder->shape;
    struct kv_rows box = {.n_layers = 1, .n_tokens = shape->n_rows};
    FILE *file = fopen(path, "wb");
    struct kv_rows_io io = {0};

    if (file == NULL)
        fail(path, strerror(errno));
    check(kv_buffer_alloc(client, shape->n_kv_heads * shape->n_rows * row_bytes(shape),
                          &io.buffer),
          "buffer");
    write_all(file, shape, sizeof(*shape), path);
    for (uint32_t i = 0; i < shape->n_layers; i++) {
        struct kv_op *op = NULL;

        box.layer_begin = model_layer(recorder, i);
        const kv_status_t status = kv_read_begin(kvw_session_handle(recorder->base.session),
                                                 &box, &io, DEADLINE_MS, &op);
        finish(client, status, op, "read");
        write_all(file, kv_buffer_data(io.buffer), kv_buffer_bytes(io.buffer), path);
    }
    write_all(file, recorder->queries, n_units(shape) * unit_floats(shape) * sizeof(float),
              path);
    if (fclose(file) != 0)
        fail(path, strerror(errno));
    kv_buffer_free(io.buffer);
}

static int record(char **arguments)
{
    const uint32_t n = (uint32_t)strtoul(arguments[2], NULL, 10),
                   skip = (uint32_t)strtoul(arguments[3], NULL, 10),
                   n_layers = (uint32_t)strtoul(arguments[4], NULL, 10);
    const struct kvw_device_config config = {.n_threads = 2};
    struct kvw_method_setup setup = {.options = kvw_method_defaults};
    struct recorder recorder = {.base.ops = &recorder_ops};
    struct kvw_embedded *embedded;
    struct kvw_model *model;
    struct kvw_gguf *gguf;
    uint32_t *tokens;

    check(kvw_gguf_open(arguments[0], &gguf, detail, sizeof(detail)), arguments[0]);
    check(kvw_device_find("cpu")->open(&config, &recorder.device, detail, sizeof(detail)),
          "device");
    check(kvw_model_open(gguf, recorder.device, &model, detail, sizeof(detail)), "model");
    const struct kvw_model_params *params = &model->params;
    if (n < 2 * QUERIES || n > params->context || n_layers == 0 || n_layers > params->n_layers)
        fail("TOKENS or LAYERS", "more than the model has, or too few");
    tokens = read_tokens(gguf, arguments[1], (size_t)skip + n);
    recorder.n_model_layers = params->n_layers;
    recorder.shape = (struct shape){.magic = MAGIC,
                                    .n_layers = n_layers,
                                    .n_kv_heads = params->n_kv_heads,
                                    .n_group = params->n_q_heads / params->n_kv_heads,
                                    .d = params->d,
                                    .n_rows = n};
    recorder.chunk =
        get((size_t)KVW_FORWARD_CHUNK * params->n_q_heads * params->d, sizeof(float));
    recorder.queries =
        get(n_units(&recorder.shape) * unit_floats(&recorder.shape), sizeof(float));

    check(kvw_embedded_open(NODE_BYTES, &embedded, detail, sizeof(detail)), "store");
    const struct kv_client_options options = {.nodes = kvw_embedded_address(embedded),
                                              .peer_timeout_ms = 60000};
    setup.session = (struct kvw_session_setup){
        .model = model, .dtype = KV_FP16, .capacity = n, .chunk_tokens = KVW_FORWARD_CHUNK};
    check(kv_client_open(&options, &setup.session.client, detail, sizeof(detail)), "client");
    check(kvw_method_full.create(&setup, &recorder.full, detail, sizeof(detail)), "attention");
    recorder.base.session = recorder.full->session;

    pass(&recorder, model, tokens + skip);
    save(&recorder, setup.session.client, arguments[5]);
    recorder.full->ops->destroy(recorder.full);
    kv_client_close(setup.session.client);
    kvw_embedded_close(embedded);
    kvw_model_close(model);
    recorder.device->ops->close(recorder.device);
    kvw_gguf_close(gguf);
    free(recorder.chunk);
    free(recorder.queries);
    free(tokens);
    return 0;
}

/* ---- measure ----------------------------------------------------------------------------- */

struct recorded {
    struct shape shape; /* n_rows: of all files */
    char *rows;         /* (n_layers, n_kv_heads, n_rows, 2 d) of fp16 */
    float *queries;
};

struct plan {
    double chapters[LIST_MAX], shares[LIST_MAX], reranks[LIST_MAX], caches[LIST_MAX];
    unsigned n_chapters, n_shares, n_reranks, n_caches;
    uint32_t iterations;
    uint64_t seed;
};

struct measure {
    const struct plan *plan;
    const struct recorded *recorded;
    struct kv_client *client;
    struct kv_session *session;
    uint32_t *exact; /* (n_shares, n_units, QUERIES, k_max) */
    uint32_t k_max;
    double exact_us[LIST_MAX];
};

static unsigned read_list(const char *text, double *ret_values)
{
    unsigned n = 0;
    char *end;

    for (; n < LIST_MAX; text = end + 1) {
        ret_values[n++] = strtod(text, &end);
        if (end == text || ret_values[n - 1] < 0 || (*end != ',' && *end != '\0'))
            fail(text, "not a list of numbers");
        if (*end == '\0')
            return n;
    }
    fail(text, "too many numbers");
}

static void read_all(FILE *file, void *data, size_t bytes, const char *path)
{
    if (fread(data, 1, bytes, file) != bytes)
        fail(path, "too short");
}

static void read_recorded(char **paths, unsigned n_paths, struct recorded *ret_recorded)
{
    struct shape *all = &ret_recorded->shape;
    struct shape *shapes = get(n_paths, sizeof(shapes[0]));
    uint32_t before = 0;

    for (unsigned i = 0; i < n_paths; i++) {
        FILE *file = fopen(paths[i], "rb");

        if (file == NULL)
            fail(paths[i], strerror(errno));
        read_all(file, &shapes[i], sizeof(shapes[i]), paths[i]);
        fclose(file);
        if (shapes[i].magic != MAGIC || shapes[i].n_layers != shapes[0].n_layers ||
            shapes[i].n_kv_heads != shapes[0].n_kv_heads || shapes[i].d != shapes[0].d ||
            shapes[i].n_group != shapes[0].n_group)
            fail(paths[i], "not a file of the same model and layers");
        *all = shapes[i];
        before += shapes[i].n_rows;
    }
    all->n_rows = before;
    ret_recorded->rows = get((size_t)n_units(all) * all->n_rows, row_bytes(all));
    ret_recorded->queries = get(n_units(all) * unit_floats(all), sizeof(float));
    before = 0;
    for (unsigned i = 0; i < n_paths; i++) {
        const size_t bytes = shapes[i].n_rows * row_bytes(all);
        FILE *file = fopen(paths[i], "rb");

        if (file == NULL)
            fail(paths[i], strerror(errno));
        read_all(file, &shapes[i], sizeof(shapes[i]), paths[i]);
        for (uint32_t unit = 0; unit < n_units(all); unit++)
            read_all(file,
                     ret_recorded->rows +
                         ((size_t)unit * all->n_rows + before) * row_bytes(all),
                     bytes, paths[i]);
        read_all(file, ret_recorded->queries, n_units(all) * unit_floats(all) * sizeof(float),
                 paths[i]);
        before += shapes[i].n_rows;
        fclose(file);
    }
    free(shapes);
}

/* A session with all rows. */
static void open_session(struct measure *measure)
{
    const struct shape *shape = &measure->recorded->shape;
    struct kv_model_info model = {.name = "chapters", .fingerprint.bytes = "chapters"};
    struct kv_rows_io io = {0};
    struct kv_op *op = NULL;

    kv_schema_uniform(&model.schema, shape->n_layers, shape->n_kv_heads, shape->d, shape->d,
                      KV_FP16);
    check(kv_open_begin(measure->client, &model, NULL, DEADLINE_MS, &op), "open");
    check(kv_wait(op), "open");
    measure->session = kv_op_session(op);
    kv_op_free(op);
    check(kv_buffer_alloc(measure->client, PUT_TOKENS * row_bytes(shape), &io.buffer),
          "buffer");
    for (uint32_t unit = 0; unit < n_units(shape); unit++) {
        for (uint32_t begin = 0, n; begin < shape->n_rows; begin += n) {
            n = shape->n_rows - begin < PUT_TOKENS ? shape->n_rows - begin : PUT_TOKENS;
            const struct kv_rows box = {.layer_begin = unit / shape->n_kv_heads,
                                        .n_layers = 1,
                                        .kv_head_begin = unit % shape->n_kv_heads,
                                        .n_kv_heads = 1,
                                        .token_begin = begin,
                                        .n_tokens = n};

            memcpy(kv_buffer_data(io.buffer),
                   measure->recorded->rows +
                       ((size_t)unit * shape->n_rows + begin) * row_bytes(shape),
                   n * row_bytes(shape));
            op = NULL;
            const kv_status_t status =
                kv_put_begin(measure->session, &box, &io, DEADLINE_MS, &op);
            finish(measure->client, status, op, "put");
        }
    }
    kv_buffer_free(io.buffer);
}

static void close_session(struct measure *measure)
{
    struct kv_op *op = NULL;

    const kv_status_t status = kv_close_begin(measure->session, DEADLINE_MS, &op);

    finish(measure->client, status, op, "close");
    kv_session_free(measure->session);
}

/* The rows that one query selects; returns the node's time.  `factor`: rerank, at most what a query
 * takes. */
static uint32_t ask(const struct measure *measure,
                    uint32_t unit,
                    uint32_t position,
                    uint32_t k,
                    uint32_t factor,
                    uint32_t *ret_ids)
{
    const struct shape *shape = &measure->recorded->shape;
    const struct kv_range range = {SINKS, shape->n_rows - QUERIES};
    const struct kv_query query = {
        .layer = unit / shape->n_kv_heads,
        .kv_head_begin = unit % shape->n_kv_heads,
        .n_kv_heads = 1,
        .n_queries = shape->n_group,
        .queries = measure->recorded->queries + unit * unit_floats(shape) +
                   (size_t)position * shape->n_group * shape->d,
        .scale = 1 / sqrtf((float)shape->d),
        .merge = KV_MERGE_SUM,
        .answer = KV_ANSWER_IDS,
        .k = k,
        .rerank = factor * (uint64_t)k <= KV_SELECTED_MAX ? factor : KV_SELECTED_MAX / k,
        .n_ranges = 1,
        .ranges = &range,
    };
    struct kv_query_result found;
    struct kv_op *op = NULL;
    kv_status_t status = kv_query_begin(measure->session, &query, NULL, DEADLINE_MS, &op);

    if (status == KV_OK)
        status = kv_wait(op);
    if (status == KV_OK)
        status = kv_op_query_result(op, 0, &found);
    if (status != KV_OK || found.n_ids != k)
        fail("query", kv_client_detail(measure->client));
    memcpy(ret_ids, found.ids, k * sizeof(*ret_ids));
    kv_op_free(op);
    return found.service_us;
}

static uint32_t k_of(const struct measure *measure, unsigned share)
{
    const uint32_t n = measure->recorded->shape.n_rows - QUERIES - SINKS;
    const uint32_t k = (uint32_t)lround(measure->plan->shares[share] * n);

    return k < 1 ? 1 : k;
}

static uint32_t *exact_of(const struct measure *measure, unsigned share, uint32_t unit)
{
    return measure->exact + ((size_t)share * n_units(&measure->recorded->shape) + unit) *
                                QUERIES * measure->k_max;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, size_t n)
{
    qsort(values, n, sizeof(values[0]), compare);
    return values[n / 2];
}

/* Before there are codes. */
static void ask_exactly(struct measure *measure)
{
    const uint32_t units = n_units(&measure->recorded->shape);
    double *times = get((size_t)units * QUERIES, sizeof(times[0]));

    for (unsigned share = 0; share < measure->plan->n_shares; share++) {
        for (uint32_t unit = 0; unit < units; unit++)
            for (uint32_t i = 0; i < QUERIES; i++)
                times[unit * QUERIES + i] =
                    ask(measure, unit, i, k_of(measure, share), 1,
                        exact_of(measure, share, unit) + (size_t)i * measure->k_max);
        measure->exact_us[share] = median(times, (size_t)units * QUERIES);
    }
    free(times);
}

/* Both ascend. */
static double share_of(const uint32_t *exact, const uint32_t *found, uint32_t k)
{
    uint32_t n = 0;

    for (uint32_t i = 0, j = 0; i < k; i++) {
        while (j < k && found[j] < exact[i])
            j++;
        n += j < k && found[j] == exact[i];
    }
    return (double)n / k;
}

static void measure_queries(struct measure *measure,
                            unsigned chapter,
                            unsigned share,
                            uint32_t factor,
                            const struct kv_index_result *indexed)
{
    const struct plan *plan = measure->plan;
    const struct shape *shape = &measure->recorded->shape;
    const uint32_t units = n_units(shape), k = k_of(measure, share);
    const uint64_t blocks = (uint64_t)plan->chapters[chapter];
    double *times = get((size_t)units * QUERIES, sizeof(times[0]));
    double *recalls = get(units, sizeof(recalls[0]));
    uint32_t *found = get(k, sizeof(found[0]));
    const uint32_t n_worst = (units + 9) / 10;
    const double n_books = (double)(indexed->n_found + indexed->n_trained) / units;
    double mean = 0, worst = 0;

    for (uint32_t unit = 0; unit < units; unit++) {
        for (uint32_t i = 0; i < QUERIES; i++) {
            times[unit * QUERIES + i] = ask(measure, unit, i, k, factor, found);
            recalls[unit] +=
                share_of(exact_of(measure, share, unit) + (size_t)i * measure->k_max, found,
                         k) /
                QUERIES;
        }
        mean += recalls[unit] / units;
    }
    qsort(recalls, units, sizeof(recalls[0]), compare);
    for (uint32_t i = 0; i < n_worst; i++)
        worst += recalls[i] / n_worst;
    printf("{\"name\": \"chapters\", \"chapter_blocks\": %llu, \"rows\": %u, \"k\": %u, "
           "\"share\": %g, \"rerank\": %u, \"seed\": %llu, \"units\": %u, "
           "\"queries\": %u, \"coded_share\": %.4f, \"recall\": %.5f, \"recall_worst\": %.5f, "
           "\"iterations\": %.2f, \"train_us\": %.1f, \"query_us\": %.1f, \"exact_us\": %.1f, "
           "\"keys_read\": %.5f, \"codebooks\": %.2f, \"codebook_bytes\": %.0f}\n",
           (unsigned long long)blocks, shape->n_rows, k, plan->shares[share], factor,
           (unsigned long long)plan->seed, units, QUERIES,
           (double)indexed->rows_coded / (double)indexed->rows, mean, worst,
           (double)indexed->iterations / indexed->n_trained,
           (double)indexed->train_us / indexed->n_trained * n_books,
           median(times, (size_t)units * QUERIES), measure->exact_us[share],
           factor == 1 ? 0 : fmin(1, (double)factor * k / (shape->n_rows - QUERIES - SINKS)),
           n_books, n_books * (1 << BITS) * shape->d * sizeof(float));
    fflush(stdout);
    free(times);
    free(recalls);
    free(found);
}

/* Layer by layer: a request that takes long is sent again, and then a node tells less of what it
 * trained for the first one. */
static struct kv_index_result make_index(const struct measure *measure,
                                         struct kv_index_options options)
{
    struct kv_index_result indexed = {0};

    for (; options.layer_begin < measure->recorded->shape.n_layers; options.layer_begin++) {
        struct kv_index_result layer;
        struct kv_op *op = NULL;
        kv_status_t status = kv_index_begin(measure->session, &options, DEADLINE_MS, &op);

        if (status == KV_OK)
            status = kv_wait(op);
        if (status != KV_OK)
            fail("index", kv_client_detail(measure->client));
        kv_op_index_result(op, &layer);
        indexed.rows += layer.rows;
        indexed.rows_coded += layer.rows_coded;
        indexed.n_found += layer.n_found;
        indexed.n_trained += layer.n_trained;
        indexed.iterations += layer.iterations;
        indexed.train_us += layer.train_us;
        kv_op_free(op);
    }
    return indexed;
}

static void measure_chapter(struct measure *measure, unsigned chapter)
{
    const struct plan *plan = measure->plan;
    const uint32_t n_rows = measure->recorded->shape.n_rows;
    const struct kv_index_options options = {
        .n_layers = 1,
        .tokens = n_rows / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS,
        .chapter_blocks = (uint32_t)plan->chapters[chapter],
        .m = SUBSPACES,
        .bits = BITS,
        .iterations = plan->iterations,
        .seed = plan->seed,
        .wait = true,
    };
    struct kv_index_result indexed;

    open_session(measure);
    if (chapter == 0)
        ask_exactly(measure);
    indexed = make_index(measure, options);
    for (unsigned share = 0; share < plan->n_shares; share++)
        for (unsigned i = 0; i < plan->n_reranks; i++)
            measure_queries(measure, chapter, share, (uint32_t)plan->reranks[i], &indexed);
    close_session(measure);
}

/* ---- blocks ------------------------------------------------------------------------------ */

/* What the queries of a unit have touched so far. */
struct touched {
    uint16_t order[BLOCKS_MAX]; /* (n_order) the last one first */
    uint32_t n_order;
    int last[BLOCKS_MAX]; /* at which position; -2: never */
};

struct counts {
    double touched, values, fresh, any, missed[LIST_MAX];
};

/* The block is used again.  Returns how many others were since it last was. */
static uint32_t touch(struct touched *touched, uint16_t block)
{
    uint32_t at = 0;

    while (at < touched->n_order && touched->order[at] != block)
        at++;
    const uint32_t distance = at < touched->n_order ? at : UINT32_MAX;
    if (at == touched->n_order)
        touched->n_order++;
    memmove(&touched->order[1], touched->order, at * sizeof(touched->order[0]));
    touched->order[0] = block;
    return distance;
}

/* The candidates of one query. */
static void count_candidates(struct touched *touched,
                             const uint32_t *ids,
                             uint32_t n,
                             int position,
                             uint32_t n_blocks,
                             const struct plan *plan,
                             bool *any,
                             struct counts *counts)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint16_t block = (uint16_t)(ids[i] / KV_BLOCK_TOKENS);

        if (touched->last[block] == position)
            continue;
        const uint32_t distance = touch(touched, block);

        counts->touched++;
        counts->fresh += touched->last[block] != position - 1;
        for (unsigned c = 0; c < plan->n_caches; c++)
            counts->missed[c] += distance >= plan->caches[c] * n_blocks;
        touched->last[block] = position;
        any[block] = true;
    }
}

static uint32_t count_blocks(const uint32_t *ids, uint32_t n)
{
    uint32_t n_blocks = 0;

    for (uint32_t i = 0; i < n; i++)
        n_blocks += i == 0 || ids[i] / KV_BLOCK_TOKENS != ids[i - 1] / KV_BLOCK_TOKENS;
    return n_blocks;
}

static void measure_blocks(const struct measure *measure, unsigned share, uint32_t factor)
{
    const struct plan *plan = measure->plan;
    const struct shape *shape = &measure->recorded->shape;
    const uint32_t units = n_units(shape), k = k_of(measure, share);
    const uint32_t n_blocks = (shape->n_rows + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    const uint64_t eligible = shape->n_rows - QUERIES - SINKS, wanted = factor * (uint64_t)k,
                   most = eligible < KV_SELECTED_MAX ? eligible : KV_SELECTED_MAX;
    const uint32_t n_candidates = (uint32_t)(wanted < most ? wanted : most);
    struct touched *touched = get(units, sizeof(*touched));
    uint32_t *ids = get(n_candidates, sizeof(ids[0]));
    struct counts sums = {0};

    for (uint32_t unit = 0; unit < units; unit++)
        for (uint32_t block = 0; block < n_blocks; block++)
            touched[unit].last[block] = -2;
    for (uint32_t i = 0; i < QUERIES; i++) {
        struct counts counts = {0};
        bool any[BLOCKS_MAX] = {false};

        for (uint32_t unit = 0; unit < units; unit++) {
            (void)ask(measure, unit, i, n_candidates, 1, ids);
            count_candidates(&touched[unit], ids, n_candidates, (int)i, n_blocks, plan, any,
                             &counts);
            (void)ask(measure, unit, i, k, factor, ids);
            counts.values += count_blocks(ids, k);
        }
        if (i < QUERIES / 2)
            continue; /* what a session in use has touched before */
        for (uint32_t block = 0; block < n_blocks; block++)
            sums.any += any[block];
        sums.touched += counts.touched / units;
        sums.values += counts.values / units;
        sums.fresh += counts.fresh / units;
        for (unsigned c = 0; c < plan->n_caches; c++)
            sums.missed[c] += counts.missed[c] / units;
    }
    const double n = (double)n_blocks * (QUERIES - QUERIES / 2);
    printf("{\"name\": \"blocks\", \"rows\": %u, \"blocks\": %u, \"k\": %u, \"share\": %g, "
           "\"rerank\": %u, \"candidates\": %u, \"units\": %u, \"touched\": %.4f, "
           "\"touched_values\": %.4f, \"fresh\": %.4f, \"touched_any\": %.4f, \"missed\": {",
           shape->n_rows, n_blocks, k, plan->shares[share], factor, n_candidates, units,
           sums.touched / n, sums.values / n, sums.fresh / n, sums.any / n);
    for (unsigned c = 0; c < plan->n_caches; c++)
        printf("%s\"%g\": %.4f", c > 0 ? ", " : "", plan->caches[c], sums.missed[c] / n);
    printf("}}\n");
    fflush(stdout);
    free(touched);
    free(ids);
}

static void measure_all_blocks(struct measure *measure)
{
    const struct plan *plan = measure->plan;
    const uint32_t n_rows = measure->recorded->shape.n_rows;
    const struct kv_index_options options = {
        .n_layers = 1,
        .tokens = n_rows / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS,
        .m = 2 * SUBSPACES,
        .bits = BITS,
        .rotates = true,
        .iterations = plan->iterations,
        .seed = plan->seed,
        .wait = true,
    };

    if (n_rows > BLOCKS_MAX * KV_BLOCK_TOKENS)
        fail("RECORDED", "too many rows");
    open_session(measure);
    (void)make_index(measure, options);
    for (unsigned share = 0; share < plan->n_shares; share++)
        for (unsigned i = 0; i < plan->n_reranks; i++)
            measure_blocks(measure, share, (uint32_t)plan->reranks[i]);
    close_session(measure);
}

/* ---- the program ------------------------------------------------------------------------- */

/* Where the rows are put, with a client. */
static struct kvw_embedded *open_store(struct measure *measure)
{
    struct kvw_embedded *embedded;

    check(kvw_embedded_open(NODE_BYTES, &embedded, detail, sizeof(detail)), "store");
    const struct kv_client_options options = {.nodes = kvw_embedded_address(embedded),
                                              .peer_timeout_ms = 60000};
    check(kv_client_open(&options, &measure->client, detail, sizeof(detail)), "client");
    return embedded;
}

static int blocks(char **arguments, unsigned n_paths)
{
    struct plan plan = {.iterations = 20, .seed = strtoull(arguments[3], NULL, 10)};
    struct recorded recorded = {0};
    struct measure measure = {.plan = &plan, .recorded = &recorded};
    struct kvw_embedded *embedded;

    plan.n_shares = read_list(arguments[0], plan.shares);
    plan.n_reranks = read_list(arguments[1], plan.reranks);
    plan.n_caches = read_list(arguments[2], plan.caches);
    read_recorded(arguments + 4, n_paths, &recorded);
    embedded = open_store(&measure);
    measure_all_blocks(&measure);
    kv_client_close(measure.client);
    kvw_embedded_close(embedded);
    free(recorded.rows);
    free(recorded.queries);
    return 0;
}

static int measure_all(char **arguments, unsigned n_paths)
{
    struct plan plan = {.iterations = (uint32_t)strtoul(arguments[3], NULL, 10),
                        .seed = strtoull(arguments[4], NULL, 10)};
    struct recorded recorded = {0};
    struct measure measure = {.plan = &plan, .recorded = &recorded};
    struct kvw_embedded *embedded;

    plan.n_chapters = read_list(arguments[0], plan.chapters);
    plan.n_shares = read_list(arguments[1], plan.shares);
    plan.n_reranks = read_list(arguments[2], plan.reranks);
    read_recorded(arguments + 5, n_paths, &recorded);
    for (unsigned i = 0; i < plan.n_shares; i++)
        measure.k_max = k_of(&measure, i) > measure.k_max ? k_of(&measure, i) : measure.k_max;
    measure.exact =
        get((size_t)plan.n_shares * n_units(&recorded.shape) * QUERIES * measure.k_max,
            sizeof(measure.exact[0]));
    embedded = open_store(&measure);
    for (unsigned i = 0; i < plan.n_chapters; i++)
        measure_chapter(&measure, i);
    kv_client_close(measure.client);
    kvw_embedded_close(embedded);
    free(measure.exact);
    free(recorded.rows);
    free(recorded.queries);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 8 && strcmp(argv[1], "record") == 0)
        return record(argv + 2);
    if (argc >= 8 && strcmp(argv[1], "measure") == 0)
        return measure_all(argv + 2, (unsigned)argc - 7);
    if (argc >= 7 && strcmp(argv[1], "blocks") == 0)
        return blocks(argv + 2, (unsigned)argc - 6);
    fprintf(stderr, "usage: chapters record MODEL TEXT TOKENS SKIP LAYERS OUT\n"
                    "       chapters measure CHAPTERS SHARES RERANKS ITERATIONS SEED "
                    "RECORDED...\n"
                    "       chapters blocks SHARES RERANKS CACHES SEED RECORDED...\n");
    return 2;
}
