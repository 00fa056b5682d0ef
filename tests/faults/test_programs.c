/* Allocations of whole programs fail, each alone and with all after it: a node, the operator's
 * command line and the worker end with a line that says so, or go on and are right; none is
 * ended by a signal.
 *
 *     test_faults_programs KVSERVER KVSERVER_F KVCTL_F KVWORKER_F [RUNS]
 *
 * The _F ones are linked with failing_memory.c.  RUNS of each program and kind, evenly spread
 * from a place that the seed says; 0: every allocation.
 */
#include "kvserver/base/random.h"
#include "tests/support/rows.h"
#include "tests/support/worker_files.h"
#include "tests/system/system.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    RUNS = 30,
    OBJECT_BYTES = 100 << 10,
    TRIES = 4,
    PROMPT_BYTES = 700,
};

static const char *kvserver, *kvctl, *kvworker;
static unsigned n_runs = RUNS;
static char model[PROCESS_PATH_BYTES], prompt[PROCESS_PATH_BYTES], calls[PROCESS_PATH_BYTES];
static char errors[PROCESS_PATH_BYTES], dir[PROCESS_PATH_BYTES];
static struct process_node node; /* a healthy one */
static struct process_result result;
static char tokens[sizeof(result.output)]; /* the worker's, undisturbed */
static struct kv_random dice;
static unsigned n_bad; /* of a sweep */

/* One allocation, and how. */
struct failure {
    const char *program;
    uint64_t nth;
    bool and_on;
};

#define EXPECT(failure, condition, ...)                                                   \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            print_error("KV_FAIL_MEMORY=%llu%s %s: ", (unsigned long long)(failure)->nth, \
                        (failure)->and_on ? "+" : "", (failure)->program);                \
            print_error(__VA_ARGS__);                                                     \
            print_error("\n");                                                            \
            n_bad++;                                                                      \
        }                                                                                 \
    } while (0)

static void arm(const struct failure *failure)
{
    char text[32];

    snprintf(text, sizeof(text), "%llu%s", (unsigned long long)failure->nth,
             failure->and_on ? "+" : "");
    setenv("KV_FAIL_MEMORY", text, 1);
}

static void disarm(void)
{
    unsetenv("KV_FAIL_MEMORY");
}

/* The file's first bytes, as text. */
static void look(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "rb");

    text[0] = 0;
    if (file == NULL)
        return;
    text[fread(text, 1, bytes - 1, file)] = 0;
    fclose(file);
}

/* Runs `try` with failures spread over all that the program asks for. */
static void sweep(const char *program, void (*try)(const struct failure *failure))
{
    struct failure failure = {.program = program};
    char text[32];
    uint64_t n_calls;

    n_bad = 0;
    setenv("KV_FAIL_MEMORY_FILE", calls, 1);
    try(&failure);
    unsetenv("KV_FAIL_MEMORY_FILE");
    look(calls, text, sizeof(text));
    n_calls = strtoull(text, NULL, 10);
    print_message("%s: %llu allocations\n", program, (unsigned long long)n_calls);
    assert_in_range(n_calls, 1, 1000000);
    const uint64_t step = n_runs > 0 && n_calls > n_runs ? n_calls / n_runs : 1;
    for (failure.nth = 1 + kv_random_below(&dice, step); failure.nth <= n_calls;
         failure.nth += step)
        for (unsigned and_on = 0; and_on < 2; and_on++) {
            failure.and_on = and_on != 0;
            try(&failure);
        }
    assert_int_equal(n_bad, 0);
}

/* ---- a node ------------------------------------------------------------------------------ */

/* Stores an object in the node and gets it back; KV_OK: right. */
static kv_status_t use_node(const char *control, const struct failure *failure)
{
    /* One that has no memory from then on may leave every request unanswered. */
    const uint32_t deadline_ms = failure->and_on ? 3000 : SYSTEM_DEADLINE_MS;
    const struct kv_client_options options = {
        .nodes = control,
        .transport = "tcp",
        .deadline_ms = deadline_ms,
        .peer_timeout_ms = failure->and_on ? 0 : SYSTEM_PEER_MS,
    };
    struct kv_client *client = NULL;
    struct kv_buffer *buffer;
    char detail[256] = "", name[48];
    kv_status_t status = kv_client_open(&options, &client, detail, sizeof(detail));

    if (status != KV_OK)
        return status;
    buffer = system_buffer(client, OBJECT_BYTES);
    /* What another run has put may be there. */
    snprintf(name, sizeof(name), "%llu%s", (unsigned long long)failure->nth,
             failure->and_on ? "+" : "");
    test_fill(kv_buffer_data(buffer), OBJECT_BYTES, failure->nth);
    status = system_object(client, KV_OBJECT_PUT, name, buffer, OBJECT_BYTES, deadline_ms);
    if (status == KV_OK) {
        memset(kv_buffer_data(buffer), 0, OBJECT_BYTES);
        status = system_object(client, KV_OBJECT_GET, name, buffer, OBJECT_BYTES, deadline_ms);
        EXPECT(failure,
               status != KV_OK ||
                   test_is_filled(kv_buffer_data(buffer), OBJECT_BYTES, failure->nth),
               "another object came back");
    }
    kv_client_close(client);
    return status;
}

