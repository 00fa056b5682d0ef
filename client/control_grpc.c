/* The control transport over gRPC C core.
 *
 *     client's thread                         own thread
 *     call(), attach() --- start batch --->   waits on the completion queue
 *     progress()       <--- finished -----    appends finished batches to a list
 *
 * The thread is needed because a caller may compute for seconds between two polls.  Keepalive
 * pings must be answered during that time, or the node and the client would consider each other
 * lost.  The thread runs none of the client's callbacks.
 *
 * A call is one batch with one tag.  So is the attach call: its batch ends when the call ends.
 */
#include "client/control.h"

#include "kvserver/base/thread.h"
#include "proto/kv_method.h"
#include "proto/kvstore.pb-c.h"

#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <arpa/inet.h>
#include <ctype.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HOST_BYTES = 256,
    DETAIL_BYTES = 512,
    KEEPALIVE_TIME_MS = 1000,
    KEEPALIVE_TIMEOUT_MIN_MS = 2000,
    BACKOFF_FIRST_MS = 100,
    BACKOFF_MAX_MS = 1000,
    CONNECT_MS = 2000, /* for one attempt: a node under load may be slow to accept */
    PARTING_US = 50000,
    PARTING_TURN_US = 200,
};

struct grpc_call {
    struct grpc_call *next, **link; /* in control->live */
    struct grpc_call *next_finished;
    grpc_call *call;
    kvc_control_done_fn done; /* NULL: the call is an attach */
    kvc_control_lost_fn lost;
    void *arg;

    /* Filled by gRPC before the batch's tag comes back. */
    grpc_metadata client; /* the client's index and token */
    grpc_byte_buffer *request;
    grpc_byte_buffer *reply;
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice text;
};

struct grpc_control {
    struct kvc_control base;
    grpc_channel *channel;
    grpc_completion_queue *queue;
    struct kv_thread *thread;

    /* client's thread */
    uint8_t client[KV_METHOD_CLIENT_BYTES]; /* for KV_METHOD_CLIENT */
    bool has_client;                        /* hello has succeeded */
    struct grpc_call *live;
    bool in_progress;
    bool closing;

    /* both threads */
    struct kv_signal *wake; /* the client's; NULL: none */
    struct kv_lock *lock;   /* of the list */
    struct grpc_call *finished_first, **finished_last;
    _Atomic uint32_t n_finished;
};

static const struct kvc_control_transport grpc_row;

