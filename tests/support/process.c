#define _GNU_SOURCE
#include "tests/support/process.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FOLDER_VARIABLE "KV_TEST_FOLDER"

enum {
    NAP_MS = 5,
    TAIL_BYTES = 4096, /* of a node's messages, shown when a test fails */
    ARGUMENTS_MAX = 40,
    INODES_MAX = 256,
    HTTP_TIMEOUT_S = 20,
    CHILD_FAILED = 127,
    PORTS_BEGIN = 20000,
    N_PORTS = 12768, /* up to 32768, where Linux begins to give ports to connections */
};

static char folder[PROCESS_PATH_BYTES];
static const char *kvserver = "kvserver";
static _Atomic int worker;

void process_complain(const char *format, ...)
{
    char line[PROCESS_LINE_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s\n", line);
}

uint64_t process_now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static void nap(void)
{
    nanosleep(&(struct timespec){0, NAP_MS * 1000000L}, NULL);
}

bool process_until(bool (*is_true)(void *arg), void *arg, unsigned timeout_ms)
{
    uint64_t until_us = process_now_us() + timeout_ms * UINT64_C(1000);

    while (!is_true(arg)) {
        if (process_now_us() > until_us)
            return false;
        nap();
    }
    return true;
}

const char *process_folder(void)
{
    return folder;
}

void process_path(char path[PROCESS_PATH_BYTES], const char *name)
{
    if (snprintf(path, PROCESS_PATH_BYTES, "%.400s/%.100s", folder, name) >= PROCESS_PATH_BYTES)
        abort();
}

/* ---- the supervisor ---------------------------------------------------------------------- */

static void pass_on(int number)
{
    if (worker > 0)
        kill((pid_t)worker, number);
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk)
{
    (void)status;
    (void)kind;
    (void)walk;
    return remove(path);
}

static int show_log(const char *path, const struct stat *status, int kind, struct FTW *walk)
{
    char text[TAIL_BYTES];
    FILE *file;
    size_t bytes;

    (void)walk;
    /* Not what a node keeps in its folder. */
    if (kind != FTW_F || strncmp(strrchr(path, '/'), "/node-", 6) != 0 ||
        strstr(path, ".log") == NULL || status->st_size == 0)
        return 0;
    file = fopen(path, "r");
    if (file == NULL)
        return 0;
    if (status->st_size > TAIL_BYTES)
        fseek(file, -TAIL_BYTES, SEEK_END);
    bytes = fread(text, 1, sizeof(text), file);
    fclose(file);
    fprintf(stderr, "---- the end of %s\n%.*s\n", strrchr(path, '/') + 1, (int)bytes, text);
    return 0;
}

/* Those that the worker left have become ours. */
static void end_orphans(void)
{
    DIR *proc;
    const struct dirent *entry;
    bool found = true;

    while (found) {
        found = false;
        proc = opendir("/proc/self/task");
        if (proc == NULL)
            return;
        while ((entry = readdir(proc)) != NULL) {
            char path[300];
            FILE *children;
            long pid;

            snprintf(path, sizeof(path), "/proc/self/task/%.200s/children", entry->d_name);
            children = fopen(path, "r");
            if (children == NULL)
                continue;
            while (fscanf(children, "%ld", &pid) == 1) {
                found = true;
                kill((pid_t)pid, SIGKILL);
                waitpid((pid_t)pid, NULL, 0);
            }
            fclose(children);
        }
        closedir(proc);
    }
}

int process_supervise(int (*work)(int argc, char **argv), int argc, char **argv)
{
    const char *parent = getenv("TMPDIR");
    int status = 0;
    pid_t pid;

    snprintf(folder, sizeof(folder), "%.400s/kv_test.XXXXXX",
             parent != NULL && parent[0] != 0 ? parent : "/tmp");
    if (mkdtemp(folder) == NULL) {
        process_complain("temporary folder: %s: %s", folder, strerror(errno));
        return EXIT_FAILURE;
    }
    /* A node that runs as another user has its own folder in it. */
    chmod(folder, 0755);
    setenv(FOLDER_VARIABLE, folder, 1);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGPIPE, SIG_IGN);
        status = work(argc, argv);
        fflush(NULL);
        exit(status);
    }
    worker = pid;
    signal(SIGTERM, pass_on);
    signal(SIGINT, pass_on);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    end_orphans();
    if (pid > 0 && WIFSIGNALED(status))
        process_complain("the test was ended by signal %d", WTERMSIG(status));
    status = pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
    if (status != 0)
        nftw(folder, show_log, 16, FTW_PHYS);
    nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return status;
}

