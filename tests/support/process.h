/* process.h - real processes in tests: nodes, clients, command lines.
 *
 *     main -> process_supervise -> worker (the test) -> nodes, children
 *                  |
 *                  +-- outlives the worker: ends what it left, removes the folder
 *
 * Whatever happens to the test, nothing stays behind: every process dies with the one that
 * started it, and all files are in one temporary folder.
 *
 * Nothing here sleeps for a fixed time: what takes time is waited for, up to a deadline that a
 * slow machine meets too.
 *
 * Threads: one.  Memory: as said per function.
 */
#ifndef KV_TESTS_SUPPORT_PROCESS_H
#define KV_TESTS_SUPPORT_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* What is said about memory in use holds for a sanitizer's build times this. */
#ifdef __SANITIZE_ADDRESS__
#define PROCESS_MEMORY_FACTOR UINT64_C(4)
#else
#define PROCESS_MEMORY_FACTOR UINT64_C(1)
#endif

enum {
    PROCESS_PATIENCE_MS = 300000, /* for what must happen: a machine under load takes long */
    PROCESS_PATH_BYTES = 512,
    PROCESS_LINE_BYTES = 1024,
    PROCESS_LISTENERS_MAX = 64,
};

/* Runs `work` in a process of its own and returns its exit status, 1 if it was killed. */
int process_supervise(int (*work)(int argc, char **argv), int argc, char **argv);

/* The temporary folder of this test.  Children of process_start_self() share it. */
const char *process_folder(void);

/* Writes FOLDER/name into `path`. */
void process_path(char path[PROCESS_PATH_BYTES], const char *name);

/* A message on stderr, one line. */
void process_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

uint64_t process_now_us(void);

/* Looks again and again, with short naps, until it is true.  false: not in that time. */
bool process_until(bool (*is_true)(void *arg), void *arg, unsigned timeout_ms);

/* ---- any process ------------------------------------------------------------------------- */

struct process {
    pid_t pid; /* 0: none, or it was waited for */
    int in;    /* its stdin */
    int out;   /* its stdout */
};

struct process_spec {
    const char *const *argv; /* argv[0] is the path; NULL: this program */
    const char *errors;      /* a file that its stderr is added to; NULL: ours */
    const char *output;      /* a file for its stdout; NULL: the pipe `out` */
    uid_t user;              /* 0: ours */
    unsigned memory_limit;   /* of its address space, MiB; 0: none */
};

/* Starts a program.  false: it was said why. */
bool process_start(struct process *process, const struct process_spec *spec);

/* Starts this test program as `--child ROLE ARGUMENTS...`; ends with NULL. */
bool process_start_self(struct process *process,
                        const char *role,
                        const char *const *arguments);

/* Reads a line without its end from its stdout.  false: none came in time. */
bool process_read_line(struct process *process,
                       char line[PROCESS_LINE_BYTES],
                       unsigned timeout_ms);

/* Waits for its end and closes the pipes; returns the exit status, 128 + the signal that ended
 * it, or -1: it did not end in time and was killed. */
int process_wait(struct process *process, unsigned timeout_ms);

/* kill -9, and waits.  One that has ended already is no matter. */
void process_kill(struct process *process);

/* SIGSTOP, and waits until no thread of it runs; SIGCONT. */
bool process_freeze(struct process *process);
void process_thaw(struct process *process);

/* How a command line ended. */
struct process_result {
    int status; /* as process_wait() */
    char output[16 << 10];
    char errors[4 << 10];
};

/* Runs a program to its end. */
bool process_run(const struct process_spec *spec,
                 unsigned timeout_ms,
                 struct process_result *ret_result);

/* ---- what the system says about a process ------------------------------------------------ */

uint64_t process_rss(pid_t pid);    /* bytes; 0: no such process */
uint64_t process_cpu_us(pid_t pid); /* user and system time of all threads */
unsigned process_n_fds(pid_t pid);

struct process_listener {
    char host[64];
    uint16_t port;
    bool is_loopback;
};

/* TCP ports that the process listens on. */
unsigned process_listeners(pid_t pid, struct process_listener listeners[PROCESS_LISTENERS_MAX]);

/* What is in /dev/shm and which System V segments there are. */
struct process_shared {
    char names[16 << 10]; /* "/name/name/" */
};
void process_shared_look(struct process_shared *shared);

/* Waits until there is nothing that was not there before.  Other processes of the machine come
 * and go as well: what stays is a leak.  false: something stayed, and was named. */
bool process_shared_settled(const struct process_shared *before);

/* ---- nodes ------------------------------------------------------------------------------- */

struct process_node {
    struct process process;
    char dir[PROCESS_PATH_BYTES];
    char errors[PROCESS_PATH_BYTES]; /* the file with its stderr */
    char ready[PROCESS_LINE_BYTES];  /* the line */
    char control[64], metrics[64];   /* HOST:PORT */
};

/* The program; set once, from the command line of the test. */
void process_set_kvserver(const char *path);
const char *process_kvserver(void);

/* Starts a kvserver and waits until it serves.  On free ports, or, if `node` has served before,
 * on the same ports and with the same folder.  `options` ends with NULL, may be NULL. */
bool process_node_start(struct process_node *node, const char *const *options);

/* SIGTERM; the exit status as process_wait(). */
int process_node_stop(struct process_node *node);

/* ---- connections ------------------------------------------------------------------------- */

/* Connects to "HOST:PORT"; -1: refused. */
int process_connect(const char *address);

/* GETs a page.  Returns the HTTP status, 0: no answer.  `body` may be NULL. */
unsigned process_http_get(const char *address, const char *path, char *body, size_t body_bytes);

#endif
