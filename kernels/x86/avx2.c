#include "kernels/x86/avx2.h"

#if defined(__x86_64__)

uint64_t kv_lanes_of[256];

__attribute__((constructor)) static void fill(void)
{
    for (unsigned set = 0; set < 256; set++)
        for (unsigned lane = 0, n = 0; lane < LANES; lane++)
            if (set >> lane & 1)
                kv_lanes_of[set] |= (uint64_t)lane << 8 * n++;
}

#endif