static void serve_queue(void *arg)
{
    struct grpc_control *control = arg;

    for (;;) {
        grpc_event event = grpc_completion_queue_next(
            control->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        struct grpc_call *grpc_call = event.tag;

        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return;
        kv_lock_take(control->lock);
        grpc_call->next_finished = NULL;
        *control->finished_last = grpc_call;
        control->finished_last = &grpc_call->next_finished;
        kv_lock_release(control->lock);
        atomic_fetch_add(&control->n_finished, 1);
        if (control->wake != NULL)
            kv_signal_raise(control->wake);
    }
}

static struct grpc_call *take_finished(struct grpc_control *control)
{
    struct grpc_call *grpc_call;

    if (atomic_load(&control->n_finished) == 0)
        return NULL;
    atomic_fetch_sub(&control->n_finished, 1);
    kv_lock_take(control->lock);
    grpc_call = control->finished_first;
    control->finished_first = grpc_call->next_finished;
    if (control->finished_first == NULL)
        control->finished_last = &control->finished_first;
    kv_lock_release(control->lock);
    return grpc_call;
}

static void grpc_call_free(struct grpc_call *grpc_call)
{
    if (grpc_call->link != NULL) {
        *grpc_call->link = grpc_call->next;
        if (grpc_call->next != NULL)
            grpc_call->next->link = grpc_call->link;
    }
    if (grpc_call->request != NULL)
        grpc_byte_buffer_destroy(grpc_call->request);
    if (grpc_call->reply != NULL)
        grpc_byte_buffer_destroy(grpc_call->reply);
    grpc_metadata_array_destroy(&grpc_call->initial);
    grpc_metadata_array_destroy(&grpc_call->trailing);
    grpc_slice_unref(grpc_call->text);
    grpc_slice_unref(grpc_call->client.value);
    if (grpc_call->call != NULL)
        grpc_call_unref(grpc_call->call);
    free(grpc_call);
}

static kv_status_t status_of(grpc_status_code code)
{
    switch (code) {
    case GRPC_STATUS_OK:
        return KV_OK;
    case GRPC_STATUS_DEADLINE_EXCEEDED:
        return KV_DEADLINE;
    case GRPC_STATUS_RESOURCE_EXHAUSTED:
        return KV_TOO_LARGE;
    case GRPC_STATUS_UNIMPLEMENTED:
        return KV_VERSION;
    default:
        return KV_UNREACHABLE;
    }
}

/* gRPC describes its attempts to connect; this finds the system's error in the description. */
static const char *plain(const char *text)
{
    const char *last = strstr(text, "connect") != NULL ? strrchr(text, ':') : NULL;

    return last != NULL && last[1] == ' ' && last[2] != '\0' ? last + 2 : text;
}

/* Reports the result of a call. */
static void call_done(struct grpc_control *control, struct grpc_call *grpc_call)
{
    char detail[DETAIL_BYTES];
    kv_status_t status = status_of(grpc_call->code);
    grpc_byte_buffer_reader reader;
    grpc_slice reply;

    /* A reply that arrived first counts: when a node ends, the report of the loss may overtake
     * the last replies. */
    if (control->closing && grpc_call->code == GRPC_STATUS_CANCELLED) {
        grpc_call->done(grpc_call->arg, KV_UNREACHABLE, NULL, 0, "connection closed");
        return;
    }
    if (status != KV_OK) {
        int text_bytes = (int)GRPC_SLICE_LENGTH(grpc_call->text);

        snprintf(detail, sizeof(detail), "%.*s", text_bytes,
                 (const char *)GRPC_SLICE_START_PTR(grpc_call->text));
        grpc_call->done(grpc_call->arg, status, NULL, 0, plain(detail));
        return;
    }
    if (grpc_call->reply == NULL ||
        grpc_call->reply->data.raw.compression != GRPC_COMPRESS_NONE ||
        !grpc_byte_buffer_reader_init(&reader, grpc_call->reply)) {
        grpc_call->done(grpc_call->arg, KV_CORRUPT, NULL, 0, "reply without a message");
        return;
    }
    reply = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    grpc_call->done(grpc_call->arg, KV_OK, GRPC_SLICE_START_PTR(reply),
                    GRPC_SLICE_LENGTH(reply), "");
    grpc_slice_unref(reply);
}

/* Runs the callback of a call that has ended and frees the call.  Returns how many ran. */
static unsigned deliver(struct grpc_control *control, struct grpc_call *grpc_call)
{
    unsigned n_callbacks = 0;

    if (grpc_call->done != NULL) {
        call_done(control, grpc_call);
        n_callbacks = 1;
    } else if (!control->closing) {
        grpc_call->lost(grpc_call->arg);
        n_callbacks = 1;
    }
    grpc_call_free(grpc_call);
    return n_callbacks;
}

/* Starts a call with its request packed.  `done` NULL: an attach, which gets no message.
 */
static kv_status_t begin(struct grpc_control *control,
                         const char *method,
                         const uint8_t *packed,
                         size_t packed_bytes,
                         gpr_timespec deadline,
                         kvc_control_done_fn done,
                         kvc_control_lost_fn lost,
                         void *arg)
{
    char path[64];
    grpc_op ops[6] = {0};
    size_t n_ops = 0;
    grpc_slice slice;
    struct grpc_call *grpc_call = calloc(1, sizeof(*grpc_call));

    if (grpc_call == NULL)
        return KV_NO_MEMORY;
    grpc_metadata_array_init(&grpc_call->initial);
    grpc_metadata_array_init(&grpc_call->trailing);
    grpc_call->text = grpc_empty_slice();
    grpc_call->client.key = grpc_slice_from_static_string(KV_METHOD_CLIENT);
    grpc_call->client.value =
        grpc_slice_from_copied_buffer((const char *)control->client, sizeof(control->client));
    grpc_call->done = done;
    grpc_call->lost = lost;
    grpc_call->arg = arg;
    slice = grpc_slice_from_copied_buffer((const char *)packed, packed_bytes);
    grpc_call->request = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);

    snprintf(path, sizeof(path), "%s%s", KV_METHOD_PREFIX, method);
    slice = grpc_slice_from_copied_string(path);
    grpc_call->call = grpc_channel_create_call(control->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
                                               control->queue, slice, NULL, deadline, NULL);
    grpc_slice_unref(slice);

    ops[n_ops].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[n_ops].data.send_initial_metadata.count = control->has_client;
    ops[n_ops++].data.send_initial_metadata.metadata = &grpc_call->client;
    ops[n_ops].op = GRPC_OP_SEND_MESSAGE;
    ops[n_ops++].data.send_message.send_message = grpc_call->request;
    ops[n_ops++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[n_ops].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[n_ops++].data.recv_initial_metadata.recv_initial_metadata = &grpc_call->initial;
    if (done != NULL) {
        ops[n_ops].op = GRPC_OP_RECV_MESSAGE;
        ops[n_ops++].data.recv_message.recv_message = &grpc_call->reply;
    }
    ops[n_ops].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[n_ops].data.recv_status_on_client.trailing_metadata = &grpc_call->trailing;
    ops[n_ops].data.recv_status_on_client.status = &grpc_call->code;
    ops[n_ops++].data.recv_status_on_client.status_details = &grpc_call->text;
    if (grpc_call_start_batch(grpc_call->call, ops, n_ops, grpc_call, NULL) != GRPC_CALL_OK) {
        grpc_call_free(grpc_call);
        return KV_IO;
    }

    grpc_call->next = control->live;
    if (grpc_call->next != NULL)
        grpc_call->next->link = &grpc_call->next;
    grpc_call->link = &control->live;
    control->live = grpc_call;
    return KV_OK;
}

static kv_status_t grpc_row_call(struct kvc_control *base,
                                 enum kv_op_id op,
                                 const uint8_t *packed,
                                 size_t packed_bytes,
                                 uint64_t deadline_us,
                                 kvc_control_done_fn done,
                                 void *arg)
{
    struct grpc_control *control = (struct grpc_control *)base;
    const char *method = kv_method_name(op);
    gpr_timespec deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);

    if (method == NULL)
        return KV_UNSUPPORTED;
    if (packed_bytes > KV_WIRE_CONTROL_MAX)
        return KV_TOO_LARGE;
    if (control->closing)
        return KV_UNREACHABLE;
    if (deadline_us <= INT64_MAX)
        deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                gpr_time_from_micros((int64_t)deadline_us, GPR_TIMESPAN));
    return begin(control, method, packed, packed_bytes, deadline, done, NULL, arg);
}

