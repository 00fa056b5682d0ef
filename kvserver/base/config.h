/* config.h - tables of options: command line, file, environment, --help, --print-config.
 *
 * A kv_option has a name, its default as the user would type it, help, an offset into the
 * options struct, and a type.  Precedence: command line, environment (PREFIX_NAME, upper case,
 * - becomes _), configuration file (`name = value`, # begins a comment), default.
 *
 * Threads: startup only.  Memory: strings are copied into arrays of the options struct; texts
 * of any length are not copied.
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
    KV_CONFIG_TEXT,   /* const char *: the argument, environment variable or default itself, of
                       * any length; NULL: not given.  No file has it. */
};

struct kv_option {
    const char *name;         /* without the leading --; NULL ends the table */
    const char *default_text; /* NULL or "": 0, no, empty; the bounds do not apply */
    const char *help;         /* NULL: an old name, accepted and not shown */
    size_t offset;
    enum kv_config_type type;
    uint64_t min, max;   /* numbers: bounds, both allowed; max 0: none */
    const char *choices; /* strings: "auto|tcp|shm", or NULL for any */
    const char *value;   /* what help calls the value, "FILE"; NULL: as type and choices say */
    /* A text or flag of the table without which this one does nothing: given as an argument, it
     * is refused unless that one differs from its default.  From file and environment it is
     * not: they serve many calls.  NULL: none. */
    const char *needs;
};

/* Fills `options` with the defaults. */
void kv_config_defaults(const struct kv_option *rows, void *options);

/* Removes --name VALUE, --name=VALUE and flags from argv.  Moves the rest (operands, and the
 * program's name if argv is main's) to the front and sets *argc to their number.  "--" ends the
 * options.  Fails with KV_INVALID; `detail` is then `what: where: value`, and `options` may be
 * partly set. */
kv_status_t kv_config_arguments(const struct kv_option *rows,
                                void *options,
                                int *argc,
                                char **argv,
                                char *detail,
                                size_t detail_bytes);

/* Read options from a file and from the environment.  In a file, a value that begins or ends
 * with a blank or contains a # is in double quotes, with \" and \\ for these characters.  Later
 * calls overwrite: call in the order file, environment, command line.  Fail with KV_INVALID,
 * with KV_NOT_FOUND if the file does not exist, and with KV_IO if it cannot be read. */
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

/* Prints `  --name VALUE   help (default: ...)`, wrapped at 80 columns; and what a SIZE is, if
 * an option takes one. */
void kv_config_help(const struct kv_option *rows, FILE *out);

/* Prints a file that kv_config_file() can read: each option with its value, its help as
 * comment. */
void kv_config_print(const struct kv_option *rows, const void *options, FILE *out);

/* Parses "512M".  Returns false if `text` is not a size. */
bool kv_config_parse_size(const char *text, uint64_t *ret_bytes);

/* Formats bytes as "512M" or "1.5G", with at most four digits.  Returns `buffer`. */
const char *kv_config_format_size(uint64_t bytes, char *buffer, size_t buffer_bytes);

#endif
