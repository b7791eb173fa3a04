// bf16 products by fp32 multiply-add, for AVX2 and for the generic variant: packed pairs are widened to fp32 in registers.
#pragma once
#include "vec.h"

namespace FOREBAY_VARIANT {

constexpr int64_t PANEL_GROUP = 1;  // panels per call of mm for one row block
constexpr int64_t ROW_BLOCK = 64;

inline void begin_task() {}

template <int R>
void mm_bf16_block(const bf16* a, int64_t lda, const bf16* b, int64_t k, float* c, int64_t ldc, bool accumulate) {
    vf acc[R];
    for (int r = 0; r < R; r++) acc[r] = accumulate ? loadu(c + r * ldc) : zero();
    for (int64_t i = 0; i < k; i += 2) {
        vu pair;
        memcpy(&pair, b + i * 16, 64);
        const vf even = (vf)(pair << 16), odd = (vf)(pair & 0xffff0000u);
        for (int r = 0; r < R; r++) {
            uint32_t x;
            memcpy(&x, a + r * lda + i, 4);
            const uint32_t lo = x << 16, hi = x & 0xffff0000u;
            float x0, x1;
            memcpy(&x0, &lo, 4);
            memcpy(&x1, &hi, 4);
            acc[r] = fma(set1(x0), even, acc[r]);
            acc[r] = fma(set1(x1), odd, acc[r]);
        }
    }
    for (int r = 0; r < R; r++) storeu(c + r * ldc, acc[r]);
}

inline __attribute__((noinline)) void mm(const bf16* a, int64_t lda, int64_t rows, const bf16* b, int64_t panel_stride, int64_t panels,
               int64_t k, float* c, int64_t ldc, bool accumulate) {
    for (int64_t p = 0; p < panels; p++) {
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4)
            mm_bf16_block<4>(a + r * lda, lda, b + p * panel_stride, k, c + r * ldc + 16 * p, ldc, accumulate);
        for (; r < rows; r++)
            mm_bf16_block<1>(a + r * lda, lda, b + p * panel_stride, k, c + r * ldc + 16 * p, ldc, accumulate);
    }
}

}  // namespace FOREBAY_VARIANT
