/* session_record.h - a named session: what another process needs to go on with it, as an object in
 * the store, "kvworker/session/NAME/0" to ".../7".
 *
 *     prefill  ---- record ---->  decode          the same ticket: rows that are there are read
 *     chat     ---- record ---->  chat, later     the tokens: what is not there is computed again
 *
 * A record is never changed.  The next one has the next number and the object number mod 8; once
 * the store has it, those before the last two are deleted.  So whenever a writer dies, the last
 * complete record is there.  Of two writers at once, the later one wins, and learns of the other.
 * Objects belong to a tenant, so others have their own sessions under the same name.
 *
 * Records are untrusted: kvw_record_load() checks all counts and lengths.  Whether tokens are in a
 * vocabulary and messages make a conversation, its caller checks.
 *
 * Threads: the client's.  Memory: kvw_record_load() and the caller / kvw_record_fini().
 */
#ifndef KV_GPU_WORKER_KVCACHE_SESSION_RECORD_H
#define KV_GPU_WORKER_KVCACHE_SESSION_RECORD_H

#include "client/include/kvclient.h"

#include <stdbool.h>

enum {
    KVW_RECORD_NAME_MAX = 200,
    KVW_RECORD_MESSAGES_MAX = 1 << 16,
    KVW_RECORD_RANDOM_WORDS = 4,
};

struct kvw_record_message {
    uint32_t role; /* the caller's; at most UINT8_MAX */
    char *text;    /* 0-terminated, without other zeros */
};

struct kvw_record {
    uint64_t number;             /* of the record in the store; 0: none so far */
    struct kv_id128 fingerprint; /* of the model and the type of its rows */
    struct kv_ticket ticket;     /* of the session with the rows */
    uint32_t n_stored;           /* of `tokens`, those whose rows it has */
    bool is_arriving;            /* a worker is, or was, bringing them */
    uint32_t n_tokens;
    uint32_t *tokens; /* (n_tokens) */
    uint32_t n_messages;
    struct kvw_record_message *messages;      /* (n_messages) of a conversation */
    uint64_t random[KVW_RECORD_RANDOM_WORDS]; /* of the sampler; zeros: unknown */
};

/* Whether a session may have that name: 1 to KVW_RECORD_NAME_MAX bytes, no control characters. */
bool kvw_record_is_name(const char *name);

/* Gets the last record of a name.  Fails with KV_NOT_FOUND if there is none, with KV_CORRUPT if
 * what is there is no record, with KV_VERSION if a later kvworker wrote it, with KV_UNREACHABLE
 * if a node that may have it is down, and with KV_NO_MEMORY; `detail` then says why.  *ret_lost:
 * the last one may be on a node that is down, or is damaged, and this one is older. */
kv_status_t kvw_record_load(struct kv_client *client,
                            const char *name,
                            struct kvw_record *ret_record,
                            bool *ret_lost,
                            char *detail,
                            size_t detail_bytes);

/* Puts a record as the next one after record->number, and sets that to its own.  Fails with
 * KV_EXISTS if another writer has put that one already: load it, or set the number to the last
 * one's to overwrite it. */
kv_status_t kvw_record_save(struct kv_client *client,
                            const char *name,
                            struct kvw_record *record,
                            char *detail,
                            size_t detail_bytes);

/* Frees tokens and messages. */
void kvw_record_fini(struct kvw_record *record);

#endif