static kv_status_t grpc_row_attach(struct kvc_control *base,
                                   uint32_t client_index,
                                   const struct kv_id128 *client_token,
                                   kvc_control_lost_fn lost,
                                   void *arg)
{
    struct grpc_control *control = (struct grpc_control *)base;
    struct kv_id128 token = *client_token;
    Kvpb__AttachRequest request = KVPB__ATTACH_REQUEST__INIT;
    uint8_t packed[64];

    if (control->closing)
        return KV_UNREACHABLE;
    memcpy(control->client, &client_index, sizeof(client_index));
    memcpy(control->client + sizeof(client_index), token.bytes, sizeof(token.bytes));
    control->has_client = true;
    request.client_index = client_index;
    request.client_token.data = token.bytes;
    request.client_token.len = sizeof(token.bytes);
    if (kvpb__attach_request__get_packed_size(&request) > sizeof(packed))
        return KV_TOO_LARGE;
    return begin(control, KV_METHOD_ATTACH, packed,
                 kvpb__attach_request__pack(&request, packed),
                 gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL, lost, arg);
}

static void control_free(struct grpc_control *control)
{
    if (control->channel != NULL)
        grpc_channel_destroy(control->channel);
    if (control->queue != NULL) {
        if (control->thread == NULL) {
            grpc_completion_queue_shutdown(control->queue);
            while (grpc_completion_queue_next(control->queue,
                                              gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL)
                       .type != GRPC_QUEUE_SHUTDOWN)
                continue;
        }
        grpc_completion_queue_destroy(control->queue);
    }
    kv_lock_destroy(control->lock);
    grpc_shutdown();
    free(control);
}

