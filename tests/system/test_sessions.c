/* Sessions that several kvworker processes use, over real nodes and with a small made model: one
 * stores the rows of a prompt and another answers it, conversations go on after a worker or a node
 * has died.  Whoever does what, and whatever dies, the tokens are those of one undisturbed
 * process. */
#define _GNU_SOURCE /* memmem */
#include "tests/support/worker_files.h"
#include "tests/system/system.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    N_NODES = 2,
    PROMPT_BYTES = 3600,
    TRIES = 20,
    TIMEOUT_MS = 5 * PROCESS_PATIENCE_MS,
    IDS_BYTES = 4096,
    ROW_BYTES = 2 * 64 * 2, /* of the made model, as fp16 */
};

static const char *kvworker;
static char model[PROCESS_PATH_BYTES], prompt[PROCESS_PATH_BYTES];
static struct process_node nodes[N_NODES];
static const char *const node_options[] = {"--transport", "tcp", "--memory", "256M", NULL};
static char one[96], both[192];
static struct process_result result;
static char whole_answer[IDS_BYTES]; /* what one process answers to the prompt: the ids */

/* ---- runs to the end --------------------------------------------------------------------- */

enum {
    ARGS_MAX = 40
};

/* The command line: kvworker COMMAND, what all commands take, and more, which ends with NULL. */
static void command_line(const char *argv[ARGS_MAX],
                         const char *command,
                         const char *store,
                         const char *const *more)
{
    const char *const common[] = {kvworker, command,  "--model",   model, "--store",
                                  store,    "--json", "--threads", "2"};
    size_t n = sizeof(common) / sizeof(common[0]);

    memcpy(argv, common, sizeof(common));
    for (size_t i = 0; more[i] != NULL; i++) {
        assert_true(n + 1 < ARGS_MAX);
        argv[n++] = more[i];
    }
    argv[n] = NULL;
}

static void run(const char *command, const char *store, int status, const char *const *more)
{
    const char *argv[ARGS_MAX];
    const struct process_spec spec = {.argv = argv};

    command_line(argv, command, store, more);
    assert_true(process_run(&spec, TIMEOUT_MS, &result));
    if (result.status != status)
        fail_msg("%s: status %d: %s", command, result.status, result.errors);
}

#define RUN(command, store, ...) \
    run(command, store, 0, (const char *const[]){__VA_ARGS__, NULL})
#define RUN_FAILS(command, store, ...) \
    run(command, store, 2, (const char *const[]){__VA_ARGS__, NULL})
#define PROMPT "--fresh", "--raw", "--prompt-file", prompt
#define ANSWER "--max-tokens", "24"

static void expect_said(const char *text)
{
    if (strstr(result.errors, text) == NULL)
        fail_msg("`%s` is not in `%s`", text, result.errors);
}

/* Copies the ids of a line of JSON. */
static void ids_of(const char *line, char ret_ids[IDS_BYTES])
{
    const char *at = strstr(line, "\"token_ids\"");
    size_t bytes;

    assert_non_null(at);
    bytes = strcspn(at, "]");
    assert_true(bytes < IDS_BYTES && bytes > strlen("\"token_ids\": [1, 2"));
    memcpy(ret_ids, at, bytes);
    ret_ids[bytes] = '\0';
}

static double number_of(const char *line, const char *name)
{
    const char *at = strstr(line, name);

    assert_non_null(at);
    at = strchr(at, ':');
    assert_non_null(at);
    return strtod(at + 1, NULL);
}

static void expect_ids(const char *line, const char *ids)
{
    char found[IDS_BYTES];

    ids_of(line, found);
    assert_string_equal(found, ids);
}

static int set_up(void **state)
{
    static char text[PROMPT_BYTES];

    (void)state;
    worker_file_write_chat_model(model, "model.gguf");
    worker_text(text, sizeof(text));
    worker_file_write(prompt, "prompt", text, sizeof(text));
    for (unsigned i = 0; i < N_NODES; i++)
        system_node_start(&nodes[i], node_options);
    snprintf(one, sizeof(one), "%s", nodes[0].control);
    snprintf(both, sizeof(both), "%s,%s", nodes[0].control, nodes[1].control);
    RUN("generate", "embedded", PROMPT, ANSWER);
    ids_of(result.output, whole_answer);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (unsigned i = 0; i < N_NODES; i++)
        if (nodes[i].process.pid != 0)
            system_node_stop(&nodes[i]);
    return 0;
}

/* ---- prefill and decode ------------------------------------------------------------------ */

