/* Data read from the sender's memory, by address and from its memory file: whole, over, or not
 * to be had.  The sender is this process, or one that it forks. */
#define _GNU_SOURCE /* memfd_create, syscall */
#include "kvserver/base/thread.h"
#include "kvserver/net/ucx/offer.h"
#include "kvserver/net/ucx/peer_files.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    BYTES = 100000,
    NO_PROCESS = 0x7fffffff,
    FILES_MAX = 64, /* of one process that are open at once */
};

static struct kv_offers offers; /* by address */
static struct kv_memory_file memory_file;
static struct kv_offers file_offers;
static struct kv_peer_files *peer_files;
static unsigned char data[BYTES], got[BYTES];

static int set_up(void **state)
{
    (void)state;
    for (size_t i = 0; i < BYTES; i++)
        data[i] = (unsigned char)(i * 131 >> 3);
    memset(got, 0, BYTES);
    kv_offers_init(&offers, NULL);
    kv_memory_file_init(&memory_file);
    kv_offers_init(&file_offers, &memory_file);
    peer_files = kv_peer_files_create();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kv_offers_fini(&offers);
    kv_offers_fini(&file_offers);
    kv_memory_file_fini(&memory_file);
    kv_peer_files_free(peer_files);
    return 0;
}

static struct kv_offer *offer_data(struct kv_offers *from,
                                   const void *what,
                                   const char *header,
                                   uint32_t process,
                                   struct kv_offer_tail *ret_tail)
{
    struct kv_offer *offer = kv_offer_take(from, what, BYTES);
    size_t bytes;

    assert_non_null(offer);
    bytes = kv_offer_write(from, offer, header, strlen(header), process);
    assert_int_equal(bytes, strlen(header) + sizeof(*ret_tail));
    assert_memory_equal(offer->message, header, strlen(header));
    memcpy(ret_tail, offer->message + strlen(header), sizeof(*ret_tail));
    return offer;
}

static enum kv_offer_outcome read_pieces(const struct kv_offer_tail *tail, unsigned n)
{
    struct kv_iov iov[KV_IOV_MAX];
    size_t at = 0;

    for (unsigned i = 0; i < n; i++) {
        size_t end = i + 1 == n ? BYTES : BYTES / n * (i + 1);

        iov[i] = (struct kv_iov){got + at, end - at};
        at = end;
    }
    return tail->file != 0 ? kv_peer_files_read(peer_files, tail, BYTES, iov, n)
                           : kv_offer_read(tail, BYTES, iov, n);
}

/* Some containers forbid it; the transport then does without. */
static void skip_if_refused(enum kv_offer_outcome outcome)
{
    if (outcome == KV_OFFER_REFUSED)
        skip();
}

/* A system may lack files in memory, or /proc; the transport then does without. */
static void skip_without_files(void)
{
    void *piece = kv_memory_file_alloc(&memory_file, 1);

    if (piece != NULL)
        kv_memory_file_free(&memory_file, piece);
    if (piece == NULL || peer_files == NULL)
        skip();
}

static void data_is_read_in_pieces(void **state)
{
    static const unsigned pieces[] = {1, 3, KV_IOV_MAX};
    struct kv_offer_tail tail;
    struct kv_offer *offer = offer_data(&offers, data, "header", (uint32_t)getpid(), &tail);

    (void)state;
    assert_int_equal(tail.file, 0);
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        enum kv_offer_outcome outcome = read_pieces(&tail, pieces[i]);

        skip_if_refused(outcome);
        assert_int_equal(outcome, KV_OFFER_WHOLE);
        assert_memory_equal(got, data, BYTES);
        memset(got, 0, BYTES);
    }
    kv_offer_put(&offers, offer);
}

static void check_over(struct kv_offers *from)
{
    struct kv_offer_tail tail, next;
    struct kv_offer *offer = offer_data(from, data, "", (uint32_t)getpid(), &tail), *again;

    skip_if_refused(read_pieces(&tail, 1));
    kv_offer_end(offer);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_GONE);
    kv_offer_put(from, offer);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_GONE);

    /* The same place with another number: the late reader is not fooled. */
    again = offer_data(from, data, "", (uint32_t)getpid(), &next);
    assert_ptr_equal(again, offer);
    assert_true(next.number != tail.number && next.number != 0);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_GONE);
    assert_int_equal(read_pieces(&next, 1), KV_OFFER_WHOLE);
    kv_offer_put(from, again);
}

