/* truth.h - what a session may and must contain, as far as a careful caller can know.
 *
 * A row of a session has candidates: contents that some put may have left there.  An operation
 * whose outcome is unknown adds to what may be; an operation that succeeded takes away.
 *
 *     put begins            its rows are candidates
 *     put is acknowledged   the others of that generation or before are none any more
 *     truncate begins       rows behind it need not be there any more
 *     truncate succeeds     candidates of the generation before it are none any more, and what
 *                           is heard of that generation later says nothing of those rows
 *     a node dies           none of its rows need be there
 *     rows are attached     what was published under their block's name are candidates (published.h);
 *                           who reads one knows which it is
 *
 * A candidate that is none any more may still be seen by who began to read before; so each
 * remembers when that was, as a number of the world's steps.
 *
 * Threads: one.  Memory: create/destroy.
 */
#ifndef KV_TESTS_SIM_TRUTH_H
#define KV_TESTS_SIM_TRUTH_H

#include "client/include/kvclient.h"

enum {
    TRUTH_TOKENS_MAX = 2300,
    TRUTH_TOKENS_LARGE = 640, /* of a model whose rows are large */
    TRUTH_UNITS_MAX = 12,
    TRUTH_CANDIDATES_MAX = 6,
    TRUTH_CUTS_MAX = 16,
    TRUTH_BLOCKS_MAX = TRUTH_TOKENS_MAX / KV_BLOCK_TOKENS,
};

struct truth_candidate {
    uint32_t content;
    uint32_t generation; /* the latest that a put of it may have had */
    uint64_t gone_at;    /* 0: it may be there */
    bool is_attached;    /* the session, or whose fork it is, was opened with it */
};

struct truth_row {
    struct truth_candidate candidates[TRUTH_CANDIDATES_MAX];
    uint8_t n_candidates;
    bool must; /* somebody was told that there is a row */
};

/* A truncate that may still take effect. */
struct truth_cut {
    uint64_t id;
    uint32_t tokens;
    uint32_t generation; /* before it, at most */
};

struct truth {
    uint64_t number;
    kv_schema_t schema;
    uint32_t tokens_max; /* that anybody puts */
    struct kv_ticket ticket;
    uint8_t node_of_unit[TRUTH_UNITS_MAX];
    uint32_t nodes; /* that it is on, a bit each; 0: not known yet, so any */
    struct truth_row rows[TRUTH_UNITS_MAX][TRUTH_TOKENS_MAX];
    struct truth_cut cuts[TRUTH_CUTS_MAX];
    uint32_t n_cuts;
    /* The latest generation whose rows a truncate has taken away there.  0: none has. */
    uint32_t cut_generation[TRUTH_TOKENS_MAX];
    uint64_t n_losses;  /* times that rows ceased to be sure */
    bool is_closing;    /* a close has begun */
    uint64_t closed_at; /* a close has succeeded */
    bool lost_node;     /* one of its nodes has died */
    bool is_fragile;    /* its lease may end early */
    bool was_shared;    /* two handles at once, at some time */
    bool is_unclear;    /* a fork or truncate has failed */
    unsigned n_indexes; /* times that anybody may have asked for codes of its rows */
    unsigned n_handles;
    unsigned n_tasks;
    uint64_t idle_us; /* when the last handle went */
    /* Its prompt: whose, the names of its blocks, and how many of these all nodes know. */
    uint32_t tenant, model;
    bool has_prompt;
    struct kv_id128 names[TRUTH_BLOCKS_MAX];
    uint32_t n_named;
    uint32_t n_shared; /* of these: that it was opened with, or was told that they are kept */
    /* Blocks before that may be published at any time: by what is under way, or may still come to
     * be, as long as a session has that generation or one before. */
    unsigned n_publishing;
    uint32_t publishing_end, doubted_end, doubted_generation;
    struct truth *next;
};

struct truth *truth_create(const kv_schema_t *schema);
void truth_destroy(struct truth *truth);

/* The bytes of a row: its content's number, then what follows from that and the place; as
 * elements of any type they are at most 2 in size. */
void truth_row_fill(uint8_t *row,
                    size_t row_bytes,
                    uint32_t content,
                    uint32_t layer,
                    uint32_t head,
                    uint32_t token);
/* The content's number; 0: these are not the bytes of any row at that place. */
uint32_t truth_row_content(
    const uint8_t *row, size_t row_bytes, uint32_t layer, uint32_t head, uint32_t token);

/* A content that a put may repeat there; 0: there is none.  *ret_choices: how many there are.
 */
uint32_t truth_row_known(const struct truth *truth,
                         uint32_t unit,
                         uint32_t token,
                         unsigned pick,
                         unsigned *ret_choices);
/* false: too many contents may be there already. */
bool truth_row_may(struct truth *truth,
                   uint32_t unit,
                   uint32_t token,
                   uint32_t content,
                   uint32_t generation,
                   uint64_t oldest_at);
/* Whether that content may have been seen by who began to look at `since`. */
bool truth_row_allows(
    const struct truth *truth, uint32_t unit, uint32_t token, uint32_t content, uint64_t since);
/* Whether another one may have been there. */
bool truth_row_disputes(
    const struct truth *truth, uint32_t unit, uint32_t token, uint32_t content, uint64_t since);
/* The put was acknowledged at that generation. */
void truth_row_put(struct truth *truth,
                   uint32_t unit,
                   uint32_t token,
                   uint32_t content,
                   uint32_t generation,
                   uint64_t now);

/* Rows that a session was opened with have one of these contents. */
void truth_row_attach(
    struct truth *truth, uint32_t unit, uint32_t token, const uint32_t *contents, uint32_t n);
/* The row was read, by who began when it was there: of what may have been attached, it is that. */
void truth_row_seen(
    struct truth *truth, uint32_t unit, uint32_t token, uint32_t content, uint64_t now);

/* Somebody with that generation was told that all rows before `tokens` exist. */
void truth_exists(struct truth *truth, uint32_t tokens, uint32_t generation);

/* Tokens that all units must have, or may have had since then. */
uint32_t truth_least(const struct truth *truth);
uint32_t truth_most(const struct truth *truth, uint64_t since);
uint32_t truth_unit_least(const struct truth *truth, uint32_t unit);

void truth_cut_begin(struct truth *truth, uint64_t id, uint32_t tokens, uint32_t generation);
void truth_cut_done(
    struct truth *truth, uint64_t id, uint32_t tokens, uint32_t generation, uint64_t now);
/* Whether a truncate may have reached some nodes and not others, where the token's row was made
 * anew: the same bytes have another writer's checksum there. */
bool truth_is_half_cut(const struct truth *truth, uint32_t token);
/* Whether the session may be on the node, as far as is known. */
bool truth_is_on(const struct truth *truth, unsigned node);
/* The node has died, and with it what of the session was on it. */
void truth_node_lost(struct truth *truth, unsigned node);
void truth_all_unsure(struct truth *truth);

/* A fork that succeeded: its first tokens are the parent's. */
void truth_fork(const struct truth *parent,
                struct truth *child,
                uint32_t tokens,
                uint64_t since);

#endif
