// Products with packed weights: who computes what, ragged edges, bias and rounding. The sums are mm()'s.
#pragma once
#include <vector>

#include "abi.h"
#include "matmul.h"
#include "pool.h"
#include "quant.h"
#include "scratch.h"

namespace FOREBAY_VARIANT {

using forebay::GroupedLinearArgs;
using forebay::LinearArgs;
using forebay::Pool;
using forebay::Weight;

constexpr int64_t SKINNY_ROWS = 64;  // up to here a weight is streamed once, panel by panel
constexpr int64_t CACHED_BYTES = 600000;

// One product: rows `first_row` .. of `count` outputs. `index` (or null) names the row of x each one reads.
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
};

// The rows a task reads, in a form mm() can take: x itself, or a gathered and zero-padded copy.
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
                   int64_t stride) {
    const int64_t column = panel * 16, n = least(panels * 16, w.n - column);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < n; i += 16) {
            vf v = loadu(c + r * ldc + i);
            if (w.bias != nullptr) v += loadu(w.bias + column + i);
            store_n(out + r * stride + column + i, v, n - i);
        }
    }
}

// Bias, rounding, and out: rows of `panels` panels of sums.
inline void write_rows(const float* c, int64_t ldc, const Weight& w, int64_t panel, int64_t panels, int64_t rows,
                       const LinearIo& io, int64_t out_row) {
    if (io.out_dtype == forebay::FP32)
        write_rows_as(c, ldc, w, panel, panels, rows, static_cast<float*>(io.out) + out_row * io.out_stride, io.out_stride);
    else
        write_rows_as(c, ldc, w, panel, panels, rows, static_cast<bf16*>(io.out) + out_row * io.out_stride, io.out_stride);
}

// Asks for the lines that write_rows will write, so that they arrive while the sums are made.
inline void expect_rows(int64_t panel, int64_t panels, int64_t rows, const LinearIo& io, int64_t out_row) {
    const int64_t size = io.out_dtype == forebay::FP32 ? 4 : 2;
    char* at = static_cast<char*>(io.out) + (out_row * io.out_stride + panel * 16) * size;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < panels * 16 * size; i += 64) __builtin_prefetch(at + r * io.out_stride * size + i, 1, 3);
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
        // The next group's weights are fetched into the second cache level a stretch a row block.
        const char* ahead = reinterpret_cast<const char*>(bp + panels * panel_stride);
        const int64_t stretch = round_up(panels * panel_stride * static_cast<int64_t>(sizeof(T)) * block / task.rows, 64);
        for (int64_t r = 0; r < task.rows; r += block) {
            const int64_t rows = least(block, task.rows - r);
            const int64_t out_row = product.first_row + task.row + r;
            if (!skinny) {
                expect_rows(task.panel + p, panels, rows, io, out_row);
                for (int64_t line = 0; line < stretch; line += 64) __builtin_prefetch(ahead + line, 0, 2);
                ahead += stretch;
            }
            mm(a + r * lda, lda, rows, bp, panel_stride, panels, w.kp, c, 16 * panels, false);
            write_rows(c, 16 * panels, w, task.panel + p, panels, rows, io, out_row);
        }
    }
}

// Quantized weights become panels of the activations' dtype in scratch, a stretch of k at a time for few rows (it stays
// in the first cache level), whole for many (each stretch is then read once a row block).
template <class T>
void run_quantized(const Product& product, const LinearTask& task, const LinearIo& io) {
    const Weight& w = *product.weight;
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

inline void run_products(Pool& pool, const std::vector<Product>& products, const LinearIo& io, int64_t dtype) {
    static thread_local std::vector<LinearTask> tasks;
    tasks.clear();
    int64_t total = 0;
    for (const Product& product : products) total += product.weight->np / 16;
    for (size_t i = 0; i < products.size(); i++) {
        const Product& product = products[i];
        const Weight& w = *product.weight;
        const bool quantized = w.kind >= forebay::INT4_G32;
        // Rows that stay in the second cache level while panels go by.
        const int64_t cached = round_up(most(128, CACHED_BYTES / (w.kp * (dtype == forebay::BF16 ? 2 : 4))), 64);
        const int64_t macro = quantized ? 1024 : product.count <= SKINNY_ROWS ? SKINNY_ROWS : cached;
        const int64_t row_tasks = ceil_div(product.count, macro), panels = w.np / 16;
        // About 16 tasks a thread over all, so that a thread that lost its core for a moment costs little.
        int64_t chunk = most(1, total * row_tasks / (16 * pool.threads()));
        chunk = product.count <= SKINNY_ROWS ? round_up(chunk, 2) : round_up(least(chunk, 16), PANEL_GROUP);
        for (int64_t row = 0; row < product.count; row += macro)
            for (int64_t panel = 0; panel < panels; panel += chunk)
                tasks.push_back({static_cast<int32_t>(i), row, least(macro, product.count - row), panel,
                                 least(chunk, panels - panel)});
    }
    const LinearTask* list = tasks.data();
    pool.parallel(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
        begin_task();
        const LinearTask& task = list[t];
        const Product& product = products[task.product];
        const bool dense = product.weight->kind <= forebay::DENSE_FP32;
        if (dtype == forebay::BF16) {
            if (dense) run_dense<bf16>(product, task, io);
            else run_quantized<bf16>(product, task, io);
        } else {
            if (dense) run_dense<float>(product, task, io);
            else run_quantized<float>(product, task, io);
        }
    });
}

inline void linear(Pool& pool, const void* raw) {
    const auto& args = *static_cast<const LinearArgs*>(raw);
    if (args.m == 0) return;
    static thread_local std::vector<Product> products;
    products.assign(1, {args.weight, nullptr, 0, args.m});
    run_products(pool, products, {args.x, args.out, args.x_stride, args.out_stride, args.out_dtype}, args.dtype);
}

inline void grouped_linear(Pool& pool, const void* raw) {
    const auto& args = *static_cast<const GroupedLinearArgs*>(raw);
    static thread_local std::vector<Product> products;
    products.clear();
    for (int64_t e = 0; e < args.experts; e++) {
        const int64_t first = args.expert_start[e], count = args.expert_start[e + 1] - first;
        if (count > 0) products.push_back({args.weights[e], args.rows, first, count});
    }
    run_products(pool, products, {args.x, args.out, args.x_stride, args.out_stride, args.out_dtype}, args.dtype);
}

}  // namespace FOREBAY_VARIANT
