/* dequantize.h - converts rows of every tensor type of gguf.h to fp32.
 *
 * The scalar reference: one plain loop per type, in fp32, each product and sum rounded once, in
 * the order that the format gives.  Scales d and m are fp16, quants q start at 0.  A line has
 * the elements of a block, its bytes in order, and the value of an element:
 *
 *   Q8_0        32: d, int8[32]                      q d
 *   Q4_0, Q4_1  32: d, [m,] nibbles[16]              (q - 8) d      q d + m
 *   Q5_0, Q5_1  32: d, [m,] fifth bits u32, [16]     (q - 16) d     q d + m
 *   Q4_K       256: d, m, 8 scales and 8 minima of 6 bits in 12 bytes, nibbles[128]
 *                                                    (d scale) q - (m minimum)
 *   Q5_K       256: the same, and fifth bits[32] before the nibbles
 *   Q6_K       256: low nibbles[128], upper two bits[64], scales int8[16], d
 *                                                    (d scale) (q - 32)
 *
 * In blocks of 32, byte i has element i in its low and element i + 16 in its high nibble.
 * Blocks of 256 consist of runs of 64 elements (Q6_K: 128), as dequantize.c describes.  The
 * formats are those of the ggml project.
 *
 * Threads: pure functions.
 */
#ifndef KV_GPU_WORKER_GGUF_DEQUANTIZE_H
#define KV_GPU_WORKER_GGUF_DEQUANTIZE_H

#include "gpu-worker/gguf/tensor_type.h"

/* Convert fp16 (IEEE binary16) and bf16.  To fp32 exactly; from fp32 to the nearest, ties to
 * even, infinity beyond the largest; a NaN stays a NaN. */
float kvw_f16_to_f32(uint16_t half);
uint16_t kvw_f16_from_f32(float value);
float kvw_bf16_to_f32(uint16_t half);
uint16_t kvw_bf16_from_f32(float value);

/* Converts a row of kvw_tensor_row_bytes(type, n_elements) bytes, at any alignment.  n_elements
 * is a whole number of blocks.
 *   ret_values  (n_elements) */
void kvw_dequantize_row(enum kvw_tensor_type type,
                        const void *row,
                        size_t n_elements,
                        float *ret_values);

#endif
