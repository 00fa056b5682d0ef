#include "gather.h"

#include <stdint.h>
#include <string.h>

enum {
    LINE_BYTES = 64,
    AHEAD_ROWS = 16,
    AHEAD_BYTES = 16 << 10, /* long rows: what is fetched ahead must still be in L2 when used */
};

static void prefetch_row(const void *row, size_t row_bytes)
{
    uintptr_t end = (uintptr_t)row + row_bytes;

    for (uintptr_t line = (uintptr_t)row & ~(uintptr_t)(LINE_BYTES - 1); line < end;
         line += LINE_BYTES)
        __builtin_prefetch((const void *)line, 0, 2);
}

void kv_rows_gather(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes)
{
    uint8_t *to = dst;
    size_t ahead = AHEAD_ROWS;

    if (row_bytes == 0)
        return;
    if (row_bytes > AHEAD_BYTES / AHEAD_ROWS)
        ahead = row_bytes < AHEAD_BYTES ? AHEAD_BYTES / row_bytes : 1;
    for (size_t i = 0; i < ahead && i < n_rows; i++)
        prefetch_row(rows[i], row_bytes);
    for (size_t i = 0; i < n_rows; i++) {
        if (ahead < n_rows - i)
            prefetch_row(rows[i + ahead], row_bytes);
        memcpy(to, rows[i], row_bytes);
        to += row_bytes;
    }
}
