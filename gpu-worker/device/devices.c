/* The list of devices, best first. */
#include "gpu-worker/device/device.h"

#include <string.h>

extern const struct kvw_device_ops kvw_device_cpu; /* cpu/ */

static const struct kvw_device_ops *const rows[] = {&kvw_device_cpu};

const struct kvw_device_ops *kvw_device_find(const char *name)
{
    if (strcmp(name, "auto") == 0)
        return rows[0];
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (strcmp(rows[i]->name, name) == 0)
            return rows[i];
    return NULL;
}
