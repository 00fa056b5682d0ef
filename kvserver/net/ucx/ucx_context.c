/* ucx_context.c - opens the transport: one UCX context for each kind of link.
 *
 * Here are the options that UCX is given, the memory that is registered with it, and the text
 * that names the devices of a context or an endpoint.
 */
#include "kvserver/net/ucx/ucx_private.h"

#include "kvserver/base/memory.h"

#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* A UCX option that is set regardless of UCX's own configuration, unless the user has set its
 * environment variable. */
struct option {
    const char *name;
    const char *variable; /* NULL: not the user's to set */
    const char *value;
};

/* Each list ends with an entry of zeros. */
static const struct option common_options[] = {
    /* A peer's death is reported by status; UCX would write to stdout. */
    {"LOG_LEVEL", "UCX_LOG_LEVEL", "fatal"},
    {"WARN_UNUSED_ENV_VARS", "UCX_WARN_UNUSED_ENV_VARS", "n"},
    /* Off: it follows a null pointer where a peer dies before it is fully connected, and needs
     * three seconds to see a death.  The kernel's sockets and begin_watch() do its work. */
    {"KEEPALIVE_INTERVAL", NULL, "inf"},
    {NULL, NULL, NULL},
};

static const struct option link_options[KV_UCX_N_LINKS][10] = {
    [KV_UCX_LINK_NETWORK] =
        {{"TLS", "UCX_TLS", "tcp"},
         /* Without a copy, a send that a dead peer cuts short is completed twice
                       * and aborts the process (UCX 1.13).  Large segments, the same on both
                       * sides, make the copy cost what the round trips of a rendezvous with
                       * PUT did. */
         {"ZCOPY_THRESH", NULL, "inf"},
         {"RNDV_SCHEME", NULL, "am"},
         {"TX_SEG_SIZE", NULL, "256k"},
         {"RX_SEG_SIZE", NULL, "256k"},
         {"MAX_NUM_EPS", "UCX_TCP_MAX_NUM_EPS", "8192"},
         {"KEEPIDLE", "UCX_TCP_KEEPIDLE", "1s"},
         {"KEEPINTVL", "UCX_TCP_KEEPINTVL", "1s"},
         {"KEEPCNT", "UCX_TCP_KEEPCNT", "3"}},
    /* Without cma, by which UCX would read a peer's memory and wait for it. */
    [KV_UCX_LINK_SHARED] = {{"TLS", "UCX_TLS", "posix"},
                            {"MM_ERROR_HANDLING", "UCX_POSIX_ERROR_HANDLING", "y"},
                            /* How many buffers of 8 KiB a port gets at a time: one more than
                             * its queue has places, and some to keep.  UCX's 512 are 4 MiB of
                             * each client, most of them never used. */
                            {"MM_RX_BUFS_GROW", "UCX_POSIX_RX_BUFS_GROW", "80"}},
};

/* Device names: UCX has no function for them, so they are parsed from what it prints. */

/* Appends `word` to the words of `text` unless it is one of them. */
static void add_word(char *text, size_t text_bytes, const char *word, size_t word_bytes)
{
    size_t used = strlen(text);

    for (const char *at = text; *at != '\0';) {
        size_t length = strcspn(at, " ");

        if (length == word_bytes && memcmp(at, word, length) == 0)
            return;
        at += length + strspn(at + length, " ");
    }
    if (used + (used > 0) + word_bytes + 1 > text_bytes)
        return;
    if (used > 0)
        text[used++] = ' ';
    memcpy(text + used, word, word_bytes);
    text[used + word_bytes] = '\0';
}

/* Adds the transport and device ("tcp/lo") that follows `mark` in each line. */
static void add_resources(char *text, size_t text_bytes, const char *printed, const char *mark)
{
    const char *at = printed;

    while ((at = strstr(at, mark)) != NULL) {
        const char *colon;
        size_t length;

        at += strlen(mark);
        at += strspn(at, " ");
        length = strcspn(at, " \n");
        /* A lane is printed as "0:tcp/lo.0": the resource's number and the path's. */
        colon = memchr(at, ':', length);
        if (colon != NULL && colon > at && strspn(at, "0123456789") == (size_t)(colon - at)) {
            length -= (size_t)(colon + 1 - at);
            at = colon + 1;
            if (length > 2 && memcmp(at + length - 2, ".0", 2) == 0)
                length -= 2;
        }
        if (memchr(at, '/', length) != NULL)
            add_word(text, text_bytes, at, length);
    }
}

