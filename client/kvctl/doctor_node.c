#include "client/kvctl/doctor_node.h"

#include "client/kvctl/listeners.h"
#include "proto/kv_wire.h"

#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    CONNECT_MS = 2000
};

/* Splits "HOST:PORT"; brackets around the host are removed. */
static bool
split_address(const char *address, char *host, size_t host_bytes, const char **ret_port)
{
    const char *colon = strrchr(address, ':');
    size_t bytes = colon == NULL ? 0 : (size_t)(colon - address);

    if (bytes > 2 && address[0] == '[' && address[bytes - 1] == ']') {
        address++;
        bytes -= 2;
    }
    if (bytes == 0 || bytes >= host_bytes)
        return false;
    memcpy(host, address, bytes);
    host[bytes] = '\0';
    *ret_port = colon + 1;
    return true;
}

static int connect_one(const struct addrinfo *info)
{
    struct pollfd wait = {.events = POLLOUT};
    socklen_t bytes = sizeof(int);
    int error = 0;

    wait.fd = socket(info->ai_family, info->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (wait.fd < 0)
        return errno;
    if (connect(wait.fd, info->ai_addr, info->ai_addrlen) != 0) {
        error = errno;
        if (error == EINPROGRESS) {
            error = ETIMEDOUT;
            if (poll(&wait, 1, CONNECT_MS) == 1 &&
                getsockopt(wait.fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0)
                error = errno;
        }
    }
    close(wait.fd);
    return error;
}

/* Whether the address is this machine's: only then can a socket be bound to it. */
static bool is_ours(const struct addrinfo *info)
{
    struct sockaddr_storage address;
    bool is_bound = false;
    int fd;

    memcpy(&address, info->ai_addr, info->ai_addrlen);
    if (address.ss_family == AF_INET)
        ((struct sockaddr_in *)&address)->sin_port = 0;
    else if (address.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)&address)->sin6_port = 0;
    fd = socket(info->ai_family, info->ai_socktype | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        is_bound = bind(fd, (struct sockaddr *)&address, info->ai_addrlen) == 0;
        close(fd);
    }
    return is_bound;
}

/* Whether anything accepts connections there; and whether it is on this machine. */
static bool check_port(struct kvctl_doctor *doctor, bool *ret_is_local)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list;
    char host[256], advice[KVCTL_DETAIL_BYTES];
    const char *port;
    int error;

    if (!split_address(doctor->node, host, sizeof(host), &port)) {
        kvctl_doctor_tell(doctor, KVCTL_FAIL, "control port", "use HOST:PORT",
                          "not an address");
        return false;
    }
    error = getaddrinfo(host, port, &hints, &list);
    if (error != 0) {
        kvctl_doctor_tell(doctor, KVCTL_FAIL, "control port", "check the name", "%s",
                          gai_strerror(error));
        return false;
    }
    error = ECONNREFUSED;
    for (const struct addrinfo *info = list; info != NULL && error != 0; info = info->ai_next)
        error = connect_one(info);
    *ret_is_local = is_ours(list);
    freeaddrinfo(list);
    if (error == 0) {
        kvctl_doctor_tell(doctor, KVCTL_OK, "control port", NULL, "accepts connections");
        return true;
    }
    if (error == ECONNREFUSED)
        snprintf(advice, sizeof(advice), "no node runs there: kvserver --listen %s",
                 doctor->node);
    else
        snprintf(advice, sizeof(advice), "check the network and its filters");
    kvctl_doctor_tell(doctor, KVCTL_FAIL, "control port", advice, "%s", strerror(error));
    return false;
}

/* Returns a number from a table of names and values; `fallback` if it has none. */
static double value_of(const struct kv_table *table, const char *name, double fallback)
{
    for (uint32_t r = 0; r < table->n_rows && table->n_columns >= 2; r++) {
        const struct kv_cell *cells = &table->cells[(size_t)r * table->n_columns];

        if (cells[0].text != NULL && strcmp(cells[0].text, name) == 0 && cells[1].text == NULL)
            return cells[1].number;
    }
    return fallback;
}

static const char *text_of(const struct kv_table *table, const char *name)
{
    for (uint32_t r = 0; r < table->n_rows && table->n_columns >= 2; r++) {
        const struct kv_cell *cells = &table->cells[(size_t)r * table->n_columns];

        if (cells[0].text != NULL && strcmp(cells[0].text, name) == 0)
            return cells[1].text;
    }
    return NULL;
}

/* Returns a number of bytes from the table; 0 if it is out of range. */
static uint64_t bytes_of(const struct kv_table *status, const char *column)
{
    double value = value_of(status, column, 0);

    return value >= 0 && value < 0x1p63 ? (uint64_t)value : 0;
}

