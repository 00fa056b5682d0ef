#include "kvserver/base/json.h"

#include <math.h>

unsigned kv_utf8_bytes(const char *text)
{
    const unsigned char *at = (const unsigned char *)text;
    unsigned bytes;

    if (at[0] < 0x80)
        return 1;
    if (at[0] >= 0xc2 && at[0] <= 0xdf)
        bytes = 2;
    else if ((at[0] & 0xf0) == 0xe0)
        bytes = 3;
    else if (at[0] >= 0xf0 && at[0] <= 0xf4)
        bytes = 4;
    else
        return 0;
    for (unsigned i = 1; i < bytes; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    /* Overlong, a surrogate, or beyond U+10FFFF. */
    if ((at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xed && at[1] > 0x9f) ||
        (at[0] == 0xf0 && at[1] < 0x90) || (at[0] == 0xf4 && at[1] > 0x8f))
        return 0;
    return bytes;
}

static void write_string(FILE *out, const char *text)
{
    fputc('"', out);
    while (*text != '\0') {
        unsigned bytes = kv_utf8_bytes(text);

        if (bytes == 0)
            fputs("\\ufffd", out);
        else if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if ((unsigned char)*text < ' ' || *text == 0x7f)
            fprintf(out, "\\u%04x", (unsigned)*text);
        else
            fwrite(text, 1, bytes, out);
        text += bytes > 0 ? bytes : 1;
    }
    fputc('"', out);
}

static void separate(struct kv_json *json)
{
    if (json->has_members)
        fputs(", ", json->out);
    json->has_members = true;
}

static void write_key(struct kv_json *json, const char *key)
{
    separate(json);
    write_string(json->out, key);
    fputs(": ", json->out);
}

void kv_json_begin(struct kv_json *json, FILE *out)
{
    json->out = out;
    json->has_members = false;
    fputc('{', out);
}

void kv_json_end(struct kv_json *json)
{
    fputs("}\n", json->out);
}

void kv_json_text(struct kv_json *json, const char *key, const char *value)
{
    write_key(json, key);
    write_string(json->out, value);
}

static void write_number(FILE *out, double value)
{
    if (!isfinite(value))
        fputs("null", out);
    else if (value == floor(value) && fabs(value) < 9007199254740992.0)
        fprintf(out, "%.0f", value);
    else
        fprintf(out, "%.9g", value);
}

void kv_json_number(struct kv_json *json, const char *key, double value)
{
    write_key(json, key);
    write_number(json->out, value);
}

void kv_json_bool(struct kv_json *json, const char *key, bool value)
{
    write_key(json, key);
    fputs(value ? "true" : "false", json->out);
}

void kv_json_list(struct kv_json *json, const char *key)
{
    write_key(json, key);
    fputc('[', json->out);
    json->has_members = false;
}

void kv_json_object(struct kv_json *json, const char *key)
{
    write_key(json, key);
    fputc('{', json->out);
    json->has_members = false;
}

void kv_json_object_end(struct kv_json *json)
{
    fputc('}', json->out);
    json->has_members = true;
}

void kv_json_list_end(struct kv_json *json)
{
    fputc(']', json->out);
    json->has_members = true;
}

void kv_json_item(struct kv_json *json)
{
    separate(json);
    fputc('{', json->out);
    json->has_members = false;
}

void kv_json_item_end(struct kv_json *json)
{
    fputc('}', json->out);
    json->has_members = true;
}

void kv_json_item_number(struct kv_json *json, double value)
{
    separate(json);
    write_number(json->out, value);
}
