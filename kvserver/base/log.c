#include "kvserver/base/log.h"
#include "kvserver/base/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    LINE_BYTES = 1024, /* with the newline; a pipe takes as much in one piece */
    QUIET_US = 10 * 1000 * 1000,
};

static const char *log_program = "topkv";
static enum kv_log_level log_level = KV_LOG_INFO;
static kv_log_fn log_sink;
static void *log_sink_arg;

void kv_log_set_program(const char *name)
{
    log_program = name;
}

void kv_log_set_level(enum kv_log_level level)
{
    log_level = level;
}

void kv_log_set_sink(kv_log_fn sink, void *arg)
{
    log_sink = sink;
    log_sink_arg = arg;
}

/* The line may have a peer's text, which must not start another line or control a terminal. */
static void blank_controls(char *line)
{
    for (; *line != '\0'; line++)
        if ((unsigned char)*line < ' ' || *line == 0x7f)
            *line = ' ';
}

static void
log_line(enum kv_log_level level, uint64_t left_out, const char *format, va_list arguments)
{
    int saved_errno = errno;
    char line[LINE_BYTES], tail[48] = "";
    size_t tail_bytes, bytes, end;

    if (left_out > 0)
        snprintf(tail, sizeof(tail), " (%" PRIu64 " more left out)", left_out);
    tail_bytes = strlen(tail);
    end = sizeof(line) - 1 - tail_bytes; /* room for the tail and the newline or 0 */

    int written = snprintf(line, end, "%s: ", log_program);
    bytes = written > 0 ? strnlen(line, end) : 0;
    errno = saved_errno; /* the format may hold %m */
    written = vsnprintf(line + bytes, end - bytes, format, arguments);
    if (written < 0)
        snprintf(line + bytes, end - bytes, "log: cannot be formatted: %s", format);
    bytes += strnlen(line + bytes, end - bytes);
    memcpy(line + bytes, tail, tail_bytes + 1);
    bytes += tail_bytes;
    blank_controls(line);

    if (log_sink != NULL) {
        log_sink(log_sink_arg, level, line);
    } else {
        line[bytes++] = '\n';
        /* An error on stderr cannot be reported. */
        while (write(STDERR_FILENO, line, bytes) < 0 && errno == EINTR)
            ;
    }
    errno = saved_errno;
}

void kv_log(enum kv_log_level level, const char *format, ...)
{
    va_list arguments;

    if (level > log_level)
        return;
    va_start(arguments, format);
    log_line(level, 0, format, arguments);
    va_end(arguments);
}

void kv_log_limited(struct kv_log_limit *limit,
                    enum kv_log_level level,
                    const char *format,
                    ...)
{
    va_list arguments;

    if (level > log_level)
        return;

    uint64_t now = kv_clock_now(&kv_clock_real) | 1; /* 0 is "never" */
    uint64_t last = atomic_load_explicit(&limit->last_us, memory_order_relaxed);

    /* Of threads that come at once, the one that moves last_us writes.  A `last` that is later
     * than `now` was set just now by another thread. */
    if ((last != 0 && (now < last || now - last < QUIET_US)) ||
        !atomic_compare_exchange_strong(&limit->last_us, &last, now)) {
        atomic_fetch_add_explicit(&limit->suppressed, 1, memory_order_relaxed);
        return;
    }
    va_start(arguments, format);
    log_line(level, atomic_exchange(&limit->suppressed, 0), format, arguments);
    va_end(arguments);
}
