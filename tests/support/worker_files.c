#include "tests/support/worker_files.h"

#include "tests/support/model_maker.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void worker_file_write(char ret_path[PROCESS_PATH_BYTES],
                       const char *name,
                       const void *data,
                       size_t bytes)
{
    FILE *file;

    process_path(ret_path, name);
    file = fopen(ret_path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static void write_model(char ret_path[PROCESS_PATH_BYTES], const char *name, const char *chat)
{
    static struct made_model made;
    const struct small_tokenizer tokenizer = {.pre = "smollm", .chat = chat, .bos = SMALL_BOS};
    const struct made_flaw none = {.status = KV_OK};

    make_model(&made, &none, &tokenizer);
    worker_file_write(ret_path, name, made.maker.data, made.maker.bytes);
    unmake_model(&made);
}

void worker_file_write_model(char ret_path[PROCESS_PATH_BYTES], const char *name)
{
    write_model(ret_path, name, NULL);
}

void worker_file_write_chat_model(char ret_path[PROCESS_PATH_BYTES], const char *name)
{
    write_model(ret_path, name,
                "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
                "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}");
}

void worker_text(char *ret_text, size_t bytes)
{
    static const char words[] = "the thing and the ant sing 123 aa 'tis the hat's end\n\n";

    for (size_t i = 0; i < bytes; i++)
        ret_text[i] = words[i * i % 7 == 3 ? i % 11 : i % (sizeof(words) - 1)];
}

const char *worker_json_value(const char *line, const char *name)
{
    char key[64];
    const char *at;

    snprintf(key, sizeof(key), "\"%s\": ", name);
    at = strstr(line, key);
    if (at == NULL)
        fail_msg("no %s in %s", name, line);
    return at + strlen(key);
}

double worker_json_number(const char *line, const char *name)
{
    const char *value = worker_json_value(line, name);

    return strncmp(value, "null", 4) == 0 ? NAN : strtod(value, NULL);
}
