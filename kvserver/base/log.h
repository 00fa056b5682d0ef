/* log.h - log messages of programs, to stderr or to a callback.
 *
 * A line is `program: what: where: value`.  The kernels and libkvclient never log: they return
 * errors.  Events that a peer can cause repeatedly are counted, and logged by KV_LOG_EVERY
 * only.
 *
 * Threads: any; a line is written whole.  The setters are for startup.
 */
#ifndef KV_KVSERVER_BASE_LOG_H
#define KV_KVSERVER_BASE_LOG_H

#include <stdatomic.h>
#include <stdint.h>

enum kv_log_level {
    KV_LOG_ERROR, /* the program or the operation cannot continue */
    KV_LOG_WARN,  /* it continues; the line says how */
    KV_LOG_INFO,  /* start, stop, configuration in effect */
    KV_LOG_DEBUG, /* per object */
};

typedef void (*kv_log_fn)(void *arg, enum kv_log_level level, const char *line);

void kv_log_set_program(const char *name); /* borrowed for the life of the process */
void kv_log_set_level(enum kv_log_level level);
void kv_log_set_sink(kv_log_fn sink, void *arg); /* NULL: stderr */

void kv_log(enum kv_log_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Logs at most one line per 10 s from each place; a line ends with the number of lines that
 * were suppressed before it. */
struct kv_log_limit {
    _Atomic uint64_t last_us;
    _Atomic uint64_t suppressed;
};
void kv_log_limited(struct kv_log_limit *limit,
                    enum kv_log_level level,
                    const char *format,
                    ...) __attribute__((format(printf, 3, 4)));

#define KV_LOG_EVERY(level, ...)                                \
    do {                                                        \
        static struct kv_log_limit kv_log_limit_here;           \
        kv_log_limited(&kv_log_limit_here, level, __VA_ARGS__); \
    } while (0)

#endif
