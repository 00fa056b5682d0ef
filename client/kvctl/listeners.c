/* /proc/net/tcp and tcp6 list the listening sockets with their inodes; the links in
 * /proc/PID/fd show which process has an inode.  Those of other users cannot be read. */
#include "client/kvctl/listeners.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LINE_BYTES = 512,
    PATH_BYTES = 320,
    STATE_LISTEN = 0x0a, /* as the kernel writes it */
};

/* The kernel writes an address as words of 32 bits in its own byte order. */
static bool read_address(const char *hex, bool is_v6, void *ret_address)
{
    unsigned n_words = is_v6 ? 4 : 1;
    uint32_t words[4];

    if (strlen(hex) != 8 * n_words)
        return false;
    for (unsigned i = 0; i < n_words; i++)
        if (sscanf(hex + (size_t)8 * i, "%8" SCNx32, &words[i]) != 1)
            return false;
    memcpy(ret_address, words, 4 * n_words);
    return true;
}

static void describe(struct kvctl_listener *listener, const void *address, bool is_v6)
{
    char text[INET6_ADDRSTRLEN] = "?";

    inet_ntop(is_v6 ? AF_INET6 : AF_INET, address, text, sizeof(text));
    if (is_v6) {
        const struct in6_addr *v6 = address;

        listener->is_loopback =
            IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
        snprintf(listener->address, sizeof(listener->address), "[%s]:%u", text, listener->port);
    } else {
        listener->is_loopback = *(const uint8_t *)address == 127;
        snprintf(listener->address, sizeof(listener->address), "%s:%u", text, listener->port);
    }
}

static void read_listeners(const char *path, bool is_v6, struct kvctl_listeners *into)
{
    char line[LINE_BYTES];
    FILE *file = fopen(path, "re");

    if (file == NULL)
        return;
    while (into->n < KVCTL_LISTENERS_MAX && fgets(line, sizeof(line), file) != NULL) {
        struct kvctl_listener *listener = &into->list[into->n];
        unsigned port, state;
        char hex[33];
        struct in6_addr address;

        if (sscanf(line, " %*u: %32[0-9A-Fa-f]:%x %*s %x %*s %*s %*s %*s %*s %" SCNu64, hex,
                   &port, &state, &listener->inode) != 4 ||
            state != STATE_LISTEN || port > UINT16_MAX || !read_address(hex, is_v6, &address))
            continue;
        listener->port = (uint16_t)port;
        describe(listener, &address, is_v6);
        into->n++;
    }
    fclose(file);
}

/* Returns the inode of a socket's descriptor; 0 if it is not a socket or cannot be read. */
static uint64_t socket_of(const char *folder, const char *fd)
{
    char path[PATH_BYTES], link[64];
    uint64_t inode;
    ssize_t bytes;

    snprintf(path, sizeof(path), "%s/%s", folder, fd);
    bytes = readlink(path, link, sizeof(link) - 1);
    if (bytes < 0)
        return 0;
    link[bytes] = '\0';
    return sscanf(link, "socket:[%" SCNu64 "]", &inode) == 1 ? inode : 0;
}

/* Marks the listeners that belong to the process. */
static void find_owned(const char *pid, const struct kvctl_listeners *all, bool *ret_owned)
{
    char folder[64];
    struct dirent *entry;
    DIR *fds;

    memset(ret_owned, 0, all->n * sizeof(*ret_owned));
    snprintf(folder, sizeof(folder), "/proc/%.20s/fd", pid);
    fds = opendir(folder);
    if (fds == NULL)
        return;
    while ((entry = readdir(fds)) != NULL) {
        uint64_t inode = socket_of(folder, entry->d_name);

        for (unsigned i = 0; inode != 0 && i < all->n; i++)
            if (all->list[i].inode == inode)
                ret_owned[i] = true;
    }
    closedir(fds);
}

static void keep(struct kvctl_listeners *listeners, const bool *are_kept)
{
    unsigned n = 0;

    for (unsigned i = 0; i < listeners->n; i++)
        if (are_kept[i])
            listeners->list[n++] = listeners->list[i];
    listeners->n = n;
}

bool kvctl_listeners_of_port(uint16_t port, struct kvctl_listeners *ret_listeners)
{
    bool on_port[KVCTL_LISTENERS_MAX], owned[KVCTL_LISTENERS_MAX];
    bool is_any = false;
    struct dirent *entry;
    DIR *processes;

    memset(ret_listeners, 0, sizeof(*ret_listeners));
    read_listeners("/proc/net/tcp", false, ret_listeners);
    read_listeners("/proc/net/tcp6", true, ret_listeners);
    for (unsigned i = 0; i < ret_listeners->n; i++) {
        on_port[i] = ret_listeners->list[i].port == port;
        is_any = is_any || on_port[i];
    }
    if (!is_any)
        return false;
    processes = opendir("/proc");
    while (processes != NULL && ret_listeners->pid == 0 &&
           (entry = readdir(processes)) != NULL) {
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        find_owned(entry->d_name, ret_listeners, owned);
        for (unsigned i = 0; i < ret_listeners->n; i++)
            if (on_port[i] && owned[i])
                ret_listeners->pid = atoi(entry->d_name);
    }
    if (processes != NULL)
        closedir(processes);
    keep(ret_listeners, ret_listeners->pid != 0 ? owned : on_port);
    return true;
}
