// Products with packed weights: division into tasks, ragged edges, bias and rounding. mm() computes the sums.
#pragma once
#include <type_traits>
#include <vector>

#include "abi.h"
#include "matmul.h"
#include "pool.h"
#include "quant.h"
#include "rowops.h"
#include "scratch.h"

namespace FOREBAY_VARIANT {

using forebay::GatedLinearArgs;
using forebay::GroupedLinearArgs;
using forebay::LinearArgs;
using forebay::Pool;
using forebay::Weight;

constexpr int64_t SKINNY_ROWS = 64;  // up to here a weight is streamed once, panel by panel
constexpr int64_t CACHED_BYTES = 600000;
// Larger outputs would leave the caches before they are read, so they are written with streaming stores, whole lines at a
// time. Ordinary stores read each line from memory first: measured three times slower over a whole product.
constexpr int64_t STREAM_BYTES = 1 << 20;

// One product: `count` rows of the output from `first_row` on. `index` (or null): the row of x for each.
struct Product {
    const Weight* weight;
    const int32_t* index;
    int64_t first_row, count;
};

struct LinearTask {
    int32_t product;
    int64_t row, rows, panel, panels;
};

struct LinearIo {
    const void* x;
    void* out;
    int64_t x_stride, out_stride;
    int64_t out_dtype;
    bool stream;  // write whole lines with streaming stores
};

// The rows that a task reads, in a form that mm() accepts: x itself, or a gathered and zero-padded copy.
template <class T>
const T* task_rows(const LinearIo& io, const Product& product, const LinearTask& task, int64_t& lda) {
    const Weight& w = *product.weight;
    const T* x = static_cast<const T*>(io.x);
    if (product.index == nullptr && w.k == w.kp) {
        lda = io.x_stride;
        return x + (product.first_row + task.row) * io.x_stride;
    }
    struct Tag {};
    T* rows = scratch<Tag>().template get<T>(task.rows * w.kp);
    for (int64_t r = 0; r < task.rows; r++) {
        const int64_t i = product.first_row + task.row + r;
        const int64_t source = product.index == nullptr ? i : product.index[i];
        memcpy(rows + r * w.kp, x + source * io.x_stride, w.k * sizeof(T));
        memset(rows + r * w.kp + w.k, 0, (w.kp - w.k) * sizeof(T));
    }
    lda = w.kp;
    return rows;
}

template <class Out>
void write_rows_as(const float* c, int64_t ldc, const Weight& w, int64_t panel, int64_t panels, int64_t rows, Out* out,
                   const LinearIo& io) {
    const int64_t column = panel * 16, n = least(panels * 16, w.n - column);
    const float* bias = w.bias == nullptr ? nullptr : w.bias + column;
    const auto sum = [&](int64_t r, int64_t i) {
        const vf v = loadu(c + r * ldc + i);
        return bias == nullptr ? v : v + loadu(bias + i);
    };
    const bool stream = io.stream && n % 32 == 0 && panel % 2 == 0;
    for (int64_t r = 0; r < rows; r++) {
        Out* row = out + r * io.out_stride + column;
        if (stream)
            for (int64_t i = 0; i < n; i += 32) stream_pair(row + i, sum(r, i), sum(r, i + 16));
        else
            for (int64_t i = 0; i < n; i += 16) store_n(row + i, sum(r, i), n - i);
    }
}

// Adds the bias, rounds, and writes rows of `panels` panels of sums.
inline void write_rows(const float* c, int64_t ldc, const Weight& w, int64_t panel, int64_t panels, int64_t rows,
                       const LinearIo& io, int64_t out_row) {
    if (io.out_dtype == forebay::FP32)
        write_rows_as(c, ldc, w, panel, panels, rows, static_cast<float*>(io.out) + out_row * io.out_stride, io);
    else
        write_rows_as(c, ldc, w, panel, panels, rows, static_cast<bf16*>(io.out) + out_row * io.out_stride, io);
}

// Prefetches [at, at + bytes) into the L2 cache.
FB_INLINE void fetch_ahead(const void* at, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(at) + line, 0, 2);
}

