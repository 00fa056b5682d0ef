/* kvctl doctor: checks of this machine, then of each node.
 *
 * Where possible, a check does what a node or a client does: it reads another process's memory
 * instead of reading the setting that may forbid it.
 */
#define _GNU_SOURCE /* process_vm_readv(), memfd_create() */
#include "client/kvctl/doctor_node.h"
#include "kernels/checksum.h"
#include "kernels/isa.h"
#include "proto/kv_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    TEXT_BYTES = 512,
    FILES_WANTED = 1024,
};

#define SHM_WANTED    (UINT64_C(256) << 20)
#define MEMORY_WANTED (UINT64_C(1) << 30)

/* Reads the first line of a small file, without the newline.  Returns false if it cannot. */
static bool read_line(const char *path, char *text, size_t text_bytes)
{
    FILE *file = fopen(path, "re");
    bool is_read;

    if (file == NULL)
        return false;
    is_read = fgets(text, (int)text_bytes, file) != NULL;
    fclose(file);
    if (is_read)
        text[strcspn(text, "\n")] = '\0';
    return is_read;
}

/* ---- checks of this machine -------------------------------------------------------------- */

static void check_program(struct kvctl_doctor *doctor)
{
    const char *kernel = "";
    const struct kv_checksum_kernels *row;

    for (unsigned i = 0; (row = kv_checksum_kernels_at(i)) != NULL; i++)
        kernel = row->name;
    kvctl_doctor_tell(doctor, KVCTL_OK, "client", NULL, "version %s, protocol %d",
                      kv_client_version(), KV_WIRE_VERSION);
    if (strcmp(kernel, "scalar") == 0)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "processor", "checksums are slower than copying",
                          "%ld online, no CRC32C instruction", sysconf(_SC_NPROCESSORS_ONLN));
    else
        kvctl_doctor_tell(doctor, KVCTL_OK, "processor", NULL,
                          "%ld online, kernels for %s, checksums by %s",
                          sysconf(_SC_NPROCESSORS_ONLN), kv_isa_name(kv_isa()), kernel);
}

static uint64_t meminfo(const char *field)
{
    char line[TEXT_BYTES];
    uint64_t kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");

    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        size_t bytes = strlen(field);

        if (strncmp(line, field, bytes) == 0 && line[bytes] == ':')
            kib = strtoull(line + bytes + 1, NULL, 10);
    }
    if (file != NULL)
        fclose(file);
    return kib << 10;
}

static void check_memory(struct kvctl_doctor *doctor)
{
    uint64_t total = meminfo("MemTotal"), available = meminfo("MemAvailable"), limit;
    char total_text[16], available_text[16], limit_text[TEXT_BYTES];

    kv_config_format_size(total, total_text, sizeof(total_text));
    kv_config_format_size(available, available_text, sizeof(available_text));
    if (read_line("/sys/fs/cgroup/memory.max", limit_text, sizeof(limit_text)) &&
        (limit = strtoull(limit_text, NULL, 10)) > 0 && limit < total) {
        kv_config_format_size(limit, limit_text, sizeof(limit_text));
        kvctl_doctor_tell(doctor, KVCTL_WARN, "memory",
                          "kvserver's default --memory is a quarter of the container's limit",
                          "%s of %s free, container limit %s", available_text, total_text,
                          limit_text);
    } else if (available < MEMORY_WANTED)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "memory",
                          "set a small --memory for kvserver, or free memory", "%s of %s free",
                          available_text, total_text);
    else
        kvctl_doctor_tell(doctor, KVCTL_OK, "memory", NULL, "%s of %s free", available_text,
                          total_text);
}

static void check_huge_pages(struct kvctl_doctor *doctor)
{
    char text[TEXT_BYTES];

    if (!read_line("/sys/kernel/mm/transparent_hugepage/enabled", text, sizeof(text)))
        kvctl_doctor_tell(doctor, KVCTL_WARN, "huge pages",
                          "reading rows may be up to 20% slower",
                          "not supported by this kernel");
    else if (strstr(text, "[never]") != NULL)
        kvctl_doctor_tell(
            doctor, KVCTL_WARN, "huge pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root on the host",
            "transparent huge pages are off");
    else
        kvctl_doctor_tell(doctor, KVCTL_OK, "huge pages", NULL, "transparent, %s", text);
}

/* Creates, fills and removes a shared memory object.  Returns 0 or the error. */
static int try_shared_memory(void)
{
    char name[64];
    int error = 0, fd;
    void *piece;

    snprintf(name, sizeof(name), "/kvctl-doctor-%ld", (long)getpid());
    fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0)
        return errno;
    /* Not ftruncate(): missing pages would only show as SIGBUS. */
    error = posix_fallocate(fd, 0, 1 << 20);
    if (error == 0) {
        piece = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (piece == MAP_FAILED)
            error = errno;
        else {
            memset(piece, 1, 1 << 20);
            munmap(piece, 1 << 20);
        }
    }
    close(fd);
    shm_unlink(name);
    return error;
}