static void an_offer_that_is_over_gives_nothing(void **state)
{
    (void)state;
    check_over(&offers);
}

static void an_offer_in_a_file_that_is_over(void **state)
{
    (void)state;
    skip_without_files();
    check_over(&file_offers);
}

static void a_process_that_is_gone(void **state)
{
    struct kv_offer_tail tail;
    struct kv_offer *offer = offer_data(&offers, data, "", NO_PROCESS, &tail);

    (void)state;
    skip_if_refused(read_pieces(&tail, 1));
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_GONE);
    kv_offer_put(&offers, offer);
    if (peer_files == NULL)
        return;
    tail.file = 1;
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_ABSENT);
}

/* What anybody knows is no number: neither 0, which offers that ended have, nor what a file has
 * at its beginning. */
static void a_number_that_all_know(void **state)
{
    struct kv_offer_tail tail, wrong;
    struct kv_offer *offer;

    (void)state;
    skip_without_files();
    offer = offer_data(&file_offers, data, "", (uint32_t)getpid(), &tail);
    wrong = tail;
    wrong.number = 0;
    wrong.offer = atomic_load(&memory_file.base) + memory_file.bytes / 2; /* a hole */
    assert_int_equal(read_pieces(&wrong, 1), KV_OFFER_REFUSED);
    wrong.number = KV_MEMORY_FILE_MAGIC;
    wrong.offer = atomic_load(&memory_file.base);
    assert_int_equal(read_pieces(&wrong, 1), KV_OFFER_REFUSED);
    wrong = tail;
    wrong.data = atomic_load(&memory_file.base) + KV_MEMORY_FILE_PIECES - 1;
    assert_int_equal(read_pieces(&wrong, 1), KV_OFFER_REFUSED);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_WHOLE);
    kv_offer_end(offer);
    tail.number = 0;
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_REFUSED);
    kv_offer_put(&file_offers, offer);

    offer = offer_data(&offers, data, "", (uint32_t)getpid(), &tail);
    kv_offer_end(offer);
    tail.number = 0;
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_REFUSED);
    kv_offer_put(&offers, offer);
}

/* ---- files ------------------------------------------------------------------------------- */

/* What lies in the file goes from there, all else from a copy, and what is too large for one by
 * address. */
static void data_is_read_from_the_file(void **state)
{
    static const unsigned pieces[] = {1, 3, KV_IOV_MAX};
    static unsigned char large[KV_OFFER_COPY_BYTES + 1];
    unsigned char *inside;
    struct kv_offer *offer;

    (void)state;
    skip_without_files();
    inside = kv_memory_file_alloc(&memory_file, 2 * BYTES);
    assert_non_null(inside);
    memcpy(inside + 100, data, BYTES);
    for (unsigned in_file = 0; in_file < 2; in_file++) {
        const void *what = in_file ? inside + 100 : data;
        struct kv_offer_tail tail;

        offer = offer_data(&file_offers, what, "header", (uint32_t)getpid(), &tail);
        assert_int_not_equal(tail.file, 0);
        assert_int_equal(offer->copy == NULL, in_file);
        for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
            assert_int_equal(read_pieces(&tail, pieces[i]), KV_OFFER_WHOLE);
            assert_memory_equal(got, data, BYTES);
            memset(got, 0, BYTES);
        }
        kv_offer_put(&file_offers, offer);
    }
    assert_int_equal(kv_peer_files_open(peer_files), 1);
    offer = kv_offer_take(&file_offers, large, sizeof(large));
    assert_false(offer->is_in_file);
    kv_offer_put(&file_offers, offer);

    for (unsigned i = 0; i < KV_OFFER_COPIES_MAX + 1; i++) {
        struct kv_offer *before = offer;

        offer = kv_offer_take(&file_offers, data, BYTES);
        assert_int_equal(offer->is_in_file, i < KV_OFFER_COPIES_MAX);
        offer->next = i > 0 ? before : NULL;
    }
    while (offer != NULL) {
        struct kv_offer *next = offer->next;

        kv_offer_put(&file_offers, offer);
        offer = next;
    }
}

