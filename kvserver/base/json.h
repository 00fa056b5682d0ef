/* json.h - writes JSON objects, one per line.
 *
 *     struct kv_json json;
 *     kv_json_begin(&json, stdout);
 *     kv_json_text(&json, "node", "127.0.0.1:7400");
 *     kv_json_number(&json, "sessions", 3);
 *     kv_json_end(&json);                      {"node": "127.0.0.1:7400", "sessions": 3}
 *
 * A member may be a list of numbers or of objects:
 *
 *     kv_json_list(&json, "nodes");
 *     kv_json_item(&json);
 *     kv_json_number(&json, "rows", 7);
 *     kv_json_item_end(&json);
 *     kv_json_list_end(&json);                 "nodes": [{"rows": 7}]
 *
 * Threads: none of its own.  Memory: the writer keeps only its FILE.
 */
#ifndef KV_KVSERVER_BASE_JSON_H
#define KV_KVSERVER_BASE_JSON_H

#include <stdbool.h>
#include <stdio.h>

struct kv_json {
    FILE *out;
    bool has_members;
};

void kv_json_begin(struct kv_json *json, FILE *out);
void kv_json_end(struct kv_json *json);

/* Writes a string.  Bytes that are not UTF-8 become U+FFFD, so that the output is valid JSON.
 */
void kv_json_text(struct kv_json *json, const char *key, const char *value);

/* Writes a number: integers without a decimal point, null if not finite. */
void kv_json_number(struct kv_json *json, const char *key, double value);
void kv_json_bool(struct kv_json *json, const char *key, bool value);

/* A member that is an object. */
void kv_json_object(struct kv_json *json, const char *key);
void kv_json_object_end(struct kv_json *json);

void kv_json_list(struct kv_json *json, const char *key);
void kv_json_list_end(struct kv_json *json);
void kv_json_item(struct kv_json *json); /* an object of a list */
void kv_json_item_end(struct kv_json *json);
void kv_json_item_number(struct kv_json *json, double value);

/* Returns the length of the UTF-8 character at `text`, 1..4; 0 if there is no valid one. */
unsigned kv_utf8_bytes(const char *text);

#endif