static void check_shared_memory(struct kvctl_doctor *doctor)
{
    static const char advice[] =
        "data within this machine uses tcp, which is slower; in a container use --shm-size";
    struct statvfs facts;
    int error = try_shared_memory();
    char size[16] = "?", left[16] = "?";
    uint64_t bytes = 0;

    if (statvfs("/dev/shm", &facts) == 0) {
        bytes = (uint64_t)facts.f_blocks * facts.f_frsize;
        kv_config_format_size(bytes, size, sizeof(size));
        kv_config_format_size((uint64_t)facts.f_bavail * facts.f_frsize, left, sizeof(left));
    }
    if (error != 0)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "shared memory", advice, "/dev/shm: %s",
                          strerror(error));
    else if (bytes < SHM_WANTED)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "shared memory", advice,
                          "/dev/shm has only %s, %s free", size, left);
    else
        kvctl_doctor_tell(doctor, KVCTL_OK, "shared memory", NULL, "/dev/shm has %s, %s free",
                          size, left);
}

static char secret[8] = "memory";

/* A child reads its parent's memory, which a ptrace setting may forbid; the same rule applies
 * to unrelated processes of one user.  Returns 0 or the error. */
static int read_foreign_memory(int fd)
{
    char copy[sizeof(secret)];
    struct iovec local = {copy, sizeof(copy)}, remote = {secret, sizeof(secret)};

    (void)fd;
    errno = EIO;
    return process_vm_readv(getppid(), &local, 1, &remote, 1, 0) == (ssize_t)sizeof(copy)
               ? 0
               : errno;
}

/* And a file in memory, which only its descriptor names. */
static int read_foreign_file(int fd)
{
    char path[64], copy[sizeof(secret)];
    int opened;

    snprintf(path, sizeof(path), "/proc/%ld/fd/%d", (long)getppid(), fd);
    opened = open(path, O_RDONLY | O_CLOEXEC);
    if (opened < 0)
        return errno;
    errno = EIO;
    return pread(opened, copy, sizeof(copy), 0) == (ssize_t)sizeof(copy) ? 0 : errno;
}

/* Returns what the function returns in a child: 0 or an error. */
static int try_in_child(int (*try)(int fd), int fd)
{
    int wait_status;
    pid_t child = fork();

    if (child < 0)
        return errno;
    if (child == 0)
        _exit(try(fd));
    if (waitpid(child, &wait_status, 0) != child || !WIFEXITED(wait_status))
        return EIO;
    return WEXITSTATUS(wait_status);
}

static int try_foreign_file(void)
{
    int fd = memfd_create("kvctl-doctor", MFD_CLOEXEC);
    int error;

    if (fd < 0)
        return errno;
    error = write(fd, secret, sizeof(secret)) == (ssize_t)sizeof(secret)
                ? try_in_child(read_foreign_file, fd)
                : errno;
    close(fd);
    return error;
}

static void check_foreign_memory(struct kvctl_doctor *doctor)
{
    char scope[TEXT_BYTES];
    int error = try_in_child(read_foreign_memory, -1);

    if (!read_line("/proc/sys/kernel/yama/ptrace_scope", scope, sizeof(scope)))
        strcpy(scope, "none");
    if (error == 0)
        kvctl_doctor_tell(doctor, KVCTL_OK, "direct reads (cma)", NULL,
                          "allowed between processes, ptrace_scope %s", scope);
    else
        kvctl_doctor_tell(doctor, KVCTL_WARN, "direct reads (cma)",
                          "large rows that are read over shared memory are copied twice: set "
                          "sysctl kernel.yama.ptrace_scope=0, or use --cap-add SYS_PTRACE",
                          "%s, ptrace_scope %s", strerror(error), scope);
}

static void check_foreign_file(struct kvctl_doctor *doctor)
{
    int error = try_foreign_file();

    if (error == 0)
        kvctl_doctor_tell(doctor, KVCTL_OK, "direct writes (memfd)", NULL,
                          "a process can open another one's files in memory");
    else
        kvctl_doctor_tell(doctor, KVCTL_WARN, "direct writes (memfd)",
                          "large rows that are written over shared memory are copied twice: "
                          "mount /proc, and run nodes and clients as one user",
                          "%s", strerror(error));
}

/* UCX finds network devices there; without them it has shared memory only. */
static void check_network(struct kvctl_doctor *doctor)
{
    if (access("/sys/class/net", R_OK | X_OK) == 0)
        kvctl_doctor_tell(doctor, KVCTL_OK, "network", NULL, "devices are visible");
    else
        kvctl_doctor_tell(doctor, KVCTL_WARN, "network",
                          "no tcp, only shared memory: mount -t sysfs sysfs /sys",
                          "/sys/class/net: %s", strerror(errno));
}

static void check_files(struct kvctl_doctor *doctor)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    if (limit.rlim_cur < FILES_WANTED)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "open files",
                          "ulimit -n 65536: each client uses several per data thread",
                          "at most %llu", (unsigned long long)limit.rlim_cur);
    else
        kvctl_doctor_tell(doctor, KVCTL_OK, "open files", NULL, "at most %llu",
                          (unsigned long long)limit.rlim_cur);
}

int kvctl_doctor_run(const struct kvctl *ctl)
{
    struct kvctl_doctor doctor = {.ctl = ctl};

    check_program(&doctor);
    check_memory(&doctor);
    check_huge_pages(&doctor);
    check_shared_memory(&doctor);
    check_foreign_memory(&doctor);
    check_foreign_file(&doctor);
    check_network(&doctor);
    check_files(&doctor);
    for (unsigned i = 0; i < ctl->n_nodes; i++) {
        doctor.node = ctl->nodes[i];
        kvctl_doctor_node(&doctor);
    }
    return doctor.n_failed > 0 ? KVCTL_FAILED : KVCTL_DONE;
}