/* ---- any process ------------------------------------------------------------------------- */

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void limit_memory(unsigned mebibytes)
{
    struct rlimit limit = {(rlim_t)mebibytes << 20, (rlim_t)mebibytes << 20};

    setrlimit(RLIMIT_AS, &limit);
}

/* In the child.  The program is opened before the user changes: who may run it need not be able
 * to find it. */
static void become(const struct process_spec *spec, int in, int out, pid_t parent)
{
    const char *path = spec->argv[0];
    int program, file;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(CHILD_FAILED);
    signal(SIGPIPE, SIG_DFL);
    dup2(in, STDIN_FILENO);
    if (spec->output != NULL) {
        out = open(spec->output, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (out < 0)
            goto err;
    }
    dup2(out, STDOUT_FILENO);
    if (spec->errors != NULL) {
        file = open(spec->errors, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (file < 0)
            goto err;
        dup2(file, STDERR_FILENO);
    }
    program = open(path, O_RDONLY | O_CLOEXEC);
    if (program < 0)
        goto err;
    if (spec->memory_limit > 0)
        limit_memory(spec->memory_limit);
    if (spec->user != 0 && (setgid(spec->user) != 0 || setuid(spec->user) != 0))
        goto err;
    if (spec->user != 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* forgotten when the user changed */
    fexecve(program, (char *const *)spec->argv, environ);

err:
    fprintf(stderr, "%s: cannot be started: %s\n", path, strerror(errno));
    _exit(CHILD_FAILED);
}

bool process_start(struct process *process, const struct process_spec *spec)
{
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    pid_t self = getpid();
    pid_t pid = -1;

    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0)
        goto err;
    fflush(NULL);
    pid = fork();
    if (pid == 0)
        become(spec, in[0], out[1], self);
    if (pid < 0)
        goto err;
    close(in[0]);
    close(out[1]);
    *process = (struct process){pid, in[1], out[0]};
    return true;

err:
    process_complain("%s: cannot be started: %s", spec->argv[0], strerror(errno));
    for (int i = 0; i < 2; i++) {
        close_fd(&in[i]);
        close_fd(&out[i]);
    }
    return false;
}

bool process_start_self(struct process *process, const char *role, const char *const *arguments)
{
    const char *argv[ARGUMENTS_MAX] = {"/proc/self/exe", "--child", role};
    size_t n = 3;

    while (arguments != NULL && *arguments != NULL && n + 1 < ARGUMENTS_MAX)
        argv[n++] = *arguments++;
    return process_start(process, &(struct process_spec){.argv = argv});
}

bool process_read_line(struct process *process,
                       char line[PROCESS_LINE_BYTES],
                       unsigned timeout_ms)
{
    uint64_t until_us = process_now_us() + timeout_ms * UINT64_C(1000);
    size_t used = 0;

    while (used + 1 < PROCESS_LINE_BYTES) {
        struct pollfd ready = {.fd = process->out, .events = POLLIN};
        uint64_t now_us = process_now_us();

        if (now_us >= until_us)
            return false;
        if (poll(&ready, 1, (int)((until_us - now_us) / 1000) + 1) <= 0)
            continue;
        /* One byte at a time: what follows the line is the next call's. */
        if (read(process->out, line + used, 1) != 1)
            return false;
        if (line[used] == '\n') {
            line[used] = 0;
            return true;
        }
        used++;
    }
    return false;
}

int process_wait(struct process *process, unsigned timeout_ms)
{
    struct pollfd ended = {.events = POLLIN};
    bool in_time = true;
    int status = 0;

    if (process->pid <= 0)
        return -1;
    ended.fd = pidfd_open(process->pid, 0);
    if (ended.fd >= 0) {
        in_time = poll(&ended, 1, (int)timeout_ms) > 0;
        close(ended.fd);
    }
    if (!in_time)
        kill(process->pid, SIGKILL);
    while (waitpid(process->pid, &status, 0) < 0 && errno == EINTR)
        continue;
    process->pid = 0;
    close_fd(&process->in);
    close_fd(&process->out);
    if (!in_time)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void process_kill(struct process *process)
{
    if (process->pid <= 0)
        return;
    kill(process->pid, SIGKILL);
    process_wait(process, PROCESS_PATIENCE_MS);
}

bool process_freeze(struct process *process)
{
    int status;

    kill(process->pid, SIGSTOP);
    while (waitpid(process->pid, &status, WUNTRACED) < 0 && errno == EINTR)
        continue;
    if (WIFSTOPPED(status))
        return true;
    process_complain("process %d: ended instead of standing still", (int)process->pid);
    process->pid = 0;
    return false;
}

void process_thaw(struct process *process)
{
    kill(process->pid, SIGCONT);
}

static void read_file(const char *path, char *text, size_t text_bytes)
{
    FILE *file = fopen(path, "r");
    size_t bytes = 0;

    if (file != NULL) {
        bytes = fread(text, 1, text_bytes - 1, file);
        fclose(file);
    }
    text[bytes] = 0;
}

bool process_run(const struct process_spec *spec,
                 unsigned timeout_ms,
                 struct process_result *ret_result)
{
    char output[PROCESS_PATH_BYTES], errors[PROCESS_PATH_BYTES];
    struct process_spec to_files = *spec;
    struct process process;

    process_path(output, "run.out");
    process_path(errors, "run.err");
    unlink(errors);
    to_files.output = output;
    to_files.errors = errors;
    if (!process_start(&process, &to_files))
        return false;
    ret_result->status = process_wait(&process, timeout_ms);
    read_file(output, ret_result->output, sizeof(ret_result->output));
    read_file(errors, ret_result->errors, sizeof(ret_result->errors));
    return true;
}

/* ---- what the system says about a process ------------------------------------------------ */

uint64_t process_rss(pid_t pid)
{
    char path[64];
    unsigned long long pages = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    file = fopen(path, "r");
    if (file == NULL)
        return 0;
    if (fscanf(file, "%*u %llu", &pages) != 1)
        pages = 0;
    fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

uint64_t process_cpu_us(pid_t pid)
{
    char path[64], text[1024];
    unsigned long long user = 0, system = 0;
    const char *after_name;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    read_file(path, text, sizeof(text));
    after_name = strrchr(text, ')');
    if (after_name == NULL ||
        sscanf(after_name, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user,
               &system) != 2)
        return 0;
    return (user + system) * 1000000 / (uint64_t)sysconf(_SC_CLK_TCK);
}

/* Inodes of a process's sockets; returns how many descriptors it has. */
static unsigned read_fds(pid_t pid, unsigned long *inodes, unsigned *n_inodes)
{
    char path[400], link[64];
    const struct dirent *entry;
    unsigned n_fds = 0;
    DIR *fds;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    fds = opendir(path);
    *n_inodes = 0;
    if (fds == NULL)
        return 0;
    while ((entry = readdir(fds)) != NULL) {
        ssize_t bytes;

        if (entry->d_name[0] == '.')
            continue;
        n_fds++;
        snprintf(path, sizeof(path), "/proc/%d/fd/%.255s", (int)pid, entry->d_name);
        bytes = readlink(path, link, sizeof(link) - 1);
        if (bytes <= 0)
            continue;
        link[bytes] = 0;
        if (*n_inodes < INODES_MAX && sscanf(link, "socket:[%lu]", &inodes[*n_inodes]) == 1)
            ++*n_inodes;
    }
    closedir(fds);
    return n_fds;
}

unsigned process_n_fds(pid_t pid)
{
    unsigned long inodes[INODES_MAX];
    unsigned n_inodes;

    return read_fds(pid, inodes, &n_inodes);
}

/* One line of /proc/net/tcp or tcp6: addresses are words of the machine's byte order, in hex.
 */
static bool parse_listener(const char *line,
                           bool is_v6,
                           struct process_listener *listener,
                           unsigned long *ret_inode)
{
    char address[33];
    unsigned port, state;
    uint32_t words[4] = {0};

    if (sscanf(line, " %*d: %32[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*u %*d %lu",
               address, &port, &state, ret_inode) != 4 ||
        state != 0x0a)
        return false;
    for (unsigned i = 0; i < (is_v6 ? 4u : 1u); i++) {
        char word[9] = "";

        memcpy(word, address + 8 * i, 8);
        words[i] = (uint32_t)strtoul(word, NULL, 16);
    }
    inet_ntop(is_v6 ? AF_INET6 : AF_INET, words, listener->host, sizeof(listener->host));
    listener->port = (uint16_t)port;
    listener->is_loopback =
        is_v6 ? strcmp(listener->host, "::1") == 0 : (ntohl(words[0]) >> 24) == 127;
    return true;
}

unsigned process_listeners(pid_t pid, struct process_listener listeners[PROCESS_LISTENERS_MAX])
{
    static const char *const tables[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    unsigned long inodes[INODES_MAX];
    unsigned n_inodes, n = 0;

    read_fds(pid, inodes, &n_inodes);
    for (unsigned is_v6 = 0; is_v6 < 2; is_v6++) {
        FILE *table = fopen(tables[is_v6], "r");
        char line[512];

        if (table == NULL)
            continue;
        while (fgets(line, sizeof(line), table) != NULL && n < PROCESS_LISTENERS_MAX) {
            unsigned long inode;

            if (!parse_listener(line, is_v6, &listeners[n], &inode))
                continue;
            for (unsigned i = 0; i < n_inodes; i++) {
                if (inodes[i] == inode) {
                    n++;
                    break;
                }
            }
        }
        fclose(table);
    }
    return n;
}

static void add_name(struct process_shared *shared, const char *name)
{
    size_t used = strlen(shared->names);

    snprintf(shared->names + used, sizeof(shared->names) - used, "%s/", name);
}

void process_shared_look(struct process_shared *shared)
{
    FILE *table = fopen("/proc/sysvipc/shm", "r");
    DIR *shm = opendir("/dev/shm");
    const struct dirent *entry;
    char line[512], name[64];

    strcpy(shared->names, "/");
    while (shm != NULL && (entry = readdir(shm)) != NULL)
        if (entry->d_name[0] != '.')
            add_name(shared, entry->d_name);
    if (shm != NULL)
        closedir(shm);
    while (table != NULL && fgets(line, sizeof(line), table) != NULL) {
        unsigned long id;

        if (sscanf(line, "%*d %lu", &id) == 1) {
            snprintf(name, sizeof(name), "sysv %lu", id);
            add_name(shared, name);
        }
    }
    if (table != NULL)
        fclose(table);
}

/* Finds a name that was not there before. */
static bool find_new(const struct process_shared *before, char *ret_name, size_t name_bytes)
{
    static struct process_shared now;
    char *state = NULL;

    process_shared_look(&now);
    for (char *name = strtok_r(now.names, "/", &state); name != NULL;
         name = strtok_r(NULL, "/", &state)) {
        snprintf(ret_name, name_bytes, "/%s/", name);
        if (strstr(before->names, ret_name) == NULL)
            return true;
    }
    return false;
}

static bool is_settled(void *arg)
{
    char name[300];

    return !find_new(arg, name, sizeof(name));
}

bool process_shared_settled(const struct process_shared *before)
{
    char name[300];

    if (process_until(is_settled, (void *)before, PROCESS_PATIENCE_MS))
        return true;
    if (find_new(before, name, sizeof(name)))
        process_complain("shared memory: left behind: %s", name);
    return false;
}

/* ---- nodes ------------------------------------------------------------------------------- */

void process_set_kvserver(const char *path)
{
    kvserver = path;
    if (getenv(FOLDER_VARIABLE) != NULL)
        snprintf(folder, sizeof(folder), "%.400s", getenv(FOLDER_VARIABLE));
}

const char *process_kvserver(void)
{
    return kvserver;
}

/* Finds a port that is free, below those that the system gives to connections: otherwise a client's own
 * connection could take the port of a node that is being started again. */
static void free_address(char *address, size_t address_bytes)
{
    static unsigned n;

    for (unsigned tries = 0; tries < 1000; tries++) {
        struct sockaddr_in at = {
            .sin_family = AF_INET,
            .sin_port =
                htons((uint16_t)(PORTS_BEGIN + ((unsigned)getpid() * 61 + n++) % N_PORTS)),
            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
        };
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const bool is_free = fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof(at)) == 0;

        if (fd >= 0)
            close(fd);
        if (is_free) {
            snprintf(address, address_bytes, "127.0.0.1:%u", ntohs(at.sin_port));
            return;
        }
    }
    snprintf(address, address_bytes, "127.0.0.1:0");
}

static unsigned n_nodes;

bool process_node_start(struct process_node *node, const char *const *options)
{
    bool is_new = node->dir[0] == 0;
    const char *argv[ARGUMENTS_MAX] = {
        kvserver,  "--listen", node->control, "--metrics", node->metrics, "--dir",
        node->dir, "--memory", "256M",        "--threads", "2",
    };
    struct process_spec spec = {.argv = argv, .errors = node->errors};
    size_t n = 11;
    char name[32];

    if (is_new) {
        snprintf(name, sizeof(name), "node-%u", ++n_nodes);
        process_path(node->dir, name);
        snprintf(name, sizeof(name), "node-%u.log", n_nodes);
        process_path(node->errors, name);
        free_address(node->control, sizeof(node->control));
        free_address(node->metrics, sizeof(node->metrics));
    }
    /* What comes later on the command line counts. */
    while (options != NULL && *options != NULL && n + 1 < ARGUMENTS_MAX)
        argv[n++] = *options++;
    if (!process_start(&node->process, &spec))
        return false;
    if (!process_read_line(&node->process, node->ready, PROCESS_PATIENCE_MS) ||
        sscanf(node->ready, "ready control=%63s metrics=%63s ", node->control, node->metrics) !=
            2) {
        process_complain("%s: did not become ready", node->dir);
        process_kill(&node->process);
        return false;
    }
    return true;
}

int process_node_stop(struct process_node *node)
{
    if (node->process.pid <= 0)
        return -1;
    kill(node->process.pid, SIGTERM);
    return process_wait(&node->process, PROCESS_PATIENCE_MS);
}

/* ---- connections ------------------------------------------------------------------------- */

int process_connect(const char *address)
{
    struct sockaddr_in to = {.sin_family = AF_INET};
    const char *colon = strrchr(address, ':');
    char host[64] = "";
    int fd;

    if (colon == NULL || (size_t)(colon - address) >= sizeof(host))
        return -1;
    memcpy(host, address, (size_t)(colon - address));
    to.sin_port = htons((uint16_t)atoi(colon + 1));
    if (inet_pton(AF_INET, host, &to.sin_addr) != 1)
        return -1;
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, (const struct sockaddr *)&to, sizeof(to)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

unsigned process_http_get(const char *address, const char *path, char *body, size_t body_bytes)
{
    struct timeval patience = {.tv_sec = HTTP_TIMEOUT_S};
    static char text[256 << 10];
    size_t used = 0;
    unsigned code = 0;
    const char *begin;
    ssize_t bytes;
    int fd = process_connect(address);

    if (fd < 0)
        return 0;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    bytes = snprintf(text, sizeof(text), "GET %s HTTP/1.0\r\nHost: node\r\n\r\n", path);
    if (send(fd, text, (size_t)bytes, MSG_NOSIGNAL) == bytes)
        while (used < sizeof(text) - 1 &&
               (bytes = read(fd, text + used, sizeof(text) - 1 - used)) > 0)
            used += (size_t)bytes;
    close(fd);
    text[used] = 0;
    begin = strstr(text, "\r\n\r\n");
    if (begin == NULL || sscanf(text, "HTTP/%*s %u", &code) != 1)
        return 0;
    if (body != NULL)
        snprintf(body, body_bytes, "%s", begin + 4);
    return code;
}
