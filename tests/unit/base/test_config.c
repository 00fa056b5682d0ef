/* One table, three sources and the error texts; numbers at and beyond their bounds; what is
 * printed is read back as it was; random files and arguments do no harm. */
#include "kvserver/base/config.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

struct options {
    char listen[KV_CONFIG_STRING_BYTES];
    char transport[KV_CONFIG_STRING_BYTES];
    uint64_t memory;
    uint64_t threads;
    uint64_t seed;
    bool verbose;
    const char *nodes;
    char guard[16];
};

#define AT(field) offsetof(struct options, field)
static const struct kv_option rows[] = {
    {.name = "listen",
     .default_text = "127.0.0.1:7440",
     .help = "address of the control plane",
     .offset = AT(listen),
     .type = KV_CONFIG_STRING,
     .value = "HOST:PORT"},
    {.name = "transport",
     .default_text = "auto",
     .help = "what carries the data; a help text that is so long that it has to be broken into "
             "more than one line of the output",
     .offset = AT(transport),
     .type = KV_CONFIG_STRING,
     .choices = "auto|tcp|shm"},
    {.name = "memory-max",
     .default_text = "1G",
     .help = "memory for blocks",
     .offset = AT(memory),
     .type = KV_CONFIG_SIZE,
     .min = 1 << 20,
     .max = 1ull << 40},
    {.name = "workers", /* an old name */
     .default_text = "2",
     .offset = AT(threads),
     .type = KV_CONFIG_UINT,
     .min = 1,
     .max = 64},
    {.name = "threads",
     .default_text = "2",
     .help = "data threads",
     .offset = AT(threads),
     .type = KV_CONFIG_UINT,
     .min = 1,
     .max = 64},
    {.name = "seed", .help = "of the generator", .offset = AT(seed), .type = KV_CONFIG_UINT},
    {.name = "verbose", .help = "say more", .offset = AT(verbose), .type = KV_CONFIG_FLAG},
    {.name = "nodes",
     .default_text = "a:1",
     .offset = AT(nodes),
     .type = KV_CONFIG_TEXT,
     .help = "list of any length"},
    {.name = NULL},
};

static struct options options;
static char detail[256];

static int setup(void **state)
{
    (void)state;
    memset(&options, 0x77, sizeof(options));
    kv_config_defaults(rows, &options);
    detail[0] = '\0';
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(options.guard); i++)
        assert_int_equal(options.guard[i], 0x77);
    return 0;
}

static kv_status_t arguments(int *argc, char **argv)
{
    return kv_config_arguments(rows, &options, argc, argv, detail, sizeof(detail));
}

static kv_status_t one(const char *argument)
{
    char *argv[] = {"program", (char *)argument, NULL};
    int argc = 2;

    return arguments(&argc, argv);
}

static kv_status_t file(const void *text, size_t bytes)
{
    char path[] = "/tmp/kv-test-config-XXXXXX";
    int fd = mkstemp(path);
    kv_status_t status;
    char *at;

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, bytes), bytes);
    close(fd);
    status = kv_config_file(rows, &options, path, detail, sizeof(detail));
    unlink(path);
    /* The name changes from run to run. */
    at = strstr(detail, path);
    if (at != NULL) {
        memmove(at + 4, at + strlen(path), strlen(at + strlen(path)) + 1);
        memcpy(at, "FILE", 4);
    }
    return status;
}

static kv_status_t file_text(const char *text)
{
    return file(text, strlen(text));
}

static void defaults(void **state)
{
    (void)state;
    assert_string_equal(options.listen, "127.0.0.1:7440");
    assert_string_equal(options.transport, "auto");
    assert_int_equal(options.memory, 1 << 30);
    assert_int_equal(options.threads, 2);
    assert_int_equal(options.seed, 0);
    assert_false(options.verbose);
}

static void command_line(void **state)
{
    char *argv[] = {"program", "--threads", "3",  "one",       "--verbose", "--memory-max=2G",
                    "-",       "--listen=", "--", "--threads", "two",       NULL};
    int argc = 11;

    (void)state;
    assert_int_equal(arguments(&argc, argv), KV_OK);
    assert_int_equal(argc, 5);
    assert_string_equal(argv[0], "program");
    assert_string_equal(argv[1], "one");
    assert_string_equal(argv[2], "-");
    assert_string_equal(argv[3], "--threads");
    assert_string_equal(argv[4], "two");
    assert_null(argv[5]);
    assert_int_equal(options.threads, 3);
    assert_true(options.verbose);
    assert_int_equal(options.memory, 2ull << 30);
    assert_string_equal(options.listen, "");
    assert_int_equal(one("--verbose=no"), KV_OK);
    assert_false(options.verbose);
}

