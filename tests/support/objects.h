/* objects.h - objects by number, whose bytes follow from the number and from a content; and what a node
 * says that it has on disk.
 *
 * Threads: one.  Memory: the caller's.
 */
#ifndef KV_TESTS_SUPPORT_OBJECTS_H
#define KV_TESTS_SUPPORT_OBJECTS_H

#include "client/include/kvclient.h"

#include <stdbool.h>

struct test_objects {
    struct kv_client *client;
    struct kv_buffer *buffer;            /* as large as the largest */
    size_t (*bytes_of)(uint32_t number); /* of each */
    uint32_t deadline_ms;                /* 0: the client's */
};

/* Each returns the object's status.  A get that succeeds has brought these bytes, or fails the test. */
kv_status_t test_object_put(const struct test_objects *objects,
                            uint32_t number,
                            uint32_t content,
                            uint32_t ttl_ms,
                            bool evictable);
kv_status_t
test_object_get(const struct test_objects *objects, uint32_t number, uint32_t content);
kv_status_t test_object_delete(const struct test_objects *objects, uint32_t number);

/* One question of it. */
struct kv_verification
test_verify_ask(struct kv_client *client, uint32_t node, uint64_t since_us);
/* What a node finds on disk, and bad in memory, while it verifies all that it has. */
struct kv_verification test_verify(struct kv_client *client, uint32_t node);

/* A number in the line "disk" of the first node's table of tiers. */
double test_disk_number(struct kv_client *client, const char *column);
/* Waits until the number is at least `least` and at most `most`: data threads tell theirs now and
 * then. */
void test_wait_disk(struct kv_client *client, const char *column, double least, double most);

#endif
