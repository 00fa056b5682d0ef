/* What people get wrong on a command line: one line on stderr that says what, where and which
 * value, the right exit status, nothing on stdout, and nothing left behind. */
#include "client/control.h"
#include "tests/system/system.h"

#include "client/client.h" /* the inside: another version's hello */
#include "client/node.h"
#include "proto/kvstore.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    OPTIONS_MAX = 8,
    NOBODY = 65534,
    LIMIT_MB = 2048,
    CLOSES = 20, /* until an answer comes before one */
};

static struct process_node served; /* has its ports and its folder */
static char folder[PROCESS_PATH_BYTES], locked[PROCESS_PATH_BYTES], file[PROCESS_PATH_BYTES];
static const char *kvctl;

struct mistake {
    const char *options[OPTIONS_MAX]; /* the last of a kind counts */
    int status;
    const char *says; /* part of the line */
    bool as_nobody;
    unsigned memory_limit; /* MiB */
};

/* One line that begins with the program's name, and nothing else. */
static void expect_line(const struct process_result *result,
                        const char *program,
                        const char *const *options,
                        int status,
                        const char *says)
{
    const char *end = strchr(result->errors, '\n');
    size_t name_bytes = strlen(program);

    if (result->status != status || result->output[0] != 0 || end == NULL || end[1] != 0 ||
        strncmp(result->errors, program, name_bytes) != 0 ||
        strncmp(result->errors + name_bytes, ": ", 2) != 0 ||
        strstr(result->errors, says) == NULL)
        fail_msg("%s %s %s ...: status %d, not %d; `%s` expected; output `%s`; errors `%s`",
                 program, options[0] != NULL ? options[0] : "",
                 options[0] != NULL && options[1] != NULL ? options[1] : "", result->status,
                 status, says, result->output, result->errors);
}

static void expect_mistake(const struct mistake *mistake)
{
    const char *argv[OPTIONS_MAX + 12] = {process_kvserver(),
                                          "--listen",
                                          "127.0.0.1:0",
                                          "--metrics",
                                          "127.0.0.1:0",
                                          "--dir",
                                          folder,
                                          "--memory",
                                          "64M"};
    const struct process_spec spec = {.argv = argv,
                                      .user = mistake->as_nobody ? NOBODY : 0,
                                      .memory_limit = mistake->memory_limit};
    struct process_result result;
    size_t n = 9;

    for (size_t i = 0; i < OPTIONS_MAX && mistake->options[i] != NULL; i++)
        argv[n++] = mistake->options[i];
    assert_true(process_run(&spec, PROCESS_PATIENCE_MS, &result));
    expect_line(&result, "kvserver", mistake->options, mistake->status, mistake->says);
}

static void kvserver_says_what_is_wrong(void **state)
{
    const struct mistake mistakes[] = {
        {.options = {"--bogus"}, .status = 2, .says = "option: unknown: --bogus"},
        {.options = {"--memory"}, .status = 2, .says = "option: needs a value: --memory"},
        {.options = {"extra"}, .status = 2, .says = "option: unexpected: extra"},
        {.options = {"--threads", "129"},
         .status = 2,
         .says = "option: --threads: not in 0..128: 129"},
        {.options = {"--memory", "much"},
         .status = 2,
         .says = "option: --memory: not a size such as 512M or 1.5G: much"},
        {.options = {"--transport", "carrier"},
         .status = 2,
         .says = "not one of auto|tcp|shm: carrier"},
        {.options = {"--config", "/nonexistent"},
         .status = 2,
         .says = "/nonexistent: No such file"},
        {.options = {"--config"}, .status = 2, .says = "--config: needs a file"},
        {.options = {"--listen", "nonsense"},
         .status = 2,
         .says = "listen: not HOST:PORT: nonsense"},
        {.options = {"--listen", "127.0.0.1:65536"},
         .status = 2,
         .says = "listen: not HOST:PORT: 127.0.0.1:65536"},
        {.options = {"--listen", "192.0.2.1:7400"}, .status = 2, .says = "192.0.2.1"},
        {.options = {"--metrics", "nonsense"},
         .status = 2,
         .says = "metrics: not HOST:PORT: nonsense"},
        {.options = {"--net-devices", "nope0"},
         .status = 2,
         .says = "network device nope0: does not exist"},
        {.options = {"--listen", served.control}, .status = 1, .says = served.control},
        {.options = {"--metrics", served.metrics}, .status = 1, .says = served.metrics},
        {.options = {"--dir", served.dir}, .status = 1, .says = ": in use by process "},
        {.options = {"--dir", file}, .status = 2, .says = "data directory: not a directory: "},
        {.options = {"--dir", locked}, .status = 2, .says = locked, .as_nobody = true},
        {.options = {"--name", "a b"},
         .status = 2,
         .says = "name: a blank or a control character"},
        {.options = {"--memory", "1M"}, .status = 2, .says = "memory must be at least 16M"},
        {.options = {"--memory", "900T"}, .status = 1, .says = "memory: 900T: more than the "},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(mistakes) / sizeof(mistakes[0]); i++) {
        if (mistakes[i].as_nobody && getuid() != 0)
            continue; /* cannot become another user */
        expect_mistake(&mistakes[i]);
    }
}

