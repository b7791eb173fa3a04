// bf16 products on AMX tiles. C tiles 0-3, A tiles 4-5, B tiles 6-7. TDPBF16PS computes every row of A separately and adds
// each block of 32 k as one step, so a tile with fewer rows gives the same bits as a full one.
#pragma once
#include "vec.h"

namespace FOREBAY_VARIANT {

constexpr int64_t PANEL_GROUP = 2;
constexpr int64_t ROW_BLOCK = 32;
constexpr int64_t PREFETCH_BYTES = 8192;

// The "memory" clobber tells the compiler that tile loads read memory.
#define FB_TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define FB_TILE_STORE(t, p, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define FB_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define FB_TILE_DP(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Row tiles before the last are full and load A into tile 4; the last has `last` rows, loads A into tile 5 and adds to C tile
// `tiles` - 1. In the 2 x 2 shape all are full.
inline thread_local int tile_shape = -1;

FB_INLINE void configure(int tiles, int last) {
    const int key = last == 16 ? 0 : tiles * 32 + last;
    if (tile_shape == key) return;
    TileConfig config;
    if (last != 16) config.rows[tiles - 1] = config.rows[5] = static_cast<uint8_t>(last);
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
    tile_shape = key;
}

// The shape of mm_int4_rows: tile 4 holds 16 outputs; tile 7 and C tile 0 have `columns` columns, the others 16.
FB_INLINE void configure_columns(int64_t columns) {
    const int key = 1000 + static_cast<int>(columns);
    if (tile_shape == key) return;
    TileConfig config;
    config.bytes[0] = config.bytes[7] = static_cast<uint16_t>(4 * columns);
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
    tile_shape = key;
}

// Other libraries also use tiles on the calling thread: at the start of a task their configuration is unknown.
inline void begin_task() { tile_shape = -1; }

template <int T>
FB_INLINE void mm_skinny(const bf16* a, int64_t lda, int last, const bf16* b, int64_t k, float* c, int64_t ldc,
                         bool accumulate) {
    configure(T, last);
    const int64_t ac = lda * 2, cc = ldc * 4;
    if (accumulate) {
        FB_TILE_LOAD(0, c, cc);
        if (T > 1) FB_TILE_LOAD(1, c + 16 * ldc, cc);
        if (T > 2) FB_TILE_LOAD(2, c + 32 * ldc, cc);
        if (T > 3) FB_TILE_LOAD(3, c + 48 * ldc, cc);
    } else {
        FB_TILE_ZERO(0);
        if (T > 1) FB_TILE_ZERO(1);
        if (T > 2) FB_TILE_ZERO(2);
        if (T > 3) FB_TILE_ZERO(3);
    }
    for (int64_t i = 0; i < k; i += 32) {
        const char* at = (const char*)(b + i * 16);
        for (int line = 0; line < 16; line++) _mm_prefetch(at + PREFETCH_BYTES + 64 * line, _MM_HINT_T0);
        FB_TILE_LOAD(6, at, 64);
        if (T > 1) {
            FB_TILE_LOAD(4, a + i, ac);
            FB_TILE_DP(0, 4, 6);
        }
        if (T > 2) {
            FB_TILE_LOAD(4, a + 16 * lda + i, ac);
            FB_TILE_DP(1, 4, 6);
        }
        if (T > 3) {
            FB_TILE_LOAD(4, a + 32 * lda + i, ac);
            FB_TILE_DP(2, 4, 6);
        }
        FB_TILE_LOAD(5, a + 16 * (T - 1) * lda + i, ac);
        if (T == 1) FB_TILE_DP(0, 5, 6);
        if (T == 2) FB_TILE_DP(1, 5, 6);
        if (T == 3) FB_TILE_DP(2, 5, 6);
        if (T == 4) FB_TILE_DP(3, 5, 6);
    }
    FB_TILE_STORE(0, c, cc);
    if (T > 1) FB_TILE_STORE(1, c + 16 * ldc, cc);
    if (T > 2) FB_TILE_STORE(2, c + 32 * ldc, cc);
    if (T > 3) FB_TILE_STORE(3, c + 48 * ldc, cc);
}

inline void mm_panel(const bf16* a, int64_t lda, int64_t rows, const bf16* b, int64_t k, float* c, int64_t ldc,
                     bool accumulate) {
    for (int64_t r = 0; r < rows; r += 64) {
        const int64_t here = least(64, rows - r);
        const int last = static_cast<int>((here - 1) % 16 + 1);
        const bf16* ar = a + r * lda;
        float* cr = c + r * ldc;
        switch (ceil_div(here, 16)) {
            case 1: mm_skinny<1>(ar, lda, last, b, k, cr, ldc, accumulate); break;
            case 2: mm_skinny<2>(ar, lda, last, b, k, cr, ldc, accumulate); break;
            case 3: mm_skinny<3>(ar, lda, last, b, k, cr, ldc, accumulate); break;
            default: mm_skinny<4>(ar, lda, last, b, k, cr, ldc, accumulate); break;
        }
    }
}

// 32 rows by 2 panels.
inline void mm_square(const bf16* a, int64_t lda, const bf16* b, int64_t panel_stride, int64_t k, float* c, int64_t ldc,
                      bool accumulate) {
    configure(4, 16);
    const int64_t ac = lda * 2, cc = ldc * 4;
    const bf16 *a1 = a + 16 * lda, *b1 = b + panel_stride;
    float* c1 = c + 16 * ldc;
    if (accumulate) {
        FB_TILE_LOAD(0, c, cc);
        FB_TILE_LOAD(1, c + 16, cc);
        FB_TILE_LOAD(2, c1, cc);
        FB_TILE_LOAD(3, c1 + 16, cc);
    } else {
        FB_TILE_ZERO(0);
        FB_TILE_ZERO(1);
        FB_TILE_ZERO(2);
        FB_TILE_ZERO(3);
    }
    for (int64_t i = 0; i < k; i += 32) {
        FB_TILE_LOAD(6, b + i * 16, 64);
        FB_TILE_LOAD(4, a + i, ac);
        FB_TILE_LOAD(7, b1 + i * 16, 64);
        FB_TILE_DP(0, 4, 6);
        FB_TILE_LOAD(5, a1 + i, ac);
        FB_TILE_DP(1, 4, 7);
        FB_TILE_DP(2, 5, 6);
        FB_TILE_DP(3, 5, 7);
    }
    FB_TILE_STORE(0, c, cc);
    FB_TILE_STORE(1, c + 16, cc);
    FB_TILE_STORE(2, c1, cc);
    FB_TILE_STORE(3, c1 + 16, cc);
}

inline __attribute__((noinline)) void mm(const bf16* a, int64_t lda, int64_t rows, const bf16* b, int64_t panel_stride, int64_t panels,
               int64_t k, float* c, int64_t ldc, bool accumulate) {
    int64_t p = 0;
    for (; p + 2 <= panels; p += 2) {
        const bf16* bp = b + p * panel_stride;
        int64_t r = 0;
        for (; r + 32 <= rows; r += 32)
            mm_square(a + r * lda, lda, bp, panel_stride, k, c + r * ldc + 16 * p, ldc, accumulate);
        if (r < rows)
            for (int64_t j = 0; j < 2; j++)
                mm_panel(a + r * lda, lda, rows - r, bp + j * panel_stride, k, c + r * ldc + 16 * (p + j), ldc,
                         accumulate);
    }
    if (p < panels) mm_panel(a, lda, rows, b + p * panel_stride, k, c + 16 * p, ldc, accumulate);
}

}  // namespace FOREBAY_VARIANT