static void errors_of_arguments(void **state)
{
    static const struct {
        const char *argument, *detail;
    } cases[] = {
        {"--frob", "option: unknown: --frob"},
        {"--frob=3", "option: unknown: --frob"},
        {"-x", "option: unknown: -x"},
        {"-threads", "option: unknown: -threads"},
        {"--=", "option: unknown: --"},
        {"--thread", "option: unknown: --thread"},
        {"--threadss", "option: unknown: --threadss"},
        {"--threads", "option: needs a value: --threads"},
        {"--threads=x", "option: --threads: not a number: x"},
        {"--threads=", "option: --threads: not a number: "},
        {"--threads=-1", "option: --threads: not a number: -1"},
        {"--threads=+1", "option: --threads: not a number: +1"},
        {"--threads= 1", "option: --threads: not a number:  1"},
        {"--threads=1 ", "option: --threads: not a number: 1 "},
        {"--threads=0x1", "option: --threads: not a number: 0x1"},
        {"--threads=1K", "option: --threads: not a number: 1K"},
        {"--threads=18446744073709551616",
         "option: --threads: not a number: 18446744073709551616"},
        {"--threads=0", "option: --threads: not in 1..64: 0"},
        {"--threads=65", "option: --threads: not in 1..64: 65"},
        {"--memory-max=1023K", "option: --memory-max: not in 1M..1T: 1023K"},
        {"--memory-max=99999999999G",
         "option: --memory-max: not a size such as 512M or 1.5G: 99999999999G"},
        {"--memory-max=lots", "option: --memory-max: not a size such as 512M or 1.5G: lots"},
        {"--transport=rdma", "option: --transport: not one of auto|tcp|shm: rdma"},
        {"--transport=", "option: --transport: not one of auto|tcp|shm: "},
        {"--transport=auto|tcp", "option: --transport: not one of auto|tcp|shm: auto|tcp"},
        {"--transport=au", "option: --transport: not one of auto|tcp|shm: au"},
        {"--listen=a\nb", "option: --listen: has control characters: a\nb"},
        {"--verbose=maybe", "option: --verbose: not yes or no: maybe"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(one(cases[i].argument), KV_INVALID);
        assert_string_equal(detail, cases[i].detail);
    }
    assert_int_equal(options.threads, 2);
    assert_int_equal(one("--threads=1"), KV_OK);
    assert_int_equal(one("--threads=64"), KV_OK);
    assert_int_equal(one("--memory-max=1M"), KV_OK);
    assert_int_equal(one("--memory-max=1T"), KV_OK);
    assert_int_equal(one("--seed=18446744073709551615"), KV_OK);
    assert_true(options.seed == UINT64_MAX);
}

static void long_strings(void **state)
{
    char text[KV_CONFIG_STRING_BYTES + 16] = "--listen=", tiny[4];
    char *argv[] = {text, NULL};
    int argc = 1;

    (void)state;
    memset(text + 9, 'x', KV_CONFIG_STRING_BYTES - 1);
    assert_int_equal(one(text), KV_OK);
    assert_int_equal(strlen(options.listen), KV_CONFIG_STRING_BYTES - 1);
    text[9 + KV_CONFIG_STRING_BYTES - 1] = 'x';
    assert_int_equal(one(text), KV_INVALID);
    assert_non_null(strstr(detail, "option: --listen: longer than 511 bytes: xxx"));
    assert_int_equal(kv_config_arguments(rows, &options, &argc, argv, tiny, sizeof(tiny)),
                     KV_INVALID);
    assert_string_equal(tiny, "opt");
    argc = 1;
    assert_int_equal(kv_config_arguments(rows, &options, &argc, argv, NULL, 0), KV_INVALID);
}

/* An option that does nothing without another one is refused as an argument, also with its
 * default, wherever the other one stands; what file or environment say of the other one
 * counts. */
static void needs(void **state)
{
    static const struct kv_option dependent[] = {
        {.name = "listen", .offset = AT(listen), .type = KV_CONFIG_STRING},
        {.name = "transport",
         .default_text = "auto",
         .offset = AT(transport),
         .type = KV_CONFIG_STRING},
        {.name = "seed", .offset = AT(seed), .type = KV_CONFIG_UINT, .needs = "listen"},
        {.name = "threads", .offset = AT(threads), .type = KV_CONFIG_UINT, .needs = "verbose"},
        {.name = "memory", .offset = AT(memory), .type = KV_CONFIG_SIZE, .needs = "transport"},
        {.name = "verbose", .offset = AT(verbose), .type = KV_CONFIG_FLAG},
        {.name = "nodes", .offset = AT(nodes), .type = KV_CONFIG_TEXT, .needs = "nodes"},
        {.name = NULL},
    };
    static const struct {
        const char *arguments[2];
        const char *says; /* NULL: taken */
    } calls[] = {
        {{"--seed=0"}, "option: --seed: needs --listen"},
        {{"--seed=3", "--listen="}, "option: --seed: needs --listen"},
        {{"--seed=3", "--listen=x"}, NULL},
        {{"--threads=3"}, "option: --threads: needs --verbose"},
        {{"--threads=3", "--verbose=no"}, "option: --threads: needs --verbose"},
        {{"--threads=3", "--verbose"}, NULL},
        {{"--memory=3"}, "option: --memory: needs a --transport other than auto"},
        {{"--transport=auto", "--memory=3"},
         "option: --memory: needs a --transport other than auto"},
        {{"--memory=3", "--transport=tcp"}, NULL},
        {{"--nodes="}, "option: --nodes: needs --nodes"},
        {{"--nodes=a"}, NULL},
        {{"--listen=x"}, NULL},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        char *argv[] = {(char *)calls[i].arguments[0], (char *)calls[i].arguments[1], NULL};
        int argc = argv[1] != NULL ? 2 : 1;

        kv_config_defaults(dependent, &options);
        assert_int_equal(
            kv_config_arguments(dependent, &options, &argc, argv, detail, sizeof(detail)),
            calls[i].says == NULL ? KV_OK : KV_INVALID);
        if (calls[i].says != NULL)
            assert_string_equal(detail, calls[i].says);
    }
    kv_config_defaults(dependent, &options);
    setenv("KVTEST_SEED", "3", 1);
    assert_int_equal(
        kv_config_environment(dependent, &options, "KVTEST", detail, sizeof(detail)), KV_OK);
    setenv("KVTEST_LISTEN", "x", 1);
    assert_int_equal(
        kv_config_environment(dependent, &options, "KVTEST", detail, sizeof(detail)), KV_OK);
    char *argv[] = {"--seed=4", NULL};
    int argc = 1;
    assert_int_equal(
        kv_config_arguments(dependent, &options, &argc, argv, detail, sizeof(detail)), KV_OK);
    unsetenv("KVTEST_SEED");
    unsetenv("KVTEST_LISTEN");
}

/* Texts are neither copied nor bounded, and have no place in a file. */
static void long_texts(void **state)
{
    static char text[1 << 20];
    char *argv[] = {"program", "--nodes", text, NULL};
    int argc = 3;

    (void)state;
    assert_string_equal(options.nodes, "a:1");
    memset(text, 'x', sizeof(text) - 1);
    assert_int_equal(arguments(&argc, argv), KV_OK);
    assert_ptr_equal(options.nodes, text);
    assert_int_equal(one("--nodes"), KV_INVALID);
    assert_string_equal(detail, "option: needs a value: --nodes");
    setenv("KVTEST_NODES", "b:1\tc:1", 1);
    assert_int_equal(kv_config_environment(rows, &options, "KVTEST", detail, sizeof(detail)),
                     KV_OK);
    assert_string_equal(options.nodes, "b:1\tc:1");
    unsetenv("KVTEST_NODES");
    assert_int_equal(file_text("nodes = a:1\n"), KV_INVALID);
    assert_string_equal(detail, "config: FILE:1: not an option of files: nodes");
}

static void files(void **state)
{
    (void)state;
    assert_int_equal(file_text("# a comment\n\n  threads = 5 # five\r\nmemory-max=3G\n"
                               "\tverbose\t=\tyes\nlisten = \" a#\\\"\\\\b \" # quoted\n"
                               "transport = shm"),
                     KV_OK);
    assert_int_equal(options.threads, 5);
    assert_int_equal(options.memory, 3ull << 30);
    assert_true(options.verbose);
    assert_string_equal(options.listen, " a#\"\\b ");
    assert_string_equal(options.transport, "shm");
    assert_int_equal(file_text("listen = a#b c#d #e\n"), KV_OK);
    assert_string_equal(options.listen, "a#b c#d");
    assert_int_equal(file_text("listen =\n"), KV_OK);
    assert_string_equal(options.listen, "");
    assert_int_equal(file_text(""), KV_OK);
}

static void errors_of_files(void **state)
{
    static const struct {
        const char *text, *detail;
    } cases[] = {
        {"\n\nfrob = 1\n", "config: FILE:3: unknown option: frob"},
        {"threads = x\n", "config: FILE:1: threads: not a number: x"},
        {"threads\n", "config: FILE:1: not `name = value`: threads"},
        {"threads 5\n", "config: FILE:1: not `name = value`: threads 5"},
        {"= 5\n", "config: FILE:1: not `name = value`: = 5"},
        {"threads = 5 6\n", "config: FILE:1: threads: not a number: 5 6"},
        {"threads =\n", "config: FILE:1: threads: not a number: "},
        {"verbose = 1\n", "config: FILE:1: verbose: not yes or no: 1"},
        {"listen = \"a\n", "config: FILE:1: quotes do not match: listen"},
        {"listen = \"a\\\n", "config: FILE:1: quotes do not match: listen"},
        {"listen = \"a\" b\n", "config: FILE:1: quotes do not match: listen"},
    };
    char text[5000];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(file_text(cases[i].text), KV_INVALID);
        assert_string_equal(detail, cases[i].detail);
    }
    memset(text, '#', sizeof(text));
    assert_int_equal(file(text, sizeof(text)), KV_INVALID);
    assert_string_equal(detail, "config: FILE:1: too long, or not text");
    assert_int_equal(file("threads = 3\n\0\n\n", 15), KV_INVALID);
    assert_string_equal(detail, "config: FILE:2: too long, or not text");
    assert_int_equal(
        kv_config_file(rows, &options, "/nonexistent/file", detail, sizeof(detail)),
        KV_NOT_FOUND);
    assert_string_equal(detail, "config: /nonexistent/file: No such file or directory");
    assert_int_equal(kv_config_file(rows, &options, "/", detail, sizeof(detail)), KV_IO);
}