static void decode_after_prefill(void **state)
{
    const char *const stores[] = {one, both};

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        RUN("prefill", stores[i], "--session", "after", PROMPT);
        const double stored = number_of(result.output, "\"stored_tokens\"");

        assert_true(stored > 1000);
        assert_true(number_of(result.output, "\"prompt_tokens\"") == stored + 1);
        RUN("decode", stores[i], "--session", "after", ANSWER);
        expect_ids(result.output, whole_answer);
        assert_true(number_of(result.output, "\"reused_tokens\"") == stored);
        assert_true(strstr(result.errors, "again") == NULL);
    }
    /* What was published is there for whoever begins anew. */
    RUN("prefill", both, "--session", "another", "--raw", "--prompt-file", prompt);
    assert_true(number_of(result.output, "\"reused_tokens\"") > 1000);
    RUN("decode", both, "--session", "another", ANSWER);
    expect_ids(result.output, whole_answer);
    /* A second prompt of the same name takes its place. */
    RUN("prefill", both, "--session", "after", "--raw", "--prompt", "the ant");
    expect_said("session after: replaced: it had");
    RUN("decode", both, "--session", "after", ANSWER);
    assert_true(number_of(result.output, "\"prompt_tokens\"") < 10);
}

/* The method may be another one: it selects what it would have selected of its own rows. */
static void decode_by_another_method(void **state)
{
    char ids[IDS_BYTES];

    (void)state;
#define METHOD                                                                         \
    "--attention", "pqcache", "--chapter", "8", "--kmeans-iters", "4", "--wait-index", \
        "--ratio", "1/8", ANSWER
    RUN("generate", "embedded", PROMPT, METHOD);
    ids_of(result.output, ids);
    RUN("prefill", both, "--session", "method", PROMPT);
    RUN("decode", both, "--session", "method", METHOD);
    expect_ids(result.output, ids);
}

static void
start(struct process *process, const char *command, const char *store, const char *const *more)
{
    const char *argv[ARGS_MAX];
    const struct process_spec spec = {.argv = argv};

    command_line(argv, command, store, more);
    assert_true(process_start(process, &spec));
}

/* The prefill stands still in the middle: decode has begun, and waits at the node. */
static void decode_during_prefill(void **state)
{
    const char *const prefill[] = {"--session", "during", PROMPT, NULL};
    const char *const decode[] = {"--session", "during", ANSWER, NULL};
    struct kv_client *client = system_open(one, NULL);
    bool is_caught = false;

    (void)state;
    for (unsigned i = 0; i < TRIES && !is_caught; i++) {
        const double before = system_number(client, 0, "stats", "rows_in");
        struct process first, second;
        char line[PROCESS_LINE_BYTES];
        double rows, waited;

        start(&first, "prefill", one, prefill);
        do {
            rows = system_number(client, 0, "stats", "rows_in");
        } while (rows < before + 1000);
        assert_true(process_freeze(&first));
        waited = system_number(client, 0, "stats", "rows_out");
        start(&second, "decode", one, decode);
        /* It has what there is, and does not get the rest. */
        is_caught = system_number(client, 0, "stats", "rows_in") < before + 10000;
        while (is_caught && system_number(client, 0, "status", "requests_in_flight") == 0 &&
               system_number(client, 0, "stats", "rows_out") == waited)
            kv_client_wait(client, 1000);
        process_thaw(&first);
        assert_true(process_read_line(&second, line, TIMEOUT_MS));
        expect_ids(line, whole_answer);
        assert_int_equal(process_wait(&first, TIMEOUT_MS), 0);
        assert_int_equal(process_wait(&second, TIMEOUT_MS), 0);
    }
    assert_true(is_caught);
    kv_client_close(client);
}

/* A worker that has opened a session, and finds that another one has begun it meanwhile, takes that
 * one's, and leaves none of its own behind. */
static void a_faster_prefill(void **state)
{
    struct kv_client *client = system_open(one, NULL);
    struct kv_buffer *buffer = system_buffer(client, 4096);
    bool is_caught = false;

    (void)state;
    for (unsigned i = 0; i < TRIES && !is_caught; i++) {
        const uint32_t before = system_n_rows(client, 0, "sessions");
        char name[32], object[64];
        const char *const more[] = {"--session", name, "--raw", "--prompt", "the ant", NULL};
        struct process slow;

        snprintf(name, sizeof(name), "slow-%u", i);
        snprintf(object, sizeof(object), "kvworker/session/%s/1", name);
        start(&slow, "prefill", one, more);
        while (system_n_rows(client, 0, "sessions") == before)
            ;
        assert_true(process_freeze(&slow));
        is_caught = system_object(client, KV_OBJECT_EXISTS, object, buffer, 0,
                                  SYSTEM_DEADLINE_MS) == KV_NOT_FOUND;
        RUN("prefill", one, "--session", name, "--raw", "--prompt", "the ant");
        process_thaw(&slow);
        assert_int_equal(process_wait(&slow, TIMEOUT_MS), 0);
        assert_int_equal(system_n_rows(client, 0, "sessions"), before + 1);
    }
    assert_true(is_caught);
    kv_client_close(client);
}

