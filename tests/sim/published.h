/* published.h - what sessions have published under the names of blocks, as far as a careful caller
 * can know.
 *
 * For each tenant, model and name of a block: which contents each row of a block may have that a
 * node keeps under that name.  Whoever publishes a block adds its own; none is ever taken away, for
 * the first complete copy stays, and a block that was evicted may be published again.  So a session
 * that is opened with the name may have any of them, and no other.
 *
 * A block may be sure: all nodes keep it, and nothing that is known of takes it away.
 *
 * Threads: one.  Memory: create/destroy.
 */
#ifndef KV_TESTS_SIM_PUBLISHED_H
#define KV_TESTS_SIM_PUBLISHED_H

#include "client/include/kvclient.h"

enum {
    PUBLISHED_CONTENTS_MAX = 4, /* of a row */
};

struct published;

/* Whose names they are: names of one model's prompts may be given to another's sessions. */
struct published_by {
    uint32_t tenant, model;
};

struct published_row {
    uint32_t contents[PUBLISHED_CONTENTS_MAX];
    uint32_t n;
};

struct published *published_create(void);
void published_destroy(struct published *published);

/* Whether the row has room for another content. */
bool published_row_has_room(const struct published *published,
                            const struct published_by *by,
                            const struct kv_id128 *name,
                            uint32_t unit,
                            uint32_t row);
/* false: there is no room. */
bool published_row_may(struct published *published,
                       const struct published_by *by,
                       const struct kv_id128 *name,
                       uint32_t unit,
                       uint32_t row,
                       uint32_t content);
/* NULL: nobody has published a block of that name. */
const struct published_row *published_row(const struct published *published,
                                          const struct published_by *by,
                                          const struct kv_id128 *name,
                                          uint32_t unit,
                                          uint32_t row);

/* How many of the first blocks may be kept whole, in n_units units. */
uint32_t published_most(const struct published *published,
                        const struct published_by *by,
                        const struct kv_id128 *names,
                        uint32_t n,
                        uint32_t n_units);
/* How many of the first blocks some node may keep its part of, of any model. */
uint32_t published_parts(const struct published *published,
                         uint32_t tenant,
                         const struct kv_id128 *names,
                         uint32_t n);

/* The first n blocks are sure from now on. */
void published_make_sure(struct published *published,
                         const struct published_by *by,
                         const struct kv_id128 *names,
                         uint32_t n);
/* None of the tenant's is any more. */
void published_doubt(struct published *published, uint32_t tenant);
/* How many of the first blocks are. */
uint32_t published_sure(const struct published *published,
                        const struct published_by *by,
                        const struct kv_id128 *names,
                        uint32_t n);

#endif