template <class T>
void run_dense(const Product& product, const LinearTask& task, const LinearIo& io) {
    const Weight& w = *product.weight;
    int64_t lda;
    const T* a = task_rows<T>(io, product, task, lda);
    const T* b = static_cast<const T*>(w.data);
    const int64_t panel_stride = w.kp * 16;
    const bool skinny = task.rows <= SKINNY_ROWS;
    const int64_t group = skinny && PANEL_GROUP == 2 ? 1 : PANEL_GROUP;
    const int64_t block = skinny ? task.rows : ROW_BLOCK;
    struct Tag {};
    float* c = scratch<Tag>().template get<float>(most(block, SKINNY_ROWS) * 16 * PANEL_GROUP);
    for (int64_t p = 0; p < task.panels; p += group) {
        const int64_t panels = least(group, task.panels - p);
        const T* bp = b + (task.panel + p) * panel_stride;
        // A part of the next group's weights is prefetched into the L2 cache in each row block.
        const char* ahead = reinterpret_cast<const char*>(bp + panels * panel_stride);
        const int64_t stretch = round_up(panels * panel_stride * static_cast<int64_t>(sizeof(T)) * block / task.rows, 64);
        for (int64_t r = 0; r < task.rows; r += block) {
            const int64_t rows = least(block, task.rows - r);
            const int64_t out_row = product.first_row + task.row + r;
            if (!skinny) {
                fetch_ahead(ahead, stretch);
                ahead += stretch;
            }
            mm(a + r * lda, lda, rows, bp, panel_stride, panels, w.kp, c, 16 * panels, false);
            write_rows(c, 16 * panels, w, task.panel + p, panels, rows, io, out_row);
        }
    }
}

#if defined(FB_INT4_ROWS)
// Few rows with INT4 weights: the weights are the rows of the product, so the result is (outputs, rows).
inline void run_int4(const Product& product, const LinearTask& task, const LinearIo& io) {
    const Weight& w = *product.weight;
    int64_t lda;
    const bf16* x = task_rows<bf16>(io, product, task, lda);
    const int64_t columns = task.rows == 1 ? 1 : 16, tiles = ceil_div(task.rows, 16), stride = 16 * w.kp;
    struct RowTag {};
    struct PanelTag {};
    if (columns == 16) {
        bf16* panels = scratch<PanelTag>().template get<bf16>(tiles * stride);
        for (int64_t t = 0; t < tiles; t++) {
            const bf16* rows = x + t * 16 * lda;
            int64_t rows_stride = lda;
            if (task.rows - t * 16 < 16) {
                const int64_t real = task.rows - t * 16;
                bf16* padded = scratch<RowTag>().template get<bf16>(stride);
                for (int64_t r = 0; r < real; r++) memcpy(padded + r * w.kp, rows + r * lda, w.kp * sizeof(bf16));
                memset(padded + real * w.kp, 0, (16 - real) * w.kp * sizeof(bf16));
                rows = padded;
                rows_stride = w.kp;
            }
            pack_panel(rows, rows_stride, w.kp, panels + t * stride);
        }
        x = panels;
    }
    alignas(64) float c[1024], turned[256];
    for (int64_t p = task.panel; p < task.panel + task.panels; p++) {
        const int64_t blocks = w.kp / 32;
        const char* at = static_cast<const char*>(w.data) + p * blocks * INT4_BLOCK_BYTES;
        const auto run = tiles == 1 ? mm_int4_rows<1> : tiles == 2 ? mm_int4_rows<2> : tiles == 3 ? mm_int4_rows<3> : mm_int4_rows<4>;
        run(at, blocks, INT4_BLOCK_BYTES, QUANT_PREFETCH_BYTES, x, stride, columns, c);
        for (int64_t t = 0; t < tiles; t++) {
            if (columns == 16)
                transpose16(reinterpret_cast<const uint32_t*>(c + t * 256), 16, reinterpret_cast<uint32_t*>(turned), 16);
            write_rows(columns == 16 ? turned : c, 16, w, p, 1, least(16, task.rows - t * 16), io,
                       product.first_row + task.row + t * 16);
        }
    }
}
#endif

