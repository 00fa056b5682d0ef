#define _GNU_SOURCE /* memmem */
#include "gpu-worker/eval/needles.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    LOOK_BYTES = 2000, /* searched for the end of a paragraph */
};

static const char blanks[] = " \t\r\n";

static bool is_blank(char character)
{
    return character != '\0' && strchr(blanks, character) != NULL;
}

/* ---- the file ---- */

void kvw_needles_free(struct kvw_needles *needles)
{
    for (size_t i = 0; i < needles->count; i++) {
        free(needles->list[i].beginning);
        free(needles->list[i].completion);
    }
    free(needles->list);
    *needles = (struct kvw_needles){.list = NULL};
}

static char *copy_trimmed(const char *text, size_t bytes)
{
    while (bytes > 0 && is_blank(text[0])) {
        text++;
        bytes--;
    }
    while (bytes > 0 && is_blank(text[bytes - 1]))
        bytes--;
    return strndup(text, bytes);
}

static kv_status_t add_line(struct kvw_needles *needles, const char *line, size_t bytes)
{
    const char *bar = memchr(line, '|', bytes);
    struct kvw_needle *needle = &needles->list[needles->count];

    if (bar == NULL || memchr(line, '\0', bytes) != NULL)
        return KV_INVALID;
    needle->beginning = copy_trimmed(line, (size_t)(bar - line));
    needle->completion = copy_trimmed(bar + 1, bytes - (size_t)(bar + 1 - line));
    needles->count++;
    if (needle->beginning == NULL || needle->completion == NULL)
        return KV_NO_MEMORY;
    return needle->beginning[0] == '\0' || needle->completion[0] == '\0' ? KV_INVALID : KV_OK;
}

kv_status_t kvw_needles_read(const char *text,
                             size_t bytes,
                             struct kvw_needles *ret_needles,
                             size_t *ret_line)
{
    struct kvw_needles needles = {.list = calloc(KVW_NEEDLES_MAX, sizeof(needles.list[0]))};
    kv_status_t status = needles.list != NULL ? KV_OK : KV_NO_MEMORY;
    size_t n_lines = 0;

    for (size_t at = 0; status == KV_OK && at < bytes;) {
        const char *end = memchr(text + at, '\n', bytes - at);
        const size_t length = end != NULL ? (size_t)(end - text) - at : bytes - at;
        size_t blank = 0;

        n_lines++;
        while (blank < length && is_blank(text[at + blank]))
            blank++;
        if (length > KVW_NEEDLE_BYTES_MAX)
            status = KV_TOO_LARGE;
        else if (blank < length && text[at + blank] != '#')
            status = needles.count == KVW_NEEDLES_MAX ? KV_TOO_LARGE
                                                      : add_line(&needles, text + at, length);
        at += length + 1;
    }
    if (status == KV_OK && needles.count == 0)
        status = KV_NOT_FOUND;
    if (status == KV_OK) {
        *ret_needles = needles;
        return KV_OK;
    }
    *ret_line = n_lines;
    kvw_needles_free(&needles);
    return status;
}

/* ---- the text ---- */

/* Returns the first place for a sentence from `at` on. */
static size_t place_after(const char *text, size_t bytes, size_t at)
{
    static const char *const ends[] = {"\n\n", "\n", " "};
    const size_t look = bytes - at < LOOK_BYTES ? bytes - at : LOOK_BYTES;

    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        const char *end = memmem(text + at, look, ends[i], strlen(ends[i]));

        if (end != NULL)
            return (size_t)(end - text) + strlen(ends[i]);
    }
    while (at < bytes && ((unsigned char)text[at] & 0xc0) == 0x80)
        at++; /* not inside a UTF-8 character */
    return at;
}

static char *append(char *to, const char *text, size_t bytes)
{
    memcpy(to, text, bytes);
    return to + bytes;
}

kv_status_t kvw_needles_place(const struct kvw_needles *needles,
                              const char *text,
                              size_t bytes,
                              char **ret_text,
                              size_t *ret_bytes)
{
    size_t room = bytes + 1, done = 0;
    char *placed, *to;

    for (size_t i = 0; i < needles->count; i++)
        room += strlen(needles->list[i].beginning) + strlen(needles->list[i].completion) + 8;
    placed = malloc(room);
    if (placed == NULL)
        return KV_NO_MEMORY;
    to = placed;
    for (size_t i = 0; i < needles->count; i++) {
        const struct kvw_needle *needle = &needles->list[i];
        const size_t share =
            (size_t)((double)bytes * (double)(2 * i + 1) / (double)(2 * needles->count));
        const size_t at = place_after(text, bytes, share > done ? share : done);

        to = append(to, text + done, at - done);
        if (to > placed && to[-1] != '\n')
            to = append(to, "\n\n", 2);
        to = append(to, needle->beginning, strlen(needle->beginning));
        *to++ = ' ';
        to = append(to, needle->completion, strlen(needle->completion));
        to = append(to, ".\n\n", 3);
        done = at;
    }
    to = append(to, text + done, bytes - done);
    *to = '\0';
    *ret_text = placed;
    *ret_bytes = (size_t)(to - placed);
    return KV_OK;
}

kv_status_t kvw_needle_ask(const struct kvw_needle *needle,
                           const char *text,
                           size_t bytes,
                           char **ret_text,
                           size_t *ret_bytes)
{
    const size_t more = strlen(needle->beginning);
    char *asked;

    while (bytes > 0 && is_blank(text[bytes - 1]))
        bytes--;
    asked = malloc(bytes + more + 3);
    if (asked == NULL)
        return KV_NO_MEMORY;
    memcpy(asked, text, bytes);
    memcpy(asked + bytes, "\n\n", 2);
    memcpy(asked + bytes + 2, needle->beginning, more + 1);
    *ret_text = asked;
    *ret_bytes = bytes + 2 + more;
    return KV_OK;
}

enum kvw_needle_verdict
kvw_needle_judge(const struct kvw_needle *needle, const char *answer, size_t bytes)
{
    const size_t wanted = strlen(needle->completion);

    while (bytes > 0 && is_blank(answer[0])) {
        answer++;
        bytes--;
    }
    if (memcmp(answer, needle->completion, bytes < wanted ? bytes : wanted) != 0)
        return KVW_NEEDLE_MISSED;
    return bytes < wanted ? KVW_NEEDLE_OPEN : KVW_NEEDLE_FOUND;
}