/* Pieces do not overlap, lie where they are said to, are of zeros, and leave no page behind. */
static void pieces_of_a_file(void **state)
{
    enum {
        PIECES = 40
    };
    struct stat facts;
    blkcnt_t before;
    unsigned char *pieces[PIECES];

    (void)state;
    skip_without_files();
    assert_int_equal(fstat(memory_file.fd, &facts), 0);
    before = facts.st_blocks;
    for (unsigned round = 0; round < 3; round++) {
        for (size_t i = 0; i < PIECES; i++) {
            const size_t bytes = i % 5 == 0 ? 3 << 20 : 5000 * i + 1;

            pieces[i] = kv_memory_file_alloc(&memory_file, bytes);
            assert_non_null(pieces[i]);
            assert_true(kv_memory_file_has(&memory_file, pieces[i], bytes));
            if (i % 2 == 0)
                kv_memory_file_provide(pieces[i], bytes);
            if (bytes >= 2 << 20)
                assert_int_equal((uintptr_t)pieces[i] % (2 << 20), 0);
            for (size_t at = 0; at < bytes; at += 4096)
                assert_int_equal(pieces[i][at], 0);
            memset(pieces[i], (int)i + 1, bytes);
        }
        for (size_t i = 0; i < PIECES; i++) {
            const size_t bytes = i % 5 == 0 ? 3 << 20 : 5000 * i + 1;

            for (size_t at = 0; at < bytes; at += 1000)
                assert_int_equal(pieces[i][at], i + 1);
            assert_int_equal(pieces[i][bytes - 1], i + 1);
        }
        for (size_t i = 0; i < PIECES; i++)
            kv_memory_file_free(&memory_file, pieces[(i * 7 + round) % PIECES]);
    }
    assert_int_equal(fstat(memory_file.fd, &facts), 0);
    assert_int_equal(facts.st_blocks, before);
    assert_null(kv_memory_file_alloc(&memory_file, 0));
    assert_null(kv_memory_file_alloc(&memory_file, SIZE_MAX));
    assert_null(kv_memory_file_alloc(&memory_file, memory_file.bytes));
    assert_false(kv_memory_file_has(&memory_file, data, 1));
}

/* No descriptor of a process is opened but that of a memory file, and no byte outside it read. */
static void what_is_no_memory_file(void **state)
{
    struct kv_offer_tail tail, wrong;
    struct kv_offer *offer;
    uint64_t head[2] = {0};
    char path[] = "/tmp/test_offer.XXXXXX";
    int fds[6], pair[2];

    (void)state;
    skip_without_files();
    offer = offer_data(&file_offers, data, "", (uint32_t)getpid(), &tail);
    head[0] = KV_MEMORY_FILE_MAGIC;

    assert_int_equal(pipe(fds), 0); /* to open one would wait for the other end */
    fds[2] = mkstemp(path);
    assert_int_equal(write(fds[2], head, sizeof(head)), sizeof(head));
    unlink(path);
    fds[3] = open("/dev/zero", O_RDONLY);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    fds[4] = pair[0];
    fds[5] = memfd_create("other", MFD_CLOEXEC); /* one, but without a head */
    for (unsigned i = 0; i < 6; i++) {
        wrong = tail;
        wrong.file = (uint32_t)fds[i] + 1;
        assert_int_equal(read_pieces(&wrong, 1), KV_OFFER_REFUSED);
        close(fds[i]);
        assert_int_equal(read_pieces(&wrong, 1), KV_OFFER_ABSENT);
    }
    close(pair[1]);
    assert_int_equal(kv_peer_files_open(peer_files), 0);

    static const uint64_t places[] = {0, 1, UINT64_MAX, UINT64_MAX - BYTES, (uint64_t)1 << 63};
    for (unsigned i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        wrong = tail;
        wrong.data = places[i];
        assert_int_equal(read_pieces(&wrong, 3), KV_OFFER_REFUSED);
        wrong = tail;
        wrong.offer = places[i];
        assert_int_equal(read_pieces(&wrong, 3), KV_OFFER_REFUSED);
    }
    wrong = tail;
    wrong.data = atomic_load(&memory_file.base) - 1;
    assert_int_equal(read_pieces(&wrong, 1), KV_OFFER_REFUSED);
    wrong.data = atomic_load(&memory_file.base) + memory_file.bytes - BYTES + 1;
    assert_int_equal(read_pieces(&wrong, 1), KV_OFFER_REFUSED);
    wrong.number ^= 1; /* an offer that is over, wherever its data was */
    assert_int_equal(read_pieces(&wrong, 1), KV_OFFER_GONE);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_WHOLE);
    kv_offer_put(&file_offers, offer);
}

/* A file that its owner makes shorter, or empties, harms no reader; nor does it give the reader
 * memory to pay for. */
