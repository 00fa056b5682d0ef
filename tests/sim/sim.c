/* kv_sim - runs worlds, one seed after another, until something is wrong or enough was done. */
#include "kvserver/base/log.h"
#include "tests/sim/world.h"

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

static void print_usage(FILE *out)
{
    int column;

    fputs("usage: kv_sim [OPTION]...\n"
          "One to three nodes, or nine to twelve, and three clients in one thread on virtual\n"
          "clocks; all they say is checked.\n"
          "  --seed N       the first seed (1)\n"
          "  --seeds N      how many seeds, one world each (1)\n"
          "  --seconds N    seeds until so much time has passed\n"
          "  --ops N        operations of each world (2000)\n"
          "  --nodes N      1 to 12; 0: each seed draws its own (0)\n"
          "  --twice        run every seed twice and compare\n"
          "  --cut-at N     power fails at the N-th write or sync of a disk; then nodes\n"
          "                 save on disk\n"
          "  --cuts         each seed with a cut at every write or sync\n"
          "  --verbose      print every operation\n"
          "  --json         print one object\n"
          "  --help\n"
          "  --faults LIST  all (the default), none, or some of",
          out);
    column = 80;
    for (unsigned i = 0; i < WORLD_N_FAULTS; i++) {
        const char *name = world_fault_name(i);

        if (column + (int)strlen(name) > 78)
            column = fprintf(out, "\n                ") - 1;
        column += fprintf(out, " %s%s", name, i + 1 < WORLD_N_FAULTS ? "," : "\n");
    }
}

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
    fprintf(stderr,
            "kv_sim: seed %" PRIu64 ": after %" PRIu64 " operations: %s\n"
            "kv_sim: again: kv_sim --seed %" PRIu64 " --ops %" PRIu64
            " --nodes %u --faults %s --cut-at %" PRIu64 " --verbose\n",
            options->seed, result->n_ops, result->failure, options->seed, options->n_ops,
            options->n_nodes, faults, options->cut_at);
}

struct run {
    struct world_options options; /* of the next world */
    const char *faults;
    uint64_t n_seeds, seconds; /* at most; seconds 0: however long */
    bool twice, json, cuts;

    uint64_t first, n_cuts, n_ops, n_good, n_deaths, n_outside, n_moved, n_swaps,
        n_rows_swapped, n_evictions, n_segments_lost, n_published, n_attached, n_damaged,
        n_saves, n_saved, n_loaded, let_go_bytes;
    double virtual_s;
};

static bool read_option(struct run *run, int choice, const char *text)
{
    uint64_t n_nodes;

    switch (choice) {
    case 's':
        return read_number(text, &run->options.seed);
    case 'n':
        return read_number(text, &run->n_seeds);
    case 't':
        run->n_seeds = UINT64_MAX;
        return read_number(text, &run->seconds);
    case 'o':
        return read_number(text, &run->options.n_ops);
    case 'N':
        if (!read_number(text, &n_nodes) || n_nodes > WORLD_NODES_MAX)
            return false;
        run->options.n_nodes = (unsigned)n_nodes;
        return true;
    case 'f':
        run->faults = text;
        return world_faults_read(text, &run->options.faults);
    case '2':
        run->twice = true;
        return true;
    case 'c':
        return read_number(text, &run->options.cut_at);
    case 'C':
        run->cuts = true;
        return true;
    case 'v':
        run->options.verbose = true;
        return true;
    case 'j':
        run->json = true;
        return true;
    default:
        return false;
    }
}

/* One seed.  false: it failed, and that was said. */
static bool run_seed(struct run *run, struct world_result *ret_result)
{
    struct world_result again;

    world_run(&run->options, ret_result);
    run->n_ops += ret_result->n_ops;
    run->n_good += ret_result->n_good;
    run->n_deaths += ret_result->n_deaths;
    run->n_cuts += ret_result->was_cut;
    run->n_outside += ret_result->n_outside;
    run->n_moved += ret_result->n_moved;
    run->n_swaps += ret_result->n_swaps;
    run->n_rows_swapped += ret_result->n_rows_swapped;
    run->n_evictions += ret_result->n_evictions;
    run->n_segments_lost += ret_result->n_segments_lost;
    run->n_published += ret_result->n_published;
    run->n_damaged += ret_result->n_damaged;
    run->n_attached += ret_result->n_attached;
    run->n_saves += ret_result->n_saves;
    run->n_saved += ret_result->n_saved;
    run->n_loaded += ret_result->n_loaded;
    run->let_go_bytes += ret_result->let_go_bytes;
    run->virtual_s += (double)ret_result->virtual_us / 1e6;
    if (ret_result->failed) {
        report_failure(&run->options, ret_result, run->faults);
        return false;
    }
    if (!run->twice)
        return true;
    world_run(&run->options, &again);
    if (again.hash == ret_result->hash)
        return true;
    fprintf(stderr,
            "kv_sim: seed %" PRIu64 ": not the same twice: %016" PRIx64 ", %016" PRIx64 "\n",
            run->options.seed, ret_result->hash, again.hash);
    return false;
}

