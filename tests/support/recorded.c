#define _GNU_SOURCE /* getline */
#include "tests/support/recorded.h"

#include <stdlib.h>
#include <string.h>

uint64_t recorded_hash(const void *data, size_t bytes)
{
    const uint8_t *from = data;
    uint64_t hash = 0xcbf29ce484222325u;

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ from[i]) * 0x100000001b3u;
    return hash;
}

void recorded_print_floats(FILE *out, const float *values, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;

        memcpy(&bits, &values[i], sizeof(bits));
        fprintf(out, " %08x", bits);
    }
}

void recorded_print_head(FILE *out, const char *head)
{
    while (*head != '\0') {
        const size_t length = strcspn(head, "\n");

        fprintf(out, "#%s%.*s\n", length > 0 ? " " : "", (int)length, head);
        head += length + (head[length] == '\n');
    }
}

bool recorded_write(const char *path, const char *head, const char *text)
{
    FILE *file = fopen(path, "w");
    bool failed;

    if (file == NULL) {
        perror(path);
        return false;
    }
    recorded_print_head(file, head);
    fputs(text, file);
    failed = ferror(file) != 0;
    if (fclose(file) != 0 || failed) {
        perror(path);
        return false;
    }
    return true;
}

/* The file's next line that counts, without its end; false: there is none. */
static bool next_line(FILE *file, char **line, size_t *room)
{
    ssize_t length;

    while ((length = getline(line, room, file)) > 0) {
        if ((*line)[length - 1] == '\n')
            (*line)[--length] = '\0';
        if (length > 0 && (*line)[0] != '#')
            return true;
    }
    return false;
}

bool recorded_same(const char *path, const char *text)
{
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t room = 0;
    bool same = true;

    if (file == NULL) {
        perror(path);
        return false;
    }
    while (same) {
        const bool is_there = next_line(file, &line, &room);
        const size_t length = strcspn(text, "\n");

        if (!is_there && *text == '\0')
            break;
        same = is_there && strlen(line) == length && memcmp(line, text, length) == 0;
        if (!same)
            fprintf(stderr, "%s:\n  recorded  %s\n  now       %.*s\n", path,
                    is_there ? line : "(no more)", *text != '\0' ? (int)length : 9,
                    *text != '\0' ? text : "(no more)");
        text += length + (text[length] == '\n');
    }
    free(line);
    fclose(file);
    return same;
}
