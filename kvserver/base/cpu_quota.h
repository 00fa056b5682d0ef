/* cpu_quota.h - how much time of the processors the control groups of this process grant it.
 *
 * Of version 2 (cpu.max) and 1 (cpu.cfs_quota_us), of the process's own group and of those that
 * it is in.  In a container they are seen from its own root.
 *
 * Threads: any.
 */
#ifndef KV_KVSERVER_BASE_CPU_QUOTA_H
#define KV_KVSERVER_BASE_CPU_QUOTA_H

/* Returns cores: 1.5 are 150 ms of every 100; 0: as many as there are.  Reads files: once, at
 * start. */
double kv_cpu_quota(void);

/* The same of planted files: `groups` is like /proc/self/cgroup, `root` like /sys/fs/cgroup. */
double kv_cpu_quota_of(const char *groups, const char *root);

#endif
