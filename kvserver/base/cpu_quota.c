#include "kvserver/base/cpu_quota.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum {
    LINE_BYTES = 4096,
    PATH_BYTES = 2 * LINE_BYTES,
};

/* The first word and number of a file: false where there is none. */
static bool read_words(const char *path, char word[32], double *ret_number)
{
    FILE *file = fopen(path, "r");
    int n;

    *ret_number = 0;
    if (file == NULL)
        return false;
    n = fscanf(file, "%31s %lf", word, ret_number);
    fclose(file);
    return n >= 1;
}

static double cores_of(double quota, double period)
{
    return quota > 0 && period > 0 ? quota / period : 0;
}

/* "150000 100000", or "max 100000". */
static double cores_of_v2(const char *folder)
{
    char path[PATH_BYTES + 32], word[32];
    double period, quota = 0;

    snprintf(path, sizeof(path), "%s/cpu.max", folder);
    if (!read_words(path, word, &period) || sscanf(word, "%lf", &quota) != 1)
        return 0;
    return cores_of(quota, period);
}

/* A file each; a quota of -1 is none. */
static double cores_of_v1(const char *folder)
{
    char path[PATH_BYTES + 32], word[32];
    double quota = 0, period = 0, none;

    snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", folder);
    if (!read_words(path, word, &none) || sscanf(word, "%lf", &quota) != 1)
        return 0;
    snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", folder);
    if (!read_words(path, word, &none) || sscanf(word, "%lf", &period) != 1)
        return 0;
    return cores_of(quota, period);
}

/* Whether a comma-separated list has "cpu". */
static bool has_cpu(const char *list)
{
    while (*list != '\0') {
        const size_t bytes = strcspn(list, ",");

        if (bytes == 3 && memcmp(list, "cpu", 3) == 0)
            return true;
        list += bytes + (list[bytes] == ',');
    }
    return false;
}

static double smaller(double a, double b)
{
    return a == 0 || (b > 0 && b < a) ? b : a;
}

/* The least of a group and of those that it is in, up to the root; in a container a group may
 * be named as its host does, and not be there. */
static double least_of(const char *root, const char *group, double (*cores)(const char *folder))
{
    char folder[PATH_BYTES];
    const size_t root_bytes = strlen(root);
    double least = 0;

    snprintf(folder, sizeof(folder), "%s%s", root, group);
    while (strlen(folder) > root_bytes) {
        least = smaller(least, cores(folder));
        *strrchr(folder, '/') = '\0';
    }
    return smaller(least, cores(root));
}

double kv_cpu_quota_of(const char *groups, const char *root)
{
    FILE *file = fopen(groups, "r");
    char line[LINE_BYTES], of_v1[LINE_BYTES];
    double least = 0;

    if (file == NULL)
        return 0;
    snprintf(of_v1, sizeof(of_v1), "%s/cpu", root);
    /* NUMBER:CONTROLLER,...:/GROUP; of version 2 there are no controllers. */
    while (fgets(line, sizeof(line), file) != NULL) {
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;

        if (group == NULL || group[1] != '/')
            continue;
        *group++ = '\0';
        controllers++;
        group[strcspn(group, "\n")] = '\0';
        if (controllers[0] == '\0')
            least = smaller(least, least_of(root, group, cores_of_v2));
        else if (has_cpu(controllers))
            least = smaller(least, least_of(of_v1, group, cores_of_v1));
    }
    fclose(file);
    return least;
}

double kv_cpu_quota(void)
{
    return kv_cpu_quota_of("/proc/self/cgroup", "/sys/fs/cgroup");
}
