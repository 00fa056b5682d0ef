#include "gpu-worker/base/file_error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

kv_status_t kvw_file_error_set(const struct kvw_file_error *detail,
                               kv_status_t status,
                               const char *format,
                               ...)
{
    va_list arguments;
    int used = snprintf(detail->text, detail->bytes, "%s: ", detail->path);

    if (used >= 0 && (size_t)used < detail->bytes) {
        va_start(arguments, format);
        vsnprintf(detail->text + used, detail->bytes - (size_t)used, format, arguments);
        va_end(arguments);
    }
    return status;
}

struct kvw_shown kvw_show(struct kvw_text text)
{
    struct kvw_shown shown;
    size_t room = sizeof(shown.text) - sizeof("...");
    size_t bytes = text.bytes < room ? text.bytes : room;

    for (size_t i = 0; i < bytes; i++)
        shown.text[i] = text.data[i] >= ' ' && text.data[i] <= '~' ? text.data[i] : '?';
    strcpy(shown.text + bytes, bytes < text.bytes ? "..." : "");
    return shown;
}