/* Two workers bring half of the heads each, at the same time. */
static void halves_of_the_heads(void **state)
{
    struct process workers[2];

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        const char *const more[] = {
            "--session", "halves", PROMPT, "--kv-heads", i == 0 ? "0-1" : "1-2", NULL};

        start(&workers[i], "prefill", both, more);
    }
    for (unsigned i = 0; i < 2; i++)
        assert_int_equal(process_wait(&workers[i], TIMEOUT_MS), 0);
    RUN("decode", both, "--session", "halves", ANSWER);
    expect_ids(result.output, whole_answer);
    assert_true(strstr(result.errors, "again") == NULL);

    RUN_FAILS("prefill", both, "--session", "halves", PROMPT, "--kv-heads", "1-3");
    expect_said("--kv-heads: not A-B with 0 <= A < B <= 2: 1-3");
    RUN_FAILS("prefill", both, "--session", "halves", PROMPT, "--kv-heads", "1");
}

/* The other half never comes: decode waits in vain, and computes what is not there. */
static void half_of_the_heads(void **state)
{
    (void)state;
    RUN("prefill", one, "--session", "half", PROMPT, "--kv-heads", "0-1");
    RUN("decode", one, "--session", "half", ANSWER);
    expect_ids(result.output, whole_answer);
    expect_said("rows of layer 0: none has come for 10 s: ");
    expect_said(" tokens are computed again\n");
}

/* Kills a prefill in the middle. */
static void kill_prefill(const char *name)
{
    const char *const prefill[] = {"--session", name, PROMPT, NULL};
    struct kv_client *client = system_open(one, NULL);
    const double before = system_number(client, 0, "stats", "rows_in");
    struct process process;

    start(&process, "prefill", one, prefill);
    while (system_number(client, 0, "stats", "rows_in") < before + 1500)
        ;
    process_kill(&process);
    kv_client_close(client);
}

/* Another prefill goes on where the first one was killed. */
static void a_prefill_dies(void **state)
{
    (void)state;
    kill_prefill("killed");
    RUN("prefill", one, "--session", "killed", PROMPT);
    RUN("decode", one, "--session", "killed", ANSWER);
    expect_ids(result.output, whole_answer);
}

/* Its killed worker is not replaced: decode computes the rest. */
static void decode_of_a_dead_prefill(void **state)
{
    (void)state;
    kill_prefill("dead");
    RUN("decode", one, "--session", "dead", ANSWER);
    expect_ids(result.output, whole_answer);
    expect_said(" tokens are computed again\n");
    /* Once more: the answer goes on, with what is there. */
    RUN("decode", one, "--session", "dead", ANSWER);
    assert_true(number_of(result.output, "\"reused_tokens\"") > 1000);
}

/* ---- conversations ----------------------------------------------------------------------- */

enum {
    TURNS = 3
};

static const char *const lines[TURNS] = {"The ant?\n", "And the hat's end, 123?\n", "Sing.\n"};
static char answers[TURNS][IDS_BYTES]; /* of a conversation that nothing disturbs: the ids */

struct chat {
    struct process process;
    char errors[PROCESS_PATH_BYTES];
    char line[PROCESS_LINE_BYTES]; /* the last answer */
};

static void chat_start(struct chat *chat, const char *name, const char *store)
{
    static unsigned n_chats;
    char file[40];
    const char *argv[ARGS_MAX];
    const char *const more[] = {"--max-tokens", "12", name != NULL ? "--session" : NULL, name,
                                NULL};
    const struct process_spec spec = {.argv = argv, .errors = chat->errors};

    snprintf(file, sizeof(file), "chat-%u", n_chats++);
    process_path(chat->errors, file);
    command_line(argv, "chat", store, more);
    assert_true(process_start(&chat->process, &spec));
}

static void chat_ask(struct chat *chat, const char *line)
{
    const size_t bytes = strlen(line);

    assert_int_equal(write(chat->process.in, line, bytes), bytes);
}