// Quantized weights are decoded to panels of the activations' dtype in scratch memory: a part of k at a time for few rows
// (which stays in the L1 cache), all of k for many rows (each part is then read once per row block).
template <class T>
void run_quantized(const Product& product, const LinearTask& task, const LinearIo& io) {
    const Weight& w = *product.weight;
#if defined(FB_INT4_ROWS)
    if (std::is_same_v<T, bf16> && w.kind == forebay::INT4_G32 && task.rows <= SKINNY_ROWS) return run_int4(product, task, io);
#endif
    int64_t lda;
    const T* a = task_rows<T>(io, product, task, lda);
    const bool skinny = task.rows <= SKINNY_ROWS;
    const int64_t stretch = skinny ? least(512, w.kp) : w.kp;
    const int64_t block = skinny ? task.rows : ROW_BLOCK;
    const int64_t group = skinny ? 1 : PANEL_GROUP;
    struct PanelTag {};
    struct SumTag {};
    T* b = scratch<PanelTag>().template get<T>(group * 16 * stretch);
    float* c = scratch<SumTag>().template get<float>(most(block, SKINNY_ROWS) * 16 * group);
    for (int64_t p = 0; p < task.panels; p += group) {
        const int64_t panels = least(group, task.panels - p);
        for (int64_t k = 0; k < w.kp; k += stretch) {
            const int64_t here = least(stretch, w.kp - k);
            for (int64_t j = 0; j < panels; j++)
                dequantize(w, task.panel + p + j, k / 32, here / 32, b + j * 16 * stretch);
            for (int64_t r = 0; r < task.rows; r += block) {
                const int64_t rows = least(block, task.rows - r);
                mm(a + r * lda + k, lda, rows, b, 16 * stretch, panels, here, c, 16 * panels, k > 0);
                if (k + here == w.kp)
                    write_rows(c, 16 * panels, w, task.panel + p, panels, rows, io, product.first_row + task.row + r);
            }
        }
    }
}

// A gate and an up projection side by side in one weight, and their product act(gate) * up: two panels of each give one
// line of the output. Values and roundings are those of the two separate operations.
template <class T>
void run_gated(const Product& product, const LinearTask& task, const LinearIo& io, bool gelu) {
    const Weight& w = *product.weight;
    int64_t lda;
    const T* a = task_rows<T>(io, product, task, lda);
    const int64_t panel_stride = w.kp * 16, up_panels = w.np / 32;
    const bool skinny = task.rows <= SKINNY_ROWS;
    const int64_t block = skinny ? task.rows : ROW_BLOCK;
    struct Tag {};
    float* c = scratch<Tag>().template get<float>(most(block, SKINNY_ROWS) * 64);
    for (int64_t p = 0; p < task.panels; p += 2) {
        const int64_t panels = least(2, task.panels - p), column = (task.panel + p) * 16;
        const T* gate = static_cast<const T*>(w.data) + (task.panel + p) * panel_stride;
        const T* up = gate + up_panels * panel_stride;
        const int64_t stretch = round_up(panels * panel_stride * static_cast<int64_t>(sizeof(T)) * block / task.rows, 64);
        for (int64_t r = 0; r < task.rows; r += block) {
            const int64_t rows = least(block, task.rows - r);
            if (skinny) {
                for (int64_t j = 0; j < panels; j++) {
                    mm(a, lda, rows, gate + j * panel_stride, panel_stride, 1, w.kp, c + 16 * j, 64, false);
                    mm(a, lda, rows, up + j * panel_stride, panel_stride, 1, w.kp, c + 32 + 16 * j, 64, false);
                }
            } else {
                fetch_ahead(reinterpret_cast<const char*>(gate + panels * panel_stride) + r / block * stretch, stretch);
                fetch_ahead(reinterpret_cast<const char*>(up + panels * panel_stride) + r / block * stretch, stretch);
                mm_two(a + r * lda, lda, rows, gate, up, panel_stride, panels, w.kp, c, 64);
            }
            T* out = static_cast<T*>(io.out) + (product.first_row + task.row + r) * io.out_stride + column;
            const auto value = [&](int64_t i, int64_t j) {
                vf g = loadu(c + i * 64 + j), u = loadu(c + i * 64 + 32 + j);
                if (w.bias != nullptr) {
                    g += loadu(w.bias + column + j);
                    u += loadu(w.bias + up_panels * 16 + column + j);
                }
                return gate_of<T>(rounded<T>(g), rounded<T>(u), gelu);
            };
            for (int64_t i = 0; i < rows; i++) {
                T* row = out + i * io.out_stride;
                if (io.stream && panels == 2 && (task.panel + p) % 2 == 0) stream_pair(row, value(i, 0), value(i, 16));
                else
                    for (int64_t j = 0; j < panels * 16; j += 16) storeu(row + j, value(i, j));
            }
        }
    }
}

enum Gate { NO_GATE, SILU, GELU };

inline void run_task(const Product& product, const LinearTask& task, const LinearIo& io, int64_t dtype, Gate gate) {
    const bool dense = product.weight->kind <= forebay::DENSE_FP32;
    if (dtype == forebay::BF16) {
        if (gate != NO_GATE) run_gated<bf16>(product, task, io, gate == GELU);
        else if (dense) run_dense<bf16>(product, task, io);
        else run_quantized<bf16>(product, task, io);
    } else {
        if (gate != NO_GATE) run_gated<float>(product, task, io, gate == GELU);
        else if (dense) run_dense<float>(product, task, io);
        else run_quantized<float>(product, task, io);
    }
}

