/* for_size.h - private to kernels/x86/: the one place where a block's size becomes a constant.
 *
 * Threads: constants.  Memory: none.
 */
#ifndef KV_KERNELS_X86_FOR_SIZE_H
#define KV_KERNELS_X86_FOR_SIZE_H

/* CALL(n), n being 1 to 4. */
#define FOR_SIZE(n, CALL) \
    do {                  \
        switch (n) {      \
        case 4:           \
            CALL(4);      \
            break;        \
        case 3:           \
            CALL(3);      \
            break;        \
        case 2:           \
            CALL(2);      \
            break;        \
        default:          \
            CALL(1);      \
        }                 \
    } while (0)

#endif