/* Reads the answer, which is that of a conversation that nothing disturbs: `ids`, or it is that
 * conversation's own. */
static void chat_hear(struct chat *chat, char ids[IDS_BYTES])
{
    if (!process_read_line(&chat->process, chat->line, TIMEOUT_MS))
        fail_msg("no answer");
    if (ids[0] == '\0')
        ids_of(chat->line, ids);
    else
        expect_ids(chat->line, ids);
}

static void chat_turn(struct chat *chat, unsigned turn)
{
    chat_ask(chat, lines[turn]);
    chat_hear(chat, answers[turn]);
}

static void chat_end(struct chat *chat)
{
    close(chat->process.in);
    chat->process.in = -1;
    assert_int_equal(process_wait(&chat->process, TIMEOUT_MS), 0);
}

/* Reads what it said on stderr. */
static const char *chat_said(const struct chat *chat)
{
    static char text[4096];
    FILE *file = fopen(chat->errors, "rb");
    size_t bytes;

    assert_non_null(file);
    bytes = fread(text, 1, sizeof(text) - 1, file);
    text[bytes] = '\0';
    fclose(file);
    return text;
}

static void chat_expect_said(const struct chat *chat, const char *text)
{
    if (strstr(chat_said(chat), text) == NULL)
        fail_msg("`%s` is not in `%s`", text, chat_said(chat));
}

static void undisturbed(void)
{
    struct chat chat;

    if (answers[TURNS - 1][0] != '\0')
        return;
    chat_start(&chat, NULL, "embedded");
    for (unsigned i = 0; i < TURNS; i++)
        chat_turn(&chat, i);
    chat_end(&chat);
}

/* Each turn by another worker, of which two are killed. */
static void workers_die(void **state)
{
    struct chat chat;

    (void)state;
    undisturbed();
    for (unsigned i = 0; i < TURNS; i++) {
        chat_start(&chat, "workers", both);
        chat_turn(&chat, i);
        assert_true((number_of(chat.line, "\"reused_tokens\"") > 0) == (i > 0));
        assert_string_equal(chat_said(&chat), "");
        if (i + 1 < TURNS)
            process_kill(&chat.process);
        else
            chat_end(&chat);
    }
}

/* Two workers go on with one session: each has its own conversation, and the last record is that of
 * who saved last. */
static void two_workers_at_once(void **state)
{
    struct chat first, second;

    (void)state;
    undisturbed();
    chat_start(&first, "both", both);
    chat_turn(&first, 0);
    chat_start(&second, "both", both);
    chat_turn(&second, 1);
    chat_turn(&first, 1);
    chat_expect_said(&first, " tokens are computed again\n");
    chat_expect_said(&first, "session both: another worker has saved it, too");
    chat_end(&first);
    chat_turn(&second, 2);
    chat_end(&second);
    RUN("decode", both, "--session", "both", "--max-tokens", "4");
    assert_true(number_of(result.output, "\"reused_tokens\"") > 0);
}

/* ---- rows that rot ----------------------------------------------------------------------- */

