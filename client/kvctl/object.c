/* kvctl put, get, exists and delete. */
#include "client/kvctl/kvctl.h"
#include "kernels/checksum.h"
#include "kvserver/base/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    STREAM_BYTES = 1 << 20, /* room for the first bytes of what has no known size */
};

static const char *name_of(const struct kvctl *ctl)
{
    return ctl->operands[0];
}

/* NULL: standard input or output. */
static const char *path_of(const struct kvctl *ctl)
{
    if (ctl->n_operands < 2 || strcmp(ctl->operands[1], "-") == 0)
        return NULL;
    return ctl->operands[1];
}

static bool name_is_usable(const struct kvctl *ctl)
{
    size_t bytes = strlen(name_of(ctl));

    if (bytes >= 1 && bytes <= KV_NAME_BYTES_MAX)
        return true;
    kvctl_error(ctl, "NAME: %zu bytes: must be 1 to %d", bytes, KV_NAME_BYTES_MAX);
    return false;
}

/* One operation on one object, to its end. */
static kv_status_t
carry_out(struct kv_client *client, enum kv_object_verb verb, struct kv_object *object)
{
    struct kv_op *op;
    kv_status_t status = kv_objects_begin(client, verb, object, 1, 0, &op);

    return status == KV_OK ? kv_finish(op) : status;
}

/* The library's words, which name the node, after the object's own name. */
static void tell(const struct kvctl *ctl, struct kv_client *client, kv_status_t status)
{
    const char *detail = kv_client_detail(client);

    if (status == KV_NOT_FOUND)
        kvctl_error(ctl, "%s: no such object", name_of(ctl));
    else if (status == KV_EXISTS)
        kvctl_error(ctl, "%s: the name has different bytes: delete the object first",
                    name_of(ctl));
    else
        kvctl_error(ctl, "%s: %s%s", name_of(ctl),
                    detail[0] != '\0' ? detail : kv_status_name(status),
                    kvctl_next_step(status));
}

static void report(const struct kvctl *ctl, const void *data, size_t bytes, double seconds)
{
    uint32_t crc = kv_crc32c(0, data, bytes);
    double rate = seconds > 0 ? (double)bytes / seconds : 0;
    char hex[16];

    snprintf(hex, sizeof(hex), "%08x", crc);
    if (ctl->options.json) {
        struct kv_json json;

        kv_json_begin(&json, stdout);
        kv_json_text(&json, "name", name_of(ctl));
        kv_json_number(&json, "bytes", (double)bytes);
        kv_json_number(&json, "seconds", seconds);
        kv_json_number(&json, "bytes_per_s", rate);
        kv_json_text(&json, "crc32c", hex);
        kv_json_end(&json);
        return;
    }
    printf("%s %s: %zu bytes in %.3f ms, %.1f MB/s, crc32c %s\n", ctl->command, name_of(ctl),
           bytes, seconds * 1e3, rate / 1e6, hex);
}

/* ---- put --------------------------------------------------------------------------------- */

struct input {
    struct kv_client *client;
    const char *where; /* for messages */
    int fd;
    struct kv_buffer *buffer;
    size_t bytes;
};

static bool too_large(const struct kvctl *ctl, const struct input *input, size_t bytes)
{
    if (bytes <= KV_OBJECT_BYTES_MAX)
        return false;
    kvctl_error(ctl, "%s: too large: limit %d bytes (64M)", input->where, KV_OBJECT_BYTES_MAX);
    return true;
}

/* Makes the buffer at least so large; what was read stays. */
static bool make_room(const struct kvctl *ctl, struct input *input, size_t bytes)
{
    struct kv_buffer *larger;

    if (input->buffer != NULL && kv_buffer_bytes(input->buffer) >= bytes)
        return true;
    if (kv_buffer_alloc(input->client, bytes, &larger) != KV_OK) {
        kvctl_error(ctl, "%s: out of memory: %zu bytes", input->where, bytes);
        return false;
    }
    if (input->buffer != NULL) {
        memcpy(kv_buffer_data(larger), kv_buffer_data(input->buffer), input->bytes);
        kv_buffer_free(input->buffer);
    }
    input->buffer = larger;
    return true;
}

