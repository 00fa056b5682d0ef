/* cpu_quota.h: the least quota of the groups that a process is in, from planted files. */
#include "kvserver/base/cpu_quota.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PATH_BYTES = 512,
    FILES_MAX = 6,
};

static char root[] = "/tmp/kv-test-cpu-quota-XXXXXX";

static void path_of(char path[PATH_BYTES], const char *name)
{
    snprintf(path, PATH_BYTES, "%s/%s", root, name);
}

/* NULL text: removes it, and the folders that are empty then. */
static void plant(const char *name, const char *text)
{
    char path[PATH_BYTES];
    FILE *file;

    path_of(path, name);
    for (char *at = path + strlen(root) + 1; text != NULL && (at = strchr(at, '/')) != NULL;
         at++) {
        *at = '\0';
        (void)mkdir(path, 0700);
        *at = '/';
    }
    if (text == NULL) {
        unlink(path);
        while (strlen(path) > strlen(root) + 1) {
            *strrchr(path, '/') = '\0';
            if (strlen(path) <= strlen(root) || rmdir(path) != 0)
                break;
        }
        return;
    }
    file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void quotas(void **state)
{
    static const struct {
        const char *groups; /* NULL: no such file */
        struct {
            const char *name, *text;
        } files[FILES_MAX];
        double cores;
    } cases[] = {
        {NULL, {{"cpu.max", "100000 100000\n"}}, 0},
        {"0::/\n", {{NULL, NULL}}, 0},
        {"0::/\n", {{"cpu.max", "max 100000\n"}}, 0},
        {"0::/\n", {{"cpu.max", "150000 100000\n"}}, 1.5},
        {"0::/a/b\n", {{"a/b/cpu.max", "50000 100000\n"}}, 0.5},
        {"0::/a/b\n",
         {{"a/b/cpu.max", "400000 100000\n"}, {"a/cpu.max", "200000 100000\n"}},
         2},
        {"0::/a/b\n", {{"a/b/cpu.max", "max 100000\n"}, {"cpu.max", "25000 50000\n"}}, 0.5},
        {"0::/of/the/host\n", {{"cpu.max", "300000 100000\n"}}, 3}, /* in a container */
        {"4:memory:/m\n3:cpu,cpuacct:/v\n",
         {{"cpu/v/cpu.cfs_quota_us", "250000\n"}, {"cpu/v/cpu.cfs_period_us", "100000\n"}},
         2.5},
        {"3:cpuacct,cpu:/v\n",
         {{"cpu/v/cpu.cfs_quota_us", "-1\n"},
          {"cpu/v/cpu.cfs_period_us", "100000\n"},
          {"cpu/cpu.cfs_quota_us", "100000\n"},
          {"cpu/cpu.cfs_period_us", "100000\n"}},
         1},
        {"3:cpuset:/v\n",
         {{"cpu/v/cpu.cfs_quota_us", "50000\n"}, {"cpu/v/cpu.cfs_period_us", "100000\n"}},
         0},
        {"3:cpu:/v\n", {{"cpu/v/cpu.cfs_quota_us", "50000\n"}}, 0}, /* and no period */
        {"3:cpu:/v\n0::/\n",
         {{"cpu/v/cpu.cfs_quota_us", "500000\n"},
          {"cpu/v/cpu.cfs_period_us", "100000\n"},
          {"cpu.max", "400000 100000\n"}},
         4},
        {"0::/\n", {{"cpu.max", ""}}, 0},
        {"0::/\n", {{"cpu.max", "nonsense 100000\n"}}, 0},
        {"0::/\n", {{"cpu.max", "100000\n"}}, 0},
        {"0::/\n", {{"cpu.max", "100000 0\n"}}, 0},
        {"0::/\n", {{"cpu.max", "-100000 100000\n"}}, 0},
        {"nonsense\n0:\n0::\n0::relative\n", {{"cpu.max", "100000 100000\n"}}, 0},
    };
    char groups[PATH_BYTES];

    (void)state;
    path_of(groups, "groups");
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        double cores;

        if (cases[i].groups != NULL)
            plant("groups", cases[i].groups);
        for (unsigned j = 0; j < FILES_MAX && cases[i].files[j].name != NULL; j++)
            plant(cases[i].files[j].name, cases[i].files[j].text);
        cores = kv_cpu_quota_of(groups, root);
        if (cores != cases[i].cores)
            fail_msg("case %u: %g, expected %g", i, cores, cases[i].cores);
        plant("groups", NULL);
        for (unsigned j = 0; j < FILES_MAX && cases[i].files[j].name != NULL; j++)
            plant(cases[i].files[j].name, NULL);
    }
}

/* Whatever this machine says. */
static void of_this_process(void **state)
{
    (void)state;
    assert_true(kv_cpu_quota() >= 0);
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(root) != NULL ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return rmdir(root); /* every case has taken its files away */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quotas),
        cmocka_unit_test(of_this_process),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
