/* print_tokens FILE [--special] [--bounds]: reads texts as lines of hexadecimal bytes from
 * standard input, and prints the tokens of each on a line.  print_tokens FILE --pieces prints
 * what each token stands for, in hexadecimal.  For compare_tokens.py. */
#include "gpu-worker/text/tokenizer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_pieces(const struct kvw_tokenizer *tokenizer)
{
    for (uint32_t i = 0; i < kvw_tokenizer_n_tokens(tokenizer); i++) {
        struct kvw_text piece = kvw_tokenizer_piece(tokenizer, i, true);

        for (size_t j = 0; j < piece.bytes; j++)
            printf("%02x", (unsigned char)piece.data[j]);
        printf("\n");
    }
}

static size_t read_hexadecimal(char *line)
{
    size_t bytes = 0;

    for (; line[bytes * 2] != '\0' && line[bytes * 2] != '\n'; bytes++) {
        const char digits[] = {line[bytes * 2], line[bytes * 2 + 1], '\0'};

        line[bytes] = (char)strtoul(digits, NULL, 16);
    }
    return bytes;
}

static kv_status_t
print_line(const struct kvw_tokenizer *tokenizer, char *line, bool special, bool bounds)
{
    uint32_t *tokens;
    size_t count;
    kv_status_t status = kvw_tokenizer_encode(tokenizer, line, read_hexadecimal(line), special,
                                              bounds, &tokens, &count);

    if (status != KV_OK)
        return status;
    for (size_t i = 0; i < count; i++)
        printf("%s%" PRIu32, i > 0 ? " " : "", tokens[i]);
    printf("\n");
    free(tokens);
    return KV_OK;
}

int main(int argc, char **argv)
{
    char detail[KVW_GGUF_DETAIL_BYTES] = "";
    struct kvw_tokenizer *tokenizer = NULL;
    struct kvw_gguf *gguf = NULL;
    bool special = false, bounds = false, pieces = false;
    char *line = NULL;
    size_t capacity = 0;
    kv_status_t status;

    for (int i = 2; i < argc; i++) {
        special |= strcmp(argv[i], "--special") == 0;
        bounds |= strcmp(argv[i], "--bounds") == 0;
        pieces |= strcmp(argv[i], "--pieces") == 0;
    }
    if (argc < 2) {
        fprintf(stderr, "usage: print_tokens FILE [--special] [--bounds] [--pieces]\n");
        return 2;
    }
    status = kvw_gguf_open(argv[1], &gguf, detail, sizeof(detail));
    if (status == KV_OK)
        status = kvw_tokenizer_create(gguf, &tokenizer, detail, sizeof(detail));
    if (status == KV_OK && pieces)
        print_pieces(tokenizer);
    while (status == KV_OK && !pieces && getline(&line, &capacity, stdin) > 0)
        status = print_line(tokenizer, line, special, bounds);
    if (status != KV_OK)
        fprintf(stderr, "print_tokens: %s: %s\n", kv_status_name(status), detail);
    free(line);
    kvw_tokenizer_destroy(tokenizer);
    kvw_gguf_close(gguf);
    return status == KV_OK ? 0 : 1;
}
