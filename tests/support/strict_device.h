/* strict_device.h - a device that is as late as a device may be: a test of who waits.
 *
 * It computes with the CPU's, but what is queued is done later: at random, one stream ahead of the
 * other, and at the latest when somebody waits for it.  What a copy will bring to the caller's
 * memory is bytes of 0xa5 until then; what it takes from there it takes when it is done.  So
 * whoever reads before it has waited, changes what is still to be copied, or lets a stream use what
 * another has not done yet, gets other numbers, most of the time.
 *
 * Who links this gets it in place of every device: kvw_device_find() is here.  KV_STRICT_SEED, a
 * number, is what chance follows from; default 1.
 *
 * Threads: one.  Memory: of a device's operations, until they are done.
 */
#ifndef KV_TESTS_SUPPORT_STRICT_DEVICE_H
#define KV_TESTS_SUPPORT_STRICT_DEVICE_H

#include "gpu-worker/device/device.h"

extern const struct kvw_device_ops strict_device;

#endif
