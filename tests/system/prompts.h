/* prompts.h - a client that works on prompts whose blocks are kept under their names, as engines
 * do, and checks every byte.
 *
 *     talk    opened by the names of its blocks -> what was attached is read, the rest is put
 *             and published -> turns: more rows, a query, sometimes codes -> closed
 *
 * Where nodes may fail, a talk whose operation has failed is opened again by its names, and what is
 * missing is put again: what the library asks of its callers.  It must work in the end.
 *
 * Threads: one.  Memory: a child has its own.
 */
#ifndef KV_TESTS_SYSTEM_PROMPTS_H
#define KV_TESTS_SYSTEM_PROMPTS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    PROMPTS_BLOCK_BYTES = 128 << 10, /* of all units */
    PROMPTS_UNITS = 4,
    PROMPTS_BLOCKS = 16,       /* of the longest prompt; the shortest has half as many */
    PROMPTS_TURN_TOKENS = 192, /* put in one turn, but for the first one */
    PROMPTS_UNPUBLISHED_TOKENS =
        320, /* that a talk may have put and not published: a turn's, and a block
                                      * that is not full */
};

struct prompts_options {
    const char *nodes;
    const char *transport;
    uint64_t seed; /* of the prompts' rows: another client of the same seed has the same */
    uint32_t n_prompts;
    bool has_objects; /* puts evictable objects, too */
    bool nodes_may_fail;
    uint32_t deadline_ms; /* of every operation */
};

/* What a client has done. */
struct prompts_counts {
    uint64_t turns;
    uint64_t put_bytes, read_bytes;    /* of rows */
    uint64_t attached_bytes;           /* of rows that were there when a talk was opened */
    uint64_t objects;                  /* that came back */
    uint64_t failures;                 /* operations that failed since a node was away */
    uint64_t resumed;                  /* talks that went on after that */
    uint64_t kept_tokens, lost_tokens; /* of these: attached again, put again */
    uint64_t away_ms;                  /* the longest time without a success, since last told */
};

/* What the test's children do: system_main() calls it. */
int prompts_child(int argc, char **argv);

struct process;

/* Starts a child with these options. */
bool prompts_start(struct process *process, const struct prompts_options *options);

/* Asks for what it has done; it answers between two turns. */
bool prompts_ask(struct process *process, struct prompts_counts *ret_counts);

/* Ends it; returns whether all was as it must be. */
bool prompts_stop(struct process *process);

#endif
