#include "tests/sim/published.h"

#include "tests/sim/truth.h"
#include "tests/support/failing_memory.h"

#include <stdlib.h>
#include <string.h>

enum {
    BUCKETS = 256,
};

struct block {
    struct block *next;
    struct published_by by;
    struct kv_id128 name;
    bool is_sure;
    struct published_row rows[TRUTH_UNITS_MAX][KV_BLOCK_TOKENS];
};

struct published {
    struct block *buckets[BUCKETS];
};

struct published *published_create(void)
{
    return failing_memory_sure(1, sizeof(struct published));
}

void published_destroy(struct published *published)
{
    for (unsigned i = 0; i < BUCKETS; i++)
        while (published->buckets[i] != NULL) {
            struct block *next = published->buckets[i]->next;

            free(published->buckets[i]);
            published->buckets[i] = next;
        }
    free(published);
}

/* Names are hashes, so one byte of them chooses as well as all. */
static struct block *find(const struct published *published,
                          const struct published_by *by,
                          const struct kv_id128 *name)
{
    struct block *block = published->buckets[name->bytes[0]];

    while (block != NULL && (block->by.tenant != by->tenant || block->by.model != by->model ||
                             memcmp(&block->name, name, sizeof(*name)) != 0))
        block = block->next;
    return block;
}

/* ---- rows -------------------------------------------------------------------------------- */

bool published_row_has_room(const struct published *published,
                            const struct published_by *by,
                            const struct kv_id128 *name,
                            uint32_t unit,
                            uint32_t row)
{
    const struct published_row *known = published_row(published, by, name, unit, row);

    return known == NULL || known->n < PUBLISHED_CONTENTS_MAX;
}

bool published_row_may(struct published *published,
                       const struct published_by *by,
                       const struct kv_id128 *name,
                       uint32_t unit,
                       uint32_t row,
                       uint32_t content)
{
    struct block *block = find(published, by, name);
    struct published_row *known;

    if (block == NULL) {
        block = failing_memory_sure(1, sizeof(*block));
        block->by = *by;
        block->name = *name;
        block->next = published->buckets[name->bytes[0]];
        published->buckets[name->bytes[0]] = block;
    }
    known = &block->rows[unit][row];
    for (uint32_t i = 0; i < known->n; i++)
        if (known->contents[i] == content)
            return true;
    if (known->n == PUBLISHED_CONTENTS_MAX)
        return false;
    known->contents[known->n++] = content;
    return true;
}

const struct published_row *published_row(const struct published *published,
                                          const struct published_by *by,
                                          const struct kv_id128 *name,
                                          uint32_t unit,
                                          uint32_t row)
{
    const struct block *block = find(published, by, name);

    return block != NULL ? &block->rows[unit][row] : NULL;
}

/* ---- blocks ------------------------------------------------------------------------------ */

static bool is_whole(const struct block *block, uint32_t n_units)
{
    for (uint32_t unit = 0; unit < n_units; unit++)
        for (uint32_t row = 0; row < KV_BLOCK_TOKENS; row++)
            if (block->rows[unit][row].n == 0)
                return false;
    return true;
}

uint32_t published_most(const struct published *published,
                        const struct published_by *by,
                        const struct kv_id128 *names,
                        uint32_t n,
                        uint32_t n_units)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct block *block = find(published, by, &names[i]);

        if (block == NULL || !is_whole(block, n_units))
            return i;
    }
    return n;
}

uint32_t published_parts(const struct published *published,
                         uint32_t tenant,
                         const struct kv_id128 *names,
                         uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct block *block = published->buckets[names[i].bytes[0]];

        while (block != NULL && (block->by.tenant != tenant ||
                                 memcmp(&block->name, &names[i], sizeof(names[i])) != 0))
            block = block->next;
        if (block == NULL)
            return i;
    }
    return n;
}

/* ---- what is sure ------------------------------------------------------------------------ */

void published_make_sure(struct published *published,
                         const struct published_by *by,
                         const struct kv_id128 *names,
                         uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct block *block = find(published, by, &names[i]);

        if (block != NULL)
            block->is_sure = true;
    }
}

void published_doubt(struct published *published, uint32_t tenant)
{
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct block *block = published->buckets[i]; block != NULL; block = block->next)
            if (block->by.tenant == tenant)
                block->is_sure = false;
}

uint32_t published_sure(const struct published *published,
                        const struct published_by *by,
                        const struct kv_id128 *names,
                        uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct block *block = find(published, by, &names[i]);

        if (block == NULL || !block->is_sure)
            return i;
    }
    return n;
}
