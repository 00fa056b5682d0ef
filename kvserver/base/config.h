/* config.h - options as a table: command line, file, environment, --help, --print-config.
 *
 * A row is {name, default as the user would type it, help, offset into the options struct,
 * type}. Order of precedence: command line, environment (PREFIX_NAME, upper case, - becomes _),
 * configuration file (`name = value`, # begins a comment), default.
 *
 * Threads: start-up only.  Memory: strings are copied into the options struct's own arrays.
 */
#ifndef KV_KVSERVER_BASE_CONFIG_H
#define KV_KVSERVER_BASE_CONFIG_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
    KV_CONFIG_STRING_BYTES = 512
};

enum kv_config_type {
    KV_CONFIG_STRING, /* char[KV_CONFIG_STRING_BYTES] */
    KV_CONFIG_SIZE,   /* uint64_t: bytes; K, M, G, T, P, E are binary; "1.5G" */
    KV_CONFIG_UINT,   /* uint64_t */
    KV_CONFIG_FLAG,   /* bool: present or not; in a file yes or no */
};

struct kv_option {
    const char *name;         /* without the leading --; NULL ends the table */
    const char *default_text; /* NULL or "": 0, no, empty, whatever the bounds say */
    const char *help;         /* NULL: an old name, accepted and not shown */
    size_t offset;
    enum kv_config_type type;
    uint64_t min, max;   /* numbers: bounds, both allowed; max 0: none */
    const char *choices; /* strings: "auto|tcp|shm", or NULL for any */
};

/* Fills `options` with the defaults. */
void kv_config_defaults(const struct kv_option *rows, void *options);

/* Takes --name VALUE, --name=VALUE and flags out of argv; what is left (operands, and so the
 * program's name where argv is main's) is moved to the front, *argc says how many.  "--" ends
 * options.  KV_INVALID: `detail` is `what: where: value`, `options` may be half filled. */
kv_status_t kv_config_arguments(const struct kv_option *rows,
                                void *options,
                                int *argc,
                                char **argv,
                                char *detail,
                                size_t detail_bytes);

/* The same from a file and from the environment.  In a file, a value that begins or ends with a
 * blank or holds a # stands in double quotes, \" and \\ inside.  KV_NOT_FOUND, KV_IO: no such
 * file, or it cannot be read.  A row that the command line set stays: call in order file,
 * environment, command line. */
kv_status_t kv_config_file(const struct kv_option *rows,
                           void *options,
                           const char *path,
                           char *detail,
                           size_t detail_bytes);
kv_status_t kv_config_environment(const struct kv_option *rows,
                                  void *options,
                                  const char *prefix,
                                  char *detail,
                                  size_t detail_bytes);

/* `  --name VALUE   help (default: ...)`, wrapped at 96 columns. */
void kv_config_help(const struct kv_option *rows, FILE *out);

/* A file that kv_config_file() reads back: every row with its value, its help as comment. */
void kv_config_print(const struct kv_option *rows, const void *options, FILE *out);

/* "512M" -> bytes.  false: not a size. */
bool kv_config_parse_size(const char *text, uint64_t *ret_bytes);

/* bytes -> "512M", "1.5G": at most four digits. Returns `buffer`. */
const char *kv_config_format_size(uint64_t bytes, char *buffer, size_t buffer_bytes);

#endif