static void environment(void **state)
{
    (void)state;
    setenv("KVTEST_MEMORY_MAX", "5M", 1);
    setenv("KVTEST_VERBOSE", "yes", 1);
    assert_int_equal(kv_config_environment(rows, &options, "KVTEST", detail, sizeof(detail)),
                     KV_OK);
    assert_int_equal(options.memory, 5 << 20);
    assert_true(options.verbose);
    /* The command line comes last and wins. */
    assert_int_equal(one("--memory-max=6M"), KV_OK);
    assert_int_equal(options.memory, 6 << 20);
    setenv("KVTEST_THREADS", "many", 1);
    assert_int_equal(kv_config_environment(rows, &options, "KVTEST", detail, sizeof(detail)),
                     KV_INVALID);
    assert_string_equal(detail, "environment: KVTEST_THREADS: not a number: many");
    unsetenv("KVTEST_MEMORY_MAX");
    unsetenv("KVTEST_VERBOSE");
    unsetenv("KVTEST_THREADS");
}

static void parse_size(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"0", 0},
        {"1", 1},
        {"512M", 512ull << 20},
        {"1.5G", 3ull << 29},
        {"1.5g", 3ull << 29},
        {"4k", 4096},
        {"0.5K", 512},
        {"0.001K", 1},
        {"007", 7},
        {"2T", 2ull << 40},
        {"1.25P", 5ull << 48},
        {"15.999999999E", 0xffffffffbb47d000},
        {"15E", 15ull << 60},
        {"17179869183G", 17179869183ull << 30},
        {"18446744073709551615", UINT64_MAX},
    };
    static const char *const bad[] = {
        "",
        " ",
        "-1",
        "+1",
        "1 ",
        " 1",
        "G",
        "1X",
        "1GB",
        "1.5",
        "1.",
        "1.K",
        ".5K",
        "1.5.5K",
        "0x10",
        "1e3",
        "1KK",
        "1,5G",
        "99999999999G",
        "17179869184G",
        "16E",
        "1.0000000000K",
        "18446744073709551616",
        "99999999999999999999999999",
        "18446744073709551615K",
        "NaN",
    };
    uint64_t bytes;

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_true(kv_config_parse_size(good[i].text, &bytes));
        if (good[i].bytes >> 60 == 15 && strchr(good[i].text, '.') != NULL)
            assert_true(bytes > 15ull << 60); /* as exact as nine digits are */
        else
            assert_true(bytes == good[i].bytes);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        bytes = 12345;
        assert_false(kv_config_parse_size(bad[i], &bytes));
        assert_int_equal(bytes, 12345);
    }
}

