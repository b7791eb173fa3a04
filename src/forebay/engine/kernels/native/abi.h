// The interface between Python and the library: one struct of 8-byte fields per operation, and the weight descriptor.
// Python packs them with struct.Struct (native_backend.py, packing.py). A change on both sides needs a new ABI_VERSION.
#pragma once
#include <cstdint>

namespace forebay {

constexpr int64_t ABI_VERSION = 5;

enum Dtype : int64_t { BF16 = 0, FP32 = 1 };

// How a weight is stored. Outputs are grouped by 16 (one vector of lanes); K is padded with zeros to a multiple of 32.
//   DENSE_BF16  [N/16][K/2][16][2] bf16
//   DENSE_FP32  [N/16][K][16] fp32
//   INT4_G32    [N/16][K/32] blocks of 256 bytes of nibbles and 16 bf16 scales
//   FP8_BLOCK   [N/16][K/32] blocks of 512 bytes of e4m3 and 16 fp32 scales
//   INT8        [N/16][K/32] blocks of 512 bytes; 16 fp32 scales per group of outputs, in `scales`
enum WeightKind : int64_t { DENSE_BF16 = 0, DENSE_FP32 = 1, INT4_G32 = 2, FP8_BLOCK = 3, INT8 = 4 };

struct Weight {
    int64_t kind;
    int64_t n, k;    // of the model
    int64_t np, kp;  // padded
    const void* data;
    const float* scales;  // INT8 only
    const float* bias;    // np values, or null
};

enum Op : int64_t {
    OP_LINEAR = 0,
    OP_GROUPED_LINEAR,
    OP_EMBED,
    OP_RMS_NORM,
    OP_ADD_RMS_NORM,
    OP_ROPE_STORE,
    OP_ATTENTION,
    OP_LATENT_STORE,
    OP_GATED,
    OP_ARGMAX,
    OP_PACK,
    OP_GATED_LINEAR,
    OP_EMBED_PACKED,
    OP_COMBINE,
    OP_EMBED_PART,
    OP_ALL_REDUCE,
    OP_GATHER_COLUMNS,
    OP_COUNT
};

struct LinearArgs {
    const Weight* weight;
    const void* x;
    void* out;
    int64_t m, x_stride, out_stride;  // strides in elements
    int64_t dtype, out_dtype;
};

// out (m, n / 2) = act(gate) * up, where [gate | up] = x @ weight.T + bias.
struct GatedLinearArgs {
    const Weight* weight;
    const void* x;
    void* out;
    int64_t m, x_stride, out_stride;
    int64_t gelu, dtype;
};

struct GroupedLinearArgs {
    const Weight* const* weights;
    const void* x;
    void* out;
    const int32_t* rows;
    const int32_t* expert_start;
    int64_t experts, x_stride, out_stride, dtype, out_dtype;
};

struct EmbedArgs {
    const void* table;
    const int32_t* tokens;
    void* out;
    int64_t m, row_bytes, vocab;
};

// As EmbedArgs, from a dense packed weight whose outputs are the tokens.
struct EmbedPackedArgs {
    const Weight* weight;
    const int32_t* tokens;
    void* out;
    int64_t m, dtype;
};

// out (m, n) fp32: for each row the sum over j, in order, of weights[j] * rows[place[j]]; place and weights are (m, k).
struct CombineArgs {
    const void* rows;
    const int64_t* place;
    const float* weights;
    float* out;
    int64_t m, k, n, dtype;
};

// This rank has rows [first, last) of the token table, plain or packed (one of table and weight is null); fp32 out.
struct EmbedPartArgs {
    const Weight* weight;
    const void* table;
    const int32_t* tokens;
    float* out;
    int64_t m, hidden, first, last, dtype;
};

// The memory that the ranks of one machine share.
struct RanksView {
    char* memory;
    int64_t rank, size, header_bytes, slot_bytes;
};

// out (count values) = the ranks' partial sums, added in rank order.
struct AllReduceArgs {
    RanksView ranks;
    const float* partial;
    void* out;
    int64_t count, out_dtype;
};

// out (m, columns) on the rank that has one = the ranks' parts (m, width <= each) side by side, `each` apart.
struct GatherColumnsArgs {
    RanksView ranks;
    const float* part;
    float* out;
    int64_t m, width, each, columns;
};

struct RmsNormArgs {
    const void* x;
    const void* weight;
    void* out;
    int64_t rows, dim, x_stride, out_stride;
    double eps;
    int64_t gemma, dtype;
    // x_stride is between groups of `inner` rows, so that heads inside a wider row can be normed in place
    int64_t inner;
};

struct AddRmsNormArgs {
    const void* x;
    void* residual;
    const void* weight;
    void* out;
    int64_t rows, dim;
    double eps;
    int64_t dtype;
};

struct RopeStoreArgs {
    void* q;
    void* k;
    const void* v;
    const void* cos;
    const void* sin;
    const int64_t* slots;
    const int32_t* positions;
    void* k_pool;
    void* v_pool;
    int64_t m, q_heads, kv_heads, dim, v_dim, rope_half, q_stride, k_stride, v_stride, page_size, dtype;
};

struct AttentionArgs {
    const void* q;
    const void* k_pool;
    const void* v_pool;
    void* out;
    const int32_t* page_table;
    const int32_t* query_start;
    const int32_t* context_len;
    int64_t num_seqs, max_pages, page_size, num_pages;
    int64_t q_heads, kv_heads, dim, v_dim, v_row, q_stride, out_stride;  // v_row: elements between tokens of v_pool
    double scale;
    double softcap;  // 0: none
    int64_t window;  // 0: none
    int64_t dtype;
};

struct LatentStoreArgs {
    const void* latent;
    const int64_t* slots;
    void* pool;
    int64_t m, stride, row_bytes;
};

struct GatedArgs {
    const void* x;
    void* out;
    int64_t m, inner, x_stride, out_stride, gelu, dtype;
};

struct ArgmaxArgs {
    const float* x;
    int64_t* out;
    int64_t m, n, stride;
};

// Packs a weight into `weight->data`. Sources: dense (N, K) of the weight's dtype; INT4 int32 (N, K/8) with scales
// bf16 (N, K/32); FP8 bytes (N, K) with scales fp32 (ceil(N/128), ceil(K/128)); INT8 bytes (N, K), scales fp32 (N).
struct PackArgs {
    const Weight* weight;
    const void* source;
    const void* scales;
};

class Pool;

struct Variant {
    const char* name;
    void (*ops[OP_COUNT])(Pool&, const void*);
};

}  // namespace forebay
