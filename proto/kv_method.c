#include "proto/kv_method.h"

#include <string.h>

static const char *const names[KV_OP_COUNT] = {
    [KV_OP_HELLO] = "Hello",       [KV_OP_GOODBYE] = "Goodbye", [KV_OP_MODEL] = "Model",
    [KV_OP_OPEN] = "Open",         [KV_OP_RESUME] = "Resume",   [KV_OP_FORK] = "Fork",
    [KV_OP_TRUNCATE] = "Truncate", [KV_OP_CLOSE] = "Close",     [KV_OP_RENEW] = "Renew",
    [KV_OP_SESSION] = "Session",   [KV_OP_TABLE] = "Table",     [KV_OP_DRAIN] = "Drain",
    [KV_OP_PUBLISH] = "Publish",   [KV_OP_MATCH] = "Match",     [KV_OP_OBJECTS] = "Objects",
    [KV_OP_PREFIX] = "Prefix",     [KV_OP_VERIFY] = "Verify",   [KV_OP_SAVE] = "Save",
};

static_assert(KV_OP_COUNT == 50, "an operation was added: does it have a method?");

const char *kv_method_name(enum kv_op_id op)
{
    return (unsigned)op < KV_OP_COUNT ? names[op] : NULL;
}

enum kv_op_id kv_method_op(const char *name)
{
    for (unsigned op = 0; op < KV_OP_COUNT; op++) {
        if (names[op] != NULL && strcmp(names[op], name) == 0)
            return (enum kv_op_id)op;
    }
    return (enum kv_op_id)0;
}
