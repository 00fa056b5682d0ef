/* question.h - random index requests and queries about a session, and whether what came back is
 * what the session's rows say.
 *
 * The choice is held against the oracle's (tests/support/oracle.h), from the truth's rows and
 * what their codes stand for, taken out of the node.  Where the node has other codes by now
 * than the query went by, what must hold for any codes is checked: the count, the order, the
 * counters. Attention is that over the rows that the oracle chooses, or that the answer names.
 *
 * Threads: one.  Memory: the caller's; a question owns its vectors.
 */
#ifndef KV_TESTS_SIM_QUESTION_H
#define KV_TESTS_SIM_QUESTION_H

#include "kvserver/base/random.h"
#include "tests/sim/truth.h"

enum {
    QUESTION_RANGES_MAX = 6,
    QUESTION_HELD_MAX = TRUTH_UNITS_MAX * (TRUTH_TOKENS_MAX / KV_BLOCK_TOKENS),
};

struct kvs_node;

struct question {
    struct kv_query query;
    uint32_t n_heads;
    uint32_t tokens;     /* that must be committed */
    bool is_sure;        /* all candidates must be there */
    bool has_codes;      /* of these keys none can be scored */
    bool may_be_damaged; /* keys in a node's memory: what is chosen by them is not known */
    bool may_lack_crcs; /* a node may have lost some, and not know blocks that the client has */
    float *vectors;
    struct kv_range ranges[QUESTION_RANGES_MAX];
    uint32_t each[TRUTH_UNITS_MAX]; /* candidates, if query.candidates_each is that */
    uint32_t n_held[TRUTH_UNITS_MAX];
    struct kv_cached_block held[QUESTION_HELD_MAX];
    bool is_right[QUESTION_HELD_MAX]; /* the block has that fingerprint, as far as is known */
};

/* false: there is nothing to ask.
 *   like  of the same layer and heads as this one, where the session has them; NULL: of any */
bool question_make(struct question *question,
                   const struct truth *truth,
                   const struct kv_session *session,
                   const struct kv_query *like,
                   struct kv_random *random);
void question_free(struct question *question);

/* A query that ended well, and began at `since`: NULL, or what is wrong.
 *   nodes  by place, NULL where one is dead; NULL: rows may have lost their codes since */
const char *question_fault(const struct question *question,
                           const struct truth *truth,
                           struct kvs_node *const *nodes,
                           const struct kv_session *session,
                           uint64_t since,
                           const struct kv_op *op);

/* false: there is nothing to index. */
bool question_index(struct kv_index_options *index,
                    const struct truth *truth,
                    struct kv_random *random);
bool question_index_is_sure(const struct kv_index_options *index, const struct truth *truth);
/* Whether all layers have keys that codes can be made of. */
bool question_index_is_possible(const struct kv_index_options *index,
                                const struct truth *truth);

/* An index request that ended well.  is_first: nobody ever asked for codes of these rows. */
const char *question_index_fault(const struct kv_index_options *index,
                                 const struct truth *truth,
                                 bool is_first,
                                 const struct kv_index_result *indexed);

#endif