/* Reads the first row of the session of a name's first record. */
static void read_first_row(const char *store, const char *name, uint8_t ret_row[ROW_BYTES])
{
    const struct kv_rows box = {.n_layers = 1, .n_kv_heads = 1, .n_tokens = 1};
    struct kv_client *client = system_open(store, NULL);
    struct kv_buffer *buffer = system_buffer(client, 64 << 10);
    const struct kv_rows_io io = {.buffer = buffer};
    const uint8_t *record = kv_buffer_data(buffer);
    struct kv_session *session;
    struct kv_ticket ticket;
    struct kv_op *op = NULL;
    char object[80];
    kv_status_t begun;

    snprintf(object, sizeof(object), "kvworker/session/%s/1", name);
    assert_int_equal(
        system_object(client, KV_OBJECT_GET, object, buffer, 64 << 10, SYSTEM_DEADLINE_MS),
        KV_OK);
    /* As session_record.c has them. */
    memcpy(ticket.session_id.bytes, record + 32, 16);
    memcpy(ticket.token.bytes, record + 48, 16);
    memcpy(&ticket.root, record + 64, 8);
    begun = kv_resume_begin(client, &ticket, SYSTEM_DEADLINE_MS, &op);
    assert_int_equal(begun, KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    session = kv_op_session(op);
    kv_op_free(op);
    begun = kv_read_begin(session, &box, &io, SYSTEM_DEADLINE_MS, &op);
    system_finish(client, begun, &op, KV_OK);
    memcpy(ret_row, record, ROW_BYTES);
    kv_session_free(session);
    kv_client_close(client);
}

/* A node of 256 MiB has no larger mapping, but a sanitizer's shadow is 15 TiB. */
#define MAPPING_MAX (1ul << 30)

/* Flips a bit of a row wherever a process has it. */
static void rot(pid_t pid, const uint8_t row[ROW_BYTES])
{
    static uint8_t chunk[1 << 20];
    unsigned long begin, end;
    char path[64], line[512];
    FILE *maps;
    int memory;
    unsigned n_flipped = 0;

    snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
    maps = fopen(path, "r");
    snprintf(path, sizeof(path), "/proc/%d/mem", (int)pid);
    memory = open(path, O_RDWR);
    assert_true(maps != NULL && memory >= 0);
    while (fgets(line, sizeof(line), maps) != NULL) {
        if (sscanf(line, "%lx-%lx", &begin, &end) != 2 || strstr(line, " rw") == NULL)
            continue;
        if (end - begin > MAPPING_MAX)
            continue;
        for (unsigned long at = begin; at < end; at += sizeof(chunk) - ROW_BYTES) {
            const ssize_t n = pread(
                memory, chunk, end - at < sizeof(chunk) ? end - at : sizeof(chunk), (off_t)at);
            uint8_t *found = chunk;

            while (n > 0 && (found = memmem(found, (size_t)(chunk + n - found), row,
                                            ROW_BYTES)) != NULL) {
                *found ^= 1;
                assert_int_equal(
                    pwrite(memory, found, 1, (off_t)(at + (unsigned long)(found - chunk))), 1);
                n_flipped++;
            }
        }
    }
    assert_true(n_flipped > 0);
    fclose(maps);
    close(memory);
}

/* What a node keeps of a prompt has rotten, and the node does not know it yet: whoever begins with it
 * notices, and it is computed again, once. */
static void rows_rot(void **state)
{
    static const char *const options[] = {"--transport", "tcp", "--memory", "256M",
                                          "--scrub",     "0",   NULL};
    struct process_node node = {.process = {.pid = 0}};
    uint8_t row[ROW_BYTES];

    (void)state;
    system_node_start(&node, options);
    RUN("prefill", node.control, "--session", "rotten", PROMPT);
    read_first_row(node.control, "rotten", row);
    rot(node.process.pid, row);
    RUN("generate", node.control, "--session", "noticed", "--raw", "--prompt-file", prompt,
        ANSWER);
    expect_ids(result.output, whole_answer);
    expect_said(" tokens are computed again\n");
    RUN("generate", node.control, "--session", "unnoticed", "--raw", "--prompt-file", prompt,
        ANSWER);
    expect_ids(result.output, whole_answer);
    assert_true(number_of(result.output, "\"reused_tokens\"") > 1000);
    assert_string_equal(result.errors, "");

    /* The session that has it, too: the record's, for whoever goes on with that. */
    RUN("decode", node.control, "--session", "rotten", ANSWER);
    expect_ids(result.output, whole_answer);
    expect_said(" tokens are computed again\n");

    /* A prefill does not go on with it, nor leaves it to others. */
    RUN("prefill", node.control, "--session", "another", "--raw", "--prompt-file", prompt);
    read_first_row(node.control, "another", row);
    rot(node.process.pid, row);
    run("prefill", node.control, 1,
        (const char *const[]){"--session", "third", "--raw", "--prompt-file", prompt, NULL});
    expect_said("what the nodes kept of this prompt is dropped");
    RUN("prefill", node.control, "--session", "third", "--raw", "--prompt-file", prompt);
    RUN("decode", node.control, "--session", "third", ANSWER);
    expect_ids(result.output, whole_answer);
    assert_string_equal(result.errors, "");

    /* Nor does who has no session, and has said nothing yet. */
    RUN("prefill", node.control, "--session", "fourth", "--raw", "--prompt-file", prompt);
    read_first_row(node.control, "fourth", row);
    rot(node.process.pid, row);
    RUN("generate", node.control, "--raw", "--prompt-file", prompt, ANSWER);
    expect_ids(result.output, whole_answer);
    expect_said("; the prompt is computed anew");
    RUN("generate", node.control, "--raw", "--prompt-file", prompt, ANSWER);
    expect_ids(result.output, whole_answer);
    assert_true(number_of(result.output, "\"reused_tokens\"") > 1000);
    assert_string_equal(result.errors, "");
    system_node_stop(&node);
}

/* A turn at a time, by generate; and what it does not take. */
static void turns_by_generate(void **state)
{
    (void)state;
    undisturbed();
    for (unsigned i = 0; i < TURNS; i++) {
        char line[80];

        snprintf(line, sizeof(line), "%.*s", (int)strcspn(lines[i], "\n"), lines[i]);
        RUN("generate", one, "--session", "turns", "--prompt", line, "--max-tokens", "12");
        expect_ids(result.output, answers[i]);
    }
    RUN_FAILS("generate", one, "--session", "turns", "--raw", "--prompt", "the");
    expect_said("session turns: a conversation: expected a text without a chat template");
    RUN("prefill", one, "--session", "unanswered", "--prompt", "the");
    RUN_FAILS("generate", one, "--session", "unanswered", "--prompt", "the");
    expect_said("session unanswered: it has no answer yet: kvworker decode gives it");
    RUN_FAILS("generate", "embedded", "--session", "turns", "--prompt", "the");
    expect_said("--session: an embedded store ends with this process: use --store");
    RUN_FAILS("decode", one, "--session", "nobody's");
    expect_said("session nobody's: no such session");
    RUN_FAILS("decode", one, "--max-tokens", "3");
    expect_said("--session: missing");
}

/* Prefill and decode give the first answer, chat the others. */
static void chat_after_decode(void **state)
{
    struct chat chat;

    (void)state;
    undisturbed();
    RUN("prefill", both, "--session", "mixed", "--prompt", "The ant?");
    RUN("decode", both, "--session", "mixed", "--max-tokens", "12");
    expect_ids(result.output, answers[0]);
    chat_start(&chat, "mixed", both);
    chat_turn(&chat, 1);
    assert_true(number_of(chat.line, "\"reused_tokens\"") > 0);
    chat_end(&chat);
}

/* What is random goes on as if nobody had been replaced. */
static void random_choices_go_on(void **state)
{
    static const char *const random[] = {"--temperature", "2", "--seed", "5"};
    char ids[2][IDS_BYTES], first[IDS_BYTES];

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        char name[16];

        snprintf(name, sizeof(name), "random-%u", i);
        RUN("generate", one, "--session", name, PROMPT, "--max-tokens", "4", random[0],
            random[1], random[2], random[3]);
        ids_of(result.output, first);
        RUN("decode", one, "--session", name, "--max-tokens", "8", random[0], random[1],
            random[2], i == 0 ? "5" : "6");
        ids_of(result.output, ids[i]);
        assert_string_not_equal(first, ids[i]);
    }
    /* The state counts, not the seed of the later one. */
    assert_string_equal(ids[0], ids[1]);
}

