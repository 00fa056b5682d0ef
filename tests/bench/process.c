/* Processes: the supervisor, the nodes and the peers. */
#define _GNU_SOURCE
#include "tests/bench/bench.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    READY_MS = 30000,
    STOP_MS = 12000,
};

/* ---- the supervisor ---------------------------------------------------------------------- */

static _Atomic int worker;

/* What the worker leaves behind is seen to afterwards. */
static void on_stop(int number)
{
    (void)number;
    if (worker > 0)
        kill(-(pid_t)worker, SIGTERM);
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk)
{
    (void)status;
    (void)kind;
    (void)walk;
    return remove(path);
}

void bench_remove(const char *folder)
{
    nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static void sleep_ms(unsigned ms)
{
    nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000) * 1000000}, NULL);
}

/* Everything that the worker started has come to us as orphans of one process group. */
static void end_group(pid_t group)
{
    for (unsigned waited_ms = 0;; waited_ms += 10) {
        pid_t pid = waitpid(-group, NULL, WNOHANG);

        if (pid < 0 && errno == ECHILD)
            return;
        if (waited_ms == 0)
            kill(-group, SIGTERM);
        else if (waited_ms >= STOP_MS)
            kill(-group, SIGKILL);
        if (pid == 0)
            sleep_ms(10);
    }
}

int bench_supervise(struct bench *bench, int (*work)(struct bench *bench, void *arg), void *arg)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction pass_on = {.sa_handler = on_stop};
    sigset_t set, before;
    const char *parent = getenv("TMPDIR");
    char folder[512];
    int status = 0;
    pid_t pid;

    if (parent == NULL || parent[0] == '\0')
        parent = "/tmp";
    snprintf(folder, sizeof(folder), "%s/kv_bench.XXXXXX", parent);
    if (mkdtemp(folder) == NULL) {
        bench_complain("temporary folder: %s: %s", folder, strerror(errno));
        return EXIT_FAILURE;
    }
    bench->folder = folder;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
        sigaddset(&set, signals[i]);
    sigprocmask(SIG_BLOCK, &set, &before);
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sigprocmask(SIG_SETMASK, &before, NULL);
        signal(SIGPIPE, SIG_IGN); /* a peer that ended is an error like others */
        status = work(bench, arg);
        fflush(NULL);
        _exit(status);
    }
    if (pid > 0) {
        setpgid(pid, pid);
        worker = pid;
        for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
            sigaction(signals[i], &pass_on, NULL);
        sigprocmask(SIG_SETMASK, &before, NULL);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            continue;
        if (WIFSIGNALED(status))
            bench_complain("ended by a signal: %s", strsignal(WTERMSIG(status)));
        end_group(pid);
    } else
        bench_complain("fork: %s", strerror(errno));
    bench_remove(folder);
    return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}

/* ---- children ---------------------------------------------------------------------------- */

void bench_pin(int cpu)
{
    cpu_set_t set;

    if (cpu < 0)
        return;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof(set), &set);
}

/* Undoes what the worker did to itself. */
static void unpin(void)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof(set), &set);
}

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

bool bench_spawn(
    char *const argv[], int cpu, int *ret_in, int *ret_out, int *ret_socket, pid_t *ret_pid)
{
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    pid_t pid = -1;
    pid_t self = getpid();

    if ((ret_socket != NULL && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) != 0) ||
        (ret_in != NULL && pipe2(in, O_CLOEXEC) != 0) ||
        (ret_out != NULL && pipe2(out, O_CLOEXEC) != 0))
        goto err;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != self)
            _exit(127);
        signal(SIGPIPE, SIG_DFL);
        if (in[0] >= 0)
            dup2(in[0], STDIN_FILENO);
        if (out[1] >= 0)
            dup2(out[1], STDOUT_FILENO);
        else
            dup2(STDERR_FILENO, STDOUT_FILENO); /* our stdout is for records */
        if (cpu >= 0)
            bench_pin(cpu);
        else
            unpin();
        execvp(argv[0], argv);
        fprintf(stderr, "kv_bench: %s: %s\n", argv[0], strerror(errno));
        _exit(127);
    }
    if (pid < 0)
        goto err;
    close_if_open(in[0]);
    close_if_open(out[1]);
    if (ret_in != NULL)
        *ret_in = in[1];
    if (ret_socket != NULL)
        *ret_socket = in[1];
    if (ret_out != NULL)
        *ret_out = out[0];
    *ret_pid = pid;
    return true;

err:
    bench_complain("%s: cannot start: %s", argv[0], strerror(errno));
    for (unsigned i = 0; i < 2; i++) {
        close_if_open(in[i]);
        close_if_open(out[i]);
    }
    return false;
}