inline void run_products(Pool& pool, const std::vector<Product>& products, LinearIo io, int64_t dtype, Gate gate = NO_GATE) {
    static thread_local std::vector<LinearTask> tasks;
    tasks.clear();
    int64_t total = 0, rows = 0;
    for (const Product& product : products) {
        total += product.weight->np / 16;
        rows += product.count;
    }
    const int64_t size = io.out_dtype == forebay::FP32 ? 4 : 2;
    io.stream = rows * io.out_stride * size > STREAM_BYTES && rows > SKINNY_ROWS && io.out_stride * size % 64 == 0 &&
                reinterpret_cast<uintptr_t>(io.out) % 64 == 0;
    for (size_t i = 0; i < products.size(); i++) {
        const Product& product = products[i];
        const Weight& w = *product.weight;
        const bool quantized = w.kind >= forebay::INT4_G32;
        // Rows that stay in the L2 cache while panels are streamed.
        const int64_t cached = round_up(most(128, CACHED_BYTES / (w.kp * (dtype == forebay::BF16 ? 2 : 4))), 64);
        const int64_t macro = quantized ? 1024 : product.count <= SKINNY_ROWS ? SKINNY_ROWS : cached;
        const int64_t row_tasks = ceil_div(product.count, macro), panels = w.np / 16 / (gate == NO_GATE ? 1 : 2);
        // About 16 tasks per thread in total, so that a thread that loses its core for a moment costs little; fewer where each
        // task converts its rows to panels first.
        const bool turns = w.kind == forebay::INT4_G32 && product.count > 1 && product.count <= SKINNY_ROWS;
        int64_t chunk = most(1, total * row_tasks / ((turns ? 4 : 16) * pool.threads()));
        chunk = product.count <= SKINNY_ROWS ? round_up(chunk, 2) : round_up(least(chunk, 16), most(2, PANEL_GROUP));
        for (int64_t row = 0; row < product.count; row += macro)
            for (int64_t panel = 0; panel < panels; panel += chunk)
                tasks.push_back({static_cast<int32_t>(i), row, least(macro, product.count - row), panel,
                                 least(chunk, panels - panel)});
    }
    const LinearTask* list = tasks.data();
    pool.parallel(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
        begin_task();
        run_task(products[list[t].product], list[t], io, dtype, gate);
        if (io.stream) finish_streams();
    });
}

inline void linear(Pool& pool, const void* raw) {
    const auto& args = *static_cast<const LinearArgs*>(raw);
    if (args.m == 0) return;
    static thread_local std::vector<Product> products;
    products.assign(1, {args.weight, nullptr, 0, args.m});
    run_products(pool, products, {args.x, args.out, args.x_stride, args.out_stride, args.out_dtype, false}, args.dtype);
}

inline void gated_linear(Pool& pool, const void* raw) {
    const auto& args = *static_cast<const GatedLinearArgs*>(raw);
    const Weight& w = *args.weight;
    if (args.m == 0) return;
    static thread_local std::vector<Product> products;
    products.assign(1, {args.weight, nullptr, 0, args.m});
    if (w.kind <= forebay::DENSE_FP32 && w.n % 32 == 0) {
        run_products(pool, products, {args.x, args.out, args.x_stride, args.out_stride, args.dtype, false}, args.dtype,
                     args.gelu ? GELU : SILU);
        return;
    }
    struct Tag {};
    char* both = scratch<Tag>().template get<char>(args.m * w.n * (args.dtype == forebay::BF16 ? 2 : 4));
    run_products(pool, products, {args.x, both, args.x_stride, w.n, args.dtype, false}, args.dtype);
    const forebay::GatedArgs apart{both, args.out, args.m, w.n / 2, w.n, args.out_stride, args.gelu, args.dtype};
    gated(pool, &apart);
}

inline void grouped_linear(Pool& pool, const void* raw) {
    const auto& args = *static_cast<const GroupedLinearArgs*>(raw);
    static thread_local std::vector<Product> products;
    products.clear();
    for (int64_t e = 0; e < args.experts; e++) {
        const int64_t first = args.expert_start[e], count = args.expert_start[e + 1] - first;
        if (count > 0) products.push_back({args.weights[e], args.rows, first, count});
    }
    run_products(pool, products, {args.x, args.out, args.x_stride, args.out_stride, args.out_dtype, false}, args.dtype);
}

}  // namespace FOREBAY_VARIANT