/* Appends the devices of a context to `text`.  Returns false if out of memory. */
static bool describe_context(ucp_context_h context, char *text, size_t text_bytes)
{
    char *printed = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&printed, &bytes);
    bool is_whole;

    if (stream == NULL)
        return false;
    ucp_context_print_info(context, stream);
    is_whole = fclose(stream) == 0;
    if (is_whole)
        add_resources(text, text_bytes, printed, "flags -- ");
    free(printed);
    return is_whole;
}

void kv_ucx_describe_endpoint(ucp_ep_h endpoint, char *text, size_t text_bytes)
{
    char *printed = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&printed, &bytes);

    if (stream == NULL)
        return;
    ucp_ep_print_info(endpoint, stream);
    if (fclose(stream) == 0) {
        char mark[16];

        for (unsigned lane = 0; lane < KV_UCX_LANES_MAX; lane++) {
            snprintf(mark, sizeof(mark), "lane[%u]:", lane);
            add_resources(text, text_bytes, printed, mark);
        }
    }
    free(printed);
}

/* The transport */

/* Calls `check` for each name of a comma-separated list, until it returns false. */
static bool each_device(const char *devices,
                        bool (*check)(const char *device, const void *arg),
                        const void *arg,
                        char *ret_device,
                        size_t device_bytes)
{
    while (*devices != '\0') {
        size_t length = strcspn(devices, ",");

        if (length > 0) {
            snprintf(ret_device, device_bytes, "%.*s", (int)length, devices);
            if (!check(ret_device, arg))
                return false;
        }
        devices += length + (devices[length] == ',');
    }
    return true;
}

static bool device_exists(const char *device, const void *arg)
{
    (void)arg;
    return if_nametoindex(device) != 0;
}

static bool device_in_use(const char *device, const void *arg)
{
    char word[KV_UCX_DEVICES_BYTES_MAX + 2];

    /* Words of `arg` are separated by spaces, and so is its end. */
    snprintf(word, sizeof(word), "/%s ", device);
    return strstr(arg, word) != NULL;
}

static kv_status_t set_option(ucp_config_t *config, const struct option *option)
{
    if (option->variable != NULL && getenv(option->variable) != NULL)
        return KV_OK;
    return kv_ucx_status_of(ucp_config_modify(config, option->name, option->value));
}

static kv_status_t open_context(enum kv_ucx_link_kind kind,
                                const char *devices,
                                ucp_context_h *ret_context,
                                char *detail,
                                size_t detail_bytes)
{
    struct option net_devices = {"NET_DEVICES", "UCX_NET_DEVICES", devices};
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_REQUEST_SIZE,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        .request_size = sizeof(struct kv_ucx_pending_send),
    };
    ucp_config_t *config;
    kv_status_t status;
    ucs_status_t ucs;

    ucs = ucp_config_read(NULL, NULL, &config);
    if (ucs != UCS_OK) {
        snprintf(detail, detail_bytes, "ucx: configuration: %s", ucs_status_string(ucs));
        return KV_INVALID;
    }
    status = set_option(config, &net_devices);
    for (const struct option *option = common_options; option->name != NULL; option++)
        if (status == KV_OK)
            status = set_option(config, option);
    for (const struct option *option = link_options[kind]; option->name != NULL; option++)
        if (status == KV_OK)
            status = set_option(config, option);
    if (status != KV_OK) {
        ucp_config_release(config);
        snprintf(detail, detail_bytes, "ucx: an option is unknown to this version");
        return KV_UNSUPPORTED;
    }

    ucs = ucp_init(&params, config, ret_context);
    ucp_config_release(config);
    if (ucs != UCS_OK) {
        snprintf(detail, detail_bytes, "ucx: %s: %s",
                 kind == KV_UCX_LINK_NETWORK ? devices : "shared memory",
                 ucs_status_string(ucs));
        return ucs == UCS_ERR_NO_DEVICE ? KV_UNSUPPORTED : KV_IO;
    }
    return KV_OK;
}

