#include "kvserver/base/config.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum {
    LINE_BYTES = 2048, /* of a file: the longest name and value, each byte escaped, and more */
    WHERE_BYTES = 1024,
    NAME_BYTES = 128, /* of an environment variable */
    HELP_COLUMNS = 80,
    HELP_INDENT_MAX = 30,
    ROWS_MAX = 256, /* of a table */
};

static const char size_units[] = "KMGTPE";

__attribute__((format(printf, 3, 4))) static kv_status_t
refuse(char *detail, size_t detail_bytes, const char *format, ...)
{
    va_list arguments;

    if (detail != NULL && detail_bytes > 0) {
        va_start(arguments, format);
        vsnprintf(detail, detail_bytes, format, arguments);
        va_end(arguments);
    }
    return KV_INVALID;
}

/* Parses digits and advances *text past them.  Returns false if there are none, or too many. */
static bool parse_digits(const char **text, uint64_t *ret_number)
{
    const char *at = *text;
    uint64_t number = 0;

    if (*at < '0' || *at > '9')
        return false;
    for (; *at >= '0' && *at <= '9'; at++)
        if (__builtin_mul_overflow(number, (uint64_t)10, &number) ||
            __builtin_add_overflow(number, (uint64_t)(*at - '0'), &number))
            return false;
    *text = at;
    *ret_number = number;
    return true;
}

static bool parse_uint(const char *text, uint64_t *ret_number)
{
    uint64_t number;

    if (!parse_digits(&text, &number) || *text != '\0')
        return false;
    *ret_number = number;
    return true;
}

bool kv_config_parse_size(const char *text, uint64_t *ret_bytes)
{
    uint64_t whole, fraction = 0, scale = 1, bytes;
    unsigned shift = 0;

    if (!parse_digits(&text, &whole))
        return false;
    if (*text == '.') {
        const char *begin = ++text;

        if (!parse_digits(&text, &fraction) || text - begin > 9)
            return false;
        for (; begin < text; begin++)
            scale *= 10;
        if (*text == '\0')
            return false; /* a fraction of a byte */
    }
    if (*text != '\0') {
        const char *unit = strchr(size_units, toupper((unsigned char)*text));

        if (unit == NULL || text[1] != '\0')
            return false;
        shift = 10 * (unsigned)(unit - size_units + 1);
    }
    if (__builtin_mul_overflow(whole, (uint64_t)1 << shift, &bytes))
        return false;
    /* In two steps, so that 10^9 units of 2^60 do not overflow; what is below a byte is cut. */
    if (shift > 30)
        fraction = (fraction << 30) / scale << (shift - 30);
    else
        fraction = (fraction << shift) / scale;
    if (__builtin_add_overflow(bytes, fraction, &bytes))
        return false;
    *ret_bytes = bytes;
    return true;
}

const char *kv_config_format_size(uint64_t bytes, char *buffer, size_t buffer_bytes)
{
    unsigned unit = 0, decimals = 3, scale = 1000;
    uint64_t whole, part;
    double rest;
    char text[32];

    while (unit < sizeof(size_units) - 1 && bytes >> (10 * unit) >= 1024)
        unit++;
    if (unit == 0) {
        snprintf(buffer, buffer_bytes, "%" PRIu64, bytes);
        return buffer;
    }
    whole = bytes >> (10 * unit);
    rest = (double)(bytes - (whole << (10 * unit))) / (double)((uint64_t)1 << (10 * unit));
    for (uint64_t digits = whole; digits >= 10; digits /= 10, decimals--)
        scale /= 10;
    part = (uint64_t)(rest * scale + 0.5);
    if (part == scale) { /* rounded up to the next whole one */
        whole++;
        part = 0;
    }
    if (whole == 1024 && unit < sizeof(size_units) - 1) {
        whole = 1;
        unit++;
    }
    for (; decimals > 0 && part % 10 == 0; decimals--)
        part /= 10;
    if (decimals > 0)
        snprintf(text, sizeof(text), "%" PRIu64 ".%0*" PRIu64, whole, (int)decimals, part);
    else
        snprintf(text, sizeof(text), "%" PRIu64, whole);
    snprintf(buffer, buffer_bytes, "%s%c", text, size_units[unit - 1]);
    return buffer;
}

static bool is_choice(const char *choices, const char *text)
{
    size_t bytes = strlen(text);

    while (bytes > 0) {
        size_t choice_bytes = strcspn(choices, "|");

        if (choice_bytes == bytes && memcmp(choices, text, bytes) == 0)
            return true;
        if (choices[choice_bytes] == '\0')
            break;
        choices += choice_bytes + 1;
    }
    return false;
}