/* The same seed again and again, cut at each write or sync: several that a node begins at once are one. */
static bool run_cuts(struct run *run, struct world_result *ret_result)
{
    run->options.cut_at = 1;
    while (run_seed(run, ret_result)) {
        if (!ret_result->was_cut)
            return true;
        run->options.cut_at = ret_result->n_disk + 1;
    }
    return false;
}

static void print_result(const struct run *run, bool is_good, double took, uint64_t hash)
{
    if (run->json)
        printf("{\"first_seed\": %" PRIu64 ", \"seeds\": %" PRIu64 ", \"operations\": %" PRIu64
               ", \"ok\": %" PRIu64 ", \"deaths\": %" PRIu64 ", \"power_cuts\": %" PRIu64
               ", \"beside_deaths\": %" PRIu64 ", \"moved\": %" PRIu64
               ", \"segments_swapped\": %" PRIu64 ", \"rows_swapped\": %" PRIu64
               ", \"evictions\": %" PRIu64 ", \"segments_lost\": %" PRIu64
               ", \"segments_damaged\": %" PRIu64 ", \"blocks_published\": %" PRIu64
               ", \"tokens_attached\": %" PRIu64 ", \"blocks_told_saved\": %" PRIu64
               ", \"blocks_saved\": %" PRIu64 ", \"blocks_loaded\": %" PRIu64
               ", \"let_go_bytes\": %" PRIu64
               ", \"virtual_s\": %.3f, \"seconds\": %.3f, \"failed\": %s}\n",
               run->first, run->options.seed - run->first, run->n_ops, run->n_good,
               run->n_deaths, run->n_cuts, run->n_outside, run->n_moved, run->n_swaps,
               run->n_rows_swapped, run->n_evictions, run->n_segments_lost, run->n_damaged,
               run->n_published, run->n_attached, run->n_saves, run->n_saved, run->n_loaded,
               run->let_go_bytes, run->virtual_s, took, is_good ? "false" : "true");
    else
        printf(
            "%s: %" PRIu64 " seeds, %" PRIu64 " operations (%" PRIu64 " ended well, %" PRIu64
            " beside a dead node), %" PRIu64 " deaths, %" PRIu64
            " of them when the power failed, %" PRIu64 " sessions moved, %" PRIu64
            " segments swapped and all %" PRIu64 " rows found, %" PRIu64
            " blocks evicted, %" PRIu64 " segments lost, %" PRIu64 " damaged, %" PRIu64
            " blocks published, %" PRIu64 " tokens attached, %" PRIu64
            " told that they are saved, %" PRIu64 " blocks that outlived their node, %" PRIu64
            " read back, %" PRIu64 " bytes let go, %.1f s of virtual time in %.1f s, %.0f "
            "operations/s, last hash %016" PRIx64 "\n",
            is_good ? "good" : "FAILED", run->options.seed - run->first, run->n_ops,
            run->n_good, run->n_outside, run->n_deaths, run->n_cuts, run->n_moved, run->n_swaps,
            run->n_rows_swapped, run->n_evictions, run->n_segments_lost, run->n_damaged,
            run->n_published, run->n_attached, run->n_saves, run->n_saved, run->n_loaded,
            run->let_go_bytes, run->virtual_s, took, (double)run->n_ops / took, hash);
}

int main(int argc, char **argv)
{
    static const struct option names[] = {
        {"seed", required_argument, NULL, 's'},
        {"seeds", required_argument, NULL, 'n'},
        {"seconds", required_argument, NULL, 't'},
        {"ops", required_argument, NULL, 'o'},
        {"nodes", required_argument, NULL, 'N'},
        {"faults", required_argument, NULL, 'f'},
        {"twice", no_argument, NULL, '2'},
        {"cut-at", required_argument, NULL, 'c'},
        {"cuts", no_argument, NULL, 'C'},
        {"verbose", no_argument, NULL, 'v'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    struct run run = {
        .options = {.seed = 1, .n_ops = 2000, .faults = WORLD_ALL_FAULTS},
        .faults = "all",
        .n_seeds = 1,
    };
    struct world_result result = {0};
    bool is_good = true;
    double began = seconds();
    int choice;

    while ((choice = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (choice == 'h') {
            print_usage(stdout);
            return DONE;
        }
        is_good = is_good && read_option(&run, choice, optarg);
    }
    if (!is_good || optind < argc) {
        print_usage(stderr);
        return WRONG_USAGE;
    }
    kv_log_set_program("kv_sim");
    kv_log_set_level(KV_LOG_ERROR);
    run.first = run.options.seed;
    if (!run.json)
        printf("seed %" PRIu64 ", faults %s, %" PRIu64 " operations each\n", run.first,
               run.faults, run.options.n_ops);
    fflush(stdout);
    for (; is_good && run.options.seed - run.first < run.n_seeds; run.options.seed++) {
        if (run.seconds > 0 && seconds() - began >= (double)run.seconds)
            break;
        is_good = run.cuts ? run_cuts(&run, &result) : run_seed(&run, &result);
    }
    if (is_good && run.cuts && run.n_saved == 0) {
        fprintf(stderr,
                "kv_sim: no block was saved before a cut: more operations are needed\n");
        is_good = false;
    }
    print_result(&run, is_good, seconds() - began, result.hash);
    return is_good ? DONE : FAILED;
}