void kv_ucx_close(struct kv_transport *base)
{
    struct kv_ucx_transport *transport = (struct kv_ucx_transport *)base;

    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++)
        if (transport->contexts[kind] != NULL)
            ucp_cleanup(transport->contexts[kind]);
    kv_peer_files_free(transport->peer_files);
    kv_memory_file_fini(&transport->memory_file);
    free(transport);
}

static kv_status_t open_network(struct kv_ucx_transport *transport,
                                const char *devices,
                                char *detail,
                                size_t detail_bytes)
{
    char device[KV_UCX_DEVICES_BYTES_MAX];
    char in_use[1024] = "";
    kv_status_t status;
    size_t used;

    if (strlen(devices) >= KV_UCX_DEVICES_BYTES_MAX) {
        snprintf(detail, detail_bytes, "ucx: the list of devices is too long");
        return KV_INVALID;
    }
    /* UCX itself only warns, and goes on with the others. */
    if (!each_device(devices, device_exists, NULL, device, sizeof(device))) {
        snprintf(detail, detail_bytes, "ucx: network device %s: does not exist", device);
        return KV_UNSUPPORTED;
    }
    status = open_context(KV_UCX_LINK_NETWORK, devices,
                          &transport->contexts[KV_UCX_LINK_NETWORK], detail, detail_bytes);
    if (status != KV_OK || getenv("UCX_NET_DEVICES") != NULL || getenv("UCX_TLS") != NULL)
        return status;

    if (!describe_context(transport->contexts[KV_UCX_LINK_NETWORK], in_use,
                          sizeof(in_use) - 1)) {
        snprintf(detail, detail_bytes, "ucx: out of memory");
        return KV_NO_MEMORY;
    }
    used = strlen(in_use);
    in_use[used] = ' ';
    in_use[used + 1] = '\0';
    if (!each_device(devices, device_in_use, in_use, device, sizeof(device))) {
        snprintf(detail, detail_bytes, "ucx: network device %s: down, or no address", device);
        return KV_UNSUPPORTED;
    }
    return KV_OK;
}

/* Large data over shared memory: what is read of peers, and what peers may read. */
static void open_direct(struct kv_ucx_transport *transport)
{
    transport->peer_files = kv_peer_files_create();
    /* Where a process may only read its children, they are told that they may read this one. */
    if (!transport->trusts_peers)
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

kv_status_t kv_ucx_open(const struct kv_transport_config *config,
                        struct kv_transport **ret_transport,
                        char *detail,
                        size_t detail_bytes)
{
    const char *transports = config->transports != NULL ? config->transports : "auto";
    const char *devices =
        config->devices != NULL && config->devices[0] != '\0' ? config->devices : "lo";
    bool is_auto = strcmp(transports, "auto") == 0;
    bool network = is_auto || strcmp(transports, "tcp") == 0;
    /* A user who names UCX's transports gets them in one context, not in both. */
    bool shared = (is_auto && getenv("UCX_TLS") == NULL) || strcmp(transports, "shm") == 0;
    struct kv_ucx_transport *transport;
    char device[KV_UCX_DEVICES_BYTES_MAX];
    kv_status_t status = KV_OK;

    if (!network && !shared) {
        snprintf(detail, detail_bytes, "ucx: transport %s: not auto, tcp or shm", transports);
        return KV_INVALID;
    }
    transport = calloc(1, sizeof(*transport));
    if (transport == NULL) {
        snprintf(detail, detail_bytes, "ucx: out of memory");
        return KV_NO_MEMORY;
    }
    transport->base.ops = &kv_transport_ucx;
    transport->is_users_choice = getenv("UCX_TLS") != NULL;
    transport->trusts_peers = config->trusts_peers;
    kv_memory_file_init(&transport->memory_file);
    if (network)
        status = open_network(transport, devices, detail, detail_bytes);
    /* UCX looks for devices in /sys; without it (a bare chroot) auto is shared memory alone. */
    if (status == KV_UNSUPPORTED && is_auto && shared && access("/sys/class/net", F_OK) != 0 &&
        each_device(devices, device_exists, NULL, device, sizeof(device)))
        status = KV_OK;
    if (status == KV_OK && shared)
        status = open_context(KV_UCX_LINK_SHARED, devices,
                              &transport->contexts[KV_UCX_LINK_SHARED], detail, detail_bytes);
    if (status != KV_OK) {
        kv_ucx_close(&transport->base);
        return status;
    }
    if (transport->contexts[KV_UCX_LINK_SHARED] != NULL)
        open_direct(transport);

    transport->has_cuda = true;
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++) {
        ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};

        if (transport->contexts[kind] == NULL)
            continue;
        if (ucp_context_query(transport->contexts[kind], &attr) != UCS_OK ||
            (attr.memory_types & (1u << UCS_MEMORY_TYPE_CUDA)) == 0)
            transport->has_cuda = false;
    }
    *ret_transport = &transport->base;
    return KV_OK;
}