bool bench_reap(pid_t pid)
{
    int status;

    kill(pid, SIGTERM);
    for (unsigned waited_ms = 0;; waited_ms += 5) {
        pid_t ended = waitpid(pid, &status, WNOHANG);

        if (ended < 0 && errno != EINTR)
            return false;
        if (ended == pid)
            return (WIFEXITED(status) && WEXITSTATUS(status) == 0) ||
                   (WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
        if (waited_ms == STOP_MS)
            kill(pid, SIGKILL);
        sleep_ms(5);
    }
}

bool bench_read_line(int fd, char *line, size_t line_bytes, unsigned timeout_ms)
{
    double until = bench_now() + timeout_ms * 1e-3;
    size_t used = 0;

    while (used + 1 < line_bytes) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        double left = until - bench_now();

        if (left <= 0 || (poll(&ready, 1, (int)(left * 1e3) + 1) < 0 && errno != EINTR))
            return false;
        if (ready.revents == 0)
            continue;
        /* One byte at a time: what follows the line is not ours to take. */
        if (read(fd, line + used, 1) != 1)
            return false;
        if (line[used] == '\n') {
            line[used] = '\0';
            return true;
        }
        used++;
    }
    return false;
}

/* ---- nodes ------------------------------------------------------------------------------- */

static bool node_start(struct bench *bench,
                       unsigned threads,
                       uint64_t memory_bytes,
                       uint64_t disk_bytes,
                       bool pinned,
                       struct bench_node *ret_node)
{
    char threads_text[16], memory_text[32], disk_text[32] = "none", line[1024];
    char *const argv[] = {
        (char *)bench->kvserver,
        (char *)"--listen=127.0.0.1:0",
        (char *)"--metrics=127.0.0.1:0",
        (char *)"--log-level=warn",
        (char *)"--dir",
        ret_node->folder,
        (char *)"--disk",
        disk_text,
        (char *)"--threads",
        threads_text,
        (char *)"--memory",
        memory_text,
        NULL,
    };
    struct bench_node node = *ret_node;
    const char *at;
    int out;

    if (disk_bytes > 0)
        snprintf(disk_text, sizeof(disk_text), "%llu", (unsigned long long)disk_bytes);
    snprintf(threads_text, sizeof(threads_text), "%u", threads);
    snprintf(memory_text, sizeof(memory_text), "%llu", (unsigned long long)memory_bytes);
    if (!bench_spawn(argv, pinned ? bench->server_cpu : -1, NULL, &out, NULL, &node.pid))
        return false;
    if (!bench_read_line(out, line, sizeof(line), READY_MS) ||
        (at = strstr(line, "control=")) == NULL ||
        sscanf(at, "control=%63s", node.address) != 1) {
        bench_complain("%s: did not become ready", bench->kvserver);
        close(out);
        bench_reap(node.pid);
        return false;
    }
    close(out);
    *ret_node = node;
    return true;
}

bool bench_node_start(struct bench *bench,
                      unsigned threads,
                      uint64_t memory_bytes,
                      bool pinned,
                      struct bench_node *ret_node)
{
    snprintf(ret_node->folder, sizeof(ret_node->folder), "%s/node-%u", bench->folder,
             bench->n_nodes++);
    return node_start(bench, threads, memory_bytes, 0, pinned, ret_node);
}

bool bench_node_start_saving(struct bench *bench,
                             unsigned threads,
                             uint64_t memory_bytes,
                             uint64_t disk_bytes,
                             struct bench_node *node)
{
    if (node->folder[0] == 0)
        snprintf(node->folder, sizeof(node->folder), "%s/node-%u", bench->folder,
                 bench->n_nodes++);
    return node_start(bench, threads, memory_bytes, disk_bytes, true, node);
}

void bench_node_kill(struct bench_node *node)
{
    kill(node->pid, SIGKILL);
    waitpid(node->pid, NULL, 0);
}

bool bench_node_stop(struct bench_node *node)
{
    if (bench_reap(node->pid))
        return true;
    bench_complain("kvserver: process %d: ended badly", (int)node->pid);
    return false;
}

struct kv_client *bench_client_open(const struct bench_node *node, const char *transport)
{
    struct kv_client_options options = {
        .nodes = node->address,
        .transport = transport,
        .name = "kv_bench",
        .deadline_ms = 30000,
        .peer_timeout_ms = 30000,
    };
    struct kv_client *client;
    char detail[512] = "";
    kv_status_t status;

    status = kv_client_open(&options, &client, detail, sizeof(detail));
    if (status == KV_OK)
        return client;
    bench_complain("connect: %s: %s: %s", node->address, kv_status_name(status), detail);
    return NULL;
}
