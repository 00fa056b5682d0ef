/* next_version.h - makes of sources those of the next minor version: one more version of the protocol,
 * with nothing new in it.  The compiler includes it before each (-include). */
#ifndef KV_TESTS_SYSTEM_NEXT_VERSION_H
#define KV_TESTS_SYSTEM_NEXT_VERSION_H

#include "proto/kv_wire.h"

enum {
    THIS_WIRE_VERSION = KV_WIRE_VERSION
};
#undef KV_WIRE_VERSION
#define KV_WIRE_VERSION (THIS_WIRE_VERSION + 1)

#endif
