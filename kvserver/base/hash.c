#include "kvserver/base/hash.h"

#include <assert.h>
#include <openssl/evp.h>
#include <stdatomic.h>
#include <string.h>

enum {
    SHA256_BYTES = 32
};

/* EVP_sha256() would look up the digest in every call, which costs as much as hashing a block.
 * A fetched digest is kept until the process ends. */
static const EVP_MD *sha256(void)
{
    static EVP_MD *_Atomic shared;
    EVP_MD *digest = atomic_load_explicit(&shared, memory_order_acquire);

    if (digest == NULL) {
        EVP_MD *fetched = EVP_MD_fetch(NULL, "SHA256", NULL);

        /* Two threads may fetch it at once: the first one's is kept. */
        if (atomic_compare_exchange_strong(&shared, &digest, fetched))
            digest = fetched;
        else
            EVP_MD_free(fetched);
    }
    return digest;
}

struct kv_id128 kv_hash128(const void *data, size_t bytes)
{
    unsigned char digest[SHA256_BYTES];
    unsigned digest_bytes = 0;
    struct kv_id128 id;
    int done = EVP_Digest(data, bytes, digest, &digest_bytes, sha256(), NULL);

    /* A wrong name would mix the data of two owners, so abort. */
    assert(done == 1 && digest_bytes == SHA256_BYTES);
    memcpy(id.bytes, digest, sizeof(id.bytes));
    return id;
}

struct kv_id128 kv_block_extra(const struct kv_id128 *extra,
                               int64_t first_token,
                               const void *bytes,
                               size_t n_bytes)
{
    struct {
        struct kv_id128 extra;
        int64_t first_token;
        struct kv_id128 key;
    } text = {*extra, first_token, kv_hash128(bytes, n_bytes)};

    static_assert(sizeof(text) == 40, "no padding: all of it is hashed");
    return kv_hash128(&text, sizeof(text));
}

struct kv_id128 kv_block_name(const struct kv_id128 *parent,
                              const struct kv_id128 *fingerprint,
                              const struct kv_id128 *salt,
                              const struct kv_id128 *extra,
                              const uint32_t *tokens,
                              size_t n_tokens)
{
    struct {
        struct kv_id128 parent, fingerprint, salt, extra;
        uint32_t tokens[KV_BLOCK_TOKENS];
    } text;

    assert(n_tokens <= KV_BLOCK_TOKENS);
    text.parent = *parent;
    text.fingerprint = *fingerprint;
    text.salt = *salt;
    text.extra = *extra;
    if (n_tokens > 0)
        memcpy(text.tokens, tokens, n_tokens * sizeof(*tokens));
    return kv_hash128(&text, offsetof(__typeof__(text), tokens) + n_tokens * sizeof(*tokens));
}
