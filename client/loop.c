#include "client/loop.h"

#include "kvserver/base/clock.h"

#include <stdarg.h>
#include <stdio.h>

void kvc_loop_init(struct kvc_loop *loop, const struct kv_clock *clock)
{
    *loop = (struct kvc_loop){
        .clock = clock, .now_us = kv_clock_now(clock), .next_due_us = UINT64_MAX};
}

void kvc_loop_update_time(struct kvc_loop *loop)
{
    loop->now_us = kv_clock_now(loop->clock);
}

kv_status_t kvc_set_error(struct kvc_loop *loop, kv_status_t status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(kvc_loop_detail(loop), KVC_DETAIL_BYTES, format, args);
    va_end(args);
    return status;
}
