#include "gpu-worker/text/bpe_merge.h"

#include <assert.h>
#include <stdlib.h>

struct kvw_bpe_pair {
    uint64_t order; /* priority, then the left symbol's index: smaller first */
    int32_t right;
    uint32_t bytes; /* of both symbols: tells whether the pair is stale */
    int32_t token;
};

/* Makes room for one more element; doubles the array. */
static bool grow(void **array, size_t count, size_t *capacity, size_t element_bytes)
{
    size_t wanted = *capacity > 0 ? *capacity * 2 : 64;
    void *grown;

    if (count < *capacity)
        return true;
    grown = realloc(*array, wanted * element_bytes);
    if (grown == NULL)
        return false;
    *array = grown;
    *capacity = wanted;
    return true;
}

static bool push(struct kvw_merger *merger, struct kvw_bpe_pair pair)
{
    size_t at = merger->n_pairs;

    if (!grow((void **)&merger->pairs, at, &merger->pairs_capacity, sizeof(*merger->pairs)))
        return false;
    while (at > 0 && merger->pairs[(at - 1) / 2].order > pair.order) {
        merger->pairs[at] = merger->pairs[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    merger->pairs[at] = pair;
    merger->n_pairs++;
    return true;
}

static struct kvw_bpe_pair pop(struct kvw_merger *merger)
{
    struct kvw_bpe_pair top = merger->pairs[0];
    struct kvw_bpe_pair last = merger->pairs[--merger->n_pairs];
    size_t at = 0;

    for (;;) {
        size_t child = at * 2 + 1;

        if (child >= merger->n_pairs)
            break;
        if (child + 1 < merger->n_pairs &&
            merger->pairs[child + 1].order < merger->pairs[child].order)
            child++;
        if (merger->pairs[child].order >= last.order)
            break;
        merger->pairs[at] = merger->pairs[child];
        at = child;
    }
    merger->pairs[at] = last;
    return top;
}

void kvw_merger_clear(struct kvw_merger *merger)
{
    merger->n_symbols = 0;
    merger->n_pairs = 0;
}

bool kvw_merger_add(struct kvw_merger *merger, size_t bytes, int32_t token)
{
    size_t at = merger->n_symbols;
    struct kvw_symbol *symbol;

    assert(at < INT32_MAX); /* indices are int32_t */
    if (!grow((void **)&merger->symbols, at, &merger->symbols_capacity, sizeof(*symbol)))
        return false;
    symbol = &merger->symbols[at];
    *symbol = (struct kvw_symbol){
        .bytes = (uint32_t)bytes,
        .token = token,
        .previous = KVW_SYMBOL_NONE,
        .next = KVW_SYMBOL_NONE,
    };
    if (at > 0) {
        symbol->begin = symbol[-1].begin + symbol[-1].bytes;
        symbol->previous = (int32_t)at - 1;
        symbol[-1].next = (int32_t)at;
    }
    merger->n_symbols++;
    return true;
}

struct run {
    struct kvw_merger *merger;
    kvw_bpe_merge_find find;
    const void *context;
    const char *text;
};

static bool consider(const struct run *run, int32_t left, int32_t right)
{
    const struct kvw_symbol *symbols = run->merger->symbols;
    struct kvw_bpe_pair pair = {.right = right};
    uint32_t priority;

    if (left == KVW_SYMBOL_NONE || right == KVW_SYMBOL_NONE ||
        !run->find(run->context, run->text, &symbols[left], &symbols[right], &pair.token,
                   &priority))
        return true;
    pair.order = (uint64_t)priority << 32 | (uint32_t)left;
    pair.bytes = symbols[left].bytes + symbols[right].bytes;
    return push(run->merger, pair);
}

bool kvw_merger_run(struct kvw_merger *merger,
                    kvw_bpe_merge_find find,
                    const void *context,
                    const char *text)
{
    const struct run run = {merger, find, context, text};

    for (size_t i = 1; i < merger->n_symbols; i++) {
        if (!consider(&run, (int32_t)i - 1, (int32_t)i))
            return false;
    }
    while (merger->n_pairs > 0) {
        struct kvw_bpe_pair pair = pop(merger);
        struct kvw_symbol *left = &merger->symbols[(uint32_t)pair.order];
        struct kvw_symbol *right = &merger->symbols[pair.right];

        /* Symbols only grow, and are 0 bytes long once merged to the left.  If both exist and
         * their sum is unchanged, neither has been merged since the pair was pushed. */
        if (left->bytes == 0 || right->bytes == 0 || left->bytes + right->bytes != pair.bytes)
            continue;
        left->bytes = pair.bytes;
        left->token = pair.token;
        left->next = right->next;
        right->bytes = 0;
        if (left->next != KVW_SYMBOL_NONE)
            merger->symbols[left->next].previous = (int32_t)(uint32_t)pair.order;
        if (!consider(&run, left->previous, (int32_t)(uint32_t)pair.order) ||
            !consider(&run, (int32_t)(uint32_t)pair.order, left->next))
            return false;
    }
    return true;
}

void kvw_merger_fini(struct kvw_merger *merger)
{
    free(merger->symbols);
    free(merger->pairs);
    *merger = (struct kvw_merger){0};
}