/* Another model, another tenant, and what is no record. */
static void records_that_are_none(void **state)
{
    const struct kv_client_options options = {.nodes = one, .tenant = 7};
    struct kv_client *client = system_open(one, NULL), *other;
    struct kv_buffer *buffer = system_buffer(client, 64);
    char detail[256];

    (void)state;
    RUN("prefill", one, "--session", "model", PROMPT);
    RUN_FAILS("decode", one, "--session", "model", "--kv-type", "bf16");
    expect_said("session model: of another model or --kv-type than ");
    RUN_FAILS("prefill", one, "--session", "model", PROMPT, "--kv-type", "bf16");
    expect_said("session model: of another model");

    memset(kv_buffer_data(buffer), 7, 64);
    assert_int_equal(system_object(client, KV_OBJECT_PUT, "kvworker/session/garbage/3", buffer,
                                   64, SYSTEM_DEADLINE_MS),
                     KV_OK);
    RUN_FAILS("decode", one, "--session", "garbage");
    expect_said("session garbage: not a record of kvworker");
    RUN_FAILS("chat", one, "--session", "garbage");
    expect_said("session garbage: not a record of kvworker");
    kv_client_close(client);

    assert_int_equal(kv_client_open(&options, &other, detail, sizeof(detail)), KV_OK);
    assert_int_equal(system_object(other, KV_OBJECT_EXISTS, "kvworker/session/model/1", NULL, 0,
                                   SYSTEM_DEADLINE_MS),
                     KV_NOT_FOUND);
    kv_client_close(other);
}