static void try_node(const struct failure *failure)
{
    const char *const argv[] = {
        kvserver,    "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--memory", "64M",
        "--threads", "2",        "--transport", "tcp",       "--dir",       dir,        NULL};
    const struct process_spec spec = {.argv = argv, .errors = errors};
    char line[PROCESS_LINE_BYTES] = "", control[64], text[4096];
    kv_status_t status = KV_UNREACHABLE;
    struct process process;

    remove(errors);
    arm(failure);
    assert_true(process_start(&process, &spec));
    disarm();
    const bool is_ready = process_read_line(&process, line, PROCESS_PATIENCE_MS) &&
                          sscanf(line, "ready control=%63s", control) == 1;
    for (unsigned i = 0; is_ready && i < TRIES && status != KV_OK; i++) {
        status = use_node(control, failure);
        if (failure->and_on)
            break;
    }
    if (is_ready)
        kill(process.pid, SIGTERM);
    const int exit_status = process_wait(&process, PROCESS_PATIENCE_MS);
    look(errors, text, sizeof(text));
    EXPECT(failure, exit_status == 0 || exit_status == 1, "exit status %d: %s", exit_status,
           text);
    EXPECT(failure, is_ready || (failure->nth > 0 && strstr(text, "kvserver: ") != NULL),
           "not ready, and not a word: %s", text);
    EXPECT(failure, !is_ready || failure->and_on || status == KV_OK, "%s: %s",
           kv_status_name(status), text);
}

/* ---- command lines ----------------------------------------------------------------------- */

static void
try_command(const struct failure *failure, const char *const *argv, const char *name)
{
    const struct process_spec spec = {.argv = argv};

    arm(failure);
    assert_true(process_run(&spec, 2 * PROCESS_PATIENCE_MS, &result));
    disarm();
    EXPECT(failure, result.status >= 0 && result.status < 128, "exit status %d: %s",
           result.status, result.errors);
    EXPECT(failure, result.status == 0 || (failure->nth > 0 && strstr(result.errors, name)),
           "exit status %d, and not a word: %s%s", result.status, result.output, result.errors);
}

static void try_kvctl(const struct failure *failure)
{
    const char *const put[] = {kvctl, "--server", node.control, "put", "two", model, NULL};
    const char *const list[] = {kvctl, "--server", node.control, "status", "--json", NULL};

    try_command(failure, failure->nth % 2 == 0 ? put : list, "kvctl: ");
}

static void try_kvworker(const struct failure *failure)
{
    const char *const argv[] = {kvworker,
                                "generate",
                                "--model",
                                model,
                                "--store",
                                "embedded",
                                "--json",
                                "--max-tokens",
                                "8",
                                "--raw",
                                "--prompt-file",
                                prompt,
                                "--attention",
                                "pqcache",
                                "--chapter",
                                "8",
                                "--kmeans-iters",
                                "2",
                                "--seed",
                                "3",
                                "--wait-index",
                                "--memory",
                                "64M",
                                "--threads",
                                "2",
                                "--ratio",
                                "1/4",
                                NULL};
    const char *at;

    try_command(failure, argv, "kvworker: ");
    at = strstr(result.output, "\"token_ids\"");
    if (result.status != 0)
        return;
    EXPECT(failure, at != NULL, "no tokens: %s", result.output);
    if (at == NULL)
        return;
    if (failure->nth == 0)
        memcpy(tokens, at, strcspn(at, "]"));
    EXPECT(failure, strncmp(at, tokens, strlen(tokens)) == 0, "other tokens: %s",
           result.output);
}

/* ---- all of them ------------------------------------------------------------------------- */

static int set_up(void **state)
{
    static const char *const options[] = {"--transport", "tcp", "--memory", "64M", NULL};
    static char text[PROMPT_BYTES];

    (void)state;
    worker_file_write_model(model, "model.gguf");
    worker_text(text, sizeof(text));
    worker_file_write(prompt, "prompt", text, sizeof(text));
    process_path(calls, "calls");
    process_path(errors, "errors");
    process_path(dir, "dir");
    system_node_start(&node, options);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    system_node_stop(&node);
    return 0;
}

static void a_node(void **state)
{
    (void)state;
    sweep("kvserver", try_node);
}

static void the_operator(void **state)
{
    (void)state;
    sweep("kvctl", try_kvctl);
}

static void a_worker(void **state)
{
    (void)state;
    sweep("kvworker", try_kvworker);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_node),
        cmocka_unit_test(the_operator),
        cmocka_unit_test(a_worker),
    };
    const char *text = getenv("KV_TEST_SEED");
    const uint64_t seed =
        text != NULL ? strtoull(text, NULL, 10) : process_now_us() % 1000000007;

    if (argc < 4)
        return 2;
    kvserver = argv[1];
    kvctl = argv[2];
    kvworker = argv[3];
    if (argc > 4)
        n_runs = (unsigned)strtoul(argv[4], NULL, 10);
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests_name("faults.programs", tests, set_up, tear_down);
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
