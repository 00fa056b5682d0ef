#include "kvserver/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BACKLOG = 1024, /* all clients reconnect at once when a node restarts */
};

/* Splits and resolves an address.  The caller frees the list with freeaddrinfo(). */
static kv_status_t resolve(const char *what,
                           const char *address,
                           struct addrinfo **ret_list,
                           char *detail,
                           size_t detail_bytes)
{
    struct addrinfo hints = {
        .ai_flags = AI_PASSIVE | AI_NUMERICSERV,
        .ai_family = AF_UNSPEC,
        .ai_socktype = SOCK_STREAM,
    };
    char host[KVS_ADDRESS_HOST_BYTES];
    kv_status_t status = kvs_address_host(what, address, host, detail, detail_bytes);
    int error;

    if (status != KV_OK)
        return status;
    error = getaddrinfo(host, strrchr(address, ':') + 1, &hints, ret_list);
    if (error != 0) {
        snprintf(detail, detail_bytes, "%s: %s: %s", what, address, gai_strerror(error));
        return KV_INVALID;
    }
    return KV_OK;
}

/* Returns a socket bound to the address, or -1 with errno set. */
static int bind_socket(const struct addrinfo *info)
{
    int one = 1;
    int saved;
    int fd = socket(info->ai_family, info->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                    info->ai_protocol);

    if (fd < 0)
        return -1;
    /* Allows a restart while old connections linger, but not two listeners. */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    /* [::] leaves the port free for an IPv4 listener. */
    if (info->ai_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
    if (bind(fd, info->ai_addr, info->ai_addrlen) == 0)
        return fd;
    saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

static kv_status_t
listen_failed(const char *what, const char *address, char *detail, size_t detail_bytes)
{
    int error = errno;

    snprintf(detail, detail_bytes, "%s: %s: %s", what, address, strerror(error));
    return error == EADDRNOTAVAIL || error == EAFNOSUPPORT ? KV_INVALID : KV_IO;
}

kv_status_t kvs_address_host(const char *what,
                             const char *address,
                             char host[KVS_ADDRESS_HOST_BYTES],
                             char *detail,
                             size_t detail_bytes)
{
    const char *colon = strrchr(address, ':');
    const char *begin = address;
    size_t port_bytes = colon == NULL ? 0 : strlen(colon + 1);
    size_t host_bytes;

    if (port_bytes == 0 || port_bytes > 5 || strspn(colon + 1, "0123456789") != port_bytes ||
        strtoul(colon + 1, NULL, 10) > 65535)
        goto err;
    host_bytes = (size_t)(colon - address);
    /* An IPv6 address is in brackets: otherwise its last colon would be taken for the
     * port's. */
    if (host_bytes > 2 && begin[0] == '[' && begin[host_bytes - 1] == ']') {
        begin++;
        host_bytes -= 2;
    } else if (memchr(begin, ':', host_bytes) != NULL) {
        goto err;
    }
    if (host_bytes == 0 || host_bytes >= KVS_ADDRESS_HOST_BYTES)
        goto err;
    memcpy(host, begin, host_bytes);
    host[host_bytes] = 0;
    return KV_OK;

err:
    snprintf(detail, detail_bytes, "%s: not HOST:PORT: %s", what, address);
    return KV_INVALID;
}

kv_status_t kvs_address_listen(const char *what,
                               const char *address,
                               int *ret_fd,
                               uint16_t *ret_port,
                               char *detail,
                               size_t detail_bytes)
{
    struct addrinfo *list;
    struct sockaddr_storage bound;
    socklen_t bound_bytes = sizeof(bound);
    kv_status_t status = resolve(what, address, &list, detail, detail_bytes);
    int fd;

    if (status != KV_OK)
        return status;
    /* getsockname() tells which port the system chose for port 0. */
    fd = bind_socket(list);
    if (fd < 0 || listen(fd, BACKLOG) != 0 ||
        getsockname(fd, (struct sockaddr *)&bound, &bound_bytes) != 0) {
        status = listen_failed(what, address, detail, detail_bytes);
        if (fd >= 0)
            close(fd);
    } else {
        *ret_fd = fd;
        *ret_port =
            ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                              : ((struct sockaddr_in *)&bound)->sin_port);
    }
    freeaddrinfo(list);
    return status;
}

/* Returns the raw address bytes, or NULL if the family is neither IPv4 nor IPv6. */
static const void *
address_bytes(const struct sockaddr *address, size_t *ret_bytes, bool *ret_any, bool *ret_loop)
{
    if (address != NULL && address->sa_family == AF_INET) {
        const struct in_addr *v4 = &((const struct sockaddr_in *)address)->sin_addr;

        *ret_bytes = sizeof(*v4);
        *ret_any = v4->s_addr == htonl(INADDR_ANY);
        *ret_loop = ntohl(v4->s_addr) >> 24 == IN_LOOPBACKNET;
        return v4;
    }
    if (address != NULL && address->sa_family == AF_INET6) {
        const struct in6_addr *v6 = &((const struct sockaddr_in6 *)address)->sin6_addr;

        *ret_bytes = sizeof(*v6);
        *ret_any = IN6_IS_ADDR_UNSPECIFIED(v6);
        *ret_loop = IN6_IS_ADDR_LOOPBACK(v6);
        return v6;
    }
    return NULL;
}

bool kvs_address_is_loopback(const char *address)
{
    char detail[KVS_ADDRESS_HOST_BYTES + 64];
    bool loopback = true;
    struct addrinfo *list;

    if (resolve("", address, &list, detail, sizeof(detail)) != KV_OK)
        return false;
    for (struct addrinfo *info = list; info != NULL; info = info->ai_next) {
        bool any, loop = false;
        size_t bytes;

        address_bytes(info->ai_addr, &bytes, &any, &loop);
        loopback = loopback && loop;
    }
    freeaddrinfo(list);
    return loopback;
}

/* Returns whether the interface's address is in the list, or the list contains "any". */
static bool wanted(const struct ifaddrs *interface, const struct addrinfo *list)
{
    size_t have_bytes, want_bytes;
    bool any, loop;
    const void *have, *want;

    if ((interface->ifa_flags & IFF_UP) == 0)
        return false;
    have = address_bytes(interface->ifa_addr, &have_bytes, &any, &loop);
    if (have == NULL)
        return false;
    for (; list != NULL; list = list->ai_next) {
        want = address_bytes(list->ai_addr, &want_bytes, &any, &loop);
        if (want == NULL)
            continue;
        if (any)
            return true;
        /* 127.0.0.0/8 belongs to the loopback device, although the device lists one address. */
        if (loop && (interface->ifa_flags & IFF_LOOPBACK) != 0)
            return true;
        if (have_bytes == want_bytes && memcmp(have, want, have_bytes) == 0)
            return true;
    }
    return false;
}

/* Returns whether a comma-separated list contains the name. */
static bool listed(const char *names, const char *name, size_t name_bytes)
{
    while (*names != 0) {
        size_t bytes = strcspn(names, ",");

        if (bytes == name_bytes && memcmp(names, name, bytes) == 0)
            return true;
        names += bytes + (names[bytes] == ',');
    }
    return false;
}

kv_status_t kvs_address_devices(const char *what,
                                const char *address,
                                char *devices,
                                size_t devices_bytes,
                                char *detail,
                                size_t detail_bytes)
{
    struct addrinfo *list;
    struct ifaddrs *interfaces = NULL;
    size_t used = 0;
    kv_status_t status = resolve(what, address, &list, detail, detail_bytes);

    if (status != KV_OK)
        return status;
    devices[0] = 0;
    if (getifaddrs(&interfaces) != 0) {
        snprintf(detail, detail_bytes, "%s: %s: %s", what, address, strerror(errno));
        status = KV_IO;
        goto out;
    }
    for (struct ifaddrs *i = interfaces; i != NULL; i = i->ifa_next) {
        size_t bytes = strcspn(i->ifa_name, ":"); /* "eth0:1" is an address of eth0 */

        if (!wanted(i, list) || listed(devices, i->ifa_name, bytes))
            continue;
        if (used + bytes + 2 > devices_bytes)
            break;
        if (used > 0)
            devices[used++] = ',';
        memcpy(devices + used, i->ifa_name, bytes);
        used += bytes;
        devices[used] = 0;
    }
    if (used == 0) {
        snprintf(detail, detail_bytes, "listen: no network device has this address: %s",
                 address);
        status = KV_INVALID;
    }

out:
    freeifaddrs(interfaces);
    freeaddrinfo(list);
    return status;
}
