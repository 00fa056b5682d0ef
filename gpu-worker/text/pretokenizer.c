#include "gpu-worker/text/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct kvw_pretokenizer {
    const char *name;
    pcre2_code *code;
};

struct kvw_pretokenizer_walk {
    const struct kvw_pretokenizer *split;
    pcre2_match_data *match;
    pcre2_match_context *context;
};

/* White space, for use in a class.  PCRE2's \s includes U+180E, which Unicode 6.3 removed. */
#define SPACE                                                                               \
    "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{" \
    "205f}"                                                                                 \
    "\\x{3000}"
#define MARK         "[^" SPACE "\\p{L}\\p{N}]"
#define CONTRACTION  "'(?:[stmd]|re|ve|ll)"
#define CONTRACTION_ "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
/* White space up to the end of the text, or all but its last character before anything else.
 * The last alternative matches any character that no other one does, so no byte is lost. */
#define GPT2_SPACE   "[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+|."
#define LLAMA3_WORD  "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
#define LLAMA3_MARKS "\\x20?" MARK "+[\\r\\n]*"
#define LLAMA3_SPACE "[" SPACE "]*[\\r\\n]+|" GPT2_SPACE

/* smollm first splits at digits and then applies the pattern between them, so white space
 * before a digit is at the end of its text. */
static const char gpt2_pattern[] =
    CONTRACTION "|\\x20?\\p{L}+|\\x20?\\p{N}+|\\x20?" MARK "+|" GPT2_SPACE;
static const char smollm_pattern[] = "\\p{N}|" CONTRACTION "|\\x20?\\p{L}+|\\x20?" MARK
                                     "+|[" SPACE "]+(?![^" SPACE "\\p{N}])|[" SPACE "]+|.";
static const char llama3_pattern[] =
    CONTRACTION_ "|" LLAMA3_WORD "|\\p{N}{1,3}|" LLAMA3_MARKS "|" LLAMA3_SPACE;
static const char qwen2_pattern[] =
    CONTRACTION_ "|" LLAMA3_WORD "|\\p{N}|" LLAMA3_MARKS "|" LLAMA3_SPACE;

/* The first name of a pattern is the one that kvw_pretokenizer_name() returns. */
static const struct {
    const char *name;
    const char *pattern;
} patterns[] = {
    {"gpt-2", gpt2_pattern},    {"smollm", smollm_pattern},   {"llama-bpe", llama3_pattern},
    {"llama3", llama3_pattern}, {"llama-v3", llama3_pattern}, {"qwen2", qwen2_pattern},
};

static const char *pattern_of(const char *name, size_t name_bytes)
{
    for (size_t i = 0; i < sizeof(patterns) / sizeof(*patterns); i++) {
        if (strlen(patterns[i].name) == name_bytes &&
            memcmp(patterns[i].name, name, name_bytes) == 0)
            return patterns[i].pattern;
    }
    return NULL;
}

static const char *name_of(const char *pattern)
{
    size_t i = 0;

    while (patterns[i].pattern != pattern)
        i++;
    return patterns[i].name;
}

const char *kvw_pretokenizer_names(void)
{
    return "gpt-2, smollm, llama-bpe, qwen2";
}

kv_status_t kvw_pretokenizer_create(const char *name,
                                    size_t name_bytes,
                                    struct kvw_pretokenizer **ret_split)
{
    const char *pattern = pattern_of(name, name_bytes);
    struct kvw_pretokenizer *split;
    PCRE2_SIZE where;
    int error;

    if (pattern == NULL)
        return KV_UNSUPPORTED;
    split = calloc(1, sizeof(*split));
    if (split == NULL)
        return KV_NO_MEMORY;
    split->name = name_of(pattern);
    split->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                PCRE2_UTF | PCRE2_UCP | PCRE2_DOTALL | PCRE2_ANCHORED, &error,
                                &where, NULL);
    if (split->code == NULL) {
        kvw_pretokenizer_destroy(split);
        return KV_NO_MEMORY;
    }
    /* Without it, as where memory may not be made executable, matching is slower. */
    pcre2_jit_compile(split->code, PCRE2_JIT_COMPLETE);
    *ret_split = split;
    return KV_OK;
}

void kvw_pretokenizer_destroy(struct kvw_pretokenizer *split)
{
    if (split == NULL)
        return;
    pcre2_code_free(split->code);
    free(split);
}

const char *kvw_pretokenizer_name(const struct kvw_pretokenizer *split)
{
    return split->name;
}

struct kvw_pretokenizer_walk *kvw_pretokenizer_walk_create(const struct kvw_pretokenizer *split)
{
    struct kvw_pretokenizer_walk *walk = calloc(1, sizeof(*walk));

    if (walk == NULL)
        return NULL;
    walk->split = split;
    walk->match = pcre2_match_data_create(1, NULL);
    walk->context = pcre2_match_context_create(NULL);
    if (walk->match == NULL || walk->context == NULL) {
        kvw_pretokenizer_walk_destroy(walk);
        return NULL;
    }
    /* A pattern gives a run of white space back once at most: time is no matter. */
    pcre2_set_match_limit(walk->context, UINT32_MAX);
    return walk;
}

void kvw_pretokenizer_walk_destroy(struct kvw_pretokenizer_walk *walk)
{
    if (walk == NULL)
        return;
    pcre2_match_context_free(walk->context);
    pcre2_match_data_free(walk->match);
    free(walk);
}

static int match(struct kvw_pretokenizer_walk *walk,
                 const char *text,
                 size_t bytes,
                 size_t begin,
                 uint32_t more_options)
{
    return pcre2_match(walk->split->code, (PCRE2_SPTR)text, bytes, begin,
                       PCRE2_NO_UTF_CHECK | more_options, walk->match, walk->context);
}

kv_status_t kvw_pretokenizer_next(struct kvw_pretokenizer_walk *walk,
                                  const char *text,
                                  size_t bytes,
                                  size_t begin,
                                  size_t *ret_end)
{
    int count = match(walk, text, bytes, begin, 0);

    if (count == PCRE2_ERROR_JIT_STACKLIMIT)
        count = match(walk, text, bytes, begin, PCRE2_NO_JIT);
    if (count <= 0)
        return KV_NO_MEMORY;
    *ret_end = pcre2_get_ovector_pointer(walk->match)[1];
    return KV_OK;
}