static void format_size(void **state)
{
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {
        {0, "0"},
        {1023, "1023"},
        {1024, "1K"},
        {1536, "1.5K"},
        {1025, "1.001K"},
        {10 * 1024 + 1, "10K"},
        {1048575, "1024K"},
        {512ull << 20, "512M"},
        {3ull << 29, "1.5G"},
        {1023ull << 20, "1023M"},
        {(1ull << 30) - 1, "1G"},
        {(1ull << 40) - 1, "1T"},
        {UINT64_MAX, "16E"},
    };
    struct kv_random random;
    char text[32];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        kv_config_format_size(cases[i].bytes, text, sizeof(text));
        if (cases[i].bytes == 1048575) /* rounds up to the next unit */
            assert_string_equal(text, "1M");
        else
            assert_string_equal(text, cases[i].text);
    }
    kv_random_init(&random, 1);
    for (int i = 0; i < 100000; i++) {
        uint64_t bytes = kv_random_next(&random) >> (4 + i % 60), back;
        size_t digits = 0;

        kv_config_format_size(bytes, text, sizeof(text));
        for (const char *at = text; *at != '\0'; at++)
            digits += *at >= '0' && *at <= '9';
        assert_in_range(digits, 1, 4);
        assert_true(kv_config_parse_size(text, &back));
        assert_true((back > bytes ? back - bytes : bytes - back) <= bytes / 1000);
    }
    assert_string_equal(kv_config_format_size(1536, text, 4), "1.5");
}

