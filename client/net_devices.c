#include "client/net_devices.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    HOST_BYTES = 256
};

/* Returns the first address of "HOST:PORT" (free with freeaddrinfo()); NULL if it is not an
 * address. */
static struct addrinfo *resolve(const char *address)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_DGRAM};
    const char *colon = strrchr(address, ':');
    struct addrinfo *found = NULL;
    char host[HOST_BYTES];
    size_t host_bytes;

    if (colon == NULL || colon == address || (size_t)(colon - address) >= sizeof(host))
        return NULL;
    host_bytes = (size_t)(colon - address);
    memcpy(host, address, host_bytes);
    host[host_bytes] = 0;
    if (host[0] == '[' && host[host_bytes - 1] == ']') {
        host[host_bytes - 1] = 0;
        memmove(host, host + 1, host_bytes - 1);
    }
    return getaddrinfo(host, colon + 1, &hints, &found) == 0 ? found : NULL;
}

static bool same_host(const struct sockaddr *a, const struct sockaddr *b)
{
    if (a == NULL || b == NULL || a->sa_family != b->sa_family)
        return false;
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    if (a->sa_family == AF_INET6)
        return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                      &((const struct sockaddr_in6 *)b)->sin6_addr,
                      sizeof(struct in6_addr)) == 0;
    return false;
}

/* Finds the device that has an address.  Returns false if no device of this host has it. */
static bool device_of(const struct sockaddr *address, char name[IF_NAMESIZE])
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;
    struct ifaddrs *all;
    bool is_found = false;

    if (getifaddrs(&all) != 0)
        return false;
    for (const struct ifaddrs *device = all; device != NULL && !is_found;
         device = device->ifa_next) {
        /* All of 127.0.0.0/8 is this host, although the device only has 127.0.0.1. */
        bool is_loopback = address->sa_family == AF_INET &&
                           ntohl(v4->sin_addr.s_addr) >> 24 == 127 &&
                           (device->ifa_flags & IFF_LOOPBACK) != 0;

        if (is_loopback || same_host(device->ifa_addr, address)) {
            snprintf(name, IF_NAMESIZE, "%s", device->ifa_name);
            is_found = true;
        }
    }
    freeifaddrs(all);
    return is_found;
}

bool kvc_device_is_local(const char *address)
{
    struct addrinfo *found = resolve(address);
    char name[IF_NAMESIZE];
    bool is_local = found != NULL && device_of(found->ai_addr, name);

    if (found != NULL)
        freeaddrinfo(found);
    return is_local;
}

/* Finds the device from whose address the system would send. */
static bool route(const struct addrinfo *to, char name[IF_NAMESIZE])
{
    struct sockaddr_storage from;
    socklen_t from_bytes = sizeof(from);
    int fd = socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool is_found;

    if (fd < 0)
        return false;
    is_found = connect(fd, to->ai_addr, to->ai_addrlen) == 0 &&
               getsockname(fd, (struct sockaddr *)&from, &from_bytes) == 0 &&
               device_of((const struct sockaddr *)&from, name);
    close(fd);
    return is_found;
}

static bool contains(const char *list, const char *name)
{
    size_t bytes = strlen(name);

    for (const char *at = list; (at = strstr(at, name)) != NULL; at += bytes)
        if ((at == list || at[-1] == ',') && (at[bytes] == 0 || at[bytes] == ','))
            return true;
    return false;
}

/* Finds the device that reaches one node.  On failure, `detail` says why. */
static kv_status_t
find_one(const char *address, char name[IF_NAMESIZE], char *detail, size_t detail_bytes)
{
    struct addrinfo *found = resolve(address);
    bool is_routed = found != NULL && route(found, name);

    if (found == NULL) {
        snprintf(detail, detail_bytes, "nodes: unknown host or port: %s", address);
        return KV_INVALID;
    }
    freeaddrinfo(found);
    if (is_routed)
        return KV_OK;
    snprintf(detail, detail_bytes, "nodes: no network device leads to %s", address);
    return KV_UNREACHABLE;
}

kv_status_t kvc_device_find(const char *const *addresses,
                            uint32_t n_addresses,
                            char *ret_devices,
                            size_t devices_bytes,
                            char *detail,
                            size_t detail_bytes)
{
    kv_status_t status = KV_OK;
    size_t used = 0;

    ret_devices[0] = 0;
    for (uint32_t i = 0; i < n_addresses; i++) {
        char name[IF_NAMESIZE], text[HOST_BYTES + 64];
        kv_status_t found;

        if (strrchr(addresses[i], ':') == NULL) {
            snprintf(detail, detail_bytes, "nodes: not HOST:PORT: %s", addresses[i]);
            return KV_INVALID;
        }
        found = find_one(addresses[i], name, text, sizeof(text));
        if (found != KV_OK && status == KV_OK) {
            status = found;
            snprintf(detail, detail_bytes, "%s", text);
        }
        if (found != KV_OK || contains(ret_devices, name))
            continue;
        if (used + strlen(name) + 2 > devices_bytes) {
            snprintf(detail, detail_bytes, "nodes: too many network devices");
            return KV_INVALID;
        }
        used += (size_t)snprintf(ret_devices + used, devices_bytes - used, "%s%s",
                                 used > 0 ? "," : "", name);
    }
    return used > 0 ? KV_OK : status;
}