static kv_status_t set_string(const struct kv_option *option,
                              void *field,
                              const char *text,
                              const char *where,
                              char *detail,
                              size_t detail_bytes)
{
    size_t bytes = strlen(text);

    if (bytes >= KV_CONFIG_STRING_BYTES)
        return refuse(detail, detail_bytes, "%s: longer than %d bytes: %.40s...", where,
                      KV_CONFIG_STRING_BYTES - 1, text);
    /* A file could not hold them. */
    for (const char *at = text; *at != '\0'; at++)
        if ((unsigned char)*at < ' ')
            return refuse(detail, detail_bytes, "%s: has control characters: %s", where, text);
    if (option->choices != NULL && !is_choice(option->choices, text))
        return refuse(detail, detail_bytes, "%s: not one of %s: %s", where, option->choices,
                      text);
    memcpy(field, text, bytes + 1);
    return KV_OK;
}

static kv_status_t set_number(const struct kv_option *option,
                              uint64_t *field,
                              const char *text,
                              const char *where,
                              char *detail,
                              size_t detail_bytes)
{
    bool is_size = option->type == KV_CONFIG_SIZE;
    char min[32], max[32];
    uint64_t number;

    if (is_size ? !kv_config_parse_size(text, &number) : !parse_uint(text, &number))
        return refuse(detail, detail_bytes, "%s: not a %s: %s", where,
                      is_size ? "size such as 512M or 1.5G" : "number", text);
    if (number >= option->min && (option->max == 0 || number <= option->max)) {
        *field = number;
        return KV_OK;
    }
    if (is_size) {
        kv_config_format_size(option->min, min, sizeof(min));
        kv_config_format_size(option->max, max, sizeof(max));
    } else {
        snprintf(min, sizeof(min), "%" PRIu64, option->min);
        snprintf(max, sizeof(max), "%" PRIu64, option->max);
    }
    if (option->max == 0)
        return refuse(detail, detail_bytes, "%s: less than %s: %s", where, min, text);
    return refuse(detail, detail_bytes, "%s: not in %s..%s: %s", where, min, max, text);
}

static kv_status_t
set_flag(bool *field, const char *text, const char *where, char *detail, size_t detail_bytes)
{
    bool yes = strcmp(text, "yes") == 0;

    if (!yes && strcmp(text, "no") != 0)
        return refuse(detail, detail_bytes, "%s: not yes or no: %s", where, text);
    *field = yes;
    return KV_OK;
}

static kv_status_t set(const struct kv_option *option,
                       void *options,
                       const char *text,
                       const char *where,
                       char *detail,
                       size_t detail_bytes)
{
    void *field = (char *)options + option->offset;

    switch (option->type) {
    case KV_CONFIG_STRING:
        return set_string(option, field, text, where, detail, detail_bytes);
    case KV_CONFIG_SIZE:
    case KV_CONFIG_UINT:
        return set_number(option, field, text, where, detail, detail_bytes);
    case KV_CONFIG_FLAG:
        return set_flag(field, text, where, detail, detail_bytes);
    case KV_CONFIG_TEXT:
        *(const char **)field = text;
        return KV_OK;
    }
    return KV_INVALID;
}

static const struct kv_option *
find(const struct kv_option *rows, const char *name, size_t name_bytes)
{
    for (; rows->name != NULL; rows++)
        if (strlen(rows->name) == name_bytes && memcmp(rows->name, name, name_bytes) == 0)
            return rows;
    return NULL;
}

void kv_config_defaults(const struct kv_option *rows, void *options)
{
    for (; rows->name != NULL; rows++) {
        char *field = (char *)options + rows->offset;
        char detail[256] = "";
        kv_status_t status = KV_OK;

        switch (rows->type) {
        case KV_CONFIG_STRING: /* "" may be a default where it is no choice: "not set" */
            *field = '\0';
            break;
        case KV_CONFIG_SIZE:
        case KV_CONFIG_UINT:
            *(uint64_t *)(void *)field = 0;
            break;
        case KV_CONFIG_FLAG:
            *(bool *)field = false;
            break;
        case KV_CONFIG_TEXT:
            *(const char **)(void *)field = NULL;
            break;
        }
        if (rows->default_text != NULL && rows->default_text[0] != '\0')
            status = set(rows, options, rows->default_text, rows->name, detail, sizeof(detail));
        /* An invalid default is a bug. */
        assert(status == KV_OK);
        (void)status;
    }
}

