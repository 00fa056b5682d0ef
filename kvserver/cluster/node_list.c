#include "kvserver/cluster/node_list.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static bool is_in(const char *address, const char *const *addresses, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (strcmp(address, addresses[i]) == 0)
            return true;
    return false;
}

kv_status_t kv_node_list_split(const char *what,
                               char *list,
                               uint32_t addresses_max,
                               const char **ret_addresses,
                               uint32_t *ret_n_addresses,
                               char *detail,
                               size_t detail_bytes)
{
    uint32_t n = 0;

    for (char *address = list, *comma; address != NULL; address = comma) {
        comma = strchr(address, ',');
        if (comma != NULL)
            *comma++ = '\0';
        if (strchr(address, ':') == NULL) {
            snprintf(detail, detail_bytes, "%s: not HOST:PORT: %.200s", what,
                     address[0] != '\0' ? address : "an empty address");
            return KV_INVALID;
        }
        if (is_in(address, ret_addresses, n)) {
            snprintf(detail, detail_bytes, "%s: twice in the list: %.200s", what, address);
            return KV_INVALID;
        }
        if (n == addresses_max) {
            snprintf(detail, detail_bytes, "%s: too many nodes: limit %u", what, addresses_max);
            return KV_INVALID;
        }
        ret_addresses[n++] = address;
    }
    *ret_n_addresses = n;
    return KV_OK;
}
