#include "tests/sim/truth.h"

#include "kvserver/base/hash.h"
#include "tests/support/failing_memory.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct truth *truth_create(const kv_schema_t *schema)
{
    struct truth *truth = failing_memory_sure(1, sizeof(*truth));

    assert(schema->n_units <= TRUTH_UNITS_MAX);
    truth->schema = *schema;
    truth->tokens_max =
        kv_schema_token_bytes(schema) > 3000 ? TRUTH_TOKENS_LARGE : TRUTH_TOKENS_MAX;
    return truth;
}

void truth_destroy(struct truth *truth)
{
    free(truth);
}

/* ---- bytes ------------------------------------------------------------------------------- */

enum {
    KINDS_EVERY = 8, /* contents of which one has rows of few kinds: they tie */
    N_KINDS = 12,
};

static uint64_t row_seed(uint32_t content, uint32_t layer, uint32_t head, uint32_t token)
{
    if (content % KINDS_EVERY == 0)
        token %= N_KINDS;
    return kv_mix64(kv_mix64((uint64_t)content << 32 | token) ^ ((uint64_t)layer << 16 | head));
}

/* In each 16 bits the exponent of fp16 is that of 1, and those of fp32 and bf16 not above it.
 */
static uint64_t next_word(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (kv_mix64(*state) & 0x83ff83ff83ff83ffu) | 0x3c003c003c003c00u;
}

void truth_row_fill(uint8_t *row,
                    size_t row_bytes,
                    uint32_t content,
                    uint32_t layer,
                    uint32_t head,
                    uint32_t token)
{
    uint64_t state = row_seed(content, layer, head, token);

    memcpy(row, &content, sizeof(content));
    for (size_t at = sizeof(content); at < row_bytes; at += sizeof(state)) {
        size_t bytes = row_bytes - at < sizeof(state) ? row_bytes - at : sizeof(state);
        uint64_t word = next_word(&state);

        memcpy(row + at, &word, bytes);
    }
}

uint32_t truth_row_content(
    const uint8_t *row, size_t row_bytes, uint32_t layer, uint32_t head, uint32_t token)
{
    uint32_t content;
    uint64_t state;

    memcpy(&content, row, sizeof(content));
    state = row_seed(content, layer, head, token);
    for (size_t at = sizeof(content); at < row_bytes; at += sizeof(state)) {
        size_t bytes = row_bytes - at < sizeof(state) ? row_bytes - at : sizeof(state);
        uint64_t word = next_word(&state);

        if (memcmp(row + at, &word, bytes) != 0)
            return 0;
    }
    return content;
}

/* ---- rows -------------------------------------------------------------------------------- */

static bool is_seen(const struct truth_candidate *candidate, uint64_t since)
{
    return candidate->gone_at == 0 || candidate->gone_at > since;
}

uint32_t truth_row_known(const struct truth *truth,
                         uint32_t unit,
                         uint32_t token,
                         unsigned pick,
                         unsigned *ret_choices)
{
    const struct truth_row *row = &truth->rows[unit][token];
    unsigned n = 0, at = 0;

    for (unsigned i = 0; i < row->n_candidates; i++)
        n += row->candidates[i].gone_at == 0;
    *ret_choices = n;
    if (n == 0)
        return 0;
    for (pick %= n;; at++)
        if (row->candidates[at].gone_at == 0 && pick-- == 0)
            return row->candidates[at].content;
}

bool truth_row_may(struct truth *truth,
                   uint32_t unit,
                   uint32_t token,
                   uint32_t content,
                   uint32_t generation,
                   uint64_t oldest_at)
{
    struct truth_row *row = &truth->rows[unit][token];
    unsigned n = 0;

    for (unsigned i = 0; i < row->n_candidates; i++) {
        struct truth_candidate *candidate = &row->candidates[i];

        if (candidate->content == content && candidate->gone_at == 0) {
            if (candidate->generation < generation)
                candidate->generation = generation;
            return true;
        }
    }
    for (unsigned i = 0; i < row->n_candidates; i++)
        if (is_seen(&row->candidates[i], oldest_at))
            row->candidates[n++] = row->candidates[i];
    row->n_candidates = (uint8_t)n;
    if (n == TRUTH_CANDIDATES_MAX)
        return false;
    row->candidates[row->n_candidates++] =
        (struct truth_candidate){.content = content, .generation = generation};
    return true;
}