static void print_reads_back(void **state)
{
    static const char *const strings[] = {
        "",           "plain",   " blank ", "a # b", "#",   "\"",           "\\",
        "\"quoted\"", "a\"b\\c", "a b",     "=",     "x#y", "\\\\\"\"##  ", "\x7f\xc3\xa9",
    };
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 1);
    for (int i = 0; i < 300; i++) {
        struct options before;
        char *text = NULL;
        size_t bytes = 0;
        FILE *out = open_memstream(&text, &bytes);

        assert_non_null(out);
        if (i < 14)
            strcpy(options.listen, strings[i]);
        else { /* any bytes that a string may have */
            size_t n = kv_random_below(&random, KV_CONFIG_STRING_BYTES);

            for (size_t j = 0; j < n; j++)
                options.listen[j] = (char)(' ' + kv_random_below(&random, i % 2 ? 4 : 224));
            options.listen[n] = '\0';
        }
        options.memory = (1 << 20) + kv_random_next(&random) % ((1ull << 40) - (1 << 20));
        if (i % 3 == 0)
            options.memory &= ~((1ull << 20) - 1);
        options.threads = 1 + kv_random_below(&random, 64);
        options.seed = kv_random_next(&random);
        options.verbose = i % 2 == 0;
        before = options;
        kv_config_print(rows, &options, out);
        fclose(out);
        kv_config_defaults(rows, &options);
        assert_int_equal(file(text, bytes), KV_OK);
        assert_string_equal(options.listen, before.listen);
        assert_string_equal(options.transport, before.transport);
        assert_true(options.memory == before.memory && options.seed == before.seed);
        assert_int_equal(options.threads, before.threads);
        assert_int_equal(options.verbose, before.verbose);
        free(text);
    }
}

/* A value that is out of its bounds, 0 for "not set", is printed as a comment. */
static void print_unset(void **state)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);

    (void)state;
    assert_non_null(out);
    options.threads = 0;
    options.transport[0] = '\0';
    kv_config_print(rows, &options, out);
    fclose(out);
    assert_non_null(strstr(text, "# data threads\n# threads = 0\n"));
    assert_non_null(strstr(text, "\n# transport = \"\"\n"));
    assert_int_equal(file(text, bytes), KV_OK);
    free(text);
}

