// The rows and keys of one call of attention, and where they are in memory.
#pragma once
#include "abi.h"
#include "matmul.h"
#include "scratch.h"

namespace FOREBAY_VARIANT {

using forebay::AttentionArgs;

constexpr int64_t KEY_BLOCK = 64, KEY_CHUNK = 512;
constexpr float MASKED = -3e38f;  // a masked score
constexpr float FLOOR = -1e30f;   // below every real maximum, above every masked score
constexpr float LOG2E = 1.44269504f;

struct AttentionTask {
    int32_t seq, head;
    int64_t row, rows;     // of the sequence's tokens x group rows
    int64_t chunk, chunks; // key chunks this task sums
    int64_t state;         // index of its saved state, -1: it writes the output itself
};

template <class T>
class AttentionShape {
protected:
    explicit AttentionShape(const AttentionArgs& args)
        : a(args),
          group(args.q_heads / args.kv_heads),
          dim(round_up(args.dim, 32)),
          values(round_up(args.v_dim, 16)),
          factor(static_cast<float>(args.softcap > 0 ? 1.0 : args.scale) * LOG2E) {}

    const AttentionArgs& a;
    const int64_t group, dim, values;
    const float factor;

    int64_t context(int64_t seq) const { return a.context_len[seq]; }
    int64_t queries_of(int64_t seq) const { return a.query_start[seq + 1] - a.query_start[seq]; }
    int64_t position(int64_t seq, int64_t row) const { return context(seq) - queries_of(seq) + row / group; }
    int64_t first_seen(int64_t position) const { return a.window > 0 ? most(0, position - a.window + 1) : 0; }

    // A row of a task is a token of the batch and a query head.
    int64_t row_token(const AttentionTask& task, int64_t row) const { return a.query_start[task.seq] + row / group; }
    int64_t row_head(const AttentionTask& task, int64_t row) const { return task.head * group + row % group; }
    const T* query(const AttentionTask& task, int64_t row) const {
        return static_cast<const T*>(a.q) + row_token(task, row) * a.q_stride + row_head(task, row) * a.dim;
    }
    T* output(const AttentionTask& task, int64_t row) const {
        return static_cast<T*>(a.out) + row_token(task, row) * a.out_stride + row_head(task, row) * a.v_dim;
    }

    // Row of the pools that holds key `key` of the task's head.
    int64_t token_of(const int32_t* pages, const AttentionTask& task, int64_t key) const {
        return (pages[key / a.page_size] * a.kv_heads + task.head) * a.page_size + key % a.page_size;
    }

    // Prefetches the next block's keys and values into the L1 cache, one line at a time between other work: they are in other
    // pages, which the hardware does not prefetch, and a core can wait for a limited number of lines at once. After the
    // last line it starts again.
    class Ahead {
    public:
        Ahead(const AttentionShape& shape, const AttentionTask& task, int64_t key, int64_t end)
            : bytes{16 * shape.a.dim * int64_t(sizeof(T)), 16 * shape.a.v_row * int64_t(sizeof(T))} {
            const int32_t* pages = shape.a.page_table + task.seq * shape.a.max_pages;
            for (int64_t i = 0; i < KEY_BLOCK / 16; i++) {
                const int64_t token = shape.token_of(pages, task, least(key + 16 * i, end - 1) / 16 * 16);
                pieces[2 * i] = static_cast<const T*>(shape.a.k_pool) + token * shape.a.dim;
                pieces[2 * i + 1] = static_cast<const T*>(shape.a.v_pool) + token * shape.a.v_row;
            }
        }
        // Inlined, because GCC 12 removes calls of a function that does only this.
        FB_INLINE void fetch_line() {
            __builtin_prefetch(reinterpret_cast<const char*>(pieces[piece]) + at, 0, 3);
            at += 64;
            if (at >= bytes[piece % 2]) {
                at = 0;
                piece = (piece + 1) % PIECES;
            }
        }

    private:
        static constexpr int64_t PIECES = KEY_BLOCK / 8;
        const T* pieces[PIECES];
        const int64_t bytes[2];
        int64_t piece = 0, at = 0;
    };
};

}  // namespace FOREBAY_VARIANT