void kv_ucx_unmap(struct kv_transport *base, struct kv_mapping *mapping)
{
    struct kv_ucx_transport *transport = (struct kv_ucx_transport *)base;

    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++)
        if (mapping->handles[kind] != NULL)
            ucp_mem_unmap(transport->contexts[kind], mapping->handles[kind]);
    if (mapping->is_in_file)
        kv_memory_file_free(&transport->memory_file, mapping->base);
    else
        kv_memory_release(mapping->base, mapping->bytes);
    free(mapping);
}

kv_status_t kv_ucx_map(struct kv_transport *base,
                       void *memory,
                       size_t bytes,
                       enum kv_memory_type type,
                       struct kv_mapping **ret_mapping)
{
    struct kv_ucx_transport *transport = (struct kv_ucx_transport *)base;
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = memory,
        .length = bytes,
        .memory_type = type == KV_MEMORY_CUDA ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST,
    };
    struct kv_mapping *mapping;

    if (type == KV_MEMORY_CUDA && !transport->has_cuda)
        return KV_UNSUPPORTED;
    mapping = calloc(1, sizeof(*mapping));
    if (mapping == NULL)
        return KV_NO_MEMORY;
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++) {
        ucs_status_t ucs;

        if (transport->contexts[kind] == NULL)
            continue;
        ucs = ucp_mem_map(transport->contexts[kind], &params, &mapping->handles[kind]);
        if (ucs != UCS_OK) {
            mapping->handles[kind] = NULL;
            kv_ucx_unmap(base, mapping);
            return kv_ucx_status_of(ucs);
        }
    }
    *ret_mapping = mapping;
    return KV_OK;
}

kv_status_t kv_ucx_alloc(struct kv_transport *base,
                         size_t bytes,
                         void **ret_memory,
                         struct kv_mapping **ret_mapping)
{
    struct kv_ucx_transport *transport = (struct kv_ucx_transport *)base;
    const bool is_offered =
        transport->contexts[KV_UCX_LINK_SHARED] != NULL && transport->trusts_peers;
    void *memory = is_offered ? kv_memory_file_alloc(&transport->memory_file, bytes) : NULL;
    const bool is_in_file = memory != NULL;
    kv_status_t status = KV_NO_MEMORY;

    if (is_in_file)
        kv_memory_file_provide(memory, bytes);

    if (memory == NULL)
        memory = kv_memory_reserve(bytes);
    if (memory != NULL)
        status = kv_ucx_map(base, memory, bytes, KV_MEMORY_HOST, ret_mapping);
    if (status == KV_OK) {
        (*ret_mapping)->base = memory;
        (*ret_mapping)->bytes = bytes;
        (*ret_mapping)->is_in_file = is_in_file;
        *ret_memory = memory;
    } else if (is_in_file) {
        kv_memory_file_free(&transport->memory_file, memory);
    } else {
        kv_memory_release(memory, bytes);
    }
    return status;
}

void kv_ucx_add_direct(char *text, size_t text_bytes)
{
    add_word(text, text_bytes, "memfd/memory", strlen("memfd/memory"));
    add_word(text, text_bytes, "cma/memory", strlen("cma/memory"));
}

void kv_ucx_describe(struct kv_transport *base, char *text, size_t text_bytes)
{
    struct kv_ucx_transport *transport = (struct kv_ucx_transport *)base;

    if (text_bytes == 0)
        return;
    text[0] = '\0';
    for (unsigned kind = KV_UCX_N_LINKS; kind-- > 0;)
        if (transport->contexts[kind] != NULL)
            describe_context(transport->contexts[kind], text, text_bytes);
    if (transport->contexts[KV_UCX_LINK_SHARED] != NULL)
        kv_ucx_add_direct(text, text_bytes);
}