static void help(void **state)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);

    (void)state;
    assert_non_null(out);
    kv_config_help(rows, out);
    fclose(out);
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n"))
        assert_in_range(strlen(line), 1, 80);
    free(text);
    text = NULL;
    out = open_memstream(&text, &bytes);
    assert_non_null(out);
    kv_config_help(rows, out);
    fclose(out);
    assert_non_null(strstr(text, "  --threads N "));
    assert_non_null(strstr(text, "(default: 127.0.0.1:7440)\n"));
    assert_non_null(strstr(text, "  --transport auto|tcp|shm "));
    assert_non_null(strstr(text, "  --memory-max SIZE "));
    assert_non_null(strstr(text, "  --listen HOST:PORT "));
    assert_non_null(strstr(text, "\nSIZE: a number of bytes, or "));
    assert_non_null(strstr(text, "say more\n"));
    assert_null(strstr(text, "workers"));
    free(text);
}

/* Whatever was read, and whether or not it was refused: every value is one that its row allows.
 */
static void assert_allowed(void)
{
    for (const char *at = options.listen; *at != '\0'; at++)
        assert_true((unsigned char)*at >= ' ' && *at != '\x7f');
    assert_true(strlen(options.listen) < sizeof(options.listen));
    assert_true(strcmp(options.transport, "auto") == 0 ||
                strcmp(options.transport, "tcp") == 0 || strcmp(options.transport, "shm") == 0);
    assert_true(options.memory >= 1 << 20 && options.memory <= 1ull << 40);
    assert_in_range(options.threads, 1, 64);
    assert_in_range(*(const unsigned char *)&options.verbose, 0, 1);
}

/* What is refused is KV_INVALID and says where: what was read before it stays read. */
static void assert_told(kv_status_t status, const char *where)
{
    if (status == KV_OK)
        return;
    assert_int_equal(status, KV_INVALID);
    assert_memory_equal(detail, where, strlen(where));
    assert_non_null(memchr(detail, '\0', sizeof(detail)));
}

static void random_input(void **state)
{
    static const char letters[] = "threads=memory-listen \t\"\\#\n\n0123456789GKM.=yesno--";
    static const char *const lines[] = {"threads",       "= 7\n",        "--threads=3\n",
                                        "verbose=yes\n", "# text\n",     "memory-max = 1.5G\n",
                                        "listen=",       "\"a b\"\n",    "\n",
                                        "--listen=x\n",  "transport = ", "tcp\n"};
    unsigned n_read[2] = {0}, n_refused[2] = {0};
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 3);
    for (int i = 0; i < 6000; i++) {
        char text[200] = "", *argv[6] = {NULL};
        size_t n = kv_random_below(&random, sizeof(text) - 1);
        kv_status_t status;
        int argc = 0;

        if (i % 2 == 0)
            for (size_t j = 0; j < n; j++)
                text[j] = i % 4 == 0 ? (char)kv_random_next(&random)
                                     : letters[kv_random_below(&random, sizeof(letters) - 1)];
        else
            for (unsigned j = 0; j < 1 + (unsigned)i % 5; j++)
                strcat(text, lines[kv_random_below(&random, sizeof(lines) / sizeof(lines[0]))]);
        if (i % 2 == 1)
            n = strlen(text);
        status = file(text, n);
        assert_told(status, "config: FILE:");
        assert_allowed();
        n_read[0] += status == KV_OK;
        n_refused[0] += status != KV_OK;
        text[n] = '\0';
        for (char *at = strtok(text, "\n"); at != NULL && argc < 5; at = strtok(NULL, "\n"))
            argv[argc++] = at;
        status = arguments(&argc, argv);
        assert_told(status, "option: ");
        assert_allowed();
        n_read[1] += status == KV_OK;
        n_refused[1] += status != KV_OK;
        kv_config_defaults(rows, &options);
    }
    print_message("files: %u read, %u refused; arguments: %u, %u\n", n_read[0], n_refused[0],
                  n_read[1], n_refused[1]);
    for (unsigned i = 0; i < 2; i++)
        assert_true(n_read[i] > 100 && n_refused[i] > 100);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(defaults),     TEST(command_line),     TEST(errors_of_arguments),
        TEST(files),        TEST(long_strings),     TEST(errors_of_files),
        TEST(environment),  TEST(parse_size),       TEST(format_size),
        TEST(help),         TEST(print_reads_back), TEST(print_unset),
        TEST(random_input), TEST(long_texts),       TEST(needs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
