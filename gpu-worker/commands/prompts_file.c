#include "gpu-worker/commands/prompts_file.h"

#include <jansson.h>

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void kvw_prompts_free(struct kvw_prompts *prompts)
{
    for (size_t i = 0; i < prompts->n; i++) {
        free(prompts->prompts[i].text);
        free(prompts->prompts[i].id);
    }
    free(prompts->prompts);
    *prompts = (struct kvw_prompts){0};
}

/* Where a line is read, and what is wrong with it. */
struct reading {
    uint32_t line, most_tokens;
    char *detail;
    size_t detail_bytes;
};

static kv_status_t fail(const struct reading *reading, const char *what, const char *value)
{
    snprintf(reading->detail, reading->detail_bytes, "line %" PRIu32 ": %s%s%.200s",
             reading->line, what, value[0] != '\0' ? ": " : "", value);
    return KV_INVALID;
}

/* Copies a member that is a text. */
static kv_status_t copy_text(const struct reading *reading,
                             const json_t *value,
                             char **ret_text,
                             size_t *ret_bytes)
{
    if (!json_is_string(value))
        return KV_INVALID;
    *ret_bytes = json_string_length(value);
    free(*ret_text);
    *ret_text = malloc(*ret_bytes + 1);
    if (*ret_text == NULL) {
        (void)fail(reading, "out of memory", "");
        return KV_NO_MEMORY;
    }
    memcpy(*ret_text, json_string_value(value), *ret_bytes + 1);
    return KV_OK;
}

static kv_status_t read_member(const struct reading *reading,
                               const char *name,
                               const json_t *value,
                               struct kvw_prompt *prompt)
{
    size_t id_bytes;
    kv_status_t status;

    if (strcmp(name, "prompt") == 0) {
        status = copy_text(reading, value, &prompt->text, &prompt->bytes);
        return status == KV_INVALID ? fail(reading, "prompt: must be a text", "") : status;
    }
    if (strcmp(name, "id") == 0) {
        status = copy_text(reading, value, &prompt->id, &id_bytes);
        for (size_t i = 0; status == KV_OK && i < id_bytes; i++)
            if ((unsigned char)prompt->id[i] < ' ' || prompt->id[i] == 0x7f)
                return fail(reading, "id: has control characters", "");
        return status == KV_INVALID ? fail(reading, "id: must be a text", "") : status;
    }
    if (strcmp(name, "max_tokens") == 0) {
        const json_int_t n = json_integer_value(value);
        char most[64];

        snprintf(most, sizeof(most), "must be a number from 1 to %" PRIu32,
                 reading->most_tokens);
        if (!json_is_integer(value) || n < 1 || n > reading->most_tokens)
            return fail(reading, "max_tokens", most);
        prompt->max_tokens = (uint32_t)n;
        return KV_OK;
    }
    return fail(reading, "unknown member", name);
}

static kv_status_t
read_object(const struct reading *reading, json_t *object, struct kvw_prompt *prompt)
{
    kv_status_t status = KV_OK;
    const char *name;
    json_t *value;

    if (!json_is_object(object))
        return fail(reading, "must be an object, {\"prompt\": TEXT}", "");
    json_object_foreach(object, name, value)
    {
        status = read_member(reading, name, value, prompt);
        if (status != KV_OK)
            return status;
    }
    if (prompt->text == NULL || prompt->bytes == 0)
        return fail(reading, "prompt: missing, or empty", "");
    return KV_OK;
}

static kv_status_t read_line(const struct reading *reading,
                             const char *line,
                             size_t bytes,
                             struct kvw_prompts *prompts)
{
    struct kvw_prompt *larger =
        realloc(prompts->prompts, (prompts->n + 1) * sizeof(prompts->prompts[0]));
    json_error_t error;
    json_t *object;
    kv_status_t status;

    if (larger == NULL) {
        (void)fail(reading, "out of memory", "");
        return KV_NO_MEMORY;
    }
    prompts->prompts = larger;
    prompts->prompts[prompts->n++] = (struct kvw_prompt){.line = reading->line};
    object = json_loadb(line, bytes, JSON_REJECT_DUPLICATES, &error);
    if (object == NULL)
        return fail(reading, "not JSON", error.text);
    status = read_object(reading, object, &prompts->prompts[prompts->n - 1]);
    json_decref(object);
    return status;
}

static bool is_blank(const char *line, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (strchr(" \t\r", line[i]) == NULL || line[i] == '\0')
            return false;
    return true;
}

kv_status_t kvw_prompts_read(const char *text,
                             size_t bytes,
                             uint32_t most_tokens,
                             struct kvw_prompts *ret_prompts,
                             char *detail,
                             size_t detail_bytes)
{
    struct reading reading = {
        .most_tokens = most_tokens, .detail = detail, .detail_bytes = detail_bytes};
    kv_status_t status = KV_OK;

    *ret_prompts = (struct kvw_prompts){0};
    for (size_t at = 0, n; status == KV_OK && at < bytes; at += n + 1) {
        const char *end = memchr(text + at, '\n', bytes - at);

        n = end != NULL ? (size_t)(end - text) - at : bytes - at;
        reading.line++;
        if (!is_blank(text + at, n))
            status = read_line(&reading, text + at, n, ret_prompts);
    }
    if (status == KV_OK && ret_prompts->n == 0) {
        snprintf(detail, detail_bytes, "no prompt: expected {\"prompt\": TEXT} a line");
        status = KV_INVALID;
    }
    if (status != KV_OK)
        kvw_prompts_free(ret_prompts);
    return status;
}