static unsigned grpc_row_progress(struct kvc_control *base)
{
    struct grpc_control *control = (struct grpc_control *)base;
    struct grpc_call *grpc_call;
    unsigned n_callbacks = 0;

    /* A callback may use call(), which ends later, and close(). */
    control->in_progress = true;
    while (!control->closing && (grpc_call = take_finished(control)) != NULL)
        n_callbacks += deliver(control, grpc_call);
    control->in_progress = false;
    if (control->closing)
        control_free(control);
    return n_callbacks;
}

/* Whether all calls have ended, except attach, which ends with its node. */
static bool have_ended(struct grpc_control *control)
{
    uint32_t n_calls = 0;

    for (struct grpc_call *grpc_call = control->live; grpc_call != NULL;
         grpc_call = grpc_call->next)
        n_calls += grpc_call->done != NULL;
    kv_lock_take(control->lock);
    for (struct grpc_call *grpc_call = control->finished_first; grpc_call != NULL;
         grpc_call = grpc_call->next_finished)
        n_calls -= grpc_call->done != NULL;
    kv_lock_release(control->lock);
    return n_calls == 0;
}

/* Waits until calls that were just begun, goodbye above all, have been sent: gRPC drops a call
 * that is cancelled before that.  Also receives replies that are arriving. */
static void drain_calls(struct grpc_control *control)
{
    for (unsigned i = 0; i < PARTING_US / PARTING_TURN_US && !have_ended(control); i++)
        kv_sleep_fds(NULL, 0, PARTING_TURN_US);
}

static void grpc_row_close(struct kvc_control *base)
{
    struct grpc_control *control = (struct grpc_control *)base;
    struct grpc_call *grpc_call;

    control->closing = true;
    drain_calls(control);
    for (grpc_call = control->live; grpc_call != NULL; grpc_call = grpc_call->next)
        grpc_call_cancel(grpc_call->call, NULL);
    /* First, every tag must return; that is soon, since the calls are cancelled. */
    grpc_completion_queue_shutdown(control->queue);
    kv_thread_join(control->thread);
    while ((grpc_call = take_finished(control)) != NULL)
        deliver(control, grpc_call);
    if (!control->in_progress)
        control_free(control);
}

static const struct kvc_control_transport grpc_row = {
    .name = "grpc",
    .call = grpc_row_call,
    .attach = grpc_row_attach,
    .progress = grpc_row_progress,
    .close = grpc_row_close,
};

/* Converts "HOST:PORT" to the name that gRPC resolves.  Numeric addresses bypass its resolver,
 * which waits between two lookups. */