/* The lease is over, and with it the rows: the text is there. */
static void a_lease_ends(void **state)
{
    static const char *const options[] = {"--transport", "tcp",  "--memory", "256M",
                                          "--lease-ms",  "1000", NULL};
    struct process_node node = {.process = {.pid = 0}};
    struct kv_client *client;
    struct chat chat;

    (void)state;
    undisturbed();
    system_node_start(&node, options);
    chat_start(&chat, "lease", node.control);
    chat_turn(&chat, 0);
    process_kill(&chat.process);
    client = system_open(node.control, NULL);
    while (system_n_rows(client, 0, "sessions") > 0)
        kv_client_wait(client, 20000);
    kv_client_close(client);
    chat_start(&chat, "lease", node.control);
    chat_turn(&chat, 1);
    chat_expect_said(&chat, " tokens are computed again\n");
    chat_end(&chat);
    system_node_stop(&node);
}

#if KV_WITH_ZMQ

static double gauge(const struct process_node *node, const char *name)
{
    static char page[1 << 18];
    const char *at;

    assert_int_equal(process_http_get(node->metrics, "/metrics", page, sizeof(page)), 200);
    at = strstr(page, name);
    assert_non_null(at);
    return strtod(at + strlen(name), NULL);
}

/* Readers of events get the tokens of what a worker stores, if it is told to send them. */
static void tokens_are_told(void **state)
{
    static const char *const options[] = {
        "--transport", "tcp", "--memory", "256M", "--events", "tcp://127.0.0.1:0", NULL};
    struct process_node node = {.process = {.pid = 0}};
    double n_blocks;

    (void)state;
    system_node_start(&node, options);
    RUN("prefill", node.control, "--session", "untold", "--kv-type", "bf16", PROMPT);
    assert_true(gauge(&node, "\ntopkv_prefixes ") > 0);
    assert_true(gauge(&node, "\ntopkv_prefix_tokens_bytes ") == 0);
    RUN("prefill", node.control, "--session", "told", "--publish-tokens", PROMPT);
    n_blocks = floor(number_of(result.output, "\"prompt_tokens\"") / KV_BLOCK_TOKENS);
    assert_true(n_blocks > 0);
    /* Gauges follow within a step of the node. */
    for (int waited_ms = 0;
         gauge(&node, "\ntopkv_prefix_tokens_bytes ") != 4 * KV_BLOCK_TOKENS * n_blocks;
         waited_ms += 20) {
        assert_true(waited_ms < PROCESS_PATIENCE_MS);
        usleep(20000);
    }
    system_node_stop(&node);
}

#endif

/* The only node is killed between two turns, and comes back with nothing: no block was full. */
static void a_node_is_restarted(void **state)
{
    struct process_node node = {.process = {.pid = 0}};
    struct chat chat;

    (void)state;
    undisturbed();
    system_node_start(&node, node_options);
    chat_start(&chat, "restarted", node.control);
    chat_turn(&chat, 0);
    process_kill(&node.process);
    system_node_start(&node, node_options);
    chat_turn(&chat, 1);
    chat_expect_said(&chat, " tokens are computed again\n");
    chat_turn(&chat, 2);
    chat_end(&chat);
    system_node_stop(&node);
}

struct awaited {
    struct kv_client *client;
    const struct chat *chat;
};

static bool is_saved(void *arg)
{
    const struct awaited *wait = arg;

    return system_is_saved(wait->client, 0);
}

static bool is_waiting(void *arg)
{
    const struct awaited *wait = arg;

    return strstr(chat_said(wait->chat), "; waiting for a node\n") != NULL;
}

/* The node that has a long conversation is killed, and started again in its folder when the next line
 * has been asked: the blocks that it had saved are not computed again. */
static void a_node_comes_back(void **state)
{
    static char long_line[PROMPT_BYTES / 2], ids[2][IDS_BYTES];
    struct process_node node = {.process = {.pid = 0}};
    struct awaited wait;
    struct chat chat;
    unsigned computed, all;

    (void)state;
    worker_text(long_line, sizeof(long_line) - 1);
    for (char *at = long_line; (at = strchr(at, '\n')) != NULL;)
        *at = ' ';
    long_line[strlen(long_line) - 1] = '\n';
    chat_start(&chat, NULL, "embedded");
    chat_ask(&chat, long_line);
    chat_hear(&chat, ids[0]);
    chat_ask(&chat, lines[1]);
    chat_hear(&chat, ids[1]);
    chat_end(&chat);

    system_node_start(&node, node_options);
    chat_start(&chat, "back", node.control);
    chat_ask(&chat, long_line);
    chat_hear(&chat, ids[0]);
    wait = (struct awaited){system_open(node.control, NULL), &chat};
    assert_true(process_until(is_saved, &wait, PROCESS_PATIENCE_MS));
    kv_client_close(wait.client);
    process_kill(&node.process);
    chat_ask(&chat, lines[1]);
    assert_true(process_until(is_waiting, &wait, PROCESS_PATIENCE_MS));
    system_node_start(&node, node_options);
    chat_hear(&chat, ids[1]);
    const char *said = strstr(chat_said(&chat), " tokens are computed again");
    assert_non_null(said);
    while (*said != ':')
        said--;
    assert_int_equal(sscanf(said, ": %u of %u tokens", &computed, &all), 2);
    print_message("%u of %u tokens were computed again\n", computed, all);
    assert_true(all > 2 * KV_BLOCK_TOKENS && computed <= all - KV_BLOCK_TOKENS);
    assert_true(number_of(chat.line, "\"reused_tokens\"") >= KV_BLOCK_TOKENS);
    chat_end(&chat);
    system_node_stop(&node);
}

