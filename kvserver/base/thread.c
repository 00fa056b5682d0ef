#define _GNU_SOURCE /* ppoll, thread names, processor sets */
#include "kvserver/base/thread.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum {
    NAME_BYTES = 16, /* with the final 0; the kernel keeps no more */
    SLEEP_FDS_MAX = 8,
    SLEEP_SECONDS_MAX = 24 * 3600,
};

struct kv_thread {
    pthread_t id;
    kv_thread_fn run;
    void *arg;
    char name[NAME_BYTES];
};

struct kv_signal {
    int fd;
};

struct kv_watch {
    int fd;
};

struct kv_lock {
    pthread_mutex_t mutex;
};

static void *thread_main(void *arg)
{
    struct kv_thread *thread = arg;

    pthread_setname_np(pthread_self(), thread->name);
    thread->run(thread->arg);
    return NULL;
}

kv_status_t
kv_thread_start(const char *name, kv_thread_fn run, void *arg, struct kv_thread **ret_thread)
{
    struct kv_thread *thread = calloc(1, sizeof(*thread));

    if (thread == NULL)
        return KV_IO;
    thread->run = run;
    thread->arg = arg;
    snprintf(thread->name, sizeof(thread->name), "%s", name);
    if (pthread_create(&thread->id, NULL, thread_main, thread) != 0) {
        free(thread);
        return KV_IO;
    }
    *ret_thread = thread;
    return KV_OK;
}

void kv_thread_join(struct kv_thread *thread)
{
    if (thread == NULL)
        return;
    pthread_join(thread->id, NULL);
    free(thread);
}

unsigned kv_thread_cores(void)
{
    cpu_set_t set;
    long online;

    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0)
        return (unsigned)CPU_COUNT(&set);
    /* The set has too few bits for the processors. */
    online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (unsigned)online : 1;
}

struct kv_signal *kv_signal_create(void)
{
    struct kv_signal *signal = calloc(1, sizeof(*signal));

    if (signal == NULL)
        return NULL;
    signal->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (signal->fd < 0) {
        free(signal);
        return NULL;
    }
    return signal;
}

void kv_signal_destroy(struct kv_signal *signal)
{
    if (signal == NULL)
        return;
    close(signal->fd);
    free(signal);
}

void kv_signal_raise(struct kv_signal *signal)
{
    uint64_t one = 1;

    /* EAGAIN: the counter is full, so the signal is raised already. */
    while (write(signal->fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

void kv_signal_clear(struct kv_signal *signal)
{
    uint64_t count;

    while (read(signal->fd, &count, sizeof(count)) < 0 && errno == EINTR)
        ;
}

int kv_signal_fd(const struct kv_signal *signal)
{
    return signal->fd;
}

bool kv_sleep_fds(const int *fds, unsigned n_fds, uint64_t timeout_us)
{
    struct pollfd polled[SLEEP_FDS_MAX];
    struct timespec timeout;
    uint64_t seconds = timeout_us / 1000000;

    assert(n_fds <= SLEEP_FDS_MAX);
    for (unsigned i = 0; i < n_fds; i++)
        polled[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    timeout.tv_sec = seconds < SLEEP_SECONDS_MAX ? (time_t)seconds : SLEEP_SECONDS_MAX;
    timeout.tv_nsec = (long)(timeout_us % 1000000) * 1000;
    /* An interrupted sleep is a short sleep: callers loop anyway. */
    return ppoll(polled, n_fds, &timeout, NULL) > 0;
}

struct kv_watch *kv_watch_create(void)
{
    struct kv_watch *watch = calloc(1, sizeof(*watch));

    if (watch == NULL)
        return NULL;
    watch->fd = epoll_create1(EPOLL_CLOEXEC);
    if (watch->fd < 0) {
        free(watch);
        return NULL;
    }
    return watch;
}

void kv_watch_destroy(struct kv_watch *watch)
{
    if (watch == NULL)
        return;
    close(watch->fd);
    free(watch);
}

bool kv_watch_add(struct kv_watch *watch, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};

    return epoll_ctl(watch->fd, EPOLL_CTL_ADD, fd, &event) == 0 || errno == EEXIST;
}

int kv_watch_fd(const struct kv_watch *watch)
{
    return watch->fd;
}

static struct kv_lock *create(int type)
{
    struct kv_lock *lock = calloc(1, sizeof(*lock));
    pthread_mutexattr_t attributes;
    int error;

    if (lock == NULL || pthread_mutexattr_init(&attributes) != 0) {
        free(lock);
        return NULL;
    }
    error = pthread_mutexattr_settype(&attributes, type);
    if (error == 0)
        error = pthread_mutex_init(&lock->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    if (error != 0) {
        free(lock);
        return NULL;
    }
    return lock;
}

struct kv_lock *kv_lock_create(void)
{
    return create(PTHREAD_MUTEX_DEFAULT);
}

struct kv_lock *kv_lock_create_nested(void)
{
    return create(PTHREAD_MUTEX_RECURSIVE);
}

void kv_lock_destroy(struct kv_lock *lock)
{
    if (lock == NULL)
        return;
    pthread_mutex_destroy(&lock->mutex);
    free(lock);
}

void kv_lock_take(struct kv_lock *lock)
{
    int error = pthread_mutex_lock(&lock->mutex);

    assert(error == 0);
    (void)error;
}

bool kv_lock_try(struct kv_lock *lock)
{
    int error = pthread_mutex_trylock(&lock->mutex);

    assert(error == 0 || error == EBUSY);
    return error == 0;
}

void kv_lock_release(struct kv_lock *lock)
{
    int error = pthread_mutex_unlock(&lock->mutex);

    assert(error == 0);
    (void)error;
}
