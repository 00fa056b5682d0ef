/* aborts.h - for tests of assertions: a step that breaks something, done in a child process,
 * and a check that has to end it.
 *
 * Threads: the test's, with no others.  Memory: none.
 */
#ifndef KV_TESTS_SUPPORT_ABORTS_H
#define KV_TESTS_SUPPORT_ABORTS_H

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Whether a process in which `step` was done ends with SIGABRT by `check`. */
static inline bool aborts(void (*step)(void), void (*check)(void))
{
    int status;
    const pid_t pid = fork();

    if (pid == 0) {
        const struct rlimit no_core = {0};

        signal(SIGABRT, SIG_DFL);
        setrlimit(RLIMIT_CORE, &no_core);
        if (freopen("/dev/null", "w", stderr) == NULL)
            _exit(2);
        step();
        check();
        _exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        fail_msg("a child of this test");
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

/* Tells by its name which break was not found. */
#define expect_found(step, check)             \
    do {                                      \
        if (!aborts(step, check))             \
            fail_msg("%s: not found", #step); \
    } while (0)

#endif