bool truth_row_allows(
    const struct truth *truth, uint32_t unit, uint32_t token, uint32_t content, uint64_t since)
{
    const struct truth_row *row = &truth->rows[unit][token];

    for (unsigned i = 0; i < row->n_candidates; i++)
        if (row->candidates[i].content == content && is_seen(&row->candidates[i], since))
            return true;
    return false;
}

bool truth_row_disputes(
    const struct truth *truth, uint32_t unit, uint32_t token, uint32_t content, uint64_t since)
{
    const struct truth_row *row = &truth->rows[unit][token];

    for (unsigned i = 0; i < row->n_candidates; i++)
        if (row->candidates[i].content != content && is_seen(&row->candidates[i], since))
            return true;
    return false;
}

/* Whether what somebody with that generation was told still holds. */
static bool is_sure(const struct truth *truth, uint32_t token, uint32_t generation)
{
    if (truth->is_closing || generation <= truth->cut_generation[token])
        return false;
    for (uint32_t i = 0; i < truth->n_cuts; i++)
        if (token >= truth->cuts[i].tokens && generation <= truth->cuts[i].generation)
            return false;
    return true;
}

void truth_row_put(struct truth *truth,
                   uint32_t unit,
                   uint32_t token,
                   uint32_t content,
                   uint32_t generation,
                   uint64_t now)
{
    struct truth_row *row = &truth->rows[unit][token];
    bool is_there = false;

    for (unsigned i = 0; i < row->n_candidates; i++)
        is_there = is_there ||
                   (row->candidates[i].content == content && row->candidates[i].gone_at == 0);
    if (!is_there)
        return; /* a truncate came behind it */
    for (unsigned i = 0; i < row->n_candidates; i++) {
        struct truth_candidate *candidate = &row->candidates[i];

        if (candidate->content != content && candidate->gone_at == 0 &&
            candidate->generation <= generation)
            candidate->gone_at = now;
    }
    row->must = row->must || is_sure(truth, token, generation);
}

void truth_row_attach(
    struct truth *truth, uint32_t unit, uint32_t token, const uint32_t *contents, uint32_t n)
{
    struct truth_row *row = &truth->rows[unit][token];

    assert(row->n_candidates + n <= TRUTH_CANDIDATES_MAX);
    for (uint32_t i = 0; i < n; i++)
        row->candidates[row->n_candidates++] =
            (struct truth_candidate){.content = contents[i], .is_attached = true};
    row->must = true;
}

void truth_row_seen(
    struct truth *truth, uint32_t unit, uint32_t token, uint32_t content, uint64_t now)
{
    struct truth_row *row = &truth->rows[unit][token];
    bool is_attached = false;

    for (unsigned i = 0; i < row->n_candidates; i++)
        is_attached = is_attached ||
                      (row->candidates[i].is_attached && row->candidates[i].content == content);
    /* One of them that somebody has put may come, or be there, for that. */
    for (unsigned i = 0; i < row->n_candidates && is_attached; i++)
        if (row->candidates[i].is_attached && row->candidates[i].generation == 0 &&
            row->candidates[i].content != content && row->candidates[i].gone_at == 0)
            row->candidates[i].gone_at = now;
}

void truth_exists(struct truth *truth, uint32_t tokens, uint32_t generation)
{
    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++)
        for (uint32_t token = 0; token < tokens; token++)
            if (is_sure(truth, token, generation))
                truth->rows[unit][token].must = true;
}

uint32_t truth_unit_least(const struct truth *truth, uint32_t unit)
{
    uint32_t token = 0;

    while (token < TRUTH_TOKENS_MAX && truth->rows[unit][token].must)
        token++;
    return token;
}

uint32_t truth_least(const struct truth *truth)
{
    uint32_t least = TRUTH_TOKENS_MAX;

    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++) {
        uint32_t tokens = truth_unit_least(truth, unit);

        least = tokens < least ? tokens : least;
    }
    return least;
}