static bool target_of(const char *address, char *target, size_t target_bytes)
{
    char host[HOST_BYTES];
    struct in6_addr number;
    const char *colon = strrchr(address, ':');
    const char *scheme = "dns:///";
    size_t host_bytes;
    unsigned long port;

    if (colon == NULL || colon == address || (size_t)(colon - address) >= sizeof(host))
        return false;
    if (!isdigit((unsigned char)colon[1]) || strlen(colon + 1) > 5 ||
        strspn(colon + 1, "0123456789") != strlen(colon + 1))
        return false;
    port = strtoul(colon + 1, NULL, 10);
    if (port == 0 || port > 65535)
        return false;

    host_bytes = (size_t)(colon - address);
    memcpy(host, address, host_bytes);
    host[host_bytes] = 0;
    if (host[0] == '[' && host[host_bytes - 1] == ']') {
        host[host_bytes - 1] = 0;
        if (inet_pton(AF_INET6, host + 1, &number) != 1)
            return false;
        scheme = "ipv6:";
    } else if (inet_pton(AF_INET, host, &number) == 1) {
        scheme = "ipv4:";
    } else {
        for (const char *c = host; *c != 0; c++) {
            if (!isalnum((unsigned char)*c) && strchr("-._", *c) == NULL)
                return false;
        }
    }
    return (size_t)snprintf(target, target_bytes, "%s%s", scheme, address) < target_bytes;
}

static grpc_channel *channel_open(const char *target, uint64_t silence_ms)
{
    const int keepalive_timeout_ms = silence_ms < KEEPALIVE_TIMEOUT_MIN_MS
                                         ? KEEPALIVE_TIMEOUT_MIN_MS
                                         : (int)(silence_ms < INT_MAX ? silence_ms : INT_MAX);
    struct {
        const char *name;
        int value;
    } numbers[] = {
        {GRPC_ARG_ENABLE_HTTP_PROXY, 0},
        {GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1},
        {GRPC_ARG_ENABLE_RETRIES, 0},
        {GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, KV_WIRE_CONTROL_MAX},
        {GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, KV_WIRE_CONTROL_MAX},
        /* Rejects compressed messages: a small one may expand to gigabytes. */
        {GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0},
        {GRPC_ARG_HTTP2_BDP_PROBE, 0},
        {GRPC_ARG_KEEPALIVE_TIME_MS, KEEPALIVE_TIME_MS},
        {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_timeout_ms},
        {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
        {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
        {GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_FIRST_MS},
        {GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_MS},
        {GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MAX_MS},
        {GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, BACKOFF_MAX_MS},
        /* A pool shared with other channels could return a connection that has already failed
         * for another client of this process. */
        {GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1},
    };
    enum {
        N_NUMBERS = sizeof(numbers) / sizeof(numbers[0])
    };
    grpc_arg arg[N_NUMBERS];
    grpc_channel_args args = {.num_args = N_NUMBERS, .args = arg};
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    grpc_channel *channel;

    for (unsigned i = 0; i < N_NUMBERS; i++) {
        arg[i].type = GRPC_ARG_INTEGER;
        arg[i].key = (char *)numbers[i].name;
        arg[i].value.integer = numbers[i].value;
    }
    channel = grpc_channel_create(target, credentials, &args);
    grpc_channel_credentials_release(credentials);
    return channel;
}

kv_status_t kvc_control_grpc_open(const char *address,
                                  uint64_t silence_ms,
                                  struct kv_signal *wake,
                                  struct kvc_control **ret_control)
{
    char target[HOST_BYTES + 32];
    kv_status_t status = KV_NO_MEMORY;
    struct grpc_control *control;

    if (!target_of(address, target, sizeof(target)))
        return KV_INVALID;
    control = calloc(1, sizeof(*control));
    if (control == NULL)
        return KV_NO_MEMORY;
    grpc_init();
    control->base.transport = &grpc_row;
    control->wake = wake;
    control->finished_last = &control->finished_first;
    control->lock = kv_lock_create();
    control->queue = grpc_completion_queue_create_for_next(NULL);
    control->channel = channel_open(target, silence_ms);
    if (control->lock == NULL || control->queue == NULL || control->channel == NULL)
        goto err;
    status = kv_thread_start("kv-control", serve_queue, control, &control->thread);
    if (status != KV_OK)
        goto err;
    *ret_control = &control->base;
    return KV_OK;

err:
    control_free(control);
    return status;
}
