/* recorded_messages.h - the messages of a conversation, kept as text, and those of this build
 * beside them.
 *
 *   message 7 round 31 at 600200 from 2 to 0 header 160
 *     0500010b 00*4 ...             bytes, in hexadecimal; 00*4: that byte four times
 *     rows 0 0 1 0 256              256 rows of recorded_row(): model, layer, head, first token
 *
 * `round` is how often all parties had taken a step when it was sent, `at` what the clock
 * showed, in microseconds; ports are numbered by transport_tap.h.  What follows # is for
 * readers.
 *
 * Threads: one.  Memory: recorded_free().
 */
#ifndef KV_TESTS_SUPPORT_RECORDED_MESSAGES_H
#define KV_TESTS_SUPPORT_RECORDED_MESSAGES_H

#include "proto/kv_wire.h"

#include <stdbool.h>

struct recorded_message {
    uint64_t round, at_us;
    unsigned from, to;
    size_t header_bytes, bytes; /* of both together */
    uint8_t *data;
};

struct recorded_messages {
    struct recorded_message *messages;
    size_t n, room;
};

/* Rows that need not be kept, since they follow from their place. */
struct recorded_box {
    uint32_t model, layer, head, n_tokens;
    uint32_t row_bytes;
};

/* A row of finite numbers, whatever their type. */
void recorded_row(
    void *row, size_t bytes, uint32_t model, uint32_t layer, uint32_t head, uint32_t token);

/* Appends one with room for its bytes, which the caller fills in. */
struct recorded_message *recorded_add(struct recorded_messages *list, size_t bytes);
void recorded_free(struct recorded_messages *list);

/* `boxes` end with one of no tokens. */
bool recorded_save(const char *path,
                   const char *head,
                   const struct recorded_messages *list,
                   const struct recorded_box *boxes);
bool recorded_load(const char *path,
                   const struct recorded_box *boxes,
                   struct recorded_messages *ret_list);

/* The same messages in the same order.  Prints the first that differs: its number, what it is,
 * the byte, and the field that the byte is of.
 *
 * The text of a failure is for people and may be put in other words: the bodies of replies that
 * have another status than KV_OK are not compared, and neither are their header's body_bytes,
 * body_crc and header_crc. */
bool recorded_messages_same(const struct recorded_messages *recorded,
                            const struct recorded_messages *now);

#endif
