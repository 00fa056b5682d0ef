#define _GNU_SOURCE /* memmem */
#include "gpu-worker/text/chat_template.h"

#include "gpu-worker/text/vocabulary.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static const char template_key[] = "tokenizer.chat_template";

struct kvw_chat_template {
    enum kvw_chat_family family;
    const struct kvw_tokenizer *tokenizer;
    char *system; /* what kvw_chat_template_system() returns */
    size_t system_bytes;
};

/* A list of parts on their way to the tokenizer. */
struct parts {
    struct kvw_text_part *list;
    size_t count, capacity;
};

static void add_part(struct parts *parts, const char *text, size_t bytes, bool special)
{
    assert(parts->count < parts->capacity);
    parts->list[parts->count++] = (struct kvw_text_part){text, bytes, special};
}

static void add_marks(struct parts *parts, const char *marks)
{
    add_part(parts, marks, strlen(marks), true);
}

/* Adds the BOS or EOS token, by its text. */
static void add_token(struct parts *parts, const struct kvw_tokenizer *tokenizer, int32_t token)
{
    struct kvw_text text = kvw_tokenizer_text(tokenizer, (uint32_t)token);

    add_part(parts, text.data, text.bytes, true);
}

/* White space as Python's strip() and Jinja's trim take it, for ASCII. */
static bool is_space(char character)
{
    return character == ' ' || (character >= '\t' && character <= '\r') ||
           (character >= 0x1c && character <= 0x1f);
}

static void add_trimmed(struct parts *parts, struct kvw_text text)
{
    while (text.bytes > 0 && is_space(text.data[0])) {
        text.data++;
        text.bytes--;
    }
    while (text.bytes > 0 && is_space(text.data[text.bytes - 1]))
        text.bytes--;
    add_part(parts, text.data, text.bytes, false);
}

/* --- The families --- */

static const char *const role_names[] = {
    [KVW_CHAT_SYSTEM] = "system", [KVW_CHAT_USER] = "user", [KVW_CHAT_ASSISTANT] = "assistant"};

static struct kvw_text text_of(const struct kvw_chat_message *message)
{
    return (struct kvw_text){message->bytes > 0 ? message->text : "", message->bytes};
}

static void write_chatml(struct parts *parts,
                         const struct kvw_tokenizer *tokenizer,
                         const struct kvw_chat_message *messages,
                         size_t n_messages)
{
    (void)tokenizer;
    for (size_t i = 0; i < n_messages; i++) {
        struct kvw_text text = text_of(&messages[i]);

        add_marks(parts, "<|im_start|>");
        add_marks(parts, role_names[messages[i].role]);
        add_marks(parts, "\n");
        add_part(parts, text.data, text.bytes, false);
        add_marks(parts, "<|im_end|>\n");
    }
    add_marks(parts, "<|im_start|>assistant\n");
}

static void write_llama2(struct parts *parts,
                         const struct kvw_tokenizer *tokenizer,
                         const struct kvw_chat_message *messages,
                         size_t n_messages)
{
    for (size_t i = 0; i < n_messages; i++) {
        if (messages[i].role == KVW_CHAT_ASSISTANT) {
            add_marks(parts, " ");
            add_trimmed(parts, text_of(&messages[i]));
            add_marks(parts, " ");
            add_token(parts, tokenizer, kvw_tokenizer_eos(tokenizer));
            continue;
        }
        add_token(parts, tokenizer, kvw_tokenizer_bos(tokenizer));
        add_marks(parts, "[INST] ");
        if (messages[i].role == KVW_CHAT_SYSTEM) {
            struct kvw_text text = text_of(&messages[i]);

            add_marks(parts, "<<SYS>>\n");
            add_part(parts, text.data, text.bytes, false);
            add_marks(parts, "\n<</SYS>>\n\n");
            i++; /* the user's message, in the same turn */
        }
        add_trimmed(parts, text_of(&messages[i]));
        add_marks(parts, " [/INST]");
    }
}

static void write_llama3(struct parts *parts,
                         const struct kvw_tokenizer *tokenizer,
                         const struct kvw_chat_message *messages,
                         size_t n_messages)
{
    add_token(parts, tokenizer, kvw_tokenizer_bos(tokenizer));
    for (size_t i = 0; i < n_messages; i++) {
        add_marks(parts, "<|start_header_id|>");
        add_marks(parts, role_names[messages[i].role]);
        add_marks(parts, "<|end_header_id|>\n\n");
        add_trimmed(parts, text_of(&messages[i]));
        add_marks(parts, "<|eot_id|>");
    }
    add_marks(parts, "<|start_header_id|>assistant<|end_header_id|>\n\n");
}

enum {
    MARKS_MAX = 4,
    PARTS_PER_MESSAGE = 6,
    PARTS_BESIDE = 4,           /* begin and end of the conversation */
    SYSTEM_BYTES_MAX = 1 << 14, /* of a system message in a template */
};