/* Whether an option has another value than its default. */
static bool is_set(const struct kv_option *option, const void *options)
{
    const void *field = (const char *)options + option->offset;
    const char *by_default = option->default_text != NULL ? option->default_text : "";
    const char *text = field;

    if (option->type == KV_CONFIG_FLAG)
        return *(const bool *)field;
    assert(option->type == KV_CONFIG_STRING || option->type == KV_CONFIG_TEXT);
    if (option->type == KV_CONFIG_TEXT)
        text = *(const char *const *)field;
    return text != NULL && text[0] != '\0' && strcmp(text, by_default) != 0;
}

/* Refuses an option that was given and does nothing, since the one that it needs is not set. */
static kv_status_t check_needs(const struct kv_option *rows,
                               const bool *is_given,
                               const void *options,
                               char *detail,
                               size_t detail_bytes)
{
    for (unsigned i = 0; rows[i].name != NULL; i++) {
        const struct kv_option *needed;
        const char *needs = is_given[i] ? rows[i].needs : NULL;

        if (needs == NULL)
            continue;
        needed = find(rows, needs, strlen(needs));
        assert(needed != NULL);
        if (is_set(needed, options))
            continue;
        if (needed->default_text == NULL || needed->default_text[0] == '\0')
            return refuse(detail, detail_bytes, "option: --%s: needs --%s", rows[i].name,
                          needs);
        return refuse(detail, detail_bytes, "option: --%s: needs a --%s other than %s",
                      rows[i].name, needs, needed->default_text);
    }
    return KV_OK;
}

kv_status_t kv_config_arguments(const struct kv_option *rows,
                                void *options,
                                int *argc,
                                char **argv,
                                char *detail,
                                size_t detail_bytes)
{
    bool is_given[ROWS_MAX] = {false};
    int n_left = 0, n = *argc;

    for (int i = 0; i < n; i++) {
        char *argument = argv[i], where[WHERE_BYTES];
        const struct kv_option *option;
        const char *value = NULL;
        size_t name_bytes;
        kv_status_t status;

        if (argument[0] != '-' || argument[1] == '\0') { /* "-" alone is an operand */
            argv[n_left++] = argument;
            continue;
        }
        if (strcmp(argument, "--") == 0) {
            while (++i < n)
                argv[n_left++] = argv[i];
            break;
        }
        name_bytes = strcspn(argument, "=");
        option = argument[1] == '-' ? find(rows, argument + 2, name_bytes - 2) : NULL;
        if (option == NULL)
            return refuse(detail, detail_bytes, "option: unknown: %.*s", (int)name_bytes,
                          argument);
        if (argument[name_bytes] == '=')
            value = argument + name_bytes + 1;
        else if (option->type == KV_CONFIG_FLAG)
            value = "yes";
        else if (i + 1 < n)
            value = argv[++i];
        else
            return refuse(detail, detail_bytes, "option: needs a value: --%s", option->name);
        snprintf(where, sizeof(where), "option: --%s", option->name);
        status = set(option, options, value, where, detail, detail_bytes);
        if (status != KV_OK)
            return status;
        assert(option - rows < ROWS_MAX);
        is_given[option - rows] = true;
    }
    *argc = n_left;
    if (n_left < n)
        argv[n_left] = NULL;
    return check_needs(rows, is_given, options, detail, detail_bytes);
}

static char *skip_blanks(char *at)
{
    while (*at == ' ' || *at == '\t' || *at == '\r')
        at++;
    return at;
}

/* Extracts the value from the rest of a line, in place: up to a comment, or a quoted string
 * with \" and \\ replaced.  Returns NULL if a quote does not end, or something follows it. */
static char *parse_value(char *at)
{
    char *value, *to, *end;

    at = skip_blanks(at);
    value = to = at;
    if (*at != '"') {
        for (end = at;
             *at != '\0' && !(*at == '#' && (at == value || isblank((unsigned char)at[-1])));
             at++)
            if (!isspace((unsigned char)*at))
                end = at + 1;
        *end = '\0';
        return value;
    }
    for (at++; *at != '"'; at++) {
        if (*at == '\\')
            at++;
        if (*at == '\0')
            return NULL;
        *to++ = *at;
    }
    at = skip_blanks(at + 1);
    if (*at != '\0' && *at != '#')
        return NULL;
    *to = '\0';
    return value;
}

