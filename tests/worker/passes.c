/* passes MODEL TEXT|ids:FILE N fp32|fp16|bf16 THREADS OUT - one text through a model in
 * different ways, which must agree.
 *
 *   chunks    as kvworker prefills: the logits of every position go to OUT.npy, tokens to
 *             OUT.ids
 *   again     the same chunks, with another number of threads: the same bits
 *   pieces    cut elsewhere
 *   steps     token by token
 *
 * Prints the largest difference of each from the first, over the root mean square of the logits
 * of its position.  Exit status 1: the bits differ where they must not, or a difference is
 * above 1e-4 with fp32 rows, 1e-3 with fp16, 1e-2 with bf16.  2: wrong usage. */
#include "gpu-worker/engine/forward.h"
#include "gpu-worker/kvcache/embedded_node.h"
#include "gpu-worker/text/tokenizer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DETAIL_BYTES = 1024,
    TEXT_BYTES = 1 << 20,
    PIECE = 37, /* tokens */
};

struct way {
    const char *name;
    unsigned n_threads;
    uint32_t piece; /* 0: chunks of forward.h */
};

struct session {
    struct kvw_device *device;
    struct kvw_model *model;
    struct kvw_embedded *embedded;
    struct kv_client *client;
    struct kvw_method *attention;
    struct kvw_forward *forward;
};

static char detail[DETAIL_BYTES];

static void check(kv_status_t status, const char *what)
{
    if (status == KV_OK)
        return;
    fprintf(stderr, "passes: %s: %s: %s\n", what, kv_status_name(status), detail);
    exit(1);
}

static void open_session(struct session *session,
                         const struct kvw_gguf *gguf,
                         unsigned n_threads,
                         enum kv_dtype dtype,
                         uint32_t capacity)
{
    const struct kvw_device_config config = {.n_threads = n_threads};

    check(kvw_device_find("cpu")->open(&config, &session->device, detail, sizeof(detail)),
          "device");
    check(kvw_model_open(gguf, session->device, &session->model, detail, sizeof(detail)),
          "model");
    check(kvw_embedded_open(UINT64_C(2) << 30, &session->embedded, detail, sizeof(detail)),
          "store");

    const struct kv_client_options options = {.nodes = kvw_embedded_address(session->embedded),
                                              .peer_timeout_ms = 60000};

    check(kv_client_open(&options, &session->client, detail, sizeof(detail)), "client");

    const struct kvw_method_setup setup = {
        .session =
            {
                .model = session->model,
                .client = session->client,
                .dtype = dtype,
                .capacity = capacity,
                .chunk_tokens = KVW_FORWARD_CHUNK,
            },
    };

    check(kvw_method_full.create(&setup, &session->attention, detail, sizeof(detail)),
          "attention");
    check(kvw_forward_create(session->model, session->attention, &session->forward), "forward");
}

static void close_session(struct session *session)
{
    kvw_forward_destroy(session->forward);
    session->attention->ops->destroy(session->attention);
    kv_client_close(session->client);
    kvw_embedded_close(session->embedded);
    kvw_model_close(session->model);
    session->device->ops->close(session->device);
}

static float *pass(const struct kvw_gguf *gguf,
                   const struct way *way,
                   enum kv_dtype dtype,
                   const uint32_t *tokens,
                   uint32_t n,
                   uint32_t *ret_vocabulary)
{
    struct session session;
    float *logits;
    uint32_t n_vocabulary;

    open_session(&session, gguf, way->n_threads, dtype, n);
    n_vocabulary = session.model->params.n_vocabulary;
    logits = malloc((size_t)n * n_vocabulary * sizeof(logits[0]));
    check(logits != NULL ? KV_OK : KV_NO_MEMORY, "logits");
    for (uint32_t begin = 0, end; begin < n; begin = end) {
        end = way->piece == 0          ? kvw_forward_chunk_end(begin, n)
              : n - begin < way->piece ? n
                                       : begin + way->piece;
        check(kvw_forward_step(session.forward, way->piece == 1 ? KVW_DECODE : KVW_PREFILL,
                               tokens + begin, begin, end - begin),
              way->name);
        check(kvw_forward_logits(session.forward, 0, end - begin,
                                 logits + (size_t)begin * n_vocabulary),
              way->name);
    }
    check(kvw_method_flush(session.attention), "store");
    close_session(&session);
    *ret_vocabulary = n_vocabulary;
    return logits;
}

static double rms(const float *x, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum / (double)n);
}

/* The largest difference over the position's root mean square. */
static double compare(const float *a, const float *b, uint32_t n, uint32_t n_vocabulary)
{
    double most = 0;

    for (uint32_t t = 0; t < n; t++, a += n_vocabulary, b += n_vocabulary) {
        const double scale = rms(a, n_vocabulary);

        for (uint32_t i = 0; i < n_vocabulary; i++) {
            const double difference = fabs((double)a[i] - (double)b[i]) / scale;

            if (!(difference <= most))
                most = difference;
        }
    }
    return most;
}

