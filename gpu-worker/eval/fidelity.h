/* fidelity.h - how far a method's predictions are from full attention's.
 *
 *   loss   of a token: minus the log likelihood that was given to it, in nats
 *   KL     of a token: sum over the vocabulary of p ln(p / q), in nats, where p is what full
 *          attention predicted and q what the method did.  All that was predicted counts, not only
 *          the token that came: it needs far fewer tokens than the loss to tell two methods apart
 *
 * Neighbouring tokens err together, so standard errors are of blocks of tokens.
 *
 * Threads: one.  Memory: create/destroy; full attention's predictions are in a temporary file,
 * n_vocabulary floats a token.
 */
#ifndef KV_GPU_WORKER_EVAL_FIDELITY_H
#define KV_GPU_WORKER_EVAL_FIDELITY_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVW_FIDELITY_BLOCK = 64, /* tokens */
};

struct kvw_fidelity;

/* Fails with KV_NO_MEMORY, or KV_IO: errno says why there is no temporary file. */
kv_status_t kvw_fidelity_create(uint32_t n_vocabulary, struct kvw_fidelity **ret_fidelity);
void kvw_fidelity_destroy(struct kvw_fidelity *fidelity); /* NULL is allowed */

/* Takes the logits (n_vocabulary) that full attention gave after token number `at`.  Returns the
 * loss of the token that came.  *ret_status is KV_IO if the file does not take them. */
double kvw_fidelity_full(struct kvw_fidelity *fidelity,
                         uint32_t at,
                         const float *logits,
                         uint32_t token,
                         kv_status_t *ret_status);

/* The same of a method, after kvw_fidelity_full() of that number; *ret_kl is its KL. */
double kvw_fidelity_method(struct kvw_fidelity *fidelity,
                           uint32_t at,
                           const float *logits,
                           uint32_t token,
                           double *ret_kl,
                           kv_status_t *ret_status);

struct kvw_mean {
    double mean, error; /* standard error by blocks; NAN with fewer than two */
};

/* Of n values in the order of their tokens, and of their differences to others. */
struct kvw_mean kvw_mean_of(const double *values, size_t n);
struct kvw_mean kvw_mean_difference(const double *values, const double *others, size_t n);

#endif