static kv_status_t set_line(const struct kv_option *rows,
                            void *options,
                            char *line,
                            const char *place,
                            char *detail,
                            size_t detail_bytes)
{
    char *name = skip_blanks(line), *value, where[2 * WHERE_BYTES];
    size_t name_bytes = strcspn(name, "=# \t\r");
    const struct kv_option *option;

    if (*name == '\0' || *name == '#')
        return KV_OK;
    value = skip_blanks(name + name_bytes);
    if (*value != '=' || name_bytes == 0)
        return refuse(detail, detail_bytes, "%s: not `name = value`: %.60s", place, name);
    option = find(rows, name, name_bytes);
    if (option == NULL)
        return refuse(detail, detail_bytes, "%s: unknown option: %.*s", place,
                      name_bytes < 60 ? (int)name_bytes : 60, name);
    if (option->type == KV_CONFIG_TEXT) /* the line is not kept */
        return refuse(detail, detail_bytes, "%s: not an option of files: %s", place,
                      option->name);
    value = parse_value(value + 1);
    if (value == NULL)
        return refuse(detail, detail_bytes, "%s: quotes do not match: %s", place, option->name);
    snprintf(where, sizeof(where), "%s: %s", place, option->name);
    return set(option, options, value, where, detail, detail_bytes);
}

kv_status_t kv_config_file(const struct kv_option *rows,
                           void *options,
                           const char *path,
                           char *detail,
                           size_t detail_bytes)
{
    char line[LINE_BYTES], place[WHERE_BYTES];
    kv_status_t status = KV_OK;
    FILE *file = fopen(path, "re");

    if (file == NULL) {
        status = errno == ENOENT ? KV_NOT_FOUND : KV_IO;
        refuse(detail, detail_bytes, "config: %s: %s", path, strerror(errno));
        return status;
    }
    for (unsigned number = 1; status == KV_OK && fgets(line, sizeof(line), file) != NULL;
         number++) {
        size_t bytes = strlen(line);

        snprintf(place, sizeof(place), "config: %.800s:%u", path, number);
        if (bytes > 0 && line[bytes - 1] == '\n')
            line[bytes - 1] = '\0';
        else if (!feof(file) || bytes == 0) {
            status = refuse(detail, detail_bytes, "%s: too long, or not text", place);
            break;
        }
        status = set_line(rows, options, line, place, detail, detail_bytes);
    }
    if (status == KV_OK && ferror(file)) {
        refuse(detail, detail_bytes, "config: %s: cannot be read", path);
        status = KV_IO;
    }
    fclose(file);
    return status;
}

kv_status_t kv_config_environment(const struct kv_option *rows,
                                  void *options,
                                  const char *prefix,
                                  char *detail,
                                  size_t detail_bytes)
{
    for (; rows->name != NULL; rows++) {
        char name[NAME_BYTES], where[WHERE_BYTES];
        const char *value;
        kv_status_t status;
        int bytes = snprintf(name, sizeof(name), "%s_%s", prefix, rows->name);

        assert(bytes > 0 && (size_t)bytes < sizeof(name));
        for (char *at = name; *at != '\0'; at++)
            *at = *at == '-' ? '_' : (char)toupper((unsigned char)*at);
        value = getenv(name);
        if (value == NULL)
            continue;
        snprintf(where, sizeof(where), "environment: %s", name);
        status = set(rows, options, value, where, detail, detail_bytes);
        if (status != KV_OK)
            return status;
    }
    return KV_OK;
}

/* Prints one word after `column`, on a new line if it does not fit: that begins with `lead` and
 * blanks up to `indent`.  Returns the column after the word. */
static size_t put_word(
    FILE *out, const char *word, size_t bytes, size_t column, const char *lead, size_t indent)
{
    if (column > indent && column + 1 + bytes > HELP_COLUMNS) {
        fprintf(out, "\n%-*s", (int)indent, lead);
        column = indent;
    } else if (column > indent) {
        fputc(' ', out);
        column++;
    }
    fwrite(word, 1, bytes, out);
    return column + bytes;
}

/* Prints words that are separated by blanks.  Returns the column after the last. */
static size_t wrap(FILE *out, const char *words, size_t column, const char *lead, size_t indent)
{
    while (*words != '\0') {
        size_t bytes = strcspn(words, " ");

        column = put_word(out, words, bytes, column, lead, indent);
        words += bytes;
        words += strspn(words, " ");
    }
    return column;
}

