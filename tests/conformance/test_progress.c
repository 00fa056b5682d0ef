/* test_progress.c - a client with a thread of the library's own: operations move and end
 * without a call, calls find everything as they would without a thread, and nothing is
 * touched by two threads at once, which the sanitizer of threads watches.
 *
 * Two embedded nodes over the loopback and the real client library.
 */
#include "tests/support/cluster.h"
#include "tests/support/rows.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "kvserver/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

enum {
    N_NODES = 2,
    MEMORY_BYTES = 256 << 20,
    N_SLOTS = 16,
    OBJECT_BYTES = 200000,
    ROWS_BYTES = 1 << 20,
    DEADLINE_MS = 100,
    COMPUTE_US = 300 * 1000, /* without a call */
    LONG_US = 2 * 1000 * 1000,
    PATIENCE_US = 60 * 1000 * 1000,
    ROUNDS = 3000,
    CLOSES = 30,
};

static struct cluster cluster;

/* A client, and objects that it puts and gets. */
struct user {
    struct kv_client *client;
    struct kv_buffer *buffer; /* a place for each object, and ROWS_BYTES */
    struct kv_object objects[N_SLOTS];
    char names[N_SLOTS][24];
    uint64_t salts[N_SLOTS]; /* of what was put last; 0: nothing */
    struct kv_op *ops[N_SLOTS];
    bool gets[N_SLOTS];
    struct kv_session *session;
};

static int open_cluster(void **state)
{
    const struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = N_NODES,
        .n_threads = 2,
        .memory_bytes = MEMORY_BYTES,
    };

    (void)state;
    return cluster_open(&cluster, &setup) ? 0 : -1;
}

static int close_cluster(void **state)
{
    (void)state;
    cluster_close(&cluster);
    return 0;
}

static uint64_t now_us(void)
{
    return kv_clock_now(&kv_clock_real);
}

static void compute(uint64_t us)
{
    kv_sleep_fds(NULL, 0, us);
}

static const struct kv_model_info *model(void)
{
    static const uint16_t heads[] = {2, 2};
    static struct kv_model_info model;

    if (model.name[0] == 0)
        test_model(&model, "progress", 2, heads, 32, 32);
    return &model;
}