static void a_file_that_loses_its_bytes(void **state)
{
    enum {
        DATA_AT = KV_MEMORY_FILE_PIECES + 4096,
        NUMBER_AT = KV_MEMORY_FILE_PIECES + 64,
        FILE_BYTES = DATA_AT + (1 << 20)
    };
    const uint64_t head[2] = {KV_MEMORY_FILE_MAGIC, 0x10000};
    const uint64_t number = 77;
    struct kv_offer_tail tail = {
        .data = 0x10000 + DATA_AT, .offer = 0x10000 + NUMBER_AT, .number = number};
    struct stat facts;
    blkcnt_t before;
    int fd;

    (void)state;
    skip_without_files();
    fd = memfd_create("mine", MFD_CLOEXEC);
    assert_true(fd >= 0 && ftruncate(fd, FILE_BYTES) == 0);
    assert_int_equal(pwrite(fd, head, sizeof(head), 0), sizeof(head));
    assert_int_equal(pwrite(fd, &number, sizeof(number), NUMBER_AT), sizeof(number));
    assert_int_equal(pwrite(fd, data, BYTES, DATA_AT), BYTES);
    tail.process = (uint32_t)getpid();
    tail.file = (uint32_t)fd + 1;
    assert_int_equal(read_pieces(&tail, 3), KV_OFFER_WHOLE);
    assert_memory_equal(got, data, BYTES);

    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, DATA_AT,
                               FILE_BYTES - DATA_AT),
                     0);
    assert_int_equal(fstat(fd, &facts), 0);
    before = facts.st_blocks;
    assert_int_equal(read_pieces(&tail, 3), KV_OFFER_WHOLE);
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(got[i], 0);
    assert_int_equal(fstat(fd, &facts), 0);
    assert_int_equal(facts.st_blocks, before);

    assert_int_equal(ftruncate(fd, DATA_AT + BYTES - 1), 0);
    assert_int_equal(read_pieces(&tail, 3), KV_OFFER_REFUSED);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(read_pieces(&tail, 3), KV_OFFER_REFUSED); /* it has no head now */
    close(fd);
}

/* Another file has the descriptor of the one that is open: the bytes are those of the new one. */
static void a_descriptor_that_is_used_again(void **state)
{
    struct kv_memory_file other;
    struct kv_offers other_offers;
    struct kv_offer_tail tail, old;
    struct kv_offer *offer, *other_offer;
    unsigned char changed[BYTES];
    int kept;

    (void)state;
    skip_without_files();
    offer = offer_data(&file_offers, data, "", (uint32_t)getpid(), &old);
    assert_int_equal(read_pieces(&old, 1), KV_OFFER_WHOLE);

    kv_memory_file_init(&other);
    kv_offers_init(&other_offers, &other);
    memcpy(changed, data, BYTES);
    changed[0]++;
    other_offer = offer_data(&other_offers, changed, "", (uint32_t)getpid(), &tail);
    kept = dup(memory_file.fd);
    assert_int_equal(dup2(other.fd, memory_file.fd), memory_file.fd);
    tail.file = old.file;
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_WHOLE);
    assert_memory_equal(got, changed, BYTES);
    assert_int_equal(read_pieces(&old, 1), KV_OFFER_REFUSED);
    assert_int_equal(dup2(kept, memory_file.fd), memory_file.fd);
    close(kept);
    assert_int_equal(read_pieces(&old, 1), KV_OFFER_WHOLE);
    assert_memory_equal(got, data, BYTES);

    kv_offer_put(&other_offers, other_offer);
    kv_offers_fini(&other_offers);
    kv_memory_file_fini(&other);
    kv_offer_put(&file_offers, offer);
}

/* More files of one process than are kept open: all are read, again and again. */
static void more_files_than_are_open(void **state)
{
    enum {
        N = FILES_MAX + 20
    };
    static struct kv_memory_file files[N];
    static struct kv_offers lists[N];
    static struct kv_offer *taken[N];
    static struct kv_offer_tail tails[N];

    (void)state;
    skip_without_files();
    for (unsigned i = 0; i < N; i++) {
        kv_memory_file_init(&files[i]);
        kv_offers_init(&lists[i], &files[i]);
        data[0] = (unsigned char)i;
        taken[i] = offer_data(&lists[i], data, "", (uint32_t)getpid(), &tails[i]);
        assert_int_not_equal(tails[i].file, 0);
    }
    for (unsigned round = 0; round < 3; round++) {
        for (unsigned i = 0; i < N; i++) {
            assert_int_equal(read_pieces(&tails[i], 1), KV_OFFER_WHOLE);
            assert_int_equal(got[0], i);
        }
        assert_int_equal(kv_peer_files_open(peer_files), FILES_MAX);
    }
    kv_peer_files_forget(peer_files, (uint32_t)getpid());
    assert_int_equal(kv_peer_files_open(peer_files), 0);
    for (unsigned i = 0; i < N; i++) {
        kv_offer_put(&lists[i], taken[i]);
        kv_offers_fini(&lists[i]);
        kv_memory_file_fini(&files[i]);
    }
}

