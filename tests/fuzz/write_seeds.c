/* write_seeds FOLDER: the files that fuzzing begins with: a model of each kind of tokenizer,
 * and one with a tensor of each type. */
#include "tests/support/gguf_maker.h"
#include "tests/support/tokenizer_maker.h"

#include <stdio.h>
#include <string.h>

static int write_file(const char *folder, const char *name, struct gguf_maker *maker)
{
    char path[4096];
    FILE *file;
    size_t written = 0;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    file = fopen(path, "wb");
    if (file != NULL) {
        written = fwrite(maker->data, 1, maker->bytes, file);
        fclose(file);
    }
    if (file == NULL || written != maker->bytes)
        perror(path);
    maker_free(maker);
    return written > 0 ? 0 : 1;
}

static void make_tensors(struct gguf_maker *maker)
{
    const uint64_t dims[] = {256, 2};
    uint64_t offset = 0;

    maker_begin(maker, 3);
    maker_key_string(maker, "general.architecture", "llama");
    maker_key_u32(maker, "general.alignment", 32);
    for (size_t i = 0; kvw_tensor_layout_at(i) != NULL; i++) {
        const struct kvw_tensor_layout *layout = kvw_tensor_layout_at(i);

        maker_tensor(maker, layout->name, 2, dims, (uint32_t)layout->type, offset);
        offset += (kvw_tensor_row_bytes(layout->type, 256) * 2 + 31) / 32 * 32;
    }
    maker_finish(maker, 32);
    for (uint64_t i = 0; i < offset; i++)
        maker_bytes(maker, &(unsigned char){(unsigned char)(i * 7)}, 1);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        struct small_tokenizer small;
    } seeds[] = {
        {"gpt2", {.pre = "gpt-2", .bos = SMALL_BOS}},
        {"smollm",
         {.pre = "smollm", .bos = SMALL_BOS, .chat = "'<|im_start|>system\nHi.<|im_end|>'"}},
        {"llama3", {.pre = "llama-bpe", .bos = SMALL_BOS, .chat = "<|start_header_id|>"}},
        {"qwen2", {.pre = "qwen2", .bos = SMALL_BOS, .chat = "<|im_start|>"}},
        {"llama2", {.bos = SMALL_BOS, .chat = "[INST] <<SYS>>"}},
    };
    struct gguf_maker maker = {0};
    int failed = 0;

    if (argc != 2) {
        fprintf(stderr, "usage: write_seeds FOLDER\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof(seeds) / sizeof(*seeds); i++) {
        make_tokenizer(&maker, &seeds[i].small);
        failed |= write_file(argv[1], seeds[i].name, &maker);
    }
    make_tensors(&maker);
    failed |= write_file(argv[1], "tensors", &maker);
    return failed;
}