static void check_version(struct kvctl_doctor *doctor, const struct kv_table *status)
{
    double wire = value_of(status, "wire_version", 0);
    const char *version = text_of(status, "version");

    /* Nodes refuse clients with which they have no version in common, so this one is ours, an
     * earlier or a later one, or missing. */
    kvctl_doctor_tell(doctor, wire == KV_WIRE_VERSION ? KVCTL_OK : KVCTL_WARN, "server",
                      wire == KV_WIRE_VERSION ? NULL : "update the older side",
                      "version %s, protocol %.0f", version != NULL ? version : "unknown", wire);
}

static void check_fill(struct kvctl_doctor *doctor, const struct kv_table *status)
{
    uint64_t total = bytes_of(status, "memory_bytes");
    uint64_t used = bytes_of(status, "memory_used_bytes");
    bool is_full = used > total - total / 10;
    const char *state = text_of(status, "state");
    char total_text[16], used_text[16];

    kv_config_format_size(total, total_text, sizeof(total_text));
    kv_config_format_size(used, used_text, sizeof(used_text));
    kvctl_doctor_tell(doctor, is_full ? KVCTL_WARN : KVCTL_OK, "store",
                      is_full ? "puts may soon fail: close sessions, delete objects, or "
                                "increase --memory"
                              : NULL,
                      "%s of %s in use", used_text, total_text);
    if (state != NULL && strcmp(state, "draining") == 0)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "state", "the node is about to stop", "draining");
}

/* Returns a number of the line that begins so. */
static double number_of(const struct kv_table *table, const char *line, const char *column)
{
    for (uint32_t r = 0; r < table->n_rows; r++) {
        const struct kv_cell *cells = &table->cells[(size_t)r * table->n_columns];

        for (uint32_t c = 1; c < table->n_columns; c++)
            if (cells[0].text != NULL && strcmp(cells[0].text, line) == 0 &&
                strcmp(table->columns[c], column) == 0)
                return cells[c].number;
    }
    return 0;
}

static void check_disk(struct kvctl_doctor *doctor, const struct kv_table *tiers)
{
    const double room = number_of(tiers, "disk", "room_bytes");
    const double n_errors = number_of(tiers, "disk", "errors");
    const double n_bad = number_of(tiers, "disk", "bad");
    char room_text[16], used_text[16];

    if (room <= 0) {
        kvctl_doctor_tell(doctor, KVCTL_OK, "disk", NULL,
                          "nothing is saved: all is lost with the node");
        return;
    }
    kv_config_format_size((uint64_t)room, room_text, sizeof(room_text));
    kv_config_format_size((uint64_t)number_of(tiers, "disk", "bytes"), used_text,
                          sizeof(used_text));
    kvctl_doctor_tell(
        doctor, n_errors > 0 || n_bad > 0 ? KVCTL_WARN : KVCTL_OK, "disk",
        n_errors > 0 ? "see the node's log: its file system may be full, or its drive fails"
        : n_bad > 0  ? "look at the drive; kvctl verify checks all that is saved"
                     : NULL,
        "%s of %s in use; %.0f wait to be saved; %.0f errors and %.0f damaged since the start",
        used_text, room_text, number_of(tiers, "disk", "waiting"), n_errors, n_bad);
}

static void check_threads(struct kvctl_doctor *doctor, struct kv_client *client)
{
    struct kv_node_info info;
    uint32_t n_threads;

    kv_client_node(client, 0, &info);
    n_threads = info.n_threads;
    for (uint32_t i = 0; i < n_threads; i++) {
        struct kv_op *op;
        kv_status_t status = kv_ping_begin(client, 0, i, 64, 64, 0, &op);

        if (status == KV_OK)
            status = kv_finish(op);
        if (status != KV_OK) {
            kvctl_doctor_tell(doctor, KVCTL_FAIL, "data threads",
                              "a firewall blocks the data ports, or the node is stuck", "%s",
                              kvctl_without_node(doctor->node, kv_client_detail(client)));
            return;
        }
    }
    kvctl_doctor_tell(doctor, KVCTL_OK, "data threads", NULL, "all %" PRIu32 " respond",
                      n_threads);
}