/* The last descriptors of a process are not for files of its peers. */
static void few_descriptors(void **state)
{
    enum {
        LIMIT = 128,
        MINE = LIMIT - LIMIT / 4 + 2, /* its own: they begin with 0 */
    };
    struct kv_offer_tail tail;
    struct rlimit before, few;
    struct kv_offer *offer;
    int taken[MINE];
    unsigned n = 0;

    (void)state;
    skip_without_files();
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = LIMIT;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    kv_peer_files_free(peer_files);
    peer_files = kv_peer_files_create();
    assert_non_null(peer_files);
    offer = offer_data(&file_offers, data, "", (uint32_t)getpid(), &tail);
    do {
        taken[n] = dup(memory_file.fd);
        assert_true(taken[n] >= 0);
    } while (taken[n++] + 1 < MINE);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_REFUSED);
    assert_int_equal(kv_peer_files_open(peer_files), 0);
    while (n > 0)
        close(taken[--n]);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_WHOLE);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    kv_offer_put(&file_offers, offer);
}

/* ---- another process --------------------------------------------------------------------- */

/* Forks a process that offers what `what` returns, and sleeps.  Returns its tail. */
static pid_t fork_sender(const unsigned char *(*what)(struct kv_memory_file *file),
                         struct kv_offer_tail *ret_tail)
{
    int ends[2];
    pid_t child;

    assert_int_equal(pipe(ends), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct kv_memory_file file;
        struct kv_offers list;
        struct kv_offer_tail tail;

        kv_memory_file_init(&file);
        kv_offers_init(&list, &file);
        offer_data(&list, what(&file), "", (uint32_t)getpid(), &tail);
        if (write(ends[1], &tail, sizeof(tail)) != (ssize_t)sizeof(tail))
            _exit(1);
        for (;;)
            pause();
    }
    assert_int_equal(read(ends[0], ret_tail, sizeof(*ret_tail)), sizeof(*ret_tail));
    close(ends[0]);
    close(ends[1]);
    assert_int_equal(ret_tail->process, child);
    return child;
}

static void end_sender(pid_t child)
{
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

static const unsigned char *in_the_file(struct kv_memory_file *file)
{
    return memcpy(kv_memory_file_alloc(file, BYTES), data, BYTES);
}

static void another_process(void **state)
{
    struct kv_offer_tail tail;
    pid_t child;

    (void)state;
    skip_without_files();
    child = fork_sender(in_the_file, &tail);
    assert_int_not_equal(tail.file, 0);
    assert_int_equal(read_pieces(&tail, 3), KV_OFFER_WHOLE);
    assert_memory_equal(got, data, BYTES);
    kill(child, SIGSTOP); /* as good as any */
    memset(got, 0, BYTES);
    assert_int_equal(read_pieces(&tail, 3), KV_OFFER_WHOLE);
    assert_memory_equal(got, data, BYTES);
    end_sender(child);
    kv_peer_files_forget(peer_files, (uint32_t)child);
    assert_int_equal(read_pieces(&tail, 3), KV_OFFER_ABSENT);
    assert_int_equal(kv_peer_files_open(peer_files), 0);
}

/* Returns addresses whose pages nobody provides; NULL: not on this system. */
static const unsigned char *that_hangs(void *at, int fd, size_t place)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.mode = UFFDIO_REGISTER_MODE_MISSING};
    const size_t bytes = (BYTES + 4095) & ~(size_t)4095;
    int faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    void *memory = mmap(at, bytes, PROT_READ | PROT_WRITE,
                        (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) |
                            (at != NULL ? MAP_FIXED : 0),
                        fd, (off_t)place);

    if (faults < 0 || memory == MAP_FAILED || ioctl(faults, UFFDIO_API, &api) != 0)
        return NULL;
    range.range.start = (uintptr_t)memory;
    range.range.len = bytes;
    return ioctl(faults, UFFDIO_REGISTER, &range) == 0 ? memory : NULL;
}

