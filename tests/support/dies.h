/* dies.h - whether something ends its process by an assertion.
 *
 * Threads: the only one.  Memory: none; what is broken is broken in a copy of the process.
 */
#ifndef KV_TESTS_SUPPORT_DIES_H
#define KV_TESTS_SUPPORT_DIES_H

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Calls broken(arg) in a child process.  true: SIGABRT ended it. */
static inline bool dies(void (*broken)(void *arg), void *arg)
{
    const struct rlimit no_core = {0};
    int status = 0;
    const pid_t child = fork();

    if (child == 0) {
        const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);

        /* The assertion's message is expected: nobody is to read it. */
        if (nowhere >= 0)
            (void)dup2(nowhere, STDERR_FILENO);
        (void)setrlimit(RLIMIT_CORE, &no_core);
        (void)signal(SIGABRT, SIG_DFL);
        broken(arg);
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        fail_msg("a child of this test");
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

/* Returns the first number below n for which broken(&number) does not die, n if it dies for n, for
 * which nothing is broken, and -1 if all is as it should be. */
static inline int first_not_found(void (*broken)(void *arg), int n)
{
    int number;

    for (number = 0; number < n; number++)
        if (!dies(broken, &number))
            return number;
    return dies(broken, &number) ? n : -1;
}

struct broken_step {
    void (*step)(void);
    void (*check)(void);
};

static inline void break_and_check(void *arg)
{
    const struct broken_step *broken = arg;

    broken->step();
    broken->check();
}

/* Whether `check` finds what `step` has done. */
static inline bool finds(void (*check)(void), void (*step)(void))
{
    struct broken_step broken = {step, check};

    return dies(break_and_check, &broken);
}

/* Tells by its name which break was not found. */
#define expect_found(step, check)             \
    do {                                      \
        if (!finds(check, step))              \
            fail_msg("%s: not found", #step); \
    } while (0)

#endif