static void
check_transport(struct kvctl_doctor *doctor, struct kv_client *client, bool is_local)
{
    const char *wanted = doctor->ctl->options.transport;
    struct kv_node_info info;

    kv_client_node(client, 0, &info);
    if (is_local && strcmp(wanted, "tcp") != 0 && strncmp(info.transport, "tcp", 3) == 0)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "transport",
                          "the node is on this machine, but does not use shared memory: see "
                          "shared memory above, and its --transport",
                          "%s, the node has %s", info.transport, info.transports);
    else
        kvctl_doctor_tell(doctor, KVCTL_OK, "transport", NULL, "%s, the node has %s",
                          info.transport, info.transports);
}

static void check_listeners(struct kvctl_doctor *doctor,
                            const struct kvctl_listeners *listeners)
{
    char open[KVCTL_DETAIL_BYTES] = "";
    size_t used = 0;

    for (unsigned i = 0; i < listeners->n; i++)
        if (!listeners->list[i].is_loopback && used + 80 < sizeof(open))
            used += (size_t)snprintf(open + used, sizeof(open) - used, "%s%s",
                                     used > 0 ? ", " : "", listeners->list[i].address);
    if (used > 0)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "ports",
                          "no TLS, and data ports trust every peer: use trusted networks only",
                          "beyond loopback: %s", open);
    else if (listeners->pid == 0)
        kvctl_doctor_tell(doctor, KVCTL_WARN, "ports",
                          "run kvctl as the node's user or as root to check all ports",
                          "the control port is on loopback, the data ports are not visible");
    else
        kvctl_doctor_tell(doctor, KVCTL_OK, "ports", NULL,
                          "all %u of process %d are on loopback", listeners->n, listeners->pid);
}

/* The node's limit of open files, if /proc shows it. */
static void check_files(struct kvctl_doctor *doctor, int pid)
{
    char path[64], line[256];
    unsigned long long limit = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/limits", pid);
    file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "Max open files %llu", &limit) == 1)
            break;
    if (file != NULL)
        fclose(file);
    if (limit == 0)
        return;
    kvctl_doctor_tell(doctor, limit < 1024 ? KVCTL_WARN : KVCTL_OK, "open files",
                      limit < 1024 ? "start kvserver after ulimit -n 65536" : NULL,
                      "at most %llu in process %d", limit, pid);
}

/* Connects, including the data ports.  If that fails, tries tcp to find the cause. */
static struct kv_client *open_node(struct kvctl_doctor *doctor)
{
    char detail[KVCTL_DETAIL_BYTES], ignored[KVCTL_DETAIL_BYTES];
    struct kvctl over_tcp = *doctor->ctl;
    struct kv_client *client;

    if (kvctl_open_quietly(doctor->ctl, doctor->node, &client, detail, sizeof(detail)) == KV_OK)
        return client;
    strcpy(over_tcp.options.transport, "tcp");
    if (strcmp(doctor->ctl->options.transport, "tcp") != 0 &&
        kvctl_open_quietly(&over_tcp, doctor->node, &client, ignored, sizeof(ignored)) ==
            KV_OK) {
        kv_client_close(client);
        kvctl_doctor_tell(
            doctor, KVCTL_FAIL, "connection",
            "tcp works, shared memory does not: use the node's user and container, "
            "or --transport tcp",
            "%s", kvctl_without_node(doctor->node, detail));
        return NULL;
    }
    kvctl_doctor_tell(doctor, KVCTL_FAIL, "connection",
                      "the port is open, but does not respond as a TopKV node", "%s",
                      kvctl_without_node(doctor->node, detail));
    return NULL;
}

void kvctl_doctor_node(struct kvctl_doctor *doctor)
{
    static struct kvctl_listeners listeners;
    struct kv_client *client;
    const struct kv_table *status_table, *tiers;
    struct kv_op *op;
    const char *port = strrchr(doctor->node, ':');
    bool is_local = false;

    if (!check_port(doctor, &is_local))
        return;
    client = open_node(doctor);
    if (client == NULL)
        return;
    if (kvctl_table(client, "status", &op, &status_table) == KV_OK) {
        check_version(doctor, status_table);
        check_fill(doctor, status_table);
        kv_op_free(op);
    } else
        kvctl_doctor_tell(doctor, KVCTL_FAIL, "status", NULL, "%s",
                          kvctl_without_node(doctor->node, kv_client_detail(client)));

    if (kvctl_table(client, "tiers", &op, &tiers) == KV_OK) {
        check_disk(doctor, tiers);
        kv_op_free(op);
    }
    check_transport(doctor, client, is_local);
    check_threads(doctor, client);
    if (is_local && kvctl_listeners_of_port((uint16_t)atoi(port + 1), &listeners)) {
        check_listeners(doctor, &listeners);
        if (listeners.pid != 0)
            check_files(doctor, listeners.pid);
    }
    kv_client_close(client);
}