static const unsigned char *in_a_file_that_hangs(struct kv_memory_file *file)
{
    unsigned char *piece = kv_memory_file_alloc(file, BYTES);
    const size_t place = (uintptr_t)piece - atomic_load(&file->base);

    if (that_hangs(piece, file->fd, place) == NULL)
        _exit(1); /* tail is not written */
    return piece;
}

static bool may_hang(void)
{
    pid_t child = fork();
    int status;

    if (child == 0)
        _exit(that_hangs(NULL, -1, 0) != NULL ? 0 : 1);
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* A peer's pages that hang its own threads: the reader does not ask for them through the peer's
 * addresses. */
static void memory_that_hangs(void **state)
{
    struct kv_offer_tail tail;
    pid_t child;

    (void)state;
    skip_without_files();
    if (!may_hang())
        skip();
    child = fork_sender(in_a_file_that_hangs, &tail);
    memset(got, 1, BYTES);
    assert_int_equal(read_pieces(&tail, 3), KV_OFFER_WHOLE);
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(got[i], 0);
    end_sender(child);
}

/* A forked process may end what it inherited: its parent's memory stays. */
static void a_forked_process_leaves_the_memory(void **state)
{
    struct kv_offer_tail tail;
    struct kv_offer *offer;
    unsigned char *piece;
    int status;
    pid_t child;

    (void)state;
    skip_without_files();
    piece = kv_memory_file_alloc(&memory_file, BYTES);
    memcpy(piece, data, BYTES);
    offer = offer_data(&file_offers, piece, "", (uint32_t)getpid(), &tail);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const bool is_refused = kv_memory_file_alloc(&memory_file, BYTES) == NULL;

        kv_offer_put(&offers, kv_offer_take(&offers, data, BYTES));
        kv_memory_file_fini(&memory_file);
        _exit(is_refused ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_memory_equal(piece, data, BYTES);
    assert_int_equal(read_pieces(&tail, 1), KV_OFFER_WHOLE);
    assert_memory_equal(got, data, BYTES);
    kv_offer_put(&file_offers, offer);
}

/* Threads that read files which others forget. */
static _Atomic unsigned n_wrong;

static void read_and_forget(void *arg)
{
    const struct kv_offer_tail *tails = arg;

    for (unsigned i = 0; i < 3000; i++) {
        unsigned char here[BYTES];
        const struct kv_iov iov = {here, BYTES};

        if (kv_peer_files_read(peer_files, &tails[i % 8], BYTES, &iov, 1) != KV_OFFER_WHOLE ||
            memcmp(here, data, BYTES) != 0)
            n_wrong++;
        if (i % 50 == 0)
            kv_peer_files_forget(peer_files, tails[0].process);
    }
}

static void threads_read_and_forget(void **state)
{
    struct kv_memory_file files[8];
    struct kv_offers lists[8];
    struct kv_offer *taken[8];
    struct kv_offer_tail tails[8];
    struct kv_thread *threads[3];

    (void)state;
    skip_without_files();
    for (unsigned i = 0; i < 8; i++) {
        kv_memory_file_init(&files[i]);
        kv_offers_init(&lists[i], &files[i]);
        taken[i] = offer_data(&lists[i], data, "", (uint32_t)getpid(), &tails[i]);
    }
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(kv_thread_start("read", read_and_forget, tails, &threads[i]), KV_OK);
    for (unsigned i = 0; i < 3; i++)
        kv_thread_join(threads[i]);
    assert_int_equal(n_wrong, 0);
    for (unsigned i = 0; i < 8; i++) {
        kv_offer_put(&lists[i], taken[i]);
        kv_offers_fini(&lists[i]);
        kv_memory_file_fini(&files[i]);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(data_is_read_in_pieces),
        TEST(an_offer_that_is_over_gives_nothing),
        TEST(an_offer_in_a_file_that_is_over),
        TEST(a_process_that_is_gone),
        TEST(a_number_that_all_know),
        TEST(data_is_read_from_the_file),
        TEST(pieces_of_a_file),
        TEST(what_is_no_memory_file),
        TEST(a_file_that_loses_its_bytes),
        TEST(a_descriptor_that_is_used_again),
        TEST(more_files_than_are_open),
        TEST(few_descriptors),
        TEST(another_process),
        TEST(memory_that_hangs),
        TEST(a_forked_process_leaves_the_memory),
        TEST(threads_read_and_forget),
    };

    return cmocka_run_group_tests_name("offer", tests, NULL, NULL);
}