uint32_t truth_most(const struct truth *truth, uint64_t since)
{
    uint32_t least = TRUTH_TOKENS_MAX;

    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++)
        for (uint32_t token = 0; token < least; token++)
            if (!truth_row_disputes(truth, unit, token, 0, since))
                least = token;
    return least;
}

/* ---- what takes away --------------------------------------------------------------------- */

void truth_cut_begin(struct truth *truth, uint64_t id, uint32_t tokens, uint32_t generation)
{
    struct truth_cut *cut;

    if (truth->n_cuts == TRUTH_CUTS_MAX) {
        /* One for two: whatever either may do, the joined one may. */
        struct truth_cut *last = &truth->cuts[--truth->n_cuts], *other = &truth->cuts[0];

        other->id = 0;
        other->tokens = last->tokens < other->tokens ? last->tokens : other->tokens;
        if (last->generation > other->generation)
            other->generation = last->generation;
    }
    cut = &truth->cuts[truth->n_cuts++];
    *cut = (struct truth_cut){.id = id, .tokens = tokens, .generation = generation};
    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++)
        for (uint32_t token = tokens; token < TRUTH_TOKENS_MAX; token++)
            truth->rows[unit][token].must = false;
    truth->n_losses++;
}

void truth_cut_done(
    struct truth *truth, uint64_t id, uint32_t tokens, uint32_t generation, uint64_t now)
{
    for (uint32_t i = 0; i < truth->n_cuts; i++)
        if (truth->cuts[i].id == id)
            truth->cuts[i--] = truth->cuts[--truth->n_cuts];
    for (uint32_t token = tokens; token < TRUTH_TOKENS_MAX; token++)
        if (truth->cut_generation[token] < generation)
            truth->cut_generation[token] = generation;
    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++) {
        for (uint32_t token = tokens; token < TRUTH_TOKENS_MAX; token++) {
            struct truth_row *row = &truth->rows[unit][token];

            for (unsigned i = 0; i < row->n_candidates; i++)
                if (row->candidates[i].gone_at == 0 &&
                    row->candidates[i].generation <= generation)
                    row->candidates[i].gone_at = now;
        }
    }
}

bool truth_is_half_cut(const struct truth *truth, uint32_t token)
{
    for (uint32_t i = 0; i < truth->n_cuts; i++)
        if (token >= truth->cuts[i].tokens)
            return true;
    return false;
}

bool truth_is_on(const struct truth *truth, unsigned node)
{
    return truth->nodes == 0 || (truth->nodes >> node & 1) != 0;
}

void truth_node_lost(struct truth *truth, unsigned node)
{
    if (!truth_is_on(truth, node))
        return;
    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++)
        for (uint32_t token = 0; token < TRUTH_TOKENS_MAX; token++)
            if (truth->node_of_unit[unit] == node)
                truth->rows[unit][token].must = false;
    truth->lost_node = true;
    truth->n_losses++;
}

void truth_all_unsure(struct truth *truth)
{
    for (uint32_t unit = 0; unit < truth->schema.n_units; unit++)
        for (uint32_t token = 0; token < TRUTH_TOKENS_MAX; token++)
            truth->rows[unit][token].must = false;
    truth->n_losses++;
}

void truth_fork(const struct truth *parent,
                struct truth *child,
                uint32_t tokens,
                uint64_t since)
{
    memcpy(child->node_of_unit, parent->node_of_unit, sizeof(child->node_of_unit));
    child->is_fragile = parent->is_fragile;
    child->n_indexes = parent->n_indexes;
    for (uint32_t unit = 0; unit < parent->schema.n_units; unit++) {
        for (uint32_t token = 0; token < tokens; token++) {
            const struct truth_row *from = &parent->rows[unit][token];
            struct truth_row *to = &child->rows[unit][token];

            for (unsigned i = 0; i < from->n_candidates; i++)
                if (is_seen(&from->candidates[i], since))
                    to->candidates[to->n_candidates++] = (struct truth_candidate){
                        .content = from->candidates[i].content,
                        .is_attached = from->candidates[i].is_attached,
                    };
            to->must = true;
        }
    }
}