static const char *value_word(const struct kv_option *option)
{
    if (option->value != NULL)
        return option->value;
    switch (option->type) {
    case KV_CONFIG_STRING:
    case KV_CONFIG_TEXT:
        return option->choices != NULL ? option->choices : "TEXT";
    case KV_CONFIG_SIZE:
        return "SIZE";
    case KV_CONFIG_UINT:
        return "N";
    case KV_CONFIG_FLAG:
        break;
    }
    return "";
}

static size_t option_columns(const struct kv_option *option)
{
    size_t value = strlen(value_word(option));

    return strlen("  --") + strlen(option->name) + (value > 0 ? 1 + value : 0);
}

void kv_config_help(const struct kv_option *rows, FILE *out)
{
    bool has_size = false;
    size_t indent = 0;

    for (const struct kv_option *option = rows; option->name != NULL; option++) {
        size_t columns = option_columns(option) + 3;

        if (option->help != NULL && columns > indent && columns <= HELP_INDENT_MAX)
            indent = columns;
    }
    for (; rows->name != NULL; rows++) {
        const char *value = value_word(rows);
        size_t column = option_columns(rows);

        if (rows->help == NULL)
            continue;
        has_size = has_size || rows->type == KV_CONFIG_SIZE;
        fprintf(out, "  --%s%s%s", rows->name, *value != '\0' ? " " : "", value);
        if (column + 2 >
            indent) { /* too long for its column: the help begins on the next line */
            fputc('\n', out);
            column = 0;
        }
        fprintf(out, "%*s", (int)(indent - column), "");
        column = wrap(out, rows->help, indent, "", indent);
        if (rows->type != KV_CONFIG_FLAG && rows->default_text != NULL &&
            rows->default_text[0] != '\0') {
            char text[KV_CONFIG_STRING_BYTES + 16];

            snprintf(text, sizeof(text), "(default: %s)", rows->default_text);
            put_word(out, text, strlen(text), column, "", indent);
        }
        fputc('\n', out);
    }
    if (has_size)
        fputs(
            "\nSIZE: a number of bytes, or with K, M, G or T in powers of 1024: 512M, 1.5G.\n",
            out);
}

static void print_string(const char *text, FILE *out)
{
    size_t bytes = strlen(text);

    if (bytes > 0 && strpbrk(text, "\"\\#") == NULL && text[0] != ' ' &&
        text[bytes - 1] != ' ') {
        fputs(text, out);
        return;
    }
    fputc('"', out);
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\')
            fputc('\\', out);
        fputc(*text, out);
    }
    fputc('"', out);
}

static void print_size(uint64_t bytes, FILE *out)
{
    char text[32];
    uint64_t read_back;

    /* Four digits may not be exact. */
    if (kv_config_parse_size(kv_config_format_size(bytes, text, sizeof(text)), &read_back) &&
        read_back == bytes)
        fputs(text, out);
    else
        fprintf(out, "%" PRIu64, bytes);
}

/* A default may be a value that users may not set: 0 or "" for "not set". */
static bool is_settable(const struct kv_option *option, const void *field)
{
    uint64_t number;

    switch (option->type) {
    case KV_CONFIG_STRING:
        return option->choices == NULL || is_choice(option->choices, field);
    case KV_CONFIG_SIZE:
    case KV_CONFIG_UINT:
        number = *(const uint64_t *)field;
        return number >= option->min && (option->max == 0 || number <= option->max);
    case KV_CONFIG_FLAG:
    case KV_CONFIG_TEXT:
        break;
    }
    return true;
}

void kv_config_print(const struct kv_option *rows, const void *options, FILE *out)
{
    for (; rows->name != NULL; rows++) {
        const void *field = (const char *)options + rows->offset;

        if (rows->help == NULL || rows->type == KV_CONFIG_TEXT)
            continue;
        fputs("# ", out);
        wrap(out, rows->help, 2, "# ", 2);
        fprintf(out, "\n%s%s = ", is_settable(rows, field) ? "" : "# ", rows->name);
        switch (rows->type) {
        case KV_CONFIG_STRING:
            print_string(field, out);
            break;
        case KV_CONFIG_SIZE:
            print_size(*(const uint64_t *)field, out);
            break;
        case KV_CONFIG_UINT:
            fprintf(out, "%" PRIu64, *(const uint64_t *)field);
            break;
        case KV_CONFIG_FLAG:
            fputs(*(const bool *)field ? "yes" : "no", out);
            break;
        case KV_CONFIG_TEXT:
            break;
        }
        fputs("\n\n", out);
    }
}
