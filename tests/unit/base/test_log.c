/* Lines are whole whoever writes them, cut at 1024 bytes, one line each; what is repeated is
 * counted and not written. */
#include "kvserver/base/clock.h"
#include "kvserver/base/log.h"
#include "kvserver/base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#include <cmocka.h>

static struct {
    int lines;
    enum kv_log_level level;
    char last[2048];
} sunk;

static void sink(void *arg, enum kv_log_level level, const char *line)
{
    assert_ptr_equal(arg, &sunk);
    sunk.lines++;
    sunk.level = level;
    snprintf(sunk.last, sizeof(sunk.last), "%s", line);
}

static int setup(void **state)
{
    (void)state;
    memset(&sunk, 0, sizeof(sunk));
    kv_log_set_program("test");
    kv_log_set_level(KV_LOG_INFO);
    kv_log_set_sink(sink, &sunk);
    return 0;
}

static void levels(void **state)
{
    (void)state;
    kv_log(KV_LOG_DEBUG, "disk: %d", 1);
    assert_int_equal(sunk.lines, 0);
    kv_log(KV_LOG_INFO, "disk: %d", 2);
    assert_string_equal(sunk.last, "test: disk: 2");
    assert_int_equal(sunk.level, KV_LOG_INFO);
    kv_log_set_level(KV_LOG_ERROR);
    kv_log(KV_LOG_WARN, "disk: %d", 3);
    assert_int_equal(sunk.lines, 1);
    kv_log(KV_LOG_ERROR, "disk: %d", 4);
    assert_int_equal(sunk.lines, 2);
    errno = ENOENT;
    kv_log(KV_LOG_ERROR, "disk: %m");
    assert_string_equal(sunk.last, "test: disk: No such file or directory");
    assert_int_equal(errno, ENOENT);
}

static void controls_and_length(void **state)
{
    char text[3000];

    (void)state;
    kv_log(KV_LOG_INFO, "name: %s", "a\nb\033[2Jc\r\x7f");
    assert_string_equal(sunk.last, "test: name: a b [2Jc  ");
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    kv_log(KV_LOG_INFO, "%s", text);
    assert_in_range(strlen(sunk.last), 1000, 1023);
    /* No character of this locale: printf fails, the log does not. */
    kv_log(KV_LOG_INFO, "euro: %lc", (wint_t)0x20ac);
    assert_string_equal(sunk.last, "test: log: cannot be formatted: euro: %lc");
    assert_int_equal(sunk.lines, 3);
}

static void limited(void **state)
{
    struct kv_log_limit limit = {0};
    char text[1500];

    (void)state;
    for (int i = 0; i < 100; i++)
        kv_log_limited(&limit, KV_LOG_WARN, "peer: bad message %d", i);
    assert_int_equal(sunk.lines, 1);
    assert_string_equal(sunk.last, "test: peer: bad message 0");
    assert_int_equal(limit.suppressed, 99);
    /* As if 11 s had passed. */
    limit.last_us = kv_clock_now(&kv_clock_real) - 11 * 1000 * 1000;
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    kv_log_limited(&limit, KV_LOG_WARN, "%s", text);
    assert_int_equal(sunk.lines, 2);
    assert_non_null(strstr(sunk.last, "x (99 more left out)"));
    assert_true(strlen(sunk.last) <= 1023);
    assert_int_equal(limit.suppressed, 0);
    for (int i = 0; i < 10; i++)
        KV_LOG_EVERY(KV_LOG_WARN, "peer: again %d", i);
    assert_int_equal(sunk.lines, 3);
    kv_log_limited(&limit, KV_LOG_DEBUG, "not counted");
    assert_int_equal(limit.suppressed, 0);
}

static struct kv_log_limit shared_limit;

static void write_lines(void *arg)
{
    char text[901];

    memset(text, *(char *)arg, sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    for (int i = 0; i < 200; i++) {
        kv_log(KV_LOG_INFO, "%s", text);
        kv_log_limited(&shared_limit, KV_LOG_INFO, "%s", text);
    }
}

static void whole_lines(void **state)
{
    enum {
        THREADS = 4
    };
    struct kv_thread *threads[THREADS];
    char letters[THREADS] = {'a', 'b', 'c', 'd'}, line[2048];
    int lines = 0, saved = dup(STDERR_FILENO);
    FILE *file = tmpfile();

    (void)state;
    assert_non_null(file);
    kv_log_set_sink(NULL, NULL);
    /* O_APPEND, as a log file would be opened. */
    assert_int_equal(fcntl(fileno(file), F_SETFL, O_APPEND), 0);
    assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(kv_thread_start("log", write_lines, &letters[i], &threads[i]), KV_OK);
    for (int i = 0; i < THREADS; i++)
        kv_thread_join(threads[i]);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    rewind(file);
    while (fgets(line, sizeof(line), file) != NULL) {
        assert_int_equal(strlen(line), strlen("test: ") + 900 + 1);
        assert_memory_equal(line, "test: ", 6);
        assert_int_equal(strspn(line + 6, (char[]){line[6], '\0'}), 900);
        lines++;
    }
    assert_int_equal(lines, THREADS * 200 + 1);
    assert_int_equal(shared_limit.suppressed, THREADS * 200 - 1);
    fclose(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(levels, setup),
        cmocka_unit_test_setup(controls_and_length, setup),
        cmocka_unit_test_setup(limited, setup),
        cmocka_unit_test_setup(whole_lines, setup),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
