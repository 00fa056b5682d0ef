/* kv_sim - runs worlds, one seed after another, until something is wrong or enough was done. */
#include "log.h"
#include "world.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    DONE = 0,
    FAILED = 1,
    WRONG_USAGE = 2,
};

static const char usage[] =
    "usage: kv_sim [OPTION]...\n"
    "Two nodes and three clients in one thread on a virtual clock; all they say is checked.\n"
    "  --seed N       the first seed (1)\n"
    "  --seeds N      how many seeds, one world each (1)\n"
    "  --seconds N    seeds until so much time has passed\n"
    "  --ops N        operations of each world (2000)\n"
    "  --faults LIST  all (the default), none, or some of loss, doubles, delays, corruption,\n"
    "                 full, resets, cuts, stalls, node_deaths, client_deaths, slow_disks,\n"
    "                 little_memory\n"
    "  --twice        run every seed twice and compare\n"
    "  --verbose      print every operation\n"
    "  --json         print one object\n"
    "  --help\n";

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static bool read_number(const char *text, uint64_t *ret_number)
{
    char *end;

    if (*text < '0' || *text > '9')
        return false;
    *ret_number = strtoull(text, &end, 10);
    return *end == 0;
}

static void report_failure(const struct world_options *options,
                           const struct world_result *result,
                           const char *faults)
{
    fprintf(
        stderr,
        "kv_sim: seed %" PRIu64 ": after %" PRIu64 " operations: %s\n"
        "kv_sim: again: kv_sim --seed %" PRIu64 " --ops %" PRIu64 " --faults %s --verbose\n",
        options->seed, result->n_ops, result->failure, options->seed, options->n_ops, faults);
}

int main(int argc, char **argv)
{
    static const struct option names[] = {
        {"seed", required_argument, NULL, 's'},    {"seeds", required_argument, NULL, 'n'},
        {"seconds", required_argument, NULL, 't'}, {"ops", required_argument, NULL, 'o'},
        {"faults", required_argument, NULL, 'f'},  {"twice", no_argument, NULL, '2'},
        {"verbose", no_argument, NULL, 'v'},       {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},          {0},
    };
    struct world_options options = {.seed = 1, .n_ops = 2000, .faults = WORLD_ALL_FAULTS};
    struct world_result result, again;
    uint64_t first, n_seeds = 1, n_done = 0, limit = 0, n_ops = 0, n_good = 0, n_deaths = 0;
    const char *faults = "all";
    bool twice = false, json = false, good = true, failed = false;
    double began = seconds(), virtual = 0, took;
    int choice;

    while ((choice = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (choice) {
        case 's':
            good = good && read_number(optarg, &options.seed);
            break;
        case 'n':
            good = good && read_number(optarg, &n_seeds);
            break;
        case 't':
            good = good && read_number(optarg, &limit);
            n_seeds = UINT64_MAX;
            break;
        case 'o':
            good = good && read_number(optarg, &options.n_ops);
            break;
        case 'f':
            faults = optarg;
            good = good && world_faults_read(optarg, &options.faults);
            break;
        case '2':
            twice = true;
            break;
        case 'v':
            options.verbose = true;
            break;
        case 'j':
            json = true;
            break;
        case 'h':
            fputs(usage, stdout);
            return DONE;
        default:
            good = false;
        }
    }
    if (!good || optind < argc) {
        fputs(usage, stderr);
        return WRONG_USAGE;
    }
    kv_log_set_program("kv_sim");
    kv_log_set_level(KV_LOG_ERROR);
    first = options.seed;
    if (!json)
        printf("seed %" PRIu64 ", faults %s, %" PRIu64 " operations each\n", first, faults,
               options.n_ops);
    fflush(stdout);

    for (; n_done < n_seeds && !failed; options.seed++) {
        if (limit > 0 && seconds() - began >= (double)limit)
            break;
        world_run(&options, &result);
        n_done++;
        n_ops += result.n_ops;
        n_good += result.n_good;
        n_deaths += result.n_deaths;
        virtual += (double)result.virtual_us / 1e6;
        failed = result.failed;
        if (failed) {
            report_failure(&options, &result, faults);
        } else if (twice) {
            world_run(&options, &again);
            failed = again.hash != result.hash;
            if (failed)
                fprintf(stderr,
                        "kv_sim: seed %" PRIu64 ": not the same twice: %016" PRIx64
                        ", %016" PRIx64 "\n",
                        options.seed, result.hash, again.hash);
        }
    }
    took = seconds() - began;
    if (json)
        printf("{\"first_seed\": %" PRIu64 ", \"seeds\": %" PRIu64 ", \"operations\": %" PRIu64
               ", \"ok\": %" PRIu64 ", \"deaths\": %" PRIu64
               ", \"virtual_s\": %.3f, \"seconds\": %.3f, \"failed\": %s}\n",
               first, n_done, n_ops, n_good, n_deaths, virtual, took,
               failed ? "true" : "false");
    else
        printf("%s: %" PRIu64 " seeds, %" PRIu64 " operations (%" PRIu64
               " ended well), %" PRIu64 " deaths, %.1f s of virtual time in %.1f s, %.0f "
               "operations/s, last hash %016" PRIx64 "\n",
               failed ? "FAILED" : "good", n_done, n_ops, n_good, n_deaths, virtual, took,
               (double)n_ops / took, result.hash);
    return failed ? FAILED : DONE;
}
