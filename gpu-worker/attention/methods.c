/* The attention methods there are. */
#include "gpu-worker/attention/method.h"

#include <string.h>

static const struct kv_attention_row *const rows[] = {
    &kv_attention_full,   &kv_attention_pqcache, &kv_attention_oracle,
    &kv_attention_window, &kv_attention_random,
};

const struct kv_attention_row *kv_attention_find(const char *name)
{
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (strcmp(rows[i]->name, name) == 0)
            return rows[i];
    return NULL;
}
