/* loop.c - one thread, one epoll, 64 operations under way: how a server with a loop of its own uses
 * the store.
 *
 * Four sessions have 16 writers each.  A writer puts a token's rows, reads them back, compares, and
 * goes on with the next token.  When a node dies, operations that need it fail; the session is then
 * given up, and another one opened as soon as that succeeds.
 *
 *     cc loop.c $(pkg-config --cflags --libs topkv) -o loop
 *     ./loop 127.0.0.1:7400,127.0.0.1:7500 20                   the nodes, and for how many seconds
 */
#define _GNU_SOURCE /* epoll */
#include <kvclient.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

enum {
    SESSIONS = 4,
    WRITERS = 16 /* of each */,
    LAYERS = 2,
    HEADS = 2,
    DIM = 64
};
enum {
    BYTES = LAYERS * HEADS * 2 * DIM * 2, /* of a token, fp16 */
    TOKENS = 1024,                        /* then a writer begins anew */
    PAUSE_US = 200000,                    /* between two tries to open a session */
    DEADLINE_MS = 2000
};
/* What an operation is for: a writer has one under way at a time. */
struct task {
    struct place *place;
    struct kv_buffer *buffer;
    uint32_t writer, token;
    bool reads;
};
struct place {
    struct kv_session *session; /* NULL: it is being opened, or waits for that */
    struct task opener, writers[WRITERS];
    unsigned n_under_way;
    bool is_lost;
    uint64_t retry_us; /* when to open it; 0: not now */
};

static struct kv_client *client;
static struct kv_model_info model = {.name = "loop example"};
static struct place places[SESSIONS];
static unsigned long n_compared, n_failed, n_opened;

static void expect(bool is_true, const char *what)
{
    if (!is_true) {
        fprintf(stderr, "loop: %s: %s\n", what, kv_client_detail(client));
        exit(EXIT_FAILURE);
    }
}

static void fill(const struct task *task, uint8_t *bytes)
{
    for (unsigned i = 0; i < BYTES; i++)
        bytes[i] = (uint8_t)(i * 31 + task->token * 7 + (unsigned)(task->place - places));
}

/* An operation is under way, or could not begin: then the session is lost. */
static void begun(struct task *task, kv_status_t status, struct kv_op *op)
{
    n_failed += status != KV_OK;
    task->place->is_lost |= status != KV_OK;
    task->place->n_under_way += status == KV_OK;
    if (status == KV_OK)
        kv_op_set_user(op, task);
}

/* When the last operation of a lost session has ended: what nodes have of it goes with its lease. */
static void give_up_if_lost(struct place *place)
{
    if (!place->is_lost || place->n_under_way > 0)
        return;
    kv_session_free(place->session);
    place->session = NULL;
    place->is_lost = false;
    place->retry_us = kv_client_now_us(client) + PAUSE_US;
}

static void open_session(struct place *place)
{
    struct kv_op *op = NULL;
    const kv_status_t status = kv_open_begin(client, &model, NULL, DEADLINE_MS, &op);
    place->retry_us = 0;
    begun(&place->opener, status, op);
    give_up_if_lost(place);
}

static void go_on(struct task *task)
{
    const struct kv_rows rows = {.n_layers = LAYERS, .token_begin = task->token, .n_tokens = 1};
    const struct kv_rows_io io = {.buffer = task->buffer};
    struct kv_session *session = task->place->session;
    struct kv_op *op = NULL;
    kv_status_t status;

    memset(kv_buffer_data(task->buffer), 0, BYTES);
    if (!task->reads)
        fill(task, kv_buffer_data(task->buffer));
    status = task->reads ? kv_read_begin(session, &rows, &io, DEADLINE_MS, &op)
                         : kv_put_begin(session, &rows, &io, DEADLINE_MS, &op);
    begun(task, status, op);
}

static void opened(struct place *place, struct kv_session *session)
{
    place->session = session;
    n_opened++;
    for (unsigned i = 0; i < WRITERS; i++) {
        place->writers[i].token = i;
        place->writers[i].reads = false;
        go_on(&place->writers[i]);
    }
}

static void ended(struct task *task, struct kv_op *op)
{
    struct place *place = task->place;
    const kv_status_t status = kv_op_status(op);
    uint8_t wanted[BYTES];

    place->n_under_way--;
    n_failed += status != KV_OK;
    place->is_lost |= status != KV_OK;
    if (status == KV_OK && task == &place->opener) {
        opened(place, kv_op_session(op));
    } else if (!place->is_lost) {
        fill(task, wanted);
        expect(memcmp(wanted, kv_buffer_data(task->buffer), BYTES) == 0,
               "rows: not what was put");
        if (task->reads && ++n_compared)
            task->token = (task->token + WRITERS) % TOKENS;
        task->reads = !task->reads;
        go_on(task);
    }
    kv_op_free(op);
    give_up_if_lost(place);
}

/* Opens what is due.  Returns when the next one is, or `until_us`. */
static uint64_t open_due(uint64_t until_us)
{
    for (unsigned i = 0; i < SESSIONS; i++) {
        if (places[i].retry_us != 0 && places[i].retry_us <= kv_client_now_us(client))
            open_session(&places[i]);
        if (places[i].retry_us != 0 && places[i].retry_us < until_us)
            until_us = places[i].retry_us;
    }
    return until_us;
}

int main(int argc, char **argv)
{
    const struct kv_client_options options = {.nodes = argc > 1 ? argv[1] : "127.0.0.1:7400"};
    const int loop = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    uint64_t end_us, due_us, now_us, timeout_us;
    char detail[512];
    struct kv_op *op;
    if (kv_client_open(&options, &client, detail, sizeof(detail)) != KV_OK) {
        fprintf(stderr, "loop: %s\n", detail);
        return EXIT_FAILURE;
    }
    memcpy(model.fingerprint.bytes, "loop-example-123", sizeof(model.fingerprint.bytes));
    expect(kv_schema_uniform(&model.schema, LAYERS, HEADS, DIM, DIM, KV_FP16) == KV_OK,
           "schema");
    expect(epoll_ctl(loop, EPOLL_CTL_ADD, kv_client_fd(client), &event) == 0, "epoll");
    for (struct place *place = places; place < places + SESSIONS; open_session(place++)) {
        place->opener.place = place;
        for (unsigned i = 0; i < WRITERS; i++) {
            place->writers[i] = (struct task){.place = place, .writer = i};
            expect(kv_buffer_alloc(client, BYTES, &place->writers[i].buffer) == KV_OK,
                   "buffer");
        }
    }
    end_us = kv_client_now_us(client) + (argc > 2 ? strtoull(argv[2], NULL, 10) : 5) * 1000000;
    while ((now_us = kv_client_now_us(client)) < end_us) {
        kv_poll(client);
        while ((op = kv_client_next_ended(client)) != NULL)
            ended(kv_op_user(op), op);
        due_us = open_due(end_us);
        if (!kv_client_arm(client, &timeout_us) || due_us <= now_us)
            continue;
        if (due_us - now_us < timeout_us)
            timeout_us = due_us - now_us;
        epoll_wait(loop, &event, 1, (int)(timeout_us / 1000) + 1);
    }
    printf(
        "loop: %lu tokens put, read and compared; %lu operations failed; %lu sessions opened\n",
        n_compared, n_failed, n_opened);
    kv_client_close(client);
    return EXIT_SUCCESS;
}
