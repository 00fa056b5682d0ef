/* roots.c - the sessions of one root, counted; and over how many rows they are to be spread.
 *
 * The load of a row of a root is how many of its sessions are here since the root has as many
 * rows as it has: with k rows of at most n sessions each, k grows as the sessions do.  What is
 * counted are sessions, not what they do: they stay where they are, and any may become busy.
 * Nodes do not speak with each other, so each finds out for itself, or is told by a client that
 * another node has told. */
#include "kvserver/store/control/control.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* A tenant's roots are its own: what one tenant's clients tell does not reach another's. */
static struct kv_id128 key_of(uint32_t tenant, uint64_t prompt_root)
{
    struct kv_id128 key = {{0}};

    memcpy(key.bytes, &prompt_root, sizeof(prompt_root));
    memcpy(key.bytes + sizeof(prompt_root), &tenant, sizeof(tenant));
    return key;
}

/* From now on sessions are opened over more rows.  Those that are here stay; a bound's worth may
 * come until they are too many again. */
static void spread(struct kvs_root *root, uint32_t n_rows)
{
    root->n_rows = n_rows;
    memset(root->n_since, 0, sizeof(root->n_since));
}

static void count(struct kvs_root *root, struct kvs_session *session, uint32_t row)
{
    root->n_sessions++;
    root->n_since[row]++;
    session->shared_root = root;
    session->rows_then = root->n_rows;
    session->row_then = row;
}

uint32_t kvs_root_update_rows(struct kvs_control *control,
                              uint32_t tenant,
                              uint64_t prompt_root,
                              uint32_t branch,
                              uint32_t n_rows_known)
{
    const struct kv_id128 key = key_of(tenant, prompt_root);
    struct kvs_root *root = kv_map_get(control->roots, &key);

    if (root == NULL)
        return n_rows_known;
    if (root->n_rows < n_rows_known)
        spread(root, n_rows_known);
    else if (root->n_since[branch % root->n_rows] >= control->config.root_sessions &&
             root->n_rows < KV_ROOT_ROWS_MAX)
        spread(root, 2 * root->n_rows);
    return root->n_rows;
}

bool kvs_root_enter(struct kvs_control *control,
                    struct kvs_session *session,
                    uint64_t prompt_root,
                    uint32_t branch,
                    uint32_t n_rows)
{
    const struct kv_id128 key = key_of(session->tenant, prompt_root);
    struct kvs_root *root = kv_map_get(control->roots, &key);

    assert(session->shared_root == NULL);
    if (root == NULL) {
        root = malloc(sizeof(*root));
        if (root == NULL || !kv_map_set(control->roots, &key, root)) {
            free(root);
            return false;
        }
        *root = (struct kvs_root){.key = key, .n_rows = n_rows};
    }
    count(root, session, branch % root->n_rows);
    return true;
}

void kvs_root_follow(struct kvs_session *child, const struct kvs_session *parent)
{
    if (parent->shared_root != NULL)
        count(parent->shared_root, child, parent->row_then);
}

void kvs_root_leave(struct kvs_control *control, struct kvs_session *session)
{
    struct kvs_root *root = session->shared_root;

    if (root == NULL)
        return;
    session->shared_root = NULL;
    root->n_sessions--;
    if (session->rows_then == root->n_rows)
        root->n_since[session->row_then]--;
    if (root->n_sessions == 0) {
        kv_map_remove(control->roots, &root->key);
        free(root);
    }
}

void kvs_roots_fini(struct kvs_control *control)
{
    size_t cursor = 0;
    struct kvs_root *root;

    if (control->roots == NULL)
        return;
    while ((root = kv_map_next(control->roots, &cursor)) != NULL)
        free(root);
    kv_map_destroy(control->roots);
}