static void open_user(struct user *user, bool has_thread)
{
    const struct cluster_client setup = {.has_thread = has_thread};
    struct kv_op *op;

    *user = (struct user){.client = cluster_connect(&cluster, &setup)};
    assert_int_equal(
        kv_buffer_alloc(user->client, N_SLOTS * OBJECT_BYTES + ROWS_BYTES, &user->buffer),
        KV_OK);
    for (unsigned i = 0; i < N_SLOTS; i++) {
        user->objects[i] = (struct kv_object){
            .name = user->names[i], .buffer = user->buffer, .offset = (size_t)i * OBJECT_BYTES};
    }
    assert_int_equal(kv_open_begin(user->client, model(), NULL, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    user->session = kv_op_session(op);
    kv_op_free(op);
}

static void close_user(struct user *user)
{
    kv_client_close(user->client);
}

static uint8_t *place(const struct user *user, unsigned slot)
{
    return (uint8_t *)kv_buffer_data(user->buffer) + (size_t)slot * OBJECT_BYTES;
}

/* Puts an object that nobody has put. */
static void put(struct user *user, unsigned slot)
{
    static uint64_t salt;

    user->salts[slot] = ++salt;
    snprintf(user->names[slot], sizeof(user->names[slot]), "object %lu", (unsigned long)salt);
    user->gets[slot] = false;
    user->objects[slot].bytes = OBJECT_BYTES;
    test_fill(place(user, slot), OBJECT_BYTES, user->salts[slot]);
    assert_int_equal(kv_objects_begin(user->client, KV_OBJECT_PUT, &user->objects[slot], 1, 0,
                                      &user->ops[slot]),
                     KV_OK);
}

static void get(struct user *user, unsigned slot)
{
    user->gets[slot] = true;
    user->objects[slot].bytes = OBJECT_BYTES;
    memset(place(user, slot), 0, OBJECT_BYTES);
    assert_int_equal(kv_objects_begin(user->client, KV_OBJECT_GET, &user->objects[slot], 1, 0,
                                      &user->ops[slot]),
                     KV_OK);
}

/* Frees an operation that has ended well; what it got is what was put. */
static void collect(struct user *user, unsigned slot)
{
    if (kv_op_status(user->ops[slot]) != KV_OK)
        fail_msg("%s", kv_op_detail(user->ops[slot]));
    assert_int_equal(user->objects[slot].status, KV_OK);
    assert_true(kv_op_elapsed_us(user->ops[slot]) > 0);
    if (user->gets[slot]) {
        assert_int_equal(user->objects[slot].bytes, OBJECT_BYTES);
        assert_true(test_is_filled(place(user, slot), OBJECT_BYTES, user->salts[slot]));
    }
    kv_op_free(user->ops[slot]);
    user->ops[slot] = NULL;
}

/* Begins a read of rows that nobody puts: it ends at its deadline. */
static struct kv_op *begin_vain(const struct user *user, uint32_t deadline_ms)
{
    const struct kv_rows rows = {.n_layers = 2, .n_tokens = 1};
    const struct kv_rows_io io = {.buffer = user->buffer,
                                  .offset = (size_t)N_SLOTS * OBJECT_BYTES};
    struct kv_op *op;

    assert_int_equal(kv_read_begin(user->session, &rows, &io, deadline_ms, &op), KV_OK);
    return op;
}

/* ---- without a call ---------------------------------------------------------------------- */

/* What was begun ends while the caller computes; without a thread it does not. */
static void moves(void **state)
{
    struct user user;

    (void)state;
    for (int has_thread = 0; has_thread < 2; has_thread++) {
        open_user(&user, has_thread != 0);
        for (unsigned slot = 0; slot < N_SLOTS; slot++)
            put(&user, slot);
        compute(COMPUTE_US);
        for (unsigned slot = 0; slot < N_SLOTS; slot++) {
            const uint64_t until_us = now_us() + PATIENCE_US;

            while (has_thread && kv_op_status(user.ops[slot]) == KV_IN_PROGRESS) {
                assert_true(now_us() < until_us);
                compute(1000);
            }
            assert_int_equal(kv_op_status(user.ops[slot]), has_thread ? KV_OK : KV_IN_PROGRESS);
        }
        for (unsigned slot = 0; slot < N_SLOTS; slot++) {
            assert_int_equal(kv_wait(user.ops[slot]), KV_OK);
            collect(&user, slot);
            get(&user, slot);
        }
        /* Even if the caller does nothing but ask, or look at a buffer. */
        while (has_thread && kv_op_status(user.ops[0]) == KV_IN_PROGRESS)
            continue;
        while (has_thread && kv_buffer_busy(user.buffer))
            continue;
        for (unsigned slot = 0; slot < N_SLOTS; slot++) {
            assert_int_equal(kv_wait(user.ops[slot]), KV_OK);
            collect(&user, slot);
        }
        close_user(&user);
    }
}

/* A deadline is kept while the caller computes. */
static void ends(void **state)
{
    struct user user;

    (void)state;
    for (int has_thread = 0; has_thread < 2; has_thread++) {
        struct kv_op_times times;
        struct kv_op *op;
        uint64_t back_us;

        open_user(&user, has_thread != 0);
        op = begin_vain(&user, DEADLINE_MS);
        compute(LONG_US);
        back_us = now_us();
        if (!has_thread) {
            assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
            assert_string_equal(kv_op_detail(op), "");
        }
        assert_true(kv_wait(op) < KV_OK);
        kv_op_get_times(op, &times);
        assert_int_equal(times.ended_us < back_us, has_thread);
        kv_op_free(op);
        close_user(&user);
    }
}

/* ---- what is told ------------------------------------------------------------------------ */

/* The last failure is that of a call, or of an operation whose end was told; what fails
 * beside the caller does not take its place, nor change a text that he reads. */
static void tells_failures(void **state)
{
    const char *detail, *op_detail;
    struct user user;
    struct kv_op *one, *other;
    struct kv_buffer *none;

    (void)state;
    open_user(&user, true);
    one = begin_vain(&user, DEADLINE_MS);
    other = begin_vain(&user, DEADLINE_MS);
    assert_int_equal(kv_buffer_alloc(user.client, 0, &none), KV_INVALID);
    detail = kv_client_detail(user.client);
    while (kv_op_status(one) == KV_IN_PROGRESS || kv_op_status(other) == KV_IN_PROGRESS) {
        assert_string_equal(detail, "buffer: 0 bytes: out of bounds");
        compute(1000);
    }
    assert_string_equal(kv_client_detail(user.client), "buffer: 0 bytes: out of bounds");
    op_detail = kv_op_detail(one);
    assert_non_null(strstr(op_detail, "read: "));
    assert_true(kv_poll(user.client) == 2);
    assert_non_null(strstr(kv_client_detail(user.client), "read: "));
    assert_int_equal(kv_buffer_alloc(user.client, 0, &none), KV_INVALID);
    assert_int_equal(kv_wait(one), kv_op_status(one));
    assert_string_equal(kv_client_detail(user.client), op_detail);
    kv_op_free(one);
    kv_op_free(other);
    close_user(&user);
}

/* Waits on the descriptor as an epoll program does, until `n` operations were told.  Returns
 * how often it slept. */
static unsigned loop_until(struct user *user, unsigned n)
{
    const int fd = kv_client_fd(user->client);
    unsigned n_slept = 0;

    assert_true(fd >= 0);
    for (const uint64_t until_us = now_us() + PATIENCE_US; n > 0;) {
        uint64_t timeout_us;
        struct kv_op *op;

        assert_true(now_us() < until_us);
        kv_poll(user->client);
        while ((op = kv_client_next_ended(user->client)) != NULL) {
            struct kv_object *object = kv_op_user(op);

            assert_true(n > 0);
            n--;
            collect(user, (unsigned)(object - user->objects));
        }
        if (n > 0 && kv_client_arm(user->client, &timeout_us)) {
            kv_sleep_fds(&fd, 1, timeout_us);
            n_slept++;
        }
    }
    return n_slept;
}

/* The same loop works with a thread and without one. */
static void loops(void **state)
{
    struct user user;

    (void)state;
    for (int has_thread = 0; has_thread < 2; has_thread++) {
        uint64_t timeout_us;
        int fd;

        open_user(&user, has_thread != 0);
        fd = kv_client_fd(user.client);
        assert_int_equal(kv_client_fd(user.client), fd);
        for (unsigned round = 0; round < 40; round++) {
            unsigned n = 1 + round % N_SLOTS;

            for (unsigned slot = 0; slot < n; slot++) {
                if (round < N_SLOTS)
                    put(&user, slot);
                else
                    get(&user, slot);
                kv_op_set_user(user.ops[slot], &user.objects[slot]);
            }
            (void)loop_until(&user, n);
        }
        /* Nothing is under way: nothing is to be read, for as long as the caller is told to
         * sleep. */
        while (!kv_client_arm(user.client, &timeout_us))
            kv_poll(user.client);
        if (has_thread)
            assert_false(kv_sleep_fds(&fd, 1, COMPUTE_US));
        close_user(&user);
    }
}

/* The descriptor tells of an end once the caller sleeps, also of one without a pointer. */
static void signals_ends(void **state)
{
    struct user user;
    uint64_t timeout_us;
    int fd;

    (void)state;
    open_user(&user, true);
    fd = kv_client_fd(user.client);
    for (unsigned i = 0; i < 20; i++) {
        put(&user, 0);
        if (kv_client_arm(user.client, &timeout_us))
            assert_true(kv_sleep_fds(&fd, 1, PATIENCE_US));
        assert_false(kv_client_arm(user.client, &timeout_us));
        assert_int_equal(timeout_us, 0);
        assert_int_equal(kv_poll(user.client), 1);
        collect(&user, 0);
        kv_client_arm(user.client, &timeout_us);
        assert_false(kv_sleep_fds(&fd, 1, 0));
    }
    close_user(&user);
}

/* ---- at random --------------------------------------------------------------------------- */

static void one_call(struct user *user, struct kv_random *random, unsigned slot)
{
    struct kv_node_info info;
    struct kv_ticket ticket;
    struct kv_op *op = user->ops[slot];
    uint64_t timeout_us;

    switch (kv_random_below(random, 12)) {
    case 0:
        kv_poll(user->client);
        break;
    case 1:
        kv_client_wait(user->client, kv_random_below(random, 2000));
        break;
    case 2:
        compute(kv_random_below(random, 3000));
        break;
    case 3:
        kv_client_node(user->client, slot % N_NODES, &info);
        assert_int_equal(info.state, KV_NODE_CONNECTED);
        assert_true(strlen(info.name) > 0);
        break;
    case 4:
        kv_session_ticket(user->session, &ticket);
        assert_true(kv_session_lease_ms(user->session) > 0);
        break;
    case 5:
        (void)kv_client_arm(user->client, &timeout_us);
        break;
    case 6:
        /* What a cancelled put has stored is not known. */
        if (op == NULL || !user->gets[slot])
            break;
        kv_cancel(op);
        assert_true(kv_op_status(op) == KV_CANCELLED || kv_op_status(op) == KV_OK);
        kv_op_free(op);
        user->ops[slot] = NULL;
        break;
    case 7:
        op = begin_vain(user, 1 + (uint32_t)kv_random_below(random, 20));
        if (kv_random_below(random, 2) == 0)
            assert_true(kv_finish(op) < KV_OK);
        else
            kv_op_free(op);
        break;
    default:
        if (op != NULL && kv_random_below(random, 2) == 0) {
            assert_int_equal(kv_wait(op), KV_OK);
            collect(user, slot);
        } else if (op != NULL) {
            if (kv_op_status(op) != KV_IN_PROGRESS)
                collect(user, slot);
        } else if (user->salts[slot] == 0 || kv_random_below(random, 4) == 0) {
            put(user, slot);
        } else {
            get(user, slot);
        }
    }
}

static void takes_any_call(void **state)
{
    struct kv_random random;
    struct user user;

    (void)state;
    kv_random_init(&random, 11);
    open_user(&user, true);
    for (unsigned round = 0; round < ROUNDS; round++)
        one_call(&user, &random, (unsigned)kv_random_below(&random, N_SLOTS));
    for (unsigned slot = 0; slot < N_SLOTS; slot++)
        if (user.ops[slot] != NULL) {
            assert_int_equal(kv_wait(user.ops[slot]), KV_OK);
            collect(&user, slot);
        }
    assert_int_equal(kv_buffer_free(user.buffer),
                     kv_buffer_busy(user.buffer) ? KV_BUSY : KV_OK);
    kv_session_free(user.session);
    close_user(&user);
}

/* A client may be closed whatever is under way, and whatever its thread does. */
static void closes(void **state)
{
    struct user user;

    (void)state;
    for (unsigned i = 0; i < CLOSES; i++) {
        open_user(&user, true);
        for (unsigned slot = 0; slot < N_SLOTS; slot++)
            put(&user, slot);
        (void)begin_vain(&user, 0);
        if (i % 3 > 0)
            compute(i * 100);
        close_user(&user);
    }
}

/* A node that is lost is told of, and found again, without a call. */
static void loses_a_node(void **state)
{
    struct user user;
    struct kv_op *op;

    (void)state;
    open_user(&user, true);
    op = begin_vain(&user, 0);
    cluster_end(&cluster, 0);
    cluster_end(&cluster, 1);
    for (const uint64_t until_us = now_us() + PATIENCE_US;
         kv_op_status(op) == KV_IN_PROGRESS;) {
        assert_true(now_us() < until_us);
        compute(1000);
    }
    assert_true(kv_op_status(op) < KV_OK);
    kv_op_free(op);
    close_user(&user);
    cluster_start(&cluster, 0);
    cluster_start(&cluster, 1);
}

/* ---- where there is none ----------------------------------------------------------------- */

/* On another clock than the real one, whoever moves that moves the client on. */
static void refuses_a_virtual_clock(void **state)
{
    const struct kvc_node_setup node = {.address = "loopback:1"};
    struct kv_transport *transport;
    struct kv_client *client;
    struct kv_clock clock;
    struct kvc_client_setup setup = {.nodes = &node, .n_nodes = 1, .clock = &clock};
    char detail[128] = "";

    (void)state;
    kv_clock_virtual_init(&clock, 0);
    assert_int_equal(kv_transport_loopback.open(&(struct kv_transport_config){0}, &transport,
                                                detail, sizeof(detail)),
                     KV_OK);
    setup.transport = transport;
    assert_int_equal(kvc_client_create(&setup, &client), KV_OK);
    assert_int_equal(kvc_client_start_thread(client, detail, sizeof(detail)), KV_UNSUPPORTED);
    assert_string_equal(detail, "progress_thread: not on the clock \"virtual\"");
    assert_null(client->progress);
    kv_client_close(client);
    transport->ops->close(transport);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moves),
        cmocka_unit_test(ends),
        cmocka_unit_test(tells_failures),
        cmocka_unit_test(loops),
        cmocka_unit_test(signals_ends),
        cmocka_unit_test(takes_any_call),
        cmocka_unit_test(closes),
        cmocka_unit_test(loses_a_node),
        cmocka_unit_test(refuses_a_virtual_clock),
    };

    return cmocka_run_group_tests(tests, open_cluster, close_cluster);
}