/* A file's size is only a first guess: a pipe has none, a growing file has another. */
static int read_input(const struct kvctl *ctl, struct input *input)
{
    struct stat facts;
    size_t room = STREAM_BYTES;

    if (fstat(input->fd, &facts) == 0 && S_ISDIR(facts.st_mode)) {
        kvctl_error(ctl, "%s: is a directory", input->where);
        return KVCTL_USAGE;
    }
    if (fstat(input->fd, &facts) == 0 && S_ISREG(facts.st_mode)) {
        if (too_large(ctl, input, (size_t)facts.st_size))
            return KVCTL_USAGE;
        room = (size_t)facts.st_size + 1;
    }
    if (!make_room(ctl, input, room))
        return KVCTL_FAILED;
    for (;;) {
        char *data = kv_buffer_data(input->buffer);
        ssize_t n;

        room = kv_buffer_bytes(input->buffer);
        if (input->bytes == room) {
            if (!make_room(ctl, input, 2 * room))
                return KVCTL_FAILED;
            continue;
        }
        n = read(input->fd, data + input->bytes, room - input->bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            kvctl_error(ctl, "%s: cannot read: %s", input->where, strerror(errno));
            return KVCTL_USAGE;
        }
        if (n == 0)
            return KVCTL_DONE;
        input->bytes += (size_t)n;
        if (too_large(ctl, input, input->bytes))
            return KVCTL_USAGE;
    }
}

int kvctl_put_run(const struct kvctl *ctl)
{
    struct input input = {.where = path_of(ctl), .fd = STDIN_FILENO};
    struct kv_object object;
    kv_status_t status;
    double start_s;
    int result = KVCTL_FAILED;

    if (!name_is_usable(ctl))
        return KVCTL_USAGE;
    if (input.where == NULL)
        input.where = "standard input";
    else
        input.fd = open(input.where, O_RDONLY | O_CLOEXEC);
    if (input.fd < 0) {
        kvctl_error(ctl, "%s: cannot open: %s", input.where, strerror(errno));
        return KVCTL_USAGE;
    }
    input.client = kvctl_open(ctl);
    if (input.client == NULL)
        goto out;
    result = read_input(ctl, &input);
    if (result != KVCTL_DONE)
        goto out;

    object = (struct kv_object){.name = name_of(ctl),
                                .buffer = input.buffer,
                                .bytes = input.bytes,
                                .ttl_ms = (uint32_t)(ctl->options.ttl * 1000),
                                .evictable = ctl->options.evictable};
    /* Connects to the data thread first, so that the time is the store's. */
    (void)carry_out(input.client, KV_OBJECT_EXISTS, &(struct kv_object){.name = name_of(ctl)});
    start_s = kvctl_now_s();
    status = carry_out(input.client, KV_OBJECT_PUT, &object);
    if (status == KV_OK)
        report(ctl, kv_buffer_data(input.buffer), input.bytes, kvctl_now_s() - start_s);
    else {
        tell(ctl, input.client, status);
        result = KVCTL_FAILED;
    }

out:
    if (input.fd != STDIN_FILENO)
        close(input.fd);
    kv_client_close(input.client);
    return result;
}

/* ---- get --------------------------------------------------------------------------------- */

/* The buffer and the object's size; asks for the size first, so that a small object needs
 * little memory. */
static kv_status_t
fetch(struct kv_client *client, const char *name, struct kv_object *object, double *ret_seconds)
{
    struct kv_buffer *buffer;
    kv_status_t status;
    double start_s;

    *object = (struct kv_object){.name = name};
    status = carry_out(client, KV_OBJECT_EXISTS, object);
    if (status != KV_OK)
        return status;
    status = kv_buffer_alloc(client, object->bytes > 0 ? object->bytes : 1, &buffer);
    if (status != KV_OK)
        return status;
    object->buffer = buffer;
    /* The pages are touched now, so that the time is the store's. */
    memset(kv_buffer_data(buffer), 0, kv_buffer_bytes(buffer));
    start_s = kvctl_now_s();
    status = carry_out(client, KV_OBJECT_GET, object);
    *ret_seconds = kvctl_now_s() - start_s;
    return status;
}

