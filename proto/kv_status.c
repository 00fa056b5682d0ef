#include "proto/kv_status.h"

const char *kv_status_name(kv_status_t status)
{
    switch (status) {
    case KV_OK:
        return "ok";
    case KV_IN_PROGRESS:
        return "in_progress";
    case KV_INVALID:
        return "invalid";
    case KV_NOT_FOUND:
        return "not_found";
    case KV_EXISTS:
        return "exists";
    case KV_CONFLICT:
        return "conflict";
    case KV_STALE:
        return "stale";
    case KV_MOVED:
        return "moved";
    case KV_UNSUPPORTED:
        return "unsupported";
    case KV_VERSION:
        return "version";
    case KV_DENIED:
        return "denied";
    case KV_TOO_LARGE:
        return "too_large";
    case KV_BUSY:
        return "busy";
    case KV_NOT_READY:
        return "not_ready";
    case KV_NO_MEMORY:
        return "no_memory";
    case KV_DRAINING:
        return "draining";
    case KV_DEADLINE:
        return "deadline";
    case KV_CANCELLED:
        return "cancelled";
    case KV_UNREACHABLE:
        return "unreachable";
    case KV_CORRUPT:
        return "corrupt";
    case KV_IO:
        return "io";
    }
    return "unknown";
}