/* One of two nodes is killed between two turns: the conversation goes on on the other one, also
 * that of the next worker. */
static void a_node_dies(void **state)
{
    struct chat chat;

    (void)state;
    undisturbed();
    chat_start(&chat, "survivor", both);
    chat_turn(&chat, 0);
    process_kill(&nodes[1].process);
    chat_turn(&chat, 1);
    chat_expect_said(&chat, " tokens are computed again, on 1 of 2 nodes\n");
    process_kill(&chat.process);
    chat_start(&chat, "survivor", both);
    chat_turn(&chat, 2);
    chat_end(&chat);
    system_node_start(&nodes[1], node_options);
}

/* A node is killed in the middle of an answer: the answer goes on where it was. */
static void a_node_dies_during_an_answer(void **state)
{
    const char *const more[] = {"--session", "long", PROMPT, "--max-tokens", "600", NULL};
    struct kv_client *client = system_open(nodes[1].control, NULL);
    struct process_result undisturbed_result;
    const char *argv[ARGS_MAX];
    const struct process_spec spec = {.argv = argv};
    struct process process;
    static char output[16 << 10];
    size_t bytes = 0;
    ssize_t n;

    (void)state;
    RUN("generate", "embedded", PROMPT, "--max-tokens", "600");
    undisturbed_result = result;
    const double before = system_number(client, 0, "stats", "rows_in");
    command_line(argv, "generate", both, more);
    assert_true(process_start(&process, &spec));
    while (system_number(client, 0, "stats", "rows_in") < before + 6100)
        ;
    kv_client_close(client);
    process_kill(&nodes[1].process);
    while ((n = read(process.out, output + bytes, sizeof(output) - 1 - bytes)) > 0)
        bytes += (size_t)n;
    output[bytes] = '\0';
    assert_int_equal(process_wait(&process, TIMEOUT_MS), 0);
    const char *at = strstr(output, "\"token_ids\"");
    const char *wanted = strstr(undisturbed_result.output, "\"token_ids\"");

    assert_true(at != NULL && wanted != NULL);
    assert_int_equal(strcspn(at, "]"), strcspn(wanted, "]"));
    assert_memory_equal(at, wanted, strcspn(wanted, "]"));
    assert_true(number_of(output, "\"generated_tokens\"") == 600);
    system_node_start(&nodes[1], node_options);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_after_prefill),
        cmocka_unit_test(decode_by_another_method),
        cmocka_unit_test(decode_during_prefill),
        cmocka_unit_test(a_faster_prefill),
        cmocka_unit_test(halves_of_the_heads),
        cmocka_unit_test(half_of_the_heads),
        cmocka_unit_test(a_prefill_dies),
        cmocka_unit_test(decode_of_a_dead_prefill),
        cmocka_unit_test(workers_die),
        cmocka_unit_test(turns_by_generate),
        cmocka_unit_test(two_workers_at_once),
        cmocka_unit_test(rows_rot),
        cmocka_unit_test(chat_after_decode),
        cmocka_unit_test(random_choices_go_on),
        cmocka_unit_test(records_that_are_none),
        cmocka_unit_test(a_lease_ends),
#if KV_WITH_ZMQ
        cmocka_unit_test(tokens_are_told),
#endif
        cmocka_unit_test(a_node_is_restarted),
        cmocka_unit_test(a_node_comes_back),
        cmocka_unit_test(a_node_dies),
        cmocka_unit_test(a_node_dies_during_an_answer),
    };

    if (argc != 2)
        return 2;
    kvworker = argv[1];
    return cmocka_run_group_tests_name("system.sessions", tests, set_up, tear_down);
}

static int no_children(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return 2;
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, no_children);
}
