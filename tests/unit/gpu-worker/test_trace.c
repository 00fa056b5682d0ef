/* What a trace file holds, byte for byte where it is short, and that a JSON parser reads it:
 * Python's, where there is one. */
#include "gpu-worker/base/trace.h"

#include "kvserver/base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[64];
static unsigned n_logged;
static char logged[256];

static void take_line(void *arg, enum kv_log_level level, const char *line)
{
    (void)arg;
    (void)level;
    n_logged++;
    snprintf(logged, sizeof(logged), "%s", line);
}

static int set_up(void **state)
{
    int file;

    (void)state;
    snprintf(path, sizeof(path), "/tmp/kv_trace_XXXXXX");
    file = mkstemp(path);
    assert_true(file >= 0);
    close(file);
    n_logged = 0;
    kv_log_set_sink(take_line, NULL);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kv_log_set_sink(NULL, NULL);
    unlink(path);
    return 0;
}

static struct kvw_trace *open_trace(void)
{
    struct kvw_trace *trace;

    assert_int_equal(kvw_trace_open(path, &trace), KV_OK);
    return trace;
}

/* The file's text, to be freed. */
static char *read_trace(void)
{
    FILE *file = fopen(path, "r");
    char *text = NULL;
    long bytes;

    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    bytes = ftell(file);
    rewind(file);
    assert_true(bytes >= 0);
    text = calloc(1, (size_t)bytes + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)bytes, file), bytes);
    fclose(file);
    return text;
}

/* Runs Python lines that see `events`.  true: they went well, or there is no Python. */
static bool python_says(const char *lines)
{
    char command[2048];

    if (system("python3 -c 'import json' 2>/dev/null") != 0) {
        print_message("no python3: the file is not parsed\n");
        return true;
    }
    snprintf(command, sizeof(command),
             "python3 -c 'import json\nevents = json.load(open(\"%s\"))\n%s'", path, lines);
    return system(command) == 0;
}

static void spans(void **state)
{
    struct kvw_trace *trace = open_trace();
    char *text;

    (void)state;
    kvw_trace_span(trace, KVW_TRACE_COMPUTE, "layer", 1000, 1250, NULL, 0);
    kvw_trace_span(trace, KVW_TRACE_QUERY, "a \"name\"\n", 1100, 1600,
                   (struct kvw_trace_arg[]){{"layer", 3}, {"rows", 1ll << 40}, {"x", -1}}, 3);
    kvw_trace_span(trace, KVW_TRACE_QUERY, "next", 1600, 1500, NULL, 0);
    kvw_trace_span(NULL, KVW_TRACE_QUERY, "nobody", 0, 1, NULL, 0);
    assert_int_equal(kvw_trace_close(trace), KV_OK);
    assert_int_equal(kvw_trace_close(NULL), KV_OK);
    text = read_trace();
    assert_string_equal(
        text, "[\n"
              "{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": 1, \"tid\": 0, "
              "\"args\": {\"name\": \"kvworker\"}}\n"
              ",{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": 1, \"tid\": 1, "
              "\"args\": {\"name\": \"compute\"}}\n"
              ",{\"name\": \"layer\", \"cat\": \"compute\", \"ph\": \"X\", \"pid\": 1, "
              "\"tid\": 1, \"ts\": 1000, \"dur\": 250}\n"
              ",{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": 1, \"tid\": 49, "
              "\"args\": {\"name\": \"query\"}}\n"
              ",{\"name\": \"a \\\"name\\\"\\u000a\", \"cat\": \"query\", \"ph\": \"X\", "
              "\"pid\": 1, \"tid\": 49, \"ts\": 1100, \"dur\": 500, "
              "\"args\": {\"layer\": 3, \"rows\": 1099511627776, \"x\": -1}}\n"
              ",{\"name\": \"next\", \"cat\": \"query\", \"ph\": \"X\", \"pid\": 1, "
              "\"tid\": 49, \"ts\": 1600, \"dur\": 0}\n"
              "]\n");
    free(text);
    assert_true(python_says("assert len(events) == 6\n"
                            "assert events[4][\"args\"][\"rows\"] == 2 ** 40\n"));
    assert_int_equal(n_logged, 0);
}

static void nothing(void **state)
{
    (void)state;
    assert_int_equal(kvw_trace_close(open_trace()), KV_OK);
    assert_true(python_says("assert len(events) == 1\n"));
}

/* What overlaps is on lanes of its own, however much there is of it; more than the buffer
 * holds. */
static void overlaps(void **state)
{
    struct kvw_trace *trace = open_trace();

    (void)state;
    for (unsigned i = 0; i < 5000; i++) {
        uint64_t begin_us = (uint64_t)i * 10;

        kvw_trace_span(trace, KVW_TRACE_FETCH, "fetch", begin_us, begin_us + 35,
                       (struct kvw_trace_arg[]){{"layer", i % 30}}, 1);
        kvw_trace_span(trace, KVW_TRACE_PUT, "put", begin_us, begin_us + 1000, NULL, 0);
        kvw_trace_span(trace, KVW_TRACE_WAIT, "inner", begin_us + 2, begin_us + 8, NULL, 0);
        kvw_trace_span(trace, KVW_TRACE_WAIT, "outer", begin_us, begin_us + 10, NULL, 0);
    }
    assert_int_equal(kvw_trace_close(trace), KV_OK);
    assert_true(python_says(
        "spans = [e for e in events if e[\"ph\"] == \"X\"]\n"
        "names = {e[\"tid\"]: e[\"args\"][\"name\"] for e in events if e[\"ph\"] == \"M\"}\n"
        "assert len(spans) == 20000\n"
        "assert all(e[\"tid\"] in names for e in spans)\n"
        "lanes = {}\n"
        "for e in spans:\n"
        "    lanes.setdefault(names[e[\"tid\"]], []).append(e)\n"
        "fetch = [l for l in lanes if l.startswith(\"fetch\")]\n"
        "assert sorted(fetch) == [\"fetch\", \"fetch 2\", \"fetch 3\", \"fetch 4\"], fetch\n"
        "for l in fetch:\n"
        "    for a, b in zip(lanes[l], lanes[l][1:]):\n"
        "        assert a[\"ts\"] + a[\"dur\"] <= b[\"ts\"]\n"
        "assert len([l for l in lanes if l.startswith(\"put\")]) == 16\n"
        "assert len(lanes[\"wait\"]) == 10000\n"));
}

/* A disk that is full is told of once. */
static void full_disk(void **state)
{
    struct kvw_trace *trace;

    (void)state;
    assert_int_equal(kvw_trace_open("/nowhere/at/all", &trace), KV_IO);
    assert_int_equal(n_logged, 0);
    if (access("/dev/full", W_OK) != 0)
        skip();
    assert_int_equal(kvw_trace_open("/dev/full", &trace), KV_OK);
    for (unsigned i = 0; i < 5000; i++)
        kvw_trace_span(trace, KVW_TRACE_FETCH, "fetch", i, i + 1, NULL, 0);
    assert_int_equal(kvw_trace_close(trace), KV_IO);
    assert_int_equal(n_logged, 1);
    assert_non_null(strstr(logged, "trace: /dev/full: No space left"));
    /* What is found out only at the end. */
    assert_int_equal(kvw_trace_open("/dev/full", &trace), KV_OK);
    assert_int_equal(kvw_trace_close(trace), KV_IO);
    assert_int_equal(n_logged, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(spans, set_up, tear_down),
        cmocka_unit_test_setup_teardown(nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(overlaps, set_up, tear_down),
        cmocka_unit_test_setup_teardown(full_disk, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