static void save(const char *out, const float *logits, uint32_t n, uint32_t n_vocabulary)
{
    char path[1024], header[118];
    FILE *file;

    snprintf(path, sizeof(path), "%s.npy", out);
    file = fopen(path, "wb");
    check(file != NULL ? KV_OK : KV_IO, path);
    memset(header, ' ', sizeof(header));
    header[snprintf(header, sizeof(header),
                    "{'descr': '<f4', 'fortran_order': False, 'shape': (%u, %u), }", n,
                    n_vocabulary)] = ' ';
    header[sizeof(header) - 1] = '\n';
    fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file);
    fwrite(header, 1, sizeof(header), file);
    fwrite(logits, sizeof(logits[0]), (size_t)n * n_vocabulary, file);
    check(fclose(file) == 0 ? KV_OK : KV_IO, path);
}

static void save_ids(const char *out, const uint32_t *tokens, uint32_t n)
{
    char path[1024];
    FILE *file;

    snprintf(path, sizeof(path), "%s.ids", out);
    file = fopen(path, "w");
    check(file != NULL ? KV_OK : KV_IO, path);
    for (uint32_t i = 0; i < n; i++)
        fprintf(file, "%u\n", tokens[i]);
    check(fclose(file) == 0 ? KV_OK : KV_IO, path);
}

/* Tokens of a text, or as a file lists them. */
static uint32_t
read_tokens(const struct kvw_gguf *gguf, const char *from, uint32_t most, uint32_t **ret_tokens)
{
    const bool is_list = strncmp(from, "ids:", 4) == 0;
    struct kvw_tokenizer *tokenizer;
    char *text = malloc(TEXT_BYTES);
    FILE *file = fopen(is_list ? from + 4 : from, "rb");
    size_t n = 0;

    check(file != NULL && text != NULL ? KV_OK : KV_IO, from);
    if (is_list) {
        uint32_t *tokens = calloc(most, sizeof(tokens[0]));

        check(tokens != NULL ? KV_OK : KV_NO_MEMORY, from);
        while (n < most && fscanf(file, "%u", &tokens[n]) == 1)
            n++;
        *ret_tokens = tokens;
    } else {
        size_t bytes = fread(text, 1, TEXT_BYTES, file);

        check(kvw_tokenizer_create(gguf, &tokenizer, detail, sizeof(detail)), "tokenizer");
        check(kvw_tokenizer_encode(tokenizer, text, bytes, false, true, ret_tokens, &n),
              "tokens");
        kvw_tokenizer_destroy(tokenizer);
    }
    fclose(file);
    free(text);
    check(n > 0 ? KV_OK : KV_INVALID, "tokens");
    return n < most ? (uint32_t)n : most;
}

int main(int argc, char **argv)
{
    if (argc != 7) {
        fprintf(stderr, "usage: passes MODEL TEXT|ids:FILE N fp32|fp16|bf16 THREADS OUT\n");
        return 2;
    }

    const enum kv_dtype dtype = strcmp(argv[4], "fp32") == 0   ? KV_FP32
                                : strcmp(argv[4], "bf16") == 0 ? KV_BF16
                                                               : KV_FP16;
    const double allowed = dtype == KV_FP32 ? 1e-4 : dtype == KV_FP16 ? 1e-3 : 1e-2;
    const unsigned n_threads = (unsigned)atoi(argv[5]);
    const struct way ways[] = {
        {"chunks", n_threads, 0},
        {"again", n_threads > 1 ? n_threads - 1 : 3, 0},
        {"pieces", n_threads, PIECE},
        {"steps", n_threads, 1},
    };
    struct kvw_gguf *gguf;
    float *first = NULL;
    uint32_t *tokens, n, n_vocabulary;
    int result = 0;

    check(kvw_gguf_open(argv[1], &gguf, detail, sizeof(detail)), "file");
    n = read_tokens(gguf, argv[2], (uint32_t)atoi(argv[3]), &tokens);
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        float *logits = pass(gguf, &ways[i], dtype, tokens, n, &n_vocabulary);

        if (i == 0) {
            save(argv[6], logits, n, n_vocabulary);
            save_ids(argv[6], tokens, n);
            printf("chunks: %u tokens, rms of the last %.4f\n", n,
                   rms(logits + (size_t)(n - 1) * n_vocabulary, n_vocabulary));
            first = logits;
            continue;
        }

        const double most = compare(first, logits, n, n_vocabulary);
        const bool same =
            memcmp(first, logits, (size_t)n * n_vocabulary * sizeof(first[0])) == 0;
        const bool passed = i == 1 ? same : most <= allowed;

        printf("%s: %.3g%s: %s\n", ways[i].name, most, same ? ", the same bits" : "",
               passed ? "ok" : "TOO MUCH");
        if (!passed)
            result = 1;
        free(logits);
    }
    free(first);
    free(tokens);
    kvw_gguf_close(gguf);
    return result;
}