static bool write_all(int fd, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(fd, data, bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return false;
        data += n;
        bytes -= (size_t)n;
    }
    return true;
}

/* The file is opened only when the object is here: a get that fails leaves an old file alone.
 */
static bool
write_output(const struct kvctl *ctl, const char *path, const char *data, size_t bytes)
{
    int fd = path == NULL ? STDOUT_FILENO
                          : open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool is_written = fd >= 0 && write_all(fd, data, bytes);

    if (path != NULL && fd >= 0 && close(fd) != 0)
        is_written = false;
    if (!is_written)
        kvctl_error(ctl, "%s: cannot write: %s", path == NULL ? "standard output" : path,
                    strerror(errno));
    return is_written;
}

int kvctl_get_run(const struct kvctl *ctl)
{
    const char *path = path_of(ctl);
    struct kv_client *client;
    struct kv_object object;
    kv_status_t status;
    double seconds = 0;
    int result = KVCTL_FAILED;

    if (!name_is_usable(ctl))
        return KVCTL_USAGE;
    if (ctl->options.json && path == NULL) {
        kvctl_error(
            ctl,
            "option: --json: needs a FILE, because the object would go to standard output");
        return KVCTL_USAGE;
    }
    client = kvctl_open(ctl);
    if (client == NULL)
        return KVCTL_FAILED;
    status = fetch(client, name_of(ctl), &object, &seconds);
    if (status != KV_OK)
        tell(ctl, client, status);
    else if (write_output(ctl, path, kv_buffer_data(object.buffer), object.bytes)) {
        if (path != NULL)
            report(ctl, kv_buffer_data(object.buffer), object.bytes, seconds);
        result = KVCTL_DONE;
    }
    kv_client_close(client);
    return result;
}

/* ---- exists, delete ---------------------------------------------------------------------- */

/* A script must be able to tell an object that is not there from a node that is not. */
static int exit_status(enum kv_object_verb verb, kv_status_t status)
{
    if (status == KV_OK)
        return KVCTL_DONE;
    return verb == KV_OBJECT_EXISTS && status != KV_NOT_FOUND ? KVCTL_UNKNOWN : KVCTL_FAILED;
}

static int run_plain(const struct kvctl *ctl, enum kv_object_verb verb)
{
    struct kv_object object = {.name = name_of(ctl)};
    struct kv_client *client;
    struct kv_json json;
    kv_status_t status;

    if (!name_is_usable(ctl))
        return KVCTL_USAGE;
    client = kvctl_open(ctl);
    if (client == NULL)
        return exit_status(verb, KV_UNREACHABLE);
    status = carry_out(client, verb, &object);
    if (ctl->options.json && (status == KV_OK || status == KV_NOT_FOUND)) {
        kv_json_begin(&json, stdout);
        kv_json_text(&json, "name", name_of(ctl));
        kv_json_bool(&json, verb == KV_OBJECT_EXISTS ? "exists" : "deleted", status == KV_OK);
        if (verb == KV_OBJECT_EXISTS && status == KV_OK)
            kv_json_number(&json, "bytes", (double)object.bytes);
        kv_json_end(&json);
    } else if (status != KV_OK)
        tell(ctl, client, status);
    else if (verb == KV_OBJECT_EXISTS)
        printf("exists %s: %zu bytes\n", name_of(ctl), object.bytes);
    else
        printf("deleted %s\n", name_of(ctl));
    kv_client_close(client);
    return exit_status(verb, status);
}

int kvctl_exists_run(const struct kvctl *ctl)
{
    return run_plain(ctl, KV_OBJECT_EXISTS);
}

int kvctl_delete_run(const struct kvctl *ctl)
{
    if ((ctl->n_operands == 0) != (ctl->options.prefix != NULL)) {
        kvctl_error(ctl, "operands: one NAME, or --prefix TEXT");
        return KVCTL_USAGE;
    }
    if (ctl->options.prefix != NULL)
        return kvctl_delete_prefix_run(ctl);
    return run_plain(ctl, KV_OBJECT_DELETE);
}
