#include "gpu-worker/eval/fidelity.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct kvw_fidelity {
    uint32_t n_vocabulary;
    FILE *file;  /* (tokens, n_vocabulary): log probabilities by full attention */
    float *own;  /* (n_vocabulary) log probabilities at hand */
    float *full; /* (n_vocabulary) those of full attention */
};

kv_status_t kvw_fidelity_create(uint32_t n_vocabulary, struct kvw_fidelity **ret_fidelity)
{
    struct kvw_fidelity *fidelity = calloc(1, sizeof(*fidelity));

    if (fidelity == NULL)
        return KV_NO_MEMORY;
    fidelity->n_vocabulary = n_vocabulary;
    fidelity->own = malloc(n_vocabulary * sizeof(float));
    fidelity->full = malloc(n_vocabulary * sizeof(float));
    if (fidelity->own == NULL || fidelity->full == NULL) {
        kvw_fidelity_destroy(fidelity);
        return KV_NO_MEMORY;
    }
    fidelity->file = tmpfile();
    if (fidelity->file == NULL) {
        kvw_fidelity_destroy(fidelity);
        return KV_IO;
    }
    *ret_fidelity = fidelity;
    return KV_OK;
}

void kvw_fidelity_destroy(struct kvw_fidelity *fidelity)
{
    if (fidelity == NULL)
        return;
    if (fidelity->file != NULL)
        fclose(fidelity->file);
    free(fidelity->own);
    free(fidelity->full);
    free(fidelity);
}

/* Logits become log probabilities. */
static void take(struct kvw_fidelity *fidelity, const float *logits)
{
    double most = -INFINITY, sum = 0, log_sum;

    for (uint32_t i = 0; i < fidelity->n_vocabulary; i++)
        most = (double)logits[i] > most ? (double)logits[i] : most;
    for (uint32_t i = 0; i < fidelity->n_vocabulary; i++)
        sum += exp((double)logits[i] - most);
    log_sum = most + log(sum);
    for (uint32_t i = 0; i < fidelity->n_vocabulary; i++)
        fidelity->own[i] = (float)((double)logits[i] - log_sum);
}

static bool go_to(struct kvw_fidelity *fidelity, uint32_t at)
{
    const off_t offset = (off_t)at * fidelity->n_vocabulary * (off_t)sizeof(float);

    return fseeko(fidelity->file, offset, SEEK_SET) == 0;
}

double kvw_fidelity_full(struct kvw_fidelity *fidelity,
                         uint32_t at,
                         const float *logits,
                         uint32_t token,
                         kv_status_t *ret_status)
{
    take(fidelity, logits);
    if (!go_to(fidelity, at) ||
        fwrite(fidelity->own, sizeof(float), fidelity->n_vocabulary, fidelity->file) !=
            fidelity->n_vocabulary ||
        fflush(fidelity->file) != 0)
        *ret_status = KV_IO;
    return -(double)fidelity->own[token];
}

double kvw_fidelity_method(struct kvw_fidelity *fidelity,
                           uint32_t at,
                           const float *logits,
                           uint32_t token,
                           double *ret_kl,
                           kv_status_t *ret_status)
{
    double kl = 0;

    take(fidelity, logits);
    if (!go_to(fidelity, at) || fread(fidelity->full, sizeof(float), fidelity->n_vocabulary,
                                      fidelity->file) != fidelity->n_vocabulary)
        *ret_status = KV_IO;
    for (uint32_t i = 0; i < fidelity->n_vocabulary && *ret_status == KV_OK; i++) {
        const double p = (double)fidelity->full[i];

        kl += exp(p) * (p - (double)fidelity->own[i]);
    }
    *ret_kl = kl;
    return -(double)fidelity->own[token];
}

struct kvw_mean kvw_mean_difference(const double *values, const double *others, size_t n)
{
    const size_t n_blocks = (n + KVW_FIDELITY_BLOCK - 1) / KVW_FIDELITY_BLOCK;
    struct kvw_mean found = {NAN, NAN};
    double sum = 0, squares = 0;

    if (n == 0)
        return found;
    for (size_t i = 0; i < n; i++)
        sum += values[i] - (others != NULL ? others[i] : 0);
    found.mean = sum / (double)n;
    for (size_t begin = 0; begin < n; begin += KVW_FIDELITY_BLOCK) {
        double off = 0;

        for (size_t i = begin; i < n && i < begin + KVW_FIDELITY_BLOCK; i++)
            off += values[i] - (others != NULL ? others[i] : 0) - found.mean;
        squares += off * off;
    }
    if (n_blocks > 1)
        found.error = sqrt(squares * (double)n_blocks / (double)(n_blocks - 1)) / (double)n;
    return found;
}

struct kvw_mean kvw_mean_of(const double *values, size_t n)
{
    return kvw_mean_difference(values, NULL, n);
}