static const struct family {
    const char *name;
    const char *sign;             /* what only this family's templates hold */
    const char *marks[MARKS_MAX]; /* tokens that it needs */
    bool bounds;                  /* it places BOS and EOS itself */
    size_t closing;               /* parts behind the last text: its end, the answer's begin */
    void (*write)(struct parts *parts,
                  const struct kvw_tokenizer *tokenizer,
                  const struct kvw_chat_message *messages,
                  size_t n_messages);
} families[] = {
    [KVW_CHAT_CHATML] =
        {"chatml", "<|im_start|>", {"<|im_start|>", "<|im_end|>"}, false, 2, write_chatml},
    [KVW_CHAT_LLAMA2] = {"llama2", "<<SYS>>", {NULL}, true, 1, write_llama2},
    [KVW_CHAT_LLAMA3] = {"llama3",
                         "<|start_header_id|>",
                         {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
                         true,
                         2,
                         write_llama3},
};

enum {
    N_FAMILIES = sizeof(families) / sizeof(*families),
};
static_assert((int)N_FAMILIES == (int)KVW_CHAT_LLAMA3 + 1, "a row's place is its family");

/* --- Recognizing --- */

static const char *find(struct kvw_text text, const char *string)
{
    return memmem(text.data, text.bytes, string, strlen(string));
}

/* Reads the characters between `begin` and `end`, which are in one quoted string of the
 * program, and replaces its escapes.  Returns false if they are not in one string, or if an
 * escape is not known. */
static bool read_literal(const char *begin, const char *end, char *ret_text, size_t *ret_bytes)
{
    size_t bytes = 0;

    for (const char *at = begin; at < end; at++) {
        if (*at == '\'' || *at == '"' || *at == '{' || *at == '}')
            return false;
        if (*at != '\\') {
            ret_text[bytes++] = *at;
            continue;
        }
        if (++at == end)
            return false;
        if (*at == 'n')
            ret_text[bytes++] = '\n';
        else if (*at == '\\' || *at == '\'' || *at == '"')
            ret_text[bytes++] = *at;
        else
            return false;
    }
    *ret_bytes = bytes;
    return true;
}

/* The system message that a chatml template has of its own: the first string that goes from the
 * mark of a system message to the mark of its end. */
static bool read_system(struct kvw_chat_template *chat, struct kvw_text program)
{
    static const char begin_mark[] = "<|im_start|>system", end_mark[] = "<|im_end|>";
    const char *begin;

    while ((begin = find(program, begin_mark)) != NULL) {
        const char *end;

        begin += strlen(begin_mark);
        program = (struct kvw_text){begin, program.bytes - (size_t)(begin - program.data)};
        end = memmem(begin, program.bytes < SYSTEM_BYTES_MAX ? program.bytes : SYSTEM_BYTES_MAX,
                     end_mark, strlen(end_mark));
        if (end == NULL)
            continue;
        if (*begin == '\n')
            begin++;
        else if (end - begin >= 2 && begin[0] == '\\' && begin[1] == 'n')
            begin += 2;
        else
            continue;
        free(chat->system);
        chat->system = malloc((size_t)(end - begin) + 1);
        if (chat->system == NULL)
            return false;
        if (read_literal(begin, end, chat->system, &chat->system_bytes))
            return true;
        chat->system_bytes = 0;
    }
    return true;
}

static kv_status_t choose_family(const struct kvw_gguf *gguf,
                                 const char *name,
                                 const struct kvw_file_error *detail,
                                 enum kvw_chat_family *ret_family,
                                 struct kvw_text *ret_program)
{
    struct kvw_text program;
    kv_status_t status = kvw_gguf_text(gguf, template_key, &program);

    if (status == KV_INVALID)
        return kvw_file_error_set(detail, status, "key '%s': not a string", template_key);
    if (status == KV_NOT_FOUND && name == NULL)
        return kvw_file_error_set(
            detail, status, "key '%s': missing: choose a template: chatml, llama2, llama3",
            template_key);
    if (status == KV_NOT_FOUND)
        program = (struct kvw_text){"", 0};
    for (int i = 0; i < N_FAMILIES; i++) {
        if (name != NULL ? strcmp(name, families[i].name) == 0
                         : find(program, families[i].sign) != NULL) {
            *ret_family = (enum kvw_chat_family)i;
            *ret_program = program;
            return KV_OK;
        }
    }
    if (name != NULL)
        return kvw_file_error_set(
            detail, KV_INVALID, "chat template '%s': not one of chatml, llama2, llama3", name);
    return kvw_file_error_set(detail, KV_UNSUPPORTED,
                              "key '%s': not one of chatml, llama2, llama3: '%s'", template_key,
                              kvw_show(program).text);
}

static kv_status_t check_marks(const struct family *family,
                               const struct kvw_tokenizer *tokenizer,
                               const struct kvw_file_error *detail)
{
    for (int i = 0; i < MARKS_MAX && family->marks[i] != NULL; i++) {
        if (kvw_tokenizer_find(tokenizer, family->marks[i], strlen(family->marks[i])) < 0)
            return kvw_file_error_set(detail, KV_UNSUPPORTED,
                                      "chat template %s: the tokenizer has no '%s'",
                                      family->name, family->marks[i]);
    }
    if (family->bounds && (kvw_tokenizer_bos(tokenizer) == KVW_TOKEN_NONE ||
                           kvw_tokenizer_eos(tokenizer) == KVW_TOKEN_NONE))
        return kvw_file_error_set(detail, KV_UNSUPPORTED,
                                  "chat template %s: the tokenizer has no begin or end token",
                                  family->name);
    return KV_OK;
}

kv_status_t kvw_chat_template_create(const struct kvw_gguf *gguf,
                                     const struct kvw_tokenizer *tokenizer,
                                     const char *name,
                                     struct kvw_chat_template **ret_template,
                                     char *detail,
                                     size_t detail_bytes)
{
    const struct kvw_file_error where = {detail, detail_bytes, kvw_gguf_path(gguf)};
    struct kvw_chat_template *chat;
    enum kvw_chat_family family = KVW_CHAT_CHATML;
    struct kvw_text program = {"", 0};
    kv_status_t status = choose_family(gguf, name, &where, &family, &program);

    if (status == KV_OK)
        status = check_marks(&families[family], tokenizer, &where);
    if (status != KV_OK)
        return status;
    chat = calloc(1, sizeof(*chat));
    if (chat == NULL)
        return kvw_file_error_set(&where, KV_NO_MEMORY, "out of memory: chat template");
    chat->family = family;
    chat->tokenizer = tokenizer;
    if (family == KVW_CHAT_CHATML && !read_system(chat, program)) {
        kvw_chat_template_destroy(chat);
        return kvw_file_error_set(&where, KV_NO_MEMORY, "out of memory: chat template");
    }
    *ret_template = chat;
    return KV_OK;
}

void kvw_chat_template_destroy(struct kvw_chat_template *chat)
{
    if (chat == NULL)
        return;
    free(chat->system);
    free(chat);
}

enum kvw_chat_family kvw_chat_template_family(const struct kvw_chat_template *chat)
{
    return chat->family;
}

const char *kvw_chat_template_name(const struct kvw_chat_template *chat)
{
    return families[chat->family].name;
}

struct kvw_text kvw_chat_template_system(const struct kvw_chat_template *chat)
{
    return (struct kvw_text){chat->system_bytes > 0 ? chat->system : "", chat->system_bytes};
}

/* --- Encoding --- */

/* System first if at all, then user and assistant in turn, the user last. */
static bool is_conversation(const struct kvw_chat_message *messages, size_t n_messages)
{
    size_t first = n_messages > 0 && messages[0].role == KVW_CHAT_SYSTEM ? 1 : 0;

    if ((n_messages - first) % 2 == 0)
        return false;
    for (size_t i = first; i < n_messages; i++) {
        if (messages[i].role != ((i - first) % 2 == 0 ? KVW_CHAT_USER : KVW_CHAT_ASSISTANT))
            return false;
    }
    return true;
}

static kv_status_t encode(const struct kvw_chat_template *chat,
                          const struct kvw_chat_message *messages,
                          size_t n_messages,
                          bool is_open,
                          uint32_t **ret_tokens,
                          size_t *ret_count)
{
    const struct family *family = &families[chat->family];
    const struct kvw_chat_message own = {KVW_CHAT_SYSTEM, chat->system, chat->system_bytes};
    struct parts parts = {0};
    kv_status_t status;

    if (!is_conversation(messages, n_messages))
        return KV_INVALID;
    parts.capacity = (n_messages + 1) * PARTS_PER_MESSAGE + PARTS_BESIDE;
    parts.list = calloc(parts.capacity, sizeof(*parts.list));
    if (parts.list == NULL)
        return KV_NO_MEMORY;
    if (own.bytes > 0 && messages[0].role != KVW_CHAT_SYSTEM) {
        family->write(&parts, chat->tokenizer, &own, 1);
        /* A single message ends with the mark of the answer: that one only comes last. */
        parts.count--;
    }
    family->write(&parts, chat->tokenizer, messages, n_messages);
    parts.count -= is_open ? family->closing : 0;
    status = kvw_tokenizer_encode_parts(chat->tokenizer, parts.list, parts.count,
                                        !family->bounds, ret_tokens, ret_count);
    free(parts.list);
    return status;
}

kv_status_t kvw_chat_template_encode(const struct kvw_chat_template *chat,
                                     const struct kvw_chat_message *messages,
                                     size_t n_messages,
                                     uint32_t **ret_tokens,
                                     size_t *ret_count)
{
    return encode(chat, messages, n_messages, false, ret_tokens, ret_count);
}

kv_status_t kvw_chat_template_encode_open(const struct kvw_chat_template *chat,
                                          const struct kvw_chat_message *messages,
                                          size_t n_messages,
                                          uint32_t **ret_tokens,
                                          size_t *ret_count)
{
    return encode(chat, messages, n_messages, true, ret_tokens, ret_count);
}