/* A value that is wrong is what the line says, though the folder and both ports are another
 * node's. */
static void values_are_judged_first(void **state)
{
    static const struct {
        const char *option, *value, *says;
    } wrong[] = {
        {"--name", "a b", "name: a blank or a control character"},
        {"--name", "a,b", "name: a,b: a comma or an equals sign"},
        {"--memory", "5", "memory must be at least 16M per data thread: 5"},
        {"--listen", "127.0.0.1", "listen: not HOST:PORT: 127.0.0.1"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        const struct mistake mistake = {.options = {"--dir", served.dir, "--listen",
                                                    served.control, "--metrics", served.metrics,
                                                    wrong[i].option, wrong[i].value},
                                        .status = 2,
                                        .says = wrong[i].says};

        expect_mistake(&mistake);
    }
}

/* What the machine refuses although it seemed to have it. */
static void memory_is_refused(void **state)
{
    const struct mistake mistake = {.options = {"--memory", "3G"},
                                    .status = 1,
                                    .says = "memory: cannot reserve 3G",
                                    .memory_limit = LIMIT_MB};

    (void)state;
#ifdef __SANITIZE_ADDRESS__
    skip(); /* its shadow alone is larger than any limit */
#endif
    expect_mistake(&mistake);
}

/* After all these, the folder and everything else is free. */
static void nothing_is_left(void **state)
{
    struct process_node node = {0};
    const char *const options[] = {"--dir", folder, NULL};

    (void)state;
    system_node_start(&node, options);
    system_node_stop(&node);
    assert_true(process_shared_settled(*state));
}

static void kvctl_says_what_is_wrong(void **state)
{
    static const struct mistake mistakes[] = {
        {.options = {NULL}, .status = 2, .says = "command: missing"},
        {.options = {"bogus"}, .status = 2, .says = "command: unknown: bogus"},
        {.options = {"status", "--bogus"}, .status = 2, .says = "option: unknown: --bogus"},
        {.options = {"status", "extra"}, .status = 2, .says = "operands: too many"},
        {.options = {"put"}, .status = 2, .says = "operands: too few"},
        {.options = {"put", "name", "/nonexistent"},
         .status = 2,
         .says = "/nonexistent: cannot open"},
        {.options = {"get", "nothing"}, .status = 1, .says = "nothing: no such object"},
        {.options = {"exists", "nothing"}, .status = 1, .says = "nothing: no such object"},
        {.options = {"delete", "nothing"}, .status = 1, .says = "nothing: no such object"},
        {.options = {"status", "--transport", "x"},
         .status = 2,
         .says = "not one of auto|tcp|shm: x"},
        {.options = {"status", "--server", "nonsense"},
         .status = 2,
         .says = "not HOST:PORT: nonsense"},
        {.options = {"status", "--server", "127.0.0.1:1"},
         .status = 1,
         .says = "node 127.0.0.1:1: open: unreachable"},
        {.options = {"status", "--server", served.metrics},
         .status = 1,
         .says = served.metrics},
    };
    struct process_result result;

    (void)state;
    for (size_t i = 0; i < sizeof(mistakes) / sizeof(mistakes[0]); i++) {
        const char *argv[OPTIONS_MAX + 4] = {kvctl, "--server", served.control};

        for (size_t j = 0; j < OPTIONS_MAX && mistakes[i].options[j] != NULL; j++)
            argv[3 + j] = mistakes[i].options[j];
        assert_true(
            process_run(&(struct process_spec){.argv = argv}, PROCESS_PATIENCE_MS, &result));
        expect_line(&result, "kvctl", mistakes[i].options, mistakes[i].status,
                    mistakes[i].says);
    }
}

/* Another user cannot have the node's shared memory: told so, or over tcp where that will do.
 */
static void another_user(void **state)
{
    static const char *const none[] = {NULL};
    const char *argv[] = {kvctl, "--server", served.control, "ping", NULL, NULL, NULL};
    struct process_spec spec = {.argv = argv, .user = NOBODY};
    struct process_result result;

    (void)state;
    /* UCX keeps 100 bytes of an attach that failed, and another user may not get to the list of
     * such things. */
    setenv("LSAN_OPTIONS", "detect_leaks=0", 1);
    /* Only root can become another, and that one must get to the program. */
    if (geteuid() != 0 || !process_run(&spec, PROCESS_PATIENCE_MS, &result) ||
        result.status > 125)
        skip();
    if (result.status != 0 || strstr(result.output, "over tcp/") == NULL)
        fail_msg("status %d; %s%s", result.status, result.output, result.errors);
    argv[4] = "--transport";
    argv[5] = "shm";
    assert_true(process_run(&spec, PROCESS_PATIENCE_MS, &result));
    expect_line(&result, "kvctl", none, 1, "another user or container");
}

/* ---- another version --------------------------------------------------------------------- */

struct answer {
    bool has_come;
    kv_status_t status;
    Kvpb__HelloReply *hello;
};

static void on_answer(
    void *arg, kv_status_t status, const uint8_t *reply, size_t reply_bytes, const char *detail)
{
    struct answer *answer = arg;

    (void)detail;
    answer->has_come = true;
    answer->status = status;
    if (status == KV_OK)
        answer->hello = kvpb__hello_reply__unpack(NULL, reply_bytes, reply);
}

static bool has_come(void *arg)
{
    const struct answer *const *answer = arg;
    struct kvc_control *control = ((void **)arg)[1];

    control->transport->progress(control);
    return (*answer)->has_come;
}

static void another_version(void **state)
{
    Kvpb__HelloRequest request = KVPB__HELLO_REQUEST__INIT;
    uint8_t id[16] = {1}, address[8] = {2}, packed[256];
    struct kvc_control *control;
    struct answer answer = {0};
    size_t bytes;

    (void)state;
    assert_int_equal(kvc_control_grpc_open(served.control, SYSTEM_PEER_MS, NULL, &control),
                     KV_OK);
    request.version = KV_WIRE_VERSION + 1;
    request.name = (char *)"from the future";
    request.client_id = (ProtobufCBinaryData){sizeof(id), id};
    request.address = (ProtobufCBinaryData){sizeof(address), address};
    assert_true(kvpb__hello_request__get_packed_size(&request) <= sizeof(packed));
    bytes = kvpb__hello_request__pack(&request, packed);
    assert_int_equal(control->transport->call(control, KV_OP_HELLO, packed, bytes,
                                              SYSTEM_DEADLINE_MS * UINT64_C(1000), on_answer,
                                              &answer),
                     KV_OK);
    assert_true(process_until(has_come, (void *[]){&answer, control}, PROCESS_PATIENCE_MS));
    assert_int_equal(answer.status, KV_OK);
    assert_non_null(answer.hello);
    assert_int_equal(answer.hello->outcome->status, KV_VERSION);
    assert_non_null(strstr(answer.hello->outcome->detail, "version"));
    kvpb__hello_reply__free_unpacked(answer.hello, NULL);
    control->transport->close(control);
}

/* ---- strangers --------------------------------------------------------------------------- */

struct ending {
    struct kvc_control *control;
    bool has_come;
    kv_status_t status;
    char detail[200];
};

static void on_ending(
    void *arg, kv_status_t status, const uint8_t *reply, size_t reply_bytes, const char *detail)
{
    struct ending *ending = arg;

    (void)reply;
    (void)reply_bytes;
    ending->has_come = true;
    ending->status = status;
    snprintf(ending->detail, sizeof(ending->detail), "%s", detail);
}

static void on_lost(void *arg)
{
    (void)arg;
}

static bool has_ended(void *arg)
{
    struct ending *ending = arg;

    ending->control->transport->progress(ending->control);
    return ending->has_come;
}

static void begin_call(struct ending *ending, enum kv_op_id op)
{
    ending->has_come = false;
    assert_int_equal(ending->control->transport->call(ending->control, op, NULL, 0,
                                                      SYSTEM_DEADLINE_MS * UINT64_C(1000),
                                                      on_ending, ending),
                     KV_OK);
}

static kv_status_t call(struct ending *ending, enum kv_op_id op)
{
    begin_call(ending, op);
    assert_true(process_until(has_ended, ending, PROCESS_PATIENCE_MS));
    return ending->status;
}

/* Over gRPC a call is a client's, by its index and token, or it is refused. */
static void strangers_call_nothing(void **state)
{
    struct kv_client *client = system_open(served.control, "tcp");
    const struct kvc_node *remote = &client->nodes[0];
    struct kv_id128 token = remote->client_token;

    (void)state;
    for (unsigned who = 0; who < 3; who++) { /* nobody, one who guesses, the client */
        struct ending ending = {0};

        assert_int_equal(
            kvc_control_grpc_open(served.control, SYSTEM_PEER_MS, NULL, &ending.control),
            KV_OK);
        token.bytes[5] ^= who == 1;
        if (who > 0)
            assert_int_equal(ending.control->transport->attach(
                                 ending.control, remote->client_index, &token, on_lost, NULL),
                             KV_OK);
        token = remote->client_token;
        for (unsigned op = KV_OP_MODEL; who < 2 && op <= KV_OP_DRAIN; op++) {
            assert_int_equal(call(&ending, (enum kv_op_id)op), KV_UNREACHABLE);
            assert_string_equal(ending.detail, "unknown client");
        }
        if (who == 2)
            assert_int_equal(call(&ending, KV_OP_TABLE), KV_OK); /* says: no such table */
        ending.control->transport->close(ending.control);
    }
    assert_int_equal(system_number(client, 0, "status", "clients"), 1);
    kv_client_close(client);
}

/* Who closes, as a client does that hears of a node's end, has the answers that came before. */
static void answers_before_a_close(void **state)
{
    struct ending ending = {0};

    (void)state;
    /* A loaded machine may take longer than close() waits. */
    for (unsigned i = 0; i < CLOSES && (i == 0 || ending.status != KV_OK); i++) {
        assert_int_equal(
            kvc_control_grpc_open(served.control, SYSTEM_PEER_MS, NULL, &ending.control),
            KV_OK);
        assert_int_equal(call(&ending, KV_OP_HELLO), KV_OK); /* says: not a hello */
        begin_call(&ending, KV_OP_HELLO);
        ending.control->transport->close(ending.control);
        assert_true(ending.has_come);
    }
    assert_int_equal(ending.status, KV_OK);
}

static int set_up(void **state)
{
    static struct process_shared shared;
    FILE *out;

    process_shared_look(&shared);
    *state = &shared;
    process_path(folder, "folder");
    process_path(locked, "locked");
    process_path(file, "file");
    out = fopen(file, "w");
    if (out == NULL || fclose(out) != 0 || mkdir(locked, 0700) != 0)
        return -1;
    return process_node_start(&served, NULL) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return process_node_stop(&served) == 0 ? 0 : -1;
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kvserver_says_what_is_wrong),
        cmocka_unit_test(values_are_judged_first),
        cmocka_unit_test(memory_is_refused),
        cmocka_unit_test(kvctl_says_what_is_wrong),
        cmocka_unit_test(another_user),
        cmocka_unit_test(another_version),
        cmocka_unit_test(strangers_call_nothing),
        cmocka_unit_test(answers_before_a_close),
        cmocka_unit_test(nothing_is_left),
    };

    if (argc != 2) {
        process_complain("usage: test_system_errors KVSERVER KVCTL");
        return 2;
    }
    kvctl = argv[1];
    return cmocka_run_group_tests_name("system.errors", tests, set_up, tear_down);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, NULL);
}
