/* Mooncake beside us: a Python program that runs its master and two of its clients, and times
 * what it is told to.
 *
 *   to it     put BYTES COUNT        or  get BYTES COUNT
 *   from it   {"ready": "0.3.13"}    once; then one {"seconds": S} per line that it was sent
 */
#include "tests/bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    READY_MS = 60000,
    ANSWER_MS = 120000,
};

struct bench_mooncake {
    pid_t pid;
    int in, out; /* its stdin, its stdout */
    char name[64];
};

bool bench_mooncake_open(struct bench *bench,
                         uint64_t segment_bytes,
                         struct bench_mooncake **ret_mooncake)
{
    struct bench_mooncake *self = calloc(1, sizeof(*self));
    char script[4096], line[256], version[32], segment[32];
    char *const argv[] = {(char *)bench->mooncake, script,  (char *)"--serve",
                          (char *)"--segment",     segment, NULL};

    if (self == NULL)
        return false;
    snprintf(segment, sizeof(segment), "%llu", (unsigned long long)segment_bytes);
    snprintf(script, sizeof(script), "%s/mooncake_bench.py", bench->tools);
    if (!bench_spawn(argv, -1, &self->in, &self->out, NULL, &self->pid)) {
        free(self);
        return false;
    }
    if (!bench_read_line(self->out, line, sizeof(line), READY_MS) ||
        sscanf(line, "{\"ready\": \"%31[^\"]\"}", version) != 1) {
        bench_complain("mooncake: %s: did not become ready", bench->mooncake);
        bench_mooncake_close(self);
        return false;
    }
    snprintf(self->name, sizeof(self->name), "mooncake %s", version);
    *ret_mooncake = self;
    return true;
}

void bench_mooncake_close(struct bench_mooncake *self)
{
    if (self == NULL)
        return;
    close(self->in);
    close(self->out);
    bench_reap(self->pid);
    free(self);
}

const char *bench_mooncake_name(const struct bench_mooncake *self)
{
    return self->name;
}

bool bench_mooncake_measure(void *arg, struct bench_sample *ret_sample)
{
    const struct bench_mooncake_load *load = arg;
    char line[256];
    double seconds;
    int bytes = snprintf(line, sizeof(line), "%s %zu %zu\n", load->verb, load->bytes, load->n);

    if (write(load->mooncake->in, line, (size_t)bytes) != bytes ||
        !bench_read_line(load->mooncake->out, line, sizeof(line), ANSWER_MS) ||
        sscanf(line, "{\"seconds\": %lf}", &seconds) != 1 || seconds <= 0)
        return false;
    ret_sample->value = load->times ? seconds / (double)load->n * 1e6
                                    : (double)load->bytes * (double)load->n / seconds / 1e9;
    return true;
}
